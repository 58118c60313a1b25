"""The findings of the audit, and that it reports nothing where all is well."""

import json
from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.admission.given_pods import ended_pod, given_pod
from tests.builders import HASH, NAMESPACE, NOW, OTHER_HASH, POD_UID, SECOND, Raw, raw_container, raw_env, raw_pod
from tests.recorded_events import RecordedEvents
from tests.web.harness import Harness
from webhook.admission.audit import AuditedPod, AuditRules, Facts, Finding, FindingKind, findings
from webhook.admission.audit_watch import AuditWatch
from webhook.admission.device_plugins import DevicePlugins
from webhook.commands.audit import as_json, as_table
from webhook.core import keys
from webhook.core.claim import ClaimRules
from webhook.core.device import DeviceUuid, Slot
from webhook.core.dress import DressRules
from webhook.core.evidence import Evidence
from webhook.core.injection import Injection
from webhook.core.reservation import GpuDelivery, Orphan, Phase, Reservation, ReservationId
from webhook.runtime.telemetry import Metrics

READING = AuditRules(ClaimRules(), DressRules(Injection.NVIDIA, "nvidia.com/gpu"))
LATER = NOW + timedelta(hours=1)


def read(raw: Raw) -> AuditedPod | None:
    return READING.pod(raw)


async def placed(harness: Harness, raw: Raw, node: str = "node-a") -> Raw:
    """A pod dressed by the webhooks, on its node."""
    final = await harness.create(raw)
    return {**final, "spec": {**final["spec"], "nodeName": node}, "status": {"phase": "Running"}}


def facts(*raws: Raw, **members: Any) -> Facts:
    pods = [pod for raw in raws if (pod := read(raw)) is not None]
    return Facts(**{"pods": pods, "held": (), "opted_in": {NAMESPACE}, **members})


def kinds(given: Facts, *, needs_evidence: bool = False) -> list[tuple[FindingKind, str]]:
    return [(one.kind, one.object) for one in findings(given, LATER, needs_evidence=needs_evidence)]


def proven(hash: str = HASH, **members: Any) -> dict[str, Evidence]:
    return {"node-a": Evidence("node-a", hash, "static", **members)}


async def test_audit_finds_nothing_in_a_dressed_pod(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    held = list(harness.parts.ledger.reservations())
    assert kinds(facts(raw, held=held, evidence=proven()), needs_evidence=True) == []


ASKING: dict[str, tuple[Raw, str]] = {
    "resource": (raw_pod(raw_container(gpus=2)), "asks for 2 GPUs, but has no reservation"),
    "label": (raw_pod(labels={"fudo.org/gpu.assign": "true"}), "asks for 1 GPU, but has no reservation"),
    "hash-alone": (
        raw_pod(annotations={"gpuwarden.io/required-hash": HASH}),
        f"asks for a node attested as {HASH}, but has no reservation",
    ),
    "variable": (
        raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES] would show it a GPU, but it has no claim",
    ),
    "cdi": (
        raw_pod(annotations={"cdi.k8s.io/gpu": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.k8s.io/gpu] would show it a GPU, but it has no claim",
    ),
    "unreadable": (
        raw_pod(annotations={"gpuwarden.io/gpu-count": "two"}),
        "has a request that cannot be read: gpuwarden.io/gpu-count: 'two' is not a whole number of GPUs",
    ),
}


@pytest.mark.parametrize(("raw", "said"), ASKING.values(), ids=ASKING.keys())
def test_audit_reports_pods_that_would_be_denied_today_in_opted_in_namespaces(raw: Raw, said: str) -> None:
    (found,) = findings(facts(raw), LATER, needs_evidence=False)
    assert (found.kind, found.object, found.message) == (FindingKind.GPU_WITHOUT_RESERVATION, "pod ml/train-0", said)
    assert kinds(facts(raw, opted_in=set())) == []
    assert kinds(facts({**raw, "status": {"phase": "Succeeded"}})) == []


@pytest.mark.parametrize(
    "raw",
    [raw_pod(), raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="void", CUDA_VERSION="12.4")))],
    ids=["plain", "blinded"],
)
def test_audit_finds_nothing_in_a_pod_without_gpus(raw: Raw) -> None:
    assert kinds(facts(raw)) == []


def native_pod(*, template: str = "gpuwarden-1-aa11", native: str = "true", **env: str) -> Raw:
    raw = raw_pod(
        raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="void", **env)),
        annotations={"gpuwarden.io/native": native, "gpuwarden.io/required-hash": "aa11"},
    )
    claim = {"name": "gpuwarden", "resourceClaimTemplateName": template}
    return {**raw, "spec": {**raw["spec"], "resourceClaims": [claim]}}


def test_audit_finds_nothing_in_a_native_pod() -> None:
    assert kinds(facts(native_pod())) == []


