"""On a real node: NVIDIA's device plugin and the kubelet choose the GPUs of pods, and gpuwarden counts and records
them."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from scripts.node.real import DEVICE_PLUGIN, RealNode
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, gone, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import (
    GPUS,
    NODE,
    NOTHING,
    START_TIMEOUT,
    container,
    offers_gpus,
    real_pod,
    runs,
    seen_in,
    seen_of,
)
from tests.e2e.node.front import installed_on
from tests.e2e.node.test_delivered import NIC, nic_plugin
from tests.e2e.node.test_delivery import devices_by_uuid
from tests.e2e.processes import Site

WORKERS = 3


@pytest.fixture
async def plugged(real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path) -> AsyncIterator[Site]:
    """gpuwarden on a node whose GPUs NVIDIA's device plugin gives to pods."""
    await asyncio.to_thread(real_node.start_device_plugin)
    flags = ("--injection", "plugin")
    try:
        await wait_until(lambda: real_kube.get(NODES, NODE), offers_gpus, START_TIMEOUT)
        async with installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=flags, has_account=True) as here:
            yield here
    finally:
        await asyncio.to_thread(real_node.kill, DEVICE_PLUGIN)
        await wait_until(lambda: real_kube.get(NODES, NODE), lambda node: not offers_gpus(node), START_TIMEOUT)


async def recorded(here: Site, name: str, gpus: int) -> list[str]:
    """Waits until the ledger and the annotation name the GPUs of the pod, and returns them."""

    async def found() -> tuple[list[str], list[str]]:
        raw = await here.kube.get(PODS, name, here.namespace)
        uid, text = raw["metadata"]["uid"], raw["metadata"]["annotations"].get("gpuwarden.io/gpu-uuid", "")
        held = (await here.held()).items()
        return sorted(
            slot.partition("/")[0] for slot, one in held if (one.get("uid"), one["delivery"]) == (uid, "recorded")
        ), sorted(text.split(","))

    held, _ = await wait_until(found, lambda both: both[0] == both[1] and len(both[0]) == gpus)
    return held


async def assert_delivered(here: Site, cluster: Cluster, name: str, gpus: int) -> None:
    """The container has the GPUs of the ledger and of the annotation, and no others."""
    uuids = await recorded(here, name, gpus)
    assert await seen_in(cluster, here.namespace, name, "main") == seen_of(*map(GPUS.index, uuids)), name


async def test_container_has_the_gpus_that_are_recorded_for_its_pod(
    plugged: Site, real_cluster: Cluster, real_node: RealNode
) -> None:
    kube, namespace = plugged.kube, plugged.namespace
    for name, gpus in ("one", 1), ("pair", 2):
        made = await kube.create(PODS, real_pod(name, container(gpus), container(name="helper")), namespace)
        assert made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        assert "env" not in made["spec"]["containers"][0]
    for name, gpus in ("one", 1), ("pair", 2):
        pod = await runs(kube, namespace, name)
        await assert_delivered(plugged, real_cluster, name, gpus)
        assert await seen_in(real_cluster, namespace, name, "helper") == NOTHING
        uid, uuids = pod["metadata"]["uid"], await recorded(plugged, name, gpus)

        async def shown(uid: str = uid) -> list[str]:
            devices = await devices_by_uuid(plugged, real_cluster)
            return sorted(uuid for uuid, one in devices.items() if one.get("assignment", {}).get("uid") == uid)

        await wait_until(shown, lambda found, uuids=uuids: found == uuids)  # type: ignore[misc]  # bound now
    with pytest.raises(ApiError, match="NoFreeDevice"):
        await kube.create(PODS, real_pod("late", container(2)), namespace)
    plugged.checker.assert_no_violations()

    # The next pod gets GPUs of one that has ended.
    await kube.delete(PODS, "pair", namespace)
    await gone(kube, PODS, "pair", namespace, START_TIMEOUT)
    await wait_until(plugged.held, lambda held: len(held) == 1)
    await kube.create(PODS, real_pod("next", container(3, name="main")), namespace)
    await runs(kube, namespace, "next")
    await assert_delivered(plugged, real_cluster, "next", 3)
    await plugged.free_all()
    await wait_until(plugged.held, lambda held: not held, START_TIMEOUT)
    await assert_rejected_pod_frees_its_gpu(plugged, real_node)


async def assert_rejected_pod_frees_its_gpu(plugged: Site, real_node: RealNode) -> None:
    kube, namespace = plugged.kube, plugged.namespace
    limits = {"nvidia.com/gpu": "1", NIC: "2"}
    content = real_pod("rejected", container(resources={"limits": limits}), nodeName=NODE, restartPolicy="Never")
    async with nic_plugin(kube, real_node, "nic-0"):
        await kube.create(PODS, content, namespace)
        rejected = await wait_until(
            lambda: kube.get(PODS, "rejected", namespace), lambda pod: pod["status"]["phase"] == "Failed"
        )
        assert rejected["status"]["reason"] == "UnexpectedAdmissionError"
        await wait_until(plugged.held, lambda held: not held, 5)


@pytest.mark.parametrize(
    "pods", [pytest.param(6, id="six-pods"), pytest.param(300, marks=pytest.mark.long, id="three-hundred-pods")]
)
async def test_gpus_are_recorded_while_pods_come_and_go(
    request: pytest.FixtureRequest, plugged: Site, real_cluster: Cluster, pods: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng, numbers = random.Random(seed), iter(range(pods))  # noqa: S311 - to be repeated
    refused: Iterator[int] = itertools.count()

    async def work() -> None:
        for number in numbers:
            name, gpus = f"pod-{number}", rng.choice((1, 1, 2))
            content: Raw = real_pod(name, container(gpus))
            while not await is_created(plugged, content):
                next(refused)
                await asyncio.sleep(0.3)
            await runs(plugged.kube, plugged.namespace, name)
            await assert_delivered(plugged, real_cluster, name, gpus)
            await plugged.kube.delete(PODS, name, plugged.namespace)

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work())
    await wait_until(plugged.held, lambda held: not held, START_TIMEOUT)
    plugged.checker.assert_no_violations()
    assert len(plugged.checker.seen) == pods
    report_figures(request, seed=seed, pods=pods, refusals=next(refused))


async def is_created(here: Site, content: Raw) -> bool:
    try:
        await here.kube.create(PODS, content, here.namespace)
    except ApiError as exc:
        if exc.reason != "NoFreeDevice":
            raise
        return False
    return True
