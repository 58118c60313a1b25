"""The leader acts, and has stopped before another process can take the Lease."""

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
from webhook.kube.election import CANCEL_INTERVAL, RELEASE_TIMEOUT, TERMS, lead_once
from webhook.kube.lease import Candidate, LeaseTerms
from webhook.kube.requests import ApiUnavailableError, RateLimit, RateLimitedClient

pytestmark = pytest.mark.simulated_time

Raw = dict[str, Any]
SHORT = LeaseTerms(timedelta(seconds=1.5), timedelta(seconds=0.5), timedelta(seconds=0.02))


class Silent(Leases):
    """Answers the first requests and no later ones."""

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
    """No write is in progress."""


class Acting:
    """The leader's task, with the time of its last action."""

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


async def test_leader_without_answers_stops_before_another_can_lead() -> None:
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


async def test_leader_stops_when_another_process_takes_the_lease() -> None:
    leases, acting = Leases(), Acting()
    one = candidate(leases)
    await one.win()
    leases.put({**(leases.lease or {})["spec"], "holderIdentity": "a thief"})
    async with asyncio.timeout(30):
        await lead_once(one, acting.lead, at_once)
    assert one.left == timedelta(0)


async def test_task_that_ignores_cancellation_is_cancelled_again() -> None:
    leases, acting = Leases(), Acting(ignores=1)
    one = candidate(leases)
    await one.win()
    leases.is_away = True
    async with asyncio.timeout(30 * CANCEL_INTERVAL):
        await lead_once(one, acting.lead, at_once)


async def test_lease_is_left_to_others_when_lead_ends_by_a_bug() -> None:
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


async def test_lead_has_stopped_when_cancellation_returns() -> None:
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
    """Records when the Lease was released."""

    given_back_at = 0.0

    def put(self, spec: Raw) -> None:
        super().put(spec)
        if spec.get("holderIdentity") == "":
            self.given_back_at = asyncio.get_running_loop().time()


async def told_to_stop(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await task


async def test_stopped_leader_releases_the_lease_after_its_last_write() -> None:
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
    asyncio.get_running_loop().call_later(2 * CANCEL_INTERVAL, under_way.set)
    await told_to_stop(task)
    assert acting.last <= rested_at <= leases.given_back_at
    await other.win()
    assert leases.holder == other.identity
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 2


async def test_lease_is_not_released_while_a_write_is_in_progress() -> None:
    leases, acting = Watched(), Acting()
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, asyncio.Event().wait))
    await acting.has_begun.wait()
    await told_to_stop(task)
    assert leases.holder == one.identity
    assert not leases.given_back_at


async def test_lost_lease_is_not_released() -> None:
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


async def test_silent_api_server_does_not_delay_the_stop() -> None:
    leases, acting = Silent(), Acting()
    leases.put({})
    one = candidate(leases)
    await one.win()
    task = asyncio.ensure_future(lead_once(one, acting.lead, at_once))
    await acting.has_begun.wait()
    await told_to_stop(task)


def test_stop_takes_less_than_the_termination_grace_period() -> None:
    kubernetes_waits = 30
    assert kubernetes_waits / 2 > 2 * CANCEL_INTERVAL + RELEASE_TIMEOUT


async def test_unreadable_token_counts_as_unavailable_api_server(tmp_path: Path) -> None:
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    vars(configuration)["refresh_api_key_hook"] = token_reader(tmp_path / "none")
    async with client.ApiClient(configuration) as api:
        with pytest.raises(ApiUnavailableError):
            await RateLimitedClient(api, RateLimit(1, 1, lambda: 0.0)).call("GET", "/version", {})


def test_renew_deadline_and_stop_fit_the_lease_duration() -> None:
    assert TERMS.renew_deadline + timedelta(seconds=2 * CANCEL_INTERVAL) < TERMS.duration
