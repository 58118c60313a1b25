"""A cluster moves from the injection nvidia to dra node by node, and back, as docs/how-to/move-to-dra.md says. Pods
come and go all the time, and processes are killed."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from attrs import define, field

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_SLICES,
    device_classes,
    proof_devices,
    remove_slices,
    slice_of_gpus,
)
from tests.e2e.dra.test_reserved_claims import LEASES
from tests.e2e.kube import NODES, ApiError, Kube, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Site, running_tasks, site
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.workload import HASH, INJECTION, Workload, workload
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import DraGuard, Installation, dra

GPUS = 4
PROOFS = ("--proof-devices", "true")
PATIENCE = 120.0


def node_names(count: int) -> list[str]:
    return [f"move-{number}" for number in range(count)]


def first_flags(nodes: int) -> tuple[str, ...]:
    proven = json.dumps(dict.fromkeys(node_names(nodes), HASH))
    return ("--pending-deadline", "15s", "--clock-skew", "1s", "--node-hash-map", proven)


@define(eq=False)
class Move:
    """An installation with two replicas and a reconciler, and two namespaces with pods that come and go."""

    here: Site
    kube: Kube
    workloads: Sequence[Workload]
    pods_a_step: int
    _rng: random.Random = field(factory=lambda: random.Random(5), init=False)  # noqa: S311 - a plan, not a secret
    kills: int = field(default=0, init=False)

    async def upgrade(self, *flags: str) -> None:
        """Replaces all processes as a rolling update does."""
        here = self.here
        here.flags = (*first_flags(len(here.nodes)), *flags)
        for leaving in list(here.balancer.servers):
            await here.replica()
            here.balancer.servers.remove(leaving)
            leaving.process.terminate()
            await asyncio.wait_for(leaving.process.wait(), PATIENCE)
        leader = here.reconcilers[-1]
        leader.process.terminate()
        await asyncio.wait_for(leader.process.wait(), PATIENCE)
        await here.reconciler()

    async def kill_one(self) -> None:
        """Kills a replica or the reconciler by SIGKILL and starts another one."""
        self.kills += 1
        if self.kills % 2:
            killed = self.here.balancer.servers.pop(0)
            await killed.kill()
            await self.here.replica()
            return
        await self.here.reconcilers[-1].kill()
        # The next one need not wait for its end.
        await self.kube.delete(LEASES, "gpuwarden-reconcile", self.here.own_namespace)
        await self.here.reconciler()

    async def label(self, node: str, injection: str | None) -> None:
        await self.kube.patch(NODES, node, {"metadata": {"labels": {INJECTION: injection}}})

    async def pods_run(self) -> None:
        """Waits until more pods of each namespace have been bound."""
        await asyncio.gather(*(one.more_are_bound(self.pods_a_step) for one in self.workloads))

    async def end_waiting_pods(self, node: str) -> None:
        """Deletes pods whose claim was not allocated before the node lost the injection dra."""
        for one in self.workloads:
            for name in await one.waiting_with_claim(node):
                await one.delete(name)

    def faults(self) -> list[str]:
        return [fault for one in self.workloads for fault in one.faults()]


@asynccontextmanager
async def moving(cluster: Cluster, kube: Kube, directory: Path, *, nodes: int, pods_a_step: int) -> AsyncIterator[Move]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(device_classes(kube, GPU_DRIVER, DRIVER))
        flags = first_flags(nodes)
        standing = site(cluster, kube, directory, nodes=nodes, gpus=GPUS, name="move", replicas=2, flags=flags)
        here = await stack.enter_async_context(standing)
        stack.push_async_callback(cleared, kube, here.nodes)
        await here.reconciler()
        other = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
        workloads = [
            await stack.enter_async_context(workload(here, name, seed))
            for seed, name in enumerate((here.namespace, other))
        ]
        await here.wait_until_offered()
        await stack.enter_async_context(running_tasks(*(one.create_all_the_time() for one in workloads)))
        yield Move(here, kube, workloads, pods_a_step)


async def cleared(kube: Kube, nodes: Sequence[str]) -> None:
    await remove_slices(kube, *nodes)
    for node in nodes:
        with suppress(ApiError):
            await kube.delete(NODE_EVIDENCES, node)


@asynccontextmanager
async def guarded(kube: Kube) -> AsyncIterator[None]:
    """The policies for claims that take GPUs, in all namespaces."""
    async with AsyncExitStack() as stack:
        for manifest in dra(Installation(dra_guard=DraGuard.ALL)):
            if manifest["kind"] != "DeviceClass":
                await kube.create(resource_of(manifest), manifest)
                stack.push_async_callback(kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        yield


@pytest.mark.parametrize(
    ("nodes", "pods_a_step", "rounds"),
    [(2, 3, 1), pytest.param(4, 30, 3, marks=pytest.mark.long)],
    ids=["short", "long"],
)
async def test_cluster_moves_to_claims_node_by_node_and_back(
    cluster: Cluster,
    kube: Kube,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    nodes: int,
    pods_a_step: int,
    rounds: int,
) -> None:
    async with moving(cluster, kube, tmp_path, nodes=nodes, pods_a_step=pods_a_step) as move, guarded(kube):
        first, second = move.workloads
        for one in move.workloads:
            await one.create_lasting("by-variables")
        await move.upgrade(*PROOFS)
        for node in move.here.nodes:  # as the DRA driver does
            await kube.create(RESOURCE_SLICES, slice_of_gpus(node, [f"GPU-{node}-{k}" for k in range(GPUS)]))
        for number in range(rounds):
            await there(move, first, second)
            if rounds > 1:
                await move.upgrade(*PROOFS, "--injection", "dra")
                await move.pods_run()
            for one in move.workloads:
                await one.create_lasting(f"by-claim-{number}")
            if rounds > 1:
                await move.upgrade(*PROOFS)
            await back(move, first, second)
        move.here.checker.assert_no_violations()
        assert move.faults() == []
        by_claim = sum(len(one.seen.claims) for one in move.workloads)
        report_figures(request, pods=len(move.here.checker.seen), by_claim=by_claim, kills=move.kills)
        assert by_claim > pods_a_step


async def there(move: Move, first: Workload, second: Workload) -> None:
    """Each node gets the label; the last one together with the last namespace."""
    *others, last = move.here.nodes
    await move.label(others[0], "dra")
    await first.change_injection("dra")
    for node in others[1:]:
        await move.kill_one()
        await move.pods_run()
        await move.label(node, "dra")
    await move.pods_run()
    await move.kill_one()
    await second.change_injection("dra")
    await move.label(last, "dra")
    await wait_until(lambda: proof_devices(move.kube, last))
    await move.pods_run()


async def back(move: Move, first: Workload, second: Workload) -> None:
    *others, last = move.here.nodes
    await move.label(last, None)
    await second.change_injection(None)
    await move.kill_one()
    for node in reversed(others[1:]):
        await move.end_waiting_pods(node)
        await move.pods_run()
        await move.label(node, None)
        await move.kill_one()
    await first.change_injection(None)
    await move.label(others[0], None)
    await move.end_waiting_pods(last)
    await move.pods_run()
