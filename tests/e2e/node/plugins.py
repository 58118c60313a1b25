"""`gpuwarden attest` as the kubelet's plugin on a real node, with a SPIRE agent of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from attrs import define

from scripts.controlplane.cluster import Cluster
from scripts.node.real import RealNode
from tests.e2e.kube import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, SERVICE_ACCOUNTS, Kube, wait_until
from tests.e2e.node.containers import START_TIMEOUT
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, evidence_id
from tests.running import GPUWARDEN
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import Installation, rbac

ACCOUNT: Final = "gpuwarden-attest"
KINDS: Final = {
    "ServiceAccount": SERVICE_ACCOUNTS,
    "ClusterRole": CLUSTER_ROLES,
    "ClusterRoleBinding": CLUSTER_ROLE_BINDINGS,
}
KEY: Final = SigningKey.make()
KUBELET_DIRECTORY: Final = Path("/var/lib/kubelet")


@define(eq=False)
class AttestPlugin:
    """`attest` on one node. Its server does not answer."""

    node: RealNode
    agent: JwtWorkloadApiDouble
    command: Sequence[str]
    # The name of its process.
    name: str = "attest"

    async def start(self) -> None:
        already = await self.registrations()
        self.node.processes.spawn(self.name, self.node.inside(*self.command))
        await wait_until(self.registrations, lambda found: found > already, START_TIMEOUT)

    async def kill(self) -> None:
        await asyncio.to_thread(self.node.kill, self.name)

    async def stop(self) -> None:
        """As at the end of its pod."""
        os.killpg(self.node.processes.records()[self.name].pid, signal.SIGTERM)
        await asyncio.to_thread(self.node.processes.stop, [self.name])

    async def update(self) -> None:
        """The new process starts before the old one ends."""
        old, new = self.name, f"{self.name}-new"
        self.name = new
        await self.start()
        self.name = old
        await self.stop()
        self.name = new

    async def sockets(self) -> list[str]:
        directory = self.node.directory / "kubelet"
        return [one.name for one in directory.glob("plugins*/**/*.sock") if DRIVER in str(one)]

    async def registrations(self) -> int:
        path = self.node.log(self.name)
        return path.read_text().count('"registered with the kubelet"') if path.exists() else 0

    async def records(self) -> list[str]:
        """The files of records, and their CDI specifications."""
        found = (*self.node.directory.glob("kubelet/plugins/*/records/*"), *self.node.directory.glob("cdi/*record*"))
        return [one.name for one in found]

    async def questions(self) -> int:
        """How often `attest` has asked the agent for a token."""
        return len(self.agent.audiences)


@asynccontextmanager
async def attest_account(cluster: Cluster, kube: Kube, namespace: str) -> AsyncIterator[Path]:
    """A kubeconfig with exactly the permissions of `attest`."""
    manifests = [one for one in rbac(Installation(namespace=namespace)) if one["metadata"]["name"] == ACCOUNT]
    assert {one["kind"] for one in manifests} == KINDS.keys()
    async with AsyncExitStack() as stack:
        for one in manifests:
            place = one["metadata"].get("namespace")
            await kube.create(KINDS[one["kind"]], one, place)
            stack.push_async_callback(kube.delete, KINDS[one["kind"]], ACCOUNT, place)
        yield cluster.service_account_kubeconfig(namespace, ACCOUNT)


@asynccontextmanager
async def spire_agent(path: Path, node: str, hash: str) -> AsyncIterator[JwtWorkloadApiDouble]:
    """An agent that proves the node."""
    agent = JwtWorkloadApiDouble(str(path), KEY, [evidence_id(node, hash)])
    await agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


def attest_command(
    node: str, agent: JwtWorkloadApiDouble, account: Path, directory: Path = KUBELET_DIRECTORY
) -> list[str]:
    """The command line of `attest`, whose server does not answer. `directory` is the kubelet's."""
    spire = ["--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{agent.path}"]
    plugin = ["--kubelet-plugins", str(directory), "--kubeconfig", str(account)]
    return [GPUWARDEN, "attest", "--node", node, *spire, *plugin]


@asynccontextmanager
async def attesting(node: RealNode, hash: str, account: Path) -> AsyncIterator[AttestPlugin]:
    """`attest` on the node, which is proven for the hash. The kubelet has registered it."""
    async with spire_agent(node.directory / "agent.sock", node.name, hash) as agent:
        plugin = AttestPlugin(node, agent, attest_command(node.name, agent, account))
        await plugin.start()
        try:
            yield plugin
        finally:
            await plugin.kill()
