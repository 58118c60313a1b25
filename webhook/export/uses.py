"""Derives from GPUNodes who used which GPU, from when until when.

Starts and ends are saved before they are exported, so that after a crash the same records are exported again. An end
that was missed is recorded when it is noticed.
"""

import asyncio
import hashlib
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog
from attrs import define, evolve, field, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.core.reservation import Reservation
from webhook.export import ExportError
from webhook.export.files import Flush, write_whole
from webhook.export.records import Batch, Use
from webhook.kube.gpu_node import GpuNode
from webhook.kube.view import ObjectView
from webhook.runtime.clock import LONG_AGO, Clock

log = structlog.get_logger(__name__)

Key = tuple[str, str]  # reservation id and GPU UUID
# Nodes processed in one step.
NODES_PER_STEP: Final = 500
# Ended uses kept for one node while the outbox is full. Beyond that the oldest are dropped, and logged.
MAX_ENDED_PER_NODE: Final = 1000
# If a GPUNode is deleted while its pods run, the pods are checked at this interval.
POD_CHECK_INTERVAL: Final = timedelta(seconds=5)
# For reading the open uses from a store, at most one for each GPU. The store may hang.
LOAD_TIMEOUT: Final = timedelta(seconds=60)


@frozen
class UsePodFacts:
    """A pod's owner, and whether the pod exists."""

    owner: str | None = None
    exists: bool = True


@frozen
class GpuNames:
    """A GPU's serials."""

    serial: str | None = None
    chassis: str | None = None


class UseFacts(Protocol):
    """Facts from other objects in the cluster."""

    async def pod(self, namespace: str, name: str, uid: str) -> UsePodFacts:
        """Raises GpuwardenError if the API server cannot be reached."""

    def gpu(self, node: str, uuid: str) -> GpuNames: ...

    def evidence(self, node: str) -> str | None: ...


@frozen
class HeldDevices:
    """The part of a GPUNode that is needed: reservations and serials. Compressed, because they are rarely read."""

    compressed_reservations: bytes
    # By UUID, for GPUs without a serial in the node's annotation.
    compressed_serials: bytes
    is_rebuilt: bool

    @classmethod
    def parse(cls, raw: Raw) -> "HeldDevices":
        node = GpuNode.parse(raw)
        return cls(
            compressed_reservations=compressed([one for one in node.reservations.values() if has_use(one)]),
            compressed_serials=compressed({one.uuid: one.serial for one in node.devices if one.serial}),
            is_rebuilt=node.is_rebuilt,
        )

    @property
    def reservations(self) -> Sequence[Reservation]:
        return msgspec.json.decode(zlib.decompress(self.compressed_reservations), type=list[Reservation])

    def serial_of(self, uuid: str) -> str | None:
        return msgspec.json.decode(zlib.decompress(self.compressed_serials), type=dict[str, str]).get(uuid)


def has_use(one: Reservation) -> bool:
    """Whether it has a pod and the GPUs that the pod uses. The kubelet may not have chosen them yet."""
    return one.uid is not None and not one.is_awaited


def compressed(content: object) -> bytes:
    return zlib.compress(msgspec.json.encode(content))


def trim_gpu_node(raw: Raw) -> Raw:
    """Drops everything of the devices except UUID and serial: the rest is more than half of the object."""
    trimmed, spec = trim_object(raw), raw.get("spec") or {}
    devices = [{key: one[key] for key in ("uuid", "serial") if key in one} for one in spec.get("devices") or ()]
    return {**trimmed, "spec": {"devices": devices}}


def trim_object(raw: Raw) -> Raw:
    """The object without managedFields."""
    return {**raw, "metadata": {name: one for name, one in raw["metadata"].items() if name != "managedFields"}}


class NotedUse(msgspec.Struct, frozen=True):
    """A saved use. Each is exported when it starts and when it ends."""

    use: Use
    is_exported: bool = msgspec.field(name="is_told", default=False)  # the name in files of earlier builds


