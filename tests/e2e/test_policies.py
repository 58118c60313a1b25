"""What the API server refuses by itself. No server of ours runs here."""

import base64
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLAIMS,
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    MUTATING,
    NAMESPACES,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    VALIDATING,
    ApiError,
    Changes,
    Kube,
    Raw,
    Resource,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from webhook.crds import manifests as crds
from webhook.evidence.node_evidence import new_node_evidence
from webhook.policies import Installation, Manifest, policies, webhooks, while_down
from webhook.scheduler.binder_volumes import SELECTED_NODE

REGISTRATION = "apis/admissionregistration.k8s.io/v1"
CRDS = Resource("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)
NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
BINDING_ENDS = Resource("apis/gpuwarden.io/v1alpha1", "bindingends", is_namespaced=False)
ENDS: Raw = {"apiVersion": "gpuwarden.io/v1alpha1", "kind": "BindingEnds", "metadata": {"name": "gpuwarden"}}
ENDS["spec"] = {"kept": "2026-01-01T00:00:00Z"}
PLURALS = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    "MutatingAdmissionPolicy": "mutatingadmissionpolicies",
    "MutatingAdmissionPolicyBinding": "mutatingadmissionpolicybindings",
}
CANONICAL, ALIAS = {"gpuwarden.io/enabled": "true"}, {"scheduler.radix.ai/enabled": "true"}

OUTPUTS = (
    "gpuwarden.io/claim",
    "gpuwarden.io/gpu-uuid",
    "gpuwarden.io/reservation-id",
    "gpuwarden.io/node",
    "fudo.org/gpu.uuid",
    "fudo.org/gpu.reservation-id",
    "fudo.org/gpu.node",
)
# In a namespace that has asked for us a copied manifest keeps the request; elsewhere the older names are another's.
STRIPPED = OUTPUTS[1:]
STRIPPED_ANYWHERE = OUTPUTS[:4]
OLDER = OUTPUTS[4:]
GATE = "gpuwarden.io/evidence"

