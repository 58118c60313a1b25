"""Pods to which a kubelet has given GPUs, as Kubernetes 1.36 shows them."""

from typing import Any

from tests import builders
from tests.builders import Raw


def given_container(*ids: str, resource: str = "nvidia.com/gpu", **members: Any) -> Raw:
    """The status of a running container with these devices."""
    resources = [{"resourceID": one, "health": "Healthy"} for one in ids]
    given = {"allocatedResourcesStatus": [{"name": resource, "resources": resources}]} if ids else {}
    return {"name": "main", "state": {"running": {}}, **given, **members}


def given_pod(
    *ids: str, name: str = "plain", namespace: str = "other", node: str = "node-a", grace: int = 30, **status: Any
) -> Raw:
    """A running pod. Its uid is `uid-` and its name."""
    raw = builders.raw_pod(
        name=name, namespace=namespace, uid=f"uid-{name}", nodeName=node, terminationGracePeriodSeconds=grace
    )
    return {**raw, "status": {"phase": "Running", "containerStatuses": [given_container(*ids)], **status}}


def ended_pod(*ids: str, name: str = "plain", phase: str = "Failed") -> Raw:
    """The pod after its container has ended. The kubelet still lists the devices."""
    ended = given_container(*ids, state={"terminated": {"exitCode": 1}})
    return given_pod(*ids, name=name, phase=phase, containerStatuses=[ended])
