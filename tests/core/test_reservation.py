"""A reservation changes as its table says; its identity is completed, and never changes."""

from datetime import timedelta
from itertools import product

import pytest

from tests.builders import NOW, POD_UID, SECOND, identity, reservation, slot
from webhook.core.errors import IllegalMoveError
from webhook.core.reservation import MOVES, Orphan, Phase, PodIdentity, ReservationEvent

LEGAL = {
    ("pending", "pod named"): "pending",
    ("pending", "pod exists"): "finalized",
    ("pending", "pod ended"): "releasing",
    ("pending", "deadline passed"): "releasing",
    ("finalized", "pod named"): "finalized",
    ("finalized", "pod exists"): "finalized",
    ("finalized", "pod ended"): "releasing",
    ("releasing", "pod ended"): "releasing",
}
PAIRS = list(product(Phase, ReservationEvent))


def test_table_of_moves_is_complete() -> None:
    assert {(phase.value, event.value): to.value for (phase, event), to in MOVES.items()} == LEGAL


@pytest.mark.parametrize(("phase", "event"), PAIRS, ids=[f"{p}-{e}".replace(" ", "-") for p, e in PAIRS])
def test_move_outside_of_the_table_is_rejected(phase: Phase, event: ReservationEvent) -> None:
    held = reservation(slot("GPU-1"), phase=phase)
    expected = LEGAL.get((phase.value, event.value))
    if expected is None:
        with pytest.raises(IllegalMoveError, match=f"is {phase.value}: the event '{event.value}' is not possible"):
            held.after(event)
    else:
        assert held.after(event).phase is Phase(expected)


@pytest.mark.defect("assigner-5")
def test_a_finalized_reservation_cannot_expire() -> None:
    finalized = reservation(slot("GPU-1")).after(ReservationEvent.POD_EXISTS)
    assert finalized.deadline is None
    assert not finalized.is_past_deadline(NOW + timedelta(days=3650))


def test_a_pending_reservation_keeps_its_deadline_when_its_pod_is_named() -> None:
    held = reservation(slot("GPU-1"), deadline=NOW + timedelta(seconds=90))
    assert held.after(ReservationEvent.POD_NAMED).deadline == NOW + timedelta(seconds=90)


@pytest.mark.parametrize(
    ("left", "is_past"),
    [
        pytest.param(timedelta(seconds=1), False, id="one-second-left"),
        pytest.param(timedelta(0), True, id="on-the-second"),
        pytest.param(timedelta(seconds=-1), True, id="one-second-over"),
    ],
)
def test_reservation_expires_at_its_deadline(left: timedelta, is_past: bool) -> None:
    assert reservation(slot("GPU-1"), deadline=NOW + left).is_past_deadline(NOW) is is_past


@pytest.mark.parametrize(
    ("pod_name", "uid", "pod", "may_be"),
    [
        pytest.param("train-0", None, identity(), True, id="not-bound-yet"),
        pytest.param("train-0", POD_UID, identity(), True, id="its-own-pod"),
        pytest.param(None, None, identity(name="train-x7k2p"), True, id="name-not-known-yet"),
        pytest.param("train-0", "another-uid", identity(), False, id="bound-to-another-uid"),
        pytest.param("train-1", None, identity(), False, id="made-for-another-name"),
        pytest.param("train-0", POD_UID, identity(namespace="other"), False, id="another-namespace"),
    ],
)
def test_reservation_may_belong_to_one_pod_only(
    pod_name: str | None, uid: str | None, pod: PodIdentity, may_be: bool
) -> None:
    assert reservation(slot("GPU-1"), pod_name=pod_name, uid=uid).may_belong_to(pod) is may_be


def test_unknown_pod_name_matches() -> None:
    assert reservation(slot("GPU-1"), pod_name="train-0", uid=POD_UID).may_belong_to(identity(name=""))


def test_pod_without_a_name_does_not_clear_the_name() -> None:
    assert reservation(slot("GPU-1"), pod_name="train-0").with_pod(identity(name="")).pod_name == "train-0"


def test_unknown_name_is_set_with_the_uid() -> None:
    bound = reservation(slot("GPU-1"), pod_name=None).with_pod(identity(name="train-x7k2p"))
    assert (bound.pod_name, bound.uid) == ("train-x7k2p", POD_UID)


def test_a_reservation_lists_its_devices_in_order() -> None:
    assert reservation(slot("GPU-2"), slot("GPU-1", 3)).uuids == ("GPU-2", "GPU-1")


def test_a_slot_is_written_as_device_and_share() -> None:
    assert str(slot("GPU-1", 3)) == "GPU-1/3"


def test_phase_values_do_not_change() -> None:
    assert [phase.value for phase in Phase] == ["pending", "finalized", "releasing"]


def test_merged_orphan_has_the_longest_grace_period_and_the_first_boot() -> None:
    first = Orphan(NOW, timedelta(minutes=10), "boot-1")
    again = Orphan(NOW + SECOND, timedelta(seconds=5), "boot-2")
    assert first.merged_with(again) == Orphan(NOW + SECOND, timedelta(minutes=10), "boot-1")
