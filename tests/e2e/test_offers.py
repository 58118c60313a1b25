"""On the real API server: `kubectl get gpunodes` tells free GPUs that a pod could be given from others."""

from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.e2e.crew import site
from tests.e2e.kube import NODES, PODS, Kube, pod, wait_until
from tests.e2e.test_ledger import GPU_NODES

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


async def shown(kube: Kube, name: str) -> dict[str, object]:
    """The row as kubectl prints it."""
    answer = (await kube.http.get(GPU_NODES.path(None, name), headers=TABLE)).raise_for_status().json()
    columns = [one["name"] for one in answer["columnDefinitions"]]
    return dict(zip(columns, answer["rows"][0]["cells"], strict=True))


async def test_the_columns_tell_what_keeps_free_gpus_from_pods(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with site(cluster, kube, tmp_path, nodes=1, gpus=2, name="offer", replicas=1) as here:
        await here.reconciler()
        await kube.create(PODS, pod("train", gpus=1), here.namespace)
        row = await wait_until(lambda: shown(kube, "offer-0"), lambda row: row["Offer"] == "available")
        assert (row["GPUs"], row["Free"], row["Held"]) == (2, 1, 1)
        await kube.patch(NODES, "offer-0", {"spec": {"unschedulable": True}})
        row = await wait_until(lambda: shown(kube, "offer-0"), lambda row: row["Offer"] == "cordoned")
        assert (row["GPUs"], row["Free"], row["Held"]) == (2, 1, 1)
        await kube.patch(NODES, "offer-0", {"spec": {"unschedulable": None}})
        await wait_until(lambda: shown(kube, "offer-0"), lambda row: row["Offer"] == "available")
