"""The queue: order, reasons, and restarts after any step."""

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
from webhook.ledger.moves import MarkOrphaned, Times

GATE = "gpuwarden.io/queue"
GPU = "gpuwarden.io/gpu-uuid"
RULES = DressRules()
HOUR = timedelta(hours=1)
BIND_DEADLINE = timedelta(minutes=5)
LATER = NOW + timedelta(days=1)
ON_GPU_0 = Placement("node-a", (builders.slot("GPU-0"),))


class FakeGates:
    """Pods as the API server stores them: a patch applies as a whole or not at all. It can be made to fail."""

    def __init__(self) -> None:
        self.pods: dict[str, Raw] = {}
        self.reasons: dict[str, str] = {}
        self.failing = False
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.failing_writes: set[str] = set()
        self.loses_answers = False
        self.concurrent_writes = self.most_concurrent_writes = 0

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        if self.failing or pod.name in self.fails:
            raise GateError("away")
        if pod.name not in self.pods:
            return False
        self.pods[pod.name] = jsonpatch.apply_patch(self.pods[pod.name], patch)
        if self.loses_answers:
            raise GateError("away")
        return True

    async def write_reason(self, pod: PodIdentity, why: str) -> None:
        if pod.name in self.hangs:
            await asyncio.Event().wait()
        if pod.name in self.failing_writes:
            raise GateError("away")
        self.concurrent_writes += 1
        self.most_concurrent_writes = max(self.most_concurrent_writes, self.concurrent_writes)
        await asyncio.sleep(0)
        self.concurrent_writes -= 1
        self.reasons[pod.name] = why

    async def is_closed(self, pod: PodIdentity) -> bool:
        return pod.name in self.pods and is_waiting(self.pods[pod.name])


class CountingFleet(Fleet):
    """Counts the searches."""

    questions = 0

    def index_labels(self, asked: NodesAsked) -> frozenset[str]:
        self.questions += 1
        return super().index_labels(asked)


