"""The index gives the same answers as a scan of all nodes, after every change."""

import string
from collections.abc import Callable
from datetime import timedelta

import pytest
from attrs import evolve
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.builders import (
    HASH,
    NOW,
    OTHER_HASH,
    SECOND,
    claim,
    device,
    evidence,
    fleet,
    node,
    raw_container,
    raw_pod,
    reservation,
    slot,
)
from tests.core.scan import World
from webhook.core.claim import MAX_PROVEN_NODES, Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import MAX_NODE_CHECKS, MAX_PLACEMENTS, EvidencePolicy, decide, explain
from webhook.core.device import CLAIMED, Device, DeviceUuid, Node, Taint
from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.fleet import MAX_CLASS_VALUES, Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.nodes_asked import Expression, NodesAsked, NodeTerm
from webhook.core.pod import Toleration
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny

MAP_OWNER = MapOwner("2026-01-01", SetId("uid-of-a-set", "ml"))

# A small fleet, so that generated changes interact: six nodes, eight UUIDs that can be on any of them.
NAMES = tuple(f"node-{letter}" for letter in string.ascii_lowercase[:6])
UUIDS = tuple(f"GPU-{n}" for n in range(8))
DEVICE_LABELS = ("model=h100", "model=a100", "fudo.org/gpu.big")
HASHES = (HASH, OTHER_HASH)
NODE_LABELS = {"zone": ("a", "b"), "rank": ("1", "5", "10", "x"), "gpu-node-name": ("rack-1", "node-a")}
ASKED_VALUES = {**NODE_LABELS, "rank": ("5",), "unused-label": ("a",)}

labels = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in NODE_LABELS.items()})
taints = st.lists(
    st.builds(
        Taint, st.sampled_from(["gpu", "dark"]), st.just(""), st.sampled_from(["NoSchedule", "PreferNoSchedule"])
    ),
    max_size=2,
).map(tuple)


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, ...]:
    uuids = draw(st.lists(st.sampled_from(UUIDS), unique=True, max_size=4))
    return tuple(
        Device(
            DeviceUuid(uuid),
            index=index,
            labels=draw(st.frozensets(st.sampled_from(DEVICE_LABELS))),
            shares=draw(st.sampled_from([1, 1, 1, 2, 3])),
            is_healthy=draw(st.sampled_from([True, True, True, False])),
            mismatch=draw(st.sampled_from(["", "", "", "in use"])),
        )
        for index, uuid in enumerate(uuids)
    )


nodes = st.builds(
    Node,
    st.sampled_from(NAMES),
    labels,
    devices(),
    is_ready=st.sampled_from([True, True, True, False]),
    is_cordoned=st.sampled_from([False, False, False, True]),
    is_refused_for_plugin=st.sampled_from([False, False, False, True]),
    taints=taints,
)

expressions = st.sampled_from(sorted(ASKED_VALUES)).flatmap(
    lambda key: st.one_of(
        st.builds(
            Expression,
            st.just(key),
            st.sampled_from(["In", "NotIn"]),
            st.frozensets(st.sampled_from(ASKED_VALUES[key]), min_size=1),
        ),
        st.builds(Expression, st.just(key), st.sampled_from(["Exists", "DoesNotExist"]), st.just(frozenset[str]())),
        st.builds(Expression, st.just("rank"), st.sampled_from(["Gt", "Lt"]), st.just(frozenset({"5"}))),
    )
)
fields = st.builds(
    Expression,
    st.just("metadata.name"),
    st.sampled_from(["In", "NotIn"]),
    st.sampled_from(NAMES).map(lambda n: frozenset({n})),
)
terms = st.builds(NodeTerm, st.lists(expressions, max_size=2).map(tuple), st.lists(fields, max_size=1).map(tuple))
tolerations = st.lists(
    st.builds(Toleration, key=st.sampled_from(["gpu", "dark"]), operator=st.just("Exists")), max_size=2
).map(tuple)
node_constraints = st.builds(
    NodesAsked,
    node_name=st.one_of(st.none(), st.none(), st.none(), st.sampled_from(NAMES)),
    selector=st.one_of(
        st.just(()),
        st.sampled_from(sorted(ASKED_VALUES)).flatmap(
            lambda key: st.sampled_from(ASKED_VALUES[key]).map(lambda value: ((key, value),))
        ),
    ),
    terms=st.one_of(st.none(), st.none(), st.lists(terms, max_size=2).map(tuple)),
    tolerations=tolerations,
)

