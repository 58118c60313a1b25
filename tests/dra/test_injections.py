"""When a GPUNode says another injection: at once, or after kube-scheduler has ended to allocate its GPUs."""

from datetime import timedelta

import pytest

from tests.builders import NOW, SECOND
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.fleet import Fleet
from webhook.core.injection import Injection
from webhook.core.proof_devices import KEPT_AFTER_END, ProofDevice
from webhook.dra.injections import NodeInjections
from webhook.dra.written_slices import WrittenSlices
from webhook.kube.resource_slices import slices_of

A, LABEL = "node-a", "gpuwarden.io/injection"
OPEN = ProofDevice("gpu-1-aa11", "GPU-1", "aa11", NOW + timedelta(hours=1))
CLOSED = ProofDevice("gpu-1-aa11", "GPU-1", "aa11", NOW + timedelta(hours=1), is_closed=True)


class Scene:
    """A node that is native, and a leader that looks at it again and again."""

    def __init__(self) -> None:
        self.now, self.is_current, self.version = NOW, True, 0
        self.fleet, self.written = Fleet(injection=None), WrittenSlices()
        self.injections = NodeInjections(self.fleet, lambda: self.now, self.written, lambda: self.is_current)

    def node(self, label: str | None, stored: str | None = "native") -> None:
        labels = {} if label is None else {LABEL: label}
        self.fleet.put(Node(A, labels, (Device(DeviceUuid("GPU-1")),), injection=stored), self.now)

    def write(self, *devices: ProofDevice) -> None:
        self.version += 1
        for raw in slices_of(A, devices, self.version, "gpu.nvidia.com"):
            raw["metadata"]["resourceVersion"] = str(self.version)
            self.written.changed(raw)

    def found(self, after: timedelta = timedelta(), stored: str | None = "native") -> str | None:
        self.now += after
        return self.injections.to_write(A, stored)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("label", "default", "stored", "found"),
    [
        (None, None, None, "native"),
        (None, Injection.NVIDIA, None, "nvidia"),
        ("dra", Injection.NVIDIA, "nvidia", "dra"),
        ("strange", Injection.NVIDIA, "nvidia", "native"),
        (None, None, "nvidia", "native"),
        ("plugin", None, "cuda", "plugin"),
        ("native", Injection.NVIDIA, "native", "native"),
    ],
)
def test_injection_changes_at_once_unless_kube_scheduler_had_the_gpus(
    scene: Scene, label: str | None, default: Injection | None, stored: str | None, found: str
) -> None:
    scene.fleet.injection = default
    scene.node(label, stored)
    scene.write(OPEN)
    assert scene.found(stored=stored) == found


@pytest.mark.parametrize("label", ["nvidia", "cuda", "plugin", "dra"])
@pytest.mark.parametrize("stored", ["native", "of a newer version"])
def test_reservations_begin_some_time_after_all_devices_are_closed(scene: Scene, label: str, stored: str) -> None:
    scene.node(label, stored)
    scene.write(OPEN)
    assert scene.found(stored=stored) == stored
    assert scene.found(2 * KEPT_AFTER_END, stored) == stored
    scene.write(CLOSED)
    assert scene.found(stored=stored) == stored
    assert scene.found(KEPT_AFTER_END - SECOND, stored) == stored
    assert scene.found(SECOND, stored) == label


def test_devices_that_nobody_has_seen_open_may_have_been_open_until_now(scene: Scene) -> None:
    scene.node("nvidia")
    assert scene.found() == "native"
    assert scene.found(KEPT_AFTER_END) == "nvidia"


def test_time_begins_again_when_devices_were_open_in_between(scene: Scene) -> None:
    scene.node("nvidia")
    scene.write(CLOSED)
    scene.found()
    scene.write(OPEN)
    scene.write(CLOSED)
    assert scene.found(KEPT_AFTER_END) == "native"
    assert scene.found(KEPT_AFTER_END - SECOND) == "native"
    assert scene.found(SECOND) == "nvidia"


def test_time_begins_again_while_a_watch_is_interrupted_and_after_an_election(scene: Scene) -> None:
    scene.node("nvidia")
    scene.found()
    scene.is_current = False
    assert scene.found(KEPT_AFTER_END) == "native"
    scene.is_current = True
    assert scene.found(KEPT_AFTER_END - SECOND) == "native"
    scene.injections.begin()
    assert scene.found(SECOND) == "native"
    assert scene.found(KEPT_AFTER_END) == "nvidia"


def test_time_begins_again_when_the_label_was_taken_back(scene: Scene) -> None:
    scene.node("nvidia")
    scene.found()
    scene.node(None)
    assert scene.found(KEPT_AFTER_END) == "native"
    scene.node("nvidia")
    assert scene.found() == "native"


def test_without_proof_devices_nothing_is_waited_for(scene: Scene) -> None:
    injections = NodeInjections(scene.fleet, lambda: scene.now)
    scene.node("nvidia")
    assert injections.to_write(A, "native") == "nvidia"


def test_writer_is_told_of_the_node_when_something_else_is_to_be_written(scene: Scene) -> None:
    scene.node(None)
    assert scene.injections.take_changes() == []
    scene.node("nvidia")
    assert scene.injections.take_changes() == []
    scene.now += KEPT_AFTER_END
    assert scene.injections.take_changes() == [A]
    scene.node("nvidia", "nvidia")
    assert scene.injections.take_changes() == []
    scene.node("nvidia", None)
    assert scene.injections.take_changes() == [A]
    scene.fleet.remove(A)
    assert scene.injections.take_changes() == []
    assert scene.found(stored="cuda") == "cuda"


def test_node_without_gpus_is_not_looked_at(scene: Scene) -> None:
    scene.fleet.put(Node(A), NOW)
    assert scene.injections.take_changes() == []
