"""How much of a namespace may wait for its pods at once."""

import asyncio
from datetime import timedelta

import pytest

from tests.builders import NOW
from webhook.core.claim import Claim, ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.errors import LedgerUnavailableError
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.reservation import Ask, PodIdentity, Reservation, ReservationId
from webhook.core.verdict import Deny
from webhook.holding import Holder
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.telemetry import Metrics

DEADLINE, SKEW = timedelta(seconds=90), timedelta(seconds=5)
CLAIM = Claim(ClaimRecord(gpus=1))


class SlowLedger(MemoryLedger):
    """Writes take as long as it takes others to ask, as in a store that is elsewhere."""

    fails = False

    async def reserve(self, *args: object, **options: object) -> Reservation:
        await asyncio.sleep(0)
        if self.fails:
            raise LedgerUnavailableError("away")
        return await super().reserve(*args, **options)  # type: ignore[arg-type]  # passed on as they are


class House:
    """A holder over one node with eight GPUs."""

    def __init__(self, limit: int) -> None:
        self.now = NOW
        fleet = Fleet()
        fleet.put(Node("node-a", devices=tuple(Device(DeviceUuid(f"GPU-{k}")) for k in range(8))), NOW)
        self.ledger = SlowLedger(fleet, lambda: self.now, Times(DEADLINE, SKEW))
        policy = EvidencePolicy(is_always_required=False)
        self.holder = Holder(fleet, self.ledger, policy, lambda: self.now, Metrics(), pending_limit=limit)

    async def ask(self, number: int, namespace: str = "ml") -> Reservation | Deny:
        ask = Ask(ReservationId(f"r{number}"), namespace, CLAIM.digest)
        return await self.holder.hold(ask, CLAIM, answer_by=self.now + timedelta(seconds=10))


def reasons(answers: list[Reservation | Deny]) -> list[Reason | None]:
    return [one.reason if isinstance(one, Deny) else None for one in answers]


FULL = Reason.NAMESPACE_FULL


async def test_a_namespace_that_has_as_much_waiting_as_it_may_gets_no_more() -> None:
    house = House(limit=2)
    assert reasons([await house.ask(number) for number in range(4)]) == [None, None, FULL, FULL]
    assert reasons([await house.ask(9, "other")]) == [None]
    assert house.ledger.waiting_in("ml") == 2


async def test_of_many_at_once_no_more_wait_than_may() -> None:
    house = House(limit=3)
    answers = await asyncio.gather(*(house.ask(number) for number in range(8)))
    assert sorted(map(str, reasons(answers))) == [*["NamespaceFull"] * 5, *["None"] * 3]
    assert house.ledger.waiting_in("ml") == 3


async def test_the_same_review_again_finds_its_reservation_in_a_full_namespace() -> None:
    house = House(limit=1)
    first = await house.ask(1)
    assert await house.ask(1) == first


async def test_a_uid_that_anybody_could_make_up_makes_no_room() -> None:
    house = House(limit=1)
    await house.ask(1)
    await house.ledger.bind(ReservationId("r1"), PodIdentity("ml", "a", "uid-1"))
    assert reasons([await house.ask(2)]) == [FULL]


async def test_a_pod_that_exists_makes_room() -> None:
    house = House(limit=1)
    await house.ask(1)
    await house.ledger.finalize(ReservationId("r1"), PodIdentity("ml", "a", "uid-1"))
    assert reasons([await house.ask(2)]) == [None]


async def test_what_nobody_came_for_makes_room_at_its_deadline() -> None:
    house = House(limit=1)
    await house.ask(1)
    house.now += DEADLINE + SKEW
    assert reasons([await house.ask(2)]) == [None]


async def test_a_failed_write_leaves_nothing_counted() -> None:
    house = House(limit=1)
    house.ledger.fails = True
    assert reasons([await house.ask(1)]) == [Reason.LEDGER_AWAY]
    house.ledger.fails = False
    assert reasons([await house.ask(2)]) == [None]


@pytest.mark.parametrize("limit", [0, 9])
async def test_no_limit_or_a_wide_one_is_not_felt(limit: int) -> None:
    house = House(limit)
    assert reasons([await house.ask(number) for number in range(9)]) == [None] * 8 + [Reason.NO_FREE_DEVICE]


async def test_the_denial_says_what_to_do() -> None:
    house = House(limit=1)
    await house.ask(1)
    denial = await house.ask(2)
    assert denial == Deny(
        FULL,
        "in namespace 'ml' as many reservations wait for their pods as may at once: 1",
        hint="try again when they have come or their time is over",
    )
