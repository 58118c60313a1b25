"""How much memory `gpuwarden serve` needs for 100,000 GPUs, and how soon it is ready."""

import random
import tempfile
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

from bench.figures import Target, typical
from bench.pods import Asker, create_review, stream
from bench.servers import MIB, ROOT, Running, gpuwarden, write_inventory

Raw = dict[str, Any]

GPUS = 100_000


@frozen
class Plan:
    """The size of the measurement."""

    starts: int = 5
    reviews: int = 2_000


SHORT = Plan(starts=2, reviews=300)


def run(plan: Plan) -> Raw:
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        small = [ready_after(directory) for _ in range(plan.starts + 1)][1:]  # the first start creates certificates
        inventory = write_inventory(directory, GPUS)
        with gpuwarden(directory, "--inventory", inventory) as server:
            at_ready = footprint(server)
            admitted = review(server, plan.reviews)
            after = footprint(server)
            large = server.seconds_to_ready
        return {
            "gpus": GPUS,
            "inventory_mib": round(inventory.stat().st_size / MIB**2, 1),
            "at_ready": at_ready,
            "reviews": plan.reviews,
            "admitted": admitted,
            "after_reviews": after,
            "ready_s_default_inventory": round(typical(small), 3),
            "ready_s_default_inventory_each": [round(one, 3) for one in small],
            "ready_s_100000": round(large, 3),
        }


def ready_after(directory: Path) -> float:
    with gpuwarden(directory, "--inventory", ROOT / "examples" / "inventory.yaml") as server:
        return server.seconds_to_ready


def footprint(server: Running) -> dict[str, float]:
    return {"rss_mib": round(server.memory_mib("VmRSS"), 1), "peak_mib": round(server.memory_mib("VmHWM"), 1)}


def review(server: Running, count: int) -> int:
    """Sends this number of pods of all kinds. Returns how many were admitted."""
    names = [f"gpu-node-{number:05d}" for number in range(GPUS // 8)]
    pods = stream(Asker(names, random.Random(1)), count)  # noqa: S311 - the same pods each time, not a secret
    admitted = 0
    with httpx.Client(base_url=server.url, verify=str(server.ca), timeout=30) as client:
        for number, (_, raw) in enumerate(pods):
            body = create_review(raw, f"00000000-0000-4000-8000-{number:012d}")
            admitted += client.post("/mutate", json=body).raise_for_status().json()["response"]["allowed"]
    return admitted


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    return [
        Target("RSS with 100,000 GPUs at ready", found["at_ready"]["rss_mib"], 250 * slack, " MiB"),
        Target("RSS after the reviews", found["after_reviews"]["rss_mib"], 250 * slack, " MiB"),
        Target("start to ready, default inventory", found["ready_s_default_inventory"], 2 * slack, " s"),
    ]


def lines(found: Raw) -> list[str]:
    return [
        "| | RSS | peak |",
        "|---|---:|---:|",
        f"| at ready | {found['at_ready']['rss_mib']} MiB | {found['at_ready']['peak_mib']} MiB |",
        f"| after {found['reviews']:,} reviews | {found['after_reviews']['rss_mib']} MiB "
        f"| {found['after_reviews']['peak_mib']} MiB |",
        "",
        f"From exec to the `ready` line: {found['ready_s_default_inventory']} s with the default inventory, "
        f"{found['ready_s_100000']} s with {found['gpus']:,} GPUs ({found['inventory_mib']} MiB of JSON).",
    ]