class ContestedLedger(MemoryLedger):
    """Other writers: `meanwhile` runs before a reservation is made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.meanwhile: list[Callable[[], Awaitable[object]]] = []

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        if self.meanwhile:
            await self.meanwhile.pop()()
        return await super().reserve(ask, placements, answer_by=answer_by)


class NoNamespaces:
    """Only namespaces from the watch exist."""

    async def get(self, name: str) -> Raw | None:
        return None


class Scene:
    """Two free GPUs on one node, and a queue."""

    def __init__(self, *, always: bool = False) -> None:
        self.now = NOW
        self.is_current = self.can_be_read = True
        self.reads = 0
        self.time: Iterator[float] = itertools.repeat(0.0)
        self.fleet = CountingFleet()
        self.fleet.put(node("node-a", device("GPU-0", index=0), device("GPU-1", index=1)), NOW)
        self.ledger = ContestedLedger(self.fleet, lambda: self.now, Times(timedelta(seconds=90), timedelta(seconds=5)))
        self.gates, self.heard = FakeGates(), RecordedEvents()
        self.policy = EvidencePolicy(always)
        self.namespaces = WatchedNamespaces(NoNamespaces())
        self.orphans = 0
        self.queue = self.another()

    def another(self) -> Queue:
        """A restarted queue: it knows the watch and the ledger."""
        self.claims = ClaimReader(ClaimRules(), self.namespaces)
        self.pods = WaitingPods(self.claims, RULES)
        self.pods.replaced(self.gates.pods)
        self.demands = DemandsListener(self.pods)
        return Queue(
            self.pods,
            self.ledger,
            self.fleet,
            self.policy,
            self.claims,
            RULES,
            self.gates,
            self.heard,
            lambda: self.now,
            bind_deadline=BIND_DEADLINE,
            is_current=lambda: self.is_current,
            list_again=self.list_again,
            timer=lambda: next(self.time),
            orphans_per_namespace=self.orphans,
        )

    async def list_again(self) -> bool:
        self.reads += 1
        return self.can_be_read

    def require_hash(self, digest: str | None, *, is_seen: bool = True) -> None:
        """Sets or removes the hash that the namespace of all pods requires."""
        annotations = {} if digest is None else {"gpuwarden.io/required-hash": digest}
        raw = {"metadata": {"name": "ml", "annotations": annotations}}
        self.namespaces.view.changed(raw)
        if is_seen:
            self.demands.changed(raw)

    def waiter(self, name: str) -> QueuedPod:
        found = self.pods.queue_order.get(f"uid-{name}")
        assert found is not None
        return found

    def relabel(self, name: str, **labels: str) -> None:
        """Edits a waiting pod."""
        raw = self.gates.pods[name]
        meta = {**raw["metadata"], "labels": {**raw["metadata"]["labels"], **labels}, "resourceVersion": "2"}
        self.show({**raw, "metadata": meta})

    def held(self) -> dict[str | None, list[str]]:
        return {one.uid: [str(uuid) for uuid in one.uuids] for one in self.ledger.reservations()}

    def come(self, name: str, gpus: int | None = 1, *, seconds: int = 0, **members: Any) -> None:
        """Creates a waiting pod."""
        raw = builders.raw_pod(raw_container(gpus=gpus), name=name, uid=f"uid-{name}", **members)
        gated = waiting(raw, builders.claim(raw), RULES, "because")
        created = (NOW + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
        self.show({**gated, "metadata": {**gated["metadata"], "creationTimestamp": created, "resourceVersion": "1"}})

    def show(self, raw: Raw) -> None:
        self.gates.pods[raw["metadata"]["name"]] = raw
        self.pods.changed(raw)

    def opened(self) -> dict[str, str]:
        return {
            name: raw["metadata"]["annotations"][GPU]
            for name, raw in self.gates.pods.items()
            if "schedulingGates" not in raw["spec"]
        }

    async def end(self, name: str) -> None:
        """The pod has ended, and the watch has reported it."""
        raw = self.gates.pods.pop(name)
        self.pods.deleted(raw)
        held = self.ledger.of_pod(f"uid-{name}")
        if held is not None:
            await self.ledger.release(held.id, PodIdentity(raw["metadata"]["namespace"], name, f"uid-{name}"))

    def order(self) -> list[str]:
        """Of the waiting pods of one kind."""
        lines = self.pods.queue_order
        return [
            one.pod.name for kind in lines.kinds() for head in lines.heads(kind) for one in lines.same_count_from(head)
        ]


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_oldest_pods_are_served_first(scene: Scene) -> None:
    scene.come("c", seconds=3)
    scene.come("a", seconds=1)
    scene.come("b", seconds=2)
    await scene.queue.step()
    assert scene.opened().keys() == {"a", "b"}
    assert {one.uid for one in scene.ledger.reservations()} == {"uid-a", "uid-b"}
    await scene.end("a")
    await scene.queue.step()
    assert scene.opened().keys() == {"b", "c"}


async def test_namespaces_take_turns(scene: Scene) -> None:
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


async def test_namespace_with_too_many_orphans_is_skipped_until_they_end(scene: Scene) -> None:
    scene.orphans = 1
    scene.queue = scene.another()
    scene.come("gone")
    await scene.queue.step()
    (one,) = scene.ledger.reservations()
    pod = PodIdentity("ml", "gone", "uid-gone")
    scene.ledger._index.make(
        one.node, MarkOrphaned(one.id, pod, one.since, Orphan(NOW, HOUR)), NOW, Times(HOUR, timedelta(seconds=5))
    )
    scene.come("next")
    scene.come("other", seconds=1, namespace="cv")
    await scene.queue.step()
    assert scene.opened().keys() == {"gone", "other"}
    await scene.end("gone")
    scene.now += HOUR
    await scene.queue.step()
    assert scene.opened().keys() == {"other", "next"}


async def test_standby_counts_the_turns_that_it_observes(scene: Scene) -> None:
    for number in range(3):
        scene.come(f"many-{number}", seconds=number)
    scene.come("late", seconds=8, namespace="cv")
    raw = scene.gates.pods["many-0"]
    scene.show({**raw, "spec": {**raw["spec"], "schedulingGates": []}})
    assert scene.order() == ["late", "many-1", "many-2"]


async def test_deleted_waiting_pod_uses_no_turn(scene: Scene) -> None:
    for number in range(3):
        scene.come(f"many-{number}", seconds=number)
    scene.come("late", seconds=8, namespace="cv")
    raw = scene.gates.pods["many-0"]
    scene.show({**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert scene.order() == ["many-1", "late", "many-2"]


async def test_large_claim_that_is_first_is_not_overtaken_from_another_namespace(scene: Scene) -> None:
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


async def test_pod_with_a_reserved_node_stays_first(scene: Scene) -> None:
    """The pod before it waits for a broken GPU and takes its namespace's turn in this round."""
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


