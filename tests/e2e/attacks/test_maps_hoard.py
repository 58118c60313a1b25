"""Attack: a placement map that blocks GPUs for everyone, or that gets the GPUs that another tenant's StatefulSet
keeps."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import PODS, STATEFUL_SETS, ApiError, Kube, Raw, pod, stateful_set, wait_until
from tests.e2e.processes import OPT_IN, Site, site
from tests.e2e.test_maps import MAP
from tests.e2e.test_queue import GPU

LABELLED = {**OPT_IN, "gpuwarden.io/maps": "true"}


@asynccontextmanager
async def two_gpus(cluster: Cluster, kube: Kube, directory: Path) -> AsyncIterator[Site]:
    """One node, and the namespace of a tenant that has no map."""
    flags = ("--when-unavailable", "deny")
    async with site(cluster, kube, directory, nodes=1, gpus=2, name="hoard", replicas=1, flags=flags) as here:
        await here.reconciler()
        await here.wait_until_offered()
        yield here


async def is_admitted(kube: Kube, here: Site, gpus: int) -> bool:
    """Whether the tenant's pod would be admitted."""
    try:
        await kube.create(PODS, pod("train", gpus), here.namespace, dryRun="All")
    except ApiError as exc:
        if exc.reason != "NoFreeDevice":
            raise
        return False
    return True


async def create_set(kube: Kube, namespace: str, name: str, replicas: int, text: str) -> Raw:
    """Creates a StatefulSet without pods: the API server refuses them because their account does not exist."""
    content = stateful_set(name, replicas, annotations={MAP: text})
    content["spec"]["template"]["spec"]["serviceAccountName"] = "nobody"
    return await kube.create(STATEFUL_SETS, content, namespace)


@pytest.mark.parametrize(
    ("labels", "replicas"),
    [pytest.param(OPT_IN, 3, id="without-the-label"), pytest.param(LABELLED, 0, id="of-no-replicas")],
)
async def test_stateful_set_without_pods_does_not_keep_gpus_from_other_tenants(
    cluster: Cluster, kube: Kube, tmp_path: Path, labels: dict[str, str], replicas: int
) -> None:
    async with (
        two_gpus(cluster, kube, tmp_path) as here,
        new_namespace(kube, labels) as attacker,
        new_namespace(kube, LABELLED) as honest,
    ):
        (node,) = here.nodes
        await create_set(kube, attacker, "hoard", replicas, f"0={node}:GPU-{node}-0\n1={node}:GPU-{node}-1")
        # This set is reported later by the same watch: once its GPUs are kept, the other set has been processed.
        await create_set(kube, honest, "kept", 1, f"0={node}:GPU-{node}-1")
        await wait_until(lambda: is_admitted(kube, here, 2), lambda is_admitted: not is_admitted)
        assert await is_admitted(kube, here, 1)


async def test_uid_of_a_stateful_set_gives_no_access_from_another_namespace(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with (
        two_gpus(cluster, kube, tmp_path) as here,
        new_namespace(kube, OPT_IN) as attacker,
        new_namespace(kube, LABELLED) as honest,
    ):
        (node,) = here.nodes
        text = f"0={node}:GPU-{node}-0\n1={node}:GPU-{node}-1"
        made = await create_set(kube, honest, "kept", 2, text)
        await wait_until(lambda: is_admitted(kube, here, 1), lambda is_admitted: not is_admitted)
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "kept", "uid": made["metadata"]["uid"]}
        forged = pod("kept-0", annotations={MAP: text})
        forged["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
        found = await kube.create(PODS, forged, attacker, dryRun="All")
        assert GPU not in found["metadata"]["annotations"]
        # The set's own pods get them.
        own = await kube.create(PODS, forged, honest, dryRun="All")
        assert own["metadata"]["annotations"][GPU] == f"GPU-{node}-0"
