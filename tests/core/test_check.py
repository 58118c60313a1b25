"""Forgeries: each is denied, and the denial names the field."""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import (
    HASH,
    OTHER_HASH,
    claim,
    created,
    device,
    expression,
    fleet,
    identity,
    node,
    on_node,
    pod,
    raw_container,
    raw_env,
    raw_pod,
    raw_sidecar,
    required_affinity,
    reservation,
    slot,
    stateful_set,
    term,
)
from webhook.core.check import (
    field_path,
    gpu_access_unchanged,
    gpu_fields,
    grace_within_limit,
    matches_claim_without_gpus,
    matches_queued_pod,
    matches_reservation,
    no_bypass_fields,
    no_gpu_fields,
    preset_node,
    still_proven,
    still_reserved,
)
from webhook.core.claim import Claim, ClaimRules, recorded_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import Allocation, DressRules, dressed, waiting
from webhook.core.injection import Injection
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.core.reserve import Reserve
from webhook.core.verdict import Deny

Raw = dict[str, Any]
Change = Callable[[Raw], object]

RULES = DressRules()
CUDA = DressRules(injection=Injection.CUDA)
LAX = EvidencePolicy()
ALL = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
FROM_ELSEWHERE = {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}

WISH = raw_pod(
    raw_container("main", gpus=1, env=raw_env(A="b")),
    raw_container("helper"),
    init=[raw_container("prepare"), raw_sidecar("proxy")],
    annotations={"team": "vision", "gpuwarden.io/required-hash": HASH},
    affinity=required_affinity(term(expression("zone", "In", "a")), term(expression("zone", "In", "b"))),
)
CLAIM = claim(WISH)
HELD = reservation(slot("GPU-1"), id="r-1", node="node-a", digest=CLAIM.digest)


def outfit(held: Reservation = HELD, asked: Claim = CLAIM) -> Allocation:
    return Allocation(asked, (held.node,), held.id, held.uuids)


def given_pod(rules: DressRules = RULES) -> Raw:
    """A copy of the dressed pod, which a test may change."""
    return copy.deepcopy(created(dressed(WISH, outfit(), rules)))


def judged(
    raw: Raw, held: Reservation = HELD, who: PodIdentity | None = None, rules: DressRules = RULES
) -> Deny | None:
    asked = recorded_claim(Pod.parse(raw))
    assert asked is not None
    return matches_reservation(raw, asked, held, who or identity(), rules)


def refused(verdict: Deny | None) -> tuple[Reason, str]:
    assert verdict is not None
    return verdict.reason, verdict.message


# A pod at its creation.


def test_dressed_pod_is_admitted() -> None:
    assert judged(given_pod()) is None


def test_changes_outside_of_our_fields_are_admitted() -> None:
    raw = given_pod()
    raw["metadata"]["labels"] = {"mesh": "on"}
    raw["metadata"]["annotations"]["mesh"] = "on"
    raw["spec"]["containers"][0]["env"].append({"name": "MESH", "value": "on"})
    raw["spec"]["containers"].append(raw_container("mesh"))
    raw["spec"]["tolerations"] = [{"operator": "Exists"}]
    assert judged(raw) is None


def main(raw: Raw) -> Raw:
    container: Raw = raw["spec"]["containers"][0]
    return container


def annotations(raw: Raw) -> Raw:
    found: Raw = raw["metadata"]["annotations"]
    return found


