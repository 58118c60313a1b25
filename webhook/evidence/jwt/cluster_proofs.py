"""State of the attestation that outlives a process, shared by all replicas and written by compare-and-swap: accepted
proofs, each an entry of a NodeEvidence, and the version of the trust bundle."""

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
from webhook.evidence.jwt.proofs import UnknownNodeError, check_created_before, check_newer
from webhook.evidence.node_evidence import API_VERSION, entry_in, new_node_evidence, with_entries
from webhook.kube.api_objects import ObjectClient, get_node
from webhook.kube.client import ApiClient
from webhook.kube.store import StaleError

# Other sources write their entries to the same object.
MAX_ATTEMPTS = 5


class NodeCreationTimes(Protocol):
    """Knows when Nodes were created."""

    async def created_at(self, name: str) -> datetime | None:
        """None if there is no such Node. Raises StoreUnavailableError."""


class ApiNodeCreationTimes:
    """Reads Nodes by a quorum read, because a Node may have been recreated a moment ago."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def created_at(self, name: str) -> datetime | None:
        node = await get_node(self._api, name)
        return None if node is None else datetime.fromisoformat(node["metadata"]["creationTimestamp"])


class ClusterProofs:
    """Proofs in NodeEvidence objects. The resourceVersion is the lock; a ValidatingAdmissionPolicy checks proofs as
    well."""

    def __init__(self, objects: ObjectClient, nodes: NodeCreationTimes, skew: timedelta) -> None:
        self._objects = objects
        self._nodes = nodes
        self._skew = skew

    async def accept(self, proof: Evidence) -> None:
        try:
            born = await self._nodes.created_at(proof.node)
            if born is None:
                raise UnknownNodeError("there is no such node")
            check_created_before(proof, born, self._skew)
            await self._write(proof)
        except LedgerError as exc:
            raise EvidenceUnavailableError("the proof could not be stored") from exc

    async def _write(self, proof: Evidence) -> None:
        for _ in range(MAX_ATTEMPTS):
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
    """One TrustBundle object for all replicas and restarts. Deleting it resets the version."""

    def __init__(self, objects: ObjectClient, trust_domain: str) -> None:
        self._objects = objects
        self._trust_domain = trust_domain

    async def advance(self, bundle: JwtBundle) -> None:
        try:
            await self._write(bundle)
        except LedgerError as exc:
            raise EvidenceUnavailableError("the version of the trust bundle cannot be read or stored") from exc

    async def _write(self, bundle: JwtBundle) -> None:
        name, version = object_name(self._trust_domain), bundle.version
        for _ in range(MAX_ATTEMPTS):
            raw = await self._objects.get(name)
            last = version_in(raw or {})
            check_succession(last, bundle)
            if version is None or version == last:
                return
            try:
                raw = raw or await self._objects.create(new_trust_bundle(name, self._trust_domain))
                await self._objects.replace_status({**raw, "status": asdict(version)})
            except StaleError:
                continue
            return
        raise StaleError(name)


def object_name(trust_domain: str) -> str:
    """The trust domain itself, or a hash of it if it is not a valid object name."""
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


def version_in(raw: Raw) -> BundleVersion | None:
    """None for an object without a status, which was created and not written since."""
    status = raw.get("status")
    return None if not status else BundleVersion(status["sequence"], status["keys"])
