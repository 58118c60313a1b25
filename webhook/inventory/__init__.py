"""Which GPUs exist. A source that cannot be read leaves the known inventory as it is."""

from typing import Protocol

from webhook.core.device import Inventory
from webhook.core.errors import GpuwardenError


class InventoryUnavailableError(GpuwardenError):
    """The inventory cannot be read. The message names every mistake."""

    def __init__(self, *mistakes: str, where: str = "") -> None:
        super().__init__(where + "; ".join(mistakes))
        self.mistakes = mistakes


class InventoryProvider(Protocol):
    """A source of nodes and devices."""

    async def poll(self) -> Inventory | None:
        """All nodes; None if nothing has changed since the last answer."""
