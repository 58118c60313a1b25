"""One process of `gpuwarden reconcile`: of any number, the elected one acts."""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from webhook.api_objects import ApiNamespaces
from webhook.clock import utc_now
from webhook.cluster import PODS_PATH, ApiGpuNodes, ApiPods, connected
from webhook.clustered import NAMESPACES_PATH, Discovering
from webhook.continuous import Continuous, OnEvidenceLost, is_vouched
from webhook.core.fleet import Fleet
from webhook.events import ApiEvents
from webhook.inventory.gpu_nodes import ClusterInventory, GpuNodesListener, NodesListener
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.reconcile import OnBindDeadline, Reconciler, Waiting
from webhook.measures import ApiMeasures
from webhook.namespaces import WatchedNamespaces
from webhook.node_evidences import EvidenceView
from webhook.probes import Probes
from webhook.scheduler.api_pods import ApiAlarm
from webhook.scheduler.waking import Waking
from webhook.settings import Settings
from webhook.telemetry import configure_logging
from webhook.view import Several
from webhook.watch import TROUBLE, Watch
from webhook.wiring import policy_of, rules_of, times_of

log = structlog.get_logger(__name__)

LEASE = "gpuwarden-reconcile"
LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD = 15, 10, 2  # seconds, and whole ones: the client's Lease takes no others
# Between two passes: what nobody tells of is looked at this often, and what somebody does, this soon.
PAUSE = 0.5
BREATH = 0.05


class Stepping(Protocol):
    """What is done by the elected one alone, a step a pass."""

    async def step(self) -> None: ...


async def reconcile(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Whoever is not elected watches too, and is ready when it is."""
    configure_logging(settings.log_level)
    stop = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stop.set)
    async with await connected(settings) as api, Probes(settings).listening() as probes:
        background = [asyncio.ensure_future(work(settings, api, probes)), asyncio.ensure_future(stop.wait())]
        done, pending = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
    log.info("stopped")


async def work(settings: Settings, api: client.ApiClient, probes: Probes) -> None:
    fleet, pods, metrics = Fleet(), ApiPods(api), probes.metrics
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
    events = ApiEvents(api, utc_now, metrics.count_event)
    waiting = Waiting(settings.bind_deadline, OnBindDeadline(settings.on_bind_deadline))
    reconciler = Reconciler(ledger, pods, events, utc_now, waiting)
    inventory = ClusterInventory(fleet, utc_now, proven=lambda name: evidence.word_on(name))
    evidence = EvidenceView({}, show=inventory.prove)
    discovering = Discovering(
        settings,
        api,
        events,
        utc_now,
        gpu_nodes=GpuNodesListener(inventory, learn=ledger.learn, forget=ledger.forget),
        also_nodes=[NodesListener(inventory)],
        also_evidences=[evidence],
        count_error=metrics.count_provider_error,
    )
    continuous = Continuous(
        fleet,
        policy_of(settings),
        OnEvidenceLost(settings.on_evidence_lost),
        ApiMeasures(api),
        events,
        utc_now,
        is_current=lambda: all(watch.is_current for watch in watches),
        is_owed=discovering.is_owed,
        is_vouched=lambda one: is_vouched(ledger.of_pod(one.pod.uid), one),
        count_change=metrics.count_evidence_change,
    )
    metrics.watch_evidence(continuous.counts)
    namespaces = WatchedNamespaces(ApiNamespaces(api))
    waking = Waking(fleet, policy_of(settings), rules_of(settings, namespaces).claims, ApiAlarm(api), utc_now)
    watches = (
        *discovering.watches,
        Watch(api, NAMESPACES_PATH, namespaces.view),
        Watch(api, PODS_PATH, Several(reconciler, waking, continuous)),
    )
    async with asyncio.TaskGroup() as tasks:
        for watch in watches:
            tasks.create_task(watch.run())
        tasks.create_task(events.run())
        for watch in watches:
            await watch.ready.wait()
        log.info("watching", reservations=len(ledger.reservations()))
        probes.begin()
        await lead_again_and_again(settings, api, (reconciler, discovering, waking, continuous), reconciler.news)


async def lead_again_and_again(
    settings: Settings, api: client.ApiClient, parts: Sequence[Stepping], news: asyncio.Event
) -> None:
    """Be elected, lead until the Lease is lost, and stand again. An API server that is away ends a leadership too."""
    while True:
        leading: list[asyncio.Task[Any]] = []
        try:
            await make_lease(settings, api)
            await election(settings, api, parts, news, leading).run()
        except TROUBLE as exc:
            log.warning("election interrupted", error=type(exc).__name__)
            await asyncio.sleep(RETRY_PERIOD)
        finally:
            for task in leading:
                task.cancel()


async def one_pass(*parts: Stepping) -> None:
    """A bug in one pass must not end them all: the Lease would be held on, and nobody would reconcile."""
    for part in parts:
        try:
            await part.step()
        except Exception:
            log.exception("a pass failed")


async def rest(news: asyncio.Event) -> None:
    """Until something has happened, and what comes with it is there as well; or for a while."""
    with suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), PAUSE)
    await asyncio.sleep(BREATH)


async def make_lease(settings: Settings, api: client.ApiClient) -> None:
    """An empty Lease to be held. The client library cannot create one: it sends a parameter that it refuses itself."""
    leases = client.CoordinationV1Api(api)
    body = client.V1Lease(metadata=client.V1ObjectMeta(name=LEASE), spec=client.V1LeaseSpec())
    try:
        await leases.create_namespaced_lease(settings.lease_namespace, body)
    except ApiException as exc:
        if exc.status != 409:
            raise


def election(
    settings: Settings,
    api: client.ApiClient,
    parts: Sequence[Stepping],
    news: asyncio.Event,
    leading: list[asyncio.Task[Any]],
) -> LeaderElection:
    async def lead() -> None:
        task = asyncio.current_task()
        if task is not None:
            leading.append(task)  # the library leaves it running when the API server goes away
        log.info("leading")
        while True:
            await one_pass(*parts)
            await rest(news)

    async def follow() -> None:
        log.warning("no longer leading")

    identity = f"{socket.gethostname()}-{os.getpid()}"
    lock: Any = LeaseLock(LEASE, settings.lease_namespace, identity, api)
    return LeaderElection(Config(lock, LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD, lead, follow))
