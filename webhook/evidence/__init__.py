"""What proves a node's identity. One protocol; each provider reports only what it knows, and until when it holds."""

from collections.abc import Mapping
from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence


class EvidenceUnavailableError(GpuwardenError):
    """The provider cannot be asked. Its last answer stays valid until its own expiry."""


class StillUnavailableError(EvidenceUnavailableError):
    """The provider did not answer the last request, and has not been asked again since."""


class EvidenceProvider(Protocol):
    """A source of evidence."""

    name: str

    def begin(self) -> None:
        """The caller was elected: earlier answers may be older than what another leader has written since."""

    async def poll(self) -> Mapping[str, Evidence]:
        """Everything it knows at this moment, by node."""
