"""The routes of each listener, each with its guard."""

from collections.abc import Iterator

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from webhook.admission.explanation import Explainer
from webhook.admission.parts import Parts
from webhook.admission.reviewer import Reviewer
from webhook.ledger.pods import PodFacts
from webhook.runtime.clock import utc_now
from webhook.runtime.http.budgets import Budgets
from webhook.runtime.telemetry import CountsSource, FleetCounts, Metrics
from webhook.web.admission import Admission
from webhook.web.callers import CallerGate, Guard
from webhook.web.devices import Devices
from webhook.web.evidence import EvidenceRoutes
from webhook.web.explain import Explain
from webhook.web.extender import ExtenderRoutes
from webhook.web.finalize import Finalize
from webhook.web.health import Health, SchedulerHealth, Stage
from webhook.web.routes import Endpoint, RouteDeclaration, application, get, post


@frozen
class Endpoints:
    """What answers at the TLS and the plain listener of `serve`."""

    admission: Admission
    finalize: Finalize
    devices: Devices
    explain: Explain
    evidence: EvidenceRoutes | None
    health: Health
    metrics: Metrics
    gate: CallerGate
    budgets: Budgets | None

    @classmethod
    def of(
        cls,
        parts: Parts,
        health: Health,
        gate: CallerGate,
        *,
        facts: PodFacts,
        budgets: Budgets | None = None,
        shows_pending_ids: bool = False,
        count: CountsSource = FleetCounts,
    ) -> "Endpoints":
        reviewer = Reviewer.of(parts)
        return cls(
            admission=Admission(reviewer, parts.clock, health, budgets),
            finalize=Finalize(parts.ledger, parts.fleet, parts.pods, facts, health, gate),
            devices=Devices(
                parts.fleet,
                parts.ledger,
                parts.clock,
                notes=parts.notes,
                shows_pending_ids=shows_pending_ids,
                needs_evidence=parts.reserver.policy.is_always_required,
                is_starting=lambda: health.stage is Stage.STARTING,
                outdated=lambda: parts.fleet_source.outdated,
                lapses=parts.lapses,
                gate=gate,
                count=count,
            ),
            explain=Explain(Explainer(parts, reviewer), health, gate),
            evidence=None if parts.attestation is None else EvidenceRoutes(parts.attestation, health),
            health=health,
            metrics=parts.metrics,
            gate=gate,
            budgets=budgets,
        )


def tls_app(endpoints: Endpoints) -> ASGIApp:
    """The TLS listener. In a cluster all routes that take a token are only here."""
    evidence = endpoints.evidence
    proofs = (
        []
        if evidence is None
        else [
            get("/evidence/challenge", evidence.challenge, Guard.OPEN),
            post("/evidence", evidence.answer, Guard.OPEN),
        ]
    )
    return application(
        endpoints.metrics,
        post("/mutate", endpoints.admission.mutate, Guard.REVIEWER),
        post("/mutate-binding", endpoints.admission.mutate_binding, Guard.REVIEWER),
        post("/validate", endpoints.admission.validate, Guard.REVIEWER),
        post("/finalize", endpoints.finalize.finalize, Guard.CALLER),
        post("/explain", endpoints.explain.explain, Guard.CALLER),
        get("/", endpoints.devices.page, Guard.PERSON),
        get("/devices", endpoints.devices.listing, Guard.PERSON),
        *proofs,
        get("/healthz", endpoints.health.live, Guard.OPEN),
        get("/readyz", endpoints.health.ready, Guard.OPEN),
        budgets=endpoints.budgets,
        gate=endpoints.gate,
    )


def plain_app(endpoints: Endpoints, scheduler: SchedulerHealth | None = None) -> ASGIApp:
    """The plain HTTP listener. If callers are authenticated it has open routes only: plain HTTP would reveal tokens."""
    finalize, devices = endpoints.finalize, endpoints.devices
    return application(
        endpoints.metrics,
        *(summary(devices) if endpoints.gate.checks_callers else without_tokens(finalize, devices)),
        *probes(endpoints.health, endpoints.metrics, scheduler),
        budgets=endpoints.budgets,
        gate=endpoints.gate,
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
    gate: CallerGate,
    budgets: Budgets | None = None,
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
        gate=CallerGate(utc_now),
    )
