"""The plugin for proof devices prepares a claim only while this node is proven for the hash of the claim."""

import asyncio
import errno
import json
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import define, field
from grpclib.client import Channel, UnaryStreamMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from structlog.testing import capture_logs

from tests.builders import HASH, OTHER_HASH, Raw
from tests.evidence.certificates import HOUR, Authority
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, evidence_id, seconds, token
from tests.kubelet_double import MESSAGES, V1, V1BETA1, KubeletDouble, claim
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.core.proof_claims import claim_spec
from webhook.core.proof_devices import DRIVER, ProofDevice, device_name, hash_attribute
from webhook.evidence.jwt.jwt_svid import MAX_LIFE
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.jwt.nonce import is_ours
from webhook.evidence.record import EvidenceRecord, RecordedClaim, verified
from webhook.kube.requests import ApiUnavailableError
from webhook.kube.resource_slices import slices_of
from webhook.node import dra_plugin
from webhook.node.claim_check import AUDIENCE, MAX_REASON, ClaimCheck
from webhook.node.dra_messages import MAX_CLAIMS, SUPPORTED_VERSIONS
from webhook.node.dra_plugin import DEADLINE, MAX_CALLS, MAX_REQUEST, NotListeningError, ProofPlugin, hidden
from webhook.node.evidence_records import PATH, VARIABLE, EvidenceRecords
from webhook.node.node_identity import NodeIdentity
from webhook.runtime.clock import utc_now
from webhook.runtime.tls.certificates import certificate_in

KEY = SigningKey.make()
ATTRIBUTE, OTHER_ATTRIBUTE = hash_attribute(HASH), hash_attribute(OTHER_HASH)
GPU, OTHER_GPU = "GPU-0000", "GPU-1111"
SKEW = timedelta(seconds=5)
# Tests of sockets need not wait for problems to pass: test_claim_check.py does.
PATIENCE = timedelta(seconds=1)
PREPARE = f"{V1}.DRAPlugin/NodePrepareResources"


@define(eq=False)
class ClaimsDouble:
    """The claims of the API server, by namespace and name."""

    claims: dict[tuple[str, str], Raw] = field(factory=dict)
    reads: int = 0
    is_away: bool = False

    async def get(self, namespace: str, name: str) -> Raw | None:
        self.reads += 1
        if self.is_away:
            raise ApiUnavailableError("the API server did not answer: TimeoutError")
        return self.claims.get((namespace, name))

    def add(self, name: str, *uuids: str, hash: str = ATTRIBUTE, pool: str = "node-a") -> Raw:
        """A claim as gpuwarden makes it, after its allocation."""
        spec = claim_spec(len(uuids), hash, gpu_driver="gpu.nvidia.com", gpu_class="gpu.nvidia.com", evicts=True)
        results = []
        for k, uuid in enumerate(uuids):
            proof = {"request": f"proof{k}", "driver": DRIVER, "pool": pool, "device": device_name(uuid, hash)}
            gpu = {"request": f"gpu{k}", "driver": "gpu.nvidia.com", "pool": pool, "device": f"gpu-{k}"}
            results += [proof, gpu]
        # kube-scheduler repeats them for each pair.
        config = [{"source": "FromClaim", **one} for one in spec["devices"]["config"]] * len(uuids)
        raw: Raw = {
            "metadata": {"namespace": "ml", "name": name, "uid": f"uid-{name}"},
            "spec": spec,
            "status": {"allocation": {"devices": {"results": results, "config": config}}},
        }
        self.claims["ml", name] = raw
        return raw


@define(eq=False)
class SlicesDouble:
    """The slices of the node."""

    devices: list[ProofDevice] = field(factory=list)

    async def read(self) -> list[Raw]:
        return slices_of("node-a", self.devices, 1, "gpu.nvidia.com")


