"""The reconciler: pods decide, and nothing is freed because a pod could not be read."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.test_cluster import NODE_A, ClusterBench, Pods, ended
from tests.recorded_events import RecordedEvents
from webhook.core import keys
from webhook.core.claim_keys import ClaimRecord
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, PodProof, ReservationId, ReservationRequest
from webhook.ledger.at_binding import MAX_BINDING_DURATION
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import OrphanTimes
from webhook.ledger.reconcile import (
    MAX_DELETIONS,
    RECHECK_DELAY,
    BindDeadline,
    OnBindDeadline,
    Reconciler,
)
from webhook.ledger.reserved_pod import PodSnapshot

BIND_DEADLINE = timedelta(minutes=5)
MARGIN, MAX_GRACE = timedelta(seconds=90), timedelta(hours=1)
# An orphan without any known grace period has ended after this time.
PATIENT = MARGIN + MAX_GRACE
R1 = ReservationId("r1")
RECORD = ClaimRecord(gpus=1)
ON_NODE: Raw = {
    "nodeName": "node-a",
    "containers": [builders.raw_container(env=builders.raw_env(NVIDIA_VISIBLE_DEVICES="GPU-a0"))],
}
POD = PodIdentity("ml", "pod-1", "uid-1")


class Scene:
    """A ledger, its pods, and a reconciler that observes them."""

    def __init__(self) -> None:
        self.bench = ClusterBench()
        self.heard = RecordedEvents()
        self.open: set[str] = set()  # pods that could be bound without a review
        self.reconciler = self.another(self.bench.ledger)
        self.reconciler.replaced({})

    def another(
        self,
        ledger: ClusterLedger,
        afterwards: OnBindDeadline = OnBindDeadline.REMOVE,
        max_deletions: int = MAX_DELETIONS,
    ) -> Reconciler:
        waiting = BindDeadline(BIND_DEADLINE, afterwards, CLOCK_SKEW)
        patience, now = OrphanTimes(MAX_GRACE, MARGIN), lambda: self.bench.now
        return Reconciler(
            ledger,
            self.bench.pods,
            self.heard,
            now,
            waiting,
            patience,
            is_closed=lambda uid: uid not in self.open,
            max_deletions=max_deletions,
        )

    def show(self, raw: Raw) -> None:
        """The pod exists, and the watch shows it."""
        self.bench.pods.uids.add(raw["metadata"]["uid"])
        self.bench.pods.raws[raw["metadata"]["uid"]] = raw
        self.reconciler.changed(raw)

    async def reserve(self) -> None:
        await self.bench.reserve(ReservationRequest(R1, "ml", RECORD.digest()), on("node-a", "GPU-a0"))

    async def run_a_pod(self) -> None:
        """Reserved, bound, existing and confirmed."""
        await self.reserve()
        await self.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD)
        self.show(raw_pod())
        await self.reconciler.step()

    @property
    def phase(self) -> Phase | None:
        entry: dict[str, Any] | None = self.bench.held().get("GPU-a0/0")
        return Phase(entry["phase"]) if entry else None


def raw_pod(*, phase: str = "Pending", uid: str = POD.uid, record: ClaimRecord = RECORD, **meta: Any) -> Raw:
    annotations = {
        "gpuwarden.io/reservation-id": "r1",
        "gpuwarden.io/node": "node-a",
        "gpuwarden.io/gpu-uuid": "GPU-a0",
        "gpuwarden.io/claim": record.text(),
    }
    meta = {"creationTimestamp": "2026-01-01T00:00:00Z", **meta}
    raw = builders.raw_pod(name=POD.name, namespace=POD.namespace, uid=uid, annotations=annotations)
    return {**raw, "metadata": {**raw["metadata"], **meta}, "status": {"phase": phase}}


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_existing_pod_is_confirmed_without_finalize(scene: Scene) -> None:
    await scene.run_a_pod()
    assert scene.phase is Phase.FINALIZED


async def test_watch_binds_a_pod_whose_uid_no_review_has_recorded(scene: Scene) -> None:
    await scene.reserve()
    scene.reconciler.changed(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["uid"] == POD.uid


async def test_pod_with_another_claim_does_not_get_the_reservation(scene: Scene) -> None:
    await scene.reserve()
    scene.reconciler.changed(raw_pod(record=ClaimRecord(gpus=1, requirements=("h100",))))
    await scene.reconciler.step()
    assert scene.phase is Phase.PENDING
    assert "uid" not in scene.bench.held()["GPU-a0/0"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_ended_pod_frees_its_devices(scene: Scene, phase: str) -> None:
    await scene.run_a_pod()
    scene.reconciler.changed({**raw_pod(), "spec": ON_NODE, "status": ended(phase)})
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_pod_rejected_by_the_kubelet_frees_its_devices_at_once(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.changed({**raw_pod(), "spec": ON_NODE})
    rejected = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed"}
    scene.reconciler.changed({**raw_pod(), "spec": ON_NODE, "status": rejected})
    await scene.reconciler.step()
    assert scene.bench.held() == {}
    assert scene.heard.recorded == []


@pytest.mark.defect("assigner-7")
async def test_terminating_pod_keeps_its_devices(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.changed(raw_pod(phase="Running", deletionTimestamp="2026-01-01T00:00:00Z"))
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_pod_deleted_before_it_is_bound_frees_its_devices(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}


@pytest.mark.defect("assigner-6")
async def test_empty_list_frees_nothing_while_the_pod_exists(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.replaced({})
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


@pytest.mark.defect("assigner-6")
async def test_nothing_is_freed_while_the_api_server_is_unavailable(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.replaced({})
    scene.bench.pods.uids.clear()
    scene.bench.pods.is_away = True
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.bench.pods.is_away = False
    await scene.reconciler.step()
    scene.bench.now += PATIENT
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_reconciler_does_nothing_before_the_first_list(scene: Scene) -> None:
    await scene.run_a_pod()
    fresh = scene.bench.another()
    scene.bench.pods.uids.clear()
    await scene.another(fresh.ledger).step()
    assert scene.phase is Phase.FINALIZED


async def test_pod_recreated_with_the_same_name_is_another_pod(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.deleted(raw_pod())
    scene.bench.pods.uids = {"uid-2"}
    scene.reconciler.changed(raw_pod(uid="uid-2"))
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_reservation_of_a_pod_never_created_expires_and_is_deleted(scene: Scene) -> None:
    await scene.reserve()
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.phase is Phase.PENDING
    scene.bench.now += timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_after_a_long_outage_existing_pods_are_confirmed_and_missing_ones_orphaned(scene: Scene) -> None:
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD)
    second = PodIdentity("ml", "pod-2", "uid-2")
    await scene.bench.reserve(ReservationRequest(ReservationId("r2"), "ml", "d"), on("node-a", "GPU-a1"))
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r2"), second)
    running = {**raw_pod(phase="Running"), "spec": ON_NODE}
    scene.show(running)
    scene.bench.now += timedelta(hours=5)
    returned = scene.another(scene.bench.another().ledger)
    returned.replaced({"ml/pod-1": running})
    await returned.step()
    assert {slot: "orphanedAt" in entry for slot, entry in scene.bench.held().items()} == {
        "GPU-a0/0": False,
        "GPU-a1/0": True,
    }
    scene.bench.now += PATIENT
    await returned.step()
    assert {slot: entry["phase"] for slot, entry in scene.bench.held().items()} == {"GPU-a0/0": "finalized"}


async def test_started_release_is_completed(scene: Scene) -> None:
    await scene.run_a_pod()
    raw = scene.bench.store.objects["node-a"]
    raw["status"]["held"]["GPU-a0/0"]["phase"] = "releasing"  # a crash between the two writes
    scene.bench.store.apply(raw)
    scene.bench.replica.watch.catch_up()
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}


# A pod that exists and is not bound.

OWNED: Raw = {"ownerReferences": [{"kind": "ReplicaSet", "name": "rs", "uid": "u", "controller": True}]}


async def confirmed(scene: Scene, **meta: Any) -> None:
    await scene.run_a_pod()
    scene.show(raw_pod(**meta))


async def test_owned_pod_not_bound_in_time_is_deleted_and_keeps_its_devices_until_gone(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    scene.bench.now += BIND_DEADLINE - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    scene.bench.now += timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]
    assert scene.heard.recorded == [("pod-1", Reason.BIND_DEADLINE_PASSED)]
    assert scene.phase is Phase.FINALIZED
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_pod_bound_in_time_is_not_deleted_by_a_stale_watch(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    scene.bench.pods.raws[POD.uid] = {**raw_pod(phase="Running", **OWNED), "spec": ON_NODE}
    scene.bench.now += BIND_DEADLINE
    await scene.reconciler.step()
    assert (scene.bench.pods.removed, scene.heard.recorded) == ([], [])
    assert scene.phase is Phase.FINALIZED


async def test_pod_bound_during_the_check_is_not_deleted(scene: Scene) -> None:
    await confirmed(scene, **OWNED, resourceVersion="1")
    look = scene.bench.pods.read_pod

    async def read_and_bind(pod: PodIdentity) -> PodSnapshot | None:
        seen = await look(pod)
        scene.bench.pods.raws[pod.uid] = {**raw_pod(**OWNED, resourceVersion="2"), "spec": ON_NODE}
        return seen

    scene.bench.pods.read_pod = read_and_bind  # type: ignore[method-assign]
    scene.bench.now += BIND_DEADLINE
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []


async def test_pod_is_not_deleted_while_it_cannot_be_read(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    scene.bench.pods.is_away = True
    scene.bench.now += BIND_DEADLINE
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    scene.bench.pods.is_away = False
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]


async def test_pod_that_differs_from_the_watch_is_read_at_intervals(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    scene.bench.pods.raws[POD.uid] = {**raw_pod(**OWNED), "spec": ON_NODE}
    scene.bench.now += BIND_DEADLINE
    await scene.reconciler.step()
    scene.bench.pods.raws[POD.uid] = raw_pod(**OWNED)
    scene.bench.now += RECHECK_DELAY - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    scene.bench.now += timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]


async def test_bare_pod_not_bound_in_time_stays_and_frees_its_devices_after_the_last_binding(
    scene: Scene,
) -> None:
    await confirmed(scene)
    # Because of the clock skew, the binding check may have allowed a Binding that much later.
    scene.bench.now += BIND_DEADLINE + MAX_BINDING_DURATION + 2 * CLOCK_SKEW - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.bench.now += timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.held() == {}
    scene.bench.now += 2 * RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    assert scene.bench.held() == {}


async def test_owned_pod_is_not_deleted_if_configured_to_keep_pods(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    keeping = scene.another(scene.bench.ledger, OnBindDeadline.KEEP)
    keeping.replaced({"ml/pod-1": raw_pod(**OWNED)})
    scene.bench.now += BIND_DEADLINE + MAX_BINDING_DURATION + 2 * CLOCK_SKEW
    await keeping.step()
    assert scene.bench.held() == {}
    assert scene.bench.pods.removed == []


async def test_devices_stay_reserved_while_the_pod_could_be_bound_without_a_review(scene: Scene) -> None:
    await confirmed(scene)
    scene.open.add(POD.uid)
    scene.bench.now += BIND_DEADLINE + MAX_BINDING_DURATION + 2 * CLOCK_SKEW
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.open.clear()
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_pod_that_can_always_be_bound_keeps_its_devices_until_it_is_gone(
    scene: Scene,
) -> None:
    """For example after its namespace has opted out: no review, no policy."""
    await confirmed(scene)
    scene.open.add(POD.uid)
    for _ in range(3):
        scene.bench.now += timedelta(days=1)
        await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    assert scene.bench.pods.removed == []
    scene.bench.pods.uids.discard(POD.uid)
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_late_bound_pod_keeps_its_devices_with_a_stale_watch(scene: Scene) -> None:
    await confirmed(scene)
    scene.bench.pods.raws[POD.uid] = {**raw_pod(), "spec": ON_NODE}
    scene.bench.now += BIND_DEADLINE + MAX_BINDING_DURATION + 2 * CLOCK_SKEW
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_bound_pod_has_no_bind_deadline(scene: Scene) -> None:
    await confirmed(scene, **OWNED)
    scene.show({**raw_pod(**OWNED), "spec": ON_NODE})
    scene.bench.now += 10 * BIND_DEADLINE
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    assert scene.heard.recorded == []


# A pod that exists and whose reservation is gone.


async def expired(scene: Scene) -> None:
    await scene.reserve()
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def taken_by_another(scene: Scene) -> None:
    await scene.bench.reserve(ReservationRequest(ReservationId("r2"), "ml", "d2"), on("node-a", "GPU-a0"))


async def test_late_pod_gets_its_free_devices_back(scene: Scene) -> None:
    await expired(scene)
    scene.show(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["uid"] == POD.uid
    assert scene.phase is Phase.FINALIZED
    assert scene.heard.recorded == [("pod-1", Reason.RESERVATION_RESTORED)]


async def test_late_pod_without_devices_is_deleted_by_uid_and_frees_nothing(scene: Scene) -> None:
    await expired(scene)
    await taken_by_another(scene)
    scene.show(raw_pod(**OWNED))
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]
    assert scene.heard.recorded == [("pod-1", Reason.RESERVATION_LOST)]
    assert scene.bench.held()["GPU-a0/0"]["reservation"] == "r2"


async def test_late_bare_pod_without_devices_stays_with_an_event(scene: Scene) -> None:
    await expired(scene)
    await taken_by_another(scene)
    scene.show(raw_pod())
    await scene.reconciler.step()
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    assert scene.heard.recorded == [("pod-1", Reason.RESERVATION_LOST)]


async def test_bound_pod_with_devices_of_another_is_deleted_before_it_starts(scene: Scene) -> None:
    await expired(scene)
    await taken_by_another(scene)
    scene.show({**raw_pod(), "spec": ON_NODE})
    await scene.reconciler.step()
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]


async def test_pod_without_its_devices_is_deleted_as_soon_as_it_is_bound(scene: Scene) -> None:
    """A moment later its containers would run."""
    await expired(scene)
    await taken_by_another(scene)
    scene.show(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    scene.show({**raw_pod(), "spec": ON_NODE})
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]
    assert scene.bench.held()["GPU-a0/0"]["reservation"] == "r2"


@pytest.mark.parametrize(
    ("told", "living"),
    [
        pytest.param({}, {"phase": "Pending"}, id="bound in the meantime"),
        pytest.param({"spec": ON_NODE}, {"phase": "Running"}, id="started in the meantime"),
    ],
)
async def test_pod_without_its_devices_is_not_deleted_by_a_stale_watch(scene: Scene, told: Raw, living: Raw) -> None:
    await expired(scene)
    await taken_by_another(scene)
    scene.show({**raw_pod(**OWNED), **told})
    await scene.reconciler.step()
    scene.bench.pods.raws[POD.uid] = {**raw_pod(**living, **OWNED), "spec": ON_NODE}
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []


async def test_running_pod_without_reservation_gets_an_event_and_is_not_deleted(scene: Scene) -> None:
    await expired(scene)
    await taken_by_another(scene)
    scene.show({**raw_pod(phase="Running"), "spec": ON_NODE})
    await scene.reconciler.step()
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.pods.removed == []
    assert scene.heard.recorded == [("pod-1", Reason.RESERVATION_LOST)]


# A pod whose annotations a user has removed.


def bare(*, is_on_node: bool = True, phase: str = "Running", gates: Sequence[str] = ()) -> Raw:
    raw = raw_pod(phase=phase)
    raw["metadata"]["annotations"] = {}
    spec: Raw = {"schedulingGates": [{"name": name} for name in gates]}
    return {**raw, "spec": {**spec, **(ON_NODE if is_on_node else {})}}


async def test_running_pod_without_annotations_keeps_its_devices_until_deleted(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.show(bare())
    scene.bench.now += 10 * BIND_DEADLINE
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.reconciler.deleted({**bare(), "status": ended()})
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_running_pod_without_visible_gpus_keeps_no_reservation(scene: Scene) -> None:
    await scene.run_a_pod()
    raw = bare()
    scene.show({**raw, "spec": {**raw["spec"], "containers": [builders.raw_container()]}})
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_ended_pod_without_annotations_keeps_no_reservation(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.show(bare())
    await scene.reconciler.step()
    scene.show({**bare(), "status": ended()})
    scene.bench.now += RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_unbound_pod_without_annotations_keeps_no_reservation(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.show(bare(is_on_node=False, phase="Pending", gates=["somebody.else/gate"]))
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_gated_pod_keeps_a_reservation_it_does_not_carry_yet(scene: Scene) -> None:
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, POD)
    scene.show(bare(is_on_node=False, phase="Pending", gates=[keys.QUEUE_GATE]))
    for _ in range(3):
        await scene.reconciler.step()
        scene.bench.now += BIND_DEADLINE
    assert scene.phase is Phase.FINALIZED


# Two reservations for one pod: the second one was made by a stale replica.


async def reserved_twice(scene: Scene) -> ClusterLedger:
    """On two nodes under one id, in the ledger of the stale replica after it has caught up."""
    behind = scene.bench.another()
    what = ReservationRequest(R1, "ml", RECORD.digest())
    for ledger, place in ((scene.bench.ledger, on("node-a", "GPU-a0")), (behind.ledger, on("node-b", "GPU-b0"))):
        await ledger.reserve(what, [place], answer_by=scene.bench.now + timedelta(seconds=10))
        await ledger.bind_to_pod(PodProof.CONFIRMED, R1, POD)
        scene.bench.now += timedelta(seconds=1)
    assert (len(scene.bench.held()), len(scene.bench.held("node-b"))) == (1, 1)
    scene.bench.replica.watch.catch_up()
    behind.watch.catch_up()
    return behind.ledger


@pytest.mark.parametrize("where", ["node-a", "node-b"])
@pytest.mark.parametrize("is_on_node", [True, False], ids=["on its node", "on no node"])
async def test_pod_with_two_reservations_keeps_the_one_it_carries(scene: Scene, where: str, is_on_node: bool) -> None:
    behind = await reserved_twice(scene)
    raw = raw_pod()
    carried = {"gpuwarden.io/node": where, "gpuwarden.io/gpu-uuid": f"GPU-{where[-1]}0"}
    raw["metadata"]["annotations"] |= carried
    raw["spec"] = {"nodeName": where} if is_on_node else {}
    scene.show(raw)
    second = scene.another(behind)
    second.replaced({"ml/pod-1": raw})
    await second.step()
    await second.step()
    assert {node: len(scene.bench.held(node)) for node in ("node-a", "node-b")} == {
        "node-a": where == "node-a",
        "node-b": where == "node-b",
    }
    assert scene.heard.recorded == []


async def test_pod_with_two_reservations_loses_both_when_it_is_gone(scene: Scene) -> None:
    behind = await reserved_twice(scene)
    assert len(behind.reservations()) == 2
    second = scene.another(behind)
    second.replaced({})
    await second.step()
    scene.bench.now += PATIENT
    await second.step()
    assert (scene.bench.held(), scene.bench.held("node-b")) == ({}, {})


async def test_pod_gets_the_reservation_it_carries_although_another_was_made_elsewhere(scene: Scene) -> None:
    await scene.run_a_pod()
    raw = raw_pod()
    raw["metadata"]["annotations"] |= {"gpuwarden.io/node": "node-b", "gpuwarden.io/gpu-uuid": "GPU-b0"}
    scene.show(raw)
    await scene.reconciler.step()
    assert scene.bench.held() == {}
    assert scene.bench.held("node-b")["GPU-b0/0"]["uid"] == POD.uid


async def test_bound_pod_with_a_forged_annotation_keeps_its_reservation(scene: Scene) -> None:
    await scene.run_a_pod()
    raw = raw_pod(phase="Running")
    raw["metadata"]["annotations"]["gpuwarden.io/reservation-id"] = "r2"
    scene.show({**raw, "spec": ON_NODE})
    for _ in range(3):
        await scene.reconciler.step()
        scene.bench.now += RECHECK_DELAY
    assert scene.bench.held()["GPU-a0/0"]["reservation"] == "r1"


# Writes that the store refuses at first.


async def test_failed_expiry_is_retried(scene: Scene) -> None:
    await scene.reserve()
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    scene.bench.store.refusals = 1
    await scene.reconciler.step()
    assert scene.phase is Phase.PENDING
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_reservation_without_a_pod_is_deleted_after_a_refused_write(scene: Scene) -> None:
    scene.bench.now += 2 * CLOCK_SKEW  # the watch is older than the reservation despite clock skew
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD)
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    scene.bench.store.refusals = 1
    await scene.reconciler.step()
    scene.bench.pods.is_away = True
    await scene.reconciler.step()
    assert scene.bench.held() == {}


# Users who write what gpuwarden never writes.


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"phase": "pending"}, id="pending-without-a-deadline"),
        pytest.param({"phase": "finalized"}, id="finalized-without-a-pod"),
        pytest.param({"phase": "finalized", "uid": "uid-missing"}, id="finalized-for-a-missing-pod"),
        pytest.param({"phase": "pending", "uid": "uid-missing"}, id="pending-for-a-missing-pod"),
    ],
)
async def test_reservation_written_by_hand_without_a_pod_is_deleted(scene: Scene, entry: Raw) -> None:
    raw = scene.bench.store.objects["node-a"]
    by_hand = {"reservation": "x", "namespace": "ml", "digest": "d", **entry}
    scene.bench.store.apply({**raw, "status": {"held": {"GPU-a0/0": by_hand}}})
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    scene.bench.now += PATIENT
    await scene.reconciler.step()
    assert scene.bench.held() == {}


END_OF_TIME = "9999-12-31T23:59:59Z"


@pytest.mark.parametrize("since", [END_OF_TIME, "0001-01-01T00:00:00Z"])
async def test_reservation_time_out_of_range_counts_from_the_creation_of_the_pod(scene: Scene, since: str) -> None:
    await confirmed(scene, **OWNED)
    raw = scene.bench.store.objects["node-a"]
    raw["status"]["held"]["GPU-a0/0"]["since"] = since
    scene.bench.store.apply(raw)
    scene.bench.replica.watch.catch_up()
    scene.reconciler.changed(raw_pod(**OWNED))  # the watch continues
    await scene.reconciler.step()
    scene.bench.now += BIND_DEADLINE
    await scene.reconciler.step()
    assert scene.bench.pods.removed == [POD]


async def test_reservation_with_an_endless_deadline_is_deleted(scene: Scene) -> None:
    await scene.reserve()
    raw = scene.bench.store.objects["node-a"]
    raw["status"]["held"]["GPU-a0/0"]["deadline"] = END_OF_TIME
    scene.bench.store.apply(raw)
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    assert scene.bench.held() == {}


@pytest.mark.parametrize("slot", ["GPU-a0/0", "GPU-a1/0"])
async def test_reservation_partly_released_by_hand_is_released_and_restored_completely(scene: Scene, slot: str) -> None:
    two = ClaimRecord(gpus=2)
    await scene.bench.reserve(ReservationRequest(R1, "ml", two.digest()), on("node-a", "GPU-a0", "GPU-a1"))
    await scene.bench.ledger.bind_to_pod(PodProof.CONFIRMED, R1, POD)
    running = raw_pod(phase="Running", record=two)
    running["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] = "GPU-a0,GPU-a1"
    scene.show({**running, "spec": ON_NODE})
    raw = scene.bench.store.objects["node-a"]
    held = raw["status"]["held"]
    scene.bench.store.apply({**raw, "status": {"held": {**held, slot: {**held[slot], "phase": "releasing"}}}})
    scene.bench.replica.watch.catch_up()
    for _ in range(3):
        await scene.reconciler.step()
    assert {key: entry["phase"] for key, entry in scene.bench.held().items()} == {
        "GPU-a0/0": "finalized",
        "GPU-a1/0": "finalized",
    }


async def test_reservation_deleted_by_hand_is_restored(scene: Scene) -> None:
    await confirmed(scene)
    scene.show({**raw_pod(phase="Running"), "spec": ON_NODE})
    scene.bench.store.apply({**scene.bench.store.objects["node-a"], "status": {"held": {}}})
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["uid"] == POD.uid
    assert scene.heard.recorded == [("pod-1", Reason.RESERVATION_RESTORED)]


class BrokenPods(Pods):
    """One of the pods causes an unexpected error."""

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        if pod.uid == "uid-odd":
            raise KeyError("metadata")
        return await super().read_pod(pod)


async def test_unexpected_error_with_one_pod_does_not_stop_the_others(scene: Scene) -> None:
    for number, uuid, uid in ((1, "GPU-a0", "uid-odd"), (2, "GPU-a1", "uid-2")):
        reservation = await scene.bench.reserve(
            ReservationRequest(ReservationId(f"r{number}"), "ml", "d"), on("node-a", uuid)
        )
        await scene.bench.ledger.bind_to_pod(
            PodProof.CONFIRMED, reservation.id, PodIdentity("ml", f"pod-{number}", uid)
        )
    waiting = BindDeadline(BIND_DEADLINE, OnBindDeadline.REMOVE, CLOCK_SKEW)
    reconciler = Reconciler(scene.bench.ledger, BrokenPods(), scene.heard, lambda: scene.bench.now, waiting)
    reconciler.replaced({})
    await scene.bench.reserve(ReservationRequest(ReservationId("r3"), "ml", "d"), on("node-a", "GPU-a2"))
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await reconciler.step()
    scene.bench.now += PATIENT
    await reconciler.step()
    assert list(scene.bench.held()) == ["GPU-a0/0"]


# Objects that are created and deleted.


async def test_finalizer_keeps_the_object_while_it_has_reservations(scene: Scene) -> None:
    await confirmed(scene)
    store = scene.bench.store
    assert store.objects["node-a"]["metadata"]["finalizers"] == ["gpuwarden.io/held"]
    store.delete("node-a")
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    assert "node-a" not in store.objects


async def test_new_object_is_rebuilt_from_pods(scene: Scene) -> None:
    await confirmed(scene)
    del scene.bench.store.objects["node-a"]  # by force, despite its finalizer
    scene.bench.ledger.forget("node-a")
    scene.bench.store.apply(NODE_A)
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    entry = scene.bench.held()["GPU-a0/0"]
    assert (entry["reservation"], entry["uid"], entry["phase"]) == ("r1", POD.uid, "finalized")


async def test_reservation_of_a_deleted_object_is_forgotten_with_its_pod(scene: Scene) -> None:
    await confirmed(scene)
    del scene.bench.store.objects["node-a"]  # by force, and its node has gone as well
    scene.bench.ledger.forget("node-a")
    await scene.reconciler.step()
    assert [one.id for one in scene.bench.ledger.reservations()] == [R1]
    scene.bench.pods.uids.clear()
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert list(scene.bench.ledger.reservations()) == []
    assert scene.bench.ledger._writers.keys() == {"node-b"}


async def test_standby_reconciler_keeps_bounded_memory(scene: Scene) -> None:
    """Another replica leads: this one observes its releases and the ends of its pods."""
    standby = scene.bench.another()
    idle = scene.another(standby.ledger, max_deletions=100)
    idle.replaced({})
    for number in range(500):
        pod = PodIdentity("ml", f"pod-{number}", f"uid-{number}")
        ask = ReservationRequest(ReservationId(f"r{number}"), "ml", RECORD.digest())
        await scene.bench.reserve(ask, on("node-a", "GPU-a0"))
        await scene.bench.ledger.bind_to_pod(PodProof.NAMED, ask.id, pod)
        standby.watch.catch_up()
        idle.deleted(raw_pod(uid=pod.uid))
        await scene.bench.ledger.release(ask.id, pod)
        standby.watch.catch_up()
        scene.bench.now += timedelta(seconds=1)
    assert len(idle._deleted) <= 200
    assert len(standby.ledger._index._deadlines) <= 200
