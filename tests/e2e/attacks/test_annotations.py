"""A tenant forges or changes annotations that gpuwarden writes on pods, or removes its gate. No gpuwarden server runs
here."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import (
    ALIAS,
    BLINDED,
    CANONICAL,
    GATE,
    OUTPUTS,
    ClusterUsers,
    annotations,
    forged,
    installed_policies,
    refused,
    reserved_pod,
)
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    NAMESPACES,
    PODS,
    gone,
    pod,
)

# In an opted-in namespace a copied manifest keeps its request; elsewhere the older annotations belong to other
# software.
STRIPPED = OUTPUTS[1:]
STRIPPED_ANYWHERE = OUTPUTS[:4]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(cluster: Cluster) -> AsyncIterator[ClusterUsers]:
    async with installed_policies(cluster) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(users: ClusterUsers) -> AsyncIterator[str]:
    async with new_namespace(users.admin, CANONICAL) as name:
        yield name


@pytest.mark.parametrize("subresource", ["", "status"], ids=["pod", "status"])
@pytest.mark.parametrize("key", OUTPUTS)
@pytest.mark.parametrize("value", ["another", None], ids=["changed", "removed"])
async def test_user_cannot_change_annotations_of_gpuwarden(
    users: ClusterUsers, enabled: str, key: str, value: str | None, subresource: str
) -> None:
    await reserved_pod(users, enabled)
    before = await annotations(users, enabled)
    change = forged(key, value)
    await refused(users.user.patch(PODS, "a", change, enabled, subresource), f"[{key}] is changed by gpuwarden", "pat")
    assert await annotations(users, enabled) == before


@pytest.mark.parametrize("subresource", ["", "status"], ids=["pod", "status"])
@pytest.mark.parametrize("labels", [CANONICAL, ALIAS], ids=["canonical label", "older label"])
async def test_user_cannot_add_annotations_of_gpuwarden(
    users: ClusterUsers, labels: dict[str, str], subresource: str
) -> None:
    async with new_namespace(users.admin, labels) as namespace:
        await users.user.create(PODS, pod("a"), namespace)
        for key in OUTPUTS:
            await refused(users.user.patch(PODS, "a", forged(key), namespace, subresource), key)
        assert await annotations(users, namespace) == {}


@pytest.mark.parametrize("subresource", ["ephemeralcontainers", "resize"])
async def test_ephemeralcontainers_and_resize_cannot_change_annotations(
    users: ClusterUsers, enabled: str, subresource: str
) -> None:
    """The API server itself ignores metadata in these subresources, for every user."""
    # On a node, a resize would also need a kubelet that supports it.
    await reserved_pod(users, enabled, schedulerName="nobody")
    before = await annotations(users, enabled)
    await users.admin.patch(PODS, "a", forged("gpuwarden.io/node"), enabled, subresource)
    assert await annotations(users, enabled) == before


async def test_user_cannot_remove_the_scheduling_gate(users: ClusterUsers, enabled: str) -> None:
    gates = [{"name": "example.test/mine"}, {"name": GATE}]
    await users.user.create(PODS, pod("a", schedulingGates=gates), enabled)
    await refused(
        users.user.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/1"}], enabled),
        f"The scheduling gate {GATE} is removed by gpuwarden",
        "not by pat.",
    )
    await users.user.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/0"}], enabled)
    assert (await users.admin.get(PODS, "a", enabled))["spec"]["schedulingGates"] == [{"name": GATE}]
    await users.user.delete(PODS, "a", enabled)
    await gone(users.admin, PODS, "a", enabled)


async def test_removing_the_namespace_label_does_not_allow_changes(users: ClusterUsers, enabled: str) -> None:
    await reserved_pod(users, enabled)
    await users.admin.patch(NAMESPACES, enabled, {"metadata": {"labels": {"gpuwarden.io/enabled": None}}})
    for key in OUTPUTS:
        # The API server learns of the label a moment later; this makes no difference.
        await refused(users.user.patch(PODS, "a", forged(key), enabled), key)


@pytest.mark.parametrize("labels", [CANONICAL, ALIAS, CANONICAL | ALIAS], ids=["canonical", "older", "both"])
async def test_forged_annotations_are_removed_at_creation(users: ClusterUsers, labels: dict[str, str]) -> None:
    notes = {**dict.fromkeys(STRIPPED, "forged"), "gpuwarden.io/required-hash": "sha256:a", "example.test/a.b": "x"}
    async with new_namespace(users.admin, labels) as namespace:
        await users.user.create(PODS, pod("a", annotations=notes, containers=[BLINDED]), namespace)
        kept = {"gpuwarden.io/required-hash": "sha256:a", "example.test/a.b": "x"}
        assert await annotations(users, namespace) == kept
        await users.user.create(PODS, pod("b"), namespace)
        assert await annotations(users, namespace, "b") == {}


async def test_forged_annotations_are_removed_in_namespaces_without_opt_in(users: ClusterUsers) -> None:
    """No webhook reviews these namespaces, and readers of pods' annotations must find only those that gpuwarden
    wrote."""
    notes = {**dict.fromkeys(STRIPPED_ANYWHERE, "forged"), "fudo.org/gpu.node": "x", "gpuwarden.io/gpu-count": "1"}
    async with new_namespace(users.admin) as namespace:
        await users.user.create(PODS, pod("a", annotations=notes), namespace)
        kept = {"fudo.org/gpu.node": "x", "gpuwarden.io/gpu-count": "1"}
        assert await annotations(users, namespace) == kept
