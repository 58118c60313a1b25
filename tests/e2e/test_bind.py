"""The scheduler behind `schedulerName: gpu-scheduler` on a real control plane: real controllers, real refusals."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define, evolve

from bench import bind
from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from scripts.controlplane.components import API_SERVER
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLAIMS,
    EVENTS,
    NODES,
    PATIENCE,
    PODS,
    STATEFUL_SETS,
    STORAGE_CLASSES,
    VOLUMES,
    ApiError,
    Kube,
    Raw,
    Resource,
    gone,
    pod,
    stateful_set,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, site
from tests.e2e.test_ledger import GPU_NODES
from tests.running import GPUWARDEN, Running, reconciling
from webhook.core import keys
from webhook.core.reservation import PodIdentity
from webhook.kube.client import connect
from webhook.runtime.settings import Settings
from webhook.scheduler.api import ApiBindings
from webhook.scheduler.binder_volumes import SELECTED_NODE
from webhook.scheduler.extender import BindingRefusedError

LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
OURS = "gpu-scheduler"
NAMES = ("bind-0", "bind-1")
# What is promised of a world that changes: the pod is on its node within this, on a machine that does little else.
SOON = 2.0
CPUS = "4"
COUNTED = (
    'gpuwarden_bindings_total{outcome="bound"}',
    'gpuwarden_bindings_total{outcome="no_node"}',
    'gpuwarden_events_total{reason="FailedScheduling"}',
    'gpuwarden_events_total{reason="Scheduled"}',
)


@contextmanager
def binding(directory: Path, kubeconfig: Path, lease_namespace: str, *flags: str) -> Iterator[Running]:
    """A `gpuwarden bind` that is ready; killed at the end if the test has not stopped it."""
    directory.mkdir()
    own = ["--kubeconfig", str(kubeconfig), "--lease-namespace", lease_namespace, "--ui-port", "0"]
    with reconciling(directory, [*own, *flags], "bind") as running:
        yield running


@define(eq=False)
class Harness:
    """Two nodes of the test's own, a namespace, and a scheduler that is elected."""

    kube: Kube
    namespace: str
    running: Running

    async def create(self, name: str, cpu: str = "", labels: Raw | None = None, **spec: Any) -> Raw:
        """A pod that fits on the nodes of this test alone, if it does not say where it wants to go."""
        content = pod(name, **{"schedulerName": OURS, "nodeSelector": {"bind": "yes"}, **spec})
        content["metadata"]["labels"] = labels or {}
        if cpu:
            content["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
        return await self.kube.create(PODS, content, self.namespace)

    async def node_of(self, name: str) -> str | None:
        node: str | None = (await self.kube.get(PODS, name, self.namespace))["spec"].get("nodeName")
        return node

    async def is_on(self, name: str, node: str | None = None, seconds: float = PATIENCE) -> str:
        found = await wait_until(lambda: self.node_of(name), lambda on: on is not None, seconds)
        assert found is not None
        assert node in (None, found)
        return found

    async def on_nodes(self) -> int:
        return sum(map(bound, await self.kube.list(PODS, self.namespace)))

    async def waits(self, name: str, *words: str) -> str:
        """Until an event says so, and the pod's condition; it has no node then."""

        async def told() -> str:
            selector = f"involvedObject.name={name},reason=FailedScheduling"
            found = await self.kube.list(EVENTS, self.namespace, fieldSelector=selector)
            return "\n".join(one["message"] for one in found)

        async def condition() -> str:
            found = (await self.kube.get(PODS, name, self.namespace))["status"].get("conditions", ())
            return "\n".join(one.get("message", "") for one in found if one.get("reason") == "Unschedulable")

        await wait_until(condition, lambda text: all(word in text for word in words))
        said = await wait_until(told, lambda text: all(word in text for word in words))
        assert await self.node_of(name) is None
        return said

    async def metrics(self) -> dict[str, float]:
        """What has been counted so far, by outcome and by event."""
        async with httpx.AsyncClient(base_url=self.running.urls["http"], trust_env=False) as client:
            text = (await client.get("/metrics")).raise_for_status().text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(found.get(name, 0)) for name in COUNTED}

    async def patch_node(self, name: str, **spec: Any) -> None:
        await self.kube.patch(NODES, name, {"spec": spec})

    def log(self) -> str:
        return self.running.log.read_text()


