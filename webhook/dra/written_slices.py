"""The slices of gpuwarden's driver as they are in the API server, by node."""

from collections.abc import Mapping

from webhook.core.proof_devices import ProofDevice
from webhook.core.raw import Raw
from webhook.kube.resource_slices import ProofSlice, any_slice
from webhook.kube.view import ObjectView


class WrittenSlices:
    """Listener of the watch of slices of gpuwarden's driver, whoever has written them."""

    def __init__(self) -> None:
        self._view: ObjectView[ProofSlice] = ObjectView(any_slice)
        self._of_node: dict[str, dict[str, ProofSlice]] = {}
        self._node_of: dict[str, str] = {}
        self._changed: set[str] = set()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._view.replaced(objects)

    def changed(self, raw: Raw) -> None:
        self._view.changed(raw)

    def deleted(self, raw: Raw) -> None:
        self._view.deleted(raw)

    def forget(self, name: str) -> None:
        """Removes a slice that no longer exists."""
        self._view.forget(name)

    def get(self, name: str) -> ProofSlice | None:
        return self._view.get(name)

    def nodes(self) -> set[str]:
        self._enter()
        return set(self._of_node)

    def of(self, node: str) -> list[ProofSlice]:
        """The slices of a node."""
        self._enter()
        return list(self._of_node.get(node, {}).values())

    def devices(self, node: str) -> dict[str, ProofDevice]:
        """The devices of a node by name."""
        return {device.name: device for one in self.of(node) for device in one.devices}

    def take_changes(self) -> set[str]:
        """The nodes whose slices have changed since the last call."""
        self._enter()
        changed, self._changed = self._changed, set()
        return changed

    def _enter(self) -> None:
        """Enters changed slices at their nodes."""
        for name in self._view.take_changes():
            last, current = self._node_of.pop(name, None), self._view.get(name)
            if last is not None:
                del self._of_node[last][name]
                if not self._of_node[last]:
                    del self._of_node[last]
                self._changed.add(last)
            if current is not None:
                self._node_of[name] = current.node
                self._of_node.setdefault(current.node, {})[name] = current
                self._changed.add(current.node)
