"""Decides which of the scheduler's nodes fit a pod, and scores them. No I/O, no clock, no await.

The scheduler counts refused nodes by message, so no message names a node, a GPU or an age. A message about the pod
itself is the same for all nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import evolve, frozen

from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import REASONS, ClaimSearch, EvidencePolicy, Objection
from webhook.core.extender_wire import MAX_SCORE, FilterResult, Refusal
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import ClassNodes, IndexedNode
from webhook.core.reasons import Reason
from webhook.core.verdict import plain

TEXTS: dict[Objection, str] = {
    Objection.NOT_SELECTED: "not selected by the pod",
    Objection.OTHER_INJECTION: "node has another injection",
    Objection.STALE: "attestation evidence for this node is stale",
    Objection.ABSENT: "no attestation evidence for this node",
    Objection.BANNED: "the attestation agent of this node is banned",
    Objection.CONFLICT: "attestation evidence for this node is in conflict",
    Objection.OTHER_HASH: "attestation hash differs from the required one",
    Objection.NOT_READY: "node is not ready",
    Objection.CORDONED: "node is cordoned",
    Objection.TAINTED: "node has a taint that the pod does not tolerate",
    Objection.DEVICE_PLUGIN: "a device plugin serves the GPUs of the node",
    Objection.NO_DEVICE_PLUGIN: "no device plugin offers the GPUs of the node",
    Objection.UNCOUNTED: "a GPU of the node is in use and its device plugin takes it for free",
    Objection.AWAITED: "the kubelet has not chosen the GPUs of an older pod yet",
    Objection.AMBIGUOUS_GPU: "a name in the placement map means several GPUs",
    Objection.DUPLICATE_GPU: "the placement map names a GPU twice",
    Objection.FEWER_MATCHING: "too few matching GPUs",
    Objection.FEWER_FREE: "too few free GPUs",
}
REFUSALS = {one: Refusal(reason, TEXTS[one]) for reason, group in REASONS for one in group}
NOT_KNOWN = Refusal(Reason.NO_SUITABLE_NODE, "node is not known to gpuwarden")
RESERVED_ELSEWHERE = Refusal(Reason.NO_SUITABLE_NODE, "the pod's GPUs are reserved on another node")
NOT_RESERVED = Refusal(Reason.NOT_RESERVED, "the pod's GPU reservation is gone")
TOO_LATE = Refusal(Reason.BIND_DEADLINE_PASSED, "the pod's GPU reservation is given up: it waited too long")
UNREADABLE = Refusal(Reason.INVALID_POD, "the pod's claim cannot be read")
# The ordinal follows.
NOT_IN_MAP = Refusal(Reason.NOT_IN_MAP, "the placement map has no line for ordinal")
# Shorter than elsewhere: the filter repeats the text for each of possibly thousands of nodes.
MAX_UNREADABLE = 200


@frozen
class NodeQuery:
    """What a pod requires of nodes: its claim, and the node of its reservation if it has one."""

    claim: Claim
    reserved: str | None = None
    # Whether a review has recorded the claim. The review has then chosen nodes by condition and free GPUs already.
    is_recorded: bool = False

    @property
    def is_of_gpus_alone(self) -> bool:
        """Whether the claim is only for a number of GPUs, which the scheduler can count itself."""
        return not self.claim.is_reserved_at_binding and self.claim.record.without_mode() == ClaimRecord()


def passes_unchecked(query: NodeQuery | None, policy: EvidencePolicy) -> bool:
    """Whether every node passes: the pod has no claim, or one that the scheduler handles itself."""
    if query is None:
        return True
    return not query.is_recorded and query.is_of_gpus_alone and not policy.is_always_required


def filter_nodes(query: NodeQuery | None, names: Collection[str], fleet: Fleet, policy: EvidencePolicy) -> FilterResult:
    """Each node ends up in exactly one of the lists."""
    if query is None or passes_unchecked(query, policy):
        return FilterResult(frozenset(names))
    if query.claim.record.unmapped is not None:
        return reject_all(names, evolve(NOT_IN_MAP, detail=f" {query.claim.record.unmapped}"))
    answers = FilterAnswers(query, ClaimSearch(query.claim, fleet, policy))
    passed: list[str] = []
    failed: dict[str, Refusal] = {}
    unresolvable: dict[str, Refusal] = {}
    for name, refusal in zip(names, answers.of(names), strict=True):
        if refusal is None:
            passed.append(name)
        elif refusal.reason is Reason.NO_FREE_DEVICE:  # preemption of other pods can help
            failed[name] = refusal
        else:
            unresolvable[name] = refusal
    return FilterResult(frozenset(passed), failed, unresolvable)


def unreadable(mistakes: Sequence[str]) -> Refusal:
    """The same reason as in a review, and the mistakes in the claim."""
    return evolve(UNREADABLE, detail=plain(f": {Reason.INVALID_POD}: {'; '.join(mistakes)}", MAX_UNREADABLE))


def reject_all(names: Iterable[str], refusal: Refusal) -> FilterResult:
    """Refuses all nodes for the same reason."""
    return FilterResult(frozenset(), {}, dict.fromkeys(names, refusal))


class FilterAnswers:
    """The answers for nodes, for one pod."""

    def __init__(self, query: NodeQuery, question: ClaimSearch) -> None:
        self._query = query
        self._question = question
        is_named = question.claim.map_entry is not None or question.claim.nodes.node_name is not None
        self._checks_each_node = query.reserved is not None or is_named or question.checks_each_node
        # A node that is not known has no evidence either.
        self._unknown = REFUSALS[Objection.ABSENT] if question.needs_evidence else NOT_KNOWN

    def of(self, names: Iterable[str]) -> Iterator[Refusal | None]:
        """For each node in order, why it is refused; None if it fits."""
        indexed_nodes = self._question.fleet.indexed_nodes
        if self._checks_each_node:
            return (self._of_one(name, indexed_nodes.get(name)) for name in names)
        return self._of_many(map(indexed_nodes.get, names))

    def _of_one(self, name: str, indexed: IndexedNode | None) -> Refusal | None:
        if self._query.reserved is not None and name != self._query.reserved:
            return RESERVED_ELSEWHERE
        if indexed is None:
            return self._unknown
        return self._node_objection(indexed) or self._devices_objection(indexed)

    def _of_many(self, indexed_nodes: Iterable[IndexedNode | None]) -> Iterator[Refusal | None]:
        """Checks one node per class and device shape: the nodes of a class differ in their devices only."""
        rows: dict[ClassNodes, Refusal | None] = {}
        shapes: dict[int, Refusal | None] = {}
        for indexed in indexed_nodes:
            if indexed is None:
                yield self._unknown
                continue
            if indexed.row not in rows:
                rows[indexed.row] = self._node_objection(indexed)
            refusal = rows[indexed.row]
            if refusal is None:
                shape = indexed.node_group.shape
                if shape not in shapes:
                    shapes[shape] = self._devices_objection(indexed)
                refusal = shapes[shape]
            yield refusal

    def _node_objection(self, indexed: IndexedNode) -> Refusal | None:
        """Checks all but the devices."""
        question = self._question
        return refusal_for(
            question.evidence_objection(indexed) if self._query.is_recorded else question.node_objection(indexed)
        )

    def _devices_objection(self, indexed: IndexedNode) -> Refusal | None:
        if self._query.is_recorded:
            return None
        objection = self._question.devices_objection(indexed)
        is_uncounted = objection is Objection.FEWER_MATCHING and not indexed.node.devices
        return None if is_uncounted and is_counted_elsewhere(self._query.claim) else refusal_for(objection)


def refusal_for(objection: Objection | None) -> Refusal | None:
    return None if objection is None else REFUSALS[objection]


def is_counted_elsewhere(claim: Claim) -> bool:
    """Whether the scheduler counts the GPUs itself, as an extended resource, on a node whose devices we do not know. A
    map may name such a node: no review has seen the pod, so no GPU is reserved for it."""
    return not (claim.record.selects_devices or claim.is_reserved_at_binding)


def scores(
    query: NodeQuery | None, names: Collection[str], fleet: Fleet, policy: EvidencePolicy
) -> list[tuple[str, int]]:
    """Scores nodes: the fewer GPUs stay free beside the pod's, the higher, so that large gaps stay for large claims."""
    if query is None or passes_unchecked(query, policy):
        return [(name, 0) for name in names]
    question = ClaimSearch(query.claim, fleet, policy)
    answers = zip(names, FilterAnswers(query, question).of(names), strict=True)
    return [(name, 0 if refusal else score(query, fleet.indexed_nodes[name], question)) for name, refusal in answers]


def score(query: NodeQuery, indexed: IndexedNode, question: ClaimSearch) -> int:
    """The score of a node that fits."""
    if query.is_recorded or not query.claim.count:
        return MAX_SCORE
    return max(0, MAX_SCORE - max(0, question.spare[indexed.node_group.shape])) if indexed.node.devices else 0
