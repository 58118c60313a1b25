"""How many GPUs may be pending for reviews of unauthenticated callers, and how long a review waits."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from tests.builders import NOW
from webhook.admission.pending_limits import HINT, PendingLimits
from webhook.admission.reserving import FOR_THE_WRITE, Reserver
from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.errors import LedgerUnavailableError
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.reservation import Orphan, PodIdentity, PodProof, Reservation, ReservationId, ReservationRequest
from webhook.core.verdict import Deny
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import MarkOrphaned, Times
from webhook.runtime.telemetry import Metrics

pytestmark = pytest.mark.simulated_time

DEADLINE, SKEW = timedelta(seconds=15), timedelta(seconds=5)
SOON = timedelta(seconds=5)
BRIEF = timedelta(seconds=0.05)


class SlowLedger(MemoryLedger):
    """Writes yield to other tasks, as with a remote store."""

    fails = False

    async def reserve(self, *args: object, **options: object) -> Reservation:
        await asyncio.sleep(0)
        if self.fails:
            raise LedgerUnavailableError("away")
        return await super().reserve(*args, **options)  # type: ignore[arg-type]  # passed on as they are


class Scene:
    """A Reserver over nodes with eight GPUs each."""

    def __init__(
        self, *, limit: int = 0, percent: int = 0, nodes: int = 1, orphans: int = 0, most_waiting: int = 1000
    ) -> None:
        self.now = NOW
        fleet = Fleet()
        for n in range(nodes):
            fleet.put(Node(f"node-{n}", devices=tuple(Device(DeviceUuid(f"GPU-{n}-{k}")) for k in range(8))), NOW)
        self.ledger = SlowLedger(fleet, lambda: self.now, Times(DEADLINE, SKEW))
        self.known = {"ml", "other", "third"}
        self.reserver = Reserver(
            fleet,
            self.ledger,
            EvidencePolicy(is_always_required=False),
            lambda: self.now,
            Metrics(),
            limits=PendingLimits(limit, percent, orphans, most_waiting),
            is_known=lambda name: name in self.known,
        )

    async def ask(
        self, number: int, namespace: str = "ml", *, gpus: int = 1, patience: timedelta = timedelta(0)
    ) -> Reservation | Deny:
        claim = Claim(ClaimRecord(gpus=gpus))
        ask = ReservationRequest(ReservationId(f"r{number}"), namespace, claim.digest)
        return await self.reserver.reserve(ask, claim, answer_by=self.now + FOR_THE_WRITE + patience)

    async def create_pod(self, number: int, namespace: str = "ml") -> None:
        await self.ledger.bind_to_pod(
            PodProof.REPORTED, ReservationId(f"r{number}"), PodIdentity(namespace, f"pod-{number}", f"u{number}")
        )


async def settled() -> None:
    """Lets every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def reasons(*answers: Reservation | Deny) -> list[Reason | None]:
    return [one.reason if isinstance(one, Deny) else None for one in answers]


FULL, POOL_FULL = Reason.NAMESPACE_FULL, Reason.PENDING_FULL


# One namespace.


async def test_namespace_at_its_limit_is_denied() -> None:
    scene = Scene(limit=2)
    assert reasons(*[await scene.ask(number) for number in range(4)]) == [None, None, FULL, FULL]
    assert reasons(await scene.ask(9, "other")) == [None]


async def test_limit_counts_gpus_not_reservations() -> None:
    scene = Scene(limit=4)
    assert reasons(*[await scene.ask(number, gpus=2) for number in range(3)]) == [None, None, FULL]


async def test_claim_above_the_limit_fits_if_it_is_alone() -> None:
    scene = Scene(limit=2)
    assert reasons(await scene.ask(1, gpus=4), await scene.ask(2)) == [None, FULL]


async def test_unknown_namespaces_share_one_limit() -> None:
    scene = Scene(limit=2)
    answers = [await scene.ask(number, f"invented-{number}") for number in range(4)]
    assert reasons(*answers) == [None, None, FULL, FULL]
    assert reasons(await scene.ask(9)) == [None]
    scene.known.add("invented-3")
    assert reasons(await scene.ask(10, "invented-3")) == [None]


@pytest.mark.parametrize("name", ["ml", "invented-{}"])
async def test_concurrent_reviews_stay_within_the_limit(name: str) -> None:
    scene = Scene(limit=3)
    answers = await asyncio.gather(*(scene.ask(number, name.format(number)) for number in range(8)))
    assert Counter(reasons(*answers)) == {None: 3, FULL: 5}


async def test_repeated_review_finds_its_reservation_in_a_full_namespace() -> None:
    scene = Scene(limit=1)
    first = await scene.ask(1)
    assert await scene.ask(1) == first


async def test_reported_uid_does_not_make_room() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    await scene.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), PodIdentity("ml", "a", "uid-1"))
    assert reasons(await scene.ask(2)) == [FULL]


async def test_existing_pod_makes_room() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    await scene.create_pod(1)
    assert reasons(await scene.ask(2)) == [None]


