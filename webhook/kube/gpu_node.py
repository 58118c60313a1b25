"""GPUNode objects, both ways: the devices in `spec`, the reservations in `status.held`, one entry a slot."""

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
from webhook.core.reservation import Orphan, Phase, Reservation, ReservationId
from webhook.runtime.clock import LONG_AGO, is_plausible

API_VERSION = "gpuwarden.io/v1alpha1"
# Keeps a deleted object as long as something is held on it.
FINALIZER = "gpuwarden.io/held"
# Ten years: what a held entry may say of a grace period.
MOST_SECONDS = 10 * 365 * 24 * 3600

PHASES = tuple(Phase)  # in the order in which they follow one another
NUMBER = re.compile("0|[1-9][0-9]{0,2}")
Which = Callable[..., Any]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


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


class HeldSlotWire(msgspec.Struct, frozen=True, omit_defaults=True):
    reservation: str
    phase: Phase
    namespace: str
    digest: str
    pod: str | None = None
    uid: str | None = None
    since: Moment | None = None
    deadline: Moment | None = None
    shared: bool = False
    prefix: str | None = None
    # A replica of before leaves it out of what it writes; then it is not known.
    grace: Annotated[int, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0
    # Of an orphan, beside a phase that a replica which knows nothing of orphans reads as well.
    orphaned_at: Moment | None = msgspec.field(name="orphanedAt", default=None)
    boot_id: str = msgspec.field(name="bootID", default="")
    unused_at: Moment | None = msgspec.field(name="unusedAt", default=None)


class GpuNodeSpecWire(msgspec.Struct, frozen=True):
    devices: list[DeviceWire] | None = None


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
    """One node's devices and reservations as they were at one version."""

    name: str
    version: int
    devices: tuple[Device, ...]
    reservations: Mapping[ReservationId, Reservation]
    # The same; but where a hand has changed some slots of one, it is only as far as the slot that is furthest behind.
    stored: Mapping[ReservationId, Reservation]
    # Whether what is held here is known: an object that is new says nothing of the pods that are there already.
    is_rebuilt: bool
    # Being deleted: it stays as long as something is held, and gives nothing any more.
    is_leaving: bool = False
    # Whether it cannot go before we let it.
    is_kept: bool = False
    # Whether the numbers that `kubectl get gn` shows are right, where it says any.
    is_counted: bool = True

    @classmethod
    def parse(cls, raw: Raw) -> "GpuNode":
        try:
            wire = msgspec.convert(raw, GpuNodeWire)
            version = int(wire.metadata.resource_version)
        except (msgspec.ValidationError, ValueError) as exc:
            raise UnreadableGpuNodeError(f"GPUNode cannot be read: {exc}") from exc
        name, is_leaving = wire.metadata.name, wire.metadata.deletion_timestamp is not None
        devices = tuple(map(device, (wire.spec and wire.spec.devices) or ()))
        # Stored before the definition demanded the form of a UUID: such a device is known and given to nobody.
        devices = tuple(one if is_uuid(one.uuid) else evolve(one, is_healthy=False) for one in devices)
        if is_leaving:
            devices = tuple(evolve(one, is_healthy=False) for one in devices)
        held = wire.status and wire.status.held
        furthest = reservations(name, held or {}, max)
        is_even = all(furthest[ReservationId(one.reservation)].phase is one.phase for one in (held or {}).values())
        return cls(
            name=name,
            version=version,
            devices=devices,
            reservations=furthest,
            stored=furthest if is_even else reservations(name, held or {}, min),
            is_rebuilt=held is not None,
            is_leaving=is_leaving,
            is_kept=FINALIZER in (wire.metadata.finalizers or ()),
            is_counted=is_counted(wire.status, devices, furthest.values()),
        )


def name_in(raw: Raw) -> str:
    """Of an object that may be none of ours; empty if it says none."""
    meta = raw.get("metadata")
    return str(meta.get("name") or "") if isinstance(meta, dict) else ""


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


def reservations(node: str, held: Mapping[str, HeldSlotWire], which: Which) -> dict[ReservationId, Reservation]:
    """Where a hand has changed some slots of one, it is as far as `which` of them: no slot goes back."""
    slots: dict[str, list[Slot]] = {}
    entries: dict[str, HeldSlotWire] = {}
    for key, entry in held.items():
        slots.setdefault(entry.reservation, []).append(slot(key))
        entries[entry.reservation] = which(entries.get(entry.reservation, entry), entry, key=how_far)
    return {ReservationId(one): reservation(node, entries[one], tuple(sorted(slots[one]))) for one in entries}


def how_far(entry: HeldSlotWire) -> tuple[int, bool]:
    return PHASES.index(entry.phase), entry.uid is not None


def reservation(node: str, entry: HeldSlotWire, slots: tuple[Slot, ...]) -> Reservation:
    """Only what is pending has a deadline, and only a pod holds without end: one that says otherwise somebody wrote by
    hand, and what has neither a pod nor a deadline is past it."""
    deadline = moment(entry.deadline) if entry.phase is Phase.PENDING else None
    return Reservation(
        id=ReservationId(entry.reservation),
        namespace=entry.namespace,
        claim_digest=entry.digest,
        node=node,
        slots=slots,
        since=moment(entry.since),
        deadline=deadline,
        phase=entry.phase,
        pod_name=entry.pod,
        uid=entry.uid,
        is_shared=entry.shared,
        name_prefix=entry.prefix,
        grace=timedelta(seconds=entry.grace) if entry.grace else None,
        orphan=orphan(entry),
    )


def orphan(entry: HeldSlotWire) -> Orphan | None:
    """Only what a pod has had can be one."""
    if entry.orphaned_at is None or entry.phase is not Phase.FINALIZED:
        return None
    unused_at = None if entry.unused_at is None else moment(entry.unused_at)
    return Orphan(moment(entry.orphaned_at), timedelta(seconds=entry.grace), entry.boot_id, unused_at)


def moment(said: datetime | None) -> datetime:
    """What is not said, and what no clock of ours has shown, was long ago."""
    return said if said is not None and is_plausible(said) else LONG_AGO


def slot(key: str) -> Slot:
    uuid, _, k = key.rpartition("/")
    if not NUMBER.fullmatch(k):  # as it is written: another form would be another key to the store's rules
        raise UnreadableGpuNodeError(f"{key!r} is no slot")
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
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def with_held(raw: Raw, held: Collection[Reservation], devices: Iterable[Device]) -> Raw:
    """The object with these reservations, and the numbers that `kubectl get gn` shows."""
    numbers = msgspec.to_builtins(numbers_of(devices, held))
    return {**raw, "status": {**(raw.get("status") or {}), "held": raw_held(held), **numbers}}


class Numbers(msgspec.Struct, frozen=True):
    """Shares of devices; one that is not healthy or is held alone has none that is free."""

    total: int
    taken: int
    free: int


def numbers_of(devices: Iterable[Device], held: Collection[Reservation]) -> Numbers:
    taken = Counter(slot.uuid for one in held for slot in one.slots)
    alone = {slot.uuid for one in held if not one.is_shared for slot in one.slots}
    total = free = 0
    for one in devices:
        total += one.shares
        if one.is_healthy and one.uuid not in alone:
            free += max(0, one.shares - taken[one.uuid])
    return Numbers(total, taken.total(), free)


def is_counted(status: GpuNodeStatusWire | None, devices: Iterable[Device], held: Collection[Reservation]) -> bool:
    if status is None or status.total is None:
        return True
    said = (status.total, status.taken, status.free)
    right = numbers_of(devices, held)
    return said == (right.total, right.taken, right.free)


def with_finalizer(raw: Raw, *, is_kept: bool) -> Raw:
    """The object as one that cannot go, or as one that may."""
    meta = raw["metadata"]
    others = [one for one in meta.get("finalizers") or () if one != FINALIZER]
    return {**raw, "metadata": {**meta, "finalizers": [*others, FINALIZER] if is_kept else others}}
