"""Inventory and evidence from their sources to pods: a real reconciler writes them, and a real server uses them."""

import asyncio
import base64
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    EVENTS,
    NODES,
    PODS,
    ApiError,
    Kube,
    Raw,
    Resource,
    delete_without_finalizers,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_configurations import ENABLED, at_url, reviewed
from tests.ledger.fake_store import gpu_node
from tests.running import GPUWARDEN, WITHOUT_EVIDENCE, serving, taken_by
from webhook.evidence.node_evidence import new_node_evidence

NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
ANNOTATION = "fudo.org/gpu.device.labels"
NAMES = ("disco-a", "disco-b")
A, B = NAMES
HASH, OTHER_HASH = "sha256:aa11", "sha256:bb22"


def said(*uuids: str, **labels: Sequence[str]) -> str:
    devices = {uuid: list(labels.get(uuid.replace("-", "_"), ())) for uuid in uuids}
    return base64.b64encode(json.dumps(devices).encode()).decode()


@frozen(eq=False)
class Harness:
    """A server and a reconciler, and nodes that are created and deleted."""

    cluster: Cluster
    kube: Kube
    namespace: str
    inventory: Path

    async def node(self, name: str, annotation: str | None = None) -> None:
        """Creates a Node as the kubelet registers it, with a labeller's annotation."""
        one = node_object(name)
        if annotation is not None:
            one["metadata"]["annotations"] = {ANNOTATION: annotation}
        await asyncio.to_thread(self.cluster.add_nodes, [one])

    async def annotate_node(self, name: str, annotation: str | None) -> None:
        await self.kube.patch(NODES, name, {"metadata": {"annotations": {ANNOTATION: annotation}}})

    async def wait_for_devices(self, name: str, **healthy: bool) -> Raw:
        """Waits until the GPUNode lists exactly these devices."""
        expected = {uuid.replace("_", "-"): is_healthy for uuid, is_healthy in healthy.items()}

        async def look() -> Raw | None:
            return await self.kube.find(GPU_NODES, name)

        found = await wait_until(look, lambda raw: raw is not None and devices_in(raw) == expected)
        assert found is not None
        return found

    def asking(self, node: str, name: str = "probe", annotations: Mapping[str, str] | None = None) -> Raw:
        where = {"kubernetes.io/hostname": node}
        # No container runs here, so a pod that is deleted with its node needs no longer grace period.
        return pod(name, 1, annotations, nodeSelector=where, terminationGracePeriodSeconds=1)

    async def has_gpu(self, node: str, name: str, *, labels: Mapping[str, str] | None = None) -> str:
        """Creates the pod as soon as it can get a GPU there; returns the GPU."""
        asked = self.asking(node, name)
        asked["metadata"]["labels"] = dict(labels or {})
        await wait_until(
            lambda: self.gpu_or_reason({**asked, "metadata": {**asked["metadata"], "name": "probe"}}), is_admitted
        )
        made = await self.kube.create(PODS, asked, self.namespace)
        return str(made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"])

    async def gpu_or_reason(self, asked: Raw) -> str:
        """The GPU that a dry run assigns, or the reason of the denial."""
        try:
            made = await self.kube.create(PODS, asked, self.namespace, dryRun="All")
        except ApiError as exc:
            return f"denied {exc.reason}"
        return str(made["metadata"]["annotations"].get("gpuwarden.io/gpu-uuid", "admitted"))

    async def is_answered(self, asked: Raw, expected: str) -> None:
        await wait_until(lambda: self.gpu_or_reason(asked), lambda gpu_or_reason: gpu_or_reason == expected)

    async def is_held(self, node: str, uuid: str) -> None:
        await wait_until(lambda: self.phase(node, uuid), lambda phase: phase == "finalized")

    async def phase(self, node: str, uuid: str) -> str | None:
        held = (await self.kube.get(GPU_NODES, node)).get("status", {}).get("held", {})
        phase: str | None = held.get(f"{uuid}/0", {}).get("phase")
        return phase

    async def wait_for_event(self, node: str, reason: str) -> str:
        """Waits for the event on the node and returns its message."""
        found = await wait_until(lambda: self.events(node, reason))
        assert len(found) == 1
        return found[0]

    async def events(self, node: str, reason: str) -> list[str]:
        selector = f"involvedObject.kind=Node,involvedObject.name={node},reason={reason}"
        return [one["message"] for one in await self.kube.list(EVENTS, "default", fieldSelector=selector)]

    async def sources(self, name: str) -> Raw | None:
        found = await self.kube.find(NODE_EVIDENCES, name)
        return None if found is None else dict(found.get("status", {}).get("sources", {}))


def devices_in(raw: Raw) -> dict[str, bool]:
    return {one["uuid"]: one.get("healthy", True) for one in raw["spec"].get("devices", ())}


def is_admitted(gpu_or_reason: str) -> bool:
    return not gpu_or_reason.startswith("denied")


@pytest.fixture
def flags() -> list[str]:
    """Additional flags of the reconciler."""
    return []


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, tmp_path: Path, flags: list[str]) -> AsyncIterator[Harness]:
    await installed(kube)
    where = ["--kubeconfig", str(cluster.kubeconfig)]
    async with AsyncExitStack() as stack:
        namespace = await stack.enter_async_context(new_namespace(kube, ENABLED))
        stack.push_async_callback(cleared, kube, namespace)
        inventory = tmp_path / "inventory.json"
        if flags:
            inventory.write_text('{"nodes": []}')
        short = ["--max-grace", "1s", "--orphan-margin", "1s"]  # no container runs here
        own = ["--lease-namespace", namespace, *short, *(flag.format(inventory=inventory) for flag in flags)]
        stack.enter_context(reconciling(tmp_path, *where, *own))
        server = stack.enter_context(serving(tmp_path, None, ["--ledger", "cluster", *where]))
        ca = server.directory / "certs/dev/ca.crt"
        await stack.enter_async_context(reviewed(kube, namespace, at_url(server.urls["https"]), ca))
        yield Harness(cluster, kube, namespace, inventory)