@define(eq=False)
class Harness:
    """A node with a SPIRE agent, the API server's claims, a kubelet and the plugin."""

    agent: JwtWorkloadApiDouble
    claims: ClaimsDouble
    kubelet: KubeletDouble
    now: datetime = field(factory=utc_now)
    patience: timedelta = PATIENCE
    # With these, containers get records.
    slices: SlicesDouble | None = None

    @property
    def plugin(self) -> ProofPlugin:
        api = JwtWorkloadApi(f"unix:{self.agent.path}", timedelta(seconds=0.5))
        identity = NodeIdentity("node-a", api, EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN))
        records = None
        if self.slices is not None:
            records = EvidenceRecords(self.records, self.specs, self.slices, api.x509_svid, lambda: self.now)
        check = ClaimCheck(identity, self.claims, lambda: self.now, SKEW, records, self.patience)
        return ProofPlugin(self.kubelet.directory, check)

    @property
    def records(self) -> Path:
        return self.kubelet.directory / "records"

    @property
    def specs(self) -> Path:
        return self.kubelet.directory / "cdi"

    def files(self) -> set[str]:
        return {one.name for directory in (self.records, self.specs) for one in directory.glob("*")}

    def sign(self, *, issued: float = 0, life: float = 60, audience: str | None = None, subject: str = "") -> None:
        """From now on the agent's tokens were issued that many seconds from now."""
        then = self.now + timedelta(seconds=issued)

        def forged(spiffe_id: str, asked: str) -> str:
            ends = seconds(then + timedelta(seconds=life))
            return token(KEY, audience or asked, then, sub=subject or spiffe_id, exp=ends)

        self.agent.forge = forged

    async def error(self, name: str = "train") -> str:
        """Why the claim is not prepared; empty if it is."""
        answer = (await self.kubelet.prepare(claim(name)))[f"uid-{name}"]
        assert bool(answer.error) != bool(answer.devices)
        return str(answer.error)


@pytest.fixture
async def idle() -> AsyncIterator[Harness]:
    """A plugin that does not listen yet."""
    # A path of a socket has at most 107 bytes.
    with TemporaryDirectory(prefix="kubelet-") as name:
        directory = Path(name)
        for one in ("plugins", "plugins_registry"):
            (directory / one).mkdir()
        agent = JwtWorkloadApiDouble(str(directory / "agent.sock"), KEY)
        await agent.start()
        harness = Harness(agent, ClaimsDouble(), KubeletDouble(directory))
        harness.claims.add("train", GPU)
        yield harness
        await agent.stop()


@pytest.fixture
async def node(idle: Harness) -> AsyncIterator[Harness]:
    async with idle.plugin.listening():
        yield idle


Device = tuple[list[str], str, str, list[str]]


def device(answer: Any) -> Device:
    return [*answer.request_names], answer.pool_name, answer.device_name, [*answer.cdi_device_ids]


# Prepared claims.


@pytest.mark.parametrize("version", [V1, V1BETA1])
async def test_claims_of_a_proven_node_are_prepared(idle: Harness, version: str) -> None:
    idle.claims.add("two", GPU, OTHER_GPU)
    idle.kubelet = KubeletDouble(idle.kubelet.directory, version=version)
    async with idle.plugin.listening():
        answers = await idle.kubelet.prepare(claim("train"), claim("two"))
    assert {uid: one.error for uid, one in answers.items()} == {"uid-train": "", "uid-two": ""}
    pairs = [("proof0", device_name(GPU, ATTRIBUTE)), ("proof1", device_name(OTHER_GPU, ATTRIBUTE))]
    devices: list[Device] = [([request], "node-a", name, []) for request, name in pairs]
    assert [device(one) for one in answers["uid-train"].devices] == devices[:1]
    assert [device(one) for one in answers["uid-two"].devices] == devices
    assert set(idle.agent.audiences) == {AUDIENCE}


async def test_every_call_is_checked(node: Harness) -> None:
    """The kubelet repeats a call when another driver was not ready, and evidence may have ended in between."""
    assert await node.error() == ""
    node.agent.identities = [evidence_id(hash=OTHER_HASH)]
    assert f"proven for the hash {OTHER_ATTRIBUTE}" in await node.error()
    node.agent.identities = [evidence_id()]
    assert await node.error() == ""


