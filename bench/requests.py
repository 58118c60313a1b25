"""Requests as the routes get them from the listener and the guard, without a network."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from webhook.runtime.http.budgets import Budgets
from webhook.web.body import BODY_USAGE
from webhook.web.callers import UNCHECKED


async def post(route: Callable[[Request], Awaitable[Response]], budgets: Budgets, body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    with budgets.body() as usage:
        scope = {
            "type": "http",
            "method": "POST",
            "query_string": b"timeout=10s",
            "headers": headers,
            "state": {"caller": UNCHECKED},
            BODY_USAGE: usage,
        }
        reply = await route(Request(scope, receive))
    assert reply.status_code == 200, reply.body
