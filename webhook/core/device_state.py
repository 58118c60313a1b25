"""What a device is doing, in the words of the UI and the metrics."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from webhook.core.evidence import EvidenceState
from webhook.core.reservation import Phase, Reservation


class DeviceState(StrEnum):
    """The only words for it. The five after `available` are of devices that nobody holds and no pod could be given."""

    AVAILABLE = "available"
    NOT_READY = "not-ready"  # its node is
    CORDONED = "cordoned"  # its node is
    STALE = "stale"  # the evidence of its node is, where every claim needs a proven node
    UNPROVEN = "unproven"  # its node has no evidence, is banned, or its evidence is in conflict; as above
    KEPT = "kept"  # by a placement map, for the pods of its StatefulSet
    PENDING = "pending"
    ASSIGNED = "assigned"
    EXPIRED = "expired"  # pending past its deadline, not collected yet
    ORPHANED = "orphaned"  # its pod is gone, and may still run
    QUARANTINED = "quarantined"  # unhealthy, vanished, or the same UUID on two nodes


def free_device_state(
    *, is_ready: bool, is_cordoned: bool, evidence: EvidenceState, needs_evidence: bool
) -> DeviceState:
    """The state of the devices that nobody holds on such a node. `needs_evidence`: every claim needs a proven node."""
    if not is_ready:
        return DeviceState.NOT_READY
    if is_cordoned:
        return DeviceState.CORDONED
    if not needs_evidence or evidence is EvidenceState.FRESH:
        return DeviceState.AVAILABLE
    return DeviceState.STALE if evidence is EvidenceState.STALE else DeviceState.UNPROVEN


def or_set_aside(if_free: DeviceState, *, is_set_aside: bool) -> DeviceState:
    """The state of a device that nobody holds, where `if_free` is that of others on its node."""
    return DeviceState.KEPT if is_set_aside and if_free is DeviceState.AVAILABLE else if_free


def device_state(
    holders: Sequence[Reservation],
    now: datetime,
    *,
    is_quarantined: bool,
    if_free: DeviceState = DeviceState.AVAILABLE,
) -> DeviceState:
    """The state of a device with these holders; a shared one is as busy as its busiest share."""
    if is_quarantined:
        return DeviceState.QUARANTINED
    if not holders:
        return if_free
    if len(holders) == 1:
        return reservation_state(holders[0], now)
    states = {reservation_state(one, now) for one in holders}
    order = (DeviceState.ASSIGNED, DeviceState.PENDING, DeviceState.ORPHANED, DeviceState.EXPIRED)
    return next(state for state in order if state in states)


def reservation_state(reservation: Reservation, now: datetime) -> DeviceState:
    match reservation.phase:
        case Phase.FINALIZED:
            return DeviceState.ASSIGNED if reservation.orphan is None else DeviceState.ORPHANED
        case Phase.RELEASING:
            return DeviceState.ORPHANED
        case Phase.PENDING:
            return DeviceState.EXPIRED if reservation.is_past_deadline(now) else DeviceState.PENDING
