"""Reports of attested nodes about their pods: which orphans have ended (docs/decisions/0024), and which pods have other
GPUs than those reserved for them (docs/decisions/0034)."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

import structlog

from webhook.core.device import DeviceUuid, is_uuid
from webhook.core.errors import LedgerError
from webhook.core.reservation import Orphan, Reservation

log = structlog.get_logger(__name__)

# The maximum number of orphans in a challenge, the oldest ones, and of pods in an answer.
MAX_PODS: Final = 100
# The maximum number of pods with other GPUs in an answer, and of GPUs of each.
MAX_GIVEN: Final = 16


def uid_digest(uid: str) -> str:
    """The digest of a pod's uid. Any client may request a challenge, and it reveals nothing without knowing the uid."""
    return hashlib.sha256(uid.encode()).hexdigest()


class PodLedger(Protocol):
    """The methods of the ledger that are needed here."""

    def orphans_on(self, node: str) -> Collection[Reservation]:
        """The orphans on a node, as far as this process knows."""

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        """Raises LedgerError."""

    def of_pod(self, uid: str) -> Reservation | None:
        """The reservation of a pod, as far as this process knows."""

    async def note_given(self, one: Reservation, given: tuple[DeviceUuid, ...]) -> bool:
        """Raises LedgerError."""


class NodeReports:
    """Asks nodes about their orphans and stores what they answer. The reconciler acts on it. A node can report only
    its own pods."""

    def __init__(self, ledger: PodLedger, skew: timedelta) -> None:
        self._ledger = ledger
        self._skew = skew

    def digests(self, node: str, now: datetime) -> list[str]:
        """Digests of the pods to ask the node about now."""
        return [uid_digest(one.uid) for one, _ in self._pending_orphans(node, now)[:MAX_PODS] if one.uid is not None]

    async def take_ended(self, node: str, ended: Collection[str], asked_at: datetime) -> None:
        """Store which pods have ended. The node repeats an answer that cannot be stored now when it is asked again."""
        for one, _ in self._pending_orphans(node, asked_at):
            if one.uid not in ended:
                continue
            try:
                if await self._ledger.mark_unused(one, asked_at):
                    log.info("orphan not in use, reported by its node", reservation=one.id, node=node)
            except LedgerError as exc:
                log.warning("report of a node not stored", reservation=one.id, error=type(exc).__name__)

    async def take_given(self, node: str, given: Mapping[str, Sequence[str]]) -> None:
        """Store the GPUs of pods, by their uids. The node repeats its report from time to time."""
        for uid, uuids in given.items():
            one = self._ledger.of_pod(uid)
            if one is None or one.node != node:
                continue
            found = tuple(sorted({DeviceUuid(uuid) for uuid in uuids if is_uuid(uuid)}))
            if set(found) <= {*one.uuids} or found == one.given:
                continue
            try:
                if await self._ledger.note_given(one, found):
                    log.warning("pod has other GPUs, reported by its node", reservation=one.id, node=node, gpus=found)
            except LedgerError as exc:
                log.warning("report of a node not stored", reservation=one.id, error=type(exc).__name__)

    def _pending_orphans(self, node: str, now: datetime) -> list[tuple[Reservation, Orphan]]:
        """The oldest orphans first. An answer counts only if the challenge is newer than the orphan despite clock
        skew."""
        found = [(one, one.orphan) for one in self._ledger.orphans_on(node) if one.orphan is not None]
        due = [(one, orphan) for one, orphan in found if not orphan.is_unused and orphan.at + 2 * self._skew < now]
        return sorted(due, key=lambda each: (each[1].at, each[0].id))
