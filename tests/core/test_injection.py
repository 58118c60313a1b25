"""The injection of nodes and pods: what is recorded, and what a record means where the default has changed."""

import pytest
from attrs import evolve

from tests.builders import HASH, NOW, claim, device, evidence, fleet, node, raw_container, raw_pod
from webhook.core.claim import ClaimRules, claim_of
from webhook.core.decide import EvidencePolicy, decide, explain
from webhook.core.device import Node
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.injection import (
    Injection,
    default_of_nodes,
    injection_in_force,
    injection_of,
    injection_of_node,
    recorded_injection,
    takes_native,
)
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reserve import Reserve
from webhook.core.verdict import Deny

NVIDIA, CUDA, PLUGIN, DRA = Injection
CREATE, BIND = Reserve
LABEL = "gpuwarden.io/injection"
LAX = EvidencePolicy()


@pytest.mark.parametrize("default", Injection)
@pytest.mark.parametrize("own", [None, *Injection])
def test_record_gives_the_injection_back(own: Injection | None, default: Injection) -> None:
    recorded = recorded_injection(own, default)
    assert injection_of(recorded, default) is (own or default)


def test_only_other_injections_and_those_that_older_versions_do_not_know_are_recorded() -> None:
    assert [recorded_injection(one, NVIDIA) for one in (None, NVIDIA, CUDA, PLUGIN, DRA)] == [
        *(None, None, "cuda", "plugin", "dra")
    ]
    assert [recorded_injection(None, one) for one in (PLUGIN, DRA)] == ["plugin", "dra"]


@pytest.mark.parametrize("default", [PLUGIN, DRA])
def test_pod_of_an_older_version_keeps_its_variables_when_the_default_changes(default: Injection) -> None:
    assert injection_of(None, default) is NVIDIA


def test_injection_of_a_newer_version_is_a_mistake() -> None:
    with pytest.raises(InvalidPodError, match="'cdi' is not known; allowed are nvidia, cuda, plugin, dra"):
        injection_of("cdi", NVIDIA)


@pytest.mark.parametrize(
    ("labels", "found"), [({}, CUDA), ({LABEL: "dra"}, DRA), ({LABEL: "native"}, None), ({LABEL: ""}, None)]
)
def test_node_has_the_injection_of_its_label(labels: dict[str, str], found: Injection | None) -> None:
    assert injection_of_node(labels, CUDA) is found


# Namespaces.


def test_namespace_gives_its_pods_with_gpus_an_injection() -> None:
    rules = ClaimRules(hash_policy=HashPolicy.of("ml", {LABEL: "dra"}))
    assert claim(raw_pod(raw_container(gpus=1)), rules).record.injection == "dra"
    assert claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}), rules).record.injection is None


def test_namespace_has_both_a_hash_and_an_injection() -> None:
    found = HashPolicy.of("ml", {LABEL: "cuda", "gpuwarden.io/required-hash": HASH})
    assert (found.hashes, found.injection, found.mistakes) == ((HASH,), CUDA, ())
    assert HashPolicy.of("ml", {"other": "x"}) is NO_HASH_POLICY


@pytest.mark.parametrize("value", ["native", "", "DRA"])
def test_every_claim_of_a_namespace_with_an_unknown_injection_is_denied(value: str) -> None:
    rules = ClaimRules(hash_policy=HashPolicy.of("ml", {LABEL: value}))
    for raw in (raw_pod(raw_container(gpus=1)), raw_pod(annotations={"gpuwarden.io/required-hash": HASH})):
        with pytest.raises(InvalidPodError) as caught:
            claim_of(Pod.parse(raw), rules)
        assert caught.value.mistakes == (
            f"namespace ml: its annotation {LABEL} is {value!r}; allowed are nvidia, cuda, plugin, dra",
        )


def test_pod_cannot_choose_its_injection() -> None:
    found = claim(raw_pod(raw_container(gpus=1), annotations={LABEL: "cuda"}))
    assert found.record.injection is None
    assert found.warnings == (f"gpuwarden does not know the key {LABEL}: is it misspelt?",)


