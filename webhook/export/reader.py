"""Reads the GPUs of every node by running nvidia-smi in the node's device plugin pod."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

import msgspec
import structlog
from attrs import define, field, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.export import ExportError
from webhook.export.labels import wanted_labels
from webhook.export.nodes import ExportedNode
from webhook.export.reading import (
    NothingToReadError,
    ReadingSource,
    annotation,
    batch_of,
    machine_of,
    node_gpus,
    read_before,
    readings_of,
    unidentified,
)
from webhook.export.records import Batch
from webhook.export.schedule import BACKOFF, Schedule
from webhook.inventory.node_gpus import NodeGpus
from webhook.inventory.nvidia_smi import MAX_SIZE, SmiReport, UnreadableSmiError, parse
from webhook.kube.pod_exec import ExecError
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

COMMAND: Final = ("/bin/sh", "-c", "nvidia-smi -q -x")
# gpuid's jitter: pods that become ready together are not read together.
MAX_INITIAL_DELAY: Final = 0.2
# Longer outputs are parsed in a thread, one at a time: parsing takes many times their size in memory.
PARSE_IN_THREAD: Final = 1024 * 1024
# Seconds between the starts of two readings of a pod. A kubelet reports readiness and boots, and could otherwise
# trigger readings without pause. A failed reading may be retried sooner, a few times.
MIN_INTERVAL: Final = 10.0


class PluginContainerWire(msgspec.Struct, frozen=True):
    ready: bool = False


class PluginMetadataWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str
    deletion_timestamp: str | None = None


class PluginSpecWire(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str | None = None
    containers: list[Any] = []


class PluginStatusWire(msgspec.Struct, frozen=True, rename="camel"):
    phase: str | None = None
    container_statuses: list[PluginContainerWire] | None = None


class PluginPodWire(msgspec.Struct, frozen=True):
    metadata: PluginMetadataWire
    spec: PluginSpecWire
    status: PluginStatusWire | None = None


@frozen
class PluginPod:
    """A pod of the device plugin."""

    name: str
    uid: str
    node: str
    is_eligible: bool


def parse_pod(raw: Raw) -> PluginPod:
    """Raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, PluginPodWire)
    status = wire.status or PluginStatusWire()
    containers = status.container_statuses or []
    is_ready = len(containers) == len(wire.spec.containers) and all(one.ready for one in containers)
    is_going = wire.metadata.deletion_timestamp is not None
    return PluginPod(
        name=wire.metadata.name,
        uid=wire.metadata.uid,
        node=wire.spec.node_name or "",
        is_eligible=status.phase == "Running" and is_ready and not is_going and bool(wire.spec.node_name),
    )


def trim_pod(raw: Raw) -> Raw:
    """The part of a pod that `parse_pod` reads."""
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    return {
        "metadata": {name: meta[name] for name in ("name", "uid", "deletionTimestamp") if name in meta},
        "spec": {"nodeName": spec.get("nodeName"), "containers": [{} for _ in spec["containers"]]},
        "status": {
            "phase": status.get("phase"),
            "containerStatuses": [{"ready": one.get("ready", False)} for one in status.get("containerStatuses") or ()],
        },
    }


class Exec(Protocol):
    async def run(self, namespace: str, pod: str, container: str, command: tuple[str, ...], limit: int) -> bytes:
        """Raises ExecError."""


class ExportNodes(Protocol):
    """All methods raise ApiUnavailableError or ApiRefusesError."""

    async def get(self, name: str) -> ExportedNode | None: ...

    async def pod(self, namespace: str, name: str) -> Raw | None: ...

    async def write_metadata(self, name: str, node: ExportedNode, labels: Mapping[str, str], gpus: str) -> bool: ...


@frozen
class ReadingPlan:
    """What to read, and how."""

    cluster: str
    namespace: str
    container: str
    timeout: timedelta = timedelta(seconds=30)
    resync: timedelta = timedelta(0)
    labels: bool = True


class ReplacedError(GpuwardenError):
    """The pod or its node was replaced while it was read."""


@frozen
class LastReading:
    """The last successful reading of a pod."""

    uid: str
    boot: str | None
    node: str
    time: datetime


@frozen
class FailureObserver:
    """A callback that counts failures by reason."""

    failed: Callable[[str], None] = field(default=lambda reason: None)


