"""The ledger in GPUNode objects keeps the contract, and what replicas, lost answers and lagging watches do to it."""

import asyncio
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from tests import builders
from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, SECOND, Bench, LedgerContract, ask, on, pod
from tests.ledger.fake_store import FakeStore, Fault, Watch, check_rules, gpu_node
from webhook.admission.reserving import Reserver
from webhook.core.claim import Claim, ClaimRecord
from webhook.core.decide import MAX_PLACEMENTS, EvidencePolicy
from webhook.core.device import DeviceUuid, Node
from webhook.core.errors import (
    DeadlinePassedError,
    LedgerUnavailableError,
    PlacementRefusedError,
    SlotsTakenError,
    UnknownReservationError,
)
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.reservation import (
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.core.verdict import Deny
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError
from webhook.kube.store import RefusedError, StoreUnavailableError
from webhook.ledger.cluster import BACKOFF, PATIENCE, ClusterLedger, PodReader, PodReaderUnavailableError
from webhook.ledger.end_of_use import NodeSnapshot
from webhook.ledger.moves import Times
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import LONG_AGO
from webhook.runtime.telemetry import Metrics

R1 = ReservationId("r1")
NODE_A = gpu_node("node-a", "GPU-a0", "GPU-a1", "GPU-a2", "GPU-a3", "GPU-s", shares={"GPU-s": 4})
NODE_B = gpu_node("node-b", "GPU-b0")
KNOWN: Raw = {"status": {"held": {}}}


def carrying(uid: str, uuid: str, *, node: str = "node-a", reservation: str = "r9", is_on_node: bool = True) -> Raw:
    """A pod that exists and carries a reservation."""
    annotations = {
        "gpuwarden.io/reservation-id": reservation,
        "gpuwarden.io/node": node,
        "gpuwarden.io/gpu-uuid": uuid,
        "gpuwarden.io/claim": ClaimRecord(gpus=1).text(),
    }
    meta = {"namespace": "ml", "name": uid, "uid": uid, "annotations": annotations}
    return {"metadata": meta, "spec": {"nodeName": node} if is_on_node else {}, "status": {"phase": "Running"}}


def ended(phase: str = "Succeeded", **state: Raw) -> Raw:
    """A pod's status as a kubelet writes it once its containers have ended."""
    return {"phase": phase, "containerStatuses": [{"state": state or {"terminated": {"exitCode": 0}}}]}


class Pods:
    """The pods that the API server has, by uid, and its nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeSnapshot | None] = {}
        self.uids: set[str] = set()
        self.raws: dict[str, Raw] = {}
        self.removed: list[PodIdentity] = []
        self.lists = 0
        self.looks = 0
        self.is_away = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def reserved_pods(self) -> list[ReservedPod]:
        self.lists += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return [one for one in map(ReservedPod.of, self.raws.values()) if one is not None]

    async def look(self, pod: PodIdentity) -> PodSnapshot | None:
        self.looks += 1
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return PodSnapshot.of(self.raws[pod.uid]) if pod.uid in self.uids else None

    async def node(self, name: str) -> NodeSnapshot | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return self.nodes.get(name, NodeSnapshot("boot-1", is_ready=True, ready_since=LONG_AGO))

    async def remove(self, pod: PodIdentity, version: str) -> None:
        if version == self.raws[pod.uid]["metadata"].get("resourceVersion", ""):
            self.removed.append(pod)


class Replica:
    """One process over a store that others use too."""

    def __init__(
        self, store: FakeStore, pods: PodReader, clock: Callable[[], datetime], backoff: Backoff = BACKOFF
    ) -> None:
        self.fleet = Fleet()
        self.ledger = ClusterLedger(self.fleet, store, pods, clock, Times(PENDING_DEADLINE, CLOCK_SKEW), backoff)
        self.watch = Watch(store, self.ledger.learn)
        for raw in store.objects.values():
            node = GpuNode.parse(raw)
            self.fleet.put(Node(node.name, devices=node.devices), clock())
        self.watch.start_over()


class ClusterBench:
    """The contract's bench, and as many replicas as a case wants."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.pods = Pods()
        self.store = FakeStore()
        self.store.apply({**NODE_A, **KNOWN})
        self.store.apply({**NODE_B, **KNOWN})
        self.replica = self.another()
        self.ledger = self.replica.ledger
        self.fleet = self.replica.fleet

    def another(self) -> Replica:
        return Replica(self.store, self.pods, lambda: self.now)

    async def given_up(self) -> Collection[Reservation]:
        """By who has watched pods all the time."""
        return await self.ledger.collect(self.now, never_came=lambda _: True)

    def held(self, node: str = "node-a") -> dict[str, Any]:
        held: dict[str, Any] = self.store.objects[node]["status"]["held"]
        return held

    async def reserve(self, what: ReservationRequest, *places: Placement, by: Replica | None = None) -> Reservation:
        ledger = (by or self.replica).ledger
        return await ledger.reserve(what, places, answer_by=self.now + timedelta(seconds=10))


@pytest.fixture
def bench() -> ClusterBench:
    return ClusterBench()


class TestClusterLedger(LedgerContract):
    """All of the contract."""

    async def given_up(self, bench: Bench) -> Collection[Reservation]:
        assert isinstance(bench, ClusterBench)
        return await bench.given_up()


# What stands in the store.


async def test_a_reservation_stands_in_the_object_once_a_slot(bench: ClusterBench) -> None:
    await bench.reserve(ask(1, pod_name="pod-1"), on("node-a", "GPU-a0", "GPU-a1"))
    entry = {
        "reservation": "r1",
        "phase": "pending",
        "namespace": "ml",
        "digest": "d1",
        "pod": "pod-1",
        "since": "2026-01-01T00:00:00Z",
        "deadline": "2026-01-01T00:01:30Z",
    }
    assert bench.held() == {"GPU-a0/0": entry, "GPU-a1/0": entry}
    status = bench.store.objects["node-a"]["status"]
    assert (status["total"], status["taken"], status["free"]) == (8, 2, 6)


def numbers(bench: ClusterBench) -> tuple[int, int, int]:
    status = bench.store.objects["node-a"]["status"]
    return status["total"], status["taken"], status["free"]


async def test_a_shared_device_that_is_held_alone_has_no_free_share(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-s"))
    assert numbers(bench) == (8, 1, 4)


async def test_numbers_follow_the_devices_though_nothing_is_reserved(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.settle("node-a")
    devices = [{"uuid": "GPU-a0"}, {"uuid": "GPU-a1"}, {"uuid": "GPU-a2", "healthy": False}]
    bench.store.apply({**bench.store.objects["node-a"], "spec": {"devices": devices}})
    bench.replica.watch.catch_up()
    assert "node-a" in bench.ledger.unsettled()
    await bench.ledger.settle("node-a")
    assert numbers(bench) == (3, 1, 1)
    assert "node-a" not in bench.ledger.unsettled()
    writes = bench.store.writes
    await bench.ledger.settle("node-a")
    assert bench.store.writes == writes


async def test_many_at_once_on_one_node_share_few_writes(bench: ClusterBench) -> None:
    places = [on("node-a", f"GPU-a{k}") for k in range(4)]
    await asyncio.gather(*(bench.reserve(ask(n), places[n]) for n in range(4)))
    assert bench.store.writes <= 2


# Others.


async def test_what_one_review_is_about_to_take_another_does_not_want(bench: ClusterBench) -> None:
    slot = on("node-a", "GPU-a0").slots[0]
    taking = asyncio.create_task(bench.reserve(ask(1), on("node-a", "GPU-a0")))
    await asyncio.sleep(0)
    assert not bench.fleet.is_slot_free(slot)
    bench.store.faults = [Fault.NOT_WRITTEN] * 3
    await taking
    assert not bench.fleet.is_slot_free(slot)


async def test_what_could_not_be_taken_is_seen_as_what_it_is(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"), by=other)
    slots = on("node-a", "GPU-a0", "GPU-a1")
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), slots)
    assert [bench.fleet.is_slot_free(slot) for slot in slots.slots] == [False, True]


async def test_of_four_replicas_that_see_nothing_of_each_other_one_wins_each_device(bench: ClusterBench) -> None:
    replicas = [bench.another() for _ in range(4)]
    places = [on("node-a", f"GPU-a{k}") for k in range(4)]
    asks = [bench.reserve(ask(n), *places, by=replicas[n % 4]) for n in range(40)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    winners = [one for one in results if isinstance(one, Reservation)]
    assert sorted(one.uuids for one in winners) == [("GPU-a0",), ("GPU-a1",), ("GPU-a2",), ("GPU-a3",)]
    assert all(isinstance(one, Reservation | SlotsTakenError) for one in results)


async def test_what_another_replica_holds_is_not_taken_though_the_watch_is_behind(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=other)


async def test_a_pod_of_another_replica_is_bound_here(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    assert await other.ledger.find(R1) is None
    assert await other.ledger.find(R1, node="node-a") is not None
    bound = await other.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    assert bound.uid == "uid-1"
    bench.replica.watch.catch_up()
    assert bench.ledger.of_pod("uid-1") == bound


async def test_of_two_pods_with_one_reservation_the_first_uid_wins_whatever_each_replica_has_seen(
    bench: ClusterBench,
) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await other.ledger.find(R1, node="node-a")
    results = await asyncio.gather(
        bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1)),
        other.ledger.bind_to_pod(PodProof.NAMED, R1, pod(2, name="pod-2")),
        return_exceptions=True,
    )
    assert sum(isinstance(one, Reservation) for one in results) == 1


async def test_what_expired_is_taken_over_in_two_writes_and_its_owner_is_too_late(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    other.watch.catch_up()
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await other.ledger.collect(bench.now)
    taken = await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=other)
    assert bench.store.writes == 3
    with pytest.raises(UnknownReservationError):
        await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    assert [one["reservation"] for one in bench.held().values()] == [taken.id]


async def test_what_was_offered_and_found_alive_is_shown_as_held_again(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    other.watch.catch_up()
    bench.now += timedelta(seconds=60)
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))  # the other's watch has not told it of the longer wait
    bench.now += timedelta(seconds=35)
    assert [one.id for one in await other.ledger.collect(bench.now)] == ["r1"]
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=other)
    assert not other.fleet.is_slot_free(on("node-a", "GPU-a0").slots[0])


