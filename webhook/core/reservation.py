"""A reservation: devices of ONE node set aside for one claim, and the moves it may make."""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType

from attrs import evolve, frozen

from webhook.core.device import DeviceUuid, Slot
from webhook.core.errors import IllegalMoveError

ReservationId = NewType("ReservationId", str)
# The API server takes so much of `generateName` and adds five letters.
LONGEST_PREFIX = 58


class Phase(StrEnum):
    """Where a reservation stands; after `releasing` it is gone."""

    PENDING = "pending"
    FINALIZED = "finalized"
    RELEASING = "releasing"


class ReservationEvent(StrEnum):
    """What can happen to a reservation."""

    POD_NAMED = "pod named"  # the validating review showed the pod's uid; the pod may still never exist
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


class PodProof(StrEnum):
    """How it is known that a reservation belongs to a pod."""

    # A review named the pod's uid. The pod may still never exist.
    NAMED = "named"
    # A caller of /finalize says that the pod exists; embedded, a review does.
    REPORTED = "reported"
    # The API server says that the pod exists: no deadline matters any more.
    CONFIRMED = "confirmed"


@frozen
class PodIdentity:
    """A pod as it is spoken of; an empty name or uid was not told."""

    namespace: str
    name: str
    uid: str


@frozen
class Placement:
    """One way to serve a claim: slots of one node, none for a claim that only wants a proven node."""

    node: str
    slots: tuple[Slot, ...]


@frozen
class ReservationRequest:
    """What a ledger is asked to hold, its id fixed before the write."""

    id: ReservationId
    namespace: str
    claim_digest: str
    pod_name: str | None = None
    is_shared: bool = False
    # What the pod's name will begin with, where the API server is still to make it up.
    name_prefix: str | None = None


@frozen
class Orphan:
    """A reservation's pod is gone, and nobody has seen its containers end."""

    # No earlier than the last request to delete the pod.
    at: datetime
    # The longest grace period that its containers may have been given.
    grace: timedelta
    # The boot of its node at that time; empty if it was not known.
    boot_id: str = ""
    # When its node was asked about the pod, where it answered that nothing of the pod is left.
    unused_at: datetime | None = None

    @property
    def is_unused(self) -> bool:
        """Whether its node has said so since the pod went."""
        return self.unused_at is not None and self.unused_at > self.at

    def merged_with(self, other: "Orphan") -> "Orphan":
        """The same orphan, told of twice."""
        boot_id, unused_at = self.boot_id or other.boot_id, self.unused_at or other.unused_at
        return Orphan(max(self.at, other.at), max(self.grace, other.grace), boot_id, unused_at)


@frozen
class Reservation:
    """What a ledger holds. Its id, namespace, claim digest, node and slots never change; its uid only once."""

    id: ReservationId
    namespace: str
    claim_digest: str
    node: str
    slots: tuple[Slot, ...]
    since: datetime
    # Until when a pending reservation may wait for its pod; a finalized one waits for nothing.
    deadline: datetime | None
    phase: Phase = Phase.PENDING
    pod_name: str | None = None
    uid: str | None = None
    # Whether it lets others have the other shares of its devices.
    is_shared: bool = False
    name_prefix: str | None = None
    # No deletion of its pod can have had a longer grace period; None if that is not known.
    grace: timedelta | None = None
    orphan: Orphan | None = None

    @property
    def uuids(self) -> tuple[DeviceUuid, ...]:
        return tuple(slot.uuid for slot in self.slots)

    def after(self, event: ReservationEvent) -> "Reservation":
        phase = MOVES.get((self.phase, event))
        if phase is None:
            raise IllegalMoveError(f"reservation {self.id} is {self.phase}: {event} cannot happen to it")
        return evolve(self, phase=phase, deadline=self.deadline if phase is Phase.PENDING else None)

    def with_pod(self, pod: PodIdentity) -> "Reservation":
        return evolve(self, uid=pod.uid, pod_name=pod.name or self.pod_name)

    def with_grace(self, grace: timedelta | None, *, is_longest: bool = False) -> "Reservation":
        """Of a pod that may exist, a grace period is made longer. Where none is known, a longer one may have gone
        unseen, unless it is said that this one `is_longest`."""
        if grace is None or (self.uid is not None and self.grace is None and not is_longest):
            return self
        return evolve(self, grace=max(grace, self.grace or grace))

    def orphaned(self, orphan: Orphan) -> "Reservation":
        known = orphan if self.orphan is None else self.orphan.merged_with(orphan)
        return evolve(self.after(ReservationEvent.POD_EXISTS), orphan=known, grace=known.grace)

    def is_past_deadline(self, now: datetime) -> bool:
        return self.deadline is not None and self.deadline <= now

    def may_belong_to(self, pod: PodIdentity) -> bool:
        """Whether nothing known of it speaks against its being that pod's."""
        return (
            self.namespace == pod.namespace
            and (not pod.uid or self.uid in (None, pod.uid))
            and (not pod.name or self.may_have_name(pod.name))
        )

    def may_have_name(self, name: str) -> bool:
        """Until a name is known, any that `generateName` can lead to."""
        return name.startswith(self.name_prefix or "") if self.pod_name is None else name == self.pod_name
