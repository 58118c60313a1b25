"""Reports every change of a node's evidence while pods run, and applies the configured policy to pods that lose it.

Acts only on settled facts: not while a watch is interrupted or right after, and not on evidence whose newest state is
still to be written.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Protocol

import msgspec
import structlog
from attrs import define, evolve, field, frozen

from webhook.admission.namespaces import ClaimReader
from webhook.core import check, keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none, strictest_claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Node
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.evidence import EvidenceState
from webhook.core.evidence_changes import Changes
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode
from webhook.core.hashes import HashPolicy
from webhook.core.pod import OwnerReference, Pod
from webhook.core.pod_claims import own_template_of
from webhook.core.proof_claims import hash_of_template
from webhook.core.proof_devices import hash_attribute
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.ledger.end_of_use import TERMINAL_PHASES
from webhook.ledger.reserved_pod import ReservedPodMetaWire, ReservedPodWire
from webhook.runtime.backoff import Backoff, Retries
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)


# A loss must last this long before anything is done. Watches catch up after an interruption, and evidence that was
# deleted by hand is written again.
SETTLED = timedelta(seconds=2)
# Between two tries for one pod or node.
BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
# Actions per pass, so that the process's other work is not held up.
AT_A_TIME = 50
# The number of node classes in the metrics.
MAX_CLASSES = 30
OTHER_CLASS = "other"
# A pass ends after this many failures: the API server may be down.
MAX_FAILURES = 3


class OnEvidenceLost(StrEnum):
    """What happens to pods on a node whose evidence has ended. They are reported in any case."""

    REPORT = "report"
    TAINT = "taint"
    EVICT = "evict"


class EvictionError(GpuwardenError):
    """The action failed; the text says why. It may be tried again."""


class Evictor(Protocol):
    """Acts on nodes and pods in the API server. Both methods raise EvictionError."""

    async def taint(self, node: str, *, wanted: bool) -> None:
        """Adds or removes our taint and keeps all others. Does nothing if the node is gone."""

    async def evict(self, pod: PodIdentity) -> None:
        """Evicts the pod of this uid within its disruption budgets. Does nothing if it is gone."""


@frozen
class BoundPod:
    """A pod on a node, with the claim that it is checked against.

    That is the claim of its reservation, if it has one. A pod without one was not reviewed by us. It is checked against
    its own request and its namespace's policy (`is_bound`).
    """

    pod: PodIdentity
    node: str
    claim: Claim
    is_bound: bool = False
    owner: Subject | None = None
    is_leaving: bool = False
    # Of the hash in the template of a native pod, which may name none itself.
    attribute: str | None = None

    @classmethod
    def of(cls, raw: Raw, rules: ClaimRules) -> "BoundPod | None":
        """None if the pod is on no node, has ended, or has no claim."""
        try:
            wire = msgspec.convert(raw, ReservedPodWire)
            meta = wire.metadata or ReservedPodMetaWire()
            node = wire.spec and wire.spec.node_name
            has_ended = wire.status is not None and wire.status.phase in TERMINAL_PHASES
            if not node or has_ended or not meta.uid:
                return None
            pod = Pod.parse(raw)
            recorded = recorded_claim_or_none(pod)
            is_reserved = recorded and recorded.count and pod.annotations.get(keys.RESERVATION_ID.name)
            claim = recorded if is_reserved else unreserved_claim(recorded, asked_of(pod, rules))
            attribute = hash_of_template(own_template_of({"resourceClaims": pod.body.resource_claims}))
        except (msgspec.ValidationError, InvalidPodError):
            return None
        if claim is None and attribute is None:
            return None
        return cls(
            pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
            node=node,
            claim=claim or Claim(ClaimRecord()),
            is_bound=not is_reserved,
            owner=controller_of(meta.owner_references or (), meta.namespace or ""),
            is_leaving=meta.deletion_timestamp is not None,
            attribute=attribute,
        )


def asked_of(pod: Pod, rules: ClaimRules) -> Claim | None:
    """The claim by the pod's own request. A claim that cannot be read counts as one that requires what the namespace
    requires."""
    try:
        return claim_of(pod, rules)
    except InvalidPodError:
        return Claim(ClaimRecord())


def unreserved_claim(recorded: Claim | None, asked: Claim | None) -> Claim | None:
    """The claim of a pod without a reservation. A record that contradicts the pod's request is ignored."""
    return asked if recorded is None else strictest_claim(recorded, asked) or asked


