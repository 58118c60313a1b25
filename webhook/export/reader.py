"""Reads the GPUs of every node through the device plugin's pod there: which pods are due, and what becomes of each."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Final, Protocol

import msgspec
import structlog
from attrs import field, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.export import ExportError
from webhook.export.labels import wanted_labels
from webhook.export.nodes import NodeSeen
from webhook.export.reading import (
    NothingToReadError,
    ReadingSource,
    annotation,
    batch_of,
    machine_of,
    nameless,
    node_gpus,
    read_before,
    readings_of,
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
# S2's: pods that become ready together are not read together.
SPREAD: Final = 0.2
# Larger texts are parsed beside the loop, one at a time: each takes many times its size.
LONG: Final = 1024 * 1024
# Seconds between the beginnings of two readings of a pod, whatever happens to it: its kubelet says when it is ready and
# when it has booted, and would have us read and store without pause. A failure is tried again sooner, a few times.
LEAST_BETWEEN: Final = 10.0


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
class PodSeen:
    """A pod of the device plugin."""

    name: str
    uid: str
    node: str
    is_eligible: bool


def pod_seen(raw: Raw) -> PodSeen:
    """Raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, PluginPodWire)
    status = wire.status or PluginStatusWire()
    containers = status.container_statuses or []
    is_ready = len(containers) == len(wire.spec.containers) and all(one.ready for one in containers)
    is_going = wire.metadata.deletion_timestamp is not None
    return PodSeen(
        name=wire.metadata.name,
        uid=wire.metadata.uid,
        node=wire.spec.node_name or "",
        is_eligible=status.phase == "Running" and is_ready and not is_going and bool(wire.spec.node_name),
    )


def trimmed_pod(raw: Raw) -> Raw:
    """What `pod_seen` looks at."""
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
    """All raise ApiAwayError or ApiRefusesError."""

    async def get(self, name: str) -> NodeSeen | None: ...

    async def pod(self, namespace: str, name: str) -> Raw | None: ...

    async def say(self, name: str, node: NodeSeen, labels: Mapping[str, str], gpus: str) -> bool: ...


@frozen
class ReadingPlan:
    """What is read, and how."""

    cluster: str
    namespace: str
    container: str
    timeout: timedelta = timedelta(seconds=30)
    resync: timedelta = timedelta(0)
    labels: bool = True


class ReplacedError(GpuwardenError):
    """What was read is not of the pod that it was asked of."""


@frozen
class LastReading:
    """The last good reading of a pod."""

    uid: str
    boot: str | None
    node: str
    time: datetime


@frozen
class FailureObserver:
    """Who counts failures, by one of few words."""

    failed: Callable[[str], None] = field(default=lambda reason: None)


