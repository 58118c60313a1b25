"""Another controller or user, with all rights on our objects but without `manage reservations.gpuwarden.io`, makes GPUs
and proofs up."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, suppress

import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ApiError, Kube, Raw, Resource, gone, wait_until
from tests.e2e.test_policies import CRDS, resource_of
from webhook.crds import manifests as crds
from webhook.policies import Installation, policies

API = "apis/gpuwarden.io/v1alpha1"
GPU_NODES = Resource(API, "gpunodes", is_namespaced=False)
NODE_EVIDENCES = Resource(API, "nodeevidences", is_namespaced=False)
TRUST_BUNDLES = Resource(API, "trustbundles", is_namespaced=False)
OURS = {"GPUNode": GPU_NODES, "NodeEvidence": NODE_EVIDENCES, "TrustBundle": TRUST_BUNDLES}
KINDS = {"GPUNode": {"devices": [{"uuid": "GPU-1"}]}, "NodeEvidence": {}, "TrustBundle": {"trustDomain": "a.test"}}
CHANGED: dict[str, Raw] = {
    "GPUNode": {"spec": {"devices": [{"uuid": "GPU-of-another"}]}},
    "NodeEvidence": {"metadata": {"labels": {"a": "b"}}},
    "TrustBundle": {"spec": {"trustDomain": "evil.test"}},
}
# What NVIDIA's runtime takes for other GPUs than one, or for none.
NO_UUIDS = ("all", "none", "void", "0", "0,1", "GPU-1,GPU-2", "nvidia.com/gpu=all", "management.nvidia.com/gpu=all")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@frozen
class Scene:
    admin: Kube
    # May do everything with our objects, and holds no `manage`.
    controller: Kube
    warden: Kube


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(cluster: Cluster) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        for manifest in crds():
            if await admin.find(CRDS, manifest["metadata"]["name"]) is None:
                await admin.create(CRDS, manifest)
        everything: Raw = {"apiGroups": ["gpuwarden.io"], "resources": [], "verbs": ["*"]}
        everything["resources"] = [f"{of.plural}{part}" for of in OURS.values() for part in ("", "/status")]
        manage = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}
        for user, rules in (("another-controller", [everything]), ("a-warden", [everything, manage])):
            ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user}
            await admin.create(CLUSTER_ROLES, {"metadata": {"name": user}, "rules": rules})
            stack.push_async_callback(admin.delete, CLUSTER_ROLES, user)
            bound = {"metadata": {"name": user}, "roleRef": ref, "subjects": [{"kind": "User", "name": user}]}
            await admin.create(CLUSTER_ROLE_BINDINGS, bound)
            stack.push_async_callback(admin.delete, CLUSTER_ROLE_BINDINGS, user)
        for manifest in policies(Installation()):
            await admin.create(resource_of(manifest), manifest)
            stack.push_async_callback(admin.delete, resource_of(manifest), manifest["metadata"]["name"])
        found = Scene(
            admin,
            await stack.enter_async_context(Kube(cluster.as_user("another-controller"))),
            await stack.enter_async_context(Kube(cluster.as_user("a-warden"))),
        )
        await wait_until(lambda: acts(found), seconds=20)
        yield found


async def acts(scene: Scene) -> bool:
    """A policy acts about a second after it is written; deletes are guarded in every version."""
    with suppress(ApiError):
        await scene.admin.create(GPU_NODES, made("GPUNode", "node-acts"))
    try:
        await scene.controller.call("DELETE", GPU_NODES.path(None, "node-acts"), query={"dryRun": "All"})
    except ApiError as exc:
        return exc.status == 403 and "by gpuwarden only" in exc.message
    return False


def made(kind: str, name: str) -> Raw:
    return {"apiVersion": "gpuwarden.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": KINDS[kind]}


async def refused(what: Awaitable[Raw]) -> None:
    with pytest.raises(ApiError) as caught:
        await what
    assert caught.value.status == 403
    assert "by gpuwarden only" in caught.value.message
    assert "another-controller" in caught.value.message


@pytest_asyncio.fixture(params=KINDS, loop_scope="module")
async def there(request: pytest.FixtureRequest, scene: Scene) -> AsyncIterator[str]:
    """One object of ours of each kind, named `victim`."""
    kind = str(request.param)
    await scene.admin.create(OURS[kind], made(kind, "victim"))
    yield kind
    with suppress(ApiError):
        await scene.admin.patch(OURS[kind], "victim", {"metadata": {"finalizers": None}})
        await scene.admin.delete(OURS[kind], "victim")
    await gone(scene.admin, OURS[kind], "victim")


@pytest.mark.parametrize("kind", KINDS)
async def test_others_create_none_of_our_objects(scene: Scene, kind: str) -> None:
    await refused(scene.controller.create(OURS[kind], made(kind, "forged"), dryRun="All"))
    await scene.warden.create(OURS[kind], made(kind, "forged"), dryRun="All")


async def test_others_change_nothing_that_our_objects_say(scene: Scene, there: str) -> None:
    of = OURS[there]
    await refused(scene.controller.patch(of, "victim", CHANGED[there]))
    whole = await scene.admin.get(of, "victim")
    if KINDS[there]:
        await refused(scene.controller.replace(of, {key: one for key, one in whole.items() if key != "spec"}))
    assert await scene.admin.get(of, "victim") == whole


async def test_others_delete_none_of_our_objects(scene: Scene, there: str) -> None:
    of = OURS[there]
    await refused(scene.controller.delete(of, "victim"))
    await refused(scene.controller.call("DELETE", of.path(None), query={"fieldSelector": "metadata.name=victim"}))
    assert await scene.admin.find(of, "victim")


async def test_objects_are_written_again_for_their_stored_version_by_anybody(scene: Scene, there: str) -> None:
    same = await scene.admin.get(OURS[there], "victim")
    await scene.controller.replace(OURS[there], same)


async def test_garbage_collector_ends_a_delete_that_was_allowed(cluster: Cluster, scene: Scene, there: str) -> None:
    """It takes its finalizer off, and holds no permission of ours."""
    of = OURS[there]
    await scene.warden.patch(of, "victim", {"metadata": {"finalizers": ["example.test/foreground"]}})
    await scene.warden.delete(of, "victim")
    async with Kube(cluster.as_user("system:serviceaccount:kube-system:generic-garbage-collector")) as collector:
        await collector.patch(of, "victim", {"metadata": {"finalizers": None}})
    await gone(scene.admin, of, "victim")


@pytest.mark.parametrize("uuid", NO_UUIDS)
async def test_not_even_we_store_a_device_that_is_no_uuid(scene: Scene, uuid: str) -> None:
    content = {**made("GPUNode", "forged"), "spec": {"devices": [{"uuid": uuid}]}}
    with pytest.raises(ApiError) as caught:
        await scene.warden.create(GPU_NODES, content, dryRun="All")
    assert caught.value.status == 422
    assert "spec.devices[0].uuid" in caught.value.message


@pytest.mark.parametrize("uuid", ["GPU-2d6f6a3e-5b0c-4f0e-9b1c-0f6f6f6f6f6f", "MIG-GPU-2d6f6a3e-5b0c/1/0", "GPU-0"])
async def test_uuids_of_gpus_and_their_slices_are_stored(scene: Scene, uuid: str) -> None:
    content = {**made("GPUNode", "node-x"), "spec": {"devices": [{"uuid": uuid}]}}
    await scene.warden.create(GPU_NODES, content, dryRun="All")