def terms(raw: Raw) -> list[Raw]:
    found: list[Raw] = raw["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    return found


TERMS = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
FORGERIES: dict[str, tuple[Change, str]] = {
    "another-gpu": (
        lambda raw: annotations(raw).update({"gpuwarden.io/gpu-uuid": "GPU-2"}),
        "metadata.annotations[gpuwarden.io/gpu-uuid]",
    ),
    "another-gpu-by-its-alias": (
        lambda raw: annotations(raw).update({"fudo.org/gpu.uuid": "GPU-2"}),
        "metadata.annotations[fudo.org/gpu.uuid]",
    ),
    "another-node": (
        lambda raw: annotations(raw).update({"gpuwarden.io/node": "node-b"}),
        "metadata.annotations[gpuwarden.io/node]",
    ),
    "no-node": (lambda raw: annotations(raw).pop("gpuwarden.io/node"), "metadata.annotations[gpuwarden.io/node]"),
    "the-same-record-written-otherwise": (
        lambda raw: annotations(raw).update(
            {"gpuwarden.io/claim": annotations(raw)["gpuwarden.io/claim"].replace(",", ", ")}
        ),
        "metadata.annotations[gpuwarden.io/claim]",
    ),
    "all-gpus": (lambda raw: main(raw)["env"].append(ALL), "spec.containers[0].env"),
    "all-gpus-instead": (
        lambda raw: main(raw)["env"].__setitem__(1, ALL),
        "spec.containers[0].env",
    ),
    "gpus-from-elsewhere": (
        lambda raw: main(raw)["env"].append(FROM_ELSEWHERE),
        "spec.containers[0].env",
    ),
    "a-variable-taken-away": (lambda raw: main(raw)["env"].pop(), "spec.containers[0].env"),
    "all-gpus-in-another-container": (
        lambda raw: raw["spec"]["containers"][1].update(env=[ALL]),
        "spec.containers[1].env",
    ),
    "all-gpus-in-an-init-container": (
        lambda raw: raw["spec"]["initContainers"][0].update(env=[ALL]),
        "spec.initContainers[0].env",
    ),
    "all-gpus-in-a-sidecar": (
        lambda raw: raw["spec"]["initContainers"][1].update(env=[ALL]),
        "spec.initContainers[1].env",
    ),
    "all-gpus-in-a-new-container": (
        lambda raw: raw["spec"]["containers"].append(raw_container("mesh", env=[ALL])),
        "spec.containers[2].env",
    ),
    "the-request-put-back": (
        lambda raw: main(raw).update(resources={"limits": {"nvidia.com/gpu": "1"}}),
        "spec.containers[0].resources",
    ),
    "a-request-in-a-new-container": (
        lambda raw: raw["spec"]["containers"].append(raw_container("mesh", gpus=4)),
        "spec.containers[2].resources",
    ),
    "no-affinity": (lambda raw: raw["spec"].pop("affinity"), "spec.affinity"),
    "a-term-that-widens": (
        lambda raw: terms(raw).append(term(expression("zone", "Exists"))),
        TERMS,
    ),
    "a-term-for-another-node": (
        lambda raw: terms(raw).append(on_node("node-b")),
        TERMS,
    ),
    "a-term-let-loose": (lambda raw: terms(raw)[1].pop("matchFields"), TERMS),
}


@pytest.mark.parametrize(("change", "field"), FORGERIES.values(), ids=FORGERIES)
def test_changed_field_is_denied_and_named(change: Change, field: str) -> None:
    raw = given_pod()
    change(raw)
    verdict = judged(raw)
    assert verdict is not None
    assert verdict.reason is Reason.FORGED
    assert any(cause.startswith(field) for cause in verdict.causes)
    assert field in verdict.message
    assert verdict.message.endswith(": does not match the reservation (r-1: GPU-1 on node-a)")


@pytest.mark.parametrize(
    ("spec", "is_refused"),
    [
        ({}, False),
        ({"terminationGracePeriodSeconds": 60}, False),
        ({"terminationGracePeriodSeconds": 61}, True),
        ({"terminationGracePeriodSeconds": 2**62}, True),
        ({"terminationGracePeriodSeconds": -1}, False),
        ({"containers": [{"livenessProbe": {"terminationGracePeriodSeconds": 61}}]}, True),
        ({"initContainers": [{"startupProbe": {"terminationGracePeriodSeconds": 61}}]}, True),
        ({"containers": [{"startupProbe": {}, "livenessProbe": None}]}, False),
    ],
)
def test_grace_period_over_the_limit_is_denied(spec: Raw, *, is_refused: bool) -> None:
    pod = Pod.parse({"spec": spec})
    refused = grace_within_limit(pod, DressRules(max_grace=timedelta(seconds=60)))
    assert (refused is not None) == is_refused
    assert refused is None or refused.reason is Reason.INVALID_POD
    assert grace_within_limit(pod, RULES) is None


@pytest.mark.parametrize(
    ("rules", "is_refused"),
    [
        (DressRules(injection=Injection.PLUGIN), True),
        (DressRules(injection=Injection.DRA, reserve=Reserve.BIND), True),
        (DressRules(injection=Injection.DRA), False),
        (DressRules(injection=Injection.NVIDIA, reserve=Reserve.BIND), False),
    ],
)
def test_grace_period_of_0_is_denied_where_gpus_are_given_away_at_once(rules: DressRules, *, is_refused: bool) -> None:
    refused = grace_within_limit(Pod.parse({"spec": {"terminationGracePeriodSeconds": 0}}), rules)
    assert (refused is not None) == is_refused
    assert grace_within_limit(Pod.parse({"spec": {"terminationGracePeriodSeconds": 1}}), rules) is None


def test_claim_that_differs_from_the_reservation_is_denied() -> None:
    raw = given_pod()
    annotations(raw)["gpuwarden.io/claim"] = '{"gpus":8}'
    assert refused(judged(raw)) == (
        Reason.FORGED,
        "metadata.annotations[gpuwarden.io/claim]: not the claim of reservation r-1",
    )


@pytest.mark.parametrize(
    ("held", "who"),
    [
        pytest.param({"uid": "another-uid"}, identity(), id="bound-to-another-uid"),
        pytest.param({}, identity(name="copy"), id="copied-under-another-name"),
        pytest.param({}, identity(namespace="other"), id="copied-into-another-namespace"),
        pytest.param({"pod_name": None, "uid": "another-uid"}, identity(name="infer-x"), id="copied-from-a-deployment"),
    ],
)
def test_copied_manifest_does_not_get_the_reservation_of_the_original(held: Raw, who: PodIdentity) -> None:
    other = reservation(slot("GPU-1"), id="r-1", digest=CLAIM.digest, **held)
    assert refused(judged(given_pod(), other, who)) == (
        Reason.RESERVATION_CONFLICT,
        "metadata.annotations[gpuwarden.io/reservation-id]: reservation r-1 belongs to another pod",
    )


def test_pod_with_a_regenerated_name_is_denied_with_a_hint() -> None:
    """After a name collision the API server sends a pod with another name and uid."""
    first = reservation(
        slot("GPU-1"), id="r-1", digest=CLAIM.digest, pod_name="infer-x7k2p", uid="uid-of-the-first-try"
    )
    raw = given_pod()
    raw["metadata"]["generateName"] = "infer-"
    verdict = judged(raw, first, identity(name="infer-9qz4m"))
    assert refused(verdict)[0] is Reason.RESERVATION_CONFLICT
    assert isinstance(verdict, Deny)
    assert verdict.hint.startswith("create the pod again if its generated name was taken")


def test_reservation_in_release_is_not_used() -> None:
    going = reservation(slot("GPU-1"), id="r-1", digest=CLAIM.digest, phase=Phase.RELEASING)
    assert refused(judged(given_pod(), going)) == (
        Reason.RESERVATION_EXPIRED,
        "reservation r-1 is being released: create the pod again",
    )


def test_denial_with_many_fields_has_bounded_length() -> None:
    raw = given_pod()
    raw["spec"]["containers"].extend(raw_container(f"c{n}", env=[ALL]) for n in range(40))
    verdict = judged(raw)
    assert verdict is not None
    assert len(verdict.causes) == 20
    assert verdict.message.count("spec.containers") == 5


def test_container_added_later_without_gpus_is_admitted() -> None:
    wish = raw_pod(annotations={"gpuwarden.io/gpu-count": "1"})
    asked = claim(wish)
    held = reservation(slot("GPU-1"), id="r-1", digest=asked.digest)
    raw = created(dressed(wish, outfit(held, asked), RULES))
    raw["spec"]["containers"].append(raw_container("mesh"))
    assert judged(raw, held) is None


def test_pod_without_claim_annotation_has_no_recorded_claim() -> None:
    assert recorded_claim(pod()) is None


@pytest.mark.parametrize(
    ("held", "said"),
    [
        pytest.param(None, "does not exist", id="gone"),
        pytest.param({"phase": Phase.RELEASING}, "does not belong to this pod", id="in release"),
        pytest.param({"digest": "of-another"}, "does not belong to this pod", id="another claim's"),
        pytest.param({"uid": "another"}, "does not belong to this pod", id="another uid's"),
        pytest.param({"pod_name": "another"}, "does not belong to this pod", id="another name's"),
        pytest.param({"namespace": "other"}, "does not belong to this pod", id="another namespace's"),
    ],
)
def test_pod_is_not_bound_if_its_reservation_is_gone_or_belongs_to_another(held: Raw | None, said: str) -> None:
    asked = {"id": "r-1", "digest": CLAIM.digest, **(held or {})}
    known = None if held is None else reservation(slot("GPU-1"), **asked)
    assert refused(still_reserved(CLAIM, known, Pod.parse(given_pod()))) == (
        Reason.NOT_RESERVED,
        f"metadata.annotations[gpuwarden.io/reservation-id]: reservation 'r-1' {said}; "
        "the containers would see GPUs that may belong to another pod",
    )


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.FINALIZED])
@pytest.mark.parametrize("uid", [None, identity().uid], ids=["not bound yet", "bound"])
def test_pod_is_bound_if_its_reservation_is_its_own(phase: Phase, uid: str | None) -> None:
    known = reservation(slot("GPU-1"), id="r-1", digest=CLAIM.digest, phase=phase, uid=uid)
    assert still_reserved(CLAIM, known, Pod.parse(given_pod())) is None


