"""Reading one pod: what the API server says, and what is no answer at all."""

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest
from attrs import define, evolve, field
from starlette.requests import Request
from starlette.responses import Response

from tests import builders
from tests.api_client import answering, client_of
from tests.builders import Raw
from webhook.core import keys
from webhook.core.errors import LedgerError
from webhook.core.pod import Pod
from webhook.core.reservation import ReservationId
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import PodReaderUnavailableError
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.reserved_pod import PodSnapshot

POD = builders.created(builders.raw_pod())
DRESSED = builders.created(
    builders.raw_pod(
        annotations={
            keys.CLAIM.name: '{"gpus":2}',
            keys.RESERVATION_ID.name: builders.REVIEW_UID,
            keys.GPU_UUID.name: "GPU-a1,GPU-a0",
        }
    )
)
THE_POD = builders.identity()
HELD = builders.reservation(builders.slot("GPU-a0"), builders.slot("GPU-a1"))


@define
class ApiServer:
    """Says one thing of every pod, and remembers which paths it was asked for."""

    code: int = 200
    body: bytes = b""
    asked: list[str] = field(factory=list)
    bodies: list[bytes] = field(factory=list)
    port: int = 0

    def says(self, code: int, raw: Any) -> None:
        self.code, self.body = code, raw if isinstance(raw, bytes) else builders.body(raw)

    async def answer(self, request: Request) -> Response:
        self.asked.append(request.scope["raw_path"].decode())
        self.bodies.append(await request.body())
        return Response(self.body, self.code, media_type="application/json")


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    async with answering(server.answer, "GET", "PUT", "PATCH", "DELETE") as server.port:
        yield server


@pytest.fixture
async def pods(api_server: ApiServer) -> AsyncIterator[ApiPods]:
    async with client_of(api_server.port) as api:
        yield ApiPods(api)


async def test_a_pod_is_read_for_certain(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(200, DRESSED)
    found = await pods.find("ml", "train-0")
    assert found == Pod.parse(DRESSED)
    assert await pods.uid_of("ml", "train-0") == builders.POD_UID
    assert await pods.read_pod(THE_POD) is not None
    assert await pods.find_mismatch(THE_POD, HELD) is None
    assert set(api_server.asked) == {"/api/v1/namespaces/ml/pods/train-0"}


async def test_another_pod_of_the_name_is_not_this_one(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(200, builders.created(POD, uid="another"))
    assert await pods.read_pod(THE_POD) is None
    assert await pods.find_mismatch(THE_POD, HELD) == "pod ml/train-0 has another uid"


async def test_a_pod_that_carries_another_reservation_is_not_the_one_told(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(200, DRESSED)
    other = evolve(HELD, id=ReservationId("r2"))
    said = f"pod ml/train-0 carries reservation {builders.REVIEW_UID}, not r2"
    assert await pods.find_mismatch(THE_POD, other) == said


async def test_a_pod_that_is_not_there_is_gone(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(404, {"kind": "Status"})
    assert await pods.find("ml", "train-0") is None
    assert await pods.find_mismatch(THE_POD, HELD) == "there is no pod ml/train-0"
    assert await pods.uid_of("ml", "train-0") == ""
    assert await pods.read_pod(THE_POD) is None


NO_ANSWERS = {
    "forbidden": (403, {"kind": "Status"}),
    "broken": (500, {"kind": "Status"}),
    "too many": (429, {"kind": "Status"}),
    "not JSON": (200, b"{"),
    "a list": (200, {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}),
    "no object": (200, []),
    "something else": (200, {**POD, "kind": "Namespace"}),
    "another name": (200, builders.created(POD, name="train-1")),
    "another namespace": (200, builders.created(builders.raw_pod(namespace="other"))),
    "no uid": (200, {**POD, "metadata": {**POD["metadata"], "uid": ""}}),
    "nothing": (200, b""),
}


@pytest.mark.parametrize(("code", "raw"), NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_what_is_no_answer_proves_no_absence(api_server: ApiServer, pods: ApiPods, code: int, raw: Any) -> None:
    api_server.says(code, raw)
    with pytest.raises(PodsUnavailableError):
        await pods.find("ml", "train-0")
    with pytest.raises(PodsUnavailableError):
        await pods.find_mismatch(THE_POD, HELD)
    with pytest.raises(PodReaderUnavailableError):
        await pods.read_pod(THE_POD)


async def test_a_pod_is_looked_at_whatever_it_carries(api_server: ApiServer, pods: ApiPods) -> None:
    gated = {"schedulingGates": [{"name": "other"}, {"name": keys.QUEUE_GATE}]}
    api_server.says(200, {**POD, "spec": {**POD["spec"], **gated}})
    assert await pods.read_pod(THE_POD) == PodSnapshot(None, is_gated=True, node="", has_ended=False)
    ended = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {}}}]}
    api_server.says(200, {**POD, "spec": {**POD["spec"], "nodeName": "node-a"}, "status": ended})
    assert await pods.read_pod(THE_POD) == PodSnapshot(None, is_gated=False, node="node-a", has_ended=True)
    api_server.says(200, builders.created(POD, uid="another"))
    assert await pods.read_pod(THE_POD) is None
    api_server.says(404, {"kind": "Status"})
    assert await pods.read_pod(THE_POD) is None


async def test_a_pod_whose_name_nobody_knows_is_looked_for_in_the_whole_list(
    api_server: ApiServer, pods: ApiPods
) -> None:
    nameless = evolve(THE_POD, name="")
    listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [POD]}
    api_server.says(200, listed)
    assert await pods.read_pod(nameless) is not None
    api_server.says(200, {**listed, "items": []})
    assert await pods.read_pod(nameless) is None


