"""Exporters store GPU readings and GPU uses. They share one protocol, and several can run at once."""

from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.export.records import Batch


class ExportError(GpuwardenError):
    """A batch could not be stored. `is_permanent`: a retry of the same batch fails too."""

    def __init__(self, reason: str, *, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


class Exporter(Protocol):
    """A destination for batches."""

    name: str

    async def export(self, batch: Batch) -> None:
        """Returns once the batch is durably stored. Storing the same batch again changes nothing.

        Raises ExportError.
        """

    async def check(self) -> None:
        """Returns if a batch could be stored now. Raises ExportError."""

    async def close(self) -> None:
        """No call of `export` follows."""
