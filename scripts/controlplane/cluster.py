"""One control plane: starting and stopping its components, faults for tests, and access to its API."""

import fcntl
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from scripts.controlplane.build import binaries
from scripts.controlplane.components import API_SERVER, COMPONENTS, CONTROLLERS, ETCD, KWOK, SCHEDULERS, Components
from scripts.controlplane.credentials import ADMIN, TOKEN_USERS, Credentials, encoded
from scripts.controlplane.processes import Processes, State
from scripts.node.real import Access, RealNode, nodes_in

ROOT = Path(__file__).resolve().parent.parent.parent

START_TIMEOUT = 90.0
LOOK_EVERY = 0.05
PAUSE_TIMEOUT = 10.0


class StartError(Exception):
    """A component did not start. The text names its log."""


class Cluster:
    """A control plane in one directory, started and stopped here or by another process.

    `flags` are extra flags for a component; `scheduler` is laid over the scheduler's configuration; with `real_nodes`
    nodes with a kubelet can be added, beside those that kwok plays.
    """

    def __init__(
        self,
        directory: Path,
        *,
        flags: Mapping[str, Sequence[str]] | None = None,
        scheduler: Mapping[str, Any] | None = None,
        real_nodes: bool = False,
    ) -> None:
        self.directory = directory.resolve()
        self.processes = Processes(self.directory)
        self.credentials = Credentials(self.directory)
        self._flags = dict(flags or {})
        self._components = Components(self.directory, self.credentials, scheduler or {}, real_nodes=real_nodes)
        self._real_nodes: dict[str, RealNode] = {}
        self._tether: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start(tied=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # Access.

    @property
    def url(self) -> str:
        return self._components.api_server

    @property
    def etcd(self) -> str:
        return self._components.etcd

    @property
    def ca(self) -> Path:
        return self.credentials.ca

    @property
    def admin_token(self) -> str:
        return self.credentials.token_of(ADMIN)

    @property
    def kubeconfig(self) -> Path:
        return self.credentials.kubeconfig_of(ADMIN)

    @property
    def kubectl(self) -> list[str]:
        """kubectl as the administrator, with its caches in the cluster's directory."""
        return [
            str(binaries() / "kubectl"),
            f"--kubeconfig={self.kubeconfig}",
            f"--cache-dir={self.directory / 'kubectl'}",
        ]

    def as_user(self, name: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for a user with these groups. Without RBAC rules the user has no rights."""
        certificate, key = self.credentials.client_certificate(name, groups)
        user = {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
        return self.credentials.kubeconfig(name, self.url, user)

    def service_account_token(self, namespace: str, name: str, audience: str | None = None) -> str:
        """A token of the service account, which is created if missing."""
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        with self.api() as api:
            ensure(api, accounts, {"metadata": {"name": name}})
            spec = {"audiences": [audience]} if audience else {}
            reply = api.post(f"{accounts}/{name}/token", json={"spec": spec}).raise_for_status()
        return str(reply.json()["status"]["token"])

    def service_account_kubeconfig(self, namespace: str, name: str, audience: str | None = None) -> Path:
        token = self.service_account_token(namespace, name, audience)
        return self.credentials.kubeconfig(f"{namespace}:{name}", self.url, {"token": token})

    def api(self) -> httpx.Client:
        """An API client as the administrator."""
        return httpx.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.ca)),
            headers={"Authorization": f"Bearer {self.admin_token}"},
            timeout=10,
            trust_env=False,
        )

    # Start and stop.

    def start(self, *, tied: bool = False) -> None:
        """Starts all components and waits until they answer. If `tied`, they end with this process, even by SIGKILL."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.processes.any_left:
                raise StartError(f"{self.directory} is already running")
            try:
                if tied:
                    self._tie()
                self._start()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stops all processes, clients before their servers."""
        try:
            for node in nodes_in(self.directory):
                self._real_nodes.get(node.name, node).remove()
        finally:
            self._stop_control_plane()
        self._untie()

    def _stop_control_plane(self) -> None:
        for names in ((KWOK, SCHEDULERS, CONTROLLERS), (API_SERVER,), (ETCD,)):
            self.processes.stop(names)
        self.processes.forget()

    def restart(self, name: str, *flags: str) -> None:
        """Restarts a component on the same port. Flags given here override its own, also in later starts."""
        command = [*self.processes.records()[name].command, *flags]
        self.processes.stop([name])
        self._run(name, command)

    def kill(self, name: str) -> None:
        """SIGKILL, as the kernel sends it when memory runs out. `restart` starts it again."""
        self.processes.kill(name)

    def pause(self, name: str) -> None:
        """Stops the process with SIGSTOP: connections stay open without answers."""
        self.processes.signal(name, signal.SIGSTOP)
        until = time.monotonic() + PAUSE_TIMEOUT
        while self.status()[name] is not State.PAUSED and time.monotonic() < until:
            time.sleep(LOOK_EVERY)

    def resume(self, name: str) -> None:
        self.processes.signal(name, signal.SIGCONT)

    def status(self) -> dict[str, State]:
        return {name: record.state for name, record in self.processes.records().items()}

    def add_nodes(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Creates missing nodes and waits until all are ready and without the taint of new nodes."""
        names = []
        with self.api() as api:
            for node in nodes:
                names.append(node["metadata"]["name"])
                ensure(api, "/api/v1/nodes", node)
            self._wait(KWOK, lambda: all(is_ready(api, name) for name in names))

    def add_real_node(self, name: str, gpus: Sequence[str]) -> RealNode:
        """Starts a kubelet with containerd, NVIDIA's container runtime and GPUs with these UUIDs. Waits until the node
        is ready. Requires a cluster with `real_nodes`. The node ends with the cluster."""
        node = self._real_nodes[name] = RealNode(self.directory / "nodes" / name)
        kubeconfig = self.as_user(f"system:node:{name}", ["system:nodes"])
        node.create(gpus, Access(ca=self.ca, kubeconfig=kubeconfig, admin=self.kubeconfig))
        node.start()
        self.wait_for_node(name)
        return node

    def real_node(self, name: str) -> RealNode:
        """A node added by `add_real_node`."""
        return self._real_nodes[name]

    def wait_for_node(self, name: str, since: datetime | None = None) -> None:
        """Waits until the node is ready; a status from before `since` does not count."""
        with self.api() as api:
            self._wait(API_SERVER, lambda: is_heard(api, name, since) and is_ready(api, name))

    def _start(self) -> None:
        self.credentials.ensure()
        self._components.choose_ports()
        for user in TOKEN_USERS:
            self.credentials.kubeconfig(user, self.url, {"token": self.credentials.token_of(user)})
        for name in COMPONENTS:
            self._run(name, [*self._components.command(name), *self._flags.get(name, ())])
        with self.api() as api:
            # Pods can be created only after this.
            self._wait(CONTROLLERS, lambda: answers(api, "/api/v1/namespaces/default/serviceaccounts/default"))

    def _run(self, name: str, command: Sequence[str]) -> None:
        self.processes.spawn(name, command)
        if name == ETCD:
            with httpx.Client(base_url=self._components.etcd, trust_env=False) as client:
                self._wait(name, lambda: answers(client, "/health"))
        elif name == API_SERVER:
            with self.api() as api:
                self._wait(name, lambda: answers(api, "/readyz"))

    def _wait(self, name: str, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + START_TIMEOUT
        while not is_there():
            if self.processes.state(name) is State.GONE or time.monotonic() > until:
                log = self.processes.log(name)
                raise StartError(f"{name} is not ready; the end of {log}:\n{last_lines(log)}")
            time.sleep(LOOK_EVERY)

    def _tie(self) -> None:
        """A process that stops the cluster when ours ends; it notices the end by a pipe."""
        command = [sys.executable, "-m", "scripts.controlplane", "down", "--dir", str(self.directory), "--after-stdin"]
        self._tether = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _untie(self) -> None:
        if self._tether is not None:
            self._tether.communicate()
            self._tether = None


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path, timeout=2).is_success
    except httpx.TransportError:
        return False


def ensure(api: httpx.Client, path: str, content: Mapping[str, Any]) -> None:
    reply = api.post(path, json=content)
    if reply.status_code != httpx.codes.CONFLICT:
        reply.raise_for_status()


def is_ready(api: httpx.Client, name: str) -> bool:
    node = api.get(f"/api/v1/nodes/{name}").raise_for_status().json()
    conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not node["spec"].get("taints")


def is_heard(api: httpx.Client, name: str, since: datetime | None) -> bool:
    """Whether the node exists and has sent a heartbeat since; its times are whole seconds."""
    reply = api.get(f"/api/v1/nodes/{name}")
    if reply.status_code == httpx.codes.NOT_FOUND:
        return False
    conditions = reply.raise_for_status().json()["status"].get("conditions", ())
    beats = [datetime.fromisoformat(one["lastHeartbeatTime"]) for one in conditions if one["type"] == "Ready"]
    return since is None or any(beat > since for beat in beats)


def gpu_node(name: str, gpus: int = 8, *, cpu: str = "64", memory: str = "512Gi", **labels: str) -> dict[str, Any]:
    """A Node as a kubelet would register it."""
    capacity = {"cpu": cpu, "memory": memory, "pods": "250"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", **labels}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": capacity, "allocatable": capacity},
    }
