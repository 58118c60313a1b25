"""Nodes, their GPUs, and the inventory of both at one moment."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, NewType

from attrs import field, frozen

DeviceUuid = NewType("DeviceUuid", str)

# The form of NVIDIA's driver. `all`, `void`, an index or a list would expose other GPUs to a container, or none.
# manifests/gpunodes.yaml has the same pattern.
UUID: Final = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,123}")


# The forms of Kubernetes (domain of four digits) and of nvidia-smi (eight).
PCI: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")

# A device plugin that shares a GPU in time appends this and a number to the UUID.
REPLICA: Final = "::"

# The mark of a device that a ResourceClaim has and no reservation. Callers of /devices see it, so it has no names.
CLAIMED: Final = "in use by a ResourceClaim"


def is_uuid(text: str) -> bool:
    """Whether a container runtime reads the text as the UUID of one GPU."""
    return UUID.fullmatch(text) is not None


def is_mig(uuid: str) -> bool:
    """Whether the UUID is that of a MIG device."""
    return uuid.startswith("MIG-")


def pci_address(text: str) -> str:
    """The PCI address as Kubernetes writes it, such as `0000:3b:00.0`; empty if the text is none."""
    found = PCI.fullmatch(text.lower())
    return "" if found is None else f"{int(found[1], 16):04x}:{found[2]}"


class Slot(NamedTuple):
    """One share of one device: `k` counts from 0 to `shares - 1`."""

    uuid: DeviceUuid
    k: int

    def __str__(self) -> str:
        return f"{self.uuid}/{self.k}"


@frozen
class Device:
    """One GPU, or one MIG device: a part of a GPU."""

    uuid: DeviceUuid
    index: int | None = None
    model: str = ""
    memory: str = ""
    serial: str = ""
    labels: frozenset[str] = frozenset()
    shares: int = 1
    is_healthy: bool = True
    # How the use of the device contradicts its reservations, without names; empty if it does not.
    mismatch: str = ""
    # The PCI address of the GPU.
    pci: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether it may be reserved, if no reservation holds it."""
        return self.is_healthy and not self.mismatch

    @property
    def is_claimed(self) -> bool:
        """Whether a ResourceClaim has it, and no reservation."""
        return self.mismatch == CLAIMED

    @property
    def is_mig(self) -> bool:
        return is_mig(self.uuid)

    @property
    def is_shared(self) -> bool:
        return self.shares > 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names that placement maps may use for the device, an index without leading zeros."""
        return (self.uuid, self.serial, *(() if self.index is None else (str(self.index),)))

    def has_name(self, name: str) -> bool:
        """Whether a placement map names this device: by UUID, serial number or index."""
        return name in (self.uuid, self.serial) or (name.isdecimal() and self.index == int(name))


@frozen
class Taint:
    key: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def repels(self) -> bool:
        """Whether it excludes pods without a toleration. `PreferNoSchedule` is only a preference."""
        return self.effect in ("NoSchedule", "NoExecute")


@frozen
class Node:
    """A node and its devices."""

    name: str
    labels: Mapping[str, str] = field(factory=dict)
    devices: tuple[Device, ...] = ()
    is_ready: bool = True
    is_cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    # A device plugin may give its devices to any pod, so no claim gets them.
    is_refused_for_plugin: bool = False
    # How many GPUs its device plugin offers, if the kubelet chooses the GPUs of claims; None if that is not known.
    plugin_gpus: int | None = None
    # The injection in force by its GPUNode: one of these, or `native`. Without it, the label of the Node counts.
    injection: str | None = None


Inventory = Mapping[str, Node]
