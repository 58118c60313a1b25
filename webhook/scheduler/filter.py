"""Decides which of the scheduler's nodes fit a pod, and scores them. No I/O, no clock, no await.

The scheduler counts refused nodes by text, so no text names a node, a GPU or an age. A text about the pod itself is the
same for all nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import frozen

from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import ClaimSearch, EvidencePolicy, Objection
from webhook.core.extender_wire import MAX_SCORE, FilterResult
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import ClassNodes, IndexedNode
from webhook.core.reasons import Reason
from webhook.core.verdict import plain

MESSAGES: dict[Objection, str] = {
    Objection.NOT_SELECTED: "not selected by the pod",
    Objection.STALE: "attestation evidence for this node is stale",
    Objection.ABSENT: "no attestation evidence for this node",
    Objection.BANNED: "the attestation agent of this node is banned",
    Objection.CONFLICT: "attestation evidence for this node is in conflict",
    Objection.OTHER_HASH: "attestation hash differs from the required one",
    Objection.NOT_READY: "node is not ready",
    Objection.CORDONED: "node is cordoned",
    Objection.TAINTED: "node has a taint that the pod does not tolerate",
    Objection.AMBIGUOUS_GPU: "a name in the placement map means several GPUs",
    Objection.DUPLICATE_GPU: "the placement map names a GPU twice",
    Objection.FEWER_MATCHING: "too few matching GPUs",
    Objection.FEWER_FREE: "too few free GPUs",
}
NOT_KNOWN = "node is not known to gpuwarden"
RESERVED_ELSEWHERE = "the pod's GPUs are reserved on another node"
NOT_RESERVED = "the pod's GPU reservation is gone"
TOO_LATE = "the pod's GPU reservation is given up: it waited too long"
UNREADABLE = "the pod's claim cannot be read"
# The ordinal follows.
NOT_IN_MAP = "the placement map has no line for ordinal"
# Shorter than elsewhere: the filter repeats the text for each of possibly thousands of nodes.
MAX_UNREADABLE = 200
# All texts of the filter. One of them in a scheduler's message shows that we refused the pod.
TEXTS = frozenset({*MESSAGES.values(), NOT_KNOWN, RESERVED_ELSEWHERE, NOT_RESERVED, TOO_LATE, UNREADABLE, NOT_IN_MAP})

# Texts that may no longer apply once other pods are gone, so that preemption can help.
RESOLVABLE = frozenset({MESSAGES[Objection.FEWER_FREE]})


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
        return self.claim.record.without_count() == ClaimRecord()


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
        return reject_all(names, f"{NOT_IN_MAP} {query.claim.record.unmapped}")
    answers = FilterAnswers(query, ClaimSearch(query.claim, fleet, policy))
    passed: list[str] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for name, text in zip(names, answers.of(names), strict=True):
        if text is None:
            passed.append(name)
        elif text in RESOLVABLE:
            failed[name] = text
        else:
            unresolvable[name] = text
    return FilterResult(frozenset(passed), failed, unresolvable)


def unreadable(mistakes: Sequence[str]) -> str:
    """The same reason as in a review, and the mistakes in the claim."""
    return plain(f"{UNREADABLE}: {Reason.INVALID_POD}: {'; '.join(mistakes)}", MAX_UNREADABLE)


def reject_all(names: Iterable[str], text: str) -> FilterResult:
    """Refuses all nodes with the same text."""
    return FilterResult(frozenset(), {}, dict.fromkeys(names, text))


class FilterAnswers:
    """The texts against nodes, for one pod."""

    def __init__(self, query: NodeQuery, question: ClaimSearch) -> None:
        self._query = query
        self._question = question
        is_named = question.claim.map_entry is not None or question.claim.nodes.node_name is not None
        self._checks_each_node = query.reserved is not None or is_named or question.checks_each_node
        # A node that is not known has no evidence either.
        self._unknown = MESSAGES[Objection.ABSENT] if question.needs_evidence else NOT_KNOWN

    def of(self, names: Iterable[str]) -> Iterator[str | None]:
        """For each node in order, why it is refused; None if it fits."""
        indexed_nodes = self._question.fleet.indexed_nodes
        if self._checks_each_node:
            return (self._of_one(name, indexed_nodes.get(name)) for name in names)
        return self._of_many(map(indexed_nodes.get, names))

    def _of_one(self, name: str, indexed: IndexedNode | None) -> str | None:
        if self._query.reserved is not None and name != self._query.reserved:
            return RESERVED_ELSEWHERE
        if indexed is None:
            return self._unknown
        return self._node_objection(indexed) or self._devices_objection(indexed)

    def _of_many(self, indexed_nodes: Iterable[IndexedNode | None]) -> Iterator[str | None]:
        """Checks one node per class and device shape: the nodes of a class differ in their devices only."""
        rows: dict[ClassNodes, str | None] = {}
        shapes: dict[int, str | None] = {}
        for indexed in indexed_nodes:
            if indexed is None:
                yield self._unknown
                continue
            if indexed.row not in rows:
                rows[indexed.row] = self._node_objection(indexed)
            text = rows[indexed.row]
            if text is None:
                shape = indexed.node_group.shape
                if shape not in shapes:
                    shapes[shape] = self._devices_objection(indexed)
                text = shapes[shape]
            yield text

    def _node_objection(self, indexed: IndexedNode) -> str | None:
        """Checks all but the devices."""
        question = self._question
        return message_for(
            question.evidence_objection(indexed) if self._query.is_recorded else question.node_objection(indexed)
        )

    def _devices_objection(self, indexed: IndexedNode) -> str | None:
        if self._query.is_recorded:
            return None
        objection = self._question.devices_objection(indexed)
        is_uncounted = objection is Objection.FEWER_MATCHING and not indexed.node.devices
        return None if is_uncounted and is_counted_elsewhere(self._query.claim) else message_for(objection)


def message_for(objection: Objection | None) -> str | None:
    return None if objection is None else MESSAGES[objection]


def is_counted_elsewhere(claim: Claim) -> bool:
    """Whether the scheduler counts the GPUs itself, as an extended resource, on a node whose devices we do not know. A
    map may name such a node: no review has seen the pod, so no GPU is reserved for it."""
    return not claim.record.selects_devices


def scores(
    query: NodeQuery | None, names: Collection[str], fleet: Fleet, policy: EvidencePolicy
) -> list[tuple[str, int]]:
    """Scores nodes: the fewer GPUs stay free beside the pod's, the higher, so that large gaps stay for large claims."""
    if query is None or passes_unchecked(query, policy):
        return [(name, 0) for name in names]
    question = ClaimSearch(query.claim, fleet, policy)
    answers = zip(names, FilterAnswers(query, question).of(names), strict=True)
    return [(name, score(query, fleet.indexed_nodes[name], question) if text is None else 0) for name, text in answers]


def score(query: NodeQuery, indexed: IndexedNode, question: ClaimSearch) -> int:
    """The score of a node that fits."""
    if query.is_recorded or not query.claim.count:
        return MAX_SCORE
    return max(0, MAX_SCORE - max(0, question.spare[indexed.node_group.shape])) if indexed.node.devices else 0
