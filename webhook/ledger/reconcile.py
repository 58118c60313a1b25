"""Brings reservations and pods together: what exists is confirmed, what has ended is released, what never came expires.

Nothing is freed because a pod is absent from a list or a cache: either the watch has said that this uid was deleted, or
the API server is asked for it by name.
"""

from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec
import structlog
from attrs import frozen

from webhook.clock import Clock
from webhook.core import keys
from webhook.core.claim import ClaimRecord
from webhook.core.errors import InvalidPodError, LedgerError
from webhook.core.pod import Metadata, Wire
from webhook.core.reservation import Phase, PodIdentity, Reservation, ReservationId
from webhook.ledger.cluster import ClusterLedger, Witness, WitnessAwayError

log = structlog.get_logger(__name__)

Raw = dict[str, Any]
# A pod in these phases runs no more, and its devices are free. A terminating pod still holds its own.
ENDED = frozenset({"Succeeded", "Failed"})


class StatusWire(Wire, frozen=True):
    phase: str | None = None


class PodWire(Wire, frozen=True):
    metadata: Metadata | None = None
    status: StatusWire | None = None


@frozen
class SeenPod:
    """A pod that carries a reservation, as the API server last showed it."""

    pod: PodIdentity
    reservation_id: ReservationId
    node: str | None
    claim_digest: str
    has_ended: bool


def seen(raw: Raw) -> SeenPod | None:
    """What matters of a pod; None if it carries no reservation."""
    try:
        wire = msgspec.convert(raw, PodWire)
        meta = wire.metadata or Metadata()
        annotations = meta.annotations or {}
        record = ClaimRecord.parse(annotations.get(keys.CLAIM.name) or "")
    except (msgspec.ValidationError, InvalidPodError):
        return None
    reservation_id = annotations.get(keys.RESERVATION_ID.name)
    if not reservation_id or not meta.uid:
        return None
    return SeenPod(
        pod=PodIdentity(meta.namespace or "", meta.name or "", meta.uid),
        reservation_id=ReservationId(reservation_id),
        node=annotations.get(keys.NODE.name),
        claim_digest=record.digest(),
        has_ended=wire.status is not None and wire.status.phase in ENDED,
    )


class Reconciler:
    """Hears of pods from a watch; acts in `step`. Two that act at once do nothing twice."""

    def __init__(self, ledger: ClusterLedger, witness: Witness, clock: Clock) -> None:
        self._ledger = ledger
        self._witness = witness
        self._clock = clock
        self._pods: dict[str, SeenPod] = {}
        self._deleted: set[str] = set()  # uids of which the watch has said so, until their reservations are gone
        self._has_listed = False

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        """A whole list. Who is not in it is asked for by name before anything is freed."""
        found = (seen(raw) for raw in objects.values())
        self._pods = {one.pod.uid: one for one in found if one is not None}
        self._has_listed = True

    def changed(self, raw: Raw) -> None:
        one = seen(raw)
        if one is not None:
            self._pods[one.pod.uid] = one

    def deleted(self, raw: Raw) -> None:
        one = seen(raw)
        if one is not None:
            self._pods.pop(one.pod.uid, None)
            self._deleted.add(one.pod.uid)

    # What is done about it.

    async def step(self) -> None:
        """One pass. What cannot be done now is left for the next one."""
        if not self._has_listed:
            return
        for one in list(self._pods.values()):
            await self._attempt(self._meet(one), one.reservation_id)
        for held in list(self._ledger.reservations()):
            await self._attempt(self._part(held), held.id)
        for given_up in await self._ledger.collect(self._clock()):
            await self._attempt(self._expire(given_up), given_up.id)

    async def _attempt(self, action: Awaitable[None], reservation_id: ReservationId) -> None:
        try:
            await action
        except (LedgerError, WitnessAwayError) as exc:
            log.warning("reservation left for the next pass", reservation=reservation_id, error=type(exc).__name__)

    async def _meet(self, one: SeenPod) -> None:
        """A pod that exists and its reservation: confirmed while it runs, released when it has ended."""
        held = self._ledger.of_pod(one.pod.uid) or await self._ledger.find(one.reservation_id, node=one.node)
        if held is None or held.claim_digest != one.claim_digest or not held.may_be(one.pod):
            return
        if one.has_ended:
            await self._release(held, one.pod, "ended")
        elif held.phase is Phase.PENDING:
            await self._ledger.confirm(held.id, one.pod)
            log.info("reservation confirmed", reservation=held.id, pod=f"{one.pod.namespace}/{one.pod.name}")

    async def _part(self, held: Reservation) -> None:
        """A reservation whose pod is not among those seen: freed only if the pod is known to be gone."""
        if held.phase is Phase.RELEASING:
            await self._release(held, PodIdentity(held.namespace, "", held.uid or ""), "was being released")
        if held.phase is not Phase.FINALIZED or held.uid is None or held.uid in self._pods:
            return
        pod = PodIdentity(held.namespace, held.pod_name or "", held.uid)
        if held.uid in self._deleted or await self._witness.is_gone(pod):
            await self._release(held, pod, "gone")
            self._deleted.discard(held.uid)

    async def _release(self, held: Reservation, pod: PodIdentity, why: str) -> None:
        if await self._ledger.release(held.id, pod):
            log.info("reservation released", reservation=held.id, node=held.node, why=why)

    async def _expire(self, held: Reservation) -> None:
        if await self._ledger.expire(held.id):
            log.info("reservation expired", reservation=held.id, node=held.node)
