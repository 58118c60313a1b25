"""Tenants and other users try to get GPUs past the proof devices. Each attack succeeds without the policies."""

import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
from attrs import evolve

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import BINDING_ENDS, is_denied, refused, resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.gpus import (
    CLAIM,
    DEVICE_CLASSES,
    GPU_DRIVER,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    bound,
    claim_of_pod,
    claiming_pod,
    device_class,
    ended,
    pairs,
    refused_by_scheduler,
)
from tests.e2e.dra.tenants import (
    ANY_CLASS,
    CONTROLLER,
    CONTROLLER_MANAGER,
    DELETE_PROTECTION,
    ELSEWHERE,
    HASH,
    NEVER,
    NIC,
    NODE,
    OLD_CLASS,
    TEMPLATE,
    Attack,
    Outcomes,
    Tenants,
    allocation_on,
    applied,
    asking,
    claim,
    consumer,
    exactly,
    granted,
    guarded,
    labelled_template,
    outcomes,
    owned,
    owner_pod,
    template,
    tenants_of,
    version,
    without_opt_in,
)
from tests.e2e.kube import EVENTS, NAMESPACES, PODS, ApiError, Changes, Kube, Raw, Resource, gone, pod, wait_until
from webhook.core.proof_claims import CLAIM_LABELS, EVIDENCE_ENDS, claim_spec, reserved_claim_spec
from webhook.core.proof_devices import DRIVER, ProofDevice, hash_attribute
from webhook.kube.install.policies import GUARDS, DraGuard, Installation, dra
from webhook.kube.resource_slices import CHALLENGED, slices_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

COLLECTOR = "system:serviceaccount:kube-system:generic-garbage-collector"
FOREVER = {"key": EVIDENCE_ENDS, "operator": "Exists", "effect": "NoExecute"}
ANYTHING = {"operator": "Exists"}
GPU_REQUEST = {"name": "gpu1", "exactly": {"deviceClassName": GPU_DRIVER}}


# Attacks: all are dry runs.


def writes_claim(spec: Raw, **metadata: Any) -> Attack:
    return lambda users: users.tenant.create(
        RESOURCE_CLAIMS, claim("forged", spec, **metadata), users.guarded, dryRun="All"
    )


def writes_template(spec: Raw, labels: dict[str, str] | None = None) -> Attack:
    return lambda users: users.tenant.create(
        RESOURCE_CLAIM_TEMPLATES, template("forged", spec, labels), users.guarded, dryRun="All"
    )


def applies(spec: Raw) -> Attack:
    return lambda users: applied(users.tenant, RESOURCE_CLAIMS, claim("forged", spec), users.guarded, dryRun="All")


def in_version(name: str, request: Raw, *, is_template: bool = False) -> Attack:
    """Requests of v1beta1 have no `exactly`."""
    spec = {"devices": {"requests": [{"name": "r", **request}]}}
    of, content = (RESOURCE_CLAIM_TEMPLATES, template) if is_template else (RESOURCE_CLAIMS, claim)
    whole = {**content("forged", spec), "apiVersion": f"resource.k8s.io/{name}"}
    return lambda users: users.tenant.create(version(of, name), whole, users.guarded, dryRun="All")


def changes_claim(name: str, change: Raw) -> Attack:
    return lambda users: users.tenant.call(
        "PATCH", RESOURCE_CLAIMS.path(users.guarded, name), change, {"dryRun": "All"}
    )


def reowns(name: str) -> Attack:
    """Makes the claim that of another pod, as the claim controller recognizes it."""

    async def attack(users: Tenants) -> Raw:
        meta = owned({"metadata": {"name": "thief", "uid": "0b2f1f6e-0000-4000-8000-000000000000"}})
        return await changes_claim(name, {"metadata": meta})(users)

    return attack


def names_template(name: str) -> Attack:
    content = claiming_pod("thief", resourceClaimTemplateName=name)
    return lambda users: users.tenant.create(PODS, content, users.guarded, dryRun="All")


def names_claim(users: Tenants) -> Any:
    return users.tenant.create(PODS, claiming_pod("thief", resourceClaimName="held"), users.guarded, dryRun="All")


def controller_copies_unlabelled_template(users: Tenants) -> Any:
    content = claim("owner-gpu", asking(exactly(GPU_DRIVER)), **owned(users.pod))
    return users.controllers[CONTROLLER].create(RESOURCE_CLAIMS, content, users.guarded, dryRun="All")


def controller_copies_admin_access(users: Tenants) -> Any:
    spec = asking(exactly(GPU_DRIVER, adminAccess=True))
    content = claim("owner-gpu", spec, **owned(users.pod, labels=CLAIM_LABELS))
    return users.controllers[CONTROLLER].create(RESOURCE_CLAIMS, content, users.guarded, dryRun="All")


def controller_copies(spec: Raw, **metadata: Any) -> Attack:
    """As a webhook of an administrator may leave the copy of gpuwarden's template."""
    return lambda users: users.controllers[CONTROLLER].create(
        RESOURCE_CLAIMS,
        claim("owner-gpu", spec, **owned(users.pod, labels=CLAIM_LABELS, **metadata)),
        users.guarded,
        dryRun="All",
    )


def reserved(*uuids: str, hash: str | None = HASH) -> Raw:
    """The spec of a claim for the GPUs of a reservation."""
    attribute = None if hash is None else hash_attribute(hash)
    classes = {"gpu_class": GPU_DRIVER, "mig_class": "mig.nvidia.com"}
    return reserved_claim_spec(uuids, attribute, gpu_driver=GPU_DRIVER, evicts=True, **classes)


def changed(spec: Raw, path: str, value: Any = None) -> Raw:
    """A copy of the spec, with another value for one member of `devices`; without one if there is none."""
    made = copy.deepcopy(spec)
    *parents, last = path.split("/")
    parent = made["devices"]
    for key in parents:
        parent = parent[int(key) if isinstance(parent, list) else key]
    if value is None:
        del parent[int(last) if isinstance(parent, list) else last]
    else:
        parent[int(last) if isinstance(parent, list) else last] = value
    return made


def deletes_by_force(users: Tenants) -> Any:
    """A pod with a claim of gpuwarden that is on a node."""
    return deletes_pod("runner", 0)(users)


def deletes_pod(name: str, grace: int | None) -> Attack:
    options: Raw = {"dryRun": ["All"], **({} if grace is None else {"gracePeriodSeconds": grace})}
    return lambda users: users.tenant.call("DELETE", PODS.path(users.guarded, name), options)


def evicts(name: str, grace: int) -> Attack:
    options: Raw = {"dryRun": ["All"], "gracePeriodSeconds": grace}
    eviction: Raw = {"metadata": {"name": name}, "deleteOptions": options}
    return lambda users: users.tenant.call("POST", PODS.path(users.guarded, name, "eviction"), eviction)


