"""Where readings of GPUs and the uses of them are stored. One protocol; several exporters at once."""

from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.export.records import Batch


class ExportError(GpuwardenError):
    """A batch could not be stored. `is_lasting`: it is no use to try the same again."""

    def __init__(self, reason: str, *, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


class Exporter(Protocol):
    """A store."""

    name: str

    async def export(self, batch: Batch) -> None:
        """What returned is stored for good. The same batch may come again, and changes nothing then.

        Raises ExportError.
        """

    async def check(self) -> None:
        """Whether a batch could be stored at this moment. Raises ExportError."""

    async def close(self) -> None:
        """Nothing is exported after."""
