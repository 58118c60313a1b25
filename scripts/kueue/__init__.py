"""A real Kueue, built like the control plane, for the cluster of one test.

It keeps its certificates in a Secret itself, as it does by default. The API server reaches its webhooks through a
Service of type ExternalName.
"""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from scripts.controlplane.build import binaries
from scripts.controlplane.components import free_ports

HERE: Final = Path(__file__).resolve().parent
NAMESPACE: Final = "kueue-system"
SERVICE: Final = "kueue-webhook-service"
SECRET: Final = "kueue-webhook-server-cert"  # noqa: S105 - a name
# Kueue converts these kinds between versions, and writes its CA into their CRDs.
CONVERTED: Final = frozenset({"localqueues", "clusterqueues", "workloads", "cohorts", "multikueueclusters"})


def crds(port: int) -> list[dict[str, Any]]:
    """The CRDs of this version."""
    found = [one for file in sorted((binaries(HERE) / "crds").glob("*.yaml")) for one in documents(file)]
    for one in found:
        if one["spec"]["names"]["plural"] in CONVERTED:
            where = {"service": {"namespace": NAMESPACE, "name": SERVICE, "port": port, "path": "/convert"}}
            webhook = {"clientConfig": where, "conversionReviewVersions": ["v1"]}
            one["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
    return found


def webhooks(port: int) -> list[dict[str, Any]]:
    """The webhook configurations of this version, with the names that its installer gives them."""
    found = documents(binaries(HERE) / "webhooks" / "manifests.yaml")
    for one in found:
        one["metadata"]["name"] = "kueue-" + one["metadata"]["name"]
        for hook in one["webhooks"]:
            hook["clientConfig"]["service"] |= {"namespace": NAMESPACE, "name": SERVICE, "port": port}
    return found


def documents(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def configuration(directory: Path, port: int) -> Path:
    """Only Jobs are queued, and all of it listens on loopback."""
    (health,) = free_ports(1)
    content = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(directory / "certificates")},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": SERVICE,
            "webhookSecretName": SECRET,
        },
        "integrations": {"frameworks": ["batch/job"]},
        # Its API server would be a part of the cluster's.
        "featureGates": {"VisibilityOnDemand": False},
    }
    file = directory / "kueue.json"
    file.write_text(json.dumps(content))
    return file


def started(kubeconfig: Path, configuration: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts Kueue as this user. CRDs, webhook configurations and the Secret have to exist. The caller stops it."""
    command = [str(binaries(HERE) / "kueue"), f"--kubeconfig={kubeconfig}", f"--config={configuration}"]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
