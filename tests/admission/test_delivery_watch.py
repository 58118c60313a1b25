"""What is done about GPUs that kubelets gave to pods without a reservation of them."""

import random
from datetime import timedelta

import pytest
from attrs import evolve

from tests.admission.given_pods import ended_pod, given_container, given_pod
from tests.builders import NOW, Raw, device, node, reservation, slot
from tests.recorded_events import RecordedEvents
from webhook.admission.delivered import wrong_deliveries
from webhook.admission.delivery_watch import SETTLED, DeliveryWatch, OnMismatch
from webhook.admission.evidence_loss import EvictionError
from webhook.core.device import DeviceUuid
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.reservation import Orphan, Phase, PodIdentity, Reservation
from webhook.ledger.end_of_use import OrphanTimes
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.runtime.telemetry import Metrics

MISMATCHED, COLLISION, UNRESERVED = Reason.GPU_MISMATCHED, Reason.GPU_COLLISION, Reason.GPU_UNRESERVED
IN_USE, REPLACED = "in use by a pod that has not reserved it", "its pod was given another GPU"
MARGIN, MAX_GRACE = timedelta(seconds=90), timedelta(hours=1)
TRAIN = reservation(slot("GPU-a"), phase=Phase.FINALIZED, uid="uid-train", pod_name="train")


