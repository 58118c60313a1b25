"""The controllers of a real cert-manager, built like the control plane, for the cluster of one test."""

import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from scripts.controlplane.build import binaries

HERE: Final = Path(__file__).resolve().parent


def crds() -> list[dict[str, Any]]:
    """The CRDs of this version."""
    return [one for file in sorted((binaries(HERE) / "crds").glob("*.yaml")) for one in documents(file)]


def documents(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def started(kubeconfig: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the controllers as this user. The CRDs have to exist. The caller stops the process."""
    command = [str(binaries(HERE) / "cert-manager"), f"--kubeconfig={kubeconfig}"]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
