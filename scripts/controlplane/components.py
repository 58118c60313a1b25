"""The components of a control plane: their command lines and configuration files."""

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
# In order of their start.
COMPONENTS = (ETCD, API_SERVER, CONTROLLERS, SCHEDULERS, KWOK)

# The label of nodes with a kubelet: kwok ignores these nodes and their pods.
REAL_NODE = "kubelet.test/real"

# Below the kernel's ephemeral ports, so that no outgoing connection takes the port of a restarting component.
PORTS = range(20_000, 30_000)
# The components' default limits of 20 and 50 requests per second would slow down large tests.
QPS, BURST = 500, 1000
# A node is declared lost after this time without a heartbeat. On a busy machine kwok can be late by more than the
# default of 50 s, and would lose all nodes at once.
NODE_GRACE = "5m"


class Components:
    """The components of the cluster in one directory. `scheduler` is merged into the scheduler's configuration. With
    `real_nodes`, real kubelets can join, and kwok ignores their nodes."""

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
        """Ports are chosen at each start of the cluster. A component that restarts keeps its port."""
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
            "unsafe-no-fsync": True,  # a test's data need not survive a power loss
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
            "endpoint-reconciler-type": "none",  # endpoints cannot have loopback addresses
            "service-cluster-ip-range": "10.0.0.0/16",
            "tls-cert-file": keys.server,
            "tls-private-key-file": keys.server_key,
            "client-ca-file": keys.ca,
            "token-auth-file": keys.tokens,
            "authorization-mode": "RBAC",
            "allow-privileged": True,  # as installers set it; agents on nodes need it
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": keys.verifying_key,
            "service-account-signing-key-file": keys.signing_key,
            # Without it an open watch delays the stop by a minute.
            "shutdown-watch-termination-grace-period": "1s",
            # A limit for all requests; one test with many clients exceeds the default.
            "max-requests-inflight": 2000,
            "max-mutating-requests-inflight": 1000,
            **(self._flags_for_kubelets() if self._real_nodes else {}),
        }

    def _flags_for_kubelets(self) -> dict[str, Any]:
        """Flags for real kubelets, as installers set them: authorization by node, and addresses for logs and exec."""
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
            "node-monitor-grace-period": NODE_GRACE,
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
    """Free ports. All are bound until the last one is found, so that they differ."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            port = random.choice(PORTS)  # noqa: S311 - two clusters must not try ports in the same order
            try:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            found.append(port)
        return found
