"""Replicas of the previous version and of this version serve one cluster during an upgrade and a rollback. Some nodes
and pods have the injection nvidia, others dra."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from scripts.controlplane.cluster import ROOT, Cluster
from tests.e2e.conftest import emptied_namespace
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_SLICES,
    device_classes,
    proof_devices,
    remove_slices,
    slice_of_gpus,
)
from tests.e2e.kube import NODES, ApiError, Kube, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import KINDS, OPT_IN, Site, Worker, site
from tests.e2e.skipping import skip_or_fail
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.workload import HASH, INJECTION, Workload, workload
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import Installation, dra, webhooks, while_down

# The commit of the previous version, whose replicas may still serve during the rollout.
BEFORE = "5dec181"
NODE_COUNT, GPUS = 3, 4
# The node whose GPUs come by ResourceClaims.
WITH_CLAIMS = "roll-2"
# Created in each namespace in each stage, while others are deleted.
PODS_A_STAGE = 12
DEADLINE, SKEW = 15, 1
PROVEN = json.dumps({f"roll-{number}": HASH for number in range(NODE_COUNT)})
FLAGS = (
    *("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s"),
    *("--proof-devices", "true", "--node-hash-map", PROVEN),
)
PATIENCE = 120.0


@pytest.fixture
def old(tmp_path: Path) -> list[str]:
    """The command of the previous version."""
    tree = tmp_path / "before"
    tree.mkdir()
    archive = ["git", "archive", BEFORE, "webhook"]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        skip_or_fail("HISTORY", f"the history of this clone does not reach back to {BEFORE}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed.stdout, check=True)  # noqa: S607
    run = "import sys; from webhook.cli import main; sys.exit(main())"
    return ["/usr/bin/env", f"PYTHONPATH={tree}", sys.executable, "-c", run]


# Run by the previous version.
ITS_MANIFESTS = """
import json, sys
from webhook.kube.install.policies import Installation, dra, webhooks, while_down
namespace, port, bundle = sys.argv[1:]
installation = Installation(namespace, port=int(port), ca_bundle=open(bundle, "rb").read())
print(json.dumps([*while_down(installation), *dra(installation), *webhooks(installation)]))
"""


def manifests_before(here: Site, old: list[str]) -> list[Raw]:
    *run, _ = old
    command = [*run, ITS_MANIFESTS, here.own_namespace, str(here.balancer.port), str(here.directory / "ca.crt")]
    found: list[Raw] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return without_classes(found)


def manifests_now(here: Site) -> list[Raw]:
    bundle = (here.directory / "ca.crt").read_bytes()
    installation = Installation(here.own_namespace, port=here.balancer.port, ca_bundle=bundle)
    return without_classes([*while_down(installation), *dra(installation), *webhooks(installation)])


def without_classes(found: Iterable[Raw]) -> list[Raw]:
    return [one for one in found if one["kind"] != "DeviceClass"]


async def apply(kube: Kube, wanted: Iterable[Raw], gone: Iterable[Raw] = ()) -> None:
    """Applies manifests as helm does: existing objects are changed, and objects of the other version only are
    deleted."""
    names = set()
    for manifest in wanted:
        of, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
        names.add((manifest["kind"], name))
        there = await kube.find(of, name)
        if there is None:
            await kube.create(of, manifest)
        else:
            meta = {**manifest["metadata"], "resourceVersion": there["metadata"]["resourceVersion"]}
            await kube.replace(of, {**manifest, "metadata": meta})
    for manifest in gone:
        if (manifest["kind"], manifest["metadata"]["name"]) not in names:
            with suppress(ApiError):
                await kube.delete(KINDS[manifest["kind"]], manifest["metadata"]["name"])


async def stop_gracefully(worker: Worker) -> None:
    """Stops a replica as in a rolling update: it finishes what is in flight."""
    worker.process.terminate()
    await asyncio.wait_for(worker.process.wait(), PATIENCE)


async def replace_replica(here: Site, leaving: Worker, program: list[str] | None) -> Worker:
    """Starts a replica of the other version, then stops this one."""
    coming = await (here.replica() if program is None else here.replica(program=program))
    here.balancer.servers.remove(leaving)
    await stop_gracefully(leaving)
    return coming


@asynccontextmanager
async def mixed_site(cluster: Cluster, kube: Kube, directory: Path) -> AsyncIterator[Site]:
    """Nodes of both injections, without a process yet."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(device_classes(kube, GPU_DRIVER, DRIVER))
        here = await stack.enter_async_context(
            site(cluster, kube, directory, nodes=NODE_COUNT, gpus=GPUS, name="roll", flags=FLAGS)
        )
        stack.push_async_callback(cleared, kube, here.nodes)
        await kube.patch(NODES, WITH_CLAIMS, {"metadata": {"labels": {INJECTION: "dra"}}})
        await kube.create(RESOURCE_SLICES, slice_of_gpus(WITH_CLAIMS, [f"GPU-{WITH_CLAIMS}-{k}" for k in range(GPUS)]))
        yield here


