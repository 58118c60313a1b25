"""The parts of the fleet's index: kinds of devices, shapes and classes of nodes, and the rows that they stand in."""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from attrs import define, field, frozen

from webhook.core.device import Node, Taint
from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.nodes_asked import Labels

Thing = TypeVar("Thing", bound=Hashable)


class DeviceKind(NamedTuple):
    """All that a claim can ask of a device."""

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
    """All that the claims so far can ask of a node's conditions and labels."""

    is_ready: bool
    is_cordoned: bool
    taints: tuple[Taint, ...]
    labels: tuple[tuple[str, str], ...]


class NodeGroup(NamedTuple):
    """Which class and shape the nodes of a cell have."""

    node_class: int
    shape: int


# A state of evidence; and for fresh evidence, its hash too.
EvidenceGroup = tuple[EvidenceState, str | None]
NodeNames = dict[str, None]  # in the order of their coming

# What `room` says of a shape that cannot serve: too few devices that match, or too few of them free.
FEWER_MATCHING = -2
FEWER_FREE = -1


class ClassNodes:
    """The nodes of a group that share a class: how many, and which ones of each shape."""

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
    """One node and its place in the index."""

    node: Node
    evidence: Evidence | None
    state: EvidenceState
    evidence_groups: tuple[EvidenceGroup, ...]
    node_group: NodeGroup
    kinds: tuple[int, ...] = ()  # of its devices, in their order
    row: ClassNodes = field(factory=ClassNodes)  # of the narrowest of its groups

    @property
    def labels(self) -> Labels:
        return self.node.labels


class Numbered(Generic[Thing]):
    """Small numbers for large values, the same number for equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[Thing, int] = {}
        self._things: list[Thing] = []

    def number(self, thing: Thing) -> int:
        number = self._numbers.get(thing)
        if number is None:
            number = self._numbers[thing] = len(self._things)
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> Thing:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[Thing]:
        return iter(self._things)


def room_on(shape: Shape, kinds: frozenset[int], count: int) -> int:
    free = total = 0
    for stock in shape:
        if stock.kind in kinds:
            free += stock.free
            total += stock.total
    return FEWER_MATCHING if total < count else FEWER_FREE if free < count else free - count


def lessen(counter: Counter[Thing], thing: Thing) -> None:
    """One less; what counts none is not kept."""
    counter[thing] -= 1
    if not counter[thing]:
        del counter[thing]
