"""Closes the proof devices of this node that have ended, also while no `reconcile` runs.

An ended device that is open attracts pods, and the API server refuses to allocate it each time. `reconcile` closes it
as well, or writes a later end before, so here the slices are read again only a moment after the next end.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final

import structlog
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.paths import RESOURCE_SLICES_PATH
from webhook.kube.requests import RateLimitedClient
from webhook.kube.resource_slices import close_ended, proof_devices_of, slice_count, slice_name
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

SLICE_PATH: Final = RESOURCE_SLICES_PATH + "/{name}"
# A node has at most a few hundred GPUs.
MAX_SLICES: Final = 16
# After an end: the clock of the API server may be behind, and many nodes may end together.
MARGIN: Final = timedelta(seconds=2)
# Without a device that will end, and the longest pause in any case: an end may come nearer.
LOOK_INTERVAL: Final = timedelta(minutes=1)
LONGEST_PAUSE: Final = timedelta(minutes=10)
JITTER: Final = (1.0, 1.2)
BACKOFF: Final = Backoff(MARGIN, LOOK_INTERVAL, jitter=JITTER)

Sleep = Callable[[float], Awaitable[object]]


@frozen
class NodeSlices:
    """The slices with proof devices of one node, in the API server."""

    node: str
    client: RateLimitedClient

    async def read(self) -> list[Raw]:
        """Raises ApiUnavailableError or ApiRefusesError."""
        found: list[Raw] = []
        while len(found) < (min(slice_count(found[0]), MAX_SLICES) if found else 1):
            raw = await self.client.call("GET", SLICE_PATH, {"name": slice_name(self.node, len(found))})
            if raw is None:
                break
            found.append(raw)
        return found

    async def replace(self, raw: Raw) -> None:
        """Raises ApiUnavailableError or ApiRefusesError."""
        await self.client.call("PUT", SLICE_PATH, {"name": raw["metadata"]["name"]}, raw)


@frozen(eq=False)
class DeviceCloser:
    """Closes the devices of one node."""

    slices: NodeSlices
    clock: Clock

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Runs forever. Logs a problem when it starts and when it changes."""
        failures, known = 0, ""
        while True:
            try:
                pause = (await self.step()).total_seconds()
            except GpuwardenError as exc:
                failures += 1
                pause = BACKOFF.seconds(failures)
                if str(exc) != known:
                    log.warning("ended proof devices not closed", node=self.slices.node, problem=str(exc))
                known = str(exc)
            else:
                failures, known = 0, ""
            await sleep(pause)

    async def step(self) -> timedelta:
        """Closes the devices that have ended. Returns when to look again. Raises GpuwardenError."""
        ends: list[datetime] = []
        for raw in await self.slices.read():
            now = self.clock()
            if names := close_ended(raw, now):
                await self.slices.replace(raw)
                log.info("ended proof devices closed", node=self.slices.node, devices=names)
            ends += [one.end for one in proof_devices_of(raw) if one.end is not None and not one.is_closed]
        if not ends:
            return timedelta(seconds=BACKOFF.jittered(LOOK_INTERVAL))
        return min(min(ends) - self.clock() + MARGIN * random.uniform(1, 2), LONGEST_PAUSE)  # noqa: S311 - jitter
