"""Proof devices from a real reconciler to pods: Kubernetes allocates proven GPUs only, and evicts when proof ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from attrs import define, field

from scripts.controlplane.cluster import ROOT, Cluster, gpu_node
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    RESOURCE_SLICES,
    allocation,
    bound,
    claim_template,
    claiming,
    claiming_pod,
    ended,
    gpus_of,
    marked_for_deletion,
    proof_devices,
    proof_slices,
    published_gpus,
    refused_by_scheduler,
    remove_slices,
)
from tests.e2e.evidence import stamp, write_evidence
from tests.e2e.kube import NODES, PODS, Kube, Raw, Resource, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, Worker, remove_nodes
from tests.e2e.test_discovery import ANNOTATION, NODE_EVIDENCES, said
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.running import GPUWARDEN, WITHOUT_EVIDENCE, challenging, taken_by
from webhook.runtime.clock import utc_now

HASH, OTHER_HASH = "sha256:aa11", "sha256:bb22"
A, B = NODE_NAMES = ("proof-a", "proof-b")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
LONG = timedelta(minutes=30)


@define(eq=False)
class Proofs:
    """Nodes with GPUs, and a reconciler that publishes proof devices."""

    cluster: Cluster
    kube: Kube
    namespace: str
    directory: Path
    flags: Sequence[str] = ()
    _worker: Worker | None = field(default=None, init=False)

    async def start(self, program: Collection[str] = (GPUWARDEN,)) -> None:
        where = ["--kubeconfig", str(self.cluster.kubeconfig), "--lease-namespace", self.namespace]
        flags = [*where, *challenging(self.directory), "--proof-devices", "true", "--log-level", "info", *self.flags]
        own = ["reconcile", "--ui-port", "0", *WITHOUT_EVIDENCE, *taken_by("reconcile", flags)]
        log = self.directory / "reconcile.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*program, *own, stdout=file, stderr=file)
        self._worker = Worker(process, log)
        await self._worker.wait_for_log("leading")

    async def kill(self) -> None:
        if self._worker is not None:
            await self._worker.kill()

    async def restart(self, program: Collection[str] = (GPUWARDEN,)) -> None:
        await self.kill()
        await self.kube.delete(LEASES, "gpuwarden-reconcile", self.namespace)  # the next one need not wait for its end
        await self.start(program)

    async def node(self, name: str, gpus: int, listed: Collection[str] | None = None) -> list[str]:
        """Creates a node whose GPUs a DRA driver publishes. Returns their UUIDs. With `listed`, the inventory has only
        these."""
        one = gpu_node(name, 0)
        if listed is not None:
            one["metadata"]["annotations"] = {ANNOTATION: said(*listed)}
        await asyncio.to_thread(self.cluster.add_nodes, [one])
        return await published_gpus(self.kube, name, gpus)

    async def proves(self, node: str, hash: str = HASH, lasts: timedelta = LONG) -> datetime:
        """Writes evidence as a replica of `serve` does. Returns its end."""
        return await write_evidence(self.kube, node, hash, lasts)

    async def withdraws(self, node: str) -> None:
        await self.kube.delete(NODE_EVIDENCES, node)

    async def published(self, node: str, *uuids: str) -> dict[str, Raw]:
        """Waits until exactly these GPUs have proof devices."""
        return await wait_until(lambda: proof_devices(self.kube, node), lambda found: set(found) == set(uuids))

    async def ends(self, node: str) -> set[str]:
        found = await proof_devices(self.kube, node)
        return {taint["timeAdded"] for one in found.values() for taint in one["taints"]}

    async def pod(self, name: str, count: int = 1, hash: str = HASH) -> None:
        await claiming(self.kube, self.namespace, name, count, hash)

    async def gpus_of(self, name: str) -> list[str]:
        """The GPUs of the pod, once it is bound."""
        await bound(self.kube, self.namespace, name)
        return await gpus_of(self.kube, self.namespace, name)


@pytest.fixture
async def proofs(cluster: Cluster, kube: Kube, classes: None, tmp_path: Path) -> AsyncIterator[Proofs]:
    await installed(kube)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cleared, kube)
        namespace = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
        here = Proofs(cluster, kube, namespace, tmp_path)
        stack.push_async_callback(here.kill)
        await here.start()
        yield here


async def cleared(kube: Kube) -> None:
    await remove_slices(kube, *NODE_NAMES)
    await remove_nodes(kube, NODE_NAMES, (GPU_NODES, NODE_EVIDENCES, NODES))


async def test_pods_get_the_proven_gpus_and_wait_when_only_unproven_ones_are_free(proofs: Proofs) -> None:
    proven = await proofs.node(A, 2)
    await proofs.node(B, 2)
    end = await proofs.proves(A)
    found = await proofs.published(A, *proven)
    assert {one["attributes"]["hash"]["string"] for one in found.values()} == {"aa11"}
    assert await proofs.ends(A) == {stamp(end)}
    (raw,) = await proof_slices(proofs.kube, A)
    assert "nodeName" not in raw["spec"]
    await proofs.pod("first")
    await proofs.pod("second")
    assert sorted([*await proofs.gpus_of("first"), *await proofs.gpus_of("second")]) == sorted(proven)
    await proofs.pod("third")
    await refused_by_scheduler(proofs.kube, proofs.namespace, "third")
    await proofs.proves(B, OTHER_HASH)
    await wait_until(lambda: proof_devices(proofs.kube, B))
    await proofs.pod("fourth")
    await refused_by_scheduler(proofs.kube, proofs.namespace, "fourth")
    await proofs.proves(B)
    await bound(proofs.kube, proofs.namespace, "third")
    (pair,) = await allocation(proofs.kube, proofs.namespace, "third")
    assert (pair.node, pair.gpu) == (B, pair.proof)


async def test_pod_gets_several_gpus_each_with_its_own_proof(proofs: Proofs) -> None:
    uuids = await proofs.node(A, 6, listed=[f"GPU-{A}-{number}" for number in (0, 2, 3, 5)])
    proven = [uuids[number] for number in (0, 2, 3, 5)]
    await proofs.proves(A)
    await proofs.published(A, *proven)
    await proofs.pod("three", 3)
    await proofs.pod("one")
    three, one = await proofs.gpus_of("three"), await proofs.gpus_of("one")
    assert sorted([*three, *one]) == proven


async def test_pod_is_deleted_when_evidence_ends_while_no_process_of_ours_runs(
    proofs: Proofs, request: pytest.FixtureRequest
) -> None:
    uuids = await proofs.node(A, 1)
    await proofs.proves(A, lasts=timedelta(seconds=5))
    await proofs.published(A, *uuids)
    await proofs.pod("train")
    await proofs.gpus_of("train")
    await proofs.kill()
    (end,) = await proofs.ends(A)
    assert utc_now() < datetime.fromisoformat(end)
    await marked_for_deletion(proofs.kube, proofs.namespace, "train")
    late = (utc_now() - datetime.fromisoformat(end)).total_seconds()
    report_figures(request, seconds_from_the_end_to_the_deletion=late)
    assert 0 <= late < 1


@pytest.mark.parametrize("is_other_hash", [False, True], ids=["withdrawn", "another hash"])
async def test_pod_is_deleted_when_its_node_loses_its_evidence_early(
    proofs: Proofs, request: pytest.FixtureRequest, is_other_hash: bool
) -> None:
    uuids = await proofs.node(A, 1)
    await proofs.proves(A)
    await proofs.published(A, *uuids)
    await proofs.pod("train")
    await proofs.gpus_of("train")
    lost = time.monotonic()
    if is_other_hash:
        await proofs.proves(A, OTHER_HASH)
    else:
        await proofs.withdraws(A)
    await marked_for_deletion(proofs.kube, proofs.namespace, "train")
    late = time.monotonic() - lost
    report_figures(request, seconds_from_the_loss_to_the_deletion=late)
    assert late < 2


async def test_proof_device_in_use_is_removed_only_after_its_pod(proofs: Proofs, tmp_path: Path) -> None:
    """Without the device, the pod would not be evicted later."""
    await proofs.restart(removing_after(tmp_path, seconds=2))
    used, unused = await proofs.node(A, 1), await proofs.node(B, 1)
    for node, uuids in ((A, used), (B, unused)):
        await proofs.proves(node)
        await proofs.published(node, *uuids)
    stays = await claim_template(proofs.kube, proofs.namespace, 1, HASH, evicts=False)
    pod = claiming_pod("stays", resourceClaimTemplateName=stays)
    pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": A}
    await proofs.kube.create(PODS, pod, proofs.namespace)
    assert await proofs.gpus_of("stays") == used
    await proofs.withdraws(A)
    await wait_until(lambda: proofs.ends(A), lambda ends: all(datetime.fromisoformat(one) <= utc_now() for one in ends))
    await proofs.withdraws(B)
    await wait_until(lambda: proof_slices(proofs.kube, B), lambda found: found == [])
    await proofs.published(A, *used)
    await ended(proofs.kube, proofs.namespace, "stays")
    await wait_until(lambda: proof_slices(proofs.kube, A), lambda found: found == [])


def removing_after(directory: Path, seconds: float) -> list[str]:
    """A gpuwarden that removes ended devices sooner."""
    (directory / "sitecustomize.py").write_text(SOONER.format(seconds=seconds))
    return ["/usr/bin/env", f"PYTHONPATH={directory}:{ROOT}", GPUWARDEN]


SOONER = """
from datetime import timedelta
import webhook.core.proof_devices
webhook.core.proof_devices.KEPT_AFTER_END = timedelta(seconds={seconds})
"""


async def test_gpu_held_by_a_reservation_has_no_proof_device(proofs: Proofs) -> None:
    first, second = await proofs.node(A, 2)
    await wait_until(lambda: proofs.kube.find(GPU_NODES, A))
    entry = {"reservation": "r", "phase": "finalized", "namespace": "ml", "digest": "d", "uid": "u"}
    held = {f"{first}/0": {**entry, "since": stamp(utc_now())}}
    await proofs.kube.patch(GPU_NODES, A, {"status": {"held": held}}, subresource="status")
    await proofs.proves(A)
    await proofs.published(A, second)
    going = {f"{first}/0": {"phase": "releasing"}}
    await proofs.kube.patch(GPU_NODES, A, {"status": {"held": going}}, subresource="status")
    await proofs.kube.patch(GPU_NODES, A, {"status": {"held": {f"{first}/0": None}}}, subresource="status")
    await proofs.published(A, first, second)


async def test_slices_that_somebody_deleted_changed_or_added_are_repaired(proofs: Proofs) -> None:
    uuids = await proofs.node(A, 2)
    await proofs.proves(A)
    await proofs.published(A, *uuids)
    (raw,) = await proof_slices(proofs.kube, A)
    name = raw["metadata"]["name"]
    await proofs.kube.delete(RESOURCE_SLICES, name)
    await proofs.published(A, *uuids)
    changed = await proofs.kube.get(RESOURCE_SLICES, name)
    first = changed["spec"]["devices"][0]
    del first["taints"]
    await proofs.kube.replace(RESOURCE_SLICES, changed)
    await wait_until(lambda: untainted(proofs.kube, A), lambda names: names == [])
    forged = {**raw, "metadata": {"name": "forged"}}
    forged["spec"]["pool"] |= {"generation": 99}
    await proofs.kube.create(RESOURCE_SLICES, forged)
    await wait_until(lambda: proof_slices(proofs.kube, A), lambda found: names_of(found) == [name])
    await proofs.published(A, *uuids)


async def untainted(kube: Kube, node: str) -> list[str]:
    return [one["name"] for one in (await proof_devices(kube, node)).values() if "taints" not in one]


def names_of(found: Collection[Raw]) -> list[str]:
    return [one["metadata"]["name"] for one in found]


async def test_new_leader_writes_no_slice_that_is_right(proofs: Proofs) -> None:
    uuids = await proofs.node(A, 3)
    await proofs.proves(A)
    await proofs.published(A, *uuids)
    (before,) = await proof_slices(proofs.kube, A)
    await proofs.restart()
    other = await proofs.node(B, 1)
    await proofs.proves(B)
    await proofs.published(B, *other)
    assert await proof_slices(proofs.kube, A) == [before]


async def test_eight_proven_gpus_of_sixteen_are_found_and_seven_stall_no_other_pod(
    proofs: Proofs, request: pytest.FixtureRequest
) -> None:
    """The allocator tries permutations of the GPUs before it gives up on a node."""
    listed = {A: [f"GPU-{A}-{number}" for number in range(0, 16, 2)], B: [f"GPU-{B}-{2 * k + 1}" for k in range(7)]}
    for node, uuids in listed.items():
        await proofs.node(node, 16, uuids)
        await proofs.proves(node)
        await proofs.published(node, *uuids)
    eight = await seconds_to_bound(proofs, "eight", 8)
    assert sorted(await proofs.gpus_of("eight")) == sorted(listed[A])
    await proofs.pod("too-many", 8)
    await refused_by_scheduler(proofs.kube, proofs.namespace, "too-many")
    one = await seconds_to_bound(proofs, "one", 1)
    assert set(await proofs.gpus_of("one")) <= set(listed[B])
    report_figures(request, seconds_to_bound_with_8_of_16=eight, seconds_to_bound_beside_a_pod_without_place=one)
    assert max(eight, one) < 5


async def seconds_to_bound(proofs: Proofs, name: str, count: int) -> float:
    await claim_template(proofs.kube, proofs.namespace, count, HASH)
    begun = time.monotonic()
    await proofs.pod(name, count)
    await bound(proofs.kube, proofs.namespace, name)
    return time.monotonic() - begun
