"""Who is to be done when, each at most once at a time."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Final

# After failures, as S2: soon at first, then less and less often. A pod that is refused for good is asked rarely.
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 1000.0


class Turns:
    """What is due, by name. There is one entry a name, so it is bounded by the names there are."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._news = asyncio.Event()

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
        heapq.heappush(self._heap, (at, next(self._numbers), name))
        self._news.set()

    def forget(self, name: str) -> None:
        self._due.pop(name, None)

    async def take(self) -> str:
        """The next that is due and not with somebody else; waits for it. It has to be given back by `done`."""
        while True:
            now = self._now()
            aside = []
            found = None
            while self._heap and self._heap[0][0] <= now and found is None:
                at, number, name = heapq.heappop(self._heap)
                if self._due.get(name) != at:
                    continue
                if name in self._busy:
                    aside.append((at, number, name))
                else:
                    found = name
            for one in aside:
                heapq.heappush(self._heap, one)
            if found is not None:
                del self._due[found]
                self._busy.add(found)
                return found
            await self._rest(now)

    def done(self, name: str) -> None:
        self._busy.discard(name)
        self._news.set()

    async def _rest(self, now: float) -> None:
        self._news.clear()
        free = [at for at, _, name in self._heap if name not in self._busy]
        try:
            async with asyncio.timeout(max(0.0, min(free) - now) if free else None):
                await self._news.wait()
        except TimeoutError:
            return


def pause_after(failures: int) -> float:
    return float(min(FIRST_PAUSE * 2 ** min(failures - 1, 20), LONGEST_PAUSE))