async def test_nobody_there_proves_no_absence() -> None:
    async with client_of(9) as api:  # the discard port, where nothing listens
        with pytest.raises(PodsUnavailableError):
            await ApiPods(api).find("ml", "train-0")


@pytest.mark.parametrize("name", ["../secrets/x?y", "..", ".", "a%b", "A", ""])
async def test_a_name_that_no_pod_can_have_leads_nowhere_and_its_pod_is_gone(
    api_server: ApiServer, pods: ApiPods, name: str
) -> None:
    """Names come from reviews, which anybody on the network may write."""
    api_server.says(400, {"kind": "Status", "reason": "BadRequest"})
    assert await pods.find("ml", name) is None
    assert await pods.find(name, "train-0") is None
    assert await pods.read_pod(evolve(THE_POD, namespace=name)) is None
    if name:
        assert await pods.read_pod(evolve(THE_POD, name=name)) is None
    assert api_server.asked == []


async def test_a_node_whose_name_is_the_path_of_something_else_has_no_object(api_server: ApiServer) -> None:
    """It stands in an annotation of a pod that anybody may have made."""
    api_server.says(200, {"kind": "APIResourceList", "groupVersion": "gpuwarden.io/v1alpha1", "resources": []})
    async with client_of(api_server.port) as api:
        assert await ApiGpuNodes(api).get("..") is None
        assert api_server.asked == []
        with pytest.raises(StoreUnavailableError):
            await ApiGpuNodes(api).get("node-a")
        api_server.says(403, {"kind": "Status"})
        with pytest.raises(StoreUnavailableError):
            await ApiGpuNodes(api).get("node-a")
        api_server.says(200, {"kind": "GPUNode", "metadata": {"name": "node-b"}})
        with pytest.raises(StoreUnavailableError):
            await ApiGpuNodes(api).get("node-a")


def status(code: int, message: str) -> Raw:
    return {"kind": "Status", "code": code, "message": message}