async def test_claims_are_unprepared_without_a_check(node: Harness) -> None:
    node.claims.is_away = node.agent.is_banned = True
    answers = await node.kubelet.unprepare(claim("train"), claim("gone"))
    assert {uid: one.error for uid, one in answers.items()} == {"uid-train": "", "uid-gone": ""}
    assert (node.claims.reads, node.agent.audiences) == (0, [])


async def test_long_hash_is_compared_by_its_digest(node: Harness) -> None:
    long = "sha512:" + "ab" * 64
    node.agent.identities = [evidence_id(hash=long)]
    node.claims.add("train", GPU, hash=hash_attribute(long))
    assert await node.error() == ""


# Claims that are refused.


async def test_claim_for_another_hash_is_refused(node: Harness) -> None:
    node.claims.add("train", GPU, hash=OTHER_ATTRIBUTE)
    assert (
        await node.error() == f"node node-a is proven for the hash {ATTRIBUTE}, and the pod requires {OTHER_ATTRIBUTE}"
    )


async def test_device_for_another_hash_than_the_claim_names_is_refused(node: Harness) -> None:
    raw = node.claims.add("train", GPU)
    raw["status"]["allocation"]["devices"]["results"][0]["device"] = device_name(GPU, OTHER_ATTRIBUTE)
    assert "is not for the hash" in await node.error()


async def test_one_bad_device_of_several_refuses_the_claim(node: Harness) -> None:
    raw = node.claims.add("train", GPU, OTHER_GPU)
    raw["status"]["allocation"]["devices"]["results"][2]["pool"] = "node-b"
    assert "is of node node-b, and this is node node-a" in await node.error()


async def test_a_refused_claim_does_not_refuse_others(node: Harness) -> None:
    node.claims.add("other", GPU, hash=OTHER_ATTRIBUTE)
    answers = await node.kubelet.prepare(claim("other"), claim("train"), claim("absent"))
    assert {uid: bool(one.error) for uid, one in answers.items()} == {
        "uid-other": True,
        "uid-train": False,
        "uid-absent": True,
    }


CONFIG = {"opaque": {"driver": DRIVER, "parameters": {"hash": ATTRIBUTE}}, "source": "FromClaim"}


@pytest.mark.parametrize(
    ("config", "is_prepared"),
    [
        ([CONFIG], True),
        ([{**CONFIG, "requests": ["proof0"]}], True),
        ([{**CONFIG, "requests": ["proof0"]}, {**CONFIG, "requests": ["proof1"]}], True),
        ([{"opaque": {"driver": "gpu.nvidia.com", "parameters": {"hash": 1}}, "source": "FromClaim"}, CONFIG], True),
        ([], False),
        (None, False),
        ([{**CONFIG, "requests": ["proof1"]}], False),
        ([{**CONFIG, "source": "FromClass"}], False),
        ([CONFIG, CONFIG], True),
        ([CONFIG, {**CONFIG, "opaque": {"driver": DRIVER, "parameters": {"hash": OTHER_ATTRIBUTE}}}], False),
        ([{**CONFIG, "source": "FromClass"}, CONFIG], False),
        ([{**CONFIG, "opaque": {"driver": DRIVER, "parameters": {"hash": 7}}}], False),
        ([{**CONFIG, "opaque": {"driver": DRIVER, "parameters": {}}}], False),
        ([{**CONFIG, "opaque": {"driver": DRIVER, "parameters": ATTRIBUTE}}], False),
        ([{**CONFIG, "opaque": {"driver": DRIVER}}], False),
    ],
)
async def test_claim_itself_names_one_hash(node: Harness, config: Any, is_prepared: bool) -> None:
    node.claims.add("train", GPU)["status"]["allocation"]["devices"]["config"] = config
    assert await node.error() == (
        "" if is_prepared else "the ResourceClaim does not say which hash the request proof0 is for"
    )


