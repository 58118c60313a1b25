"""The reservation protocol as a model: replicas, lost answers, crashes, lagging watches and skewed clocks as moves.

The replicas run the real ledger; the API server's part (which pods exist, and until when it may still make one) is the
model's. What must hold is judged from the pods, not from anybody's ledger.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.fake_store import FakeStore, Fault, gpu_node
from tests.ledger.test_cluster import Pods, Replica
from webhook.core.errors import LedgerError
from webhook.core.reservation import Ask, Phase, Placement, PodIdentity, ReservationId

T = TypeVar("T")

# The API server gives up a request after 60 s, whatever its webhooks have said.
REQUEST_TIMEOUT = timedelta(seconds=60)
REPLICAS = 3
PLACES = st.lists(
    st.sampled_from(
        [
            on("node-a", "GPU-a0"),
            on("node-a", "GPU-a1"),
            on("node-a", "GPU-a0", "GPU-a1"),
            on("node-b", "GPU-b0"),
        ]
    ),
    min_size=1,
    max_size=3,
)


@define
class Creation:
    """One pod on its way through the API server."""

    pod: PodIdentity
    begun: datetime
    placement: Placement | None = None
    reservation_id: ReservationId | None = None
    is_validated: bool = False


class Protocol(RuleBasedStateMachine):
    """Every move that somebody in a cluster can make, at any time."""

    creations = Bundle("creations")
    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.true_now = datetime(2026, 1, 1, tzinfo=UTC)
        self.store = FakeStore()
        self.store.put(gpu_node("node-a", "GPU-a0", "GPU-a1"))
        self.store.put(gpu_node("node-b", "GPU-b0"))
        self.facts = Pods()
        self.existing: dict[str, Creation] = {}
        self.skews = [timedelta(0)] * REPLICAS
        self.replicas: list[Replica] = []
        self.number = 0

    def teardown(self) -> None:
        self.loop.close()

    @initialize(skews=st.lists(st.integers(-2, 2), min_size=REPLICAS, max_size=REPLICAS))
    def begin(self, skews: list[int]) -> None:
        """Clocks differ by less than the skew that the ledger allows for."""
        self.skews = [timedelta(seconds=skew) for skew in skews]
        self.replicas = [self.fresh(which) for which in range(REPLICAS)]

    def fresh(self, which: int) -> Replica:
        return Replica(self.store, self.facts, lambda: self.true_now + self.skews[which])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        with contextlib.suppress(LedgerError):
            return self.loop.run_until_complete(coroutine)
        return None

    # The API server creates pods.

    @rule(target=creations, which=st.integers(0, REPLICAS - 1), places=PLACES, is_heard=st.booleans())
    def mutate(self, which: int, places: list[Placement], is_heard: bool) -> Any:
        """A replica reserves; its answer may not be heard, and then there will be no pod."""
        self.number += 1
        pod = PodIdentity("ml", f"pod-{self.number}", f"uid-{self.number}")
        replica = self.replicas[which]
        ask = Ask(ReservationId(f"r{self.number}"), "ml", "d")
        self.run(replica.ledger.collect(self.true_now + self.skews[which]))
        answer_by = self.true_now + self.skews[which] + timedelta(seconds=10)
        held = self.run(replica.ledger.reserve(ask, places, answer_by=answer_by))
        if held is None or not is_heard:
            return multiple()
        return Creation(pod, self.true_now, Placement(held.node, held.slots), held.id)

    @rule(target=creations, one=creations)
    def copy(self, one: Creation) -> Creation:
        """Another pod with the same annotations: a copied manifest, or a forger."""
        self.number += 1
        pod = PodIdentity("ml", one.pod.name, f"uid-{self.number}")  # names come back
        return Creation(pod, self.true_now, one.placement, one.reservation_id)

    @rule(one=creations, which=st.integers(0, REPLICAS - 1), is_heard=st.booleans())
    def validate(self, one: Creation, which: int, is_heard: bool) -> None:
        """Whichever replica is asked; a crash after its write is an answer that is not heard."""
        assert one.placement is not None
        assert one.reservation_id is not None
        ledger = self.replicas[which].ledger
        found = self.run(ledger.find(one.reservation_id, node=one.placement.node))
        if found is None or found.phase is Phase.RELEASING or found.slots != one.placement.slots:
            return
        bound = self.run(ledger.bind(one.reservation_id, one.pod))
        if bound is not None and is_heard:
            one.is_validated = True

    @rule(target=pods, one=consumes(creations))
    def create(self, one: Creation) -> Any:
        """The pod is stored, if the request is still alive and no other has the name."""
        is_late = self.true_now - one.begun > REQUEST_TIMEOUT
        if not one.is_validated or is_late or one.pod.name in {other.pod.name for other in self.existing.values()}:
            return multiple()
        self.existing[one.pod.uid] = one
        self.facts.uids.add(one.pod.uid)
        return one

    @rule(one=consumes(pods))
    def end(self, one: Creation) -> None:
        del self.existing[one.pod.uid]
        self.facts.uids.discard(one.pod.uid)

    # The reconciler, whenever it is alive: any replica may be elected.

    @rule(which=st.integers(0, REPLICAS - 1))
    def reconcile(self, which: int) -> None:
        """What a leader does on a complete view: confirm what exists, release what does not, expire what never came."""
        ledger = self.replicas[which].ledger
        self.run(ledger.collect(self.true_now + self.skews[which]))
        for one in list(ledger.reservations()):
            if one.uid is None:
                self.run(ledger.expire(one.id))
            elif one.uid in self.existing:
                self.run(ledger.confirm(one.id, self.existing[one.uid].pod))
            elif one.phase is not Phase.PENDING:
                self.run(ledger.release(one.id, PodIdentity("ml", "", one.uid)))
            else:
                self.run(ledger.expire(one.id))

    # Things go wrong.

    @rule(which=st.integers(0, REPLICAS - 1), events=st.integers(1, 5))
    def deliver(self, which: int, events: int) -> None:
        self.replicas[which].watch.catch_up(events)

    @rule(which=st.integers(0, REPLICAS - 1))
    def crash(self, which: int) -> None:
        self.replicas[which] = self.fresh(which)

    @rule(faults=st.lists(st.sampled_from(list(Fault)), max_size=3))
    def trouble(self, faults: list[Fault]) -> None:
        self.store.faults = faults

    @rule(is_away=st.booleans())
    def lose_the_witness(self, is_away: bool) -> None:
        self.facts.is_away = is_away

    @rule(seconds=st.sampled_from([1, 5, 30, 60, 100]))
    def wait(self, seconds: int) -> None:
        self.true_now += timedelta(seconds=seconds)

    # What must hold.

    @invariant()
    def no_slot_is_with_two_pods(self) -> None:
        slots = [slot for one in self.existing.values() if one.placement for slot in one.placement.slots]
        assert len(slots) == len(set(slots))

    @invariant()
    def an_existing_pod_holds_what_it_was_promised(self) -> None:
        for one in self.existing.values():
            assert one.placement is not None
            held = self.store.objects[one.placement.node]["status"]["held"]
            entries = [held.get(str(slot)) for slot in one.placement.slots]
            assert [entry and entry.get("uid") for entry in entries] == [one.pod.uid] * len(entries)

    @invariant()
    def several_devices_are_held_together(self) -> None:
        for raw in self.store.objects.values():
            entries: dict[str, list[str]] = {}
            for slot, entry in raw["status"]["held"].items():
                entries.setdefault(entry["reservation"], []).append(slot)
            for slots in entries.values():
                assert slots in (["GPU-a0/0"], ["GPU-a1/0"], ["GPU-b0/0"], ["GPU-a0/0", "GPU-a1/0"])

    @rule()
    def in_the_end_nothing_leaks(self) -> None:
        """Once no request lives, any replica alone gets back what no pod holds, with no reconciler to help it."""
        self.store.faults, self.facts.is_away = [], False
        self.true_now += PENDING_DEADLINE + REQUEST_TIMEOUT + 2 * CLOCK_SKEW
        last = self.replicas[0] = self.fresh(0)
        now = self.true_now + self.skews[0]
        self.run(last.ledger.collect(now))
        busy = {slot for one in self.existing.values() if one.placement for slot in one.placement.slots}
        final = {
            slot
            for raw in self.store.objects.values()
            for slot, entry in raw["status"]["held"].items()
            if entry["phase"] == "finalized"
        }
        for number, place in enumerate((on("node-a", "GPU-a0"), on("node-a", "GPU-a1"), on("node-b", "GPU-b0"))):
            self.number += 1
            ask = Ask(ReservationId(f"end-{self.number}-{number}"), "ml", "d")
            held = self.run(last.ledger.reserve(ask, [place], answer_by=now + timedelta(seconds=10)))
            is_free = place.slots[0] not in busy and str(place.slots[0]) not in final
            assert (held is not None) is is_free


Protocol.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestProtocol = Protocol.TestCase
