"""`POST /finalize`: the cases in the documentation of the GPU Device Assigner, and others."""

from typing import Any

import pytest

from tests import builders
from tests.builders import POD_UID, REVIEW_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.house import House
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.ledger.pods import PodsUnavailableError
from webhook.web.health import Stage

REPORT = {
    "namespace": "ml",
    "name": "train-0",
    "uid": POD_UID,
    "reservation-id": REVIEW_UID,
    "gpu-uuid": "GPU-a0,GPU-a1",
}


async def finalize(house: House, report: Any) -> tuple[int, Raw]:
    reply = await house.plain.post("/finalize", json=report)
    return reply.status_code, reply.json()


async def reserve(house: House, *, name: str | None = "train-0", uid: str = REVIEW_UID, gpus: int = 2) -> None:
    generate_name = None if name else "train-"
    await house.dress(raw_pod(raw_container(gpus=gpus), name=name, generate_name=generate_name), uid)


def phases(house: House) -> list[Phase]:
    return [one.phase for one in house.parts.ledger.reservations()]


@pytest.mark.defect("assigner-16")
@pytest.mark.parametrize("uuids", ["GPU-a0,GPU-a1", "GPU-a1,GPU-a0", "GPU-a1", "GPU-a0, GPU-a1"])
async def test_matching_report_finalizes_the_reservation_and_can_be_repeated(house: House, uuids: str) -> None:
    await reserve(house)
    for _ in range(2):
        assert await finalize(house, {**REPORT, "gpu-uuid": uuids}) == (200, {"status": "ok"})
    held = house.parts.ledger.of_pod(POD_UID)
    assert held is not None
    assert (held.phase, held.uid) == (Phase.FINALIZED, POD_UID)


async def test_finalize_is_on_both_listeners(house: House) -> None:
    await reserve(house)
    assert (await house.tls.post("/finalize", json=REPORT)).json() == {"status": "ok"}


async def test_finalize_sets_the_name_of_a_pod_created_without_one(house: House) -> None:
    await reserve(house, name=None)
    assert await finalize(house, {**REPORT, "name": "train-x7k2p"}) == (200, {"status": "ok"})
    assert await finalize(house, {**REPORT, "name": "train-other"}) == (
        409,
        {"error": f"reservation {REVIEW_UID} is held by another pod"},
    )


@pytest.mark.defect("assigner-16")
@pytest.mark.parametrize(
    ("report", "absent"),
    [
        pytest.param({**REPORT, "gpu-uuid": "  ", "name": None}, "name, gpu-uuid", id="null and whitespace"),
        pytest.param({}, "namespace, name, uid, reservation-id, gpu-uuid", id="all fields"),
        pytest.param({**REPORT, "uid": ""}, "uid", id="empty string"),
    ],
)
async def test_all_missing_fields_are_named_in_order(house: House, report: Raw, absent: str) -> None:
    await reserve(house)
    assert await finalize(house, report) == (400, {"error": f"fields required but absent: {absent}"})
    assert phases(house) == [Phase.PENDING]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "the body is not JSON"),
        (b"", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'"x"', "the body is not a JSON object"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 50_000, "the body is not JSON"),
    ],
    ids=["malformed", "empty", "list", "string", "not UTF-8", "deeply nested"],
)
async def test_body_that_is_not_an_object_is_refused_with_400(house: House, body: bytes, text: str) -> None:
    reply = await house.plain.post("/finalize", content=body)
    assert (reply.status_code, reply.json()) == (400, {"error": text})


async def test_field_that_is_not_a_string_is_refused_with_400(house: House) -> None:
    assert await finalize(house, {**REPORT, "uid": 5, "name": ["x"]}) == (
        400,
        {"error": "fields that must be strings: name, uid"},
    )


