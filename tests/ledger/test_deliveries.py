"""Reservations whose GPUs the kubelet chooses: what is recorded when it has."""

import random
from collections.abc import Mapping
from datetime import timedelta

import pytest
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import builders
from tests.builders import NOW, Raw, reservation, slot
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.fake_store import check_rules, gpu_node
from tests.ledger.test_reconcile import POD, R1, Scene
from webhook.core.claim_keys import ClaimRecord
from webhook.core.device import DeviceUuid
from webhook.core.errors import SlotsTakenError
from webhook.core.injection import Injection
from webhook.core.reservation import GpuDelivery, Orphan, Phase, PodIdentity, PodProof, Reservation, ReservationId
from webhook.core.reservation import ReservationRequest as Ask
from webhook.kube.gpu_node import GpuNode, raw_held, with_held
from webhook.ledger.moves import Adopt, HoldSlots, RecordDelivery, Release, Times, WriteAgainError
from webhook.ledger.reserved_pod import ReservedPod

TIMES = Times(PENDING_DEADLINE, CLOCK_SKEW)
AWAITED, RECORDED = GpuDelivery.AWAITED, GpuDelivery.RECORDED
Held = dict[ReservationId, Reservation]


def held_for(pod: str, *uuids: str, delivery: GpuDelivery | None = AWAITED) -> Reservation:
    slots = (slot(uuid) for uuid in uuids)
    return reservation(*slots, id=pod, phase=Phase.FINALIZED, pod_name=pod, uid=pod, delivery=delivery)


def recorded(*before: Reservation, pod: str = "A", gpus: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The GPUs of each reservation afterwards."""
    held: Held = {one.id: one for one in before}
    move = RecordDelivery(ReservationId(pod), pod, NOW, tuple(map(DeviceUuid, gpus)))
    done = move.apply(held, held, NOW, TIMES)
    assert (done is None) or (done.delivery is RECORDED and done == held[done.id])
    return {one.id: one.uuids for one in held.values()}


def test_reservation_holds_what_the_kubelet_chose() -> None:
    assert recorded(held_for("A", "GPU-1", "GPU-2"), gpus=("GPU-3", "GPU-2")) == {"A": ("GPU-2", "GPU-3")}


def test_other_pod_whose_placeholder_is_taken_gets_the_former_one() -> None:
    """The kubelet gave each pod the GPU that stood for the other's."""
    first = recorded(held_for("A", "GPU-1"), held_for("B", "GPU-2"), gpus=("GPU-2",))
    assert first == {"A": ("GPU-2",), "B": ("GPU-1",)}
    then = recorded(held_for("A", "GPU-2", delivery=RECORDED), held_for("B", "GPU-1"), pod="B", gpus=("GPU-1",))
    assert then == first


def test_two_placeholders_of_one_pod_are_taken() -> None:
    assert recorded(held_for("A", "GPU-1", "GPU-2"), held_for("B", "GPU-3", "GPU-4"), gpus=("GPU-4", "GPU-3")) == {
        "A": ("GPU-3", "GPU-4"),
        "B": ("GPU-1", "GPU-2"),
    }


@pytest.mark.parametrize("delivery", [None, RECORDED], ids=str)
def test_gpu_that_another_pod_has_is_not_taken(delivery: GpuDelivery | None) -> None:
    held: Held = {one.id: one for one in (held_for("A", "GPU-1"), held_for("B", "GPU-2", delivery=delivery))}
    before = dict(held)
    with pytest.raises(SlotsTakenError):
        RecordDelivery(ReservationId("A"), "A", NOW, (DeviceUuid("GPU-2"),)).apply(held, held, NOW, TIMES)
    assert held == before


def test_gpu_that_the_inventory_does_not_know_is_recorded() -> None:
    assert recorded(held_for("A", "GPU-1"), gpus=("GPU-9",)) == {"A": ("GPU-9",)}


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(held_for("A", "GPU-1", delivery=RECORDED), id="recorded"),
        pytest.param(held_for("A", "GPU-1", delivery=None), id="another-injection"),
        pytest.param(evolve(held_for("A", "GPU-1"), uid="another"), id="another-pod"),
        pytest.param(evolve(held_for("A", "GPU-1"), phase=Phase.RELEASING), id="releasing"),
        pytest.param(held_for("A", "GPU-1", "GPU-2"), id="another-number"),
    ],
)
def test_delivery_that_does_not_fit_changes_nothing(before: Reservation) -> None:
    assert recorded(before, gpus=("GPU-3",)) == {"A": before.uuids}