plain_records = st.builds(
    ClaimRecord,
    gpus=st.integers(0, 4),
    hashes=st.lists(st.sampled_from(HASHES), unique=True).map(lambda some: tuple(sorted(some))),
    requirements=st.lists(st.sampled_from(DEVICE_LABELS), unique=True, max_size=2).map(
        lambda some: tuple(sorted(some))
    ),
    shared=st.booleans(),
)


@st.composite
def mapped_records(draw: st.DrawFn) -> ClaimRecord:
    by_uuid = draw(st.booleans())
    gpus = draw(
        st.lists(st.sampled_from(UUIDS if by_uuid else ("0", "1", "2", "3")), unique=True, min_size=1, max_size=2)
    )
    return ClaimRecord(
        gpus=len(gpus),
        node=draw(st.sampled_from(("rack-1", *NAMES))),
        devices=tuple(gpus),
        shared=draw(st.booleans()),
        hashes=draw(st.sampled_from(((), (HASH,)))),
    )


claims = st.builds(Claim, st.one_of(plain_records, plain_records, mapped_records()), node_constraints)


@st.composite
def evidence_parts(draw: st.DrawFn) -> tuple[str, int | None, int | None, bool, bool]:
    """Generated evidence; times are seconds from now."""
    seconds = st.one_of(st.none(), st.integers(-2, 6))
    rarely = st.sampled_from([False] * 7 + [True])
    return draw(st.sampled_from(HASHES)), draw(seconds), draw(seconds), draw(rarely), draw(rarely)


ALWAYS = (
    Claim(ClaimRecord(gpus=1)),
    Claim(ClaimRecord(gpus=2, hashes=(HASH,), requirements=("model=h100",))),
    Claim(ClaimRecord(gpus=1, shared=True)),
    Claim(ClaimRecord(gpus=1), NodesAsked(selector=(("zone", "a"),))),
)


