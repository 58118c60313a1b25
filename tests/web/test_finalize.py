"""`POST /finalize`: the cases in the documentation of the GPU Device Assigner, and others."""

from typing import Any

import pytest

from tests import builders
from tests.builders import POD_UID, REVIEW_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import Harness
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


async def finalize(harness: Harness, report: Any) -> tuple[int, Raw]:
    reply = await harness.plain.post("/finalize", json=report)
    return reply.status_code, reply.json()


async def reserve(harness: Harness, *, name: str | None = "train-0", uid: str = REVIEW_UID, gpus: int = 2) -> None:
    generate_name = None if name else "train-"
    await harness.dress(raw_pod(raw_container(gpus=gpus), name=name, generate_name=generate_name), uid)


def phases(harness: Harness) -> list[Phase]:
    return [one.phase for one in harness.parts.ledger.reservations()]


@pytest.mark.defect("assigner-16")
@pytest.mark.parametrize("uuids", ["GPU-a0,GPU-a1", "GPU-a1,GPU-a0", "GPU-a1", "GPU-a0, GPU-a1"])
async def test_matching_report_finalizes_the_reservation_and_can_be_repeated(harness: Harness, uuids: str) -> None:
    await reserve(harness)
    for _ in range(2):
        assert await finalize(harness, {**REPORT, "gpu-uuid": uuids}) == (200, {"status": "ok"})
    held = harness.parts.ledger.of_pod(POD_UID)
    assert held is not None
    assert (held.phase, held.uid) == (Phase.FINALIZED, POD_UID)


async def test_finalize_is_on_both_listeners(harness: Harness) -> None:
    await reserve(harness)
    assert (await harness.tls.post("/finalize", json=REPORT)).json() == {"status": "ok"}


async def test_finalize_sets_the_name_of_a_pod_created_without_one(harness: Harness) -> None:
    await reserve(harness, name=None)
    assert await finalize(harness, {**REPORT, "name": "train-x7k2p"}) == (200, {"status": "ok"})
    assert await finalize(harness, {**REPORT, "name": "train-other"}) == (
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
async def test_all_missing_fields_are_named_in_order(harness: Harness, report: Raw, absent: str) -> None:
    await reserve(harness)
    assert await finalize(harness, report) == (400, {"error": f"fields required but absent: {absent}"})
    assert phases(harness) == [Phase.PENDING]


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
async def test_body_that_is_not_an_object_is_refused_with_400(harness: Harness, body: bytes, text: str) -> None:
    reply = await harness.plain.post("/finalize", content=body)
    assert (reply.status_code, reply.json()) == (400, {"error": text})


async def test_field_that_is_not_a_string_is_refused_with_400(harness: Harness) -> None:
    assert await finalize(harness, {**REPORT, "uid": 5, "name": ["x"]}) == (
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
async def test_mismatched_report_changes_nothing(harness: Harness, change: Raw, code: int) -> None:
    await reserve(harness)
    assert (await finalize(harness, {**REPORT, **change}))[0] == code
    assert phases(harness) == [Phase.PENDING]


async def test_second_uid_for_a_finalized_reservation_is_refused(harness: Harness) -> None:
    await reserve(harness)
    await finalize(harness, REPORT)
    assert (await finalize(harness, {**REPORT, "uid": "another"}))[0] == 409


async def test_report_with_some_of_the_gpus_is_refused(harness: Harness) -> None:
    devices = [{"uuid": f"GPU-{k}"} for k in range(3)]
    harness.file.write_text(builders.body({"nodes": [{"name": "node-a", "devices": devices}]}).decode())
    await harness.fleet_source.refresh()
    await reserve(harness, gpus=3)
    assert (await finalize(harness, {**REPORT, "gpu-uuid": "GPU-0,GPU-1"}))[0] == 409


async def test_uid_must_match_the_existing_pod_of_that_name(harness: Harness) -> None:
    await harness.create(raw_pod(raw_container(gpus=1), name="train-0"), "r1", "uid-of-the-living")
    await reserve(harness, name=None, uid="r2")
    assert await finalize(harness, {**REPORT, "reservation-id": "r2", "gpu-uuid": "GPU-a0"}) == (
        422,
        {"error": "pod ml/train-0 has another uid"},
    )


async def test_pod_with_a_reservation_cannot_finalize_another(harness: Harness) -> None:
    final = await harness.create(raw_pod(raw_container(gpus=1), name="train-0"), "r1", POD_UID)
    await reserve(harness, name=None, uid="r2", gpus=1)
    assert await finalize(harness, {**REPORT, "reservation-id": "r2", "gpu-uuid": "GPU-a0"}) == (
        409,
        {"error": f"the pod with uid {POD_UID} has reservation r1"},
    )
    other = raw_pod(raw_container(gpus=1), name=None, generate_name="train-")
    second = builders.created(await harness.dress(other, "r2"), uid="uid-2")
    assert (await harness.validate(builders.review("CREATE", new=second)))["allowed"]
    await harness.validate(builders.delete(final))
    assert harness.held == ["GPU-a0"]


async def test_expired_reservation_cannot_be_finalized(harness: Harness) -> None:
    await reserve(harness)
    harness.wait(86)
    assert (await finalize(harness, REPORT))[0] == 409
    harness.wait(10)
    await harness.parts.ledger.collect(harness.now)
    assert (await finalize(harness, REPORT))[0] == 404


async def test_released_reservation_cannot_be_finalized(harness: Harness) -> None:
    final = await harness.create(raw_pod(raw_container(gpus=2)))
    await harness.validate(builders.delete(final))
    assert (await finalize(harness, REPORT))[0] == 404


class FactsAway:
    """An API server that cannot be reached."""

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        raise PodsUnavailableError("the API server cannot be reached")

    async def uid_of(self, namespace: str, name: str) -> str:
        raise PodsUnavailableError("the API server cannot be reached")


@pytest.mark.defect("assigner-6")
async def test_finalize_answers_503_and_changes_nothing_while_the_pod_cannot_be_read(build: Build) -> None:
    harness = await build(facts=FactsAway())
    await reserve(harness)
    reply = await harness.plain.post("/finalize", json=REPORT)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert phases(harness) == [Phase.PENDING]


async def test_finalize_answers_503_while_the_server_is_not_serving(harness: Harness) -> None:
    harness.health.stage = Stage.DRAINING
    reply = await harness.plain.post("/finalize", json=REPORT)
    assert (reply.status_code, reply.headers["retry-after"], reply.json()) == (
        503,
        "1",
        {"error": "the server is draining"},
    )
