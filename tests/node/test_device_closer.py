"""The proof devices of a node that have ended are closed, with few reads and one write."""

import copy
from datetime import datetime, timedelta

import pytest
from attrs import define, field
from structlog.testing import capture_logs

from tests.builders import NOW, Raw
from webhook.core.proof_devices import ProofDevice
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.resource_slices import MAX_DEVICES, UnreadableSliceError, proof_devices_of, slices_of
from webhook.node.device_closer import BACKOFF, JITTER, LONGEST_PAUSE, LOOK_INTERVAL, MARGIN, DeviceCloser, NodeSlices

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)


@define(eq=False)
class Scene:
    """The slices of the API server, which refuses some writes."""

    slices: dict[str, Raw] = field(factory=dict)
    done: list[str] = field(factory=list)
    problem: Exception | None = None
    now: datetime = NOW

    def publish(self, *ends: datetime | None, node: str = "node-a") -> None:
        devices = [ProofDevice.of(f"GPU-{k:03}", "sha256:aa11", end) for k, end in enumerate(ends)]
        self.slices = {raw["metadata"]["name"]: raw for raw in slices_of(node, devices, 1, "gpu.nvidia.com")}

    async def call(self, method: str, path: str, names: Raw, body: Raw | None = None) -> Raw | None:
        assert path == "/apis/resource.k8s.io/v1/resourceslices/{name}"
        self.done.append(f"{method} {names['name']}")
        if body is not None:
            if self.problem is not None:
                raise self.problem
            self.slices[names["name"]] = body
        return copy.deepcopy(self.slices.get(names["name"]))

    @property
    def closer(self) -> DeviceCloser:
        return DeviceCloser(NodeSlices("node-a", self), lambda: self.now)  # type: ignore[arg-type]  # only `call`

    async def step(self, after: timedelta = timedelta()) -> tuple[list[str], timedelta]:
        self.done.clear()
        self.now += after
        pause = await self.closer.step()
        return list(self.done), pause

    def closed(self) -> list[str]:
        return [one.name for raw in self.slices.values() for one in proof_devices_of(raw) if one.is_closed]


GET, PUT = "GET gpuwarden-node-a-0", "PUT gpuwarden-node-a-0"


async def test_slice_is_read_a_moment_after_each_end() -> None:
    scene = Scene()
    scene.publish(NOW + 4 * MINUTE, NOW + 3 * MINUTE)
    done, pause = await scene.step()
    assert done == [GET]
    assert 3 * MINUTE + MARGIN <= pause <= 3 * MINUTE + 2 * MARGIN
    scene.publish(NOW + 9 * MINUTE)
    done, later = await scene.step(pause)
    assert done == [GET]
    assert scene.closed() == []
    assert later > 5 * MINUTE


async def test_ended_devices_are_closed_with_one_write() -> None:
    scene = Scene()
    scene.publish(NOW - MINUTE, NOW, NOW + SECOND, None)
    before = copy.deepcopy(scene.slices)
    done, pause = await scene.step()
    assert done == [GET, PUT]
    assert scene.closed() == ["gpu-000-aa11", "gpu-001-aa11"]
    assert pause <= SECOND + 2 * MARGIN
    for device in scene.slices["gpuwarden-node-a-0"]["spec"]["devices"]:
        device["taints"] = device.get("taints", [])[:1]
    for device in before["gpuwarden-node-a-0"]["spec"]["devices"]:
        device.setdefault("taints", [])
    assert scene.slices == before, "nothing else is changed"


async def test_closed_devices_are_not_written_again() -> None:
    scene = Scene()
    scene.publish(NOW)
    await scene.step()
    done, pause = await scene.step(MINUTE)
    assert (done, is_jittered(pause)) == ([GET], True)


def is_jittered(pause: timedelta) -> bool:
    """Whether the pause is that of a node without an end."""
    return JITTER[0] <= pause / LOOK_INTERVAL <= JITTER[1]


@pytest.mark.parametrize("ends", [(), (None,)], ids=["no slice", "no end"])
async def test_node_without_an_end_is_looked_at_once_a_minute(ends: tuple[None, ...]) -> None:
    scene = Scene()
    scene.publish(*ends)
    done, pause = await scene.step()
    assert (done, is_jittered(pause)) == ([GET], True)


async def test_pause_until_a_far_end_is_not_stretched() -> None:
    """Devices would stay open for as long."""
    scene = Scene()
    for _ in range(20):
        scene.publish(NOW + 9 * MINUTE)
        pauses: list[float] = []

        async def sleep(seconds: float, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await scene.closer.run(sleep)
        assert (9 * MINUTE + MARGIN).total_seconds() <= pauses[0] <= (9 * MINUTE + 2 * MARGIN).total_seconds()


async def test_far_end_is_looked_at_before() -> None:
    scene = Scene()
    scene.publish(NOW + timedelta(days=3650))
    assert (await scene.step())[1] == LONGEST_PAUSE


async def test_all_slices_of_the_node_are_read() -> None:
    scene = Scene()
    scene.publish(*[NOW + MINUTE] * MAX_DEVICES, NOW)
    done, _ = await scene.step()
    assert done == [GET, "GET gpuwarden-node-a-1", "PUT gpuwarden-node-a-1"]
    assert scene.closed() == [f"gpu-{MAX_DEVICES:03}-aa11"]


async def test_form_of_the_end_is_kept() -> None:
    """The policy compares the times as texts."""
    scene = Scene()
    scene.publish(NOW)
    (device,) = scene.slices["gpuwarden-node-a-0"]["spec"]["devices"]
    device["taints"][0]["timeAdded"] = "2026-03-02T13:00:00+01:00"
    await scene.step()
    (device,) = scene.slices["gpuwarden-node-a-0"]["spec"]["devices"]
    assert [one["timeAdded"] for one in device["taints"]] == ["2026-03-02T13:00:00+01:00"] * 2


async def test_slice_that_is_not_ours_is_not_written() -> None:
    scene = Scene()
    scene.publish(NOW)
    scene.slices["gpuwarden-node-a-0"]["spec"]["driver"] = "other.example.com"
    with pytest.raises(UnreadableSliceError):
        await scene.step()
    assert PUT not in scene.done


@pytest.mark.parametrize(
    "problem", [ApiUnavailableError("the API server did not answer"), ApiRefusesError(409, "changed")]
)
async def test_failed_write_is_tried_again_soon_and_told_once(problem: Exception) -> None:
    scene = Scene(problem=problem)
    scene.publish(NOW)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            scene.problem = None
        if len(pauses) == 4:
            raise KeyboardInterrupt

    with capture_logs() as logs, pytest.raises(KeyboardInterrupt):
        await scene.closer.run(sleep)
    assert [one["event"] for one in logs] == ["ended proof devices not closed", "ended proof devices closed"]
    low, high = JITTER
    assert is_jittered(timedelta(seconds=pauses[3]))
    for failures, pause in enumerate(pauses[:3], 1):
        assert low <= pause / BACKOFF.pause(failures).total_seconds() <= high
