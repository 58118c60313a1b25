"""Takes back allocations that stop pods from being bound.

kube-scheduler writes the allocation of a claim before it binds the pod. If the Binding fails, the allocation stays, and
each retry uses it. Once the node is no longer proven for the hash, the API server refuses every retry
(gpuwarden-proof-ends), and kube-scheduler looks for no other GPU. Without its allocation the claim is allocated again.

A claim with a consumer is left alone, and so is the claim of a pod on a node. The write names the version of the claim,
so it fails if kube-scheduler has written a consumer in between.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, Protocol

import msgspec
import structlog
from attrs import define, field, frozen

from webhook.core.fleet import Fleet
from webhook.core.hashes import HashPolicy
from webhook.core.proof_devices import digits_of_device, digits_of_hash
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.kube.events import Events, Subject
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.resource_claims import UnusedAllocation, unused_allocation
from webhook.kube.watch import key_of
from webhook.runtime.backoff import Backoff, Retries
from webhook.runtime.clock import Clock
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
BACKOFF: Final = Backoff(timedelta(seconds=0.5), timedelta(seconds=30))


class AllocationClient(Protocol):
    """Reads pods, and writes the status of their claims. All methods raise ApiUnavailableError and ApiRefusesError."""

    async def pod_of(self, pod: PodIdentity) -> Raw | None:
        """The pod as it is now. None if there is none of this uid."""

    async def clear_allocation(self, raw: Raw) -> None:
        """Takes back what was allocated if the claim is still at this version."""


@frozen
class UnusedClaim:
    """A claim without a consumer, at one version."""

    raw: Raw
    unused: UnusedAllocation


@define(eq=False, repr=False)
class UnusedAllocations:
    """Listener of the watch of claims. The elected leader writes in `step`. `policy_of` says what an opted-in namespace
    requires."""

    _objects: AllocationClient
    _fleet: Fleet
    _events: Events
    _clock: Clock
    _is_current: Callable[[], bool]
    _policy_of: Callable[[str], HashPolicy | None]
    _unused: dict[str, UnusedClaim] = field(factory=dict, init=False)
    _retries: Retries = field(factory=lambda: Retries(BACKOFF), init=False)

    # The listener of the watch.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for key in self._unused.keys() - objects.keys():
            self._forget(key)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        key = key_of(raw)
        try:
            unused = unused_allocation(raw)
        except msgspec.ValidationError as exc:
            log.warning("ResourceClaim cannot be read, its allocation stays", claim=key, problem=str(exc))
            unused = None
        if unused is None:
            self._forget(key)
        else:
            self._unused[key] = UnusedClaim(raw, unused)

    def deleted(self, raw: Raw) -> None:
        self._forget(key_of(raw))

    def _forget(self, key: str) -> None:
        self._unused.pop(key, None)
        self._retries.forget(key)

    # Actions.

    async def step(self) -> None:
        """One pass. What fails is left for a later one."""
        if not self._is_current():
            return
        now = self._clock()
        self._fleet.advance(now)
        found = [(key, one, self._obstacle(one.unused)) for key, one in self._unused.items()]
        due = [(key, one, why) for key, one, why in found if why and self._retries.is_due(key, now)]
        await run_concurrently((self._attempt(*one) for one in due), AT_ONCE)

    def _obstacle(self, unused: UnusedAllocation) -> str:
        """Why no pod can be bound with this allocation any more; empty if nothing is known."""
        policy = self._policy_of(unused.pod.namespace)
        for one in unused.proofs:
            evidence = self._fleet.fresh_evidence(one.pool)
            if evidence is None:
                return f"node {one.pool} is not proven any more"
            if digits_of_hash(evidence.hash) != digits_of_device(one.name):
                return f"node {one.pool} is proven for another hash"
            if policy is not None and policy.hashes and evidence.hash not in policy.hashes:
                return f"namespace {unused.pod.namespace} does not allow the hash of node {one.pool}"
        return ""

    async def _attempt(self, key: str, one: UnusedClaim, why: str) -> None:
        pod = one.unused.pod
        # Until something is known: also a pod that is on a node may get its consumer late.
        self._retries.postpone(key, self._clock())
        try:
            found = await self._objects.pod_of(pod)
            if found is None or found["spec"].get("nodeName"):
                return
            await self._objects.clear_allocation(one.raw)
        except (ApiUnavailableError, ApiRefusesError) as exc:
            log.warning("allocation not cleared", claim=key, problem=str(exc))
            return
        if self._unused.get(key) is one:
            del self._unused[key]
        log.info("allocation cleared", claim=key, pod=pod.name, why=why)
        text = f"the GPUs of ResourceClaim {one.raw['metadata']['name']} are allocated again: {why}"
        self._events.record(Subject.of_pod(pod), Reason.ALLOCATION_CLEARED, text)
