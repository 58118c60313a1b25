"""JSON lines on stdout, for whoever collects logs. Our own log is on stderr."""

import asyncio
import io
import select
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TextIO

import msgspec

from webhook.export import ExportError
from webhook.export.records import Batch, raw_reading, raw_time, raw_use

# S2's words.
READING, COMPLETED = "gpu serial number reading", "export completed"
USE: Final = "gpu use"
# How long a try that was given up waits for the pipe until it notices.
POLL_INTERVAL: Final = timedelta(milliseconds=100)


class StdoutExporter:
    """A line for each record and one for the batch, written at once. Stored is what the pipe has taken.

    A batch that comes again is written again: a pipe does not know what went through it. One that was broken off in
    this process goes on where it stopped, between two lines.
    """

    name = "stdout"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        # Which batch was broken off, and how many of its lines were written.
        self._begun = ("", 0)
        self._lock = threading.Lock()

    async def export(self, batch: Batch) -> None:
        """Whoever reads may be slow or asleep: a thread waits for it, and writes nothing once this has ended."""
        attempt = WriteAttempt(self._lock)
        try:
            await asyncio.to_thread(self._write, batch, attempt)
        finally:
            attempt.cancel()

    async def check(self) -> None:
        if self._stream.closed:
            raise ExportError("stdout is closed")

    async def close(self) -> None:
        """Stdout is the process's."""

    def _write(self, batch: Batch, attempt: "WriteAttempt") -> None:
        name, written = self._begun
        written = written if name == batch.id else 0
        try:
            for line in list(map(json_line, records_of(batch)))[written:]:
                if not attempt.write_line(self._stream, line):
                    return
                written += 1
                self._begun = (batch.id, written)
        except (OSError, ValueError) as exc:
            raise ExportError(f"stdout takes nothing: {exc}") from exc
        self._begun = ("", 0)


class WriteAttempt:
    """One try to write a batch, which can be given up from another thread."""

    def __init__(self, turn: threading.Lock) -> None:
        self._lock = turn
        self._is_cancelled = False

    def cancel(self) -> None:
        """Nothing is written after."""
        with self._lock:
            self._is_cancelled = True

    def write_line(self, stream: TextIO, line: str) -> bool:
        """Whether it did, and was not given up. A line is written when the pipe has room, so that it takes no time."""
        while True:
            is_free = has_room(stream)
            with self._lock:
                if self._is_cancelled:
                    return False
                if is_free:
                    stream.write(line)
                    stream.flush()
                    return True


def has_room(stream: TextIO) -> bool:
    """For a line of up to a page; waits a moment for it."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return True  # in memory
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(POLL_INTERVAL.total_seconds() * 1000))


def records_of(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """Every line has one `time`; the last line's is that of the latest record."""
    latest = max(
        [reading.time for reading in batch.readings] + [use.until or use.since for use in batch.uses], default=None
    )
    return [
        *({**log_fields(READING), **raw_reading(reading)} for reading in batch.readings),
        *({**log_fields(USE), **raw_use(use), "time": raw_time(use.until or use.since)} for use in batch.uses),
        {
            **log_fields(COMPLETED),
            "records": batch.size,
            "batch": batch.id,
            "time": None if latest is None else raw_time(latest),
        },
    ]


def log_fields(message: str) -> Mapping[str, str]:
    return {"level": "INFO", "msg": message, "service": "gpuid"}


def json_line(members: Mapping[str, Any]) -> str:
    return msgspec.json.encode(members).decode() + "\n"
