"""The lines in which claims wait: whose turn it is among those that want the same devices.

First come, first served holds per kind: all that a claim asks for but how many. So a claim for eight GPUs is not
overtaken for ever by claims for one of the same kind, and one that nothing can be had for holds nobody up.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from datetime import datetime

from attrs import field, frozen

from webhook.core.claim import Claim
from webhook.core.gpu_map import MapEntry, SetId
from webhook.core.nodes_asked import NodesAsked
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, ReservationId
from webhook.core.verdict import Deny

# Begins the ids of reservations that are made for pods in the lines. A review's uid never begins so.
OWN_IDS = "pod-"


def reservation_id_of(pod: PodIdentity) -> ReservationId:
    """Follows from the pod's uid, so that whoever comes after a stop finds what was reserved before it."""
    return ReservationId(f"{OWN_IDS}{pod.uid}")


@frozen(cache_hash=True)
class Kind:
    """What claims of a kind agree in: they can be served from the same devices."""

    hashes: frozenset[str]
    requirements: frozenset[str]
    is_shared: bool
    place: MapEntry | None
    unmapped: int | None
    nodes: NodesAsked
    # For maps: what one set may have, another may not.
    of_set: SetId | None

    @classmethod
    def of(cls, claim: Claim) -> "Kind":
        record, of_set = claim.record, claim.of_set if claim.is_mapped else None
        asked = claim.hashes, claim.requirements, claim.is_shared
        return cls(*asked, claim.place, record.unmapped, claim.nodes, of_set)


@frozen(order=False)
class Waiter:
    """A pod that waits, since when it has existed, and for what."""

    pod: PodIdentity
    created: datetime
    claim: Claim
    kind: Kind = field(init=False, eq=False, repr=False)

    @kind.default
    def _kind(self) -> Kind:
        return Kind.of(self.claim)

    @property
    def turn(self) -> tuple[datetime, str]:
        return self.created, self.pod.uid


class Lines:
    """Waiters by kind, and within a kind by how many GPUs each wants, in the order of their coming."""

    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}
        self._lines: dict[Kind, dict[int, list[tuple[datetime, str]]]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, uid: str) -> bool:
        return uid in self._waiters

    def put(self, waiter: Waiter) -> None:
        known = self._waiters.get(waiter.pod.uid)
        if known is not None and (known.kind, known.claim.count, known.turn) == (
            waiter.kind,
            waiter.claim.count,
            waiter.turn,
        ):
            self._waiters[waiter.pod.uid] = waiter
            return
        self.drop(waiter.pod.uid)
        self._waiters[waiter.pod.uid] = waiter
        insort(self._lines.setdefault(waiter.kind, {}).setdefault(waiter.claim.count, []), waiter.turn)

    def drop(self, uid: str) -> None:
        waiter = self._waiters.pop(uid, None)
        if waiter is None:
            return
        lines = self._lines[waiter.kind]
        line = lines[waiter.claim.count]
        del line[bisect_left(line, waiter.turn)]
        if not line:
            del lines[waiter.claim.count]
        if not lines:
            del self._lines[waiter.kind]

    def uids(self) -> set[str]:
        return set(self._waiters)

    def kinds(self) -> list[Kind]:
        return list(self._lines)

    def get(self, uid: str) -> Waiter | None:
        return self._waiters.get(uid)

    def heads(self, kind: Kind) -> list[Waiter]:
        """The first of each number of GPUs, oldest first."""
        turns = sorted(line[0] for line in self._lines.get(kind, {}).values())
        return [self._waiters[uid] for _, uid in turns]

    def behind(self, waiter: Waiter) -> Iterator[Waiter]:
        """It and those that came after it and want exactly the same."""
        line = self._lines.get(waiter.kind, {}).get(waiter.claim.count, [])
        after = line[bisect_left(line, waiter.turn) :]
        return (self._waiters[uid] for _, uid in after if uid in self._waiters)


class Turns:
    """One pass over those of a kind: whose turn it is, oldest first, whatever number each wants."""

    def __init__(self, lines: Lines, heads: Iterable[Waiter]) -> None:
        self._lines = {head.claim.count: lines.behind(head) for head in heads}
        self._next: list[tuple[tuple[datetime, str], Waiter]] = []
        for count in self._lines:
            self._come(count)

    def __len__(self) -> int:
        """Of how many numbers there is somebody left."""
        return len(self._next)

    def _come(self, count: int) -> None:
        following = next(self._lines.get(count, iter(())), None)
        if following is not None:
            heapq.heappush(self._next, (following.turn, following))

    def take(self) -> Waiter:
        return heapq.heappop(self._next)[1]

    def goes_on(self, waiter: Waiter) -> None:
        """Its turn is over, and holds up nobody."""
        self._come(waiter.claim.count)

    def held_up_by(self, waiter: Waiter) -> list[Waiter]:
        """It waits for devices to become free, and those behind it that want as many or more wait as well."""
        held_up = [one for _, one in self._next if one.claim.count >= waiter.claim.count]
        self._next = [turn for turn in self._next if turn[1].claim.count < waiter.claim.count]
        heapq.heapify(self._next)
        return held_up


def its_turn_is_later(claim: Claim, first: Claim) -> Deny:
    return Deny(
        Reason.NO_FREE_DEVICE,
        f"{claim.sentence}: it is the turn of another pod that waits for the same devices",
        hint=f"that one asks for {first.count}",
    )
