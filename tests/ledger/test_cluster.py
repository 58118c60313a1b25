"""The cluster ledger fulfils the contract, with several replicas, lost responses and lagging watches."""

import asyncio
from collections.abc import Callable, Collection, Mapping
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
from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import MAX_PLACEMENTS, EvidencePolicy
from webhook.core.device import CLAIMED, DeviceUuid, Node
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
    GpuDelivery,
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
from webhook.ledger.cluster import BACKOFF, DEFAULT_TIMEOUT, ClusterLedger, PodReader, PodReaderUnavailableError
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
    """An existing pod that carries a reservation."""
    annotations = {
        "gpuwarden.io/reservation-id": reservation,
        "gpuwarden.io/node": node,
        "gpuwarden.io/gpu-uuid": uuid,
        "gpuwarden.io/claim": ClaimRecord(gpus=1).text(),
    }
    meta = {"namespace": "ml", "name": uid, "uid": uid, "annotations": annotations}
    return {"metadata": meta, "spec": {"nodeName": node} if is_on_node else {}, "status": {"phase": "Running"}}


def ended(phase: str = "Succeeded", **state: Raw) -> Raw:
    """A pod's status as the kubelet writes it when its containers have ended."""
    return {"phase": phase, "containerStatuses": [{"state": state or {"terminated": {"exitCode": 0}}}]}


class Pods:
    """The pods of the API server by uid, and its nodes."""

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

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        self.looks += 1
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return PodSnapshot.of(self.raws[pod.uid]) if pod.uid in self.uids else None

    async def read_node(self, name: str) -> NodeSnapshot | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return self.nodes.get(name, NodeSnapshot("boot-1", is_ready=True, ready_since=LONG_AGO))

    async def annotate(self, pod: PodIdentity, annotations: Mapping[str, str]) -> None:
        if self.is_away:
            raise PodReaderUnavailableError("away")
        meta = self.raws[pod.uid]["metadata"]
        meta["annotations"] = {**meta["annotations"], **annotations}

    async def remove(self, pod: PodIdentity, version: str) -> None:
        if version == self.raws[pod.uid]["metadata"].get("resourceVersion", ""):
            self.removed.append(pod)


class Replica:
    """One process with a store that other processes use too."""

    def __init__(
        self, store: FakeStore, pods: PodReader, clock: Callable[[], datetime], backoff: Backoff = BACKOFF
    ) -> None:
        self.fleet = Fleet()
        self.ledger = ClusterLedger(self.fleet, store, pods, clock, Times(PENDING_DEADLINE, CLOCK_SKEW), backoff)
        self.watch = Watch(store, self.ledger.learn)
        for raw in store.objects.values():
            node = GpuNode.parse(raw)
            self.fleet.put(Node(node.name, devices=node.devices), clock())
        self.watch.relist()


class ClusterBench:
    """The contract's bench, with as many replicas as a case needs."""

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
        """On a replica that has watched pods all the time."""
        return await self.ledger.collect(self.now, was_never_created=lambda _: True)

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
    """The whole contract."""

    async def given_up(self, bench: Bench) -> Collection[Reservation]:
        assert isinstance(bench, ClusterBench)
        return await bench.given_up()


# The stored object.


async def test_object_has_one_entry_per_reserved_slot(bench: ClusterBench) -> None:
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


async def test_exclusively_reserved_shared_device_has_no_free_share(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-s"))
    assert numbers(bench) == (8, 1, 4)


async def test_device_counts_follow_devices_without_reservations(bench: ClusterBench) -> None:
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


async def test_concurrent_reservations_on_one_node_share_writes(bench: ClusterBench) -> None:
    places = [on("node-a", f"GPU-a{k}") for k in range(4)]
    await asyncio.gather(*(bench.reserve(ask(n), places[n]) for n in range(4)))
    assert bench.store.writes <= 2


# Several replicas.


async def test_slots_of_a_write_in_flight_are_not_offered_to_other_reviews(bench: ClusterBench) -> None:
    slot = on("node-a", "GPU-a0").slots[0]
    taking = asyncio.create_task(bench.reserve(ask(1), on("node-a", "GPU-a0")))
    await asyncio.sleep(0)
    assert not builders.is_slot_free(bench.fleet, slot)
    bench.store.faults = [Fault.NOT_WRITTEN] * 3
    await taking
    assert not builders.is_slot_free(bench.fleet, slot)


async def test_failed_reservation_restores_actual_holders_in_the_fleet(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"), by=other)
    slots = on("node-a", "GPU-a0", "GPU-a1")
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), slots)
    assert [builders.is_slot_free(bench.fleet, slot) for slot in slots.slots] == [False, True]