@pytest.mark.parametrize(
    ("code", "raw", "error"),
    [
        pytest.param(409, status(409, "modified"), StaleError, id="stale"),
        pytest.param(422, status(422, "invalid"), RefusedError, id="against-its-rules"),
        pytest.param(403, status(403, "forbidden"), RefusedError, id="forbidden"),
        pytest.param(413, status(413, "limit is 3145728"), RefusedError, id="beyond-what-it-reads"),
        pytest.param(500, status(500, "etcdserver: request is too large"), RefusedError, id="beyond-what-it-keeps"),
        pytest.param(500, status(500, "etcdserver: leader changed"), StoreUnavailableError, id="a-failure"),
        pytest.param(429, status(429, "slow down"), StoreUnavailableError, id="too-many"),
    ],
)
async def test_what_would_be_refused_again_is_not_an_answer_that_was_lost(
    api_server: ApiServer, code: int, raw: Raw, error: type[LedgerError]
) -> None:
    api_server.says(code, raw)
    async with client_of(api_server.port) as api:
        nodes = ApiGpuNodes(api)
        for write in (nodes.put, nodes.put_status):
            with pytest.raises(error):
                await write({"metadata": {"name": "node-a"}})


async def test_pod_is_annotated_by_its_uid(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(200, {"kind": "Pod"})
    await pods.annotate(THE_POD, {"gpuwarden.io/gpu-uuid": "GPU-a"})
    meta = {"uid": builders.POD_UID, "annotations": {"gpuwarden.io/gpu-uuid": "GPU-a"}}
    assert [json.loads(one) for one in api_server.bodies] == [{"metadata": meta}]


@pytest.mark.parametrize(("code", "is_error"), [(404, False), (409, False), (403, True), (500, True)])
async def test_annotation_of_a_pod_that_is_gone_is_no_error(
    api_server: ApiServer, pods: ApiPods, code: int, *, is_error: bool
) -> None:
    api_server.says(code, {"kind": "Status"})
    with pytest.raises(PodReaderUnavailableError) if is_error else nullcontext():
        await pods.annotate(THE_POD, {})


async def test_a_pod_is_removed_by_its_uid_and_as_it_was_seen(api_server: ApiServer, pods: ApiPods) -> None:
    api_server.says(200, {"kind": "Status"})
    await pods.remove(THE_POD, "7")
    only = {"preconditions": {"uid": builders.POD_UID, "resourceVersion": "7"}}
    assert [json.loads(one) for one in api_server.bodies] == [only]


@pytest.mark.parametrize("code", [404, 409], ids=["gone", "changed-since"])
async def test_pod_that_is_gone_or_changed_is_not_removed_and_no_error(
    api_server: ApiServer, pods: ApiPods, code: int
) -> None:
    api_server.says(code, {"kind": "Status"})
    await pods.remove(THE_POD, "7")


@pytest.mark.parametrize("code", [403, 500])
async def test_refused_removal_is_an_error(api_server: ApiServer, pods: ApiPods, code: int) -> None:
    api_server.says(code, {"kind": "Status"})
    with pytest.raises(PodReaderUnavailableError, match="cannot be deleted"):
        await pods.remove(THE_POD, "7")


async def test_node_is_read_with_its_boot_id(api_server: ApiServer, pods: ApiPods) -> None:
    status = {"nodeInfo": {"bootID": "boot-1"}, "conditions": [{"type": "Ready", "status": "True"}]}
    api_server.says(200, {"kind": "Node", "metadata": {"name": "node-a"}, "status": status})
    found = await pods.read_node("node-a")
    assert found is not None
    assert (found.boot_id, found.is_ready) == ("boot-1", True)
    api_server.says(404, {"kind": "Status"})
    assert await pods.read_node("node-a") is None


@pytest.mark.parametrize(
    ("code", "raw"),
    [
        (500, {"kind": "Status"}),
        (200, {"kind": "Pod", "metadata": {"name": "node-a"}}),
        (200, {"kind": "Node", "metadata": {"name": "node-b"}}),
        (200, b"<html>"),
        (200, {"kind": "Node", "metadata": {"name": "node-a"}, "status": 7}),
    ],
    ids=["error", "another-kind", "another-node", "no-json", "malformed-status"],
)
async def test_answer_that_is_not_the_node_is_no_answer(
    api_server: ApiServer, pods: ApiPods, code: int, raw: Any
) -> None:
    api_server.says(code, raw)
    with pytest.raises(PodReaderUnavailableError):
        await pods.read_node("node-a")
