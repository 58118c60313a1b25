"""Builds the parts of a process in a cluster. Reservations are in GPUNodes; nodes, devices and evidence are watched."""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta

import structlog
from attrs import evolve, frozen

from webhook.admission.api_namespaces import ApiNamespaces
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener, NodesListener
from webhook.admission.fleet_updater import Staleness
from webhook.admission.namespaces import WatchedNamespaces
from webhook.admission.parts import Parts
from webhook.admission.placement_maps import MapNamespaceListener, MappedStatefulSets
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.assembly.parts import FleetParts, assembled, hinting_of, injection_of_nodes, limits_of, times_of
from webhook.core import keys
from webhook.core.evidence import Evidence
from webhook.core.fleet import SPREAD, Fleet
from webhook.core.injection import Injection
from webhook.core.raw import Raw
from webhook.evidence.cluster import EvidenceView, EvidenceWriter
from webhook.evidence.jwt.attestation import attestation_of
from webhook.evidence.jwt.cluster_proofs import ApiNodeCreationTimes, ClusterBundleVersions, ClusterProofs
from webhook.evidence.jwt.node_reports import NodeReports
from webhook.evidence.jwt.nonce import LIFE as CHALLENGE_LIFE
from webhook.evidence.providers import providers_of, pushed_of, retired_of
from webhook.evidence.static import StaticEvidence, written_by_hand
from webhook.inventory.discovery import DeviceMarks, Discovery, FileInventory, WrittenInjections
from webhook.inventory.file import InventoryFile
from webhook.inventory.published_gpus import PublishedGpus
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.api_objects import ApiNodes, ApiObjects
from webhook.kube.client import ApiClient
from webhook.kube.events import Events
from webhook.kube.paths import (
    GPU_NODES,
    GPU_NODES_PATH,
    NAMESPACES_PATH,
    NODE_EVIDENCES,
    NODE_EVIDENCES_PATH,
    NODES_PATH,
    PODS_PATH,
    PRIORITY_CLASSES_PATH,
    RESOURCE_SLICES_PATH,
    STATEFUL_SETS_PATH,
    TRUST_BUNDLES,
)
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import BACKOFF, Watch, WatchGroup, WatchListener
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics
from webhook.scoring.candidates import RunningJobs, WatchedPriorityClasses
from webhook.scoring.hints import HintService

log = structlog.get_logger(__name__)

# An interrupted watch is retried within this time.
PATIENCE = BACKOFF.longest.total_seconds()


@frozen
class ClusterParts(FleetParts):
    """The fleet of a cluster, with reservations in its GPUNode objects."""

    ledger: ClusterLedger
    fleet_source: "ClusterFleetSource"
    namespaces: WatchedNamespaces

    @classmethod
    def of(
        cls,
        settings: Settings,
        clock: Clock,
        api: ApiClient,
        pods: ApiPods,
        injection: Injection | None = Injection.NVIDIA,
        *,
        gpu_resource: str = "",
        is_strict: bool = False,
    ) -> "ClusterParts":
        """`injection` is the one of nodes without the label. With `is_strict`, no GPUs are reserved on nodes where a
        device plugin offers `gpu_resource`. The three matter only for decisions."""
        offset = random.randrange(SPREAD)  # noqa: S311 - only to keep out of step
        fleet = Fleet(offset, injection)
        ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, clock, times_of(settings))
        namespaces = WatchedNamespaces(ApiNamespaces(api))
        fleet_source = ClusterFleetSource(
            api,
            fleet,
            ledger,
            written_by_hand(settings.node_hash_map if StaticEvidence.name in settings.evidence else {}),
            clock,
            namespaces,
            asked=settings.evidence,
            skew=settings.clock_skew,
            max_age=settings.max_evidence_age,
            opt_in=settings.opt_in_label,
            gpu_resource=gpu_resource,
            is_strict=is_strict,
        )
        return cls(fleet, Metrics(), ledger, fleet_source, namespaces)


