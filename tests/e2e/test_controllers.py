"""Pods that real controllers create and end: each has its own GPU, and failed creations leave no reservation."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    DEPLOYMENTS,
    JOBS,
    PODS,
    RESOURCE_QUOTAS,
    STATEFUL_SETS,
    ApiError,
    Kube,
    Raw,
    Resource,
    deployment,
    gone,
    job,
    pod,
    pod_in_phase,
    pods_in_phase,
    stateful_set,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Site, site

DEADLINE, SKEW = 4, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
LEAK_LIMIT = DEADLINE + SKEW + 5.0
ADMISSION = "apis/admissionregistration.k8s.io/v1"
POLICIES = Resource(ADMISSION, "validatingadmissionpolicies", is_namespaced=False)
POLICY_BINDINGS = Resource(ADMISSION, "validatingadmissionpolicybindings", is_namespaced=False)


@pytest.fixture
async def here(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    """Two replicas, a reconciler and eight GPUs."""
    shape: dict[str, Any] = {"nodes": 2, "gpus": 4, "replicas": 2, "flags": FLAGS, "name": "ctrl"}
    async with site(cluster, kube, tmp_path, **shape) as made:
        await made.reconciler()
        await made.wait_until_offered()
        yield made
        made.checker.assert_no_violations()


def gpus_of(one: Raw) -> list[str]:
    return list(one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(","))


async def holders(here: Site) -> set[str]:
    return {entry.get("uid", "") for entry in (await here.held()).values() if entry["phase"] == "finalized"}


async def made(here: Site, one: Raw) -> bool:
    """Whether the pod could be created."""
    try:
        await here.kube.create(PODS, one, here.namespace)
    except ApiError as error:
        if error.reason != "NoFreeDevice":
            raise
        return False
    return True


async def nothing_held(here: Site, seconds: float = LEAK_LIMIT) -> float:
    """Waits until no reservation is left; the time that it took."""
    started = time.monotonic()
    await wait_until(here.held, lambda held: not held, seconds)
    return time.monotonic() - started


async def each_has_its_own(here: Site, pods: list[Raw]) -> None:
    gpus = [uuid for one in pods for uuid in gpus_of(one)]
    assert len(gpus) == len(set(gpus))
    assert all(one["spec"]["nodeName"] == one["metadata"]["annotations"]["gpuwarden.io/node"] for one in pods)
    expected = {one["metadata"]["uid"] for one in pods}
    await wait_until(lambda: holders(here), lambda found: found == expected)


async def test_pods_with_generated_names_each_get_a_gpu(here: Site) -> None:
    await asyncio.gather(*(here.kube.create(PODS, pod(None, gpus=2), here.namespace) for _ in range(4)))
    await each_has_its_own(here, await pods_in_phase(here.kube, here.namespace, 4, "Running"))


async def test_a_deployment_runs_and_is_scaled_down(here: Site) -> None:
    await here.kube.create(DEPLOYMENTS, deployment("infer", 5, gpus=1), here.namespace)
    await each_has_its_own(here, await pods_in_phase(here.kube, here.namespace, 5, "Running"))
    await here.kube.patch(DEPLOYMENTS, "infer", {"spec": {"replicas": 2}}, here.namespace)
    await each_has_its_own(here, await pods_in_phase(here.kube, here.namespace, 2, "Running"))


async def test_completed_job_releases_its_gpus(here: Site) -> None:
    await here.kube.create(JOBS, job("train", pods=6, gpus=1), here.namespace)
    await wait_until(
        lambda: here.kube.get(JOBS, "train", here.namespace), lambda one: one["status"].get("succeeded") == 6
    )
    assert len(await here.kube.list(PODS, here.namespace)) == 6
    await nothing_held(here)


async def test_deleted_pod_of_a_stateful_set_is_replaced(here: Site) -> None:
    await here.kube.create(STATEFUL_SETS, stateful_set("shard", 3, gpus=1), here.namespace)
    await wait_until(
        lambda: here.kube.get(STATEFUL_SETS, "shard", here.namespace),
        lambda one: one["status"].get("readyReplicas") == 3,
    )
    before = await here.kube.get(PODS, "shard-1", here.namespace)
    await here.kube.delete(PODS, "shard-1", here.namespace)
    await wait_until(
        lambda: here.kube.find(PODS, "shard-1", here.namespace),
        lambda one: bool(one) and one["metadata"]["uid"] != before["metadata"]["uid"],  # type: ignore[index]
    )
    await each_has_its_own(here, await pods_in_phase(here.kube, here.namespace, 3, "Running"))


async def settled(here: Site) -> dict[str, str]:
    """The versions of all GPUNodes, once all pending writes are done."""
    while True:
        before = await here.versions()
        await asyncio.sleep(2)
        if await here.versions() == before:
            return before


async def test_a_dry_run_writes_nothing(here: Site) -> None:
    before = await settled(here)
    for content in (pod("dry", gpus=2), pod(None, gpus=1)):
        made = await here.kube.create(PODS, content, here.namespace, dryRun="All")
        assert gpus_of(made)
    await here.kube.create(JOBS, job("dry", pods=2, gpus=1), here.namespace, dryRun="All")
    await asyncio.sleep(1)  # time for a late write
    assert await here.versions() == before
    assert not await here.kube.list(PODS, here.namespace)


async def test_pods_refused_by_a_quota_leave_no_reservation_after_the_deadline(
    here: Site, request: pytest.FixtureRequest
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await here.kube.create(RESOURCE_QUOTAS, quota, here.namespace)
    await wait_until(
        lambda: here.kube.get(RESOURCE_QUOTAS, "none", here.namespace), lambda one: "hard" in one.get("status", {})
    )
    for _ in range(4):  # a reconciler that has just started treats them as orphans for their grace period
        with pytest.raises(ApiError, match="exceeded quota"):
            await here.kube.create(PODS, pod(None, gpus=1, terminationGracePeriodSeconds=1), here.namespace)
    assert await here.held(), "a pod that a quota refuses was reserved for: the quota is asked last"
    report_figures(request, held_s=await nothing_held(here))


async def test_pods_refused_by_a_policy_leave_no_reservation_after_the_deadline(
    here: Site, request: pytest.FixtureRequest
) -> None:
    """The policy runs after the mutating and before the validating webhooks, so gpuwarden never learns a UID."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    validation = {"expression": "!object.metadata.?annotations['test/refused'].hasValue()", "message": "not here"}
    spec = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]}, "validations": [validation]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": here.namespace}}
    binding = {
        "policyName": "e2e-refused",
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": selector},
    }
    await here.kube.create(POLICIES, {"metadata": {"name": "e2e-refused"}, "spec": spec})
    await here.kube.create(POLICY_BINDINGS, {"metadata": {"name": "e2e-refused"}, "spec": binding})
    try:
        refused = {"test/refused": "yes"}
        await wait_until(lambda: is_refused(here, pod("probe", annotations=refused)))
        for _ in range(2):
            with pytest.raises(ApiError, match="not here"):
                await here.kube.create(PODS, pod(None, gpus=1, annotations=refused), here.namespace)
        assert await here.held(), "a pod that a policy refuses was reserved for: policies are asked last"
        report_figures(request, held_s=await nothing_held(here))
    finally:
        await here.kube.delete(POLICY_BINDINGS, "e2e-refused")
        await here.kube.delete(POLICIES, "e2e-refused")