@pytest.mark.parametrize(
    "raw",
    [native_pod(template="theirs"), native_pod(native="false"), native_pod(CUDA_VISIBLE_DEVICES="0")],
    ids=["template-of-others", "not-annotated", "another-gpu"],
)
def test_audit_reports_gpus_that_a_pod_has_besides_a_native_claim(raw: Raw) -> None:
    assert kinds(facts(raw)) == [(FindingKind.GPU_WITHOUT_RESERVATION, "pod ml/train-0")]


def test_audit_reports_a_container_that_sees_all_gpus_through_its_image() -> None:
    raw = raw_pod(raw_container(env=raw_env(CUDA_VERSION="12.4")))
    assert kinds(facts(raw)) == [(FindingKind.CONTAINER_NOT_BLINDED, "pod ml/train-0")]


def test_audit_reports_a_pod_that_could_open_devices_in_isolated_namespaces() -> None:
    raw = raw_pod()
    raw = {**raw, "spec": {**raw["spec"], "hostPID": True}}
    (found,) = findings(facts(raw, isolated={NAMESPACE}), LATER, needs_evidence=False)
    assert (found.kind, found.object) == (FindingKind.POD_NOT_ISOLATED, "pod ml/train-0")
    assert found.message == "could reach GPUs that are not its own: spec.hostPID"
    assert kinds(facts(raw)) == []
    assert kinds(facts({**raw, "status": {"phase": "Succeeded"}}, isolated={NAMESPACE})) == []


async def test_audit_reports_a_gpu_pod_with_too_long_a_grace_period(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=1)))
    raw = {**raw, "spec": {**raw["spec"], "terminationGracePeriodSeconds": 61}}
    for most, expected in ((60, "61 s, probes included; a pod with GPUs may have at most 60 s"), (61, "")):
        pod = evolve(READING, dress=evolve(READING.dress, max_grace=most * SECOND)).pod(raw)
        assert pod is not None
        found = findings(Facts([pod], harness.parts.ledger.reservations(), ()), LATER, needs_evidence=False)
        said = [f"spec.terminationGracePeriodSeconds: {expected}"] if expected else []
        assert [one.message for one in found if one.kind is FindingKind.GRACE_TOO_LONG] == said


async def test_audit_finds_nothing_in_a_queued_pod(harness: Harness) -> None:
    raw = raw_pod(raw_container(gpus=1), annotations={keys.CLAIM.name: json.dumps({"gpus": 1})})
    gated = {**raw, "spec": {**raw["spec"], "schedulingGates": [{"name": keys.QUEUE_GATE}]}}
    assert kinds(facts(gated)) == []


async def test_audit_reports_a_pod_whose_gpus_the_kubelet_chose_without_a_reservation(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=1)))
    (held,) = harness.parts.ledger.reservations()
    raw["metadata"]["annotations"][keys.CLAIM.name] = '{"gpus":1,"asked":{"main":1},"injection":"plugin"}'
    del raw["metadata"]["annotations"][keys.GPU_UUID.name]
    assert kinds(facts(raw, held=[evolve(held, delivery=GpuDelivery.AWAITED)])) == []
    (found,) = findings(facts(raw), LATER, needs_evidence=False)
    assert found.message == "was given 1 GPU, which no GPUNode holds for it"


async def test_audit_reports_gpus_that_the_ledger_does_not_hold(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=2)))
    (held,) = harness.parts.ledger.reservations()
    half = evolve(held, slots=held.slots[:1])
    found = findings(facts(raw, held=[half]), LATER, needs_evidence=False)
    assert [one.message for one in found] == [f"was given {held.slots[1].uuid}, which no GPUNode holds for it"]
    elsewhere = evolve(held, node="node-b")
    assert kinds(facts(raw, held=[elsewhere])) == [(FindingKind.UNKNOWN_RESERVATION, "pod ml/train-0")]
    assert kinds(facts(raw, unsettled={held.id})) == [], "it has come or gone meanwhile"


