"""What a node that has proven itself says of its orphans: docs/decisions/0024."""

import hashlib
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, Protocol

import structlog

from webhook.core.errors import LedgerError
from webhook.core.reservation import Orphan, Reservation

log = structlog.get_logger(__name__)

# Orphans that one challenge asks about, and pods that one answer names: the oldest ones.
MOST: Final = 100


def mark_of(uid: str) -> str:
    """What a challenge, which anybody may ask for, tells of a pod: who does not know its uid learns nothing of it."""
    return hashlib.sha256(uid.encode()).hexdigest()


class OrphanLedger(Protocol):
    """The ledger, as far as it is needed here."""

    def orphans_on(self, node: str) -> Collection[Reservation]:
        """As far as they are known here."""

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        """Raises LedgerError."""


class EndReports:
    """Asks nodes about their orphans, and writes down what they answer. The reconciler acts on it."""

    def __init__(self, orphans: OrphanLedger, skew: timedelta) -> None:
        self._orphans = orphans
        self._skew = skew

    def marks(self, node: str, now: datetime) -> list[str]:
        """Of the pods that the node is to be asked about now."""
        return [mark_of(one.uid) for one, _ in self._open(node, now)[:MOST] if one.uid is not None]

    async def take(self, node: str, ended: Collection[str], asked_at: datetime) -> None:
        """The node was asked at that time. It speaks of pods that it had itself, and of no others. What cannot be
        written down now it says again when it is asked again."""
        for one, _ in self._open(node, asked_at):
            if one.uid not in ended:
                continue
            try:
                if await self._orphans.mark_unused(one, asked_at):
                    log.info("orphan not in use, its node says", reservation=one.id, node=node)
            except LedgerError as exc:
                log.warning("word of a node not written down", reservation=one.id, error=type(exc).__name__)

    def _open(self, node: str, now: datetime) -> list[tuple[Reservation, Orphan]]:
        """An answer counts only if the question is younger than the orphan by any clock of ours."""
        found = [(one, one.orphan) for one in self._orphans.orphans_on(node) if one.orphan is not None]
        due = [(one, orphan) for one, orphan in found if not orphan.is_unused and orphan.at + 2 * self._skew < now]
        return sorted(due, key=lambda each: (each[1].at, each[0].id))