def test_added_request_is_denied_if_requests_are_not_removed() -> None:
    wish = raw_pod(raw_container("main"), annotations={"gpuwarden.io/gpu-count": "1"})
    asked = claim(wish)
    held = reservation(slot("GPU-1"), id="r-1", digest=asked.digest)
    raw = created(dressed(wish, outfit(held, asked), CUDA))
    main(raw)["resources"] = {"limits": {"nvidia.com/gpu": "4"}, "requests": {"nvidia.com/gpu": "4"}}
    verdict = matches_reservation(raw, asked, held, identity(), CUDA) or no_bypass_fields(Pod.parse(raw), CUDA)
    assert verdict is not None


def test_forged_alias_is_denied_if_aliases_are_not_written() -> None:
    rules = DressRules(writes_aliases=False)
    raw = given_pod(rules)
    annotations(raw)["fudo.org/gpu.uuid"] = "GPU-of-another"
    assert judged(raw, rules=rules) is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(None, None, id="left-to-the-scheduler"),
        pytest.param("", None, id="empty"),
        pytest.param("node-a", None, id="the-reserved-node"),
        pytest.param("node-z", "spec.nodeName: is node-z, but the reservation is on node-a or node-b", id="another"),
    ],
)
def test_preset_node_name_must_be_a_reserved_node(name: str | None, message: str | None) -> None:
    verdict = preset_node(pod(nodeName=name), ("node-b", "node-a"))
    assert (verdict and verdict.message) == message
    assert verdict is None or verdict.reason is Reason.FORGED