# All that the tests do, and much that an administrator of a part of the cluster may do; `manage` is not in it.
MUCH = [
    {"apiGroups": [""], "resources": ["pods", "pods/status", "pods/finalizers"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods/ephemeralcontainers", "nodes", "nodes/status"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["persistentvolumeclaims", "persistentvolumeclaims/status"], "verbs": ["*"]},
    {
        "apiGroups": ["gpuwarden.io"],
        "resources": ["gpunodes", "gpunodes/status", "nodeevidences", "nodeevidences/status", "bindingends"],
        "verbs": ["*"],
    },
    {"apiGroups": ["admissionregistration.k8s.io", "apiextensions.k8s.io"], "resources": ["*"], "verbs": ["*"]},
]
MANAGE = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}

# The fixtures of this module live as long as it does, and so does the loop that their connections belong to.
pytestmark = pytest.mark.asyncio(loop_scope="module")


POLICIES = [*policies(Installation()), *while_down(Installation())]


def resource_of(manifest: Manifest) -> Resource:
    return Resource(REGISTRATION, PLURALS[manifest["kind"]], is_namespaced=False)


@frozen
class People:
    """Who tries what."""

    admin: Kube
    user: Kube  # may write pods, GPUNodes and webhook configurations, and holds no `manage`
    warden: Kube  # a service account with `manage` as well
    boss: Kube  # bound to cluster-admin
    # Accounts of ours that were given more than they use.
    reconciler: Kube
    binder: Kube
    exporter: Kube


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def people(cluster: Cluster) -> AsyncIterator[People]:
    """Everybody is there, and every policy acts."""
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        await grant(admin, stack, "much", MUCH, {"kind": "User", "name": "pat"})
        account = {"kind": "ServiceAccount", "namespace": "default", "name": "warden"}
        await grant(admin, stack, "warden", [*MUCH, MANAGE], account)
        await bind(admin, stack, "boss", "cluster-admin", {"kind": "User", "name": "boss"})
        user = await stack.enter_async_context(Kube(cluster.as_user("pat")))
        warden = await stack.enter_async_context(Kube(cluster.service_account_kubeconfig("default", "warden")))
        boss = await stack.enter_async_context(Kube(cluster.as_user("boss")))
        own = [await own_account(cluster, admin, stack, name) for name in OWN]
        found = People(admin, user, warden, boss, *own)
        await install(found, stack)
        yield found
        await forged_pods_gone(admin)


async def forged_pods_gone(admin: Kube) -> None:
    """The judge of a later test would take their annotations for ours."""
    for one in await admin.list(PODS):
        if any(key.startswith("gpuwarden.io/") for key in one["metadata"].get("annotations", {})):
            with suppress(ApiError):
                await admin.delete(PODS, one["metadata"]["name"], one["metadata"]["namespace"], grace=0)


OWN = ("gpuwarden-reconcile", "gpuwarden-bind", "gpuwarden-export")


async def own_account(cluster: Cluster, admin: Kube, stack: AsyncExitStack, name: str) -> Kube:
    user = f"system:serviceaccount:gpuwarden:{name}"
    await grant(admin, stack, f"much-{name}", [*MUCH, MANAGE], {"kind": "User", "name": user})
    return await stack.enter_async_context(Kube(cluster.as_user(user)))


async def grant(admin: Kube, stack: AsyncExitStack, name: str, rules: list[Raw], subject: Raw) -> None:
    await admin.create(CLUSTER_ROLES, {"metadata": {"name": name}, "rules": rules})
    stack.push_async_callback(admin.delete, CLUSTER_ROLES, name)
    await bind(admin, stack, name, name, subject)


async def bind(admin: Kube, stack: AsyncExitStack, name: str, role: str, subject: Raw) -> None:
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    content = {"metadata": {"name": name}, "roleRef": ref, "subjects": [subject]}
    await admin.create(CLUSTER_ROLE_BINDINGS, content)
    stack.push_async_callback(admin.delete, CLUSTER_ROLE_BINDINGS, name)


async def install(people: People, stack: AsyncExitStack) -> None:
    admin = people.admin
    for manifest in crds():
        if await admin.find(CRDS, manifest["metadata"]["name"]) is None:
            await admin.create(CRDS, manifest)
    await wait_until(lambda: served(admin))
    # Without it no scheduler binds a pod where it has opted in.
    with suppress(ApiError):  # of a `serve` in another test
        await admin.delete(BINDING_ENDS, "gpuwarden")
    await admin.create(BINDING_ENDS, ENDS)
    stack.push_async_callback(admin.delete, BINDING_ENDS, "gpuwarden")
    for manifest in POLICIES:
        await admin.create(resource_of(manifest), manifest)
        stack.push_async_callback(admin.delete, resource_of(manifest), manifest["metadata"]["name"])
    # Webhooks that call nobody: they are for pods of a namespace that does not exist.
    for manifest in webhooks(Installation(opt_in="example.test/nowhere")):
        of = MUTATING if manifest["kind"].startswith("Mutating") else VALIDATING
        await admin.create(of, {**manifest, "webhooks": manifest["webhooks"][:1]})
        stack.push_async_callback(admin.delete, of, "gpuwarden")
    await admin.create(GPU_NODES, {**GPU_NODE, "metadata": {"name": "node-p"}})
    stack.push_async_callback(admin.delete, GPU_NODES, "node-p")
    await admin.create(NODE_EVIDENCES, new_node_evidence("node-p"))
    stack.push_async_callback(admin.delete, NODE_EVIDENCES, "node-p")
    async with new_namespace(admin, CANONICAL) as name:
        await wait_until(lambda: all_act(people, name))


GPU_NODE: Raw = {
    "apiVersion": "gpuwarden.io/v1alpha1",
    "kind": "GPUNode",
    "spec": {"devices": [{"uuid": "GPU-p0"}]},
}
FORGED_STATUS: Raw = {"status": {"free": 1000}}
FORGED_PROOF: Raw = {"status": {"sources": {"static": {"hash": "aa11", "banned": False, "conflict": False}}}}


async def served(admin: Kube) -> bool:
    try:
        await admin.list(GPU_NODES)
    except ApiError:
        return False
    return True


async def all_act(people: People, namespace: str) -> bool:
    """A policy acts about a second after it is written, each by itself."""
    dressed = pod("dressed", annotations=dict.fromkeys(OUTPUTS[1:], "forged"))
    made = await people.user.create(PODS, dressed, namespace, dryRun="All")
    if made["metadata"].get("annotations"):
        return False
    if await people.user.find(PODS, "probe", namespace) is None:
        await people.user.create(PODS, pod("probe"), namespace)
    return all(
        [
            await is_refused(people.user, PODS.path(namespace, "probe"), forged("gpuwarden.io/node")),
            await is_refused(people.user, GPU_NODES.path(None, "node-p", "status"), FORGED_STATUS),
            await is_refused(people.user, NODE_EVIDENCES.path(None, "node-p", "status"), FORGED_PROOF),
            await is_refused(people.user, MUTATING.path(None, "gpuwarden"), failing_open(0)),
            await is_refused_at_all(people.user),
            await is_refused(people.reconciler, PODS.path(namespace, "probe"), forged("example.test/note")),
            await is_refused(people.exporter, NODES.path(None, "node-0"), forged("example.test/note")),
        ]
    )


async def is_refused(kube: Kube, path: str, change: Raw | Changes) -> bool:
    try:
        await kube.call("PATCH", path, change, {"dryRun": "All"})
    except ApiError as exc:
        return exc.status == 403
    return False


async def is_refused_at_all(user: Kube) -> bool:
    try:
        await user.create(BINDING_ENDS, ENDS, dryRun="All")
    except ApiError as exc:
        return exc.status == 403
    return False


def forged(key: str, value: str | None = "forged") -> Raw:
    return {"metadata": {"annotations": {key: value}}}


def failing_open(hook: int) -> Changes:
    return [{"op": "replace", "path": f"/webhooks/{hook}/failurePolicy", "value": "Ignore"}]


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(people: People) -> AsyncIterator[str]:
    async with new_namespace(people.admin, CANONICAL) as name:
        yield name


async def promised(people: People, namespace: str, **spec: Any) -> Raw:
    """A pod as we would have dressed it. Who has the permission writes after its creation what may not be forged."""
    made = await people.admin.create(PODS, pod("a", **spec), namespace)
    notes = {key: f"value of {key}" for key in OUTPUTS}
    await people.warden.patch(PODS, "a", {"metadata": {"annotations": notes}}, namespace)
    return made


async def refused(what: Awaitable[Raw], *words: str) -> None:
    with pytest.raises(ApiError) as caught:
        await what
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")
    for word in words:
        assert word in caught.value.message


async def annotations(people: People, namespace: str, name: str = "a") -> Mapping[str, str]:
    found: dict[str, str] = (await people.admin.get(PODS, name, namespace))["metadata"].get("annotations", {})
    return found


# Every object is as the API server wants it.


async def test_the_api_server_has_no_complaint(people: People) -> None:
    """Types are checked in the background; what does not fit is said in the status."""
    names = {one["metadata"]["name"] for one in POLICIES if one["kind"] == "ValidatingAdmissionPolicy"}

    async def statuses() -> dict[str, Raw]:
        found = await people.admin.list(Resource(REGISTRATION, "validatingadmissionpolicies", is_namespaced=False))
        return {one["metadata"]["name"]: one.get("status", {}) for one in found if one["metadata"]["name"] in names}

    found = await wait_until(statuses, lambda seen: all("observedGeneration" in one for one in seen.values()))
    assert found.keys() == names
    assert {name: one.get("typeChecking", {}) for name, one in found.items()} == {name: {} for name in names}


async def test_every_webhook_is_accepted(people: People) -> None:
    whole = Installation(opt_in="example.test/nowhere", reviews_deletes=True, reviews_bindings=True)
    for manifest in webhooks(whole):
        of = MUTATING if manifest["kind"].startswith("Mutating") else VALIDATING
        await people.admin.create(of, {**manifest, "metadata": {"name": "all-of-it"}}, dryRun="All")


# Annotations and gates of a pod that exists.


@pytest.mark.parametrize("subresource", ["", "status"], ids=["pod", "status"])
@pytest.mark.parametrize("key", OUTPUTS)
@pytest.mark.parametrize("value", ["another", None], ids=["changed", "removed"])
async def test_a_user_cannot_change_what_was_promised(
    people: People, enabled: str, key: str, value: str | None, subresource: str
) -> None:
    await promised(people, enabled)
    before = await annotations(people, enabled)
    change = forged(key, value)
    await refused(people.user.patch(PODS, "a", change, enabled, subresource), f"[{key}] is changed by gpuwarden", "pat")
    assert await annotations(people, enabled) == before


@pytest.mark.parametrize("subresource", ["", "status"], ids=["pod", "status"])
@pytest.mark.parametrize("labels", [CANONICAL, ALIAS], ids=["canonical label", "older label"])
async def test_a_user_cannot_make_a_promise_up(people: People, labels: dict[str, str], subresource: str) -> None:
    async with new_namespace(people.admin, labels) as namespace:
        await people.user.create(PODS, pod("a"), namespace)
        for key in OUTPUTS:
            await refused(people.user.patch(PODS, "a", forged(key), namespace, subresource), key)
        assert await annotations(people, namespace) == {}


@pytest.mark.parametrize("subresource", ["ephemeralcontainers", "resize"])
async def test_the_narrower_doors_need_no_guard(people: People, enabled: str, subresource: str) -> None:
    """The API server itself lets nothing of the metadata through them, whoever asks."""
    # On a node, a resize would also need a kubelet that can.
    await promised(people, enabled, schedulerName="nobody")
    before = await annotations(people, enabled)
    await people.admin.patch(PODS, "a", forged("gpuwarden.io/node"), enabled, subresource)
    assert await annotations(people, enabled) == before


async def test_who_has_the_permission_may(people: People, enabled: str) -> None:
    await promised(people, enabled, schedulingGates=[{"name": GATE}])
    for subresource in ("", "status"):
        await people.warden.patch(PODS, "a", forged("gpuwarden.io/node", f"by{subresource}"), enabled, subresource)
        assert (await annotations(people, enabled))["gpuwarden.io/node"] == f"by{subresource}"
    await people.warden.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/0"}], enabled)
    await pod_in_phase(people.admin, enabled, "a", "Running")


async def test_the_permission_may_be_for_one_namespace(people: People, enabled: str) -> None:
    await people.admin.create(ROLES, {"metadata": {"name": "manage"}, "rules": [MANAGE]}, enabled)
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "manage"}
    given = {"metadata": {"name": "manage"}, "roleRef": ref, "subjects": [{"kind": "User", "name": "pat"}]}
    await people.admin.create(ROLE_BINDINGS, given, enabled)
    await people.user.create(PODS, pod("a"), enabled)
    await wait_until(lambda: is_allowed(people.user, PODS.path(enabled, "a"), forged("gpuwarden.io/node")))
    async with new_namespace(people.admin, CANONICAL) as other:
        await people.user.create(PODS, pod("a"), other)
        await refused(people.user.patch(PODS, "a", forged("gpuwarden.io/node"), other))
    # What is not in a namespace needs the permission everywhere.
    await refused(people.user.patch(GPU_NODES, "node-p", FORGED_STATUS, subresource="status"))


