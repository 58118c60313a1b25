"""ResourceClaims: what they have allocated, for which pods, and the hash that each proof device is for."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import msgspec
from attrs import frozen

from webhook.core.pod import OwnerReference
from webhook.core.proof_claims import CLAIM_LABELS
from webhook.core.proof_devices import DRIVER
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.kube.pods import path_names
from webhook.kube.requests import POD_PATH, ApiRefusesError, RateLimitedClient
from webhook.kube.resource_slices import CHALLENGE_FAILED, CHALLENGED, Timestamp

IN_NAMESPACE: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
NAMED: Final = IN_NAMESPACE + "/{name}"
STATUS: Final = NAMED + "/status"
NOT_FOUND, CONFLICT = 404, 409


class OpaqueWire(msgspec.Struct, frozen=True):
    driver: str
    # Each driver has parameters of its own.
    parameters: Any = None


class ConfigWire(msgspec.Struct, frozen=True):
    source: str = ""
    requests: list[str] | None = None
    opaque: OpaqueWire | None = None


class ResultWire(msgspec.Struct, frozen=True, rename="camel"):
    driver: str
    pool: str
    device: str
    request: str = ""
    admin_access: bool | None = None
    binding_conditions: list[str] = []


class DevicesWire(msgspec.Struct, frozen=True):
    results: list[ResultWire] | None = None
    # Parsed only where the hash is needed: a watch reads all claims of the cluster.
    config: Any = None


class AllocationWire(msgspec.Struct, frozen=True, rename="camel"):
    devices: DevicesWire | None = None
    allocation_timestamp: Timestamp | None = None


class ConsumerWire(msgspec.Struct, frozen=True):
    resource: str
    name: str
    uid: str


class DeviceConditionWire(msgspec.Struct, frozen=True):
    type: str


class DeviceStatusWire(msgspec.Struct, frozen=True):
    driver: str
    pool: str
    device: str
    conditions: list[DeviceConditionWire] | None = None


class ClaimStatusWire(msgspec.Struct, frozen=True, rename="camel"):
    allocation: AllocationWire | None = None
    reserved_for: list[ConsumerWire] | None = None
    # Parsed only for claims that wait for an answer.
    devices: Any = None


class MetadataWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str
    namespace: str = ""
    labels: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None


class ClaimWire(msgspec.Struct, frozen=True):
    metadata: MetadataWire
    status: ClaimStatusWire | None = None


@frozen
class AllocatedDevice:
    """One device of a claim."""

    driver: str
    pool: str
    name: str
    request: str
    # Such a claim, for example of a monitor, takes the device from no other one.
    is_admin: bool = False


@frozen
class AllocatedClaim:
    """A claim with devices, and the uids of the pods that may use them."""

    uid: str
    namespace: str
    name: str
    devices: tuple[AllocatedDevice, ...]
    pods: tuple[str, ...]


@frozen
class AllocatedProof:
    """A proof device of a claim. `hashes` are the attributes that the claim accepts, all if it is empty; None if the
    claim does not say so."""

    device: AllocatedDevice
    hashes: tuple[str, ...] | None


@frozen
class ProofAllocation:
    """The proof devices of one claim; None without an allocation."""

    uid: str
    proofs: tuple[AllocatedProof, ...] | None
    # The uids of the pods that may use them.
    pods: tuple[str, ...] = ()


@frozen
class UnusedAllocation:
    """The proof devices of a claim that no pod may use yet, and the pod that owns the claim."""

    pod: PodIdentity
    proofs: tuple[AllocatedDevice, ...]


@frozen
class AwaitedChallenge:
    """What a claim waits for: the node has to answer a challenge that is newer than the allocation. `hash` is the
    attribute that the claim asks for."""

    node: str
    hash: str | None
    since: datetime
    devices: tuple[str, ...]


def allocated_claim(raw: Raw) -> AllocatedClaim | None:
    """None without an allocation. A claim that cannot be parsed raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, ClaimWire)
    allocation = wire.status.allocation if wire.status is not None else None
    devices = tuple(devices_of(allocation))
    if not devices:
        return None
    return AllocatedClaim(wire.metadata.uid, wire.metadata.namespace, wire.metadata.name, devices, pods_of(wire))


def pods_of(wire: ClaimWire) -> tuple[str, ...]:
    """The uids of the pods that may use the claim."""
    consumers = (wire.status and wire.status.reserved_for) or ()
    return tuple(one.uid for one in consumers if one.resource == "pods")


