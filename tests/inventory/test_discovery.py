"""What GPUNodes should name, and the writer: few writes, nothing held is dropped, nothing follows from not knowing."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import Raw
from tests.fake_objects import FakeObjects
from tests.recorded_events import RecordedEvents
from webhook.core.device import Device, DeviceUuid
from webhook.core.reasons import Reason
from webhook.evidence.static import StaticEvidence
from webhook.inventory.discovery import AT_A_TIME, AT_ONCE, Discovery, WrittenInventory, due
from webhook.inventory.file import InventoryFile
from webhook.kube.gpu_node import GpuNode
from webhook.kube.store import StoreUnavailableError

OURS = {"app.kubernetes.io/managed-by": "gpuwarden"}


def annotation(*uuids: str, **labels: list[str]) -> str:
    said = {uuid: labels.get(uuid.replace("-", "_"), []) for uuid in uuids}
    return base64.b64encode(json.dumps(said).encode()).decode()


class Scene:
    """Nodes and GPUNodes, one step at a time; the watches catch up before each."""

    def __init__(self, inventory: Path | None = None) -> None:
        self.is_current = True
        self.is_gone = True
        self.asked: list[str] = []
        self.events = RecordedEvents()
        self.nodes, self.gpu_nodes = FakeObjects(), FakeObjects()
        self.evidence = StaticEvidence({})
        written = WrittenInventory(InventoryFile(inventory) if inventory else None, self.evidence)
        scene = self

        class Asked:
            async def is_gone(self, name: str) -> bool:
                scene.asked.append(name)
                return scene.is_gone

        self.discovery = Discovery(self.gpu_nodes, Asked(), written, self.events, lambda: self.is_current)
        self.nodes.listener, self.gpu_nodes.listener = self.discovery.nodes, self.discovery.gpu_nodes

    def node(self, name: str = "node-a", said: str | None = None) -> None:
        annotations = {} if said is None else {"fudo.org/gpu.device.labels": said}
        self.nodes.put({"metadata": {"name": name, "annotations": annotations}})

    def hold(self, *uuids: str, name: str = "node-a") -> None:
        entry = {"reservation": "r1", "phase": "finalized", "namespace": "ml", "digest": "d", "uid": "u"}
        self.gpu_nodes.status(name, held={f"{uuid}/0": entry for uuid in uuids})

    async def step(self) -> list[str]:
        """What was written."""
        self.nodes.tell()
        self.gpu_nodes.tell()
        self.gpu_nodes.done.clear()
        await self.discovery.step()
        return list(self.gpu_nodes.done)

    def devices(self, name: str = "node-a") -> dict[str, bool]:
        """Healthy or not, by UUID."""
        raw = self.gpu_nodes.objects[name]
        return {one["uuid"]: one.get("healthy", True) for one in raw["spec"]["devices"]}

    async def with_node(self, *uuids: str, held: tuple[str, ...] = ()) -> None:
        """A node that was discovered, and rebuilt from pods."""
        self.node(said=annotation(*uuids))
        await self.step()
        self.hold(*held)
        await self.step()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def known(**members: Any) -> GpuNode:
    raw = {"metadata": {"name": "node-a", "resourceVersion": "1"}, **members}
    return GpuNode.parse(raw)


def test_until_it_is_known_what_is_held_everything_may_be() -> None:
    what = due((), known(spec={"devices": [{"uuid": "GPU-1"}]}))
    assert (dict(what.devices), what.vanished) == (
        {DeviceUuid("GPU-1"): Device(DeviceUuid("GPU-1"), is_healthy=False)},
        (),
    )


async def test_an_annotated_node_gets_its_gpu_node(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1", GPU_1=["fudo.org/gpu.fast"]))
    assert await scene.step() == ["create node-a"]
    made = scene.gpu_nodes.objects["node-a"]
    assert made["spec"] == {"devices": [{"uuid": "GPU-1", "labels": ["fudo.org/gpu.fast"]}]}
    assert made["metadata"]["labels"] == OURS
    assert made["metadata"]["finalizers"] == ["gpuwarden.io/held"]
    assert "status" not in made


async def test_what_is_as_it_should_be_is_not_written(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2")
    scene.node(said=annotation("GPU-2", "GPU-1"))  # in another order
    scene.hold("GPU-1")
    assert await scene.step() == []


async def test_a_write_of_ours_is_not_repeated_before_the_watch_tells_of_it(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    await scene.discovery.step()
    assert scene.gpu_nodes.done == ["create node-a"]


async def test_what_others_wrote_into_the_object_stays(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    raw = scene.gpu_nodes.objects["node-a"]
    theirs = {"labels": {**OURS, "team": "x"}, "annotations": {"note": "y"}, "finalizers": ["gpuwarden.io/held", "z/z"]}
    scene.gpu_nodes.put({**raw, "metadata": {**raw["metadata"], **theirs}})
    scene.node(said=annotation("GPU-1", "GPU-2"))
    assert await scene.step() == ["replace node-a"]
    raw = scene.gpu_nodes.objects["node-a"]
    assert {member: raw["metadata"][member] for member in theirs} == theirs
    assert raw["status"] == {"held": {}}


async def test_a_node_that_nobody_speaks_for_is_left_alone(scene: Scene) -> None:
    scene.node()
    scene.gpu_nodes.put({"metadata": {"name": "node-a"}, "spec": {"devices": [{"uuid": "GPU-hand"}]}})
    assert await scene.step() == []


async def test_a_node_without_gpus_gets_no_object(scene: Scene) -> None:
    scene.node(said=annotation())
    assert await scene.step() == []


@pytest.mark.defect("S4-14")
async def test_a_bad_annotation_is_told_once_and_changes_nothing(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said="!")
    scene.node("node-b", annotation("GPU-b"))
    assert await scene.step() == ["create node-b"]
    scene.hold("GPU-1")
    assert await scene.step() == []
    assert scene.devices() == {"GPU-1": True}
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    assert scene.events.messages[0].endswith("it is not base64")


@pytest.mark.parametrize("name", ["all", "0", "void", "GPU-1,GPU-2", "nvidia.com/gpu=all"])
async def test_entry_that_is_no_uuid_is_left_out_and_told_once_and_the_others_count(scene: Scene, name: str) -> None:
    scene.node(said=annotation("GPU-1", name))
    await scene.step()
    await scene.step()
    assert scene.devices() == {"GPU-1": True}
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    scene.node(said=annotation("GPU-1", name))
    await scene.step()
    assert len(scene.events.recorded) == 2


async def test_reading_with_an_entry_that_is_no_uuid_keeps_the_others(scene: Scene) -> None:
    read = as_read({"index": 0, "uuid": "GPU-1"}, {"index": 1, "uuid": "all"})
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    await scene.step()
    assert scene.devices() == {"GPU-1": True}
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]


async def test_stored_device_that_is_no_uuid_goes_unless_it_is_held(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    raw = scene.gpu_nodes.objects["node-a"]
    scene.gpu_nodes.put({**raw, "spec": {"devices": [{"uuid": "GPU-1"}, {"uuid": "all"}, {"uuid": "gpu-7"}]}})
    scene.hold("gpu-7")
    assert await scene.step() != []
    assert scene.devices() == {"GPU-1": True, "gpu-7": False}


async def test_an_object_that_a_hand_made_unreadable_is_told_once_and_left_as_it_is(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    good = scene.gpu_nodes.objects["node-a"]
    by_hand = {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}
    scene.gpu_nodes.put({**good, "status": {"held": {**good["status"]["held"], "GPU-1": by_hand}}})
    scene.node("node-b", annotation("GPU-b"))
    assert await scene.step() == ["create node-b"]
    scene.node(said=annotation("GPU-2"))
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    assert "'GPU-1' is no slot" in scene.events.messages[0]


async def test_a_device_that_vanishes_while_held_is_quarantined_until_nothing_holds_it(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.node(said=annotation("GPU-2"))
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {"GPU-2": True, "GPU-1": False}
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.DEVICE_VANISHED)]
    scene.hold()
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {"GPU-2": True}


async def test_a_device_that_comes_back_is_healthy_again(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    scene.node(said=annotation())
    await scene.step()
    assert scene.devices() == {"GPU-1": False}
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    assert scene.devices() == {"GPU-1": True}


async def test_a_device_that_nothing_holds_vanishes_at_once(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2")
    scene.node(said=annotation("GPU-new", "GPU-2"))
    await scene.step()
    assert scene.devices() == {"GPU-new": True, "GPU-2": True}
    assert scene.events.recorded == []


async def test_what_is_held_and_was_edited_out_is_there_again(scene: Scene) -> None:
    """By hand, or because the object was made anew from pods: every held device is shown."""
    await scene.with_node("GPU-1", held=("GPU-1", "GPU-lost"))
    assert scene.devices() == {"GPU-1": True, "GPU-lost": False}


async def test_an_annotation_taken_away_takes_the_devices_away(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.node()
    await scene.step()
    assert scene.devices() == {"GPU-1": False}


async def test_a_reservation_made_meanwhile_is_seen_before_its_device_is_dropped(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation())
    scene.nodes.tell()
    scene.hold("GPU-1")  # and the watch does not tell
    await scene.discovery.step()
    assert scene.devices() == {"GPU-1": False}
    assert list(scene.gpu_nodes.objects["node-a"]["status"]["held"]) == ["GPU-1/0"]


async def test_who_is_overtaken_writes_on_what_is_there_then(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation("GPU-1", "GPU-2"))
    scene.gpu_nodes.overtaken = 3
    assert await scene.step() == ["replace node-a"]


async def test_who_is_always_overtaken_tries_again_in_the_next_pass(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation("GPU-1", "GPU-2"))
    scene.gpu_nodes.overtaken = 5
    assert await scene.step() == []
    assert await scene.step() == ["replace node-a"]


async def test_an_api_server_that_is_away_is_asked_again_in_the_next_pass(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    scene.gpu_nodes.is_away = True
    assert await scene.step() == []
    scene.gpu_nodes.is_away = False
    assert await scene.step() == ["create node-a"]


async def test_an_api_server_that_does_not_answer_is_not_asked_for_every_node(scene: Scene) -> None:
    for number in range(50):
        scene.node(f"node-{number}", annotation(f"GPU-{number}"))
    create, asked = scene.gpu_nodes.create, []

    async def silent(raw: Raw) -> Raw:
        asked.append(raw["metadata"]["name"])
        await asyncio.sleep(0)
        raise StoreUnavailableError("no answer")

    scene.gpu_nodes.create = silent  # type: ignore[method-assign]
    await scene.step()
    assert len(asked) == AT_ONCE
    scene.gpu_nodes.create = create  # type: ignore[method-assign]
    assert len(await scene.step()) == 50


async def test_an_object_that_is_there_already_is_taken_over_as_it_is(scene: Scene) -> None:
    """Made by another reconciler, say, and the watch has not told."""
    scene.node(said=annotation("GPU-1"))
    scene.nodes.tell()
    scene.gpu_nodes.put(
        {"metadata": {"name": "node-a"}, "spec": {"devices": [{"uuid": "GPU-old"}]}, "status": {"held": {}}}
    )
    await scene.discovery.step()
    assert scene.devices() == {"GPU-1": True}


async def test_what_the_api_server_refuses_is_told_and_the_others_are_served(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation(f"GPU-{name}"))
    scene.gpu_nodes.refused = {"node-a"}
    assert await scene.step() == ["create node-b"]
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    assert "too many" in scene.events.messages[0]


# Nodes that go.


async def test_a_gpu_node_goes_with_its_node(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    assert await scene.step() == ["delete node-a"]
    assert "deletionTimestamp" in scene.gpu_nodes.objects["node-a"]["metadata"]  # the finalizer is the ledger's
    assert await scene.step() == []
    scene.gpu_nodes.remove("node-a")
    scene.node(said=annotation("GPU-1"))
    assert await scene.step() == ["create node-a"]


async def test_one_that_is_being_deleted_is_made_anew_when_it_is_gone(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    await scene.step()
    scene.node(said=annotation("GPU-1"))
    assert await scene.step() == []
    scene.gpu_nodes.remove("node-a")
    assert await scene.step() == ["create node-a"]


async def test_a_gpu_node_with_reservations_outlives_its_node(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.nodes.remove("node-a")
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.NODE_GONE)]
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}
    scene.node(said=annotation("GPU-1", "GPU-2"))  # it comes back and finds it as it was
    assert await scene.step() == []


async def test_it_goes_when_the_last_reservation_has_gone(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    scene.nodes.remove("node-a")
    await scene.step()
    scene.hold()
    assert await scene.step() == ["delete node-a"]


async def test_nothing_is_remembered_of_a_node_that_is_gone_with_its_gpu_node(scene: Scene) -> None:
    for _ in range(2):
        await scene.with_node("GPU-1", held=("GPU-1",))
        scene.nodes.remove("node-a")
        await scene.step()
        scene.hold()
        assert await scene.step() == ["delete node-a"]
        scene.gpu_nodes.objects["node-a"]["metadata"].pop("finalizers")
        scene.gpu_nodes.remove("node-a")
        assert await scene.step() == []
    assert (scene.events.recorded, scene.discovery.remembered) == ([("node-a", Reason.NODE_GONE)] * 2, 0)


async def test_nothing_is_remembered_of_a_node_whose_devices_nobody_could_read(scene: Scene) -> None:
    scene.node(said="nonsense")
    await scene.step()
    assert scene.discovery.remembered == 1
    scene.nodes.remove("node-a")
    await scene.step()
    assert scene.discovery.remembered == 0


async def test_before_it_is_known_what_is_held_a_gpu_node_stays(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    scene.nodes.remove("node-a")
    assert await scene.step() == []


async def test_what_was_made_by_hand_is_never_deleted(scene: Scene) -> None:
    scene.node()
    scene.gpu_nodes.put({"metadata": {"name": "node-a"}, "spec": {"devices": []}, "status": {"held": {}}})
    scene.gpu_nodes.put({"metadata": {"name": "node-x"}, "spec": {"devices": []}, "status": {"held": {}}})
    await scene.step()
    scene.nodes.remove("node-a")
    assert await scene.step() == []


async def test_a_node_that_is_only_missing_from_a_list_loses_nothing(scene: Scene) -> None:
    """The API server is asked by name before anything goes."""
    await scene.with_node("GPU-1")
    scene.is_gone = False
    scene.discovery.nodes.replaced({})
    assert await scene.step() == []
    assert scene.asked == ["node-a"]


async def test_nothing_is_decided_while_a_watch_is_interrupted(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.is_current = False
    scene.nodes.remove("node-a")
    assert await scene.step() == []
    assert scene.asked == []
    scene.is_current = True
    assert await scene.step() == ["delete node-a"]


async def test_a_reservation_made_meanwhile_keeps_the_gpu_node(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    scene.nodes.tell()
    scene.hold("GPU-1")  # and the watch does not tell
    await scene.discovery.step()
    assert "deletionTimestamp" not in scene.gpu_nodes.objects["node-a"]["metadata"]


# The same device on two nodes.


async def test_a_device_on_two_nodes_is_told_on_both_once(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation("GPU-1", f"GPU-{name}"))
    scene.node("node-c", annotation("GPU-c"))
    await scene.step()
    scene.hold("GPU-node-a")
    await scene.step()
    assert sorted(scene.events.recorded) == [("node-a", Reason.DEVICE_DISPUTED), ("node-b", Reason.DEVICE_DISPUTED)]
    assert sorted(scene.events.messages)[0].startswith("GPU-1 is on node-a too")


async def test_a_dispute_ends_with_one_of_the_nodes_and_may_begin_again(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation("GPU-1"))
    await scene.step()
    scene.nodes.remove("node-b")
    await scene.step()
    assert len(scene.events.recorded) == 2
    scene.node("node-b", annotation("GPU-1"))
    await scene.step()
    assert len(scene.events.recorded) == 4


async def test_a_device_of_a_gpu_node_made_by_hand_can_be_disputed(scene: Scene) -> None:
    scene.node("node-h")
    scene.gpu_nodes.put({"metadata": {"name": "node-h"}, "spec": {"devices": [{"uuid": "GPU-1"}]}})
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    assert sorted(one for one, _ in scene.events.recorded) == ["node-a", "node-h"]


# The inventory file.


def inventory(path: Path, *nodes: Raw) -> Path:
    file = path / "inventory.json"
    file.write_text(json.dumps({"nodes": nodes}))
    return file


async def test_the_file_comes_before_the_annotation(tmp_path: Path) -> None:
    file = inventory(
        tmp_path,
        {"name": "node-a", "devices": [{"uuid": "GPU-file", "model": "H100", "shares": 2}]},
        {"name": "node-b", "evidence": {"hash": "sha256:aa"}},
        {"name": "node-x", "devices": [{"uuid": "GPU-x"}]},
    )
    scene = Scene(file)
    for name in ("node-a", "node-b"):
        scene.node(name, annotation(f"GPU-{name}"))
    assert await scene.step() == ["create node-a", "create node-b"]  # there is no Node node-x
    assert scene.gpu_nodes.objects["node-a"]["spec"]["devices"] == [{"uuid": "GPU-file", "model": "H100", "shares": 2}]
    assert scene.devices("node-b") == {"GPU-node-b": True}
    assert set(await scene.evidence.poll()) == {"node-b"}


async def test_a_file_that_changes_is_followed(tmp_path: Path) -> None:
    scene = Scene(inventory(tmp_path, {"name": "node-a", "devices": [{"uuid": "GPU-1"}]}))
    scene.node()
    await scene.step()
    scene.hold()
    inventory(tmp_path, {"name": "node-a", "devices": [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}]})
    await scene.step()
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}
    inventory(tmp_path)
    await scene.step()
    assert scene.devices() == {}


async def test_a_bad_file_changes_nothing_and_before_a_good_one_nothing_is_decided(tmp_path: Path) -> None:
    file = tmp_path / "inventory.json"
    file.write_text("{")
    scene = Scene(file)
    discovered = {"metadata": {"name": "node-a", "labels": OURS}, "spec": {"devices": [{"uuid": "GPU-1"}]}}
    scene.gpu_nodes.put({**discovered, "status": {"held": {}}})
    scene.node()
    assert await scene.step() == []
    inventory(tmp_path, {"name": "node-a", "devices": [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}]})
    assert await scene.step() == ["replace node-a"]
    file.write_text("{")
    assert await scene.step() == []
    file.unlink()
    assert await scene.step() == []
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}


# Size.


async def test_a_node_with_2000_devices_fits_into_one_object(scene: Scene) -> None:
    uuids = [f"GPU-{k:08x}-0000-4000-8000-000000000000" for k in range(2000)]
    scene.node(said=annotation(*uuids))
    scene.node("node-b", annotation("GPU-b"))
    assert sorted(await scene.step()) == ["create node-a", "create node-b"]
    scene.hold(*uuids)
    assert await scene.step() == []
    assert len(json.dumps(scene.gpu_nodes.objects["node-a"])) < 1.5 * 1024 * 1024


async def test_many_nodes_are_seen_to_in_several_steps(scene: Scene) -> None:
    for number in range(AT_A_TIME + 5):
        scene.node(f"node-{number}", annotation(f"GPU-{number}"))
    assert [len(await scene.step()) for _ in range(3)] == [AT_A_TIME, 5, 0]


async def test_a_bug_with_one_node_is_seen_and_the_others_are_served(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation(f"GPU-{name}"))
    create = scene.gpu_nodes.create

    async def buggy(raw: Raw) -> Raw:
        if raw["metadata"]["name"] == "node-a":
            raise RuntimeError("a bug")
        await asyncio.sleep(0)
        return await create(raw)

    scene.gpu_nodes.create = buggy  # type: ignore[method-assign]  # the bug
    with pytest.raises(RuntimeError):
        await scene.step()
    assert list(scene.gpu_nodes.objects) == ["node-b"]
    scene.gpu_nodes.create = create  # type: ignore[method-assign]
    assert await scene.step() == ["create node-a"]


async def test_a_node_whose_step_was_cancelled_has_its_turn_again(scene: Scene) -> None:
    """The Lease was lost in mid-write, and the same process is elected again."""
    scene.node(said=annotation("GPU-1"))
    create, is_under_way = scene.gpu_nodes.create, asyncio.Event()

    async def never(raw: Raw) -> Raw:
        is_under_way.set()
        return await asyncio.Future[Raw]()

    scene.gpu_nodes.create = never  # type: ignore[method-assign]
    leading = asyncio.create_task(scene.step())
    await is_under_way.wait()
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    scene.gpu_nodes.create = create  # type: ignore[method-assign]
    assert await scene.step() == ["create node-a"]


async def test_a_gpu_node_that_cannot_be_deleted_now_is_deleted_later(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    scene.gpu_nodes.is_away = True
    assert await scene.step() == []
    scene.gpu_nodes.is_away = False
    assert await scene.step() == ["delete node-a"]


def as_read(*gpus: dict[str, Any]) -> str:
    return json.dumps({"time": "2026-01-01T00:00:00Z", "pod": "u", "gpus": gpus})


@pytest.mark.defect("S2-19")
async def test_what_was_read_of_a_node_maps_index_uuid_and_serial(scene: Scene) -> None:
    gpus = [{"index": k, "uuid": f"GPU-{k}", "serial": "S", "model": "GB200", "memory": "189471Mi"} for k in range(2)]
    read = as_read(*gpus, {"index": 2}, {"index": 3, "uuid": "GPU-3", "mig": True})
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    assert await scene.step() == ["create node-a"]
    found = {one.uuid: one for one in GpuNode.parse(scene.gpu_nodes.objects["node-a"]).devices}
    assert found == {
        "GPU-0": Device(DeviceUuid("GPU-0"), 0, "GB200", "189471Mi", "S"),
        "GPU-1": Device(DeviceUuid("GPU-1"), 1, "GB200", "189471Mi", "S"),
        "GPU-3": Device(DeviceUuid("GPU-3"), 3, is_healthy=False),
    }


async def test_the_other_annotation_says_which_devices_there_are_and_what_was_read_says_more_of_them(
    scene: Scene,
) -> None:
    read = as_read(*({"index": k, "uuid": f"GPU-{k}", "serial": f"S{k}"} for k in range(3)))
    said = annotation("GPU-1", "GPU-x", GPU_1=["fudo.org/gpu.fast"])
    notes = {"gpuwarden.io/gpus": read, "fudo.org/gpu.device.labels": said}
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": notes}})
    await scene.step()
    found = {one.uuid: one for one in GpuNode.parse(scene.gpu_nodes.objects["node-a"]).devices}
    assert found == {
        "GPU-1": Device(DeviceUuid("GPU-1"), 1, serial="S1", labels=frozenset({"fudo.org/gpu.fast"})),
        "GPU-x": Device(DeviceUuid("GPU-x")),
    }


@pytest.mark.parametrize(
    "read",
    ["", "[]", '{"gpus": []}', as_read({"uuid": "GPU-1"}), as_read({"index": 0, "uuid": 5})],
    ids=["empty", "a-list", "no-time", "no-index", "no-uuid"],
)
async def test_a_reading_that_cannot_be_read_changes_nothing(scene: Scene, read: str) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    assert await scene.step() == []
    assert list(scene.devices()) == ["GPU-1"]
