"""The decision: which nodes and devices can serve a claim, best first, or why none can."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice

from attrs import evolve, frozen

from webhook.core.claim import Claim
from webhook.core.device import Device, Slot
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import FEWER_FREE, FEWER_MATCHING, ClassNodes, EvidenceGroup, IndexedNode
from webhook.core.gpu_map import MapEntry
from webhook.core.keys import GPU_MAP, LOGICAL_NODE_LABEL
from webhook.core.nodes_asked import NAME_FIELD, NodeTerm
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny

# How many placements a ledger may try before the decision is made afresh.
MAX_PLACEMENTS = 8
# A claim without GPUs may run on any proven node; its affinity names at most so many, times the terms it had.
MAX_PROVEN_NODES = 64


class Objection(StrEnum):
    """Why a node cannot serve a claim, in the order in which it is asked."""

    NOT_SELECTED = "not selected by the pod"
    STALE = "stale evidence"
    ABSENT = "no evidence"
    BANNED = "banned"
    CONFLICT = "conflicting evidence"
    OTHER_HASH = "other hash"
    NOT_READY = "not ready"
    CORDONED = "cordoned"
    TAINTED = "tainted"
    SEVERAL_CALLED = "where a name in the map means several GPUs"
    NAMED_TWICE = "where the map names a GPU twice"
    FEWER_MATCHING = "with fewer than {count} matching GPUs"
    FEWER_FREE = "with fewer than {count} free"

    def said_of(self, claim: Claim) -> str:
        return self.format(count=claim.count)


EVIDENCE_OBJECTIONS = {
    EvidenceState.STALE: Objection.STALE,
    EvidenceState.ABSENT: Objection.ABSENT,
    EvidenceState.BANNED: Objection.BANNED,
    EvidenceState.CONFLICT: Objection.CONFLICT,
}

ROOM_OBJECTIONS = {FEWER_MATCHING: Objection.FEWER_MATCHING, FEWER_FREE: Objection.FEWER_FREE}

# What ends by itself, or by somebody's hand on the node.
CONDITIONS = frozenset({Objection.NOT_READY, Objection.CORDONED, Objection.TAINTED})

# GPUs that one denial names.
MOST_NAMED = 8

# What the most of no node is: less than no device at all.
NO_NODE = -1

# Nodes times expressions that one decision may ask, where the index cannot answer; it takes some 20 ms.
MAX_NODE_CHECKS = 20_000

# The last hurdle that any node reached is the one to tell of.
REASONS: tuple[tuple[Reason, frozenset[Objection]], ...] = (
    (Reason.NO_FREE_DEVICE, frozenset({Objection.FEWER_FREE})),
    (
        Reason.NO_MATCHING_DEVICE,
        frozenset({Objection.SEVERAL_CALLED, Objection.NAMED_TWICE, Objection.FEWER_MATCHING}),
    ),
    (Reason.NODE_NOT_READY, CONDITIONS),
    (Reason.NO_PROVEN_NODE, frozenset({*EVIDENCE_OBJECTIONS.values(), Objection.OTHER_HASH})),
    (Reason.NO_SUITABLE_NODE, frozenset({Objection.NOT_SELECTED})),
)

HINTS = {
    Reason.NO_FREE_DEVICE: "wait until one is free, or ask for fewer",
    Reason.NO_MATCHING_DEVICE: "ask for what a node has",
    Reason.NODE_NOT_READY: "wait for the nodes, or tolerate their taints",
    Reason.NO_PROVEN_NODE: "ask for a hash that a node has proven, or have the node attested",
    Reason.NO_SUITABLE_NODE: "loosen the pod's nodeName, nodeSelector or node affinity",
}
MAP_HINTS = {
    Objection.SEVERAL_CALLED: "name GPUs by UUID",
    Objection.NAMED_TWICE: "give each GPU one name in the line",
}
# Of a claim that names no hash, and needs a proven node because all do.
HINT_FOR_ALL = "have the nodes attested; or, with --require-evidence asked, only pods with a hash need proven nodes"


@frozen
class EvidencePolicy:
    """Whether a pod that names no hash still needs a node with fresh evidence."""

    is_always_required: bool = False


@frozen
class NodeFit:
    """One node's answer to a claim."""

    name: str
    slots: tuple[Slot, ...]
    objection: Objection | None

    @property
    def fits(self) -> bool:
        return self.objection is None


