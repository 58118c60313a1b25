"""Nodes on which a device plugin offers the GPUs that gpuwarden reserves: it may give a reserved GPU to any pod."""

from collections.abc import Mapping

from webhook.core.fleet import Fleet
from webhook.core.injection import Injection, injection_in_force
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.kube.events import Events, Subject
from webhook.kube.node import plugin_gpus

# Events per pass, so that others find room in the queue.
AT_A_TIME = 20


class DevicePlugins:
    """Listener of the watch of Nodes. `step` records one Event for each node."""

    def __init__(self, fleet: Fleet, events: Events, resource: str, *, is_strict: bool = False) -> None:
        self._fleet = fleet
        self._events = events
        self._resource = resource
        self._is_strict = is_strict
        self._offering: set[str] = set()
        self._reported: set[str] = set()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._offering.clear()
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        if plugin_gpus(raw, self._resource):
            self._offering.add(raw["metadata"]["name"])
        else:
            self._offering.discard(raw["metadata"]["name"])

    def deleted(self, raw: Raw) -> None:
        self._offering.discard(raw["metadata"]["name"])

    def nodes(self) -> set[str]:
        """The nodes with such a plugin and with GPUs in the inventory, unless claims get their GPUs from the plugin."""
        return {name for name in self._offering & self._fleet.indexed_nodes.keys() if self._is_reserved_beside(name)}

    def _is_reserved_beside(self, name: str) -> bool:
        node = self._fleet.indexed_nodes[name].node
        return bool(node.devices) and injection_in_force(node, self._fleet.injection) is not Injection.PLUGIN

    async def step(self) -> None:
        """One pass: reports a node again if its plugin was gone in the meantime."""
        nodes = self.nodes()
        self._reported &= nodes
        for name in sorted(nodes - self._reported)[:AT_A_TIME]:
            self._reported.add(name)
            effect = "no claim for GPUs is placed here" if self._is_strict else "it may give a reserved GPU to any pod"
            text = f"a device plugin offers {self._resource} of GPUs that gpuwarden reserves: {effect}"
            self._events.record(Subject.of_node(name), Reason.DEVICE_PLUGIN_FOUND, text, is_warning=not self._is_strict)
