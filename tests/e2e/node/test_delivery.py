"""A container sees exactly the GPUs that gpuwarden has written into its pod."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME, Mode
from scripts.node.images import ALL_DEVICES, BUSYBOX, CUDA, CUDA_VERSION
from scripts.node.real import RealNode
from tests.e2e.attacks.forger import trust
from tests.e2e.kube import CONFIG_MAPS, PODS, ApiError, Kube, Raw, wait_until
from tests.e2e.node.containers import (
    GPUS,
    NOTHING,
    SEEN,
    START_TIMEOUT,
    container,
    is_ready,
    kubectl,
    real_pod,
    run_in,
    runs,
    seen_in,
    seen_of,
)
from tests.e2e.node.front import installed_on
from tests.e2e.processes import Site

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
EVERY_GPU: Raw = {"metadata": {"name": "gpus"}, "data": {VISIBLE: "all", "CUDA_VERSION": "12.4"}}


@pytest.fixture(params=[Mode.AUTO, Mode.CDI])
async def mode(request: pytest.FixtureRequest, real_node: RealNode) -> AsyncIterator[Mode]:
    """The mode of NVIDIA's container runtime."""
    await asyncio.to_thread(real_node.set_runtime_mode, request.param)
    yield request.param
    await asyncio.to_thread(real_node.set_runtime_mode, Mode.AUTO)


async def devices_by_uuid(here: Site, cluster: Cluster) -> dict[str, Any]:
    """The entries of `/devices` by GPU."""
    headers = {"Authorization": f"Bearer {cluster.admin_token}"}
    url = here.replicas[0].urls["https"]
    async with httpx.AsyncClient(base_url=url, verify=trust(here), trust_env=False, headers=headers) as client:
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

    def of_train(devices: dict[str, Any]) -> tuple[str, ...]:
        uid = train["metadata"]["uid"]
        return tuple(sorted(uuid for uuid, one in devices.items() if one.get("assignment", {}).get("uid") == uid))

    assert of_train(await wait_until(lambda: devices_by_uuid(front, real_cluster), of_train)) == annotated
    await runs(kube, namespace, "others")
    others = await seen_in(real_cluster, namespace, "others")
    assert len(others.uuids) == 1
    assert not set(others.uuids) & set(annotated)
    front.checker.assert_no_violations()


def container_of_greedy_image(name: str) -> Raw:
    """A container to which NVIDIA's runtime would show every GPU, by its image and by `envFrom`."""
    return container(name=name, image=CUDA, envFrom=[{"configMapRef": {"name": "gpus"}}])


async def test_containers_without_a_gpu_of_their_own_see_none(front: Site, real_cluster: Cluster, mode: Mode) -> None:
    kube, namespace = front.kube, front.namespace
    await kube.create(CONFIG_MAPS, EVERY_GPU, namespace)
    first = {**container_of_greedy_image("first"), "command": ["/bin/sh", "-c", SEEN]}
    await kube.create(
        PODS, real_pod("plain", container_of_greedy_image("main"), runtime=RUNTIME, initContainers=[first]), namespace
    )
    beside = real_pod("beside", container(1), container_of_greedy_image("side"), initContainers=[first])
    await kube.create(PODS, beside, namespace)
    await runs(kube, namespace, "plain")
    claimant = await runs(kube, namespace, "beside")
    debugger = {"spec": {"ephemeralContainers": [container_of_greedy_image("debugger")]}}
    await kube.patch(PODS, "plain", debugger, namespace, "ephemeralcontainers")
    await wait_until(lambda: kube.get(PODS, "plain", namespace), debugger_runs)

    for name, one in ("plain", "main"), ("plain", "debugger"), ("beside", "side"):
        assert await seen_in(real_cluster, namespace, name, one) == NOTHING, (name, one)
    for name in ("plain", "beside"):
        assert await kubectl(real_cluster, "logs", "--namespace", namespace, name, "--container", "first") == ""
    own = GPUS.index(claimant["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"])
    assert await seen_in(real_cluster, namespace, "beside", "main") == seen_of(own)


def debugger_runs(found: Raw) -> bool:
    return any("running" in one["state"] for one in found["status"].get("ephemeralContainerStatuses", ()))


# How NVIDIA's container runtime interprets variables. Policies rely on it.


@pytest.mark.parametrize("image", [BUSYBOX, CUDA_VERSION, ALL_DEVICES, CUDA])
async def test_container_with_a_literal_void_sees_no_gpu(
    real_cluster: Cluster, real_kube: Kube, plain_namespace: str, mode: Mode, image: str
) -> None:
    await real_kube.create(CONFIG_MAPS, EVERY_GPU, plain_namespace)
    blinded = container(image=image, env={VISIBLE: "void"}, envFrom=[{"configMapRef": {"name": "gpus"}}])
    await real_kube.create(PODS, real_pod("blind", blinded, runtime=RUNTIME), plain_namespace)
    await runs(real_kube, plain_namespace, "blind")
    assert await seen_in(real_cluster, plain_namespace, "blind") == NOTHING


@pytest.mark.parametrize("image", [CUDA_VERSION, ALL_DEVICES, CUDA])
async def test_container_without_variables_sees_every_gpu_that_its_image_requests(
    real_cluster: Cluster, real_kube: Kube, plain_namespace: str, mode: Mode, image: str
) -> None:
    await real_kube.create(PODS, real_pod("greedy", container(image=image), runtime=RUNTIME), plain_namespace)
    await runs(real_kube, plain_namespace, "greedy")
    assert await seen_in(real_cluster, plain_namespace, "greedy") == seen_of(0, 1, 2, 3)


# GPUs that are reserved at the Binding: containers read them from an annotation.

ENDS_ON_SIGTERM = "trap 'exit 1' TERM; while true; do sleep 0.1; done"


async def test_container_sees_the_gpus_that_were_reserved_at_its_binding_also_after_a_restart(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path
) -> None:
    async with installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=("--reserve", "bind")) as here:
        namespace = here.namespace
        made = await real_kube.create(PODS, real_pod("train", container(2, script=ENDS_ON_SIGTERM)), namespace)
        assert "gpuwarden.io/gpu-uuid" not in made["metadata"]["annotations"]
        train = await runs(real_kube, namespace, "train")
        annotated = sorted(train["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(","))
        expected = seen_of(*map(GPUS.index, annotated))
        assert sorted(slot.partition("/")[0] for slot in await here.held()) == annotated
        assert await seen_in(real_cluster, namespace, "train") == expected

        other = next(gpu for gpu in GPUS if gpu not in annotated)
        change = {"metadata": {"annotations": {"gpuwarden.io/gpu-uuid": other}}}
        with pytest.raises(ApiError, match="only gpuwarden may change it"):
            await real_kube.patch(PODS, "train", change, namespace)
        await run_in(real_cluster, namespace, "train", "(sleep 0.5; kill 1) >/dev/null 2>&1 &")

        def has_restarted(found: Raw) -> bool:
            return bool(found["status"]["containerStatuses"][0]["restartCount"]) and is_ready(found)

        await wait_until(partial(real_kube.get, PODS, "train", namespace), has_restarted, START_TIMEOUT)
        assert await seen_in(real_cluster, namespace, "train") == expected
        here.checker.assert_no_violations()
