"""Users and accounts that act against the policies, on an API server with all policies and no gpuwarden server."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    MUTATING,
    NODES,
    PODS,
    VALIDATING,
    ApiError,
    Changes,
    Kube,
    Raw,
    Resource,
    access_granted,
    pod,
    wait_until,
)
from webhook.evidence.node_evidence import new_node_evidence
from webhook.kube.install.crds import manifests as crds
from webhook.kube.install.policies import Installation, Manifest, policies, webhooks, while_down

REGISTRATION = "apis/admissionregistration.k8s.io/v1"
CRDS = Resource("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)
NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
TRUST_BUNDLES = Resource("apis/gpuwarden.io/v1alpha1", "trustbundles", is_namespaced=False)
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

GATE = "gpuwarden.io/evidence"

# Everything that the tests do, and much that a cluster administrator may do, but not `manage`.
BROAD_RULES = [
    {"apiGroups": [""], "resources": ["pods", "pods/status", "pods/finalizers"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods/ephemeralcontainers", "nodes", "nodes/status"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["persistentvolumeclaims", "persistentvolumeclaims/status"], "verbs": ["*"]},
    {
        "apiGroups": ["gpuwarden.io"],
        "resources": [
            "gpunodes",
            "gpunodes/status",
            "nodeevidences",
            "nodeevidences/status",
            "bindingends",
            "trustbundles",
            "trustbundles/status",
        ],
        "verbs": ["*"],
    },
    {"apiGroups": ["admissionregistration.k8s.io", "apiextensions.k8s.io"], "resources": ["*"], "verbs": ["*"]},
]
MANAGE = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}

POLICIES = [*policies(Installation()), *while_down(Installation())]

# A container without GPUs, as the webhook would leave it.
BLINDED: Raw = {
    "name": "main",
    "image": "example.test/main:1",
    "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
}
OWN_ACCOUNTS = ("gpuwarden-reconcile", "gpuwarden-export")
GPU_NODE: Raw = {
    "apiVersion": "gpuwarden.io/v1alpha1",
    "kind": "GPUNode",
    "spec": {"devices": [{"uuid": "GPU-p0"}]},
}
TRUST_BUNDLE: Raw = {"apiVersion": "gpuwarden.io/v1alpha1", "kind": "TrustBundle", "metadata": {"name": "forged"}}
TRUST_BUNDLE["spec"] = {"trustDomain": "evil.test"}
FORGED_STATUS: Raw = {"status": {"free": 1000}}
FORGED_PROOF: Raw = {"status": {"sources": {"static": {"hash": "aa11", "banned": False, "conflict": False}}}}


def resource_of(manifest: Manifest) -> Resource:
    return Resource(REGISTRATION, PLURALS[manifest["kind"]], is_namespaced=False)


@frozen
class ClusterUsers:
    """The clients of all users."""

    admin: Kube
    user: Kube  # may write pods, GPUNodes and webhook configurations, without `manage`
    warden: Kube  # a service account with `manage` as well
    boss: Kube  # bound to cluster-admin
    # gpuwarden's own accounts, with more rights than they use.
    reconciler: Kube
    exporter: Kube


@asynccontextmanager
async def installed_policies(cluster: Cluster) -> AsyncIterator[ClusterUsers]:
    """Creates all users and policies, and waits until every policy acts."""
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        await grant(admin, stack, "much", BROAD_RULES, {"kind": "User", "name": "pat"})
        account = {"kind": "ServiceAccount", "namespace": "default", "name": "warden"}
        await grant(admin, stack, "warden", [*BROAD_RULES, MANAGE], account)
        await bind(admin, stack, "boss", "cluster-admin", {"kind": "User", "name": "boss"})
        user = await stack.enter_async_context(Kube(cluster.as_user("pat")))
        warden = await stack.enter_async_context(Kube(cluster.service_account_kubeconfig("default", "warden")))
        boss = await stack.enter_async_context(Kube(cluster.as_user("boss")))
        own = [await own_account(cluster, admin, stack, name) for name in OWN_ACCOUNTS]
        found = ClusterUsers(admin, user, warden, boss, *own)
        await install(found, stack)
        yield found
        await forged_pods_gone(admin)


async def forged_pods_gone(admin: Kube) -> None:
    """A GPU checker of a later test would count their annotations."""
    for one in await admin.list(PODS):
        if any(key.startswith("gpuwarden.io/") for key in one["metadata"].get("annotations", {})):
            with suppress(ApiError):
                await admin.delete(PODS, one["metadata"]["name"], one["metadata"]["namespace"], grace=0)


async def own_account(cluster: Cluster, admin: Kube, stack: AsyncExitStack, name: str) -> Kube:
    user = f"system:serviceaccount:gpuwarden:{name}"
    await grant(admin, stack, f"much-{name}", [*BROAD_RULES, MANAGE], {"kind": "User", "name": user})
    return await stack.enter_async_context(Kube(cluster.as_user(user)))


async def grant(admin: Kube, stack: AsyncExitStack, name: str, rules: list[Raw], *subjects: Raw) -> None:
    """Grants cluster-wide permissions until the stack is left, and waits until they apply."""
    await admin.create(CLUSTER_ROLES, {"metadata": {"name": name}, "rules": rules})
    stack.push_async_callback(admin.delete, CLUSTER_ROLES, name)
    await bind(admin, stack, name, name, *subjects)
    for one in subjects:
        await access_granted(admin, one, rules)


async def bind(admin: Kube, stack: AsyncExitStack, name: str, role: str, *subjects: Raw) -> None:
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    content = {"metadata": {"name": name}, "roleRef": ref, "subjects": list(subjects)}
    await admin.create(CLUSTER_ROLE_BINDINGS, content)
    stack.push_async_callback(admin.delete, CLUSTER_ROLE_BINDINGS, name)


async def install(users: ClusterUsers, stack: AsyncExitStack) -> None:
    admin = users.admin
    for manifest in crds():
        if await admin.find(CRDS, manifest["metadata"]["name"]) is None:
            await admin.create(CRDS, manifest)
    await wait_until(lambda: served(admin))
    # Without this object no scheduler binds a pod in an opted-in namespace.
    with suppress(ApiError):  # left by a `serve` of another test
        await admin.delete(BINDING_ENDS, "gpuwarden")
    await admin.create(BINDING_ENDS, ENDS)
    stack.push_async_callback(admin.delete, BINDING_ENDS, "gpuwarden")
    for manifest in POLICIES:
        await admin.create(resource_of(manifest), manifest)
        stack.push_async_callback(admin.delete, resource_of(manifest), manifest["metadata"]["name"])
    # Webhooks that are never called: their namespace does not exist.
    for manifest in webhooks(Installation(opt_in="example.test/nowhere")):
        of = MUTATING if manifest["kind"].startswith("Mutating") else VALIDATING
        await admin.create(of, {**manifest, "webhooks": manifest["webhooks"][:1]})
        stack.push_async_callback(admin.delete, of, "gpuwarden")
    await admin.create(GPU_NODES, {**GPU_NODE, "metadata": {"name": "node-p"}})
    stack.push_async_callback(admin.delete, GPU_NODES, "node-p")
    await admin.create(NODE_EVIDENCES, new_node_evidence("node-p"))
    stack.push_async_callback(admin.delete, NODE_EVIDENCES, "node-p")
    async with new_namespace(admin, CANONICAL) as name:
        await wait_until(lambda: all_policies_act(users, name))


async def served(admin: Kube) -> bool:
    try:
        await admin.list(GPU_NODES)
    except ApiError:
        return False
    return True


async def all_policies_act(users: ClusterUsers, namespace: str) -> bool:
    """Each policy starts to act about a second after it is written."""
    dressed = pod("dressed", annotations=dict.fromkeys(OUTPUTS[1:], "forged"))
    try:
        made = await users.user.create(PODS, dressed, namespace, dryRun="All")
    except ApiError:  # the policy that refuses unblinded containers can act before the one that blinds
        return False
    if made["metadata"].get("annotations"):
        return False
    if await users.user.find(PODS, "probe", namespace) is None:
        await users.user.create(PODS, pod("probe"), namespace)
    return all(
        [
            await is_refused(users.user, PODS.path(namespace, "probe"), forged("gpuwarden.io/node")),
            await is_refused(users.user, GPU_NODES.path(None, "node-p", "status"), FORGED_STATUS),
            await is_refused(users.user, NODE_EVIDENCES.path(None, "node-p", "status"), FORGED_PROOF),
            await is_refused(users.user, MUTATING.path(None, "gpuwarden"), failing_open(0)),
            await is_denied(users.user.create(BINDING_ENDS, ENDS, dryRun="All")),
            await is_denied(users.user.create(TRUST_BUNDLES, TRUST_BUNDLE, dryRun="All")),
            await is_denied(users.user.call("DELETE", GPU_NODES.path(None, "node-p"), query={"dryRun": "All"})),
            await is_refused(users.reconciler, PODS.path(namespace, "probe"), forged("example.test/note")),
            await is_refused(users.exporter, NODES.path(None, "node-0"), forged("example.test/note")),
        ]
    )


async def is_refused(kube: Kube, path: str, change: Raw | Changes) -> bool:
    return await is_denied(kube.call("PATCH", path, change, {"dryRun": "All"}))


async def is_denied(what: Awaitable[Raw]) -> bool:
    try:
        await what
    except ApiError as exc:
        return exc.status == 403
    return False


async def is_allowed(kube: Kube, path: str, change: Raw) -> bool:
    return not await is_refused(kube, path, change)


def forged(key: str, value: str | None = "forged") -> Raw:
    return {"metadata": {"annotations": {key: value}}}


def failing_open(hook: int) -> Changes:
    return [{"op": "replace", "path": f"/webhooks/{hook}/failurePolicy", "value": "Ignore"}]


async def reserved_pod(users: ClusterUsers, namespace: str, **spec: Any) -> Raw:
    """A pod as gpuwarden would have dressed it. An account with `manage` writes the protected annotations after its
    creation."""
    made = await users.admin.create(PODS, pod("a", **spec), namespace)
    notes = {key: f"value of {key}" for key in OUTPUTS}
    await users.warden.patch(PODS, "a", {"metadata": {"annotations": notes}}, namespace)
    return made


async def refused(what: Awaitable[Raw], *words: str) -> None:
    with pytest.raises(ApiError) as caught:
        await what
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden")
    for word in words:
        assert word in caught.value.message


async def annotations(users: ClusterUsers, namespace: str, name: str = "a") -> Mapping[str, str]:
    found: dict[str, str] = (await users.admin.get(PODS, name, namespace))["metadata"].get("annotations", {})
    return found
