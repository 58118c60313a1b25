"""The changes that can be made to the reservations of one node. Pure functions, so that a model can drive them and any
store can hold the result.

Each move sees what the store had (`stored`) and the changes of earlier moves in the same write (`held`). A reservation
is displaced only if the store already has it as `releasing`, which the CRD's validation rules enforce too. A move that
has to displace another reservation first marks it as `releasing` and asks for a second write.
"""

from collections.abc import Collection, Container, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Protocol

from attrs import evolve, frozen

from webhook.core.device import DeviceUuid, Slot
from webhook.core.errors import (
    ReservationConflictError,
    ReservationExpiredError,
    SlotsTakenError,
    UnknownReservationError,
)
from webhook.core.reservation import (
    GpuDelivery,
    Orphan,
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationEvent,
    ReservationId,
    ReservationRequest,
)
from webhook.ledger.reserved_pod import ReservedPod, has_claimed_gpu_count

Stored = Mapping[ReservationId, Reservation]
Held = dict[ReservationId, Reservation]
# Node, reservation id and uid of the pod that the reservation was given to. A pod's uid alone does not suffice: a
# forged reservation in the name of an existing pod would count against the pod's own one.
Assignment = tuple[str, ReservationId, str | None]


class WriteAgainError(Exception):
    """This write marks the conflicting reservations as releasing; the move itself needs the next write."""


@frozen
class Times:
    """The deadline and the clock skew that a ledger calculates with."""

    pending_deadline: timedelta
    clock_skew: timedelta


class Move(Protocol):
    """One change to a node's reservations. Applying it twice has the same result as applying it once."""

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        """Change `held`, and return the changed reservation. Raises LedgerError."""


class AllPending:
    """Contains every assignment. In the memory ledger a pending reservation never has a pod."""

    def __contains__(self, promise: object) -> bool:
        return True


@frozen
class HoldSlots:
    """Reserve a placement, completely or not at all. No pod will come for the assignments in `unclaimed`."""

    ask: ReservationRequest
    placement: Placement
    unclaimed: Container[Assignment] = ()

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation:
        known = held.get(self.ask.id)
        if known is not None:
            known = same_ask(known, self.ask)
            if self.ask.uid is not None:
                known = held[known.id] = evolve(known, since=now)
            return known
        if any(is_unclear_beside(one, self.ask.delivery) for one in held.values()):
            raise SlotsTakenError(self.ask.id)
        conflicting = [one for one in held.values() if collides(one, self.placement.slots, self.ask.is_shared)]
        for one in conflicting:
            if not may_be_displaced(one, now, times, self.unclaimed):
                raise SlotsTakenError(self.ask.id)
        if conflicting:
            displace(conflicting, stored, held)
        taken = Reservation(
            id=self.ask.id,
            namespace=self.ask.namespace,
            claim_digest=self.ask.claim_digest,
            node=self.placement.node,
            slots=tuple(sorted(self.placement.slots)),  # the order in which other replicas read them
            since=now,
            deadline=now + times.pending_deadline if self.ask.uid is None else None,
            phase=Phase.PENDING if self.ask.uid is None else Phase.FINALIZED,
            pod_name=self.ask.pod_name,
            uid=self.ask.uid,
            is_shared=self.ask.is_shared,
            name_prefix=self.ask.name_prefix,
            delivery=self.ask.delivery,
            grace=self.ask.grace,
        )
        held[taken.id] = taken
        return taken


def is_unclear_beside(one: Reservation, delivery: GpuDelivery | None) -> bool:
    """Whether the kubelet could choose a device that this reservation or a new one with this delivery has: it does not
    know reservations. The decision excludes such nodes, and may have seen an older state."""
    if one.phase is Phase.RELEASING:
        return False
    if delivery is None:
        return one.is_awaited
    return one.delivery is None or one.orphan is not None


def collides(one: Reservation, slots: Collection[Slot], is_shared: bool) -> bool:
    """Whether it has one of the slots, or one of the devices if either of the two is not shared."""
    if set(one.slots) & set(slots):
        return True
    alone = not one.is_shared or not is_shared
    return alone and bool(set(one.uuids) & {slot.uuid for slot in slots})


def may_be_displaced(one: Reservation, now: datetime, times: Times, unclaimed: Container[Assignment]) -> bool:
    """Whether its slots may be taken: one clock skew after its deadline, and not while its pod may still come. Once a
    uid is recorded, only the API server can rule that out, not a clock."""
    if one.phase is Phase.RELEASING:
        return True
    return one.is_past_deadline(now - times.clock_skew) and (one.uid is None or assignment_of(one) in unclaimed)


def assignment_of(one: Reservation) -> Assignment:
    return one.node, one.id, one.uid


def displace(conflicting: list[Reservation], stored: Stored, held: Held) -> None:
    marked = [one for one in conflicting if is_stored_as_releasing(one, stored)]
    if len(marked) < len(conflicting):
        for one in conflicting:
            if one.phase is not Phase.RELEASING:
                held[one.id] = one.after(ReservationEvent.DEADLINE_PASSED)
        raise WriteAgainError
    for one in marked:
        del held[one.id]


