"""Creates the ResourceClaims that pods name.

The pod names its claim from its creation on, and owns it: Kubernetes deletes it with the pod. The process may stop
after any step: the name is in the pod, and a claim that exists is recognized.

The claim of a pod with a reservation takes exactly the reserved GPUs. It is made for the pod that has the reservation
by its uid, and for no other pod that names the same claim. The claim of a pod without one takes any GPUs that the pod's
record asks for and its namespace allows. Only the claim of a pod of a StatefulSet takes the GPUs that the set's map
keeps.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from operator import eq
from typing import Final, Protocol

import msgspec
import structlog
from attrs import define, evolve, field, frozen
from msgspec import structs

from webhook.core import keys
from webhook.core.claim import stateful_set_of
from webhook.core.claim_keys import ClaimRecord
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.gpu_demand import demand_of
from webhook.core.gpu_map import SetId
from webhook.core.hashes import HashPolicy
from webhook.core.pod import Metadata, Pod
from webhook.core.pod_claims import own_claim_of
from webhook.core.proof_claims import CLAIM_LABELS, demanded_spec, reserved_claim_spec, without_defaults
from webhook.core.proof_devices import hash_attribute
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.resource_claims import ConfigWire
from webhook.runtime.backoff import Backoff, Retry
from webhook.runtime.clock import Clock
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
BACKOFF: Final = Backoff(timedelta(seconds=0.5), timedelta(seconds=30))
# A claim of a pod that is not on a node yet is checked again after this: somebody may have deleted it.
CHECKED_EVERY: Final = timedelta(seconds=30)


class ClaimClient(Protocol):
    """Reads and writes ResourceClaims. All methods raise ApiUnavailableError and ApiRefusesError."""

    async def get(self, namespace: str, name: str) -> Raw | None:
        """None if there is no claim of that name."""

    async def create(self, raw: Raw) -> Raw | None:
        """The claim that has the name by now, created or found; None if it was deleted in between."""

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the claim if it has this uid."""


@frozen
class ClaimForm:
    """How claims are written in this installation."""

    gpu_driver: str
    gpu_class: str
    mig_class: str
    # Whether GPUs of nodes with evidence are taken with their proof devices.
    has_proofs: bool
    # Whether the pod is evicted when the evidence ends.
    evicts: bool
    # Whether claims that name no hash need evidence too.
    needs_evidence: bool


@frozen
class ClaimingPod:
    """A pod that names a claim of our form and is on no node yet."""

    pod: PodIdentity
    claim_name: str
    # Empty if kube-scheduler chooses the GPUs.
    reservation_id: str
    record: ClaimRecord
    stateful_set: SetId | None = None

    @classmethod
    def of(cls, raw: Raw) -> "ClaimingPod | None":
        """None for a pod that needs no claim: on a node it has one."""
        spec = raw.get("spec")
        if not isinstance(spec, dict) or not spec.get("resourceClaims"):
            return None
        try:
            pod = Pod.parse(raw)
            record = ClaimRecord.parse(pod.annotations.get(keys.CLAIM.name) or "")
        except InvalidPodError:
            return None
        meta, name = pod.meta, own_claim_of({"resourceClaims": pod.body.resource_claims})
        reservation_id = pod.annotations.get(keys.RESERVATION_ID.name) or ""
        if not name or pod.body.node_name or pod.is_gated or raw["metadata"].get("deletionTimestamp"):
            return None
        if record.is_left_to_scheduler == bool(reservation_id) or not meta.uid:
            return None
        identity = PodIdentity(meta.namespace or "", meta.name or "", meta.uid)
        return cls(identity, name, reservation_id, record, stateful_set_of(pod))

    def has(self, held: Reservation) -> bool:
        """Whether it is the pod of the reservation."""
        return (
            held.uid == self.pod.uid
            and held.id == self.reservation_id
            and held.claim_digest == self.record.digest()
            and held.namespace == self.pod.namespace
        )


