"""Answers to admission checks: the states, what counts as taken, and writes that fail."""

import asyncio
import copy
import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import pytest

from tests import builders
from tests.admission.kueue.workloads import CHECK, admission_check, condition, pod_set, raw_check, raw_workload, time_of
from tests.builders import HASH, NOW, OTHER_HASH, SECOND, device, evidence, node, reservation, slot
from webhook.admission.kueue.checks import (
    CheckAnswer,
    CheckNotWrittenError,
    KueueChecks,
    WorkloadChangedError,
    available,
)
from webhook.admission.kueue.gangs import GangReader
from webhook.admission.kueue.workload import AdmissionCheck, CheckWire, Workload
from webhook.admission.kueue.workloads import Workloads
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError, WatchedNamespaces
from webhook.core.claim import Claim, ClaimRules
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Slot, Taint
from webhook.core.dress import DressRules
from webhook.core.fleet import Fleet
from webhook.core.gang import GangPart
from webhook.core.nodes_asked import NodesAsked
from webhook.core.queue_order import QueuedPod, QueueOrder
from webhook.core.raw import Raw
from webhook.core.reservation import Orphan, Placement, ReservationId, ReservationRequest
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import MarkOrphaned, Times

PROVEN = {"gpuwarden.io/required-hash": HASH}
WAIT = timedelta(seconds=30)
# A Workload is decided again after this even if nothing has changed.
DECIDED_AGAIN = timedelta(seconds=5)
TIMES = Times(timedelta(seconds=90), timedelta(seconds=5))
NODES = ("node-a", "node-b")


class FakeKueue:
    """The API server: it keeps Workloads and AdmissionChecks, and refuses an answer to a Workload that has changed."""

    def __init__(self) -> None:
        self.workloads: dict[str, Raw] = {}
        self.checks: dict[str, Raw] = {}
        self.answers: list[tuple[str, str]] = []
        self.failing = False
        self.writes = 0

    async def answer(self, workload: Workload, checks: Sequence[CheckWire], answer: CheckAnswer, now: datetime) -> Raw:
        self.writes += 1
        await asyncio.sleep(0)
        if self.failing:
            raise CheckNotWrittenError("away")
        stored = self.workloads[workload.name]
        if stored["metadata"]["resourceVersion"] != workload.version:
            raise WorkloadChangedError("changed")
        changed = copy.deepcopy(stored)
        changed["metadata"]["resourceVersion"] = str(int(workload.version) + 1)
        for one in changed["status"]["admissionChecks"]:
            if one["name"] in {check.name for check in checks}:
                is_new = one["state"] != answer.state.value
                one |= {"state": answer.state.value, "message": answer.message}
                one |= {"lastTransitionTime": time_of(now)} if is_new else {}
                if answer.requeue_after is not None:
                    one["requeueAfterSeconds"] = answer.requeue_after.total_seconds()
        self.workloads[workload.name] = changed
        self.answers.append((workload.name, answer.state.value))
        return changed

    async def activate(self, check: AdmissionCheck, now: datetime) -> Raw:
        self.writes += 1
        if self.failing:
            raise CheckNotWrittenError("away")
        self.checks[check.name] = admission_check(check.name, version=2)
        return self.checks[check.name]


class NamespacesInTrouble:
    """No namespace can be looked up."""

    async def get(self, name: str) -> Raw | None:
        raise NamespacesUnavailableError