def clustered(settings: Settings, clock: Clock, api: ApiClient, pods: ApiPods) -> Parts:
    """A server in a cluster. Any number of them may serve the same cluster."""
    if settings.inventory is not None:
        log.warning(
            "the inventory file is not read: nodes and devices come from the cluster, where reconcile writes them"
        )
    found = ClusterParts.of(
        settings,
        clock,
        api,
        pods,
        injection_of_nodes(settings),
        gpu_resource=settings.gpu_resource,
        is_strict=settings.strict_devices,
    )
    parts = assembled(settings, clock, found, pods, found.namespaces, limits_of(settings))
    waiting = WaitingPods(parts.rules.claims, parts.rules.dress, queue_order=parts.reserver.queue_order)
    found.fleet_source.also(Watch(api, PODS_PATH, waiting, only={"labelSelector": keys.QUEUED_LABEL}))
    proofs = ClusterProofs(ApiObjects(api, NODE_EVIDENCES), ApiNodeCreationTimes(api), settings.clock_skew)
    reports = NodeReports(found.ledger, settings.clock_skew)
    attestation = attestation_of(settings, proofs, clock, found.metrics, marks_of(settings, api), reports)
    return evolve(parts, attestation=attestation, hinting=hinting_in(settings, parts, api))


def marks_of(settings: Settings, api: ApiClient) -> ClusterBundleVersions | None:
    """None for bundles without a sequence number: those of the Workload API."""
    if settings.bundle_endpoint is None or settings.spire_trust_domain is None:
        return None
    return ClusterBundleVersions(ApiObjects(api, TRUST_BUNDLES), settings.spire_trust_domain)


def hinting_in(settings: Settings, parts: Parts, api: ApiClient) -> HintService | None:
    """Hints have watches of their own, which no other part waits for."""
    jobs, classes = RunningJobs(), WatchedPriorityClasses()
    hinting = hinting_of(settings, parts, jobs, classes)
    if hinting is None:
        return None
    watches = (Watch(api, PODS_PATH, jobs), Watch(api, PRIORITY_CLASSES_PATH, classes.view))
    return evolve(hinting, watches=watches)


class ClusterFleetSource:
    """Keeps the fleet, the ledger and the requirements of namespaces current with watches."""

    def __init__(
        self,
        api: ApiClient,
        fleet: Fleet,
        ledger: ClusterLedger,
        own: Mapping[str, Evidence],
        clock: Clock,
        namespaces: WatchedNamespaces,
        *,
        asked: Collection[str],
        skew: timedelta,
        max_age: timedelta,
        opt_in: str,
        gpu_resource: str,
        is_strict: bool,
    ) -> None:
        evidence = EvidenceView(own, required=asked, skew=skew, max_age=max_age)
        cluster_fleet = ClusterFleet(fleet, clock, evidence.combined_evidence, gpu_resource, is_strict=is_strict)
        evidence.notify(cluster_fleet.prove)
        gpu_nodes = GpuNodesListener(cluster_fleet, learn=ledger.learn, forget=ledger.forget)
        sets = MappedStatefulSets(fleet, opt_in)
        self._watches: tuple[Watch, ...] = (
            Watch(api, NODES_PATH, NodesListener(cluster_fleet)),
            Watch(api, GPU_NODES_PATH, gpu_nodes),
            Watch(api, NODE_EVIDENCES_PATH, evidence),
            Watch(api, NAMESPACES_PATH, ListenerGroup(namespaces.view, MapNamespaceListener(sets))),
            Watch(api, STATEFUL_SETS_PATH, sets),
        )
        self._tasks: list[asyncio.Task[None]] = []

    def also(self, *watches: Watch) -> None:
        """Adds watches. Call it before `load`."""
        self._watches += watches

    async def load(self) -> None:
        """Waits for the first lists, without a limit if the API server is unreachable."""
        self._tasks = [asyncio.create_task(watch.run()) for watch in self._watches]
        for watch, task in zip(self._watches, self._tasks, strict=True):
            await first_list(watch, task)

    @property
    def outdated(self) -> Staleness | None:
        """Why the fleet is stale; None during interruptions of a few seconds."""
        return outdated_by(self._watches)

    async def wait_for_first_answers(self) -> None:
        """Returns at once: evidence is in NodeEvidence objects, so an unreachable provider does not delay the start."""

    async def run(self, interval: float) -> None:
        """Runs for ever. A watch that ends is a bug and raises here."""
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()


