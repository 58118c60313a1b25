"""Issues challenges to nodes and verifies their tokens, from a token to stored evidence."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import structlog
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.core.evidence_id import EvidenceId, trust_domain_of
from webhook.evidence.jwt.bundle_endpoint import BundleEndpoint, FileRoots, Roots, SpiffeTrust, WebTrust, WorkloadRoots
from webhook.evidence.jwt.jwt_svid import SOURCE, BadTokenError, TokenVerifier, check_signature
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi, WorkloadBundles
from webhook.evidence.jwt.node_reports import NodeReports
from webhook.evidence.jwt.nonce import BadKeyError, KeyFile, Nonce, Nonces, digest, process_key
from webhook.evidence.jwt.proofs import ProofStore, ReplayedProofError, UnknownNodeError
from webhook.evidence.jwt.trust_bundle import BundleSource, BundleVersions, MemoryBundleVersions, TrustBundle
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics

log = structlog.get_logger(__name__)

KEY_INTERVAL: Final = 10.0


@frozen
class Attestation:
    """The parts that the evidence routes need."""

    nonces: Nonces
    verifier: TokenVerifier
    bundle: TrustBundle
    proofs: ProofStore
    max_age: timedelta
    clock: Clock
    metrics: Metrics
    key_file: KeyFile | None = None
    # In the cluster proofs are stored, and stay valid whether or not the next one can be verified.
    ends_with_process: bool = True
    # None in embedded mode, which has no orphans.
    reports: NodeReports | None = None

    def challenge(self, node: str) -> Nonce:
        return self.nonces.issue(node, self.clock())

    def orphans(self, node: str) -> Sequence[str]:
        """Digests of the orphaned pods that the node's challenge asks about."""
        return [] if self.reports is None else self.reports.digests(node, self.clock())

    async def take(
        self, token: str, ended: Collection[str] = (), given: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> Evidence:
        """Verify a token and store its evidence. The node may also report pods that have `ended` there, and the GPUs
        that pods were `given`. Raises BadTokenError, ReplayedProofError, UnknownNodeError or EvidenceUnavailableError,
        each counted."""
        try:
            proof = self.verifier.check_claims(token, self.clock())
            check_signature(proof, await self.bundle.key(proof.token.key_id))
            evidence = Evidence(
                node=proof.evidence_id.node,
                hash=proof.evidence_id.hash,
                source=SOURCE,
                since=proof.issued,
                until=proof.issued + self.max_age,
                nonce_digest=digest(proof.token.audience),
                challenged=proof.challenged,
            )
            await self.proofs.accept(evidence)
        except GpuwardenError as exc:
            self.metrics.count_proof(outcome_of(exc))
            raise
        self.metrics.count_proof("accepted")
        if self.reports is not None:
            await self.reports.take_ended(evidence.node, ended, proof.challenged)
            await self.reports.take_given(evidence.node, given)
        return evidence

    async def load(self) -> None:
        """Fetch the trust bundle for the first time."""
        await self.bundle.refresh()

    async def wait_for_first_answers(self) -> None:
        """If proofs end with the process, wait until tokens can be verified: until then every node would be refused."""
        if self.ends_with_process:
            await self.bundle.first()

    async def run(self) -> None:
        """Runs forever."""
        await asyncio.gather(self.bundle.run(), self._watch_key())

    async def _watch_key(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        while self.key_file is not None:
            await sleep(KEY_INTERVAL)
            try:
                if await asyncio.to_thread(self.key_file.refresh, self.clock()):
                    log.info("nonce key changed")
            except BadKeyError as exc:
                log.warning("nonce key rejected, the previous one stays", problem=str(exc))


def outcome_of(exc: GpuwardenError) -> str:
    match exc:
        case BadTokenError():
            return exc.fault
        case ReplayedProofError():
            return "replayed"
        case UnknownNodeError():
            return "node"
        case _:
            return "unavailable"


def attestation_of(
    settings: Settings,
    proofs: ProofStore,
    clock: Clock,
    metrics: Metrics,
    marks: BundleVersions | None = None,
    reports: NodeReports | None = None,
) -> Attestation | None:
    """None if nodes are not challenged.

    If proofs end with the process, challenges do too, even if a nonce key is set: the previous process may have
    accepted a proof that this process does not know.
    """
    if SOURCE not in settings.evidence or settings.spire_trust_domain is None:
        return None
    shared = settings.nonce_key if settings.keeps_in_cluster else None
    key_file = None if shared is None else KeyFile(shared)
    nonces = Nonces(process_key() if key_file is None else key_file.keys, settings.clock_skew)
    evidence_id = EvidenceId(settings.evidence_id, settings.spire_trust_domain)
    source = source_of(settings, settings.spire_trust_domain)
    bundle = TrustBundle(source, clock, settings.max_bundle_age, metrics.count_bundle, marks or MemoryBundleVersions())
    return Attestation(
        nonces=nonces,
        verifier=TokenVerifier(evidence_id, nonces, settings.clock_skew),
        bundle=bundle,
        proofs=proofs,
        max_age=settings.max_evidence_age,
        clock=clock,
        metrics=metrics,
        key_file=key_file,
        ends_with_process=not settings.keeps_in_cluster,
        reports=reports,
    )


def source_of(settings: Settings, trust_domain: str) -> BundleSource:
    if settings.bundle_endpoint is None:
        if settings.spire_workload_api is None:
            raise GpuwardenError("no trust bundle: set --bundle-endpoint or --spire-workload-api")
        return WorkloadBundles(JwtWorkloadApi(settings.spire_workload_api), trust_domain)
    roots = settings.bundle_endpoint_ca
    if settings.bundle_endpoint_profile == "https_web":
        return BundleEndpoint(settings.bundle_endpoint, WebTrust(roots))
    server = settings.bundle_endpoint_id or f"spiffe://{trust_domain}/spire/server"
    return BundleEndpoint(settings.bundle_endpoint, SpiffeTrust(first_roots(settings, server), server))


def first_roots(settings: Settings, server: str) -> Roots:
    if settings.bundle_endpoint_ca is not None:
        return FileRoots(settings.bundle_endpoint_ca)
    if settings.spire_workload_api is None:
        raise GpuwardenError("no roots for the bundle endpoint: set --bundle-endpoint-ca or --spire-workload-api")
    return WorkloadRoots(JwtWorkloadApi(settings.spire_workload_api), trust_domain_of(server) or "")