@pytest.fixture(scope="module")
def binder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests but those that harm it."""
    crds = subprocess.run([GPUWARDEN, "crds"], check=True, capture_output=True).stdout
    subprocess.run([*cluster.kubectl, "apply", "-f", "-"], input=crds, check=True, capture_output=True)
    with binding(tmp_path_factory.mktemp("binder") / "bind", cluster.kubeconfig, "default") as running:
        yield running
    with cluster.api() as api:
        # Killed as it is in the end, it would be waited for by the next.
        api.delete("/apis/coordination.k8s.io/v1/namespaces/default/leases/gpuwarden-bind")


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, binder: Running) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(removed, kube)
        nodes = [node_object(name, 0, cpu=CPUS, bind="yes") for name in NAMES]
        await asyncio.to_thread(cluster.add_nodes, nodes)
        namespace = await stack.enter_async_context(new_namespace(kube))
        stack.push_async_callback(cleared, kube, namespace)
        yield Harness(kube, namespace, binder)


async def removed(kube: Kube) -> None:
    for name in NAMES:
        with suppress(ApiError):
            await kube.delete(NODES, name)


async def cleared(kube: Kube, namespace: str) -> None:
    for one in await kube.list(PODS, namespace):
        with suppress(ApiError):
            await kube.delete(PODS, one["metadata"]["name"], namespace)
    await wait_until(lambda: kube.list(PODS, namespace), lambda pods: not pods)


@pytest.mark.defect("S1-1")
async def test_pods_in_a_row_are_bound_without_delay(harness: Harness, request: pytest.FixtureRequest) -> None:
    """The answer to a Binding is a Status, and that is a success."""
    await harness.create("first")
    await harness.is_on("first")  # elected by now
    taken = []
    for number in range(6):
        started = time.monotonic()
        await harness.create(f"p{number}")
        await harness.is_on(f"p{number}")
        taken.append(time.monotonic() - started)
    report_figures(request, slowest=max(taken))
    assert sum(taken) < 6 * SOON
    assert "a binding failed" not in harness.log()
    assert harness.running.process.poll() is None


@pytest.mark.defect("S1-6")
async def test_a_node_that_is_labelled_later_is_used_within_moments(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    await harness.create("late", nodeSelector={"gpu-hall": "north"})
    await harness.waits("late", "not selected by the pod")
    started = time.monotonic()
    await harness.kube.patch(NODES, "bind-1", {"metadata": {"labels": {"gpu-hall": "north"}}})
    await harness.is_on("late", "bind-1")
    report_figures(request, seconds=time.monotonic() - started)
    assert time.monotonic() - started < SOON


UNFIT: dict[str, tuple[Raw, Raw, str]] = {
    "cordoned": ({"unschedulable": True}, {"unschedulable": None}, "cordoned"),
    "tainted": (
        {"taints": [{"key": "team", "value": "blue", "effect": "NoSchedule"}]},
        {"taints": None},
        "with a taint that the pod does not tolerate",
    ),
}


@pytest.mark.defect("S1-8")
@pytest.mark.defect("S1-20")
@pytest.mark.parametrize(("hurt", "heal", "words"), UNFIT.values(), ids=UNFIT)
async def test_a_pod_waits_with_an_event_until_its_node_is_fit(
    harness: Harness, hurt: Raw, heal: Raw, words: str
) -> None:
    before = await harness.metrics()
    await harness.patch_node("bind-0", **hurt)
    await harness.create("hurt", nodeSelector={"kubernetes.io/hostname": "bind-0"})
    assert f"1 {words}" in await harness.waits("hurt", words)
    await harness.patch_node("bind-0", **heal)
    started = time.monotonic()
    await harness.is_on("hurt", "bind-0")
    assert time.monotonic() - started < SOON
    await wait_until(harness.metrics, lambda after: all(after[name] > before[name] for name in COUNTED))


@pytest.mark.defect("S1-8")
async def test_a_pod_waits_for_a_node_that_is_not_ready(harness: Harness) -> None:
    ready = "kubelet.test/ready"
    await harness.kube.patch(NODES, "bind-0", {"metadata": {"annotations": {ready: "false"}}})

    async def is_ready() -> bool:
        found = (await harness.kube.get(NODES, "bind-0"))["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in found)

    await wait_until(is_ready, lambda found: not found)
    await harness.create("early", nodeSelector={"kubernetes.io/hostname": "bind-0"})
    await harness.waits("early", "1 not ready")
    await harness.kube.patch(NODES, "bind-0", {"metadata": {"annotations": {ready: None}}})
    await harness.is_on("early", "bind-0")


@pytest.mark.defect("S1-8")
async def test_a_full_node_takes_the_next_pod_when_one_has_ended(harness: Harness) -> None:
    here = {"nodeSelector": {"kubernetes.io/hostname": "bind-0"}}
    for number in range(2):
        await harness.create(f"big-{number}", cpu="2", **here)
        await harness.is_on(f"big-{number}", "bind-0")
    await harness.create("next", cpu="1", **here)
    await harness.waits("next", "1 with too little cpu")
    await harness.kube.delete(PODS, "big-0", harness.namespace)
    await gone(harness.kube, PODS, "big-0", harness.namespace)
    started = time.monotonic()
    await harness.is_on("next", "bind-0")
    assert time.monotonic() - started < SOON


async def test_many_pods_at_once_never_overfill_a_node(harness: Harness) -> None:
    """Between a binding and the watch that tells of it, the room is taken all the same."""
    await asyncio.gather(*(harness.create(f"p{number}", cpu="1") for number in range(12)))

    async def placed() -> list[str]:
        return [one["spec"]["nodeName"] for one in await harness.kube.list(PODS, harness.namespace) if bound(one)]

    await wait_until(placed, lambda nodes: len(nodes) == 8)
    left = [one for one in await harness.kube.list(PODS, harness.namespace) if not bound(one)]
    for one in left:
        await harness.waits(one["metadata"]["name"], "2 with too little cpu")
    found = await placed()
    assert {name: found.count(name) for name in NAMES} == {"bind-0": 4, "bind-1": 4}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod_term(labels: Raw, **members: Any) -> Raw:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname", **members}


async def test_pods_that_stand_keep_others_away_whoever_put_them_there(harness: Harness) -> None:
    """The terms are read as the API server shows them: with `matchLabelKeys` written into the selector."""
    mine = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": harness.namespace}}}
    term = pod_term({"app": "web"}, matchLabelKeys=["rev"], **mine)
    here = {"kubernetes.io/hostname": NAMES[0]}
    lone: Raw = {"schedulerName": "default-scheduler", "affinity": {"podAntiAffinity": {REQUIRED: [term]}}}
    await harness.create("lone", labels={"rev": "1"}, nodeSelector=here, **lone)
    await harness.is_on("lone", NAMES[0])
    for number in range(2):
        await harness.create(f"web-{number}", labels={"app": "web", "rev": "1"})
        await harness.is_on(f"web-{number}", NAMES[1])
    await harness.create("another", labels={"app": "web", "rev": "2"}, nodeSelector=here)
    await harness.is_on("another", NAMES[0])
    await harness.create("kept-away", labels={"app": "web", "rev": "1"}, nodeSelector=here)
    await harness.waits("kept-away", "1 ruled out by the anti-affinity of a pod that is there")
    await harness.kube.delete(PODS, "lone", harness.namespace)
    await harness.is_on("kept-away", NAMES[0])


async def test_pods_avoid_and_join_each_other(harness: Harness) -> None:
    apart = {"podAntiAffinity": {REQUIRED: [pod_term({"app": "web"})]}}
    for number in range(3):
        await harness.create(f"web-{number}", labels={"app": "web"}, affinity=apart)
    await wait_until(harness.on_nodes, lambda count: count == 2)
    waits, *others = sorted(await harness.kube.list(PODS, harness.namespace), key=bound)
    await harness.waits(waits["metadata"]["name"], "2 ruled out by the pod's own anti-affinity")
    assert {one["spec"]["nodeName"] for one in others} == set(NAMES)
    beside = {"podAffinity": {REQUIRED: [pod_term({"app": "db"})]}}
    await harness.create("reader", affinity=beside)
    await harness.waits("reader", "2 ruled out by the pod's own affinity to pods")
    await harness.create("db", labels={"app": "db"}, affinity=beside)  # the first of those that join each other
    node = await harness.is_on("db")
    await harness.is_on("reader", node)


def bound(raw: Raw) -> bool:
    return bool(raw["spec"].get("nodeName"))


@pytest.mark.defect("S1-8")
async def test_gated_and_leaving_pods_are_left_alone(harness: Harness) -> None:
    await harness.create("gated", schedulingGates=[{"name": "example.test/wait"}])
    await harness.patch_node("bind-0", unschedulable=True)
    await harness.patch_node("bind-1", unschedulable=True)
    await harness.create("leaving")
    await harness.waits("leaving", "2 are cordoned")
    name = {"metadata": {"finalizers": ["example.test/held"]}}
    await harness.kube.patch(PODS, "leaving", name, harness.namespace)
    await harness.kube.delete(PODS, "leaving", harness.namespace)
    for node in NAMES:
        await harness.patch_node(node, unschedulable=None)
    await harness.create("other")
    await harness.is_on("other")  # by then the others would be, too
    assert await harness.node_of("gated") is None
    assert await harness.node_of("leaving") is None
    await harness.kube.patch(PODS, "leaving", {"metadata": {"finalizers": None}}, harness.namespace)
    await harness.kube.patch(PODS, "gated", {"spec": {"schedulingGates": None}}, harness.namespace)
    await harness.is_on("gated")
    assert "Binding" not in harness.log()


@pytest.mark.defect("S1-7")
async def test_a_pod_that_is_made_anew_under_its_old_name_is_decided_anew(harness: Harness) -> None:
    await harness.create("twice", nodeSelector={"kubernetes.io/hostname": "bind-0", "free": "yes"})
    await harness.waits("twice", "not selected by the pod")
    await harness.kube.delete(PODS, "twice", harness.namespace)
    await gone(harness.kube, PODS, "twice", harness.namespace)
    await harness.create("twice", nodeSelector={"kubernetes.io/hostname": "bind-1"})
    await harness.kube.patch(NODES, "bind-0", {"metadata": {"labels": {"free": "yes"}}})
    await harness.is_on("twice", "bind-1")


@pytest.mark.defect("S1-7")
async def test_a_binding_is_of_this_very_pod_as_it_was_seen(harness: Harness, cluster: Cluster) -> None:
    meta = (await harness.create("very", schedulerName="nobody"))["metadata"]
    very, version = PodIdentity(harness.namespace, "very", meta["uid"]), meta["resourceVersion"]
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        bindings = ApiBindings(api)
        for one, seen in ((evolve(very, uid="of-the-one-before"), version), (very, "1")):
            with pytest.raises(BindingRefusedError) as refused:
                await bindings.bind(one, "bind-0", seen)
            assert refused.value.is_race
        assert await harness.node_of("very") is None
        await bindings.bind(very, "bind-0", version)
    assert await harness.node_of("very") == "bind-0"


@pytest.mark.defect("S1-4")
@pytest.mark.defect("S1-5")
async def test_a_pod_with_a_map_that_no_review_has_seen_is_put_nowhere_and_told_why(harness: Harness) -> None:
    """Neither by the number at the end of its name, nor by chance."""
    content = pod("app-7c9d-12345", annotations={"gpu-scheduling-map": "12345=bind-0:0"}, schedulerName=OURS)
    await harness.kube.create(PODS, content, harness.namespace)
    await harness.waits("app-7c9d-12345", "the pod has no ordinal: no StatefulSet owns it")
    content = pod("asks", gpus=1, schedulerName=OURS)
    await harness.kube.create(PODS, content, harness.namespace)
    await harness.waits("asks", "gpuwarden.io/enabled=true")


async def test_a_pod_of_another_scheduler_is_left_to_it(harness: Harness) -> None:
    content = pod("theirs", schedulerName="somebody-elses")
    await harness.kube.create(PODS, content, harness.namespace)
    await harness.create("ours")
    await harness.is_on("ours")
    assert await harness.node_of("theirs") is None


# With the webhook in front: GPUs are reserved.


@pytest.fixture
async def gpu_site(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    async with site(cluster, kube, tmp_path, nodes=2, gpus=4, name="binder", replicas=1) as here:
        await here.wait_until_offered()
        yield here


def set_of(name: str, replicas: int, gpus: int) -> Raw:
    content = stateful_set(name, replicas, gpus)
    content["spec"]["template"]["spec"]["schedulerName"] = OURS
    content["spec"]["podManagementPolicy"] = "Parallel"
    return content


async def test_pods_with_gpus_are_put_where_their_gpus_are(
    gpu_site: Site, kube: Kube, binder: Running, storage: str
) -> None:
    there = Harness(kube, gpu_site.namespace, binder)
    await pods_wait_for_their_own_node(there)
    await a_pod_with_gpus_has_its_volume_made_where_they_are(there, storage)
    await a_reservation_that_was_taken_away_leads_nowhere(there)
    await gpu_site.reconciler()
    await a_stateful_set_has_all_its_gpus_and_gets_them_back(gpu_site, there)
    gpu_site.checker.assert_no_violations()


async def pods_wait_for_their_own_node(there: Harness) -> None:
    made = await there.kube.create(PODS, pod("held", gpus=1), there.namespace, dryRun="All")
    node = made["metadata"]["annotations"][keys.NODE.name]
    gated = pod("held", gpus=1, schedulerName=OURS, schedulingGates=[{"name": "example.test/wait"}])
    gated["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    await there.kube.create(PODS, gated, there.namespace)
    await there.patch_node(node, unschedulable=True)
    await there.kube.patch(PODS, "held", {"spec": {"schedulingGates": None}}, there.namespace)
    await there.waits("held", f"the pod's GPUs are on node {node}, which is cordoned")
    await there.patch_node(node, unschedulable=None)
    await there.is_on("held", node)


async def a_pod_with_gpus_has_its_volume_made_where_they_are(there: Harness, storage: str) -> None:
    kube, namespace = there.kube, there.namespace
    await kube.create(
        CLAIMS, {"metadata": {"name": "data"}, "spec": {**ONE_GI, "storageClassName": storage}}, namespace
    )
    made = await kube.create(PODS, pod("writes", gpus=1, schedulerName=OURS, volumes=[DATA]), namespace)
    node = made["metadata"]["annotations"][keys.NODE.name]
    assert await selected(kube, namespace) == node
    assert await there.node_of("writes") is None
    volume = await provisioned(kube, namespace, storage, node)
    try:
        await there.is_on("writes", node, seconds=2 * PATIENCE)
    finally:
        await kube.delete(VOLUMES, volume)


async def a_reservation_that_was_taken_away_leads_nowhere(there: Harness) -> None:
    gated = pod("robbed", gpus=1, schedulerName=OURS, schedulingGates=[{"name": "example.test/wait"}])
    made = await there.kube.create(PODS, gated, there.namespace)
    await taken_away(there.kube, made["metadata"]["annotations"])
    await there.kube.patch(PODS, "robbed", {"spec": {"schedulingGates": None}}, there.namespace)
    assert "NotReserved" in await there.waits("robbed", "create the pod again")


async def a_stateful_set_has_all_its_gpus_and_gets_them_back(gpu_site: Site, there: Harness) -> None:
    kube = there.kube
    await cleared(kube, there.namespace)
    await wait_until(gpu_site.held, lambda held: not held)
    await kube.create(STATEFUL_SETS, set_of("train", 4, 2), there.namespace)

    async def running() -> list[Raw]:
        return [one for one in await kube.list(PODS, there.namespace) if one["status"]["phase"] == "Running"]

    found = await wait_until(running, lambda pods: len(pods) == 4)
    for one in found:
        assert one["spec"]["nodeName"] == one["metadata"]["annotations"][keys.NODE.name]
    assert gpu_site.checker.gpus == gpu_site.gpus
    before = {one["metadata"]["uid"] for one in found}
    await kube.delete(PODS, "train-0", there.namespace)
    again = await wait_until(
        running, lambda pods: len(pods) == 4 and {one["metadata"]["uid"] for one in pods} != before, 2 * PATIENCE
    )
    assert {one["metadata"]["name"] for one in again} == {f"train-{number}" for number in range(4)}


async def taken_away(kube: Kube, annotations: Raw) -> None:
    """By a hand that goes round us: marked first, as the object's own rules demand."""
    reservation, node = annotations[keys.RESERVATION_ID.name], annotations[keys.NODE.name]
    raw = await kube.get(GPU_NODES, node)
    held = raw["status"]["held"]
    (slot,) = [slot for slot, entry in held.items() if entry["reservation"] == reservation]
    path = "/status/held/" + slot.replace("~", "~0").replace("/", "~1")
    marked = [{"op": "replace", "path": f"{path}/phase", "value": "releasing"}]
    await kube.patch(GPU_NODES, node, marked, subresource="status")
    await kube.patch(GPU_NODES, node, [{"op": "remove", "path": path}], subresource="status")