# Decisions.


def mixed(default: Injection = NVIDIA) -> Fleet:
    found = fleet(
        node("plain", device("GPU-p")),
        node("variables", device("GPU-v"), labels={LABEL: "nvidia"}),
        node("claims", device("GPU-c"), labels={LABEL: "dra"}),
        node("strange", device("GPU-s"), labels={LABEL: "native"}),
    )
    if default is NVIDIA:
        return found
    made = Fleet(injection=default)
    for one in found.indexed_nodes.values():
        made.put(one.node, NOW)
    return made


@pytest.mark.parametrize("default", [NVIDIA, DRA])
@pytest.mark.parametrize("own", [NVIDIA, DRA])
def test_pod_with_gpus_goes_to_nodes_of_its_own_injection(own: Injection, default: Injection) -> None:
    rules = ClaimRules(default_injection=default, hash_policy=HashPolicy("ml", injection=own))
    found = decide(claim(raw_pod(raw_container(gpus=1)), rules), mixed(default), LAX)
    assert not isinstance(found, Deny)
    named = {NVIDIA: "variables", DRA: "claims"}[own]
    assert {one.node for one in found} == ({named, "plain"} if own is default else {named})


def test_claim_without_gpus_goes_to_any_node() -> None:
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=DRA))
    found = fleet(
        node("a", device("GPU-a"), labels={LABEL: "native"}),
        node("b", device("GPU-b"), labels={LABEL: "cuda"}),
        proven={"a": HASH, "b": HASH},
    )
    places = decide(claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}), rules), found, LAX)
    assert not isinstance(places, Deny)
    assert {one.node for one in places} == {"a", "b"}


@pytest.mark.parametrize("selector", [{}, {"zone": "a"}, {"kubernetes.io/hostname": "h"}], ids=str)
def test_denial_counts_nodes_of_another_injection(selector: dict[str, str]) -> None:
    """However the pod's own constraints are evaluated: by class, or node by node."""
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=DRA))
    labels = {"zone": "a", "kubernetes.io/hostname": "h"}
    found = fleet(
        *(node(name, device(f"GPU-{name}"), labels={**labels, LABEL: "cuda"}) for name in ("a", "b")),
        node("c", device("GPU-c"), labels=labels),
        node("d", device("GPU-d"), labels={LABEL: "cuda"}),
    )
    verdict = decide(claim(raw_pod(raw_container(gpus=1), nodeSelector=selector), rules), found, LAX)
    assert isinstance(verdict, Deny)
    assert verdict.reason is Reason.NO_SUITABLE_NODE
    expected = "3 have another injection" if selector else "4 have another injection"
    assert expected in verdict.message
    assert "gpuwarden.io/injection" in verdict.hint


def test_evidence_of_other_nodes_does_not_hide_that_no_node_has_the_injection() -> None:
    """A pod that waits for evidence would wait for ever."""
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=DRA))
    verdict = decide(
        claim(raw_pod(raw_container(gpus=1)), rules), fleet(node("a", device("GPU-a"))), EvidencePolicy(True)
    )
    assert isinstance(verdict, Deny)
    assert verdict.reason is Reason.NO_SUITABLE_NODE


def test_explanation_names_the_injection_of_each_node() -> None:
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=DRA))
    asked = claim(raw_pod(raw_container(gpus=1)), rules)
    fits = {
        one.name: None if one.objection is None else one.objection.text_for(asked)
        for one in explain(asked, mixed(), LAX)
    }
    assert fits == {
        "claims": None,
        "plain": "another injection",
        "strange": "another injection",
        "variables": "another injection",
    }


def test_relabelled_node_counts_at_once() -> None:
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=DRA))
    asked = claim(raw_pod(raw_container(gpus=1)), rules)
    found = fleet(node("a", device("GPU-a")))
    assert isinstance(decide(asked, found, LAX), Deny)
    found.put(node("a", device("GPU-a"), labels={LABEL: "dra"}), NOW)
    assert not isinstance(decide(asked, found, LAX), Deny)


