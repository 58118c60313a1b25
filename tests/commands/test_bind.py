"""The process around the binder: whose pods it serves, and what its health says."""

import asyncio
from typing import Any

import httpx
import pytest

from webhook.commands.bind import SchedulerHealth, leading
from webhook.runtime import settings
from webhook.runtime.settings import SettingsError
from webhook.runtime.telemetry import Metrics
from webhook.web.app import probes_app
from webhook.web.health import Stage


@pytest.mark.parametrize(
    ("flags", "environ", "names"),
    [
        ({}, {}, ("gpu-scheduler",)),
        ({"scheduler_name": "one, two,one"}, {}, ("one", "two")),
        ({}, {"SCHEDULER_NAME": "old-name"}, ("old-name",)),
        ({}, {"SCHEDULER_NAME": "old-name", "GPUWARDEN_SCHEDULER_NAME": "new"}, ("new",)),
    ],
    ids=str,
)
def test_whose_pods_are_served(flags: dict[str, str], environ: dict[str, str], names: tuple[str, ...]) -> None:
    assert settings.load(flags, environ).scheduler_name == names


@pytest.mark.parametrize("text", ["Upper", "a,,b", "a b", "-a"])
def test_what_is_no_name_of_a_scheduler_is_said(text: str) -> None:
    with pytest.raises(SettingsError, match="is not the name of a scheduler"):
        settings.load({"scheduler_name": text}, {})


@pytest.mark.defect("S1-10")
async def test_health_in_the_older_schedulers_words_and_true() -> None:
    health = SchedulerHealth()
    app = probes_app(health, Metrics())

    async def status(path: str) -> tuple[int, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            got = await client.get(path)
            return got.status_code, got.json()

    assert await status("/ready") == (503, {"status": "starting", "service": "gpu-scheduler"})
    health.stage = Stage.SERVING
    for path in ("/ready", "/readyz"):
        assert await status(path) == (200, {"status": "ready", "service": "gpu-scheduler"})
    health.is_sound = lambda: False
    assert await status("/ready") == (503, {"status": "cut off", "service": "gpu-scheduler"})
    assert await status("/health") == (200, {"status": "healthy", "service": "gpu-scheduler"})


async def test_a_pass_that_fails_ends_nothing_and_the_end_stops_what_is_under_way() -> None:
    class Failing:
        steps = 0
        is_stopped = False

        async def step(self) -> None:
            self.steps += 1
            if self.steps == 2:
                second.set()
            raise RuntimeError("a bug")

        def stop(self) -> None:
            self.is_stopped = True

    second, failing = asyncio.Event(), Failing()
    task = asyncio.create_task(leading(failing, asyncio.Event()))
    async with asyncio.timeout(30):
        await second.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert failing.is_stopped
