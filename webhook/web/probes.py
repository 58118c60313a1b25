"""The plain HTTP listener of a process that only serves probes and metrics."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from webhook.runtime.http.listener import Listener
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics
from webhook.web.app import probes_app
from webhook.web.health import Health, Stage


class Probes:
    """Live from the start, ready after `begin`."""

    def __init__(self, settings: Settings, health: Health | None = None) -> None:
        self.metrics = Metrics()
        self._health = Health() if health is None else health
        self._grace = settings.drain_timeout.total_seconds()
        self._listener = Listener(probes_app(self._health, self.metrics), host=settings.host, port=settings.ui_port)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Probes"]:
        await self._listener.start()
        try:
            yield self
        finally:
            self._health.stage = Stage.DRAINING
            await self._listener.stop(self._grace)

    def begin(self) -> None:
        """Set the stage to serving and write the line `ready` to stdout."""
        self._health.stage = Stage.SERVING
        sys.stdout.write(f"ready http={self._listener.url}\n")
        sys.stdout.flush()
