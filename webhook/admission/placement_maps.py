"""Reserves the GPUs that placement maps of StatefulSets name, and reports conflicts of logical node names."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import structlog
from attrs import frozen

from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId, parse_map
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.kube.events import Events, Subject
from webhook.kube.view import ObjectView

log = structlog.get_logger(__name__)

# The most nodes that one Event names.
MOST_NAMED = 4

# A node and a GPU, as a map names them.
MapPlace = tuple[str, str]
MapPlaces = frozenset[MapPlace]
OwnedPlaces = frozenset[tuple[MapPlace, MapOwner]]
Key = tuple[str, str]
"""Namespace and name of a StatefulSet."""


def opted_in(raw: Mapping[str, Any], opt_in: str) -> bool:
    """Whether the namespace has opted in, by this label or an alias."""
    labels = raw["metadata"].get("labels") or {}
    return any(labels.get(key) == "true" for key in (opt_in, *keys.OPT_IN.aliases))


def may_reserve_by_map(raw: Mapping[str, Any], opt_in: str) -> bool:
    """Whether maps of the namespace reserve GPUs. Its administrators decide by a label: otherwise anyone who may create
    StatefulSets there could block GPUs for all."""
    labels = raw["metadata"].get("labels") or {}
    return opted_in(raw, opt_in) and labels.get(keys.MAPS_LABEL) == "true"


@frozen
class MappedStatefulSet:
    """What is needed of a StatefulSet."""

    owner: MapOwner
    text: str | None
    ordinals: range

    @classmethod
    def of(cls, raw: Raw) -> "MappedStatefulSet":
        meta = raw["metadata"]
        one = SetId(meta.get("uid") or "", meta.get("namespace") or "")
        return cls(MapOwner(meta.get("creationTimestamp") or "", one), map_of(raw), ordinals_of(raw))


class MappedStatefulSets:
    """Listener of the watches of StatefulSets and namespaces. A StatefulSet reserves the GPUs of its ordinals, whether
    their pods exist or not, if its namespace allows it."""

    def __init__(self, fleet: Fleet, opt_in: str = keys.OPT_IN.name) -> None:
        self.namespaces: ObjectView[bool] = ObjectView(partial(may_reserve_by_map, opt_in=opt_in))
        self._fleet = fleet
        self._sets: dict[Key, MappedStatefulSet] = {}
        self._places: dict[Key, MapPlaces] = {}
        self._reserved: dict[Key, OwnedPlaces] = {}
        self._owners: dict[MapPlace, set[MapOwner]] = {}
        self._mapped: dict[str, dict[str, MapOwner]] = {}

    # The listener of the watch of StatefulSets.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._forget(self._sets.keys() - {key_of(raw) for raw in objects.values()})
        self._read(objects.values())

    def changed(self, raw: Raw) -> None:
        self._read([raw])

    def deleted(self, raw: Raw) -> None:
        self._forget([key_of(raw)])

    def refresh(self) -> None:
        """Applies changed labels of namespaces."""
        news = set(self.namespaces.take_changes())
        self._apply([key for key in self._places if key[0] in news])

    def _read(self, raws: Iterable[Raw]) -> None:
        """A StatefulSet changes with each of its pods, but what is needed of it hardly ever does."""
        news: list[Key] = []
        for raw in raws:
            key, one = key_of(raw), MappedStatefulSet.of(raw)
            if self._sets.get(key) == one:
                continue
            self._sets[key] = one
            places = places_of(key, one.text, one.ordinals)
            if places:
                self._places[key] = places
            else:
                self._places.pop(key, None)
            news.append(key)
        self._apply(news)

    def _forget(self, gone: Iterable[Key]) -> None:
        gone = list(gone)
        for key in gone:
            self._sets.pop(key, None)
            self._places.pop(key, None)
        self._apply(gone)

    def _apply(self, news: Iterable[Key]) -> None:
        changed: set[str] = set()
        for key in news:
            before, after = self._reserved.pop(key, frozenset()), self._owned_places(key)
            if after:
                self._reserved[key] = after
            for place, owner in before - after:
                self._owners[place].discard(owner)
            for place, owner in after - before:
                self._owners.setdefault(place, set()).add(owner)
            for place in {place for place, _ in before ^ after}:
                self._update_owner(place)
                changed.add(place[0])
        if changed:
            self._fleet.set_aside(self._mapped, changed)

    def _owned_places(self, key: Key) -> OwnedPlaces:
        if key not in self._places or not self.namespaces.get(key[0]):
            return frozenset()
        owner = self._sets[key].owner
        return frozenset((place, owner) for place in self._places[key])

    def _update_owner(self, place: MapPlace) -> None:
        """Updates which StatefulSet owns the GPU."""
        node, gpu = place
        if self._owners[place]:
            self._mapped.setdefault(node, {})[gpu] = min(self._owners[place])
            return
        del self._owners[place]
        del self._mapped[node][gpu]
        if not self._mapped[node]:
            del self._mapped[node]


class MapNamespaceListener:
    """Listener of the watch of namespaces, for the StatefulSets in them."""

    def __init__(self, sets: MappedStatefulSets) -> None:
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


def key_of(raw: Raw) -> Key:
    return raw["metadata"].get("namespace") or "", raw["metadata"]["name"]


def map_of(raw: Raw) -> str | None:
    """The map in the set's pod template."""
    meta = ((raw.get("spec") or {}).get("template") or {}).get("metadata") or {}
    annotations = meta.get("annotations") or {}
    return next((annotations[name] for name in keys.GPU_MAP.names if annotations.get(name)), None)


