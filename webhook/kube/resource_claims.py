"""Reads what ResourceClaims have allocated, and for which pods."""

from collections.abc import Iterator

import msgspec
from attrs import frozen

from webhook.core.raw import Raw


class ResultWire(msgspec.Struct, frozen=True):
    driver: str
    pool: str
    device: str
    request: str = ""


class DevicesWire(msgspec.Struct, frozen=True):
    results: list[ResultWire] | None = None


class AllocationWire(msgspec.Struct, frozen=True):
    devices: DevicesWire | None = None


class ConsumerWire(msgspec.Struct, frozen=True):
    resource: str
    name: str
    uid: str


class ClaimStatusWire(msgspec.Struct, frozen=True, rename="camel"):
    allocation: AllocationWire | None = None
    reserved_for: list[ConsumerWire] | None = None


class MetadataWire(msgspec.Struct, frozen=True):
    name: str
    uid: str
    namespace: str = ""


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


@frozen
class AllocatedClaim:
    """A claim with devices, and the uids of the pods that may use them."""

    uid: str
    namespace: str
    name: str
    devices: tuple[AllocatedDevice, ...]
    pods: tuple[str, ...]


def allocated_claim(raw: Raw) -> AllocatedClaim | None:
    """None without an allocation. A claim that cannot be parsed raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, ClaimWire)
    devices = tuple(devices_of(wire))
    if not devices:
        return None
    consumers = (wire.status and wire.status.reserved_for) or ()
    pods = tuple(one.uid for one in consumers if one.resource == "pods")
    return AllocatedClaim(wire.metadata.uid, wire.metadata.namespace, wire.metadata.name, devices, pods)


def devices_of(wire: ClaimWire) -> Iterator[AllocatedDevice]:
    allocation = wire.status and wire.status.allocation
    for one in (allocation and allocation.devices and allocation.devices.results) or ():
        yield AllocatedDevice(one.driver, one.pool, one.device, one.request)
