"""The lines in which claims wait: whose turn it is among those that want the same devices.

There is a line for each kind: all that a claim asks for but how many. So a claim for eight GPUs is not overtaken for
ever by claims for one of the same kind, and one that nothing can be had for holds nobody up.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain, count, dropwhile

from attrs import field, frozen

from webhook.core.claim import Claim
from webhook.core.gpu_map import MapEntry, SetId
from webhook.core.nodes_asked import NodesAsked
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, ReservationId
from webhook.core.round_robin import Arrival, RoundRobin
from webhook.core.verdict import Deny

# Begins the ids of reservations that are made for pods in the lines. A review's uid never begins so.
OWN_IDS = "pod-"


def reservation_id_of(pod: PodIdentity) -> ReservationId:
    """Follows from the pod's uid, so that whoever comes after a stop finds what was reserved before it."""
    return ReservationId(f"{OWN_IDS}{pod.uid}")


@frozen(cache_hash=True)
class ClaimKind:
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
    def of(cls, claim: Claim) -> "ClaimKind":
        record, of_set = claim.record, claim.of_set if claim.is_mapped else None
        asked = claim.hashes, claim.requirements, claim.is_shared
        return cls(*asked, claim.map_entry, record.unmapped, claim.nodes, of_set)


@frozen(order=False)
class QueuedPod:
    """A pod that waits, since when it has existed, and for what."""

    pod: PodIdentity
    created: datetime
    claim: Claim
    kind: ClaimKind = field(init=False, eq=False, repr=False)

    @kind.default
    def _kind(self) -> ClaimKind:
        return ClaimKind.of(self.claim)

    @property
    def arrival(self) -> Arrival:
        return self.created, self.pod.uid


class KindQueue:
    """Those of one kind, in the order of their turns."""

    def __init__(self) -> None:
        self.rounds = RoundRobin()
        self._counts: dict[str, int] = {}
        self._members: Counter[int] = Counter()
        self._order: tuple[str, ...] = ()
        self._by_count: dict[int, list[str]] = {}

    def put(self, waiter: QueuedPod) -> None:
        self._counts[waiter.pod.uid] = waiter.claim.count
        self._members[waiter.claim.count] += 1
        self.rounds.put(waiter.pod.namespace, waiter.arrival)

    def drop(self, waiter: QueuedPod, *, was_served: bool) -> None:
        count = self._counts.pop(waiter.pod.uid)
        self._members[count] -= 1
        if not self._members[count]:
            del self._members[count]
        self.rounds.drop(waiter.pod.namespace, waiter.arrival, was_served=was_served)

    @property
    def counts(self) -> Iterable[int]:
        """The numbers of GPUs that are asked for, in no order."""
        return self._members.keys()

    def by_count(self) -> Mapping[int, list[str]]:
        """The uids by how many GPUs each wants, whose turn is first first; the numbers too."""
        order = self.rounds.order()
        if order is not self._order:
            self._order, self._by_count = order, {}
            for uid in order:
                self._by_count.setdefault(self._counts[uid], []).append(uid)
        return self._by_count


class QueueOrder:
    """Waiters by kind, and within a kind by how many GPUs each wants. Turns go round by namespace, among those of a
    kind and among kinds."""

    def __init__(self) -> None:
        self._waiters: dict[str, QueuedPod] = {}
        self._lines: dict[ClaimKind, KindQueue] = {}
        self._places = KindOrder()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, uid: str) -> bool:
        return uid in self._waiters

    def put(self, waiter: QueuedPod) -> None:
        known = self._waiters.get(waiter.pod.uid)
        if known is not None and (known.kind, known.claim.count, known.arrival) == (
            waiter.kind,
            waiter.claim.count,
            waiter.arrival,
        ):
            self._waiters[waiter.pod.uid] = waiter
            return
        self.drop(waiter.pod.uid)
        self._waiters[waiter.pod.uid] = waiter
        self._lines.setdefault(waiter.kind, KindQueue()).put(waiter)
        self._places.put(waiter)

    def drop(self, uid: str, *, was_served: bool = False) -> None:
        """It waits no longer. Served, it has taken its namespace's turn."""
        waiter = self._waiters.pop(uid, None)
        if waiter is None:
            return
        line = self._lines[waiter.kind]
        line.drop(waiter, was_served=was_served)
        if not len(line.rounds):
            del self._lines[waiter.kind]
        self._places.drop(waiter, was_served=was_served)

    def uids(self) -> set[str]:
        return set(self._waiters)

    def kinds(self) -> list[ClaimKind]:
        """In the order in which they are served."""
        return self._places.kinds()

    def get(self, uid: str) -> QueuedPod | None:
        return self._waiters.get(uid)

    def counts(self, kind: ClaimKind) -> list[int]:
        """How many GPUs those of the kind want, each number once."""
        line = self._lines.get(kind)
        return [] if line is None else sorted(line.counts)

    def positions(self, kind: ClaimKind) -> dict[str, int]:
        """At which place in its line each is, by uid."""
        line = self._lines.get(kind)
        return {} if line is None else {uid: place for place, uid in enumerate(line.rounds.order())}

    def heads(self, kind: ClaimKind) -> list[QueuedPod]:
        """The first of each number of GPUs, in the order of their turns."""
        line = self._lines.get(kind)
        return [] if line is None else [self._waiters[uids[0]] for uids in line.by_count().values()]

    def same_count_from(self, waiter: QueuedPod) -> Iterator[QueuedPod]:
        """It and those after it that want exactly the same."""
        line = self._lines.get(waiter.kind)
        uids = [] if line is None else line.by_count().get(waiter.claim.count, [])
        after = dropwhile(lambda uid: uid != waiter.pod.uid, uids)
        return (self._waiters[uid] for uid in after if uid in self._waiters)


