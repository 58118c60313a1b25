"""Another controller or user, with all rights on gpuwarden's objects but without `manage reservations.gpuwarden.io`,
forges GPUs and evidence."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import (
    BINDING_ENDS,
    CRDS,
    ENDS,
    FORGED_PROOF,
    FORGED_STATUS,
    GPU_NODES,
    NODE_EVIDENCES,
    TRUST_BUNDLES,
    ClusterUsers,
    failing_open,
    installed_policies,
    refused,
)
from tests.e2e.kube import (
    MUTATING,
    VALIDATING,
    ApiError,
    Changes,
    Kube,
    Raw,
    Resource,
    gone,
)
from webhook.evidence.node_evidence import new_node_evidence
from webhook.kube.gpu_node import FINALIZER

OURS = {"GPUNode": GPU_NODES, "NodeEvidence": NODE_EVIDENCES, "TrustBundle": TRUST_BUNDLES}
KINDS = {"GPUNode": {"devices": [{"uuid": "GPU-1"}]}, "NodeEvidence": {}, "TrustBundle": {"trustDomain": "a.test"}}
CHANGED: dict[str, Raw] = {
    "GPUNode": {"spec": {"devices": [{"uuid": "GPU-of-another"}]}},
    "NodeEvidence": {"metadata": {"labels": {"a": "b"}}},
    "TrustBundle": {"spec": {"trustDomain": "evil.test"}},
}
# Values that NVIDIA's runtime interprets as several GPUs or none.
NO_UUIDS = ("all", "none", "void", "0", "0,1", "GPU-1,GPU-2", "nvidia.com/gpu=all", "management.nvidia.com/gpu=all")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(cluster: Cluster) -> AsyncIterator[ClusterUsers]:
    async with installed_policies(cluster) as found:
        yield found


def made(kind: str, name: str) -> Raw:
    return {"apiVersion": "gpuwarden.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": KINDS[kind]}


async def refused_for_users(what: Awaitable[Raw]) -> None:
    with pytest.raises(ApiError) as caught:
        await what
    assert caught.value.status == 403
    assert "by gpuwarden only" in caught.value.message
    assert "not by pat" in caught.value.message


@pytest_asyncio.fixture(params=KINDS, loop_scope="module")
async def existing_kind(request: pytest.FixtureRequest, users: ClusterUsers) -> AsyncIterator[str]:
    """One gpuwarden object of each kind, named `victim`."""
    kind = str(request.param)
    await users.admin.create(OURS[kind], made(kind, "victim"))
    yield kind
    with suppress(ApiError):
        await users.admin.patch(OURS[kind], "victim", {"metadata": {"finalizers": None}})
        await users.admin.delete(OURS[kind], "victim")
    await gone(users.admin, OURS[kind], "victim")


@pytest.mark.parametrize("kind", KINDS)
async def test_users_without_permission_cannot_create_gpuwarden_objects(users: ClusterUsers, kind: str) -> None:
    await refused_for_users(users.user.create(OURS[kind], made(kind, "forged"), dryRun="All"))
    await users.warden.create(OURS[kind], made(kind, "forged"), dryRun="All")


async def test_users_without_permission_cannot_change_gpuwarden_objects(
    users: ClusterUsers, existing_kind: str
) -> None:
    of = OURS[existing_kind]
    await refused_for_users(users.user.patch(of, "victim", CHANGED[existing_kind]))
    whole = await users.admin.get(of, "victim")
    if KINDS[existing_kind]:
        await refused_for_users(users.user.replace(of, {key: one for key, one in whole.items() if key != "spec"}))
    assert await users.admin.get(of, "victim") == whole


async def test_users_without_permission_cannot_delete_gpuwarden_objects(
    users: ClusterUsers, existing_kind: str
) -> None:
    of = OURS[existing_kind]
    await refused_for_users(users.user.delete(of, "victim"))
    await refused_for_users(users.user.call("DELETE", of.path(None), query={"fieldSelector": "metadata.name=victim"}))
    assert await users.admin.find(of, "victim")


async def test_unchanged_objects_can_be_rewritten_for_storage_migration(
    users: ClusterUsers, existing_kind: str
) -> None:
    same = await users.admin.get(OURS[existing_kind], "victim")
    await users.user.replace(OURS[existing_kind], same)


async def test_garbage_collector_completes_an_allowed_deletion(
    cluster: Cluster, users: ClusterUsers, existing_kind: str
) -> None:
    """The garbage collector removes its finalizer without a permission of gpuwarden."""
    of = OURS[existing_kind]
    await users.warden.patch(of, "victim", {"metadata": {"finalizers": ["example.test/foreground"]}})
    await users.warden.delete(of, "victim")
    async with Kube(cluster.as_user("system:serviceaccount:kube-system:generic-garbage-collector")) as collector:
        await collector.patch(of, "victim", {"metadata": {"finalizers": None}})
    await gone(users.admin, of, "victim")


@pytest.mark.parametrize("uuid", NO_UUIDS)
async def test_device_without_a_valid_uuid_is_refused_for_every_writer(users: ClusterUsers, uuid: str) -> None:
    content = {**made("GPUNode", "forged"), "spec": {"devices": [{"uuid": uuid}]}}
    with pytest.raises(ApiError) as caught:
        await users.warden.create(GPU_NODES, content, dryRun="All")
    assert caught.value.status == 422
    assert "spec.devices[0].uuid" in caught.value.message


@pytest.mark.parametrize("uuid", ["GPU-2d6f6a3e-5b0c-4f0e-9b1c-0f6f6f6f6f6f", "MIG-GPU-2d6f6a3e-5b0c/1/0", "GPU-0"])
async def test_uuids_of_gpus_and_mig_devices_are_accepted(users: ClusterUsers, uuid: str) -> None:
    content = {**made("GPUNode", "node-x"), "spec": {"devices": [{"uuid": uuid}]}}
    await users.warden.create(GPU_NODES, content, dryRun="All")


# Reservations, evidence and BindingEnds, each with its own policy.


async def test_only_gpuwarden_writes_reservations(users: ClusterUsers) -> None:
    await refused(
        users.user.patch(GPU_NODES, "node-p", FORGED_STATUS, subresource="status"),
        "The reservations on node-p are written by gpuwarden only, not by pat.",
    )
    await users.warden.patch(GPU_NODES, "node-p", {"status": {"free": 1}}, subresource="status")
    # The devices of a node are no reservation.
    await users.user.patch(GPU_NODES, "node-p", {"metadata": {"labels": {"a": "b"}}})


async def test_gpunodes_with_reservations_cannot_be_deleted(users: ClusterUsers) -> None:
    said = "The reservations on node-p are deleted by gpuwarden only, not by pat."
    await refused(users.user.delete(GPU_NODES, "node-p"), said)
    # A deletion of a collection names no object, but each object is checked.
    await refused(
        users.user.call("DELETE", GPU_NODES.path(None), query={"fieldSelector": "metadata.name=node-p"}), said
    )
    assert await users.admin.find(GPU_NODES, "node-p")
    await users.warden.call("DELETE", GPU_NODES.path(None, "node-p"), query={"dryRun": "All"})


async def test_gpunode_with_reservations_keeps_its_finalizer_whoever_removes_it(users: ClusterUsers) -> None:
    """Without it, a forced deletion could give one GPU to two pods."""
    content = {**made("GPUNode", "held"), "metadata": {"name": "held", "finalizers": ["example.test/a", FINALIZER]}}
    await users.admin.create(GPU_NODES, content)
    held = {"GPU-1/0": {"reservation": "r1", "phase": "pending", "namespace": "ml", "digest": "d1"}}
    status: Raw = {"status": {"capacity": 1, "free": 0, "held": held}}
    await users.admin.patch(GPU_NODES, "held", status, subresource="status")
    place, without = GPU_NODES.path(None, "held"), {"metadata": {"finalizers": ["example.test/a"]}}
    said = "GPUNode held holds reservations (1), so it keeps its finalizer gpuwarden.io/held and {} may not remove it."
    await refused(users.user.patch(GPU_NODES, "held", without), said.format("pat"), "gpuwarden release")
    # Nor while the object is deleted, by a user with the permission, or by one with all.
    await users.warden.delete(GPU_NODES, "held")
    for user in (users.warden, users.admin):
        await refused(user.patch(GPU_NODES, "held", without), "so it keeps its finalizer gpuwarden.io/held")
    # The reconciler may, and finalizers of others are free.
    await users.reconciler.call("PATCH", place, without, {"dryRun": "All"})
    await users.user.patch(GPU_NODES, "held", {"metadata": {"finalizers": [FINALIZER]}})
    # Without reservations everyone may.
    releasing = {"GPU-1/0": {**held["GPU-1/0"], "phase": "releasing"}}
    await users.admin.patch(GPU_NODES, "held", {"status": {"held": releasing}}, subresource="status")
    await users.admin.patch(GPU_NODES, "held", {"status": {"held": None, "free": 1}}, subresource="status")
    await users.user.patch(GPU_NODES, "held", {"metadata": {"finalizers": None}})
    await gone(users.admin, GPU_NODES, "held")


async def test_gpunode_with_reservations_and_without_finalizer_is_not_deleted(users: ClusterUsers) -> None:
    """The reconciler has not added it yet."""
    await users.admin.create(GPU_NODES, made("GPUNode", "held"))
    held = {"GPU-1/0": {"reservation": "r1", "phase": "releasing", "namespace": "ml", "digest": "d1"}}
    status: Raw = {"status": {"capacity": 1, "free": 0, "held": held}}
    await users.admin.patch(GPU_NODES, "held", status, subresource="status")
    for request in (
        users.warden.delete(GPU_NODES, "held"),
        users.warden.call("DELETE", GPU_NODES.path(None), query={"fieldSelector": "metadata.name=held"}),
    ):
        await refused(request, "GPUNode held holds reservations (1)")
    await users.admin.patch(GPU_NODES, "held", {"status": {"held": None, "free": 1}}, subresource="status")
    await users.warden.delete(GPU_NODES, "held")


async def test_only_gpuwarden_writes_evidence(users: ClusterUsers) -> None:
    said = "The evidence of node-p is written by gpuwarden only, not by pat."
    await refused(users.user.patch(NODE_EVIDENCES, "node-p", FORGED_PROOF, subresource="status"), said)
    await refused(users.user.patch(NODE_EVIDENCES, "node-p", {"metadata": {"labels": {"a": "b"}}}), said)
    new = new_node_evidence("node-q")
    await refused(users.user.create(NODE_EVIDENCES, new), "The evidence of node-q is written by gpuwarden only")
    await refused(users.user.delete(NODE_EVIDENCES, "node-p"), "The evidence of node-p is deleted", "pat")
    await refused(users.user.call("DELETE", NODE_EVIDENCES.path(None)), "is deleted by gpuwarden only", "pat")
    await users.warden.create(NODE_EVIDENCES, new, dryRun="All")
    await users.warden.patch(NODE_EVIDENCES, "node-p", FORGED_PROOF, subresource="status")
    # Unchanged, as for a storage migration.
    same = await users.admin.get(NODE_EVIDENCES, "node-p")
    await users.user.replace(NODE_EVIDENCES, same)


async def test_only_gpuwarden_writes_binding_ends(users: ClusterUsers) -> None:
    said = "BindingEnds are written by gpuwarden only, not by pat."
    await refused(users.user.create(BINDING_ENDS, {**ENDS, "metadata": {"name": "another"}}), said)
    kept = {"spec": {"kept": "2026-01-01T00:00:00Z", "nodes": {}}}
    await refused(users.user.patch(BINDING_ENDS, "gpuwarden", kept), said)
    await refused(users.user.delete(BINDING_ENDS, "gpuwarden"), said)
    await refused(users.user.call("DELETE", BINDING_ENDS.path(None)), said)
    await users.warden.patch(BINDING_ENDS, "gpuwarden", kept)
    await users.warden.call("DELETE", BINDING_ENDS.path(None, "gpuwarden"), query={"dryRun": "All"})


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (MUTATING, "gpuwarden"),
        (VALIDATING, "gpuwarden"),
        (CRDS, "gpunodes.gpuwarden.io"),
        (CRDS, "nodeevidences.gpuwarden.io"),
        (CRDS, "trustbundles.gpuwarden.io"),
        (CRDS, "bindingends.gpuwarden.io"),
    ],
    ids=["mutating", "validating", "gpunodes", "nodeevidences", "trustbundles", "bindingends"],
)
async def test_installation_objects_cannot_be_deleted(users: ClusterUsers, of: Resource, name: str) -> None:
    said = f"{of.plural} {name} belongs to gpuwarden"
    await refused(users.user.delete(of, name), said, "pat does not have it")
    if of is CRDS:
        await refused(users.user.patch(of, name, {"metadata": {"labels": {"a": "b"}}}), said)
    await users.warden.patch(of, name, {"metadata": {"labels": {"by": "warden"}}})


async def test_installation_objects_cannot_be_deleted_as_a_collection(users: ClusterUsers) -> None:
    """The request has no name, but each object is checked."""
    for of in (MUTATING, VALIDATING):
        await refused(users.user.call("DELETE", of.path(None)), "belongs to gpuwarden")
        assert await users.admin.find(of, "gpuwarden")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(failing_open(0), id="failing open"),
        pytest.param([{"op": "remove", "path": "/webhooks/0/matchConditions"}], id="match conditions removed"),
        pytest.param([{"op": "remove", "path": "/webhooks/0"}], id="webhook removed"),
        pytest.param([{"op": "replace", "path": "/webhooks/0/name", "value": "x.gpuwarden.io"}], id="another name"),
        pytest.param([{"op": "replace", "path": "/webhooks/0/rules/0/operations", "value": ["UPDATE"]}], id="rules"),
        pytest.param(
            [{"op": "replace", "path": "/webhooks/0/clientConfig/service/name", "value": "evil"}], id="service"
        ),
        pytest.param(
            [
                {"op": "remove", "path": "/webhooks/0/clientConfig/service"},
                {"op": "add", "path": "/webhooks/0/clientConfig/url", "value": "https://evil.test/"},
            ],
            id="url",
        ),
    ],
)
async def test_webhook_configuration_cannot_be_weakened(users: ClusterUsers, change: Changes) -> None:
    for of in (MUTATING, VALIDATING):
        await refused(users.user.patch(of, "gpuwarden", change), "belongs to gpuwarden")
