"""Discovery writes GPUNodes: with few writes, without dropping reserved devices, and only on complete information."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import NOW, Raw
from tests.e2e.dra.gpus import gpu_device, gpu_slice
from tests.fake_objects import FakeObjects
from tests.recorded_events import RecordedEvents
from webhook.core.device import Device, DeviceUuid
from webhook.core.reasons import Reason
from webhook.evidence.static import StaticEvidence
from webhook.inventory.discovery import BATCH_SIZE, CONCURRENCY, Discovery, FileInventory, desired_devices
from webhook.inventory.file import InventoryFile
from webhook.inventory.published_gpus import KEPT_WITHOUT_SLICES, PublishedGpus
from webhook.kube.gpu_node import GpuNode
from webhook.kube.store import StoreUnavailableError

OURS = {"app.kubernetes.io/managed-by": "gpuwarden"}


def annotation(*uuids: str, **labels: list[str]) -> str:
    said = {uuid: labels.get(uuid.replace("-", "_"), []) for uuid in uuids}
    return base64.b64encode(json.dumps(said).encode()).decode()


class SettableMarks:
    """Marks of devices by node."""

    def __init__(self) -> None:
        self.marks: dict[str, dict[str, str]] | None = None
        self.changes: list[str] = []

    def marks_on(self, node: str) -> dict[DeviceUuid, str] | None:
        if self.marks is None:
            return None
        return {DeviceUuid(uuid): text for uuid, text in self.marks.get(node, {}).items()}

    def take_changes(self) -> list[str]:
        changes, self.changes = self.changes, []
        return changes

    def put(self, **uuids: str) -> None:
        self.marks = {"node-a": {uuid.replace("_", "-"): text for uuid, text in uuids.items()}}
        self.changes = ["node-a"]


class SettableInjections:
    """The injection that every GPUNode should say."""

    def __init__(self) -> None:
        self.value: str | None = None
        self.changes: list[str] = []

    def to_write(self, node: str, stored: str | None) -> str | None:
        return self.value

    def take_changes(self) -> list[str]:
        changes, self.changes = self.changes, []
        return changes

    def put(self, value: str) -> None:
        self.value, self.changes = value, ["node-a"]


class Scene:
    """Nodes and GPUNodes, one step at a time; the watches catch up before each step."""

    def __init__(self, inventory: Path | None = None) -> None:
        self.is_current = True
        self.is_gone = True
        self.asked: list[str] = []
        self.events = RecordedEvents()
        self.nodes, self.gpu_nodes = FakeObjects(), FakeObjects()
        self.evidence = StaticEvidence({})
        written = FileInventory(InventoryFile(inventory) if inventory else None, self.evidence)
        scene = self

        class RecordingNodes:
            async def is_gone(self, name: str) -> bool:
                scene.asked.append(name)
                return scene.is_gone

        self.now = NOW
        published = PublishedGpus(lambda: self.now)
        self.slices = FakeObjects(published)
        self.marks = SettableMarks()
        self.injections = SettableInjections()
        self.discovery = Discovery(
            self.gpu_nodes,
            RecordingNodes(),
            written,
            self.events,
            lambda: self.is_current,
            published,
            self.marks,
            self.injections,
        )
        self.nodes.listener, self.gpu_nodes.listener = self.discovery.nodes, self.discovery.gpu_nodes

    def node(self, name: str = "node-a", said: str | None = None) -> None:
        annotations = {} if said is None else {"fudo.org/gpu.device.labels": said}
        self.nodes.put({"metadata": {"name": name, "annotations": annotations}})

    def publish(self, *devices: Raw, **pool: int) -> None:
        self.slices.put(gpu_slice("node-a", devices, name="slice", **pool))

    def hold(self, *uuids: str, name: str = "node-a") -> None:
        entry = {"reservation": "r1", "phase": "finalized", "namespace": "ml", "digest": "d", "uid": "u"}
        self.gpu_nodes.status(name, held={f"{uuid}/0": entry for uuid in uuids})

    async def step(self) -> list[str]:
        """The devices in the object."""
        self.nodes.tell()
        self.gpu_nodes.tell()
        self.slices.tell()
        self.gpu_nodes.done.clear()
        await self.discovery.step()
        return list(self.gpu_nodes.done)

    def devices(self, name: str = "node-a") -> dict[str, bool]:
        """Health by UUID."""
        raw = self.gpu_nodes.objects[name]
        return {one["uuid"]: one.get("healthy", True) for one in raw["spec"]["devices"]}

    async def with_node(self, *uuids: str, held: tuple[str, ...] = ()) -> None:
        """A node that has been discovered and rebuilt from pods."""
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


def test_every_device_may_be_reserved_until_the_object_is_rebuilt() -> None:
    what = desired_devices((), known(spec={"devices": [{"uuid": "GPU-1"}]}))
    assert (dict(what.devices), what.vanished) == (
        {DeviceUuid("GPU-1"): Device(DeviceUuid("GPU-1"), is_healthy=False)},
        (),
    )


async def test_annotated_node_gets_a_gpu_node(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1", GPU_1=["fudo.org/gpu.fast"]))
    assert await scene.step() == ["create node-a"]
    made = scene.gpu_nodes.objects["node-a"]
    assert made["spec"] == {"devices": [{"uuid": "GPU-1", "labels": ["fudo.org/gpu.fast"]}]}
    assert made["metadata"]["labels"] == OURS
    assert made["metadata"]["finalizers"] == ["gpuwarden.io/held"]
    assert "status" not in made


async def test_unchanged_gpu_node_is_not_written(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2")
    scene.node(said=annotation("GPU-2", "GPU-1"))  # in another order
    scene.hold("GPU-1")
    assert await scene.step() == []


async def test_own_write_is_not_repeated_before_the_watch_shows_it(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    await scene.discovery.step()
    assert scene.gpu_nodes.done == ["create node-a"]


async def test_fields_of_other_writers_stay(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    raw = scene.gpu_nodes.objects["node-a"]
    theirs = {"labels": {**OURS, "team": "x"}, "annotations": {"note": "y"}, "finalizers": ["gpuwarden.io/held", "z/z"]}
    scene.gpu_nodes.put({**raw, "metadata": {**raw["metadata"], **theirs}})
    scene.node(said=annotation("GPU-1", "GPU-2"))
    assert await scene.step() == ["replace node-a"]
    raw = scene.gpu_nodes.objects["node-a"]
    assert {member: raw["metadata"][member] for member in theirs} == theirs
    assert raw["status"] == {"held": {}}


async def test_gpu_node_without_a_source_of_devices_is_left_alone(scene: Scene) -> None:
    scene.node()
    scene.gpu_nodes.put({"metadata": {"name": "node-a"}, "spec": {"devices": [{"uuid": "GPU-hand"}]}})
    assert await scene.step() == []


def marked(scene: Scene) -> dict[str, str]:
    """The marks in the object, of devices that have one."""
    devices = scene.gpu_nodes.objects["node-a"]["spec"]["devices"]
    return {one["uuid"]: one["mismatch"] for one in devices if "mismatch" in one}


async def test_mark_is_written_once_and_removed_when_it_is_gone(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2")
    scene.marks.put(GPU_2="in use")
    assert await scene.step() == ["replace node-a"]
    assert marked(scene) == {"GPU-2": "in use"}
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}
    scene.marks.changes = ["node-a"]
    assert await scene.step() == []
    scene.marks.put()
    assert await scene.step() == ["replace node-a"]
    assert marked(scene) == {}


async def test_marks_stay_while_they_are_not_known(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.marks.put(GPU_1="in use")
    await scene.step()
    scene.marks.marks = None
    scene.node(said=annotation("GPU-1", "GPU-2"))
    assert await scene.step() == ["replace node-a"]
    assert marked(scene) == {"GPU-1": "in use"}


async def test_new_gpu_node_has_an_injection(scene: Scene) -> None:
    scene.injections.put("native")
    scene.node(said=annotation("GPU-1"))
    assert await scene.step() == ["create node-a"]
    assert scene.gpu_nodes.objects["node-a"]["spec"] == {"injection": "native", "devices": [{"uuid": "GPU-1"}]}
    assert await scene.step() == []


async def test_changed_injection_is_written_with_the_marks_of_that_moment(scene: Scene) -> None:
    scene.injections.put("native")
    await scene.with_node("GPU-1")
    scene.marks.put(GPU_1="in use")
    scene.marks.changes = []
    scene.injections.put("nvidia")
    assert await scene.step() == ["replace node-a"]
    assert scene.gpu_nodes.objects["node-a"]["spec"]["injection"] == "nvidia"
    assert marked(scene) == {"GPU-1": "in use"}
    assert await scene.step() == []


async def test_injection_does_not_change_while_marks_are_not_known(scene: Scene) -> None:
    scene.injections.put("native")
    scene.marks.put()
    await scene.with_node("GPU-1")
    scene.marks.marks = None
    scene.injections.put("nvidia")
    assert await scene.step() == []
    scene.marks.put()
    assert await scene.step() == ["replace node-a"]


async def test_mark_of_a_gpu_node_without_a_source_of_devices_changes_nothing_else(scene: Scene) -> None:
    scene.node()
    devices = [{"uuid": "GPU-1", "model": "H100"}, {"uuid": "GPU-2", "healthy": False}]
    scene.gpu_nodes.put({"metadata": {"name": "node-a"}, "spec": {"devices": devices}})
    await scene.step()
    scene.marks.put(GPU_1="in use")
    assert await scene.step() == ["replace node-a"]
    assert marked(scene) == {"GPU-1": "in use"}
    scene.marks.put()
    await scene.step()
    assert scene.gpu_nodes.objects["node-a"]["spec"]["devices"] == devices


async def test_node_without_gpus_gets_no_gpu_node(scene: Scene) -> None:
    scene.node(said=annotation())
    assert await scene.step() == []


@pytest.mark.defect("assigner-14")
async def test_bad_annotation_gets_one_event_and_changes_nothing(scene: Scene) -> None:
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
async def test_entry_without_a_gpu_uuid_is_ignored_with_one_event(scene: Scene, name: str) -> None:
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


async def test_reading_with_an_invalid_uuid_keeps_the_other_devices(scene: Scene) -> None:
    read = as_read({"index": 0, "uuid": "GPU-1"}, {"index": 1, "uuid": "all"})
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    await scene.step()
    assert scene.devices() == {"GPU-1": True}
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]


async def test_stored_device_with_an_invalid_uuid_is_dropped_unless_reserved(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    raw = scene.gpu_nodes.objects["node-a"]
    scene.gpu_nodes.put({**raw, "spec": {"devices": [{"uuid": "GPU-1"}, {"uuid": "all"}, {"uuid": "gpu-7"}]}})
    scene.hold("gpu-7")
    assert await scene.step() != []
    assert scene.devices() == {"GPU-1": True, "gpu-7": False}


async def test_unreadable_gpu_node_gets_one_event_and_is_left_alone(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    good = scene.gpu_nodes.objects["node-a"]
    by_hand = {"reservation": "x", "phase": "pending", "namespace": "ml", "digest": "d"}
    scene.gpu_nodes.put({**good, "status": {"held": {**good["status"]["held"], "GPU-1": by_hand}}})
    scene.node("node-b", annotation("GPU-b"))
    assert await scene.step() == ["create node-b"]
    scene.node(said=annotation("GPU-2"))
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    assert "'GPU-1' is not a slot" in scene.events.messages[0]


async def test_reserved_device_that_vanishes_is_quarantined_until_released(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.node(said=annotation("GPU-2"))
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {"GPU-2": True, "GPU-1": False}
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.DEVICE_VANISHED)]
    scene.hold()
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {"GPU-2": True}


async def test_returning_device_is_healthy_again(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    scene.node(said=annotation())
    await scene.step()
    assert scene.devices() == {"GPU-1": False}
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    assert scene.devices() == {"GPU-1": True}


async def test_unreserved_device_that_vanishes_is_dropped_at_once(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2")
    scene.node(said=annotation("GPU-new", "GPU-2"))
    await scene.step()
    assert scene.devices() == {"GPU-new": True, "GPU-2": True}
    assert scene.events.recorded == []


async def test_reserved_device_removed_by_hand_is_restored(scene: Scene) -> None:
    """Edited by hand, or rebuilt from pods: the object lists every reserved device."""
    await scene.with_node("GPU-1", held=("GPU-1", "GPU-lost"))
    assert scene.devices() == {"GPU-1": True, "GPU-lost": False}


async def test_removing_the_annotation_removes_the_devices(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.node()
    await scene.step()
    assert scene.devices() == {"GPU-1": False}


async def test_concurrent_reservation_keeps_its_device(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation())
    scene.nodes.tell()
    scene.hold("GPU-1")  # and the watch has not shown it
    await scene.discovery.step()
    assert scene.devices() == {"GPU-1": False}
    assert list(scene.gpu_nodes.objects["node-a"]["status"]["held"]) == ["GPU-1/0"]


async def test_write_conflict_is_retried_on_the_current_object(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation("GPU-1", "GPU-2"))
    scene.gpu_nodes.overtaken = 3
    assert await scene.step() == ["replace node-a"]


async def test_repeated_write_conflicts_are_left_for_the_next_pass(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node(said=annotation("GPU-1", "GPU-2"))
    scene.gpu_nodes.overtaken = 5
    assert await scene.step() == []
    assert await scene.step() == ["replace node-a"]


async def test_unavailable_api_server_is_retried_in_the_next_pass(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    scene.gpu_nodes.is_away = True
    assert await scene.step() == []
    scene.gpu_nodes.is_away = False
    assert await scene.step() == ["create node-a"]


async def test_pass_stops_after_some_failures_of_the_api_server(scene: Scene) -> None:
    for number in range(50):
        scene.node(f"node-{number}", annotation(f"GPU-{number}"))
    create, asked = scene.gpu_nodes.create, []

    async def silent(raw: Raw) -> Raw:
        asked.append(raw["metadata"]["name"])
        await asyncio.sleep(0)
        raise StoreUnavailableError("no answer")

    scene.gpu_nodes.create = silent  # type: ignore[method-assign]
    await scene.step()
    assert len(asked) == CONCURRENCY
    scene.gpu_nodes.create = create  # type: ignore[method-assign]
    assert len(await scene.step()) == 50


async def test_existing_gpu_node_is_adopted(scene: Scene) -> None:
    """Created by another reconciler, for example, and not observed yet."""
    scene.node(said=annotation("GPU-1"))
    scene.nodes.tell()
    scene.gpu_nodes.put(
        {"metadata": {"name": "node-a"}, "spec": {"devices": [{"uuid": "GPU-old"}]}, "status": {"held": {}}}
    )
    await scene.discovery.step()
    assert scene.devices() == {"GPU-1": True}


async def test_rejected_gpu_node_gets_an_event_and_does_not_stop_others(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation(f"GPU-{name}"))
    scene.gpu_nodes.refused = {"node-a"}
    assert await scene.step() == ["create node-b"]
    assert scene.events.recorded == [("node-a", Reason.DEVICES_UNREADABLE)]
    assert "too many" in scene.events.messages[0]


# Nodes that are deleted.


async def test_gpu_node_is_deleted_with_its_node(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    assert await scene.step() == ["delete node-a"]
    assert "deletionTimestamp" in scene.gpu_nodes.objects["node-a"]["metadata"]  # the ledger owns the finalizer
    assert await scene.step() == []
    scene.gpu_nodes.remove("node-a")
    scene.node(said=annotation("GPU-1"))
    assert await scene.step() == ["create node-a"]


async def test_gpu_node_being_deleted_is_recreated_when_gone(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    await scene.step()
    scene.node(said=annotation("GPU-1"))
    assert await scene.step() == []
    scene.gpu_nodes.remove("node-a")
    assert await scene.step() == ["create node-a"]


async def test_gpu_node_with_reservations_outlives_its_node(scene: Scene) -> None:
    await scene.with_node("GPU-1", "GPU-2", held=("GPU-1",))
    scene.nodes.remove("node-a")
    assert await scene.step() == []
    assert scene.events.recorded == [("node-a", Reason.NODE_GONE)]
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}
    scene.node(said=annotation("GPU-1", "GPU-2"))  # it returns and the object is unchanged
    assert await scene.step() == []


async def test_gpu_node_without_node_is_deleted_with_its_last_reservation(scene: Scene) -> None:
    await scene.with_node("GPU-1", held=("GPU-1",))
    scene.nodes.remove("node-a")
    await scene.step()
    scene.hold()
    assert await scene.step() == ["delete node-a"]


async def test_state_of_a_deleted_node_is_dropped(scene: Scene) -> None:
    for _ in range(2):
        await scene.with_node("GPU-1", held=("GPU-1",))
        scene.nodes.remove("node-a")
        await scene.step()
        scene.hold()
        assert await scene.step() == ["delete node-a"]
        scene.gpu_nodes.objects["node-a"]["metadata"].pop("finalizers")
        scene.gpu_nodes.remove("node-a")
        assert await scene.step() == []
    assert (scene.events.recorded, scene.discovery._recorded) == ([("node-a", Reason.NODE_GONE)] * 2, {})


async def test_state_of_a_deleted_node_with_a_bad_annotation_is_dropped(scene: Scene) -> None:
    scene.node(said="nonsense")
    await scene.step()
    assert len(scene.discovery._recorded) == 1
    scene.nodes.remove("node-a")
    await scene.step()
    assert scene.discovery._recorded == {}


async def test_gpu_node_is_not_deleted_before_it_is_rebuilt(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    await scene.step()
    scene.nodes.remove("node-a")
    assert await scene.step() == []


async def test_gpu_node_created_by_a_user_is_never_deleted(scene: Scene) -> None:
    scene.node()
    scene.gpu_nodes.put({"metadata": {"name": "node-a"}, "spec": {"devices": []}, "status": {"held": {}}})
    scene.gpu_nodes.put({"metadata": {"name": "node-x"}, "spec": {"devices": []}, "status": {"held": {}}})
    await scene.step()
    scene.nodes.remove("node-a")
    assert await scene.step() == []


async def test_node_missing_from_a_list_keeps_its_gpu_node(scene: Scene) -> None:
    """The API server is asked by name before anything is deleted."""
    await scene.with_node("GPU-1")
    scene.is_gone = False
    scene.discovery.nodes.replaced({})
    assert await scene.step() == []
    assert scene.asked == ["node-a"]


async def test_nothing_is_written_while_a_watch_is_interrupted(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.is_current = False
    scene.nodes.remove("node-a")
    assert await scene.step() == []
    assert scene.asked == []
    scene.is_current = True
    assert await scene.step() == ["delete node-a"]


async def test_concurrent_reservation_keeps_the_gpu_node(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    scene.nodes.tell()
    scene.hold("GPU-1")  # and the watch has not shown it
    await scene.discovery.step()
    assert "deletionTimestamp" not in scene.gpu_nodes.objects["node-a"]["metadata"]


# One device on two nodes.


async def test_device_on_two_nodes_gets_one_event_on_each(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation("GPU-1", f"GPU-{name}"))
    scene.node("node-c", annotation("GPU-c"))
    await scene.step()
    scene.hold("GPU-node-a")
    await scene.step()
    assert sorted(scene.events.recorded) == [("node-a", Reason.DEVICE_DISPUTED), ("node-b", Reason.DEVICE_DISPUTED)]
    assert sorted(scene.events.messages)[0].startswith("GPU-1 is also on node-a")


async def test_dispute_ends_with_one_node_and_may_start_again(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.node(name, annotation("GPU-1"))
    await scene.step()
    scene.nodes.remove("node-b")
    await scene.step()
    assert len(scene.events.recorded) == 2
    scene.node("node-b", annotation("GPU-1"))
    await scene.step()
    assert len(scene.events.recorded) == 4


async def test_device_of_a_gpu_node_created_by_a_user_can_be_disputed(scene: Scene) -> None:
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


async def test_inventory_file_overrides_the_annotation(tmp_path: Path) -> None:
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


async def test_changed_inventory_file_is_applied(tmp_path: Path) -> None:
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


async def test_bad_inventory_file_changes_nothing_and_delays_the_first_pass(tmp_path: Path) -> None:
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


# Many nodes and devices.


async def test_node_with_2000_devices_fits_into_one_object(scene: Scene) -> None:
    uuids = [f"GPU-{k:08x}-0000-4000-8000-000000000000" for k in range(2000)]
    scene.node(said=annotation(*uuids))
    scene.node("node-b", annotation("GPU-b"))
    assert sorted(await scene.step()) == ["create node-a", "create node-b"]
    scene.hold(*uuids)
    assert await scene.step() == []
    assert len(json.dumps(scene.gpu_nodes.objects["node-a"])) < 1.5 * 1024 * 1024


async def test_many_nodes_are_handled_in_several_steps(scene: Scene) -> None:
    for number in range(BATCH_SIZE + 5):
        scene.node(f"node-{number}", annotation(f"GPU-{number}"))
    assert [len(await scene.step()) for _ in range(3)] == [BATCH_SIZE, 5, 0]


async def test_unexpected_error_with_one_node_is_raised_after_the_others_are_handled(scene: Scene) -> None:
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


async def test_node_of_a_cancelled_step_is_handled_again(scene: Scene) -> None:
    """The Lease was lost during a write, and the same process is elected again."""
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


async def test_failed_deletion_of_a_gpu_node_is_retried(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.remove("node-a")
    scene.gpu_nodes.is_away = True
    assert await scene.step() == []
    scene.gpu_nodes.is_away = False
    assert await scene.step() == ["delete node-a"]


def as_read(*gpus: dict[str, Any]) -> str:
    return json.dumps({"time": "2026-01-01T00:00:00Z", "pod": "u", "gpus": gpus})


@pytest.mark.defect("gpuid-19")
async def test_reading_provides_index_uuid_and_serial(scene: Scene) -> None:
    gpus = [{"index": k, "uuid": f"GPU-{k}", "serial": "S", "model": "GB200", "memory": "189471Mi"} for k in range(2)]
    gpus[0]["pci"] = "00000009:AF:00.0"
    read = as_read(*gpus, {"index": 2}, {"index": 3, "uuid": "GPU-3", "mig": True})
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    assert await scene.step() == ["create node-a"]
    found = {one.uuid: one for one in GpuNode.parse(scene.gpu_nodes.objects["node-a"]).devices}
    assert found == {
        "GPU-0": Device(DeviceUuid("GPU-0"), 0, "GB200", "189471Mi", "S", pci="0009:af:00.0"),
        "GPU-1": Device(DeviceUuid("GPU-1"), 1, "GB200", "189471Mi", "S"),
        "GPU-3": Device(DeviceUuid("GPU-3"), 3, is_healthy=False),
    }


async def test_device_labels_annotation_selects_devices_and_readings_complete_them(
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
async def test_unreadable_reading_changes_nothing(scene: Scene, read: str) -> None:
    await scene.with_node("GPU-1")
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    assert await scene.step() == []
    assert list(scene.devices()) == ["GPU-1"]


# GPUs that a DRA driver publishes.


async def test_published_gpus_are_listed_and_readings_complete_them(scene: Scene) -> None:
    scene.node()
    scene.publish(gpu_device("GPU-1", 0), gpu_device("GPU-2", 1, taints=[{"key": "sick", "effect": "NoSchedule"}]))
    assert await scene.step() == ["create node-a"]
    model, memory = "NVIDIA H100 80GB HBM3", "81559Mi"
    first, second = scene.gpu_nodes.objects["node-a"]["spec"]["devices"]
    labels = ["architecture=Hopper", "brand=Nvidia", "model=NVIDIA-H100-80GB-HBM3"]
    same = {"model": model, "memory": memory, "labels": labels}
    assert first == {"uuid": "GPU-1", "pci": "0000:01:00.0", **same}
    assert second == {"uuid": "GPU-2", "pci": "0000:02:00.0", "healthy": False, **same}
    other = {"index": 3, "uuid": "GPU-1", "serial": "s1", "model": "another", "pci": "00000000:AF:00.0"}
    read = as_read(other, {"index": 4, "uuid": "GPU-9"})
    scene.nodes.put({"metadata": {"name": "node-a", "annotations": {"gpuwarden.io/gpus": read}}})
    assert await scene.step() == ["replace node-a"]
    first, _ = scene.gpu_nodes.objects["node-a"]["spec"]["devices"]
    assert first == {
        "uuid": "GPU-1",
        "index": 3,
        "model": model,
        "memory": memory,
        "serial": "s1",
        "pci": "0000:01:00.0",
        "labels": labels,
    }


async def test_annotation_overrides_published_gpus(scene: Scene) -> None:
    scene.node(said=annotation("GPU-1"))
    scene.publish(gpu_device("GPU-1", 0), gpu_device("GPU-2", 1))
    await scene.step()
    assert scene.devices() == {"GPU-1": True}


async def test_changed_slice_changes_the_gpu_node_and_an_incomplete_pool_does_not(scene: Scene) -> None:
    scene.node()
    scene.publish(gpu_device("GPU-1", 0))
    await scene.step()
    scene.hold()
    scene.publish(gpu_device("GPU-2", 0), generation=2, count=2)
    assert await scene.step() == []
    scene.publish(gpu_device("GPU-1", 0), gpu_device("GPU-2", 1), generation=3)
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {"GPU-1": True, "GPU-2": True}


async def test_pool_that_is_incomplete_at_the_start_keeps_the_known_devices(scene: Scene) -> None:
    await scene.with_node("GPU-1")
    scene.node()
    scene.publish(gpu_device("GPU-2", 0), count=2)
    assert await scene.step() == []
    assert scene.devices() == {"GPU-1": True}


async def test_devices_go_when_their_slices_stay_away(scene: Scene) -> None:
    scene.node()
    scene.publish(gpu_device("GPU-1", 0))
    await scene.step()
    scene.hold()
    scene.slices.remove("slice")
    assert await scene.step() == []
    scene.now += KEPT_WITHOUT_SLICES
    assert await scene.step() == ["replace node-a"]
    assert scene.devices() == {}
