"""One process of `gpuwarden serve`: its listeners, its background tasks, its beginning and its end."""

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog

from webhook.clock import utc_now
from webhook.dev_certificates import make_dev_certificates
from webhook.listener import Listener
from webhook.pods import PodFacts
from webhook.settings import Settings
from webhook.telemetry import configure_logging
from webhook.tls import CertificateSource, Reload
from webhook.web.admission import Admission
from webhook.web.app import extender_app, plain_app, tls_app
from webhook.web.devices import Devices
from webhook.web.explain import Explain
from webhook.web.finalize import Finalize
from webhook.web.health import Health, Stage
from webhook.wiring import Parts, embedded

log = structlog.get_logger(__name__)

DEV_CERTIFICATES = Path("certs/dev")
# How often expired reservations are collected where nobody needs their devices.
COLLECT_INTERVAL = 1.0


async def serve(settings: Settings, *, hints: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then answer what is in flight."""
    configure_logging(settings.log_level)
    stop = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, stop.set)
    parts = embedded(settings, utc_now)
    for note in parts.notes:
        log.warning(note)
    warn_if_open(settings)
    async with pod_facts(settings, parts) as facts:
        server = Server(settings, parts, facts)
        await server.start()
        sys.stdout.write(server.ready_line + "\n")
        sys.stdout.flush()
        if hints:
            sys.stderr.write(server.hints)
        await server.run(stop)
    log.info("stopped")


class Server:
    """The listeners and what keeps them supplied."""

    def __init__(self, settings: Settings, parts: Parts, facts: PodFacts) -> None:
        self._settings = settings
        self._parts = parts
        self._health = Health()
        self._certificates = certificates(settings)
        health, metrics = self._health, parts.metrics
        admission = Admission(parts.holder, parts.pods, parts.rules, parts.clock, metrics, health)
        finalize = Finalize(parts.ledger, parts.pods, facts, health)
        devices = Devices(parts.fleet, parts.ledger, parts.clock, notes=parts.notes)
        explain = Explain(parts, health)
        host, tls = settings.host, self._certificates["tls"].context
        self._tls = Listener(
            tls_app(admission, finalize, devices, explain, health, metrics),
            host=host,
            port=settings.port,
            ssl_context=tls,
        )
        self._plain = Listener(plain_app(finalize, devices, health, metrics), host=host, port=settings.ui_port)
        self._extender = Listener(
            extender_app(health, metrics),
            host=host,
            port=settings.extender_port,
            ssl_context=self._certificates["extender"].context,
        )

    @property
    def _listeners(self) -> tuple[Listener, ...]:
        return (self._tls, self._plain, self._extender)

    async def start(self) -> None:
        """Listen at once, answering 503 until the first readings are in."""
        async with AsyncExitStack() as undo:
            for listener in self._listeners:
                await listener.start()
                undo.push_async_callback(listener.stop, 0.0)
            await self._load()
            undo.pop_all()
        for name, source in self._certificates.items():
            self._parts.metrics.show_certificate(name, source.not_after)
        self._health.stage = Stage.SERVING
        log.info("serving", urls=[listener.url for listener in self._listeners], nodes=len(self._parts.fleet.berths))

    async def _load(self) -> None:
        gc.disable()  # loading makes no garbage, and each look at all of it would cost a third of a second
        try:
            await self._parts.feed.load()
        finally:
            gc.freeze()  # the fleet stays: no later collection has to look at it
            gc.enable()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, or a background task fails: that is a bug, and a restart beats half a server."""
        interval = self._settings.reload_interval.total_seconds()
        pairs = self._certificates.items()
        background: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(task)
            for task in (
                self._parts.feed.run(interval),
                *(source.watch(self._teller(name), every=self._settings.reload_interval) for name, source in pairs),
                every(COLLECT_INTERVAL, self._collect),
            )
        ]
        waiting = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait({waiting, *background}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        await cancelled([waiting, *background])
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

    def _teller(self, name: str) -> Callable[[Reload], None]:
        """Says what became of a listener's new certificate."""

        def tell(outcome: Reload) -> None:
            source, metrics = self._certificates[name], self._parts.metrics
            if outcome is Reload.REFUSED:
                metrics.count_certificate_reload(name, "refused")
                log.error("certificate refused, the old one stays", listener=name, problem=source.problem)
            else:
                metrics.count_certificate_reload(name, "reloaded")
                log.info("certificate reloaded", listener=name, not_after=source.not_after.isoformat())
            metrics.show_certificate(name, source.not_after)

        return tell

    @property
    def ready_line(self) -> str:
        return f"ready https={self._tls.url} http={self._plain.url} extender={self._extender.url}"

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
    """One pair for both TLS listeners, each with its own idea of who may call."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        cert, key = settings.tls_cert, settings.tls_key
    else:
        made = make_dev_certificates(DEV_CERTIFICATES, now=utc_now())
        cert, key = made.cert, made.key
        log.warning("serving with development certificates", directory=str(DEV_CERTIFICATES))
    return {
        "tls": CertificateSource(cert, key, clock=utc_now, client_ca=settings.client_ca),
        "extender": CertificateSource(cert, key, clock=utc_now, client_ca=settings.extender_client_ca),
    }


def warn_if_open(settings: Settings) -> None:
    """Embedded, nobody is asked who he is: on loopback that is fine."""
    try:
        is_loopback = settings.host == "localhost" or ip_address(settings.host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        log.warning("everyone who reaches this server may use all of it", host=settings.host)


@asynccontextmanager
async def pod_facts(settings: Settings, parts: Parts) -> AsyncIterator[PodFacts]:
    """Who is asked whether a pod exists."""
    if settings.is_embedded:
        yield parts.pods
        return
    from webhook.cluster import ApiPods, connected  # the client takes half a second to import

    log.warning("reservations are kept in memory: they end with this process")
    async with await connected(settings) as api:
        yield ApiPods(api)


async def every(interval: float, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval)
        await step()


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