def controller_of(references: Iterable[OwnerReference], namespace: str) -> Subject | None:
    """The controller that created the pod; it receives the Event too."""
    for one in references:
        if one.controller:
            return Subject(one.kind, one.name, namespace, one.uid, one.api_version)
    return None


@define
class LostEvidence:
    """A pod that lacks the evidence that it needs, since when and why."""

    pod_on_node: BoundPod
    text: str
    since: datetime
    is_reported: bool = False


@define(eq=False, repr=False)
class EvidenceLoss:
    """Listener of the watch of pods. `step` compares them with the fleet, reports, and acts."""

    _fleet: Fleet
    _policy: EvidencePolicy
    _on_lost: OnEvidenceLost
    _evictor: Evictor
    _events: Events
    _clock: Clock
    _claims: ClaimReader
    _is_current: Callable[[], bool] = field(kw_only=True)
    # Whether the node's evidence has a newer state that is not written yet.
    _is_write_pending: Callable[[str], bool] = field(kw_only=True)
    # Whether the ledger has the pod's claim.
    _is_claim_known: Callable[[BoundPod], bool] = field(kw_only=True)
    _count_change: Callable[[str], None] = field(kw_only=True)
    _current_since: datetime | None = field(default=None, init=False)
    _bound_pods: dict[str, BoundPod] = field(factory=dict, init=False)
    # The uids of these pods by node, and of those without a reservation by namespace.
    _uids_on: dict[str, set[str]] = field(factory=lambda: defaultdict(set), init=False)
    _uids_in: dict[str, set[str]] = field(factory=lambda: defaultdict(set), init=False)
    # What has changed since the pods were compared: nodes of the fleet, and pods.
    _changed_in_fleet: set[str] = field(init=False)
    _changed_pods: set[str] = field(factory=set, init=False)
    # What the namespaces required then.
    _policies: dict[str, HashPolicy | None] = field(factory=dict, init=False)
    _losses: dict[str, LostEvidence] = field(factory=dict, init=False)
    # By uid, the hashes of pods whose node has been seen to match. A pod that changes its request has not lost
    # evidence.
    _were_proven: dict[str, set[frozenset[str]]] = field(factory=lambda: defaultdict(set), init=False)
    _tries: Retries = field(factory=partial(Retries, BACKOFF), init=False)
    _changes: Changes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._changes = Changes(self._fleet, self._count_change)
        self._changed_in_fleet = self._fleet.collect_changes()

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for uid in self._bound_pods.keys() - {str(raw["metadata"].get("uid")) for raw in objects.values()}:
            self._forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        one = BoundPod.of(raw, self._claims.rules)
        if one is None:
            self.deleted(raw)
            return
        uid = one.pod.uid
        self._bound_pods[uid] = one
        self._uids_on[one.node].add(uid)
        if one.is_bound:
            self._uids_in[one.pod.namespace].add(uid)
        self._changed_pods.add(uid)

    def deleted(self, raw: Raw) -> None:
        self._forget(str(raw["metadata"].get("uid")))

    def _forget(self, uid: str) -> None:
        one = self._bound_pods.pop(uid, None)
        if one is None:
            return
        self._changed_pods.discard(uid)
        self._were_proven.pop(uid, None)
        for index, key in ((self._uids_on, one.node), (self._uids_in, one.pod.namespace)):
            index[key].discard(uid)
            if not index[key]:
                del index[key]

    # For the metrics, in any process.

    def count_pods_without(self) -> int:
        """The number of pods on nodes whose evidence does not satisfy them."""
        self._fleet.advance(self._clock())
        return sum(self._objection(one) is not None for one in self._bound_pods.values())

    # Reports and actions.

    def begin(self) -> None:
        """Called when this process is elected: earlier observations may be out of date."""
        self._current_since = None
        self._losses.clear()
        self._changed_pods.update(self._bound_pods)

    async def step(self) -> None:
        """One pass. A failed action is tried again later."""
        now = self._clock()
        if not self._is_current():
            self._current_since = None
            return
        self._current_since = self._current_since or now
        if now - self._current_since < SETTLED:
            return
        self._fleet.advance(now)
        self._report_changes(now)
        self._update_losses(now)
        lost = [
            one
            for one in self._losses.values()
            if now - one.since >= SETTLED and not self._is_write_pending(one.pod_on_node.node)
        ]
        self._report_losses(lost, now)
        await self._act(lost, now)

    def _report_changes(self, now: datetime) -> None:
        if not self._changes.has_begun:
            log.info("evidence watched", nodes=len(self._fleet.indexed_nodes), policy=self._on_lost)
        for one in self._changes.since_last(self._is_write_pending):
            # The time makes it differ from an equal change at another time, which is reported too.
            text = f"evidence was {one.before}, is {one.after}; {moment(now)}, by {one.source}"
            self._events.record(Subject.of_node(one.node), Reason.EVIDENCE_CHANGED, text, is_warning=one.is_worse)

    def _update_losses(self, now: datetime) -> None:
        """Updates which pods lack evidence, and since when. Evidence that is still to be written is not counted as
        lost."""
        losses: dict[str, LostEvidence] = {}
        for uid in self._to_compare():
            one = self._bound_pods[uid]
            objection = self._objection(one)
            if objection is None:
                self._were_proven[uid].add(self._claim(one).hashes)
            elif uid in self._losses:
                losses[uid] = evolve(self._losses[uid], pod_on_node=one, text=objection)
            elif self._is_write_pending(one.node):
                self._changed_pods.add(uid)
            else:
                losses[uid] = LostEvidence(one, objection, now)
        self._losses = losses

    def _to_compare(self) -> list[str]:
        """The pods that lack evidence, and those for which something has changed: a large cluster has 40,000 pods with
        GPUs, and a pass follows each change of a pod."""
        found = self._changed_pods | self._losses.keys()
        for node in self._changed_in_fleet:
            found |= self._uids_on.get(node, set())
        policies = {namespace: self._claims.namespaces.known(namespace) for namespace in self._uids_in}
        for namespace, uids in self._uids_in.items():
            if self._policies.get(namespace) != policies[namespace]:
                found |= uids
        self._policies = policies
        self._changed_in_fleet.clear()
        self._changed_pods.clear()
        return sorted(found & self._bound_pods.keys())

    def _objection(self, one: BoundPod) -> str | None:
        """Why the pod may not be on its node. None for a node that is gone: its pods go with it."""
        indexed, claim = self._fleet.indexed_nodes.get(one.node), self._claim(one)
        if indexed is None or suits(indexed, claim):
            return None
        # It is unknown whether a pod without a record was admitted by us, unless it asks for evidence itself.
        if one.is_bound and not claim.hashes:
            return None
        denial = check.still_proven(claim, one.node, self._fleet, self._policy)
        return None if denial is None else denial.message

    def _claim(self, one: BoundPod) -> Claim:
        """The claim, with what the namespace requires by now: the pod's event may come before its namespace's."""
        bond = self._claims.namespaces.known(one.pod.namespace) if one.is_bound else None
        if not bond or not bond.hashes:
            return one.claim
        record = one.claim.record
        own = record.hashes or [hash for hash in bond.hashes if hash_attribute(hash) == one.attribute]
        hashes = bond.restrict(own) or record.hashes
        return Claim(msgspec.structs.replace(record, hashes=hashes), one.claim.nodes)

    def _report_losses(self, lost: Iterable[LostEvidence], now: datetime) -> None:
        for one in lost:
            if one.is_reported:
                continue
            one.is_reported, pod_on_node = True, one.pod_on_node
            self._events.record(Subject.of_pod(pod_on_node.pod), Reason.EVIDENCE_LOST, f"{one.text}; {moment(now)}")
            if pod_on_node.owner is not None:
                text = f"pod {pod_on_node.pod.name}: {one.text}; {moment(now)}"
                self._events.record(pod_on_node.owner, Reason.EVIDENCE_LOST, text)

    async def _act(self, lost: list[LostEvidence], now: datetime) -> None:
        wanted = dict(self._wanted(lost))
        self._tries.retain(wanted)
        due = [what for what in wanted if self._tries.is_due(what, now)]
        failures = 0
        for what in due[:AT_A_TIME]:
            # After a success too: the watch needs time to show it.
            self._tries.postpone(what, now)
            try:
                await wanted[what]()
            except EvictionError as exc:
                log.warning("action failed, it is tried again later", what=what, policy=self._on_lost, problem=str(exc))
                failures += 1
                if failures >= MAX_FAILURES:
                    return

    def _wanted(self, lost: Iterable[LostEvidence]) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """The actions that the policy requires, each with a name."""
        for name, wanted in self._taints_due(lost):
            yield f"node {name}", partial(self._evictor.taint, name, wanted=wanted)
        if self._on_lost is OnEvidenceLost.EVICT:
            for one in (one.pod_on_node for one in lost):
                if not one.is_leaving:
                    yield f"pod {one.pod.namespace}/{one.pod.name} {one.pod.uid}", partial(self._evict, one.pod)

    def _taints_due(self, lost: Iterable[LostEvidence]) -> Iterator[tuple[str, bool]]:
        """The nodes whose taint must be added or removed.

        A pod's own annotations are no reason to taint a node: where we do not review, anyone can write them. The ledger
        must know the claim, or the node must have been seen to match it.
        """
        nodes = {
            one.pod_on_node.node for one in self._losses.values()
        }  # the newest losses included: they keep a taint in place
        believed = {one.pod_on_node.node for one in lost if self._may_taint(one.pod_on_node)}
        for name, indexed in self._fleet.indexed_nodes.items():
            is_tainted = has_our_taint(indexed.node)
            is_back = name not in nodes and indexed.state is EvidenceState.FRESH
            wanted = self._on_lost is OnEvidenceLost.TAINT and (name in believed or (is_tainted and not is_back))
            if wanted != is_tainted and not self._is_write_pending(name):
                yield name, wanted

    def _may_taint(self, one: BoundPod) -> bool:
        return self._claim(one).hashes in self._were_proven.get(one.pod.uid, set()) or self._is_claim_known(one)

    async def _evict(self, pod: PodIdentity) -> None:
        await self._evictor.evict(pod)
        log.info("pod evicted, its node's evidence has ended", namespace=pod.namespace, name=pod.name)


