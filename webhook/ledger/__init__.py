"""Where reservations are stored: one contract suite, and the implementations that pass it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from webhook.core.device import DeviceUuid
from webhook.core.errors import UnknownReservationError
from webhook.core.reservation import Placement, PodIdentity, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.ledger.moves import BindPod, Move, Release
from webhook.ledger.pending import PendingGpus
from webhook.ledger.reservation_index import ReservationIndex
from webhook.runtime.clock import Clock


class Ledger(ABC):
    """Reserves devices for claims. A slot has at most one live reservation, whatever the order of the requests.

    The caller chooses the id before the write, so a caller that lost the reply can repeat the request and finds the
    result of the first one. If a stale replica handled the repeated request, one id may exist on two nodes: pass `node`
    to select one.
    """

    _index: ReservationIndex
    _clock: Clock

    @abstractmethod
    async def _make(self, node: str, move: Move) -> Reservation | None:
        """Make the move on the node's reservations. Raises LedgerError."""

    @abstractmethod
    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        """Reserve the first placement that is free, completely or not at all.

        Repeating a request returns the same reservation. Nothing is written after `answer_by`.
        Raises SlotsTakenError (or its subclass PlacementRefusedError), ReservationConflictError, DeadlinePassedError or
        LedgerUnavailableError.
        """

    @abstractmethod
    async def find(
        self, reservation_id: ReservationId, *, node: str | None = None, is_fresh: bool = False
    ) -> Reservation | None:
        """The reservation, in any phase. With `node`, an implementation may read that node if it does not know the id
        there, or if `is_fresh` is set."""

    async def bind_to_pod(
        self,
        proof: PodProof,
        reservation_id: ReservationId,
        pod: PodIdentity,
        *,
        node: str | None = None,
        grace: timedelta | None = None,
    ) -> Reservation:
        """Record the pod of a reservation, and how the pod is known to exist. Idempotent for the same pod.

        A pod that is only named in a review gives the reservation a new deadline. `grace` is the pod's grace period: it
        is stored if it is given before the pod is on a node; after that, only a longer one is stored.
        Raises UnknownReservationError, ReservationConflictError or ReservationExpiredError.
        """
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
        """The pod has ended: free its devices. Reservations of other pods, and other reservations, stay.

        Pass the reservation's `since` if a newer reservation may have the same id by now.
        """
        known = self._index.find_exact(reservation_id, node)
        if known is None:
            return False
        return await self._make(known.node, Release(known.id, pod, since or known.since)) is not None

    @abstractmethod
    async def collect(self, now: datetime) -> Collection[Reservation]:
        """Expire pending reservations whose deadline passed one clock skew ago or earlier."""

    def lapsed(self, reservation_id: ReservationId) -> Reservation | None:
        """A reservation that expired before a review named its pod, as far as this process knows."""
        return self._index.lapsed(reservation_id, self._clock())

    @abstractmethod
    async def confirm_early(self, now: datetime) -> None:
        """Check whether pods exist by now that reviews have named and the watch has not shown."""

    @property
    def pending(self) -> PendingGpus:
        """Reservations that reviews have made for pods that are not known to exist yet, as far as this process knows.
        Expired reservations do not count."""
        return self._index.pending

    @property
    def unnamed(self) -> PendingGpus:
        """The pending reservations that no review has named a pod for."""
        return self._index.unnamed

    @property
    def orphaned(self) -> PendingGpus:
        """Reservations of pods that are gone and were not seen to end, as far as this process knows. Includes
        reservations past their deadline whose pod does not exist but may have run."""
        return self._index.orphaned

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        """The reservations that hold slots of a device, as far as this process knows."""
        return self._index.of_device(uuid)

    def of_pod(self, uid: str) -> Reservation | None:
        """The reservation of a pod, as far as this process knows."""
        return self._index.of_pod(uid)

    def on(self, node: str) -> Collection[Reservation]:
        """The reservations on a node, as far as this process knows."""
        return self._index.on(node).values()

    def all_of_pod(self, uid: str) -> Sequence[Reservation]:
        """All reservations of a pod, as far as this process knows. It can use those on its own node only."""
        return self._index.all_of_pod(uid)

    def reservations(self) -> Collection[Reservation]:
        """All reservations that this process knows."""
        return self._index.all()
