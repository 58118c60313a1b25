"""Puts the pods that name our scheduler on nodes: where their GPUs are reserved, else where there is most room.

A pass looks at pods and decides in memory; every binding then goes its own way through the door that all Bindings pass,
and to the API server. One that hangs holds up nobody else.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

import structlog
from attrs import evolve

from webhook.admission.binding_check import BindingCheck
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.core import check, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, claim_of, recorded_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import InvalidPodError, LedgerError
from webhook.core.fleet import Fleet
from webhook.core.neighbours import BOUNDLESS
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import plain
from webhook.ledger.pods import PodFacts, PodsUnavailableError
from webhook.runtime.clock import Clock
from webhook.scheduler.binder_choice import REST, Choice, Shape
from webhook.scheduler.binder_promises import Promises
from webhook.scheduler.binder_view import Promise, Waiter, World
from webhook.scheduler.binder_volumes import Volumes
from webhook.scheduler.binder_wish import Anywhere, Hopeless, Outcome, Reserved, Wish
from webhook.scheduler.extender import BindingLostError, BindingRefusedError, Refused, evidence_query, node_of

log = structlog.get_logger(__name__)

# Bindings under way at once: more than the API server takes in at a time, and few enough for it to bear.
AT_ONCE = 64
# Seconds that one pass may take: where pods of many shapes wait, each of them looks at all nodes.
BUDGET = 0.5
# … and how much of it without letting others work.
TURN = 0.01
# How long the door may take over one pod before that pod waits for another turn.
DOOR_TIMEOUT = 5.0
# After a refusal by somebody else, the pod is tried again so much later, and less and less often.
SHORTEST, LONGEST = timedelta(milliseconds=500), timedelta(seconds=30)
# … but no later than this where what it was refused for has changed.
SOON = timedelta(seconds=1)
# What nobody tells of, an evidence's end among them, is noticed after this.
LOOK_AGAIN = timedelta(seconds=15)
MAX_TOLD = 900

NOT_DRESSED = (
    "the pod asks for GPUs or for a proven node, and nothing was set aside for it when it was created: label its "
    "namespace {}=true, see that the webhook is up, and create the pod anew"
)
BEYOND_US = "asks for what this scheduler does not look at: leave it to the cluster's own, or take it out of the pod"


class Bindings(Protocol):
    """Can put a pod on a node."""

    async def bind(self, pod: PodIdentity, node: str, version: str = "") -> None:
        """This very pod, as it was at that version. Raises BindingRefusedError or BindingLostError."""


class Living(PodFacts, Protocol):
    """Knows pods as they are at this moment."""

    async def find(self, namespace: str, name: str) -> Pod | None:
        """None if there is none. Raises PodsUnavailableError."""


class Telling(Protocol):
    """Tells whoever looks at a pod."""

    def waits(self, waiter: Waiter, why: str, outcome: Outcome | None = None) -> None:
        """No node will do, or somebody refused it. Said over and over, it is told now and then; `outcome` is counted
        then, where there was no try that is counted by itself."""

    def tried(self, waiter: Waiter, node: str, outcome: Outcome) -> None:
        """What became of a try to put it there."""


Place = tuple[int, datetime, str]
"""In the order of turns."""


class Binder:
    """Acts while it is elected; the world is kept current all the time."""

    def __init__(
        self,
        world: World,
        fleet: Fleet,
        policy: EvidencePolicy,
        claims: ClaimReader,
        door: BindingCheck,
        bindings: Bindings,
        pods: Living,
        volumes: Volumes,
        telling: Telling,
        clock: Clock,
        timer: Callable[[], float] = time.monotonic,
        opt_in: str = keys.OPT_IN.name,
    ) -> None:
        self._not_dressed = NOT_DRESSED.format(opt_in)
        self._world = world
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._binding_check = door
        self._bindings = bindings
        self._pods = pods
        self._promises = Promises(world, volumes, clock)
        self._telling = telling
        self._clock = clock
        self._timer = timer
        self._stopped_at: Place | None = None
        self._choice = Choice(world, fleet, policy)
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def step(self) -> None:
        """One pass over those whose turn it is; what they lead to goes on by itself."""
        now = self._clock()
        self._fleet.advance(now)
        began = yielded = self._timer()
        for waiter in self._in_turn(now):
            if len(self._under_way) >= AT_ONCE:
                return
            moment = self._timer()
            if moment >= began + BUDGET:
                self._stopped_at = turn_of(waiter)
                self._world.notify()
                return
            if moment >= yielded + TURN:
                yielded = moment
                await asyncio.sleep(0)
            if self._world.waiters.get(waiter.identity.uid) is waiter:
                self._look(waiter, now)
        self._stopped_at = None

    def _in_turn(self, now: datetime) -> list[Waiter]:
        """Those whose turn it is. Where the last pass had no time for all, it goes on with those that it left; not so
        with those whose place is fixed, for they cost little."""
        due = [one for one in self._world.waiters.values() if self._is_due(one, now)]
        fixed = [one for one in due if not is_anywhere(one)]
        others = [one for one in due if is_anywhere(one)]
        fixed.sort(key=turn_of)
        others.sort(key=turn_of)
        first = 0 if self._stopped_at is None else bisect_left(others, self._stopped_at, key=turn_of)
        return [*fixed, *others[first:], *others[:first]]

    async def settle(self) -> None:
        """Until no binding is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def stop(self) -> None:
        """No longer elected: what has no answer yet is left to whoever is."""
        for task in self._under_way:
            task.cancel()

    def _is_due(self, waiter: Waiter, now: datetime) -> bool:
        if waiter.is_on_its_way:
            return False
        if waiter.not_before is not None and now < waiter.not_before:
            # Refused by somebody else: that has to change first, and even then it is not asked all the time.
            return self._heard(waiter) > waiter.heard and now >= (waiter.soonest or now)
        wish = waiter.wish
        is_of_one_node = isinstance(wish, Reserved) and not waiter.is_ruled_out
        news = self._world.touched(wish.node) if is_of_one_node else self._world.changes
        return waiter.seen < news or waiter.retry_at is None or waiter.retry_at <= now

    def _heard(self, waiter: Waiter) -> int:
        """Counts changes of what somebody else may have refused the pod for."""
        wish = waiter.wish
        return self._world.touched(wish.node) if isinstance(wish, Reserved) else self._world.reshaped

    def _look(self, waiter: Waiter, now: datetime) -> None:
        waiter.seen, waiter.retry_at = self._world.changes, now + LOOK_AGAIN
        if waiter.wish is None:
            waiter.wish = self._wish(waiter)
        wish: Wish = waiter.wish
        if waiter.promise is not None:
            if not isinstance(wish, Hopeless) and self._is_fit(waiter, waiter.promise.node):
                self._send(waiter, waiter.promise.node)
                return
            self._world.give_up(waiter)
        match wish:
            case Hopeless(why, outcome):
                waiter.wish = None  # its namespace may demand something else by then
                self._telling.waits(waiter, why, outcome)
            case Reserved(claim, node):
                why = self._against(waiter, claim, node)
                if why:
                    self._telling.waits(waiter, why, Outcome.NO_NODE)
                else:
                    self._send(waiter, node)
            case Anywhere(shape):
                bounds = self._world.neighbours.bounds(waiter.company)
                shape = shape if bounds is BOUNDLESS else evolve(shape, bounds=bounds)
                found = self._choice.node_for(shape, now)
                if found is None:
                    if self._choice.is_unsure(shape):
                        waiter.retry_at = now + REST
                    self._telling.waits(waiter, self._choice.refusal(shape) + waiter.kept_by, Outcome.NO_NODE)
                    if waiter.kept_by:  # its claim may be bound to another volume by then
                        waiter.asked, waiter.wish = NodesAsked.of(waiter.pod), None
                else:
                    self._send(waiter, found)

    # What the pod wants.

    def _wish(self, waiter: Waiter) -> Wish:
        pod = waiter.pod
        if waiter.beyond_us:
            return Hopeless(f"{waiter.beyond_us}: {BEYOND_US}", Outcome.NO_NODE)
        try:
            recorded = recorded_claim(pod)
            if recorded is not None and recorded.count:
                return self._reserved(pod, recorded)
            asked = claim_of(pod, self._claims.known_within(pod.meta.namespace or ""))
        except InvalidPodError as exc:
            return Hopeless("; ".join(exc.mistakes[:20]), Outcome.NOT_RESERVED)
        if recorded is None:
            plain_shape = Anywhere(Shape(waiter.needs, waiter.asked))
            return plain_shape if asked is None else Hopeless(self._not_dressed, Outcome.NOT_RESERVED)
        proven = evidence_query(recorded, asked)
        if isinstance(proven, Refused):
            return Hopeless(proven.text, Outcome.NOT_RESERVED)
        return Anywhere(Shape(waiter.needs, waiter.asked, proven.claim.record.hashes))

    def _reserved(self, pod: Pod, claim: Claim) -> Wish:
        """The reservation says it all: no map is read here, and no name."""
        node = pod.annotations.get(keys.NODE.name)
        if not node or not pod.annotations.get(keys.RESERVATION_ID.name):
            return Hopeless(self._not_dressed, Outcome.NOT_RESERVED)
        return Reserved(claim, node)

    def _is_fit(self, waiter: Waiter, node: str) -> bool:
        """Whether it may still be put where its room is kept already."""
        room = self._world.rooms.get(node)
        return room is not None and room.objection(waiter.asked) is None

    def _against(self, waiter: Waiter, claim: Claim, node: str) -> str:
        """What speaks against the node of its GPUs at this moment, as far as memory says."""
        room = self._world.rooms.get(node)
        if room is None:
            return f"the pod's GPUs are on node {node}, which is not there"
        unproven = check.still_proven(claim, node, self._fleet, self._policy)
        if unproven is not None:
            return unproven.message
        found = room.objection(waiter.asked)
        texts = [found] if found else room.shortages(waiter.needs)
        neighbours = self._world.neighbours
        ruled_out = neighbours.objection(neighbours.bounds(waiter.company), node)
        waiter.is_ruled_out = ruled_out is not None
        texts = [*texts, *([ruled_out] if ruled_out else [])]
        return f"the pod's GPUs are on node {node}, which is {' and '.join(texts)}" if texts else ""

    # A binding on its way.

    def _send(self, waiter: Waiter, node: str) -> None:
        self._world.expect(waiter, node)
        task = asyncio.create_task(self._bind(waiter, node))
        self._under_way.add(task)
        task.add_done_callback(partial(self._ended, waiter))

    def _ended(self, waiter: Waiter, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if task.cancelled():  # it may not even have begun
            self._world.give_up(waiter)
        self._world.notify()

    async def _bind(self, waiter: Waiter, node: str) -> None:
        outcome, why = Outcome.FAILED, ""
        try:
            outcome, why = await self._tried(waiter, node)
        except Exception:
            log.exception("a binding failed", namespace=waiter.identity.namespace, name=waiter.identity.name)
        self._telling.tried(waiter, node, outcome)
        if waiter.promise is not None and outcome in (Outcome.PROVISIONING, Outcome.LOST):
            self._world.keep(waiter, waiter.promise)
            self._wait_for_volumes(waiter, waiter.promise, why if outcome is Outcome.PROVISIONING else "")
        elif outcome is not Outcome.BOUND:
            self._world.give_up(waiter)
            self._later(waiter, outcome, why)

    async def _tried(self, waiter: Waiter, node: str) -> tuple[Outcome, str]:
        pod = waiter.identity
        try:
            async with asyncio.timeout(DOOR_TIMEOUT):
                refused = await self._binding_check.refusal_of(waiter.pod, Binding(pod, node, {}))
        except (LedgerError, PodsUnavailableError, NamespacesUnavailableError, TimeoutError) as exc:
            log.warning("binding could not be checked", namespace=pod.namespace, name=pod.name, exc_info=exc)
            return Outcome.LOST, "the pod's reservation cannot be looked up at this moment"
        except InvalidPodError as exc:
            return Outcome.NOT_RESERVED, "; ".join(exc.mistakes[:20])
        if refused is not None:
            return Outcome.NOT_RESERVED, f"{refused.reason}: {refused.sentence}"
        unsettled = await self._promises.settle(waiter, node)
        if unsettled is not None:
            return unsettled
        try:
            await self._bindings.bind(pod, node, waiter.version)
        except BindingRefusedError as exc:
            return Outcome.CONFLICT if exc.is_race else Outcome.REFUSED, str(exc)
        except BindingLostError as exc:
            return await self._after_silence(pod, node, str(exc))
        return Outcome.BOUND, ""

    async def _after_silence(self, pod: PodIdentity, node: str, problem: str) -> tuple[Outcome, str]:
        """No answer came: the pod itself says whether it is there."""
        try:
            living = await self._pods.find(pod.namespace, pod.name)
        except (PodsUnavailableError, InvalidPodError):
            return Outcome.LOST, problem
        return (Outcome.BOUND, "") if node_of(living, pod) == node else (Outcome.LOST, problem)

    def _wait_for_volumes(self, waiter: Waiter, promise: Promise, why: str) -> None:
        pause = min(max(SOON, (self._clock() - promise.since) / 4), LONGEST)
        self._put_off(waiter, pause, pause)
        if why:
            self._telling.waits(waiter, plain(why, MAX_TOLD))

    def _later(self, waiter: Waiter, outcome: Outcome, why: str) -> None:
        """Another try after a while. What others changed in the meantime is no fault of the pod, and not told."""
        pause = min(SHORTEST * 2 ** min(waiter.tries, 10), LONGEST)
        self._put_off(waiter, pause, min(pause, SOON))
        waiter.tries += 1
        if why and outcome in (Outcome.NO_NODE, Outcome.NOT_RESERVED, Outcome.REFUSED):
            self._choice.forget()  # what spoke for the node may have changed without a word
            self._telling.waits(waiter, plain(why, MAX_TOLD))

    def _put_off(self, waiter: Waiter, pause: timedelta, pause_with_news: timedelta) -> None:
        now = self._clock()
        for one in (waiter, self._world.waiters.get(waiter.identity.uid)):
            if one is not None:
                one.heard = self._heard(one)
                one.soonest, one.not_before = now + pause_with_news, now + pause
                one.retry_at = one.not_before if one.promise else one.retry_at


def turn_of(waiter: Waiter) -> Place:
    return -waiter.priority, waiter.created, waiter.identity.uid


def is_anywhere(waiter: Waiter) -> bool:
    """Those whose place is fixed come first: the others can give way."""
    return not waiter.pod.annotations.get(keys.RESERVATION_ID.name)
