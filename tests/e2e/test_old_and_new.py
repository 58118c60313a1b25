"""Replicas of the version before and of this one serve one cluster during an upgrade and a rollback."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.controlplane.cluster import ROOT, Cluster
from tests.e2e.crew import Site, Worker, site
from tests.e2e.figures import tell
from tests.e2e.kube import Kube, wait_until
from tests.e2e.storm import Storm, mixed

# The commit whose replicas may still serve while this version is rolled out.
BEFORE = "b85fc47"
NODES, GPUS = 3, 4
# Of each stage, while pods come and go.
PODS_A_STAGE = 30
DEADLINE, SKEW = 15, 1
FLAGS = ("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s")
PATIENCE = 120.0


@pytest.fixture
def old(tmp_path: Path) -> list[str]:
    """The command of the version before."""
    tree = tmp_path / "before"
    tree.mkdir()
    archive = ["git", "archive", BEFORE, "webhook"]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        pytest.skip(f"the history of this clone does not reach back to {BEFORE}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed.stdout, check=True)  # noqa: S607
    run = "import sys; from webhook.cli import main; sys.exit(main())"
    return ["/usr/bin/env", f"PYTHONPATH={tree}", sys.executable, "-c", run]


async def ended(worker: Worker) -> None:
    """As in a rolling update: asked to stop, it serves what is under way."""
    worker.process.terminate()
    await asyncio.wait_for(worker.process.wait(), PATIENCE)


async def replaced(here: Site, leaving: Worker, program: list[str] | None) -> Worker:
    """A replica of the other version comes, then this one goes."""
    coming = await (here.replica() if program is None else here.replica(program=program))
    here.balancer.servers.remove(leaving)
    await ended(leaving)
    return coming


async def test_an_upgrade_and_a_rollback_give_no_gpu_twice_and_lose_no_reservation(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, old: list[str]
) -> None:
    async with site(cluster, kube, tmp_path, nodes=NODES, gpus=GPUS, name="roll", flags=FLAGS) as here:
        first = await here.replica(program=old)
        second = await here.replica(program=old)
        leader = await here.reconciler(program=old)
        await here.reviewed()
        storm = Storm(here, clients=8)
        reaping = asyncio.create_task(storm.reap(0.7))
        try:
            await storm.create(PODS_A_STAGE, mixed)
            first = await replaced(here, first, None)  # one of each version serves
            await storm.create(PODS_A_STAGE, mixed)
            await ended(leader)
            leader = await here.reconciler()
            await storm.create(PODS_A_STAGE, mixed)
            second = await replaced(here, second, None)  # upgraded
            await storm.create(PODS_A_STAGE, mixed)
            first = await replaced(here, first, old)  # and back
            await ended(leader)
            leader = await here.reconciler(program=old)
            await storm.create(PODS_A_STAGE, mixed)
            await replaced(here, second, old)
            await storm.create(PODS_A_STAGE, mixed)
        finally:
            reaping.cancel()
            await asyncio.gather(reaping, return_exceptions=True)
        here.judge.acquit()
        await wait_until(lambda: as_the_pods_say(here), seconds=PATIENCE)
        tell(request, pods=len(here.judge.seen), refused=dict(storm.tally.why), unclear=storm.tally.unclear[:3])
        here.judge.acquit()


async def as_the_pods_say(here: Site) -> bool:
    """Whether exactly what living pods carry is held."""
    held = await here.held()
    return {slot.rpartition("/")[0] for slot in held} == here.judge.gpus
