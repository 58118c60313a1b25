"""The queue: in turn, once, told why not, and whole whatever it is stopped at."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import jsonpatch
import pytest
from attrs import evolve

from tests import builders
from tests.builders import HASH, NOW, Raw, device, node, raw_container
from tests.ledger.test_cluster import ClusterBench
from tests.recorded_events import RecordedEvents
from webhook.admission.namespaces import ClaimReader, WatchedNamespaces
from webhook.admission.queue.gates import GateError
from webhook.admission.queue.queue import Queue, QueuePass
from webhook.admission.queue.waiting_pods import DemandsListener, WaitingPods, is_waiting
from webhook.core import check
from webhook.core.claim import ClaimRules, recorded_claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.difference import Change
from webhook.core.dress import DressRules, waiting
from webhook.core.errors import LedgerUnavailableError, PlacementRefusedError
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod
from webhook.core.queue_order import QueuedPod
from webhook.core.reasons import Reason
from webhook.core.reservation import (
    Orphan,
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.core.verdict import Deny
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Abandon, Times

GATE = "gpuwarden.io/queue"
GPU = "gpuwarden.io/gpu-uuid"
RULES = DressRules()
HOUR = timedelta(hours=1)
BIND_DEADLINE = timedelta(minutes=5)
LATER = NOW + timedelta(days=1)
ON_GPU_0 = Placement("node-a", (builders.slot("GPU-0"),))


class Yard:
    """Pods as an API server keeps them: a patch is carried out whole, or not at all. It can be made to fail."""

    def __init__(self) -> None:
        self.pods: dict[str, Raw] = {}
        self.said: dict[str, str] = {}
        self.failing = False
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.cannot_be_told: set[str] = set()
        self.loses_answers = False
        self.telling_now = self.told_at_once = 0

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        if self.failing or pod.name in self.fails:
            raise GateError("away")
        if pod.name not in self.pods:
            return False
        self.pods[pod.name] = jsonpatch.apply_patch(self.pods[pod.name], patch)
        if self.loses_answers:
            raise GateError("away")
        return True

    async def say(self, pod: PodIdentity, why: str) -> None:
        if pod.name in self.hangs:
            await asyncio.Event().wait()
        if pod.name in self.cannot_be_told:
            raise GateError("away")
        self.telling_now += 1
        self.told_at_once = max(self.told_at_once, self.telling_now)
        await asyncio.sleep(0)
        self.telling_now -= 1
        self.said[pod.name] = why

    async def is_shut(self, pod: PodIdentity) -> bool:
        return pod.name in self.pods and is_waiting(self.pods[pod.name])


class Asked(Fleet):
    """Counts the questions that it was asked."""

    questions = 0

    def learn(self, asked: NodesAsked) -> frozenset[str]:
        self.questions += 1
        return super().learn(asked)


class Contested(MemoryLedger):
    """Others are there too: before a reservation is made, `meanwhile` happens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.meanwhile: list[Callable[[], Awaitable[object]]] = []

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        if self.meanwhile:
            await self.meanwhile.pop()()
        return await super().reserve(ask, placements, answer_by=answer_by)


class NobodyToAsk:
    """What the watch has told of namespaces is all there is."""

    async def get(self, name: str) -> Raw | None:
        return None


