"""A model of the reservation protocol: replicas, lost responses, crashes, lagging watches and skewed clocks as rules.

The replicas run the real ledger. The model plays the API server: which pods exist, and until when it may still create
one. The invariants are checked against the pods, not against any ledger.
"""

import contextlib
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests import builders
from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE, on
from tests.ledger.fake_store import FakeStore, Fault, gpu_node
from tests.ledger.test_cluster import Pods, Replica
from tests.simulated_time import SimulatedTimeLoop
from webhook.core.claim_keys import ClaimRecord
from webhook.core.device import Slot
from webhook.core.errors import LedgerError
from webhook.core.reservation import Phase, Placement, PodIdentity, PodProof, ReservationId, ReservationRequest
from webhook.ledger.reserved_pod import ReservedPod

T = TypeVar("T")

# The API server cancels a request after 60 s, whatever its webhooks have answered.
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


NODES = st.lists(st.sampled_from(["node-a", "node-b"]), min_size=1, max_size=2, unique=True)
ARRIVALS = st.lists(st.tuples(st.integers(0, REPLICAS - 1), PLACES), min_size=1, max_size=4)


def record_of(place: Placement) -> ClaimRecord:
    return ClaimRecord(gpus=len(place.slots))


def same_shape(places: list[Placement], model: Placement) -> list[Placement]:
    """The devices that can serve the same claim."""
    return [place for place in places if len(place.slots) == len(model.slots)]


@define
class Creation:
    """One pod request in the API server."""

    pod: PodIdentity
    begun: datetime
    placement: Placement | None = None
    reservation_id: ReservationId | None = None
    is_copy: bool = False
    is_validated: bool = False


def slots_of(one: Creation) -> tuple[Slot, ...]:
    return () if one.placement is None else one.placement.slots