# Two of them, and an API server that goes away.


@pytest.mark.defect("S1-11")
async def test_of_two_one_binds_and_the_other_takes_over_when_it_is_killed(
    harness: Harness, cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kube, namespace = harness.kube, harness.namespace
    # Of a name of their own, so that the one that serves the other tests leaves their pods alone.
    theirs: Raw = {"schedulerName": "one-of-two"}
    flags = ("--scheduler-name", "one-of-two")

    async def holder() -> str:
        lease = await kube.find(LEASES, "gpuwarden-bind", namespace)
        return str(lease and lease["spec"].get("holderIdentity", ""))

    with (
        binding(tmp_path / "first", cluster.kubeconfig, namespace, *flags) as first,
        binding(tmp_path / "second", cluster.kubeconfig, namespace, *flags) as second,
    ):
        await wait_until(holder, lambda name: f"-{first.process.pid}_" in name)
        creating = asyncio.gather(*(harness.create(f"p{number}", **theirs) for number in range(30)))
        await wait_until(harness.on_nodes, lambda count: count >= 5)
        first.process.kill()
        started = time.monotonic()
        await creating
        await asyncio.gather(*(harness.create(f"p{number}", **theirs) for number in range(30, 40)))
        await wait_until(harness.on_nodes, lambda count: count == 40, seconds=2 * PATIENCE)
        report_figures(request, seconds_after_the_kill=time.monotonic() - started)
        assert f"-{second.process.pid}_" in await holder()
    events = await kube.list(EVENTS, namespace, fieldSelector="reason=Scheduled")
    names = [one["involvedObject"]["name"] for one in events]
    assert len(names) == len(set(names))


@pytest.mark.defect("S1-10")
async def test_an_api_server_that_is_gone_or_silent_makes_it_unready(harness: Harness, cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=harness.running.urls["http"], trust_env=False) as client:

        async def status(path: str) -> tuple[int, str]:
            got = await client.get(path)
            return got.status_code, got.json()["status"]

        assert (await client.get("/health")).json() == {"status": "healthy", "service": "gpu-scheduler"}
        assert (await client.get("/ready")).json() == {"status": "ready", "service": "gpu-scheduler"}
        assert await status("/readyz") == (200, "ready")
        cluster.pause(API_SERVER)
        try:
            started = time.monotonic()
            await wait_until(lambda: status("/ready"), lambda got: got == (503, "cut off"))
            assert time.monotonic() - started < 15
            assert await status("/health") == (200, "healthy")
        finally:
            cluster.resume(API_SERVER)
        await wait_until(lambda: status("/ready"), lambda got: got == (200, "ready"))
    await harness.create("after")
    await harness.is_on("after")


async def test_a_pod_waits_for_its_claim_and_goes_where_the_volume_is(harness: Harness) -> None:
    """The cluster's own controller binds the claim, to a volume that comes later."""
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    name = f"of-{harness.namespace}"
    await harness.kube.create(
        CLAIMS, {"metadata": {"name": "data"}, "spec": claim | {"volumeName": name}}, harness.namespace
    )
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    await harness.create("writer", volumes=[volume])
    await harness.waits("writer", "the pod's claim data is not bound to a volume")
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NAMES[1]]}
    spec = {
        "accessModes": claim["accessModes"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/data"},
        "claimRef": {"namespace": harness.namespace, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
    }
    await harness.kube.create(VOLUMES, {"metadata": {"name": name}, "spec": spec})
    try:
        # The cluster's controller may look again after 15 s only, and we after twice that.
        await harness.is_on("writer", NAMES[1], seconds=2 * PATIENCE)
    finally:
        await harness.kube.delete(VOLUMES, name)


@pytest.fixture
async def storage(kube: Kube) -> AsyncIterator[str]:
    """A StorageClass whose volumes are made once a node is chosen, by nobody but a test."""
    name = f"made-by-hand-{time.monotonic_ns()}"
    made = {"provisioner": "csi.example.test", "volumeBindingMode": "WaitForFirstConsumer"}
    await kube.create(STORAGE_CLASSES, {"metadata": {"name": name}, **made})
    yield name
    await kube.delete(STORAGE_CLASSES, name)


ONE_GI: Raw = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


async def selected(kube: Kube, namespace: str, but: str = "") -> str:
    """The node that the claim's volume is to be made for, when it is another than that one."""

    async def node() -> str | None:
        found = (await kube.get(CLAIMS, "data", namespace))["metadata"].get("annotations", {}).get(SELECTED_NODE)
        return str(found) if found else None

    chosen = await wait_until(node, lambda name: name not in (None, but))
    assert chosen is not None
    return chosen


async def provisioned(kube: Kube, namespace: str, storage: str, node: str) -> str:
    """What an external provisioner does: a volume that can be had on that node. The cluster's controller binds it."""
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "storageClassName": storage,
        "csi": {"driver": "csi.example.test", "volumeHandle": "h"},
        "claimRef": {"namespace": namespace, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
    }
    name = f"made-for-{namespace}"
    await kube.create(VOLUMES, {"metadata": {"name": name}, "spec": spec})
    return name


DATA: Raw = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}


async def test_a_volume_is_made_for_the_node_of_a_pod_or_for_another_and_blocks_nobody(
    harness: Harness, storage: str, request: pytest.FixtureRequest
) -> None:
    kube, namespace = harness.kube, harness.namespace
    await kube.create(
        CLAIMS, {"metadata": {"name": "data"}, "spec": {**ONE_GI, "storageClassName": storage}}, namespace
    )
    await harness.create("writer", cpu="3", volumes=[DATA])
    first = await selected(kube, namespace)
    await harness.create("other", cpu="3")  # which has no room beside the pod that waits
    await harness.is_on("other", next(name for name in NAMES if name != first))
    await harness.kube.delete(PODS, "other", namespace)
    await gone(kube, PODS, "other", namespace)
    # As a provisioner that has no room there: https://github.com/kubernetes-csi/external-provisioner
    await kube.patch(CLAIMS, "data", {"metadata": {"annotations": {SELECTED_NODE: None}}}, namespace)
    second = await selected(kube, namespace, but=first)
    assert await harness.node_of("writer") is None
    started = time.monotonic()
    volume = await provisioned(kube, namespace, storage, second)
    try:
        await harness.is_on("writer", second, seconds=2 * PATIENCE)
        report_figures(request, seconds_after_the_volume=time.monotonic() - started)
        events = await kube.list(EVENTS, namespace, fieldSelector="involvedObject.name=writer,reason=FailedScheduling")
        assert events == []
    finally:
        await kube.delete(VOLUMES, volume)


async def test_a_volume_that_nobody_makes_is_said_to_be(harness: Harness, storage: str) -> None:
    name = f"{storage}-static"
    made = {"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"}
    await harness.kube.create(STORAGE_CLASSES, {"metadata": {"name": name}, **made})
    try:
        spec = {**ONE_GI, "storageClassName": name}
        await harness.kube.create(CLAIMS, {"metadata": {"name": "data"}, "spec": spec}, harness.namespace)
        await harness.create("writer", volumes=[DATA])
        await harness.waits(
            "writer", "the pod's claim data is not bound to a volume, and never is under this scheduler"
        )
    finally:
        await harness.kube.delete(STORAGE_CLASSES, name)


@pytest.mark.defect("S1-9")
async def test_nodes_are_listed_once_however_many_pods_are_bound(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The short form of `bench/bind.py`. The rate is told; on a machine that does other things it proves little."""
    found = await asyncio.to_thread(bind.run, bind.SHORT, tmp_path)
    report_figures(request, **{name.replace("-", "_"): rate for name, rate in found["bound_per_s"].items()})
    assert found["requests_a_run"]["list nodes"] <= found["requests_a_run"]["watch nodes"]