async def is_allowed(kube: Kube, path: str, change: Raw) -> bool:
    return not await is_refused(kube, path, change)


async def test_a_user_cannot_open_the_gate(people: People, enabled: str) -> None:
    gates = [{"name": "example.test/mine"}, {"name": GATE}]
    await people.user.create(PODS, pod("a", schedulingGates=gates), enabled)
    await refused(
        people.user.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/1"}], enabled),
        f"The scheduling gate {GATE} is opened by gpuwarden",
        "not by pat.",
    )
    await people.user.patch(PODS, "a", [{"op": "remove", "path": "/spec/schedulingGates/0"}], enabled)
    assert (await people.admin.get(PODS, "a", enabled))["spec"]["schedulingGates"] == [{"name": GATE}]
    await people.user.delete(PODS, "a", enabled)
    await gone(people.admin, PODS, "a", enabled)


async def test_taking_the_label_off_the_namespace_unlocks_nothing(people: People, enabled: str) -> None:
    await promised(people, enabled)
    await people.admin.patch(NAMESPACES, enabled, {"metadata": {"labels": {"gpuwarden.io/enabled": None}}})
    for key in OUTPUTS:
        # The API server learns of the label a moment later; it makes no difference.
        await refused(people.user.patch(PODS, "a", forged(key), enabled), key)


