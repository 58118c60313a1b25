"""Pods are parsed: null is absent, invalid members are errors, and GPUs are counted by Kubernetes' rule."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import pod, raw_container, raw_pod, raw_sidecar
from webhook.core.errors import InvalidPodError
from webhook.core.pod import Container, EnvVar, Pod, Resources, whole_number

Raw = dict[str, Any]


def counted(*, init: list[Raw], containers: list[Raw]) -> int:
    parsed = pod(*containers, init=init)
    return parsed.total({one.name: one.asked("nvidia.com/gpu") for _, one in parsed.containers()})


@pytest.mark.parametrize(
    ("init", "containers", "total"),
    [
        pytest.param([], [("a", 2)], 2, id="one-container"),
        pytest.param([], [("a", 2), ("b", 3)], 5, id="containers-run-together"),
        pytest.param([("i", 1)], [("a", 2)], 2, id="init-1-main-2"),
        pytest.param([("i", 4)], [("a", 2)], 4, id="a-larger-init-container"),
        pytest.param([("i", 3), ("j", 4)], [("a", 2)], 4, id="init-containers-run-one-by-one"),
        pytest.param([("S", 1)], [("a", 2)], 3, id="a-sidecar-runs-along"),
        pytest.param([("S", 1), ("i", 4)], [("a", 2)], 5, id="an-init-container-beside-an-earlier-sidecar"),
        pytest.param([("i", 4), ("S", 1)], [("a", 2)], 4, id="a-later-sidecar-has-not-started"),
        pytest.param([("S", 1), ("i", 1), ("T", 2)], [("a", 2)], 5, id="sidecars-and-containers-at-last"),
        pytest.param([("S", 3), ("i", 2), ("T", 1), ("j", 2)], [("a", 1)], 6, id="the-worst-moment-is-at-the-start"),
        pytest.param([("i", 0)], [("a", 0)], 0, id="nothing-asked"),
    ],
)
@pytest.mark.defect("assigner-12")
def test_gpus_are_counted_by_kubernetes_own_rule(
    init: list[tuple[str, int]], containers: list[tuple[str, int]], total: int
) -> None:
    """A capital letter is a sidecar: an init container that keeps running."""
    first = [raw_sidecar(n.lower() * 2, gpus=g) if n.isupper() else raw_container(n, gpus=g) for n, g in init]
    assert counted(init=first, containers=[raw_container(n, gpus=g) for n, g in containers]) == total


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=6),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
)
def test_count_is_the_maximum_of_concurrent_containers(init: list[tuple[bool, int]], containers: list[int]) -> None:
    moments, running = [0], 0
    for is_sidecar, gpus in init:
        moments.append(running + gpus)
        running += gpus if is_sidecar else 0
    moments.append(running + sum(containers))
    first = [(raw_sidecar if s else raw_container)(f"i{n}", gpus=g) for n, (s, g) in enumerate(init)]
    then = [raw_container(f"c{n}", gpus=g) for n, g in enumerate(containers)]
    assert counted(init=first, containers=then) == max(moments)


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        pytest.param({"limits": {"nvidia.com/gpu": "2"}}, 2, id="limit-alone"),
        pytest.param({"requests": {"nvidia.com/gpu": "2"}}, 2, id="request-alone"),
        pytest.param({"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "1"}}, 2, id="the-larger"),
        pytest.param({"limits": {"cpu": "2"}}, 0, id="another-resource"),
        pytest.param({"limits": {"nvidia.com/gpu": None}}, 0, id="null-amount"),
        pytest.param({"limits": None, "requests": None}, 0, id="null-parts"),
        pytest.param(None, 0, id="null"),
    ],
)
def test_a_container_asks_by_limit_or_request(resources: Raw | None, asked: int) -> None:
    parsed = Pod.parse({"spec": {"containers": [{"name": "a", "resources": resources}]}})
    ((_, container),) = parsed.containers()
    assert container.asked("nvidia.com/gpu") == asked


@pytest.mark.parametrize(
    ("amount", "number"),
    [
        pytest.param("1", 1, id="text"),
        pytest.param(1, 1, id="whole"),
        pytest.param(2.0, 2, id="whole-as-float"),
        pytest.param("+2", 2, id="plus"),
        pytest.param("2.", 2, id="point"),
        pytest.param("2.000", 2, id="zeros-behind-the-point"),
        pytest.param("1k", 1000, id="kilo"),
        pytest.param("1Ki", 1024, id="kibi"),
        pytest.param("1e1", 10, id="exponent"),
        pytest.param("1E+1", 10, id="signed-exponent"),
        pytest.param("0", 0, id="zero"),
        pytest.param("", 0, id="empty"),
        pytest.param(None, 0, id="null"),
    ],
)
def test_a_quantity_is_a_whole_number(amount: str | float | None, number: int) -> None:
    assert whole_number(amount) == number


@pytest.mark.parametrize(
    "amount",
    [
        pytest.param("-1", id="negative"),
        pytest.param(-1, id="negative-number"),
        pytest.param("1.5", id="a-half"),
        pytest.param(0.5, id="a-half-as-float"),
        pytest.param("500m", id="milli"),
        pytest.param("two", id="a-word"),
        pytest.param("1_0", id="underscore"),
        pytest.param(" 1", id="white-space"),
        pytest.param("\u0661", id="arabic-digit"),
        pytest.param("1e99", id="large-exponent"),
        pytest.param("9" * 5000, id="5000-digits"),
        pytest.param(1e308, id="huge-float"),
        pytest.param(float("inf"), id="infinite"),
        pytest.param(float("nan"), id="not-a-number"),
    ],
)
def test_quantity_that_is_not_a_whole_number_is_a_mistake(amount: str | float) -> None:
    with pytest.raises(InvalidPodError, match="is not a whole number of GPUs"):
        whole_number(amount)


def test_claims_of_a_container_that_are_no_objects_are_a_mistake() -> None:
    container = {"name": "main", "resources": {"claims": [1]}}
    with pytest.raises(InvalidPodError):
        Pod.parse({"metadata": {"name": "one"}, "spec": {"containers": [container]}})


def test_number_that_is_too_long_is_a_mistake() -> None:
    with pytest.raises(InvalidPodError):
        whole_number(10**5000)


PARTS = (
    *(("metadata",), ("spec",)),
    *(
        ("metadata", m)
        for m in ("name", "generateName", "namespace", "uid", "labels", "annotations", "ownerReferences")
    ),
    *(
        ("spec", m)
        for m in (
            "containers",
            "initContainers",
            "ephemeralContainers",
            "nodeName",
            "nodeSelector",
            "affinity",
            "tolerations",
            "resourceClaims",
        )
    ),
    ("metadata", "labels", "a"),
    ("metadata", "annotations", "a"),
    ("spec", "nodeSelector", "a"),
    ("spec", "affinity", "nodeAffinity"),
    ("spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    ("spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"),
)


@pytest.mark.parametrize("path", PARTS, ids=".".join)
@pytest.mark.defect("X-5")
def test_null_member_equals_an_absent_one(path: tuple[str, ...]) -> None:
    raw: Raw = {}
    inner = raw
    for step in path[:-1]:
        inner = inner.setdefault(step, {})
    inner[path[-1]] = None
    parsed = Pod.parse(raw)
    assert list(parsed.containers()) == []
    assert parsed.display_name == "(no name)"


@pytest.mark.parametrize("member", ["env", "resources", "restartPolicy"])
@pytest.mark.defect("X-5")
def test_null_member_of_a_container_equals_an_absent_one(member: str) -> None:
    ((_, container),) = Pod.parse({"spec": {"containers": [{"name": "a", member: None}]}}).containers()
    assert container == Container(name="a")


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        pytest.param({"metadata": []}, "$.metadata", id="metadata-a-list"),
        pytest.param({"metadata": {"labels": {"a": 1}}}, "$.metadata.labels[...]", id="label-a-number"),
        pytest.param({"metadata": {"annotations": ["a"]}}, "$.metadata.annotations", id="annotations-a-list"),
        pytest.param({"spec": "x"}, "$.spec", id="spec-a-text"),
        pytest.param({"spec": {"containers": {}}}, "$.spec.containers", id="containers-a-map"),
        pytest.param({"spec": {"containers": [None]}}, "$.spec.containers[0]", id="container-null"),
        pytest.param(
            {"spec": {"containers": [{"env": [{"name": "A", "value": 1}]}]}},
            "$.spec.containers[0].env[0].value",
            id="env-a-number",
        ),
        pytest.param(
            {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": True}}}]}},
            "$.spec.containers[0].resources.limits[...]",
            id="amount-true",
        ),
    ],
)
def test_invalid_pod_is_an_error_with_the_field_path(raw: Raw, field: str) -> None:
    with pytest.raises(InvalidPodError) as caught:
        Pod.parse(raw)
    assert str(caught.value).startswith("the pod cannot be read: ")
    assert str(caught.value).endswith(f"`{field}`")


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        pytest.param(EnvVar("A", "x"), "x", id="value"),
        pytest.param(EnvVar("A"), "", id="no-value-is-empty"),
        pytest.param(EnvVar("A", value_from={"fieldRef": {"fieldPath": "metadata.name"}}), None, id="from-elsewhere"),
        pytest.param(EnvVar("A", "x", {}), None, id="both"),
    ],
)
def test_variable_has_a_literal_only_without_a_source(env: EnvVar, shown: str | None) -> None:
    assert env.literal == shown


def test_every_container_is_listed_with_its_path() -> None:
    raw = raw_pod(raw_container("a"), raw_container("b"), init=[raw_container("i")])
    raw["spec"]["ephemeralContainers"] = [raw_container("debug")]
    assert [(path, one.name) for path, one in Pod.parse(raw).containers()] == [
        ("spec.initContainers[0]", "i"),
        ("spec.containers[0]", "a"),
        ("spec.containers[1]", "b"),
        ("spec.ephemeralContainers[0]", "debug"),
    ]


@pytest.mark.defect("X-3")
def test_display_name_is_the_name_or_the_generate_name() -> None:
    assert pod(name=None, generate_name="infer-").display_name == "infer-"


def test_zero_amount_is_not_a_request() -> None:
    container = Container(resources=Resources(limits={"a": "0", "b": 0, "c": None, "d": "", "e": "1"}))
    assert list(container.resource_names()) == ["e"]
