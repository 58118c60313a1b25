"""A pod's constraints on nodes have the same meaning as in kube-scheduler."""

import pytest

from tests.builders import expression, on_node, pod, required_affinity, term
from webhook.core.device import Taint
from webhook.core.nodes_asked import NodesAsked

NODE = "node-a"
LABELS = {"zone": "a", "rank": "5", "empty": ""}


def asked(*terms: dict[str, object]) -> NodesAsked:
    return NodesAsked.of(pod(affinity=required_affinity(*terms)))


@pytest.mark.parametrize(
    ("operator", "key", "values", "matches"),
    [
        pytest.param("In", "zone", ["a", "b"], True, id="in"),
        pytest.param("In", "zone", ["b"], False, id="in-others"),
        pytest.param("In", "zone", [], False, id="in-nothing"),
        pytest.param("In", "none", ["a"], False, id="in-without-label"),
        pytest.param("In", "empty", [""], True, id="in-empty-value"),
        pytest.param("In", "none", [""], False, id="an-absent-label-is-not-an-empty-one"),
        pytest.param("NotIn", "zone", ["b"], True, id="not-in"),
        pytest.param("NotIn", "zone", ["a"], False, id="not-in-own"),
        pytest.param("NotIn", "none", ["a"], True, id="not-in-without-label"),
        pytest.param("Exists", "zone", [], True, id="exists"),
        pytest.param("Exists", "empty", [], True, id="exists-and-is-empty"),
        pytest.param("Exists", "none", [], False, id="exists-not"),
        pytest.param("DoesNotExist", "none", [], True, id="does-not-exist"),
        pytest.param("DoesNotExist", "zone", [], False, id="does-exist"),
        pytest.param("Gt", "rank", ["4"], True, id="greater"),
        pytest.param("Gt", "rank", ["5"], False, id="greater-means-greater"),
        pytest.param("Gt", "rank", ["-1"], True, id="greater-than-negative"),
        pytest.param("Gt", "none", ["4"], False, id="greater-without-label"),
        pytest.param("Gt", "zone", ["4"], False, id="greater-of-a-word"),
        pytest.param("Gt", "rank", ["four"], False, id="greater-than-a-word"),
        pytest.param("Gt", "rank", ["4", "3"], False, id="greater-than-two"),
        pytest.param("Gt", "rank", [], False, id="greater-than-nothing"),
        pytest.param("Gt", "rank", ["9" * 5000], False, id="greater-than-5000-digits"),
        pytest.param("Lt", "rank", ["6"], True, id="less"),
        pytest.param("Lt", "rank", ["5"], False, id="less-means-less"),
        pytest.param("Lt", "rank", ["40"], True, id="less-by-number-not-by-text"),
        pytest.param("Near", "zone", ["a"], False, id="unknown-operator"),
        pytest.param("", "zone", ["a"], False, id="no-operator"),
    ],
)
def test_expression_matches_as_in_the_scheduler(operator: str, key: str, values: list[str], matches: bool) -> None:
    assert asked(term(expression(key, operator, *values))).matches(NODE, LABELS) is matches


@pytest.mark.parametrize("value", [pytest.param("1_0", id="underscore"), pytest.param(str(2**63), id="past-64-bits")])
def test_label_that_is_not_a_number_matches_no_comparison(value: str) -> None:
    assert not asked(term(expression("rank", "Gt", "4"))).matches(NODE, {"rank": value})


YES, NO = expression("zone", "In", "a"), expression("zone", "In", "b")


@pytest.mark.parametrize(
    ("terms", "matches"),
    [
        pytest.param([term(YES)], True, id="one"),
        pytest.param([term(NO), term(YES)], True, id="one-of-two-is-enough"),
        pytest.param([term(YES, NO)], False, id="all-expressions-of-a-term"),
        pytest.param([term()], False, id="an-empty-term-matches-nothing"),
        pytest.param([term(), term(YES)], True, id="an-empty-term-beside-one-that-fits"),
        pytest.param([{"matchExpressions": [], "matchFields": []}], False, id="empty-lists"),
        pytest.param([{"matchExpressions": None, "matchFields": None}], False, id="null-lists"),
        pytest.param([], False, id="no-terms"),
        pytest.param([on_node("node-a")], True, id="by-name"),
        pytest.param([on_node("node-b")], False, id="by-another-name"),
        pytest.param([term(fields=[expression("metadata.name", "NotIn", "node-a")])], False, id="not-by-name"),
        pytest.param([term(fields=[expression("metadata.name", "NotIn", "node-b")])], True, id="not-by-another-name"),
        pytest.param([term(fields=[expression("metadata.uid", "In", "node-a")])], False, id="no-such-field"),
        pytest.param([term(NO, fields=[expression("metadata.name", "In", "node-a")])], False, id="name-and-label"),
        pytest.param([term(YES, fields=[expression("metadata.name", "In", "node-a")])], True, id="name-and-own-label"),
    ],
)
def test_terms_are_ored_and_their_expressions_anded(terms: list[dict[str, object]], matches: bool) -> None:
    assert asked(*terms).matches(NODE, LABELS) is matches


def test_pod_without_constraints_allows_every_node() -> None:
    anywhere = NodesAsked.of(pod())
    assert anywhere.matches("any", {})
    assert anywhere.names() is None
    assert anywhere.values_of("zone") is None
    assert anywhere.keys == frozenset()


