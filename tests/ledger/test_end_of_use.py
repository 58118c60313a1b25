"""What proves that a pod's containers have ended, and how long an orphan is kept without proof."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.builders import Raw
from webhook.core.reservation import Orphan
from webhook.ledger.end_of_use import (
    ContainerUse,
    Grace,
    NodeSnapshot,
    OrphanObservation,
    OrphanTimes,
    PodHistories,
    container_use_in,
    longest_grace_in,
)
from webhook.runtime.clock import LONG_AGO

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RUNNING: Raw = {"running": {}}
TERMINATED: Raw = {"terminated": {"exitCode": 0}}
WAITING: Raw = {"waiting": {"reason": "x"}}
BY_POD_GC = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def status(phase: str | None, *states: Raw, **more: Any) -> Raw:
    return {"phase": phase, "containerStatuses": [{"name": "c", "state": state} for state in states], **more}


def on_node(said: Any = None, *, grace: int | None = 30, deleted: int | None = None, **spec: Any) -> Raw:
    meta: Raw = {"uid": "u"}
    if deleted is not None:
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": deleted}
    return {
        "metadata": meta,
        "spec": {"nodeName": "node-a", "terminationGracePeriodSeconds": grace, **spec},
        "status": status("Running", RUNNING) if said is None else said,
    }


@pytest.mark.parametrize(
    ("raw", "use"),
    [
        pytest.param({"spec": {}, "status": {"phase": "Pending"}}, ContainerUse.NEVER_BOUND, id="unbound"),
        pytest.param({"spec": {"nodeName": ""}}, ContainerUse.NEVER_BOUND, id="on-a-node-without-a-name"),
        pytest.param({}, ContainerUse.NEVER_BOUND, id="empty-object"),
        pytest.param(on_node(), ContainerUse.POSSIBLE, id="runs"),
        pytest.param(on_node({}), ContainerUse.POSSIBLE, id="bound-without-status"),
        pytest.param(on_node(status("Pending", WAITING)), ContainerUse.POSSIBLE, id="is-about-to-start"),
        pytest.param(on_node(status("Succeeded", TERMINATED)), ContainerUse.ENDED, id="succeeded"),
        pytest.param(
            on_node(status("Failed", TERMINATED, WAITING)), ContainerUse.ENDED, id="failed-and-one-never-started"
        ),
        pytest.param(on_node(status("Failed", TERMINATED, RUNNING)), ContainerUse.POSSIBLE, id="failed-and-one-runs"),
        pytest.param(on_node(status("Failed", {})), ContainerUse.POSSIBLE, id="failed-and-one-state-is-empty"),
        pytest.param(
            on_node(status("Failed", TERMINATED, conditions=BY_POD_GC)),
            ContainerUse.POSSIBLE,
            id="failed-by-pod-garbage-collection",
        ),
        pytest.param(
            on_node(status("Succeeded", TERMINATED, initContainerStatuses=[{"state": RUNNING}])),
            ContainerUse.POSSIBLE,
            id="a-sidecar-runs",
        ),
        pytest.param(
            on_node(status("Failed", TERMINATED, ephemeralContainerStatuses=[{"state": RUNNING}])),
            ContainerUse.POSSIBLE,
            id="a-debug-container-runs",
        ),
        pytest.param(on_node(status("Running", TERMINATED)), ContainerUse.POSSIBLE, id="between-two-crashes"),
        pytest.param(
            on_node(status("Running", TERMINATED), deleted=600),
            ContainerUse.POSSIBLE,
            id="between-two-crashes-and-deleted",
        ),
        pytest.param(on_node(status("Failed")), ContainerUse.REJECTED, id="failed-and-no-container-has-a-status"),
        pytest.param(on_node({"phase": 3}), ContainerUse.POSSIBLE, id="phase-is-not-a-string"),
        pytest.param({"spec": []}, ContainerUse.POSSIBLE, id="spec-is-not-an-object"),
        pytest.param(
            on_node({"phase": "Failed", "containerStatuses": {}}), ContainerUse.POSSIBLE, id="statuses-are-not-a-list"
        ),
    ],
)
def test_pod_object_shows_container_use(raw: Raw, use: ContainerUse) -> None:
    assert container_use_in(raw) is use


@pytest.mark.parametrize(
    ("raw", "longest"),
    [
        pytest.param(on_node(grace=600), 600, id="of-the-spec"),
        pytest.param(on_node(grace=None), 30, id="default"),
        pytest.param(on_node(grace=0), 1, id="none"),
        pytest.param(on_node(grace=-5), 1, id="negative"),
        pytest.param(on_node(grace=5, deleted=40), 40, id="of-the-deletion"),
        pytest.param(on_node(grace=40, deleted=5), 40, id="spec-longer-than-deletion"),
        pytest.param(
            on_node(grace=5, containers=[{"livenessProbe": {"terminationGracePeriodSeconds": 70}}]),
            70,
            id="of-a-probe",
        ),
        pytest.param(
            on_node(grace=5, initContainers=[{"startupProbe": {"terminationGracePeriodSeconds": 80}}]),
            80,
            id="of-a-sidecars-probe",
        ),
        pytest.param(on_node(grace=2**62), 315360000, id="beyond-the-maximum"),
    ],
)
def test_longest_grace_period_of_a_pod_object(raw: Raw, longest: int) -> None:
    assert longest_grace_in(raw) == seconds(longest)


def test_unreadable_grace_period_is_unknown() -> None:
    assert longest_grace_in(on_node(grace="soon")) is None  # type: ignore[arg-type]


MAX_GRACE = timedelta(hours=1)

# The observed history of a pod.


def end_of_history(*versions: Raw, is_listed: bool = False) -> tuple[bool, timedelta]:
    """A pod that was observed in these versions and was deleted in the last one."""
    histories = PodHistories()
    if is_listed:
        histories.listed({"u": versions[0]})
    for raw in versions[is_listed:-1]:
        histories.seen("u", raw)
    went = histories.deleted("u", versions[-1], NOW)
    return went.is_over, OrphanTimes(max_grace=MAX_GRACE).grace(went.grace)


def test_ended_pod_needs_no_waiting() -> None:
    assert end_of_history(on_node(), on_node(status("Failed", TERMINATED), deleted=30))[0]


def test_shorter_grace_period_does_not_replace_a_longer_one() -> None:
    assert end_of_history(on_node(), on_node(deleted=600), on_node(deleted=5), on_node(deleted=0)) == (
        False,
        seconds(600),
    )


def test_history_of_a_pod_listed_alive_is_complete() -> None:
    assert end_of_history(on_node(grace=5), on_node(grace=5, deleted=0), is_listed=True) == (False, seconds(5))


def test_grace_period_is_unknown_for_a_pod_first_observed_while_terminating() -> None:
    assert end_of_history(on_node(deleted=5), on_node(deleted=0), is_listed=True) == (False, MAX_GRACE)
    assert end_of_history(on_node(deleted=5), on_node(deleted=0)) == (False, MAX_GRACE)


def test_pod_older_than_the_limit_keeps_its_longer_grace_period() -> None:
    day = 24 * 3600
    pod = on_node(grace=day, deleted=day)
    assert end_of_history(pod, on_node(grace=day, deleted=0), is_listed=True) == (False, seconds(day))
    assert OrphanTimes(max_grace=MAX_GRACE).grace(Grace()) == MAX_GRACE


def test_stored_grace_period_bounds_an_unobserved_one() -> None:
    patience = OrphanTimes(max_grace=MAX_GRACE)
    assert patience.grace(Grace(), stored=seconds(5)) == seconds(5)
    assert patience.grace(Grace(seconds(7)), stored=seconds(5)) == seconds(7)
    assert patience.grace(Grace(seconds(3), is_all=True), stored=seconds(5)) == seconds(5)


def test_grace_period_of_an_unobserved_pod_comes_from_its_spec() -> None:
    assert end_of_history(on_node(grace=7)) == (False, seconds(7))


def test_pod_rejected_by_the_kubelet_has_ended_if_it_never_ran() -> None:
    assert end_of_history(on_node(status("Pending")), on_node(status("Failed")))[0]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(status("Running", RUNNING), id="ran"),
        pytest.param({"containerStatuses": [{"state": WAITING, "lastState": TERMINATED}]}, id="crashed"),
        pytest.param({"containerStatuses": [{"state": WAITING, "restartCount": 2}]}, id="was-restarted"),
        pytest.param({"initContainerStatuses": [{"state": TERMINATED}]}, id="was-initialized"),
    ],
)
def test_pod_rejected_after_a_kubelet_restart_may_still_run(before: Raw) -> None:
    assert not end_of_history(on_node(before), on_node(status("Failed")))[0]


def test_pod_first_observed_as_rejected_may_still_run() -> None:
    assert end_of_history(on_node(status("Failed")), on_node(status("Failed")), is_listed=True) == (False, MAX_GRACE)


# How long an orphan is kept.

ORPHAN = Orphan(NOW, seconds(30), "boot-1")
PATIENCE = OrphanTimes(seconds(3600), seconds(90))
READY = NodeSnapshot("boot-1", is_ready=True, ready_since=LONG_AGO)
NOT_READY = NodeSnapshot("boot-1")


def watched(*looks: tuple[float, NodeSnapshot | None]) -> OrphanObservation:
    found = None
    for after, node in looks:
        found = OrphanObservation.after(found, node, NOW + seconds(after))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("looks", "end"),
    [
        pytest.param([(0, READY)], 120, id="kubelet-alive"),
        pytest.param([(0, READY), (500, READY)], 120, id="kubelet-alive-for-long"),
        pytest.param([(0, NOT_READY)], None, id="kubelet-not-ready"),
        pytest.param([(0, READY), (10, NOT_READY)], None, id="kubelet-becomes-not-ready"),
        pytest.param([(0, NOT_READY), (60, READY)], 180, id="kubelet-ready-again-as-observed"),
        pytest.param(
            [(0, READY), (60, NodeSnapshot("boot-1", is_ready=True, ready_since=NOW + seconds(50)))],
            170,
            id="kubelet-ready-again-by-its-condition",
        ),
        pytest.param([(7, NodeSnapshot("boot-1", is_ready=True))], 127, id="ready-without-transition-time"),
        pytest.param([(5, NodeSnapshot("boot-2"))], 0, id="another-boot"),
        pytest.param([(5, NodeSnapshot(""))], None, id="no-boot-known"),
        pytest.param([(0, READY), (5, None), (400, None)], 3695, id="node-gone"),
        pytest.param([(0, READY), (5, None), (400, READY)], 520, id="node-back"),
        pytest.param([(0, READY), (5, None), (400, NodeSnapshot("boot-2"))], 0, id="node-back-after-a-reboot"),
    ],
)
def test_orphan_ends_at_the_expected_time(looks: list[tuple[float, NodeSnapshot | None]], end: float | None) -> None:
    expected = None if end is None else NOW + seconds(end)
    assert watched(*looks).end_of(ORPHAN, PATIENCE) == expected


def test_boot_id_proves_nothing_without_an_earlier_one() -> None:
    assert watched((0, NodeSnapshot("boot-2"))).end_of(Orphan(NOW, seconds(30)), PATIENCE) is None


@pytest.mark.parametrize(
    ("raw", "node"),
    [
        ({}, NodeSnapshot()),
        (
            {
                "status": {
                    "nodeInfo": {"bootID": "b" * 200},
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                }
            },
            NodeSnapshot("b" * 128, is_ready=True, ready_since=NOW),
        ),
        ({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, NodeSnapshot()),
        (
            {
                "status": {
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "9999-12-31T23:59:59Z"}]
                }
            },
            NodeSnapshot(is_ready=True),
        ),
    ],
)
def test_node_snapshot_from_a_node_object(raw: Raw, node: NodeSnapshot) -> None:
    assert NodeSnapshot.of(raw) == node
