"""Orphans: devices of pods that are gone and may still run stay reserved until the containers must have ended."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.test_cluster import ended
from tests.ledger.test_reconcile import MARGIN, MAX_GRACE, ON_NODE, POD, R1, RECORD, Scene, raw_pod
from webhook.admission.pending_limits import PendingLimiter, PendingLimits
from webhook.core.device import DeviceUuid
from webhook.core.device_state import DeviceState, reservation_state
from webhook.core.errors import LedgerUnavailableError, SlotsTakenError
from webhook.core.reasons import Reason
from webhook.core.reservation import (
    Orphan,
    Phase,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.evidence.jwt.node_reports import NodeReports, uid_digest
from webhook.kube.gpu_node import GpuNode
from webhook.ledger.cluster import DEFAULT_TIMEOUT as AGAIN
from webhook.ledger.end_of_use import NodeSnapshot
from webhook.ledger.orphans import CHECK_INTERVAL
from webhook.ledger.reconcile import Reconciler

GRACE = timedelta(seconds=600)


@pytest.fixture
async def scene() -> Scene:
    """A pod is running."""
    scene = Scene()
    await scene.run_a_pod()
    scene.show(running())
    await scene.reconciler.step()
    return scene


def running(*, deleted: int | None = None, status: Raw | None = None) -> Raw:
    meta: dict[str, Any] = {}
    if deleted is not None:
        meta = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": deleted}
    runs: Raw = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
    spec = {**ON_NODE, "terminationGracePeriodSeconds": 600}
    return {**raw_pod(**meta), "spec": spec, "status": status or runs}


async def gone_by_force(scene: Scene) -> None:
    scene.bench.pods.uids.clear()
    scene.reconciler.deleted(running(deleted=0))
    await scene.reconciler.step()


async def can_be_reserved(scene: Scene) -> bool:
    scene.bench.replica.watch.catch_up()
    try:
        await scene.bench.reserve(
            ReservationRequest(ReservationId("r2"), "ml", RECORD.digest()), on("node-a", "GPU-a0")
        )
    except SlotsTakenError:
        return True
    return False


async def after(scene: Scene, time: timedelta, reconciler: Reconciler | None = None) -> dict[str, Any]:
    scene.bench.now += time
    await (reconciler or scene.reconciler).step()
    return scene.bench.held()


async def assert_free_after(scene: Scene, time: timedelta, reconciler: Reconciler | None = None) -> None:
    """At that time, and not a second earlier."""
    assert await after(scene, timedelta(0), reconciler)
    assert await after(scene, time - timedelta(seconds=1), reconciler)
    assert await after(scene, timedelta(seconds=1), reconciler) == {}


async def test_force_deleted_pod_keeps_its_devices_for_grace_period_plus_margin(scene: Scene) -> None:
    await gone_by_force(scene)
    assert scene.phase is Phase.FINALIZED  # a phase that replicas without orphan support understand
    assert await can_be_reserved(scene)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, timedelta(seconds=1)) == {}
    assert not await can_be_reserved(scene)
    assert scene.heard.recorded == [("node-a", Reason.GPU_ORPHANED), ("node-a", Reason.ORPHAN_ENDED)]


async def test_another_reconciler_continues_from_the_stored_orphan(scene: Scene) -> None:
    begun = scene.bench.now
    await gone_by_force(scene)
    held = GpuNode.parse(scene.bench.store.objects["node-a"]).reservations[R1]
    assert held.orphan is not None
    assert (held.orphan.at, held.orphan.grace, held.orphan.boot_id) == (begun, GRACE, "boot-1")
    assert reservation_state(held, begun) is DeviceState.ORPHANED
    other = scene.another(scene.bench.another().ledger)
    other.replaced({})
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1), other)
    assert await after(scene, timedelta(seconds=1), other) == {}


async def test_pod_ended_by_the_kubelet_frees_its_devices_at_once(scene: Scene) -> None:
    scene.reconciler.changed(running(deleted=30))
    scene.reconciler.deleted(running(deleted=30, status=ended("Failed")))
    await scene.reconciler.step()
    assert scene.bench.held() == {}
    assert scene.heard.recorded == []


async def test_unobserved_deletion_waits_for_the_maximum_grace_period(scene: Scene) -> None:
    scene.bench.pods.uids.clear()
    other = scene.another(scene.bench.another().ledger)
    other.replaced({})
    await assert_free_after(scene, MAX_GRACE + MARGIN, other)


@pytest.fixture
async def stored() -> Scene:
    """A pod is running, and `/validate` has stored its grace period."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    scene.show(running())
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["grace"] == 600
    return scene


