"""Pods without a free GPU are created, gated, get an Event, and are served in order. On a real control plane."""

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    PODS,
    Kube,
    Raw,
    deployment,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.processes import Site, site
from tests.e2e.storm import GRACE

QUEUE = ("--when-unavailable", "queue")
GATE = "gpuwarden.io/queue"
GPU = "gpuwarden.io/gpu-uuid"
# The promise, and the limit for a busy machine.
PROMISED_SECONDS, LONG_SECONDS = 2.0, 20.0


@define
class QueueHarness:
    """A site where pods wait instead of being denied."""

    here: Site
    kube: Kube

    @property
    def namespace(self) -> str:
        return self.here.namespace

    async def create(self, name: str | None, gpus: int = 1, asked: dict[str, str] | None = None, **spec: Any) -> Raw:
        content = pod(name, gpus, asked, terminationGracePeriodSeconds=GRACE, **spec)
        return await self.kube.create(PODS, content, self.namespace)

    async def get(self, name: str) -> Raw:
        return await self.kube.get(PODS, name, self.namespace)

    async def pods(self) -> list[Raw]:
        return await self.kube.list(PODS, self.namespace)

    async def node_of(self, name: str) -> str:
        return str((await self.get(name))["spec"]["nodeName"])

    async def runs(self, name: str) -> None:
        await pod_in_phase(self.kube, self.namespace, name, "Running")

    async def run(self, *names: str) -> None:
        """Creates pods that run with a GPU each."""
        for name in names:
            await self.create(name)
        for name in names:
            await self.runs(name)

    async def wait(self, name: str, gpus: int = 1, asked: dict[str, str] | None = None, **spec: Any) -> Raw:
        """Creates a pod that waits behind gpuwarden's gate."""
        made = await self.create(name, gpus, asked, **spec)
        assert gates(made) == [GATE]
        return made

    async def end(self, name: str) -> None:
        await self.kube.delete(PODS, name, self.namespace)

    async def still_waits(self, name: str) -> None:
        assert gates(await self.get(name)) == [GATE]

    async def holders(self) -> set[str]:
        """The UIDs of pods with reservations."""
        return {str(entry["uid"]) for entry in (await self.here.held()).values()}

    async def opened_after(self, name: str, ended: str) -> float:
        """Ends one pod; returns the seconds until the gate of the other is removed."""
        await self.end(ended)
        freed = time.monotonic()
        await wait_until(lambda: self.get(name), lambda found: not gates(found), LONG_SECONDS)
        return time.monotonic() - freed


@asynccontextmanager
async def queue_site(
    cluster: Cluster, kube: Kube, directory: Path, *, nodes: int = 1, gpus: int = 2, flags: tuple[str, ...] = ()
) -> AsyncIterator[Site]:
    said = (*QUEUE, *flags)
    async with site(cluster, kube, directory, nodes=nodes, gpus=gpus, name="queue", replicas=1, flags=said) as here:
        yield here


@asynccontextmanager
async def queue_harness(
    cluster: Cluster, kube: Kube, directory: Path, *, gpus: int, nodes: int = 1, acts: bool = True
) -> AsyncIterator[QueueHarness]:
    """With `acts`, a reconciler runs and removes gates."""
    async with queue_site(cluster, kube, directory, nodes=nodes, gpus=gpus) as here:
        if acts:
            await here.reconciler()
        await here.wait_until_offered()
        yield QueueHarness(here, kube)
        here.checker.assert_no_violations()


def gates(raw: Raw) -> list[str]:
    return [gate["name"] for gate in raw["spec"].get("schedulingGates", ())]


async def wait_for_event(kube: Kube, raw: Raw, reason: str, words: str = "") -> str:
    """Waits for the Event and returns its message."""
    meta = raw["metadata"]
    found = await wait_until(
        lambda: kube.list(EVENTS, meta["namespace"], fieldSelector=f"involvedObject.uid={meta['uid']}"),
        lambda events: any(one["reason"] == reason and words in one["message"] for one in events),
    )
    return next(str(one["message"]) for one in found if one["reason"] == reason and words in one["message"])


