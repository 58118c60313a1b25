"""Writes until when pods may be bound without a review, for the policy that decides while no replica answers
(binding.yaml).

The policy sees a Binding, but not its pod. So one BindingEnds object lists two kinds of times: for each node, when its
evidence ends, which applies to every pod that is bound there; for each pod, when it may no longer be bound. A node
without evidence is not listed, unless a pod with a claim may still be on its way to it. If the pods of a namespace do
not fit into the object, the namespace is listed instead and none of its pods is bound; other namespaces are not
affected.

With proof devices, a policy refuses allocations on nodes that are not listed with an end in the future. So proven nodes
without an end are listed with a far one, and gained and lost evidence is written sooner. Devices of a hash that their
node has no longer proven are listed too, as long as they are published: a scheduler may not have seen their end yet.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import structlog
from attrs import define, field, frozen

from webhook.admission.namespaces import ClaimReader
from webhook.admission.placement_maps import opted_in
from webhook.core import check, keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none, strictest_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import nodes_pinned_to
from webhook.core.errors import InvalidPodError, LedgerError
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.gpu_demand import has_claim_of
from webhook.core.pod import Pod
from webhook.core.proof_claims import hash_of_template
from webhook.core.proof_devices import digits_of_hash, hash_attribute, whole
from webhook.core.raw import Raw
from webhook.core.reservation import Reservation
from webhook.kube.api_objects import ObjectClient
from webhook.kube.resource_slices import stamp
from webhook.kube.store import StaleError
from webhook.kube.view import ObjectView
from webhook.ledger.end_of_use import TERMINAL_PHASES
from webhook.ledger.reconcile import waiting_since
from webhook.ledger.reserved_pod import ReservedPod, ReservedPodWire
from webhook.runtime.clock import LONG_AGO, Clock

log = structlog.get_logger(__name__)

Ends = dict[tuple[str, str], datetime]

NAME = "gpuwarden"
NODE, NAMESPACE, POD, PROOF = "node", "namespace", "pod", "proof"
# Urgent changes are checked for and written at the first interval, the others at the second.
AT_ONCE, ROUTINE = timedelta(seconds=1), timedelta(seconds=10)
# With proof devices, lost evidence is checked for at this interval.
LOSS = timedelta(milliseconds=200)
# The end of evidence without an end, with proof devices. CEL knows no later time.
ENDLESS = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
# An end is urgent if it is nearer than this.
NEAR = timedelta(seconds=30)
# A node stays closed for at least this long after its evidence has ended: an admitted pod may be on its way to it.
CLOSED_FOR = timedelta(minutes=1)
# The most bytes of JSON in the object; etcd takes 1.5 MiB.
MAX_BYTES = 1_400_000
# Bytes of an entry beside its name: the time, quotes, colon and comma.
ENTRY_BYTES = 26


class StoredEnds(msgspec.Struct, frozen=True):
    """The spec of the BindingEnds object. A time that cannot be parsed counts as past."""

    kept: str = ""
    nodes: dict[str, str] = {}
    namespaces: dict[str, str] = {}
    pods: dict[str, str] = {}
    # Absent in objects of older versions, and without proof devices.
    proofs: dict[str, str] = {}

    @classmethod
    def of(cls, raw: Raw | None) -> "StoredEnds":
        try:
            return msgspec.convert((raw or {}).get("spec") or {}, cls)
        except msgspec.ValidationError:
            return cls()

    def ends(self) -> Ends:
        parts = ((NODE, self.nodes), (NAMESPACE, self.namespaces), (POD, self.pods), (PROOF, self.proofs))
        return {(kind, name): moment_of(text) for kind, texts in parts for name, text in texts.items()}


@frozen
class Unbound:
    """A pod without a node that a scheduler may bind."""

    pod: Pod
    reserved_pod: ReservedPod | None
    # The nodes that its affinity pins it to; contains None if it pins none.
    nodes: frozenset[str | None]
    recorded: Claim | None

    @classmethod
    def of(cls, raw: Raw) -> "Unbound | None":
        """None if the pod is on a node, has ended, or waits behind our gate, which only we open."""
        try:
            wire, pod = msgspec.convert(raw, ReservedPodWire), Pod.parse(raw)
        except (msgspec.ValidationError, InvalidPodError):
            return None
        has_ended = wire.status is not None and wire.status.phase in TERMINAL_PHASES
        if pod.body.node_name or has_ended or pod.is_gated or not pod.meta.uid:
            return None
        nodes = frozenset(nodes_pinned_to(raw)) or frozenset({None})
        return cls(pod, ReservedPod.of(raw), nodes, recorded_claim_or_none(pod))

    @property
    def namespace(self) -> str:
        return self.pod.meta.namespace or ""

    def may_go_to(self, node: str) -> bool:
        return not self.nodes.isdisjoint({node, None})


@define(eq=False, repr=False)
class BindingEnds:
    """Listener of the watches of pods and namespaces. `step` writes the object, from the fleet and the ledger."""

    _objects: ObjectClient
    _fleet: Fleet
    _policy: EvidencePolicy
    _claims: ClaimReader
    # Returns the reservation of the ledger that a pod's annotations name.
    _carried: Callable[[ReservedPod], Reservation | None]
    _bind_deadline: timedelta
    _clock: Clock
    _is_current: Callable[[], bool]
    _opt_in: str = keys.OPT_IN.name
    _max_bytes: int = MAX_BYTES
    # The digits of the hashes in the names of a node's proof devices. None if reconcile publishes no proof devices.
    _published: Callable[[str], Collection[str]] | None = None
    _changed: set[str] = field(init=False)
    _unbound: dict[str, Unbound] = field(factory=dict, init=False)
    _parsed_claims: dict[str, tuple[ClaimRules, Claim | InvalidPodError | None]] = field(factory=dict, init=False)
    _raw: Raw | None = field(default=None, init=False)
    _written: Ends | None = field(default=None, init=False)  # None: must be read first
    _is_in_force: bool = field(default=False, init=False)
    _is_cut_reported: bool = field(default=False, init=False)  # that the API server drops fields of the object
    _checked_at: datetime = field(default=LONG_AGO, init=False)
    _wrote_at: datetime = field(default=LONG_AGO, init=False)
    # The proven nodes at the last check, with their hashes.
    _were_fresh: dict[str, str] = field(factory=dict, init=False)
    # Nodes that have lost their evidence, and since when.
    _closed_at: dict[str, datetime] = field(factory=dict, init=False)
    # Whether the policy judges the Bindings of the namespace.
    namespaces: ObjectView[bool] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.namespaces = ObjectView(partial(opted_in, opt_in=self._opt_in))
        self._changed = self._fleet.collect_changes() if self._has_proofs else set()

    @property
    def _has_proofs(self) -> bool:
        return self._published is not None

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        found = ((uid_of(raw), Unbound.of(raw)) for raw in objects.values())
        self._unbound = {uid: one for uid, one in found if one is not None}
        self._parsed_claims.clear()

    def changed(self, raw: Raw) -> None:
        one = Unbound.of(raw)
        self.deleted(raw)
        if one is not None:
            self._unbound[uid_of(raw)] = one

    def deleted(self, raw: Raw) -> None:
        self._unbound.pop(uid_of(raw), None)
        self._parsed_claims.pop(uid_of(raw), None)

    # For the reconciler.

    def is_closed(self, uid: str) -> bool:
        """Whether the written object forbids binding this pod while no replica answers. False where the policy does not
        judge Bindings because the namespace has opted out."""
        one = self._unbound.get(uid)
        if one is not None and not self._is_judged(one):
            return False
        written, now = self._written or {}, self._clock()
        places = ((POD, uid), (NAMESPACE, "" if one is None else one.namespace))
        return self._is_in_force and any(written[place] <= now for place in places if place in written)

    # Writing.

    def begin(self) -> None:
        """Called when this process is elected: another leader may have written."""
        self._written = None

    async def step(self) -> None:
        """One pass. A failed write is tried again in the next pass."""
        now = self._clock()
        if not self._is_current() or not self._is_check_due(now):
            return
        self._checked_at = now
        try:
            if self._written is None or now - self._wrote_at >= ROUTINE:
                await self._read()
            await self._update(now)
        except LedgerError as exc:
            self._written = None
            log.warning("BindingEnds not written", problem=str(exc))

    def _is_check_due(self, now: datetime) -> bool:
        since = now - self._checked_at
        return since >= AT_ONCE or (since >= LOSS and self._is_evidence_lost(now))

    def _is_evidence_lost(self, now: datetime) -> bool:
        """Whether a proven node has lost its evidence, or has proven another hash, since the last check."""
        if not self._has_proofs:
            return False
        self._fleet.advance(now)
        return any(name in self._were_fresh and self._is_lost(name) for name in self._changed)

    def _is_lost(self, node: str) -> bool:
        evidence = self._fleet.fresh_evidence(node)
        return evidence is None or evidence.hash != self._were_fresh[node]

    async def _read(self) -> None:
        """Another leader may have written the object, or it may have been deleted."""
        self._raw = await self._objects.get(NAME)
        kept = StoredEnds.of(self._raw)
        self._written, self._is_in_force = kept.ends(), bool(kept.kept)

    async def _update(self, now: datetime) -> None:
        written = self._written or {}
        self._fleet.advance(now)
        judged = [one for one in self._unbound.values() if self._is_judged(one)]
        nodes = self._nodes(written, now, judged)
        wanted = within_the_limit(nodes | self._ended_proofs(), self._pods(judged), self._max_bytes)
        is_due = now - self._wrote_at >= ROUTINE and (wanted != written or not self._is_in_force)
        if is_due or any(self._is_urgent(written, wanted, now)):
            await self._write(wanted, now)

    def _is_urgent(self, written: Ends, wanted: Ends, now: datetime) -> Iterator[bool]:
        """Changes without which the policy could let a pod through too late, or refuse the claims of a proven node."""
        for key, end in wanted.items():
            before = written.get(key)
            yield (before is None or end < before) and (end - now < NEAR or self._is_new_node(written, key))
            yield self._has_proofs and key[0] == NODE and before is not None and before <= now < end
        yield any(key[0] == PROOF and key not in wanted for key in written)

    def _is_new_node(self, written: Ends, key: tuple[str, str]) -> bool:
        return key not in written and key[0] == NODE

    async def _write(self, wanted: Ends, now: datetime) -> None:
        """If the stored list is not in force, it is stored without `kept` first: a list that the API server has cut
        must not take effect."""
        self._wrote_at = now
        raw = raw_of(wanted, now)
        not_in_force = {**raw, "spec": {part: text for part, text in raw["spec"].items() if part != "kept"}}
        if len(msgspec.json.encode(raw)) > self._max_bytes:
            log.error("BindingEnds too large: no pod is bound while no replica answers", entries=len(wanted))
            await self._store(raw_of({}, None))
            is_in_force = False
        else:
            is_in_force = (self._is_in_force or await self._store(not_in_force)) and await self._store(raw)
            if is_in_force:
                self._warn_of_closed(wanted)
            elif StoredEnds.of(self._raw).kept:
                await self._store(not_in_force)
        self._written, self._is_in_force = wanted, is_in_force

    async def _store(self, raw: Raw) -> bool:
        """Whether the API server stored all that was sent. It drops fields that its CRD does not define."""
        if self._raw is None:
            self._raw = await self._objects.create(raw)
        else:
            self._raw = await self._objects.replace({**self._raw, "spec": raw["spec"]})
        sent, stored = StoredEnds.of(raw), StoredEnds.of(self._raw)
        if sent != stored and not self._is_cut_reported:
            parts = [part for part in StoredEnds.__struct_fields__ if getattr(sent, part) != getattr(stored, part)]
            log.error(
                "the API server drops fields of BindingEnds, so no pod is bound while no replica answers: "
                "apply the CRDs of this version",
                parts=parts,
            )
        self._is_cut_reported = sent != stored
        return sent == stored

    def _warn_of_closed(self, wanted: Ends) -> None:
        closed = sorted(name for kind, name in wanted if kind == NAMESPACE)
        if closed and any((NAMESPACE, name) not in (self._written or {}) for name in closed):
            log.warning(
                "too many pods with a claim: no pod of these namespaces is bound while no replica answers",
                namespaces=closed,
            )

    def _is_judged(self, one: Unbound) -> bool:
        """A namespace that is not known counts as judged: it may be as new as its pods."""
        return self.namespaces.get(one.namespace) is not False

    def _nodes(self, written: Ends, now: datetime, judged: Iterable[Unbound]) -> Ends:
        indexed_nodes = self._fleet.indexed_nodes
        fresh = {name for name, indexed in indexed_nodes.items() if indexed.state is EvidenceState.FRESH}
        had = {name for kind, name in written if kind == NODE} | self._closed_at.keys() | self._were_fresh.keys()
        self._changed.clear()
        on_their_way = [one for one in judged if self._has_claim(one)]
        closed = {name: self._closed_at.get(name, now) for name in had - fresh}
        self._closed_at = {
            name: since
            for name, since in closed.items()
            if now - since < CLOSED_FOR or any(one.may_go_to(name) for one in on_their_way)
        }
        proven = {name: indexed_nodes[name].evidence for name in fresh}
        self._were_fresh = {name: one.hash for name, one in proven.items() if one is not None}
        endless = ENDLESS if self._has_proofs else None
        untils = {name: one.until or endless for name, one in proven.items() if one is not None}
        ends = {name: until for name, until in untils.items() if until is not None}
        return {(NODE, name): whole(end) for name, end in (ends | dict.fromkeys(self._closed_at, LONG_AGO)).items()}

    def _ended_proofs(self) -> Ends:
        """The published devices of proven nodes for other hashes, by node and by the digits of the hash."""
        if self._published is None:
            return {}
        return {
            (PROOF, f"{node}/{digits}"): LONG_AGO
            for node, hash in self._were_fresh.items()
            for digits in self._published(node)
            if digits != digits_of_hash(hash)
        }

    def _pods(self, judged: Iterable[Unbound]) -> dict[str, Ends]:
        """The ends of pods by namespace."""
        found = defaultdict[str, Ends](dict)
        for one in judged:
            end = self._end_of(one)
            if end is not None:
                found[one.namespace][POD, one.pod.meta.uid or ""] = whole(end)
        return found

    def _has_claim(self, one: Unbound) -> bool:
        try:
            return one.recorded is not None or self._asked(one) is not None
        except InvalidPodError:
            return True

    def _asked(self, one: Unbound) -> Claim | None:
        """The claim by the pod's own request. Parsed once, and again if the namespace's rules change. Raises
        InvalidPodError."""
        rules, uid = self._claims.known_within(one.namespace), one.pod.meta.uid or ""
        known = self._parsed_claims.get(uid)
        if known is None or known[0] != rules:
            try:
                removed = None if one.recorded is None else one.recorded.record.asked
                known = rules, claim_of(one.pod, rules, removed)
            except InvalidPodError as exc:
                known = rules, exc
            self._parsed_claims[uid] = known
        if isinstance(known[1], InvalidPodError):
            raise known[1].with_traceback(None)
        return known[1]

    def _end_of(self, one: Unbound) -> datetime | None:
        """None if only the node decides: for a pod without a claim, or pinned to proven nodes."""
        recorded = one.recorded
        try:
            if recorded is not None and recorded.count and not recorded.is_left_to_scheduler:
                return self._end_of_reserved(one, recorded)
            asked = self._asked(one)
        except InvalidPodError:
            return LONG_AGO
        claim = asked if recorded is None else strictest_claim(recorded, asked)
        if claim is None:
            return None if recorded is None else LONG_AGO
        if self._has_proofs and recorded is None and is_proven_by_claims(one.pod, claim):
            return None
        if self._has_proofs and recorded is not None and recorded.is_left_to_scheduler:
            return None if has_claim_of(one.pod.body.resource_claims, recorded.record) else LONG_AGO
        if recorded is None and not claim.count and not claim.hashes and not self._policy.is_always_required:
            return None
        nodes = [node for node in one.nodes if node is not None]
        is_held = None not in one.nodes and any(self._suits(claim, node) for node in nodes)
        return None if recorded is not None and is_held else LONG_AGO

    def _end_of_reserved(self, one: Unbound, claim: Claim) -> datetime:
        held = None if one.reserved_pod is None else self._carried(one.reserved_pod)
        if one.reserved_pod is None or held is None or check.still_reserved(claim, held, one.pod) is not None:
            return LONG_AGO
        if not self._suits(claim, held.node):
            return LONG_AGO
        return waiting_since(one.reserved_pod, held) + self._bind_deadline

    def _suits(self, claim: Claim, node: str) -> bool:
        return check.still_proven(claim, node, self._fleet, self._policy) is None


def is_proven_by_claims(pod: Pod, claim: Claim) -> bool:
    """Whether ResourceClaims from our templates give the pod all that it asks for: they are allocated on nodes with
    this hash only, and the end of the node's evidence applies to its Binding.

    By their names: only gpuwarden may write templates with such names (the policy `gpuwarden-gpu-claims`)."""
    templates = [str(one.get("resourceClaimTemplateName") or "") for one in pod.body.resource_claims or ()]
    hashes = {hash for name in templates if (hash := hash_of_template(name)) is not None}
    asked = {hash_attribute(one) for one in claim.hashes}
    return bool(hashes) and not claim.count and (not asked or hashes <= asked)


def uid_of(raw: Raw) -> str:
    return str(raw["metadata"].get("uid"))


def within_the_limit(nodes: Ends, pods: Mapping[str, Ends], max_bytes: int) -> Ends:
    """The ends that fit into the object. A pod that is not listed may be bound, so a namespace whose pods do not all
    fit is closed as a whole. Namespaces with the fewest pods come first: with N namespaces, none that needs at most an
    Nth of the room is closed."""
    found = dict(nodes)
    room = max_bytes - len(msgspec.json.encode(raw_of(nodes, LONG_AGO))) - sum(map(size_of, pods))
    for namespace, ends in sorted(pods.items(), key=lambda one: (len(one[1]), one[0])):
        room -= sum(size_of(uid) for _, uid in ends)
        found |= ends if room >= 0 else {(NAMESPACE, namespace): LONG_AGO}
    return found


def size_of(name: str) -> int:
    return len(name) + ENTRY_BYTES


def raw_of(ends: Ends, kept: datetime | None) -> Raw:
    """The object. Without `kept` the policy does not apply it."""
    spec: Raw = {} if kept is None else {"kept": stamp(kept), "nodes": {}, "namespaces": {}, "pods": {}}
    for (kind, name), end in ends.items():
        spec.setdefault(f"{kind}s", {})[name] = stamp(end)
    return {"apiVersion": "gpuwarden.io/v1alpha1", "kind": "BindingEnds", "metadata": {"name": NAME}, "spec": spec}


async def ensure_binding_ends(objects: ObjectClient) -> None:
    """Creates the object if it is missing: without it the policy refuses every Binding of a scheduler, reviewed or
    not."""
    try:
        await objects.create(raw_of({}, None))
    except LedgerError as exc:
        if not isinstance(exc, StaleError):  # it exists
            log.warning("BindingEnds not created", problem=str(exc))


def moment_of(text: str) -> datetime:
    """A time that cannot be parsed counts as past."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return LONG_AGO
    return found if found.tzinfo is not None else LONG_AGO
