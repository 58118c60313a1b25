"""Replicas are replaced one by one, as by a Deployment, while pods are reviewed."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import PODS, ApiError, Kube, pod
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, site

# Shorter than the chart's `preStop: {sleep: …}`: until then a replica that will stop gets no new connection.
PRE_STOP = 1.0
# Requests in flight and idle connections end long before `--drain-timeout`.
GRACE = 30.0


async def created(here: Site, number: int, lost: list[str], counts: list[int]) -> None:
    for turn in itertools.count():
        try:
            await here.kube.create(PODS, pod(f"p-{number}-{turn}", gpus=1), here.namespace, dryRun="All")
        except ApiError as exc:
            lost.append(str(exc))
        counts[number] += 1


async def test_rolling_update_loses_no_review(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with site(cluster, kube, tmp_path, nodes=1, gpus=4, name="rolling", replicas=2) as here:
        await here.wait_until_offered()
        lost: list[str] = []
        counts = [0] * 6
        load = [asyncio.ensure_future(created(here, number, lost, counts)) for number in range(len(counts))]
        try:
            for old in list(here.replicas):
                await here.replica()  # ready before the old one stops
                before = sum(counts)
                here.balancer.servers.remove(old)
                await asyncio.sleep(PRE_STOP)
                old.process.terminate()
                assert await asyncio.wait_for(old.process.wait(), GRACE) == 0, old.log.read_text()[-2000:]
                assert sum(counts) > before
        finally:
            for task in load:
                task.cancel()
            for task in load:
                with suppress(asyncio.CancelledError):
                    await task
        report_figures(request, creations=sum(counts), lost=len(lost))
        assert lost == []
