"""Unusual answers of an API server, and unusual objects that users store: none ends the watch."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.api_client import answering, client_of
from tests.builders import Raw
from tests.kube.test_watch import PATH, Listening, config_map
from webhook.assembly.cluster import first_list
from webhook.kube.watch import BACKOFF, MAX_LINE, Watch
from webhook.runtime.backoff import Backoff

Events = Callable[[int], AsyncIterator[bytes]]
EMPTY = {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}}


def line(kind: str, raw: Raw) -> bytes:
    return json.dumps({"type": kind, "object": raw}, separators=(",", ":")).encode() + b"\n"


class Server:
    """Answers lists, and each watch with the test's events."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.watches = 0
        self.lists = 0
        self.may_list = asyncio.Event()
        self.may_list.set()

    async def answer(self, request: Request) -> Response:
        if "watch" not in request.query_params:
            self.lists += 1
            await self.may_list.wait()
            return JSONResponse(EMPTY)
        self.watches += 1
        return StreamingResponse(self.events(self.watches), media_type="application/json")


@asynccontextmanager
async def watching(
    server: Server, max_line: int = MAX_LINE, backoff: Backoff = BACKOFF
) -> AsyncIterator[tuple[Watch, Listening]]:
    """Runs until the end of the test, and raises what ended it earlier."""
    listening = Listening()
    async with answering(server.answer) as port, client_of(port) as api:
        watch = Watch(api, PATH, listening, backoff=backoff, max_line=max_line)
        running = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(20):
                yield watch, listening
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in the server, or in the watch
        await asyncio.sleep(0.01)


async def for_ever() -> None:
    await asyncio.Event().wait()


def sending(*lines: bytes) -> Events:
    async def events(_number: int) -> AsyncIterator[bytes]:
        for one in lines:
            yield one
        await for_ever()

    return events


async def test_object_of_many_megabytes_is_received() -> None:
    """1.4 MB of nine thousand containers in the store are 4.6 MB here."""
    large = {**config_map("large", 6), "data": {"x": "y" * (8 * 2**20)}}
    async with watching(Server(sending(line("ADDED", large), line("ADDED", config_map("next", 7))))) as (_, listening):
        await until(lambda: listening.received == ["large", "next"])


async def test_line_above_the_limit_leads_to_a_new_list() -> None:
    async def events(number: int) -> AsyncIterator[bytes]:
        if number == 1:
            yield line("ADDED", {**config_map("large", 6), "data": {"x": "y" * 2_000_000}})
        await for_ever()

    server = Server(events)
    async with watching(server, max_line=1_000):
        await until(lambda: server.lists == 2)


async def test_deeply_nested_object_is_received() -> None:
    deep = line("ADDED", config_map("deep", 6)).replace(
        b'"namespace"', b'"managedFields":[{"fieldsV1":' + b'{"f:a":' * 1_500 + b"{}" + b"}" * 1_500 + b'}],"namespace"'
    )
    async with watching(Server(sending(deep, line("ADDED", config_map("next", 7))))) as (_, listening):
        await until(lambda: listening.received == ["deep", "next"])


async def test_watch_is_stale_from_410_until_the_next_list() -> None:
    async def events(number: int) -> AsyncIterator[bytes]:
        if number == 1:
            yield line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        await for_ever()

    server = Server(events)
    async with watching(server) as (watch, _):
        await until(lambda: server.watches == 1)
        server.may_list.clear()
        await until(lambda: server.lists == 2)
        assert not watch.is_current
        server.may_list.set()
        await until(lambda: watch.is_current)


async def test_watches_that_end_at_once_are_retried_with_backoff() -> None:
    async def events(_number: int) -> AsyncIterator[bytes]:
        yield b""

    pauses: list[int] = []

    class Counting(Backoff):
        def seconds(self, failures: int) -> float:
            pauses.append(failures)
            return 0.0

    async with watching(Server(events), backoff=Counting(BACKOFF.first, BACKOFF.longest)):
        await until(lambda: len(pauses) >= 4)
    assert pauses[:4] == [1, 2, 3, 4]


async def test_waiting_for_the_first_list_fails_if_the_watch_ends() -> None:
    async def ended() -> None:
        raise KeyError("a bug")

    async with watching(Server(sending())) as (watch, _):
        await first_list(watch, asyncio.create_task(for_ever()))
    waiting: Awaitable[None] = first_list(Watch(watch._api, PATH, Listening()), asyncio.create_task(ended()))
    async with asyncio.timeout(5):
        with pytest.raises(KeyError):
            await waiting
