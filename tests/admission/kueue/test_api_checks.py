"""Answers to admission checks in the API server: what is written, and which answers are errors."""

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from tests.admission.kueue.workloads import admission_check, raw_check, raw_workload
from tests.api_client import answering, client_of
from tests.builders import NOW, Raw, body
from webhook.admission.kueue.api_checks import ApiChecks
from webhook.admission.kueue.checks import CheckAnswer, CheckNotWrittenError, WorkloadChangedError
from webhook.admission.kueue.workload import AdmissionCheck, CheckPhase, Workload

LATER = NOW + timedelta(seconds=90.7)
BY_US = {"fieldManager": "gpuwarden.io/proven-gpus", "force": "true"}


@define
class ApplyServer:
    """Answers each write with an object or an error, and records the writes."""

    answer: bytes = b'{"kind":"Workload"}'
    code: int = 200
    writes: list[tuple[str, dict[str, str], str, Any]] = field(factory=list)

    async def reply(self, request: Request) -> Response:
        kind = request.headers["Content-Type"]
        self.writes.append((request.url.path, dict(request.query_params), kind, json.loads(await request.body())))
        return Response(self.answer, self.code, media_type="application/json")


@pytest.fixture
def server() -> ApplyServer:
    return ApplyServer()


@pytest.fixture
async def writer(server: ApplyServer) -> AsyncIterator[ApiChecks]:
    async with answering(server.reply, "PATCH") as port, client_of(port) as api:
        yield ApiChecks(api)


async def answered(writer: ApiChecks, answer: CheckAnswer) -> Raw:
    one = Workload.of(raw_workload(version=7))
    assert one is not None
    return await writer.answer(one, list(one.checks.values()), answer, LATER)


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        pytest.param(CheckAnswer(CheckPhase.READY, "all"), raw_check("Ready", "all", at=LATER), id="ready"),
        pytest.param(CheckAnswer(CheckPhase.PENDING, "none"), raw_check("Pending", "none"), id="same state, same time"),
        pytest.param(
            CheckAnswer(CheckPhase.RETRY, "none", timedelta(seconds=20)),
            raw_check("Retry", "none", at=LATER, requeueAfterSeconds=20),
            id="retry",
        ),
    ],
)
async def test_answer_applies_our_check_to_the_version_that_was_decided_on(
    server: ApplyServer, writer: ApiChecks, answer: CheckAnswer, written: Raw
) -> None:
    assert await answered(writer, answer) == {"kind": "Workload"}
    (one,) = server.writes
    assert one[:3] == (
        "/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads/train/status",
        BY_US,
        "application/apply-patch+yaml",
    )
    assert one[3] == {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"namespace": "ml", "name": "train", "uid": "uid-train", "resourceVersion": "7"},
        "status": {"admissionChecks": [written]},
    }


async def test_active_condition_names_the_generation(server: ApplyServer, writer: ApiChecks) -> None:
    await writer.activate(AdmissionCheck.of(admission_check(active=False)), NOW)
    path, _, _, content = server.writes[0]
    (condition,) = content["status"]["conditions"]
    assert path == "/apis/kueue.x-k8s.io/v1beta2/admissionchecks/proven/status"
    assert {key: condition[key] for key in ("type", "status", "observedGeneration", "lastTransitionTime")} == {
        "type": "Active",
        "status": "True",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-03-02T12:00:00Z",
    }


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param(409, WorkloadChangedError, id="changed"),
        pytest.param(403, CheckNotWrittenError, id="forbidden"),
        pytest.param(404, CheckNotWrittenError, id="gone"),
        pytest.param(500, CheckNotWrittenError, id="unavailable"),
    ],
)
async def test_refused_write_is_an_error_with_its_message(
    server: ApplyServer, writer: ApiChecks, code: int, error: type[Exception]
) -> None:
    server.code, server.answer = code, body({"kind": "Status", "message": "the reason"})
    with pytest.raises(error, match="the reason") as caught:
        await answered(writer, CheckAnswer(CheckPhase.READY, ""))
    assert type(caught.value) is error


async def test_answer_that_is_no_object_is_an_error(server: ApplyServer, writer: ApiChecks) -> None:
    server.answer = b"<html>"
    with pytest.raises(CheckNotWrittenError, match="not valid JSON"):
        await answered(writer, CheckAnswer(CheckPhase.READY, ""))


async def test_api_server_that_does_not_answer_is_an_error(server: ApplyServer) -> None:
    async with answering(server.reply, "PATCH") as port:
        pass
    async with client_of(port) as api:
        with pytest.raises(CheckNotWrittenError, match="did not answer"):
            await answered(ApiChecks(api), CheckAnswer(CheckPhase.READY, ""))
