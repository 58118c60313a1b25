"""The guards of all routes in a cluster."""

from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tests.web.harness import Harness
from tests.web.test_callers import ApiServer
from webhook.runtime.telemetry import Metrics
from webhook.scheduler.extender import Extender
from webhook.web.app import Endpoints, extender_app, plain_app, tls_app
from webhook.web.callers import CallerGate, Guard, Reviewers
from webhook.web.extender import ExtenderRoutes
from webhook.web.routes import RouteDeclaration, UnguardedRouteError, application, get

PROBES = [("GET", "/healthz"), ("GET", "/readyz")]
OPEN = {
    "tls": PROBES,
    "plain": [*PROBES, ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/devices")],
    "extender": PROBES,
}
GUARDED = {
    "tls": [
        ("POST", "/mutate"),
        ("POST", "/validate"),
        ("POST", "/finalize"),
        ("POST", "/explain"),
        ("GET", "/"),
        ("GET", "/devices"),
    ],
    "plain": [],
    "extender": [("POST", "/filter"), ("POST", "/prioritize"), ("POST", "/preempt"), ("POST", "/bind")],
}
ABSENT = {
    "tls": [("GET", "/metrics"), ("POST", "/filter")],
    "plain": [("POST", "/finalize"), ("POST", "/explain"), ("POST", "/mutate")],
    "extender": [("GET", "/devices"), ("POST", "/finalize")],
}


def apps(harness: Harness) -> dict[str, ASGIApp]:
    """The listeners of a server in a cluster, where reviewers need a token."""
    parts, health = harness.parts, harness.health
    gate = CallerGate(parts.clock, ApiServer(), Reviewers("gpuwarden"))
    endpoints = Endpoints.of(parts, health, gate, facts=parts.pods)
    extender = ExtenderRoutes(Extender(parts, None), parts.metrics, health, gate)
    return {
        "tls": tls_app(endpoints),
        "plain": plain_app(endpoints),
        "extender": extender_app(extender, health, parts.metrics, gate),
    }


async def endpoint(request: Request) -> Response:
    return Response()


@pytest.mark.parametrize(
    "route",
    [Route("/new", endpoint), RouteDeclaration("/new", "GET", endpoint, guard=cast(Guard, None))],
    ids=["Starlette route", "declaration without a guard"],
)
def test_route_without_a_guard_prevents_the_start(route: Any) -> None:
    with pytest.raises(UnguardedRouteError, match="/new"):
        application(Metrics(), get("/old", endpoint, Guard.OPEN), route)


def test_guard_without_a_gate_prevents_the_start() -> None:
    with pytest.raises(UnguardedRouteError, match="/new"):
        application(Metrics(), get("/old", endpoint, Guard.OPEN), get("/new", endpoint, Guard.CALLER))


@pytest.mark.parametrize("listener", ["tls", "plain", "extender"])
async def test_routes_admit_callers_by_their_guards(tmp_path: Path, listener: str) -> None:
    harness = await Harness(tmp_path, {"nodes": []}, None).start()
    transport = httpx.ASGITransport(app=apps(harness)[listener])

    async with httpx.AsyncClient(transport=transport, base_url="https://harness") as client:

        async def codes(routes: list[tuple[str, str]]) -> set[int]:
            return {(await client.request(method, path)).status_code for method, path in routes}

        assert await codes(OPEN[listener]) == {200}
        assert await codes(GUARDED[listener]) == ({401} if GUARDED[listener] else set())
        assert await codes(ABSENT[listener]) <= {404, 405}
    await harness.close()
