"""The GPU checker misses no pod, also when its watch ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from attrs import define, field

from tests.e2e.gpu_checker import GpuChecker, InvariantViolatedError
from tests.e2e.kube import Raw


def event(version: int, uid: str, gpu: str, kind: str = "ADDED") -> Raw:
    meta = {"uid": uid, "name": uid, "namespace": "ml", "resourceVersion": str(version)}
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": gpu}]
    notes = {"gpuwarden.io/gpu-uuid": gpu, "gpuwarden.io/node": "node-a"}
    spec = {"containers": [{"env": env}]}
    return {"type": kind, "object": {"metadata": {**meta, "annotations": notes}, "spec": spec}}


@define
class ReplayingApiServer:
    """An API server that replays events; each watch breaks after one event."""

    events: list[Raw]
    replayed: asyncio.Event = field(factory=asyncio.Event)

    async def call(self, *_: Any) -> Raw:
        return {"metadata": {"resourceVersion": "0"}, "items": []}

    async def watch(self, _: object, *, resourceVersion: str) -> AsyncIterator[Raw]:
        later = [one for one in self.events if int(one["object"]["metadata"]["resourceVersion"]) > int(resourceVersion)]
        if not later:
            self.replayed.set()
            await asyncio.Event().wait()
        yield later[0]
        raise httpx.ReadError("cut")


async def checked(api_server: ReplayingApiServer) -> GpuChecker:
    checker = GpuChecker(api_server)  # type: ignore[arg-type]
    running = asyncio.create_task(checker.run())
    await asyncio.wait_for(api_server.replayed.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return checker


async def test_checker_sees_a_pod_created_and_deleted_between_watches() -> None:
    api_server = [event(1, "a", "GPU-1"), event(2, "b", "GPU-2"), event(3, "b", "GPU-2", "DELETED")]
    checker = await checked(ReplayingApiServer(api_server))
    checker.assert_no_violations()
    assert (checker.seen, set(checker.live_pods), checker.lists) == ({"a", "b"}, {"a"}, 1)


async def test_checker_detects_two_pods_on_one_gpu_across_a_broken_watch() -> None:
    checker = await checked(
        ReplayingApiServer([event(1, "a", "GPU-1"), event(2, "b", "GPU-1"), event(3, "a", "GPU-1", "DELETED")])
    )
    with pytest.raises(InvariantViolatedError, match="ml/b at 2: GPU-1 is also of a"):
        checker.assert_no_violations()
