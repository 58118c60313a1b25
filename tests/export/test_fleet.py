"""The memory of the whole process with an API server that has many nodes of realistic size."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.export.smi import document, h100_host
from webhook.export.reading import annotation, node_gpus
from webhook.inventory.nvidia_smi import parse
from webhook.runtime.clock import utc_now

Raw = dict[str, Any]
NODES, GPUS = 1000, 8
# An idle process has 80.
MOST_MIB = 110
PATIENCE = 240.0
# Nodes list their images; pods and GPUNodes have managedFields.
IMAGES = [{"names": [f"registry.example.org/{'i' * 120}/{k}:latest"], "sizeBytes": k} for k in range(60)]
WRITTEN = [{"manager": "m", "fieldsV1": {f"f:{'k' * 20}-{k}": {} for k in range(60)}}]


class Fleet:
    """Creates its objects when they are read."""

    def __init__(self, nodes: int = NODES) -> None:
        self._nodes = nodes
        self._read = annotation(node_gpus(parse(document(h100_host())), "uid", "boot", utc_now()))

    def meta(self, name: str, **more: Any) -> Raw:
        return {"name": name, "uid": "uid", "resourceVersion": "7", "managedFields": WRITTEN, **more}

    def node(self, k: int) -> Raw:
        notes = {"gpuwarden.io/gpus": self._read.replace("GPU-", f"GPU-{k:06d}")}
        status = {"nodeInfo": {"bootID": "boot"}, "images": IMAGES}
        return {"metadata": self.meta(f"n-{k}", annotations=notes), "spec": {}, "status": status}

    def plugin(self, k: int) -> Raw:
        spec = {"nodeName": f"n-{k}", "containers": [{"name": "c", "env": IMAGES}]}
        status = {"phase": "Running", "containerStatuses": [{"ready": True}]}
        return {"metadata": self.meta(f"p-{k}", namespace="gpu-operator"), "spec": spec, "status": status}

    def gpu_node(self, k: int) -> Raw:
        uuids = [f"GPU-{k:06d}-{number}" for number in range(GPUS)]
        entry = {"reservation": f"r-{k}", "phase": "finalized", "namespace": "ml", "digest": "d" * 64, "pod": f"t-{k}"}
        held = {f"{uuid}/0": {**entry, "uid": "uid", "since": "2026-01-01T00:00:00Z"} for uuid in uuids}
        devices = [
            {"uuid": uuid, "index": number, "model": "H100", "serial": f"{1_320_000_000_000 + GPUS * k + number}"}
            for number, uuid in enumerate(uuids)
        ]
        return {"metadata": self.meta(f"n-{k}"), "spec": {"devices": devices}, "status": {"held": held}}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind, _, name = request.path.removeprefix("/api/v1/").rpartition("/")
        if kind == "nodes":
            return web.json_response(self.node(int(name.removeprefix("n-"))))
        if kind == "namespaces/ml/pods":
            return web.json_response({"metadata": self.meta(name, namespace="ml"), "spec": {}})
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
            return response
        made = {"nodes": self.node, "pods": self.plugin, "gpunodes": self.gpu_node}.get(name)
        first = int(request.query.get("continue", 0))
        last = min(first + int(request.query["limit"]), self._nodes) if made else 0
        items = [made(k) for k in range(first, last)] if made else []
        rest = {} if last in (0, self._nodes) else {"continue": str(last)}
        return web.json_response(
            {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "7", **rest}, "items": items}
        )


@asynccontextmanager
async def serving(fleet: Fleet, kubeconfig: Path) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fleet.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = {"name": "c", "cluster": {"server": "http://{}:{}".format(*runner.addresses[0])}}
    context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    user = {"name": "c", "user": {}}
    content = {"clusters": [server], "contexts": [context], "users": [user], "current-context": "c"}
    kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **content}))
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.skipif(sys.platform != "linux", reason="how much memory a process had at most is read from /proc")
async def test_memory_stays_small_with_a_large_fleet_and_its_uses(tmp_path: Path) -> None:
    flags = [
        "--cluster-name",
        "prod",
        "--qps",
        "100000",
        "--burst",
        "100000",
        "--host",
        "127.0.0.1",
        "--server-port",
        "0",
    ]
    async with asyncio.timeout(PATIENCE), serving(Fleet(), tmp_path / "kubeconfig"):
        with (tmp_path / "stderr").open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "webhook.cli", "export", "--kubeconfig", str(tmp_path / "kubeconfig"), *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env={"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
        assert process.stdout is not None
        readings, uses = 0, 0
        try:
            while readings < NODES * GPUS or uses < NODES * GPUS:
                line = await process.stdout.readline()
                assert line, (tmp_path / "stderr").read_text()[-3000:]
                readings += b'"gpu serial number reading"' in line
                uses += b'"gpu use"' in line
            status = Path(f"/proc/{process.pid}/status").read_text()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    peak = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    assert (readings, uses) == (NODES * GPUS, NODES * GPUS)
    assert peak < MOST_MIB