# A claim without GPUs.

PROVEN = fleet(
    node("node-a", device("GPU-1")),
    node("node-b"),
    node("node-c"),
    proven={"node-a": HASH, "node-b": HASH, "node-c": OTHER_HASH},
)
HASHED = {"gpuwarden.io/required-hash": HASH}
HASH_ONLY = raw_pod(annotations=HASHED)


def held_to(*names: str, **members: Any) -> Raw:
    return dressed({**HASH_ONLY, "spec": {**HASH_ONLY["spec"], **members}}, Allocation(claim(HASH_ONLY), names), RULES)


def proven(raw: Raw) -> Deny | None:
    parsed = Pod.parse(raw)
    asked = recorded_claim(parsed)
    assert asked is not None
    return matches_claim_without_gpus(raw, parsed, asked, PROVEN, LAX, ClaimRules())


def test_pod_pinned_to_proven_nodes_is_admitted() -> None:
    assert proven(held_to("node-a", "node-b")) is None


@pytest.mark.parametrize(
    ("raw", "reason", "message"),
    [
        pytest.param(
            held_to("node-a", "node-c"),
            Reason.NO_PROVEN_NODE,
            "a node attested as sha256:aa11: node node-c: a different hash",
            id="a-node-of-another-hash",
        ),
        pytest.param(
            held_to("node-a", "node-z"),
            Reason.NOT_RESERVED,
            "spec.affinity.nodeAffinity: allows nodes that are not proven",
            id="an-unknown-node",
        ),
        pytest.param(
            {**held_to("node-a"), "spec": HASH_ONLY["spec"]},
            Reason.NOT_RESERVED,
            "spec.affinity.nodeAffinity: allows nodes that are not proven",
            id="no-affinity",
        ),
        pytest.param(
            {
                **held_to("node-a"),
                "spec": {
                    **HASH_ONLY["spec"],
                    "affinity": required_affinity(on_node("node-a"), term(expression("a", "Exists"))),
                },
            },
            Reason.NOT_RESERVED,
            "spec.affinity.nodeAffinity: allows nodes that are not proven",
            id="a-term-without-a-node",
        ),
        pytest.param(
            held_to("node-a", nodeName="node-c"),
            Reason.FORGED,
            "spec.nodeName: is node-c, but the reservation is on node-a",
            id="node-name-of-another-node",
        ),
        pytest.param(
            {
                **held_to("node-c"),
                "metadata": {
                    "annotations": {
                        "gpuwarden.io/required-hash": HASH,
                        "gpuwarden.io/claim": '{"hashes":["sha256:bb22"]}',
                    }
                },
            },
            Reason.FORGED,
            "metadata.annotations[gpuwarden.io/claim]: not what the pod asks for",
            id="a-record-that-asks-for-less",
        ),
        pytest.param(
            {**held_to("node-a"), "metadata": {"annotations": {"gpuwarden.io/claim": "{}"}}},
            Reason.FORGED,
            "metadata.annotations[gpuwarden.io/claim]: not what the pod asks for",
            id="empty-record",
        ),
        pytest.param(
            {**held_to("node-a"), "metadata": {"annotations": {**HASHED, "gpuwarden.io/claim": "{}"}}},
            Reason.FORGED,
            "metadata.annotations[gpuwarden.io/claim]: not what the pod asks for",
            id="a-record-of-any-node",
        ),
        pytest.param(
            {
                **held_to("node-a"),
                "metadata": {
                    "annotations": {
                        **HASHED,
                        "gpuwarden.io/gpu-count": "1",
                        "gpuwarden.io/claim": f'{{"hashes":["{HASH}"]}}',
                    }
                },
            },
            Reason.FORGED,
            "metadata.annotations[gpuwarden.io/claim]: not what the pod asks for",
            id="a-record-without-the-gpu",
        ),
    ],
)
def test_pod_that_allows_an_unproven_node_is_denied(raw: Raw, reason: Reason, message: str) -> None:
    assert refused(proven(raw)) == (reason, message)


