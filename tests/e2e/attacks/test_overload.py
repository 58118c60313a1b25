"""Floods of large bodies. `serve` stays small, and others are answered.

Needs no control plane: `serve` is a process, the attackers are another on loopback, bounded in number and time.
"""

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.attacks.flood import head, review
from tests.running import Running, serving

INVENTORY = {"nodes": [{"name": "node-0", "devices": [{"uuid": f"GPU-{k}"} for k in range(64)]}]}
SECONDS = 8.0
MOST_RSS = 300  # MiB; the unfixed server took 1,175
AT_ONCE = 1.0  # seconds for a small honest review; the unfixed server took 13.8


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path, INVENTORY, ["--log-level", "error"]) as process:
        yield process


@contextmanager
def attacked(running: Running, attack: str, number: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.e2e.attacks.flood", str(running.port)]
    ca = str(running.directory / "certs/dev/ca.crt")
    with subprocess.Popen([*command, ca, attack, str(number)], stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def rss(running: Running) -> int:
    """MiB that the process has in memory."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) // 1024


async def asked(running: Running, trust: ssl.SSLContext, uid: str) -> tuple[float, int]:
    """How long a small review takes over a connection of its own, and the answer's status."""
    started = time.monotonic()
    body = review(uid)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=trust, server_hostname="localhost")
    try:
        writer.write(head(len(body)) + body)
        line = await reader.readline()
        return time.monotonic() - started, int(line.split()[1])
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("attack", "number", "lasts"),
    [
        ("unfinished", 300, 3 * SECONDS),  # connections that are refused come again and again
        ("unfinished-small", 300, SECONDS),
        ("large", 200, SECONDS),
        ("deep", 200, SECONDS),
    ],
)
async def test_a_flood_of_bodies_takes_little_memory_and_keeps_nobody_waiting(
    running: Running, attack: str, number: int, lasts: float
) -> None:
    most, took, statuses = 0, list[float](), set[int]()
    ends = time.monotonic() + lasts
    with attacked(running, attack, number):
        await asyncio.sleep(1.5)
        while time.monotonic() < ends or len(took) < 5:
            seconds, status = await asyncio.wait_for(asked(running, running.trust, f"honest-{len(took)}"), 60)
            took.append(seconds)
            statuses.add(status)
            most = max(most, rss(running))
            await asyncio.sleep(0.1)
    told = json.dumps({"RSS MiB": most, "reviews": len(took), "slowest": round(max(took), 2), "all": sorted(statuses)})
    assert statuses == {200}, told
    assert most < MOST_RSS, told
    assert sorted(took)[len(took) * 9 // 10] < AT_ONCE, told
    assert max(took) < 3 * AT_ONCE, told  # whatever else this machine does
