"""What both ledgers do in the same way: they find reservations in an index, and change them by moves."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from webhook.core.device import DeviceUuid
from webhook.core.errors import UnknownReservationError
from webhook.core.reservation import PodIdentity, PodProof, Reservation, ReservationId
from webhook.ledger.moves import BindPod, Move, Release
from webhook.ledger.pending import PendingGpus
from webhook.ledger.reservation_index import ReservationIndex
from webhook.runtime.clock import Clock


class IndexedLedger(ABC):
    """The part of a ledger that does not depend on where reservations are stored."""

    _index: ReservationIndex
    _clock: Clock

    @abstractmethod
    async def _make(self, node: str, move: Move) -> Reservation | None:
        """Make the move on the node's reservations. Raises LedgerError."""

    async def bind_to_pod(
        self,
        proof: PodProof,
        reservation_id: ReservationId,
        pod: PodIdentity,
        *,
        node: str | None = None,
        grace: timedelta | None = None,
    ) -> Reservation:
        return await self._bind(BindPod(reservation_id, pod, proof, grace), node)

    async def _bind(self, move: BindPod, node: str | None) -> Reservation:
        known = self._index.find(move.reservation_id, node)
        bound = None if known is None else await self._make(known.node, move)
        if bound is None:
            raise UnknownReservationError(move.reservation_id)
        return bound

    async def release(
        self, reservation_id: ReservationId, pod: PodIdentity, *, node: str | None = None, since: datetime | None = None
    ) -> bool:
        known = self._index.find_exact(reservation_id, node)
        if known is None:
            return False
        return await self._make(known.node, Release(known.id, pod, since or known.since)) is not None

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
