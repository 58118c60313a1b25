"""The parts of the fleet's index: kinds of devices, shapes and classes of nodes, and rows of nodes by class."""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from attrs import define, field, frozen

from webhook.core.device import Node, Taint
from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.injection import Injection
from webhook.core.nodes_asked import Labels

Item = TypeVar("Item", bound=Hashable)


class DeviceKind(NamedTuple):
    """The properties by which claims select devices."""

    labels: frozenset[str]
    is_shared: bool


class DeviceStock(NamedTuple):
    """Devices of one kind on a node."""

    kind: int
    free: int
    total: int


Shape = tuple[DeviceStock, ...]


@frozen
class NodeClass:
    """The conditions of a node, its injection, and the labels by which claims have selected so far."""

    is_ready: bool
    is_cordoned: bool
    taints: tuple[Taint, ...]
    labels: tuple[tuple[str, str], ...]
    is_refused_for_plugin: bool = False
    injection: Injection | None = None
    # The kubelet chooses the GPUs of claims there, and no device plugin offers any.
    lacks_plugin: bool = False
    # The same, and a GPU is in use that the device plugin considers free.
    has_uncounted_gpus: bool = False
    # The kubelet chooses no GPUs there, and has not yet chosen those of an older reservation.
    awaits_kubelet: bool = False


class NodeGroup(NamedTuple):
    """A group of nodes: their class and their shape."""

    node_class: int
    shape: int


# A state of evidence, and the hash if it is fresh.
EvidenceGroup = tuple[EvidenceState, str | None]
NodeNames = dict[str, None]  # an ordered set

# Values of `spare_devices` for shapes that cannot serve: too few devices match, or too few of them are free.
FEWER_MATCHING = -2
FEWER_FREE = -1


class ClassNodes:
    """The nodes of one class in an evidence group: their number, and their names by shape."""

    __slots__ = ("count", "shapes")

    def __init__(self) -> None:
        self.count = 0
        self.shapes: dict[int, NodeNames] = {}

    def add(self, shape: int, name: str) -> None:
        self.shapes.setdefault(shape, {})[name] = None
        self.count += 1

    def remove(self, shape: int, name: str) -> None:
        names = self.shapes[shape]
        del names[name]
        self.count -= 1
        if not names:
            del self.shapes[shape]


@define(eq=False)
class IndexedNode:
    """One node and its position in the index."""

    node: Node
    evidence: Evidence | None
    state: EvidenceState
    evidence_groups: tuple[EvidenceGroup, ...]
    node_group: NodeGroup
    kinds: tuple[int, ...] = ()  # of its devices, in their order
    row: ClassNodes = field(factory=ClassNodes)  # of its narrowest evidence group

    @property
    def labels(self) -> Labels:
        return self.node.labels


class Numbered(Generic[Item]):
    """Consecutive numbers for values; equal values have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}
        self._items: list[Item] = []

    def number(self, item: Item) -> int:
        number = self._numbers.get(item)
        if number is None:
            number = self._numbers[item] = len(self._items)
            self._items.append(item)
        return number

    def __getitem__(self, number: int) -> Item:
        return self._items[number]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)


def spare_devices(shape: Shape, kinds: frozenset[int], count: int) -> int:
    free = total = 0
    for stock in shape:
        if stock.kind in kinds:
            free += stock.free
            total += stock.total
    return FEWER_MATCHING if total < count else FEWER_FREE if free < count else free - count


def decrement(counter: Counter[Item], item: Item) -> None:
    """Count one less. Items that count 0 are deleted."""
    counter[item] -= 1
    if not counter[item]:
        del counter[item]
