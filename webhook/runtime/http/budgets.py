"""The budgets that all requests of a process share: memory for bodies, concurrent reviews, connections.

Small bodies have a budget of their own, so that large bodies never block them. A request without a budget is refused
at once, and the client may retry.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from attrs import define, field, frozen

from webhook.core.errors import GpuwardenError

MIB: Final = 2**20
SMALL_BODY: Final = 2**16  # bytes; reviews of pods without long annotations are less than a quarter of this
STALLED_AFTER: Final = 2.0  # seconds after which an incomplete large body, or its connection, is dropped for others
READ_GRACE: Final = 1.0  # seconds in which a request that was sent at once is read
PROBE_CONNECTIONS: Final = 16  # connections that only the listener for probes may use
PARSE_WAIT: Final = 1.0  # seconds that a complete body waits for memory to be parsed
# The maximum size of a JSON value as a Python object, by its first character, including its reference in the containing
# list or dict. Characters in strings count too, so a string full of brackets is overestimated.
PARSED_SIZES: Final = ((b"[", 112), (b"{", 208), (b'"', 32), (b",", 40))

MAX_MEMORY: Final = 128 * MIB
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class RefusedBodyError(GpuwardenError):
    """The body is refused. `code` is the HTTP status of the answer."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class OverloadedError(RefusedBodyError):
    """The budget is used up. The client may retry."""

    def __init__(self) -> None:
        super().__init__(503, "the server is overloaded, try again")


def parsed_size(body: bytes) -> int:
    """An upper bound for the memory of the parsed body, in bytes."""
    return len(body) + sum(body.count(sign) * cost for sign, cost in PARSED_SIZES)