@pytest.mark.parametrize(
    ("name", "digest", "expected"),
    [
        pytest.param("node-a", HASH, None, id="holds"),
        pytest.param(
            "node-c",
            HASH,
            (Reason.NO_PROVEN_NODE, "a node attested as sha256:aa11: node node-c: a different hash"),
            id="changed",
        ),
        pytest.param("node-z", HASH, (Reason.NO_SUITABLE_NODE, "node node-z no longer exists"), id="gone"),
    ],
)
def test_evidence_is_checked_again_before_binding(name: str, digest: str, expected: tuple[Reason, str] | None) -> None:
    verdict = still_proven(claim(HASH_ONLY), name, PROVEN, LAX)
    assert (verdict and (verdict.reason, verdict.message)) == expected


# A pod without a claim.

EXPOSING_PODS: dict[str, tuple[Raw, str]] = {
    "nvidia-env": (raw_pod(raw_container(env=[ALL])), "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]"),
    "cuda-env": (
        raw_pod(raw_container(env=raw_env(CUDA_VISIBLE_DEVICES="0"))),
        "spec.containers[0].env[CUDA_VISIBLE_DEVICES]",
    ),
    "env-from-elsewhere": (
        raw_pod(raw_container(env=[FROM_ELSEWHERE])),
        "spec.containers[0].env[CUDA_VISIBLE_DEVICES]",
    ),
    "env-of-an-init-container": (
        raw_pod(init=[raw_container("i", env=[ALL])]),
        "spec.initContainers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "env-of-a-debug-container": (
        raw_pod(ephemeralContainers=[raw_container("d", env=[ALL])]),
        "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "the-second-of-two": (
        raw_pod(raw_container(env=[*raw_env(NVIDIA_VISIBLE_DEVICES="void"), ALL])),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "a-variable-in-a-variable": (
        raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="$(X)"))),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "cdi-annotation": (
        raw_pod(annotations={"cdi.k8s.io/gpu-assignment": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.k8s.io/gpu-assignment]",
    ),
    "mig-slice": (
        raw_pod(raw_container(resources={"limits": {"nvidia.com/mig-1g.5gb": "1"}})),
        "spec.containers[0].resources[nvidia.com/mig-1g.5gb]",
    ),
    "device-class-resource": (
        raw_pod(raw_container(resources={"limits": {"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"}})),
        "spec.containers[0].resources[deviceclass.resource.kubernetes.io/gpu.nvidia.com]",
    ),
    "resource-claim": (
        raw_pod(resourceClaims=[{"name": "gpu", "resourceClaimName": "theirs"}]),
        "spec.resourceClaims",
    ),
}


