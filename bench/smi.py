"""The CPU time to parse nvidia-smi's output for a host: 8 GPUs with about 900 lines each."""

import time
from typing import Any

from attrs import frozen

from bench.figures import Target, percentile, typical
from tests.export.smi import document, h100_host
from webhook.inventory.nvidia_smi import parse

Raw = dict[str, Any]
LIMIT_MS = 5.0


@frozen
class Plan:
    """The number of repetitions."""

    rounds: int = 9
    reads: int = 50


SHORT = Plan(rounds=3, reads=30)


def run(plan: Plan) -> Raw:
    content = document(h100_host())
    rounds = [[timed(content) for _ in range(plan.reads)] for _ in range(plan.rounds)]
    shares = {"p50": 0.5, "p99": 0.99}
    found = {name: round(typical([percentile(one, share) for one in rounds]), 2) for name, share in shares.items()}
    return {"kib": len(content) // 1024, "lines": content.count(b"\n"), "parse_ms": found}


def timed(content: bytes) -> float:
    """In milliseconds."""
    started = time.thread_time()
    parse(content)
    return 1e3 * (time.thread_time() - started)


def targets(found: Raw, slack: float) -> list[Target]:
    return [Target("8 GPUs of nvidia-smi read, median", found["parse_ms"]["p50"], LIMIT_MS * slack, " ms")]


def lines(found: Raw) -> list[str]:
    one = found["parse_ms"]
    return [
        "| KiB | lines | p50 ms | p99 ms |",
        "|---|---|---|---|",
        f"| {found['kib']} | {found['lines']} | {one['p50']} | {one['p99']} |",
    ]
