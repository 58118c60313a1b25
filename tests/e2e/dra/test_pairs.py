"""How Kubernetes allocates GPUs together with their proof devices, without any process of gpuwarden."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_SLICES,
    bound,
    claiming,
    gpus_of,
    marked_for_deletion,
    published_gpus,
    refused_by_scheduler,
    remove_slices,
)
from tests.e2e.kube import Kube
from tests.e2e.processes import remove_nodes
from webhook.core.proof_devices import ProofDevice
from webhook.kube.resource_slices import slices_of
from webhook.runtime.clock import utc_now

NODE, HASH = "pair-a", "sha256:aa11"


@pytest.fixture
async def gpus(cluster: Cluster, kube: Kube, classes: None) -> AsyncIterator[list[str]]:
    """The UUIDs of a node of four GPUs."""
    await asyncio.to_thread(cluster.add_nodes, [gpu_node(NODE, 0)])
    try:
        yield await published_gpus(kube, NODE, 4)
    finally:
        await remove_slices(kube, NODE)
        await remove_nodes(kube, [NODE])


async def proofs_of(kube: Kube, uuids: list[str], lasts: timedelta) -> None:
    end = utc_now() + lasts
    devices = [ProofDevice.of(uuid, HASH, end) for uuid in uuids]
    for raw in slices_of(NODE, devices, 1, GPU_DRIVER):
        await kube.create(RESOURCE_SLICES, raw)


async def test_only_proven_gpus_are_allocated(kube: Kube, gpus: list[str]) -> None:
    await proofs_of(kube, [gpus[1], gpus[3]], timedelta(hours=1))
    async with emptied_namespace(kube) as namespace:
        await claiming(kube, namespace, "two", 2, HASH)
        await bound(kube, namespace, "two")
        assert sorted(await gpus_of(kube, namespace, "two")) == [gpus[1], gpus[3]]
        await claiming(kube, namespace, "third", 1, HASH)
        await refused_by_scheduler(kube, namespace, "third")


async def test_pod_is_deleted_when_the_evidence_ends(kube: Kube, gpus: list[str]) -> None:
    await proofs_of(kube, gpus, timedelta(seconds=4))
    async with emptied_namespace(kube) as namespace:
        await claiming(kube, namespace, "one", 1, HASH)
        await bound(kube, namespace, "one")
        await marked_for_deletion(kube, namespace, "one", 10)
