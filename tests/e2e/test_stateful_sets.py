"""StatefulSets with a placement map, behind the webhook, with the kube-scheduler that gpuwarden runs.

There are three nodes with logical names, two replicas, a reconciler and a scheduler. Each ordinal runs with the GPUs of
its map line, also after its pods, its node or the processes are replaced.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from attrs import define, field

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests.e2e.kube import (
    EVENTS,
    NAMESPACES,
    NODES,
    PATIENCE,
    PODS,
    STATEFUL_SETS,
    ApiError,
    Kube,
    NotInTimeError,
    Raw,
    delete_without_finalizers,
    gone,
    pod,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, site
from tests.e2e.profile import OURS, Profile, Scheduler, certified, profile
from tests.e2e.test_extender import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.test_maps import KEEPS
from tests.e2e.test_queue import gates, wait_for_event
from tests.running import challenging
from webhook.core import claim_keys, keys
from webhook.core.evidence import Evidence
from webhook.evidence.jwt.jwt_svid import SOURCE
from webhook.evidence.node_evidence import new_node_evidence, with_entries
from webhook.runtime.clock import utc_now

pytestmark = pytest.mark.asyncio(loop_scope="module")

SET = "trainer"
HASH = "sha256:aa11"
MAP = "0=node1:1,0\n1=node2:2\n2=node3:0,1,2\n"
INDICES = {0: (1, 0), 1: (2,), 2: (0, 1, 2)}
GPUS = 4
LOGICAL = {"sets-0": "node1", "sets-1": "node2", "sets-2": "node3"}
NAMES = tuple(LOGICAL)
# After a pod is gone its GPUs are released, and the next one waits, is served and bound.
LONG = 2 * PATIENCE
READY, STOPS_AFTER = "kubelet.test/ready", "kubelet.test/stops-after"

# A pod that is deleted by force, or whose node is deleted, keeps its GPUs for its grace period and the margin.
GRACE = 1
# The default grace period.
ORPHANS = ("--max-grace", "30s", "--orphan-margin", "1s")

Place = tuple[str, tuple[str, ...]]
"""A node and some of its GPUs."""


def gpus_of(node: str, *indices: int) -> tuple[str, ...]:
    return tuple(f"GPU-{node}-{k}" for k in indices)


PLACES: Mapping[int, Place] = {n: (NAMES[n], gpus_of(NAMES[n], *INDICES[n])) for n in INDICES}


def mapped_set(name: str = SET, replicas: int = 3, text: str = MAP, asked: Mapping[str, str] | None = None) -> Raw:
    """The containers cover each case of the variable: no `env`, other variables, a value, a reference."""
    containers: list[Raw] = [
        {"name": "bare", "image": "app:1"},
        {"name": "has-env", "image": "app:1", "env": [{"name": "MODE", "value": "x"}]},
        {"name": "has-cuda", "image": "app:1", "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "9"}]},
        {
            "name": "has-reference",
            "image": "app:1",
            "env": [{"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        },
    ]
    template = {
        "metadata": {"labels": {"app": name}, "annotations": {"gpu-scheduling-map": text, **(asked or {})}},
        "spec": {
            "schedulerName": OURS,
            "terminationGracePeriodSeconds": GRACE,
            "initContainers": [{"name": "warm", "image": "app:1"}],
            "containers": containers,
        },
    }
    spec = {
        "replicas": replicas,
        "serviceName": name,
        "selector": {"matchLabels": {"app": name}},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}


def shown(raw: Raw) -> set[tuple[str, ...]]:
    """The variable's value in each container, as a kubelet would compute it; it is set once."""
    annotations = raw["metadata"]["annotations"]
    found = set()
    for container in (*raw["spec"]["initContainers"], *raw["spec"]["containers"]):
        (env,) = [one for one in container["env"] if one["name"] == "CUDA_VISIBLE_DEVICES"]
        assert ("value" in env) != ("valueFrom" in env)
        if "valueFrom" in env:
            path = env["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == f"metadata.annotations['{keys.GPU_UUID.name}']"
            found.add(tuple(annotations[keys.GPU_UUID.name].split(",")))
        else:
            found.add(tuple(env["value"].split(",")))
    return found


def place_of(raw: Raw | None) -> Place | None:
    """The node and the GPUs of a running pod; None unless it runs."""
    if raw is None or raw["status"]["phase"] != "Running" or "deletionTimestamp" in raw["metadata"]:
        return None
    (gpus,) = shown(raw)
    return raw["spec"]["nodeName"], gpus


@define(eq=False)
class Harness:
    """The processes and nodes with one StatefulSet."""

    here: Site
    kube: Kube
    cluster: Cluster
    profile: Profile
    _started: list[Scheduler] = field(factory=list)

    @property
    def namespace(self) -> str:
        return self.here.namespace

    def schedule(self) -> None:
        """Starts another scheduler, which tries to be elected."""
        self._started.append(self.profile.start(self.here.replicas[0].urls["scheduler"]))

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that was started last."""
        return self._started[-1]

    async def create(self, content: Raw) -> None:
        await self.kube.create(STATEFUL_SETS, content, self.namespace)

    async def is_older(self) -> None:
        """Waits until objects created from now on are younger: creation times are in whole seconds."""
        made = await self.kube.get(STATEFUL_SETS, SET, self.namespace)
        created = datetime.fromisoformat(made["metadata"]["creationTimestamp"])
        await wait_until(lambda: asyncio.sleep(0.1, utc_now()), lambda now: now >= created + timedelta(seconds=1))

    async def change(self, name: str = SET, **spec: Any) -> None:
        await self.kube.patch(STATEFUL_SETS, name, {"spec": spec}, self.namespace)

    async def find(self, ordinal: int, name: str = SET) -> Raw | None:
        return await self.kube.find(PODS, f"{name}-{ordinal}", self.namespace)

    async def get(self, ordinal: int, name: str = SET) -> Raw:
        return await self.kube.get(PODS, f"{name}-{ordinal}", self.namespace)

    async def pods(self) -> dict[str, Raw]:
        found = await self.kube.list(PODS, self.namespace)
        return {one["metadata"]["name"]: one for one in found}

    async def uids(self) -> set[str]:
        return {one["metadata"]["uid"] for one in (await self.pods()).values()}

    async def delete(self, ordinal: int, *, force: bool = False, name: str = SET) -> str:
        """Deletes the pod of the ordinal; returns its UID."""
        uid = str((await self.get(ordinal, name))["metadata"]["uid"])
        await self.kube.delete(PODS, f"{name}-{ordinal}", self.namespace, grace=0 if force else None)
        return uid

    async def slow_to_stop(self, ordinal: int, after: str) -> None:
        meta = {"annotations": {STOPS_AFTER: after}}
        await self.kube.patch(PODS, f"{SET}-{ordinal}", {"metadata": meta}, self.namespace)

    async def runs(self, *ordinals: int, name: str = SET, without: Collection[str] = (), seconds: float = LONG) -> None:
        """Waits until each ordinal runs with the GPUs of its map line; no pod has a UID in `without`."""

        async def look() -> dict[int, Any]:
            found = await self.pods()
            there = {n: found.get(f"{name}-{n}") for n in ordinals}
            return {n: place_of(raw) for n, raw in there.items() if raw and raw["metadata"]["uid"] not in without}

        expected = {n: PLACES[n] for n in ordinals}
        await wait_until(look, lambda places: places == expected, seconds)

    async def waits(
        self,
        ordinal: int,
        reason: str,
        words: str = "",
        *,
        name: str = SET,
        without: str = "",
        seconds: float = PATIENCE,
    ) -> Raw:
        """Waits until the pod is gated with the event; it has no GPU then."""

        async def look() -> Raw | None:
            found = await self.find(ordinal, name)
            return found if found and found["metadata"]["uid"] != without else None

        raw = await wait_until(look, lambda found: found and gates(found) == ["gpuwarden.io/queue"], seconds)
        assert raw is not None
        await wait_for_event(self.kube, raw, reason, words)
        after = await self.get(ordinal, name)
        assert gates(after) == ["gpuwarden.io/queue"]
        assert keys.GPU_UUID.name not in after["metadata"]["annotations"]
        return after

    async def label(self, node: str, logical: str | None) -> None:
        await self.kube.patch(NODES, node, {"metadata": {"labels": {keys.LOGICAL_NODE_LABEL: logical}}})

    async def node_is_ready(self, node: str, *, ready: bool) -> None:
        said = None if ready else "false"
        await self.kube.patch(NODES, node, {"metadata": {"annotations": {READY: said}}})

        async def look() -> bool:
            found = (await self.kube.get(NODES, node))["status"]["conditions"]
            return any(one["type"] == "Ready" and one["status"] == "True" for one in found)

        await wait_until(look, lambda is_ready: is_ready == ready)

    async def prove(self, node: str, digest: str | None) -> None:
        """Writes evidence as a provider does; None removes it."""
        now = utc_now().astimezone(UTC)
        word = digest and Evidence(node, digest, SOURCE, now, now + timedelta(hours=1))
        if await self.kube.find(NODE_EVIDENCES, node) is None:
            await self.kube.create(NODE_EVIDENCES, new_node_evidence(node))
        raw = await self.kube.get(NODE_EVIDENCES, node)
        await self.kube.replace(NODE_EVIDENCES, with_entries(raw, {SOURCE: word or None}), subresource="status")

    async def is_node(self, node: str) -> bool:
        return await self.kube.find(NODES, node) is not None

    async def bound(self) -> list[str]:
        events = await self.kube.list(EVENTS, self.namespace, fieldSelector="reason=Scheduled")
        return [one["involvedObject"]["uid"] for one in events]


def raw_node(name: str) -> Raw:
    """A Node as its kubelet registers it, with the data that `gpuwarden export` has read there."""
    raw = node_object(name, GPUS, **{keys.LOGICAL_NODE_LABEL: LOGICAL[name]})
    raw["metadata"]["annotations"] = exported_data(gpus_of(name, *range(GPUS)))
    return raw


def exported_data(uuids: Sequence[str]) -> dict[str, str]:
    gpus = [{"index": index, "uuid": uuid} for index, uuid in enumerate(uuids)]
    return {keys.NODE_GPUS: json.dumps({"time": "2026-01-01T00:00:00Z", "gpus": gpus})}


async def discovered(kube: Kube) -> None:
    """The nodes list their GPUs in annotations, and their GPUNodes are created and deleted with them."""
    for name in NAMES:
        meta = raw_node(name)["metadata"]
        await kube.patch(NODES, name, {"metadata": {"labels": meta["labels"], "annotations": meta["annotations"]}})
        await kube.patch(GPU_NODES, name, {"metadata": {"labels": {keys.MANAGED_BY: keys.OURS}}})

    def have_indices(found: list[Raw]) -> bool:
        devices = [one for raw in found if raw["metadata"]["name"] in NAMES for one in raw["spec"]["devices"]]
        return len(devices) == len(NAMES) * GPUS and all("index" in one for one in devices)

    await wait_until(lambda: kube.list(GPU_NODES), have_indices)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """All processes, for the whole module."""
    directory = tmp_path_factory.mktemp("sets")
    async with (
        Kube(cluster.kubeconfig) as kube,
        site(
            cluster,
            kube,
            directory,
            nodes=3,
            gpus=GPUS,
            name="sets",
            replicas=2,
            flags=(*challenging(directory), *ORPHANS, *certified(directory)),
        ) as here,
    ):
        assert here.nodes == NAMES
        await here.reconciler()
        await kube.patch(NAMESPACES, here.namespace, KEEPS)
        await discovered(kube)
        with profile(cluster, here.own_namespace, directory) as schedulers:
            made = Harness(here, kube, cluster, schedulers)
            made.schedule()
            await here.wait_until_offered()
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def harness(processes: Harness) -> AsyncIterator[Harness]:
    """The harness, with everything cleaned up and repaired before and after each test."""
    try:
        yield processes
        processes.here.checker.assert_no_violations()
    finally:
        await delete_all(processes)
        await repair(processes)
        await processes.here.wait_until_offered()
    processes.here.checker.assert_no_violations()


async def delete_all(harness: Harness) -> None:
    """Deletes sets, pods and reservations."""
    for one in await harness.kube.list(STATEFUL_SETS, harness.namespace):
        await harness.kube.delete(STATEFUL_SETS, one["metadata"]["name"], harness.namespace)
    await harness.here.free_all()
    await wait_until(harness.pods, lambda found: not found)
    await wait_until(harness.here.held, lambda held: not held, LONG)  # an orphan of unknown grace has --max-grace


async def repair(harness: Harness) -> None:
    """Undoes what a test did to nodes and processes."""
    lost = [raw_node(name) for name in NAMES if not await harness.is_node(name)]
    await asyncio.to_thread(harness.cluster.add_nodes, lost)
    for name in NAMES:
        said = {**raw_node(name)["metadata"]["annotations"], READY: None}
        meta = {"labels": {keys.LOGICAL_NODE_LABEL: LOGICAL[name]}, "annotations": said}
        await harness.kube.patch(NODES, name, {"metadata": meta, "spec": {"unschedulable": None}})
    if harness.scheduler.process.poll() is not None:
        harness.schedule()


@pytest.mark.defect("binder-1")
@pytest.mark.defect("binder-6")
@pytest.mark.defect("binder-12")
@pytest.mark.defect("binder-13")
@pytest.mark.defect("binder-14")
async def test_each_ordinal_keeps_the_gpus_of_its_map_line_when_its_pods_are_replaced(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    took = {"labelled_later": await a_node_that_is_labelled_later_has_its_ordinal(harness)}
    took["deleted"] = await a_deleted_pod_has_its_gpus_back(harness)
    took["slow_to_stop"] = await a_pod_that_is_slow_to_stop_keeps_them_until_it_has(harness)
    await scaled_down_and_up_each_has_its_own(harness)
    took["rolling_update"] = await a_rolling_update_leaves_each_where_it_was(harness)
    report_figures(request, **took)


async def a_node_that_is_labelled_later_has_its_ordinal(harness: Harness) -> float:
    await harness.label("sets-2", None)
    await harness.create(mapped_set())
    await harness.runs(0, 1)
    await harness.waits(2, "NoSuitableNode", "gpu-node-name=node3")
    await harness.label("sets-2", "node3")
    started = time.monotonic()
    await harness.runs(2)
    await harness.runs(0, 1, 2)
    return time.monotonic() - started


async def a_deleted_pod_has_its_gpus_back(harness: Harness) -> float:
    started = time.monotonic()
    old = {await harness.delete(0, force=True), await harness.delete(2)}
    await harness.runs(0, 1, 2, without=old)
    return time.monotonic() - started


async def a_pod_that_is_slow_to_stop_keeps_them_until_it_has(harness: Harness) -> float:
    """Another pod for these GPUs waits meanwhile; afterwards only the ordinal gets them."""
    await harness.slow_to_stop(1, "3s")
    started = time.monotonic()
    old = await harness.delete(1)
    terminating = await harness.get(1)
    assert terminating["metadata"]["uid"] == old
    assert "deletionTimestamp" in terminating["metadata"]
    taken = pod("general", GPUS, nodeSelector={"kubernetes.io/hostname": "sets-1"})
    with pytest.raises(ApiError) as refused:
        await harness.kube.create(PODS, taken, harness.namespace, dryRun="All")
    assert refused.value.reason == "NoFreeDevice"
    await harness.runs(1, without={old})
    return time.monotonic() - started


async def scaled_down_and_up_each_has_its_own(harness: Harness) -> None:
    await harness.change(replicas=1)
    await wait_until(harness.pods, lambda found: set(found) == {f"{SET}-0"})
    await harness.change(replicas=3)
    await harness.runs(0, 1, 2)


async def a_rolling_update_leaves_each_where_it_was(harness: Harness) -> float:
    """One by one from the last ordinal on, each slow to stop."""
    before = await harness.pods()
    for ordinal in range(3):
        await harness.slow_to_stop(ordinal, "500ms")
    started = time.monotonic()
    await harness.change(template={"metadata": {"annotations": {"example.test/release": "2"}}})
    old = {one["metadata"]["uid"] for one in before.values()}
    await harness.runs(0, 1, 2, without=old)
    took = time.monotonic() - started
    after = await harness.pods()
    assert all(one["metadata"]["annotations"]["example.test/release"] == "2" for one in after.values())
    began = [after[f"{SET}-{n}"]["metadata"]["creationTimestamp"] for n in (2, 1, 0)]
    assert began == sorted(began)
    bound = await harness.bound()
    assert len(bound) == len(set(bound))
    return took


async def test_ordinal_waits_for_evidence_of_its_node(harness: Harness, request: pytest.FixtureRequest) -> None:
    for node in NAMES[:2]:
        await harness.prove(node, HASH)
    await harness.create(mapped_set(asked={claim_keys.REQUIRED_HASH.name: HASH}))
    await harness.runs(0, 1)
    await harness.waits(2, "NoProvenNode", "no evidence")
    await harness.prove("sets-2", HASH)
    started = time.monotonic()
    await harness.runs(0, 1, 2)
    took = time.monotonic() - started
    await harness.prove("sets-1", None)
    old = await harness.delete(1)
    await harness.waits(1, "NoProvenNode", "no evidence", without=old)
    await harness.prove("sets-1", HASH)
    await harness.runs(0, 1, 2, without={old})
    report_figures(request, proven_later=took)
    for node in NAMES:
        await delete_without_finalizers(harness.kube, NODE_EVIDENCES, node)


@pytest.mark.defect("binder-3")
@pytest.mark.defect("binder-20")
async def test_newer_set_mapped_to_the_same_gpus_waits_until_the_older_is_scaled_down(
    harness: Harness,
) -> None:
    """The newer set gets none of the GPUs of its map, not even free ones: they belong to the older set's ordinals."""
    await harness.create(mapped_set())
    await harness.runs(0, 1, 2)
    content = mapped_set("rival", 1, "7=node1:1,2\n")
    content["spec"]["ordinals"] = {"start": 7}
    await harness.is_older()
    await harness.create(content)
    rival = await harness.waits(7, "NoFreeDevice", "set aside for the map of an older StatefulSet", name="rival")

    await harness.slow_to_stop(0, "1s")
    old = await harness.delete(0)
    await harness.runs(0, 1, 2, without={old})
    await harness.change(replicas=1)
    await wait_until(harness.pods, lambda found: set(found) == {f"{SET}-0", "rival-7"})
    assert (await harness.waits(7, "NoFreeDevice", name="rival"))["metadata"]["uid"] == rival["metadata"]["uid"]

    await harness.change(replicas=0)
    after = await wait_until(lambda: harness.find(7, "rival"), place_of, LONG)
    assert place_of(after) == ("sets-0", gpus_of("sets-0", 1, 2))
    assert after is not None
    assert after["metadata"]["uid"] == rival["metadata"]["uid"]
    await harness.change(replicas=3)
    await harness.waits(0, "NoFreeDevice", "fewer than 2 free GPUs")
    await harness.kube.delete(STATEFUL_SETS, "rival", harness.namespace)
    await harness.runs(0, 1, 2)


@pytest.mark.defect("binder-8")
async def test_ordinal_waits_for_its_node_until_it_is_ready(harness: Harness) -> None:
    """The controllers delete the pod: it tolerates such a node only for a moment."""
    brief = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    content = mapped_set()
    content["spec"]["template"]["spec"]["tolerations"] = [brief]
    await harness.create(content)
    await harness.runs(0, 1, 2)
    old = (await harness.get(1))["metadata"]["uid"]
    await harness.node_is_ready("sets-1", ready=False)
    lost = await harness.waits(1, "NodeNotReady", "not ready", without=old)
    await harness.node_is_ready("sets-1", ready=True)
    await harness.runs(0, 1, 2, without={old})
    assert (await harness.get(1))["metadata"]["uid"] == lost["metadata"]["uid"]


@pytest.mark.parametrize(
    "is_forced", [True, pytest.param(False, marks=pytest.mark.long)], ids=["deleted-by-force", "garbage-collected"]
)
async def test_ordinal_waits_for_its_deleted_node_to_return(harness: Harness, *, is_forced: bool) -> None:
    """The pod is deleted by force, or the pod garbage collector deletes it after a minute."""
    await harness.create(mapped_set())
    await harness.runs(0, 1, 2)
    old = str((await harness.get(1))["metadata"]["uid"])
    await harness.kube.delete(NODES, "sets-1")
    if is_forced:
        await harness.delete(1, force=True)
    lost = await harness.waits(1, "NoSuitableNode", "gpu-node-name=node2", without=old, seconds=180)
    await gone(
        harness.kube, GPU_NODES, "sets-1", seconds=LONG
    )  # the pod's containers may run until --max-grace has passed
    await asyncio.to_thread(harness.cluster.add_nodes, [raw_node("sets-1")])
    await harness.runs(0, 1, 2, without={old})
    assert (await harness.get(1))["metadata"]["uid"] == lost["metadata"]["uid"]


async def test_map_by_index_leads_to_a_replaced_gpu(harness: Harness) -> None:
    """The pod with the old GPU keeps it, and no other pod gets either GPU."""
    await harness.create(mapped_set())
    await harness.runs(0, 1, 2)
    before = gpus_of("sets-1", *range(GPUS))
    await replaced(harness, (*before[:2], "GPU-new", before[3]))
    await replaced(harness, before)


async def replaced(harness: Harness, uuids: Sequence[str]) -> None:
    """Sets the GPUs of the node, with another one at the index that the map names."""

    async def devices() -> dict[str, bool]:
        found = (await harness.kube.get(GPU_NODES, "sets-1"))["spec"]["devices"]
        return {one["uuid"]: one.get("healthy", True) for one in found}

    await harness.kube.patch(NODES, "sets-1", {"metadata": {"annotations": exported_data(uuids)}})
    seen = await wait_until(devices, lambda found: found.get(uuids[2]))
    assert sorted(seen.values()) == [False, True, True, True, True]
    await harness.delete(1)
    await wait_until(lambda: harness.find(1), lambda raw: place_of(raw) == ("sets-1", (uuids[2],)), LONG)
    await wait_until(devices, lambda found: found == dict.fromkeys(uuids, True))


@pytest.mark.defect("binder-8")
@pytest.mark.defect("binder-11")
async def test_next_scheduler_binds_every_pod_of_a_killed_one(harness: Harness, request: pytest.FixtureRequest) -> None:
    """Killed while one pod is on its node, one has its GPUs and waits for room there, and one does not exist yet."""
    hog = pod("hog", nodeName="sets-1")
    hog["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "64"}}
    await harness.kube.create(PODS, hog, harness.namespace)
    content = mapped_set()
    content["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    await harness.create(content)
    await harness.runs(0)
    waits = await wait_until(lambda: harness.find(1))
    assert waits is not None
    await wait_for_event(harness.kube, waits, "FailedScheduling", "Insufficient cpu")
    harness.scheduler.kill()
    await harness.kube.delete(PODS, "hog", harness.namespace, grace=0)
    old = await harness.delete(0)
    started = time.monotonic()
    harness.schedule()
    await harness.runs(0, 1, 2, without={old})
    report_figures(request, until_all_run=time.monotonic() - started)
    assert (await harness.get(1))["metadata"]["uid"] == waits["metadata"]["uid"]
    bound = await harness.bound()
    assert len(bound) == len(set(bound))


# All kinds of changes in random order.

STORM = 300.0


@pytest.mark.long
async def test_each_ordinal_runs_with_its_own_gpus_after_random_failures(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    seed = time.time_ns()
    chance = random.Random(seed)  # noqa: S311 - a plan, not a secret
    until = time.monotonic() + STORM
    report_figures(request, seed=seed)
    rounds, slowest = 0, 0.0
    await harness.create(mapped_set())
    await harness.runs(0, 1, 2)
    await harness.is_older()
    await harness.create(mapped_set("rival", 2, "0=node1:1,2\n1=node2:2,3\n"))
    while time.monotonic() < until:
        happening = chance.sample(CHANGES, k=chance.randint(1, 3))
        log = [one.__name__ for one in happening]
        await asyncio.gather(*(one(harness, chance) for one in happening))
        await repair(harness)
        started = time.monotonic()
        try:
            await harness.runs(0, 1, 2, seconds=180)
        except NotInTimeError as exc:
            raise NotInTimeError(f"after {log}: {exc}") from exc
        slowest, rounds = max(slowest, time.monotonic() - started), rounds + 1
        harness.here.checker.assert_no_violations()
    report_figures(request, rounds=rounds, slowest_to_be_well_again=slowest)


async def pods_are_deleted(harness: Harness, chance: random.Random) -> None:
    for ordinal in chance.sample(range(3), k=chance.randint(1, 3)):
        with suppress(ApiError):
            await harness.slow_to_stop(ordinal, f"{chance.choice((0, 300, 2000))}ms")
            await harness.delete(ordinal, force=chance.random() < 0.3)


async def the_set_is_scaled(harness: Harness, chance: random.Random) -> None:
    """A competing set takes the GPUs that this set gives up, and returns them when it is scaled down."""
    for replicas in (chance.randint(0, 2), chance.randint(0, 5), 3):
        await harness.change(replicas=replicas)
        await asyncio.sleep(chance.uniform(0, 2))
    await harness.change("rival", replicas=0)
    await wait_until(harness.pods, lambda found: not any(name.startswith("rival-") for name in found), LONG)
    await harness.change("rival", replicas=2)


async def the_template_changes(harness: Harness, chance: random.Random) -> None:
    await harness.change(template={"metadata": {"annotations": {"example.test/release": str(chance.random())}}})
    await asyncio.sleep(chance.uniform(0, 2))


async def a_node_is_lost(harness: Harness, chance: random.Random) -> None:
    node = chance.choice(NAMES)
    await harness.kube.delete(NODES, node)
    for one in (await harness.pods()).values():
        if one["spec"].get("nodeName") == node:
            with suppress(ApiError):
                await harness.kube.delete(PODS, one["metadata"]["name"], harness.namespace, grace=0)
    await asyncio.sleep(chance.uniform(0, 3))


async def a_node_is_not_ready(harness: Harness, chance: random.Random) -> None:
    with suppress(ApiError):
        meta = {"annotations": {READY: "false"}, "labels": {keys.LOGICAL_NODE_LABEL: chance.choice((None, "node9"))}}
        await harness.kube.patch(NODES, chance.choice(NAMES), {"metadata": meta})
    await asyncio.sleep(chance.uniform(0, 3))


async def the_scheduler_is_killed(harness: Harness, chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, 1))
    harness.scheduler.kill()


async def the_reconciler_is_killed(harness: Harness, chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, 1))
    await harness.here.reconcilers[-1].kill()
    await harness.here.reconciler()


CHANGES = (
    pods_are_deleted,
    the_set_is_scaled,
    the_template_changes,
    a_node_is_lost,
    a_node_is_not_ready,
    the_scheduler_is_killed,
    the_reconciler_is_killed,
)
