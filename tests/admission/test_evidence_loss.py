"""Evidence that changes while pods run: what is reported, and what the policy does."""

from datetime import timedelta

import pytest
from attrs import asdict, evolve

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence, node
from tests.recorded_events import RecordedEvents
from webhook.admission.evidence_loss import (
    MAX_CLASSES,
    SETTLED,
    BoundPod,
    EvictionError,
    EvidenceLoss,
    OnEvidenceLost,
    evidence_ages,
)
from webhook.admission.namespaces import ClaimReader
from webhook.core.claim import ClaimRules
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import Taint
from webhook.core.evidence import Evidence, EvidenceState, combined
from webhook.core.fleet import Fleet
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.pod_claims import pod_claim_from
from webhook.core.proof_devices import hash_attribute
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.runtime.telemetry import Metrics

CHANGED, LOST = Reason.EVIDENCE_CHANGED, Reason.EVIDENCE_LOST
A, B = "node-a", "node-b"
HOUR = timedelta(hours=1)
OURS = Taint("gpuwarden.io/evidence-lost", "", "NoSchedule")
REPORT, TAINT, EVICT = OnEvidenceLost.REPORT, OnEvidenceLost.TAINT, OnEvidenceLost.EVICT


def raw_pod(
    name: str = "train", on: str | None = A, hashes: tuple[str, ...] = (HASH,), *, phase: str = "Running", gpus: int = 0
) -> Raw:
    notes = {"gpuwarden.io/claim": ClaimRecord(gpus=gpus, hashes=hashes).text()}
    if gpus:
        notes["gpuwarden.io/reservation-id"] = f"r-{name}"
    return on_a_node(name, on, notes, phase=phase)


def unreviewed_pod(*hashes: str, name: str = "train", record: str | None = None) -> Raw:
    """An unreviewed pod that asks for hashes. Its author wrote its record, if it has one."""
    notes = {"gpuwarden.io/required-hash": ",".join(hashes)} if hashes else {}
    raw = on_a_node(name, A, notes if record is None else {**notes, "gpuwarden.io/claim": record})
    raw["spec"]["containers"] = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    return raw


def on_a_node(name: str, on: str | None, notes: dict[str, str], phase: str = "Running") -> Raw:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "trains", "uid": "rs-1", "controller": True}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "research",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "annotations": notes,
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": on} if on else {},
        "status": {"phase": phase},
    }


