"""Forged reviews, and creations that fail after gpuwarden's webhook: their effect on others."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.forger import forging
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import PODS, RESOURCE_QUOTAS, ApiError, Kube, gone, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Site, site
from tests.e2e.storm import GRACE
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.webhook_configurations import is_reviewed

ATTACK_SECONDS = 20.0
# The number of concurrent reviews or creations of an attacker.
AT_ONCE = 8
# How long a review holds GPUs in a cluster.
HOLD_SECONDS = 15.0


async def creations(kube: Kube, namespace: str, until: float, answers: Counter[str]) -> None:
    """A tenant that repeatedly needs one GPU for a moment."""
    while time.monotonic() < until:
        try:
            made = await kube.create(PODS, pod(None, gpus=1, terminationGracePeriodSeconds=GRACE), namespace)
        except ApiError as exc:
            answers[exc.reason] += 1
            await asyncio.sleep(0.05)
        else:
            answers["created"] += 1
            await kube.delete(PODS, made["metadata"]["name"], namespace)
            await gone(kube, PODS, made["metadata"]["name"], namespace)


async def free_gpus(here: Site) -> int:
    found = [await here.kube.get(GPU_NODES, node) for node in here.nodes]
    return sum(one.get("status", {}).get("free", 8) for one in found)


@pytest.mark.parametrize("names_uids", [False, True], ids=["mutate", "mutate-and-validate"])
async def test_forged_reviews_of_an_unknown_namespace_deny_no_creation_of_a_tenant(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, *, names_uids: bool
) -> None:
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=8, replicas=2, name="forged") as here,
        forging(here) as thief,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        for _ in range(AT_ONCE):
            await thief.mutate("made-up")
        first = Counter(thief.answers)
        left = await free_gpus(here)
        until = time.monotonic() + ATTACK_SECONDS
        tenant: Counter[str] = Counter()
        floods = (thief.flood("made-up", until, names_uids=names_uids) for _ in range(AT_ONCE))
        await asyncio.gather(creations(kube, here.namespace, until, tenant), *floods)
        report_figures(request, first=dict(first), free=left, tenant=dict(tenant), forged=dict(thief.answers))
        assert left >= len(here.gpus) // 2
        assert set(tenant) == {"created"}
        assert tenant["created"] >= 10
        here.checker.assert_no_violations()


async def test_forged_reviews_of_a_namespace_do_not_delay_its_queued_pods(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They look like the tenant's own reviews. Its pods wait behind the gate, and no forged review can take what the
    reconciler reserves for existing pods."""
    flags = ("--when-unavailable", "queue")
    shape: dict[str, Any] = {"nodes": 1, "gpus": 8, "replicas": 2, "flags": flags, "name": "forged"}
    async with site(cluster, kube, tmp_path, **shape) as here, forging(here) as thief:
        await here.reconciler()
        await here.wait_until_offered()
        until = time.monotonic() + ATTACK_SECONDS
        tenant: Counter[str] = Counter()
        floods = [asyncio.create_task(thief.flood(here.namespace, until)) for _ in range(AT_ONCE)]
        await wait_until(lambda: free_gpus(here), lambda free: free < 8)
        made = [await kube.create(PODS, pod(None, gpus=1), here.namespace) for _ in range(4)]
        started = time.monotonic()
        names = {one["metadata"]["name"] for one in made}
        await wait_until(lambda: running(kube, here.namespace), lambda seen: names <= seen, seconds=ATTACK_SECONDS)
        served = time.monotonic() - started
        await asyncio.gather(*floods)
        report_figures(request, tenant=dict(tenant), forged=dict(thief.answers), served_s=served)
        here.checker.assert_no_violations()