class Scene:
    """Two GPUs of one node, nobody's yet, and a queue."""

    def __init__(self, *, always: bool = False) -> None:
        self.now = NOW
        self.is_current = self.can_be_read = True
        self.reads = 0
        self.time: Iterator[float] = itertools.repeat(0.0)
        self.fleet = Asked()
        self.fleet.put(node("node-a", device("GPU-0", index=0), device("GPU-1", index=1)), NOW)
        self.ledger = Contested(self.fleet, lambda: self.now, Times(timedelta(seconds=90), timedelta(seconds=5)))
        self.yard, self.heard = Yard(), RecordedEvents()
        self.policy = EvidencePolicy(always)
        self.namespaces = WatchedNamespaces(NobodyToAsk())
        self.orphans = 0
        self.queue = self.another()

    def another(self) -> Queue:
        """As after a start: it knows what the watch tells and what the ledger has."""
        self.claims = ClaimReader(ClaimRules(), self.namespaces)
        self.pods = WaitingPods(self.claims, RULES)
        self.pods.replaced(self.yard.pods)
        self.demands = DemandsListener(self.pods)
        return Queue(
            self.pods,
            self.ledger,
            self.fleet,
            self.policy,
            self.claims,
            RULES,
            self.yard,
            self.heard,
            lambda: self.now,
            bind_deadline=BIND_DEADLINE,
            is_current=lambda: self.is_current,
            read_anew=self.read_anew,
            timer=lambda: next(self.time),
            orphans_per_namespace=self.orphans,
        )

    async def read_anew(self) -> bool:
        self.reads += 1
        return self.can_be_read

    def demand(self, digest: str | None, *, is_heard: bool = True) -> None:
        """The namespace of all pods here demands a hash, or no more."""
        annotations = {} if digest is None else {"gpuwarden.io/required-hash": digest}
        raw = {"metadata": {"name": "ml", "annotations": annotations}}
        self.namespaces.view.changed(raw)
        if is_heard:
            self.demands.changed(raw)

    def waiter(self, name: str) -> QueuedPod:
        found = self.pods.lines.get(f"uid-{name}")
        assert found is not None
        return found

    def relabel(self, name: str, **labels: str) -> None:
        """Somebody edits a pod that waits."""
        raw = self.yard.pods[name]
        meta = {**raw["metadata"], "labels": {**raw["metadata"]["labels"], **labels}, "resourceVersion": "2"}
        self.show({**raw, "metadata": meta})

    def held(self) -> dict[str | None, list[str]]:
        return {one.uid: [str(uuid) for uuid in one.uuids] for one in self.ledger.reservations()}

    def come(self, name: str, gpus: int | None = 1, *, seconds: int = 0, **members: Any) -> None:
        """A pod that waits has been created."""
        raw = builders.raw_pod(raw_container(gpus=gpus), name=name, uid=f"uid-{name}", **members)
        gated = waiting(raw, builders.claim(raw), RULES, "because")
        created = (NOW + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
        self.show({**gated, "metadata": {**gated["metadata"], "creationTimestamp": created, "resourceVersion": "1"}})

    def show(self, raw: Raw) -> None:
        self.yard.pods[raw["metadata"]["name"]] = raw
        self.pods.changed(raw)

    def opened(self) -> dict[str, str]:
        return {
            name: raw["metadata"]["annotations"][GPU]
            for name, raw in self.yard.pods.items()
            if "schedulingGates" not in raw["spec"]
        }

    async def end(self, name: str) -> None:
        """The pod has ended, and the watch said so."""
        raw = self.yard.pods.pop(name)
        self.pods.deleted(raw)
        held = self.ledger.of_pod(f"uid-{name}")
        if held is not None:
            await self.ledger.release(held.id, PodIdentity(raw["metadata"]["namespace"], name, f"uid-{name}"))

    def order(self) -> list[str]:
        """Of those that wait and are of one kind."""
        lines = self.pods.lines
        return [one.pod.name for kind in lines.kinds() for head in lines.heads(kind) for one in lines.behind(head)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_the_first_that_came_are_served_first(scene: Scene) -> None:
    scene.come("c", seconds=3)
    scene.come("a", seconds=1)
    scene.come("b", seconds=2)
    await scene.queue.step()
    assert scene.opened().keys() == {"a", "b"}
    assert {one.uid for one in scene.ledger.reservations()} == {"uid-a", "uid-b"}
    await scene.end("a")
    await scene.queue.step()
    assert scene.opened().keys() == {"b", "c"}


async def test_turns_go_round_by_namespace(scene: Scene) -> None:
    for number in range(8):
        scene.come(f"many-{number}", seconds=number)
    scene.come("late-0", seconds=8, namespace="cv")
    scene.come("late-1", seconds=9, namespace="cv")
    await scene.queue.step()
    turns = [*scene.opened()]
    for _ in range(4):
        before = scene.opened().keys()
        await scene.end(min(before, key=turns.index))
        await scene.queue.step()
        turns += scene.opened().keys() - before
    assert turns == ["many-0", "late-0", "many-1", "late-1", "many-2", "many-3"]


async def test_a_namespace_with_too_many_orphans_is_passed_over_until_they_end(scene: Scene) -> None:
    scene.orphans = 1
    scene.queue = scene.another()
    scene.come("gone")
    await scene.queue.step()
    (one,) = scene.ledger.reservations()
    pod = PodIdentity("ml", "gone", "uid-gone")
    scene.ledger._index.make(
        one.node, Abandon(one.id, pod, one.since, Orphan(NOW, HOUR)), NOW, Times(HOUR, timedelta(seconds=5))
    )
    scene.come("next")
    scene.come("other", seconds=1, namespace="cv")
    await scene.queue.step()
    assert scene.opened().keys() == {"gone", "other"}
    await scene.end("gone")
    scene.now += HOUR
    await scene.queue.step()
    assert scene.opened().keys() == {"other", "next"}


async def test_another_leader_has_counted_the_turns_that_it_has_seen_taken(scene: Scene) -> None:
    for number in range(3):
        scene.come(f"many-{number}", seconds=number)
    scene.come("late", seconds=8, namespace="cv")
    raw = scene.yard.pods["many-0"]
    scene.show({**raw, "spec": {**raw["spec"], "schedulingGates": []}})
    assert scene.order() == ["late", "many-1", "many-2"]


async def test_a_pod_that_is_deleted_while_it_waits_has_taken_no_turn(scene: Scene) -> None:
    for number in range(3):
        scene.come(f"many-{number}", seconds=number)
    scene.come("late", seconds=8, namespace="cv")
    raw = scene.yard.pods["many-0"]
    scene.show({**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert scene.order() == ["many-1", "late", "many-2"]


async def test_a_large_claim_that_is_first_is_overtaken_by_nobody_of_another_namespace(scene: Scene) -> None:
    scene.come("first")
    await scene.queue.step()
    scene.come("large", 2, seconds=1)
    await scene.queue.step()
    for number in range(3):
        scene.come(f"small-{number}", seconds=2 + number, namespace=f"other-{number}")
        await scene.queue.step()
    assert scene.opened().keys() == {"first"}
    await scene.end("first")
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}


async def test_to_whom_a_node_is_left_stays_first_whatever_stands_before_it_in_its_namespace(scene: Scene) -> None:
    """The one before it waits for a GPU that does not work, and has its namespace's turn in this round."""
    broken = evolve(device("GPU-2", index=2), is_healthy=False)
    scene.fleet.put(node("node-a", device("GPU-0", index=0), device("GPU-1", index=1), broken), NOW)
    scene.come("running")
    await scene.queue.step()
    scene.come("impossible", 3, seconds=1)
    scene.come("large", 2, seconds=2)
    await scene.queue.step()
    scene.come("other", 2, seconds=3, namespace="cv")
    await scene.queue.step()
    await scene.end("running")
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}


async def test_an_opened_pod_is_as_its_reservation_says(scene: Scene) -> None:
    own = builders.term(builders.expression("zone", "Exists"))
    scene.fleet.put(node("node-a", device("GPU-0", index=0), labels={"zone": "a"}), NOW)
    scene.come("a", affinity=builders.required_affinity(own))
    await scene.queue.step()
    raw = scene.yard.pods["a"]
    (held,) = scene.ledger.reservations()
    assert (held.phase, held.id) == (Phase.FINALIZED, "pod-uid-a")
    assert held.grace == timedelta(seconds=30)
    pod = Pod.parse(raw)
    claim, identity = recorded_claim(pod), check.identity_of(pod)
    assert claim is not None
    assert check.matches_reservation(raw, claim, held, identity, RULES, has_waited=True) is None
    assert raw["metadata"]["labels"] == {}
    assert "gpuwarden.io/waiting" not in raw["metadata"]["annotations"]
    (term,) = raw["spec"]["affinity"]["nodeAffinity"][builders.REQUIRED]["nodeSelectorTerms"]
    assert term["matchExpressions"] == own["matchExpressions"]
    assert term["matchFields"] == [builders.expression("metadata.name", "In", "node-a")]
    (container,) = raw["spec"]["containers"]
    assert [one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]] == [
        "metadata.annotations['gpuwarden.io/gpu-uuid']"
    ] * 2


async def test_an_opened_pod_has_its_gpus_in_the_order_of_its_maps_line(scene: Scene) -> None:
    text = {"gpu-scheduling-map": "0=node-a:1,GPU-0"}
    scene.come("web-0", gpus=None, annotations=text, owners=[builders.stateful_set("web")])
    old = scene.yard.pods["web-0"]
    await scene.queue.step()
    assert scene.opened() == {"web-0": "GPU-1,GPU-0"}
    scene.fleet.put(node("node-a", device("GPU-0", index=1), device("GPU-1", index=0)), NOW)
    raw = scene.yard.pods["web-0"]
    (held,) = scene.ledger.reservations()
    claim = recorded_claim(Pod.parse(old))
    assert claim is not None
    assert (
        check.matches_reservation(raw, claim, held, check.identity_of(Pod.parse(raw)), RULES, has_waited=True) is None
    )


async def test_small_claims_that_came_later_do_not_overtake_a_large_one(scene: Scene) -> None:
    scene.come("first")
    await scene.queue.step()
    scene.come("large", 2, seconds=1)
    scene.come("small", 1, seconds=2)
    await scene.queue.step()
    assert scene.opened().keys() == {"first"}
    assert "turn of another pod" in scene.yard.said["small"]
    await scene.end("first")
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}


