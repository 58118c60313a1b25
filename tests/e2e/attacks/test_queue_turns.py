"""Attack: a tenant queues so many pods that other tenants get no GPU."""

import asyncio
from collections import deque
from pathlib import Path

import pytest
from attrs import define, field

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import PODS, Kube, Raw, pod, pod_in_phase, wait_until
from tests.e2e.processes import OPT_IN
from tests.e2e.test_queue import GATE, QueueHarness, gates, queue_harness

MANY = 300
Name = tuple[str, str]
"""Namespace and name of a pod."""


@define
class Watcher:
    """Ends pods one by one and observes which pod gets the GPU next."""

    kube: Kube
    namespaces: tuple[str, str]
    running: deque[Name] = field(factory=deque)
    seen: set[Name] = field(factory=set)

    async def opened(self) -> set[Name]:
        found = [(there, one) for there in self.namespaces for one in await self.kube.list(PODS, there)]
        return {(there, one["metadata"]["name"]) for there, one in found if not gates(one)}

    async def end_one(self) -> str:
        """Ends the pod that has run longest; returns the namespace of its successor."""
        namespace, name = self.running.popleft()
        await pod_in_phase(self.kube, namespace, name, "Running")
        await self.kube.delete(PODS, name, namespace)
        (following,) = await wait_until(self.opened_since)
        self.seen.add(following)
        self.running.append(following)
        return following[0]

    async def opened_since(self) -> set[Name]:
        return await self.opened() - self.seen


def pod_of_own_kind(number: int) -> Raw:
    """Pods with different tolerations are of different kinds in the queue."""
    return {"tolerations": [{"key": f"own-{number}", "operator": "Exists"}]}


async def create_many(queue: QueueHarness, *, have_own_kinds: bool) -> None:
    room = asyncio.Semaphore(16)

    async def create(number: int) -> None:
        async with room:
            await queue.wait(f"many-{number}", **(pod_of_own_kind(number) if have_own_kinds else {}))

    await asyncio.gather(*map(create, range(MANY)))


@pytest.mark.parametrize("have_own_kinds", [False, True], ids=["one-kind", "a-kind-each"])
async def test_tenant_behind_many_pods_of_another_gets_every_second_turn(
    cluster: Cluster, kube: Kube, tmp_path: Path, *, have_own_kinds: bool
) -> None:
    async with queue_harness(cluster, kube, tmp_path, gpus=2) as queue, new_namespace(kube, OPT_IN) as late:
        await queue.run("first", "second")
        await create_many(queue, have_own_kinds=have_own_kinds)
        for number in range(3):
            made = await kube.create(PODS, pod(f"late-{number}", 1), late)
            assert gates(made) == [GATE]
        there = deque([(queue.namespace, "first"), (queue.namespace, "second")])
        watcher = Watcher(kube, (queue.namespace, late), there, set(there))
        turns = [await watcher.end_one() for _ in range(2)]
        # A new leader counts from the waiting pods, so the other tenant may get one turn too many.
        await queue.here.reconcilers[-1].kill()
        await queue.here.reconciler()
        turns += [await watcher.end_one() for _ in range(6)]
        assert turns.count(late) == 3, ["late" if one == late else "many" for one in turns]
