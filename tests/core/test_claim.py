"""The claim of a pod, under all keys and aliases; and all its mistakes in one error."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import HASH, OTHER_HASH, claim, pod, raw_container, raw_pod, raw_sidecar, stateful_set
from webhook.core.claim import Claim, ClaimRules, claim_of, ordinal_of, recorded_claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_map import MapEntry
from webhook.core.pod import Pod

Raw = dict[str, Any]
RULES = ClaimRules()


def asked_by(*containers: Raw, **members: Any) -> ClaimRecord:
    return claim(raw_pod(*containers, **members)).record


def mistakes(*containers: Raw, **members: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidPodError) as caught:
        claim_of(pod(*containers, **members), RULES)
    return caught.value.mistakes


# The number of GPUs.


@pytest.mark.parametrize(
    ("raw", "record"),
    [
        pytest.param(raw_pod(raw_container("a", gpus=2)), ClaimRecord(gpus=2, asked={"a": 2}), id="resource"),
        pytest.param(
            raw_pod(raw_container("a", gpus=2), init=[raw_container("i", gpus=1), raw_sidecar("s", gpus=1)]),
            ClaimRecord(gpus=3, asked={"a": 2, "i": 1, "s": 1}),
            id="resources-by-kubernetes-rule",
        ),
        pytest.param(
            raw_pod(annotations={"gpuwarden.io/gpu-count": "3"}),
            ClaimRecord(gpus=3, containers=("main",)),
            id="count-annotation",
        ),
        pytest.param(
            raw_pod(labels={"gpuwarden.io/gpu-count": "3"}), ClaimRecord(gpus=3, containers=("main",)), id="count-label"
        ),
        pytest.param(
            raw_pod(raw_container("a", gpus=2), annotations={"gpuwarden.io/gpu-count": "3"}),
            ClaimRecord(gpus=2, asked={"a": 2}),
            id="the-resource-is-what-counts",
        ),
        pytest.param(
            raw_pod(labels={"gpuwarden.io/gpu.model": "h100"}),
            ClaimRecord(gpus=1, requirements=("model=h100",), containers=("main",)),
            id="a-requirement-means-one",
        ),
        pytest.param(
            raw_pod(labels={"fudo.org/gpu.assign": ""}),
            ClaimRecord(gpus=1, containers=("main",)),
            id="assign-means-one",
        ),
        pytest.param(
            raw_pod(annotations={"gpuwarden.io/required-hash": HASH}),
            ClaimRecord(hashes=(HASH,)),
            id="a-hash-means-none",
        ),
        pytest.param(
            raw_pod(labels={"apps.kubernetes.io/pod-index": "1"}, annotations={"gpu-scheduling-map": "1=node-a:0, 2"}),
            ClaimRecord(gpus=2, node="node-a", devices=("0", "2"), containers=("main",)),
            id="a-map-means-its-list",
        ),
        pytest.param(
            raw_pod(raw_container("a", gpus=1), labels={"gpuwarden.io/shared": "true"}),
            ClaimRecord(gpus=1, shared=True, asked={"a": 1}),
            id="to-share",
        ),
    ],
)
@pytest.mark.defect("assigner-12")
def test_claim_is_parsed_from_each_key(raw: Raw, record: ClaimRecord) -> None:
    assert claim(raw).record == record


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(raw_pod(), id="plain"),
        pytest.param(raw_pod(labels={"app": "web"}, annotations={"team": "x"}), id="labels-of-others"),
        pytest.param(raw_pod(raw_container(gpus=0)), id="a-request-of-nothing"),
        pytest.param(raw_pod(raw_container(resources={"limits": {"cpu": "1"}})), id="a-cpu-request"),
        pytest.param(raw_pod(labels={"fudo.org/gpu.assign": "false"}), id="assign-false"),
        pytest.param(raw_pod(labels={"fudo.org/gpu.a": "false"}), id="requirement-false"),
        pytest.param(raw_pod(labels={"fudo.org/gpus": "x", "my.fudo.org/gpu.a": "x"}), id="lookalikes"),
        pytest.param(raw_pod(annotations={"gpuwarden.io/shared": "true"}), id="sharing-nothing"),
        pytest.param(raw_pod(annotations={"gpuwarden.io/gpu-count": "0"}), id="count-of-nothing"),
        pytest.param(raw_pod(annotations={"fudo.org/gpu.assign": "true"}), id="assign-as-annotation"),
        pytest.param({}, id="empty"),
        pytest.param({"metadata": None, "spec": None}, id="null"),
    ],
)
@pytest.mark.defect("assigner-11")
def test_pod_without_requests_or_keys_has_no_claim(raw: Raw) -> None:
    assert claim_of(Pod.parse(raw), RULES) is None


def test_claim_is_parsed_from_a_configured_resource() -> None:
    rules = ClaimRules(resource="example.com/gpu")
    raw = raw_pod(raw_container("a", resources={"limits": {"example.com/gpu": "2", "nvidia.com/gpu": "1"}}))
    assert claim(raw, rules).record == ClaimRecord(gpus=2, asked={"a": 2})


def test_count_annotation_is_ignored_with_a_warning_if_containers_request_gpus() -> None:
    asked = claim(raw_pod(raw_container(gpus=2), annotations={"gpuwarden.io/gpu-count": "3"}))
    assert asked.warnings == ("gpuwarden.io/gpu-count=3 is ignored: the containers request 2",)


# Requirements.


@pytest.mark.parametrize(
    ("labels", "requirements"),
    [
        pytest.param({"gpuwarden.io/gpu.model": "h100"}, ("model=h100",), id="ours-by-key-and-value"),
        pytest.param({"gpuwarden.io/gpu.model": "false"}, ("model=false",), id="false-is-a-value-of-ours"),
        pytest.param({"gpuwarden.io/gpu.big": ""}, ("big=",), id="ours-empty"),
        pytest.param({"fudo.org/gpu.memory-80g": "true"}, ("fudo.org/gpu.memory-80g",), id="assigner-by-its-key"),
        pytest.param({"fudo.org/gpu.memory-80g": ""}, ("fudo.org/gpu.memory-80g",), id="assigner-empty"),
        pytest.param({"fudo.org/gpu": "x"}, ("fudo.org/gpu",), id="assigner-bare"),
        pytest.param(
            {"fudo.org/gpu.a": "true", "fudo.org/gpu.b": "False", "fudo.org/gpu.assign": "x"},
            ("fudo.org/gpu.a",),
            id="false-is-not-asked-for",
        ),
        pytest.param(
            {"fudo.org/gpu.z": "", "gpuwarden.io/gpu.a": "1"}, ("a=1", "fudo.org/gpu.z"), id="in-a-fixed-order"
        ),
    ],
)
@pytest.mark.defect("assigner-12")
def test_requirements_are_parsed_from_labels(labels: dict[str, str], requirements: tuple[str, ...]) -> None:
    assert asked_by(labels=labels).requirements == requirements


# Hashes.


@pytest.mark.parametrize(
    ("annotations", "hashes"),
    [
        pytest.param({"gpuwarden.io/required-hash": HASH}, (HASH,), id="canonical"),
        pytest.param({"attestation-hash.my-company.com/required-hash": HASH}, (HASH,), id="alias"),
        pytest.param(
            {"gpuwarden.io/required-hash": HASH, "attestation-hash.my-company.com/required-hash": HASH},
            (HASH,),
            id="both-alike",
        ),
        pytest.param({"gpuwarden.io/required-hash": f"{OTHER_HASH},{HASH}"}, (HASH, OTHER_HASH), id="any-of"),
        pytest.param({"gpuwarden.io/required-hash": f"{HASH},{HASH}"}, (HASH,), id="twice-the-same"),
        pytest.param({"gpuwarden.io/required-hash": "SHA256:AA11"}, ("SHA256:AA11",), id="case-preserved"),
    ],
)
def test_hashes_are_parsed_without_normalisation(annotations: dict[str, str], hashes: tuple[str, ...]) -> None:
    assert asked_by(annotations=annotations).hashes == hashes


def test_alias_of_the_hash_annotation_is_configurable() -> None:
    rules = ClaimRules(hash_aliases=("example.com/hash",))
    assert claim(raw_pod(annotations={"example.com/hash": HASH}), rules).hashes == {HASH}
    former = raw_pod(annotations={"attestation-hash.my-company.com/required-hash": HASH})
    assert claim_of(Pod.parse(former), rules) is None


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        pytest.param(
            "", "annotation gpuwarden.io/required-hash has an empty hash: add a value or remove it", id="empty"
        ),
        pytest.param(
            "a,,b",
            "annotation gpuwarden.io/required-hash has an empty hash: add a value or remove it",
            id="empty-part",
        ),
        pytest.param("a, b", "annotation gpuwarden.io/required-hash: ' b' contains white space", id="space"),
        pytest.param("a\n", r"annotation gpuwarden.io/required-hash: 'a\n' contains white space", id="newline"),
        pytest.param(
            "a\u00a0", r"annotation gpuwarden.io/required-hash: 'a\xa0' contains white space", id="no-break-space"
        ),
        pytest.param(
            ",".join(str(n) for n in range(65)),
            "annotation gpuwarden.io/required-hash has 65 hashes; the maximum is 64",
            id="too-many",
        ),
    ],
)
def test_invalid_hash_is_a_mistake(text: str, mistake: str) -> None:
    assert mistakes(annotations={"gpuwarden.io/required-hash": text}) == (mistake,)


# Placement maps.


@pytest.mark.parametrize(
    ("members", "ordinal"),
    [
        pytest.param({"labels": {"apps.kubernetes.io/pod-index": "7"}, "name": "web-3"}, 7, id="label-first"),
        pytest.param({"name": "web-3", "owners": [stateful_set()]}, 3, id="name-of-a-stateful-sets-pod"),
        pytest.param({"name": "web-007", "owners": [stateful_set()]}, 7, id="leading-zeros"),
        pytest.param({"name": "app-7c9d-12345"}, None, id="name-without-a-stateful-set"),
        pytest.param(
            {"name": "app-1", "owners": [{"kind": "ReplicaSet", "name": "app", "uid": "x"}]},
            None,
            id="of-a-replica-set",
        ),
        pytest.param({"name": None, "generate_name": "web-", "owners": [stateful_set()]}, None, id="no-name-yet"),
        pytest.param({"name": "web", "owners": [stateful_set()]}, None, id="no-number"),
        pytest.param({"name": "web-\u0663", "owners": [stateful_set()]}, None, id="arabic-digit"),
    ],
)
def test_ordinal_is_parsed_only_for_statefulset_pods(members: Raw, ordinal: int | None) -> None:
    assert ordinal_of(pod(**members)) == ordinal


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"labels": {"apps.kubernetes.io/pod-index": "1" * 5000}}, id="label"),
        pytest.param({"name": f"web-{'1' * 5000}", "owners": [stateful_set()]}, id="name"),
    ],
)
def test_huge_ordinal_is_a_mistake(members: Raw) -> None:
    assert mistakes(annotations={"gpuwarden.io/gpu-map": "0=node-a:0"}, **members)


def mapped(text: str, ordinal: str = "0", *containers: Raw, **annotations: str) -> Raw:
    return raw_pod(
        *containers,
        labels={"apps.kubernetes.io/pod-index": ordinal},
        annotations={"gpuwarden.io/gpu-map": text, **annotations},
    )


def test_map_gives_the_entry_of_the_ordinal() -> None:
    assert claim(mapped("0=node-a:0\n1=rack-1:GPU-1,GPU-2", "1")).map_entry == MapEntry("rack-1", ("GPU-1", "GPU-2"))


@pytest.mark.defect("binder-2")
def test_ordinal_without_a_map_line_makes_an_unmapped_claim() -> None:
    found = claim(mapped("1=node-a:0", "7"))
    assert (found.map_entry, found.record.unmapped, found.count, found.is_mapped) == (None, 7, 1, True)
    assert found.sentence == "the map entry of ordinal 7"
    assert Claim(ClaimRecord.parse(found.record.text())).digest == found.digest


def test_claim_without_a_map_has_no_map_entry() -> None:
    assert claim(raw_pod(raw_container(gpus=1))).map_entry is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            raw_pod(annotations={"gpu-scheduling-map": "0=node-a:0"}),
            ("gpuwarden.io/gpu-map: the pod has no ordinal: no StatefulSet owns it",),
            id="no-ordinal",
        ),
        pytest.param(
            mapped("0=node-a:0\nx\n0=node-b:1\n"),
            (
                "gpuwarden.io/gpu-map: line 2: syntax: no '=' after the ordinal",
                "gpuwarden.io/gpu-map: line 3: duplicate-ordinal: ordinal 0 is on an earlier line too",
            ),
            id="every-bad-line",
        ),
        pytest.param(
            mapped("0=node-a:0,1", "0", raw_container(gpus=3)),
            ("the map lists 2 GPUs, the pod asks for 3",),
            id="another-count-by-resource",
        ),
        pytest.param(
            mapped("0=node-a:0,1", **{"gpuwarden.io/gpu-count": "1"}),
            ("the map lists 2 GPUs, the pod asks for 1",),
            id="another-count-by-annotation",
        ),
        pytest.param(
            mapped("0=node-a:0", **{"gpu-scheduling-map": "0=node-b:0"}),
            ("annotations gpuwarden.io/gpu-map and gpu-scheduling-map have different values",),
            id="two-maps",
        ),
    ],
)
def test_invalid_map_is_a_mistake(raw: Raw, expected: tuple[str, ...]) -> None:
    with pytest.raises(InvalidPodError) as caught:
        claim_of(Pod.parse(raw), RULES)
    assert caught.value.mistakes == expected


# Mistakes.


def test_challenge_before_the_binding_is_a_mistake_in_a_claim() -> None:
    raw = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/challenge": "bind"})
    with pytest.raises(InvalidPodError) as caught:
        claim_of(Pod.parse(raw), RULES)
    assert caught.value.mistakes == ("gpuwarden.io/challenge: only native pods wait for the answer to a challenge",)


def test_all_mistakes_are_in_one_error() -> None:
    assert mistakes(
        raw_container("a", gpus="1.5"),
        init=[raw_container("i", gpus="-1")],
        annotations={
            "gpuwarden.io/required-hash": "a b",
            "gpuwarden.io/gpu-count": "many",
            "gpuwarden.io/shared": "yes",
            "gpuwarden.io/gpu-map": "x",
        },
    ) == (
        "spec.initContainers[0].resources: nvidia.com/gpu: '-1' is not a whole number of GPUs",
        "spec.containers[0].resources: nvidia.com/gpu: '1.5' is not a whole number of GPUs",
        "annotation gpuwarden.io/required-hash: 'a b' contains white space",
        "gpuwarden.io/gpu-map: line 1: syntax: no '=' after the ordinal",
        "gpuwarden.io/gpu-count: 'many' is not a whole number of GPUs",
        "gpuwarden.io/shared is 'yes'; allowed are true and false",
    )


@pytest.mark.parametrize(
    ("raw", "mistake"),
    [
        pytest.param(
            raw_pod(annotations={"gpuwarden.io/gpu-count": ""}), "gpuwarden.io/gpu-count is empty", id="no-number"
        ),
        pytest.param(
            raw_pod(annotations={"gpuwarden.io/gpu-count": "1025"}),
            "the pod asks for 1025 GPUs; the maximum is 1024",
            id="number-too-large",
        ),
        pytest.param(
            raw_pod(raw_container("a", gpus=1000), raw_container("b", gpus=1000)),
            "the pod asks for 2000 GPUs; the maximum is 1024",
            id="too-many-together",
        ),
        pytest.param(
            raw_pod(*(raw_container(f"c{n}") for n in range(513)), labels={"gpuwarden.io/gpu.model": "x"}),
            "the pod has 513 containers; the maximum is 512",
            id="too-many-containers",
        ),
        pytest.param(
            raw_pod(raw_container("", gpus=1)),
            "a container that requests GPUs has no name",
            id="a-container-without-a-name",
        ),
    ],
)
def test_claim_that_no_node_can_serve_is_a_mistake(raw: Raw, mistake: str) -> None:
    with pytest.raises(InvalidPodError) as caught:
        claim_of(Pod.parse(raw), RULES)
    assert caught.value.mistakes == (mistake,)


def test_limits_do_not_apply_to_pods_without_a_claim() -> None:
    assert claim_of(pod(*(raw_container(f"c{n}") for n in range(10_000))), RULES) is None


def test_unknown_key_in_our_domain_gives_a_warning() -> None:
    raw = raw_pod(
        raw_container(gpus=1),
        labels={"gpuwarden.io/gpus.model": "h100"},
        annotations={"gpuwarden.io/require-hash": "x", "gpuwarden.io/required-hash": HASH},
    )
    assert claim(raw).warnings == (
        "gpuwarden does not know the key gpuwarden.io/require-hash: is it misspelt?",
        "gpuwarden does not know the key gpuwarden.io/gpus.model: is it misspelt?",
    )


# The record.


def test_claim_record_round_trips() -> None:
    record = ClaimRecord(3, (HASH,), ("model=h100",), shared=True, node="n", devices=("0",), asked={"b": 1, "a": 2})
    assert record.text() == (
        '{"asked":{"a":2,"b":1},"devices":["0"],"gpus":3,"hashes":["sha256:aa11"],"node":"n",'
        '"requirements":["model=h100"],"shared":true}'
    )
    assert ClaimRecord.parse(record.text()) == record


def test_digest_does_not_depend_on_the_order_of_containers() -> None:
    one, other = ClaimRecord(gpus=3, asked={"a": 1, "b": 2}), ClaimRecord(gpus=3, asked={"b": 2, "a": 1})
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ClaimRecord(gpus=2), id="count"),
        pytest.param(ClaimRecord(gpus=1, hashes=(HASH,)), id="hash"),
        pytest.param(ClaimRecord(gpus=1, requirements=("a=b",)), id="requirement"),
        pytest.param(ClaimRecord(gpus=1, shared=True), id="sharing"),
        pytest.param(ClaimRecord(gpus=1, node="n"), id="node"),
        pytest.param(ClaimRecord(gpus=1, devices=("0",)), id="devices"),
        pytest.param(ClaimRecord(gpus=1, asked={"a": 1}), id="containers"),
    ],
)
def test_different_claims_have_different_digests(other: ClaimRecord) -> None:
    assert other.digest() != ClaimRecord(gpus=1).digest()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="a-list"),
        pytest.param('{"gpus":"2"}', id="a-count-as-text"),
        pytest.param('{"gpus":null}', id="a-null-count"),
        pytest.param('{"asked":{"a":1.5}}', id="half-a-gpu"),
        pytest.param("[" * 100_000, id="very-deep"),
        pytest.param('{"gpus":' + "9" * 5000 + "}", id="very-long-number"),
    ],
)
def test_invalid_record_is_a_mistake(text: str) -> None:
    with pytest.raises(InvalidPodError, match=r"annotation gpuwarden\.io/claim was not written by gpuwarden"):
        recorded_claim(pod(annotations={"gpuwarden.io/claim": text}))


def test_recorded_claim_equals_the_parsed_claim() -> None:
    asked = claim(raw_pod(raw_container("a", gpus=2), annotations={"gpuwarden.io/required-hash": HASH}))
    again = recorded_claim(pod(annotations={"gpuwarden.io/claim": asked.record.text()}))
    assert again == asked
    assert again.digest == asked.digest


def test_removed_request_counts_if_no_container_requests_gpus() -> None:
    bare = pod(raw_container("a"), raw_container("b"))
    again = claim_of(bare, RULES, {"a": 2, "gone": 8})
    assert again is not None
    assert again.record == ClaimRecord(gpus=2, asked={"a": 2})


def test_current_request_overrides_a_removed_one() -> None:
    again = claim_of(pod(raw_container("a", gpus=1)), RULES, {"a": 8})
    assert again is not None
    assert again.record == ClaimRecord(gpus=1, asked={"a": 1})


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        pytest.param(ClaimRecord(gpus=1), "1 GPU", id="one"),
        pytest.param(
            ClaimRecord(gpus=2, requirements=("model=h100", "nvlink=yes"), hashes=(HASH, OTHER_HASH), shared=True),
            "2 GPUs with model=h100 and nvlink=yes to share on a node attested as sha256:aa11 or sha256:bb22",
            id="everything",
        ),
        pytest.param(ClaimRecord(hashes=(HASH,)), "a node attested as sha256:aa11", id="a-node"),
        pytest.param(ClaimRecord(gpus=2, node="n", devices=("0", "GPU-1")), "GPU 0,GPU-1 of node n", id="a-map-entry"),
    ],
)
def test_claim_sentence(record: ClaimRecord, sentence: str) -> None:
    assert Claim(record).sentence == sentence


keyed = st.dictionaries(
    st.sampled_from(
        [
            "gpuwarden.io/required-hash",
            "gpuwarden.io/gpu-count",
            "gpuwarden.io/shared",
            "gpuwarden.io/gpu-map",
            "gpu-scheduling-map",
            "gpuwarden.io/gpu.model",
            "fudo.org/gpu.assign",
            "apps.kubernetes.io/pod-index",
        ]
    ),
    st.one_of(st.none(), st.text(max_size=12), st.sampled_from(["true", "1", "0=a:1", "1=a:0,1", "9999999"])),
)
quantities = st.one_of(st.none(), st.integers(-5, 2000), st.floats(), st.text("0123456789.eEkKimM+-", max_size=6))


@given(keyed, keyed, st.lists(quantities, max_size=3))
@pytest.mark.defect("X-5")
def test_any_pod_gives_a_claim_or_none_or_mistakes(
    labels: Raw, annotations: Raw, amounts: list[float | str | None]
) -> None:
    containers = [{"name": f"c{n}", "resources": {"limits": {"nvidia.com/gpu": a}}} for n, a in enumerate(amounts)]
    raw = {
        "metadata": {"name": "x-1", "labels": labels, "annotations": annotations},
        "spec": {"containers": containers},
    }
    asked = None
    with suppress(InvalidPodError):
        asked = claim_of(Pod.parse(raw), RULES)
    if asked is not None:
        assert 0 <= asked.count <= 1024
        assert ClaimRecord.parse(asked.record.text()) == asked.record
        assert asked.sentence
