"""The machine on which the figures were measured."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from bench import go

PARTS = ("hypercorn", "starlette", "uvloop", "h11", "h2", "msgspec", "jsonpatch")


def description() -> dict[str, str]:
    """The machine, the system and relevant versions."""
    path = go.find()
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": row(Path("/proc/cpuinfo"), "model name"),
        "memory": f"{int(row(Path('/proc/meminfo'), 'MemTotal').split()[0]) / 2**20:.1f} GiB",
        "load_before": " ".join(f"{one:.2f}" for one in os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "go": go.version(path) if path else "none",
        "commit": commit(),
        **{part: version(part) for part in PARTS},
    }


def row(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def commit() -> str:
    """The measured commit, with `changed` if the tree differs from it."""
    words = ["git", "describe", "--always", "--dirty=, changed"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
