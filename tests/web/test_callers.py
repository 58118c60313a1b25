"""Authentication and authorization of callers, with a fake API server."""

import base64
from datetime import datetime, timedelta

import httpx
import pytest
from attrs import define, field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.builders import NOW
from webhook.core.caller import POD_UID, Caller, CallersUnavailableError, Right
from webhook.runtime.telemetry import Metrics
from webhook.runtime.tls.certificate_source import CLIENT_CERTIFICATE
from webhook.web.callers import (
    MAX_RIGHTS,
    MAX_TOKEN,
    RIGHT_TTL,
    TOKEN_TTL,
    Authority,
    CallerGate,
    Guard,
    Reviewers,
    TtlCache,
    caller_of,
    list_pods,
)
from webhook.web.routes import application, get

JANE = Caller("jane")


@define
class ApiServer:
    """An API server with some tokens and rights, which records all requests."""

    tokens: dict[str, Caller] = field(factory=lambda: {"good": JANE})
    rights: set[tuple[str, Right]] = field(factory=set)
    requests: list[tuple[str, str | None]] = field(factory=list)
    checked_rights: list[Right] = field(factory=list)
    is_away: bool = False

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        if self.is_away:
            raise CallersUnavailableError("away")
        self.requests.append((token, audience))
        return self.tokens.get(token)

    async def may(self, caller: Caller, right: Right) -> bool:
        self.checked_rights.append(right)
        return (caller.user, right) in self.rights


class GuardedApp:
    """An app with one route for each guard."""

    def __init__(self, authority: Authority | None, reviewers: Reviewers | None = None, **options: bool) -> None:
        self.now = NOW
        self.metrics = Metrics()
        self.gate = CallerGate(lambda: self.now, authority, reviewers, **options)
        routes = [get(f"/{guard}", page, guard) for guard in Guard]
        self.asgi = application(self.metrics, *routes, gate=self.gate)
        self.client = client_of(self.asgi)

    async def get(self, guard: Guard, authorization: str | None = None) -> httpx.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        return await self.client.get(f"/{guard}", headers=headers)


def client_of(asgi: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=asgi), base_url="https://server")


async def page(request: Request) -> Response:
    return PlainTextResponse("in")


def password(token: str) -> str:
    return "Basic " + base64.b64encode(f"anything:{token}".encode()).decode()


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def app(api: ApiServer) -> GuardedApp:
    return GuardedApp(api)


async def test_without_an_authority_all_callers_are_admitted() -> None:
    app = GuardedApp(None)
    for guard in Guard:
        assert (await app.get(guard)).text == "in"
    assert await app.gate.may(Caller("anybody"), list_pods("ml"))


async def test_valid_token_is_admitted_and_open_routes_check_no_token(app: GuardedApp, api: ApiServer) -> None:
    assert (await app.get(Guard.OPEN, "Bearer bad")).text == "in"
    assert (await app.get(Guard.REVIEWER)).text == "in"
    assert api.requests == []
    for guard in (Guard.CALLER, Guard.PERSON, Guard.SCHEDULER):
        assert (await app.get(guard, "Bearer good")).text == "in"
        assert (await app.get(guard)).status_code == 401
    assert api.requests == [("good", None)]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic Z29vZA==", password("good"), "good", "Bearer " + "x" * (MAX_TOKEN + 1)],
    ids=["no header", "empty", "no token", "empty token", "no user and password", "password", "no scheme", "too long"],
)
async def test_malformed_token_is_refused_without_a_request_to_the_api_server(
    app: GuardedApp, api: ApiServer, authorization: str | None
) -> None:
    got = await app.get(Guard.CALLER, authorization)
    assert (got.status_code, got.headers["www-authenticate"]) == (401, "Bearer")
    assert got.json() == {"error": "a bearer token that the API server accepts for this audience is required"}
    assert api.requests == []


async def test_person_may_send_the_token_as_a_password(app: GuardedApp, api: ApiServer) -> None:
    assert (await app.get(Guard.PERSON)).headers["www-authenticate"] == 'Basic realm="gpuwarden", Bearer'
    assert (await app.get(Guard.PERSON, password("good"))).text == "in"
    for invalid in ("Basic !", "Basic /w==", "Basic " + "x" * 4 * MAX_TOKEN, password("bad")):
        assert (await app.get(Guard.PERSON, invalid)).status_code == 401
    assert api.requests == [("good", None), ("bad", None)]


async def test_unknown_token_is_refused_and_counted(app: GuardedApp, api: ApiServer) -> None:
    assert (await app.get(Guard.CALLER, "Bearer bad")).status_code == 401
    assert api.requests == [("bad", None)]
    assert b'gpuwarden_http_requests_total{route="/caller",status="401"} 1.0' in app.metrics.render()[0]