async def test_subrequest_has_the_parameters_of_its_request(node: Harness) -> None:
    raw = node.claims.add("train", GPU)
    raw["status"]["allocation"]["devices"]["results"][0]["request"] = "proof0/first"
    assert await node.error() == ""


async def test_claim_with_another_uid_is_refused(node: Harness) -> None:
    node.claims.add("train", GPU)["metadata"]["uid"] = "uid-new"
    assert await node.error() == "the ResourceClaim ml/train is another one of the same name"


@pytest.mark.parametrize(
    "status",
    [{}, {"allocation": None}, {"allocation": {}}, {"allocation": {"devices": {"results": None}}}],
)
async def test_claim_without_a_proof_device_is_refused(node: Harness, status: Raw) -> None:
    node.claims.add("train", GPU)["status"] = status
    assert await node.error() == "the ResourceClaim ml/train has no allocated proof device"


async def test_claim_that_cannot_be_parsed_is_refused(node: Harness) -> None:
    node.claims.add("train", GPU)["status"] = {"allocation": []}
    assert "cannot be parsed" in await node.error()


async def test_unavailable_api_server_refuses_the_claim(node: Harness) -> None:
    node.claims.is_away = True
    assert await node.error() == "the API server did not answer: TimeoutError"


async def test_reason_is_short_enough_for_an_event(node: Harness) -> None:
    node.agent.identities = [f"{evidence_id(hash='sha256:')}{'a' * 1000}{number}" for number in range(3)]
    assert len(await node.error()) == MAX_REASON


# Evidence that is not good now.


@pytest.mark.parametrize(
    ("identities", "found"),
    [
        ([evidence_id("node-b")], "found: spiffe://example.org/evidence/node-b/"),
        ([evidence_id(), evidence_id(hash=OTHER_HASH)], "found: spiffe://example.org/evidence/node-a/"),
        ([evidence_id(trust_domain="other.org")], "found: spiffe://other.org/"),
        ([], "no identity issued"),
    ],
    ids=["another node", "two hashes", "another trust domain", "none"],
)
async def test_node_needs_exactly_one_identity(node: Harness, identities: list[str], found: str) -> None:
    node.agent.identities = identities
    error = await node.error()
    assert error.startswith("node node-a has no evidence at this moment: ")
    assert found in error


async def test_banned_agent_gives_no_evidence(node: Harness) -> None:
    node.agent.is_banned = True
    assert "no answer in time" in await node.error()
    node.agent.is_banned = False
    assert await node.error() == ""


@pytest.mark.parametrize(
    ("issued", "life", "problem"),
    [
        (-59, 60, ""),
        (-61, 60, "has expired 1 s ago"),
        (4, 60, ""),
        (7, 60, "issued in the future"),
        (0, MAX_LIFE.total_seconds(), ""),
        (0, MAX_LIFE.total_seconds() + 1, "set jwtSVIDTTL to 60 s"),
    ],
)
async def test_token_is_judged_by_the_clock_of_the_node(
    node: Harness, issued: float, life: float, problem: str
) -> None:
    node.now = node.now.replace(microsecond=0)
    node.sign(issued=issued, life=life)
    error = await node.error()
    assert problem in error
    assert bool(error) is bool(problem)


async def test_token_for_another_audience_or_identity_is_refused(node: Harness) -> None:
    node.sign(audience="vault")
    assert "another identity or audience" in await node.error()
    node.sign(subject=evidence_id("node-b"))
    assert "another identity or audience" in await node.error()
    node.agent.forge = lambda *_: "no token"
    assert "does not have three parts" in await node.error()


def test_server_can_ask_for_no_token_with_this_audience() -> None:
    assert not is_ours(AUDIENCE)


