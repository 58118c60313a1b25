"""What processes have in common."""

import asyncio
import subprocess
import sys

import pytest

from webhook.runtime.process import run_pass, run_passes


async def test_a_pass_that_fails_does_not_end_the_passes() -> None:
    class Failing:
        steps = 0

        async def step(self) -> None:
            self.steps += 1
            raise RuntimeError("a bug")

    failing = Failing()
    for _ in range(2):
        await run_pass(failing)
    assert failing.steps == 2


@pytest.mark.parametrize("turns", range(8))
async def test_the_end_of_a_leadership_is_not_lost_in_the_news(turns: int) -> None:
    class Nothing:
        async def step(self) -> None:
            return None

    news = asyncio.Event()
    task = asyncio.create_task(run_passes([Nothing()], news, interval=30, debounce=0.001))
    for _ in range(20):  # until it rests
        await asyncio.sleep(0)
    news.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=1)
    task.cancel()
    assert done


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps memory in that way")
def test_large_blocks_go_back_when_they_are_freed() -> None:
    """In a process of its own: how a process gets memory cannot be taken back."""
    script = """
from pathlib import Path
from webhook.runtime.process import hand_back_memory
hand_back_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [bytearray(b"x") * 1_600_000 for _ in range(40)]
del blocks
before = resident()
blocks = [bytearray(b"x") * 1_600_000 for _ in range(40)]
pinned = [bytearray(b"y") * 200_000 for _ in range(40)]
del blocks
print(resident() - before < 16_000_000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
