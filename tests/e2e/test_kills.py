"""SIGKILL at an exact step: other processes finish the work in time, and no GPU in use is assigned."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_bound_while_down import Harness, ends_soon, running_harness
from tests.e2e.attacks.test_gpu_variables import HOSTILE, hostile_pod, seen
from tests.e2e.evidence import stamp
from tests.e2e.faults import Breakpoint, Exchange, Proxy, is_reservation_write
from tests.e2e.kube import PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, Worker, cancel_and_wait, site, with_policies
from tests.e2e.storm import Storm, mixed
from webhook.runtime.clock import utc_now

DEADLINE, SKEW = 4, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
# The deadline restarts when a UID is written; others wait for the skew. Then passes, writes, and a busy machine.
LEAK_LIMIT = DEADLINE + SKEW + 10.0
# Another reconciler is elected when the Lease of the dead one has expired (15 s), which it checks every 2 s.
SUCCESSION = 15 + 2 * 2
MANY = 120.0
# The default deadline of a pending reservation in a cluster.
IN_A_CLUSTER = 15.0
# From the start of a replica to the first admitted claim.
RECOVERY = 5.0
# Long enough to be listed in BindingEnds before the replicas are killed.
ENDS_AFTER = timedelta(seconds=10)

Phases = list[tuple[str, bool]]


@frozen
class Step:
    """The write at which a process is killed, before or after the API server has it."""

    name: str
    phases: Phases
    carried_out: bool

    @property
    def names_a_pod(self) -> bool:
        return self.carried_out and self.phases == NAME


RESERVE, NAME, CONFIRM = [("pending", False)], [("pending", True)], [("finalized", True)]
MARK: Phases = [("releasing", True)]
DROP: Phases = []

OF_A_REPLICA = (
    Step("before the reservation is written", RESERVE, carried_out=False),
    Step("reserved, not answered", RESERVE, carried_out=True),
    Step("answered, before the UID is written", NAME, carried_out=False),
    Step("UID written, not created", NAME, carried_out=True),
)
OF_A_RECONCILER = (
    Step("created, before it is confirmed", CONFIRM, carried_out=False),
    Step("confirmed, not reported", CONFIRM, carried_out=True),
)
OF_A_RELEASE = (
    Step("marked releasing, not reported", MARK, carried_out=True),
    Step("before the slot is dropped", DROP, carried_out=False),
)
SOME = pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
FEW = pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])


def stopped_at(proxy: Proxy, node: str, step: Step) -> Breakpoint:
    """Holds the next write of that kind on that node."""

    def match(one: Exchange) -> bool:
        return is_reservation_write(one) and f"/{node}/" in one.path and one.phases == step.phases

    breakpoint_ = Breakpoint(step.carried_out)
    proxy.rules.clear()
    proxy.on(step.name, match, breakpoint_, most=1)
    return breakpoint_


def on(node: str) -> Raw:
    return pod(None, gpus=1, nodeSelector={"kubernetes.io/hostname": node}, terminationGracePeriodSeconds=1)


async def create_until_made(here: Site, content: Raw, seconds: float) -> Raw:
    """Retries until the pod is created."""

    async def tried() -> Raw | None:
        try:
            return await here.kube.create(PODS, content, here.namespace)
        except ApiError:
            return None

    made = await wait_until(tried, seconds=seconds)
    assert made is not None
    return made


async def create_until_stopped(here: Site, content: Raw, breakpoint_: Breakpoint) -> Raw:
    """Retries until gpuwarden has the creation: the API server may use a connection that the balancer has just
    closed."""
    while True:
        try:
            return await here.kube.create(PODS, content, here.namespace)
        except ApiError as exc:
            if breakpoint_.reached.is_set() or "denied the request" in exc.message:
                raise


async def killed(worker: Worker, breakpoint_: Breakpoint, *held_up: "asyncio.Task[Any]") -> float:
    """Kills the process at the step and returns the time. The tasks in `held_up` end only after that."""
    reaching = asyncio.create_task(breakpoint_.reached.wait())
    await asyncio.wait((reaching, *held_up), timeout=MANY, return_when=asyncio.FIRST_COMPLETED)
    assert reaching.done(), f"the step was not reached: {held_up}"
    await worker.kill()
    breakpoint_.resume()
    return time.monotonic()


@SOME
@pytest.mark.parametrize("is_reconciled", [True, False], ids=["reconciler", "replicas alone"])
async def test_replica_killed_at_any_step_leaves_no_reservation_after_the_deadline(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int, is_reconciled: bool
) -> None:
    plan = [step for step in OF_A_REPLICA for _ in range(rounds)]
    shape: dict[str, Any] = {"nodes": len(plan), "gpus": 1, "flags": FLAGS, "name": "kill"}
    leaks: dict[str, float] = {}
    async with site(cluster, kube, tmp_path, **shape) as here, Proxy(cluster) as proxy:
        other = await here.replica()
        await here.wait_until_reviewed()
        if is_reconciled:
            await here.reconciler()
        await here.wait_until_offered()
        for step, node in zip(plan, here.nodes, strict=True):
            victim = await here.replica(proxy.kubeconfig(tmp_path), serves=False)
            await here.balancer.only(victim)
            breakpoint_ = stopped_at(proxy, node, step)
            creation = asyncio.create_task(create_until_stopped(here, on(node), breakpoint_))
            died = await killed(victim, breakpoint_, creation)
            with pytest.raises(ApiError, match="failed calling webhook"):
                await creation
            await here.balancer.only(other)
            if is_reconciled:
                await wait_until(lambda node=node: here.held_on(node), lambda held: not held, LEAK_LIMIT)  # type: ignore[misc]
            elif step.names_a_pod:
                continue
            else:
                await create_until_made(here, on(node), LEAK_LIMIT)
            leaks[step.name] = max(leaks.get(step.name, 0.0), time.monotonic() - died)
        if not is_reconciled:  # a replica cannot know that a named pod never ran
            await here.reconciler()
        for step, node in zip(plan, here.nodes, strict=True):
            if is_reconciled or step.names_a_pod:
                await create_until_made(here, on(node), LEAK_LIMIT)
        await wait_until(lambda: evaluated(here.all_used))
        report_figures(request, rounds=rounds, longest_leak_s=leaks)
        here.checker.assert_no_violations()


async def test_all_replicas_killed_during_creations_leave_no_reservation_after_the_deadline(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the default deadline and every policy; evidence of a node ends meanwhile."""
    flags = ("--clock-skew", f"{SKEW}s")
    async with (
        running_harness(cluster, kube, tmp_path, *flags, nodes=4, gpus=8, replicas=3) as harness,
        with_policies(harness.site),
    ):
        here, (ending, lasting) = harness.site, harness.proven
        await here.wait_until_offered()
        await harness.create_gated_pod("late", ending)
        await harness.create_gated_pod("lasting", lasting)
        storm = Storm(here, clients=32)
        creating = asyncio.create_task(storm.create(200, any_pod))
        reaping = asyncio.create_task(storm.reap(0.5))
        await harness.prove(ending, ENDS_AFTER)
        await wait_until(harness.ends, lambda data: ends_soon(data[ending]))
        await wait_until(lambda: evaluated(lambda: len(storm.tally.made) >= 50), seconds=MANY)
        await asyncio.gather(*(one.kill() for one in here.replicas))
        died = time.monotonic()
        made_before = len(storm.tally.made)
        assert not creating.done()
        await here.balancer.only()
        await cancel_and_wait([reaping])
        reserved = await unseen_reservations(here)
        releasing = asyncio.create_task(released(here, reserved))
        await asyncio.gather(*(plain_pod_is_bound(harness, name, lasting) for name in HOSTILE))
        with pytest.raises(ApiError, match="failed calling webhook"):
            await kube.create(PODS, pod("asking", gpus=1), here.namespace)
        await wait_until(harness.ends, lambda data: data[ending] <= stamp(utc_now()))
        for name in ("late", "lasting"):
            await harness.open_gate(name)
        assert await harness.wait_until_bound("lasting") == lasting
        await harness.wait_until_refused("late", f"the evidence of node {ending} ended")
        reaping = asyncio.create_task(storm.reap(0.5))
        # Only pods with a claim are still retried.
        stuck = len(storm.tally.made)
        began = time.monotonic()
        starting = asyncio.ensure_future(here.replica())
        await wait_until(lambda: evaluated(lambda: len(storm.tally.made) > stuck), seconds=RECOVERY)
        recovery = time.monotonic() - began
        await starting
        # Later than the first: here all processes share the cores of one machine.
        await asyncio.gather(*(here.replica() for _ in range(2)))
        gone_after = await releasing - died
        await creating
        await cancel_and_wait([reaping])
        left = [one for one in await kube.list(PODS, here.namespace) if not has_claim(one)]
        report_figures(
            request,
            made_before=made_before,
            held_for_nobody=len(reserved),
            gone_after_s=gone_after,
            recovery_s=recovery,
            without_a_claim=len(left),
        )
        assert len(storm.tally.made) == 200
        assert len(left) > len(HOSTILE)
        assert {shown for one in left for shown in seen(one).values()} == {"void"}
        await asyncio.gather(*(harness.wait_until_bound(one["metadata"]["name"]) for one in left))
        here.checker.assert_no_violations()


