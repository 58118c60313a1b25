"""The election, with a Lease in memory and a clock set by the test."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attrs import define

from webhook.kube.lease import Candidate, LeaseTerms
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError

pytestmark = pytest.mark.simulated_time

Raw = dict[str, Any]
TERMS = LeaseTerms(timedelta(seconds=3), timedelta(milliseconds=200), timedelta(milliseconds=10))


@define
class Leases:
    """One Lease; writes are conditional on its version."""

    lease: Raw | None = None
    version: int = 0
    is_away: bool = False
    disturbances: int = 0  # writes of others, each before one of ours
    time: float = 0.0

    def now(self) -> float:
        return self.time

    async def call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None = None) -> Raw | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise ApiUnavailableError("away")
        if method == "GET":
            return self.lease
        assert body is not None
        if method == "POST" and self.lease is not None:
            raise ApiRefusesError(409, "")
        if method == "PUT" and self.disturbances and self.lease is not None:
            self.disturbances -= 1
            self.put(self.lease["spec"])
        if method == "PUT" and body["metadata"]["resourceVersion"] != str(self.version):
            raise ApiRefusesError(409, "")
        self.put(body["spec"])
        return self.lease

    def put(self, spec: Raw) -> None:
        self.version += 1
        self.lease = {"metadata": {"name": "l", "resourceVersion": str(self.version)}, "spec": spec}

    def candidate(self, pod: str, terms: LeaseTerms = TERMS) -> Candidate:
        return Candidate(self, "n", "l", pod, terms, lambda: datetime(2026, 1, 1, tzinfo=UTC), self.now)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


async def has_won(candidate: Candidate) -> bool:
    try:
        async with asyncio.timeout(0.2):
            await candidate.win()
    except TimeoutError:
        return False
    return True


async def test_lease_is_not_taken_before_its_holder_has_given_up() -> None:
    leases = Leases()
    terms = LeaseTerms(timedelta(seconds=2.4), timedelta(seconds=2.3), timedelta(milliseconds=10))
    holder = leases.candidate("a", terms)
    assert await has_won(holder)
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseDurationSeconds"] == 3
    other = leases.candidate("b", terms)
    assert not await has_won(other)
    leases.time = 2.2
    assert holder.left > timedelta(0)
    assert not await has_won(other)


async def test_second_candidate_is_elected_after_release() -> None:
    leases = Leases()
    first, second = leases.candidate("a"), leases.candidate("b")
    assert await has_won(first)
    assert leases.holder == first.identity
    assert not await has_won(second)
    await first.release()
    assert await has_won(second)
    assert leases.lease is not None
    assert leases.lease["spec"]["leaseTransitions"] == 2


async def test_concurrent_candidates_elect_one_leader() -> None:
    leases = Leases()
    done = await asyncio.gather(*(has_won(leases.candidate(f"c{k}")) for k in range(8)))
    assert sum(done) == 1


async def test_expired_lease_is_taken_by_the_own_clock() -> None:
    leases = Leases()
    first, second = leases.candidate("a"), leases.candidate("b")
    assert await has_won(first)
    assert not await has_won(second)
    leases.time = 2.9
    assert not await has_won(second)
    leases.time = 3.1
    assert await has_won(second)


@pytest.mark.defect("gpuid-16")
async def test_leader_gives_up_before_the_lease_expires() -> None:
    leases = Leases()
    first = leases.candidate("a")
    assert await has_won(first)
    holding = asyncio.ensure_future(first.hold())
    await asyncio.sleep(0.05)
    assert not holding.done()
    leases.is_away = True
    leases.time = 0.25
    await asyncio.wait_for(holding, 5)
    assert first.left == timedelta(seconds=2.75)


@pytest.mark.defect("gpuid-16")
async def test_remaining_time_is_zero_after_another_took_the_lease() -> None:
    leases = Leases()
    first = leases.candidate("a")
    assert await has_won(first)
    assert leases.lease is not None
    leases.put({**leases.lease["spec"], "holderIdentity": "a thief"})
    await asyncio.wait_for(first.hold(), 5)
    assert first.left == timedelta(0)
    await first.release()
    assert leases.holder == "a thief"


async def test_renewal_is_retried_after_a_conflict() -> None:
    leases = Leases()
    first = leases.candidate("a")
    assert await has_won(first)
    holding = asyncio.ensure_future(first.hold())
    assert leases.lease is not None
    for _ in range(5):
        leases.put(dict(leases.lease["spec"]))
        await asyncio.sleep(0.02)
    assert not holding.done()
    holding.cancel()


async def test_release_is_retried_after_a_conflict() -> None:
    leases = Leases()
    first = leases.candidate("a")
    assert await has_won(first)
    leases.disturbances = 2
    await first.release()
    assert leases.holder == ""


@pytest.mark.parametrize("disturbances", [0, 100])
async def test_lease_that_cannot_be_released_expires(disturbances: int) -> None:
    leases = Leases()
    first = leases.candidate("a")
    assert await has_won(first)
    leases.is_away, leases.disturbances = not disturbances, disturbances
    await first.release()
    assert leases.holder == first.identity