@frozen
class RequestLimits:
    """The sizes of the budgets."""

    memory: int = MAX_MEMORY  # bytes
    reviews: int = 512
    connections: int = 768

    @property
    def probe_connections(self) -> int:
        """How many connections only probes may use."""
        return min(PROBE_CONNECTIONS, self.connections // 4)

    @classmethod
    def from_settings(
        cls, memory_mib: int, reviews: int, connections: int, cgroup_limit: Path = CGROUP_LIMIT
    ) -> "RequestLimits":
        """The values of the settings. 0 stands for a default that suits this process."""
        default = cls()
        return cls(
            memory_mib * MIB or derived_memory(cgroup_limit),
            reviews or default.reviews,
            connections or min(default.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        )


def derived_memory(cgroup_limit: Path) -> int:
    """A quarter of the container's memory limit, but at least enough for large reviews, and at most a quarter of
    512 MiB."""
    try:
        allowed = int(cgroup_limit.read_text())
    except (OSError, ValueError):  # no limit, or no cgroup
        return MAX_MEMORY
    return max(MAX_MEMORY // 2, min(MAX_MEMORY, allowed // 4))


@define(eq=False)
class ReadBudget:
    """Bytes that bodies may use together while they are read. If the budget is used up, the oldest body is aborted once
    it is older than `min_age` seconds."""

    limit: int
    min_age: float
    used: int = 0
    bodies: dict["BodyUsage", None] = field(factory=dict)  # the oldest first

    def acquire(self, body: "BodyUsage", size: int, now: float) -> None:
        if size > self.limit:
            raise RefusedBodyError(413, f"the body has {size} bytes or more, the limit is {self.limit}")
        while self.used + size > self.limit:
            oldest = next(iter(self.bodies), None)
            if oldest is None or oldest is body or now - oldest.began < self.min_age:
                raise OverloadedError
            oldest.abort()
        self.used += size
        self.bodies[body] = None

    def release(self, body: "BodyUsage", size: int) -> None:
        self.used -= size
        self.bodies.pop(body, None)


@define(eq=False)
class ParseBudget:
    """Bytes that parsed bodies may use together. `acquire` waits until other requests have released enough."""

    limit: int
    used: int = 0
    _waiting: list[asyncio.Future[None]] = field(factory=list)

    async def acquire(self, size: int) -> None:
        while self.used + size > self.limit:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


class PeerConnection(Protocol):
    """The state of a connection that decides whether it is evicted."""

    @property
    def is_idle(self) -> bool:
        """No request has begun, or all requests are answered."""

    @property
    def has_completed_request(self) -> bool:
        """The peer has sent a whole request and received its answer."""

    @property
    def began(self) -> float:
        """When the connection was accepted."""

    @property
    def waiting_since(self) -> float | None:
        """Since when the server waits for the peer: the connection is idle, a request is incomplete, or the peer does
        not read an answer. None: the peer waits for the server."""

    def evict(self) -> None:
        """Close the connection; at once if a request is incomplete."""


def eviction_rank(one: PeerConnection, now: float) -> tuple[int, float] | None:
    """The connection with the lowest rank is closed for a new one. None: the connection is not closed.

    The first group is connections without a complete request yet, and those whose request is incomplete for
    `STALLED_AFTER`. So a peer that stalls does not displace a peer that keeps a connection for later. The second group
    is idle connections, the last those that send a request. Within a group the longest wait comes first, so a peer that
    sends its request at once is not evicted.
    """
    since = one.waiting_since
    if since is None:
        return None
    if not one.has_completed_request or (not one.is_idle and now - since >= STALLED_AFTER):
        return 0, since
    return (1 if one.is_idle else 2), since


class Budgets:
    """The budgets of a process, shared by all listeners."""

    def __init__(self, limits: RequestLimits | None = None) -> None:
        self.limits = limits or RequestLimits()
        memory = self.limits.memory
        # Each size class has a budget for reading and one for parsed bodies.
        self.small, self.parsed_small = ReadBudget(memory // 16, 0), ParseBudget(memory // 8)
        self.large, self.parsed_large = ReadBudget(memory // 4, STALLED_AFTER), ParseBudget(memory * 9 // 16)
        self.large_body_lock = asyncio.Lock()
        self.reviews = 0
        self.connections: dict[PeerConnection, None] = {}

    @contextmanager
    def body(self) -> Iterator["BodyUsage"]:
        """The usage of one body, from its first byte until the parsed body is no longer needed."""
        body = BodyUsage(self, asyncio.get_running_loop().time())
        try:
            yield body
        finally:
            body.end()

    def make_room_for_connection(self, now: float, *, is_probe: bool = False) -> bool:
        """Whether a new connection may be accepted. If the limit is reached, the connection with the lowest
        `eviction_rank` is closed. The last `probe_connections` are for probes only."""
        if len(self.connections) < self.limits.connections - (0 if is_probe else self.limits.probe_connections):
            return True
        ranks = ((rank, one) for one in self.connections if (rank := eviction_rank(one, now)) is not None)
        found = min(ranks, key=lambda pair: pair[0], default=None)
        if found is None:
            return False
        (group, _), first = found
        if group > 0 and any(
            not one.has_completed_request and now - one.began < READ_GRACE for one in self.connections
        ):
            return False  # a new connection is evicted instead, after its request has been read
        first.evict()
        self.connections.pop(first, None)
        return True

    @contextmanager
    def review(self, reserve: int = 0) -> Iterator[bool]:
        """Whether one more review may run. `reserve` extends the limit for reviews that others must not block."""
        if self.reviews >= self.limits.reviews + reserve:
            yield False
            return
        self.reviews += 1
        try:
            yield True
        finally:
            self.reviews -= 1


class BodyUsage:
    """What one body uses of the budgets."""

    def __init__(self, budgets: Budgets, began: float) -> None:
        self._budgets = budgets
        self.began = began
        self._budget = budgets.small
        self._acquired = 0
        self._size = 0
        self._needed = 0
        self._parse_budget: ParseBudget | None = None
        self._reading: asyncio.Timeout | None = None
        self._is_aborted = False

    def expect(self, size: int) -> None:
        """Acquire memory for the declared size. Raises OverloadedError."""
        self._grow(max(size - self._acquired, 0))

    def add(self, size: int) -> None:
        """Account for `size` more received bytes. Raises OverloadedError."""
        self._size += size
        self._grow(max(self._size - self._acquired, 0))

    def _grow(self, size: int) -> None:
        if self._is_aborted:
            raise OverloadedError
        if self._budget is self._budgets.small and self._acquired + size > SMALL_BODY:
            size += self._acquired
            self._release()
            self._budget = self._budgets.large
        if size:
            self._budget.acquire(self, size, asyncio.get_running_loop().time())
            self._acquired += size

    def _release(self) -> None:
        self._budget.release(self, self._acquired)
        self._acquired = 0

    def abort(self) -> None:
        """Stop reading: a new body needs the memory."""
        self._is_aborted = True
        self._release()
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def reading(self) -> asyncio.Timeout:
        """The context in which the body is read. `abort` ends it with TimeoutError."""
        self._reading = asyncio.timeout(None)
        return self._reading

    async def wait_to_parse(self, body: bytes, needed: int) -> None:
        """Wait until the complete body may be parsed, which needs `needed` bytes. Large bodies take turns.
        Raises OverloadedError."""
        self._reading = None
        budgets = self._budgets
        is_small = len(body) <= SMALL_BODY
        budget = budgets.parsed_small if is_small else budgets.parsed_large
        if needed > budget.limit:
            raise RefusedBodyError(413, f"the parsed body needs {needed} bytes of memory, the limit is {budget.limit}")
        try:
            async with asyncio.timeout(PARSE_WAIT):
                await budget.acquire(needed)
                self._parse_budget, self._needed = budget, needed
                if not is_small:
                    async with budgets.large_body_lock:
                        await asyncio.sleep(0)
        except TimeoutError:
            raise OverloadedError from None
        self._release()

    def end(self) -> None:
        """Release everything."""
        self._release()
        if self._parse_budget is not None:
            self._parse_budget.release(self._needed)
            self._parse_budget = None
