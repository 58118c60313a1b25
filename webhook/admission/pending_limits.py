"""How many GPUs may be pending at once on the word of reviews that anybody could have posted, and who comes next. And
how many may be held by pods that are gone, whoever asks.

A hold counts from before it is written until its pod is seen, or it is given up. What does not fit waits in a line of
its namespace; the lines take turns. A part of the pool is kept for namespaces that have no hold. Of holds that no pod
was named for a namespace may have as many as it leaves: one that is full of forged holds leaves room for the rest.

Each replica counts what it knows of, and what it is about to add. Several that let reviews in at the same moment do not
see each other's: whatever comes near a limit is let in a few at a time, with pauses in which a watch tells.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog
from attrs import define, frozen

from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny
from webhook.ledger import Ledger
from webhook.ledger.pending import PendingGpus, too_many_orphans, total
from webhook.runtime.clock import Clock

Token = tuple[str, str]

log = structlog.get_logger(__name__)

# Between two looks at who fits by now, in seconds: longer than a watch takes to tell of other replicas' holds.
PAUSE = 0.02
# How much of the pool is let in at one look.
ROUND_SHARE = 16
# For namespaces that have no hold.
RESERVED_SHARE = 4
# How many times its holds without a pod a namespace has to leave: for reviews that are let in as they come, and for
# those that have waited for their turn. Twice as much where nobody has heard of the namespace.
FACTOR_AT_ONCE, FACTOR_QUEUED = 2, 1
# Between two looks at what has expired, or has a pod by now that nobody has told of.
HOUSEKEEPING = 0.25


@frozen
class PendingLimits:
    """0 is no limit."""

    gpus_per_namespace: int = 0
    percent_of_fleet: int = 0
    # Of pods that are not there and may still run: whoever asks.
    orphans_per_namespace: int = 0
    # Each keeps its review in memory, and one of the places for reviews that are judged at once.
    most_waiting: int = 256


@define(eq=False)
class WaitingReview:
    """A review that waits for room. `token` says what it has got."""

    namespace: str
    gpus: int
    granted: asyncio.Future[None]
    token: Token | None = None


class PendingLimiter:
    """Lets reviews in, at once or in their turn."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        clock: Clock,
        limits: PendingLimits,
        is_known: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_known`: whether there is such a namespace, as far as was heard. All others are one, or whoever invents
        them would have a limit for each."""
        self._ledger = ledger
        self._fleet = fleet
        self._clock = clock
        self._limits = limits
        self._is_known = is_known
        self._entering = PendingGpus()
        self._tokens = itertools.count()
        self._queues: dict[str, deque[WaitingReview]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def reserve_room(self, namespace: str, gpus: int, patience: timedelta) -> AsyncIterator[Deny | None]:
        """Room for a hold as long as the block lasts; after it the ledger knows of the hold. Or why there is none."""
        refused = self.too_many_orphans(namespace, gpus)
        if refused is not None:  # waiting here does not end them
            yield refused
            return
        refused = self.denial(namespace, gpus, share=FACTOR_AT_ONCE)
        if refused is None and not self._queues:
            token: Token | None = self._enter(namespace, gpus)
        else:
            token = await self._wait(namespace, gpus, patience)
            refused = self.denial(namespace, gpus) or refused or pool_full(self._pool)
        try:
            yield None if token is not None else refused
        finally:
            if token is not None:
                self._entering.drop(token)

    def denial(self, namespace: str, gpus: int, *, share: int = FACTOR_QUEUED) -> Deny | None:
        """A claim of any size fits where it is alone."""
        limit, pool = self._limits.gpus_per_namespace, self._pool
        if not limit and not pool:
            return None
        used = sum(map(total, self._own_sizes(namespace, self._ledger.pending)))
        if limit and used and used + gpus > limit:
            return namespace_full(namespace, limit)
        return pool_full(pool) if pool and not self._fits(namespace, gpus, pool, share) else None

    def too_many_orphans(self, namespace: str, gpus: int) -> Deny | None:
        return too_many_orphans(self._ledger.orphaned, namespace, gpus, self._limits.orphans_per_namespace)

    @property
    def _pool(self) -> int:
        percent = self._limits.percent_of_fleet
        return max(1, self._fleet.device_count * percent // 100) if percent else 0

    def _fits(self, namespace: str, gpus: int, pool: int, share: int) -> bool:
        """Of claims for more than half of the pool there is one at a time, beside the pool."""
        everyone = (self._ledger.pending.sizes, self._entering.sizes)
        if 2 * gpus > pool:
            return not any(2 * size > pool for sizes in everyone for size in sizes)
        left = pool - small(everyone, pool) - gpus
        if not small(self._own_sizes(namespace, self._ledger.pending), pool):
            return left >= 0
        unnamed = small(self._own_sizes(namespace, self._ledger.unnamed), pool)
        return share * (1 if self._is_known(namespace) else 2) * (unnamed + gpus) <= left - pool // RESERVED_SHARE

    def _own_sizes(self, namespace: str, held: PendingGpus) -> Iterator[Mapping[int, int]]:
        for counted in (held, self._entering):
            if self._is_known(namespace):
                yield counted.sizes_in(namespace)
            else:
                yield from (counted.sizes_in(one) for one in counted.namespaces if not self._is_known(one))

    def _enter(self, namespace: str, gpus: int) -> Token:
        token = namespace, str(next(self._tokens))
        self._entering.put(token, namespace, gpus)
        return token

    # Who waits.

    async def _wait(self, namespace: str, gpus: int, patience: timedelta) -> Token | None:
        if patience <= timedelta(0):
            return self._enter(namespace, gpus) if self.denial(namespace, gpus) is None else None
        name = namespace if self._is_known(namespace) else ""
        if not self._make_room(len(self._queues.get(name, ()))):
            return None
        waiter = WaitingReview(namespace, gpus, asyncio.get_running_loop().create_future())
        self._queues.setdefault(name, deque()).append(waiter)
        self._start_tasks()
        token: Token | None = None
        try:
            async with asyncio.timeout(patience.total_seconds()):
                await waiter.granted
            token = waiter.token
        except TimeoutError:
            pass
        finally:
            self._remove(name, waiter)
            if token is None and waiter.token is not None:  # granted as the time ran out
                self._entering.drop(waiter.token)
        return token

    def _make_room(self, before: int) -> bool:
        """Where too many wait, the last of the longest line goes: a flood in one namespace keeps no other from
        waiting."""
        if sum(map(len, self._queues.values())) < self._limits.most_waiting:
            return True
        longest = max(self._queues.values(), key=len)
        if len(longest) <= before + 1:
            return False
        last = longest.pop()
        if not last.granted.done():  # its time may have run out in this moment
            last.granted.set_result(None)
        return True

    def _remove(self, name: str, waiter: WaitingReview) -> None:
        queue = self._queues.get(name, deque())
        if waiter in queue:
            queue.remove(waiter)
        if not queue:
            self._queues.pop(name, None)

    def _start_tasks(self) -> None:
        """Each of the two ends by itself, at another moment than the other."""
        for work in (self._serve, self._collect_expired):
            task = self._tasks.get(work.__name__)
            if task is None or task.done():
                self._tasks[work.__name__] = asyncio.create_task(work())

    async def _serve(self) -> None:
        while self._queues:
            for _ in range(max(1, self._pool // ROUND_SHARE)):
                self._grant()
            await asyncio.sleep(PAUSE * (0.5 + random.random()))  # noqa: S311 - only to keep out of step

    def _grant(self) -> None:
        """One of each line that fits; who was served goes behind the others."""
        for name, queue in list(self._queues.items()):
            if queue and self.denial(queue[0].namespace, queue[0].gpus) is None:
                self._admit(queue.popleft())
                del self._queues[name]
                if queue:
                    self._queues[name] = queue

    def _admit(self, waiter: WaitingReview) -> None:
        if not waiter.granted.done():  # else its review was ended a moment ago
            waiter.token = self._enter(waiter.namespace, waiter.gpus)
            waiter.granted.set_result(None)

    async def _collect_expired(self) -> None:
        """While everybody waits nobody else sees to it."""
        while self._queues:
            try:
                await self._ledger.collect(self._clock())
                await self._ledger.confirm_early(self._clock())
            except Exception:  # those who wait are served all the same
                log.exception("pending reservations were not looked at")
            await asyncio.sleep(HOUSEKEEPING)


def small(counted: Iterable[Mapping[int, int]], pool: int) -> int:
    """GPUs of the holds that share the pool."""
    return sum(size * number for sizes in counted for size, number in sizes.items() if 2 * size <= pool)


HINT = (
    "try again in some seconds; where callers of /mutate prove who they are there is no limit (docs/how-to/access.md)"
)


def namespace_full(namespace: str, limit: int) -> Deny:
    return Deny(
        Reason.NAMESPACE_FULL,
        f"namespace {namespace!r} has as many GPUs reserved for pods that do not exist yet as it may: {limit}",
        hint=HINT,
    )


def pool_full(pool: int) -> Deny:
    return Deny(
        Reason.PENDING_FULL,
        f"too many GPUs are reserved for pods that do not exist yet: reviews of unknown callers may have {pool}, "
        "and each namespace a part of that",
        hint=HINT,
    )
