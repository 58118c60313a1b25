"""A RuntimeClass that gpuwarden writes into pods, on an API server whose plugin applies the class."""

from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import PODS, Kube, Resource, pod, pod_in_phase
from tests.e2e.processes import site

RUNTIME_CLASSES = Resource("apis/node.k8s.io/v1", "runtimeclasses", is_namespaced=False)
CLASS = "gpuwarden-e2e"
OVERHEAD = {"cpu": "10m"}


async def test_only_pods_with_gpus_get_the_runtime_class(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    flags = ("--runtime-class", CLASS, "--when-unavailable", "queue")
    raw = {"metadata": {"name": CLASS}, "handler": "nvidia", "overhead": {"podFixed": OVERHEAD}}
    await kube.create(RUNTIME_CLASSES, raw)
    try:
        async with site(cluster, kube, tmp_path, nodes=1, gpus=1, name="runtime", replicas=1, flags=flags) as here:
            await here.reconciler()
            await kube.create(PODS, pod("first", gpus=1), here.namespace)
            made = await kube.create(PODS, pod("waits", gpus=1), here.namespace)
            assert made["spec"]["schedulingGates"]
            await kube.create(PODS, pod("plain", gpus=0), here.namespace)
            first = await pod_in_phase(kube, here.namespace, "first", "Running")
            await kube.delete(PODS, "first", here.namespace)
            waited = await pod_in_phase(kube, here.namespace, "waits", "Running")
            plain = await pod_in_phase(kube, here.namespace, "plain", "Running")
            for one in (first, waited):
                assert (one["spec"]["runtimeClassName"], one["spec"]["overhead"]) == (CLASS, OVERHEAD)
            assert "runtimeClassName" not in plain["spec"]
            here.checker.assert_no_violations()
    finally:
        await kube.delete(RUNTIME_CLASSES, CLASS)
