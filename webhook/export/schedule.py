"""Who is to be done when, each at most once at a time."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from webhook.runtime.backoff import Backoff

# After failures, as S2: soon at first, then less and less often. A pod that is refused for good is asked rarely.
BACKOFF: Final = Backoff(timedelta(seconds=0.5), timedelta(seconds=1000))


class Schedule:
    """What is due, by name. There is one entry a name, so it is bounded by the names there are."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._due: dict[str, float] = {}
        # What is with somebody is not in it: it is entered again when it is given back.
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def waiting(self) -> int:
        """How many could begin, if there was somebody to do it."""
        now = self._now()
        return sum(at <= now and name not in self._busy for name, at in self._due.items())

    def put(self, name: str, after: float = 0.0) -> None:
        """It is due then, or when it was already, whichever is sooner."""
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
        """The next that is due and not with somebody else; waits for it. It has to be given back by `done`."""
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
        """Of what is due sooner than it was, forgotten or with somebody, until the first is none of these."""
        while self._heap:
            at, _, name = self._heap[0]
            if self._due.get(name) == at and name not in self._busy:
                return
            heapq.heappop(self._heap)

    async def _wait(self, now: float) -> None:
        """Until the first is due, or there is another. Many wait here for each that comes, so nothing is searched."""
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, self._heap[0][0] - now) if self._heap else None):
                await self._changed.wait()
        except TimeoutError:
            return
