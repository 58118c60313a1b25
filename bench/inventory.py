"""Generates an inventory document of any size: mixed like real fleets, and equal each time."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

Raw = dict[str, Any]

GPUS_PER_NODE = 8
HASHES = tuple(f"sha256:{number:064x}" for number in range(0xA0, 0xA6))
ZONES = ("eu-1a", "eu-1b", "eu-1c")
TEAM_TAINT = {"key": "dedicated", "value": "research", "effect": "NoSchedule"}
# Long ago, so that it is stale by any clock.
STALE_SINCE = "2020-01-01T00:00:00Z"
NODES_PER_RACK = 16


class Model(NamedTuple):
    """One GPU model and its share of the fleet."""

    name: str
    memory: str
    weight: int


MODELS = (Model("h100", "80g", 4), Model("a100", "80g", 3), Model("a100", "40g", 2), Model("l40s", "48g", 2))


def document(gpus: int) -> Raw:
    """The inventory of a fleet with this number of GPUs."""
    rng = random.Random(gpus)  # noqa: S311 - the same fleet each time, not a secret
    return {"nodes": list(nodes(gpus, rng))}


def nodes(gpus: int, rng: random.Random) -> Iterator[Raw]:
    for number in range(-(-gpus // GPUS_PER_NODE)):
        size = min(GPUS_PER_NODE, gpus - number * GPUS_PER_NODE)
        yield node(number, size, rng)


def node(number: int, size: int, rng: random.Random) -> Raw:
    (model,) = rng.choices(MODELS, [one.weight for one in MODELS])
    raw: Raw = {
        "name": f"gpu-node-{number:05d}",
        "labels": node_labels(number, model, rng),
        "devices": [device(number, index, model) for index in range(size)],
    }
    evidence = combined_evidence(number, rng)
    if evidence is not None:
        raw["evidence"] = evidence
    return raw | conditions(rng)


def node_labels(number: int, model: Model, rng: random.Random) -> dict[str, str]:
    return {
        "topology.kubernetes.io/zone": rng.choice(ZONES),
        "topology.example/rack": f"rack-{number // NODES_PER_RACK:04d}",
        "node.kubernetes.io/instance-type": f"{model.name}-{model.memory}-x8",
        "pool": rng.choice(("training", "training", "inference")),
    }


def device(number: int, index: int, model: Model) -> Raw:
    return {
        "uuid": f"GPU-{number:08x}-0000-4000-8000-{index:012x}",
        "index": index,
        "model": model.name.upper(),
        "memory": model.memory,
        "serial": str(1_650_000_000 + number * GPUS_PER_NODE + index),
        "labels": [f"model={model.name}", f"memory={model.memory}", f"fudo.org/gpu.memory-{model.memory}"],
    }


def combined_evidence(number: int, rng: random.Random) -> Raw | None:
    """Nine in ten nodes have fresh evidence; half of the others have expired evidence."""
    if number == 0 or rng.random() < 0.9:
        return {"hash": rng.choice(HASHES)}
    if rng.random() < 0.5:
        return {"hash": rng.choice(HASHES), "until": STALE_SINCE}
    return None


def conditions(rng: random.Random) -> Raw:
    drawn = rng.random()
    if drawn < 0.03:
        return {"unschedulable": True}
    if drawn < 0.04:
        return {"ready": False}
    if drawn < 0.08:
        return {"taints": [TEAM_TAINT]}
    return {}
