"""The reconciler with real pods that the API server and its controllers create, run and delete."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import (
    PODS,
    ApiError,
    Kube,
    Raw,
    Resource,
    delete_without_finalizers,
    gone,
    pod_in_phase,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, NODE_A, ApiBench, bench  # noqa: F401 - the fixture
from tests.ledger.contract import on
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener
from webhook.core.claim_keys import ClaimRecord
from webhook.core.errors import SlotsTakenError
from webhook.core.reservation import ReservationId, ReservationRequest
from webhook.kube.client import connect
from webhook.kube.events import ApiEvents
from webhook.kube.paths import GPU_NODES_PATH, PODS_PATH
from webhook.kube.watch import Watch
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.reconcile import RECHECK_DELAY as LOST_AFTER
from webhook.ledger.reconcile import BindDeadline, Reconciler
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings

RECORD = ClaimRecord(gpus=1)


@pytest.fixture
async def reconciling(cluster: Cluster, bench: ApiBench) -> AsyncIterator[ApiBench]:  # noqa: F811 - the fixture
    """A reconciler that gets events from a watch of all pods."""
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        await wait_until(ApiPods(api).reserved_pods, lambda found: not found)  # pods of earlier tests are being deleted
        events = ApiEvents(api, utc_now, lambda _: None)
        reconciler = Reconciler(bench.ledger, ApiPods(api), events, lambda: bench.now)
        watch = Watch(api, PODS_PATH, reconciler)
        objects = GpuNodesListener(
            ClusterFleet(bench.fleet, utc_now, proven=lambda _: None),
            learn=bench.ledger.learn,
            forget=bench.ledger.forget,
        )
        gpu_nodes = Watch(api, GPU_NODES_PATH, objects)

        async def step_on() -> None:
            while True:
                await reconciler.step()
                await asyncio.sleep(0.05)

        running = (watch.run(), gpu_nodes.run(), events.run(), step_on())
        tasks = [asyncio.create_task(one) for one in running]
        await asyncio.wait_for(watch.ready.wait(), 30)
        await asyncio.wait_for(gpu_nodes.ready.wait(), 30)
        yield bench
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def dressed_pod(reservation_id: str, **annotations: str) -> Raw:
    """A dressed pod, with the fields that the reconciler reads."""
    ours = {
        "gpuwarden.io/reservation-id": reservation_id,
        "gpuwarden.io/node": "node-a",
        "gpuwarden.io/gpu-uuid": "GPU-a0",
        "gpuwarden.io/claim": RECORD.text(),
    }
    return {
        "metadata": {"name": "train", "annotations": {**ours, **annotations}},
        "spec": {"containers": [{"name": "train", "image": "registry.example/train:1"}], "restartPolicy": "Never"},
    }


async def reserved(bench: ApiBench, namespace: str) -> None:  # noqa: F811 - the fixture
    ask = ReservationRequest(ReservationId("r1"), namespace, RECORD.digest())
    await bench.reserve(bench.ledger, ask, on("node-a", "GPU-a0"))


async def is_in_phase(bench: ApiBench, phase: str | None) -> bool:  # noqa: F811 - the fixture
    entry = (await bench.held()).get("GPU-a0/0")
    return (entry and entry["phase"]) == phase


async def test_existing_pod_is_bound_to_its_reservation_by_uid(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await reserved(reconciling, namespace)
    created = await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    assert (await reconciling.held())["GPU-a0/0"]["uid"] == created["metadata"]["uid"]


async def test_succeeded_pod_releases_its_devices_before_it_is_deleted(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await reserved(reconciling, namespace)
    await kube.create(
        PODS, dressed_pod("r1", **{"kubelet.test/runs-for": "500ms", "kubelet.test/ends": "Succeeded"}), namespace
    )
    await pod_in_phase(kube, namespace, "train", "Succeeded")
    await wait_until(lambda: is_in_phase(reconciling, None))
    assert await kube.find(PODS, "train", namespace) is not None


async def test_terminating_pod_keeps_its_devices_until_it_is_gone(
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


# What the watch alone would never correct.

EVENTS = Resource("api/v1", "events")
CONFIG_MAPS = Resource("api/v1", "configmaps")


async def reasons(kube: Kube, namespace: str) -> set[str]:
    return {one["reason"] for one in await kube.list(EVENTS, namespace)}


async def test_owned_pod_that_is_never_scheduled_is_deleted_by_uid_with_an_event(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    owner = await kube.create(CONFIG_MAPS, {"metadata": {"name": "owner"}}, namespace)
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    waiting = dressed_pod("r1")
    waiting["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
    waiting["spec"]["schedulerName"] = "nobody"
    await reserved(reconciling, namespace)
    await kube.create(PODS, waiting, namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    reconciling.now = utc_now() + BindDeadline().bind_deadline + timedelta(seconds=10)
    await gone(kube, PODS, "train", namespace)
    await wait_until(lambda: is_in_phase(reconciling, None))
    await wait_until(lambda: reasons(kube, namespace), lambda found: "BindDeadlinePassed" in found)


async def test_late_pod_gets_its_reservation_back_or_an_event(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    second = dressed_pod("r2")
    second["metadata"]["name"] = "second"
    await kube.create(PODS, second, namespace)
    await wait_until(lambda: reasons(kube, namespace), lambda found: "ReservationRestored" in found)

    async def event_reasons() -> set[str]:
        reconciling.now += LOST_AFTER
        return await reasons(kube, namespace)

    await wait_until(event_reasons, lambda found: "ReservationLost" in found)
    assert (await reconciling.held())["GPU-a0/0"]["reservation"] == "r1"


async def test_deleted_gpunode_stays_until_its_last_pod_is_gone(
    reconciling: ApiBench, kube: Kube, namespace: str
) -> None:
    await reserved(reconciling, namespace)
    await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    await kube.delete(GPU_NODES, "node-a")
    await wait_until(lambda: kube.get(GPU_NODES, "node-a"), lambda raw: "deletionTimestamp" in raw["metadata"])
    other, _ = reconciling.another()
    with pytest.raises(SlotsTakenError):
        await reconciling.reserve(
            other, ReservationRequest(ReservationId("r2"), namespace, "d"), on("node-a", "GPU-a1")
        )
    await kube.delete(PODS, "train", namespace)
    await gone(kube, GPU_NODES, "node-a")
    await kube.create(GPU_NODES, copy.deepcopy(NODE_A))


async def test_recreated_gpunode_is_rebuilt_from_the_pods(reconciling: ApiBench, kube: Kube, namespace: str) -> None:
    await reserved(reconciling, namespace)
    created = await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    await delete_without_finalizers(kube, GPU_NODES, "node-a")
    await kube.create(GPU_NODES, copy.deepcopy(NODE_A))
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    assert (await reconciling.held())["GPU-a0/0"]["uid"] == created["metadata"]["uid"]


async def test_manually_removed_reservation_is_restored(reconciling: ApiBench, kube: Kube, namespace: str) -> None:
    await reserved(reconciling, namespace)
    await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    path = "/status/held/GPU-a0~10"
    await kube.patch(
        GPU_NODES, "node-a", [{"op": "replace", "path": f"{path}/phase", "value": "releasing"}], subresource="status"
    )
    with suppress(ApiError):  # the reconciler may have restored it already
        await kube.patch(GPU_NODES, "node-a", [{"op": "remove", "path": path}], subresource="status")
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))


@pytest.mark.defect("assigner-8")
async def test_garbage_collector_deletes_no_reservation(reconciling: ApiBench, kube: Kube, namespace: str) -> None:
    await reserved(reconciling, namespace)
    await kube.create(PODS, dressed_pod("r1"), namespace)
    await wait_until(lambda: is_in_phase(reconciling, "finalized"))
    # It is created later and has an owner that does not exist: once it is collected, the collector has considered the
    # earlier objects.
    missing_owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "nobody",
        "uid": "00000000-0000-0000-0000-000000000000",
    }
    await kube.create(CONFIG_MAPS, {"metadata": {"name": "orphan", "ownerReferences": [missing_owner]}}, namespace)
    await gone(kube, CONFIG_MAPS, "orphan", namespace)
    raw = await kube.get(GPU_NODES, "node-a")
    assert "ownerReferences" not in raw["metadata"]
    assert "deletionTimestamp" not in raw["metadata"]
    assert raw["status"]["held"]["GPU-a0/0"]["phase"] == "finalized"
