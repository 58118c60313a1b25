"""Opens the scheduling gates of pods whose turn has come. One patch removes the gate and dresses the pod; a failed
patch is tried again after a pause."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any, Protocol

import structlog
from attrs import evolve

from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core import keys
from webhook.core.difference import Change
from webhook.core.dress import Allocation, DressRules, RawPod, changes, dressed
from webhook.core.errors import GpuwardenError
from webhook.core.pod_claims import own_claim_of
from webhook.core.queue_order import QueuedPod
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.kube.events import Events, Subject
from webhook.runtime.backoff import Backoff, Retries
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

AT_ONCE = 16
# Between two tries at one gate.
BACKOFF = Backoff(timedelta(seconds=1), timedelta(seconds=30))


class GateError(GpuwardenError):
    """The request on the gate failed; the text says why."""


class GateClient(Protocol):
    """Acts on waiting pods in the API server. All methods raise GateError. A pod that is gone is no error."""

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        """Applies the whole JSON patch or none of it. Returns whether a pod of that name exists."""

    async def write_reason(self, pod: PodIdentity, why: str) -> None:
        """Writes what the pod waits for into its annotation."""

    async def is_closed(self, pod: PodIdentity) -> bool:
        """Whether the pod of this uid exists and waits behind our gate, by a quorum read."""


class GateOpener:
    """Opens gates, and remembers which could not be opened."""

    def __init__(self, pods: WaitingPods, gates: GateClient, rules: DressRules, events: Events, clock: Clock) -> None:
        self._pods = pods
        self._gates = gates
        self._rules = rules
        self._events = events
        self._clock = clock
        self._tries = Retries(BACKOFF)

    def retain(self, uids: Collection[str]) -> None:
        self._tries.retain(uids)

    def is_paused(self, uid: str) -> bool:
        """Whether the last try has failed and its pause is not over."""
        return not self._tries.is_due(uid, self._clock())

    def postpone(self, uid: str, pause: timedelta) -> None:
        """Sets the pause of a gate that could not be opened."""
        self._tries.pause_until(uid, self._clock() + pause)

    def try_later(self, uid: str) -> None:
        """Puts the next try off, after a failure that is likely to repeat."""
        self._tries.postpone(uid, self._clock())

    async def open(self, waiter: QueuedPod, outfit: Allocation) -> None:
        pod, raw, known = waiter.pod, self._pods.raws.get(waiter.pod.uid), self._pods.queue_order.get(waiter.pod.uid)
        if raw is None or known is None or known.claim != waiter.claim:
            return  # the pod is gone, and its reservation will follow; or it has changed
        try:
            is_there = await self._gates.open(pod, opening_patch(raw, outfit, self._rules))
        except GateError as exc:
            self.try_later(pod.uid)
            log.warning("gate not opened", namespace=pod.namespace, name=pod.name, problem=str(exc))
            return
        self._pods.forget(pod.uid, was_served=is_there)
        if is_there:
            gpus = outfit.visible or ("reserved" if outfit.uuids else "proven")
            text = f"{gpus} on {outfit.nodes[0]}: the gate is open"
            self._events.record(Subject.of_pod(pod), Reason.GATE_OPENED, text, is_warning=False)


def opening_patch(raw: RawPod, outfit: Allocation, rules: DressRules) -> list[Change]:
    """The patch that opens the gate and dresses the pod, if the pod has not changed. Its containers were blinded at
    creation; older versions did not blind all of them, and those cannot be changed any more."""
    meta: dict[str, Any] = raw["metadata"]
    gates = raw["spec"]["schedulingGates"]
    outfit = evolve(outfit, hides_gpus_everywhere=False, claim_name=own_claim_of(raw["spec"]))
    place = next(number for number, gate in enumerate(gates) if gate.get("name") == keys.QUEUE_GATE)
    return [
        {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        {"op": "test", "path": f"/spec/schedulingGates/{place}/name", "value": keys.QUEUE_GATE},
        *changes(raw, dressed(raw, outfit, rules)),
    ]
