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
TESTS = Path(__file__).parent
MEASURED = ("core", "admission", "ledger", "web")
LIBRARIES = ("hpack", "httpcore", "kubernetes", "urllib3")


def pytest_configure() -> None:
    """Rendering a traceback with rich takes a second."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.hookimpl(trylast=True)  # the plugin of hypothesis marks its tests first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Coverage doubles the time of a test, so it is measured only where the tests reach the packages in question.
    Random inputs do not count: the result would differ between runs."""
    for item in items:
        is_random = item.get_closest_marker("hypothesis") is not None
        if is_random or item.path.relative_to(TESTS).parts[0] not in MEASURED:
            item.add_marker("no_cover")


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
