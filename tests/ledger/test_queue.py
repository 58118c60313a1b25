"""The queue: in turn, once, told why not, and whole whatever it is stopped at."""

from datetime import timedelta
from typing import Any

import jsonpatch
import pytest

from tests import builders
from tests.builders import HASH, NOW, Raw, device, node, raw_container
from tests.heard import Heard
from webhook.core import check
from webhook.core.claim import ClaimRules, recorded_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.difference import Change
from webhook.core.dress import DressRules, waiting
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Ask, Phase, Placement, PodIdentity, ReservationId
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.ledger.queue import GateError, Queue
from webhook.namespaces import ClaimReading
from webhook.waiting_pods import WaitingPods

GATE = "gpuwarden.io/queue"
GPU = "gpuwarden.io/gpu-uuid"
RULES = DressRules()
ON_GPU_0 = Placement("node-a", (builders.slot("GPU-0"),))


class Yard:
    """Pods as an API server keeps them: a patch is carried out whole, or not at all. It can be made to fail."""

    def __init__(self) -> None:
        self.pods: dict[str, Raw] = {}
        self.said: dict[str, str] = {}
        self.failing = False

    async def open(self, pod: PodIdentity, patch: list[Change]) -> None:
        if self.failing:
            raise GateError("away")
        self.pods[pod.name] = jsonpatch.apply_patch(self.pods[pod.name], patch)

    async def say(self, pod: PodIdentity, why: str) -> None:
        self.said[pod.name] = why


class Scene:
    """Two GPUs of one node, nobody's yet, and a queue."""

    def __init__(self, *, always: bool = False) -> None:
        self.now = NOW
        self.fleet = builders.fleet(node("node-a", device("GPU-0", index=0), device("GPU-1", index=1)))
        self.ledger = MemoryLedger(self.fleet, lambda: self.now, Times(timedelta(seconds=90), timedelta(seconds=5)))
        self.yard, self.heard = Yard(), Heard()
        self.policy = EvidencePolicy(always)
        self.queue = self.another()

    def another(self) -> Queue:
        """As after a start: it knows what the watch tells and what the ledger has."""
        self.claims = ClaimReading(ClaimRules())
        self.pods = WaitingPods(self.claims, RULES)
        self.pods.replaced(self.yard.pods)
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
        )

    def come(self, name: str, gpus: int = 1, *, seconds: int = 0, **members: Any) -> None:
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
            await self.ledger.release(held.id, PodIdentity("ml", name, f"uid-{name}"))


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


async def test_an_opened_pod_is_as_its_reservation_says(scene: Scene) -> None:
    own = builders.term(builders.expression("zone", "Exists"))
    scene.fleet.put(node("node-a", device("GPU-0", index=0), labels={"zone": "a"}), NOW)
    scene.come("a", affinity=builders.required_affinity(own))
    await scene.queue.step()
    raw = scene.yard.pods["a"]
    (held,) = scene.ledger.reservations()
    assert (held.phase, held.id) == (Phase.FINALIZED, "pod-uid-a")
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


async def test_a_claim_that_no_node_could_serve_holds_nobody_up(scene: Scene) -> None:
    scene.come("impossible", 3)
    scene.come("small", 1, seconds=1)
    await scene.queue.step()
    assert scene.opened().keys() == {"small"}
    assert ("impossible", Reason.NO_MATCHING_DEVICE) in scene.heard.told


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
    (waiter,) = scene.pods.lines.heads(scene.pods.lines.kinds()[0])
    ask = Ask(ReservationId("pod-uid-a"), "ml", waiter.claim.digest, "a")
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
    (waiter,) = scene.pods.lines.heads(scene.pods.lines.kinds()[0])
    ask = Ask(ReservationId("review-1"), "ml", waiter.claim.digest, name)
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
    assert scene.heard.told == [("a", Reason.NO_PROVEN_NODE)]
    scene.fleet.prove("node-a", builders.evidence("node-a"), scene.now)
    await scene.ledger.reserve(Ask(ReservationId("r1"), "ml", "d1"), [ON_GPU_0], answer_by=NOW + timedelta(seconds=9))
    for _ in range(3):
        await scene.queue.step()
    assert scene.heard.told == [("a", Reason.NO_PROVEN_NODE), ("a", Reason.NO_FREE_DEVICE)]
    assert "with fewer than 2 free" in scene.yard.said["a"]


async def test_a_gate_of_an_undressed_pod_is_never_opened(scene: Scene) -> None:
    raw = builders.raw_pod(raw_container(gpus=1), name="bare", uid="uid-bare", schedulingGates=[{"name": GATE}])
    scene.show(raw)
    for _ in range(2):
        await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.told == [("bare", Reason.FORGED)]
    assert not scene.ledger.reservations()


async def test_a_record_that_says_more_than_the_pod_asks_for_is_nobodys_turn(scene: Scene) -> None:
    scene.come("a")
    raw = scene.yard.pods["a"]
    forged = {**raw["metadata"]["annotations"], "gpuwarden.io/claim": '{"asked":{"main":1},"gpus":2}'}
    scene.show({**raw, "metadata": {**raw["metadata"], "annotations": forged}})
    await scene.queue.step()
    assert scene.opened() == {}
    assert scene.heard.told == [("a", Reason.FORGED)]


@pytest.mark.defect("S1-2")
async def test_an_ordinal_without_a_line_waits_and_is_told_its_number(scene: Scene) -> None:
    text = {"gpuwarden.io/gpu-map": "0=node-a:0"}
    raw = builders.raw_pod(name="web-7", uid="uid-web-7", annotations=text, owners=[builders.stateful_set("web")])
    gated = waiting(raw, builders.claim(raw), RULES, "because")
    scene.show({**gated, "metadata": {**gated["metadata"], "resourceVersion": "1"}})
    await scene.queue.step()
    assert scene.heard.told == [("web-7", Reason.NOT_IN_MAP)]
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
