"""Whole processes with an API server: several on one directory, and the metrics of one."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from attrs import frozen

from tests.export.test_fleet import Fleet, Raw, serving

PATIENCE = 60.0
QUICK = {"LEASE_DURATION": "3s", "LEASE_RENEW_DEADLINE": "2s", "LEASE_RETRY_PERIOD": "200ms"}


class ElectingFleet(Fleet):
    """Has a Lease, and Nodes that can be read only while the test allows it."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: set[str] = set()
        self._lease: Raw = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/leases" in request.path:
            return await self._leased(request)
        if request.path.startswith("/api/v1/nodes/"):
            self.asked.add(request.path)
            await self.may_answer.wait()
        return await super().answer(request)

    async def _leased(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self._lease or {"message": "none"}, status=200 if self._lease else 404)
        body = await request.json()
        known = self._lease.get("metadata", {}).get("resourceVersion", "0")
        if request.method == "PUT" and body["metadata"]["resourceVersion"] != known:
            return web.json_response({"message": "conflict"}, status=409)
        metadata = {"name": "gpuid-leader", "resourceVersion": str(int(known) + 1)}
        self._lease = {"metadata": metadata, "spec": body["spec"]}
        return web.json_response(self._lease)


@frozen
class Replica:
    process: asyncio.subprocess.Process
    log: Path

    def logged(self, event: str) -> list[Any]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if line["event"] == event]

    async def get(self, path: str) -> httpx.Response:
        await until(lambda: self.logged("listening"))
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get(self.logged("listening")[0]["http"] + path)

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await self.get("/readyz")).status_code != 200:
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    async def said(self, line: str) -> None:
        """Waits until the metrics contain this line."""
        async with asyncio.timeout(PATIENCE):
            while line not in (await self.get("/metrics")).text:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def stopped(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_so():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)


@asynccontextmanager
async def replica(home: Path, name: str, **variables: str) -> AsyncIterator[Replica]:
    command = [sys.executable, "-m", "webhook.cli", "export", "--kubeconfig", str(home / "kubeconfig")]
    command += ["--host", "127.0.0.1", "--server-port", "0", "--outbox", str(home / "outbox")]
    own = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[2]), "CLUSTER_NAME": "prod", "POD_NAME": name}
    with (home / f"{name}.log").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=err, env={**own, **QUICK, **variables}
        )
    try:
        yield Replica(process, home / f"{name}.log")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("elects", ["true", "false"])
async def test_second_process_on_one_directory_is_ready_and_takes_over(tmp_path: Path, elects: str) -> None:
    """As in a rollout: the new process has to be ready before the old one is stopped."""
    async with (
        serving(ElectingFleet(2), tmp_path / "kubeconfig"),
        replica(tmp_path, "old", LEADER_ELECTION=elects) as old,
    ):
        await until(lambda: old.logged("exporting"))
        async with replica(tmp_path, "new", LEADER_ELECTION=elects) as new:
            await new.ready()
            assert not new.logged("exporting")
            assert await old.stopped() == 0
            await until(lambda: new.logged("exporting"))
            await new.ready()
            assert await new.stopped() == 0


async def test_elected_process_waits_for_the_outbox_and_can_be_stopped(tmp_path: Path) -> None:
    async with (
        serving(ElectingFleet(2), tmp_path / "kubeconfig"),
        replica(tmp_path, "old", LEADER_ELECTION="false") as old,
    ):
        await until(lambda: old.logged("exporting"))
        async with replica(tmp_path, "new", LEADER_ELECTION="true") as new:
            await until(lambda: new.logged("waiting for the outbox"))
            await new.ready()
            assert await new.stopped() == 0
            assert new.logged("the Lease is released")


async def test_metrics_of_a_process_show_its_queue(tmp_path: Path) -> None:
    fleet = ElectingFleet(3)
    fleet.may_answer.clear()
    async with (
        serving(fleet, tmp_path / "kubeconfig"),
        replica(tmp_path, "only", WORKERS="1", GPUWARDEN_EXPORT_HISTORY="false") as only,
    ):
        await until(lambda: fleet.asked)
        await only.said("gpuwarden_export_queue_depth 2.0")
        fleet.may_answer.set()
        await only.said('gpuid_export_success_total{exporter="stdout"} 3.0')
        await only.said("gpuwarden_export_queue_depth 0.0")
        await only.said('gpuwarden_export_outbox_batches{exporter="stdout"} 0.0')


async def test_unusable_outbox_directory_ends_the_start_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "outbox").touch()
    async with (
        serving(ElectingFleet(1), tmp_path / "kubeconfig"),
        replica(tmp_path, "only", LEADER_ELECTION="true") as only,
    ):
        async with asyncio.timeout(PATIENCE):
            assert await only.process.wait() == 2
        assert "the outbox cannot be kept in" in only.log.read_text()
