"""Turns that go round by namespace: who has many pods in a line takes one turn in a round, as everybody else does."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from datetime import datetime

# When it came, and an id for those of one second.
Arrival = tuple[datetime, str]


class RoundRobin:
    """Each namespace has one turn in a round; within a namespace the order is that of coming.

    A member's round is one more than that of the member before it in its namespace, and no earlier than the round that
    the service had reached when the member came. So nobody who comes later goes before the first of a namespace, and a
    namespace that comes with many members has one of them in each round. Nothing is stored: whoever begins anew counts
    from the members that are there, and a namespace may have one turn more than its own.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Arrival]] = {}
        self._floors: dict[str, int] = {}
        """By id: the round before which the member has no turn."""
        self._reached = 0
        self._order: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self._floors)

    def put(self, namespace: str, turn: Arrival) -> None:
        insort(self._queues.setdefault(namespace, []), turn)
        self._floors[turn[1]] = self._reached
        self._order = None

    def drop(self, namespace: str, turn: Arrival, *, was_served: bool = False) -> None:
        """A turn that was taken counts for its namespace; one that was given up does not."""
        queue = self._queues[namespace]
        place = bisect_left(queue, turn)
        floor = self._floors[turn[1]]
        if was_served:
            floor = next(number for number, member in self._rounds(queue) if member == turn) + 1
            self._reached = max(self._reached, floor)
        del queue[place], self._floors[turn[1]]
        if place < len(queue):
            following = queue[place][1]
            self._floors[following] = max(self._floors[following], floor)
        if not queue:
            del self._queues[namespace]
        self._order = None

    def order(self) -> tuple[str, ...]:
        """The ids, whose turn is first first."""
        if self._order is None:
            members = (member for queue in self._queues.values() for member in self._rounds(queue))
            self._order = tuple(uid for _, (_, uid) in sorted(members))
        return self._order

    def _rounds(self, queue: list[Arrival]) -> Iterator[tuple[int, Arrival]]:
        number = 0
        for turn in queue:
            number = max(number, self._floors[turn[1]])
            yield number, turn
            number += 1
