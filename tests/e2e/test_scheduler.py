"""The kube-scheduler that the chart runs: what a scheduler does, it does for pods with placement maps. It is healthy
only while it works. Without webhooks maps lead to nodes all the same."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from scripts.controlplane.components import API_SERVER
from tests.chart.rendering import one
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLAIMS,
    EVENTS,
    NODES,
    PATIENCE,
    PODS,
    ROLES,
    STORAGE_CLASSES,
    VOLUMES,
    ApiError,
    Kube,
    Raw,
    Resource,
    gone,
    pod,
    wait_until,
)
from tests.e2e.processes import Site, site
from tests.e2e.profile import LEASE, OURS, Profile, Scheduler, certified, profile
from webhook.core import keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRIORITIES = Resource("apis/scheduling.k8s.io/v1", "priorityclasses", is_namespaced=False)
NODE, OTHER, BARE = "sched-0", "sched-1", "sched-bare"
GPU = f"GPU-{NODE}-0"
MANY = 40
# Of a busy machine.
SLACK = 8.0
HERE = {"kubernetes.io/hostname": NODE}
SELECTED_NODE = "volume.kubernetes.io/selected-node"
DATA: Raw = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}


def needing(content: Raw, cpu: str) -> Raw:
    content["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    return content


def mapped(name: str, text: str = f"0={NODE}:{GPU}", ordinal: int = 0, **spec: Any) -> Raw:
    """One of a StatefulSet, as its controller makes it. It asks for no resource: the map says it all."""
    content = pod(name, annotations={"gpu-scheduling-map": text}, schedulerName=OURS, **spec)
    content["metadata"]["labels"] = {keys.POD_INDEX_LABEL: str(ordinal), "app": name}
    return content


def plain(name: str, **spec: Any) -> Raw:
    return pod(name, schedulerName=OURS, nodeSelector=HERE, **spec)


@frozen(eq=False)
class Stage:
    """A site with a scheduler."""

    kube: Kube
    here: Site
    profile: Profile
    scheduler: Scheduler

    async def create(self, content: Raw, namespace: str = "") -> Raw:
        return await self.kube.create(PODS, content, namespace or self.here.namespace)

    async def is_on(self, name: str, node: str, namespace: str = "", seconds: float = PATIENCE) -> None:
        where = namespace or self.here.namespace
        await wait_until(
            lambda: self.kube.get(PODS, name, where), lambda seen: seen["spec"].get("nodeName") == node, seconds
        )

    async def waits(self, name: str, words: str, namespace: str = "") -> str:
        """Until an event of its scheduler says so; it has no node then."""
        where = namespace or self.here.namespace

        async def said() -> str:
            selector = f"involvedObject.name={name},reason=FailedScheduling"
            found = await self.kube.list(EVENTS, where, fieldSelector=selector)
            return "\n".join(str(one.get("message") or one.get("note")) for one in found)

        text = await wait_until(said, lambda seen: words in seen, 2 * PATIENCE)
        assert "nodeName" not in (await self.kube.get(PODS, name, where))["spec"]
        return text

    async def ends(self, name: str) -> None:
        await self.kube.delete(PODS, name, self.here.namespace)
        await gone(self.kube, PODS, name, self.here.namespace)

    async def health(self) -> tuple[int, str]:
        async with httpx.AsyncClient(base_url=self.here.replicas[0].urls["http"], trust_env=False) as client:
            found = await client.get("/health")
            assert found.json()["service"] == "gpu-scheduler"
            return found.status_code, found.json()["status"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def company(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    directory = tmp_path_factory.mktemp("sched")
    async with (
        Kube(cluster.kubeconfig) as kube,
        site(cluster, kube, directory, nodes=2, gpus=2, name="sched", flags=certified(directory)) as here,
    ):
        here.flags += ("--lease-namespace", here.own_namespace)
        await here.replica()
        await here.reconciler()
        await here.wait_until_offered()
        with profile(cluster, here.own_namespace, directory) as schedulers:
            yield Stage(kube, here, schedulers, schedulers.start(here.replicas[0].urls["scheduler"]))


@pytest_asyncio.fixture(loop_scope="module")
async def stage(company: Stage) -> AsyncIterator[Stage]:
    yield company
    kube, namespace = company.kube, company.here.namespace
    await company.here.free_all()
    await wait_until(lambda: kube.list(PODS, namespace), lambda pods: not pods, 2 * PATIENCE)
    for claim in await kube.list(CLAIMS, namespace):
        await kube.delete(CLAIMS, claim["metadata"]["name"], namespace)
        await gone(kube, CLAIMS, claim["metadata"]["name"], namespace)
    company.here.checker.assert_no_violations()


# What a scheduler does.


async def test_a_pod_of_less_priority_makes_room_for_a_mapped_one(stage: Stage) -> None:
    name = f"urgent-{stage.here.namespace}"
    await stage.kube.create(PRIORITIES, {"metadata": {"name": name}, "value": 1000})
    try:
        await stage.create(needing(plain("filler"), "60"))
        await stage.is_on("filler", NODE)
        await stage.create(needing(mapped("train-0", priorityClassName=name), "60"))
        await stage.is_on("train-0", NODE, seconds=2 * PATIENCE)
        await gone(stage.kube, PODS, "filler", stage.here.namespace)
    finally:
        await stage.kube.delete(PRIORITIES, name)


async def test_a_mapped_pod_keeps_its_topology_spread(stage: Stage) -> None:
    first = plain("first")
    first["metadata"]["labels"] = {"app": "train-0"}
    await stage.create(first)
    await stage.is_on("first", NODE)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "train-0"}},
        # All nodes count, and not the one alone that the map leads to.
        "nodeAffinityPolicy": "Ignore",
    }
    await stage.create(mapped("train-0", topologySpreadConstraints=[spread]))
    await stage.waits("train-0", "didn't match pod topology spread constraints")
    await stage.ends("first")
    await stage.is_on("train-0", NODE)


async def volume(kube: Kube, namespace: str, storage: str, mode: str) -> str:
    """What a provisioner makes for the claim, on the node of the map."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]}
    spec = {
        "accessModes": [mode],
        "capacity": {"storage": "1Gi"},
        "storageClassName": storage,
        "csi": {"driver": "csi.example.test", "volumeHandle": "h"},
        "claimRef": {"namespace": namespace, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    name = f"made-for-{namespace}"
    await kube.create(VOLUMES, {"metadata": {"name": name}, "spec": spec})
    return name


def claim(storage: str, mode: str) -> Raw:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": storage}
    return {"metadata": {"name": "data"}, "spec": spec}


async def test_a_volume_that_waits_for_its_first_consumer_is_made_on_the_node_of_the_map(stage: Stage) -> None:
    kube, namespace = stage.kube, stage.here.namespace
    storage = f"late-{namespace}"
    late = {"provisioner": "csi.example.test", "volumeBindingMode": "WaitForFirstConsumer"}
    await kube.create(STORAGE_CLASSES, {"metadata": {"name": storage}, **late})
    made = ""
    try:
        await kube.create(CLAIMS, claim(storage, "ReadWriteOnce"), namespace)
        await stage.create(mapped("train-0", volumes=[DATA]))

        async def chosen() -> str | None:
            notes = (await kube.get(CLAIMS, "data", namespace))["metadata"].get("annotations", {})
            node: str | None = notes.get(SELECTED_NODE)
            return node

        assert await wait_until(chosen, lambda node: node is not None) == NODE
        made = await volume(kube, namespace, storage, "ReadWriteOnce")
        # The cluster's controller may look again after 15 s only.
        await stage.is_on("train-0", NODE, seconds=2 * PATIENCE)
    finally:
        await kube.delete(STORAGE_CLASSES, storage)
        if made:
            await kube.delete(VOLUMES, made)


async def test_of_a_claim_that_one_pod_may_use_a_mapped_pod_waits_its_turn(stage: Stage) -> None:
    kube, namespace = stage.kube, stage.here.namespace
    await kube.create(CLAIMS, claim("", "ReadWriteOncePod"), namespace)
    made = await volume(kube, namespace, "", "ReadWriteOncePod")
    try:
        await stage.create(plain("first", volumes=[DATA]))
        await stage.is_on("first", NODE, seconds=2 * PATIENCE)
        await stage.create(mapped("train-0", volumes=[DATA]))
        await stage.waits("train-0", "ReadWriteOncePod")
        await stage.ends("first")
        await stage.is_on("train-0", NODE)
    finally:
        await kube.delete(VOLUMES, made)


@pytest.mark.defect("binder-7")
async def test_a_pod_that_is_made_anew_under_its_old_name_is_placed_anew(stage: Stage) -> None:
    await stage.create(mapped("train-0"))
    await stage.is_on("train-0", NODE)
    await stage.ends("train-0")
    await stage.create(mapped("train-0", f"0={OTHER}:GPU-{OTHER}-1"))
    await stage.is_on("train-0", OTHER)


@pytest.mark.defect("binder-9")
async def test_nodes_are_listed_for_no_pod(stage: Stage) -> None:
    """Neither by kube-scheduler nor by its extender: both watch them."""

    async def lists() -> float:
        text = (await stage.kube.http.get("/metrics")).raise_for_status().text
        found = (line for line in text.splitlines() if line.startswith("apiserver_request_total{"))
        mine = (line for line in found if 'resource="nodes"' in line and 'verb="LIST"' in line)
        return sum(float(line.rpartition(" ")[2]) for line in mine)

    await stage.create(plain("first"))
    await stage.is_on("first", NODE)
    before = await lists()
    names = [f"p{number}" for number in range(MANY)]
    await asyncio.gather(*(stage.create(plain(name)) for name in names))
    for name in names:
        await stage.is_on(name, NODE, seconds=2 * PATIENCE)
    # Whoever else of the rig watches nodes may have begun anew meanwhile.
    assert await lists() - before < MANY / 4


# Without webhooks.


@pytest_asyncio.fixture(loop_scope="module")
async def unreviewed(stage: Stage, cluster: Cluster) -> AsyncIterator[str]:
    """A namespace whose pods no review of ours sees, and a node of whose GPUs nobody has told us."""
    kube = stage.kube
    bare = node_object(BARE, 0, **{keys.LOGICAL_NODE_LABEL: "hall-7"})
    await asyncio.to_thread(cluster.add_nodes, [bare])
    try:
        async with new_namespace(kube) as namespace:
            yield namespace
            for each in await kube.list(PODS, namespace):
                await kube.delete(PODS, each["metadata"]["name"], namespace)
            await wait_until(lambda: kube.list(PODS, namespace), lambda pods: not pods, 2 * PATIENCE)
    finally:
        with suppress(ApiError):
            await kube.delete(NODES, BARE)


@pytest.mark.defect("binder-12")
async def test_without_webhooks_a_map_leads_to_the_node_of_its_line(stage: Stage, unreviewed: str) -> None:
    text = f"0=hall-7:0,1\n1={OTHER}:GPU-{OTHER}-0\n2=hall-7:0\n"
    for ordinal, node in ((0, BARE), (1, OTHER), (2, BARE)):
        made = await stage.create(mapped(f"train-{ordinal}", text, ordinal), unreviewed)
        assert keys.GPU_UUID.name not in made["metadata"]["annotations"]  # nothing is set aside, as the docs say
        await stage.is_on(f"train-{ordinal}", node, unreviewed)


@pytest.mark.defect("binder-6")
async def test_without_webhooks_a_node_that_is_labelled_later_is_used(stage: Stage, unreviewed: str) -> None:
    await stage.create(mapped("train-0", "0=hall-9:0"), unreviewed)
    await stage.waits("train-0", "not selected by the pod", unreviewed)
    await stage.kube.patch(NODES, BARE, {"metadata": {"labels": {keys.LOGICAL_NODE_LABEL: "hall-9"}}})
    await stage.is_on("train-0", BARE, unreviewed)


@pytest.mark.defect("binder-2")
async def test_without_webhooks_an_ordinal_without_a_line_is_an_event(stage: Stage, unreviewed: str) -> None:
    await stage.create(mapped("train-7", "0=hall-7:0\n", 7), unreviewed)
    await stage.waits("train-7", "the placement map has no line for ordinal 7", unreviewed)
    await stage.create(mapped("train-0", "0=hall-7:0\nnonsense\n"), unreviewed)
    await stage.waits("train-0", "line 2", unreviewed)


# Its health. The last test: it takes the Lease away.


@pytest.mark.defect("binder-10")
async def test_it_is_healthy_only_while_it_holds_the_lease_and_upstream_says_otherwise(
    stage: Stage, cluster: Cluster
) -> None:
    await wait_until(stage.health, lambda seen: seen == (200, "healthy"))
    stage.scheduler.process.terminate()
    stage.scheduler.process.wait()
    where = f"the Lease {stage.here.own_namespace}/{LEASE}"
    await wait_until(stage.health, lambda seen: seen == (503, f"{where} is held by no kube-scheduler"))

    await stage.kube.delete(ROLES, LEASE, stage.here.own_namespace)
    forbidden = stage.profile.start(stage.here.replicas[0].urls["scheduler"])

    async def upstream() -> list[int]:
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:  # noqa: S501 - it signs for itself
            base = f"https://127.0.0.1:{forbidden.port}"
            with suppress(httpx.TransportError):
                return [(await client.get(f"{base}/{path}")).status_code for path in ("healthz", "readyz")]
            return []

    await wait_until(upstream, lambda codes: codes == [200, 200])
    await wait_until(lambda: asyncio.to_thread(forbidden.log.read_text), lambda text: "forbidden" in text)
    await stage.create(mapped("train-0"))
    assert (await stage.health())[0] == 503
    assert "nodeName" not in (await stage.kube.get(PODS, "train-0", stage.here.namespace))["spec"]

    role = one(stage.profile.objects, "Role", LEASE)
    await stage.kube.create(ROLES, {**role, "metadata": {"name": LEASE}}, stage.here.own_namespace)
    await wait_until(stage.health, lambda seen: seen == (200, "healthy"), 2 * PATIENCE)
    await stage.is_on("train-0", NODE, seconds=2 * PATIENCE)

    cluster.pause(API_SERVER)
    try:
        started = time.monotonic()
        _, said = await wait_until(stage.health, lambda seen: seen[0] == 503, 2 * PATIENCE)
        assert said.startswith(f"{where} is not renewed")
        # The Lease's duration, a look, and its time limit.
        assert time.monotonic() - started < 15 + 2 + 5 + SLACK
    finally:
        cluster.resume(API_SERVER)
    assert (
        await asyncio.to_thread(forbidden.process.wait, 60) != 0
    )  # who has lost the Lease ends, and its container is restarted
    stage.profile.start(stage.here.replicas[0].urls["scheduler"])
    await wait_until(stage.health, lambda seen: seen == (200, "healthy"), 2 * PATIENCE)