async def test_everything_else_of_a_promised_pod_is_its_owners(people: People, enabled: str) -> None:
    await promised(people, enabled)
    await pod_in_phase(people.admin, enabled, "a", "Running")
    free: Raw = {
        "metadata": {
            "annotations": {"example.test/note": "x", "gpuwarden.io/required-hash": "sha256:any"},
            "labels": {"a": "b"},
            "finalizers": ["example.test/hold"],
        }
    }
    await people.user.patch(PODS, "a", free, enabled)
    ready = {"status": {"conditions": [{"type": "Mine", "status": "True"}]}}
    await people.user.patch(PODS, "a", ready, enabled, "status")
    await people.user.delete(PODS, "a", enabled, grace=0)
    await people.user.patch(PODS, "a", {"metadata": {"finalizers": None}}, enabled)
    await gone(people.admin, PODS, "a", enabled)


async def test_where_nobody_asked_the_older_names_are_anothers(people: People) -> None:
    async with new_namespace(people.admin) as namespace:
        old = dict.fromkeys(OLDER, "as given")
        await people.user.create(PODS, pod("a", annotations=old), namespace)
        assert await annotations(people, namespace) == old
        await people.user.patch(PODS, "a", forged("fudo.org/gpu.uuid", "another"), namespace)
        await refused(people.user.patch(PODS, "a", forged("gpuwarden.io/gpu-uuid"), namespace))
        await people.user.delete(PODS, "a", namespace)
        await gone(people.admin, PODS, "a", namespace)


