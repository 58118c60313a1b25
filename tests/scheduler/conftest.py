"""An API server as fixtures."""

from collections.abc import AsyncIterator

import pytest
from kubernetes.aio import client

from tests.api_client import answering, client_of
from tests.scheduler.api_server import ApiServer


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    async with answering(server.answer, "GET", "PATCH") as server.port:
        yield server


@pytest.fixture
async def api(api_server: ApiServer) -> AsyncIterator[client.ApiClient]:
    async with client_of(api_server.port) as api:
        yield api
