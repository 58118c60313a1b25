"""Beside which pods a pod may stand, as kube-scheduler would have it."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webhook.core.neighbours import (
    AVOIDS,
    BOUNDLESS,
    JOINS_NOBODY,
    KEPT_AWAY,
    AffinityWire,
    Company,
    Neighbours,
    PodTerm,
)

Raw = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WEB, DB = {"app": "web"}, {"app": "db"}


def term(labels: Raw | None, topology: str = "host", **members: Any) -> Raw:
    selector = None if labels is None else {"matchLabels": labels}
    return {"labelSelector": selector, "topologyKey": topology, **members}


def company(labels: Raw, *, avoids: tuple[Raw, ...] = (), joins: tuple[Raw, ...] = (), within: str = "ml") -> Company:
    raw = {"podAffinity": {REQUIRED: list(joins)}, "podAntiAffinity": {REQUIRED: list(avoids)}}
    return Company.of(within, labels, msgspec.convert(raw, AffinityWire))


def hall() -> Neighbours:
    """Two hosts in zone a, one in zone b, one without a zone."""
    made = Neighbours()
    for name, zone in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "")):
        made.know_node(name, {"host": name, **({"zone": zone} if zone else {})})
    made.know_namespace("ml", {"team": "blue"})
    made.know_namespace("other", {"team": "red"})
    return made


def open_to(hall: Neighbours, pod: Company) -> set[str]:
    bounds = hall.bounds(pod)
    return {node for node in ("a1", "a2", "b1", "c1") if hall.objection(bounds, node) is None}


EVERY = {"a1", "a2", "b1", "c1"}


# Pods that stand, against one that comes.


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [("host", {"a2", "b1", "c1"}), ("zone", {"b1", "c1"}), ("rack", EVERY)],
    ids=["of-the-host", "of-the-zone", "of-a-label-that-no-node-has"],
)
def test_a_pod_that_stands_keeps_others_out_of_its_place(topology: str, nodes: set[str]) -> None:
    made = hall()
    made.join("1", "a1", company(DB, avoids=(term(WEB, topology),)))
    assert open_to(made, company(WEB)) == nodes
    assert open_to(made, company(DB)) == EVERY
    assert made.bounds(company(DB)) is BOUNDLESS
    if nodes != EVERY:
        assert made.objection(made.bounds(company(WEB)), "a1") == KEPT_AWAY
    made.leave("1", "a1")
    assert made.bounds(company(WEB)) is BOUNDLESS


MEANT: dict[str, tuple[Raw, Raw, str, bool]] = {
    "no-selector-matches-nothing": (term(None), WEB, "ml", False),
    "an-empty-selector-matches-all": (term({}), {}, "ml", True),
    "its-own-namespace-if-none-is-named": (term(WEB), WEB, "other", False),
    "a-namespace-that-is-named": (term(WEB, namespaces=["other"]), WEB, "other", True),
    "not-its-own-where-another-is-named": (term(WEB, namespaces=["other"]), WEB, "ml", False),
    "namespaces-by-their-labels": (
        term(WEB, namespaceSelector={"matchLabels": {"team": "red"}}),
        WEB,
        "other",
        True,
    ),
    "not-its-own-where-others-are-selected": (
        term(WEB, namespaceSelector={"matchLabels": {"team": "red"}}),
        WEB,
        "ml",
        False,
    ),
    "named-or-selected": (
        term(WEB, namespaces=["ml"], namespaceSelector={"matchLabels": {"team": "red"}}),
        WEB,
        "ml",
        True,
    ),
    "every-namespace": (term(WEB, namespaceSelector={}), WEB, "unheard-of", True),
    "a-namespace-that-nobody-has-heard-of": (
        term(WEB, namespaceSelector={"matchLabels": {"team": "red"}}),
        WEB,
        "unheard-of",
        False,
    ),
    # As the API server writes matchLabelKeys and mismatchLabelKeys into the selector.
    "label-keys": (
        term(
            None,
            labelSelector={"matchExpressions": [{"key": "hash", "operator": "In", "values": ["1"]}]},
            matchLabelKeys=["hash"],
        ),
        {"hash": "2"},
        "ml",
        False,
    ),
    "other-label-keys": (
        term(
            None,
            labelSelector={"matchExpressions": [{"key": "tenant", "operator": "NotIn", "values": ["1"]}]},
            mismatchLabelKeys=["tenant"],
        ),
        {"tenant": "2"},
        "ml",
        True,
    ),
}


@pytest.mark.parametrize(("raw", "labels", "namespace", "is_meant"), MEANT.values(), ids=MEANT)
def test_whom_a_term_means(raw: Raw, labels: Raw, namespace: str, is_meant: bool) -> None:
    made = hall()
    made.join("1", "a1", company(DB, avoids=(raw,)))
    assert (open_to(made, company(labels, within=namespace)) != EVERY) is is_meant


def test_labels_of_namespaces_count_as_they_are_now() -> None:
    made, pod = hall(), company(WEB, within="other")
    made.join("1", "a1", company(DB, avoids=(term(WEB, namespaceSelector={"matchLabels": {"team": "red"}}),)))
    assert open_to(made, pod) == EVERY - {"a1"}
    assert made.know_namespace("other", {"team": "green"})
    assert open_to(made, pod) == EVERY
    assert not made.know_namespace("other", {"team": "green"})
    assert made.know_namespace("other", None)
    made.leave("1", "a1")
    assert not made.know_namespace("other", {"team": "red"})  # which nobody asks about


# What a pod asks itself.


def test_a_pod_keeps_away_from_those_it_avoids() -> None:
    made, pod = hall(), company(WEB, avoids=(term(DB, "zone"), term(WEB)))
    assert open_to(made, pod) == EVERY
    made.join("1", "a1", company(DB))
    made.join("2", "c1", company(WEB))
    assert open_to(made, pod) == {"b1"}
    assert made.objection(made.bounds(pod), "a2") == AVOIDS


def test_a_pod_goes_where_those_are_that_it_joins() -> None:
    made, pod = hall(), company(WEB, joins=(term(DB, "zone"),))
    assert open_to(made, pod) == set()
    assert made.objection(made.bounds(pod), "a1") == JOINS_NOBODY
    before = made.stage(made.bounds(pod))
    assert made.join("1", "a1", company(DB))
    assert made.stage(made.bounds(pod)) > before
    assert open_to(made, pod) == {"a1", "a2"}
    assert not made.join("2", "a2", company(DB))  # which is no news: that zone has one
    assert not made.join("3", "b1", company(WEB))


def test_all_that_a_pod_joins_has_to_be_one_pod_in_each_place() -> None:
    """A pod counts that every term means."""
    made, both = hall(), company({}, joins=(term(WEB, "zone"), term({"tier": "x"}, "host")))
    made.join("1", "a1", company(WEB))
    made.join("2", "a1", company({"tier": "x"}))
    assert open_to(made, both) == set()
    made.join("3", "a2", company({**WEB, "tier": "x"}))
    assert open_to(made, both) == {"a2"}


def test_the_first_of_those_that_join_each_other_may_begin_anywhere() -> None:
    made, pod = hall(), company(WEB, joins=(term(WEB, "zone"),))
    assert open_to(made, pod) == {"a1", "a2", "b1"}  # a node without a zone is in none
    made.join("1", "a2", pod)
    assert open_to(made, pod) == {"a1", "a2"}
    made.leave("1", "a2")
    assert open_to(made, pod) == {"a1", "a2", "b1"}
    assert open_to(made, company(DB, joins=(term(WEB, "zone"),))) == set()


def test_nodes_that_come_go_and_are_labelled_anew_count_as_they_are_now() -> None:
    made, pod = hall(), company(WEB)
    made.join("1", "late", company(DB, avoids=(term(WEB, "zone"),)))
    assert open_to(made, pod) == EVERY
    made.know_node("late", {"zone": "a"})
    assert open_to(made, pod) == {"b1", "c1"}
    made.know_node("late", {"zone": "b"})
    assert open_to(made, pod) == {"a1", "a2", "c1"}
    made.forget_node("late")
    assert open_to(made, pod) == EVERY


def test_of_many_terms_the_last_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webhook.core.neighbours.MOST_KEPT", 2)
    made = hall()
    made.join("1", "a1", company({"app": "app-3"}))
    for number in range(5):
        found = open_to(made, company(WEB, avoids=(term({"app": f"app-{number}"}),)))
        assert found == (EVERY - {"a1"} if number == 3 else EVERY)


# Whatever happens, the index says what looking at every pod would.

LABELS = st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"))
TERMS = st.builds(
    lambda labels, topology, namespaces, selected: term(
        labels, topology, namespaces=namespaces, namespaceSelector=selected
    ),
    st.none() | LABELS,
    st.sampled_from(["host", "zone"]),
    st.lists(st.sampled_from(["ml", "other"]), max_size=2),
    st.none() | st.builds(lambda team: {"matchLabels": {"team": team}}, st.sampled_from(["blue", "red"])),
)
PODS = st.builds(
    lambda labels, avoids, joins, within: company(labels, avoids=avoids, joins=joins, within=within),
    LABELS,
    st.lists(TERMS, max_size=2).map(tuple),
    st.lists(TERMS, max_size=2).map(tuple),
    st.sampled_from(["ml", "other"]),
)
NODES = st.sampled_from(["a1", "a2", "b1", "c1"])
STEPS = st.one_of(
    st.tuples(st.just("join"), NODES, PODS),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("label"), NODES, st.sampled_from("ab")),
    st.tuples(st.just("forget"), NODES),
    st.tuples(st.just("name"), st.sampled_from(["ml", "other"]), st.sampled_from(["blue", "red"])),
)


class Naive:
    """Looks at every pod on every node, as the rule is written."""

    def __init__(self) -> None:
        self.nodes: dict[str, Raw] = {}
        self.pods: dict[str, tuple[str, Company]] = {}
        self.namespaces: dict[str, Raw] = {}

    def means(self, term: PodTerm, pod: Company) -> bool:
        return term.matches(pod, self.namespaces)

    def may(self, pod: Company, node: str) -> bool:
        labels = self.nodes[node]
        joined, avoided, kept = Counter[Any](), Counter[Any](), Counter[Any]()
        for where, other in self.pods.values():
            there = self.nodes.get(where, {})
            joins_it = bool(pod.joins) and all(self.means(one, other) for one in pod.joins)
            joined.update((one.topology, there[one.topology]) for one in pod.joins * joins_it if one.topology in there)
            avoided.update(
                (one, there[one.topology]) for one in pod.avoids if one.topology in there and self.means(one, other)
            )
            kept.update(
                (one.topology, there[one.topology])
                for one in other.avoids
                if one.topology in there and self.means(one, pod)
            )
        if any(kept[key, value] for key, value in labels.items()):
            return False
        if any(avoided[one, labels.get(one.topology)] for one in pod.avoids):
            return False
        if not all(one.topology in labels for one in pod.joins):
            return False
        if all(joined[one.topology, labels[one.topology]] for one in pod.joins):
            return True
        return not joined and all(self.means(one, pod) for one in pod.joins)


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=12), st.lists(PODS, min_size=1, max_size=3))
def test_the_index_agrees_with_looking_at_every_pod(steps: list[Any], pods: list[Company]) -> None:
    made, naive = Neighbours(), Naive()
    for number, (what, *about) in enumerate([("label", "a1", "a"), ("label", "b1", "b"), *steps]):
        match what:
            case "join":
                made.join(str(number), *about)
                naive.pods[str(number)] = (about[0], about[1])
            case "leave" if naive.pods:
                uid = list(naive.pods)[about[0] % len(naive.pods)]
                made.leave(uid, naive.pods.pop(uid)[0])
            case "label":
                naive.nodes[about[0]] = {"host": about[0], "zone": about[1]}
                made.know_node(about[0], naive.nodes[about[0]])
            case "forget":
                naive.nodes.pop(about[0], None)
                made.forget_node(about[0])
            case "name":
                naive.namespaces[about[0]] = {"team": about[1]}
                made.know_namespace(about[0], naive.namespaces[about[0]])
            case _:
                pass
        for pod in pods:
            bounds = made.bounds(pod)
            found = {node: made.objection(bounds, node) is None for node in naive.nodes}
            assert found == {node: naive.may(pod, node) for node in naive.nodes}
