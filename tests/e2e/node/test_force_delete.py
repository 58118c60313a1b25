"""On a real node: containers that ignore SIGTERM write heartbeats, and never two of them use one GPU."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import CONTROLLERS, NODE_GRACE
from scripts.node.real import RealNode
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, wait_until
from tests.e2e.node.containers import container, is_ready, real_pod, runs
from tests.e2e.node.front import installed_on
from tests.e2e.processes import Site

# The node of a dead kubelet stays ready for less than 55 s, and no kubelet is dead for long here.
MARGIN, CAP = 20, 40
FLAGS = ("--orphan-margin", f"{MARGIN}s", "--max-grace", f"{CAP}s")
GRACE = 30
# A kubelet's outage; grace period and margin of its pods end long before.
DEAD_FOR = 65.0
# Each container writes its name and the time 20 times per second to a file for each GPU that it sees.
LIVES = """
trap '' TERM
uuids=$(/usr/bin/nvidia-smi -L | sed 's/.*UUID: //; s/)//')
while :; do
  read now rest < /proc/uptime
  for uuid in $uuids; do echo $now {name} >> /beats/$uuid; done
  usleep 50000
done
"""


def heartbeat_pod(name: str, beats: Path, *, grace: int = 1) -> Raw:
    main = container(1, script=LIVES.replace("{name}", name), volumeMounts=[{"name": "beats", "mountPath": "/beats"}])
    return real_pod(name, main, grace=grace, volumes=[{"name": "beats", "hostPath": {"path": str(beats)}}])


@frozen
class Life:
    first: float
    last: float


def lives(beats: Path) -> dict[str, dict[str, Life]]:
    """The lifetimes by GPU and pod, in seconds since boot."""
    found: dict[str, dict[str, Life]] = {}
    for file in beats.iterdir():
        for line in file.read_text().splitlines():
            at, _, name = line.partition(" ")
            before = found.setdefault(file.name, {}).get(name, Life(float(at), float(at)))
            found[file.name][name] = Life(before.first, float(at))
    return found


def overlaps(found: Mapping[str, Mapping[str, Life]]) -> list[str]:
    """The cases in which a container started before another had ended."""
    return [
        f"{uuid}: {one} and {other} at once for {found[uuid][one].last - found[uuid][other].first:.2f} s"
        for uuid, pods in found.items()
        for one in pods
        for other in pods
        if one != other and pods[one].first <= pods[other].first <= pods[one].last
    ]


Deletion = Callable[[Site, str], Coroutine[Any, Any, None]]


async def delete(here: Site, name: str, grace: int | None = None) -> None:
    with suppress(ApiError):
        await here.kube.delete(PODS, name, here.namespace, grace=grace)


async def forced(here: Site, name: str) -> None:
    await delete(here, name, 0)


async def with_grace_then_forced(here: Site, name: str) -> None:
    await delete(here, name, GRACE)
    await asyncio.sleep(3)
    await delete(here, name, 0)


async def with_grace_then_less_then_forced(here: Site, name: str) -> None:
    await delete(here, name, GRACE)
    await asyncio.sleep(2)
    await delete(here, name, 5)
    await asyncio.sleep(1)
    await delete(here, name, 0)


async def as_usual(here: Site, name: str) -> None:
    await delete(here, name)


DELETIONS: tuple[Deletion, ...] = (forced, with_grace_then_forced, with_grace_then_less_then_forced, as_usual)


async def create_until_admitted(here: Site, content: Raw, seconds: float) -> float:
    """Retries until the pod is admitted; returns the time."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        try:
            await here.kube.create(PODS, content, here.namespace)
        except ApiError as exc:
            if exc.status >= 500:
                raise
            await asyncio.sleep(0.1)
        else:
            return time.monotonic() - begun
    raise AssertionError(f"{content['metadata']['name']} was not admitted within {seconds} s")


async def test_no_gpu_has_two_containers_however_pods_are_deleted(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path
) -> None:
    beats = tmp_path / "beats"
    beats.mkdir()
    async with installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=FLAGS) as here:
        old = [f"old-{number}" for number in range(len(DELETIONS))]
        for name in old:
            await here.kube.create(PODS, heartbeat_pod(name, beats), here.namespace)
        for name in old:
            await runs(here.kube, here.namespace, name)
        await asyncio.gather(*(way(here, name) for way, name in zip(DELETIONS, old, strict=True)))
        took = []
        for number in range(len(DELETIONS)):
            name = f"next-{number}"
            took.append(await create_until_admitted(here, heartbeat_pod(name, beats), GRACE + MARGIN + 60))
            await runs(here.kube, here.namespace, name)
        await asyncio.sleep(2)
        found = lives(beats)
        assert {frozenset(name.partition("-")[0] for name in pods) for pods in found.values()} == {
            frozenset({"old", "next"})
        }
        assert overlaps(found) == []
        # A GPU of a pod that ended normally is free at once.
        assert took[0] < MARGIN, took


