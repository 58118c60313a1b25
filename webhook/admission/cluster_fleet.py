"""Keeps the fleet up to date in a cluster, from watches of Nodes, GPUNodes and NodeEvidence."""

from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec
import structlog
from attrs import evolve

from webhook.core.device import Device, Node
from webhook.core.evidence import Evidence, predates_node
from webhook.core.fleet import Fleet
from webhook.core.injection import Injection, injection_in_force
from webhook.core.raw import Raw
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError
from webhook.kube.node import creation_time_of, node_of, plugin_gpus
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)


class ClusterFleet:
    """Combines the watches of Nodes and of GPUNodes into the fleet.

    A Node that cannot be read keeps its last state. The other nodes are not affected.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        proven: Callable[[str], Evidence | None],
        gpu_resource: str = "nvidia.com/gpu",
        *,
        is_strict: bool = False,
    ) -> None:
        """With `is_strict`, nodes on which a device plugin offers the resource get no claims for GPUs, unless their
        injection uses it."""
        self._gpu_resource = gpu_resource
        self._is_strict = is_strict
        self._fleet = fleet
        self._clock = clock
        self._proven = proven
        self._nodes: dict[str, Node] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._injections: dict[str, str | None] = {}
        self._born: dict[str, datetime | None] = {}

    def put_node(self, raw: Raw) -> None:
        try:
            node, born = node_of(raw), creation_time_of(raw)
        except msgspec.ValidationError as exc:
            log.warning("Node cannot be read, its last state is kept", exc_info=exc)
            return
        node = evolve(node, plugin_gpus=plugin_gpus(raw, self._gpu_resource))
        self._nodes[node.name], self._born[node.name] = node, born
        self._update(node.name)

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._born.pop(name, None)
        self._update(name)

    def put_devices(self, name: str, devices: tuple[Device, ...], injection: str | None = None) -> None:
        self._devices[name], self._injections[name] = devices, injection
        self._update(name)

    def quarantine(self, name: str) -> None:
        """Marks the node's devices as unhealthy: it is unknown which pods hold them."""
        self._devices[name] = tuple(evolve(one, is_healthy=False) for one in self._devices.get(name, ()))
        self._update(name)

    def remove_devices(self, name: str) -> None:
        self._devices.pop(name, None)
        self._injections.pop(name, None)
        self._update(name)

    def prove(self, name: str) -> None:
        """Reads the node's evidence again."""
        evidence = self._proven(name)
        is_of_another = evidence is not None and predates_node(evidence, self._born.get(name))
        self._fleet.set_evidence(name, None if is_of_another else evidence, self._clock())

    def _update(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is None:
            self._fleet.remove(name)
        else:
            self._fleet.put(self._with_gpus(node), self._clock())
            self.prove(name)

    def _with_gpus(self, node: Node) -> Node:
        node = evolve(node, devices=self._devices.get(node.name, ()), injection=self._injections.get(node.name))
        if injection_in_force(node, self._fleet.injection) is Injection.PLUGIN:
            return node
        return evolve(node, plugin_gpus=None, is_refused_for_plugin=self._is_strict and bool(node.plugin_gpus))

    @property
    def node_names(self) -> set[str]:
        return set(self._nodes)

    @property
    def names_with_devices(self) -> set[str]:
        return set(self._devices)


class NodesListener:
    """Listener of the watch of Nodes."""

    def __init__(self, inventory: ClusterFleet) -> None:
        self._inventory = inventory

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        names = {raw["metadata"]["name"] for raw in objects.values()}
        for name in self._inventory.node_names - names:
            self._inventory.remove_node(name)
        for raw in objects.values():
            self._inventory.put_node(raw)

    def changed(self, raw: Raw) -> None:
        self._inventory.put_node(raw)

    def deleted(self, raw: Raw) -> None:
        self._inventory.remove_node(raw["metadata"]["name"])


class GpuNodesListener:
    """Listener of the watch of GPUNodes: devices go to the fleet, reservations to the ledger."""

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
            log.warning("GPUNode cannot be read, its devices are not offered", problem=str(exc))
            self._inventory.quarantine(raw["metadata"]["name"])
            self._forget(raw["metadata"]["name"])
            return
        self._learn(raw)  # the reservations must be known before the devices are offered
        self._inventory.put_devices(node.name, node.devices, node.injection)

    def deleted(self, raw: Raw) -> None:
        self._gone(raw["metadata"]["name"])

    def _gone(self, name: str) -> None:
        self._inventory.remove_devices(name)
        self._forget(name)