async def test_a_promised_pod_that_exists_keeps_its_devices_though_nobody_finalized_it(bench: ClusterBench) -> None:
    """The reconciler may be down for longer than the deadline: the pod is there all the same."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, carrying("uid-1", "GPU-a0", reservation="r1"))
    bench.now += timedelta(hours=1)
    assert not await bench.ledger.collect(bench.now)
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"))
    held = bench.ledger.of_pod("uid-1")
    assert held is not None
    assert held.phase is Phase.FINALIZED


def without_annotations(env: Raw | None, *, node: str = "node-a") -> Raw:
    raw = carrying("uid-1", "GPU-a0", reservation="r1", node=node)
    containers = [builders.raw_container(env=[env] if env else None)]
    return {
        **raw,
        "metadata": {**raw["metadata"], "annotations": {}},
        "spec": {**raw["spec"], "containers": containers},
    }


def shows(value: str) -> Raw:
    return {"name": "NVIDIA_VISIBLE_DEVICES", "value": value}


FROM_ITS_ANNOTATION: Raw = {
    "name": "CUDA_VISIBLE_DEVICES",
    "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['gpuwarden.io/gpu-uuid']"}},
}
FROM_ELSEWHERE: Raw = {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}
GATED: Raw = {"schedulingGates": [{"name": "gpuwarden.io/queue"}]}
CARRYING = carrying("uid-1", "GPU-a0", reservation="r1")


@pytest.mark.parametrize(
    ("raw", "is_kept"),
    [
        pytest.param(CARRYING, True, id="carries-it"),
        pytest.param({**CARRYING, "spec": {}}, True, id="carries-it-on-no-node"),
        pytest.param({**CARRYING, "status": ended("Failed")}, False, id="carries-it-and-has-ended"),
        pytest.param({**CARRYING, "status": {"phase": "Failed"}}, True, id="has-failed-and-may-run"),
        pytest.param(carrying("uid-1", "GPU-a1", reservation="r9"), False, id="carries-another"),
        pytest.param(without_annotations(None), False, id="runs-without-gpus"),
        pytest.param(without_annotations(shows("all")), False, id="was-shown-all-as-a-monitor-is"),
        pytest.param(without_annotations(shows("void")), False, id="was-shown-none"),
        pytest.param(without_annotations(FROM_ELSEWHERE), False, id="was-shown-what-somebody-else-says"),
        pytest.param(without_annotations(shows("GPU-a1")), False, id="was-shown-others"),
        pytest.param(without_annotations(shows("GPU-a1,GPU-a0")), True, id="was-shown-them"),
        pytest.param(without_annotations(shows("0,1")), True, id="was-shown-indices"),
        pytest.param(without_annotations(FROM_ITS_ANNOTATION), True, id="was-shown-its-annotation"),
        pytest.param(without_annotations(shows("GPU-a0"), node="node-b"), False, id="is-on-another-node"),
        pytest.param({**without_annotations(None), "spec": GATED}, True, id="is-behind-our-gate"),
    ],
)
async def test_what_a_review_has_promised_to_a_pod_that_exists_is_kept_only_if_the_pod_may_use_it(
    bench: ClusterBench, raw: Raw, *, is_kept: bool
) -> None:
    """Anybody who may post reviews can name a pod."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, raw)
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    given_up = await bench.ledger.collect(bench.now)
    assert [one.id for one in given_up] == ([] if is_kept else ["r1"])
    assert bench.held()["GPU-a0/0"]["phase"] == ("finalized" if is_kept else "pending")


