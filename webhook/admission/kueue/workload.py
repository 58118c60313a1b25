"""Kueue's objects, as far as the answer to an admission check needs them."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.pod import OwnerReference, WireStruct
from webhook.core.raw import Raw

# The AdmissionChecks with this name in `spec.controllerName` are answered here.
CONTROLLER = "gpuwarden.io/proven-gpus"
ACTIVE = "Active"
# Owners of Workloads whose pods are created before the Workload is admitted. Kueue holds them with its own gate.
OWNERS_WITH_PODS = frozenset({"Pod", "StatefulSet", "LeaderWorkerSet"})

Wire = TypeVar("Wire")


class UnreadableObjectError(GpuwardenError):
    """The object is not as Kueue's schema says."""


def read(raw: Raw, wire: type[Wire]) -> Wire:
    try:
        return msgspec.convert(raw, wire)
    except msgspec.ValidationError as exc:
        raise UnreadableObjectError(str(exc)) from exc


class CheckPhase(StrEnum):
    """The states that Kueue knows. With Retry it takes the quota back, and with Rejected it gives the Workload up."""

    PENDING = "Pending"
    READY = "Ready"
    RETRY = "Retry"
    REJECTED = "Rejected"


class NamedWire(WireStruct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None


class ConditionWire(WireStruct, frozen=True):
    type: str = ""
    status: str = ""
    last_transition_time: datetime | None = None

    @property
    def is_true(self) -> bool:
        return self.status == "True"


class PodTemplateMetadataWire(WireStruct, frozen=True):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ChangedSpecWire(WireStruct, frozen=True):
    """The parts of a pod's spec that Kueue adds to."""

    node_selector: dict[str, str | None] | None = None
    tolerations: list[dict[str, Any]] | None = None


class PodTemplateWire(WireStruct, frozen=True):
    metadata: PodTemplateMetadataWire | None = None
    spec: dict[str, Any] | None = None


class PodSetWire(WireStruct, frozen=True):
    name: str = ""
    count: int = 1
    template: PodTemplateWire | None = None


class WorkloadSpecWire(WireStruct, frozen=True):
    active: bool | None = None
    priority: int | None = None
    pod_sets: list[PodSetWire] | None = None


class AssignmentWire(WireStruct, frozen=True):
    """What Kueue has assigned to one set of pods."""

    name: str = ""
    count: int | None = None
    flavors: dict[str, str] | None = None


class AdmissionWire(WireStruct, frozen=True):
    pod_set_assignments: list[AssignmentWire] | None = None


class AdditionWire(WireStruct, frozen=True):
    """What is added to the pods of a set: by another admission check, or by a ResourceFlavor."""

    name: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[dict[str, Any]] | None = None


class CheckWire(WireStruct, frozen=True):
    """The state of one admission check in a Workload."""

    name: str = ""
    state: str = ""
    message: str = ""
    last_transition_time: datetime | None = None
    retry_count: int | None = None
    pod_set_updates: list[AdditionWire] | None = None


class ReclaimableWire(WireStruct, frozen=True):
    name: str = ""
    count: int = 0


class WorkloadStatusWire(WireStruct, frozen=True):
    conditions: list[ConditionWire] | None = None
    admission: AdmissionWire | None = None
    admission_checks: list[CheckWire] | None = None
    reclaimable_pods: list[ReclaimableWire] | None = None


class WorkloadWire(WireStruct, frozen=True):
    metadata: NamedWire
    spec: WorkloadSpecWire | None = None
    status: WorkloadStatusWire | None = None


@frozen
class PodSet:
    """Pods of a Workload that are equal, by the template of their job."""

    name: str
    pods: int
    template: Raw
    flavors: tuple[str, ...] = ()
    additions: tuple[AdditionWire, ...] = ()

    def pod(self, namespace: str, flavors: Iterable[AdditionWire]) -> Raw:
        """A pod of the set, with what Kueue adds to the template when it admits the Workload."""
        meta, spec = dict(self.template["metadata"]), dict(self.template["spec"])
        for one in (*flavors, *self.additions):
            for part, added in (("labels", one.labels), ("annotations", one.annotations)):
                if added:
                    meta[part] = {**(meta.get(part) or {}), **added}
            if one.node_selector:
                spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **one.node_selector}
            if one.tolerations:
                spec["tolerations"] = [*(spec.get("tolerations") or ()), *one.tolerations]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "namespace": namespace}, "spec": spec}


