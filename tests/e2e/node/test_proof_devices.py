"""On a real node: a pod with proof devices starts only while `attest` finds the node proven, and gets exactly the GPUs
of its claim."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from attrs import define

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME
from scripts.node.real import DRA_DRIVER, RealNode
from tests.e2e.kube import (
    EVENTS,
    PODS,
    Kube,
    Raw,
    gone,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import (
    GPUS,
    NODE,
    START_TIMEOUT,
    Seen,
    container,
    containers_of,
    is_ready,
    real_pod,
    run_in,
    seen_in,
    seen_of,
    tried_until,
)
from tests.e2e.node.plugins import AttestPlugin, attest_account, attesting
from tests.e2e.node.test_node import DEVICE_CLASSES, RESOURCE_CLAIMS, RESOURCE_SLICES
from tests.evidence.certificates import Authority
from tests.evidence.jwt.tokens import TRUST_DOMAIN, evidence_id
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.core.proof_claims import claim_spec
from webhook.core.proof_devices import DRIVER, ProofDevice, gpu_of_device, hash_attribute
from webhook.evidence.record import RecordedClaim, verified
from webhook.kube.resource_slices import slice_name, slices_of
from webhook.node.node_pods import LIST_PODS, call, wanted_in
from webhook.runtime.clock import utc_now
from webhook.runtime.tls.certificates import certificate_in

HASH, OTHER_HASH = "sha256:aa11", "sha256:bb22"
GPU_DRIVER = "gpu.nvidia.com"


CLASSES = {
    GPU_DRIVER: f"device.driver == '{GPU_DRIVER}' && device.attributes['{GPU_DRIVER}'].type == 'gpu'",
    DRIVER: f"device.driver == '{DRIVER}'",
}


@define(eq=False)
class ProvenNode:
    """The real node with its GPU driver, its proof devices and `attest`, whose server does not answer."""

    cluster: Cluster
    kube: Kube
    node: RealNode
    attest: AttestPlugin
    namespace: str
    generation: int = 0

    async def publish(self, *gpus: str, hash: str = HASH, lasts: timedelta = timedelta(hours=1)) -> datetime:
        """Replaces the node's proof devices. Returns their end."""
        self.generation += 1
        end = utc_now() + lasts
        devices = [ProofDevice.of(uuid, hash, end) for uuid in gpus]
        (content,) = slices_of(NODE, devices, self.generation, GPU_DRIVER)
        if (written := await self.kube.find(RESOURCE_SLICES, slice_name(NODE, 0))) is None:
            await self.kube.create(RESOURCE_SLICES, content)
        else:
            content["metadata"]["resourceVersion"] = written["metadata"]["resourceVersion"]
            await self.kube.replace(RESOURCE_SLICES, content)
        return end.replace(microsecond=0)

    async def create(self, name: str, gpus: int, hash: str = HASH, runtime: str | None = None) -> None:
        """A pod with a claim of its own, which both of its containers share."""
        spec = claim_spec(gpus, hash_attribute(hash), gpu_driver=GPU_DRIVER, gpu_class=GPU_DRIVER, evicts=True)
        await self.kube.create(RESOURCE_CLAIMS, {"metadata": {"name": name}, "spec": spec}, self.namespace)
        asks = container(resources={"claims": [{"name": "gpuwarden"}]})
        claims = [{"name": "gpuwarden", "resourceClaimName": name}]
        await self.kube.create(PODS, real_pod(name, asks, runtime=runtime, resourceClaims=claims), self.namespace)

    async def allocated(self, name: str) -> tuple[str, ...]:
        """The UUIDs of the GPUs in the claim's allocation, by the slices of their driver."""
        found = await self.kube.list(RESOURCE_SLICES)
        uuids = {
            (one["spec"]["driver"], device["name"]): device["attributes"]["uuid"]["string"]
            for one in found
            for device in one["spec"]["devices"]
            if one["spec"]["driver"] == GPU_DRIVER
        }
        claim = await self.kube.get(RESOURCE_CLAIMS, name, self.namespace)
        results = claim["status"]["allocation"]["devices"]["results"]
        return tuple(sorted(uuids[GPU_DRIVER, one["device"]] for one in results if one["driver"] == GPU_DRIVER))

    async def seen(self, name: str) -> Seen:
        return await seen_in(self.cluster, self.namespace, name)

    async def refused(self, name: str, words: str) -> None:
        """Waits for the kubelet's Event about the pod, whose containers are not created."""

        async def messages() -> str:
            found = await self.kube.list(EVENTS, self.namespace, fieldSelector=f"involvedObject.name={name}")
            refusals = (one["message"] for one in found if one["reason"] == "FailedPrepareDynamicResources")
            return "\n".join(refusals)

        await tried_until(self.kube, self.namespace, name, messages, lambda text: words in text)
        await wait_until(lambda: self.kube.get(PODS, name, self.namespace), is_creating)

    async def starts(self, name: str) -> Raw:
        """Waits until the pod runs."""
        return await tried_until(
            self.kube, self.namespace, name, lambda: self.kube.get(PODS, name, self.namespace), is_ready
        )

    async def delete(self, *names: str) -> None:
        for name in names:
            await self.kube.delete(PODS, name, self.namespace)
        for name in names:
            await gone(self.kube, PODS, name, self.namespace, START_TIMEOUT)