async def test_a_pod_that_nobody_has_told_of_is_confirmed_before_the_deadline(bench: ClusterBench) -> None:
    """While reviews wait for room and no reconciler is there."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, CARRYING)
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"
    bench.now += SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "finalized"
    assert bench.ledger.pending.gpus_in("ml") == 0


async def test_a_pod_that_is_not_there_yet_keeps_its_hold_and_is_asked_for_three_times(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    for _ in range(30):
        bench.now += SECOND / 2
        await bench.ledger.confirm_early(bench.now)
    assert bench.pods.looks == 3
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"


async def test_nobody_is_asked_early_about_what_has_no_pod(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += 10 * SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.pods.looks == 0


async def test_an_api_server_that_is_away_costs_an_early_question_and_no_hold(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    bench.pods.is_away = True
    bench.now += SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"


async def test_what_was_forged_for_a_pod_takes_nothing_from_it(bench: ClusterBench) -> None:
    """Whoever finds the one out cannot write the other down at that moment."""
    await bench.reserve(ask(2), on("node-a", "GPU-a1"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r2"), pod(1))
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, CARRYING)
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    bench.store.refusals = 1
    assert [one.id for one in await bench.ledger.collect(bench.now)] == ["r2"]
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(3), on("node-a", "GPU-a0"))
    assert (await bench.reserve(ask(3), on("node-a", "GPU-a1"))).uuids == ("GPU-a1",)


def exists(bench: ClusterBench, raw: Raw) -> None:
    bench.pods.uids.add("uid-1")
    bench.pods.raws["uid-1"] = raw


async def test_while_nobody_knows_of_a_promised_pod_its_devices_stay_held(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    bench.pods.is_away = True
    bench.now += timedelta(hours=1)
    assert not await bench.ledger.collect(bench.now)
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"))
    bench.pods.is_away = False
    bench.now += timedelta(seconds=20)
    assert not await bench.ledger.collect(bench.now)  # it may have been there meanwhile
    bench.now += timedelta(seconds=20)
    assert [one.id for one in await bench.given_up()] == ["r1"]
    assert (await bench.reserve(ask(2), on("node-a", "GPU-a0"))).id == "r2"


async def test_what_nobody_could_decide_to_the_end_is_given_up_by_the_next_who_looks(bench: ClusterBench) -> None:
    """Whoever looked was stopped between two reservations, one of which needed asking."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    await bench.reserve(ask(2), on("node-a", "GPU-a1"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r2"), pod(2))
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    bench.pods.may_answer.clear()
    looking = asyncio.create_task(bench.ledger.collect(bench.now))
    await asyncio.sleep(0)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    bench.pods.may_answer.set()
    assert [one.id for one in await bench.given_up()] == ["r2"]
    bench.now += PATIENCE + CLOCK_SKEW
    assert [one.id for one in await bench.given_up()] == ["r1"]