async def is_refused(here: Site, content: Raw) -> bool:
    try:
        await here.kube.create(PODS, content, here.namespace, dryRun="All")
    except ApiError:
        return True
    return False


async def test_evicted_pod_releases_its_gpu(here: Site, request: pytest.FixtureRequest) -> None:
    await here.kube.create(PODS, pod("evicted", gpus=1), here.namespace)
    await pod_in_phase(here.kube, here.namespace, "evicted", "Running")
    await wait_until(lambda: holders(here), lambda found: len(found) == 1)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "evicted"}}
    await here.kube.post(PODS, "evicted", "eviction", eviction, here.namespace)
    await gone(here.kube, PODS, "evicted", here.namespace)
    report_figures(request, held_s=await nothing_held(here))


async def test_a_terminating_pod_keeps_its_gpu_until_its_containers_have_ended(here: Site) -> None:
    """A finalizer keeps the object, but not the GPU."""
    whole = pod("stays", gpus=4, annotations={"kubelet.test/stops-after": "1h"})
    whole["metadata"]["finalizers"] = ["example.test/stays"]
    other = pod("other", gpus=4)
    await here.kube.create(PODS, whole, here.namespace)
    await here.kube.create(PODS, other, here.namespace)
    await pods_in_phase(here.kube, here.namespace, 2, "Running")
    await wait_until(lambda: holders(here), lambda found: len(found) == 2)
    await here.kube.delete(PODS, "stays", here.namespace)
    await wait_until(
        lambda: here.kube.get(PODS, "stays", here.namespace), lambda one: "deletionTimestamp" in one["metadata"]
    )
    await asyncio.sleep(DEADLINE + SKEW + 1)  # longer than a pending reservation lasts
    with pytest.raises(ApiError) as refused:
        await here.kube.create(PODS, pod(None, gpus=1), here.namespace)
    assert (refused.value.status, refused.value.reason) == (429, "NoFreeDevice")
    ends = {"metadata": {"annotations": {"kubelet.test/stops-after": "0s"}}}
    await here.kube.patch(PODS, "stays", ends, here.namespace)
    await pod_in_phase(here.kube, here.namespace, "stays", "Failed")
    await wait_until(lambda: holders(here), lambda found: len(found) == 1)
    await wait_until(lambda: made(here, pod("next", gpus=4)))  # the replica's watch is a moment late
    await here.kube.patch(PODS, "stays", {"metadata": {"finalizers": None}}, here.namespace)
    await gone(here.kube, PODS, "stays", here.namespace)


