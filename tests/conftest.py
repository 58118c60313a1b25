"""Fixtures for a server in one process (`ServerHarness`)."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.builders import Raw
from tests.simulated_time import SimulatedTimeLoop
from tests.web.harness import INVENTORY, Harness
from webhook.ledger.pods import PodFacts
from webhook.runtime.telemetry import SECRET_LOGGERS

Build = Callable[..., Awaitable[Harness]]


def pytest_configure() -> None:
    """Rendering a traceback with rich takes a second."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    is_simulated = item.get_closest_marker("simulated_time") is not None
    return {"loop": SimulatedTimeLoop if is_simulated else asyncio.new_event_loop}


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not search the thousands of collected tests."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collects no garbage while pytest parses a source file to show a failure. Python 3.11 cannot parse in a finalizer
    meanwhile, and asyncio does so to log the exception of a task: the whole run would end (cpython#106905)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    """Builds servers with other settings or another inventory, and closes them after the test."""
    houses: list[Harness] = []

    async def make(inventory: Raw = INVENTORY, facts: PodFacts | None = None, **settings: Any) -> Harness:
        houses.append(Harness(tmp_path, inventory, facts, **settings))
        return await houses[-1].start()

    yield make
    for harness in houses:
        await harness.close()


@pytest.fixture
async def harness(build: Build) -> Harness:
    return await build()


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """For tests that configure the log of this process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in SECRET_LOGGERS}
    configured = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    logging.captureWarnings(capture=False)
    structlog.configure(**configured)
