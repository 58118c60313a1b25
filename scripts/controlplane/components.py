"""What a control plane consists of: each component's command line, and the files that it names."""

import json
import random
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.controlplane.build import binaries
from scripts.controlplane.credentials import CONTROLLER_MANAGER, KUBELETS, SCHEDULER, Credentials, write_private

STAGES = Path(__file__).resolve().with_name("kubelets.yaml")

ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLERS = "kube-controller-manager"
SCHEDULERS = "kube-scheduler"
KWOK = "kwok"
# In the order of their start.
COMPONENTS = (ETCD, API_SERVER, CONTROLLERS, SCHEDULERS, KWOK)

# The label of a node that has a kubelet: kwok leaves it and its pods alone.
REAL_NODE = "kubelet.test/real"

# Below the ports that the kernel gives to outgoing connections: none of those takes a component's port as it restarts.
PORTS = range(20_000, 30_000)
# By default the components hold themselves back to 20 and 50 requests a second; a large test would only wait for that.
QPS, BURST = 500, 1000


class Components:
    """The components of the cluster in one directory. `scheduler` is laid over the scheduler's configuration. With
    `real_nodes` kubelets of their own can join, and kwok keeps off their nodes."""

    def __init__(
        self, directory: Path, credentials: Credentials, scheduler: Mapping[str, Any], *, real_nodes: bool
    ) -> None:
        self._directory = directory
        self._credentials = credentials
        self._scheduler = scheduler
        self._real_nodes = real_nodes
        self._state = directory / "cluster.json"

    @property
    def api_server(self) -> str:
        return f"https://127.0.0.1:{self._ports[API_SERVER]}"

    @property
    def etcd(self) -> str:
        return f"http://127.0.0.1:{self._ports[ETCD]}"

    @property
    def _ports(self) -> dict[str, int]:
        ports: dict[str, int] = json.loads(self._state.read_text())["ports"]
        return ports

    def choose_ports(self) -> None:
        """Anew at each start, kept while it lasts: a component that restarts alone is found where it was."""
        ports = dict(zip((ETCD, "peer", API_SERVER), free_ports(3), strict=True))
        self._state.write_text(json.dumps({"ports": ports}))

    def command(self, name: str) -> list[str]:
        flags = {
            ETCD: self._etcd_flags,
            API_SERVER: self._api_server_flags,
            CONTROLLERS: self._controller_flags,
            SCHEDULERS: self._scheduler_flags,
            KWOK: self._kwok_flags,
        }[name]()
        return [str(binaries() / name), *(f"--{key}={value}" for key, value in flags.items())]

    def _etcd_flags(self) -> dict[str, Any]:
        peer = f"http://127.0.0.1:{self._ports['peer']}"
        return {
            "data-dir": "etcd",
            "unsafe-no-fsync": True,  # a test's data need not survive a power cut
            "listen-client-urls": self.etcd,
            "advertise-client-urls": self.etcd,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }

    def _api_server_flags(self) -> dict[str, Any]:
        keys = self._credentials
        return {
            "etcd-servers": self.etcd,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self._ports[API_SERVER],
            "endpoint-reconciler-type": "none",  # a loopback address is refused as an endpoint
            "service-cluster-ip-range": "10.0.0.0/16",
            "tls-cert-file": keys.server,
            "tls-private-key-file": keys.server_key,
            "client-ca-file": keys.ca,
            "token-auth-file": keys.tokens,
            "authorization-mode": "RBAC",
            "allow-privileged": True,  # as installers set it: agents on nodes need it
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": keys.verifying_key,
            "service-account-signing-key-file": keys.signing_key,
            # Without it a watch that somebody holds open keeps a stopping server for a minute.
            "shutdown-watch-termination-grace-period": "1s",
            # A ceiling for all together; the default is met by one test with many clients.
            "max-requests-inflight": 2000,
            "max-mutating-requests-inflight": 1000,
            **(self._flags_for_kubelets() if self._real_nodes else {}),
        }

    def _flags_for_kubelets(self) -> dict[str, Any]:
        """What they may do is theirs alone, as installers have it; logs and exec come from where they say they are."""
        certificate, key = self._credentials.kubelet_client()
        return {
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "kubelet-client-certificate": certificate,
            "kubelet-client-key": key,
            "kubelet-preferred-address-types": "InternalIP",
        }

    def _controller_flags(self) -> dict[str, Any]:
        return {
            "kubeconfig": self._credentials.kubeconfig_of(CONTROLLER_MANAGER),
            "use-service-account-credentials": True,
            "service-account-private-key-file": self._credentials.signing_key,
            "root-ca-file": self._credentials.ca,
            "leader-elect": False,
            "secure-port": 0,
            "kube-api-qps": QPS,
            "kube-api-burst": BURST,
        }

    def _scheduler_flags(self) -> dict[str, Any]:
        client = {"kubeconfig": str(self._credentials.kubeconfig_of(SCHEDULER)), "qps": QPS, "burst": BURST}
        content = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": client,
            **self._scheduler,
        }
        config = write_private(self._directory / "scheduler.json", json.dumps(content, indent=1))
        return {"config": config, "secure-port": 0}

    def _kwok_flags(self) -> dict[str, Any]:
        return {
            "kubeconfig": self._credentials.kubeconfig_of(KUBELETS),
            "config": shutil.copy(STAGES, self._directory),
            **(
                {"manage-all-nodes": False, "manage-nodes-with-label-selector": f"{REAL_NODE}!=true"}
                if self._real_nodes
                else {"manage-all-nodes": True}
            ),
            "node-lease-duration-seconds": 40,
            "node-ip": "127.0.0.1",
        }


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so that they differ."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            port = random.choice(PORTS)  # noqa: S311 - two clusters must not look in the same order, that is all
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
        return found
