"""The memory ledger fulfils the contract; its protocol holds for any order of operations."""

import contextlib
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests import builders
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, LedgerContract, on
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.errors import LedgerError
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
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times

T = TypeVar("T")


class MemoryBench:
    """The contract's nodes with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.fleet = Fleet()
        devices = [Device(DeviceUuid(f"GPU-a{k}")) for k in range(4)]
        self.fleet.put(Node("node-a", devices=(*devices, Device(DeviceUuid("GPU-s"), shares=4))), self.now)
        self.fleet.put(Node("node-b", devices=(Device(DeviceUuid("GPU-b0")),)), self.now)
        self.ledger = MemoryLedger(self.fleet, lambda: self.now, Times(PENDING_DEADLINE, CLOCK_SKEW))


@pytest.fixture
def bench() -> MemoryBench:
    return MemoryBench()


class TestMemoryLedger(LedgerContract):
    """The whole contract."""


def done(coroutine: Coroutine[Any, Any, T]) -> T:
    """Methods of the memory ledger never wait, so they complete in one step."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waited")


ids = st.sampled_from([ReservationId(f"r{number}") for number in range(6)])
uids = st.sampled_from(["", "uid-1", "uid-2", "uid-3"])
places = st.lists(
    st.sampled_from(
        [
            on("node-a", "GPU-a0"),
            on("node-a", "GPU-a0", "GPU-a1"),
            on("node-a", "GPU-a1", "GPU-a2", "GPU-a3"),
            on("node-a", "GPU-s", k=0),
            on("node-a", "GPU-s", k=1),
            on("node-b", "GPU-b0"),
        ]
    ),
    max_size=3,
)


class AnyOrder(RuleBasedStateMachine):
    """Requests, repetitions, late responses, ends and time in any order: promises 1 to 3 hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = MemoryBench()
        self.identities: dict[str, tuple[object, ...]] = {}

    def attempt(self, coroutine: Coroutine[Any, Any, object]) -> None:
        with contextlib.suppress(LedgerError):
            done(coroutine)

    @rule(one=ids, namespace=st.sampled_from(["ml", "other"]), digest=st.sampled_from(["d1", "d2"]), tried=places)
    def reserve(self, one: ReservationId, namespace: str, digest: str, tried: list[Placement]) -> None:
        answer_by = self.bench.now + timedelta(seconds=10)
        what = ReservationRequest(one, namespace, digest, is_shared=True)
        self.attempt(self.bench.ledger.reserve(what, tried, answer_by=answer_by))

    @rule(one=ids, uid=uids.filter(bool), namespace=st.sampled_from(["ml", "other"]))
    def bind(self, one: ReservationId, uid: str, namespace: str) -> None:
        self.attempt(self.bench.ledger.bind_to_pod(PodProof.NAMED, one, PodIdentity(namespace, f"pod-{uid}", uid)))

    @rule(one=ids, uid=uids.filter(bool))
    def finalize(self, one: ReservationId, uid: str) -> None:
        self.attempt(self.bench.ledger.bind_to_pod(PodProof.REPORTED, one, PodIdentity("ml", f"pod-{uid}", uid)))

    @rule(one=ids, uid=uids)
    def release(self, one: ReservationId, uid: str) -> None:
        self.attempt(self.bench.ledger.release(one, PodIdentity("ml", "", uid)))

    @rule(seconds=st.sampled_from([1, 5, 30, 90, 95]))
    def wait(self, seconds: int) -> None:
        self.bench.now += timedelta(seconds=seconds)

    @rule()
    def collect(self) -> None:
        done(self.bench.ledger.collect(self.bench.now))

    @invariant()
    def a_slot_has_one_live_reservation(self) -> None:
        held = [slot for one in self.live() for slot in one.slots]
        assert len(held) == len(set(held))
        assert {slot for slot in held if builders.is_slot_free(self.bench.fleet, slot)} == set()
        assert set(self.bench.fleet.held_devices) == {slot.uuid for slot in held}

    @invariant()
    def a_reservation_has_a_pod_or_a_deadline(self) -> None:
        for one in self.live():
            assert (one.deadline is None) == (one.phase is Phase.FINALIZED)
            assert one.phase is not Phase.FINALIZED or one.uid is not None

    @invariant()
    def a_uid_once_learnt_never_changes(self) -> None:
        live = {one.id: one for one in self.live()}
        self.identities = {key: known for key, known in self.identities.items() if key in live}
        for one in live.values():
            known = self.identities.get(one.id)
            if known is not None and known[0] == one.since:
                assert known[1:4] == (one.namespace, one.claim_digest, one.slots)
                assert known[4] in (None, one.uid)
            self.identities[one.id] = (one.since, one.namespace, one.claim_digest, one.slots, one.uid)

    def live(self) -> list[Reservation]:
        return list(self.bench.ledger.reservations())


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