async def test_no_gpu_has_two_containers_while_the_kubelet_is_dead(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path
) -> None:
    """The kubelet is killed, so nothing stops the container of the force-deleted pod, and then started again."""
    beats = tmp_path / "beats"
    beats.mkdir()
    async with installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=FLAGS) as here:
        for number in range(4):
            await here.kube.create(PODS, heartbeat_pod(f"old-{number}", beats), here.namespace)
        for number in range(4):
            await runs(here.kube, here.namespace, f"old-{number}")
        await asyncio.to_thread(real_node.kill_kubelet)
        for number in range(4):
            await delete(here, f"old-{number}", 0)
        trying = asyncio.create_task(create_until_admitted(here, heartbeat_pod("next", beats), MARGIN + 120))
        await asyncio.sleep(10)
        assert not trying.done()
        assert all(now() - one.last < 5 for pods in lives(beats).values() for one in pods.values())
        await asyncio.to_thread(real_node.start_kubelet)
        assert await trying >= MARGIN
        await runs(here.kube, here.namespace, "next")
        await asyncio.sleep(2)
        found = lives(beats)
        assert sum("next" in pods for pods in found.values()) == 1
        assert overlaps(found) == []


async def test_no_gpu_has_two_containers_while_the_kubelet_is_dead_for_longer_than_grace_and_margin(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path
) -> None:
    """The node is not ready before the margin ends, and no deadline of its GPUs ends until it is ready again."""
    beats = tmp_path / "beats"
    beats.mkdir()
    async with (
        fast_node_monitoring(real_cluster),
        installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=FLAGS) as here,
    ):
        for number in range(4):
            await here.kube.create(PODS, heartbeat_pod(f"old-{number}", beats), here.namespace)
        for number in range(4):
            await runs(here.kube, here.namespace, f"old-{number}")
        await asyncio.to_thread(real_node.kill_kubelet)
        died = time.monotonic()
        for number in range(4):
            await delete(here, f"old-{number}", 0)
        trying = asyncio.create_task(create_until_admitted(here, heartbeat_pod("next", beats), DEAD_FOR + MARGIN + 120))
        await wait_until(lambda: here.kube.get(NODES, real_node.name), lambda node: not is_ready(node), MARGIN)
        await asyncio.sleep(DEAD_FOR - (time.monotonic() - died))
        assert not trying.done()
        assert all(now() - one.last < 5 for pods in lives(beats).values() for one in pods.values())
        await asyncio.to_thread(real_node.start_kubelet)
        assert await trying >= DEAD_FOR + MARGIN
        await runs(here.kube, here.namespace, "next")
        await asyncio.sleep(2)
        found = lives(beats)
        assert sum("next" in pods for pods in found.values()) == 1
        assert overlaps(found) == []


@asynccontextmanager
async def fast_node_monitoring(cluster: Cluster) -> AsyncIterator[None]:
    """Runs a controller manager that declares a kubelet dead before the margin ends."""
    await asyncio.to_thread(cluster.restart, CONTROLLERS, *monitoring("1s", "15s"))
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.restart, CONTROLLERS, *monitoring("5s", NODE_GRACE))


def monitoring(period: str, grace: str) -> list[str]:
    return [f"--node-monitor-period={period}", f"--node-monitor-grace-period={grace}"]


def now() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


async def test_deleted_pod_reports_ended_containers_before_it_is_removed(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path
) -> None:
    """This frees its GPU at once, and kwok's stages imitate it: a final phase, and no running container."""
    async with installed_on(real_cluster, real_kube, tmp_path, [real_node], flags=FLAGS) as here:
        await here.kube.create(PODS, real_pod("old", container(1)), here.namespace)
        made = await runs(here.kube, here.namespace, "old")
        version = made["metadata"]["resourceVersion"]
        await delete(here, "old")
        async for event in here.kube.watch(PODS, here.namespace, resourceVersion=version):
            if event["type"] == "DELETED":
                break
        status = event["object"]["status"]
        assert status["phase"] in ("Succeeded", "Failed"), json.dumps(status)
        assert [list(one["state"]) for one in status["containerStatuses"]] == [["terminated"]]
