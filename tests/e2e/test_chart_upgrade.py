"""An installed chart is changed while pods are created: no review is lost. The module has its own cluster with one node
whose Pods are processes; Deployments, scheduler and helm are real."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define, field

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.chart_release import Release
from tests.e2e.conftest import new_namespace
from tests.e2e.gpu_checker import GpuChecker, checking_gpus
from tests.e2e.kube import DEPLOYMENTS, MUTATING, PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.kubelet import POLL_INTERVAL, Kubelet, Proxy
from tests.e2e.measurements import report_figures
from tests.e2e.test_chart import OURS, delete_everything, is_dressed, newer, note, served
from tests.e2e.webhook_configurations import ENABLED

NODE_NAMES, GPUS = ("node-0", "node-1"), 64
SIMULATED = "test/simulated"
KUBELET = "kubelet"
# Replicas start one after the other, each for as long as its probes take; the machine may be busy.
ROLLED_OUT_WITHIN = 240.0
# Creations per second; each has two reviews.
RATE = 5.0
# One of so many creations is real and keeps its GPU.
REAL = 5

VALUES: Mapping[str, Any] = {
    "settings.requireEvidence": "asked",
    "settings.logLevel": "warn",
    # A machine that pauses for a while loses no review.
    "webhooks.timeoutSeconds": 25,
    # A new webhook configuration is found by watch, not by polling.
    "settings.certsLookInterval": "1h",
    "reconcile.replicas": 1,
    "nodeSelector": {"kubernetes.io/hostname": KUBELET},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    simulated = ["--manage-all-nodes=false", f"--manage-nodes-with-annotation-selector={SIMULATED}=true"]
    with Cluster(tmp_path_factory.mktemp("upgrade"), flags={"kwok": simulated}) as running:
        nodes = []
        for name in NODE_NAMES:
            node = gpu_node(name, GPUS)
            node["metadata"]["annotations"] = {SIMULATED: "true", **note(*(f"GPU-{name}-{k}" for k in range(GPUS)))}
            nodes.append(node)
        running.add_nodes(nodes)
        yield running


@define(eq=False)
class Harness:
    """A release, the node that runs it, and a namespace whose pods are reviewed."""

    kube: Kube
    release: Release
    kubelet: Kubelet
    namespace: str
    checker: GpuChecker
    lost: list[str] = field(factory=list)
    created: int = 0
    real: list[str] = field(factory=list)

    async def load(self) -> None:
        """Creates pods at a steady rate until cancelled, independent of earlier results."""
        begun, number, tasks = time.monotonic(), 0, set[asyncio.Task[None]]()
        try:
            while True:
                task = asyncio.create_task(self._one(number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                number += 1
                await asyncio.sleep(max(0.0, begun + number / RATE - time.monotonic()))
        finally:
            await asyncio.gather(*tasks)  # requests in flight are answered and counted

    async def _one(self, number: int) -> None:
        """A pod that no other client writes."""
        is_real = number % REAL == 0 and len(self.real) < GPUS
        name = f"p-{len(self.real)}-{number}"
        content = pod(name, gpus=1, schedulerName="nobody")
        if is_real:
            self.real.append(name)
        try:
            made = await self.kube.create(PODS, content, self.namespace, **({} if is_real else {"dryRun": "All"}))
            if "gpuwarden.io/gpu-uuid" not in made["metadata"]["annotations"]:
                self.lost.append(f"{name} passed unseen")
        except (ApiError, httpx.HTTPError) as exc:
            self.lost.append(f"{name}: {exc}")
        self.created += 1

    async def rolled_out(self) -> None:
        """Waits until all Deployments are rolled out and no old Pod is left."""

        async def unfinished() -> Raw:
            await asyncio.sleep(POLL_INTERVAL)
            found = await self.kube.list(DEPLOYMENTS, OURS)
            behind = {one["metadata"]["name"]: one["status"] for one in found if not is_rolled_out(one)}
            if behind:
                return behind
            pods = await self.kube.list(PODS, OURS)
            return {"leaving": [one["metadata"]["name"] for one in pods if "deletionTimestamp" in one["metadata"]]}

        await wait_until(unfinished, lambda left: left == {"leaving": []}, ROLLED_OUT_WITHIN)

    def serving(self) -> set[str]:
        return {one.name for one in self.kubelet.pods.values() if one.component == "serve"}


def is_rolled_out(deployment: Raw) -> bool:
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == status.get("replicas", 0) == status.get("readyReplicas", 0) == wanted
    )


@asynccontextmanager
async def installed(cluster: Cluster, kube: Kube, directory: Path, values: Mapping[str, Any]) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(delete_everything, cluster, kube)
        balancer = await stack.enter_async_context(Proxy())
        release = Release(cluster, kube, directory, port=balancer.port)
        kubelet = await stack.enter_async_context(Kubelet(release, balancer, KUBELET).working())
        stack.push_async_callback(uninstalled, release, kubelet)
        await release.install(values)
        namespace = await stack.enter_async_context(new_namespace(kube, ENABLED))
        checker = await stack.enter_async_context(checking_gpus(kube))
        harness = Harness(kube, release, kubelet, namespace, checker)
        await harness.rolled_out()
        yield harness


async def uninstalled(release: Release, kubelet: Kubelet) -> None:
    await asyncio.to_thread(release.helm, "uninstall", OURS, "--ignore-not-found")

    async def left() -> list[str]:
        return [one.name for one in kubelet.pods.values()]

    await wait_until(left, lambda names: names == [], ROLLED_OUT_WITHIN)


async def under_load(harness: Harness, change: Callable[[], Awaitable[Any]]) -> int:
    """The number of pods created during the change."""
    load = asyncio.ensure_future(harness.load())
    try:
        await wait_until(lambda: counted(harness), lambda seen: seen >= RATE)
        before = harness.created
        await change()
        return harness.created - before
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


async def counted(harness: Harness) -> int:
    return harness.created


async def webhooks_are_switched_on(harness: Harness) -> float:
    """Seconds from helm's end until pods are dressed. In between they are refused: no pod passes without review."""
    plain = await harness.kube.create(PODS, pod("before", gpus=1), harness.namespace, dryRun="All")
    assert "annotations" not in plain["metadata"]
    await harness.release.upgrade(VALUES)
    begun = time.monotonic()
    await wait_until(lambda: is_dressed(harness.kube, harness.namespace))
    return time.monotonic() - begun


