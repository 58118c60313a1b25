"""Which of the nodes that a scheduler offers will do for a pod, and how well. No I/O, no clock, no await.

What is said against nodes is counted by the scheduler, text by text: no text names a node, a GPU or an age. The text
about a claim that cannot be read quotes the pod, and is the same for all nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import frozen

from webhook.core.claim import Claim
from webhook.core.decide import ClaimSearch, EvidencePolicy, Objection
from webhook.core.extender_wire import MAX_SCORE, FilterResult
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import ClassNodes, IndexedNode
from webhook.core.reasons import Reason
from webhook.core.verdict import plain

SAID: dict[Objection, str] = {
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
# The filter repeats the text for each node of a cluster of thousands.
MAX_UNREADABLE = 200
# All that a pod may be told to wait for: what a scheduler's message holds if it was we who refused.
TEXTS = frozenset({*SAID.values(), NOT_KNOWN, RESERVED_ELSEWHERE, NOT_RESERVED, TOO_LATE, UNREADABLE})

# What another pod's end may heal: an eviction is worth a thought.
MAY_FREE_ITSELF = frozenset({SAID[Objection.FEWER_FREE]})


@frozen
class NodeQuery:
    """What a pod wants of nodes: its claim, and the node where its GPUs are if some are reserved."""

    claim: Claim
    reserved: str | None = None
    # Whether an earlier review of ours has seen the claim; it has then chosen by conditions and room already.
    is_recorded: bool = False

    @property
    def is_of_gpus_alone(self) -> bool:
        """A number of GPUs, and nothing of what only we know."""
        record = self.claim.record
        return not (record.hashes or record.requirements or record.node or record.shared)


def passes_unseen(wish: NodeQuery | None, policy: EvidencePolicy) -> bool:
    """Whether there is nothing that we could hold against any node: no claim, or GPUs that somebody else counts."""
    if wish is None:
        return True
    return not wish.is_recorded and wish.is_of_gpus_alone and not policy.is_always_required


def sifted(wish: NodeQuery | None, names: Collection[str], fleet: Fleet, policy: EvidencePolicy) -> FilterResult:
    """Each of the nodes in one list."""
    if wish is None or passes_unseen(wish, policy):
        return FilterResult(frozenset(names))
    answers = FilterAnswers(wish, ClaimSearch(wish.claim, fleet, policy))
    passed: list[str] = []
    failed: dict[str, str] = {}
    unresolvable: dict[str, str] = {}
    for name, text in zip(names, answers.of(names), strict=True):
        if text is None:
            passed.append(name)
        elif text in MAY_FREE_ITSELF:
            failed[name] = text
        else:
            unresolvable[name] = text
    return FilterResult(frozenset(passed), failed, unresolvable)


def unreadable(mistakes: Sequence[str]) -> str:
    """The same reason as a review gives, and what is wrong with the claim."""
    return plain(f"{UNREADABLE}: {Reason.INVALID_POD}: {'; '.join(mistakes)}", MAX_UNREADABLE)


def refusing(names: Iterable[str], text: str) -> FilterResult:
    """None of them will do."""
    return FilterResult(frozenset(), {}, dict.fromkeys(names, text))


class FilterAnswers:
    """What speaks against nodes, in words."""

    def __init__(self, wish: NodeQuery, question: ClaimSearch) -> None:
        self._wish = wish
        self._question = question
        is_named = question.claim.map_entry is not None or question.claim.nodes.node_name is not None
        self._is_asked_of_each = wish.reserved is not None or is_named or question.checks_each_node
        # Of a node of which nothing is known nothing is proven either.
        self._unknown = SAID[Objection.ABSENT] if question.needs_evidence else NOT_KNOWN

    def of(self, names: Iterable[str]) -> Iterator[str | None]:
        """Of each node, in their order."""
        indexed_nodes = self._question.fleet.indexed_nodes
        if self._is_asked_of_each:
            return (self._of_one(name, indexed_nodes.get(name)) for name in names)
        return self._of_many(map(indexed_nodes.get, names))

    def _of_one(self, name: str, indexed: IndexedNode | None) -> str | None:
        if self._wish.reserved is not None and name != self._wish.reserved:
            return RESERVED_ELSEWHERE
        if indexed is None:
            return self._unknown
        return self._against_node(indexed) or self._against_devices(indexed)

    def _of_many(self, indexed_nodes: Iterable[IndexedNode | None]) -> Iterator[str | None]:
        """Nodes of a row differ in their devices alone, and those by shape: one of each row and shape is asked."""
        rows: dict[ClassNodes, str | None] = {}
        shapes: dict[int, str | None] = {}
        for indexed in indexed_nodes:
            if indexed is None:
                yield self._unknown
                continue
            if indexed.row not in rows:
                rows[indexed.row] = self._against_node(indexed)
            text = rows[indexed.row]
            if text is None:
                shape = indexed.node_group.shape
                if shape not in shapes:
                    shapes[shape] = self._against_devices(indexed)
                text = shapes[shape]
            yield text

    def _against_node(self, indexed: IndexedNode) -> str | None:
        """Whatever devices it has."""
        question = self._question
        return said(
            question.evidence_objection(indexed) if self._wish.is_recorded else question.node_objection(indexed)
        )

    def _against_devices(self, indexed: IndexedNode) -> str | None:
        if self._wish.is_recorded:
            return None
        objection = self._question.devices_objection(indexed)
        is_uncounted = objection is Objection.FEWER_MATCHING and not indexed.node.devices
        return None if is_uncounted and is_counted_elsewhere(self._wish.claim) else said(objection)


def said(objection: Objection | None) -> str | None:
    return None if objection is None else SAID[objection]


def is_counted_elsewhere(claim: Claim) -> bool:
    """Of a node without devices of which we know, the scheduler itself counts the GPUs, as of any resource."""
    record = claim.record
    return not (record.requirements or record.node or record.shared)


def scores(
    wish: NodeQuery | None, names: Collection[str], fleet: Fleet, policy: EvidencePolicy
) -> list[tuple[str, int]]:
    """The fewer GPUs would be left free beside the pod's, the better: large gaps stay for large claims."""
    if wish is None or passes_unseen(wish, policy):
        return [(name, 0) for name in names]
    question = ClaimSearch(wish.claim, fleet, policy)
    answers = zip(names, FilterAnswers(wish, question).of(names), strict=True)
    return [(name, score(wish, fleet.indexed_nodes[name], question) if text is None else 0) for name, text in answers]


def score(wish: NodeQuery, indexed: IndexedNode, question: ClaimSearch) -> int:
    """Of a node that will do."""
    if wish.is_recorded or not wish.claim.count:
        return MAX_SCORE
    return max(0, MAX_SCORE - max(0, question.spare[indexed.node_group.shape])) if indexed.node.devices else 0