@define(eq=False, repr=False)
class ReservedClaims:
    """Listener of the watch of pods. The elected leader writes in `step`. `find` gives the reservation of a pod by its
    uid, and `policy_of` what an opted-in namespace requires."""

    _objects: ClaimClient
    _find: Callable[[str], Reservation | None]
    _fleet: Fleet
    _events: Events
    _clock: Clock
    _form: ClaimForm
    _is_current: Callable[[], bool]
    _policy_of: Callable[[str], HashPolicy | None] = lambda _: None
    wakeup: asyncio.Event = field(factory=asyncio.Event, init=False)
    _pods: dict[str, ClaimingPod] = field(factory=dict, init=False)
    # Pods that are not due yet, and the uids of the claims that were made or found for pods.
    _tries: dict[str, Retry] = field(factory=dict, init=False)
    _made: dict[str, str] = field(factory=dict, init=False)
    # Since when pods have no reservation, or when their claims were last looked up.
    _unreserved: dict[str, datetime] = field(factory=dict, init=False)

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {str(raw["metadata"].get("uid")) for raw in objects.values()}
        for uid in self._pods.keys() - there:
            self._forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid, one = str(raw["metadata"].get("uid")), ClaimingPod.of(raw)
        if one is None:
            self._forget(uid)
        elif self._pods.get(uid) != one:
            self._pods[uid] = one
            self._tries.pop(uid, None)
            self.wakeup.set()

    def deleted(self, raw: Raw) -> None:
        self._forget(str(raw["metadata"].get("uid")))

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._tries.pop(uid, None)
        self._made.pop(uid, None)
        self._unreserved.pop(uid, None)

    def begin(self) -> None:
        """This process was elected: another leader may have written since."""
        self._tries.clear()
        self._made.clear()

    def wake(self) -> None:
        """Reservations or evidence have changed."""
        if len(self._made) < len(self._pods):
            self.wakeup.set()

    # Actions.

    async def step(self) -> None:
        """One pass. What fails is left for a later one."""
        if not self._is_current():
            return
        now = self._clock()
        self._fleet.advance(now)
        due = [one for uid, one in self._pods.items() if uid not in self._tries or self._tries[uid].not_before <= now]
        await run_concurrently((self._attempt(one) for one in due), AT_ONCE)

    async def _attempt(self, one: ClaimingPod) -> None:
        held = self._find(one.pod.uid)
        try:
            if one.record.is_left_to_scheduler:
                spec = self._demanded(one)
                await (self._withdraw(one) if spec is None else self._make(one, spec, partial(eq, spec)))
            elif held is None or not is_live(held) or not one.has(held):
                await self._withdraw(one)
            else:
                await self._make(one, self._reserved(one, held), partial(self._is_as_reserved, one, held))
        except (ApiUnavailableError, ApiRefusesError) as exc:
            self._tries.setdefault(one.pod.uid, Retry(self._clock())).postpone(self._clock(), BACKOFF)
            log.warning("claim not written", namespace=one.pod.namespace, claim=one.claim_name, problem=str(exc))

    async def _withdraw(self, one: ClaimingPod) -> None:
        """The pod has no reservation any more, or its namespace does not allow its hashes. Its claim must not keep GPUs
        that others can have."""
        uid = self._made.get(one.pod.uid) or await self._left_over(one)
        if uid:
            await self._objects.delete(one.pod.namespace, one.claim_name, uid)
            self._made.pop(one.pod.uid, None)
            log.info("claim withdrawn", namespace=one.pod.namespace, claim=one.claim_name, pod=one.pod.name)

    async def _left_over(self, one: ClaimingPod) -> str:
        """The uid of the claim that an earlier leader made for the pod; empty if there is none, or if it is not looked
        up yet: the reservation of a new pod may not be known yet, or the label of its namespace."""
        now = self._clock()
        if now < self._unreserved.setdefault(one.pod.uid, now) + CHECKED_EVERY:
            return ""
        self._unreserved[one.pod.uid] = now
        found = await self._objects.get(one.pod.namespace, one.claim_name)
        return "" if found is None or not is_owned(found, one.pod) else str(found["metadata"].get("uid") or "")

    async def _make(self, one: ClaimingPod, spec: Raw | None, is_as_written: Callable[[Raw], bool]) -> None:
        """Without a spec the claim cannot be made yet. A claim that exists has to be as written, too."""
        self._unreserved.pop(one.pod.uid, None)
        if spec is None:
            return
        found = await self._objects.create(claim_of(one, spec))
        if found is None:
            return
        if not is_owned(found, one.pod):
            self._report(one, "exists and is not of this pod: the pod stays pending")
        elif not is_as_written(without_defaults(found["spec"])):
            await self._objects.delete(one.pod.namespace, one.claim_name, str(found["metadata"].get("uid") or ""))
            self._report(one, "is deleted, because a webhook or a policy has changed what it asks for")
        else:
            if one.pod.uid not in self._made:
                log.info("claim made", namespace=one.pod.namespace, claim=one.claim_name, pod=one.pod.name)
            self._made[one.pod.uid] = str(found["metadata"].get("uid") or "")
        self._tries[one.pod.uid] = Retry(self._clock() + CHECKED_EVERY)

    def _demanded(self, one: ClaimingPod) -> Raw | None:
        """The spec of the claim by the pod's record. None if the namespace has not opted in or allows none of the
        hashes: the pod may be older than its rules."""
        policy = self._policy_of(one.pod.namespace)
        if policy is None or policy.mistakes:
            return None
        hashes = policy.restrict(one.record.hashes)
        if one.record.hashes and not hashes:
            return None
        try:
            demand = demand_of(structs.replace(one.record, hashes=hashes))
        except InvalidPodError:
            return None
        form, owner = self._form, one.stateful_set
        demand = evolve(demand, kept_for="" if owner is None else owner.digest)
        return demanded_spec(demand, gpu_driver=form.gpu_driver, gpu_class=form.gpu_class, evicts=form.evicts)

    def _reserved(self, one: ClaimingPod, held: Reservation) -> Raw | None:
        """The spec of the claim for the reserved GPUs. None while their node is not proven."""
        is_ready, attribute = self._proof(one, held)
        return self._spec(held, attribute) if is_ready else None

    def _proof(self, one: ClaimingPod, held: Reservation) -> tuple[bool, str | None]:
        """Whether the claim can be made now, and the hash attribute of the proofs that it takes, if it takes any."""
        if not self._form.has_proofs:
            return True, None
        evidence, hashes = self._fleet.fresh_evidence(held.node), one.record.hashes
        if evidence is not None and (not hashes or evidence.hash in hashes):
            return True, hash_attribute(evidence.hash)
        return not hashes and not self._form.needs_evidence, None

    def _is_as_reserved(self, one: ClaimingPod, held: Reservation, spec: Raw) -> bool:
        """Whether the claim is for the GPUs of the reservation and for a hash that the pod accepts. The evidence may
        have changed since."""
        attribute = hash_asked_for(spec)
        accepted = {hash_attribute(hash) for hash in one.record.hashes}
        if accepted and self._form.has_proofs and attribute not in accepted:
            return False
        return spec == self._spec(held, attribute)

    def _spec(self, held: Reservation, attribute: str | None) -> Raw:
        form = self._form
        return reserved_claim_spec(
            sorted(held.uuids),
            attribute,
            gpu_driver=form.gpu_driver,
            gpu_class=form.gpu_class,
            mig_class=form.mig_class,
            evicts=form.evicts,
        )

    def _report(self, one: ClaimingPod, problem: str) -> None:
        text = f"ResourceClaim {one.claim_name} {problem}"
        self._events.record(Subject.of_pod(one.pod), Reason.RESOURCE_CLAIM_TAKEN, text)


