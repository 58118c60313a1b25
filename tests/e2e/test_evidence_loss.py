"""Evidence that is lost while pods run: what a real reconciler reports and which action it takes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests.e2e.conftest import new_namespace
from tests.e2e.evidence import write_evidence
from tests.e2e.kube import (
    DEPLOYMENTS,
    EVENTS,
    NODES,
    PODS,
    ApiError,
    Kube,
    Raw,
    Resource,
    delete_without_finalizers,
    deployment,
    gone,
    pod,
    pod_in_phase,
    pods_in_phase,
    wait_until,
)
from tests.e2e.test_discovery import ANNOTATION, NODE_EVIDENCES, reconciling, said
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_configurations import ENABLED, at_url, reviewed
from tests.running import WITHOUT_EVIDENCE, challenging, serving

BUDGETS = Resource("apis/policy/v1", "poddisruptionbudgets")
NODE, HASH = "cont-a", "sha256:c0c0"
ASKING = {"gpuwarden.io/required-hash": HASH}


@frozen(eq=False)
class Harness:
    """One proven node with one GPU, a server, and a reconciler that watches evidence."""

    kube: Kube
    namespace: str
    log: Path

    async def proven(self, lasts: timedelta = timedelta(hours=1)) -> None:
        """Writes evidence of a node that answered a challenge, as a replica does."""
        await write_evidence(self.kube, NODE, HASH, lasts)

    async def withdrawn(self) -> None:
        await self.kube.delete(NODE_EVIDENCES, NODE)

    async def runs(self, content: Raw) -> None:
        """Creates the pod as soon as it is admitted, and waits until it runs with its own GPU."""
        name = content["metadata"]["name"]

        async def is_there() -> bool:
            with suppress(ApiError):
                await self.kube.create(PODS, content, self.namespace)
                return True
            return False

        await wait_until(is_there)
        running = await pod_in_phase(self.kube, self.namespace, name, "Running")
        assert running["spec"]["nodeName"] == NODE

    async def wait_for_events(self, reason: str, kind: str, count: int = 1) -> list[Raw]:
        """Waits for `count` events."""
        selector = f"involvedObject.kind={kind},reason={reason}"
        namespace = "default" if kind == "Node" else self.namespace

        async def look() -> list[Raw]:
            found = await self.kube.list(EVENTS, namespace, fieldSelector=selector)
            return [one for one in found if kind != "Node" or one["involvedObject"]["name"] == NODE]

        return await wait_until(look, lambda found: len(found) == count)

    async def taints(self) -> list[Raw]:
        found = await self.kube.get(NODES, NODE)
        return [one for one in found["spec"].get("taints", []) if not one["key"].startswith("node.kubernetes.io/")]

    async def wait_for_log(self, words: str) -> None:
        """Waits until the reconciler's log contains `words`."""

        async def last_words() -> str:
            text = await asyncio.to_thread(self.log.read_text)
            return words if words in text else text[-2000:]

        await wait_until(last_words, lambda text: text == words)


def taint(key: str) -> Raw:
    return {"key": key, "effect": "NoSchedule"}


def asking(name: str, labels: Mapping[str, str] | None = None, gpus: int = 1) -> Raw:
    # Tolerates other taints on the node.
    tolerations = [{"key": "theirs", "operator": "Exists"}]
    made = pod(name, gpus, ASKING, tolerations=tolerations)
    made["metadata"]["labels"] = dict(labels or {})
    return made


@pytest.fixture
async def harness(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Harness]:
    """The action on evidence loss is the fixture's parameter."""
    await installed(kube)
    where = ["--kubeconfig", str(cluster.kubeconfig), *challenging(tmp_path)]
    async with AsyncExitStack() as stack:
        namespace = await stack.enter_async_context(new_namespace(kube, ENABLED))
        stack.push_async_callback(cleared, kube, namespace)
        one = node_object(NODE)
        one["metadata"]["annotations"] = {ANNOTATION: said("GPU-c")}
        await asyncio.to_thread(cluster.add_nodes, [one])
        harness = Harness(kube, namespace, tmp_path / "reconcile.log")
        await harness.proven()
        own = ["--lease-namespace", namespace, "--on-evidence-lost", request.param]
        stack.enter_context(reconciling(tmp_path, *where, *own))
        server = stack.enter_context(serving(tmp_path, None, ["--ledger", "cluster", *WITHOUT_EVIDENCE, *where]))
        ca = server.directory / "certs/dev/ca.crt"
        await stack.enter_async_context(reviewed(kube, namespace, at_url(server.urls["https"]), ca))
        await harness.wait_for_log("evidence watched")
        yield harness


