"""The state of a device, as the UI and the metrics show it."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from webhook.core.evidence import EvidenceState
from webhook.core.reservation import Phase, Reservation


class DeviceState(StrEnum):
    """The six states after `available` are states of devices that no reservation holds and no pod can get."""

    AVAILABLE = "available"
    NOT_READY = "not-ready"  # the node is not ready
    CORDONED = "cordoned"  # the node is cordoned
    STALE = "stale"  # the evidence of the node is stale, and every claim needs a proven node
    UNPROVEN = "unproven"  # the node is banned, or has no or conflicting evidence, and every claim needs a proven node
    KEPT = "kept"  # a placement map sets it aside for the pods of its StatefulSet
    CLAIMED = "claimed"  # a ResourceClaim that is not of a reservation has it
    PENDING = "pending"
    ASSIGNED = "assigned"
    EXPIRED = "expired"  # pending past its deadline; the reconciler has not released it yet
    ORPHANED = "orphaned"  # its pod is deleted, but containers may still run
    QUARANTINED = "quarantined"  # unhealthy, vanished, or on two nodes with the same UUID
    MISMATCHED = "mismatched"  # the kubelet gave it to another pod than its reservation, or its pod got another one


def free_device_state(
    *, is_ready: bool, is_cordoned: bool, evidence: EvidenceState, needs_evidence: bool
) -> DeviceState:
    """The state of the free devices of a node. `needs_evidence`: every claim needs a proven node."""
    if not is_ready:
        return DeviceState.NOT_READY
    if is_cordoned:
        return DeviceState.CORDONED
    if not needs_evidence or evidence is EvidenceState.FRESH:
        return DeviceState.AVAILABLE
    return DeviceState.STALE if evidence is EvidenceState.STALE else DeviceState.UNPROVEN


def or_set_aside(if_free: DeviceState, *, is_set_aside: bool) -> DeviceState:
    """The state of a free device, if `if_free` is the state of the other free devices of its node."""
    return DeviceState.KEPT if is_set_aside and if_free is DeviceState.AVAILABLE else if_free


def device_state(
    holders: Sequence[Reservation],
    now: datetime,
    *,
    is_quarantined: bool,
    is_mismatched: bool = False,
    is_claimed: bool = False,
    if_free: DeviceState = DeviceState.AVAILABLE,
) -> DeviceState:
    """The state of a device with these holders. A shared device has the state of its busiest share."""
    if is_mismatched:
        return DeviceState.MISMATCHED
    if is_quarantined:
        return DeviceState.QUARANTINED
    if not holders:
        return DeviceState.CLAIMED if is_claimed else if_free
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