async def test_what_was_offered_and_could_not_be_taken_is_offered_again(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await bench.ledger.collect(bench.now)
    bench.store.refusals = 1
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"))
    slot = on("node-a", "GPU-a0").slots[0]
    assert not bench.fleet.is_slot_free(slot)
    await bench.ledger.collect(bench.now)
    assert bench.fleet.is_slot_free(slot)


# One id on two nodes.


async def on_two_nodes(bench: ClusterBench) -> Replica:
    """The one who was behind, which has caught up."""
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += timedelta(seconds=1)
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=behind)
    behind.watch.catch_up()
    return behind


async def test_an_id_that_stands_on_two_nodes_is_seen_twice_and_found_where_it_is_looked_for(
    bench: ClusterBench,
) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    assert sorted(one.node for one in ledger.reservations()) == ["node-a", "node-b"]
    found = [await ledger.find(R1, node=node) for node in ("node-a", "node-b", None)]
    assert [one and one.node for one in found] == ["node-a", "node-b", "node-a"]
    assert [len(ledger.of_device(DeviceUuid(uuid))) for uuid in ("GPU-a0", "GPU-b0")] == [1, 1]
    assert ledger.pending.gpus_in("ml") == 2


async def test_where_it_is_looked_for_is_asked_though_it_is_known_elsewhere(bench: ClusterBench) -> None:
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=behind)
    found = await behind.ledger.find(R1, node="node-a")
    assert found is not None
    assert found.node == "node-a"


@pytest.mark.parametrize("node", ["node-a", "node-b"])
async def test_of_an_id_on_two_nodes_the_one_that_is_meant_is_named_and_released(
    bench: ClusterBench, node: str
) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    assert (await ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(1), node=node)).node == node
    held = ledger.of_pod("uid-1")
    assert held is not None
    assert held.node == node
    assert await ledger.release(R1, pod(1), node=node)
    left = {name: len(bench.held(name)) for name in ("node-a", "node-b")}
    assert left == {"node-a": node != "node-a", "node-b": node != "node-b"}
    assert ledger.of_pod("uid-1") is None