async def cleared(kube: Kube, namespace: str) -> None:
    for one in await kube.list(PODS, namespace):
        with suppress(ApiError):
            await kube.delete(PODS, one["metadata"]["name"], namespace, grace=0)
    for of in (NODES, GPU_NODES, NODE_EVIDENCES):
        if await kube.find(of, NODE) is not None:
            await delete_without_finalizers(kube, of, NODE)
    for event in await kube.list(EVENTS, "default"):
        if event["involvedObject"]["name"] == NODE:
            with suppress(ApiError):
                await kube.delete(EVENTS, event["metadata"]["name"], "default")


@pytest.mark.defect("extender-6")
@pytest.mark.parametrize("harness", ["report"], indirect=True)
async def test_evidence_loss_is_reported_on_the_node_the_pod_and_its_owner(harness: Harness) -> None:
    await harness.kube.create(DEPLOYMENTS, deployment("train", 1, 1, ASKING), harness.namespace)
    (running,) = await pods_in_phase(harness.kube, harness.namespace, 1, "Running")
    await harness.withdrawn()
    (change,) = await harness.wait_for_events("EvidenceChanged", "Node")
    assert change["message"].startswith(f"evidence was fresh as {HASH}, is absent")
    assert change["type"] == "Warning"
    (loss,) = await harness.wait_for_events("EvidenceLost", "Pod")
    assert loss["involvedObject"]["uid"] == running["metadata"]["uid"]
    (owners,) = await harness.wait_for_events("EvidenceLost", "ReplicaSet")
    assert owners["involvedObject"]["uid"] == running["metadata"]["ownerReferences"][0]["uid"]
    assert owners["message"].startswith(f"pod {running['metadata']['name']}: ")
    await harness.proven()
    (back,) = [one for one in await harness.wait_for_events("EvidenceChanged", "Node", 2) if one["type"] == "Normal"]
    assert back["message"].startswith(f"evidence was absent, is fresh as {HASH}")
    assert await harness.taints() == []
    (still,) = await pods_in_phase(harness.kube, harness.namespace, 1, "Running")
    assert still["metadata"]["uid"] == running["metadata"]["uid"]


@pytest.mark.parametrize("harness", ["taint"], indirect=True)
async def test_node_is_tainted_until_its_evidence_returns_and_other_taints_stay(harness: Harness) -> None:
    await harness.runs(asking("train"))
    theirs = taint("theirs")
    found = await harness.kube.get(NODES, NODE)
    others = [one for one in found["spec"].get("taints", []) if one["key"] != "theirs"]
    await harness.kube.patch(NODES, NODE, {"spec": {"taints": [*others, theirs]}})
    await harness.withdrawn()
    await wait_until(harness.taints, lambda taints: taints == [theirs, taint("gpuwarden.io/evidence-lost")])
    await harness.proven()
    await wait_until(harness.taints, lambda taints: taints == [theirs])
    await pod_in_phase(harness.kube, harness.namespace, "train", "Running")


@pytest.mark.parametrize("harness", ["evict"], indirect=True)
async def test_pod_is_evicted_after_evidence_expires_within_its_disruption_budget(harness: Harness) -> None:
    await harness.runs(asking("train", {"app": "train"}))
    await harness.runs(asking("unguarded", gpus=0))  # requires a proven node and has no GPU
    selector = {"matchLabels": {"app": "train"}}
    budget = {"metadata": {"name": "train"}, "spec": {"minAvailable": 1, "selector": selector}}
    await harness.kube.create(BUDGETS, budget, harness.namespace)
    await wait_until(
        lambda: harness.kube.get(BUDGETS, "train", harness.namespace),
        lambda one: one.get("status", {}).get("currentHealthy") == 1,
    )
    await harness.proven(timedelta(seconds=1))
    await gone(harness.kube, PODS, "unguarded", harness.namespace)
    await harness.wait_for_log("disruption budget")
    train = await harness.kube.get(PODS, "train", harness.namespace)
    assert "deletionTimestamp" not in train["metadata"]
    await harness.kube.patch(BUDGETS, "train", {"spec": {"minAvailable": 0}}, harness.namespace)
    await gone(harness.kube, PODS, "train", harness.namespace)
    wait_for_events = await harness.wait_for_events("EvidenceLost", "Pod", 2)
    assert all("stale evidence" in one["message"] for one in wait_for_events)
