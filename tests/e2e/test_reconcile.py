"""The reconciler with real pods: they come, run, end and go as the API server and its controllers will have it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import PODS, Kube, Raw, pod_in_phase, wait_until
from tests.e2e.test_ledger import ApiBench, bench  # noqa: F401 - the fixture
from tests.ledger.contract import on
from webhook.cluster import ApiPods, connected
from webhook.core.claim import ClaimRecord
from webhook.core.reservation import Ask, ReservationId
from webhook.ledger.reconcile import Reconciler
from webhook.settings import Settings
from webhook.watch import Watch

RECORD = ClaimRecord(gpus=1)


@pytest.fixture
async def reconciling(cluster: Cluster, bench: ApiBench) -> AsyncIterator[ApiBench]:  # noqa: F811 - the fixture
    """A reconciler at work on what a watch of all pods tells it."""
    async with await connected(Settings(kubeconfig=cluster.kubeconfig)) as api:
        reconciler = Reconciler(bench.ledger, ApiPods(api), lambda: bench.now)
        watch = Watch(api, "/api/v1/pods", reconciler)

        async def step_on() -> None:
            while True:
                await reconciler.step()
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(watch.run()), asyncio.create_task(step_on())]
        await asyncio.wait_for(watch.ready.wait(), 30)
        yield bench
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def dressed_pod(reservation_id: str, **annotations: str) -> Raw:
    """A pod as it leaves the mutating door, in the part that the reconciler reads."""
    ours = {
        "gpuwarden.io/reservation-id": reservation_id,
        "gpuwarden.io/node": "node-a",
        "gpuwarden.io/claim": RECORD.text(),
    }
    return {
        "metadata": {"name": "train", "annotations": {**ours, **annotations}},
        "spec": {"containers": [{"name": "train", "image": "registry.example/train:1"}], "restartPolicy": "Never"},
    }


async def reserved(bench: ApiBench, namespace: str) -> None:  # noqa: F811 - the fixture
    ask = Ask(ReservationId("r1"), namespace, RECORD.digest())
    await bench.reserve(bench.ledger, ask, on("node-a", "GPU-a0"))


async def is_in_phase(bench: ApiBench, phase: str | None) -> bool:  # noqa: F811 - the fixture
    entry = (await bench.held()).get("GPU-a0/0")
    return (entry and entry["phase"]) == phase


async def test_a_pod_that_exists_is_confirmed_with_its_uid(reconciling: ApiBench, kube: Kube, namespace: str) -> None:
    await reserved(reconciling, namespace)
    created = await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    assert (await reconciling.held())["GPU-a0/0"]["uid"] == created["metadata"]["uid"]


async def test_a_pod_that_succeeds_frees_its_devices_though_it_is_still_listed(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await reserved(reconciling, namespace)
    await kube.create(
        PODS, dressed_pod("r1", **{"kubelet.test/runs-for": "500ms", "kubelet.test/ends": "Succeeded"}), namespace
    )
    await pod_in_phase(kube, namespace, "train", "Succeeded")
    await wait_until(lambda: is_in_phase(reconciling, None))
    assert await kube.find(PODS, "train", namespace) is not None


async def test_a_terminating_pod_holds_its_devices_until_it_is_gone(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await reserved(reconciling, namespace)
    await kube.create(PODS, dressed_pod("r1", **{"kubelet.test/stops-after": "2s"}), namespace)
    await pod_in_phase(kube, namespace, "train", "Running")
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    await kube.delete(PODS, "train", namespace)
    await asyncio.sleep(0.5)
    assert await kube.find(PODS, "train", namespace) is not None
    assert await is_in_phase(reconciling, "finalized")
    await wait_until(lambda: is_in_phase(reconciling, None))
    assert await kube.find(PODS, "train", namespace) is None
