"""Delivers every batch to every exporter. Each exporter has its own queue, so a store that is down delays only
itself."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Final, Protocol, runtime_checkable

import structlog
from attrs import evolve, field, frozen

from webhook.export import Exporter, ExportError
from webhook.export.outbox import Backlog, Outbox, OutboxEntry
from webhook.export.records import Batch, Use
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Longer than the timeouts of any exporter.
EXPORT_TIMEOUT: Final = timedelta(minutes=2)
BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(minutes=1), jitter=(0.5, 1.0))
# Ids of stored batches: a caller repeats a batch for all exporters if one of them did not take it.
MAX_STORED_IDS: Final = 4096


@frozen
class DeliveryObserver:
    """Callbacks that count the outcomes of batches."""

    stored: Callable[[str, Batch], None] = lambda exporter, batch: None
    # The batch is retried.
    failed: Callable[[str, str], None] = lambda exporter, reason: None
    # The batch is dropped: the store will never accept it.
    refused: Callable[[str, Batch, str], None] = lambda exporter, batch, reason: None


@frozen
class ExporterState:
    """The backlog of one exporter and its last error."""

    waiting: Backlog = field(factory=Backlog)
    # None once an attempt has succeeded.
    error: str | None = None

    def merged_with(self, other: "ExporterState") -> "ExporterState":
        """The states of an exporter's two queues combined."""
        mine, theirs = self.waiting, other.waiting
        oldest = min((one.oldest for one in (mine, theirs) if one.oldest is not None), default=None)
        waiting = Backlog(mine.batches + theirs.batches, mine.size + theirs.size, oldest)
        return ExporterState(waiting, self.error or other.error)


@runtime_checkable
class BatchingExporter(Protocol):
    """An exporter that accepts several batches merged into one."""

    records_at_once: int


@runtime_checkable
class PreparingExporter(Protocol):
    """An exporter with setup work that may take longer than EXPORT_TIMEOUT."""

    async def prepare(self) -> None:
        """Called before each batch. Returns at once if nothing has to be done. Raises ExportError."""


@runtime_checkable
class QueryableExporter(Protocol):
    """An exporter that can read back what it stored."""

    def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        """The stored uses without an end. Raises ExportError."""


