"""The queue leaves one node to whoever is first, serves others beside it, and keeps nobody waiting for ever: over each
ledger."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import builders
from tests.admission.queue.test_queue import RULES, NobodyToAsk, Yard
from tests.builders import NOW, device, node, raw_container
from tests.ledger.fake_store import FakeStore, gpu_node
from tests.ledger.test_cluster import KNOWN, Pods, Replica
from tests.recorded_events import RecordedEvents
from webhook.admission.namespaces import ClaimReader, WatchedNamespaces
from webhook.admission.queue.queue import Queue
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core.claim import ClaimRules
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import waiting
from webhook.core.fleet import Fleet
from webhook.core.reservation import Placement, PodIdentity, Reservation, ReservationId, ReservationRequest
from webhook.ledger import Ledger
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times

Sizes = dict[str, int]
Clock = Callable[[], datetime]
Making = Callable[[Sizes, Clock], tuple[Fleet, Ledger]]
POLICY = EvidencePolicy()


def in_memory(sizes: Sizes, clock: Clock) -> tuple[Fleet, Ledger]:
    fleet = Fleet()
    for name, gpus in sizes.items():
        fleet.put(node(name, *(device(f"GPU-{name}-{k}") for k in range(gpus))), NOW)
    return fleet, MemoryLedger(fleet, clock, Times(timedelta(seconds=90), timedelta(seconds=5)))


def in_a_cluster(sizes: Sizes, clock: Clock) -> tuple[Fleet, Ledger]:
    store = FakeStore()
    for name, gpus in sizes.items():
        store.apply({**gpu_node(name, *(f"GPU-{name}-{k}" for k in range(gpus))), **KNOWN})
    replica = Replica(store, Pods(), clock)
    return replica.fleet, replica.ledger


class Hall:
    """Pods that wait and run over nodes of some sizes."""

    def __init__(self, make: Making, **sizes: int) -> None:
        self.now = NOW
        self.fleet, self.ledger = make(sizes, lambda: self.now)
        self.yard = Yard()
        claims = ClaimReader(ClaimRules(), WatchedNamespaces(NobodyToAsk()))
        self.pods = WaitingPods(claims, RULES)
        self.queue = Queue(
            self.pods,
            self.ledger,
            self.fleet,
            POLICY,
            claims,
            RULES,
            self.yard,
            RecordedEvents(),
            lambda: self.now,
            timer=lambda: 0.0,
        )
        self.came = 0
        self.namespaces = ["ml"]
        """Of those that come, in turn."""

    async def come(self, *gpus: int) -> None:
        """One after the other; their names are their numbers."""
        for wanted in gpus:
            namespace = self.namespaces[self.came % len(self.namespaces)]
            self.came += 1
            name, uid = f"p{self.came}", f"uid-{self.came}"
            raw = builders.raw_pod(raw_container(gpus=wanted), name=name, uid=uid, namespace=namespace)
            gated = waiting(raw, builders.claim(raw), RULES, "because")
            created = (NOW + timedelta(seconds=self.came)).isoformat().replace("+00:00", "Z")
            meta = {**gated["metadata"], "creationTimestamp": created, "resourceVersion": "1"}
            self.yard.pods[f"p{self.came}"] = {**gated, "metadata": meta}
            self.pods.changed(self.yard.pods[f"p{self.came}"])
        await self.queue.step()

    async def end(self, *names: str) -> None:
        for name in names:
            raw = self.yard.pods.pop(name)
            self.pods.deleted(raw)
            held = self.ledger.of_pod(f"uid-{name[1:]}")
            assert held is not None
            assert await self.ledger.release(held.id, PodIdentity(raw["metadata"]["namespace"], name, held.uid or ""))

    def running(self) -> dict[str, str]:
        """Where those are whose gates are open."""
        return {
            name: raw["metadata"]["annotations"]["gpuwarden.io/node"]
            for name, raw in self.yard.pods.items()
            if "schedulingGates" not in raw["spec"]
        }

    def on(self, node_name: str) -> list[str]:
        return [name for name, where in self.running().items() if where == node_name]

    def first(self) -> tuple[str, int, str] | None:
        """Who waits first for GPUs to become free: its name, how many it wants, and the node that is left to it."""
        for left in self.queue._left.values():
            waiter = self.pods.lines.get(left.uid)
            if waiter is not None:
                return waiter.pod.name, waiter.claim.count, left.node
        return None


@pytest.fixture(params=[in_memory, in_a_cluster])
def make(request: pytest.FixtureRequest) -> Making:
    making: Making = request.param
    return making


async def test_small_claims_use_the_other_nodes_and_the_large_one_gets_its_own(make: Making) -> None:
    hall = Hall(make, a=4, b=4)
    await hall.come(3, 2, 4, 1, 1, 1)
    # p3 waits for four on one node; one of b's is in use less than of a's.
    assert hall.first() == ("p3", 4, "b")
    assert hall.running() == {"p1": "a", "p2": "b", "p4": "a"}
    assert "it is the turn of another pod" in hall.yard.said["p5"]
    await hall.end("p2")
    await hall.come()
    assert hall.running() == {"p1": "a", "p4": "a", "p3": "b"}
    await hall.end("p1")
    await hall.come()
    assert hall.on("a") == ["p4", "p5", "p6"]


async def test_behind_it_small_ones_do_not_wait_for_larger_ones(make: Making) -> None:
    hall = Hall(make, a=4, b=3)
    await hall.come(2, 1, 1)
    assert hall.running() == {"p1": "b", "p2": "b", "p3": "a"}
    await hall.come(4, 2, 2, 1)
    assert hall.first() == ("p4", 4, "a")
    await hall.end("p2")
    await hall.come()
    assert hall.running() == {"p1": "b", "p3": "a", "p7": "b"}
    await hall.end("p1")
    await hall.come()
    assert hall.running() == {"p3": "a", "p7": "b", "p5": "b"}
    await hall.end("p3")
    await hall.come()
    assert hall.on("a") == ["p4"]


async def test_one_that_no_gpu_would_serve_that_becomes_free_has_no_node_and_the_next_one_has(make: Making) -> None:
    hall = Hall(make, a=4, b=3)
    broken = hall.fleet.indexed_nodes["a"].node
    devices = (evolve(broken.devices[0], is_healthy=False), *broken.devices[1:])
    hall.fleet.put(evolve(broken, devices=devices), NOW)
    await hall.come(1, 1, 4, 3)
    assert "with fewer than 4 free" in hall.yard.said["p3"]
    assert hall.running() == {"p1": "b", "p2": "b", "p4": "a"}
    await hall.come(3, 1, 1)
    assert hall.first() == ("p5", 3, "b")
    assert hall.running().keys() == {"p1", "p2", "p4"}
    await hall.end("p1", "p2")
    await hall.come()
    assert hall.running() == {"p4": "a", "p5": "b"}


async def test_a_lost_race_beside_it_does_not_end_on_its_node(make: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(make, a=2, b=2)
    await hall.come(1, 1, 1, 2)
    assert hall.running() == {"p1": "a", "p2": "a", "p3": "b"}
    assert hall.first() == ("p4", 2, "b")
    reserve = hall.ledger.reserve

    async def others_are_faster(
        ask: ReservationRequest, places: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        monkeypatch.undo()
        assert [place.node for place in places] == ["a"]
        await reserve(ReservationRequest(ReservationId("other"), "ml", "d1"), places, answer_by=answer_by)
        return await reserve(ask, places, answer_by=answer_by)

    monkeypatch.setattr(hall.ledger, "reserve", others_are_faster)
    await hall.end("p1")
    await hall.come(1)
    assert hall.running() == {"p2": "a", "p3": "b"}
    assert "it is the turn of another pod" in hall.yard.said["p5"]


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
stories = st.lists(st.one_of(st.integers(1, 3), st.just(0)), min_size=2, max_size=10)


@settings(max_examples=40, deadline=None)
@given(sizes, stories, st.data())
@pytest.mark.parametrize("make", [in_memory, in_a_cluster])
def test_whoever_is_first_is_served_after_at_most_as_many_ends_on_its_node_as_it_wants_gpus(
    make: Making, nodes: list[int], story: list[int], data: st.DataObject
) -> None:
    async def tell() -> None:
        hall = Hall(make, **{f"n{number}": gpus for number, gpus in enumerate(nodes)})
        hall.namespaces = data.draw(st.lists(st.sampled_from(("ml", "cv", "nlp")), min_size=1, max_size=5))
        for gpus in story:
            if not gpus and hall.running():
                await hall.end(data.draw(st.sampled_from(sorted(hall.running()))))
            await hall.come(*([gpus] if gpus else []))
        found = hall.first()
        if found is None:
            return
        name, wanted, _ = found
        for _ in range(wanted):
            found = hall.first()
            assert found is not None
            assert found[0] == name
            await hall.end(data.draw(st.sampled_from(sorted(hall.on(found[2])))))
            await hall.come(*data.draw(st.lists(st.integers(1, 3), max_size=3)))
            if name in hall.running():
                return
        raise AssertionError(f"{name} still waits for {wanted} GPUs")

    asyncio.run(tell())
