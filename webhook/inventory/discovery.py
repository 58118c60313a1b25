"""Which GPUs the GPUNode of each node should list, and the writer that keeps it up to date.

The devices of a node come from the inventory file if it lists devices for the node, else from the annotation
`fudo.org/gpu.device.labels`, else from the ResourceSlices of the GPUs' DRA driver if they are watched, else from the
GPUs that `gpuwarden export` has read there. Whatever the source, these readings fill in missing details. A reserved
device is never dropped: while it is not reported, it stays as unhealthy.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import structlog
from attrs import define, evolve, field, frozen

from webhook.core import keys
from webhook.core.device import Device, DeviceUuid, Inventory
from webhook.core.evidence import Evidence
from webhook.core.raw import Raw, is_ours
from webhook.core.reasons import Reason
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile
from webhook.inventory.node_annotations import AnnotatedDevices, UnreadableDevicesError, devices_in
from webhook.inventory.node_gpus import devices_read, gpus_in
from webhook.inventory.published_gpus import PublishedGpus
from webhook.kube.api_objects import NodeExistence, ObjectClient
from webhook.kube.events import Events, Subject
from webhook.kube.gpu_node import API_VERSION, FINALIZER, GpuNode, UnreadableGpuNodeError, raw_device
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView

log = structlog.get_logger(__name__)

# Nodes handled in one step, so that other tasks get to run in between.
BATCH_SIZE = 200
CONCURRENCY = 8
# Consecutive failures after which a pass stops, so that an unavailable API server does not get 200 requests a pass.
MAX_FAILURES = 3
# Reservations are written to the same object all the time.
MAX_ATTEMPTS = 5
# Devices that one Event names.
MAX_NAMED = 5


@frozen
class WantedDevices:
    """The devices that a GPUNode should list, and the injection of its node."""

    devices: Mapping[DeviceUuid, Device]
    # Reserved devices that have just stopped being reported.
    vanished: tuple[DeviceUuid, ...] = ()
    injection: str | None = None


def desired_devices(reported: Iterable[Device], known: GpuNode | None) -> WantedDevices:
    """The reported devices, and as unhealthy those that are or may be reserved and are no longer reported."""
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


def new_gpu_node(name: str, wanted: WantedDevices) -> Raw:
    raw = {
        "apiVersion": API_VERSION,
        "kind": "GPUNode",
        "metadata": {"name": name, "labels": {keys.MANAGED_BY: keys.OURS}, "finalizers": [FINALIZER]},
    }
    return with_devices(raw, wanted)


def with_devices(raw: Raw, wanted: WantedDevices) -> Raw:
    injection = {} if wanted.injection is None else {"injection": wanted.injection}
    devices = [raw_device(one) for one in wanted.devices.values()]
    return {**raw, "spec": {**(raw.get("spec") or {}), **injection, "devices": devices}}


@frozen
class NodeAnnotations:
    """The annotations of a Node that describe its GPUs."""

    device_labels: str | None = None
    exported: str | None = None


def annotations_of(raw: Raw) -> NodeAnnotations:
    annotations = raw["metadata"].get("annotations") or {}
    texts = [None if text is None else str(text) for text in map(annotations.get, ANNOTATION_KEYS)]
    return NodeAnnotations(*texts)


# In the order of the fields of NodeAnnotations.
ANNOTATION_KEYS = (keys.ASSIGNER_DEVICE_LABELS, keys.NODE_GPUS)


def with_readings(listed: Iterable[Device], read: Iterable[Device]) -> tuple[Device, ...]:
    """The listed devices, with missing details filled in from the readings."""
    by_uuid = {one.uuid: one for one in read}
    return tuple(with_reading(one, by_uuid.get(one.uuid)) for one in listed)


def with_reading(one: Device, read: Device | None) -> Device:
    if read is None:
        return one
    return evolve(
        one,
        index=read.index if one.index is None else one.index,
        model=one.model or read.model,
        memory=one.memory or read.memory,
        serial=one.serial or read.serial,
        pci=one.pci or read.pci,
    )


def with_marks(devices: Iterable[Device], marks: Mapping[DeviceUuid, str]) -> tuple[Device, ...]:
    """The devices with these marks, and no others."""
    return tuple(evolve(one, mismatch=marks.get(one.uuid, "")) for one in devices)


class DeviceMarks(Protocol):
    """Knows which devices may not be reserved, and why."""

    def marks_on(self, node: str) -> Mapping[DeviceUuid, str] | None:
        """The marks of the node's devices; None if they are not known."""

    def take_changes(self) -> Collection[str]:
        """The nodes whose marks have changed since the last call."""