async def test_queued_pods_all_run_in_order_and_never_two_on_one_gpu(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=2) as queue:
        await kube.create(DEPLOYMENTS, deployment("train", 5, 1), queue.namespace)
        there = await wait_until(queue.pods, lambda pods: len(pods) == 5)
        seen: set[str] = set()
        while len(seen) < 5:  # each running pod is ended, and the next gets its GPU
            running = await wait_until(queue.pods, lambda pods: any(is_new(one, seen) for one in pods))
            for one in running:
                if is_new(one, seen):
                    seen.add(one["metadata"]["uid"])
                    if len(seen) < 5:
                        await queue.end(one["metadata"]["name"])
        first = {one["metadata"]["uid"] for one in there}
        assert len(first & seen) >= 2
        assert len(queue.here.checker.seen) >= 5
        await kube.delete(DEPLOYMENTS, "train", queue.namespace)


def is_new(raw: Raw, seen: set[str]) -> bool:
    return raw["status"]["phase"] == "Running" and raw["metadata"]["uid"] not in seen


async def test_queued_pod_gets_an_event_and_is_served_soon_after_a_gpu_is_free(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1) as queue:
        await queue.run("first")
        # The pod has own affinity terms: their number is immutable once a pod exists, their content is not.
        own = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}] * 2
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}
        waits = await queue.wait("second", affinity={"nodeAffinity": required})
        assert "no free GPU" in waits["metadata"]["annotations"]["gpuwarden.io/waiting"]
        assert waits["metadata"]["labels"]["gpuwarden.io/queued"] == "true"
        assert GPU not in waits["metadata"]["annotations"]
        assert "no free GPU" in await wait_for_event(kube, waits, "NoFreeDevice")
        took = [await queue.opened_after("second", "first")]
        opened = await queue.get("second")
        assert opened["metadata"]["annotations"][GPU] in queue.here.gpus
        assert "gpuwarden.io/queued" not in opened["metadata"].get("labels", {})
        await queue.runs("second")
        await wait_for_event(kube, waits, "GateOpened")
        # The machine may be busy at any one of these moments.
        names = ["second", *(f"later-{number}" for number in range(4))]
        for before, name in itertools.pairwise(names):
            if min(took) > PROMISED_SECONDS:
                await queue.create(name)
                took.append(await queue.opened_after(name, before))
        assert min(took) < PROMISED_SECONDS


async def test_pod_without_a_proven_node_waits_in_the_queue(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1, acts=False) as queue:
        asked = {"gpuwarden.io/required-hash": "sha256:later"}
        for one in (await queue.wait("careful", 1, asked), await queue.wait("proven-only", 0, asked)):
            assert "attested as sha256:later" in one["metadata"]["annotations"]["gpuwarden.io/waiting"]
        queue.here.flags = (*queue.here.flags, "--node-hash-map", '{"queue-0": "sha256:later"}')
        await queue.here.reconciler()
        for name in ("careful", "proven-only"):
            await queue.runs(name)
        assert (await queue.get("proven-only"))["spec"]["nodeName"] == "queue-0"


