"""One process of `gpuwarden serve`: its listeners, its background tasks, its beginning and its end."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog

from webhook.assembly.parts import fleet_counts
from webhook.assembly.serving import Assembly, assembled
from webhook.runtime.clock import utc_now
from webhook.runtime.http.budgets import Budgets, RequestLimits
from webhook.runtime.http.listener import Listener
from webhook.runtime.process import cancel_and_wait, return_freed_memory, stop_signal
from webhook.runtime.setting_kinds import is_loopback
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.runtime.tls.certificate_source import CertificateSource, Reload
from webhook.runtime.tls.dev_certificates import make_dev_certificates
from webhook.scheduler.extender import Extender
from webhook.scheduler.profile import HOST
from webhook.web.app import Endpoints, extender_app, plain_app, plain_extender_app, tls_app
from webhook.web.callers import CallerGate
from webhook.web.extender import ExtenderRoutes
from webhook.web.health import Health, SchedulerHealth, Stage

log = structlog.get_logger(__name__)

DEV_CERTIFICATES = Path("certs/dev")
# How long the start waits for the watches that hints need. Without them some pods get fewer hints.
HINTS_PATIENCE = 3.0
# How often expired reservations are collected where nobody needs their devices.
COLLECT_INTERVAL = 1.0


async def serve(settings: Settings, *, hints: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then answer what is in flight."""
    return_freed_memory()
    configure_logging(settings.log_level)
    stop = stop_signal()
    warn_if_open(settings)
    async with assembled(settings) as assembly:
        for note in assembly.parts.notes:
            log.warning(note)
        server = Server(settings, assembly)
        if not await started(server, stop):
            return
        sys.stdout.write(server.ready_line + "\n")
        sys.stdout.flush()
        if hints:
            sys.stderr.write(server.hints)
        await server.run(stop)
    log.info("stopped")