class ExporterQueue:
    """One exporter's queue for one kind of records."""

    def __init__(
        self, exporter: Exporter, outbox: Outbox, clock: Clock, observer: DeliveryObserver, backoff: Backoff
    ) -> None:
        self.exporter = exporter
        self._outbox = outbox
        self._clock = clock
        self._observer = observer
        self._backoff = backoff
        self._at_once = exporter.records_at_once if isinstance(exporter, BatchingExporter) else 0
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._changed = asyncio.Event()
        self._finishing = asyncio.Event()
        self._last_error: str | None = None

    @property
    def state(self) -> ExporterState:
        return ExporterState(self._outbox.waiting, self._last_error)

    async def take(self, batch: Batch) -> None:
        """Raises ExportError."""
        if batch.id not in self._stored:
            await asyncio.to_thread(self._outbox.put, batch, self._clock())
            self._changed.set()

    async def run(self) -> None:
        """Runs until every batch taken before `finish` is stored."""
        failures = 0
        while await self._wait_for_batch():
            try:
                await self._deliver(await asyncio.to_thread(self._outbox.first, self._at_once))
            except ExportError as exc:
                self._record_failure(exc)
                failures += 1
                await self._pause(failures)
                if self._finishing.is_set():
                    failures = 0
            else:
                self._last_error = None
                failures = 0

    def finish(self) -> None:
        self._finishing.set()
        self._changed.set()

    async def close(self) -> None:
        await asyncio.to_thread(self._outbox.close)

    async def _wait_for_batch(self) -> bool:
        """Waits for a batch. False if the queue is empty and `finish` was called."""
        while not self._outbox.waiting.batches:
            if self._finishing.is_set():
                return False
            self._changed.clear()
            if not self._outbox.waiting.batches:
                await self._changed.wait()
        return True

    async def _deliver(self, entries: Sequence[tuple[OutboxEntry, Batch]]) -> None:
        """Exports all entries merged, or one by one if the merged batch is refused. Raises ExportError."""
        try:
            await self._export(merged([batch for _, batch in entries]))
        except ExportError as exc:
            if not exc.is_permanent:
                raise
            if len(entries) > 1:
                for one in entries:
                    await self._deliver([one])
                return
            for entry, batch in entries:
                log.warning("batch refused for good", exporter=self.exporter.name, batch=batch.id, problem=str(exc))
                await asyncio.to_thread(self._outbox.refuse, entry)
                self._remember(batch)
                self._observer.refused(self.exporter.name, batch, str(exc))
            return
        await asyncio.to_thread(self._outbox.done, [entry for entry, _ in entries])
        for _, batch in entries:
            self._remember(batch)
            self._observer.stored(self.exporter.name, batch)

    async def _export(self, batch: Batch) -> None:
        if not batch.size:
            return
        try:
            if isinstance(self.exporter, PreparingExporter):
                await self.exporter.prepare()
            async with asyncio.timeout(EXPORT_TIMEOUT.total_seconds()):
                await self.exporter.export(batch)
        except TimeoutError as exc:
            raise ExportError(f" not done within {EXPORT_TIMEOUT.total_seconds():.0f} s") from exc
        except ExportError:
            raise
        except OSError as exc:  # a fault of this machine, not of the batch
            raise ExportError(f"system error: {exc}") from exc
        except Exception as exc:  # a bug with one batch must not stop the delivery of others
            log.exception("exporting failed", exporter=self.exporter.name, batch=batch.id)
            raise ExportError(f"internal error: {type(exc).__name__}", is_permanent=True) from exc

    def _remember(self, batch: Batch) -> None:
        self._stored[batch.id] = None
        while len(self._stored) > MAX_STORED_IDS:
            self._stored.popitem(last=False)

    def _record_failure(self, exc: ExportError) -> None:
        self._last_error = str(exc)
        waiting = self._outbox.waiting.batches
        log.warning("batches not stored", exporter=self.exporter.name, problem=self._last_error, waiting=waiting)
        self._observer.failed(self.exporter.name, self._last_error)

    async def _pause(self, failures: int) -> None:
        """`finish` cuts the pause short for one more attempt; pauses after that have their full length."""
        seconds = self._backoff.seconds(failures)
        if self._finishing.is_set():
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._finishing.wait()
        except TimeoutError:
            return


