"""Accepted proofs in the cluster: one entry of NodeEvidence, by compare-and-swap, whichever replica was told."""

from datetime import datetime, timedelta
from typing import Protocol

from kubernetes.aio import client

from webhook.api_objects import Objects, is_not_found
from webhook.cluster import REQUEST_TIMEOUT, translated
from webhook.core.errors import LedgerError
from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt_svid import SOURCE
from webhook.evidence.node_evidence import entry_in, new_node_evidence, with_entries
from webhook.evidence.proofs import UnknownNodeError, check_birth, check_newer
from webhook.ledger.store import StaleError, StoreAwayError

# Others write the entries of other sources of the same object.
TRIES = 5


class Births(Protocol):
    """Knows since when there are nodes."""

    async def born(self, name: str) -> datetime | None:
        """None if there is none of that name. Raises StoreAwayError."""


class ApiBirths:
    """Node objects, by a quorum read: a node that was made anew a moment ago is another one."""

    def __init__(self, api: client.ApiClient) -> None:
        self._nodes = client.CoreV1Api(api)

    async def born(self, name: str) -> datetime | None:
        try:
            async with translated():
                node = await self._nodes.read_node(name, _request_timeout=REQUEST_TIMEOUT)
        except StoreAwayError as exc:
            if is_not_found(exc):
                return None
            raise
        return node.metadata.creation_timestamp if node.metadata else None


class ClusterProofs:
    """The version that was read is the lock, and the API server's own rule for proofs the second one."""

    def __init__(self, objects: Objects, nodes: Births, skew: timedelta) -> None:
        self._objects = objects
        self._nodes = nodes
        self._skew = skew

    async def accept(self, proof: Evidence) -> None:
        try:
            born = await self._nodes.born(proof.node)
            if born is None:
                raise UnknownNodeError("there is no such node")
            check_birth(proof, born, self._skew)
            await self._write(proof)
        except LedgerError as exc:
            raise EvidenceUnavailableError("the proof could not be written down") from exc

    async def _write(self, proof: Evidence) -> None:
        for _ in range(TRIES):
            raw = await self._objects.get(proof.node)
            try:
                if raw is None:
                    raw = await self._objects.create(new_node_evidence(proof.node))
                check_newer(proof, entry_in(raw, SOURCE))
                await self._objects.replace_status(with_entries(raw, {SOURCE: proof}))
            except StaleError:
                continue
            return
        raise StaleError(proof.node)
