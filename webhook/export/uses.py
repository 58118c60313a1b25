"""From what GPUNodes hold to who used which GPU from when until when.

A start and an end are written down before they are told, so that whatever a crash interrupts is told again in the same
words. An end that nobody saw is closed when it is noticed.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog
from attrs import evolve, frozen

from webhook.clock import Clock
from webhook.core.errors import GpuwardenError
from webhook.core.reservation import Reservation
from webhook.export import ExportError
from webhook.export.records import Batch, Use
from webhook.gpu_node import GpuNode
from webhook.view import View

log = structlog.get_logger(__name__)

Key = tuple[str, str]  # reservation and UUID
# How many nodes are seen to in one pass.
AT_A_TIME: Final = 500


@frozen
class PodWords:
    """What is known of a pod beside its name."""

    owner: str | None = None
    is_there: bool = True


@frozen
class Called:
    """What else a GPU is called."""

    serial: str | None = None
    chassis: str | None = None


class Known(Protocol):
    """What others know."""

    async def pod(self, namespace: str, name: str, uid: str) -> PodWords:
        """Raises GpuwardenError where nobody can be asked."""

    def gpu(self, node: str, uuid: str) -> Called: ...

    def evidence(self, node: str) -> str | None: ...


class OpenUses:
    """By node, what has begun and is not known to be over, and what is over and not told. A file a node, if kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._all: dict[str, dict[Key, Use]] = {}
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            files = sorted(directory.glob("*.json"))
        except OSError as exc:
            raise ExportError(f"open uses cannot be kept in {directory}: {exc.strerror}") from exc
        for file in files:
            self._read(file)

    def nodes(self) -> set[str]:
        return set(self._all)

    def of(self, node: str) -> Mapping[Key, Use]:
        return self._all.get(node, {})

    def keep(self, node: str, uses: Mapping[Key, Use]) -> None:
        """These are kept when this returns, and no others of the node. Raises ExportError: then nothing has changed."""
        if uses == self.of(node):
            return
        if self._directory is not None:
            try:
                self._write(self._directory / f"{node}.json", list(uses.values()))
            except OSError as exc:
                raise ExportError(f"open uses cannot be kept in {self._directory}: {exc.strerror}") from exc
        if uses:
            self._all[node] = dict(uses)
        else:
            self._all.pop(node, None)

    def _read(self, file: Path) -> None:
        try:
            found = msgspec.json.decode(file.read_bytes(), type=list[Use])
        except (msgspec.DecodeError, OSError) as exc:
            # The starts are seen again in the cluster; an end that came while nobody looked is not.
            log.warning("open uses cannot be read", file=str(file), problem=str(exc))
            file.replace(file.with_suffix(".torn"))
            return
        for one in found:
            self._all.setdefault(one.node, {})[one.reservation, one.gpu_uuid] = one

    def _write(self, file: Path, uses: list[Use]) -> None:
        if not uses:
            file.unlink(missing_ok=True)  # one that comes back after a power cut is told again, in the same words
            return
        beside = file.with_suffix(".new")
        with beside.open("wb") as stream:
            stream.write(msgspec.json.encode(uses))
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class Uses:
    """Hears of GPUNodes from a watch; tells in `step`, which whoever leads takes."""

    def __init__(
        self,
        cluster: str,
        known: Known,
        open_uses: OpenUses,
        take: Callable[[Batch], Awaitable[None]],
        clock: Clock,
        is_current: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._known = known
        self._open = open_uses
        self._take = take
        self._clock = clock
        self._is_current = is_current
        self.gpu_nodes: View[GpuNode] = View(GpuNode.parse)
        # Nodes that are to be looked at, and nodes whose uses are to be told.
        self._todo: dict[str, None] = {}
        self._owed = dict.fromkeys(sorted(open_uses.nodes()))
        self._has_begun = False

    async def step(self) -> None:
        """One pass over what is news. What cannot be done now is left for the next one. Raises ExportError."""
        if not self._is_current():
            return
        for name in list(self._owed):
            await self._tell(name)
        if not self._has_begun:
            self._todo.update(dict.fromkeys([*self.gpu_nodes.names(), *sorted(self._open.nodes())]))
            self._has_begun = True
        self._todo.update(dict.fromkeys(self.gpu_nodes.take_news()))
        for name in list(self._todo)[:AT_A_TIME]:
            del self._todo[name]
            try:
                await self._settle(name)
                await self._tell(name)
            except GpuwardenError as exc:
                self._todo[name] = None
                if isinstance(exc, ExportError):
                    raise
                log.debug("uses left for the next pass", node=name, problem=str(exc))

    async def _settle(self, name: str) -> None:
        node, known = self.gpu_nodes.get(name), self._open.of(name)
        if node is not None and not node.is_rebuilt:
            return  # what is held there is not known yet; it is news when it is
        held = {
            (one.id, uuid): one
            for one in (node.reservations.values() if node is not None else ())
            if one.uid is not None
            for uuid in one.uuids
        }
        new = dict(known)
        for key, one in known.items():
            if key not in held and one.until is None and (node is not None or await self._is_gone(one)):
                new[key] = self._ended(one)
        for key in held.keys() - known.keys():
            new[key] = await self._begun(name, *key, held[key])
        if new != known:
            await asyncio.to_thread(self._open.keep, name, new)
            self._owed[name] = None
        if node is None and any(one.until is None for one in new.values()):
            self._todo[name] = None

    async def _begun(self, node: str, reservation: str, uuid: str, held: Reservation) -> Use:
        pod = await self._known.pod(held.namespace, held.pod_name or "", held.uid or "")
        called = self._known.gpu(node, uuid)
        return Use(
            cluster=self._cluster,
            node=node,
            reservation=reservation,
            gpu_uuid=uuid,
            since=held.since,
            serial=called.serial,
            chassis=called.chassis,
            namespace=held.namespace,
            pod=held.pod_name,
            pod_uid=held.uid,
            owner=pod.owner,
            evidence_hash=self._known.evidence(node),
        )

    def _ended(self, one: Use) -> Use:
        """What was not known of the GPU when it began may be known now."""
        called = self._known.gpu(one.node, one.gpu_uuid)
        return evolve(
            one,
            until=max(self._clock(), one.since),
            serial=one.serial or called.serial,
            chassis=one.chassis or called.chassis,
        )

    async def _is_gone(self, one: Use) -> bool:
        """Its GPUNode is: taken away by force, perhaps, and made anew in a moment. The pod decides."""
        return not (await self._known.pod(one.namespace or "", one.pod or "", one.pod_uid or "")).is_there

    async def _tell(self, name: str) -> None:
        """All of the node that is written down; what is over is forgotten once the exporters have it."""
        if name not in self._owed:
            return
        uses = self._open.of(name)
        if uses:
            told = tuple(uses.values())
            await self._take(Batch(id=hashlib.sha256(msgspec.json.encode(told)).hexdigest(), uses=told))
            still = {key: one for key, one in uses.items() if one.until is None}
            await asyncio.to_thread(self._open.keep, name, still)
        self._owed.pop(name, None)