@frozen
class Workload:
    """A Workload that has its quota and is not finished: its checks are to be answered, or have been."""

    namespace: str
    name: str
    uid: str
    version: str
    priority: int
    # When it got its quota.
    since: datetime
    checks: Mapping[str, CheckWire]
    pod_sets: tuple[PodSet, ...]
    # Whether its pods do not wait for the answer to be created.
    is_of_pods: bool = False

    @classmethod
    def of(cls, raw: Raw) -> "Workload | None":
        """None if no check is to be answered. Raises UnreadableObjectError."""
        wire = read(raw, WorkloadWire)
        spec, status = wire.spec or WorkloadSpecWire(), wire.status or WorkloadStatusWire()
        known = {one.type: one for one in status.conditions or () if one.is_true}
        reserved = known.get("QuotaReserved")
        is_over = wire.metadata.deletion_timestamp is not None or spec.active is False
        if reserved is None or reserved.last_transition_time is None or not status.admission_checks:
            return None
        if is_over or not known.keys().isdisjoint({"Evicted", "Finished"}):
            return None
        return cls(
            wire.metadata.namespace,
            wire.metadata.name,
            wire.metadata.uid,
            wire.metadata.resource_version,
            spec.priority or 0,
            reserved.last_transition_time,
            {one.name: one for one in status.admission_checks},
            tuple(pod_sets_of(spec, status)),
            any(one.kind in OWNERS_WITH_PODS for one in wire.metadata.owner_references or ()),
        )

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def pod_sets_of(spec: WorkloadSpecWire, status: WorkloadStatusWire) -> Iterable[PodSet]:
    assigned = {one.name: one for one in (status.admission or AdmissionWire()).pod_set_assignments or ()}
    ended = {one.name: one.count for one in status.reclaimable_pods or ()}
    updates = [update for check in status.admission_checks or () for update in check.pod_set_updates or ()]
    for one in spec.pod_sets or ():
        found = assigned.get(one.name, AssignmentWire())
        pods = one.count if found.count is None else found.count
        yield PodSet(
            one.name,
            max(0, pods - ended.get(one.name, 0)),
            raw_template(one.template or PodTemplateWire()),
            tuple(sorted(set((found.flavors or {}).values()))),
            tuple(update for update in updates if update.name == one.name),
        )


def raw_template(template: PodTemplateWire) -> Raw:
    """Raises UnreadableObjectError."""
    read(template.spec or {}, ChangedSpecWire)
    meta = template.metadata or PodTemplateMetadataWire()
    found = {"labels": meta.labels, "annotations": meta.annotations}
    return {"metadata": {key: value for key, value in found.items() if value}, "spec": template.spec or {}}


class FlavorSpecWire(WireStruct, frozen=True):
    node_labels: dict[str, str] | None = None
    tolerations: list[dict[str, Any]] | None = None


class FlavorWire(WireStruct, frozen=True):
    metadata: NamedWire
    spec: FlavorSpecWire | None = None


def flavor_of(raw: Raw) -> AdditionWire:
    """What a ResourceFlavor adds to pods. Raises UnreadableObjectError."""
    wire = read(raw, FlavorWire)
    spec = wire.spec or FlavorSpecWire()
    return AdditionWire(wire.metadata.name, node_selector=spec.node_labels, tolerations=spec.tolerations)


class CheckSpecWire(WireStruct, frozen=True):
    controller_name: str = ""


class CheckStatusWire(WireStruct, frozen=True):
    conditions: list[ConditionWire] | None = None


class AdmissionCheckWire(WireStruct, frozen=True):
    metadata: NamedWire
    spec: CheckSpecWire | None = None
    status: CheckStatusWire | None = None


@frozen
class AdmissionCheck:
    """An AdmissionCheck object. Kueue uses it once it is active."""

    name: str
    generation: int
    is_ours: bool
    is_active: bool

    @classmethod
    def of(cls, raw: Raw) -> "AdmissionCheck":
        """Raises UnreadableObjectError."""
        wire = read(raw, AdmissionCheckWire)
        conditions = (wire.status or CheckStatusWire()).conditions or ()
        return cls(
            wire.metadata.name,
            wire.metadata.generation,
            (wire.spec or CheckSpecWire()).controller_name == CONTROLLER,
            any(one.type == ACTIVE and one.is_true for one in conditions),
        )
