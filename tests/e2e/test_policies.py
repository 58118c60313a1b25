"""What the policies allow, and that the API server accepts them. For what they refuse, see tests/e2e/attacks. No
gpuwarden server runs here."""

import base64
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import (
    BLINDED,
    CANONICAL,
    FORGED_STATUS,
    GATE,
    GPU_NODES,
    MANAGE,
    NODE_EVIDENCES,
    OUTPUTS,
    POLICIES,
    REGISTRATION,
    ClusterUsers,
    annotations,
    failing_open,
    forged,
    installed_policies,
    is_allowed,
    refused,
    reserved_pod,
)
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    MUTATING,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    VALIDATING,
    Kube,
    Raw,
    Resource,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from webhook.evidence.node_evidence import new_node_evidence
from webhook.kube.install.policies import Installation, webhooks

OLDER = OUTPUTS[4:]

# The fixtures of this module and the event loop of their connections live as long as the module.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(cluster: Cluster) -> AsyncIterator[ClusterUsers]:
    async with installed_policies(cluster) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(users: ClusterUsers) -> AsyncIterator[str]:
    async with new_namespace(users.admin, CANONICAL) as name:
        yield name


# The API server accepts every object.


async def test_api_server_reports_no_type_warnings_for_the_policies(users: ClusterUsers) -> None:
    """Types are checked in the background; errors are in the status."""
    names = {one["metadata"]["name"] for one in POLICIES if one["kind"] == "ValidatingAdmissionPolicy"}

    async def statuses() -> dict[str, Raw]:
        found = await users.admin.list(Resource(REGISTRATION, "validatingadmissionpolicies", is_namespaced=False))
        return {one["metadata"]["name"]: one.get("status", {}) for one in found if one["metadata"]["name"] in names}

    found = await wait_until(statuses, lambda seen: all("observedGeneration" in one for one in seen.values()))
    assert found.keys() == names
    assert {name: one.get("typeChecking", {}) for name, one in found.items()} == {name: {} for name in names}


async def test_every_webhook_is_accepted(users: ClusterUsers) -> None:
    whole = Installation(opt_in="example.test/nowhere", reviews_deletes=True, reviews_bindings=True)
    for manifest in webhooks(whole):
        of = MUTATING if manifest["kind"].startswith("Mutating") else VALIDATING
        await users.admin.create(of, {**manifest, "metadata": {"name": "all-of-it"}}, dryRun="All")


# Annotations and gates of existing pods.


async def test_account_with_manage_permission_can_write(users: ClusterUsers, enabled: str) -> None:
    await reserved_pod(users, enabled, schedulingGates=[{"name": GATE}])
    for subresource in ("", "status"):
        await users.warden.patch(PODS, "a", forged("gpuwarden.io/node", f"by{subresource}"), enabled, subresource)
        assert (await annotations(users, enabled))["gpuwarden.io/node"] == f"by{subresource}"
    await users.warden.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/0"}], enabled)
    await pod_in_phase(users.admin, enabled, "a", "Running")


async def test_manage_permission_can_be_granted_for_one_namespace(users: ClusterUsers, enabled: str) -> None:
    await users.admin.create(ROLES, {"metadata": {"name": "manage"}, "rules": [MANAGE]}, enabled)
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "manage"}
    given = {"metadata": {"name": "manage"}, "roleRef": ref, "subjects": [{"kind": "User", "name": "pat"}]}
    await users.admin.create(ROLE_BINDINGS, given, enabled)
    await users.user.create(PODS, pod("a"), enabled)
    await wait_until(lambda: is_allowed(users.user, PODS.path(enabled, "a"), forged("gpuwarden.io/node")))
    async with new_namespace(users.admin, CANONICAL) as other:
        await users.user.create(PODS, pod("a"), other)
        await refused(users.user.patch(PODS, "a", forged("gpuwarden.io/node"), other))
    # Cluster-scoped objects need the permission for the whole cluster.
    await refused(users.user.patch(GPU_NODES, "node-p", FORGED_STATUS, subresource="status"))


