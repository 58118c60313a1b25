"""Reservations whose pods are gone and were not seen to end: kept until the pods' containers must have ended."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from webhook.core.reasons import Reason
from webhook.core.reservation import Orphan, Phase, PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.end_of_use import DeletedPod, NodeSnapshot, OrphanObservation, OrphanTimes
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Between two reads of a Node that has orphans.
CHECK_INTERVAL = timedelta(seconds=10)


class NodeReader(Protocol):
    """Reads Nodes with quorum reads, never from a cache, so its answers are authoritative."""

    async def read_node(self, name: str) -> NodeSnapshot | None:
        """The Node as it is now; None if it is gone. Raises PodReaderUnavailableError."""


class Orphans:
    """Marks and releases orphans. Its methods raise LedgerError and PodReaderUnavailableError."""

    def __init__(
        self, ledger: ClusterLedger, nodes: NodeReader, events: Events, clock: Clock, times: OrphanTimes
    ) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._events = events
        self._clock = clock
        self._times = times
        self._observations: dict[str, OrphanObservation] = {}
        self._next_check: dict[str, datetime] = {}

    async def mark_orphan(self, held: Reservation, pod: PodIdentity, deleted: DeletedPod) -> None:
        """The pod is gone without proof that it has ended. Repeating the call changes nothing."""
        orphan = Orphan(deleted.at, self._times.grace(deleted.grace, held.grace))
        if held.orphan is not None and held.orphan.merged_with(orphan) == held.orphan:
            return
        observation = await self._observe(held.node)
        boot_id = "" if observation.node is None else observation.node.boot_id
        orphan = Orphan(orphan.at, orphan.grace, boot_id)
        taken = await self._ledger.mark_orphaned(held.id, pod, orphan, node=held.node, since=held.since)
        if taken is None or taken.orphan is None:
            return
        log.warning("reservation orphaned", reservation=held.id, node=held.node, grace=taken.orphan.grace)
        until = observation.end_of(taken.orphan, self._times)
        when = "once its kubelet is ready again" if until is None else f"at {until:%Y-%m-%dT%H:%M:%SZ} or later"
        text = f"{gpus_of(held)}: pod {pod.namespace}/{pod.name} is gone and its containers may still run; free {when}"
        text += ", or as soon as `attest` on the node reports that nothing of the pod is left"
        self._events.record(Subject.of_node(held.node), Reason.GPU_ORPHANED, text)

    def by_node(self) -> Mapping[str, Sequence[Reservation]]:
        """The orphans that this process knows. Drops the observations of nodes without orphans."""
        found = defaultdict[str, list[Reservation]](list)
        for one in self._ledger.reservations():
            if one.orphan is not None and one.phase is Phase.FINALIZED:
                found[one.node].append(one)
        for node in self._observations.keys() - found.keys():
            self._observations.pop(node)
            self._next_check.pop(node, None)
        return found

    async def check_node(self, node: str, orphans: Sequence[Reservation]) -> None:
        """Release the orphans that have ended."""
        unused = [one for one in orphans if one.orphan is not None and one.orphan.is_unused]
        for one in unused:
            await self._release(one, "its node reports that nothing uses it")
        orphans = [one for one in orphans if one not in unused]
        now = self._clock()
        if not orphans or self._next_check.get(node, now) > now:
            return
        self._next_check[node] = now + CHECK_INTERVAL
        observation = await self._observe(node)
        for one in orphans:
            end = None if one.orphan is None else observation.end_of(one.orphan, self._times)
            if one.orphan is None or end is None:
                continue
            if end <= now:
                await self._release(one, observation.why(one.orphan))
            else:
                self._next_check[node] = min(self._next_check[node], end)

    async def _observe(self, node: str) -> OrphanObservation:
        found = await self._nodes.read_node(node)
        observation = self._observations[node] = OrphanObservation.after(
            self._observations.get(node), found, self._clock()
        )
        return observation

    async def _release(self, held: Reservation, why: str) -> None:
        if await self._ledger.release_orphan(held):
            log.info("orphan released", reservation=held.id, node=held.node, why=why)
            text = f"{gpus_of(held)} of pod {held.namespace}/{held.pod_name} is free again: {why}"
            self._events.record(Subject.of_node(held.node), Reason.ORPHAN_ENDED, text, is_warning=False)


def gpus_of(held: Reservation) -> str:
    return ",".join(dict.fromkeys(held.uuids))
