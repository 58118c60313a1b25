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
    NODES,
    PODS,
    Changes,
    Kube,
    Raw,
    pod,
)

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


async def test_reconciler_account_nominates_a_node_and_changes_nothing_else_in_the_status(
    users: ClusterUsers, enabled: str
) -> None:
    await users.user.create(PODS, pod("a", schedulerName="nobody"), enabled)
    await users.reconciler.patch(PODS, "a", {"status": {"nominatedNodeName": "node-0"}}, enabled, "status")
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    for change, what in (({"phase": "Failed"}, "status.phase"), (ready, "status.conditions")):
        await refused(users.reconciler.patch(PODS, "a", {"status": change}, enabled, "status"), what)


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