async def test_deleted_namespace_releases_gpus_only_after_its_pods_have_ended(
    here: Site, request: pytest.FixtureRequest
) -> None:
    on_each = [{"nodeSelector": {"kubernetes.io/hostname": node}} for node in here.nodes]
    slow, unbound = pod("slow", gpus=4, **on_each[0]), pod("unbound", gpus=3, schedulerName="nobody", **on_each[1])
    slow["metadata"]["annotations"] = {"kubelet.test/stops-after": "6s"}
    async with new_namespace(here.kube, OPT_IN) as doomed:
        await here.kube.create(PODS, slow, doomed)
        await pod_in_phase(here.kube, doomed, "slow", "Running")
        await here.kube.create(PODS, unbound, doomed)
        await here.kube.create(PODS, pod("quick", gpus=1, **on_each[1]), doomed)
        await pod_in_phase(here.kube, doomed, "quick", "Running")
        await wait_until(lambda: holders(here), lambda found: len(found) == 3)
    # The second node is free while the first one is still in use: GPUs in use are not assigned.
    await wait_until(lambda: here.held_on(here.nodes[1]), lambda held: not held)
    async with asyncio.timeout(60):
        while await here.kube.find(PODS, "slow", doomed) is not None:
            with suppress(ApiError):
                await here.kube.create(PODS, pod(None, gpus=4), here.namespace)
            await asyncio.sleep(0.2)
    await wait_until(lambda: here.held_on(here.nodes[0]), lambda held: doomed not in namespaces_of(held))
    await wait_until(lambda: made(here, pod(None, gpus=4, **on_each[0])))
    await wait_until(lambda: holders(here), lambda found: len(found) == 2)
    report_figures(request, gpus_used_again=len(here.checker.gpus))


def namespaces_of(held: dict[str, Raw]) -> set[str]:
    return {str(entry["namespace"]) for entry in held.values()}