async def test_opened_pod_is_dressed_as_reserved(scene: Scene) -> None:
    own = builders.term(builders.expression("zone", "Exists"))
    scene.fleet.put(node("node-a", device("GPU-0", index=0), labels={"zone": "a"}), NOW)
    scene.come("a", affinity=builders.required_affinity(own))
    await scene.queue.step()
    raw = scene.gates.pods["a"]
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


async def test_opened_pod_has_its_gpus_in_the_order_of_its_map(scene: Scene) -> None:
    text = {"gpu-scheduling-map": "0=node-a:1,GPU-0"}
    scene.come("web-0", gpus=None, annotations=text, owners=[builders.stateful_set("web")])
    old = scene.gates.pods["web-0"]
    await scene.queue.step()
    assert scene.opened() == {"web-0": "GPU-1,GPU-0"}
    scene.fleet.put(node("node-a", device("GPU-0", index=1), device("GPU-1", index=0)), NOW)
    raw = scene.gates.pods["web-0"]
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
    assert "an earlier pod waits for the same devices" in scene.gates.reasons["small"]
    await scene.end("first")
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}


async def test_pod_without_gpus_does_not_wait_for_pods_with_gpus(scene: Scene) -> None:
    asked = {"gpuwarden.io/required-hash": HASH}
    scene.fleet.set_evidence("node-a", builders.evidence("node-a"), NOW)
    scene.come("first", annotations=asked)
    await scene.queue.step()
    scene.come("large", 2, seconds=1, annotations=asked)
    scene.come("proven-only", None, seconds=2, annotations=asked)
    await scene.queue.step()
    assert {name for name, raw in scene.gates.pods.items() if "schedulingGates" not in raw["spec"]} == {
        "first",
        "proven-only",
    }


async def test_claim_that_no_node_could_serve_blocks_no_other(scene: Scene) -> None:
    scene.come("impossible", 3)
    scene.come("small", 1, seconds=1)
    await scene.queue.step()
    assert scene.opened().keys() == {"small"}
    assert ("impossible", Reason.NO_MATCHING_DEVICE) in scene.heard.recorded


async def test_claims_of_another_kind_are_not_blocked(scene: Scene) -> None:
    scene.come("first")
    await scene.queue.step()
    scene.come("large", 2, seconds=1)
    scene.come("elsewhere", 1, seconds=2, nodeSelector={"kubernetes.io/os": "linux"})
    scene.fleet.put(node("node-b", device("GPU-2"), labels={"kubernetes.io/os": "linux"}), NOW)
    await scene.queue.step()
    assert scene.opened().keys() == {"first", "elsewhere"}


