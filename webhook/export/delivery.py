"""Brings every batch to every exporter, each at its own pace: a store that is down holds up nobody but itself."""

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

# Every try is longer than what an exporter allows itself.
LIMIT: Final = timedelta(minutes=2)
BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(minutes=1), jitter=(0.5, 1.0))
# Of an exporter that has what it was given, and is given it once more because another did not take it.
REMEMBERED: Final = 4096


@frozen
class DeliveryObserver:
    """Who counts what becomes of batches."""

    stored: Callable[[str, Batch], None] = lambda exporter, batch: None
    # It is tried again.
    failed: Callable[[str, str], None] = lambda exporter, reason: None
    # It is not: the store will never take it.
    refused: Callable[[str, Batch, str], None] = lambda exporter, batch, reason: None


@frozen
class ExporterState:
    """How it stands with one exporter."""

    waiting: Backlog = field(factory=Backlog)
    # Why the last try failed; None once one has succeeded.
    error: str | None = None

    def with_also(self, other: "ExporterState") -> "ExporterState":
        """Of two kinds of records as one."""
        mine, theirs = self.waiting, other.waiting
        oldest = min((one.oldest for one in (mine, theirs) if one.oldest is not None), default=None)
        waiting = Backlog(mine.batches + theirs.batches, mine.size + theirs.size, oldest)
        return ExporterState(waiting, self.error or other.error)


@runtime_checkable
class Gathering(Protocol):
    """An exporter that would rather take many batches at once, and does not mind how they are put together."""

    records_at_once: int


@runtime_checkable
class Preparing(Protocol):
    """An exporter that has something to do first, which may take longer than any try."""

    async def prepare(self) -> None:
        """Before each batch; nothing if all is as it should be. Raises ExportError."""


@runtime_checkable
class Remembering(Protocol):
    """An exporter that can be asked what it was told."""

    def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        """Those that it has no end of. Raises ExportError."""


class ExporterQueue:
    """One exporter and what it is owed of one kind of records."""

    def __init__(
        self, exporter: Exporter, outbox: Outbox, clock: Clock, heard: DeliveryObserver, backoff: Backoff
    ) -> None:
        self.exporter = exporter
        self._outbox = outbox
        self._clock = clock
        self._heard = heard
        self._backoff = backoff
        self._at_once = exporter.records_at_once if isinstance(exporter, Gathering) else 0
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._news = asyncio.Event()
        self._last_orders = asyncio.Event()
        self._error: str | None = None

    @property
    def state(self) -> ExporterState:
        return ExporterState(self._outbox.waiting, self._error)

    async def take(self, batch: Batch) -> None:
        """Raises ExportError."""
        if batch.id not in self._stored:
            await asyncio.to_thread(self._outbox.put, batch, self._clock())
            self._news.set()

    async def run(self) -> None:
        """Until all is stored that was taken before `finish`."""
        failures = 0
        while await self._is_update_pending():
            try:
                await self._deliver(await asyncio.to_thread(self._outbox.first, self._at_once))
            except ExportError as exc:
                self._note(exc)
                failures += 1
                await self._rest(failures)
                if self._last_orders.is_set():
                    failures = 0
            else:
                self._error = None
                failures = 0

    def finish(self) -> None:
        self._last_orders.set()
        self._news.set()

    async def close(self) -> None:
        await asyncio.to_thread(self._outbox.close)

    async def _is_update_pending(self) -> bool:
        """Waits for a batch; False if there is none and none will come."""
        while not self._outbox.waiting.batches:
            if self._last_orders.is_set():
                return False
            self._news.clear()
            if not self._outbox.waiting.batches:
                await self._news.wait()
        return True

    async def _deliver(self, entries: Sequence[tuple[OutboxEntry, Batch]]) -> None:
        """All of them at once, or one by one where one among them is refused. Raises ExportError."""
        try:
            await self._export(together([batch for _, batch in entries]))
        except ExportError as exc:
            if not exc.is_lasting:
                raise
            if len(entries) > 1:
                for one in entries:
                    await self._deliver([one])
                return
            for entry, batch in entries:
                log.warning("batch refused for good", exporter=self.exporter.name, batch=batch.id, problem=str(exc))
                await asyncio.to_thread(self._outbox.refuse, entry)
                self._remember(batch)
                self._heard.refused(self.exporter.name, batch, str(exc))
            return
        await asyncio.to_thread(self._outbox.done, [entry for entry, _ in entries])
        for _, batch in entries:
            self._remember(batch)
            self._heard.stored(self.exporter.name, batch)

    async def _export(self, batch: Batch) -> None:
        if not batch.size:
            return
        try:
            if isinstance(self.exporter, Preparing):
                await self.exporter.prepare()
            async with asyncio.timeout(LIMIT.total_seconds()):
                await self.exporter.export(batch)
        except TimeoutError as exc:
            raise ExportError(f"no end after {LIMIT.total_seconds():.0f} s") from exc
        except ExportError:
            raise
        except OSError as exc:  # of the system that we run on, so no matter of this batch
            raise ExportError(f"the system refuses: {exc}") from exc
        except Exception as exc:  # a bug with one batch must not end the delivery of all others
            log.exception("exporting failed", exporter=self.exporter.name, batch=batch.id)
            raise ExportError(f"a bug: {type(exc).__name__}", is_lasting=True) from exc

    def _remember(self, batch: Batch) -> None:
        self._stored[batch.id] = None
        while len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)

    def _note(self, exc: ExportError) -> None:
        self._error = str(exc)
        waiting = self._outbox.waiting.batches
        log.warning("batches not stored", exporter=self.exporter.name, problem=self._error, waiting=waiting)
        self._heard.failed(self.exporter.name, self._error)

    async def _rest(self, failures: int) -> None:
        """Cut short by the end, for one more try; from then on as long as ever."""
        seconds = self._backoff.seconds(failures)
        if self._last_orders.is_set():
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._last_orders.wait()
        except TimeoutError:
            return


