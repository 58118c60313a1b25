"""Lives of an outbox and of what is known of uses, each killed at another touch of its files, and the lives after them.

`python -m tests.export.killed DIRECTORY` prints a line of JSON for each: what was taken, and what the store has.
"""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from tests.export.records import NOW, batch, later
from webhook.export.delivery import Delivery
from webhook.export.outbox import opener
from webhook.export.records import Batch
from webhook.export.uses import GpuNames, OpenUses, UsePodFacts, UseRecorder

COUNT = 3
TOUCHES = ("open", "os.rename", "os.remove")
# No run has more file operations.
MOST = 200
ADD_USE = "INSERT INTO uses VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET until = COALESCE(until, excluded.until)"


class TableExporter:
    """A store with a key, in a file; each batch is one transaction."""

    name = "table"

    def __init__(self, file: Path) -> None:
        self._table = sqlite3.connect(file)
        self._table.execute("CREATE TABLE IF NOT EXISTS readings (id TEXT PRIMARY KEY)")
        self._table.execute("CREATE TABLE IF NOT EXISTS uses (id TEXT PRIMARY KEY, until TEXT)")

    async def export(self, batch: Batch) -> None:
        with self._table:
            for one in batch.readings:
                self._table.execute("INSERT OR IGNORE INTO readings VALUES (?)", [f"{one.node}/{one.uuid}"])
            for use in batch.uses:
                until = None if use.until is None else use.until.isoformat()
                self._table.execute(ADD_USE, [f"{use.reservation}/{use.gpu_uuid}", until])

    async def check(self) -> None: ...

    async def close(self) -> None:
        self._table.close()


class Cluster:
    """Reports all pods as existing."""

    async def pod(self, namespace: str, name: str, uid: str) -> UsePodFacts:
        return UsePodFacts("Job/train")

    def gpu(self, node: str, uuid: str) -> GpuNames:
        return GpuNames("1", "2")

    def evidence(self, node: str) -> str | None:
        return None


async def live(home: Path) -> None:
    """Takes batches that were not taken yet, and follows a reservation from its start to its end."""
    delivery = Delivery([TableExporter(home / "store")], opener(home / "outbox"), lambda: NOW)
    running = asyncio.create_task(delivery.run())
    said = (home / "said").open("a+")
    said.seek(0)
    for number in range(len(said.read().split()), COUNT):
        await delivery.take(batch(f"batch-{number}", gpus=2, node=f"node-{number}"))
        print(number, file=said, flush=True)
    is_over = False
    uses = UseRecorder(
        "prod", Cluster(), OpenUses(home / "outbox" / "uses"), delivery.take, lambda: later(is_over), lambda: True
    )
    for version, held in enumerate(({"GPU-1/0": HELD, "GPU-2/0": HELD}, {})):
        # A process killed after the end sees only the end when it restarts.
        if held and (home / "ended").exists():
            continue
        if not held:
            (home / "ended").touch()
        is_over = not held
        uses.gpu_nodes.changed(gpu_node(held, version))
        await uses.step()
    assert await delivery.drain(timedelta(seconds=20)) == 0
    await running


HELD = {
    "reservation": "r-1",
    "phase": "finalized",
    "namespace": "ml",
    "digest": "d",
    "pod": "train-0",
    "uid": "u-1",
    "since": "2026-01-01T00:00:00Z",
}


def gpu_node(held: Mapping[str, Any], version: int) -> dict[str, Any]:
    meta = {"name": "node-a", "resourceVersion": str(version + 1)}
    return {"metadata": meta, "spec": {"devices": []}, "status": {"held": dict(held)}}


def in_a_process(work: Callable[[], None]) -> int:
    """How the run ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def killed_at(touch: int, home: Path) -> bool:
    """Whether the run reached this file operation."""

    def work() -> None:
        left = touch

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            if event in TOUCHES and str(arguments[0]).startswith(str(home / "outbox")):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        asyncio.run(live(home))

    return os.WIFSIGNALED(in_a_process(work))


def main(directory: Path) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for touch in range(MOST):
        home = directory / str(touch)
        home.mkdir()
        was_killed = killed_at(touch, home)
        said = len((home / "said").read_text().split()) if (home / "said").exists() else 0
        code = in_a_process(lambda home=home: asyncio.run(live(home)))  # type: ignore[misc]
        table = sqlite3.connect(home / "store")
        readings = sorted(name for (name,) in table.execute("SELECT id FROM readings"))
        uses = sorted(table.execute("SELECT * FROM uses"))
        line = json.dumps({"touch": touch, "said": said, "code": code, "readings": readings, "uses": uses})
        print(line, flush=True)  # noqa: T201 - the parent reads it
        if not was_killed:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