async def test_upgrade_and_rollback_lose_no_review(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Values and a CRD version change; every replica is replaced."""
    async with installed(cluster, kube, tmp_path, {**VALUES, "webhooks.enabled": False}) as harness:
        switched_on = await webhooks_are_switched_on(harness)
        release, first = harness.release, harness.serving()
        changed = {**VALUES, "settings.logLevel": "info", "webhooks.timeoutSeconds": 24, "serve.replicas": 3}

        async def upgrade() -> None:
            await release.upgrade(changed, newer(tmp_path))
            await harness.rolled_out()

        async def back() -> None:
            done = await asyncio.to_thread(release.helm, "rollback", OURS, "2")
            assert done.returncode == 0, done.stderr
            await harness.rolled_out()

        begun = time.monotonic()
        upgraded = await under_load(harness, upgrade)
        took = time.monotonic() - begun
        second = harness.serving()
        assert (len(first), len(second), first & second) == (2, 3, set())
        assert (await kube.get(MUTATING, OURS))["webhooks"][0]["timeoutSeconds"] == 24
        assert await served(kube) == ["v1alpha1", "v1beta1"]

        rolled_back = await under_load(harness, back)
        assert (len(harness.serving()), harness.serving() & second) == (2, set())
        assert (await kube.get(MUTATING, OURS))["webhooks"][0]["timeoutSeconds"] == 25
        assert await served(kube) == ["v1alpha1"]

        creations = upgraded + rolled_back
        report_figures(request, creations=creations, lost=len(harness.lost), upgrade_s=took, switched_on_s=switched_on)
        assert harness.lost == []
        assert min(upgraded, rolled_back) > RATE
        assert harness.kubelet.violations == []
        assert {*first, *second} <= {*harness.kubelet.stopped_pods}
        harness.checker.assert_no_violations()
        await wait_until(lambda: seen_pods(harness), lambda seen: seen >= len(harness.real))


async def seen_pods(harness: Harness) -> int:
    return len(harness.checker.seen)
