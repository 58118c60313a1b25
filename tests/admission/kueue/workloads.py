"""Workloads as Kueue writes them."""

from datetime import datetime
from typing import Any

from tests.builders import NOW, raw_container
from webhook.core.raw import Raw

CHECK = "proven"
CONTROLLER = "gpuwarden.io/proven-gpus"


def time_of(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str = "True", at: datetime = NOW) -> Raw:
    return {"type": kind, "status": status, "reason": kind, "message": "", "lastTransitionTime": time_of(at)}


def raw_check(
    state: str = "Pending", message: str = "", *, name: str = CHECK, at: datetime = NOW, **members: Any
) -> Raw:
    return {"name": name, "state": state, "message": message, "lastTransitionTime": time_of(at), **members}


def pod_set(
    pods: int = 1,
    gpus: int | str | None = 1,
    *,
    name: str = "main",
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> Raw:
    template = {
        "metadata": {"annotations": dict(annotations or {})},
        "spec": {"containers": [raw_container(gpus=gpus)], **spec},
    }
    return {"name": name, "count": pods, "template": template}


def raw_workload(
    name: str = "train",
    *pod_sets: Raw,
    namespace: str = "ml",
    version: int = 1,
    priority: int = 0,
    since: datetime = NOW,
    conditions: tuple[Raw, ...] = (),
    checks: tuple[Raw, ...] | None = None,
    assignments: tuple[Raw, ...] = (),
    owner: str = "Job",
    active: bool = True,
    **status: Any,
) -> Raw:
    """A Workload that got its quota at `since`, and whose check is pending."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "ownerReferences": [{"apiVersion": "v1", "kind": owner, "name": name, "uid": f"owner-{name}"}],
        },
        "spec": {"active": active, "priority": priority, "podSets": list(pod_sets) or [pod_set()]},
        "status": {
            "conditions": [condition("QuotaReserved", at=since), *conditions],
            "admission": {"clusterQueue": "gpus", "podSetAssignments": list(assignments)},
            "admissionChecks": [raw_check()] if checks is None else list(checks),
            **status,
        },
    }


def admission_check(name: str = CHECK, controller: str = CONTROLLER, *, active: bool = True, version: int = 1) -> Raw:
    status = {"conditions": [condition("Active")]} if active else {}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "AdmissionCheck",
        "metadata": {"name": name, "generation": 1, "resourceVersion": str(version)},
        "spec": {"controllerName": controller},
        "status": status,
    }
