"""What an audit finds, and that it finds nothing in what is right."""

import json
from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.builders import HASH, NAMESPACE, NOW, OTHER_HASH, POD_UID, SECOND, Raw, raw_container, raw_env, raw_pod
from tests.web.house import House
from webhook.admission.audit import AuditedPod, AuditRules, Facts, Finding, FindingKind, findings
from webhook.admission.audit_watch import AuditWatch
from webhook.commands.audit import as_json, as_table
from webhook.core import keys
from webhook.core.claim import ClaimRules
from webhook.core.device import DeviceUuid, Slot
from webhook.core.dress import DressRules, Injection
from webhook.core.evidence import Evidence
from webhook.core.reservation import Orphan, Phase, Reservation, ReservationId
from webhook.runtime.telemetry import Metrics

READING = AuditRules(ClaimRules(), DressRules(Injection.NVIDIA, "nvidia.com/gpu"))
LATER = NOW + timedelta(hours=1)


def read(raw: Raw) -> AuditedPod | None:
    return READING.pod(raw)


async def placed(house: House, raw: Raw, node: str = "node-a") -> Raw:
    """Dressed by the webhooks, and on its node."""
    final = await house.create(raw)
    return {**final, "spec": {**final["spec"], "nodeName": node}, "status": {"phase": "Running"}}


def facts(*raws: Raw, **members: Any) -> Facts:
    pods = [pod for raw in raws if (pod := read(raw)) is not None]
    return Facts(**{"pods": pods, "held": (), "opted_in": {NAMESPACE}, **members})


def kinds(given: Facts, *, needs_evidence: bool = False) -> list[tuple[FindingKind, str]]:
    return [(one.kind, one.object) for one in findings(given, LATER, needs_evidence=needs_evidence)]


def proven(hash: str = HASH, **members: Any) -> dict[str, Evidence]:
    return {"node-a": Evidence("node-a", hash, "static", **members)}


async def test_a_pod_as_it_was_dressed_is_right(house: House) -> None:
    raw = await placed(house, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    held = list(house.parts.ledger.reservations())
    assert kinds(facts(raw, held=held, evidence=proven()), needs_evidence=True) == []


ASKING: dict[str, tuple[Raw, str]] = {
    "resource": (raw_pod(raw_container(gpus=2)), "asks for 2 GPUs, and nothing was reserved for it"),
    "label": (raw_pod(labels={"fudo.org/gpu.assign": "true"}), "asks for 1 GPU, and nothing was reserved for it"),
    "hash-alone": (
        raw_pod(annotations={"gpuwarden.io/required-hash": HASH}),
        f"asks for a node attested as {HASH}, and nothing was reserved for it",
    ),
    "variable": (
        raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES] would show it a GPU, and it has no claim",
    ),
    "cdi": (
        raw_pod(annotations={"cdi.k8s.io/gpu": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.k8s.io/gpu] would show it a GPU, and it has no claim",
    ),
    "unreadable": (
        raw_pod(annotations={"gpuwarden.io/gpu-count": "two"}),
        "asks in a way that cannot be read: gpuwarden.io/gpu-count: 'two' is not a whole number of GPUs",
    ),
}


@pytest.mark.parametrize(("raw", "said"), ASKING.values(), ids=ASKING.keys())
def test_what_would_be_refused_today_is_found_in_namespaces_that_opted_in(raw: Raw, said: str) -> None:
    (found,) = findings(facts(raw), LATER, needs_evidence=False)
    assert (found.kind, found.object, found.message) == (FindingKind.GPU_WITHOUT_RESERVATION, "pod ml/train-0", said)
    assert kinds(facts(raw, opted_in=set())) == []
    assert kinds(facts({**raw, "status": {"phase": "Succeeded"}})) == []


@pytest.mark.parametrize(
    "raw",
    [raw_pod(), raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="void", CUDA_VERSION="12.4")))],
    ids=["plain", "blinded"],
)
def test_a_pod_without_a_gpu_is_right(raw: Raw) -> None:
    assert kinds(facts(raw)) == []


def test_a_container_that_its_image_shows_all_gpus_is_found() -> None:
    raw = raw_pod(raw_container(env=raw_env(CUDA_VERSION="12.4")))
    assert kinds(facts(raw)) == [(FindingKind.CONTAINER_NOT_BLINDED, "pod ml/train-0")]


def test_a_pod_that_could_open_devices_is_found_in_isolated_namespaces() -> None:
    raw = raw_pod()
    raw = {**raw, "spec": {**raw["spec"], "hostPID": True}}
    (found,) = findings(facts(raw, isolated={NAMESPACE}), LATER, needs_evidence=False)
    assert (found.kind, found.object) == (FindingKind.POD_NOT_ISOLATED, "pod ml/train-0")
    assert found.message == "could reach GPUs that are not its own: spec.hostPID"
    assert kinds(facts(raw)) == []
    assert kinds(facts({**raw, "status": {"phase": "Succeeded"}}, isolated={NAMESPACE})) == []


