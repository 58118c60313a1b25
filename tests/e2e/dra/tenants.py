"""Users who act against the guards of proof devices, on an API server with these policies and no gpuwarden process."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, Final

from attrs import evolve, frozen

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.cluster_users import BINDING_ENDS, CRDS, grant, is_denied, resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.gpus import (
    CLAIM,
    DEVICE_CLASSES,
    GPU_DRIVER,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    claiming_pod,
    device_class,
    pairs,
    published_gpus,
    slice_of_gpus,
)
from tests.e2e.kube import PODS, ROLE_BINDINGS, ApiError, Kube, Raw, Resource, access_granted, wait_until
from webhook.core.proof_claims import CLAIM_LABELS, template_name
from webhook.core.proof_devices import DRIVER, ProofDevice, hash_attribute
from webhook.kube.install.crds import manifests as crds
from webhook.kube.install.policies import Installation, Manifest, dra, policies
from webhook.kube.resource_slices import slices_of
from webhook.runtime.clock import utc_now

NODE, HASH = "guarded-a", "sha256:aa11"
# The node of the claim `held`.
ELSEWHERE = "guarded-b"
NIC: Final = "nic.example.com"
# Classes that existed before the guards: one of GPUs, and one of all devices.
OLD_CLASS: Final = "gpus-too"
ANY_CLASS: Final = "anything"
TEMPLATE = template_name(1, hash_attribute(HASH))
DELETE_PROTECTION = "resource.kubernetes.io/delete-protection"
OPT_IN = {"gpuwarden.io/enabled": "true"}
# Kubernetes' own label of namespaces that may use adminAccess.
ADMIN_ACCESS = {"resource.kubernetes.io/admin-access": "true"}
NEVER = "9999-12-31T23:59:59Z"
CONTROLLER = "system:serviceaccount:kube-system:resource-claim-controller"
CONTROLLER_MANAGER = "system:kube-controller-manager"

BROAD_RULES: list[Raw] = [
    {"apiGroups": ["resource.k8s.io"], "resources": ["*"], "verbs": ["*"]},
    {"apiGroups": ["gpuwarden.io"], "resources": ["bindingends"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]},
]
MANAGE: Raw = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}
EDITS: list[Raw] = [
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["create"]},
    {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaimtemplates"], "verbs": ["create"]},
]


@frozen
class Tenants:
    """The clients of all users, and the namespaces of the tenant."""

    cluster: Cluster
    admin: Kube
    tenant: Kube  # with the role `edit` in both namespaces
    operator: Kube  # all rights on claims, slices and classes of the cluster, without `manage`
    warden: Kube  # with `manage` as well
    node: Kube  # a kubelet with `manage`
    controllers: Mapping[str, Kube]  # the claim controller, with and without an account of its own
    guarded: str
    free: str
    pod: Raw  # owns the claim `held` of the guarded namespace
    free_pod: Raw  # owns the claim `held` of the other one


Attack = Callable[[Tenants], Awaitable[Raw]]
# What each attack got before the policies: None if it succeeded.
Outcomes = Mapping[str, str | None]


def without_opt_in(users: Tenants) -> Tenants:
    """The same users in the namespace that has not opted in."""
    return evolve(users, guarded=users.free, pod=users.free_pod)


# Objects.


def asking(*requests: Raw) -> Raw:
    return {"devices": {"requests": [{"name": f"r{k}", **one} for k, one in enumerate(requests)]}}


def exactly(device_class: str = NIC, **more: Any) -> Raw:
    return {"exactly": {"deviceClassName": device_class, **more}}


def claim(name: str, spec: Raw, **metadata: Any) -> Raw:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def template(name: str, spec: Raw, labels: Mapping[str, str] | None = None) -> Raw:
    meta = {"labels": dict(labels)} if labels else {}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"metadata": meta, "spec": spec},
    }


def owned(pod: Raw, **more: Any) -> Raw:
    """Metadata of the claim that the controller makes from the template of this pod."""
    meta = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"], "controller": True}
    return {"ownerReferences": [owner], "annotations": {"resource.kubernetes.io/pod-claim-name": CLAIM}, **more}


def nic_slice(node: str) -> Raw:
    raw = slice_of_gpus(node, ["a", "b", "c", "d"])
    return {**raw, "metadata": {"name": f"{node}-{NIC}"}, "spec": {**raw["spec"], "driver": NIC}}


def allocation_on(node: str, **results: str) -> Raw:
    """An allocation of a device of each driver, by request."""
    found = [
        {"request": request, "driver": driver, "pool": node, "device": f"d-{request}"}
        for request, driver in results.items()
    ]
    return {"devices": {"results": found}}


def consumer(pod: Raw) -> Raw:
    return {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}


# The installation.


@asynccontextmanager
async def tenants_of(cluster: Cluster) -> AsyncIterator[Tenants]:
    """Users, a node with four GPUs, two of them proven, and claims that were created before the policies."""
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        await asyncio.to_thread(cluster.add_nodes, [gpu_node(NODE, 0)])
        uuids = await published_gpus(admin, NODE, 4)
        devices = [ProofDevice.of(one, HASH, None) for one in uuids[:2]]
        for raw in [*slices_of(NODE, devices, 1, GPU_DRIVER), nic_slice(NODE)]:
            await admin.create(RESOURCE_SLICES, raw)
        for driver in (GPU_DRIVER, DRIVER, NIC):
            await admin.create(DEVICE_CLASSES, device_class(driver))
        await admin.create(DEVICE_CLASSES, {**device_class(GPU_DRIVER), "metadata": {"name": OLD_CLASS}})
        await admin.create(DEVICE_CLASSES, {"metadata": {"name": ANY_CLASS}, "spec": {}})
        for manifest in crds():
            await admin.create(CRDS, manifest)
        guarded = await stack.enter_async_context(new_namespace(admin, {**OPT_IN, **ADMIN_ACCESS}))
        free = await stack.enter_async_context(new_namespace(admin))
        tenant = await tenant_in(cluster, admin, guarded, free)
        found = Tenants(
            cluster=cluster,
            admin=admin,
            tenant=await stack.enter_async_context(tenant),
            operator=await granted(cluster, admin, stack, "operator", BROAD_RULES),
            warden=await granted(cluster, admin, stack, "warden", [*BROAD_RULES, MANAGE]),
            node=await granted(cluster, admin, stack, f"system:node:{NODE}", [*BROAD_RULES, MANAGE], "system:nodes"),
            controllers={
                name: await granted(cluster, admin, stack, name, EDITS) for name in (CONTROLLER, CONTROLLER_MANAGER)
            },
            guarded=guarded,
            free=free,
            pod=await admin.create(PODS, owner_pod(), guarded),
            free_pod=await admin.create(PODS, owner_pod(), free),
        )
        await write_older_claims(found)
        runner = claiming_pod("runner", resourceClaimTemplateName=TEMPLATE)
        await admin.create(PODS, {**runner, "spec": {**runner["spec"], "nodeName": NODE}}, guarded)
        yield found


async def granted(
    cluster: Cluster, admin: Kube, stack: AsyncExitStack, user: str, rules: list[Raw], *groups: str
) -> Kube:
    await grant(admin, stack, f"may-{user}", rules, {"kind": "User", "name": user})
    return await stack.enter_async_context(Kube(cluster.as_user(user, groups)))


async def tenant_in(cluster: Cluster, admin: Kube, *namespaces: str) -> Kube:
    """A user with Kubernetes' role `edit`."""
    subject = {"kind": "User", "name": "tom"}
    for namespace in namespaces:
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
        await admin.create(
            ROLE_BINDINGS, {"metadata": {"name": "tom"}, "roleRef": ref, "subjects": [subject]}, namespace
        )
        await access_granted(admin, subject, EDITS, namespace)
    return Kube(cluster.as_user("tom"))


