"""Reads and writes GPUNode objects: devices in `spec`, reservations in `status.held` with one entry per slot."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from math import ceil
from typing import Annotated, Any

import msgspec
from attrs import evolve, frozen

from webhook.core.device import Device, DeviceUuid, Slot, is_uuid
from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.core.reservation import GpuDelivery, Orphan, Phase, Reservation, ReservationId
from webhook.runtime.clock import LONG_AGO, is_plausible

API_VERSION = "gpuwarden.io/v1alpha1"
# Keeps a deleted GPUNode while reservations are held on it.
FINALIZER = "gpuwarden.io/held"
# The longest grace period in a held entry: ten years.
MOST_SECONDS = 10 * 365 * 24 * 3600

PHASES = tuple(Phase)  # in their order
NUMBER = re.compile("0|[1-9][0-9]{0,2}")
Choose = Callable[..., Any]
Timestamp = Annotated[datetime, msgspec.Meta(tz=True)]


class UnreadableGpuNodeError(GpuwardenError):
    """The GPUNode was not written by any version of gpuwarden."""


class DeviceWire(msgspec.Struct, frozen=True, omit_defaults=True):
    uuid: str
    index: int | None = None
    model: str = ""
    memory: str = ""
    serial: str = ""
    pci: str = ""
    labels: list[str] = []
    shares: int = 1
    healthy: bool = True
    mismatch: str = ""


class HeldSlotWire(msgspec.Struct, frozen=True, omit_defaults=True):
    reservation: str
    phase: Phase
    namespace: str
    digest: str
    pod: str | None = None
    uid: str | None = None
    since: Timestamp | None = None
    deadline: Timestamp | None = None
    shared: bool = False
    prefix: str | None = None
    # Missing in entries of older replicas; then it is unknown.
    grace: Annotated[int, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0
    # Fields of an orphan. Its phase is one that older replicas, which know no orphans, can read.
    orphaned_at: Timestamp | None = msgspec.field(name="orphanedAt", default=None)
    boot_id: str = msgspec.field(name="bootID", default="")
    unused_at: Timestamp | None = msgspec.field(name="unusedAt", default=None)
    given: list[str] = []
    delivery: GpuDelivery | None = None


class GpuNodeSpecWire(msgspec.Struct, frozen=True):
    devices: list[DeviceWire] | None = None
    injection: str | None = None


class GpuNodeStatusWire(msgspec.Struct, frozen=True):
    held: dict[str, HeldSlotWire] | None = None
    total: int | None = None
    taken: int | None = None
    free: int | None = None


class GpuNodeMetadataWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    resource_version: str = "0"
    deletion_timestamp: datetime | None = None
    finalizers: list[str] | None = None


class GpuNodeWire(msgspec.Struct, frozen=True):
    metadata: GpuNodeMetadataWire
    spec: GpuNodeSpecWire | None = None
    status: GpuNodeStatusWire | None = None


@frozen
class GpuNode:
    """A node's devices and reservations at one resource version."""

    name: str
    version: int
    devices: tuple[Device, ...]
    reservations: Mapping[ReservationId, Reservation]
    # Like `reservations`, but if slots of one were edited by hand, with the phase of the slot that is furthest behind.
    stored: Mapping[ReservationId, Reservation]
    # Whether the reservations are known. A new GPUNode has none yet for pods that already run.
    is_rebuilt: bool
    # The object is being deleted. It stays while reservations are held, and offers no devices.
    is_being_deleted: bool = False
    # Whether the object has our finalizer.
    has_finalizer: bool = False
    # Whether the counts shown by `kubectl get gn` are correct, if there are any.
    has_correct_counts: bool = True
    # The injection in force, or `native`. None in objects of older versions.
    injection: str | None = None

    @classmethod
    def parse(cls, raw: Raw) -> "GpuNode":
        try:
            wire = msgspec.convert(raw, GpuNodeWire)
            version = int(wire.metadata.resource_version)
        except (msgspec.ValidationError, ValueError) as exc:
            raise UnreadableGpuNodeError(f"GPUNode cannot be read: {exc}") from exc
        name, is_being_deleted = wire.metadata.name, wire.metadata.deletion_timestamp is not None
        devices = tuple(map(device, (wire.spec and wire.spec.devices) or ()))
        # Stored before the CRD required valid UUIDs: such a device is known but never assigned.
        devices = tuple(one if is_uuid(one.uuid) else evolve(one, is_healthy=False) for one in devices)
        if is_being_deleted:
            devices = tuple(evolve(one, is_healthy=False) for one in devices)
        held = wire.status and wire.status.held
        most_advanced = reservations(name, held or {}, max)
        is_consistent = all(
            most_advanced[ReservationId(one.reservation)].phase is one.phase for one in (held or {}).values()
        )
        return cls(
            name=name,
            version=version,
            devices=devices,
            reservations=most_advanced,
            stored=most_advanced if is_consistent else reservations(name, held or {}, min),
            is_rebuilt=held is not None,
            is_being_deleted=is_being_deleted,
            has_finalizer=FINALIZER in (wire.metadata.finalizers or ()),
            has_correct_counts=has_correct_counts(wire.status, devices, most_advanced.values()),
            injection=wire.spec.injection if wire.spec is not None else None,
        )


def object_name(raw: Raw) -> str:
    """The name in any object's metadata; empty if there is none."""
    meta = raw.get("metadata")
    return str(meta.get("name") or "") if isinstance(meta, dict) else ""


def device(wire: DeviceWire) -> Device:
    return Device(
        uuid=DeviceUuid(wire.uuid),
        index=wire.index,
        model=wire.model,
        memory=wire.memory,
        serial=wire.serial,
        pci=wire.pci,
        labels=frozenset(wire.labels),
        shares=wire.shares,
        is_healthy=wire.healthy,
        mismatch=wire.mismatch,
    )


