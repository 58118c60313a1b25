"""Proven GPUs are not allocated after the end of their evidence, without any process of gpuwarden."""

import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import CRDS, refused, resource_of
from tests.e2e.dra.gpus import (
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    bound,
    claiming_pod,
    ended,
    gpus_of,
    pairs,
    refused_by_scheduler,
)
from tests.e2e.dra.tenants import (
    HASH,
    NEVER,
    NODE,
    TEMPLATE,
    Tenants,
    allocation_on,
    asking,
    claim,
    consumer,
    exactly,
    guarded,
    guards,
    in_seconds,
    labelled_template,
    owned,
    template,
    tenants_of,
    write_ends,
)
from tests.e2e.kube import PODS, ApiError, Raw, gone, wait_until
from tests.e2e.measurements import percentile, report_figures
from webhook.core.proof_claims import CLAIM_LABELS
from webhook.core.proof_devices import DRIVER, hash_attribute
from webhook.kube.install.crds import manifests as crds

ALL = {"dryRun": "All"}
ENDS = "gpuwarden-proof-ends"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No other test sees its policies, or misses its CRDs."""
    with Cluster(tmp_path_factory.mktemp("ends")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unguarded(own_cluster: Cluster) -> AsyncIterator[Tenants]:
    async with tenants_of(own_cluster) as users:
        yield users


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(unguarded: Tenants) -> AsyncIterator[Tenants]:
    async with guarded(unguarded, {"allocation": allocates_unlabelled}):
        await labelled_template(unguarded, unguarded.guarded)
        yield unguarded


async def allocates_unlabelled(users: Tenants) -> Raw:
    return await allocates(users, "unlabelled")


async def allocates_labelled(users: Tenants) -> Raw:
    return await allocates(users, "labelled", labels=CLAIM_LABELS)


async def allocates(users: Tenants, name: str, **metadata: object) -> Raw:
    """Creates a claim, and allocates a proof device to it as a dry run."""
    if await users.admin.find(RESOURCE_CLAIMS, name, users.free) is None:
        await users.admin.create(RESOURCE_CLAIMS, claim(name, pairs(1, HASH), **metadata), users.free)
    status = {"status": {"allocation": allocation_on(NODE, proof0=DRIVER)}}
    return await users.operator.call("PATCH", RESOURCE_CLAIMS.path(users.free, name, "status"), status, ALL)


async def test_allocation_takes_little_longer_with_the_policies(
    unguarded: Tenants, request: pytest.FixtureRequest
) -> None:
    """From the pod's creation until it is bound to a pair. BindingEnds lists 5,000 nodes."""
    await labelled_template(unguarded, unguarded.guarded)
    many = {f"ip-10-0-{n // 256}-{n % 256}.example.internal": NEVER for n in range(5000)}
    await binding_times(unguarded, 5)  # the first ones take longer
    without, with_policies = [], []
    # In turns, because other programs use the machine too.
    for _ in range(3):
        without.append(percentile(await binding_times(unguarded, 10), 0.5))
        async with guarded(unguarded, {"allocation": allocates_unlabelled}):
            await write_ends(unguarded, {**many, NODE: NEVER})
            await wait_until(lambda: is_refused(unguarded), lambda refused: not refused)
            with_policies.append(percentile(await binding_times(unguarded, 10), 0.5))
    ratio = min(with_policies) / min(without)
    report_figures(request, ms_without=min(without) * 1000, ms_with=min(with_policies) * 1000, ratio=ratio)
    assert ratio < 3


async def binding_times(users: Tenants, times: int) -> list[float]:
    """In seconds, one pod after the other."""
    took = []
    content = claiming_pod("timed", resourceClaimTemplateName=TEMPLATE)
    for _ in range(times):
        version = (await users.admin.call("GET", PODS.path(users.guarded)))["metadata"]["resourceVersion"]
        began = time.monotonic()
        await users.operator.create(PODS, content, users.guarded)
        async for event in users.admin.watch(PODS, users.guarded, resourceVersion=version):
            if event["object"]["metadata"]["name"] == "timed" and event["object"]["spec"].get("nodeName"):
                break
        took.append(time.monotonic() - began)
        await ended(users.admin, users.guarded, "timed")
        await wait_until(lambda: are_gone(users))
    return took


async def are_gone(users: Tenants) -> bool:
    """Whether no claim of the timed pods is left, so that its GPU is free."""
    left = await users.admin.list(RESOURCE_CLAIMS, users.guarded)
    return not [one for one in left if one["metadata"]["name"].startswith("timed-")]


async def pending(users: Tenants, name: str, words: str) -> None:
    """Creates a pod that needs a proven GPU, and waits until the scheduler says why it gets none."""
    # The API server reads the ends by watch.
    await wait_until(lambda: is_refused(users))
    await users.operator.create(PODS, claiming_pod(name, resourceClaimTemplateName=TEMPLATE), users.guarded)
    await refused_by_scheduler(users.admin, users.guarded, name, words)


async def test_pod_is_bound_while_the_evidence_lasts(users: Tenants) -> None:
    await write_ends(users, {NODE: in_seconds(60)})
    await users.operator.create(PODS, claiming_pod("now", resourceClaimTemplateName=TEMPLATE), users.guarded)
    await bound(users.admin, users.guarded, "now")
    assert len(await gpus_of(users.admin, users.guarded, "now")) == 1
    await ended(users.admin, users.guarded, "now")