async def started(server: "Server", stop: asyncio.Event) -> bool:
    """False if a signal stops the start: it waits for the API server without a limit."""
    starting, stopping = asyncio.ensure_future(server.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        await starting
        return True
    await cancel_and_wait([starting])
    log.info("stopped while starting")
    return False


class Server:
    """The listeners and their background tasks."""

    def __init__(self, settings: Settings, assembly: Assembly) -> None:
        self._settings = settings
        self._parts = parts = assembly.parts
        self._prepare = assembly.prepare
        self._scheduler = assembly.scheduler
        self._health = Health()
        self._certificates = certificates(settings)
        self._hinting: asyncio.Future[None] | None = None
        health, metrics = self._health, parts.metrics
        budgets = Budgets(
            RequestLimits.from_settings(settings.max_body_memory, settings.max_reviews, settings.max_connections)
        )
        gate = assembly.gate(settings)
        endpoints = Endpoints.of(
            parts,
            health,
            gate,
            facts=assembly.facts,
            budgets=budgets,
            shows_pending_ids=settings.is_embedded,
            count=lambda: fleet_counts(parts.fleet, parts.ledger, parts.reserver.policy, parts.clock()),
        )
        if not settings.is_embedded:
            metrics.show_review_callers(settings.proof_of_reviewers)
        scheduler = None if self._scheduler is None else SchedulerHealth(self._scheduler)
        host, tls = settings.host, self._certificates["tls"].context
        self._tls = Listener(
            tls_app(endpoints),
            host=host,
            port=settings.port,
            ssl_context=tls,
            budgets=budgets,
        )
        self._plain = Listener(
            plain_app(endpoints, scheduler),
            host=host,
            port=settings.ui_port,
            budgets=budgets,
            is_for_probes=True,
        )
        routes = ExtenderRoutes(Extender(parts, assembly.bindings), metrics, health, gate)
        self._extender = Listener(
            extender_app(routes, health, metrics, gate, budgets),
            host=host,
            port=settings.extender_port,
            ssl_context=self._certificates["extender"].context,
            budgets=budgets,
        )
        # On loopback for every --host: kube-scheduler is in the same Pod.
        self._pod_extender = (
            None
            if self._scheduler is None
            else Listener(
                extender_app(
                    routes, health, metrics, CallerGate(parts.clock, schedulers_use_certificates=True), budgets
                ),
                host=HOST,
                port=settings.scheduler_port,
                ssl_context=self._certificates["scheduler"].context,
                budgets=budgets,
            )
        )
        plain_at = settings.plain_extender_at
        self._plain_extender = plain_at and Listener(
            plain_extender_app(routes, health, metrics, budgets),
            host=plain_at[0],
            port=plain_at[1],
            budgets=budgets,
        )

    @property
    def _listeners(self) -> tuple[Listener, ...]:
        asked = (one for one in (self._plain_extender, self._pod_extender) if one is not None)
        return (self._tls, self._plain, self._extender, *asked)

    async def start(self) -> None:
        """Listens at once, and answers 503 until everything is loaded."""
        async with AsyncExitStack() as undo:
            for listener in self._listeners:
                await listener.start()
                undo.push_async_callback(listener.stop, 0.0)
            await self._load()
            if self._prepare is not None:
                await self._prepare()
            await self._parts.fleet_source.wait_for_first_answers()
            if self._parts.attestation is not None:
                await self._parts.attestation.wait_for_first_answers()
            if self._parts.hinting is not None:
                self._hinting = asyncio.ensure_future(self._parts.hinting.run())
                await self._parts.hinting.wait_until_ready(HINTS_PATIENCE)
            undo.pop_all()
        for name, source in self._certificates.items():
            self._parts.metrics.show_certificate(name, source.not_after)
        self._health.stage = Stage.SERVING
        log.info(
            "serving", urls=[listener.url for listener in self._listeners], nodes=len(self._parts.fleet.indexed_nodes)
        )

    async def _load(self) -> None:
        gc.disable()  # loading makes no garbage, and each collection would cost a third of a second
        try:
            await self._parts.fleet_source.load()
            if self._parts.attestation is not None:
                await self._parts.attestation.load()
        finally:
            gc.freeze()  # the fleet stays, so later collections can skip it
            gc.enable()

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set or a background task fails. A failed task is a bug, and ends the process."""
        interval = self._settings.reload_interval.total_seconds()
        pairs = self._certificates.items()
        background: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(task)
            for task in (
                self._parts.fleet_source.run(interval),
                *(
                    source.watch(self._reload_observer(name), every=self._settings.reload_interval)
                    for name, source in pairs
                ),
                every(COLLECT_INTERVAL, self._collect),
                *([] if self._parts.attestation is None else [self._parts.attestation.run()]),
                *([] if self._hinting is None else [self._hinting]),
                *([] if self._scheduler is None else [self._scheduler.run()]),
            )
        ]
        waiting = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait({waiting, *background}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        await cancel_and_wait([waiting, *background])
        if self._parts.hinting is not None:
            await self._parts.hinting.close()
        for task in done - {waiting}:
            task.result()

    async def _drain(self) -> None:
        self._health.stage = Stage.DRAINING
        log.info("draining")
        grace = self._settings.drain_timeout.total_seconds()
        await asyncio.gather(*(listener.stop(grace) for listener in self._listeners))

    async def _collect(self) -> None:
        for one in await self._parts.ledger.collect(self._parts.clock()):
            log.info("reservation expired", reservation=one.id, namespace=one.namespace, node=one.node)

    def _reload_observer(self, name: str) -> Callable[[Reload], None]:
        """Logs and counts the reloads of a listener's certificate."""

        def observe(outcome: Reload) -> None:
            source, metrics = self._certificates[name], self._parts.metrics
            if outcome is Reload.REFUSED:
                metrics.count_certificate_reload(name, "refused")
                log.error("certificate refused, the old one stays", listener=name, problem=source.problem)
            else:
                metrics.count_certificate_reload(name, "reloaded")
                log.info("certificate reloaded", listener=name, not_after=source.not_after.isoformat())
            metrics.show_certificate(name, source.not_after)

        return observe

    @property
    def ready_line(self) -> str:
        scheduler = "" if self._pod_extender is None else f" scheduler={self._pod_extender.url}"
        return f"ready https={self._tls.url} http={self._plain.url} extender={self._extender.url}{scheduler}"

    @property
    def hints(self) -> str:
        ca = DEV_CERTIFICATES / "ca.crt"
        trust = f"--cacert {ca} " if self._settings.tls_cert is None else ""
        return (
            f"\n  devices   {self._plain.url}/\n  metrics   {self._plain.url}/metrics\n\n"
            "Paste this into another terminal to see a pod admitted, and its patch:\n\n"
            f"  curl -sS {trust}-H 'Content-Type: application/json' --data @examples/review.json "
            f"{self._tls.url}/mutate | python3 scripts/show_review.py\n\nStop with Ctrl-C.\n"
        )


def certificates(settings: Settings) -> dict[str, CertificateSource]:
    """The same pair for both TLS listeners, each with its own CAs of clients."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        cert, key = settings.tls_cert, settings.tls_key
    else:
        made = make_dev_certificates(DEV_CERTIFICATES, now=utc_now())
        cert, key = made.cert, made.key
        log.warning("serving with development certificates", directory=str(DEV_CERTIFICATES))
    return {
        # Browsers, nodes and the API server use this listener. Only reviews require a client certificate.
        "tls": CertificateSource(
            cert, key, clock=utc_now, client_ca=settings.client_ca, requires_client_certificate=False
        ),
        "extender": CertificateSource(cert, key, clock=utc_now, client_ca=settings.extender_client_ca),
        **({} if settings.scheduler_certs is None else {"scheduler": pod_certificates(settings.scheduler_certs)}),
    }


def pod_certificates(directory: Path) -> CertificateSource:
    """Accepts the client certificate of the kube-scheduler in the same Pod, and no other."""
    cert, key, ca = (directory / name for name in ("tls.crt", "tls.key", "ca.crt"))
    return CertificateSource(cert, key, clock=utc_now, client_ca=ca)


def warn_if_open(settings: Settings) -> None:
    """Logs warnings about listeners that accept unauthenticated callers. On loopback there are none."""
    if settings.plain_extender_at is not None:
        host, port = settings.plain_extender_at
        log.warning("the extender serves plain HTTP to every caller", host=host, port=port)
    if is_loopback(settings.host):
        return
    if settings.is_embedded:
        log.warning("every caller may use all of this server", host=settings.host)
    elif not settings.proves_reviewers:
        log.warning("every caller may post reviews to the TLS listener", host=settings.host)


async def every(interval: float, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval)
        await step()