class FakeNamespaces:
    """The known namespaces."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.asked = 0

    def known(self, namespace: str) -> HashPolicy | None:
        self.asked += 1
        text = self.hashes.get(namespace)
        return None if text is None else HashPolicy.of(namespace, {"gpuwarden.io/required-hash": text})

    async def bond(self, namespace: str) -> HashPolicy:
        return self.known(namespace) or NO_HASH_POLICY


class Scene:
    """A fleet of two proven nodes, with a policy for lost evidence."""

    def __init__(self, on_lost: OnEvidenceLost = REPORT, *, needs_all: bool = False) -> None:
        self.now = NOW
        self.is_current = True
        self.owed: set[str] = set()
        self.vouched: set[str] = set()
        self.failing: set[str] = set()
        self.namespaces = FakeNamespaces()
        self.done: list[str] = []
        self.heard = RecordedEvents()
        self.metrics = Metrics()
        self.fleet = Fleet()
        for name in (A, B):
            self.fleet.put(node(name), NOW)
            self.says(name)
        self.policy = EvidencePolicy(is_always_required=needs_all)
        self.continuous = self.another(on_lost)

    def another(self, on_lost: OnEvidenceLost) -> EvidenceLoss:
        """A process that has just started."""
        return EvidenceLoss(
            self.fleet,
            self.policy,
            on_lost,
            self,
            self.heard,
            lambda: self.now,
            ClaimReader(ClaimRules(), self.namespaces),
            is_current=lambda: self.is_current,
            is_write_pending=lambda name: name in self.owed,
            is_claim_known=lambda one: one.pod.name in self.vouched,
            count_change=self.metrics.count_evidence_change,
        )

    def says(self, name: str, digest: str = HASH) -> None:
        """Evidence for the next hour."""
        self.proves(name, evidence(name, digest, since=self.now - timedelta(minutes=1), until=self.now + HOUR))

    def proves(self, name: str, word: Evidence | None) -> None:
        self.fleet.set_evidence(name, word, self.now)

    async def settle(self, seconds: float = 0) -> list[tuple[str, Reason]]:
        """Runs passes until a loss counts as settled; returns what they reported."""
        already = len(self.heard.recorded)
        until = self.now + 3 * SETTLED + timedelta(seconds=seconds)
        while self.now < until:
            await self.continuous.step()
            self.now += SETTLED / 4
        return self.heard.recorded[already:]

    def metric(self, line: str) -> float:
        (found,) = [one for one in self.metrics.render()[0].decode().splitlines() if one.startswith(line + " ")]
        return float(found.rpartition(" ")[2])

    # Actions on nodes and pods.

    async def taint(self, node: str, *, wanted: bool) -> None:
        self.tried(node)
        self.done.append(f"{'taint' if wanted else 'untaint'} {node}")
        was = self.fleet.indexed_nodes[node].node
        others = tuple(one for one in was.taints if one != OURS)
        self.fleet.put(evolve(was, taints=(*others, OURS) if wanted else others), self.now)

    async def evict(self, pod: PodIdentity) -> None:
        self.tried(pod.name)
        self.done.append(f"evict {pod.name}")

    def tried(self, name: str) -> None:
        if name in self.failing:
            self.done.append(f"fail {name}")
            raise EvictionError("not now")


# Changes of a node's evidence.


async def test_state_at_start_is_not_reported_as_a_change() -> None:
    scene = Scene()
    scene.proves(B, None)
    assert await scene.settle() == []


@pytest.mark.parametrize(
    ("word", "state", "says"),
    [
        (None, "absent", f"was fresh as {HASH}, is absent"),
        (evidence(A, is_banned=True), "banned", "is banned"),
        (evidence(A, is_conflict=True), "conflict", "is conflict"),
        (evidence(A, since=NOW - HOUR, until=NOW), "stale", "is stale"),
        (evidence(A, OTHER_HASH), "fresh", f"was fresh as {HASH}, is fresh as {OTHER_HASH}"),
    ],
    ids=["withdrawn", "banned", "contradicted", "ended", "other-hash"],
)
async def test_evidence_change_is_reported_once(word: Evidence | None, state: str, says: str) -> None:
    scene = Scene()
    await scene.settle()
    scene.proves(A, word)
    assert await scene.settle() == [(A, CHANGED)]
    assert says in scene.heard.messages[-1]
    assert scene.metric(f'gpuwarden_evidence_changes_total{{state="{state}"}}') == 1
    assert await scene.settle() == []


async def test_end_of_evidence_is_reported_without_an_update() -> None:
    scene = Scene()
    await scene.settle()
    assert await scene.settle(HOUR.total_seconds()) == [(A, CHANGED), (B, CHANGED)]


async def test_repeated_evidence_change_is_reported_each_time() -> None:
    scene = Scene()
    await scene.settle()
    for _ in range(2):
        scene.proves(A, None)
        assert await scene.settle() == [(A, CHANGED)]
        scene.says(A)
        assert await scene.settle() == [(A, CHANGED)]
    assert len(set(scene.heard.messages)) == 4  # otherwise the API server would merge the Events


async def test_renewed_evidence_is_not_a_change() -> None:
    scene = Scene()
    await scene.settle()
    scene.now += HOUR / 2
    scene.says(A)
    assert await scene.settle() == []


async def test_evidence_restored_within_a_pass_is_not_a_change() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    scene.says(A)
    assert (await scene.settle(), scene.done) == ([], [])


async def test_new_node_is_no_change_and_deleted_node_clears_its_losses() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.fleet.put(node("node-c"), scene.now)
    scene.fleet.remove(A)
    assert (await scene.settle(), scene.done) == ([], [])


# Pods without the evidence that they need.


async def test_lost_evidence_is_reported_once_on_pod_and_owner() -> None:
    scene = Scene()
    scene.continuous.changed(raw_pod())
    scene.continuous.changed(raw_pod("other", on=B))
    await scene.settle()
    scene.proves(A, None)
    assert await scene.settle() == [(A, CHANGED), ("train", LOST), ("trains", LOST)]
    assert "attested as" in scene.heard.messages[-1]
    assert scene.heard.messages[-1].startswith("pod train: ")
    assert (await scene.settle(), scene.done) == ([], [])
    scene.says(A)
    await scene.settle()
    scene.proves(A, evidence(A, OTHER_HASH))
    assert await scene.settle() == [(A, CHANGED), ("train", LOST), ("trains", LOST)]


@pytest.mark.parametrize(
    "raw",
    [
        raw_pod(hashes=(), gpus=1),
        raw_pod(phase="Succeeded"),
        raw_pod(on=None),
        {**raw_pod(), "metadata": {**raw_pod()["metadata"], "annotations": {}}},
    ],
    ids=["names-no-hash", "ended", "on-no-node", "no-claim"],
)
async def test_pods_with_their_evidence_are_not_reported(raw: Raw) -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw)
    await scene.settle()
    scene.proves(A, None)
    assert (await scene.settle(), scene.done) == ([(A, CHANGED)], [])


@pytest.mark.parametrize("record", [None, "{}", f'{{"hashes":["{HASH}","{OTHER_HASH}"]}}', '{"gpus":1}', "[]"])
async def test_unreviewed_pod_is_checked_against_its_own_request(record: str | None) -> None:
    """The extender alone admitted it. Its author wrote its record, if it has one."""
    scene = Scene(EVICT)
    scene.continuous.changed(unreviewed_pod(HASH, record=record))
    await scene.settle()
    scene.proves(A, evidence(A, OTHER_HASH))
    assert await scene.settle() == [(A, CHANGED), ("train", LOST), ("trains", LOST)]
    assert scene.done[0] == "evict train"


async def test_unreviewed_pod_is_checked_against_its_namespaces_policy() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(unreviewed_pod())
    await scene.settle()
    scene.proves(A, evidence(A, OTHER_HASH))
    assert await scene.settle() == [(A, CHANGED)]
    scene.namespaces.hashes["research"] = HASH  # its event comes after its pod's
    assert await scene.settle() == [("train", LOST), ("trains", LOST)]
    assert scene.done[0] == "evict train"


async def test_native_pod_is_checked_against_the_hash_of_its_template() -> None:
    """Its namespace may accept others by now."""
    scene = Scene()
    scene.namespaces.hashes["research"] = f"{OTHER_HASH},{HASH}"
    raw = on_a_node("train", A, {"gpuwarden.io/native": "true"})
    raw["spec"]["resourceClaims"] = [pod_claim_from(f"gpuwarden-1-{hash_attribute(HASH)}")]
    scene.continuous.changed(raw)
    assert await scene.settle() == []
    scene.proves(A, evidence(A, OTHER_HASH))
    assert await scene.settle() == [(A, CHANGED), ("train", LOST), ("trains", LOST)]


async def test_unreadable_claim_is_checked_against_its_namespaces_policy() -> None:
    """The author of a running pod breaks its annotation."""
    scene = Scene(EVICT)
    scene.namespaces.hashes["research"] = HASH
    scene.continuous.changed(unreviewed_pod(""))
    await scene.settle()
    assert scene.done == []
    scene.proves(A, None)
    await scene.settle()
    assert scene.done[0] == "evict train"


async def test_pod_with_gpus_but_without_record_or_hash_is_ignored() -> None:
    scene = Scene(EVICT, needs_all=True)
    scene.continuous.changed(unreviewed_pod())
    await scene.settle()
    scene.proves(A, None)
    assert (await scene.settle(), scene.done) == ([(A, CHANGED)], [])


async def test_every_claim_needs_evidence_if_the_policy_requires_it() -> None:
    scene = Scene(EVICT, needs_all=True)
    scene.continuous.changed(raw_pod(hashes=(), gpus=1))
    await scene.settle()
    scene.proves(A, None)
    await scene.settle()
    assert scene.done[:1] == ["evict train"]


async def test_ended_or_deleted_pod_is_no_longer_counted() -> None:
    scene = Scene()
    scene.metrics.watch_evidence(scene.continuous.count_pods_without)
    for name in ("one", "two", "three"):
        scene.continuous.changed(raw_pod(name))
    assert scene.metric("gpuwarden_pods_without_evidence") == 0
    scene.proves(A, None)
    assert scene.metric("gpuwarden_pods_without_evidence") == 3
    scene.continuous.changed(raw_pod("one", phase="Failed"))
    scene.continuous.deleted(raw_pod("two"))
    assert scene.metric("gpuwarden_pods_without_evidence") == 1
    scene.continuous.replaced({})
    assert scene.metric("gpuwarden_pods_without_evidence") == 0


def ages(scene: Scene) -> dict[tuple[str, str], float]:
    metrics = Metrics()
    metrics.watch_ages(lambda: evidence_ages(scene.fleet, scene.now))
    samples = (one for family in metrics.registry.collect() for one in family.samples)
    name = "gpuwarden_evidence_age_seconds"
    return {(one.labels["state"], one.labels["node_class"]): one.value for one in samples if one.name == name}


def test_metric_shows_the_age_of_the_oldest_evidence() -> None:
    scene = Scene()
    scene.proves(B, evidence(B, since=NOW - HOUR, until=NOW))
    shown = ages(scene)
    assert (shown["fresh", ""], shown["stale", ""]) == (60, 3600)
    assert shown == {(state, ""): shown[state, ""] for state in EvidenceState}


def test_evidence_ages_are_grouped_by_node_class() -> None:
    """An average over all nodes would hide a hanging agent on one kind of machine."""
    scene = Scene()
    scene.fleet.put(evolve(node(A), labels={"gpu.nvidia.com/class": "H100", "nvidia.com/gpu.product": "x"}), NOW)
    scene.fleet.put(evolve(node(B), labels={"nvidia.com/gpu.product": "L40S"}), NOW)
    scene.proves(A, evidence(A, since=NOW - HOUR, until=NOW + HOUR))
    scene.proves(B, evidence(B, since=NOW - SECOND, until=NOW + HOUR))
    shown = ages(scene)
    assert {label: age for label, age in shown.items() if age} == {("fresh", "H100"): 3600, ("fresh", "L40S"): 1}
    assert ("stale", "H100") in shown


def test_age_is_the_oldest_of_several_proofs() -> None:
    scene = Scene()
    words = [evidence(A, since=NOW - age, until=NOW + HOUR) for age in (HOUR, SECOND)]
    scene.proves(A, combined([evolve(one, source=name) for one, name in zip(words, "ab", strict=True)]))
    assert ages(scene)["fresh", ""] == 3600


def test_number_of_node_classes_in_metrics_is_limited() -> None:
    scene = Scene()
    for number in range(MAX_CLASSES + 20):
        name = f"node-{number:03}"
        scene.fleet.put(evolve(node(name), labels={"gpu.nvidia.com/class": f"made-up-{number:03}"}), NOW)
        scene.proves(name, evidence(name, since=NOW - HOUR, until=NOW + HOUR))
    classes = {label for _, label in ages(scene)}
    assert len(classes) == MAX_CLASSES + 1
    assert "other" in classes
    assert ages(scene)["fresh", "other"] == 3600


# Actions by policy.


async def test_eviction_is_repeated_until_the_pod_is_gone() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    scene.failing = {"train"}  # a disruption budget forbids it
    await scene.settle()
    scene.proves(A, None)
    await scene.settle(60)
    tries = scene.done.count("fail train")
    assert 3 <= tries <= 7  # after 2, 4, 8 … seconds
    scene.failing = set()
    await scene.settle(60)
    assert scene.done[tries] == "evict train"
    leaving = raw_pod()
    leaving["metadata"]["deletionTimestamp"] = "2026-03-02T12:00:00Z"
    scene.continuous.changed(leaving)
    scene.done.clear()
    assert (await scene.settle(300), scene.done) == ([], [])


async def test_failed_eviction_does_not_hold_up_others() -> None:
    scene = Scene(EVICT)
    scene.failing = {f"stuck-{number}" for number in range(5)}
    for name in (*sorted(scene.failing), "train"):
        scene.continuous.changed(raw_pod(name))
    await scene.settle()
    scene.proves(A, None)
    await scene.settle()
    assert "evict train" in scene.done


async def test_pod_that_lost_its_evidence_before_the_start_is_evicted() -> None:
    scene = Scene(EVICT)
    scene.proves(A, None)
    scene.continuous.changed(raw_pod())
    assert await scene.settle() == [("train", LOST), ("trains", LOST)]
    assert scene.done[0] == "evict train"


async def test_node_is_tainted_until_its_evidence_is_back() -> None:
    scene = Scene(TAINT)
    theirs = Taint("theirs", "", "NoSchedule")
    scene.fleet.put(node(A, taints=[theirs]), NOW)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    await scene.settle()
    assert scene.done == ["taint node-a"]
    scene.continuous.deleted(raw_pod())
    await scene.settle()
    assert scene.done == ["taint node-a"]  # the pod is gone, and the evidence is still missing
    scene.says(A)
    await scene.settle()
    assert scene.done == ["taint node-a", "untaint node-a"]
    assert scene.fleet.indexed_nodes[A].node.taints == (theirs,)


async def test_node_with_another_hash_is_tainted_while_pods_need_the_old_one() -> None:
    scene = Scene(TAINT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, evidence(A, OTHER_HASH))
    await scene.settle()
    assert scene.done == ["taint node-a"]
    scene.continuous.deleted(raw_pod())
    await scene.settle()
    assert scene.done == ["taint node-a", "untaint node-a"]


async def test_pods_own_annotations_taint_no_node() -> None:
    scene = Scene(TAINT)
    scene.continuous.changed(raw_pod("forged", hashes=("sha256:nobody-has-this",)))
    assert await scene.settle() == [("forged", LOST), ("trains", LOST)]
    assert scene.done == []
    scene.vouched = {"forged"}
    await scene.settle()
    assert scene.done == ["taint node-a"]


@pytest.mark.parametrize(
    ("one", "other"),
    [(raw_pod(), raw_pod(hashes=(OTHER_HASH,))), (unreviewed_pod(HASH), unreviewed_pod(OTHER_HASH))],
    ids=["in its record", "in its wish"],
)
async def test_pod_that_changes_its_request_taints_no_node(one: Raw, other: Raw) -> None:
    scene = Scene(TAINT)
    scene.continuous.changed(one)
    await scene.settle()
    scene.continuous.changed(other)
    assert (await scene.settle(), scene.done) == ([("train", LOST), ("trains", LOST)], [])


async def test_unreviewed_pod_taints_its_node_if_the_node_matched_before() -> None:
    scene = Scene(TAINT)
    scene.continuous.changed(unreviewed_pod(HASH))
    await scene.settle()
    scene.proves(A, None)
    await scene.settle()
    assert scene.done == ["taint node-a"]


@pytest.mark.parametrize("word", [None, evidence(A, OTHER_HASH)], ids=["withdrawn", "other-hash"])
async def test_taint_survives_a_restart_and_is_removed_with_the_policy(word: Evidence | None) -> None:
    scene = Scene(TAINT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, word)
    await scene.settle()
    scene.continuous = scene.another(TAINT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    assert scene.done == ["taint node-a"]
    scene.continuous = scene.another(REPORT)
    await scene.settle()
    assert scene.done == ["taint node-a", "untaint node-a"]


# Facts that are not settled.


@pytest.mark.parametrize("policy", [TAINT, EVICT])
async def test_nothing_is_done_while_a_watch_is_interrupted_or_right_after(policy: OnEvidenceLost) -> None:
    scene = Scene(policy)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.is_current = False
    scene.now += HOUR  # by the last events, all evidence has ended
    assert (await scene.settle(), scene.done) == ([], [])
    scene.is_current = True
    await scene.continuous.step()
    scene.says(A)
    scene.says(B)
    assert (await scene.settle(), scene.done) == ([], [])


async def test_no_action_on_evidence_with_a_pending_write() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    scene.owed = {A}
    assert (await scene.settle(), scene.done) == ([], [])
    scene.owed = set()
    assert (A, CHANGED) in await scene.settle()
    assert scene.done[:1] == ["evict train"]


async def test_pending_write_before_the_action_delays_it() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    await scene.continuous.step()
    scene.owed = {A}
    assert (await scene.settle(), scene.done) == ([], [])


@pytest.mark.parametrize("policy", [TAINT, EVICT])
async def test_observations_before_an_election_cause_no_action(policy: OnEvidenceLost) -> None:
    scene = Scene(policy)
    scene.continuous.begin()
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    await scene.continuous.step()
    scene.now += timedelta(minutes=10)  # another process was the leader
    scene.continuous.begin()
    await scene.continuous.step()
    scene.now += SETTLED
    await scene.continuous.step()
    assert scene.done == []
    scene.says(A)
    await scene.settle()
    assert scene.done == []


async def test_new_leader_reports_losses_that_it_has_seen_before() -> None:
    scene = Scene()
    scene.continuous.changed(raw_pod())
    scene.proves(A, None)
    assert (await scene.settle()).count(("train", LOST)) == 1
    scene.continuous.begin()
    assert await scene.settle() == [("train", LOST), ("trains", LOST)]


async def test_pass_compares_only_pods_for_which_something_has_changed() -> None:
    """A large cluster has 40,000 pods with GPUs, and a pass follows each change of a pod."""
    scene = Scene()
    scene.namespaces.hashes["research"] = HASH
    pods = {name: unreviewed_pod(HASH, name=name) for name in map(str, range(100))}
    scene.continuous.replaced(pods)
    await scene.settle()
    compared = []
    for _ in range(3):
        scene.namespaces.asked = 0
        await scene.continuous.step()
        compared.append(scene.namespaces.asked)
        scene.proves(B, None)
    assert compared == [1, 1, 1]  # once for all pods of the namespace
    scene.proves(A, evidence(A, HASH, until=scene.now + 2 * HOUR))
    await scene.continuous.step()
    assert scene.namespaces.asked >= 100


async def test_pods_that_are_gone_leave_nothing_behind() -> None:
    scene = Scene()
    await scene.settle()
    before = sizes(scene.continuous)
    pods = [raw_pod(), unreviewed_pod(HASH, name="other"), unreviewed_pod(OTHER_HASH, name="lost")]
    for raw in pods:
        scene.continuous.changed(raw)
    await scene.settle()
    for raw in pods:
        scene.continuous.deleted(raw)
    await scene.settle()
    for raw in pods:  # while another process leads
        scene.continuous.changed(raw)
        scene.continuous.deleted(raw)
    assert sizes(scene.continuous) == before


def sizes(one: EvidenceLoss) -> dict[str, int]:
    return {name: len(value) for name, value in asdict(one, recurse=False).items() if isinstance(value, dict | set)}


async def test_short_loss_causes_no_action() -> None:
    scene = Scene(EVICT)
    scene.continuous.changed(raw_pod())
    await scene.settle()
    scene.proves(A, None)
    await scene.continuous.step()
    scene.says(A)
    await scene.settle()
    assert scene.heard.recorded == [(A, CHANGED), (A, CHANGED)]
    assert scene.done == []


def test_unreadable_pod_is_ignored() -> None:
    broken = raw_pod()
    broken["spec"] = {"nodeName": 7}
    assert BoundPod.of(broken, ClaimRules()) is None
