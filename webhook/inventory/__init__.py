"""Which GPUs exist. A source that cannot be read leaves the known inventory as it is."""

from webhook.core.errors import GpuwardenError


class InventoryUnavailableError(GpuwardenError):
    """The inventory cannot be read. The message names every mistake."""

    def __init__(self, *mistakes: str, where: str = "") -> None:
        super().__init__(where + "; ".join(mistakes))
        self.mistakes = mistakes
