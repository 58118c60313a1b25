"""The budgets: which requests and connections are refused or evicted, and how the size of parsed JSON is estimated."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import define

from webhook.runtime.http.budgets import (
    MAX_MEMORY,
    MIB,
    SMALL_BODY,
    Budgets,
    OverloadedError,
    RefusedBodyError,
    RequestLimits,
    derived_memory,
    parsed_size,
)

# These limits give 2 MiB for reading small bodies and 8 for large ones, 4 and 18 for parsed ones.
LIMITS = RequestLimits(memory=32 * MIB, reviews=2, connections=2)


async def read(budgets: Budgets, size: int, *, forever: bool = False) -> str:
    """Read a body; "read" or "refused"."""
    with budgets.body() as body:
        try:
            async with body.reading():
                body.expect(size)
                if forever:
                    await asyncio.Event().wait()
        except (TimeoutError, OverloadedError):
            return "refused"
        return "read"


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_new_small_body_aborts_the_oldest_when_the_budget_is_used_up() -> None:
    budgets = Budgets(LIMITS)
    stalled = [asyncio.create_task(read(budgets, SMALL_BODY, forever=True)) for _ in range(32)]
    await settled()
    assert await read(budgets, SMALL_BODY) == "read"
    await settled()
    assert [task.done() for task in stalled] == [True] + [False] * 31
    assert stalled[0].result() == "refused"
    for task in stalled:
        task.cancel()


async def test_large_bodies_do_not_block_small_ones_and_are_aborted_only_after_min_age() -> None:
    budgets = Budgets(LIMITS)
    stalled = [asyncio.create_task(read(budgets, 2 * MIB, forever=True)) for _ in range(4)]
    await settled()
    assert await read(budgets, 2 * MIB) == "refused"
    assert await read(budgets, SMALL_BODY) == "read"
    budgets.large.min_age = 0  # as if they were old enough
    assert await read(budgets, 2 * MIB) == "read"
    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)
    assert (budgets.large.used, budgets.small.used) == (0, 0)


async def test_body_that_outgrows_the_small_limit_moves_to_the_large_budget() -> None:
    budgets = Budgets(LIMITS)
    with budgets.body() as body:
        body.add(SMALL_BODY)
        assert (budgets.small.used, budgets.large.used) == (SMALL_BODY, 0)
        body.add(1)
        assert (budgets.small.used, budgets.large.used) == (0, SMALL_BODY + 1)
    assert budgets.large.used == 0


async def test_body_larger_than_its_budget_is_refused_with_413() -> None:
    budgets = Budgets(LIMITS)
    with budgets.body() as body, pytest.raises(RefusedBodyError) as refused:
        body.expect(9 * MIB)
    assert refused.value.code == 413
    deep = b"[" * SMALL_BODY
    with budgets.body() as body, pytest.raises(RefusedBodyError) as refused:
        await body.wait_to_parse(deep, parsed_size(deep))
    assert refused.value.code == 413


async def test_parsing_waits_until_another_body_releases_memory() -> None:
    budgets = Budgets(LIMITS)
    first, second = budgets.body(), budgets.body()
    with second as other:
        with first as held:
            await held.wait_to_parse(b"x", 3 * MIB)
            reading = asyncio.create_task(other.wait_to_parse(b"x", 3 * MIB))
            await settled()
            assert not reading.done()
        await reading
        assert budgets.parsed_small.used == 3 * MIB
    assert budgets.parsed_small.used == 0


def test_reserved_reviews_are_not_available_to_others() -> None:
    budgets = Budgets(LIMITS)
    with budgets.review() as one, budgets.review() as two, budgets.review() as three, budgets.review(1) as binding:
        assert (one, two, three, binding) == (True, True, False, True)
        with budgets.review(1) as another:
            assert not another
    assert budgets.reviews == 0


@define(eq=False)
class Peer:
    """A `PeerConnection` with fixed values."""

    waiting_since: float | None
    is_idle: bool = True
    has_completed_request: bool = True
    is_evicted: bool = False
    began: float = 0.0

    def evict(self) -> None:
        self.is_evicted = True


NOW = 10.0


def idle(since: float) -> Peer:
    return Peer(since)


def no_request_yet(since: float) -> Peer:
    """Connected, but no request has begun."""
    return Peer(since, has_completed_request=False)


def sending_request(since: float, *, has_completed_request: bool = False) -> Peer:
    """A part of a request has arrived."""
    return Peer(since, is_idle=False, has_completed_request=has_completed_request)


def awaiting_answer() -> Peer:
    """A later request; the peer waits for the answer."""
    return Peer(None, is_idle=False)


def new_request(since: float) -> Peer:
    """The first request; it has not been read or answered yet."""
    return Peer(None, is_idle=False, has_completed_request=False, began=since)


@pytest.mark.parametrize(
    ("peers", "evicted"),
    [
        ([idle(1), no_request_yet(9.9)], 1),
        ([idle(2), idle(1)], 1),
        ([awaiting_answer(), idle(2)], 1),
        ([idle(1), sending_request(9.9)], 1),
        ([no_request_yet(9), sending_request(8.9)], 1),
        ([sending_request(8.9), no_request_yet(8.8)], 1),
        ([idle(1), sending_request(8, has_completed_request=True)], 1),
        ([sending_request(8.1, has_completed_request=True), idle(9)], 1),
        (
            [
                sending_request(9.8, has_completed_request=True),
                sending_request(9.7, has_completed_request=True),
                awaiting_answer(),
            ],
            1,
        ),
        ([awaiting_answer(), awaiting_answer()], None),
        ([idle(1), new_request(9.5)], None),
        ([idle(1), new_request(8.5)], 0),
        ([no_request_yet(9), new_request(9.5)], 0),
    ],
    ids=[
        "no request yet before idle",
        "longest idle first",
        "idle before awaiting an answer",
        "incomplete first request before idle",
        "incomplete request waits longer than no request",
        "no request waits longer than incomplete request",
        "incomplete later request after two seconds before idle",
        "idle before incomplete later request of less than two seconds",
        "longest incomplete later request",
        "none if all await an answer",
        "none while a new connection's request is unread",
        "idle once that connection is older",
        "no request yet before new request",
    ],
)
def test_connection_with_the_lowest_rank_is_evicted_for_a_new_one(peers: list[Peer], evicted: int | None) -> None:
    budgets = Budgets(RequestLimits(connections=len(peers)))
    budgets.connections = dict.fromkeys(peers)
    assert budgets.make_room_for_connection(NOW) is (evicted is not None)
    assert [peer.is_evicted for peer in peers] == [number == evicted for number in range(len(peers))]


def test_last_connections_are_reserved_for_probes() -> None:
    budgets = Budgets(RequestLimits(connections=8))
    budgets.connections = dict.fromkeys(awaiting_answer() for _ in range(6))
    assert not budgets.make_room_for_connection(NOW)
    for _ in range(2):
        assert budgets.make_room_for_connection(NOW, is_probe=True)
        budgets.connections[awaiting_answer()] = None
    assert not budgets.make_room_for_connection(NOW, is_probe=True)
    assert [RequestLimits(connections=number).probe_connections for number in (2, 64, 768)] == [0, 16, 16]


SHAPES = {
    "lists in lists": b"[" * 400 + b"]" * 400,
    "many deep lists": b"[" + b",".join([b"[" * 100 + b"]" * 100] * 50) + b"]",
    "empty lists": json.dumps([[]] * 1000).encode(),
    "empty dicts": json.dumps([{}] * 1000).encode(),
    "dicts in dicts": b'{"a":' * 300 + b"1" + b"}" * 300,
    "small dicts": json.dumps([{str(n): n} for n in range(1000)], separators=(",", ":")).encode(),
    "wide dict": json.dumps({str(n): 1.5 for n in range(5000)}, separators=(",", ":")).encode(),
    "texts": json.dumps([str(n) for n in range(1000)], separators=(",", ":")).encode(),
    "numbers": json.dumps([n + 1000 for n in range(1000)], separators=(",", ":")).encode(),
    "environment": json.dumps([{"name": f"A{n}", "value": "b"} for n in range(1000)]).encode(),
    "other letters": json.dumps(["ж" * 50] * 500, ensure_ascii=False).encode(),
}


def size_of(value: Any) -> int:
    """Bytes of an object and everything in it, including the headers of the garbage collector."""
    total, found, seen = 0, [value], set()
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found += one.values()
        if isinstance(one, dict | list):
            found += one
            total += 16
        total += sys.getsizeof(one)
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_parsed_size_is_an_upper_bound(shape: str) -> None:
    body = SHAPES[shape]
    assert size_of(msgspec.json.decode(body)) <= parsed_size(body) < 120 * len(body)


@pytest.mark.parametrize(
    ("written", "memory"),
    [("max\n", MAX_MEMORY), (f"{512 * MIB}\n", 128 * MIB), (f"{300 * MIB}", 75 * MIB), (f"{64 * MIB}", 64 * MIB)],
)
def test_default_memory_is_derived_from_the_container_limit(tmp_path: Path, written: str, memory: int) -> None:
    (tmp_path / "memory.max").write_text(written)
    assert derived_memory(tmp_path / "memory.max") == memory
    assert derived_memory(tmp_path / "nowhere") == MAX_MEMORY


def test_limits_come_from_the_settings() -> None:
    assert RequestLimits.from_settings(10, 20, 30) == RequestLimits(10 * MIB, 20, 30)
    assert RequestLimits.from_settings(0, 0, 0).reviews == 512