def proof_allocation(raw: Raw) -> ProofAllocation:
    """A claim that cannot be parsed raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, ClaimWire)
    allocation = wire.status.allocation if wire.status is not None else None
    if allocation is None:
        return ProofAllocation(wire.metadata.uid, None)
    config = msgspec.convert(allocation.devices and allocation.devices.config, list[ConfigWire] | None) or ()
    proofs = tuple(
        AllocatedProof(one, hashes_for(one.request, config)) for one in devices_of(allocation) if one.driver == DRIVER
    )
    return ProofAllocation(wire.metadata.uid, proofs, pods_of(wire))


def unused_allocation(raw: Raw) -> UnusedAllocation | None:
    """None if the claim is not one of ours, has no proof devices, or a consumer. A claim that cannot be parsed raises
    msgspec.ValidationError."""
    wire = msgspec.convert(raw, ClaimWire)
    meta, status = wire.metadata, wire.status
    if status is None or status.reserved_for or not (meta.labels or {}).items() >= CLAIM_LABELS.items():
        return None
    proofs = tuple(one for one in devices_of(status.allocation) if one.driver == DRIVER)
    owner = next((one for one in meta.owner_references or () if one.controller and one.kind == "Pod"), None)
    if not proofs or owner is None:
        return None
    return UnusedAllocation(PodIdentity(meta.namespace, owner.name, owner.uid), proofs)


def awaited_challenge(raw: Raw) -> AwaitedChallenge | None:
    """None if the claim waits for no answer. A claim that cannot be parsed raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, ClaimWire)
    allocation = wire.status.allocation if wire.status is not None else None
    results = (allocation and allocation.devices and allocation.devices.results) or ()
    conditional = [one for one in results if one.driver == DRIVER and CHALLENGED in one.binding_conditions]
    if wire.status is None or allocation is None or allocation.allocation_timestamp is None or not conditional:
        return None
    statuses = msgspec.convert(wire.status.devices, list[DeviceStatusWire] | None) or ()
    answered = {(one.pool, one.device) for one in statuses if one.driver == DRIVER and is_answer(one)}
    if all((one.pool, one.device) in answered for one in conditional):
        return None
    accepted = {one.hashes for one in proof_allocation(raw).proofs or ()}
    hashes = (accepted.pop() if len(accepted) == 1 else None) or ()
    hash = hashes[0] if len(hashes) == 1 else None
    devices = tuple(one.device for one in conditional)
    return AwaitedChallenge(conditional[0].pool, hash, allocation.allocation_timestamp, devices)


def is_answer(status: DeviceStatusWire) -> bool:
    return any(one.type in (CHALLENGED, CHALLENGE_FAILED) for one in status.conditions or ())


def with_answer(raw: Raw, awaited: AwaitedChallenge, condition: Raw) -> list[Raw]:
    """The status of the claim's devices with this condition for those of ours."""
    ours = [{"driver": DRIVER, "pool": awaited.node, "device": name} for name in awaited.devices]
    others = [one for one in raw["status"].get("devices") or () if one["driver"] != DRIVER]
    return [*others, *({**one, "conditions": [condition]} for one in ours)]


def devices_of(allocation: AllocationWire | None) -> Iterator[AllocatedDevice]:
    for one in (allocation and allocation.devices and allocation.devices.results) or ():
        yield AllocatedDevice(one.driver, one.pool, one.device, one.request, is_admin=bool(one.admin_access))


def hashes_for(request: str, config: Iterable[ConfigWire]) -> tuple[str, ...] | None:
    """The hashes in the parameters for our driver. They must be those of the claim: a class names no hash.

    kube-scheduler repeats the parameters of a claim for each of its requests.
    """
    found = {
        parameter_hashes(one)
        for one in config
        if one.opaque is not None and one.opaque.driver == DRIVER and is_for(request, one.requests)
    }
    return found.pop() if len(found) == 1 else None


def parameter_hashes(one: ConfigWire) -> tuple[str, ...] | None:
    match one.source, one.opaque and one.opaque.parameters:
        case "FromClaim", {"hash": str() as hash}:
            return (hash,)
        case "FromClaim", {"hashes": list(hashes)} if all(isinstance(hash, str) for hash in hashes):
            return tuple(hashes)
        case _:
            return None


def is_for(request: str, requests: list[str] | None) -> bool:
    """A subrequest is named `request/subrequest`. Parameters of a request are for its subrequests too, and parameters
    without requests for all."""
    return not requests or request in requests or request.partition("/")[0] in requests


class ResourceClaims:
    """Single claims in the API server, and their pods. All methods raise ApiUnavailableError or ApiRefusesError."""

    def __init__(self, client: RateLimitedClient) -> None:
        self._client = client

    async def get(self, namespace: str, name: str) -> Raw | None:
        """None if there is none."""
        return await self._client.call("GET", NAMED, {"namespace": namespace, "name": name})

    async def create(self, raw: Raw) -> Raw | None:
        """The claim that has the name by now, created or found; None if it was deleted in between."""
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        try:
            made = await self._client.create_compact(IN_NAMESPACE, {"namespace": namespace}, raw)
        except ApiRefusesError as exc:
            if exc.status != CONFLICT:
                raise
            return await self.get(namespace, name)
        if made is None:
            raise ApiRefusesError(NOT_FOUND, f"there is no namespace {namespace}, or ResourceClaims are not served")
        return made

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the claim if it has this uid."""
        only: Raw = {"preconditions": {"uid": uid}}
        try:
            await self._client.call("DELETE", NAMED, {"namespace": namespace, "name": name}, only)
        except ApiRefusesError as exc:
            if exc.status != CONFLICT:
                raise

    async def pod_of(self, pod: PodIdentity) -> Raw | None:
        """The pod as it is now. None if there is none of this uid."""
        found = await self._client.call("GET", POD_PATH, path_names(pod))
        return found if found is not None and found["metadata"]["uid"] == pod.uid else None

    async def clear_allocation(self, raw: Raw) -> None:
        """Takes back what was allocated if the claim is still at this version."""
        await self._patch_status(raw, {"allocation": None})

    async def patch_devices(self, raw: Raw, devices: list[Raw]) -> None:
        """Replaces the status of the devices if the claim is still at this version."""
        await self._patch_status(raw, {"devices": devices})

    async def _patch_status(self, raw: Raw, status: Raw) -> None:
        meta = raw["metadata"]
        only = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        names = {"namespace": meta["namespace"], "name": meta["name"]}
        await self._client.call("PATCH", STATUS, names, {"metadata": only, "status": status})