class IndexedFleet(RuleBasedStateMachine):
    """The fleet and a plain list of facts. After each change both must give the same answer to every claim."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.world = World(NOW)
        self.policy = EvidencePolicy()
        self.made = 0

    @initialize(needs_evidence=st.booleans(), first=st.lists(nodes, max_size=4))
    def begin(self, needs_evidence: bool, first: list[Node]) -> None:
        self.policy = EvidencePolicy(is_always_required=needs_evidence)
        self.world.needs_evidence = needs_evidence
        for one in first:
            self.put(one)

    # Changes.

    @rule(one=nodes)
    def put(self, one: Node) -> None:
        self.fleet.put(one, self.world.now)
        self.world.nodes[one.name] = one

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.fleet.remove(name)
        self.world.nodes.pop(name, None)
        self.world.evidence.pop(name, None)

    @rule(name=st.sampled_from(NAMES), word=evidence_parts())
    def set_evidence(self, name: str, word: tuple[str, int | None, int | None, bool, bool]) -> None:
        digest, since, until, is_banned, is_conflict = word
        self._set_evidence(
            name,
            evidence(
                name,
                digest,
                since=None if since is None else self.world.now + timedelta(seconds=since),
                until=None if until is None else self.world.now + timedelta(seconds=until),
                is_banned=is_banned,
                is_conflict=is_conflict,
            ),
        )

    @rule(name=st.sampled_from(NAMES))
    def withdraw_evidence(self, name: str) -> None:
        self._set_evidence(name, None)

    def _set_evidence(self, name: str, word: Evidence | None) -> None:
        self.fleet.set_evidence(name, word, self.world.now)
        if name in self.world.nodes and word is not None:
            self.world.evidence[name] = word
        else:
            self.world.evidence.pop(name, None)

    @rule(seconds=st.integers(1, 3))
    def let_time_pass(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)
        self.fleet.advance(self.world.now)

    @rule(one=claims, choice=st.integers(0, 7))
    def decide_and_hold(self, one: Claim, choice: int) -> None:
        placements = self.agree(one)
        if isinstance(placements, Deny) or not one.count:
            return
        placement = placements[choice % len(placements)]
        self.made += 1
        held = reservation(*placement.slots, id=f"r-{self.made}", node=placement.node, is_shared=one.is_shared)
        self.fleet.hold(held)
        self.world.reservations.append(held)

    @rule(one=claims)
    def ask(self, one: Claim) -> None:
        self.agree(one)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.world.reservations:
            gone = data.draw(st.sampled_from(self.world.reservations))
            self.world.reservations.remove(gone)
            self.fleet.free(gone)

    @rule(data=st.data())
    def late_release_frees_no_other_reservation(self, data: st.DataObject) -> None:
        if self.world.reservations:
            held = data.draw(st.sampled_from(self.world.reservations))
            self.fleet.free(reservation(*held.slots, id="long-gone", node=held.node))

    # Invariants.

    def agree(self, one: Claim) -> tuple[Placement, ...] | Deny:
        found = decide(one, self.fleet, self.policy)
        fitting = self.world.fitting(one)
        if isinstance(found, Deny):
            assert fitting == set(), found.sentence
            assert found.causes == self.world.causes(one)
            assert f" of {len(self.world.nodes)} node" in found.message
        else:
            assert [self.world.flaws(placement, one) for placement in found] == [[]] * len(found)
            terms_asked = max(1, len(one.nodes.terms or ()))
            limit = MAX_PLACEMENTS if one.count else MAX_PROVEN_NODES // terms_asked
            names = [placement.node for placement in found]
            assert len(set(names)) == len(names) == min(limit, len(fitting))
        return found

    @invariant()
    def common_claims_get_the_same_answer(self) -> None:
        for one in ALWAYS:
            self.agree(one)

    @invariant()
    def explain_gives_the_same_answer(self) -> None:
        fits = {fit.name: fit for fit in explain(ALWAYS[1], self.fleet, self.policy)}
        assert {name for name, fit in fits.items() if fit.fits} == self.world.fitting(ALWAYS[1])
        assert {name: fit.objection.text_for(ALWAYS[1]) if fit.objection else None for name, fit in fits.items()} == {
            one.name: self.world.objection(one, ALWAYS[1]) for one in self.world.nodes.values()
        }

    @invariant()
    def each_node_has_its_narrowest_row(self) -> None:
        for name, indexed in self.fleet.indexed_nodes.items():
            proven = indexed.evidence if indexed.state is EvidenceState.FRESH else None
            group = (indexed.state, None if proven is None else proven.hash)
            assert indexed.row is self.fleet.rows(group)[indexed.node_group.node_class]
            assert name in indexed.row.shapes[indexed.node_group.shape]

    @invariant()
    def no_slot_is_held_twice(self) -> None:
        held = self.world.held()
        assert len(set(held)) == len(held)
        known = {(uuid, k): r for uuid in UUIDS for k, r in self.fleet.holders(DeviceUuid(uuid)).items()}
        assert known == {(s.uuid, s.k): r.id for r in self.world.reservations for s in r.slots}

    @invariant()
    def totals_are_correct(self) -> None:
        assert self.fleet.device_count == len({d.uuid for one in self.world.nodes.values() for d in one.devices})
        assert sum(self.fleet.states.values()) == len(self.world.nodes)
        fresh = [
            n
            for n in self.world.nodes.values()
            if self.world.evidence_objection(n, ALWAYS[1]) in (None, "a different hash")
        ]
        assert self.fleet.states[EvidenceState.FRESH] == len(fresh)

    @invariant()
    def device_on_two_nodes_is_quarantined(self) -> None:
        for uuid in map(DeviceUuid, UUIDS):
            node_names = self.world.nodes_with(uuid)
            unhealthy = any(d.uuid == uuid and not d.is_usable for n in self.world.nodes.values() for d in n.devices)
            if len(node_names) != 1 or not unhealthy:
                assert self.fleet.is_quarantined(uuid) is (len(node_names) != 1)
            assert (self.fleet.node_of_device(uuid) is None) is (node_names == [])


IndexedFleet.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestIndexedFleet = pytest.mark.defect("assigner-10")(IndexedFleet.TestCase)


# A label with more values has a directory instead of classes; these nodes have one value each.
MANY = 260
OWN_VALUES = ("h-0", "h-1", "h-own")
host_expressions = st.one_of(
    st.builds(
        Expression,
        st.just("host"),
        st.sampled_from(["In", "NotIn"]),
        st.frozensets(st.sampled_from([*OWN_VALUES, "h-unused"]), min_size=1),
    ),
    st.builds(Expression, st.just("host"), st.sampled_from(["Exists", "DoesNotExist"]), st.just(frozenset[str]())),
)
host_terms = st.builds(
    NodeTerm, st.lists(st.one_of(host_expressions, expressions), min_size=1, max_size=2).map(tuple), st.just(())
)
host_constraints = st.one_of(
    st.builds(NodesAsked, terms=st.lists(host_terms, min_size=1, max_size=2).map(tuple)),
    st.builds(NodesAsked, selector=st.sampled_from([*OWN_VALUES, "h-unused"]).map(lambda v: (("host", v),))),
)


class FleetOfManyLabelValues(IndexedFleet):
    """The same invariants for a label with a value per node, indexed before or after the nodes are added."""

    @initialize()
    def add_crowd(self) -> None:
        for number in range(MANY):
            self.put(Node(f"crowd-{number}", {"host": f"h-{number}"}))

    @rule(one=nodes, value=st.sampled_from(OWN_VALUES))
    def put_with_a_host_label(self, one: Node, value: str) -> None:
        self.put(Node(one.name, {**one.labels, "host": value}, one.devices, taints=one.taints))

    @rule(number=st.integers(0, 2), value=st.sampled_from(["h-own", None]))
    def relabel_one_of_the_crowd(self, number: int, value: str | None) -> None:
        self.put(Node(f"crowd-{number}", {} if value is None else {"host": value}))

    @rule(number=st.integers(0, 2))
    def remove_one_of_the_crowd(self, number: int) -> None:
        self.remove(f"crowd-{number}")

    @rule(record=plain_records, constraints=host_constraints)
    def ask_by_host(self, record: ClaimRecord, constraints: NodesAsked) -> None:
        self.agree(Claim(record, constraints))


FleetOfManyLabelValues.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFleetOfManyLabelValues = FleetOfManyLabelValues.TestCase


# Few, so that a second node soon lists a GPU of a map, and either drops it.
FEW_NAMES, FEW_UUIDS = NAMES[:3], UUIDS[:3]


@st.composite
def claimants(draw: st.DrawFn) -> Node:
    """A node may list a UUID twice."""
    uuids = draw(st.lists(st.sampled_from(FEW_UUIDS), max_size=3))
    label = draw(st.sampled_from((None, "rack-1", *FEW_NAMES)))
    devices = tuple(Device(DeviceUuid(uuid), index=index) for index, uuid in enumerate(uuids))
    return Node(draw(st.sampled_from(FEW_NAMES)), {} if label is None else {"gpu-node-name": label}, devices)


class FleetOfMaps(RuleBasedStateMachine):
    """What maps set aside, while UUIDs become disputed and undisputed."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.world = World(NOW)

    @rule(one=claimants())
    def put(self, one: Node) -> None:
        self.fleet.put(one, NOW)
        self.world.nodes[one.name] = one

    @rule(name=st.sampled_from(FEW_NAMES))
    def remove(self, name: str) -> None:
        self.fleet.remove(name)
        self.world.nodes.pop(name, None)

    @rule(name=st.sampled_from(("rack-1", *FEW_NAMES)), gpus=st.sets(st.sampled_from((*FEW_UUIDS, "0", "1"))))
    def map(self, name: str, gpus: set[str]) -> None:
        """GPUs that were set aside before are not any more."""
        self.world.mapped[name] = gpus
        mapped = {name: dict.fromkeys(gpus, MAP_OWNER) for name, gpus in self.world.mapped.items()}
        self.fleet.set_aside(mapped, {name})

    @invariant()
    def only_mapped_gpus_are_set_aside(self) -> None:
        alone = [
            d
            for one in self.world.nodes.values()
            for d in one.devices
            if len(self.fleet.nodes_with_device(d.uuid)) == 1
        ]
        expected = {one.uuid for one in alone if self.world.is_set_aside(one)}
        disputed = {uuid for uuid in map(DeviceUuid, FEW_UUIDS) if len(self.fleet.nodes_with_device(uuid)) > 1}
        assert self.fleet.set_aside_devices - disputed == expected

    @invariant()
    def other_gpus_are_offered(self) -> None:
        found = decide(ANY, self.fleet, LAX)
        placed = set() if isinstance(found, Deny) else {placement.node for placement in found}
        each = {
            name
            for name, one in self.world.nodes.items()
            if any(len(self.fleet.nodes_with_device(d.uuid)) == 1 and self.world.is_available(d) for d in one.devices)
        }
        assert placed == each


