"""`serve` and `reconcile` are killed. Until evidence ends, native pods get proven GPUs and no others: on real nodes,
and on simulated ones at the same time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from attrs import define, field, frozen

from scripts.controlplane.cluster import Cluster, gpu_node
from scripts.controlplane.components import REAL_NODE
from scripts.node.real import RealNode
from tests.e2e.cluster_users import BINDING_ENDS
from tests.e2e.dra.gpus import RESOURCE_CLAIMS, allocation, gpus_of, proof_devices, published_gpus, remove_slices
from tests.e2e.evidence import write_evidence
from tests.e2e.gpu_checker import InvariantViolatedError
from tests.e2e.kube import NODES, PODS, Kube, NotInTimeError, Raw, wait_until
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.node.containers import (
    NODE,
    START_TIMEOUT,
    container,
    containers_of,
    is_ready,
    real_pod,
    seen_in,
    tried_until,
)
from tests.e2e.node.deliveries import follow
from tests.e2e.node.front import HASH
from tests.e2e.node.plugins import attest_command, spire_agent
from tests.e2e.node.proven_site import LONG, ProvenSite, proven_site, templates_are_there
from tests.e2e.processes import cancel_and_wait, remove_nodes
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES
from webhook.runtime.clock import utc_now

UNKNOWN_HASH: Final = "sha256:cc33"
SIDE: Final = "test/side"
GPUS_EACH: Final = 3
# From the end of the evidence until a pod is marked for deletion.
EVICTED_WITHIN: Final = 1.0


@frozen(eq=False)
class Side:
    """Nodes of one kind: one stays proven, the evidence of one ends, and one is not proven."""

    name: str
    lasts: str
    ends: str
    unproven: str
    selector: Raw

    @property
    def is_real(self) -> bool:
        return self.name == "real"


REAL: Final = Side("real", "lasts", "ends", NODE, {REAL_NODE: "true"})
SIMULATED: Final = Side("simulated", "simulated-lasts", "simulated-ends", "simulated-unproven", {SIDE: "simulated"})
SIDES: Final = (REAL, SIMULATED)
UUIDS: Final = {
    name: [f"GPU-2222222{k}-0000-4000-8000-{number:012}" for number in range(GPUS_EACH)]
    for k, name in enumerate((REAL.lasts, REAL.ends))
}


def asking(name: str, gpus: int, selector: Raw, hash: str = HASH) -> Raw:
    content = real_pod(name, container(gpus))
    content["spec"]["nodeSelector"] = selector
    content["metadata"]["annotations"] = {"gpuwarden.io/required-hash": hash}
    return content


def only_on(node: str) -> Raw:
    return {"kubernetes.io/hostname": node}


@define(eq=False)
class Outage:
    """Native pods on both sides, and what is recorded of them."""

    proven: ProvenSite
    cluster: Cluster
    kube: Kube
    # The end of the evidence of each node on which it ends.
    ends: dict[str, datetime] = field(factory=dict)
    # When each pod was first seen to be marked for deletion.
    marked: dict[str, datetime] = field(factory=dict)
    # The uids of allocated claims.
    allocated: set[str] = field(factory=set)
    violations: list[str] = field(factory=list)
    seconds: dict[str, list[float]] = field(factory=lambda: {side.name: [] for side in SIDES})
    evicted: int = 0

    @property
    def namespace(self) -> str:
        return self.proven.here.namespace

    async def create(self, content: Raw) -> None:
        await self.kube.create(PODS, content, self.namespace)

    async def get(self, name: str) -> Raw:
        return await self.kube.get(PODS, name, self.namespace)

    async def runs(self, name: str) -> Raw:
        return await tried_until(self.kube, self.namespace, name, lambda: self.get(name), is_ready)

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        watches = (follow(self.kube, PODS, self._pod), follow(self.kube, RESOURCE_CLAIMS, self._claim))
        tasks = [asyncio.create_task(one) for one in watches]
        try:
            yield
        finally:
            await cancel_and_wait(tasks)

    def _pod(self, raw: Raw) -> None:
        if "deletionTimestamp" in raw["metadata"]:
            self.marked.setdefault(raw["metadata"]["name"], utc_now())

    def _claim(self, raw: Raw) -> None:
        """The first version with an allocation was written by the allocation."""
        meta, allocated = raw["metadata"], raw.get("status", {}).get("allocation")
        if not allocated or meta["uid"] in self.allocated:
            return
        self.allocated.add(meta["uid"])
        written = max(datetime.fromisoformat(one["time"]) for one in meta["managedFields"])
        for node in {one["pool"] for one in allocated["devices"]["results"]}:
            is_over = node in self.ends and written > self.ends[node]
            if is_over or node in {side.unproven for side in SIDES}:
                self.violations.append(f"{meta['name']} was allocated on {node} at {written}")

    async def serve_pods(self, side: Side) -> None:
        """Creates one pod after the other, each of which has to run."""
        number = 0
        while True:
            number += 1
            name = f"{side.name}-{number}"
            begun = time.monotonic()
            await self.create(asking(name, 1 + number % 2, side.selector))
            look = partial(self._state, name)
            if await tried_until(self.kube, self.namespace, name, look, bool) == "evicted":
                self.evicted += 1
                continue
            self.seconds[side.name].append(time.monotonic() - begun)
            if side.is_real:
                await self._check_gpus(name)
            await self.kube.call("DELETE", PODS.path(self.namespace, name))
            await wait_until(look, lambda seen: seen == "evicted", START_TIMEOUT)

    async def _state(self, name: str) -> str:
        pod = await self.kube.find(PODS, name, self.namespace)
        if pod is None:
            return "evicted"
        return "runs" if is_ready(pod) else ""

    async def _check_gpus(self, name: str) -> None:
        """The container sees the GPUs that are allocated, unless it is being evicted."""
        allocated = await gpus_of(self.kube, self.namespace, name)
        try:
            seen = await seen_in(self.cluster, self.namespace, name)
        except AssertionError:
            if name not in self.marked and await self._state(name) == "runs":
                raise
            return
        if sorted(seen.uuids) != sorted(allocated):
            self.violations.append(f"{name} sees {seen.uuids}, and {allocated} are allocated")


@pytest.fixture
async def outage(real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path) -> AsyncIterator[Outage]:
    async with AsyncExitStack() as stack:
        nodes = [real_node]
        for name, uuids in UUIDS.items():
            node = await asyncio.to_thread(real_cluster.add_real_node, name, uuids)
            stack.push_async_callback(real_kube.delete, NODES, name)
            stack.push_async_callback(asyncio.to_thread, node.remove)
            nodes.append(node)
        simulated = (SIMULATED.lasts, SIMULATED.ends, SIMULATED.unproven)
        stack.push_async_callback(remove_nodes, real_kube, simulated, (GPU_NODES, NODE_EVIDENCES, NODES))
        stack.push_async_callback(remove_slices, real_kube, *simulated)
        await asyncio.to_thread(
            real_cluster.add_nodes, [gpu_node(name, 0, **{SIDE: "simulated"}) for name in simulated]
        )
        for name in simulated:
            await published_gpus(real_kube, name, GPUS_EACH)
        site = proven_site(real_cluster, real_kube, tmp_path, nodes, is_native=True)
        proven = await stack.enter_async_context(site)
        await stack.enter_async_context(attesting_without_kubelet(SIMULATED.ends, proven))
        here = Outage(proven, real_cluster, real_kube)
        await stack.enter_async_context(here.recording())
        yield here


@asynccontextmanager
async def attesting_without_kubelet(node: str, proven: ProvenSite) -> AsyncIterator[None]:
    """`attest` of a simulated node."""
    with TemporaryDirectory(prefix="kubelet-") as name:
        directory = Path(name)
        for one in ("plugins", "plugins_registry"):
            (directory / one).mkdir()
        async with spire_agent(directory / "agent.sock", node, HASH) as agent:
            command = attest_command(node, agent, proven.account, directory)
            with (directory / "log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            try:
                yield
            finally:
                process.kill()
                await process.wait()


async def prove_all(outage: Outage) -> None:
    for side in SIDES:
        for node in (side.lasts, side.ends):
            await write_evidence(outage.kube, node, HASH, LONG)
    for side in SIDES:
        for node in (side.lasts, side.ends):
            look = partial(proof_devices, outage.kube, node)
            await wait_until(look, lambda found: len(found) == GPUS_EACH, START_TIMEOUT)
    await templates_are_there(outage.kube, outage.namespace)
    assert not await proof_devices(outage.kube, NODE)


async def shorten(outage: Outage, lasts: timedelta) -> None:
    """Ends the evidence of the nodes earlier. Afterwards the ends are in all objects that Kubernetes goes by."""
    for side in SIDES:
        outage.ends[side.ends] = await write_evidence(outage.kube, side.ends, HASH, lasts)

    async def written() -> bool:
        listed = (await outage.kube.get(BINDING_ENDS, "gpuwarden"))["spec"]["nodes"]
        taints = [
            (node, taint["timeAdded"])
            for node in outage.ends
            for one in (await proof_devices(outage.kube, node)).values()
            for taint in one["taints"]
        ]
        said = [*taints, *((node, listed[node]) for node in outage.ends)]
        return all(datetime.fromisoformat(text) <= outage.ends[node] for node, text in said)

    await wait_until(written)


@pytest.mark.long
@pytest.mark.parametrize(
    ("lasts", "down_for"),
    [
        pytest.param(timedelta(seconds=8), timedelta(seconds=16), id="some-seconds"),
        pytest.param(timedelta(minutes=5), timedelta(minutes=10), id="ten-minutes"),
    ],
)
async def test_native_pods_get_proven_gpus_only_while_serve_and_reconcile_are_down(
    outage: Outage, request: pytest.FixtureRequest, lasts: timedelta, down_for: timedelta
) -> None:
    await prove_all(outage)
    for side in SIDES:
        await outage.create(asking(f"stays-{side.name}", 1, only_on(side.lasts)))
        await outage.create(asking(f"leaves-{side.name}", 1, only_on(side.ends)))
    before = {}
    for side in SIDES:
        before[side] = await outage.runs(f"stays-{side.name}")
        await outage.runs(f"leaves-{side.name}")
    await shorten(outage, lasts)
    await outage.proven.here.stop()
    killed = utc_now()
    last_end = max(outage.ends.values())
    assert killed < last_end
    for side in SIDES:
        await outage.create(asking(f"unknown-{side.name}", 1, side.selector, UNKNOWN_HASH))
        await outage.create(asking(f"unproven-{side.name}", 1, only_on(side.unproven)))

    pods = [asyncio.create_task(outage.serve_pods(side)) for side in SIDES]
    try:
        await asyncio.sleep((last_end - utc_now()).total_seconds())
        for side in SIDES:
            await outage.create(asking(f"late-{side.name}", 1, only_on(side.ends)))
        done, _ = await asyncio.wait(pods, timeout=(killed + down_for - utc_now()).total_seconds())
        for task in done:
            task.result()
    finally:
        await cancel_and_wait(pods)

    late = {side: (outage.marked[f"leaves-{side.name}"] - outage.ends[side.ends]).total_seconds() for side in SIDES}
    report_figures(
        request,
        down_for=(utc_now() - killed).total_seconds(),
        **{f"served_on_{side.name}_nodes": len(outage.seconds[side.name]) for side in SIDES},
        **{f"longest_on_{side.name}_nodes": max(outage.seconds[side.name]) for side in SIDES},
        **{f"median_on_{side.name}_nodes": percentile(outage.seconds[side.name], 0.5) for side in SIDES},
        **{f"marked_after_the_end_on_{side.name}_nodes": seconds for side, seconds in late.items()},
        evicted_besides=outage.evicted,
    )
    await assert_only_proven_gpus_were_given(outage, before)
    if max(late.values()) >= EVICTED_WITHIN:
        raise NotInTimeError(f"evicted late: {late}")


async def assert_only_proven_gpus_were_given(outage: Outage, before: dict[Side, Raw]) -> None:
    for side in SIDES:
        for name in ("unknown", "unproven", "late"):
            pod = await outage.get(f"{name}-{side.name}")
            if pod["spec"].get("nodeName"):
                outage.violations.append(f"{name}-{side.name} is on {pod['spec']['nodeName']}")
    if outage.violations:
        raise InvariantViolatedError("\n".join(outage.violations[:10]))
    for side in SIDES:
        assert outage.marked[f"leaves-{side.name}"] >= outage.ends[side.ends]
        stays = await outage.get(f"stays-{side.name}")
        assert containers_of(stays) == containers_of(before[side])
        (pair,) = await allocation(outage.kube, outage.namespace, f"stays-{side.name}")
        assert pair.node == side.lasts
