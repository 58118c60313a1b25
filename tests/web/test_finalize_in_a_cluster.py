"""`POST /finalize` at any replica: it reads reservations that another replica has made from the API server."""

import copy

import pytest

from tests import builders
from tests.builders import POD_UID, REVIEW_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness
from tests.web.replica import Shared, sharing
from webhook.core.reservation import ReservationId

REPORT = {
    "namespace": "ml",
    "name": "train-0",
    "uid": POD_UID,
    "reservation-id": REVIEW_UID,
    "gpu-uuid": "GPU-a0,GPU-a1",
}


async def finalize(harness: Harness, report: Raw) -> tuple[int, Raw]:
    reply = await harness.plain.post("/finalize", json=report)
    return reply.status_code, reply.json()


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def first(build: Build, shared: Shared) -> Harness:
    """The replica that reserves."""
    return await build(assemble=sharing(shared))


@pytest.fixture
async def second(build: Build, shared: Shared) -> Harness:
    """A replica that has not seen the reservation."""
    return await build(assemble=sharing(shared))


async def reserve(harness: Harness, shared: Shared, gpus: int = 2, uid: str = REVIEW_UID) -> None:
    shared.has(builders.created(await harness.dress(raw_pod(raw_container(gpus=gpus)), uid)))


@pytest.mark.parametrize("uuids", ["GPU-a0,GPU-a1", "GPU-a1,GPU-a0", "GPU-a1"])
async def test_any_replica_can_finalize_repeatedly(first: Harness, second: Harness, shared: Shared, uuids: str) -> None:
    await reserve(first, shared)
    for harness in (second, second, first):
        assert await finalize(harness, {**REPORT, "gpu-uuid": uuids}) == (200, {"status": "ok"})
    assert {(entry["phase"], entry["uid"]) for entry in shared.held.values()} == {("finalized", POD_UID)}


async def test_cached_reservation_is_read_again_if_it_does_not_match(
    first: Harness, second: Harness, shared: Shared
) -> None:
    """The GPUs were released and reserved again after this replica read them."""
    await reserve(first, shared)
    assert (await finalize(second, REPORT))[0] == 200
    assert await first.parts.ledger.release(ReservationId(REVIEW_UID), builders.identity())
    await reserve(first, shared, uid="another")
    assert (await finalize(second, {**REPORT, "reservation-id": "another"})) == (200, {"status": "ok"})
    assert {entry["reservation"] for entry in shared.held.values()} == {"another"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"gpu-uuid": "GPU-b0"}, 404, id="free GPU"),
        pytest.param({"gpu-uuid": "GPU-none"}, 404, id="unknown GPU"),
        pytest.param({"gpu-uuid": "GPU-a0,GPU-b0"}, 404, id="one held, one free GPU"),
        pytest.param({"reservation-id": "another"}, 409, id="another reservation"),
        pytest.param({"reservation-id": "another", "gpu-uuid": "GPU-a1"}, 409, id="another reservation, one GPU"),
        pytest.param({"namespace": "other"}, 409, id="another namespace"),
        pytest.param({"name": "another"}, 409, id="another name"),
        pytest.param({"uid": "uid-of-another"}, 422, id="uid of another pod"),
    ],
)
async def test_mismatched_report_changes_nothing(
    first: Harness, second: Harness, shared: Shared, change: Raw, code: int
) -> None:
    await reserve(first, shared)
    assert (await finalize(second, {**REPORT, **change}))[0] == code
    assert {entry["phase"] for entry in shared.held.values()} == {"pending"}


POD_ANNOTATIONS = {
    "no reservation": (None, "carries no valid reservation"),
    "another reservation": ({"reservation-id": "r1"}, f"carries reservation r1, not {REVIEW_UID}"),
    "other GPUs": ({"gpu-uuid": "GPU-a0,GPU-b0"}, f"carries GPUs that reservation {REVIEW_UID} does not hold"),
}


@pytest.mark.parametrize(("annotations_changed", "problem"), POD_ANNOTATIONS.values(), ids=POD_ANNOTATIONS)
async def test_pod_annotations_must_match_the_report(
    first: Harness, second: Harness, shared: Shared, annotations_changed: Raw | None, problem: str
) -> None:
    """The uid matches the report, but the reservation belongs to a pod that does not exist yet."""
    dressed = await first.dress(raw_pod(raw_container(gpus=2), name=None, generate_name="train-"))
    changes = {f"gpuwarden.io/{key}": value for key, value in (annotations_changed or {}).items()}
    annotations = None if annotations_changed is None else dressed["metadata"]["annotations"] | changes
    shared.has(builders.created(raw_pod(name="train-0", annotations=annotations)))
    for harness in (second, first):
        assert await finalize(harness, REPORT) == (422, {"error": f"pod ml/train-0 {problem}"})
    assert {(entry["phase"], entry.get("uid")) for entry in shared.held.values()} == {("pending", None)}


async def test_gpu_that_another_replica_reserved_for_another_pod_is_refused(
    first: Harness, second: Harness, shared: Shared
) -> None:
    """Both GPUs are on one node; this replica does not know who holds the second."""
    for name, uid in (("train-0", REVIEW_UID), ("train-1", "another")):
        await first.dress(raw_pod(raw_container(gpus=1), name=name, labels={"gpuwarden.io/gpu.model": "h100"}), uid)
    assert await finalize(second, REPORT) == (409, {"error": "GPU-a1 is held by another reservation"})


async def test_gpu_on_two_nodes_is_looked_up_on_both(build: Build, first: Harness, shared: Shared) -> None:
    await reserve(first, shared)
    disputed = copy.deepcopy(INVENTORY)
    disputed["nodes"] = [{"name": "node-0", "devices": [{"uuid": "GPU-a0"}, {"uuid": "GPU-a1"}]}, *disputed["nodes"]]
    harness = await build(disputed, assemble=sharing(shared))
    assert await finalize(harness, REPORT) == (200, {"status": "ok"})


@pytest.mark.parametrize("uuid", ["GPU-a0", "GPU-b0"], ids=["held", "free"])
async def test_finalize_answers_503_while_the_api_server_is_unavailable(
    first: Harness, second: Harness, shared: Shared, uuid: str
) -> None:
    await reserve(first, shared)
    with shared.store.away():
        assert (await finalize(second, {**REPORT, "gpu-uuid": uuid}))[0] == 503
    shared.is_away = True
    assert (await finalize(second, REPORT))[0] == 503
    assert {entry["phase"] for entry in shared.held.values()} == {"pending"}


async def test_known_reservation_is_not_read_again(first: Harness, shared: Shared) -> None:
    await reserve(first, shared)
    assert (await finalize(first, REPORT))[0] == 200
    with shared.store.away():
        assert (await finalize(first, {**REPORT, "name": "another"}))[0] == 409


async def test_delete_review_releases_nothing(first: Harness, shared: Shared) -> None:
    """The grace period only begins, and the deletion may still be refused."""
    final = builders.created(await first.dress(raw_pod(raw_container(gpus=2)), REVIEW_UID))
    shared.has(final)
    await finalize(first, REPORT)
    before = dict(shared.held)
    assert (await first.validate(builders.delete(final)))["allowed"]
    assert shared.held == before
    assert len(before) == 2
