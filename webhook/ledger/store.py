"""The store of GPUNode objects: versioned, one successful write per version, and responses may get lost."""

from typing import Protocol

from webhook.core.raw import Raw


class GpuNodeStore(Protocol):
    """Stores one object per node. Every replica gets the same answer at the same moment."""

    async def get(self, name: str) -> Raw | None:
        """The object as it is now, not from a cache; None if there is none."""

    async def put(self, raw: Raw) -> Raw:
        """Replace all but the status, under the version in `raw`. Returns the object as it is after the write, or as it
        was last.

        Raises StaleError, RefusedError or StoreUnavailableError.
        """

    async def put_status(self, raw: Raw) -> Raw:
        """Replace the status under the version in `raw`. Returns the object as it is after the write.

        Raises StaleError, RefusedError or StoreUnavailableError.
        """
