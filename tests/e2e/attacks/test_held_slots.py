"""Another controller writes reservations into GPUNodes. The API server refuses to release a held device, whoever
writes."""

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import GPU_NODES
from tests.e2e.kube import ApiError, Kube, delete_without_finalizers
from tests.e2e.test_ledger import NODE_A, NODE_B, ApiBench, installed
from tests.ledger.contract import ask, on, pod
from webhook.core.reservation import PodProof, ReservationId
from webhook.kube.client import connect
from webhook.runtime.settings import Settings


@pytest.fixture
async def bench(cluster: Cluster, kube: Kube) -> AsyncIterator[ApiBench]:
    await installed(kube)
    for raw in (NODE_A, NODE_B):
        await kube.create(GPU_NODES, copy.deepcopy(raw))
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        yield ApiBench(api, kube)
    for raw in (NODE_A, NODE_B):
        await delete_without_finalizers(kube, GPU_NODES, raw["metadata"]["name"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param([{"op": "remove", "path": "/status/held/GPU-a0~10"}], id="slot-removed"),
        pytest.param([{"op": "remove", "path": "/status/held"}], id="all-slots-removed"),
        pytest.param([{"op": "remove", "path": "/status"}], id="status-removed"),
        pytest.param(
            [{"op": "replace", "path": "/status/held/GPU-a0~10/reservation", "value": "r9"}], id="another-reservation"
        ),
        pytest.param(
            [{"op": "replace", "path": "/status/held/GPU-a0~10/namespace", "value": "x"}], id="another-namespace"
        ),
        pytest.param([{"op": "replace", "path": "/status/held/GPU-a0~10/digest", "value": "x"}], id="another-claim"),
        pytest.param([{"op": "replace", "path": "/status/held/GPU-a0~10/uid", "value": "x"}], id="another-pod"),
        pytest.param([{"op": "remove", "path": "/status/held/GPU-a0~10/uid"}], id="no-pod"),
        pytest.param(
            [
                {"op": "remove", "path": "/status/held/GPU-a0~10"},
                {
                    "op": "add",
                    "path": "/status/held/GPU-a0~10",
                    "value": {"reservation": "r9", "phase": "pending", "namespace": "ml", "digest": "d1"},
                },
            ],
            id="removed-and-taken-in-one-write",
        ),
    ],
)
async def test_api_server_refuses_writes_that_release_a_held_device(
    bench: ApiBench, change: list[dict[str, Any]]
) -> None:
    await bench.reserve(bench.ledger, ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
    before = await bench.held()
    with pytest.raises(ApiError) as refused:
        await bench.kube.patch(GPU_NODES, "node-a", change, subresource="status")
    assert refused.value.status == 422
    assert await bench.held() == before


async def test_one_of_several_concurrent_writers_gets_the_slot(bench: ApiBench) -> None:
    async def write(number: int) -> int:
        entry = {"reservation": f"blind-{number}", "phase": "pending", "namespace": "ml", "digest": "d"}
        change = {"status": {"held": {"GPU-b0/0": entry}}}
        try:
            await bench.kube.patch(GPU_NODES, "node-b", change, subresource="status")
        except ApiError as exc:
            return exc.status
        return 200

    statuses = await asyncio.gather(*(write(number) for number in range(16)))
    assert statuses.count(200) == 1
    assert set(statuses) <= {200, 409, 422}
    assert len(await bench.held("node-b")) == 1


@pytest.mark.parametrize("slot", ["GPU-a0", "GPU-a0/", "GPU-a0/01", "GPU-a0/-1", "GPU-a0/\u0663", "GPU-a0/k"])
async def test_reservation_of_an_unknown_slot_is_refused(bench: ApiBench, slot: str) -> None:
    entry = {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}
    await bench.reserve(bench.ledger, ask(1), on("node-a", "GPU-a1"))
    with pytest.raises(ApiError, match="a slot is named by the UUID of its device and a number"):
        await bench.kube.patch(GPU_NODES, "node-a", {"status": {"held": {slot: entry}}}, subresource="status")
