"""Pods that nothing can be had for now: created, gated, told why, and served in their turn. On a real control plane."""

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.crew import Site, site
from tests.e2e.kube import (
    DEPLOYMENTS,
    EVENTS,
    PODS,
    ApiError,
    Kube,
    Raw,
    deployment,
    pod,
    pod_in_phase,
    pods_in_phase,
    wait_until,
)

QUEUE = ("--when-unavailable", "queue")
GATE = "gpuwarden.io/queue"
GPU = "gpuwarden.io/gpu-uuid"
# What is promised, and what a machine that does other things besides may need.
PROMISED, PATIENT = 2.0, 20.0


@asynccontextmanager
async def queueing(
    cluster: Cluster, kube: Kube, directory: Path, *, nodes: int = 1, gpus: int = 2, flags: tuple[str, ...] = ()
) -> AsyncIterator[Site]:
    said = (*QUEUE, *flags)
    async with site(cluster, kube, directory, nodes=nodes, gpus=gpus, name="queue", replicas=1, flags=said) as here:
        yield here


def gates(raw: Raw) -> list[str]:
    return [gate["name"] for gate in raw["spec"].get("schedulingGates", ())]


async def events_of(kube: Kube, raw: Raw) -> list[Raw]:
    meta = raw["metadata"]
    return await kube.list(EVENTS, meta["namespace"], fieldSelector=f"involvedObject.uid={meta['uid']}")


async def opened_after(kube: Kube, namespace: str, name: str, ended: str) -> float:
    """How many seconds after the end of the one pod the gate of the other is open."""
    await kube.delete(PODS, ended, namespace, grace=0)
    freed = time.monotonic()
    await wait_until(lambda: kube.get(PODS, name, namespace), lambda found: not gates(found), PATIENT)
    return time.monotonic() - freed


async def told(kube: Kube, raw: Raw, reason: str, words: str = "") -> str:
    """The message of the event that says so."""
    found = await wait_until(
        lambda: events_of(kube, raw),
        lambda events: any(one["reason"] == reason and words in one["message"] for one in events),
    )
    return next(str(one["message"]) for one in found if one["reason"] == reason and words in one["message"])


async def test_more_pods_than_gpus_all_run_in_their_turn_and_never_two_on_one(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=2) as here:
        await here.reconciler()
        await here.offered()
        await kube.create(DEPLOYMENTS, deployment("train", 5, 1), here.namespace)
        there = await wait_until(lambda: kube.list(PODS, here.namespace), lambda pods: len(pods) == 5)
        seen: set[str] = set()
        while len(seen) < 5:  # each that runs is ended, and the next one has its GPU
            running = await wait_until(
                lambda: kube.list(PODS, here.namespace),
                lambda pods: any(p["status"]["phase"] == "Running" and p["metadata"]["uid"] not in seen for p in pods),
            )
            for one in running:
                if one["status"]["phase"] == "Running" and one["metadata"]["uid"] not in seen:
                    seen.add(one["metadata"]["uid"])
                    if len(seen) < 5:
                        await kube.delete(PODS, one["metadata"]["name"], here.namespace, grace=0)
        first = {one["metadata"]["uid"] for one in there}
        assert len(first & seen) >= 2
        assert here.judge.wrongs == []
        assert len(here.judge.seen) >= 5
        await kube.delete(DEPLOYMENTS, "train", here.namespace)


async def test_who_waits_is_told_why_and_served_within_moments_of_a_gpu_being_free(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.reconciler()
        await here.offered()
        await kube.create(PODS, pod("first", 1), here.namespace)
        await pod_in_phase(kube, here.namespace, "first", "Running")
        # With terms of its own: their number is fixed once a pod exists, what stands in them is not.
        own = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}] * 2
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": own}}
        waits = await kube.create(PODS, pod("second", 1, affinity={"nodeAffinity": required}), here.namespace)
        assert gates(waits) == [GATE]
        assert "with fewer than 1 free" in waits["metadata"]["annotations"]["gpuwarden.io/waiting"]
        assert waits["metadata"]["labels"]["gpuwarden.io/queued"] == "true"
        assert GPU not in waits["metadata"]["annotations"]
        assert "with fewer than 1 free" in await told(kube, waits, "NoFreeDevice")
        took = [await opened_after(kube, here.namespace, "second", "first")]
        opened = await kube.get(PODS, "second", here.namespace)
        assert opened["metadata"]["annotations"][GPU] in here.gpus
        assert "gpuwarden.io/queued" not in opened["metadata"].get("labels", {})
        await pod_in_phase(kube, here.namespace, "second", "Running")
        await told(kube, waits, "GateOpened")
        # The machine may be busy at the one moment or the other.
        names = ["second", *(f"later-{number}" for number in range(4))]
        for before, name in itertools.pairwise(names):
            if min(took) > PROMISED:
                await kube.create(PODS, pod(name, 1), here.namespace)
                took.append(await opened_after(kube, here.namespace, name, before))
        assert here.judge.wrongs == []
        assert min(took) < PROMISED


