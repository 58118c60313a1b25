"""Devices whose evidence has ended attract no pod, with and without a reconciler.

The evidence of node A ends, and node B is proven and has free GPUs. The scheduler prefers A, which has fewer pods, and
the API server refuses each allocation there.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import BINDING_ENDS, resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.clusters import cluster_with_roles
from tests.e2e.dra.gpus import allocation, bound, claim_template, ended, proof_devices
from tests.e2e.dra.tenants import guards
from tests.e2e.dra.test_proof_devices import HASH, LONG, A, B, Proofs, cleared
from tests.e2e.kube import PODS, Kube, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Worker
from tests.e2e.test_ledger import installed
from tests.running import GPUWARDEN
from webhook.core.proof_claims import EVIDENCE_ENDED
from webhook.runtime.clock import utc_now

PODS_AFTER_THE_END = 4
# From the end until all of them are bound: attest waits up to 5 s, and the scheduler tries again after 1 to 10 s.
LIMIT = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No other test sees its policies."""
    with cluster_with_roles(tmp_path_factory.mktemp("closing")) as running:
        yield running


@pytest.fixture
async def proofs(cluster: Cluster, kube: Kube, classes: None, tmp_path: Path) -> AsyncIterator[Proofs]:
    """Nodes A and B with GPUs. The pods of B take CPUs."""
    await installed(kube)
    for manifest in guards():
        if manifest["kind"] != "DeviceClass" and not await kube.find(resource_of(manifest), name_of(manifest)):
            await kube.create(resource_of(manifest), manifest)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cleared, kube)
        namespace = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
        here = Proofs(cluster, kube, namespace, tmp_path)
        stack.push_async_callback(here.kill)
        await here.start()
        for node in (A, B):
            await here.node(node, PODS_AFTER_THE_END)
        await kube.create(PODS, busy(), namespace)
        yield here


def name_of(manifest: dict[str, dict[str, str]]) -> str:
    return manifest["metadata"]["name"]


def busy() -> dict[str, object]:
    content = pod("busy")
    content["spec"]["nodeName"] = B
    content["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "60", "memory": "400Gi"}}
    return content


@asynccontextmanager
async def closing(proofs: Proofs, node: str) -> AsyncIterator[Worker]:
    """`attest` of the node as the kubelet's plugin, with its own account and without a server or a SPIRE agent."""
    account = proofs.cluster.service_account_kubeconfig("gpuwarden", "gpuwarden-attest")
    with TemporaryDirectory(prefix="kubelet-") as directory:
        for one in ("plugins", "plugins_registry"):
            (Path(directory) / one).mkdir()
        spire = ["--spire-trust-domain", "example.org", "--spire-workload-api", f"unix:{directory}/agent.sock"]
        own = ["--node", node, "--kubelet-plugins", directory, "--kubeconfig", str(account), *spire]
        log = proofs.directory / "attest.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(GPUWARDEN, "attest", *own, stdout=file, stderr=file)
        worker = Worker(process, log)
        try:
            await worker.wait_for_log("waiting for the kubelet")
            yield worker
        finally:
            await worker.kill()


async def both_proven(proofs: Proofs, lasts: timedelta) -> datetime:
    """Returns the end of A, which has been written everywhere."""
    await proofs.proves(B)
    end = await proofs.proves(A, lasts=lasts)
    for node in (A, B):
        await wait_until(lambda node=node: proof_devices(proofs.kube, node))  # type: ignore[misc]  # bound now
    await claim_template(proofs.kube, proofs.namespace, 1, HASH)
    await wait_until(lambda: listed(proofs), lambda nodes: {A, B} <= nodes)
    assert utc_now() < end
    return end


async def listed(proofs: Proofs) -> set[str]:
    found = await proofs.kube.find(BINDING_ENDS, "gpuwarden")
    return set(found["spec"].get("nodes", ())) if found else set()


async def until_the_end(end: datetime) -> None:
    await asyncio.sleep((end - utc_now()).total_seconds() + 0.2)


async def seconds_until_all_are_bound(proofs: Proofs, end: datetime) -> float:
    """Creates pods after the end. They are all bound to B."""
    names = [f"late-{number}" for number in range(PODS_AFTER_THE_END)]
    for name in names:
        await proofs.pod(name)
    deadline = time.monotonic() + LIMIT
    for name in names:
        await bound(proofs.kube, proofs.namespace, name, max(1, deadline - time.monotonic()))
    seconds = (utc_now() - end).total_seconds()
    for name in names:
        (pair,) = await allocation(proofs.kube, proofs.namespace, name)
        assert (pair.node, pair.gpu) == (B, pair.proof)
    return seconds


async def closed(proofs: Proofs, node: str) -> bool:
    devices = (await proof_devices(proofs.kube, node)).values()
    return all(EVIDENCE_ENDED in [taint["key"] for taint in one["taints"]] for one in devices)


async def test_pods_go_to_another_node_while_no_reconciler_runs(proofs: Proofs, request: pytest.FixtureRequest) -> None:
    end = await both_proven(proofs, timedelta(seconds=7))
    async with closing(proofs, A) as attest:
        await proofs.kill()
        assert utc_now() < end
        await until_the_end(end)
        seconds = await seconds_until_all_are_bound(proofs, end)
        report_figures(request, seconds_from_the_end_to_the_last_bound=seconds)
        assert await closed(proofs, A)
        assert not await closed(proofs, B)
        assert "not closed" not in attest.log.read_text()


async def test_pods_go_to_another_node_while_a_reconciler_runs(proofs: Proofs, request: pytest.FixtureRequest) -> None:
    end = await both_proven(proofs, timedelta(seconds=5))
    await until_the_end(end)
    seconds = await seconds_until_all_are_bound(proofs, end)
    report_figures(request, seconds_from_the_end_to_the_last_bound=seconds)
    assert seconds < 8
    assert await closed(proofs, A)


async def test_device_that_attest_has_closed_is_opened_by_fresh_evidence(proofs: Proofs) -> None:
    end = await both_proven(proofs, timedelta(seconds=7))
    async with closing(proofs, A):
        await proofs.kill()
        await until_the_end(end)
        await wait_until(lambda: closed(proofs, A))
        await proofs.restart()
        await proofs.proves(A, lasts=LONG)
        await wait_until(lambda: closed(proofs, A), lambda found: not found)
        await proofs.pod("again")
        await bound(proofs.kube, proofs.namespace, "again")
        await ended(proofs.kube, proofs.namespace, "again")
