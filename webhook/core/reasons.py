"""The reasons of denials and Events.

Status, metrics, Events and docs/reference/reasons.md use the same names.
"""

from enum import StrEnum


class Reason(StrEnum):
    """The reason of a verdict or an Event."""

    ADMITTED = "Admitted"
    NOT_ASKED = "NotAsked"
    QUEUED = "Queued"

    INVALID_POD = "InvalidPod"
    NOT_REVIEWED = "NotReviewed"
    INJECTION_CONFLICT = "InjectionConflict"
    NO_SUITABLE_NODE = "NoSuitableNode"
    NO_PROVEN_NODE = "NoProvenNode"
    NODE_NOT_READY = "NodeNotReady"
    NO_MATCHING_DEVICE = "NoMatchingDevice"
    NO_FREE_DEVICE = "NoFreeDevice"
    NOT_IN_MAP = "NotInMap"
    AMBIGUOUS_NODE = "AmbiguousNode"
    NAMESPACE_FULL = "NamespaceFull"
    PENDING_FULL = "PendingFull"

    NOT_RESERVED = "NotReserved"
    FORGED = "Forged"
    GPU_WITHOUT_CLAIM = "GpuWithoutClaim"
    IMMUTABLE = "Immutable"
    RESERVATION_CONFLICT = "ReservationConflict"
    RESERVATION_EXPIRED = "ReservationExpired"

    DEADLINE_PASSED = "DeadlinePassed"
    LEDGER_AWAY = "LedgerAway"
    OVERLOADED = "Overloaded"

    BIND_DEADLINE_PASSED = "BindDeadlinePassed"
    RESERVATION_LOST = "ReservationLost"
    RESERVATION_RESTORED = "ReservationRestored"
    DEVICES_UNREADABLE = "DevicesUnreadable"
    DEVICE_VANISHED = "DeviceVanished"
    DEVICE_DISPUTED = "DeviceDisputed"
    GPU_NODE_UNREADABLE = "GPUNodeUnreadable"
    NODE_GONE = "NodeGone"
    GPU_ORPHANED = "GPUOrphaned"
    ORPHAN_ENDED = "OrphanEnded"
    EVIDENCE_CHANGED = "EvidenceChanged"
    EVIDENCE_LOST = "EvidenceLost"
    GPU_MISMATCHED = "GPUMismatched"
    GPU_COLLISION = "GPUCollision"
    GPU_UNRESERVED = "GPUUnreserved"
    DEVICE_PLUGIN_FOUND = "DevicePluginFound"
    GATE_OPENED = "GateOpened"
    RESOURCE_CLAIM_TAKEN = "ResourceClaimTaken"
    ALLOCATION_CLEARED = "AllocationCleared"


# The status codes that clients of the API server get with the reasons.
# 403: a policy, or a mistake in the pod. 409: a conflict with another object. 429: no capacity now. 503: a part of
# gpuwarden is not available.
STATUS_CODES: dict[Reason, int] = {
    Reason.INVALID_POD: 403,
    Reason.NOT_REVIEWED: 403,
    Reason.INJECTION_CONFLICT: 403,
    Reason.NO_SUITABLE_NODE: 403,
    Reason.NO_PROVEN_NODE: 403,
    Reason.NODE_NOT_READY: 429,
    Reason.NO_MATCHING_DEVICE: 429,
    Reason.NO_FREE_DEVICE: 429,
    Reason.NOT_IN_MAP: 403,
    Reason.AMBIGUOUS_NODE: 409,
    Reason.NAMESPACE_FULL: 429,
    Reason.PENDING_FULL: 429,
    Reason.NOT_RESERVED: 403,
    Reason.FORGED: 403,
    Reason.GPU_WITHOUT_CLAIM: 403,
    Reason.IMMUTABLE: 403,
    Reason.RESERVATION_CONFLICT: 409,
    Reason.RESERVATION_EXPIRED: 409,
    Reason.DEADLINE_PASSED: 503,
    Reason.LEDGER_AWAY: 503,
    Reason.OVERLOADED: 503,
}

# Reasons of Events about pods and nodes, outside of reviews.
EVENTS_ONLY = frozenset(
    {
        Reason.BIND_DEADLINE_PASSED,
        Reason.RESERVATION_LOST,
        Reason.RESERVATION_RESTORED,
        Reason.DEVICES_UNREADABLE,
        Reason.DEVICE_VANISHED,
        Reason.DEVICE_DISPUTED,
        Reason.GPU_NODE_UNREADABLE,
        Reason.NODE_GONE,
        Reason.GPU_ORPHANED,
        Reason.ORPHAN_ENDED,
        Reason.EVIDENCE_CHANGED,
        Reason.EVIDENCE_LOST,
        Reason.GPU_MISMATCHED,
        Reason.GPU_COLLISION,
        Reason.GPU_UNRESERVED,
        Reason.DEVICE_PLUGIN_FOUND,
        Reason.GATE_OPENED,
        Reason.RESOURCE_CLAIM_TAKEN,
        Reason.ALLOCATION_CLEARED,
    }
)

# Denials that can end without a change of the pod. Such pods can wait in the queue.
RETRYABLE = frozenset(
    {
        Reason.NO_PROVEN_NODE,
        Reason.NODE_NOT_READY,
        Reason.NO_MATCHING_DEVICE,
        Reason.NO_FREE_DEVICE,
        Reason.NOT_IN_MAP,
        Reason.AMBIGUOUS_NODE,
        Reason.NAMESPACE_FULL,
        Reason.PENDING_FULL,
        Reason.LEDGER_AWAY,
    }
)
# A pod with a map also waits for its node: an administrator may label it, or it may come back.
RETRYABLE_WITH_MAP = RETRYABLE | {Reason.NO_SUITABLE_NODE}