def raw_device(one: Device) -> Raw:
    wire = DeviceWire(
        uuid=one.uuid,
        index=one.index,
        model=one.model,
        memory=one.memory,
        serial=one.serial,
        pci=one.pci,
        labels=sorted(one.labels),
        shares=one.shares,
        healthy=one.is_healthy,
        mismatch=one.mismatch,
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def reservations(node: str, held: Mapping[str, HeldSlotWire], choose: Choose) -> dict[ReservationId, Reservation]:
    """Reservations by id. If slots of one were edited by hand, `which` picks the entry that counts."""
    slots: dict[str, list[Slot]] = {}
    entries: dict[str, HeldSlotWire] = {}
    for key, entry in held.items():
        slots.setdefault(entry.reservation, []).append(slot(key))
        entries[entry.reservation] = choose(entries.get(entry.reservation, entry), entry, key=progress)
    return {ReservationId(one): reservation(node, entries[one], tuple(sorted(slots[one]))) for one in entries}


def progress(entry: HeldSlotWire) -> tuple[int, bool]:
    return PHASES.index(entry.phase), entry.uid is not None


def reservation(node: str, entry: HeldSlotWire, slots: tuple[Slot, ...]) -> Reservation:
    """Only pending reservations have a deadline, and only those with a pod may lack one. An entry edited by hand that
    has neither pod nor deadline is treated as expired."""
    deadline = valid_time(entry.deadline) if entry.phase is Phase.PENDING else None
    return Reservation(
        id=ReservationId(entry.reservation),
        namespace=entry.namespace,
        claim_digest=entry.digest,
        node=node,
        slots=slots,
        since=valid_time(entry.since),
        deadline=deadline,
        phase=entry.phase,
        pod_name=entry.pod,
        uid=entry.uid,
        is_shared=entry.shared,
        name_prefix=entry.prefix,
        grace=timedelta(seconds=entry.grace) if entry.grace else None,
        orphan=orphan(entry),
        given=tuple(map(DeviceUuid, entry.given)),
        delivery=entry.delivery,
    )


def orphan(entry: HeldSlotWire) -> Orphan | None:
    """Only a reservation that had a pod can be an orphan."""
    if entry.orphaned_at is None or entry.phase is not Phase.FINALIZED:
        return None
    unused_at = None if entry.unused_at is None else valid_time(entry.unused_at)
    return Orphan(valid_time(entry.orphaned_at), timedelta(seconds=entry.grace), entry.boot_id, unused_at)


def valid_time(stored_counts: datetime | None) -> datetime:
    """The time, or LONG_AGO if it is missing or implausible."""
    return stored_counts if stored_counts is not None and is_plausible(stored_counts) else LONG_AGO


def slot(key: str) -> Slot:
    uuid, _, k = key.rpartition("/")
    if not NUMBER.fullmatch(k):  # the CRD's rules compare keys as text, so there is one spelling
        raise UnreadableGpuNodeError(f"{key!r} is not a slot")
    return Slot(DeviceUuid(uuid), int(k))


def raw_held(held: Iterable[Reservation]) -> Raw:
    """`status.held` for these reservations."""
    return {str(slot): entry for one in held for entry in [raw_entry(one)] for slot in one.slots}


def raw_entry(one: Reservation) -> Raw:
    wire = HeldSlotWire(
        reservation=one.id,
        phase=one.phase,
        namespace=one.namespace,
        digest=one.claim_digest,
        pod=one.pod_name,
        uid=one.uid,
        since=one.since,
        deadline=one.deadline,
        shared=one.is_shared,
        prefix=one.name_prefix,
        orphaned_at=None if one.orphan is None else one.orphan.at,
        grace=ceil((one.orphan.grace if one.orphan else one.grace or timedelta()).total_seconds()),
        boot_id="" if one.orphan is None else one.orphan.boot_id,
        unused_at=None if one.orphan is None else one.orphan.unused_at,
        given=list(one.given),
        delivery=one.delivery,
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def with_held(raw: Raw, held: Collection[Reservation], devices: Iterable[Device]) -> Raw:
    """The object with these reservations and with the counts shown by `kubectl get gn`."""
    numbers = msgspec.to_builtins(numbers_of(devices, held))
    return {**raw, "status": {**(raw.get("status") or {}), "held": raw_held(held), **numbers}}


class Numbers(msgspec.Struct, frozen=True):
    """Counts of device shares. Devices that are not usable and those reserved exclusively have no free shares."""

    total: int
    taken: int
    free: int


def numbers_of(devices: Iterable[Device], held: Collection[Reservation]) -> Numbers:
    taken = Counter(slot.uuid for one in held for slot in one.slots)
    alone = {slot.uuid for one in held if not one.is_shared for slot in one.slots}
    total = free = 0
    for one in devices:
        total += one.shares
        if one.is_usable and one.uuid not in alone:
            free += max(0, one.shares - taken[one.uuid])
    return Numbers(total, taken.total(), free)


def has_correct_counts(
    status: GpuNodeStatusWire | None, devices: Iterable[Device], held: Collection[Reservation]
) -> bool:
    if status is None or status.total is None:
        return True
    stored_counts = (status.total, status.taken, status.free)
    counts = numbers_of(devices, held)
    return stored_counts == (counts.total, counts.taken, counts.free)


def with_finalizer(raw: Raw, *, has_finalizer: bool) -> Raw:
    """The object with or without our finalizer."""
    meta = raw["metadata"]
    others = [one for one in meta.get("finalizers") or () if one != FINALIZER]
    return {**raw, "metadata": {**meta, "finalizers": [*others, FINALIZER] if has_finalizer else others}}