async def test_owner_can_change_other_fields_of_a_pod_with_gpus(users: ClusterUsers, enabled: str) -> None:
    await reserved_pod(users, enabled)
    await pod_in_phase(users.admin, enabled, "a", "Running")
    free: Raw = {
        "metadata": {
            "annotations": {"example.test/note": "x", "gpuwarden.io/required-hash": "sha256:any"},
            "labels": {"a": "b"},
            "finalizers": ["example.test/hold"],
        }
    }
    await users.user.patch(PODS, "a", free, enabled)
    ready = {"status": {"conditions": [{"type": "Mine", "status": "True"}]}}
    await users.user.patch(PODS, "a", ready, enabled, "status")
    await users.user.delete(PODS, "a", enabled, grace=0)
    await users.user.patch(PODS, "a", {"metadata": {"finalizers": None}}, enabled)
    await gone(users.admin, PODS, "a", enabled)


async def test_older_annotations_are_not_touched_without_opt_in(users: ClusterUsers) -> None:
    async with new_namespace(users.admin) as namespace:
        old = dict.fromkeys(OLDER, "as given")
        await users.user.create(PODS, pod("a", annotations=old), namespace)
        assert await annotations(users, namespace) == old
        await users.user.patch(PODS, "a", forged("fudo.org/gpu.uuid", "another"), namespace)
        await refused(users.user.patch(PODS, "a", forged("gpuwarden.io/gpu-uuid"), namespace))
        await users.user.delete(PODS, "a", namespace)
        await gone(users.admin, PODS, "a", namespace)


# At creation.


async def test_copied_manifest_keeps_its_gpu_request(users: ClusterUsers, enabled: str) -> None:
    notes = {"gpuwarden.io/claim": '{"gpus":1}', "gpuwarden.io/gpu-uuid": "GPU-0"}
    await users.user.create(PODS, pod("a", annotations=notes, containers=[BLINDED]), enabled)
    assert await annotations(users, enabled) == {"gpuwarden.io/claim": '{"gpus":1}'}


# Reservations, and the installation.


async def test_garbage_collector_completes_a_foreground_deletion_of_evidence(
    users: ClusterUsers, cluster: Cluster
) -> None:
    """After a foreground deletion the garbage collector removes its finalizer; it has no `manage` permission."""
    new = new_node_evidence("node-q")
    await users.warden.create(
        NODE_EVIDENCES, {**new, "metadata": {**new["metadata"], "finalizers": ["example.test/foreground"]}}
    )
    await users.warden.delete(NODE_EVIDENCES, "node-q")
    async with Kube(cluster.as_user("system:serviceaccount:kube-system:generic-garbage-collector")) as collector:
        await collector.patch(NODE_EVIDENCES, "node-q", {"metadata": {"finalizers": None}})
    await gone(users.admin, NODE_EVIDENCES, "node-q")


async def test_ca_injector_can_update_the_ca_bundle(users: ClusterUsers, cluster: Cluster) -> None:
    bundle = base64.b64encode(cluster.ca.read_bytes()).decode()
    change = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    for of in (MUTATING, VALIDATING):
        await users.user.patch(of, "gpuwarden", change)


async def test_other_webhook_configurations_are_not_protected(users: ClusterUsers) -> None:
    manifest = webhooks(Installation(opt_in="example.test/nowhere"))[0]
    other = {**manifest, "metadata": {"name": "anothers"}, "webhooks": manifest["webhooks"][:1]}
    await users.user.create(MUTATING, other)
    await users.user.patch(MUTATING, "anothers", failing_open(0))
    await users.user.delete(MUTATING, "anothers")


async def test_cluster_admin_has_manage_permission(users: ClusterUsers, enabled: str) -> None:
    """The permission stops everyone below cluster-admin. A user who can grant permissions cannot be stopped."""
    await reserved_pod(users, enabled)
    assert await is_allowed(users.boss, PODS.path(enabled, "a"), forged("gpuwarden.io/node"))
    assert await is_allowed(users.boss, GPU_NODES.path(None, "node-p", "status"), FORGED_STATUS)
    await users.boss.call("DELETE", MUTATING.path(None, "gpuwarden"), query={"dryRun": "All"})
