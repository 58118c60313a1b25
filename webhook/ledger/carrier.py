"""A pod that carries a reservation in its annotations, as the API server shows it."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from attrs import frozen

from webhook.core import keys
from webhook.core.claim import ClaimRecord
from webhook.core.device import DeviceUuid
from webhook.core.errors import InvalidPodError
from webhook.core.pod import Metadata, Wire
from webhook.core.reservation import PodIdentity, ReservationId

Raw = dict[str, Any]
# A pod in these phases runs no more, and its devices are free. A terminating pod still holds its own.
ENDED = frozenset({"Succeeded", "Failed"})


class StatusWire(Wire, frozen=True):
    phase: str | None = None


class SpecWire(Wire, frozen=True):
    node_name: str | None = None


class MetaWire(Metadata, frozen=True):
    deletion_timestamp: datetime | None = None


class PodWire(Wire, frozen=True):
    metadata: MetaWire | None = None
    spec: SpecWire | None = None
    status: StatusWire | None = None


@frozen
class Carrier:
    """What matters of such a pod. What it says of itself is believed only as far as a ledger says the same."""

    pod: PodIdentity
    reservation_id: ReservationId
    claim_digest: str
    # Where its devices are, and which.
    node: str | None
    uuids: tuple[DeviceUuid, ...]
    is_shared: bool
    created: datetime
    # Where it has been put; such a pod runs, or soon will.
    is_on_node: bool = False
    has_started: bool = False
    is_leaving: bool = False
    has_ended: bool = False
    has_controller: bool = False

    @classmethod
    def of(cls, raw: Raw) -> "Carrier | None":
        """None if the pod carries no reservation."""
        try:
            wire = msgspec.convert(raw, PodWire)
            meta = wire.metadata or MetaWire()
            annotations = meta.annotations or {}
            record = ClaimRecord.parse(annotations.get(keys.CLAIM.name) or "")
        except (msgspec.ValidationError, InvalidPodError):
            return None
        reservation_id = annotations.get(keys.RESERVATION_ID.name)
        if not reservation_id or not meta.uid:
            return None
        uuids = (annotations.get(keys.GPU_UUID.name) or "").split(",")
        phase = (wire.status and wire.status.phase) or "Pending"
        return cls(
            pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
            reservation_id=ReservationId(reservation_id),
            claim_digest=record.digest(),
            node=annotations.get(keys.NODE.name),
            uuids=tuple(DeviceUuid(uuid) for uuid in uuids if uuid),
            is_shared=record.shared,
            created=meta.creation_timestamp or datetime.fromtimestamp(0, UTC),
            is_on_node=bool(wire.spec and wire.spec.node_name),
            has_started=phase != "Pending",
            is_leaving=meta.deletion_timestamp is not None,
            has_ended=phase in ENDED,
            has_controller=any(owner.controller for owner in meta.owner_references or ()),
        )
