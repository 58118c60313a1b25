"""What processes have in common besides their work: they stop when told to, and no failed pass ends them."""

import asyncio
import ctypes
import signal
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)


# Of glibc's mallopt. From this size on a block has pages of its own, which go back to the system when it is freed.
M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 2**17


def hand_back_memory() -> None:
    """Have large blocks go back when they are freed.

    By default glibc raises the threshold to the size of the largest block that was freed. Then the memory of a flood of
    bodies stays with the process.
    """
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


class Stepping(Protocol):
    """What is done a step a pass."""

    async def step(self) -> None: ...


def stop_signal() -> asyncio.Event:
    """Set by SIGTERM or SIGINT from now on."""
    stop = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stop.set)
    return stop


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Does the work until it is told to stop; raises what the work raises."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    done, pending = await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


async def passes(parts: Sequence[Stepping], news: asyncio.Event, *, pause: float, breath: float) -> None:
    """For ever: one after another, the next as soon as there is news, and after a pause at the latest."""
    while True:
        news.clear()
        await one_pass(*parts)
        await rest(news, pause, breath)


async def one_pass(*parts: Stepping) -> None:
    """A bug in one pass must not end them all: the Lease would be held on, and nobody would act."""
    for part in parts:
        try:
            await part.step()
        except Exception:
            log.exception("a pass failed")


async def rest(news: asyncio.Event, pause: float, breath: float) -> None:
    """Until something has happened, and what comes with it is there as well; or for a while."""
    with suppress(TimeoutError):
        async with asyncio.timeout(pause):  # and not `wait_for`, which loses a cancellation that comes with the news
            await news.wait()
    await asyncio.sleep(breath)
