"""The kube-scheduler of the chart on the rig: the real binary, with the configuration, the account and the rights that
are rendered."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml
from attrs import frozen

from scripts.controlplane.build import binaries
from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import SCHEDULERS, free_ports
from tests.chart.rendering import one, rendered
from tests.e2e.kube import Raw, Resource
from webhook.runtime.clock import utc_now
from webhook.scheduler.profile import make_certificates

LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
LEASE = "gpuwarden-scheduler"
OURS = "gpu-scheduler"
INSIDE = "/etc/gpuwarden/scheduler"
EXTENDER = "https://127.0.0.1:8445"


def certified(directory: Path) -> tuple[str, ...]:
    """As the Pod's init container does; the flags of `serve` for it."""
    make_certificates(directory / "scheduler", now=utc_now())
    return "--scheduler-certs", str(directory / "scheduler"), "--scheduler-port", "0"


@frozen(eq=False)
class Scheduler:
    """What the container `scheduler` would be."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def configuration(config: str, kubeconfig: Path, certificates: Path, extender: str, port: int, place: Path) -> Path:
    """The rendered configuration as it is outside of a Pod."""
    content = yaml.safe_load(config.replace(INSIDE, str(certificates)).replace(EXTENDER, extender))
    content["clientConnection"] = {"kubeconfig": str(kubeconfig)}
    path = place / f"scheduler-{port}.json"
    path.write_text(json.dumps(content))
    return path


def launched(command: list[str], config: Path, port: int) -> Scheduler:
    """By the container's own command, but for the file and the port."""
    flags = [f"--config={config}", f"--secure-port={port}", "--bind-address=127.0.0.1"]
    rest = [word for word in command[1:] if not word.startswith(("--config=", "--secure-port="))]
    log = config.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen([str(binaries() / SCHEDULERS), *flags, *rest], stdout=file, stderr=file)
    return Scheduler(process, log, port)


@contextmanager
def allowed(cluster: Cluster, found: list[Raw]) -> Iterator[None]:
    """With the account and the roles that are rendered for the scheduler."""
    kinds = ("ServiceAccount", "ClusterRoleBinding", "Role", "RoleBinding")
    mine = [each for each in found if each["kind"] in kinds and each["metadata"]["name"].startswith(LEASE)]
    text = yaml.safe_dump_all(mine)

    def kubectl(*words: str) -> None:
        done = subprocess.run([*cluster.kubectl, *words], input=text, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    kubectl("apply", "-f", "-")
    try:
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-f", "-")


@frozen(eq=False)
class Profile:
    """Starts schedulers of one release: the first of them leads."""

    cluster: Cluster
    namespace: str
    directory: Path
    objects: list[Raw]
    running: ExitStack

    def start(self, extender: str) -> Scheduler:
        """One more, whose extender is there."""
        (port,) = free_ports(1)
        account = self.cluster.service_account_kubeconfig(self.namespace, LEASE)
        config = one(self.objects, "ConfigMap", LEASE)["data"]["config.yaml"]
        pod = one(self.objects, "Deployment", "gpuwarden")["spec"]["template"]["spec"]
        (container,) = (each for each in pod["containers"] if each["name"] == "scheduler")
        certificates = self.directory / "scheduler"
        path = configuration(config, account, certificates, extender, port, self.directory)
        found = launched(container["command"], path, port)
        self.running.callback(found.kill)
        return found


@contextmanager
def profile(cluster: Cluster, namespace: str, directory: Path) -> Iterator[Profile]:
    """A release in that namespace, of which nothing but the scheduler is there; `certified` was called before."""
    found = rendered({"scheduler.enabled": True}, namespace=namespace)
    with allowed(cluster, found), ExitStack() as running:
        yield Profile(cluster, namespace, directory, found, running)
