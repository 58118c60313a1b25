"""An attacker in one of gpuwarden's Pods changes fields that its account may patch and gpuwarden does not write. No
gpuwarden server runs here."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import (
    CANONICAL,
    GATE,
    OUTPUTS,
    ClusterUsers,
    forged,
    installed_policies,
    is_allowed,
    refused,
)
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLAIMS,
    NODES,
    PODS,
    Changes,
    Kube,
    Raw,
    gone,
    pod,
)
from webhook.scheduler.binder_volumes import SELECTED_NODE

OTHERS_TAINT: Raw = {"key": "example.test/mine", "effect": "NoSchedule"}
OUR_TAINT: Raw = {"key": "gpuwarden.io/evidence-lost", "effect": "NoSchedule"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(cluster: Cluster) -> AsyncIterator[ClusterUsers]:
    async with installed_policies(cluster) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(users: ClusterUsers) -> AsyncIterator[str]:
    async with new_namespace(users.admin, CANONICAL) as name:
        yield name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ([{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}], "spec.containers"),
        ({"spec": {"activeDeadlineSeconds": 1}}, "spec.activeDeadlineSeconds"),
        ({"metadata": {"annotations": {"example.test/note": "x"}}}, "metadata.annotations[example.test/note]"),
        ({"metadata": {"labels": {"app": "other"}}}, "metadata.labels[app]"),
        ({"metadata": {"finalizers": ["example.test/hold"]}}, "metadata.finalizers"),
    ],
    ids=["image", "deadline", "annotation", "label", "finalizer"],
)
async def test_reconciler_account_changes_only_gpuwarden_fields_of_pods(
    users: ClusterUsers, enabled: str, change: Raw | Changes, what: str
) -> None:
    await users.user.create(PODS, pod("plain"), enabled)
    await users.user.create(PODS, pod("gated", schedulingGates=[{"name": GATE}]), enabled)
    for name in ("plain", "gated"):
        await refused(users.reconciler.patch(PODS, name, change, enabled), what, "gpuwarden-reconcile")
        await users.user.call("PATCH", PODS.path(enabled, name), change, {"dryRun": "All"})


async def test_reconciler_account_cannot_add_a_debug_container(users: ClusterUsers, enabled: str) -> None:
    await users.user.create(PODS, pod("a"), enabled)
    change = {"spec": {"ephemeralContainers": [{"name": "d", "image": "evil"}]}}
    await refused(users.reconciler.patch(PODS, "a", change, enabled, "ephemeralcontainers"), "spec.ephemeralContainers")
    await users.user.call("PATCH", PODS.path(enabled, "a", "ephemeralcontainers"), change, {"dryRun": "All"})


async def test_reconciler_account_removes_only_its_own_gate_and_sets_a_node(users: ClusterUsers, enabled: str) -> None:
    gates = [{"name": "example.test/mine"}, {"name": GATE}]
    await users.user.create(PODS, pod("a", schedulingGates=gates), enabled)
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-0"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    await refused(users.reconciler.patch(PODS, "a", {"spec": {"schedulingGates": gates[1:]}}, enabled), "spec.sched")
    spec: Raw = {"schedulingGates": gates[:1], "affinity": affinity}
    opened: Raw = {"metadata": {"annotations": dict.fromkeys(OUTPUTS, "x")}, "spec": spec}
    await users.reconciler.patch(PODS, "a", opened, enabled)
    await refused(users.reconciler.patch(PODS, "a", {"spec": {"nodeSelector": {"a": "b"}}}, enabled), "spec.nodeSel")
    await users.reconciler.patch(PODS, "a", forged("gpuwarden.io/woken-at", "now"), enabled)


async def test_binder_account_writes_only_the_scheduled_condition(users: ClusterUsers, enabled: str) -> None:
    await users.user.create(PODS, pod("a", schedulerName="nobody"), enabled)
    said = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
    await users.binder.patch(PODS, "a", {"status": said}, enabled, "status")
    for change, what in (
        ({"status": {"podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}}, "status.podIP"),
        ({"status": {"phase": "Succeeded"}}, "status.phase"),
        ({"metadata": {"labels": {"app": "other"}}}, "metadata.labels[app]"),
    ):
        await refused(users.binder.patch(PODS, "a", change, enabled, "status"), what, "gpuwarden-bind")
    await users.user.delete(PODS, "a", enabled)
    await gone(users.admin, PODS, "a", enabled)


async def test_binder_account_sets_only_the_selected_node_of_a_claim_once(users: ClusterUsers, enabled: str) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "x"}
    await users.user.create(CLAIMS, {"metadata": {"name": "data"}, "spec": spec}, enabled)
    path = CLAIMS.path(enabled, "data")
    others: list[tuple[Raw, str]] = [
        ({"metadata": {"annotations": {"example.test/note": "x"}}}, ""),
        ({"metadata": {"labels": {"app": "other"}}}, ""),
        ({"metadata": {"finalizers": None}}, ""),
        ({"spec": {"volumeName": "of-somebody"}}, ""),
        ({"status": {"phase": "Lost"}}, "status"),
    ]
    for change, subresource in others:
        await refused(users.binder.patch(CLAIMS, "data", change, enabled, subresource), "gpuwarden-bind")
        await users.user.call("PATCH", CLAIMS.path(enabled, "data", subresource), change, {"dryRun": "All"})
    await users.binder.patch(CLAIMS, "data", forged(SELECTED_NODE, "node-0"), enabled)
    for value in ("node-1", None):
        change = {"metadata": {"annotations": {SELECTED_NODE: value}}}
        assert not await is_allowed(users.binder, path, change)
        assert await is_allowed(users.user, path, change)
    await users.user.delete(CLAIMS, "data", enabled)


async def test_reconciler_account_changes_only_its_own_taint(users: ClusterUsers) -> None:
    node = NODES.path(None, "node-0")
    before = (await users.admin.get(NODES, "node-0"))["spec"].get("taints", [])

    async def tried(who: Kube, *taints: Raw) -> bool:
        return await is_allowed(who, node, {"spec": {"taints": [*taints]}})

    assert await tried(users.reconciler, *before, OUR_TAINT)
    assert not await tried(users.reconciler, *before, {**OUR_TAINT, "effect": "NoExecute"})
    assert not await tried(users.reconciler, *before, OTHERS_TAINT)
    assert not await tried(users.exporter, *before, OUR_TAINT)
    await users.admin.patch(NODES, "node-0", {"spec": {"taints": [*before, OTHERS_TAINT, OUR_TAINT]}})
    try:
        assert await tried(users.reconciler, *before, OTHERS_TAINT)
        assert not await tried(users.reconciler, *before, OUR_TAINT)
    finally:
        await users.admin.patch(NODES, "node-0", {"spec": {"taints": before or None}})


@pytest.mark.parametrize(
    ("change", "by"),
    [
        ({"metadata": {"labels": {"gpuid.github.com/gpu-0": "1"}}}, "exporter"),
        ({"metadata": {"annotations": {"gpuwarden.io/gpus": "{}"}}}, "exporter"),
        ({"metadata": {"labels": {"example.test/a": "b"}}}, None),
        ({"metadata": {"annotations": {"fudo.org/gpu.device.labels": "e30="}}}, None),
        ({"metadata": {"finalizers": ["example.test/hold"]}}, None),
        ({"spec": {"unschedulable": True}}, None),
    ],
    ids=["serials", "gpus", "label", "annotation", "finalizer", "cordon"],
)
async def test_exporter_account_writes_only_serials_and_gpu_annotations(
    users: ClusterUsers, change: Raw, by: str | None
) -> None:
    node = NODES.path(None, "node-0")
    assert await is_allowed(users.exporter, node, change) == (by == "exporter")
    assert not await is_allowed(users.reconciler, node, change)
    assert await is_allowed(users.user, node, change)
