"""`attest` learns from its node's slice that it has to answer a challenge."""

import asyncio

import pytest

from tests.builders import Raw
from webhook.node.asked_challenges import AskedChallenges

LONG = 3600.0


def asking(after: str | None) -> Raw:
    notes = {} if after is None else {"annotations": {"gpuwarden.io/challenge-after": after}}
    return {"metadata": {"name": "gpuwarden-node-a-0", **notes}}


async def wakes(asked: AskedChallenges) -> bool:
    """Whether a long pause ends at once."""
    sleeping = asyncio.ensure_future(asked.sleep(LONG))
    for _ in range(5):
        await asyncio.sleep(0)
    found = sleeping.done()
    sleeping.cancel()
    return found


async def test_pause_ends_when_the_node_is_asked_and_not_for_other_changes() -> None:
    asked = AskedChallenges()
    assert not await wakes(asked)
    asked.replaced({"gpuwarden-node-a-0": asking(None)})
    assert not await wakes(asked)
    asked.changed(asking("2026-11-20T09:00:00Z"))
    assert await wakes(asked)
    asked.changed(asking("2026-11-20T09:00:00Z"))
    assert not await wakes(asked)
    asked.changed(asking("2026-11-20T09:00:01Z"))
    assert await wakes(asked)


@pytest.mark.simulated_time
async def test_pause_ends_by_itself() -> None:
    began = asyncio.get_running_loop().time()
    await AskedChallenges().sleep(LONG)
    assert asyncio.get_running_loop().time() - began >= LONG
