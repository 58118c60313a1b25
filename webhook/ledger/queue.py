"""The queue: pods that wait behind our gate get their GPUs here, first come first served per kind of claim.

Every step can be the last one of this process. The reservation's id follows from the pod's uid and is found again; it
is the pod's before the gate is opened, and the gate is opened in one patch with all that the reservation means to the
pod.
"""

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Protocol

import structlog
from attrs import define

from webhook.clock import Clock
from webhook.core import check, keys
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.difference import Change
from webhook.core.dress import DressRules, Outfit, RawPod, changes, dressed
from webhook.core.errors import GpuwardenError, InvalidPodError, LedgerError
from webhook.core.fleet import Fleet
from webhook.core.lines import Kind, Waiter, its_turn_is_later
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Ask, Phase, PodIdentity, Reservation, ReservationId
from webhook.core.verdict import Deny, plain
from webhook.events import Events, Subject
from webhook.ledger import Ledger
from webhook.namespaces import ClaimReading, NamespacesUnavailableError
from webhook.waiting_pods import WaitingPods

log = structlog.get_logger(__name__)

# For a reservation that nobody's review waits for.
PATIENCE = timedelta(seconds=10)
# A reservation for a pod without a name is nobody's when its creation must have come to its end: the API server gives
# a request 60 s.
LONGEST_CREATION = timedelta(seconds=60)
# What one pass does: more would keep other work of the process waiting.
OPENED_AT_A_TIME = 100
TOLD_AT_A_TIME = 50
AT_ONCE = 16
# Between two tries at one gate: doubling, up to half a minute.
FIRST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(seconds=30)
MAX_SAID = 900


class GateError(GpuwardenError):
    """The gate could not be opened now; the text says why."""


class Gates(Protocol):
    """What is done to pods that wait. Both raise GateError; a pod that is gone is no mistake."""

    async def open(self, pod: PodIdentity, patch: list[Change]) -> None:
        """The whole JSON patch or nothing of it."""

    async def say(self, pod: PodIdentity, why: str) -> None:
        """What it waits for, in its annotation."""