async def test_no_token_is_logged(node: Harness) -> None:
    given: list[str] = []
    signed = node.now

    def forged(spiffe_id: str, audience: str) -> str:
        given.append(token(KEY, audience, signed, sub=spiffe_id))
        return given[-1]

    node.agent.forge = forged
    with capture_logs() as logs:
        await node.error()
        node.now += timedelta(hours=1)
        await node.error()
    assert [one["event"] for one in logs] == ["claim prepared", "claim not prepared"]
    assert len(given) == 2
    assert not any(part in str(logs) for one in given for part in one.split(".")[1:])


# Sockets and calls.


async def test_kubelet_finds_the_plugin_by_its_registration_socket(node: Harness) -> None:
    info = await node.kubelet.info()
    assert (info.type, info.name) == ("DRAPlugin", "attested.gpuwarden.io")
    assert (*info.supported_versions,) == SUPPORTED_VERSIONS == ("v1.DRAPlugin", "v1beta1.DRAPlugin")
    endpoint = node.kubelet.directory / "plugins/attested.gpuwarden.io/dra.sock"
    assert Path(info.endpoint) == endpoint
    for one in (endpoint, node.kubelet.registration):
        assert (stat.S_ISSOCK(one.stat().st_mode), stat.S_IMODE(one.stat().st_mode)) == (True, 0o600)
    with capture_logs() as logs:
        await node.kubelet.notify()
        await node.kubelet.notify("no such version")
    assert [(one["event"], one.get("problem")) for one in logs] == [
        ("registered with the kubelet", None),
        ("not registered with the kubelet", "no such version"),
    ]


def sockets_below(directory: Path) -> set[str]:
    return {one.name for one in directory.rglob("*") if one.is_socket()} - {"agent.sock"}


async def test_sockets_are_removed_at_the_end(idle: Harness) -> None:
    async with idle.plugin.listening():
        assert sockets_below(idle.kubelet.directory) == {"dra.sock", "attested.gpuwarden.io-reg.sock"}
    assert sockets_below(idle.kubelet.directory) == set()


async def test_plugin_replaces_the_sockets_of_an_earlier_process(idle: Harness) -> None:
    """Also if that process still runs: its end does not remove the new sockets."""
    async with AsyncExitStack() as new:
        async with idle.plugin.listening():
            old = idle.kubelet.registration.stat().st_ino
            await new.enter_async_context(idle.plugin.listening())
            assert idle.kubelet.registration.stat().st_ino != old
            assert await idle.error() == ""
        assert await idle.error() == ""
    assert sockets_below(idle.kubelet.directory) == set()


async def test_files_that_are_no_sockets_are_replaced_too(idle: Harness) -> None:
    idle.kubelet.registration.write_text("left by something")
    hidden(idle.kubelet.registration).write_text("left by a process that was killed while it started")
    async with idle.plugin.listening():
        assert await idle.error() == ""


async def test_directory_that_is_missing_is_reported(idle: Harness) -> None:
    os.rmdir(idle.kubelet.directory / "plugins_registry")
    (idle.kubelet.directory / "plugins_registry").write_text("")
    with pytest.raises(NotListeningError, match="plugins_registry"):
        async with idle.plugin.listening():
            pass
    assert sockets_below(idle.kubelet.directory) == set()


async def status_of(node: Harness, **fields: Any) -> Status:
    endpoint = Path((await node.kubelet.info()).endpoint)
    with pytest.raises(GRPCError) as raised:
        await node.kubelet.call(endpoint, PREPARE, "Request", "PrepareResponse", **fields)
    return raised.value.status