def now_with(bench: ClusterBench, injection: str) -> None:
    """`reconcile` writes the injection. The watch of the replica is late."""
    raw = bench.store.objects["node-a"]
    bench.store.apply({**raw, "spec": {**raw["spec"], "injection": injection}})


@pytest.mark.parametrize(
    ("injection", "delivery", "is_taken"),
    [
        ("native", None, False),
        ("native", GpuDelivery.AWAITED, False),
        ("of a newer version", None, False),
        ("plugin", None, False),
        ("plugin", GpuDelivery.AWAITED, True),
        ("nvidia", GpuDelivery.AWAITED, False),
        ("nvidia", None, True),
        ("dra", None, True),
    ],
)
async def test_decision_on_an_older_injection_reserves_nothing(
    bench: ClusterBench, injection: str, delivery: GpuDelivery | None, *, is_taken: bool
) -> None:
    now_with(bench, injection)
    taking = bench.reserve(evolve(ask(1), delivery=delivery), on("node-a", "GPU-a0"))
    if is_taken:
        await taking
    else:
        with pytest.raises(SlotsTakenError):
            await taking
    assert bool(bench.held()) is is_taken


async def test_reservation_of_before_the_injection_changed_is_found_again(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    now_with(bench, "native")
    bench.replica.watch.catch_up()
    assert (await bench.reserve(ask(1), on("node-a", "GPU-a1"))).uuids == ("GPU-a0",)


async def test_one_of_four_replicas_wins_each_device_without_watches(bench: ClusterBench) -> None:
    replicas = [bench.another() for _ in range(4)]
    places = [on("node-a", f"GPU-a{k}") for k in range(4)]
    asks = [bench.reserve(ask(n), *places, by=replicas[n % 4]) for n in range(40)]
    results = await asyncio.gather(*asks, return_exceptions=True)
    winners = [one for one in results if isinstance(one, Reservation)]
    assert sorted(one.uuids for one in winners) == [("GPU-a0",), ("GPU-a1",), ("GPU-a2",), ("GPU-a3",)]
    assert all(isinstance(one, Reservation | SlotsTakenError) for one in results)


@pytest.mark.parametrize(
    "change", [{"mismatch": CLAIMED}, {"mismatch": "given"}, {"healthy": False}, {"uuid": "GPU-z"}]
)
async def test_stale_replica_does_not_take_devices_that_are_not_offered_any_more(
    bench: ClusterBench, change: Raw
) -> None:
    raw = bench.store.objects["node-a"]
    devices = [{**one, **(change if one["uuid"] == "GPU-a0" else {})} for one in raw["spec"]["devices"]]
    bench.store.apply({**raw, "spec": {"devices": devices}})
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    assert (await bench.reserve(ask(2), on("node-a", "GPU-a1"))).node == "node-a"


async def test_stale_replica_does_not_take_devices_reserved_by_another_replica(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=other)


async def test_reservation_of_another_replica_is_bound_to_its_pod(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    assert await other.ledger.find(R1) is None
    assert await other.ledger.find(R1, node="node-a") is not None
    bound = await other.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    assert bound.uid == "uid-1"
    bench.replica.watch.catch_up()
    assert bench.ledger.of_pod("uid-1") == bound


async def test_first_uid_wins_when_two_replicas_bind_one_reservation(
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


async def test_expired_reservation_is_displaced_in_two_writes_and_its_pod_is_refused(bench: ClusterBench) -> None:
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


async def test_offered_slots_are_taken_back_when_their_pod_is_alive(bench: ClusterBench) -> None:
    other = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    other.watch.catch_up()
    bench.now += timedelta(seconds=60)
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))  # the other replica has not observed the new deadline
    bench.now += timedelta(seconds=35)
    assert [one.id for one in await other.ledger.collect(bench.now)] == ["r1"]
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=other)
    assert not builders.is_slot_free(other.fleet, on("node-a", "GPU-a0").slots[0])


