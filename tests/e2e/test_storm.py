"""Many clients, several replicas, and pods that are created and deleted, checked by the pods alone."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import DEPLOYMENTS, EVENTS, JOBS, PODS, Kube, deployment, job, pod, wait_until
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.processes import Site, site
from tests.e2e.storm import GRACE, SHORT_LIVED, Storm, mixed, plain

REPLICAS = 4
GPUS = 8
# The deadline of a pending reservation and, for other replicas, the clock skew; then a pass of the reconciler and its
# writes.
DEADLINE, SKEW, SLACK = 20, 1, 10
# On a small machine a review may run out of time; the error says so.
CLEAR = {(429, "NoFreeDevice"), (503, "DeadlinePassed"), (409, "ReservationExpired")}
# Names of five random characters collide sometimes: the API server then starts again with another UID
# (test_generated_names).
NAME_TAKEN = (409, "ReservationConflict")
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
# Whole tests; a machine with two cores performs 15 to 40 creations per second in total.
PATIENCE = 120.0


@frozen
class Size:
    nodes: int
    pods: int
    seconds: float


SIZES = [
    pytest.param(Size(6, 300, 300), id="300 pods"),
    pytest.param(Size(50, 10_000, 3000), id="10000 pods", marks=pytest.mark.long),
]


async def evaluated(look: Callable[[], object]) -> bool:
    return bool(look())


async def seconds_until_free(here: Site) -> float:
    """Seconds from the end of the last pod until no reservation is left."""
    await here.free_all()
    await wait_until(lambda: evaluated(lambda: not here.checker.live_pods), seconds=PATIENCE)
    started = time.monotonic()
    await wait_until(here.held, lambda held: not held, seconds=DEADLINE + SKEW + SLACK)
    return time.monotonic() - started


@pytest.mark.parametrize("size", SIZES)
async def test_many_pods_use_every_gpu_and_never_share_one(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, size: Size
) -> None:
    shape: dict[str, Any] = {"nodes": size.nodes, "gpus": GPUS, "replicas": REPLICAS, "flags": FLAGS, "name": "storm"}
    async with site(cluster, kube, tmp_path, **shape) as here, asyncio.timeout(size.seconds):
        await here.reconciler()
        slots = len(here.gpus)
        storm = Storm(here)
        started = time.monotonic()
        await storm.create(slots, plain)
        await wait_until(lambda: evaluated(here.all_used))
        filled = time.monotonic() - started
        report_figures(request, gpus=slots, filled_s=filled, refused=dict(storm.tally.why))

        reaping = asyncio.create_task(storm.reap())
        churned = time.monotonic()
        await storm.create(size.pods - 2 * slots, mixed)
        rate = (size.pods - 2 * slots) / (time.monotonic() - churned)
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        report_figures(request, churned=size.pods - 2 * slots, rate=rate, refused=dict(storm.tally.why))

        again = time.monotonic()
        topping = asyncio.create_task(storm.create(slots, plain))
        await wait_until(lambda: evaluated(here.all_used), seconds=PATIENCE)
        refilled = time.monotonic() - again
        reaping = asyncio.create_task(storm.reap())
        await topping
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)

        freed_after = await seconds_until_free(here)
        conflicts = sum([await one.metric("gpuwarden_ledger_conflicts_total") for one in here.replicas])
        verdicts = [await one.metric("gpuwarden_verdicts_total") for one in here.replicas]
        report_figures(
            request,
            creations=len(storm.tally.made),
            gpus=slots,
            filled_s=filled,
            churn_per_s=rate,
            p50_ms=1000 * percentile(storm.tally.made, 0.5),
            p99_ms=1000 * percentile(storm.tally.made, 0.99),
            refused=dict(storm.tally.why),
            refused_p99_ms=1000 * percentile(storm.tally.denied, 0.99),
            conflicts=int(conflicts),
            verdicts_by_replica=[int(one) for one in verdicts],
            refilled_s=refilled,
            free_after_the_last_pod_s=freed_after,
            violations=len(here.checker.violations),
            judges_lists=here.checker.lists,
            unclear=len(storm.tally.unclear),
        )
        here.checker.assert_no_violations()
        assert len(storm.tally.unclear) <= size.pods // 100, storm.tally.unclear[:5]
        assert set(storm.tally.why) <= CLEAR | {NAME_TAKEN}
        assert storm.tally.why[NAME_TAKEN] <= 3
        assert len(here.checker.seen) == len(storm.tally.made) == size.pods
        assert all(verdicts)


@pytest.mark.parametrize(
    ("nodes", "pods"), [(50, 300), pytest.param(500, 4000, marks=pytest.mark.long)], ids=["300", "4000"]
)
async def test_job_with_many_pods_stays_within_the_pending_limits(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, nodes: int, pods: int
) -> None:
    """Callers are not authenticated, as in every other test here."""
    shape: dict[str, Any] = {"nodes": nodes, "gpus": GPUS, "replicas": 2, "name": "job"}
    async with site(cluster, kube, tmp_path, **shape) as here, asyncio.timeout(2 * PATIENCE + pods):
        await here.reconciler()
        await here.wait_until_offered()
        started = time.monotonic()
        await kube.create(JOBS, job("large", pods=pods, gpus=1, annotations=SHORT_LIVED), here.namespace)
        await wait_until(
            lambda: kube.get(JOBS, "large", here.namespace),
            lambda one: one["status"].get("succeeded") == pods,
            seconds=PATIENCE + pods,
        )
        refused = {reason: await verdicts(here, reason) for reason in ("PendingFull", "NamespaceFull", "Admitted")}
        report_figures(request, pods=pods, seconds=time.monotonic() - started, **refused)
        assert (refused["PendingFull"], refused["NamespaceFull"]) == (0, 0)
        here.checker.assert_no_violations()
        await kube.delete(JOBS, "large", here.namespace)


async def verdicts(here: Site, reason: str) -> int:
    series = f'gpuwarden_verdicts_total{{reason="{reason}"}}'
    return int(sum([await one.metric(series) for one in here.replicas]))


AT_ONCE = pytest.mark.parametrize("pods", [16, 256, pytest.param(4000, marks=pytest.mark.long)])


@AT_ONCE
async def test_many_pods_on_full_nodes_are_denied_quickly_and_created_when_gpus_are_free(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, pods: int
) -> None:
    shape: dict[str, Any] = {"nodes": 4, "gpus": GPUS, "replicas": 2, "flags": FLAGS, "name": "full"}
    async with site(cluster, kube, tmp_path, **shape) as here, asyncio.timeout(2 * PATIENCE + pods):
        await here.reconciler()
        storm = Storm(here)
        await storm.create(len(here.gpus), plain)
        await wait_until(lambda: evaluated(here.all_used))

        onto_full = Storm(here, clients=pods)
        refusals = await asyncio.gather(*(onto_full.try_create(plain(onto_full.rng)) for _ in range(pods)))
        assert not any(refusals)
        assert (429, "NoFreeDevice") in onto_full.tally.why
        assert set(onto_full.tally.why) <= CLEAR
        assert len(onto_full.tally.unclear) <= pods // 50, onto_full.tally.unclear[:5]

        waiting = Storm(here, clients=pods)
        short = pod(None, gpus=1, annotations=SHORT_LIVED, terminationGracePeriodSeconds=GRACE)
        coming = asyncio.create_task(waiting.create(pods, lambda _: short))
        started = time.monotonic()
        await here.free_all()
        await coming
        served = time.monotonic() - started
        report_figures(
            request,
            refused_p50_ms=1000 * percentile(onto_full.tally.denied, 0.5),
            refused_last_ms=1000 * max(onto_full.tally.denied),
            served_s=served,
            refused_meanwhile=sum(waiting.tally.why.values()),
            free_after_the_last_pod_s=await seconds_until_free(here),
        )
        here.checker.assert_no_violations()
        assert len(waiting.tally.unclear) <= pods // 50, waiting.tally.unclear[:5]
        assert len(waiting.tally.made) == pods


@pytest.mark.parametrize("pods", [16, pytest.param(256, marks=pytest.mark.long)])
async def test_controllers_create_denied_pods_when_gpus_are_free(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, pods: int
) -> None:
    shape: dict[str, Any] = {"nodes": 4, "gpus": GPUS, "replicas": 2, "flags": FLAGS, "name": "full"}
    async with site(cluster, kube, tmp_path, **shape) as here, asyncio.timeout(2 * PATIENCE + 4 * pods):
        await here.reconciler()
        storm = Storm(here)
        await storm.create(len(here.gpus), plain)
        await wait_until(lambda: evaluated(here.all_used))
        holders = {one.name for one in here.checker.live_pods.values()}
        await kube.create(JOBS, job("later", pods=pods, gpus=1), here.namespace)
        await kube.create(DEPLOYMENTS, deployment("later", 4, gpus=1), here.namespace)
        await wait_until(lambda: kube.list(EVENTS, here.namespace, fieldSelector="reason=FailedCreate"))
        started = time.monotonic()
        for name in holders:
            await kube.delete(PODS, name, here.namespace)
        await wait_until(
            lambda: kube.get(JOBS, "later", here.namespace),
            lambda one: one["status"].get("succeeded") == pods,
            seconds=4 * pods + PATIENCE,
        )
        job_done = time.monotonic() - started
        await wait_until(
            lambda: kube.get(DEPLOYMENTS, "later", here.namespace),
            lambda one: one["status"].get("readyReplicas") == 4,
            seconds=PATIENCE,
        )
        report_figures(request, job_done_s=job_done, deployment_ready_s=time.monotonic() - started)
        here.checker.assert_no_violations()
        await kube.delete(DEPLOYMENTS, "later", here.namespace)
        await kube.delete(JOBS, "later", here.namespace)