class Protocol(RuleBasedStateMachine):
    """Everything that a component of the cluster can do, at any time."""

    creations = Bundle("creations")
    pods = Bundle("pods")

    def __init__(self) -> None:
        super().__init__()
        self.loop = SimulatedTimeLoop()
        self.true_now = datetime(2026, 1, 1, tzinfo=UTC)
        self.store = FakeStore()
        self.store.apply({**gpu_node("node-a", "GPU-a0", "GPU-a1"), "status": {"held": {}}})
        self.store.apply({**gpu_node("node-b", "GPU-b0"), "status": {"held": {}}})
        self.facts = Pods()
        self.existing: dict[str, Creation] = {}
        self.skews = [timedelta(0)] * REPLICAS
        self.replicas: list[Replica] = []
        self.number = 0
        self.forged: set[str] = set()

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
        """A replica reserves. If its response is lost, there will be no pod."""
        self.number += 1
        pod = PodIdentity("ml", f"pod-{self.number}", f"uid-{self.number}")
        replica = self.replicas[which]
        places = same_shape(places, places[0])
        ask = ReservationRequest(ReservationId(f"r{self.number}"), "ml", record_of(places[0]).digest())
        self.run(replica.ledger.collect(self.true_now + self.skews[which]))
        answer_by = self.true_now + self.skews[which] + timedelta(seconds=10)
        held = self.run(replica.ledger.reserve(ask, places, answer_by=answer_by))
        if held is None or not is_heard:
            return multiple()
        return Creation(pod, self.true_now, Placement(held.node, held.slots), held.id)

    @rule(target=creations, one=creations)
    def copy(self, one: Creation) -> Creation:
        """Another pod with the same annotations: a copied manifest, or a forgery."""
        self.number += 1
        pod = PodIdentity("ml", one.pod.name, f"uid-{self.number}")  # names are reused
        return Creation(pod, self.true_now, one.placement, one.reservation_id, is_copy=True)

    @rule(one=creations, which=st.integers(0, REPLICAS - 1), places=PLACES)
    def mutate_again(self, one: Creation, which: int, places: list[Placement]) -> None:
        """The same review again, on a replica that may be stale and decides for another node. Its response replaces the
        first one."""
        assert one.placement is not None
        assert one.reservation_id is not None
        if one.is_copy or one.is_validated:
            return
        ask = ReservationRequest(one.reservation_id, "ml", record_of(one.placement).digest())
        answer_by = self.true_now + self.skews[which] + timedelta(seconds=10)
        ledger = self.replicas[which].ledger
        held = self.run(ledger.reserve(ask, same_shape(places, one.placement), answer_by=answer_by))
        if held is not None:
            one.placement = Placement(held.node, held.slots)

    @rule(one=creations, which=st.integers(0, REPLICAS - 1), is_heard=st.booleans())
    def validate(self, one: Creation, which: int, is_heard: bool) -> None:
        """On any replica. A crash after its write equals a lost response."""
        assert one.placement is not None
        assert one.reservation_id is not None
        ledger = self.replicas[which].ledger
        found = self.run(ledger.find(one.reservation_id, node=one.placement.node))
        if found is None or found.phase is Phase.RELEASING or found.slots != one.placement.slots:
            return
        bound = self.run(ledger.bind_to_pod(PodProof.NAMED, one.reservation_id, one.pod, node=found.node))
        if bound is not None and is_heard:
            one.is_validated = True

    @rule(target=pods, one=consumes(creations))
    def create(self, one: Creation) -> Any:
        """The pod is stored if the request is still in progress and the name is free."""
        is_late = self.true_now - one.begun > REQUEST_TIMEOUT
        if not one.is_validated or is_late or one.pod.name in {other.pod.name for other in self.existing.values()}:
            return multiple()
        self.existing[one.pod.uid] = one
        self.facts.uids.add(one.pod.uid)
        self.facts.raws[one.pod.uid] = carrying(one)
        return one

    @rule(one=consumes(pods))
    def end(self, one: Creation) -> None:
        del self.existing[one.pod.uid]
        self.facts.uids.discard(one.pod.uid)
        del self.facts.raws[one.pod.uid]

    @rule(one=pods, which=st.integers(0, REPLICAS - 1), places=PLACES)
    def forge(self, one: Creation, which: int, places: list[Placement]) -> None:
        """Forged reviews of the creation of an existing pod."""
        forged = self.mutate(which, places, True)
        if isinstance(forged, Creation):
            assert forged.reservation_id is not None
            self.forged.add(forged.reservation_id)
            self.run(self.replicas[which].ledger.bind_to_pod(PodProof.NAMED, forged.reservation_id, one.pod))

    # The reconciler, while it is alive: any replica may be elected.

    @rule(which=st.integers(0, REPLICAS - 1))
    def reconcile(self, which: int) -> None:
        """A leader with a complete view confirms existing pods, releases ended ones and expires those never created."""
        ledger = self.replicas[which].ledger
        self.run(ledger.collect(self.true_now + self.skews[which], was_never_created=lambda _: True))
        for one in list(ledger.reservations()):
            if one.uid is None:
                self.run(ledger.expire(one))
            elif one.uid in self.existing and one.slots == slots_of(self.existing[one.uid]):
                self.run(ledger.bind_to_pod(PodProof.CONFIRMED, one.id, self.existing[one.uid].pod, node=one.node))
            elif one.uid in self.existing or one.phase is not Phase.PENDING:
                self.run(ledger.release(one.id, PodIdentity("ml", "", one.uid), node=one.node))
            else:
                self.run(ledger.expire(one))

    # Faults.

    @rule(which=st.integers(0, REPLICAS - 1), events=st.integers(1, 5))
    def deliver(self, which: int, events: int) -> None:
        self.replicas[which].watch.catch_up(events)

    @rule(which=st.integers(0, REPLICAS - 1))
    def crash(self, which: int) -> None:
        self.replicas[which] = self.fresh(which)

    @rule(faults=st.lists(st.sampled_from(list(Fault)), max_size=3))
    def inject_faults(self, faults: list[Fault]) -> None:
        self.store.faults = faults

    @rule(refusals=st.integers(1, 2))
    def refuse(self, refusals: int) -> None:
        """Writes that must be harmless, including an expiry."""
        self.store.refusals = refusals

    @rule(is_away=st.booleans())
    def make_pod_reader_unavailable(self, is_away: bool) -> None:
        self.facts.is_away = is_away

    @rule(seconds=st.sampled_from([1, 5, 30, 60, 100]))
    def wait(self, seconds: int) -> None:
        self.true_now += timedelta(seconds=seconds)

    def stop_faults(self) -> None:
        self.store.faults, self.store.refusals, self.facts.is_away = [], 0, False

    # Invariants.

    @invariant()
    def no_slot_has_two_pods(self) -> None:
        slots = [slot for one in self.existing.values() if one.placement for slot in one.placement.slots]
        assert len(slots) == len(set(slots))

    @invariant()
    def existing_pod_has_its_reservation(self) -> None:
        for one in self.existing.values():
            assert one.placement is not None
            held = self.store.objects[one.placement.node]["status"]["held"]
            entries = [held.get(str(slot)) for slot in one.placement.slots]
            assert [entry and entry.get("uid") for entry in entries] == [one.pod.uid] * len(entries)

    @invariant()
    def forged_reservation_stays_pending(self) -> None:
        held = [entry for raw in self.store.objects.values() for entry in raw["status"].get("held", {}).values()]
        assert not [one for one in held if one["reservation"] in self.forged and one["phase"] == "finalized"]

    @invariant()
    def several_devices_are_reserved_together(self) -> None:
        for raw in self.store.objects.values():
            entries: dict[str, list[str]] = {}
            for slot, entry in raw["status"]["held"].items():
                entries.setdefault(entry["reservation"], []).append(slot)
            for slots in entries.values():
                assert slots in (["GPU-a0/0"], ["GPU-a1/0"], ["GPU-b0/0"], ["GPU-a0/0", "GPU-a1/0"])

    @rule(is_fresh=st.booleans())
    def in_the_end_nothing_leaks(self, is_fresh: bool) -> None:
        """When no request is in progress, any replica that has watched all pods gets back what no pod has."""
        self.stop_faults()
        self.true_now += PENDING_DEADLINE + REQUEST_TIMEOUT + 2 * CLOCK_SKEW
        last = self.replicas[0] = self.fresh(0) if is_fresh else self.replicas[0]
        last.watch.catch_up()
        now = self.true_now + self.skews[0]
        self.run(last.ledger.collect(now, was_never_created=lambda _: True))
        busy = {slot for one in self.existing.values() if one.placement for slot in one.placement.slots}
        final = {
            slot
            for raw in self.store.objects.values()
            for slot, entry in raw["status"]["held"].items()
            if entry["phase"] == "finalized"
        }
        for number, place in enumerate((on("node-a", "GPU-a0"), on("node-a", "GPU-a1"), on("node-b", "GPU-b0"))):
            self.number += 1
            ask = ReservationRequest(ReservationId(f"end-{self.number}-{number}"), "ml", "d")
            is_free = place.slots[0] not in busy and str(place.slots[0]) not in final
            assert builders.is_slot_free(last.fleet, place.slots[0]) is is_free
            held = self.run(last.ledger.reserve(ask, [place], answer_by=now + timedelta(seconds=10)))
            assert (held is not None) is is_free


