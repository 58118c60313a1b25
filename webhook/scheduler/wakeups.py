"""Wakes pods that wait because we refused every node: a scheduler does not ask an extender again by itself.

A pod is woken when a new node fits it. While a node fits, it is also woken from time to time: the replica that refused
it may have known less. Any change of a pod brings it back into the scheduler's queue.
"""

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Protocol

import msgspec
import structlog
from attrs import define, field

from webhook.admission.namespaces import ClaimReader
from webhook.core import check
from webhook.core.claim import Claim, claim_of, recorded_claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.extender_wire import is_from_us
from webhook.core.fleet import Fleet
from webhook.core.keys import NODE
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod, WireStruct
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock
from webhook.scheduler import filter as node_filter

log = structlog.get_logger(__name__)


# Between two wake-ups of a pod.
BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
# The most that one pass does, so that the process's other work is not held up.
AT_A_TIME = 200
CHECKED_AT_A_TIME = 1000
# A pass ends after this many failures in a row: the API server may be down.
MAX_FAILURES = 3
# The most fitting nodes that are remembered for a pod.
MAX_FITTING = 16


class NotWokenError(GpuwardenError):
    """The pod could not be woken; the text says why."""


class WakerUnavailableError(NotWokenError):
    """No pod can be woken now: the API server cannot be reached."""


class PodWaker(Protocol):
    """Brings a pod back to its scheduler."""

    async def nominate(self, pod: PodIdentity, node: str) -> None:
        """Has the scheduler try this node first. Does nothing if the pod is gone. Raises NotWokenError."""

    async def wake(self, pod: PodIdentity, at: str) -> None:
        """Changes an annotation of the pod. Does nothing if the pod is gone. Raises NotWokenError."""


class UnschedulableConditionWire(WireStruct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class UnschedulableStatusWire(WireStruct, frozen=True):
    conditions: list[UnschedulableConditionWire] | None = None


class UnschedulablePodWire(WireStruct, frozen=True):
    status: UnschedulableStatusWire | None = None


QueryKey = tuple[str, NodesAsked, str | None]


@define(eq=False)
class UnschedulablePod:
    """A pod that its scheduler could not place, and the nodes that fitted it at the last check."""

    identity: PodIdentity
    claim: Claim
    # The node of its reservation, if it has one.
    reserved: str | None
    fitting: frozenset[str] = frozenset()
    not_before: datetime | None = None
    failures: int = 0
    query: QueryKey = field(init=False)
    """Pods with the same value have the same fitting nodes."""

    @query.default
    def _query(self) -> QueryKey:
        return self.claim.record.text(), self.claim.nodes, self.reserved


class Wakeups:
    """Listener of the watch of pods. `step` wakes those that a new node fits."""

    def __init__(
        self, fleet: Fleet, policy: EvidencePolicy, claims: ClaimReader, waker: PodWaker, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._waker = waker
        self._clock = clock
        self._waiters: dict[str, UnschedulablePod] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        uids = {raw["metadata"].get("uid") for raw in objects.values()}
        for uid in self._waiters.keys() - uids:
            del self._waiters[uid]
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        waiter = self._waiter(raw) if is_rejected_by_us(raw) else None
        known = self._waiters.get(uid)
        if waiter is None:
            self._waiters.pop(uid, None)
        elif known is None or known.query != waiter.query:
            self._waiters[uid] = waiter

    def deleted(self, raw: Raw) -> None:
        self._waiters.pop(str(raw["metadata"].get("uid")), None)

    def _waiter(self, raw: Raw) -> UnschedulablePod | None:
        try:
            pod = Pod.parse(raw)
            recorded = recorded_claim(pod)
            claim = recorded or claim_of(pod, self._claims.known_within(pod.meta.namespace or ""))
        except InvalidPodError:
            return None  # its author must change it, and that wakes it
        if claim is None:
            return None
        if recorded is not None and recorded.is_left_to_scheduler:
            return UnschedulablePod(check.identity_of(pod), recorded.without_gpus(), None)
        is_held = recorded is not None and recorded.count
        return UnschedulablePod(
            check.identity_of(pod), claim, (pod.annotations.get(NODE.name) or None) if is_held else None
        )

    # Waking.

    async def step(self) -> None:
        """One pass. A pod that could not be woken is tried again later."""
        now = self._clock()
        self._fleet.advance(now)
        failures = 0
        for waiter in list(self._due(now))[:AT_A_TIME]:
            failures = 0 if await self._wake(waiter, now) else failures + 1
            if failures >= MAX_FAILURES:
                return

    def _due(self, now: datetime) -> Iterator[UnschedulablePod]:
        """The pods to wake now. Checked pods move to the end, so that all get their turn."""
        answers: dict[QueryKey, frozenset[str]] = {}
        for uid in list(self._waiters)[:CHECKED_AT_A_TIME]:
            waiter = self._waiters[uid] = self._waiters.pop(uid)
            if waiter.query not in answers:
                answers[waiter.query] = self._nodes_for(waiter)
            if is_due(waiter, answers[waiter.query], now):
                yield waiter

    def _nodes_for(self, waiter: UnschedulablePod) -> frozenset[str]:
        """Up to MAX_FITTING of the nodes that fit now."""
        claim, reserved = waiter.claim, waiter.reserved
        if reserved is not None:
            is_proven = check.still_proven(claim, reserved, self._fleet, self._policy) is None
            return frozenset({reserved} if is_proven else ())
        found = self._decided(claim)
        if claim.count and not found and node_filter.is_counted_elsewhere(claim):
            without = Claim(msgspec.structs.replace(claim.record, gpus=0), claim.nodes)
            found = {name for name in self._decided(without) if not self._fleet.indexed_nodes[name].node.devices}
        return frozenset(found)

    def _decided(self, claim: Claim) -> Collection[str]:
        places = decide(claim, self._fleet, self._policy, most=MAX_FITTING)
        return () if isinstance(places, Deny) else {place.node for place in places}

    async def _wake(self, waiter: UnschedulablePod, now: datetime) -> bool:
        """Returns whether the API server could be reached."""
        waiter.failures += 1
        waiter.not_before = now + BACKOFF.pause(waiter.failures)
        pod = waiter.identity
        try:
            await self._waker.wake(pod, now.isoformat(timespec="milliseconds"))
        except NotWokenError as exc:
            log.warning("pod not woken", namespace=pod.namespace, name=pod.name, problem=str(exc))
            return not isinstance(exc, WakerUnavailableError)
        log.info("pod woken", namespace=pod.namespace, name=pod.name)
        return True


def is_due(waiter: UnschedulablePod, fitting: frozenset[str], now: datetime) -> bool:
    """Whether to wake the pod now. A newly fitting node shortens its pause."""
    if fitting - waiter.fitting:
        waiter.failures = 0
        if waiter.not_before is not None:
            waiter.not_before = min(waiter.not_before, now + BACKOFF.first)
    waiter.fitting = fitting
    return bool(fitting) and (waiter.not_before is None or waiter.not_before <= now)


def is_rejected_by_us(raw: Raw) -> bool:
    """Whether its scheduler found no node, and we refused at least one.

    kube-scheduler's condition has only a message, with the messages of all refusals.
    """
    if (raw.get("spec") or {}).get("nodeName") or raw["metadata"].get("deletionTimestamp"):
        return False
    try:
        status = msgspec.convert(raw, UnschedulablePodWire).status
    except msgspec.ValidationError:
        return False
    return any(
        one.type == "PodScheduled" and one.status == "False" and is_from_us(one.message or "")
        for one in (status and status.conditions) or ()
    )