MARKED = Orphan(NOW, timedelta(seconds=5))


@pytest.mark.parametrize(
    ("before", "asked", "is_taken"),
    [
        pytest.param(held_for("A", "GPU-1"), None, True, id="awaited, another injection"),
        pytest.param(held_for("A", "GPU-1", delivery=RECORDED), None, False, id="recorded, another injection"),
        pytest.param(held_for("A", "GPU-1", delivery=None), AWAITED, True, id="another injection, plugin"),
        pytest.param(evolve(held_for("A", "GPU-1"), orphan=MARKED), AWAITED, True, id="orphan, plugin"),
        pytest.param(held_for("A", "GPU-1"), AWAITED, False, id="awaited, plugin"),
        pytest.param(
            evolve(held_for("A", "GPU-1", delivery=None), phase=Phase.RELEASING), AWAITED, False, id="releasing, plugin"
        ),
    ],
)
def test_no_reservation_is_made_beside_one_that_the_kubelet_could_confuse(
    before: Reservation, asked: GpuDelivery | None, *, is_taken: bool
) -> None:
    """Even if the decision was made on an older state of the node."""
    held: Held = {before.id: before}
    move = HoldSlots(Ask(ReservationId("B"), "ml", "d", delivery=asked), on("node-a", "GPU-2"))
    if is_taken:
        with pytest.raises(SlotsTakenError):
            move.apply(held, held, NOW, TIMES)
    else:
        move.apply(held, held, NOW, TIMES)
    assert ("B" in held) is not is_taken


@pytest.mark.parametrize("delivery", [None, *GpuDelivery], ids=str)
def test_delivery_is_stored(delivery: GpuDelivery | None) -> None:
    one = held_for("A", "GPU-1", delivery=delivery)
    raw = with_held(gpu_node("node-a", "GPU-1"), [one], ())
    assert raw["status"]["held"]["GPU-1/0"].get("delivery") == delivery
    assert GpuNode.parse(raw).reservations[one.id].delivery == delivery


# A kubelet that chooses in any order, and a reconciler that is behind.

DEVICES = tuple(DeviceUuid(f"GPU-{number}") for number in range(5))


