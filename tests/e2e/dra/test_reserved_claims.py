"""Pods whose GPUs are reserved at their creation get them by a ResourceClaim: real webhooks, reconciler and scheduler,
on simulated nodes whose GPUs a DRA driver publishes."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    DEVICE_CLASSES,
    GPU_DRIVER,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    bound,
    claiming_pod,
    device_classes,
    mig_device,
    pairs_of,
    proof_devices,
    refused_by_scheduler,
    remove_slices,
    slice_of_gpus,
)
from tests.e2e.kube import EVENTS, NAMESPACES, NODES, PODS, ApiError, Kube, Raw, Resource, pod, pod_in_phase, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Site, site
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import Installation, dra

HASH = "sha256:aa11"
A, B = "claims-0", "claims-1"
GATE = "gpuwarden.io/queue"
INJECTION = "gpuwarden.io/injection"
MIG_CLASS = "mig.nvidia.com"
GPUS = "gpuwarden.io/gpu-uuid"
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")


@define
class Claims:
    """Two nodes of two GPUs each, a replica and a reconciler."""

    here: Site
    kube: Kube

    @property
    def namespace(self) -> str:
        return self.here.namespace

    async def create(self, name: str, gpus: int = 1, namespace: str = "", **spec: Any) -> Raw:
        asked = {"gpuwarden.io/required-hash": HASH} if gpus else {}
        return await self.kube.create(PODS, pod(name, gpus, asked, **spec), namespace or self.namespace)

    async def get(self, name: str) -> Raw:
        return await self.kube.get(PODS, name, self.namespace)

    async def runs(self, name: str, namespace: str = "") -> Raw:
        where = namespace or self.namespace
        return await wait_until(
            lambda: self.kube.get(PODS, name, where), lambda found: found["status"].get("phase") == "Running"
        )

    async def gone(self, name: str) -> None:
        with suppress(ApiError):
            await self.kube.delete(PODS, name, self.namespace)
        await wait_until(lambda: self.kube.find(PODS, name, self.namespace), lambda found: found is None)

    async def claim_of(self, found: Raw) -> Raw:
        (one,) = found["spec"]["resourceClaims"]
        return await self.kube.get(RESOURCE_CLAIMS, one["resourceClaimName"], found["metadata"]["namespace"])

    async def assert_delivered(self, found: Raw) -> list[str]:
        """The claim's allocation, the annotation and the ledger are the same. Returns the GPUs."""
        uuids = sorted(found["metadata"]["annotations"][GPUS].split(","))
        held = {slot.partition("/")[0] for slot, one in (await self.here.held()).items() if one["uid"] == uid_of(found)}
        claim = await self.claim_of(found)
        pairs = await pairs_of(self.kube, claim)
        assert sorted(one.gpu for one in pairs) == sorted(one.proof for one in pairs) == sorted(held) == uuids
        assert {one.node for one in pairs} == {found["spec"]["nodeName"]}
        assert [one["uid"] for one in claim["metadata"]["ownerReferences"]] == [uid_of(found)]
        return uuids

    async def still_waits(self, name: str, seconds: float = 2.0) -> Raw:
        await asyncio.sleep(seconds)
        found = await self.get(name)
        assert not found["spec"].get("nodeName")
        return found

    async def label(self, node: str, injection: str | None) -> None:
        """Changes the injection of the node, and waits until the replica knows it."""
        await self.kube.patch(NODES, node, {"metadata": {"labels": {INJECTION: injection}}})
        is_other = injection not in (None, "dra")
        await wait_until(lambda: self.refusal(node), lambda text: ("another injection" in text) is is_other)

    async def refusal(self, node: str, gpus: int = 1) -> str:
        """Why a pod of the namespace would not get so many GPUs of the node."""
        asking = pod("probe", gpus, {"gpuwarden.io/required-hash": HASH}, nodeSelector={"kubernetes.io/hostname": node})
        try:
            await self.kube.create(PODS, asking, self.namespace, dryRun="All")
        except ApiError as exc:
            return exc.message
        return ""

    @asynccontextmanager
    async def by_variables(self) -> AsyncIterator[str]:
        """A namespace whose pods get their GPUs by variables."""
        async with emptied_namespace(self.kube, OPT_IN) as other:
            await self.kube.patch(NAMESPACES, other, {"metadata": {"annotations": {INJECTION: "nvidia"}}})
            yield other


