"""What processes have in common."""

import asyncio

import pytest

from webhook.process import one_pass, passes


async def test_a_pass_that_fails_does_not_end_the_passes() -> None:
    class Failing:
        steps = 0

        async def step(self) -> None:
            self.steps += 1
            raise RuntimeError("a bug")

    failing = Failing()
    for _ in range(2):
        await one_pass(failing)
    assert failing.steps == 2


@pytest.mark.parametrize("turns", range(8))
async def test_the_end_of_a_leadership_is_not_lost_in_the_news(turns: int) -> None:
    class Nothing:
        async def step(self) -> None:
            return None

    news = asyncio.Event()
    task = asyncio.create_task(passes([Nothing()], news, pause=30, breath=0.001))
    for _ in range(20):  # until it rests
        await asyncio.sleep(0)
    news.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=1)
    task.cancel()
    assert done
