"""Routes, probes and malformed reviews."""

import asyncio
import json
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw, raw_container, raw_pod
from tests.web.harness import Harness
from webhook.web.body import MAX_BODY
from webhook.web.explain import MAX_MANIFEST
from webhook.web.finalize import MAX_BODY as MAX_FINALIZE
from webhook.web.health import Stage


@pytest.mark.defect("assigner-21")
@pytest.mark.parametrize(
    ("listener", "path", "code"),
    [
        ("tls", "/healthz", 200),
        ("tls", "/readyz", 200),
        ("plain", "/healthz", 200),
        ("plain", "/health", 200),
        ("plain", "/readyz", 200),
        ("plain", "/ready", 200),
        ("plain", "/metrics", 200),
        ("plain", "/", 200),
        ("tls", "/metrics", 404),
        ("plain", "/mutate", 404),
        ("plain", "/validate", 404),
        ("tls", "/", 200),
    ],
)
async def test_routes_of_each_listener(harness: Harness, listener: str, path: str, code: int) -> None:
    client = harness.tls if listener == "tls" else harness.plain
    assert (await client.get(path)).status_code == code


async def test_unknown_paths_and_methods_are_refused_in_json(harness: Harness) -> None:
    missing = await harness.tls.get("/nothing")
    assert (missing.status_code, missing.json()) == (404, {"error": "not found"})
    longer = await harness.tls.post("/mutate/")
    assert (longer.status_code, longer.json()) == (404, {"error": "not found"})
    wrong = await harness.tls.get("/mutate")
    assert (wrong.status_code, wrong.json(), wrong.headers["allow"]) == (405, {"error": "method not allowed"}, "POST")


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.DRAINING])
@pytest.mark.parametrize("path", ["/mutate", "/mutate-binding", "/validate", "/finalize", "/explain"])
async def test_routes_answer_503_with_retry_after_while_the_server_is_not_serving(
    harness: Harness, path: str, stage: Stage
) -> None:
    harness.health.stage = stage
    reply = await harness.tls.post(path, json=builders.mutating_create(raw_pod(raw_container(gpus=1))))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json() == {"error": f"the server is {stage}"}
    assert (await harness.tls.get("/readyz")).status_code == 503
    assert (await harness.tls.get("/healthz")).status_code == 200
    assert harness.held == []


@pytest.mark.defect("assigner-15")
@pytest.mark.defect("scoring-16")
@pytest.mark.parametrize("path", ["/mutate", "/mutate-binding", "/validate"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not JSON", id="not JSON"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"{}", id="empty object"),
        pytest.param(b'{"kind": "AdmissionReview"}', id="no version"),
        pytest.param(b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', id="no request"),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": null}', id="null request"
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {}}',
            id="request without uid",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": 5}}', id="uid 5"
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": " "}}',
            id="blank uid",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "a\\nb"}}',
            id="uid with a line break",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "'
            + b"x" * 129
            + b'"}}',
            id="uid of 129 characters",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v2", "request": {"uid": "u"}}',
            id="version v2",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "u"}}',
            id="version v1beta1",
        ),
        pytest.param(
            b'{"kind": "Pod", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "u"}}', id="another kind"
        ),
        pytest.param(b'{"a":' * 50_000, id="deeply nested"),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "u", "object": '
            + b'{"a":' * 5_000
            + b"1"
            + b"}" * 5_000
            + b"}}",
            id="deeply nested object",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "u", "object": NaN}}',
            id="NaN",
        ),
        pytest.param(
            b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "u", "object": []}}',
            id="object is a list",
        ),
    ],
)
async def test_malformed_review_is_refused_with_400_in_json(harness: Harness, path: str, body: bytes) -> None:
    reply = await harness.tls.post(path, content=body)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]
    assert harness.held == []


@pytest.mark.parametrize(
    ("path", "max_size"),
    [("/mutate", MAX_BODY), ("/validate", MAX_BODY), ("/explain", MAX_MANIFEST), ("/finalize", MAX_FINALIZE)],
)
async def test_body_over_the_limit_is_refused_with_413(harness: Harness, path: str, max_size: int) -> None:
    reply = await harness.tls.post(path, content=b" " * (max_size + 1))
    assert (reply.status_code, reply.json()) == (413, {"error": f"the body is larger than {max_size} bytes"})