async def test_who_wants_no_gpu_waits_behind_nobody_who_does(scene: Scene) -> None:
    asked = {"gpuwarden.io/required-hash": HASH}
    scene.fleet.prove("node-a", builders.evidence("node-a"), NOW)
    scene.come("first", annotations=asked)
    await scene.queue.step()
    scene.come("large", 2, seconds=1, annotations=asked)
    scene.come("proven-only", None, seconds=2, annotations=asked)
    await scene.queue.step()
    assert {name for name, raw in scene.yard.pods.items() if "schedulingGates" not in raw["spec"]} == {
        "first",
        "proven-only",
    }


async def test_a_claim_that_no_node_could_serve_holds_nobody_up(scene: Scene) -> None:
    scene.come("impossible", 3)
    scene.come("small", 1, seconds=1)
    await scene.queue.step()
    assert scene.opened().keys() == {"small"}
    assert ("impossible", Reason.NO_MATCHING_DEVICE) in scene.heard.recorded


async def test_another_kind_is_not_held_up(scene: Scene) -> None:
    scene.come("first")
    await scene.queue.step()
    scene.come("large", 2, seconds=1)
    scene.come("elsewhere", 1, seconds=2, nodeSelector={"kubernetes.io/os": "linux"})
    scene.fleet.put(node("node-b", device("GPU-2"), labels={"kubernetes.io/os": "linux"}), NOW)
    await scene.queue.step()
    assert scene.opened().keys() == {"first", "elsewhere"}


