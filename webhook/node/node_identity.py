"""The identity of this node: the only SPIFFE ID that the Workload API gives out for it."""

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId, EvidenceIdParts
from webhook.evidence.jwt.jwt_workload_api import JwtSvid, JwtWorkloadApi


class NotOneIdentityError(GpuwardenError):
    """The Workload API has no identity for this node, or several."""


@frozen
class NodeIdentity:
    """Fetches tokens of one node. The agent may know this workload under other identities too."""

    node: str
    workload_api: JwtWorkloadApi
    evidence_id: EvidenceId

    async def svid(self, audience: str) -> tuple[JwtSvid, EvidenceIdParts]:
        """A token for the audience, and what its ID says. Raises NotOneIdentityError or EvidenceUnavailableError."""
        svids = await self.workload_api.jwt_svids(audience)
        own = {one.spiffe_id: (one, parts) for one in svids if (parts := self._own_parts(one.spiffe_id)) is not None}
        if len(own) != 1:
            found = ", ".join(sorted(own)) or ", ".join(sorted(one.spiffe_id for one in svids)) or "none"
            raise NotOneIdentityError(f"expected exactly one identity for node {self.node}, found: {found}")
        return own.popitem()[1]

    def _own_parts(self, spiffe_id: str) -> EvidenceIdParts | None:
        parts = self.evidence_id.read(spiffe_id)
        return parts if parts is not None and parts.node == self.node else None