def deletes_pods_by_force(users: Tenants) -> Any:
    query = {"fieldSelector": "metadata.name=runner", "gracePeriodSeconds": "0", "dryRun": "All"}
    return users.tenant.call("DELETE", PODS.path(users.guarded), query=query)


def stops_at_once(users: Tenants) -> Any:
    content = claiming_pod("thief", resourceClaimTemplateName=TEMPLATE)
    spec = {**content["spec"], "terminationGracePeriodSeconds": 0}
    return users.tenant.create(PODS, {**content, "spec": spec}, users.guarded, dryRun="All")


def warden_writes(spec: Raw) -> Attack:
    """The claim of a reservation."""
    return lambda users: users.warden.create(
        RESOURCE_CLAIMS, claim("reserved", spec, labels=CLAIM_LABELS), users.guarded, dryRun="All"
    )


def elsewhere(attack: Attack) -> Attack:
    """In the namespace that has not opted in."""
    return lambda users: attack(without_opt_in(users))


def writes_named_template(name: str) -> Attack:
    return lambda users: users.tenant.create(
        RESOURCE_CLAIM_TEMPLATES, template(name, asking(exactly())), users.guarded, dryRun="All"
    )


def selecting(expression: str, device_class: str = ANY_CLASS) -> Raw:
    return asking(exactly(device_class, selectors=[{"cel": {"expression": expression}}]))


def first_proof() -> Raw:
    return {"firstAvailable": [{"name": "nic", "deviceClassName": NIC}, {"name": "gpu", "deviceClassName": DRIVER}]}


def widens_any_class(users: Tenants) -> Any:
    change = [{"op": "add", "path": "/spec/selectors", "value": [{"cel": {"expression": "true || false"}}]}]
    return users.operator.call("PATCH", DEVICE_CLASSES.path(None, ANY_CLASS), change, {"dryRun": "All"})


def replaces_own_claim(spec: Raw) -> Attack:
    """The claim controller takes such a claim for the one that it would make from the pod's template."""
    return lambda users: users.tenant.create(
        RESOURCE_CLAIMS, claim("forged", spec, **owned(users.pod)), users.guarded, dryRun="All"
    )


def scheduler_makes_extended_claim(users: Tenants) -> Any:
    notes = {"resource.kubernetes.io/extended-resource-claim": "true"}
    content = claim("extended", asking(exactly(GPU_DRIVER)), **owned(users.pod, annotations=notes))
    return users.operator.create(RESOURCE_CLAIMS, content, users.guarded, dryRun="All")


def reserves_for_another_pod(users: Tenants) -> Any:
    thief = {"resource": "pods", "name": "thief", "uid": "0b2f1f6e-0000-4000-8000-000000000000"}
    change = {"status": {"reservedFor": [consumer(users.pod), thief]}}
    return users.operator.call(
        "PATCH", RESOURCE_CLAIMS.path(users.guarded, "held", "status"), change, {"dryRun": "All"}
    )


def pairs_of_attribute(attribute: str) -> Raw:
    return claim_spec(1, attribute, gpu_driver=GPU_DRIVER, gpu_class=GPU_DRIVER, evicts=True)


def says_that_the_node_has_answered(users: Tenants) -> Any:
    condition = {"type": CHALLENGED, "status": "True", "reason": "Mine", "message": "", "lastTransitionTime": NEVER}
    device = {"driver": DRIVER, "pool": ELSEWHERE, "device": "d-proof0", "conditions": [condition]}
    return users.operator.call(
        "PATCH",
        RESOURCE_CLAIMS.path(users.guarded, "held", "status"),
        {"status": {"devices": [device]}},
        {"dryRun": "All"},
    )


def allocates(name: str, **results: str) -> Attack:
    """Devices of these drivers, to a claim that no pod owns."""
    change = {"status": {"allocation": allocation_on(ELSEWHERE, **results)}}
    return lambda users: users.operator.call(
        "PATCH", RESOURCE_CLAIMS.path(users.guarded, name, "status"), change, {"dryRun": "All"}
    )


def of_class(expression: str, name: str = "forged", **spec: Any) -> Attack:
    content = {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}], **spec}}
    return lambda users: users.operator.create(DEVICE_CLASSES, content, dryRun="All")


def widens_class(users: Tenants) -> Any:
    change = [{"op": "replace", "path": "/spec/selectors/0/cel/expression", "value": "true"}]
    return users.operator.call("PATCH", DEVICE_CLASSES.path(None, NIC), change, {"dryRun": "All"})


def forged_slice(node: str = "forged") -> Raw:
    (raw,) = slices_of(node, [ProofDevice.of("GPU-x", HASH, None)], 1, GPU_DRIVER)
    return raw


def writes_slice(users: Tenants) -> Any:
    return users.operator.create(RESOURCE_SLICES, forged_slice(), dryRun="All")


def node_writes_slice(users: Tenants) -> Any:
    return users.node.create(RESOURCE_SLICES, forged_slice(), dryRun="All")


def node_writes_slice_of_its_own(users: Tenants) -> Any:
    raw = forged_slice(NODE)
    spec = {key: value for key, value in raw["spec"].items() if key != "nodeSelector"}
    content = {**raw, "metadata": {"name": "forged"}, "spec": {**spec, "nodeName": NODE}}
    return users.node.create(RESOURCE_SLICES, content, dryRun="All")


def writes_older_slice(users: Tenants) -> Any:
    content = {**forged_slice(), "apiVersion": "resource.k8s.io/v1beta2"}
    return users.operator.create(version(RESOURCE_SLICES, "v1beta2"), content, dryRun="All")


def proves_another_gpu(users: Tenants) -> Any:
    place = "/spec/devices/0/attributes/gpu.nvidia.com~1uuid/string"
    change = [{"op": "replace", "path": place, "value": "GPU-x"}]
    return users.operator.call("PATCH", RESOURCE_SLICES.path(None, f"gpuwarden-{NODE}-0"), change, {"dryRun": "All"})


def deletes_slice(users: Tenants) -> Any:
    return users.operator.call("DELETE", RESOURCE_SLICES.path(None, f"gpuwarden-{NODE}-0"), query={"dryRun": "All"})


def deletes_slices(users: Tenants) -> Any:
    query = {"fieldSelector": f"spec.driver={DRIVER}", "dryRun": "All"}
    return users.operator.call("DELETE", RESOURCE_SLICES.path(None), query=query)


def deletes_our_class(users: Tenants) -> Any:
    return users.operator.call("DELETE", DEVICE_CLASSES.path(None, DRIVER), query={"dryRun": "All"})


