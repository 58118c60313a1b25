"""Reservations in this process's memory, for embedded mode, tests and `explain`. They end with the process."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from webhook.core.device import DeviceUuid
from webhook.core.errors import DeadlinePassedError, SlotsTakenError, UnknownReservationError
from webhook.core.fleet import Fleet
from webhook.core.reservation import Placement, PodIdentity, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.ledger.lapses import Lapses
from webhook.ledger.moves import AllPending, BindPod, Expire, HoldSlots, Move, Release, Times, same_ask
from webhook.ledger.pending import PendingGpus
from webhook.ledger.reservation_index import ReservationIndex
from webhook.runtime.clock import Clock

# In the memory ledger, naming a pod and confirming that it exists are one step: a pending reservation never has a pod.
ALL_PENDING = AllPending()


class MemoryLedger:
    """Each method runs from its check to its write without awaiting, which makes it atomic."""

    def __init__(self, fleet: Fleet, clock: Clock, times: Times) -> None:
        self._index = ReservationIndex(fleet)
        self._clock = clock
        self._times = times
        self.lapses = Lapses()

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        now = self._clock()
        if now >= answer_by:
            raise DeadlinePassedError(ask.id)
        self._collect(now)
        known = self._index.find(ask.id)
        if known is not None:
            return same_ask(known, ask)
        for placement in placements:
            try:
                taken = self._make(placement.node, HoldSlots(ask, placement, ALL_PENDING), now)
            except SlotsTakenError:
                continue
            if taken is not None:
                return taken
        raise SlotsTakenError(ask.id)

    def _make(self, node: str, move: Move, now: datetime) -> Reservation | None:
        return self._index.make(node, move, now, self._times)

    async def find(
        self, reservation_id: ReservationId, *, node: str | None = None, is_fresh: bool = False
    ) -> Reservation | None:
        return self._index.find(reservation_id)

    async def bind_to_pod(
        self,
        proof: PodProof,
        reservation_id: ReservationId,
        pod: PodIdentity,
        *,
        node: str | None = None,
        grace: timedelta | None = None,
    ) -> Reservation:
        return self._bind(BindPod(reservation_id, pod, proof, grace), node)

    def _bind(self, move: BindPod, node: str | None) -> Reservation:
        known = self._index.find(move.reservation_id, node)
        bound = None if known is None else self._make(known.node, move, self._clock())
        if bound is None:
            raise UnknownReservationError(move.reservation_id)
        return bound

    async def release(
        self, reservation_id: ReservationId, pod: PodIdentity, *, node: str | None = None, since: datetime | None = None
    ) -> bool:
        known = self._index.find_exact(reservation_id, node)
        if known is None:
            return False
        return self._make(known.node, Release(known.id, pod, since or known.since), self._clock()) is not None

    async def collect(self, now: datetime) -> Collection[Reservation]:
        return self._collect(now)

    async def confirm_early(self, now: datetime) -> None:
        """Does nothing: a pod counts as existing as soon as it is named."""

    def _collect(self, now: datetime) -> list[Reservation]:
        overdue = list(self._index.past_deadline(now - self._times.clock_skew))
        gone = [one for one in overdue if self._make(one.node, Expire(one.id, ALL_PENDING), now) is not None]
        for one in gone:
            seconds = self._times.pending_deadline.total_seconds()
            self.lapses.add(one, now, f"no pod was seen for it within {seconds:g} s")
        return gone

    def lapsed(self, reservation_id: ReservationId) -> Reservation | None:
        return self._index.lapsed(reservation_id, self._clock())

    @property
    def pending(self) -> PendingGpus:
        return self._index.pending

    @property
    def unnamed(self) -> PendingGpus:
        return self._index.unnamed

    @property
    def orphaned(self) -> PendingGpus:
        return self._index.orphaned

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        return self._index.of_device(uuid)

    def of_pod(self, uid: str) -> Reservation | None:
        return self._index.of_pod(uid)

    def reservations(self) -> Collection[Reservation]:
        return self._index.all()
