"""`gpuwarden export`: exports readings of GPUs and their uses to stores.

Of several processes, the leader works. Before another is elected, it stores its records or keeps them on its disk.
"""

import asyncio
import ctypes
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Protocol

import msgspec
import structlog
from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.evidence.node_evidence import NodeEvidence
from webhook.export import Exporter, ExportError
from webhook.export.delivery import Delivery, DeliveryObserver, ExporterState, check
from webhook.export.measured import ExportCollector, ExportMetrics
from webhook.export.nodes import ApiNode, parse_node, trim_node
from webhook.export.outbox import OutboxInUseError, opener
from webhook.export.reader import FailureObserver, GpuReader, ReadingPlan, trim_pod
from webhook.export.reading import (
    NO_MACHINE,
    ReadingSource,
    node_gpus,
    readings_of,
    unidentified,
)
from webhook.export.records import Batch, Use, raw_reading
from webhook.export.settings import ExportSettings
from webhook.export.targets import STORES, ExportStore
from webhook.export.uses import GpuNames, OpenUses, UsePodFacts, UseRecorder, trim_gpu_node, trim_object
from webhook.inventory.node_annotations import UnreadableDevicesError
from webhook.inventory.node_gpus import GpuWire, gpus_in
from webhook.inventory.nvidia_smi import MAX_SIZE, parse
from webhook.kube.client import ApiClient, connect
from webhook.kube.lease import Candidate, LeaseTerms
from webhook.kube.paths import GPU_NODES_PATH, NODE_EVIDENCES_PATH, NODES_PATH
from webhook.kube.pod_exec import PodExec
from webhook.kube.requests import ApiRefusesError, RateLimit, RateLimitedClient
from webhook.kube.view import ObjectView
from webhook.kube.watch import Watch
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import utc_now
from webhook.runtime.http.listener import Listener
from webhook.runtime.process import cancel_and_wait, stop_signal
from webhook.runtime.telemetry import configure_logging
from webhook.web.callers import Guard
from webhook.web.health import Health, Stage
from webhook.web.routes import application, get

log = structlog.get_logger(__name__)

STOPPED, LOST = 0, 1
# Of <malloc.h>.
M_ARENA_MAX: Final = -8
# The time to store records at the end; less than the 30 s of a Pod's default grace period.
DRAIN: Final = timedelta(seconds=20)
# The last write must end this long before another process can take the Lease.
MARGIN: Final = timedelta(seconds=1)
# Between two attempts to open an outbox that another process still uses.
OUTBOX_PAUSE: Final = 0.5
USES_PAUSE: Final = 0.5
USES_BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(seconds=5))
# The shortest interval between two checks of the stores by readiness probes, and the timeout of a check.
CHECK_EVERY: Final = 2.0
CHECK_LONGEST: Final = 5.0


def read_file(path: str, cluster: str, node: str, machine: str | None) -> int:
    """Prints the reading of one host, one JSON line per GPU."""
    source = "stdin" if path == "-" else path
    found = node_gpus(parse(content_of(path)), "", None, utc_now())
    for record in readings_of(found, ReadingSource(cluster, node, machine or NO_MACHINE, source)):
        sys.stdout.write(msgspec.json.encode(raw_reading(record)).decode() + "\n")
    if dropped := unidentified(found):
        sys.stderr.write(f"gpuwarden export: no record of {', '.join(dropped)}: without serial and UUID\n")
    return STOPPED


def content_of(path: str) -> bytes:
    """At most one byte more than can be parsed. Raises GpuwardenError."""
    try:
        if path == "-":
            return sys.stdin.buffer.read(MAX_SIZE + 1)
        with Path(path).open("rb") as file:
            return file.read(MAX_SIZE + 1)
    except OSError as exc:
        raise GpuwardenError(f"the file {path!r} cannot be read: {exc.strerror}") from exc


def keep_to_one_heap() -> None:
    """Threads only wait for disks, but glibc gives each its own heap: a tenth of the process's memory."""
    with suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