def uid_of(found: Raw) -> str:
    return str(found["metadata"]["uid"])


def claim_name_of(found: Raw) -> str:
    (one,) = found["spec"]["resourceClaims"]
    assert one["name"] == "gpuwarden"
    return str(one["resourceClaimName"])


@asynccontextmanager
async def claims_site(
    cluster: Cluster, kube: Kube, directory: Path, flags: Sequence[str] = (), *, injection: str = "dra"
) -> AsyncIterator[Claims]:
    proven = json.dumps({A: HASH, B: HASH})
    said = ("--injection", injection, "--proof-devices", "true", "--node-hash-map", proven, *flags)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(device_classes(kube, GPU_DRIVER, DRIVER))
        # After the processes of the site have ended: they would write it again.
        stack.push_async_callback(cleared, kube)
        here = await stack.enter_async_context(
            site(cluster, kube, directory, nodes=2, gpus=2, name="claims", replicas=1, flags=said)
        )
        for manifest in (one for one in dra(Installation()) if one["kind"] != "DeviceClass"):
            await kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        for node in (A, B):
            await kube.create(RESOURCE_SLICES, slice_of_gpus(node, [f"GPU-{node}-{k}" for k in range(2)]))
        await here.reconciler()
        for node in (A, B):
            await wait_until(lambda node=node: proof_devices(kube, node), lambda found: len(found) == 2)  # type: ignore[misc]
        yield Claims(here, kube)
        here.checker.assert_no_violations()


async def cleared(kube: Kube) -> None:
    await remove_slices(kube, A, B)
    for node in (A, B):
        with suppress(ApiError):
            await kube.delete(NODE_EVIDENCES, node)


@pytest.fixture
async def claims(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Claims]:
    async with claims_site(cluster, kube, tmp_path) as found:
        yield found


async def test_pod_gets_the_reserved_gpus_by_its_claim(claims: Claims, kube: Kube) -> None:
    made = await claims.create("one")
    one = await claims.runs("one")
    two = (await claims.create("two", 2), await claims.runs("two"))[1]
    env = {item["name"]: item.get("value") for item in made["spec"]["containers"][0]["env"]}
    assert env == {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": made["metadata"]["annotations"][GPUS]}
    assert made["spec"]["containers"][0]["resources"]["claims"] == [{"name": "gpuwarden"}]
    assert len(await claims.assert_delivered(one)) == 1
    assert len(await claims.assert_delivered(two)) == 2
    # The API server would refuse all patches of a claim that was sent with spaces in the parameters of a driver.
    changes: list[Raw] = [{"op": "add", "path": "/metadata/labels/seen", "value": "yes"}]
    patched = await kube.patch(RESOURCE_CLAIMS, claim_name_of(two), changes, claims.namespace)
    assert patched["metadata"]["labels"]["seen"] == "yes"
    # A copy of the manifest asks for GPUs of its own.
    copy = {**one, "metadata": {**one["metadata"], "name": "copy"}, "spec": {**one["spec"]}}
    copy["metadata"] = {"name": "copy", "annotations": one["metadata"]["annotations"]}
    copy["spec"].pop("nodeName")
    copied = await kube.create(PODS, {"metadata": copy["metadata"], "spec": copy["spec"]}, claims.namespace)
    assert claim_name_of(copied) != claim_name_of(one)
    await claims.assert_delivered(await claims.runs("copy"))
    # Its claim is deleted with the pod, and the GPUs are allocated again.
    await claims.gone("two")
    await wait_until(
        lambda: kube.find(RESOURCE_CLAIMS, claim_name_of(two), claims.namespace), lambda found: found is None
    )
    await wait_until(lambda: claims.here.held(), lambda held: len(held) == 2)
    await claims.create("again", 2)
    await claims.assert_delivered(await claims.runs("again"))


async def test_forged_claim_name_gives_no_gpu(claims: Claims, kube: Kube) -> None:
    victim = (await claims.create("victim"), await claims.runs("victim"))[1]
    entry = {"name": "gpuwarden", "resourceClaimName": claim_name_of(victim)}
    # Without a request for GPUs, the pod is refused.
    using: Raw = pod("thief")
    using["spec"]["resourceClaims"] = [entry]
    using["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpuwarden"}]}
    with pytest.raises(ApiError, match=r"spec\.resourceClaims"):
        await kube.create(PODS, using, claims.namespace)
    # With one, it gets a claim of its own.
    asking: Raw = pod("thief", 1, {"gpuwarden.io/required-hash": HASH})
    asking["spec"]["resourceClaims"] = [entry]
    made = await kube.create(PODS, asking, claims.namespace)
    assert claim_name_of(made) != claim_name_of(victim)
    assert await claims.assert_delivered(await claims.runs("thief")) != await claims.assert_delivered(victim)


