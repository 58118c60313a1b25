"""The slices of gpuwarden's driver as they are in the API server, by node."""

from collections import Counter

from webhook.core.proof_devices import ProofDevice
from webhook.core.raw import Raw
from webhook.kube.resource_slices import ProofSlice, any_slice
from webhook.kube.view import NodeView


class WrittenSlices(NodeView[ProofSlice]):
    """Listener of the watch of slices of gpuwarden's driver, whoever has written them."""

    def __init__(self) -> None:
        super().__init__(any_slice)
        self._openings = Counter[str]()

    def changed(self, raw: Raw) -> None:
        super().changed(raw)
        found = self.get(raw["metadata"]["name"])
        if found is not None and not all(one.is_closed for one in found.devices):
            self._openings[found.node] += 1

    def openings(self, node: str) -> int:
        """How often a slice of the node was seen with an open device."""
        return self._openings[node]

    def devices(self, node: str) -> dict[str, ProofDevice]:
        """The devices of a node by name."""
        return {device.name: device for one in self.of(node) for device in one.devices}

    def digits(self, node: str) -> set[str]:
        """The digits of the hashes in the names of the node's devices."""
        return {digits for one in self.of(node) for digits in one.digits}
