"""`make chart` generates deploy/, the rendered chart for users without helm. A test compares them.

Needs helm, which `make test` installs.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import frozen

from scripts.chart_values import CHART, ROOT
from webhook.export.targets import STORES

DEPLOY: Final = ROOT / "deploy"
HEAD: Final = "# Written by `make chart` from the chart.\n"
# The purpose of each directory.
KUBERNETES: Final = "1.36.0"

Manifest = dict[str, Any]

# Only the chart's exporter.
EXPORTER: Final[Mapping[str, Any]] = {
    "fullnameOverride": "gpuid",
    "serve": {"enabled": False},
    "reconcile": {"enabled": False},
    "webhooks": {"enabled": False},
    "policies": {"protect": False, "isolate": False, "strip": "false", "blind": "nobody"},
    "crds": {"install": False},
}
# Without gpuwarden's webhooks there are no reservations to export.
ALONE: Final = {"clusterName": "validation", "history": False}


def exporting(name: str) -> Manifest:
    """The values of a store's directory."""
    store = STORES[name]
    found: Manifest = {"settings": {**ALONE, "exporterType": name, **store.example}}
    return found if store.secret is None else {**found, "credentials": {name: store.secret.example}}


POSTGRES: Final = exporting("postgres")
# Two replicas with one active, disruption budget, network policies.
PROD: Final[Manifest] = {**POSTGRES, "replicas": 2, "settings": {**POSTGRES["settings"], "clusterName": "prod"}}

# The filter of a scheduler: hashes from a map, reservations in memory, no webhook.
EXTENDER: Final[Mapping[str, Any]] = {
    "serve": {"replicas": 1},
    "reconcile": {"enabled": False},
    "webhooks": {"enabled": False},
    "policies": {"protect": False, "isolate": False, "strip": "false", "blind": "nobody"},
    "crds": {"install": False},
    "extender": {"plainPort": 8000},
    # The map contains the nodes.
    "inventory": {"nodes": []},
    "settings": {
        "ledger": "memory",
        "requireEvidence": "asked",
        "nodeHashMap": {"kind-worker": "abc123", "kind-worker2": "def456"},
    },
}
EXTENDER_NAMESPACE: Final = "blind-gpu-scheduler"

SCHEDULER: Final = """\
# For kube-scheduler's --config. With plain HTTP, an attacker on the network could answer in gpuwarden's place. With TLS
# on both sides: examples/scheduler/scheduler-config.yaml.
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: /etc/kubernetes/scheduler.conf
profiles:
  - schedulerName: default-scheduler
extenders:
  - urlPrefix: http://gpuwarden.blind-gpu-scheduler.svc:8000
    filterVerb: filter
    nodeCacheCapable: true
    # While gpuwarden is unavailable, pods that request GPUs wait: nothing else checks them here.
    ignorable: false
    # Only pods with these resources: while all replicas are down, other pods are scheduled, gpuwarden's own included.
    # A pod that requires a hash but no GPU is not checked. If such pods need proven nodes too, install the webhooks, or
    # use this extender in a scheduler with its own name.
    managedResources:
      - name: nvidia.com/gpu
    httpTimeout: 5s
"""


@frozen
class Flow:
    """One directory of deploy/."""

    directory: Path
    namespace: str
    release: str
    values: Mapping[str, Any]


FLOWS: Final = [
    *(
        Flow(
            DEPLOY / "exporter" / name,
            "gpuid",
            "gpuid",
            {**EXPORTER, "export": {"enabled": True, "replicas": 1, **exporting(name)}},
        )
        for name in STORES
    ),
    Flow(
        DEPLOY / "exporter/prod",
        "gpuid",
        "gpuid",
        {**EXPORTER, "export": {"enabled": True, **PROD}, "networkPolicy": {"enabled": True}},
    ),
    Flow(DEPLOY / "extender", EXTENDER_NAMESPACE, "gpuwarden", EXTENDER),
]
# The file of each kind. `kubectl apply -f` applies files in order of their names, hence the numbers. It would read a
# kustomization as an unknown object, so that has a directory of its own.
FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "manifests/1-namespace.yaml": ("Namespace",),
    "manifests/2-rbac.yaml": ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    "manifests/3-service.yaml": ("Service",),
    "manifests/4-deployment.yaml": ("Secret", "ConfigMap", "Deployment", "PodDisruptionBudget", "NetworkPolicy"),
}


def render(flow: Flow) -> list[Manifest]:
    command = [str(Path(sys.executable).parent / "helm"), "template", flow.release, str(CHART), "-n", flow.namespace]
    done = subprocess.run(
        [*command, "--kube-version", KUBERNETES, "--is-upgrade", "-f", "-"],  # for installations and upgrades
        input=json.dumps(flow.values),
        capture_output=True,
        text=True,
        check=True,
    )
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": flow.namespace}}
    return [namespace, *(without_helm(one) for one in yaml.safe_load_all(done.stdout) if one)]


def without_helm(tree: Any) -> Any:
    """The object without helm's labels."""
    match tree:
        case dict():
            return {
                key: without_helm(value)
                for key, value in tree.items()
                if key not in ("helm.sh/chart", "app.kubernetes.io/managed-by")
            }
        case list():
            return [without_helm(each) for each in tree]
        case _:
            return tree


def files(flow: Flow) -> dict[Path, str]:
    rest = render(flow)
    parts = {name: [one for one in rest if one["kind"] in kinds] for name, kinds in FILES.items()}
    if sum(map(len, parts.values())) != len(rest):
        raise ValueError(f"no file for these kinds: {[one['kind'] for one in rest]}")
    found = {
        flow.directory / name: HEAD + yaml.safe_dump_all(parts[name], sort_keys=False, width=1000)
        for name in parts
        if parts[name]
    }
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in parts if parts[name]],
        # For `kustomize edit set image`, or your own tag.
        "images": [{"name": "gpuwarden", "newName": "gpuwarden", "newTag": "0.1.0"}],
    }
    found[flow.directory / "kustomization.yaml"] = HEAD + yaml.safe_dump(content, sort_keys=False)
    return found


def written() -> dict[Path, str]:
    found = {path: text for flow in FLOWS for path, text in files(flow).items()}
    found[DEPLOY / "extender/scheduler/scheduler-config.yaml"] = SCHEDULER
    return found