@pytest.mark.parametrize(
    ("nodes", "kept", "words"),
    [
        ({NODE: "2026-01-01T00:00:00Z"}, "2026-01-01T00:00:00Z", f"The evidence of node {NODE} ended at 2026-01-01T00"),
        ({}, "2026-01-01T00:00:00Z", f"Node {NODE} has no evidence"),
        ({NODE: NEVER}, "", "gpuwarden reconcile has not written yet when evidence ends"),
        (None, "", "no params found"),
    ],
    ids=["ended", "not listed", "not written", "no object"],
)
async def test_pod_waits_until_there_is_evidence(
    users: Tenants, nodes: dict[str, str] | None, kept: str, words: str
) -> None:
    """The slice still offers the devices."""
    await write_ends(users, nodes, kept)
    await pending(users, "waits", words)
    await write_ends(users, {NODE: NEVER})
    await bound(users.admin, users.guarded, "waits", 60)
    await ended(users.admin, users.guarded, "waits")


async def test_evidence_that_has_just_ended_is_not_allocated(users: Tenants) -> None:
    """By the API server's clock, without a write at the end."""
    end = in_seconds(5)
    await write_ends(users, {NODE: end})
    await wait_until(lambda: is_refused(users), lambda refused: not refused)
    await wait_until(lambda: is_refused(users))
    await refused(allocates_labelled(users), f"The evidence of node {NODE} ended at {end}")
    await write_ends(users, {NODE: NEVER})
    await wait_until(lambda: is_refused(users), lambda refused: not refused)


async def test_device_for_a_hash_that_its_node_no_longer_proves_is_not_allocated(users: Tenants) -> None:
    """The node is proven for another hash, and the slice still offers the device."""
    past = "2026-01-01T00:00:00Z"
    # The second one is the device that `is_refused` allocates.
    await write_ends(users, {NODE: NEVER}, proofs={f"{NODE}/{hash_attribute(HASH)}": past, f"{NODE}/proof0": past})
    await pending(users, "waits", f"Node {NODE} is no longer proven for this hash")
    await write_ends(users, {NODE: NEVER}, proofs={f"{NODE}/other": past, f"other/{hash_attribute(HASH)}": past})
    await bound(users.admin, users.guarded, "waits", 60)
    await ended(users.admin, users.guarded, "waits")
    await write_ends(users, {NODE: NEVER})


async def is_refused(users: Tenants) -> bool:
    try:
        await allocates_labelled(users)
    except ApiError:
        return True
    return False


async def test_unlabelled_claim_gets_no_proof(users: Tenants) -> None:
    """The policy that compares the ends matches labelled claims only."""
    await refused(
        allocates_unlabelled(users), "Only a claim with the label gpuwarden.io/gpu-claim=true may take proven GPUs"
    )


async def test_reservation_after_the_end_is_refused(users: Tenants) -> None:
    """A claim that was allocated before the end, for its pod that comes later."""
    await write_ends(users, {NODE: NEVER})
    owners = owned(users.free_pod)["ownerReferences"]
    content = claim("early", pairs(1, HASH), labels=CLAIM_LABELS, ownerReferences=owners)
    await users.warden.create(RESOURCE_CLAIMS, content, users.free)
    place = RESOURCE_CLAIMS.path(users.free, "early", "status")
    status = {"allocation": allocation_on(NODE, proof0=DRIVER)}
    change = {"status": {"reservedFor": [consumer(users.free_pod)]}}

    async def allocated() -> bool:
        try:
            await users.warden.call("PATCH", place, {"status": status})
        except ApiError:
            return False
        return True

    await wait_until(allocated)
    await users.warden.call("PATCH", place, change, ALL)
    await write_ends(users, {NODE: "2026-01-01T00:00:00Z"})

    async def denied() -> bool:
        try:
            await users.warden.call("PATCH", place, change, ALL)
        except ApiError as exc:
            return f"The evidence of node {NODE} ended" in exc.message
        return False

    await wait_until(denied)
    # It can be deallocated.
    await users.warden.call("PATCH", place, {"status": {"allocation": None}})
    await users.warden.delete(RESOURCE_CLAIMS, "early", users.free)
    await write_ends(users, {NODE: NEVER})


async def nic_pod(users: Tenants, name: str) -> None:
    if await users.admin.find(RESOURCE_CLAIM_TEMPLATES, "nics", users.guarded) is None:
        await users.tenant.create(RESOURCE_CLAIM_TEMPLATES, template("nics", asking(exactly())), users.guarded)
    await users.tenant.create(PODS, claiming_pod(name, resourceClaimTemplateName="nics"), users.guarded)
    await bound(users.admin, users.guarded, name)


async def test_devices_of_other_drivers_need_no_ends(users: Tenants) -> None:
    await write_ends(users, None)
    await pending(users, "waits", "no params found")
    await nic_pod(users, "nic")
    for name in ("nic", "waits"):
        await ended(users.admin, users.guarded, name)
    await write_ends(users, {NODE: NEVER})


async def test_devices_of_other_drivers_need_no_crd(users: Tenants) -> None:
    """Without the CRD of its parameter, the API server refuses all requests that match a policy's constraints."""
    (crd,) = [one for one in crds() if one["spec"]["names"]["plural"] == "bindingends"]
    name = crd["metadata"]["name"]
    await users.admin.delete(CRDS, name)
    await gone(users.admin, CRDS, name)
    # An API server that has seen the CRD keeps an empty list of its objects, until the policy is written again.
    (policy,) = [one for one in guards() if one["metadata"]["name"] == ENDS and "validations" in one["spec"]]
    await users.admin.delete(resource_of(policy), ENDS)
    await gone(users.admin, resource_of(policy), ENDS)
    await users.admin.create(resource_of(policy), policy)
    try:
        await pending(users, "waits", f"ValidatingAdmissionPolicy '{ENDS}'")
        await nic_pod(users, "nic")
    finally:
        await users.admin.create(CRDS, crd)
        for one in ("nic", "waits"):
            await ended(users.admin, users.guarded, one)
