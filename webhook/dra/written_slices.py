"""The slices of gpuwarden's driver as they are in the API server, by node."""

from webhook.core.proof_devices import ProofDevice
from webhook.kube.resource_slices import ProofSlice, any_slice
from webhook.kube.view import NodeView


class WrittenSlices(NodeView[ProofSlice]):
    """Listener of the watch of slices of gpuwarden's driver, whoever has written them."""

    def __init__(self) -> None:
        super().__init__(any_slice)

    def devices(self, node: str) -> dict[str, ProofDevice]:
        """The devices of a node by name."""
        return {device.name: device for one in self.of(node) for device in one.devices}

    def digits(self, node: str) -> set[str]:
        """The digits of the hashes in the names of the node's devices."""
        return {digits for one in self.of(node) for digits in one.digits}