async def test_stopped_before_the_gate_is_opened_it_goes_on_with_the_same_gpu(scene: Scene) -> None:
    scene.come("a")
    scene.yard.failing = True
    await scene.queue.step()
    (before,) = scene.ledger.reservations()
    scene.yard.failing = False
    await scene.another().step()
    (after,) = scene.ledger.reservations()
    assert after == before
    assert scene.opened() == {"a": before.uuids[0]}


async def test_stopped_right_after_it_reserved_it_finds_what_it_reserved(scene: Scene) -> None:
    """The GPU that is held is the only one left: deciding afresh would find none."""
    scene.come("other")
    await scene.queue.step()
    scene.come("a", seconds=1)
    ask = ReservationRequest(ReservationId("pod-uid-a"), "ml", scene.waiter("a").claim.digest, "a")
    (left,) = {"GPU-0", "GPU-1"} - set(scene.opened().values())
    place = Placement("node-a", (builders.slot(left),))
    await scene.ledger.reserve(ask, [place], answer_by=NOW + timedelta(seconds=9))
    await scene.another().step()
    assert scene.opened()["a"] == left
    assert len(scene.ledger.reservations()) == 2


@pytest.mark.parametrize(
    ("name", "seconds", "is_adopted"),
    [
        pytest.param("a", 0, True, id="made-for-its-name"),
        pytest.param("b", 0, False, id="made-for-another-name"),
        pytest.param(None, 30, False, id="without-a-name-its-creation-may-be-under-way"),
        pytest.param(None, 60, True, id="without-a-name-no-creation-lasts-so-long"),
    ],
)
async def test_what_an_earlier_creation_left_over_is_adopted(
    scene: Scene, name: str | None, seconds: int, is_adopted: bool
) -> None:
    scene.come("a")
    ask = ReservationRequest(ReservationId("review-1"), "ml", scene.waiter("a").claim.digest, name)
    place = Placement("node-a", (builders.slot("GPU-1"),))
    await scene.ledger.reserve(ask, [place], answer_by=NOW + timedelta(seconds=9))
    scene.now += timedelta(seconds=seconds)
    await scene.queue.step()
    held = scene.ledger.of_pod("uid-a")
    assert held is not None
    assert (held.id == "review-1") is is_adopted
    assert len(scene.ledger.reservations()) == (1 if is_adopted else 2)


async def test_who_waits_is_told_when_the_reason_changes_and_not_in_every_pass(scene: Scene) -> None:
    asked = {"gpuwarden.io/required-hash": HASH}
    scene.come("a", 2, annotations=asked)
    for _ in range(3):
        await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.NO_PROVEN_NODE)]
    scene.fleet.prove("node-a", builders.evidence("node-a"), scene.now)
    await scene.ledger.reserve(
        ReservationRequest(ReservationId("r1"), "ml", "d1"), [ON_GPU_0], answer_by=NOW + timedelta(seconds=9)
    )
    for _ in range(3):
        await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.NO_PROVEN_NODE), ("a", Reason.NO_FREE_DEVICE)]
    assert "with fewer than 2 free" in scene.yard.said["a"]


async def test_a_gate_of_an_undressed_pod_is_never_opened(scene: Scene) -> None:
    raw = builders.raw_pod(raw_container(gpus=1), name="bare", uid="uid-bare", schedulingGates=[{"name": GATE}])
    scene.show(raw)
    for _ in range(2):
        await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.recorded == [("bare", Reason.FORGED)]
    assert not scene.ledger.reservations()


async def test_a_record_that_says_more_than_the_pod_asks_for_is_nobodys_turn(scene: Scene) -> None:
    scene.come("a")
    raw = scene.yard.pods["a"]
    forged = {**raw["metadata"]["annotations"], "gpuwarden.io/claim": '{"asked":{"main":1},"gpus":2}'}
    scene.show({**raw, "metadata": {**raw["metadata"], "annotations": forged}})
    await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.recorded == [("a", Reason.FORGED)]


@pytest.mark.defect("S1-2")
async def test_an_ordinal_without_a_line_waits_and_is_told_its_number(scene: Scene) -> None:
    text = {"gpuwarden.io/gpu-map": "0=node-a:0"}
    raw = builders.raw_pod(name="web-7", uid="uid-web-7", annotations=text, owners=[builders.stateful_set("web")])
    gated = waiting(raw, builders.claim(raw), RULES, "because")
    scene.show({**gated, "metadata": {**gated["metadata"], "resourceVersion": "1"}})
    await scene.queue.step()
    assert scene.heard.recorded == [("web-7", Reason.NOT_IN_MAP)]
    assert "ordinal 7" in scene.heard.messages[0]