@pytest.fixture(scope="module")
def gpu_slices(real_cluster: Cluster, real_node: RealNode) -> Iterator[None]:
    """NVIDIA's DRA driver, and the device classes."""
    with real_cluster.api() as api:
        for name, selector in CLASSES.items():
            content = {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": selector}}]}}
            api.post(DEVICE_CLASSES.path(None), json=content).raise_for_status()
        real_node.start_dra_driver()
        yield
        real_node.kill(DRA_DRIVER)
        for name in CLASSES:
            api.delete(DEVICE_CLASSES.path(None, name)).raise_for_status()


@pytest.fixture
async def account(real_cluster: Cluster, real_kube: Kube, plain_namespace: str) -> AsyncIterator[Path]:
    """A kubeconfig with exactly the permissions of `attest`."""
    async with attest_account(real_cluster, real_kube, plain_namespace) as path:
        yield path


@pytest.fixture
async def proven(
    gpu_slices: None,
    account: Path,
    real_cluster: Cluster,
    real_kube: Kube,
    real_node: RealNode,
    plain_namespace: str,
) -> AsyncIterator[ProvenNode]:
    async with attesting(real_node, HASH, account) as attest:
        yield ProvenNode(real_cluster, real_kube, real_node, attest, plain_namespace)
        if not await attest.sockets():  # without the plugin the kubelet ends no pod
            await attest.start()
        await real_kube.call("DELETE", PODS.path(plain_namespace))
        await wait_until(lambda: real_kube.list(PODS, plain_namespace), lambda pods: not pods, START_TIMEOUT)
    await real_kube.delete(RESOURCE_SLICES, slice_name(NODE, 0))


async def test_containers_see_exactly_the_gpus_of_their_claims(proven: ProvenNode) -> None:
    await proven.publish(GPUS[1], GPUS[2], GPUS[3])
    await proven.create("two", 2, runtime=RUNTIME)
    await proven.create("one", 1)
    seen: list[str] = []
    for name, count in ("two", 2), ("one", 1):
        await proven.starts(name)
        allocated = await proven.allocated(name)
        assert len(allocated) == count
        assert await proven.seen(name) == seen_of(*map(GPUS.index, allocated))
        seen += allocated
    assert sorted(seen) == sorted(GPUS[1:])
    await proven.create("third", 1)
    await proven.delete("two")
    await proven.starts("third")
    assert set(await proven.allocated("third")) <= set(GPUS[1:]), "no GPU without a proof"


async def test_container_gets_a_signed_record_of_the_evidence(proven: ProvenNode) -> None:
    authority = Authority(TRUST_DOMAIN)
    proven.attest.agent.issued = [authority.issue(evidence_id(NODE, HASH))]
    await proven.attest.kill()
    proven.attest.command = [*proven.attest.command, "--cdi-directory", "/run/cdi"]
    await proven.attest.start()
    end = await proven.publish(*GPUS)
    await proven.create("recorded", 2)
    pod = await proven.starts("recorded")
    allocated = await proven.allocated("recorded")
    assert await proven.seen("recorded") == seen_of(*map(GPUS.index, allocated))
    text = await run_in(proven.cluster, proven.namespace, "recorded", "cat $GPUWARDEN_EVIDENCE")
    roots = [certificate_in(authority.root)]
    record = verified(text, roots, EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN))
    assert (record.node, record.hash, record.until) == (NODE, HASH, end)
    assert sorted(record.gpus) == sorted(allocated)
    claim = await proven.kube.get(RESOURCE_CLAIMS, "recorded", proven.namespace)
    assert record.claim == RecordedClaim(proven.namespace, "recorded", claim["metadata"]["uid"])
    assert record.pods == [pod["metadata"]["uid"]]
    forge = "(echo forged > $GPUWARDEN_EVIDENCE) 2>/dev/null || rm $GPUWARDEN_EVIDENCE 2>/dev/null || echo refused"
    assert await run_in(proven.cluster, proven.namespace, "recorded", forge) == "refused\n"
    # The kubelet's own answer about the pod.
    pods = wanted_in(await call(f"unix:{proven.node.directory}/kubelet/pod-resources/kubelet.sock", LIST_PODS))
    given = pods[proven.namespace, "recorded"].proof_devices
    assert sorted(gpu_of_device(name, ()) for name in given) == sorted(allocated)
    await proven.delete("recorded")
    await wait_until(proven.attest.records, lambda found: not found, START_TIMEOUT)


