"""Our own scorer: the tightest fit of what is free, priority by tenant, errors as scorers are known to have them."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from tests.builders import NOW, Raw
from tests.running import GPUWARDEN, started
from webhook.commands.score import ModelStock, ModelStocks, app_of, best_fit, gigabytes, memory_in
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.runtime.telemetry import Metrics
from webhook.scoring.client import DECODER
from webhook.web.health import Health, Stage


def node(name: str, model: str, memory: str, healthy: int, broken: int = 0) -> Node:
    devices = tuple(
        Device(DeviceUuid(f"GPU-{name}-{k}"), memory=memory, is_healthy=k < healthy) for k in range(healthy + broken)
    )
    return Node(name, {"gpu.nvidia.com/class": model}, devices)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.put(node("a", "A100-80GB", "80Gi", 4), NOW)
    fleet.put(node("b", "A100-40GB", "40Gi", 2), NOW)
    fleet.put(node("c", "L4-24GB", "24Gi", 0, broken=8), NOW)
    return fleet


@pytest.fixture
def health() -> Health:
    health = Health()
    health.stage = Stage.SERVING
    return health


@pytest.fixture
async def http(fleet: Fleet, health: Health) -> AsyncIterator[httpx.AsyncClient]:
    app = app_of(fleet, {"team-a": 95, "team-b": 12.5}, health, Metrics())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://scorer") as client:
        yield client


def question(candidates: list[str], memory: float | None = None, tenant: str = "team-a") -> Raw:
    features: Raw = {"job_type": "train", "tenant": tenant}
    if memory is not None:
        features["gpu_mem_gb"] = memory
    return {"job_type": "train", "features": features, "candidate_gpu_types": candidates, "colocated_job_types": []}


EVERY = ["A100-80GB", "A100-40GB", "L4-24GB"]


@pytest.mark.parametrize(
    ("candidates", "memory", "chosen"),
    [
        pytest.param(EVERY, 40.0, "A100-40GB", id="tightest"),
        pytest.param(EVERY, 41.0, "A100-80GB", id="larger"),
        pytest.param(EVERY, 10.0, "A100-40GB", id="the-smallest-is-not-free"),
        pytest.param(["L4-24GB"], 10.0, "L4-24GB", id="the-only-one"),
        pytest.param(EVERY, 500.0, "A100-80GB", id="none-suffices"),
        pytest.param(["H100-80GB", "B200-192GB"], 100.0, "B200-192GB", id="unknown-here-but-named-by-size"),
    ],
)
async def test_tightest_fit_of_the_free_gpus_is_chosen(
    http: httpx.AsyncClient, candidates: list[str], memory: float, chosen: str
) -> None:
    reply = await http.post("/v1/score", json=question(candidates, memory))
    assert reply.status_code == 200
    assert reply.json()["gpu_selector"] == {
        "nodeSelector": {"gpu.nvidia.com/class": chosen},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    assert DECODER.decode(reply.content).advice().chosen_gpu == chosen


async def test_gpus_that_no_pod_can_get_are_not_free() -> None:
    """On a node that is not ready, on one that is cordoned, or kept for a placement map."""
    fleet = Fleet()
    fleet.put(evolve(node("dead", "L4-24GB", "24Gi", 8), is_ready=False), NOW)
    fleet.put(evolve(node("cordoned", "T4-16GB", "16Gi", 8), is_cordoned=True), NOW)
    fleet.put(node("mapped", "A30-24GB", "24Gi", 2), NOW)
    fleet.put(node("open", "A100-40GB", "40Gi", 1), NOW)
    fleet.set_aside({"mapped": {"GPU-mapped-0": MapOwner("2026-01-01", SetId("set", "ml"))}}, ["mapped"])
    stocks = ModelStocks(fleet).by_model()
    assert {model: stock.free for model, stock in stocks.items()} == {
        "L4-24GB": 0,
        "T4-16GB": 0,
        "A30-24GB": 1,
        "A100-40GB": 1,
    }
    assert best_fit(["L4-24GB", "T4-16GB", "A100-40GB"], 10.0, stocks) == "A100-40GB"


@pytest.mark.parametrize(("tenant", "score"), [("team-a", 95), ("team-b", 12.5), ("nobody", 50)])
async def test_priority_is_that_of_the_tenant(http: httpx.AsyncClient, tenant: str, score: float) -> None:
    reply = await http.post("/v1/score", json=question(EVERY, tenant=tenant))
    assert reply.json()["priority_score"] == score


async def test_no_candidates_are_a_bad_request(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/score", json=question([]))).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"job_type": 1, "candidate_gpu_types": []}',
        '{"job_type": "a", "candidate_gpu_types": "b"}',
    ],
)
async def test_request_of_another_form_is_unprocessable(http: httpx.AsyncClient, body: str) -> None:
    assert (await http.post("/v1/score", content=body)).status_code == 422


async def test_scorer_is_not_ready_before_the_first_list(http: httpx.AsyncClient, health: Health) -> None:
    health.stage = Stage.STARTING
    assert (await http.post("/v1/score", json=question(EVERY))).status_code == 503
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).status_code == 503


def test_free_gpus_are_counted_again_after_an_interval(fleet: Fleet) -> None:
    now = [0.0]
    stocks = ModelStocks(fleet, lambda: now[0])
    assert stocks.by_model()["L4-24GB"] == ModelStock(0, 24.0)
    fleet.put(node("c", "L4-24GB", "24Gi", 8), NOW)
    assert stocks.by_model()["L4-24GB"].free == 0
    now[0] = 1.0
    assert stocks.by_model()["L4-24GB"].free == 8
    assert best_fit(EVERY, 10.0, stocks.by_model()) == "L4-24GB"


@pytest.mark.parametrize(("text", "size"), [("80Gi", 80), ("80 GB", 80), ("81559 MiB", 79.6), ("", 0), ("much", 0)])
def test_memory_is_parsed_as_inventories_write_it(text: str, size: float) -> None:
    assert gigabytes(text) == pytest.approx(size, abs=0.1)


@pytest.mark.parametrize(("name", "size"), [("A100-80GB", 80), ("NVIDIA-L4-24G", 24), ("H100", 0), ("T4-16GBX", 0)])
def test_memory_is_parsed_from_the_name_of_a_model(name: str, size: float) -> None:
    assert memory_in(name) == size


def test_the_command_serves_an_inventory_and_ends_on_a_signal(tmp_path: Path) -> None:
    inventory: dict[str, Any] = {
        "nodes": [
            {
                "name": "a",
                "labels": {"nvidia.com/gpu.product": "L4"},
                "devices": [{"uuid": "GPU-1", "memory": "24Gi"}],
            }
        ]
    }
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    config = tmp_path / "config.yaml"
    config.write_text("inventory: inventory.json\ntenantPriorities: {team-a: 91}\n")
    command = [GPUWARDEN, "score", "--config", str(config), "--ui-port", "0"]
    with started(command, tmp_path) as running:
        reply = httpx.post(f"{running.urls['http']}/v1/score", json=question(["L4"], 8.0), trust_env=False)
        assert (reply.json()["priority_score"], reply.json()["terms"]["free"]) == (91, 1)
        code, _, log = running.stop()
    assert (code, '"event":"stopped"' in log) == (0, True)
