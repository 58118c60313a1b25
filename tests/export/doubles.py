"""Stores in memory that fail on request; a disk that records its flushes."""

import asyncio
import os
import threading
from pathlib import Path

from webhook.export import ExportError
from webhook.export.outbox import MemoryBatchStore
from webhook.export.records import Batch


class MemoryExporter:
    """Stores batches by id, like a store with a key; `given` counts how often each came."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self.stored: dict[str, Batch] = {}
        self.given: list[str] = []
        self.is_closed = False
        # Raised by every call while it is set.
        self.fault: ExportError | None = None
        # Ids of batches that it refuses permanently.
        self.refuses: set[str] = set()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self.is_asked = asyncio.Event()

    def freeze(self) -> None:
        self._may_go_on.clear()

    def thaw(self) -> None:
        self._may_go_on.set()

    async def export(self, batch: Batch) -> None:
        assert not self.is_closed
        self.given.append(batch.id)
        self.is_asked.set()
        await self._may_go_on.wait()
        await self.check()
        if batch.id in self.refuses:
            raise ExportError("it makes no sense", is_permanent=True)
        self.stored[batch.id] = batch

    async def check(self) -> None:
        if self.fault is not None:
            raise self.fault

    async def close(self) -> None:
        self.is_closed = True


class BatchingMemoryExporter(MemoryExporter):
    """Accepts several batches merged."""

    records_at_once = 5


class SlowBatchStore(MemoryBatchStore):
    """Delays its writes until the test allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()

    def put(self, name: str, content: bytes) -> None:
        self.is_asked.set()
        assert self.may_go_on.wait(30)
        super().put(name, content)


class WatchedDisk:
    """Records for each flush what was flushed, and the files in the directory with their sizes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.flushes: list[tuple[str, dict[str, int]]] = []

    def flush(self, descriptor: int) -> None:
        files = {one.name: one.stat() for one in self._directory.iterdir() if one.name != "lock"}
        names = {self._directory.stat().st_ino: "", **{one.st_ino: name for name, one in files.items()}}
        there = {name: one.st_size for name, one in files.items()}
        self.flushes.append((names[os.fstat(descriptor).st_ino], there))


class UnreadableBatchStore(MemoryBatchStore):
    """Fails to read for a moment, as when no file descriptor is left."""

    refusals = 0

    def get(self, name: str) -> bytes:
        if self.refusals:
            self.refusals -= 1
            raise OSError(24, "Too many open files")
        return super().get(name)