async def test_valid_token_is_cached_for_its_ttl(app: GuardedApp, api: ApiServer) -> None:
    for _ in range(3):
        await app.get(Guard.CALLER, "Bearer good")
    assert api.requests == [("good", None)]
    api.tokens.clear()
    app.now += TOKEN_TTL - timedelta(seconds=1)
    assert (await app.get(Guard.CALLER, "Bearer good")).status_code == 200
    app.now += timedelta(seconds=1)
    assert (await app.get(Guard.CALLER, "Bearer good")).status_code == 401


async def test_refused_token_is_not_cached(app: GuardedApp, api: ApiServer) -> None:
    assert (await app.get(Guard.CALLER, "Bearer late")).status_code == 401
    api.tokens["late"] = JANE
    assert (await app.get(Guard.CALLER, "Bearer late")).status_code == 200


async def test_callers_are_answered_503_while_the_api_server_is_unavailable(app: GuardedApp, api: ApiServer) -> None:
    api.is_away = True
    got = await app.get(Guard.CALLER, "Bearer good")
    assert (got.status_code, got.headers["retry-after"]) == (503, "1")


async def test_review_token_needs_its_own_audience_and_user(api: ApiServer) -> None:
    app = GuardedApp(api, Reviewers("gpuwarden", ("jane",)))
    assert (await app.get(Guard.CALLER, "Bearer good")).text == "in"
    assert (await app.get(Guard.REVIEWER, "Bearer good")).text == "in"
    assert api.requests == [("good", None), ("good", "gpuwarden")]  # each audience is checked separately
    other = GuardedApp(api, Reviewers("gpuwarden", ("joe",)))
    assert (await other.get(Guard.REVIEWER, "Bearer good")).status_code == 401
    assert (await other.get(Guard.REVIEWER)).status_code == 401


@pytest.mark.parametrize("api", [None, ApiServer()], ids=["embedded", "cluster"])
async def test_only_reviewers_need_a_certificate(api: ApiServer | None) -> None:
    app = GuardedApp(api, Reviewers(with_certificate=True))

    async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
        await app.asgi({**scope, CLIENT_CERTIFICATE: True}, receive, send)

    assert (await app.get(Guard.REVIEWER)).status_code == 403
    assert (await app.get(Guard.CALLER, "Bearer good")).text == "in"
    assert (await client_of(with_certificate).get("/reviewer")).text == "in"


async def test_schedulers_use_a_certificate_or_a_token(api: ApiServer) -> None:
    assert (await GuardedApp(api).get(Guard.SCHEDULER)).status_code == 401
    app = GuardedApp(api, schedulers_use_certificates=True)
    assert (await app.get(Guard.SCHEDULER)).text == "in"
    assert (await app.get(Guard.CALLER)).status_code == 401


async def test_right_is_cached_for_its_ttl(app: GuardedApp, api: ApiServer) -> None:
    api.rights = {("jane", list_pods("ml"))}
    for _ in range(3):
        assert await app.gate.may(JANE, list_pods("ml"))
        assert not await app.gate.may(JANE, list_pods("other"))
    assert len(api.checked_rights) == 2
    assert not await app.gate.may(Caller("joe"), list_pods("ml"))
    api.rights.clear()
    app.now += RIGHT_TTL
    assert not await app.gate.may(JANE, list_pods("ml"))


async def test_cache_drops_the_oldest_entry_when_it_is_full() -> None:
    now: list[datetime] = [NOW]
    cache: TtlCache[int, int] = TtlCache(lambda: now[0], timedelta(seconds=1), 3)
    requests: list[int] = []

    async def answer(number: int) -> int:
        async def ask() -> int:
            requests.append(number)
            return number

        return await cache.get(number, ask)

    for number in (1, 2, 3, 4, 4, 3, 1):
        assert await answer(number) == number
    assert requests == [1, 2, 3, 4, 1]
    assert MAX_RIGHTS < 100_000


@pytest.mark.parametrize(
    ("user", "uids", "is_pod"),
    [
        ("system:serviceaccount:ml:default", ("u-1",), True),
        ("system:serviceaccount:ml:default", ("u-2",), False),
        ("system:serviceaccount:ml:default", ("u-1", "u-2"), False),
        ("system:serviceaccount:ml:default", (), False),
        ("system:serviceaccount:ml2:default", ("u-1",), False),
        ("jane", ("u-1",), False),
    ],
)
def test_token_bound_to_a_pod_identifies_the_pod(user: str, uids: tuple[str, ...], *, is_pod: bool) -> None:
    assert Caller(user, extra={POD_UID: uids}).is_pod("ml", "u-1") is is_pod


async def test_open_route_has_no_caller(app: GuardedApp) -> None:
    async def handler(request: Request) -> Response:
        return PlainTextResponse(caller_of(request).user)

    asgi = application(Metrics(), get("/careless", handler, Guard.OPEN), gate=app.gate)
    with pytest.raises(AttributeError):
        await client_of(asgi).get("/careless")
