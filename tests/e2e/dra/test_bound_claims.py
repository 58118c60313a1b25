"""Pods whose GPUs kube-scheduler chooses: real webhooks, reconciler and scheduler, on simulated nodes whose GPUs a DRA
driver publishes."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import BINDING_ENDS, resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    AllocatedPair,
    bound,
    claim_of_pod,
    claiming_pod,
    ended,
    marked_for_deletion,
    pairs_of,
    proof_devices,
    refused_by_scheduler,
)
from tests.e2e.dra.test_reserved_claims import HASH, LEASES, A, B, Claims, claims_site
from tests.e2e.kube import (
    EVENTS,
    NAMESPACES,
    PODS,
    STATEFUL_SETS,
    ApiError,
    Kube,
    Raw,
    Resource,
    pod,
    stateful_set,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, bindings_refused, reconciler_account
from tests.e2e.test_ledger import GPU_NODES
from webhook.core.device import CLAIMED
from webhook.core.pod_claims import own_claim_of
from webhook.core.proof_claims import CLAIM_LABELS
from webhook.core.proof_devices import MAPPED
from webhook.kube.install.policies import Installation, dra, policies
from webhook.runtime.clock import utc_now

OTHER_HASH = "sha256:bb22"
QUOTAS = Resource("api/v1", "resourcequotas")
BIND = ("--reserve", "bind", "--native-templates", "true", "--on-evidence-lost", "evict")
TEMPLATE = "gpuwarden-1-aa11"
OWN_ALLOCATIONS = "gpuwarden-own-allocations"


@pytest.fixture
async def claims(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Claims]:
    async with claims_site(cluster, kube, tmp_path, BIND) as found:
        await wait_until(lambda: kube.find(RESOURCE_CLAIM_TEMPLATES, TEMPLATE, found.namespace))
        # Without their ends the API server allows no allocation.
        await wait_until(lambda: kube.find(BINDING_ENDS, "gpuwarden"), lambda ends: {A, B} <= proven_nodes(ends))
        yield found


def proven_nodes(ends: Raw | None) -> set[str]:
    nodes = (ends or {}).get("spec", {}).get("nodes") or {}
    return {node for node, end in nodes.items() if datetime.fromisoformat(end) > utc_now()}


def asking(name: str, gpus: int = 1, hashes: str = HASH, labels: Raw | None = None, **spec: Any) -> Raw:
    made: Raw = pod(name, gpus, {"gpuwarden.io/required-hash": hashes}, **spec)
    made["metadata"]["labels"] = dict(labels or {})
    return made


async def pairs(claims: Claims, name: str) -> list[AllocatedPair]:
    """The pod's pairs once it runs, each of one GPU of the pod's node."""
    found = await claims.runs(name)
    named = own_claim_of(found["spec"])
    where = claims.namespace
    claim = await (claims.kube.get(RESOURCE_CLAIMS, named, where) if named else claim_of_pod(claims.kube, where, name))
    made = await pairs_of(claims.kube, claim)
    assert all(one.gpu == one.proof for one in made)
    assert {one.node for one in made} == {found["spec"]["nodeName"]}
    return made


async def test_all_demands_get_proven_gpus_and_nothing_is_reserved(claims: Claims, kube: Kube) -> None:
    mapped = asking("mapped-0", 1, labels={"apps.kubernetes.io/pod-index": "0"})
    mapped["metadata"]["annotations"]["gpuwarden.io/gpu-map"] = f"0={B}:GPU-{B}-1"
    model = {"gpuwarden.io/gpu.model": "NVIDIA-H100-80GB-HBM3"}
    wanted = [asking("simple"), asking("either", hashes=f"{OTHER_HASH},{HASH}"), asking("model", labels=model), mapped]
    for one in wanted[::-1]:
        made = await kube.create(PODS, one, claims.namespace)
        assert [*made["metadata"]["annotations"]].count("gpuwarden.io/reservation-id") == 0
        assert "affinity" not in made["spec"] or one is mapped
        (container,) = made["spec"]["containers"]
        assert container["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
        assert container["resources"]["claims"] == [{"name": "gpuwarden"}]
        assert "limits" not in container["resources"] or not container["resources"]["limits"]
        await claims.runs(one["metadata"]["name"])
    given = {one["metadata"]["name"]: await pairs(claims, one["metadata"]["name"]) for one in wanted}
    assert [one.gpu for one in given["mapped-0"]] == [f"GPU-{B}-1"]
    assert len({one.gpu for many in given.values() for one in many}) == 4
    assert await claims.here.held() == {}
    assert await claimed(kube) == {one.gpu for many in given.values() for one in many}
    await assert_no_other_claim(claims, await claims.get("either"))
    await assert_grace_is_limited(claims, "either")
    # A fifth pod waits until a GPU is free.
    await kube.create(PODS, asking("fifth"), claims.namespace)
    await refused_by_scheduler(kube, claims.namespace, "fifth")
    await claims.gone("either")
    assert await pairs(claims, "fifth") == given["either"]
    for name in ("fifth", "simple", "model", "mapped-0"):
        await claims.gone(name)
    await abandoned(claims)
    for name in ("first", "second"):
        await kube.create(PODS, asking(name, 2), claims.namespace)
    assert len({one.gpu for name in ("first", "second") for one in await pairs(claims, name)}) == 4
    assert await claims.here.held() == {}


@pytest.fixture
async def elsewhere(kube: Kube) -> AsyncIterator[str]:
    """Another opted-in namespace."""
    async with emptied_namespace(kube, OPT_IN) as namespace:
        yield namespace


def naming(name: str, annotations: Raw) -> Raw:
    """A pod with the annotations of a map, without a StatefulSet."""
    made = pod(name, 1, annotations)
    made["metadata"]["labels"] = {"apps.kubernetes.io/pod-index": "0"}
    return made


async def mode_of_proof(kube: Kube, node: str, gpu: str) -> str:
    return str((await proof_devices(kube, node))[gpu]["attributes"]["mode"]["string"])


async def test_gpu_of_a_map_is_kept_for_its_stateful_set(claims: Claims, kube: Kube, elsewhere: str) -> None:
    where, gpu = claims.namespace, f"GPU-{B}-1"
    await kube.patch(NAMESPACES, where, {"metadata": {"labels": {"gpuwarden.io/maps": "true"}}})
    mapped = {"gpuwarden.io/gpu-map": f"0={B}:{gpu}", "gpuwarden.io/required-hash": HASH}
    # Pods whose maps name the GPU before the set keeps it: one has it, another waits for it.
    await kube.create(PODS, naming("holder", mapped), where)
    assert [one.gpu for one in await pairs(claims, "holder")] == [gpu]
    await kube.create(PODS, naming("thief", mapped), elsewhere)
    await refused_by_scheduler(kube, elsewhere, "thief")
    await kube.create(STATEFUL_SETS, stateful_set("web", 1, 1, mapped), where)
    await wait_until(lambda: mode_of_proof(kube, B, gpu), lambda mode: mode.startswith(MAPPED))
    await claims.gone("holder")
    for name in ("one", "two", "three"):
        await kube.create(PODS, asking(name), where)
    assert [one.gpu for one in await pairs(claims, "web-0")] == [gpu]
    others = {one.gpu for name in ("one", "two", "three") for one in await pairs(claims, name)}
    assert others == {f"GPU-{A}-0", f"GPU-{A}-1", f"GPU-{B}-0"}
    await kube.create(PODS, asking("fourth"), where)
    await refused_by_scheduler(kube, where, "fourth")
    old = await claims.get("web-0")
    await kube.delete(PODS, "web-0", where)
    await wait_until(
        lambda: kube.find(PODS, "web-0", where),
        lambda found: found is not None and found["metadata"]["uid"] != old["metadata"]["uid"],
    )
    assert [one.gpu for one in await pairs(claims, "web-0")] == [gpu]
    assert not (await claims.get("fourth"))["spec"].get("nodeName")
    assert not (await kube.get(PODS, "thief", elsewhere))["spec"].get("nodeName")
    await ended(kube, elsewhere, "thief")
    # Without the set the GPU is for all.
    await kube.delete(STATEFUL_SETS, "web", where)
    assert [one.gpu for one in await pairs(claims, "fourth")] == [gpu]


async def test_pod_whose_binding_failed_is_bound_elsewhere_when_its_node_proves_another_hash(
    claims: Claims, kube: Kube, cluster: Cluster
) -> None:
    """kube-scheduler keeps what it has allocated, and a policy refuses it for good."""
    name, where = "unlucky", claims.namespace

    async def allocation() -> Raw | None:
        """What the claim has been allocated, while no pod uses it."""
        status = (await claim_of_pod(kube, where, name)).get("status") or {}
        return None if status.get("reservedFor") else status.get("allocation")

    async with reconciler_account(claims.here, cluster) as account, Kube(account) as reconciler:
        async with bindings_refused(kube, where, A):
            await kube.create(PODS, asking(name), where)
            first = pool_of(await wait_until(allocation))
            other = B if first == A else A
            proven, now = json.dumps({A: HASH, B: HASH}), json.dumps({first: OTHER_HASH, other: HASH})
            claims.here.flags = tuple(now if one == proven else one for one in claims.here.flags)
            await claims.here.reconcilers[-1].kill()
            await kube.delete(LEASES, "gpuwarden-reconcile", claims.here.own_namespace)
            await assert_only_takes_back(claims, reconciler, await claim_of_pod(kube, where, name))
            await claims.here.reconciler(account)
        found = await bound(kube, where, name, 60)
        assert found["spec"]["nodeName"] == other
        assert [one.node for one in await pairs(claims, name)] == [other]
        told = await kube.list(EVENTS, where, fieldSelector=f"involvedObject.name={name}")
        assert "AllocationCleared" in {one["reason"] for one in told}


def pool_of(allocation: Raw | None) -> str:
    assert allocation is not None
    (pool,) = {one["pool"] for one in allocation["devices"]["results"]}
    return str(pool)


async def assert_only_takes_back(claims: Claims, reconciler: Kube, claim: Raw) -> None:
    """The account of `reconcile` allocates nothing, and writes no consumer."""
    (policy,) = (
        one
        for one in dra(Installation(claims.here.own_namespace))
        if one["metadata"]["name"] == OWN_ALLOCATIONS and "validations" in one["spec"]
    )
    await claims.kube.patch(resource_of(policy), OWN_ALLOCATIONS, {"spec": policy["spec"]})
    (owner,) = claim["metadata"]["ownerReferences"]
    free = {"name": "free", "labels": CLAIM_LABELS, "ownerReferences": [owner]}
    await claims.kube.create(RESOURCE_CLAIMS, {"metadata": free, "spec": claim["spec"]}, claims.namespace)
    allocated = {"allocation": claim["status"]["allocation"]}
    consumer = {"reservedFor": [{"resource": "pods", "name": owner["name"], "uid": owner["uid"]}]}
    for name, change in (("free", allocated), ("free", allocated | consumer), (claim["metadata"]["name"], consumer)):
        place = RESOURCE_CLAIMS.path(claims.namespace, name, "status")

        async def refused(place: str = place, change: Raw = change) -> str:
            try:
                await reconciler.call("PATCH", place, {"status": change}, {"dryRun": "All"})
            except ApiError as exc:
                return exc.message
            return ""

        await wait_until(refused, lambda text: "may only take back the allocation" in text)
    await claims.kube.delete(RESOURCE_CLAIMS, "free", claims.namespace)


async def claimed(kube: Kube) -> set[str]:
    """The GPUs that `reconcile` marks as taken by claims, as soon as there are four."""

    async def look() -> set[str]:
        nodes = [await kube.get(GPU_NODES, name) for name in (A, B)]
        return {one["uuid"] for raw in nodes for one in raw["spec"]["devices"] if one.get("mismatch") == CLAIMED}

    return await wait_until(look, lambda found: len(found) == 4)


async def abandoned(claims: Claims) -> None:
    """Creations that are refused after gpuwarden has reviewed them."""
    quota = {"metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    await claims.kube.create(QUOTAS, quota, claims.namespace)

    async def refused() -> bool:
        try:
            await claims.kube.create(PODS, asking("plain", 0), claims.namespace, dryRun="All")
        except ApiError as exc:
            return "exceeded quota" in exc.message
        return False

    await wait_until(refused)
    for number in range(4):
        with pytest.raises(ApiError, match="exceeded quota"):
            await claims.kube.create(PODS, asking(f"abandoned-{number}"), claims.namespace)
    await claims.kube.delete(QUOTAS, "full", claims.namespace)
    await wait_until(refused, lambda found: not found)


async def assert_no_other_claim(claims: Claims, victim: Raw) -> None:
    """A pod takes no other claim than the one for what it asks for."""
    larger = {"name": "gpuwarden", "resourceClaimTemplateName": "gpuwarden-2-aa11"}
    for entry in (larger, victim["spec"]["resourceClaims"][0]):
        thief = pod("thief", resourceClaims=[entry])
        thief["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpuwarden"}]}
        with pytest.raises(ApiError, match=r"spec\.resourceClaims"):
            await claims.kube.create(PODS, thief, claims.namespace, dryRun="All")
        forged = asking("forged", resourceClaims=[entry])
        record = {"asked": {"main": 2}, "gpus": 2, "hashes": [HASH], "injection": "dra", "reserve": "bind"}
        forged["metadata"]["annotations"]["gpuwarden.io/claim"] = json.dumps(record)
        made = await claims.kube.create(PODS, forged, claims.namespace, dryRun="All")
        assert made["spec"]["resourceClaims"] == [{"name": "gpuwarden", "resourceClaimTemplateName": TEMPLATE}]
        assert json.loads(made["metadata"]["annotations"]["gpuwarden.io/claim"])["gpus"] == 1


async def assert_grace_is_limited(claims: Claims, name: str) -> None:
    """While a pod is being deleted, nothing evicts it when the evidence of its node ends."""
    (grace, binding) = (one for one in policies(Installation()) if one["metadata"]["name"] == "gpuwarden-grace")
    async with AsyncExitStack() as stack:
        for one in (grace, binding):
            await claims.kube.create(resource_of(one), one)
            stack.push_async_callback(claims.kube.delete, resource_of(one), one["metadata"]["name"])
        place = PODS.path(claims.namespace, name)

        async def refused() -> str:
            try:
                await claims.kube.call("DELETE", place, {"gracePeriodSeconds": 3600, "dryRun": ["All"]})
            except ApiError as exc:
                return exc.message
            return ""

        await wait_until(refused, lambda text: "its own grace period" in text)
    eviction = {"metadata": {"name": name}, "deleteOptions": {"gracePeriodSeconds": 3601, "dryRun": ["All"]}}
    with pytest.raises(ApiError, match="the maximum for evictions"):
        await claims.kube.call("POST", f"{place}/eviction", eviction)


async def test_pods_are_served_while_reconcile_is_dead_and_deleted_when_their_nodes_lose_their_evidence(
    claims: Claims, kube: Kube
) -> None:
    (worker,) = claims.here.reconcilers
    await worker.kill()
    await kube.create(PODS, asking("simple"), claims.namespace)
    await kube.create(PODS, asking("other", hashes=f"{OTHER_HASH},{HASH}"), claims.namespace)
    unproven = await kube.create(PODS, asking("unproven", hashes=f"{OTHER_HASH},sha256:cc33"), claims.namespace)
    assert unproven["spec"]["resourceClaims"] != (await claims.get("other"))["spec"]["resourceClaims"]
    await pairs(claims, "simple")
    assert not (await claims.get("other"))["spec"].get("nodeName")
    await kube.delete(LEASES, "gpuwarden-reconcile", claims.here.own_namespace)
    await claims.here.reconciler()
    await pairs(claims, "other")

    async def told() -> list[str]:
        found = await kube.list(EVENTS, claims.namespace, fieldSelector="involvedObject.name=unproven")
        return [one["message"] for one in found if one["reason"] == "NoProvenNode"]

    (message,) = await wait_until(told)
    assert "2 have a different hash" in message
    # The nodes lose their evidence.
    await claims.here.reconcilers[-1].kill()
    await kube.delete(LEASES, "gpuwarden-reconcile", claims.here.own_namespace)
    proven, now = json.dumps({A: HASH, B: HASH}), json.dumps({A: "sha256:dd44", B: "sha256:dd44"})
    claims.here.flags = tuple(now if one == proven else one for one in claims.here.flags)
    await claims.here.reconciler()
    await marked_for_deletion(kube, claims.namespace, "simple")
    await marked_for_deletion(kube, claims.namespace, "other")


@pytest.mark.long
async def test_time_until_a_pod_is_bound_against_the_same_claim_without_gpuwarden(
    claims: Claims, kube: Kube, request: pytest.FixtureRequest
) -> None:
    took: dict[str, list[float]] = {}
    async with emptied_namespace(kube, {}) as other:
        plain = {"devices": {"requests": [{"name": "gpu0", "exactly": {"deviceClassName": GPU_DRIVER}}]}}
        await kube.create(RESOURCE_CLAIM_TEMPLATES, {"metadata": {"name": "plain"}, "spec": {"spec": plain}}, other)
        for number in range(21):
            name = f"timed-{number}"
            for kind, where, one in (
                ("by_gpuwarden", claims.namespace, asking(name)),
                ("without", other, claiming_pod(name, resourceClaimTemplateName="plain")),
            ):
                begun = time.monotonic()
                await kube.create(PODS, one, where)
                made = time.monotonic()
                while not (await kube.get(PODS, name, where))["spec"].get("nodeName"):  # noqa: ASYNC110 - a poll
                    await asyncio.sleep(0.005)
                took.setdefault(kind, []).append(time.monotonic() - begun)
                took.setdefault(f"{kind}_since_created", []).append(time.monotonic() - made)
                await kube.delete(PODS, name, where, grace=0)
                await wait_until(lambda where=where: kube.list(RESOURCE_CLAIMS, where), lambda left: not left)  # type: ignore[misc]
    medians = {kind: statistics.median(seconds) for kind, seconds in took.items()}
    ratios = [medians[f"by_gpuwarden{since}"] / medians[f"without{since}"] for since in ("", "_since_created")]
    report_figures(
        request,
        ratio=ratios[0],
        ratio_since_created=ratios[1],
        **{f"{kind}_s": seconds for kind, seconds in medians.items()},
    )
    assert medians["by_gpuwarden"] < 5