async def test_restart_before_the_gate_opens_keeps_the_same_gpu(scene: Scene) -> None:
    scene.come("a")
    scene.gates.failing = True
    await scene.queue.step()
    (before,) = scene.ledger.reservations()
    scene.gates.failing = False
    await scene.another().step()
    (after,) = scene.ledger.reservations()
    assert after == before
    assert scene.opened() == {"a": before.uuids[0]}


async def test_restart_after_reserving_finds_the_reservation(scene: Scene) -> None:
    """The held GPU is the last one: a new decision would find none."""
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
async def test_reservation_of_an_earlier_creation_is_adopted(
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


async def test_waiting_reason_is_reported_only_when_it_changes(scene: Scene) -> None:
    asked = {"gpuwarden.io/required-hash": HASH}
    scene.come("a", 2, annotations=asked)
    for _ in range(3):
        await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.NO_PROVEN_NODE)]
    scene.fleet.set_evidence("node-a", builders.evidence("node-a"), scene.now)
    await scene.ledger.reserve(
        ReservationRequest(ReservationId("r1"), "ml", "d1"), [ON_GPU_0], answer_by=NOW + timedelta(seconds=9)
    )
    for _ in range(3):
        await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.NO_PROVEN_NODE), ("a", Reason.NO_FREE_DEVICE)]
    assert "fewer than 2 free GPUs" in scene.gates.reasons["a"]


async def test_gate_of_an_undressed_pod_is_never_opened(scene: Scene) -> None:
    raw = builders.raw_pod(raw_container(gpus=1), name="bare", uid="uid-bare", schedulingGates=[{"name": GATE}])
    scene.show(raw)
    for _ in range(2):
        await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.recorded == [("bare", Reason.FORGED)]
    assert not scene.ledger.reservations()


async def test_pod_whose_record_exceeds_its_request_is_rejected(scene: Scene) -> None:
    scene.come("a")
    raw = scene.gates.pods["a"]
    forged = {**raw["metadata"]["annotations"], "gpuwarden.io/claim": '{"asked":{"main":1},"gpus":2}'}
    scene.show({**raw, "metadata": {**raw["metadata"], "annotations": forged}})
    await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.recorded == [("a", Reason.FORGED)]


@pytest.mark.defect("binder-2")
async def test_pod_whose_ordinal_is_not_in_the_map_waits_and_is_named(scene: Scene) -> None:
    text = {"gpuwarden.io/gpu-map": "0=node-a:0"}
    raw = builders.raw_pod(name="web-7", uid="uid-web-7", annotations=text, owners=[builders.stateful_set("web")])
    gated = waiting(raw, builders.claim(raw), RULES, "because")
    scene.show({**gated, "metadata": {**gated["metadata"], "resourceVersion": "1"}})
    await scene.queue.step()
    assert scene.heard.recorded == [("web-7", Reason.NOT_IN_MAP)]
    assert "ordinal 7" in scene.heard.messages[0]


async def test_evidence_that_ends_before_opening_keeps_the_gate_closed() -> None:
    scene = Scene(always=True)
    scene.fleet.set_evidence("node-a", builders.evidence("node-a", until=NOW + timedelta(seconds=10)), NOW)
    scene.come("a")
    scene.gates.failing = True
    await scene.queue.step()
    scene.gates.failing = False
    scene.now += timedelta(seconds=11)
    await scene.queue.step()
    assert scene.opened() == {}


async def test_each_kind_is_decided_once_per_pass_for_any_number_of_pods(scene: Scene) -> None:
    for number in range(200):
        scene.come(f"p{number}", seconds=number)
    await scene.queue.step()
    kind = scene.pods.queue_order.kinds()[0]
    assert [head.pod.name for head in scene.pods.queue_order.heads(kind)] == ["p2"]
    assert len(scene.opened()) == 2


# Reservations behind a closed gate.


