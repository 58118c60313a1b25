"""An API server that refuses, drops answers or is down: a creation is denied clearly or succeeds, and no reservation
leaks."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.faults import (
    Fault,
    Match,
    Proxy,
    answering,
    cut,
    delayed,
    drop_response,
    forward_unchanged,
    is_ledger_call,
    is_list,
    is_reservation_write,
    is_watch,
    never_answer,
    watch_expired,
    watch_expired_in_stream,
)
from tests.e2e.kube import PODS, Kube, pod, wait_until
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.processes import Site, site
from tests.e2e.storm import Storm, plain
from tests.e2e.test_watch import wait_for_components
from webhook.core.reasons import Reason

DEADLINE, SKEW = 4, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
# Faults continue while the reconciler corrects the state: each write may need several tries.
LEAK_LIMIT = DEADLINE + SKEW + 25.0
# The API server waits 10 s for a review; a creation has a mutating and a validating one.
ANSWER_LIMIT = 20.0
SHAPE: dict[str, Any] = {"nodes": 2, "gpus": 8, "flags": FLAGS, "name": "fault"}
PODS_OF = pytest.mark.parametrize("pods", [40, pytest.param(400, marks=pytest.mark.long)])


@frozen
class FaultCase:
    match: Match
    fault: Fault
    share: float = 0.2


FAULTS = {
    "409": FaultCase(is_reservation_write, answering(409)),
    "422": FaultCase(is_reservation_write, answering(422)),
    "429": FaultCase(is_ledger_call, answering(429)),
    "500": FaultCase(is_ledger_call, answering(500)),
    "503": FaultCase(is_ledger_call, answering(503)),
    "answer lost": FaultCase(is_reservation_write, drop_response),
    "connection cut": FaultCase(is_ledger_call, cut),
    "answer swallowed": FaultCase(is_reservation_write, never_answer, 0.1),
    "answer late": FaultCase(is_ledger_call, delayed(0.5)),
}


async def evaluated(look: Callable[[], object]) -> bool:
    return bool(look())


async def confirmed(here: Site) -> bool:
    """Whether exactly the live pods have reservations, all finalized."""
    held = await here.held()
    return {(entry.get("uid"), entry["phase"]) for entry in held.values()} == {
        (uid, "finalized") for uid in here.checker.live_pods
    } and {slot.partition("/")[0] for slot in held} == here.checker.gpus


async def seconds_until_free(here: Site, seconds: float = LEAK_LIMIT) -> float:
    """Seconds from the end of the last pod until no reservation is left."""
    await here.free_all()
    await wait_until(lambda: evaluated(lambda: not here.checker.live_pods), seconds=60)
    started = time.monotonic()
    await wait_until(here.held, lambda held: not held, seconds)
    return time.monotonic() - started


# The short form has one of each kind; `make chaos` has all.
SHORT = ("409", "500", "answer lost", "answer swallowed")


@PODS_OF
@pytest.mark.parametrize("kind", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in FAULTS])
async def test_a_creation_is_denied_clearly_or_succeeds(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, kind: str, pods: int
) -> None:
    chosen = FAULTS[kind]
    async with site(cluster, kube, tmp_path, **SHAPE) as here, Proxy(cluster) as proxy:
        through = proxy.kubeconfig(tmp_path)
        for _ in range(2):
            await here.replica(through)
        await here.wait_until_reviewed()
        await here.reconciler(through)
        await here.wait_until_offered()
        proxy.on(kind, chosen.match, chosen.fault, chosen.share)
        storm = Storm(here, clients=16)
        await asyncio.gather(*(once_each(storm, pods // 16 + 1) for _ in range(16)))
        alive = len(here.checker.live_pods)
        await wait_until(lambda: confirmed(here), seconds=LEAK_LIMIT)
        free_after = await seconds_until_free(here)
        answers = storm.tally.made + storm.tally.denied
        report_figures(
            request,
            asked=len(answers),
            made=len(storm.tally.made),
            refused=dict(storm.tally.why),
            faults=proxy.applied[kind],
            p99_s=percentile(answers, 0.99),
            alive_at_the_end=alive,
            free_after_s=free_after,
            unclear=storm.tally.unclear[:3],
        )
        here.checker.assert_no_violations()
        assert len(storm.tally.unclear) <= len(answers) // 20, storm.tally.unclear[:5]
        assert {reason for _, reason in storm.tally.why} <= {reason.value for reason in Reason}
        assert proxy.applied[kind]
        assert storm.tally.made
        assert max(answers) < ANSWER_LIMIT


async def once_each(storm: Storm, count: int) -> None:
    """Tries to create `count` pods, each once, and deletes half of those created."""
    for number in range(count):
        made = await storm.try_create(plain(storm.rng))
        if made is not None and number % 2:
            await storm.site.kube.delete(PODS, made["metadata"]["name"], storm.site.namespace)


@pytest.mark.parametrize("how", [watch_expired, watch_expired_in_stream], ids=["the answer", "the first event"])
async def test_410_on_every_watch_is_handled_without_flooding_the_server(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, how: Fault
) -> None:
    async with site(cluster, kube, tmp_path, **SHAPE) as here, Proxy(cluster) as proxy:
        proxy.on("410", is_watch, how)
        through = proxy.kubeconfig(tmp_path)
        await here.replica(through)
        await here.wait_until_reviewed()
        await here.reconciler(through)
        await here.wait_until_offered()
        storm = Storm(here, clients=8)
        await asyncio.wait_for(storm.create(len(here.gpus), plain), 60)
        await wait_until(lambda: confirmed(here), seconds=LEAK_LIMIT)
        before, started = proxy.applied["410"], time.monotonic()
        free_after = await seconds_until_free(here)
        await asyncio.sleep(5)
        rate = (proxy.applied["410"] - before) / (time.monotonic() - started)
        proxy.rules.clear()
        await asyncio.wait_for(storm.create(len(here.gpus), plain), 60)
        await wait_until(lambda: confirmed(here))
        after_recovery = await seconds_until_free(here)
        report_figures(
            request, watches_refused_per_s=rate, free_after_s=free_after, free_after_recovery_s=after_recovery
        )
        here.checker.assert_no_violations()
        # A handful of watches, each restarted at most a few times per second.
        assert rate < 20


async def test_frozen_connection_causes_only_denials(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with site(cluster, kube, tmp_path, **SHAPE) as here, Proxy(cluster) as proxy:
        through = proxy.kubeconfig(tmp_path)
        await here.replica(through)
        await here.wait_until_reviewed()
        await here.reconciler(through)
        await here.wait_until_offered()
        storm = Storm(here, clients=8)
        await storm.create(4, plain)
        proxy.freeze()
        asked = [asyncio.create_task(storm.try_create(plain(storm.rng))) for _ in range(8)]
        await asyncio.wait(asked, timeout=ANSWER_LIMIT)
        assert all(one.done() for one in asked)
        assert len(storm.tally.made) == 4
        proxy.thaw()
        await asyncio.wait_for(storm.create(8, plain), 60)
        await wait_until(lambda: confirmed(here), seconds=LEAK_LIMIT)
        free_after = await seconds_until_free(here)
        report_figures(
            request, refused=dict(storm.tally.why), slowest_answer_s=max(storm.tally.denied), free_after_s=free_after
        )
        here.checker.assert_no_violations()
        assert len(storm.tally.unclear) <= 2, storm.tally.unclear  # two of ten, on a busy machine


def restarts(cluster: Cluster) -> Coroutine[Any, Any, None]:
    return asyncio.to_thread(cluster.restart, "kube-apiserver")


async def pauses(cluster: Cluster) -> None:
    cluster.pause("etcd")
    try:
        await asyncio.sleep(10)
    finally:
        cluster.resume("etcd")


@pytest.mark.parametrize("happens", [restarts, pauses], ids=["API server restarted", "etcd paused for 10 s"])
async def test_system_recovers_from_control_plane_failures(
    cluster: Cluster,
    kube: Kube,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    happens: Callable[[Cluster], Coroutine[Any, Any, None]],
) -> None:
    async with site(cluster, kube, tmp_path, **SHAPE, replicas=2) as here:
        await here.reconciler()
        await here.wait_until_offered()
        storm = Storm(here, clients=8)
        reaping = asyncio.create_task(storm.reap(0.5, forgives=True))
        coming = asyncio.create_task(storm.create(100, plain))
        await wait_until(lambda: evaluated(lambda: len(storm.tally.made) >= 10))
        await happens(cluster)
        started = time.monotonic()
        await wait_for_components(kube)
        back = time.monotonic() - started
        await asyncio.wait_for(coming, 300)
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        await wait_until(lambda: confirmed(here), seconds=60)
        free_after = await seconds_until_free(here, 60)
        report_figures(
            request,
            others_back_s=back,
            made=len(storm.tally.made),
            refused=dict(storm.tally.why),
            without_verdict=len(storm.tally.unclear),
            free_after_s=free_after,
        )
        here.checker.assert_no_violations()


async def test_replicas_with_clock_skew_never_reserve_a_gpu_twice(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    flags = ("--clock-skew", "5s")  # the slowest and the fastest clock differ by 10 s: the deadline is the default
    async with site(cluster, kube, tmp_path, **{**SHAPE, "flags": flags}) as here:
        for skew in (-5, 5, 0):
            await here.replica(skew=skew)
        await here.wait_until_reviewed()
        await here.reconciler()
        await here.wait_until_offered()
        storm = Storm(here, clients=16)
        reaping = asyncio.create_task(storm.reap(0.7))
        try:
            await asyncio.wait_for(storm.create(60, plain), 300)
        except TimeoutError:
            pytest.fail(f"{len(storm.tally.made)} made, {dict(storm.tally.why)}, {storm.tally.unclear[:3]}")
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)
        await wait_until(lambda: confirmed(here))
        free_after = await seconds_until_free(here, 60)
        report_figures(request, made=len(storm.tally.made), refused=dict(storm.tally.why), free_after_s=free_after)
        here.checker.assert_no_violations()
        assert {reason for _, reason in storm.tally.why} <= {"NoFreeDevice", "DeadlinePassed"}


@pytest.mark.defect("assigner-19")
async def test_reviews_cause_no_list_requests(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with site(cluster, kube, tmp_path, **SHAPE) as here, Proxy(cluster) as proxy:
        proxy.on("list", is_list, forward_unchanged)
        through = proxy.kubeconfig(tmp_path)
        await here.replica(through)
        await here.wait_until_reviewed()
        await here.reconciler(through)
        await here.wait_until_offered()
        first = proxy.applied["list"]
        assert first  # the lists at the start of watches
        gate = asyncio.Semaphore(16)

        async def shown() -> None:
            async with gate:
                await kube.create(PODS, pod("shown", gpus=1), here.namespace, dryRun="All")

        await asyncio.gather(*(shown() for _ in range(500)))
        storm = Storm(here, clients=8)
        await asyncio.wait_for(storm.create(len(here.gpus), plain), 120)
        await wait_until(lambda: confirmed(here), seconds=LEAK_LIMIT)
        await seconds_until_free(here)
        report_figures(request, lists_at_the_start=first, lists_by_516_reviews=proxy.applied["list"] - first)
        here.checker.assert_no_violations()
        # A watch may have started late, or again.
        assert proxy.applied["list"] - first <= first
