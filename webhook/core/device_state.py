"""What a device is doing, in the words of the UI and the metrics."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from webhook.core.reservation import Phase, Reservation


class DeviceState(StrEnum):
    """The only words for it."""

    AVAILABLE = "available"
    PENDING = "pending"
    ASSIGNED = "assigned"
    EXPIRED = "expired"  # pending past its deadline, not collected yet
    ORPHANED = "orphaned"  # its pod is gone, not released yet
    QUARANTINED = "quarantined"  # unhealthy, vanished, or the same UUID on two nodes


def device_state(holders: Sequence[Reservation], now: datetime, *, is_quarantined: bool) -> DeviceState:
    """The state of a device with these holders; a shared one is as busy as its busiest share."""
    if is_quarantined:
        return DeviceState.QUARANTINED
    if not holders:
        return DeviceState.AVAILABLE
    if len(holders) == 1:
        return reservation_state(holders[0], now)
    states = {reservation_state(one, now) for one in holders}
    order = (DeviceState.ASSIGNED, DeviceState.PENDING, DeviceState.ORPHANED, DeviceState.EXPIRED)
    return next(state for state in order if state in states)


def reservation_state(reservation: Reservation, now: datetime) -> DeviceState:
    match reservation.phase:
        case Phase.FINALIZED:
            return DeviceState.ASSIGNED
        case Phase.RELEASING:
            return DeviceState.ORPHANED
        case Phase.PENDING:
            return DeviceState.EXPIRED if reservation.is_past_deadline(now) else DeviceState.PENDING