async def test_a_pod_with_gpus_that_may_take_too_long_to_stop_is_found(house: House) -> None:
    raw = await placed(house, raw_pod(raw_container(gpus=1)))
    raw = {**raw, "spec": {**raw["spec"], "terminationGracePeriodSeconds": 61}}
    for most, expected in ((60, "61 s, probes included; a pod with GPUs may have at most 60 s"), (61, "")):
        pod = evolve(READING, dress=evolve(READING.dress, max_grace=most * SECOND)).pod(raw)
        assert pod is not None
        found = findings(Facts([pod], house.parts.ledger.reservations(), ()), LATER, needs_evidence=False)
        said = [f"spec.terminationGracePeriodSeconds: {expected}"] if expected else []
        assert [one.message for one in found if one.kind is FindingKind.GRACE_TOO_LONG] == said


async def test_a_pod_that_waits_behind_our_gate_is_right(house: House) -> None:
    raw = raw_pod(raw_container(gpus=1), annotations={keys.CLAIM.name: json.dumps({"gpus": 1})})
    gated = {**raw, "spec": {**raw["spec"], "schedulingGates": [{"name": keys.QUEUE_GATE}]}}
    assert kinds(facts(gated)) == []


async def test_gpus_that_no_ledger_knows_are_found(house: House) -> None:
    raw = await placed(house, raw_pod(raw_container(gpus=2)))
    (held,) = house.parts.ledger.reservations()
    half = evolve(held, slots=held.slots[:1])
    found = findings(facts(raw, held=[half]), LATER, needs_evidence=False)
    assert [one.message for one in found] == [f"carries {held.slots[1].uuid}, which no GPUNode holds for it"]
    elsewhere = evolve(held, node="node-b")
    assert kinds(facts(raw, held=[elsewhere])) == [(FindingKind.UNKNOWN_RESERVATION, "pod ml/train-0")]
    assert kinds(facts(raw, unsettled={held.id})) == [], "it has come or gone meanwhile"