async def test_forged_reviews_of_a_namespace_affect_only_that_namespace_while_they_last(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the defaults of a cluster, unauthenticated callers and no queue: the tenant that the forged reviews name is
    denied GPUs while they come and one deadline longer. No other tenant is denied."""
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=8, replicas=2, name="forged") as here,
        new_namespace(kube, OPT_IN) as other,
        forging(here) as thief,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        await wait_until(lambda: is_reviewed(kube, other))
        until = time.monotonic() + ATTACK_SECONDS
        named: Counter[str] = Counter()
        neighbour: Counter[str] = Counter()
        floods = [asyncio.create_task(thief.flood(here.namespace, until)) for _ in range(AT_ONCE)]
        await wait_until(lambda: free_gpus(here), lambda free: free < 8)
        left = await free_gpus(here)
        await asyncio.gather(
            creations(kube, here.namespace, until, named), creations(kube, other, until, neighbour), *floods
        )
        ended = time.monotonic()
        after: Counter[str] = Counter()
        while not after["created"]:
            await creations(kube, here.namespace, time.monotonic() + 0.1, after)
        recovered = time.monotonic() - ended
        await wait_until(lambda: free_gpus(here), lambda free: free == 8)
        figures = {"named": dict(named), "neighbour": dict(neighbour), "forged": dict(thief.answers)}
        report_figures(request, **figures, recovered_s=recovered, all_free_s=time.monotonic() - ended)
        assert left >= len(here.gpus) // 2
        assert set(neighbour) == {"created"}
        assert neighbour["created"] >= 5
        # The reservation of the last forged review, the next pass of the ledger, and the creation that gets the GPU.
        assert recovered < HOLD_SECONDS + 5
        here.checker.assert_no_violations()


async def running(kube: Kube, namespace: str) -> set[str]:
    found = await kube.list(PODS, namespace)
    return {one["metadata"]["name"] for one in found if one.get("status", {}).get("phase") == "Running"}


async def test_creations_refused_by_a_quota_do_not_hold_gpus(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=8, replicas=2, name="quota") as here,
        new_namespace(kube, OPT_IN) as poor,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        await kube.create(RESOURCE_QUOTAS, quota, poor)
        await wait_until(lambda: kube.get(RESOURCE_QUOTAS, "none", poor), lambda one: "hard" in one.get("status", {}))
        await wait_until(lambda: is_reviewed(kube, poor))
        until = time.monotonic() + ATTACK_SECONDS
        attacker: Counter[str] = Counter()
        tenant: Counter[str] = Counter()
        attack = [asyncio.create_task(creations(kube, poor, until, attacker)) for _ in range(AT_ONCE)]
        await wait_until(lambda: free_gpus(here), lambda free: free < 8)
        await creations(kube, here.namespace, until, tenant)
        await asyncio.gather(*attack)
        report_figures(request, tenant=dict(tenant), attacker=dict(attacker))
        assert not attacker["created"]
        assert attacker["Forbidden"]
        assert set(tenant) == {"created"}
        assert tenant["created"] >= 10


async def test_creations_refused_by_a_quota_without_a_reconciler_count_as_orphans(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Only this limit applies, as with authenticated callers."""
    unlimited = ("--pending-per-namespace", "0", "--pending-share", "0", "--orphans-per-namespace", "2")
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=8, replicas=1, name="piled", flags=unlimited) as here,
        new_namespace(kube, OPT_IN) as poor,
    ):
        reconciler = await here.reconciler()
        await here.wait_until_offered()
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        await kube.create(RESOURCE_QUOTAS, quota, poor)
        await wait_until(lambda: kube.get(RESOURCE_QUOTAS, "none", poor), lambda one: "hard" in one.get("status", {}))
        await wait_until(lambda: is_reviewed(kube, poor))
        await reconciler.kill()

        async def asked() -> str:
            try:
                await kube.create(PODS, pod("more", 1), poor, dryRun="All")
            except ApiError as exc:
                return exc.message
            return "created"

        for _ in range(2):
            with pytest.raises(ApiError, match="exceeded quota"):
                await kube.create(PODS, pod(None, gpus=1), poor)
        assert "exceeded quota" in await asked()
        await wait_until(asked, lambda said: "held by pods that are gone and may still run" in said, 60)
        assert await free_gpus(here) == 6
        await kube.create(PODS, pod("another", 1), here.namespace)
