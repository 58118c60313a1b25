"""Device plugins beside gpuwarden, on simulated nodes. tests/e2e/node/test_delivered.py has a real one."""

from pathlib import Path
from typing import Final

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import EVENTS, NODES, PODS, ApiError, Kube, Raw, gone, pod, pod_in_phase, wait_until
from tests.e2e.processes import Site, site

# Another plugin that gives GPUs, by a name that gpuwarden does not know.
OTHER: Final = "example.com/gpu"


async def offer(kube: Kube, node: str, **amounts: str) -> None:
    """Changes what device plugins offer on the node, by the first part of the resource's name."""
    resources = {f"{vendor}.com/gpu": amount for vendor, amount in amounts.items()}
    await kube.patch(NODES, node, {"status": {"capacity": resources, "allocatable": resources}}, None, "status")


async def give(here: Site, name: str, uuid: str) -> None:
    """Writes the pod's status as a kubelet does that gave this GPU to its container."""
    found = await here.kube.get(PODS, name, here.namespace)
    (status,) = found["status"]["containerStatuses"]
    given = [{"name": OTHER, "resources": [{"resourceID": uuid, "health": "Healthy"}]}]
    statuses = [{**status, "allocatedResourcesStatus": given}]
    await here.kube.patch(PODS, name, {"status": {"containerStatuses": statuses}}, here.namespace, "status")


async def test_pod_with_another_gpu_than_reserved_is_evicted(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    flags = ("--on-mismatch", "evict")
    async with site(cluster, kube, tmp_path, nodes=1, gpus=2, name="wrong", replicas=1, flags=flags) as here:
        await offer(kube, "wrong-0", example="1")
        await here.reconciler()
        content = pod("train", gpus=1, nodeSelector={"kubernetes.io/hostname": "wrong-0"})
        content["spec"]["containers"][0]["resources"]["limits"][OTHER] = "1"
        train = await kube.create(PODS, content, here.namespace)
        await pod_in_phase(kube, here.namespace, "train", "Running")
        reserved = train["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        (other,) = here.gpus - {reserved}
        await give(here, "train", reserved)
        await give(here, "train", other)
        await gone(kube, PODS, "train", here.namespace)

        def told(events: list[Raw]) -> list[str]:
            return [one["message"] for one in events if one["reason"] == "GPUMismatched"]

        events = await wait_until(lambda: kube.list(EVENTS, here.namespace), lambda found: bool(told(found)))
        assert told(events) == [f"the kubelet of wrong-0 gave it {other}; reserved for it: {reserved}"]
        await wait_until(here.held, lambda held: not held)


async def test_strict_installation_uses_a_node_only_while_it_has_no_device_plugin(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    flags = ("--strict-devices", "true")
    async with site(cluster, kube, tmp_path, nodes=1, gpus=2, name="strict", replicas=1, flags=flags) as here:
        content = pod("train", gpus=1, nodeSelector={"kubernetes.io/hostname": "strict-0"})
        with pytest.raises(ApiError, match=r"NodeNotReady.*1 has a device plugin for its GPUs"):
            await kube.create(PODS, content, here.namespace)
        await offer(kube, "strict-0", nvidia="0")
        await here.wait_until_offered()
        made = await kube.create(PODS, content, here.namespace)
        assert made["metadata"]["annotations"]["gpuwarden.io/node"] == "strict-0"
