"""What becomes of a pod's claims of volumes once a node has been chosen for it: they keep it from the node, have their
volumes made there, or let it go.
"""

from collections.abc import Sequence
from datetime import timedelta

from webhook.core.nodes_asked import NAME_FIELD, Expression, NodeTerm
from webhook.runtime.clock import Clock
from webhook.scheduler.binder_view import Promise, Waiter, World
from webhook.scheduler.binder_volumes import (
    Unmade,
    UnusableVolumeError,
    Volume,
    Volumes,
    VolumesUnavailableError,
)
from webhook.scheduler.binder_wish import Outcome, Reserved

# Whoever makes a volume takes seconds; what takes longer than this is told.
USUAL = timedelta(seconds=30)
# kube-scheduler's patience, bindTimeoutSeconds: then the room on the node is for others too.
PATIENCE = timedelta(minutes=10)
EVENTS = "the claim's own events say more"


class Promises:
    """Reads claims anew at every try."""

    def __init__(self, world: World, volumes: Volumes, clock: Clock) -> None:
        self._world = world
        self._volumes = volumes
        self._clock = clock

    async def settle(self, waiter: Waiter, node: str) -> tuple[Outcome, str] | None:
        """What speaks against the pod on that node now, where it would never start and hold its GPUs; None once all its
        volumes are there. Nothing is said where another node is looked for."""
        if not waiter.wanted:
            return None
        try:
            found = [await self._volumes.of(waiter.identity, wanted) for wanted in waiter.wanted]
            against = self._against(waiter, node, found)
            if against is not None:
                return Outcome.NO_NODE, against
            unmade = [one for one in found if isinstance(one, Unmade)]
            return await self._made(waiter, node, unmade) if unmade else None
        except UnusableVolumeError as exc:
            return Outcome.NO_NODE, f"the pod's {exc}"
        except VolumesUnavailableError as exc:
            return Outcome.LOST, f"the pod's volumes cannot be looked up at this moment: {exc}"

    def _against(self, waiter: Waiter, node: str, found: Sequence[Volume | Unmade]) -> str | None:
        room = self._world.rooms.get(node)
        if room is None:
            return ""
        for volume in found:
            if volume.is_on(room.node):
                continue
            if isinstance(waiter.wish, Reserved):
                return f"the pod's GPUs are on node {node}, {volume.elsewhere}"
            keep(self._world, waiter, volume.terms or (), f"that can have {volume.said}")
            return ""
        return None

    async def _made(self, waiter: Waiter, node: str, unmade: Sequence[Unmade]) -> tuple[Outcome, str]:
        """Has volumes made for that node, once: where none can be, the node is taken off the claim again."""
        promise = waiter.promise
        for one in unmade:
            if promise is not None and one.claim in promise.claims and not one.node:
                return Outcome.NO_NODE, self._turned_down(waiter, node, one)
        for one in unmade:
            if not one.node:
                await self._volumes.select(waiter.identity, one, node)
        now = self._clock()
        since = now if promise is None else promise.since
        waiter.promise = Promise(node, frozenset(one.claim for one in unmade), since)
        said = f"the volume of the pod's claim {unmade[0].claim} is still being made for node {node}: {EVENTS}"
        if now >= since + PATIENCE:
            return Outcome.NO_NODE, said
        return Outcome.PROVISIONING, said if now >= since + USUAL else ""

    def _turned_down(self, waiter: Waiter, node: str, unmade: Unmade) -> str:
        if isinstance(waiter.wish, Reserved):
            return f"the pod's GPUs are on node {node}, where {unmade.said} cannot be made: {EVENTS}"
        another = NodeTerm((), (Expression(NAME_FIELD, "NotIn", frozenset({node})),))
        keep(self._world, waiter, (another,), f"where {unmade.said} was not refused yet")
        return ""


def keep(world: World, waiter: Waiter, terms: tuple[NodeTerm, ...], why: str) -> None:
    """Only such nodes are looked at from now on."""
    for one in {waiter, world.waiters.get(waiter.identity.uid, waiter)}:
        one.asked, one.wish = one.asked.within(terms), None
        one.kept_by = f"; looked at are those {why}"
