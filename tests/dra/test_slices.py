"""The writer of proof devices: what it publishes, when it writes, and what it never removes."""

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from attrs import evolve
from kubernetes.aio.client.exceptions import ApiException

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence, reservation, slot
from tests.dra.test_claims import OURS, claim
from tests.fake_objects import FakeObjects
from webhook.assembly.dra import tell_loss
from webhook.core.device import CLAIMED, Device, DeviceUuid, Node
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.injection import Injection
from webhook.core.proof_devices import KEPT_AFTER_END, ProofDevice
from webhook.core.reservation import GpuDelivery
from webhook.dra.claims import AllocatedClaims
from webhook.dra.slices import AWAITED_EVERY, BATCH_SIZE, MAX_FAILURES, MAX_GENERATION, ProofSlices
from webhook.kube.resource_slices import proof_devices_of, slices_of, stamp
from webhook.kube.store import StoreUnavailableError

A, B = "node-a", "node-b"
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
END = NOW + HOUR


class Scene:
    """An elected writer. Watches catch up before each step."""

    def __init__(self) -> None:
        self.now = NOW
        self.is_current = self.are_claims_current = True
        self.writes: list[str] = []
        self.awaited: set[str] = set()
        self.fleet, self.objects, self.claims = Fleet(), FakeObjects(), AllocatedClaims()
        self.slices = self.another()

    def another(self) -> ProofSlices:
        found = ProofSlices(
            self.objects,
            self.fleet,
            self.claims,
            lambda: self.now,
            lambda: self.is_current,
            lambda: self.are_claims_current,
            "gpu.nvidia.com",
            self.writes.append,
            lambda _, sources: self.awaited.issuperset(sources),
        )
        self.objects.listener = found.view
        return found

    def node(self, name: str = A, *uuids: str, **members: Any) -> None:
        devices = tuple(Device(DeviceUuid(uuid), **members) for uuid in uuids or (f"GPU-{name}",))
        self.fleet.put(Node(name, devices=devices), self.now)

    def proves(self, name: str = A, until: datetime | None = END, digest: str = HASH) -> None:
        self.says(name, evidence(name, digest, since=NOW - HOUR, until=until))

    def says(self, name: str, word: Evidence | None) -> None:
        self.fleet.set_evidence(name, word, self.now)

    def proven(self, name: str = A, *uuids: str) -> None:
        self.node(name, *uuids)
        self.proves(name)

    def use(self, name: str = A, device: str = "gpu-node-a-aa11") -> None:
        self.claims.changed(claim("train", (OURS, name, device)))

    def unuse(self) -> None:
        self.claims.deleted(claim("train"))

    async def step(self, after: timedelta = timedelta()) -> list[str]:
        """What was done."""
        self.now += after
        self.objects.tell()
        self.objects.done.clear()
        await self.slices.step()
        return list(self.objects.done)

    def devices(self, name: str = A) -> dict[str, datetime | None]:
        """The ends of the written devices."""
        found = [raw for raw in self.objects.objects.values() if raw["spec"]["pool"]["name"] == name]
        return {device.name: device.end for raw in found for device in proof_devices_of(raw)}

    def are_closed(self) -> bool:
        return all(one.is_closed for one in proof_devices_of(self.raw))

    @property
    def raw(self) -> Raw:
        return self.objects.objects["gpuwarden-node-a-0"]


@pytest.fixture
def scene() -> Scene:
    return Scene()


# What is published.


@pytest.mark.parametrize("label", [None, "dra"])
async def test_gpu_of_a_claim_keeps_its_proof(scene: Scene, label: str | None) -> None:
    """The mark comes after the allocation and goes after its end, so it must not end the device in between."""
    labels = {} if label is None else {"gpuwarden.io/injection": label}
    free, marked = Device(DeviceUuid("GPU-node-a")), Device(DeviceUuid("GPU-node-a"), mismatch=CLAIMED)
    scene.fleet.put(Node(A, labels=labels, devices=(free,)), scene.now)
    scene.proves()
    await scene.step()
    scene.fleet.put(Node(A, labels=labels, devices=(marked,)), scene.now)
    assert await scene.step() == []
    scene.use()
    assert await scene.step() == []
    scene.unuse()
    assert await scene.step() == []
    assert scene.devices() == {"gpu-node-a-aa11": END}
    assert not scene.are_closed()
    scene.fleet.put(Node(A, labels=labels, devices=(evolve(marked, mismatch="its pod was given another GPU"),)), NOW)
    await scene.step()
    assert scene.are_closed()