class UnknownMarks:
    """Leaves the marks as they are."""

    def marks_on(self, node: str) -> Mapping[DeviceUuid, str] | None:
        return None

    def take_changes(self) -> Collection[str]:
        return ()


class WrittenInjections(Protocol):
    """Knows which injection each GPUNode should say."""

    def to_write(self, node: str, stored: str | None) -> str | None:
        """The injection, given the stored one; None for none."""

    def take_changes(self) -> Collection[str]:
        """The nodes for which this may have changed since the last call."""


class SameInjections:
    """Leaves the injections as they are."""

    def to_write(self, node: str, stored: str | None) -> str | None:
        return stored

    def take_changes(self) -> Collection[str]:
        return ()


class FileEvidenceSink(Protocol):
    """Receives the evidence entries of the inventory file."""

    def read_from_file(self, entries: Mapping[str, Evidence]) -> None: ...


class FileInventory:
    """The optional inventory file: devices for discovery, evidence entries for `evidence`."""

    def __init__(self, file: InventoryFile | None, evidence: FileEvidenceSink) -> None:
        self._file = file
        self._evidence = evidence
        self._nodes: Inventory = {}
        self._mistakes: tuple[str, ...] = ()
        self.is_known = file is None
        """Whether the file has been read. Until then a node without devices may be listed in it."""

    async def refresh(self) -> list[str]:
        """The nodes whose entries have changed. A bad file is logged once, and the old content stays."""
        if self._file is None:
            return []
        try:
            found = await self._file.poll()
        except InventoryUnavailableError as exc:
            if exc.mistakes != self._mistakes:
                file = str(self._file.path)
                log.warning("inventory file rejected, the previous content stays", mistakes=exc.mistakes, file=file)
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
    """Which nodes report which device."""

    def __init__(self) -> None:
        self._devices: dict[str, frozenset[DeviceUuid]] = {}
        self._nodes: dict[DeviceUuid, set[str]] = {}

    def put(self, name: str, devices: Iterable[DeviceUuid]) -> set[str]:
        """Set the devices of a node. Returns the other nodes that had or have a dispute with it over a device."""
        before, now = self._devices.pop(name, frozenset[DeviceUuid]()), frozenset(devices)
        affected = self._other_claimants(name, before)
        for uuid in before - now:
            self._nodes[uuid].discard(name)
            if not self._nodes[uuid]:
                del self._nodes[uuid]
        for uuid in now:
            self._nodes.setdefault(uuid, set()).add(name)
        if now:
            self._devices[name] = now
        return affected | self._other_claimants(name, now)

    def _other_claimants(self, name: str, devices: Iterable[DeviceUuid]) -> set[str]:
        return {other for uuid in devices for other in self._nodes[uuid] if other != name}

    def disputed(self, name: str) -> list[tuple[DeviceUuid, list[str]]]:
        """The devices that other nodes report too, and those nodes."""
        mine = sorted(self._devices.get(name, ()))
        return [(uuid, sorted(self._nodes[uuid] - {name})) for uuid in mine if len(self._nodes[uuid]) > 1]