def test_node_name_allows_only_that_node() -> None:
    preset = NodesAsked.of(pod(nodeName="node-b"))
    assert [preset.matches(name, {}) for name in ("node-a", "node-b")] == [False, True]
    assert preset.names() == frozenset({"node-b"})


def test_node_name_does_not_override_the_affinity() -> None:
    both = NodesAsked.of(pod(nodeName=NODE, affinity=required_affinity(term(NO))))
    assert not both.matches(NODE, LABELS)


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        pytest.param({"zone": "a"}, True, id="has-it"),
        pytest.param({"zone": "b"}, False, id="has-another"),
        pytest.param({"zone": "a", "rank": "6"}, False, id="has-one-of-two"),
        pytest.param({"empty": None}, True, id="null-is-empty"),
        pytest.param({"none": ""}, False, id="an-absent-label-is-not-an-empty-one"),
        pytest.param({}, True, id="empty"),
    ],
)
def test_a_node_selector_is_anded(selector: dict[str, str], matches: bool) -> None:
    assert NodesAsked.of(pod(nodeSelector=selector)).matches(NODE, LABELS) is matches


def test_preferred_affinity_is_ignored() -> None:
    preferred = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": [NO]}}]
        }
    }
    assert NodesAsked.of(pod(affinity=preferred)).matches(NODE, LABELS)


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        pytest.param([on_node("a"), on_node("b")], {"a", "b"}, id="two-names"),
        pytest.param([on_node("a"), term(YES)], None, id="a-term-leaves-it-open"),
        pytest.param([on_node("a"), term()], {"a"}, id="an-empty-term-opens-nothing"),
        pytest.param([term()], set(), id="nothing-at-all"),
        pytest.param([term(fields=[expression("metadata.name", "NotIn", "a")])], None, id="all-but-one"),
        pytest.param([term(YES, fields=[expression("metadata.name", "In", "a")])], {"a"}, id="name-and-label"),
    ],
)
def test_allowed_node_names_are_found(terms: list[dict[str, object]], names: set[str] | None) -> None:
    assert asked(*terms).names() == names


@pytest.mark.parametrize(
    ("terms", "values"),
    [
        pytest.param([term(YES), term(NO)], {"a", "b"}, id="two-terms"),
        pytest.param([term(YES), term(expression("zone", "Exists"))], None, id="a-term-leaves-it-open"),
        pytest.param([term(YES), term(expression("rank", "Exists"))], None, id="a-term-on-another-label"),
        pytest.param([term(YES), term()], {"a"}, id="an-empty-term-opens-nothing"),
        pytest.param([term(expression("zone", "NotIn", "b"))], None, id="all-but-one"),
    ],
)
def test_allowed_values_of_a_label_are_found(terms: list[dict[str, object]], values: set[str] | None) -> None:
    assert asked(*terms).values_of("zone") == values


def test_selector_allows_only_its_value() -> None:
    assert NodesAsked.of(pod(nodeSelector={"zone": "a"})).values_of("zone") == frozenset({"a"})


def test_label_keys_of_the_constraints_are_found() -> None:
    wishes = pod(
        nodeSelector={"zone": "a"}, affinity=required_affinity(term(expression("rank", "Gt", "4")), on_node("a"))
    )
    assert NodesAsked.of(wishes).keys == {"zone", "rank"}


TAINT = Taint("gpu", "yes", "NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        pytest.param({"key": "gpu", "operator": "Exists"}, True, id="exists"),
        pytest.param({"key": "gpu", "operator": "Equal", "value": "yes"}, True, id="equal"),
        pytest.param({"key": "gpu", "value": "yes"}, True, id="equal-is-the-default"),
        pytest.param({"key": "gpu", "value": "no"}, False, id="another-value"),
        pytest.param({"key": "gpu"}, False, id="no-value-is-the-empty-one"),
        pytest.param({"key": "cpu", "operator": "Exists"}, False, id="another-key"),
        pytest.param({"operator": "Exists"}, True, id="everything"),
        pytest.param({"operator": "Equal"}, False, id="no-key-and-equal"),
        pytest.param({}, False, id="nothing"),
        pytest.param({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, True, id="same-effect"),
        pytest.param({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False, id="another-effect"),
        pytest.param({"key": "gpu", "operator": "Exists", "effect": ""}, True, id="any-effect"),
        pytest.param({"key": None, "operator": "Exists", "value": None, "effect": None}, True, id="nulls"),
    ],
)
@pytest.mark.defect("assigner-10")
def test_taint_is_tolerated_as_in_kubernetes(toleration: dict[str, str], tolerates: bool) -> None:
    assert NodesAsked.of(pod(tolerations=[toleration])).tolerates(TAINT) is tolerates


@pytest.mark.parametrize(
    ("effect", "repels"),
    [
        pytest.param("NoSchedule", True, id="no-schedule"),
        pytest.param("NoExecute", True, id="no-execute"),
        pytest.param("PreferNoSchedule", False, id="prefer-no-schedule-only-asks"),
    ],
)
def test_only_a_taint_that_repels_needs_a_toleration(effect: str, repels: bool) -> None:
    assert NodesAsked().tolerates(Taint("gpu", "", effect)) is not repels