class OpenUses:
    """By node, the uses that are open or not exported yet. With a directory, each node has a file.

    Compressed in memory: there are as many uses as GPUs, and those of a node are nearly equal.
    """

    def __init__(self, directory: Path | None, flush: Flush = os.fsync) -> None:
        self._directory = directory
        self._flush = flush
        self._all: dict[str, bytes] = {}

    def read(self) -> None:
        """Loads the files of an earlier process. Raises ExportError; the caller may retry."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(self._directory.glob("*.json")):
                self._read(file)
        except OSError as exc:
            raise ExportError(f"open uses cannot be read in {self._directory}: {exc.strerror}") from exc

    def nodes(self) -> set[str]:
        return set(self._all)

    def of_node(self, node: str) -> Mapping[Key, NotedUse]:
        compressed = self._all.get(node)
        return {} if compressed is None else by_key(decoded(zlib.decompress(compressed)))

    def save(self, node: str, uses: Mapping[Key, NotedUse]) -> None:
        """Replaces the node's uses. Returns once they are durable. Raises ExportError; then nothing has changed."""
        if uses == self.of_node(node):
            return
        if self._directory is not None:
            try:
                self._write(self._directory / f"{node}.json", uses.values())
            except OSError as exc:
                raise ExportError(f"open uses cannot be written to {self._directory}: {exc.strerror}") from exc
        if uses:
            self._all[node] = zlib.compress(encoded(uses.values()))
        else:
            self._all.pop(node, None)

    def _read(self, file: Path) -> None:
        content = file.read_bytes()
        try:
            found = decoded(content)
        except (ValueError, RecursionError) as exc:
            # The starts are found again in the cluster; an end that was missed meanwhile is lost.
            log.warning("open uses cannot be read", file=str(file), problem=str(exc))
            file.replace(file.with_suffix(".torn"))
            return
        for node in {one.use.node for one in found}:
            self._all[node] = zlib.compress(encoded(one for one in found if one.use.node == node))

    def _write(self, file: Path, uses: Collection[NotedUse]) -> None:
        if not uses:
            file.unlink(missing_ok=True)  # if it reappears after a power loss, the same records are exported again
            return
        write_whole(file, encoded(uses), self._flush)


def encoded(uses: Iterable[NotedUse]) -> bytes:
    return msgspec.json.encode(list(uses))


def decoded(content: bytes) -> Sequence[NotedUse]:
    """Raises ValueError, RecursionError."""
    return msgspec.json.decode(content, type=list[NotedUse])


def by_key(uses: Iterable[NotedUse]) -> Mapping[Key, NotedUse]:
    return {(one.use.reservation, one.use.gpu_uuid): one for one in uses}


