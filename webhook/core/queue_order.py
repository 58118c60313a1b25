"""The order of the queue: which of the pods that want the same devices is served next.

Each kind of claim has its own queue. The kind is all that a claim asks for, except the number of GPUs. So small claims
do not starve a claim for eight GPUs of the same kind, and a claim that cannot be served does not block other kinds.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain, count, dropwhile

from attrs import field, frozen

from webhook.core.claim import Claim
from webhook.core.gpu_map import SetId
from webhook.core.nodes_asked import NodesAsked
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, ReservationId
from webhook.core.round_robin import Arrival, RoundRobin
from webhook.core.verdict import Deny

# The ids of reservations for existing pods begin with it. The uid of a review never does.
OWN_IDS = "pod-"


def reservation_id_of(pod: PodIdentity) -> ReservationId:
    """Derived from the pod's uid, so that a restarted process finds the reservations that it made before."""
    return ReservationId(f"{OWN_IDS}{pod.uid}")


@frozen(cache_hash=True)
class ClaimKind:
    """What claims of one kind have in common: the same devices can serve them."""

    # The record as text, without the number of GPUs.
    asked: str
    nodes: NodesAsked
    # Only with a map: devices that are set aside for one StatefulSet do not serve another.
    stateful_set: SetId | None

    @classmethod
    def of(cls, claim: Claim) -> "ClaimKind":
        stateful_set = claim.stateful_set if claim.is_mapped else None
        return cls(claim.record.without_count().text(), claim.nodes, stateful_set)


@frozen(order=False)
class QueuedPod:
    """A pod in the queue."""

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
    """The queued pods of one kind."""

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
        """The numbers of GPUs that pods ask for, unordered."""
        return self._members.keys()

    def by_count(self) -> Mapping[int, list[str]]:
        """The uids by the number of GPUs, in serving order. The numbers are in the order of their first pods."""
        order = self.rounds.order()
        if order is not self._order:
            self._order, self._by_count = order, {}
            for uid in order:
                self._by_count.setdefault(self._counts[uid], []).append(uid)
        return self._by_count


class QueueOrder:
    """All queued pods by kind, and within a kind by number of GPUs. Namespaces take turns, both within a kind and among
    kinds."""

    def __init__(self) -> None:
        self._waiters: dict[str, QueuedPod] = {}
        self._queues: dict[ClaimKind, KindQueue] = {}
        self._kind_order = KindOrder()

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
        self._queues.setdefault(waiter.kind, KindQueue()).put(waiter)
        self._kind_order.put(waiter)

    def drop(self, uid: str, *, was_served: bool = False) -> None:
        """Remove a pod. If it was served, that was the turn of its namespace."""
        waiter = self._waiters.pop(uid, None)
        if waiter is None:
            return
        queue = self._queues[waiter.kind]
        queue.drop(waiter, was_served=was_served)
        if not len(queue.rounds):
            del self._queues[waiter.kind]
        self._kind_order.drop(waiter, was_served=was_served)

    def uids(self) -> set[str]:
        return set(self._waiters)

    def kinds(self) -> list[ClaimKind]:
        """In serving order."""
        return self._kind_order.kinds()

    def get(self, uid: str) -> QueuedPod | None:
        return self._waiters.get(uid)

    def counts(self, kind: ClaimKind) -> list[int]:
        """The numbers of GPUs that pods of the kind ask for, each once."""
        queue = self._queues.get(kind)
        return [] if queue is None else sorted(queue.counts)

    def positions(self, kind: ClaimKind) -> dict[str, int]:
        """The position of each pod of the kind, by uid."""
        queue = self._queues.get(kind)
        return {} if queue is None else {uid: position for position, uid in enumerate(queue.rounds.order())}

    def heads(self, kind: ClaimKind) -> list[QueuedPod]:
        """The first pod of each number of GPUs, in serving order."""
        queue = self._queues.get(kind)
        return [] if queue is None else [self._waiters[uids[0]] for uids in queue.by_count().values()]

    def same_count_from(self, waiter: QueuedPod) -> Iterator[QueuedPod]:
        """The pod and those after it that ask for the same number of GPUs of the same kind."""
        queue = self._queues.get(waiter.kind)
        uids = [] if queue is None else queue.by_count().get(waiter.claim.count, [])
        after = dropwhile(lambda uid: uid != waiter.pod.uid, uids)
        return (self._waiters[uid] for uid in after if uid in self._waiters)