async def test_pod_starts_only_on_evidence_for_its_hash(proven: ProvenNode) -> None:
    await proven.publish(*GPUS)
    proven.attest.agent.identities = [evidence_id(NODE, OTHER_HASH)]
    await proven.create("other", 1)
    proven_for = f"node {NODE} is proven for the hash bb22, and the pod requires aa11"
    await proven.refused("other", f"failed for ResourceClaim other: {proven_for}")
    proven.attest.agent.identities = [evidence_id(NODE, HASH), evidence_id(NODE, OTHER_HASH)]
    asked = len(proven.attest.agent.audiences)
    await proven.create("unclear", 2)
    await wait_until(proven.attest.questions, lambda number: number > asked, START_TIMEOUT)
    await wait_until(lambda: proven.kube.get(PODS, "unclear", proven.namespace), is_creating)
    proven.attest.agent.identities = [evidence_id(NODE, HASH)]
    # Within the same call: the kubelet would call again after a minute.
    await wait_until(lambda: proven.kube.get(PODS, "unclear", proven.namespace), is_ready, START_TIMEOUT / 2)
    for name in ("other", "unclear"):
        await proven.starts(name)
        assert await proven.seen(name) == seen_of(*map(GPUS.index, await proven.allocated(name)))


async def test_no_pod_starts_without_attest_and_its_restart_ends_no_pod(proven: ProvenNode) -> None:
    await proven.publish(*GPUS)
    await proven.create("before", 2)
    before = await proven.starts("before")
    await proven.attest.update()
    await proven.create("updated", 1)
    await proven.starts("updated")
    await proven.attest.kill()
    await proven.create("meanwhile", 1)
    await proven.refused("meanwhile", "NodePrepareResources: rpc error: code = Unavailable")
    await proven.attest.start()
    await proven.starts("meanwhile")
    assert containers_of(await proven.kube.get(PODS, "before", proven.namespace)) == containers_of(before)

    await proven.delete("before", "updated", "meanwhile")
    await proven.attest.stop()
    await wait_until(proven.attest.sockets, lambda found: not found)
    await asyncio.sleep(3)  # the kubelet looks for removed sockets every second
    await proven.create("stopped", 4)
    await proven.refused("stopped", f"DRA driver {DRIVER} is not registered")
    await proven.attest.start()
    await proven.starts("stopped")
    assert await proven.seen("stopped") == seen_of(0, 1, 2, 3), "the claims of the first pods were unprepared"


def is_creating(pod: Raw) -> bool:
    states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
    return [one.get("waiting", {}).get("reason") for one in states] == ["ContainerCreating"]


async def test_pod_is_evicted_when_the_evidence_ends(proven: ProvenNode, request: pytest.FixtureRequest) -> None:
    await proven.publish(*GPUS)
    await proven.create("ends", 2)
    await proven.starts("ends")
    end = await proven.publish(*GPUS, lasts=timedelta(seconds=2))

    async def marked() -> str:
        pod = await proven.kube.find(PODS, "ends", proven.namespace)
        return "gone" if pod is None else str(pod["metadata"].get("deletionTimestamp", ""))

    await wait_until(marked)
    late = (utc_now() - end).total_seconds()
    await gone(proven.kube, PODS, "ends", proven.namespace, START_TIMEOUT)
    report_figures(request, evicted_after_the_end=late)
    assert 0 <= late < 2


# The last test: NVIDIA's driver names its node in its slices, so a kubelet that starts deletes them for half a minute.
async def test_pods_survive_a_restart_of_the_kubelet(proven: ProvenNode) -> None:
    await proven.publish(*GPUS)
    await proven.create("before", 2)
    before = await proven.starts("before")
    allocated = await proven.allocated("before")
    await asyncio.to_thread(proven.node.kill_kubelet)
    # The running pod needs no evidence again.
    proven.attest.agent.identities = [evidence_id(NODE, OTHER_HASH)]
    await proven.create("meanwhile", 1)
    await wait_until(
        lambda: proven.kube.get(PODS, "meanwhile", proven.namespace), lambda pod: "nodeName" in pod["spec"]
    )
    registrations = await proven.attest.registrations()
    await asyncio.to_thread(proven.node.start_kubelet)
    await wait_until(proven.attest.registrations, lambda found: found > registrations, START_TIMEOUT)
    await proven.refused("meanwhile", "is proven for the hash bb22")
    assert await proven.kube.find(RESOURCE_SLICES, slice_name(NODE, 0)), "a kubelet deletes slices that name its node"
    proven.attest.agent.identities = [evidence_id(NODE, HASH)]
    await proven.starts("meanwhile")
    assert containers_of(await proven.kube.get(PODS, "before", proven.namespace)) == containers_of(before)
    assert await proven.seen("before") == seen_of(*map(GPUS.index, allocated))
