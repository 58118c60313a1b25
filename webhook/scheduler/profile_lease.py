"""Whether a kube-scheduler works, by its Lease. Its own health is 200 while it waits for the Lease, and even if it may
not read it. Any holder counts: of several Pods, one schedules.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from webhook.kube.client import ApiClient
from webhook.kube.lease import LEASE, LeaseClient
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError, RateLimit, RateLimitedClient
from webhook.runtime.settings import Settings

# kube-scheduler's default interval between renewals.
LOOKS_EVERY: Final = 2.0
LEASE_DURATION: Final = 15.0
TIMEOUT: Final = 5.0
RATE, BURST = 1.0, 2


class SchedulerLease:
    """The Lease of a kube-scheduler. Its renewals are timed on our own clock."""

    def __init__(self, calls: LeaseClient, namespace: str, name: str, now: Callable[[], float]) -> None:
        self._call = calls.call
        self._where = {"namespace": namespace, "name": name}
        self._now = now
        self._holder = ""
        self._renewal: str | None = None
        self._lasts = LEASE_DURATION
        self._renewed = float("-inf")
        self._trouble = ""

    def problem(self) -> str:
        """Why no pod is scheduled; empty if a scheduler works. The first renewal that is read does not
        count: its holder may be gone."""
        if self._holder and self._now() - self._renewed <= self._lasts:
            return ""
        what = "is not renewed" if self._holder else "is held by no kube-scheduler"
        return f"the Lease {'/'.join(self._where.values())} {what}" + (f": {self._trouble}" if self._trouble else "")

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOKS_EVERY)

    async def look(self) -> None:
        try:
            raw = await self._call("GET", LEASE, self._where)
        except (ApiUnavailableError, ApiRefusesError) as exc:
            self._trouble = str(exc)
            return
        spec = (raw or {}).get("spec") or {}
        self._trouble = ""
        self._holder = str(spec.get("holderIdentity") or "")
        self._lasts = float(spec.get("leaseDurationSeconds") or LEASE_DURATION)
        renewal = f"{self._holder} {spec.get('renewTime')}"
        if self._renewal is not None and renewal != self._renewal:
            self._renewed = self._now()
        self._renewal = renewal


def scheduler_lease(settings: Settings, api: ApiClient) -> SchedulerLease:
    now = asyncio.get_running_loop().time
    calls = RateLimitedClient(api, RateLimit(RATE, BURST, now), longest=TIMEOUT)
    return SchedulerLease(calls, settings.lease_namespace, settings.scheduler_lease, now)