def slices_of_driver(api: ApiClient, driver: str, listener: WatchListener) -> Watch:
    """A watch of the driver's ResourceSlices."""
    only = {"fieldSelector": f"spec.driver={driver}"}
    return Watch(api, RESOURCE_SLICES_PATH, listener, only=only, trimmed=whole)


def whole(raw: Raw) -> Raw:
    """For a watch of many large objects: the listener needs all of each, and a trimmed list is compressed."""
    return raw


def outdated_by(watches: Sequence[Watch], patience: float = PATIENCE) -> Staleness | None:
    behind = [watch for watch in watches if watch.stale_for > patience]
    if not behind:
        return None
    paths, seconds = ", ".join(watch.path for watch in behind), max(watch.stale_for for watch in behind)
    return Staleness(f"no events of {paths} for {seconds:.0f} s", is_blind=True)


async def first_list(watch: Watch, task: asyncio.Task[None]) -> None:
    """Waits for it. Raises if the watch has ended."""
    ready = asyncio.ensure_future(watch.ready.wait())
    try:
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if task.done():
        task.result()


class ClusterWriters:
    """The writers of inventory and evidence, and their watches, which other listeners share."""

    def __init__(
        self,
        settings: Settings,
        api: ApiClient,
        events: Events,
        clock: Clock,
        *,
        gpu_nodes: WatchListener,
        also_nodes: Sequence[WatchListener] = (),
        also_evidences: Sequence[WatchListener] = (),
        count_error: Callable[[str], None] = lambda _: None,
        marks: DeviceMarks,
        injections: WrittenInjections,
        published: PublishedGpus | None = None,
    ) -> None:
        static = StaticEvidence(settings.node_hash_map)
        file = None if settings.inventory is None else InventoryFile(settings.inventory)
        written = FileInventory(file, static)
        node_watches, inventory_watches, evidence_watches = WatchGroup(), WatchGroup(), WatchGroup()
        self._discovery = Discovery(
            ApiObjects(api, GPU_NODES),
            ApiNodes(api),
            written,
            events,
            is_current=inventory_watches.are_current,
            published=published,
            marks=marks,
            injections=injections,
        )
        self._evidence = EvidenceWriter(
            ApiObjects(api, NODE_EVIDENCES),
            providers_of(settings, clock, static),
            clock,
            is_current=lambda: evidence_watches.are_current() and written.is_known,
            nodes=ApiNodes(api),
            are_nodes_current=node_watches.are_current,
            poll_every=settings.evidence_poll,
            retired=retired_of(settings),
            pushed=pushed_of(settings),
            first_report_timeout=settings.max_evidence_age,
            replay_window=CHALLENGE_LIFE + 2 * settings.clock_skew,
            count_error=count_error,
        )
        nodes = Watch(api, NODES_PATH, ListenerGroup(self._discovery.nodes, self._evidence.creation_times, *also_nodes))
        devices = Watch(api, GPU_NODES_PATH, ListenerGroup(gpu_nodes, self._discovery.gpu_nodes))
        evidences = Watch(api, NODE_EVIDENCES_PATH, ListenerGroup(self._evidence.view, *also_evidences))
        node_watches.add(nodes)
        slices = () if published is None else (slices_of_driver(api, settings.gpu_driver, published),)
        inventory_watches.add(nodes, devices, *slices)
        evidence_watches.add(evidences)
        self.watches = (nodes, devices, evidences)
        # Apart: only the writer of GPUNodes waits for it.
        self.slices = slices

    def begin(self) -> None:
        """Call it after the election."""
        self._evidence.begin()

    def is_update_pending(self, name: str) -> bool:
        """Whether the writer knows newer evidence of the node than its object contains."""
        return self._evidence.is_update_pending(name)

    def awaits(self, name: str, sources: Collection[str]) -> bool:
        """Whether each of these sources may still report on the node for the first time."""
        return self._evidence.awaits(name, sources)

    async def step(self) -> None:
        """One pass of each writer. A failure of one does not stop the other."""
        done = await asyncio.gather(self._discovery.step(), self._evidence.step(), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException):
                raise one
