"""Reports of attested nodes about their orphans: docs/decisions/0024."""

import hashlib
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, Protocol

import structlog

from webhook.core.errors import LedgerError
from webhook.core.reservation import Orphan, Reservation

log = structlog.get_logger(__name__)

# The maximum number of orphans in a challenge, the oldest ones, and of pods in an answer.
MAX_PODS: Final = 100


def uid_digest(uid: str) -> str:
    """The digest of a pod's uid. Any client may request a challenge, and it reveals nothing without knowing the uid."""
    return hashlib.sha256(uid.encode()).hexdigest()


class OrphanLedger(Protocol):
    """The methods of the ledger that are needed here."""

    def orphans_on(self, node: str) -> Collection[Reservation]:
        """The orphans on a node, as far as this process knows."""

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        """Raises LedgerError."""


class EndReports:
    """Asks nodes about their orphans and stores their answers. The reconciler acts on them."""

    def __init__(self, orphans: OrphanLedger, skew: timedelta) -> None:
        self._orphans = orphans
        self._skew = skew

    def digests(self, node: str, now: datetime) -> list[str]:
        """Digests of the pods to ask the node about now."""
        return [uid_digest(one.uid) for one, _ in self._pending_orphans(node, now)[:MAX_PODS] if one.uid is not None]

    async def take(self, node: str, ended: Collection[str], asked_at: datetime) -> None:
        """Store a node's answer. A node can report only its own pods. It repeats an answer that cannot be stored now
        when it is asked again."""
        for one, _ in self._pending_orphans(node, asked_at):
            if one.uid not in ended:
                continue
            try:
                if await self._orphans.mark_unused(one, asked_at):
                    log.info("orphan not in use, reported by its node", reservation=one.id, node=node)
            except LedgerError as exc:
                log.warning("report of a node not stored", reservation=one.id, error=type(exc).__name__)

    def _pending_orphans(self, node: str, now: datetime) -> list[tuple[Reservation, Orphan]]:
        """The oldest orphans first. An answer counts only if the challenge is newer than the orphan despite clock
        skew."""
        found = [(one, one.orphan) for one in self._orphans.orphans_on(node) if one.orphan is not None]
        due = [(one, orphan) for one, orphan in found if not orphan.is_unused and orphan.at + 2 * self._skew < now]
        return sorted(due, key=lambda each: (each[1].at, each[0].id))
