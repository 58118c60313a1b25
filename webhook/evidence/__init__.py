"""What proves a node. One protocol; every provider says only what it knows and until when."""

from collections.abc import Mapping
from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence


class EvidenceUnavailableError(GpuwardenError):
    """The provider cannot be asked: what it last said stays good until its own end."""


class StillAwayError(EvidenceUnavailableError):
    """The provider did not answer when it was last asked, and has not been asked again since."""


class EvidenceProvider(Protocol):
    """A source of evidence."""

    name: str
    is_for_development: bool

    def begin(self) -> None:
        """Whoever asks has been elected: what was heard before may be older than what another leader wrote since."""

    async def poll(self) -> Mapping[str, Evidence]:
        """Everything it knows at this moment, by node."""
