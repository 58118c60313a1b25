"""What has been taken and is not stored yet: kept through a crash where there is a directory for it, and bounded."""

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import structlog
from attrs import frozen

from webhook.export import ExportError
from webhook.export.files import NEW, Flush, write_whole
from webhook.export.records import Batch

log = structlog.get_logger(__name__)

# Of each kind of records. A batch of 8 GPUs has 3 KiB: a fleet of 10,000 nodes for four readings.
MAX_BYTES: Final = 128 * 1024 * 1024
# Where there is no disk for it, it is a Pod's memory, which four exporters may be owed at once, two kinds each.
MAX_BYTES_IN_MEMORY: Final = 16 * 1024 * 1024
# Batches that a store has refused for good, kept for a person to look at.
MAX_REFUSED: Final = 100

WAITING, REFUSED, CORRUPT = ".batch", ".refused", ".torn"
FILE_NAME: Final = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.batch")


class OutboxInUseError(ExportError):
    """Another process works with it, and lets go of it when it ends."""


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch as it is written down."""

    taken: Annotated[datetime, msgspec.Meta(tz=True)]
    batch: Batch


@frozen
class OutboxEntry:
    """Where a batch is, and what there is to know of it without reading it."""

    id: str
    name: str
    size: int
    records: int
    taken: datetime


@frozen
class Backlog:
    """How much an exporter is owed, and since when."""

    batches: int = 0
    size: int = 0
    oldest: datetime | None = None


class BatchStore(Protocol):
    """Keeps named contents."""

    def put(self, name: str, content: bytes) -> None:
        """It is kept when this returns. Raises OSError, and then it is not."""

    def get(self, name: str) -> bytes:
        """Raises OSError."""

    def remove(self, name: str) -> None: ...

    def set_aside(self, name: str, suffix: str) -> None:
        """Not among the names any more, but there for a person to look at, if this outlives the process."""

    def names(self) -> Sequence[str]:
        """Of what is kept, the oldest first."""

    def close(self) -> None: ...


class MemoryBatchStore:
    """Ends with the process."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    def put(self, name: str, content: bytes) -> None:
        self._contents[name] = content

    def get(self, name: str) -> bytes:
        return self._contents[name]

    def remove(self, name: str) -> None:
        self._contents.pop(name, None)

    def set_aside(self, name: str, suffix: str) -> None:
        self.remove(name)

    def names(self) -> Sequence[str]:
        return sorted(self._contents)

    def close(self) -> None:
        self._contents.clear()


