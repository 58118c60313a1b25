"""`gpuwarden reconcile`: any number of processes may run; the elected leader acts."""

import asyncio

import structlog

from webhook.assembly.reconciler import reconciler_parts
from webhook.kube.client import ApiClient, connect
from webhook.kube.election import run_while_elected
from webhook.runtime.process import run_passes, run_until, stop_signal
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.web.probes import Probes

log = structlog.get_logger(__name__)

LEASE = "gpuwarden-reconcile"
# The longest pause between two passes.
PAUSE = 0.5


async def reconcile(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. A process that is not the leader watches too, so it can take over at once."""
    configure_logging(settings.log_level)
    stop = stop_signal()
    async with await connect(settings) as api, Probes(settings).listening() as probes:
        await run_until(stop, work(settings, api, probes))
    log.info("stopped")


async def work(settings: Settings, api: ApiClient, probes: Probes) -> None:
    parts = reconciler_parts(settings, api, probes.metrics)
    async with asyncio.TaskGroup() as tasks:
        for watch in (*parts.watches, *parts.optional_watches):
            tasks.create_task(watch.run())
        tasks.create_task(parts.events.run())
        for watch in parts.watches:
            await watch.ready.wait()
        log.info("watching", reservations=len(parts.ledger.reservations()))
        probes.begin()

        async def lead() -> None:
            for begin in parts.begin:
                begin()
            async with asyncio.TaskGroup() as leading:
                for one in parts.passes:
                    leading.create_task(run_passes(one.steps, one.wakeup, interval=PAUSE, debounce=one.debounce))

        await run_while_elected(settings, api, LEASE, lead, parts.ledger.finish_writes)