@pytest.mark.parametrize(
    ("env", "is_refused"),
    [
        ([ALL], True),
        (raw_env(CUDA_VISIBLE_DEVICES="GPU-2"), True),
        ([FROM_ELSEWHERE], True),
        (raw_env(NVIDIA_VISIBLE_DEVICES="GPU-1", CUDA_VISIBLE_DEVICES="GPU-1"), False),
        (raw_env(NVIDIA_VISIBLE_DEVICES="void"), False),
    ],
    ids=["all", "another-gpu", "from-elsewhere", "its-own", "void"],
)
def test_debug_container_of_a_new_pod_sees_only_the_pods_gpus(env: list[Raw], is_refused: bool) -> None:
    raw = given_pod()
    raw["spec"]["ephemeralContainers"] = [raw_container("d", env=env)]
    expected = None
    if is_refused:
        field = f"spec.ephemeralContainers[0].env[{env[0]['name']}]"
        expected = Reason.FORGED, f"{field}: does not match the reservation (r-1: GPU-1 on node-a)"
    verdict = judged(raw)
    assert (verdict and (verdict.reason, verdict.message)) == expected


@pytest.mark.parametrize(("raw", "field"), EXPOSING_PODS.values(), ids=EXPOSING_PODS)
def test_field_that_exposes_gpus_is_denied_without_a_claim(raw: Raw, field: str) -> None:
    verdict = no_gpu_fields(Pod.parse(raw), RULES)
    assert refused(verdict) == (
        Reason.GPU_WITHOUT_CLAIM,
        f"{field}: would expose a GPU to the pod, and the pod has no claim",
    )


def test_resource_request_is_a_field_that_exposes_gpus() -> None:
    assert list(gpu_fields(pod(raw_container(gpus=1)), RULES)) == ["spec.containers[0].resources[nvidia.com/gpu]"]


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="void"), id="void"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="none"), id="none"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="", CUDA_VISIBLE_DEVICES=""), id="empty"),
        pytest.param(raw_env(CUDA_VISIBLE_DEVICES="-1"), id="minus-one"),
        pytest.param([{"name": "NVIDIA_VISIBLE_DEVICES"}], id="no-value"),
    ],
)
def test_values_that_hide_all_gpus_are_admitted(env: list[Raw]) -> None:
    assert no_gpu_fields(pod(raw_container(env=env)), RULES) is None


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(raw_env(CUDA_VISIBLE_DEVICES="void"), id="void-has-no-effect-in-cuda"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="-1"), id="minus-one-has-no-effect-in-the-runtime"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="VOID"), id="case-sensitive"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES=" void"), id="white-space-not-trimmed"),
    ],
)
def test_values_that_do_not_hide_all_gpus_are_denied(env: list[Raw]) -> None:
    assert no_gpu_fields(pod(raw_container(env=env)), RULES) is not None


@pytest.mark.parametrize(
    "name",
    ["mig-slice", "device-class-resource", "resource-claim", "cdi-annotation"],
)
def test_other_ways_to_gpus_are_denied_beside_a_claim(name: str) -> None:
    raw, field = EXPOSING_PODS[name]
    assert refused(no_bypass_fields(Pod.parse(raw), RULES)) == (
        Reason.GPU_WITHOUT_CLAIM,
        f"{field}: would expose a GPU to the pod, and the pod's GPUs come from its claim only",
    )


