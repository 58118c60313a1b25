"""The CPU time of an idle `gpuwarden serve`: with the example's inventory, a kubelet's probes and scrapes of the
metrics."""

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

from bench.figures import Target
from bench.servers import ROOT, Running, gpuwarden

Raw = dict[str, Any]

# As in the chart.
READY_EVERY, ALIVE_EVERY, SCRAPED_EVERY = 5.0, 10.0, 30.0
# Time for imports and first reads.
SETTLED_AFTER = 3.0


@frozen
class Plan:
    """How long to measure."""

    seconds: float = 60.0


SHORT = Plan(seconds=15.0)


def run(plan: Plan) -> Raw:
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        inventory = ROOT / "examples" / "inventory.yaml"
        with gpuwarden(directory, "--inventory", inventory) as server:
            time.sleep(SETTLED_AFTER)
            used, took = probed(server, plan.seconds)
            return {
                "seconds": round(took, 1),
                "rss_mib": round(server.memory_mib("VmRSS"), 1),
                "peak_mib": round(server.memory_mib("VmHWM"), 1),
                "core_percent": round(100 * used / took, 2),
            }


def probed(server: Running, seconds: float) -> tuple[float, float]:
    """The CPU seconds used, and the elapsed seconds."""
    begun, before = time.monotonic(), server.cpu_seconds()
    paths = {"/readyz": READY_EVERY, "/healthz": ALIVE_EVERY, "/metrics": SCRAPED_EVERY}
    due = dict.fromkeys(paths, begun)
    with httpx.Client(base_url=server.plain_url, trust_env=False) as client:
        while (now := time.monotonic()) < begun + seconds:
            for path in [path for path, at in due.items() if at <= now]:
                client.get(path).raise_for_status()
                due[path] += paths[path]
            time.sleep(max(0.0, min(*due.values(), begun + seconds) - time.monotonic()))
    return server.cpu_seconds() - before, time.monotonic() - begun


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    return [
        Target("RSS while idle", found["rss_mib"], 120 * slack, " MiB"),
        Target("of a core while idle", found["core_percent"], 2 * slack, " %"),
    ]


def lines(found: Raw) -> list[str]:
    return [
        f"RSS {found['rss_mib']} MiB (peak {found['peak_mib']} MiB) and {found['core_percent']} % of a core over "
        f"{found['seconds']} s, with the example's inventory, probes and a scrape.",
    ]
