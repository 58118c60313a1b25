"""Evidence while pods run: every change of a node's evidence is told, and what becomes of pods that lose it is policy.

Nothing is done about what is only glimpsed: while a watch is interrupted, right after, or about evidence whose newest
word is still to be written down.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Protocol

import msgspec
import structlog
from attrs import define, evolve, frozen

from webhook.admission.namespaces import ClaimReader
from webhook.core import check, keys
from webhook.core.claim import Claim, ClaimRecord, ClaimRules, claim_of, recorded_claim_or_none, strictest_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Node
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.evidence import EvidenceState
from webhook.core.evidence_changes import Changes
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode
from webhook.core.pod import OwnerReference, Pod
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.ledger.reserved_pod import ENDED, ReservedPodMetaWire, ReservedPodWire
from webhook.runtime.backoff import Backoff, Retry
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import EvidenceCounts

log = structlog.get_logger(__name__)


# What the watches say has to stay so for as long before anybody acts: they catch up with what was missed after an
# interruption, and a word that was taken away by hand is written anew.
SETTLED = timedelta(seconds=2)
# Between two tries at one pod or node: doubling, up to a minute.
BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
# What one pass does: more would keep other work of the process waiting.
AT_A_TIME = 50
# Classes of nodes that the metrics tell apart.
MAX_CLASSES = 30
OTHER_CLASS = "other"
# An API server that does not answer is not asked fifty times a pass.
MAX_FAILURES = 3


class OnEvidenceLost(StrEnum):
    """What becomes of pods on a node whose evidence has ended; they are reported in any case."""

    REPORT = "report"
    TAINT = "taint"
    EVICT = "evict"


class EvictionError(GpuwardenError):
    """It could not be done now; the text says why."""


class Evictor(Protocol):
    """What can be done to nodes and pods. Both raise MeasureError."""

    async def taint(self, node: str, *, wanted: bool) -> None:
        """Our taint, put on the node or taken off; those of others stay. A node that is gone is no mistake."""

    async def evict(self, pod: PodIdentity) -> None:
        """This very pod, as far as disruption budgets allow it; one that is gone is no mistake."""


@frozen
class BoundPod:
    """A pod that is on a node and was let there by its claim, as the pod says itself.

    A record of GPUs that are reserved is what it was let in by. Without one, where no review of ours was asked, it is
    held to what it asks itself, and to what its namespace demands: `is_bound`.
    """

    pod: PodIdentity
    node: str
    claim: Claim
    is_bound: bool = False
    owner: Subject | None = None
    is_leaving: bool = False

    @classmethod
    def of(cls, raw: Raw, rules: ClaimRules) -> "BoundPod | None":
        """None if it is on no node, has ended, or has no claim."""
        try:
            wire = msgspec.convert(raw, ReservedPodWire)
            meta = wire.metadata or ReservedPodMetaWire()
            node = wire.spec and wire.spec.node_name
            has_ended = wire.status is not None and wire.status.phase in ENDED
            if not node or has_ended or not meta.uid:
                return None
            pod = Pod.parse(raw)
            recorded = recorded_claim_or_none(pod)
            is_reserved = recorded and recorded.count and pod.annotations.get(keys.RESERVATION_ID.name)
            claim = recorded if is_reserved else unvouched(recorded, asked_of(pod, rules))
        except (msgspec.ValidationError, InvalidPodError):
            return None
        if claim is None:
            return None
        return cls(
            pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
            node=node,
            claim=claim,
            is_bound=not is_reserved,
            owner=owner_in(meta.owner_references or (), meta.namespace or ""),
            is_leaving=meta.deletion_timestamp is not None,
        )


def asked_of(pod: Pod, rules: ClaimRules) -> Claim | None:
    """A claim that cannot be read takes the pod out of nobody's sight: it asks for nothing more than its namespace
    demands."""
    try:
        return claim_of(pod, rules)
    except InvalidPodError:
        return Claim(ClaimRecord())


def unvouched(recorded: Claim | None, asked: Claim | None) -> Claim | None:
    """Of a pod that no ledger knows of. A record that contradicts the pod says nothing."""
    return asked if recorded is None else strictest_claim(recorded, asked) or asked


def owner_in(references: Iterable[OwnerReference], namespace: str) -> Subject | None:
    """The controller that has made the pod: its author looks there first."""
    for one in references:
        if one.controller:
            return Subject(one.kind, one.name, namespace, one.uid, one.api_version)
    return None


@define
class LostEvidence:
    """A pod without the evidence that it needs."""

    resident: BoundPod
    text: str
    since: datetime
    is_told: bool = False


class EvidenceLoss:
    """Hears of pods from a watch, goes by the fleet, and acts in `step`."""

    def __init__(
        self,
        fleet: Fleet,
        policy: EvidencePolicy,
        on_lost: OnEvidenceLost,
        measures: Evictor,
        events: Events,
        clock: Clock,
        claims: ClaimReader,
        *,
        is_current: Callable[[], bool],
        is_owed: Callable[[str], bool],
        is_vouched: Callable[[BoundPod], bool],
        count_change: Callable[[str], None],
    ) -> None:
        """`is_owed`: a node's evidence has news that is yet to be written. `is_vouched`: a ledger knows the claim."""
        self._fleet = fleet
        self._policy = policy
        self._on_lost = on_lost
        self._measures = measures
        self._events = events
        self._clock = clock
        self._claims = claims
        self._is_current = is_current
        self._is_owed = is_owed
        self._is_vouched = is_vouched
        self._changes = Changes(fleet, count_change)
        self._current_since: datetime | None = None
        self._residents: dict[str, BoundPod] = {}
        self._losses: dict[str, LostEvidence] = {}
        # Pods whose node was seen to suit what they ask: who asks for something else later has not lost it.
        self._were_proven: set[tuple[str, frozenset[str]]] = set()
        self._tries: dict[str, Retry] = {}

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        found = (BoundPod.of(raw, self._claims.rules) for raw in objects.values())
        self._residents = {one.pod.uid: one for one in found if one is not None}

    def changed(self, raw: Raw) -> None:
        one = BoundPod.of(raw, self._claims.rules)
        if one is None:
            self.deleted(raw)
        else:
            self._residents[one.pod.uid] = one

    def deleted(self, raw: Raw) -> None:
        self._residents.pop(str(raw["metadata"].get("uid")), None)

    # What is shown to whoever looks, in whatever process.

    def counts(self) -> EvidenceCounts:
        self._fleet.advance(self._clock())
        return EvidenceCounts(pods_without=sum(self._objection(one) is not None for one in self._residents.values()))

    # What is done about it.

    def begin(self) -> None:
        """Elected: what was glimpsed before may have come and gone since."""
        self._current_since = None
        self._losses.clear()

    async def step(self) -> None:
        """One pass. What cannot be done now is tried again later."""
        now = self._clock()
        if not self._is_current():
            self._current_since = None
            return
        self._current_since = self._current_since or now
        if now - self._current_since < SETTLED:
            return
        self._fleet.advance(now)
        self._tell_changes(now)
        self._look(now)
        lost = [
            one for one in self._losses.values() if now - one.since >= SETTLED and not self._is_owed(one.resident.node)
        ]
        self._tell_losses(lost, now)
        await self._act(lost, now)

    def _tell_changes(self, now: datetime) -> None:
        if not self._changes.has_begun:
            log.info("evidence watched", nodes=len(self._fleet.indexed_nodes), policy=self._on_lost)
        for one in self._changes.since_last(self._is_owed):
            # The moment tells it from the same change of another day, which is told as well.
            text = f"evidence was {one.before}, is {one.after}; {moment(now)}, by {one.source}"
            self._events.record(Subject.of_node(one.node), Reason.EVIDENCE_CHANGED, text, is_warning=one.is_worse)

    def _look(self, now: datetime) -> None:
        """Which pods are without evidence, and since when. News that is still to be written down may say otherwise."""
        losses: dict[str, LostEvidence] = {}
        were_proven = self._were_proven
        for uid, one in self._residents.items():
            objection = self._objection(one)
            if objection is None:
                were_proven.add((uid, self._claim(one).hashes))
            elif uid in self._losses:
                losses[uid] = evolve(self._losses[uid], resident=one, text=objection)
            elif not self._is_owed(one.node):
                losses[uid] = LostEvidence(one, objection, now)
        self._losses = losses
        self._were_proven = {known for known in were_proven if known[0] in self._residents}

    def _objection(self, one: BoundPod) -> str | None:
        """What speaks against the pod's being where it is; a node that is gone takes its pods with it."""
        indexed, claim = self._fleet.indexed_nodes.get(one.node), self._claim(one)
        if indexed is None or suits(indexed, claim):
            return None
        # Nobody knows of a pod without a record whether we have let it in, unless it asks for evidence itself.
        if one.is_bound and not claim.hashes:
            return None
        denial = check.still_proven(claim, one.node, self._fleet, self._policy)
        return None if denial is None else denial.message

    def _claim(self, one: BoundPod) -> Claim:
        """Within its namespace, as it is known by now: pods are heard of before their namespaces too."""
        bond = self._claims.namespaces.known(one.pod.namespace) if one.is_bound else None
        if not bond or not bond.hashes:
            return one.claim
        record = one.claim.record
        hashes = bond.restrict(record.hashes) or record.hashes
        return Claim(msgspec.structs.replace(record, hashes=hashes), one.claim.nodes)

    def _tell_losses(self, lost: Iterable[LostEvidence], now: datetime) -> None:
        for one in lost:
            if one.is_told:
                continue
            one.is_told, resident = True, one.resident
            self._events.record(Subject.of_pod(resident.pod), Reason.EVIDENCE_LOST, f"{one.text}; {moment(now)}")
            if resident.owner is not None:
                text = f"pod {resident.pod.name}: {one.text}; {moment(now)}"
                self._events.record(resident.owner, Reason.EVIDENCE_LOST, text)

    async def _act(self, lost: list[LostEvidence], now: datetime) -> None:
        wanted = dict(self._wanted(lost))
        self._tries = {what: tries for what, tries in self._tries.items() if what in wanted}
        due = [what for what in wanted if what not in self._tries or self._tries[what].not_before <= now]
        failures = 0
        for what in due[:AT_A_TIME]:
            # After a success too: the watch needs its time to tell.
            self._tries.setdefault(what, Retry(now)).postpone(now, BACKOFF)
            try:
                await wanted[what]()
            except EvictionError as exc:
                log.warning("left for a later pass", what=what, policy=self._on_lost, problem=str(exc))
                failures += 1
                if failures >= MAX_FAILURES:
                    return

    def _wanted(self, lost: Iterable[LostEvidence]) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What is to be done by policy, under a name for each."""
        for name, wanted in self._taints_due(lost):
            yield f"node {name}", partial(self._measures.taint, name, wanted=wanted)
        if self._on_lost is OnEvidenceLost.EVICT:
            for one in (one.resident for one in lost):
                if not one.is_leaving:
                    yield f"pod {one.pod.namespace}/{one.pod.name} {one.pod.uid}", partial(self._evict, one.pod)

    def _taints_due(self, lost: Iterable[LostEvidence]) -> Iterator[tuple[str, bool]]:
        """Nodes that lack our taint, or bear it for nothing.

        What a pod says of its own claim taints no node: anybody may write that where we do not review. A ledger has to
        know the claim, or the node has to have suited it before our eyes.
        """
        nodes = {one.resident.node for one in self._losses.values()}  # the newest included: no taint comes off for them
        believed = {one.resident.node for one in lost if self._is_believed(one.resident)}
        for name, indexed in self._fleet.indexed_nodes.items():
            is_tainted = has_our_taint(indexed.node)
            is_back = name not in nodes and indexed.state is EvidenceState.FRESH
            wanted = self._on_lost is OnEvidenceLost.TAINT and (name in believed or (is_tainted and not is_back))
            if wanted != is_tainted and not self._is_owed(name):
                yield name, wanted

    def _is_believed(self, one: BoundPod) -> bool:
        return (one.pod.uid, self._claim(one).hashes) in self._were_proven or self._is_vouched(one)

    async def _evict(self, pod: PodIdentity) -> None:
        await self._measures.evict(pod)
        log.info("pod evicted, its node's evidence has ended", namespace=pod.namespace, name=pod.name)


def evidence_ages(fleet: Fleet, now: datetime) -> dict[tuple[str, str], float]:
    """In seconds, of the oldest evidence by state and class of nodes. Labels are others' words: past a number of them
    the rest is one class."""
    fleet.advance(now)
    found: dict[tuple[str, str], float] = {}
    classes: set[str] = set()
    for indexed in fleet.indexed_nodes.values():
        said = indexed.evidence
        since = None if said is None else said.oldest or said.since
        if since is None:
            continue
        own = class_of(indexed.node)
        own = own if own in classes or len(classes) < MAX_CLASSES else OTHER_CLASS
        classes.add(own)
        found[indexed.state, own] = max((now - since).total_seconds(), found.get((indexed.state, own), 0.0))
    return found


def class_of(node: Node) -> str:
    """What its GPUs are, by its labels."""
    return next((node.labels[key] for key in keys.GPU_TYPE_LABELS if key in node.labels), "")


def suits(indexed: IndexedNode, claim: Claim) -> bool:
    """The usual case, without the work of a decision."""
    if indexed.state is not EvidenceState.FRESH or indexed.evidence is None:
        return False
    return not claim.hashes or indexed.evidence.hash in claim.hashes


def is_vouched(held: Reservation | None, one: BoundPod) -> bool:
    """Whether the pod holds what it holds by that very claim."""
    return held is not None and held.claim_digest == one.claim.digest


def has_our_taint(node: Node) -> bool:
    return any((one.key, one.effect) == (keys.EVIDENCE_LOST_TAINT, "NoSchedule") for one in node.taints)


def moment(now: datetime) -> str:
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
