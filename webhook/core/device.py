"""What there is: nodes, their GPUs, and the inventory of both at one moment."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, NewType

from attrs import field, frozen

DeviceUuid = NewType("DeviceUuid", str)

# As NVIDIA's driver names them. `all`, `void`, an index or a list would show a container other GPUs, or none.
# manifests/gpunodes.yaml has the same form.
UUID: Final = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,123}")


def is_uuid(text: str) -> bool:
    """Whether the text can be the UUID of a GPU, and nothing else to a container runtime."""
    return UUID.fullmatch(text) is not None


class Slot(NamedTuple):
    """One share of one device: `k` counts from 0 to the device's shares."""

    uuid: DeviceUuid
    k: int

    def __str__(self) -> str:
        return f"{self.uuid}/{self.k}"


@frozen
class Device:
    """One GPU."""

    uuid: DeviceUuid
    index: int | None = None
    model: str = ""
    memory: str = ""
    serial: str = ""
    labels: frozenset[str] = frozenset()
    shares: int = 1
    is_healthy: bool = True

    @property
    def is_shared(self) -> bool:
        return self.shares > 1

    @property
    def names(self) -> tuple[str, ...]:
        """What placement maps may call it, an index in its plain form."""
        return (self.uuid, self.serial, *(() if self.index is None else (str(self.index),)))

    def has_name(self, name: str) -> bool:
        """Whether a placement map means this device: by UUID, serial or index."""
        return name in (self.uuid, self.serial) or (name.isdecimal() and self.index == int(name))


@frozen
class Taint:
    """A node's taint."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"

    @property
    def repels(self) -> bool:
        """Whether it keeps new pods away; `PreferNoSchedule` only asks."""
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


Inventory = Mapping[str, Node]