async def test_evidence_that_ends_before_the_gate_is_open_keeps_it_shut() -> None:
    scene = Scene(always=True)
    scene.fleet.prove("node-a", builders.evidence("node-a", until=NOW + timedelta(seconds=10)), NOW)
    scene.come("a")
    scene.yard.failing = True
    await scene.queue.step()
    scene.yard.failing = False
    scene.now += timedelta(seconds=11)
    await scene.queue.step()
    assert scene.opened() == {}


async def test_a_line_is_asked_for_once_a_pass_however_long_it_is(scene: Scene) -> None:
    for number in range(200):
        scene.come(f"p{number}", seconds=number)
    await scene.queue.step()
    kind = scene.pods.lines.kinds()[0]
    assert [head.pod.name for head in scene.pods.lines.heads(kind)] == ["p2"]
    assert len(scene.opened()) == 2


# What is held behind a gate that is shut.


async def test_what_a_namespace_demands_by_now_is_asked_before_anything_is_held(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.come(name)
    scene.demand(HASH, is_heard=False)
    for _ in range(3):
        await scene.queue.step()
        assert scene.held() == {}
    assert scene.opened() == {}
    assert scene.heard.recorded == [("a", Reason.FORGED), ("b", Reason.FORGED)]


async def test_a_pod_that_is_edited_behind_its_gate_holds_nothing_any_more(scene: Scene) -> None:
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.yard.fails = {"a"}
    await scene.queue.step()
    assert scene.held().keys() == {"uid-a"}
    scene.relabel("a", **{"gpuwarden.io/gpu.model": "b200"})
    await scene.queue.step()
    assert scene.held().keys() == {"uid-b"}
    assert scene.opened().keys() == {"b"}
    assert ("a", Reason.FORGED) in scene.heard.recorded


async def test_a_demand_that_comes_behind_the_gate_ends_what_is_held(scene: Scene) -> None:
    scene.come("a")
    scene.yard.failing = True
    await scene.queue.step()
    scene.demand(HASH, is_heard=False)
    scene.now += timedelta(minutes=1)
    await scene.queue.step()
    assert scene.held() == {}


async def test_a_gate_that_cannot_be_opened_holds_gpus_until_the_bind_deadline(scene: Scene) -> None:
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.yard.fails = {"a"}
    while scene.now < NOW + BIND_DEADLINE:
        await scene.queue.step()
        assert scene.held().keys() == {"uid-a"}
        scene.now += timedelta(seconds=20)
    await scene.queue.step()
    assert scene.held().keys() == {"uid-b"}
    assert scene.opened().keys() == {"b"}
    assert ("a", Reason.BIND_DEADLINE_PASSED) in scene.heard.recorded
    await scene.end("b")
    scene.yard.fails = set()
    scene.now += BIND_DEADLINE
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}


async def test_what_was_held_while_nobody_acted_is_held_anew(scene: Scene) -> None:
    """Its time to get onto a node would be over as its gate is opened."""
    scene.come("a")
    scene.yard.failing = True
    await scene.queue.step()
    scene.yard.failing = False
    scene.now += 2 * BIND_DEADLINE
    await scene.another().step()
    assert scene.opened().keys() == {"a"}
    (held,) = scene.ledger.reservations()
    assert held.since == scene.now


async def test_of_a_pod_whose_gate_is_open_unheard_nothing_is_taken(scene: Scene) -> None:
    scene.come("a")
    scene.yard.loses_answers = True
    await scene.queue.step()
    before = scene.held()
    assert scene.opened().keys() == {"a"}
    scene.now += BIND_DEADLINE
    await scene.queue.step()
    assert scene.held() == before
    assert "uid-a" not in scene.pods.lines


def two_proven_nodes() -> Scene:
    scene = Scene(always=True)
    scene.fleet.put(node("node-b", device("GPU-2"), device("GPU-3")), NOW)
    for name in ("node-a", "node-b"):
        scene.fleet.prove(name, builders.evidence(name), NOW)
    return scene


@pytest.mark.parametrize("is_gone", [False, True], ids=["without-evidence", "gone"])
async def test_a_reservation_on_a_node_that_will_not_do_any_more_is_made_anew_elsewhere(*, is_gone: bool) -> None:
    scene = two_proven_nodes()
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.yard.failing = True
    await scene.queue.step()
    first = scene.ledger.of_pod("uid-a")
    assert first is not None
    if is_gone:
        scene.fleet.remove(first.node)
    else:
        scene.fleet.prove(first.node, None, scene.now)
    scene.yard.failing = False
    scene.now += timedelta(seconds=2)
    await scene.queue.step()
    second = scene.ledger.of_pod("uid-a")
    if second is not None:
        assert second.node != first.node
    assert {one.node for one in scene.ledger.reservations()}.isdisjoint({first.node})
    assert len(scene.opened()) == 1


