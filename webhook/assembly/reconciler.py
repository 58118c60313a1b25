"""The parts of `gpuwarden reconcile`."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Protocol

import structlog
from attrs import frozen

from webhook.admission.api_namespaces import ApiNamespaces
from webhook.admission.audit import AuditRules
from webhook.admission.audit_watch import AuditWatch
from webhook.admission.binding_ends import BindingEnds
from webhook.admission.claimed_gpus import CombinedMarks
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener, NodesListener
from webhook.admission.delivery_watch import DeliveryWatch, OnMismatch
from webhook.admission.device_plugins import DevicePlugins
from webhook.admission.evictions import ApiEvictor
from webhook.admission.evidence_loss import EvidenceLoss, OnEvidenceLost, evidence_ages, is_claim_known
from webhook.admission.kueue.api_checks import ApiChecks
from webhook.admission.kueue.checks import KueueChecks
from webhook.admission.kueue.gangs import GangReader
from webhook.admission.kueue.workloads import Workloads
from webhook.admission.namespaces import WatchedNamespaces
from webhook.admission.placement_maps import (
    MapNamespaceListener,
    MappedStatefulSets,
    NodeNameConflicts,
)
from webhook.admission.queue.api_gates import ApiGates
from webhook.admission.queue.queue import Queue
from webhook.admission.queue.waiting_pods import DemandsListener, WaitingPods
from webhook.assembly.cluster import ClusterWriters
from webhook.assembly.dra import claimed_parts, native_parts, proof_parts, rate_limited, tell_loss
from webhook.assembly.parts import injection_of_nodes, policy_of, rules_of, times_of
from webhook.core import keys
from webhook.core.fleet import Fleet
from webhook.core.hashes import HashPolicy
from webhook.dra.injections import NodeInjections
from webhook.dra.reserved_claims import ClaimForm, OnEveryChange, ReservedClaims
from webhook.dra.unplaced_pods import UnplacedPods
from webhook.evidence.cluster import EvidenceView
from webhook.inventory.offers import Offers
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.api_objects import ApiObjects
from webhook.kube.client import ApiClient
from webhook.kube.events import ApiEvents
from webhook.kube.paths import (
    ADMISSION_CHECKS_PATH,
    BINDING_ENDS,
    GPU_NODES,
    GPU_NODES_PATH,
    NAMESPACES_PATH,
    PODS_PATH,
    RESOURCE_FLAVORS_PATH,
    STATEFUL_SETS_PATH,
    WORKLOADS_PATH,
)
from webhook.kube.resource_claims import ResourceClaims
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import WATCH_ERRORS, Watch, WatchGroup, WatchListener, whole_list
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import OrphanTimes
from webhook.ledger.reconcile import BindDeadline, OnBindDeadline, Reconciler
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics
from webhook.scheduler.api import ApiPodWaker
from webhook.scheduler.nominations import Nominations
from webhook.scheduler.wakeups import Wakeups

log = structlog.get_logger(__name__)

ON_NO_NODE = {"fieldSelector": "spec.nodeName="}
# In seconds: the pause before a pass that a change begins, and the shorter one for claims of pods, which nothing else
# delays.
BREATH, SHORT_BREATH = 0.05, 0.005
# Between two lists of a kind that may not be installed.
WATCH_OPTIONAL = Backoff(timedelta(seconds=1), timedelta(seconds=30), jitter=(0.5, 1.5))


class Elected(Protocol):
    """A part that works while this process leads."""

    async def step(self) -> None: ...


@frozen
class Passes:
    """Parts that the leader runs one after the other, again and again. Other passes do not delay them."""

    steps: tuple[Elected, ...]
    # Begins the next pass at once.
    wakeup: asyncio.Event
    debounce: float = BREATH


@frozen
class ReconcilerParts:
    """What the leader works with. All replicas keep the watches current."""

    watches: tuple[Watch, ...]
    # Of kinds that an API server may not serve, or refuse to. No election waits for them.
    optional_watches: tuple[Watch, ...]
    events: ApiEvents
    ledger: ClusterLedger
    passes: tuple[Passes, ...]
    # Called after each election.
    begin: tuple[Callable[[], None], ...]


def reconciler_parts(settings: Settings, api: ApiClient, metrics: Metrics) -> ReconcilerParts:
    fleet, pods, watches = Fleet(injection=injection_of_nodes(settings)), ApiPods(api), WatchGroup()
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
    events = ApiEvents(api, utc_now, metrics.count_event)
    policy, namespaces = policy_of(settings), WatchedNamespaces(ApiNamespaces(api))
    rules = rules_of(settings, namespaces)

    evidence = EvidenceView({}, required=settings.evidence, skew=settings.clock_skew, max_age=settings.max_evidence_age)
    cluster_fleet = ClusterFleet(
        fleet, utc_now, evidence.combined_evidence, settings.gpu_resource, is_strict=settings.strict_devices
    )
    evidence.notify(cluster_fleet.prove)
    orphan_times = OrphanTimes(settings.max_grace, settings.orphan_margin)
    deliveries = DeliveryWatch(
        fleet,
        ledger,
        events,
        utc_now,
        ApiEvictor(api),
        OnMismatch(settings.on_mismatch),
        orphan_times,
        is_current=watches.are_current,
    )
    offers = Offers(ApiObjects(api, GPU_NODES), fleet, utc_now, needs_evidence=policy.is_always_required)
    plugins = DevicePlugins(fleet, events, settings.gpu_resource, is_strict=settings.strict_devices)

    def policy_within(name: str) -> HashPolicy | None:
        """What an opted-in namespace requires."""
        return rules.claims.known_within(name).hash_policy if ends.namespaces.get(name) else None

    claims = ReservedClaims(
        ResourceClaims(rate_limited(api)),
        ledger.of_pod,
        fleet,
        events,
        utc_now,
        ClaimForm(
            settings.gpu_driver,
            settings.gpu_device_class,
            settings.mig_device_class,
            has_proofs=settings.proof_devices,
            evicts=settings.on_evidence_lost == OnEvidenceLost.EVICT,
            needs_evidence=policy.is_always_required,
        ),
        is_current=watches.are_current,
        policy_of=policy_within,
    )
    unplaced = UnplacedPods(fleet, policy, events, utc_now)
    claimed = claimed_parts(settings, api, fleet, watches, events, policy_within)
    injections = NodeInjections(fleet, utc_now) if claimed is None else claimed.injections
    writers = ClusterWriters(
        settings,
        api,
        events,
        utc_now,
        gpu_nodes=ListenerGroup(
            GpuNodesListener(cluster_fleet, learn=ledger.learn, forget=ledger.forget),
            offers.view,
            OnEveryChange(claims.wake),
        ),
        also_nodes=[NodesListener(cluster_fleet), plugins],
        also_evidences=[evidence],
        count_error=metrics.count_provider_error,
        marks=deliveries if claimed is None else CombinedMarks(deliveries, claimed.gpus),
        injections=injections,
        published=None if claimed is None else claimed.published,
    )

    proofs = None if claimed is None else proof_parts(settings, api, metrics, fleet, watches, writers, claimed)
    ends = BindingEnds(
        ApiObjects(api, BINDING_ENDS),
        fleet,
        policy,
        rules.claims,
        ledger.carried,
        settings.bind_deadline,
        utc_now,
        is_current=watches.are_current,
        opt_in=settings.opt_in_label,
        published=None if proofs is None else proofs.slices.view.digits,
    )
    reconciler = Reconciler(
        ledger,
        pods,
        events,
        utc_now,
        BindDeadline(settings.bind_deadline, OnBindDeadline(settings.on_bind_deadline), settings.clock_skew),
        orphan_times,
        is_closed=ends.is_closed,
        gpu_annotations=keys.GPU_UUID.names if settings.write_aliases else (keys.GPU_UUID.name,),
    )
    evidence_loss = EvidenceLoss(
        fleet,
        policy,
        OnEvidenceLost(settings.on_evidence_lost),
        ApiEvictor(api),
        events,
        utc_now,
        rules.claims,
        is_current=watches.are_current,
        is_write_pending=writers.is_update_pending,
        is_claim_known=lambda one: is_claim_known(ledger.of_pod(one.pod.uid), one),
        count_change=metrics.count_evidence_change,
    )
    waker = ApiPodWaker(api)
    wakeups = Wakeups(fleet, policy, rules.claims, waker, utc_now)
    nominations = Nominations(fleet, policy, waker, utc_now, reconciler.wakeup.set)
    waiting_pods = WaitingPods(rules.claims, rules.dress, on_new_pod=lambda _: reconciler.wakeup.set())
    queue = Queue(
        waiting_pods,
        ledger,
        fleet,
        policy,
        rules.claims,
        rules.dress,
        ApiGates(api),
        events,
        utc_now,
        bind_deadline=settings.bind_deadline,
        is_current=watches.are_current,
        list_again=partial(list_again, api, ledger, waiting_pods),
        orphans_per_namespace=settings.orphans_per_namespace,
    )
    audit = AuditWatch(
        AuditRules(rules.claims.rules, rules.dress, settings.host_paths),
        fleet,
        ledger,
        utc_now,
        settings.opt_in_label,
        settings.own_namespace,
        needs_evidence=policy.is_always_required,
        plugins=plugins,
    )
    sets, node_names = MappedStatefulSets(fleet, settings.opt_in_label), NodeNameConflicts(fleet, events)

    optional_watches = list(writers.slices)
    of_namespaces: list[WatchListener] = [
        *(namespaces.view, MapNamespaceListener(sets), DemandsListener(waiting_pods), audit.namespaces),
        ends.namespaces,
    ]
    of_pods: list[WatchListener] = [
        *(reconciler, claims, unplaced, wakeups, nominations, evidence_loss, waiting_pods, audit.pods, ends, deliveries)
    ]
    begin = [
        *(claims.begin, queue.begin, evidence_loss.begin, offers.begin, writers.begin, ends.begin, deliveries.begin),
        injections.begin,
    ]
    first: list[Elected] = [reconciler, queue, deliveries]
    then: list[Elected] = [writers, wakeups, nominations, evidence_loss, node_names, plugins, offers, unplaced]
    passes = [Passes((claims,), claims.wakeup, SHORT_BREATH)]

    if settings.kueue:
        of_kueue = WatchGroup()
        kueue = KueueChecks(
            Workloads(utc_now, reconciler.wakeup.set),
            GangReader(rules.claims, rules.dress, ends.namespaces.get),
            ledger,
            fleet,
            policy,
            ApiChecks(api),
            utc_now,
            wait=settings.kueue_wait,
            is_current=lambda: watches.are_current() and of_kueue.are_current(),
            list_again=partial(list_workloads_again, api),
            queue_order=waiting_pods.queue_order,
            orphans_per_namespace=settings.orphans_per_namespace,
        )
        of_kueue.add(*kueue_watches(api, kueue))
        optional_watches += of_kueue
        first.append(kueue)
        begin.append(kueue.begin)
    if claimed is None or proofs is None:
        then.append(ends)
    else:
        evidence.notify(partial(tell_loss, proofs.slices, proofs.loss))
        optional_watches += proofs.watches
        # The ends first: no pod is bound to a node whose devices are about to end.
        challenges = () if claimed.challenges is None else (claimed.challenges,)
        passes.append(Passes((ends, *challenges, proofs.slices, claimed.unused), proofs.loss))
        begin += [proofs.slices.begin, claimed.gpus.begin, *(one.begin for one in challenges)]
    if settings.native_templates:
        native = native_parts(settings, api, fleet, watches)
        optional_watches += native.watches
        of_namespaces.append(native.templates.namespaces)
        of_pods.append(native.templates.pods)
        # A webhook for templates can be slow.
        passes.append(Passes((native.templates,), native.asked))
        begin.append(native.templates.begin)

    watches.add(
        *writers.watches,
        Watch(api, NAMESPACES_PATH, ListenerGroup(*of_namespaces)),
        Watch(api, STATEFUL_SETS_PATH, ListenerGroup(sets, audit.sets)),
        Watch(api, PODS_PATH, ListenerGroup(*of_pods)),
    )
    metrics.watch_evidence(evidence_loss.count_pods_without)
    metrics.watch_ages(lambda: evidence_ages(fleet, utc_now()))
    metrics.watch_audit(audit.counts)
    metrics.watch_deliveries(deliveries.counts)
    metrics.watch_plugins(lambda: len(plugins.nodes()))
    return ReconcilerParts(
        watches=tuple(watches),
        optional_watches=tuple(optional_watches),
        events=events,
        ledger=ledger,
        passes=(Passes((*first, *then), reconciler.wakeup), *passes),
        begin=tuple(begin),
    )


async def list_again(api: ApiClient, ledger: ClusterLedger, waiting_pods: WaitingPods) -> bool:
    """Lists GPUNodes and waiting pods: a watch may be far behind, and work of the last leader would be done twice."""
    known = list(waiting_pods.raws)
    try:
        gpu_nodes, _ = await whole_list(api, GPU_NODES_PATH)
        pods, _ = await whole_list(api, PODS_PATH, ON_NO_NODE)
    except WATCH_ERRORS as exc:
        log.warning("queue not listed again", error=type(exc).__name__)
        return False
    for raw in gpu_nodes.values():
        ledger.learn(raw)
    waiting_pods.read(known, pods.values())
    return True


def kueue_watches(api: ApiClient, kueue: KueueChecks) -> tuple[Watch, ...]:
    return (
        Watch(api, ADMISSION_CHECKS_PATH, kueue.checks, backoff=WATCH_OPTIONAL),
        Watch(api, RESOURCE_FLAVORS_PATH, kueue.gangs.flavors, backoff=WATCH_OPTIONAL),
        Watch(api, WORKLOADS_PATH, kueue.workloads, backoff=WATCH_OPTIONAL),
    )


async def list_workloads_again(api: ApiClient, workloads: Workloads) -> bool:
    """Lists Workloads: the watch may not show yet what the last leader has answered."""
    try:
        found, _ = await whole_list(api, WORKLOADS_PATH)
    except WATCH_ERRORS as exc:
        log.warning("Workloads not listed again", error=type(exc).__name__)
        return False
    for raw in found.values():
        workloads.changed(raw)
    return True