class Delivery:
    """Takes batches for all exporters. What `take` returned for is stored in time, also by the next process if there
    is a directory for the outboxes."""

    def __init__(
        self,
        exporters: Sequence[Exporter],
        opened: Callable[[str], Outbox],
        clock: Clock,
        *,
        heard: DeliveryObserver | None = None,
        backoff: Backoff = BACKOFF,
    ) -> None:
        """`opened` is `outbox.opener(directory)`. Raises ExportError where an outbox cannot be kept."""
        heard = heard or DeliveryObserver()
        self._exporters = exporters
        with ExitStack() as stack:  # one that cannot be opened must not keep the others from whoever comes next

            def lanes(suffix: str) -> list[ExporterQueue]:
                found = []
                for one in exporters:
                    outbox = opened(one.name + suffix)
                    stack.callback(outbox.close)
                    found.append(ExporterQueue(one, outbox, clock, heard, backoff))
                return found

            # A store that has no place for the one kind holds up nothing of the other.
            self._readings, self._uses = lanes(""), lanes("-use")
            stack.pop_all()
        self._lanes = [*self._readings, *self._uses]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False
        self._being_taken = 0
        self._all_taken = asyncio.Event()
        self._all_taken.set()

    async def take(self, batch: Batch) -> None:
        """Kept for every exporter when this returns. Raises ExportError that names those that it could not be kept
        for; the others have it, and the same batch may be given again."""
        if self._is_ending:
            raise ExportError("nothing is taken any more: the process is ending")
        given = [(lane, evolve(batch, uses=())) for lane in self._readings if batch.readings]
        given += [(lane, evolve(batch, readings=())) for lane in self._uses if batch.uses]
        with self._taking():
            said = await asyncio.gather(*(said_by(lane.take(part)) for lane, part in given))
        if problems := [f"{lane.exporter.name}: {text}" for (lane, _), text in zip(given, said, strict=True) if text]:
            raise ExportError("; ".join(dict.fromkeys(problems)))

    async def run(self) -> None:
        """For ever, or until `drain` is through. Whoever cancels it while that goes on does not disturb it."""
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
        """Take nothing more, store what can be within the deadline, close the exporters. How many batches are left:
        they wait in the outbox for the next process. Nothing is written from then on."""
        self._is_ending = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.total_seconds()):
                await self._all_taken.wait()
                for lane in self._lanes:
                    lane.finish()
                self._start()
                await asyncio.wait(self._tasks)
        await self._end()
        left = sum(lane.state.waiting.batches for lane in self._lanes)
        await asyncio.gather(*(one.close() for one in self._exporters))
        await asyncio.gather(*(lane.close() for lane in self._lanes))
        return left

    async def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        """Those that the stores have no end of, as far as stores can be asked. Raises ExportError, also while such a
        store is owed something: that may be the end."""
        for lane in self._uses:
            if isinstance(lane.exporter, Remembering):
                if lane.state.waiting.batches:
                    raise ExportError(f"{lane.exporter.name} is asked what it knows once it has what waits for it")
                async for use in lane.exporter.open_uses(cluster):
                    yield use

    @property
    def states(self) -> Mapping[str, ExporterState]:
        found: dict[str, ExporterState] = {}
        for lane in self._lanes:
            found[lane.exporter.name] = found.get(lane.exporter.name, ExporterState()).with_also(lane.state)
        return found

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """What is half taken when the end begins is waited for: whoever gave it may be told that it is kept."""
        self._being_taken += 1
        self._all_taken.clear()
        try:
            yield
        finally:
            self._being_taken -= 1
            if not self._being_taken:
                self._all_taken.set()

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(lane.run()) for lane in self._lanes]

    async def _end(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for exc in await asyncio.gather(*tasks, return_exceptions=True):
            if exc is not None and not isinstance(exc, asyncio.CancelledError):
                log.error("delivery broke off", problem=repr(exc))


async def check(exporters: Sequence[Exporter], states: Mapping[str, ExporterState]) -> None:
    """Raises ExportError that names those that could store nothing at this moment, and those that have not stored what
    waits for them: a store may answer and take nothing."""
    said = await asyncio.gather(*(said_by(one.check()) for one in exporters))
    problems = {one.name: text for one, text in zip(exporters, said, strict=True) if text}
    for name, state in states.items():
        if state.error is not None and state.waiting.batches:
            problems.setdefault(name, f"not stored: {state.error}")
    if problems:
        raise ExportError("; ".join(f"{name}: {text}" for name, text in problems.items()))


async def said_by(done: Awaitable[None]) -> str | None:
    """Why it could not be done."""
    try:
        await done
    except ExportError as exc:
        return str(exc)
    return None


def together(batches: Sequence[Batch]) -> Batch:
    """Several as one; one stays itself."""
    if len(batches) == 1:
        return batches[0]
    digest = hashlib.sha256("\n".join(batch.id for batch in batches).encode()).hexdigest()
    return Batch(
        id=digest,
        readings=tuple(reading for batch in batches for reading in batch.readings),
        uses=tuple(use for batch in batches for use in batch.uses),
    )
