"""The data for hints comes from background watches; startup waits for them for a limited time."""

import asyncio
import time

import pytest

from tests.builders import NOW
from webhook.core.fleet import Fleet
from webhook.core.hints import Advice
from webhook.runtime.telemetry import Metrics
from webhook.scoring import ScoreRequest
from webhook.scoring.hints import HintService


class SilentScorer:
    async def advise(self, question: ScoreRequest, *, patience: float) -> Advice:
        raise AssertionError("nobody asks")

    async def close(self) -> None:
        """Has nothing to close."""


class FakeWatch:
    """A watch that gets its list, never does, or ends."""

    def __init__(self, *, is_ready: bool = False, ends: bool = False) -> None:
        self.ready = asyncio.Event()
        self.is_ready, self.ends = is_ready, ends

    async def run(self) -> None:
        if self.is_ready:
            self.ready.set()
        if self.ends:
            raise RuntimeError("a bug")
        await asyncio.Event().wait()


def hinting(*watches: FakeWatch) -> HintService:
    return HintService(SilentScorer(), Fleet(), lambda: NOW, Metrics(), watches=watches)


async def test_wait_until_ready_ends_with_all_watches_or_the_time_limit() -> None:
    for watches, patience in (
        ((FakeWatch(is_ready=True), FakeWatch(is_ready=True)), 30.0),
        ((FakeWatch(),), 0.05),
        ((), 30.0),
    ):
        one = hinting(*watches)
        running = asyncio.ensure_future(one.run())
        started = time.monotonic()
        await one.wait_until_ready(patience)
        assert time.monotonic() - started < 10
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_watch_that_ends_raises() -> None:
    with pytest.raises(ExceptionGroup):
        await hinting(FakeWatch(ends=True)).run()
