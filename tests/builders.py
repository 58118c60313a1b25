"""Test data: pods and reviews as the API server sends them, nodes, evidence, claims and reservations."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from webhook.core.claim import Claim, ClaimRules, claim_of
from webhook.core.device import Device, DeviceUuid, Node, Slot, Taint
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import GpuDelivery, Phase, PodIdentity, Reservation, ReservationId

Raw = dict[str, Any]

NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)

REVIEW_UID = "00000000-0000-4000-8000-000000000401"
POD_UID = "00000000-0000-4000-8000-00000000b0d1"
NAMESPACE = "ml"
POD_NAME = "train-0"
HASH = "sha256:aa11"
OTHER_HASH = "sha256:bb22"

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


# Pods.


def raw_env(**values: str) -> list[Raw]:
    return [{"name": name, "value": value} for name, value in values.items()]


def raw_container(
    name: str = "main", *, gpus: str | int | None = None, env: Sequence[Raw] | None = None, **members: Any
) -> Raw:
    """A container as the API server sends it: the limit of an extended resource is a request too."""
    container: Raw = {"name": name, "image": "registry.example/train:1", "resources": {}}
    if gpus is not None:
        amount = gpus if isinstance(gpus, str) else str(gpus)
        container["resources"] = {"limits": {"nvidia.com/gpu": amount}, "requests": {"nvidia.com/gpu": amount}}
    if env is not None:
        container["env"] = list(env)
    return container | members


def raw_sidecar(name: str = "sidecar", **members: Any) -> Raw:
    return raw_container(name, **members) | {"restartPolicy": "Always"}


def raw_pod(
    *containers: Raw,
    name: str | None = POD_NAME,
    generate_name: str | None = None,
    namespace: str | None = NAMESPACE,
    uid: str | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    owners: Iterable[Raw] = (),
    init: Sequence[Raw] = (),
    **spec: Any,
) -> Raw:
    """A pod with the given members only. The default container requests nothing."""
    meta: Raw = {
        "name": name,
        "generateName": generate_name,
        "namespace": namespace,
        "uid": uid,
        "labels": None if labels is None else dict(labels),
        "annotations": None if annotations is None else dict(annotations),
        "ownerReferences": list(owners) or None,
    }
    body: Raw = {"containers": list(containers) or [raw_container()], "schedulerName": "default-scheduler", **spec}
    if init:
        body["initContainers"] = list(init)
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {member: value for member, value in meta.items() if value is not None},
        "spec": body,
        "status": {},
    }


def stateful_set(name: str = "train") -> Raw:
    """The owner reference of a StatefulSet's pod."""
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": "set-1", "controller": True}


def pod(*containers: Raw, **members: Any) -> Pod:
    return Pod.parse(raw_pod(*containers, **members))


def identity(name: str = POD_NAME, uid: str = POD_UID, namespace: str = NAMESPACE) -> PodIdentity:
    return PodIdentity(namespace, name, uid)


# Node affinity.


def expression(key: str, operator: str, *values: str) -> Raw:
    return {"key": key, "operator": operator, "values": list(values)} if values else {"key": key, "operator": operator}


def term(*expressions: Raw, fields: Iterable[Raw] = ()) -> Raw:
    parts = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {part: members for part, members in parts.items() if members}


def on_node(name: str) -> Raw:
    return term(fields=[expression("metadata.name", "In", name)])


