"""Which node a pod is put on where its GPUs do not say it: the least full of those that will do. No I/O, no await.

Pods that are alike in all that matters share a ranking of the nodes. It is worked out once, and mended at the top only,
as pods are put on nodes: a thousand pods do not look at a thousand nodes each.
"""

import heapq
import random
from collections import Counter
from datetime import datetime, timedelta

from attrs import define, field, frozen

from webhook.core import keys
from webhook.core.claim import Claim, ClaimRecord
from webhook.core.decide import ClaimSearch, EvidencePolicy
from webhook.core.fleet import Fleet
from webhook.core.neighbours import BOUNDLESS, Bounds
from webhook.core.node_fit import NOT_SELECTED, Needs, sentence
from webhook.core.nodes_asked import NodesAsked
from webhook.scheduler.binder_view import World

UNKNOWN = "not known to gpuwarden"
# How long it is taken for granted that no node will do, whatever pods end meanwhile.
REST = timedelta(milliseconds=500)
# … and how long at the most: evidence may begin to count without a word.
OLD = timedelta(seconds=10)
MOST_KEPT = 2_000


@frozen
class Shape:
    """What of a pod decides where it may go."""

    needs: Needs
    asked: NodesAsked
    # The hashes that its node has to have proven one of; none: any will do. None if nothing has to be proven.
    hashes: tuple[str, ...] | None = None
    # What other pods have to do with it at this moment.
    bounds: Bounds = BOUNDLESS


@define(eq=False)
class Ranking:
    """Nodes for pods of one shape, the least full first."""

    reshaped: int
    freed: int
    # Of the pods that such a pod has to join.
    stage: int
    nodes: list[tuple[float, float, str]]
    able: list[str]
    """All those that would do if they had room, and the right pods."""
    objections: Counter[str] = field(factory=Counter)
    refused_at: datetime | None = None
    refusal: str = ""


class Choice:
    """Chooses nodes in a world that changes."""

    def __init__(self, world: World, fleet: Fleet, policy: EvidencePolicy) -> None:
        self._world = world
        self._fleet = fleet
        self._policy = policy
        self._rankings: dict[Shape, Ranking] = {}

    def node_for(self, shape: Shape, now: datetime) -> str | None:
        """The least full node that will do; None if none will, and `refusal` says why."""
        ranking = self._ranking(shape, now)
        nodes, rooms, neighbours = ranking.nodes, self._world.rooms, self._world.neighbours
        while nodes:
            fullness, tie, name = nodes[0]
            room = rooms[name]
            if not room.has_room(shape.needs) or neighbours.objection(shape.bounds, name):
                heapq.heappop(nodes)
                continue
            current = room.fullness()
            if current <= fullness:
                return name
            heapq.heapreplace(nodes, (current, tie, name))
        if ranking.refused_at is None:
            ranking.refused_at, ranking.refusal = now, self._refusal(shape, ranking)
        return None

    def forget(self) -> None:
        """What was worked out so far does not count any more."""
        self._rankings.clear()

    def refusal(self, shape: Shape) -> str:
        """What spoke against the nodes when it was last asked in vain, in numbers."""
        return self._rankings[shape].refusal

    def is_unsure(self, shape: Shape) -> bool:
        """Whether pods have ended since, so that there may be room by now: it is to be asked again after a rest."""
        return self._rankings[shape].freed != self._world.freed

    def _refusal(self, shape: Shape, ranking: Ranking) -> str:
        counts = Counter(ranking.objections)
        for name in ranking.able:
            counts.update(self._world.rooms[name].shortages(shape.needs))
            ruled_out = self._world.neighbours.objection(shape.bounds, name)
            if ruled_out:
                counts[ruled_out] += 1
        return sentence(counts, len(self._world.rooms))

    def _ranking(self, shape: Shape, now: datetime) -> Ranking:
        known, world = self._rankings.get(shape), self._world
        stage = world.neighbours.stage(shape.bounds)
        if known is not None and (known.reshaped, known.stage) == (world.reshaped, stage):
            since = None if known.refused_at is None else now - known.refused_at
            is_resting = since is not None and since < REST
            is_old = since is not None and since > OLD
            if is_resting or (known.freed == world.freed and not is_old):
                return known
        if len(self._rankings) >= MOST_KEPT:
            self._rankings.clear()
        made = self._rankings[shape] = self._ranked(shape)
        return made

    def _ranked(self, shape: Shape) -> Ranking:
        world = self._world
        candidates = self._candidates(shape.asked)
        proof = None if shape.hashes is None else self._question(shape.hashes)
        objections, able = Counter[str](), []
        if len(candidates) < len(world.rooms):
            objections[NOT_SELECTED] = len(world.rooms) - len(candidates)
        for name in candidates:
            objection = world.rooms[name].objection(shape.asked) or (proof and self._unproven(proof, name))
            if objection:
                objections[objection] += 1
            else:
                able.append(name)
        nodes = [(world.rooms[name].fullness(), random.random(), name) for name in able]  # noqa: S311 - to spread only
        heapq.heapify(nodes)
        return Ranking(world.reshaped, world.freed, world.neighbours.stage(shape.bounds), nodes, able, objections)

    def _question(self, hashes: tuple[str, ...]) -> ClaimSearch:
        return ClaimSearch(Claim(ClaimRecord(hashes=hashes)), self._fleet, self._policy)

    def _unproven(self, question: ClaimSearch, node: str) -> str | None:
        """What the node's evidence lacks."""
        indexed = self._fleet.indexed_nodes.get(node)
        found = None if indexed is None else question.evidence_objection(indexed)
        return UNKNOWN if indexed is None else found and found.text_for(question.claim)

    def _candidates(self, asked: NodesAsked) -> list[str]:
        """All nodes, or those few that the pod names."""
        world = self._world
        names = asked.names()
        if names is not None:
            return [name for name in names if name in world.rooms]
        hosts = asked.values_of(keys.HOSTNAME_LABEL) if keys.HOSTNAME_LABEL in asked.keys else None
        if hosts is not None:
            return [name for host in hosts for name in world.hostnames.get(host, ())]
        return list(world.rooms)
