"""The Go program in `floor/`: built into the user's cache, run as server and as client."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.servers import BenchError

SOURCE = Path(__file__).resolve().parent / "floor"
CACHE = Path.home() / ".cache" / "gpuwarden" / "bench"
BUILD_LIMIT = 900.0  # Kubernetes' client libraries take minutes to compile on two cores


def find() -> str | None:
    return shutil.which("go")


def binary_path() -> Path:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()) if path.is_file()))
    return CACHE / f"floor-{digest.hexdigest()[:16]}"


def is_built() -> bool:
    return binary_path().exists()


def build(go: str) -> Path:
    """The program, rebuilt if its source has changed."""
    binary = binary_path()
    if not binary.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = output([go, "build", "-buildvcs=false", "-o", binary, "."], SOURCE, BUILD_LIMIT)
        if not binary.exists():
            raise BenchError(f"go build produced no binary: {made}")
    return binary


def version(go: str) -> str:
    return output([go, "version"], SOURCE, 30).strip().removeprefix("go version ")


def floor_version() -> str:
    """The version of controller-runtime."""
    words = (SOURCE / "go.mod").read_text().split()
    return words[words.index("sigs.k8s.io/controller-runtime") + 1]


def load(binary: Path, directory: Path, *options: str | Path, limit: float = 120) -> dict[str, Any]:
    """The report of one round of the client."""
    report: dict[str, Any] = json.loads(output([binary, "load", *options], directory, limit))
    return report


def output(command: Sequence[str | Path], directory: Path, limit: float) -> str:
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=directory, timeout=limit, check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as exc:
        raise BenchError(f"{Path(command[0]).name} failed: {exc.stderr.strip()[-500:]}") from exc
    except subprocess.TimeoutExpired as exc:
        raise BenchError(f"{Path(command[0]).name} took longer than {limit:.0f} s") from exc
    return done.stdout
