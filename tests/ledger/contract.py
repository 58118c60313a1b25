"""The contract of every ledger. Each implementation's test module provides a bench and inherits the cases."""

import asyncio
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Protocol

import pytest

from tests import builders
from webhook.core.device import DeviceUuid, Slot
from webhook.core.errors import (
    DeadlinePassedError,
    ReservationConflictError,
    ReservationExpiredError,
    SlotsTakenError,
    UnknownReservationError,
)
from webhook.core.fleet import Fleet
from webhook.core.reservation import (
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.ledger import Ledger

PENDING_DEADLINE = timedelta(seconds=90)
CLOCK_SKEW = timedelta(seconds=5)
SECOND = timedelta(seconds=1)


class Bench(Protocol):
    """A ledger over node-a (GPU-a0 .. GPU-a3; GPU-s with four shares) and node-b (GPU-b0), under a settable clock."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def fleet(self) -> Fleet: ...

    now: datetime


def ask(
    number: int, *, namespace: str = "ml", digest: str = "d1", pod_name: str | None = None, is_shared: bool = False
) -> ReservationRequest:
    return ReservationRequest(ReservationId(f"r{number}"), namespace, digest, pod_name, is_shared)


def on(node: str, *uuids: str, k: int = 0) -> Placement:
    return Placement(node, tuple(Slot(DeviceUuid(uuid), k) for uuid in uuids))


def pod(number: int, *, namespace: str = "ml", name: str | None = None) -> PodIdentity:
    return PodIdentity(namespace, f"pod-{number}" if name is None else name, f"uid-{number}")


class LedgerContract:
    """The cases. `bench` is the implementation's fixture."""

    async def reserve(self, bench: Bench, what: ReservationRequest, *places: Placement) -> Reservation:
        return await bench.ledger.reserve(what, places, answer_by=bench.now + 10 * SECOND)

    # Reserving.

    async def test_reservation_starts_pending_with_a_deadline_and_no_pod(self, bench: Bench) -> None:
        held = await self.reserve(bench, ask(1, pod_name="pod-1"), on("node-a", "GPU-a0", "GPU-a1"))
        assert held == Reservation(
            id=ReservationId("r1"),
            namespace="ml",
            claim_digest="d1",
            node="node-a",
            slots=(Slot(DeviceUuid("GPU-a0"), 0), Slot(DeviceUuid("GPU-a1"), 0)),
            since=bench.now,
            deadline=bench.now + PENDING_DEADLINE,
            phase=Phase.PENDING,
            pod_name="pod-1",
            uid=None,
        )
        assert await bench.ledger.find(ReservationId("r1")) == held
        assert list(bench.ledger.of_device(DeviceUuid("GPU-a1"))) == [held]

    async def test_devices_are_stored_in_one_order(self, bench: Bench) -> None:
        held = await self.reserve(bench, ask(1), on("node-a", "GPU-a2", "GPU-a0"))
        assert held.uuids == ("GPU-a0", "GPU-a2")
        assert await bench.ledger.find(held.id, node="node-a", is_fresh=True) == held

    @pytest.mark.defect("assigner-1")
    @pytest.mark.defect("binder-3")
    async def test_slot_has_one_live_reservation(self, bench: Bench) -> None:
        first = await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))
        assert list(bench.ledger.of_device(DeviceUuid("GPU-a0"))) == [first]

    async def test_several_devices_are_reserved_together_or_not_at_all(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a1"))
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(2), on("node-a", "GPU-a0", "GPU-a1", "GPU-a2"))
        assert await bench.ledger.find(ReservationId("r2")) is None
        assert not bench.ledger.of_device(DeviceUuid("GPU-a0"))
        assert not bench.ledger.of_device(DeviceUuid("GPU-a2"))

    async def test_next_placement_is_tried_when_one_is_taken(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        second = await self.reserve(bench, ask(2), on("node-a", "GPU-a0"), on("node-b", "GPU-b0"))
        assert (second.node, second.uuids) == ("node-b", ("GPU-b0",))

    @pytest.mark.defect("X-4")
    @pytest.mark.defect("assigner-20")
    async def test_repeated_request_returns_the_same_reservation(self, bench: Bench) -> None:
        first = await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        again = await self.reserve(bench, ask(1), on("node-b", "GPU-b0"))
        assert again == first
        assert not bench.ledger.of_device(DeviceUuid("GPU-b0"))

    @pytest.mark.parametrize(
        "other", [ask(1, namespace="other"), ask(1, digest="d2")], ids=["another namespace", "another claim"]
    )
    async def test_id_is_never_given_to_another_claim(self, bench: Bench, other: ReservationRequest) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        with pytest.raises(ReservationConflictError):
            await self.reserve(bench, other, on("node-a", "GPU-a1"))

    @pytest.mark.defect("assigner-4")
    async def test_concurrent_requests_get_distinct_devices(self, bench: Bench) -> None:
        places = [on("node-a", f"GPU-a{k}") for k in range(4)]
        asks = [self.reserve(bench, ask(number), *places) for number in range(200)]
        results = await asyncio.gather(*asks, return_exceptions=True)
        winners = [one for one in results if isinstance(one, Reservation)]
        assert len(winners) == 4
        assert {one.uuids for one in winners} == {("GPU-a0",), ("GPU-a1",), ("GPU-a2",), ("GPU-a3",)}
        assert all(isinstance(one, Reservation | SlotsTakenError) for one in results)

    async def test_concurrent_identical_requests_reserve_once(self, bench: Bench) -> None:
        places = [on("node-a", f"GPU-a{k}") for k in range(4)]
        results = await asyncio.gather(*(self.reserve(bench, ask(1), *places) for _ in range(50)))
        assert len(set(results)) == 1
        assert sum(len(bench.ledger.of_device(DeviceUuid(f"GPU-a{k}"))) for k in range(4)) == 1

    @pytest.mark.parametrize("late", [timedelta(0), SECOND], ids=["on the moment", "a second late"])
    async def test_nothing_is_written_once_the_caller_has_stopped_waiting(self, bench: Bench, late: timedelta) -> None:
        with pytest.raises(DeadlinePassedError):
            await bench.ledger.reserve(ask(1), [on("node-a", "GPU-a0")], answer_by=bench.now - late)
        assert await bench.ledger.find(ReservationId("r1")) is None

    async def test_shares_of_a_device_are_reserved_one_by_one(self, bench: Bench) -> None:
        for k in range(4):
            await self.reserve(bench, ask(k, is_shared=True), on("node-a", "GPU-s", k=k))
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(9, is_shared=True), on("node-a", "GPU-s", k=3))
        assert [held.id for held in bench.ledger.of_device(DeviceUuid("GPU-s"))] == ["r0", "r1", "r2", "r3"]

    async def test_exclusive_claim_has_the_device_alone(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-s", k=0))
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(2, is_shared=True), on("node-a", "GPU-s", k=1))

    # Naming and confirming the pod.

    async def test_naming_the_pod_records_its_uid_and_restarts_the_deadline(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += 30 * SECOND
        bound = await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        assert (bound.uid, bound.pod_name, bound.phase) == ("uid-1", "pod-1", Phase.PENDING)
        assert bound.deadline == bench.now + PENDING_DEADLINE
        assert bench.ledger.of_pod("uid-1") == bound
        bench.now += 30 * SECOND
        assert await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1)) == bound

    @pytest.mark.parametrize(
        "other",
        [pod(2), pod(1, namespace="other"), pod(1, name="another-name")],
        ids=["another uid", "another namespace", "another name"],
    )
    async def test_bound_reservation_is_refused_to_another_pod(self, bench: Bench, other: PodIdentity) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bound = await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        with pytest.raises(ReservationConflictError):
            await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), other)
        with pytest.raises(ReservationConflictError):
            await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), other)
        assert await bench.ledger.find(ReservationId("r1")) == bound

    async def test_pod_name_in_the_request_binds_the_reservation(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1, pod_name="pod-1"), on("node-a", "GPU-a0"))
        with pytest.raises(ReservationConflictError):
            await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(2))

    @pytest.mark.parametrize(("name", "is_its"), [("train-abcde", True), ("stolen", False), ("train", False)])
    async def test_generated_pod_name_must_have_the_prefix(self, bench: Bench, name: str, *, is_its: bool) -> None:
        what = ReservationRequest(ReservationId("r1"), "ml", "d1", name_prefix="train-")
        held = await self.reserve(bench, what, on("node-a", "GPU-a0"))
        assert held.name_prefix == "train-"
        if is_its:
            assert (await bench.ledger.bind_to_pod(PodProof.NAMED, held.id, pod(1, name=name))).pod_name == name
        else:
            with pytest.raises(ReservationConflictError):
                await bench.ledger.bind_to_pod(PodProof.NAMED, held.id, pod(1, name=name))

    async def test_finalized_reservation_has_no_deadline(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        finalized = await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        assert (finalized.phase, finalized.uid, finalized.deadline) == (Phase.FINALIZED, "uid-1", None)
        bench.now += timedelta(days=30)
        assert not await bench.ledger.collect(bench.now)
        assert await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1)) == finalized

    async def test_binding_after_finalizing_changes_nothing(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        finalized = await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        assert await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1)) == finalized

    async def test_unknown_reservation_cannot_be_bound(self, bench: Bench) -> None:
        with pytest.raises(UnknownReservationError):
            await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        with pytest.raises(UnknownReservationError):
            await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))

    # Releasing.

    async def test_devices_of_an_ended_pod_are_free(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        assert await bench.ledger.release(ReservationId("r1"), pod(1))
        assert await bench.ledger.find(ReservationId("r1")) is None
        assert bench.ledger.of_pod("uid-1") is None
        await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))

    @pytest.mark.defect("assigner-18")
    async def test_late_release_does_not_free_another_reservation(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        await bench.ledger.release(ReservationId("r1"), pod(1))
        second = await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))
        assert not await bench.ledger.release(ReservationId("r1"), pod(1))
        assert list(bench.ledger.of_device(DeviceUuid("GPU-a0"))) == [second]

    async def test_late_release_does_not_free_a_newer_reservation_with_the_same_id(self, bench: Bench) -> None:
        """A queued pod's reservation id is derived from its uid, so a reservation made again has the same id."""
        first = await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        await bench.ledger.bind_to_pod(PodProof.REPORTED, first.id, pod(1))
        assert await bench.ledger.release(first.id, pod(1), since=first.since)
        bench.now += timedelta(seconds=20)
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        second = await bench.ledger.bind_to_pod(PodProof.REPORTED, first.id, pod(1))
        assert not await bench.ledger.release(first.id, pod(1), node="node-a", since=first.since)
        assert list(bench.ledger.of_device(DeviceUuid("GPU-a0"))) == [second]
        assert await bench.ledger.release(first.id, pod(1), node="node-a", since=second.since)

    async def test_release_on_one_node_frees_nothing_on_another(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-b", "GPU-b0"))
        held = await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        assert not await bench.ledger.release(held.id, pod(1), node="node-a")
        assert list(bench.ledger.of_device(DeviceUuid("GPU-b0"))) == [held]

    async def test_end_of_a_pod_with_two_reservations_frees_both(self, bench: Bench) -> None:
        for k, node in ((1, "node-a"), (2, "node-b")):
            await self.reserve(bench, ask(k), on(node, f"GPU-{node[-1]}0"))
            await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId(f"r{k}"), pod(1), node=node)
        freed = []
        while (held := bench.ledger.of_pod("uid-1")) is not None:
            assert await bench.ledger.release(held.id, pod(1), node=held.node)
            freed.append(held.id)
        assert freed == ["r1", "r2"]
        assert not bench.ledger.reservations()

    async def test_end_of_another_pod_frees_nothing(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        held = await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        assert not await bench.ledger.release(ReservationId("r1"), pod(2, name="pod-1"))
        assert await bench.ledger.find(ReservationId("r1")) == held

    # Deadlines.

    @pytest.mark.defect("assigner-5")
    async def test_reservation_without_a_pod_stays_until_its_deadline(self, bench: Bench) -> None:
        held = await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE - SECOND
        assert not await bench.ledger.collect(bench.now)
        assert await bench.ledger.find(ReservationId("r1")) == held

    @pytest.mark.parametrize(
        ("after", "is_collected"),
        [
            (PENDING_DEADLINE, False),
            (PENDING_DEADLINE + CLOCK_SKEW - SECOND, False),
            (PENDING_DEADLINE + CLOCK_SKEW, True),
        ],
        ids=["on its deadline", "within the skew", "past the skew"],
    )
    async def test_other_replicas_expire_it_one_clock_skew_late(
        self, bench: Bench, after: timedelta, is_collected: bool
    ) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += after
        assert bool(await bench.ledger.collect(bench.now)) is is_collected
        if is_collected:
            await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))
            assert await bench.ledger.find(ReservationId("r1")) is None
        else:
            with pytest.raises(SlotsTakenError):
                await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))

    @pytest.mark.parametrize(
        ("after", "is_refused"),
        [(PENDING_DEADLINE - CLOCK_SKEW - SECOND, False), (PENDING_DEADLINE - CLOCK_SKEW, True)],
        ids=["a second before", "a clock skew before its deadline"],
    )
    async def test_binding_is_refused_one_clock_skew_early(
        self, bench: Bench, after: timedelta, is_refused: bool
    ) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += after
        if is_refused:
            with pytest.raises(ReservationExpiredError):
                await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        else:
            assert (
                await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
            ).phase is Phase.FINALIZED

    @pytest.mark.defect("assigner-2")
    @pytest.mark.defect("assigner-3")
    async def test_new_reservation_collects_expired_ones(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE + CLOCK_SKEW
        second = await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))
        assert list(bench.ledger.of_device(DeviceUuid("GPU-a0"))) == [second]

    async def test_restarted_deadline_counts(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += 60 * SECOND
        await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        bench.now += 60 * SECOND
        assert not await bench.ledger.collect(bench.now)
        bench.now += 35 * SECOND
        assert [one.id for one in await self.given_up(bench)] == ["r1"]

    async def given_up(self, bench: Bench) -> Collection[Reservation]:
        """The pod is certain not to have been created."""
        return await bench.ledger.collect(bench.now)

    async def test_late_review_may_name_a_pod_for_an_expired_reservation_that_still_exists(self, bench: Bench) -> None:
        """The review proves that the pod is being created. No other pod has had the devices since."""
        await self.reserve(bench, ask(1, pod_name="pod-1"), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE
        bound = await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        assert (bound.uid, bound.deadline) == ("uid-1", bench.now + PENDING_DEADLINE)
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))

    async def test_naming_the_same_pod_again_does_not_extend_the_deadline(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        bench.now += PENDING_DEADLINE
        with pytest.raises(ReservationExpiredError):
            await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))

    async def test_expired_reservation_without_a_pod_is_known_for_a_while(self, bench: Bench) -> None:
        first = await self.reserve(bench, ask(1, pod_name="pod-1"), on("node-a", "GPU-a0", "GPU-a1"))
        assert bench.ledger.lapsed(first.id) is None
        bench.now += 20 * SECOND
        await bench.ledger.release(first.id, PodIdentity("ml", "pod-1", ""))
        lapsed = bench.ledger.lapsed(first.id)
        assert lapsed is not None
        assert (lapsed.node, lapsed.slots, lapsed.claim_digest) == (first.node, first.slots, first.claim_digest)
        assert lapsed.phase is Phase.PENDING
        bench.now += 60 * SECOND
        assert bench.ledger.lapsed(first.id) is None

    async def test_lapse_is_forgotten_when_reserved_again_or_if_it_had_a_pod(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        await bench.ledger.release(ReservationId("r1"), PodIdentity("ml", "", ""))
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        assert bench.ledger.lapsed(ReservationId("r1")) is None
        await bench.ledger.bind_to_pod(PodProof.NAMED, ReservationId("r1"), pod(1))
        await bench.ledger.release(ReservationId("r1"), pod(1))
        assert bench.ledger.lapsed(ReservationId("r1")) is None

    async def test_old_lapses_are_forgotten_as_others_lapse(self, bench: Bench) -> None:
        for number in (1, 2):
            await self.reserve(bench, ask(number), on("node-a", "GPU-a0"))
            await bench.ledger.release(ReservationId(f"r{number}"), PodIdentity("ml", "", ""))
            bench.now += 76 * SECOND
        bench.now -= 76 * SECOND
        assert bench.ledger.lapsed(ReservationId("r1")) is None
        assert bench.ledger.lapsed(ReservationId("r2")) is not None

    async def test_expired_id_can_be_reserved_again(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE + CLOCK_SKEW
        again = await self.reserve(bench, ask(1, digest="d2"), on("node-b", "GPU-b0"))
        assert again.node == "node-b"

    async def test_repeated_request_removes_the_expired_reservation_even_without_placements(self, bench: Bench) -> None:
        """A caller that repeats its request would otherwise never get rid of the expired reservation."""
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE + CLOCK_SKEW
        with pytest.raises(SlotsTakenError):
            await self.reserve(bench, ask(1))
        assert await bench.ledger.find(ReservationId("r1")) is None

    # Pending reservations by namespace.

    async def test_pending_reservations_are_counted_by_namespace_until_their_pod_exists(self, bench: Bench) -> None:
        waiting = bench.ledger.pending.gpus_in
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0", "GPU-a1"))
        await self.reserve(bench, ask(2), on("node-b", "GPU-b0"))
        await self.reserve(bench, ask(2), on("node-b", "GPU-b0"))
        await self.reserve(bench, ask(3, namespace="other"), on("node-a", "GPU-a2"))
        assert (waiting("ml"), waiting("other"), waiting("third")) == (3, 1, 0)
        assert dict(bench.ledger.pending.sizes) == {2: 1, 1: 2}
        assert set(bench.ledger.pending.namespaces) == {"ml", "other"}
        assert bench.ledger.unnamed.gpus_in("ml") == 3
        await bench.ledger.bind_to_pod(
            PodProof.NAMED, ReservationId("r1"), pod(1)
        )  # any client can send it: it proves no pod
        assert bench.ledger.unnamed.gpus_in("ml") == 1
        assert waiting("ml") == 3
        await bench.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("r1"), pod(1))
        await bench.ledger.release(ReservationId("r2"), pod(2))
        assert (waiting("ml"), waiting("other")) == (0, 1)
        assert set(bench.ledger.pending.namespaces) == {"other"}

    async def test_reservations_of_the_queue_are_not_counted_as_pending(self, bench: Bench) -> None:
        await self.reserve(bench, ReservationRequest(ReservationId("pod-uid-1"), "ml", "d1"), on("node-a", "GPU-a0"))
        assert bench.ledger.pending.gpus_in("ml") == 0

    async def test_expired_reservation_is_not_counted_as_pending(self, bench: Bench) -> None:
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        bench.now += PENDING_DEADLINE + CLOCK_SKEW
        await bench.ledger.collect(bench.now)
        assert bench.ledger.pending.gpus_in("ml") == 0
        await self.reserve(bench, ask(2), on("node-a", "GPU-a0"))
        assert bench.ledger.pending.gpus_in("ml") == 1

    # The fleet, from which the next decision is made.

    async def test_fleet_is_updated_on_every_change(self, bench: Bench) -> None:
        slot = Slot(DeviceUuid("GPU-a0"), 0)
        await self.reserve(bench, ask(1), on("node-a", "GPU-a0"))
        assert not builders.is_slot_free(bench.fleet, slot)
        await bench.ledger.release(ReservationId("r1"), pod(1))
        assert builders.is_slot_free(bench.fleet, slot)