async def test_of_an_id_on_two_nodes_both_expire(bench: ClusterBench) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    given_up = await ledger.collect(bench.now)
    assert sorted(one.node for one in given_up) == ["node-a", "node-b"]
    assert ledger.pending.gpus_in("ml") == 0
    for one in given_up:
        await ledger.expire(one)
    assert not ledger.reservations()


async def test_an_id_that_came_again_unseen_leaves_nothing_of_what_it_was(bench: ClusterBench) -> None:
    """Released and made anew with another device and pod, in one step of a watch that was behind."""
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(1))
    behind.watch.catch_up()
    await bench.ledger.release(R1, pod(1))
    await bench.reserve(ask(1), on("node-a", "GPU-a1"))
    await bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(2))
    behind.ledger.learn(bench.store.objects["node-a"])
    assert behind.ledger.of_pod("uid-1") is None
    assert [behind.fleet.is_slot_free(on("node-a", f"GPU-a{k}").slots[0]) for k in (0, 1)] == [True, False]


# Faults.


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_fault_in_the_write_costs_a_try_and_never_a_second_holding(
    bench: ClusterBench, fault: Fault, times: int
) -> None:
    bench.store.faults = [fault] * times
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"), on("node-b", "GPU-b0"))
    assert held.node == "node-a"
    assert list(bench.held()) == ["GPU-a0/0"]
    assert not bench.held("node-b")
    assert bench.store.writes == 1


async def test_a_store_that_stays_away_is_said_when_nobody_waits_any_more(bench: ClusterBench) -> None:
    async def time_passes() -> None:
        await asyncio.sleep(0.05)
        bench.now += timedelta(seconds=11)

    with bench.store.away():
        passing = asyncio.create_task(time_passes())
        with pytest.raises((DeadlinePassedError, LedgerUnavailableError)):
            await bench.reserve(ask(1), on("node-a", "GPU-a0"))
        await passing
    assert bench.held() == {}
    assert (await bench.reserve(ask(1), on("node-a", "GPU-a0"))).node == "node-a"


async def test_a_store_that_cannot_be_asked_is_not_a_reservation_that_is_not_there(bench: ClusterBench) -> None:
    with bench.store.away(), pytest.raises(LedgerUnavailableError):
        await bench.ledger.find(R1, node="node-a")


