"""Decides and reserves, and retries on conflicts. All webhooks and the queue order meet here."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from attrs import define, evolve, field

from webhook.admission.pending_limits import PendingLimiter, PendingLimits
from webhook.core.backfill import queued_ahead
from webhook.core.claim import Claim
from webhook.core.decide import MAX_PLACEMENTS, EvidencePolicy, decide, nodes_to_try
from webhook.core.errors import (
    DeadlinePassedError,
    LedgerUnavailableError,
    PlacementRefusedError,
    ReservationConflictError,
    SlotsTakenError,
)
from webhook.core.fleet import Fleet
from webhook.core.queue_order import QueueOrder
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement, Reservation, ReservationRequest
from webhook.core.verdict import Deny
from webhook.ledger import Ledger
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics

# Conflicts are retried this many times without a pause. More conflicts mean that the ledger knows something that the
# fleet does not know yet, so the pauses grow.
AT_ONCE = 3
PAUSE, LONGEST = 0.01, 0.25
# Part of a review's time kept for the decision and the write after a wait for room.
FOR_THE_WRITE = timedelta(seconds=1)


@define(eq=False, repr=False)
class Reserver:
    """Finds GPUs for a claim and reserves them. Where callers of the webhook are not authenticated, `limits` bounds the
    GPUs that are reserved for pods that have not been seen."""

    fleet: Fleet
    ledger: Ledger
    policy: EvidencePolicy
    _clock: Clock
    _metrics: Metrics
    _limits: PendingLimits = field(factory=PendingLimits, kw_only=True)
    # Whether the namespace is known to exist.
    _is_known: Callable[[str], bool] = field(default=lambda _: True, kw_only=True)
    queue_order: QueueOrder = field(factory=QueueOrder, init=False)
    """The claims that wait in the queue; empty in a process without a queue."""
    _limiter: PendingLimiter = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._limiter = PendingLimiter(self.ledger, self.fleet, self._clock, self._limits, self._is_known)

    def placements(self, claim: Claim, most: int = MAX_PLACEMENTS) -> tuple[Placement, ...] | Deny:
        """Placements that would serve the claim now. Reserves nothing."""
        self.fleet.advance(self._clock())
        return decide(claim, self.fleet, self.policy, most=most)

    def nodes_to_try(self, claim: Claim) -> tuple[str, ...] | Deny:
        """The nodes that fit the claim now, and others that may fit it later."""
        self.fleet.advance(self._clock())
        return nodes_to_try(claim, self.fleet, self.policy)

    def queued_ahead(self, claim: Claim) -> Deny | None:
        """Denies the claim if a queued claim of its kind can be served first."""
        self.fleet.advance(self._clock())
        return queued_ahead(claim, self.queue_order, self.fleet, self.policy)

    def exceeds_every_node(self, claim: Claim) -> Deny | None:
        """Denies a claim for more GPUs than any node has: waiting cannot help. A fleet without GPUs is taken as not
        known yet, and a placement map can be corrected while its pods wait."""
        most = self.fleet.most_devices
        if claim.is_mapped or not most or claim.count <= most:
            return None
        return Deny(
            Reason.NO_MATCHING_DEVICE,
            f"{claim.sentence}: no node has more than {most} GPU{'' if most == 1 else 's'}",
            hint="ask for GPUs that a node has",
        )

    async def reserve(
        self, ask: ReservationRequest, claim: Claim, *, answer_by: datetime, patience: timedelta | None = None
    ) -> Reservation | Deny:
        """Reserves GPUs for the claim. If another request takes them first, decides again. Waits for room for at most
        `patience`, or as long as the review allows."""
        await self.ledger.collect(self._clock())
        if await self.ledger.find(ask.id) is not None:
            return await self._reserve_with_retries(ask, claim, answer_by)
        refused = self.too_many_orphans(ask.namespace, claim.count)
        if refused is not None or self._limiter.denial(ask.namespace, claim.count) is not None:
            placements = self.placements(claim, most=1)
            if isinstance(placements, Deny):
                return placements  # waiting for room cannot help
        async with self._limiter.reserve_room(
            ask.namespace, claim.count, self._patience(answer_by, patience)
        ) as refused:
            return refused or await self._reserve_with_retries(ask, claim, answer_by)

    def too_many_orphans(self, namespace: str, gpus: int) -> Deny | None:
        """Denies the request if the namespace's deleted pods hold too many GPUs. Applies to dry runs too."""
        return self._limiter.too_many_orphans(namespace, gpus)

    def _patience(self, answer_by: datetime, most: timedelta | None = None) -> timedelta:
        left = answer_by - self._clock() - FOR_THE_WRITE
        return left if most is None else min(left, most)

    async def reserve_for_pod(
        self, ask: ReservationRequest, claim: Claim, node: str, *, answer_by: datetime
    ) -> Reservation | Deny:
        """Reserves GPUs of one node for a pod that exists. No limit on pending reservations applies to it."""
        there = evolve(claim, nodes=evolve(claim.nodes, node_name=node))
        return await self._reserve_with_retries(ask, there, answer_by)

    async def reserve_again(self, lapsed: Reservation, *, answer_by: datetime) -> Deny | None:
        """Renews a lapsed reservation with the same id and the same GPUs, if they are still free. Raises
        LedgerError."""
        self.fleet.advance(self._clock())
        ask = ReservationRequest(
            lapsed.id,
            lapsed.namespace,
            lapsed.claim_digest,
            lapsed.pod_name,
            lapsed.is_shared,
            lapsed.name_prefix,
            lapsed.delivery,
        )
        if any(self.fleet.is_quarantined(uuid) for uuid in lapsed.uuids):
            return lapsed_for_good(lapsed)
        async with self._limiter.reserve_room(ask.namespace, len(lapsed.slots), self._patience(answer_by)) as refused:
            if refused is not None:
                return refused
            try:
                await self.ledger.reserve(ask, [Placement(lapsed.node, lapsed.slots)], answer_by=answer_by)
            except SlotsTakenError:
                return lapsed_for_good(lapsed)
            except ReservationConflictError:
                return conflict(ask)
        return None

    async def _reserve_with_retries(
        self, ask: ReservationRequest, claim: Claim, answer_by: datetime
    ) -> Reservation | Deny:
        most = 1  # the best placement is nearly always still free
        tries = 0
        while True:
            await self.ledger.collect(self._clock())
            # An earlier attempt of the same review may have reserved, and its answer been lost.
            known = await self.ledger.find(ask.id)
            placements = self.placements(claim, most) if known is None else ()
            if isinstance(placements, Deny):
                return placements
            try:
                return await self.ledger.reserve(ask, placements, answer_by=answer_by)
            except SlotsTakenError as exc:
                if isinstance(exc, PlacementRefusedError) and most == MAX_PLACEMENTS:
                    return NOT_WRITTEN
                self._metrics.count_ledger_conflict()
                most, tries = MAX_PLACEMENTS, tries + 1
                if tries > AT_ONCE:
                    await asyncio.sleep(min(PAUSE * (tries - AT_ONCE), LONGEST))
            except DeadlinePassedError:
                return Deny(
                    Reason.DEADLINE_PASSED,
                    "the deadline of the review has passed: nothing was reserved",
                    hint="try again",
                )
            except ReservationConflictError:
                return conflict(ask)
            except LedgerUnavailableError:
                return Deny(Reason.LEDGER_AWAY, "reservations cannot be made at this moment", hint="try again")


NOT_WRITTEN = Deny(Reason.LEDGER_AWAY, "the reservation could not be written", hint="see gpuwarden's log")


def lapsed_for_good(lapsed: Reservation) -> Deny:
    return Deny(
        Reason.RESERVATION_EXPIRED,
        f"reservation {lapsed.id} has expired, and not all of its GPUs on {lapsed.node} are free any more",
        hint="create the pod again",
    )


def conflict(ask: ReservationRequest) -> Deny:
    return Deny(Reason.RESERVATION_CONFLICT, f"reservation {ask.id} exists for another claim")