Protocol.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestProtocol = Protocol.TestCase


class Recreated(Protocol):
    """In addition objects are deleted by force and recreated. The ledger is asked before a pod is bound, so the
    invariants are about pods that are on their node."""

    on_node: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.on_node = set()

    @initialize(target=Protocol.pods, arrivals=ARRIVALS)
    def create_first_pods(self, arrivals: list[tuple[int, list[Placement]]]) -> Any:
        made = [self.create_and_run_a_pod(which, places) for which, places in arrivals if self.replicas]
        return multiple(*(one for one in made if isinstance(one, Creation)))

    @rule(target=Protocol.pods, one=consumes(Protocol.creations))
    def create(self, one: Creation) -> Any:
        return super().create(one)

    @rule(one=consumes(Protocol.pods))
    def end(self, one: Creation) -> None:
        self.gone(one)

    def gone(self, one: Creation) -> None:
        self.existing.pop(one.pod.uid, None)
        self.facts.uids.discard(one.pod.uid)
        self.facts.raws.pop(one.pod.uid, None)
        self.on_node.discard(one.pod.uid)

    @rule(one=Protocol.pods, which=st.integers(0, REPLICAS - 1))
    def put_on_its_node(self, one: Creation, which: int) -> None:
        """The check of a Binding: a stored reservation of this very pod."""
        if one.pod.uid not in self.existing:
            return
        assert one.placement is not None
        assert one.reservation_id is not None
        ledger = self.replicas[which].ledger
        found = self.run(ledger.find(one.reservation_id, node=one.placement.node))
        if found is None or found.slots != one.placement.slots:
            return
        confirmed = self.run(ledger.bind_to_pod(PodProof.CONFIRMED, one.reservation_id, one.pod, node=found.node))
        if confirmed is not None and confirmed.uid == one.pod.uid:
            self.on_node.add(one.pod.uid)
            # The API server stores a Binding as the pod's nodeName, so every later quorum read shows it.
            self.facts.raws[one.pod.uid]["spec"] = {"nodeName": one.placement.node}

    @rule(target=Protocol.pods, which=st.integers(0, REPLICAS - 1), places=PLACES)
    def create_and_run_a_pod(self, which: int, places: list[Placement]) -> Any:
        """The usual life of a pod in one step."""
        one = super().mutate(which, places, True)
        if not isinstance(one, Creation):
            return multiple()
        self.validate(one, which, True)
        made = self.create(one)
        if isinstance(made, Creation):
            self.put_on_its_node(made, which)
        return made

    @rule(target=Protocol.pods, nodes=NODES, arrivals=ARRIVALS)
    def recreate_objects(self, nodes: list[str], arrivals: list[tuple[int, list[Placement]]]) -> Any:
        """Objects are deleted by force despite their finalizers, and before they are rebuilt new pods want their
        devices."""
        self.true_now += timedelta(seconds=1)
        for node in nodes:
            uuids = [one["uuid"] for one in self.store.objects.pop(node)["spec"]["devices"]]
            self.store.apply(gpu_node(node, *uuids))
        for replica in self.replicas:
            replica.watch.catch_up()
        made = [self.create_and_run_a_pod(which, places) for which, places in arrivals]
        return multiple(*(one for one in made if isinstance(one, Creation)))

    @rule(which=st.integers(0, REPLICAS - 1))
    def restore(self, which: int) -> None:
        """The reconciler rebuilds objects without status, and handles pods without their reservation."""
        ledger = self.replicas[which].ledger
        for name in ledger.unsettled():
            self.run(ledger.settle(name))
        for one in list(self.existing.values()):
            assert one.reservation_id is not None
            assert one.placement is not None
            found = self.run(ledger.find(one.reservation_id, node=one.placement.node))
            reserved_pod = ReservedPod.of(self.facts.raws[one.pod.uid])
            if (found is None or found.node != one.placement.node) and reserved_pod is not None:
                self.run(ledger.adopt(reserved_pod))

    @invariant()
    def no_slot_has_two_pods(self) -> None:
        running = [self.existing[uid] for uid in self.on_node]
        slots = [slot for one in running if one.placement for slot in one.placement.slots]
        assert len(slots) == len(set(slots))

    @invariant()
    def existing_pod_has_its_reservation(self) -> None:
        for uid in self.on_node:
            one = self.existing[uid]
            assert one.placement is not None
            held = self.store.objects[one.placement.node]["status"].get("held")
            if held is not None:
                entries = [held.get(str(slot)) for slot in one.placement.slots]
                assert [entry and entry.get("uid") for entry in entries] == [uid] * len(entries)

    @invariant()
    def several_devices_are_reserved_together(self) -> None:
        """The base model checks the stored objects; an object without status has nothing to check."""

    @rule(is_fresh=st.booleans())
    def in_the_end_nothing_leaks(self, is_fresh: bool) -> None:
        """When no request is in progress and the reconciler has run, devices that no pod carries can be reserved."""
        self.stop_faults()
        self.true_now += PENDING_DEADLINE + REQUEST_TIMEOUT + 2 * CLOCK_SKEW
        last = self.replicas[0] = self.fresh(0) if is_fresh else self.replicas[0]
        last.watch.catch_up()
        self.restore(0)
        self.reconcile(0)
        self.reconcile(0)
        carried = {slot for one in self.existing.values() if one.placement for slot in one.placement.slots}
        now = self.true_now + self.skews[0]
        for place in (on("node-a", "GPU-a0"), on("node-a", "GPU-a1"), on("node-b", "GPU-b0")):
            if place.slots[0] not in carried:
                self.number += 1
                ask = ReservationRequest(ReservationId(f"end-{self.number}"), "ml", "d")
                assert self.run(last.ledger.reserve(ask, [place], answer_by=now + timedelta(seconds=10))) is not None