class Delivery:
    """Takes batches for all exporters. Every batch that `take` accepted is stored eventually; if the outboxes have a
    directory, the next process continues."""

    def __init__(
        self,
        exporters: Sequence[Exporter],
        opened: Callable[[str], Outbox],
        clock: Clock,
        *,
        observer: DeliveryObserver | None = None,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """`opened` is `outbox.opener(directory)`. Raises ExportError if an outbox cannot be opened."""
        observer = observer or DeliveryObserver()
        self._exporters = exporters
        with ExitStack() as stack:  # if one outbox fails to open, release the locks of the others

            def open_queues(suffix: str) -> list[ExporterQueue]:
                found = []
                for one in exporters:
                    outbox = opened(one.name + suffix)
                    stack.callback(outbox.close)
                    found.append(ExporterQueue(one, outbox, clock, observer, backoff))
                return found

            # Separate queues: a store without a table for one kind still gets the other.
            self._reading_queues, self._use_queues = open_queues(""), open_queues("-use")
            stack.pop_all()
        self._queues = [*self._reading_queues, *self._use_queues]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._takes_in_progress = 0
        self._takes_done = asyncio.Event()
        self._takes_done.set()

    async def take(self, batch: Batch) -> None:
        """Returns once the batch is in the outbox of every exporter. Raises ExportError naming the exporters that
        failed. The others have the batch, and the caller may pass the same batch again."""
        if self._is_ending:
            raise ExportError("no new batches: the process is shutting down")
        parts = [(queue, evolve(batch, uses=())) for queue in self._reading_queues if batch.readings]
        parts += [(queue, evolve(batch, readings=())) for queue in self._use_queues if batch.uses]
        with self._counted_take():
            errors = await asyncio.gather(*(error_of(queue.take(part)) for queue, part in parts))
        if problems := [
            f"{queue.exporter.name}: {text}" for (queue, _), text in zip(parts, errors, strict=True) if text
        ]:
            raise ExportError("; ".join(dict.fromkeys(problems)))

    async def run(self) -> None:
        """Runs until `drain` is done. Cancelling it during `drain` does not disturb the drain."""
        self._start()
        tasks = list(self._tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not self._is_ending:
                await self._end()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def drain(self, deadline: timedelta) -> int:
        """Stops taking batches, stores what it can within the deadline, then closes the exporters. Nothing is written
        after it returns. Returns the number of batches left; they stay in the outbox for the next process."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.total_seconds()):
                await self._takes_done.wait()
                for queue in self._queues:
                    queue.finish()
                self._start()
                await asyncio.wait(self._tasks)
        await self._end()
        left = sum(queue.state.waiting.batches for queue in self._queues)
        await asyncio.gather(*(one.close() for one in self._exporters))
        await asyncio.gather(*(queue.close() for queue in self._queues))
        return left

    async def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        """Uses without an end in the stores that can be queried. Raises ExportError, also while batches for such a
        store are still waiting, because one of them may hold the end."""
        for queue in self._use_queues:
            if isinstance(queue.exporter, QueryableExporter):
                if queue.state.waiting.batches:
                    raise ExportError(f"{queue.exporter.name} has batches waiting; its open uses are read after these")
                async for use in queue.exporter.open_uses(cluster):
                    yield use

    @property
    def states(self) -> Mapping[str, ExporterState]:
        found: dict[str, ExporterState] = {}
        for queue in self._queues:
            found[queue.exporter.name] = found.get(queue.exporter.name, ExporterState()).merged_with(queue.state)
        return found

    @contextmanager
    def _counted_take(self) -> Iterator[None]:
        """`drain` waits for takes in progress: their callers may be told that the batch is safe."""
        self._takes_in_progress += 1
        self._takes_done.clear()
        try:
            yield
        finally:
            self._takes_in_progress -= 1
            if not self._takes_in_progress:
                self._takes_done.set()

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(queue.run()) for queue in self._queues]

    async def _end(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for exc in await asyncio.gather(*tasks, return_exceptions=True):
            if exc is not None and not isinstance(exc, asyncio.CancelledError):
                log.error("delivery failed", problem=repr(exc))


async def check(exporters: Sequence[Exporter], states: Mapping[str, ExporterState]) -> None:
    """Raises ExportError naming the exporters that could store nothing now, and those whose last attempt failed with
    batches waiting: a store may pass its check and still reject batches."""
    errors = await asyncio.gather(*(error_of(one.check()) for one in exporters))
    problems = {one.name: text for one, text in zip(exporters, errors, strict=True) if text}
    for name, state in states.items():
        if state.error is not None and state.waiting.batches:
            problems.setdefault(name, f"not stored: {state.error}")
    if problems:
        raise ExportError("; ".join(f"{name}: {text}" for name, text in problems.items()))


async def error_of(done: Awaitable[None]) -> str | None:
    """The error's text, or None on success."""
    try:
        await done
    except ExportError as exc:
        return str(exc)
    return None


def merged(batches: Sequence[Batch]) -> Batch:
    """Several batches as one. A single batch keeps its id."""
    if len(batches) == 1:
        return batches[0]
    digest = hashlib.sha256("\n".join(batch.id for batch in batches).encode()).hexdigest()
    return Batch(
        id=digest,
        readings=tuple(reading for batch in batches for reading in batch.readings),
        uses=tuple(use for batch in batches for use in batch.uses),
    )
