"""Reserves GPUs for pods that wait behind our gate, and opens it. Pods of one kind of claim take turns by namespace.

The process may stop after any step. The reservation's id derives from the pod's uid, so that it is found again. The
reservation is bound to the pod before its gate opens, and one patch opens the gate and dresses the pod. A pod whose
gate is closed holds no reservation that it cannot use.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import partial

import structlog
from attrs import define, field, frozen

from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.admission.queue.gates import AT_ONCE, GateClient, GateOpener
from webhook.admission.queue.holdings import QueueReservations
from webhook.admission.queue.reports import QueueReporter
from webhook.admission.queue.waiting_pods import WaitingPods, identity_in
from webhook.core import check, gpu_order
from webhook.core.backfill import HeldNode, choose_held_node, place_around
from webhook.core.claim import Claim
from webhook.core.decide import ClaimSearch, EvidencePolicy
from webhook.core.dress import Allocation, DressRules
from webhook.core.errors import (
    InvalidPodError,
    LedgerError,
    PlacementRefusedError,
    ReservationConflictError,
    SlotsTakenError,
)
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.queue_order import ClaimKind, KindPass, QueuedPod, earlier_pod_waits, reservation_id_of
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, Placement, PodIdentity, PodProof, Reservation, ReservationRequest
from webhook.core.verdict import Deny
from webhook.kube.events import Events, Subject
from webhook.ledger import Ledger
from webhook.ledger.end_of_use import longest_grace_in
from webhook.ledger.pending import too_many_orphans
from webhook.runtime.clock import Clock
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

# The time limit for a reservation that no review waits for.
PATIENCE = timedelta(seconds=10)
# The most that one pass does, so that the process's other work is not held up: seconds for decisions, and pods.
BUDGET = 1.0
OPENED_AT_A_TIME = 100
RECHECKED_AT_A_TIME = 50
# Conflicts with other writers before the pods of the kind wait for the next pass.
MAX_CONFLICTS = 8
# A kind that could not be served is tried again after this, even if the fleet has not changed.
RETRY_AFTER = timedelta(seconds=5)


class QueueTurn(Enum):
    """The outcome of a pod's turn, unless it was denied."""

    SERVED = auto()
    PASSED_OVER = auto()
    """The pod cannot be served for a while, for a reason of its own. Other pods need not wait for it."""
    UNDECIDED = auto()
    """Unknown for the moment. No pod of its kind overtakes it."""


@frozen
class UnservedKind:
    """A kind whose pods could not be served, and the state that this was decided on."""

    fleet_changes: int
    heads: tuple[QueuedPod, ...]
    at: datetime


@frozen
class BackfillNode:
    """The node that is reserved for the first pod of a kind that waits for devices to become free."""

    uid: str
    node: str


@define
class QueuePass:
    """The state of one pass."""

    until: float
    opening: list[Callable[[], Awaitable[None]]]
    served: set[str]
    """Uids of pods that have their reservation: they need no turn."""


async def nothing_to_read() -> bool:
    return True


