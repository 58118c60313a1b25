"""The GPUs that `gpuwarden export` has read on a node, in the Node annotation that discovery reads."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from webhook.core.device import Device, DeviceUuid, is_uuid, pci_address
from webhook.inventory.node_annotations import MAX_DEVICES, AnnotatedDevices, UnreadableDevicesError, shown

# The API server allows 256 KiB for all annotations of an object together.
MAX_ANNOTATION: Final = 200 * 1024
# The limits of the GPUNode CRD (manifests/gpunodes.yaml) are longer.
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class GpuWire(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    index: Whole
    uuid: Text | None = None
    serial: Text | None = None
    minor: Whole | None = None
    pci: Text | None = None
    model: Text | None = None
    memory: Text | None = None
    chassis: Text | None = None
    mig: bool = False


class NodeGpus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reading: its time, the pod and the boot that it comes from."""

    time: Annotated[datetime, msgspec.Meta(tz=True)]
    gpus: list[GpuWire]
    pod: str | None = None
    boot: str | None = None
    driver: Text | None = None


def gpus_in(text: str) -> NodeGpus:
    """The parsed annotation, with its time in UTC. Raises UnreadableDevicesError."""
    try:
        found = msgspec.json.decode(text, type=NodeGpus)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise UnreadableDevicesError(f"it is not a GPU reading: {exc}") from exc
    if len(found.gpus) > MAX_DEVICES:
        raise UnreadableDevicesError(f"{len(found.gpus)} devices are more than {MAX_DEVICES}")
    uuids = Counter(one.uuid for one in found.gpus if one.uuid is not None)
    if wrong := [uuid for uuid, times in uuids.items() if times > 1]:
        raise UnreadableDevicesError(f"{shown(wrong[0])} is listed twice")
    if wrong := [text for text in texts_in(found) if not text.isprintable()]:
        raise UnreadableDevicesError(f"{shown(wrong[0])} is not printable")
    try:
        return msgspec.structs.replace(found, time=found.time.astimezone(UTC))
    except OverflowError as exc:
        raise UnreadableDevicesError(f"its time {found.time.isoformat()} cannot be converted to UTC") from exc


def texts_in(found: NodeGpus) -> Iterator[str]:
    """The texts end up in tables and on terminals, and any client that may write Nodes may have written them."""
    for one in found.gpus:
        yield from filter(None, (one.uuid, one.serial, one.pci, one.model, one.memory, one.chassis))
    yield from filter(None, (found.driver,))


def devices_read(found: NodeGpus) -> AnnotatedDevices:
    """The devices with a UUID, the only permanent identity of a GPU.

    A GPU that is partitioned into MIG instances is listed as unhealthy, because it cannot be used as a whole.
    """
    uuids = [one.uuid for one in found.gpus if one.uuid is not None]
    devices = tuple(
        Device(
            uuid=DeviceUuid(one.uuid),
            index=one.index,
            model=one.model or "",
            memory=one.memory or "",
            serial=one.serial or "",
            pci=pci_address(one.pci or ""),
            is_healthy=not one.mig,
        )
        for one in found.gpus
        if one.uuid is not None and is_uuid(one.uuid)
    )
    return AnnotatedDevices(devices, tuple(uuid for uuid in uuids if not is_uuid(uuid)))
