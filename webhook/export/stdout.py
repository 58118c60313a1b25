"""JSON lines on stdout, for whoever collects logs. Our own log is on stderr."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

import msgspec

from webhook.export import ExportError
from webhook.export.records import Batch, raw_reading, raw_time, raw_use

# S2's words.
READING, COMPLETED = "gpu serial number reading", "export completed"
USE: Final = "gpu use"


class StdoutExporter:
    """A line for each record and one for the batch, written at once. Stored is what the pipe has taken.

    A batch that comes again is written again: a pipe does not know what went through it.
    """

    name = "stdout"

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    async def export(self, batch: Batch) -> None:
        await asyncio.to_thread(self._write, "".join(map(as_line, lines(batch))))

    async def check(self) -> None:
        if self._stream.closed:
            raise ExportError("stdout is closed")

    async def close(self) -> None:
        """Stdout is the process's."""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as exc:
            raise ExportError(f"stdout takes nothing: {exc}") from exc


def lines(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """Every line has one `time`; the last line's is that of the latest record."""
    latest = max(
        [reading.time for reading in batch.readings] + [use.until or use.since for use in batch.uses], default=None
    )
    return [
        *({**said(READING), **raw_reading(reading)} for reading in batch.readings),
        *({**said(USE), **raw_use(use), "time": raw_time(use.until or use.since)} for use in batch.uses),
        {
            **said(COMPLETED),
            "records": batch.size,
            "batch": batch.id,
            "time": None if latest is None else raw_time(latest),
        },
    ]


def said(message: str) -> Mapping[str, str]:
    return {"level": "INFO", "msg": message, "service": "gpuid"}


def as_line(members: Mapping[str, Any]) -> str:
    return msgspec.json.encode(members).decode() + "\n"