async def test_a_pod_waits_for_evidence(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.offered()
        asked = {"gpuwarden.io/required-hash": "sha256:later"}
        waits = await kube.create(PODS, pod("careful", 1, asked), here.namespace)
        only_proven = await kube.create(PODS, pod("proven-only", 0, asked), here.namespace)
        assert gates(waits) == gates(only_proven) == [GATE]
        for one in (waits, only_proven):
            assert "attested as sha256:later" in one["metadata"]["annotations"]["gpuwarden.io/waiting"]
        here.flags = (*here.flags, "--node-hash-map", '{"queue-0": "sha256:later"}')
        await here.reconciler()
        for name in ("careful", "proven-only"):
            await pod_in_phase(kube, here.namespace, name, "Running")
        bound = await kube.get(PODS, "proven-only", here.namespace)
        assert bound["spec"]["nodeName"] == "queue-0"


@pytest.mark.long  # a Lease has to end twice
async def test_a_reconciler_that_ends_between_the_steps_leaves_nothing_double(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Where exactly it ends is left to chance here; every step is taken in tests/ledger/test_queue.py."""
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.offered()
        await kube.create(PODS, pod("first", 1), here.namespace)
        await pod_in_phase(kube, here.namespace, "first", "Running")
        waits = await kube.create(PODS, pod("second", 1), here.namespace)
        assert gates(waits) == [GATE]
        deaf = await here.reconciler()
        await wait_until(here.held, lambda held: {entry["phase"] for entry in held.values()} == {"finalized"})
        await kube.delete(PODS, "first", here.namespace, grace=0)
        # Whatever it was doing at that moment, it does no more.
        await deaf.kill()
        await here.reconciler()
        await pod_in_phase(kube, here.namespace, "second", "Running")
        held = await here.held()
        assert {entry["uid"] for entry in held.values()} == {waits["metadata"]["uid"]}
        assert here.judge.wrongs == []
        await kube.delete(PODS, "second", here.namespace, grace=0)
        await wait_until(here.held, lambda left: not left)


async def test_a_pod_that_is_deleted_while_it_waits_leaves_nothing(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.reconciler()
        await here.offered()
        await kube.create(PODS, pod("first", 1), here.namespace)
        await pod_in_phase(kube, here.namespace, "first", "Running")
        await kube.create(PODS, pod("second", 1), here.namespace)
        third = await kube.create(PODS, pod("third", 1), here.namespace)
        await kube.delete(PODS, "second", here.namespace)
        await kube.delete(PODS, "first", here.namespace, grace=0)
        await pod_in_phase(kube, here.namespace, "third", "Running")
        assert {entry["uid"] for entry in (await here.held()).values()} == {third["metadata"]["uid"]}


async def test_nobody_else_opens_the_gate_and_no_pod_without_gpus_is_bound(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.offered()
        await kube.create(PODS, pod("first", 1), here.namespace)
        await wait_until(here.held)
        await kube.create(PODS, pod("second", 1), here.namespace)
        open_it = [{"op": "remove", "path": "/spec/schedulingGates"}]
        with pytest.raises(ApiError, match="nothing is reserved for the pod yet"):
            await kube.patch(PODS, "second", open_it, here.namespace)
        forged = [
            *open_it,
            {"op": "add", "path": "/metadata/annotations/gpuwarden.io~1gpu-uuid", "value": min(here.gpus)},
            {"op": "add", "path": "/metadata/annotations/gpuwarden.io~1node", "value": here.nodes[0]},
            {"op": "add", "path": "/metadata/annotations/gpuwarden.io~1reservation-id", "value": "made-up"},
        ]
        with pytest.raises(ApiError, match="nothing is reserved for the pod yet"):
            await kube.patch(PODS, "second", forged, here.namespace)
        assert gates(await kube.get(PODS, "second", here.namespace)) == [GATE]


async def test_a_gate_of_ones_own_is_taken_off_and_one_that_is_put_on_elsewhere_is_never_opened(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=1) as here:
        await here.reconciler()
        await here.offered()
        own = await kube.create(PODS, pod("own", 1, schedulingGates=[{"name": GATE}]), here.namespace)
        assert gates(own) == []
        assert own["metadata"]["annotations"][GPU] in here.gpus
        # Where nobody reviews.
        await kube.create(PODS, pod("stray", schedulingGates=[{"name": GATE}]), here.own_namespace)
        stray = await kube.get(PODS, "stray", here.own_namespace)
        assert "put there by gpuwarden only" in await told(kube, stray, "Forged")
        assert gates(await kube.get(PODS, "stray", here.own_namespace)) == [GATE]
        await kube.delete(PODS, "stray", here.own_namespace)


async def test_a_large_claim_is_served_before_small_ones_that_came_later(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queueing(cluster, kube, tmp_path, gpus=2) as here:
        await here.reconciler()
        await here.offered()
        for name in ("a", "b"):
            await kube.create(PODS, pod(name, 1), here.namespace)
        await pods_in_phase(kube, here.namespace, 2, "Running")
        large = await kube.create(PODS, pod("large", 2), here.namespace)
        await told(kube, large, "NoFreeDevice")
        await kube.delete(PODS, "a", here.namespace, grace=0)
        await wait_until(here.held, lambda held: len(held) == 1)
        small = await wait_until(lambda: created_gated(kube, here.namespace), bool)
        assert small is not None
        await told(kube, small, "NoFreeDevice", "turn of another pod")
        await kube.delete(PODS, "b", here.namespace, grace=0)
        await pod_in_phase(kube, here.namespace, "large", "Running")
        assert gates(await kube.get(PODS, small["metadata"]["name"], here.namespace)) == [GATE]
        await kube.delete(PODS, "large", here.namespace, grace=0)
        await pod_in_phase(kube, here.namespace, small["metadata"]["name"], "Running")
        assert here.judge.wrongs == []


async def created_gated(kube: Kube, namespace: str) -> Raw | None:
    """A small pod that has to wait, once the replica knows who came first."""
    made = await kube.create(PODS, pod(None, 1), namespace)
    if gates(made):
        return made
    await kube.delete(PODS, made["metadata"]["name"], namespace, grace=0)
    return None