def is_stored_as_releasing(one: Reservation, stored: Stored) -> bool:
    before = stored.get(one.id)
    return before is not None and before.phase is Phase.RELEASING


@frozen
class BindPod:
    """Record the pod of a reservation.

    `grace` is the pod's own grace period, given before the pod can be on a node, or the one of a deletion request. With
    `is_longest`, it is a grace period that is longer than the default, stored where none is.
    """

    reservation_id: ReservationId
    pod: PodIdentity
    proof: PodProof
    grace: timedelta | None = None
    is_longest: bool = False

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation:
        known = held.get(self.reservation_id)
        if known is None:
            raise UnknownReservationError(self.reservation_id)
        if not known.may_belong_to(self.pod):
            raise ReservationConflictError(self.reservation_id)
        # It must not be accepted here when another process, with a faster clock, already offers the devices. While no
        # pod is named for it, an expired reservation that still exists blocks no other pod, so a review may still name
        # one.
        is_late = known.is_past_deadline(now + times.clock_skew) and self.proof is not PodProof.CONFIRMED
        if known.uid is None and self.proof is PodProof.NAMED:
            is_late = False
        if known.phase is Phase.RELEASING or is_late:
            raise ReservationExpiredError(self.reservation_id)
        if known.phase is Phase.PENDING and known.uid is None:
            known = evolve(known, deadline=now + times.pending_deadline)
        event = ReservationEvent.POD_NAMED if self.proof is PodProof.NAMED else ReservationEvent.POD_EXISTS
        named = held[known.id] = (
            known.with_grace(self.grace, is_longest=self.is_longest).with_pod(self.pod).after(event)
        )
        return named


@frozen
class RecordDelivery:
    """The kubelet has chosen the pod's devices: the reservation holds these from now on. If one of them stands for a
    device of another reservation that is awaited too, that one gets a former placeholder of this one. So every device
    has one holder, and as many stay reserved."""

    reservation_id: ReservationId
    uid: str
    since: datetime
    given: tuple[DeviceUuid, ...]

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = bound_to(held, self.reservation_id, self.uid, self.since)
        if known is None or not known.is_awaited or len(self.given) != len(known.slots):
            return None
        others = {slot.uuid: one for one in held.values() if one.id != known.id for slot in one.slots}
        if any(uuid in others and not others[uuid].is_awaited for uuid in self.given):
            raise SlotsTakenError(known.id)
        new = [uuid for uuid in self.given if uuid not in known.uuids]
        spare = [slot for slot in known.slots if slot.uuid not in self.given]
        for uuid, placeholder in zip(new, spare, strict=True):
            if uuid in others:
                other = held[others[uuid].id]
                slots = (placeholder if slot.uuid == uuid else slot for slot in other.slots)
                held[other.id] = evolve(other, slots=tuple(sorted(slots)))
        slots = (Slot(uuid, 0) for uuid in self.given)
        recorded = held[known.id] = evolve(known, slots=tuple(sorted(slots)), delivery=GpuDelivery.RECORDED)
        return recorded


@frozen
class Adopt:
    """An existing pod carries an unknown reservation: reserve its devices again, unless they have been taken since. If
    the kubelet chooses them, reserve as many of the node's devices."""

    reserved_pod: ReservedPod
    node: str
    devices: tuple[DeviceUuid, ...] = ()

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation:
        reserved_pod = self.reserved_pod
        known = held.get(reserved_pod.reservation_id)
        if known is not None:
            if known.claim_digest != reserved_pod.claim_digest:
                raise ReservationConflictError(known.id)
            return BindPod(known.id, reserved_pod.pod, PodProof.CONFIRMED).apply(stored, held, now, times)
        # A pod that has started has its devices, whatever the kubelet chooses from now on.
        delivery = reserved_pod.delivery
        if not reserved_pod.has_started and any(is_unclear_beside(one, delivery) for one in held.values()):
            raise SlotsTakenError(reserved_pod.reservation_id)
        uuids = reserved_pod.uuids if delivery is None else self._placeholders(held)
        slots = tuple(sorted(Slot(uuid, first_free(uuid, held)) for uuid in uuids))
        is_odd = not has_claimed_gpu_count(uuids, reserved_pod.gpus)
        if is_odd or any(collides(one, slots, reserved_pod.is_shared) for one in held.values()):
            raise SlotsTakenError(reserved_pod.reservation_id)
        adopted = Reservation(
            id=reserved_pod.reservation_id,
            namespace=reserved_pod.pod.namespace,
            claim_digest=reserved_pod.claim_digest,
            node=self.node,
            slots=slots,
            since=now,
            deadline=None,
            phase=Phase.FINALIZED,
            pod_name=reserved_pod.pod.name,
            uid=reserved_pod.pod.uid,
            is_shared=reserved_pod.is_shared,
            delivery=delivery,
        )
        held[adopted.id] = adopted
        return adopted

    def _placeholders(self, held: Held) -> tuple[DeviceUuid, ...]:
        taken = {uuid for one in held.values() for uuid in one.uuids}
        free = (uuid for uuid in dict.fromkeys((*self.reserved_pod.given, *self.devices)) if uuid not in taken)
        return tuple(islice(free, self.reserved_pod.gpus))


