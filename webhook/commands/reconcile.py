"""`gpuwarden reconcile`: any number of processes may run; the elected leader acts."""

import asyncio
from functools import partial

import structlog

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
from webhook.kube.client import ApiClient, connect
from webhook.kube.election import run_while_elected
from webhook.kube.events import ApiEvents
from webhook.kube.paths import BINDING_ENDS, GPU_NODES, GPU_NODES_PATH, NAMESPACES_PATH, PODS_PATH, STATEFUL_SETS_PATH
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import WATCH_ERRORS, Watch, whole_list
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import OrphanTimes
from webhook.ledger.reconcile import BindDeadline, OnBindDeadline, Reconciler
from webhook.runtime.clock import utc_now
from webhook.runtime.process import run_passes, run_until, stop_signal
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.scheduler.api import ApiPodWaker
from webhook.scheduler.wakeups import Wakeups
from webhook.web.probes import Probes

log = structlog.get_logger(__name__)

LEASE = "gpuwarden-reconcile"
# The longest pause between two passes, and the shortest one after an event.
PAUSE = 0.5
BREATH = 0.05
ON_NO_NODE = {"fieldSelector": "spec.nodeName="}


async def reconcile(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. A process that is not the leader watches too, so it can take over at once."""
    configure_logging(settings.log_level)
    stop = stop_signal()
    async with await connect(settings) as api, Probes(settings).listening() as probes:
        await run_until(stop, work(settings, api, probes))
    log.info("stopped")


async def work(settings: Settings, api: ApiClient, probes: Probes) -> None:
    fleet, pods, metrics = Fleet(), ApiPods(api), probes.metrics
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
    events = ApiEvents(api, utc_now, metrics.count_event)
    waiting = BindDeadline(settings.bind_deadline, OnBindDeadline(settings.on_bind_deadline), settings.clock_skew)
    patience = OrphanTimes(settings.max_grace, settings.orphan_margin)
    reconciler = Reconciler(ledger, pods, events, utc_now, waiting, patience, is_closed=lambda uid: ends.is_closed(uid))
    evidence = EvidenceView(
        {},
        asked=settings.evidence,
        skew=settings.clock_skew,
        max_age=settings.max_evidence_age,
    )
    cluster_fleet = ClusterFleet(fleet, utc_now, proven=evidence.combined_evidence)
    evidence.notify(cluster_fleet.prove)
    policy = policy_of(settings)
    offers = Offers(ApiObjects(api, GPU_NODES), fleet, utc_now, needs_evidence=policy.is_always_required)
    discovering = ClusterWriters(
        settings,
        api,
        events,
        utc_now,
        gpu_nodes=ListenerGroup(GpuNodesListener(cluster_fleet, learn=ledger.learn, forget=ledger.forget), offers.view),
        also_nodes=[NodesListener(cluster_fleet)],
        also_evidences=[evidence],
        count_error=metrics.count_provider_error,
    )
    namespaces = WatchedNamespaces(ApiNamespaces(api))
    rules = rules_of(settings, namespaces)
    continuous = EvidenceLoss(
        fleet,
        policy,
        OnEvidenceLost(settings.on_evidence_lost),
        ApiEvictor(api),
        events,
        utc_now,
        rules.claims,
        is_current=lambda: all(watch.is_current for watch in watches),
        is_write_pending=discovering.is_update_pending,
        is_claim_known=lambda one: is_claim_known(ledger.of_pod(one.pod.uid), one),
        count_change=metrics.count_evidence_change,
    )
    metrics.watch_evidence(continuous.counts)
    metrics.watch_ages(lambda: evidence_ages(fleet, utc_now()))
    waking = Wakeups(fleet, policy, rules.claims, ApiPodWaker(api), utc_now)
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
        is_current=lambda: all(watch.is_current for watch in watches),
        read_anew=partial(read_anew, api, ledger, waiting_pods),
        orphans_per_namespace=settings.orphans_per_namespace,
    )
    ends = BindingEnds(
        ApiObjects(api, BINDING_ENDS),
        fleet,
        policy,
        rules.claims,
        ledger.carried,
        settings.bind_deadline,
        utc_now,
        is_current=lambda: all(watch.is_current for watch in watches),
        opt_in=settings.opt_in_label,
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
    metrics.watch_audit(audit.counts)
    sets, node_names = MappedStatefulSets(fleet, settings.opt_in_label), NodeNameConflicts(fleet, events)
    watches = (
        *discovering.watches,
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
        Watch(api, PODS_PATH, ListenerGroup(reconciler, waking, continuous, waiting_pods, audit.pods, ends)),
    )
    async with asyncio.TaskGroup() as tasks:
        for watch in watches:
            tasks.create_task(watch.run())
        tasks.create_task(events.run())
        for watch in watches:
            await watch.ready.wait()
        log.info("watching", reservations=len(ledger.reservations()))
        probes.begin()
        parts = (reconciler, queue, discovering, waking, continuous, node_names, offers, ends)

        async def lead() -> None:
            queue.begin()
            continuous.begin()
            offers.begin()
            discovering.begin()
            ends.begin()
            await run_passes(parts, reconciler.wakeup, interval=PAUSE, debounce=BREATH)

        await run_while_elected(settings, api, LEASE, lead, ledger.rest)


async def read_anew(api: ApiClient, ledger: ClusterLedger, waiting_pods: WaitingPods) -> bool:
    """Lists GPUNodes and waiting pods: a watch may be far behind, and work of the last leader would be done twice."""
    known = list(waiting_pods.raws)
    try:
        gpu_nodes, _ = await whole_list(api, GPU_NODES_PATH)
        pods, _ = await whole_list(api, PODS_PATH, ON_NO_NODE)
    except WATCH_ERRORS as exc:
        log.warning("queue not read anew", error=type(exc).__name__)
        return False
    for raw in gpu_nodes.values():
        ledger.learn(raw)
    waiting_pods.read(known, pods.values())
    return True