def owner_pod() -> Raw:
    content = claiming_pod("owner", resourceClaimTemplateName="none-such")
    return {**content, "spec": {**content["spec"], "schedulerName": "nobody"}}


async def write_older_claims(users: Tenants) -> None:
    """The claim and the template `older` were written before the guards. The claim `nic` is for no GPU."""
    await users.tenant.create(RESOURCE_CLAIMS, claim("older", asking(exactly(GPU_DRIVER))), users.guarded)
    await users.tenant.create(RESOURCE_CLAIMS, claim("nic", asking(exactly())), users.guarded)
    await users.tenant.create(RESOURCE_CLAIM_TEMPLATES, template("older", asking(exactly(GPU_DRIVER))), users.guarded)
    await write_labelled_claims(users, users.guarded, users.pod)
    await write_labelled_claims(users, users.free, users.free_pod)


async def write_labelled_claims(users: Tenants, namespace: str, pod: Raw) -> None:
    """`stripped` has fewer proofs than GPUs. `held` has GPUs, and its pod owns it."""
    # As a webhook may leave the copy of a template.
    stripped = asking(exactly(GPU_DRIVER), exactly(GPU_DRIVER), exactly(DRIVER))
    await users.admin.create(RESOURCE_CLAIMS, claim("stripped", stripped, labels=CLAIM_LABELS), namespace)
    meta = owned(pod, labels=CLAIM_LABELS, finalizers=[DELETE_PROTECTION])
    await users.admin.create(RESOURCE_CLAIMS, claim("held", pairs(1, HASH), **meta), namespace)
    status = {"allocation": allocation_on(ELSEWHERE, proof0=DRIVER, gpu0=GPU_DRIVER)}
    await users.admin.patch(
        RESOURCE_CLAIMS,
        "held",
        {"status": {**status, "reservedFor": [consumer(pod)]}},
        namespace,
        subresource="status",
    )