async def test_one_bad_move_does_not_fail_its_neighbours(bench: ClusterBench) -> None:
    """The store refuses a write of several: here because a hand has put a pod's uid behind our back."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    original = bench.store.put_status
    refusals = 0

    async def picky(raw: Any) -> Any:
        nonlocal refusals
        if any(entry["reservation"] == "r3" for entry in raw["status"]["held"].values()):
            refusals += 1
            raise RefusedError("no r3 here")
        return await original(raw)

    bench.store.put_status = picky  # type: ignore[method-assign]  # a store with a rule of its own
    results = await asyncio.gather(
        *(bench.reserve(ask(n), on("node-a", f"GPU-a{n - 1}")) for n in (2, 3, 4)), return_exceptions=True
    )
    assert [isinstance(one, Reservation) for one in results] == [True, False, True]
    assert refusals


async def test_an_object_that_says_nothing_of_what_is_held_is_rebuilt_before_it_gives_anything(
    bench: ClusterBench,
) -> None:
    bench.pods.raws = {"u1": carrying("u1", "GPU-a0"), "u2": carrying("u2", "GPU-b0", node="node-b", reservation="r8")}
    for raw in (NODE_A, NODE_B):
        del bench.store.objects[raw["metadata"]["name"]]
        bench.store.apply(raw)
    replica = bench.another()
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=replica)
    held = await bench.reserve(ask(2), on("node-a", "GPU-a0"), on("node-a", "GPU-a1"), by=replica)
    assert held.uuids == ("GPU-a1",)
    assert {slot: entry.get("uid") for slot, entry in bench.held().items()} == {"GPU-a0/0": "u1", "GPU-a1/0": None}
    assert bench.pods.lists == 1


async def test_pods_listed_before_an_object_was_made_anew_do_not_speak_for_it(bench: ClusterBench) -> None:
    bench.store.objects.clear()
    bench.store.apply(NODE_B)
    replica = bench.another()
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=replica)
    bench.pods.raws = {"u1": carrying("u1", "GPU-a0")}
    bench.store.apply(NODE_A)
    replica.watch.catch_up()
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=replica)


async def test_an_object_that_cannot_be_rebuilt_gives_nothing(bench: ClusterBench) -> None:
    bench.store.objects.clear()
    bench.store.apply(NODE_A)
    replica = bench.another()
    bench.pods.is_away = True
    with pytest.raises(LedgerUnavailableError):
        await bench.reserve(ask(1), on("node-a", "GPU-a0"), by=replica)
    assert "held" not in bench.store.objects["node-a"]["status"]


async def test_of_two_pods_with_one_device_the_one_on_the_node_is_rebuilt(bench: ClusterBench) -> None:
    bench.pods.raws = {
        "u1": carrying("u1", "GPU-a0", is_on_node=False),
        "u2": carrying("u2", "GPU-a0", reservation="r8"),
    }
    bench.store.objects.clear()
    bench.store.apply(NODE_A)
    await bench.reserve(ask(1), on("node-a", "GPU-a1"), by=bench.another())
    assert bench.held()["GPU-a0/0"]["uid"] == "u2"


async def test_an_object_that_is_being_deleted_gives_nothing_new(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    raw = bench.store.objects["node-a"]
    bench.store.apply({**raw, "metadata": {**raw["metadata"], "finalizers": ["gpuwarden.io/held"]}})
    bench.store.delete("node-a")
    replica = bench.another()
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a1"), by=replica)
    assert (await bench.reserve(ask(1), by=replica)).uuids == ("GPU-a0",)


async def test_a_node_whose_object_is_gone_gives_nothing_and_forgets_nothing(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    del bench.store.objects["node-a"]
    bench.ledger.forget("node-a")
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a1"))
    assert await bench.ledger.find(R1) is not None
    assert not bench.fleet.is_slot_free(on("node-a", "GPU-a0").slots[0])


async def test_what_was_held_on_an_object_that_cannot_be_read_is_remembered(bench: ClusterBench) -> None:
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bad = {**bench.store.objects["node-a"], "status": {"held": {"no slot": {"phase": "odd"}}}}
    bad["metadata"] = {**bad["metadata"], "resourceVersion": "999"}
    bench.ledger.learn(bad)
    assert await bench.ledger.find(R1) == held


@pytest.mark.parametrize("slot", ["GPU-a0", "GPU-a0/", "GPU-a0/01", "GPU-a0/-1", "GPU-a0/\u0663", "GPU-a0/1000"])
def test_what_names_no_slot_is_not_read_as_one(slot: str) -> None:
    """Written back it would be another key, and so the first one dropped."""
    held = {slot: {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}}
    with pytest.raises(UnreadableGpuNodeError):
        GpuNode.parse({**NODE_A, "status": {"held": held}})


async def test_what_is_no_object_at_all_is_no_news(bench: ClusterBench) -> None:
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    for raw in ({"kind": "APIResourceList", "resources": []}, {"kind": "GPUNodeList", "metadata": {}, "items": []}):
        bench.ledger.learn(raw)
    assert await bench.ledger.find(R1) == held


async def test_an_object_that_a_hand_made_unreadable_holds_nobody_up_until_it_is_mended(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    good = bench.store.objects["node-a"]
    by_hand = {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}
    bench.store.apply({**good, "status": {"held": {**good["status"]["held"], "GPU-a1": by_hand}}})
    async with asyncio.timeout(5):
        held = await bench.reserve(ask(2), on("node-a", "GPU-a2"), on("node-b", "GPU-b0"))
    assert held.node == "node-b"
    assert await bench.ledger.find(R1) is not None
    bench.store.apply({**good, "status": good["status"]})
    bench.replica.watch.catch_up()
    assert (await bench.reserve(ask(3), on("node-a", "GPU-a2"))).node == "node-a"


async def test_nothing_is_kept_of_nodes_that_are_gone_or_never_were(bench: ClusterBench) -> None:
    """Whoever makes a pod can name a node."""
    for name in ("node-x", "node-y"):
        with pytest.raises(SlotsTakenError):
            await bench.reserve(ask(1), on(name, "GPU-x"))
    del bench.store.objects["node-b"]
    bench.ledger.forget("node-b")
    assert bench.ledger.writer_count == 1


@pytest.mark.parametrize(
    ("uuids", "record"),
    [
        pytest.param("GPU-a0", ClaimRecord(), id="some-for-none"),
        pytest.param("", ClaimRecord(gpus=1), id="none-for-one"),
        pytest.param("GPU-a0,GPU-a1", ClaimRecord(gpus=1), id="two-for-one"),
        pytest.param("GPU-a0", ClaimRecord(gpus=2), id="one-for-two"),
    ],
)
async def test_a_pod_with_another_number_of_devices_than_it_was_to_have_carries_nothing(
    bench: ClusterBench, uuids: str, record: ClaimRecord
) -> None:
    raw = carrying("u1", uuids)
    raw["metadata"]["annotations"]["gpuwarden.io/claim"] = record.text()
    assert ReservedPod.of(raw) is None
    honest = ReservedPod.of(carrying("u1", "GPU-a0"))
    assert honest is not None
    forged = evolve(honest, uuids=tuple(DeviceUuid(one) for one in uuids.split(",") if one), gpus=record.gpus)
    with pytest.raises(SlotsTakenError):
        await bench.ledger.adopt(forged)
    assert bench.held() == {}


async def test_older_news_is_no_news(bench: ClusterBench) -> None:
    before = bench.store.history[-2]
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.ledger.learn(before)
    assert await bench.ledger.find(R1) is not None


# The second lock, as the fake has it; the e2e shows that the real one is the same.

PENDING: dict[str, Any] = {"reservation": "r1", "phase": "pending", "namespace": "ml", "digest": "d"}


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({}, id="dropped"),
        pytest.param({"s": {**PENDING, "reservation": "r2"}}, id="another's"),
        pytest.param({"s": {**PENDING, "namespace": "x"}}, id="another namespace"),
        pytest.param({"s": {**PENDING, "digest": "x"}}, id="another claim"),
    ],
)
def test_the_store_refuses_to_give_away_what_is_held(after: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        check_rules({"s": PENDING}, after)


class SlowStore(FakeStore):
    """Carries a write out, and answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer, self.has_begun = asyncio.Event(), asyncio.Event()

    async def put_status(self, raw: Raw) -> Raw:
        self.has_begun.set()
        await self.may_answer.wait()
        return await super().put_status(raw)


