"""Gates in the API server: opening, checking, and malformed answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from tests import builders
from tests.api_client import answering, client_of
from webhook.admission.queue.api_gates import ApiGates
from webhook.admission.queue.gates import GateError
from webhook.core.dress import DressRules, waiting

THE_POD = builders.identity()
WISH = builders.raw_pod(builders.raw_container(gpus=1))
WAITING = builders.created(waiting(WISH, builders.claim(WISH), DressRules(), "because"))
PATCH = [{"op": "test", "path": "/metadata/uid", "value": builders.POD_UID}]


@define
class ApiServer:
    """Gives the same answer for every pod and records the requests."""

    code: int = 200
    body: bytes = b"{}"
    asked: list[tuple[str, str, str, Any]] = field(factory=list)

    def says(self, code: int, raw: Any) -> None:
        self.code, self.body = code, builders.body(raw)

    async def answer(self, request: Request) -> Response:
        sent = await request.body()
        kind = request.headers.get("content-type", "")
        self.asked.append((request.method, request.url.path, kind, json.loads(sent) if sent else None))
        return Response(self.body, self.code, media_type="application/json")


@pytest.fixture
def api_server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def gates(api_server: ApiServer) -> AsyncIterator[ApiGates]:
    async with answering(api_server.answer, "GET", "PATCH") as port, client_of(port) as api:
        yield ApiGates(api)


async def test_gate_is_opened_with_one_patch(api_server: ApiServer, gates: ApiGates) -> None:
    assert await gates.open(THE_POD, PATCH)
    assert api_server.asked == [
        ("PATCH", "/api/v1/namespaces/ml/pods/train-0", "application/json-patch+json", PATCH),
    ]


async def test_gate_of_a_deleted_pod_is_not_opened(api_server: ApiServer, gates: ApiGates) -> None:
    api_server.says(404, {"kind": "Status"})
    assert not await gates.open(THE_POD, PATCH)
    await gates.write_reason(THE_POD, "because")


async def test_gate_error_contains_the_api_servers_message(api_server: ApiServer, gates: ApiGates) -> None:
    api_server.says(422, {"kind": "Status", "message": "the test failed"})
    with pytest.raises(GateError, match="the test failed"):
        await gates.open(THE_POD, PATCH)
    with pytest.raises(GateError, match="the test failed"):
        await gates.is_closed(THE_POD)


@pytest.mark.parametrize(
    ("code", "raw", "is_closed"),
    [
        pytest.param(200, WAITING, True, id="as-it-waits"),
        pytest.param(200, builders.created(WISH), False, id="open"),
        pytest.param(200, builders.created(WAITING, uid="another"), False, id="another-pod-of-the-name"),
        pytest.param(404, {"kind": "Status"}, False, id="gone"),
    ],
)
async def test_gate_is_closed_only_while_the_pod_of_this_uid_waits_behind_it(
    api_server: ApiServer, gates: ApiGates, code: int, raw: Any, *, is_closed: bool
) -> None:
    api_server.says(code, raw)
    assert await gates.is_closed(THE_POD) is is_closed