@pytest.mark.parametrize(("label", "names"), [(None, {"gpu-1-aa11"}), ("dra", {"gpu-1-aa11", "mig-1-aa11"})])
async def test_mig_device_has_a_proof_where_claims_of_reservations_take_it(
    scene: Scene, label: str | None, names: set[str]
) -> None:
    """A native claim asks for whole GPUs: the allocator would try each combination of the proofs of MIG devices."""
    labels = {} if label is None else {"gpuwarden.io/injection": label}
    devices = tuple(Device(DeviceUuid(uuid)) for uuid in ("GPU-1", "MIG-1"))
    scene.fleet.put(Node(A, labels=labels, devices=devices), scene.now)
    scene.proves()
    await scene.step()
    assert scene.devices().keys() == names


async def test_each_gpu_of_a_proven_node_is_published_once(scene: Scene) -> None:
    scene.proven(A, "GPU-1", "GPU-2")
    scene.node(B)
    assert await scene.step() == ["create gpuwarden-node-a-0"]
    assert scene.devices() == {"gpu-1-aa11": END, "gpu-2-aa11": END}
    assert scene.devices(B) == {}
    assert await scene.step() == []
    assert scene.writes == ["written"]


@pytest.mark.parametrize(
    "word",
    [
        evidence(A, is_banned=True),
        evidence(A, is_conflict=True),
        evidence(A, since=NOW - HOUR, until=NOW),
        evidence(A, since=NOW + SECOND, until=END),
        None,
    ],
    ids=["banned", "conflict", "stale", "not yet", "absent"],
)
async def test_node_without_fresh_evidence_has_no_device(scene: Scene, word: Evidence | None) -> None:
    scene.node()
    scene.says(A, word)
    assert await scene.step() == []


async def test_unhealthy_disputed_and_held_gpus_have_no_device(scene: Scene) -> None:
    scene.proven(A, "GPU-1", "GPU-2", "GPU-4")
    scene.proven(B, "GPU-1", "GPU-b")
    scene.fleet.hold(reservation(slot("GPU-2"), node=A))
    sick = (*scene.fleet.indexed_nodes[A].node.devices, Device(DeviceUuid("GPU-5"), is_healthy=False))
    scene.fleet.put(Node(A, devices=sick), NOW)
    await scene.step()
    assert scene.devices().keys() == {"gpu-4-aa11"}
    assert scene.devices(B).keys() == {"gpu-b-aa11"}


async def test_gpus_that_are_set_aside_for_maps_have_devices_of_their_own_mode(scene: Scene) -> None:
    scene.proven(A, "GPU-1", "GPU-2", "GPU-3")
    await scene.step()
    assert set(modes(scene).values()) == {"native"}
    owner = SetId("set", "ml")
    mapped = {A: {"GPU-2": MapOwner("2026-01-01", owner)}}
    scene.fleet.set_aside(mapped, {A})
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    kept = f"mapped-{owner.digest}"
    assert modes(scene) == {"gpu-1-aa11": "native", "gpu-2-aa11": kept, "gpu-3-aa11": "native"}
    numbers = [one["attributes"] for one in scene.raw["spec"]["devices"]]
    assert [(one["index"]["int"], one["count"]["int"]) for one in numbers] == [(0, 2), (0, 1), (1, 2)]
    assert await scene.step() == []
    older = SetId("set", "another-namespace")
    scene.fleet.set_aside({A: {"GPU-2": MapOwner("2025-01-01", older)}}, {A})
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert modes(scene)["gpu-2-aa11"] == f"mapped-{older.digest}" != kept
    scene.fleet.set_aside({}, {A})
    await scene.step()
    assert set(modes(scene).values()) == {"native"}


async def test_pod_is_evicted_if_its_node_proves_another_hash_that_begins_with_the_same_digits(scene: Scene) -> None:
    begin = "sha256:0123456789ab"
    scene.node(A, "GPU-1")
    scene.says(A, evidence(A, f"{begin}cc", until=END))
    await scene.step()
    (name,) = scene.devices()
    scene.use(device=name)
    scene.says(A, evidence(A, f"{begin}dd", until=END + HOUR))
    await scene.step()
    end = scene.devices()[name]
    assert end is not None
    assert end <= scene.now
    scene.unuse()
    await scene.step(KEPT_AFTER_END + MINUTE)
    await scene.step()
    assert scene.devices() == {name: END + HOUR}


