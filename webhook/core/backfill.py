"""Backfill: one node is held for a claim that waits for devices to become free. Later claims use the other nodes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attrs import frozen

from webhook.core.claim import Claim
from webhook.core.decide import MAX_NODE_CHECKS, MAX_PLACEMENTS, ClaimSearch, EvidencePolicy, Objection, decide
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import FEWER_MATCHING, IndexedNode
from webhook.core.queue_order import ClaimKind, QueueOrder, earlier_pod_waits
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny


@frozen
class HeldNode:
    """A node that is held for a waiting claim."""

    claim: Claim
    node: str


def queued_ahead(claim: Claim, order: QueueOrder, fleet: Fleet, policy: EvidencePolicy) -> Deny | None:
    """Denies the claim if a queued claim of its kind can be served first. Queued claims that cannot be served and those
    without devices do not count. `fleet` has been advanced to now.

    One search answers for all queued claims of the kind: they differ in their number of GPUs only.
    """
    counts = order.counts(ClaimKind.of(claim)) if len(order) and claim.count else []
    counts = [count for count in counts if count]
    if not counts:
        return None
    most = ClaimSearch(claim, fleet, policy).most_devices()
    first = next((count for count in counts if count <= most), None)
    return None if first is None else earlier_pod_waits(claim, first)


def place_around(
    claim: Claim, fleet: Fleet, policy: EvidencePolicy, held: HeldNode | None
) -> tuple[Placement, ...] | Deny:
    """The decision for a later claim: it gets nothing on the held node."""
    if held is None or not claim.count:
        return decide(claim, fleet, policy)
    others = (one for one in ClaimSearch(claim, fleet, policy).placements() if one.node != held.node)
    found = tuple(islice(others, MAX_PLACEMENTS))
    if found:
        return found
    anywhere = decide(claim, fleet, policy, most=1)
    return anywhere if isinstance(anywhere, Deny) else earlier_pod_waits(claim, held.claim.count)


def choose_held_node(claim: Claim, fleet: Fleet, policy: EvidencePolicy, before: str | None) -> str | None:
    """The node that can probably serve the claim first: of the nodes with enough devices, held or free, the one with
    the most free, then the first by name.

    `before`, the earlier choice, stays unless another node has more free devices now. No other claim of the kind is
    served on the held node, so its free devices only grow: the choice changes at most as often as the claim wants
    devices.
    """
    candidates = Candidates(claim, fleet, policy)
    least = candidates.free_on(before) if before is not None else None
    return candidates.best(-1) if least is None else candidates.best(least) or before


class Candidates:
    """The nodes that would serve a claim if no device were held."""

    def __init__(self, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> None:
        self._fleet = fleet
        self._search = ClaimSearch(claim, fleet, policy)
        self._free = fleet.spare_by_shape(self._search.kinds, 0)  # by shape
        self._checks_left = MAX_NODE_CHECKS // max(1, claim.nodes.expressions)

    def free_on(self, name: str) -> int | None:
        """The number of free devices on the node; None if it is not a candidate."""
        indexed = self._fleet.indexed_nodes.get(name)
        if indexed is None or self._search.objection(indexed) not in (None, Objection.FEWER_FREE):
            return None
        return self._free[indexed.node_group.shape] if self._is_enough(indexed) else None

    def best(self, least: int) -> str | None:
        """The candidate with the most free devices, if it has more than `least`."""
        by_free = self._by_free(least)
        for free in sorted(by_free, reverse=True):
            names = by_free[free][: max(0, self._checks_left)]
            self._checks_left -= len(names)
            found = next(filter(self._is_candidate, sorted(names)), None)
            if found is not None:
                return found
        return None

    def _by_free(self, least: int) -> Mapping[int, list[str]]:
        """Nodes whose class has no objection, by their number of free devices."""
        found: dict[int, list[str]] = {}
        for free, names in self._all():
            if free > least:
                found.setdefault(free, []).extend(names)
        return found

    def _all(self) -> Iterator[tuple[int, Iterable[str]]]:
        names = self._search.allowed_names()
        if names is None:
            return self._from_index()
        return ((free, [name]) for name in names if (free := self.free_on(name)) is not None)

    def _from_index(self) -> Iterator[tuple[int, Iterable[str]]]:
        for group in self._search.groups():
            for node_class, row in self._fleet.rows(group).items():
                if self._search.class_objection(node_class) is None:
                    for shape, names in row.shapes.items():
                        if self._search.spare[shape] != FEWER_MATCHING:
                            yield self._free[shape], names

    def _is_candidate(self, name: str) -> bool:
        indexed = self._fleet.indexed_nodes[name]
        return self._search.is_selected(indexed) and self._is_enough(indexed)

    def _is_enough(self, indexed: IndexedNode) -> bool:
        """Whether the node has enough devices that are healthy and not set aside for a map."""
        devices = zip(indexed.node.devices, indexed.kinds, strict=True)
        usable = sum(kind in self._search.kinds and self._fleet.may_be_offered(device) for device, kind in devices)
        return usable >= self._search.claim.count
