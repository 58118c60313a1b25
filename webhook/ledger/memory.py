"""Reservations in this process's memory, for embedded mode, tests and `explain`. They end with the process."""

from collections.abc import Collection, Sequence
from datetime import datetime

from webhook.core.errors import DeadlinePassedError, SlotsTakenError
from webhook.core.fleet import Fleet
from webhook.core.reservation import Placement, Reservation, ReservationId, ReservationRequest
from webhook.ledger import Ledger
from webhook.ledger.lapses import Lapses
from webhook.ledger.moves import AllPending, Expire, HoldSlots, Move, Times, same_ask
from webhook.ledger.reservation_index import ReservationIndex
from webhook.runtime.clock import Clock

# In the memory ledger, naming a pod and confirming that it exists are one step: a pending reservation never has a pod.
ALL_PENDING = AllPending()


class MemoryLedger(Ledger):
    """Each method is atomic: no other task runs between its check and its write."""

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
        await self.collect(now)
        known = self._index.find(ask.id)
        if known is not None:
            return same_ask(known, ask)
        for placement in placements:
            try:
                taken = self._index.make(placement.node, HoldSlots(ask, placement, ALL_PENDING), now, self._times)
            except SlotsTakenError:
                continue
            if taken is not None:
                return taken
        raise SlotsTakenError(ask.id)

    async def _make(self, node: str, move: Move) -> Reservation | None:
        return self._index.make(node, move, self._clock(), self._times)

    async def find(
        self, reservation_id: ReservationId, *, node: str | None = None, is_fresh: bool = False
    ) -> Reservation | None:
        return self._index.find(reservation_id)

    async def collect(self, now: datetime) -> Collection[Reservation]:
        times, gone = self._times, []
        for one in list(self._index.past_deadline(now - times.clock_skew)):
            if self._index.make(one.node, Expire(one.id, ALL_PENDING), now, times) is not None:
                gone.append(one)
                self.lapses.add(one, now, f"no pod was seen for it within {times.pending_deadline.total_seconds():g} s")
        return gone

    async def confirm_early(self, now: datetime) -> None:
        """Does nothing: a pod counts as existing as soon as it is named."""
