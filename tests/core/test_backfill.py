"""Backfill: a pod that waits for many GPUs of one node gets them, whatever pods are created after it."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from tests import builders
from tests.builders import HASH, NOW, device, node, raw_container, raw_pod
from webhook.core.backfill import HeldNode, choose_held_node, place_around
from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy, decide, explain
from webhook.core.device import Node
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.queue_order import KindPass, QueuedPod, QueueOrder, earlier_pod_waits
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, Placement, PodIdentity, Reservation
from webhook.core.verdict import Deny

POLICY = EvidencePolicy()


def claim(gpus: int, **members: object) -> Claim:
    return builders.claim(raw_pod(raw_container(gpus=gpus), **members))  # type: ignore[arg-type]  # as they are


def sized(name: str, gpus: int, *, healthy: bool = True, **members: object) -> Node:
    devices = [device(f"{name}-{k}", index=k, is_healthy=healthy or k > 0) for k in range(gpus)]
    return node(name, *devices, **members)  # type: ignore[arg-type]  # as they are


def busy(fleet: Fleet, *uuids: str) -> None:
    for uuid in uuids:
        fleet.hold(builders.reservation(builders.slot(uuid), id=f"r-{uuid}", node=uuid.rpartition("-")[0]))


def left_to(asked: Claim, fleet: Fleet, before: str | None = None, policy: EvidencePolicy = POLICY) -> str | None:
    return choose_held_node(asked, fleet, policy, before)


# The held node.


def test_held_node_has_the_most_free_devices_and_then_the_first_name() -> None:
    fleet = builders.fleet(sized("c", 4), sized("b", 4), sized("a", 4), sized("small", 3))
    busy(fleet, "a-0", "a-1", "b-0", "c-0")
    assert left_to(claim(4), fleet) == "b"


def test_held_node_stays_until_another_has_more_free_devices() -> None:
    fleet = builders.fleet(sized("a", 4), sized("b", 4))
    busy(fleet, "a-0", "a-1", "b-0", "b-1")
    assert left_to(claim(4), fleet, before="b") == "b"
    busy(fleet, "b-2")
    assert left_to(claim(4), fleet, before="b") == "a"


WILL_NOT_DO = {
    "too-small": sized("a", 3),
    "a-broken-device": sized("a", 4, healthy=False),
    "not-ready": sized("a", 4, is_ready=False),
    "cordoned": sized("a", 4, is_cordoned=True),
}


@pytest.mark.parametrize("before", [None, "a", "gone"])
@pytest.mark.parametrize("other", WILL_NOT_DO.values(), ids=WILL_NOT_DO)
def test_node_with_too_few_devices_is_not_held(other: Node, before: str | None) -> None:
    fleet = builders.fleet(other, sized("b", 4))
    busy(fleet, *(f"b-{k}" for k in range(4)))
    assert left_to(claim(4), fleet, before) == "b"
    fleet.remove("b")
    assert left_to(claim(4), fleet, before) is None


def test_node_without_the_required_evidence_is_not_held() -> None:
    fleet = builders.fleet(sized("a", 4), sized("b", 4), sized("c", 4), proven={"b": HASH, "c": "sha256:other"})
    busy(fleet, "a-0", "b-0", "b-1", "c-0")
    asked = claim(4, annotations={"gpuwarden.io/required-hash": HASH})
    assert [left_to(asked, fleet, before) for before in (None, "a", "c")] == ["b", "b", "b"]
    assert left_to(claim(4), fleet, policy=EvidencePolicy(is_always_required=True)) == "c"
    fleet.set_evidence("b", None, NOW)
    assert left_to(asked, fleet, "b") is None


SELECTS = {
    "a-label": {"nodeSelector": {"zone": "z"}},
    "a-host-name": {"nodeSelector": {"kubernetes.io/hostname": "b"}},
    "by-name": {"affinity": builders.required_affinity(builders.on_node("b"))},
    "not-by-name": {
        "affinity": builders.required_affinity(
            builders.term(fields=[builders.expression("metadata.name", "NotIn", "a")])
        )
    },
}


@pytest.mark.parametrize("members", SELECTS.values(), ids=SELECTS)
def test_node_that_the_pod_does_not_select_is_not_held(members: dict[str, object]) -> None:
    fleet = builders.fleet(
        sized("a", 4, labels={"kubernetes.io/hostname": "a"}),
        sized("b", 4, labels={"kubernetes.io/hostname": "b", "zone": "z"}),
    )
    busy(fleet, "b-0", "b-1")
    assert [left_to(claim(4, **members), fleet, before) for before in (None, "a")] == ["b", "b"]


def test_devices_set_aside_for_maps_do_not_count_for_the_held_node() -> None:
    fleet = builders.fleet(sized("a", 4), sized("b", 4))
    busy(fleet, "b-0", "b-1")
    fleet.set_aside({"a": {"0": MapOwner("", SetId("set-1", "ml"))}}, {"a"})
    assert left_to(claim(4), fleet) == "b"


def test_devices_of_another_kind_do_not_count_for_the_held_node() -> None:
    labels = {"fudo.org/gpu.nvlink": "true"}
    asked = claim(2, labels=labels)
    (label,) = asked.requirements
    fleet = builders.fleet(
        sized("a", 4), node("b", *(device(f"b-{k}", label) for k in range(2)), *(device(f"c-{k}") for k in range(4)))
    )
    busy(fleet, "b-0")
    assert left_to(asked, fleet) == "b"
    busy(fleet, "a-0")
    assert left_to(claim(4), fleet) == "b"


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"nodeSelector": {"zone": "z"}},
    {"annotations": {"gpuwarden.io/required-hash": HASH}},
    {
        "affinity": builders.required_affinity(
            builders.term(fields=[builders.expression("metadata.name", "NotIn", "n0")])
        )
    },
    {"nodeSelector": {"kubernetes.io/hostname": "n1"}},
)


@given(st.data())
def test_held_node_equals_that_of_a_scan_of_all_nodes(data: st.DataObject) -> None:
    there, held = [], []
    for number in range(data.draw(st.integers(1, 5))):
        name, gpus = f"n{number}", data.draw(st.integers(1, 4))
        labels = {"kubernetes.io/hostname": name, **({"zone": "z"} if data.draw(st.booleans()) else {})}
        healthy, ready = data.draw(st.booleans()), data.draw(st.booleans())
        there.append(sized(name, gpus, healthy=healthy, is_ready=ready, labels=labels))
        held += [f"{name}-{k}" for k in range(data.draw(st.integers(0, gpus)))]
    proven = {one.name: HASH for one in there if data.draw(st.booleans())}
    asked = claim(data.draw(st.integers(1, 4)), **data.draw(st.sampled_from(ASKED)))
    idle, fleet = builders.fleet(*there, proven=proven), builders.fleet(*there, proven=proven)
    busy(fleet, *held)

    free = {
        fit.name: sum(map(fleet.is_offered, fleet.indexed_nodes[fit.name].node.devices))
        for fit in explain(asked, idle, POLICY)
        if fit.fits
    }
    best = min(free, key=lambda name: (-free[name], name), default=None)
    assert left_to(asked, fleet) == best
    before = data.draw(st.sampled_from([one.name for one in there]))
    is_kept = before in free and best is not None and free[best] <= free[before]
    assert left_to(asked, fleet, before) == (before if is_kept else best)


# Placement of later claims.


def test_later_claims_use_other_nodes_or_wait_for_the_earlier_pod() -> None:
    fleet = builders.fleet(sized("a", 2), sized("b", 2))
    busy(fleet, "a-0", "b-0")
    node_hold = HeldNode(claim(2), "a")
    found = place_around(claim(1), fleet, POLICY, node_hold)
    assert not isinstance(found, Deny)
    assert [place.node for place in found] == ["b"]
    busy(fleet, "b-1")
    assert place_around(claim(1), fleet, POLICY, node_hold) == earlier_pod_waits(claim(1), 2)
    busy(fleet, "a-1")
    assert place_around(claim(1), fleet, POLICY, node_hold) == decide(claim(1), fleet, POLICY)


def test_placement_without_a_held_node_is_the_decision() -> None:
    fleet = builders.fleet(sized("a", 2))
    assert place_around(claim(1), fleet, POLICY, None) == decide(claim(1), fleet, POLICY)


def test_claim_without_gpus_may_use_the_held_node() -> None:
    fleet = builders.fleet(sized("a", 2), proven={"a": HASH})
    asked = builders.claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    found = place_around(asked, fleet, POLICY, HeldNode(claim(2), "a"))
    assert not isinstance(found, Deny)
    assert [place.node for place in found] == ["a"]


# No pod starves.


@define
class World:
    """Pods are created and end in any order; a queue pass follows each event."""

    fleet: Fleet
    queue: QueueOrder = field(factory=QueueOrder)
    running: dict[str, Reservation] = field(factory=dict)
    held: tuple[str, str] | None = None
    first: QueuedPod | None = None
    created: int = 0

    def create(self, gpus: int, namespace: str) -> None:
        self.created += 1
        identity = PodIdentity(namespace, f"p{self.created}", f"uid-{self.created:04}")
        self.queue.put(QueuedPod(identity, NOW + timedelta(seconds=self.created), claim(gpus)))

    def end(self, uid: str) -> None:
        self.fleet.free(self.running.pop(uid))

    def make_pass(self) -> None:
        heads = [head for kind in self.queue.kinds() for head in self.queue.heads(kind)]  # one kind
        first = None if self.held is None else self.queue.get(self.held[0])
        kind_pass, node_hold, self.first = KindPass(self.queue, heads, first), None, None
        while kind_pass:
            waiter = kind_pass.take()
            found = place_around(waiter.claim, self.fleet, POLICY, node_hold)
            if not isinstance(found, Deny):
                assert node_hold is None or found[0].node != node_hold.node
                self.run(waiter, found[0])
                kind_pass.skip(waiter)
            elif found.reason is Reason.NO_FREE_DEVICE:
                node_hold = node_hold or self.hold_node(waiter)
                kind_pass.block(waiter)

    def hold_node(self, waiter: QueuedPod) -> HeldNode | None:
        before = self.held[1] if self.held is not None and self.held[0] == waiter.pod.uid else None
        chosen = choose_held_node(waiter.claim, self.fleet, POLICY, before)
        if chosen is None:
            return None
        if before is not None and chosen != before:
            assert self.free_on(chosen) > self.free_on(before)
        self.held, self.first = (waiter.pod.uid, chosen), waiter
        return HeldNode(waiter.claim, chosen)

    def run(self, waiter: QueuedPod, place: Placement) -> None:
        self.queue.drop(waiter.pod.uid, was_served=True)
        held = builders.reservation(
            *place.slots, id=waiter.pod.uid, node=place.node, phase=Phase.FINALIZED, uid=waiter.pod.uid
        )
        assert all(builders.is_slot_free(self.fleet, slot) for slot in held.slots)
        self.running[waiter.pod.uid] = held
        self.fleet.hold(held)

    def free_on(self, name: str) -> int:
        return sum(map(self.fleet.is_offered, self.fleet.indexed_nodes[name].node.devices))

    def on(self, name: str) -> list[str]:
        return [uid for uid, held in self.running.items() if held.node == name]

    def waiting(self) -> Iterable[QueuedPod]:
        return (waiter for uid in self.queue.uids() if (waiter := self.queue.get(uid)) is not None)

    def idle(self) -> list[str]:
        """The waiting pods that would fit outside of the held node."""
        held_node = self.held[1] if self.first is not None and self.held is not None else None
        return [
            waiter.pod.name
            for waiter in self.waiting()
            for name in self.fleet.indexed_nodes
            if name != held_node and self.free_on(name) >= waiter.claim.count
        ]


NAMESPACES = st.sampled_from(("ml", "cv", "nlp"))


def world(nodes: list[tuple[int, bool]], events: list[int], data: st.DataObject) -> Iterator[World]:
    """The world after each pass."""
    made = World(builders.fleet(*(sized(f"n{k}", gpus, healthy=healthy) for k, (gpus, healthy) in enumerate(nodes))))
    for gpus in events:
        if gpus:
            made.create(gpus, data.draw(NAMESPACES))
        elif made.running:
            made.end(data.draw(st.sampled_from(sorted(made.running))))
        made.make_pass()
        yield made


# Nodes: their GPUs, and whether all are healthy. Events: the GPUs of a new pod, or 0 if a pod ends.
nodes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4)
event_lists = st.lists(st.one_of(st.integers(1, 4), st.just(0)), min_size=1, max_size=30)


@given(nodes, event_lists, st.data())
def test_no_gpu_outside_of_the_held_node_stays_idle(
    nodes: list[tuple[int, bool]], events: list[int], data: st.DataObject
) -> None:
    for made in world(nodes, events, data):
        assert made.idle() == []


@given(nodes, event_lists, st.data())
def test_first_pod_is_served_after_as_many_releases_on_its_node_as_it_wants_gpus(
    nodes: list[tuple[int, bool]], events: list[int], data: st.DataObject
) -> None:
    """Small claims arrive all the time, and pods on other nodes end at any time."""
    *_, made = world(nodes, events, data)
    first = made.first
    if first is None:
        return
    for _ in range(first.claim.count):
        assert made.held is not None
        uid, held_node = made.held
        assert uid == first.pod.uid
        made.end(data.draw(st.sampled_from(made.on(held_node))))
        elsewhere = [uid for uid, held in made.running.items() if held.node != held_node]
        for uid in data.draw(st.lists(st.sampled_from(elsewhere), unique=True)) if elsewhere else ():
            made.end(uid)
        for gpus in data.draw(st.lists(st.integers(1, 4), max_size=4)):
            made.create(gpus, data.draw(NAMESPACES))
        made.make_pass()
        if first.pod.uid in made.running:
            return
    raise AssertionError(f"{first.pod.name} still waits for {first.claim.count} GPUs")
