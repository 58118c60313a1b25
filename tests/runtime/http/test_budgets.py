"""The budgets: who is refused, who makes room, and that what JSON takes is not underestimated."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import define

from webhook.runtime.http.budgets import (
    LARGEST_MEMORY,
    MIB,
    SMALL,
    Budgets,
    OverloadedError,
    RefusedBodyError,
    RequestLimits,
    derived_memory,
    weight,
)

# What is read is 2 MiB for small bodies and 8 for large ones, what is parsed 4 and 18.
LIMITS = RequestLimits(memory=32 * MIB, reviews=2, connections=2)


async def read(budgets: Budgets, size: int, *, forever: bool = False) -> str:
    """How the reading of a body ends."""
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


async def test_the_oldest_small_body_makes_room() -> None:
    budgets = Budgets(LIMITS)
    stalled = [asyncio.create_task(read(budgets, SMALL, forever=True)) for _ in range(32)]
    await settled()
    assert await read(budgets, SMALL) == "read"
    await settled()
    assert [task.done() for task in stalled] == [True] + [False] * 31
    assert stalled[0].result() == "refused"
    for task in stalled:
        task.cancel()


async def test_large_bodies_keep_no_small_one_out_and_a_young_one_makes_no_room() -> None:
    budgets = Budgets(LIMITS)
    stalled = [asyncio.create_task(read(budgets, 2 * MIB, forever=True)) for _ in range(4)]
    await settled()
    assert await read(budgets, 2 * MIB) == "refused"
    assert await read(budgets, SMALL) == "read"
    budgets.large.patience = 0  # as if they had had their time
    assert await read(budgets, 2 * MIB) == "read"
    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)
    assert (budgets.large.used, budgets.small.used) == (0, 0)


async def test_a_body_that_grows_beyond_small_is_counted_with_the_large() -> None:
    budgets = Budgets(LIMITS)
    with budgets.body() as body:
        body.add(SMALL)
        assert (budgets.small.used, budgets.large.used) == (SMALL, 0)
        body.add(1)
        assert (budgets.small.used, budgets.large.used) == (0, SMALL + 1)
    assert budgets.large.used == 0


async def test_a_body_for_which_there_is_never_room_is_413() -> None:
    budgets = Budgets(LIMITS)
    with budgets.body() as body, pytest.raises(RefusedBodyError) as refused:
        body.expect(9 * MIB)
    assert refused.value.code == 413
    deep = b"[" * SMALL
    with budgets.body() as body, pytest.raises(RefusedBodyError) as refused:
        await body.read(deep, weight(deep))
    assert refused.value.code == 413


async def test_who_finds_no_room_waits_for_one_to_end() -> None:
    budgets = Budgets(LIMITS)
    first, second = budgets.body(), budgets.body()
    with second as waiting:
        with first as held:
            await held.read(b"x", 3 * MIB)
            reading = asyncio.create_task(waiting.read(b"x", 3 * MIB))
            await settled()
            assert not reading.done()
        await reading
        assert budgets.parsed_small.used == 3 * MIB
    assert budgets.parsed_small.used == 0


def test_places_for_bindings_are_not_taken_by_others() -> None:
    budgets = Budgets(LIMITS)
    with budgets.review() as one, budgets.review() as two, budgets.review() as three, budgets.review(1) as binding:
        assert (one, two, three, binding) == (True, True, False, True)
        with budgets.review(1) as another:
            assert not another
    assert budgets.reviews == 0


@define(eq=False)
class Peer:
    """A connection."""

    waits_since: float | None
    is_idle: bool = True
    is_proven: bool = True
    is_dismissed: bool = False
    began: float = 0.0

    def dismiss(self) -> None:
        self.is_dismissed = True


NOW = 10.0


def idle(since: float) -> Peer:
    return Peer(since)


def silent(since: float) -> Peer:
    """It has asked nothing since it came."""
    return Peer(since, is_proven=False)


def owing(since: float, *, is_proven: bool = False) -> Peer:
    """It has sent a part of a request."""
    return Peer(since, is_idle=False, is_proven=is_proven)


def waiting() -> Peer:
    """For our answer."""
    return Peer(None, is_idle=False)


def asking(since: float) -> Peer:
    """For our first answer, or to be read."""
    return Peer(None, is_idle=False, is_proven=False, began=since)


@pytest.mark.parametrize(
    ("peers", "dismissed"),
    [
        ([idle(1), silent(9.9)], 1),
        ([idle(2), idle(1)], 1),
        ([waiting(), idle(2)], 1),
        ([idle(1), owing(9.9)], 1),
        ([silent(9), owing(8.9)], 1),
        ([owing(8.9), silent(8.8)], 1),
        ([idle(1), owing(8, is_proven=True)], 1),
        ([owing(8.1, is_proven=True), idle(9)], 1),
        ([owing(9.8, is_proven=True), owing(9.7, is_proven=True), waiting()], 1),
        ([waiting(), waiting()], None),
        ([idle(1), asking(9.5)], None),
        ([idle(1), asking(8.5)], 0),
        ([silent(9), asking(9.5)], 0),
    ],
    ids=[
        "who never asked",
        "who is idle for longest",
        "who is idle",
        "who has sent half a request rather than who is proven",
        "who has sent half a request for longer than another is silent",
        "who is silent for longer than another has sent half a request",
        "who owes for two seconds rather than who is idle",
        "who is idle rather than who is sending",
        "who is sending for longest",
        "nobody",
        "none while a connection is new and its request not read",
        "an idle one when that connection is new no more",
        "a silent one before one that has just asked",
    ],
)
def test_a_connection_that_waits_for_its_peer_is_closed_for_a_new_one(peers: list[Peer], dismissed: int | None) -> None:
    budgets = Budgets(RequestLimits(connections=len(peers)))
    budgets.connections = dict.fromkeys(peers)
    assert budgets.has_room_for_connection(NOW) is (dismissed is not None)
    assert [peer.is_dismissed for peer in peers] == [number == dismissed for number in range(len(peers))]


def test_the_last_places_are_for_probes() -> None:
    budgets = Budgets(RequestLimits(connections=8))
    budgets.connections = dict.fromkeys(waiting() for _ in range(6))
    assert not budgets.has_room_for_connection(NOW)
    for _ in range(2):
        assert budgets.has_room_for_connection(NOW, is_probe=True)
        budgets.connections[waiting()] = None
    assert not budgets.has_room_for_connection(NOW, is_probe=True)
    assert [RequestLimits(connections=number).reserve for number in (2, 64, 768)] == [0, 16, 16]


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


def size_of(value: Any, seen: set[int]) -> int:
    """Bytes of an object and of all within it, the collector's headers included."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    header = 16 if isinstance(value, dict | list) else 0
    return sys.getsizeof(value) + header + sum(size_of(one, seen) for one in inner)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_json_takes_is_not_underestimated(shape: str) -> None:
    body = SHAPES[shape]
    assert size_of(msgspec.json.decode(body), set()) <= weight(body) < 120 * len(body)


@pytest.mark.parametrize(
    ("written", "memory"),
    [("max\n", LARGEST_MEMORY), (f"{512 * MIB}\n", 128 * MIB), (f"{300 * MIB}", 75 * MIB), (f"{64 * MIB}", 64 * MIB)],
)
def test_memory_is_derived_from_the_containers_limit(tmp_path: Path, written: str, memory: int) -> None:
    (tmp_path / "memory.max").write_text(written)
    assert derived_memory(tmp_path / "memory.max") == memory
    assert derived_memory(tmp_path / "nowhere") == LARGEST_MEMORY


def test_what_is_set_counts() -> None:
    assert RequestLimits.chosen(10, 20, 30) == RequestLimits(10 * MIB, 20, 30)
    assert RequestLimits.chosen(0, 0, 0).reviews == 512