async def test_review_is_answered_after_a_body_of_50_megabytes_was_refused(harness: Harness) -> None:
    reply = await harness.tls.post("/mutate", content=b"x" * 50_000_000)
    assert reply.status_code == 413
    assert (await harness.mutate(raw_pod(raw_container(gpus=1))))["allowed"]


async def test_last_of_duplicate_keys_counts_as_in_the_api_server(harness: Harness) -> None:
    raw_review = json.dumps(builders.mutating_create(raw_pod(raw_container(gpus=1))))
    doubled = raw_review.replace('"uid": ', '"uid": "the first", "uid": ', 1)
    reply = await harness.tls.post("/mutate", content=doubled)
    assert reply.json()["response"]["uid"] == builders.REVIEW_UID


async def test_pod_with_ten_thousand_containers_is_denied(harness: Harness) -> None:
    many = raw_pod(*(raw_container(f"c{number}", gpus=1 if number == 0 else None) for number in range(10_000)))
    response = await harness.mutate(many)
    assert response["status"]["reason"] == "InvalidPod"
    assert "10000 containers" in response["status"]["message"]
    assert harness.held == []


async def test_labels_with_slash_and_tilde_survive(harness: Harness) -> None:
    raw = raw_pod(raw_container(gpus=1), labels={"a/b~c": "d~e"}, annotations={"x/y~z": "~1~0/"})
    dressed = await harness.dress(raw)
    assert dressed["metadata"]["labels"] == {"a/b~c": "d~e"}
    assert dressed["metadata"]["annotations"]["x/y~z"] == "~1~0/"


@pytest.mark.parametrize(
    "member",
    [
        ("metadata", "labels", {"a": 5}),
        ("metadata", "annotations", []),
        ("spec", "containers", {}),
        ("spec", "containers", [None]),
        ("spec", "containers", [{"name": 5}]),
        ("spec", "nodeSelector", "zone"),
        ("spec", "affinity", []),
        ("spec", "tolerations", {}),
    ],
    ids=str,
)
async def test_field_of_the_wrong_type_is_named_in_the_denial(harness: Harness, member: tuple[str, str, Any]) -> None:
    part, name, value = member
    raw = raw_pod(raw_container(gpus=1))
    raw[part][name] = value
    response = await harness.mutate(raw)
    assert response["status"]["reason"] == "InvalidPod"
    assert f"$.{part}.{name}" in response["status"]["message"]


def rich_review() -> Raw:
    """A review with a value in every field that the server reads."""
    raw = raw_pod(
        raw_container(gpus=1, env=builders.raw_env(A="1")),
        labels={"gpuwarden.io/gpu.model": "h100"},
        annotations={"team": "x"},
        init=[builders.raw_sidecar()],
        nodeSelector={"zone": "a"},
        tolerations=[{"key": "a", "operator": "Exists"}],
        affinity=builders.required_affinity(builders.term(builders.expression("zone", "In", "a"))),
    )
    return builders.mutating_create(raw)


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [one for key, member in members for one in [(*above, key), *paths(member, (*above, key))]]


@pytest.mark.defect("X-5")
@pytest.mark.parametrize("path", [one for one in paths(rich_review()) if len(one) > 1], ids=str)
@pytest.mark.parametrize("route", ["/mutate", "/mutate-binding", "/validate"])
async def test_null_in_any_field_gets_a_well_formed_answer(harness: Harness, route: str, path: tuple[Any, ...]) -> None:
    raw_review = rich_review()
    target: Any = raw_review
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = None
    reply = await harness.tls.post(route, json=raw_review)
    assert reply.status_code in (200, 400)
    answer: Raw = reply.json()
    assert answer.get("error") or answer["response"]["allowed"] or answer["response"]["status"]["message"]


async def test_reviews_are_answered_while_many_pods_are_explained(harness: Harness) -> None:
    template = {"metadata": {"labels": {"app": "a"}}, "spec": raw_pod(raw_container(gpus=1))["spec"]}
    spec = {"replicas": 100, "serviceName": "a", "selector": {"matchLabels": {"app": "a"}}, "template": template}
    many = {"kind": "StatefulSet", "metadata": {"name": "a", "namespace": "ml"}, "spec": spec}
    explaining = asyncio.create_task(harness.tls.post("/explain", json=many))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await harness.mutate(raw_pod(raw_container(gpus=1))))["allowed"]
    assert not explaining.done()
    assert (await explaining).json()["verdict"] == "admit"