@pytest.mark.parametrize(
    ("injection", "reserve", "found"), [(DRA, BIND, None), (DRA, CREATE, DRA), (NVIDIA, BIND, NVIDIA)], ids=str
)
def test_nodes_without_the_label_are_those_of_kube_scheduler_with_dra_and_bind(
    injection: Injection, reserve: Reserve, found: Injection | None
) -> None:
    assert default_of_nodes(injection, reserve) is found


def test_claims_that_kube_scheduler_serves_get_nodes_without_reservations() -> None:
    known = Fleet(injection=None)
    for name, label in (("node-a", None), ("node-b", "native"), ("node-c", "dra"), ("node-d", "nvidia")):
        labels = {} if label is None else {LABEL: label}
        known.put(node(name, device(f"GPU-{name}"), labels=labels), NOW)
        known.set_evidence(name, evidence(name, HASH), NOW)
    asking = raw_pod(raw_container(gpus=1))
    served = claim(asking, ClaimRules(default_injection=DRA, default_reserve=BIND))
    assert [fit.name for fit in explain(served, known, LAX) if fit.fits] == ["node-a", "node-b"]
    assert [fit.name for fit in explain(claim(asking, ClaimRules(default_injection=DRA)), known, LAX) if fit.fits] == [
        "node-c"
    ]
    known.set_evidence("node-a", None, NOW)
    assert [fit.name for fit in explain(served, known, LAX) if fit.fits] == ["node-b"]


@pytest.mark.parametrize(
    ("own", "default", "found"),
    [
        (None, NVIDIA, "bind"),
        (None, DRA, "bind"),
        (NVIDIA, DRA, "bind"),
        (CUDA, NVIDIA, "bind"),
        (DRA, NVIDIA, None),
        (PLUGIN, NVIDIA, None),
        (None, PLUGIN, None),
    ],
    ids=str,
)
def test_gpus_are_chosen_at_creation_where_nothing_could_hold_them_later(
    own: Injection | None, default: Injection, found: str | None
) -> None:
    policy = HashPolicy("ml", injection=own)
    assert ClaimRules(hash_policy=policy, default_injection=default, default_reserve=BIND).reserve == found


@pytest.mark.parametrize(
    ("label", "stored", "default", "found", "native"),
    [
        (None, None, NVIDIA, NVIDIA, True),
        (None, None, None, None, True),
        ("nvidia", None, None, NVIDIA, False),
        ("plugin", None, NVIDIA, PLUGIN, False),
        ("dra", None, NVIDIA, DRA, False),
        # Reservations have not begun, and kube-scheduler allocates no more.
        ("nvidia", "native", None, None, False),
        (None, "native", NVIDIA, None, False),
        # Reservations have not ended.
        ("native", "dra", NVIDIA, DRA, False),
        (None, "nvidia", None, NVIDIA, False),
        ("native", "plugin", NVIDIA, PLUGIN, False),
        (None, "native", None, None, True),
        ("native", "native", NVIDIA, None, True),
        ("nvidia", "of a newer version", NVIDIA, None, False),
    ],
)
def test_injection_in_force_is_the_one_of_the_gpu_node(
    label: str | None, stored: str | None, default: Injection | None, found: Injection | None, *, native: bool
) -> None:
    one = Node("node-a", {} if label is None else {LABEL: label}, injection=stored)
    assert injection_in_force(one, default) is found
    assert takes_native(one, default) is native


@pytest.mark.parametrize(("stored", "is_denied"), [("native", True), ("dra", True), ("nvidia", False), (None, False)])
def test_node_takes_reservations_by_its_gpu_node_and_not_by_its_label(stored: str | None, *, is_denied: bool) -> None:
    one = evolve(node("node-a", device("GPU-1"), labels={LABEL: "nvidia"}), injection=stored)
    found = decide(claim(raw_pod(raw_container(gpus=1))), fleet(one), LAX)
    assert isinstance(found, Deny) is is_denied