async def test_pod_that_shares_the_claim_of_another_stays_pending(claims: Claims, kube: Kube) -> None:
    """Such a pod can only be stored while its namespace is not opted in."""
    victim = (await claims.create("victim"), await claims.runs("victim"))[1]
    await opted_in(claims, is_in=False)
    thief: Raw = pod("thief", schedulingGates=[{"name": "example.test/hold"}])
    thief["spec"]["resourceClaims"] = victim["spec"]["resourceClaims"]
    thief["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpuwarden"}]}
    await kube.create(PODS, thief, claims.namespace)
    await opted_in(claims, is_in=True)
    await kube.patch(PODS, "thief", {"spec": {"schedulingGates": None}}, claims.namespace)
    await refused_by_scheduler(kube, claims.namespace, "thief", "serves only the pod that owns it")
    await claims.still_waits("thief")
    await claims.assert_delivered(victim)


async def opted_in(claims: Claims, *, is_in: bool) -> None:
    """Changes the label of the namespace, and waits until the API server knows it."""
    value = "true" if is_in else None
    await claims.kube.patch(NAMESPACES, claims.namespace, {"metadata": {"labels": {"gpuwarden.io/enabled": value}}})
    asking = pod("probe", 1, {"gpuwarden.io/required-hash": HASH})

    async def is_reviewed() -> bool:
        made = await claims.kube.create(PODS, asking, claims.namespace, dryRun="All")
        return GPUS in made["metadata"]["annotations"]

    await wait_until(is_reviewed, lambda found: found is is_in)


async def test_claim_is_made_after_a_restart_and_never_instead_of_a_foreign_one(claims: Claims, kube: Kube) -> None:
    (worker,) = claims.here.reconcilers
    await worker.kill()
    late = await claims.create("late")
    robbed = await claims.create("robbed")
    # kube-scheduler tries to allocate it repeatedly. A pod that waits for a GPU of such a try is not woken afterwards.
    request = only_gpu(robbed["metadata"]["annotations"][GPUS])
    foreign = {"metadata": {"name": claim_name_of(robbed)}, "spec": {"devices": {"requests": [request]}}}
    await kube.create(RESOURCE_CLAIMS, foreign, claims.namespace)
    await claims.still_waits("late")
    await kube.delete(
        LEASES, "gpuwarden-reconcile", claims.here.own_namespace
    )  # the next one need not wait for its end
    await claims.here.reconciler()
    await claims.assert_delivered(await claims.runs("late"))
    assert claim_name_of(await claims.get("late")) == claim_name_of(late)

    async def told() -> list[str]:
        found = await kube.list(EVENTS, claims.namespace)
        return [one["message"] for one in found if one["reason"] == "ResourceClaimTaken"]

    (message,) = await wait_until(told)
    assert claim_name_of(robbed) in message
    assert not (await kube.get(RESOURCE_CLAIMS, claim_name_of(robbed), claims.namespace))["metadata"].get("labels")


def any_gpu() -> Raw:
    return {"name": "gpu0", "exactly": {"deviceClassName": GPU_DRIVER}}


def only_gpu(uuid: str) -> Raw:
    selector = {"cel": {"expression": f"device.attributes['{GPU_DRIVER}'].uuid == '{uuid}'"}}
    return {"name": "gpu0", "exactly": {"deviceClassName": GPU_DRIVER, "selectors": [selector]}}


