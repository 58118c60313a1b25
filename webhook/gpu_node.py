"""GPUNode objects, both ways: the devices in `spec`, the reservations in `status.held`, one entry a slot."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from attrs import frozen

from webhook.core.device import Device, DeviceUuid, Slot
from webhook.core.errors import GpuwardenError
from webhook.core.reservation import Phase, Reservation, ReservationId

Raw = dict[str, Any]
API_VERSION = "gpuwarden.io/v1alpha1"


class UnreadableGpuNodeError(GpuwardenError):
    """A GPUNode that no version of ours has written."""


class DeviceWire(msgspec.Struct, frozen=True, omit_defaults=True):
    uuid: str
    index: int | None = None
    model: str = ""
    memory: str = ""
    serial: str = ""
    labels: list[str] = []
    shares: int = 1
    healthy: bool = True


class HeldWire(msgspec.Struct, frozen=True, omit_defaults=True):
    reservation: str
    phase: Phase
    namespace: str
    digest: str
    pod: str | None = None
    uid: str | None = None
    since: datetime | None = None
    deadline: datetime | None = None
    shared: bool = False


class SpecWire(msgspec.Struct, frozen=True):
    devices: list[DeviceWire] | None = None


class StatusWire(msgspec.Struct, frozen=True):
    held: dict[str, HeldWire] | None = None


class MetadataWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str = "0"


class GpuNodeWire(msgspec.Struct, frozen=True):
    metadata: MetadataWire
    spec: SpecWire | None = None
    status: StatusWire | None = None


@frozen
class GpuNode:
    """One node's devices and reservations as they were at one version."""

    name: str
    version: int
    devices: tuple[Device, ...]
    reservations: Mapping[ReservationId, Reservation]

    @classmethod
    def parse(cls, raw: Raw) -> "GpuNode":
        try:
            wire = msgspec.convert(raw, GpuNodeWire)
            version = int(wire.metadata.resource_version)
        except (msgspec.ValidationError, ValueError) as exc:
            raise UnreadableGpuNodeError(f"GPUNode cannot be read: {exc}") from exc
        name = wire.metadata.name
        devices = tuple(map(device, (wire.spec and wire.spec.devices) or ()))
        return cls(name, version, devices, reservations(name, (wire.status and wire.status.held) or {}))


def device(wire: DeviceWire) -> Device:
    return Device(
        uuid=DeviceUuid(wire.uuid),
        index=wire.index,
        model=wire.model,
        memory=wire.memory,
        serial=wire.serial,
        labels=frozenset(wire.labels),
        shares=wire.shares,
        is_healthy=wire.healthy,
    )


def raw_device(one: Device) -> Raw:
    wire = DeviceWire(
        one.uuid, one.index, one.model, one.memory, one.serial, sorted(one.labels), one.shares, one.is_healthy
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def reservations(node: str, held: Mapping[str, HeldWire]) -> dict[ReservationId, Reservation]:
    slots: dict[str, list[Slot]] = {}
    for key, entry in held.items():
        slots.setdefault(entry.reservation, []).append(slot(key))
    entries = {entry.reservation: entry for entry in held.values()}
    return {ReservationId(one): reservation(node, entries[one], tuple(sorted(slots[one]))) for one in entries}


def reservation(node: str, entry: HeldWire, slots: tuple[Slot, ...]) -> Reservation:
    return Reservation(
        id=ReservationId(entry.reservation),
        namespace=entry.namespace,
        claim_digest=entry.digest,
        node=node,
        slots=slots,
        since=entry.since or datetime.fromtimestamp(0, UTC),
        deadline=entry.deadline,
        phase=entry.phase,
        pod_name=entry.pod,
        uid=entry.uid,
        is_shared=entry.shared,
    )


def slot(key: str) -> Slot:
    uuid, _, k = key.rpartition("/")
    if not k.isdecimal():
        raise UnreadableGpuNodeError(f"{key!r} is no slot")
    return Slot(DeviceUuid(uuid), int(k))


def raw_held(held: Iterable[Reservation]) -> Raw:
    """`status.held` for these reservations."""
    return {str(slot): entry for one in held for entry in [raw_entry(one)] for slot in one.slots}


def raw_entry(one: Reservation) -> Raw:
    wire = HeldWire(
        reservation=one.id,
        phase=one.phase,
        namespace=one.namespace,
        digest=one.claim_digest,
        pod=one.pod_name,
        uid=one.uid,
        since=one.since,
        deadline=one.deadline,
        shared=one.is_shared,
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def with_held(raw: Raw, held: Iterable[Reservation], devices: Iterable[Device]) -> Raw:
    """The object with these reservations, and the numbers that `kubectl get gn` shows."""
    entries = raw_held(held)
    total = sum(one.shares for one in devices)
    status = {**(raw.get("status") or {}), "held": entries, "total": total, "taken": len(entries)}
    return {**raw, "status": {**status, "free": max(0, total - len(entries))}}
