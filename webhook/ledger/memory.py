"""Reservations in this process's memory: for the embedded default, tests and `explain`. They end with the process."""

import heapq
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from attrs import evolve

from webhook.clock import Clock
from webhook.core.device import DeviceUuid
from webhook.core.errors import (
    DeadlinePassedError,
    ReservationConflictError,
    ReservationExpiredError,
    SlotsTakenError,
    UnknownReservationError,
)
from webhook.core.fleet import Fleet
from webhook.core.reservation import (
    Ask,
    Event,
    Phase,
    Placement,
    PodIdentity,
    Reservation,
    ReservationId,
)


class MemoryLedger:
    """Every method runs from its check to its write without awaiting: that is the lock."""

    def __init__(self, fleet: Fleet, clock: Clock, *, pending_deadline: timedelta, clock_skew: timedelta) -> None:
        self._fleet = fleet
        self._clock = clock
        self._pending_deadline = pending_deadline
        self._clock_skew = clock_skew
        self._live: dict[ReservationId, Reservation] = {}
        self._by_uid: dict[str, ReservationId] = {}
        self._deadlines: list[tuple[datetime, ReservationId]] = []  # a heap; entries may be out of date

    async def reserve(self, ask: Ask, placements: Sequence[Placement], *, answer_by: datetime) -> Reservation:
        now = self._clock()
        if now >= answer_by:
            raise DeadlinePassedError(ask.id)
        self._collect(now)
        known = self._live.get(ask.id)
        if known is not None:
            return same_ask(known, ask)
        for placement in placements:
            if all(map(self._fleet.is_slot_free, placement.slots)):
                return self._hold(ask, placement, now)
        raise SlotsTakenError(ask.id)

    def _hold(self, ask: Ask, placement: Placement, now: datetime) -> Reservation:
        reservation = Reservation(
            id=ask.id,
            namespace=ask.namespace,
            claim_digest=ask.claim_digest,
            node=placement.node,
            slots=placement.slots,
            since=now,
            deadline=now + self._pending_deadline,
            pod_name=ask.pod_name,
        )
        self._fleet.hold(reservation)
        self._write(reservation)
        return reservation

    async def find(self, reservation_id: ReservationId, *, node: str | None = None) -> Reservation | None:
        return self._live.get(reservation_id)

    async def bind(self, reservation_id: ReservationId, pod: PodIdentity) -> Reservation:
        known = self._of(reservation_id, pod)
        if known.phase is Phase.PENDING and known.uid is None:
            known = evolve(known, deadline=self._clock() + self._pending_deadline)
        return self._write(known.of_pod(pod).after(Event.POD_NAMED))

    async def finalize(self, reservation_id: ReservationId, pod: PodIdentity) -> Reservation:
        return self._write(self._of(reservation_id, pod).of_pod(pod).after(Event.POD_EXISTS))

    def _of(self, reservation_id: ReservationId, pod: PodIdentity) -> Reservation:
        """The live reservation, if it is or may become the pod's."""
        known = self._live.get(reservation_id)
        if known is None:
            raise UnknownReservationError(reservation_id)
        if not known.may_be(pod):
            raise ReservationConflictError(reservation_id)
        # Its holder counts a reservation out before anybody else does.
        if known.is_past_deadline(self._clock() + self._clock_skew) or known.phase is Phase.RELEASING:
            raise ReservationExpiredError(reservation_id)
        return known

    async def release(self, reservation_id: ReservationId, pod: PodIdentity) -> bool:
        known = self._live.get(reservation_id)
        if known is None or not known.may_be(pod):
            return False
        self._drop(self._write(known.after(Event.POD_ENDED)))
        return True

    async def collect(self, now: datetime) -> Collection[Reservation]:
        return self._collect(now)

    def _collect(self, now: datetime) -> list[Reservation]:
        collected = []
        while self._deadlines and self._deadlines[0][0] + self._clock_skew <= now:
            _, reservation_id = heapq.heappop(self._deadlines)
            known = self._live.get(reservation_id)
            if known is not None and known.is_past_deadline(now - self._clock_skew):
                collected.append(self._drop(self._write(known.after(Event.DEADLINE_PASSED))))
        return collected

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        return [self._live[holder] for _, holder in sorted(self._fleet.holders(uuid).items())]

    def of_pod(self, uid: str) -> Reservation | None:
        reservation_id = self._by_uid.get(uid)
        return None if reservation_id is None else self._live[reservation_id]

    def reservations(self) -> Collection[Reservation]:
        return self._live.values()

    def _write(self, reservation: Reservation) -> Reservation:
        self._live[reservation.id] = reservation
        if reservation.uid is not None:
            self._by_uid[reservation.uid] = reservation.id
        if reservation.deadline is not None:
            heapq.heappush(self._deadlines, (reservation.deadline, reservation.id))
        return reservation

    def _drop(self, reservation: Reservation) -> Reservation:
        del self._live[reservation.id]
        if reservation.uid is not None:
            self._by_uid.pop(reservation.uid, None)
        self._fleet.free(reservation)
        return reservation


def same_ask(known: Reservation, ask: Ask) -> Reservation:
    """What an earlier try of the same ask has made; another's under the same id is a conflict."""
    if known.phase is Phase.RELEASING or (known.namespace, known.claim_digest) != (ask.namespace, ask.claim_digest):
        raise ReservationConflictError(ask.id)
    return known
