"""Fixtures for a server in one process (`ServerHarness`)."""

import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.builders import Raw
from tests.web.harness import INVENTORY, Harness
from webhook.ledger.pods import PodFacts

Build = Callable[..., Awaitable[Harness]]
LIBRARIES = ("hpack", "httpcore", "kubernetes", "urllib3")


def pytest_configure() -> None:
    """Rendering a traceback with rich takes a second."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not search the thousands of collected tests."""
    gc.freeze()


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
    levels = {name: logging.getLogger(name).level for name in LIBRARIES}
    configured = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    logging.captureWarnings(capture=False)
    structlog.configure(**configured)
