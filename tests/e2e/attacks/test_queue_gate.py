"""A user who may write pods removes the gate of a queued pod, with or without forged annotations."""

from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import (
    PODS,
    ApiError,
    Kube,
    Raw,
    wait_until,
)
from tests.e2e.test_queue import queue_harness


async def test_only_gpuwarden_removes_the_gate_and_no_pod_without_gpus_is_bound(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=1, acts=False) as queue:
        await queue.create("first")
        await wait_until(queue.here.held)
        await queue.wait("second")
        open_it = [{"op": "remove", "path": "/spec/schedulingGates"}]
        with pytest.raises(ApiError, match="nothing is reserved for the pod yet"):
            await kube.patch(PODS, "second", open_it, queue.namespace)
        made_up = {"gpu-uuid": min(queue.here.gpus), "node": queue.here.nodes[0], "reservation-id": "made-up"}
        with pytest.raises(ApiError, match="nothing is reserved for the pod yet"):
            await kube.patch(PODS, "second", [*open_it, *forged_annotations(made_up)], queue.namespace)
        await queue.wait("proven-only", 0, {"gpuwarden.io/required-hash": "sha256:later"})
        with pytest.raises(ApiError, match="the pod has no reservation"):
            await kube.patch(PODS, "proven-only", [*open_it, *forged_annotations(made_up)], queue.namespace)
        for name in ("second", "proven-only"):
            await queue.still_waits(name)


def forged_annotations(annotations: dict[str, str]) -> list[Raw]:
    return [
        {"op": "add", "path": f"/metadata/annotations/gpuwarden.io~1{name}", "value": value}
        for name, value in annotations.items()
    ]
