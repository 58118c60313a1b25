"""Who may call what: routes behind the gate, and an API server that knows the callers."""

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
    REMEMBERED,
    RIGHT_REMEMBERED,
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
    """Knows some tokens and rights, and remembers what it was asked."""

    known: dict[str, Caller] = field(factory=lambda: {"good": JANE})
    rights: set[tuple[str, Right]] = field(factory=set)
    asked: list[tuple[str, str | None]] = field(factory=list)
    asked_rights: list[Right] = field(factory=list)
    is_away: bool = False

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        if self.is_away:
            raise CallersUnavailableError("away")
        self.asked.append((token, audience))
        return self.known.get(token)

    async def may(self, caller: Caller, right: Right) -> bool:
        self.asked_rights.append(right)
        return (caller.user, right) in self.rights


class House:
    """One route for each guard."""

    def __init__(self, authority: Authority | None, reviewers: Reviewers | None = None, **options: bool) -> None:
        self.now = NOW
        self.metrics = Metrics()
        self.gate = CallerGate(lambda: self.now, authority, reviewers, **options)
        routes = [get(f"/{guard}", page, guard) for guard in Guard]
        self.app = application(self.metrics, *routes, gate=self.gate)
        self.client = client_of(self.app)

    async def get(self, guard: Guard, authorization: str | None = None) -> httpx.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        return await self.client.get(f"/{guard}", headers=headers)


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://house")


async def page(request: Request) -> Response:
    return PlainTextResponse("in")


def password(token: str) -> str:
    return "Basic " + base64.b64encode(f"anything:{token}".encode()).decode()


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def house(api: ApiServer) -> House:
    return House(api)


async def test_without_an_authority_everybody_comes_in_everywhere() -> None:
    house = House(None)
    for guard in Guard:
        assert (await house.get(guard)).text == "in"
    assert await house.gate.may(Caller("anybody"), list_pods("ml"))


async def test_who_is_known_comes_in_and_open_routes_ask_nobody(house: House, api: ApiServer) -> None:
    assert (await house.get(Guard.OPEN, "Bearer bad")).text == "in"
    assert (await house.get(Guard.REVIEWER)).text == "in"
    assert api.asked == []
    for guard in (Guard.CALLER, Guard.PERSON, Guard.SCHEDULER):
        assert (await house.get(guard, "Bearer good")).text == "in"
        assert (await house.get(guard)).status_code == 401
    assert api.asked == [("good", None)]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic Z29vZA==", password("good"), "good", "Bearer " + "x" * (MAX_TOKEN + 1)],
    ids=["nothing", "empty", "no token", "an empty token", "no pair", "a password", "no scheme", "too long"],
)
async def test_what_is_no_token_is_refused_without_asking(
    house: House, api: ApiServer, authorization: str | None
) -> None:
    got = await house.get(Guard.CALLER, authorization)
    assert (got.status_code, got.headers["www-authenticate"]) == (401, "Bearer")
    assert got.json() == {"error": "a bearer token is needed that the API server knows and that is for this"}
    assert api.asked == []


async def test_a_person_may_send_the_token_as_a_password(house: House, api: ApiServer) -> None:
    assert (await house.get(Guard.PERSON)).headers["www-authenticate"] == 'Basic realm="gpuwarden", Bearer'
    assert (await house.get(Guard.PERSON, password("good"))).text == "in"
    for broken in ("Basic !", "Basic /w==", "Basic " + "x" * 4 * MAX_TOKEN, password("bad")):
        assert (await house.get(Guard.PERSON, broken)).status_code == 401
    assert api.asked == [("good", None), ("bad", None)]


async def test_who_is_not_known_is_refused_and_counted(house: House, api: ApiServer) -> None:
    assert (await house.get(Guard.CALLER, "Bearer bad")).status_code == 401
    assert api.asked == [("bad", None)]
    assert b'gpuwarden_http_requests_total{route="/caller",status="401"} 1.0' in house.metrics.render()[0]


async def test_a_known_token_is_asked_about_again_after_a_while(house: House, api: ApiServer) -> None:
    for _ in range(3):
        await house.get(Guard.CALLER, "Bearer good")
    assert api.asked == [("good", None)]
    api.known.clear()
    house.now += REMEMBERED - timedelta(seconds=1)
    assert (await house.get(Guard.CALLER, "Bearer good")).status_code == 200
    house.now += timedelta(seconds=1)
    assert (await house.get(Guard.CALLER, "Bearer good")).status_code == 401