async def test_audit_reports_two_pods_with_one_gpu(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    other = {**raw, "metadata": {**raw["metadata"], "name": "copy", "uid": "another"}}
    held = list(harness.parts.ledger.reservations())
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
async def test_audit_reports_pods_on_nodes_without_evidence(
    harness: Harness, evidence: dict[str, Evidence], needs_evidence: bool, said: str
) -> None:
    raw = await placed(harness, raw_pod(raw_container(gpus=1), labels={"gpuwarden.io/gpu.model": "h100"}))
    given = facts(raw, held=list(harness.parts.ledger.reservations()), evidence=evidence)
    found = findings(given, LATER, needs_evidence=needs_evidence)
    assert [(one.kind, one.message) for one in found] == ([(FindingKind.NODE_WITHOUT_EVIDENCE, said)] if said else [])


async def test_audit_checks_a_pods_hash_even_if_other_pods_need_no_evidence(harness: Harness) -> None:
    raw = await placed(harness, raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    found = findings(facts(raw, evidence=proven(OTHER_HASH)), LATER, needs_evidence=False)
    assert [one.message for one in found] == [f"node node-a has proven {OTHER_HASH}, but the pod requires {HASH}"]


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
def test_audit_reports_reservations_without_pods(held: Reservation, is_found: bool) -> None:
    given = Facts(pods=[AuditedPod(NAMESPACE, "train-0", POD_UID, "node-a")], held=[held], opted_in=())
    assert kinds(given) == ([(FindingKind.RESERVATION_WITHOUT_POD, "reservation r1")] if is_found else [])


def test_audit_calls_an_orphaned_reservation_orphaned() -> None:
    orphan = reservation(orphan=Orphan(NOW, 30 * SECOND))
    (found,) = findings(Facts([], [orphan], ()), LATER, needs_evidence=False)
    assert found.message == "is orphaned and holds GPU-a0 of node node-a for pod ml/train-0, which does not exist"


GIVEN: dict[str, tuple[Raw, FindingKind | None, str]] = {
    "own": (given_pod("GPU-a0", name="train-0"), None, ""),
    "other": (
        given_pod("GPU-a1", name="train-0"),
        FindingKind.GPU_MISMATCHED,
        "was given GPU-a1 by the kubelet; reserved for it: GPU-a0",
    ),
    "reserved": (
        given_pod("GPU-a0"),
        FindingKind.GPU_COLLISION,
        "was given GPU-a0 by the kubelet, reserved for pod ml/train-0",
    ),
    "free": (
        given_pod("GPU-a1"),
        FindingKind.GPU_UNRESERVED,
        "was given GPU-a1 by the kubelet, and has not reserved it",
    ),
    "unlisted": (given_pod("GPU-x"), None, ""),
    "ended": (ended_pod("GPU-a1"), None, ""),
}


@pytest.mark.parametrize(("raw", "kind", "said"), GIVEN.values(), ids=GIVEN.keys())
def test_audit_reports_gpus_that_the_kubelet_gave_to_pods_without_a_reservation_of_them(
    raw: Raw, kind: FindingKind | None, said: str
) -> None:
    held = reservation(uid="uid-train-0")
    given = facts(given_pod(name="train-0"), raw, held=[held], is_listed=lambda node, uuid: uuid != "GPU-x")
    found = findings(given, LATER, needs_evidence=False)
    found = [one for one in found if one.kind is not FindingKind.RESERVATION_WITHOUT_POD]
    assert [(one.kind, one.message, one.node) for one in found] == ([(kind, said, "node-a")] if kind else [])


def test_audit_reports_maps_without_namespace_label_and_unreadable_objects() -> None:
    given = facts(maps_without_label=[("ml", "train")], unreadable=["gpunode node-x"])
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
def test_audit_survives_every_malformed_pod(raw: Raw) -> None:
    pod = read(raw)
    assert findings(Facts([pod] if pod else [], (), {NAMESPACE}), LATER, needs_evidence=True) == []


def test_audit_prints_a_table_and_json() -> None:
    found = [Finding(FindingKind.GPU_TWICE, "pod ml/a", "has GPU-1, which pod ml/b has too", "ml", "node-a")]
    assert as_table(found) == (
        "KIND      OBJECT    NODE    FOUND\nGpuTwice  pod ml/a  node-a  has GPU-1, which pod ml/b has too\n"
    )
    assert as_table([]) == "Nothing found.\n"
    assert json.loads(as_json(found)) == {
        "findings": [
            {
                "kind": "GpuTwice",
                "namespace": "ml",
                "object": "pod ml/a",
                "node": "node-a",
                "message": "has GPU-1, which pod ml/b has too",
            }
        ]
    }


# The reconciler's gauge.


async def test_gauge_follows_the_findings_of_the_audit(harness: Harness) -> None:
    parts = harness.parts
    plugins = DevicePlugins(parts.fleet, RecordedEvents(), "nvidia.com/gpu")
    watch = AuditWatch(
        READING,
        parts.fleet,
        parts.ledger,
        lambda: LATER,
        keys.OPT_IN.name,
        "gpuwarden",
        needs_evidence=False,
        plugins=plugins,
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

    right = await placed(harness, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
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
    node = {"metadata": {"name": "node-a"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    plugins.changed(node)
    assert counted() == {"DevicePluginFound": 1}
    plugins.deleted(node)
    watch.sets.deleted(at(mapped, 9))
    watch.pods.replaced({})
    assert counted() == {"ReservationWithoutPod": 1}