@pytest.mark.long  # two Leases must expire
async def test_interrupted_reconciler_serves_no_queued_pod_twice(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """The moment of the kill is random; tests/admission/queue/test_queue.py covers every step."""
    async with queue_harness(cluster, kube, tmp_path, gpus=1, acts=False) as queue:
        here = queue.here
        await queue.run("first")
        waits = await queue.wait("second")
        deaf = await here.reconciler()
        await wait_until(here.held, lambda held: {entry["phase"] for entry in held.values()} == {"finalized"})
        await queue.end("first")
        # It stops in the middle of its work.
        await deaf.kill()
        await here.reconciler()
        await queue.runs("second")
        assert await queue.holders() == {waits["metadata"]["uid"]}
        await queue.end("second")
        await wait_until(here.held, lambda left: not left)


async def test_queued_pod_that_is_deleted_leaves_no_reservation(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1) as queue:
        await queue.run("first")
        await queue.wait("second")
        third = await queue.wait("third")
        await kube.delete(PODS, "second", queue.namespace)
        await queue.end("first")
        await queue.runs("third")
        assert await queue.holders() == {third["metadata"]["uid"]}


async def test_changed_namespace_requirement_applies_to_queued_pods(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1) as queue:
        await queue.run("first")
        waits = await queue.wait("second")
        key = "gpuwarden.io/required-hash"
        await kube.patch(NAMESPACES, queue.namespace, {"metadata": {"annotations": {key: "sha256:strict"}}})
        await wait_for_event(kube, waits, "Forged", "not what the pod asks for")
        await queue.end("first")
        await wait_until(queue.here.held, lambda held: not held)
        await kube.patch(NAMESPACES, queue.namespace, {"metadata": {"annotations": {key: None}}})
        await queue.runs("second")
        assert await queue.holders() == {waits["metadata"]["uid"]}


async def test_gate_set_by_a_user_is_removed_on_opt_in_and_stays_elsewhere(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1) as queue:
        own = await queue.create("own", schedulingGates=[{"name": GATE}])
        assert gates(own) == []
        assert own["metadata"]["annotations"][GPU] in queue.here.gpus
        # In a namespace without reviews.
        elsewhere = queue.here.own_namespace
        stray = await kube.create(PODS, pod("stray", schedulingGates=[{"name": GATE}]), elsewhere)
        assert "only gpuwarden may add this gate" in await wait_for_event(kube, stray, "Forged")
        assert gates(await kube.get(PODS, "stray", elsewhere)) == [GATE]
        await kube.delete(PODS, "stray", elsewhere)


async def test_large_claim_is_served_before_later_small_claims(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=2) as queue:
        await queue.run("a", "b")
        large = await queue.wait("large", 2)
        await wait_for_event(kube, large, "NoFreeDevice")
        await queue.end("a")
        await wait_until(queue.here.held, lambda held: len(held) == 1)
        small = await wait_until(lambda: created_gated(queue, large), bool)
        assert small is not None
        name = small["metadata"]["name"]
        await wait_for_event(kube, small, "NoFreeDevice", "an earlier pod waits for the same devices")
        await queue.end("b")
        await queue.runs("large")
        await queue.still_waits(name)
        await queue.end("large")
        await queue.runs(name)


async def test_small_claims_use_other_nodes_while_a_large_claim_waits(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, nodes=2, gpus=2) as queue:
        await queue.run("a", "b", "c")
        where = {name: await queue.node_of(name) for name in "abc"}
        assert where["a"] == where["b"] != where["c"]
        large = await queue.wait("large", 2)
        await wait_for_event(kube, large, "NoFreeDevice")
        small = await wait_until(lambda: created_gated(queue, large), bool)
        assert small is not None
        name = small["metadata"]["name"]
        # One GPU is free on the node of c; the large pod will run there.
        await wait_for_event(kube, small, "NoFreeDevice", "an earlier pod waits for the same devices")
        await queue.end("a")
        await queue.runs(name)
        assert await queue.node_of(name) == where["a"]
        await queue.still_waits("large")
        await queue.end("c")
        await queue.runs("large")
        assert await queue.node_of("large") == where["c"]


async def created_gated(queue: QueueHarness, first: Raw) -> Raw | None:
    """Creates a small pod that waits: it must be younger than the first pod by creation time, which has a resolution of
    seconds."""
    made = await queue.create(None)
    if gates(made) and made["metadata"]["creationTimestamp"] > first["metadata"]["creationTimestamp"]:
        return made
    await queue.end(made["metadata"]["name"])
    return None
