"""Routes as any listener of ours has them: counted, and refused in JSON. Which there are is said elsewhere."""

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
    """A route does not say who may call it."""


@frozen
class RouteDeclaration:
    """A route, and whom it is for. Nothing else can be registered."""

    path: str
    method: str
    endpoint: Endpoint
    guard: Guard


def application(
    metrics: Metrics, *routes: RouteDeclaration, budgets: Budgets | None = None, gate: CallerGate | None = None
) -> ASGIApp:
    """Raises UnguardedRouteError, so that the server does not start."""
    unguarded = [route for route in routes if not isinstance(getattr(route, "guard", None), Guard)]
    if unguarded:
        paths = ", ".join(str(getattr(route, "path", route)) for route in unguarded)
        raise UnguardedRouteError(f"no guard declared for {paths}")
    gate = gate or CallerGate(utc_now)
    app = Starlette(
        routes=[Route(one.path, behind(gate, one), methods=[one.method]) for one in routes],
        exception_handlers={HTTPException: refused, Exception: broken},
    )
    app.router.redirect_slashes = False  # another path is another route, of which there is none
    return CountMiddleware(BudgetMiddleware(app, budgets or Budgets()), metrics, routes)


def behind(gate: CallerGate, route: RouteDeclaration) -> Endpoint:
    """The endpoint, for callers that the gate lets in. No body is read of others."""

    async def entered(request: Request) -> Response:
        return await gate.refusal(route.guard, request) or await route.endpoint(request)

    return entered


class BudgetMiddleware:
    """Counts what the bodies of all requests take together, from their first byte until they are answered."""

    def __init__(self, app: ASGIApp, budgets: Budgets) -> None:
        self._app = app
        self._budgets = budgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budgets.body() as held:
            scope[BODY_USAGE] = held
            await self._app(scope, receive, send)


class CountMiddleware:
    """Counts answers by route and status; paths that are no routes are one."""

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


async def refused(request: Request, exc: Exception) -> Response:
    """Unknown paths and methods, in JSON like everything else."""
    code = exc.status_code if isinstance(exc, HTTPException) else 500
    reply = error(code, {404: "not found", 405: "method not allowed"}.get(code, "refused"))
    if isinstance(exc, HTTPException) and exc.headers:
        reply.headers.update(exc.headers)
    return reply


async def broken(request: Request, exc: Exception) -> Response:
    """A bug of ours. The log gets the traceback (the server writes it), the caller a sentence."""
    return error(500, "an error of gpuwarden's own: its log says more")
