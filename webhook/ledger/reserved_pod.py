"""A pod that carries a reservation in its annotations, as the API server returns it."""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from attrs import frozen

from webhook.core import keys
from webhook.core.claim_keys import ClaimRecord
from webhook.core.device import DeviceUuid
from webhook.core.dress import REFERENCE
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_visibility import visible_env
from webhook.core.pod import EnvVar, Metadata, Pod, WireStruct
from webhook.core.raw import Raw
from webhook.core.reservation import GpuDelivery, PodIdentity, Reservation, ReservationId
from webhook.ledger.end_of_use import TERMINAL_PHASES, has_ended
from webhook.ledger.given import GivenStatusWire, uuids_in
from webhook.runtime.clock import LONG_AGO


class ReservedPodStatusWire(GivenStatusWire, frozen=True):
    phase: str | None = None


class ReservedPodSpecWire(WireStruct, frozen=True):
    node_name: str | None = None


class ReservedPodMetaWire(Metadata, frozen=True):
    resource_version: str = ""
    deletion_timestamp: datetime | None = None


class ReservedPodWire(WireStruct, frozen=True):
    metadata: ReservedPodMetaWire | None = None
    spec: ReservedPodSpecWire | None = None
    status: ReservedPodStatusWire | None = None


@frozen
class ReservedPod:
    """The relevant fields of such a pod. They are trusted only as far as a ledger confirms them."""

    pod: PodIdentity
    reservation_id: ReservationId
    claim_digest: str
    # The node of its devices, their UUIDs, and the number of GPUs it claimed.
    node: str | None
    uuids: tuple[DeviceUuid, ...]
    gpus: int
    is_shared: bool
    created: datetime
    # Whether it is assigned to a node; then it runs, or soon will.
    is_on_node: bool = False
    has_started: bool = False
    is_leaving: bool = False
    is_final: bool = False  # its phase is terminal
    has_ended: bool = False  # its containers no longer use its devices
    has_controller: bool = False
    # AWAITED if the kubelet chooses its devices; then those that it has given to the pod.
    delivery: GpuDelivery | None = None
    given: tuple[DeviceUuid, ...] = ()

    @classmethod
    def of(cls, raw: Raw) -> "ReservedPod | None":
        """None if the pod carries no reservation, or one that cannot be its own because the number of devices is not
        the number that the pod claimed, or zero. Devices that the kubelet chooses are named later."""
        try:
            wire = msgspec.convert(raw, ReservedPodWire)
            meta = wire.metadata or ReservedPodMetaWire()
            annotations = meta.annotations or {}
            record = ClaimRecord.parse(annotations.get(keys.CLAIM.name) or "")
        except (msgspec.ValidationError, InvalidPodError):
            return None
        reservation_id = annotations.get(keys.RESERVATION_ID.name)
        if not reservation_id or not meta.uid:
            return None
        uuids = [uuid for uuid in (annotations.get(keys.GPU_UUID.name) or "").split(",") if uuid]
        delivery = record.delivery
        if not has_claimed_gpu_count(uuids, record.gpus) and not (delivery and record.gpus and not uuids):
            return None
        status, node = wire.status or ReservedPodStatusWire(), annotations.get(keys.NODE.name)
        phase, is_on = status.phase or "Pending", wire.spec and wire.spec.node_name
        return cls(
            pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
            reservation_id=ReservationId(reservation_id),
            claim_digest=record.digest(),
            node=node,
            uuids=tuple(map(DeviceUuid, uuids)),
            gpus=record.gpus,
            is_shared=record.shared,
            created=meta.creation_timestamp or LONG_AGO,
            is_on_node=bool(is_on),
            has_started=phase != "Pending",
            is_leaving=meta.deletion_timestamp is not None,
            is_final=phase in TERMINAL_PHASES,
            has_ended=has_ended(raw),
            has_controller=any(owner.controller for owner in meta.owner_references or ()),
            delivery=delivery,
            given=uuids_in(status.container_statuses or ()) if delivery and is_on == node else (),
        )

    @property
    def title_of_gpus(self) -> str:
        return ",".join(self.uuids) or f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"

    def carries(self, held: Reservation) -> bool:
        return (self.reservation_id, self.node) == (held.id, held.node)


@frozen
class PodSnapshot:
    """A pod as it was read, with or without a reservation."""

    reserved_pod: ReservedPod | None
    # Our scheduling gate keeps it waiting until its reservation is written into it.
    is_gated: bool
    node: str
    has_ended: bool
    # The GPU-related environment of its containers, which cannot change once the pod exists.
    gpu_env: tuple[EnvVar, ...] = ()
    version: str = ""

    @classmethod
    def of(cls, raw: Raw) -> "PodSnapshot":
        """Raises msgspec.ValidationError if this is not a pod."""
        wire, pod = msgspec.convert(raw, ReservedPodWire), msgspec.convert(raw, Pod)
        return cls(
            reserved_pod=ReservedPod.of(raw),
            is_gated=pod.is_gated,
            node=pod.body.node_name or "",
            has_ended=has_ended(raw),
            version=(wire.metadata or ReservedPodMetaWire()).resource_version,
            gpu_env=tuple(one for _, container in pod.containers() for one in visible_env(container)),
        )

    @property
    def is_on_node(self) -> bool:
        return bool(self.node)

    def may_use_gpus_of(self, held: Reservation) -> bool:
        """Whether its containers may have access to one of these devices even if the annotations are gone: by UUID, by
        the index of a placement map, by an annotation as it was when they started, or from a device plugin."""
        return self.node == held.node and bool(held.delivery or any(may_name_gpu_of(one, held) for one in self.gpu_env))


def may_name_gpu_of(one: EnvVar, held: Reservation) -> bool:
    if one.literal is None:
        return one.value_from == REFERENCE
    return any(part in held.uuids or part.isdecimal() for part in one.literal.split(","))


def reservation_mismatch(raw: Raw, held: Reservation) -> str | None:
    """Why the pod does not carry exactly that reservation, in words; None if it does."""
    reserved_pod = ReservedPod.of(raw)
    if reserved_pod is None:
        return "carries no valid reservation"
    if reserved_pod.reservation_id != held.id:
        return f"carries reservation {reserved_pod.reservation_id}, not {held.id}"
    if set(reserved_pod.uuids) != set(held.uuids):
        return f"carries GPUs that reservation {held.id} does not hold"
    return None


def has_claimed_gpu_count(uuids: Sequence[str], gpus: int) -> bool:
    return len(uuids) == gpus > 0