class KindOrder:
    """The order of the kinds: each namespace has one entry for each kind in which its pods wait."""

    def __init__(self) -> None:
        self._rounds = RoundRobin()
        self._waiting: dict[tuple[ClaimKind, str], dict[str, Arrival]] = {}
        self._arrivals: dict[tuple[ClaimKind, str], Arrival] = {}
        self._kinds: dict[str, ClaimKind] = {}
        self._ids = map(str, count())

    def put(self, waiter: QueuedPod) -> None:
        entry = waiter.kind, waiter.pod.namespace
        waiting = self._waiting.setdefault(entry, {})
        waiting[waiter.pod.uid] = waiter.arrival
        if len(waiting) == 1:
            self._add(entry, waiter.created)

    def drop(self, waiter: QueuedPod, *, was_served: bool) -> None:
        entry = waiter.kind, waiter.pod.namespace
        waiting = self._waiting[entry]
        created, _ = waiting.pop(waiter.pod.uid)
        if was_served or not waiting:
            arrival = self._arrivals.pop(entry)
            del self._kinds[arrival[1]]
            self._rounds.drop(waiter.pod.namespace, arrival, was_served=was_served)
            if waiting:
                self._add(entry, created)
        if not waiting:
            del self._waiting[entry]

    def _add(self, entry: tuple[ClaimKind, str], created: datetime) -> None:
        kind, namespace = entry
        arrival = created, next(self._ids)
        self._arrivals[entry], self._kinds[arrival[1]] = arrival, kind
        self._rounds.put(namespace, arrival)

    def kinds(self) -> list[ClaimKind]:
        return list(dict.fromkeys(self._kinds[one] for one in self._rounds.order()))


class KindPass:
    """One pass over the pods of a kind in serving order, across all numbers of GPUs."""

    def __init__(self, order: QueueOrder, heads: Iterable[QueuedPod], first: QueuedPod | None = None) -> None:
        """`first` has a node held for it and stays first until it is served."""
        heads = list(heads)
        self._queues = {head.claim.count: order.same_count_from(head) for head in heads}
        self._positions = order.positions(heads[0].kind) if heads else {}
        if first is not None and first.claim.count in self._queues:
            others = (one for one in self._queues[first.claim.count] if one.pod.uid != first.pod.uid)
            self._queues[first.claim.count] = chain([first], others)
            self._positions[first.pod.uid] = -1
        self._next: list[tuple[int, QueuedPod]] = []
        for number in self._queues:
            self._push_next(number)

    def __len__(self) -> int:
        """The number of GPU counts with pods left."""
        return len(self._next)

    def _push_next(self, number: int) -> None:
        following = next(self._queues.get(number, iter(())), None)
        if following is not None:
            heapq.heappush(self._next, (self._positions[following.pod.uid], following))

    def take(self) -> QueuedPod:
        return heapq.heappop(self._next)[1]

    def skip(self, waiter: QueuedPod) -> None:
        """Go on with the pods after this one: it blocks none of them."""
        self._push_next(waiter.claim.count)

    def block(self, waiter: QueuedPod) -> list[QueuedPod]:
        """Stop at this pod: it waits for devices to become free, and later pods that ask for as many GPUs or more wait
        with it. Returns the next pod of each such number."""
        blocked = [one for _, one in self._next if one.claim.count >= waiter.claim.count]
        self._next = [pair for pair in self._next if pair[1].claim.count < waiter.claim.count]
        heapq.heapify(self._next)
        return blocked


def earlier_pod_waits(claim: Claim, first: int) -> Deny:
    return Deny(
        Reason.NO_FREE_DEVICE,
        f"{claim.sentence}: an earlier pod waits for the same devices",
        hint=f"the earlier pod asks for {first}",
    )