async def test_existing_pod_keeps_its_devices_without_finalize(bench: ClusterBench) -> None:
    """The reconciler may be down for longer than the deadline while the pod exists."""
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
        pytest.param({**CARRYING, "spec": {}}, True, id="carries-it-unbound"),
        pytest.param({**CARRYING, "status": ended("Failed")}, False, id="carries-it-and-has-ended"),
        pytest.param({**CARRYING, "status": {"phase": "Failed"}}, True, id="failed-and-may-run"),
        pytest.param(carrying("uid-1", "GPU-a1", reservation="r9"), False, id="carries-another"),
        pytest.param(without_annotations(None), False, id="runs-without-gpus"),
        pytest.param(without_annotations(shows("all")), False, id="sees-all-gpus-like-a-monitor"),
        pytest.param(without_annotations(shows("void")), False, id="sees-no-gpu"),
        pytest.param(without_annotations(FROM_ELSEWHERE), False, id="sees-gpus-from-another-field"),
        pytest.param(without_annotations(shows("GPU-a1")), False, id="sees-other-gpus"),
        pytest.param(without_annotations(shows("GPU-a1,GPU-a0")), True, id="sees-its-gpus"),
        pytest.param(without_annotations(shows("0,1")), True, id="sees-gpu-indices"),
        pytest.param(without_annotations(FROM_ITS_ANNOTATION), True, id="sees-its-annotation"),
        pytest.param(without_annotations(shows("GPU-a0"), node="node-b"), False, id="is-on-another-node"),
        pytest.param({**without_annotations(None), "spec": GATED}, True, id="is-gated"),
    ],
)
async def test_reservation_named_in_a_review_is_kept_only_if_its_pod_may_use_it(
    bench: ClusterBench, raw: Raw, *, is_kept: bool
) -> None:
    """Any client that may send reviews can name a pod."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, raw)
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    given_up = await bench.ledger.collect(bench.now)
    assert [one.id for one in given_up] == ([] if is_kept else ["r1"])
    assert bench.held()["GPU-a0/0"]["phase"] == ("finalized" if is_kept else "pending")


async def test_unwatched_pod_is_confirmed_before_the_deadline(bench: ClusterBench) -> None:
    """Reviews wait for free devices and no reconciler runs."""
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    exists(bench, CARRYING)
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"
    bench.now += SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "finalized"
    assert bench.ledger.pending.gpus_in("ml") == 0


async def test_missing_pod_keeps_its_reservation_after_three_early_checks(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    for _ in range(30):
        bench.now += SECOND / 2
        await bench.ledger.confirm_early(bench.now)
    assert bench.pods.looks == 3
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"


async def test_reservation_without_a_pod_is_not_checked_early(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += 10 * SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.pods.looks == 0


async def test_early_check_fails_without_releasing_while_the_api_server_is_unavailable(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    bench.pods.is_away = True
    bench.now += SECOND
    await bench.ledger.confirm_early(bench.now)
    assert bench.held()["GPU-a0/0"]["phase"] == "pending"


async def test_forged_reservation_takes_no_device_from_the_named_pod(bench: ClusterBench) -> None:
    """The replica that finds the one pod missing cannot write the other reservation at that moment."""
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


async def test_devices_stay_reserved_while_pods_cannot_be_read(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.NAMED, R1, pod(1))
    bench.pods.is_away = True
    bench.now += timedelta(hours=1)
    assert not await bench.ledger.collect(bench.now)
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"))
    bench.pods.is_away = False
    bench.now += timedelta(seconds=20)
    assert not await bench.ledger.collect(bench.now)  # the pod may have existed in between
    bench.now += timedelta(seconds=20)
    assert [one.id for one in await bench.given_up()] == ["r1"]
    assert (await bench.reserve(ask(2), on("node-a", "GPU-a0"))).id == "r2"


async def test_cancelled_expiry_is_completed_by_the_next_collect(bench: ClusterBench) -> None:
    """The first collect was cancelled between two reservations, one of which needed a read."""
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
    bench.now += DEFAULT_TIMEOUT + CLOCK_SKEW
    assert [one.id for one in await bench.given_up()] == ["r1"]


async def test_expired_slots_are_offered_again_after_a_failed_reservation(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await bench.ledger.collect(bench.now)
    bench.store.refusals = 1
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"))
    slot = on("node-a", "GPU-a0").slots[0]
    assert not builders.is_slot_free(bench.fleet, slot)
    await bench.ledger.collect(bench.now)
    assert builders.is_slot_free(bench.fleet, slot)


# One id on two nodes.


async def on_two_nodes(bench: ClusterBench) -> Replica:
    """The replica that was stale and has caught up."""
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.now += timedelta(seconds=1)
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=behind)
    behind.watch.catch_up()
    return behind


async def test_id_on_two_nodes_is_found_on_the_given_node(
    bench: ClusterBench,
) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    assert sorted(one.node for one in ledger.reservations()) == ["node-a", "node-b"]
    found = [await ledger.find(R1, node=node) for node in ("node-a", "node-b", None)]
    assert [one and one.node for one in found] == ["node-a", "node-b", "node-a"]
    assert [len(ledger.of_device(DeviceUuid(uuid))) for uuid in ("GPU-a0", "GPU-b0")] == [1, 1]
    assert ledger.pending.gpus_in("ml") == 2


async def test_find_reads_the_given_node_although_the_id_is_known_on_another(bench: ClusterBench) -> None:
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=behind)
    found = await behind.ledger.find(R1, node="node-a")
    assert found is not None
    assert found.node == "node-a"


@pytest.mark.parametrize("node", ["node-a", "node-b"])
async def test_id_on_two_nodes_is_released_on_the_given_node_only(bench: ClusterBench, node: str) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    assert (await ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(1), node=node)).node == node
    held = ledger.of_pod("uid-1")
    assert held is not None
    assert held.node == node
    assert await ledger.release(R1, pod(1), node=node)
    left = {name: len(bench.held(name)) for name in ("node-a", "node-b")}
    assert left == {"node-a": node != "node-a", "node-b": node != "node-b"}
    assert ledger.of_pod("uid-1") is None


async def test_id_on_two_nodes_expires_on_both(bench: ClusterBench) -> None:
    ledger = (await on_two_nodes(bench)).ledger
    bench.now += PENDING_DEADLINE + CLOCK_SKEW
    given_up = await ledger.collect(bench.now)
    assert sorted(one.node for one in given_up) == ["node-a", "node-b"]
    assert ledger.pending.gpus_in("ml") == 0
    for one in given_up:
        await ledger.expire(one)
    assert not ledger.reservations()


async def test_reused_id_replaces_the_unobserved_earlier_reservation(bench: ClusterBench) -> None:
    """One watch event shows both the release and a new reservation with another device and pod."""
    behind = bench.another()
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    await bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(1))
    behind.watch.catch_up()
    await bench.ledger.release(R1, pod(1))
    await bench.reserve(ask(1), on("node-a", "GPU-a1"))
    await bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, pod(2))
    behind.ledger.learn(bench.store.objects["node-a"])
    assert behind.ledger.of_pod("uid-1") is None
    assert [builders.is_slot_free(behind.fleet, on("node-a", f"GPU-a{k}").slots[0]) for k in (0, 1)] == [True, False]


# Faults.


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
@pytest.mark.parametrize("times", [1, 3])
async def test_failed_write_is_retried_without_a_second_reservation(
    bench: ClusterBench, fault: Fault, times: int
) -> None:
    bench.store.faults = [fault] * times
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"), on("node-b", "GPU-b0"))
    assert held.node == "node-a"
    assert list(bench.held()) == ["GPU-a0/0"]
    assert not bench.held("node-b")
    assert bench.store.writes == 1


@pytest.mark.simulated_time
async def test_unavailable_store_is_reported_at_the_deadline(bench: ClusterBench) -> None:
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


async def test_unavailable_store_is_not_an_unknown_reservation(bench: ClusterBench) -> None:
    with bench.store.away(), pytest.raises(LedgerUnavailableError):
        await bench.ledger.find(R1, node="node-a")


async def test_refused_move_does_not_fail_other_moves_of_the_same_write(bench: ClusterBench) -> None:
    """The store refuses a write of several moves, here because a user has changed a pod's uid in the object."""
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


