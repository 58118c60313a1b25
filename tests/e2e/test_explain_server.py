"""`gpuwarden explain` asks the running system: it prints the verdict that the API server would get."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
import yaml
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests import builders
from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_pod
from tests.e2e.kube import PODS, RESOURCE_QUOTAS, SERVICE_ACCOUNTS, ApiError, Kube, pod, wait_until
from tests.e2e.processes import Site, site
from tests.e2e.test_ledger import GPU_NODES
from tests.generated_pods import generated_pods
from tests.running import GPUWARDEN

GENERATED = 40
# (verdict, reason)
Found = tuple[str, str]


@frozen
class CommandOutput:
    """The output of the command."""

    status: int
    out: str
    err: str

    @property
    def answers(self) -> list[Raw]:
        found = json.loads(self.out)
        return found if isinstance(found, list) else [found]


@frozen
class Harness:
    """A working directory with credentials from which `explain` is run."""

    here: Site
    directory: Path
    ca: Path
    token: Path

    @property
    def url(self) -> str:
        return f"https://localhost:{self.here.replicas[0].port}"

    @property
    def to_server(self) -> list[str]:
        return ["--server", self.url, "--ca", str(self.ca), "--token-file", str(self.token)]

    async def explain(self, *words: str, stdin: str = "", env: Mapping[str, str] | None = None) -> CommandOutput:
        process = await asyncio.create_subprocess_exec(
            GPUWARDEN,
            "explain",
            *words,
            cwd=self.directory,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.directory), **(env or {})},
        )
        out, err = await process.communicate(stdin.encode())
        return CommandOutput(process.returncode or 0, out.decode(), err.decode())

    async def dry_run(self, client: httpx.AsyncClient, raw: Raw) -> tuple[str, str]:
        """The webhooks' verdict and reason for a dry run."""
        answer = await client.post("/mutate", json=builders.mutating_create(raw, dry_run=True))
        response = answer.raise_for_status().json()["response"]
        if not response["allowed"]:
            return "deny", response["status"]["reason"]
        return "admit", response.get("auditAnnotations", {}).get("reason", "NotAsked")


UNUSUAL = ("--require-evidence", "asked", "--injection", "cuda")


@pytest.fixture
async def harness(
    request: pytest.FixtureRequest, cluster: Cluster, kube: Kube, tmp_path: Path
) -> AsyncIterator[Harness]:
    proven = json.dumps({"expl-0": HASH, "expl-1": OTHER_HASH})
    flags = ("--node-hash-map", proven, *getattr(request, "param", ()))
    async with site(cluster, kube, tmp_path, nodes=2, gpus=2, name="expl", flags=flags) as here:
        (tmp_path / "token").write_text(cluster.admin_token)
        await here.replica(serves=True)
        directory = tmp_path / "harness"
        directory.mkdir()
        yield Harness(here, directory, tmp_path / "ca.crt", tmp_path / "token")


def labelled(label: str, *uuids: str) -> Raw:
    """A change of a GPUNode that sets the labels of its devices."""
    return {"spec": {"devices": [{"uuid": uuid, "labels": [label]} for uuid in uuids]}}


