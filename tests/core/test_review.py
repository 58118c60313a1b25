"""AdmissionReviews and responses: a review with a uid is parsed, any other body is rejected with a message."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import (
    NAMESPACE,
    POD_UID,
    REVIEW_UID,
    body,
    created,
    delete,
    mutating_create,
    raw_container,
    raw_env,
    raw_pod,
    required_affinity,
    review,
    term,
    update,
    validating_create,
)
from webhook.core.check import gpu_access_unchanged, no_bypass_fields, no_gpu_fields
from webhook.core.claim import ClaimRules, claim_of, recorded_claim
from webhook.core.dress import Allocation, DressRules, changes, dressed, undressed
from webhook.core.errors import InvalidPodError, MalformedReviewError
from webhook.core.pod import Pod
from webhook.core.reasons import STATUS_CODES, Reason
from webhook.core.review import Operation, Review, answer
from webhook.core.verdict import Admit, Deny

Raw = dict[str, Any]


def replied(verdict: Admit | Deny, uid: str = REVIEW_UID) -> Raw:
    reply: Raw = json.loads(answer(uid, verdict))
    return reply


# Requests.


def test_a_mutating_create_is_read() -> None:
    raw = raw_pod(name=None, generate_name="infer-")
    read = Review.parse(body(mutating_create(raw)))
    assert read == Review(
        uid=read.uid,
        kind="Pod",
        subresource="",
        operation="CREATE",
        namespace=NAMESPACE,
        name="",
        raw=raw,
        raw_old=None,
        is_dry_run=False,
    )
    assert (read.uid, read.is_of_pods, read.subject) == (REVIEW_UID, True, "CREATE of Pod")


def test_a_validating_create_has_the_pods_final_name_and_uid() -> None:
    read = Review.parse(body(validating_create(raw_pod(name=None, generate_name="infer-"))))
    assert read.raw is not None
    assert (read.name, read.raw["metadata"]["uid"]) == ("infer-x7k2p", POD_UID)


def test_an_update_of_a_subresource_is_read_with_both_pods() -> None:
    old = created(raw_pod())
    new = {**old, "status": {"phase": "Running"}}
    read = Review.parse(body(update(new, old, subresource="ephemeralcontainers")))
    assert (read.raw, read.raw_old) == (new, old)
    assert read.subject == "UPDATE of Pod/ephemeralcontainers"


def test_a_delete_has_the_old_pod_alone() -> None:
    read = Review.parse(body(delete(created(raw_pod()))))
    assert (read.operation, read.raw, read.name) == ("DELETE", None, "train-0")
    assert read.raw_old is not None


def test_a_dry_run_is_known() -> None:
    assert Review.parse(body(mutating_create(raw_pod(), dry_run=True))).is_dry_run


def test_operation_values_do_not_change() -> None:
    assert [one.value for one in Operation] == ["CREATE", "UPDATE", "DELETE", "CONNECT"]


@pytest.mark.parametrize(
    ("kind", "name", "is_of_pods"),
    [
        pytest.param({"group": "", "version": "v1", "kind": "Pod"}, "Pod", True, id="pod"),
        pytest.param({"group": "batch", "version": "v1", "kind": "Job"}, "batch/Job", False, id="job"),
        pytest.param(
            {"group": "example.com", "version": "v1", "kind": "Pod"}, "example.com/Pod", False, id="anothers-pod"
        ),
        pytest.param({"group": None, "kind": "Pod"}, "Pod", True, id="null-group"),
        pytest.param({"kind": None}, "", False, id="null-kind"),
        pytest.param(None, "", False, id="null"),
    ],
)
def test_only_pods_of_the_core_group_are_pods(kind: Raw | None, name: str, is_of_pods: bool) -> None:
    raw = mutating_create(raw_pod())
    raw["request"]["kind"] = kind
    read = Review.parse(body(raw))
    assert (read.kind, read.is_of_pods) == (name, is_of_pods)


def test_kind_with_a_version_as_group_is_not_a_pod() -> None:
    raw = mutating_create(raw_pod())
    raw["request"]["kind"] = {"group": "v1", "version": "v1", "kind": "Pod"}
    assert Review.parse(body(raw)).kind == "v1/Pod"


def without(*path: str) -> Raw:
    raw = mutating_create(raw_pod())
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return raw


def altered(value: Any, *path: str) -> bytes:
    raw = mutating_create(raw_pod())
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return body(raw)


UID_LENGTH = "the review's uid is not a printable text of up to 128 characters"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"", "not an AdmissionReview: Input data was truncated", id="empty"),
        pytest.param(b"{", "not an AdmissionReview: Input data was truncated", id="half"),
        pytest.param(b"<html>", "not an AdmissionReview: JSON is malformed: invalid character (byte 0)", id="html"),
        pytest.param(b"null", "not an AdmissionReview: Expected `object`, got `null`", id="null"),
        pytest.param(b"[]", "not an AdmissionReview: Expected `object`, got `array`", id="a-list"),
        pytest.param(b'"x"', "not an AdmissionReview: Expected `object`, got `str`", id="a-text"),
        pytest.param(b"{}", "not an AdmissionReview", id="nothing-in-it"),
        pytest.param(altered("Pod", "kind"), "not an AdmissionReview", id="another-kind"),
        pytest.param(
            altered("admission.k8s.io/v1beta1", "apiVersion"),
            "not an AdmissionReview of admission.k8s.io/v1",
            id="an-old-version",
        ),
        pytest.param(body(without("apiVersion")), "not an AdmissionReview of admission.k8s.io/v1", id="no-version"),
        pytest.param(body(without("request")), "the review has no request with a uid", id="no-request"),
        pytest.param(altered(None, "request"), "the review has no request with a uid", id="null-request"),
        pytest.param(body(without("request", "uid")), "the review has no request with a uid", id="no-uid"),
        pytest.param(altered("", "request", "uid"), "the review has no request with a uid", id="empty-uid"),
        pytest.param(altered(" \t", "request", "uid"), "the review has no request with a uid", id="blank-uid"),
        pytest.param(
            altered(None, "request", "uid"),
            "not an AdmissionReview: Expected `str`, got `null` - at `$.request.uid`",
            id="null-uid",
        ),
        pytest.param(
            altered(1, "request", "uid"),
            "not an AdmissionReview: Expected `str`, got `int` - at `$.request.uid`",
            id="a-number-for-a-uid",
        ),
        pytest.param(altered("x" * 129, "request", "uid"), UID_LENGTH, id="a-long-uid"),
        pytest.param(altered("a\nb", "request", "uid"), UID_LENGTH, id="a-uid-of-two-lines"),
        pytest.param(
            altered([], "request", "object"),
            "not an AdmissionReview: Expected `object | null`, got `array` - at `$.request.object`",
            id="a-list-for-an-object",
        ),
        pytest.param(
            altered("yes", "request", "dryRun"),
            "not an AdmissionReview: Expected `bool | null`, got `str` - at `$.request.dryRun`",
            id="a-word-for-dry-run",
        ),
    ],
)
@pytest.mark.defect("assigner-15")
def test_review_without_a_valid_uid_is_rejected_with_a_message(text: bytes, message: str) -> None:
    with pytest.raises(MalformedReviewError) as caught:
        Review.parse(text)
    assert str(caught.value) == message


def embedding(fragment: bytes) -> bytes:
    """A review whose pod contains `fragment` unchanged."""
    return body(mutating_create({"x": "HERE"})).replace(b'"HERE"', fragment)


@pytest.mark.parametrize(
    "fragment",
    [
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="very-deep"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="very-deep-objects"),
        pytest.param(b"1" * 5000, id="5000-digits"),
        pytest.param(b"1e999", id="past-all-floats"),
        pytest.param(b"NaN", id="not-a-number"),
        pytest.param(b'"\\ud800"', id="half-a-surrogate-pair"),
        pytest.param(b'"\xff"', id="not-utf-8"),
        pytest.param(b'"\x00"', id="a-nul"),
        pytest.param(b"{1: 2}", id="a-number-for-a-key"),
    ],
)
def test_malformed_body_is_rejected(fragment: bytes) -> None:
    with pytest.raises(MalformedReviewError, match=r"^not an AdmissionReview: "):
        Review.parse(embedding(fragment))


def test_of_duplicate_keys_the_last_counts() -> None:
    text = body(mutating_create(raw_pod())).replace(b'"request": {', b'"request": {"uid": "first", ', 1)
    assert Review.parse(text).uid == REVIEW_UID
    twice = b'{"kind":"X","kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"1","uid":"2"}}'
    assert Review.parse(twice).uid == "2"


def test_unknown_members_are_ignored() -> None:
    raw = mutating_create(raw_pod())
    raw["request"]["later"] = {"a": [1]}
    raw["later"] = None
    assert Review.parse(body(raw)).uid == REVIEW_UID


@pytest.mark.parametrize(
    ("namespace", "meta", "expected"),
    [
        pytest.param("ml", {"namespace": "other"}, "ml", id="the-requests"),
        pytest.param(None, {"namespace": "other"}, "other", id="else-the-objects"),
        pytest.param("", {"namespace": "other"}, "other", id="empty-is-none"),
        pytest.param(None, {"namespace": 1}, "", id="a-number"),
        pytest.param(None, [], "", id="no-metadata-to-speak-of"),
        pytest.param(None, None, "", id="null-metadata"),
    ],
)
def test_namespace_of_the_request_takes_precedence(namespace: str | None, meta: Any, expected: str) -> None:
    raw = review("CREATE", new={"metadata": {}})
    raw["request"]["namespace"] = namespace
    raw["request"]["object"]["metadata"] = meta
    assert Review.parse(body(raw)).namespace == expected


@pytest.mark.parametrize(
    "member",
    [
        "kind",
        "resource",
        "subResource",
        "operation",
        "namespace",
        "name",
        "object",
        "oldObject",
        "dryRun",
        "options",
        "userInfo",
    ],
)
@pytest.mark.defect("X-5")
def test_null_member_equals_an_absent_one(member: str) -> None:
    raw = mutating_create(raw_pod())
    raw["request"][member] = None
    absent = mutating_create(raw_pod())
    absent["request"].pop(member, None)
    assert Review.parse(body(raw)) == Review.parse(body(absent))


# Responses.


def test_response_without_a_patch_is_minimal() -> None:
    assert replied(Admit()) == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": REVIEW_UID, "allowed": True},
    }


def test_an_admission_carries_its_patch_warnings_and_audit() -> None:
    patch = [{"op": "add", "path": "/metadata/annotations", "value": {"é": "\u2028"}}]
    reply = replied(Admit(patch, warnings=("one\ntwo", "x" * 300), audit={"node": "node-a"}))["response"]
    assert json.loads(base64.b64decode(reply.pop("patch"))) == patch
    assert reply == {
        "uid": REVIEW_UID,
        "allowed": True,
        "patchType": "JSONPatch",
        "warnings": ["one two", "x" * 249 + "…"],
        "auditAnnotations": {"node": "node-a"},
    }


def test_number_of_warnings_is_bounded() -> None:
    assert len(replied(Admit(warnings=tuple(map(str, range(100)))))["response"]["warnings"]) == 12


def test_denial_has_code_reason_message_and_causes() -> None:
    verdict = Deny(Reason.NO_FREE_DEVICE, "4 asked for, 2 free", hint="ask for 2", causes=("3 busy", "1 dark\x00"))
    assert replied(verdict)["response"] == {
        "uid": REVIEW_UID,
        "allowed": False,
        "status": {
            "status": "Failure",
            "code": 429,
            "reason": "NoFreeDevice",
            "message": "4 asked for, 2 free; ask for 2",
            "details": {
                "causes": [
                    {"reason": "NoFreeDevice", "message": "3 busy"},
                    {"reason": "NoFreeDevice", "message": "1 dark "},
                ]
            },
        },
        "auditAnnotations": {"reason": "NoFreeDevice"},
    }


@pytest.mark.parametrize("reason", sorted(STATUS_CODES))
def test_every_denial_can_be_answered_and_never_asks_the_client_to_wait(reason: Reason) -> None:
    status = replied(Deny(reason, "no"))["response"]["status"]
    assert (status["reason"], status["message"]) == (reason.value, "no")
    assert "details" not in status


def test_long_denial_is_truncated() -> None:
    assert len(replied(Deny(Reason.FORGED, "x" * 10_000))["response"]["status"]["message"]) == 4096


def test_uid_is_returned_unchanged() -> None:
    assert replied(Admit(), uid="ü/\\\"'")["response"]["uid"] == "ü/\\\"'"


# Generated bodies.

json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every position in a JSON value except its root."""
    steps: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = list(enumerate(value))
    return [found for step, inner in steps for found in ((*path, step), *paths_of(inner, (*path, step)))]


