"""`gpuwarden release`: an operator releases the GPU of a deleted pod."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_force_delete import delete, run_victim
from tests.e2e.cluster_users import grant
from tests.e2e.kube import EVENTS, PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.processes import Site, site, with_policies
from tests.running import GPUWARDEN

# No orphan is released by time in these tests.
FLAGS = ("--orphan-margin", "1h", "--max-grace", "1h")


@pytest.fixture
async def here(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    async with site(cluster, kube, tmp_path, nodes=1, gpus=1, name="end", replicas=1, flags=FLAGS) as found:
        await found.reconciler()
        await found.wait_until_offered()
        yield found


async def release(kubeconfig: Path, *wanted: str) -> tuple[int, str]:
    """The exit status and the output."""
    process = await asyncio.create_subprocess_exec(
        GPUWARDEN,
        "release",
        "--kubeconfig",
        str(kubeconfig),
        *wanted,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def orphans(here: Site, node: str) -> list[Raw]:
    return [one for one in (await here.held_on(node)).values() if "orphanedAt" in one]


async def test_release_frees_the_gpu_of_a_deleted_pod(here: Site, cluster: Cluster) -> None:
    (node,) = here.nodes
    uuid = await run_victim(here, node, grace=0)
    name = f"{here.namespace}/old-{node}"
    status, said = await release(here.kubeconfig, name)
    assert (status, "is not gone: delete the pod" in said) == (1, True), said

    await delete(here, node, 0)
    await wait_until(lambda: orphans(here, node))
    status, said = await release(cluster.as_user("release-nobody"), uuid)
    assert (status, "cannot be listed" in said) == (1, True), said
    assert await orphans(here, node)

    status, said = await release(here.kubeconfig, uuid)
    assert (status, f"of {name} with {uuid} on {node}" in said) == (0, True), said
    assert await here.held_on(node) == {}
    events = await here.kube.list(EVENTS, "default")
    messages = [
        one["message"] for one in events if one["involvedObject"]["name"] == node and one["reason"] == "OrphanEnded"
    ]
    assert any("an operator has released it" in one for one in messages), messages
    assert await wait_until(lambda: made(here))

    status, said = await release(here.kubeconfig, "GPU-nobody-has")
    assert (status, "there is no reservation for GPU-nobody-has" in said) == (1, True), said


WRITES_STATUS = [
    {"apiGroups": ["gpuwarden.io"], "resources": ["gpunodes", "gpunodes/status"], "verbs": ["get", "list", "update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
]
MANAGES = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}


async def test_release_needs_manage_permission_beside_status_writes(here: Site, cluster: Cluster) -> None:
    """The two accounts differ only in that permission; every policy is installed."""
    (node,) = here.nodes
    uuid = await run_victim(here, node, grace=0)
    await delete(here, node, 0)
    await wait_until(lambda: orphans(here, node))
    rights = {"release-writes": WRITES_STATUS, "release-manages": [*WRITES_STATUS, MANAGES]}
    async with with_policies(here), granted(here.kube, rights):
        status, said = await release(cluster.as_user("release-writes"), uuid)
        assert (status, "may you manage reservations.gpuwarden.io?" in said) == (1, True), said
        assert await orphans(here, node)
        status, said = await release(cluster.as_user("release-manages"), uuid)
        assert (status, f"with {uuid} on {node}" in said) == (0, True), said
        assert await here.held_on(node) == {}


@asynccontextmanager
async def granted(kube: Kube, rights: Mapping[str, Sequence[Raw]]) -> AsyncIterator[None]:
    """Grants a user cluster-wide rights."""
    async with AsyncExitStack() as stack:
        for name, rules in rights.items():
            await grant(kube, stack, name, list(rules), {"kind": "User", "name": name})
        yield


async def made(here: Site) -> Raw | None:
    try:
        return await here.kube.create(PODS, pod("next", gpus=1), here.namespace)
    except ApiError:
        return None
