"""Templates are sent so that the API server accepts later patches of them."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.api_client import answering, client_of
from webhook.kube.claim_templates import ApiClaimTemplates
from webhook.kube.requests import RateLimit, RateLimitedClient


async def test_template_is_sent_without_spaces() -> None:
    sent: list[tuple[str, bytes]] = []

    async def store(request: Request) -> Response:
        sent.append((request.headers["content-type"], await request.body()))
        return JSONResponse({"kind": "ResourceClaimTemplate", "metadata": {"name": "one"}}, status_code=201)

    async with answering(store, "POST") as port, client_of(port) as api:
        calls = RateLimitedClient(api, RateLimit(100, 100, lambda: 0.0))
        assert await ApiClaimTemplates(calls).create("ml", {"spec": {"parameters": {"hash": "aa11"}}}) is not None

    assert sent == [("application/yaml", b'{"spec":{"parameters":{"hash":"aa11"}}}')]
