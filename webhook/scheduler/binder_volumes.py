"""The volumes of pods that wait for a node: whether they are there, and on which nodes they can be had.

Of a claim that waits for its pod to have a node (`WaitForFirstConsumer`) the node is written into it, and whoever makes
volumes for its StorageClass does so there, or takes the node off again. A volume that was made before is picked by
nobody here.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import msgspec
from attrs import evolve, frozen

from webhook.core.device import Node
from webhook.core.errors import GpuwardenError
from webhook.core.nodes_asked import NAME_FIELD, Expression, NodeTerm, node_term
from webhook.core.pod import Metadata, RequiredNodes, Requirement, WireStruct
from webhook.core.reservation import PodIdentity
from webhook.kube.client import ApiClient
from webhook.kube.json_objects import decoded
from webhook.kube.requests import MERGE_PATCH, REQUEST_ERRORS, error_message, request_json

REQUEST_TIMEOUT = 4.0
CLAIM_PATH = "/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
VOLUME_PATH = "/api/v1/persistentvolumes/{name}"
CLASS_PATH = "/apis/storage.k8s.io/v1/storageclasses/{name}"
KINDS = {CLAIM_PATH: "PersistentVolumeClaim", VOLUME_PATH: "PersistentVolume", CLASS_PATH: "StorageClass"}
BOUND, PENDING = "Bound", "Pending"
# The annotation by which whoever makes volumes learns of the node, and takes it off where it can make none.
SELECTED_NODE = "volume.kubernetes.io/selected-node"
# Where classes were named before claims had a member for it, which is still read first.
CLASS_ANNOTATION = "volume.beta.kubernetes.io/storage-class"
ON_FIRST_CONSUMER = "WaitForFirstConsumer"
NO_PROVISIONER = "kubernetes.io/no-provisioner"

Known = TypeVar("Known", "ClaimWire", "PersistentVolumeWire", "StorageClassWire")

NOT_BOUND = "is not bound to a volume, which is waited for"
NEVER_BOUND = (
    "is not bound to a volume, and never is under this scheduler: its StorageClass says WaitForFirstConsumer, and that "
    "volumes are made by hand. Name one in the claim (spec.volumeName)"
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

    @property
    def said(self) -> str:
        return f"volume {self.name} of its claim {self.claim}"

    @property
    def elsewhere(self) -> str:
        """What is said of a node that cannot have it."""
        return f"where {self.said} is not"

    def is_on(self, node: Node) -> bool:
        return admit(self.terms, node)


@frozen
class Unmade:
    """What a claim is bound to as soon as a node has been chosen for its pod."""

    claim: str
    uid: str
    version: str
    node: str = ""
    """The one that has been chosen."""
    allowed: tuple[NodeTerm, ...] | None = None
    """By the StorageClass."""

    @property
    def said(self) -> str:
        return f"the volume of its claim {self.claim}"

    @property
    def elsewhere(self) -> str:
        if self.node:
            return f"and {self.said} is made for node {self.node}"
        return f"where the StorageClass of its claim {self.claim} allows no volume"

    @property
    def terms(self) -> tuple[NodeTerm, ...] | None:
        named = Expression(NAME_FIELD, "In", frozenset({self.node}))
        return (NodeTerm((), (named,)),) if self.node else self.allowed

    def is_on(self, node: Node) -> bool:
        return admit(self.terms, node)


def admit(terms: tuple[NodeTerm, ...] | None, node: Node) -> bool:
    return terms is None or any(term.matches(node.name, node.labels) for term in terms)


class Volumes(Protocol):
    """Knows what claims are bound to, and can have it made."""

    async def of(self, pod: PodIdentity, wanted: Wanted) -> Volume | Unmade:
        """Raises UnusableVolumeError and VolumesUnavailableError."""

    async def select(self, pod: PodIdentity, unmade: Unmade, node: str) -> None:
        """Have it made for that node. Raises UnusableVolumeError and VolumesUnavailableError."""


class NamedWire(WireStruct, frozen=True):
    claim_name: str = ""


class VolumeWire(WireStruct, frozen=True):
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
    resource_version: str = ""


class ClaimSpecWire(WireStruct, frozen=True):
    volume_name: str | None = None
    storage_class_name: str | None = None


class PhaseWire(WireStruct, frozen=True):
    phase: str | None = None


class ClaimWire(WireStruct, frozen=True):
    kind: str
    metadata: ClaimMetaWire
    spec: ClaimSpecWire
    status: PhaseWire | None = None

    @property
    def annotations(self) -> dict[str, str | None]:
        return self.metadata.annotations or {}

    @property
    def storage_class(self) -> str:
        return self.annotations.get(CLASS_ANNOTATION) or self.spec.storage_class_name or ""


class VolumeAffinityWire(WireStruct, frozen=True):
    required: RequiredNodes | None = None


class VolumeSpecWire(WireStruct, frozen=True):
    node_affinity: VolumeAffinityWire | None = None


class PersistentVolumeWire(WireStruct, frozen=True):
    kind: str
    metadata: Metadata
    spec: VolumeSpecWire


class TopologyWire(WireStruct, frozen=True):
    match_label_expressions: list[Requirement] | None = None

    def term(self) -> NodeTerm:
        asked = self.match_label_expressions or ()
        return NodeTerm(tuple(Expression(one.key, "In", frozenset(one.values or ())) for one in asked), ())


class StorageClassWire(WireStruct, frozen=True):
    kind: str
    metadata: Metadata
    provisioner: str = ""
    volume_binding_mode: str | None = None
    allowed_topologies: list[TopologyWire] | None = None


class ApiVolumes:
    """Claims and volumes in the API server, each read by name."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def of(self, pod: PodIdentity, wanted: Wanted) -> Volume | Unmade:
        path = {"namespace": pod.namespace, "name": wanted.claim}
        claim = await self._read(CLAIM_PATH, path, ClaimWire)
        if claim is None:
            raise UnusableVolumeError(f"claim {wanted.claim} is not there")
        name = volume_of(claim, pod, wanted)
        if name is None:
            return await self._unmade(claim, wanted)
        volume = await self._read(VOLUME_PATH, {"name": name}, PersistentVolumeWire)
        if volume is None:
            raise UnusableVolumeError(f"volume {name} of claim {wanted.claim} is not there")
        affinity = volume.spec.node_affinity
        required = None if affinity is None else affinity.required
        terms = None if required is None else tuple(map(node_term, required.node_selector_terms or ()))
        return Volume(wanted.claim, name, terms)

    async def _unmade(self, claim: ClaimWire, wanted: Wanted) -> Unmade:
        unmade = Unmade(wanted.claim, claim.metadata.uid or "", claim.metadata.resource_version)
        node = claim.annotations.get(SELECTED_NODE)
        if node:
            return evolve(unmade, node=node)
        name = claim.storage_class
        found = await self._read(CLASS_PATH, {"name": name}, StorageClassWire) if name else None
        if found is None or found.volume_binding_mode != ON_FIRST_CONSUMER:
            raise UnusableVolumeError(f"claim {wanted.claim} {NOT_BOUND}")
        if found.provisioner in ("", NO_PROVISIONER):
            raise UnusableVolumeError(f"claim {wanted.claim} {NEVER_BOUND}")
        topologies = found.allowed_topologies
        return evolve(unmade, allowed=tuple(one.term() for one in topologies) if topologies else None)

    async def select(self, pod: PodIdentity, unmade: Unmade, node: str) -> None:
        names = {"namespace": pod.namespace, "name": unmade.claim}
        meta = {"uid": unmade.uid, "resourceVersion": unmade.version, "annotations": {SELECTED_NODE: node}}
        try:
            status, body = await request_json(
                self._api,
                "PATCH",
                CLAIM_PATH,
                names,
                {"metadata": meta},
                seconds=REQUEST_TIMEOUT,
                kind=MERGE_PATCH,
            )
        except REQUEST_ERRORS as exc:
            raise VolumesUnavailableError("the API server cannot be reached") from exc
        if status in (404, 409) or status >= 500:  # gone, not as it was, or not now
            raise VolumesUnavailableError(f"the API server answered {status}")
        if status >= 400:
            raise UnusableVolumeError(f"claim {unmade.claim} cannot be given a node{error_message(body)}")

    async def _read(self, path: str, names: dict[str, str], form: type[Known]) -> Known | None:
        try:
            status, body = await request_json(self._api, "GET", path, names, seconds=REQUEST_TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise VolumesUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        if status != 200:
            raise VolumesUnavailableError(f"the API server answered {status}")
        try:
            found: Known = decoded(body, form)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise VolumesUnavailableError("the API server's answer cannot be read") from exc
        # Another object, or a list, says nothing of the one that was asked for.
        if (found.kind, found.metadata.name) != (KINDS[path], names["name"]):
            raise UnusableVolumeError(f"{names['name']!r} is not the name of a claim or of a volume")
        return found


def volume_of(claim: ClaimWire, pod: PodIdentity, wanted: Wanted) -> str | None:
    """The name of the volume that the claim is bound to; None if there is none for it yet. Raises
    UnusableVolumeError."""
    owners = claim.metadata.owner_references or ()
    if wanted.is_ephemeral and not any(owner.controller and owner.uid == pod.uid for owner in owners):
        raise UnusableVolumeError(f"claim {wanted.claim} was not made for this pod")
    if claim.metadata.deletion_timestamp is not None:
        raise UnusableVolumeError(f"claim {wanted.claim} is being deleted")
    name, phase = claim.spec.volume_name, None if claim.status is None else claim.status.phase
    if not name or (phase == PENDING and SELECTED_NODE in claim.annotations):
        return None
    if phase != BOUND:
        raise UnusableVolumeError(f"claim {wanted.claim} {NOT_BOUND}")
    return name
