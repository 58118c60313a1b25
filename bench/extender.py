"""How long `POST /filter` takes for 5,000 nodes: from the body to the answer, without the network.

Each of ten hashes is proven by a tenth of the nodes, and a third of the GPUs is reserved. Pods require a hash, a hash
and GPUs, or also have a node selector; some have no claim. The last line is the same with whole Node objects of 5 kB
instead of names, for comparison; it has no target. Times are CPU times, as in `decision`.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

from bench.figures import Target, percentile, typical
from bench.requests import post
from webhook.admission.parts import Parts
from webhook.assembly.parts import embedded
from webhook.core.device import Device, DeviceUuid, Node, Slot
from webhook.core.evidence import Evidence
from webhook.core.reservation import Reservation, ReservationId
from webhook.runtime.clock import utc_now
from webhook.runtime.http.budgets import Budgets
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.scheduler.extender import Extender
from webhook.web.callers import CallerGate
from webhook.web.extender import ExtenderRoutes
from webhook.web.health import Health, Stage

Raw = dict[str, Any]

NODES, GPUS, HASHES = 5_000, 8, 10
HELD = 1 / 3
LIMIT_MS = 10.0


@frozen
class Plan:
    """The size of the measurement."""

    rounds: int = 7
    pods: int = 200
    objects: int = 10


SHORT = Plan(rounds=3, pods=100, objects=3)


def filled(rng: random.Random) -> Parts:
    parts, now = embedded(Settings(), utc_now), utc_now()
    for number in range(NODES):
        name = f"node-{number}"
        devices = tuple(
            Device(DeviceUuid(f"GPU-{number}-{k}"), index=k, labels=frozenset({f"model=m{number % 3}"}))
            for k in range(GPUS)
        )
        parts.fleet.put(Node(name, {"zone": f"z{number % 4}", "kubernetes.io/hostname": name}, devices), now)
        parts.fleet.set_evidence(name, Evidence(name, f"sha256:{number % HASHES:02}", "static"), now)
        for device in devices:
            if rng.random() < HELD:
                id_ = ReservationId(device.uuid)
                parts.fleet.hold(Reservation(id_, "ml", "digest", name, (Slot(device.uuid, 0),), now, None))
    return parts


def asking(gpus: int = 0, zone: str | None = None, *, with_hash: bool = True) -> Raw:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    meta = {"name": "train-0", "namespace": "ml", "uid": "u"}
    if with_hash:
        meta |= {"annotations": {"gpuwarden.io/required-hash": "sha256:03,sha256:07"}}  # type: ignore[dict-item]
    spec: Raw = {"containers": [{"name": "main", "image": "x", "resources": resources}]}
    if zone is not None:
        spec["nodeSelector"] = {"zone": zone}
    return {"metadata": meta, "spec": spec, "status": {}}


KINDS: Mapping[str, Raw] = {
    "a hash": asking(),
    "a hash and GPUs": asking(2),
    "a hash, GPUs, a node selector": asking(2, "z1"),
    "no claim": asking(with_hash=False),
}


def bodies(rng: random.Random) -> dict[str, bytes]:
    names = [f"node-{number}" for number in range(NODES)]
    rng.shuffle(names)
    return {kind: msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names}) for kind, pod in KINDS.items()}


def body_of_objects() -> bytes:
    filler = {f"annotation-{k}": "x" * 100 for k in range(40)}
    items = [{"metadata": {"name": f"node-{n}", "annotations": filler}, "spec": {}, "status": {}} for n in range(NODES)]
    return msgspec.json.encode({"Pod": asking(2), "Nodes": {"metadata": {}, "items": items}, "NodeNames": None})


async def timed(routes: ExtenderRoutes, budgets: Budgets, body: bytes) -> float:
    """In milliseconds."""
    started = time.thread_time()
    await post(routes.filter, budgets, body)
    return 1e3 * (time.thread_time() - started)


async def measured(plan: Plan) -> Raw:
    rng = random.Random(7)  # noqa: S311 - the same fleet each time, not a secret
    parts, health = filled(rng), Health()
    health.stage = Stage.SERVING
    routes = ExtenderRoutes(Extender(parts, None), parts.metrics, health, CallerGate(utc_now))
    by_kind, budgets = bodies(rng), Budgets()
    found: dict[str, list[list[float]]] = {kind: [] for kind in by_kind}
    for _ in range(plan.rounds):
        for kind, body in by_kind.items():
            found[kind].append([await timed(routes, budgets, body) for _ in range(plan.pods)])
    whole = body_of_objects()
    objects = [[await timed(routes, budgets, whole) for _ in range(plan.objects)] for _ in range(plan.rounds)]
    return {
        "nodes": NODES,
        "filter_ms": {kind: spread(rounds) for kind, rounds in found.items()},
        "objects_mib": round(len(whole) / 2**20, 1),
        "filter_objects_ms": spread(objects),
    }


def spread(rounds: list[list[float]]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(typical([percentile(one, share) for one in rounds]), 2) for name, share in shares.items()}


def run(plan: Plan) -> Raw:
    configure_logging("error")
    return asyncio.run(measured(plan))


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    worst = max(one["p99"] for one in found["filter_ms"].values())
    return [Target(f"filter of {found['nodes']:,} names, p99", worst, LIMIT_MS * slack, " ms")]


def lines(found: Raw) -> list[str]:
    head = ["| pods that ask for | filter p50 | p99 | max |", "|---|---:|---:|---:|"]
    kinds = {**found["filter_ms"], f"the second, {found['objects_mib']} MiB of objects": found["filter_objects_ms"]}
    return head + [f"| {kind} | {one['p50']} ms | {one['p99']} ms | {one['max']} ms |" for kind, one in kinds.items()]