async def test_a_refused_token_may_be_known_the_next_time(house: House, api: ApiServer) -> None:
    assert (await house.get(Guard.CALLER, "Bearer late")).status_code == 401
    api.known["late"] = JANE
    assert (await house.get(Guard.CALLER, "Bearer late")).status_code == 200


async def test_while_nobody_can_be_asked_nobody_comes_in_and_it_is_worth_another_try(
    house: House, api: ApiServer
) -> None:
    api.is_away = True
    got = await house.get(Guard.CALLER, "Bearer good")
    assert (got.status_code, got.headers["retry-after"]) == (503, "1")


async def test_a_token_for_the_api_server_is_none_for_reviews(api: ApiServer) -> None:
    house = House(api, Reviewers("gpuwarden", ("jane",)))
    assert (await house.get(Guard.CALLER, "Bearer good")).text == "in"
    assert (await house.get(Guard.REVIEWER, "Bearer good")).text == "in"
    assert api.asked == [("good", None), ("good", "gpuwarden")]  # each is asked about by itself
    other = House(api, Reviewers("gpuwarden", ("joe",)))
    assert (await other.get(Guard.REVIEWER, "Bearer good")).status_code == 401
    assert (await other.get(Guard.REVIEWER)).status_code == 401


@pytest.mark.parametrize("api", [None, ApiServer()], ids=["embedded", "a cluster"])
async def test_a_certificate_is_demanded_of_reviewers_and_of_nobody_else(api: ApiServer | None) -> None:
    house = House(api, Reviewers(with_certificate=True))

    async def with_certificate(scope: Scope, receive: Receive, send: Send) -> None:
        await house.app({**scope, CLIENT_CERTIFICATE: True}, receive, send)

    assert (await house.get(Guard.REVIEWER)).status_code == 403
    assert (await house.get(Guard.CALLER, "Bearer good")).text == "in"
    assert (await client_of(with_certificate).get("/reviewer")).text == "in"


async def test_schedulers_show_a_certificate_or_a_token(api: ApiServer) -> None:
    assert (await House(api).get(Guard.SCHEDULER)).status_code == 401
    house = House(api, schedulers_show_certificates=True)
    assert (await house.get(Guard.SCHEDULER)).text == "in"
    assert (await house.get(Guard.CALLER)).status_code == 401


async def test_a_right_is_remembered_for_seconds(house: House, api: ApiServer) -> None:
    api.rights = {("jane", list_pods("ml"))}
    for _ in range(3):
        assert await house.gate.may(JANE, list_pods("ml"))
        assert not await house.gate.may(JANE, list_pods("other"))
    assert len(api.asked_rights) == 2
    assert not await house.gate.may(Caller("joe"), list_pods("ml"))
    api.rights.clear()
    house.now += RIGHT_REMEMBERED
    assert not await house.gate.may(JANE, list_pods("ml"))


async def test_so_much_is_remembered_and_no_more() -> None:
    now: list[datetime] = [NOW]
    remembered: TtlCache[int, int] = TtlCache(lambda: now[0], timedelta(seconds=1), 3)
    asked: list[int] = []

    async def answer(number: int) -> int:
        async def ask() -> int:
            asked.append(number)
            return number

        return await remembered.get(number, ask)

    for number in (1, 2, 3, 4, 4, 3, 1):
        assert await answer(number) == number
    assert asked == [1, 2, 3, 4, 1]
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
def test_a_token_that_is_bound_to_a_pod_is_the_pods(user: str, uids: tuple[str, ...], *, is_pod: bool) -> None:
    assert Caller(user, extra={POD_UID: uids}).is_pod("ml", "u-1") is is_pod


async def test_a_route_that_no_caller_was_asked_for_knows_none(house: House) -> None:
    async def careless(request: Request) -> Response:
        return PlainTextResponse(caller_of(request).user)

    app = application(Metrics(), get("/careless", careless, Guard.OPEN), gate=house.gate)
    with pytest.raises(AttributeError):
        await client_of(app).get("/careless")