def evidence_ages(fleet: Fleet, now: datetime) -> dict[tuple[str, str], float]:
    """Seconds since the oldest evidence, by state and node class. Classes come from labels, so their number is limited;
    the rest is one class."""
    fleet.advance(now)
    found: dict[tuple[str, str], float] = {}
    classes: set[str] = set()
    for indexed in fleet.indexed_nodes.values():
        evidence = indexed.evidence
        since = None if evidence is None else evidence.oldest or evidence.since
        if since is None:
            continue
        own = class_of(indexed.node)
        own = own if own in classes or len(classes) < MAX_CLASSES else OTHER_CLASS
        classes.add(own)
        found[indexed.state, own] = max((now - since).total_seconds(), found.get((indexed.state, own), 0.0))
    return found


def class_of(node: Node) -> str:
    """The GPU type by the node's labels; empty if they do not name one."""
    return next((node.labels[key] for key in keys.GPU_TYPE_LABELS if key in node.labels), "")


def suits(indexed: IndexedNode, claim: Claim) -> bool:
    """A cheap check that covers nearly all pods."""
    if indexed.state is not EvidenceState.FRESH or indexed.evidence is None:
        return False
    return not claim.hashes or indexed.evidence.hash in claim.hashes


def is_claim_known(held: Reservation | None, one: BoundPod) -> bool:
    """Whether the reservation that the pod holds was made for this claim."""
    return held is not None and held.claim_digest == one.claim.digest


def has_our_taint(node: Node) -> bool:
    return any((one.key, one.effect) == (keys.EVIDENCE_LOST_TAINT, "NoSchedule") for one in node.taints)


def moment(now: datetime) -> str:
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