async def test_unused_reservation_makes_room_at_its_deadline() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    scene.now += DEADLINE + SKEW
    assert reasons(await scene.ask(2)) == [None]


async def test_failed_write_is_not_counted() -> None:
    scene = Scene(limit=1)
    scene.ledger.fails = True
    assert reasons(await scene.ask(1)) == [Reason.LEDGER_AWAY]
    scene.ledger.fails = False
    assert reasons(await scene.ask(2)) == [None]


@pytest.mark.parametrize("limit", [0, 9])
async def test_absent_or_wide_limit_denies_nothing(limit: int) -> None:
    scene = Scene(limit=limit)
    answers = [await scene.ask(number) for number in range(9)]
    assert reasons(*answers) == [None] * 8 + [Reason.NO_FREE_DEVICE]


async def test_denial_of_a_full_namespace_has_a_hint() -> None:
    scene = Scene(limit=1, percent=50)
    await scene.ask(1)
    assert await scene.ask(2) == Deny(
        FULL,
        "namespace 'ml' has reached its limit of GPUs reserved for pods that do not exist yet: 1",
        hint=HINT,
    )


# Several namespaces.


async def test_one_namespace_leaves_room_to_others() -> None:
    scene = Scene(percent=50, nodes=2)
    numbers = iter(range(99))
    answers = {name: [await scene.ask(next(numbers), name) for _ in range(5)] for name in ("ml", "other", "third")}
    taken = {name: sum(isinstance(one, Reservation) for one in found) for name, found in answers.items()}
    assert taken == {"ml": 3, "other": 1, "third": 1}
    assert {one for found in answers.values() for one in reasons(*found)} == {None, POOL_FULL}


async def test_named_pods_make_room_for_more_but_never_for_the_whole_pool() -> None:
    """A forged review may name a pod too."""
    scene = Scene(percent=50, nodes=2)
    for number in range(8):
        if isinstance(await scene.ask(number), Reservation):
            await scene.ledger.bind_to_pod(
                PodProof.NAMED, ReservationId(f"r{number}"), PodIdentity("ml", f"p{number}", f"u{number}")
            )
    assert scene.ledger.pending.gpus_in("ml") == 5
    assert reasons(await scene.ask(9, "other")) == [None]


async def test_invented_namespaces_share_the_limit_of_one() -> None:
    scene = Scene(percent=50, nodes=2)
    answers = [await scene.ask(number, f"invented-{number}") for number in range(8)]
    assert Counter(reasons(*answers)) == {None: 2, POOL_FULL: 6}


async def test_claim_above_half_the_pool_is_served_one_at_a_time_beside_the_pool() -> None:
    scene = Scene(percent=50, nodes=2)
    assert reasons(await scene.ask(1, gpus=6), await scene.ask(2, "other", gpus=6)) == [None, POOL_FULL]
    assert reasons(*[await scene.ask(number) for number in range(3, 7)]) == [None] * 3 + [POOL_FULL]
    await scene.create_pod(1)
    assert reasons(await scene.ask(8, "other", gpus=7)) == [None]


@pytest.mark.parametrize("percent", [1, 50])
async def test_one_reservation_fits_on_the_smallest_fleet(percent: int) -> None:
    scene = Scene(percent=percent)
    assert reasons(await scene.ask(1, gpus=8)) == [None]


async def test_unsatisfiable_claim_is_denied_without_waiting() -> None:
    scene = Scene(percent=50)
    for number in range(8):
        await scene.ask(number, patience=SOON)
        await scene.create_pod(number)
    await scene.ledger.release(ReservationId("r0"), PodIdentity("ml", "pod-0", "u0"))
    await scene.ask(10)
    assert reasons(await scene.ask(11, patience=SOON)) == [Reason.NO_FREE_DEVICE]


async def test_two_replicas_leave_a_first_reservation_to_each_namespace() -> None:
    """Neither replica knows the latest reservations of the other."""
    houses = [Scene(percent=50) for _ in range(2)]
    reserve_room = [await asyncio.gather(*(one.ask(number, patience=BRIEF) for number in range(8))) for one in houses]
    assert sum(isinstance(one, Reservation) for answers in reserve_room for one in answers) <= 3


# Waiting.


async def test_review_without_room_waits_until_a_pod_is_seen() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    waiting = asyncio.create_task(scene.ask(2, patience=SOON))
    await asyncio.sleep(0)
    await scene.create_pod(1)
    assert reasons(await waiting) == [None]


async def test_last_waiting_review_is_served_too() -> None:
    """Even if no review was waiting for a moment."""
    scene = Scene(limit=1)
    await scene.ask(0)
    for number in range(1, 20):
        waiting = asyncio.create_task(scene.ask(number, patience=SOON))
        await asyncio.sleep(0)
        await scene.create_pod(number - 1)
        await scene.ledger.release(ReservationId(f"r{number - 1}"), PodIdentity("ml", "", f"u{number - 1}"))
        assert reasons(await waiting) == [None]


