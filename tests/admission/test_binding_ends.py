"""Until when pods may be bound without a review: which nodes and pods are listed, and when the list is written."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import structlog

from tests.builders import (
    HASH,
    NOW,
    OTHER_HASH,
    Raw,
    evidence,
    expression,
    node,
    on_node,
    required_affinity,
    slot,
    term,
)
from tests.fake_objects import FakeObjects
from webhook.admission.binding_ends import (
    CLOSED_FOR,
    LOSS,
    MAX_BYTES,
    NAME,
    NAMESPACE,
    NODE,
    POD,
    ROUTINE,
    BindingEnds,
    ensure_binding_ends,
    moment_of,
    raw_of,
    within_the_limit,
)
from webhook.admission.namespaces import ClaimReader, WatchedNamespaces
from webhook.core.claim import ClaimRules
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.reservation import Phase, Reservation
from webhook.ledger.reserved_pod import ReservedPod
from webhook.runtime.clock import LONG_AGO

A, B = "node-a", "node-b"
HOUR, DEADLINE = timedelta(hours=1), timedelta(minutes=5)
LATE = "1970-01-01T00:00:00Z"
TICK = timedelta(seconds=1)


class Recorded:
    """Every stored version of the object."""

    def __init__(self) -> None:
        self.seen: list[Raw] = []

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.seen.extend(objects.values())

    def changed(self, raw: Raw) -> None:
        self.seen.append(raw)

    def deleted(self, raw: Raw) -> None:
        pass


class NoLookup:
    async def get(self, name: str) -> Raw | None:
        return None


class Scene:
    """Two nodes with evidence for an hour, and an elected reconciler."""

    def __init__(self, *, needs_all: bool = True, max_bytes: int = MAX_BYTES, has_proofs: bool = False) -> None:
        self.now = NOW
        self.is_current = True
        self.max_bytes = max_bytes
        self.has_proofs = has_proofs
        self.published: dict[str, set[str]] = {}
        self.held: dict[str, Reservation] = {}
        self.objects = FakeObjects()
        self.fleet = Fleet()
        for name in (A, B):
            self.fleet.put(node(name), NOW)
            self.proves(name, HOUR)
        self.policy = EvidencePolicy(is_always_required=needs_all)
        self.namespaces = WatchedNamespaces(NoLookup())
        self.ends = self.another()

    def another(self) -> BindingEnds:
        return BindingEnds(
            self.objects,
            self.fleet,
            self.policy,
            ClaimReader(ClaimRules(), self.namespaces),
            lambda one: self.held.get(one.reservation_id),
            DEADLINE,
            lambda: self.now,
            is_current=lambda: self.is_current,
            max_bytes=self.max_bytes,
            published=(lambda name: self.published.get(name, set())) if self.has_proofs else None,
        )

    def proves(self, name: str, lasts: timedelta | None, digest: str = HASH) -> None:
        until = None if lasts is None else self.now + lasts
        self.says(name, evidence(name, digest, since=NOW - HOUR, until=until))

    def says(self, name: str, word: Evidence | None) -> None:
        self.fleet.set_evidence(name, word, self.now)

    def holds(self, raw: Raw, **members: Any) -> Raw:
        """A pod whose reservation the ledger knows."""
        one = ReservedPod.of(raw)
        assert one is not None
        self.held[one.reservation_id] = Reservation(
            **{
                "id": one.reservation_id,
                "namespace": one.pod.namespace,
                "claim_digest": one.claim_digest,
                "node": one.node or "",
                "slots": tuple(slot(uuid) for uuid in one.uuids),
                "since": NOW,
                "deadline": None,
                "phase": Phase.FINALIZED,
                "uid": one.pod.uid,
                **members,
            }
        )
        self.ends.changed(raw)
        return raw

    async def after(self, span: timedelta = TICK) -> dict[str, str]:
        """What is stored after one pass, this much later."""
        self.now += span
        await self.ends.step()
        return self.written

    @property
    def written(self) -> dict[str, str]:
        spec = self.objects.objects.get(NAME, {}).get("spec", {})
        return {**spec.get("nodes", {}), **spec.get("namespaces", {}), **spec.get("pods", {})}

    def opts(self, namespace: str, answer: str) -> None:
        labels = {"gpuwarden.io/enabled": answer}
        self.ends.namespaces.changed({"metadata": {"name": namespace, "labels": labels}})

    def add_pods(self, namespace: str, pods: int) -> None:
        """Unreviewed pods with a claim."""
        for number in range(pods):
            raw = unrecorded_pod(f"{namespace}-{number:032}", {"gpuwarden.io/required-hash": HASH})
            raw["metadata"]["namespace"] = namespace
            self.ends.changed(raw)

    def stored(self, part: str) -> dict[str, str]:
        found: dict[str, str] = self.objects.objects[NAME]["spec"].get(part, {})
        return found

    @property
    def is_kept(self) -> bool:
        return "kept" in self.objects.objects.get(NAME, {}).get("spec", {})


def at(span: timedelta) -> str:
    return (NOW + span).isoformat().replace("+00:00", "Z")


def raw_pod(name: str, gpus: int = 0, hashes: tuple[str, ...] = (HASH,), *nodes: str, **spec: Any) -> Raw:
    """A pod dressed by us."""
    notes = {"gpuwarden.io/claim": ClaimRecord(gpus=gpus, hashes=hashes).text()}
    if gpus:
        notes |= {
            "gpuwarden.io/reservation-id": f"r-{name}",
            "gpuwarden.io/node": A,
            "gpuwarden.io/gpu-uuid": ",".join(f"GPU-{k}" for k in range(gpus)),
        }
    pinned = nodes or (A,)
    affinity = required_affinity(*(on_node(one) for one in pinned))
    return unrecorded_pod(name, notes, affinity=affinity, **spec)


def unrecorded_pod(name: str, notes: dict[str, str] | None = None, **spec: Any) -> Raw:
    meta = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "annotations": notes or {}}
    return {
        "kind": "Pod",
        "metadata": {**meta, "creationTimestamp": NOW.isoformat()},
        "spec": {"containers": [{"name": "main"}], **spec},
        "status": {"phase": "Pending"},
    }


async def test_nodes_are_listed_with_the_end_of_their_evidence() -> None:
    scene = Scene()
    assert await scene.after() == {A: at(HOUR), B: at(HOUR)}
    assert scene.is_kept


async def test_endless_evidence_and_unproven_nodes_are_not_listed() -> None:
    """A node without evidence accepts pods without a claim. No pod that needs evidence was admitted for it."""
    scene = Scene()
    scene.proves(A, None)
    scene.says(B, None)
    assert await scene.after() == {}
    assert scene.is_kept


@pytest.mark.parametrize(
    "word",
    [None, evidence(A, is_banned=True), evidence(A, is_conflict=True), evidence(A, since=NOW - HOUR, until=NOW)],
    ids=["withdrawn", "banned", "conflict", "stale"],
)
async def test_node_without_evidence_is_closed_within_a_second_and_reopened_when_no_pod_is_on_its_way(
    word: Evidence | None,
) -> None:
    scene = Scene()
    await scene.after()
    scene.says(A, word)
    assert (await scene.after())[A] == LATE
    scene.ends.changed(raw_pod("late"))
    assert (await scene.after(2 * CLOSED_FOR))[A] == LATE
    scene.ends.changed(raw_pod("late", nodeName=A))
    assert A not in await scene.after(ROUTINE)


async def test_new_leader_keeps_closed_nodes_closed() -> None:
    scene = Scene()
    await scene.after()
    scene.says(A, None)
    scene.ends = scene.another()
    assert (await scene.after())[A] == LATE
    assert A not in await scene.after(2 * CLOSED_FOR)


async def test_later_end_is_written_at_the_next_interval_and_near_end_at_once() -> None:
    scene = Scene()
    await scene.after()
    scene.proves(A, 2 * HOUR)
    assert (await scene.after())[A] == at(HOUR)
    scene.proves(B, timedelta(seconds=20))
    assert moment_of((await scene.after())[B]) <= scene.now + timedelta(seconds=20)
    assert moment_of((await scene.after(ROUTINE))[A]) > NOW + HOUR


async def test_nothing_is_written_while_nothing_changes_or_a_watch_is_interrupted() -> None:
    scene = Scene()
    await scene.after()
    assert scene.objects.done == [f"create {NAME}", f"replace {NAME}"]
    for _ in range(30):
        await scene.after()
    assert len(scene.objects.done) == 2
    scene.is_current = False
    scene.says(A, None)
    assert (await scene.after())[A] == at(HOUR)


async def test_deleted_or_edited_object_is_written_again() -> None:
    scene = Scene()
    await scene.after()
    scene.objects.remove(NAME)
    assert (await scene.after(ROUTINE))[A] == at(HOUR)
    raw = scene.objects.objects[NAME]
    scene.objects.put({**raw, "spec": {"kept": "yes", "nodes": {A: 7}, "pods": []}})
    assert (await scene.after(ROUTINE))[A] == at(HOUR)


async def test_failed_write_is_tried_again() -> None:
    scene = Scene()
    scene.objects.is_away = True
    assert await scene.after() == {}
    scene.objects.is_away = False
    assert (await scene.after())[A] == at(HOUR)


# Pods.


async def test_pod_with_gpus_ends_at_its_bind_deadline() -> None:
    scene = Scene()
    scene.holds(raw_pod("train", 1))
    assert (await scene.after())["uid-train"] == at(DEADLINE)
    assert not scene.ends.is_closed("uid-train")
    scene.now += DEADLINE
    assert scene.ends.is_closed("uid-train")
    assert not scene.ends.is_closed("uid-another")


@pytest.mark.parametrize(
    "members",
    [{"phase": Phase.RELEASING}, {"claim_digest": "another"}, {"uid": "uid-another"}, {"namespace": "another"}],
    ids=["releasing", "another claim", "another pod", "another namespace"],
)
async def test_pod_without_its_reservation_may_not_be_bound(members: dict[str, Any]) -> None:
    scene = Scene()
    scene.holds(raw_pod("train", 1), **members)
    assert (await scene.after())["uid-train"] == LATE
    scene.held.clear()
    assert (await scene.after(ROUTINE))["uid-train"] == LATE


async def test_pod_may_not_be_bound_once_its_node_has_another_hash() -> None:
    scene = Scene()
    scene.holds(raw_pod("train", 1))
    scene.ends.changed(raw_pod("held", 0, (HASH,), A))
    scene.ends.changed(raw_pod("freer", 0, (HASH,), A, B))
    written = await scene.after()
    assert (written["uid-train"], written.get("uid-held"), written.get("uid-freer")) == (at(DEADLINE), None, None)
    scene.proves(A, HOUR, OTHER_HASH)
    written = await scene.after()
    assert (written["uid-train"], written["uid-held"], written.get("uid-freer")) == (LATE, LATE, None)


async def test_unreviewed_pod_with_a_claim_may_not_be_bound() -> None:
    scene = Scene(needs_all=False)
    scene.ends.changed(unrecorded_pod("asks", {"gpuwarden.io/required-hash": HASH}))
    scene.ends.changed(unrecorded_pod("odd", {"gpuwarden.io/gpu-count": "many"}))
    scene.ends.changed(raw_pod("left-open", 0, (HASH,)) | {"spec": {"containers": []}})
    written = await scene.after()
    assert {name: end for name, end in written.items() if name.startswith("uid-")} == {
        "uid-asks": LATE,
        "uid-odd": LATE,
        "uid-left-open": LATE,
    }


@pytest.mark.parametrize(
    "raw",
    [
        unrecorded_pod("plain"),
        raw_pod("bound", 1, nodeName=A),
        {**raw_pod("over", 1), "status": {"phase": "Failed"}},
        raw_pod("queued", 1, schedulingGates=[{"name": "gpuwarden.io/queue"}]),
        unrecorded_pod("selects", affinity=required_affinity(term(expression("zone", "In", "a")))),
        {"metadata": {"name": "odd", "uid": "uid-odd"}, "spec": 7},
    ],
    ids=["plain", "on a node", "ended", "behind our gate", "plain with affinity", "odd"],
)
async def test_pods_without_a_claim_are_not_listed(raw: Raw) -> None:
    scene = Scene()
    scene.ends.replaced({"ml/x": raw})
    assert (await scene.after()).keys() == {A, B}


async def test_list_of_nodes_that_does_not_fit_closes_everything() -> None:
    scene = Scene()
    await scene.after()
    for number in range(MAX_BYTES // 200):
        scene.fleet.put(node(f"{number:0200}"), NOW)
        scene.proves(f"{number:0200}", HOUR)
    await scene.after(ROUTINE)
    assert not scene.is_kept


async def test_twenty_thousand_pods_of_one_namespace_close_only_that_namespace() -> None:
    scene = Scene()
    scene.add_pods("crowd", 24_000)
    scene.add_pods("other", 500)
    scene.holds(raw_pod("train", 1))
    await scene.after()
    assert scene.is_kept
    written = scene.written
    assert (written["crowd"], written["uid-train"], written[A]) == (LATE, at(DEADLINE), at(HOUR))
    assert [uid for uid in written if uid.startswith("uid-crowd")] == []
    assert len([uid for uid in written if uid.startswith("uid-other")]) == 500
    assert scene.ends.is_closed(f"uid-crowd-{7:032}")
    # When they are gone, new pods of that namespace are listed again.
    for number in range(24_000):
        scene.ends.deleted({"metadata": {"uid": f"uid-crowd-{number:032}"}})
    scene.add_pods("crowd", 1)
    written = await scene.after(ROUTINE)
    assert (written.get("crowd"), written[f"uid-crowd-{0:032}"]) == (None, LATE)


@pytest.mark.parametrize("is_crowded_first", [True, False], ids=["from the beginning", "later"])
async def test_truncated_list_is_withdrawn_and_logged_once(is_crowded_first: bool) -> None:
    """The CRD of an older version: the API server drops unknown fields silently."""
    scene = Scene(max_bytes=7_000)
    scene.objects.pruned = {"namespaces"}
    await ensure_binding_ends(scene.objects)
    if not is_crowded_first:
        assert (await scene.after())[A] == at(HOUR)
    with structlog.testing.capture_logs() as logs:
        scene.add_pods("crowd", 120)
        await scene.after(ROUTINE)
        assert not scene.ends.is_closed(f"uid-crowd-{7:032}")
        before, kept = len(scene.objects.done), [scene.is_kept]
        for _ in range(2 * int(ROUTINE / TICK)):
            await scene.after()
            kept.append(scene.is_kept)
        assert not any(kept)
        assert len(scene.objects.done) - before == 2, "tried again in its turn"
    assert [one["parts"] for one in logs if one["log_level"] == "error"] == [["namespaces"]]
    scene.objects.pruned.clear()
    assert (await scene.after(ROUTINE))["crowd"] == LATE
    assert scene.is_kept
    assert scene.ends.is_closed(f"uid-crowd-{7:032}")


async def test_withdrawn_list_takes_effect_only_when_stored_whole() -> None:
    scene = Scene(max_bytes=7_000)
    scene.objects.pruned = {"namespaces"}
    scene.add_pods("crowd", 120)
    scene.objects.listener = listener = Recorded()
    for _ in range(30):
        await scene.after()
        scene.objects.tell()
    kept = ["kept" in raw["spec"] for raw in listener.seen]
    assert kept
    assert not any(kept)


async def test_pods_of_namespaces_that_have_not_opted_in_take_no_room() -> None:
    """The policy does not judge their Bindings."""
    scene = Scene(max_bytes=7_000)
    scene.opts("crowd", "false")
    scene.add_pods("crowd", 120)
    assert await scene.after() == {A: at(HOUR), B: at(HOUR)}
    assert not scene.ends.is_closed(f"uid-crowd-{7:032}")
    scene.opts("crowd", "true")
    assert (await scene.after())["crowd"] == LATE


async def test_pod_of_a_namespace_that_opts_out_counts_as_bindable() -> None:
    """The policy does not judge its Binding. So it keeps its GPUs until the namespace opts in again or the pod is
    gone."""
    scene = Scene()
    scene.opts("ml", "true")
    scene.holds(raw_pod("train", 1))
    await scene.after()
    await scene.after(DEADLINE)
    assert scene.ends.is_closed("uid-train")
    scene.opts("ml", "false")
    assert not scene.ends.is_closed("uid-train")
    assert "uid-train" not in await scene.after(ROUTINE)
    assert not scene.ends.is_closed("uid-train")
    scene.opts("ml", "true")
    assert not scene.ends.is_closed("uid-train")
    assert (await scene.after(ROUTINE))["uid-train"] == at(DEADLINE)
    assert scene.ends.is_closed("uid-train")


@pytest.mark.parametrize(
    ("sizes", "closed"),
    [
        ({"a": 10, "b": 10, "c": 10}, set()),
        ({"a": 10, "b": 12, "c": 30}, {"c"}),
        ({"a": 26, "b": 28, "c": 30}, {"b", "c"}),
        ({"a": 60, "b": 60}, {"a", "b"}),
    ],
    ids=["all have room", "the largest", "none is above its share by much", "each alone is too large"],
)
def test_namespace_within_its_share_is_never_closed(sizes: dict[str, int], closed: set[str]) -> None:
    pods = {name: {(POD, f"{name}-{n:034}"): NOW for n in range(size)} for name, size in sizes.items()}
    found = within_the_limit({(NODE, A): NOW}, pods, 3_000)
    assert {name for kind, name in found if kind == NAMESPACE} == closed
    assert len(msgspec.json.encode(raw_of(found, NOW))) <= 3_000
    assert sum(kind == POD for kind, _ in found) == sum(n for name, n in sizes.items() if name not in closed)


async def test_pod_is_parsed_again_when_its_namespace_requires_another_hash() -> None:
    scene = Scene()
    raw = raw_pod("held", 0, (HASH,), A)
    raw["metadata"]["annotations"]["gpuwarden.io/required-hash"] = HASH
    scene.ends.changed(raw)
    assert "uid-held" not in await scene.after()
    demand = {"gpuwarden.io/required-hash": OTHER_HASH}
    scene.namespaces.view.changed({"metadata": {"name": "ml", "annotations": demand}})
    assert (await scene.after())["uid-held"] == LATE
    assert (await scene.after(ROUTINE))["uid-held"] == LATE


async def test_missing_object_is_created_and_existing_one_is_kept() -> None:
    scene = Scene()
    await ensure_binding_ends(scene.objects)
    assert scene.objects.objects[NAME]["spec"] == {}
    assert (await scene.after())[A] == at(HOUR)
    await ensure_binding_ends(scene.objects)
    assert scene.is_kept
    scene.objects.is_away = True
    await ensure_binding_ends(scene.objects)


def test_unparsable_time_counts_as_past() -> None:
    for text in ("", "soon", "2026-01-01", "2026-01-01T00:00:00"):
        assert moment_of(text) == LONG_AGO


# Proof devices. A policy refuses claims on nodes that are not listed with an end in the future.


async def test_endless_evidence_is_listed_with_a_far_end_for_claims() -> None:
    scene = Scene(has_proofs=True)
    scene.proves(A, None)
    scene.says(B, None)
    assert await scene.after() == {A: "9999-12-31T23:59:59Z"}
    assert await scene.after(ROUTINE) == {A: "9999-12-31T23:59:59Z"}


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "regained"])
@pytest.mark.parametrize("lasts", [None, HOUR], ids=["endless", "hour"])
async def test_node_that_becomes_proven_is_listed_at_once(lasts: timedelta | None, is_known: bool) -> None:
    scene = Scene(has_proofs=True)
    if not is_known:
        scene.says(A, None)
    await scene.after()
    scene.says(A, None)
    await scene.after()
    scene.proves(A, lasts)
    assert moment_of((await scene.after())[A]) > scene.now


async def test_lost_evidence_is_written_within_a_fraction_of_a_second_and_gained_within_a_second() -> None:
    scene = Scene(has_proofs=True)
    scene.says(B, None)
    await scene.after()
    scene.says(A, None)
    scene.proves(B, HOUR)
    assert (await scene.after(LOSS - timedelta(milliseconds=10)))[A] == at(HOUR)
    written = await scene.after(timedelta(milliseconds=10))
    assert written[A] == LATE
    scene.says(A, None)
    scene.proves(A, HOUR)
    assert (await scene.after(LOSS))[A] == LATE
    assert moment_of((await scene.after())[A]) > scene.now


async def test_device_for_a_hash_that_its_node_no_longer_proves_is_listed_until_it_is_gone_or_proven_again() -> None:
    scene = Scene(has_proofs=True)
    scene.published[A] = {"aa11"}
    await scene.after()
    assert scene.stored("proofs") == {}
    scene.proves(A, HOUR, OTHER_HASH)
    await scene.after(LOSS)
    assert scene.stored("proofs") == {f"{A}/aa11": LATE}
    assert moment_of(scene.stored("nodes")[A]) > scene.now
    scene.published[A] = {"aa11", "bb22"}
    await scene.after()
    assert scene.stored("proofs") == {f"{A}/aa11": LATE}
    scene.proves(A, HOUR)
    await scene.after()
    assert scene.stored("proofs") == {f"{A}/bb22": LATE}
    scene.published[A] = {"aa11"}
    await scene.after()
    assert scene.stored("proofs") == {}


async def test_device_of_an_earlier_hash_is_listed_when_its_node_is_proven_after_a_time_without_evidence() -> None:
    scene = Scene(has_proofs=True)
    scene.published[A] = {"aa11"}
    await scene.after()
    scene.says(A, None)
    await scene.after()
    assert (scene.stored("nodes")[A], scene.stored("proofs")) == (LATE, {})
    scene.proves(A, HOUR, OTHER_HASH)
    await scene.after()
    assert scene.stored("proofs") == {f"{A}/aa11": LATE}


async def test_new_leader_lists_devices_of_an_earlier_hash() -> None:
    scene = Scene(has_proofs=True)
    await scene.after()
    scene.proves(A, HOUR, OTHER_HASH)
    scene.published[A] = {"aa11"}
    scene.ends = scene.another()
    scene.ends.begin()
    await scene.after()
    assert scene.stored("proofs") == {f"{A}/aa11": LATE}


async def test_new_leader_opens_devices_that_are_proven_again() -> None:
    scene = Scene(has_proofs=True)
    scene.published[A] = {"aa11"}
    scene.proves(A, None, OTHER_HASH)
    await scene.after()
    assert scene.stored("proofs") == {f"{A}/aa11": LATE}
    scene.proves(A, None)
    scene.ends = scene.another()
    scene.ends.begin()
    await scene.after()
    assert scene.stored("proofs") == {}


async def test_without_proof_devices_nothing_is_checked_within_the_second() -> None:
    scene = Scene()
    await scene.after()
    scene.says(A, None)
    assert (await scene.after(TICK - timedelta(milliseconds=1)))[A] == at(HOUR)


def native(*templates: str, gpus: int = 0, notes: dict[str, str] | None = None) -> Raw:
    claims = [{"name": f"gpus-{k}", "resourceClaimTemplateName": name} for k, name in enumerate(templates)]
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    asked = {"gpuwarden.io/required-hash": HASH} if notes is None else notes
    return unrecorded_pod("native", asked, resourceClaims=claims, containers=[{"name": "main", **limits}])


@pytest.mark.parametrize(
    "raw",
    [native("gpuwarden-1-aa11"), native("gpuwarden-1-aa11", notes={}), native("theirs", "gpuwarden-2-aa11")],
    ids=["with its hash", "without a hash", "beside another claim"],
)
async def test_pod_whose_gpus_come_by_our_templates_ends_with_its_node_only(raw: Raw) -> None:
    scene = Scene(has_proofs=True)
    scene.ends.changed(raw)
    assert (await scene.after()).keys() == {A, B}


@pytest.mark.parametrize(
    "raw",
    [
        native(notes={"gpuwarden.io/required-hash": HASH, "gpuwarden.io/native": "true"}),
        native("gpuwarden-1-aa11", gpus=1),
        native("gpuwarden-1-bb22"),
        native("gpuwarden-1-aa11", "gpuwarden-1-bb22"),
        native("theirs"),
    ],
    ids=["annotation alone", "GPU beside the claim", "another hash", "two hashes", "another template"],
)
async def test_pod_that_only_claims_to_be_native_may_not_be_bound(raw: Raw) -> None:
    scene = Scene(has_proofs=True)
    scene.ends.changed(raw)
    assert (await scene.after())["uid-native"] == LATE


async def test_without_proof_devices_a_template_proves_nothing() -> None:
    scene = Scene()
    scene.ends.changed(native("gpuwarden-1-aa11"))
    assert (await scene.after())["uid-native"] == LATE


def left_to_scheduler(template: str | None = "gpuwarden-1-aa11", *hashes: str, own: bool = True) -> Raw:
    """A pod whose GPUs kube-scheduler chooses. Without `own`, only its namespace required the hash."""
    record = ClaimRecord(gpus=1, hashes=hashes or (HASH,), asked={"main": 1}, injection="dra", reserve="bind")
    claims = [{"name": "gpuwarden", "resourceClaimTemplateName": template}] if template else []
    asked = {"gpuwarden.io/required-hash": ",".join(record.hashes)} if own else {}
    notes = {"gpuwarden.io/claim": record.text(), **asked}
    return unrecorded_pod("left", notes, resourceClaims=claims)


async def test_pod_whose_gpus_kube_scheduler_chooses_ends_with_its_node_only() -> None:
    scene = Scene(has_proofs=True)
    scene.ends.changed(left_to_scheduler())
    assert (await scene.after()).keys() == {A, B}


@pytest.mark.parametrize(
    ("raw", "has_proofs"),
    [
        (left_to_scheduler(None), True),
        (left_to_scheduler("gpuwarden-8-aa11"), True),
        (left_to_scheduler("gpuwarden-1-aa11", "sha256:bb22"), True),
        (left_to_scheduler(), False),
    ],
    ids=["no claim", "a larger claim", "another hash", "no proof devices"],
)
async def test_pod_without_the_claim_of_its_record_may_not_be_bound(raw: Raw, *, has_proofs: bool) -> None:
    scene = Scene(has_proofs=has_proofs)
    scene.ends.changed(raw)
    assert (await scene.after())["uid-left"] == LATE


async def test_pod_whose_hash_the_namespace_does_not_allow_any_more_may_not_be_bound() -> None:
    """Its request for GPUs is in its record only."""
    scene = Scene(has_proofs=True)
    scene.ends.changed(left_to_scheduler(own=False))
    assert (await scene.after()).keys() == {A, B}
    demand = {"gpuwarden.io/required-hash": OTHER_HASH}
    scene.namespaces.view.changed({"metadata": {"name": "ml", "annotations": demand, "resourceVersion": "1"}})
    assert (await scene.after(ROUTINE))["uid-left"] == LATE