@define
class PluginNode:
    """The truth on the node, and what the ledger holds. Every write satisfies the validation rules of GPUNodes."""

    held: Held = field(factory=dict)
    gpus: dict[str, tuple[DeviceUuid, ...]] = field(factory=dict)
    """By pod, those that the kubelet has given."""
    wanted: dict[str, int] = field(factory=dict)

    def make(self, move: HoldSlots | RecordDelivery | Release) -> bool:
        """Repeats the move for as many writes as it needs."""
        while True:
            held = dict(self.held)
            try:
                move.apply(self.held, held, NOW, TIMES)
            except SlotsTakenError:
                return False
            except WriteAgainError:
                self.write(held)
                continue
            self.write(held)
            return True

    def write(self, held: Held) -> None:
        check_rules(raw_held(self.held.values()), raw_held(held.values()))
        assert len(raw_held(held.values())) == sum(len(one.slots) for one in held.values()), "a GPU has two holders"
        self.held = held

    def create(self, pod: str, gpus: int) -> None:
        taken = {uuid for one in self.held.values() for uuid in one.uuids}
        free = [uuid for uuid in DEVICES if uuid not in taken]
        if len(free) >= gpus:
            ask = Ask(ReservationId(pod), "ml", "d", pod, delivery=AWAITED)
            assert self.make(HoldSlots(ask, on("node-a", *free[:gpus])))
            one = self.held[ask.id]
            self.held[ask.id] = evolve(one, uid=pod, phase=Phase.FINALIZED, deadline=None)
            self.wanted[pod] = gpus

    def start(self, pod: str, choice: random.Random) -> None:
        free = [uuid for uuid in DEVICES if not any(uuid in uuids for uuids in self.gpus.values())]
        if pod not in self.gpus:
            self.gpus[pod] = tuple(choice.sample(free, self.wanted[pod]))

    def record(self, pod: str) -> None:
        one = self.held[ReservationId(pod)]
        self.make(RecordDelivery(one.id, pod, one.since, self.gpus[pod]))

    def release(self, pod: str) -> None:
        """The reconciler learns of the end later than the kubelet."""
        one = self.held[ReservationId(pod)]
        assert self.make(Release(one.id, PodIdentity("ml", pod, pod), one.since))
        del self.wanted[pod]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(["create", "start", "record", "end", "release"]), st.integers(0, 4))),
    st.randoms(),
)
def test_ledger_converges_on_what_the_kubelet_gave(steps: list[tuple[str, int]], choice: random.Random) -> None:
    node, number, over = PluginNode(), 0, set[str]()
    for what, which in steps:
        pods = [pod for pod in node.wanted if (pod in over) is (what == "release")]
        pod = pods[which % len(pods)] if pods else None
        match what:
            case "create":
                number += 1
                node.create(f"pod-{number}", which % 3 + 1)
            case "start" if pod is not None:
                node.start(pod, choice)
            case "record" if pod in node.gpus:
                node.record(pod)
            case "end" if pod is not None:
                over.add(pod)
                node.gpus.pop(pod, None)
            case "release" if pod is not None:
                node.release(pod)
                over.discard(pod)
        assert {one.id: len(one.slots) for one in node.held.values()} == node.wanted
    for pod in over:
        node.release(pod)
    for pod in node.gpus:
        node.record(pod)
    chosen = {one.id: set(one.uuids) for one in node.held.values() if not one.is_awaited}
    assert chosen == {pod: set(uuids) for pod, uuids in node.gpus.items()}


# Existing pods whose reservations are unknown.

PLUGIN = ClaimRecord(gpus=1, asked={"main": 1}, injection=Injection.PLUGIN)


def plugin_pod(
    given: tuple[str, ...] = (),
    *,
    name: str = POD.name,
    uid: str = POD.uid,
    node: str = "node-a",
    record: ClaimRecord | None = None,
    uuid: str = "",
) -> Raw:
    """A pod without the GPUs in its annotations, as it is created."""
    annotations = {
        **({"gpuwarden.io/gpu-uuid": uuid} if uuid else {}),
        "gpuwarden.io/reservation-id": "r1" if uid == POD.uid else uid,
        "gpuwarden.io/node": "node-a",
        "gpuwarden.io/claim": (record or PLUGIN).text(),
    }
    raw = builders.raw_pod(name=name, namespace="ml", uid=uid, annotations=annotations, nodeName=node)
    devices = [{"resourceID": uuid, "health": "Healthy"} for uuid in given]
    status = {"name": "main", "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": devices}]}
    return {**raw, "status": {"phase": "Running", "containerStatuses": [{**status, "state": {"running": {}}}]}}


def test_pod_carries_a_reservation_before_its_gpus_are_known() -> None:
    one = ReservedPod.of(plugin_pod())
    assert one is not None
    assert (one.uuids, one.delivery, one.given, one.title_of_gpus) == ((), AWAITED, (), "1 GPU")
    given = ReservedPod.of(plugin_pod(("GPU-a1",)))
    assert given is not None
    assert given.given == ("GPU-a1",)
    elsewhere = ReservedPod.of(plugin_pod(("GPU-a1",), node="node-b"))
    assert elsewhere is not None
    assert elsewhere.given == (), "GPUs of another node"