async def test_two_pods_with_one_gpu_are_found(house: House) -> None:
    raw = await placed(house, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    other = {**raw, "metadata": {**raw["metadata"], "name": "copy", "uid": "another"}}
    held = list(house.parts.ledger.reservations())
    given = facts(raw, other, held=held, evidence=proven())
    assert kinds(given) == [(FindingKind.GPU_TWICE, "pod ml/copy")]
    ended = {**other, "status": {"phase": "Failed"}}
    assert kinds(facts(raw, ended, held=held, evidence=proven())) == []


@pytest.mark.parametrize(
    ("evidence", "needs_evidence", "said"),
    [
        ({}, True, "the evidence of node node-a is absent"),
        ({}, False, ""),
        (proven(until=LATER), True, "the evidence of node node-a is stale"),
        (proven(until=LATER + SECOND), True, ""),
        (proven(is_banned=True), True, "the evidence of node node-a is banned"),
    ],
    ids=["absent", "not-needed", "stale", "fresh", "banned"],
)
async def test_pods_on_nodes_without_evidence_are_found(
    house: House, evidence: dict[str, Evidence], needs_evidence: bool, said: str
) -> None:
    raw = await placed(house, raw_pod(raw_container(gpus=1), labels={"gpuwarden.io/gpu.model": "h100"}))
    given = facts(raw, held=list(house.parts.ledger.reservations()), evidence=evidence)
    found = findings(given, LATER, needs_evidence=needs_evidence)
    assert [(one.kind, one.message) for one in found] == ([(FindingKind.NODE_WITHOUT_EVIDENCE, said)] if said else [])


async def test_a_pod_that_asks_for_a_hash_is_held_to_it_wherever_evidence_is_needed(house: House) -> None:
    raw = await placed(house, raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    found = findings(facts(raw, evidence=proven(OTHER_HASH)), LATER, needs_evidence=False)
    assert [one.message for one in found] == [f"node node-a has proven {OTHER_HASH}, and the pod asks for {HASH}"]


def reservation(**members: Any) -> Reservation:
    given = {
        "id": ReservationId("r1"),
        "namespace": NAMESPACE,
        "claim_digest": "d",
        "node": "node-a",
        "slots": (Slot(DeviceUuid("GPU-a0"), 0),),
        "since": NOW,
        "deadline": None,
        "phase": Phase.FINALIZED,
        "pod_name": "train-0",
        "uid": "gone",
    }
    return Reservation(**{**given, **members})


@pytest.mark.parametrize(
    ("held", "is_found"),
    [
        (reservation(), True),
        (reservation(uid=POD_UID), False),
        (reservation(phase=Phase.RELEASING), True),
        (reservation(phase=Phase.PENDING, uid=None, deadline=LATER), False),
        (reservation(phase=Phase.PENDING, uid=None, deadline=NOW), True),
        (reservation(since=LATER - SECOND), False),
    ],
    ids=["gone", "there", "releasing", "in-time", "past-its-deadline", "just-made"],
)
def test_reservations_without_pods_are_found(held: Reservation, is_found: bool) -> None:
    given = Facts(pods=[AuditedPod(NAMESPACE, "train-0", POD_UID, "node-a")], held=[held], opted_in=())
    assert kinds(given) == ([(FindingKind.RESERVATION_WITHOUT_POD, "reservation r1")] if is_found else [])


def test_an_orphan_is_called_one() -> None:
    orphan = reservation(orphan=Orphan(NOW, 30 * SECOND))
    (found,) = findings(Facts([], [orphan], ()), LATER, needs_evidence=False)
    assert found.message == "is orphaned and holds GPU-a0 of node node-a for pod ml/train-0, which is not there"


def test_maps_that_keep_nothing_and_objects_that_nobody_can_read_are_found() -> None:
    given = facts(unkept_maps=[("ml", "train")], unreadable=["gpunode node-x"])
    assert kinds(given) == [
        (FindingKind.MAP_WITHOUT_LABEL, "statefulset ml/train"),
        (FindingKind.UNREADABLE, "gpunode node-x"),
    ]


ODD: dict[str, Raw] = {
    "nothing": {},
    "no-mapping": {"metadata": 5, "spec": []},
    "odd-containers": raw_pod() | {"spec": {"containers": [7]}},
    "odd-status": raw_pod(raw_container(gpus=1)) | {"status": "up"},
    "odd-record": raw_pod(annotations={keys.CLAIM.name: "[" * 9000}),
}


@pytest.mark.parametrize("raw", ODD.values(), ids=ODD.keys())
def test_no_pod_ends_an_audit(raw: Raw) -> None:
    pod = read(raw)
    assert findings(Facts([pod] if pod else [], (), {NAMESPACE}), LATER, needs_evidence=True) == []


def test_how_it_is_told() -> None:
    found = [Finding(FindingKind.GPU_TWICE, "pod ml/a", "has GPU-1, and so has pod ml/b", "ml", "node-a")]
    assert as_table(found) == (
        "KIND      OBJECT    NODE    FOUND\nGpuTwice  pod ml/a  node-a  has GPU-1, and so has pod ml/b\n"
    )
    assert as_table([]) == "Nothing found.\n"
    assert json.loads(as_json(found)) == {
        "findings": [
            {
                "kind": "GpuTwice",
                "namespace": "ml",
                "object": "pod ml/a",
                "node": "node-a",
                "message": "has GPU-1, and so has pod ml/b",
            }
        ]
    }


# As a gauge of the reconciler.


async def test_the_gauge_counts_what_the_audit_finds_and_follows_the_cluster(house: House) -> None:
    parts = house.parts
    watch = AuditWatch(
        READING, parts.fleet, parts.ledger, lambda: LATER, keys.OPT_IN.name, "gpuwarden", needs_evidence=False
    )
    metrics = Metrics()
    metrics.watch_audit(watch.counts)

    def counted() -> dict[str, float]:
        found = {
            kind.value: metrics.registry.get_sample_value("gpuwarden_audit_findings", {"kind": kind})
            for kind in FindingKind
        }
        assert None not in found.values(), "every kind has a series"
        return {kind: number for kind, number in found.items() if number}

    def at(raw: Raw, version: int) -> Raw:
        return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(version)}}

    right = await placed(house, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    bare = raw_pod(raw_container(gpus=1), name="bare")
    namespace: Raw = {"metadata": {"name": NAMESPACE, "labels": {"gpuwarden.io/enabled": "true"}}}
    watch.pods.replaced({"ml/train-0": at(right, 1), "ml/bare": at(bare, 2)})
    assert counted() == {}
    watch.namespaces.replaced({f"/{NAMESPACE}": at(namespace, 3)})
    assert counted() == {"GpuWithoutReservation": 1}
    watch.pods.changed(at({**bare, "status": {"phase": "Failed"}}, 4))
    assert counted() == {}
    watch.pods.changed(at(bare, 5))
    watch.pods.deleted(at(bare, 6))
    assert counted() == {}
    strong = {**raw_pod(name="strong"), "spec": {**raw_pod()["spec"], "hostPID": True}}
    watch.pods.changed(at(strong, 6))
    assert counted() == {"PodNotIsolated": 1}
    exempt = {**namespace["metadata"], "labels": {**namespace["metadata"]["labels"], keys.ISOLATION_LABEL: "none"}}
    watch.namespaces.changed(at({"metadata": exempt}, 6))
    assert counted() == {}
    watch.pods.deleted(at(strong, 6))
    mapped = {
        "metadata": {"name": "train", "namespace": NAMESPACE},
        "spec": {"template": {"metadata": {"annotations": {"gpuwarden.io/gpu-map": "0=node-a:0"}}}},
    }
    watch.sets.replaced({"ml/train": at(mapped, 7)})
    assert counted() == {"MapWithoutLabel": 1}
    labels = {**namespace["metadata"]["labels"], keys.MAPS_LABEL: "true"}
    watch.namespaces.changed(at({"metadata": {**namespace["metadata"], "labels": labels}}, 8))
    assert counted() == {}
    watch.sets.deleted(at(mapped, 9))
    watch.pods.replaced({})
    assert counted() == {"ReservationWithoutPod": 1}