@pytest.mark.defect("assigner-16")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"gpu-uuid": "GPU-b0"}, 404, id="free GPU"),
        pytest.param({"gpu-uuid": "GPU-none"}, 404, id="unknown GPU"),
        pytest.param({"gpu-uuid": "GPU-a0,GPU-b0"}, 404, id="one held, one free GPU"),
        pytest.param({"reservation-id": "another"}, 409, id="another reservation"),
        pytest.param({"namespace": "other"}, 409, id="another namespace"),
        pytest.param({"name": "another"}, 409, id="another name"),
    ],
)
async def test_mismatched_report_changes_nothing(house: House, change: Raw, code: int) -> None:
    await reserve(house)
    assert (await finalize(house, {**REPORT, **change}))[0] == code
    assert phases(house) == [Phase.PENDING]


async def test_second_uid_for_a_finalized_reservation_is_refused(house: House) -> None:
    await reserve(house)
    await finalize(house, REPORT)
    assert (await finalize(house, {**REPORT, "uid": "another"}))[0] == 409


async def test_report_with_some_of_the_gpus_is_refused(house: House) -> None:
    devices = [{"uuid": f"GPU-{k}"} for k in range(3)]
    house.file.write_text(builders.body({"nodes": [{"name": "node-a", "devices": devices}]}).decode())
    await house.fleet_source.refresh()
    await reserve(house, gpus=3)
    assert (await finalize(house, {**REPORT, "gpu-uuid": "GPU-0,GPU-1"}))[0] == 409


async def test_uid_must_match_the_existing_pod_of_that_name(house: House) -> None:
    await house.create(raw_pod(raw_container(gpus=1), name="train-0"), "r1", "uid-of-the-living")
    await reserve(house, name=None, uid="r2")
    assert await finalize(house, {**REPORT, "reservation-id": "r2", "gpu-uuid": "GPU-a0"}) == (
        422,
        {"error": "pod ml/train-0 has another uid"},
    )


async def test_pod_with_a_reservation_cannot_finalize_another(house: House) -> None:
    final = await house.create(raw_pod(raw_container(gpus=1), name="train-0"), "r1", POD_UID)
    await reserve(house, name=None, uid="r2", gpus=1)
    assert await finalize(house, {**REPORT, "reservation-id": "r2", "gpu-uuid": "GPU-a0"}) == (
        409,
        {"error": f"the pod with uid {POD_UID} has reservation r1"},
    )
    other = raw_pod(raw_container(gpus=1), name=None, generate_name="train-")
    second = builders.created(await house.dress(other, "r2"), uid="uid-2")
    assert (await house.validate(builders.review("CREATE", new=second)))["allowed"]
    await house.validate(builders.delete(final))
    assert house.held == ["GPU-a0"]


async def test_expired_reservation_cannot_be_finalized(house: House) -> None:
    await reserve(house)
    house.wait(86)
    assert (await finalize(house, REPORT))[0] == 409
    house.wait(10)
    await house.parts.ledger.collect(house.now)
    assert (await finalize(house, REPORT))[0] == 404


async def test_released_reservation_cannot_be_finalized(house: House) -> None:
    final = await house.create(raw_pod(raw_container(gpus=2)))
    await house.validate(builders.delete(final))
    assert (await finalize(house, REPORT))[0] == 404


class FactsAway:
    """An API server that cannot be reached."""

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        raise PodsUnavailableError("the API server cannot be reached")

    async def uid_of(self, namespace: str, name: str) -> str:
        raise PodsUnavailableError("the API server cannot be reached")


@pytest.mark.defect("assigner-6")
async def test_finalize_answers_503_and_changes_nothing_while_the_pod_cannot_be_read(build: Build) -> None:
    house = await build(facts=FactsAway())
    await reserve(house)
    reply = await house.plain.post("/finalize", json=REPORT)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert phases(house) == [Phase.PENDING]


async def test_finalize_answers_503_while_the_server_is_not_serving(house: House) -> None:
    house.health.stage = Stage.DRAINING
    reply = await house.plain.post("/finalize", json=REPORT)
    assert (reply.status_code, reply.headers["retry-after"], reply.json()) == (
        503,
        "1",
        {"error": "the server is draining"},
    )
