"""Signals, control loops and memory settings of a process."""

import asyncio
import subprocess
import sys

import pytest

from webhook.runtime.process import run_concurrently, run_pass, run_passes


async def test_failed_pass_does_not_end_the_loop() -> None:
    class Failing:
        steps = 0

        async def step(self) -> None:
            self.steps += 1
            raise RuntimeError("a bug")

    failing = Failing()
    for _ in range(2):
        await run_pass(failing)
    assert failing.steps == 2


async def test_failed_action_is_raised_when_no_other_action_is_running() -> None:
    ended = []

    async def action(number: int) -> None:
        if number == 1:
            raise RuntimeError("a bug")
        await asyncio.sleep(0)
        ended.append(number)

    with pytest.raises(RuntimeError, match="a bug"):
        await run_concurrently(map(action, range(6)), at_once=3)
    assert ended == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("turns", range(8))
async def test_cancellation_is_not_lost_when_a_change_arrives_at_the_same_time(turns: int) -> None:
    class Nothing:
        async def step(self) -> None:
            return None

    changed = asyncio.Event()
    task = asyncio.create_task(run_passes([Nothing()], changed, interval=30, debounce=0.001))
    for _ in range(20):  # until it waits for a change
        await asyncio.sleep(0)
    changed.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=1)
    task.cancel()
    assert done


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has this setting")
def test_freed_large_blocks_are_returned_to_the_system() -> None:
    """In a separate process, because the setting of the allocator cannot be undone."""
    script = """
from pathlib import Path
from webhook.runtime.process import return_freed_memory
return_freed_memory()
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
