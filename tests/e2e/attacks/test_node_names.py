"""Attack: a node labels itself with another node's name to get the pods of a placement map."""

from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import EVENTS, NODES, PODS, STATEFUL_SETS, ApiError, Kube, Raw, pod, stateful_set, wait_until
from tests.e2e.processes import Site
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.test_maps import MAP, placed
from tests.e2e.test_queue import GPU, queue_site


async def test_map_leads_to_the_node_of_that_name_despite_labels_of_other_nodes(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with queue_site(cluster, kube, tmp_path, nodes=2, gpus=1) as here:
        honest, thief = here.nodes
        for node in here.nodes:
            await kube.patch(GPU_NODES, node, {"spec": {"devices": [{"uuid": f"GPU-{node}-0", "index": 0}]}})
        await here.reconciler()
        await here.wait_until_offered()
        # A kubelet may write this label on its own Node.
        await kube.patch(NODES, thief, {"metadata": {"labels": {"gpu-node-name": honest}}})
        await label_is_known(kube, here, honest)
        await kube.create(STATEFUL_SETS, stateful_set("web", 1, annotations={MAP: f"0={honest}:0"}), here.namespace)
        await placed(kube, here, {"web-0": (honest, f"GPU-{honest}-0")})
        for node in here.nodes:
            await conflict_told(kube, node)
        # The label gives the attacker no pod and blocks no GPU.
        other = stateful_set("other", 1, annotations={MAP: f"0={thief}:0"})
        await kube.create(STATEFUL_SETS, other, here.namespace)
        await placed(kube, here, {"other-0": (thief, f"GPU-{thief}-0")})
        here.checker.assert_no_violations()


async def label_is_known(kube: Kube, here: Site, label: str) -> None:
    """Waits until a pod that selects the label could get a GPU."""

    async def is_possible() -> bool:
        probe = pod("probe", gpus=1, nodeSelector={"gpu-node-name": label})
        try:
            made = await kube.create(PODS, probe, here.namespace, dryRun="All")
        except ApiError:
            return False
        return GPU in made["metadata"]["annotations"]

    await wait_until(is_possible)


async def conflict_told(kube: Kube, node: str) -> None:
    """Waits for the Event on the Node."""

    async def events() -> list[Raw]:
        about = f"involvedObject.name={node},involvedObject.kind=Node"
        found = await kube.list(EVENTS, "default", fieldSelector=about)
        return [one for one in found if one["reason"] == "AmbiguousNode"]

    await wait_until(events)
