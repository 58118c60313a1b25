"""What all requests of a process may take together: memory for bodies, reviews at once, connections.

A small body has a share of its own, so that large ones never keep it out. Whoever is refused is told so at once and
may come again.
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
SMALL: Final = 2**16  # bytes; reviews of pods without long annotations have less than a quarter of it
STALLED_AFTER: Final = 2.0  # seconds after which a large body, or a connection that owes one, makes room for others
NEW: Final = 1.0  # seconds in which a request that was sent at once is read
RESERVE: Final = 16  # places for connections to the listener that probes ask
PATIENCE: Final = 1.0  # seconds that a body which has been read waits for its turn
# What a JSON value takes as a Python object, at most, by the character that it begins with; and each one's place in the
# list or dict that it is in. Characters within texts count too: a text full of brackets is overestimated.
WEIGHTS: Final = ((b"[", 112), (b"{", 208), (b'"', 32), (b",", 40))

LARGEST_MEMORY: Final = 128 * MIB
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class RefusedBodyError(GpuwardenError):
    """The body cannot be taken; `code` is the HTTP status that says so."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class OverloadedError(RefusedBodyError):
    """There is no room for it now."""

    def __init__(self) -> None:
        super().__init__(503, "too much is asked of this server at this moment")


def weight(body: bytes) -> int:
    """How many bytes the body takes once it is parsed, at most."""
    return len(body) + sum(body.count(sign) * cost for sign, cost in WEIGHTS)