FleetOfMaps.TestCase.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
TestFleetOfMaps = FleetOfMaps.TestCase


# Literal cases.

ANY = Claim(ClaimRecord(gpus=1))
LAX = EvidencePolicy()


def group_count(there: Fleet) -> int:
    """The number of groups that a decision may visit."""
    return sum(len(row.shapes) for rows in there._groups.values() for row in rows.values())


def crowd(size: int, **values: int) -> Fleet:
    """Nodes with one GPU each; each label has the given number of values."""
    made = []
    for number in range(size):
        spread = {key: str((number * 7919 >> shift) % many) for shift, (key, many) in enumerate(values.items())}
        made.append(node(f"node-{number}", device(f"GPU-{number}"), labels=spread))
    return fleet(*made)


def by_label(key: str, value: str) -> Claim:
    return Claim(ClaimRecord(gpus=1), NodesAsked(selector=((key, value),)))


def test_nodes_that_no_claim_distinguishes_share_a_group() -> None:
    assert group_count(crowd(500, zone=3)) == 1


def test_label_is_indexed_when_a_claim_first_uses_it() -> None:
    there = crowd(30, zone=3)
    found = decide(by_label("zone", "1"), there, LAX)
    assert not isinstance(found, Deny)
    assert {there.indexed_nodes[placement.node].labels["zone"] for placement in found} == {"1"}
    assert group_count(there) == 3


