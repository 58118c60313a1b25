"""SIGKILL at an exact step: what was begun is ended by others, in time, and nobody gets a GPU that is in use."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.crew import Site, Worker, site
from tests.e2e.faults import Exchange, Proxy, Stop, is_reservation_write
from tests.e2e.figures import tell
from tests.e2e.kube import PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.storm import Storm, mixed

DEADLINE, SKEW = 4, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
# After a uid was learnt the deadline begins anew; others wait the skew out; then passes, writes, and a busy machine.
LEAK_LIMIT = DEADLINE + SKEW + 10.0
# Another reconciler is elected once the Lease of the dead one has run out (15 s), which it looks at every 2 s.
SUCCESSION = 15 + 2 * 2
MANY = 120.0
# How long a hold lasts in a cluster if nothing is said.
IN_A_CLUSTER = 15.0
# Three processes begin at once; each alone is ready in 2 s on an idle machine.
READY = 20.0

Phases = list[tuple[str, bool]]


@frozen
class Step:
    """The write at which a process is killed, and on which side of the API server."""

    name: str
    phases: Phases
    carried_out: bool


RESERVE, NAME, CONFIRM = [("pending", False)], [("pending", True)], [("finalized", True)]
MARK: Phases = [("releasing", True)]
DROP: Phases = []

OF_A_REPLICA = (
    Step("before the reservation is written", RESERVE, carried_out=False),
    Step("reserved, not answered", RESERVE, carried_out=True),
    Step("answered, before the uid is written", NAME, carried_out=False),
    Step("the uid written, not created", NAME, carried_out=True),
)
OF_A_RECONCILER = (
    Step("created, before it is confirmed", CONFIRM, carried_out=False),
    Step("confirmed, not told", CONFIRM, carried_out=True),
)
OF_A_RELEASE = (
    Step("marked releasing, not told", MARK, carried_out=True),
    Step("before the slot is dropped", DROP, carried_out=False),
)
SOME = pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
FEW = pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])


def stopped_at(proxy: Proxy, node: str, step: Step) -> Stop:
    """The next write of that kind on that node waits in our hands."""

    def match(one: Exchange) -> bool:
        return is_reservation_write(one) and f"/{node}/" in one.path and one.phases == step.phases

    stop = Stop(step.carried_out)
    proxy.rules.clear()
    proxy.on(step.name, match, stop, most=1)
    return stop


def on(node: str) -> Raw:
    return pod(None, gpus=1, nodeSelector={"kubernetes.io/hostname": node})


async def until_made(here: Site, content: Raw, seconds: float) -> Raw:
    """A client that does not give up."""

    async def tried() -> Raw | None:
        try:
            return await here.kube.create(PODS, content, here.namespace)
        except ApiError:
            return None

    made = await wait_until(tried, seconds=seconds)
    assert made is not None
    return made


async def until_stopped(here: Site, content: Raw, stop: Stop) -> Raw:
    """The API server may write to a connection that the balancer has just cut: such a creation never came to us."""
    while True:
        try:
            return await here.kube.create(PODS, content, here.namespace)
        except ApiError as exc:
            if stop.reached.is_set() or "denied the request" in exc.message:
                raise


async def killed(worker: Worker, stop: Stop, *held_up: "asyncio.Task[Any]") -> float:
    """When it was. What is held up by the step does not end before."""
    reaching = asyncio.create_task(stop.reached.wait())
    await asyncio.wait((reaching, *held_up), timeout=MANY, return_when=asyncio.FIRST_COMPLETED)
    assert reaching.done(), f"the step was not reached: {held_up}"
    await worker.kill()
    stop.let_go()
    return time.monotonic()


@SOME
@pytest.mark.parametrize("is_reconciled", [True, False], ids=["reconciler", "replicas alone"])
async def test_a_replica_killed_at_any_step_leaves_nothing_past_the_deadline(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int, is_reconciled: bool
) -> None:
    plan = [step for step in OF_A_REPLICA for _ in range(rounds)]
    shape: dict[str, Any] = {"nodes": len(plan), "gpus": 1, "flags": FLAGS, "name": "kill"}
    leaks: dict[str, float] = {}
    async with site(cluster, kube, tmp_path, **shape) as here, Proxy(cluster) as proxy:
        other = await here.replica()
        await here.reviewed()
        if is_reconciled:
            await here.reconciler()
        await here.offered()
        for step, node in zip(plan, here.nodes, strict=True):
            victim = await here.replica(proxy.kubeconfig(tmp_path), serves=False)
            await here.balancer.only(victim)
            stop = stopped_at(proxy, node, step)
            creation = asyncio.create_task(until_stopped(here, on(node), stop))
            died = await killed(victim, stop, creation)
            with pytest.raises(ApiError, match="failed calling webhook"):
                await creation
            await here.balancer.only(other)
            if is_reconciled:
                await wait_until(lambda node=node: here.held_on(node), lambda held: not held, LEAK_LIMIT)  # type: ignore[misc]
            else:
                await until_made(here, on(node), LEAK_LIMIT)
            leaks[step.name] = max(leaks.get(step.name, 0.0), time.monotonic() - died)
        for node in here.nodes if is_reconciled else ():
            await until_made(here, on(node), LEAK_LIMIT)
        await wait_until(lambda: true(here.all_used))
        tell(request, rounds=rounds, longest_leak_s=leaks)
        here.judge.acquit()


async def test_all_replicas_killed_amid_creations_leave_no_gpu_held_past_the_deadline(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the deadline that a cluster has if nothing is said."""
    flags = ("--clock-skew", f"{SKEW}s")
    shape: dict[str, Any] = {"nodes": 4, "gpus": 8, "flags": flags, "name": "kill", "replicas": 3}
    async with site(cluster, kube, tmp_path, **shape) as here:
        await here.reconciler()
        await here.offered()
        storm = Storm(here, clients=32)
        creating = asyncio.create_task(storm.create(200, mixed))
        reaping = asyncio.create_task(storm.reap(0.5))
        await wait_until(lambda: true(lambda: len(storm.tally.made) >= 50), seconds=MANY)
        await asyncio.gather(*(one.kill() for one in here.replicas))
        died = time.monotonic()
        promised = await unseen(here)
        replicas = await asyncio.gather(here.replica(), here.replica(), here.replica())
        await here.balancer.only(*replicas)
        ready = time.monotonic() - died
        tried = asyncio.create_task(until_made(here, pod(None, gpus=1), MANY))
        await wait_until(lambda: unseen(here), lambda now: not promised & now, IN_A_CLUSTER + SKEW + 10.0)
        gone_after = time.monotonic() - died
        await tried
        await creating
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        tell(request, held_for_nobody=len(promised), gone_after_s=gone_after, ready_s=ready, made=len(storm.tally.made))
        assert len(storm.tally.made) == 200
        assert ready < READY
        here.judge.acquit()