async def test_node_whose_kubelet_has_still_to_choose_gpus_has_no_device(scene: Scene) -> None:
    """Its label was changed: the kubelet may give the pod another GPU than the held one."""
    scene.proven(A, "GPU-1", "GPU-2")
    scene.proven(B, "GPU-b")
    awaited = reservation(slot("GPU-1"), node=A, delivery=GpuDelivery.AWAITED)
    scene.fleet.hold(awaited)
    await scene.step()
    assert [*scene.devices()] == []
    assert [*scene.devices(B)] == ["gpu-b-aa11"]
    scene.fleet.hold(evolve(awaited, delivery=GpuDelivery.RECORDED))
    await scene.step()
    assert scene.devices().keys() == {"gpu-2-aa11"}


async def test_partly_held_shared_gpu_has_no_device(scene: Scene) -> None:
    scene.node(A, "GPU-1", shares=4)
    scene.proves()
    scene.fleet.hold(reservation(slot("GPU-1"), node=A))
    assert await scene.step() == []


async def test_more_devices_than_fit_are_split_over_slices_of_one_generation(scene: Scene) -> None:
    uuids = [f"GPU-{k:02}" for k in range(65)]
    scene.proven(A, *uuids)
    assert await scene.step() == ["create gpuwarden-node-a-0", "create gpuwarden-node-a-1"]
    scene.node(A, *uuids[:64])
    assert await scene.step() == ["replace gpuwarden-node-a-1"]
    pools = [raw["spec"]["pool"] for raw in scene.objects.objects.values()]
    assert pools == [{"name": A, "generation": 1, "resourceSliceCount": 2}] * 2
    assert await scene.step(KEPT_AFTER_END) == ["delete gpuwarden-node-a-1", "replace gpuwarden-node-a-0"]
    assert scene.raw["spec"]["pool"] == {"name": A, "generation": 2, "resourceSliceCount": 1}


