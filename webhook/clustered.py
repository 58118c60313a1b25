"""The parts of a process in a cluster: reservations in GPUNode objects, nodes and devices from watches."""

import asyncio
from collections.abc import Mapping

import structlog
from kubernetes.aio import client

from webhook.clock import Clock
from webhook.cluster import GPU_NODES, ApiGpuNodes, ApiPods
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.evidence.static import StaticEvidence
from webhook.inventory.gpu_nodes import ClusterInventory, GpuNodesListener, NodesListener
from webhook.ledger.cluster import ClusterLedger
from webhook.settings import Settings
from webhook.telemetry import Metrics
from webhook.watch import Watch
from webhook.wiring import Parts, assembled, times_of

log = structlog.get_logger(__name__)

GPU_NODES_PATH = "/apis/" + "/".join(GPU_NODES)
NODES_PATH = "/api/v1/nodes"
PODS_PATH = "/api/v1/pods"


def clustered(settings: Settings, clock: Clock, api: client.ApiClient, pods: ApiPods) -> Parts:
    """Any number of processes put together like this may serve one cluster."""
    if settings.inventory is not None:
        log.warning("the inventory file is not read: nodes and devices come from the cluster")
    fleet, metrics = Fleet(), Metrics()
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, clock, times_of(settings))
    evidence = StaticEvidence(settings.node_hash_map)
    feed = ClusterFeed(api, fleet, ledger, evidence, clock)
    return assembled(settings, clock, fleet, metrics, ledger, feed, pods)


class ClusterFeed:
    """Keeps the fleet and the ledger up to date with what the API server shows."""

    def __init__(
        self, api: client.ApiClient, fleet: Fleet, ledger: ClusterLedger, evidence: StaticEvidence, clock: Clock
    ) -> None:
        self._evidence = evidence
        self._known: Mapping[str, Evidence] = {}
        inventory = ClusterInventory(fleet, clock, proven=lambda name: self._known.get(name))
        gpu_nodes = GpuNodesListener(inventory, learn=ledger.learn, forget=ledger.forget)
        self._watches = (Watch(api, NODES_PATH, NodesListener(inventory)), Watch(api, GPU_NODES_PATH, gpu_nodes))
        self._tasks: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        """The first lists; an API server that is away is waited for."""
        self._known = await self._evidence.poll()
        self._tasks = [asyncio.create_task(watch.run()) for watch in self._watches]
        for watch in self._watches:
            await watch.ready.wait()

    async def run(self, interval: float) -> None:
        """For ever; a watch that ends is a bug, and shows here."""
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
