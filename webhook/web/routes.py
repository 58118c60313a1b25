"""Building blocks of all listeners: routes with guards, counted answers, and errors in JSON."""

from collections.abc import Awaitable, Callable

from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webhook.runtime.clock import utc_now
from webhook.runtime.http.budgets import Budgets
from webhook.runtime.telemetry import Metrics
from webhook.web.body import BODY_USAGE, error
from webhook.web.callers import CallerGate, Guard

Endpoint = Callable[[Request], Awaitable[Response]]


class UnguardedRouteError(Exception):
    """A route has no guard."""


@frozen
class RouteDeclaration:
    """A route and its guard. `application` accepts nothing else."""

    path: str
    method: str
    endpoint: Endpoint
    guard: Guard


def application(
    metrics: Metrics, *routes: RouteDeclaration, budgets: Budgets | None = None, gate: CallerGate | None = None
) -> ASGIApp:
    """The app of one listener. Raises UnguardedRouteError, so that the server does not start."""
    unguarded = [route for route in routes if not isinstance(getattr(route, "guard", None), Guard)]
    if unguarded:
        paths = ", ".join(str(getattr(route, "path", route)) for route in unguarded)
        raise UnguardedRouteError(f"no guard declared for {paths}")
    if gate is None:
        closed = [route.path for route in routes if route.guard is not Guard.OPEN]
        if closed:
            raise UnguardedRouteError(f"no gate checks the callers of {', '.join(closed)}")
        gate = CallerGate(utc_now)
    app = Starlette(
        routes=[Route(one.path, guarded(gate, one), methods=[one.method]) for one in routes],
        exception_handlers={HTTPException: http_error, Exception: internal_error},
    )
    app.router.redirect_slashes = False  # a path with another slash is an unknown path
    return CountMiddleware(BudgetMiddleware(app, budgets or Budgets()), metrics, routes)


def guarded(gate: CallerGate, route: RouteDeclaration) -> Endpoint:
    """The endpoint for callers that the gate admits. The body of a refused request is not read."""

    async def guarded_endpoint(request: Request) -> Response:
        return await gate.refusal(route.guard, request) or await route.endpoint(request)

    return guarded_endpoint


class BudgetMiddleware:
    """Accounts for the memory of request bodies, from the first byte until the request is answered."""

    def __init__(self, app: ASGIApp, budgets: Budgets) -> None:
        self._app = app
        self._budgets = budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budgets.body() as usage:
            scope[BODY_USAGE] = usage
            await self._app(scope, receive, send)


class CountMiddleware:
    """Counts answers by route and status. All unknown paths count as one route."""

    def __init__(self, app: ASGIApp, metrics: Metrics, declared: tuple[RouteDeclaration, ...]) -> None:
        self.declared = declared
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(route.path for route in declared)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_http_request(route, message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def get(path: str, endpoint: Endpoint, guard: Guard) -> RouteDeclaration:
    return RouteDeclaration(path, "GET", endpoint, guard)


def post(path: str, endpoint: Endpoint, guard: Guard) -> RouteDeclaration:
    return RouteDeclaration(path, "POST", endpoint, guard)


async def http_error(request: Request, exc: Exception) -> Response:
    """The answer to unknown paths and methods, in JSON."""
    code = exc.status_code if isinstance(exc, HTTPException) else 500
    reply = error(code, {404: "not found", 405: "method not allowed"}.get(code, "refused"))
    if isinstance(exc, HTTPException) and exc.headers:
        reply.headers.update(exc.headers)
    return reply


async def internal_error(request: Request, exc: Exception) -> Response:
    """The answer after an unexpected error. The listener logs the traceback."""
    return error(500, "internal error: see the log of gpuwarden")