def first_free(uuid: DeviceUuid, held: Held) -> int:
    """The lowest free share of a device: the annotation does not say which share the pod has."""
    taken = {slot.k for one in held.values() for slot in one.slots if slot.uuid == uuid}
    return min(set(range(len(taken) + 1)) - taken)


@frozen
class Refresh:
    """Changes nothing. The caller gets the object read as it is now."""

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> None:
        return None


@frozen
class Release:
    """The pod has ended. Removes only the reservation of that pod with that `since`: a late or repeated request must
    not release a newer reservation under the same id."""

    reservation_id: ReservationId
    pod: PodIdentity
    since: datetime
    # The orphan to release, if it is one. A later deletion may have given its pod a longer grace period.
    orphan: Orphan | None = None

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = held.get(self.reservation_id)
        if known is None or known.since != self.since or not known.may_belong_to(self.pod):
            return None
        if self.orphan is not None and known.orphan != self.orphan and known.phase is not Phase.RELEASING:
            return None
        return drop(known, stored, held, ReservationEvent.POD_ENDED)


@frozen
class MarkOrphaned:
    """The pod is gone and may still run: its devices stay reserved as an orphan's."""

    reservation_id: ReservationId
    pod: PodIdentity
    since: datetime
    orphan: Orphan

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = held.get(self.reservation_id)
        if known is None or known.since != self.since or not known.may_belong_to(self.pod):
            return None
        if known.phase is Phase.RELEASING:
            return None
        abandoned = held[known.id] = known.with_pod(self.pod).orphaned(self.orphan)
        return abandoned


@frozen
class ClearOrphanMark:
    """The orphan's pod exists and is alive, so the reservation is not an orphan."""

    reservation_id: ReservationId
    uid: str
    since: datetime
    orphan: Orphan

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = bound_to(held, self.reservation_id, self.uid, self.since)
        if known is None or known.orphan != self.orphan:
            return None
        unmarked = held[known.id] = evolve(known, orphan=None)
        return unmarked


@frozen
class MarkUnused:
    """The node was asked about an orphan's pod and reports that nothing of the pod is left."""

    reservation_id: ReservationId
    uid: str
    since: datetime
    asked_at: datetime

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = bound_to(held, self.reservation_id, self.uid, self.since)
        # Two clocks are involved: the one of the replica that saw the pod go, and the one of the replica that asked the
        # node.
        if known is None or known.orphan is None or self.asked_at <= known.orphan.at + 2 * times.clock_skew:
            return None
        if known.orphan.is_unused:
            return known
        marked = held[known.id] = evolve(known, orphan=evolve(known.orphan, unused_at=self.asked_at))
        return marked


@frozen
class NoteGiven:
    """The node reports that the pod has other GPUs than the reserved ones."""

    reservation_id: ReservationId
    uid: str
    since: datetime
    given: tuple[DeviceUuid, ...]

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = bound_to(held, self.reservation_id, self.uid, self.since)
        # A pod that was deleted by force may have a successor of the same name, and the kubelet reports names.
        if known is None or known.orphan is not None:
            return None
        noted = held[known.id] = evolve(known, given=self.given)
        return noted


@frozen
class Expire:
    """A pending reservation is past its deadline by more than the clock skew."""

    reservation_id: ReservationId
    unclaimed: Container[Assignment] = ()

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = held.get(self.reservation_id)
        if known is None or not may_be_displaced(known, now, times, self.unclaimed):
            return None
        return drop(known, stored, held, ReservationEvent.DEADLINE_PASSED)


def bound_to(held: Held, reservation_id: ReservationId, uid: str, since: datetime) -> Reservation | None:
    """The reservation with that `since` whose pod has that uid, ignoring others under the same id."""
    known = held.get(reservation_id)
    if known is None or (known.since, known.uid) != (since, uid) or known.phase is not Phase.FINALIZED:
        return None
    return known


def drop(known: Reservation, stored: Stored, held: Held, event: ReservationEvent) -> Reservation:
    if is_stored_as_releasing(known, stored):
        del held[known.id]
        return known
    if known.phase is not Phase.RELEASING:
        held[known.id] = known.after(event)
    raise WriteAgainError


def same_ask(known: Reservation, ask: ReservationRequest) -> Reservation:
    """The reservation that an earlier attempt of the same request made. Another request's is a conflict."""
    if known.phase is Phase.RELEASING or (known.namespace, known.claim_digest) != (ask.namespace, ask.claim_digest):
        raise ReservationConflictError(ask.id)
    return known
