"""A native pod that is deleted by force frees its claim at once, while its container still runs. The next pod gets the
GPU allocated, and its container starts when the other has ended: NVIDIA's driver prepares no GPU for two claims."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.dra.gpus import bound
from tests.e2e.kube import EVENTS, NODES, PODS, Kube, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import is_ready, real_pod, runs
from tests.e2e.node.front import HASH
from tests.e2e.node.heartbeats import beats_in, heartbeat_container, lives_in, overlaps, volume_of
from tests.e2e.node.proven_site import prove, proven_site, templates_are_there
from tests.e2e.processes import Site

NODE: Final = "single"
GPU: Final = "GPU-33333333-0000-4000-8000-000000000000"
GRACE: Final = 20
# The kubelet tries again 60 to 90 s after a refusal of a driver.
STARTS_WITHIN: Final = 240.0


@pytest.fixture
async def native(real_cluster: Cluster, real_kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    """A node with one GPU, and native pods."""
    async with AsyncExitStack() as stack:
        node = await asyncio.to_thread(real_cluster.add_real_node, NODE, [GPU])
        stack.push_async_callback(real_kube.delete, NODES, NODE)
        stack.push_async_callback(asyncio.to_thread, node.remove)
        standing = proven_site(real_cluster, real_kube, tmp_path, [node], is_native=True)
        here = (await stack.enter_async_context(standing)).here
        await prove(real_kube, NODE, 1)
        await templates_are_there(real_kube, here.namespace)
        yield here


def beating(name: str, beats: Path) -> Raw:
    content = real_pod(name, heartbeat_container(name, 1), grace=GRACE, volumes=[volume_of(beats)])
    content["metadata"]["annotations"] = {"gpuwarden.io/required-hash": HASH}
    return content


@pytest.mark.long
async def test_next_native_pod_waits_for_the_container_of_one_that_was_deleted_by_force(
    native: Site, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    beats = beats_in(tmp_path)
    await native.kube.create(PODS, beating("old", beats), native.namespace)
    await runs(native.kube, native.namespace, "old")
    await native.kube.delete(PODS, "old", native.namespace, grace=0)
    deleted = time.monotonic()
    await native.kube.create(PODS, beating("next", beats), native.namespace)
    await bound(native.kube, native.namespace, "next")
    bound_after = time.monotonic() - deleted
    await wait_until(lambda: native.kube.get(PODS, "next", native.namespace), is_ready, STARTS_WITHIN)
    await asyncio.sleep(1)  # some heartbeats
    lives = lives_in(beats)
    assert [one.pod for one in lives] == ["old", "next"]
    old, new = lives
    refusals = [one["message"] for one in await native.kube.list(EVENTS, native.namespace) if is_refusal(one)]
    report_figures(
        request,
        bound_after=bound_after,
        started_after=time.monotonic() - deleted,
        started_after_the_other_container_had_ended=new.first - old.last,
        refusals_of_the_driver=len(refusals),
    )
    assert overlaps(lives) == []
    assert any("already allocated to different claim" in one for one in refusals), refusals


def is_refusal(event: Raw) -> bool:
    return (event["involvedObject"]["name"], event["reason"]) == ("next", "FailedPrepareDynamicResources")