class ClaimDevicesWire(msgspec.Struct, frozen=True):
    requests: list[Raw] | None = None
    config: list[ConfigWire] | None = None


class ClaimSpecWire(msgspec.Struct, frozen=True):
    devices: ClaimDevicesWire


class OwnedClaimWire(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: ClaimSpecWire


def claim_of(one: ClaimingPod, spec: Raw) -> Raw:
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": one.pod.name,
        "uid": one.pod.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": one.claim_name,
            "namespace": one.pod.namespace,
            "labels": {keys.MANAGED_BY: keys.OURS, **CLAIM_LABELS},
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def is_live(held: Reservation) -> bool:
    return held.phase is not Phase.RELEASING and held.orphan is None


def is_owned(found: Raw, pod: PodIdentity) -> bool:
    """Whether gpuwarden has made the claim for the pod."""
    try:
        meta = msgspec.convert(found, OwnedClaimWire).metadata
    except msgspec.ValidationError:
        return False
    is_ours = (meta.labels or {}).get(keys.MANAGED_BY) == keys.OURS
    return is_ours and any(one.uid == pod.uid and one.controller for one in meta.owner_references or ())


def hash_asked_for(spec: Raw) -> str | None:
    """The attribute that the claim asks for; None if it asks for no proofs, or does not say so."""
    config = msgspec.convert(spec, ClaimSpecWire).devices.config or ()
    match [one.opaque.parameters for one in config if one.opaque is not None]:
        case [{"hash": str() as hash}]:
            return hash
        case _:
            return None


class OnEveryChange:
    """Listener of a watch that only calls a function."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._call()

    def changed(self, raw: Raw) -> None:
        self._call()

    def deleted(self, raw: Raw) -> None:
        self._call()
