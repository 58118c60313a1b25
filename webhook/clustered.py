"""The parts of a process in a cluster: reservations in GPUNode objects, nodes, devices and evidence from watches."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import structlog
from attrs import evolve
from kubernetes.aio import client

from webhook.api_objects import ApiNamespaces, ApiNodes, ApiObjects
from webhook.attestation import attestation_of
from webhook.clock import Clock
from webhook.cluster import GPU_NODES, ApiGpuNodes, ApiPods
from webhook.core.evidence import Evidence
from webhook.core.fleet import SPREAD, Fleet
from webhook.discovery import Discovery, WrittenInventory
from webhook.events import Events
from webhook.evidence.static import StaticEvidence, written_by_hand
from webhook.evidence_providers import providers_of, retired_of
from webhook.inventory.file import InventoryFile
from webhook.inventory.gpu_nodes import ClusterInventory, GpuNodesListener, NodesListener
from webhook.ledger.cluster import ClusterLedger
from webhook.namespaces import WatchedNamespaces
from webhook.node_evidences import EvidenceView, EvidenceWriter
from webhook.node_proofs import ApiBirths, ClusterProofs
from webhook.settings import Settings
from webhook.telemetry import Metrics
from webhook.view import Several
from webhook.watch import Listener, Watch
from webhook.wiring import Parts, assembled, times_of

log = structlog.get_logger(__name__)

NODE_EVIDENCES = ("gpuwarden.io", "v1alpha1", "nodeevidences")
GPU_NODES_PATH = "/apis/" + "/".join(GPU_NODES)
NODE_EVIDENCES_PATH = "/apis/" + "/".join(NODE_EVIDENCES)
NODES_PATH = "/api/v1/nodes"
NAMESPACES_PATH = "/api/v1/namespaces"


def clustered(settings: Settings, clock: Clock, api: client.ApiClient, pods: ApiPods) -> Parts:
    """Any number of processes put together like this may serve one cluster."""
    if settings.inventory is not None:
        log.warning(
            "the inventory file is not read: nodes and devices come from the cluster, where reconcile writes them"
        )
    fleet, metrics = Fleet(turn=random.randrange(SPREAD)), Metrics()  # noqa: S311 - only to keep out of step
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, clock, times_of(settings))
    own = written_by_hand(settings.node_hash_map if StaticEvidence.name in settings.evidence else {})
    namespaces = WatchedNamespaces(ApiNamespaces(api))
    feed = ClusterFeed(api, fleet, ledger, own, clock, namespaces)
    parts = assembled(settings, clock, fleet, metrics, ledger, feed, pods, namespaces)
    proofs = ClusterProofs(ApiObjects(api, NODE_EVIDENCES), ApiBirths(api), settings.clock_skew)
    return evolve(parts, attestation=attestation_of(settings, proofs, clock, metrics))


class ClusterFeed:
    """Keeps the fleet, the ledger and what namespaces demand up to date with what the API server shows."""

    def __init__(
        self,
        api: client.ApiClient,
        fleet: Fleet,
        ledger: ClusterLedger,
        own: Mapping[str, Evidence],
        clock: Clock,
        namespaces: WatchedNamespaces,
    ) -> None:
        inventory = ClusterInventory(fleet, clock, proven=lambda name: evidence.word_on(name))
        evidence = EvidenceView(own, show=inventory.prove)
        gpu_nodes = GpuNodesListener(inventory, learn=ledger.learn, forget=ledger.forget)
        self._watches = (
            Watch(api, NODES_PATH, NodesListener(inventory)),
            Watch(api, GPU_NODES_PATH, gpu_nodes),
            Watch(api, NODE_EVIDENCES_PATH, evidence),
            Watch(api, NAMESPACES_PATH, namespaces.view),
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def load(self) -> None:
        """The first lists; an API server that is away is waited for."""
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


class Discovering:
    """The writers of inventory and evidence, with the watches they hear from; others hear the same."""

    def __init__(
        self,
        settings: Settings,
        api: client.ApiClient,
        events: Events,
        clock: Clock,
        *,
        gpu_nodes: Listener,
        also_nodes: Sequence[Listener] = (),
        also_evidences: Sequence[Listener] = (),
        count_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        static = StaticEvidence(settings.node_hash_map)
        file = None if settings.inventory is None else InventoryFile(settings.inventory)
        written = WrittenInventory(file, static)
        self._discovery = Discovery(
            ApiObjects(api, GPU_NODES),
            ApiNodes(api),
            written,
            events,
            is_current=lambda: nodes.is_current and devices.is_current,
        )
        self._evidence = EvidenceWriter(
            ApiObjects(api, NODE_EVIDENCES),
            providers_of(settings, clock, static),
            clock,
            is_current=lambda: evidences.is_current and written.is_known,
            poll_every=settings.evidence_poll,
            retired=retired_of(settings),
            count_error=count_error,
        )
        nodes = Watch(api, NODES_PATH, Several(self._discovery.nodes, *also_nodes))
        devices = Watch(api, GPU_NODES_PATH, Several(gpu_nodes, self._discovery.gpu_nodes))
        evidences = Watch(api, NODE_EVIDENCES_PATH, Several(self._evidence.view, *also_evidences))
        self.watches = (nodes, devices, evidences)

    def is_owed(self, name: str) -> bool:
        """Whether something newer is known of the node's evidence than its object says."""
        return self._evidence.is_owed(name)

    async def step(self) -> None:
        """One pass of each; a failure of the one does not keep the other from its turn."""
        done = await asyncio.gather(self._discovery.step(), self._evidence.step(), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
