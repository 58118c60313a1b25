"""Until when pods may be bound without a review, for the policy that decides while no replica answers (binding.yaml).

The policy sees a Binding and not its pod. So two kinds of moments are kept in one object: by node, when its evidence
ends, which holds for every pod that is bound there; by pod, when its own time ends. A node without evidence is not in
it, unless a pod with a claim may still be on its way there.
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import structlog
from attrs import frozen

from webhook.api_objects import Objects
from webhook.clock import LONG_AGO, Clock
from webhook.core import check
from webhook.core.claim import Claim, believed, claim_of, recorded_or_none
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import nodes_pinned_to
from webhook.core.errors import InvalidPodError, LedgerError
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import Reservation
from webhook.ledger.carrier import ENDED, Carrier, PodWire
from webhook.ledger.reconcile import had_since
from webhook.ledger.store import StaleError
from webhook.namespaces import ClaimReading

log = structlog.get_logger(__name__)

Raw = dict[str, Any]
Ends = dict[tuple[str, str], datetime]

NAME = "gpuwarden"
NODE, POD = "node", "pod"
# It is looked this often whether something cannot wait, and what can is written this often.
AT_ONCE, ROUTINE = timedelta(seconds=1), timedelta(seconds=10)
# An end that is nearer than this cannot wait.
NEAR = timedelta(seconds=30)
# After its evidence has ended a node is closed for so long in any case: a pod that was let in may be on its way.
LINGERS = timedelta(minutes=1)
# In JSON, where etcd takes 1.5 MiB.
LARGEST = 1_400_000


class Kept(msgspec.Struct, frozen=True):
    """What is written. An end that nobody of ours has written is over."""

    kept: str = ""
    nodes: dict[str, str] = {}
    pods: dict[str, str] = {}

    @classmethod
    def of(cls, raw: Raw | None) -> "Kept":
        try:
            return msgspec.convert((raw or {}).get("spec") or {}, cls)
        except msgspec.ValidationError:
            return cls()

    def ends(self) -> Ends:
        nodes = {(NODE, name): moment_of(text) for name, text in self.nodes.items()}
        return nodes | {(POD, uid): moment_of(text) for uid, text in self.pods.items()}


@frozen
class Unbound:
    """A pod on no node that a scheduler may bind."""

    pod: Pod
    carrier: Carrier | None
    # None among them if its affinity leaves it open.
    nodes: frozenset[str | None]

    @classmethod
    def of(cls, raw: Raw) -> "Unbound | None":
        """None if it is on a node, has ended, or waits behind our gate, which nobody opens without us."""
        try:
            wire, pod = msgspec.convert(raw, PodWire), Pod.parse(raw)
        except (msgspec.ValidationError, InvalidPodError):
            return None
        has_ended = wire.status is not None and wire.status.phase in ENDED
        if pod.body.node_name or has_ended or pod.is_gated or not pod.meta.uid:
            return None
        return cls(pod, Carrier.of(raw), frozenset(nodes_pinned_to(raw)) or frozenset({None}))

    def may_go_to(self, node: str) -> bool:
        return not self.nodes.isdisjoint({node, None})


class BindingEnds:
    """Hears of pods from a watch, goes by fleet and ledger, and writes in `step`."""

    def __init__(
        self,
        objects: Objects,
        fleet: Fleet,
        policy: EvidencePolicy,
        claims: ClaimReading,
        carried: Callable[[Carrier], Reservation | None],
        bind_deadline: timedelta,
        clock: Clock,
        is_current: Callable[[], bool],
    ) -> None:
        """`carried`: the reservation that a ledger knows of what a pod says it carries."""
        self._objects = objects
        self._fleet = fleet
        self._policy = policy
        self._claims = claims
        self._carried = carried
        self._bind_deadline = bind_deadline
        self._clock = clock
        self._is_current = is_current
        self._unbound: dict[str, Unbound] = {}
        self._raw: Raw | None = None
        self._written: Ends | None = None  # None: to be read first
        self._is_kept = False
        self._looked_at = self._wrote_at = LONG_AGO
        self._were_fresh: set[str] = set()
        self._closed_at: dict[str, datetime] = {}  # nodes that had evidence, since when they have none

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        found = ((uid_of(raw), Unbound.of(raw)) for raw in objects.values())
        self._unbound = {uid: one for uid, one in found if one is not None}

    def changed(self, raw: Raw) -> None:
        one = Unbound.of(raw)
        if one is None:
            self.deleted(raw)
        else:
            self._unbound[uid_of(raw)] = one

    def deleted(self, raw: Raw) -> None:
        self._unbound.pop(uid_of(raw), None)

    # What others ask.

    def is_closed(self, uid: str) -> bool:
        """Whether it is written that this pod may be bound no more, replica or no replica."""
        end = None if self._written is None else self._written.get((POD, uid))
        return self._is_kept and end is not None and end <= self._clock()

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
        kept = Kept.of(self._raw)
        self._written, self._is_kept = kept.ends(), bool(kept.kept)

    async def _settle(self, now: datetime) -> None:
        written = self._written or {}
        self._fleet.advance(now)
        wanted = self._nodes(written, now) | self._pods()
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
        self._wrote_at = now
        raw = raw_of(wanted, now)
        if len(msgspec.json.encode(raw)) > LARGEST:
            log.error("too many ends of evidence: no pod is bound while no replica answers", entries=len(wanted))
            raw = raw_of({}, None)
        if self._raw is None:
            self._raw = await self._objects.create(raw)
        else:
            self._raw = await self._objects.replace({**self._raw, "spec": raw["spec"]})
        self._written, self._is_kept = wanted, "kept" in raw["spec"]

    def _nodes(self, written: Ends, now: datetime) -> Ends:
        berths = self._fleet.berths
        fresh = {name for name, berth in berths.items() if berth.state is EvidenceState.FRESH}
        had = {name for kind, name in written if kind == NODE} | self._closed_at.keys() | self._were_fresh
        self._were_fresh = fresh
        on_their_way = [one for one in self._unbound.values() if self._has_claim(one)]
        closed = {name: self._closed_at.get(name, now) for name in had - fresh}
        self._closed_at = {
            name: since
            for name, since in closed.items()
            if now - since < LINGERS or any(one.may_go_to(name) for one in on_their_way)
        }
        said = {name: berths[name].evidence for name in fresh}
        ends = {name: one.until for name, one in said.items() if one is not None and one.until is not None}
        return {(NODE, name): whole(end) for name, end in (ends | dict.fromkeys(self._closed_at, LONG_AGO)).items()}

    def _pods(self) -> Ends:
        ends = {uid: self._end_of(one) for uid, one in self._unbound.items()}
        return {(POD, uid): whole(end) for uid, end in ends.items() if end is not None}

    def _has_claim(self, one: Unbound) -> bool:
        try:
            return recorded_or_none(one.pod) is not None or self._asked(one) is not None
        except InvalidPodError:
            return True

    def _asked(self, one: Unbound) -> Claim | None:
        """What it asks for itself. Raises InvalidPodError."""
        return claim_of(one.pod, self._claims.known_within(one.pod.meta.namespace or ""))

    def _end_of(self, one: Unbound) -> datetime | None:
        """None for a pod that its node alone decides about: one without a claim, or held to proven nodes."""
        recorded = recorded_or_none(one.pod)
        try:
            if recorded is not None and recorded.count:
                return self._end_of_reserved(one, recorded)
            asked = self._asked(one)
        except InvalidPodError:
            return LONG_AGO
        claim = asked if recorded is None else believed(recorded, asked)
        if claim is None:
            return None if recorded is None else LONG_AGO
        if recorded is None and not claim.count and not claim.hashes and not self._policy.is_always_required:
            return None
        nodes = [node for node in one.nodes if node is not None]
        is_held = None not in one.nodes and any(self._suits(claim, node) for node in nodes)
        return None if recorded is not None and is_held else LONG_AGO

    def _end_of_reserved(self, one: Unbound, claim: Claim) -> datetime:
        held = None if one.carrier is None else self._carried(one.carrier)
        if one.carrier is None or held is None or check.still_held(claim, held, one.pod) is not None:
            return LONG_AGO
        if not self._suits(claim, held.node):
            return LONG_AGO
        return had_since(one.carrier, held) + self._bind_deadline

    def _suits(self, claim: Claim, node: str) -> bool:
        return check.still_proven(claim, node, self._fleet, self._policy) is None


def uid_of(raw: Raw) -> str:
    return str(raw["metadata"].get("uid"))


def raw_of(ends: Ends, kept: datetime | None) -> Raw:
    """An object without `kept` is none that anybody keeps."""
    spec: Raw = {} if kept is None else {"kept": stamp(kept), "nodes": {}, "pods": {}}
    for (kind, name), end in ends.items():
        spec[f"{kind}s"][name] = stamp(end)
    return {"apiVersion": "gpuwarden.io/v1alpha1", "kind": "BindingEnds", "metadata": {"name": NAME}, "spec": spec}


async def ensure_binding_ends(objects: Objects) -> None:
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
