"""Which GPUs are marked because a ResourceClaim has them, and when the marks change."""

import pytest

from tests.builders import NOW, reservation, slot
from tests.dra.test_claims import THEIRS, claim
from tests.e2e.dra.gpus import gpu_device, gpu_slice
from tests.fake_objects import FakeObjects
from webhook.admission.claimed_gpus import LEFT_OVER, ClaimedGpus, CombinedMarks
from webhook.core.device import CLAIMED, Device, DeviceUuid, Node
from webhook.core.fleet import Fleet
from webhook.dra.claims import AllocatedClaims
from webhook.inventory.published_gpus import PublishedGpus

A, ONE, TWO = "node-a", DeviceUuid("GPU-1"), DeviceUuid("GPU-2")
OWN = "gpuwarden-00000000-0000-4000-8000-000000000001"


class Scene:
    def __init__(self) -> None:
        self.now, self.is_current = NOW, True
        self.fleet, self.claims, self.published = Fleet(), AllocatedClaims(), PublishedGpus(lambda: self.now)
        self.slices = FakeObjects(self.published)
        self.marks = ClaimedGpus(
            self.fleet, self.claims, self.published, THEIRS, lambda: self.now, lambda: self.is_current
        )
        self.node()
        self.publish(ONE, TWO)
        self.seen()

    def node(self, mark: str = "") -> None:
        devices = (Device(ONE, mismatch=mark), Device(TWO))
        self.fleet.put(Node(A, devices=devices), self.now)

    def publish(self, *uuids: str) -> None:
        self.slices.put(gpu_slice(A, [gpu_device(uuid, number) for number, uuid in enumerate(uuids)], name="slice"))
        self.slices.tell()
        self.published.take_changes()

    def takes(self, name: str = "train", device: str = "gpu-0", *, is_admin: bool = False) -> None:
        raw = claim(name, (THEIRS, A, device))
        if is_admin:
            raw["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
        self.claims.changed(raw)

    def ends(self, name: str = "train") -> None:
        self.claims.deleted(claim(name))

    def seen(self) -> dict[DeviceUuid, str] | None:
        """The marks of the node as the writer of GPUNodes reads them; None if it is not told of a change."""
        return dict(self.marks.marks_on(A)) if A in self.marks.take_changes() else None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_gpu_of_a_claim_is_marked_until_the_claim_is_gone(scene: Scene) -> None:
    assert scene.seen() is None
    scene.takes()
    assert scene.seen() == {ONE: CLAIMED}
    assert scene.seen() is None
    scene.takes("other", "gpu-1")
    assert scene.seen() == {ONE: CLAIMED, TWO: CLAIMED}
    scene.ends()
    assert scene.seen() == {TWO: CLAIMED}


def test_devices_of_other_drivers_and_pools_are_not_those_of_the_node(scene: Scene) -> None:
    scene.claims.changed(claim("a", ("example.test", A, "gpu-0"), (THEIRS, "node-b", "gpu-0"), (THEIRS, A, "gpu-7")))
    assert scene.seen() is None


def test_gpu_of_a_reservation_is_not_marked(scene: Scene) -> None:
    held = reservation(slot(ONE))
    scene.fleet.hold(held)
    scene.takes(OWN)
    assert scene.seen() is None
    scene.now += LEFT_OVER
    assert scene.seen() is None


def test_claim_of_a_reservation_that_has_ended_is_marked_when_it_lasts(scene: Scene) -> None:
    held = reservation(slot(ONE))
    scene.fleet.hold(held)
    scene.takes(OWN)
    scene.seen()
    scene.fleet.free(held)
    assert scene.seen() is None
    scene.now += LEFT_OVER
    assert scene.seen() == {ONE: CLAIMED}
    scene.ends(OWN)
    assert scene.seen() == {}


def test_claim_of_another_form_is_marked_when_the_reservation_ends(scene: Scene) -> None:
    held = reservation(slot(ONE))
    scene.fleet.hold(held)
    scene.takes()
    assert scene.seen() is None
    scene.fleet.free(held)
    assert scene.seen() == {ONE: CLAIMED}


def test_mark_of_a_claim_without_a_reservation_stays_when_its_node_takes_reservations(scene: Scene) -> None:
    """Such claims have names of the same form where kube-scheduler chooses the GPUs."""
    scene.takes(OWN)
    assert scene.seen() == {ONE: CLAIMED}
    scene.fleet.put(Node(A, {"gpuwarden.io/injection": "nvidia"}, (Device(ONE, mismatch=CLAIMED), Device(TWO))), NOW)
    assert scene.seen() is None
    scene.marks.begin()
    assert scene.seen() == {ONE: CLAIMED}


def test_another_claim_for_the_gpu_of_a_reservation_that_has_ended_is_marked_at_once(scene: Scene) -> None:
    held = reservation(slot(ONE))
    scene.fleet.hold(held)
    scene.takes(OWN)
    scene.seen()
    scene.ends(OWN)
    scene.seen()
    scene.fleet.free(held)
    scene.takes(OWN.replace("1", "2"))
    assert scene.seen() == {ONE: CLAIMED}


def test_claim_with_admin_access_takes_no_gpu(scene: Scene) -> None:
    scene.takes(is_admin=True)
    assert scene.seen() is None


def test_gpu_that_is_published_after_its_claim_is_marked(scene: Scene) -> None:
    scene.publish(TWO)
    scene.takes(device="gpu-1")
    assert scene.seen() is None
    scene.publish(TWO, ONE)
    assert scene.marks.marks_on(A) == {ONE: CLAIMED}  # the writer is told by the slices
    scene.ends()
    assert scene.seen() == {}


def test_last_marks_stay_while_claims_are_not_known(scene: Scene) -> None:
    scene.takes()
    scene.seen()
    scene.is_current = False
    scene.ends()
    assert scene.seen() is None
    assert scene.marks.marks_on(A) == {ONE: CLAIMED}
    scene.is_current = True
    assert scene.seen() == {}


def test_new_leader_keeps_the_written_marks_until_claims_are_known(scene: Scene) -> None:
    scene.is_current = False
    scene.node(mark=CLAIMED)
    scene.marks.begin()
    assert scene.marks.marks_on(A) == {ONE: CLAIMED}
    assert scene.marks.marks_on("node-b") == {}
    scene.is_current = True
    assert scene.seen() == {}


class Deliveries:
    def __init__(self, marks: dict[DeviceUuid, str] | None) -> None:
        self.marks = marks

    def marks_on(self, node: str) -> dict[DeviceUuid, str] | None:
        return self.marks

    def take_changes(self) -> list[str]:
        return ["node-b"]


def test_marks_of_both_sources_are_combined(scene: Scene) -> None:
    scene.takes()
    scene.takes("other", "gpu-1")
    both = CombinedMarks(Deliveries({TWO: "given"}), scene.marks)
    assert set(both.take_changes()) == {A, "node-b"}
    assert both.marks_on(A) == {ONE: CLAIMED, TWO: "given"}
    assert CombinedMarks(Deliveries(None), scene.marks).marks_on(A) is None


def test_claim_on_a_node_without_reservations_is_marked_at_once(scene: Scene) -> None:
    scene.fleet.put(Node(A, {"gpuwarden.io/injection": "native"}, (Device(ONE), Device(TWO))), scene.now)
    scene.takes(OWN)
    assert scene.seen() == {ONE: CLAIMED}