def decide(
    claim: Claim, fleet: Fleet, policy: EvidencePolicy, *, most: int = MAX_PLACEMENTS
) -> tuple[Placement, ...] | Deny:
    """Placements for the claim, best first, or a denial. `fleet` has been advanced to now."""
    found = preferred(claim, fleet, policy, most)
    if found:
        return found
    question = ClaimSearch(claim, fleet, policy)
    answer = question.best(most) or unmapped(claim) or ambiguous(question) or nowhere(question)
    return answer or kept(question.denial(), question)


def preferred(claim: Claim, fleet: Fleet, policy: EvidencePolicy, most: int) -> tuple[Placement, ...]:
    """Where a hint would have it, if anything fits there."""
    if claim.preferred is None:
        return ()
    return ClaimSearch(evolve(claim, nodes=claim.preferred, preferred=None), fleet, policy).best(most)


def unmapped(claim: Claim) -> Deny | None:
    """A map that has no line for the pod puts it nowhere."""
    ordinal = claim.record.unmapped
    if ordinal is None:
        return None
    return Deny(
        Reason.NOT_IN_MAP,
        f"{GPU_MAP.name}: the map has no line for ordinal {ordinal}",
        hint="give the map a line for it in the StatefulSet's template, or scale the set down",
    )


def ambiguous(question: "ClaimSearch") -> Deny | None:
    """Which of two nodes a map means nobody can tell."""
    place = question.claim.map_entry
    if place is None:
        return None
    named = question.fleet.nodes_for_map_name(place.node)
    if len(named) < 2:
        return None
    nodes = len(question.fleet.indexed_nodes)
    return Deny(
        Reason.AMBIGUOUS_NODE,
        f"{question.claim.sentence}: found on none of {nodes} nodes: {len(named)} of them have the label "
        f"{LOGICAL_NODE_LABEL}={place.node}",
        hint="leave that label on one of them",
        causes=question.denial().causes,
    )


def nowhere(question: "ClaimSearch") -> Deny | None:
    """The map means a node that there is not."""
    place = question.claim.map_entry
    if place is None or any(name in question.fleet.indexed_nodes for name in question.named() or ()):
        return None
    return Deny(
        Reason.NO_SUITABLE_NODE,
        f"{question.claim.sentence}: found on none of {len(question.fleet.indexed_nodes)} nodes: none has the label "
        f"{LOGICAL_NODE_LABEL}={place.node} or that name",
        hint="correct the map, or label the node",
        causes=question.denial().causes,
    )


def kept(denial: Deny, question: "ClaimSearch") -> Deny:
    """The denial, with what is to be done where it is not for others to end: the map of another set names the GPUs."""
    others = [device.uuid for device in question.others()] if denial.reason is Reason.NO_FREE_DEVICE else []
    if not others:
        return denial
    return evolve(
        denial,
        message=f"{denial.message}; kept for the map of an older StatefulSet: {', '.join(sorted(others)[:MOST_NAMED])}",
        hint="name other GPUs, or scale down or delete the older set",
    )