async def test_namespaces_current_policy_is_checked_before_reserving(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.come(name)
    scene.require_hash(HASH, is_seen=False)
    for _ in range(3):
        await scene.queue.step()
        assert scene.held() == {}
    assert scene.opened() == {}
    assert scene.heard.recorded == [("a", Reason.FORGED), ("b", Reason.FORGED)]


async def test_edited_waiting_pod_loses_its_reservation(scene: Scene) -> None:
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.gates.fails = {"a"}
    await scene.queue.step()
    assert scene.held().keys() == {"uid-a"}
    scene.relabel("a", **{"gpuwarden.io/gpu.model": "b200"})
    await scene.queue.step()
    assert scene.held().keys() == {"uid-b"}
    assert scene.opened().keys() == {"b"}
    assert ("a", Reason.FORGED) in scene.heard.recorded


async def test_new_namespace_policy_releases_the_reservation_of_a_waiting_pod(scene: Scene) -> None:
    scene.come("a")
    scene.gates.failing = True
    await scene.queue.step()
    scene.require_hash(HASH, is_seen=False)
    scene.now += timedelta(minutes=1)
    await scene.queue.step()
    assert scene.held() == {}


async def test_a_gate_that_cannot_be_opened_holds_gpus_until_the_bind_deadline(scene: Scene) -> None:
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.gates.fails = {"a"}
    while scene.now < NOW + BIND_DEADLINE:
        await scene.queue.step()
        assert scene.held().keys() == {"uid-a"}
        scene.now += timedelta(seconds=20)
    await scene.queue.step()
    assert scene.held().keys() == {"uid-b"}
    assert scene.opened().keys() == {"b"}
    assert ("a", Reason.BIND_DEADLINE_PASSED) in scene.heard.recorded
    await scene.end("b")
    scene.gates.fails = set()
    scene.now += BIND_DEADLINE
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}


async def test_reservation_that_expired_during_an_outage_is_made_again(scene: Scene) -> None:
    """Its bind deadline would have passed when its gate opens."""
    scene.come("a")
    scene.gates.failing = True
    await scene.queue.step()
    scene.gates.failing = False
    scene.now += 2 * BIND_DEADLINE
    await scene.another().step()
    assert scene.opened().keys() == {"a"}
    (held,) = scene.ledger.reservations()
    assert held.since == scene.now


async def test_reservation_is_kept_if_the_gate_is_open_unnoticed(scene: Scene) -> None:
    scene.come("a")
    scene.gates.loses_answers = True
    await scene.queue.step()
    before = scene.held()
    assert scene.opened().keys() == {"a"}
    scene.now += BIND_DEADLINE
    await scene.queue.step()
    assert scene.held() == before
    assert "uid-a" not in scene.pods.queue_order


def two_proven_nodes() -> Scene:
    scene = Scene(always=True)
    scene.fleet.put(node("node-b", device("GPU-2"), device("GPU-3")), NOW)
    for name in ("node-a", "node-b"):
        scene.fleet.set_evidence(name, builders.evidence(name), NOW)
    return scene


@pytest.mark.parametrize("is_gone", [False, True], ids=["without-evidence", "gone"])
async def test_reservation_on_an_unusable_node_is_replaced_elsewhere(*, is_gone: bool) -> None:
    scene = two_proven_nodes()
    scene.come("a", 2)
    scene.come("b", 2, seconds=1)
    scene.gates.failing = True
    await scene.queue.step()
    first = scene.ledger.of_pod("uid-a")
    assert first is not None
    if is_gone:
        scene.fleet.remove(first.node)
    else:
        scene.fleet.set_evidence(first.node, None, scene.now)
    scene.gates.failing = False
    scene.now += timedelta(seconds=2)
    await scene.queue.step()
    second = scene.ledger.of_pod("uid-a")
    if second is not None:
        assert second.node != first.node
    assert {one.node for one in scene.ledger.reservations()}.isdisjoint({first.node})
    assert len(scene.opened()) == 1


