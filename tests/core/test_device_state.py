"""The states of devices."""

from datetime import timedelta

import pytest

from tests.builders import NOW, reservation, slot
from webhook.core.device_state import DeviceState, device_state
from webhook.core.reservation import Phase, Reservation

PENDING = reservation(slot("GPU-1"))
OVERDUE = reservation(slot("GPU-1"), deadline=NOW)
FINALIZED = reservation(slot("GPU-1"), phase=Phase.FINALIZED)
RELEASING = reservation(slot("GPU-1"), phase=Phase.RELEASING)


@pytest.mark.parametrize(
    ("holders", "state"),
    [
        pytest.param([], "available", id="nobody"),
        pytest.param([PENDING], "pending", id="waits-for-its-pod"),
        pytest.param([OVERDUE], "expired", id="waited-too-long"),
        pytest.param([FINALIZED], "assigned", id="has-its-pod"),
        pytest.param([RELEASING], "orphaned", id="its-pod-is-gone"),
        pytest.param([OVERDUE, PENDING, FINALIZED], "assigned", id="shared-and-one-in-use"),
        pytest.param([OVERDUE, RELEASING, PENDING], "pending", id="shared-and-one-waits"),
        pytest.param([OVERDUE, RELEASING], "orphaned", id="shared-and-all-on-the-way-out"),
    ],
)
@pytest.mark.defect("assigner-22")
def test_a_device_is_as_busy_as_its_busiest_holder(holders: list[Reservation], state: str) -> None:
    assert device_state(holders, NOW, is_quarantined=False) is DeviceState(state)


def test_pending_device_expires_at_its_deadline() -> None:
    states = [device_state([PENDING], NOW + timedelta(seconds=s), is_quarantined=False) for s in (89, 90)]
    assert states == [DeviceState.PENDING, DeviceState.EXPIRED]


def test_quarantined_state_overrides_holders() -> None:
    assert device_state([FINALIZED], NOW, is_quarantined=True) is DeviceState.QUARANTINED


@pytest.mark.parametrize("holders", [[], [FINALIZED]], ids=["free", "held"])
def test_mismatched_state_overrides_holders_and_quarantine(holders: list[Reservation]) -> None:
    assert device_state(holders, NOW, is_quarantined=True, is_mismatched=True) is DeviceState.MISMATCHED


@pytest.mark.parametrize(("holders", "state"), [([], "claimed"), ([FINALIZED], "assigned")], ids=["free", "held"])
def test_claimed_state_is_one_of_devices_without_holders(holders: list[Reservation], state: str) -> None:
    assert device_state(holders, NOW, is_quarantined=False, is_claimed=True) is DeviceState(state)
    assert device_state(holders, NOW, is_quarantined=True, is_claimed=True) is DeviceState.QUARANTINED


def test_state_values_do_not_change() -> None:
    assert [state.value for state in DeviceState] == [
        "available",
        "not-ready",
        "cordoned",
        "stale",
        "unproven",
        "kept",
        "claimed",
        "pending",
        "assigned",
        "expired",
        "orphaned",
        "quarantined",
        "mismatched",
    ]
