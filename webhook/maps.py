"""Placement maps of StatefulSets that exist: their GPUs stay out of the general pool. And node names that are not one
node's."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import structlog

from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import parse_map
from webhook.core.reasons import Reason
from webhook.events import Events, Subject
from webhook.view import View

log = structlog.get_logger(__name__)

Raw = dict[str, Any]
# A node as a map names it, and a GPU of it as the map does.
Place = tuple[str, str]
Named = frozenset[Place]

OPT_INS = (f"{keys.DOMAIN}/enabled", "scheduler.radix.ai/enabled")


def opted_in(raw: Mapping[str, Any]) -> bool:
    """Whether the namespace has asked for us by one of the usual labels."""
    labels = raw["metadata"].get("labels") or {}
    return any(labels.get(key) == "true" for key in OPT_INS)


class MappedSets:
    """Hears of StatefulSets and namespaces. A set counts where the namespace has asked for us: elsewhere anybody could
    take GPUs out of everybody's reach."""

    def __init__(self, fleet: Fleet) -> None:
        self.namespaces: View[bool] = View(opted_in)
        self._fleet = fleet
        self._sets: dict[tuple[str, str], Named] = {}
        self._counted: dict[tuple[str, str], Named] = {}
        self._uses: Counter[Place] = Counter()
        self._mapped: dict[str, set[str]] = {}

    # What the watch of StatefulSets tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {key_of(raw) for raw in objects.values()}
        self._settle({key: frozenset() for key in self._sets.keys() - there})
        self._settle({key_of(raw): places_of(raw) for raw in objects.values()})

    def changed(self, raw: Raw) -> None:
        self._settle({key_of(raw): places_of(raw)})

    def deleted(self, raw: Raw) -> None:
        self._settle({key_of(raw): frozenset()})

    def refresh(self) -> None:
        """Namespaces may have asked for us, or no longer do."""
        news = set(self.namespaces.take_news())
        self._settle({key: places for key, places in self._sets.items() if key[0] in news})

    def _settle(self, said: Mapping[tuple[str, str], Named]) -> None:
        changed: set[str] = set()
        for key, places in said.items():
            if places:
                self._sets[key] = places
            else:
                self._sets.pop(key, None)
            counted = places if self.namespaces.get(key[0]) else frozenset()
            before = self._counted.get(key, frozenset())
            self._uses.update(counted - before)
            self._uses.subtract(before - counted)
            changed |= {node for node, _ in counted ^ before}
            if counted:
                self._counted[key] = counted
            else:
                self._counted.pop(key, None)
            for node, gpu in counted ^ before:
                self._count(node, gpu)
        if changed:
            self._fleet.set_aside(self._mapped, changed)

    def _count(self, node: str, gpu: str) -> None:
        if self._uses[node, gpu] > 0:
            self._mapped.setdefault(node, set()).add(gpu)
            return
        del self._uses[node, gpu]
        gpus = self._mapped.get(node, set())
        gpus.discard(gpu)
        if not gpus:
            self._mapped.pop(node, None)


class NamespaceNews:
    """Hears of namespaces on behalf of the sets in them."""

    def __init__(self, sets: MappedSets) -> None:
        self._sets = sets

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._sets.namespaces.replaced(objects)
        self._sets.refresh()

    def changed(self, raw: Raw) -> None:
        self._sets.namespaces.changed(raw)
        self._sets.refresh()

    def deleted(self, raw: Raw) -> None:
        self._sets.namespaces.deleted(raw)
        self._sets.refresh()


def key_of(raw: Raw) -> tuple[str, str]:
    return raw["metadata"].get("namespace") or "", raw["metadata"]["name"]


def places_of(raw: Raw) -> Named:
    """What the set's map names, whatever its scale; nothing if nobody can read it: its pods are denied then."""
    meta = ((raw.get("spec") or {}).get("template") or {}).get("metadata") or {}
    annotations = meta.get("annotations") or {}
    text = next((annotations[name] for name in keys.GPU_MAP.names if annotations.get(name)), None)
    if text is None:
        return frozenset()
    try:
        entries = parse_map(text)
    except InvalidPodError:
        log.warning("map of a StatefulSet left out", namespace=key_of(raw)[0], name=key_of(raw)[1])
        return frozenset()
    return frozenset((entry.node, plain_name(gpu)) for entry in entries.values() for gpu in entry.gpus)


def plain_name(gpu: str) -> str:
    """An index in the form in which devices know theirs; a serial number has no leading zeros to lose here."""
    return str(int(gpu)) if gpu.isdecimal() and len(gpu) <= 4 else gpu


class NodeNames:
    """Tells of logical node names that several nodes have: maps that use them put nobody anywhere."""

    def __init__(self, fleet: Fleet, events: Events) -> None:
        self._fleet = fleet
        self._events = events
        self._told: set[tuple[str, str]] = set()

    async def step(self) -> None:
        shared = dict(self._fleet.shared_names(keys.LOGICAL_NODE_LABEL))
        for value, names in shared.items():
            for name in names:
                if (value, name) not in self._told:
                    others = ", ".join(sorted(set(names) - {name})[:4])
                    text = f"label {keys.LOGICAL_NODE_LABEL}={value} is on {others} too: no placement map can mean it"
                    self._events.tell(Subject.of_node(name), Reason.AMBIGUOUS_NODE, text)
        self._told = {(value, name) for value, names in shared.items() for name in names}