async def test_at_rest_no_write_is_under_way_and_none_begins_that_nobody_waits_for(bench: ClusterBench) -> None:
    store = bench.store = SlowStore()
    store.apply({**NODE_A, **KNOWN})
    ledger = bench.another().ledger
    answer_by = bench.now + timedelta(seconds=10)
    first = asyncio.ensure_future(ledger.reserve(ask(1), [on("node-a", "GPU-a0")], answer_by=answer_by))
    await store.has_begun.wait()
    later = asyncio.ensure_future(ledger.reserve(ask(2), [on("node-a", "GPU-a1")], answer_by=answer_by))
    await asyncio.sleep(0)
    first.cancel()
    later.cancel()
    resting = asyncio.ensure_future(ledger.rest())
    await asyncio.sleep(0.01)
    assert not resting.done()
    store.may_answer.set()
    await resting
    assert store.writes == 1
    assert list(bench.held()) == ["GPU-a0/0"]


class StrictStore(FakeStore):
    """Its rules forbid whatever is written on some nodes."""

    def __init__(self, *forbidden: str) -> None:
        super().__init__()
        self.forbidden = forbidden
        self.tries = 0

    async def put_status(self, raw: Raw) -> Raw:
        self.tries += 1
        if raw["metadata"]["name"] in self.forbidden:
            await asyncio.sleep(0)
            raise RefusedError("too long")
        return await super().put_status(raw)


def strict(bench: ClusterBench, *forbidden: str) -> tuple[StrictStore, Reserver]:
    store = bench.store = StrictStore(*forbidden)
    store.apply({**NODE_A, **KNOWN})
    store.apply({**NODE_B, **KNOWN})
    replica = bench.another()
    return store, Reserver(replica.fleet, replica.ledger, EvidencePolicy(), lambda: bench.now, Metrics())


CLAIM = Claim(ClaimRecord(gpus=1))


async def test_what_the_store_forbids_everywhere_is_denied_after_few_tries(bench: ClusterBench) -> None:
    """A forged review may name a namespace that no rule lets in: it must not keep us and the API server busy."""
    store, reserver = strict(bench, "node-a", "node-b")
    what = ReservationRequest(ReservationId("r1"), "n" * 300, CLAIM.digest)
    async with asyncio.timeout(30):
        denied = await reserver.reserve(what, CLAIM, answer_by=bench.now + timedelta(seconds=10))
    assert isinstance(denied, Deny)
    assert denied.reason is Reason.LEDGER_AWAY
    assert store.tries <= 2 * MAX_PLACEMENTS


@pytest.mark.parametrize("phase", ["finalized", "releasing"])
async def test_a_deadline_that_a_hand_has_given_to_what_has_none_stops_nobody(bench: ClusterBench, phase: str) -> None:
    entry = {"reservation": "x", "phase": phase, "namespace": "ml", "digest": "d", "deadline": "2025-01-01T00:00:00Z"}
    bench.store.apply({**bench.store.objects["node-a"], "status": {"held": {"GPU-a0/0": entry}}})
    bench.replica.watch.catch_up()
    await bench.ledger.collect(bench.now)
    taken, other = await asyncio.gather(
        bench.reserve(ask(1), on("node-a", "GPU-a0")),
        bench.reserve(ask(2), on("node-a", "GPU-a1")),
        return_exceptions=True,
    )
    assert isinstance(taken, SlotsTakenError if phase == "finalized" else Reservation)
    assert isinstance(other, Reservation)