async def test_reservation_on_a_node_without_evidence_does_not_block_its_kind() -> None:
    scene = two_proven_nodes()
    scene.come("a")
    scene.gates.failing = True
    await scene.queue.step()
    (first,) = scene.ledger.reservations()
    scene.fleet.set_evidence(first.node, None, scene.now)
    scene.come("b", seconds=1)
    scene.gates.failing = False
    scene.now += timedelta(seconds=2)
    await scene.queue.step()
    assert scene.opened().keys() == {"a", "b"}
    assert first.node not in {one.node for one in scene.ledger.reservations()}


async def test_reservation_on_a_node_without_evidence_is_not_adopted() -> None:
    scene = two_proven_nodes()
    scene.come("a")
    ask = ReservationRequest(ReservationId("review-1"), "ml", scene.waiter("a").claim.digest, "a")
    await scene.ledger.reserve(ask, [ON_GPU_0], answer_by=LATER)
    scene.fleet.set_evidence("node-a", None, NOW)
    await scene.queue.step()
    held = scene.ledger.of_pod("uid-a")
    assert held is not None
    assert (held.node, held.id) == ("node-b", "pod-uid-a")
    assert scene.opened().keys() == {"a"}


async def test_reservation_for_another_claim_is_not_used_even_with_the_pods_id(scene: Scene) -> None:
    scene.come("a", 2)
    await scene.ledger.reserve(
        ReservationRequest(ReservationId("pod-uid-a"), "ml", "forged"), [ON_GPU_0], answer_by=LATER
    )
    await scene.queue.step()
    assert scene.opened() == {"a": "GPU-0,GPU-1"}
    assert {one.claim_digest for one in scene.ledger.reservations()} != {"forged"}


async def test_reservation_for_another_claim_of_a_waiting_pod_is_released(scene: Scene) -> None:
    scene.come("a", 2)
    forged = ReservationRequest(ReservationId("review-9"), "ml", "forged")
    await scene.ledger.reserve(forged, [ON_GPU_0], answer_by=LATER)
    await scene.ledger.bind_to_pod(PodProof.NAMED, forged.id, builders.identity("a", "uid-a"))
    await scene.queue.step()
    assert scene.opened() == {"a": "GPU-0,GPU-1"}


# Current data.


async def test_interrupted_watch_pauses_the_queue_and_forces_a_fresh_read(scene: Scene) -> None:
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


async def test_new_leader_reads_before_it_reserves(scene: Scene) -> None:
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
async def test_leader_with_a_lagging_watch_gives_no_second_gpu(scene: Scene, *, has_acted: bool) -> None:
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

    async def list_again() -> bool:
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
        scene.gates,
        scene.heard,
        lambda: bench.now,
        list_again=list_again,
    )
    await queue.step()
    assert scene.opened() == {"a": "GPU-b0"}
    assert (len(bench.held("node-a")), len(bench.held("node-b"))) == (0, 1)


async def test_fresh_list_updates_only_pods_known_before_it(scene: Scene) -> None:
    for name in ("gone", "edited", "deleted", "same"):
        scene.come(name)
    asked = list(scene.pods.raws)
    listed = {name: scene.gates.pods[name] for name in ("edited", "deleted", "same")}
    meta = listed["edited"]["metadata"]
    listed["edited"] = {**listed["edited"], "metadata": {**meta, "labels": {}, "resourceVersion": "2"}}
    scene.come("new")
    scene.pods.deleted(scene.gates.pods["deleted"])
    scene.pods.read(asked, listed.values())
    assert scene.pods.queue_order.uids() == {"uid-same", "uid-new"}
    assert scene.pods.rejected.keys() == {"uid-edited"}


async def test_rejected_pod_is_queued_again_when_its_namespaces_policy_is_restored(scene: Scene) -> None:
    scene.come("a")
    scene.gates.failing = True
    scene.require_hash(HASH)
    await scene.queue.step()
    assert scene.heard.recorded == [("a", Reason.FORGED)]
    scene.gates.failing = False
    scene.require_hash(None)
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}


