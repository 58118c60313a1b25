"""The volumes of pods that wait for a node: whether they are there, and on which nodes they can be had.

They are read and never made: a claim that waits for its pod to have a node (`WaitForFirstConsumer`) keeps it waiting.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import msgspec
from attrs import frozen
from kubernetes.aio import client

from webhook.calls import LOST, answered
from webhook.core.device import Node
from webhook.core.errors import GpuwardenError
from webhook.core.nodes_asked import NodeTerm, node_term
from webhook.core.pod import Metadata, RequiredNodes, Wire
from webhook.core.reservation import PodIdentity

REQUEST_TIMEOUT = 4.0
CLAIM_PATH = "/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
VOLUME_PATH = "/api/v1/persistentvolumes/{name}"
KINDS = {CLAIM_PATH: "PersistentVolumeClaim", VOLUME_PATH: "PersistentVolume"}
BOUND = "Bound"

Known = TypeVar("Known", "ClaimWire", "PersistentVolumeWire")

NOT_BOUND = (
    "is not bound to a volume: one whose StorageClass says volumeBindingMode WaitForFirstConsumer never is under this "
    "scheduler, any other is waited for"
)


class UnusableVolumeError(GpuwardenError):
    """A pod cannot have what it names as a volume now, on whatever node; the text says why."""


class VolumesUnavailableError(GpuwardenError):
    """Nobody can say at this moment."""


@frozen
class Wanted:
    """A PersistentVolumeClaim that a pod names, or that is made for it."""

    claim: str
    is_ephemeral: bool = False


@frozen
class Volume:
    """What such a claim is bound to."""

    claim: str
    name: str
    terms: tuple[NodeTerm, ...] | None = None
    """Of which a node has to match one; None if it can be had anywhere."""

    def is_on(self, node: Node) -> bool:
        return self.terms is None or any(term.matches(node.name, node.labels) for term in self.terms)


class Volumes(Protocol):
    """Knows what claims are bound to."""

    async def of(self, pod: PodIdentity, wanted: Wanted) -> Volume:
        """Raises UnusableVolumeError and VolumesUnavailableError."""


class NamedWire(Wire, frozen=True):
    claim_name: str = ""


class VolumeWire(Wire, frozen=True):
    """One of a pod's volumes."""

    name: str = ""
    persistent_volume_claim: NamedWire | None = None
    ephemeral: dict[str, Any] | None = None

    def wanted(self, pod: str) -> Iterator[Wanted]:
        if self.persistent_volume_claim is not None:
            yield Wanted(self.persistent_volume_claim.claim_name)
        elif self.ephemeral is not None:
            yield Wanted(f"{pod}-{self.name}", is_ephemeral=True)


class ClaimMetaWire(Metadata, frozen=True):
    deletion_timestamp: str | None = None


class ClaimSpecWire(Wire, frozen=True):
    volume_name: str | None = None


class PhaseWire(Wire, frozen=True):
    phase: str | None = None


class ClaimWire(Wire, frozen=True):
    kind: str
    metadata: ClaimMetaWire
    spec: ClaimSpecWire
    status: PhaseWire | None = None


class VolumeAffinityWire(Wire, frozen=True):
    required: RequiredNodes | None = None


class VolumeSpecWire(Wire, frozen=True):
    node_affinity: VolumeAffinityWire | None = None


class PersistentVolumeWire(Wire, frozen=True):
    kind: str
    metadata: Metadata
    spec: VolumeSpecWire


class ApiVolumes:
    """Claims and volumes in the API server, each read by name."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def of(self, pod: PodIdentity, wanted: Wanted) -> Volume:
        path = {"namespace": pod.namespace, "name": wanted.claim}
        claim = await self._read(CLAIM_PATH, path, ClaimWire)
        if claim is None:
            raise UnusableVolumeError(f"claim {wanted.claim} is not there")
        name = volume_of(claim, pod, wanted)
        volume = await self._read(VOLUME_PATH, {"name": name}, PersistentVolumeWire)
        if volume is None:
            raise UnusableVolumeError(f"volume {name} of claim {wanted.claim} is not there")
        affinity = volume.spec.node_affinity
        required = None if affinity is None else affinity.required
        terms = None if required is None else tuple(map(node_term, required.node_selector_terms or ()))
        return Volume(wanted.claim, name, terms)

    async def _read(self, path: str, names: dict[str, str], form: type[Known]) -> Known | None:
        try:
            status, body = await answered(self._api, "GET", path, names, seconds=REQUEST_TIMEOUT)
        except LOST as exc:
            raise VolumesUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        if status != 200:
            raise VolumesUnavailableError(f"the API server answered {status}")
        try:
            found = msgspec.json.decode(body, type=form)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise VolumesUnavailableError("the API server's answer cannot be read") from exc
        # Another object, or a list, says nothing of the one that was asked for.
        if (found.kind, found.metadata.name) != (KINDS[path], names["name"]):
            raise UnusableVolumeError(f"{names['name']!r} is not the name of a claim or of a volume")
        return found


def volume_of(claim: ClaimWire, pod: PodIdentity, wanted: Wanted) -> str:
    """The name of the volume that the claim is bound to. Raises UnusableVolumeError."""
    owners = claim.metadata.owner_references or ()
    if wanted.is_ephemeral and not any(owner.controller and owner.uid == pod.uid for owner in owners):
        raise UnusableVolumeError(f"claim {wanted.claim} was not made for this pod")
    if claim.metadata.deletion_timestamp is not None:
        raise UnusableVolumeError(f"claim {wanted.claim} is being deleted")
    name = claim.spec.volume_name
    if not name or claim.status is None or claim.status.phase != BOUND:
        raise UnusableVolumeError(f"claim {wanted.claim} {NOT_BOUND}")
    return name
