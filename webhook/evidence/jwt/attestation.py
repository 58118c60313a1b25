"""Challenges nodes and takes their answers: from a token to evidence that is kept."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Final

import structlog
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.core.evidence_id import EvidenceId, trust_domain_of
from webhook.evidence.jwt.bundle_endpoint import BundleEndpoint, FileRoots, Roots, SpiffeTrust, WebTrust, WorkloadRoots
from webhook.evidence.jwt.end_reports import EndReports
from webhook.evidence.jwt.jwt_svid import SOURCE, BadTokenError, TokenVerifier, check_signature
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi, WorkloadBundles
from webhook.evidence.jwt.nonce import BadKeyError, KeyFile, Nonce, Nonces, digest, one_process_only
from webhook.evidence.jwt.proofs import ProofStore, ReplayedProofError, UnknownNodeError
from webhook.evidence.jwt.trust_bundle import BundleSource, BundleVersions, TrustBundle
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics

log = structlog.get_logger(__name__)

KEY_INTERVAL: Final = 10.0


@frozen
class Attestation:
    """All that the routes need."""

    nonces: Nonces
    examiner: TokenVerifier
    bundle: TrustBundle
    book: ProofStore
    max_age: timedelta
    clock: Clock
    metrics: Metrics
    key_file: KeyFile | None = None
    # Elsewhere they are written down, and good whether or not the next one can be checked.
    ends_with_process: bool = True
    # None where nothing is orphaned: in one process alone.
    reports: EndReports | None = None

    def challenge(self, node: str) -> Nonce:
        return self.nonces.issue(node, self.clock())

    def orphans(self, node: str) -> Sequence[str]:
        """What the challenge of a node asks about its orphans: the marks of their pods."""
        return [] if self.reports is None else self.reports.marks(node, self.clock())

    async def take(self, token: str, ended: Collection[str] = ()) -> Evidence:
        """Evidence that is kept now. The node may also name pods that have `ended` there. Raises BadTokenError,
        ReplayedProofError, UnknownNodeError or EvidenceUnavailableError, each counted."""
        try:
            proof = self.examiner.examined(token, self.clock())
            check_signature(proof, await self.bundle.key(proof.token.key_id))
            evidence = Evidence(
                node=proof.says.node,
                hash=proof.says.hash,
                source=SOURCE,
                since=proof.issued,
                until=proof.issued + self.max_age,
                nonce_digest=digest(proof.token.audience),
                challenged=proof.challenged,
            )
            await self.book.accept(evidence)
        except GpuwardenError as exc:
            self.metrics.count_proof(outcome_of(exc))
            raise
        self.metrics.count_proof("accepted")
        if self.reports is not None and ended:
            await self.reports.take(evidence.node, ended, proof.challenged)
        return evidence

    async def load(self) -> None:
        """The first look at the trust bundle."""
        await self.bundle.refresh()

    async def wait_for_first_answers(self) -> None:
        """Where nobody else knows of a proof, until one can be checked: before, every node would be refused."""
        if self.ends_with_process:
            await self.bundle.first()

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(self.bundle.run(), self._watch_key())

    async def _watch_key(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        while self.key_file is not None:
            await sleep(KEY_INTERVAL)
            try:
                if await asyncio.to_thread(self.key_file.refresh, self.clock()):
                    log.info("the key of the challenges is a new one")
            except BadKeyError as exc:
                log.warning("the key of the challenges is refused, the old one stays", problem=str(exc))


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
    book: ProofStore,
    clock: Clock,
    metrics: Metrics,
    marks: BundleVersions | None = None,
    reports: EndReports | None = None,
) -> Attestation | None:
    """None where nodes are not challenged.

    Where proofs end with the process the challenges do too, whatever key is set: a proof that this process has not
    seen before may have been accepted by the one before.
    """
    if SOURCE not in settings.evidence or settings.spire_trust_domain is None:
        return None
    shared = settings.nonce_key if settings.keeps_in_cluster else None
    key_file = None if shared is None else KeyFile(shared)
    nonces = Nonces(one_process_only() if key_file is None else key_file.keys, settings.clock_skew)
    evidence_id = EvidenceId(settings.evidence_id, settings.spire_trust_domain)
    source = source_of(settings, settings.spire_trust_domain)
    bundle = TrustBundle(source, clock, settings.max_bundle_age, metrics.count_bundle, marks)
    return Attestation(
        nonces=nonces,
        examiner=TokenVerifier(evidence_id, nonces, settings.clock_skew),
        bundle=bundle,
        book=book,
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
            raise GpuwardenError("no trust bundle: name --bundle-endpoint or --spire-workload-api")
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
        raise GpuwardenError("no roots for the bundle endpoint: name --bundle-endpoint-ca or --spire-workload-api")
    return WorkloadRoots(JwtWorkloadApi(settings.spire_workload_api), trust_domain_of(server) or "")
