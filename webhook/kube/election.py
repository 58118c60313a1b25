"""One of several processes is elected by a Lease and acts; the others stand by."""

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
# Far more requests a second than standing and renewing take.
RATE, BURST = 10.0, 10
# A task that was cancelled and goes on is cancelled again this often: libraries lose the word now and then.
INSISTENCE = 0.5
# Whoever is told to stop has this long for what is under way, and to give the Lease back.
FAREWELL = 5.0

Lead = Callable[[], Awaitable[None]]
Rest = Callable[[], Awaitable[object]]


async def run_while_elected(settings: Settings, api: client.ApiClient, lease: str, lead: Lead, rest: Rest) -> None:
    """Be elected, lead until the Lease is lost, and stand again. An API server that is away ends a leadership too.

    `lead` runs for ever and is cancelled when the Lease is lost, or when this is: then the Lease is given back, once
    `rest` says that nothing is under way any more that `lead` has begun.
    """
    now = asyncio.get_running_loop().time
    calls = RateLimitedClient(api, RateLimit(RATE, BURST, now))
    pod = f"{socket.gethostname()}-{os.getpid()}"
    candidate = Candidate(calls, settings.lease_namespace, lease, pod, TERMS, utc_now, now)
    while True:
        await candidate.win()
        await lead_once(candidate, lead, rest)


async def lead_once(candidate: Candidate, lead: Lead, rest: Rest) -> None:
    """Until the Lease is lost; nothing of `lead` goes on after it. If `lead` ends by itself, which it never should, the
    Lease is renewed no more, and others have had the time to take it when this returns."""
    leading, holding = asyncio.ensure_future(lead()), asyncio.ensure_future(candidate.hold())
    try:
        await asyncio.wait((leading, holding), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await cancel_and_wait(leading, holding)
        await release_lease(candidate, rest)
        raise
    is_lost = holding.done()
    await cancel_and_wait(leading, holding)
    if is_lost:
        log.warning("no longer leading")
        holding.result()
        return
    log.error("leading has ended by itself", exc_info=None if leading.cancelled() else leading.exception())
    await asyncio.sleep((candidate.left + 2 * candidate.terms.retry_period).total_seconds())


async def release_lease(candidate: Candidate, rest: Rest) -> None:
    """Another may have it at once: not before the last write has been answered. A Lease that is not given back in time
    ends by itself."""
    try:
        async with asyncio.timeout(FAREWELL):
            await rest()
            await candidate.release()
    except TimeoutError:
        log.warning("the Lease is left to end by itself", identity=candidate.identity)


async def cancel_and_wait(*tasks: "asyncio.Future[Any]") -> None:
    """Cancelled, and over."""
    while going_on := [task for task in tasks if not task.done()]:
        for task in going_on:
            task.cancel()
        await asyncio.wait(going_on, timeout=INSISTENCE)
