"""One process of `gpuwarden bind`: of any number, the elected one puts pods on nodes."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhook.admission.api_namespaces import ApiNamespaces
from webhook.admission.binding_check import BindingCheck
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener, NodesListener
from webhook.admission.namespaces import WatchedNamespaces
from webhook.admission.reserving import Reserver
from webhook.assembly.parts import policy_of, rules_of, times_of
from webhook.core.fleet import Fleet
from webhook.evidence.cluster import EvidenceView
from webhook.evidence.static import StaticEvidence, written_by_hand
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.client import ApiClient, connect
from webhook.kube.election import run_while_elected
from webhook.kube.events import ApiEvents
from webhook.kube.paths import GPU_NODES_PATH, NAMESPACES_PATH, NODE_EVIDENCES_PATH, NODES_PATH, PODS_PATH
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import WATCH_ERRORS, Watch, open_response
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.runtime.clock import utc_now
from webhook.runtime.process import run_passes, run_until, stop_signal
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics, configure_logging
from webhook.scheduler.api import ApiBindings, ApiConditions
from webhook.scheduler.binder import Binder
from webhook.scheduler.binder_telling import Told
from webhook.scheduler.binder_view import NamespacesOfWorld, NodesOfWorld, PodsOfWorld, Touches, World
from webhook.scheduler.binder_volumes import ApiVolumes
from webhook.web.health import Health
from webhook.web.probes import Probes

log = structlog.get_logger(__name__)

LEASE = "gpuwarden-bind"
# What the older scheduler calls itself where its health is asked for.
SERVICE = "gpu-scheduler"
# Between two passes: what nobody tells of is looked at this often, and what somebody does, this soon.
PAUSE = 0.25
BREATH = 0.02
# An API server that is gone without a word is noticed within the sum of these: a watch would wait for minutes.
PULSE, PULSE_TIMEOUT = 3.0, 5.0


async def schedule(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Whoever is not elected watches too, and is ready when it is."""
    configure_logging(settings.log_level)
    stop = stop_signal()
    health = SchedulerHealth()
    async with await connect(settings) as api, Probes(settings, health).listening() as probes:
        await run_until(stop, work(settings, api, probes, health))
    log.info("stopped")


async def work(settings: Settings, api: ApiClient, probes: Probes, health: "SchedulerHealth") -> None:
    parts = Parts(settings, api, probes.metrics)
    pulse = Pulse(api)
    health.is_sound = lambda: pulse.is_there and all(watch.is_current for watch in parts.watches)
    async with asyncio.TaskGroup() as tasks:
        for watch in parts.watches:
            tasks.create_task(watch.run())
        for run in (pulse.run, parts.events.run, parts.told.run):
            tasks.create_task(run())
        for watch in parts.watches:
            await watch.ready.wait()
        log.info("watching", nodes=len(parts.world.rooms), waiting=len(parts.world.waiters))
        probes.begin()
        await run_while_elected(settings, api, LEASE, lambda: leading(parts.binder, parts.news), parts.rest)


class Parts:
    """What one such process works with: one watch of each kind of object, heard by all who need it."""

    def __init__(self, settings: Settings, api: ApiClient, metrics: Metrics) -> None:
        self.news = asyncio.Event()
        self.world = World(settings.scheduler_name, self.news.set)
        fleet, pods, policy = Fleet(), ApiPods(api), policy_of(settings)
        ledger = self._ledger = ClusterLedger(fleet, ApiGpuNodes(api), pods, utc_now, times_of(settings))
        own = written_by_hand(settings.node_hash_map if StaticEvidence.name in settings.evidence else {})
        evidence = EvidenceView(
            own,
            asked=settings.evidence,
            skew=settings.clock_skew,
            max_age=settings.max_evidence_age,
        )
        cluster_fleet = ClusterFleet(fleet, utc_now, proven=evidence.combined_evidence)
        evidence.notify(cluster_fleet.prove)
        namespaces = WatchedNamespaces(ApiNamespaces(api))
        claims = rules_of(settings, namespaces).claims
        reserver = Reserver(fleet, ledger, policy, utc_now, metrics)
        door = BindingCheck(reserver, pods, claims, settings.bind_deadline, utc_now)
        self.events = ApiEvents(api, utc_now, metrics.count_event)
        self.told = Told(self.events, ApiConditions(api), metrics.count_binding, utc_now)
        self.binder = Binder(
            self.world,
            fleet,
            policy,
            claims,
            door,
            ApiBindings(api),
            pods,
            ApiVolumes(api),
            self.told,
            utc_now,
            opt_in=settings.opt_in_label,
        )
        gpu_nodes = GpuNodesListener(cluster_fleet, learn=ledger.learn, forget=ledger.forget)
        self.watches = (
            Watch(api, NODES_PATH, ListenerGroup(NodesListener(cluster_fleet), NodesOfWorld(self.world))),
            Watch(api, GPU_NODES_PATH, ListenerGroup(gpu_nodes, Touches(self.world, is_reshaped=False))),
            Watch(api, NODE_EVIDENCES_PATH, ListenerGroup(evidence, Touches(self.world, is_reshaped=True))),
            Watch(api, NAMESPACES_PATH, ListenerGroup(namespaces.view, NamespacesOfWorld(self.world))),
            Watch(api, PODS_PATH, PodsOfWorld(self.world)),
        )

    async def rest(self) -> None:
        """Until nothing is under way any more."""
        await self.binder.settle()
        await self._ledger.rest()


class Acting(Protocol):
    """What the elected one does."""

    async def step(self) -> None: ...

    def stop(self) -> None: ...


async def leading(binder: Acting, news: asyncio.Event) -> None:
    """For ever, or until the Lease is lost."""
    try:
        await run_passes([binder], news, interval=PAUSE, debounce=BREATH)
    finally:
        binder.stop()


class Pulse:
    """Whether the API server answers at all. A connection that was cut without a word looks as if nothing happened."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self.is_there = True

    async def run(self) -> None:
        while True:
            self.is_there = await self._answers()
            await asyncio.sleep(PULSE)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PULSE_TIMEOUT), await open_response(self._api, "/version", {}, PULSE_TIMEOUT):
                return True
        except WATCH_ERRORS as exc:
            log.warning("the API server does not answer", error=type(exc).__name__)
            return False


class SchedulerHealth(Health):
    """In the older scheduler's words. Ready is who hears the API server: what it does not hear, it cannot act on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sound: Callable[[], bool] = lambda: True

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy", "service": SERVICE})

    async def ready(self, request: Request) -> Response:
        if self.is_serving and self.is_sound():
            return JSONResponse({"status": "ready", "service": SERVICE})
        status = "cut off" if self.is_serving else self.stage
        return JSONResponse({"status": status, "service": SERVICE}, status_code=503, headers={"Retry-After": "1"})
