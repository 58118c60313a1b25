"""Proofs are added and removed all the time while native pods come and go: no pod has a GPU without its proof."""

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import GPU_DRIVER, gpu_uuid, published_gpus, remove_slices
from tests.e2e.dra.proof_churn import ProofChurn
from tests.e2e.dra.seen import REQUIRED_HASH
from tests.e2e.dra.test_proof_devices import Proofs
from tests.e2e.kube import NODES, PODS, ApiError, Kube, NotInTimeError, Raw, pod, wait_until
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.processes import OPT_IN, remove_nodes
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES, installed
from webhook.kube.install.policies import Installation, dra, policies

HASHES = ("sha256:" + "ab" * 32, "other1")


@frozen
class Size:
    nodes: int
    gpus: int
    pods: int
    pace: float
    """Seconds for which a node stays as it is."""
    patience: float


PODS_AT_LENGTH = int(os.environ.get("PROOF_CHURN_PODS", "10000"))  # noqa: TID251 - the size of a test
SHORT = Size(nodes=4, gpus=4, pods=100, pace=4, patience=240)
LONG = Size(nodes=50, gpus=8, pods=PODS_AT_LENGTH, pace=45, patience=7200)
# The limit for pods that are bound or marked late, and how long a write to the API server may take on a quiet machine.
# On a busy one the limit grows with these writes.
LATE, WRITE = 1.0, 0.1


def asking(name: str, gpus: int, hash: str) -> Raw:
    return pod(name, gpus, {REQUIRED_HASH: hash}, terminationGracePeriodSeconds=1)


@pytest.mark.parametrize(
    "size", [SHORT, pytest.param(LONG, marks=pytest.mark.long)], ids=lambda size: f"{size.pods} pods"
)
async def test_pods_have_proven_gpus_while_proofs_come_and_go(
    cluster: Cluster, kube: Kube, classes: None, tmp_path: Path, request: pytest.FixtureRequest, size: Size
) -> None:
    nodes = [f"churn-{number}" for number in range(size.nodes)]
    async with AsyncExitStack() as stack:
        proofs = await native_proofs(stack, cluster, kube, tmp_path, nodes, size.gpus)
        gpus = {(GPU_DRIVER, node, f"gpu-{k}"): gpu_uuid(node, k) for node in nodes for k in range(size.gpus)}
        churn = ProofChurn(proofs, gpus, HASHES, size.pace, asking)
        stack.push_async_callback(churn.end)
        async with churn.running():
            with suppress(NotInTimeError):  # the figures of fewer pods are worth seeing
                await wait_until(lambda: number_bound(churn), lambda count: count >= size.pods, size.patience)
        check_figures(churn, request)
        if await number_bound(churn) < size.pods:
            raise NotInTimeError(f"{await number_bound(churn)} of {size.pods} pods were bound")


def check_figures(churn: ProofChurn, request: pytest.FixtureRequest) -> None:
    late, marked = churn.seconds_bound_late(), churn.seconds_until_marked()
    write = percentile(churn.writes.seconds, 0.99)
    faults, figures = churn.faults(), {"bound_late_max": max(late), "marked_p99": percentile(marked, 0.99)}
    report_figures(
        request,
        pods=len(late),
        pods_per_second=len(late) / (churn.over - churn.begun).total_seconds(),
        changes_of_evidence=sum(map(len, churn.periods.values())),
        wrong_pairs=len(faults),
        bound_after_the_end=sum(one > 0 for one in late),
        marked=len(marked),
        marked_p50=percentile(marked, 0.5),
        marked_max=max(marked),
        write_p50=percentile(churn.writes.seconds, 0.5),
        write_p99=write,
        **figures,
    )
    assert faults == []
    unseen = list(churn.unseen())
    if unseen:
        raise NotInTimeError(str(unseen[:3]))
    assert len(marked) > len(late) / 20
    if max(figures.values()) > LATE * max(1, write / WRITE):
        raise NotInTimeError(f"{figures}, while a write took {write:.2f} s")


async def number_bound(churn: ProofChurn) -> int:
    return len(churn.bound())


async def native_proofs(
    stack: AsyncExitStack, cluster: Cluster, kube: Kube, directory: Path, nodes: list[str], gpus: int
) -> Proofs:
    """Nodes without evidence, and an installation with native pods."""
    await installed(kube)
    stack.push_async_callback(removed, kube, nodes)
    await asyncio.to_thread(cluster.add_nodes, [gpu_node(node, 0) for node in nodes])
    for node in nodes:
        await published_gpus(kube, node, gpus)
    installation = Installation(native=True)
    for manifest in (*policies(installation), *dra(installation)):
        if manifest["kind"] != "DeviceClass":
            await kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(kube.delete, resource_of(manifest), manifest["metadata"]["name"])
    namespace = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
    flags = ("--native-templates", "true", "--on-evidence-lost", "evict")
    proofs = Proofs(cluster, kube, namespace, directory, flags)
    stack.push_async_callback(proofs.kill)
    await proofs.start()
    await wait_until(lambda: is_native(kube, namespace))
    return proofs


async def is_native(kube: Kube, namespace: str) -> bool:
    """Whether the policies act."""
    try:
        made = await kube.create(PODS, asking("probe", 1, HASHES[0]), namespace, dryRun="All")
    except ApiError:
        return False
    return "resourceClaims" in made["spec"]


async def removed(kube: Kube, nodes: list[str]) -> None:
    await remove_slices(kube, *nodes)
    await remove_nodes(kube, nodes, (GPU_NODES, NODE_EVIDENCES, NODES))