async def test_calls_are_bounded(node: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await status_of(node, claims=[claim("train")] * (MAX_CLAIMS + 1)) is Status.INVALID_ARGUMENT
    assert await status_of(node, added_later="x" * MAX_REQUEST) is Status.INVALID_ARGUMENT
    assert node.claims.reads == 0
    monkeypatch.setattr(dra_plugin, "DEADLINE", 0.1)
    node.agent.is_banned = True
    assert await status_of(node, claims=[claim("train")]) is Status.DEADLINE_EXCEEDED
    node.agent.is_banned = False
    monkeypatch.undo()
    assert await node.error() == ""


async def test_malformed_request_is_an_error(node: Harness) -> None:
    endpoint = Path((await node.kubelet.info()).endpoint)
    with pytest.raises(GRPCError, match="where a string or a message is expected") as raised:
        await node.kubelet.call(
            endpoint,
            PREPARE,
            "RegistrationStatus",
            "PrepareResponse",
            plugin_registered=True,
        )
    assert raised.value.status is Status.INVALID_ARGUMENT
    assert (await node.kubelet.prepare()) == {}


async def test_stream_of_health_stays_open_and_delays_no_call(node: Harness) -> None:
    channel = Channel(path=(await node.kubelet.info()).endpoint)
    method: Any = UnaryStreamMethod(
        channel, "/v1alpha1.DRAResourceHealth/NodeWatchResources", MESSAGES["InfoRequest"], MESSAGES["InfoRequest"]
    )
    watches = [asyncio.ensure_future(method(MESSAGES["InfoRequest"]())) for _ in range(2 * MAX_CALLS)]
    assert await node.error() == ""
    assert not any(watch.done() for watch in watches)
    for watch in watches:
        watch.cancel()
    await asyncio.wait(watches)
    channel.close()


async def test_many_calls_are_answered(idle: Harness) -> None:
    idle.patience = timedelta(seconds=DEADLINE)
    for number in range(60):
        idle.claims.add(f"train-{number}", GPU)
    async with idle.plugin.listening():
        answers = await asyncio.gather(*(idle.kubelet.prepare(claim(f"train-{number}")) for number in range(60)))
    assert [one[f"uid-train-{number}"].error for number, one in enumerate(answers)] == [""] * 60


async def test_fields_of_later_versions_are_ignored(node: Harness) -> None:
    endpoint = Path((await node.kubelet.info()).endpoint)
    request = {"claims": [claim("train")], "added_later": "x"}
    answer = await node.kubelet.call(endpoint, PREPARE, "Request", "PrepareResponse", **request)
    assert [one.value.error for one in answer.claims] == [""]
    assert MESSAGES["Request"]().claims == []


# Records of the evidence.

CA = Authority(TRUST_DOMAIN)
ROOTS = [certificate_in(CA.root)]
RECORD_FILES = {"uid-train.jws", "attested.gpuwarden.io-record-uid-train.json"}


@pytest.fixture
async def recording(idle: Harness) -> AsyncIterator[Harness]:
    """A plugin that writes records."""
    end = idle.now + HOUR
    idle.slices = SlicesDouble([ProofDevice.of(uuid, HASH, end) for uuid in (GPU, OTHER_GPU)])
    idle.agent.issued = [CA.issue(f"spiffe://{TRUST_DOMAIN}/another"), CA.issue(evidence_id())]
    async with idle.plugin.listening():
        yield idle


async def test_container_gets_a_record_that_the_node_has_signed(recording: Harness) -> None:
    raw = recording.claims.add("train", GPU, OTHER_GPU)
    raw["status"]["reservedFor"] = [{"resource": "pods", "name": "train", "uid": "uid-pod"}]
    answer = (await recording.kubelet.prepare(claim("train")))["uid-train"]
    assert [device(one)[3] for one in answer.devices] == [["attested.gpuwarden.io/record=uid-train"], []]
    text = (recording.records / "uid-train.jws").read_text()
    second = recording.now.replace(microsecond=0)
    assert verified(text, ROOTS, EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN)) == EvidenceRecord(
        node="node-a",
        spiffe_id=evidence_id(),
        hash=HASH,
        issued=second,
        until=second + HOUR,
        claim=RecordedClaim("ml", "train", "uid-train"),
        pods=["uid-pod"],
        gpus=[GPU, OTHER_GPU],
    )
    (spec,) = recording.specs.glob("*")
    content = json.loads(spec.read_text())
    assert (content["kind"], [one["name"] for one in content["devices"]]) == (
        "attested.gpuwarden.io/record",
        ["uid-train"],
    )
    edits = content["devices"][0]["containerEdits"]
    assert edits["env"] == [f"{VARIABLE}={PATH}"]
    (mount,) = edits["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == (str(recording.records / "uid-train.jws"), PATH)
    assert {"ro", "noexec", "nosuid", "nodev"} <= set(mount["options"])
    modes = {one: stat.S_IMODE(one.stat().st_mode) for one in (spec, recording.records / "uid-train.jws")}
    assert set(modes.values()) == {0o644}


async def test_record_is_removed_when_the_claim_is_unprepared(recording: Harness) -> None:
    assert await recording.error() == ""
    assert await recording.error() == ""
    assert recording.files() == RECORD_FILES
    await recording.kubelet.unprepare(claim("train"))
    assert recording.files() == set()
    await recording.kubelet.unprepare(claim("train"))


@pytest.mark.parametrize("missing", ["certificate", "slice", "directory"])
async def test_pod_does_not_start_without_its_record(recording: Harness, missing: str) -> None:
    match missing:
        case "certificate":
            recording.agent.issued = [CA.issue(evidence_id("node-b"))]
        case "slice":
            assert recording.slices is not None
            recording.slices.devices = []
        case _:
            recording.specs.write_text("a file")
    reason = {
        "certificate": "no X.509-SVID of",
        "slice": "is in no slice of this node",
        "directory": "cannot be written",
    }
    assert reason[missing] in await recording.error()


async def test_runtime_reads_no_specification_that_is_being_written(
    recording: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads each .json of the directory, and two specifications with the same device are an error."""
    assert await recording.error() == ""
    seen: list[set[str]] = []

    def replace(path: Path, target: Path) -> Path:
        seen.append({one.name for one in recording.specs.iterdir() if one.suffix == ".json"})
        path.rename(target)
        return target

    monkeypatch.setattr(Path, "replace", replace)
    assert await recording.error() == ""
    assert seen == [RECORD_FILES - {"uid-train.jws"}] * 2


async def test_record_that_cannot_be_read_at_this_moment_stays(
    recording: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of its pod may be started again."""
    assert await recording.error() == ""

    def fails(path: Path, **_: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", fails)
    await recording.plugin.check.remove_stale_records()
    assert recording.files() == RECORD_FILES


@pytest.mark.parametrize("uid", ["../train", "", "a" * 65, ".hidden", "a/b"])
async def test_uid_that_is_no_file_name_is_refused(recording: Harness, uid: str) -> None:
    recording.claims.add("train", GPU)["metadata"]["uid"] = uid
    answer = (await recording.kubelet.prepare(claim("train", uid)))[uid]
    assert "is not the uid of a claim" in answer.error
    assert not list(recording.kubelet.directory.rglob("*.jws"))


async def test_refused_claim_gets_no_record(recording: Harness) -> None:
    recording.agent.identities = [evidence_id(hash=OTHER_HASH)]
    assert await recording.error()
    assert recording.files() == set()


async def test_records_of_claims_that_are_gone_are_removed_at_the_start(recording: Harness) -> None:
    for name in ("stays", "gone", "replaced", "unknown"):
        recording.claims.add(name, GPU)
        assert await recording.error(name) == ""
    (recording.records / "broken.jws").write_text("broken")
    (recording.records / ".half.jws.tmp").write_text("half")
    del recording.claims.claims["ml", "gone"]
    recording.claims.add("replaced", GPU)["metadata"]["uid"] = "uid-another"
    recording.claims.is_away = True
    await recording.plugin.check.remove_stale_records()
    stay = {one.name for one in recording.records.glob("*")}
    assert stay == {f"uid-{name}.jws" for name in ("stays", "gone", "replaced", "unknown")}
    recording.claims.is_away = False
    await recording.plugin.check.remove_stale_records()
    assert {one.stem for one in recording.records.glob("*")} == {"uid-stays", "uid-unknown"}
    assert len(list(recording.specs.glob("*"))) == 2
