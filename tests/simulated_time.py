"""An event loop whose clock jumps to the next timer, so that a test waits for no timeout.

For tests without sockets and processes. Threads of the loop's executor are waited for.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
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


def in_simulated_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs the test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