@define(eq=False, repr=False)
class Discovery:
    """Observes Nodes and GPUNodes through watches; the elected leader writes in `step`.

    `is_current` returns whether both watches have listed and are not interrupted: only then absence proves anything.
    """

    _objects: ObjectClient
    _api_nodes: NodeExistence
    _file_inventory: FileInventory
    _events: Events
    _is_current: Callable[[], bool]
    # None if the slices of DRA drivers are not watched.
    _published: PublishedGpus | None = None
    _marks: DeviceMarks = field(factory=UnknownMarks)
    _injections: WrittenInjections = field(factory=SameInjections)
    nodes: ObjectView[NodeAnnotations] = field(factory=lambda: ObjectView(annotations_of), init=False)
    gpu_nodes: ObjectView[Raw] = field(factory=lambda: ObjectView(lambda raw: raw), init=False)
    _todo: dict[str, None] = field(factory=dict, init=False)
    _claims: DeviceClaims = field(factory=DeviceClaims, init=False)
    _recorded: dict[tuple[str, Reason], str] = field(factory=dict, init=False)
    _limit: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(CONCURRENCY), init=False)
    _failures: int = field(default=0, init=False)

    async def step(self) -> None:
        """One pass over what has changed. What fails is left for the next one."""
        self._todo.update(dict.fromkeys(await self._file_inventory.refresh()))
        if not (self._file_inventory.is_known and self._is_current()):
            return
        if self._published is not None:
            self._todo.update(dict.fromkeys(self._published.take_changes()))
        changes = [*self.nodes.take_changes(), *self.gpu_nodes.take_changes(), *self._marks.take_changes()]
        self._todo.update(dict.fromkeys((*changes, *self._injections.take_changes())))
        batch, self._failures = list(self._todo)[:BATCH_SIZE], 0
        done = await asyncio.gather(*map(self._attempt, batch), return_exceptions=True)
        left = done.count(False)
        if left:
            log.warning("nodes left for the next pass", nodes=left)
        for one in done:  # a bug with one node must not stop the others
            if isinstance(one, BaseException):
                raise one

    async def _attempt(self, name: str) -> bool:
        async with self._limit:
            if self._failures >= MAX_FAILURES:
                return False
            del self._todo[name]
            try:
                await self._reconcile_node(name)
            except RefusedError as exc:
                self._record_once(name, Reason.DEVICES_UNREADABLE, f"the API server rejects its devices: {exc}")
            except (StaleError, StoreUnavailableError) as exc:
                log.debug("node left for the next pass", node=name, exc_info=exc)
                self._todo[name] = None
                self._failures = self._failures + 1 if isinstance(exc, StoreUnavailableError) else 0
                return False
            except BaseException:  # a bug, or cancelled: the node is handled again
                self._todo[name] = None
                raise
            else:
                self._failures = 0
            return True

    async def _reconcile_node(self, name: str) -> None:
        """Repeat on the current object when another writer was faster."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self._reconcile_known(name)
            except StaleError:
                raw = await self._objects.get(name)
                if raw is None:
                    self.gpu_nodes.forget(name)
                else:
                    self.gpu_nodes.changed(raw)
        return await self._reconcile_known(name)

    async def _reconcile_known(self, name: str) -> None:
        raw = self.gpu_nodes.get(name)
        try:
            known = None if raw is None else GpuNode.parse(raw)
        except UnreadableGpuNodeError as exc:
            text = f"GPUNode {name} is ignored, its last known state stays: {exc}"
            self._record_once(name, Reason.DEVICES_UNREADABLE, text)
            return
        if name not in self.nodes:
            self._record_disputes(name, ())
            if raw is None:
                for reason in (Reason.NODE_GONE, Reason.DEVICES_UNREADABLE):
                    self._recorded.pop((name, reason), None)
            elif known is not None:
                await self._delete_gpu_node(raw, known)
            return
        self._recorded.pop((name, Reason.NODE_GONE), None)
        reported = self._reported(name, is_ours=raw is None or is_ours(raw))
        if reported is None:
            desired = WantedDevices({one.uuid: one for one in known.devices} if known else {})
        else:
            desired = desired_devices(reported, known)
        self._record_disputes(name, desired.devices)
        desired = self._marked(name, desired, known)
        if raw is None:
            if desired.devices:
                self.gpu_nodes.changed(await self._objects.create(new_gpu_node(name, desired)))
                log.info("GPUNode created", node=name, devices=len(desired.devices))
        # An object that is being deleted is not written. It is created again when it is gone.
        elif known is not None and not known.is_being_deleted:
            await self._write(raw, known, desired)

    def _marked(self, name: str, desired: WantedDevices, known: GpuNode | None) -> WantedDevices:
        """With the marks and the injection: both in one write, because a GPU with a claim must be marked before
        reservations begin."""
        marks, stored = self._marks.marks_on(name), known.injection if known else None
        injection = stored if marks is None and stored is not None else self._injections.to_write(name, stored)
        if marks is None:
            marks = {one.uuid: one.mismatch for one in known.devices} if known else {}
        devices = {one.uuid: one for one in with_marks(desired.devices.values(), marks)}
        return evolve(desired, devices=devices, injection=injection)

    async def _write(self, raw: Raw, known: GpuNode, desired: WantedDevices) -> None:
        if {one.uuid: one for one in known.devices} == desired.devices and known.injection == desired.injection:
            return
        if desired.vanished:
            text = f"{named(desired.vanished)} reserved and no longer reported: quarantined until the reservation ends"
            self._events.record(Subject.of_node(known.name), Reason.DEVICE_VANISHED, text)
        self.gpu_nodes.changed(await self._objects.replace(with_devices(raw, desired)))
        log.info("devices written", node=known.name, devices=len(desired.devices))

    def _reported(self, name: str, *, is_ours: bool) -> tuple[Device, ...] | None:
        """The node's devices; None if they cannot be determined and the known ones stay."""
        annotations = self.nodes.get(name) or NodeAnnotations()
        key = keys.NODE_GPUS
        try:
            readings = None if annotations.exported is None else devices_read(gpus_in(annotations.exported))
            key = keys.ASSIGNER_DEVICE_LABELS
            labelled = None if annotations.device_labels is None else devices_in(annotations.device_labels)
        except UnreadableDevicesError as exc:
            text = f"annotation {key} is ignored, the known devices stay: {exc}"
            self._record_once(name, Reason.DEVICES_UNREADABLE, text)
            return None
        self._record_ignored(name, {keys.NODE_GPUS: readings, keys.ASSIGNER_DEVICE_LABELS: labelled})
        listed = self._file_inventory.devices_of(name) or (None if labelled is None else labelled.devices)
        if listed is None and self._published is not None:
            if not self._published.is_known(name):
                return None
            listed = self._published.devices_of(name)
        found = None if readings is None else readings.devices
        reported = found if listed is None else with_readings(listed, found or ())
        return () if reported is None and is_ours else reported

    def _record_ignored(self, name: str, parsed: Mapping[str, AnnotatedDevices | None]) -> None:
        messages = [f"annotation {key}: {one.ignored_message}" for key, one in parsed.items() if one and one.ignored]
        if messages:
            self._record_once(name, Reason.DEVICES_UNREADABLE, f"devices ignored: {'; '.join(messages)}")
        else:
            self._recorded.pop((name, Reason.DEVICES_UNREADABLE), None)

    async def _delete_gpu_node(self, raw: Raw, known: GpuNode) -> None:
        """The Node is gone. Keeps an object with reservations, and one that a user made."""
        if known.reservations:
            text = "the Node is gone; its reservations stay until their pods are gone too"
            self._record_once(known.name, Reason.NODE_GONE, text)
            return
        if (
            known.is_rebuilt
            and not known.is_being_deleted
            and is_ours(raw)
            and await self._api_nodes.is_gone(known.name)
        ):
            await self._objects.delete(raw)
            log.info("GPUNode deleted with its Node", node=known.name)

    def _record_disputes(self, name: str, devices: Iterable[DeviceUuid]) -> None:
        """Record Events for devices that two nodes report. The fleet offers no such device."""
        for one in [name, *sorted(self._claims.put(name, devices))]:
            found = self._claims.disputed(one)
            if not found:
                self._recorded.pop((one, Reason.DEVICE_DISPUTED), None)
                continue
            pieces = [f"{uuid} is also on {', '.join(others)}" for uuid, others in found[:MAX_NAMED]]
            if len(found) > MAX_NAMED:
                pieces.append(f"and {len(found) - MAX_NAMED} more")
            self._record_once(one, Reason.DEVICE_DISPUTED, "; ".join([*pieces, "not offered until one node is left"]))

    def _record_once(self, name: str, reason: Reason, text: str) -> None:
        """Record a condition when it begins and when its text changes, not on every pass."""
        if self._recorded.get((name, reason)) != text:
            self._recorded[name, reason] = text
            self._events.record(Subject.of_node(name), reason, text)


def named(devices: tuple[DeviceUuid, ...]) -> str:
    more = len(devices) - MAX_NAMED
    return ", ".join(devices[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