async def export(settings: ExportSettings) -> int:
    """Runs until SIGTERM or SIGINT, or until the Lease is lost. Returns the exit code."""
    keep_to_one_heap()
    configure_logging(settings.log_level)
    for note in settings.notes:
        log.warning("setting ignored", problem=note)
    stop = stop_signal()
    async with await connect(settings.connection()) as api, ExportProcess(settings, api).listening() as process:
        ended = await process.run(stop)
    log.info("stopped", exit_code=ended)
    return ended


@frozen
class NodeFacts:
    """What is kept of a Node between its readings."""

    boot: str | None
    # The last reading of its GPUs, compressed: some kilobytes per node, rarely used.
    gpus: bytes | None


def node_facts(raw: Raw) -> NodeFacts:
    try:
        seen = parse_node(raw)
    except msgspec.ValidationError as exc:
        raise GpuwardenError(f"the Node cannot be read: {exc}") from exc
    return NodeFacts(seen.boot_id, None if seen.gpus is None else zlib.compress(seen.gpus.encode()))


class BootListener(Protocol):
    """Is notified of boots of nodes."""

    def booted(self, node: str, boot: str | None) -> None: ...

    def forget_node(self, node: str) -> None: ...


class NodesView(ObjectView[NodeFacts]):
    """The watched Nodes. Notifies a listener of new boots."""

    def __init__(self, reader: BootListener) -> None:
        super().__init__(node_facts)
        self._reader = reader
        # A cache of the last node: its name, its compressed reading and its GPUs by UUID.
        self._gpus: tuple[str, bytes, Mapping[str, GpuWire]] = ("", b"", {})

    def changed(self, raw: Raw) -> None:
        super().changed(raw)
        name = raw["metadata"]["name"]
        found = self.get(name)
        if found is not None:
            self._reader.booted(name, found.boot)
        self.take_changes()

    def forget(self, name: str) -> None:
        super().forget(name)
        self._reader.forget_node(name)
        self.take_changes()

    def gpu(self, node: str, uuid: str) -> GpuWire | None:
        found = self.get(node)
        if found is None or found.gpus is None:
            return None
        if self._gpus[:2] != (node, found.gpus):
            self._gpus = node, found.gpus, gpus_by_uuid(zlib.decompress(found.gpus).decode())
        return self._gpus[2].get(uuid)


def gpus_by_uuid(text: str) -> Mapping[str, GpuWire]:
    try:
        return {one.uuid: one for one in gpus_in(text).gpus if one.uuid is not None}
    except UnreadableDevicesError:
        return {}


class ClusterFacts:
    """Facts about pods, GPUs and nodes for the records of uses."""

    def __init__(
        self, nodes: ApiNode, nodes_view: NodesView, uses: Callable[[], UseRecorder], evidence: ObjectView[str | None]
    ) -> None:
        self._nodes = nodes
        self._nodes_view = nodes_view
        self._uses = uses
        self._evidence = evidence

    async def pod(self, namespace: str, name: str, uid: str) -> UsePodFacts:
        raw = await self._nodes.pod(namespace, name) if namespace and name else None
        if raw is None or raw["metadata"].get("uid") != uid:
            return UsePodFacts(exists=False)
        owners = [one for one in raw["metadata"].get("ownerReferences") or () if one.get("controller")]
        return UsePodFacts(owner=f"{owners[0]['kind']}/{owners[0]['name']}" if owners else None)

    def gpu(self, node: str, uuid: str) -> GpuNames:
        """From the last reading, else from the GPUNode."""
        read = self._nodes_view.gpu(node, uuid)
        if read is not None:
            return GpuNames(read.serial, read.chassis)
        known = self._uses().gpu_nodes.get(node)
        return GpuNames(known.serial_of(uuid) if known is not None else None)

    def evidence(self, node: str) -> str | None:
        return self._evidence.get(node)


def evidence_hash(raw: Raw) -> str | None:
    word = NodeEvidence.parse(raw).combined_evidence
    return word.hash or None if word is not None else None


