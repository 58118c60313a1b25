"""Reservations whose pods are gone and were not seen to end: held until the pods' containers must have ended."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from webhook.core.reasons import Reason
from webhook.core.reservation import Orphan, Phase, PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import Departure, NodeSnapshot, OrphanObservation, OrphanTimes
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Between two looks at a node with orphans.
PAUSE = timedelta(seconds=10)


class NodeReader(Protocol):
    """Knows for certain how a node is: by a quorum read, never by a cache."""

    async def node(self, name: str) -> NodeSnapshot | None:
        """The node as it is now; None if it is gone. Raises WitnessAwayError."""


class Orphans:
    """Takes orphans in, and releases them. Its methods raise LedgerError and WitnessAwayError."""

    def __init__(
        self, ledger: ClusterLedger, nodes: NodeReader, events: Events, clock: Clock, patience: OrphanTimes
    ) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._events = events
        self._clock = clock
        self._patience = patience
        self._watched: dict[str, OrphanObservation] = {}
        self._next_look: dict[str, datetime] = {}

    async def take_in(self, held: Reservation, pod: PodIdentity, departure: Departure) -> None:
        """The pod went without proof of its end. Told again of the same departure, it does nothing."""
        orphan = Orphan(departure.at, self._patience.grace(departure.grace, held.grace))
        if held.orphan is not None and held.orphan.merged_with(orphan) == held.orphan:
            return
        watched = await self._look(held.node)
        boot_id = "" if watched.sight is None else watched.sight.boot_id
        orphan = Orphan(orphan.at, orphan.grace, boot_id)
        taken = await self._ledger.abandon(held.id, pod, orphan, node=held.node, since=held.since)
        if taken is None or taken.orphan is None:
            return
        log.warning("reservation orphaned", reservation=held.id, node=held.node, grace=taken.orphan.grace)
        until = watched.end_of(taken.orphan, self._patience)
        when = "once its kubelet is back" if until is None else f"at {until:%Y-%m-%dT%H:%M:%SZ} or later"
        text = f"{gpus_of(held)}: pod {pod.namespace}/{pod.name} is gone and its containers may still run; free {when}"
        text += ", or as soon as `attest` on the node says that nothing of the pod is left"
        self._events.record(Subject.of_node(held.node), Reason.GPU_ORPHANED, text)

    def by_node(self) -> Mapping[str, Sequence[Reservation]]:
        """The orphans that are known here. Nodes without any are forgotten."""
        found = defaultdict[str, list[Reservation]](list)
        for one in self._ledger.reservations():
            if one.orphan is not None and one.phase is Phase.FINALIZED:
                found[one.node].append(one)
        for node in self._watched.keys() - found.keys():
            self._watched.pop(node)
            self._next_look.pop(node, None)
        return found

    async def look(self, node: str, orphans: Sequence[Reservation]) -> None:
        """Release those that have ended."""
        unused = [one for one in orphans if one.orphan is not None and one.orphan.is_unused]
        for one in unused:
            await self._release(one, "its node says that nothing uses it")
        orphans = [one for one in orphans if one not in unused]
        now = self._clock()
        if not orphans or self._next_look.get(node, now) > now:
            return
        self._next_look[node] = now + PAUSE
        watched = await self._look(node)
        for one in orphans:
            end = None if one.orphan is None else watched.end_of(one.orphan, self._patience)
            if one.orphan is None or end is None:
                continue
            if end <= now:
                await self._release(one, watched.why(one.orphan))
            else:
                self._next_look[node] = min(self._next_look[node], end)

    async def _look(self, node: str) -> OrphanObservation:
        sight = await self._nodes.node(node)
        watched = self._watched[node] = OrphanObservation.after(self._watched.get(node), sight, self._clock())
        return watched

    async def _release(self, held: Reservation, why: str) -> None:
        if await self._ledger.release_orphan(held):
            log.info("orphan released", reservation=held.id, node=held.node, why=why)
            text = f"{gpus_of(held)} of pod {held.namespace}/{held.pod_name} can be had again: {why}"
            self._events.record(Subject.of_node(held.node), Reason.ORPHAN_ENDED, text, is_warning=False)


def gpus_of(held: Reservation) -> str:
    return ",".join(dict.fromkeys(held.uuids))
