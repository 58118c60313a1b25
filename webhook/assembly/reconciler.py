"""The parts of `gpuwarden reconcile`."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog
from attrs import frozen

from webhook.admission.api_namespaces import ApiNamespaces
from webhook.admission.audit import AuditRules
from webhook.admission.audit_watch import AuditWatch
from webhook.admission.binding_ends import BindingEnds
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener, NodesListener
from webhook.admission.evictions import ApiEvictor
from webhook.admission.evidence_loss import EvidenceLoss, OnEvidenceLost, evidence_ages, is_claim_known
from webhook.admission.namespaces import WatchedNamespaces
from webhook.admission.placement_maps import MapNamespaceListener, MappedStatefulSets, NodeNameConflicts
from webhook.admission.queue.api_gates import ApiGates
from webhook.admission.queue.queue import Queue
from webhook.admission.queue.waiting_pods import DemandsListener, WaitingPods
from webhook.assembly.cluster import ClusterWriters
from webhook.assembly.parts import policy_of, rules_of, times_of
from webhook.core.fleet import Fleet
from webhook.evidence.cluster import EvidenceView
from webhook.inventory.offers import Offers
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.api_objects import ApiObjects
from webhook.kube.client import ApiClient
from webhook.kube.events import ApiEvents
from webhook.kube.paths import BINDING_ENDS, GPU_NODES, GPU_NODES_PATH, NAMESPACES_PATH, PODS_PATH, STATEFUL_SETS_PATH
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import WATCH_ERRORS, Watch, WatchGroup, whole_list
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import OrphanTimes
from webhook.ledger.reconcile import BindDeadline, OnBindDeadline, Reconciler
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics
from webhook.scheduler.api import ApiPodWaker
from webhook.scheduler.wakeups import Wakeups

log = structlog.get_logger(__name__)

ON_NO_NODE = {"fieldSelector": "spec.nodeName="}


class Elected(Protocol):
    """A part that works while this process leads."""

    async def step(self) -> None: ...


@frozen
class ReconcilerParts:
    """What the leader works with. All replicas keep the watches current."""

    watches: WatchGroup
    events: ApiEvents
    ledger: ClusterLedger
    reconciler: Reconciler
    # In the order of a pass.
    steps: tuple[Elected, ...]
    # Called after each election.
    begin: tuple[Callable[[], None], ...]


def reconciler_parts(settings: Settings, api: ApiClient, metrics: Metrics) -> ReconcilerParts:
    fleet, pods, watches = Fleet(), ApiPods(api), WatchGroup()
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
    events = ApiEvents(api, utc_now, metrics.count_event)
    policy, namespaces = policy_of(settings), WatchedNamespaces(ApiNamespaces(api))
    rules = rules_of(settings, namespaces)

    evidence = EvidenceView({}, required=settings.evidence, skew=settings.clock_skew, max_age=settings.max_evidence_age)
    cluster_fleet = ClusterFleet(fleet, utc_now, proven=evidence.combined_evidence)
    evidence.notify(cluster_fleet.prove)
    offers = Offers(ApiObjects(api, GPU_NODES), fleet, utc_now, needs_evidence=policy.is_always_required)
    writers = ClusterWriters(
        settings,
        api,
        events,
        utc_now,
        gpu_nodes=ListenerGroup(GpuNodesListener(cluster_fleet, learn=ledger.learn, forget=ledger.forget), offers.view),
        also_nodes=[NodesListener(cluster_fleet)],
        also_evidences=[evidence],
        count_error=metrics.count_provider_error,
    )

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
    )
    reconciler = Reconciler(
        ledger,
        pods,
        events,
        utc_now,
        BindDeadline(settings.bind_deadline, OnBindDeadline(settings.on_bind_deadline), settings.clock_skew),
        OrphanTimes(settings.max_grace, settings.orphan_margin),
        is_closed=ends.is_closed,
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
    wakeups = Wakeups(fleet, policy, rules.claims, ApiPodWaker(api), utc_now)
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
    )
    sets, node_names = MappedStatefulSets(fleet, settings.opt_in_label), NodeNameConflicts(fleet, events)

    watches.add(
        *writers.watches,
        Watch(
            api,
            NAMESPACES_PATH,
            ListenerGroup(
                namespaces.view,
                MapNamespaceListener(sets),
                DemandsListener(waiting_pods),
                audit.namespaces,
                ends.namespaces,
            ),
        ),
        Watch(api, STATEFUL_SETS_PATH, ListenerGroup(sets, audit.sets)),
        Watch(api, PODS_PATH, ListenerGroup(reconciler, wakeups, evidence_loss, waiting_pods, audit.pods, ends)),
    )
    metrics.watch_evidence(evidence_loss.count_pods_without)
    metrics.watch_ages(lambda: evidence_ages(fleet, utc_now()))
    metrics.watch_audit(audit.counts)
    return ReconcilerParts(
        watches=watches,
        events=events,
        ledger=ledger,
        reconciler=reconciler,
        steps=(reconciler, queue, writers, wakeups, evidence_loss, node_names, offers, ends),
        begin=(queue.begin, evidence_loss.begin, offers.begin, writers.begin, ends.begin),
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
