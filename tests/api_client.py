"""A fake API server on loopback, and its client."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kubernetes.aio import client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from webhook.runtime.http.listener import Listener

Answer = Callable[[Request], Awaitable[Response]]


@asynccontextmanager
async def answering(answer: Answer, *methods: str) -> AsyncIterator[int]:
    """The port of a server that answers the requests to all paths. Without `methods` it accepts GET only."""
    routes = [Route("/{path:path}", answer, methods=methods or None)]
    listener = Listener(Starlette(routes=routes), host="127.0.0.1", port=0)
    await listener.start()
    try:
        yield listener.port
    finally:
        await listener.stop(0)


def client_of(port: int) -> AbstractAsyncContextManager[client.ApiClient]:
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{port}"
    found: AbstractAsyncContextManager[client.ApiClient] = client.ApiClient(configuration)
    return found
