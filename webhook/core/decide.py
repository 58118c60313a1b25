"""The decision: the nodes and devices that can serve a claim, best first, or a denial."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain, islice

from attrs import evolve, frozen

from webhook.core import keys
from webhook.core.claim import MAX_PROVEN_NODES, Claim
from webhook.core.claim_keys import GPU_MAP
from webhook.core.device import Device, Slot
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import FEWER_FREE, FEWER_MATCHING, ClassNodes, EvidenceGroup, IndexedNode, NodeClass
from webhook.core.gpu_map import MapEntry
from webhook.core.injection import injection_asked
from webhook.core.keys import LOGICAL_NODE_LABEL
from webhook.core.nodes_asked import NAME_FIELD, NodeTerm
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny

# Placements that a ledger may try before the decision is made again.
MAX_PLACEMENTS = 8


class Objection(StrEnum):
    """Why a node cannot serve a claim, in the order of the checks."""

    NOT_SELECTED = "not selected by the pod"
    OTHER_INJECTION = "another injection"
    STALE = "stale evidence"
    ABSENT = "no evidence"
    BANNED = "banned"
    CONFLICT = "conflicting evidence"
    OTHER_HASH = "a different hash"
    NOT_READY = "not ready"
    CORDONED = "cordoned"
    TAINTED = "an untolerated taint"
    DEVICE_PLUGIN = "a device plugin for its GPUs"
    NO_DEVICE_PLUGIN = "no device plugin for its GPUs"
    UNCOUNTED = "a GPU in use that its device plugin considers free"
    AWAITED = "a GPU that its kubelet has not chosen yet"
    AMBIGUOUS_GPU = "several GPUs that match one name in the map"
    DUPLICATE_GPU = "a GPU that the map names twice"
    FEWER_MATCHING = "fewer than {count} matching GPUs"
    FEWER_FREE = "fewer than {count} free GPUs"

    def text_for(self, claim: Claim) -> str:
        """The objection to one node."""
        if claim.count == 1 and self in NO_GPU:
            return NO_GPU[self]
        return self.format(count=claim.count)

    def text_for_nodes(self, number: int, claim: Claim) -> str:
        """The objection to `number` nodes: `2 have no evidence`, `1 is cordoned`."""
        singular, plural = ("is", "are") if self in ADJECTIVES else ("has", "have")
        return f"{number} {singular if number == 1 else plural} {self.text_for(claim)}"


ADJECTIVES = frozenset({Objection.NOT_SELECTED, Objection.BANNED, Objection.NOT_READY, Objection.CORDONED})
NO_GPU = {Objection.FEWER_MATCHING: "no matching GPU", Objection.FEWER_FREE: "no free GPU"}

EVIDENCE_OBJECTIONS = {
    EvidenceState.STALE: Objection.STALE,
    EvidenceState.ABSENT: Objection.ABSENT,
    EvidenceState.BANNED: Objection.BANNED,
    EvidenceState.CONFLICT: Objection.CONFLICT,
}

SHAPE_OBJECTIONS = {FEWER_MATCHING: Objection.FEWER_MATCHING, FEWER_FREE: Objection.FEWER_FREE}

# These end by themselves, or when an administrator changes the node.
CONDITIONS = frozenset(
    {
        *(Objection.NOT_READY, Objection.CORDONED, Objection.TAINTED),
        *(Objection.DEVICE_PLUGIN, Objection.NO_DEVICE_PLUGIN),
    }
)

# GPUs that one denial names.
MAX_NAMED_GPUS = 8

# `most_devices` where no node qualifies: a node without devices has 0.
NO_NODE = -1

# Nodes times expressions that one decision may evaluate where the index cannot answer. 20,000 take about 20 ms.
MAX_NODE_CHECKS = 20_000

# A denial has the reason of the last check that any node reached.
REASONS: tuple[tuple[Reason, frozenset[Objection]], ...] = (
    (Reason.NO_FREE_DEVICE, frozenset({Objection.FEWER_FREE, Objection.UNCOUNTED, Objection.AWAITED})),
    (
        Reason.NO_MATCHING_DEVICE,
        frozenset({Objection.AMBIGUOUS_GPU, Objection.DUPLICATE_GPU, Objection.FEWER_MATCHING}),
    ),
    (Reason.NODE_NOT_READY, CONDITIONS),
    (Reason.NO_PROVEN_NODE, frozenset({*EVIDENCE_OBJECTIONS.values(), Objection.OTHER_HASH})),
    (Reason.NO_SUITABLE_NODE, frozenset({Objection.NOT_SELECTED, Objection.OTHER_INJECTION})),
)

HINTS = {
    Reason.NO_FREE_DEVICE: "wait until GPUs are free, or ask for fewer",
    Reason.NO_MATCHING_DEVICE: "ask for GPUs that a node has",
    Reason.NODE_NOT_READY: "wait for the nodes, or tolerate their taints",
    Reason.NO_PROVEN_NODE: "ask for a hash that a node has proven, or have the node attested",
    Reason.NO_SUITABLE_NODE: "loosen the pod's nodeName, nodeSelector or node affinity",
}
INJECTION_HINT = f"the nodes' label {keys.INJECTION} and the namespace's annotation of that name have to agree"
MAP_HINTS = {
    Objection.AMBIGUOUS_GPU: "name GPUs by UUID",
    Objection.DUPLICATE_GPU: "give each GPU one name in the line",
}
# For a claim that names no hash and needs a proven node because every claim does.
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
    search = ClaimSearch(claim, fleet, policy)
    answer = search.best(most) or ordinal_not_in_map(claim) or ambiguous_node(search) or unknown_node(search)
    return answer or with_set_aside_gpus(search.denial(), search)


def preferred(claim: Claim, fleet: Fleet, policy: EvidencePolicy, most: int) -> tuple[Placement, ...]:
    """Placements on the nodes that a hint prefers, if any fits."""
    if claim.preferred is None:
        return ()
    return ClaimSearch(evolve(claim, nodes=claim.preferred, preferred=None), fleet, policy).best(most)


def ordinal_not_in_map(claim: Claim) -> Deny | None:
    ordinal = claim.record.unmapped
    if ordinal is None:
        return None
    return Deny(
        Reason.NOT_IN_MAP,
        f"{GPU_MAP.name}: the map has no line for ordinal {ordinal}",
        hint="add a line for the ordinal to the map in the StatefulSet's template, or scale the StatefulSet down",
    )


def ambiguous_node(search: "ClaimSearch") -> Deny | None:
    """Several nodes have the logical name that the map uses."""
    entry = search.claim.map_entry
    if entry is None:
        return None
    named = search.fleet.nodes_for_map_name(entry.node)
    if len(named) < 2:
        return None
    return Deny(
        Reason.AMBIGUOUS_NODE,
        f"{search.claim.sentence}: 0 of {len(search.fleet.indexed_nodes)} nodes fit: {len(named)} have the label "
        f"{LOGICAL_NODE_LABEL}={entry.node}",
        hint="keep that label on one node only",
        causes=search.denial().causes,
    )


def unknown_node(search: "ClaimSearch") -> Deny | None:
    """The map names a node that does not exist."""
    entry = search.claim.map_entry
    if entry is None or any(name in search.fleet.indexed_nodes for name in search.allowed_names() or ()):
        return None
    return Deny(
        Reason.NO_SUITABLE_NODE,
        f"{search.claim.sentence}: 0 of {len(search.fleet.indexed_nodes)} nodes fit: none has the label "
        f"{LOGICAL_NODE_LABEL}={entry.node} or that name",
        hint="correct the map, or label the node",
        causes=search.denial().causes,
    )


def with_set_aside_gpus(denial: Deny, search: "ClaimSearch") -> Deny:
    """The denial, and the GPUs that waiting does not free because the map of another StatefulSet names them."""
    others = [device.uuid for device in search.set_aside_for_others()] if denial.reason is Reason.NO_FREE_DEVICE else []
    if not others:
        return denial
    named = ", ".join(sorted(others)[:MAX_NAMED_GPUS])
    return evolve(
        denial,
        message=f"{denial.message}; set aside for the map of an older StatefulSet: {named}",
        hint="name other GPUs, or scale down or delete the older StatefulSet",
    )


def explain(claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> tuple[NodeFit, ...]:
    """The answer of every node. Costs more than a decision: it visits each node."""
    search = ClaimSearch(claim, fleet, policy)
    return tuple(search.fit(indexed) for _, indexed in sorted(fleet.indexed_nodes.items()))


def nodes_to_try(claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> tuple[str, ...] | Deny:
    """The nodes among which a scheduler may choose: those that fit now, and others that have the GPUs and may have them
    free later. A denial if no node fits now."""
    search = ClaimSearch(claim, fleet, policy)
    most = search.max_pins()
    places = decide(claim, fleet, policy, most=most)
    if isinstance(places, Deny):
        return places
    return tuple(islice(dict.fromkeys(chain((place.node for place in places), search.able())), most))


class ClaimSearch:
    """One claim against the fleet. The answer for each class and shape of nodes is computed once."""

    def __init__(self, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> None:
        self.claim = claim
        self.fleet = fleet
        is_left = claim.is_left_to_scheduler
        self.needs_evidence = bool(claim.hashes) or is_left or policy.is_always_required
        self.directory_keys = fleet.index_labels(claim.nodes)  # may renumber kinds, so it comes first
        self.kinds = fleet.kinds_serving(claim.requirements, is_shared=claim.is_shared)
        self._injection = None if is_left else injection_asked(claim.record.injection, fleet.injection)
        self._class_objections: dict[int, Objection | None] = {}
        self._unavailable = 0  # nodes that have the devices, and on which no pod can run now
        self.spare = fleet.spare_by_shape(self.kinds, claim.count)
        self.most_spare = max(self.spare, default=FEWER_MATCHING)

    # Placements.

    def best(self, most: int) -> tuple[Placement, ...]:
        return tuple(islice(self.placements(), most if self.claim.count else None))

    def placements(self) -> Iterator[Placement]:
        names = self.allowed_names()
        found = self._ranked() if names is None else self._placements_on(names)
        return found if self.claim.count else islice(found, self.max_pins())

    def _max_checks(self) -> int:
        """How many nodes may be checked one by one, where their class does not decide."""
        if not self.checks_each_node:
            return len(self.fleet.indexed_nodes)
        return MAX_NODE_CHECKS // max(1, self.claim.nodes.expressions)

    def _placements_on(self, names: Iterable[str]) -> Iterator[Placement]:
        fits = (self.fit(self.fleet.indexed_nodes[name]) for name in names if name in self.fleet.indexed_nodes)
        return (Placement(fit.name, fit.slots) for fit in fits if fit.fits)

    def most_devices(self) -> int:
        """The largest number of matching devices, free or held, on any node without another objection; `NO_NODE` if
        there is none."""
        names = self.allowed_names()
        if names is not None:
            indexed_nodes = [self.fleet.indexed_nodes[name] for name in names if name in self.fleet.indexed_nodes]
            return max((self._total(one) for one in indexed_nodes if self.node_objection(one) is None), default=NO_NODE)
        if not self.checks_each_node:
            return max((total for total, _ in self._totals()), default=NO_NODE)
        each = islice(((total, name) for total, nodes in self._totals() for name in nodes), self._max_checks())
        return max((total for total, name in each if self.is_selected(self.fleet.indexed_nodes[name])), default=NO_NODE)

    def able(self) -> Iterator[str]:
        """The nodes without another objection that have the claim's devices, free or held."""
        names = self.allowed_names()
        if names is not None:
            indexed_nodes = (self.fleet.indexed_nodes[name] for name in names if name in self.fleet.indexed_nodes)
            found = (one for one in indexed_nodes if self.node_objection(one) is None)
            return (one.node.name for one in found if self._total(one) >= self.claim.count)
        each = (name for total, nodes in self._totals() if total >= self.claim.count for name in nodes)
        return (name for name in islice(each, self._max_checks()) if self.is_selected(self.fleet.indexed_nodes[name]))

    def _totals(self) -> Iterator[tuple[int, Mapping[str, None]]]:
        """Nodes without another objection, with the number of matching devices that each has."""
        for group in self.groups():
            for node_class, row in self.fleet.rows(group).items():
                if self.class_objection(node_class) is None:
                    for names in row.shapes.values():
                        yield self._total(self.fleet.indexed_nodes[next(iter(names))]), names

    def _total(self, indexed: IndexedNode) -> int:
        entry = self.claim.map_entry
        if entry is None:
            return sum(kind in self.kinds for kind in indexed.kinds)
        return sum(map(self.can_serve, mapped_devices(indexed, entry)))

    def max_pins(self) -> int:
        return max(1, MAX_PROVEN_NODES // len(self.claim.nodes.terms or "1"))

    def _ranked(self) -> Iterator[Placement]:
        """Placements from the index, the tightest fit first: nodes with many free devices stay free for large
        claims."""
        fitting: list[tuple[int, Mapping[str, None]]] = []
        spare = self.spare
        if self.most_spare < 0:
            return
        for group in self.groups():
            for node_class, row in self.fleet.rows(group).items():
                if self.class_objection(node_class) is None:
                    fitting += [(spare[shape], names) for shape, names in row.shapes.items() if spare[shape] >= 0]
        checks_left = self._max_checks()
        while fitting:
            tightest = min(fitting, key=tightness)
            fitting.remove(tightest)
            for name in self.fleet.rotated(tightest[1]):
                checks_left -= 1
                if checks_left < 0:
                    return
                indexed = self.fleet.indexed_nodes[name]
                if self.is_selected(indexed):
                    yield Placement(name, self.slots(indexed))

    def groups(self) -> Iterable[EvidenceGroup]:
        """The groups of nodes whose evidence satisfies the claim."""
        if self.claim.hashes:
            return [(EvidenceState.FRESH, one) for one in sorted(self.claim.hashes)]
        if self.needs_evidence:
            return [(EvidenceState.FRESH, None)]
        return [(state, None) for state in EvidenceState]

    def allowed_names(self) -> list[str] | None:
        """The only nodes that the claim allows, by name; None if it does not limit them."""
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
        """The devices of a node that fits: those in use by other shares first, then those with the fewest labels."""
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
        """If the maps of two StatefulSets name a device, the older set gets it. A shared device serves both."""
        claim, fleet = self.claim, self.fleet
        return fleet.is_available(device) and (
            claim.is_shared or not fleet.is_set_aside_for_other(device.uuid, claim.stateful_set)
        )

    def set_aside_for_others(self) -> list[Device]:
        """The devices that the claim's map names and that are set aside for another StatefulSet."""
        entry, fleet = self.claim.map_entry, self.fleet
        if entry is None or self.claim.is_shared:
            return []
        names = self.allowed_names() or ()
        indexed_nodes = (fleet.indexed_nodes[name] for name in names if name in fleet.indexed_nodes)
        named = (device for indexed in indexed_nodes for device in mapped_devices(indexed, entry))
        return [device for device in named if fleet.is_set_aside_for_other(device.uuid, self.claim.stateful_set)]

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
        return self.node_objection(indexed) or self.devices_objection(indexed)

    def devices_objection(self, indexed: IndexedNode) -> Objection | None:
        """The objection to the devices of the node. Without a map the index answers, and no devices are chosen."""
        entry = self.claim.map_entry
        if entry is None:
            return self.shape_objection(indexed.node_group.shape)
        return self._map_objection(indexed, entry, len(self.slots(indexed)))

    def _objection(self, indexed: IndexedNode) -> Objection | None:
        return self.node_objection(indexed) or (
            None if self.claim.map_entry else self.shape_objection(indexed.node_group.shape)
        )

    def node_objection(self, indexed: IndexedNode) -> Objection | None:
        """The objection to the node itself, without its devices."""
        if not self.claim.nodes.matches(indexed.node.name, indexed.labels):
            return Objection.NOT_SELECTED
        if self.claim.is_mapped and indexed.node.name not in (self.allowed_names() or ()):
            return Objection.NOT_SELECTED
        return (
            self.injection_objection(indexed)
            or self.evidence_objection(indexed)
            or self._condition_objection(indexed.node_group.node_class)
        )

    def _map_objection(self, indexed: IndexedNode, entry: MapEntry, found: int) -> Objection | None:
        if found == self.claim.count:
            return None
        named = [[device for device in indexed.node.devices if device.has_name(gpu)] for gpu in entry.gpus]
        if any(len(devices) > 1 for devices in named):
            return Objection.AMBIGUOUS_GPU
        if len({device.uuid for devices in named for device in devices}) < sum(map(len, named)):
            return Objection.DUPLICATE_GPU
        serving = sum(map(self.can_serve, mapped_devices(indexed, entry)))
        return Objection.FEWER_FREE if serving == self.claim.count else Objection.FEWER_MATCHING

    def injection_objection(self, indexed: IndexedNode) -> Objection | None:
        return self._class_injection_objection(indexed.node_group.node_class)

    def _class_injection_objection(self, number: int) -> Objection | None:
        """A claim without GPUs fits nodes of any injection. Where kube-scheduler chooses, nodes have none."""
        if not self.claim.count or self._injection == self.fleet.node_class(number).injection:
            return None
        return Objection.OTHER_INJECTION

    def evidence_objection(self, indexed: IndexedNode) -> Objection | None:
        if not self.needs_evidence:
            return None
        if indexed.state is not EvidenceState.FRESH or indexed.evidence is None:
            return EVIDENCE_OBJECTIONS.get(indexed.state, Objection.ABSENT)
        if self.claim.hashes and indexed.evidence.hash not in self.claim.hashes:
            return Objection.OTHER_HASH
        return None

    def class_objection(self, number: int) -> Objection | None:
        """The objection to every node of a class. Labels outside the index are checked node by node."""
        if number not in self._class_objections:
            self._class_objections[number] = self._selection_objection(number) or self._condition_objection(number)
        return self._class_objections[number]

    def _selection_objection(self, number: int) -> Objection | None:
        if not self._class_is_selected(number):
            return Objection.NOT_SELECTED
        return self._class_injection_objection(number)

    def _class_is_selected(self, number: int) -> bool:
        if self.takes_any_node or self.checks_each_node:
            return True
        return self.claim.nodes.matches("", self.fleet.class_labels(number))

    @property
    def takes_any_node(self) -> bool:
        return not self.claim.nodes.selector and self.claim.nodes.terms is None

    @property
    def checks_each_node(self) -> bool:
        """Whether a node's class does not decide: the claim selects by node name, or by a label with a value per
        node."""
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
        return self._plugin_objection(node_class) if self.claim.count else None

    def _plugin_objection(self, node_class: NodeClass) -> Objection | None:
        if node_class.is_refused_for_plugin:
            return Objection.DEVICE_PLUGIN
        if node_class.lacks_plugin:
            return Objection.NO_DEVICE_PLUGIN
        if node_class.has_uncounted_gpus:
            return Objection.UNCOUNTED
        return Objection.AWAITED if node_class.awaits_kubelet else None

    def shape_objection(self, number: int) -> Objection | None:
        return SHAPE_OBJECTIONS.get(self.spare[number])

    # Denial.

    def denial(self) -> Deny:
        """Why no node fits, with the number of nodes for each objection."""
        counts = self._count_objections()
        reason = next((r for r, group in REASONS if any(counts[o] for o in group)), self._reason_without_nodes())
        if reason is Reason.NO_MATCHING_DEVICE and self._unavailable:
            reason = Reason.NODE_NOT_READY
        found = [one.text_for_nodes(counts[one], self.claim) for one in Objection if counts[one]]
        return Deny(
            reason,
            f"{self.claim.sentence}: 0 of {sum(counts.values())} nodes fit"
            + (f": {', '.join(found)}" if found else ""),
            hint=self._hint(reason, counts),
            causes=tuple(found),
        )

    def _hint(self, reason: Reason, counts: Counter[Objection]) -> str:
        if reason is Reason.NO_PROVEN_NODE and not self.claim.hashes:
            return HINT_FOR_ALL
        if reason is Reason.NO_SUITABLE_NODE and counts[Objection.OTHER_INJECTION]:
            return INJECTION_HINT
        return next((hint for objection, hint in MAP_HINTS.items() if counts[objection]), HINTS[reason])

    def _reason_without_nodes(self) -> Reason:
        return Reason.NO_PROVEN_NODE if self.claim.hashes else Reason.NO_MATCHING_DEVICE

    def _count_objections(self) -> Counter[Objection]:
        names = self.allowed_names()
        if names is not None:
            indexed_nodes = [self.fleet.indexed_nodes[name] for name in names if name in self.fleet.indexed_nodes]
            return self._count_one_by_one(indexed_nodes, others=len(self.fleet.indexed_nodes) - len(indexed_nodes))
        if self.checks_each_node:
            excluded = self._excluded_by_name()
            if excluded is not None:
                return self._count_without(*excluded)
            if len(self.fleet.indexed_nodes) <= self._max_checks():
                return self._count_one_by_one(self.fleet.indexed_nodes.values(), others=0)
        counts = self._count_by_rows()
        # There are too many nodes to check each. Those without another objection are not selected: none fits.
        counts[Objection.NOT_SELECTED] += len(self.fleet.indexed_nodes) - sum(counts.values())
        return counts

    def _excluded_by_name(self) -> tuple["ClaimSearch", list[IndexedNode]] | None:
        """If the claim only excludes some nodes by name: the search without these exclusions, and the nodes."""
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
        is_few = len(names) <= self._max_checks() and not rest.checks_each_node
        return (rest, [fleet.indexed_nodes[name] for name in names]) if is_few else None

    def _count_without(self, rest: "ClaimSearch", excluded: Iterable[IndexedNode]) -> Counter[Objection]:
        counts = rest._count_by_rows()
        self._unavailable = rest._unavailable
        for indexed in excluded:
            objection = rest._objection(indexed)
            if objection is not None:
                counts[objection] -= 1
                self._unavailable -= rest._is_unavailable(indexed, objection)
            counts[Objection.NOT_SELECTED] += 1
        return counts

    def _is_unavailable(self, indexed: IndexedNode, objection: Objection) -> bool:
        """Whether the node has the devices, and only its condition keeps pods away."""
        return objection in CONDITIONS and self._total(indexed) >= self.claim.count

    def _count_one_by_one(self, indexed_nodes: Iterable[IndexedNode], others: int) -> Counter[Objection]:
        counts = Counter({Objection.NOT_SELECTED: others})
        for indexed in indexed_nodes:
            objection = self.fit(indexed).objection
            if objection is not None:
                counts[objection] += 1
                self._unavailable += self._is_unavailable(indexed, objection)
        return counts

    def _count_by_rows(self) -> Counter[Objection]:
        counts: Counter[Objection] = Counter()
        for state in EvidenceState:
            for node_class, row in self.fleet.rows((state, None)).items():
                not_selected = self._selection_objection(node_class)
                if not_selected is not None:
                    counts[not_selected] += row.count
                elif self.needs_evidence and state is not EvidenceState.FRESH:
                    counts[EVIDENCE_OBJECTIONS[state]] += row.count
                else:
                    self._count_proven(counts, node_class, row)
        return counts

    def _count_proven(self, counts: Counter[Objection], node_class: int, row: ClassNodes) -> None:
        """Count the nodes of a class whose evidence is fresh, or that need none."""
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
        spare = self.spare
        if objection is not None:
            counts[objection] += row.count
            with_devices = (names for shape, names in row.shapes.items() if spare[shape] != FEWER_MATCHING)
            self._unavailable += sum(map(len, with_devices))
            return
        if self.most_spare == FEWER_MATCHING:
            counts[Objection.FEWER_MATCHING] += row.count
            return
        matching = free = 0
        for shape, names in row.shapes.items():
            if spare[shape] == FEWER_FREE:
                free += len(names)
            elif spare[shape] == FEWER_MATCHING:
                matching += len(names)
        counts[Objection.FEWER_MATCHING] += matching
        counts[Objection.FEWER_FREE] += free


def tightness(fitting: tuple[int, Mapping[str, None]]) -> int:
    return fitting[0]


def mapped_devices(indexed: IndexedNode, entry: MapEntry) -> list[Device]:
    """The devices of the node that a map entry names."""
    return [d for d in indexed.node.devices if any(d.has_name(gpu) for gpu in entry.gpus)]
