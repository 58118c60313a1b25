"""The reconciler: pods decide, and nothing is freed because somebody could not be asked."""

from datetime import timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.test_cluster import ClusterBench
from webhook.core.claim import ClaimRecord
from webhook.core.reservation import Ask, Phase, PodIdentity, ReservationId
from webhook.ledger.reconcile import Reconciler

R1 = ReservationId("r1")
RECORD = ClaimRecord(gpus=1)
POD = PodIdentity("ml", "pod-1", "uid-1")


class Scene:
    """A ledger, its pods, and a reconciler that hears of them."""

    def __init__(self) -> None:
        self.bench = ClusterBench()
        self.reconciler = Reconciler(self.bench.ledger, self.bench.pods, lambda: self.bench.now)
        self.reconciler.replaced({})

    async def reserve(self) -> None:
        await self.bench.reserve(Ask(R1, "ml", RECORD.digest()), on("node-a", "GPU-a0"))

    async def run_a_pod(self) -> None:
        """Reserved, bound, existing and confirmed."""
        await self.reserve()
        await self.bench.ledger.bind(R1, POD)
        self.bench.pods.uids.add(POD.uid)
        self.reconciler.changed(raw_pod())
        await self.reconciler.step()

    @property
    def phase(self) -> Phase | None:
        entry: dict[str, Any] | None = self.bench.held().get("GPU-a0/0")
        return Phase(entry["phase"]) if entry else None


def raw_pod(*, phase: str = "Pending", uid: str = POD.uid, record: ClaimRecord = RECORD, **meta: Any) -> Raw:
    annotations = {
        "gpuwarden.io/reservation-id": "r1",
        "gpuwarden.io/node": "node-a",
        "gpuwarden.io/claim": record.text(),
    }
    raw = builders.raw_pod(name=POD.name, namespace=POD.namespace, uid=uid, annotations=annotations)
    return {**raw, "metadata": {**raw["metadata"], **meta}, "status": {"phase": phase}}


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_pod_that_exists_is_confirmed_though_nobody_called_finalize(scene: Scene) -> None:
    await scene.run_a_pod()
    assert scene.phase is Phase.FINALIZED


async def test_a_pod_whose_uid_nobody_bound_is_bound_by_the_watch(scene: Scene) -> None:
    await scene.reserve()
    scene.reconciler.changed(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["uid"] == POD.uid


async def test_a_pod_with_another_claim_is_not_given_the_reservation(scene: Scene) -> None:
    await scene.reserve()
    scene.reconciler.changed(raw_pod(record=ClaimRecord(gpus=2)))
    await scene.reconciler.step()
    assert scene.phase is Phase.PENDING
    assert "uid" not in scene.bench.held()["GPU-a0/0"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_that_has_ended_frees_its_devices(scene: Scene, phase: str) -> None:
    await scene.run_a_pod()
    scene.reconciler.changed(raw_pod(phase=phase))
    await scene.reconciler.step()
    assert scene.bench.held() == {}


@pytest.mark.defect("S4-7")
async def test_a_terminating_pod_still_holds_its_devices(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.changed(raw_pod(phase="Running", deletionTimestamp="2026-01-01T00:00:00Z"))
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_a_deleted_pod_frees_its_devices(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}


@pytest.mark.defect("S4-6")
async def test_an_empty_list_frees_nothing_while_the_pod_is_there(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.replaced({})
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


@pytest.mark.defect("S4-6")
async def test_nothing_is_freed_while_nobody_can_be_asked(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.replaced({})
    scene.bench.pods.uids.clear()
    scene.bench.pods.is_away = True
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED
    scene.bench.pods.is_away = False
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_before_the_first_list_nothing_is_done(scene: Scene) -> None:
    await scene.run_a_pod()
    fresh = scene.bench.another()
    scene.bench.pods.uids.clear()
    await Reconciler(fresh.ledger, scene.bench.pods, lambda: scene.bench.now).step()
    assert scene.phase is Phase.FINALIZED


async def test_a_name_that_came_back_is_another_pod(scene: Scene) -> None:
    await scene.run_a_pod()
    scene.reconciler.deleted(raw_pod())
    scene.bench.pods.uids = {"uid-2"}
    scene.reconciler.changed(raw_pod(uid="uid-2"))
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_what_never_came_expires_and_leaves_the_store(scene: Scene) -> None:
    await scene.reserve()
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.phase is Phase.PENDING
    scene.bench.now += timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_after_a_long_absence_what_exists_is_confirmed_and_what_does_not_is_freed(scene: Scene) -> None:
    await scene.reserve()
    await scene.bench.ledger.bind(R1, POD)
    second = PodIdentity("ml", "pod-2", "uid-2")
    await scene.bench.reserve(Ask(ReservationId("r2"), "ml", "d"), on("node-a", "GPU-a1"))
    await scene.bench.ledger.bind(ReservationId("r2"), second)
    scene.bench.pods.uids.add(POD.uid)
    scene.bench.now += timedelta(hours=5)
    returned = Reconciler(scene.bench.another().ledger, scene.bench.pods, lambda: scene.bench.now)
    returned.replaced({"ml/pod-1": raw_pod(phase="Running")})
    await returned.step()
    assert {slot: entry["phase"] for slot, entry in scene.bench.held().items()} == {"GPU-a0/0": "finalized"}


async def test_a_release_that_was_begun_is_ended(scene: Scene) -> None:
    await scene.run_a_pod()
    raw = scene.bench.store.objects["node-a"]
    raw["status"]["held"]["GPU-a0/0"]["phase"] = "releasing"  # a crash between the two writes
    scene.bench.store.put(raw)
    scene.bench.replica.watch.catch_up()
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}
