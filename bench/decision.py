"""How long a decision takes, and how little it depends on the size of the fleet.

Fleets of all sizes run in turns in one process, so that other load affects all equally. Times are CPU times of the
deciding thread, which never waits. The garbage collector is configured as in the server.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from attrs import define, field, frozen

from bench.figures import Target, percentile, typical
from bench.pods import RARE, WAYS, Asker, Way, create_review, stream
from bench.requests import post
from bench.servers import write_inventory
from webhook.admission.reserving import Reserver
from webhook.admission.reviewer import Reviewer
from webhook.assembly.parts import embedded
from webhook.core.claim import Claim, ClaimRules, claim_of
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity, ReservationId
from webhook.runtime import settings
from webhook.runtime.clock import utc_now
from webhook.runtime.http.budgets import Budgets
from webhook.runtime.telemetry import configure_logging
from webhook.web.admission import Admission
from webhook.web.health import Health, Stage

Raw = dict[str, Any]
T = TypeVar("T")

SIZES = (100, 1_000, 10_000, 100_000)
# The fleet is filled to the first share and emptied to the second, at random, so that it has gaps of every size.
FILLED, KEPT = 0.6, 0.4
# Consecutive pods of one fleet: enough for warm caches, few enough that disturbances affect all fleets equally.
TURN = 50
CLAIMS = ClaimRules()


@frozen
class Plan:
    """The size of the measurement."""

    sizes: Sequence[int] = SIZES
    rounds: int = 7
    pods: int = 2_000
    rare: int = 40


SHORT = Plan(rounds=3, pods=600, rare=10)


@frozen
class Timed:
    """One pod's times, in seconds; no decision for a pod without a claim."""

    kind: str
    decided: float | None
    whole: float


@define
class Site:
    """One fleet with its ledger and its pods."""

    gpus: int
    reserver: Reserver
    admission: Admission
    asker: Asker
    rng: random.Random
    budgets: Budgets = field(factory=Budgets)
    held: list[tuple[ReservationId, PodIdentity]] = field(factory=list)
    numbers: "itertools.count[int]" = field(factory=itertools.count)
    last_id: ReservationId | None = None

    @classmethod
    async def build(cls, gpus: int, directory: Path) -> "Site":
        """The parts as the server builds them, with reservations that outlast the measurement."""
        path = write_inventory(directory, gpus)
        parts = embedded(settings.load({"inventory": str(path), "pending_deadline": "24h"}, environ={}), utc_now)
        await parts.fleet_source.load()
        health = Health()
        health.stage = Stage.SERVING
        admission = Admission(Reviewer.of(parts), utc_now, health)
        rng = random.Random(gpus)  # noqa: S311 - the same pods each time, not a secret
        return cls(gpus, parts.reserver, admission, Asker(list(parts.fleet.indexed_nodes), rng), rng)

    @property
    def fleet(self) -> Fleet:
        return self.reserver.fleet

    async def fill(self) -> None:
        """Reserves and releases until the fleet looks used."""
        while len(self.fleet.held_devices) < FILLED * self.gpus:
            if not await self.reviewed(self.body(self.asker.plain())):
                break
        assert self.held, "no review reserved a GPU"
        while len(self.fleet.held_devices) > KEPT * self.gpus:
            await self.release_one()

    async def release_one(self) -> None:
        last = len(self.held) - 1
        chosen = self.rng.randrange(len(self.held))
        self.held[chosen], self.held[last] = self.held[last], self.held[chosen]
        await self.reserver.ledger.release(*self.held.pop())

    def body(self, raw: Raw) -> bytes:
        self.last_id = ReservationId(f"00000000-0000-4000-8000-{next(self.numbers):012d}")
        return msgspec.json.encode(create_review(raw, self.last_id))

    async def reviewed(self, body: bytes) -> bool:
        """Processes a review from its body to its answer, without the network. Returns whether it reserved."""
        await self.answer(body)
        return await self.note_last()

    async def answer(self, body: bytes) -> None:
        await post(self.admission.mutate, self.budgets, body)

    async def note_last(self) -> bool:
        """Whether the last review made a reservation; records it for release."""
        made = await self.reserver.ledger.find(self.last_id) if self.last_id else None
        if made is not None:
            self.held.append((made.id, PodIdentity(made.namespace, made.pod_name or "", "")))
        return made is not None

    async def timed(self, kind: str, raw: Raw) -> Timed:
        body = self.body(raw)
        claim = claim_of(Pod.parse(raw), CLAIMS)
        decided = None if claim is None else best_of(2, lambda: self.decided(claim))
        started = time.thread_time()
        await self.answer(body)
        whole = time.thread_time() - started
        await self.note_last()
        while len(self.fleet.held_devices) > KEPT * self.gpus and self.held:
            await self.release_one()
        return Timed(kind, decided, whole)

    async def first_use(self, way: Way) -> float:
        """In milliseconds."""
        body = self.body(self.asker.make(way))
        started = time.thread_time()
        await self.reviewed(body)
        return round(1e3 * (time.thread_time() - started), 2)

    def decided(self, claim: Claim) -> object:
        return self.reserver.placements(claim, most=1)


def best_of(times: int, step: Callable[[], object]) -> float:
    taken = []
    for _ in range(times):
        started = time.thread_time()
        step()
        taken.append(time.thread_time() - started)
    return min(taken)


