"""The queue: pods that wait behind our gate get their GPUs here, first come first served per kind of claim.

Every step can be the last one of this process. The reservation's id follows from the pod's uid and is found again; it
is the pod's before the gate is opened, and the gate is opened in one patch with all that the reservation means to the
pod. Behind a shut gate nothing is held that the pod cannot use.
"""

import asyncio
import heapq
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Any, Protocol

import structlog
from attrs import define, frozen

from webhook.clock import Clock
from webhook.core import check, keys
from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy, Question, decide
from webhook.core.difference import Change
from webhook.core.dress import DressRules, Outfit, RawPod, changes, dressed
from webhook.core.errors import GpuwardenError, InvalidPodError, LedgerError, ReservationConflictError, SlotsTakenError
from webhook.core.fleet import Fleet
from webhook.core.lines import OWN_IDS, Kind, Waiter, its_turn_is_later, reservation_id_of
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Ask, Phase, Placement, PodIdentity, Reservation
from webhook.core.verdict import Deny, plain
from webhook.events import Events, Subject
from webhook.ledger import Ledger
from webhook.namespaces import ClaimReading, NamespacesUnavailableError
from webhook.waiting_pods import WaitingPods, identity_in

log = structlog.get_logger(__name__)

# For a reservation that nobody's review waits for.
PATIENCE = timedelta(seconds=10)
# A reservation for a pod without a name is nobody's when its creation must have come to its end: the API server gives
# a request 60 s.
LONGEST_CREATION = timedelta(seconds=60)
# What one pass does: more would keep other work of the process waiting. In seconds, for what is decided, and for pods
# to be told.
BUDGET, TELLING_BUDGET = 1.0, 2.0
OPENED_AT_A_TIME = 100
TOLD_AT_A_TIME = 50
JUDGED_AT_A_TIME = 50
AT_ONCE = 16
# How often somebody else may have been faster before the line waits for another pass.
MOST_RACES = 8
# What no change of the fleet tells of is noticed after this.
LOOK_AGAIN = timedelta(seconds=5)
# Between two tries at one gate: doubling, up to half a minute.
FIRST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(seconds=30)
MAX_SAID = 900


class GateError(GpuwardenError):
    """Nothing can be done about the gate now; the text says why."""


class Gates(Protocol):
    """What is done to pods that wait. All raise GateError; a pod that is gone is no mistake."""

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        """The whole JSON patch or nothing of it. Whether there still was a pod of that name."""

    async def say(self, pod: PodIdentity, why: str) -> None:
        """What it waits for, in its annotation."""

    async def is_shut(self, pod: PodIdentity) -> bool:
        """Whether this very pod is there and waits behind our gate, by a quorum read."""


class Turn(Enum):
    """What came of a pod's turn, if nothing speaks against it."""

    SERVED = auto()
    PASSED_OVER = auto()
    """It cannot be served for a while, by a fault of its own: others need not wait for it."""
    UNDECIDED = auto()
    """Nobody can say at this moment: nobody of its kind overtakes it."""


@define
class Tries:
    """When a gate that could not be opened is tried again."""

    not_before: datetime
    pause: timedelta = FIRST_PAUSE


@frozen
class Looked:
    """A kind of which nobody could be served, by what there was to decide on."""

    fleet_changes: int
    heads: tuple[Waiter, ...]
    at: datetime


Action = Callable[[], Awaitable[None]]


