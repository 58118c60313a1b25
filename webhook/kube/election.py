"""Leader election with a Lease: one of several processes acts, the others stand by."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final

import structlog
from kubernetes.aio import client

from webhook.kube.lease import Candidate, LeaseTerms
from webhook.kube.requests import RateLimit, RateLimitedClient
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings

log = structlog.get_logger(__name__)

TERMS: Final = LeaseTerms(timedelta(seconds=15), timedelta(seconds=10), timedelta(seconds=2))
# Requests per second; an election needs far fewer.
RATE, BURST = 10.0, 10
# Libraries sometimes swallow a cancellation, so a task that continues is cancelled again at this interval.
CANCEL_INTERVAL = 0.5
# Time to finish writes and release the Lease after a stop signal.
RELEASE_TIMEOUT = 5.0

Lead = Callable[[], Awaitable[None]]
FinishWrites = Callable[[], Awaitable[object]]


async def run_while_elected(
    settings: Settings, api: client.ApiClient, lease: str, lead: Lead, finish_writes: FinishWrites
) -> None:
    """Waits to be elected, runs `lead` until the Lease is lost, and starts again. Losing the API server loses the
    Lease.

    `lead` is cancelled when the Lease is lost or this function is cancelled. In the second case the Lease is released
    once `finish_writes` returns, which waits for the writes that `lead` has begun.
    """
    now = asyncio.get_running_loop().time
    calls = RateLimitedClient(api, RateLimit(RATE, BURST, now))
    pod = f"{socket.gethostname()}-{os.getpid()}"
    candidate = Candidate(calls, settings.lease_namespace, lease, pod, TERMS, utc_now, now)
    while True:
        await candidate.win()
        await lead_once(candidate, lead, finish_writes)


async def lead_once(candidate: Candidate, lead: Lead, finish_writes: FinishWrites) -> None:
    """Runs `lead` until the Lease is lost. Nothing of `lead` runs after it returns. If `lead` ends by itself, which is
    a bug, the Lease is not renewed, and the function returns after others could have taken it."""
    leading, holding = asyncio.ensure_future(lead()), asyncio.ensure_future(candidate.hold())
    try:
        await asyncio.wait((leading, holding), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cancel_until_done(leading, holding)
        await release_lease(candidate, finish_writes)
        raise
    is_lost = holding.done()
    await cancel_until_done(leading, holding)
    if is_lost:
        log.warning("leadership lost")
        holding.result()
        return
    log.error("the leader's task has ended", exc_info=None if leading.cancelled() else leading.exception())
    await asyncio.sleep((candidate.left + 2 * candidate.terms.retry_period).total_seconds())


async def release_lease(candidate: Candidate, finish_writes: FinishWrites) -> None:
    """Releases the Lease after the last write was answered, so that another process can take it at once. If that takes
    too long, the Lease expires."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT):
            await finish_writes()
            await candidate.release()
    except TimeoutError:
        log.warning("the Lease is not released and will expire", identity=candidate.identity)


async def cancel_until_done(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels the tasks, again and again until they are done: libraries can swallow a cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_INTERVAL)
