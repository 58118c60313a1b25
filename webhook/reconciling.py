"""One process of `gpuwarden reconcile`: of any number, the elected one acts."""

import asyncio
import os
import signal
import socket
from typing import Any

import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from webhook.clock import utc_now
from webhook.cluster import ApiGpuNodes, ApiPods, connected
from webhook.clustered import GPU_NODES_PATH, PODS_PATH
from webhook.core.fleet import Fleet
from webhook.inventory.gpu_nodes import ClusterInventory, GpuNodesListener
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.reconcile import Reconciler
from webhook.settings import Settings
from webhook.telemetry import configure_logging
from webhook.watch import TROUBLE, Watch
from webhook.wiring import times_of

log = structlog.get_logger(__name__)

LEASE = "gpuwarden-reconcile"
LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD = 15, 10, 2  # seconds, and whole ones: the client's Lease takes no others
# Between two passes: a pod that came or went is acted on this soon.
PAUSE = 0.5


async def reconcile(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Whoever is not elected watches too, and is ready when it is."""
    configure_logging(settings.log_level)
    stop = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stop.set)
    async with await connected(settings) as api:
        background = [asyncio.ensure_future(work(settings, api)), asyncio.ensure_future(stop.wait())]
        done, pending = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
    log.info("stopped")


async def work(settings: Settings, api: client.ApiClient) -> None:
    fleet, pods = Fleet(), ApiPods(api)
    ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
    reconciler = Reconciler(ledger, pods, utc_now)
    inventory = ClusterInventory(fleet, utc_now, proven=lambda name: None)
    gpu_nodes = GpuNodesListener(inventory, learn=ledger.learn, forget=ledger.forget)
    watches = (Watch(api, GPU_NODES_PATH, gpu_nodes), Watch(api, PODS_PATH, reconciler))
    async with asyncio.TaskGroup() as tasks:
        for watch in watches:
            tasks.create_task(watch.run())
        for watch in watches:
            await watch.ready.wait()
        log.info("watching", reservations=len(ledger.reservations()))
        await lead_again_and_again(settings, api, reconciler)


async def lead_again_and_again(settings: Settings, api: client.ApiClient, reconciler: Reconciler) -> None:
    """Be elected, lead until the Lease is lost, and stand again. An API server that is away ends a leadership too."""
    while True:
        leading: list[asyncio.Task[Any]] = []
        try:
            await make_lease(settings, api)
            await election(settings, api, reconciler, leading).run()
        except TROUBLE as exc:
            log.warning("election interrupted", error=type(exc).__name__)
            await asyncio.sleep(RETRY_PERIOD)
        finally:
            for task in leading:
                task.cancel()


async def one_pass(reconciler: Reconciler) -> None:
    """A bug in one pass must not end them all: the Lease would be held on, and nobody would reconcile."""
    try:
        await reconciler.step()
    except Exception:
        log.exception("a pass failed")


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
    settings: Settings, api: client.ApiClient, reconciler: Reconciler, leading: list[asyncio.Task[Any]]
) -> LeaderElection:
    async def lead() -> None:
        task = asyncio.current_task()
        if task is not None:
            leading.append(task)  # the library leaves it running when the API server goes away
        log.info("leading")
        while True:
            await one_pass(reconciler)
            await asyncio.sleep(PAUSE)

    async def follow() -> None:
        log.warning("no longer leading")

    identity = f"{socket.gethostname()}-{os.getpid()}"
    lock: Any = LeaseLock(LEASE, settings.lease_namespace, identity, api)
    return LeaderElection(Config(lock, LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD, lead, follow))
