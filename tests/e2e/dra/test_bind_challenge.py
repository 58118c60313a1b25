"""Native pods that are bound only after their node has answered a new challenge.

Nodes A and B are proven and have free GPUs. The scheduler prefers A, which has fewer pods.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
from attrs import define, field

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.cluster_users import grant, resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.clusters import cluster_with_roles
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_CLAIMS,
    bound,
    claim_of_pod,
    device_classes,
    gpus_of,
    proof_slices,
    published_gpus,
)
from tests.e2e.dra.test_native import WRITES_PODS, asking
from tests.e2e.dra.test_proof_devices import LEASES
from tests.e2e.kube import EVENTS, PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import installed
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, evidence_id
from tests.running import GPUWARDEN, Running, reconciling, serving
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import Installation, dra, policies
from webhook.kube.resource_slices import CHALLENGED

A, B = "challenged-a", "challenged-b"
HASH = "sha256:aa11"
ASKS = {"gpuwarden.io/challenge": "bind"}
KEY = SigningKey.make()

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No other test sees its policies."""
    with cluster_with_roles(tmp_path_factory.mktemp("challenges")) as running:
        yield running


@define(eq=False)
class Challenges:
    """An installation with native pods: `serve`, `reconcile`, and `attest` of each node, each with its own account."""

    cluster: Cluster
    admin: Kube
    user: Kube  # without `manage`
    namespace: str
    directory: Path
    server: Running
    agents: dict[str, JwtWorkloadApiDouble]
    attesters: dict[str, asyncio.subprocess.Process] = field(factory=dict)
    _reconciler: ExitStack = field(factory=ExitStack)

    def account(self, name: str) -> list[str]:
        return ["--kubeconfig", str(self.cluster.service_account_kubeconfig("gpuwarden", name))]

    async def start_reconciler(self) -> None:
        flags = [
            *self.account("gpuwarden-reconcile"),
            "--lease-namespace",
            "gpuwarden",
            *evidence_flags(self.directory),
        ]
        flags += ["--proof-devices", "true", "--native-templates", "true", "--challenge-at-bind", "true"]
        starting = reconciling(self.directory, [*flags, "--on-evidence-lost", "evict"])
        await asyncio.to_thread(self._reconciler.enter_context, starting)

    async def kill_reconciler(self) -> None:
        await asyncio.to_thread(self._reconciler.close)
        await self.admin.delete(LEASES, "gpuwarden-reconcile", "gpuwarden")  # the next one need not wait for its end

    async def start_attest(self, node: str) -> None:
        kubelet = self.directory / node
        for one in ("plugins", "plugins_registry"):
            (kubelet / one).mkdir(parents=True, exist_ok=True)
        flags = ["--node", node, "--kubelet-plugins", str(kubelet), *self.account("gpuwarden-attest")]
        flags += ["--server", self.server.urls["https"], "--server-ca", str(self.server.directory / "certs/dev/ca.crt")]
        flags += ["--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{self.agents[node].path}"]
        flags += ["--challenge-at-bind", "true"]
        with (self.directory / f"{node}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(GPUWARDEN, "attest", *flags, stdout=log, stderr=log)
        self.attesters[node] = process

    async def kill_attest(self, node: str) -> None:
        process = self.attesters.pop(node, None)
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def asks(self, name: str, **spec: Any) -> float:
        """Creates a pod that asks for a challenge. Returns when."""
        made = asking(name, hash=HASH, **spec)
        made["metadata"]["annotations"] |= ASKS
        began = time.monotonic()
        await self.user.create(PODS, made, self.namespace)
        return began

    async def node_of(self, name: str) -> str:
        return str((await bound(self.admin, self.namespace, name, 60))["spec"]["nodeName"])

    async def claim(self, name: str) -> Raw:
        """The claim of the pod, once it is allocated."""

        async def look() -> Raw:
            return await claim_of_pod(self.admin, self.namespace, name)

        return await wait_until(look, lambda claim: claim.get("status", {}).get("allocation"))

    async def messages(self, name: str) -> list[str]:
        found = await self.admin.list(EVENTS, self.namespace, fieldSelector=f"involvedObject.name={name}")
        return [str(one["message"]) for one in found]


def evidence_flags(directory: Path) -> list[str]:
    flags = ["--evidence", "jwt-svid", "--spire-trust-domain", TRUST_DOMAIN, "--clock-skew", "1s"]
    return [*flags, "--spire-workload-api", f"unix:{directory}/{A}.sock", "--nonce-key", str(directory / "nonce.key")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(cluster: Cluster) -> AsyncIterator[Challenges]:
    async with AsyncExitStack() as stack:
        # pytest's directories are too long for the names of sockets.
        directory = Path(stack.enter_context(TemporaryDirectory()))
        (directory / "nonce.key").write_bytes(os.urandom(32))
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        user = await stack.enter_async_context(Kube(cluster.as_user("chal")))
        await installed(admin)
        await stack.enter_async_context(device_classes(admin, GPU_DRIVER, DRIVER))
        await asyncio.to_thread(cluster.add_nodes, [gpu_node(name, 0) for name in (A, B)])
        for name in (A, B):
            await published_gpus(admin, name, 2)
        namespace = await stack.enter_async_context(new_namespace(admin, OPT_IN))
        agents = {}
        for name in (A, B):
            agents[name] = JwtWorkloadApiDouble(str(directory / f"{name}.sock"), KEY, [evidence_id(name, HASH)])
            await agents[name].start()
            stack.push_async_callback(agents[name].stop)
        account = cluster.service_account_kubeconfig("gpuwarden", "gpuwarden")
        flags = ["--ledger", "cluster", "--kubeconfig", str(account), *evidence_flags(directory)]
        server = await asyncio.to_thread(stack.enter_context, serving(directory, None, flags))
        made = Challenges(cluster, admin, user, namespace, directory, server, agents)
        await grant(admin, stack, "chal", WRITES_PODS, {"kind": "User", "name": "chal"})
        await with_policies(made)
        stack.push_async_callback(made.kill_reconciler)
        await made.start_reconciler()
        await admin.create(PODS, busy(), namespace)
        # Its template is kept for an hour.
        await made.asks("first", schedulerName="nobody")
        await claim_of_pod(admin, namespace, "first")
        await admin.delete(PODS, "first", namespace)
        yield made
        for name in (A, B):
            await made.kill_attest(name)


async def with_policies(here: Challenges) -> None:
    installation = Installation(native=True)
    for manifest in (*policies(installation), *dra(installation)):
        if manifest["kind"] != "DeviceClass":
            await here.admin.create(resource_of(manifest), manifest)

    async def act() -> bool:
        with suppress(ApiError):
            made = await here.user.create(PODS, asking("probe", hash=HASH), here.namespace, dryRun="All")
            return "resourceClaims" in made["spec"]
        return False

    await wait_until(act)


def busy() -> Raw:
    content = pod("busy")
    content["spec"]["nodeName"] = B
    content["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "60", "memory": "400Gi"}}
    return content


@pytest_asyncio.fixture(loop_scope="module")
async def both(here: Challenges) -> AsyncIterator[Challenges]:
    """Both nodes are proven and answer challenges. The test's pods are deleted."""
    for name in (A, B):
        if name not in here.attesters:
            await here.start_attest(name)
    for name in (A, B):
        await wait_until(lambda name=name: open_devices(here, name), lambda found: len(found) == 2)  # type: ignore[misc]  # bound now
    yield here
    for one in await here.admin.list(PODS, here.namespace):
        if one["metadata"]["name"] != "busy":
            with suppress(ApiError):
                await here.admin.delete(PODS, one["metadata"]["name"], here.namespace)
    await wait_until(lambda: here.admin.list(RESOURCE_CLAIMS, here.namespace), lambda found: not found)


async def open_devices(here: Challenges, node: str) -> Sequence[str]:
    """The devices of the node for claims with a fresh challenge."""
    devices = [one for raw in await proof_slices(here.admin, node) for one in raw["spec"].get("devices", ())]
    open_ones = [one for one in devices if [taint["effect"] for taint in one.get("taints", ())] == ["NoExecute"]]
    return [one["name"] for one in open_ones if one.get("bindingConditions") == [CHALLENGED]]


async def test_pod_is_bound_after_its_node_has_answered_a_new_challenge(
    both: Challenges, request: pytest.FixtureRequest
) -> None:
    # The time of an allocation is in whole seconds: a challenge of the same second counts as newer.
    await asyncio.sleep(1)
    before = {name: len(agent.audiences) for name, agent in both.agents.items()}
    began = await both.asks("train")
    node = await both.node_of("train")
    report_figures(request, seconds_from_creation_to_binding=time.monotonic() - began)
    claim = await both.claim("train")
    entry = (await both.admin.get(NODE_EVIDENCES, node))["status"]["sources"]["jwt-svid"]
    allocated = claim["status"]["allocation"]["allocationTimestamp"]
    assert datetime.fromisoformat(entry["challenged"]) > datetime.fromisoformat(allocated)
    assert len(both.agents[node].audiences) > before[node]
    (status,) = claim["status"]["devices"]
    assert [(one["type"], one["reason"]) for one in status["conditions"]] == [(CHALLENGED, "ChallengeAnswered")]
    assert len(await gpus_of(both.admin, both.namespace, "train")) == 1


async def test_pods_that_ask_for_no_challenge_do_not_wait_for_one(both: Challenges) -> None:
    await both.user.create(PODS, asking("plain", hash=HASH), both.namespace)
    await both.node_of("plain")
    status = (await both.claim("plain"))["status"]
    assert "devices" not in status
    assert not any("bindingConditions" in one for one in status["allocation"]["devices"]["results"])


async def test_pod_goes_to_another_node_when_the_first_one_does_not_answer(
    both: Challenges, request: pytest.FixtureRequest
) -> None:
    await both.kill_attest(A)
    began = await both.asks("train")
    first = await both.claim("train")
    assert {one["pool"] for one in first["status"]["allocation"]["devices"]["results"]} == {A}
    assert await both.node_of("train") == B
    report_figures(request, seconds_from_creation_to_the_other_node=time.monotonic() - began)
    assert any(f"node {A} did not answer a challenge" in one for one in await both.messages("train"))


async def test_pod_waits_while_no_reconciler_runs(both: Challenges) -> None:
    await both.kill_reconciler()
    await both.asks("train")
    claim = await both.claim("train")
    allocated = datetime.fromisoformat(claim["status"]["allocation"]["allocationTimestamp"])

    async def has_waited() -> bool:
        made = await both.admin.get(PODS, "train", both.namespace)
        assert not made["spec"].get("nodeName")
        return (datetime.now(allocated.tzinfo) - allocated).total_seconds() > 7  # noqa: TID251 - the scheduler's clock

    await wait_until(has_waited)
    await both.start_reconciler()
    assert await both.node_of("train") in (A, B)
