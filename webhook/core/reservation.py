"""A reservation: devices of ONE node, reserved for one claim, and its state transitions."""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from attrs import evolve, frozen

from webhook.core.device import DeviceUuid, Slot
from webhook.core.errors import IllegalMoveError

ReservationId = NewType("ReservationId", str)
# The API server uses this many characters of `generateName` and appends five.
LONGEST_PREFIX = 58


class Phase(StrEnum):
    """The phase of a reservation. After `releasing` it is deleted."""

    PENDING = "pending"
    FINALIZED = "finalized"
    RELEASING = "releasing"


class ReservationEvent(StrEnum):
    """The events that change a reservation's phase."""

    POD_NAMED = "pod named"  # the validating review had the pod's uid; the pod may still never exist
    POD_EXISTS = "pod exists"
    POD_ENDED = "pod ended"
    DEADLINE_PASSED = "deadline passed"


MOVES: dict[tuple[Phase, ReservationEvent], Phase] = {
    (Phase.PENDING, ReservationEvent.POD_NAMED): Phase.PENDING,
    (Phase.PENDING, ReservationEvent.POD_EXISTS): Phase.FINALIZED,
    (Phase.PENDING, ReservationEvent.POD_ENDED): Phase.RELEASING,
    (Phase.PENDING, ReservationEvent.DEADLINE_PASSED): Phase.RELEASING,
    (Phase.FINALIZED, ReservationEvent.POD_NAMED): Phase.FINALIZED,
    (Phase.FINALIZED, ReservationEvent.POD_EXISTS): Phase.FINALIZED,
    (Phase.FINALIZED, ReservationEvent.POD_ENDED): Phase.RELEASING,
    (Phase.RELEASING, ReservationEvent.POD_ENDED): Phase.RELEASING,
}


class GpuDelivery(StrEnum):
    """Whether the kubelet has chosen the GPUs of a reservation that leaves the choice to it."""

    # The slots stand for as many GPUs of the node, whichever the kubelet chooses.
    AWAITED = "awaited"
    # The slots are those that the kubelet has given to the pod.
    RECORDED = "recorded"


class PodProof(StrEnum):
    """How it is known that a reservation belongs to a pod."""

    # A review named the pod's uid. The pod may still never exist.
    NAMED = "named"
    # A caller of /finalize reports that the pod exists; in embedded mode a review does.
    REPORTED = "reported"
    # The API server shows that the pod exists. The reservation has no deadline any more.
    CONFIRMED = "confirmed"


@frozen
class PodIdentity:
    """Identifies a pod. The name or the uid is empty if it is not known."""

    namespace: str
    name: str
    uid: str


@frozen
class Placement:
    """One way to serve a claim: slots of one node. A claim that only wants a proven node gets no slots."""

    node: str
    slots: tuple[Slot, ...]


@frozen
class ReservationRequest:
    """A request to a ledger to reserve a placement. The id is fixed before the write."""

    id: ReservationId
    namespace: str
    claim_digest: str
    pod_name: str | None = None
    is_shared: bool = False
    # The beginning of the pod's name, if the API server has not generated it yet.
    name_prefix: str | None = None
    delivery: GpuDelivery | None = None
    # The uid of the pod, if the API server has shown that it exists: the reservation has no deadline then. Repeating
    # the request renews the reservation.
    uid: str | None = None
    # The longest grace period that the existing pod can have.
    grace: timedelta | None = None


@frozen
class Orphan:
    """The reservation's pod is deleted, but the end of its containers has not been observed."""

    # Not before the last request to delete the pod.
    at: datetime
    # The longest grace period that its containers can have.
    grace: timedelta
    # The boot id of its node at that time; empty if it was not known.
    boot_id: str = ""
    # The time of the query to which the node answered that nothing of the pod is left.
    unused_at: datetime | None = None

    @property
    def is_unused(self) -> bool:
        """Whether the node has reported, after the deletion, that nothing of the pod is left."""
        return self.unused_at is not None and self.unused_at > self.at

    def merged_with(self, other: "Orphan") -> "Orphan":
        """One orphan from two reports of it."""
        boot_id, unused_at = self.boot_id or other.boot_id, self.unused_at or other.unused_at
        return Orphan(max(self.at, other.at), max(self.grace, other.grace), boot_id, unused_at)


@frozen
class Reservation:
    """One entry of a ledger. Id, namespace, claim digest and node never change. The uid changes once, the slots only
    until the kubelet has chosen the GPUs."""

    id: ReservationId
    namespace: str
    claim_digest: str
    node: str
    slots: tuple[Slot, ...]
    since: datetime
    # Until when a pending reservation waits for its pod; None once it is finalized.
    deadline: datetime | None
    phase: Phase = Phase.PENDING
    pod_name: str | None = None
    uid: str | None = None
    # Whether other pods may have the other shares of its devices.
    is_shared: bool = False
    name_prefix: str | None = None
    # The longest grace period with which the pod can have been deleted; None if it is not known.
    grace: timedelta | None = None
    orphan: Orphan | None = None
    # The GPUs that its pod has by the report of its node; empty as long as these are the reserved ones.
    given: tuple[DeviceUuid, ...] = ()
    # None unless the kubelet chooses the GPUs.
    delivery: GpuDelivery | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the kubelet chooses its GPUs, and is not known to have done so."""
        return self.delivery is GpuDelivery.AWAITED

    @property
    def uuids(self) -> tuple[DeviceUuid, ...]:
        return tuple(slot.uuid for slot in self.slots)

    def after(self, event: ReservationEvent) -> "Reservation":
        phase = MOVES.get((self.phase, event))
        if phase is None:
            raise IllegalMoveError(f"reservation {self.id} is {self.phase}: the event '{event}' is not possible")
        return evolve(self, phase=phase, deadline=self.deadline if phase is Phase.PENDING else None)

    def with_pod(self, pod: PodIdentity) -> "Reservation":
        return evolve(self, uid=pod.uid, pod_name=pod.name or self.pod_name)

    def with_grace(self, grace: timedelta | None, *, is_longest: bool = False) -> "Reservation":
        """The reservation with the longer of both grace periods. If the pod may exist and no grace period is known, it
        stays unknown, because a longer one may not have been observed; unless `is_longest`."""
        if grace is None or (self.uid is not None and self.grace is None and not is_longest):
            return self
        return evolve(self, grace=max(grace, self.grace or grace))

    def orphaned(self, orphan: Orphan) -> "Reservation":
        known = orphan if self.orphan is None else self.orphan.merged_with(orphan)
        return evolve(self.after(ReservationEvent.POD_EXISTS), orphan=known, grace=known.grace)

    def is_past_deadline(self, now: datetime) -> bool:
        return self.deadline is not None and self.deadline <= now

    def may_belong_to(self, pod: PodIdentity) -> bool:
        """Whether the reservation can be the pod's, by what is known of both."""
        return (
            self.namespace == pod.namespace
            and (not pod.uid or self.uid in (None, pod.uid))
            and (not pod.name or self.may_have_name(pod.name))
        )

    def may_have_name(self, name: str) -> bool:
        """Until the name is known, any name that `generateName` can produce."""
        return name.startswith(self.name_prefix or "") if self.pod_name is None else name == self.pod_name