@define(eq=False, repr=False)
class UseRecorder:
    """Collects changes of GPUNodes from a watch. The leader calls `step` to record and export uses."""

    _cluster: str
    _facts: UseFacts
    _open: OpenUses
    _take: Callable[[Batch], Awaitable[None]]
    _clock: Clock
    _is_current: Callable[[], bool]
    # Reads the stores' uses without an end. Raises ExportError if a store cannot be read.
    _stored_open_uses: Callable[[], AsyncIterator[Use]] | None = None
    _max_ended: int = MAX_ENDED_PER_NODE
    gpu_nodes: ObjectView[HeldDevices] = field(factory=lambda: ObjectView(HeldDevices.parse), init=False)
    # Nodes to compare with their GPUNode, and nodes with uses to export.
    _changed_nodes: dict[str, None] = field(factory=dict, init=False)
    _unexported_nodes: dict[str, None] = field(factory=dict, init=False)
    # Nodes whose GPUNode was deleted, and when their pods are checked next.
    _next_checks: dict[str, datetime] = field(factory=dict, init=False)
    _is_started: bool = field(default=False, init=False)

    async def step(self) -> None:
        """Processes the nodes that changed. A node that fails is retried in the next step and does not stop the others.
        Raises the first GpuwardenError at the end."""
        if not self._is_current():
            return
        if not self._is_started:
            await asyncio.to_thread(self._open.read)
            self._unexported_nodes.update(dict.fromkeys(sorted(self._open.nodes())))
            self._changed_nodes.update(dict.fromkeys([*self.gpu_nodes.names(), *sorted(self._open.nodes())]))
            self._is_started = True
        problems = await self._load_from_stores()
        self._changed_nodes.update(dict.fromkeys(self.gpu_nodes.take_changes()))
        problems += await self._each(self._changed_nodes, self._update_node)
        problems += await self._each(self._unexported_nodes, self._export)
        if problems:
            raise problems[0]

    async def _load_from_stores(self) -> list[GpuwardenError]:
        """Once: adds uses that other processes stored and this one does not know, if they have ended. Uses that are
        still reserved are recorded again, so that stores which cannot be queried get them too."""
        if self._stored_open_uses is None:
            return []
        found: dict[str, dict[Key, NotedUse]] = {}
        try:
            async with asyncio.timeout(LOAD_TIMEOUT.total_seconds()):
                async for use in self._stored_open_uses():
                    key = (use.reservation, use.gpu_uuid)
                    # The node becomes a file name, and any writer of the table chooses it.
                    if (
                        is_object_name(use.node)
                        and key not in self._open.of_node(use.node)
                        and not self._is_reserved(use)
                    ):
                        found.setdefault(use.node, {})[key] = NotedUse(use, is_exported=True)
            for node, uses in found.items():
                await asyncio.to_thread(self._open.save, node, {**self._open.of_node(node), **uses})
                self._changed_nodes[node] = None
        except TimeoutError:
            return [ExportError("the stores' open uses could not be read in time")]
        except GpuwardenError as exc:
            return [exc]
        self._stored_open_uses = None
        return []

    def _is_reserved(self, use: Use) -> bool:
        node = self.gpu_nodes.get(use.node)
        held = node.reservations if node is not None else ()
        return any(one.id == use.reservation and use.gpu_uuid in one.uuids for one in held)

    async def _each(self, names: dict[str, None], done: Callable[[str], Awaitable[None]]) -> list[GpuwardenError]:
        """Processes up to NODES_PER_STEP nodes. A node that fails goes to the end."""
        problems = []
        for name in list(names)[:NODES_PER_STEP]:
            del names[name]
            try:
                await done(name)
            except GpuwardenError as exc:
                names[name] = None
                problems.append(exc)
            except Exception:  # a bug with one node must not stop the others
                log.exception("recording uses failed", node=name)
        return problems

    async def _update_node(self, name: str) -> None:
        node, known = self.gpu_nodes.get(name), self._open.of_node(name)
        if node is None:
            return await self._update_deleted_node(name, known)
        self._next_checks.pop(name, None)
        if not node.is_rebuilt:
            return None  # its reservations are not known yet; the rebuild is a change
        held: dict[Key, Reservation] = {(one.id, uuid): one for one in node.reservations for uuid in one.uuids}
        new = {key: one if key in held else self._ended(one) for key, one in known.items()}
        begun = {key: one for key, one in held.items() if key not in known}
        pods = {one.id: await self._pod_of(one) for one in {one.id: one for one in begun.values()}.values()}
        for key, one in begun.items():
            new[key] = NotedUse(self._begun(name, *key, one, pods[one.id]))
        return await self._save(name, new)

    async def _update_deleted_node(self, name: str, known: Mapping[Key, NotedUse]) -> None:
        """The GPUNode was deleted, perhaps by force, and may be created again. A use ends when its pod is gone."""
        if all(one.use.until is not None for one in known.values()):
            self._next_checks.pop(name, None)
            return
        self._changed_nodes[name] = None
        if self._clock() < self._next_checks.get(name, LONG_AGO):
            return
        self._next_checks[name] = self._clock() + POD_CHECK_INTERVAL
        new = {key: self._ended(one) if await self._pod_is_gone(one.use) else one for key, one in known.items()}
        await self._save(name, new)

    async def _save(self, name: str, new: Mapping[Key, NotedUse]) -> None:
        if new == self._open.of_node(name):
            return
        over = sorted(
            (one for one in new.values() if one.use.until is not None), key=lambda one: one.use.until or NEVER
        )
        if lost := over[: -self._max_ended]:
            log.error("ended uses dropped: the outboxes are full", node=name, uses=len(lost))
            new = {key: one for key, one in new.items() if one not in lost}
        await asyncio.to_thread(self._open.save, name, new)
        self._unexported_nodes[name] = None

    async def _pod_of(self, held: Reservation) -> UsePodFacts:
        return await self._facts.pod(held.namespace, held.pod_name or "", held.uid or "")

    def _begun(self, node: str, reservation: str, uuid: str, held: Reservation, pod: UsePodFacts) -> Use:
        names = self._facts.gpu(node, uuid)
        return Use(
            cluster=self._cluster,
            node=node,
            reservation=reservation,
            gpu_uuid=uuid,
            since=held.since,
            serial=names.serial,
            chassis=names.chassis,
            namespace=held.namespace,
            pod=held.pod_name,
            pod_uid=held.uid,
            owner=pod.owner,
            evidence_hash=self._facts.evidence(node),
        )

    def _ended(self, one: NotedUse) -> NotedUse:
        """Fills in serials that were unknown at the start."""
        use = one.use
        if use.until is not None:
            return one
        names = self._facts.gpu(use.node, use.gpu_uuid)
        return NotedUse(
            evolve(
                use,
                until=max(self._clock(), use.since),
                serial=use.serial or names.serial,
                chassis=use.chassis or names.chassis,
            )
        )

    async def _pod_is_gone(self, one: Use) -> bool:
        return not (await self._facts.pod(one.namespace or "", one.pod or "", one.pod_uid or "")).exists

    async def _export(self, name: str) -> None:
        """Exports what was not exported yet. Ended uses are removed once the outboxes have them."""
        noted = self._open.of_node(name)
        for batch in batches_of(one.use for one in noted.values() if not one.is_exported):
            await self._take(batch)
        still = {key: NotedUse(one.use, is_exported=True) for key, one in noted.items() if one.use.until is None}
        await asyncio.to_thread(self._open.save, name, still)


NEVER = datetime.max.replace(tzinfo=UTC)


def batches_of(uses: Iterable[Use]) -> Sequence[Batch]:
    """One batch for each start or end of a reservation. Equal uses give equal batches, whatever else is exported."""
    together: dict[tuple[str, datetime | None], list[Use]] = {}
    for one in sorted(uses, key=lambda one: (one.until or NEVER, one.since, one.reservation, one.gpu_uuid)):
        together.setdefault((one.reservation, one.until), []).append(one)
    return [
        Batch(id=hashlib.sha256(msgspec.json.encode(group)).hexdigest(), uses=tuple(group))
        for group in together.values()
    ]
