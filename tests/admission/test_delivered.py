"""The GPUs that kubelets have given to pods, compared with the ledger."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

from tests.admission.given_pods import ended_pod, given_container, given_pod
from tests.builders import Raw, reservation, slot
from webhook.admission.delivered import DeliveryFault, GivenDevices, WrongDelivery, marks_of, wrong_deliveries
from webhook.core.device import DeviceUuid
from webhook.core.reservation import GpuDelivery, Phase, PodIdentity, Reservation

MISMATCHED, COLLISION, UNRESERVED = DeliveryFault.MISMATCHED, DeliveryFault.COLLISION, DeliveryFault.UNRESERVED


def uuids_of(raw: Raw) -> tuple[str, ...]:
    found = GivenDevices.of(raw)
    return () if found is None else found.uuids


def test_devices_of_all_containers_are_read() -> None:
    statuses = [given_container("GPU-a"), given_container(), given_container("GPU-b", "GPU-a")]
    raw = given_pod(containerStatuses=statuses, initContainerStatuses=[given_container("GPU-c")])
    assert GivenDevices.of(raw) == GivenDevices(
        PodIdentity("other", "plain", "uid-plain"), "node-a", tuple(map(DeviceUuid, ("GPU-c", "GPU-a", "GPU-b")))
    )


def test_resource_of_any_name_is_read_and_a_replica_is_its_gpu() -> None:
    statuses = [
        given_container("GPU-a::3", resource="nvidia.com/gpu.shared"),
        given_container("MIG-b", resource="nvidia.com/mig-1g.5gb"),
    ]
    assert uuids_of(given_pod(containerStatuses=statuses)) == ("GPU-a", "MIG-b")


@pytest.mark.parametrize(
    "given",
    ["k8s.gpu.nvidia.com/claim=1b-gpu-2", "0000:3b:00.0", "", "all", "GPU-"],
    ids=["resource-claim", "address", "empty", "all", "prefix"],
)
def test_name_that_is_no_gpu_is_ignored(given: str) -> None:
    assert uuids_of(given_pod(given)) == ()


NONE_GIVEN: dict[str, Raw] = {
    "no-status": {"metadata": {"uid": "u"}},
    "no-containers": given_pod(containerStatuses=None),
    "no-devices": given_pod(),
    "no-node": {**given_pod("GPU-a"), "spec": {}},
    "no-uid": {**given_pod("GPU-a"), "metadata": {"name": "x"}},
    "failed": ended_pod("GPU-a"),
    "succeeded": ended_pod("GPU-a", phase="Succeeded"),
}


@pytest.mark.parametrize("raw", NONE_GIVEN.values(), ids=NONE_GIVEN.keys())
def test_pod_without_devices_in_use_has_none(raw: Raw) -> None:
    assert GivenDevices.of(raw) is None


ODD: dict[str, Any] = {
    "status": "up",
    "containers": {"containerStatuses": {"main": 1}},
    "container": {"containerStatuses": [7]},
    "resources": {"containerStatuses": [{"allocatedResourcesStatus": "GPU-a"}]},
    "resource": {"containerStatuses": [{"allocatedResourcesStatus": [[]]}]},
    "device": {"containerStatuses": [{"allocatedResourcesStatus": [{"resources": ["GPU-a"]}]}]},
    "id": {"containerStatuses": [{"allocatedResourcesStatus": [{"resources": [{"resourceID": 7}]}]}]},
    "null-id": {"containerStatuses": [{"allocatedResourcesStatus": [{"resources": [{"resourceID": None}]}]}]},
}


@pytest.mark.parametrize("status", ODD.values(), ids=ODD.keys())
def test_malformed_status_gives_no_devices(status: Any) -> None:
    assert GivenDevices.of({**given_pod(), "status": status}) is None


def test_pod_that_the_garbage_collector_failed_may_still_use_its_devices() -> None:
    ended = ended_pod("GPU-a")
    conditions = [{"type": "DisruptionTarget", "reason": "DeletionByPodGC"}]
    assert uuids_of({**ended, "status": {**ended["status"], "conditions": conditions}}) == ("GPU-a",)


# The comparison.


def wrongs(
    raw: Raw,
    *held: Reservation,
    is_listed: Callable[[str, DeviceUuid], bool] = lambda node, uuid: True,
) -> list[WrongDelivery]:
    given = GivenDevices.of(raw)
    assert given is not None

    def holders(uuid: DeviceUuid) -> Sequence[Reservation]:
        return [one for one in held if uuid in one.uuids]

    own = next((one for one in held if one.uid == given.pod.uid), None)
    return list(wrong_deliveries(given, own, holders, is_listed))


def kinds(found: Sequence[WrongDelivery]) -> list[tuple[DeliveryFault, tuple[str, ...]]]:
    return [(one.fault, one.uuids) for one in found]


OWN = reservation(slot("GPU-a"), slot("GPU-b"), phase=Phase.FINALIZED, uid="uid-plain")
OTHERS = reservation(slot("GPU-c"), id="r2", phase=Phase.FINALIZED, uid="uid-train", pod_name="train")


@pytest.mark.parametrize("given", [("GPU-a", "GPU-b"), ("GPU-b",)], ids=["all", "one"])
def test_pod_with_the_gpus_of_its_reservation_is_right(given: tuple[str, ...]) -> None:
    assert wrongs(given_pod(*given), OWN, OTHERS) == []


def test_pod_with_another_gpu_than_reserved_is_mismatched() -> None:
    (found,) = wrongs(given_pod("GPU-a", "GPU-d"), OWN, OTHERS)
    assert kinds([found]) == [(MISMATCHED, ("GPU-d",))]
    assert found.reserved == ("GPU-a", "GPU-b")
    assert marks_of(found) == {
        "GPU-b": "its pod was given another GPU",
        "GPU-d": "in use by a pod that has not reserved it",
    }


AWAITED = evolve(OWN, delivery=GpuDelivery.AWAITED)


def test_pod_whose_gpus_the_kubelet_chooses_may_be_given_any_that_no_other_pod_has() -> None:
    awaiting = evolve(OTHERS, delivery=GpuDelivery.AWAITED)
    assert wrongs(given_pod("GPU-d", "GPU-c"), AWAITED, awaiting) == []
    assert kinds(wrongs(given_pod("GPU-c"), awaiting)) == [(UNRESERVED, ("GPU-c",))]


@pytest.mark.parametrize("delivery", [None, GpuDelivery.RECORDED], ids=str)
def test_gpu_that_another_pod_has_is_wrong_whoever_chose(delivery: GpuDelivery | None) -> None:
    theirs = evolve(OTHERS, delivery=delivery)
    found = wrongs(given_pod("GPU-d", "GPU-c"), AWAITED, theirs)
    assert kinds(found) == [(MISMATCHED, ("GPU-c",)), (COLLISION, ("GPU-c",))]
    assert found[0].expected == "as many GPUs as it asks for, which no other pod has"
    assert marks_of(found[0]) == {"GPU-c": "in use by a pod that has not reserved it"}


@pytest.mark.parametrize("given", [("GPU-d",), ("GPU-a", "GPU-b", "GPU-d")], ids=["too-few", "too-many"])
def test_another_number_of_gpus_than_reserved_is_wrong(given: tuple[str, ...]) -> None:
    assert kinds(wrongs(given_pod(*given), AWAITED)) == [(MISMATCHED, given)]


def test_recorded_gpus_are_compared_like_any_others() -> None:
    assert kinds(wrongs(given_pod("GPU-d"), evolve(OWN, delivery=GpuDelivery.RECORDED))) == [(MISMATCHED, ("GPU-d",))]


def test_pod_without_a_reservation_collides_with_the_holder_of_its_gpu() -> None:
    found, free = wrongs(given_pod("GPU-c", "GPU-d"), OTHERS)
    assert (kinds([found, free]), found.holders) == ([(COLLISION, ("GPU-c",)), (UNRESERVED, ("GPU-d",))], (OTHERS,))


def test_mismatched_pod_may_also_collide() -> None:
    assert kinds(wrongs(given_pod("GPU-c"), OWN, OTHERS)) == [(MISMATCHED, ("GPU-c",)), (COLLISION, ("GPU-c",))]


def test_all_gpus_without_a_reservation_are_marked() -> None:
    marks = [marks_of(one) for one in wrongs(given_pod("GPU-c", "GPU-d"), OTHERS)]
    assert {uuid for one in marks for uuid in one} == {"GPU-c", "GPU-d"}


def test_forged_annotations_do_not_replace_a_reservation() -> None:
    raw = given_pod("GPU-c")
    raw["metadata"]["annotations"] = {"gpuwarden.io/reservation-id": "r2", "gpuwarden.io/gpu-uuid": "GPU-c"}
    assert kinds(wrongs(raw, OTHERS)) == [(COLLISION, ("GPU-c",))]


def test_gpu_that_nobody_has_reserved_is_unreserved() -> None:
    assert kinds(wrongs(given_pod("GPU-d"), OTHERS)) == [(UNRESERVED, ("GPU-d",))]


@pytest.mark.parametrize(
    "held",
    [evolve(OTHERS, node="node-b"), evolve(OTHERS, phase=Phase.RELEASING)],
    ids=["of-another-node", "being-released"],
)
def test_reservation_that_does_not_hold_the_gpu_is_no_collision(held: Reservation) -> None:
    assert kinds(wrongs(given_pod("GPU-c"), held)) == [(UNRESERVED, ("GPU-c",))]


def test_gpu_outside_of_the_inventory_is_not_compared() -> None:
    assert wrongs(given_pod("GPU-c"), OTHERS, is_listed=lambda node, uuid: (node, uuid) != ("node-a", "GPU-c")) == []


def test_pod_that_shares_its_gpu_is_right() -> None:
    both = [evolve(OTHERS, is_shared=True), reservation(slot("GPU-c", 1), uid="uid-plain", is_shared=True)]
    assert wrongs(given_pod("GPU-c"), *both) == []
