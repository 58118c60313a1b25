"""The routes of each listener, each with its guard."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from webhook.runtime.http.budgets import Budgets
from webhook.runtime.telemetry import Metrics
from webhook.web.admission import Admission
from webhook.web.callers import CallerGate, Guard
from webhook.web.devices import Devices
from webhook.web.evidence import EvidenceRoutes
from webhook.web.explain import Explain
from webhook.web.extender import ExtenderRoutes
from webhook.web.finalize import Finalize
from webhook.web.health import Health, SchedulerHealth
from webhook.web.routes import Endpoint, RouteDeclaration, application, get, post


def tls_app(
    admission: Admission,
    finalize: Finalize,
    devices: Devices,
    explain: Explain,
    health: Health,
    metrics: Metrics,
    evidence: EvidenceRoutes | None = None,
    budgets: Budgets | None = None,
    gate: CallerGate | None = None,
) -> ASGIApp:
    """The TLS listener. In a cluster all routes that take a token are only here."""
    proofs = (
        []
        if evidence is None
        else [
            get("/evidence/challenge", evidence.challenge, Guard.OPEN),
            post("/evidence", evidence.answer, Guard.OPEN),
        ]
    )
    return application(
        metrics,
        post("/mutate", admission.mutate, Guard.REVIEWER),
        post("/mutate-binding", admission.mutate_binding, Guard.REVIEWER),
        post("/validate", admission.validate, Guard.REVIEWER),
        post("/finalize", finalize.finalize, Guard.CALLER),
        post("/explain", explain.explain, Guard.CALLER),
        get("/", devices.page, Guard.PERSON),
        get("/devices", devices.listing, Guard.PERSON),
        *proofs,
        get("/healthz", health.live, Guard.OPEN),
        get("/readyz", health.ready, Guard.OPEN),
        budgets=budgets,
        gate=gate,
    )


def plain_app(
    finalize: Finalize,
    devices: Devices,
    health: Health,
    metrics: Metrics,
    budgets: Budgets | None = None,
    gate: CallerGate | None = None,
    scheduler: SchedulerHealth | None = None,
) -> ASGIApp:
    """The plain HTTP listener. If callers are authenticated it has open routes only: plain HTTP would reveal tokens."""
    return application(
        metrics,
        *(summary(devices) if gate is not None and gate.checks_callers else without_tokens(finalize, devices)),
        *probes(health, metrics, scheduler),
        budgets=budgets,
        gate=gate,
    )


def summary(devices: Devices) -> Iterator[RouteDeclaration]:
    yield get("/", devices.summary_page, Guard.OPEN)
    yield get("/devices", devices.summary, Guard.OPEN)


def without_tokens(finalize: Finalize, devices: Devices) -> Iterator[RouteDeclaration]:
    yield get("/", devices.page, Guard.PERSON)
    yield get("/devices", devices.listing, Guard.PERSON)
    yield post("/finalize", finalize.finalize, Guard.CALLER)


def probes_app(health: Health, metrics: Metrics) -> ASGIApp:
    return application(metrics, *probes(health, metrics))


def probes(health: Health, metrics: Metrics, scheduler: SchedulerHealth | None = None) -> Iterator[RouteDeclaration]:
    """Metrics and probes, which are open to all callers and contain no names.

    With a scheduler, /health and /ready are about it."""
    older = health if scheduler is None else scheduler

    async def render(request: Request) -> Response:
        body, media_type = metrics.render()
        return Response(body, headers={"content-type": media_type})

    yield get("/metrics", render, Guard.OPEN)
    yield get("/healthz", health.live, Guard.OPEN)
    yield get("/health", older.live, Guard.OPEN)
    yield get("/readyz", health.ready, Guard.OPEN)
    yield get("/ready", older.ready, Guard.OPEN)


def scorer_app(score: Endpoint, health: Health, metrics: Metrics) -> ASGIApp:
    return application(metrics, post("/v1/score", score, Guard.OPEN), *probes(health, metrics))


def extender_app(
    extender: ExtenderRoutes,
    health: Health,
    metrics: Metrics,
    budgets: Budgets | None = None,
    gate: CallerGate | None = None,
) -> ASGIApp:
    return application(
        metrics,
        post("/filter", extender.filter, Guard.SCHEDULER),
        post("/prioritize", extender.prioritize, Guard.SCHEDULER),
        post("/preempt", extender.preempt, Guard.SCHEDULER),
        post("/bind", extender.bind, Guard.SCHEDULER),
        get("/healthz", health.live, Guard.OPEN),
        get("/readyz", health.ready, Guard.OPEN),
        budgets=budgets,
        gate=gate,
    )


def plain_extender_app(
    extender: ExtenderRoutes, health: Health, metrics: Metrics, budgets: Budgets | None = None
) -> ASGIApp:
    """The two routes of the Blind GPU Scheduler. They change nothing and do not authenticate callers."""
    return application(
        metrics,
        post("/filter", extender.filter, Guard.SCHEDULER),
        get("/healthz", health.live, Guard.OPEN),
        budgets=budgets,
    )