def test_plain_pod_has_no_field_that_exposes_gpus() -> None:
    assert no_gpu_fields(pod(raw_container(env=raw_env(A="b"), resources={"limits": {"cpu": "1"}})), RULES) is None


# A queued pod.


def judged_waiting(raw: Raw, asked: Claim) -> Deny | None:
    return matches_queued_pod(raw, Pod.parse(raw), asked, RULES, ClaimRules())


@pytest.mark.parametrize("name", EXPOSING_PODS)
def test_queued_pod_without_gpus_may_not_expose_gpus(name: str) -> None:
    wish, field = EXPOSING_PODS[name]
    wish = copy.deepcopy(wish)
    wish["metadata"].setdefault("annotations", {})["gpuwarden.io/required-hash"] = HASH
    asked = claim(wish)
    assert refused(judged_waiting(waiting(wish, asked, RULES, "because"), asked)) == (
        Reason.GPU_WITHOUT_CLAIM,
        f"{field}: would expose a GPU to the pod, and the pod has no claim",
    )


@pytest.mark.parametrize("name", ["mig-slice", "device-class-resource", "resource-claim", "cdi-annotation"])
def test_other_ways_to_gpus_are_denied_for_a_queued_pod(name: str) -> None:
    wish, field = EXPOSING_PODS[name]
    wish = copy.deepcopy(wish)
    wish["metadata"].setdefault("annotations", {})["gpuwarden.io/gpu-count"] = "1"
    asked = claim(wish)
    assert refused(judged_waiting(waiting(wish, asked, RULES, "because"), asked)) == (
        Reason.GPU_WITHOUT_CLAIM,
        f"{field}: would expose a GPU to the pod, and the pod's GPUs come from its claim only",
    )


# A pod that exists.

OLD = created(dressed(WISH, outfit(), RULES))
OWN = ("GPU-1",)


def changed(change: Change, reserved: tuple[str, ...] = OWN) -> Deny | None:
    new = copy.deepcopy(OLD)
    change(new)
    return gpu_access_unchanged(Pod.parse(new), Pod.parse(OLD), reserved, RULES)


def debug(*env: Raw) -> Change:
    return lambda raw: raw["spec"].update(ephemeralContainers=[raw_container("debug", env=list(env))])


ALLOWED: dict[str, Change] = {
    "nothing": lambda raw: None,
    "their-own-annotation": lambda raw: annotations(raw).update(team="audio", new="x"),
    "a-label": lambda raw: raw["metadata"].update(labels={"gpuwarden.io/gpu.model": "a100"}),
    "the-wish-which-changes-nothing": lambda raw: annotations(raw).update({"gpuwarden.io/required-hash": OTHER_HASH}),
    "an-image": lambda raw: main(raw).update(image="registry.example/train:2"),
    "a-debug-container": debug(),
    "a-debug-container-without-gpus": debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}),
    "a-debug-container-with-the-pods-own-gpus": debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_update_that_does_not_change_gpus_is_admitted(change: Change) -> None:
    assert changed(change) is None


@pytest.mark.parametrize(
    "key",
    [
        "gpuwarden.io/gpu-uuid",
        "gpuwarden.io/reservation-id",
        "gpuwarden.io/node",
        "gpuwarden.io/claim",
        "fudo.org/gpu.uuid",
        "fudo.org/gpu.reservation-id",
        "fudo.org/gpu.node",
    ],
)
@pytest.mark.parametrize("how", ["changed", "removed"])
def test_update_of_our_annotations_is_denied(key: str, how: str) -> None:
    verdict = changed(
        lambda raw: annotations(raw).pop(key) if how == "removed" else annotations(raw).update({key: "x"})
    )
    assert refused(verdict) == (Reason.IMMUTABLE, f"metadata.annotations[{key}]: only gpuwarden may change it")