def test_label_that_no_node_has_is_not_indexed() -> None:
    there = crowd(30, zone=3)
    assert isinstance(decide(by_label("unused-label", "1"), there, LAX), Deny)
    assert group_count(there) == 1


def test_label_that_nodes_get_after_its_first_use_is_indexed_then() -> None:
    there = crowd(3)
    asked = by_label("late", "yes")
    assert isinstance(decide(asked, there, LAX), Deny)
    there.put(node("node-1", device("GPU-1"), labels={"late": "yes"}), NOW)
    found = decide(asked, there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-1"]


def test_a_label_with_as_many_values_as_nodes_does_not_split_the_fleet() -> None:
    there = crowd(MAX_CLASS_VALUES + 1, host=10_000)
    found = decide(by_label("host", "0"), there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-0"]
    assert group_count(there) == 1


def test_label_indexed_in_a_small_fleet_does_not_split_the_large_fleet() -> None:
    there = crowd(100, host=10_000)
    decide(by_label("host", "0"), there, LAX)
    for number in range(100, 1000):
        there.put(node(f"node-{number}", device(f"GPU-{number}"), labels={"host": f"h-{number}"}), NOW)
    decide(ANY, there, LAX)
    assert group_count(there) < 500


def test_claims_with_many_labels_do_not_split_the_fleet() -> None:
    there = crowd(2000, a=200, b=200, c=200, d=200)
    for key in "abcd":
        decide(by_label(key, "1"), there, LAX)
    assert group_count(there) < 1000


def test_fleet_with_too_many_classes_gives_correct_answers() -> None:
    there = crowd(600, a=6, b=6, c=6, d=6)
    world = World(NOW, nodes={name: indexed.node for name, indexed in there.indexed_nodes.items()})
    for key in "abcd":
        decide(by_label(key, "1"), there, LAX)
    for asked in (ANY, by_label("a", "1"), by_label("d", "5"), by_label("b", "nothing")):
        found = decide(asked, there, LAX)
        fitting = world.fitting(asked)
        if isinstance(found, Deny):
            assert fitting == set()
            assert found.causes == world.causes(asked)
        else:
            assert {placement.node for placement in found} <= fitting
            assert len(found) == min(MAX_PLACEMENTS, len(fitting))


@pytest.mark.parametrize(
    "term",
    [
        NodeTerm((Expression("kubernetes.io/hostname", "NotIn", frozenset({"node-0", "node-2"})),), ()),
        NodeTerm((), (Expression("metadata.name", "NotIn", frozenset({"node-0", "node-2"})),)),
    ],
    ids=["by-label", "by-name"],
)
def test_denial_counts_every_other_node_if_two_are_excluded_by_name(term: NodeTerm) -> None:
    """The fleet has more nodes than are checked one by one."""
    names = [f"node-{number}" for number in range(MAX_NODE_CHECKS + 1)]
    out = set(names[:2])
    labels = [{"kubernetes.io/hostname": name} for name in names]
    there = fleet(*(node(name, labels=own, is_cordoned=name in out) for name, own in zip(names, labels, strict=True)))
    found = decide(Claim(ClaimRecord(gpus=2), NodesAsked(terms=(term,))), there, LAX)
    assert isinstance(found, Deny)
    assert found.causes == ("2 are not selected by the pod", "1 is cordoned", "19998 have fewer than 2 matching GPUs")


def test_changing_node_labels_do_not_grow_the_index() -> None:
    there = crowd(3)
    for beat in range(12_000):
        there.put(node("node-1", device("GPU-1"), labels={"beat": str(beat)}), NOW)
        if beat == 0:
            decide(by_label("beat", "0"), there, LAX)
    there.advance(NOW + SECOND)
    found = decide(by_label("beat", "11999"), there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-1"]
    assert len(there._classes) < 1000


def test_changing_gpu_labels_do_not_grow_the_index() -> None:
    there = crowd(3)
    for beat in range(12_000):
        there.put(node("node-1", device("GPU-1", f"beat={beat}")), NOW)
    there.advance(NOW + SECOND)
    assert len(there._kinds) < 1000


def test_recreated_nodes_do_not_grow_the_index() -> None:
    there = fleet()
    for number in range(2000):
        there.put(node(f"node-{number}", device("GPU-1"), labels={"gpu-node-name": f"rack-{number}"}), NOW)
        there.remove(f"node-{number}")
    assert sum(map(len, there._directories.values())) < 1000


def test_gpu_on_two_nodes_is_not_offered_until_one_node_is_gone() -> None:
    there = fleet(node("node-a", device("GPU-1")), node("node-b", device("GPU-1")))
    assert isinstance(decide(ANY, there, LAX), Deny)
    assert there.is_quarantined(DeviceUuid("GPU-1"))
    there.remove("node-a")
    found = decide(ANY, there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-b"]
    assert not there.is_quarantined(DeviceUuid("GPU-1"))


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "changed"])
@pytest.mark.parametrize("claimant", ["node-b", "node-0"])
def test_set_aside_gpu_is_set_aside_again_when_a_second_node_drops_it(claimant: str, *, is_removed: bool) -> None:
    there = fleet(node("node-a", device("GPU-1"), device("GPU-2")))
    there.set_aside({"node-a": {"GPU-1": MAP_OWNER}, claimant: {"GPU-2": MAP_OWNER}}, {"node-a"})
    there.put(node(claimant, device("GPU-1"), device("GPU-2")), NOW)
    if is_removed:
        there.remove(claimant)
    else:
        there.put(node(claimant), NOW)
    assert there.set_aside_devices == {"GPU-1"}
    found = decide(ANY, there, LAX)
    assert not isinstance(found, Deny)
    assert [one.uuid for placement in found for one in placement.slots] == ["GPU-2"]


def test_duplicated_gpu_that_moves_to_another_node_is_not_set_aside_there() -> None:
    twice = (device("GPU-1", index=0), device("GPU-1", index=1))
    there = fleet(node("node-a", *twice), node("node-b"))
    there.set_aside({"node-a": {"GPU-1": MAP_OWNER}}, {"node-a"})
    there.put(node("node-a"), NOW)
    there.put(node("node-b", device("GPU-1")), NOW)
    assert there.set_aside_devices == set()


def test_held_gpu_stays_held_while_its_node_is_gone() -> None:
    there = fleet(node("node-a", device("GPU-1")))
    there.hold(reservation(slot("GPU-1")))
    there.remove("node-a")
    there.put(node("node-a", device("GPU-1")), NOW)
    assert isinstance(decide(ANY, there, LAX), Deny)


def test_a_gpu_that_moves_to_another_node_stays_held() -> None:
    there = fleet(node("node-a", device("GPU-1")), node("node-b"))
    held = reservation(slot("GPU-1"))
    there.hold(held)
    there.put(node("node-a"), NOW)
    there.put(node("node-b", device("GPU-1")), NOW)
    assert isinstance(decide(ANY, there, LAX), Deny)
    there.free(held)
    found = decide(ANY, there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-b"]


@pytest.mark.defect("assigner-18")
def test_release_frees_only_the_slots_of_its_reservation() -> None:
    there = fleet(node("node-a", device("GPU-1")))
    there.hold(reservation(slot("GPU-1"), id="second"))
    there.free(reservation(slot("GPU-1"), id="first"))
    assert there.holders(DeviceUuid("GPU-1")) == {0: "second"}


def test_recreated_node_has_no_evidence() -> None:
    there = fleet(node("node-a", device("GPU-1")), proven={"node-a": HASH})
    there.remove("node-a")
    there.put(node("node-a", device("GPU-1")), NOW)
    assert isinstance(decide(Claim(ClaimRecord(gpus=1, hashes=(HASH,))), there, LAX), Deny)


def test_evidence_becomes_stale_at_its_end() -> None:
    there = fleet(node("node-a", device("GPU-1")))
    there.set_evidence("node-a", evidence("node-a", until=NOW + 5 * SECOND), NOW)
    asked = Claim(ClaimRecord(gpus=1, hashes=(HASH,)))
    fits = []
    for seconds in (0, 4, 5, 6):
        there.advance(NOW + seconds * SECOND)
        fits.append(not isinstance(decide(asked, there, LAX), Deny))
    assert fits == [True, True, False, False]


def test_future_evidence_counts_from_its_start() -> None:
    there = fleet(node("node-a", device("GPU-1")))
    there.set_evidence("node-a", evidence("node-a", since=NOW + SECOND, until=NOW + 2 * SECOND), NOW)
    asked = Claim(ClaimRecord(gpus=1, hashes=(HASH,)))
    fits = []
    for seconds in (0, 1, 2):
        there.advance(NOW + seconds * SECOND)
        fits.append(not isinstance(decide(asked, there, LAX), Deny))
    assert fits == [False, True, False]


def test_an_unhealthy_gpu_stays_quarantined_when_its_other_node_is_gone() -> None:
    there = fleet(node("node-a", device("GPU-1", is_healthy=False)), node("node-b", device("GPU-1")))
    there.remove("node-b")
    assert there.is_quarantined(DeviceUuid("GPU-1"))


def test_a_gpu_with_a_mark_is_offered_to_no_claim_until_the_mark_is_gone() -> None:
    marked = evolve(device("GPU-1"), mismatch="in use")
    there = fleet(node("node-a", marked))
    assert isinstance(decide(ANY, there, LAX), Deny)
    assert there.is_quarantined(DeviceUuid("GPU-1"))
    assert there.mismatched_devices == there.quarantined_devices == {"GPU-1"}
    there.put(node("node-a", device("GPU-1")), NOW)
    assert not isinstance(decide(ANY, there, LAX), Deny)
    assert there.mismatched_devices == there.quarantined_devices == set()


def test_gpu_of_a_claim_is_offered_to_nobody_and_keeps_its_proof() -> None:
    uuid = DeviceUuid("GPU-1")
    there = fleet(node("node-a", evolve(device(uuid), mismatch=CLAIMED)))
    assert isinstance(decide(ANY, there, LAX), Deny)
    assert there.is_quarantined(uuid)
    assert there.may_be_proven(uuid)
    assert there.claimed_devices == there.quarantined_devices == {uuid}
    assert there.mismatched_devices == set()
    there.put(node("node-a", evolve(device(uuid), mismatch=CLAIMED, is_healthy=False)), NOW)
    assert not there.may_be_proven(uuid)
    assert there.claimed_devices == set()
    there.put(node("node-a", device(uuid)), NOW)
    assert not isinstance(decide(ANY, there, LAX), Deny)
    assert there.claimed_devices == there.quarantined_devices == set()


def test_gpu_listed_twice_on_its_node_does_not_serve_two() -> None:
    there = fleet(node("node-a", device("GPU-1", index=0), device("GPU-1", index=1)))
    found = decide(claim(raw_pod(raw_container(gpus=2))), there, LAX)
    assert isinstance(found, Deny)


def test_gpu_held_exclusively_is_not_shared() -> None:
    there = fleet(node("node-a", device("GPU-1", shares=1)))
    there.hold(reservation(slot("GPU-1")))
    there.put(node("node-a", device("GPU-1", shares=2)), NOW)
    assert isinstance(decide(Claim(ClaimRecord(gpus=1, shared=True)), there, LAX), Deny)


def test_unusual_requirements_do_not_grow_the_cache() -> None:
    there = crowd(2)
    for number in range(5000):
        there.kinds_serving(frozenset({f"model=none-{number}"}), is_shared=False)
    answers = [there.kinds_serving(frozenset({f"model=none-{n}"}), is_shared=False) for n in (0, 4999)]
    assert answers == [frozenset(), frozenset()]
    assert len(there._kinds_serving) <= 4096


def test_new_kind_of_gpu_serves_requirements_cached_before() -> None:
    there = fleet(node("node-a", device("GPU-1", "model=a100")))
    asked = Claim(ClaimRecord(gpus=1, requirements=("model=h100",)))
    assert isinstance(decide(asked, there, LAX), Deny)
    there.put(node("node-b", device("GPU-2", "model=h100")), NOW)
    found = decide(asked, there, LAX)
    assert not isinstance(found, Deny)
    assert [placement.node for placement in found] == ["node-b"]


def test_unchanged_node_is_no_change() -> None:
    there = fleet(node("node-a", device("GPU-1")), proven={"node-a": HASH})
    there.put(node("node-a", device("GPU-1")), NOW)
    assert there.indexed_nodes["node-a"].state is EvidenceState.FRESH
    assert there.device_count == 1


def test_all_nodes_that_list_a_held_gpu_are_collected() -> None:
    found = fleet(node("node-a", device("GPU-a")), node("node-b", device("GPU-a")))
    changed = found.collect_changes()
    changed.clear()
    found.hold(reservation(slot("GPU-a"), node="node-b"))
    assert changed == {"node-a", "node-b"}


def test_changed_nodes_are_collected_until_the_caller_removes_them() -> None:
    found = fleet(node("node-a", device("GPU-a")), node("node-b", device("GPU-b")))
    changed = found.collect_changes()
    assert changed == {"node-a", "node-b"}
    changed.clear()
    found.put(node("node-a", device("GPU-a")), NOW)
    assert changed == set()
    held = reservation(slot("GPU-a"), node="node-a")
    steps: dict[str, Callable[[], None]] = {
        "held": lambda: found.hold(held),
        "freed": lambda: found.free(held),
        "proven": lambda: found.set_evidence("node-a", evidence("node-a", until=NOW + SECOND), NOW),
        "stale": lambda: found.advance(NOW + SECOND),
        "unhealthy": lambda: found.put(node("node-a", device("GPU-a", is_healthy=False)), NOW),
        "kept for a map": lambda: found.set_aside({"node-a": {"GPU-a": MAP_OWNER}}, {"node-a"}),
        "removed": lambda: found.remove("node-a"),
    }
    for name, step in steps.items():
        step()
        assert changed == {"node-a"}, name
        changed.clear()


def test_dispute_over_a_gpu_changes_both_nodes() -> None:
    found = fleet(node("node-a", device("GPU-a")), node("node-b"))
    changed = found.collect_changes()
    changed.clear()
    found.put(node("node-b", device("GPU-a")), NOW)
    assert changed == {"node-a", "node-b"}
    changed.clear()
    found.remove("node-b")
    assert changed == {"node-a", "node-b"}