class CheckScene:
    """Two nodes with two GPUs each, both proven."""

    def __init__(self, *, always: bool = False) -> None:
        self.now = NOW
        self.is_current = self.can_be_listed = True
        self.lists = self.wakes = 0
        self.time: Iterator[float] = itertools.repeat(0.0)
        self.fleet = Fleet()
        for name in NODES:
            self.fleet.put(node(name, *(device(f"GPU-{name[-1]}{k}") for k in range(2))), NOW)
            self.prove(name)
        self.ledger = MemoryLedger(self.fleet, lambda: self.now, TIMES)
        self.kueue = FakeKueue()
        self.queue_order = QueueOrder()
        self.namespaces = WatchedNamespaces(NamespacesInTrouble())
        self.opted_in: dict[str, bool] = {"ml": True, "other": True}
        self.policy = EvidencePolicy(always)
        for name in self.opted_in:
            self.namespaces.view.changed({"metadata": {"name": name}})
        self.checks = self.another()

    def another(self, *, active: bool = True) -> KueueChecks:
        """Another process that is elected: it knows the watches and the ledger."""
        made = KueueChecks(
            Workloads(lambda: self.now, self.wake),
            GangReader(ClaimReader(ClaimRules(), self.namespaces), DressRules(), self.opted_in.get),
            self.ledger,
            self.fleet,
            self.policy,
            self.kueue,
            lambda: self.now,
            wait=WAIT,
            is_current=lambda: self.is_current,
            list_again=self.list_again,
            queue_order=self.queue_order,
            orphans_per_namespace=4,
            timer=lambda: next(self.time),
        )
        made.checks.changed(admission_check(active=active))
        for raw in self.kueue.workloads.values():
            made.workloads.changed(raw)
        return made

    async def list_again(self, workloads: Workloads) -> bool:
        self.lists += 1
        for raw in self.kueue.workloads.values():
            workloads.changed(raw)
        return self.can_be_listed

    def wake(self) -> None:
        self.wakes += 1

    def prove(self, name: str, digest: str = HASH, until: datetime | None = None) -> None:
        self.fleet.set_evidence(name, evidence(name, digest, until=until), self.now)

    def submit(self, raw: Raw) -> None:
        self.kueue.workloads[raw["metadata"]["name"]] = raw
        self.checks.workloads.changed(raw)

    def change(self, name: str, **status: object) -> None:
        """Kueue changes the Workload, and the watch shows it."""
        raw = copy.deepcopy(self.kueue.workloads[name])
        raw["metadata"]["resourceVersion"] = str(int(raw["metadata"]["resourceVersion"]) + 1)
        raw["status"] |= status
        self.submit(raw)

    def finish(self, name: str) -> None:
        self.change(name, conditions=[condition("QuotaReserved"), condition("Finished")])

    async def step(self, after: timedelta = timedelta(0)) -> None:
        self.now += after
        await self.checks.step()

    def check(self, name: str = "train") -> Raw:
        found: Raw = self.kueue.workloads[name]["status"]["admissionChecks"][0]
        return found

    def state(self, name: str = "train") -> str:
        return str(self.check(name)["state"])

    async def create_pod(self, number: int, claim: Claim, *slots: Slot, on: str = "node-a") -> None:
        """A review reserves for a pod of a job."""
        ask = ReservationRequest(ReservationId(f"review-{number}"), "ml", claim.digest, f"pod-{number}")
        await self.ledger.reserve(ask, [Placement(on, slots)], answer_by=self.now + SECOND)


@pytest.fixture
def scene() -> CheckScene:
    return CheckScene()


def claim_of_template(gpus: int = 1) -> Claim:
    raw = pod_set(1, gpus, annotations=PROVEN)["template"]
    return builders.claim({**raw, "metadata": {**raw["metadata"], "namespace": "ml"}})


# States.