FROM_A_CONFIG_MAP = [{"configMapRef": {"name": "all"}}]
ILLEGAL: dict[str, tuple[Change, str]] = {
    "a-cdi-annotation": (
        lambda raw: annotations(raw).update({"cdi.k8s.io/x": "nvidia.com/gpu=all"}),
        "metadata.annotations[cdi.k8s.io/x]: only gpuwarden may change it",
    ),
    "a-debug-container-with-all-gpus": (
        debug(ALL),
        "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-debug-container-with-anothers-gpu": (
        debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-2"}),
        "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-debug-container-with-ours-and-then-all": (
        debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}, ALL),
        "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-debug-container-with-gpus-from-elsewhere": (
        debug(FROM_ELSEWHERE),
        "spec.ephemeralContainers[0].env[CUDA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-debug-container-with-whatever-a-config-map-says": (
        lambda raw: raw["spec"].update(ephemeralContainers=[raw_container("debug", envFrom=FROM_A_CONFIG_MAP)]),
        "spec.ephemeralContainers[0].envFrom: GPU variables cannot change after creation",
    ),
    "a-debug-container-of-a-containers-name": (
        lambda raw: raw["spec"].update(ephemeralContainers=[raw_container("main", env=[ALL])]),
        "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-containers-variable": (
        lambda raw: main(raw)["env"].__setitem__(1, ALL),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-containers-variable-taken-away": (
        lambda raw: main(raw)["env"].pop(),
        "spec.containers[0].env[CUDA_VISIBLE_DEVICES]: GPU variables cannot change after creation",
    ),
    "a-resource-claim": (
        lambda raw: raw["spec"].update(resourceClaims=[{"name": "x"}]),
        "spec.resourceClaims: would expose a GPU to the pod, and the pod was created without it",
    ),
}


@pytest.mark.parametrize(("change", "message"), ILLEGAL.values(), ids=ILLEGAL)
def test_update_that_exposes_gpus_is_denied(change: Change, message: str) -> None:
    verdict = changed(change)
    assert verdict is not None
    assert verdict.message == message


def test_debug_container_of_a_pod_without_gpus_may_not_expose_gpus() -> None:
    verdict = changed(debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}), reserved=())
    assert verdict is not None
    assert verdict.reason is Reason.IMMUTABLE


def test_existing_debug_container_does_not_block_another() -> None:
    old = copy.deepcopy(OLD)
    debug({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"})(old)
    new = copy.deepcopy(old)
    new["spec"]["ephemeralContainers"].append(raw_container("debug-2"))
    assert gpu_access_unchanged(Pod.parse(new), Pod.parse(old), (), RULES) is None


@pytest.mark.parametrize(
    ("pointer", "field"),
    [
        pytest.param("/metadata/annotations/gpuwarden.io~1node", "metadata.annotations[gpuwarden.io/node]", id="key"),
        pytest.param("/metadata/annotations/a~01b", "metadata.annotations.a~1b", id="tilde"),
        pytest.param("/spec/containers/0/env/12/value", "spec.containers[0].env[12].value", id="positions"),
        pytest.param("", "the pod", id="root"),
    ],
)
def test_json_pointer_becomes_a_field_path(pointer: str, field: str) -> None:
    assert field_path(pointer) == field


# Any change of a dressed pod: its containers see at most their own GPU, or the pod is denied.

strangers_env = st.lists(
    st.one_of(
        st.builds(
            lambda name, value: {"name": name, "value": value},
            st.sampled_from(["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "A"]),
            st.sampled_from(["all", "GPU-1", "GPU-2", "void", "", "-1"]),
        ),
        st.just(FROM_ELSEWHERE),
    ),
    max_size=3,
)


def shows(env: list[Raw]) -> set[str]:
    """The GPUs that a container sees by its own variables: the last one of a name counts."""
    last = {one["name"]: one.get("value", "anything") for one in env}
    return {last[name] for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in last}


@given(
    st.sampled_from([("containers", 0), ("containers", 1), ("initContainers", 0), ("initContainers", 1)]), strangers_env
)
def test_admitted_containers_see_only_the_pods_gpus(at: tuple[str, int], env: list[Raw]) -> None:
    raw = given_pod()
    group, position = at
    raw["spec"][group][position]["env"] = env
    if judged(raw) is None:
        assert shows(env) <= {"GPU-1", "void", "none", "", "-1"}


def test_pod_with_a_map_is_checked_against_its_reservation() -> None:
    wish = raw_pod(name="train-0", owners=[stateful_set()], annotations={"gpuwarden.io/gpu-map": "0=node-a:0"})
    asked = claim(wish)
    held = reservation(slot("GPU-1"), id="r-1", digest=asked.digest)
    raw = created(dressed(wish, outfit(held, asked), RULES))
    assert judged(raw, held) is None