async def released(here: Site, reserved: frozenset[str]) -> float:
    """The time at which none of them was reserved any more."""
    await wait_until(lambda: unseen_reservations(here), lambda now: not reserved & now, IN_A_CLUSTER + SKEW + 10.0)
    return time.monotonic()


def any_pod(chance: random.Random) -> Raw:
    """Half of the pods have claims; others have none, or variables that would show them all GPUs of the node."""
    kind = chance.random()
    if kind < 1 / 2:
        return mixed(chance)
    content = pod(None) if kind < 3 / 4 else hostile_pod(chance.choice(list(HOSTILE.values())))
    return {**content, "metadata": {"generateName": "plain-"}}


def has_claim(one: Raw) -> bool:
    return "gpuwarden.io/gpu-uuid" in one["metadata"].get("annotations", {})


async def plain_pod_is_bound(harness: Harness, kind: str, node: str) -> None:
    """While no replica answers: the pod is created, sees no GPU, and is bound."""
    content = hostile_pod(HOSTILE[kind], name=f"hostile-{list(HOSTILE).index(kind)}")
    content["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    made = await harness.kube.create(PODS, content, harness.namespace)
    assert set(seen(made).values()) == {"void"}, kind
    assert await harness.wait_until_bound(made["metadata"]["name"]) == node


async def unseen_reservations(here: Site) -> frozenset[str]:
    """Reservations for pods that gpuwarden has not seen."""
    return frozenset(one["reservation"] for one in (await here.held()).values() if one["phase"] == "pending")


@FEW
async def test_pod_keeps_its_gpu_if_the_reconciler_is_killed_while_confirming(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int
) -> None:
    async def begin(here: Site, node: str) -> Raw:
        content = on(node)
        content["spec"]["schedulerName"] = "nobody"  # the review of its Binding would confirm the reservation first
        return await create_until_made(here, content, MANY)

    async def is_right(here: Site, node: str, made: Raw) -> bool:
        held = list((await here.held_on(node)).values())
        assert held, "the GPU of a pod that lives was free"
        return [(one["phase"], one.get("uid")) for one in held] == [("finalized", made["metadata"]["uid"])]

    await killing_reconcilers(cluster, kube, tmp_path, request, rounds, OF_A_RECONCILER, begin, is_right)


@FEW
async def test_gpu_is_released_if_the_reconciler_is_killed_while_releasing(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rounds: int
) -> None:
    async def begin(here: Site, node: str) -> Raw:
        made = await create_until_made(here, on(node), MANY)
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
    """Kills the leader at the step; returns how long the standby needs to correct the state."""
    plan = [step for step in steps for _ in range(rounds)]
    times: dict[str, float] = {}
    shape: dict[str, Any] = {"nodes": len(plan), "gpus": 1, "flags": FLAGS, "name": "kill", "replicas": 1}
    async with site(cluster, kube, directory, **shape) as here, Proxy(cluster) as proxy:
        through = proxy.kubeconfig(directory)
        leader = await here.reconciler(through)
        await here.wait_until_offered()
        for step, node in zip(plan, here.nodes, strict=True):
            standby = await here.reconciler(through, leads=False)
            breakpoint_ = stopped_at(proxy, node, step)
            beginning = asyncio.create_task(begin(here, node))
            died = await killed(leader, breakpoint_)
            made = await beginning
            await wait_until(lambda node=node, made=made: is_right(here, node, made), seconds=SUCCESSION + LEAK_LIMIT)  # type: ignore[misc]
            times[step.name] = max(times.get(step.name, 0.0), time.monotonic() - died)
            await standby.wait_for_log("leading")
            leader = standby
        report_figures(request, rounds=rounds, longest_until_right_s=times)
        here.checker.assert_no_violations()


async def evaluated(look: Callable[[], bool]) -> bool:
    return look()
