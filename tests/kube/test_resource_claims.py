"""What a ResourceClaim has been allocated, and requests for single claims."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.api_client import answering, client_of
from tests.builders import Raw
from webhook.core.reservation import PodIdentity
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError, RateLimit, RateLimitedClient
from webhook.kube.resource_claims import AllocatedDevice, ResourceClaims, allocated_claim


def claim(**status: Any) -> Raw:
    return {"metadata": {"name": "train-gpus", "namespace": "ml", "uid": "c1"}, "status": status}


RESULT = {"driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0", "request": "gpu0"}


def test_devices_and_pods_of_an_allocated_claim() -> None:
    pods = [{"resource": "pods", "name": "train", "uid": "p1"}, {"resource": "others", "name": "x", "uid": "x1"}]
    found = allocated_claim(claim(allocation={"devices": {"results": [RESULT]}}, reservedFor=pods))
    assert found is not None
    assert (found.uid, found.namespace, found.name, found.pods) == ("c1", "ml", "train-gpus", ("p1",))
    assert found.devices == (AllocatedDevice("gpu.nvidia.com", "node-a", "gpu-0", "gpu0"),)


@pytest.mark.parametrize(
    "raw",
    [
        claim(),
        claim(allocation={}),
        claim(allocation={"devices": {}}),
        claim(allocation={"devices": {"results": []}}),
        {"metadata": {"name": "train-gpus", "uid": "c1"}},
    ],
)
def test_claim_without_devices_is_not_allocated(raw: Raw) -> None:
    assert allocated_claim(raw) is None


def test_object_that_is_no_claim_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        allocated_claim(claim(allocation={"devices": {"results": [{"driver": "gpu.nvidia.com"}]}}))


# The client.

PATH = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"
CLAIM: Raw = {"metadata": {"name": "gpuwarden-a", "namespace": "ml"}, "spec": {"parameters": {"hash": "aa11"}}}
FOUND: Raw = {**CLAIM, "metadata": {**CLAIM["metadata"], "uid": "u-1"}}


class Server:
    """Answers by method, and remembers the requests."""

    def __init__(self, **answers: tuple[int, Raw]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, str, bytes]] = []

    async def answer(self, request: Request) -> Response:
        self.requests.append((request.method, request.url.path, await request.body()))
        status, content = self.answers[request.method]
        return JSONResponse(content, status)


@asynccontextmanager
async def claims_of(server: Server) -> AsyncIterator[ResourceClaims]:
    async with answering(server.answer, "GET", "POST", "DELETE", "PATCH") as port, client_of(port) as api:
        yield ResourceClaims(RateLimitedClient(api, RateLimit(100, 100, lambda: 0.0)))


async def test_claim_is_sent_without_spaces() -> None:
    server = Server(POST=(201, FOUND))
    async with claims_of(server) as claims:
        assert await claims.create(CLAIM) == FOUND
    content = b'{"metadata":{"name":"gpuwarden-a","namespace":"ml"},"spec":{"parameters":{"hash":"aa11"}}}'
    assert server.requests == [("POST", PATH, content)]


async def test_existing_claim_is_read() -> None:
    server = Server(POST=(409, {"message": "exists"}), GET=(200, FOUND))
    async with claims_of(server) as claims:
        assert await claims.create(CLAIM) == FOUND
    assert server.requests[1] == ("GET", f"{PATH}/gpuwarden-a", b"")


async def test_claim_that_was_deleted_in_between_is_none() -> None:
    async with claims_of(Server(POST=(409, {}), GET=(404, {}))) as claims:
        assert await claims.create(CLAIM) is None


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"POST": (403, {"message": "not allowed"})}, ApiRefusesError, "not allowed"),
        ({"POST": (404, {})}, ApiRefusesError, "there is no namespace ml"),
        ({"POST": (500, {})}, ApiUnavailableError, "answered 500"),
        ({"POST": (409, {}), "GET": (500, {})}, ApiUnavailableError, "answered 500"),
    ],
)
async def test_claim_that_is_not_created_is_an_error(
    answers: dict[str, tuple[int, Raw]], error: type[Exception], words: str
) -> None:
    async with claims_of(Server(**answers)) as claims:
        with pytest.raises(error, match=words):
            await claims.create(CLAIM)


@pytest.mark.parametrize("status", [200, 404, 409])
async def test_claim_is_deleted_by_its_uid(status: int) -> None:
    """A claim of another uid answers 409: it is not ours."""
    server = Server(DELETE=(status, {}))
    async with claims_of(server) as claims:
        await claims.delete("ml", "gpuwarden-a", "u-1")
    ((method, path, options),) = server.requests
    assert (method, path) == ("DELETE", f"{PATH}/gpuwarden-a")
    assert json.loads(options)["preconditions"] == {"uid": "u-1"}


async def test_failed_deletion_is_an_error() -> None:
    async with claims_of(Server(DELETE=(403, {"message": "not allowed"}))) as claims:
        with pytest.raises(ApiRefusesError, match="not allowed"):
            await claims.delete("ml", "gpuwarden-a", "u-1")


async def test_allocation_is_taken_back_at_one_version_only() -> None:
    """The API server answers 409 if the claim has changed."""
    server = Server(PATCH=(409, {"message": "changed"}))
    claim_at_7 = {"metadata": {**FOUND["metadata"], "resourceVersion": "7"}}
    async with claims_of(server) as claims:
        with pytest.raises(ApiRefusesError, match="changed"):
            await claims.clear_allocation(claim_at_7)
    ((method, path, body),) = server.requests
    assert (method, path) == ("PATCH", f"{PATH}/gpuwarden-a/status")
    only = {"uid": "u-1", "resourceVersion": "7"}
    assert json.loads(body) == {"metadata": only, "status": {"allocation": None}}


@pytest.mark.parametrize(("status", "uid", "is_found"), [(200, "p1", True), (200, "another", False), (404, "", False)])
async def test_pod_of_a_claim_is_found_by_its_uid(status: int, uid: str, is_found: bool) -> None:
    server = Server(GET=(status, {"metadata": {"name": "train", "uid": uid}}))
    async with claims_of(server) as claims:
        assert (await claims.pod_of(PodIdentity("ml", "train", "p1")) is not None) is is_found
    assert server.requests == [("GET", "/api/v1/namespaces/ml/pods/train", b"")]
