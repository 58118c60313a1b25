"""Who is elected acts, and whoever has lost the Lease has stopped before another can have it."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client

from tests.kube.test_lease import Leases
from webhook.kube.client import token_reader
from webhook.kube.election import FAREWELL, INSISTENCE, TERMS, lead_once
from webhook.kube.lease import Candidate, LeaseTerms
from webhook.kube.requests import ApiUnavailableError, RateLimit, RateLimitedClient

Raw = dict[str, Any]
SHORT = LeaseTerms(timedelta(seconds=1.5), timedelta(seconds=0.5), timedelta(seconds=0.02))


class Silent(Leases):
    """Its first answers come; from then on it says nothing for ever."""

    answers = 2

    async def call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None = None) -> Raw | None:
        if not self.answers:
            await asyncio.Event().wait()
        self.answers -= 1
        return await super().call(method, path, names, body)


def candidate(leases: Leases, pod: str = "a", terms: LeaseTerms = SHORT) -> Candidate:
    now = asyncio.get_running_loop().time
    return Candidate(leases, "n", "l", pod, terms, lambda: datetime(2026, 1, 1, tzinfo=UTC), now)


async def at_once() -> None:
    """Nothing is under way."""


class Acting:
    """What the elected one does, and when it did it last."""

    def __init__(self, ignores: int = 0) -> None:
        self.last = 0.0
        self.has_begun = asyncio.Event()
        self._ignores = ignores

    async def lead(self) -> None:
        while True:
            self.last = asyncio.get_running_loop().time()
            self.has_begun.set()
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self._ignores -= 1
                if self._ignores < 0:
                    raise


async def test_who_hears_nothing_of_its_lease_acts_no_more_before_another_can() -> None:
    leases, acting = Silent(), Acting()
    leases.put({})
    one = candidate(leases)
    await one.win()
    async with asyncio.timeout(30):
        await lead_once(one, acting.lead, at_once)
    assert one.left > timedelta(0)
    stopped = acting.last
    await asyncio.sleep(0.05)
    assert acting.last == stopped


async def test_a_lease_that_another_has_ends_what_is_done() -> None:
    leases, acting = Leases(), Acting()
    one = candidate(leases)
    await one.win()
    leases.put({**(leases.lease or {})["spec"], "holderIdentity": "a thief"})
    async with asyncio.timeout(30):
        await lead_once(one, acting.lead, at_once)
    assert one.left == timedelta(0)


async def test_who_goes_on_though_cancelled_is_cancelled_again() -> None:
    leases, acting = Leases(), Acting(ignores=1)
    one = candidate(leases)
    await one.win()
    leases.is_away = True
    async with asyncio.timeout(30 * INSISTENCE):
        await lead_once(one, acting.lead, at_once)


async def test_who_leads_no_more_by_a_bug_leaves_the_lease_to_others() -> None:
    async def lead() -> None:
        raise RuntimeError("a bug")

    leases = Leases()
    one, other = candidate(leases), candidate(leases, "b")
    await one.win()
    waiting = asyncio.ensure_future(other.win())
    async with asyncio.timeout(30):
        await lead_once(one, lead, at_once)
        assert one.left == timedelta(0)
        await waiting
    assert leases.holder == other.identity


async def test_told_to_stop_it_has_stopped_when_that_returns() -> None:
    leases, acting = Leases(), Acting()
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, at_once))
    async with asyncio.timeout(30):
        await acting.has_begun.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    stopped = acting.last
    await asyncio.sleep(0.05)
    assert acting.last == stopped


class Watched(Leases):
    """Knows when the Lease was given back."""

    given_back_at = 0.0

    def put(self, spec: Raw) -> None:
        super().put(spec)
        if spec.get("holderIdentity") == "":
            self.given_back_at = asyncio.get_running_loop().time()


async def told_to_stop(task: "asyncio.Future[None]") -> None:
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_told_to_stop_it_gives_the_lease_back_after_its_last_act() -> None:
    leases, acting, under_way = Watched(), Acting(ignores=1), asyncio.Event()
    rested_at = 0.0

    async def rest() -> None:
        nonlocal rested_at
        await under_way.wait()
        rested_at = asyncio.get_running_loop().time()

    one, other = candidate(leases), candidate(leases, "b")
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, rest))
    await acting.has_begun.wait()
    asyncio.get_running_loop().call_later(2 * INSISTENCE, under_way.set)
    await told_to_stop(task)
    assert acting.last <= rested_at <= leases.given_back_at
    await other.win()
    assert leases.holder == other.identity
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 2


async def test_while_something_is_under_way_the_lease_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webhook.kube.election.FAREWELL", 0.05)
    leases, acting = Watched(), Acting()
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, asyncio.Event().wait))
    await acting.has_begun.wait()
    await told_to_stop(task)
    assert leases.holder == one.identity
    assert not leases.given_back_at


async def test_a_lease_that_was_lost_is_not_given_back() -> None:
    leases, acting = Watched(), Acting()
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, at_once))
    await acting.has_begun.wait()
    leases.put({**(leases.lease or {})["spec"], "holderIdentity": "a thief"})
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert leases.holder == "a thief"


async def test_an_api_server_that_says_nothing_holds_up_no_stop() -> None:
    leases, acting = Silent(), Acting()
    leases.put({})
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, at_once))
    await acting.has_begun.wait()
    await told_to_stop(task)


def test_a_leader_that_is_told_to_stop_has_stopped_before_it_is_killed() -> None:
    kubernetes_waits = 30
    assert kubernetes_waits / 2 > 2 * INSISTENCE + FAREWELL


async def test_a_token_that_cannot_be_read_now_is_an_api_server_that_is_away(tmp_path: Path) -> None:
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    vars(configuration)["refresh_api_key_hook"] = token_reader(tmp_path / "none")
    async with client.ApiClient(configuration) as api:
        with pytest.raises(ApiUnavailableError):
            await RateLimitedClient(api, RateLimit(1, 1, lambda: 0.0)).call("GET", "/version", {})


def test_a_leader_has_stopped_before_its_lease_is_over() -> None:
    assert TERMS.renew_deadline + timedelta(seconds=2 * INSISTENCE) < TERMS.duration
