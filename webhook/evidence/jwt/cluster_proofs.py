"""What has to outlive a process where nodes prove themselves, by compare-and-swap, whichever replica was told: accepted
proofs, each an entry of NodeEvidence, and how far the trust bundle has come."""

import hashlib
from datetime import datetime, timedelta
from typing import Protocol

from attrs import asdict

from webhook.core import keys
from webhook.core.errors import LedgerError
from webhook.core.evidence import Evidence
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import BundleVersion, JwtBundle, check_succession
from webhook.evidence.jwt.jwt_svid import SOURCE
from webhook.evidence.jwt.proofs import UnknownNodeError, check_birth, check_newer
from webhook.evidence.node_evidence import API_VERSION, entry_in, new_node_evidence, with_entries
from webhook.kube.api_objects import ObjectClient, get_node
from webhook.kube.client import ApiClient
from webhook.kube.store import StaleError

# Others write the entries of other sources of the same object.
TRIES = 5


class NodeCreationTimes(Protocol):
    """Knows since when there are nodes."""

    async def born(self, name: str) -> datetime | None:
        """None if there is none of that name. Raises StoreAwayError."""


class ApiNodeCreationTimes:
    """Node objects, by a quorum read: a node that was made anew a moment ago is another one."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def born(self, name: str) -> datetime | None:
        node = await get_node(self._api, name)
        return None if node is None else datetime.fromisoformat(node["metadata"]["creationTimestamp"])


class ClusterProofs:
    """The version that was read is the lock, and the API server's own rule for proofs the second one."""

    def __init__(self, objects: ObjectClient, nodes: NodeCreationTimes, skew: timedelta) -> None:
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


class ClusterBundleVersions:
    """One TrustBundle object for all replicas, and for those that come after. Who deletes it begins anew."""

    def __init__(self, objects: ObjectClient, trust_domain: str) -> None:
        self._objects = objects
        self._trust_domain = trust_domain

    async def advance(self, bundle: JwtBundle) -> None:
        try:
            await self._write(bundle)
        except LedgerError as exc:
            raise EvidenceUnavailableError("how far the trust bundle has come cannot be looked up or kept") from exc

    async def _write(self, bundle: JwtBundle) -> None:
        name, mark = object_name(self._trust_domain), bundle.mark
        for _ in range(TRIES):
            raw = await self._objects.get(name)
            last = mark_in(raw or {})
            check_succession(last, bundle)
            if mark is None or mark == last:
                return
            try:
                raw = raw or await self._objects.create(new_trust_bundle(name, self._trust_domain))
                await self._objects.replace_status({**raw, "status": asdict(mark)})
            except StaleError:
                continue
            return
        raise StaleError(name)


def object_name(trust_domain: str) -> str:
    """Not every trust domain is a name that an object may have."""
    if is_object_name(trust_domain):
        return trust_domain
    return f"trust-domain-{hashlib.sha256(trust_domain.encode()).hexdigest()[:32]}"


def new_trust_bundle(name: str, trust_domain: str) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": "TrustBundle",
        "metadata": {"name": name, "labels": {keys.MANAGED_BY: keys.OURS}},
        "spec": {"trustDomain": trust_domain},
    }


def mark_in(raw: Raw) -> BundleVersion | None:
    """None for an object that nobody has written further than to make it."""
    status = raw.get("status")
    return None if not status else BundleVersion(status["sequence"], status["keys"])
