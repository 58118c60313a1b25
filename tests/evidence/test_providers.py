"""The settings select the providers, and SPIRE's answers decide about pods."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from attrs import frozen
from structlog.testing import capture_logs

from tests import builders
from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.evidence.certificates import Authority
from tests.evidence.doubles import SERVER_ID, TRUST_DOMAIN, VERIFIER, SpireDouble, WorkloadApiDouble, agent, until
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import SigningKey
from tests.running import serving
from tests.web.harness import INVENTORY, Harness
from webhook.admission.parts import Parts
from webhook.assembly.serving import assembled
from webhook.commands.serve import Server
from webhook.core.evidence import EvidenceState
from webhook.evidence.providers import providers_of
from webhook.evidence.spire.spire_server import SpireServer
from webhook.evidence.static import StaticEvidence
from webhook.runtime import settings
from webhook.runtime.clock import utc_now

HOUR = timedelta(hours=1)
MAX_AGE = timedelta(minutes=40)
POD = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH})
FLAGS = {
    "evidence": "spire-server",
    "spire_server": "[::1]:8081",
    "spire_trust_domain": TRUST_DOMAIN,
    "spire_workload_api": "unix:///run/agent.sock",
}


def names(**flags: str) -> list[str]:
    found = settings.load(flags, {})
    return [one.name for one in providers_of(found, lambda: NOW, StaticEvidence(found.node_hash_map))]


def test_providers_are_those_in_the_settings() -> None:
    assert names() == ["static"]
    assert names(**FLAGS) == ["spire-server"]
    assert names(**FLAGS | {"evidence": "spire-server,static"}) == ["spire-server", "static"]


@pytest.mark.parametrize("name", settings.EVIDENCE_PROVIDERS)
def test_provider_is_built_by_its_declaration_or_pushed_or_static(name: str) -> None:
    provider = settings.EVIDENCE_PROVIDERS[name]
    assert bool(provider.built_by) + provider.is_pushed + (name == StaticEvidence.name) == 1
    assert not provider.built_by or callable(resolve_name(provider.built_by))


def test_spire_server_socket_needs_no_workload_api() -> None:
    assert names(evidence="spire-server", spire_server="unix:/tmp/api.sock", spire_trust_domain="a") == ["spire-server"]


@pytest.mark.parametrize(
    ("missing", "flags"),
    [
        (["spire_server"], "--spire-server"),
        (["spire_trust_domain"], "--spire-trust-domain"),
        (["spire_workload_api"], "--spire-workload-api"),
        (["spire_server", "spire_trust_domain"], "--spire-server and --spire-trust-domain"),
    ],
)
def test_missing_spire_server_settings_are_reported(missing: list[str], flags: str) -> None:
    with pytest.raises(settings.SettingsError) as caught:
        settings.load({name: text for name, text in FLAGS.items() if name not in missing}, {})
    assert caught.value.mistakes == (f"flag --evidence: spire-server needs {flags}",)


@pytest.mark.parametrize(("max_age", "warnings"), [("36m", 0), ("35m", 1)])
def test_too_short_max_evidence_age_is_logged(max_age: str, warnings: int) -> None:
    with capture_logs() as lines:
        names(**FLAGS | {"max_evidence_age": max_age})
    assert len(lines) == warnings


class Site:
    """A webhook whose evidence comes from SPIRE."""

    def __init__(self, harness: Harness, spire: SpireDouble) -> None:
        self.harness = harness
        self.spire = spire

    async def verdict(self, uid: str, pod: Raw = POD) -> str:
        response = await self.harness.mutate(pod, uid)
        return "Admitted" if response["allowed"] else str(response["status"]["reason"])

    async def look(self) -> None:
        """The next poll."""
        self.harness.wait(5)
        await self.harness.fleet_source.refresh()


@pytest.fixture
async def spire() -> AsyncIterator[SpireDouble]:
    double = SpireDouble([agent("node-a", HASH, expires_at=NOW + HOUR)])
    yield double
    await double.stop()


@pytest.fixture
async def site(request: pytest.FixtureRequest, build: Build, spire: SpireDouble, tmp_path: Path) -> AsyncIterator[Site]:
    authority = Authority()
    await spire.start(authority.issue(SERVER_ID), authority)
    api = WorkloadApiDouble(str(tmp_path / "agent.sock"), [authority.issue(VERIFIER)], [authority.root])
    await api.start()
    harness = await build(
        evidence=getattr(request, "param", ("spire-server",)),
        spire_server=f"127.0.0.1:{spire.port}",
        spire_trust_domain=TRUST_DOMAIN,
        spire_workload_api=f"unix:{api.path}",
    )
    yield Site(harness, spire)
    provider: Any = harness.fleet_source._providers[0]
    assert isinstance(provider, SpireServer)
    await provider._server._identity.close()  # type: ignore[attr-defined]  # one of two ways to a server
    await api.stop()


async def test_pod_gets_the_node_that_spire_vouches_for(site: Site) -> None:
    assert await site.verdict("r1") == "Admitted"


async def test_static_evidence_is_ignored_without_the_static_source(site: Site) -> None:
    pod = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": OTHER_HASH})
    assert INVENTORY["nodes"][1]["evidence"] == {"hash": OTHER_HASH}
    assert await site.verdict("r1", pod) == "NoProvenNode"
    assert not any("static" in note for note in site.harness.parts.notes)


@pytest.mark.parametrize(
    "agents",
    [
        pytest.param([agent("node-a", HASH, expires_at=NOW + HOUR, banned=True)], id="banned"),
        pytest.param([], id="evicted"),
        pytest.param([agent("node-a", OTHER_HASH, expires_at=NOW + HOUR)], id="another-hash"),
        pytest.param([agent("node-a", HASH.upper(), expires_at=NOW + HOUR)], id="hash-in-other-case"),
        pytest.param([agent("node-a", f" {HASH}", expires_at=NOW + HOUR)], id="hash-with-a-blank"),
        pytest.param([agent("node-a", HASH, expires_at=NOW + HOUR, attestor="join_token")], id="another-attestor"),
        pytest.param([agent("node-a", HASH, expires_at=NOW + HOUR, trust_domain="evil.org")], id="foreign"),
        pytest.param([agent("node-a", HASH, expires_at=NOW + HOUR, can_reattest=False)], id="cannot-attest-again"),
        pytest.param(
            [
                agent("node-a", HASH, expires_at=NOW + HOUR),
                agent("node-a", OTHER_HASH, expires_at=NOW + HOUR, id="/spire/agent/x509pop/clone"),
            ],
            id="two-agents-claim-the-node",
        ),
    ],
)
async def test_pod_does_not_get_a_node_that_spire_no_longer_vouches_for(site: Site, agents: list[Any]) -> None:
    site.spire.agents = agents
    await site.look()
    assert await site.verdict("r1") == "NoProvenNode"


async def test_evidence_expires_to_the_second_while_spire_is_unavailable(site: Site) -> None:
    await site.spire.stop()
    await site.look()
    metrics = site.harness.parts.metrics.render()[0].decode()
    assert 'gpuwarden_evidence_provider_errors_total{provider="spire-server"} 1.0' in metrics
    site.harness.now = NOW + MAX_AGE - SECOND
    assert await site.verdict("r1") == "Admitted"
    site.harness.now = NOW + MAX_AGE
    assert await site.verdict("r2") == "NoProvenNode"


@pytest.mark.parametrize("site", [("spire-server", "static")], indirect=True)
async def test_ban_stays_when_the_inventory_changes_while_spire_is_unavailable(site: Site) -> None:
    site.spire.agents = [agent("node-a", HASH, expires_at=NOW + HOUR, banned=True)]
    await site.look()
    await site.spire.stop()
    site.harness.file.write_text(json.dumps({"nodes": [{**INVENTORY["nodes"][0], "labels": {"zone": "z"}}]}))
    await site.look()
    assert +site.harness.parts.fleet.states == {EvidenceState.BANNED: 1}


@pytest.mark.parametrize("site", [("spire-server", "static")], indirect=True)
async def test_node_missing_in_spire_is_not_proven_by_another_source(site: Site) -> None:
    assert await site.verdict("r1") == "Admitted"
    site.spire.agents = []
    await site.look()
    assert await site.verdict("r2") == "NoProvenNode"


async def test_ban_is_applied_although_the_inventory_file_is_bad(site: Site) -> None:
    site.harness.file.write_text("nodes: [")
    site.spire.agents = [agent("node-a", HASH, expires_at=NOW + HOUR, banned=True)]
    await site.look()
    assert await site.verdict("r1") == "NoProvenNode"


async def test_server_is_ready_after_the_first_answer_of_spire(
    spire: SpireDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    authority = Authority()
    spire.agents = [agent("node-a", HASH, expires_at=utc_now() + HOUR)]
    await spire.start(authority.issue(SERVER_ID), authority)
    await spire.stop()  # its port stays reserved
    api = WorkloadApiDouble(str(tmp_path / "agent.sock"), [authority.issue(VERIFIER)], [authority.root])
    await api.start()
    (tmp_path / "inventory.json").write_text(json.dumps(INVENTORY))
    flags = FLAGS | {"spire_server": f"127.0.0.1:{spire.port}", "spire_workload_api": f"unix:{api.path}"}
    flags |= {"inventory": "inventory.json", "evidence_poll": "100ms"}
    async with beginning(flags) as one:
        vain = "gpuwarden_evidence_provider_errors_total"
        await until(lambda: one.says(503))
        await until(lambda: one.counted(vain, provider="spire-server") >= 2)
        assert await one.says(503)
        await spire.start(authority.issue(SERVER_ID), authority)
        await asyncio.wait_for(one.starting, 30)
        assert await one.says(200)
        assert one.parts.fleet.indexed_nodes["node-a"].state is EvidenceState.FRESH
        await spire.stop()
        assert await one.says(200)  # the evidence stays until it expires, and the server stays ready
    await api.stop()


async def test_server_is_ready_after_the_first_trust_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.json").write_text(json.dumps(INVENTORY))
    api = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), SigningKey.make())
    flags = {"evidence": "jwt-svid", "spire_trust_domain": TRUST_DOMAIN, "spire_workload_api": f"unix:{api.path}"}
    async with beginning(flags | {"inventory": "inventory.json"}) as one:
        looks = "gpuwarden_trust_bundle_looks_total"
        await until(lambda: one.counted(looks, outcome="away") >= 2)
        assert await one.says(503)
        await api.start()
        await asyncio.wait_for(one.starting, 30)
        assert await one.says(200)
        await api.stop()
        before = one.counted(looks, outcome="away")
        assert one.parts.attestation is not None
        await one.parts.attestation.load()
        assert one.counted(looks, outcome="away") == before + 1
        assert await one.says(200)


@frozen(eq=False)
class Beginning:
    """A server that starts, and its readiness in the meantime."""

    server: Server
    parts: Parts
    starting: asyncio.Task[None]

    async def says(self, status: int) -> bool:
        with suppress(httpx.HTTPError, AttributeError):  # the listeners are not open yet
            url = dict(part.split("=", 1) for part in self.server.ready_line.split()[1:])["http"]
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                return (await client.get("/readyz")).status_code == status
        return False

    def counted(self, name: str, **labels: str) -> float:
        return self.parts.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def beginning(flags: Mapping[str, str]) -> AsyncIterator[Beginning]:
    given = settings.load({**flags, **dict.fromkeys(("port", "ui_port", "extender_port"), "0")}, {})
    async with assembled(given) as assembly:
        server = Server(given, assembly)
        one = Beginning(server, assembly.parts, asyncio.create_task(server.start()))
        yield one
        stop = asyncio.Event()
        stop.set()
        await server.run(stop)


async def test_server_is_ready_with_the_evidence_of_spire(spire: SpireDouble, tmp_path: Path) -> None:
    """The whole process, with an operator's command line."""
    authority = Authority()
    spire.agents = [agent("node-a", HASH, expires_at=utc_now() + HOUR)]
    await spire.start(authority.issue(SERVER_ID), authority)
    api = WorkloadApiDouble(str(tmp_path / "agent.sock"), [authority.issue(VERIFIER)], [authority.root])
    await api.start()
    flags = f"--evidence spire-server --spire-server 127.0.0.1:{spire.port} --spire-trust-domain {TRUST_DOMAIN}"
    also = f"--spire-workload-api unix://{api.path} --spire-own-id {VERIFIER} --evidence-poll 100ms"
    begin = partial(serving, tmp_path, INVENTORY, [*flags.split(), *also.split()])
    with ExitStack() as stack:
        running = await asyncio.to_thread(stack.enter_context, begin())
        async with running.client() as client:

            async def is_admitted() -> bool:
                answer = await client.post("/mutate", json=builders.mutating_create(POD, dry_run=True))
                return bool(answer.json()["response"]["allowed"])

            assert await is_admitted()
            spire.agents = [agent("node-a", HASH, expires_at=utc_now() + HOUR, banned=True)]

            async def is_refused() -> bool:
                return not await is_admitted()

            await until(is_refused)
    await api.stop()