async def test_devices_of_a_removed_node_end_and_go(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.fleet.remove(A)
    await scene.step(SECOND)
    assert scene.devices() == {"gpu-node-a-aa11": NOW + SECOND}
    assert await scene.step(KEPT_AFTER_END) == ["delete gpuwarden-node-a-0"]
    assert await scene.step(HOUR) == []


# When the evidence changes.


async def test_lost_evidence_ends_the_device_in_the_same_pass(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.says(A, None)
    assert await scene.step(MINUTE) == ["replace gpuwarden-node-a-0"]
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE}
    assert scene.raw["spec"]["pool"]["generation"] == 1


async def test_nearer_end_is_written_at_once_and_later_one_at_half_of_the_time(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.proves(A, END - MINUTE)
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    scene.proves(A, END)
    assert await scene.step(SECOND) == []
    later = END + 30 * MINUTE
    scene.proves(A, later)
    assert await scene.step() == []
    half = END - MINUTE - (later - (END - MINUTE))  # as much is left as would be gained
    assert await scene.step(half - scene.now) == []
    assert await scene.step(2 * SECOND) == ["replace gpuwarden-node-a-0"]
    assert scene.devices() == {"gpu-node-a-aa11": later}
    assert await scene.step() == []


async def test_device_that_has_ended_by_itself_is_closed_and_then_removed(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    assert await scene.step(HOUR - SECOND) == []
    assert not scene.are_closed()
    assert await scene.step(SECOND) == ["replace gpuwarden-node-a-0"]
    assert scene.are_closed()
    assert scene.raw["spec"]["pool"]["generation"] == 1
    assert await scene.step(KEPT_AFTER_END - SECOND) == []
    assert await scene.step(SECOND) == ["delete gpuwarden-node-a-0"]


async def test_gpu_of_another_hash_becomes_another_device(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.proves(A, END, OTHER_HASH)
    await scene.step(MINUTE)
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE, "gpu-node-a-bb22": END}
    await scene.step(KEPT_AFTER_END)
    assert scene.devices() == {"gpu-node-a-bb22": END}


async def test_lost_evidence_comes_before_all_other_writes(scene: Scene) -> None:
    for number in range(3):
        scene.proven(f"lost-{number}")
    await scene.step()
    for number in range(BATCH_SIZE + 10):
        scene.proven(f"new-{number:03}")
    for number in range(3):
        scene.says(f"lost-{number}", None)
    done = await scene.step()
    assert {one.split()[0] for one in done[:3]} == {"replace"}
    assert len(done) == BATCH_SIZE
    assert len(await scene.step()) == 13
    assert await scene.step() == []


async def test_lost_evidence_does_not_wait_for_slow_writes_of_a_pass(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.proven(B)
    await scene.step()
    for number in range(BATCH_SIZE):
        scene.proven(f"node-{number}")
    create, loss = scene.objects.create, asyncio.Event()

    async def lose(raw: Raw) -> Raw:
        monkeypatch.setattr(scene.objects, "create", create)
        scene.says(B, None)
        tell_loss(scene.slices, loss, B)
        return await create(raw)

    monkeypatch.setattr(scene.objects, "create", lose)
    assert len(await scene.step()) == 1
    done = await scene.step()
    assert done[0] == "replace gpuwarden-node-b-0"
    assert len(done) == BATCH_SIZE


async def test_slice_that_was_deleted_behind_an_interrupted_watch_is_created_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(raw: Raw) -> Raw:
        raise StoreUnavailableError("the API server answered 404") from ApiException(status=404)

    scene.proven()
    await scene.step()
    scene.objects.objects.clear()
    scene.says(A, None)
    monkeypatch.setattr(scene.objects, "replace", missing)
    scene.proves(until=END - MINUTE)
    await scene.step()
    assert await scene.step() == ["create gpuwarden-node-a-0"]


async def test_outlasting_devices_are_told(scene: Scene) -> None:
    assert not scene.slices.is_outlasting(A)
    scene.proven()
    await scene.step()
    assert not scene.slices.is_outlasting(A)
    for word in (None, evidence(A, OTHER_HASH, until=END), evidence(A, HASH, until=END - SECOND)):
        scene.says(A, word)
        assert scene.slices.is_outlasting(A)
    scene.proves(A, END + HOUR)
    assert not scene.slices.is_outlasting(A)


async def test_loss_begins_a_pass_and_a_renewal_does_not(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    loss = asyncio.Event()
    scene.proves(A, END + HOUR)
    tell_loss(scene.slices, loss, A)
    assert not loss.is_set()
    scene.says(A, None)
    tell_loss(scene.slices, loss, A)
    assert loss.is_set()


# Devices for claims with a fresh challenge.


class Questions:
    """What nodes have to answer."""

    def __init__(self) -> None:
        self.after: datetime | None = None
        self.silent = False

    def asked_after(self, node: str) -> datetime | None:
        return self.after if node == A else None

    def is_silent(self, node: str) -> bool:
        return self.silent and node == A

    def take_changes(self) -> set[str]:
        return {A}


@pytest.fixture
def questions(scene: Scene) -> Questions:
    """The node has been challenged."""
    found = scene.slices._challenges = Questions()
    scene.node(A, "GPU-node-a", "GPU-node-b")
    scene.says(A, evidence(A, since=NOW - HOUR, until=END, challenged=NOW - HOUR))
    return found


async def test_challenged_node_has_a_second_device_for_each_gpu(scene: Scene, questions: Questions) -> None:
    await scene.step()
    found = {one["name"]: one for one in scene.raw["spec"]["devices"]}
    assert set(found) == {f"gpu-node-{one}{mark}-aa11" for one in "ab" for mark in ("", "-bind")}
    places = {
        name: (one["attributes"]["index"]["int"], one["attributes"]["count"]["int"]) for name, one in found.items()
    }
    assert places == {
        "gpu-node-a-aa11": (0, 2),
        "gpu-node-a-bind-aa11": (0, 2),
        "gpu-node-b-aa11": (1, 2),
        "gpu-node-b-bind-aa11": (1, 2),
    }
    for name, one in found.items():
        is_challenged = "-bind-" in name
        assert one["attributes"]["mode"]["string"] == ("challenged" if is_challenged else "native")
        assert one.get("bindingConditions") == (["gpuwarden.io/challenged"] if is_challenged else None)
        assert one.get("bindingFailureConditions") == (["gpuwarden.io/challenge-failed"] if is_challenged else None)
    assert await scene.step() == []


@pytest.mark.parametrize("case", ["never challenged", "injection dra", "not served"])
async def test_other_nodes_have_no_second_device(scene: Scene, questions: Questions, case: str) -> None:
    if case == "never challenged":
        scene.proves()
    elif case == "injection dra":
        labels = {"gpuwarden.io/injection": "dra"}
        scene.fleet.put(Node(A, labels=labels, devices=(Device(DeviceUuid("GPU-node-a")),)), NOW)
    else:
        scene.slices._challenges = None
    await scene.step()
    assert all("-bind-" not in name for name in scene.devices())


async def test_node_is_asked_by_an_annotation_that_later_writes_keep(scene: Scene, questions: Questions) -> None:
    await scene.step()
    questions.after = NOW
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    asked = {"gpuwarden.io/challenge-after": stamp(NOW)}
    assert scene.raw["metadata"]["annotations"] == asked
    assert await scene.step() == []
    questions.after = None
    assert await scene.step() == []
    scene.says(A, None)
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert scene.raw["metadata"]["annotations"] == asked


async def test_silent_node_is_closed_to_claims_with_a_fresh_challenge_only(scene: Scene, questions: Questions) -> None:
    await scene.step()
    questions.silent = True
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    closed = {one.name for one in proof_devices_of(scene.raw) if one.is_closed}
    assert closed == {"gpu-node-a-bind-aa11", "gpu-node-b-bind-aa11"}
    assert set(scene.devices().values()) == {END}
    questions.silent = False
    await scene.step()
    assert not any(one.is_closed for one in proof_devices_of(scene.raw))


async def test_second_device_in_use_stays_proven_when_challenges_are_no_longer_served(
    scene: Scene, questions: Questions
) -> None:
    await scene.step()
    scene.use(device="gpu-node-a-bind-aa11")
    scene.slices._challenges = None
    scene.proves()
    await scene.step()
    assert scene.devices()["gpu-node-a-bind-aa11"] == END
    assert scene.devices()["gpu-node-b-bind-aa11"] == NOW


# Devices in use.


async def test_device_in_use_is_never_removed(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.use()
    scene.says(A, None)
    await scene.step(MINUTE)
    assert await scene.step(10 * HOUR) == []
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE}
    scene.unuse()
    assert await scene.step() == ["delete gpuwarden-node-a-0"]


@pytest.mark.parametrize("change", ["vanished", "unhealthy", "disputed", "held"])
async def test_device_in_use_stays_proven_whatever_happens_to_its_gpu(scene: Scene, change: str) -> None:
    """A restarted driver or a faulty inventory of another node evicts no pod."""
    scene.proven()
    scene.node(B)
    await scene.step()
    scene.use()
    match change:
        case "vanished":
            scene.fleet.put(Node(A), NOW)
        case "unhealthy":
            scene.node(A, "GPU-node-a", is_healthy=False)
        case "disputed":
            scene.node(B, "GPU-node-a")
        case _:
            scene.fleet.hold(reservation(slot("GPU-node-a"), node=A))
    assert await scene.step(MINUTE) == []
    assert scene.devices() == {"gpu-node-a-aa11": END}
    scene.unuse()
    await scene.step()
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE}


async def test_new_source_of_evidence_ends_no_device_in_use_before_its_first_report(scene: Scene) -> None:
    scene.proven(A, "GPU-1", "GPU-2")
    await scene.step()
    scene.use(device="gpu-1-aa11")
    scene.awaited = {"spire-server"}
    more = evolve(evidence(A, HASH, since=NOW - HOUR, until=END + HOUR), missing_sources=frozenset(["spire-server"]))
    scene.says(A, more)
    await scene.step(SECOND)
    assert scene.devices() == {"gpu-1-aa11": END, "gpu-2-aa11": NOW + SECOND}, "the end that is written stays"
    assert not scene.slices.is_outlasting(A)
    await scene.step(MINUTE)
    scene.awaited.clear()
    await scene.step(AWAITED_EVERY)
    assert scene.devices() == {"gpu-1-aa11": scene.now}


@pytest.mark.parametrize(
    ("word", "end"),
    [
        (evidence(A, HASH, since=NOW - HOUR, until=END, is_banned=True), NOW),
        (evidence(A, OTHER_HASH, since=NOW - HOUR, until=END), NOW),
        (evidence(A, HASH, since=NOW - HOUR, until=NOW), NOW),
        (evidence(A, HASH, since=NOW - HOUR, until=END - MINUTE), END - MINUTE),
    ],
    ids=["banned", "another hash", "stale", "nearer end"],
)
async def test_other_losses_count_while_a_source_is_awaited(scene: Scene, word: Evidence, end: datetime) -> None:
    scene.proven()
    await scene.step()
    scene.use()
    scene.awaited = {"spire-server"}
    scene.says(A, evolve(word, missing_sources=frozenset(["spire-server"])))
    await scene.step()
    assert scene.devices() == {"gpu-node-a-aa11": end}


@pytest.mark.parametrize("change", ["unhealthy", "disputed", "held"])
async def test_device_in_use_stays_proven_if_somebody_deletes_its_slice_meanwhile(scene: Scene, change: str) -> None:
    scene.proven()
    await scene.step()
    scene.use()
    match change:
        case "unhealthy":
            scene.node(A, "GPU-node-a", is_healthy=False)
        case "disputed":
            scene.node(B, "GPU-node-a")
        case _:
            scene.fleet.hold(reservation(slot("GPU-node-a"), node=A))
    scene.objects.remove("gpuwarden-node-a-0")
    await scene.step(MINUTE)
    assert scene.devices() == {"gpu-node-a-aa11": END}


async def test_reservation_ends_a_device_while_claims_are_not_watched(scene: Scene) -> None:
    """The device counts as used, but the scheduler may give it to another claim."""
    scene.proven(A, "GPU-1", "GPU-2")
    await scene.step()
    scene.use(device="gpu-2-aa11")
    scene.are_claims_current = False
    scene.fleet.hold(reservation(slot("GPU-1"), slot("GPU-2"), node=A))
    await scene.step(MINUTE)
    assert scene.devices() == {"gpu-1-aa11": NOW + MINUTE, "gpu-2-aa11": END}


async def test_every_device_counts_as_used_while_claims_are_not_watched(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.are_claims_current = False
    scene.says(A, None)
    await scene.step(MINUTE)
    await scene.step(HOUR)
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE}
    scene.are_claims_current = True
    scene.slices.begin()
    assert await scene.step() == ["delete gpuwarden-node-a-0"]


async def test_removed_device_in_use_is_published_again_and_ended_if_the_evidence_is_lost(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.use()
    scene.objects.remove("gpuwarden-node-a-0")
    scene.says(A, None)
    assert await scene.step(MINUTE) == ["create gpuwarden-node-a-0"]
    assert scene.devices() == {"gpu-node-a-aa11": NOW + MINUTE}


# Other writers.


async def test_deleted_slice_is_created_again(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.objects.remove("gpuwarden-node-a-0")
    assert await scene.step() == ["create gpuwarden-node-a-0"]


async def test_changed_slice_is_repaired(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    for part in ("taints", "attributes"):
        raw = scene.raw
        del raw["spec"]["devices"][0][part]
        scene.objects.put(raw)
        assert await scene.step() == ["replace gpuwarden-node-a-0"]
        assert scene.devices()["gpu-node-a-aa11"] == END
    scene.objects.put({**scene.raw, "spec": {**scene.raw["spec"], "nodeSelector": None}})
    assert await scene.step() == ["replace gpuwarden-node-a-0"]


def forged(name: str, node: str = A, generation: int = 99) -> Raw:
    (raw,) = slices_of(node, [ProofDevice.of("GPU-forged", HASH, None)], generation, "gpu.nvidia.com")
    raw["metadata"]["name"] = name
    return raw


async def test_forged_slice_is_deleted_and_its_device_is_evicted_if_in_use(scene: Scene) -> None:
    scene.node()
    scene.objects.put(forged("evil"))
    scene.use(A, "gpu-forged-aa11")
    done = await scene.step()
    assert done[0] == "delete evil"
    assert scene.devices() == {"gpu-forged-aa11": NOW}
    scene.unuse()
    scene.now += KEPT_AFTER_END
    await scene.step()
    assert scene.objects.objects == {}


async def test_slice_of_an_unknown_node_is_deleted(scene: Scene) -> None:
    scene.objects.put(forged("evil", "no-node"))
    await scene.step()
    assert await scene.step(KEPT_AFTER_END) != []
    assert scene.objects.objects == {}


async def test_generation_that_leaves_no_room_starts_over(scene: Scene) -> None:
    scene.proven()
    scene.objects.put(forged("gpuwarden-node-a-0", generation=MAX_GENERATION))
    assert await scene.step() == ["delete gpuwarden-node-a-0", "create gpuwarden-node-a-0"]
    assert scene.raw["spec"]["pool"]["generation"] == 1


async def test_name_taken_by_a_slice_of_another_pool_is_freed(scene: Scene) -> None:
    scene.proven()
    scene.objects.put(forged("gpuwarden-node-a-0", node="node-x"))
    scene.use()
    for _ in range(4):
        await scene.step(KEPT_AFTER_END)
    assert scene.devices() == {"gpu-node-a-aa11": END}


async def test_unreadable_slice_is_replaced(scene: Scene) -> None:
    scene.proven()
    raw = forged("gpuwarden-node-a-0")
    raw["spec"]["devices"][0]["taints"] = [{"timeAdded": 7}]
    scene.objects.put(raw)
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert scene.devices() == {"gpu-node-a-aa11": END}


# Failures.


async def test_nothing_is_written_while_the_fleet_is_not_current(scene: Scene) -> None:
    scene.proven()
    scene.is_current = False
    assert await scene.step() == []
    scene.is_current = True
    assert await scene.step() == ["create gpuwarden-node-a-0"]


async def test_write_that_was_overtaken_is_repeated_on_the_current_object(scene: Scene) -> None:
    scene.proven()
    await scene.step()
    scene.says(A, None)
    scene.objects.overtaken = 1
    assert await scene.step() == []
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert scene.writes == ["written", "failed", "written"]


async def test_pass_stops_when_the_api_server_is_away_and_the_next_one_goes_on(scene: Scene) -> None:
    for number in range(40):
        scene.proven(f"node-{number:02}")
    scene.objects.is_away = True
    assert await scene.step() == []
    assert scene.writes.count("failed") < 40
    assert scene.writes.count("failed") >= MAX_FAILURES
    scene.objects.is_away = False
    assert len(await scene.step()) == 40


async def test_rejected_slice_is_tried_again_a_minute_later_and_stops_no_other(scene: Scene) -> None:
    scene.proven(A)
    scene.proven(B)
    scene.objects.refused.add("gpuwarden-node-a-0")
    assert await scene.step() == ["create gpuwarden-node-b-0"]
    scene.objects.refused.clear()
    assert await scene.step() == []
    assert await scene.step(MINUTE) == ["create gpuwarden-node-a-0"]


async def test_new_leader_writes_only_what_is_wrong(scene: Scene) -> None:
    scene.proven(A)
    scene.proven(B)
    await scene.step()
    scene.slices = scene.another()
    scene.slices.view.replaced(scene.objects.objects)
    scene.objects.remove("gpuwarden-node-b-0")
    scene.slices.begin()
    assert await scene.step() == ["create gpuwarden-node-b-0"]


async def test_devices_are_counted_by_state(scene: Scene) -> None:
    scene.proven(A)
    scene.proven(B)
    scene.proves(B, NOW + SECOND)
    await scene.step()
    await scene.step(SECOND)
    assert scene.slices.counts() == {"published": 1, "ended": 1}


async def test_pass_over_unchanged_nodes_costs_nearly_nothing(scene: Scene) -> None:
    """1,000 nodes of 8 GPUs whose evidence is renewed, so that each has its next write to wait for."""
    for number in range(1_000):
        scene.proven(f"node-{number}", *(f"GPU-{number}-{k}" for k in range(8)))
    for _ in range(1_000 // BATCH_SIZE + 1):
        await scene.step()
    for number in range(1_000):
        scene.proves(f"node-{number}", END + MINUTE)
    assert await scene.step() == []
    begun = time.process_time()
    for _ in range(10):
        assert await scene.step() == []
    assert (time.process_time() - begun) / 10 < 0.002


# The injection of the node.


def modes(scene: Scene) -> dict[str, str]:
    devices = scene.raw["spec"]["devices"]
    return {one["name"]: one["attributes"]["mode"]["string"] for one in devices}


async def test_gpus_whose_claims_come_from_reservations_have_devices_while_they_are_held(scene: Scene) -> None:
    labels = {"gpuwarden.io/injection": "dra"}
    devices = (Device(DeviceUuid("GPU-1")), Device(DeviceUuid("GPU-2")), Device(DeviceUuid("GPU-3"), is_healthy=False))
    scene.fleet.put(Node(A, labels, devices), scene.now)
    scene.proves()
    scene.fleet.hold(reservation(slot("GPU-1"), node=A))
    scene.fleet.set_aside({A: {"GPU-2": MapOwner("2026-01-01", SetId("set", "ml"))}}, {A})
    await scene.step()
    assert modes(scene) == {"gpu-1-aa11": "dra", "gpu-2-aa11": "dra"}


@pytest.mark.parametrize("value", [None, "nvidia", "native", "strange"])
async def test_devices_of_other_nodes_are_for_native_pods(scene: Scene, value: str | None) -> None:
    labels = {} if value is None else {"gpuwarden.io/injection": value}
    scene.fleet.put(Node(A, labels, (Device(DeviceUuid("GPU-1")), Device(DeviceUuid("GPU-2")))), scene.now)
    scene.proves()
    scene.fleet.hold(reservation(slot("GPU-1"), node=A))
    await scene.step()
    assert modes(scene) == {"gpu-2-aa11": "native"}


async def test_gpus_that_the_kubelet_chooses_have_no_devices(scene: Scene) -> None:
    scene.fleet.put(Node(A, {"gpuwarden.io/injection": "plugin"}, (Device(DeviceUuid("GPU-1")),)), scene.now)
    scene.proves()
    assert await scene.step() == []


@pytest.mark.parametrize(("value", "found"), [(None, {"gpu-1-aa11": "native"}), ("nvidia", {}), ("cuda", {})])
async def test_node_with_reservations_beside_nodes_of_kube_scheduler_has_no_devices(
    scene: Scene, value: str | None, found: dict[str, str]
) -> None:
    scene.fleet.injection = None
    labels = {} if value is None else {"gpuwarden.io/injection": value}
    scene.fleet.put(Node(A, labels, (Device(DeviceUuid("GPU-1")),)), scene.now)
    scene.proves()
    await scene.step()
    assert (modes(scene) if found else scene.objects.objects) == found


async def test_devices_change_with_the_injection_of_their_node(scene: Scene) -> None:
    scene.proven(A, "GPU-1")
    await scene.step()
    generation = scene.raw["spec"]["pool"]["generation"]
    scene.fleet.put(Node(A, {"gpuwarden.io/injection": "dra"}, (Device(DeviceUuid("GPU-1")),)), scene.now)
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert modes(scene) == {"gpu-1-aa11": "dra"}
    assert scene.raw["spec"]["pool"]["generation"] > generation
    assert await scene.step() == []


def relabelled(scene: Scene, label: str | None, stored: str) -> None:
    labels = {} if label is None else {"gpuwarden.io/injection": label}
    devices = (Device(DeviceUuid("GPU-1")), Device(DeviceUuid("GPU-2")))
    scene.fleet.put(Node(A, labels, devices, injection=stored), scene.now)


@pytest.mark.parametrize("default", [None, Injection.NVIDIA])
@pytest.mark.parametrize("end", [END, None])
async def test_node_that_is_to_take_reservations_gets_no_more_claims_of_others(
    scene: Scene, default: Injection | None, end: datetime | None
) -> None:
    """Free devices end at once. One in use goes on, and is closed: when its claim ends, no other claim gets it."""
    scene.fleet.injection = default
    relabelled(scene, "native", "native")
    scene.proves(until=end)
    await scene.step()
    scene.use(device="gpu-1-aa11")
    assert await scene.step() == []
    relabelled(scene, "nvidia", "native")
    assert await scene.step() == ["replace gpuwarden-node-a-0"]
    assert scene.are_closed()
    assert scene.devices()["gpu-1-aa11"] == end
    assert (scene.devices()["gpu-2-aa11"] or END) <= scene.now
    assert await scene.step() == []
    scene.unuse()
    await scene.step()
    assert scene.are_closed()
    relabelled(scene, "native", "native")
    await scene.step()
    assert not scene.are_closed()


async def test_node_gets_no_claims_of_others_before_reservations_have_ended(scene: Scene) -> None:
    scene.fleet.injection = None
    relabelled(scene, "native", "nvidia")
    scene.proves()
    assert await scene.step() == []
    scene.fleet.hold(reservation(slot("GPU-1"), node=A))
    relabelled(scene, "native", "native")
    await scene.step()
    assert modes(scene) == {"gpu-2-aa11": "native"}
