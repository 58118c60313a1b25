"""ResourceClaims in the API server: what each answer means."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.api_client import answering, client_of
from tests.builders import Raw
from webhook.kube.api_claims import ApiClaims, ClaimRequestError

PATH = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims"
CLAIM: Raw = {"kind": "ResourceClaim", "metadata": {"name": "gpuwarden-a", "namespace": "ml"}, "spec": {}}
FOUND: Raw = {**CLAIM, "metadata": {**CLAIM["metadata"], "uid": "u-1"}}


class Server:
    """Answers by method, and remembers the requests."""

    def __init__(self, **answers: tuple[int, Raw | str]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, str, Raw | None]] = []

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.requests.append((request.method, request.url.path, json.loads(body) if body else None))
        status, content = self.answers[request.method]
        text = content if isinstance(content, str) else json.dumps(content)
        return Response(text, status, media_type="application/json")


@asynccontextmanager
async def claims_of(server: Server) -> AsyncIterator[ApiClaims]:
    async with answering(server.answer, "GET", "POST", "DELETE") as port, client_of(port) as api:
        yield ApiClaims(api)


async def test_created_claim_is_returned() -> None:
    server = Server(POST=(201, FOUND))
    async with claims_of(server) as claims:
        assert await claims.create(CLAIM) == FOUND
    assert server.requests == [("POST", PATH, CLAIM)]


async def test_existing_claim_is_read() -> None:
    server = Server(POST=(409, {"message": "exists"}), GET=(200, FOUND))
    async with claims_of(server) as claims:
        assert await claims.create(CLAIM) == FOUND
    assert server.requests[1] == ("GET", f"{PATH}/gpuwarden-a", None)


async def test_claim_that_was_deleted_in_between_is_none() -> None:
    async with claims_of(Server(POST=(409, {}), GET=(404, {}))) as claims:
        assert await claims.create(CLAIM) is None


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"POST": (403, {"message": "not allowed"})}, "not allowed"),
        ({"POST": (500, "")}, "answered 500"),
        ({"POST": (201, "[]")}, "without a ResourceClaim"),
        ({"POST": (201, {**FOUND, "metadata": {"name": "another"}})}, "another object"),
        ({"POST": (409, {}), "GET": (500, {"message": "away"})}, "away"),
        ({"POST": (409, {}), "GET": (200, {"kind": "Pod", "metadata": {"name": "gpuwarden-a"}})}, "another object"),
    ],
)
async def test_other_answers_are_errors(answers: dict[str, tuple[int, Raw | str]], words: str) -> None:
    async with claims_of(Server(**answers)) as claims:
        with pytest.raises(ClaimRequestError, match=words):
            await claims.create(CLAIM)


@pytest.mark.parametrize("status", [200, 404, 409])
async def test_claim_is_deleted_by_its_uid(status: int) -> None:
    """A claim of another uid answers 409: it is not ours."""
    server = Server(DELETE=(status, {}))
    async with claims_of(server) as claims:
        await claims.delete("ml", "gpuwarden-a", "u-1")
    ((method, path, options),) = server.requests
    assert (method, path) == ("DELETE", f"{PATH}/gpuwarden-a")
    assert options is not None
    assert options["preconditions"] == {"uid": "u-1"}


async def test_failed_deletion_is_an_error() -> None:
    async with claims_of(Server(DELETE=(403, {"message": "not allowed"}))) as claims:
        with pytest.raises(ClaimRequestError, match="not allowed"):
            await claims.delete("ml", "gpuwarden-a", "u-1")


async def test_server_that_is_away_is_an_error() -> None:
    async with answering(Server().answer) as port:
        pass
    async with client_of(port) as api:
        with pytest.raises(ClaimRequestError, match="cannot be reached"):
            await ApiClaims(api).create(CLAIM)
