"""Until when pods may be bound without a review, for the policy that decides while no replica answers (binding.yaml).

The policy sees a Binding and not its pod. So two kinds of moments are kept in one object: by node, when its evidence
ends, which holds for every pod that is bound there; by pod, when its own time ends. A node without evidence is not in
it, unless a pod with a claim may still be on its way there. A namespace with more pods than there is room for is in it
in place of its pods: it is closed, and others go on.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import structlog
from attrs import frozen

from webhook.admission.namespaces import ClaimReader
from webhook.admission.placement_maps import opted_in
from webhook.core import check, keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none, strictest_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import nodes_pinned_to
from webhook.core.errors import InvalidPodError, LedgerError
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import Reservation
from webhook.kube.api_objects import ObjectClient
from webhook.kube.store import StaleError
from webhook.kube.view import ObjectView
from webhook.ledger.reconcile import had_since
from webhook.ledger.reserved_pod import ENDED, ReservedPod, ReservedPodWire
from webhook.runtime.clock import LONG_AGO, Clock

log = structlog.get_logger(__name__)

Ends = dict[tuple[str, str], datetime]

NAME = "gpuwarden"
NODE, NAMESPACE, POD = "node", "namespace", "pod"
# It is looked this often whether something cannot wait, and what can is written this often.
AT_ONCE, ROUTINE = timedelta(seconds=1), timedelta(seconds=10)
# An end that is nearer than this cannot wait.
NEAR = timedelta(seconds=30)
# After its evidence has ended a node is closed for so long in any case: a pod that was let in may be on its way.
LINGERS = timedelta(minutes=1)
# In JSON, where etcd takes 1.5 MiB.
LARGEST = 1_400_000
# Of one entry, beside its name: the moment, quotes, colon and comma.
OF_AN_ENTRY = 26


class StoredEnds(msgspec.Struct, frozen=True):
    """What is written. An end that nobody of ours has written is over."""

    kept: str = ""
    nodes: dict[str, str] = {}
    namespaces: dict[str, str] = {}
    pods: dict[str, str] = {}

    @classmethod
    def of(cls, raw: Raw | None) -> "StoredEnds":
        try:
            return msgspec.convert((raw or {}).get("spec") or {}, cls)
        except msgspec.ValidationError:
            return cls()

    def ends(self) -> Ends:
        parts = ((NODE, self.nodes), (NAMESPACE, self.namespaces), (POD, self.pods))
        return {(kind, name): moment_of(text) for kind, texts in parts for name, text in texts.items()}


@frozen
class Unbound:
    """A pod on no node that a scheduler may bind."""

    pod: Pod
    reserved_pod: ReservedPod | None
    # None among them if its affinity leaves it open.
    nodes: frozenset[str | None]
    recorded: Claim | None

    @classmethod
    def of(cls, raw: Raw) -> "Unbound | None":
        """None if it is on a node, has ended, or waits behind our gate, which nobody opens without us."""
        try:
            wire, pod = msgspec.convert(raw, ReservedPodWire), Pod.parse(raw)
        except (msgspec.ValidationError, InvalidPodError):
            return None
        has_ended = wire.status is not None and wire.status.phase in ENDED
        if pod.body.node_name or has_ended or pod.is_gated or not pod.meta.uid:
            return None
        nodes = frozenset(nodes_pinned_to(raw)) or frozenset({None})
        return cls(pod, ReservedPod.of(raw), nodes, recorded_claim_or_none(pod))

    @property
    def namespace(self) -> str:
        return self.pod.meta.namespace or ""

    def may_go_to(self, node: str) -> bool:
        return not self.nodes.isdisjoint({node, None})


class BindingEnds:
    """Hears of pods and namespaces from watches, goes by fleet and ledger, and writes in `step`."""

    def __init__(
        self,
        objects: ObjectClient,
        fleet: Fleet,
        policy: EvidencePolicy,
        claims: ClaimReader,
        carried: Callable[[ReservedPod], Reservation | None],
        bind_deadline: timedelta,
        clock: Clock,
        is_current: Callable[[], bool],
        opt_in: str = keys.OPT_IN.name,
    ) -> None:
        """`carried`: the reservation that a ledger knows of what a pod says it carries."""
        # Whether the policy judges Bindings there.
        self.namespaces: ObjectView[bool] = ObjectView(partial(opted_in, opt_in=opt_in))
        self._objects = objects
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._carried = carried
        self._bind_deadline = bind_deadline
        self._clock = clock
        self._is_current = is_current
        self._unbound: dict[str, Unbound] = {}
        self._read_of: dict[str, tuple[ClaimRules, Claim | InvalidPodError | None]] = {}
        self._raw: Raw | None = None
        self._written: Ends | None = None  # None: to be read first
        self._is_kept = False
        self._is_told = False  # that the list is not stored whole
        self._looked_at = self._wrote_at = LONG_AGO
        self._were_fresh: set[str] = set()
        self._closed_at: dict[str, datetime] = {}  # nodes that had evidence, since when they have none

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        found = ((uid_of(raw), Unbound.of(raw)) for raw in objects.values())
        self._unbound = {uid: one for uid, one in found if one is not None}
        self._read_of.clear()

    def changed(self, raw: Raw) -> None:
        one = Unbound.of(raw)
        self.deleted(raw)
        if one is not None:
            self._unbound[uid_of(raw)] = one

    def deleted(self, raw: Raw) -> None:
        self._unbound.pop(uid_of(raw), None)
        self._read_of.pop(uid_of(raw), None)

    # What others ask.

    def is_closed(self, uid: str) -> bool:
        """Whether it is written that this pod may be bound no more, replica or no replica. Where Bindings are not
        judged, because the namespace has opted out since, it may be bound at any time."""
        one = self._unbound.get(uid)
        if one is not None and not self._is_judged(one):
            return False
        written, now = self._written or {}, self._clock()
        places = ((POD, uid), (NAMESPACE, "" if one is None else one.namespace))
        return self._is_kept and any(written[place] <= now for place in places if place in written)

    # What is written.

    def begin(self) -> None:
        """Elected: another leader has written since."""
        self._written = None

    async def step(self) -> None:
        """One pass. What cannot be written now is tried again in the next one."""
        now = self._clock()
        if not self._is_current() or now - self._looked_at < AT_ONCE:
            return
        self._looked_at = now
        try:
            if self._written is None or now - self._wrote_at >= ROUTINE:
                await self._read()
            await self._settle(now)
        except LedgerError as exc:
            self._written = None
            log.warning("ends of evidence not written for the time without us", problem=str(exc))

    async def _read(self) -> None:
        """It may have been deleted, or written by another leader."""
        self._raw = await self._objects.get(NAME)
        kept = StoredEnds.of(self._raw)
        self._written, self._is_kept = kept.ends(), bool(kept.kept)

    async def _settle(self, now: datetime) -> None:
        written = self._written or {}
        self._fleet.advance(now)
        judged = [one for one in self._unbound.values() if self._is_judged(one)]
        wanted = within_the_limit(self._nodes(written, now, judged), self._pods(judged))
        is_due = now - self._wrote_at >= ROUTINE and (wanted != written or not self._is_kept)
        if is_due or any(self._is_urgent(written, wanted, now)):
            await self._write(wanted, now)

    def _is_urgent(self, written: Ends, wanted: Ends, now: datetime) -> Iterator[bool]:
        """What would let a pod through that may be too late."""
        for key, end in wanted.items():
            yield end < written.get(key, end + NEAR) and (end - now < NEAR or self._is_new_node(written, key))

    def _is_new_node(self, written: Ends, key: tuple[str, str]) -> bool:
        return key not in written and key[0] == NODE

    async def _write(self, wanted: Ends, now: datetime) -> None:
        """A list that is not kept so far is stored without `kept` first: nothing may go by one that is cut."""
        self._wrote_at = now
        raw = raw_of(wanted, now)
        unkept = {**raw, "spec": {part: said for part, said in raw["spec"].items() if part != "kept"}}
        if len(msgspec.json.encode(raw)) > LARGEST:
            log.error("too many ends of evidence: no pod is bound while no replica answers", entries=len(wanted))
            await self._stores(raw_of({}, None))
            is_kept = False
        else:
            is_kept = (self._is_kept or await self._stores(unkept)) and await self._stores(raw)
            if is_kept:
                self._tell_closed(wanted)
            elif StoredEnds.of(self._raw).kept:
                await self._stores(unkept)
        self._written, self._is_kept = wanted, is_kept

    async def _stores(self, raw: Raw) -> bool:
        """Whether it is stored as it was sent: what its definition does not have, the API server leaves out."""
        if self._raw is None:
            self._raw = await self._objects.create(raw)
        else:
            self._raw = await self._objects.replace({**self._raw, "spec": raw["spec"]})
        sent, stored = StoredEnds.of(raw), StoredEnds.of(self._raw)
        if sent != stored and not self._is_told:
            parts = [part for part in StoredEnds.__struct_fields__ if getattr(sent, part) != getattr(stored, part)]
            log.error(
                "ends of evidence are not stored whole, so no pod is bound while no replica answers: "
                "apply the CRDs of this version",
                parts=parts,
            )
        self._is_told = sent != stored
        return sent == stored

    def _tell_closed(self, wanted: Ends) -> None:
        closed = sorted(name for kind, name in wanted if kind == NAMESPACE)
        if closed and any((NAMESPACE, name) not in (self._written or {}) for name in closed):
            log.warning(
                "too many pods with a claim: none of these is bound while no replica answers", namespaces=closed
            )

    def _is_judged(self, one: Unbound) -> bool:
        """A namespace that nobody has told of may have come with its first pods."""
        return self.namespaces.get(one.namespace) is not False

    def _nodes(self, written: Ends, now: datetime, judged: Iterable[Unbound]) -> Ends:
        indexed_nodes = self._fleet.indexed_nodes
        fresh = {name for name, indexed in indexed_nodes.items() if indexed.state is EvidenceState.FRESH}
        had = {name for kind, name in written if kind == NODE} | self._closed_at.keys() | self._were_fresh
        self._were_fresh = fresh
        on_their_way = [one for one in judged if self._has_claim(one)]
        closed = {name: self._closed_at.get(name, now) for name in had - fresh}
        self._closed_at = {
            name: since
            for name, since in closed.items()
            if now - since < LINGERS or any(one.may_go_to(name) for one in on_their_way)
        }
        said = {name: indexed_nodes[name].evidence for name in fresh}
        ends = {name: one.until for name, one in said.items() if one is not None and one.until is not None}
        return {(NODE, name): whole(end) for name, end in (ends | dict.fromkeys(self._closed_at, LONG_AGO)).items()}

    def _pods(self, judged: Iterable[Unbound]) -> dict[str, Ends]:
        """By namespace."""
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
        """What it asks for itself, read once for as long as it is read alike. Raises InvalidPodError."""
        rules, uid = self._claims.known_within(one.namespace), one.pod.meta.uid or ""
        known = self._read_of.get(uid)
        if known is None or known[0] != rules:
            try:
                known = rules, claim_of(one.pod, rules)
            except InvalidPodError as exc:
                known = rules, exc
            self._read_of[uid] = known
        if isinstance(known[1], InvalidPodError):
            raise known[1].with_traceback(None)
        return known[1]

    def _end_of(self, one: Unbound) -> datetime | None:
        """None for a pod that its node alone decides about: one without a claim, or held to proven nodes."""
        recorded = one.recorded
        try:
            if recorded is not None and recorded.count:
                return self._end_of_reserved(one, recorded)
            asked = self._asked(one)
        except InvalidPodError:
            return LONG_AGO
        claim = asked if recorded is None else strictest_claim(recorded, asked)
        if claim is None:
            return None if recorded is None else LONG_AGO
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
        return had_since(one.reserved_pod, held) + self._bind_deadline

    def _suits(self, claim: Claim, node: str) -> bool:
        return check.still_proven(claim, node, self._fleet, self._policy) is None


def uid_of(raw: Raw) -> str:
    return str(raw["metadata"].get("uid"))


def within_the_limit(nodes: Ends, pods: Mapping[str, Ends]) -> Ends:
    """Pods that are not listed may be bound. So where there is no room for all of a namespace's, it is closed whole.
    Those with the fewest come first: of N namespaces none is closed whose pods take an Nth of the room, or less."""
    found = dict(nodes)
    room = LARGEST - len(msgspec.json.encode(raw_of(nodes, LONG_AGO))) - sum(map(size_of, pods))
    for namespace, ends in sorted(pods.items(), key=lambda one: (len(one[1]), one[0])):
        room -= sum(size_of(uid) for _, uid in ends)
        found |= ends if room >= 0 else {(NAMESPACE, namespace): LONG_AGO}
    return found


def size_of(name: str) -> int:
    return len(name) + OF_AN_ENTRY


def raw_of(ends: Ends, kept: datetime | None) -> Raw:
    """An object without `kept` is none that anybody keeps."""
    spec: Raw = {} if kept is None else {"kept": stamp(kept), "nodes": {}, "namespaces": {}, "pods": {}}
    for (kind, name), end in ends.items():
        spec[f"{kind}s"][name] = stamp(end)
    return {"apiVersion": "gpuwarden.io/v1alpha1", "kind": "BindingEnds", "metadata": {"name": NAME}, "spec": spec}


async def ensure_binding_ends(objects: ObjectClient) -> None:
    """The policy refuses every Binding of a scheduler while there is no such object, reviewed or not."""
    try:
        await objects.create(raw_of({}, None))
    except LedgerError as exc:
        if not isinstance(exc, StaleError):  # there is one
            log.warning("no ends of evidence could be written", problem=str(exc))


def whole(moment: datetime) -> datetime:
    """The second before, if it is within one: too early is safe."""
    return moment.replace(microsecond=0)


def stamp(moment: datetime) -> str:
    return whole(moment.astimezone(UTC)).isoformat().replace("+00:00", "Z")


def moment_of(text: str) -> datetime:
    """What nobody of ours has written is over."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return LONG_AGO
    return found if found.tzinfo is not None else LONG_AGO
