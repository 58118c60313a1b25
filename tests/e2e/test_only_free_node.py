"""The time until a pod is on the only node with a free GPU, with `--reserve bind`. A scheduler sees no requests for
GPUs."""

import time
from functools import partial

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_bound_while_down import GATE
from tests.e2e.kube import PODS, Kube, Raw, pod, pods_in_phase, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import site
from tests.e2e.profile import OURS, certified, profile
from tests.e2e.test_reserve_at_binding import BIND, RETRIED

pytestmark = pytest.mark.long


@pytest.mark.parametrize("who", ["kube-scheduler", "extender"])
@pytest.mark.parametrize("nodes", [8, 64])
async def test_pod_finds_the_only_free_node(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, who: str, nodes: int
) -> None:
    """The scheduler sees no requests for GPUs, so all nodes look the same to it. The second pod was created when
    another node was free."""
    directory = tmp_path_factory.mktemp("free")
    flags = (*BIND, *certified(directory))
    async with (
        Kube(cluster.kubeconfig) as kube,
        site(cluster, kube, directory, nodes=nodes, gpus=1, name="free", replicas=1, flags=flags) as here,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        name = OURS if who == "extender" else "default-scheduler"
        asking = partial(pod, gpus=1, schedulerName=name, terminationGracePeriodSeconds=1)
        with profile(cluster, here.own_namespace, directory) as schedulers:
            if who == "extender":
                schedulers.start(here.replicas[0].urls["scheduler"])
            for number in range(nodes - 1):
                await kube.create(PODS, asking(f"full-{number}"), here.namespace)
            full = await pods_in_phase(kube, here.namespace, nodes - 1, "Running")
            fresh = await timed(kube, here.namespace, "fresh", asking("fresh"))
            last = await kube.get(PODS, "fresh", here.namespace)
            await kube.delete(PODS, "fresh", here.namespace)
            await wait_until(partial(here.held_on, last["spec"]["nodeName"]), lambda held: not held)
            # It waits behind a gate while its node is taken and another one becomes free.
            await kube.create(PODS, asking("late", schedulingGates=[{"name": GATE}]), here.namespace)
            await kube.create(PODS, asking("taker"), here.namespace)
            await wait_until(partial(here.held_on, last["spec"]["nodeName"]))
            await kube.delete(PODS, full[0]["metadata"]["name"], here.namespace)
            await wait_until(partial(here.held_on, full[0]["spec"]["nodeName"]), lambda held: not held)
            # To a scheduler that does not count GPUs, the free node looks like the one with the most work.
            for number in range(5):
                at = {"kubernetes.io/hostname": full[0]["spec"]["nodeName"]}
                await kube.create(PODS, pod(f"other-work-{number}", nodeSelector=at), here.namespace)
                await until_bound(kube, here.namespace, f"other-work-{number}", time.monotonic())
            began = time.monotonic()
            await kube.patch(PODS, "late", [{"op": "remove", "path": "/spec/schedulingGates/0"}], here.namespace)
            late = await until_bound(kube, here.namespace, "late", began)
        report_figures(request, seconds_to_the_only_free_node=fresh, seconds_to_another_than_at_creation=late)
        here.checker.assert_no_violations()


async def timed(kube: Kube, namespace: str, name: str, content: Raw) -> float:
    began = time.monotonic()
    await kube.create(PODS, content, namespace)
    return await until_bound(kube, namespace, name, began)


async def until_bound(kube: Kube, namespace: str, name: str, began: float) -> float:
    async def node() -> str | None:
        found: str | None = (await kube.get(PODS, name, namespace))["spec"].get("nodeName")
        return found

    await wait_until(node, seconds=RETRIED)
    return time.monotonic() - began
