"""The queue reserves a node for the first pod, serves others beside it, and starves none. Runs on each ledger."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import builders
from tests.admission.queue.test_queue import RULES, FakeGates, NoNamespaces
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


class Scene:
    """Pods that wait and run on nodes of several sizes."""

    def __init__(self, make: Making, **sizes: int) -> None:
        self.now = NOW
        self.fleet, self.ledger = make(sizes, lambda: self.now)
        self.gates = FakeGates()
        claims = ClaimReader(ClaimRules(), WatchedNamespaces(NoNamespaces()))
        self.pods = WaitingPods(claims, RULES)
        self.queue = Queue(
            self.pods,
            self.ledger,
            self.fleet,
            POLICY,
            claims,
            RULES,
            self.gates,
            RecordedEvents(),
            lambda: self.now,
            timer=lambda: 0.0,
        )
        self.came = 0
        self.namespaces = ["ml"]
        """For each arriving pod, in turn."""

    async def come(self, *gpus: int) -> None:
        """The pods arrive one after the other and are named by number."""
        for wanted in gpus:
            namespace = self.namespaces[self.came % len(self.namespaces)]
            self.came += 1
            name, uid = f"p{self.came}", f"uid-{self.came}"
            raw = builders.raw_pod(raw_container(gpus=wanted), name=name, uid=uid, namespace=namespace)
            gated = waiting(raw, builders.claim(raw), RULES, "because")
            created = (NOW + timedelta(seconds=self.came)).isoformat().replace("+00:00", "Z")
            meta = {**gated["metadata"], "creationTimestamp": created, "resourceVersion": "1"}
            self.gates.pods[f"p{self.came}"] = {**gated, "metadata": meta}
            self.pods.changed(self.gates.pods[f"p{self.came}"])
        await self.queue.step()

    async def end(self, *names: str) -> None:
        for name in names:
            raw = self.gates.pods.pop(name)
            self.pods.deleted(raw)
            held = self.ledger.of_pod(f"uid-{name[1:]}")
            assert held is not None
            assert await self.ledger.release(held.id, PodIdentity(raw["metadata"]["namespace"], name, held.uid or ""))

    def running(self) -> dict[str, str]:
        """The nodes of pods whose gates are open."""
        return {
            name: raw["metadata"]["annotations"]["gpuwarden.io/node"]
            for name, raw in self.gates.pods.items()
            if "schedulingGates" not in raw["spec"]
        }

    def on(self, node_name: str) -> list[str]:
        return [name for name, where in self.running().items() if where == node_name]

    def first(self) -> tuple[str, int, str] | None:
        """The first pod that waits for GPUs to become free: its name, its number of GPUs, and the node reserved for
        it."""
        for left in self.queue._backfill_nodes.values():
            waiter = self.pods.queue_order.get(left.uid)
            if waiter is not None:
                return waiter.pod.name, waiter.claim.count, left.node
        return None


@pytest.fixture(params=[in_memory, in_a_cluster])
def make(request: pytest.FixtureRequest) -> Making:
    making: Making = request.param
    return making


async def test_small_claims_use_other_nodes_while_one_is_reserved_for_the_large_claim(make: Making) -> None:
    scene = Scene(make, a=4, b=4)
    await scene.come(3, 2, 4, 1, 1, 1)
    # p3 wants four GPUs on one node; fewer of node b's are in use than of node a's.
    assert scene.first() == ("p3", 4, "b")
    assert scene.running() == {"p1": "a", "p2": "b", "p4": "a"}
    assert "an earlier pod waits for the same devices" in scene.gates.reasons["p5"]
    await scene.end("p2")
    await scene.come()
    assert scene.running() == {"p1": "a", "p4": "a", "p3": "b"}
    await scene.end("p1")
    await scene.come()
    assert scene.on("a") == ["p4", "p5", "p6"]


async def test_small_claims_behind_the_first_do_not_wait_for_larger_ones(make: Making) -> None:
    scene = Scene(make, a=4, b=3)
    await scene.come(2, 1, 1)
    assert scene.running() == {"p1": "b", "p2": "b", "p3": "a"}
    await scene.come(4, 2, 2, 1)
    assert scene.first() == ("p4", 4, "a")
    await scene.end("p2")
    await scene.come()
    assert scene.running() == {"p1": "b", "p3": "a", "p7": "b"}
    await scene.end("p1")
    await scene.come()
    assert scene.running() == {"p3": "a", "p7": "b", "p5": "b"}
    await scene.end("p3")
    await scene.come()
    assert scene.on("a") == ["p4"]


async def test_claim_that_no_freed_gpu_would_serve_gets_no_reserved_node(make: Making) -> None:
    scene = Scene(make, a=4, b=3)
    broken = scene.fleet.indexed_nodes["a"].node
    devices = (evolve(broken.devices[0], is_healthy=False), *broken.devices[1:])
    scene.fleet.put(evolve(broken, devices=devices), NOW)
    await scene.come(1, 1, 4, 3)
    assert "fewer than 4 free GPUs" in scene.gates.reasons["p3"]
    assert scene.running() == {"p1": "b", "p2": "b", "p4": "a"}
    await scene.come(3, 1, 1)
    assert scene.first() == ("p5", 3, "b")
    assert scene.running().keys() == {"p1", "p2", "p4"}
    await scene.end("p1", "p2")
    await scene.come()
    assert scene.running() == {"p4": "a", "p5": "b"}


async def test_claim_that_loses_a_race_does_not_use_the_reserved_node(
    make: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(make, a=2, b=2)
    await scene.come(1, 1, 1, 2)
    assert scene.running() == {"p1": "a", "p2": "a", "p3": "b"}
    assert scene.first() == ("p4", 2, "b")
    reserve = scene.ledger.reserve

    async def others_are_faster(
        ask: ReservationRequest, places: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        monkeypatch.undo()
        assert [place.node for place in places] == ["a"]
        await reserve(ReservationRequest(ReservationId("other"), "ml", "d1"), places, answer_by=answer_by)
        return await reserve(ask, places, answer_by=answer_by)

    monkeypatch.setattr(type(scene.ledger), "reserve", staticmethod(others_are_faster))
    await scene.end("p1")
    await scene.come(1)
    assert scene.running() == {"p2": "a", "p3": "b"}
    assert "an earlier pod waits for the same devices" in scene.gates.reasons["p5"]


sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3)
stories = st.lists(st.one_of(st.integers(1, 3), st.just(0)), min_size=2, max_size=10)


@settings(max_examples=40, deadline=None)
@given(sizes, stories, st.data())
@pytest.mark.parametrize("make", [in_memory, in_a_cluster])
def test_first_claim_is_served_after_as_many_pod_ends_on_its_node_as_it_wants_gpus(
    make: Making, nodes: list[int], story: list[int], data: st.DataObject
) -> None:
    async def tell() -> None:
        scene = Scene(make, **{f"n{number}": gpus for number, gpus in enumerate(nodes)})
        scene.namespaces = data.draw(st.lists(st.sampled_from(("ml", "cv", "nlp")), min_size=1, max_size=5))
        for gpus in story:
            if not gpus and scene.running():
                await scene.end(data.draw(st.sampled_from(sorted(scene.running()))))
            await scene.come(*([gpus] if gpus else []))
        found = scene.first()
        if found is None:
            return
        name, wanted, _ = found
        for _ in range(wanted):
            found = scene.first()
            assert found is not None
            assert found[0] == name
            await scene.end(data.draw(st.sampled_from(sorted(scene.on(found[2])))))
            await scene.come(*data.draw(st.lists(st.integers(1, 3), max_size=3)))
            if name in scene.running():
                return
        raise AssertionError(f"{name} still waits for {wanted} GPUs")

    asyncio.run(tell())
