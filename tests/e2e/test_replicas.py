"""Several replicas and a reconciler as processes behind a real API server, checked by the pods alone."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import GPUS, NODES, new_namespace
from tests.e2e.kube import (
    MUTATING,
    PODS,
    VALIDATING,
    ApiError,
    Kube,
    Raw,
    delete_without_finalizers,
    pod,
    pods_in_phase,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_configurations import ENABLED, MUTATED, VALIDATED, at_url, hook
from tests.ledger.fake_store import gpu_node
from tests.running import GPUWARDEN, WITHOUT_EVIDENCE, Running, serving

REPLICAS = 3
SLOTS = len(NODES) * GPUS


@pytest.fixture
async def gpu_nodes(kube: Kube) -> AsyncIterator[None]:
    """The GPUNodes that discovery would write."""
    await installed(kube)
    # A recreated GPUNode is rebuilt from the pods: those of earlier tests keep their GPUs until they are gone.
    await wait_until(lambda: reserved_pods(kube), lambda left: not left)
    for name in NODES:
        await kube.create(GPU_NODES, gpu_node(name, *(f"GPU-{name}-{k}" for k in range(GPUS))))
    yield
    for name in NODES:
        await delete_without_finalizers(kube, GPU_NODES, name)


@pytest.fixture
def replicas(cluster: Cluster, gpu_nodes: None, tmp_path: Path) -> Iterator[list[Running]]:
    flags = ["--ledger", "cluster", "--kubeconfig", str(cluster.kubeconfig), "--log-level", "warn"]
    with ExitStack() as stack:
        running = []
        for number in range(REPLICAS):
            directory = tmp_path / str(number)
            directory.mkdir()
            running.append(stack.enter_context(serving(directory, None, flags)))
        yield running


@pytest.fixture
def reconciler(cluster: Cluster, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [GPUWARDEN, "reconcile", "--ui-port", "0", *WITHOUT_EVIDENCE, "--kubeconfig", str(cluster.kubeconfig)]
    with (tmp_path / "reconcile.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        yield process
        process.kill()


@pytest.fixture
async def namespaces(kube: Kube, replicas: list[Running]) -> AsyncIterator[list[str]]:
    """A namespace per replica, which mutates its pods; the next replica validates them."""
    async with AsyncExitStack() as stack:
        names = [await stack.enter_async_context(new_namespace(kube, ENABLED)) for _ in replicas]
        for number, name in enumerate(names):
            harness = (
                (MUTATING, "mutate.gpuwarden.io", "/mutate", replicas[number], MUTATED),
                (VALIDATING, "validate.gpuwarden.io", "/validate", replicas[(number + 1) % REPLICAS], VALIDATED),
            )
            for kind, hook_name, path, server, rules in harness:
                ca = server.directory / "certs/dev/ca.crt"
                selector = {"kubernetes.io/metadata.name": name}
                webhook = hook(hook_name, at_url(server.urls["https"]), path, ca, selector, rules)
                await kube.create(kind, {"metadata": {"name": f"gpuwarden-{name}"}, "webhooks": [webhook]})
                stack.push_async_callback(kube.delete, kind, f"gpuwarden-{name}")
        for name in names:
            await wait_until(lambda name=name: acts(kube, name))  # type: ignore[misc]  # bound now, not later
        yield names


async def reserved_pods(kube: Kube) -> list[str]:
    """All pods with a reservation."""
    pods = [one["metadata"] for one in await kube.list(PODS)]
    return [one["name"] for one in pods if "gpuwarden.io/reservation-id" in (one.get("annotations") or {})]


async def acts(kube: Kube, namespace: str) -> bool:
    """Whether both webhooks act: a dry run is dressed by one and allowed by the other."""
    try:
        made = await kube.create(PODS, pod("probe", gpus=1), namespace, dryRun="All")
    except ApiError:
        return False
    forged = pod("probe", annotations={"gpuwarden.io/gpu-uuid": "x", "cdi.k8s.io/x": "nvidia.com/gpu=all"})
    try:
        await kube.create(PODS, forged, namespace, dryRun="All")
    except ApiError as refused:
        return "gpuwarden.io/gpu-uuid" in made["metadata"].get("annotations", {}) and "denied" in refused.message
    return False


def gpus_of(one: Raw) -> list[str]:
    return list(one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(","))


async def tried(kube: Kube, namespace: str) -> Raw | ApiError:
    try:
        return await kube.create(PODS, pod(None, gpus=1), namespace)
    except ApiError as exc:
        return exc


async def alive(kube: Kube, namespaces: list[str]) -> list[Raw]:
    return [one for name in namespaces for one in await kube.list(PODS, name)]


async def finalized(kube: Kube) -> int:
    held = [(await kube.get(GPU_NODES, name)).get("status", {}).get("held", {}) for name in NODES]
    return sum(entry["phase"] == "finalized" for one in held for entry in one.values())


async def reach(kube: Kube, expected: int) -> bool:
    return await finalized(kube) == expected


async def test_three_replicas_assign_every_gpu_once_to_more_pods_than_gpus(
    kube: Kube, namespaces: list[str], reconciler: subprocess.Popen[bytes]
) -> None:
    results = await asyncio.gather(*(tried(kube, name) for name in namespaces for _ in range(SLOTS // 2)))
    denied = {(one.status, one.reason) for one in results if isinstance(one, ApiError)}
    assert denied == {(429, "NoFreeDevice")}
    gpus = [uuid for one in await alive(kube, namespaces) for uuid in gpus_of(one)]
    assert len(gpus) == len(set(gpus)) == SLOTS
    for name in namespaces:
        count = len(await kube.list(PODS, name))
        running = await pods_in_phase(kube, name, count, "Running")
        assert all(one["spec"]["nodeName"] == one["metadata"]["annotations"]["gpuwarden.io/node"] for one in running)
    await wait_until(lambda: reach(kube, SLOTS))

    for one in (await kube.list(PODS, namespaces[0]))[:4]:
        await kube.delete(PODS, one["metadata"]["name"], namespaces[0])
    await wait_until(lambda: reach(kube, SLOTS - 4))
    again = await asyncio.gather(*(tried(kube, namespaces[1]) for _ in range(8)))
    assert sum(not isinstance(one, ApiError) for one in again) == 4
    gpus = [uuid for one in await alive(kube, namespaces) for uuid in gpus_of(one)]
    assert len(gpus) == len(set(gpus)) == SLOTS


async def test_killed_replica_loses_no_reservation(
    kube: Kube, namespaces: list[str], replicas: list[Running], reconciler: subprocess.Popen[bytes]
) -> None:
    before = await asyncio.gather(*(tried(kube, namespaces[0]) for _ in range(4)))
    assert not [one for one in before if isinstance(one, ApiError)]
    replicas[0].process.kill()
    # The second replica mutates and the third validates pods of the second namespace.
    after = await asyncio.gather(*(tried(kube, namespaces[1]) for _ in range(SLOTS)))
    assert sum(not isinstance(one, ApiError) for one in after) == SLOTS - 4
    gpus = [uuid for one in await alive(kube, namespaces[:2]) for uuid in gpus_of(one)]
    assert len(gpus) == len(set(gpus)) == SLOTS
