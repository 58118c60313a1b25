"""Renders the chart with helm, without a cluster."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.chart_values import CHART

HELM = str(Path(sys.executable).parent / "helm")
KUBERNETES = "1.36.0"
Raw = dict[str, Any]
CERT_MANAGER = "cert-manager.io/v1"
OPERATOR = ("monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule")
APIS = (CERT_MANAGER, *OPERATOR)

try:
    Loader: Any = yaml.CSafeLoader
except AttributeError:  # a PyYAML that was built without libyaml
    Loader = yaml.SafeLoader


def unfolded(values: Mapping[str, Any]) -> Raw:
    """Dotted names as a nested dict."""
    tree: Raw = {}
    for path, value in values.items():
        place = tree
        *above, last = path.split(".")
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return tree


def helm_template(
    values: Mapping[str, Any],
    *,
    release: str = "gpuwarden",
    namespace: str = "gpuwarden",
    apis: Sequence[str] = APIS,
    kubernetes: str = KUBERNETES,
    is_new: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Of an upgrade, or of a new installation, which needs one value more."""
    return known_template(json.dumps(unfolded(values)), release, namespace, tuple(apis), kubernetes, is_new=is_new)


@cache
def known_template(
    values: str, release: str, namespace: str, apis: tuple[str, ...], kubernetes: str, *, is_new: bool
) -> subprocess.CompletedProcess[str]:
    known = [flag for api in apis for flag in ("--api-versions", api)]
    known += [] if is_new else ["--is-upgrade"]
    command = [HELM, "template", release, str(CHART), "-n", namespace, "--kube-version", kubernetes, *known, "-f", "-"]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=60)


def rendered(values: Mapping[str, Any] | None = None, **options: Any) -> list[Raw]:
    """The objects in helm's order of installation."""
    done = helm_template(values or {}, **options)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, Loader) if one]


def refusal(values: Mapping[str, Any], **options: Any) -> str:
    """The error message."""
    done = helm_template(values, **options)
    assert done.returncode != 0, "it was rendered"
    return " ".join(done.stderr.split())


def one(found: Sequence[Raw], kind: str, name: str) -> Raw:
    """The object of that kind and name."""
    matching = [each for each in found if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(matching) == 1, sorted((each["kind"], each["metadata"]["name"]) for each in found)
    return matching[0]


def of_kind(found: Sequence[Raw], *kinds: str) -> list[Raw]:
    return [each for each in found if each["kind"] in kinds]


def identity(manifest: Raw) -> tuple[str, str, str]:
    meta = manifest["metadata"]
    return manifest["kind"], meta.get("namespace", ""), meta["name"]


def pods(found: Sequence[Raw]) -> Iterator[tuple[str, Raw]]:
    """The Pod templates by component."""
    for each in of_kind(found, "Deployment", "DaemonSet"):
        yield each["metadata"]["labels"]["app.kubernetes.io/component"], each["spec"]["template"]


def settings_of(found: Sequence[Raw], name: str = "gpuwarden-settings") -> Raw:
    return dict(yaml.safe_load(one(found, "ConfigMap", name)["data"]["settings.yaml"]))