async def cleared(kube: Kube, nodes: Iterable[str]) -> None:
    await remove_slices(kube, *nodes)
    for node in nodes:
        with suppress(ApiError):
            await kube.delete(NODE_EVIDENCES, node)


async def test_upgrade_and_rollback_assign_no_gpu_twice_and_lose_no_reservation(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, old: list[str]
) -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(mixed_site(cluster, kube, tmp_path))
        before, now = manifests_before(here, old), manifests_now(here)
        stack.push_async_callback(apply, kube, (), gone=guards_of([*before, *now]))
        await apply(kube, before, gone=now)
        first = await here.replica(program=old)
        second = await here.replica(program=old)
        leader = await here.reconciler(program=old)
        await here.wait_until_reviewed()
        await wait_until(lambda: proof_devices(kube, WITH_CLAIMS), lambda found: len(found) == GPUS)
        by_claims = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
        both = [
            await stack.enter_async_context(workload(here, name, seed))
            for seed, name in enumerate((here.namespace, by_claims))
        ]
        await both[1].change_injection("dra")
        for one in both:
            await one.create_lasting("before")
        await stage(both)
        await apply(kube, now)
        first = await replace_replica(here, first, None)  # one of each version serves, the old one reconciles
        await stage(both)
        await stop_gracefully(leader)
        leader = await here.reconciler()
        for one in both:
            await one.create_lasting("between")
        await stage(both)
        second = await replace_replica(here, second, None)  # upgraded
        await stage(both)
        await apply(kube, before, gone=now)
        first = await replace_replica(here, first, old)  # and back
        await stop_gracefully(leader)
        leader = await here.reconciler(program=old)
        await stage(both)
        await replace_replica(here, second, old)
        await stage(both)
        await wait_until(lambda: reservations_match_pods(here), seconds=PATIENCE)
        here.checker.assert_no_violations()
        assert [fault for one in both for fault in one.faults()] == []
        report_figures(
            request,
            pods=len(here.checker.seen),
            by_claims=len(both[1].seen.claims),
            refused=dict(both[0].storm.tally.why + both[1].storm.tally.why),
            unclear=[words for one in both for words in one.storm.tally.unclear][:3],
        )
        await apply(kube, now)  # deleted when the site ends


def guards_of(manifests: Iterable[Raw]) -> list[Raw]:
    """The manifests that the end of the site does not delete."""
    known = {one["metadata"]["name"] for one in (*while_down(Installation()), *webhooks(Installation()))}
    return [one for one in manifests if one["metadata"]["name"] not in known]


async def stage(both: Iterable[Workload]) -> None:
    """Pods of both injections are created and end."""
    await asyncio.gather(*(one.create(PODS_A_STAGE) for one in both))


async def reservations_match_pods(here: Site) -> bool:
    """Whether exactly the GPUs of live pods are reserved."""
    held = await here.held()
    return {slot.rpartition("/")[0] for slot in held} == here.checker.gpus