async def test_a_reservation_on_a_node_without_evidence_does_not_hold_up_its_line() -> None:
    scene = two_proven_nodes()
    scene.come("a")
    scene.yard.failing = True
    await scene.queue.step()
    (first,) = scene.ledger.reservations()
    scene.fleet.prove(first.node, None, scene.now)
    scene.come("b", seconds=1)
    scene.yard.failing = False
    scene.now += timedelta(seconds=2)
    await scene.queue.step()
    assert scene.opened().keys() == {"a", "b"}
    assert first.node not in {one.node for one in scene.ledger.reservations()}


async def test_nothing_is_adopted_on_a_node_without_evidence() -> None:
    scene = two_proven_nodes()
    scene.come("a")
    ask = ReservationRequest(ReservationId("review-1"), "ml", scene.waiter("a").claim.digest, "a")
    await scene.ledger.reserve(ask, [ON_GPU_0], answer_by=LATER)
    scene.fleet.prove("node-a", None, NOW)
    await scene.queue.step()
    held = scene.ledger.of_pod("uid-a")
    assert held is not None
    assert (held.node, held.id) == ("node-b", "pod-uid-a")
    assert scene.opened().keys() == {"a"}


async def test_a_reservation_for_another_claim_is_nobodys_own_whatever_its_id(scene: Scene) -> None:
    scene.come("a", 2)
    await scene.ledger.reserve(
        ReservationRequest(ReservationId("pod-uid-a"), "ml", "forged"), [ON_GPU_0], answer_by=LATER
    )
    await scene.queue.step()
    assert scene.opened() == {"a": "GPU-0,GPU-1"}
    assert {one.claim_digest for one in scene.ledger.reservations()} != {"forged"}


async def test_a_reservation_that_names_a_waiting_pod_and_is_of_another_claim_is_given_back(scene: Scene) -> None:
    scene.come("a", 2)
    forged = ReservationRequest(ReservationId("review-9"), "ml", "forged")
    await scene.ledger.reserve(forged, [ON_GPU_0], answer_by=LATER)
    await scene.ledger.bind_to_pod(PodProof.NAMED, forged.id, builders.identity("a", "uid-a"))
    await scene.queue.step()
    assert scene.opened() == {"a": "GPU-0,GPU-1"}


# What it goes by.


async def test_while_a_watch_is_interrupted_nothing_is_done_and_afterwards_all_is_read_anew(scene: Scene) -> None:
    scene.come("a")
    scene.is_current = False
    await scene.queue.step()
    assert (scene.opened(), scene.reads, scene.held()) == ({}, 0, {})
    scene.is_current = True
    for _ in range(3):
        await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    assert scene.reads == 1
    scene.is_current = False
    await scene.queue.step()
    scene.is_current = True
    scene.come("b")
    await scene.queue.step()
    assert scene.reads == 2


async def test_whoever_is_elected_reads_before_it_reserves(scene: Scene) -> None:
    scene.come("a")
    scene.can_be_read = False
    for _ in range(2):
        await scene.queue.step()
    assert (scene.held(), scene.reads) == ({}, 2)
    scene.can_be_read = True
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    scene.come("b")
    scene.queue.begin()
    await scene.queue.step()
    assert scene.reads == 4


@pytest.mark.parametrize("has_acted", [False, True], ids=["before-it-acts", "after-it-has-acted-too"])
async def test_a_leader_whose_watch_is_behind_leaves_no_second_gpu_with_a_pod(scene: Scene, *, has_acted: bool) -> None:
    bench = ClusterBench()
    second = bench.another()
    scene.come("a")
    ask = ReservationRequest(ReservationId("pod-uid-a"), "ml", scene.waiter("a").claim.digest, "a")
    await bench.reserve(ask, Placement("node-b", (builders.slot("GPU-b0"),)))
    await bench.ledger.bind_to_pod(PodProof.CONFIRMED, ask.id, builders.identity("a", "uid-a"))
    bench.pods.uids.add("uid-a")
    if has_acted:
        bench.now += timedelta(seconds=1)
        await bench.reserve(ask, Placement("node-a", (builders.slot("GPU-a0"),)), by=second)
        await second.ledger.bind_to_pod(PodProof.CONFIRMED, ask.id, builders.identity("a", "uid-a"))

    async def read_anew() -> bool:
        for raw in bench.store.objects.values():
            second.ledger.learn(raw)
        return True

    queue = Queue(
        scene.pods,
        second.ledger,
        second.fleet,
        scene.policy,
        scene.claims,
        RULES,
        scene.yard,
        scene.heard,
        lambda: bench.now,
        read_anew=read_anew,
    )
    await queue.step()
    assert scene.opened() == {"a": "GPU-b0"}
    assert (len(bench.held("node-a")), len(bench.held("node-b"))) == (0, 1)


async def test_what_a_list_says_of_pods_known_before_counts_and_the_watch_knows_the_rest(scene: Scene) -> None:
    for name in ("gone", "edited", "deleted", "same"):
        scene.come(name)
    asked = list(scene.pods.raws)
    listed = {name: scene.yard.pods[name] for name in ("edited", "deleted", "same")}
    meta = listed["edited"]["metadata"]
    listed["edited"] = {**listed["edited"], "metadata": {**meta, "labels": {}, "resourceVersion": "2"}}
    scene.come("new")
    scene.pods.deleted(scene.yard.pods["deleted"])
    scene.pods.read(asked, listed.values())
    assert scene.pods.lines.uids() == {"uid-same", "uid-new"}
    assert scene.pods.misfits.keys() == {"uid-edited"}


