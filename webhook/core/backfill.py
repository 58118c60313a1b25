"""Backfill: while a claim waits for devices to become free, one node is left to it, and later ones have the others."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from attrs import frozen

from webhook.core.claim import Claim
from webhook.core.decide import MAX_NODE_CHECKS, MAX_PLACEMENTS, ClaimSearch, EvidencePolicy, Objection, decide
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import FEWER_MATCHING, IndexedNode
from webhook.core.queue_order import earlier_pod_waits
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny


@frozen
class HeldNode:
    """A claim that waits for devices to become free, and the node that is left to it."""

    claim: Claim
    node: str


def place_around(
    claim: Claim, fleet: Fleet, policy: EvidencePolicy, ahead: HeldNode | None
) -> tuple[Placement, ...] | Deny:
    """The decision for a claim that came later than `ahead`: nothing is taken from the node that is left to that."""
    if ahead is None or not claim.count:
        return decide(claim, fleet, policy)
    others = (place for place in ClaimSearch(claim, fleet, policy).placements() if place.node != ahead.node)
    found = tuple(islice(others, MAX_PLACEMENTS))
    if found:
        return found
    anywhere = decide(claim, fleet, policy, most=1)
    return anywhere if isinstance(anywhere, Deny) else earlier_pod_waits(claim, ahead.claim.count)


def choose_held_node(claim: Claim, fleet: Fleet, policy: EvidencePolicy, before: str | None) -> str | None:
    """Where the claim will be served the soonest, as far as can be seen: of the nodes that have enough devices, held or
    not, the one with the most free, the first by name.

    `before` stays unless another one has more free than it has now. What is free there grows, since nobody of the kind
    is served there; so the choice changes at most as often as the claim wants devices.
    """
    candidates = Candidates(claim, fleet, policy)
    least = candidates.free_on(before) if before is not None else None
    return candidates.best(-1) if least is None else candidates.best(least) or before


class Candidates:
    """The nodes that would serve a claim if nobody held anything."""

    def __init__(self, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> None:
        self._fleet = fleet
        self._question = ClaimSearch(claim, fleet, policy)
        self._free = fleet.spare_by_shape(self._question.kinds, 0)  # by shape
        self._patience = MAX_NODE_CHECKS // max(1, claim.nodes.expressions)

    def free_on(self, name: str) -> int | None:
        """How many devices are free there; None if it is no candidate."""
        indexed = self._fleet.indexed_nodes.get(name)
        if indexed is None or self._question.objection(indexed) not in (None, Objection.FEWER_FREE):
            return None
        return self._free[indexed.node_group.shape] if self._is_enough(indexed) else None

    def best(self, least: int) -> str | None:
        """The one with the most free, if that is more than `least`."""
        by_free = self._by_free(least)
        for free in sorted(by_free, reverse=True):
            names = by_free[free][: max(0, self._patience)]
            self._patience -= len(names)
            found = next(filter(self._may_be, sorted(names)), None)
            if found is not None:
                return found
        return None

    def _by_free(self, least: int) -> Mapping[int, list[str]]:
        """Nodes against which nothing speaks that is known of all their kind, by how many devices are free there."""
        found: dict[int, list[str]] = {}
        for free, names in self._all():
            if free > least:
                found.setdefault(free, []).extend(names)
        return found

    def _all(self) -> Iterator[tuple[int, Iterable[str]]]:
        names = self._question.named()
        if names is None:
            return self._in_cells()
        return ((free, [name]) for name in names if (free := self.free_on(name)) is not None)

    def _in_cells(self) -> Iterator[tuple[int, Iterable[str]]]:
        for group in self._question.groups():
            for node_class, row in self._fleet.rows(group).items():
                if self._question.class_objection(node_class) is None:
                    for shape, names in row.shapes.items():
                        if self._question.spare[shape] != FEWER_MATCHING:
                            yield self._free[shape], names

    def _may_be(self, name: str) -> bool:
        indexed = self._fleet.indexed_nodes[name]
        return self._question.is_selected(indexed) and self._is_enough(indexed)

    def _is_enough(self, indexed: IndexedNode) -> bool:
        """Of devices that somebody could have some day: sound ones, set aside for nobody."""
        known = zip(indexed.node.devices, indexed.kinds, strict=True)
        able = sum(kind in self._question.kinds and self._fleet.may_be_offered(device) for device, kind in known)
        return able >= self._question.claim.count
