"""A watch and an API server that goes silent; the rest is shown on a real one."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import pytest
from kubernetes.aio import client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.builders import Raw
from webhook.listener import Listener
from webhook.watch import Watch

PATH = "/api/v1/configmaps"


def config_map(name: str, version: int) -> Raw:
    return {"kind": "ConfigMap", "metadata": {"name": name, "namespace": "ml", "resourceVersion": str(version)}}


class ApiServer:
    """Tells of one object, and then not a byte more: no bookmark, no end."""

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
    app = Starlette(routes=[Route("/{path:path}", server.answer)])
    listener = Listener(app, host="127.0.0.1", port=0)
    await listener.start()
    server.port = listener.port
    yield server
    server.is_over.set()
    await listener.stop(0)


class Listening:
    """Remembers the names it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.has_changed = asyncio.Event()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        """There were none."""

    def changed(self, raw: Raw) -> None:
        self.heard.append(raw["metadata"]["name"])
        self.has_changed.set()

    def deleted(self, raw: Raw) -> None:
        """None is."""


async def test_a_watch_that_has_gone_silent_is_not_believed_and_goes_on_where_it_was(api_server: ApiServer) -> None:
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{api_server.port}"
    listening, states = Listening(), []
    async with client.ApiClient(configuration) as api:
        watch = Watch(api, PATH, listening, silence=0.5)
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(20):
            await listening.has_changed.wait()
            states.append(watch.is_current)
            listening.has_changed.clear()
            await api_server.has_been_asked_again.wait()
            states.append(watch.is_current)
            api_server.may_answer_again.set()
            await listening.has_changed.wait()
        states.append(watch.is_current)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert states == [True, False, True]
    assert listening.heard[:2] == ["map-1", "map-2"]
    assert api_server.begun_at[:2] == ["5", "6"]
    assert watch.lists == 1
