"""Where GPUNode objects are kept: versions, one winner a version, and answers that may get lost."""

from typing import Protocol

from webhook.core.raw import Raw


class GpuNodeStore(Protocol):
    """Keeps one object a node. What it answers is what every replica would be answered at that moment."""

    async def get(self, name: str) -> Raw | None:
        """The object as it is now, not as a cache has it; None if there is none."""

    async def put(self, raw: Raw) -> Raw:
        """Replace all but the status, under the version that `raw` carries; the object as it then is, or last was.

        Raises StaleError, RefusedError or StoreAwayError.
        """

    async def put_status(self, raw: Raw) -> Raw:
        """Replace the status under the version that `raw` carries; the object as it then is.

        Raises StaleError, RefusedError or StoreAwayError.
        """