async def test_a_pod_fits_again_once_its_namespace_demands_what_it_did(scene: Scene) -> None:
    scene.come("a")
    scene.yard.failing = True
    scene.demand(HASH)
    await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.FORGED)]
    scene.yard.failing = False
    scene.demand(None)
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}


async def test_only_pods_of_namespaces_that_demand_something_else_are_judged_again(scene: Scene) -> None:
    scene.come("a")
    scene.demand(HASH)
    scene.pods.judge_again(9)
    assert scene.pods.misfits.keys() == {"uid-a"}
    scene.namespaces.view.changed({"metadata": {"name": "ml"}})
    scene.demands.changed({"metadata": {"name": "other", "annotations": {"gpuwarden.io/required-hash": HASH}}})
    scene.pods.judge_again(9)
    assert scene.pods.misfits.keys() == {"uid-a"}
    scene.demands.deleted({"metadata": {"name": "ml"}})
    scene.pods.judge_again(9)
    assert scene.pods.misfits == {}


async def test_of_a_pod_that_is_gone_nobody_is_told_that_its_gate_is_open(scene: Scene) -> None:
    scene.come("a")
    del scene.yard.pods["a"]
    await scene.queue.step()
    assert scene.heard.recorded == []
    assert "uid-a" not in scene.pods.lines


# How much a pass does.


def many_kinds(scene: Scene, number: int, gpus: int = 3) -> None:
    """Nobody can be served."""
    for k in range(number):
        scene.come(f"p{k}", gpus, nodeSelector={"zone": f"z{k}"})


async def test_a_pass_over_many_kinds_lets_others_work(scene: Scene) -> None:
    many_kinds(scene, 50)
    worked = 0

    async def others() -> None:
        nonlocal worked
        while True:
            worked += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await scene.queue._serve_all(QueuePass(float("inf"), [], set()))
    task.cancel()
    assert worked >= 50


async def test_a_pass_ends_when_its_time_is_over_and_the_next_goes_on_there(scene: Scene) -> None:
    many_kinds(scene, 30)
    scene.time = itertools.count(0.0, 0.1)
    passes = 0
    while len(scene.yard.said) < 30:
        before = len(scene.yard.said)
        await scene.queue.step()
        passes += 1
        assert 0 < len(scene.yard.said) - before < 15
    assert passes > 2


async def test_kinds_are_looked_at_again_only_when_something_has_changed(scene: Scene) -> None:
    many_kinds(scene, 30)
    await scene.queue.step()
    before = scene.fleet.questions
    await scene.queue.step()
    assert scene.fleet.questions == before
    scene.come("q", 3, nodeSelector={"zone": "z7"})
    await scene.queue.step()
    assert before == scene.fleet.questions  # it stands behind one that wants the same
    scene.come("r", 2, nodeSelector={"zone": "z7"})
    await scene.queue.step()
    assert before < scene.fleet.questions < before + 9
    before = scene.fleet.questions
    scene.fleet.put(node("node-z", *(device(f"GPU-z{k}") for k in range(3)), labels={"zone": "z9"}), NOW)
    await scene.queue.step()
    assert scene.fleet.questions >= before + 30
    assert scene.opened().keys() == {"p9"}


NEWS: dict[str, Callable[[Scene], object]] = {
    "a-node": lambda scene: scene.fleet.put(node("node-b", device("GPU-9")), NOW),
    "a-label": lambda scene: scene.fleet.put(node("node-a", device("GPU-0"), labels={"zone": "a"}), NOW),
    "a-node-that-went": lambda scene: scene.fleet.remove("node-a"),
    "evidence": lambda scene: scene.fleet.prove("node-a", builders.evidence("node-a"), NOW),
    "a-reservation": lambda scene: scene.fleet.hold(builders.reservation(builders.slot("GPU-1"))),
    "the-end-of-one": lambda scene: scene.fleet.free(builders.reservation(builders.slot("GPU-0"))),
    "a-map": lambda scene: scene.fleet.set_aside({"node-a": {"0": MapOwner("", SetId("set-1", "ml"))}}, {"node-a"}),
    "time": lambda scene: setattr(scene, "now", NOW + timedelta(seconds=5)),
}


@pytest.mark.parametrize("news", NEWS.values(), ids=NEWS)
async def test_whatever_a_decision_goes_by_is_noticed(scene: Scene, news: Callable[[Scene], object]) -> None:
    scene.fleet.hold(builders.reservation(builders.slot("GPU-0")))
    scene.come("a", 2)
    await scene.queue.step()
    before = scene.fleet.questions
    await scene.queue.step()
    assert scene.fleet.questions == before
    news(scene)
    await scene.queue.step()
    assert scene.fleet.questions > before


