"""Round-robin by namespace: a namespace with many queued pods gets one turn in each round, as every other namespace."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from datetime import datetime

# The creation time, and an id for members of the same second.
Arrival = tuple[datetime, str]


class RoundRobin:
    """Each namespace has one turn in a round. Within a namespace the order is the order of arrival.

    A member's round is one more than the round of the member before it in its namespace, but at least the round that
    had been reached when the member arrived. So a later member never goes before the first member of a namespace, and a
    namespace that arrives with many members has one of them in each round. No rounds are stored: a restarted process
    counts from the current members, and a namespace may get one extra turn.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Arrival]] = {}
        self._floors: dict[str, int] = {}
        """By id: the earliest round of the member."""
        self._reached = 0
        self._order: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self._floors)

    def put(self, namespace: str, arrival: Arrival) -> None:
        insort(self._queues.setdefault(namespace, []), arrival)
        self._floors[arrival[1]] = self._reached
        self._order = None

    def drop(self, namespace: str, arrival: Arrival, *, was_served: bool = False) -> None:
        """Remove a member. If it was served, it used the turn of its namespace."""
        queue = self._queues[namespace]
        index = bisect_left(queue, arrival)
        floor = self._floors[arrival[1]]
        if was_served:
            floor = next(number for number, member in self._rounds(queue) if member == arrival) + 1
            self._reached = max(self._reached, floor)
        del queue[index], self._floors[arrival[1]]
        if index < len(queue):
            following = queue[index][1]
            self._floors[following] = max(self._floors[following], floor)
        if not queue:
            del self._queues[namespace]
        self._order = None

    def order(self) -> tuple[str, ...]:
        """The ids in serving order."""
        if self._order is None:
            members = (member for queue in self._queues.values() for member in self._rounds(queue))
            self._order = tuple(uid for _, (_, uid) in sorted(members))
        return self._order

    def _rounds(self, queue: list[Arrival]) -> Iterator[tuple[int, Arrival]]:
        number = 0
        for arrival in queue:
            number = max(number, self._floors[arrival[1]])
            yield number, arrival
            number += 1
