"""Builds the evidence providers that the settings name, and polls them together."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from webhook.core.agent_naming import naming_of
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceProvider, EvidenceUnavailableError, StillUnavailableError
from webhook.evidence.jwt.jwt_svid import SOURCE as JWT_SVID
from webhook.evidence.spire.attested import SOURCE, AgentRules
from webhook.evidence.spire.spire_server import SocketServer, SpireConnection, SpireServer, TcpServer
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.evidence.static import StaticEvidence
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings

log = structlog.get_logger(__name__)

# The part of its SVID's lifetime after which an agent re-attests: 0.55, and some seconds.
REATTESTATION_FRACTION = 0.6


class ProviderPoll:
    """Polls all providers, one after the other. Logs once when one becomes unavailable, and once when it answers
    again."""

    def __init__(self, providers: Sequence[EvidenceProvider], count_error: Callable[[str], None]) -> None:
        self._providers = providers
        self._count_error = count_error
        self._unavailable: set[str] = set()
        self._answered: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self._providers)

    @property
    def unanswered(self) -> frozenset[str]:
        """The providers that have not answered since `begin`."""
        return self.names - self._answered

    def begin(self) -> None:
        """Forget earlier answers: they are not new enough."""
        self._answered.clear()
        for one in self._providers:
            one.begin()

    async def answers(self) -> dict[str, Mapping[str, Evidence]]:
        """The answers of the providers that are available at this moment."""
        found = {}
        for one in self._providers:
            try:
                found[one.name] = await one.poll()
            except EvidenceUnavailableError as exc:
                self._record_failure(one.name, exc)
            else:
                self._record_answer(one.name)
        return found

    def _record_failure(self, name: str, exc: EvidenceUnavailableError) -> None:
        if not isinstance(exc, StillUnavailableError):
            self._count_error(name)
        if name not in self._unavailable:
            text = "evidence provider unavailable, its last answer stays until it expires"
            log.warning(text, provider=name, problem=str(exc))
        self._unavailable.add(name)

    def _record_answer(self, name: str) -> None:
        self._answered.add(name)
        if name in self._unavailable:
            log.info("evidence provider answers again", provider=name)
        self._unavailable.discard(name)


def providers_of(settings: Settings, clock: Clock, *own: EvidenceProvider) -> list[EvidenceProvider]:
    """In the order of `--evidence`. `own` are providers that other parts of the process use too."""
    known = {one.name: one for one in own}
    if SOURCE in settings.evidence:
        known[SOURCE] = spire_server_of(settings, clock)
    return [known[name] for name in settings.evidence if name in known]


def retired_of(settings: Settings) -> set[str]:
    """The sources that this process could poll and does not. Sources that nodes push to are not among them."""
    return {StaticEvidence.name, SOURCE} - set(settings.evidence)


def pushed_of(settings: Settings) -> set[str]:
    """The sources that nodes push to, which are not polled."""
    return {JWT_SVID} & set(settings.evidence)


def spire_server_of(settings: Settings, clock: Clock) -> SpireServer:
    trust_domain = needed(settings.spire_trust_domain, "--spire-trust-domain")
    server = server_of(settings, trust_domain, clock)
    if settings.max_evidence_age < REATTESTATION_FRACTION * settings.spire_agent_ttl:
        log.warning("--max-evidence-age is under 0.6 of --spire-agent-ttl: nodes become stale in every round")
    return SpireServer(server, rules_of(settings, trust_domain), clock, settings.evidence_poll)


def rules_of(settings: Settings, trust_domain: str) -> AgentRules:
    return AgentRules(
        trust_domain=trust_domain,
        attestors=frozenset(settings.spire_attestors),
        node=naming_of(settings.spire_node_selector, "node"),
        hash=naming_of(settings.spire_hash_selector, "hash"),
        agent_ttl=settings.spire_agent_ttl,
        max_age=settings.max_evidence_age,
        skew=settings.clock_skew,
    )


def server_of(settings: Settings, trust_domain: str, clock: Clock) -> SpireConnection:
    address = needed(settings.spire_server, "--spire-server")
    if address.startswith("unix:"):
        return SocketServer(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    socket = needed(settings.spire_workload_api, "--spire-workload-api")
    identity = OwnIdentity(socket.removeprefix("unix:"), trust_domain, clock, own_id=settings.spire_own_id)
    return TcpServer(host.strip("[]"), int(port), trust_domain, identity)


def needed(value: str | None, flag: str) -> str:
    if value is None:
        raise GpuwardenError(f"the SPIRE Server provider needs {flag}")
    return value
