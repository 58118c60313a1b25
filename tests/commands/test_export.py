"""The parts of the exporting process that need no cluster."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.export.smi import Card, dead, document, gb200_tray
from tests.export.test_reader import plugin_pod
from tests.running import refusing
from webhook.commands.export import NodesView, StoreHealth, evidence_hash, node_facts, time_to_drain
from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.measured import ExportMetrics
from webhook.export.nodes import trim_node
from webhook.export.reader import parse_pod, trim_pod
from webhook.web.callers import Guard
from webhook.web.health import Stage
from webhook.web.routes import application, get


class Store:
    def __init__(self) -> None:
        self.problem: str | None = None
        self.asked = 0

    async def check(self) -> None:
        self.asked += 1
        if self.problem is not None:
            raise ExportError(self.problem)


@pytest.mark.defect("gpuid-15")
async def test_readiness_follows_the_stores() -> None:
    store = Store()
    health = StoreHealth(store.check, every=0.0)
    app = application(ExportMetrics(), get("/readyz", health.ready, Guard.OPEN))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/readyz")).status_code == 503
        health.stage = Stage.SERVING
        assert (await client.get("/readyz")).status_code == 200
        store.problem = "postgres: the database is down"
        found = await client.get("/readyz")
        assert (found.status_code, found.json()["problem"]) == (503, "postgres: the database is down")
        store.problem = None
        assert (await client.get("/readyz")).status_code == 200


async def test_frequent_readiness_requests_cause_few_calls_of_the_stores() -> None:
    store = Store()
    health = StoreHealth(store.check, every=3600.0)
    health.stage = Stage.SERVING
    app = application(ExportMetrics(), get("/readyz", health.ready, Guard.OPEN))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        replies = await asyncio.gather(*(client.get("/readyz") for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200}
    assert store.asked == 1


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        pytest.param(60, 20, id="no longer than a Pod has to end"),
        pytest.param(15, 14, id="a second before another may have the Lease"),
        pytest.param(0.5, 0, id="too late"),
        pytest.param(0, 0, id="lost"),
    ],
)
def test_last_write_ends_before_another_replica_can_take_the_lease(left: float, seconds: float) -> None:
    assert time_to_drain(timedelta(seconds=left)) == timedelta(seconds=seconds)


def test_a_reading_prints_one_line_for_each_gpu_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "smi.xml").write_bytes(document([*gb200_tray(), dead(Card(4))]))
    done = refusing(tmp_path, "export", "--smi-file", "smi.xml", "--cluster", "C", "--node", "N", "--machine", "M")
    assert done.returncode == 0
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["gpu"] for one in found] == [card.serial for card in gb200_tray()]
    for one in found:
        assert {"cluster": "C", "node": "N", "machine": "M", "chassis": "1820000000042"}.items() <= one.items()
        assert one["source"] == "smi.xml"
        assert one["time"].endswith("Z")
    assert len({one["uuid"] for one in found}) == 4
    assert "no record of 00000004:01:00.0" in done.stderr


NAMED = ["--cluster", "C", "--node", "N"]


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (
            ["--smi-file", "nowhere", *NAMED],
            1,
            "export: the file 'nowhere' cannot be read: No such file or directory\n",
        ),
        (["--smi-file", "", *NAMED], 1, "export: the file '' cannot be read: Is a directory\n"),
        (["--smi-file", "bad.xml", "--cluster", "C", "--node", "N"], 1, "it is truncated"),
        (["--smi-file", "bad.xml", "--node", "N"], 2, "CLUSTER_NAME"),
        (["--smi-file", "bad.xml", "--cluster", "C"], 2, "--node"),
        (["--cluster", "C", "--node", "N"], 2, "only with --smi-file"),
        (["--cluster", "C"], 2, "this process is not in a Pod"),
    ],
)
def test_export_of_a_file_reports_mistakes_and_prints_nothing(
    tmp_path: Path, flags: list[str], code: int, text: str
) -> None:
    (tmp_path / "bad.xml").write_bytes(document(gb200_tray())[:5000])
    done = refusing(tmp_path, "export", *flags)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_relevant_fields_of_a_node_and_of_its_evidence() -> None:
    info = {"nodeInfo": {"bootID": "b"}}
    raw = {"metadata": {"name": "n", "annotations": {"gpuwarden.io/gpus": "{}"}}, "status": info}
    assert node_facts(raw).boot == "b"
    with pytest.raises(GpuwardenError):
        node_facts({"metadata": {"name": "n", "labels": 3}})
    entry = {"hash": "sha256:aa", "banned": False, "conflict": False}
    assert evidence_hash({"metadata": {"name": "n"}, "status": {"sources": {"static": entry}}}) == "sha256:aa"
    assert evidence_hash({"metadata": {"name": "n"}}) is None


@pytest.mark.parametrize(
    "raw",
    [
        plugin_pod(),
        plugin_pod(phase="Pending"),
        plugin_pod(containerStatuses=[{"ready": True}, {"ready": False}]),
        plugin_pod(containerStatuses=None),
        {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": []}},
        {**plugin_pod(), "metadata": {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
)
def test_only_the_needed_fields_of_a_pod_in_a_list_are_kept(raw: dict[str, Any]) -> None:
    assert parse_pod(trim_pod(raw)) == parse_pod(raw)


@pytest.mark.parametrize(
    "more", [{}, {"status": None}, {"status": {"nodeInfo": {"bootID": "b"}, "images": [{"names": ["i"]}]}, "spec": {}}]
)
@pytest.mark.parametrize("notes", [None, {"gpuwarden.io/gpus": "{}", "other": "long"}])
def test_only_the_needed_fields_of_a_node_in_a_list_are_kept(
    notes: dict[str, str] | None, more: dict[str, Any]
) -> None:
    raw = {"metadata": {"name": "n", "resourceVersion": "7", "annotations": notes}, **more}
    kept = trim_node(raw)
    assert node_facts(kept) == node_facts(raw)
    assert (kept["metadata"]["name"], kept["metadata"]["resourceVersion"]) == ("n", "7")
    assert "long" not in str(kept)
    assert "images" not in str(kept)


class NobodyReads:
    def booted(self, node: str, boot: str | None) -> None: ...

    def forget_node(self, node: str) -> None: ...


def node_with(text: str, version: int) -> dict[str, Any]:
    metadata = {"name": "n", "resourceVersion": str(version), "annotations": {"gpuwarden.io/gpus": text}}
    return {"metadata": metadata}


def test_annotation_of_a_node_is_parsed_once_for_all_its_gpus() -> None:
    def said(serial: str) -> str:
        gpus = [{"index": 0, "uuid": "GPU-0", "serial": serial}, {"index": 1, "uuid": "GPU-1"}]
        return json.dumps({"time": "2026-01-01T00:00:00Z", "gpus": gpus})

    view = NodesView(NobodyReads())
    assert view.gpu("n", "GPU-0") is None
    view.changed(node_with(said("1"), 1))
    first = view.gpu("n", "GPU-0")
    assert first is not None
    assert first.serial == "1"
    view.changed(node_with(said("1"), 2))
    assert view.gpu("n", "GPU-0") is first
    assert view.gpu("n", "GPU-2") is None
    view.changed(node_with(said("2"), 3))
    assert getattr(view.gpu("n", "GPU-0"), "serial", None) == "2"
    view.changed(node_with("{", 4))
    assert view.gpu("n", "GPU-0") is None
    view.changed(node_with(said("2"), 5))
    view.deleted(node_with(said("2"), 6))
    assert view.gpu("n", "GPU-0") is None
