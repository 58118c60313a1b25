"""The real node itself: what the other tests of this directory rely on, and that nothing of it stays behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from attrs import frozen

from scripts.controlplane.build import read_pins
from scripts.controlplane.cluster import ROOT, Cluster, gpu_node
from scripts.node.build import HERE, run
from scripts.node.files import RUNTIME
from scripts.node.machine import cgroup_of
from scripts.node.real import DEVICE_PLUGIN, DRA_DRIVER, RealNode, living
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, Resource, gone, pod, pod_in_phase, wait_until
from tests.e2e.node.containers import (
    GPUS,
    NODE,
    START_TIMEOUT,
    container,
    offers_gpus,
    real_pod,
    run_in,
    runs,
    seen_in,
    seen_of,
)

DEVICE_CLASSES = Resource("apis/resource.k8s.io/v1", "deviceclasses", is_namespaced=False)
RESOURCE_CLAIMS = Resource("apis/resource.k8s.io/v1", "resourceclaims")
RESOURCE_SLICES = Resource("apis/resource.k8s.io/v1", "resourceslices", is_namespaced=False)
SYSCTLS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")


@frozen
class Machine:
    """What a node could leave behind on the machine."""

    processes: frozenset[int]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    addresses: frozenset[str]
    links: frozenset[str]
    sysctls: tuple[str, ...]

    def has_more_than(self, before: "Machine") -> bool:
        """Pods of other tests may have been deleted since."""
        return (
            not self.processes <= before.processes
            or not self.cgroups <= before.cgroups
            or not self.addresses <= before.addresses
            or not self.links <= before.links
            or (self.mounts, self.sysctls) != (before.mounts, before.sysctls)
        )


def machine(directory: Path) -> Machine:
    """The current state; only processes that name the directory."""
    addresses = run(["ip", "-oneline", "address"]).stdout
    # Without their children: these can end while they are listed.
    roots = Path("/sys/fs/cgroup")
    cgroups = [*roots.glob("gpuwarden-node-*"), *roots.glob("*/gpuwarden-node-*")]
    return Machine(
        processes=frozenset(pid for pid, _ in living() if str(directory) in command_of(pid)),
        mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
        cgroups=frozenset(map(str, cgroups)),
        addresses=frozenset(re.findall(r"inet (10\.255\.255\.\d+)", addresses)),
        links=frozenset(path.name for path in Path("/sys/class/net").glob("veth*")),
        sysctls=tuple(Path("/proc/sys", name).read_text() for name in SYSCTLS),
    )


async def now(directory: Path) -> Machine:
    return machine(directory)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# The components.


async def test_node_is_a_real_kubelet_with_containerd(real_kube: Kube, real_node: RealNode) -> None:
    node = await real_kube.get(NODES, NODE)
    assert {one["type"]: one["status"] for one in node["status"]["conditions"]}["Ready"] == "True"
    info = node["status"]["nodeInfo"]
    assert info["kubeletVersion"] in {one.version for one in read_pins(HERE).modules}
    assert info["containerRuntimeVersion"] == "containerd://2.4.2"
    assert info["bootID"] == real_node.boot_id


async def test_kwok_simulates_only_its_own_nodes(real_cluster: Cluster, real_kube: Kube, plain_namespace: str) -> None:
    await asyncio.to_thread(real_cluster.add_nodes, [gpu_node("played", 1)])
    chosen = {"kubernetes.io/hostname": "played"}
    await real_kube.create(PODS, pod("played", gpus=1, nodeSelector=chosen), plain_namespace)
    await real_kube.create(PODS, real_pod("real", container(image="images.test/none:1")), plain_namespace)
    await pod_in_phase(real_kube, plain_namespace, "played", "Running")

    def has_no_image(found: Raw) -> bool:
        statuses = found["status"].get("containerStatuses", ())
        return any("ImagePull" in one["state"].get("waiting", {}).get("reason", "") for one in statuses)

    await wait_until(lambda: real_kube.get(PODS, "real", plain_namespace), has_no_image, START_TIMEOUT)
    await real_kube.delete(PODS, "played", plain_namespace)
    await gone(real_kube, PODS, "played", plain_namespace)
    await real_kube.delete(NODES, "played")


async def test_kubelet_may_read_its_own_node_only(real_cluster: Cluster) -> None:
    async with Kube(real_cluster.credentials.kubeconfig_of(f"system:node:{NODE}")) as kubelet:
        assert (await kubelet.get(NODES, NODE))["metadata"]["name"] == NODE
        with pytest.raises(ApiError, match="only its own Node object"):
            await kubelet.get(NODES, "other")


# NVIDIA's plugins.


async def test_device_plugin_allocates_a_gpu_of_its_choice(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, plain_namespace: str
) -> None:
    await asyncio.to_thread(real_node.start_device_plugin)
    try:
        await wait_until(lambda: real_kube.get(NODES, NODE), offers_gpus, START_TIMEOUT)
        await real_kube.create(PODS, real_pod("plug", container(1), runtime=RUNTIME), plain_namespace)
        await runs(real_kube, plain_namespace, "plug")
        seen = await seen_in(real_cluster, plain_namespace, "plug")
        assert seen in [seen_of(number) for number in range(len(GPUS))]
        await ended(real_kube, plain_namespace, "plug")
    finally:
        await asyncio.to_thread(real_node.kill, DEVICE_PLUGIN)
        await wait_until(lambda: real_kube.get(NODES, NODE), lambda node: not offers_gpus(node), START_TIMEOUT)


async def test_dra_driver_allocates_the_gpus_that_a_claim_names(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, plain_namespace: str
) -> None:
    is_gpu = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
    device_class = {"metadata": {"name": "gpu.nvidia.com"}, "spec": {"selectors": [{"cel": {"expression": is_gpu}}]}}
    chosen = f"device.attributes['gpu.nvidia.com'].uuid in {json.dumps([GPUS[1], GPUS[3]])}"
    exactly = {"deviceClassName": "gpu.nvidia.com", "count": 2, "selectors": [{"cel": {"expression": chosen}}]}
    claim = {"metadata": {"name": "two"}, "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
    asks = container(resources={"claims": [{"name": "gpus"}]})
    claims = [{"name": "gpus", "resourceClaimName": "two"}]
    await asyncio.to_thread(real_node.start_dra_driver)
    await real_kube.create(DEVICE_CLASSES, device_class)
    try:
        await wait_until(lambda: real_kube.list(RESOURCE_SLICES), seconds=START_TIMEOUT)
        await real_kube.create(RESOURCE_CLAIMS, claim, plain_namespace)
        await real_kube.create(PODS, real_pod("claims", asks, resourceClaims=claims), plain_namespace)
        await runs(real_kube, plain_namespace, "claims")
        assert await seen_in(real_cluster, plain_namespace, "claims") == seen_of(1, 3)
        await ended(real_kube, plain_namespace, "claims")
    finally:
        await real_kube.delete(DEVICE_CLASSES, "gpu.nvidia.com")
        await asyncio.to_thread(real_node.kill, DRA_DRIVER)


async def ended(kube: Kube, namespace: str, name: str) -> None:
    """Deletes the pod while the allocator of its GPUs still exists."""
    await kube.delete(PODS, name, namespace)
    await gone(kube, PODS, name, namespace, START_TIMEOUT)


# Failures of a node.


async def test_containers_outlive_kubelet_and_containerd(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, plain_namespace: str, tmp_path: Path
) -> None:
    beats = {"name": "beats", "hostPath": {"path": str(tmp_path)}}
    script = "while :; do cut -d' ' -f1 /proc/uptime > /beats/last; usleep 50000; done"
    alive = container(script=script, volumeMounts=[{"name": "beats", "mountPath": "/beats"}])
    await real_kube.create(PODS, real_pod("lives", alive, volumes=[beats]), plain_namespace)
    before = await runs(real_kube, plain_namespace, "lives")
    await asyncio.to_thread(real_node.kill_kubelet)
    await asyncio.to_thread(real_node.kill_containerd)
    killed = float(Path("/proc/uptime").read_text().split()[0])

    async def last() -> float:
        return float((tmp_path / "last").read_text() or 0)

    await wait_until(last, lambda seen: seen > killed + 1)
    since = datetime.now(UTC)  # noqa: TID251 - kubelet's heartbeats are by the machine's clock
    await asyncio.to_thread(real_node.start_containerd)
    await asyncio.to_thread(real_node.start_kubelet)
    await asyncio.to_thread(real_cluster.wait_for_node, NODE, since)

    async def said() -> str:
        """A kubelet that is ready again may not have read its pods yet."""
        with suppress(AssertionError):
            return await run_in(real_cluster, plain_namespace, "lives", "echo here")
        return ""

    assert await wait_until(said) == "here\n"
    after = await real_kube.get(PODS, "lives", plain_namespace)
    assert container_ids(after) == container_ids(before)


async def test_reboot_ends_all_containers_and_changes_the_boot_id(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, plain_namespace: str
) -> None:
    await real_kube.create(PODS, real_pod("lives"), plain_namespace)
    before = await runs(real_kube, plain_namespace, "lives")
    boot = real_node.boot_id
    since = datetime.now(UTC)  # noqa: TID251 - kubelet's heartbeats are by the machine's clock
    await asyncio.to_thread(real_node.reboot)
    await asyncio.to_thread(real_cluster.wait_for_node, NODE, since)
    node = await real_kube.get(NODES, NODE)
    assert node["status"]["nodeInfo"]["bootID"] == real_node.boot_id
    assert real_node.boot_id != boot

    def runs_again(found: Raw) -> bool:
        (one,) = found["status"]["containerStatuses"]
        return "running" in one["state"] and container_ids(found) != container_ids(before)

    again = await wait_until(lambda: real_kube.get(PODS, "lives", plain_namespace), runs_again, START_TIMEOUT)
    assert again["status"]["containerStatuses"][0]["restartCount"] == 1


def container_ids(found: Raw) -> list[str]:
    return [one.get("containerID", "") for one in found["status"].get("containerStatuses", ())]


# Its removal.


async def test_two_clusters_with_real_nodes_run_side_by_side_and_clean_up(node_parts: None, tmp_path: Path) -> None:
    before = machine(tmp_path)
    with Cluster(tmp_path / "one", real_nodes=True) as one, Cluster(tmp_path / "two", real_nodes=True) as other:
        nodes = [cluster.add_real_node(NODE, GPUS[:1]) for cluster in (one, other)]
        nodes.append(one.add_real_node("real-1", GPUS[1:]))
        assert len({node.address for node in nodes}) == 3
        for cluster in (one, other):
            async with Kube(cluster.kubeconfig) as kube:
                await kube.create(PODS, real_pod("here"), "default")
                await runs(kube, "default", "here")
        during = machine(tmp_path)
        assert during.sysctls == before.sysctls
        assert during.mounts == before.mounts
        assert during.processes > before.processes
        assert during.cgroups > before.cgroups
        assert during.addresses - before.addresses == {node.address for node in nodes}
        assert len(during.links - before.links) == 2
    await wait_until(lambda: now(tmp_path), lambda seen: not seen.has_more_than(before))


PARENT = """
import sys, time
from pathlib import Path
from scripts.controlplane.cluster import Cluster
with Cluster(Path(sys.argv[1]), real_nodes=True) as cluster:
    cluster.add_real_node("real-0", ["GPU-00000000-0000-4000-8000-000000000000"])
    print("up", flush=True)
    time.sleep(1000)
"""


async def test_real_node_is_removed_when_its_parent_is_killed(node_parts: None, tmp_path: Path) -> None:
    before = machine(tmp_path)
    with parent_of_a_node(tmp_path / "cluster") as parent:
        number = RealNode(tmp_path / "cluster/nodes/real-0").number
        assert any(path.endswith(cgroup_of(number)) for path in machine(tmp_path).cgroups)
        os.kill(parent.pid, signal.SIGKILL)
    await wait_until(lambda: now(tmp_path), lambda seen: not seen.has_more_than(before), START_TIMEOUT)


@contextmanager
def parent_of_a_node(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", PARENT, str(directory)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "up\n"
            yield parent
        finally:
            parent.kill()