async def outcomes(users: Tenants, attacks: Mapping[str, Attack]) -> Outcomes:
    """What each attack gets, as a dry run."""

    async def outcome(attack: Attack) -> str | None:
        try:
            await attack(users)
        except ApiError as exc:
            return str(exc)
        return None

    return {name: await outcome(attack) for name, attack in attacks.items()}


def guards(installation: Installation | None = None) -> list[Manifest]:
    """The policies of proof devices, and the one that guards the ends."""
    chosen = installation or Installation(device_classes=(NIC,))
    others = ("gpuwarden-bindingends", "gpuwarden-forced-deletions")
    return [*(one for one in policies(chosen) if one["metadata"]["name"] in others), *dra(chosen)]


@asynccontextmanager
async def guarded(users: Tenants, probes: Mapping[str, Attack]) -> AsyncIterator[None]:
    """Installs the policies, and waits until the probes are refused: policies start to act about a second later."""
    async with AsyncExitStack() as stack:
        await write_ends(users, {NODE: NEVER, ELSEWHERE: NEVER})
        for manifest in guards():
            of = DEVICE_CLASSES if manifest["kind"] == "DeviceClass" else resource_of(manifest)
            if await users.admin.find(of, manifest["metadata"]["name"]) is None:
                await users.admin.create(of, manifest)
                stack.push_async_callback(users.admin.delete, of, manifest["metadata"]["name"])

        async def succeeding() -> list[str]:
            return [name for name, probe in probes.items() if not await is_denied(probe(users))]

        await wait_until(succeeding, lambda names: names == [])
        yield


async def write_ends(
    users: Tenants, nodes: Mapping[str, str] | None, kept: str = "2026-01-01T00:00:00Z", **parts: Mapping[str, str]
) -> None:
    """BindingEnds as `reconcile` writes it; None removes it."""
    if await users.admin.find(BINDING_ENDS, "gpuwarden"):
        await users.admin.delete(BINDING_ENDS, "gpuwarden")
    if nodes is not None:
        await users.admin.create(
            BINDING_ENDS,
            {
                "apiVersion": "gpuwarden.io/v1alpha1",
                "kind": "BindingEnds",
                "metadata": {"name": "gpuwarden"},
                "spec": {"nodes": dict(nodes), **parts, **({"kept": kept} if kept else {})},
            },
        )


async def labelled_template(users: Tenants, namespace: str) -> None:
    """The template for one GPU as gpuwarden writes it, unless it exists."""
    if await users.admin.find(RESOURCE_CLAIM_TEMPLATES, TEMPLATE, namespace) is None:
        content = template(TEMPLATE, pairs(1, HASH), CLAIM_LABELS)
        await users.warden.create(RESOURCE_CLAIM_TEMPLATES, content, namespace)


async def applied(kube: Kube, of: Resource, content: Raw, namespace: str, **options: str) -> Raw:
    """Server-side apply."""
    got = await kube.http.request(
        "PATCH",
        of.path(namespace, content["metadata"]["name"]),
        content=json.dumps(content),
        params={"fieldManager": "test", "force": "true", **options},
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    said: Raw = got.json()
    if got.is_error:
        raise ApiError(got.status_code, said)
    return said


def version(of: Resource, name: str) -> Resource:
    """The same objects in another version of the API."""
    return Resource(f"apis/resource.k8s.io/{name}", of.plural, of.is_namespaced)


def in_seconds(seconds: float) -> str:
    return (utc_now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
