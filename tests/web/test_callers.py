"""Who may call what: an app behind the guard, and whoever knows the callers."""

from datetime import timedelta

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.builders import NOW
from webhook.telemetry import Metrics
from webhook.web.callers import MAX_TOKEN, REMEMBERED, CallersUnavailableError, Guarded


class Gate:
    """Two pages, one of them for known callers."""

    def __init__(self) -> None:
        self.known = {"good"}
        self.asked: list[str] = []
        self.is_away = False
        self.now = NOW
        self.metrics = Metrics()
        app = Starlette(routes=[Route("/kept", page), Route("/open", page)])
        guarded = Guarded(app, frozenset({"/kept"}), self.is_authentic, lambda: self.now, self.metrics)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://gate")

    async def is_authentic(self, token: str) -> bool:
        if self.is_away:
            raise CallersUnavailableError("away")
        self.asked.append(token)
        return token in self.known

    async def get(self, path: str, authorization: str | None = None) -> httpx.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        return await self.client.get(path, headers=headers)


async def page(request: Request) -> Response:
    return PlainTextResponse("in")


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_who_is_known_comes_in_and_other_pages_are_open(gate: Gate) -> None:
    assert (await gate.get("/kept", "Bearer good")).text == "in"
    assert (await gate.get("/open")).text == "in"
    assert gate.asked == ["good"]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic Z29vZA==", "good", "Bearer " + "x" * (MAX_TOKEN + 1)],
    ids=["nothing", "empty", "no token", "an empty token", "a password", "no scheme", "too long"],
)
async def test_what_is_no_token_is_refused_without_asking(gate: Gate, authorization: str | None) -> None:
    got = await gate.get("/kept", authorization)
    assert (got.status_code, got.headers["www-authenticate"]) == (401, "Bearer")
    assert got.json() == {"error": "a bearer token is needed that the API server knows and that is for this"}
    assert gate.asked == []


async def test_who_is_not_known_is_refused_and_counted(gate: Gate) -> None:
    assert (await gate.get("/kept", "Bearer bad")).status_code == 401
    assert gate.asked == ["bad"]
    assert b'gpuwarden_http_requests_total{route="/kept",status="401"} 1.0' in gate.metrics.render()[0]


async def test_a_known_token_is_asked_about_again_after_a_while(gate: Gate) -> None:
    for _ in range(3):
        await gate.get("/kept", "Bearer good")
    assert gate.asked == ["good"]
    gate.known.clear()
    gate.now += REMEMBERED - timedelta(seconds=1)
    assert (await gate.get("/kept", "Bearer good")).status_code == 200
    gate.now += timedelta(seconds=1)
    assert (await gate.get("/kept", "Bearer good")).status_code == 401


async def test_a_refused_token_may_be_known_the_next_time(gate: Gate) -> None:
    assert (await gate.get("/kept", "Bearer late")).status_code == 401
    gate.known.add("late")
    assert (await gate.get("/kept", "Bearer late")).status_code == 200


async def test_while_nobody_can_be_asked_nobody_comes_in_and_it_is_worth_another_try(gate: Gate) -> None:
    gate.is_away = True
    got = await gate.get("/kept", "Bearer good")
    assert (got.status_code, got.headers["retry-after"]) == (503, "1")