def manifest(directory: Path, *pods: Raw) -> str:
    (directory / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    return "pods.yaml"


async def test_explain_uses_the_server_and_not_a_local_inventory_file(harness: Harness) -> None:
    """The working directory has an example inventory that would admit the pod."""
    examples = harness.directory / "examples"
    examples.mkdir()
    node = {"name": "node-a", "evidence": {"hash": "sha256:cc33"}, "devices": [{"uuid": "GPU-a0"}]}
    (examples / "inventory.yaml").write_text(yaml.safe_dump({"nodes": [node]}))
    annotations = {"gpuwarden.io/required-hash": "sha256:cc33"}
    raw = raw_pod(raw_container(gpus=1), namespace=harness.here.namespace, annotations=annotations)
    file = manifest(harness.directory, raw)
    said = await harness.explain(file, *harness.to_server)
    assert (said.status, "deny" in said.out, "NoProvenNode" in said.out) == (1, True, True), said
    assert f"answered by server {harness.url}" in said.err
    assert f"hint: proven now: {HASH} by 1 node, {OTHER_HASH} by 1 node" in said.out
    assert f"- expl-0: a different hash: {HASH}" in said.out
    assert (await harness.explain(file)).status == 0, "the file alone says otherwise"


def generated(namespace: str) -> list[Raw]:
    pods = [raw for raw in generated_pods(GENERATED * 2, seed=40) if isinstance(raw["spec"]["containers"], list)]
    return [{**raw, "metadata": {**raw["metadata"], "namespace": namespace}} for raw in pods][:GENERATED]


async def verdicts(harness: Harness, pods: list[Raw]) -> list[tuple[str, str]]:
    """The server's verdicts on dry runs."""
    trust = ssl.create_default_context(cafile=str(harness.ca))
    async with httpx.AsyncClient(base_url=harness.url, verify=trust, trust_env=False) as client:
        return [await harness.dry_run(client, raw) for raw in pods]


def disagreements(
    pods: list[Raw], said: CommandOutput, expected: list[tuple[str, str]]
) -> list[tuple[Raw, Found, Found]]:
    """The pods for which the command and `/mutate` disagree."""
    found = [(one["verdict"], one["reason"]) for one in said.answers]
    assert len(found) == len(pods)
    # `/mutate` allows what only the validating webhook denies; the creation is denied then.
    is_refused_later = [one == ("deny", "GpuWithoutClaim") or one == ("deny", "Forged") for one in found]
    return [
        (raw, one, want)
        for raw, one, want, later in zip(pods, found, expected, is_refused_later, strict=True)
        if one != want and not (later and want[0] == "admit")
    ]


async def test_explain_and_a_dry_run_agree_on_generated_pods(harness: Harness) -> None:
    pods = generated(harness.here.namespace)
    expected = await verdicts(harness, pods)
    said = await harness.explain("-", "-o", "json", *harness.to_server, stdin=yaml.safe_dump_all(pods))
    assert not (found := disagreements(pods, said, expected)), found[:2]
    assert said.status == 1
    assert len(set(expected)) >= 6, "the pods are of many kinds"
    assert await harness.here.held() == {}


@pytest.mark.parametrize("harness", [UNUSUAL], indirect=True, ids=["a server with unusual settings"])
async def test_explain_with_only_a_kubeconfig_agrees_with_the_server_on_generated_pods(harness: Harness) -> None:
    """The command gets no settings of the server. The API server itself rejects invalid pods first."""
    await harness.here.wait_until_reviewed()
    pods = generated(harness.here.namespace)
    expected = await verdicts(harness, pods)
    env = {"KUBECONFIG": str(harness.here.kubeconfig)}
    text = yaml.safe_dump_all(pods)
    for flags in (["--kubeconfig", str(harness.here.kubeconfig)], []):
        said = await harness.explain("-", "-o", "json", *flags, stdin=text, env=env)
        found = disagreements(pods, said, expected)
        by_api_server = [one for _, one, _ in found if one in (("deny", "BadRequest"), ("deny", "Invalid"))]
        assert len(by_api_server) == len(found) < GENERATED // 4, [one for one in found if one[1] not in by_api_server]
        assert said.status == 1
        assert {"admit", "deny"} == {one["verdict"] for one in said.answers}
    assert len(set(expected)) >= 5, expected
    assert await harness.here.held() == {}


async def test_explain_with_a_kubeconfig_prints_hints_warnings_and_the_pod(harness: Harness, kube: Kube) -> None:
    here = harness.here
    await here.reconciler()
    await here.wait_until_reviewed()
    by = ["-n", here.namespace, "--kubeconfig", str(here.kubeconfig)]
    await kube.patch(GPU_NODES, "expl-0", labelled("model=h100", "GPU-expl-0-0", "GPU-expl-0-1"))
    raw = pod("train", gpus=1)
    raw["metadata"]["labels"] = {"gpuwarden.io/gpu.modle": "h100"}
    said = await harness.explain("-", *by, stdin=json.dumps(raw))
    assert (said.status, "hint: no GPU has the label modle=h100: did you mean model=h100?" in said.out) == (1, True), (
        said
    )
    raw = pod("train", gpus=1, annotations={"gpuwarden.io/required-hash": HASH.upper()})
    said = await harness.explain("-", *by, stdin=json.dumps(raw))
    assert (said.status, "NoProvenNode" in said.out) == (1, True), said
    assert f"no node has proven {HASH.upper()}: did you mean {HASH}?" in said.out
    raw = pod("train", gpus=2, annotations={"gpuwarden.io/required-hash": HASH}, nothing="like this")
    said = await harness.explain("-", *by, stdin=json.dumps(raw))
    assert (said.status, "2 GPUs on a node attested as" in said.out, "unknown field" in said.out) == (0, True, True), (
        said
    )
    shown = await harness.explain("-", *by, "--show", "pod", stdin=json.dumps(raw))
    made = yaml.safe_load(shown.out)
    assert made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-expl-0-0,GPU-expl-0-1"
    assert made["spec"]["serviceAccountName"] == "default", "what other admission plugins make of it"
    patch = json.loads((await harness.explain("-", *by, "--show", "patch", stdin=json.dumps(raw))).out)
    assert {one["op"] for one in patch} >= {"add"}
    assert await here.held() == {}


async def test_explain_gives_no_verdict_without_permission_namespace_or_webhooks(harness: Harness, kube: Kube) -> None:
    """Three cases: no permission to create pods, no such namespace, and webhooks that do not answer."""
    here = harness.here
    await here.wait_until_reviewed()
    await kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": "guest"}}, here.namespace)
    token = await kube.post(SERVICE_ACCOUNTS, "guest", "token", {"spec": {}}, here.namespace)
    content = json.loads(here.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token["status"]["token"]}
    content["contexts"][0]["context"]["namespace"] = here.namespace
    (harness.directory / "guest").write_text(json.dumps(content))
    file = manifest(harness.directory, pod("train", gpus=1))
    forbidden = await harness.explain(file, "--kubeconfig", "guest")
    assert (forbidden.status, f'in the namespace "{here.namespace}"' in forbidden.out) == (2, True), forbidden
    nowhere = await harness.explain(file, "-n", "not-there", "--kubeconfig", str(here.kubeconfig))
    assert (nowhere.status, "not-there" in nowhere.out) == (2, True), nowhere
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await kube.create(RESOURCE_QUOTAS, quota, here.namespace)
    by = ["-n", here.namespace, "--kubeconfig", str(here.kubeconfig)]

    async def full() -> CommandOutput:
        return await harness.explain(file, *by)

    said = await wait_until(full, lambda said: said.status == 1)
    assert "exceeded quota" in said.out, said
    await kube.delete(RESOURCE_QUOTAS, "none", here.namespace)
    await here.balancer.only()
    down = await harness.explain(file, *by)
    assert (down.status, "failed calling webhook" in down.out) == (2, True), down


async def test_explain_reports_a_denial_of_the_validating_webhook(harness: Harness, kube: Kube) -> None:
    here = harness.here
    raw = {**pod("cheat", annotations={"cdi.k8s.io/gpu": "nvidia.com/gpu=all"})}
    said = await harness.explain("-", "-n", here.namespace, *harness.to_server, stdin=json.dumps(raw))
    assert (said.status, "GpuWithoutClaim" in said.out) == (1, True), said
    with pytest.raises(ApiError):
        await kube.create(PODS, raw, here.namespace, dryRun="All")


async def test_explain_gives_no_verdict_if_no_server_answers(harness: Harness) -> None:
    file = manifest(harness.directory, raw_pod(raw_container(gpus=1)))
    server = ["--server", harness.url, "--ca", str(harness.ca)]
    without_token = await harness.explain(file, *server)
    assert (without_token.status, "answered 401" in without_token.out) == (2, True), without_token
    by_other_ca = await harness.explain(file, "--server", harness.url, "--token-file", str(harness.token))
    assert (by_other_ca.status, "CERTIFICATE_VERIFY_FAILED" in by_other_ca.out) == (2, True), by_other_ca
    nowhere = await harness.explain(file, "--server", "https://localhost:1")
    assert (nowhere.status, "unknown" in nowhere.out) == (2, True), nowhere
    one_is_lost = await harness.explain(file, "nowhere.yaml", *harness.to_server)
    assert (one_is_lost.status, "admit" in one_is_lost.out) == (2, True), one_is_lost


async def test_explain_sends_the_credentials_of_the_kubeconfig(harness: Harness) -> None:
    file = manifest(harness.directory, raw_pod(raw_container(gpus=1), namespace=harness.here.namespace))
    content = json.loads(harness.here.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": harness.token.read_text()}
    own = harness.directory / "kubeconfig"
    own.write_text(json.dumps(content))
    said = await harness.explain(file, "--server", harness.url, "--ca", str(harness.ca), "--kubeconfig", str(own))
    assert (said.status, f"answered by server {harness.url}" in said.err) == (0, True), said


async def test_explain_shows_the_gpus_of_an_existing_pod(harness: Harness, kube: Kube) -> None:
    here = harness.here
    await here.reconciler()
    await here.wait_until_reviewed()
    await kube.create(PODS, pod("train", gpus=1), here.namespace)
    await wait_until(lambda: kube.get(PODS, "train", here.namespace), lambda seen: seen["spec"].get("nodeName"))
    env = {"KUBECONFIG": str(here.kubeconfig)}
    for flags in (harness.to_server, []):
        said = await harness.explain("pod", f"{here.namespace}/train", *flags, env=env)
        assert (said.status, "the pod has GPU-expl-" in said.out) == (0, True), said
    said = await harness.explain("pod", f"{here.namespace}/nobody", env=env)
    assert (said.status, "answered 404" in said.err) == (2, True), said


async def test_explain_shows_the_pod_as_the_api_server_would_store_it(harness: Harness, kube: Kube) -> None:
    here = harness.here
    await here.wait_until_reviewed()
    raw = pod("train", gpus=2, annotations={"gpuwarden.io/required-hash": HASH})
    shown = await harness.explain("-", "-n", here.namespace, "--show", "pod", *harness.to_server, stdin=json.dumps(raw))
    stored = await kube.create(PODS, raw, here.namespace, dryRun="All")
    printed = yaml.safe_load(shown.out)
    ours = {"gpuwarden.io/gpu-uuid", "gpuwarden.io/node", "gpuwarden.io/claim"}
    assert {key: printed["metadata"]["annotations"][key] for key in ours} == {
        key: stored["metadata"]["annotations"][key] for key in ours
    }
    assert printed["spec"]["containers"][0].get("env") == stored["spec"]["containers"][0].get("env")
    assert printed["spec"]["affinity"] == stored["spec"]["affinity"]
