"""Taints and evictions in the API server: what is written, and which answers are errors."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from tests import builders
from tests.api_client import answering, client_of
from tests.builders import Raw
from webhook.admission.evictions import ApiEvictor
from webhook.admission.evidence_loss import EvictionError

THE_POD = builders.identity()
OURS = {"key": "gpuwarden.io/evidence-lost", "effect": "NoSchedule"}
OTHER = {"key": "example.org/maintenance", "effect": "NoExecute", "value": "today"}


@define
class ApiServer:
    """Returns a Node, answers writes with a status, and records the writes."""

    node: Any = None
    code: int = 200
    writes: list[tuple[str, str, Any]] = field(factory=list)

    async def answer(self, request: Request) -> Response:
        if request.method == "GET":
            return Response(builders.body(self.node or {}), 200 if self.node else 404)
        self.writes.append((request.method, request.url.path, json.loads(await request.body())))
        return Response(b'{"kind":"Status","message":"the reason"}', self.code, media_type="application/json")


@pytest.fixture
def api_server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def evictor(api_server: ApiServer) -> AsyncIterator[ApiEvictor]:
    async with answering(api_server.answer, "GET", "PATCH", "POST") as port, client_of(port) as api:
        yield ApiEvictor(api)


def node_with(*taints: Raw) -> Raw:
    meta = {"name": "node-a", "uid": "u", "resourceVersion": "7"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"taints": list(taints)} if taints else {}}


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((), True, [OURS]),
        ((OTHER,), True, [OTHER, OURS]),
        ((OURS, OTHER), False, [OTHER]),
        ((OURS,), False, []),
    ],
    ids=["first", "beside-another", "removed-beside-another", "removed"],
)
async def test_only_our_taint_changes_and_only_in_the_version_that_was_read(
    api_server: ApiServer, evictor: ApiEvictor, before: tuple[Raw, ...], wanted: bool, after: list[Raw]
) -> None:
    api_server.node = node_with(*before)
    await evictor.taint("node-a", wanted=wanted)
    patch = {"metadata": {"resourceVersion": "7"}, "spec": {"taints": after}}
    assert api_server.writes == [("PATCH", "/api/v1/nodes/node-a", patch)]


@pytest.mark.parametrize(
    ("node", "wanted"),
    [(node_with(OURS), True), (node_with(OTHER), False), (node_with(), False), (None, True)],
    ids=["present", "absent", "no-taints", "no-node"],
)
async def test_nothing_is_written_if_the_taint_is_as_wanted(
    api_server: ApiServer, evictor: ApiEvictor, node: Raw | None, wanted: bool
) -> None:
    api_server.node = node
    await evictor.taint("node-a", wanted=wanted)
    assert api_server.writes == []


async def test_answer_that_is_no_node_changes_nothing(api_server: ApiServer, evictor: ApiEvictor) -> None:
    api_server.node = {"kind": "Pod", "metadata": {"name": "node-a"}}
    with pytest.raises(EvictionError):
        await evictor.taint("node-a", wanted=True)
    assert api_server.writes == []


async def test_eviction_names_the_uid_of_the_pod(api_server: ApiServer, evictor: ApiEvictor) -> None:
    await evictor.evict(THE_POD)
    ((method, path, sent),) = api_server.writes
    assert (method, path) == ("POST", "/api/v1/namespaces/ml/pods/train-0/eviction")
    assert sent["kind"] == "Eviction"
    assert sent["deleteOptions"] == {"preconditions": {"uid": builders.POD_UID}}


@pytest.mark.parametrize("code", [404, 409])
async def test_pod_that_is_gone_or_replaced_needs_no_eviction(
    api_server: ApiServer, evictor: ApiEvictor, code: int
) -> None:
    api_server.code = code
    await evictor.evict(THE_POD)
    assert len(api_server.writes) == 1


@pytest.mark.parametrize("code", [403, 429, 500])
async def test_refused_eviction_is_an_error_with_the_message(
    api_server: ApiServer, evictor: ApiEvictor, code: int
) -> None:
    api_server.code = code
    with pytest.raises(EvictionError, match="the reason"):
        await evictor.evict(THE_POD)


async def test_api_server_that_cannot_be_reached_is_an_error() -> None:
    async with client_of(1) as api:
        with pytest.raises(EvictionError, match="cannot be reached"):
            await ApiEvictor(api).taint("node-a", wanted=True)
