"""Agents are read over real mTLS from a fake SPIRE Server, with an identity from a real Workload API connection."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from attrs import evolve
from cryptography import x509
from cryptography.x509.oid import ExtensionOID
from structlog.testing import capture_logs

from tests.builders import NOW, SECOND
from tests.evidence.certificates import HOUR, Authority, Issued
from tests.evidence.doubles import SERVER_ID, TRUST_DOMAIN, VERIFIER, SpireDouble, WorkloadApiDouble, agent, until
from tests.evidence.spire.test_attested import MAX_AGE, RULES, TTL
from webhook.core.evidence import Evidence, state_of
from webhook.evidence import EvidenceUnavailableError, StillUnavailableError
from webhook.evidence.providers import ProviderPoll
from webhook.evidence.spire.spire_server import SocketServer, SpireServer, TcpServer
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import utc_now

POLL = timedelta(seconds=5)
CA = Authority()
OURS = CA.issue(VERIFIER)
THEIRS = CA.issue(SERVER_ID)


class Scene:
    """A SPIRE Server, a Workload API and the provider between them, with a clock that the test sets."""

    def __init__(self, directory: Path) -> None:
        self.now = NOW
        self.spire = SpireDouble()
        self.api = WorkloadApiDouble(str(directory / "agent.sock"), [OURS], [CA.root])
        self.identity = OwnIdentity(self.api.path, TRUST_DOMAIN, utc_now, retry=timedelta(milliseconds=20))
        self.provider = self.made()

    def made(self, **members: Any) -> SpireServer:
        options: dict[str, Any] = {
            "random_fraction": lambda: 0.0,
            "poll_timeout": timedelta(seconds=20),
            "page_size": 2,
        } | members
        return SpireServer(self, RULES, lambda: self.now, POLL, **options)

    def connected(self) -> Any:
        """The port is known once the server has started."""
        return TcpServer("127.0.0.1", self.spire.port, TRUST_DOMAIN, self.identity).connected()

    async def start(self, shown: Issued = THEIRS, trusted: Authority = CA) -> "Scene":
        await self.api.start()
        await self.spire.start(shown, trusted)
        return self

    async def poll(self) -> Mapping[str, Evidence]:
        """The next poll that sends a request."""
        self.now += POLL
        return await self.provider.poll()

    async def states(self) -> dict[str, str]:
        return {node: state_of(word, self.now).value for node, word in (await self.poll()).items()}

    async def refused(self) -> str:
        with pytest.raises(EvidenceUnavailableError) as caught:
            await self.poll()
        return str(caught.value)

    async def close(self) -> None:
        await self.identity.close()
        await self.spire.stop()
        await self.api.stop()


@pytest.fixture
async def idle(tmp_path: Path) -> AsyncIterator[Scene]:
    """Nothing listens yet."""
    made = Scene(tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def scene(idle: Scene) -> Scene:
    idle.spire.agents = [agent(expires_at=NOW + TTL)]
    return await idle.start()


def fleet(size: int) -> list[Any]:
    return [agent(f"node-{number}", f"{number:04x}", expires_at=NOW + TTL) for number in range(size)]


async def test_all_pages_of_agents_are_read(scene: Scene) -> None:
    scene.spire.agents = fleet(5)
    assert {node: word.hash for node, word in (await scene.poll()).items()} == {
        "node-0": "0000",
        "node-1": "0001",
        "node-2": "0002",
        "node-3": "0003",
        "node-4": "0004",
    }
    assert [one.page_token for one in scene.spire.requests] == ["", "2", "4", "5"]
    assert scene.spire.callers == [VERIFIER] * 4


async def test_ban_is_read_because_the_mask_requests_it(scene: Scene) -> None:
    assert await scene.states() == {"node-a": "fresh"}
    scene.spire.agents = [agent(expires_at=NOW + TTL, banned=True)]
    assert await scene.states() == {"node-a": "banned"}


async def test_evicted_agent_proves_nothing(scene: Scene) -> None:
    await scene.poll()
    scene.spire.agents = []
    assert await scene.poll() == {}


async def test_changed_hash_is_reported_at_the_next_poll(scene: Scene) -> None:
    await scene.poll()
    scene.spire.agents = [agent("node-a", "bb22", expires_at=scene.now + TTL, serial="2")]
    assert (await scene.poll())["node-a"].hash == "bb22"


async def test_new_attestation_with_the_same_hash_updates_the_evidence(scene: Scene) -> None:
    before = await scene.poll()
    scene.now += timedelta(minutes=30)
    scene.spire.agents = [agent(expires_at=scene.now + TTL, serial="2")]
    after = await scene.poll()
    assert after is not before
    assert after["node-a"].until == NOW + POLL + timedelta(minutes=30) + MAX_AGE


async def test_unchanged_agents_give_the_same_answer(scene: Scene) -> None:
    scene.spire.agents = fleet(3)
    before = await scene.poll()
    assert await scene.poll() is before
    scene.spire.agents.append(agent("node-z", expires_at=NOW + TTL))
    after = await scene.poll()
    assert after is not before
    assert all(after[node] is word for node, word in before.items())


async def test_spire_is_polled_at_the_interval_with_jitter(scene: Scene) -> None:
    scene.provider = scene.made(random_fraction=lambda: 0.5)
    await scene.provider.poll()
    asked = len(scene.spire.requests)
    scene.now += 0.89 * POLL
    await scene.provider.poll()
    assert len(scene.spire.requests) == asked
    scene.now += 0.02 * POLL
    await scene.provider.poll()
    assert len(scene.spire.requests) > asked


async def test_last_answer_stays_until_it_expires_while_spire_is_unavailable(scene: Scene) -> None:
    before = await scene.poll()
    await scene.spire.stop()
    assert "SPIRE: " in await scene.refused()
    with pytest.raises(StillUnavailableError):  # not asked again yet: the last answer does not mean that it is back
        await scene.provider.poll()
    assert state_of(before["node-a"], NOW + MAX_AGE - SECOND).value == "fresh"
    assert state_of(before["node-a"], NOW + MAX_AGE).value == "stale"
    await scene.spire.start(THEIRS, CA)
    assert await scene.poll() is before


async def test_outage_and_recovery_are_logged_once_each(scene: Scene) -> None:
    errors: list[str] = []
    asked = ProviderPoll([scene.provider], errors.append)
    with capture_logs() as lines:
        await asked.answers()
        await scene.spire.stop()
        for _ in range(3):
            scene.now += POLL
            for _ in range(5):  # as the fleet updater does, every second
                assert await asked.answers() == {}
        await scene.spire.start(THEIRS, CA)
        scene.now += POLL
        for _ in range(5):
            assert "spire-server" in await asked.answers()
    assert [line["event"] for line in lines if "provider" in line] == [
        "evidence provider unavailable, its last answer stays until it expires",
        "evidence provider answers again",
    ]
    assert errors == ["spire-server"] * 3, "one for each question that failed"


async def test_spire_that_never_answered_is_unavailable(idle: Scene) -> None:
    """Not the same as an empty list of agents: no evidence is removed."""
    await idle.api.start()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        idle.spire.port = nobody.getsockname()[1]
        await idle.refused()
        with pytest.raises(StillUnavailableError, match="SPIRE: "):
            await idle.provider.poll()
    idle.spire.port = 0


async def test_frozen_spire_does_not_block_polls(scene: Scene) -> None:
    scene.provider = scene.made(poll_timeout=timedelta(milliseconds=50), deadline=timedelta(seconds=1))
    before = await scene.poll()
    scene.spire.answers.clear()
    assert await scene.poll() is before  # returned by a later poll

    async def has_failed() -> bool:
        try:
            return await scene.provider.poll() is not before
        except EvidenceUnavailableError as exc:
            return str(exc) == "SPIRE: no answer in time"

    await until(has_failed)
    scene.spire.answers.set()
    assert await scene.poll() is before


async def test_slow_answer_is_returned_by_a_later_poll(scene: Scene) -> None:
    scene.provider = scene.made(poll_timeout=timedelta(milliseconds=50))
    await scene.poll()
    scene.spire.agents = [agent(expires_at=NOW + TTL, banned=True)]
    scene.spire.answers.clear()
    await scene.poll()
    scene.spire.answers.set()

    async def is_banned() -> bool:
        return (await scene.provider.poll())["node-a"].is_banned

    await until(is_banned)


async def test_new_leader_gets_no_earlier_answer(scene: Scene) -> None:
    scene.provider = scene.made(poll_timeout=timedelta(milliseconds=50))
    before = await scene.provider.poll()
    scene.provider.begin()
    scene.spire.answers.clear()
    with pytest.raises(EvidenceUnavailableError, match="has not answered yet"):
        await scene.provider.poll()
    scene.spire.answers.set()

    async def has_warning() -> bool:
        with suppress(EvidenceUnavailableError):
            return await scene.provider.poll() == before
        return False

    await until(has_warning)


async def test_new_leader_gets_no_answer_to_an_earlier_request(scene: Scene) -> None:
    scene.provider = scene.made(poll_timeout=timedelta(milliseconds=50))
    await scene.poll()
    scene.spire.answers.clear()
    await scene.poll()

    async def questions(number: int) -> bool:
        return sum(not request.page_token for request in scene.spire.requests) == number

    await until(partial(questions, 2))  # the request is in progress
    scene.provider.begin()
    scene.spire.agents = [agent(expires_at=NOW + TTL, banned=True)]
    scene.spire.answers.set()

    async def has_answered() -> bool:
        with suppress(EvidenceUnavailableError):
            assert (await scene.provider.poll())["node-a"].is_banned
            return True
        return False

    await until(has_answered)
    assert await questions(3)


async def test_spire_that_stops_within_an_answer_is_unavailable(scene: Scene) -> None:
    before = await scene.poll()
    scene.spire.answers.clear()
    asked = len(scene.spire.requests)
    polling = asyncio.ensure_future(scene.refused())
    await until(lambda: len(scene.spire.requests) > asked)
    await scene.spire.stop()
    assert (await polling).startswith("SPIRE: ")
    await scene.spire.start(THEIRS, CA)
    scene.spire.answers.set()
    assert await scene.poll() is before


async def test_missing_permission_to_list_agents_is_logged_once(scene: Scene) -> None:
    scene.spire.readers = set()
    problem = "SPIRE: PERMISSION_DENIED: authorization denied for method ListAgents"
    asked = ProviderPoll([scene.provider], lambda name: None)
    with capture_logs() as lines:
        for _ in range(3):
            scene.now += POLL
            assert await asked.answers() == {}
    told = [line for line in lines if line["log_level"] == "warning"]
    assert [line["problem"] for line in told] == [problem]


async def test_two_machines_with_one_key_are_logged_once(scene: Scene) -> None:
    with capture_logs() as lines:
        for number in range(6):
            scene.spire.agents = [agent(expires_at=NOW + TTL, serial=str(number))]
            await scene.poll()
    told = [line for line in lines if line["log_level"] == "error"]
    assert [line["agents"] for line in told] == [["/spire/agent/x509pop/node-a"]]


async def test_wrong_agent_ttl_is_logged_once(scene: Scene) -> None:
    scene.spire.agents = [agent(expires_at=NOW + 2 * TTL)]
    with capture_logs() as lines:
        assert [await scene.poll() for _ in range(3)] == [{}, {}, {}]
    told = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert told == [
        "SVIDs of agents live longer than --spire-agent-ttl: they prove nothing until the setting is corrected"
    ]


async def test_agent_that_moves_between_pages_is_read_once(scene: Scene) -> None:
    """Evicted and attested again, it is at the end of the list, and it was on the first page too."""
    scene.spire.agents = fleet(4)
    again = agent("node-0", "bb22", expires_at=NOW + TTL, serial="2")

    def move(number: int) -> None:
        if number == 2:
            scene.spire.agents = [*scene.spire.agents, again]
        if number == 4:
            scene.spire.agents = [*scene.spire.agents[1:]]

    scene.spire.before_page = move
    found = await scene.poll()
    assert found["node-0"].hash == "bb22"
    assert not any(word.is_conflict for word in found.values())


async def test_list_that_keeps_changing_is_an_error(scene: Scene) -> None:
    await scene.poll()
    scene.spire.agents = [
        agent(expires_at=NOW + TTL),
        agent("node-a", "bb22", expires_at=NOW + TTL, serial="2"),
    ]
    assert "changes faster than it can be read" in await scene.refused()


async def test_repeating_page_tokens_are_an_error(scene: Scene) -> None:
    scene.spire.agents = fleet(4)

    def rewind(number: int) -> None:
        scene.spire.requests[-1].page_token = "0"

    scene.spire.before_page = rewind
    assert "page tokens of the list of agents repeat" in await scene.refused()


class TestTheHandshake:
    """A peer that is not the server of our trust domain gets no byte of a request."""

    @pytest.mark.parametrize(
        "uris",
        [
            pytest.param([f"spiffe://{TRUST_DOMAIN}/workload"], id="a-workload-of-the-trust-domain"),
            pytest.param([f"spiffe://{TRUST_DOMAIN}/spire/agent/x509pop/a"], id="an-agent"),
            pytest.param([f"spiffe://{TRUST_DOMAIN}"], id="the-trust-domain-itself"),
            pytest.param([f"{SERVER_ID}/x"], id="an-id-that-begins-alike"),
            pytest.param(["spiffe://EXAMPLE.org/spire/server"], id="in-other-case"),
            pytest.param(["spiffe://other.org/spire/server"], id="server-of-another-trust-domain"),
            pytest.param([SERVER_ID, f"spiffe://{TRUST_DOMAIN}/workload"], id="two-ids"),
            pytest.param([f"spiffe://{TRUST_DOMAIN}/workload", SERVER_ID], id="two-ids-the-other-way-round"),
            pytest.param([], id="no-id"),
        ],
    )
    async def test_other_spiffe_id_with_a_valid_chain_is_refused(self, idle: Scene, uris: list[str]) -> None:
        await idle.start(CA.issue(*uris))
        assert f", not {SERVER_ID}" in await idle.refused()
        assert idle.spire.requests == []

    async def test_certificate_with_unreadable_names_is_refused(self, idle: Scene) -> None:
        """An X.400 address: no reason to crash."""
        strange = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"\x30\x02\xa3\x00")
        await idle.start(CA.issue(names_in_der=strange))
        assert f"the peer is unknown, not {SERVER_ID}" in await idle.refused()
        assert idle.spire.requests == []

    async def test_right_spiffe_id_from_another_ca_is_refused(self, idle: Scene) -> None:
        await idle.start(Authority().issue(SERVER_ID))
        assert "CERTIFICATE_VERIFY_FAILED" in await idle.refused()

    async def test_expired_server_certificate_is_refused(self, idle: Scene) -> None:
        await idle.start(CA.issue(SERVER_ID, not_after=utc_now() - HOUR))
        assert "certificate has expired" in await idle.refused()

    async def test_svid_that_the_server_does_not_trust_is_reported(self, scene: Scene) -> None:
        stranger = Authority().issue(VERIFIER)
        scene.api.identities = [stranger]
        assert (await scene.refused()).startswith("SPIRE: ")
        assert scene.spire.requests == []

    async def test_workload_api_of_another_trust_domain_is_refused(self, scene: Scene) -> None:
        other = Authority("other.org")
        scene.api.identities, scene.api.roots = [other.issue("spiffe://other.org/gpuwarden")], [other.root]
        assert "is not of the trust domain example.org" in await scene.refused()

    async def test_svid_and_roots_rotate_without_a_restart(self, scene: Scene) -> None:
        before = await scene.poll()
        new = Authority()
        await scene.spire.stop()
        await scene.spire.start(new.issue(SERVER_ID), new)
        await scene.refused()
        scene.api.rotate(new.issue(VERIFIER), roots=[CA.root, new.root])

        async def is_back() -> bool:
            try:
                return await scene.poll() is before
            except EvidenceUnavailableError:
                return False

        await until(is_back)

    async def test_removed_root_is_no_longer_trusted(self, scene: Scene) -> None:
        """A connection that was opened with it is not used any more."""
        await scene.poll()
        scene.api.rotate(OURS, roots=[Authority().root])

        async def is_refused() -> bool:
            try:
                await scene.poll()
            except EvidenceUnavailableError as exc:
                return "CERTIFICATE_VERIFY_FAILED" in str(exc)
            return False

        await until(is_refused)

    async def test_last_svid_stays_in_use_while_the_workload_api_is_unavailable(self, scene: Scene) -> None:
        await scene.poll()
        await scene.api.stop()
        scene.spire.agents = [agent(expires_at=NOW + TTL, banned=True)]
        assert await scene.states() == {"node-a": "banned"}


def test_peer_verification_works_on_uvloop(tmp_path: Path) -> None:
    """uvloop implements TLS in its own way."""

    async def refused() -> str:
        scene = await Scene(tmp_path).start(CA.issue(f"spiffe://{TRUST_DOMAIN}/workload"))
        try:
            return await scene.refused()
        finally:
            await scene.close()

    async def read() -> Mapping[str, Evidence]:
        scene = Scene(tmp_path)
        scene.spire.agents = fleet(3)
        try:
            return await (await scene.start()).poll()
        finally:
            await scene.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert f", not {SERVER_ID}" in runner.run(refused())
        assert len(runner.run(read())) == 3


async def test_server_socket_needs_no_identity(tmp_path: Path) -> None:
    spire = SpireDouble([agent(expires_at=NOW + TTL)])
    path = str(tmp_path / "api.sock")
    await spire.start(None, None, path=path)
    found = await SpireServer(SocketServer(path), RULES, lambda: NOW, POLL).poll()
    await spire.stop()
    assert found["node-a"].hash == "aa11"


async def test_agent_rules_come_from_the_settings(scene: Scene) -> None:
    server = TcpServer("127.0.0.1", scene.spire.port, TRUST_DOMAIN, scene.identity)
    picky = evolve(RULES, attestors=frozenset({"tpm"}))
    assert await SpireServer(server, picky, lambda: NOW, POLL).poll() == {}
