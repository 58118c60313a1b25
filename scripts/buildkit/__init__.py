"""Checks a Dockerfile with BuildKit's parser, linter and .dockerignore as libraries, without a builder."""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from scripts.controlplane.build import binaries

HERE: Final = Path(__file__).resolve().parent


def said_of(directory: Path, **arguments: str) -> dict[str, Any]:
    """The result of `docker build --check`, and the files that would be sent to a builder."""
    given = [f"{name}={value}" for name, value in arguments.items()]
    command = [str(binaries(HERE) / "dockerfile-check"), str(directory), *given]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    return said