FULL = update(
    created(
        raw_pod(
            raw_container("main", gpus=1, env=raw_env(NVIDIA_VISIBLE_DEVICES="all", A="b")),
            init=[raw_container("prepare", restartPolicy="Always")],
            labels={"gpuwarden.io/gpu.model": "h100", "apps.kubernetes.io/pod-index": "0"},
            annotations={"gpuwarden.io/required-hash": "sha256:aa11", "gpuwarden.io/claim": '{"gpus":1}', "a/b~c": "x"},
            affinity=required_affinity(term({"key": "zone", "operator": "In", "values": ["a"]})),
            nodeSelector={"zone": "a"},
            tolerations=[{"key": "gpu", "operator": "Exists"}],
            ephemeralContainers=[raw_container("debug")],
            resourceClaims=[{"name": "x"}],
        )
    ),
    created(raw_pod()),
)
PATHS = paths_of(FULL)


def answered(text: bytes) -> bytes | None:
    """A review through the whole core; None if it is rejected for want of a uid."""
    try:
        read = Review.parse(text)
    except MalformedReviewError:
        return None
    rules, dress = ClaimRules(), DressRules()
    raw = read.raw or {}
    try:
        pod, old = Pod.parse(raw), Pod.parse(read.raw_old or {})
        recorded_claim(pod)
        refusal = no_gpu_fields(pod, dress) or no_bypass_fields(pod, dress) or gpu_access_unchanged(pod, old, (), dress)
        asked = claim_of(pod, rules)
    except InvalidPodError as mistake:
        return answer(read.uid, Deny(Reason.INVALID_POD, str(mistake), causes=mistake.mistakes))
    if asked is None:
        return answer(read.uid, refusal or Admit())
    fit = Allocation(asked, ("node-a",), read.uid, ("GPU-1",))
    return answer(read.uid, Admit(changes(raw, dressed(undressed(raw), fit, dress)), warnings=asked.warnings))


def checked(text: bytes) -> None:
    reply = answered(text)
    if reply is not None:
        response = json.loads(reply)["response"]
        assert response["allowed"] or response["status"]["reason"] in set(Reason)


@given(st.sampled_from(PATHS), json_values)
@pytest.mark.defect("X-5")
def test_any_value_at_any_place_is_answered(path: tuple[str | int, ...], value: Any) -> None:
    raw = json.loads(body(FULL))
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    checked(body(raw))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.defect("X-5")
def test_null_at_any_place_is_answered(path: tuple[str | int, ...]) -> None:
    raw = json.loads(body(FULL))
    inner = raw
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = None
    checked(body(raw))


@given(st.integers(0, len(body(FULL)) - 1), st.binary(max_size=3))
def test_a_broken_body_is_answered(at: int, noise: bytes) -> None:
    text = body(FULL)
    checked(text[:at] + noise + text[at + 1 :])
    checked(text[:at])


@given(st.binary(max_size=40))
def test_any_bytes_are_answered(text: bytes) -> None:
    checked(text)


@given(json_values)
def test_any_json_is_answered(value: Any) -> None:
    checked(json.dumps(value).encode())