def carrying(one: Creation) -> Raw:
    """The pod as the API server lists it."""
    assert one.placement is not None
    annotations = {
        "gpuwarden.io/reservation-id": one.reservation_id,
        "gpuwarden.io/node": one.placement.node,
        "gpuwarden.io/gpu-uuid": ",".join(slot.uuid for slot in one.placement.slots),
        "gpuwarden.io/claim": record_of(one.placement).text(),
    }
    return {"metadata": {"namespace": "ml", "name": one.pod.name, "uid": one.pod.uid, "annotations": annotations}}


Recreated.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRecreated = Recreated.TestCase


def test_rebuild_prefers_the_pod_on_the_node_to_a_pod_created_late() -> None:
    """The late pod was validated before its GPUNode was recreated, and stored after another pod ran with its device."""
    state = Recreated()
    state.begin([0] * REPLICAS)
    late = state.mutate(0, [on("node-a", "GPU-a0")], True)
    state.validate(late, 0, True)
    [running] = state.recreate_objects(["node-a"], [(0, [on("node-a", "GPU-a0")])]).values
    assert state.on_node == {running.pod.uid}
    assert state.create(late) is late
    state.recreate_objects(["node-a"], [(0, [on("node-a", "GPU-a1")])])
    state.existing_pod_has_its_reservation()
    assert state.store.objects["node-a"]["status"]["held"]["GPU-a0/0"]["uid"] == running.pod.uid
    state.teardown()