class Scene:
    """A node with three GPUs, a ledger, and the watch of pods."""

    def __init__(self, on_mismatch: OnMismatch = OnMismatch.REPORT) -> None:
        self.now = NOW
        self.is_current = True
        self.is_refused = False
        self.evicted: list[str] = []
        self.heard = RecordedEvents()
        self.fleet = Fleet()
        self.fleet.put(node("node-a", *map(device, ("GPU-a", "GPU-b", "GPU-c"))), NOW)
        self.fleet.put(node("node-b", device("GPU-x")), NOW)
        self.ledger = MemoryLedger(self.fleet, lambda: self.now, Times(timedelta(minutes=1), timedelta(seconds=5)))
        self.metrics = Metrics()
        self.watch = self.another(on_mismatch)
        self.metrics.watch_deliveries(self.watch.counts)
        self.watch.replaced({})

    def another(self, on_mismatch: OnMismatch = OnMismatch.REPORT) -> DeliveryWatch:
        return DeliveryWatch(
            self.fleet,
            self.ledger,
            self.heard,
            lambda: self.now,
            self,
            on_mismatch,
            OrphanTimes(MAX_GRACE, MARGIN),
            is_current=lambda: self.is_current,
        )

    async def evict(self, pod: PodIdentity) -> None:
        self.evicted.append(pod.name)
        if self.is_refused:
            raise EvictionError("a disruption budget")

    def hold(self, *held: Reservation) -> None:
        self.ledger._index.replace("node-a", {one.id: one for one in held})

    async def step(self, seconds: float = 0) -> dict[str, str]:
        """One pass after this time. Returns the marks of node-a."""
        self.now += timedelta(seconds=seconds)
        await self.watch.step()
        return self.marks

    @property
    def marks(self) -> dict[str, str]:
        found = self.watch.marks_on("node-a") or {}
        return {str(uuid): text for uuid, text in found.items()}

    async def settle(self) -> list[tuple[str, Reason]]:
        """The Events of two passes, so that what is found has lasted."""
        already = len(self.heard.recorded)
        await self.step()
        await self.step(SETTLED.total_seconds())
        return self.heard.recorded[already:]

    def count(self, fault: str) -> float | None:
        return self.metrics.registry.get_sample_value("gpuwarden_pods_with_wrong_gpus", {"fault": fault})

    def counts(self) -> tuple[float | None, ...]:
        return tuple(map(self.count, ("mismatched", "collision", "unreserved")))


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_gpu_of_a_pod_without_a_reservation_is_marked_at_once_until_the_pod_has_ended(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    assert await scene.step() == {"GPU-b": IN_USE}
    assert list(scene.watch.take_changes()) == ["node-a", "node-b"], "an earlier leader may have marked others"
    assert scene.counts() == (0, 0, 1)
    scene.watch.changed(ended_pod("GPU-b"))
    assert await scene.step() == {}
    assert list(scene.watch.take_changes()) == ["node-a"]
    assert scene.counts() == (0, 0, 0)


async def test_gpus_by_the_report_of_a_node_count_like_those_of_the_status_until_the_pod_has_ended() -> None:
    scene = Scene(OnMismatch.EVICT)
    scene.hold(evolve(TRAIN, given=(DeviceUuid("GPU-b"),)))
    assert await scene.settle() == [("train", MISMATCHED)]
    assert scene.marks == {"GPU-a": REPLACED, "GPU-b": IN_USE}
    assert (scene.counts(), scene.evicted) == ((1, 0, 0), ["train"])
    scene.hold()
    assert await scene.step() == {}
    assert scene.counts() == (0, 0, 0)


async def test_report_of_a_node_and_the_status_are_one_difference(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-a", name="train", namespace="ml"))
    scene.hold(TRAIN)
    assert await scene.settle() == []
    scene.hold(evolve(TRAIN, given=(DeviceUuid("GPU-a"), DeviceUuid("GPU-c"))))
    assert await scene.settle() == [("train", MISMATCHED)]
    assert scene.marks == {"GPU-c": IN_USE}


async def test_pod_without_gpus_changes_nothing(scene: Scene) -> None:
    scene.watch.changed(given_pod())
    assert await scene.settle() == []
    assert (scene.marks, scene.counts()) == ({}, (0, 0, 0))


async def test_marks_are_unknown_until_pods_are_listed_and_watches_are_current(scene: Scene) -> None:
    fresh = scene.another()
    await fresh.step()
    assert fresh.marks_on("node-a") is None
    fresh.replaced({"other/plain": given_pod("GPU-b")})
    scene.is_current = False
    await fresh.step()
    assert fresh.marks_on("node-a") is None
    scene.is_current = True
    await fresh.step()
    assert fresh.marks_on("node-a") == {"GPU-b": IN_USE}
    fresh.begin()
    assert fresh.marks_on("node-a") is None


async def test_marks_stay_while_the_watches_are_interrupted(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    await scene.step()
    scene.is_current = False
    scene.watch.changed(ended_pod("GPU-b"))
    assert await scene.step() == {"GPU-b": IN_USE}


async def test_mark_follows_the_ledger(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-a", name="train", namespace="ml"))
    assert await scene.step() == {"GPU-a": IN_USE}
    scene.hold(TRAIN)
    assert await scene.step() == {}
    scene.hold()
    assert await scene.step() == {"GPU-a": IN_USE}


async def test_free_gpu_of_a_pod_without_a_reservation_is_reported_once(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    assert await scene.settle() == [("plain", UNRESERVED)]
    assert scene.heard.messages == [
        "the kubelet of node-a gave it GPU-b without a reservation; no other pod gets them meanwhile"
    ]
    assert await scene.settle() == []
    scene.watch.changed(given_pod("GPU-b", "GPU-c"))
    assert await scene.settle() == [("plain", UNRESERVED)], "other GPUs"


async def test_difference_is_reported_only_if_it_lasts(scene: Scene) -> None:
    await scene.settle()
    scene.hold(TRAIN)
    scene.watch.changed(given_pod("GPU-b", name="train", namespace="ml"))
    await scene.step()
    await scene.step(SETTLED.total_seconds() - 0.1)
    assert scene.heard.recorded == []
    scene.watch.changed(given_pod("GPU-a", name="train", namespace="ml"))
    await scene.step(0.1)
    assert scene.heard.recorded == []


async def test_difference_from_before_an_interruption_must_last_again(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    await scene.step()
    scene.is_current = False
    await scene.step(SETTLED.total_seconds())
    scene.is_current = True
    await scene.step(SETTLED.total_seconds())
    assert scene.heard.recorded == []
    await scene.step(SETTLED.total_seconds())
    assert scene.heard.recorded == [("plain", UNRESERVED)]


async def test_pod_with_another_gpu_than_reserved_is_reported_and_both_gpus_are_marked(scene: Scene) -> None:
    scene.hold(TRAIN)
    scene.watch.changed(given_pod("GPU-b", name="train", namespace="ml"))
    assert await scene.settle() == [("train", MISMATCHED)]
    assert scene.heard.messages == ["the kubelet of node-a gave it GPU-b; reserved for it: GPU-a"]
    assert (scene.marks, scene.counts()) == ({"GPU-a": REPLACED, "GPU-b": IN_USE}, (1, 0, 0))
    assert scene.evicted == []


async def test_collision_is_reported_on_both_pods_and_the_node(scene: Scene) -> None:
    scene.hold(TRAIN)
    scene.watch.changed(given_pod("GPU-a"))
    assert await scene.settle() == [("plain", COLLISION), ("train", COLLISION), ("node-a", COLLISION)]
    mine, theirs, admins = scene.heard.messages
    assert mine == "the kubelet of node-a gave it GPU-a, which is reserved for another pod"
    assert theirs == "the kubelet of node-a gave GPU-a, which is reserved for this pod, to another one"
    assert admins == "GPU-a is reserved for pod ml/train, and the kubelet gave it to pod other/plain"
    assert (scene.marks, scene.counts()) == ({"GPU-a": IN_USE}, (0, 1, 0))


async def test_collision_with_an_orphan_is_reported_without_the_pod_that_is_gone(scene: Scene) -> None:
    scene.hold(TRAIN.orphaned(Orphan(NOW, timedelta(seconds=30))))
    scene.watch.changed(given_pod("GPU-a"))
    assert await scene.settle() == [("plain", COLLISION), ("node-a", COLLISION)]


# Pods that are gone.


def at(moment: float) -> float:
    """Seconds, a tenth before or after the moment."""
    return moment + 30 + MARGIN.total_seconds()


async def test_gpu_of_a_pod_deleted_by_force_stays_marked_for_its_grace_period(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b", grace=30))
    scene.watch.deleted(given_pod("GPU-b", grace=30))
    assert await scene.step(at(-0.1)) == {"GPU-b": IN_USE}
    assert scene.counts() == (0, 0, 0), "only running pods count"
    assert await scene.step(0.1) == {}


async def test_gpu_of_a_pod_that_has_ended_before_its_deletion_is_free(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    scene.watch.deleted(ended_pod("GPU-b"))
    assert await scene.step() == {}


async def test_longer_grace_period_of_an_earlier_deletion_counts(scene: Scene) -> None:
    raw = given_pod("GPU-b", grace=30)
    raw["metadata"] |= {"deletionTimestamp": "2026-03-02T12:10:00Z", "deletionGracePeriodSeconds": 600}
    scene.watch.changed(raw)
    scene.watch.deleted(given_pod("GPU-b", grace=30))
    assert await scene.step(at(500)) == {"GPU-b": IN_USE}
    assert await scene.step(at(600)) == {}


async def test_longest_grace_period_that_was_seen_counts(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b", grace=600))
    scene.watch.changed(given_pod("GPU-b", grace=30))
    scene.watch.replaced({})
    assert await scene.step(at(500)) == {"GPU-b": IN_USE}
    assert await scene.step(at(600)) == {}


async def test_pod_that_a_new_list_does_not_have_keeps_its_gpu_for_its_grace_period(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b", grace=30))
    scene.watch.replaced({})
    assert await scene.step(at(-0.1)) == {"GPU-b": IN_USE}
    assert await scene.step(0.1) == {}


async def test_recreated_pod_is_reported_again(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    assert await scene.settle() == [("plain", UNRESERVED)]
    scene.watch.deleted(ended_pod("GPU-b"))
    await scene.step()
    scene.watch.changed(given_pod("GPU-b"))
    assert await scene.settle() == [("plain", UNRESERVED)]


# Evictions.


@pytest.fixture
def evicting() -> Scene:
    scene = Scene(OnMismatch.EVICT)
    scene.hold(TRAIN)
    return scene


def train(*ids: str) -> Raw:
    return given_pod(*ids, name="train", namespace="ml")


async def test_mismatched_pod_is_evicted_and_tried_again_later(evicting: Scene) -> None:
    evicting.is_refused = True
    evicting.watch.changed(train("GPU-b"))
    await evicting.settle()
    await evicting.step(1.9)
    assert evicting.evicted == ["train"]
    await evicting.step(0.1)
    assert evicting.evicted == ["train", "train"]


async def test_only_mismatched_pods_are_evicted(evicting: Scene) -> None:
    evicting.watch.changed(train("GPU-a"))
    evicting.watch.changed(given_pod("GPU-a"))
    evicting.watch.changed(given_pod("GPU-c", name="free"))
    await evicting.settle()
    assert evicting.evicted == []


async def test_pod_that_is_being_deleted_is_not_evicted(evicting: Scene) -> None:
    raw = train("GPU-b")
    raw["metadata"]["deletionTimestamp"] = "2026-03-02T12:00:00Z"
    evicting.watch.changed(raw)
    await evicting.settle()
    assert evicting.evicted == []


async def test_nothing_is_reported_or_evicted_until_the_watches_have_been_current_for_a_while(evicting: Scene) -> None:
    evicting.watch.changed(train("GPU-b"))
    evicting.is_current = False
    await evicting.settle()
    evicting.is_current = True
    await evicting.step(SETTLED.total_seconds())
    assert (evicting.evicted, evicting.heard.recorded) == ([], [])
    await evicting.step(SETTLED.total_seconds())
    assert (evicting.evicted, evicting.heard.recorded) == (["train"], [("train", MISMATCHED)])


async def test_devices_outside_of_the_inventory_are_left_alone(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-x", "GPU-unknown"))
    assert await scene.settle() == []
    assert scene.marks == {}
    assert DeviceUuid("GPU-x") in scene.fleet.indexed_nodes["node-b"].node.devices[0].names


async def test_malformed_status_does_not_break_a_pass(scene: Scene) -> None:
    scene.watch.changed(given_pod("GPU-b"))
    scene.watch.changed(given_pod(name="odd", containerStatuses=[7]))
    scene.watch.changed(given_pod(name="odder", containerStatuses=[given_container(allocatedResourcesStatus=[[]])]))
    assert await scene.step() == {"GPU-b": IN_USE}


@pytest.mark.parametrize("seed", range(20))
async def test_comparing_what_has_changed_finds_what_comparing_everything_finds(seed: int) -> None:
    chance, scene = random.Random(seed), Scene()  # noqa: S311 - a test
    gpus, names, pods = ("GPU-a", "GPU-b", "GPU-c", "GPU-x"), ("node-a", "node-b"), ("train", "infer", "plain")
    for _ in range(60):
        gpu, name, pod = chance.choice(gpus), chance.choice(names), chance.choice(pods)
        match chance.randrange(6):
            case 0:
                held = reservation(slot(gpu), node=name, phase=Phase.FINALIZED, uid=f"uid-{pod}", pod_name=pod)
                scene.ledger._index.replace(name, chance.choice([{}, {held.id: held}]))
            case 1:
                scene.fleet.put(node(name, *map(device, chance.sample(gpus, chance.randint(0, 3)))), NOW)
            case 2:
                scene.fleet.remove(name)
            case 3:
                scene.watch.deleted(given_pod(gpu, name=pod, node=name))
            case _:
                scene.watch.changed(given_pod(gpu, name=pod, node=name))
        if chance.random() < 0.7:
            await scene.step()
            given = list(scene.watch._given.values())
            found = [
                list(
                    wrong_deliveries(one, scene.ledger.of_pod(one.pod.uid), scene.ledger.of_device, scene.watch._lists)
                )
                for one in sorted(given, key=lambda one: one.pod.uid)
            ]
            assert scene.watch._found() == [one for wrong in found for one in wrong]
