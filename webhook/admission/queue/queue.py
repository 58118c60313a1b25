"""The queue: pods that wait behind our gate get their GPUs here, per kind of claim. Turns go round by namespace.

Every step can be the last one of this process. The reservation's id follows from the pod's uid and is found again; it
is the pod's before the gate is opened, and the gate is opened in one patch with all that the reservation means to the
pod. Behind a shut gate nothing is held that the pod cannot use.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import partial

import structlog
from attrs import define, frozen

from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.admission.queue.gates import Action, GateClient, GateOpener, some_at_once
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
from webhook.ledger.end_of_use import grace_in
from webhook.ledger.pending import too_many_orphans
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# For a reservation that nobody's review waits for.
PATIENCE = timedelta(seconds=10)
# What one pass does: more would keep other work of the process waiting. In seconds, for what is decided, and in pods.
BUDGET = 1.0
OPENED_AT_A_TIME = 100
JUDGED_AT_A_TIME = 50
# How often somebody else may have been faster before the line waits for another pass.
MOST_RACES = 8
# What no change of the fleet tells of is noticed after this.
LOOK_AGAIN = timedelta(seconds=5)


class QueueTurn(Enum):
    """What came of a pod's turn, if nothing speaks against it."""

    SERVED = auto()
    PASSED_OVER = auto()
    """It cannot be served for a while, by a fault of its own: others need not wait for it."""
    UNDECIDED = auto()
    """Nobody can say at this moment: nobody of its kind overtakes it."""


@frozen
class UnservedKind:
    """A kind of which nobody could be served, by what there was to decide on."""

    fleet_changes: int
    heads: tuple[QueuedPod, ...]
    at: datetime


@frozen
class BackfillNode:
    """Which node is left to the pod that is first among those of a kind that wait for devices to become free."""

    uid: str
    node: str


@define
class QueuePass:
    """One pass."""

    until: float
    opening: list[Action]
    served: set[str]
    """Uids of pods that have their reservation: their turn is over."""


async def nothing_to_read() -> bool:
    return True