@define(eq=False, repr=False)
class GpuReader:
    """Listens to pods and boots, and schedules readings. Several tasks may run `work`."""

    _plan: ReadingPlan
    _exec: Exec
    _nodes: ExportNodes
    _take: Callable[[Batch], Awaitable[None]]
    _clock: Clock
    _now: Callable[[], float]
    _observer: FailureObserver = FailureObserver()
    _parsed: Callable[[bytes], SmiReport] = parse
    # A thread continues when its caller is cancelled, so the number of threads is limited, not the number of calls.
    _parsing: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "parsing"), init=False)
    _pods: dict[str, PluginPod] = field(factory=dict, init=False)
    _boots: dict[str, str | None] = field(factory=dict, init=False)
    _last_readings: dict[str, LastReading] = field(factory=dict, init=False)
    _failures: dict[str, int] = field(factory=dict, init=False)
    # When each pod's last reading started, oldest first; entries older than MIN_INTERVAL are dropped.
    _last_started: dict[str, float] = field(factory=dict, init=False)
    schedule: Schedule = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.schedule = Schedule(self._now)

    @property
    def last_reads(self) -> Mapping[str, datetime]:
        """When each node with a plugin pod was last read."""
        return {done.node: done.time for name, done in self._last_readings.items() if name in self._pods}

    # Called by the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        names = set()
        for raw in objects.values():
            names.add(raw["metadata"]["name"])
            self.changed(raw)
        for name in self._pods.keys() - names:
            self._forget(name)

    def changed(self, raw: Raw) -> None:
        try:
            pod = parse_pod(raw)
        except msgspec.ValidationError as exc:
            log.warning("pod cannot be read", problem=str(exc))
            return
        before = self._pods.get(pod.name)
        if before is not None and before.uid != pod.uid:
            self._forget(pod.name)
        self._pods[pod.name] = pod
        if pod.is_eligible and (before is None or before.uid != pod.uid or not before.is_eligible):
            self._schedule_read(pod.name, random.uniform(0, MAX_INITIAL_DELAY))  # noqa: S311 - to keep out of step

    def deleted(self, raw: Raw) -> None:
        self._forget(raw["metadata"]["name"])

    def _forget(self, name: str) -> None:
        self._pods.pop(name, None)
        self._last_readings.pop(name, None)
        self._failures.pop(name, None)
        self.schedule.forget(name)

    def booted(self, node: str, boot: str | None) -> None:
        """Called by the watch of nodes. A machine that has rebooted may have other GPUs."""
        if self._boots.get(node, boot) != boot:
            for pod in self._pods.values():
                if pod.node == node:
                    self._schedule_read(pod.name)
        self._boots[node] = boot

    def forget_node(self, node: str) -> None:
        self._boots.pop(node, None)

    def _schedule_read(self, name: str, after: float = 0.0) -> None:
        """Schedules a reading, not before MIN_INTERVAL after the start of the last one."""
        now = self._now()
        self.schedule.put(name, max(after, self._last_started.get(name, now - MIN_INTERVAL) + MIN_INTERVAL - now))

    def _note_start(self, name: str) -> None:
        now = self._now()
        self._last_started.pop(name, None)
        self._last_started[name] = now
        for other, at in list(self._last_started.items()):
            if at > now - MIN_INTERVAL:
                break
            del self._last_started[other]

    # Called by the workers.

    async def work(self) -> None:
        """Runs until cancelled."""
        while True:
            name = await self.schedule.take()
            try:
                await self._process(name)
            finally:
                self.schedule.done(name)

    async def _process(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is None or not pod.is_eligible:
            return
        self._note_start(name)
        try:
            async with asyncio.timeout(self._plan.timeout.total_seconds()):
                done = await self._read(pod)
        except ReplacedError as exc:
            self._observer.failed("replaced")
            log.info("reading dropped", pod=name, node=pod.node, problem=str(exc))
        except TimeoutError:
            self._record_failure(pod, "timeout", f"not done within {self._plan.timeout.total_seconds():g} s")
        except ExecError as exc:
            self._record_failure(pod, exc.reason, str(exc))
        except UnreadableSmiError as exc:
            self._record_failure(pod, "unreadable", str(exc))
        except ApiUnavailableError as exc:
            self._record_failure(pod, "unavailable", str(exc))
        except ApiRefusesError as exc:
            self._record_failure(pod, "forbidden", str(exc))
        except ExportError as exc:
            self._record_failure(pod, "outbox", str(exc))
        except Exception:  # a bug with one pod must not stop the others
            log.exception("reading failed", pod=name, node=pod.node)
            self._record_failure(pod, "bug", "see the exception in the log")
        else:
            self._record_success(pod, done)

    def _record_success(self, pod: PluginPod, done: LastReading) -> None:
        if self._pods.get(pod.name) is None:
            return
        self._last_readings[pod.name] = done
        self._failures.pop(pod.name, None)
        if self._plan.resync:
            age = (self._clock() - done.time).total_seconds()
            self._schedule_read(pod.name, max(0.0, self._plan.resync.total_seconds() - max(0.0, age)))

    def _record_failure(self, pod: PluginPod, reason: str, text: str) -> None:
        """Counts the failure once and schedules a retry with backoff."""
        self._observer.failed(reason)
        failures = self._failures.get(pod.name, 0) + 1
        pause = BACKOFF.seconds(failures)
        log.warning(
            "node not read", node=pod.node, pod=pod.name, reason=reason, problem=text, again_in_s=round(pause, 1)
        )
        if self._pods.get(pod.name) is not None:
            self._failures[pod.name] = failures
            self.schedule.put(pod.name, pause)

    async def _read(self, pod: PluginPod) -> LastReading:
        node = await self._nodes.get(pod.node)
        if node is None:
            raise ReplacedError("its node is gone")
        source = ReadingSource(
            cluster=self._plan.cluster,
            node=pod.node,
            machine=machine_of(node.provider_id),
            source=f"{self._plan.namespace}/{pod.name}",
            boot_id=node.boot_id,
        )
        found = self._reading_from_node(pod, node)
        if found is None:
            found = await self._run_nvidia_smi(pod, node)
        readings = readings_of(found, source)
        if readings:
            await self._take(batch_of(readings))
        return LastReading(pod.uid, node.boot_id, pod.node, found.time)

    def _reading_from_node(self, pod: PluginPod, node: ExportedNode) -> NodeGpus | None:
        """The reading in the node's annotation, if this pod made it in this boot and it is not due again."""
        try:
            found = read_before(node.gpus, pod.uid, node.boot_id, now=self._clock(), created=node.created)
        except NothingToReadError as exc:
            log.debug("reading the node", node=pod.node, problem=str(exc))
            return None
        is_old = bool(self._plan.resync) and self._clock() - found.time >= self._plan.resync
        return None if is_old else found

    async def _run_nvidia_smi(self, pod: PluginPod, node: ExportedNode) -> NodeGpus:
        content = await self._exec.run(self._plan.namespace, pod.name, self._plan.container, COMMAND, MAX_SIZE)
        time = self._clock()
        smi = await self._parse(content)
        now = await self._nodes.pod(self._plan.namespace, pod.name)
        if now is None or now["metadata"].get("uid") != pod.uid or now["spec"].get("nodeName") != pod.node:
            raise ReplacedError("the pod was replaced during the reading")
        found = node_gpus(smi, pod.uid, node.boot_id, time)
        if dropped := unidentified(found):
            log.warning("devices without serial and UUID are not exported", node=pod.node, devices=dropped)
        if self._plan.labels:
            await self._label_node(pod, node, smi, found)
        return found

    async def _parse(self, content: bytes) -> SmiReport:
        if len(content) < PARSE_IN_THREAD:
            return self._parsed(content)
        return await asyncio.get_running_loop().run_in_executor(self._parsing, self._parsed, content)

    async def _label_node(self, pod: PluginPod, node: ExportedNode, smi: SmiReport, found: NodeGpus) -> None:
        """Labels and annotates the node. If the API server refuses, the reading is exported all the same."""
        wanted = wanted_labels(smi.gpus)
        for note in wanted.notes:
            log.warning("label shortened", node=pod.node, label=note)
        try:
            if await self._nodes.write_metadata(pod.node, node, wanted.labels, annotation(found)):
                log.info("node labelled", node=pod.node, gpus=len(smi.gpus))
        except ApiRefusesError as exc:
            self._observer.failed("label_refused")
            log.warning("node not labelled", node=pod.node, problem=str(exc))