def adopted(*before: Reservation, given: tuple[str, ...] = (), one: Raw | None = None) -> Held:
    found = ReservedPod.of(one or plugin_pod(given))
    assert found is not None
    held = {each.id: each for each in before}
    Adopt(found, "node-a", (DeviceUuid("GPU-1"), DeviceUuid("GPU-2"))).apply(held, held, NOW, TIMES)
    return held


def test_adopted_pod_keeps_as_many_gpus_and_its_own_if_they_are_free() -> None:
    assert adopted()[R1].uuids == ("GPU-1",)
    made = adopted(given=("GPU-2",))[R1]
    assert (made.uuids, made.delivery) == (("GPU-2",), AWAITED)
    assert adopted(held_for("B", "GPU-2"), given=("GPU-2",))[R1].uuids == ("GPU-1",)


@pytest.mark.parametrize(
    ("one", "before"),
    [
        pytest.param(plugin_pod(), None, id="plugin"),
        pytest.param(plugin_pod(record=ClaimRecord(gpus=1), uuid="GPU-2"), AWAITED, id="another injection"),
    ],
)
def test_pod_is_adopted_beside_one_that_the_kubelet_could_confuse_if_it_has_started(
    one: Raw, before: GpuDelivery | None
) -> None:
    other = held_for("B", "GPU-1", delivery=before)
    assert set(adopted(other, one=one)) == {"B", R1}
    with pytest.raises(SlotsTakenError):
        adopted(other, one={**one, "status": {"phase": "Pending"}})


def test_pod_without_a_free_gpu_on_its_node_is_not_adopted() -> None:
    with pytest.raises(SlotsTakenError):
        adopted(held_for("B", "GPU-1", "GPU-2"))


# The reconciler.


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def reserve(scene: Scene, number: int = 1, gpu: str = "GPU-a0", record: ClaimRecord = PLUGIN) -> PodIdentity:
    ask = Ask(ReservationId("r1" if number == 1 else f"uid-{number}"), "ml", record.digest(), delivery=record.delivery)
    await scene.bench.reserve(ask, on("node-a", gpu))
    pod = PodIdentity("ml", f"pod-{number}", f"uid-{number}")
    await scene.bench.ledger.bind_to_pod(PodProof.CONFIRMED, ask.id, pod)
    return pod


def slots(scene: Scene) -> Mapping[str, str]:
    return {key.removesuffix("/0"): entry["reservation"] for key, entry in scene.bench.held().items()}


def annotated(scene: Scene, uid: str = POD.uid) -> object:
    return scene.bench.pods.raws[uid]["metadata"]["annotations"].get("gpuwarden.io/gpu-uuid")


async def test_gpus_that_the_kubelet_chose_are_recorded_and_annotated(scene: Scene) -> None:
    await reserve(scene)
    scene.show(plugin_pod())
    await scene.reconciler.step()
    assert (slots(scene), annotated(scene)) == ({"GPU-a0": "r1"}, None)
    scene.reconciler.wakeup.clear()
    scene.show(plugin_pod(("GPU-a2",)))
    assert scene.reconciler.wakeup.is_set()
    await scene.reconciler.step()
    assert (slots(scene), annotated(scene)) == ({"GPU-a2": "r1"}, "GPU-a2")
    assert scene.heard.recorded == []
    writes = scene.bench.store.writes
    scene.reconciler.wakeup.clear()
    scene.reconciler.changed(scene.bench.pods.raws[POD.uid])
    assert not scene.reconciler.wakeup.is_set(), "nothing is left to do"
    await scene.reconciler.step()
    assert scene.bench.store.writes == writes


async def test_annotation_is_written_again_after_a_failure(scene: Scene) -> None:
    await reserve(scene)
    scene.show(plugin_pod(("GPU-a2",)))
    scene.bench.pods.is_away = True
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a2": "r1"}
    scene.bench.pods.is_away = False
    await scene.reconciler.step()
    assert annotated(scene) == "GPU-a2"


