"""Signals, control loops and memory settings that all commands share."""

import asyncio
import ctypes
import signal
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)


# Parameter of glibc's mallopt. A block of at least this size gets its own pages, which free() returns to the system.
M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 2**17
# Concurrent actions, within what the API server accepts.
AT_ONCE = 32


def return_freed_memory() -> None:
    """Make glibc return large blocks to the system when they are freed.

    By default glibc raises the threshold to the size of the largest freed block. The process would then keep the memory
    of a burst of request bodies.
    """
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


class Steppable(Protocol):
    """A part of a control loop. The loop calls `step` once per pass."""

    async def step(self) -> None: ...


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run the work until it ends or `stop` is set. Raises the exceptions of the work."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    done, pending = await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait(pending)
    for task in done:
        task.result()


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that are not done, and wait until they have ended."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def run_concurrently(actions: Iterable[Awaitable[None]], at_once: int = AT_ONCE) -> None:
    """Await all actions, `at_once` of them at the same time. Each is taken from the iterable when its turn comes. An
    exception of an action is raised when no other action is running any more."""
    remaining = iter(actions)

    async def work() -> None:
        for action in remaining:
            await action

    ended = await asyncio.gather(*(work() for _ in range(at_once)), return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one


async def run_passes(parts: Sequence[Steppable], changed: asyncio.Event, *, interval: float, debounce: float) -> None:
    """Run passes forever. The next pass starts after `changed` is set, or after `interval` seconds at the latest."""
    while True:
        changed.clear()
        await run_pass(*parts)
        await wait_for_change(changed, interval, debounce)


async def run_pass(*parts: Steppable) -> None:
    """Run one step of each part. A failed step is logged: if it ended the loop, the process would keep the Lease but do
    nothing."""
    for part in parts:
        try:
            await part.step()
        except Exception:
            log.exception("a pass failed")


async def wait_for_change(changed: asyncio.Event, interval: float, debounce: float) -> None:
    """Wait until `changed` is set, for `interval` seconds at most. Then wait `debounce` seconds, so that one pass
    handles changes that arrive together."""
    with suppress(TimeoutError):
        # Not `wait_for`: it loses a cancellation that arrives at the moment the event is set.
        async with asyncio.timeout(interval):
            await changed.wait()
    await asyncio.sleep(debounce)