def moves_the_end(users: Tenants) -> Any:
    change = {"spec": {"nodes": {"forged": NEVER}}}
    return users.operator.call("PATCH", BINDING_ENDS.path(None, "gpuwarden"), change, {"dryRun": "All"})


def deletes_the_ends(users: Tenants) -> Any:
    return users.operator.call("DELETE", BINDING_ENDS.path(None, "gpuwarden"), query={"dryRun": "All"})


def first_available() -> Raw:
    sub = [{"name": "nic", "deviceClassName": NIC}, {"name": "gpu", "deviceClassName": GPU_DRIVER}]
    return {"firstAvailable": sub}


def tolerating(toleration: Raw) -> Raw:
    return asking(exactly(tolerations=[toleration]))


ONLY = "only gpuwarden writes claims and templates of DeviceClass"
TAINTS = "Taints of gpuwarden may be tolerated only in claims of gpuwarden: tom may not"
LABEL = "The label gpuwarden.io/gpu-claim is written by gpuwarden only, not by"
OWNERS = "its owners and annotations are changed by Kubernetes and gpuwarden only, not by tom"
CLASSES = "requires the permission to manage reservations.gpuwarden.io, and operator does not have it"
SLICES = f"ResourceSlices of {DRIVER} are written by gpuwarden only, not by"
ENDS = "BindingEnds are written by gpuwarden only, not by operator"
EXTENDED = {"resource.kubernetes.io/extended-resource-claim": "true"}

PROOFS = f"Only claims and templates of gpuwarden ask for devices of {DRIVER}, not those of"
# Two policies refuse it, and the API server shows the sentence of one.
NOT_OURS = f"{DRIVER}, not "
FORCED = "A forced deletion would free the GPUs of pod runner while its containers run, so tom has to delete it without"
EVICTED = "gracePeriodSeconds: 0 in an eviction would free the GPUs of pods while their containers run, so tom has to"
SLOWLY = "gracePeriodSeconds: tom requests 86400 s; the maximum for evictions"
MADE = (
    "A claim with the annotation resource.kubernetes.io/pod-claim-name is made from the template of a pod, not by tom"
)
SHAPE = "is not as gpuwarden writes it"
PAIR, TWO = pairs(1, HASH), pairs(2, HASH)
FOR_ANOTHER = pairs(1, "sha256:bb22")["devices"]["requests"][0]["exactly"]["selectors"]

