"""An API server as fixtures."""

from collections.abc import AsyncIterator

import pytest
from kubernetes.aio import client
from starlette.applications import Starlette
from starlette.routing import Route

from tests.scheduler.api_server import ApiServer
from webhook.runtime.http.listener import Listener


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    methods = ["GET", "PATCH"]
    listener = Listener(
        Starlette(routes=[Route("/{path:path}", server.answer, methods=methods)]), host="127.0.0.1", port=0
    )
    await listener.start()
    server.host = f"http://127.0.0.1:{listener.port}"
    yield server
    await listener.stop(0)


@pytest.fixture
async def api(api_server: ApiServer) -> AsyncIterator[client.ApiClient]:
    configuration = client.Configuration()
    configuration.host = api_server.host
    async with client.ApiClient(configuration) as api:
        yield api
