"""A queue of names with due times. Each name is processed at most once at a time."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from webhook.runtime.backoff import Backoff

# gpuid's backoff after failures. A pod that always fails is retried rarely.
BACKOFF: Final = Backoff(timedelta(seconds=0.5), timedelta(seconds=1000))


class Schedule:
    """Names and when they are due, one entry each."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._due: dict[str, float] = {}
        # Names in progress are not in the heap; `done` puts them back.
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def waiting(self) -> int:
        """The number of names that are due and not in progress."""
        now = self._now()
        return sum(at <= now and name not in self._busy for name, at in self._due.items())

    def put(self, name: str, after: float = 0.0) -> None:
        """Schedules the name, or moves it earlier if it is already scheduled."""
        at = self._now() + after
        if name in self._due and self._due[name] <= at:
            return
        self._due[name] = at
        if name not in self._busy:
            self._push(name)

    def _push(self, name: str) -> None:
        heapq.heappush(self._heap, (self._due[name], next(self._numbers), name))
        self._changed.set()

    def forget(self, name: str) -> None:
        self._due.pop(name, None)

    async def take(self) -> str:
        """Waits for the next due name and marks it as in progress. The caller calls `done` afterwards."""
        while True:
            now = self._now()
            self._drop_stale()
            if self._heap and self._heap[0][0] <= now:
                name = heapq.heappop(self._heap)[2]
                del self._due[name]
                self._busy.add(name)
                return name
            await self._wait(now)

    def done(self, name: str) -> None:
        self._busy.discard(name)
        if name in self._due:
            self._push(name)

    def _drop_stale(self) -> None:
        """Removes outdated entries from the top of the heap: rescheduled, forgotten or in progress."""
        while self._heap:
            at, _, name = self._heap[0]
            if self._due.get(name) == at and name not in self._busy:
                return
            heapq.heappop(self._heap)

    async def _wait(self, now: float) -> None:
        """Waits until the first entry is due or the heap changes. Many tasks wake up, so it only looks at the first."""
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, self._heap[0][0] - now) if self._heap else None):
                await self._changed.wait()
        except TimeoutError:
            return
