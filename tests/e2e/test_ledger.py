"""The ledger on a real API server: the contract suite, and the CRD's rules against other writers."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes.aio import client

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import Kube, Resource, delete_without_finalizers, wait_until
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, Bench, LedgerContract, ask, on, pod
from tests.ledger.fake_store import gpu_node
from tests.ledger.test_cluster import Pods
from webhook.core.device import DeviceUuid, Node, Slot
from webhook.core.errors import SlotsTakenError, UnknownReservationError
from webhook.core.fleet import Fleet
from webhook.core.reservation import Placement, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.client import connect
from webhook.kube.gpu_node import GpuNode, with_held
from webhook.kube.install.crds import manifests
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.moves import Times
from webhook.runtime.settings import Settings

CRDS = Resource("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)

NODE_A = gpu_node("node-a", "GPU-a0", "GPU-a1", "GPU-a2", "GPU-a3", "GPU-s", shares={"GPU-s": 4})
NODE_B = gpu_node("node-b", "GPU-b0")


class ApiBench:
    """The contract's nodes as objects of the API server, with a clock that the test sets."""

    def __init__(self, api: client.ApiClient, kube: Kube) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.api = api
        self.kube = kube
        self.ledger, self.fleet = self.another()

    def another(self, skew: timedelta = timedelta(0)) -> tuple[ClusterLedger, Fleet]:
        """A replica that has seen no reservation, with a clock that is off by `skew`."""
        fleet = Fleet()
        for raw in (NODE_A, NODE_B):
            node = GpuNode.parse({**raw, "metadata": {**raw["metadata"], "resourceVersion": "0"}})
            fleet.put(Node(node.name, devices=node.devices), self.now)
        times = Times(PENDING_DEADLINE, CLOCK_SKEW)
        return ClusterLedger(fleet, ApiGpuNodes(self.api), Pods(), lambda: self.now + skew, times), fleet

    async def reserve(self, ledger: ClusterLedger, what: ReservationRequest, *places: Placement) -> Reservation:
        return await ledger.reserve(what, places, answer_by=self.now + timedelta(seconds=10))

    async def held(self, node: str = "node-a") -> dict[str, Any]:
        held: dict[str, Any] = (await self.kube.get(GPU_NODES, node)).get("status", {}).get("held", {})
        return held


async def installed(kube: Kube) -> None:
    """Applies the CRDs as an installer does; the API server checks their rules and the cost of these."""
    for manifest in manifests():
        name = manifest["metadata"]["name"]
        if await kube.find(CRDS, name) is None:
            await kube.create(CRDS, manifest)
        await wait_until(lambda name=name: is_established(kube, name))  # type: ignore[misc]  # bound now, not later


async def is_established(kube: Kube, name: str) -> bool:
    conditions = (await kube.get(CRDS, name))["status"].get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


@pytest.fixture
async def bench(cluster: Cluster, kube: Kube) -> AsyncIterator[ApiBench]:
    await installed(kube)
    for raw in (NODE_A, NODE_B):
        await kube.create(GPU_NODES, copy.deepcopy(raw))
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        yield ApiBench(api, kube)
    for raw in (NODE_A, NODE_B):
        await delete_without_finalizers(kube, GPU_NODES, raw["metadata"]["name"])


class TestClusterLedgerOnTheApiServer(LedgerContract):
    """The whole contract suite."""

    async def given_up(self, bench: Bench) -> Collection[Reservation]:
        assert isinstance(bench.ledger, ClusterLedger)
        return await bench.ledger.collect(bench.now, was_never_created=lambda _: True)