async def test_two_pods_exchange_their_placeholders(scene: Scene) -> None:
    await reserve(scene)
    await reserve(scene, 2, "GPU-a1")
    scene.show(plugin_pod(("GPU-a1",)))
    scene.show(plugin_pod(("GPU-a0",), name="pod-2", uid="uid-2"))
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a1": "r1", "GPU-a0": "uid-2"}
    assert [entry["delivery"] for entry in scene.bench.held().values()] == ["recorded", "recorded"]
    assert scene.bench.fleet.holders(DeviceUuid("GPU-a0")) == {0: "uid-2"}
    assert scene.bench.fleet.holders(DeviceUuid("GPU-a1")) == {0: "r1"}


async def test_gpu_of_a_pod_that_has_just_ended_is_recorded_once_it_is_released(scene: Scene) -> None:
    ended = await reserve(scene, 2, "GPU-a1", PLUGIN)
    await reserve(scene)
    scene.show(plugin_pod(("GPU-a1",), name="pod-2", uid="uid-2"))
    await scene.reconciler.step()
    scene.show(plugin_pod(("GPU-a1",)))
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a0": "r1", "GPU-a1": "uid-2"}
    held = scene.bench.ledger.of_pod(ended.uid)
    assert held is not None
    await scene.bench.ledger.release(held.id, ended, since=held.since)
    scene.reconciler.deleted(scene.bench.pods.raws.pop("uid-2"))
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a1": "r1"}


async def test_gpu_that_the_inventory_does_not_offer_is_told(scene: Scene) -> None:
    await reserve(scene)
    scene.show(plugin_pod(("GPU-unknown",)))
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-unknown": "r1"}
    assert scene.heard.messages == [
        "the kubelet of node-a gave it GPU-unknown: not all are healthy and in the inventory"
    ]


async def test_gpu_of_another_node_is_not_recorded(scene: Scene) -> None:
    """A compromised node could take the GPUs of other nodes out of use."""
    await reserve(scene)
    scene.show(plugin_pod(("GPU-b0",)))
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a0": "r1"}
    assert not scene.bench.fleet.holders(DeviceUuid("GPU-b0"))


async def test_rebuilt_object_holds_no_gpu_of_another_node(scene: Scene) -> None:
    scene.bench.store.apply({**gpu_node("node-c", "GPU-c0")})
    raw = plugin_pod(("GPU-b0",), node="node-c")
    raw["metadata"]["annotations"] |= {"gpuwarden.io/node": "node-c"}
    scene.show(raw)
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    assert {key: entry["reservation"] for key, entry in scene.bench.held("node-c").items()} == {"GPU-c0/0": "r1"}
    assert not scene.bench.fleet.holders(DeviceUuid("GPU-b0"))


async def test_pod_that_lost_its_annotations_keeps_its_gpus(scene: Scene) -> None:
    await reserve(scene)
    scene.show(plugin_pod(("GPU-a2",)))
    await scene.reconciler.step()
    raw = plugin_pod(("GPU-a2",))
    raw["metadata"]["annotations"] = {}
    scene.show(raw)
    scene.bench.now += timedelta(minutes=10)
    await scene.reconciler.step()
    assert slots(scene) == {"GPU-a2": "r1"}


async def test_object_is_rebuilt_with_as_many_gpus_as_its_pods_have(scene: Scene) -> None:
    scene.bench.store.apply({**gpu_node("node-c", "GPU-c0", "GPU-c1", "GPU-c2")})
    for number, record in ((1, PLUGIN), (2, ClaimRecord(gpus=1))):
        raw = plugin_pod(name=f"pod-{number}", uid=f"uid-{number}", node="node-c")
        gpu = {"gpuwarden.io/gpu-uuid": "GPU-c0"} if record is not PLUGIN else {}
        raw["metadata"]["annotations"] |= {"gpuwarden.io/node": "node-c", "gpuwarden.io/claim": record.text(), **gpu}
        scene.show(raw)
    scene.bench.replica.watch.catch_up()
    await scene.reconciler.step()
    found = {key: entry["reservation"] for key, entry in scene.bench.held("node-c").items()}
    assert found == {"GPU-c0/0": "uid-2", "GPU-c1/0": "r1"}