# At creation.


@pytest.mark.parametrize("labels", [CANONICAL, ALIAS, CANONICAL | ALIAS], ids=["canonical", "older", "both"])
async def test_a_forgery_at_creation_vanishes(people: People, labels: dict[str, str]) -> None:
    notes = {**dict.fromkeys(STRIPPED, "forged"), "gpuwarden.io/required-hash": "sha256:a", "example.test/a.b": "x"}
    async with new_namespace(people.admin, labels) as namespace:
        await people.user.create(PODS, pod("a", annotations=notes), namespace)
        kept = {"gpuwarden.io/required-hash": "sha256:a", "example.test/a.b": "x"}
        assert await annotations(people, namespace) == kept
        await people.user.create(PODS, pod("b"), namespace)
        assert await annotations(people, namespace, "b") == {}


async def test_where_nobody_asked_our_own_names_vanish_too(people: People) -> None:
    """No webhook looks there, and whoever goes by the annotations of pods must find none that we did not write."""
    notes = {**dict.fromkeys(STRIPPED_ANYWHERE, "forged"), "fudo.org/gpu.node": "x", "gpuwarden.io/gpu-count": "1"}
    async with new_namespace(people.admin) as namespace:
        await people.user.create(PODS, pod("a", annotations=notes), namespace)
        kept = {"fudo.org/gpu.node": "x", "gpuwarden.io/gpu-count": "1"}
        assert await annotations(people, namespace) == kept


async def test_a_copied_manifest_keeps_its_request(people: People, enabled: str) -> None:
    notes = {"gpuwarden.io/claim": '{"gpus":1}', "gpuwarden.io/gpu-uuid": "GPU-0"}
    await people.user.create(PODS, pod("a", annotations=notes), enabled)
    assert await annotations(people, enabled) == {"gpuwarden.io/claim": '{"gpus":1}'}


# Reservations, and the installation.


