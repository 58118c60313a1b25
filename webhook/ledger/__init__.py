"""Where reservations live. One protocol, one contract suite, and implementations that pass it."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from webhook.core.device import DeviceUuid
from webhook.core.reservation import Placement, PodIdentity, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.ledger.pending import PendingGpus


class Ledger(Protocol):
    """Holds devices for claims. A slot has at most one live reservation, whatever is asked in whatever order.

    Ids are fixed by the caller before the write, so whoever lost an answer asks again and finds what was done. Asked
    again of one that was behind, an id may stand on two nodes: `node` says which is meant, if there is one.
    """

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        """Hold the first placement that is free, whole or not at all.

        The same ask again gets the same reservation. Nothing is written from `answer_by` on.
        Raises SlotsTakenError, PlacementRefusedError among them, ReservationConflictError, DeadlinePassedError or
        LedgerUnavailableError.
        """

    async def find(
        self, reservation_id: ReservationId, *, node: str | None = None, is_fresh: bool = False
    ) -> Reservation | None:
        """The reservation, of whatever phase; `node` says where to look if it is not known there, or to be sure."""

    async def bind_to_pod(
        self,
        proof: PodProof,
        reservation_id: ReservationId,
        pod: PodIdentity,
        *,
        node: str | None = None,
        grace: timedelta | None = None,
    ) -> Reservation:
        """Record whose the reservation is, and how that is known. Idempotent for the same pod.

        A pod that is only named gives the reservation a new deadline. `grace` is the pod's grace period: it is stored
        if it is given before the pod is on a node; later, only a longer one is.
        Raises UnknownReservationError, ReservationConflictError or ReservationExpiredError.
        """

    async def release(
        self, reservation_id: ReservationId, pod: PodIdentity, *, node: str | None = None, since: datetime | None = None
    ) -> bool:
        """The pod has ended: its devices are free. Another pod's or another reservation's stay held.

        `since` is that of the reservation that is meant, where by now another may stand there under its id.
        """

    async def collect(self, now: datetime) -> Collection[Reservation]:
        """Give up what waited past its deadline; others count it out a clock skew later than its holder does."""

    def lapsed(self, reservation_id: ReservationId) -> Reservation | None:
        """What was promised under an id, and went before a pod was named for it, as far as it was seen here."""

    async def confirm_early(self, now: datetime) -> None:
        """Ask whether pods exist by now that were named in reviews, and nobody has told of."""

    @property
    def pending(self) -> PendingGpus:
        """What reviews have reserved for pods that nobody has seen, as far as it is known here; what is given up does
        not count."""

    @property
    def unnamed(self) -> PendingGpus:
        """Of these, what no review has named a pod for."""

    @property
    def orphaned(self) -> PendingGpus:
        """What pods had that are gone and were not seen to end, as far as it is known here; and what was promised to
        pods that are not there past its deadline, and may have run."""

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        """Who holds a device's slots, as far as it is known here."""

    def of_pod(self, uid: str) -> Reservation | None:
        """What a pod holds, as far as it is known here."""

    def reservations(self) -> Collection[Reservation]:
        """All that are known here."""
