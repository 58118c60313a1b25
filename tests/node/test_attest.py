"""`gpuwarden attest` proves only its own node, gives its token only to the right server, and returns in time."""

import asyncio
import json
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trustme
from structlog.testing import capture_logs

from tests import builders
from tests.builders import HASH, raw_container, raw_pod
from tests.evidence.doubles import until
from tests.evidence.jwt.jwt_doubles import EndpointDouble, JwtWorkloadApiDouble, endpoint, http
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, evidence_id
from tests.node_double import OWN, NodeDouble
from tests.running import GPUWARDEN, Running, refusing, serving
from tests.web.harness import INVENTORY
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.jwt.node_reports import uid_digest
from webhook.evidence.jwt.nonce import PREFIX
from webhook.node.attest import BACKOFF, Attester, NotAttestedError, PodReporter
from webhook.node.given_gpus import AGAIN_AFTER, LASTING
from webhook.node.node_identity import NodeIdentity, NotOneIdentityError
from webhook.node.node_pods import NodePods
from webhook.node.pod_ends import MAX_SYNC_DURATION

KEY = SigningKey.make()
NONCE = PREFIX + "A" * 76
PROVEN = {"node": "node-a", "hash": HASH, "since": "2026-03-02T12:00:00Z", "until": "2026-03-02T12:40:00Z"}


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[JwtWorkloadApiDouble]:
    double = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), KEY)
    await double.start()
    yield double
    await double.stop()


# Whole processes.


def flags(agent: JwtWorkloadApiDouble) -> list[str]:
    return ["--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{agent.path}"]


async def attested(running: Running, agent: JwtWorkloadApiDouble, *more: str) -> tuple[int, str]:
    """`gpuwarden attest --once`: exit code and log."""
    server = ["--server", running.urls["https"], "--server-ca", str(running.directory / "certs/dev/ca.crt")]
    command = [GPUWARDEN, "attest", "--once", *server, *flags(agent), "--node", "node-a", *more]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    out, log = await asyncio.wait_for(process.communicate(), 60)
    assert out == b""
    return process.returncode or 0, log.decode()


async def admits(running: Running, hash: str) -> bool:
    raw = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": hash})
    async with running.client() as client:
        reply = await client.post("/mutate", json=builders.mutating_create(raw, uid=builders.REVIEW_UID, dry_run=True))
    return bool(reply.json()["response"]["allowed"])


async def becomes(running: Running, hash: str, *, admitted: bool) -> None:
    async def holds() -> bool:
        return await admits(running, hash) is admitted

    await until(holds)


@asynccontextmanager
async def served(agent: JwtWorkloadApiDouble, directory: Path, age: str) -> AsyncIterator[Running]:
    options = ["--evidence", "jwt-svid", "--max-evidence-age", age, "--reload-interval", "100ms", "--log-level", "warn"]
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, serving(directory, INVENTORY, [*options, *flags(agent)]))


async def test_node_attests_and_its_gpus_are_admitted(agent: JwtWorkloadApiDouble, tmp_path: Path) -> None:
    async with served(agent, tmp_path, "8s") as running:
        assert not await admits(running, HASH)
        code, log = await attested(running, agent)
        assert (code, "node attested" in log) == (0, True), log
        await becomes(running, HASH, admitted=True)
        await becomes(running, HASH, admitted=False)
        agent.identities = [evidence_id(node="node-b")]
        code, log = await attested(running, agent)
        assert (code, "expected exactly one identity for node node-a" in log) == (1, True), log


async def test_agent_attests_again_at_half_life_and_stops_on_a_signal(
    agent: JwtWorkloadApiDouble, tmp_path: Path
) -> None:
    async with served(agent, tmp_path, "10s") as running:
        server = ["--server", running.urls["https"], "--server-ca", str(running.directory / "certs/dev/ca.crt")]
        command = [GPUWARDEN, "attest", *server, *flags(agent), "--node", "node-a"]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        await becomes(running, HASH, admitted=True)
        async with asyncio.timeout(60):
            while len(agent.audiences) < 3:
                assert await admits(running, HASH)
                await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0, log.decode()
        assert len(set(agent.audiences)) == len(agent.audiences)


def test_all_missing_settings_are_reported_together(tmp_path: Path) -> None:
    done = refusing(tmp_path, "attest", "--once")
    assert done.returncode == 1
    assert "set --server, --node, --spire-trust-domain, --spire-workload-api as well" in done.stderr