async def test_object_without_status_is_rebuilt_before_the_first_reservation(
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


async def test_recreated_object_is_rebuilt_from_a_newer_pod_list(bench: ClusterBench) -> None:
    bench.store.objects.clear()
    bench.store.apply(NODE_B)
    replica = bench.another()
    await bench.reserve(ask(1), on("node-b", "GPU-b0"), by=replica)
    bench.pods.raws = {"u1": carrying("u1", "GPU-a0")}
    bench.store.apply(NODE_A)
    replica.watch.catch_up()
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a0"), by=replica)


async def test_object_that_cannot_be_rebuilt_takes_no_reservation(bench: ClusterBench) -> None:
    bench.store.objects.clear()
    bench.store.apply(NODE_A)
    replica = bench.another()
    bench.pods.is_away = True
    with pytest.raises(LedgerUnavailableError):
        await bench.reserve(ask(1), on("node-a", "GPU-a0"), by=replica)
    assert "held" not in bench.store.objects["node-a"]["status"]


async def test_rebuild_prefers_the_pod_on_the_node(bench: ClusterBench) -> None:
    bench.pods.raws = {
        "u1": carrying("u1", "GPU-a0", is_on_node=False),
        "u2": carrying("u2", "GPU-a0", reservation="r8"),
    }
    bench.store.objects.clear()
    bench.store.apply(NODE_A)
    await bench.reserve(ask(1), on("node-a", "GPU-a1"), by=bench.another())
    assert bench.held()["GPU-a0/0"]["uid"] == "u2"


async def test_object_being_deleted_takes_no_new_reservation(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    raw = bench.store.objects["node-a"]
    bench.store.apply({**raw, "metadata": {**raw["metadata"], "finalizers": ["gpuwarden.io/held"]}})
    bench.store.delete("node-a")
    replica = bench.another()
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a1"), by=replica)
    assert (await bench.reserve(ask(1), by=replica)).uuids == ("GPU-a0",)


async def test_deleted_object_takes_no_reservation_and_its_reservations_stay_known(bench: ClusterBench) -> None:
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    del bench.store.objects["node-a"]
    bench.ledger.forget("node-a")
    with pytest.raises(SlotsTakenError):
        await bench.reserve(ask(2), on("node-a", "GPU-a1"))
    assert await bench.ledger.find(R1) is not None
    assert not builders.is_slot_free(bench.fleet, on("node-a", "GPU-a0").slots[0])


async def test_reservations_of_an_unreadable_object_stay_known(bench: ClusterBench) -> None:
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bad = {**bench.store.objects["node-a"], "status": {"held": {"no slot": {"phase": "odd"}}}}
    bad["metadata"] = {**bad["metadata"], "resourceVersion": "999"}
    bench.ledger.learn(bad)
    assert await bench.ledger.find(R1) == held


@pytest.mark.parametrize("slot", ["GPU-a0", "GPU-a0/", "GPU-a0/01", "GPU-a0/-1", "GPU-a0/\u0663", "GPU-a0/1000"])
def test_invalid_slot_names_make_an_object_unreadable(slot: str) -> None:
    """Written back it would have another key, so the original one would be dropped."""
    held = {slot: {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}}
    with pytest.raises(UnreadableGpuNodeError):
        GpuNode.parse({**NODE_A, "status": {"held": held}})


async def test_object_without_a_name_is_ignored(bench: ClusterBench) -> None:
    held = await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    for raw in ({"kind": "APIResourceList", "resources": []}, {"kind": "GPUNodeList", "metadata": {}, "items": []}):
        bench.ledger.learn(raw)
    assert await bench.ledger.find(R1) == held


async def test_unreadable_object_delays_no_review_until_it_is_repaired(bench: ClusterBench) -> None:
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


async def test_writers_of_deleted_and_unknown_nodes_are_dropped(bench: ClusterBench) -> None:
    """Any client that may create pods can name a node."""
    for name in ("node-x", "node-y"):
        with pytest.raises(SlotsTakenError):
            await bench.reserve(ask(1), on(name, "GPU-x"))
    del bench.store.objects["node-b"]
    bench.ledger.forget("node-b")
    assert bench.ledger._writers.keys() == {"node-a"}


@pytest.mark.parametrize(
    ("uuids", "record"),
    [
        pytest.param("GPU-a0", ClaimRecord(), id="one-device-for-no-claim"),
        pytest.param("", ClaimRecord(gpus=1), id="no-device-for-one"),
        pytest.param("GPU-a0,GPU-a1", ClaimRecord(gpus=1), id="two-for-one"),
        pytest.param("GPU-a0", ClaimRecord(gpus=2), id="one-for-two"),
    ],
)
async def test_pod_with_a_wrong_number_of_devices_carries_no_reservation(
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


async def test_older_object_version_is_ignored(bench: ClusterBench) -> None:
    before = bench.store.history[-2]
    await bench.reserve(ask(1), on("node-a", "GPU-a0"))
    bench.ledger.learn(before)
    assert await bench.ledger.find(R1) is not None


# The validation rules, as the fake has them; the e2e tests show that the real ones are the same.

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
def test_store_refuses_to_displace_a_live_reservation(after: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        check_rules({"s": PENDING}, after)


class SlowStore(FakeStore):
    """Applies a write at once and responds when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer, self.has_begun = asyncio.Event(), asyncio.Event()

    async def put_status(self, raw: Raw) -> Raw:
        self.has_begun.set()
        await self.may_answer.wait()
        return await super().put_status(raw)


@pytest.mark.simulated_time
async def test_rest_waits_for_writes_in_progress_and_starts_none_without_a_caller(bench: ClusterBench) -> None:
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
    finishing = asyncio.ensure_future(ledger.finish_writes())
    await asyncio.sleep(0.01)
    assert not finishing.done()
    store.may_answer.set()
    await finishing
    assert store.writes == 1
    assert list(bench.held()) == ["GPU-a0/0"]


class StrictStore(FakeStore):
    """Refuses every write on some nodes."""

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


async def test_placement_refused_on_every_node_is_denied_after_few_attempts(bench: ClusterBench) -> None:
    """A forged review may name a namespace that no policy admits: it must not keep us and the API server busy."""
    store, reserver = strict(bench, "node-a", "node-b")
    what = ReservationRequest(ReservationId("r1"), "n" * 300, CLAIM.digest)
    async with asyncio.timeout(30):
        denied = await reserver.reserve(what, CLAIM, answer_by=bench.now + timedelta(seconds=10))
    assert isinstance(denied, Deny)
    assert denied.reason is Reason.LEDGER_AWAY
    assert store.tries <= 2 * MAX_PLACEMENTS


@pytest.mark.parametrize("phase", ["finalized", "releasing"])
async def test_deadline_added_by_hand_to_a_finalized_reservation_is_harmless(bench: ClusterBench, phase: str) -> None:
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
async def test_placement_refused_on_one_node_is_made_on_another(bench: ClusterBench, forbidden: str) -> None:
    _, reserver = strict(bench, forbidden)
    what = ReservationRequest(ReservationId("r1"), "ml", CLAIM.digest)
    async with asyncio.timeout(30):
        held = await reserver.reserve(what, CLAIM, answer_by=bench.now + timedelta(seconds=10))
    assert isinstance(held, Reservation)
    assert held.node != forbidden


async def test_refused_write_is_logged_once_until_a_write_succeeds(bench: ClusterBench) -> None:
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
    assert [(one["event"], one["problem"]) for one in told] == [("write refused by the API server", "not this one")] * 2


class BrokenStore(SlowStore):
    """Fails its first write with an unexpected error."""

    async def put_status(self, raw: Raw) -> Raw:
        if not self.has_begun.is_set():
            self.has_begun.set()
            await self.may_answer.wait()
            raise KeyError("metadata")
        return await FakeStore.put_status(self, raw)


async def test_unexpected_error_in_a_move_does_not_block_queued_moves(bench: ClusterBench) -> None:
    store = bench.store = BrokenStore()
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


# Recreated objects, and stores that do not respond.


def recreated(bench: ClusterBench) -> None:
    """Deleted by force despite its finalizer, and recreated without a status."""
    bench.store.objects.pop("node-a")
    bench.store.apply({**NODE_A, "metadata": {"name": "node-a"}})
    bench.replica.watch.catch_up()


async def test_pod_list_is_not_reused_to_rebuild_a_later_object(bench: ClusterBench) -> None:
    """A pod created between the two objects is not in that list."""
    recreated(bench)
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
    recreated(bench)
    may_go_on.set()
    with pytest.raises(SlotsTakenError):
        await taking
    assert bench.held()["GPU-a0/0"]["reservation"] == "r9"


async def test_failed_pod_list_is_requested_again(bench: ClusterBench) -> None:
    recreated(bench)
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


@pytest.mark.simulated_time
async def test_overloaded_store_is_retried_with_increasing_pauses(bench: ClusterBench) -> None:
    tries = 0

    class Overloaded(FakeStore):
        async def put_status(self, raw: Raw) -> Raw:
            nonlocal tries
            tries += 1
            raise StoreUnavailableError("the API server answered 429")

    store = bench.store = Overloaded()
    store.apply({**NODE_A, **KNOWN})
    taking = asyncio.create_task(bench.reserve(ask(1), on("node-a", "GPU-a0"), by=bench.another()))
    await asyncio.sleep(1.5)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert 2 < tries < 12