async def test_gpu_of_a_foreign_claim_is_reserved_when_the_claim_is_gone(claims: Claims, kube: Kube) -> None:
    async with emptied_namespace(kube, {}) as other:
        spec = {"devices": {"requests": [any_gpu()]}}
        await kube.create(RESOURCE_CLAIMS, {"metadata": {"name": "taken"}, "spec": spec}, other)
        await kube.create(PODS, claiming_pod("taker", resourceClaimName="taken"), other)
        node = (await bound(kube, other, "taker"))["spec"]["nodeName"]
        await wait_until(lambda: claims.refusal(node, 2), lambda text: "1 has fewer than 2 free" in text)
        ours = (await claims.create("fits", nodeSelector={"kubernetes.io/hostname": node}), await claims.runs("fits"))[
            1
        ]
        await claims.assert_delivered(ours)
        # Its proof stays.
        assert len(await proof_devices(kube, node)) == 2
        await claims.gone("fits")
        await kube.delete(PODS, "taker", other)
        await kube.delete(RESOURCE_CLAIMS, "taken", other)
        await wait_until(lambda: claims.refusal(node, 2), lambda text: not text)
    await claims.create("all", 2, nodeSelector={"kubernetes.io/hostname": node})
    await claims.assert_delivered(await claims.runs("all"))


