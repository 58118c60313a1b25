"""Why a review was denied, or what else became of a pod or a node: one word each.

The same word stands in the status, the metric, the event and docs/reference/reasons.md.
"""

from enum import StrEnum


class Reason(StrEnum):
    """A denial's reason."""

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
    GATE_OPENED = "GateOpened"
    FAILED_SCHEDULING = "FailedScheduling"
    SCHEDULED = "Scheduled"


# What a client of the API server gets to see beside the reason.
# 403: policy or the pod's own mistake. 409: somebody else's. 429: nothing free now. 503: a part of ours is away.
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

# What happens to pods and nodes that no review is about.
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
        Reason.GATE_OPENED,
        Reason.FAILED_SCHEDULING,
        Reason.SCHEDULED,
    }
)

# What may be otherwise in a moment, or once somebody else has done something: a pod can wait for it.
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
# The node that a map means is labelled, or comes back, while the map's pods wait.
RETRYABLE_WITH_MAP = RETRYABLE | {Reason.NO_SUITABLE_NODE}