async def test_unobserved_deletion_uses_the_stored_grace_period(stored: Scene) -> None:
    stored.bench.pods.uids.clear()
    other = stored.another(stored.bench.another().ledger)
    other.replaced({})
    await assert_free_after(stored, GRACE + MARGIN, other)


async def test_deletion_between_two_lists_uses_the_stored_grace_period(stored: Scene) -> None:
    stored.bench.pods.uids.clear()
    stored.reconciler.replaced({})
    await assert_free_after(stored, GRACE + MARGIN)


async def test_pod_terminating_when_the_watch_began_waits_for_the_stored_grace_period(stored: Scene) -> None:
    stored.reconciler.replaced({"ml/pod-1": running(deleted=5)})
    await gone_by_force(stored)
    assert await after(stored, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(stored, timedelta(seconds=1)) == {}


async def test_deletion_with_a_longer_grace_period_updates_the_stored_one(stored: Scene) -> None:
    """If no policy prevents it."""
    writes = stored.bench.store.writes
    stored.show(running(deleted=600))
    await stored.reconciler.step()
    assert stored.bench.store.writes == writes
    stored.show(running(deleted=1000))
    for _ in range(2):
        await stored.reconciler.step()
    assert stored.bench.store.writes == writes + 1
    assert stored.bench.held()["GPU-a0/0"]["grace"] == 1000
    stored.bench.pods.uids.clear()
    other = stored.another(stored.bench.another().ledger)
    other.replaced({})
    await assert_free_after(stored, timedelta(seconds=1000) + MARGIN, other)


async def test_observed_grace_period_is_not_stored_if_none_was(scene: Scene) -> None:
    """An earlier deletion may have asked for more."""
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    scene.show(running(deleted=1000))
    await scene.reconciler.step()
    assert "grace" not in scene.bench.held()["GPU-a0/0"]


# A pod from before the limit was lowered.
OLD = timedelta(hours=2)


def of_old(*, deleted: int | None = None) -> Raw:
    raw = running(deleted=deleted)
    return {**raw, "spec": {**raw["spec"], "terminationGracePeriodSeconds": 7200}}


@pytest.fixture
async def old_pod() -> Scene:
    """A pod is running whose grace period is above the limit. None is stored."""
    scene = Scene()
    await scene.run_a_pod()
    scene.reconciler.replaced({"ml/pod-1": of_old(deleted=7200)})
    scene.bench.pods.raws[POD.uid] = of_old(deleted=7200)
    await scene.reconciler.step()
    return scene


async def test_pod_with_a_grace_period_above_the_limit_is_waited_for_in_full(old_pod: Scene) -> None:
    old_pod.bench.pods.uids.clear()
    old_pod.reconciler.deleted(of_old(deleted=0))
    await assert_free_after(old_pod, OLD + MARGIN)


async def test_grace_period_above_the_limit_is_stored_for_unobserved_deletions(old_pod: Scene) -> None:
    """Its deletion may ask for the full grace period."""
    writes = old_pod.bench.store.writes
    await old_pod.reconciler.step()
    assert old_pod.bench.store.writes == writes
    old_pod.bench.pods.uids.clear()
    other = old_pod.another(old_pod.bench.another().ledger)
    other.replaced({})
    await assert_free_after(old_pod, OLD + MARGIN, other)


async def test_grace_period_above_the_limit_counts_on_a_node_that_is_gone(old_pod: Scene) -> None:
    old_pod.bench.pods.uids.clear()
    old_pod.reconciler.deleted(of_old(deleted=0))
    old_pod.bench.pods.nodes["node-a"] = None
    assert await after(old_pod, timedelta(0))
    assert await after(old_pod, OLD + MARGIN - timedelta(seconds=1))
    assert await after(old_pod, CHECK_INTERVAL) == {}


async def test_grace_period_is_unknown_after_a_write_by_an_older_replica(stored: Scene) -> None:
    rewritten_by_an_older_replica(stored)
    stored.bench.pods.uids.clear()
    other = stored.another(stored.bench.another().ledger)
    other.replaced({})
    await assert_free_after(stored, MAX_GRACE + MARGIN, other)


async def test_pod_terminating_when_the_watch_began_may_have_a_longer_grace_period(
    scene: Scene,
) -> None:
    scene.reconciler.replaced({"ml/pod-1": running(deleted=5)})
    await gone_by_force(scene)
    assert await after(scene, MAX_GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, timedelta(seconds=1)) == {}


async def test_orphan_does_not_end_while_its_node_is_not_ready(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-1")
    assert await after(scene, 10 * MAX_GRACE)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-1", is_ready=True, ready_since=scene.bench.now)
    assert await after(scene, CHECK_INTERVAL)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, CHECK_INTERVAL) == {}


async def test_orphan_does_not_end_while_its_node_cannot_be_read(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.is_away = True
    assert await after(scene, 10 * MAX_GRACE)
    scene.bench.pods.is_away = False
    assert await after(scene, CHECK_INTERVAL) == {}


async def test_orphan_ends_when_its_node_has_rebooted(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-2")
    assert await after(scene, CHECK_INTERVAL) == {}


async def test_orphan_ends_some_time_after_its_node_is_gone(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = None
    assert await after(scene, CHECK_INTERVAL)
    assert await after(scene, MAX_GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, CHECK_INTERVAL) == {}


async def test_pod_failed_by_the_pod_garbage_collector_is_an_orphan(scene: Scene) -> None:
    """Such a pod may never be deleted, and does not get its devices back."""
    lost = running(status={"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]})
    scene.show(lost)
    assert await after(scene, timedelta(0))
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, CHECK_INTERVAL) == {}
    for _ in range(3):
        assert await after(scene, CHECK_INTERVAL) == {}


async def test_orphan_is_released_at_once_when_its_pod_provably_ended(scene: Scene) -> None:
    scene.show(running(status={"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}))
    assert await after(scene, timedelta(0))
    scene.show(running(status=ended("Failed")))
    assert await after(scene, timedelta(0)) == {}


async def test_later_deletion_with_a_longer_grace_period_extends_the_orphan(scene: Scene) -> None:
    lost = {"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}
    scene.show(running(status=lost))
    await scene.reconciler.step()
    scene.bench.now += timedelta(seconds=60)
    scene.show(running(status=lost, deleted=1000))
    scene.bench.pods.uids.clear()
    scene.reconciler.deleted(running(status=lost, deleted=0))
    await scene.reconciler.step()
    assert await after(scene, timedelta(seconds=1000) + MARGIN - timedelta(seconds=1))
    assert await after(scene, CHECK_INTERVAL) == {}


async def test_pod_that_ran_and_was_deleted_between_two_passes_is_an_orphan() -> None:
    """Its reservation was still pending when its end was observed."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD)
    scene.reconciler.changed(running())
    scene.reconciler.deleted(running(deleted=0))
    await scene.reconciler.step()
    assert await after(scene, PENDING_DEADLINE + timedelta(seconds=30))
    assert await after(scene, GRACE + MARGIN) == {}


async def went_unseen() -> tuple[Scene, Reconciler]:
    """A pod was bound without a review, ran, and was deleted by force while no reconciler watched. Then another one
    comes."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    scene.bench.now += timedelta(seconds=3)
    other = scene.another(scene.bench.another().ledger)
    other.replaced({})
    return scene, other


async def test_pod_that_may_have_run_before_the_watch_is_an_orphan() -> None:
    scene, other = await went_unseen()
    assert "orphanedAt" not in (await after(scene, PENDING_DEADLINE, other))["GPU-a0/0"]
    assert "orphanedAt" in (await after(scene, CLOCK_SKEW, other))["GPU-a0/0"]
    assert await can_be_reserved(scene)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1), other)
    assert await after(scene, timedelta(seconds=1), other) == {}


async def test_no_replica_expires_a_reservation_whose_pod_may_have_run() -> None:
    scene, _ = await went_unseen()
    scene.bench.now += 10 * PENDING_DEADLINE
    assert await scene.bench.ledger.collect(scene.bench.now) == []
    assert await can_be_reserved(scene)


@pytest.mark.parametrize("is_away", [False, True])
async def test_overdue_reservation_counts_as_orphaned_if_its_pod_may_have_run(*, is_away: bool) -> None:
    """Otherwise a tenant could hold any number of GPUs with creations that a quota rejects, while no reconciler
    runs."""
    scene, other = await went_unseen()
    ledger = scene.bench.ledger
    room = PendingLimiter(ledger, scene.bench.fleet, lambda: scene.bench.now, PendingLimits(orphans_per_namespace=1))
    scene.bench.pods.is_away = is_away
    scene.bench.now += PENDING_DEADLINE
    await ledger.collect(scene.bench.now)
    assert room.too_many_orphans("ml", 1) is None
    scene.bench.now += CLOCK_SKEW
    for _ in range(2):
        await ledger.collect(scene.bench.now)
        assert ledger.orphaned.gpus_in("ml") == 1
    assert room.too_many_orphans("ml", 1) is not None
    assert room.too_many_orphans("other", 1) is None
    scene.bench.pods.is_away = False
    assert "orphanedAt" in (await after(scene, timedelta(0), other))["GPU-a0/0"]
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 1
    assert await after(scene, GRACE + MARGIN, other) == {}
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 0


async def test_overdue_reservation_stops_counting_when_its_pod_is_observed_or_was_never_created() -> None:
    scene, _ = await went_unseen()
    ledger = scene.bench.ledger
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await ledger.collect(scene.bench.now)
    assert ledger.orphaned.gpus_in("ml") == 1
    scene.show(running())
    scene.bench.now += AGAIN + CLOCK_SKEW
    await ledger.collect(scene.bench.now)
    assert ledger.orphaned.gpus_in("ml") == 0

    scene, _ = await went_unseen()
    ledger = scene.bench.ledger
    scene.bench.now += PENDING_DEADLINE + CLOCK_SKEW
    await ledger.collect(scene.bench.now)
    assert ledger.orphaned.gpus_in("ml") == 1
    scene.bench.now += AGAIN + CLOCK_SKEW
    await ledger.collect(scene.bench.now, was_never_created=lambda _: True)
    assert ledger.orphaned.gpus_in("ml") == 0


@pytest.mark.parametrize("seconds", [0, 9, 10])
async def test_reservation_expires_if_the_watch_proves_that_its_pod_was_never_created(
    seconds: int,
) -> None:
    """Despite clock skew."""
    scene = Scene()
    scene.bench.now += timedelta(seconds=seconds)
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    left = await after(scene, PENDING_DEADLINE + CLOCK_SKEW)
    assert (left == {}) is (seconds == 10)


async def test_slowly_created_pod_that_was_taken_for_gone_keeps_its_devices() -> None:
    scene, other = await went_unseen()
    assert "orphanedAt" in (await after(scene, PENDING_DEADLINE + CLOCK_SKEW, other))["GPU-a0/0"]
    scene.show(running())
    other.changed(running())
    assert await after(scene, 10 * GRACE, other)
    scene.bench.pods.uids.clear()
    other.deleted(running(deleted=0))
    await assert_free_after(scene, GRACE + MARGIN, other)


LOST: Raw = {"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen alive in a pass", "between two passes"])
async def test_pod_taken_for_gone_that_fails_later_is_waited_for_from_its_failure(*, is_seen: bool) -> None:
    scene, other = await went_unseen()
    assert "orphanedAt" in (await after(scene, PENDING_DEADLINE + CLOCK_SKEW, other))["GPU-a0/0"]
    scene.show(running())
    other.changed(running())
    if is_seen:
        assert "orphanedAt" not in (await after(scene, timedelta(0), other))["GPU-a0/0"]
    scene.bench.now += 10 * GRACE
    scene.show(running(status=LOST))
    other.changed(running(status=LOST))
    writes = scene.bench.store.writes
    for _ in range(3):
        assert await after(scene, timedelta(0), other)
    assert scene.bench.store.writes == writes + 1
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1), other)
    assert await after(scene, CHECK_INTERVAL, other) == {}


async def test_stale_reconciler_does_not_clear_an_orphan_mark(scene: Scene) -> None:
    behind = scene.another(scene.bench.another().ledger)
    behind.replaced({"ml/pod-1": running()})
    await gone_by_force(scene)
    behind._ledger.learn(scene.bench.store.objects["node-a"])
    assert "orphanedAt" in (await after(scene, timedelta(0), behind))["GPU-a0/0"]


async def test_pod_deletion_is_remembered_until_its_reservation_is_observed(scene: Scene) -> None:
    behind = scene.bench.another()
    other = scene.another(behind.ledger)
    other.replaced({})
    await scene.bench.reserve(ReservationRequest(ReservationId("r3"), "ml", RECORD.digest()), on("node-a", "GPU-a1"))
    pod = raw_pod(uid="uid-3")
    pod["metadata"]["annotations"] |= {"gpuwarden.io/reservation-id": "r3", "gpuwarden.io/gpu-uuid": "GPU-a1"}
    other.changed(pod)
    other.deleted(pod)
    await other.step()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r3"), PodIdentity("ml", "pod-1", "uid-3"))
    behind.watch.catch_up()
    await other.step()
    assert list(scene.bench.held()) == ["GPU-a0/0"]


async def test_stale_reconciler_does_not_release_a_changed_orphan(scene: Scene) -> None:
    await gone_by_force(scene)
    behind = scene.bench.another()
    (stale,) = behind.ledger.reservations()
    assert stale.orphan is not None
    longer = type(stale.orphan)(scene.bench.now, 2 * GRACE)
    await scene.bench.ledger.mark_orphaned(R1, POD, longer, node="node-a", since=stale.since)
    assert not await behind.ledger.release_orphan(stale)
    assert scene.bench.held()["GPU-a0/0"]["grace"] == 1200


async def test_orphaned_gpus_are_counted_by_namespace_until_released(scene: Scene) -> None:
    ledger = scene.bench.replica.ledger
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 0
    await gone_by_force(scene)
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 1
    assert await after(scene, GRACE + MARGIN) == {}
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 0


async def test_orphan_rewritten_by_an_older_replica_is_not_counted(scene: Scene) -> None:
    await gone_by_force(scene)
    replica = scene.bench.replica
    replica.watch.catch_up()
    rewritten_by_an_older_replica(scene)
    replica.watch.catch_up()
    assert replica.ledger.orphaned.gpus_in("ml") == 0


def rewritten_by_an_older_replica(scene: Scene) -> None:
    store = scene.bench.store
    raw = store.objects["node-a"]
    held = {
        slot: {name: value for name, value in entry.items() if name not in ("orphanedAt", "grace", "bootID")}
        for slot, entry in raw["status"]["held"].items()
    }
    store.apply({**raw, "status": {**raw["status"], "held": held}})


# Reports of the node.


def reports(scene: Scene) -> NodeReports:
    """The reports of a replica that serves a node."""
    scene.bench.replica.watch.catch_up()
    return NodeReports(scene.bench.replica.ledger, CLOCK_SKEW)


UID = POD.uid
EARLY = 2 * CLOCK_SKEW


async def test_orphan_is_released_at_once_when_its_node_reports_no_use(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    assert reports(scene).digests("node-a", scene.bench.now) == [uid_digest(UID)]
    await reports(scene).take_ended("node-a", [UID], scene.bench.now)
    assert scene.bench.held()["GPU-a0/0"]["unusedAt"]
    assert reports(scene).digests("node-a", scene.bench.now) == []
    assert await after(scene, timedelta(0)) == {}
    assert scene.heard.recorded[-1] == ("node-a", Reason.ORPHAN_ENDED)
    assert "its node reports that nothing uses it" in scene.heard.messages[-1]


async def test_gpus_that_a_node_reports_are_stored_with_the_reservation(scene: Scene) -> None:
    await reports(scene).take_given("node-a", {UID: ["GPU-a7", "GPU-a6"]})
    assert scene.bench.held()["GPU-a0/0"]["given"] == ["GPU-a6", "GPU-a7"]
    scene.bench.replica.watch.catch_up()
    one = scene.bench.replica.ledger.of_pod(UID)
    assert one is not None
    assert one.given == ("GPU-a6", "GPU-a7")
    assert list(scene.bench.replica.ledger.on("node-a")) == [one]


async def test_gpus_of_an_orphan_are_not_stored(scene: Scene) -> None:
    """The kubelet names pods without their uids: they may be those of its successor."""
    await gone_by_force(scene)
    await reports(scene).take_given("node-a", {UID: ["GPU-a7"]})
    assert "given" not in scene.bench.held()["GPU-a0/0"]


async def test_node_report_releases_no_orphan_of_another_node(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    assert reports(scene).digests("node-b", scene.bench.now) == []
    await reports(scene).take_ended("node-b", [UID], scene.bench.now)
    assert await after(scene, CHECK_INTERVAL)


async def test_node_report_releases_only_the_named_pods(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    await reports(scene).take_ended("node-a", ["another", uid_digest(UID), ""], scene.bench.now)
    assert await after(scene, CHECK_INTERVAL)


async def test_node_report_about_a_pod_that_is_no_orphan_is_ignored(scene: Scene) -> None:
    before = scene.bench.held()
    await reports(scene).take_ended("node-a", [UID], scene.bench.now + timedelta(days=1))
    assert await after(scene, CHECK_INTERVAL) == before


async def test_challenge_within_the_clock_skew_of_an_orphan_neither_asks_nor_counts(
    scene: Scene,
) -> None:
    await gone_by_force(scene)
    asked = scene.bench.now + EARLY
    assert reports(scene).digests("node-a", asked) == []
    await reports(scene).take_ended("node-a", [UID], asked)
    (held,) = scene.bench.replica.ledger.orphans_on("node-a")
    assert not await scene.bench.replica.ledger.mark_unused(held, asked)
    assert await after(scene, CHECK_INTERVAL)


async def test_node_must_report_again_when_the_pod_is_orphaned_again(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    await reports(scene).take_ended("node-a", [UID], scene.bench.now)
    (held,) = scene.bench.replica.ledger.reservations()
    later = Orphan(scene.bench.now + timedelta(seconds=1), GRACE)
    await scene.bench.ledger.mark_orphaned(R1, POD, later, node="node-a", since=held.since)
    assert await after(scene, CHECK_INTERVAL)
    scene.bench.now += EARLY
    assert reports(scene).digests("node-a", scene.bench.now) == [uid_digest(UID)]


class UnavailableLedger:
    """A ledger whose store is unavailable."""

    def __init__(self, held: Reservation) -> None:
        self.held = held

    def orphans_on(self, node: str) -> list[Reservation]:
        return [self.held]

    def of_pod(self, uid: str) -> Reservation | None:
        return self.held

    async def note_given(self, one: Reservation, given: tuple[DeviceUuid, ...]) -> bool:
        raise LedgerUnavailableError("away")

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        raise LedgerUnavailableError("away")


async def test_report_that_cannot_be_stored_is_requested_again(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    (held,) = scene.bench.ledger.orphans_on("node-a")
    asking = NodeReports(UnavailableLedger(held), CLOCK_SKEW)
    await asking.take_ended("node-a", [UID], scene.bench.now)
    await asking.take_given("node-a", {UID: ["GPU-a7"]})
    assert asking.digests("node-a", scene.bench.now) == [uid_digest(UID)]
