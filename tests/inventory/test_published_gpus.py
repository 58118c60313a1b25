"""The GPUs of a node by the slices of a DRA driver: what counts while slices are being written."""

from tests.builders import NOW, SECOND, Raw
from tests.e2e.dra.gpus import gpu_device, gpu_slice
from tests.fake_objects import FakeObjects
from webhook.inventory.published_gpus import KEPT_WITHOUT_SLICES, PublishedGpus


class Scene:
    def __init__(self) -> None:
        self.now = NOW
        self.gpus = PublishedGpus(lambda: self.now)
        self.objects = FakeObjects(self.gpus)

    def publish(self, *uuids: str, name: str = "one", node: str = "node-a", **pool: int) -> None:
        devices = [gpu_device(uuid, number) for number, uuid in enumerate(uuids)]
        self.objects.put(gpu_slice(node, devices, name=name, **pool))

    def changed(self) -> list[str]:
        self.objects.tell()
        return self.gpus.take_changes()

    def uuids(self, node: str = "node-a") -> list[str] | None:
        self.gpus.take_changes()
        found = self.gpus.devices_of(node)
        return None if found is None else [one.uuid for one in found]


def test_node_changes_when_its_gpus_do() -> None:
    scene = Scene()
    assert scene.uuids() is None
    scene.publish("GPU-1")
    assert scene.changed() == ["node-a"]
    assert scene.uuids() == ["GPU-1"]
    scene.publish("GPU-1", generation=2)
    assert scene.changed() == []
    scene.publish("GPU-1", "GPU-2", generation=3)
    assert scene.changed() == ["node-a"]
    assert scene.uuids() == ["GPU-1", "GPU-2"]


def test_only_the_newest_generation_counts_and_an_incomplete_pool_changes_nothing() -> None:
    scene = Scene()
    scene.publish("GPU-1", "GPU-2")
    scene.changed()
    scene.publish("GPU-3", name="two", generation=2, count=2)
    assert scene.changed() == []
    assert scene.uuids() == ["GPU-1", "GPU-2"]
    scene.publish("GPU-1", generation=2, count=2)
    assert scene.changed() == ["node-a"]
    assert scene.uuids() == ["GPU-1", "GPU-3"]


def test_gpus_of_a_pool_that_was_never_complete_are_not_known() -> None:
    scene = Scene()
    assert scene.gpus.is_known("node-a")
    scene.publish("GPU-1", count=2)
    assert scene.changed() == []
    assert not scene.gpus.is_known("node-a")
    scene.publish("GPU-2", name="two", count=2)
    assert scene.changed() == ["node-a"]
    assert scene.gpus.is_known("node-a")


def test_gpu_in_two_pools_of_a_node_is_listed_once() -> None:
    scene = Scene()
    scene.publish("GPU-1")
    other: Raw = gpu_slice("node-a", [gpu_device("GPU-1", 0)], name="other")
    other["spec"]["pool"]["name"] = "other"
    scene.objects.put(other)
    scene.changed()
    assert scene.uuids() == ["GPU-1"]


def test_gpus_stay_while_a_kubelet_restarts_and_go_when_no_slice_comes_back() -> None:
    scene = Scene()
    scene.publish("GPU-1")
    scene.changed()
    scene.objects.remove("one")
    assert scene.changed() == []
    scene.now += KEPT_WITHOUT_SLICES - SECOND
    assert scene.changed() == []
    scene.publish("GPU-1")
    assert scene.changed() == []
    scene.objects.remove("one")
    assert scene.changed() == []
    assert scene.uuids() == ["GPU-1"]
    scene.now += KEPT_WITHOUT_SLICES
    assert scene.changed() == ["node-a"]
    assert scene.uuids() is None


def test_gpus_are_known_by_the_names_of_claims_while_they_are_published() -> None:
    scene = Scene()
    scene.publish("GPU-1", "GPU-2")
    scene.changed()
    assert scene.gpus.uuids_on("node-a") == {("node-a", "gpu-0"): "GPU-1", ("node-a", "gpu-1"): "GPU-2"}
    scene.publish("GPU-2", "GPU-1", generation=2)
    assert scene.changed() == ["node-a"]
    assert scene.gpus.uuids_on("node-a") == {("node-a", "gpu-0"): "GPU-2", ("node-a", "gpu-1"): "GPU-1"}
    assert set(scene.gpus.nodes_of("node-a")) == {"node-a"}
    scene.objects.remove("one")
    scene.changed()
    scene.now += KEPT_WITHOUT_SLICES
    assert scene.changed() == ["node-a"]
    assert (scene.gpus.uuids_on("node-a"), set(scene.gpus.nodes_of("node-a"))) == ({}, set())


def test_slice_that_moves_to_another_node_changes_both() -> None:
    scene = Scene()
    scene.publish("GPU-1")
    scene.changed()
    scene.publish("GPU-1", node="node-b")
    assert scene.changed() == ["node-b"]
    scene.now += KEPT_WITHOUT_SLICES
    assert scene.changed() == ["node-a"]
