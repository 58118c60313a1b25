"""Builds the provider `spire-server` from the settings."""

import structlog

from webhook.core.agent_naming import naming_of
from webhook.core.errors import GpuwardenError
from webhook.evidence.spire.attested import AgentRules
from webhook.evidence.spire.spire_server import SocketServer, SpireConnection, SpireServer, TcpServer
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings

log = structlog.get_logger(__name__)

# The part of its SVID's lifetime after which an agent re-attests: 0.55, and some seconds.
REATTESTATION_FRACTION = 0.6


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
