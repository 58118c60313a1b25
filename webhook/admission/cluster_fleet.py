"""Keeps the fleet up to date in a cluster, from watches of Nodes, GPUNodes and NodeEvidence."""

from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec
import structlog
from attrs import evolve

from webhook.core.device import Device, Node
from webhook.core.evidence import Evidence, predates_node
from webhook.core.fleet import Fleet
from webhook.core.raw import Raw
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError
from webhook.kube.node import creation_time_of, node_of
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)


class ClusterFleet:
    """Tells the fleet of nodes with their devices, from two watches that know nothing of each other.

    A node whose object cannot be read stays as it was known, and the others are served on.
    """

    def __init__(self, fleet: Fleet, clock: Clock, proven: Callable[[str], Evidence | None]) -> None:
        self._fleet = fleet
        self._clock = clock
        self._proven = proven
        self._nodes: dict[str, Node] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._born: dict[str, datetime | None] = {}

    def know_node(self, raw: Raw) -> None:
        try:
            node, born = node_of(raw), creation_time_of(raw)
        except msgspec.ValidationError as exc:
            log.warning("Node left as it was known", exc_info=exc)
            return
        self._nodes[node.name], self._born[node.name] = node, born
        self._show(node.name)

    def forget_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._born.pop(name, None)
        self._show(name)

    def know_devices(self, name: str, devices: tuple[Device, ...]) -> None:
        self._devices[name] = devices
        self._show(name)

    def quarantine(self, name: str) -> None:
        """They are there, and nobody can say who has them."""
        self._devices[name] = tuple(evolve(one, is_healthy=False) for one in self._devices.get(name, ()))
        self._show(name)

    def forget_devices(self, name: str) -> None:
        self._devices.pop(name, None)
        self._show(name)

    def prove(self, name: str) -> None:
        """The word on a node's evidence may have changed."""
        word = self._proven(name)
        is_of_another = word is not None and predates_node(word, self._born.get(name))
        self._fleet.set_evidence(name, None if is_of_another else word, self._clock())

    def _show(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            self._fleet.remove(name)
        else:
            self._fleet.put(evolve(node, devices=self._devices.get(name, ())), self._clock())
            self.prove(name)

    @property
    def node_names(self) -> set[str]:
        return set(self._nodes)

    @property
    def names_with_devices(self) -> set[str]:
        return set(self._devices)


class NodesListener:
    """Hears of Node objects."""

    def __init__(self, inventory: ClusterFleet) -> None:
        self._inventory = inventory

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        names = {raw["metadata"]["name"] for raw in objects.values()}
        for name in self._inventory.node_names - names:
            self._inventory.forget_node(name)
        for raw in objects.values():
            self._inventory.know_node(raw)

    def changed(self, raw: Raw) -> None:
        self._inventory.know_node(raw)

    def deleted(self, raw: Raw) -> None:
        self._inventory.forget_node(raw["metadata"]["name"])


class GpuNodesListener:
    """Hears of GPUNode objects: devices for the inventory, reservations for the ledger."""

    def __init__(self, inventory: ClusterFleet, *, learn: Callable[[Raw], None], forget: Callable[[str], None]) -> None:
        self._inventory = inventory
        self._learn = learn
        self._forget = forget

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        names = {raw["metadata"]["name"] for raw in objects.values()}
        for name in self._inventory.names_with_devices - names:
            self._gone(name)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        try:
            node = GpuNode.parse(raw)
        except UnreadableGpuNodeError as exc:
            log.warning("GPUNode cannot be read, its devices are offered to nobody", problem=str(exc))
            self._inventory.quarantine(raw["metadata"]["name"])
            self._forget(raw["metadata"]["name"])
            return
        self._learn(raw)  # before its devices are offered: what is held of them has to be known first
        self._inventory.know_devices(node.name, node.devices)

    def deleted(self, raw: Raw) -> None:
        self._gone(raw["metadata"]["name"])

    def _gone(self, name: str) -> None:
        self._inventory.forget_devices(name)
        self._forget(name)
