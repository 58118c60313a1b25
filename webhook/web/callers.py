"""Who calls: in a cluster, what names tenants' pods or changes something is for callers whom the API server knows."""

import hashlib
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from webhook.clock import Clock
from webhook.core.errors import GpuwardenError
from webhook.telemetry import Metrics
from webhook.web.body import error

# A token that was taken back is refused after this at the latest.
REMEMBERED = timedelta(seconds=30)
MAX_REMEMBERED = 1000
MAX_TOKEN = 8192

IsAuthentic = Callable[[str], Awaitable[bool]]


class CallersUnavailableError(GpuwardenError):
    """Nobody can say at this moment whose a token is."""


class Guarded:
    """Some paths of an app for known callers only; the others are open. What is refused is counted as any answer."""

    def __init__(
        self, app: ASGIApp, paths: frozenset[str], is_authentic: IsAuthentic, clock: Clock, metrics: Metrics
    ) -> None:
        self._app = app
        self._paths = paths
        self._is_authentic = is_authentic
        self._clock = clock
        self._metrics = metrics
        self._known: dict[bytes, datetime] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        refusal = await self._refusal(Request(scope).headers.get("authorization", ""))
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._metrics.count_http_request(scope["path"], refusal.status_code)
            await refusal(scope, receive, send)

    async def _refusal(self, authorization: str) -> Response | None:
        try:
            if await self._is_known(authorization):
                return None
        except CallersUnavailableError:
            return error(503, "callers cannot be checked at this moment")
        refusal = error(401, "a bearer token is needed that the API server knows and that is for this")
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal

    async def _is_known(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
            return False
        digest = hashlib.sha256(token.encode()).digest()
        if self._known.get(digest, datetime.min.replace(tzinfo=self._clock().tzinfo)) > self._clock():
            return True
        if not await self._is_authentic(token):
            return False
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[digest] = self._clock() + REMEMBERED
        return True
