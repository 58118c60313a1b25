"""The schedule of names, each processed once at a time, and the limit on requests."""

import asyncio

import pytest
from attrs import define

from webhook.export.schedule import Schedule
from webhook.kube.requests import RateLimit

pytestmark = pytest.mark.simulated_time


@define
class ManualClock:
    """A clock moved by the test."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


async def is_idle(schedule: Schedule) -> bool:
    try:
        async with asyncio.timeout(0.02):
            schedule.done(await schedule.take())
    except TimeoutError:
        return True
    return False


async def test_names_are_taken_once_in_order_of_due_time() -> None:
    manual_clock = ManualClock()
    schedule = Schedule(manual_clock.now)
    for name, after in (("b", 2.0), ("a", 1.0), ("c", 3.0), ("b", 5.0), ("c", 0.5)):
        schedule.put(name, after)
    assert (len(schedule), schedule.waiting) == (3, 0)
    assert await is_idle(schedule)
    manual_clock.time = 10.0
    assert schedule.waiting == 3
    assert [await schedule.take() for _ in range(3)] == ["c", "a", "b"]
    assert await is_idle(schedule)


async def test_name_is_taken_by_one_worker_at_a_time() -> None:
    manual_clock = ManualClock()
    schedule = Schedule(manual_clock.now)
    schedule.put("a")
    assert await schedule.take() == "a"
    schedule.put("a")
    assert await is_idle(schedule)
    schedule.done("a")
    assert await schedule.take() == "a"


class Counted(str):
    """A name that counts its lookups."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


async def test_waiting_workers_do_not_search_the_heap() -> None:
    """Sixteen workers wait, ten thousand names are scheduled, and fifty change."""
    manual_clock = ManualClock()
    schedule = Schedule(manual_clock.now)
    for number in range(10_000):
        schedule.put(Counted(number), 600.0)
    waiting = [asyncio.create_task(schedule.take()) for _ in range(16)]
    await asyncio.sleep(0)
    Counted.looks = 0
    for number in range(50):
        schedule.put(Counted(f"new-{number}"), 300.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 0 < Counted.looks < 5_000
    schedule.put("now")
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [one.result() for one in done] == ["now"]
    for one in rest:
        one.cancel()


async def test_name_scheduled_while_in_progress_comes_at_its_time() -> None:
    manual_clock = ManualClock()
    schedule = Schedule(manual_clock.now)
    schedule.put("a", 5.0)
    schedule.put("a")
    assert await schedule.take() == "a"
    schedule.put("a", 5.0)
    schedule.put("b", 1.0)
    schedule.done("a")
    assert await is_idle(schedule)
    manual_clock.time = 1.0
    assert await schedule.take() == "b"
    assert await is_idle(schedule)
    manual_clock.time = 5.0
    assert await schedule.take() == "a"


async def test_forgotten_name_is_not_taken() -> None:
    schedule = Schedule(ManualClock().now)
    schedule.put("a")
    schedule.forget("a")
    assert await is_idle(schedule)
    assert len(schedule) == 0


async def test_waiting_worker_wakes_up_for_a_new_name() -> None:
    schedule = Schedule(asyncio.get_running_loop().time)
    waiting = asyncio.ensure_future(schedule.take())
    await asyncio.sleep(0.01)
    schedule.put("a", 0.01)
    assert await asyncio.wait_for(waiting, 10) == "a"


async def test_rate_limit_allows_a_burst_and_then_the_rate() -> None:
    manual_clock = ManualClock()
    limit = RateLimit(0.001, 20, manual_clock.now)
    async with asyncio.timeout(60):
        for _ in range(20):
            await limit.acquire()
    loop = asyncio.get_running_loop()
    limit = RateLimit(100.0, 1, loop.time)
    began = loop.time()
    for _ in range(20):
        await limit.acquire()
    assert loop.time() - began >= 0.18
