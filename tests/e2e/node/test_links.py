"""A tenant creates a symbolic link in its volume and mounts the link by hostPath. The runtime would follow it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_gpu_variables import GUARDED, Harness, new_harness
from tests.e2e.cluster_users import resource_of
from tests.e2e.kube import CLAIMS, NAMESPACES, PODS, VOLUMES, ApiError, Kube, Raw, gone, wait_until
from tests.e2e.node.containers import SLEEP, container, real_pod, run_in, runs
from webhook.kube.install.policies import Installation, policies

VOLUME = "links"
EXEMPT = {"metadata": {"labels": {"gpuwarden.io/isolation": "none"}}}


@pytest.fixture
async def isolated(real_cluster: Cluster, real_kube: Kube) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        for manifest in policies(Installation()):
            name = manifest["metadata"]["name"]
            if name.startswith("gpuwarden-isolation"):
                await real_kube.create(resource_of(manifest), manifest)
                stack.push_async_callback(real_kube.delete, resource_of(manifest), name)
        harness = await stack.enter_async_context(new_harness(real_cluster, real_kube, GUARDED))
        await wait_until(lambda: is_refused(harness, real_pod("probe", hostPID=True)))
        # Policies of an earlier test act for a moment after they are deleted.
        await wait_until(lambda: is_refused(harness, real_pod("probe")), lambda refused: not refused)
        yield harness


async def is_refused(harness: Harness, content: Raw) -> bool:
    try:
        await harness.made(content, dryRun="All")
    except ApiError as exc:
        return exc.status == 403 and "denied request: " in exc.message
    return False


@pytest.fixture
async def volume(real_kube: Kube, isolated: Harness, tmp_path: Path) -> AsyncIterator[Path]:
    """A directory of the node, as a provisioner provides it for the tenant's claim."""
    path = tmp_path / "volume"
    path.mkdir()
    common: Raw = {"accessModes": ["ReadWriteOnce"], "storageClassName": VOLUME}
    size = {"storage": "1Mi"}
    spec = {**common, "capacity": size, "hostPath": {"path": str(path)}}
    await real_kube.create(VOLUMES, {"metadata": {"name": VOLUME}, "spec": spec})
    claim = {"metadata": {"name": VOLUME}, "spec": {**common, "resources": {"requests": size}}}
    await isolated.tenant.create(CLAIMS, claim, isolated.namespace)
    yield path
    await real_kube.call("DELETE", PODS.path(isolated.namespace), query={"gracePeriodSeconds": "0"})
    await real_kube.delete(CLAIMS, VOLUME, isolated.namespace)
    await gone(real_kube, CLAIMS, VOLUME, isolated.namespace)
    await real_kube.delete(VOLUMES, VOLUME)
    await gone(real_kube, VOLUMES, VOLUME)


def mounting(name: str, script: str, source: Raw, *, read_only: bool) -> Raw:
    mount = {"name": "mounted", "mountPath": "/mounted", "readOnly": read_only}
    one = container(script=script, volumeMounts=[mount])
    return real_pod(name, one, volumes=[{"name": "mounted", **source}], restartPolicy="Never")


async def test_symbolic_link_in_a_volume_gives_no_access(
    real_cluster: Cluster, real_kube: Kube, isolated: Harness, volume: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "key").write_text("of the node")
    script = f"ln -s {kept} /mounted/link; {SLEEP}"
    claimed = {"persistentVolumeClaim": {"claimName": VOLUME}}
    await isolated.made(mounting("writer", script, claimed, read_only=False))
    await runs(real_kube, isolated.namespace, "writer")
    await wait_until(lambda: is_link(volume / "link"))

    linked = {"hostPath": {"path": str(volume / "link")}}
    reader = mounting("reader", SLEEP, linked, read_only=True)
    with pytest.raises(ApiError, match=r"spec\.volumes\[mounted\]\.hostPath: not in a directory that an administrator"):
        await isolated.made(reader)

    # Why the policy is needed.
    await real_kube.patch(NAMESPACES, isolated.namespace, EXEMPT)
    await wait_until(lambda: is_let_in(isolated, reader))
    await isolated.made(reader)
    await runs(real_kube, isolated.namespace, "reader")
    assert await run_in(real_cluster, isolated.namespace, "reader", "cat /mounted/key") == "of the node"


async def is_link(path: Path) -> bool:
    return path.is_symlink()


async def is_let_in(harness: Harness, content: Raw) -> bool:
    return not await is_refused(harness, content)