def required_affinity(*terms: Raw) -> Raw:
    """`spec.affinity` that requires one of the terms."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


# Reviews.


def review(
    operation: str,
    *,
    new: Raw | None = None,
    old: Raw | None = None,
    uid: str = REVIEW_UID,
    subresource: str | None = None,
    name: str | None = None,
    dry_run: bool = False,
) -> Raw:
    """An AdmissionReview of a pod in the shape of a 1.36 API server: absent names are absent, absent objects null."""
    pods = {"group": "", "version": "v1", "resource": "pods"}
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    meta = (new or old or {}).get("metadata", {})
    optional = {"subResource": subresource, "requestSubResource": subresource, "name": name or meta.get("name")}
    options = "CreateOptions" if operation == "CREATE" else f"{operation.title()}Options"
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": uid,
            "kind": kind,
            "resource": pods,
            "requestKind": kind,
            "requestResource": pods,
            **{member: value for member, value in optional.items() if value is not None},
            "namespace": meta.get("namespace", NAMESPACE),
            "operation": operation,
            "userInfo": {
                "username": "system:serviceaccount:kube-system:job-controller",
                "groups": ["system:serviceaccounts", "system:authenticated"],
            },
            "object": new,
            "oldObject": old,
            "dryRun": dry_run,
            "options": {"kind": options, "apiVersion": "meta.k8s.io/v1"},
        },
    }


def mutating_create(raw: Raw, *, uid: str = REVIEW_UID, dry_run: bool = False) -> Raw:
    """The first review of a pod: it has no uid, and with generateName no name."""
    return review("CREATE", new=raw, uid=uid, dry_run=dry_run)


def created(raw: Raw, *, uid: str = POD_UID, name: str | None = None) -> Raw:
    """The pod in the validating review of the same CREATE: with its name and final uid."""
    meta = {**raw["metadata"], "uid": uid, "creationTimestamp": "2026-03-02T12:00:00Z"}
    meta["name"] = name or meta.get("name") or f"{meta.get('generateName', 'pod-')}x7k2p"
    return {**raw, "metadata": meta, "status": {"phase": "Pending", "qosClass": "BestEffort"}}


def validating_create(
    raw: Raw, *, uid: str = POD_UID, name: str | None = None, review_uid: str = REVIEW_UID, dry_run: bool = False
) -> Raw:
    return review("CREATE", new=created(raw, uid=uid, name=name), uid=review_uid, dry_run=dry_run)


def update(new: Raw, old: Raw, *, subresource: str | None = None, uid: str = REVIEW_UID, dry_run: bool = False) -> Raw:
    return review("UPDATE", new=new, old=old, subresource=subresource, uid=uid, dry_run=dry_run)


def delete(old: Raw, *, uid: str = REVIEW_UID, dry_run: bool = False) -> Raw:
    return review("DELETE", old=old, uid=uid, dry_run=dry_run)


def body(raw_review: Any) -> bytes:
    return json.dumps(raw_review).encode()


# Nodes and evidence.


def device(
    uuid: str,
    *labels: str,
    index: int | None = None,
    serial: str = "",
    shares: int = 1,
    is_healthy: bool = True,
) -> Device:
    return Device(
        DeviceUuid(uuid), index=index, serial=serial, labels=frozenset(labels), shares=shares, is_healthy=is_healthy
    )


def node(
    name: str,
    *devices: Device,
    labels: Mapping[str, str] | None = None,
    is_ready: bool = True,
    is_cordoned: bool = False,
    taints: Iterable[Taint] = (),
    is_refused_for_plugin: bool = False,
    plugin_gpus: int | None = None,
) -> Node:
    return Node(
        name, dict(labels or {}), devices, is_ready, is_cordoned, tuple(taints), is_refused_for_plugin, plugin_gpus
    )


def evidence(
    name: str, digest: str = HASH, *, since: datetime | None = None, until: datetime | None = None, **members: Any
) -> Evidence:
    return Evidence(name, digest, "static", since, until, **members)


def fleet(*nodes: Node, proven: Mapping[str, str] | None = None, now: datetime = NOW) -> Fleet:
    """A fleet of these nodes; `proven` gives the proven hash of a node."""
    made = Fleet()
    for one in nodes:
        made.put(one, now)
    for name, digest in (proven or {}).items():
        made.set_evidence(name, evidence(name, digest), now)
    return made


# Claims and reservations.


def claim(raw: Raw, rules: ClaimRules | None = None) -> Claim:
    """The claim of a pod that has one."""
    found = claim_of(Pod.parse(raw), rules or ClaimRules())
    assert found is not None
    return found


def slot(uuid: str, k: int = 0) -> Slot:
    return Slot(DeviceUuid(uuid), k)


def reservation(
    *slots: Slot,
    id: str = REVIEW_UID,
    node: str = "node-a",
    digest: str = "digest-1",
    namespace: str = NAMESPACE,
    phase: Phase = Phase.PENDING,
    deadline: datetime | None = NOW + timedelta(seconds=90),
    pod_name: str | None = POD_NAME,
    uid: str | None = None,
    is_shared: bool = False,
    delivery: GpuDelivery | None = None,
) -> Reservation:
    return Reservation(
        id=ReservationId(id),
        namespace=namespace,
        claim_digest=digest,
        node=node,
        slots=slots,
        since=NOW,
        deadline=deadline if phase is Phase.PENDING else None,
        phase=phase,
        pod_name=pod_name,
        uid=uid,
        is_shared=is_shared,
        delivery=delivery,
    )


def is_slot_free(fleet: Fleet, slot: Slot) -> bool:
    return slot.k not in fleet.holders(slot.uuid)
