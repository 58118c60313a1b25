"""Nominates a node with free GPUs for a pod whose Binding was refused.

A scheduler that does not count GPUs would choose the same full node again. kube-scheduler tries the node in
`status.nominatedNodeName` before all others, and clears the field when a Binding fails.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta

import msgspec
import structlog
from attrs import define, field

from webhook.admission.binding_check import is_reserved_at_binding
from webhook.core import check
from webhook.core.claim import Claim, recorded_claim_or_none
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny
from webhook.runtime.clock import Clock
from webhook.scheduler.wakeups import (
    NotWokenError,
    PodWaker,
    UnschedulableStatusWire,
    WakerUnavailableError,
)

log = structlog.get_logger(__name__)

# The reason of the condition PodScheduled after a Binding was refused.
SCHEDULER_ERROR = "SchedulerError"
# Between two nominations of a pod.
PAUSE = timedelta(seconds=1)
# The most pods that one pass checks, so that the process's other work is not held up.
AT_A_TIME = 200


class NominatedStatusWire(UnschedulableStatusWire, frozen=True):
    nominated_node_name: str | None = None


class RefusedPodWire(msgspec.Struct, frozen=True):
    status: NominatedStatusWire | None = None


@define(eq=False)
class RefusedPod:
    """A pod whose Binding was refused."""

    identity: PodIdentity
    claim: Claim
    nominated: str
    not_before: datetime | None = None


@define(eq=False, repr=False)
class Nominations:
    """Listener of the watch of pods. `step` nominates nodes."""

    _fleet: Fleet
    _policy: EvidencePolicy
    _waker: PodWaker
    _clock: Clock
    # Called for each refused pod, so that `step` follows soon.
    _on_refused: Callable[[], None]
    _pods: dict[str, RefusedPod] = field(factory=dict, init=False)

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._pods.clear()
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        known, one = self._pods.pop(uid, None), refused_pod(raw)
        if one is None:
            return
        one.not_before = None if known is None else known.not_before
        self._pods[uid] = one
        self._on_refused()

    def deleted(self, raw: Raw) -> None:
        self._pods.pop(str(raw["metadata"].get("uid")), None)

    # Nominating.

    async def step(self) -> None:
        """One pass. A pod that no node fits is checked again in a later pass."""
        now = self._clock()
        self._fleet.advance(now)
        for one, node in list(self._due(now)):
            one.not_before = now + PAUSE
            try:
                await self._waker.nominate(one.identity, node)
            except WakerUnavailableError as exc:
                log.warning("node not nominated", problem=str(exc))
                return
            except NotWokenError as exc:
                pod = one.identity
                log.warning("node not nominated", namespace=pod.namespace, name=pod.name, problem=str(exc))

    def _due(self, now: datetime) -> Iterator[tuple[RefusedPod, str]]:
        """The pods to nominate a node for. Checked pods move to the end, so that all get their turn."""
        for uid in list(self._pods)[:AT_A_TIME]:
            one = self._pods[uid] = self._pods.pop(uid)
            if (one.not_before is not None and now < one.not_before) or self._fits(one):
                continue
            places = decide(one.claim, self._fleet, self._policy)
            if not isinstance(places, Deny):
                # Several pods should not all try the best node.
                yield one, random.choice(places).node  # noqa: S311 - only to spread them

    def _fits(self, one: RefusedPod) -> bool:
        """Whether the node that is nominated already can still serve the pod."""
        refused = check.serves_on(one.claim, one.nominated, self._fleet, self._policy, has_reservation=False)
        return refused is None


def refused_pod(raw: Raw) -> RefusedPod | None:
    """None if the pod is on a node, or waits for something else than a Binding."""
    try:
        pod, status = Pod.parse(raw), msgspec.convert(raw, RefusedPodWire).status or NominatedStatusWire()
    except (msgspec.ValidationError, InvalidPodError):
        return None
    claim = recorded_claim_or_none(pod)
    if claim is None or not is_reserved_at_binding(claim, pod) or pod.body.node_name:
        return None
    found = status.conditions or ()
    if not any((one.type, one.status, one.reason) == ("PodScheduled", "False", SCHEDULER_ERROR) for one in found):
        return None
    return RefusedPod(check.identity_of(pod), claim, status.nominated_node_name or "")