async def first_uses(site: Site) -> dict[str, float]:
    """The cost of the first pod of each kind: a new label is added to the index."""
    return {way.__name__: await site.first_use(way) for way in (*WAYS, *RARE)}


async def measured(plan: Plan) -> Raw:
    with tempfile.TemporaryDirectory() as directory:
        sites = [await Site.build(gpus, Path(directory)) for gpus in plan.sizes]
    for site in sites:
        await site.fill()
    first = {str(site.gpus): await first_uses(site) for site in sites}
    rounds = [await one_round(sites, plan.pods) for _ in range(plan.rounds)]
    rare = [await rare_round(sites, plan.rare) for _ in range(plan.rounds)]
    return {
        "sizes": [figures(str(site.gpus), site, [one[site.gpus] for one in rounds]) for site in sites],
        "ratio_decide_p99": ratio(rounds, plan.sizes, decisions),
        "ratio_whole_p99": ratio(rounds, plan.sizes, wholes),
        "rare_decide_p50_us": {
            str(site.gpus): typical([1e6 * percentile(decisions(one[site.gpus]), 0.5) for one in rare])
            for site in sites
        },
        "first_use_ms": first,
    }


async def one_round(sites: Sequence[Site], pods: int) -> dict[int, list[Timed]]:
    streams = {site.gpus: stream(site.asker, pods) for site in sites}
    found: dict[int, list[Timed]] = defaultdict(list)
    for begin in range(0, pods, TURN):
        for site in sites:
            for kind, raw in streams[site.gpus][begin : begin + TURN]:
                found[site.gpus].append(await site.timed(kind, raw))
    return found


async def rare_round(sites: Sequence[Site], pods: int) -> dict[int, list[Timed]]:
    return {
        site.gpus: [await site.timed(way.__name__, site.asker.make(way)) for way in RARE for _ in range(pods)]
        for site in sites
    }


Of = Callable[[Sequence[Timed]], list[float]]


def decisions(timed: Sequence[Timed]) -> list[float]:
    return [one.decided for one in timed if one.decided is not None]


def wholes(timed: Sequence[Timed]) -> list[float]:
    return [one.whole for one in timed]


def ratio(rounds: Sequence[dict[int, list[Timed]]], sizes: Sequence[int], of: Of) -> float:
    """The largest fleet's p99 over the smallest's, round by round."""
    small, large = min(sizes), max(sizes)
    return typical([percentile(of(one[large]), 0.99) / percentile(of(one[small]), 0.99) for one in rounds])


def figures(gpus: str, site: Site, rounds: Sequence[Sequence[Timed]]) -> Raw:
    kinds = sorted({one.kind for timed in rounds for one in timed if one.decided is not None})
    return {
        "gpus": int(gpus),
        "held_gpus": len(site.fleet.held_devices),
        "decide_us": spread(rounds, decisions),
        "whole_us": spread(rounds, wholes),
        "decide_p50_us_by_kind": {kind: by_kind(rounds, kind) for kind in kinds},
    }


def spread(rounds: Sequence[Sequence[Timed]], of: Of) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(typical([1e6 * percentile(of(timed), share) for timed in rounds]), 1)
        for name, share in shares.items()
    }


def by_kind(rounds: Sequence[Sequence[Timed]], kind: str) -> float:
    return round(1e6 * percentile(decisions([one for timed in rounds for one in timed if one.kind == kind]), 0.5), 1)


def run(plan: Plan) -> Raw:
    configure_logging("error")  # logging is measured by the throughput benchmark
    return asyncio.run(measured(plan))


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    largest = found["sizes"][-1]
    return [
        Target("decision, p99 at 100,000 GPUs over p99 at 100", found["ratio_decide_p99"], 2 * slack, "x"),
        Target("decision, p99 at 100,000 GPUs", largest["decide_us"]["p99"] / 1e3, 1 * slack, " ms"),
        # Not flat, and admitted: `docs/decisions/0001-group-equal-nodes.md`.
        Target(
            "decision that asks nodes one by one, p50 at 100,000 GPUs", one_by_one(found, largest), 100 * slack, " ms"
        ),
        Target(
            "first review that asks of a label, slowest at 100,000 GPUs", first_use(found, largest), 200 * slack, " ms"
        ),
    ]


def one_by_one(found: Raw, size: Raw) -> float:
    """In milliseconds."""
    return float(found["rare_decide_p50_us"][str(size["gpus"])]) / 1e3


def first_use(found: Raw, size: Raw) -> float:
    """In milliseconds."""
    return float(max(found["first_use_ms"][str(size["gpus"])].values()))


def lines(found: Raw) -> list[str]:
    head = [
        "| GPUs | decide p50 | p99 | nodes one by one p50 | review to answer p50 | p99 | max | first of a label, max |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [
        f"| {one['gpus']:,} | {one['decide_us']['p50']:.0f} µs | {one['decide_us']['p99']:.0f} µs "
        f"| {one_by_one(found, one):.3g} ms "
        f"| {one['whole_us']['p50']:.0f} µs | {one['whole_us']['p99']:.0f} µs | {one['whole_us']['max']:.0f} µs "
        f"| {first_use(found, one):.3g} ms |"
        for one in found["sizes"]
    ]
    return head + rows
