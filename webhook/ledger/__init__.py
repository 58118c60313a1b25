"""Where reservations are stored: one protocol, one contract suite, and the implementations that pass it."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from webhook.core.device import DeviceUuid
from webhook.core.reservation import Placement, PodIdentity, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.ledger.pending import PendingGpus


class Ledger(Protocol):
    """Reserves devices for claims. A slot has at most one live reservation, whatever the order of the requests.

    The caller chooses the id before the write, so a caller that lost the reply can repeat the request and finds the
    result of the first one. If a stale replica handled the repeated request, one id may exist on two nodes: pass `node`
    to select one.
    """

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        """Reserve the first placement that is free, completely or not at all.

        Repeating a request returns the same reservation. Nothing is written after `answer_by`.
        Raises SlotsTakenError (or its subclass PlacementRefusedError), ReservationConflictError, DeadlinePassedError or
        LedgerUnavailableError.
        """

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

    async def release(
        self, reservation_id: ReservationId, pod: PodIdentity, *, node: str | None = None, since: datetime | None = None
    ) -> bool:
        """The pod has ended: free its devices. Reservations of other pods, and other reservations, stay.

        Pass the reservation's `since` if a newer reservation may have the same id by now.
        """

    async def collect(self, now: datetime) -> Collection[Reservation]:
        """Expire pending reservations past their deadline. Other replicas wait one clock skew longer than the replica
        that made the reservation."""

    def lapsed(self, reservation_id: ReservationId) -> Reservation | None:
        """A reservation that expired before a review named its pod, as far as this process knows."""

    async def confirm_early(self, now: datetime) -> None:
        """Check whether pods exist by now that reviews have named and the watch has not shown."""

    @property
    def pending(self) -> PendingGpus:
        """Reservations that reviews have made for pods that are not known to exist yet, as far as this process knows.
        Expired reservations do not count."""

    @property
    def unnamed(self) -> PendingGpus:
        """The pending reservations that no review has named a pod for."""

    @property
    def orphaned(self) -> PendingGpus:
        """Reservations of pods that are gone and were not seen to end, as far as this process knows. Includes
        reservations past their deadline whose pod does not exist but may have run."""

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        """The reservations that hold slots of a device, as far as this process knows."""

    def of_pod(self, uid: str) -> Reservation | None:
        """The reservation of a pod, as far as this process knows."""

    def reservations(self) -> Collection[Reservation]:
        """All reservations that this process knows."""
