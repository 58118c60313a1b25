"""From what GPUNodes hold to who used which GPU from when until when.

A start and an end are written down before they are told, so that whatever a crash interrupts is told again in the same
words. An end that nobody saw is closed when it is noticed.
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
from attrs import evolve, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.core.reservation import Reservation
from webhook.export import ExportError
from webhook.export.files import Flush, write_whole
from webhook.export.records import Batch, Use
from webhook.kube.gpu_node import GpuNode
from webhook.kube.view import ObjectView
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

Key = tuple[str, str]  # reservation and UUID
# How many nodes are seen to in one pass.
NODES_PER_STEP: Final = 500
# Of one node, for which there is no room in an outbox. Beyond that the oldest are lost, and the log says so.
MAX_ENDED_PER_NODE: Final = 1000
# Where a GPUNode is gone and its pods are not, nobody tells of their end: they are asked about.
POD_CHECK_INTERVAL: Final = timedelta(seconds=5)
# For a store to say which uses it has no end of, of as many GPUs as there are. It may have stopped in the middle.
LOAD_TIMEOUT: Final = timedelta(seconds=60)


@frozen
class UsePodFacts:
    """What is known of a pod beside its name."""

    owner: str | None = None
    exists: bool = True


@frozen
class GpuNames:
    """What else a GPU is called."""

    serial: str | None = None
    chassis: str | None = None


class UseFacts(Protocol):
    """What others know."""

    async def pod(self, namespace: str, name: str, uid: str) -> UsePodFacts:
        """Raises GpuwardenError where nobody can be asked."""

    def gpu(self, node: str, uuid: str) -> GpuNames: ...

    def evidence(self, node: str) -> str | None: ...


@frozen
class HeldDevices:
    """What matters of a GPUNode: who holds what, and what its GPUs are called. Packed: both are rarely looked at."""

    compressed_reservations: bytes
    # By UUID: they are wanted where a node's own reading does not say them.
    compressed_serials: bytes
    is_rebuilt: bool

    @classmethod
    def parse(cls, raw: Raw) -> "HeldDevices":
        node = GpuNode.parse(raw)
        return cls(
            compressed_reservations=compressed([one for one in node.reservations.values() if one.uid is not None]),
            compressed_serials=compressed({one.uuid: one.serial for one in node.devices if one.serial}),
            is_rebuilt=node.is_rebuilt,
        )

    @property
    def reservations(self) -> Sequence[Reservation]:
        return msgspec.json.decode(zlib.decompress(self.compressed_reservations), type=list[Reservation])

    def serial_of(self, uuid: str) -> str | None:
        return msgspec.json.decode(zlib.decompress(self.compressed_serials), type=dict[str, str]).get(uuid)


def compressed(content: object) -> bytes:
    return zlib.compress(msgspec.json.encode(content))


def trim_gpu_node(raw: Raw) -> Raw:
    """Of its devices what they are called: the rest of them is more than half of it."""
    trimmed, spec = trim_object(raw), raw.get("spec") or {}
    devices = [{key: one[key] for key in ("uuid", "serial") if key in one} for one in spec.get("devices") or ()]
    return {**trimmed, "spec": {"devices": devices}}


def trim_object(raw: Raw) -> Raw:
    """Without who wrote which field."""
    return {**raw, "metadata": {name: one for name, one in raw["metadata"].items() if name != "managedFields"}}


class NotedUse(msgspec.Struct, frozen=True):
    """A use as it is written down: what has been told is told no more, until it ends."""

    use: Use
    is_exported: bool = msgspec.field(name="is_told", default=False)  # the name in files of earlier builds


class OpenUses:
    """By node, what has begun and is not known to be over, and what is over and not told. A file a node, if kept.

    In memory packed: the uses of a node say nearly the same, and there are as many as there are GPUs.
    """

    def __init__(self, directory: Path | None, flush: Flush = os.fsync) -> None:
        self._directory = directory
        self._flush = flush
        self._all: dict[str, bytes] = {}

    def read(self) -> None:
        """What another process has left. Raises ExportError: then it may be tried again."""
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
        """These are kept when this returns, and no others of the node. Raises ExportError: then nothing has changed."""
        if uses == self.of_node(node):
            return
        if self._directory is not None:
            try:
                self._write(self._directory / f"{node}.json", uses.values())
            except OSError as exc:
                raise ExportError(f"open uses cannot be kept in {self._directory}: {exc.strerror}") from exc
        if uses:
            self._all[node] = zlib.compress(encoded(uses.values()))
        else:
            self._all.pop(node, None)

    def _read(self, file: Path) -> None:
        content = file.read_bytes()
        try:
            found = decoded(content)
        except (ValueError, RecursionError) as exc:
            # The starts are seen again in the cluster; an end that came while nobody looked is not.
            log.warning("open uses cannot be read", file=str(file), problem=str(exc))
            file.replace(file.with_suffix(".torn"))
            return
        for node in {one.use.node for one in found}:
            self._all[node] = zlib.compress(encoded(one for one in found if one.use.node == node))

    def _write(self, file: Path, uses: Collection[NotedUse]) -> None:
        if not uses:
            file.unlink(missing_ok=True)  # one that comes back after a power cut is told again, in the same words
            return
        write_whole(file, encoded(uses), self._flush)


def encoded(uses: Iterable[NotedUse]) -> bytes:
    return msgspec.json.encode(list(uses))


def decoded(content: bytes) -> Sequence[NotedUse]:
    """Raises ValueError, RecursionError."""
    return msgspec.json.decode(content, type=list[NotedUse])


def by_key(uses: Iterable[NotedUse]) -> Mapping[Key, NotedUse]:
    return {(one.use.reservation, one.use.gpu_uuid): one for one in uses}


class UseRecorder:
    """Hears of GPUNodes from a watch; tells in `step`, which whoever leads takes."""

    def __init__(
        self,
        cluster: str,
        known: UseFacts,
        open_uses: OpenUses,
        take: Callable[[Batch], Awaitable[None]],
        clock: Clock,
        is_current: Callable[[], bool],
        stored_open_uses: Callable[[], AsyncIterator[Use]] | None = None,
    ) -> None:
        """`recalled` is what the stores have no end of, and raises ExportError where they cannot be asked."""
        self._cluster = cluster
        self._facts = known
        self._open = open_uses
        self._take = take
        self._clock = clock
        self._is_current = is_current
        self._stored_open_uses = stored_open_uses
        self.gpu_nodes: ObjectView[HeldDevices] = ObjectView(HeldDevices.parse)
        # Nodes that are to be looked at, and nodes of which something is to be told.
        self._changed_nodes: dict[str, None] = {}
        self._unexported_nodes: dict[str, None] = {}
        # Nodes whose GPUNode is gone, and when their pods are asked about next.
        self._next_checks: dict[str, datetime] = {}
        self._is_started = False

    async def step(self) -> None:
        """One pass over what is news. What cannot be done now is left for the next one and holds up nothing else;
        then the first of the reasons is raised, a GpuwardenError."""
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
        """Once: what others have told the stores and we do not know of. What is still held we tell ourselves, so that
        stores that cannot be asked hear of it."""
        if self._stored_open_uses is None:
            return []
        found: dict[str, dict[Key, NotedUse]] = {}
        try:
            async with asyncio.timeout(LOAD_TIMEOUT.total_seconds()):
                async for use in self._stored_open_uses():
                    key = (use.reservation, use.gpu_uuid)
                    # Whoever may write rows names nodes, and a node names a file.
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
            return [ExportError("no store says in time which uses have no end")]
        except GpuwardenError as exc:
            return [exc]
        self._stored_open_uses = None
        return []

    def _is_reserved(self, use: Use) -> bool:
        node = self.gpu_nodes.get(use.node)
        held = node.reservations if node is not None else ()
        return any(one.id == use.reservation and use.gpu_uuid in one.uuids for one in held)

    async def _each(self, names: dict[str, None], done: Callable[[str], Awaitable[None]]) -> list[GpuwardenError]:
        """Some of them. Those that fail come last next time."""
        problems = []
        for name in list(names)[:NODES_PER_STEP]:
            del names[name]
            try:
                await done(name)
            except GpuwardenError as exc:
                names[name] = None
                problems.append(exc)
            except Exception:  # a bug with one node must not end it for the others
                log.exception("uses of a node not followed", node=name)
        return problems

    async def _update_node(self, name: str) -> None:
        node, known = self.gpu_nodes.get(name), self._open.of_node(name)
        if node is None:
            return await self._update_deleted_node(name, known)
        self._next_checks.pop(name, None)
        if not node.is_rebuilt:
            return None  # what is held there is not known yet; it is news when it is
        held: dict[Key, Reservation] = {(one.id, uuid): one for one in node.reservations for uuid in one.uuids}
        new = {key: one if key in held else self._ended(one) for key, one in known.items()}
        begun = {key: one for key, one in held.items() if key not in known}
        pods = {one.id: await self._pod_of(one) for one in {one.id: one for one in begun.values()}.values()}
        for key, one in begun.items():
            new[key] = NotedUse(self._begun(name, *key, one, pods[one.id]))
        return await self._save(name, new)

    async def _update_deleted_node(self, name: str, known: Mapping[Key, NotedUse]) -> None:
        """Its GPUNode is: taken away by force, perhaps, and made anew in a moment. The pods decide."""
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
        if lost := over[:-MAX_ENDED_PER_NODE]:
            log.error("uses forgotten: no outbox takes them", node=name, uses=len(lost))
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
        """What was not known of the GPU when it began may be known now."""
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
        """What of the node is not told yet. What is over is forgotten once the exporters have it."""
        noted = self._open.of_node(name)
        for batch in batches_of(one.use for one in noted.values() if not one.is_exported):
            await self._take(batch)
        still = {key: NotedUse(one.use, is_exported=True) for key, one in noted.items() if one.use.until is None}
        await asyncio.to_thread(self._open.save, name, still)


LONG_AGO, NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def batches_of(uses: Iterable[Use]) -> Sequence[Batch]:
    """What begins or ends with one reservation, together: the same again is the same batch, whoever else is there."""
    together: dict[tuple[str, datetime | None], list[Use]] = {}
    for one in sorted(uses, key=lambda one: (one.until or NEVER, one.since, one.reservation, one.gpu_uuid)):
        together.setdefault((one.reservation, one.until), []).append(one)
    return [
        Batch(id=hashlib.sha256(msgspec.json.encode(group)).hexdigest(), uses=tuple(group))
        for group in together.values()
    ]
