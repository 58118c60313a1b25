"""`make chart` writes deploy/: what the chart renders for people who have no helm. A test compares.

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

DEPLOY: Final = ROOT / "deploy"
HEAD: Final = "# Written by `make chart` from the chart.\n"
# What these manifests are for.
KUBERNETES: Final = "1.36.0"

Manifest = dict[str, Any]

# Of the chart, the exporter and nothing else.
EXPORTER: Final[Mapping[str, Any]] = {
    "fullnameOverride": "gpuid",
    "serve": {"enabled": False},
    "reconcile": {"enabled": False},
    "webhooks": {"enabled": False},
    "policies": {"protect": False, "isolate": False, "strip": "false", "blind": "nobody"},
    "crds": {"install": False},
}
# Reservations are not exported where there are none.
ALONE: Final = {"clusterName": "validation", "history": False}
STORES: Final[Mapping[str, Manifest]] = {
    "stdout": {"settings": {"clusterName": "prod", "history": False}},
    "http": {
        "settings": {**ALONE, "exporterType": "http", "httpEndpoint": "https://example.org/gpus"},
        "credentials": {"http": "http-credentials"},
    },
    "postgres": {
        "settings": {**ALONE, "exporterType": "postgres", "postgresDb": "gpuid", "postgresTable": "serials"},
        "credentials": {"postgres": "db-credentials"},
    },
    "s3": {
        "settings": {**ALONE, "exporterType": "s3", "s3Bucket": "gpuid"},
        "credentials": {"s3": "s3-credentials"},
    },
}
# Two replicas of which one works, disruption budget, network policies.
PROD: Final[Manifest] = {
    **STORES["postgres"],
    "replicas": 2,
    "settings": {**STORES["postgres"]["settings"], "clusterName": "prod"},
}

# The filter of a scheduler: hashes from a map, reservations in memory, no webhook.
EXTENDER: Final[Mapping[str, Any]] = {
    "serve": {"replicas": 1},
    "reconcile": {"enabled": False},
    "webhooks": {"enabled": False},
    "policies": {"protect": False, "isolate": False, "strip": "false", "blind": "nobody"},
    "crds": {"install": False},
    "extender": {"plainPort": 8000},
    # The map names its nodes itself.
    "inventory": {"nodes": []},
    "settings": {
        "ledger": "memory",
        "requireEvidence": "asked",
        "nodeHashMap": {"kind-worker": "abc123", "kind-worker2": "def456"},
    },
}
EXTENDER_NAMESPACE: Final = "blind-gpu-scheduler"

SCHEDULER: Final = """\
# For kube-scheduler's --config. In plain HTTP whoever is between the two decides in gpuwarden's place; with TLS on both
# sides: examples/scheduler/scheduler-config.yaml.
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
    # While gpuwarden is away, pods that ask for GPUs wait: nothing else looks at them here.
    ignorable: false
    # About these and no others: with all replicas gone every other pod goes on, and gpuwarden's own come back. A pod
    # that asks for a hash and no GPU is placed unasked; where such pods are held to proven nodes too, install the
    # webhooks, or give this extender to a scheduler of its own name.
    managedResources:
      - name: nvidia.com/gpu
    httpTimeout: 5s
"""


@frozen
class Flow:
    """One directory of manifests."""

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
            {**EXPORTER, "export": {"enabled": True, "replicas": 1, **said}},
        )
        for name, said in STORES.items()
    ),
    Flow(
        DEPLOY / "exporter/prod",
        "gpuid",
        "gpuid",
        {**EXPORTER, "export": {"enabled": True, **PROD}, "networkPolicy": {"enabled": True}},
    ),
    Flow(DEPLOY / "extender", EXTENDER_NAMESPACE, "gpuwarden", EXTENDER),
]
# Into which file a kind goes. `kubectl apply -f` takes files by name, and a kustomization for an object that it does
# not know: hence the numbers, and a directory without one.
FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "manifests/1-namespace.yaml": ("Namespace",),
    "manifests/2-rbac.yaml": ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    "manifests/3-service.yaml": ("Service",),
    "manifests/4-deployment.yaml": ("Secret", "ConfigMap", "Deployment", "PodDisruptionBudget", "NetworkPolicy"),
}


def render(flow: Flow) -> list[Manifest]:
    command = [str(Path(sys.executable).parent / "helm"), "template", flow.release, str(CHART), "-n", flow.namespace]
    done = subprocess.run(
        [*command, "--kube-version", KUBERNETES, "-f", "-"],
        input=json.dumps(flow.values),
        capture_output=True,
        text=True,
        check=True,
    )
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": flow.namespace}}
    return [namespace, *(without_helm(one) for one in yaml.safe_load_all(done.stdout) if one)]


def without_helm(tree: Any) -> Any:
    """The same without the labels that say helm had put it there."""
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
        raise ValueError(f"a kind goes into no file: {[one['kind'] for one in rest]}")
    found = {
        flow.directory / name: HEAD + yaml.safe_dump_all(parts[name], sort_keys=False, width=1000)
        for name in parts
        if parts[name]
    }
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name for name in parts if parts[name]],
        # For `kustomize edit set image`, and for a tag of your own.
        "images": [{"name": "gpuwarden", "newName": "gpuwarden", "newTag": "0.1.0"}],
    }
    found[flow.directory / "kustomization.yaml"] = HEAD + yaml.safe_dump(content, sort_keys=False)
    return found


def written() -> dict[Path, str]:
    found = {path: text for flow in FLOWS for path, text in files(flow).items()}
    found[DEPLOY / "extender/scheduler/scheduler-config.yaml"] = SCHEDULER
    return found