async def test_claims_that_no_node_can_hold_wait_for_those_that_one_can(scene: Scene) -> None:
    for count in range(3, 200):
        scene.come(f"huge-{count}", count)
    scene.come("small", seconds=1)
    scene.time = itertools.count(0.0, 0.1)
    await scene.queue.step()
    assert scene.opened().keys() == {"small"}


async def test_pods_are_told_together_and_one_that_hangs_keeps_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhook.admission.queue.reports.TELLING_BUDGET", 0.05)
    many_kinds(scene, 40)
    scene.yard.hangs = {"p0"}
    async with asyncio.timeout(10):
        await scene.queue.step()
    assert len(scene.yard.said) == 39
    assert scene.yard.told_at_once > 4
    scene.yard.hangs = set()
    await scene.queue.step()
    assert len(scene.yard.said) == 40


async def test_a_pod_that_selects_other_nodes_by_now_is_not_opened_for_the_node_it_got(scene: Scene) -> None:
    scene.fleet.put(node("node-a", device("GPU-0"), labels={"zone": "a"}), NOW)
    scene.fleet.put(node("node-b", device("GPU-2"), device("GPU-3"), labels={"zone": "b"}), NOW)
    scene.come("a")

    async def narrowed() -> None:
        raw = scene.yard.pods["a"]
        meta = {**raw["metadata"], "resourceVersion": "2"}
        scene.show({**raw, "metadata": meta, "spec": {**raw["spec"], "nodeSelector": {"zone": "b"}}})

    scene.ledger.meanwhile.append(narrowed)
    await scene.queue.step()
    assert scene.opened() == {}
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    assert [one.node for one in scene.ledger.reservations()] == ["node-b"]


async def test_what_could_not_be_written_into_a_pod_is_written_later(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.come(name, 3)
    scene.yard.cannot_be_told = {"a"}
    for _ in range(3):
        await scene.queue.step()
    assert scene.yard.said.keys() == {"b"}
    assert sorted(name for name, _ in scene.heard.recorded) == ["a", "b"]
    scene.yard.cannot_be_told = set()
    await scene.queue.step()
    assert scene.yard.said.keys() == {"a", "b"}
    assert len(scene.heard.recorded) == 2


async def test_of_what_a_pod_waited_for_nothing_is_written_once_its_gate_is_open(scene: Scene) -> None:
    scene.come("first", 2)
    await scene.queue.step()
    scene.come("second", 2, seconds=1)
    scene.yard.cannot_be_told = {"second"}
    await scene.queue.step()
    await scene.end("first")
    scene.yard.cannot_be_told = set()
    for _ in range(2):
        await scene.queue.step()
    assert scene.opened().keys() == {"second"}
    assert scene.yard.said == {}


# Others are faster.


async def test_a_lost_race_is_decided_anew_at_once(scene: Scene) -> None:
    scene.come("a")
    places: list[str] = []

    async def other() -> None:
        found = decide(scene.waiter("a").claim, scene.fleet, scene.policy, most=1)
        assert not isinstance(found, Deny)
        (place,) = found
        places.append(place.slots[0].uuid)
        await super(Contested, scene.ledger).reserve(
            ReservationRequest(ReservationId("r1"), "ml", "d1"), [place], answer_by=LATER
        )

    scene.ledger.meanwhile.append(other)
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    assert scene.opened()["a"] not in places


async def test_after_a_race_lost_for_good_small_claims_do_not_overtake(scene: Scene) -> None:
    scene.come("large", 2)
    scene.come("small", 1, seconds=1)

    async def other() -> None:
        await super(Contested, scene.ledger).reserve(
            ReservationRequest(ReservationId("r1"), "ml", "d1"), [ON_GPU_0], answer_by=LATER
        )

    scene.ledger.meanwhile.append(other)
    await scene.queue.step()
    assert scene.opened() == {}
    assert "turn of another pod" in scene.yard.said["small"]


async def test_a_claim_that_the_ledger_refuses_is_tried_later_and_holds_up_nobody(scene: Scene) -> None:
    scene.come("refused")
    for number in range(1, 3):
        scene.come(f"next-{number}", seconds=number)

    async def refuses() -> None:
        raise PlacementRefusedError("not by these rules")

    scene.ledger.meanwhile.append(refuses)
    await scene.queue.step()
    assert scene.opened().keys() == {"next-1", "next-2"}
    await scene.end("next-1")
    await scene.queue.step()
    assert scene.opened().keys() == {"next-2"}
    scene.now += timedelta(seconds=1)
    await scene.queue.step()
    assert scene.opened().keys() == {"next-2", "refused"}


async def test_while_the_ledger_is_away_for_one_nobody_of_its_kind_overtakes_it(scene: Scene) -> None:
    scene.come("large", 2)
    scene.come("small", 1, seconds=1)

    async def away() -> None:
        raise LedgerUnavailableError("away")

    scene.ledger.meanwhile.append(away)
    await scene.queue.step()
    assert scene.opened() == {}
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}