@contextmanager
def reconciling(directory: Path, *flags: str) -> Iterator[None]:
    """Starts a reconciler; without another one it is elected immediately."""
    command = [GPUWARDEN, "reconcile", "--ui-port", "0", *WITHOUT_EVIDENCE, *taken_by("reconcile", flags)]
    log = (directory / "reconcile.log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.kill()


async def cleared(kube: Kube, namespace: str) -> None:
    """Deletes all objects of a test, including its Events."""
    for one in await kube.list(PODS, namespace):
        with suppress(ApiError):
            await kube.delete(PODS, one["metadata"]["name"], namespace, grace=0)
    for of in (NODES, GPU_NODES, NODE_EVIDENCES):
        for one in await kube.list(of):
            if one["metadata"]["name"].startswith("disco-"):
                await delete_without_finalizers(kube, of, one["metadata"]["name"])
    for one in await kube.list(EVENTS, "default"):
        if one["involvedObject"]["name"] in NAMES:
            with suppress(ApiError):
                await kube.delete(EVENTS, one["metadata"]["name"], "default")


async def test_pod_gets_a_gpu_that_a_node_annotation_lists(harness: Harness) -> None:
    await harness.node(A, said("GPU-1", "GPU-2", GPU_2=["fudo.org/gpu.memory-80g"]))
    made = await harness.wait_for_devices(A, GPU_1=True, GPU_2=True)
    assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "gpuwarden"
    assert made["metadata"]["finalizers"] == ["gpuwarden.io/held"]
    assert await harness.has_gpu(A, "train", labels={"fudo.org/gpu.memory-80g": ""}) == "GPU-2"
    running = await pod_in_phase(harness.kube, harness.namespace, "train", "Running")
    assert running["spec"]["nodeName"] == A


@pytest.mark.defect("assigner-14")
async def test_invalid_annotation_is_reported_on_its_node_and_affects_no_other_node(harness: Harness) -> None:
    await harness.node(A, said("GPU-a"))
    await harness.wait_for_devices(A, GPU_a=True)
    await harness.annotate_node(A, "not base64!")
    await harness.node(B, said("GPU-b"))
    await harness.wait_for_devices(B, GPU_b=True)
    assert "it is not base64" in await harness.wait_for_event(A, "DevicesUnreadable")
    assert await harness.has_gpu(B, "train-b") == "GPU-b"
    assert await harness.has_gpu(A, "train-a") == "GPU-a"  # known devices stay


async def test_unreadable_gpunode_affects_no_other_node_and_recovers_when_repaired(harness: Harness) -> None:
    """No reservation is lost, and other nodes are served without delay."""
    await harness.node(A, said("GPU-a", "GPU-a2"))
    first_gpu = await harness.has_gpu(A, "first")
    (left,) = {"GPU-a", "GPU-a2"} - {first_gpu}
    await harness.is_held(A, first_gpu)
    await harness.node(B, said("GPU-b"))
    await harness.is_answered(harness.asking(B), "GPU-b")
    entry = {"reservation": "x", "phase": "pending", "namespace": harness.namespace, "digest": "d"}
    # a date that Python cannot represent
    held = {"status": {"held": {"GPU-x/0": {**entry, "since": "0000-01-01T00:00:00Z"}}}}
    await harness.kube.patch(GPU_NODES, A, held, subresource="status")
    assert "GPUNode cannot be read" in await harness.wait_for_event(A, "DevicesUnreadable")
    await wait_until(
        lambda: harness.gpu_or_reason(harness.asking(A)), lambda gpu_or_reason: not is_admitted(gpu_or_reason)
    )
    either = {"key": "kubernetes.io/hostname", "operator": "In", "values": [A, B]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [either]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    second = await harness.kube.create(PODS, pod("second", 1, affinity=affinity), harness.namespace)
    assert second["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-b"
    assert await harness.phase(A, first_gpu) == "finalized"
    await harness.kube.patch(
        GPU_NODES, A, {"status": {"held": {"GPU-x/0": {"phase": "releasing"}}}}, subresource="status"
    )
    await harness.kube.patch(GPU_NODES, A, {"status": {"held": {"GPU-x/0": None}}}, subresource="status")
    await harness.is_answered(harness.asking(A), left)
    await harness.kube.delete(PODS, "first", harness.namespace)
    await wait_until(lambda: harness.phase(A, first_gpu), lambda phase: phase is None)


async def test_a_gpu_that_changes_its_uuid_while_held_is_quarantined_until_its_pod_ends(harness: Harness) -> None:
    await harness.node(A, said("GPU-old"))
    assert await harness.has_gpu(A, "first") == "GPU-old"
    await harness.is_held(A, "GPU-old")
    await harness.annotate_node(A, said("GPU-new"))
    await harness.wait_for_devices(A, GPU_old=False, GPU_new=True)
    assert (await harness.wait_for_event(A, "DeviceVanished")).startswith("GPU-old")
    assert await harness.has_gpu(A, "second") == "GPU-new"
    assert await harness.gpu_or_reason(harness.asking(A)) == "denied NoFreeDevice"
    await harness.kube.delete(PODS, "first", harness.namespace)
    await harness.wait_for_devices(A, GPU_new=True)
    assert await harness.gpu_or_reason(harness.asking(A)) == "denied NoFreeDevice"


async def test_gpu_that_returns_is_available_and_a_free_gpu_is_removed_at_once(harness: Harness) -> None:
    await harness.node(A, said("GPU-1", "GPU-2"))
    held = await harness.has_gpu(A, "first")
    await harness.is_held(A, held)
    (free,) = {"GPU-1", "GPU-2"} - {held}
    await harness.annotate_node(A, None)
    await harness.wait_for_devices(A, **{held: False})
    await harness.annotate_node(A, said("GPU-1", "GPU-2"))
    await harness.wait_for_devices(A, GPU_1=True, GPU_2=True)
    assert await harness.has_gpu(A, "second") == free


async def test_gpu_listed_by_two_nodes_is_unavailable_until_one_node_is_gone(harness: Harness) -> None:
    await harness.node(A, said("GPU-twin"))
    await harness.node(B, said("GPU-twin"))
    assert f"GPU-twin is also on {B}" in await harness.wait_for_event(A, "DeviceDisputed")
    assert f"GPU-twin is also on {A}" in await harness.wait_for_event(B, "DeviceDisputed")
    for name in NAMES:
        await wait_until(
            lambda name=name: harness.gpu_or_reason(harness.asking(name)),  # type: ignore[misc]  # bound now
            lambda one: not is_admitted(one),
        )
    await harness.kube.delete(NODES, B)
    assert await harness.has_gpu(A, "train") == "GPU-twin"
    await gone(harness.kube, GPU_NODES, B)


async def test_node_that_is_deleted_and_recreated_keeps_its_reservations(harness: Harness) -> None:
    await harness.node(A, said("GPU-1", "GPU-2"))
    held = await harness.has_gpu(A, "first")
    (free,) = {"GPU-1", "GPU-2"} - {held}
    await harness.is_held(A, held)
    before = (await harness.kube.get(GPU_NODES, A))["metadata"]["uid"]
    await harness.kube.delete(NODES, A)
    await harness.wait_for_event(A, "NodeGone")
    await harness.node(A, said("GPU-1", "GPU-2"))
    assert await harness.has_gpu(A, "second") == free
    after = await harness.wait_for_devices(A, GPU_1=True, GPU_2=True)
    assert after["metadata"]["uid"] == before


async def test_gpunode_is_deleted_after_its_node_and_its_last_pod(harness: Harness) -> None:
    await harness.node(A, said("GPU-1"))
    await harness.has_gpu(A, "train")
    await harness.is_held(A, "GPU-1")
    await harness.kube.delete(NODES, A)
    await harness.wait_for_event(A, "NodeGone")
    assert await harness.phase(A, "GPU-1") == "finalized"
    await harness.kube.delete(PODS, "train", harness.namespace, grace=0)
    await gone(harness.kube, GPU_NODES, A)
    await harness.node(A, said("GPU-1"))
    assert await harness.has_gpu(A, "again") == "GPU-1"


async def test_manually_created_gpunode_is_not_changed(harness: Harness) -> None:
    await harness.kube.create(GPU_NODES, gpu_node(A, "GPU-hand"))
    await harness.node(A)
    assert await harness.has_gpu(A, "train") == "GPU-hand"
    await harness.kube.delete(PODS, "train", harness.namespace)
    await harness.kube.delete(NODES, A)
    await harness.node(B, said("GPU-b"))  # processed after the other object
    await harness.wait_for_devices(B, GPU_b=True)
    assert "deletionTimestamp" not in (await harness.kube.get(GPU_NODES, A))["metadata"]


class TestWithAnInventoryFile:
    @pytest.fixture
    def flags(self) -> list[str]:
        return [
            "--inventory",
            "{inventory}",
            "--node-hash-map",
            json.dumps({A: HASH}).replace("{", "{{").replace("}", "}}"),
        ]

    async def test_evidence_of_an_inventory_file_is_used_for_pods(self, harness: Harness) -> None:
        await harness.node(A, said("GPU-a"))
        harness.inventory.write_text(
            json.dumps({"nodes": [{"name": B, "evidence": {"hash": OTHER_HASH}, "devices": [{"uuid": "GPU-b"}]}]})
        )
        await harness.node(B)
        hashes = {A: HASH, B: OTHER_HASH}
        for name, one in hashes.items():
            asked = pod("probe", 1, {"gpuwarden.io/required-hash": one})
            await harness.is_answered(asked, f"GPU-{name[-1]}")
        assert await harness.sources(A) == {"static": {"hash": HASH, "banned": False, "conflict": False}}
        harness.inventory.write_text(json.dumps({"nodes": [{"name": A, "evidence": {"hash": OTHER_HASH}}]}))
        await wait_until(lambda: harness.sources(B), lambda sources: sources == {})
        for one in hashes.values():  # one node has no evidence, the other has conflicting evidence
            await harness.is_answered(pod("probe", 1, {"gpuwarden.io/required-hash": one}), "denied NoProvenNode")
        for name in hashes:
            await harness.kube.delete(NODES, name)
        await gone(harness.kube, NODE_EVIDENCES, B)
        assert await harness.sources(A)  # the file still lists it

    async def test_node_with_2000_gpus_is_one_object_and_delays_no_other_node(self, harness: Harness) -> None:
        devices = [
            {"uuid": f"GPU-{k:08x}-0000-4000-8000-000000000000", "index": k, "model": "H100", "memory": "80Gi"}
            | {"serial": f"16503{k:08}", "labels": ["fudo.org/gpu.memory-80g", "model=h100", "zone=a"]}
            for k in range(2000)
        ]
        harness.inventory.write_text(json.dumps({"nodes": [{"name": A, "devices": devices}]}))
        await harness.node(A)
        await harness.node(B, said("GPU-b"))
        assert await harness.has_gpu(B, "train-b") == "GPU-b"
        uuid = await harness.has_gpu(A, "train-a")
        await harness.is_held(A, uuid)
        found = await harness.kube.get(GPU_NODES, A)
        assert len(devices_in(found)) == 2000
        assert len(json.dumps(found)) < 1.5 * 1024 * 1024


PROOF = {"hash": HASH, "banned": False, "conflict": False, "nonceDigest": "n2"}
SINCE, UNTIL = "2026-03-02T12:00:00Z", "2026-03-02T13:00:00Z"


@pytest.fixture
async def proven(kube: Kube) -> AsyncIterator[Kube]:
    """A node with evidence from 12:00 to 13:00."""
    await installed(kube)
    await kube.create(NODE_EVIDENCES, new_node_evidence(A))
    await kube.patch(NODE_EVIDENCES, A, sources({**PROOF, "since": SINCE, "until": UNTIL}), subresource="status")
    yield kube
    await kube.delete(NODE_EVIDENCES, A)


def sources(entry: Raw | None, source: str = "jwt-svid") -> Raw:
    return {"status": {"sources": {source: entry}}}


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        pytest.param({"nonceDigest": "n1"}, "jwt-svid", id="issued at the same time"),
        pytest.param({"nonceDigest": "n1", "since": "2026-03-02T11:59:59.999999Z"}, "jwt-svid", id="issued before"),
        pytest.param({"nonceDigest": None, "since": "2026-03-02T12:30:00Z"}, "jwt-svid", id="without a nonce"),
        pytest.param({"hash": OTHER_HASH}, "jwt-svid", id="another hash"),
        pytest.param({"until": "2026-03-02T14:00:00Z"}, "jwt-svid", id="longer validity"),
        pytest.param({"nonceDigest": None, "challenged": SINCE}, "jwt-svid", id="challenged without a nonce"),
        pytest.param({"banned": None}, "jwt-svid", id="without banned"),
        pytest.param({"hash": HASH, "banned": False, "conflict": False}, "spire-server", id="without an end"),
        pytest.param({"banned": False, "conflict": False}, "static", id="without a hash"),
    ],
)
async def test_api_server_refuses_inconsistent_evidence(proven: Kube, changes: Raw, source: str) -> None:
    with pytest.raises(ApiError) as refused:
        await proven.patch(NODE_EVIDENCES, A, sources(changes, source), subresource="status")
    assert refused.value.status == 422


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        pytest.param({"nonceDigest": "n3", "since": "2026-03-02T12:30:00Z", "until": UNTIL}, "jwt-svid", id="later"),
        pytest.param({"banned": True}, "jwt-svid", id="banned"),
        pytest.param({"until": "2026-03-02T12:30:00Z"}, "jwt-svid", id="ended earlier"),
        pytest.param({"hash": HASH, "banned": False, "conflict": False}, "static", id="another source"),
    ],
)
async def test_api_server_accepts_consistent_evidence(proven: Kube, changes: Raw, source: str) -> None:
    await proven.patch(NODE_EVIDENCES, A, sources(changes, source), subresource="status")
    await proven.patch(NODE_EVIDENCES, A, sources(None, source), subresource="status")


