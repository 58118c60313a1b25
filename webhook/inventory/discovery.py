"""What GPUs the GPUNode of each node should name, and the one writer who sees to it.

Which devices there are comes from the inventory file for the nodes that it gives devices to, else from the annotation
of S4, else from what `gpuwarden export` has read there. What was read says more of each, wherever they come from.
What a reservation holds is never dropped: while its device is not reported, it stays there unhealthy.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import structlog
from attrs import evolve, frozen

from webhook.core import keys
from webhook.core.device import Device, DeviceUuid, Inventory
from webhook.core.evidence import Evidence
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile
from webhook.inventory.node_annotations import AnnotatedDevices, UnreadableDevicesError, devices_in
from webhook.inventory.node_gpus import devices_read, gpus_in
from webhook.kube.api_objects import NodeExistence, ObjectClient
from webhook.kube.events import Events, Subject
from webhook.kube.gpu_node import API_VERSION, FINALIZER, GpuNode, UnreadableGpuNodeError, raw_device
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView

log = structlog.get_logger(__name__)

# How many nodes are seen to in one step: others want their turn too.
AT_A_TIME = 200
AT_ONCE = 8
# In a row: an API server that does not answer is not asked about two hundred nodes a pass.
MAX_FAILURES = 3
# Reservations are written to the same object all the time.
TRIES = 5
# Devices that one event names.
MAX_NAMED = 5


@frozen
class WantedDevices:
    """What a GPUNode should name."""

    devices: Mapping[DeviceUuid, Device]
    # Held, no longer reported, and this is news.
    vanished: tuple[DeviceUuid, ...] = ()


def due(reported: Iterable[Device], known: GpuNode | None) -> WantedDevices:
    """What is reported, and unhealthy beside it what is held or may be."""
    devices = {one.uuid: one for one in reported}
    if known is None:
        return WantedDevices(devices)
    before = {one.uuid: one for one in known.devices}
    held = {uuid for one in known.reservations.values() for uuid in one.uuids}
    kept = held if known.is_rebuilt else held | before.keys()
    missing = sorted(kept - devices.keys())
    vanished = [uuid for uuid in missing if uuid in held and (uuid not in before or before[uuid].is_healthy)]
    for uuid in missing:
        devices[uuid] = evolve(before.get(uuid) or Device(uuid), is_healthy=False)
    return WantedDevices(devices, tuple(vanished))


def new_gpu_node(name: str, devices: Iterable[Device]) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": "GPUNode",
        "metadata": {"name": name, "labels": {keys.MANAGED_BY: keys.OURS}, "finalizers": [FINALIZER]},
        "spec": {"devices": [raw_device(one) for one in devices]},
    }


def with_devices(raw: Raw, devices: Iterable[Device]) -> Raw:
    return {**raw, "spec": {**(raw.get("spec") or {}), "devices": [raw_device(one) for one in devices]}}


def is_ours(raw: Raw) -> bool:
    """Whether we have made it, or somebody by hand."""
    return (raw["metadata"].get("labels") or {}).get(keys.MANAGED_BY) == keys.OURS


@frozen
class NodeAnnotations:
    """What a Node says of its GPUs in its annotations."""

    s4: str | None = None
    read: str | None = None


def said_by(raw: Raw) -> NodeAnnotations:
    annotations = raw["metadata"].get("annotations") or {}
    texts = [None if text is None else str(text) for text in map(annotations.get, SAYING)]
    return NodeAnnotations(*texts)


# In the order of NodeSays.
SAYING = (keys.S4_DEVICE_LABELS, keys.NODE_GPUS)


def completed(listed: Iterable[Device], read: Iterable[Device]) -> tuple[Device, ...]:
    """The listed devices; what is not said of them is taken from what was read."""
    by_uuid = {one.uuid: one for one in read}
    return tuple(filled(one, by_uuid.get(one.uuid)) for one in listed)


def filled(one: Device, read: Device | None) -> Device:
    if read is None:
        return one
    return evolve(
        one,
        index=read.index if one.index is None else one.index,
        model=one.model or read.model,
        memory=one.memory or read.memory,
        serial=one.serial or read.serial,
    )


class EvidenceOfFile(Protocol):
    """Takes the evidence entries of the inventory file."""

    def read_from_file(self, entries: Mapping[str, Evidence]) -> None: ...


class WrittenInventory:
    """The inventory file, if there is one: devices for discovery, evidence entries for `evidence`."""

    def __init__(self, file: InventoryFile | None, evidence: EvidenceOfFile) -> None:
        self._file = file
        self._evidence = evidence
        self._nodes: Inventory = {}
        self._mistakes: tuple[str, ...] = ()
        self.is_known = file is None
        """Whether it has been read: until then nothing can be said of what it does not name."""

    async def refresh(self) -> list[str]:
        """The nodes that it says something else of than before. A bad file is told once, and the old one stays."""
        if self._file is None:
            return []
        try:
            found = await self._file.poll()
        except InventoryUnavailableError as exc:
            if exc.mistakes != self._mistakes:
                log.warning("inventory refused, the old one stays", mistakes=exc.mistakes, file=str(self._file.path))
            self._mistakes = exc.mistakes
            return []
        if found is None:
            return []
        old, self._nodes, self._mistakes = self._nodes, found, ()
        self._evidence.read_from_file(self._file.evidence)
        self.is_known = True
        return [name for name in sorted(old.keys() | found.keys()) if old.get(name) != found.get(name)]

    def devices_of(self, name: str) -> tuple[Device, ...]:
        node = self._nodes.get(name)
        return node.devices if node is not None else ()


class DeviceClaims:
    """Which nodes say that they have which device."""

    def __init__(self) -> None:
        self._devices: dict[str, frozenset[DeviceUuid]] = {}
        self._nodes: dict[DeviceUuid, set[str]] = {}

    def put(self, name: str, devices: Iterable[DeviceUuid]) -> set[str]:
        """This node has these and no others; the nodes that it was in dispute with, or is now."""
        before, now = self._devices.pop(name, frozenset[DeviceUuid]()), frozenset(devices)
        affected = self._rivals(name, before)
        for uuid in before - now:
            self._nodes[uuid].discard(name)
            if not self._nodes[uuid]:
                del self._nodes[uuid]
        for uuid in now:
            self._nodes.setdefault(uuid, set()).add(name)
        if now:
            self._devices[name] = now
        return affected | self._rivals(name, now)

    def _rivals(self, name: str, devices: Iterable[DeviceUuid]) -> set[str]:
        return {other for uuid in devices for other in self._nodes[uuid] if other != name}

    def disputed(self, name: str) -> list[tuple[DeviceUuid, list[str]]]:
        """Its devices that others have too, and who."""
        mine = sorted(self._devices.get(name, ()))
        return [(uuid, sorted(self._nodes[uuid] - {name})) for uuid in mine if len(self._nodes[uuid]) > 1]


class Discovery:
    """Hears of Nodes and GPUNodes from watches; writes in `step`, which the elected one takes.

    `is_current` says whether both watches have listed and are not interrupted: nothing follows from an absence else.
    """

    def __init__(
        self,
        objects: ObjectClient,
        api_nodes: NodeExistence,
        written: WrittenInventory,
        events: Events,
        is_current: Callable[[], bool],
    ) -> None:
        self._objects = objects
        self._api_nodes = api_nodes
        self._written = written
        self._events = events
        self._is_current = is_current
        self.nodes: ObjectView[NodeAnnotations] = ObjectView(said_by)
        self.gpu_nodes: ObjectView[Raw] = ObjectView(lambda raw: raw)
        self._todo: dict[str, None] = {}
        self._claims = DeviceClaims()
        self._told: dict[tuple[str, Reason], str] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._failures = 0

    @property
    def remembered(self) -> int:
        """What was told and still is so."""
        return len(self._told)

    async def step(self) -> None:
        """One pass over what is news. What cannot be done now is left for the next one."""
        self._todo.update(dict.fromkeys(await self._written.refresh()))
        if not (self._written.is_known and self._is_current()):
            return
        self._todo.update(dict.fromkeys([*self.nodes.take_changes(), *self.gpu_nodes.take_changes()]))
        batch, self._failures = list(self._todo)[:AT_A_TIME], 0
        done = await asyncio.gather(*map(self._attempt, batch), return_exceptions=True)
        left = done.count(False)
        if left:
            log.warning("nodes left for the next pass", nodes=left)
        for one in done:  # a bug with one node: the others have been served
            if isinstance(one, BaseException):
                raise one

    async def _attempt(self, name: str) -> bool:
        async with self._gate:
            if self._failures >= MAX_FAILURES:
                return False
            del self._todo[name]
            try:
                await self._settle(name)
            except RefusedError as exc:
                self._tell_once(name, Reason.DEVICES_UNREADABLE, f"the API server refuses its devices: {exc}")
            except (StaleError, StoreUnavailableError) as exc:
                log.debug("node left for the next pass", node=name, exc_info=exc)
                self._todo[name] = None
                self._failures = self._failures + 1 if isinstance(exc, StoreUnavailableError) else 0
                return False
            except BaseException:  # a bug, or the end of this leadership: the node has its turn again
                self._todo[name] = None
                raise
            else:
                self._failures = 0
            return True

    async def _settle(self, name: str) -> None:
        """As often as somebody else is faster, on what is there then."""
        for _ in range(TRIES - 1):
            try:
                return await self._settle_as_known(name)
            except StaleError:
                raw = await self._objects.get(name)
                if raw is None:
                    self.gpu_nodes.forget(name)
                else:
                    self.gpu_nodes.changed(raw)
        return await self._settle_as_known(name)

    async def _settle_as_known(self, name: str) -> None:
        raw = self.gpu_nodes.get(name)
        try:
            known = None if raw is None else GpuNode.parse(raw)
        except UnreadableGpuNodeError as exc:
            text = f"GPUNode {name} is left out of account, what was known of it stays: {exc}"
            self._tell_once(name, Reason.DEVICES_UNREADABLE, text)
            return
        if name not in self.nodes:
            self._dispute(name, ())
            if raw is None:
                for reason in (Reason.NODE_GONE, Reason.DEVICES_UNREADABLE):
                    self._told.pop((name, reason), None)
            elif known is not None:
                await self._part(raw, known)
            return
        self._told.pop((name, Reason.NODE_GONE), None)
        reported = self._reported(name, is_ours=raw is None or is_ours(raw))
        if reported is None:
            self._dispute(name, [one.uuid for one in known.devices] if known else ())
            return
        what = due(reported, known)
        self._dispute(name, what.devices)
        if raw is None:
            if what.devices:
                self.gpu_nodes.changed(await self._objects.create(new_gpu_node(name, what.devices.values())))
                log.info("GPUNode created", node=name, devices=len(what.devices))
        elif known is not None and not known.is_being_deleted:  # a GPUNode being deleted offers no devices
            await self._write(raw, known, what)

    async def _write(self, raw: Raw, known: GpuNode, what: WantedDevices) -> None:
        if {one.uuid: one for one in known.devices} == what.devices:
            return
        if what.vanished:
            text = f"{named(what.vanished)} no longer reported, and held: quarantined until nothing holds it"
            self._events.record(Subject.of_node(known.name), Reason.DEVICE_VANISHED, text)
        self.gpu_nodes.changed(await self._objects.replace(with_devices(raw, what.devices.values())))
        log.info("devices written", node=known.name, devices=len(what.devices))

    def _reported(self, name: str, *, is_ours: bool) -> tuple[Device, ...] | None:
        """The node's devices; None where nobody says which, so that what is known stays."""
        said = self.nodes.get(name) or NodeAnnotations()
        where = keys.NODE_GPUS
        try:
            read = None if said.read is None else devices_read(gpus_in(said.read))
            where = keys.S4_DEVICE_LABELS
            named_there = None if said.s4 is None else devices_in(said.s4)
        except UnreadableDevicesError as exc:
            text = f"annotation {where} left out of account, the known devices stay: {exc}"
            self._tell_once(name, Reason.DEVICES_UNREADABLE, text)
            return None
        self._tell_of_left_out(name, {keys.NODE_GPUS: read, keys.S4_DEVICE_LABELS: named_there})
        listed = self._written.devices_of(name) or (None if named_there is None else named_there.devices)
        found = None if read is None else read.devices
        reported = found if listed is None else completed(listed, found or ())
        return () if reported is None and is_ours else reported

    def _tell_of_left_out(self, name: str, said: Mapping[str, AnnotatedDevices | None]) -> None:
        complaints = [f"annotation {key}: {one.complaint}" for key, one in said.items() if one and one.left_out]
        if complaints:
            self._tell_once(name, Reason.DEVICES_UNREADABLE, f"left out, the others count: {'; '.join(complaints)}")
        else:
            self._told.pop((name, Reason.DEVICES_UNREADABLE), None)

    async def _part(self, raw: Raw, known: GpuNode) -> None:
        """Its Node is not there. What is held outlives it, and so does what somebody made by hand."""
        if known.reservations:
            text = "the Node is gone; what is reserved on it stays so until its pods are gone too"
            self._tell_once(known.name, Reason.NODE_GONE, text)
            return
        if (
            known.is_rebuilt
            and not known.is_being_deleted
            and is_ours(raw)
            and await self._api_nodes.is_gone(known.name)
        ):
            await self._objects.delete(raw)
            log.info("GPUNode deleted with its Node", node=known.name)

    def _dispute(self, name: str, devices: Iterable[DeviceUuid]) -> None:
        """The fleet offers nothing that two nodes say they have; here it is said."""
        for one in [name, *sorted(self._claims.put(name, devices))]:
            found = self._claims.disputed(one)
            if not found:
                self._told.pop((one, Reason.DEVICE_DISPUTED), None)
                continue
            pieces = [f"{uuid} is on {', '.join(others)} too" for uuid, others in found[:MAX_NAMED]]
            if len(found) > MAX_NAMED:
                pieces.append(f"and {len(found) - MAX_NAMED} more")
            self._tell_once(one, Reason.DEVICE_DISPUTED, "; ".join([*pieces, "offered to nobody until one is left"]))

    def _tell_once(self, name: str, reason: Reason, text: str) -> None:
        """A state, not a change: it is told when it begins, and when something else is to be said of it."""
        if self._told.get((name, reason)) != text:
            self._told[name, reason] = text
            self._events.record(Subject.of_node(name), reason, text)


def named(devices: tuple[DeviceUuid, ...]) -> str:
    more = len(devices) - MAX_NAMED
    return ", ".join(devices[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