class KindOrder:
    """Which kind is served first: each namespace has one place for each kind that it waits in."""

    def __init__(self) -> None:
        self._rounds = RoundRobin()
        self._waiting: dict[tuple[ClaimKind, str], dict[str, Arrival]] = {}
        self._turns: dict[tuple[ClaimKind, str], Arrival] = {}
        self._kinds: dict[str, ClaimKind] = {}
        self._ids = map(str, count())

    def put(self, waiter: QueuedPod) -> None:
        place = waiter.kind, waiter.pod.namespace
        waiting = self._waiting.setdefault(place, {})
        waiting[waiter.pod.uid] = waiter.arrival
        if len(waiting) == 1:
            self._take(place, waiter.created)

    def drop(self, waiter: QueuedPod, *, was_served: bool) -> None:
        place = waiter.kind, waiter.pod.namespace
        waiting = self._waiting[place]
        created, _ = waiting.pop(waiter.pod.uid)
        if was_served or not waiting:
            turn = self._turns.pop(place)
            del self._kinds[turn[1]]
            self._rounds.drop(waiter.pod.namespace, turn, was_served=was_served)
            if waiting:
                self._take(place, created)
        if not waiting:
            del self._waiting[place]

    def _take(self, place: tuple[ClaimKind, str], created: datetime) -> None:
        kind, namespace = place
        turn = created, next(self._ids)
        self._turns[place], self._kinds[turn[1]] = turn, kind
        self._rounds.put(namespace, turn)

    def kinds(self) -> list[ClaimKind]:
        return list(dict.fromkeys(self._kinds[one] for one in self._rounds.order()))


class KindPass:
    """One pass over those of a kind: whose turn it is, whatever number each wants."""

    def __init__(self, lines: QueueOrder, heads: Iterable[QueuedPod], first: QueuedPod | None = None) -> None:
        """`first`, to whom a node is left, stays the first until it is served."""
        heads = list(heads)
        self._lines = {head.claim.count: lines.same_count_from(head) for head in heads}
        self._places = lines.positions(heads[0].kind) if heads else {}
        if first is not None and first.claim.count in self._lines:
            others = (one for one in self._lines[first.claim.count] if one.pod.uid != first.pod.uid)
            self._lines[first.claim.count] = chain([first], others)
            self._places[first.pod.uid] = -1
        self._next: list[tuple[int, QueuedPod]] = []
        for number in self._lines:
            self._come(number)

    def __len__(self) -> int:
        """Of how many numbers there is somebody left."""
        return len(self._next)

    def _come(self, number: int) -> None:
        following = next(self._lines.get(number, iter(())), None)
        if following is not None:
            heapq.heappush(self._next, (self._places[following.pod.uid], following))

    def take(self) -> QueuedPod:
        return heapq.heappop(self._next)[1]

    def skip(self, waiter: QueuedPod) -> None:
        """Its turn is over, and holds up nobody."""
        self._come(waiter.claim.count)

    def block(self, waiter: QueuedPod) -> list[QueuedPod]:
        """It waits for devices to become free, and those behind it that want as many or more wait as well."""
        held_up = [one for _, one in self._next if one.claim.count >= waiter.claim.count]
        self._next = [turn for turn in self._next if turn[1].claim.count < waiter.claim.count]
        heapq.heapify(self._next)
        return held_up


def earlier_pod_waits(claim: Claim, first: int) -> Deny:
    return Deny(
        Reason.NO_FREE_DEVICE,
        f"{claim.sentence}: it is the turn of another pod that waits for the same devices",
        hint=f"that one asks for {first}",
    )