class DirectoryBatchStore:
    """A file each, written beside its place, flushed to the disk and renamed, so that what is there is whole."""

    def __init__(self, directory: Path, flush: Flush = os.fsync) -> None:
        """Raises ExportError."""
        self._directory = directory
        self._flush = flush
        make_directory(directory)
        try:
            self._lock = lock_file(directory / "lock")
            for unfinished in directory.glob(f"*{NEW}"):
                unfinished.unlink()
        except BlockingIOError as exc:
            raise OutboxInUseError(f"another process works with the outbox in {directory}") from exc
        except OSError as exc:
            raise directory_error(directory, exc) from exc

    def put(self, name: str, content: bytes) -> None:
        path = self._directory / name
        try:
            write_whole(path, content, self._flush)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def get(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def remove(self, name: str) -> None:
        """Not flushed: a batch that comes back after a power cut is stored once more, which changes nothing."""
        (self._directory / name).unlink(missing_ok=True)

    def set_aside(self, name: str, suffix: str) -> None:
        path = self._directory / name
        path.rename(path.with_suffix(suffix))
        aside = sorted(self._directory.glob(f"*{suffix}"))
        for old in aside[:-MAX_REFUSED]:
            old.unlink(missing_ok=True)

    def names(self) -> Sequence[str]:
        return sorted(path.name for path in self._directory.glob(f"*{WAITING}") if FILE_NAME.fullmatch(path.name))

    def close(self) -> None:
        os.close(self._lock)


def make_directory(directory: Path) -> None:
    """Raises ExportError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as exc:
        raise ExportError(f"the outbox cannot be kept in {directory}: it is no directory") from exc
    except OSError as exc:
        raise directory_error(directory, exc) from exc


def directory_error(directory: Path, exc: OSError) -> ExportError:
    return ExportError(f"the outbox cannot be kept in {directory}: {exc.strerror}")


def lock_file(path: Path) -> int:
    """A descriptor that keeps others out until it is closed. Raises BlockingIOError where another is in."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Outbox:
    """The batches that one exporter is owed, in the order they came, each once. It blocks: await it in a thread.

    Whoever waits for such a thread may be cancelled, and the thread goes on: hence the lock.
    """

    def __init__(self, store: BatchStore, max_bytes: int = MAX_BYTES) -> None:
        """Raises ExportError."""
        self._store = store
        self._max_bytes = max_bytes
        self._entries: dict[str, OutboxEntry] = {}
        self._size = 0
        self._writing: dict[str, int] = {}
        self._number = 0
        self._lock = threading.Lock()
        self.waiting = Backlog()
        for name in store.names():
            self._number = max(self._number, int(name.split("-", 1)[0]))
            found = self._read(name)
            if found is not None:
                stored, size = found
                self._add_entry(OutboxEntry(stored.batch.id, name, size, stored.batch.size, stored.taken))

    def put(self, batch: Batch, now: datetime) -> bool:
        """Kept when this returns; False if it was already. Raises ExportError where it cannot be kept."""
        stored = StoredBatch(now.astimezone(UTC), batch)
        content = encoded(stored)
        name = self._reserve(batch.id, len(content))
        if name is None:
            return False
        try:
            self._store.put(name, content)
        except OSError as exc:
            self._finish_write(batch.id)
            raise ExportError(f"the outbox cannot be written: {exc.strerror}") from exc
        self._finish_write(batch.id, OutboxEntry(batch.id, name, len(content), batch.size, stored.taken))
        return True

    def _reserve(self, batch_id: str, size: int) -> str | None:
        """A name and room for it; None if the batch is here. Writing is not done in turns: a disk flushes many files
        in hardly more time than one."""
        with self._lock:
            if batch_id in self._entries:
                return None
            if batch_id in self._writing:
                raise ExportError(f"batch {batch_id} is given twice at once")
            if self._size + sum(self._writing.values()) + size > self._max_bytes:
                raise ExportError(f"the outbox is full: {self._size} of {self._max_bytes} bytes wait")
            self._writing[batch_id] = size
            self._number += 1
            return f"{self._number:012d}-{hashlib.sha256(batch_id.encode()).hexdigest()[:16]}{WAITING}"

    def _finish_write(self, batch_id: str, entry: OutboxEntry | None = None) -> None:
        with self._lock:
            del self._writing[batch_id]
            if entry is not None:
                self._add_entry(entry)

    def first(self, records: int = 0) -> Sequence[tuple[OutboxEntry, Batch]]:
        """The oldest, and as many after it as have together no more than so many records. Raises ExportError."""
        with self._lock:
            found: list[tuple[OutboxEntry, Batch]] = []
            for entry in list(self._entries.values()):
                records -= entry.records
                if found and records < 0:
                    break
                stored = self._read(entry.name)
                if stored is None:
                    self._forget(entry)
                else:
                    found.append((entry, stored[0].batch))
            return found

    def done(self, entries: Iterable[OutboxEntry]) -> None:
        """They are stored."""
        with self._lock:
            for entry in entries:
                with logged_errors(entry):
                    self._store.remove(entry.name)
                self._forget(entry)

    def refuse(self, entry: OutboxEntry) -> None:
        """The store will never take it."""
        with self._lock:
            with logged_errors(entry):
                self._store.set_aside(entry.name, REFUSED)
            self._forget(entry)

    def close(self) -> None:
        with self._lock:
            self._store.close()

    def _add_entry(self, entry: OutboxEntry) -> None:
        self._entries[entry.id] = entry
        self._size += entry.size
        self._update_backlog()

    def _forget(self, entry: OutboxEntry) -> None:
        if self._entries.pop(entry.id, None) is not None:
            self._size -= entry.size
        self._update_backlog()

    def _update_backlog(self) -> None:
        oldest = next((entry.taken for entry in self._entries.values()), None)
        self.waiting = Backlog(len(self._entries), self._size, oldest)

    def _read(self, name: str) -> tuple[StoredBatch, int] | None:
        """None if there is nothing more to be had of it. A disk that gives nothing at this moment says nothing of the
        batch: that raises ExportError, and it stays."""
        try:
            content = self._store.get(name)
            return decoded(content), len(content)
        except FileNotFoundError:
            log.warning("batch in the outbox is gone", file=name)
            return None
        except OSError as exc:
            raise ExportError(f"the outbox cannot be read: {name}: {exc.strerror}") from exc
        except (ValueError, RecursionError) as exc:
            log.warning("batch in the outbox cannot be read", file=name, problem=str(exc))
            with logged_errors(name):
                self._store.set_aside(name, CORRUPT)
            return None


@contextmanager
def logged_errors(what: OutboxEntry | str) -> Iterator[None]:
    """A disk that does not let go of a file costs a line in the log: what comes back after a restart is stored again,
    which changes nothing."""
    try:
        yield
    except OSError as exc:
        log.warning("file of the outbox stays", file=what if isinstance(what, str) else what.name, problem=exc.strerror)


def encoded(stored: StoredBatch) -> bytes:
    content = msgspec.json.encode(stored)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def decoded(content: bytes) -> StoredBatch:
    """Raises ValueError where a byte is missing or another one."""
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("it is torn")
    return msgspec.json.decode(body, type=StoredBatch)


def opener(directory: Path | None, max_bytes: int | None = None) -> Callable[[str], Outbox]:
    """Opens an outbox by its name. Raises ExportError where there cannot be one."""
    if directory is not None:
        make_directory(directory)

    def opened(name: str) -> Outbox:
        if directory is None:
            return Outbox(MemoryBatchStore(), max_bytes or MAX_BYTES_IN_MEMORY)
        store = DirectoryBatchStore(directory / name)
        try:
            return Outbox(store, max_bytes or MAX_BYTES)
        except ExportError:
            store.close()
            raise

    return opened