@pytest.mark.parametrize("forbidden", ["node-a", "node-b"])
async def test_what_one_node_cannot_keep_another_does(bench: ClusterBench, forbidden: str) -> None:
    _, reserver = strict(bench, forbidden)
    what = ReservationRequest(ReservationId("r1"), "ml", CLAIM.digest)
    async with asyncio.timeout(30):
        held = await reserver.reserve(what, CLAIM, answer_by=bench.now + timedelta(seconds=10))
    assert isinstance(held, Reservation)
    assert held.node != forbidden


async def test_what_a_node_cannot_keep_is_told_once_until_it_can(bench: ClusterBench) -> None:
    with capture_logs() as logs:
        for n in range(3):
            bench.store.refusals = 1
            with pytest.raises(PlacementRefusedError):
                await bench.reserve(ask(n), on("node-a", "GPU-a0"))
        await bench.reserve(ask(5), on("node-a", "GPU-a0"))
        bench.store.refusals = 1
        with pytest.raises(PlacementRefusedError):
            await bench.reserve(ask(6), on("node-a", "GPU-a1"))
    told = [one for one in logs if one["log_level"] == "error"]
    assert [(one["event"], one["problem"]) for one in told] == [("the store refused a move", "not this one")] * 2


class OddStore(SlowStore):
    """Answers its first write with something that nobody foresaw."""

    async def put_status(self, raw: Raw) -> Raw:
        if not self.has_begun.is_set():
            self.has_begun.set()
            await self.may_answer.wait()
            raise KeyError("metadata")
        return await FakeStore.put_status(self, raw)


async def test_what_nobody_foresaw_strands_nobody_who_has_queued_behind_it(bench: ClusterBench) -> None:
    store = bench.store = OddStore()
    store.apply({**NODE_A, **KNOWN})
    bench.ledger = bench.another().ledger
    answer_by = bench.now + timedelta(seconds=10)
    first = asyncio.ensure_future(bench.ledger.reserve(ask(1), [on("node-a", "GPU-a0")], answer_by=answer_by))
    await store.has_begun.wait()
    later = asyncio.ensure_future(bench.ledger.reserve(ask(2), [on("node-a", "GPU-a1")], answer_by=answer_by))
    await asyncio.sleep(0)
    store.may_answer.set()
    async with asyncio.timeout(5):
        with pytest.raises(LedgerUnavailableError):
            await first
        assert (await later).uuids == ("GPU-a1",)


# Objects that are made anew again and again, and stores that will not answer.


def made_anew(bench: ClusterBench) -> None:
    """By force, past the finalizer: it says nothing of what is held there."""
    bench.store.objects.pop("node-a")
    bench.store.apply({**NODE_A, "metadata": {"name": "node-a"}})
    bench.replica.watch.catch_up()


async def test_who_has_listed_pods_for_one_object_rebuilds_no_later_one_by_them(bench: ClusterBench) -> None:
    """A pod that came between the two is not in that list."""
    made_anew(bench)
    has_listed, may_go_on, list_pods = asyncio.Event(), asyncio.Event(), bench.pods.reserved_pods

    async def reserved_pods() -> list[ReservedPod]:
        found = await list_pods()
        if not has_listed.is_set():
            has_listed.set()
            await may_go_on.wait()
        return found

    other = bench.another()
    bench.pods.reserved_pods = reserved_pods  # type: ignore[method-assign]
    taking = asyncio.create_task(bench.reserve(ask(2), on("node-a", "GPU-a0")))
    await has_listed.wait()
    await bench.reserve(ask(9), on("node-a", "GPU-a0"), by=other)
    bench.pods.raws["uid-9"] = carrying("uid-9", "GPU-a0", reservation="r9")
    bench.pods.uids.add("uid-9")
    made_anew(bench)
    may_go_on.set()
    with pytest.raises(SlotsTakenError):
        await taking
    assert bench.held()["GPU-a0/0"]["reservation"] == "r9"


async def test_a_list_of_pods_that_failed_in_whatever_way_is_asked_for_again(bench: ClusterBench) -> None:
    made_anew(bench)
    list_pods, lists = bench.pods.reserved_pods, 0

    async def reserved_pods() -> list[ReservedPod]:
        nonlocal lists
        lists += 1
        if lists == 1:
            raise RuntimeError("a bug, once")
        return await list_pods()

    bench.pods.reserved_pods = reserved_pods  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailableError):
        await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    assert (lists, len(bench.held())) == (2, 1)


async def test_a_store_that_is_asked_too_much_is_asked_less_and_less(
    bench: ClusterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def busy(_raw: Raw) -> Raw:
        nonlocal tries
        tries += 1
        raise StoreUnavailableError("the API server answered 429")

    monkeypatch.setattr(bench.store, "put_status", busy)
    taking = asyncio.create_task(bench.reserve(ask(1), on("node-a", "GPU-a0")))
    await asyncio.sleep(1.5)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert 2 < tries < 12
