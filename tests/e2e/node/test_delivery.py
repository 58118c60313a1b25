"""A container sees the GPUs that gpuwarden has written into its pod, and no others."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME, Mode
from scripts.node.images import ALL_DEVICES, BUSYBOX, CUDA, CUDA_VERSION
from scripts.node.real import RealNode
from tests.e2e.crew import Site
from tests.e2e.kube import CONFIG_MAPS, PODS, Kube, wait_until
from tests.e2e.node.containers import GPUS, NOTHING, container, real_pod, runs, seen_in, seen_of

VISIBLE = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture(params=[Mode.AUTO, Mode.CDI])
async def mode(request: pytest.FixtureRequest, real_node: RealNode) -> AsyncIterator[Mode]:
    """How NVIDIA's container runtime works."""
    await asyncio.to_thread(real_node.set_runtime_mode, request.param)
    yield request.param
    await asyncio.to_thread(real_node.set_runtime_mode, Mode.AUTO)


async def told_of(here: Site, cluster: Cluster) -> dict[str, Any]:
    """What `/devices` says, GPU by GPU."""
    headers = {"Authorization": f"Bearer {cluster.admin_token}"}
    async with httpx.AsyncClient(base_url=here.replicas[0].urls["http"], trust_env=False, headers=headers) as client:
        return dict((await client.get("/devices")).raise_for_status().json())


@pytest.mark.parametrize("gpus", [1, 2])
async def test_container_sees_exactly_the_gpus_of_its_pod(
    front: Site, real_cluster: Cluster, mode: Mode, gpus: int
) -> None:
    kube, namespace = front.kube, front.namespace
    await kube.create(PODS, real_pod("others", container(1)), namespace)
    await kube.create(PODS, real_pod("train", container(gpus)), namespace)
    train = await runs(kube, namespace, "train")

    annotated = tuple(sorted(train["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(",")))
    assert len(annotated) == gpus
    assert await seen_in(real_cluster, namespace, "train") == seen_of(*map(GPUS.index, annotated))

    def of_train(told: dict[str, Any]) -> tuple[str, ...]:
        uid = train["metadata"]["uid"]
        return tuple(sorted(uuid for uuid, one in told.items() if one.get("assignment", {}).get("uid") == uid))

    assert of_train(await wait_until(lambda: told_of(front, real_cluster), of_train)) == annotated
    await runs(kube, namespace, "others")
    others = await seen_in(real_cluster, namespace, "others")
    assert len(others.uuids) == 1
    assert not set(others.uuids) & set(annotated)
    front.judge.acquit()


async def test_pods_without_a_claim_run_with_no_gpu(front: Site, real_cluster: Cluster) -> None:
    await front.kube.create(PODS, real_pod("plain"), front.namespace)
    await runs(front.kube, front.namespace, "plain")
    assert await seen_in(real_cluster, front.namespace, "plain") == NOTHING


# What NVIDIA's container runtime makes of variables. Policies rely on it.


@pytest.mark.parametrize("image", [BUSYBOX, CUDA_VERSION, ALL_DEVICES, CUDA])
async def test_container_with_a_literal_void_sees_no_gpu(
    real_cluster: Cluster, real_kube: Kube, plain_namespace: str, mode: Mode, image: str
) -> None:
    both = {VISIBLE: "all", "CUDA_VERSION": "12.4"}
    await real_kube.create(CONFIG_MAPS, {"metadata": {"name": "gpus"}, "data": both}, plain_namespace)
    blinded = container(image=image, env={VISIBLE: "void"}, envFrom=[{"configMapRef": {"name": "gpus"}}])
    await real_kube.create(PODS, real_pod("blind", blinded, runtime=RUNTIME), plain_namespace)
    await runs(real_kube, plain_namespace, "blind")
    assert await seen_in(real_cluster, plain_namespace, "blind") == NOTHING


@pytest.mark.parametrize("image", [CUDA_VERSION, ALL_DEVICES, CUDA])
async def test_container_sees_every_gpu_where_only_its_image_speaks(
    real_cluster: Cluster, real_kube: Kube, plain_namespace: str, mode: Mode, image: str
) -> None:
    await real_kube.create(PODS, real_pod("greedy", container(image=image), runtime=RUNTIME), plain_namespace)
    await runs(real_kube, plain_namespace, "greedy")
    assert await seen_in(real_cluster, plain_namespace, "greedy") == seen_of(0, 1, 2, 3)
