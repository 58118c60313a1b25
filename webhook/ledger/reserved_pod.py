"""A pod that carries a reservation in its annotations, as the API server shows it."""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from attrs import frozen

from webhook.core import keys
from webhook.core.claim import ClaimRecord
from webhook.core.device import DeviceUuid
from webhook.core.dress import REFERENCE
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_visibility import visible_env
from webhook.core.pod import EnvVar, Metadata, Pod, WireStruct
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity, Reservation, ReservationId
from webhook.ledger.end_of_use import has_ended
from webhook.runtime.clock import LONG_AGO

# Nobody starts containers of a pod in these phases any more. Whether they have ended is another question: `end_of_use`.
ENDED = frozenset({"Succeeded", "Failed"})


class ReservedPodStatusWire(WireStruct, frozen=True):
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
    """What matters of such a pod. What it says of itself is believed only as far as a ledger says the same."""

    pod: PodIdentity
    reservation_id: ReservationId
    claim_digest: str
    # Where its devices are, which, and how many it was to have.
    node: str | None
    uuids: tuple[DeviceUuid, ...]
    gpus: int
    is_shared: bool
    created: datetime
    # Where it has been put; such a pod runs, or soon will.
    is_on_node: bool = False
    has_started: bool = False
    is_leaving: bool = False
    is_final: bool = False  # its phase is
    has_ended: bool = False  # and its containers do not use its devices any more
    has_controller: bool = False

    @classmethod
    def of(cls, raw: Raw) -> "ReservedPod | None":
        """None if the pod carries no reservation, or one that cannot be its: of more or fewer devices than it was to
        have, or of any though it was to have none."""
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
        if not has_its_number(uuids, record.gpus):
            return None
        phase = (wire.status and wire.status.phase) or "Pending"
        return cls(
            pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
            reservation_id=ReservationId(reservation_id),
            claim_digest=record.digest(),
            node=annotations.get(keys.NODE.name),
            uuids=tuple(map(DeviceUuid, uuids)),
            gpus=record.gpus,
            is_shared=record.shared,
            created=meta.creation_timestamp or LONG_AGO,
            is_on_node=bool(wire.spec and wire.spec.node_name),
            has_started=phase != "Pending",
            is_leaving=meta.deletion_timestamp is not None,
            is_final=phase in ENDED,
            has_ended=has_ended(raw),
            has_controller=any(owner.controller for owner in meta.owner_references or ()),
        )

    def carries(self, held: Reservation) -> bool:
        return (self.reservation_id, self.node) == (held.id, held.node)


@frozen
class PodSnapshot:
    """A pod as it was found, whether it carries a reservation or not."""

    reserved_pod: ReservedPod | None
    # Behind our gate it waits for its reservation to be written into it.
    is_gated: bool
    node: str
    has_ended: bool
    # What its containers are told of GPUs, which nobody can change once it exists.
    told: tuple[EnvVar, ...] = ()
    version: str = ""

    @classmethod
    def of(cls, raw: Raw) -> "PodSnapshot":
        """Raises msgspec.ValidationError for what is no pod."""
        wire, pod = msgspec.convert(raw, ReservedPodWire), msgspec.convert(raw, Pod)
        return cls(
            reserved_pod=ReservedPod.of(raw),
            is_gated=pod.is_gated,
            node=pod.body.node_name or "",
            has_ended=has_ended(raw),
            version=(wire.metadata or ReservedPodMetaWire()).resource_version,
            told=tuple(one for _, container in pod.containers() for one in visible_env(container)),
        )

    @property
    def is_on_node(self) -> bool:
        return bool(self.node)

    def may_see(self, held: Reservation) -> bool:
        """Whether its containers may have been shown one of these devices, though it says nothing of it any more: by
        name, by a placement map's index, or by an annotation as it was when they started."""
        return self.node == held.node and any(may_mean(one, held) for one in self.told)


def may_mean(one: EnvVar, held: Reservation) -> bool:
    if one.literal is None:
        return one.value_from == REFERENCE
    return any(part in held.uuids or part.isdecimal() for part in one.literal.split(","))


def carries_other(raw: Raw, held: Reservation) -> str | None:
    """What in the pod itself speaks against its having that reservation, in words; None if it carries just that."""
    reserved_pod = ReservedPod.of(raw)
    if reserved_pod is None:
        return "carries no reservation that could be its own"
    if reserved_pod.reservation_id != held.id:
        return f"carries reservation {reserved_pod.reservation_id}, not {held.id}"
    if set(reserved_pod.uuids) != set(held.uuids):
        return f"carries other GPUs than reservation {held.id} holds"
    return None


def has_its_number(uuids: Sequence[str], gpus: int) -> bool:
    return len(uuids) == gpus > 0
