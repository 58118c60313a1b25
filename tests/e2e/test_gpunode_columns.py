"""On a real API server: `kubectl get gpunodes` distinguishes free GPUs that a pod can get from others."""

from datetime import timedelta
from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_bound_while_down import running_harness
from tests.e2e.kube import NAMESPACES, NODES, PODS, STATEFUL_SETS, Kube, pod, stateful_set, wait_until
from tests.e2e.processes import site
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.test_maps import KEEPS, MAP

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}


async def shown(kube: Kube, name: str) -> dict[str, object]:
    """The row that kubectl prints."""
    answer = (await kube.http.get(GPU_NODES.path(None, name), headers=TABLE)).raise_for_status().json()
    columns = [one["name"] for one in answer["columnDefinitions"]]
    return dict(zip(columns, answer["rows"][0]["cells"], strict=True))


async def offered(kube: Kube, name: str, word: str) -> dict[str, object]:
    return await wait_until(lambda: shown(kube, name), lambda row: row["Offer"] == word)


async def test_columns_show_why_free_gpus_are_not_available(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with site(cluster, kube, tmp_path, nodes=1, gpus=2, name="offer", replicas=1) as here:
        await here.reconciler()
        await kube.create(PODS, pod("train", gpus=1), here.namespace)
        row = await offered(kube, "offer-0", "available")
        assert (row["GPUs"], row["Free"], row["Held"]) == (2, 1, 1)
        await kube.patch(NODES, "offer-0", {"spec": {"unschedulable": True}})
        row = await offered(kube, "offer-0", "cordoned")
        assert (row["GPUs"], row["Free"], row["Held"]) == (2, 1, 1)
        await kube.patch(NODES, "offer-0", {"spec": {"unschedulable": None}})
        await offered(kube, "offer-0", "available")
        await kube.patch(NODES, "offer-0", {"metadata": {"annotations": {"kubelet.test/ready": "false"}}})
        await offered(kube, "offer-0", "not-ready")
        await kube.patch(NODES, "offer-0", {"metadata": {"annotations": {"kubelet.test/ready": "true"}}})
        await offered(kube, "offer-0", "available")
        # One GPU is reserved; a StatefulSet without pods keeps the other.
        await kube.patch(NAMESPACES, here.namespace, KEEPS)
        held = (await here.held_on("offer-0")).keys()
        (free,) = here.gpus - {slot.partition("/")[0] for slot in held}
        keeping = stateful_set("keeps", 1, annotations={MAP: f"0=offer-0:{free}"})
        keeping["spec"]["template"]["spec"]["serviceAccountName"] = "missing"
        await kube.create(STATEFUL_SETS, keeping, here.namespace)
        row = await offered(kube, "offer-0", "kept")
        assert (row["GPUs"], row["Free"], row["Held"]) == (2, 1, 1)


async def test_column_distinguishes_missing_from_expired_evidence(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with running_harness(cluster, kube, tmp_path, "--require-evidence", "all") as harness:
        first, second = harness.proven
        for node in harness.proven:
            await offered(kube, node, "available")
        await harness.prove(first, timedelta(seconds=2))
        await offered(kube, first, "stale")
        await harness.prove(second, banned=True)
        await offered(kube, second, "unproven")
        await harness.prove(first)
        await offered(kube, first, "available")
