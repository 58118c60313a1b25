"""Reservations whose pods are gone and may still run: nobody has their devices until the containers must have ended."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.test_cluster import ended
from tests.ledger.test_reconcile import MARGIN, MAX_GRACE, ON_NODE, POD, R1, RECORD, Scene, raw_pod
from webhook.admission.pending_limits import PendingLimiter, PendingLimits
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
from webhook.evidence.jwt.end_reports import EndReports, mark_of
from webhook.kube.gpu_node import GpuNode
from webhook.ledger.cluster import PATIENCE as AGAIN
from webhook.ledger.end_of_use import NodeSnapshot
from webhook.ledger.orphans import PAUSE
from webhook.ledger.reconcile import Reconciler

GRACE = timedelta(seconds=600)


@pytest.fixture
async def scene() -> Scene:
    """A pod runs."""
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


async def is_taken(scene: Scene) -> bool:
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


async def test_a_pod_deleted_by_force_keeps_its_devices_for_its_grace_period_and_the_margin(scene: Scene) -> None:
    await gone_by_force(scene)
    assert scene.phase is Phase.FINALIZED  # which a replica that knows nothing of orphans reads as well
    assert await is_taken(scene)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, timedelta(seconds=1)) == {}
    assert not await is_taken(scene)
    assert scene.heard.recorded == [("node-a", Reason.GPU_ORPHANED), ("node-a", Reason.ORPHAN_ENDED)]


async def test_what_stands_in_the_store_is_all_that_another_reconciler_needs(scene: Scene) -> None:
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


async def test_a_pod_that_the_kubelet_has_ended_frees_its_devices_at_once(scene: Scene) -> None:
    scene.reconciler.changed(running(deleted=30))
    scene.reconciler.deleted(running(deleted=30, status=ended("Failed")))
    await scene.reconciler.step()
    assert scene.bench.held() == {}
    assert scene.heard.recorded == []


async def test_a_pod_that_went_unseen_is_waited_for_as_long_as_any_pod_may_take(scene: Scene) -> None:
    scene.bench.pods.uids.clear()
    other = scene.another(scene.bench.another().ledger)
    other.replaced({})
    await assert_free_after(scene, MAX_GRACE + MARGIN, other)


@pytest.fixture
async def stored() -> Scene:
    """A pod runs, whose grace period `/validate` has stored."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    scene.show(running())
    await scene.reconciler.step()
    assert scene.bench.held()["GPU-a0/0"]["grace"] == 600
    return scene


async def test_of_a_pod_that_went_unseen_the_grace_period_is_stored(stored: Scene) -> None:
    stored.bench.pods.uids.clear()
    other = stored.another(stored.bench.another().ledger)
    other.replaced({})
    await assert_free_after(stored, GRACE + MARGIN, other)


async def test_of_a_pod_that_went_between_two_lists_too(stored: Scene) -> None:
    stored.bench.pods.uids.clear()
    stored.reconciler.replaced({})
    await assert_free_after(stored, GRACE + MARGIN)