ATTACKS: dict[str, tuple[Attack, str]] = {
    "claim without proof": (writes_claim(asking(exactly(GPU_DRIVER))), f"{ONLY} {GPU_DRIVER}, not tom"),
    "claim of the proof alone": (writes_claim(asking(exactly(DRIVER))), NOT_OURS),
    "claim with the right form": (writes_claim(pairs(1, HASH)), NOT_OURS),
    "claim that outlives its proof": (writes_claim(pairs(1, HASH, evicts=False)), NOT_OURS),
    "claim by another class": (writes_claim(asking(exactly(OLD_CLASS))), f"{ONLY} {OLD_CLASS}, not tom"),
    "second request for a GPU": (writes_claim(asking(exactly(), exactly(GPU_DRIVER))), f"{ONLY} {GPU_DRIVER}"),
    "alternative with a GPU": (writes_claim(asking(first_available())), f"{ONLY} {GPU_DRIVER}"),
    "all devices of a class": (writes_claim(asking(exactly(GPU_DRIVER, allocationMode="All"))), ONLY),
    "toleration of our taint": (writes_claim(tolerating(FOREVER)), TAINTS),
    "toleration without effect": (writes_claim(tolerating({"key": EVIDENCE_ENDS, "operator": "Exists"})), TAINTS),
    "toleration of all taints": (writes_claim(tolerating(ANYTHING)), TAINTS),
    "toleration in an alternative": (
        writes_claim(asking({"firstAvailable": [{"name": "nic", "deviceClassName": NIC, "tolerations": [ANYTHING]}]})),
        TAINTS,
    ),
    "admin access": (writes_claim(asking(exactly(adminAccess=True))), "adminAccess is not allowed"),
    "admin access to GPUs": (writes_claim(asking(exactly(GPU_DRIVER, adminAccess=True))), "adminAccess is not allowed"),
    "label of gpuwarden": (writes_claim(asking(exactly()), labels=CLAIM_LABELS), f"{LABEL} tom"),
    "extended claim": (writes_claim(asking(exactly()), annotations=EXTENDED), "are written by the scheduler only"),
    "applied claim": (applies(asking(exactly(GPU_DRIVER))), f"{ONLY} {GPU_DRIVER}"),
    "claim in v1beta1": (in_version("v1beta1", {"deviceClassName": GPU_DRIVER}), f"{ONLY} {GPU_DRIVER}"),
    "alternative in v1beta1": (in_version("v1beta1", first_available()), f"{ONLY} {GPU_DRIVER}"),
    "claim in v1beta2": (in_version("v1beta2", exactly(GPU_DRIVER)), f"{ONLY} {GPU_DRIVER}"),
    "admin access in v1beta1": (
        in_version("v1beta1", {"deviceClassName": NIC, "adminAccess": True}),
        "adminAccess is not allowed",
    ),
    "template without proof": (writes_template(asking(exactly(GPU_DRIVER))), f"{ONLY} {GPU_DRIVER}, not tom"),
    "template with the right form": (writes_template(pairs(1, HASH)), NOT_OURS),
    "template that outlives its proof": (writes_template(pairs(1, HASH, evicts=False)), NOT_OURS),
    "template with a toleration": (writes_template(tolerating(ANYTHING)), TAINTS),
    "template with admin access": (writes_template(asking(exactly(adminAccess=True))), "adminAccess is not allowed"),
    "template with an alternative": (writes_template(asking(first_available())), f"{ONLY} {GPU_DRIVER}"),
    "template with our label": (writes_template(asking(exactly()), CLAIM_LABELS), f"{LABEL} tom"),
    "template in v1beta1": (
        in_version("v1beta1", {"deviceClassName": GPU_DRIVER}, is_template=True),
        f"{ONLY} {GPU_DRIVER}",
    ),
    "template in v1beta2": (in_version("v1beta2", exactly(GPU_DRIVER), is_template=True), f"{ONLY} {GPU_DRIVER}"),
    "copy of an older template": (
        controller_copies_unlabelled_template,
        "from a template without the label gpuwarden.io/gpu-claim=true",
    ),
    "copy of a template with admin access": (controller_copies_admin_access, "adminAccess is not allowed"),
    "extended resource": (scheduler_makes_extended_claim, f"{ONLY} {GPU_DRIVER}, not operator for an extended"),
    "copy without the constraint": (controller_copies(changed(PAIR, "constraints")), SHAPE),
    "copy with another constraint": (
        controller_copies(changed(PAIR, "constraints/0/matchAttribute", f"{GPU_DRIVER}/productName")),
        SHAPE,
    ),
    "copy with a constraint for one of two pairs": (controller_copies(changed(TWO, "constraints/1")), SHAPE),
    "copy without parameters": (controller_copies(changed(PAIR, "config")), SHAPE),
    "copy with parameters for another hash": (
        controller_copies(changed(PAIR, "config/0/opaque/parameters/hash", "bb22")),
        SHAPE,
    ),
    "copy with a selector for another hash": (
        controller_copies(changed(PAIR, "requests/0/exactly/selectors", FOR_ANOTHER)),
        SHAPE,
    ),
    "copy with a wider selector": (
        controller_copies(changed(PAIR, "requests/0/exactly/selectors/0/cel/expression", "true")),
        SHAPE,
    ),
    "copy without a selector": (controller_copies(changed(PAIR, "requests/0/exactly/selectors")), SHAPE),
    "copy that tolerates everything": (
        controller_copies(changed(PAIR, "requests/0/exactly/tolerations", [ANYTHING])),
        SHAPE,
    ),
    "copy that tolerates the end for an hour": (
        controller_copies(changed(PAIR, "requests/0/exactly/tolerations/0/tolerationSeconds", 3600)),
        SHAPE,
    ),
    "copy that tolerates for one of two pairs": (
        controller_copies(changed(TWO, "requests/2/exactly/tolerations", [FOREVER])),
        SHAPE,
    ),
    "copy whose GPU tolerates everything": (
        controller_copies(changed(PAIR, "requests/1/exactly/tolerations", [ANYTHING])),
        SHAPE,
    ),
    "copy for two GPUs a proof": (controller_copies(changed(PAIR, "requests/1/exactly/count", 2)), SHAPE),
    "copy with a GPU more": (
        controller_copies(changed(PAIR, "requests", [*PAIR["devices"]["requests"], GPU_REQUEST])),
        SHAPE,
    ),
    "copy without the proof": (controller_copies(asking(exactly(GPU_DRIVER))), SHAPE),
    "copy with an alternative": (
        controller_copies(
            changed(PAIR, "requests/1", {"name": "gpu0", "firstAvailable": first_available()["firstAvailable"]})
        ),
        SHAPE,
    ),
    "copy for a hash that is none": (controller_copies(pairs_of_attribute("a' || 'b' == 'b")), SHAPE),
    "proof without opt-in": (elsewhere(writes_claim(asking(exactly(DRIVER)))), f"{PROOFS} tom"),
    "pair without opt-in": (elsewhere(writes_claim(PAIR)), f"{PROOFS} tom"),
    "alternative with a proof without opt-in": (elsewhere(writes_claim(asking(first_proof()))), f"{PROOFS} tom"),
    "template of a proof without opt-in": (elsewhere(writes_template(asking(exactly(DRIVER)))), f"{PROOFS} tom"),
    "template of an alternative without opt-in": (elsewhere(writes_template(asking(first_proof()))), f"{PROOFS} tom"),
    "selector of proofs without opt-in": (
        elsewhere(writes_claim(selecting(f"device.driver == '{DRIVER}'"))),
        f"{PROOFS} tom",
    ),
    "proof in v1beta1 without opt-in": (
        elsewhere(in_version("v1beta1", {"deviceClassName": DRIVER})),
        f"{PROOFS} tom",
    ),
    "name of our template": (writes_named_template("gpuwarden-1-aa11"), "belongs to gpuwarden: tom may not write it"),
    "name of our template without opt-in": (
        elsewhere(writes_named_template("gpuwarden-1-aa11")),
        "belongs to gpuwarden: tom may not write it",
    ),
    "claim in place of the one from the template": (replaces_own_claim(asking(exactly())), MADE),
    "claim put in place of the one from the template later": (reowns("nic"), MADE),
    "another owner": (reowns("held"), OWNERS),
    "another owner after the opt-out": (elsewhere(reowns("held")), OWNERS),
    "claim of another pod after the opt-out": (
        elsewhere(reserves_for_another_pod),
        "serves only the pod that owns it: operator may not reserve it for thief",
    ),
    "two GPUs for one proof after the opt-out": (
        elsewhere(allocates("stripped", r0=GPU_DRIVER, r1=GPU_DRIVER, r2=DRIVER)),
        "a claim gets no more GPUs than proofs",
    ),
    "another owner of an older claim": (reowns("older"), OWNERS),
    "answer of a node": (says_that_the_node_has_answered, "of proof devices is written by gpuwarden only: operator"),
    "no owner": (changes_claim("held", {"metadata": {"ownerReferences": None}}), OWNERS),
    "another annotation": (changes_claim("held", {"metadata": {"annotations": {"a": "b"}}}), OWNERS),
    "label removed": (changes_claim("held", {"metadata": {"labels": None}}), f"{LABEL} tom"),
    "label added later": (changes_claim("older", {"metadata": {"labels": CLAIM_LABELS}}), f"{LABEL} tom"),
    "finalizer of a claim in use": (
        changes_claim("held", {"metadata": {"finalizers": None}}),
        "ResourceClaim held holds GPUs: tom may not remove its finalizer",
    ),
    "claim of another pod": (names_claim, "may not name ResourceClaim held"),
    "template without a number": (names_template("gpuwarden-aa11"), "is not one of gpuwarden"),
    "template for nine": (names_template("gpuwarden-9-aa11"), "is not one of gpuwarden"),
    "template with two suffixes": (names_template("gpuwarden-1-aa11-bind-bind"), "is not one of gpuwarden"),
    "template with a suffix": (names_template("gpuwarden-1-aa11.x"), "is not one of gpuwarden"),
    "forced deletion": (deletes_by_force, FORCED),
    "forced deletion of a collection": (deletes_pods_by_force, FORCED),
    "eviction at once": (evicts("owner", 0), EVICTED),
    "eviction at once after the opt-out": (elsewhere(evicts("owner", 0)), EVICTED),
    "eviction over days": (evicts("owner", 86_400), SLOWLY),
    "eviction over days after the opt-out": (elsewhere(evicts("owner", 86_400)), SLOWLY),
    "pod that is always deleted by force": (stops_at_once, "tom has to set 1 or more"),
    "reservation for another pod": (
        reserves_for_another_pod,
        "serves only the pod that owns it: operator may not reserve it for thief",
    ),
    "GPU for an older claim": (
        allocates("older", r0=GPU_DRIVER),
        "only claims of gpuwarden get GPUs: operator may not allocate any to older",
    ),
    "GPU for a claim whose proof was removed": (
        allocates("stripped", r0=GPU_DRIVER),
        "a claim gets no more GPUs than proofs: operator may not allocate these devices to stripped",
    ),
    "two GPUs for one proof": (
        allocates("stripped", r0=GPU_DRIVER, r1=GPU_DRIVER, r2=DRIVER),
        "a claim gets no more GPUs than proofs",
    ),
    "slice of our driver": (writes_slice, f"{SLICES} operator"),
    "slice of our driver in v1beta2": (writes_older_slice, f"{SLICES} operator"),
    "slice of a node": (node_writes_slice, f"{SLICES} system:node:{NODE}"),
    "slice of a node for itself": (node_writes_slice_of_its_own, f"{SLICES} system:node:{NODE}"),
    "slice with another GPU": (proves_another_gpu, f"{SLICES} operator"),
    "slice deleted": (deletes_slice, f"{SLICES} operator"),
    "slices deleted": (deletes_slices, f"{SLICES} operator"),
    "class of the GPUs": (of_class(f"device.driver == '{GPU_DRIVER}'"), CLASSES),
    "class of the proofs": (of_class(f'device.driver == "{DRIVER}"'), CLASSES),
    "class of everything": (of_class("true"), CLASSES),
    "class with an alternative": (of_class(f"device.driver == '{NIC}' || true"), CLASSES),
    "class with a condition": (of_class(f"device.driver == '{NIC}' && true ? true : true"), CLASSES),
    "class with two drivers": (of_class(f"device.driver in ['{NIC}', '{GPU_DRIVER}']"), CLASSES),
    "class with a comparison": (of_class(f"device.driver == '{NIC}' != true"), CLASSES),
    "class by negation": (of_class(f"!(device.driver == '{NIC}')"), CLASSES),
    "class by a later term": (of_class(f"true && device.driver == '{NIC}'"), CLASSES),
    "class with a comment": (of_class(f"true // device.driver == '{NIC}'"), CLASSES),
    "class after a comment": (of_class(f"// a\ndevice.driver == '{NIC}'\n|| true"), CLASSES),
    "class for our resource": (of_class(f"device.driver == '{NIC}'", extendedResourceName="nvidia.com/gpu"), CLASSES),
    "class widened": (widens_class, CLASSES),
    "class of everything changed": (widens_any_class, CLASSES),
    "class of gpuwarden deleted": (deletes_our_class, f"{DRIVER} belongs to gpuwarden"),
    "end moved": (moves_the_end, ENDS),
    "ends deleted": (deletes_the_ends, ENDS),
}
# One for each policy.
PROBES: tuple[str, ...] = (
    "claim without proof",
    "label of gpuwarden",
    "claim of another pod",
    "reservation for another pod",
    "slice of our driver",
    "class of the GPUs",
    "ends deleted",
)


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It serves the older versions of the API too, and no other test sees its policies."""
    older = "--runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true"
    with Cluster(tmp_path_factory.mktemp("guards"), flags={"kube-apiserver": [older]}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(own_cluster: Cluster) -> AsyncIterator[tuple[Tenants, Outcomes]]:
    """The users, and what each attack got before the policies."""
    async with tenants_of(own_cluster) as users:
        await users.admin.create(
            BINDING_ENDS,
            {
                "apiVersion": "gpuwarden.io/v1alpha1",
                "kind": "BindingEnds",
                "metadata": {"name": "gpuwarden"},
                "spec": {},
            },
        )
        before = await outcomes(users, {name: attack for name, (attack, _) in ATTACKS.items()})
        async with guarded(users, {name: ATTACKS[name][0] for name in PROBES}):
            yield users, before


@pytest_asyncio.fixture(loop_scope="module")
async def users(arena: tuple[Tenants, Outcomes]) -> Tenants:
    return arena[0]


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_is_refused_and_succeeds_without_the_policies(arena: tuple[Tenants, Outcomes], name: str) -> None:
    users, before = arena
    attack, words = ATTACKS[name]
    assert before[name] is None
    await refused(attack(users), words)


# What users, controllers and operators still do.


@pytest.mark.parametrize(
    "expression",
    [
        f"device.driver == '{NIC}'",
        f'device.driver == "{NIC}"',
        f" device.driver=='{NIC}' && device.attributes['{NIC}'].speed > 100",
    ],
    ids=["alone", "double quotes", "with a condition"],
)
async def test_class_of_another_driver_needs_no_permission(users: Tenants, expression: str) -> None:
    await of_class(expression)(users)
    await of_class(expression, extendedResourceName="example.com/nic")(users)


async def test_operator_with_permission_writes_classes_slices_and_ends(users: Tenants) -> None:
    await users.warden.create(DEVICE_CLASSES, {**device_class(GPU_DRIVER), "metadata": {"name": "more"}}, dryRun="All")
    await users.warden.create(RESOURCE_SLICES, forged_slice(), dryRun="All")
    await users.warden.call("DELETE", DEVICE_CLASSES.path(None, DRIVER), query={"dryRun": "All"})
    await users.warden.call("DELETE", BINDING_ENDS.path(None, "gpuwarden"), query={"dryRun": "All"})
    await users.warden.create(RESOURCE_CLAIMS, claim("more", asking(exactly(GPU_DRIVER))), users.guarded, dryRun="All")


async def test_slices_and_classes_of_other_drivers_are_free(users: Tenants) -> None:
    spec = {**forged_slice()["spec"], "driver": "nic.other.com"}
    await users.operator.create(RESOURCE_SLICES, {**forged_slice(), "spec": spec}, dryRun="All")
    await users.node.create(RESOURCE_SLICES, {**forged_slice(), "spec": spec}, dryRun="All")
    await users.operator.call("DELETE", DEVICE_CLASSES.path(None, OLD_CLASS), query={"dryRun": "All"})
    labels = {"metadata": {"labels": {"a": "b"}}}
    await users.operator.call("PATCH", DEVICE_CLASSES.path(None, OLD_CLASS), labels, {"dryRun": "All"})


@pytest.mark.parametrize("spec", [pairs(1, HASH), pairs(8, HASH), pairs(1, HASH, evicts=False)], ids=["1", "8", "kept"])
async def test_claims_of_our_form_are_copied(users: Tenants, spec: Raw) -> None:
    await controller_copies(spec)(users)
    await controller_copies(spec, finalizers=[DELETE_PROTECTION])(users)


@pytest.mark.parametrize("count", [1, 16])
async def test_claims_of_reservations_are_written_with_and_without_proofs(users: Tenants, count: int) -> None:
    uuids = [f"MIG-GPU-{k}/1/0" for k in range(count)]
    await warden_writes(reserved(*uuids))(users)
    await warden_writes(reserved(*uuids, hash=None))(users)


@pytest.mark.parametrize("name", [CONTROLLER, CONTROLLER_MANAGER])
async def test_claim_controller_makes_claims_of_labelled_templates(users: Tenants, name: str) -> None:
    content = claim("owner-gpu", pairs(1, HASH), **owned(users.pod, labels=CLAIM_LABELS))
    await users.controllers[name].create(RESOURCE_CLAIMS, content, users.guarded, dryRun="All")
    unowned = claim("owner-gpu", pairs(1, HASH), labels=CLAIM_LABELS)
    assert await is_denied(users.controllers[name].create(RESOURCE_CLAIMS, unowned, users.guarded, dryRun="All"))


@pytest.mark.parametrize(
    "name", ["claim without proof", "toleration of all taints", "claim in v1beta1", "claim of another pod"]
)
async def test_namespace_without_opt_in_is_not_guarded(users: Tenants, name: str) -> None:
    await ATTACKS[name][0](without_opt_in(users))


async def test_pod_without_a_claim_of_ours_is_evicted_at_once_without_opt_in(users: Tenants) -> None:
    plain = owner_pod()
    await users.admin.create(PODS, {**plain, "metadata": {"name": "plain"}}, users.free)
    await evicts("plain", 0)(without_opt_in(users))


async def test_label_and_finalizer_are_guarded_without_opt_in(users: Tenants) -> None:
    """A namespace may opt in later, and GPUs of all namespaces are allocated by one scheduler."""
    free = without_opt_in(users)
    await refused(ATTACKS["label of gpuwarden"][0](free), f"{LABEL} tom")
    await refused(ATTACKS["template with our label"][0](free), f"{LABEL} tom")
    content = claim("taken", asking(exactly(GPU_DRIVER)), finalizers=[DELETE_PROTECTION])
    await users.tenant.create(RESOURCE_CLAIMS, content, users.free)
    status = {"status": {"allocation": allocation_on(ELSEWHERE, r0=GPU_DRIVER)}}
    await users.operator.patch(RESOURCE_CLAIMS, "taken", status, users.free, subresource="status")
    for name in ("taken", "held"):
        attack = changes_claim(name, {"metadata": {"finalizers": None}})
        await refused(attack(free), f"ResourceClaim {name} holds GPUs: tom may not remove its finalizer")


async def test_guard_of_all_namespaces_includes_those_without_opt_in(users: Tenants) -> None:
    everywhere = Installation(dra_guard=DraGuard.ALL, device_classes=(NIC,))
    bindings = [one for one in dra(everywhere) if one["metadata"]["name"] in GUARDS and one["kind"].endswith("Binding")]
    attacks = [ATTACKS[name][0] for name in ("claim without proof", "claim of another pod")]
    elsewhere = without_opt_in(users)
    async with AsyncExitStack() as stack:
        for one in bindings:
            content = {**one, "metadata": {"name": f"{one['metadata']['name']}-all"}}
            await users.admin.create(resource_of(one), content)
            stack.push_async_callback(users.admin.delete, resource_of(one), content["metadata"]["name"])
        for attack in attacks:
            await wait_until(lambda attack=attack: is_denied(attack(elsewhere)))  # type: ignore[misc]  # bound now
    for attack in attacks:
        await wait_until(lambda attack=attack: is_denied(attack(elsewhere)), lambda denied: not denied)  # type: ignore[misc]


async def test_older_label_guards_too(users: Tenants) -> None:
    async with new_namespace(users.admin, {"scheduler.radix.ai/enabled": "true"}) as name:
        older = evolve(users, tenant=users.operator, guarded=name)
        await refused(ATTACKS["claim without proof"][0](older), f"{ONLY} {GPU_DRIVER}, not operator")
        await refused(names_claim(older), "may not name ResourceClaim held")


@pytest.mark.parametrize(
    ("required", "template_name", "is_allowed"),
    [
        ("sha256:aa11", "gpuwarden-1-aa11", True),
        ("sha256:bb22,aa11", "gpuwarden-8-aa11", True),
        ("sha256:bb22", "gpuwarden-1-aa11", False),
        ("sha256:11", "gpuwarden-1-aa11", False),
        ("AA11", "gpuwarden-1-aa11", False),
        ("", "gpuwarden-1-aa11", False),
        ("sha256:bb22", "nics", True),
        ("sha256:aa11", "gpuwarden-1-aa11-bind", True),
        ("sha256:bb22", "gpuwarden-1-aa11-bind", False),
        ("sha256:bind", "gpuwarden-1-aa11-bind", False),
    ],
)
async def test_template_has_to_be_for_the_hash_that_the_namespace_requires(
    users: Tenants, required: str, template_name: str, *, is_allowed: bool
) -> None:
    labels, notes = {"gpuwarden.io/enabled": "true"}, {"gpuwarden.io/required-hash": required}
    async with new_namespace(users.admin, labels) as name:
        await users.admin.patch(NAMESPACES, name, {"metadata": {"annotations": notes}})
        there = evolve(users, tenant=users.operator, guarded=name)
        # Policies read namespaces by watch.
        await wait_until(lambda: denies(names_template(template_name), there), lambda denied: denied != is_allowed)
        if not is_allowed:
            await refused(names_template(template_name)(there), f"Namespace {name} requires the hash {required}")


async def test_pod_with_a_claim_is_deleted_with_a_grace_period(users: Tenants) -> None:
    for grace in (None, 1):
        await deletes_pod("runner", grace)(users)


@pytest.mark.parametrize("groups", [("system:nodes",), ()], ids=["kubelet", "another user"])
async def test_kubelet_deletes_a_pod_when_its_containers_have_ended(users: Tenants, groups: tuple[str, ...]) -> None:
    async with AsyncExitStack() as stack:
        name = f"system:node:{ELSEWHERE}" if groups else "somebody"
        rules: list[Raw] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}]
        someone = await granted(users.cluster, users.admin, stack, name, rules, *groups)
        request = deletes_by_force(evolve(users, tenant=someone))
        await request if groups else await refused(request, "somebody has to delete it without --force")


async def test_pod_that_cannot_run_is_deleted_by_force(users: Tenants) -> None:
    """A pod on no node, and one that has failed, as pod GC makes the pods of nodes that are gone."""
    content = claiming_pod("waits", resourceClaimTemplateName=TEMPLATE)
    spec = {**content["spec"], "schedulingGates": [{"name": "example.test/hold"}]}
    await users.tenant.create(PODS, {**content, "spec": spec}, users.guarded)
    await users.tenant.delete(PODS, "waits", users.guarded, grace=0)
    over = claiming_pod("over", resourceClaimTemplateName=TEMPLATE)
    over["spec"]["nodeName"] = ELSEWHERE  # without a kubelet that would report the pod as running
    await users.admin.create(PODS, over, users.guarded)
    await refused(users.tenant.delete(PODS, "over", users.guarded, grace=0), "A forced deletion would free")
    await users.admin.patch(PODS, "over", {"status": {"phase": "Failed"}}, users.guarded, subresource="status")
    await users.tenant.delete(PODS, "over", users.guarded, grace=0)


@pytest.mark.long
async def test_pod_of_a_node_that_is_gone_is_removed(users: Tenants) -> None:
    """By pod GC, which deletes by force."""
    content = claiming_pod("orphan", resourceClaimTemplateName=TEMPLATE)
    content["spec"]["nodeName"] = "guarded-gone"
    await users.admin.create(PODS, content, users.guarded)
    await gone(users.admin, PODS, "orphan", users.guarded, seconds=180)


CLAIM_OF_A_CONTAINER: Raw = {"name": CLAIM}
EPHEMERAL: Raw = {"name": "debug", "image": "example.test/debug:1", "resources": {"claims": [CLAIM_OF_A_CONTAINER]}}


@pytest.mark.parametrize(
    ("of", "name", "subresource", "change"),
    [
        (RESOURCE_CLAIMS, "held", "status", {"status": {"reservedFor": None}}),
        (RESOURCE_CLAIMS, "held", "status", {"status": {"allocation": None}}),
        (
            RESOURCE_CLAIMS,
            "held",
            "status",
            {"status": {"devices": [{"driver": GPU_DRIVER, "pool": "a", "device": "b"}]}},
        ),
        (RESOURCE_CLAIMS, "held", "", {"spec": pairs(1, "sha256:bb22")}),
        (RESOURCE_CLAIMS, "held", "", {"status": {"reservedFor": None, "allocation": None}}),
        (
            PODS,
            "runner",
            "status",
            {"status": {"resourceClaimStatuses": [{"name": CLAIM, "resourceClaimName": "held"}]}},
        ),
        (PODS, "runner", "status", {"status": {"phase": "Failed"}}),
        (PODS, "runner", "", {"spec": {"resourceClaims": [{"name": CLAIM, "resourceClaimName": "held"}]}}),
        (PODS, "runner", "ephemeralcontainers", {"spec": {"ephemeralContainers": [EPHEMERAL]}}),
        (
            PODS,
            "runner",
            "resize",
            [
                {
                    "op": "add",
                    "path": "/spec/containers/0/resources/claims/-",
                    "value": {"name": CLAIM, "request": "gpu0"},
                }
            ],
        ),
        (RESOURCE_SLICES, f"gpuwarden-{NODE}-0", "", {"spec": {"devices": None}}),
        (DEVICE_CLASSES, NIC, "", {"spec": {"selectors": None}}),
    ],
    ids=lambda one: one.plural if isinstance(one, Resource) else str(one)[:60],
)
async def test_tenant_has_no_other_way_to_devices_of_a_claim(
    users: Tenants, of: Resource, name: str, subresource: str, change: Raw | Changes
) -> None:
    """Kubernetes itself refuses it, or the change has no effect."""
    namespace = users.guarded if of.is_namespaced else None
    before = await users.admin.get(of, name, namespace)
    with suppress(ApiError):
        await users.tenant.patch(of, name, change, namespace, subresource)
    after = await users.admin.get(of, name, namespace)
    assert (after["spec"], after.get("status")) == (before["spec"], before.get("status"))


async def test_tenant_writes_no_rule_for_taints(users: Tenants) -> None:
    rule = {"metadata": {"name": "forged"}, "spec": {"taint": {"key": "a", "effect": "NoExecute"}}}
    with pytest.raises(ApiError) as caught:
        await users.tenant.create(Resource("apis/resource.k8s.io/v1beta2", "devicetaintrules", False), rule)
    assert caught.value.status in (403, 404)


async def denies(attack: Attack, users: Tenants) -> bool:
    return await is_denied(attack(users))


async def test_tenant_uses_allowed_class_by_a_template(users: Tenants) -> None:
    await users.tenant.create(RESOURCE_CLAIM_TEMPLATES, template("nics", asking(exactly())), users.guarded)
    await users.tenant.create(PODS, claiming_pod("nic", resourceClaimTemplateName="nics"), users.guarded)
    await bound(users.admin, users.guarded, "nic")
    made = await claim_of_pod(users.admin, users.guarded, "nic")
    # Metadata of claims for other devices is the tenant's.
    notes = {"metadata": {"annotations": {**made["metadata"]["annotations"], "a": "b"}, "labels": {"a": "b"}}}
    await users.tenant.patch(RESOURCE_CLAIMS, made["metadata"]["name"], notes, users.guarded)
    await users.tenant.delete(PODS, "nic", users.guarded)
    await gone(users.admin, RESOURCE_CLAIMS, made["metadata"]["name"], users.guarded)


async def test_older_template_gives_no_claim_and_the_pod_is_told(users: Tenants) -> None:
    """It was written before the guards."""
    await users.tenant.create(PODS, claiming_pod("late", resourceClaimTemplateName="older"), users.guarded)

    async def told() -> list[str]:
        events = await users.admin.list(EVENTS, users.guarded, fieldSelector="involvedObject.name=late")
        return [one["message"] for one in events if one["reason"] == "FailedResourceClaimCreation"]

    (message, *_) = await wait_until(told)
    assert "from a template without the label gpuwarden.io/gpu-claim=true in spec.metadata" in message
    await users.tenant.delete(PODS, "late", users.guarded)


async def test_claim_that_a_policy_of_the_cluster_changes_is_not_made_and_the_pod_is_told(users: Tenants) -> None:
    await labelled_template(users, users.guarded)
    expression = "[JSONPatch{op: 'remove', path: '/spec/devices/constraints'}]"
    changing = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {
            "objectSelector": {"matchLabels": CLAIM_LABELS},
            "resourceRules": [
                {
                    "apiGroups": ["resource.k8s.io"],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["resourceclaims"],
                }
            ],
        },
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
    }
    made: list[Raw] = [
        {"kind": "MutatingAdmissionPolicy", "metadata": {"name": "changing"}, "spec": changing},
        {
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": "changing"},
            "spec": {"policyName": "changing"},
        },
    ]
    async with AsyncExitStack() as stack:
        for one in made:
            one["apiVersion"] = "admissionregistration.k8s.io/v1"
            await users.admin.create(resource_of(one), one)
            stack.push_async_callback(users.admin.delete, resource_of(one), "changing")
        await wait_until(lambda: is_denied(controller_copies(PAIR)(users)))
        await users.tenant.create(PODS, claiming_pod("told", resourceClaimTemplateName=TEMPLATE), users.guarded)

        async def told() -> list[str]:
            events = await users.admin.list(EVENTS, users.guarded, fieldSelector="involvedObject.name=told")
            return [one["message"] for one in events if one["reason"] == "FailedResourceClaimCreation"]

        (message, *_) = await wait_until(told)
        assert f"has the label gpuwarden.io/gpu-claim=true and {SHAPE}" in message
    await bound(users.admin, users.guarded, "told")
    await ended(users.admin, users.guarded, "told")


async def test_extended_resource_gives_no_claim(users: Tenants) -> None:
    """Without the guards the scheduler itself makes the claim."""
    name = "gpus-by-resource"
    content = {**device_class(GPU_DRIVER), "metadata": {"name": name}}
    content["spec"] = {**content["spec"], "extendedResourceName": "nvidia.com/gpu"}
    await users.admin.create(DEVICE_CLASSES, content)
    try:
        await users.tenant.create(PODS, pod("free", gpus=1), users.free)
        await bound(users.admin, users.free, "free")
        await users.tenant.create(PODS, pod("guarded", gpus=1), users.guarded)
        await refused_by_scheduler(users.admin, users.guarded, "guarded", f"{ONLY} {name}, not system:kube-scheduler")
    finally:
        for namespace, one in ((users.free, "free"), (users.guarded, "guarded")):
            await ended(users.admin, namespace, one)
        await users.admin.delete(DEVICE_CLASSES, name)


async def proven_pod(users: Tenants, name: str, namespace: str | None = None) -> str:
    """A pod that has got a proven GPU. Returns the name of its claim."""
    namespace = namespace or users.guarded
    await labelled_template(users, namespace)
    await users.operator.create(PODS, claiming_pod(name, resourceClaimTemplateName=TEMPLATE), namespace)
    await bound(users.admin, namespace, name)
    return str((await claim_of_pod(users.admin, namespace, name))["metadata"]["name"])


async def test_vain_requests_without_opt_in_do_not_keep_proven_pods_waiting(users: Tenants) -> None:
    """By the resource that each class has, or by a class of all devices and an expression without our name. The
    scheduler tries, because the evidence of these devices has no end."""
    evading = asking(
        exactly(
            ANY_CLASS,
            selectors=[{"cel": {"expression": "device.driver.startsWith('attested')"}}],
            tolerations=[ANYTHING],
        )
    )
    await users.tenant.create(RESOURCE_CLAIM_TEMPLATES, template("evading", evading), users.free)
    by_resource = pod("by-resource")
    amount = {f"deviceclass.resource.kubernetes.io/{DRIVER}": "1"}
    by_resource["spec"]["containers"][0]["resources"] = {"limits": amount, "requests": amount}
    thieves = {"by-resource": by_resource, "by-claim": claiming_pod("by-claim", resourceClaimTemplateName="evading")}
    for content in thieves.values():
        await users.tenant.create(PODS, content, users.free)
    try:
        await refused_by_scheduler(users.admin, users.free, "by-resource", PROOFS)
        await refused_by_scheduler(users.admin, users.free, "by-claim", "may take proven GPUs")
        for _ in range(3):
            await proven_pod(users, "proven")
            await ended(users.admin, users.guarded, "proven")
    finally:
        for name in thieves:
            await ended(users.admin, users.free, name)
        await users.admin.delete(RESOURCE_CLAIM_TEMPLATES, "evading", users.free)


@pytest.mark.parametrize("propagation", ["Background", "Foreground", "Orphan"])
async def test_claim_with_gpus_is_collected_with_its_pod(users: Tenants, propagation: str) -> None:
    made = await proven_pod(users, "proven")
    await users.tenant.call("DELETE", PODS.path(users.guarded, "proven"), {"propagationPolicy": propagation})
    await gone(users.admin, PODS, "proven", users.guarded)
    if propagation == "Orphan":  # the claim controller may be faster than the garbage collector
        await wait_until(lambda: users.admin.find(RESOURCE_CLAIMS, made, users.guarded), is_unallocated)
        with suppress(ApiError):
            await users.tenant.delete(RESOURCE_CLAIMS, made, users.guarded)
    await gone(users.admin, RESOURCE_CLAIMS, made, users.guarded)


@pytest.mark.parametrize("user", [COLLECTOR, CONTROLLER])
async def test_controllers_of_kubernetes_change_owners(users: Tenants, user: str) -> None:
    """As the garbage collector does when the owner is deleted and its dependents are kept."""
    change = {"metadata": {"ownerReferences": None}}
    place = RESOURCE_CLAIMS.path(users.guarded, "held")
    async with Kube(users.cluster.as_user(user)) as controller:
        await controller.call("PATCH", place, change, {"dryRun": "All"})


def is_unallocated(found: Raw | None) -> bool:
    return found is None or "allocation" not in found.get("status", {})


async def test_claim_that_its_tenant_deletes_stays_until_its_pod_has_ended(users: Tenants) -> None:
    made = await proven_pod(users, "proven")
    await users.tenant.delete(RESOURCE_CLAIMS, made, users.guarded)
    await refused(
        users.tenant.patch(RESOURCE_CLAIMS, made, {"metadata": {"finalizers": None}}, users.guarded),
        f"ResourceClaim {made} holds GPUs: tom may not remove its finalizer",
    )
    await users.tenant.delete(PODS, "proven", users.guarded)
    await gone(users.admin, RESOURCE_CLAIMS, made, users.guarded)


async def test_finalizer_of_an_unused_claim_can_be_removed(users: Tenants) -> None:
    content = claim("unused", pairs(1, HASH), labels=CLAIM_LABELS, finalizers=[DELETE_PROTECTION, "example.test/a"])
    await users.warden.create(RESOURCE_CLAIMS, content, users.guarded)
    await users.tenant.patch(RESOURCE_CLAIMS, "unused", {"metadata": {"finalizers": None}}, users.guarded)
    await users.tenant.delete(RESOURCE_CLAIMS, "unused", users.guarded)
    await gone(users.admin, RESOURCE_CLAIMS, "unused", users.guarded)


async def test_guarded_namespace_can_be_deleted_with_claims_in_use(users: Tenants) -> None:
    async with new_namespace(users.admin, {"gpuwarden.io/enabled": "true"}) as name:
        await proven_pod(users, "proven", name)
        await users.admin.delete(NAMESPACES, name)
        await gone(users.admin, NAMESPACES, name)
        await users.admin.create(NAMESPACES, {"metadata": {"name": name}})  # which the end of the test deletes