def ordinals_of(raw: Raw) -> range:
    """The ordinals that the set has pods for, or will have."""
    spec = raw.get("spec") or {}
    start = whole((spec.get("ordinals") or {}).get("start"), 0)
    return range(start, start + whole(spec.get("replicas"), 1))


def whole(value: object, absent: int) -> int:
    """The number; `absent` if it is missing, as the API server defaults it, and 0 if it is invalid."""
    if value is None:
        return absent
    return max(0, value) if isinstance(value, int) else 0


def places_of(key: Key, text: str | None, ordinals: range) -> MapPlaces:
    """The GPUs that the map names for these ordinals; none if the map cannot be read, in which case its pods are
    denied."""
    if text is None or not ordinals:
        return frozenset()
    try:
        entries = parse_map(text)
    except InvalidPodError:
        log.warning("placement map of a StatefulSet ignored", namespace=key[0], name=key[1])
        return frozenset()
    kept = (entry for ordinal, entry in entries.items() if ordinal in ordinals)
    return frozenset((entry.node, plain_name(gpu)) for entry in kept for gpu in entry.gpus)


def plain_name(gpu: str) -> str:
    """An index without leading zeros, as devices have it. Serial numbers are longer and stay as they are."""
    return str(int(gpu)) if gpu.isdecimal() and len(gpu) <= 4 else gpu


class NodeNameConflicts:
    """Reports conflicts of logical node names to the nodes concerned: several nodes have the same label, or the label
    is the name of another node."""

    def __init__(self, fleet: Fleet, events: Events) -> None:
        self._fleet = fleet
        self._events = events
        self._reported: set[tuple[str, str]] = set()

    async def step(self) -> None:
        conflicts = dict(self._fleet.disputed_names())
        for value, names in conflicts.items():
            for name in names:
                if (value, name) not in self._reported:
                    text = conflict(value, name, names, is_real=value in self._fleet.indexed_nodes)
                    self._events.record(Subject.of_node(name), Reason.AMBIGUOUS_NODE, text)
        self._reported = {(value, name) for value, names in conflicts.items() for name in names}


def conflict(value: str, name: str, names: Iterable[str], *, is_real: bool) -> str:
    """The text of the Event on node `name`."""
    label = f"label {keys.LOGICAL_NODE_LABEL}={value}"
    others = ", ".join(sorted(set(names) - {name})[:MOST_NAMED])
    if not is_real:
        return f"{label} is on {others} too: no placement map can refer to it"
    if name == value:
        return f"{label} of {others} is this node's own name and is ignored there"
    return f"{label} is the name of another node and is ignored here: placement maps refer to node {value}"
