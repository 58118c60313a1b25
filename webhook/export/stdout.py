"""JSON lines on stdout for log collectors. The process's own log goes to stderr."""

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

# gpuid's messages.
READING, COMPLETED = "gpu serial number reading", "export completed"
USE: Final = "gpu use"
# How often a waiting write checks whether it was cancelled.
POLL_INTERVAL: Final = timedelta(milliseconds=100)


class StdoutExporter:
    """Writes a line for each record and one for the batch. A batch is stored once the pipe has taken all its lines.

    A repeated batch is written again: the exporter cannot ask the pipe. A batch that was interrupted in this process
    continues at the line where it stopped.
    """

    name = "stdout"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        # The interrupted batch and how many of its lines were written.
        self._begun = ("", 0)
        self._lock = threading.Lock()

    async def export(self, batch: Batch) -> None:
        """Writes in a thread, because the reader may be slow. Nothing is written after it returns or is cancelled."""
        attempt = WriteAttempt(self._lock)
        try:
            await asyncio.to_thread(self._write, batch, attempt)
        finally:
            attempt.cancel()

    async def check(self) -> None:
        if self._stream.closed:
            raise ExportError("stdout is closed")

    async def close(self) -> None:
        """Stdout stays open: it belongs to the process."""

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
            raise ExportError(f"cannot write to stdout: {exc}") from exc
        self._begun = ("", 0)


class WriteAttempt:
    """One attempt to write a batch. Another thread can cancel it."""

    def __init__(self, turn: threading.Lock) -> None:
        self._lock = turn
        self._is_cancelled = False

    def cancel(self) -> None:
        """Nothing is written after it returns."""
        with self._lock:
            self._is_cancelled = True

    def write_line(self, stream: TextIO, line: str) -> bool:
        """False if the attempt was cancelled. Writes only when the pipe has room, so a write never blocks."""
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
    """Waits up to POLL_INTERVAL for room for a line of up to one page."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return True  # in memory
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(POLL_INTERVAL.total_seconds() * 1000))


def records_of(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """Every line has a `time`; the last line has the time of the latest record."""
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