CHALLENGED = "2026-03-02T11:59:59.5Z"
AGAIN = {"nonceDigest": "n3", "since": "2026-03-02T12:30:00Z", "until": UNTIL}


@pytest.fixture
async def answered(proven: Kube) -> Kube:
    """Its evidence was written by a version that records the time of the challenge."""
    await proven.patch(NODE_EVIDENCES, A, sources({"challenged": CHALLENGED}), subresource="status")
    return proven


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**AGAIN, "challenged": CHALLENGED}, id="same time"),
        pytest.param({**AGAIN, "challenged": "2026-03-02T11:59:59.499Z"}, id="earlier"),
        pytest.param({**AGAIN, "challenged": None}, id="unknown time"),
        pytest.param({"challenged": None}, id="time removed"),
        pytest.param({"challenged": "2026-03-02T12:00:00Z"}, id="same nonce again"),
    ],
)
async def test_api_server_refuses_an_answer_to_an_older_challenge(answered: Kube, changes: Raw) -> None:
    with pytest.raises(ApiError) as refused:
        await answered.patch(NODE_EVIDENCES, A, sources(changes), subresource="status")
    assert refused.value.status == 422


@pytest.mark.parametrize("challenged", ["2026-03-02T11:59:59.501Z", "2026-03-02T12:29:59+00:00"])
async def test_api_server_accepts_an_answer_to_a_later_challenge(answered: Kube, challenged: str) -> None:
    await answered.patch(NODE_EVIDENCES, A, sources({**AGAIN, "challenged": challenged}), subresource="status")
    await answered.patch(NODE_EVIDENCES, A, sources({"until": "2026-03-02T12:45:00Z"}), subresource="status")
