"""The extender with the real kube-scheduler: a scheduler of this module, a real server, a real reconciler."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml
from attrs import define, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scripts.controlplane.build import binaries
from scripts.controlplane.cluster import ROOT, Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from scripts.controlplane.components import SCHEDULERS
from scripts.controlplane.credentials import SCHEDULER
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    EVENTS,
    NAMESPACES,
    NODES,
    PATIENCE,
    PODS,
    ApiError,
    Kube,
    Raw,
    Resource,
    pod,
    wait_until,
)
from tests.e2e.processes import registered
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_configurations import ENABLED, at_url, is_reviewed, reviewed
from tests.ledger.fake_store import gpu_node as gpu_node_object
from tests.running import GPUWARDEN, Running, challenging, reconciling, serving
from webhook.admission.binding_ends import NAME
from webhook.core.evidence import Evidence
from webhook.evidence.jwt.jwt_svid import SOURCE
from webhook.evidence.node_evidence import new_node_evidence, with_entries
from webhook.kube.install.policies import Installation
from webhook.runtime.clock import utc_now
from webhook.runtime.http.listener import Listener

NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
PRIORITIES = Resource("apis/scheduling.k8s.io/v1", "priorityclasses", is_namespaced=False)
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
NAMES = ("ext-0", "ext-1", "ext-2")
HASH, OTHER_HASH = "sha256:ee11", "sha256:ee22"
ASKING = {"attestation-hash.my-company.com/required-hash": HASH}
SCHEDULER_NAME = "asking-scheduler"
OURS = "gpuwarden"
BINDING_ENDS = Resource("apis/gpuwarden.io/v1alpha1", "bindingends", is_namespaced=False)
WITH_WEBHOOKS = ROOT / "examples/scheduler/scheduler-config.yaml"
WITHOUT_WEBHOOKS = ROOT / "deploy/extender/scheduler/scheduler-config.yaml"
SHIPPED = [*sorted((ROOT / "examples/scheduler").glob("*config.yaml")), WITHOUT_WEBHOOKS]
# The promise: a waiting pod is on its node within this time after evidence arrives.
SOON = 5.0


@define(eq=False)
class Harness:
    """A namespace without webhooks: only the scheduler keeps its pods off nodes."""

    cluster: Cluster
    kube: Kube
    namespace: str
    directory: Path
    running: Running
    identity: trustme.CA
    evidence: dict[str, str] = field(factory=dict)

    async def prove(self, name: str, digest: str | None) -> None:
        """Writes evidence as a provider does; None removes it."""
        now = utc_now().astimezone(UTC)
        word = digest and Evidence(name, digest, SOURCE, now, now + timedelta(hours=1))
        if await self.kube.find(NODE_EVIDENCES, name) is None:
            await self.kube.create(NODE_EVIDENCES, new_node_evidence(name))
        raw = await self.kube.get(NODE_EVIDENCES, name)
        await self.kube.replace(NODE_EVIDENCES, with_entries(raw, {SOURCE: word or None}), subresource="status")

    def client(self) -> httpx.AsyncClient:
        """A client with the scheduler's credentials."""
        trust = self.running.trust
        self.identity.issue_cert("scheduler").configure_cert(trust)
        return httpx.AsyncClient(base_url=self.running.urls["extender"], verify=trust, trust_env=False)

    async def refusal_for(self, name: str) -> str:
        """Why the extender refuses the node for a pod with the hash; empty if it passes."""
        content = pod("probe", annotations=ASKING)
        async with self.client() as client:
            asked = {"Pod": content, "Nodes": None, "NodeNames": [name]}
            found = (await client.post("/filter", json=asked)).raise_for_status().json()
        return "" if found["NodeNames"] == [name] else str(found["FailedAndUnresolvableNodes"][name])

    async def is_known(self, name: str, *, proven: bool) -> None:
        await wait_until(lambda: self.refusal_for(name), lambda said: (not said) is proven)

    async def create(self, name: str, annotations: Raw | None = None, **spec: Any) -> Raw:
        content = pod(name, annotations=annotations, schedulerName=SCHEDULER_NAME, **spec)
        return await self.kube.create(PODS, content, self.namespace)

    async def node_of(self, name: str) -> str | None:
        node: str | None = (await self.kube.get(PODS, name, self.namespace))["spec"].get("nodeName")
        return node

    async def is_on(self, name: str, node: str | None = None, seconds: float = PATIENCE) -> str:
        found = await wait_until(lambda: self.node_of(name), lambda on: on is not None, seconds)
        assert found is not None
        assert node in (None, found)
        return found

    async def waits(self, name: str, *words: str) -> str:
        """Waits until the pod's Events and its condition contain the words."""

        async def said() -> str:
            selector = f"involvedObject.name={name},reason=FailedScheduling"
            return "\n".join(
                one.get("message") or one.get("note", "")
                for one in await self.kube.list(EVENTS, self.namespace, fieldSelector=selector)
            )

        def is_right(text: str) -> bool:
            return all(word in text for word in words)

        async def condition() -> str:
            found = (await self.kube.get(PODS, name, self.namespace))["status"].get("conditions", ())
            return "\n".join(one.get("message", "") for one in found if one["type"] == "PodScheduled")

        await wait_until(condition, is_right)
        return await wait_until(said, is_right)

    async def ends(self) -> dict[str, str]:
        """The end times of the nodes in BindingEnds."""
        nodes: dict[str, str] = (await self.kube.get(BINDING_ENDS, NAME))["spec"]["nodes"]
        return nodes

    async def is_refused(self, name: str) -> None:
        """Waits until the scheduler reports that the API server refused the binding."""

        async def said() -> str:
            return (self.directory / "scheduler.log").read_text()

        await wait_until(
            said,
            lambda text: any(name in one and "the evidence of node ext-1 ended" in one for one in text.splitlines()),
        )

    @contextmanager
    def scheduler(self, *after: Raw, **members: Any) -> Iterator[None]:
        """Runs a kube-scheduler with the shipped extender configuration, and with further extenders after it."""
        own = {
            "urlPrefix": self.running.urls["extender"],
            "filterVerb": "filter",
            "prioritizeVerb": "prioritize",
            "preemptVerb": "preempt",
            "weight": 1,
            "nodeCacheCapable": True,
            "ignorable": False,
            "httpTimeout": "5s",
            "enableHTTPS": True,
            "tlsConfig": {
                "caFile": str(self.running.directory / "certs/dev/ca.crt"),
                "certFile": str(self.directory / "scheduler.crt"),
                "keyFile": str(self.directory / "scheduler.key"),
            },
            **members,
        }
        content = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.cluster.credentials.kubeconfig_of(SCHEDULER))},
            "profiles": [{"schedulerName": SCHEDULER_NAME}],
            "extenders": [own, *after],
        }
        config = self.directory / "scheduler.json"
        config.write_text(json.dumps(content))
        command = [str(binaries() / SCHEDULERS), f"--config={config}", "--secure-port=0"]
        with (
            (self.directory / "scheduler.log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
            try:
                yield
            finally:
                process.kill()


@pytest.fixture(scope="module")
def accounts(cluster: Cluster) -> Iterator[tuple[Path, Path]]:
    """The accounts of `serve` and `reconcile`, with the shipped rights, also those for a scheduler."""
    printed = subprocess.run([GPUWARDEN, "manifests", "rbac"], check=True, capture_output=True, text=True).stdout
    wanted = printed + "---\n" + (ROOT / "examples/scheduler/rbac.yaml").read_text()

    def kubectl(*arguments: str) -> None:
        done = subprocess.run([*cluster.kubectl, *arguments], input=wanted, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    kubectl("create", "namespace", OURS)
    kubectl("apply", "-f", "-")
    names = (OURS, f"{OURS}-reconcile")
    serve, reconcile = (cluster.service_account_kubeconfig(OURS, name) for name in names)
    yield serve, reconcile
    kubectl("delete", "-f", "-")
    kubectl("delete", "namespace", OURS)


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, accounts: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Harness]:
    await installed(kube)
    identity = trustme.CA()
    identity.cert_pem.write_to_path(tmp_path / "schedulers.crt")
    shown = identity.issue_cert("kube-scheduler")
    shown.cert_chain_pems[0].write_to_path(tmp_path / "scheduler.crt")
    shown.private_key_pem.write_to_path(tmp_path / "scheduler.key")
    serve, reconcile = accounts
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(cluster.add_nodes, [node_object(name) for name in NAMES])
        stack.push_async_callback(removed, kube)
        namespace = await stack.enter_async_context(new_namespace(kube))
        stack.push_async_callback(cleared, kube, namespace)
        (tmp_path / "serve").mkdir()
        flags = ["--kubeconfig", str(serve), "--extender-client-ca", str(tmp_path / "schedulers.crt")]
        flags += challenging(tmp_path)
        running = stack.enter_context(serving(tmp_path / "serve", None, flags))
        (tmp_path / "reconcile").mkdir()
        # It is killed at the end; the next test would wait for its Lease.
        stack.push_async_callback(kube.delete, LEASES, "gpuwarden-reconcile", OURS)
        own = ["--kubeconfig", str(reconcile), "--lease-namespace", OURS, *challenging(tmp_path)]
        stack.enter_context(reconciling(tmp_path / "reconcile", own))
        yield Harness(cluster, kube, namespace, tmp_path, running, identity)


async def removed(kube: Kube) -> None:
    for name in NAMES:
        for of in (NODE_EVIDENCES, GPU_NODES, NODES):
            with suppress(ApiError):
                await kube.patch(of, name, {"metadata": {"finalizers": None}})
            with suppress(ApiError):
                await kube.delete(of, name)


async def cleared(kube: Kube, namespace: str) -> None:
    for one in await kube.list(PODS, namespace):
        with suppress(ApiError):
            await kube.delete(PODS, one["metadata"]["name"], namespace)
    await wait_until(lambda: kube.list(PODS, namespace), lambda pods: not pods)


@pytest.mark.defect("extender-3")
@pytest.mark.defect("extender-4")
@pytest.mark.parametrize("capable", [True, False], ids=["names", "objects"])
async def test_pod_with_a_required_hash_is_bound_to_proven_nodes_only(harness: Harness, *, capable: bool) -> None:
    await harness.prove("ext-0", OTHER_HASH)
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    with harness.scheduler(nodeCacheCapable=capable):
        for number in range(4):
            await harness.create(f"secure-{number}", ASKING)
        await harness.create("plain")
        for number in range(4):
            await harness.is_on(f"secure-{number}", "ext-1")
        await harness.is_on("plain")


async def test_pod_waits_with_an_event_until_evidence_arrives(harness: Harness) -> None:
    await harness.prove("ext-0", OTHER_HASH)
    await wait_until(lambda: harness.refusal_for("ext-0"), lambda said: said.startswith("attestation hash differs"))
    with harness.scheduler():
        await harness.create("secure", ASKING)
        said = await harness.waits("secure", "1 attestation hash differs", "no attestation evidence for this node")
        assert "Preemption is not helpful" in said
        assert not any(name in said for name in NAMES)
        started = time.monotonic()
        await harness.prove("ext-2", HASH)
        await harness.is_on("secure", "ext-2")
        assert time.monotonic() - started < SOON
    woken = (await harness.kube.get(PODS, "secure", harness.namespace))["metadata"]["annotations"]
    assert "gpuwarden.io/woken-at" in woken


async def test_pod_is_scheduled_when_a_gpu_becomes_healthy_again(harness: Harness) -> None:
    """The scheduler does not know which GPUs of a node are healthy."""

    def devices(*, healthy: bool) -> Raw:
        return {"spec": {"devices": [{"uuid": "GPU-ext-0", "healthy": healthy}]}}

    await harness.kube.create(GPU_NODES, {**gpu_node_object("ext-0", "GPU-ext-0"), **devices(healthy=False)})
    await harness.prove("ext-0", HASH)
    await harness.is_known("ext-0", proven=True)
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    with harness.scheduler():
        container = {"name": "main", "image": "example.test/main:1", "resources": limits}
        await harness.create("secure", ASKING, containers=[container])
        await harness.waits("secure", "1 too few free GPUs")
        started = time.monotonic()
        await harness.kube.patch(GPU_NODES, "ext-0", devices(healthy=True))
        await harness.is_on("secure", "ext-0")
        assert time.monotonic() - started < SOON


@pytest.mark.defect("extender-5")
async def test_no_pod_is_preempted_for_a_pod_that_the_node_can_never_serve(harness: Harness) -> None:
    """The node is full: the scheduler would preempt before it asks the extender about evidence."""
    classes = {"ext-low": 1, "ext-high": 1_000_000}
    for name, value in classes.items():
        await harness.kube.create(PRIORITIES, {"metadata": {"name": name}, "value": value})
    try:
        whole = {"resources": {"requests": {"cpu": "60"}, "limits": {"cpu": "60"}}}
        container: list[Raw] = [{"name": "main", "image": "example.test/main:1", **whole}]
        for node in ("ext-0", "ext-1"):
            here: Raw = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": container}
            with harness.scheduler():
                await harness.create(f"low-{node}", priorityClassName="ext-low", **here)
                await harness.is_on(f"low-{node}", node)
        await harness.prove("ext-1", HASH)
        await harness.is_known("ext-1", proven=True)
        with harness.scheduler():
            for node in ("ext-0", "ext-1"):
                here = {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": container}
                await harness.create(f"high-{node}", ASKING, priorityClassName="ext-high", **here)
            # On a node with valid evidence it preempts; by then the other node has been considered, too.
            await harness.is_on("high-ext-1", "ext-1")
            await harness.waits("high-ext-0", "Insufficient cpu")
        survivor = await harness.kube.get(PODS, "low-ext-0", harness.namespace)
        assert "deletionTimestamp" not in survivor["metadata"]
        assert await harness.kube.find(PODS, "low-ext-1", harness.namespace) is None
    finally:
        for name in classes:
            await harness.kube.delete(PRIORITIES, name)


@pytest.mark.defect("extender-7")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_kube_scheduler_accepts_the_shipped_configurations(cluster: Cluster, path: Path, tmp_path: Path) -> None:
    """The paths are those of this machine; the scheduler writes down what it has read."""
    identity = trustme.CA()
    shown = identity.issue_cert("kube-scheduler")
    identity.cert_pem.write_to_path(tmp_path / "ca.crt")
    shown.cert_chain_pems[0].write_to_path(tmp_path / "scheduler.crt")
    shown.private_key_pem.write_to_path(tmp_path / "scheduler.key")
    here = yaml.safe_load(path.read_text().replace("/etc/kubernetes/gpuwarden", str(tmp_path)))
    here["clientConnection"] = {"kubeconfig": str(cluster.credentials.kubeconfig_of(SCHEDULER))}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(here))
    command = [str(binaries() / SCHEDULERS), "--config=config.yaml", "--secure-port=0", "--write-config-to=read"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    (extender,) = yaml.safe_load((tmp_path / "read").read_text())["extenders"]
    extender.setdefault("ignorable", False)  # false is omitted
    assert extender | here["extenders"][0] == extender


def shipped(path: Path) -> Raw:
    """What the configuration sets for filtered pods, and for a server that does not answer."""
    (extender,) = yaml.safe_load(path.read_text())["extenders"]
    return {name: extender[name] for name in ("ignorable", "httpTimeout", "managedResources") if name in extender}


WITH_A_GPU: Raw = {
    "containers": [{"name": "main", "image": "example.test/main:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
}


async def test_during_an_outage_other_pods_are_bound_and_no_pod_with_a_claim_without_evidence(
    harness: Harness,
) -> None:
    """The scheduler continues without the extender; the API server uses the end times that the reconciler has
    written."""
    for name in NAMES:
        await harness.kube.create(GPU_NODES, gpu_node_object(name, f"GPU-{name}"))
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    await harness.kube.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": ENABLED}})
    async with AsyncExitStack() as stack:
        others = await stack.enter_async_context(new_namespace(harness.kube))
        ca = (harness.running.directory / "certs/dev/ca.crt").read_bytes()
        installation = Installation(OURS, url=harness.running.urls["https"], ca_bundle=ca)
        await stack.enter_async_context(registered(harness.kube, installation))
        await wait_until(lambda: is_reviewed(harness.kube, harness.namespace))
        made = await harness.create("dressed", ASKING, **WITH_A_GPU)
        assert made["metadata"]["annotations"]["gpuwarden.io/node"] == "ext-1"
        # An earlier test may have left the node in the list, without evidence. A node that was never proven is not
        # listed.
        await wait_until(harness.ends, lambda nodes: nodes.get("ext-1", "1970") > "1971")
        harness.running.process.kill()
        await harness.prove("ext-1", None)
        await wait_until(harness.ends, lambda nodes: nodes["ext-1"].startswith("1970"))
        with harness.scheduler(**shipped(WITH_WEBHOOKS)):
            await harness.kube.create(PODS, pod("plain", schedulerName=SCHEDULER_NAME), others)
            await placed(harness.kube, others, "plain")
            await harness.is_refused("dressed")
            assert await harness.node_of("dressed") is None
            await harness.prove("ext-1", HASH)
            await harness.is_on("dressed", "ext-1")


async def test_without_webhooks_only_pods_that_ask_for_gpus_wait_during_an_outage(harness: Harness) -> None:
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    harness.running.process.kill()
    with harness.scheduler(**shipped(WITHOUT_WEBHOOKS)):
        await harness.create("secure", ASKING, **WITH_A_GPU)
        await harness.create("plain")
        await harness.is_on("plain")
        await harness.waits("secure", "connection refused")
        assert await harness.node_of("secure") is None


async def placed(kube: Kube, namespace: str, name: str) -> None:
    async def node() -> object:
        return (await kube.get(PODS, name, namespace))["spec"].get("nodeName")

    await wait_until(node, lambda found: found is not None)


class ActingExtender:
    """An extender that is called after gpuwarden's, performs an action in between, and accepts all nodes."""

    def __init__(self, act: Callable[[], Awaitable[None]]) -> None:
        self._meddle = act
        self.times = 0

    async def filter(self, request: Request) -> Response:
        asked = await request.json()
        self.times += 1
        if self.times == 1:
            await self._meddle()
        return JSONResponse({"NodeNames": asked["NodeNames"], "FailedNodes": {}, "Error": ""})


@pytest.mark.defect("extender-6")
async def test_binding_is_denied_if_evidence_is_lost_between_filter_and_bind(harness: Harness) -> None:
    async def withdraw() -> None:
        await harness.prove("ext-1", None)
        await harness.is_known("ext-1", proven=False)

    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    meddler = ActingExtender(withdraw)
    app = Starlette(routes=[Route("/filter", meddler.filter, methods=["POST"])])
    listener = Listener(app, host="127.0.0.1", port=0)
    await listener.start()
    try:
        other = {"urlPrefix": listener.url, "filterVerb": "filter", "nodeCacheCapable": True, "httpTimeout": "60s"}
        with harness.scheduler(other, bindVerb="bind"):
            await harness.create("secure", ASKING)
            await harness.waits("secure", "node ext-1: no evidence")
            assert await harness.node_of("secure") is None
            await harness.prove("ext-1", HASH)
            await harness.is_on("secure", "ext-1")
    finally:
        await listener.stop(0)


async def test_dressed_pod_is_bound_to_its_reserved_node_only_with_evidence(harness: Harness) -> None:
    """Its GPU is reserved, so it can run on one node only; evidence that is lost after all filters keeps it from
    there."""

    async def withdraw() -> None:
        await harness.prove("ext-1", None)
        await harness.is_known("ext-1", proven=False)

    for name in NAMES:
        await harness.kube.create(GPU_NODES, gpu_node_object(name, f"GPU-{name}"))
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    meddler = ActingExtender(withdraw)
    app = Starlette(routes=[Route("/filter", meddler.filter, methods=["POST"])])
    listener = Listener(app, host="127.0.0.1", port=0)
    async with AsyncExitStack() as stack:
        await listener.start()
        stack.push_async_callback(listener.stop, 0)
        await harness.kube.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": ENABLED}})
        ca = harness.running.directory / "certs/dev/ca.crt"
        await stack.enter_async_context(
            reviewed(harness.kube, harness.namespace, at_url(harness.running.urls["https"]), ca)
        )
        container = {"name": "main", "image": "example.test/main:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
        made = await harness.create("dressed", ASKING, containers=[container])
        assert made["metadata"]["annotations"]["gpuwarden.io/node"] == "ext-1"
        other = {"urlPrefix": listener.url, "filterVerb": "filter", "nodeCacheCapable": True, "httpTimeout": "60s"}
        with harness.scheduler(other, bindVerb="bind"):
            await harness.waits("dressed", "node ext-1: no evidence")
            assert await harness.node_of("dressed") is None
            await harness.prove("ext-1", HASH)
            await harness.is_on("dressed", "ext-1")
        found = await harness.kube.get(PODS, "dressed", harness.namespace)
        assert found["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-ext-1"
        held = (await harness.kube.get(GPU_NODES, "ext-1"))["status"]["held"]
        assert [one["uid"] for one in held.values()] == [found["metadata"]["uid"]]


@pytest.mark.defect("extender-6")
async def test_binding_is_created_once_and_only_for_the_pod_with_the_given_uid(harness: Harness) -> None:
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    made = await harness.create("secure", ASKING)
    wish = {"PodName": "secure", "PodNamespace": harness.namespace, "PodUID": made["metadata"]["uid"], "Node": "ext-1"}
    async with harness.client() as client:

        async def bound(**members: str) -> str:
            return str((await client.post("/bind", json={**wish, **members})).raise_for_status().json()["Error"])

        assert "does not exist" in await bound(PodUID="another")
        assert "no evidence" in await bound(Node="ext-0")
        assert await harness.node_of("secure") is None
        assert await bound() == ""
        assert await harness.node_of("secure") == "ext-1"
        assert await bound() == ""
        assert await bound(Node="ext-0") == "the pod is on ext-1 already"
