"""Reads ResourceSlices of the driver of the GPUs. Attributes have the names that NVIDIA's driver uses."""

from collections.abc import Iterator
from typing import Final

import msgspec

from webhook.core.device import Device, DeviceUuid, is_uuid, pci_address
from webhook.core.gpu_demand import ATTRIBUTES, VALUE
from webhook.core.raw import Raw
from webhook.kube.resource_slices import AttributeWire, PoolWire, UnreadableSliceError

# Others are GPUs or MIG devices in another form, such as a whole GPU for a virtual machine.
TYPES: Final = ("", "gpu", "mig")
PCI_ADDRESS: Final = "resource.kubernetes.io/pciBusID"
REPELS: Final = ("NoSchedule", "NoExecute")
# An attribute has at most 64 bytes. The limit of the GPUNode CRD (manifests/gpunodes.yaml) for the memory.
MAX_TEXT: Final = 64
MAX_MEMORY: Final = 32


class GpuTaintWire(msgspec.Struct, frozen=True):
    effect: str = ""


class QuantityWire(msgspec.Struct, frozen=True):
    value: str | int | float = ""


class GpuDeviceWire(msgspec.Struct, frozen=True):
    name: str
    attributes: dict[str, AttributeWire] = {}
    capacity: dict[str, QuantityWire] = {}
    taints: list[GpuTaintWire] = []

    def attribute(self, name: str) -> str:
        text = self.attributes.get(name, AttributeWire()).string
        return text if text.isprintable() and len(text) <= MAX_TEXT else ""


class GpuSliceSpecWire(msgspec.Struct, frozen=True, rename="camel"):
    pool: PoolWire
    node_name: str | None = None
    node_selector: Raw | None = None
    devices: list[GpuDeviceWire] = []


class GpuSliceWire(msgspec.Struct, frozen=True):
    spec: GpuSliceSpecWire


class GpuSlice(msgspec.Struct, frozen=True):
    """One slice of a pool. `node` is empty if its devices are not those of one node."""

    pool: str
    node: str
    generation: int
    count: int
    devices: tuple[Device, ...]
    # Their names in the pool, in the same order.
    names: tuple[str, ...] = ()


def gpu_slice(raw: Raw) -> GpuSlice:
    """Raises UnreadableSliceError."""
    try:
        spec = msgspec.convert(raw, GpuSliceWire).spec
    except msgspec.ValidationError as exc:
        raise UnreadableSliceError(str(exc)) from exc
    # A pool that selects its node is named after it.
    node = spec.node_name or (spec.pool.name if spec.node_selector is not None else "")
    count = spec.pool.resource_slice_count
    gpus = tuple(gpus_of(spec))
    devices, names = tuple(device for _, device in gpus), tuple(name for name, _ in gpus)
    return GpuSlice(spec.pool.name, node, spec.pool.generation, count, devices, names)


def gpus_of(spec: GpuSliceSpecWire) -> Iterator[tuple[str, Device]]:
    """The GPUs and MIG devices with a UUID, and their names."""
    for one in spec.devices:
        uuid = one.attribute("uuid")
        if one.attribute("type") in TYPES and is_uuid(uuid):
            device = Device(
                uuid=DeviceUuid(uuid),
                model=" ".join(filter(None, (one.attribute("productName"), one.attribute("profile")))),
                memory=memory_of(one),
                pci=pci_address(one.attribute(PCI_ADDRESS)),
                labels=frozenset(labels_of(one)),
                is_healthy=not any(taint.effect in REPELS for taint in one.taints),
            )
            yield one.name, device


def labels_of(one: GpuDeviceWire) -> Iterator[str]:
    """The labels by which pods ask for attributes of the device."""
    for key, attribute in ATTRIBUTES.items():
        value = one.attribute(attribute).replace(" ", "-")
        if VALUE.fullmatch(value):
            yield f"{key}={value}"


def memory_of(one: GpuDeviceWire) -> str:
    text = str(one.capacity.get("memory", QuantityWire()).value)
    return text if text.isprintable() and len(text) <= MAX_MEMORY else ""