# Misbehaving servers.


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def context(ca: trustme.CA) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(made)
    return made


def attester(agent: JwtWorkloadApiDouble, server: EndpointDouble, ca: trustme.CA, node: str = "node-a") -> Attester:
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    api = JwtWorkloadApi(f"unix:{agent.path}", timedelta(seconds=0.5))
    identity = NodeIdentity(node, api, EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN))
    return Attester(server.url, identity, lambda: trust)


def asking(nonce: object = NONCE) -> bytes:
    return json.dumps({"nonce": nonce}).encode()


@pytest.mark.parametrize("nonce", ["vault", "", PREFIX, PREFIX + "A" * 75, "https://sts.example/", NONCE + "A"])
async def test_server_gets_no_token_with_another_audience(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, nonce: str
) -> None:
    async with endpoint(context(ca), asking(nonce)) as server:
        with pytest.raises(NotAttestedError, match="another audience"):
            await attester(agent, server, ca).attest()
    assert (agent.audiences, len(server.requests)) == ([], 1)


async def test_server_of_another_ca_gets_no_request(agent: JwtWorkloadApiDouble, ca: trustme.CA) -> None:
    async with endpoint(context(trustme.CA()), asking()) as server:
        with pytest.raises(NotAttestedError, match="certificate verify failed"):
            await attester(agent, server, ca).attest()
    assert (agent.audiences, server.requests) == ([], [])


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", asking(1), b"A" * 100_000, b"[" * 50_000])
async def test_malformed_answer_is_no_proof(agent: JwtWorkloadApiDouble, ca: trustme.CA, content: bytes) -> None:
    async with endpoint(context(ca), content) as server:
        with pytest.raises(NotAttestedError):
            await attester(agent, server, ca).attest()


async def test_servers_error_text_is_reported(agent: JwtWorkloadApiDouble, ca: trustme.CA) -> None:
    async with endpoint(context(ca), b'{"error": "the server is draining"}', "503 Service Unavailable") as server:
        with pytest.raises(NotAttestedError, match=r"503.*draining"):
            await attester(agent, server, ca).attest()


@pytest.mark.parametrize(
    "identities",
    [
        [evidence_id("node-b")],
        [evidence_id(), evidence_id(hash="sha256:bb22")],
        [evidence_id(trust_domain="other.org")],
        [f"spiffe://{TRUST_DOMAIN}/web"],
    ],
    ids=["of another node", "two hashes", "other trust domain", "a workload"],
)
async def test_agent_uses_only_the_identity_of_its_node(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, identities: list[str]
) -> None:
    agent.identities = identities
    async with endpoint(context(ca), asking()) as server:
        with pytest.raises(NotOneIdentityError, match="exactly one identity for node node-a"):
            await attester(agent, server, ca).attest()
    assert len(server.requests) == 1


@pytest.mark.parametrize("trouble", ["banned", "gone", "no identity"])
async def test_spire_agent_without_a_token_is_an_error(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, trouble: str
) -> None:
    agent.is_banned, agent.identities = trouble == "banned", [] if trouble == "no identity" else agent.identities
    if trouble == "gone":
        await agent.stop()
    async with endpoint(context(ca), asking()) as server:
        with pytest.raises(EvidenceUnavailableError):
            await attester(agent, server, ca).attest()


async def slept(one: Attester, number: int, server: EndpointDouble, replies: dict[int, bytes]) -> list[float]:
    """The pauses of a number of rounds; `replies` maps a round to the server's answer from that round on."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        server.reply = replies.get(len(pauses), server.reply)
        if len(pauses) == number:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await one.run(sleep)
    return pauses


async def test_failures_are_retried_with_increasing_pauses(agent: JwtWorkloadApiDouble, ca: trustme.CA) -> None:
    async with endpoint(context(ca), b"{}") as server:
        pauses = await slept(attester(agent, server, ca), 9, server, {})
    for pause, most in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert 0.8 * most <= pause <= most


async def test_accepted_proof_is_renewed_at_half_its_life(agent: JwtWorkloadApiDouble, ca: trustme.CA) -> None:
    both = json.dumps({"nonce": NONCE, **PROVEN}).encode()
    async with endpoint(context(ca), b"{}") as server:
        pauses = await slept(attester(agent, server, ca), 4, server, {2: http(both), 3: http(b"{}")})
    assert 0.8 * 1200 <= pauses[2] <= 1200
    assert pauses[3] <= BACKOFF.first.total_seconds()


def test_renewals_of_many_nodes_are_spread() -> None:
    assert len({BACKOFF.jittered(timedelta(minutes=20)) for _ in range(100)}) == 100


# Ends of orphaned pods.


class RecordingServer:
    """A server that issues challenges and records the answers."""

    def __init__(self, *uids: str) -> None:
        self.orphans = [uid_digest(uid) for uid in uids]
        self.posted: list[dict[str, object]] = []
        self.asked = 0
        self.on_challenge: Callable[[], object] = lambda: None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")), 0)
            content = await reader.readexactly(length)
            if head.startswith(b"POST"):
                self.posted.append(json.loads(content))
            else:
                self.asked += 1
                self.on_challenge()
            said = PROVEN if head.startswith(b"POST") else {"nonce": NONCE, "orphans": self.orphans}
            writer.write(http(json.dumps(said).encode()))
            await writer.drain()
        finally:
            writer.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeDouble]:
    double = NodeDouble(tmp_path)
    await double.start()
    yield double
    await double.stop()


@asynccontextmanager
async def reporting(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble, server: RecordingServer
) -> AsyncIterator[Callable[..., Awaitable[list[object]]]]:
    """Another round, that many seconds after the last one; returns what was reported to the server."""
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=context(ca))
    double = EndpointDouble(b"", port=listener.sockets[0].getsockname()[1])
    now = 0.0
    pods = NodePods(node.runtime, node.kubelet, OWN)
    reporter = PodReporter(attester(agent, double, ca), pods, lambda: now)

    async def another_round(after: float = 5) -> list[object]:
        nonlocal now
        now += after
        server.posted.clear()
        await reporter.step()
        return [one.get("ended") for one in server.posted]

    try:
        yield another_round
    finally:
        listener.close()
        await listener.wait_closed()


async def test_end_of_an_orphan_is_reported_with_a_proof(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    server = RecordingServer("uid-old", "uid-other")
    node.run("uid-old")
    node.run("uid-finished")
    async with reporting(agent, ca, node, server) as another_round:
        assert await another_round() == []
        for uid in ("uid-old", "uid-finished"):
            node.delete(uid)
        for _ in range(2):
            assert await another_round() == []
        assert agent.audiences == [], "nothing has ended, so the server is asked nothing"
        for uid in ("uid-old", "uid-finished"):
            node.clear(uid)
        assert await another_round() == []
        assert await another_round() == [["uid-old"]]
        assert agent.audiences == [NONCE]
        server.orphans = []
        assert await another_round() == []


async def test_gpus_that_are_not_reserved_are_reported_with_a_proof_until_they_are_gone(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    server = RecordingServer()
    node.run("uid-train")
    node.reserved["uid-train"], node.given["uid-train"] = "GPU-a", ["GPU-b"]
    async with reporting(agent, ca, node, server) as another_round:

        async def given(after: float) -> list[object]:
            await another_round(after)
            return [one.get("given") for one in server.posted]

        assert await given(5) == []
        assert await given(LASTING.total_seconds()) == [{"uid-train": ["GPU-b"]}]
        assert agent.audiences == [NONCE]
        assert await given(5) == []
        assert await given(AGAIN_AFTER.total_seconds()) == [{"uid-train": ["GPU-b"]}]
        node.end("uid-train")
        assert await given(AGAIN_AFTER.total_seconds()) == []


async def test_pod_alive_at_the_last_check_is_not_reported(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    server = RecordingServer("uid-old")
    node.run("uid-old")
    node.delete("uid-old")
    async with reporting(agent, ca, node, server) as another_round:
        for _ in range(2):
            await another_round()
        node.end("uid-old")
        await another_round()
        server.on_challenge = lambda: node.run("uid-old")
        assert await another_round() == []
        assert server.asked == 1
        assert agent.audiences == []


async def test_server_is_asked_less_often_than_the_node(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    server = RecordingServer()
    node.run("uid-old")
    node.delete("uid-old")
    async with reporting(agent, ca, node, server) as another_round:
        for _ in range(2):
            await another_round()
        node.clear("uid-old")
        await another_round()
        for _ in range(10):
            await another_round(2)
    assert server.asked == 3


async def test_unreadable_node_does_not_stop_the_reporter(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    node.failing_calls.add("ListContainers")
    async with endpoint(context(ca), asking()) as server:
        reporter = PodReporter(attester(agent, server, ca), NodePods(node.runtime, node.kubelet, OWN))
        rounds = 0

        async def sleep(_: float) -> None:
            nonlocal rounds
            rounds += 1
            if rounds == 2:
                node.failing_calls.clear()
            if rounds == 3:
                raise asyncio.CancelledError

        with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
            await reporter.run(sleep)
    assert [one["event"] for one in logs] == ["pods not reported", "pods reported again"]


async def test_unavailable_server_is_not_logged_as_back_between_requests(
    agent: JwtWorkloadApiDouble, ca: trustme.CA, node: NodeDouble
) -> None:
    node.end("uid-old")
    now = 0.0
    async with endpoint(context(ca), b"{}") as server:
        pods = NodePods(node.runtime, node.kubelet, OWN)
        reporter = PodReporter(attester(agent, server, ca), pods, lambda: now)

        async def sleep(_: float) -> None:
            nonlocal now
            now += 2 if now else MAX_SYNC_DURATION.total_seconds()
            if now > MAX_SYNC_DURATION.total_seconds() + 20:
                raise asyncio.CancelledError

        with capture_logs() as logs, pytest.raises(asyncio.CancelledError):
            await reporter.run(sleep)
    assert [one["event"] for one in logs] == ["pods not reported"]


def test_runtime_socket_needs_the_pod_uid(tmp_path: Path) -> None:
    own = ["--server", "https://a", "--node", "node-a", "--spire-trust-domain", TRUST_DOMAIN]
    sockets = ["--spire-workload-api", "unix:/a", "--runtime-socket", "unix:/b"]
    done = refusing(tmp_path, "attest", *own, *sockets)
    assert (done.returncode, "set --pod-uid as well" in done.stderr) == (1, True), done.stderr


def kubeconfig(directory: Path) -> str:
    """Of a cluster that does not answer."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "nobody"}}
    content = {"clusters": [cluster], "contexts": [context], "current-context": "none"}
    path = directory / "kubeconfig"
    path.write_text(json.dumps({**content, "users": [{"name": "nobody", "user": {"token": "x"}}]}))
    return str(path)


async def test_plugin_of_the_kubelet_needs_no_server(agent: JwtWorkloadApiDouble, tmp_path: Path) -> None:
    """It waits for the kubelet, whether or not the API server answers, and stops on a signal."""
    with TemporaryDirectory(prefix="kubelet-") as kubelet:
        for one in ("plugins", "plugins_registry"):
            (Path(kubelet) / one).mkdir()
        own = ["--node", "node-a", "--kubelet-plugins", kubelet, "--kubeconfig", kubeconfig(tmp_path)]
        command = [GPUWARDEN, "attest", *own, *flags(agent)]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        registration = Path(kubelet) / "plugins_registry/attested.gpuwarden.io-reg.sock"
        await until(registration.is_socket)
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0, log.decode()
        assert b"waiting for the kubelet" in log
        assert not registration.exists()
    assert agent.audiences == []


def test_server_is_needed_without_the_plugin_for_once_and_for_ends_of_pods(tmp_path: Path) -> None:
    own = ["--node", "node-a", "--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", "unix:/a"]
    plugin = ["--kubelet-plugins", str(tmp_path), "--kubeconfig", kubeconfig(tmp_path)]
    for more in ([], [*plugin, "--once"], [*plugin, "--runtime-socket", "unix:/b", "--pod-uid", "u"]):
        done = refusing(tmp_path, "attest", *own, *more)
        assert (done.returncode, "set --server as well" in done.stderr) == (1, True), done.stderr


def test_plugin_of_the_kubelet_needs_a_cluster(tmp_path: Path) -> None:
    own = ["--server", "https://a", "--node", "node-a", "--spire-trust-domain", TRUST_DOMAIN]
    done = refusing(tmp_path, "attest", *own, "--spire-workload-api", "unix:/a", "--kubelet-plugins", str(tmp_path))
    assert (done.returncode, "claims are read from a cluster" in done.stderr) == (1, True), done.stderr