@define
class Tries:
    """When a gate that could not be opened is tried again."""

    not_before: datetime
    pause: timedelta = FIRST_PAUSE


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
    ) -> None:
        self._pods = pods
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._rules = rules
        self._gates = gates
        self._events = events
        self._clock = clock
        self._why: dict[tuple[Kind, int], Deny] = {}
        self._told: dict[str, Reason] = {}
        self._tries: dict[str, Tries] = {}
        self._left_over: dict[tuple[str, str], list[Reservation]] | None = None

    async def step(self) -> None:
        """One pass. Who cannot be served now waits on, and is told why when that changes."""
        lines = self._pods.lines
        self._forget_gone()
        if not len(lines) and not self._pods.misfits:
            return
        self._fleet.advance(self._clock())
        self._left_over = None
        opening: list[Callable[[], Awaitable[None]]] = []
        why: dict[tuple[Kind, int], Deny] = {}
        for kind in lines.kinds():
            await self._serve(kind, opening, why)
        self._why = why
        await self._all(opening)
        await self._tell()

    def _forget_gone(self) -> None:
        there = self._pods.lines.uids() | self._pods.misfits.keys()
        for uid in self._told.keys() - there:
            del self._told[uid]
        for uid in self._tries.keys() - there:
            del self._tries[uid]

    # Whose turn it is.

    async def _serve(
        self, kind: Kind, opening: list[Callable[[], Awaitable[None]]], why: dict[tuple[Kind, int], Deny]
    ) -> None:
        """The oldest first, whatever number it wants. One that waits for devices to become free holds up those behind
        it; one that nothing can be had for holds up those alone that want the same."""
        lines = {head.claim.count: self._pods.lines.behind(head) for head in self._pods.lines.heads(kind)}
        turns = [(one.turn, one) for line in lines.values() if (one := next(line, None)) is not None]
        heapq.heapify(turns)
        while turns and len(opening) < OPENED_AT_A_TIME:
            _, waiter = heapq.heappop(turns)
            refused = await self._given(waiter, opening)
            if refused is None:
                following = next(lines[waiter.claim.count], None)
                if following is not None:
                    heapq.heappush(turns, (following.turn, following))
                continue
            why[kind, waiter.claim.count] = refused
            if refused.reason is Reason.NO_FREE_DEVICE:
                why |= {(kind, one.claim.count): its_turn_is_later(one.claim, waiter.claim) for _, one in turns}
                return

    async def _given(self, waiter: Waiter, opening: list[Callable[[], Awaitable[None]]]) -> Deny | None:
        """Its place, and its gate among those to be opened; None too if it is not to be tried again yet."""
        tries = self._tries.get(waiter.pod.uid)
        if tries is not None and tries.not_before > self._clock():
            return None
        outfit = await self._outfit(waiter)
        if isinstance(outfit, Deny):
            return outfit
        if outfit is not None:
            opening.append(lambda: self._open(waiter, outfit))
        return None

    async def _outfit(self, waiter: Waiter) -> Outfit | Deny | None:
        claim, pod = waiter.claim, waiter.pod
        try:
            if not claim.count:
                places = decide(claim, self._fleet, self._policy)
                if isinstance(places, Deny):
                    return places
                return Outfit(claim, tuple(sorted(place.node for place in places)), has_waited=True)
            held = await self._held(waiter)
            if isinstance(held, Deny):
                return held
            unproven = check.still_proven(claim, held.node, self._fleet, self._policy)
            return unproven or Outfit(claim, (held.node,), held.id, held.uuids, has_waited=True)
        except LedgerError as exc:
            log.warning("left for the next pass", pod=f"{pod.namespace}/{pod.name}", error=type(exc).__name__)
            return None

    async def _held(self, waiter: Waiter) -> Reservation | Deny:
        """Its reservation: the one that an earlier try has made, one that was left over from a creation of the same
        pod that came to nothing, or a new one. It is this pod's from here on."""
        claim, pod = waiter.claim, waiter.pod
        ask = Ask(ReservationId(f"pod-{pod.uid}"), pod.namespace, claim.digest, pod.name, claim.is_shared)
        known = self._ledger.of_pod(pod.uid) or await self._ledger.find(ask.id) or self._adoptable(waiter)
        if known is not None and (known.phase is Phase.RELEASING or known.is_past_deadline(self._clock())):
            known = None
        if known is None:
            places = decide(claim, self._fleet, self._policy)
            if isinstance(places, Deny):
                return places
            known = await self._ledger.reserve(ask, places, answer_by=self._clock() + PATIENCE)
        if known.phase is Phase.FINALIZED and known.uid == pod.uid:
            return known
        return await self._ledger.confirm(known.id, pod)

    def _adoptable(self, waiter: Waiter) -> Reservation | None:
        """What nobody else can come for: while this pod exists no other can be created under its name, and no creation
        lasts longer than the API server lets it."""
        if self._left_over is None:
            self._left_over = defaultdict(list)
            for one in self._ledger.reservations():
                if one.phase is Phase.PENDING and one.uid is None:
                    self._left_over[one.namespace, one.claim_digest].append(one)
        now = self._clock()
        for one in self._left_over.get((waiter.pod.namespace, waiter.claim.digest), ()):
            is_abandoned = one.pod_name is None and one.since + LONGEST_CREATION <= now
            suits = waiter.claim.nodes.matches(one.node, self._labels(one.node))
            if suits and not one.is_past_deadline(now) and (one.pod_name == waiter.pod.name or is_abandoned):
                self._left_over[waiter.pod.namespace, waiter.claim.digest].remove(one)
                log.info("reservation adopted", reservation=one.id, pod=f"{one.namespace}/{waiter.pod.name}")
                return one
        return None

    def _labels(self, node: str) -> dict[str, str]:
        berth = self._fleet.berths.get(node)
        return {} if berth is None else dict(berth.labels)

    # The gate.

    async def _all(self, opening: list[Callable[[], Awaitable[None]]]) -> None:
        waiting = iter(opening)

        async def work() -> None:
            for action in waiting:
                await action()

        await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(opening)))))

    async def _open(self, waiter: Waiter, outfit: Outfit) -> None:
        pod, raw = waiter.pod, self._pods.raws.get(waiter.pod.uid)
        if raw is None:
            return  # it is gone, and so will be what it holds
        try:
            await self._check(raw, waiter)
            await self._gates.open(pod, opened(raw, outfit, self._rules))
        except (GateError, InvalidPodError, NamespacesUnavailableError) as exc:
            tries = self._tries.setdefault(pod.uid, Tries(self._clock()))
            tries.not_before, tries.pause = self._clock() + tries.pause, min(2 * tries.pause, LONGEST_PAUSE)
            log.warning("gate not opened", namespace=pod.namespace, name=pod.name, problem=str(exc))
            return
        self._pods.forget(pod.uid)
        text = f"{outfit.visible or 'proven'} on {outfit.nodes[0]}: the gate is open"
        self._events.tell(Subject.of_pod(pod), Reason.GATE_OPENED, text, is_warning=False)

    async def _check(self, raw: RawPod, waiter: Waiter) -> None:
        """Once more, by what its namespace demands at this moment."""
        rules = await self._claims.within(waiter.pod.namespace)
        refused = check.waits_as_dressed(raw, Pod.parse(raw), waiter.claim, self._rules, rules)
        if refused is not None:
            raise GateError(refused.sentence)

    # Why not.

    async def _tell(self) -> None:
        """Each pod when the reason has changed, some in each pass."""
        left = TOLD_AT_A_TIME
        for uid, (pod, refused) in list(self._pods.misfits.items()):
            if left and self._told.get(uid) is not refused.reason:
                left -= 1
                self._told[uid] = refused.reason
                self._events.tell(Subject.of_pod(pod), refused.reason, refused.sentence)
        for (kind, count), refused in self._why.items():
            heads = [head for head in self._pods.lines.heads(kind) if head.claim.count == count]
            for waiter in (one for head in heads for one in self._pods.lines.behind(head)):
                if not left:
                    return
                if self._told.get(waiter.pod.uid) is not refused.reason:
                    left -= 1
                    await self._tell_one(waiter.pod, refused)

    async def _tell_one(self, pod: PodIdentity, refused: Deny) -> None:
        self._told[pod.uid] = refused.reason
        self._events.tell(Subject.of_pod(pod), refused.reason, f"waits: {refused.sentence}")
        try:
            await self._gates.say(pod, plain(refused.sentence, MAX_SAID))
        except GateError as exc:
            log.info("pod not told", namespace=pod.namespace, name=pod.name, problem=str(exc))


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