async def test_queued_pod_gets_its_claim_when_its_gate_opens(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with claims_site(cluster, kube, tmp_path, ("--when-unavailable", "queue")) as claims:
        for name in ("first", "second"):
            await claims.create(name, 2)
            await claims.runs(name)
        made = await claims.create("waits")
        assert [one["name"] for one in made["spec"]["schedulingGates"]] == [GATE]
        name = claim_name_of(made)
        assert await kube.find(RESOURCE_CLAIMS, name, claims.namespace) is None
        await claims.gone("first")
        served = await claims.runs("waits")
        assert claim_name_of(served) == name
        await claims.assert_delivered(served)


async def test_gpu_of_a_pod_that_has_ended_is_allocated_again(claims: Claims, kube: Kube) -> None:
    ending = pod("ends", 2, {"gpuwarden.io/required-hash": HASH, "kubelet.test/ends": "Succeeded"})
    ending["metadata"]["annotations"]["kubelet.test/runs-for"] = "1s"
    await kube.create(PODS, ending, claims.namespace)
    await claims.create("stays", 2)
    await pod_in_phase(kube, claims.namespace, "ends", "Succeeded")
    await wait_until(lambda: claims.here.held(), lambda held: len(held) == 2)
    await claims.create("next", 2)
    await claims.assert_delivered(await claims.runs("next"))


async def test_mig_device_is_allocated_by_the_class_of_mig_devices(claims: Claims, kube: Kube) -> None:
    mig = "MIG-11111111-0000-4000-8000-000000000001"
    written = await kube.get(RESOURCE_SLICES, f"{A}-{GPU_DRIVER}")
    written["spec"]["devices"] = [mig_device(mig, f"GPU-{A}-0", 0)]
    written["spec"]["pool"]["generation"] += 1
    async with mig_class(kube):
        await kube.replace(RESOURCE_SLICES, written)
        asking = pod("part", 1, {"gpuwarden.io/required-hash": HASH}, nodeSelector={"kubernetes.io/hostname": A})

        async def chosen() -> str:
            with suppress(ApiError):
                made = await kube.create(PODS, asking, claims.namespace, dryRun="All")
                return str(made["metadata"]["annotations"][GPUS])
            return ""

        await wait_until(chosen, lambda uuid: uuid == mig)
        await kube.create(PODS, asking, claims.namespace)
        part = await claims.runs("part")
        assert await claims.assert_delivered(part) == [mig]
        (node,) = [one for one in await kube.list(GPU_NODES) if one["metadata"]["name"] == A]
        assert {one["uuid"]: one["pci"] for one in node["spec"]["devices"]} == {mig: "0000:01:00.0"}
        requests = (await claims.claim_of(part))["spec"]["devices"]["requests"]
        assert [one["exactly"]["deviceClassName"] for one in requests] == [DRIVER, MIG_CLASS]
        await claims.gone("part")


@asynccontextmanager
async def mig_class(kube: Kube) -> AsyncIterator[None]:
    """Both classes as NVIDIA's driver has them: one for GPUs, the other for MIG devices."""
    for name, kind in ((GPU_DRIVER, "gpu"), (MIG_CLASS, "mig")):
        expression = f"device.driver == '{GPU_DRIVER}' && device.attributes['{GPU_DRIVER}'].type == '{kind}'"
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        if await kube.find(DEVICE_CLASSES, name) is None:
            await kube.create(DEVICE_CLASSES, {"metadata": {"name": name}, "spec": spec})
        else:
            await kube.patch(DEVICE_CLASSES, name, {"spec": spec})
    try:
        yield
    finally:
        await kube.delete(DEVICE_CLASSES, MIG_CLASS)


async def test_pods_go_to_nodes_of_their_own_injection(claims: Claims, kube: Kube) -> None:
    await claims.label(A, "nvidia")
    await claims.create("one")
    assert (await claims.runs("one"))["spec"]["nodeName"] == B
    with pytest.raises(ApiError, match=r"NoFreeDevice.*1 has another injection"):
        await claims.create("two", 2)
    async with claims.by_variables() as other:
        await claims.create("by-variables", namespace=other)
        found = await claims.runs("by-variables", other)
        assert found["spec"]["nodeName"] == A
        assert "resourceClaims" not in found["spec"]
        env = {item["name"]: item.get("value") for item in found["spec"]["containers"][0]["env"]}
        assert env["NVIDIA_VISIBLE_DEVICES"] == found["metadata"]["annotations"][GPUS]
        await claims.label(A, "something")
        await refused(claims, other, "have another injection")
        await kube.patch(NAMESPACES, other, {"metadata": {"annotations": {INJECTION: "cdi"}}})
        await refused(claims, other, "allowed are nvidia, cuda, plugin, dra")


async def refused(claims: Claims, namespace: str, words: str) -> None:
    async def look() -> str:
        try:
            await claims.kube.create(PODS, pod("probe", 1), namespace, dryRun="All")
        except ApiError as exc:
            return exc.message
        return ""

    await wait_until(look, lambda text: words in text)


async def test_node_changes_its_injection_while_pods_run(claims: Claims, kube: Kube) -> None:
    """The GPU of a pod with the other injection is given to no other pod; the other GPUs of the node are."""
    await claims.label(A, "nvidia")
    async with claims.by_variables() as other:
        await claims.create("old", namespace=other)
        old = await claims.runs("old", other)
        assert old["spec"]["nodeName"] == A
        await claims.label(A, "dra")
        await claims.create("fills", 2)
        await claims.runs("fills")
        await claims.create("new")
        new = await claims.runs("new")
        assert new["spec"]["nodeName"] == A
        assert await claims.assert_delivered(new) != [old["metadata"]["annotations"][GPUS]]
        with pytest.raises(ApiError, match="NoFreeDevice"):
            await claims.create("more")
        assert uid_of(await kube.get(PODS, "old", other)) == uid_of(old)
        # Back: the pod with a claim keeps its GPU, and only the one of the deleted pod is given away.
        await claims.label(A, "nvidia")
        await kube.delete(PODS, "old", other)
        await wait_until(lambda: claims.here.held_on(A), lambda held: len(held) == 1)
        await claims.create("back", namespace=other)
        back = await claims.runs("back", other)
        assert back["metadata"]["annotations"][GPUS] == old["metadata"]["annotations"][GPUS]
        with pytest.raises(ApiError, match="NoFreeDevice"):
            await claims.create("more", namespace=other)
        assert uid_of(await claims.get("new")) == uid_of(new)
        await claims.assert_delivered(new)


async def test_time_until_a_pod_is_bound(claims: Claims, kube: Kube, request: pytest.FixtureRequest) -> None:
    await claims.label(A, "nvidia")
    took: dict[str, list[float]] = {"by_claim": [], "by_variables": []}
    async with claims.by_variables() as other:
        for number in range(12):
            for injection, where in (("by_claim", claims.namespace), ("by_variables", other)):
                name, begin = f"timed-{number}", time.monotonic()
                await claims.create(name, namespace=where)
                while not (await kube.get(PODS, name, where))["spec"].get("nodeName"):  # noqa: ASYNC110 - a poll
                    await asyncio.sleep(0.005)
                took[injection].append(time.monotonic() - begin)
                await claims.runs(name, where)  # the end of a pod that has not started is not seen
                await kube.delete(PODS, name, where)
                await wait_until(claims.here.held, lambda held: held == {})
    assert statistics.median(took["by_claim"]) < 5
    medians = {injection: statistics.median(seconds) for injection, seconds in took.items()}
    report_figures(request, **{f"{injection}_s": seconds for injection, seconds in medians.items()})