async def test_reservations_are_written_by_gpuwarden(people: People) -> None:
    await refused(
        people.user.patch(GPU_NODES, "node-p", FORGED_STATUS, subresource="status"),
        "The reservations on node-p are written by gpuwarden only, not by pat.",
    )
    await people.warden.patch(GPU_NODES, "node-p", {"status": {"free": 1}}, subresource="status")
    # What a node has is not a reservation.
    await people.user.patch(GPU_NODES, "node-p", {"metadata": {"labels": {"a": "b"}}})


async def test_reservations_are_not_deleted_with_their_node(people: People) -> None:
    said = "The reservations on node-p are deleted by gpuwarden only, not by pat."
    await refused(people.user.delete(GPU_NODES, "node-p"), said)
    # A collection's delete names no object; each is asked about all the same.
    await refused(
        people.user.call("DELETE", GPU_NODES.path(None), query={"fieldSelector": "metadata.name=node-p"}), said
    )
    assert await people.admin.find(GPU_NODES, "node-p")
    await people.warden.call("DELETE", GPU_NODES.path(None, "node-p"), query={"dryRun": "All"})


async def test_what_nodes_have_proven_is_written_by_gpuwarden(people: People) -> None:
    said = "What node-p has proven is written by gpuwarden only, not by pat."
    await refused(people.user.patch(NODE_EVIDENCES, "node-p", FORGED_PROOF, subresource="status"), said)
    await refused(people.user.patch(NODE_EVIDENCES, "node-p", {"metadata": {"labels": {"a": "b"}}}), said)
    new = new_node_evidence("node-q")
    await refused(people.user.create(NODE_EVIDENCES, new), "What node-q has proven is written by gpuwarden only")
    await refused(people.user.delete(NODE_EVIDENCES, "node-p"), "What node-p has proven is deleted", "pat")
    await refused(people.user.call("DELETE", NODE_EVIDENCES.path(None)), "has proven is deleted", "pat")
    await people.warden.create(NODE_EVIDENCES, new, dryRun="All")
    await people.warden.patch(NODE_EVIDENCES, "node-p", FORGED_PROOF, subresource="status")
    # As for its stored version.
    same = await people.admin.get(NODE_EVIDENCES, "node-p")
    await people.user.replace(NODE_EVIDENCES, same)


async def test_until_when_pods_are_bound_without_a_review_is_written_by_gpuwarden(people: People) -> None:
    said = "Until when pods are bound without a review is written by gpuwarden only, not by pat."
    await refused(people.user.create(BINDING_ENDS, {**ENDS, "metadata": {"name": "another"}}), said)
    kept = {"spec": {"kept": "2026-01-01T00:00:00Z", "nodes": {}}}
    await refused(people.user.patch(BINDING_ENDS, "gpuwarden", kept), said)
    await refused(people.user.delete(BINDING_ENDS, "gpuwarden"), said)
    await refused(people.user.call("DELETE", BINDING_ENDS.path(None)), said)
    await people.warden.patch(BINDING_ENDS, "gpuwarden", kept)
    await people.warden.call("DELETE", BINDING_ENDS.path(None, "gpuwarden"), query={"dryRun": "All"})


async def test_the_garbage_collector_ends_a_delete_of_evidence(people: People, cluster: Cluster) -> None:
    """After a delete in the foreground it takes its finalizer off, and has no permission of ours."""
    new = new_node_evidence("node-q")
    await people.warden.create(
        NODE_EVIDENCES, {**new, "metadata": {**new["metadata"], "finalizers": ["example.test/foreground"]}}
    )
    await people.warden.delete(NODE_EVIDENCES, "node-q")
    async with Kube(cluster.as_user("system:serviceaccount:kube-system:generic-garbage-collector")) as collector:
        await collector.patch(NODE_EVIDENCES, "node-q", {"metadata": {"finalizers": None}})
    await gone(people.admin, NODE_EVIDENCES, "node-q")


# Our own accounts, which may patch pods and nodes.


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
async def test_whoever_may_patch_pods_for_us_changes_nothing_else(
    people: People, enabled: str, change: Raw | Changes, what: str
) -> None:
    await people.user.create(PODS, pod("plain"), enabled)
    await people.user.create(PODS, pod("gated", schedulingGates=[{"name": GATE}]), enabled)
    for name in ("plain", "gated"):
        await refused(people.reconciler.patch(PODS, name, change, enabled), what, "gpuwarden-reconcile")
        await people.user.call("PATCH", PODS.path(enabled, name), change, {"dryRun": "All"})


