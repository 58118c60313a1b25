"""`POST /finalize` at a replica that need not be the one that reserved: what it does not know, it looks up."""

import copy

import pytest

from tests import builders
from tests.builders import POD_UID, REVIEW_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.house import INVENTORY, House
from tests.web.replica import Shared, sharing
from webhook.core.reservation import ReservationId

TOLD = {
    "namespace": "ml",
    "name": "train-0",
    "uid": POD_UID,
    "reservation-id": REVIEW_UID,
    "gpu-uuid": "GPU-a0,GPU-a1",
}


async def finalize(house: House, told: Raw) -> tuple[int, Raw]:
    reply = await house.plain.post("/finalize", json=told)
    return reply.status_code, reply.json()


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def first(build: Build, shared: Shared) -> House:
    """The replica that reserves."""
    return await build(assemble=sharing(shared))


@pytest.fixture
async def second(build: Build, shared: Shared) -> House:
    """One that has seen nothing of it."""
    return await build(assemble=sharing(shared))


async def reserve(house: House, shared: Shared, gpus: int = 2, uid: str = REVIEW_UID) -> None:
    shared.has(builders.created(await house.dress(raw_pod(raw_container(gpus=gpus)), uid)))


@pytest.mark.parametrize("uuids", ["GPU-a0,GPU-a1", "GPU-a1,GPU-a0", "GPU-a1"])
async def test_what_another_replica_reserved_is_believed_and_again(
    first: House, second: House, shared: Shared, uuids: str
) -> None:
    await reserve(first, shared)
    for house in (second, second, first):
        assert await finalize(house, {**TOLD, "gpu-uuid": uuids}) == (200, {"status": "ok"})
    assert {(entry["phase"], entry["uid"]) for entry in shared.held.values()} == {("finalized", POD_UID)}


async def test_a_holder_that_is_only_remembered_is_asked_for_again(first: House, second: House, shared: Shared) -> None:
    """The GPUs have been freed and reserved once more since this replica last looked."""
    await reserve(first, shared)
    assert (await finalize(second, TOLD))[0] == 200
    assert await first.parts.ledger.release(ReservationId(REVIEW_UID), builders.identity())
    await reserve(first, shared, uid="another")
    assert (await finalize(second, {**TOLD, "reservation-id": "another"})) == (200, {"status": "ok"})
    assert {entry["reservation"] for entry in shared.held.values()} == {"another"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"gpu-uuid": "GPU-b0"}, 404, id="a GPU that nobody holds"),
        pytest.param({"gpu-uuid": "GPU-none"}, 404, id="a GPU that is not there"),
        pytest.param({"gpu-uuid": "GPU-a0,GPU-b0"}, 404, id="one held, one not"),
        pytest.param({"reservation-id": "another"}, 409, id="another reservation"),
        pytest.param({"reservation-id": "another", "gpu-uuid": "GPU-a1"}, 409, id="another reservation of one"),
        pytest.param({"namespace": "other"}, 409, id="another namespace"),
        pytest.param({"name": "another"}, 409, id="another name"),
        pytest.param({"uid": "uid-of-another"}, 422, id="another uid than the living pod's"),
    ],
)
async def test_what_does_not_fit_changes_nothing(
    first: House, second: House, shared: Shared, change: Raw, code: int
) -> None:
    await reserve(first, shared)
    assert (await finalize(second, {**TOLD, **change}))[0] == code
    assert {entry["phase"] for entry in shared.held.values()} == {"pending"}


CARRIED = {
    "no reservation": (None, "carries no valid reservation"),
    "another reservation": ({"reservation-id": "r1"}, f"carries reservation r1, not {REVIEW_UID}"),
    "other GPUs": ({"gpu-uuid": "GPU-a0,GPU-b0"}, f"carries GPUs that reservation {REVIEW_UID} does not hold"),
}


@pytest.mark.parametrize(("carried", "said"), CARRIED.values(), ids=CARRIED)
async def test_the_living_pod_has_to_carry_what_is_told(
    first: House, second: House, shared: Shared, carried: Raw | None, said: str
) -> None:
    """Its uid is the one that is told; the reservation is another pod's that is still to come."""
    dressed = await first.dress(raw_pod(raw_container(gpus=2), name=None, generate_name="train-"))
    changes = {f"gpuwarden.io/{key}": value for key, value in (carried or {}).items()}
    annotations = None if carried is None else dressed["metadata"]["annotations"] | changes
    shared.has(builders.created(raw_pod(name="train-0", annotations=annotations)))
    for house in (second, first):
        assert await finalize(house, TOLD) == (422, {"error": f"pod ml/train-0 {said}"})
    assert {(entry["phase"], entry.get("uid")) for entry in shared.held.values()} == {("pending", None)}


async def test_a_gpu_that_another_replica_has_given_to_another_is_held(
    first: House, second: House, shared: Shared
) -> None:
    """Of two GPUs of one node, nobody has told this replica who has the second."""
    for name, uid in (("train-0", REVIEW_UID), ("train-1", "another")):
        await first.dress(raw_pod(raw_container(gpus=1), name=name, labels={"gpuwarden.io/gpu.model": "h100"}), uid)
    assert await finalize(second, TOLD) == (409, {"error": "GPU-a1 is held by another reservation"})


async def test_a_gpu_that_two_nodes_claim_is_looked_for_on_both(build: Build, first: House, shared: Shared) -> None:
    await reserve(first, shared)
    disputed = copy.deepcopy(INVENTORY)
    disputed["nodes"] = [{"name": "node-0", "devices": [{"uuid": "GPU-a0"}, {"uuid": "GPU-a1"}]}, *disputed["nodes"]]
    house = await build(disputed, assemble=sharing(shared))
    assert await finalize(house, TOLD) == (200, {"status": "ok"})


@pytest.mark.parametrize("uuid", ["GPU-a0", "GPU-b0"], ids=["held", "free"])
async def test_while_nobody_can_be_asked_absence_is_not_concluded(
    first: House, second: House, shared: Shared, uuid: str
) -> None:
    await reserve(first, shared)
    with shared.store.away():
        assert (await finalize(second, {**TOLD, "gpu-uuid": uuid}))[0] == 503
    shared.is_away = True
    assert (await finalize(second, TOLD))[0] == 503
    assert {entry["phase"] for entry in shared.held.values()} == {"pending"}


async def test_what_is_known_here_costs_no_look(first: House, shared: Shared) -> None:
    await reserve(first, shared)
    assert (await finalize(first, TOLD))[0] == 200
    with shared.store.away():
        assert (await finalize(first, {**TOLD, "name": "another"}))[0] == 409


async def test_a_review_of_a_deletion_frees_nothing(first: House, shared: Shared) -> None:
    """The grace period begins then, and the deletion may be refused yet."""
    final = builders.created(await first.dress(raw_pod(raw_container(gpus=2)), REVIEW_UID))
    shared.has(final)
    await finalize(first, TOLD)
    before = dict(shared.held)
    assert (await first.validate(builders.delete(final)))["allowed"]
    assert shared.held == before
    assert len(before) == 2
