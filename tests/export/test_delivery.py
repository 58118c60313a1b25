"""Delivery of batches to stores that fail."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.export.doubles import BatchingMemoryExporter, MemoryExporter, SlowBatchStore, UnreadableBatchStore
from tests.export.records import NOW, batch, reading, use
from webhook.export import Exporter, ExportError
from webhook.export.delivery import Delivery, DeliveryObserver, check, merged
from webhook.export.outbox import MemoryBatchStore, Outbox, OutboxInUseError, opener
from webhook.export.records import Batch, Use
from webhook.export.stdout import StdoutExporter
from webhook.runtime.backoff import Backoff

pytestmark = pytest.mark.simulated_time

QUICK = Backoff(timedelta(milliseconds=1), timedelta(milliseconds=20))
PATIENCE = timedelta(seconds=30)


def clock() -> datetime:
    return NOW


@asynccontextmanager
async def delivering(*exporters: Exporter, directory: Path | None = None, **options: Any) -> AsyncIterator[Delivery]:
    delivery = Delivery(exporters, opener(directory), clock, **{"backoff": QUICK, **options})
    running = asyncio.create_task(delivery.run())
    try:
        yield delivery
    finally:
        running.cancel()
        await asyncio.wait([running])
        await delivery.drain(timedelta())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE.total_seconds()):
        while not is_so():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


async def test_every_exporter_gets_every_batch_once() -> None:
    first, second = MemoryExporter("first"), MemoryExporter("second")
    async with delivering(first, second) as delivery:
        for number in range(20):
            await delivery.take(batch(f"{number}"))
        await until(lambda: len(first.stored) == len(second.stored) == 20)
    assert first.given == second.given == [f"{number}" for number in range(20)]


async def test_dead_store_does_not_delay_others_and_catches_up() -> None:
    dead, well = MemoryExporter("dead"), MemoryExporter("well")
    dead.fault = ExportError("connection refused")
    async with delivering(dead, well) as delivery:
        for number in range(5):
            await delivery.take(batch(f"{number}"))
        await until(lambda: len(well.stored) == 5 and delivery.states["dead"].error is not None)
        state = delivery.states["dead"]
        assert (state.waiting.batches, state.waiting.oldest, state.error) == (5, NOW, "connection refused")
        dead.fault = None
        await until(lambda: len(dead.stored) == 5)
        assert list(dead.stored) == list(well.stored)
        await until(lambda: delivery.states["dead"].error is None)


async def test_hanging_store_does_not_delay_others() -> None:
    frozen, well = MemoryExporter("frozen"), MemoryExporter("well")
    frozen.freeze()
    async with delivering(frozen, well) as delivery:
        for number in range(5):
            await delivery.take(batch(f"{number}"))
        await until(lambda: len(well.stored) == 5)
        assert frozen.stored == {}


async def test_retries_back_off_and_never_stop() -> None:
    """In a second of failures there are only a few attempts."""
    dead = MemoryExporter()
    dead.fault = ExportError("down")
    backoff = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=200))
    async with delivering(dead, backoff=backoff) as delivery:
        await delivery.take(batch())
        begun = asyncio.get_running_loop().time()
        await until(lambda: len(dead.given) >= 8)
        # 20, 40, 80, 160, 200, 200, 200 ms, each shortened to a half at most
        assert asyncio.get_running_loop().time() - begun >= 0.45


async def test_permanently_refused_batch_does_not_block_the_next() -> None:
    store = MemoryExporter()
    store.refuses = {"bad"}
    refused: list[tuple[str, str, str]] = []
    stored: list[str] = []
    observer = DeliveryObserver(
        stored=lambda exporter, one: stored.append(one.id),
        refused=lambda exporter, one, reason: refused.append((exporter, one.id, reason)),
    )
    async with delivering(store, observer=observer) as delivery:
        for name in ("before", "bad", "after"):
            await delivery.take(batch(name))
        await until(lambda: len(stored) == 2)
    assert (stored, refused) == (["before", "after"], [("memory", "bad", "it makes no sense")])


class BuggyExporter(MemoryExporter):
    """Raises an unexpected exception for one batch."""

    async def export(self, batch: Batch) -> None:
        if batch.id == "bad":
            raise OverflowError("date value out of range")
        await super().export(batch)


async def test_batch_that_crashes_an_exporter_is_set_aside_and_the_next_is_stored(tmp_path: Path) -> None:
    refused: list[tuple[str, str, str]] = []
    observer = DeliveryObserver(refused=lambda exporter, one, reason: refused.append((exporter, one.id, reason)))
    store = BuggyExporter()
    async with delivering(store, directory=tmp_path, observer=observer) as delivery:
        for name in ("before", "bad", "after"):
            await delivery.take(batch(name))
        await until(lambda: list(store.stored) == ["before", "after"])
        assert delivery.states["memory"].error is None
    assert refused == [("memory", "bad", "internal error: OverflowError")]
    assert [one.name.split("-")[0] for one in (tmp_path / "memory").glob("*.refused")] == ["000000000002"]


async def test_batch_with_an_out_of_range_time_does_not_stop_delivery() -> None:
    """An outbox may have one from before such times were refused."""
    far = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
    stream = io.StringIO()
    async with delivering(StdoutExporter(stream)) as delivery:
        await delivery.take(Batch("far", (reading(time=far),)))
        await delivery.take(batch("next"))
        await until(lambda: '"batch":"next"' in stream.getvalue())
    assert '"batch":"far"' not in stream.getvalue()


async def test_export_is_retried_after_a_system_error() -> None:
    """For example no route or no file descriptor: the batch is not the cause."""

    class CutOffExporter(MemoryExporter):
        async def export(self, batch: Batch) -> None:
            if not self.given:
                self.given.append(batch.id)
                raise OSError(24, "Too many open files")
            await super().export(batch)

    store = CutOffExporter()
    async with delivering(store) as delivery:
        await delivery.take(batch("0"))
        await until(lambda: list(store.stored) == ["0"])
    assert store.given == ["0", "0"]


async def test_bug_in_delivery_ends_the_run_with_the_exception() -> None:
    def stored(_exporter: str, one: Batch) -> None:
        raise ZeroDivisionError(one.id)

    observer = DeliveryObserver(stored=stored)
    delivery = Delivery([MemoryExporter(), MemoryExporter("well")], opener(None), clock, observer=observer)
    await delivery.take(batch())
    with pytest.raises(ZeroDivisionError, match="batch-0"):
        async with asyncio.timeout(PATIENCE.total_seconds()):
            await delivery.run()


async def test_observer_is_called_for_each_failed_attempt() -> None:
    store, failed = MemoryExporter(), list[tuple[str, str]]()
    store.fault = ExportError("down")
    async with delivering(store, observer=DeliveryObserver(failed=lambda *what: failed.append(what))) as delivery:
        await delivery.take(batch())
        await until(lambda: len(failed) >= 3)
        assert set(failed) == {("memory", "down")}


async def test_all_batches_are_stored_after_a_temporary_read_error_of_the_outbox() -> None:
    store, batches, failed = MemoryExporter(), UnreadableBatchStore(), list[tuple[str, str]]()
    delivery = Delivery(
        [store],
        lambda name: Outbox(batches if name == "memory" else MemoryBatchStore()),
        clock,
        backoff=QUICK,
        observer=DeliveryObserver(failed=lambda *o: failed.append(o)),
    )
    for number in range(150):
        await delivery.take(batch(f"{number}"))
    batches.refusals = 1
    assert await delivery.drain(PATIENCE) == 0
    assert store.given == [f"{number}" for number in range(150)]
    assert [(name, reason.rpartition(": ")[2]) for name, reason in failed] == [("memory", "Too many open files")]


class TestBatchingExporter:
    async def test_waiting_batches_are_exported_merged(self) -> None:
        store = BatchingMemoryExporter()
        store.freeze()
        async with delivering(store) as delivery:
            await delivery.take(batch("0", gpus=2))
            await store.is_asked.wait()
            for number in range(1, 5):
                await delivery.take(batch(f"{number}", gpus=2))
            store.thaw()
            await until(lambda: sum(one.size for one in store.stored.values()) == 10)
            assert [one.size for one in store.stored.values()] == [2, 4, 4]

    async def test_only_the_batch_that_crashes_the_exporter_is_set_aside(self) -> None:
        class BuggyBatchingExporter(BatchingMemoryExporter):
            async def export(self, batch: Batch) -> None:
                if any(one.gpu == reading(7).gpu for one in batch.readings):
                    raise OverflowError
                await super().export(batch)

        store, refused = BuggyBatchingExporter(), list[str]()
        observer = DeliveryObserver(refused=lambda _, one, reason: refused.append(one.id))
        delivery = Delivery([store], opener(None), clock, backoff=QUICK, observer=observer)
        for one in (batch("0", gpus=1), Batch("bad", (reading(7),)), batch("2", gpus=1)):
            await delivery.take(one)
        assert await delivery.drain(PATIENCE) == 0
        assert (refused, list(store.stored)) == (["bad"], ["0", "2"])

    async def test_only_the_refused_batch_is_set_aside(self) -> None:
        refused: list[str] = []
        store = BatchingMemoryExporter()
        together_id = merged([batch("bad"), batch("good")]).id
        store.refuses = {"bad", together_id}
        delivery = Delivery(
            [store],
            opener(None),
            clock,
            backoff=QUICK,
            observer=DeliveryObserver(refused=lambda _, one, reason: refused.append(one.id)),
        )
        await delivery.take(batch("bad"))
        await delivery.take(batch("good"))
        assert await delivery.drain(PATIENCE) == 0
        assert (refused, list(store.stored)) == (["bad"], ["good"])


class TestTaking:
    async def test_full_outbox_is_named_and_other_exporters_have_the_batch(self, tmp_path: Path) -> None:
        dead, well = MemoryExporter("dead"), MemoryExporter("well")
        dead.fault = ExportError("down")
        delivery = Delivery([dead, well], opener(tmp_path, max_bytes=1500), clock, backoff=QUICK)
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch("0"))
        await until(lambda: len(well.stored) == 1)
        with pytest.raises(ExportError, match=r"^dead: the outbox is full: \d+ of 1500 bytes used$"):
            await delivery.take(batch("1"))
        await until(lambda: len(well.stored) == 2)
        dead.fault = None
        await until(lambda: len(dead.stored) == 1)
        await delivery.take(batch("1"))
        await until(lambda: len(dead.stored) == 2)
        running.cancel()
        await asyncio.wait([running])
        await delivery.drain(timedelta())
        assert well.given == ["0", "1"], "who had it already is not given it once more"

    async def test_take_fails_after_drain_has_begun(self) -> None:
        delivery = Delivery([MemoryExporter()], opener(None), clock)
        await delivery.drain(timedelta())
        with pytest.raises(ExportError, match="no new batches"):
            await delivery.take(batch())

    async def test_empty_batch_is_not_exported(self) -> None:
        store = MemoryExporter()
        delivery = Delivery([store], opener(None), clock)
        await delivery.take(Batch("empty"))
        assert await delivery.drain(PATIENCE) == 0
        assert store.given == []


class TestDrain:
    async def test_waiting_batches_are_stored_before_it_returns(self) -> None:
        store = MemoryExporter()
        delivery = Delivery([store], opener(None), clock)
        for number in range(10):
            await delivery.take(batch(f"{number}"))
        assert await delivery.drain(PATIENCE) == 0
        assert len(store.stored) == 10
        assert store.is_closed

    async def test_run_ends_after_drain(self) -> None:
        store = MemoryExporter()
        delivery = Delivery([store], opener(None), clock)
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch())
        assert await delivery.drain(PATIENCE) == 0
        async with asyncio.timeout(PATIENCE.total_seconds()):
            await running

    @pytest.mark.defect("gpuid-16")
    async def test_nothing_is_written_after_drain_and_remaining_batches_wait_for_the_next_process(
        self, tmp_path: Path
    ) -> None:
        frozen, well = MemoryExporter("frozen"), MemoryExporter("well")
        frozen.freeze()
        delivery = Delivery([frozen, well], opener(tmp_path), clock)
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch("0"))
        await frozen.is_asked.wait()
        await until(lambda: list(well.stored) == ["0"])
        assert await delivery.drain(timedelta(milliseconds=10)) == 1
        await asyncio.wait([running])
        frozen.thaw()
        await asyncio.sleep(0)
        assert (frozen.stored, list(well.stored)) == ({}, ["0"])

        heir = MemoryExporter("frozen")
        async with delivering(heir, directory=tmp_path):
            await until(lambda: list(heir.stored) == ["0"])

    async def test_batch_being_taken_is_stored_too(self) -> None:
        store, batches = MemoryExporter(), SlowBatchStore()
        delivery = Delivery([store], lambda name: Outbox(batches if name == "memory" else MemoryBatchStore()), clock)
        taking = asyncio.create_task(delivery.take(batch()))
        await asyncio.to_thread(batches.is_asked.wait, 30)
        draining = asyncio.create_task(delivery.drain(PATIENCE))
        await asyncio.sleep(0)
        batches.may_go_on.set()
        await taking
        assert await draining == 0
        assert list(store.stored) == ["batch-0"]

    async def test_run_ends_without_error_when_batches_are_left(self) -> None:
        store = MemoryExporter()
        store.fault = ExportError("down")
        delivery = Delivery([store], opener(None), clock, backoff=QUICK)
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch())
        assert await delivery.drain(timedelta(milliseconds=10)) == 1
        async with asyncio.timeout(PATIENCE.total_seconds()):
            await running

    async def test_drain_tries_a_dead_store_once_more_and_ends_at_the_deadline(self) -> None:
        store = MemoryExporter()
        store.fault = ExportError("down")
        delivery = Delivery([store], opener(None), clock, backoff=Backoff(timedelta(hours=1), timedelta(hours=1)))
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch())
        await store.is_asked.wait()
        store.is_asked.clear()
        store.fault = None
        assert await delivery.drain(PATIENCE) == 0
        assert list(store.stored) == ["batch-0"]
        await asyncio.wait([running])


@pytest.mark.defect("gpuid-15")
async def test_check_names_the_stores_that_fail() -> None:
    dead, well = MemoryExporter("dead"), MemoryExporter("well")
    async with delivering(dead, well) as delivery:
        await check([dead, well], delivery.states)
        dead.fault = ExportError("connection refused")
        with pytest.raises(ExportError, match=r"^dead: connection refused$"):
            await check([dead, well], delivery.states)


class AnsweringExporter(MemoryExporter):
    """Answers, but refuses records without a table."""

    has_readings = has_uses = True

    async def export(self, batch: Batch) -> None:
        if (batch.readings and not self.has_readings) or (batch.uses and not self.has_uses):
            raise ExportError("permission denied")
        await super().export(batch)


@pytest.mark.defect("gpuid-15")
async def test_check_fails_while_a_store_answers_but_stores_nothing() -> None:
    store = AnsweringExporter("store")
    store.has_readings = False
    async with delivering(store) as delivery:
        await check([store], delivery.states)
        await delivery.take(batch("0"))
        await until(lambda: delivery.states["store"].error is not None)
        with pytest.raises(ExportError, match=r"^store: not stored: permission denied$"):
            await check([store], delivery.states)
        store.has_readings = True
        await until(lambda: list(store.stored) == ["0"])
        await until(lambda: delivery.states["store"].error is None)
        await check([store], delivery.states)


async def test_rejected_uses_do_not_delay_readings() -> None:
    store = AnsweringExporter("store")
    store.has_uses = False
    async with delivering(store) as delivery:
        await delivery.take(Batch("use", uses=(use(),)))
        await until(lambda: delivery.states["store"].error is not None)
        await delivery.take(batch("0"))
        await delivery.take(batch("both", uses=(use(1),)))
        await until(lambda: list(store.stored) == ["0", "both"])
        assert store.stored["both"] == batch("both")
        await until(lambda: delivery.states["store"].waiting.batches == 2)
        with pytest.raises(ExportError, match=r"^store: not stored: permission denied$"):
            await check([store], delivery.states)
        store.has_uses = True
        await until(lambda: store.stored.get("both") == Batch("both", uses=(use(1),)))
        assert store.stored["use"].uses == (use(),)


class RememberingExporter(AnsweringExporter):
    async def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        for one in self.stored.values():
            for found in one.uses:
                if found.cluster == cluster and found.until is None:
                    yield found


async def test_open_uses_are_read_after_waiting_batches_are_stored() -> None:
    store, deaf = RememberingExporter("store"), MemoryExporter("deaf")
    async with delivering(deaf, store) as delivery:
        await delivery.take(Batch("0", uses=(use(0), use(1, cluster="another"))))
        await until(lambda: not delivery.states["store"].waiting.batches)
        assert [one async for one in delivery.open_uses("prod")] == [use(0)]
        store.has_uses = False
        await delivery.take(Batch("1", uses=(use(2),)))
        with pytest.raises(ExportError, match="store has batches waiting"):
            assert [one async for one in delivery.open_uses("prod")]


async def test_locked_outbox_does_not_leave_other_outboxes_locked(tmp_path: Path) -> None:
    taken = opener(tmp_path)("second-use")
    exporters = [MemoryExporter("first"), MemoryExporter("second")]
    with pytest.raises(OutboxInUseError):
        Delivery(exporters, opener(tmp_path), clock)
    taken.close()
    assert await Delivery(exporters, opener(tmp_path), clock).drain(PATIENCE) == 0


@pytest.mark.defect("gpuid-17")
async def test_same_reading_taken_by_two_processes_is_one_batch(tmp_path: Path) -> None:
    """After a failover both processes take it, and a store with a key has it once."""
    old, new = MemoryExporter("store"), MemoryExporter("store")
    new.stored = old.stored
    for process in (old, new):
        delivery = Delivery([process], opener(tmp_path), clock)
        await delivery.take(batch())
        assert await delivery.drain(PATIENCE) == 0
    assert [*old.given, *new.given] == ["batch-0", "batch-0"]
    assert list(new.stored) == ["batch-0"]


def test_merged_batches_have_all_records_and_an_id_of_their_own() -> None:
    several: Sequence[Batch] = [batch("0"), Batch("1", (reading(7),))]
    whole = merged(several)
    assert whole.readings == (reading(0), reading(1), reading(7))
    assert whole.id not in {"0", "1"}
    assert merged(several) == whole
    assert merged(several[:1]) is several[0]
