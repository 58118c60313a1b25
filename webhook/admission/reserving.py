"""Decide and reserve, over and over while others are faster: the step that every door into the product shares."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from webhook.admission.pending_limits import PendingLimiter, PendingLimits
from webhook.core.claim import Claim
from webhook.core.decide import MAX_PLACEMENTS, ClaimSearch, EvidencePolicy, decide
from webhook.core.errors import (
    DeadlinePassedError,
    LedgerUnavailableError,
    PlacementRefusedError,
    ReservationConflictError,
    SlotsTakenError,
)
from webhook.core.fleet import Fleet
from webhook.core.queue_order import ClaimKind, QueueOrder, earlier_pod_waits
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement, Reservation, ReservationRequest
from webhook.core.verdict import Deny
from webhook.ledger import Ledger
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics

# So many tries one right after the other, for others are faster now and then. After that the ledger knows something
# that the fleet has yet to hear, and there are pauses, longer and longer.
AT_ONCE = 3
PAUSE, LONGEST = 0.01, 0.25
# What of a review's time is left for the decision and its write when it has waited for room.
FOR_THE_WRITE = timedelta(seconds=1)


class Reserver:
    """Finds a place for a claim and holds it. Where anybody may post a review, `limits` say how many GPUs may be
    held for pods that nobody has seen."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        policy: EvidencePolicy,
        clock: Clock,
        metrics: Metrics,
        *,
        limits: PendingLimits | None = None,
        is_known: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_known`: whether there is such a namespace, as far as was heard."""
        self.fleet = fleet
        self.ledger = ledger
        self.policy = policy
        self._clock = clock
        self._metrics = metrics
        self._room = PendingLimiter(ledger, fleet, clock, limits or PendingLimits(), is_known)
        self.lines = QueueOrder()
        """The claims that wait already, where somebody tells of them."""

    def places(self, claim: Claim, most: int = MAX_PLACEMENTS) -> tuple[Placement, ...] | Deny:
        """Where the claim could be served at this moment; nothing is held."""
        self.fleet.advance(self._clock())
        return decide(claim, self.fleet, self.policy, most=most)

    def others_first(self, claim: Claim) -> Deny | None:
        """Whether it is the turn of others of its kind. Those that nothing can be had for hold nobody up, nor do those
        that want no device.

        One question for all of them: they differ in how many they want, and in nothing else.
        """
        counts = self.lines.counts(ClaimKind.of(claim)) if len(self.lines) and claim.count else []
        counts = [count for count in counts if count]
        if not counts:
            return None
        self.fleet.advance(self._clock())
        most = ClaimSearch(claim, self.fleet, self.policy).most_devices()
        first = next((count for count in counts if count <= most), None)
        return None if first is None else earlier_pod_waits(claim, first)

    def never(self, claim: Claim) -> Deny | None:
        """More than any node has, whatever is free: no waiting heals that. Of a fleet without a GPU nothing is known,
        and a placement map is mended while its pods wait."""
        most = self.fleet.most_devices
        if claim.is_mapped or not most or claim.count <= most:
            return None
        return Deny(
            Reason.NO_MATCHING_DEVICE,
            f"{claim.sentence}: no node has more than {most} GPU{'' if most == 1 else 's'}",
            hint="ask for GPUs that a node has",
        )

    async def hold(
        self, ask: ReservationRequest, claim: Claim, *, answer_by: datetime, patience: timedelta | None = None
    ) -> Reservation | Deny:
        """A reservation for the claim; whoever is faster costs a fresh decision, never a double holding. It waits for
        room as long as `patience` says, or as the review allows."""
        await self.ledger.collect(self._clock())
        if await self.ledger.find(ask.id) is not None:
            return await self._held(ask, claim, answer_by)
        refused = self.too_many_orphans(ask.namespace, claim.count)
        if refused is not None or self._room.why_not(ask.namespace, claim.count) is not None:
            places = self.places(claim, most=1)
            if isinstance(places, Deny):
                return places  # no waiting for room heals that
        async with self._room.entered(ask.namespace, claim.count, self._patience(answer_by, patience)) as refused:
            return refused or await self._held(ask, claim, answer_by)

    def too_many_orphans(self, namespace: str, gpus: int) -> Deny | None:
        """Whether its pods that are gone have as many as its pods may have so. A dry run is told as well."""
        return self._room.too_many_orphans(namespace, gpus)

    def _patience(self, answer_by: datetime, most: timedelta | None = None) -> timedelta:
        left = answer_by - self._clock() - FOR_THE_WRITE
        return left if most is None else min(left, most)

    async def hold_again(self, lapsed: Reservation, *, answer_by: datetime) -> Deny | None:
        """Exactly what was promised under that id, if nobody has it since. Raises LedgerError."""
        self.fleet.advance(self._clock())
        ask = ReservationRequest(
            lapsed.id,
            lapsed.namespace,
            lapsed.claim_digest,
            lapsed.pod_name,
            lapsed.is_shared,
            lapsed.name_prefix,
        )
        if any(self.fleet.is_quarantined(uuid) for uuid in lapsed.uuids):
            return lapsed_for_good(lapsed)
        async with self._room.entered(ask.namespace, len(lapsed.slots), self._patience(answer_by)) as refused:
            if refused is not None:
                return refused
            try:
                await self.ledger.reserve(ask, [Placement(lapsed.node, lapsed.slots)], answer_by=answer_by)
            except SlotsTakenError:
                return lapsed_for_good(lapsed)
            except ReservationConflictError:
                return conflict(ask)
        return None

    async def _held(self, ask: ReservationRequest, claim: Claim, answer_by: datetime) -> Reservation | Deny:
        most = 1  # the best one is nearly always still free
        tries = 0
        while True:
            await self.ledger.collect(self._clock())
            # The same review may have come before, and its answer been lost: then there is nothing to decide.
            known = await self.ledger.find(ask.id)
            places = self.places(claim, most) if known is None else ()
            if isinstance(places, Deny):
                return places
            try:
                return await self.ledger.reserve(ask, places, answer_by=answer_by)
            except SlotsTakenError as exc:
                if isinstance(exc, PlacementRefusedError) and most == MAX_PLACEMENTS:
                    return NOT_WRITTEN
                self._metrics.count_ledger_conflict()
                most, tries = MAX_PLACEMENTS, tries + 1
                if tries > AT_ONCE:
                    await asyncio.sleep(min(PAUSE * (tries - AT_ONCE), LONGEST))
            except DeadlinePassedError:
                return Deny(Reason.DEADLINE_PASSED, "the review's time is over: nothing was reserved", hint="try again")
            except ReservationConflictError:
                return conflict(ask)
            except LedgerUnavailableError:
                return Deny(Reason.LEDGER_AWAY, "reservations cannot be made at this moment", hint="try again")


NOT_WRITTEN = Deny(
    Reason.LEDGER_AWAY, "the reservation cannot be written down as it would have to be", hint="see gpuwarden's log"
)


def lapsed_for_good(lapsed: Reservation) -> Deny:
    return Deny(
        Reason.RESERVATION_EXPIRED,
        f"reservation {lapsed.id} has expired, and not all of its GPUs on {lapsed.node} are free any more",
        hint="create the pod anew",
    )


def conflict(ask: ReservationRequest) -> Deny:
    return Deny(Reason.RESERVATION_CONFLICT, f"reservation {ask.id} exists and is of another claim")