def explain(claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> tuple[NodeFit, ...]:
    """Every node's own answer; for a person, not for a review."""
    question = ClaimSearch(claim, fleet, policy)
    return tuple(question.fit(indexed) for _, indexed in sorted(fleet.indexed_nodes.items()))


class ClaimSearch:
    """One claim put to the fleet. Answers for cells are worked out once each."""

    def __init__(self, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> None:
        self.claim = claim
        self.fleet = fleet
        self.needs_evidence = bool(claim.hashes) or policy.is_always_required
        self.directory_keys = fleet.index_labels(claim.nodes)  # may number kinds anew, so it comes first
        self.kinds = fleet.kinds_serving(claim.requirements, is_shared=claim.is_shared)
        self._class_objections: dict[int, Objection | None] = {}
        self._out = 0  # nodes that have what is asked, and that nobody can run on now
        self.spare = fleet.spare_by_shape(self.kinds, claim.count)
        self.most_spare = max(self.spare, default=FEWER_MATCHING)

    # Placements.

    def best(self, most: int) -> tuple[Placement, ...]:
        return tuple(islice(self.placements(), most if self.claim.count else None))

    def placements(self) -> Iterator[Placement]:
        names = self.named()
        found = self._ranked() if names is None else self._among(names)
        return found if self.claim.count else islice(found, self._most_proven())

    def _patience(self) -> int:
        """How many nodes may be asked one by one, where classes cannot tell."""
        return (
            MAX_NODE_CHECKS // max(1, self.claim.nodes.expressions)
            if self.checks_each_node
            else len(self.fleet.indexed_nodes)
        )

    def _among(self, names: Iterable[str]) -> Iterator[Placement]:
        fits = (self.fit(self.fleet.indexed_nodes[name]) for name in names if name in self.fleet.indexed_nodes)
        return (Placement(fit.name, fit.slots) for fit in fits if fit.fits)

    def most(self) -> int:
        """The most devices of these kinds that any node has, free or not, against which nothing else speaks; less than
        none if there is no such node."""
        names = self.named()
        if names is not None:
            indexed_nodes = [self.fleet.indexed_nodes[name] for name in names if name in self.fleet.indexed_nodes]
            return max((self._total(one) for one in indexed_nodes if self.node_objection(one) is None), default=NO_NODE)
        if not self.checks_each_node:
            return max((total for total, _ in self._totals()), default=NO_NODE)
        each = islice(((total, name) for total, nodes in self._totals() for name in nodes), self._patience())
        return max((total for total, name in each if self.is_selected(self.fleet.indexed_nodes[name])), default=NO_NODE)

    def _totals(self) -> Iterator[tuple[int, Mapping[str, None]]]:
        """Nodes against which nothing else speaks, and how many of the devices each of them has."""
        for group in self.groups():
            for node_class, row in self.fleet.rows(group).items():
                if self.class_objection(node_class) is None:
                    for names in row.shapes.values():
                        yield self._total(self.fleet.indexed_nodes[next(iter(names))]), names

    def _total(self, indexed: IndexedNode) -> int:
        place = self.claim.map_entry
        if place is None:
            return sum(kind in self.kinds for kind in indexed.kinds)
        return sum(map(self.can_serve, called(indexed, place)))

    def _most_proven(self) -> int:
        return max(1, MAX_PROVEN_NODES // len(self.claim.nodes.terms or "1"))

    def _ranked(self) -> Iterator[Placement]:
        """From the cells, tightest fit first, so that large gaps stay for large claims."""
        fitting: list[tuple[int, Mapping[str, None]]] = []
        room = self.spare
        if self.most_spare < 0:
            return
        for group in self.groups():
            for node_class, row in self.fleet.rows(group).items():
                if self.class_objection(node_class) is None:
                    fitting += [(room[shape], names) for shape, names in row.shapes.items() if room[shape] >= 0]
        patience = self._patience()
        while fitting:
            tightest = min(fitting, key=tightness)
            fitting.remove(tightest)
            for name in self.fleet.rotated(tightest[1]):
                patience -= 1
                if patience < 0:
                    return
                indexed = self.fleet.indexed_nodes[name]
                if self.is_selected(indexed):
                    yield Placement(name, self.slots(indexed))

    def groups(self) -> Iterable[EvidenceGroup]:
        """Where the nodes with good enough evidence are."""
        if self.claim.hashes:
            return [(EvidenceState.FRESH, one) for one in sorted(self.claim.hashes)]
        if self.needs_evidence:
            return [(EvidenceState.FRESH, None)]
        return [(state, None) for state in EvidenceState]

    def named(self) -> list[str] | None:
        """The only nodes that can be meant, if the claim says so."""
        if self.claim.map_entry is not None:
            found = self.fleet.nodes_for_map_name(self.claim.map_entry.node)
            return found if len(found) == 1 else []
        if self.claim.is_mapped:
            return []
        names = self.claim.nodes.names()
        if names is not None:
            return sorted(names)
        for key in self.directory_keys:
            values = self.claim.nodes.values_of(key)
            if values is not None:
                return self.fleet.names_with(key, values)
        return None

    def slots(self, indexed: IndexedNode) -> tuple[Slot, ...]:
        """The devices of a node that fits: plain ones before special ones, begun shares before whole ones."""
        if self.claim.map_entry is not None:
            return self._mapped_slots(indexed, self.claim.map_entry.gpus)
        known = zip(indexed.node.devices, indexed.kinds, strict=True)
        able = [device for device, kind in known if kind in self.kinds and self.fleet.is_offered(device)]
        able = list(self.fleet.rotated(able))
        able.sort(key=lambda d: (-len(self.fleet.holders(d.uuid)), len(d.labels)))
        return tuple(self.free_slot(device) for device in able[: self.claim.count])

    def _mapped_slots(self, indexed: IndexedNode, gpus: tuple[str, ...]) -> tuple[Slot, ...]:
        devices = [[d for d in indexed.node.devices if d.has_name(gpu)] for gpu in gpus]
        able = dict.fromkeys(d for (d,) in (found for found in devices if len(found) == 1) if self.can_serve(d))
        return tuple(self.free_slot(device) for device in able if self._can_have(device))

    def _can_have(self, device: Device) -> bool:
        """Of two sets whose maps name it, the older one; unless it is there to be shared."""
        claim, fleet = self.claim, self.fleet
        return fleet.is_available(device) and (
            claim.is_shared or not fleet.is_set_aside_for_other(device, claim.of_set)
        )

    def others(self) -> list[Device]:
        """Those that the claim's map names, and that are for another set."""
        place, fleet = self.claim.map_entry, self.fleet
        if place is None or self.claim.is_shared:
            return []
        indexed_nodes = (fleet.indexed_nodes[name] for name in self.named() or () if name in fleet.indexed_nodes)
        meant = (device for indexed in indexed_nodes for device in called(indexed, place))
        return [device for device in meant if fleet.is_set_aside_for_other(device, self.claim.of_set)]

    def can_serve(self, device: Device) -> bool:
        return self.fleet.kind_of(device) in self.kinds

    def free_slot(self, device: Device) -> Slot:
        held = self.fleet.holders(device.uuid)
        return Slot(device.uuid, next(k for k in range(device.shares) if k not in held))

    # Objections.

    def fit(self, indexed: IndexedNode) -> NodeFit:
        """One node's answer, with its devices if it fits."""
        objection = self._objection(indexed)
        if objection is not None:
            return NodeFit(indexed.node.name, (), objection)
        slots = self.slots(indexed)
        if self.claim.map_entry is not None:
            objection = self._map_objection(indexed, self.claim.map_entry, len(slots))
        return NodeFit(indexed.node.name, () if objection else slots, objection)

    def objection(self, indexed: IndexedNode) -> Objection | None:
        """What speaks against one node."""
        return self.node_objection(indexed) or self.devices_objection(indexed)

    def devices_objection(self, indexed: IndexedNode) -> Objection | None:
        """What speaks against its devices; none are chosen where the index can tell."""
        place = self.claim.map_entry
        if place is None:
            return self.shape_objection(indexed.node_group.shape)
        return self._map_objection(indexed, place, len(self.slots(indexed)))

    def _objection(self, indexed: IndexedNode) -> Objection | None:
        return self.node_objection(indexed) or (
            None if self.claim.map_entry else self.shape_objection(indexed.node_group.shape)
        )

    def node_objection(self, indexed: IndexedNode) -> Objection | None:
        """What speaks against the node, whatever devices it has."""
        if not self.claim.nodes.matches(indexed.node.name, indexed.labels):
            return Objection.NOT_SELECTED
        if self.claim.is_mapped and indexed.node.name not in (self.named() or ()):
            return Objection.NOT_SELECTED
        return self.evidence_objection(indexed) or self._condition_objection(indexed.node_group.node_class)

    def _map_objection(self, indexed: IndexedNode, place: MapEntry, found: int) -> Objection | None:
        if found == self.claim.count:
            return None
        meant = [[device for device in indexed.node.devices if device.has_name(gpu)] for gpu in place.gpus]
        if any(len(devices) > 1 for devices in meant):
            return Objection.SEVERAL_CALLED
        if len({device.uuid for devices in meant for device in devices}) < sum(map(len, meant)):
            return Objection.NAMED_TWICE
        serving = sum(map(self.can_serve, called(indexed, place)))
        return Objection.FEWER_FREE if serving == self.claim.count else Objection.FEWER_MATCHING

    def evidence_objection(self, indexed: IndexedNode) -> Objection | None:
        if not self.needs_evidence:
            return None
        if indexed.state is not EvidenceState.FRESH or indexed.evidence is None:
            return EVIDENCE_OBJECTIONS.get(indexed.state, Objection.ABSENT)
        if self.claim.hashes and indexed.evidence.hash not in self.claim.hashes:
            return Objection.OTHER_HASH
        return None

    def class_objection(self, number: int) -> Objection | None:
        """What speaks against every node of a class; labels outside the index are asked of each node."""
        if number not in self._class_objections:
            self._class_objections[number] = (
                None if self._class_is_selected(number) else Objection.NOT_SELECTED
            ) or self._condition_objection(number)
        return self._class_objections[number]

    def _class_is_selected(self, number: int) -> bool:
        if self.takes_any_node or self.checks_each_node:
            return True
        return self.claim.nodes.matches("", self.fleet.class_labels(number))

    @property
    def takes_any_node(self) -> bool:
        return not self.claim.nodes.selector and self.claim.nodes.terms is None

    @property
    def checks_each_node(self) -> bool:
        """Whether classes cannot tell: the claim asks about names, or about labels that are as good as names."""
        return bool(self.directory_keys) or any(term.fields for term in self.claim.nodes.terms or ())

    def is_selected(self, indexed: IndexedNode) -> bool:
        return not self.checks_each_node or self.claim.nodes.matches(indexed.node.name, indexed.labels)

    def _condition_objection(self, number: int) -> Objection | None:
        node_class = self.fleet.node_class(number)
        if not node_class.is_ready:
            return Objection.NOT_READY
        if node_class.is_cordoned:
            return Objection.CORDONED
        if node_class.taints and not all(map(self.claim.nodes.tolerates, node_class.taints)):
            return Objection.TAINTED
        return None

    def shape_objection(self, number: int) -> Objection | None:
        return ROOM_OBJECTIONS.get(self.spare[number])

    # Denial.

    def denial(self) -> Deny:
        """Why nothing fits, in numbers of nodes."""
        counts = self._count_objections()
        reason = next((r for r, group in REASONS if any(counts[o] for o in group)), self._nothing_there())
        if reason is Reason.NO_MATCHING_DEVICE and self._out:
            reason = Reason.NODE_NOT_READY
        nodes = sum(counts.values())
        found = [f"{counts[objection]} {objection.said_of(self.claim)}" for objection in Objection if counts[objection]]
        numbers = f"{nodes} node{'' if nodes == 1 else 's'}" + (f": {', '.join(found)}" if found else "")
        return Deny(
            reason,
            f"{self.claim.sentence}: found on none of {numbers}",
            hint=self._hint(reason, counts),
            causes=tuple(found),
        )

    def _hint(self, reason: Reason, counts: Counter[Objection]) -> str:
        if reason is Reason.NO_PROVEN_NODE and not self.claim.hashes:
            return HINT_FOR_ALL
        return next((hint for objection, hint in MAP_HINTS.items() if counts[objection]), HINTS[reason])

    def _nothing_there(self) -> Reason:
        """The reason where there is no node at all."""
        return Reason.NO_PROVEN_NODE if self.claim.hashes else Reason.NO_MATCHING_DEVICE

    def _count_objections(self) -> Counter[Objection]:
        names = self.named()
        if names is not None:
            indexed_nodes = [self.fleet.indexed_nodes[name] for name in names if name in self.fleet.indexed_nodes]
            return self._count_one_by_one(indexed_nodes, others=len(self.fleet.indexed_nodes) - len(indexed_nodes))
        if self.checks_each_node:
            apart = self._shut_out()
            if apart is not None:
                return self._count_but_for(*apart)
            if len(self.fleet.indexed_nodes) <= self._patience():
                return self._count_one_by_one(self.fleet.indexed_nodes.values(), others=0)
        counts = self._count_by_rows()
        # Where there are too many to be asked one by one, those against whom nothing else speaks were not selected.
        counts[Objection.NOT_SELECTED] += len(self.fleet.indexed_nodes) - sum(counts.values())
        return counts

    def _shut_out(self) -> tuple["ClaimSearch", list[IndexedNode]] | None:
        """The question without what it asks of single nodes, and the nodes that this shuts out, if it does no more than
        shut some out by name."""
        nodes, fleet = self.claim.nodes, self.fleet
        (term,) = nodes.terms if nodes.terms is not None and len(nodes.terms) == 1 else (None,)
        if term is None or any(f.key != NAME_FIELD for f in term.fields):
            return None
        single = [e for e in term.labels if e.key in self.directory_keys]
        if any(one.operator != "NotIn" for one in (*single, *term.fields)):
            return None
        names = {name for e in single for name in fleet.names_with(e.key, e.values)}
        names.update(name for f in term.fields for name in f.values if name in fleet.indexed_nodes)
        others = tuple(e for e in term.labels if e not in single)
        free = evolve(nodes, terms=(NodeTerm(others, ()),) if others else None)
        rest = ClaimSearch(evolve(self.claim, nodes=free), fleet, EvidencePolicy(self.needs_evidence))
        is_few = len(names) <= self._patience() and not rest.checks_each_node
        return (rest, [fleet.indexed_nodes[name] for name in names]) if is_few else None

    def _count_but_for(self, rest: "ClaimSearch", shut_out: Iterable[IndexedNode]) -> Counter[Objection]:
        counts = rest._count_by_rows()
        self._out = rest._out
        for indexed in shut_out:
            objection = rest._objection(indexed)
            if objection is not None:
                counts[objection] -= 1
                self._out -= rest._is_out(indexed, objection)
            counts[Objection.NOT_SELECTED] += 1
        return counts

    def _is_out(self, indexed: IndexedNode, objection: Objection) -> bool:
        return objection in CONDITIONS and self._total(indexed) >= self.claim.count

    def _count_one_by_one(self, indexed_nodes: Iterable[IndexedNode], others: int) -> Counter[Objection]:
        counts = Counter({Objection.NOT_SELECTED: others})
        for indexed in indexed_nodes:
            objection = self.fit(indexed).objection
            if objection is not None:
                counts[objection] += 1
                self._out += self._is_out(indexed, objection)
        return counts

    def _count_by_rows(self) -> Counter[Objection]:
        counts: Counter[Objection] = Counter()
        for state in EvidenceState:
            for node_class, row in self.fleet.rows((state, None)).items():
                if not self._class_is_selected(node_class):
                    counts[Objection.NOT_SELECTED] += row.count
                elif self.needs_evidence and state is not EvidenceState.FRESH:
                    counts[EVIDENCE_OBJECTIONS[state]] += row.count
                else:
                    self._count_proven(counts, node_class, row)
        return counts

    def _count_proven(self, counts: Counter[Objection], node_class: int, row: ClassNodes) -> None:
        """Of the nodes of a class whose evidence is good enough, or that need none, those with the right hash."""
        if not self.claim.hashes:
            self._count_row(counts, node_class, row)
            return
        groups = [self.fleet.rows((EvidenceState.FRESH, one)) for one in self.claim.hashes]
        named = [rows[node_class] for rows in groups if node_class in rows]
        counts[Objection.OTHER_HASH] += row.count - sum(one.count for one in named)
        for one in named:
            self._count_row(counts, node_class, one)

    def _count_row(self, counts: Counter[Objection], node_class: int, row: ClassNodes) -> None:
        objection = self._condition_objection(node_class)
        room = self.spare
        if objection is not None:
            counts[objection] += row.count
            self._out += sum(len(names) for shape, names in row.shapes.items() if room[shape] != FEWER_MATCHING)
            return
        if self.most_spare == FEWER_MATCHING:
            counts[Objection.FEWER_MATCHING] += row.count
            return
        matching = free = 0
        for shape, names in row.shapes.items():
            if room[shape] == FEWER_FREE:
                free += len(names)
            elif room[shape] == FEWER_MATCHING:
                matching += len(names)
        counts[Objection.FEWER_MATCHING] += matching
        counts[Objection.FEWER_FREE] += free


def tightness(fitting: tuple[int, Mapping[str, None]]) -> int:
    return fitting[0]


def called(indexed: IndexedNode, place: MapEntry) -> list[Device]:
    """The node's devices that a map means."""
    return [d for d in indexed.node.devices if any(d.has_name(gpu) for gpu in place.gpus)]
