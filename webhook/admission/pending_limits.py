"""Limits the GPUs that may be pending at once for reviews of unauthenticated callers, and decides which review is next.
Also limits the GPUs of pods that are gone but may still run, for all callers.

A reservation counts from before it is written until its pod is seen or it is given up. A review that does not fit waits
in a queue of its namespace, and the queues take turns. A share of the pool is kept for namespaces without a pending
reservation. Of reservations that name no pod, a namespace may have at most as many GPUs as it leaves free: a namespace
full of forged reservations leaves room for the others.

Each replica counts the reservations that it knows of and those that it is about to make. Replicas do not see each
other's latest ones. So near a limit reviews are admitted a few at a time, with pauses in which the watches catch up.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta

import structlog
from attrs import define, field, frozen

from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny
from webhook.ledger import Ledger
from webhook.ledger.pending import PendingGpus, too_many_orphans, total
from webhook.runtime.clock import Clock

Token = tuple[str, str]

log = structlog.get_logger(__name__)

# Seconds between two rounds of admissions: longer than a watch takes to show the reservations of other replicas.
PAUSE = 0.02
# A round admits up to pool / ROUND_SHARE reviews per queue.
ROUND_SHARE = 16
# pool / RESERVED_SHARE GPUs are kept for namespaces without a pending reservation.
RESERVED_SHARE = 4
# A namespace must leave this many times the GPUs of its reservations without a pod name: on arrival, and after waiting
# in the queue. Twice as many if the namespace is not known.
FACTOR_AT_ONCE, FACTOR_QUEUED = 2, 1
# Seconds between two checks for reservations that have expired, or whose pod exists by now.
HOUSEKEEPING = 0.25


@frozen
class PendingLimits:
    """Limits; 0 means no limit."""

    gpus_per_namespace: int = 0
    percent_of_fleet: int = 0
    # GPUs of pods that are gone but may still run. Applies to all callers.
    orphans_per_namespace: int = 0
    # Each waiting review takes memory and one of the places for concurrent reviews.
    most_waiting: int = 256


@define(eq=False)
class WaitingReview:
    """A review that waits for room. `token` is set when it is admitted."""

    namespace: str
    gpus: int
    granted: asyncio.Future[None]
    token: Token | None = None


@define(eq=False, repr=False)
class PendingLimiter:
    """Admits reviews, at once or in turn."""

    _ledger: Ledger
    _fleet: Fleet
    _clock: Clock
    _limits: PendingLimits
    # Whether the namespace is known to exist. All unknown namespaces share one limit; otherwise a caller could invent
    # namespaces to get more.
    _is_known: Callable[[str], bool] = lambda _: True
    _admitted: PendingGpus = field(factory=PendingGpus, init=False)
    _tokens: "itertools.count[int]" = field(factory=itertools.count, init=False)
    _queues: dict[str, deque[WaitingReview]] = field(factory=dict, init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(factory=dict, init=False)

    @asynccontextmanager
    async def reserve_room(self, namespace: str, gpus: int, patience: timedelta) -> AsyncIterator[Deny | None]:
        """Takes room for a reservation while the block runs; afterwards the ledger counts the reservation. Yields the
        denial if there is no room."""
        refused = self.too_many_orphans(namespace, gpus)
        if refused is not None:  # waiting for room does not end the orphans
            yield refused
            return
        refused = self.denial(namespace, gpus, share=FACTOR_AT_ONCE)
        if refused is None and not self._queues:
            token: Token | None = self._add(namespace, gpus)
        else:
            token = await self._wait(namespace, gpus, patience)
            refused = self.denial(namespace, gpus) or refused or pool_full(self._pool)
        try:
            yield None if token is not None else refused
        finally:
            if token is not None:
                self._admitted.drop(token)

    def denial(self, namespace: str, gpus: int, *, share: int = FACTOR_QUEUED) -> Deny | None:
        """Why the claim does not fit; None if it does. A claim of any size fits if it is alone."""
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
        """Claims for more than half of the pool are served one at a time, beside the pool."""
        everyone = (self._ledger.pending.sizes, self._admitted.sizes)
        if 2 * gpus > pool:
            return not any(2 * size > pool for sizes in everyone for size in sizes)
        left = pool - pooled_gpus(everyone, pool) - gpus
        if not pooled_gpus(self._own_sizes(namespace, self._ledger.pending), pool):
            return left >= 0
        unnamed = pooled_gpus(self._own_sizes(namespace, self._ledger.unnamed), pool)
        return share * (1 if self._is_known(namespace) else 2) * (unnamed + gpus) <= left - pool // RESERVED_SHARE

    def _own_sizes(self, namespace: str, held: PendingGpus) -> Iterator[Mapping[int, int]]:
        for counted in (held, self._admitted):
            if self._is_known(namespace):
                yield counted.sizes_in(namespace)
            else:
                yield from (counted.sizes_in(one) for one in counted.namespaces if not self._is_known(one))

    def _add(self, namespace: str, gpus: int) -> Token:
        token = namespace, str(next(self._tokens))
        self._admitted.put(token, namespace, gpus)
        return token

    # Queues.

    async def _wait(self, namespace: str, gpus: int, patience: timedelta) -> Token | None:
        if patience <= timedelta(0):
            return self._add(namespace, gpus) if self.denial(namespace, gpus) is None else None
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
            if token is None and waiter.token is not None:  # admitted when its time ran out
                self._admitted.drop(waiter.token)
        return token

    def _make_room(self, before: int) -> bool:
        """If too many reviews wait, drops the last one of the longest queue: a flood in one namespace leaves room to
        the others."""
        if sum(map(len, self._queues.values())) < self._limits.most_waiting:
            return True
        longest = max(self._queues.values(), key=len)
        if len(longest) <= before + 1:
            return False
        last = longest.pop()
        if not last.granted.done():  # its time may have run out just now
            last.granted.set_result(None)
        return True

    def _remove(self, name: str, waiter: WaitingReview) -> None:
        queue = self._queues.get(name, deque())
        if waiter in queue:
            queue.remove(waiter)
        if not queue:
            self._queues.pop(name, None)

    def _start_tasks(self) -> None:
        """Each of the two tasks ends by itself, at its own time."""
        for work in (self._serve, self._collect_expired):
            task = self._tasks.get(work.__name__)
            if task is None or task.done():
                self._tasks[work.__name__] = asyncio.create_task(work())

    async def _serve(self) -> None:
        while self._queues:
            for _ in range(max(1, self._pool // ROUND_SHARE)):
                self._grant()
            await asyncio.sleep(PAUSE * (0.5 + random.random()))  # noqa: S311 - only to keep replicas out of step

    def _grant(self) -> None:
        """Admits the first review of each queue that fits. A served queue goes to the end."""
        for name, queue in list(self._queues.items()):
            if queue and self.denial(queue[0].namespace, queue[0].gpus) is None:
                self._admit(queue.popleft())
                del self._queues[name]
                if queue:
                    self._queues[name] = queue

    def _admit(self, waiter: WaitingReview) -> None:
        if not waiter.granted.done():  # otherwise its review has just ended
            waiter.token = self._add(waiter.namespace, waiter.gpus)
            waiter.granted.set_result(None)

    async def _collect_expired(self) -> None:
        """Updates the ledger, which otherwise only reviews that are being served do."""
        while self._queues:
            try:
                await self._ledger.collect(self._clock())
                await self._ledger.confirm_early(self._clock())
            except Exception:  # the waiting reviews must be served all the same
                log.exception("pending reservations not checked")
            await asyncio.sleep(HOUSEKEEPING)


def pooled_gpus(counted: Iterable[Mapping[int, int]], pool: int) -> int:
    """GPUs of the claims for at most half of the pool."""
    return sum(size * number for sizes in counted for size, number in sizes.items() if 2 * size <= pool)


HINT = (
    "try again in a few seconds; there is no limit where callers of /mutate are authenticated (docs/how-to/access.md)"
)


def namespace_full(namespace: str, limit: int) -> Deny:
    return Deny(
        Reason.NAMESPACE_FULL,
        f"namespace {namespace!r} has reached its limit of GPUs reserved for pods that do not exist yet: {limit}",
        hint=HINT,
    )


def pool_full(pool: int) -> Deny:
    return Deny(
        Reason.PENDING_FULL,
        f"too many GPUs are reserved for pods that do not exist yet: the limit for unauthenticated callers is {pool}, "
        "and each namespace may have a part of it",
        hint=HINT,
    )
