"""What may be done to the reservations of one node: pure, so that a model can drive it and any store can keep it.

Each move is applied to what the store held (`stored`) on top of what earlier moves of the same write have changed
(`held`). A holder gives way only if the store already has it as `releasing`: the store's own rules say the same, so a
move that cannot be done in this write marks what is in its way and asks for another turn.
"""

from collections.abc import Collection, Container, Mapping
from datetime import datetime, timedelta
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
from webhook.ledger.reserved_pod import ReservedPod, has_its_number

Stored = Mapping[ReservationId, Reservation]
Held = dict[ReservationId, Reservation]
# A reservation and the pod that was promised it. By the pod alone, a forged reservation of a pod that exists would
# speak against the one that the pod has.
Promise = tuple[str, ReservationId, str | None]


class WriteAgainError(Exception):
    """The way has been cleared in this write; the move itself needs the next one."""


@frozen
class Times:
    """What a ledger counts with."""

    pending_deadline: timedelta
    clock_skew: timedelta


class Move(Protocol):
    """One change to a node's reservations. Done twice it is done once."""

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        """Change `held`; the reservation as it then is, or a LedgerError."""


class AllPending:
    """All that is still only promised is promised in vain: where a pod that exists is never only promised."""

    def __contains__(self, promise: object) -> bool:
        return True


@frozen
class HoldSlots:
    """Hold a placement, whole or not at all. What is promised `in_vain` no pod will come for."""

    ask: ReservationRequest
    placement: Placement
    in_vain: Container[Promise] = ()

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation:
        known = held.get(self.ask.id)
        if known is not None:
            return same_ask(known, self.ask)
        in_the_way = [one for one in held.values() if collides(one, self.placement.slots, self.ask.is_shared)]
        for one in in_the_way:
            if not may_give_way(one, now, times, self.in_vain):
                raise SlotsTakenError(self.ask.id)
        if in_the_way:
            give_way(in_the_way, stored, held)
        taken = Reservation(
            id=self.ask.id,
            namespace=self.ask.namespace,
            claim_digest=self.ask.claim_digest,
            node=self.placement.node,
            slots=tuple(sorted(self.placement.slots)),  # as every other replica will read them
            since=now,
            deadline=now + times.pending_deadline,
            pod_name=self.ask.pod_name,
            is_shared=self.ask.is_shared,
            name_prefix=self.ask.name_prefix,
        )
        held[taken.id] = taken
        return taken


def collides(one: Reservation, slots: Collection[Slot], is_shared: bool) -> bool:
    """The same slot, or the same device where one of the two did not ask to share."""
    if set(one.slots) & set(slots):
        return True
    alone = not one.is_shared or not is_shared
    return alone and bool(set(one.uuids) & {slot.uuid for slot in slots})


def may_give_way(one: Reservation, now: datetime, times: Times, in_vain: Container[Promise]) -> bool:
    """Others count a reservation out a clock skew later than its holder does; and never while its pod may come for it,
    which from the moment its uid was bound is a question for the API server, not for a clock."""
    if one.phase is Phase.RELEASING:
        return True
    return one.is_past_deadline(now - times.clock_skew) and (one.uid is None or promise_of(one) in in_vain)


def promise_of(one: Reservation) -> Promise:
    return one.node, one.id, one.uid


def give_way(in_the_way: list[Reservation], stored: Stored, held: Held) -> None:
    marked = [one for one in in_the_way if is_stored_as_releasing(one, stored)]
    if len(marked) < len(in_the_way):
        for one in in_the_way:
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
    """Record whose a reservation is.

    `grace` is the pod's own grace period, given before the pod can be on a node; or one that a deletion asked for; or,
    if it `is_longest`, one that is longer than the default where none is stored."""

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
        # Its holder counts a reservation out before anybody else does. A hold that no pod was named for yet is still
        # there, so nobody has its devices: the review that names one is in time.
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
class Adopt:
    """A pod exists and carries a reservation that is not known: it has its devices again, if nobody has them since."""

    reserved_pod: ReservedPod
    node: str

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation:
        reserved_pod = self.reserved_pod
        known = held.get(reserved_pod.reservation_id)
        if known is not None:
            if known.claim_digest != reserved_pod.claim_digest:
                raise ReservationConflictError(known.id)
            return BindPod(known.id, reserved_pod.pod, PodProof.CONFIRMED).apply(stored, held, now, times)
        slots = tuple(sorted(Slot(uuid, first_free(uuid, held)) for uuid in reserved_pod.uuids))
        is_odd = not has_its_number(reserved_pod.uuids, reserved_pod.gpus)
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
        )
        held[adopted.id] = adopted
        return adopted


def first_free(uuid: DeviceUuid, held: Held) -> int:
    """Which share of a device an annotation means it does not say: the lowest that nobody has."""
    taken = {slot.k for one in held.values() for slot in one.slots if slot.uuid == uuid}
    return min(set(range(len(taken) + 1)) - taken)


@frozen
class Refresh:
    """Nothing is changed; whoever waits for it has seen the object as it is now."""

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> None:
        return None


@frozen
class Release:
    """The pod has ended; only its own reservation goes, and of those under that id only the one of that time: who
    comes late, or asks again after a lost answer, may find what the pod was given since."""

    reservation_id: ReservationId
    pod: PodIdentity
    since: datetime
    # Where it is released as an orphan: as which one. A later deletion may have given its pod more time.
    orphan: Orphan | None = None

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = held.get(self.reservation_id)
        if known is None or known.since != self.since or not known.may_belong_to(self.pod):
            return None
        if self.orphan is not None and known.orphan != self.orphan and known.phase is not Phase.RELEASING:
            return None
        return drop(known, stored, held, ReservationEvent.POD_ENDED)


@frozen
class Abandon:
    """The pod is gone and may still run: its devices stay held, as an orphan's."""

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
class Unmark:
    """An orphan's pod is there and alive: it had been taken for gone."""

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
    """Its node was asked about an orphan's pod, and answers that nothing of the pod is left there."""

    reservation_id: ReservationId
    uid: str
    since: datetime
    asked_at: datetime

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = bound_to(held, self.reservation_id, self.uid, self.since)
        # Two clocks have measured: whoever saw the pod go, and whoever asked its node.
        if known is None or known.orphan is None or self.asked_at <= known.orphan.at + 2 * times.clock_skew:
            return None
        if known.orphan.is_unused:
            return known
        marked = held[known.id] = evolve(known, orphan=evolve(known.orphan, unused_at=self.asked_at))
        return marked


@frozen
class Expire:
    """A pending reservation is past its deadline, by a clock skew more than its holder thinks."""

    reservation_id: ReservationId
    in_vain: Container[Promise] = ()

    def apply(self, stored: Stored, held: Held, now: datetime, times: Times) -> Reservation | None:
        known = held.get(self.reservation_id)
        if known is None or not may_give_way(known, now, times, self.in_vain):
            return None
        return drop(known, stored, held, ReservationEvent.DEADLINE_PASSED)


def bound_to(held: Held, reservation_id: ReservationId, uid: str, since: datetime) -> Reservation | None:
    """The reservation of that time whose pod has that uid; another under the same id is none."""
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
    """What an earlier try of the same ask has made; another's under the same id is a conflict."""
    if known.phase is Phase.RELEASING or (known.namespace, known.claim_digest) != (ask.namespace, ask.claim_digest):
        raise ReservationConflictError(ask.id)
    return known