async def test_only_pods_of_namespaces_with_a_changed_policy_are_rechecked(scene: Scene) -> None:
    scene.come("a")
    scene.require_hash(HASH)
    scene.pods.recheck(9)
    assert scene.pods.rejected.keys() == {"uid-a"}
    scene.namespaces.view.changed({"metadata": {"name": "ml"}})
    scene.demands.changed({"metadata": {"name": "other", "annotations": {"gpuwarden.io/required-hash": HASH}}})
    scene.pods.recheck(9)
    assert scene.pods.rejected.keys() == {"uid-a"}
    scene.demands.deleted({"metadata": {"name": "ml"}})
    scene.pods.recheck(9)
    assert scene.pods.rejected == {}


async def test_no_gate_opened_event_for_a_deleted_pod(scene: Scene) -> None:
    scene.come("a")
    del scene.gates.pods["a"]
    await scene.queue.step()
    assert scene.heard.recorded == []
    assert "uid-a" not in scene.pods.queue_order


# The size of a pass.


def many_kinds(scene: Scene, number: int, gpus: int = 3) -> None:
    """No pod can be served."""
    for k in range(number):
        scene.come(f"p{k}", gpus, nodeSelector={"zone": f"z{k}"})


async def test_long_pass_yields_to_other_tasks(scene: Scene) -> None:
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


async def test_pass_ends_at_its_time_limit_and_the_next_continues(scene: Scene) -> None:
    many_kinds(scene, 30)
    scene.time = itertools.count(0.0, 0.1)
    passes = 0
    while len(scene.gates.reasons) < 30:
        before = len(scene.gates.reasons)
        await scene.queue.step()
        passes += 1
        assert 0 < len(scene.gates.reasons) - before < 15
    assert passes > 2


async def test_unserved_kind_is_tried_again_only_after_a_change(scene: Scene) -> None:
    many_kinds(scene, 30)
    await scene.queue.step()
    before = scene.fleet.questions
    await scene.queue.step()
    assert scene.fleet.questions == before
    scene.come("q", 3, nodeSelector={"zone": "z7"})
    await scene.queue.step()
    assert before == scene.fleet.questions  # it waits behind one with the same claim
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
    "evidence": lambda scene: scene.fleet.set_evidence("node-a", builders.evidence("node-a"), NOW),
    "a-reservation": lambda scene: scene.fleet.hold(builders.reservation(builders.slot("GPU-1"))),
    "the-end-of-one": lambda scene: scene.fleet.free(builders.reservation(builders.slot("GPU-0"))),
    "a-map": lambda scene: scene.fleet.set_aside({"node-a": {"0": MapOwner("", SetId("set-1", "ml"))}}, {"node-a"}),
    "time": lambda scene: setattr(scene, "now", NOW + timedelta(seconds=5)),
}


@pytest.mark.parametrize("news", NEWS.values(), ids=NEWS)
async def test_every_input_of_a_decision_triggers_a_new_try(scene: Scene, news: Callable[[Scene], object]) -> None:
    scene.fleet.hold(builders.reservation(builders.slot("GPU-0")))
    scene.come("a", 2)
    await scene.queue.step()
    before = scene.fleet.questions
    await scene.queue.step()
    assert scene.fleet.questions == before
    news(scene)
    await scene.queue.step()
    assert scene.fleet.questions > before


async def test_oversized_claims_are_examined_after_those_that_fit(scene: Scene) -> None:
    for count in range(3, 200):
        scene.come(f"huge-{count}", count)
    scene.come("small", seconds=1)
    scene.time = itertools.count(0.0, 0.1)
    await scene.queue.step()
    assert scene.opened().keys() == {"small"}


@pytest.mark.simulated_time
async def test_reasons_are_written_concurrently_and_a_hanging_write_blocks_none(
    scene: Scene,
) -> None:
    many_kinds(scene, 40)
    scene.gates.hangs = {"p0"}
    async with asyncio.timeout(10):
        await scene.queue.step()
    assert len(scene.gates.reasons) == 39
    assert scene.gates.most_concurrent_writes > 4
    scene.gates.hangs = set()
    await scene.queue.step()
    assert len(scene.gates.reasons) == 40