def exporters_of(settings: ExportSettings) -> list[Exporter]:
    """Imports an exporter only if it is used, because each needs its own library."""
    return [exporter_of(STORES[name], settings) for name in settings.exporter_type]


def exporter_of(store: ExportStore[Any], settings: ExportSettings) -> Exporter:
    build: Callable[..., Exporter] = resolve_name(store.exporter)
    return build() if store.target is None else build(settings.target(store))


class StoreHealth(Health):
    """Ready if every store is reachable and accepts the records."""

    def __init__(self, check: Callable[[], Awaitable[None]], every: float = CHECK_EVERY) -> None:
        super().__init__()
        self._check = check
        self._every = every
        self._check_task: asyncio.Task[str | None] | None = None
        self._checked_at = 0.0

    async def ready(self, request: Request) -> Response:
        if not self.is_serving:
            return await super().ready(request)
        now = asyncio.get_running_loop().time()
        if self._check_task is None or now - self._checked_at > self._every:
            self._check_task, self._checked_at = asyncio.ensure_future(self._check_stores()), now
        problem = await asyncio.shield(self._check_task)
        if problem is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unready", "problem": problem}, status_code=503, headers={"Retry-After": "1"})

    async def _check_stores(self) -> str | None:
        try:
            async with asyncio.timeout(CHECK_LONGEST):
                await self._check()
        except TimeoutError:
            return "a store does not answer"
        except ExportError as exc:
            return str(exc)
        return None


