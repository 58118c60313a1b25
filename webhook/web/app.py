"""The routes of each listener."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from webhook.budgets import Budgets
from webhook.telemetry import Metrics
from webhook.web.admission import Admission
from webhook.web.devices import Devices
from webhook.web.evidence import EvidenceRoutes
from webhook.web.explain import Explain
from webhook.web.extender import ExtenderRoutes
from webhook.web.finalize import Finalize
from webhook.web.health import Health
from webhook.web.routes import Endpoint, application, get, post


def tls_app(
    admission: Admission,
    finalize: Finalize,
    devices: Devices,
    explain: Explain,
    health: Health,
    metrics: Metrics,
    evidence: EvidenceRoutes | None = None,
    budgets: Budgets | None = None,
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
        budgets=budgets,
    )


def plain_app(
    finalize: Finalize, devices: Devices, health: Health, metrics: Metrics, budgets: Budgets | None = None
) -> ASGIApp:
    return application(
        metrics,
        get("/", devices.page),
        get("/devices", devices.listing),
        *probes(health, metrics),
        post("/finalize", finalize.finalize),
        budgets=budgets,
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


def extender_app(extender: ExtenderRoutes, health: Health, metrics: Metrics, budgets: Budgets | None = None) -> ASGIApp:
    return application(
        metrics,
        post("/filter", extender.filter),
        post("/prioritize", extender.prioritize),
        post("/preempt", extender.preempt),
        post("/bind", extender.bind),
        get("/healthz", health.live),
        get("/readyz", health.ready),
        budgets=budgets,
    )


def plain_extender_app(
    extender: ExtenderRoutes, health: Health, metrics: Metrics, budgets: Budgets | None = None
) -> ASGIApp:
    """S0's two routes: what is asked there changes nothing."""
    return application(metrics, post("/filter", extender.filter), get("/healthz", health.live), budgets=budgets)
