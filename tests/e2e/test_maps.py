"""Placement maps with the default scheduler: each ordinal keeps its GPUs, whatever happens to its pods."""

from collections.abc import Collection
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import (
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    STATEFUL_SETS,
    ApiError,
    Kube,
    Raw,
    pod,
    pod_in_phase,
    stateful_set,
    wait_until,
)
from tests.e2e.processes import Site
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.test_queue import GPU, gates, queue_site, wait_for_event

MAP = "gpu-scheduling-map"
# A namespace with the label that lets maps keep GPUs.
KEEPS = {"metadata": {"labels": {"gpuwarden.io/maps": "true"}}}


def places(pods: list[Raw]) -> dict[str, tuple[str, str]]:
    return {
        one["metadata"]["name"]: (one["spec"]["nodeName"], one["metadata"]["annotations"][GPU])
        for one in pods
        if one["status"]["phase"] == "Running"
    }


async def placed(kube: Kube, here: Site, expected: dict[str, tuple[str, str]], uids: Collection[str] = ()) -> None:
    """Waits until all pods run with the expected GPUs; no pod has one of `uids`."""

    async def look() -> list[Raw]:
        return [one for one in await kube.list(PODS, here.namespace) if one["metadata"]["uid"] not in uids]

    def are_right(found: list[Raw]) -> bool:
        there = places(found)
        return all(there.get(name) == place for name, place in expected.items())

    await wait_until(look, are_right, 60.0)


@pytest.mark.defect("binder-3")
@pytest.mark.defect("binder-12")
async def test_a_stateful_set_keeps_its_gpus_through_deletion_scaling_and_a_rolling_update(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    # Waiting is not configured: pods with a map wait in any case.
    async with queue_site(cluster, kube, tmp_path, nodes=2, gpus=2, flags=("--when-unavailable", "deny")) as here:
        for node in here.nodes:
            numbered = [{"uuid": f"GPU-{node}-{k}", "index": k} for k in range(2)]
            await kube.patch(GPU_NODES, node, {"spec": {"devices": numbered}})
        await here.reconciler()
        await here.wait_until_offered()
        await kube.patch(NAMESPACES, here.namespace, KEEPS)
        await kube.patch(NODES, here.nodes[1], {"metadata": {"labels": {"gpu-node-name": "rack-1"}}})
        text = f"\n# rack 1\n0={here.nodes[0]}:1\n1=rack-1:0,1\n2={here.nodes[0]}:0\n"
        content = stateful_set("web", 2, annotations={MAP: text})
        content["spec"]["podManagementPolicy"] = "Parallel"
        await kube.create(STATEFUL_SETS, content, here.namespace)
        first, second = here.nodes
        both = {"web-0": (first, f"GPU-{first}-1"), "web-1": (second, f"GPU-{second}-0,GPU-{second}-1")}
        await placed(kube, here, both)

        # Two replicas keep the GPUs of two ordinals: those of the third are free.
        assert await is_served(kube, here)

        # The ordinal's next pod is created while the GPUs of the old one are still reserved.
        old = {one["metadata"]["uid"] for one in await kube.list(PODS, here.namespace)}
        await kube.delete(PODS, "web-1", here.namespace)
        await placed(kube, here, {"web-1": both["web-1"]}, old)

        await kube.patch(STATEFUL_SETS, "web", {"spec": {"replicas": 4}}, here.namespace)
        await placed(kube, here, {**both, "web-2": (first, f"GPU-{first}-0")})
        await wait_until(lambda: is_refused(kube, here), bool)
        waits = await wait_until(lambda: kube.find(PODS, "web-3", here.namespace))
        assert waits is not None
        assert gates(waits) == ["gpuwarden.io/queue"]
        assert "ordinal 3" in await wait_for_event(kube, waits, "NotInMap")

        old = {one["metadata"]["uid"] for one in await kube.list(PODS, here.namespace)}
        smaller = text.replace("rack-1:0,1", "rack-1:1")
        update = {"spec": {"replicas": 3, "template": {"metadata": {"annotations": {MAP: smaller}}}}}
        await kube.patch(STATEFUL_SETS, "web", update, here.namespace)
        await placed(kube, here, {**both, "web-1": (second, f"GPU-{second}-1")}, old)
        here.checker.assert_no_violations()

        # Two nodes with one logical name: the map is ambiguous.
        await kube.patch(NODES, first, {"metadata": {"labels": {"gpu-node-name": "rack-1"}}})
        for node in here.nodes:
            await wait_until(lambda node=node: node_events(kube, node), bool)  # type: ignore[misc]  # bound now
        await kube.delete(PODS, "web-1", here.namespace)
        again = await wait_until(
            lambda: kube.find(PODS, "web-1", here.namespace), lambda found: found is not None and gates(found)
        )
        assert again is not None
        await wait_for_event(kube, again, "AmbiguousNode", "2 have the label")
        await kube.patch(NODES, first, {"metadata": {"labels": {"gpu-node-name": None}}})
        await pod_in_phase(kube, here.namespace, "web-1", "Running")

        # Deleting the set ends its claim on the GPUs.
        await kube.delete(STATEFUL_SETS, "web", here.namespace)
        await wait_until(lambda: is_served(kube, here), bool)
        here.checker.assert_no_violations()


async def node_events(kube: Kube, node: str) -> list[Raw]:
    found = await kube.list(EVENTS, "default", fieldSelector=f"involvedObject.name={node},involvedObject.kind=Node")
    return [one for one in found if one["reason"] == "AmbiguousNode"]


async def is_served(kube: Kube, here: Site) -> bool:
    try:
        made = await kube.create(PODS, pod("general", 1), here.namespace, dryRun="All")
    except ApiError:
        return False
    return GPU in made["metadata"]["annotations"]


async def is_refused(kube: Kube, here: Site) -> bool:
    return not await is_served(kube, here)