class GpuReader:
    """Hears of pods and of boots; `work` is done by as many workers as there may be."""

    def __init__(
        self,
        plan: ReadingPlan,
        execute: Exec,
        nodes: ExportNodes,
        take: Callable[[Batch], Awaitable[None]],
        clock: Clock,
        now: Callable[[], float],
        told: FailureObserver | None = None,
        parsed: Callable[[bytes], SmiReport] = parse,
    ) -> None:
        self._plan = plan
        self._exec = execute
        self._nodes = nodes
        self._take = take
        self._clock = clock
        self._now = now
        self._told = told or FailureObserver()
        self._parsed = parsed
        # A thread goes on when whoever waits for it gives up, so it is threads that there is one of.
        self._parsing = ThreadPoolExecutor(1, "parsing")
        self.turns = Schedule(now)
        self._pods: dict[str, PodSeen] = {}
        self._boots: dict[str, str | None] = {}
        self._done: dict[str, LastReading] = {}
        self._failures: dict[str, int] = {}
        # When each was last begun with, the oldest first, and no longer than that matters.
        self._begun: dict[str, float] = {}

    @property
    def last_reads(self) -> Mapping[str, datetime]:
        """Of each node that there is a pod on, when it was last read."""
        return {done.node: done.time for name, done in self._done.items() if name in self._pods}

    # What the watch of pods tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        names = set()
        for raw in objects.values():
            names.add(raw["metadata"]["name"])
            self.changed(raw)
        for name in self._pods.keys() - names:
            self._forget(name)

    def changed(self, raw: Raw) -> None:
        try:
            pod = pod_seen(raw)
        except msgspec.ValidationError as exc:
            log.warning("pod cannot be read", problem=str(exc))
            return
        before = self._pods.get(pod.name)
        if before is not None and before.uid != pod.uid:
            self._forget(pod.name)
        self._pods[pod.name] = pod
        if pod.is_eligible and (before is None or before.uid != pod.uid or not before.is_eligible):
            self._put(pod.name, random.uniform(0, SPREAD))  # noqa: S311 - to keep out of step

    def deleted(self, raw: Raw) -> None:
        self._forget(raw["metadata"]["name"])

    def _forget(self, name: str) -> None:
        self._pods.pop(name, None)
        self._done.pop(name, None)
        self._failures.pop(name, None)
        self.turns.forget(name)

    def booted(self, node: str, boot: str | None) -> None:
        """What the watch of nodes tells: a machine that has started anew may be another one."""
        if self._boots.get(node, boot) != boot:
            for pod in self._pods.values():
                if pod.node == node:
                    self._put(pod.name)
        self._boots[node] = boot

    def forget_node(self, node: str) -> None:
        self._boots.pop(node, None)

    def _put(self, name: str, after: float = 0.0) -> None:
        """Something has happened to it: then, or when it may be read again."""
        now = self._now()
        self.turns.put(name, max(after, self._begun.get(name, now - LEAST_BETWEEN) + LEAST_BETWEEN - now))

    def _begin(self, name: str) -> None:
        now = self._now()
        self._begun.pop(name, None)
        self._begun[name] = now
        for other, at in list(self._begun.items()):
            if at > now - LEAST_BETWEEN:
                break
            del self._begun[other]

    # What workers do.

    async def work(self) -> None:
        """For ever."""
        while True:
            name = await self.turns.take()
            try:
                await self._see_to(name)
            finally:
                self.turns.done(name)

    async def _see_to(self, name: str) -> None:
        pod = self._pods.get(name)
        if pod is None or not pod.is_eligible:
            return
        self._begin(name)
        try:
            async with asyncio.timeout(self._plan.timeout.total_seconds()):
                done = await self._read(pod)
        except ReplacedError as exc:
            self._told.failed("replaced")
            log.info("reading dropped", pod=name, node=pod.node, problem=str(exc))
        except TimeoutError:
            self._fail(pod, "timeout", f"not done within {self._plan.timeout.total_seconds():g} s")
        except ExecError as exc:
            self._fail(pod, exc.reason, str(exc))
        except UnreadableSmiError as exc:
            self._fail(pod, "unreadable", str(exc))
        except ApiUnavailableError as exc:
            self._fail(pod, "unavailable", str(exc))
        except ApiRefusesError as exc:
            self._fail(pod, "forbidden", str(exc))
        except ExportError as exc:
            self._fail(pod, "outbox", str(exc))
        except Exception:  # a bug with one pod must not end the reading of all others
            log.exception("reading failed", pod=name, node=pod.node)
            self._fail(pod, "bug", "see above")
        else:
            self._succeed(pod, done)

    def _succeed(self, pod: PodSeen, done: LastReading) -> None:
        if self._pods.get(pod.name) is None:
            return
        self._done[pod.name] = done
        self._failures.pop(pod.name, None)
        if self._plan.resync:
            age = (self._clock() - done.time).total_seconds()
            self._put(pod.name, max(0.0, self._plan.resync.total_seconds() - max(0.0, age)))

    def _fail(self, pod: PodSeen, reason: str, text: str) -> None:
        """One failure is counted once; it is tried again, less and less often."""
        self._told.failed(reason)
        failures = self._failures.get(pod.name, 0) + 1
        pause = BACKOFF.seconds(failures)
        log.warning(
            "node not read", node=pod.node, pod=pod.name, reason=reason, problem=text, again_in_s=round(pause, 1)
        )
        if self._pods.get(pod.name) is not None:
            self._failures[pod.name] = failures
            self.turns.put(pod.name, pause)

    async def _read(self, pod: PodSeen) -> LastReading:
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
        found = self._as_read_before(pod, node)
        if found is None:
            found = await self._ask(pod, node)
        readings = readings_of(found, source)
        if readings:
            await self._take(batch_of(readings))
        return LastReading(pod.uid, node.boot_id, pod.node, found.time)

    def _as_read_before(self, pod: PodSeen, node: NodeSeen) -> NodeGpus | None:
        """Another process, or this one before it was restarted, has read it; unless it is time to read it again."""
        try:
            found = read_before(node.gpus, pod.uid, node.boot_id, now=self._clock(), created=node.created)
        except NothingToReadError as exc:
            log.debug("to be read", node=pod.node, problem=str(exc))
            return None
        is_old = bool(self._plan.resync) and self._clock() - found.time >= self._plan.resync
        return None if is_old else found

    async def _ask(self, pod: PodSeen, node: NodeSeen) -> NodeGpus:
        content = await self._exec.run(self._plan.namespace, pod.name, self._plan.container, COMMAND, MAX_SIZE)
        time = self._clock()
        smi = await self._smi(content)
        now = await self._nodes.pod(self._plan.namespace, pod.name)
        if now is None or now["metadata"].get("uid") != pod.uid or now["spec"].get("nodeName") != pod.node:
            raise ReplacedError("the pod is not the one that was asked")
        found = node_gpus(smi, pod.uid, node.boot_id, time)
        if dropped := nameless(found):
            log.warning("devices without serial and UUID are not exported", node=pod.node, devices=dropped)
        if self._plan.labels:
            await self._write(pod, node, smi, found)
        return found

    async def _smi(self, content: bytes) -> SmiReport:
        if len(content) < LONG:
            return self._parsed(content)
        return await asyncio.get_running_loop().run_in_executor(self._parsing, self._parsed, content)

    async def _write(self, pod: PodSeen, node: NodeSeen, smi: SmiReport, found: NodeGpus) -> None:
        """What the node is called by. That the API server refuses it keeps nothing from being exported."""
        wanted = wanted_labels(smi.gpus)
        for note in wanted.notes:
            log.warning("label is not the whole serial", node=pod.node, label=note)
        try:
            if await self._nodes.say(pod.node, node, wanted.labels, annotation(found)):
                log.info("node labelled", node=pod.node, gpus=len(smi.gpus))
        except ApiRefusesError as exc:
            self._told.failed("label_refused")
            log.warning("node not labelled", node=pod.node, problem=str(exc))