async def test_a_pod_that_was_being_deleted_when_the_watch_began_has_no_more_than_is_stored(stored: Scene) -> None:
    stored.reconciler.replaced({"ml/pod-1": running(deleted=5)})
    await gone_by_force(stored)
    assert await after(stored, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(stored, timedelta(seconds=1)) == {}


async def test_a_deletion_with_more_than_is_stored_is_stored_in_its_place(stored: Scene) -> None:
    """Where no policy keeps it from that."""
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


async def test_what_is_seen_of_a_pod_that_exists_is_not_stored_where_nothing_was(scene: Scene) -> None:
    """A deletion may have asked for more before."""
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
async def old() -> Scene:
    """A pod runs whose grace period is longer than the limit. Nothing is stored."""
    scene = Scene()
    await scene.run_a_pod()
    scene.reconciler.replaced({"ml/pod-1": of_old(deleted=7200)})
    scene.bench.pods.raws[POD.uid] = of_old(deleted=7200)
    await scene.reconciler.step()
    return scene


async def test_a_living_pod_with_more_than_the_limit_is_waited_for_as_long_as_it_says(old: Scene) -> None:
    old.bench.pods.uids.clear()
    old.reconciler.deleted(of_old(deleted=0))
    await assert_free_after(old, OLD + MARGIN)


async def test_more_than_the_limit_is_stored_for_who_does_not_see_the_pod_go(old: Scene) -> None:
    """Its deletion may ask for all of it."""
    writes = old.bench.store.writes
    await old.reconciler.step()
    assert old.bench.store.writes == writes
    old.bench.pods.uids.clear()
    other = old.another(old.bench.another().ledger)
    other.replaced({})
    await assert_free_after(old, OLD + MARGIN, other)


async def test_more_than_the_limit_is_waited_for_on_a_node_that_is_gone(old: Scene) -> None:
    old.bench.pods.uids.clear()
    old.reconciler.deleted(of_old(deleted=0))
    old.bench.pods.nodes["node-a"] = None
    assert await after(old, timedelta(0))
    assert await after(old, OLD + MARGIN - timedelta(seconds=1))
    assert await after(old, PAUSE) == {}


async def test_what_an_older_replica_has_left_out_is_not_known(stored: Scene) -> None:
    rewritten_by_an_older_replica(stored)
    stored.bench.pods.uids.clear()
    other = stored.another(stored.bench.another().ledger)
    other.replaced({})
    await assert_free_after(stored, MAX_GRACE + MARGIN, other)


async def test_a_pod_that_was_being_deleted_when_the_watch_began_may_have_been_given_longer_before(
    scene: Scene,
) -> None:
    scene.reconciler.replaced({"ml/pod-1": running(deleted=5)})
    await gone_by_force(scene)
    assert await after(scene, MAX_GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, timedelta(seconds=1)) == {}


async def test_while_the_kubelet_is_away_nothing_ends(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-1")
    assert await after(scene, 10 * MAX_GRACE)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-1", is_ready=True, ready_since=scene.bench.now)
    assert await after(scene, PAUSE)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, PAUSE) == {}


async def test_while_nobody_can_say_how_the_node_is_nothing_ends(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.is_away = True
    assert await after(scene, 10 * MAX_GRACE)
    scene.bench.pods.is_away = False
    assert await after(scene, PAUSE) == {}


async def test_a_node_that_was_started_anew_has_nothing_left(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = NodeSnapshot("boot-2")
    assert await after(scene, PAUSE) == {}


async def test_of_a_node_that_is_gone_nothing_is_held_for_ever(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.pods.nodes["node-a"] = None
    assert await after(scene, PAUSE)
    assert await after(scene, MAX_GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, PAUSE) == {}


async def test_a_pod_that_failed_for_the_collector_is_an_orphan_though_it_is_still_there(scene: Scene) -> None:
    """Such a pod may never be deleted, and is not given its devices again."""
    lost = running(status={"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]})
    scene.show(lost)
    assert await after(scene, timedelta(0))
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1))
    assert await after(scene, PAUSE) == {}
    for _ in range(3):
        assert await after(scene, PAUSE) == {}


async def test_an_orphan_whose_pod_is_shown_to_have_ended_after_all_is_free_at_once(scene: Scene) -> None:
    scene.show(running(status={"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}))
    assert await after(scene, timedelta(0))
    scene.show(running(status=ended("Failed")))
    assert await after(scene, timedelta(0)) == {}


async def test_a_later_deletion_with_more_grace_is_waited_for(scene: Scene) -> None:
    lost = {"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}
    scene.show(running(status=lost))
    await scene.reconciler.step()
    scene.bench.now += timedelta(seconds=60)
    scene.show(running(status=lost, deleted=1000))
    scene.bench.pods.uids.clear()
    scene.reconciler.deleted(running(status=lost, deleted=0))
    await scene.reconciler.step()
    assert await after(scene, timedelta(seconds=1000) + MARGIN - timedelta(seconds=1))
    assert await after(scene, PAUSE) == {}


async def test_a_pod_that_came_ran_and_went_between_two_passes_is_an_orphan() -> None:
    """Its reservation was only promised when its end was heard of."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD)
    scene.reconciler.changed(running())
    scene.reconciler.deleted(running(deleted=0))
    await scene.reconciler.step()
    assert await after(scene, PENDING_DEADLINE + timedelta(seconds=30))
    assert await after(scene, GRACE + MARGIN) == {}


async def went_unseen() -> tuple[Scene, Reconciler]:
    """A pod was bound without a review, ran and was deleted by force while no reconciler watched. Another one comes."""
    scene = Scene()
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    scene.bench.now += timedelta(seconds=3)
    other = scene.another(scene.bench.another().ledger)
    other.replaced({})
    return scene, other


async def test_a_pod_that_may_have_run_before_anybody_watched_is_an_orphan() -> None:
    scene, other = await went_unseen()
    assert "orphanedAt" not in (await after(scene, PENDING_DEADLINE, other))["GPU-a0/0"]
    assert "orphanedAt" in (await after(scene, CLOCK_SKEW, other))["GPU-a0/0"]
    assert await is_taken(scene)
    assert await after(scene, GRACE + MARGIN - timedelta(seconds=1), other)
    assert await after(scene, timedelta(seconds=1), other) == {}


async def test_no_replica_gives_up_what_was_promised_to_a_pod_that_may_have_run() -> None:
    scene, _ = await went_unseen()
    scene.bench.now += 10 * PENDING_DEADLINE
    assert await scene.bench.ledger.collect(scene.bench.now) == []
    assert await is_taken(scene)


@pytest.mark.parametrize("is_away", [False, True])
async def test_what_was_promised_to_a_pod_that_may_have_run_counts_as_orphaned_from_its_deadline_on(
    *, is_away: bool
) -> None:
    """Otherwise a tenant could hold any number of GPUs by creations that a quota refuses, while no reconciler runs."""
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


async def test_what_was_promised_counts_no_more_when_its_pod_is_seen_or_has_never_come() -> None:
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
    await ledger.collect(scene.bench.now, never_came=lambda _: True)
    assert ledger.orphaned.gpus_in("ml") == 0


@pytest.mark.parametrize("seconds", [0, 9, 10])
async def test_a_creation_that_came_to_nothing_ends_with_its_hold_if_the_watch_would_have_told_of_it(
    seconds: int,
) -> None:
    """By whatever clocks."""
    scene = Scene()
    scene.bench.now += timedelta(seconds=seconds)
    await scene.reserve()
    await scene.bench.ledger.bind_to_pod(PodProof.NAMED, R1, POD, grace=GRACE)
    left = await after(scene, PENDING_DEADLINE + CLOCK_SKEW)
    assert (left == {}) is (seconds == 10)


async def test_a_creation_that_took_so_long_that_its_pod_was_taken_for_gone_keeps_its_devices() -> None:
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
async def test_a_pod_that_was_taken_for_gone_and_fails_later_is_waited_for_from_then_on(*, is_seen: bool) -> None:
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
    assert await after(scene, PAUSE, other) == {}


async def test_one_that_is_behind_takes_no_orphan_for_a_living_pod(scene: Scene) -> None:
    behind = scene.another(scene.bench.another().ledger)
    behind.replaced({"ml/pod-1": running()})
    await gone_by_force(scene)
    behind._ledger.learn(scene.bench.store.objects["node-a"])
    assert "orphanedAt" in (await after(scene, timedelta(0), behind))["GPU-a0/0"]


async def test_a_pods_end_is_remembered_until_its_reservation_is_heard_of(scene: Scene) -> None:
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


async def test_an_orphan_of_which_more_is_known_by_now_is_not_released_by_one_that_is_behind(scene: Scene) -> None:
    await gone_by_force(scene)
    behind = scene.bench.another()
    (stale,) = behind.ledger.reservations()
    assert stale.orphan is not None
    longer = type(stale.orphan)(scene.bench.now, 2 * GRACE)
    await scene.bench.ledger.abandon(R1, POD, longer, node="node-a", since=stale.since)
    assert not await behind.ledger.release_orphan(stale)
    assert scene.bench.held()["GPU-a0/0"]["grace"] == 1200


async def test_the_gpus_of_orphans_are_counted_by_namespace_until_they_are_released(scene: Scene) -> None:
    ledger = scene.bench.replica.ledger
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 0
    await gone_by_force(scene)
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 1
    assert await after(scene, GRACE + MARGIN) == {}
    scene.bench.replica.watch.catch_up()
    assert ledger.orphaned.gpus_in("ml") == 0


async def test_an_orphan_that_an_older_replica_has_written_anew_is_not_counted_as_one(scene: Scene) -> None:
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


# What its node says.


def reports(scene: Scene) -> EndReports:
    """Of a replica that a node comes to."""
    scene.bench.replica.watch.catch_up()
    return EndReports(scene.bench.replica.ledger, CLOCK_SKEW)


UID = POD.uid
EARLY = 2 * CLOCK_SKEW


async def test_an_orphan_is_released_at_once_when_its_node_says_that_nothing_uses_it(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    assert reports(scene).marks("node-a", scene.bench.now) == [mark_of(UID)]
    await reports(scene).take("node-a", [UID], scene.bench.now)
    assert scene.bench.held()["GPU-a0/0"]["unusedAt"]
    assert reports(scene).marks("node-a", scene.bench.now) == []
    assert await after(scene, timedelta(0)) == {}
    assert scene.heard.recorded[-1] == ("node-a", Reason.ORPHAN_ENDED)
    assert "its node says that nothing uses it" in scene.heard.messages[-1]


async def test_the_word_of_a_node_frees_nothing_of_another_node(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    assert reports(scene).marks("node-b", scene.bench.now) == []
    await reports(scene).take("node-b", [UID], scene.bench.now)
    assert await after(scene, PAUSE)


async def test_the_word_of_a_node_frees_only_the_pods_that_it_names(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    await reports(scene).take("node-a", ["another", mark_of(UID), ""], scene.bench.now)
    assert await after(scene, PAUSE)


async def test_the_word_of_a_node_about_a_pod_that_is_no_orphan_changes_nothing(scene: Scene) -> None:
    before = scene.bench.held()
    await reports(scene).take("node-a", [UID], scene.bench.now + timedelta(days=1))
    assert await after(scene, PAUSE) == before


async def test_a_question_that_may_be_older_than_the_orphan_is_not_asked_and_its_answer_does_not_count(
    scene: Scene,
) -> None:
    await gone_by_force(scene)
    asked = scene.bench.now + EARLY
    assert reports(scene).marks("node-a", asked) == []
    await reports(scene).take("node-a", [UID], asked)
    (held,) = scene.bench.replica.ledger.orphans_on("node-a")
    assert not await scene.bench.replica.ledger.mark_unused(held, asked)
    assert await after(scene, PAUSE)


async def test_a_node_has_to_say_it_again_when_the_pod_is_orphaned_anew(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    await reports(scene).take("node-a", [UID], scene.bench.now)
    (held,) = scene.bench.replica.ledger.reservations()
    later = Orphan(scene.bench.now + timedelta(seconds=1), GRACE)
    await scene.bench.ledger.abandon(R1, POD, later, node="node-a", since=held.since)
    assert await after(scene, PAUSE)
    scene.bench.now += EARLY
    assert reports(scene).marks("node-a", scene.bench.now) == [mark_of(UID)]


class Away:
    """A ledger whose store is away."""

    def __init__(self, held: Reservation) -> None:
        self.held = held

    def orphans_on(self, node: str) -> list[Reservation]:
        return [self.held]

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        raise LedgerUnavailableError("away")


async def test_what_cannot_be_written_down_is_asked_again(scene: Scene) -> None:
    await gone_by_force(scene)
    scene.bench.now += EARLY + timedelta(seconds=1)
    (held,) = scene.bench.ledger.orphans_on("node-a")
    asking = EndReports(Away(held), CLOCK_SKEW)
    await asking.take("node-a", [UID], scene.bench.now)
    assert asking.marks("node-a", scene.bench.now) == [mark_of(UID)]