async def test_reservation_that_expires_while_reviews_wait_makes_room() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    waiting = asyncio.create_task(scene.ask(2, patience=SOON))
    await asyncio.sleep(0)
    scene.now += DEADLINE + SKEW
    answer = await waiting
    assert reasons(answer) == [Reason.DEADLINE_PASSED]  # by the test's clock its review is over
    assert not scene.ledger.pending.gpus_in("ml")


async def test_review_is_denied_after_its_wait_and_leaves_nothing_counted() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    assert reasons(await scene.ask(2, patience=BRIEF)) == [FULL]
    await scene.create_pod(1)
    assert reasons(await scene.ask(3)) == [None]


async def test_cancelled_waiting_review_leaves_nothing_counted() -> None:
    scene = Scene(limit=1)
    await scene.ask(1)
    waiting = asyncio.create_task(scene.ask(2, patience=SOON))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await scene.create_pod(1)
    assert reasons(await scene.ask(3)) == [None]


async def test_job_with_many_pods_is_never_denied() -> None:
    scene = Scene(percent=50, nodes=40)
    numbers = range(300)

    async def created(number: int) -> Reservation | Deny:
        answer = await scene.ask(number, patience=SOON)
        await asyncio.sleep(0)
        if isinstance(answer, Reservation):
            await scene.create_pod(number)
        return answer

    answers = await asyncio.gather(*map(created, numbers))
    assert Counter(reasons(*answers)) == {None: 300}


async def test_queues_of_namespaces_take_turns() -> None:
    """No matter how many reviews of one namespace came first."""
    scene = Scene(percent=50, nodes=2)
    for number in range(2):
        await scene.ask(number)
    for number in range(4, 6):
        await scene.ask(number, "other")
    flood = [asyncio.create_task(scene.ask(100 + n, patience=SOON)) for n in range(50)]
    await asyncio.sleep(0)
    late = asyncio.create_task(scene.ask(99, "third", patience=SOON))
    answer = await late
    assert reasons(answer) == [None]
    assert not any(one.done() for one in flood)
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_last_review_of_the_longest_queue_is_dropped_when_too_many_wait() -> None:
    scene = Scene(limit=1, most_waiting=10)
    for number, name in enumerate(("ml", "other")):
        await scene.ask(number, name)
    flood = [asyncio.create_task(scene.ask(100 + n, patience=SOON)) for n in range(30)]
    await settled()
    assert sum(one.done() for one in flood) == 20
    late = asyncio.create_task(scene.ask(99, "other", patience=SOON))
    await settled()
    assert sum(one.done() for one in flood) == 21
    assert not late.done()
    await scene.create_pod(1, "other")
    assert reasons(await late) == [None]
    for one in flood:
        one.cancel()
    done = await asyncio.gather(*flood, return_exceptions=True)
    assert Counter(reasons(*(one for one in done if isinstance(one, Deny)))) == {FULL: 21}


@pytest.mark.parametrize("limit", [0, 100], ids=["callers prove who they are", "they do not"])
async def test_namespace_at_its_limit_of_orphans_is_denied(limit: int) -> None:
    scene = Scene(limit=limit, orphans=3, nodes=2)
    for number in range(4):
        await scene.ask(number)
        await scene.create_pod(number)
    assert reasons(await scene.ask(4)) == [None]
    for number in (1, 2):
        orphaned(scene, number)
    assert reasons(await scene.ask(5, gpus=2), await scene.ask(6), await scene.ask(7, "other")) == [FULL, None, None]
    orphaned(scene, 3)
    full = await scene.ask(8, patience=SOON)
    assert isinstance(full, Deny)
    assert full.sentence == (
        "namespace 'ml' has 3 GPUs held by pods that are gone and may still run: with 1 more it would be above 3; "
        "wait until they are free, or ask an administrator to release them (gpuwarden release)"
    )


async def test_namespace_without_orphans_is_not_limited() -> None:
    scene = Scene(orphans=3, nodes=10)
    assert reasons(*[await scene.ask(number) for number in range(80)]) == [None] * 80
    assert reasons(await Scene(orphans=3).ask(1, gpus=8)) == [None]


async def test_claim_without_gpus_ignores_the_limit_of_orphans() -> None:
    scene = Scene(orphans=1)
    await scene.ask(1)
    await scene.create_pod(1)
    orphaned(scene, 1)
    assert reasons(await scene.ask(2, gpus=0)) == [None]


def orphaned(scene: Scene, number: int) -> None:
    """Its pod was deleted by force."""
    (one,) = (one for one in scene.ledger.reservations() if one.id == f"r{number}")
    gone = MarkOrphaned(
        one.id, PodIdentity("ml", f"pod-{number}", f"u{number}"), one.since, Orphan(NOW, timedelta(hours=1))
    )
    scene.ledger._index.make(one.node, gone, NOW, Times(DEADLINE, SKEW))