async def test_pod_with_a_changed_selector_is_not_opened_for_its_old_node(scene: Scene) -> None:
    scene.fleet.put(node("node-a", device("GPU-0"), labels={"zone": "a"}), NOW)
    scene.fleet.put(node("node-b", device("GPU-2"), device("GPU-3"), labels={"zone": "b"}), NOW)
    scene.come("a")

    async def narrowed() -> None:
        raw = scene.gates.pods["a"]
        meta = {**raw["metadata"], "resourceVersion": "2"}
        scene.show({**raw, "metadata": meta, "spec": {**raw["spec"], "nodeSelector": {"zone": "b"}}})

    scene.ledger.meanwhile.append(narrowed)
    await scene.queue.step()
    assert scene.opened() == {}
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    assert [one.node for one in scene.ledger.reservations()] == ["node-b"]


async def test_failed_reason_is_written_later(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.come(name, 3)
    scene.gates.failing_writes = {"a"}
    for _ in range(3):
        await scene.queue.step()
    assert scene.gates.reasons.keys() == {"b"}
    assert sorted(name for name, _ in scene.heard.recorded) == ["a", "b"]
    scene.gates.failing_writes = set()
    await scene.queue.step()
    assert scene.gates.reasons.keys() == {"a", "b"}
    assert len(scene.heard.recorded) == 2


async def test_no_reason_is_written_after_the_gate_is_open(scene: Scene) -> None:
    scene.come("first", 2)
    await scene.queue.step()
    scene.come("second", 2, seconds=1)
    scene.gates.failing_writes = {"second"}
    await scene.queue.step()
    await scene.end("first")
    scene.gates.failing_writes = set()
    for _ in range(2):
        await scene.queue.step()
    assert scene.opened().keys() == {"second"}
    assert scene.gates.reasons == {}


# Races with other writers.


async def test_lost_race_is_decided_again_at_once(scene: Scene) -> None:
    scene.come("a")
    places: list[str] = []

    async def other() -> None:
        found = decide(scene.waiter("a").claim, scene.fleet, scene.policy, most=1)
        assert not isinstance(found, Deny)
        (place,) = found
        places.append(place.slots[0].uuid)
        await super(ContestedLedger, scene.ledger).reserve(
            ReservationRequest(ReservationId("r1"), "ml", "d1"), [place], answer_by=LATER
        )

    scene.ledger.meanwhile.append(other)
    await scene.queue.step()
    assert scene.opened().keys() == {"a"}
    assert scene.opened()["a"] not in places


async def test_small_claims_do_not_overtake_a_claim_that_keeps_losing_races(scene: Scene) -> None:
    scene.come("large", 2)
    scene.come("small", 1, seconds=1)

    async def other() -> None:
        await super(ContestedLedger, scene.ledger).reserve(
            ReservationRequest(ReservationId("r1"), "ml", "d1"), [ON_GPU_0], answer_by=LATER
        )

    scene.ledger.meanwhile.append(other)
    await scene.queue.step()
    assert scene.opened() == {}
    assert "an earlier pod waits for the same devices" in scene.gates.reasons["small"]


async def test_claim_refused_by_the_ledger_is_retried_and_blocks_no_other(scene: Scene) -> None:
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


async def test_pod_is_not_overtaken_while_the_ledger_is_unavailable(scene: Scene) -> None:
    scene.come("large", 2)
    scene.come("small", 1, seconds=1)

    async def away() -> None:
        raise LedgerUnavailableError("away")

    scene.ledger.meanwhile.append(away)
    await scene.queue.step()
    assert scene.opened() == {}
    await scene.queue.step()
    assert scene.opened().keys() == {"large"}
