"""Collisions of names that the API server generates: it starts again with another name and another UID, and calls only
validating webhooks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import JOBS, PODS, VALIDATING, ApiError, Kube, Raw, job, pod, wait_until
from tests.e2e.processes import Site, site
from tests.e2e.storm import SHORT_LIVED
from tests.e2e.webhook_configurations import MUTATED, hook, reviewer

DEADLINE, SKEW = 4, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")


@asynccontextmanager
async def names_taken(here: Site, directory: Path, times: int) -> AsyncIterator[list[str]]:
    """Creates a pod of the generated name first, `times` times; yields all these names."""
    made_up: list[str] = []

    async def answer(review: Raw) -> Raw:
        name, prefix = review["object"]["metadata"]["name"], review["object"]["metadata"].get("generateName")
        if prefix:
            made_up.append(name)
            if len(made_up) <= times and not review.get("dryRun"):
                await here.kube.create(PODS, pod(name), here.namespace)
        return {}

    configuration = f"taken-{here.namespace}"
    async with reviewer(directory, answer) as (client, ca):
        selector = {"kubernetes.io/metadata.name": here.namespace}
        one = hook("taken.example.test", client, "/review", ca, selector, MUTATED)
        await here.kube.create(VALIDATING, {"metadata": {"name": configuration}, "webhooks": [one]})
        try:
            await wait_until(lambda: acts(here, made_up))
            made_up.clear()
            yield made_up
        finally:
            await here.kube.delete(VALIDATING, configuration)


async def acts(here: Site, made_up: list[str]) -> bool:
    await here.kube.create(PODS, pod(), here.namespace, dryRun="All")
    return bool(made_up)


async def test_pod_with_a_colliding_generated_name_is_denied_and_recreated_by_its_controller(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    shape = {"nodes": 1, "gpus": 1, "replicas": 2}
    async with site(cluster, kube, tmp_path, **shape, flags=FLAGS, name="names") as here:
        await here.reconciler()
        async with names_taken(here, tmp_path, 1) as made_up:
            with pytest.raises(ApiError) as refused:
                await kube.create(PODS, pod(gpus=1, terminationGracePeriodSeconds=1), here.namespace)
            assert (refused.value.status, refused.value.reason) == (409, "ReservationConflict")
            assert "create the pod again if its generated name was taken" in refused.value.message
            assert len(set(made_up)) == 2
        await wait_until(here.held, lambda held: not held, DEADLINE + SKEW + 5)
        async with names_taken(here, tmp_path, 1) as made_up:
            await kube.create(JOBS, job("train", 1, gpus=1, annotations=SHORT_LIVED), here.namespace)
            await wait_until(
                lambda: kube.get(JOBS, "train", here.namespace), lambda one: one["status"].get("succeeded") == 1
            )
            assert len(made_up) >= 3
        await wait_until(here.held, lambda held: not held, DEADLINE + SKEW + 5)
        here.checker.assert_no_violations()
