"""An event loop whose clock jumps to the next timer, so that a test waits for no timeout.

For tests without sockets and processes, marked `simulated_time`. The clock stands still while a thread of the loop's
executor runs, so the work of threads does not overlap: a test of concurrent threads needs real time.
"""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Selector(selectors.SelectSelector):
    """Adds the time that it would wait to `now`."""

    now = 1_000.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (self.threads and timeout > 0):
            return super().select()
        self.now += timeout
        return super().select(0)


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._simulated = Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        self._simulated.threads += 1
        running = super().run_in_executor(executor, func, *args)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, _: object) -> None:
        self._simulated.threads -= 1
