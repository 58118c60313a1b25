"""Nodes, devices and static evidence from one YAML or JSON file."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from webhook.core.device import Device, DeviceUuid, Inventory, Node, Taint, is_uuid
from webhook.core.evidence import Evidence
from webhook.core.keys import HOSTNAME_LABEL
from webhook.inventory import InventoryUnavailableError

MAX_MISTAKES = 100
MAX_SHARES = 128


class DeviceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uuid: str
    index: int | None = None
    model: str = ""
    memory: str = ""
    serial: str | int = ""
    labels: list[str] = []
    shares: int = 1
    healthy: bool = True


class EvidenceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: str
    since: datetime | None = None
    until: datetime | None = None


class TaintEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: str = ""
    effect: str = "NoSchedule"


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    labels: dict[str, str] = {}
    evidence: EvidenceEntry | None = None
    devices: list[Any] = []
    ready: bool = True
    unschedulable: bool = False
    taints: list[TaintEntry] = []


Entry = TypeVar("Entry")


class InventoryFile:
    """The file, read again when its content changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.evidence: Mapping[str, Evidence] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._digest: bytes | None = None

    async def poll(self) -> Inventory | None:
        return await asyncio.to_thread(self.read)

    def read(self) -> Inventory | None:
        """The nodes; None if the file is unchanged. A bad file is rejected once, not on every call."""
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return None
            content = self.path.read_bytes()
        except OSError as exc:
            raise InventoryUnavailableError(f"{self.path}: {exc.strerror}") from exc
        digest = hashlib.sha256(content).digest()
        self._stamp = stamp
        if digest == self._digest:
            return None
        self._digest = digest
        try:
            nodes, self.evidence = InventoryParser(content).contents()
        except InventoryUnavailableError as exc:
            raise InventoryUnavailableError(*exc.mistakes, where=f"{self.path}: ") from exc
        return nodes


class InventoryParser:
    """Parses a file's content and collects every mistake."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.mistakes: list[str] = []
        self._label_sets: dict[frozenset[str], frozenset[str]] = {}

    def contents(self) -> tuple[Inventory, Mapping[str, Evidence]]:
        entries = list(self._nodes(self._document()))
        names = [entry.name for _, entry in entries]
        self.mistakes += [f"nodes: {name} is listed twice" for name in duplicates(names)]
        nodes = {entry.name: self._node(path, entry) for path, entry in entries}
        if self.mistakes:
            more = len(self.mistakes) - MAX_MISTAKES
            rest = (f"and {more} more",) if more > 0 else ()
            raise InventoryUnavailableError(*self.mistakes[:MAX_MISTAKES], *rest)
        return nodes, {e.name: evidence_of(e.name, e.evidence) for _, e in entries if e.evidence}

    def _document(self) -> Any:
        try:
            if self.content.lstrip()[:1] == b"{":
                return msgspec.json.decode(self.content)
            return yaml.load(self.content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe one
        except (msgspec.DecodeError, yaml.YAMLError, RecursionError, UnicodeDecodeError, ValueError) as exc:
            raise InventoryUnavailableError(f"neither YAML nor JSON: {exc}") from exc

    def _nodes(self, document: Any) -> Iterator[tuple[str, NodeEntry]]:
        nodes = document.get("nodes") if isinstance(document, dict) else None
        if not isinstance(nodes, list):
            raise InventoryUnavailableError("the file is not a mapping with a list of 'nodes'")
        self.mistakes += [f"unknown member {key!r}" for key in document if key != "nodes"]
        for position, raw in enumerate(nodes):
            path = f"nodes[{position}]"
            entry = self._converted(raw, NodeEntry, path)
            if entry is not None:
                if not entry.name or len(entry.name) > 253:
                    self.mistakes.append(f"{path}.name: a node name has 1 to 253 characters")
                yield path, entry

    def _converted(self, raw: Any, kind: type[Entry], path: str) -> Entry | None:
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as exc:
            self.mistakes.append(f"{path}: {exc}")
            return None

    def _node(self, path: str, entry: NodeEntry) -> Node:
        devices = [
            self._device(f"{path}.devices[{position}]", found)
            for position, raw in enumerate(entry.devices)
            if (found := self._converted(raw, DeviceEntry, f"{path}.devices[{position}]")) is not None
        ]
        self.mistakes += [f"{path}: device {uuid} is listed twice" for uuid in duplicates(d.uuid for d in devices)]
        return Node(
            name=entry.name,
            labels={HOSTNAME_LABEL: entry.name, **entry.labels},
            devices=tuple(devices),
            is_ready=entry.ready,
            is_cordoned=entry.unschedulable,
            taints=tuple(Taint(t.key, t.value, t.effect) for t in entry.taints),
        )

    def _device(self, path: str, entry: DeviceEntry) -> Device:
        if not is_uuid(entry.uuid):
            self.mistakes.append(f"{path}.uuid: {entry.uuid!r} is not a GPU UUID: GPU-… or MIG-…")
        if not 1 <= entry.shares <= MAX_SHARES:
            self.mistakes.append(f"{path}.shares: {entry.shares} is not between 1 and {MAX_SHARES}")
        labels = frozenset(entry.labels)
        return Device(
            uuid=DeviceUuid(entry.uuid),
            index=entry.index,
            model=entry.model,
            memory=entry.memory,
            serial=str(entry.serial),
            labels=self._label_sets.setdefault(labels, labels),
            shares=entry.shares,
            is_healthy=entry.healthy,
        )


def evidence_of(node: str, entry: EvidenceEntry) -> Evidence:
    return Evidence(node, entry.hash, "static", in_utc(entry.since), in_utc(entry.until))


def in_utc(moment: datetime | None) -> datetime | None:
    """YAML has times without a zone; they are taken as UTC."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def duplicates(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)
