"""Batches waiting for a store. Bounded; kept across crashes if there is a directory."""

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

# For each kind of records. A batch of 8 GPUs takes 3 KiB, so this holds four readings of 10,000 nodes.
MAX_BYTES: Final = 128 * 1024 * 1024
# Without a directory the outbox uses the Pod's memory: up to four exporters with two outboxes each.
MAX_BYTES_IN_MEMORY: Final = 16 * 1024 * 1024
# Batches that a store refused permanently, kept for inspection.
MAX_REFUSED: Final = 100

WAITING, REFUSED, CORRUPT = ".batch", ".refused", ".torn"
FILE_NAME: Final = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.batch")


class OutboxInUseError(ExportError):
    """Another process holds the outbox; it lets go of it when it ends."""


class StoredBatch(msgspec.Struct, frozen=True):
    """The content of an outbox file."""

    taken: Annotated[datetime, msgspec.Meta(tz=True)]
    batch: Batch


@frozen
class OutboxEntry:
    """A waiting batch's metadata; its content stays in the store."""

    id: str
    name: str
    size: int
    records: int
    taken: datetime


@frozen
class Backlog:
    """How much waits for an exporter, and since when."""

    batches: int = 0
    size: int = 0
    oldest: datetime | None = None


class BatchStore(Protocol):
    """Stores contents by name."""

    def put(self, name: str, content: bytes) -> None:
        """Returns once the content is durable. Raises OSError; then nothing was stored."""

    def get(self, name: str) -> bytes:
        """Raises OSError."""

    def remove(self, name: str) -> None: ...

    def set_aside(self, name: str, suffix: str) -> None:
        """Removes the name but keeps the content for inspection, if the store outlives the process."""

    def names(self) -> Sequence[str]:
        """The stored names, oldest first."""

    def close(self) -> None: ...


class MemoryBatchStore:
    """Lost when the process ends."""

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
    """One file each, written atomically: a file that exists is complete."""

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
        """Not flushed: a file that reappears after a power loss is stored again, which changes nothing."""
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
        raise ExportError(f"the outbox cannot be kept in {directory}: it is not a directory") from exc
    except OSError as exc:
        raise directory_error(directory, exc) from exc


def directory_error(directory: Path, exc: OSError) -> ExportError:
    return ExportError(f"the outbox cannot be kept in {directory}: {exc.strerror}")


def lock_file(path: Path) -> int:
    """A descriptor that holds the lock until it is closed. Raises BlockingIOError if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Outbox:
    """The batches waiting for one exporter, in order of arrival, without duplicates. It blocks: call it in a thread.

    A caller may be cancelled while its thread continues, so a lock guards the state.
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
        """Returns once the batch is durable; False if it already was. Raises ExportError."""
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
        """Reserves a file name and space. None if the batch is already here. Writes run in parallel, outside the lock:
        a disk flushes many files in hardly more time than one."""
        with self._lock:
            if batch_id in self._entries:
                return None
            if batch_id in self._writing:
                raise ExportError(f"batch {batch_id} is already being written")
            if self._size + sum(self._writing.values()) + size > self._max_bytes:
                raise ExportError(f"the outbox is full: {self._size} of {self._max_bytes} bytes used")
            self._writing[batch_id] = size
            self._number += 1
            return f"{self._number:012d}-{hashlib.sha256(batch_id.encode()).hexdigest()[:16]}{WAITING}"

    def _finish_write(self, batch_id: str, entry: OutboxEntry | None = None) -> None:
        with self._lock:
            del self._writing[batch_id]
            if entry is not None:
                self._add_entry(entry)

    def first(self, records: int = 0) -> Sequence[tuple[OutboxEntry, Batch]]:
        """The oldest batch, and further ones while together they hold at most `records` records. Raises ExportError."""
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
        """Removes stored batches."""
        with self._lock:
            for entry in entries:
                with logged_errors(entry):
                    self._store.remove(entry.name)
                self._forget(entry)

    def refuse(self, entry: OutboxEntry) -> None:
        """Sets a batch aside that the store will never accept."""
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
        """None if the file is gone or corrupt. Raises ExportError if the disk cannot be read now; the batch stays."""
        try:
            content = self._store.get(name)
            return decoded(content), len(content)
        except FileNotFoundError:
            log.warning("outbox file is missing", file=name)
            return None
        except OSError as exc:
            raise ExportError(f"the outbox cannot be read: {name}: {exc.strerror}") from exc
        except (ValueError, RecursionError) as exc:
            log.warning("outbox file is corrupt", file=name, problem=str(exc))
            with logged_errors(name):
                self._store.set_aside(name, CORRUPT)
            return None


@contextmanager
def logged_errors(what: OutboxEntry | str) -> Iterator[None]:
    """Logs an error of the disk instead of raising it: a batch that was not removed is stored again after a restart,
    which changes nothing."""
    try:
        yield
    except OSError as exc:
        log.warning("outbox file not removed", file=what if isinstance(what, str) else what.name, problem=exc.strerror)


def encoded(stored: StoredBatch) -> bytes:
    content = msgspec.json.encode(stored)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def decoded(content: bytes) -> StoredBatch:
    """Raises ValueError if the content does not match its digest."""
    digest, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("the digest does not match")
    return msgspec.json.decode(body, type=StoredBatch)


def opener(directory: Path | None, max_bytes: int | None = None) -> Callable[[str], Outbox]:
    """Opens outboxes by name. Raises ExportError if the directory cannot be used."""
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