async def test_an_image_is_not_changed_by_the_way_of_debugging(people: People, enabled: str) -> None:
    await people.user.create(PODS, pod("a"), enabled)
    change = {"spec": {"ephemeralContainers": [{"name": "d", "image": "evil"}]}}
    await refused(
        people.reconciler.patch(PODS, "a", change, enabled, "ephemeralcontainers"), "spec.ephemeralContainers"
    )
    await people.user.call("PATCH", PODS.path(enabled, "a", "ephemeralcontainers"), change, {"dryRun": "All"})


async def test_whoever_opens_our_gate_opens_no_other_and_says_where(people: People, enabled: str) -> None:
    gates = [{"name": "example.test/mine"}, {"name": GATE}]
    await people.user.create(PODS, pod("a", schedulingGates=gates), enabled)
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-0"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    await refused(people.reconciler.patch(PODS, "a", {"spec": {"schedulingGates": gates[1:]}}, enabled), "spec.sched")
    spec: Raw = {"schedulingGates": gates[:1], "affinity": affinity}
    opened: Raw = {"metadata": {"annotations": dict.fromkeys(OUTPUTS, "x")}, "spec": spec}
    await people.reconciler.patch(PODS, "a", opened, enabled)
    await refused(people.reconciler.patch(PODS, "a", {"spec": {"nodeSelector": {"a": "b"}}}, enabled), "spec.nodeSel")
    await people.reconciler.patch(PODS, "a", forged("gpuwarden.io/woken-at", "now"), enabled)


