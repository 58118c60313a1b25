"""A watch with an API server that goes silent or stops within a list. tests/e2e has the rest with a real server."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.api_client import answering, client_of
from tests.builders import Raw
from webhook.assembly.cluster import outdated_by
from webhook.kube.watch import Trimmed, Watch, WatchGroup
from webhook.runtime.backoff import Backoff
from webhook.runtime.process import cancel_and_wait

PATH, OTHER_PATH = "/api/v1/configmaps", "/api/v1/secrets"


def config_map(name: str, version: int) -> Raw:
    return {"kind": "ConfigMap", "metadata": {"name": name, "namespace": "ml", "resourceVersion": str(version)}}


class ApiServer:
    """Sends one object and then nothing, without closing the connection."""

    def __init__(self) -> None:
        self.begun_at: list[str] = []
        self.is_over = asyncio.Event()
        self.has_been_asked_again, self.may_answer_again = asyncio.Event(), asyncio.Event()
        self.port = 0

    async def answer(self, request: Request) -> Response:
        if "watch" not in request.query_params:
            return JSONResponse({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}})
        self.begun_at.append(request.query_params["resourceVersion"])
        if len(self.begun_at) > 1:
            self.has_been_asked_again.set()
            await self.may_answer_again.wait()
        return StreamingResponse(self.events(), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        number = len(self.begun_at)
        event = {"type": "ADDED", "object": config_map(f"map-{number}", 5 + number)}
        yield json.dumps(event).encode() + b"\n"
        await self.is_over.wait()


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    async with answering(server.answer) as server.port:
        yield server
        server.is_over.set()


class Listening:
    """Records the names it receives."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.lists: list[list[str]] = []
        self.has_changed = asyncio.Event()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.lists.append([raw["metadata"]["name"] for raw in objects.values()])

    def changed(self, raw: Raw) -> None:
        self.received.append(raw["metadata"]["name"])
        self.has_changed.set()

    def deleted(self, raw: Raw) -> None:
        """None is."""


async def test_silent_watch_is_stale_and_resumes_at_its_version(api_server: ApiServer) -> None:
    listening, states = Listening(), []
    async with client_of(api_server.port) as api:
        watch = Watch(api, PATH, listening, silence=0.5)
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(20):
            await listening.has_changed.wait()
            states.append((watch.is_current, outdated_by([watch], 0.0) is None))
            listening.has_changed.clear()
            await api_server.has_been_asked_again.wait()
            outdated = outdated_by([watch], 0.0)
            assert outdated_by([watch]) is None, "an interruption of a moment is told of by nobody"
            states.append((watch.is_current, outdated is None))
            assert outdated is not None
            assert outdated.is_blind
            assert outdated.why.startswith(f"no events of {PATH} for ")
            api_server.may_answer_again.set()
            await listening.has_changed.wait()
        states.append((watch.is_current, outdated_by([watch], 0.0) is None))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert states == [(True, True), (False, False), (True, True)]
    assert listening.received[:2] == ["map-1", "map-2"]
    assert api_server.begun_at[:2] == ["5", "6"]
    assert watch.lists == 1


def page(*names: str, rest: str = "") -> Response:
    metadata = {"resourceVersion": "5", "continue": rest}
    items = [config_map(name, 4) for name in names]
    return JSONResponse({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata, "items": items})


QUICK = Backoff(timedelta(milliseconds=1), timedelta(milliseconds=10))
EXPIRED = JSONResponse({"kind": "Status", "code": 410, "reason": "Expired"}, status_code=410)
BROKEN = JSONResponse({"kind": "Status", "code": 500}, status_code=500)
TORN = Response(b'{"kind": "ConfigMapList", "items": [', media_type="application/json")


@pytest.mark.parametrize("failure", [EXPIRED, BROKEN, TORN], ids=["expired", "broken", "torn"])
@pytest.mark.parametrize("trimmed", [None, lambda raw: raw], ids=["as it is", "trimmed"])
async def test_interrupted_list_is_discarded(failure: Response, trimmed: Trimmed | None) -> None:
    half = [page("a", rest="more"), failure]
    answers = [*half, failure, page("a", rest="more"), page("b"), *half, failure, page("a")]
    asked, states = [], []
    listening, is_done = Listening(), asyncio.Event()

    async def answer(request: Request) -> Response:
        if "watch" in request.query_params:  # it is over at once: the server has forgotten where we were
            return JSONResponse({"type": "ERROR", "object": {"code": 410}})
        asked.append(request.query_params.get("continue", ""))
        states.append((watch.ready.is_set(), watch.is_current))
        if len(asked) > len(answers):
            is_done.set()
            await asyncio.Event().wait()
        return answers[len(asked) - 1]

    async with answering(answer) as port, client_of(port) as api, asyncio.timeout(20):
        watch = Watch(api, PATH, listening, trimmed=trimmed, backoff=QUICK)
        running = asyncio.create_task(watch.run())
        await is_done.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert listening.lists == [["a", "b"], ["a"]]
    assert asked == ["", "more", "", "", "more", "", "more", "", "", ""]
    unknown, interrupted = (False, False), (True, False)
    assert states == [*[unknown] * 5, *[interrupted] * 5]


async def test_lists_that_share_a_lock_are_read_page_by_page_in_turn() -> None:
    in_progress, most, begun = 0, 0, []

    async def answer(request: Request) -> Response:
        nonlocal in_progress, most
        if "watch" in request.query_params:
            await asyncio.Event().wait()
        begun.append(request.url.path)
        in_progress += 1
        most = max(most, in_progress)
        await asyncio.sleep(0.01)  # another request would arrive meanwhile
        in_progress -= 1
        return page("a", rest="" if "continue" in request.query_params else "more")

    turn, first, second = asyncio.Lock(), Listening(), Listening()
    async with answering(answer) as port, client_of(port) as api, asyncio.timeout(20):
        watches = [
            Watch(api, path, listening, trimmed=lambda raw: raw, turn=turn)
            for path, listening in ((PATH, first), (OTHER_PATH, second))
        ]
        running = [asyncio.create_task(watch.run()) for watch in watches]
        for watch in watches:
            await watch.ready.wait()
        await cancel_and_wait(running)
    assert begun == [PATH, OTHER_PATH, PATH, OTHER_PATH]
    assert most == 1


def test_group_of_watches_is_current_when_each_of_them_is() -> None:
    group = WatchGroup()
    assert not group.are_current()
    first, second = (Watch(cast(Any, None), PATH, Listening()) for _ in range(2))
    group.add(first, second)
    first.is_current = True
    assert not group.are_current()
    second.is_current = True
    assert group.are_current()
