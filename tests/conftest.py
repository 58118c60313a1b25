"""Fixtures for a server in one process (`House`)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import Raw
from tests.web.house import INVENTORY, House
from webhook.ledger.pods import PodFacts

Build = Callable[..., Awaitable[House]]


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    """Builds servers with other settings or another inventory, and closes them after the test."""
    houses: list[House] = []

    async def make(inventory: Raw = INVENTORY, facts: PodFacts | None = None, **settings: Any) -> House:
        houses.append(House(tmp_path, inventory, facts, **settings))
        return await houses[-1].start()

    yield make
    for house in houses:
        await house.close()


@pytest.fixture
async def house(build: Build) -> House:
    return await build()