@define
class Round:
    """One pass."""

    until: float
    opening: list[Action]
    left_over: dict[tuple[str, str], list[Reservation]]
    """What no pod has come for yet, by namespace and digest of its claim."""
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
        claims: ClaimReading,
        rules: DressRules,
        gates: Gates,
        events: Events,
        clock: Clock,
        *,
        bind_deadline: timedelta = timedelta(minutes=5),
        is_current: Callable[[], bool] = lambda: True,
        read_anew: Callable[[], Awaitable[bool]] = nothing_to_read,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read_anew` has pods and reservations as they are at that moment, and says whether it could."""
        self._pods = pods
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._rules = rules
        self._gates = gates
        self._events = events
        self._clock = clock
        self._bind_deadline = bind_deadline
        self._is_current = is_current
        self._read_anew = read_anew
        self._timer = timer
        self._is_up_to_date = False
        self._why: dict[Kind, dict[int, Deny]] = {}
        self._told: dict[str, Reason] = {}
        self._tries: dict[str, Tries] = {}
        self._looked: dict[Kind, Looked] = {}
        self._next: Kind | None = None

    def begin(self) -> None:
        """Elected: until now nobody cared how far behind the watches are."""
        self._is_up_to_date = False

    async def step(self) -> None:
        """One pass. Who cannot be served now waits on, and is told why when that changes."""
        if not self._is_current():
            self._is_up_to_date = False
            return
        self._forget_gone()
        self._pods.judge_again(JUDGED_AT_A_TIME)
        if not self._pods.raws:
            return
        self._is_up_to_date = self._is_up_to_date or await self._read_anew()
        if not self._is_up_to_date:
            return
        self._fleet.advance(self._clock())
        now = Round(self._timer() + BUDGET, [], defaultdict(list), set())
        await self._keep(now)
        now.until = self._timer() + BUDGET
        await self._serve_all(now)
        await self._all(now.opening)
        await self._tell(now)

    def _forget_gone(self) -> None:
        for known in (self._told, self._tries):
            for uid in known.keys() - self._pods.raws.keys():
                del known[uid]

    def _is_over(self, now: Round) -> bool:
        return len(now.opening) >= OPENED_AT_A_TIME or self._timer() >= now.until or not self._is_current()

    # What is held behind gates already.

    async def _keep(self, now: Round) -> None:
        """A pod that has its reservation needs no turn: its gate is opened, or what it cannot use is given back."""
        held_by = defaultdict[str, list[Reservation]](list)
        moment = self._clock()
        for one in self._ledger.reservations():
            uid = one.uid or (one.id.removeprefix(OWN_IDS) if one.id.startswith(OWN_IDS) else None)
            if one.phase is Phase.RELEASING or one.is_past_deadline(moment):
                continue
            if uid is None and one.phase is Phase.PENDING:
                now.left_over[one.namespace, one.claim_digest].append(one)
            elif uid in self._pods.raws:
                held_by[uid].append(one)
        now.served.update(held_by)
        for uid, all_held in held_by.items():
            if self._is_over(now):
                return
            await asyncio.sleep(0)
            held, *others = sorted(all_held, key=lambda one: (one.phase is not Phase.FINALIZED, one.since, one.node))
            for other in others:  # two who acted at once, of whom one was far behind
                raw = self._pods.raws.get(uid)
                if raw is not None:
                    await self._give_back(identity_in(raw), other, "the pod has another one")
            await self._keep_one(uid, held, now)

    async def _keep_one(self, uid: str, held: Reservation, now: Round) -> None:
        waiter, misfit = self._pods.lines.get(uid), self._pods.misfits.get(uid)
        if misfit is not None:
            await self._give_back(misfit[0], held, misfit[1].message)
        if waiter is None:
            return
        against = self._objection(waiter, held)
        is_late = not against and held.since + self._bind_deadline <= self._clock()
        if against or is_late:
            if await self._give_back(waiter.pod, held, against or "its time is over"):
                now.served.discard(uid)  # it stands in its line again
                if is_late:
                    self._set_aside(waiter.pod, held)
            return
        await self._turn(waiter, held, now)
        misfit = self._pods.misfits.get(uid)
        if misfit is not None:
            await self._give_back(waiter.pod, held, misfit[1].message)

    def _objection(self, waiter: Waiter, held: Reservation) -> str:
        """Why the reservation is of no use to the pod."""
        claim, pod = waiter.claim, waiter.pod
        if held.claim_digest != claim.digest or not held.may_be(pod):
            return "it was made for another claim"
        return self._node_objection(claim, held.node)

    def _node_objection(self, claim: Claim, node: str) -> str:
        unproven = check.still_proven(claim, node, self._fleet, self._policy)
        if unproven is not None:
            return unproven.message
        is_selected = claim.nodes.matches(node, self._fleet.berths[node].labels)
        return "" if is_selected else f"node {node} is not what the pod selects any more"

    def _set_aside(self, pod: PodIdentity, held: Reservation) -> None:
        """Past the bind deadline nobody may put it on a node. Where that is for a gate that cannot be opened, others
        have the devices for as long as it had them."""
        tries = self._tries.get(pod.uid)
        if tries is not None:
            tries.not_before = self._clock() + self._bind_deadline
        text = f"its gate was not opened within {self._bind_deadline}: {','.join(held.uuids)} can be had again"
        self._events.tell(Subject.of_pod(pod), Reason.BIND_DEADLINE_PASSED, text)

    async def _give_back(self, pod: PodIdentity, held: Reservation, why: str) -> bool:
        """Whether it is free. Of a pod whose gate is open already, by an answer that was lost, nothing is taken."""
        owner = pod if held.uid == pod.uid else PodIdentity(held.namespace, "", "")
        try:
            if not await self._gates.is_shut(pod):
                self._pods.forget(pod.uid)
                return False
            is_free = await self._ledger.release(held.id, owner, node=held.node)
        except (GateError, LedgerError) as exc:
            log.warning("not given back", reservation=held.id, problem=str(exc))
            return False
        log.info("given back behind a gate", reservation=held.id, pod=f"{pod.namespace}/{pod.name}", why=why)
        return is_free

    # Whose turn it is.

    async def _serve_all(self, now: Round) -> None:
        """Kind by kind; the next pass goes on with those for whom there was no time."""
        kinds = self._pods.lines.kinds()
        self._why = {kind: self._why[kind] for kind in kinds if kind in self._why}
        self._looked = {kind: self._looked[kind] for kind in kinds if kind in self._looked}
        first = kinds.index(self._next) if self._next in kinds else 0
        self._next = None
        for kind in (*kinds[first:], *kinds[:first]):
            if self._is_over(now):
                self._next = kind
                return
            await asyncio.sleep(0)
            await self._serve(kind, now)

    async def _serve(self, kind: Kind, now: Round) -> None:
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
            self._looked[kind] = Looked(changes, heads, self._clock())

    def _is_nothing_new(self, kind: Kind, heads: tuple[Waiter, ...]) -> bool:
        looked = self._looked.get(kind)
        return (
            looked is not None
            and looked.fleet_changes == self._fleet.changes
            and looked.heads == heads
            and self._clock() - looked.at < LOOK_AGAIN
        )

    def _most(self, claim: Claim) -> int:
        return Question(claim, self._fleet, self._policy).most()

    async def _serve_line(self, heads: list[Waiter], now: Round, why: dict[int, Deny]) -> bool:
        """The oldest first, whatever number it wants. One that waits for devices to become free holds up those behind
        it; one that nothing can be had for holds up those alone that want the same. Whether that is all there is to
        it."""
        lines = {head.claim.count: self._pods.lines.behind(head) for head in heads}
        turns = [(one.turn, one) for line in lines.values() if (one := next(line, None)) is not None]
        heapq.heapify(turns)
        while turns:
            _, waiter = heapq.heappop(turns)
            came = await self._turn_if_there(waiter, now)
            if came is Turn.UNDECIDED:
                return False
            if isinstance(came, Turn):
                following = next(lines[waiter.claim.count], None)
                if following is not None:
                    heapq.heappush(turns, (following.turn, following))
            else:
                why[waiter.claim.count] = came
                if came.reason is Reason.NO_FREE_DEVICE:
                    why |= {one.claim.count: its_turn_is_later(one.claim, waiter.claim) for _, one in turns}
                    return True
            if turns and self._is_over(now):
                return False
        return True

    async def _look_at(self, heads: list[Waiter], now: Round, why: dict[int, Deny]) -> bool:
        """Those who want more than any node has: they hold up nobody, and are told so when there is time."""
        known = self._why.get(heads[0].kind, {}) if heads else {}
        for head in sorted(heads, key=lambda one: one.claim.count in known):
            if self._is_over(now):
                return False
            came = await self._turn_if_there(head, now)
            if isinstance(came, Deny):
                why[head.claim.count] = came
        return True

    async def _turn_if_there(self, waiter: Waiter, now: Round) -> Turn | Deny:
        await asyncio.sleep(0)
        if waiter.pod.uid not in self._pods.lines or waiter.pod.uid in now.served:
            return Turn.PASSED_OVER
        return await self._turn(waiter, None, now)

    async def _turn(self, waiter: Waiter, held: Reservation | None, now: Round) -> Turn | Deny:
        """Its place, and its gate among those to be opened; or why not."""
        tries = self._tries.get(waiter.pod.uid)
        if tries is not None and tries.not_before > self._clock():
            return Turn.PASSED_OVER
        held = held or self._adoptable(waiter, now)
        places = decide(waiter.claim, self._fleet, self._policy) if held is None else ()
        if isinstance(places, Deny):
            return places
        try:
            if await self._is_misfit(waiter):
                return Turn.PASSED_OVER
            outfit = await self._outfit(waiter, held, places)
        except ReservationConflictError:
            log.warning("another's reservation has its id", pod=f"{waiter.pod.namespace}/{waiter.pod.name}")
            return Turn.PASSED_OVER
        except (LedgerError, NamespacesUnavailableError) as exc:
            name = f"{waiter.pod.namespace}/{waiter.pod.name}"
            log.warning("left for the next pass", pod=name, error=type(exc).__name__)
            return Turn.UNDECIDED
        if isinstance(outfit, Deny):
            return outfit
        now.served.add(waiter.pod.uid)
        now.opening.append(partial(self._open, waiter, outfit))
        return Turn.SERVED

    async def _is_misfit(self, waiter: Waiter) -> bool:
        """Once more, by what its namespace demands at this moment: before anything is held for it."""
        raw = self._pods.raws.get(waiter.pod.uid)
        if raw is None:
            return True
        try:
            rules = await self._claims.within(waiter.pod.namespace)
            refused = check.waits_as_dressed(raw, Pod.parse(raw), waiter.claim, self._rules, rules)
        except InvalidPodError as exc:
            refused = Deny(Reason.INVALID_POD, "; ".join(exc.mistakes[:20]))
        if refused is not None:
            self._pods.refuse(waiter.pod.uid, refused)
        return refused is not None

    async def _outfit(self, waiter: Waiter, held: Reservation | None, places: Sequence[Placement]) -> Outfit | Deny:
        claim, pod = waiter.claim, waiter.pod
        if not claim.count:
            return Outfit(claim, tuple(sorted(place.node for place in places)), has_waited=True)
        known = await self._reserved(waiter, places) if held is None else held
        if isinstance(known, Deny):
            return known
        if known.phase is not Phase.FINALIZED or known.uid != pod.uid:
            known = await self._ledger.confirm(known.id, pod, node=known.node)
        return Outfit(claim, (known.node,), known.id, known.uuids, has_waited=True)

    async def _reserved(self, waiter: Waiter, places: Sequence[Placement]) -> Reservation | Deny:
        """Whoever is faster costs a fresh decision, and not the turn."""
        claim, pod = waiter.claim, waiter.pod
        ask = Ask(reservation_id_of(pod), pod.namespace, claim.digest, pod.name, claim.is_shared)
        for _ in range(MOST_RACES):
            try:
                return await self._ledger.reserve(ask, places, answer_by=self._clock() + PATIENCE)
            except SlotsTakenError:
                again = decide(claim, self._fleet, self._policy)
                if isinstance(again, Deny):
                    return again
                places = again
        raise SlotsTakenError(ask.id)

    def _adoptable(self, waiter: Waiter, now: Round) -> Reservation | None:
        """What nobody else can come for: while this pod exists no other can be created under its name, and no creation
        lasts longer than the API server lets it."""
        left = now.left_over.get((waiter.pod.namespace, waiter.claim.digest), [])
        moment = self._clock()
        for one in left:
            is_abandoned = one.pod_name is None and one.since + LONGEST_CREATION <= moment
            is_its_own = one.pod_name == waiter.pod.name or is_abandoned
            if is_its_own and not self._node_objection(waiter.claim, one.node):
                left.remove(one)
                log.info("reservation adopted", reservation=one.id, pod=f"{one.namespace}/{waiter.pod.name}")
                return one
        return None

    # The gate.

    async def _all(self, actions: Sequence[Action]) -> None:
        waiting = iter(actions)

        async def work() -> None:
            for action in waiting:
                await action()

        await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(actions)))))

    async def _open(self, waiter: Waiter, outfit: Outfit) -> None:
        pod, raw = waiter.pod, self._pods.raws.get(waiter.pod.uid)
        if raw is None or pod.uid in self._pods.misfits:
            return  # it is gone, and so will be what it holds; or has been changed meanwhile
        try:
            is_there = await self._gates.open(pod, opened(raw, outfit, self._rules))
        except GateError as exc:
            tries = self._tries.setdefault(pod.uid, Tries(self._clock()))
            tries.not_before, tries.pause = self._clock() + tries.pause, min(2 * tries.pause, LONGEST_PAUSE)
            log.warning("gate not opened", namespace=pod.namespace, name=pod.name, problem=str(exc))
            return
        self._pods.forget(pod.uid)
        if is_there:
            text = f"{outfit.visible or 'proven'} on {outfit.nodes[0]}: the gate is open"
            self._events.tell(Subject.of_pod(pod), Reason.GATE_OPENED, text, is_warning=False)

    # Why not.

    async def _tell(self, now: Round) -> None:
        """Each pod when the reason has changed, some in each pass."""
        for uid, (pod, refused) in islice(self._untold_misfits(), TOLD_AT_A_TIME):
            self._told[uid] = refused.reason
            self._events.tell(Subject.of_pod(pod), refused.reason, refused.sentence)
        untold = list(islice(self._untold(now), TOLD_AT_A_TIME))
        with suppress(TimeoutError):
            async with asyncio.timeout(TELLING_BUDGET):
                await self._all([partial(self._tell_one, pod, refused) for pod, refused in untold])

    def _untold_misfits(self) -> Iterator[tuple[str, tuple[PodIdentity, Deny]]]:
        return ((uid, one) for uid, one in self._pods.misfits.items() if self._told.get(uid) is not one[1].reason)

    def _untold(self, now: Round) -> Iterator[tuple[PodIdentity, Deny]]:
        for kind, why in self._why.items():
            for head in self._pods.lines.heads(kind):
                refused = why.get(head.claim.count)
                if refused is None:
                    continue
                for waiter in self._pods.lines.behind(head):
                    uid = waiter.pod.uid
                    if self._told.get(uid) is not refused.reason and uid not in now.served:
                        yield waiter.pod, refused

    async def _tell_one(self, pod: PodIdentity, refused: Deny) -> None:
        try:
            await self._gates.say(pod, plain(refused.sentence, MAX_SAID))
        except GateError as exc:
            log.info("pod not told", namespace=pod.namespace, name=pod.name, problem=str(exc))
        self._told[pod.uid] = refused.reason
        self._events.tell(Subject.of_pod(pod), refused.reason, f"waits: {refused.sentence}")


def opened(raw: RawPod, outfit: Outfit, rules: DressRules) -> list[Change]:
    """All that a reservation means to a gated pod, on the condition that the pod is as it was seen."""
    meta: dict[str, Any] = raw["metadata"]
    gates = raw["spec"]["schedulingGates"]
    place = next(number for number, gate in enumerate(gates) if gate.get("name") == keys.QUEUE_GATE)
    return [
        {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        {"op": "test", "path": f"/spec/schedulingGates/{place}/name", "value": keys.QUEUE_GATE},
        *changes(raw, dressed(raw, outfit, rules)),
    ]