async def test_whoever_binds_says_why_a_pod_waits_and_nothing_else_of_it(people: People, enabled: str) -> None:
    await people.user.create(PODS, pod("a", schedulerName="nobody"), enabled)
    said = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]}
    await people.binder.patch(PODS, "a", {"status": said}, enabled, "status")
    for change, what in (
        ({"status": {"podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}}, "status.podIP"),
        ({"status": {"phase": "Succeeded"}}, "status.phase"),
        ({"metadata": {"labels": {"app": "other"}}}, "metadata.labels[app]"),
    ):
        await refused(people.binder.patch(PODS, "a", change, enabled, "status"), what, "gpuwarden-bind")
    await people.user.delete(PODS, "a", enabled)
    await gone(people.admin, PODS, "a", enabled)


async def test_whoever_binds_gives_a_claim_a_node_once_and_changes_nothing_else(people: People, enabled: str) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "x"}
    await people.user.create(CLAIMS, {"metadata": {"name": "data"}, "spec": spec}, enabled)
    path = CLAIMS.path(enabled, "data")
    others: list[tuple[Raw, str]] = [
        ({"metadata": {"annotations": {"example.test/note": "x"}}}, ""),
        ({"metadata": {"labels": {"app": "other"}}}, ""),
        ({"metadata": {"finalizers": None}}, ""),
        ({"spec": {"volumeName": "of-somebody"}}, ""),
        ({"status": {"phase": "Lost"}}, "status"),
    ]
    for change, subresource in others:
        await refused(people.binder.patch(CLAIMS, "data", change, enabled, subresource), "gpuwarden-bind")
        await people.user.call("PATCH", CLAIMS.path(enabled, "data", subresource), change, {"dryRun": "All"})
    await people.binder.patch(CLAIMS, "data", forged(SELECTED_NODE, "node-0"), enabled)
    for value in ("node-1", None):
        change = {"metadata": {"annotations": {SELECTED_NODE: value}}}
        assert not await is_allowed(people.binder, path, change)
        assert await is_allowed(people.user, path, change)
    await people.user.delete(CLAIMS, "data", enabled)


OTHERS_TAINT: Raw = {"key": "example.test/mine", "effect": "NoSchedule"}
OUR_TAINT: Raw = {"key": "gpuwarden.io/evidence-lost", "effect": "NoSchedule"}


async def test_whoever_taints_nodes_for_us_changes_no_other_taint(people: People) -> None:
    node = NODES.path(None, "node-0")
    before = (await people.admin.get(NODES, "node-0"))["spec"].get("taints", [])

    async def tried(who: Kube, *taints: Raw) -> bool:
        return await is_allowed(who, node, {"spec": {"taints": [*taints]}})

    assert await tried(people.reconciler, *before, OUR_TAINT)
    assert not await tried(people.reconciler, *before, {**OUR_TAINT, "effect": "NoExecute"})
    assert not await tried(people.reconciler, *before, OTHERS_TAINT)
    assert not await tried(people.exporter, *before, OUR_TAINT)
    await people.admin.patch(NODES, "node-0", {"spec": {"taints": [*before, OTHERS_TAINT, OUR_TAINT]}})
    try:
        assert await tried(people.reconciler, *before, OTHERS_TAINT)
        assert not await tried(people.reconciler, *before, OUR_TAINT)
    finally:
        await people.admin.patch(NODES, "node-0", {"spec": {"taints": before or None}})


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
async def test_whoever_labels_nodes_for_us_writes_serials_and_gpus(people: People, change: Raw, by: str | None) -> None:
    node = NODES.path(None, "node-0")
    assert await is_allowed(people.exporter, node, change) == (by == "exporter")
    assert not await is_allowed(people.reconciler, node, change)
    assert await is_allowed(people.user, node, change)


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
async def test_the_installation_cannot_be_taken_away(people: People, of: Resource, name: str) -> None:
    said = f"{of.plural} {name} belongs to gpuwarden"
    await refused(people.user.delete(of, name), said, "pat does not have it")
    if of is CRDS:
        await refused(people.user.patch(of, name, {"metadata": {"labels": {"a": "b"}}}), said)
    await people.warden.patch(of, name, {"metadata": {"labels": {"by": "warden"}}})


async def test_deleting_all_of_them_is_no_way_round(people: People) -> None:
    """The request has no name then; each object is asked about all the same."""
    for of in (MUTATING, VALIDATING):
        await refused(people.user.call("DELETE", of.path(None)), "belongs to gpuwarden")
        assert await people.admin.find(of, "gpuwarden")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(failing_open(0), id="failing open"),
        pytest.param([{"op": "remove", "path": "/webhooks/0/matchConditions"}], id="a member taken away"),
        pytest.param([{"op": "remove", "path": "/webhooks/0"}], id="a hook taken away"),
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
async def test_a_webhook_cannot_be_turned_away(people: People, change: Changes) -> None:
    for of in (MUTATING, VALIDATING):
        await refused(people.user.patch(of, "gpuwarden", change), "belongs to gpuwarden")


async def test_a_ca_injector_renews_the_bundle(people: People, cluster: Cluster) -> None:
    bundle = base64.b64encode(cluster.ca.read_bytes()).decode()
    change = [{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
    for of in (MUTATING, VALIDATING):
        await people.user.patch(of, "gpuwarden", change)


async def test_other_configurations_are_not_ours_to_guard(people: People) -> None:
    manifest = webhooks(Installation(opt_in="example.test/nowhere"))[0]
    other = {**manifest, "metadata": {"name": "anothers"}, "webhooks": manifest["webhooks"][:1]}
    await people.user.create(MUTATING, other)
    await people.user.patch(MUTATING, "anothers", failing_open(0))
    await people.user.delete(MUTATING, "anothers")


async def test_who_may_do_everything_has_the_permission_too(people: People, enabled: str) -> None:
    """The permission holds off whoever has less than cluster-admin. Nobody can be held off who grants permissions."""
    await promised(people, enabled)
    assert await is_allowed(people.boss, PODS.path(enabled, "a"), forged("gpuwarden.io/node"))
    assert await is_allowed(people.boss, GPU_NODES.path(None, "node-p", "status"), FORGED_STATUS)
    await people.boss.call("DELETE", MUTATING.path(None, "gpuwarden"), query={"dryRun": "All"})