class ExportProcess:
    """The parts of the process."""

    def __init__(self, settings: ExportSettings, api: ApiClient) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._api = api
        self._metrics = ExportMetrics()
        self._metrics.initialize_counters(list(settings.exporter_type))
        self._exporters = exporters_of(settings)
        # Only the leader opens it: several processes may use one directory in turn.
        self._open_outbox = opener(settings.outbox)
        self._delivery: Delivery | None = None
        limit = RateLimit(settings.qps, settings.burst, loop.time)
        self._nodes = ApiNode(RateLimitedClient(api, limit))
        self._exec = PodExec(api, limit)
        plan = ReadingPlan(
            cluster=settings.cluster_name or "",
            namespace=settings.namespace,
            container=settings.container,
            timeout=settings.timeout,
            resync=settings.resync,
            labels=settings.labels,
        )
        observer = FailureObserver(failed=self._metrics.count_not_read)
        self._reader = GpuReader(plan, self._exec, self._nodes, self._take, utc_now, loop.time, observer)
        self._nodes_view = NodesView(self._reader)
        evidence: ObjectView[str | None] = ObjectView(evidence_hash)
        words = ClusterFacts(self._nodes, self._nodes_view, lambda: self._uses, evidence)
        kept = None if settings.outbox is None else settings.outbox / "uses"
        self._uses = UseRecorder(
            settings.cluster_name or "",
            words,
            OpenUses(kept),
            self._take,
            utc_now,
            is_current=lambda: all(one.is_current for one in (nodes_watch, gpu_nodes_watch)),
            stored_open_uses=self._stored_open_uses,
        )
        pods = f"/api/v1/namespaces/{settings.namespace}/pods"
        turn = asyncio.Lock()
        nodes_watch = Watch(api, NODES_PATH, self._nodes_view, trimmed=trim_node, turn=turn)
        gpu_nodes_watch = Watch(api, GPU_NODES_PATH, self._uses.gpu_nodes, trimmed=trim_gpu_node, turn=turn)
        wanted = {"labelSelector": settings.label_selector}
        self._watches = [Watch(api, pods, self._reader, wanted, trim_pod, turn), nodes_watch]
        evidence_watch = Watch(api, NODE_EVIDENCES_PATH, evidence, trimmed=trim_object, turn=turn)
        self._history_watches = [gpu_nodes_watch, evidence_watch]
        # Requests for the Lease do not wait for other requests.
        urgent = RateLimitedClient(
            api, RateLimit(50, 100, loop.time), longest=settings.lease_renew_deadline.total_seconds()
        )
        terms = LeaseTerms(settings.lease_duration, settings.lease_renew_deadline, settings.lease_retry_period)
        self._candidate = Candidate(
            urgent, settings.lease_namespace, settings.lease_name, settings.pod_name, terms, utc_now, loop.time
        )
        self._metrics.show(
            ExportCollector(
                lambda: self._reader.schedule.waiting, lambda: self._reader.last_reads, self._states, utc_now
            )
        )
        self._health = StoreHealth(self._check)
        self._listener = Listener(self._app(), host=settings.host, port=settings.server_port)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["ExportProcess"]:
        await self._listener.start()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._exec.close)
            stack.push_async_callback(self._listener.stop, 1.0)
            log.info("listening", http=self._listener.url)
            yield self

    async def run(self, stop: asyncio.Event) -> int:
        """Runs until `stop` is set (0) or the Lease is lost (1). Writes nothing after the Lease is released."""
        stopping = asyncio.ensure_future(stop.wait())
        watching = [asyncio.ensure_future(one.run()) for one in await self._all_watches()]
        self._health.stage = Stage.SERVING
        elects = self._settings.leader_election
        try:
            if elects and not await until(self._candidate.win(), stopping):
                return STOPPED
            holding = asyncio.ensure_future(self._candidate.hold() if elects else asyncio.Event().wait())
            return await self._lead(stopping, holding, watching, elects=elects)
        finally:
            self._health.stage = Stage.DRAINING
            await cancel_and_wait([stopping, *watching])

    async def _all_watches(self) -> list[Watch]:
        if not self._settings.history:
            return self._watches
        try:
            problem = None if await self._nodes.is_served(GPU_NODES_PATH) else "the API server does not serve GPUNodes"
        except ApiRefusesError as exc:
            problem = str(exc)  # also if the API server does not serve GPUNodes and gpuwarden may not know
        if problem is not None:
            log.warning("GPUNodes cannot be read: uses of GPUs are not exported", problem=problem)
            return self._watches
        return [*self._watches, *self._history_watches]

    async def _lead(
        self,
        stopping: "asyncio.Future[Any]",
        holding: "asyncio.Future[Any]",
        watching: "Sequence[asyncio.Future[None]]",
        *,
        elects: bool,
    ) -> int:
        opening = asyncio.ensure_future(self._opened())
        await asyncio.wait([opening, stopping, holding, *watching], return_when=asyncio.FIRST_COMPLETED)
        is_open = opening.done() and opening.exception() is None
        if is_open:
            self._delivery = opening.result()
            return await self._work(self._delivery, stopping, holding, watching, elects=elects)
        is_lost = holding.done() and not stopping.done()
        await cancel_and_wait([opening, holding])
        if elects and not is_lost:
            await self._candidate.release()
        all_tasks: list[asyncio.Future[Any]] = [opening, *watching]
        for task in all_tasks:
            if task.done() and not task.cancelled():
                task.result()  # an unusable outbox, or a bug
        return LOST if is_lost else STOPPED

    async def _opened(self) -> Delivery:
        """Waits until no other process uses the outboxes. Raises ExportError if they cannot be opened."""
        observer = DeliveryObserver(stored=self._stored, failed=self._not_stored, refused=self._refused)
        logged = False
        while True:
            try:
                return await asyncio.to_thread(Delivery, self._exporters, self._open_outbox, utc_now, observer=observer)
            except OutboxInUseError as exc:
                if not logged:
                    log.warning("waiting for the outbox", problem=str(exc))
                logged = True
            await asyncio.sleep(OUTBOX_PAUSE)

    async def _work(
        self,
        delivery: Delivery,
        stopping: "asyncio.Future[Any]",
        holding: "asyncio.Future[Any]",
        watching: "Sequence[asyncio.Future[None]]",
        *,
        elects: bool,
    ) -> int:
        has_history = len(watching) > len(self._watches)
        working = [asyncio.ensure_future(self._reader.work()) for _ in range(self._settings.workers)]
        working += [asyncio.ensure_future(self._follow_uses())] if has_history else []
        delivering = asyncio.ensure_future(delivery.run())
        log.info("exporting", to=list(self._settings.exporter_type), workers=self._settings.workers)
        all_tasks = [stopping, holding, delivering, *working, *watching]
        done, _ = await asyncio.wait(all_tasks, return_when=asyncio.FIRST_COMPLETED)
        is_lost = holding in done and stopping not in done
        # Workers stop first: their records are stored afterwards, and before another leader is elected.
        await cancel_and_wait(working)
        if elects and not is_lost:
            left = await drained_while(holding, delivery)
        else:
            left = await delivery.drain(time_to_drain(self._candidate.left) if elects else DRAIN)
        await cancel_and_wait([delivering, holding])
        log.info("drained", batches_left=left)
        if elects and not is_lost:
            await self._candidate.release()
        for task in done - {stopping, holding}:
            task.result()  # none of these tasks ends without a bug
        return LOST if is_lost else STOPPED

    async def _take(self, batch: Batch) -> None:
        """Raises ExportError."""
        if self._delivery is None:
            raise ExportError("a process that is not the leader accepts no records")
        await self._delivery.take(batch)

    async def _stored_open_uses(self) -> AsyncIterator[Use]:
        if self._delivery is not None:
            async for use in self._delivery.open_uses(self._settings.cluster_name or ""):
                yield use

    async def _check(self) -> None:
        """Raises ExportError."""
        await check(self._exporters, self._states())

    async def _follow_uses(self) -> None:
        """A bug in one pass does not end the loop. A repeated problem is logged once and retried less often."""
        logged: str | None = None
        failures = 0
        while True:
            problem = await self._problem_with_uses()
            if problem is not None and problem != logged:
                log.warning("uses left for the next pass", problem=problem)
            logged = problem
            failures = 0 if problem is None else failures + 1
            await asyncio.sleep(USES_BACKOFF.seconds(failures) if failures else USES_PAUSE)

    async def _problem_with_uses(self) -> str | None:
        """Runs one pass. Returns its problem, or None."""
        try:
            await self._uses.step()
        except GpuwardenError as exc:
            self._metrics.count_not_read("outbox" if isinstance(exc, ExportError) else "uses")
            return str(exc)
        except Exception as exc:
            log.exception("a pass over uses failed")
            return repr(exc)
        return None

    def _app(self) -> Any:
        async def metrics(_request: Request) -> Response:
            body, media_type = self._metrics.render()
            return Response(body, headers={"content-type": media_type})

        live = [get(path, self._health.live, Guard.OPEN) for path in ("/healthz", "/health", "/")]
        ready = [get(path, self._health.ready, Guard.OPEN) for path in ("/readyz", "/ready")]
        return application(self._metrics, get("/metrics", metrics, Guard.OPEN), *live, *ready)

    def _states(self) -> Mapping[str, ExporterState]:
        return {} if self._delivery is None else self._delivery.states

    def _stored(self, exporter: str, batch: Batch) -> None:
        if batch.readings:
            self._metrics.count_stored(exporter)

    def _not_stored(self, exporter: str, _reason: str) -> None:
        self._metrics.count_not_stored(exporter, "store")

    def _refused(self, exporter: str, _batch: Batch, _reason: str) -> None:
        self._metrics.count_not_stored(exporter, "refused")


def time_to_drain(left: timedelta) -> timedelta:
    """How long records may be stored if the Lease is no longer renewed and ends after `left`."""
    return min(DRAIN, max(timedelta(0), left - MARGIN))


async def drained_while(holding: "asyncio.Future[Any]", delivery: Delivery) -> int:
    """Stores records while the Lease is renewed; stops writing if the Lease is lost."""
    draining = asyncio.ensure_future(delivery.drain(DRAIN))
    await asyncio.wait([draining, holding], return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await cancel_and_wait([draining])
        return await delivery.drain(timedelta(0))
    return draining.result()


async def until(work: Awaitable[None], stopping: "asyncio.Future[Any]") -> bool:
    """Whether the work ends before the stop."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return not stopping.done()
    await cancel_and_wait([task])
    return False