@define(eq=False, repr=False)
class Queue:
    """Serves the pods in `pods`, one pass for each call of `step`."""

    _pods: WaitingPods
    _ledger: Ledger
    _fleet: Fleet
    _policy: EvidencePolicy
    _claims: ClaimReader
    _rules: DressRules
    _gates: GateClient
    _events: Events
    _clock: Clock
    _bind_deadline: timedelta = field(default=timedelta(minutes=5), kw_only=True)
    _is_current: Callable[[], bool] = field(default=lambda: True, kw_only=True)
    # Reads pods and reservations from the API server and returns whether it could.
    _list_again: Callable[[], Awaitable[bool]] = field(default=nothing_to_read, kw_only=True)
    _timer: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    _orphans_per_namespace: int = field(default=0, kw_only=True)
    _is_up_to_date: bool = field(default=False, init=False)
    _denials: dict[ClaimKind, dict[int, Deny]] = field(factory=dict, init=False)
    _backfill_nodes: dict[ClaimKind, BackfillNode] = field(factory=dict, init=False)
    _unserved: dict[ClaimKind, UnservedKind] = field(factory=dict, init=False)
    _next: ClaimKind | None = field(default=None, init=False)
    _reservations: QueueReservations = field(init=False)
    _gate_opener: GateOpener = field(init=False)
    _reporter: QueueReporter = field(init=False)

    def __attrs_post_init__(self) -> None:
        pods, gates, clock = self._pods, self._gates, self._clock
        self._reservations = QueueReservations(pods, self._ledger, self._fleet, self._policy, gates, clock)
        self._gate_opener = GateOpener(pods, gates, self._rules, self._events, clock)
        self._reporter = QueueReporter(pods, gates, self._events)

    def begin(self) -> None:
        """Called when this process is elected: the watches may lag behind."""
        self._is_up_to_date = False

    async def step(self) -> None:
        """One pass. A pod that cannot be served keeps waiting, and a change of the reason is reported."""
        if not self._is_current():
            self._is_up_to_date = False
            return
        self._gate_opener.retain(self._pods.raws)
        self._reporter.retain(self._pods.raws)
        self._pods.recheck(RECHECKED_AT_A_TIME)
        if not self._pods.raws:
            return
        self._is_up_to_date = self._is_up_to_date or await self._list_again()
        if not self._is_up_to_date:
            return
        self._fleet.advance(self._clock())
        now = QueuePass(self._timer() + BUDGET, [], set())
        await self._process_reserved(now)
        now.until = self._timer() + BUDGET
        await self._serve_all(now)
        await run_concurrently((open_gate() for open_gate in now.opening), AT_ONCE)
        await self._reporter.report(self._denials, now.served)

    def _is_pass_over(self, now: QueuePass) -> bool:
        return len(now.opening) >= OPENED_AT_A_TIME or self._timer() >= now.until or not self._is_current()

    # Pods that have a reservation already.

    async def _process_reserved(self, now: QueuePass) -> None:
        """Opens the gate of each pod that has a reservation, or releases the reservation if the pod cannot use it."""
        held_by = self._reservations.by_pod()
        now.served.update(held_by)
        for uid, (held, *others) in held_by.items():
            if self._is_pass_over(now):
                return
            await asyncio.sleep(0)
            for other in others:  # two processes acted at the same time, one of them on old data
                raw = self._pods.raws.get(uid)
                if raw is not None:
                    await self._reservations.release(identity_in(raw), other, "the pod has another reservation")
            await self._process_one_reserved(uid, held, now)

    async def _process_one_reserved(self, uid: str, held: Reservation, now: QueuePass) -> None:
        waiter, rejection = self._pods.queue_order.get(uid), self._pods.rejected.get(uid)
        if rejection is not None:
            await self._reservations.release(rejection[0], held, rejection[1].message)
        if waiter is None:
            return
        against = self._reservations.objection(waiter, held)
        is_late = not against and held.since + self._bind_deadline <= self._clock()
        if against or is_late:
            if await self._reservations.release(waiter.pod, held, against or "the bind deadline has passed"):
                now.served.discard(uid)  # it waits for its turn again
                if is_late:
                    self._set_aside(waiter.pod, held)
            return
        await self._turn(waiter, held, now)
        rejection = self._pods.rejected.get(uid)
        if rejection is not None:
            await self._reservations.release(waiter.pod, held, rejection[1].message)

    def _set_aside(self, pod: PodIdentity, held: Reservation) -> None:
        """Handles a gate that was not opened within the bind deadline: the pod may not be bound any more. It is put off
        for as long as it held its devices, so that others can have them."""
        self._gate_opener.postpone(pod.uid, self._bind_deadline)
        text = f"its gate was not opened within {self._bind_deadline}: {','.join(held.uuids)} is free again"
        self._events.record(Subject.of_pod(pod), Reason.BIND_DEADLINE_PASSED, text)

    # Pods that wait for a reservation.

    async def _serve_all(self, now: QueuePass) -> None:
        """Serves the kinds one after the other. If the time runs out, the next pass starts where this one stopped."""
        kinds = self._pods.queue_order.kinds()
        self._denials = {kind: self._denials[kind] for kind in kinds if kind in self._denials}
        self._backfill_nodes = {kind: self._backfill_nodes[kind] for kind in kinds if kind in self._backfill_nodes}
        self._unserved = {kind: self._unserved[kind] for kind in kinds if kind in self._unserved}
        first = kinds.index(self._next) if self._next in kinds else 0
        self._next = None
        for kind in (*kinds[first:], *kinds[:first]):
            if self._is_pass_over(now):
                self._next = kind
                return
            await asyncio.sleep(0)
            await self._serve(kind, now)

    async def _serve(self, kind: ClaimKind, now: QueuePass) -> None:
        heads = tuple(self._pods.queue_order.heads(kind))
        if not heads or self._is_unchanged(kind, heads):
            return
        changes = self._fleet.changes
        most = heads[0].claim.count if len(heads) == 1 else self._most_free(heads[0].claim)
        why: dict[int, Deny] = {}
        is_all = await self._serve_in_order([head for head in heads if head.claim.count <= most], now, why)
        is_all &= await self._explain_oversized([head for head in heads if head.claim.count > most], now, why)
        before = self._denials.get(kind, {})
        kept = {} if is_all else {head.claim.count: before.get(head.claim.count) for head in heads}
        self._denials[kind] = {count: one for count, one in {**kept, **why}.items() if one is not None}
        if is_all and len(why) == len(heads):
            self._unserved[kind] = UnservedKind(changes, heads, self._clock())

    def _is_unchanged(self, kind: ClaimKind, heads: tuple[QueuedPod, ...]) -> bool:
        looked = self._unserved.get(kind)
        return (
            looked is not None
            and looked.fleet_changes == self._fleet.changes
            and looked.heads == heads
            and self._clock() - looked.at < RETRY_AFTER
        )

    def _most_free(self, claim: Claim) -> int:
        return ClaimSearch(claim, self._fleet, self._policy).most_devices()

    async def _serve_in_order(self, heads: list[QueuedPod], now: QueuePass, why: dict[int, Deny]) -> bool:
        """Serves pods in the order of their turns, whatever their number of GPUs. The first one that waits for devices
        to become free gets a node reserved, and later pods use the others. Returns whether all had their turn."""
        turns, ahead = KindPass(self._pods.queue_order, heads, self._backfill_pod(heads)), None
        while turns:
            waiter = turns.take()
            came = await self._turn_if_waiting(waiter, now, ahead)
            if came is QueueTurn.UNDECIDED:
                return False
            if isinstance(came, QueueTurn):
                turns.skip(waiter)
            else:
                why[waiter.claim.count] = came
                if came.reason is Reason.NO_FREE_DEVICE:
                    ahead = ahead or self._reserve_node_for(waiter)
                    held_up = turns.block(waiter)
                    why |= {one.claim.count: earlier_pod_waits(one.claim, waiter.claim.count) for one in held_up}
            if turns and self._is_pass_over(now):
                return False
        return True

    def _backfill_pod(self, heads: list[QueuedPod]) -> QueuedPod | None:
        """The pod that has a node reserved already."""
        left = self._backfill_nodes.get(heads[0].kind) if heads else None
        waiter = None if left is None else self._pods.queue_order.get(left.uid)
        return waiter if waiter is not None and waiter.kind == heads[0].kind else None

    def _reserve_node_for(self, waiter: QueuedPod) -> HeldNode | None:
        """Reserves a node for the pod. None if no device that becomes free would serve it: then it holds no pod
        back."""
        left = self._backfill_nodes.get(waiter.kind)
        before = left.node if left is not None and left.uid == waiter.pod.uid else None
        node = choose_held_node(waiter.claim, self._fleet, self._policy, before)
        if node is None:
            return None
        self._backfill_nodes[waiter.kind] = BackfillNode(waiter.pod.uid, node)
        return HeldNode(waiter.claim, node)

    async def _explain_oversized(self, heads: list[QueuedPod], now: QueuePass, why: dict[int, Deny]) -> bool:
        """Finds the reasons for pods that want more GPUs than any node has. They hold no other pod back."""
        known = self._denials.get(heads[0].kind, {}) if heads else {}
        for head in sorted(heads, key=lambda one: one.claim.count in known):
            if self._is_pass_over(now):
                return False
            came = await self._turn_if_waiting(head, now)
            if isinstance(came, Deny):
                why[head.claim.count] = came
        return True

    async def _turn_if_waiting(
        self, waiter: QueuedPod, now: QueuePass, ahead: HeldNode | None = None
    ) -> QueueTurn | Deny:
        await asyncio.sleep(0)
        if waiter.pod.uid not in self._pods.queue_order or waiter.pod.uid in now.served:
            return QueueTurn.PASSED_OVER
        return await self._turn(waiter, None, now, ahead)

    async def _turn(
        self, waiter: QueuedPod, held: Reservation | None, now: QueuePass, ahead: HeldNode | None = None
    ) -> QueueTurn | Deny:
        """Reserves GPUs for the pod and schedules the opening of its gate; or says why not."""
        if self._gate_opener.is_paused(waiter.pod.uid):
            return QueueTurn.PASSED_OVER
        held = held or self._reservations.adopt(waiter)
        if held is None and self._has_too_many_orphans(waiter):
            self._gate_opener.try_later(waiter.pod.uid)
            return QueueTurn.PASSED_OVER
        places = place_around(waiter.claim, self._fleet, self._policy, ahead) if held is None else ()
        if isinstance(places, Deny):
            return places
        try:
            if await self._is_rejected(waiter):
                return QueueTurn.PASSED_OVER
            outfit = await self._allocate(waiter, held, places, ahead)
        except (ReservationConflictError, PlacementRefusedError) as exc:
            name = f"{waiter.pod.namespace}/{waiter.pod.name}"
            log.warning("no GPUs can be reserved for the queued pod", pod=name, error=type(exc).__name__)
            self._gate_opener.try_later(waiter.pod.uid)
            return QueueTurn.PASSED_OVER
        except (LedgerError, NamespacesUnavailableError) as exc:
            name = f"{waiter.pod.namespace}/{waiter.pod.name}"
            log.warning("queued pod is tried again in the next pass", pod=name, error=type(exc).__name__)
            return QueueTurn.UNDECIDED
        if isinstance(outfit, Deny):
            return outfit
        now.served.add(waiter.pod.uid)
        now.opening.append(partial(self._gate_opener.open, waiter, outfit))
        return QueueTurn.SERVED

    def _has_too_many_orphans(self, waiter: QueuedPod) -> bool:
        namespace, gpus = waiter.pod.namespace, waiter.claim.count
        return too_many_orphans(self._ledger.orphaned, namespace, gpus, self._orphans_per_namespace) is not None

    async def _is_rejected(self, waiter: QueuedPod) -> bool:
        """Checks the pod again, by the current rules of its namespace, before GPUs are reserved for it."""
        raw = self._pods.raws.get(waiter.pod.uid)
        if raw is None:
            return True
        try:
            rules = await self._claims.within(waiter.pod.namespace)
            refused = check.matches_queued_pod(raw, Pod.parse(raw), waiter.claim, self._rules, rules)
        except InvalidPodError as exc:
            refused = Deny(Reason.INVALID_POD, "; ".join(exc.mistakes[:20]))
        if refused is not None:
            self._pods.refuse(waiter.pod.uid, refused)
        return refused is not None

    async def _allocate(
        self, waiter: QueuedPod, held: Reservation | None, places: Sequence[Placement], ahead: HeldNode | None
    ) -> Allocation | Deny:
        claim, pod = waiter.claim, waiter.pod
        if not claim.count:
            return Allocation(claim, tuple(sorted(place.node for place in places)), has_waited=True)
        known = await self._reserve(waiter, places, ahead) if held is None else held
        if isinstance(known, Deny):
            return known
        if known.phase is not Phase.FINALIZED or known.uid != pod.uid:
            raw = self._pods.raws.get(pod.uid)
            grace = None if raw is None else longest_grace_in(raw)
            known = await self._ledger.bind_to_pod(PodProof.CONFIRMED, known.id, pod, node=known.node, grace=grace)
        indexed = self._fleet.indexed_nodes.get(known.node)
        uuids = gpu_order.in_map_order(claim, known.uuids, () if indexed is None else indexed.node.devices)
        return Allocation(claim, (known.node,), known.id, uuids, has_waited=True)

    async def _reserve(
        self, waiter: QueuedPod, places: Sequence[Placement], ahead: HeldNode | None
    ) -> Reservation | Deny:
        """Reserves GPUs. If another writer takes them first, decides again within the same turn."""
        claim, pod = waiter.claim, waiter.pod
        ask = ReservationRequest(
            reservation_id_of(pod), pod.namespace, claim.digest, pod.name, claim.is_shared, delivery=claim.delivery
        )
        for _ in range(MAX_CONFLICTS):
            try:
                return await self._ledger.reserve(ask, places, answer_by=self._clock() + PATIENCE)
            except PlacementRefusedError:
                raise
            except SlotsTakenError:
                again = place_around(claim, self._fleet, self._policy, ahead)
                if isinstance(again, Deny):
                    return again
                places = again
        raise SlotsTakenError(ask.id)
