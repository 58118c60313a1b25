"""Fixtures for a server in one process (`ServerHarness`)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import Raw
from tests.web.harness import INVENTORY, Harness
from webhook.ledger.pods import PodFacts

Build = Callable[..., Awaitable[Harness]]


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
