"""Replicas of the previous version and of this version serve one cluster during an upgrade and a rollback."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.controlplane.cluster import ROOT, Cluster
from tests.e2e.kube import ApiError, Kube, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import KINDS, Site, Worker, site
from tests.e2e.skipping import skip_or_fail
from tests.e2e.storm import Storm, mixed
from webhook.kube.install.policies import Installation, webhooks, while_down

# The commit of the previous version, whose replicas may still serve during the rollout.
BEFORE = "b85fc47"
NODES, GPUS = 3, 4
# The time of each stage, while pods are created and deleted.
PODS_A_STAGE = 30
DEADLINE, SKEW = 15, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
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
ITS_WEBHOOKS = """
import json, sys
from webhook.kube.install.policies import Installation, webhooks
namespace, port, bundle = sys.argv[1:]
print(json.dumps(webhooks(Installation(namespace, port=int(port), ca_bundle=open(bundle, "rb").read()))))
"""


def manifests_before(here: Site, old: list[str]) -> list[Raw]:
    *run, _ = old
    command = [*run, ITS_WEBHOOKS, here.own_namespace, str(here.balancer.port), str(here.directory / "ca.crt")]
    found: list[Raw] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def manifests_now(here: Site) -> list[Raw]:
    bundle = (here.directory / "ca.crt").read_bytes()
    installation = Installation(here.own_namespace, port=here.balancer.port, ca_bundle=bundle)
    return [*while_down(installation), *webhooks(installation)]


async def apply(kube: Kube, wanted: Iterable[Raw], gone: Iterable[Raw] = ()) -> None:
    """Applies manifests as helm does: existing objects are changed, and objects of the other version only are
    deleted."""
    names = set()
    for manifest in wanted:
        of, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
        names.add((manifest["kind"], name))
        try:
            there = await kube.get(of, name)
        except ApiError:
            await kube.create(of, manifest)
        else:
            meta = {**manifest["metadata"], "resourceVersion": there["metadata"]["resourceVersion"]}
            await kube.replace(of, {**manifest, "metadata": meta})
    for manifest in gone:
        if (manifest["kind"], manifest["metadata"]["name"]) not in names:
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


async def test_upgrade_and_rollback_assign_no_gpu_twice_and_lose_no_reservation(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, old: list[str]
) -> None:
    async with site(cluster, kube, tmp_path, nodes=NODES, gpus=GPUS, name="roll", flags=FLAGS) as here:
        before, now = manifests_before(here, old), manifests_now(here)
        await apply(kube, before, gone=now)
        first = await here.replica(program=old)
        second = await here.replica(program=old)
        leader = await here.reconciler(program=old)
        await here.wait_until_reviewed()
        storm = Storm(here, clients=8)
        reaping = asyncio.create_task(storm.reap(0.7))
        try:
            await storm.create(PODS_A_STAGE, mixed)
            await apply(kube, now)
            first = await replace_replica(here, first, None)  # one of each version serves
            await storm.create(PODS_A_STAGE, mixed)
            await stop_gracefully(leader)
            leader = await here.reconciler()
            await storm.create(PODS_A_STAGE, mixed)
            second = await replace_replica(here, second, None)  # upgraded
            await storm.create(PODS_A_STAGE, mixed)
            await apply(kube, before, gone=now)
            first = await replace_replica(here, first, old)  # and back
            await stop_gracefully(leader)
            leader = await here.reconciler(program=old)
            await storm.create(PODS_A_STAGE, mixed)
            await replace_replica(here, second, old)
            await storm.create(PODS_A_STAGE, mixed)
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)
        here.checker.assert_no_violations()
        await wait_until(lambda: reservations_match_pods(here), seconds=PATIENCE)
        await apply(kube, now)  # deleted when the site ends
        report_figures(
            request, pods=len(here.checker.seen), refused=dict(storm.tally.why), unclear=storm.tally.unclear[:3]
        )
        here.checker.assert_no_violations()


async def reservations_match_pods(here: Site) -> bool:
    """Whether exactly the GPUs of live pods are reserved."""
    held = await here.held()
    return {slot.rpartition("/")[0] for slot in held} == here.checker.gpus
