"""The routes of each listener."""

from collections.abc import Awaitable, Callable, Iterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webhook.telemetry import Metrics
from webhook.web.admission import Admission
from webhook.web.body import error
from webhook.web.devices import Devices
from webhook.web.evidence import EvidenceRoutes
from webhook.web.explain import Explain
from webhook.web.extender import ExtenderRoutes
from webhook.web.finalize import Finalize
from webhook.web.health import Health

Endpoint = Callable[[Request], Awaitable[Response]]


def tls_app(
    admission: Admission,
    finalize: Finalize,
    devices: Devices,
    explain: Explain,
    health: Health,
    metrics: Metrics,
    evidence: EvidenceRoutes | None = None,
) -> ASGIApp:
    proofs = (
        []
        if evidence is None
        else [
            get("/evidence/challenge", evidence.challenge),
            post("/evidence", evidence.answer),
        ]
    )
    return application(
        metrics,
        post("/mutate", admission.mutate),
        post("/validate", admission.validate),
        post("/finalize", finalize.finalize),
        post("/explain", explain.explain),
        get("/devices", devices.listing),
        *proofs,
        get("/healthz", health.live),
        get("/readyz", health.ready),
    )


def plain_app(finalize: Finalize, devices: Devices, health: Health, metrics: Metrics) -> ASGIApp:
    return application(
        metrics,
        get("/", devices.page),
        get("/devices", devices.listing),
        *probes(health, metrics),
        post("/finalize", finalize.finalize),
    )


def probes_app(health: Health, metrics: Metrics) -> ASGIApp:
    return application(metrics, *probes(health, metrics))


def probes(health: Health, metrics: Metrics) -> Iterator[Route]:
    """What names nobody and is open to everybody."""

    async def render(request: Request) -> Response:
        body, media_type = metrics.render()
        return Response(body, headers={"content-type": media_type})

    yield get("/metrics", render)
    yield from (get(path, health.live) for path in ("/healthz", "/health"))
    yield from (get(path, health.ready) for path in ("/readyz", "/ready"))


def scorer_app(score: Endpoint, health: Health, metrics: Metrics) -> ASGIApp:
    return application(metrics, post("/v1/score", score), *probes(health, metrics))


def extender_app(extender: ExtenderRoutes, health: Health, metrics: Metrics) -> ASGIApp:
    return application(
        metrics,
        post("/filter", extender.filter),
        post("/prioritize", extender.prioritize),
        post("/preempt", extender.preempt),
        post("/bind", extender.bind),
        get("/healthz", health.live),
        get("/readyz", health.ready),
    )


def plain_extender_app(extender: ExtenderRoutes, health: Health, metrics: Metrics) -> ASGIApp:
    """S0's two routes: what is asked there changes nothing."""
    return application(metrics, post("/filter", extender.filter), get("/healthz", health.live))


def application(metrics: Metrics, *routes: Route) -> ASGIApp:
    app = Starlette(routes=routes, exception_handlers={HTTPException: refused, Exception: broken})
    app.router.redirect_slashes = False  # another path is another route, of which there is none
    return Counted(app, metrics, frozenset(route.path for route in routes))


class Counted:
    """Counts answers by route and status; paths that are no routes are one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

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


def get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


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