async def test_check_is_ready_if_all_pods_can_have_their_gpus(scene: CheckScene) -> None:
    scene.submit(raw_workload("train", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.check() == raw_check("Ready", f"4 GPUs proven for {HASH} can be had")
    assert list(scene.ledger.reservations()) == []


async def test_check_is_pending_with_the_reason_of_a_denied_pod(scene: CheckScene) -> None:
    scene.prove("node-b", OTHER_HASH)
    scene.submit(raw_workload("train", pod_set(2, 2, annotations=PROVEN)))
    await scene.step()
    assert scene.check()["state"] == "Pending"
    assert scene.check()["message"] == (
        f"1 of 2 pods can have their GPUs now; the next one: 2 GPUs on a node attested as {HASH}: 0 of 2 nodes fit: "
        "1 has a different hash, 1 has fewer than 2 free GPUs; wait until GPUs are free, or ask for fewer"
    )


async def test_pending_check_becomes_ready_when_gpus_are_proven(scene: CheckScene) -> None:
    scene.prove("node-b", OTHER_HASH)
    scene.submit(raw_workload("train", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    scene.prove("node-b")
    await scene.step()
    assert scene.state() == "Ready"


async def test_evidence_that_has_ended_does_not_count(scene: CheckScene) -> None:
    scene.prove("node-b", until=NOW + 10 * SECOND)
    scene.submit(raw_workload("train", pod_set(4, 1, annotations=PROVEN)))
    await scene.step(10 * SECOND)
    assert (scene.state(), "1 has stale evidence" in scene.check()["message"]) == ("Pending", True)


async def test_quota_is_given_back_after_the_wait_with_growing_pauses(scene: CheckScene) -> None:
    scene.submit(raw_workload("train", pod_set(5, 1, annotations=PROVEN)))
    await scene.step(WAIT - 3 * SECOND)
    await scene.step(2 * SECOND)
    assert scene.state() == "Pending"
    await scene.step(SECOND)
    assert (scene.state(), scene.check()["requeueAfterSeconds"]) == ("Retry", 10)
    seen = []
    for retries in range(1, 5):
        again = raw_check("Pending", "Reset to Pending after eviction. Previously: Retry", retryCount=retries)
        other = raw_check("Pending", name="other", retryCount=9)
        at = scene.now
        scene.change("train", conditions=[condition("QuotaReserved", at=at)], admissionChecks=[again, other])
        await scene.step(WAIT)
        seen.append(scene.check()["requeueAfterSeconds"])
    assert seen == [20, 40, 60, 60]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(
            pod_set(annotations={"gpuwarden.io/gpu-count": "many"}), "'many' is not a whole number", id="invalid number"
        ),
        pytest.param(
            pod_set(terminationGracePeriodSeconds=10**6), "terminationGracePeriodSeconds", id="denied on any node"
        ),
        pytest.param(pod_set(pods=4097), "more than 4096 pods", id="too many pods"),
        pytest.param(
            pod_set(hostPID="yes", containers="none"), "the pod cannot be read", id="template that cannot be read"
        ),
    ],
)
async def test_workload_that_can_never_be_served_is_rejected(raw: Raw, words: str) -> None:
    scene = CheckScene()
    scene.checks.gangs = GangReader(
        ClaimReader(ClaimRules(), scene.namespaces), DressRules(max_grace=timedelta(hours=1)), scene.opted_in.get
    )
    scene.submit(raw_workload("train", raw))
    await scene.step()
    assert scene.state() == "Rejected"
    assert words in scene.check()["message"]


async def test_workload_with_a_placement_map_is_rejected(scene: CheckScene) -> None:
    named = {"apps.kubernetes.io/pod-index": "0"}
    raw = pod_set(annotations={"gpuwarden.io/gpu-map": "0=node-a:GPU-a0"})
    raw["template"]["metadata"]["labels"] = named
    scene.submit(raw_workload("train", raw))
    await scene.step()
    assert (scene.state(), "gpu-map" in scene.check()["message"]) == ("Rejected", True)


async def test_namespace_requirement_applies_to_the_pods(scene: CheckScene) -> None:
    scene.namespaces.view.changed(
        {"metadata": {"name": "ml", "annotations": {"gpuwarden.io/required-hash": OTHER_HASH}}}
    )
    scene.submit(raw_workload("silent", pod_set(1, 1)))
    scene.submit(raw_workload("wrong", pod_set(1, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.state("silent"), "2 have a different hash" in scene.check("silent")["message"]) == ("Pending", True)
    assert (scene.state("wrong"), "allows only" in scene.check("wrong")["message"]) == ("Rejected", True)


async def test_workload_in_a_namespace_that_has_not_opted_in_is_not_ready(scene: CheckScene) -> None:
    scene.opted_in["ml"] = False
    scene.submit(raw_workload())
    await scene.step()
    assert (scene.state(), "has not opted in" in scene.check()["message"]) == ("Pending", True)
    await scene.step(WAIT)
    assert scene.state() == "Retry"


async def test_workload_without_claims_is_ready(scene: CheckScene) -> None:
    scene.submit(raw_workload("train", pod_set(3, None)))
    await scene.step()
    assert scene.check() == raw_check("Ready", "no pod asks for GPUs or a proven node")


@pytest.mark.parametrize("owner", ["Pod", "StatefulSet", "LeaderWorkerSet"])
async def test_workload_of_pods_that_exist_is_ready_because_they_are_judged_before(
    scene: CheckScene, owner: str
) -> None:
    scene.submit(raw_workload("train", pod_set(9, 9, annotations=PROVEN), owner=owner))
    await scene.step()
    assert (scene.state(), "created before this check" in scene.check()["message"]) == ("Ready", True)
    scene.submit(raw_workload("next", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.state("next") == "Ready"


async def test_labels_and_tolerations_of_the_assigned_flavor_count(scene: CheckScene) -> None:
    taint = Taint("gpus", "yes", "NoSchedule")
    for name, kind in zip(NODES, ("h100", "a100"), strict=True):
        devices = scene.fleet.indexed_nodes[name].node.devices
        scene.fleet.put(node(name, *devices, labels={"type": kind}, taints=[taint]), NOW)
    assigned = ({"name": "main", "count": 3, "flavors": {"nvidia.com/gpu": "fast"}},)
    scene.submit(raw_workload("train", pod_set(3, 1, annotations=PROVEN), assignments=assigned))
    await scene.step()
    assert scene.check() == raw_check()  # the flavor is not known yet
    spec = {"nodeLabels": {"type": "h100"}, "tolerations": [{"key": "gpus", "operator": "Exists"}]}
    scene.checks.gangs.flavors.changed({"metadata": {"name": "fast", "resourceVersion": "1"}, "spec": spec})
    await scene.step()
    assert "2 of 3 pods can have their GPUs now" in scene.check()["message"]
    assert "1 is not selected by the pod" in scene.check()["message"]


async def test_pods_that_kueue_admits_or_that_have_ended_count_as_kueue_says(scene: CheckScene) -> None:
    assigned = ({"name": "main", "count": 5},)
    ended = [{"name": "main", "count": 1}]
    raw = raw_workload("train", pod_set(9, 1, annotations=PROVEN), assignments=assigned, reclaimablePods=ended)
    scene.submit(raw)
    await scene.step()
    assert scene.check()["message"] == f"4 GPUs proven for {HASH} can be had"


async def test_additions_of_another_check_count(scene: CheckScene) -> None:
    other = raw_check("Ready", name="other", podSetUpdates=[{"name": "main", "nodeSelector": {"zone": "none"}}])
    scene.submit(raw_workload("train", pod_set(1, 1, annotations=PROVEN), checks=(raw_check(), other)))
    await scene.step()
    assert "2 are not selected by the pod" in scene.check()["message"]
    assert scene.kueue.workloads["train"]["status"]["admissionChecks"][1] == other


# What is not answered.


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(raw_workload(conditions=(condition("Evicted"),)), id="evicted"),
        pytest.param(raw_workload(conditions=(condition("Finished"),)), id="finished"),
        pytest.param(raw_workload(active=False), id="not active"),
        pytest.param(raw_workload(checks=(raw_check(name="other"),)), id="check of another controller"),
        pytest.param(raw_workload(checks=(raw_check("Retry"),)), id="check that was answered"),
        pytest.param({**raw_workload(), "status": {"admissionChecks": [raw_check()]}}, id="without quota"),
        pytest.param({**raw_workload(), "status": "broken"}, id="unreadable"),
        pytest.param(raw_workload("train", pod_set(nodeSelector=["a"])), id="unreadable template"),
    ],
)
async def test_workload_that_does_not_ask_is_left_alone(scene: CheckScene, raw: Raw) -> None:
    scene.checks.checks.changed(admission_check("other", "example.com/other"))
    scene.submit(raw)
    await scene.step()
    assert scene.kueue.writes == 0


async def test_nothing_is_answered_while_a_watch_is_not_current(scene: CheckScene) -> None:
    scene.is_current = False
    scene.submit(raw_workload())
    await scene.step()
    assert scene.kueue.answers == []
    scene.is_current = True
    await scene.step()
    assert scene.kueue.answers == [("train", "Ready")]


async def test_nothing_is_answered_until_workloads_were_listed_after_the_election(scene: CheckScene) -> None:
    scene.can_be_listed = False
    scene.submit(raw_workload())
    await scene.step()
    assert (scene.lists, scene.kueue.answers) == (1, [])
    scene.can_be_listed = True
    await scene.step()
    await scene.step()
    assert (scene.lists, scene.kueue.answers) == (2, [("train", "Ready")])
    scene.checks.begin()
    await scene.step()
    assert scene.lists == 3


async def test_workloads_are_listed_again_after_a_watch_was_not_current(scene: CheckScene) -> None:
    scene.submit(raw_workload())
    await scene.step()
    scene.is_current = False
    await scene.step()
    scene.is_current = True
    await scene.step()
    assert scene.lists == 2


async def test_older_event_of_the_watch_does_not_undo_an_answer(scene: CheckScene) -> None:
    before = raw_workload("train", pod_set(4, 1, annotations=PROVEN))
    scene.submit(before)
    await scene.step()
    scene.checks.workloads.changed(before)
    await scene.step(DECIDED_AGAIN)
    assert scene.kueue.writes == 1


@pytest.mark.parametrize("namespace", ["unknown", "nowhere"])
async def test_unknown_namespace_is_waited_for(scene: CheckScene, namespace: str) -> None:
    scene.opted_in["nowhere"] = True  # but its requirements are not known
    scene.submit(raw_workload(namespace=namespace))
    await scene.step()
    assert scene.kueue.writes == 0


# Several Workloads.


async def test_workloads_of_one_pass_are_not_counted_against_the_same_gpus(scene: CheckScene) -> None:
    for name in ("a", "b"):
        scene.submit(raw_workload(name, pod_set(3, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.state("a"), scene.state("b")) == ("Ready", "Pending")


async def test_higher_priority_is_answered_first_and_then_the_longer_wait(scene: CheckScene) -> None:
    scene.now += 10 * SECOND
    scene.submit(raw_workload("late", pod_set(2, 1, annotations=PROVEN), since=NOW + SECOND))
    scene.submit(raw_workload("early", pod_set(2, 1, annotations=PROVEN)))
    scene.submit(raw_workload("urgent", pod_set(2, 1, annotations=PROVEN), since=NOW + 2 * SECOND, priority=5))
    await scene.step()
    assert [scene.state(name) for name in ("urgent", "early", "late")] == ["Ready", "Ready", "Pending"]


async def test_promised_gpus_are_not_promised_again_before_the_pods_exist(scene: CheckScene) -> None:
    scene.submit(raw_workload("a", pod_set(3, 1, annotations=PROVEN)))
    await scene.step()
    scene.submit(raw_workload("b", pod_set(3, 1, annotations=PROVEN)))
    await scene.step(50 * SECOND)
    assert (scene.state("a"), scene.state("b")) == ("Ready", "Retry")


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param((raw_check(),), id="no other check"),
        pytest.param((raw_check(), raw_check(name="slow")), id="another check is pending"),
    ],
)
async def test_promise_ends_after_a_minute(scene: CheckScene, checks: tuple[Raw, ...]) -> None:
    scene.submit(raw_workload("a", pod_set(3, 1, annotations=PROVEN), checks=checks))
    await scene.step()
    scene.submit(raw_workload("b", pod_set(3, 1, annotations=PROVEN), since=NOW + 50 * SECOND))
    await scene.step(59 * SECOND)
    assert scene.state("b") == "Pending"
    await scene.step(SECOND)
    assert scene.state("b") == "Ready"


async def test_promise_ends_with_its_workload(scene: CheckScene) -> None:
    scene.submit(raw_workload("a", pod_set(3, 1, annotations=PROVEN)))
    await scene.step()
    scene.submit(raw_workload("b", pod_set(3, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.state("b") == "Pending"
    scene.finish("a")
    await scene.step(DECIDED_AGAIN)
    assert scene.state("b") == "Ready"


async def test_reservations_of_its_pods_replace_the_promise(scene: CheckScene) -> None:
    """Otherwise the GPUs of the two pods would count twice."""
    scene.submit(raw_workload("a", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    for number in range(2):
        await scene.create_pod(number, claim_of_template(), slot(f"GPU-a{number}"))
    scene.submit(raw_workload("b", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.state("b") == "Ready"


async def test_reservation_from_before_the_answer_does_not_replace_the_promise(scene: CheckScene) -> None:
    await scene.create_pod(0, claim_of_template(), slot("GPU-a0"))
    scene.submit(raw_workload("a", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    scene.submit(raw_workload("b", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.state("a"), scene.state("b")) == ("Ready", "Pending")


async def test_reservation_in_another_namespace_does_not_replace_the_promise(scene: CheckScene) -> None:
    scene.submit(raw_workload("a", pod_set(2, 1, annotations=PROVEN), namespace="other"))
    await scene.step()
    await scene.create_pod(0, claim_of_template(), slot("GPU-a0"))
    scene.submit(raw_workload("b", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.state("b") == "Pending"


async def test_clock_of_the_reservations_may_be_late(scene: CheckScene) -> None:
    scene.submit(raw_workload("a", pod_set(2, 1, annotations=PROVEN), since=NOW + 10 * SECOND))
    await scene.step(10 * SECOND)
    scene.now = NOW
    for number in range(2):
        await scene.create_pod(number, claim_of_template(), slot(f"GPU-a{number}"))
    scene.submit(raw_workload("b", pod_set(2, 1, annotations=PROVEN)))
    await scene.step(11 * SECOND)
    assert scene.state("b") == "Ready"


async def test_new_leader_does_not_count_reservations_from_before_the_answer(scene: CheckScene) -> None:
    for number in range(2):
        await scene.create_pod(number, claim_of_template(), slot(f"GPU-a{number}"))
    scene.submit(raw_workload("a", pod_set(2, 1, annotations=PROVEN)))
    await scene.step(10 * SECOND)
    scene.checks = scene.another()
    scene.submit(raw_workload("b", pod_set(2, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.state("a"), scene.state("b")) == ("Ready", "Pending")


async def test_new_leader_knows_what_the_last_one_has_promised(scene: CheckScene) -> None:
    scene.submit(raw_workload("a", pod_set(3, 1, annotations=PROVEN)))
    await scene.step()
    scene.checks = scene.another()
    scene.submit(raw_workload("b", pod_set(3, 1, annotations=PROVEN)))
    await scene.step(10 * SECOND)
    assert scene.state("b") == "Pending"


async def test_pod_in_the_queue_for_the_same_devices_comes_first(scene: CheckScene) -> None:
    claim = claim_of_template(2)
    scene.queue_order.put(QueuedPod(builders.identity(), NOW, Claim(claim.record, NodesAsked())))
    scene.submit(raw_workload("train", pod_set(1, 2, annotations=PROVEN)))
    await scene.step()
    assert (scene.state(), "an earlier pod waits" in scene.check()["message"]) == ("Pending", True)


async def test_namespace_whose_pods_are_gone_and_may_still_run_gets_no_more(scene: CheckScene) -> None:
    """The limit of the scene is four GPUs."""
    await scene.create_pod(0, claim_of_template(), slot("GPU-a0"))
    (held,) = scene.ledger.reservations()
    pod = builders.identity("pod-0")
    scene.ledger._index.make(held.node, MarkOrphaned(held.id, pod, held.since, Orphan(NOW, SECOND)), NOW, TIMES)
    scene.submit(raw_workload("many", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    assert "held by pods that are gone and may still run" in scene.check("many")["message"]


async def test_decision_leaves_the_fleet_as_it_was(scene: CheckScene) -> None:
    before = scene.fleet.changes
    scene.submit(raw_workload("train", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.fleet.changes, set(scene.fleet.held_devices)) == (before, set())


async def test_workloads_that_one_pass_has_no_time_for_are_answered_in_the_next(scene: CheckScene) -> None:
    scene.time = itertools.count(0.0, 1.0)
    for name in ("a", "b"):
        scene.submit(raw_workload(name, pod_set(1, 1, annotations=PROVEN)))
    await scene.step()
    assert scene.kueue.answers == [("a", "Ready")]
    await scene.step()
    assert scene.kueue.answers == [("a", "Ready"), ("b", "Ready")]


async def test_workload_that_nothing_fits_does_not_use_up_the_time_of_every_pass(scene: CheckScene) -> None:
    scene.time = itertools.count(0.0, 1.0)  # for one decision per pass
    scene.submit(raw_workload("a", pod_set(9, 1, annotations=PROVEN)))
    scene.submit(raw_workload("b", pod_set(1, 1, annotations=PROVEN)))
    for name in ("GPU-a0", "GPU-a1"):
        scene.fleet.hold(reservation(slot(name), id=name))  # otherwise the first decision would still be valid
        await scene.step()
    assert (scene.state("a"), scene.state("b")) == ("Pending", "Ready")


# Writes.


async def test_admission_check_of_ours_is_activated_once(scene: CheckScene) -> None:
    scene.checks = scene.another(active=False)
    scene.checks.checks.changed(admission_check("other", "example.com/other", active=False))
    await scene.step()
    await scene.step()
    assert (list(scene.kueue.checks), scene.kueue.writes) == ([CHECK], 1)


async def test_unchanged_reason_is_not_written_again(scene: CheckScene) -> None:
    scene.submit(raw_workload("train", pod_set(5, 1, annotations=PROVEN)))
    for _ in range(5):
        await scene.step(5 * SECOND)
    assert scene.kueue.writes == 1


async def test_changed_reason_is_written_at_most_every_five_seconds(scene: CheckScene) -> None:
    scene.submit(raw_workload("train", pod_set(5, 1, annotations=PROVEN)))
    await scene.step()
    for second in range(1, 7):
        scene.prove("node-b", f"sha256:{second}" if second % 2 else HASH)
        await scene.step(SECOND)
    assert scene.kueue.writes == 2


async def test_message_is_cut_and_not_written_again(scene: CheckScene) -> None:
    hashes = ",".join(f"sha256:{number:064x}" for number in range(40))
    scene.submit(raw_workload("train", pod_set(5, 1, annotations={"gpuwarden.io/required-hash": hashes})))
    for _ in range(2):
        await scene.step(5 * SECOND)
    assert (len(scene.check()["message"]), scene.kueue.writes) == (2000, 1)


async def test_undecided_workload_is_not_decided_again_before_the_fleet_changes(scene: CheckScene) -> None:
    asked = []
    gang_of = scene.checks.gangs.gang

    class Counting(GangReader):
        async def gang(self, one: Workload) -> object:  # type: ignore[override]  # only counted
            asked.append(one.name)
            return await gang_of(one)

    scene.checks.gangs = Counting(ClaimReader(ClaimRules(), scene.namespaces), DressRules())
    scene.submit(raw_workload("train", pod_set(5, 1, annotations=PROVEN)))
    await scene.step()
    await scene.step()  # the written message is a change
    await scene.step()
    assert len(asked) == 2
    scene.fleet.hold(reservation(slot("GPU-a0")))
    await scene.step()
    assert len(asked) == 3
    await scene.step(DECIDED_AGAIN)
    assert len(asked) == 4


async def test_failed_write_promises_nothing_and_is_tried_again_after_a_pause(scene: CheckScene) -> None:
    scene.kueue.failing = True
    scene.submit(raw_workload("a", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    await scene.step()
    assert scene.kueue.writes == 1
    scene.kueue.failing = False
    scene.submit(raw_workload("b", pod_set(4, 1, annotations=PROVEN)))
    await scene.step()
    assert (scene.state("a"), scene.state("b")) == ("Pending", "Ready")
    scene.finish("b")
    await scene.step(SECOND)
    assert scene.state("a") == "Ready"


async def test_workload_that_has_changed_is_decided_again_at_once(scene: CheckScene) -> None:
    stale = raw_workload("a", pod_set(4, 1, annotations=PROVEN))
    scene.submit(stale)
    scene.kueue.workloads["a"] = {**stale, "metadata": {**stale["metadata"], "resourceVersion": "2"}}
    scene.checks._is_up_to_date = True
    await scene.step()
    assert scene.kueue.answers == []
    scene.checks.workloads.changed(scene.kueue.workloads["a"])
    await scene.step()
    assert scene.kueue.answers == [("a", "Ready")]


async def test_new_pending_workload_wakes_the_reconciler(scene: CheckScene) -> None:
    scene.submit(raw_workload(checks=(raw_check("Ready"),)))
    assert scene.wakes == 0
    scene.submit(raw_workload("next"))
    assert scene.wakes == 1


def part(gpus: int, pods: int = 1, *hashes: str) -> GangPart:
    return GangPart(Claim(ClaimRecord(gpus=gpus, hashes=hashes)), pods)


@pytest.mark.parametrize(
    ("gang", "text"),
    [
        pytest.param((part(1),), "1 GPU can be had", id="one"),
        pytest.param((part(2, 3), part(1, 1, HASH)), f"7 GPUs proven for {HASH} can be had", id="several parts"),
        pytest.param((part(1, 1, OTHER_HASH, HASH),), f"1 GPU proven for {HASH} or {OTHER_HASH} can be had", id="any"),
        pytest.param((part(0, 1, HASH),), f"a node proven for {HASH} can be had", id="no GPU"),
    ],
)
def test_message_says_what_can_be_had(gang: tuple[GangPart, ...], text: str) -> None:
    assert available(gang) == text