async def unseen(here: Site) -> frozenset[str]:
    """Reservations for pods that nobody has seen."""
    return frozenset(one["reservation"] for one in (await here.held()).values() if one["phase"] == "pending")


@FEW
async def test_a_reconciler_killed_as_it_confirms_leaves_the_pod_its_gpu(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int
) -> None:
    async def begin(here: Site, node: str) -> Raw:
        content = on(node)
        content["spec"]["schedulerName"] = "nobody"  # the review of its Binding would confirm it first
        return await until_made(here, content, MANY)

    async def is_right(here: Site, node: str, made: Raw) -> bool:
        held = list((await here.held_on(node)).values())
        assert held, "the GPU of a pod that lives was free"
        return [(one["phase"], one.get("uid")) for one in held] == [("finalized", made["metadata"]["uid"])]

    await killing_reconcilers(cluster, kube, tmp_path, request, rounds, OF_A_RECONCILER, begin, is_right)


@FEW
async def test_a_reconciler_killed_as_it_releases_leaves_nothing_held(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int
) -> None:
    async def begin(here: Site, node: str) -> Raw:
        made = await until_made(here, on(node), MANY)
        await wait_until(lambda: here.held_on(node), lambda held: is_final(held))
        await kube.delete(PODS, made["metadata"]["name"], here.namespace)
        return made

    async def is_right(here: Site, node: str, _: Raw) -> bool:
        return not await here.held_on(node)

    await killing_reconcilers(cluster, kube, tmp_path, request, rounds, OF_A_RELEASE, begin, is_right)


def is_final(held: dict[str, Raw]) -> bool:
    return [one["phase"] for one in held.values()] == ["finalized"]


async def killing_reconcilers(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    request: pytest.FixtureRequest,
    rounds: int,
    steps: tuple[Step, ...],
    begin: Callable[[Site, str], Coroutine[Any, Any, Raw]],
    is_right: Callable[[Site, str, Raw], Awaitable[bool]],
) -> None:
    """The leader dies at the step; how long until the one that stands by has put things right."""
    plan = [step for step in steps for _ in range(rounds)]
    times: dict[str, float] = {}
    shape: dict[str, Any] = {"nodes": len(plan), "gpus": 1, "flags": FLAGS, "name": "kill", "replicas": 1}
    async with site(cluster, kube, directory, **shape) as here, Proxy(cluster) as proxy:
        through = proxy.kubeconfig(directory)
        leader = await here.reconciler(through)
        await here.offered()
        for step, node in zip(plan, here.nodes, strict=True):
            standby = await here.reconciler(through, leads=False)
            stop = stopped_at(proxy, node, step)
            beginning = asyncio.create_task(begin(here, node))
            died = await killed(leader, stop)
            made = await beginning
            await wait_until(lambda node=node, made=made: is_right(here, node, made), seconds=SUCCESSION + LEAK_LIMIT)  # type: ignore[misc]
            times[step.name] = max(times.get(step.name, 0.0), time.monotonic() - died)
            await standby.says("leading")
            leader = standby
        tell(request, rounds=rounds, longest_until_right_s=times)
        here.judge.acquit()


async def true(look: Callable[[], bool]) -> bool:
    return look()