@frozen
class RequestLimits:
    """How much there may be of each."""

    memory: int = LARGEST_MEMORY  # bytes
    reviews: int = 512
    connections: int = 768

    @property
    def reserve(self) -> int:
        """How many of the connections are for probes alone."""
        return min(RESERVE, self.connections // 4)

    @classmethod
    def chosen(
        cls, memory_mib: int, reviews: int, connections: int, cgroup_limit: Path = CGROUP_LIMIT
    ) -> "RequestLimits":
        """What was set; 0 stands for what suits this process."""
        default = cls()
        return cls(
            memory_mib * MIB or derived_memory(cgroup_limit),
            reviews or default.reviews,
            connections or min(default.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        )


def derived_memory(cgroup_limit: Path) -> int:
    """A quarter of what the container may have, but room for large reviews, and at most what 512 MiB allow."""
    try:
        allowed = int(cgroup_limit.read_text())
    except (OSError, ValueError):  # no limit, or no cgroup
        return LARGEST_MEMORY
    return max(LARGEST_MEMORY // 2, min(LARGEST_MEMORY, allowed // 4))


@define(eq=False)
class Share:
    """Bytes that bodies may have together while they are read; the oldest makes room once it has had its time."""

    limit: int
    patience: float
    used: int = 0
    under_way: dict["Body", None] = field(factory=dict)  # in the order of their beginning

    def take(self, body: "Body", size: int, now: float) -> None:
        if size > self.limit:
            raise RefusedBodyError(413, f"there is never room for a body of {size} bytes here: at most {self.limit}")
        while self.used + size > self.limit:
            oldest = next(iter(self.under_way), None)
            if oldest is None or oldest is body or now - oldest.began < self.patience:
                raise OverloadedError
            oldest.give_way()
        self.used += size
        self.under_way[body] = None

    def give_back(self, body: "Body", size: int) -> None:
        self.used -= size
        self.under_way.pop(body, None)


@define(eq=False)
class MemoryBudget:
    """Bytes that parsed bodies may take together; who finds no room waits for the next one to end."""

    limit: int
    used: int = 0
    _waiting: list[asyncio.Future[None]] = field(factory=list)

    async def take(self, size: int) -> None:
        while self.used + size > self.limit:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        self.used += size

    def give_back(self, size: int) -> None:
        self.used -= size
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


class Connected(Protocol):
    """A connection, as far as it matters here."""

    @property
    def is_idle(self) -> bool:
        """No request of it has begun, or all are answered."""

    @property
    def is_proven(self) -> bool:
        """A whole request has come over it, and the peer has taken the answer."""

    @property
    def began(self) -> float:
        """When it was accepted."""

    @property
    def waits_since(self) -> float | None:
        """Since when it is idle, owes the rest of a request that has begun, or does not take an answer. None: it waits
        for us."""

    def dismiss(self) -> None:
        """Close it, at once if it owes the rest of a request."""


def turn_to_go(one: Connected, now: float) -> tuple[int, float] | None:
    """The connection with the least is closed for a new one; None: it is not closed.

    First go connections that have sent no whole request yet and those that owe the rest of one for long, so that who
    stalls does not drive out who keeps a connection for later; then idle ones; at last those that are sending. A peer
    that sends its request at once is never the one that has waited for longest.
    """
    since = one.waits_since
    if since is None:
        return None
    if not one.is_proven or (not one.is_idle and now - since >= STALLED_AFTER):
        return 0, since
    return (1 if one.is_idle else 2), since


class Budgets:
    """The budgets of a process. All listeners share them."""

    def __init__(self, limits: RequestLimits | None = None) -> None:
        self.limits = limits or RequestLimits()
        memory = self.limits.memory
        # While they are read, and once they are parsed.
        self.small, self.parsed_small = Share(memory // 16, 0), MemoryBudget(memory // 8)
        self.large, self.parsed_large = Share(memory // 4, STALLED_AFTER), MemoryBudget(memory * 9 // 16)
        self.turn = asyncio.Lock()
        self.reviews = 0
        self.connections: dict[Connected, None] = {}

    @contextmanager
    def body(self) -> Iterator["Body"]:
        """One body, from its first byte until what was made of it is not needed any more."""
        body = Body(self, asyncio.get_running_loop().time())
        try:
            yield body
        finally:
            body.end()

    def has_room_for_connection(self, now: float, *, is_probe: bool = False) -> bool:
        """Where all places are taken a connection that waits for its peer is closed for a new one (`turn_to_go`). False
        if none does. The last places are for probes."""
        if len(self.connections) < self.limits.connections - (0 if is_probe else self.limits.reserve):
            return True
        turns = ((turn, one) for one in self.connections if (turn := turn_to_go(one, now)) is not None)
        found = min(turns, key=lambda pair: pair[0], default=None)
        if found is None:
            return False
        (rank, _), first = found
        if rank > 0 and any(not one.is_proven and now - one.began < NEW for one in self.connections):
            return False  # one of those is to go, once its request has been looked at
        first.dismiss()
        self.connections.pop(first, None)
        return True

    @contextmanager
    def review(self, reserve: int = 0) -> Iterator[bool]:
        """Whether there is a place for one review more; `reserve` places are for those that say so alone."""
        if self.reviews >= self.limits.reviews + reserve:
            yield False
            return
        self.reviews += 1
        try:
            yield True
        finally:
            self.reviews -= 1


class Body:
    """What one body takes of the budgets."""

    def __init__(self, budgets: Budgets, began: float) -> None:
        self._budgets = budgets
        self.began = began
        self._share = budgets.small
        self._taken = 0
        self._size = 0
        self._needed = 0
        self._room: MemoryBudget | None = None
        self._reading: asyncio.Timeout | None = None
        self._has_given_way = False

    def expect(self, size: int) -> None:
        """Take room for a body whose size was told; OverloadedError if there is none."""
        self._grow(max(size - self._taken, 0))

    def add(self, size: int) -> None:
        """So much more of it is here."""
        self._size += size
        self._grow(max(self._size - self._taken, 0))

    def _grow(self, size: int) -> None:
        if self._has_given_way:
            raise OverloadedError
        if self._share is self._budgets.small and self._taken + size > SMALL:
            size += self._taken
            self._leave()
            self._share = self._budgets.large
        if size:
            self._share.take(self, size, asyncio.get_running_loop().time())
            self._taken += size

    def _leave(self) -> None:
        self._share.give_back(self, self._taken)
        self._taken = 0

    def give_way(self) -> None:
        """Somebody else needs the room."""
        self._has_given_way = True
        self._leave()
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def reading(self) -> asyncio.Timeout:
        """Within this, and in nothing else, it is read."""
        self._reading = asyncio.timeout(None)
        return self._reading

    async def read(self, body: bytes, needed: int) -> None:
        """All of it is here: wait for room for the `needed` bytes of what is made of it, large ones one at a time."""
        self._reading = None
        budgets = self._budgets
        is_small = len(body) <= SMALL
        room = budgets.parsed_small if is_small else budgets.parsed_large
        if needed > room.limit:
            raise RefusedBodyError(413, f"the body would take {needed} bytes in memory, more than {room.limit}")
        try:
            async with asyncio.timeout(PATIENCE):
                await room.take(needed)
                self._room, self._needed = room, needed
                if not is_small:
                    async with budgets.turn:
                        await asyncio.sleep(0)
        except TimeoutError:
            raise OverloadedError from None
        self._leave()

    def end(self) -> None:
        """Nothing of it is needed any more."""
        self._leave()
        if self._room is not None:
            self._room.give_back(self._needed)
            self._room = None