class Queue:
    """Acts in `step`, by what the watch has told `pods`."""

    def __init__(
        self,
        pods: WaitingPods,
        ledger: Ledger,
        fleet: Fleet,
        policy: EvidencePolicy,
        claims: ClaimReader,
        rules: DressRules,
        gates: GateClient,
        events: Events,
        clock: Clock,
        *,
        bind_deadline: timedelta = timedelta(minutes=5),
        is_current: Callable[[], bool] = lambda: True,
        read_anew: Callable[[], Awaitable[bool]] = nothing_to_read,
        timer: Callable[[], float] = time.monotonic,
        orphans_per_namespace: int = 0,
    ) -> None:
        """`read_anew` has pods and reservations as they are at that moment, and says whether it could."""
        self._pods = pods
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._rules = rules
        self._events = events
        self._clock = clock
        self._bind_deadline = bind_deadline
        self._is_current = is_current
        self._read_anew = read_anew
        self._timer = timer
        self._orphans_per_namespace = orphans_per_namespace
        self._is_up_to_date = False
        self._holdings = QueueReservations(pods, ledger, fleet, policy, gates, clock)
        self._doorkeeper = GateOpener(pods, gates, rules, events, clock)
        self._telling = QueueReporter(pods, gates, events)
        self._why: dict[ClaimKind, dict[int, Deny]] = {}
        self._left: dict[ClaimKind, BackfillNode] = {}
        self._looked: dict[ClaimKind, UnservedKind] = {}
        self._next: ClaimKind | None = None

    def begin(self) -> None:
        """Elected: until now nobody cared how far behind the watches are."""
        self._is_up_to_date = False

    async def step(self) -> None:
        """One pass. Who cannot be served now waits on, and is told why when that changes."""
        if not self._is_current():
            self._is_up_to_date = False
            return
        self._doorkeeper.forget_all_but(self._pods.raws)
        self._telling.forget_all_but(self._pods.raws)
        self._pods.judge_again(JUDGED_AT_A_TIME)
        if not self._pods.raws:
            return
        self._is_up_to_date = self._is_up_to_date or await self._read_anew()
        if not self._is_up_to_date:
            return
        self._fleet.advance(self._clock())
        now = QueuePass(self._timer() + BUDGET, [], set())
        await self._keep(now)
        now.until = self._timer() + BUDGET
        await self._serve_all(now)
        await some_at_once(now.opening)
        await self._telling.tell(self._why, now.served)

    def _is_over(self, now: QueuePass) -> bool:
        return len(now.opening) >= OPENED_AT_A_TIME or self._timer() >= now.until or not self._is_current()

    # What is held behind gates already.

    async def _keep(self, now: QueuePass) -> None:
        """A pod that has its reservation needs no turn: its gate is opened, or what it cannot use is given back."""
        held_by = self._holdings.look()
        now.served.update(held_by)
        for uid, (held, *others) in held_by.items():
            if self._is_over(now):
                return
            await asyncio.sleep(0)
            for other in others:  # two who acted at once, of whom one was far behind
                raw = self._pods.raws.get(uid)
                if raw is not None:
                    await self._holdings.give_back(identity_in(raw), other, "the pod has another one")
            await self._keep_one(uid, held, now)

    async def _keep_one(self, uid: str, held: Reservation, now: QueuePass) -> None:
        waiter, misfit = self._pods.lines.get(uid), self._pods.misfits.get(uid)
        if misfit is not None:
            await self._holdings.give_back(misfit[0], held, misfit[1].message)
        if waiter is None:
            return
        against = self._holdings.objection(waiter, held)
        is_late = not against and held.since + self._bind_deadline <= self._clock()
        if against or is_late:
            if await self._holdings.give_back(waiter.pod, held, against or "its time is over"):
                now.served.discard(uid)  # it stands in its line again
                if is_late:
                    self._set_aside(waiter.pod, held)
            return
        await self._turn(waiter, held, now)
        misfit = self._pods.misfits.get(uid)
        if misfit is not None:
            await self._holdings.give_back(waiter.pod, held, misfit[1].message)

    def _set_aside(self, pod: PodIdentity, held: Reservation) -> None:
        """Past the bind deadline nobody may put it on a node. Where that is for a gate that cannot be opened, others
        have the devices for as long as it had them."""
        self._doorkeeper.leave(pod.uid, self._bind_deadline)
        text = f"its gate was not opened within {self._bind_deadline}: {','.join(held.uuids)} can be had again"
        self._events.record(Subject.of_pod(pod), Reason.BIND_DEADLINE_PASSED, text)

    # Whose turn it is.

    async def _serve_all(self, now: QueuePass) -> None:
        """Kind by kind; the next pass goes on with those for whom there was no time."""
        kinds = self._pods.lines.kinds()
        self._why = {kind: self._why[kind] for kind in kinds if kind in self._why}
        self._left = {kind: self._left[kind] for kind in kinds if kind in self._left}
        self._looked = {kind: self._looked[kind] for kind in kinds if kind in self._looked}
        first = kinds.index(self._next) if self._next in kinds else 0
        self._next = None
        for kind in (*kinds[first:], *kinds[:first]):
            if self._is_over(now):
                self._next = kind
                return
            await asyncio.sleep(0)
            await self._serve(kind, now)

    async def _serve(self, kind: ClaimKind, now: QueuePass) -> None:
        heads = tuple(self._pods.lines.heads(kind))
        if not heads or self._is_nothing_new(kind, heads):
            return
        changes = self._fleet.changes
        most = heads[0].claim.count if len(heads) == 1 else self._most(heads[0].claim)
        why: dict[int, Deny] = {}
        is_all = await self._serve_line([head for head in heads if head.claim.count <= most], now, why)
        is_all &= await self._look_at([head for head in heads if head.claim.count > most], now, why)
        before = self._why.get(kind, {})
        kept = {} if is_all else {head.claim.count: before.get(head.claim.count) for head in heads}
        self._why[kind] = {count: one for count, one in {**kept, **why}.items() if one is not None}
        if is_all and len(why) == len(heads):
            self._looked[kind] = UnservedKind(changes, heads, self._clock())

    def _is_nothing_new(self, kind: ClaimKind, heads: tuple[QueuedPod, ...]) -> bool:
        looked = self._looked.get(kind)
        return (
            looked is not None
            and looked.fleet_changes == self._fleet.changes
            and looked.heads == heads
            and self._clock() - looked.at < LOOK_AGAIN
        )

    def _most(self, claim: Claim) -> int:
        return ClaimSearch(claim, self._fleet, self._policy).most_devices()

    async def _serve_line(self, heads: list[QueuedPod], now: QueuePass, why: dict[int, Deny]) -> bool:
        """In the order of their turns, whatever number each wants. To the first one that waits for devices to become
        free a node is left, and those behind it have the others. Whether all have had their turn."""
        turns, ahead = KindPass(self._pods.lines, heads, self._first_of(heads)), None
        while turns:
            waiter = turns.take()
            came = await self._turn_if_there(waiter, now, ahead)
            if came is QueueTurn.UNDECIDED:
                return False
            if isinstance(came, QueueTurn):
                turns.skip(waiter)
            else:
                why[waiter.claim.count] = came
                if came.reason is Reason.NO_FREE_DEVICE:
                    ahead = ahead or self._left_to(waiter)
                    held_up = turns.block(waiter)
                    why |= {one.claim.count: earlier_pod_waits(one.claim, waiter.claim.count) for one in held_up}
            if turns and self._is_over(now):
                return False
        return True

    def _first_of(self, heads: list[QueuedPod]) -> QueuedPod | None:
        """To whom a node is left already."""
        left = self._left.get(heads[0].kind) if heads else None
        waiter = None if left is None else self._pods.lines.get(left.uid)
        return waiter if waiter is not None and waiter.kind == heads[0].kind else None

    def _left_to(self, waiter: QueuedPod) -> HeldNode | None:
        """None if no device that becomes free would serve it: then nobody takes anything from it."""
        left = self._left.get(waiter.kind)
        before = left.node if left is not None and left.uid == waiter.pod.uid else None
        node = choose_held_node(waiter.claim, self._fleet, self._policy, before)
        if node is None:
            return None
        self._left[waiter.kind] = BackfillNode(waiter.pod.uid, node)
        return HeldNode(waiter.claim, node)

    async def _look_at(self, heads: list[QueuedPod], now: QueuePass, why: dict[int, Deny]) -> bool:
        """Those who want more than any node has: they hold up nobody, and are told so when there is time."""
        known = self._why.get(heads[0].kind, {}) if heads else {}
        for head in sorted(heads, key=lambda one: one.claim.count in known):
            if self._is_over(now):
                return False
            came = await self._turn_if_there(head, now)
            if isinstance(came, Deny):
                why[head.claim.count] = came
        return True

    async def _turn_if_there(
        self, waiter: QueuedPod, now: QueuePass, ahead: HeldNode | None = None
    ) -> QueueTurn | Deny:
        await asyncio.sleep(0)
        if waiter.pod.uid not in self._pods.lines or waiter.pod.uid in now.served:
            return QueueTurn.PASSED_OVER
        return await self._turn(waiter, None, now, ahead)

    async def _turn(
        self, waiter: QueuedPod, held: Reservation | None, now: QueuePass, ahead: HeldNode | None = None
    ) -> QueueTurn | Deny:
        """Its place, and its gate among those to be opened; or why not."""
        if self._doorkeeper.is_to_wait(waiter.pod.uid):
            return QueueTurn.PASSED_OVER
        held = held or self._holdings.adopted(waiter)
        if held is None and self._has_too_many_orphans(waiter):
            self._doorkeeper.try_later(waiter.pod.uid)
            return QueueTurn.PASSED_OVER
        places = place_around(waiter.claim, self._fleet, self._policy, ahead) if held is None else ()
        if isinstance(places, Deny):
            return places
        try:
            if await self._is_misfit(waiter):
                return QueueTurn.PASSED_OVER
            outfit = await self._outfit(waiter, held, places, ahead)
        except (ReservationConflictError, PlacementRefusedError) as exc:
            name = f"{waiter.pod.namespace}/{waiter.pod.name}"
            log.warning("nothing can be held for it", pod=name, error=type(exc).__name__)
            self._doorkeeper.try_later(waiter.pod.uid)
            return QueueTurn.PASSED_OVER
        except (LedgerError, NamespacesUnavailableError) as exc:
            name = f"{waiter.pod.namespace}/{waiter.pod.name}"
            log.warning("left for the next pass", pod=name, error=type(exc).__name__)
            return QueueTurn.UNDECIDED
        if isinstance(outfit, Deny):
            return outfit
        now.served.add(waiter.pod.uid)
        now.opening.append(partial(self._doorkeeper.open, waiter, outfit))
        return QueueTurn.SERVED

    def _has_too_many_orphans(self, waiter: QueuedPod) -> bool:
        namespace, gpus = waiter.pod.namespace, waiter.claim.count
        return too_many_orphans(self._ledger.orphaned, namespace, gpus, self._orphans_per_namespace) is not None

    async def _is_misfit(self, waiter: QueuedPod) -> bool:
        """Once more, by what its namespace demands at this moment: before anything is held for it."""
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

    async def _outfit(
        self, waiter: QueuedPod, held: Reservation | None, places: Sequence[Placement], ahead: HeldNode | None
    ) -> Allocation | Deny:
        claim, pod = waiter.claim, waiter.pod
        if not claim.count:
            return Allocation(claim, tuple(sorted(place.node for place in places)), has_waited=True)
        known = await self._reserved(waiter, places, ahead) if held is None else held
        if isinstance(known, Deny):
            return known
        if known.phase is not Phase.FINALIZED or known.uid != pod.uid:
            raw = self._pods.raws.get(pod.uid)
            grace = None if raw is None else grace_in(raw)
            known = await self._ledger.bind_to_pod(PodProof.CONFIRMED, known.id, pod, node=known.node, grace=grace)
        indexed = self._fleet.indexed_nodes.get(known.node)
        uuids = gpu_order.in_map_order(claim, known.uuids, () if indexed is None else indexed.node.devices)
        return Allocation(claim, (known.node,), known.id, uuids, has_waited=True)

    async def _reserved(
        self, waiter: QueuedPod, places: Sequence[Placement], ahead: HeldNode | None
    ) -> Reservation | Deny:
        """Whoever is faster costs a fresh decision, and not the turn."""
        claim, pod = waiter.claim, waiter.pod
        ask = ReservationRequest(reservation_id_of(pod), pod.namespace, claim.digest, pod.name, claim.is_shared)
        for _ in range(MOST_RACES):
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