async def test_independent_replicas_never_reserve_the_same_device(bench: ApiBench) -> None:
    ledgers = [bench.another()[0] for _ in range(4)]
    places = [on("node-a", f"GPU-a{k}") for k in range(4)]
    asks = [bench.reserve(ledgers[n % 4], ask(n), *places) for n in range(80)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    winners = [one for one in results if isinstance(one, Reservation)]
    assert sorted(one.uuids for one in winners) == [("GPU-a0",), ("GPU-a1",), ("GPU-a2",), ("GPU-a3",)]
    assert all(isinstance(one, Reservation | SlotsTakenError) for one in results)
    assert {slot: entry["reservation"] for slot, entry in (await bench.held()).items()} == {
        str(slot): one.id for one in winners for slot in one.slots
    }


async def test_expired_reservation_is_replaced_by_a_new_one(bench: ApiBench) -> None:
    other, _ = bench.another()
    await bench.reserve(bench.ledger, ask(1), on("node-a", "GPU-a0"))
    await other.find(ReservationId("r1"), node="node-a")
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await other.collect(bench.now)
    taken = await bench.reserve(other, ask(2), on("node-a", "GPU-a0"))
    assert [entry["reservation"] for entry in (await bench.held()).values()] == [taken.id]


async def test_clock_skew_never_releases_a_reservation_too_early(bench: ApiBench) -> None:
    slow, _ = bench.another(-CLOCK_SKEW)
    fast, _ = bench.another(CLOCK_SKEW)
    await bench.reserve(slow, ask(1), on("node-a", "GPU-a0"))
    await fast.find(ReservationId("r1"), node="node-a")
    deadline = bench.now - CLOCK_SKEW + PENDING_DEADLINE  # as the replica with the slow clock wrote it
    bench.now = deadline - CLOCK_SKEW  # for the fast clock it ends here; the replica waits for the skew
    await fast.collect(bench.now + CLOCK_SKEW)
    with pytest.raises(SlotsTakenError):
        await bench.reserve(fast, ask(2), on("node-a", "GPU-a0"))
    bench.now = deadline + timedelta(seconds=1)
    await fast.collect(bench.now + CLOCK_SKEW)
    assert (await bench.reserve(fast, ask(2), on("node-a", "GPU-a0"))).uuids == ("GPU-a0",)
    with pytest.raises(UnknownReservationError):
        await slow.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))


# The second lock: the API server refuses every write that releases a held device.


async def test_kubectl_shows_free_and_held_counts(bench: ApiBench, cluster: Cluster) -> None:
    await bench.reserve(bench.ledger, ask(1), on("node-a", "GPU-a0", "GPU-a1"))
    process = await asyncio.create_subprocess_exec(
        *cluster.kubectl, "get", "gn", "node-a", "--no-headers", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().split()[:4] == ["node-a", "8", "6", "2"]


async def test_all_2000_gpus_of_a_node_can_be_reserved(bench: ApiBench) -> None:
    """Each GPU has its own reservation of maximum length."""
    uuids = [f"GPU-{k:08x}-0000-4000-8000-000000000000" for k in range(2000)]
    said = {"model": "NVIDIA H100 80GB HBM3", "memory": "81559Mi", "labels": ["fudo.org/gpu.memory-80g", "model=h100"]}
    devices = [{"uuid": uuid, "index": k, "serial": f"16503{k:08}", **said} for k, uuid in enumerate(uuids)]
    await bench.kube.create(GPU_NODES, {**gpu_node("node-big"), "spec": {"devices": devices}})
    try:
        since = bench.now + timedelta(microseconds=123456)
        held = [
            Reservation(
                id=ReservationId(f"{k:08x}-0000-4000-8000-000000000401"),
                namespace="a-team-of-some-size",
                claim_digest="d" * 64,
                node="node-big",
                slots=(Slot(DeviceUuid(uuid), 0),),
                since=since,
                deadline=since,
                pod_name=f"train-7d9f8b6c5d-{k:05}",
                uid=f"{k:08x}-0000-4000-8000-00000000b0d1",
            )
            for k, uuid in enumerate(uuids)
        ]
        store = ApiGpuNodes(bench.api)
        raw = await store.get("node-big")
        assert raw is not None
        written = await store.put_status(with_held(raw, held, GpuNode.parse(raw).devices))
        assert len(written["status"]["held"]) == 2000
        assert written["spec"]["devices"][1999]["uuid"] == uuids[-1]
        assert 1.4 * 2**20 < len(json.dumps(written, separators=(",", ":"))) < 1.5 * 2**20
    finally:
        await delete_without_finalizers(bench.kube, GPU_NODES, "node-big")
