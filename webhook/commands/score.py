"""`gpuwarden score`: a small scorer. It selects the smallest sufficient model with a free GPU, and a tenant's priority.

Any other server with `POST /v1/score` can replace it.
"""

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import structlog
from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from webhook.admission.parts import FleetSource
from webhook.core.fleet import Fleet
from webhook.core.keys import GPU_TYPE_LABELS
from webhook.runtime.http.listener import Listener
from webhook.runtime.process import cancel_and_wait, stop_signal
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics, configure_logging
from webhook.web.app import scorer_app
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.health import Health, Stage

log = structlog.get_logger(__name__)

DEFAULT_SCORE = 50.0
# The maximum age of the count of free GPUs, because a count iterates over every GPU.
COUNT_SECONDS = 1.0
MEMORY = re.compile(r"([0-9]{1,7})\s*(Gi?B?|Mi?B?)?\s*", re.IGNORECASE)
MEMORY_IN_NAME = re.compile(r"(?:^|[-_ ])([0-9]{1,5})\s*GB?(?:$|[-_ ])", re.IGNORECASE)

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Names = Annotated[list[str], msgspec.Meta(max_length=10_000)]


class FeaturesWire(msgspec.Struct, frozen=True):
    tenant: str = "default"
    gpu_mem_gb: Annotated[float, msgspec.Meta(ge=0)] | None = None


class QuestionWire(msgspec.Struct, frozen=True):
    """The members of a question that are read; there may be others."""

    job_type: Name
    candidate_gpu_types: Names
    features: FeaturesWire = msgspec.field(default_factory=FeaturesWire)
    colocated_job_types: Names = []


@frozen
class ModelStock:
    """GPUs of one model: the number of free ones, and the gigabytes of each."""

    free: int
    memory: float


class ModelStocks:
    """The stock of each model, by the labels of the nodes."""

    def __init__(self, fleet: Fleet, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._monotonic = monotonic
        self._counted_at = float("-inf")
        self._stocks: Mapping[str, ModelStock] = {}

    def by_model(self) -> Mapping[str, ModelStock]:
        if self._monotonic() - self._counted_at >= COUNT_SECONDS:
            self._stocks, self._counted_at = self._counted(), self._monotonic()
        return self._stocks

    def _counted(self) -> Mapping[str, ModelStock]:
        """Counts the GPUs that a pod without a map can get, on ready nodes that are not cordoned."""
        free = Counter[str]()
        memory: dict[str, float] = {}
        for indexed in self._fleet.indexed_nodes.values():
            for model in {indexed.labels[key] for key in GPU_TYPE_LABELS if key in indexed.labels}:
                takes_pods = indexed.node.is_ready and not indexed.node.is_cordoned
                for device in indexed.node.devices:
                    free[model] += takes_pods and self._fleet.is_offered(device)
                    size = gigabytes(device.memory) or memory_in(model)
                    memory[model] = min(memory.get(model, size), size)
        return {model: ModelStock(free[model], memory[model]) for model in memory}


def gigabytes(text: str) -> float:
    read = MEMORY.fullmatch(text)
    if read is None:
        return 0.0
    amount, unit = float(read[1]), (read[2] or "G").upper()
    return amount if unit.startswith("G") else amount / 1024


def memory_in(model: str) -> float:
    """From a model's name, such as A100-80GB."""
    read = MEMORY_IN_NAME.search(model)
    return float(read[1]) if read else 0.0


def answer(question: QuestionWire, stocks: Mapping[str, ModelStock], priorities: Mapping[str, float]) -> dict[str, Any]:
    features = question.features
    model = best_fit(question.candidate_gpu_types, features.gpu_mem_gb or 0.0, stocks)
    stock = stocks.get(model, ModelStock(0, memory_in(model)))
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return {
        "priority_score": priorities.get(features.tenant, DEFAULT_SCORE),
        "gpu_selector": {"nodeSelector": {GPU_TYPE_LABELS[0]: model}, "tolerations": [toleration]},
        "avoid_co_locate_with": [],
        "terms": {"chosen_gpu": model, "free": stock.free, "memory_gb": stock.memory},
    }


def best_fit(candidates: list[str], needed: float, stocks: Mapping[str, ModelStock]) -> str:
    """The smallest sufficient model that is free, so that large ones stay free; else a sufficient one, else the
    largest."""

    def rank(model: str) -> tuple[bool, bool, float, int, str]:
        stock = stocks.get(model, ModelStock(0, memory_in(model)))
        suffices = stock.memory >= needed
        return (not suffices, not stock.free, stock.memory if suffices else -stock.memory, -stock.free, model)

    return min(candidates, key=rank)


class Scoring:
    """The route."""

    def __init__(self, stocks: ModelStocks, priorities: Mapping[str, float], health: Health) -> None:
        self._stocks = stocks
        self._priorities = priorities
        self._health = health
        self._decoder = msgspec.json.Decoder(QuestionWire)

    async def score(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the scorer is {self._health.stage}")
        try:
            question = self._decoder.decode(await read_body(request))
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            return error(422, f"the question cannot be read: {str(exc)[:200]}")
        if not question.candidate_gpu_types:
            return error(400, "candidate_gpu_types is empty")
        body = msgspec.json.encode(answer(question, self._stocks.by_model(), self._priorities))
        return Response(body, media_type="application/json")


def app_of(fleet: Fleet, priorities: Mapping[str, float], health: Health, metrics: Metrics) -> ASGIApp:
    return scorer_app(Scoring(ModelStocks(fleet), priorities, health).score, health, metrics)


async def score(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT."""
    from webhook.assembly.serving import watched_fleet

    configure_logging(settings.log_level)
    stop = stop_signal()
    async with watched_fleet(settings) as parts:
        health = Health()
        app = app_of(parts.fleet, settings.tenant_priorities, health, parts.metrics)
        listener = Listener(app, host=settings.host, port=settings.ui_port)
        await listener.start()
        background = asyncio.ensure_future(fed(settings, parts.fleet_source, health, listener.url))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({background, stopping}, return_when=asyncio.FIRST_COMPLETED)
        health.stage = Stage.DRAINING
        await listener.stop(settings.drain_timeout.total_seconds())
        await cancel_and_wait([background, stopping])
        if not background.cancelled():
            background.result()
    log.info("stopped")


async def fed(settings: Settings, fleet_source: FleetSource, health: Health, url: str) -> None:
    """Loads the fleet, reports that the process is ready, and keeps the fleet current."""
    await fleet_source.load()
    health.stage = Stage.SERVING
    sys.stdout.write(f"ready http={url}\n")
    sys.stdout.flush()
    await fleet_source.run(settings.reload_interval.total_seconds())
