"""The custom resource definitions."""

from importlib import resources
from typing import Any

import yaml

Manifest = dict[str, Any]


def texts() -> list[str]:
    """Every CRD as shipped, with comments."""
    folder = resources.files("webhook.kube.install") / "manifests"
    return [path.read_text() for path in sorted(folder.iterdir(), key=str) if path.name.endswith(".yaml")]


def manifests() -> list[Manifest]:
    return [yaml.safe_load(text) for text in texts()]


def as_yaml() -> str:
    """All CRDs as YAML documents."""
    return "---\n".join(texts())
