"""The decision: placements and their order, and the numbers and hints of denials. `test_fleet.py` compares it with a
brute-force scan."""

from typing import Any

import pytest

from tests import builders
from tests.builders import (
    HASH,
    NOW,
    OTHER_HASH,
    claim,
    device,
    evidence,
    expression,
    fleet,
    node,
    on_node,
    pod,
    raw_container,
    raw_pod,
    required_affinity,
    reservation,
    slot,
    term,
)
from webhook.core.claim import MAX_PROVEN_NODES, Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import MAX_PLACEMENTS, EvidencePolicy, decide, explain
from webhook.core.device import Device, DeviceUuid, Node, Slot, Taint
from webhook.core.fleet import Fleet
from webhook.core.nodes_asked import NodesAsked
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny

Raw = dict[str, Any]

LAX = EvidencePolicy()
STRICT = EvidencePolicy(is_always_required=True)
NVLINK = "nvlink=yes"


def places(asked: Claim, there: Fleet, policy: EvidencePolicy = LAX) -> list[tuple[str, list[str]]]:
    found = decide(asked, there, policy)
    assert not isinstance(found, Deny), found.sentence
    return [(place.node, [str(one) for one in place.slots]) for place in found]


def denial(asked: Claim, there: Fleet, policy: EvidencePolicy = LAX) -> Deny:
    found = decide(asked, there, policy)
    assert isinstance(found, Deny)
    return found


def gpus(count: int, *requirements: str, hashes: tuple[str, ...] = (), shared: bool = False) -> Claim:
    return Claim(ClaimRecord(gpus=count, requirements=requirements, hashes=hashes, shared=shared))


def mapped(*names: str, on: str = "node-a", shared: bool = False) -> Claim:
    return Claim(ClaimRecord(gpus=len(names), node=on, devices=names, shared=shared))


def hold(there: Fleet, *slots: Slot, id: str = "r-1", is_shared: bool = False) -> None:
    there.hold(reservation(*slots, id=id, is_shared=is_shared))


# Placements.


@pytest.mark.defect("assigner-17")
def test_free_gpus_are_found_for_every_set_of_held_gpus() -> None:
    there = fleet(node("node-a", *(device(f"GPU-{n}") for n in range(8))))
    hold(there, slot("GPU-0"))
    for count in range(1, 8):
        ((name, slots),) = places(gpus(count), there)
        assert (name, len(set(slots))) == ("node-a", count)
        assert "GPU-0/0" not in slots


def test_all_gpus_of_a_reservation_are_on_one_node() -> None:
    there = fleet(node("node-a", device("GPU-1")), node("node-b", device("GPU-2")))
    assert denial(gpus(2), there).causes == ("2 have fewer than 2 matching GPUs",)


def test_the_tightest_fit_comes_first() -> None:
    there = fleet(
        node("large", *(device(f"GPU-l{n}") for n in range(8))),
        node("small", device("GPU-s0"), device("GPU-s1")),
        node("middle", *(device(f"GPU-m{n}") for n in range(4))),
    )
    assert [name for name, _ in places(gpus(2), there)] == ["small", "middle", "large"]


def test_gpus_with_fewer_labels_are_chosen_first() -> None:
    there = fleet(node("node-a", device("GPU-1", NVLINK, "model=h100"), device("GPU-2", "model=h100"), device("GPU-3")))
    assert places(gpus(1), there) == [("node-a", ["GPU-3/0"])]
    assert places(gpus(1, "model=h100"), there) == [("node-a", ["GPU-2/0"])]
    assert places(gpus(1, NVLINK), there) == [("node-a", ["GPU-1/0"])]


def test_one_gpu_must_meet_all_requirements() -> None:
    there = fleet(node("node-a", device("GPU-1", NVLINK), device("GPU-2", "model=h100")))
    assert denial(gpus(1, NVLINK, "model=h100"), there).reason is Reason.NO_MATCHING_DEVICE


def test_number_of_placements_is_bounded() -> None:
    there = fleet(*(node(f"node-{n:02}", device(f"GPU-{n}")) for n in range(100)))
    assert len(places(gpus(1), there)) == MAX_PLACEMENTS == 8


def test_claim_without_gpus_gets_a_bounded_number_of_proven_nodes() -> None:
    there = fleet(*(node(f"node-{n:02}") for n in range(100)), proven={f"node-{n:02}": HASH for n in range(100)})
    found = places(gpus(0, hashes=(HASH,)), there)
    assert len(found) == MAX_PROVEN_NODES == 64
    assert {len(slots) for _, slots in found} == {0}


def test_node_with_any_of_the_hashes_fits() -> None:
    there = fleet(
        *(node(name, device(f"GPU-{name}")) for name in ("a", "b", "c")), proven={"a": HASH, "b": OTHER_HASH, "c": "x"}
    )
    assert {name for name, _ in places(gpus(1, hashes=(HASH, OTHER_HASH)), there)} == {"a", "b"}


def test_pod_without_a_hash_needs_evidence_if_the_policy_requires_it() -> None:
    there = fleet(node("a", device("GPU-a")), node("b", device("GPU-b")), proven={"b": OTHER_HASH})
    assert [name for name, _ in places(gpus(1), there, STRICT)] == ["b"]
    assert {name for name, _ in places(gpus(1), there, LAX)} == {"a", "b"}


def test_affinity_of_a_claim_without_gpus_has_bounded_size() -> None:
    names = [f"node-{n:02}" for n in range(100)]
    there = fleet(*(node(name) for name in names), proven=dict.fromkeys(names, HASH))
    for many in (1, 10, 32):
        some = required_affinity(*(term(expression("zone", "NotIn", str(n))) for n in range(many)))
        raw = raw_pod(annotations={"gpuwarden.io/required-hash": HASH}, affinity=some)
        assert len(places(claim(raw), there)) * many <= max(64, many)


# Sharing.


def test_shared_gpu_serves_only_claims_that_ask_to_share() -> None:
    there = fleet(node("node-a", device("GPU-1", shares=2)), node("node-b", device("GPU-2")))
    assert places(gpus(1), there) == [("node-b", ["GPU-2/0"])]
    assert places(gpus(1, shared=True), there) == [("node-a", ["GPU-1/0"])]


def test_shared_gpu_in_use_is_filled_first() -> None:
    there = fleet(node("node-a", device("GPU-1", shares=2), device("GPU-2", shares=2)))
    hold(there, slot("GPU-2", 0), is_shared=True)
    assert places(gpus(1, shared=True), there) == [("node-a", ["GPU-2/1"])]


def test_released_share_is_used_again() -> None:
    there = fleet(node("node-a", device("GPU-1", shares=3)))
    hold(there, slot("GPU-1", 0), id="r-1", is_shared=True)
    hold(there, slot("GPU-1", 2), id="r-2", is_shared=True)
    assert places(gpus(1, shared=True), there) == [("node-a", ["GPU-1/1"])]


def test_two_shares_of_one_pod_are_on_two_gpus() -> None:
    there = fleet(node("node-a", device("GPU-1", shares=4), device("GPU-2", shares=4)))
    assert places(gpus(2, shared=True), there) == [("node-a", ["GPU-1/0", "GPU-2/0"])]


# Placement maps.

RACK = fleet(
    node(
        "node-a",
        device("GPU-1", index=0, serial="1650"),
        device("GPU-2", index=1, serial="1651"),
        device("GPU-3", index=2, serial="1651"),
        labels={"gpu-node-name": "rack-1"},
    ),
    node("node-b", device("GPU-4", index=0)),
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(mapped("1", "0", on="rack-1"), ("node-a", ["GPU-2/0", "GPU-1/0"]), id="by-index-in-its-order"),
        pytest.param(mapped("GPU-3", on="rack-1"), ("node-a", ["GPU-3/0"]), id="by-uuid"),
        pytest.param(mapped("1650", on="rack-1"), ("node-a", ["GPU-1/0"]), id="by-serial"),
        pytest.param(mapped("0", on="node-b"), ("node-b", ["GPU-4/0"]), id="by-the-nodes-own-name"),
        pytest.param(mapped("0", on="node-a"), ("node-a", ["GPU-1/0"]), id="by-its-own-name-beside-a-label"),
    ],
)
def test_map_entry_selects_node_and_gpus(asked: Claim, expected: tuple[str, list[str]]) -> None:
    assert places(asked, RACK) == [expected]


@pytest.mark.parametrize(
    ("asked", "reason", "causes"),
    [
        pytest.param(
            mapped("0", on="nowhere"), Reason.NO_SUITABLE_NODE, ("2 are not selected by the pod",), id="no-such-node"
        ),
        pytest.param(
            mapped("7", on="rack-1"),
            Reason.NO_MATCHING_DEVICE,
            ("1 is not selected by the pod", "1 has no matching GPU"),
            id="no-such-gpu",
        ),
        pytest.param(
            mapped("1651", on="rack-1"),
            Reason.NO_MATCHING_DEVICE,
            ("1 is not selected by the pod", "1 has several GPUs that match one name in the map"),
            id="ambiguous-serial",
        ),
        pytest.param(
            mapped("GPU-1", "GPU-4", on="rack-1"),
            Reason.NO_MATCHING_DEVICE,
            ("1 is not selected by the pod", "1 has fewer than 2 matching GPUs"),
            id="a-gpu-of-another-node",
        ),
        pytest.param(
            mapped("0", on="rack-1", shared=True),
            Reason.NO_MATCHING_DEVICE,
            ("1 is not selected by the pod", "1 has no matching GPU"),
            id="shared-claim-for-an-exclusive-gpu",
        ),
    ],
)
def test_map_entry_without_matching_gpus_is_denied(asked: Claim, reason: Reason, causes: tuple[str, ...]) -> None:
    found = denial(asked, RACK)
    assert (found.reason, found.causes) == (reason, causes)


def test_map_entry_for_an_unknown_node_has_a_hint_to_correct_the_map() -> None:
    found = denial(mapped("0", on="nowhere"), RACK)
    assert "none has the label gpu-node-name=nowhere or that name; correct the map, or label the node" in found.sentence


def test_held_gpu_of_a_map_gives_no_free_device() -> None:
    there = fleet(node("node-a", device("GPU-1", index=0), device("GPU-2", index=1)))
    hold(there, slot("GPU-1"))
    found = denial(mapped("0", "1"), there)
    assert (found.reason, found.causes) == (Reason.NO_FREE_DEVICE, ("1 has fewer than 2 free GPUs",))


def test_map_does_not_override_the_node_selector() -> None:
    there = fleet(node("node-a", device("GPU-1", index=0), labels={"zone": "a"}))
    asked = Claim(mapped("0").record, NodesAsked(selector=(("zone", "b"),)))
    assert denial(asked, there).reason is Reason.NO_SUITABLE_NODE


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        pytest.param(("0", "GPU-1"), 1, id="index-and-uuid"),
        pytest.param(("0", "00"), 1, id="index-twice"),
        pytest.param(("1650", "GPU-1"), 1, id="serial-and-uuid"),
        pytest.param(("0", "GPU-1"), 4, id="shared"),
    ],
)
def test_gpu_named_twice_in_a_map_is_denied(names: tuple[str, ...], shares: int) -> None:
    there = fleet(node("node-a", device("GPU-1", index=0, serial="1650", shares=shares), device("GPU-2", index=1)))
    found = denial(mapped(*names, shared=shares > 1), there)
    assert (found.reason, found.causes) == (Reason.NO_MATCHING_DEVICE, ("1 has a GPU that the map names twice",))
    assert found.hint == "give each GPU one name in the line"


def test_map_name_that_matches_several_gpus_is_denied() -> None:
    there = fleet(node("node-a", device("GPU-1", index=0), device("GPU-2", index=1, serial="0")))
    found = denial(mapped("0"), there)
    assert (found.reason, found.causes) == (
        Reason.NO_MATCHING_DEVICE,
        ("1 has several GPUs that match one name in the map",),
    )
    assert found.hint == "name GPUs by UUID"
    assert places(mapped("GPU-2"), there) == [("node-a", ["GPU-2/0"])]


def test_explain_agrees_with_the_decision_for_maps() -> None:
    there = fleet(
        node("node-a", device("GPU-1", index=0), labels={"gpu-node-name": "rack-1"}),
        node("rack-1", device("GPU-2", index=0)),
    )
    asked = mapped("0", on="rack-1")
    assert [fit.name for fit in explain(asked, there, LAX) if fit.fits] == [name for name, _ in places(asked, there)]


def test_node_name_takes_precedence_over_the_logical_name_label() -> None:
    there = fleet(
        node("node-a", device("GPU-1", index=0)),
        node("node-b", device("GPU-2", index=0), labels={"gpu-node-name": "node-a"}),
        node("node-c", device("GPU-3", index=0), labels={"gpu-node-name": "node-a"}),
    )
    assert places(mapped("0", on="node-a"), there) == [("node-a", ["GPU-1/0"])]
    assert places(mapped("0", on="node-b"), there) == [("node-b", ["GPU-2/0"])]
    there.remove("node-c")
    there.remove("node-a")
    assert places(mapped("0", on="node-a"), there) == [("node-b", ["GPU-2/0"])]


# Denials.


def everything_wrong() -> Fleet:
    there = fleet(
        node("elsewhere", device("GPU-0"), labels={"zone": "b"}),
        *(
            node(name, device(f"GPU-{name}", "model=h100"), labels={"zone": "a"})
            for name in ("stale", "absent", "banned", "conflict", "other")
        ),
        node("dark", device("GPU-dark", "model=h100"), labels={"zone": "a"}, is_ready=False),
        node("cordoned", device("GPU-cordoned", "model=h100"), labels={"zone": "a"}, is_cordoned=True),
        node("tainted", device("GPU-tainted", "model=h100"), labels={"zone": "a"}, taints=[Taint("gpu")]),
        node("lesser", device("GPU-lesser"), labels={"zone": "a"}),
        node("busy", device("GPU-busy", "model=h100"), labels={"zone": "a"}),
        proven={
            "other": OTHER_HASH,
            **dict.fromkeys(("dark", "cordoned", "tainted", "lesser", "busy"), HASH),
        },
    )
    there.set_evidence("stale", evidence("stale", until=NOW), NOW)
    there.set_evidence("banned", evidence("banned", is_banned=True), NOW)
    there.set_evidence("conflict", evidence("conflict", is_conflict=True), NOW)
    hold(there, slot("GPU-busy"))
    return there


WANTED = Claim(ClaimRecord(gpus=1, requirements=("model=h100",), hashes=(HASH,)), NodesAsked(selector=(("zone", "a"),)))
OBJECTIONS = {
    "elsewhere": "not selected by the pod",
    "stale": "stale evidence",
    "absent": "no evidence",
    "banned": "banned",
    "conflict": "conflicting evidence",
    "other": "a different hash",
    "dark": "not ready",
    "cordoned": "cordoned",
    "tainted": "an untolerated taint",
    "lesser": "no matching GPU",
    "busy": "no free GPU",
}


def test_denial_counts_nodes_by_objection_and_has_a_hint() -> None:
    found = denial(WANTED, everything_wrong())
    assert found.reason is Reason.NO_FREE_DEVICE
    assert found.sentence == (
        "1 GPU with model=h100 on a node attested as sha256:aa11: 0 of 11 nodes fit: "
        "1 is not selected by the pod, 1 has stale evidence, 1 has no evidence, 1 is banned, "
        "1 has conflicting evidence, 1 has a different hash, 1 is not ready, 1 is cordoned, "
        "1 has an untolerated taint, 1 has no matching GPU, 1 has no free GPU; "
        "wait until GPUs are free, or ask for fewer"
    )
    assert found.causes == tuple(
        f"1 {'is' if text in ('not selected by the pod', 'banned', 'not ready', 'cordoned') else 'has'} {text}"
        for text in OBJECTIONS.values()
    )


def test_explain_gives_the_objection_of_each_node() -> None:
    fits = {fit.name: fit for fit in explain(WANTED, everything_wrong(), LAX)}
    assert list(fits) == sorted(OBJECTIONS)
    assert {name: fit.objection.text_for(WANTED) for name, fit in fits.items() if fit.objection} == OBJECTIONS


@pytest.mark.parametrize(
    ("gone", "reason", "hint"),
    [
        pytest.param((), Reason.NO_FREE_DEVICE, "wait until GPUs are free, or ask for fewer", id="no-free-gpu"),
        pytest.param(
            ("busy",),
            Reason.NODE_NOT_READY,
            "wait for the nodes, or tolerate their taints",
            id="node-with-gpus-unavailable",
        ),
        pytest.param(
            ("busy", "dark", "cordoned", "tainted"),
            Reason.NO_MATCHING_DEVICE,
            "ask for GPUs that a node has",
            id="no-matching-gpu",
        ),
        pytest.param(
            ("busy", "lesser"),
            Reason.NODE_NOT_READY,
            "wait for the nodes, or tolerate their taints",
            id="nodes-not-ready",
        ),
        pytest.param(
            ("busy", "lesser", "dark", "cordoned", "tainted"),
            Reason.NO_PROVEN_NODE,
            "ask for a hash that a node has proven, or have the node attested",
            id="no-proven-node",
        ),
        pytest.param(
            tuple(OBJECTIONS)[1:],
            Reason.NO_SUITABLE_NODE,
            "loosen the pod's nodeName, nodeSelector or node affinity",
            id="no-selected-node",
        ),
        pytest.param(
            tuple(OBJECTIONS),
            Reason.NO_PROVEN_NODE,
            "ask for a hash that a node has proven, or have the node attested",
            id="no-nodes",
        ),
    ],
)
def test_reason_is_the_last_check_that_any_node_reached(gone: tuple[str, ...], reason: Reason, hint: str) -> None:
    there = everything_wrong()
    for name in gone:
        there.remove(name)
    found = denial(WANTED, there)
    assert (found.reason, found.hint) == (reason, hint)


OUT = node("out", device("GPU-1", "model=h100", index=0), labels={"zone": "a"}, is_cordoned=True)
IN = node("in", device("GPU-2", index=0), labels={"zone": "a"})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (gpus(1, "model=h100"), Reason.NODE_NOT_READY),
        (gpus(2, "model=h100"), Reason.NO_MATCHING_DEVICE),
        (gpus(1, "model=b200"), Reason.NO_MATCHING_DEVICE),
        (Claim(gpus(1, "model=h100").record, NodesAsked.of(pod(nodeSelector={"zone": "b"}))), Reason.NO_SUITABLE_NODE),
        (
            Claim(
                gpus(1, "model=h100").record,
                NodesAsked.of(pod(affinity=required_affinity(on_node("out"), on_node("in")))),
            ),
            Reason.NODE_NOT_READY,
        ),
        (
            Claim(
                gpus(2, "model=h100").record,
                NodesAsked.of(pod(affinity=required_affinity(on_node("out"), on_node("in")))),
            ),
            Reason.NO_MATCHING_DEVICE,
        ),
        (mapped("0", on="out"), Reason.NODE_NOT_READY),
    ],
    ids=["has-it", "has-too-few", "has-another", "not-selected", "has-it-by-name", "has-too-few-by-name", "by-map"],
)
def test_unavailable_node_with_matching_gpus_gives_node_not_ready(asked: Claim, reason: Reason) -> None:
    assert denial(asked, fleet(OUT, IN)).reason is reason


def test_denial_without_a_hash_has_a_hint_about_require_evidence() -> None:
    found = denial(gpus(1), fleet(node("node-a", device("GPU-1"))), STRICT)
    assert (found.reason, found.hint) == (
        Reason.NO_PROVEN_NODE,
        "have the nodes attested; or, with --require-evidence asked, only pods with a hash need proven nodes",
    )


def test_status_code_is_403_without_a_proven_node_and_429_without_a_free_gpu() -> None:
    there = fleet(node("node-a", device("GPU-1")), proven={"node-a": HASH})
    assert denial(gpus(1, hashes=(OTHER_HASH,)), there).reason is Reason.NO_PROVEN_NODE
    hold(there, slot("GPU-1"))
    assert denial(gpus(1, hashes=(HASH,)), there).reason is Reason.NO_FREE_DEVICE


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"is_ready": False}, Reason.NODE_NOT_READY, id="not-ready"),
        pytest.param({"is_cordoned": True}, Reason.NODE_NOT_READY, id="cordoned"),
        pytest.param({"is_refused_for_plugin": True}, Reason.NODE_NOT_READY, id="device-plugin"),
        pytest.param({"taints": [Taint("gpu", effect="NoExecute")]}, Reason.NODE_NOT_READY, id="tainted"),
    ],
)
@pytest.mark.defect("assigner-10")
def test_unavailable_node_is_never_chosen(members: Raw, reason: Reason) -> None:
    assert denial(gpus(1), fleet(node("node-a", device("GPU-1"), **members))).reason is reason


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        pytest.param({"nodeName": "node-b"}, ["node-b"], id="node-name"),
        pytest.param({"nodeSelector": {"zone": "a"}}, ["node-a"], id="node-selector"),
        pytest.param({"nodeSelector": {"gpu-node-name": "rack-2"}}, ["node-b"], id="logical-name"),
        pytest.param({"affinity": required_affinity(on_node("node-b"))}, ["node-b"], id="name-field"),
        pytest.param(
            {"affinity": required_affinity(on_node("node-b"), on_node("node-a"))}, ["node-a", "node-b"], id="two-names"
        ),
        pytest.param(
            {"affinity": required_affinity(term(fields=[expression("metadata.name", "NotIn", "node-a")]))},
            ["node-b"],
            id="all-names-but-one",
        ),
        pytest.param(
            {"affinity": required_affinity(term(expression("zone", "NotIn", "a")))}, ["node-b"], id="all-zones-but-one"
        ),
    ],
)
def test_pod_constraints_limit_the_nodes(spec: Raw, names: list[str]) -> None:
    there = fleet(
        node("node-a", device("GPU-1"), labels={"zone": "a"}),
        node("node-b", device("GPU-2"), labels={"zone": "b", "gpu-node-name": "rack-2"}),
    )
    assert sorted(name for name, _ in places(claim(raw_pod(raw_container(gpus=1), **spec)), there)) == names


def test_decision_holds_no_slots() -> None:
    there = fleet(node("node-a", device("GPU-1")))
    assert places(gpus(1), there) == places(gpus(1), there) == [("node-a", ["GPU-1/0"])]
    assert builders.is_slot_free(there, slot("GPU-1"))


def test_number_of_nodes_checked_one_by_one_is_bounded() -> None:
    """A pod that selects by node names, or by labels with a value per node, must not delay other reviews."""
    count = 25_000
    there = fleet(*(node(f"node-{n}", device(f"GPU-{n}"), labels={"rack": f"r{n}"}) for n in range(count)))
    some = required_affinity(
        term(
            expression("rack", "DoesNotExist"),
            expression("rack", "Exists"),
            fields=[expression("metadata.name", "NotIn", "node-0")],
        )
    )
    found = decide(claim(raw_pod(raw_container(gpus=1), affinity=some)), there, EvidencePolicy())
    assert isinstance(found, Deny)
    assert found.reason is Reason.NO_SUITABLE_NODE
    assert found.causes == (f"{count} are not selected by the pod",)


def test_replicas_prefer_different_equal_nodes_and_devices() -> None:
    chosen = set()
    for turn in range(4):
        fleet = Fleet(turn)
        for name in ("node-a", "node-b", "node-c", "node-d"):
            devices = tuple(Device(DeviceUuid(f"{name}-{k}")) for k in range(4))
            fleet.put(Node(name, is_ready=True, devices=devices), NOW)
        placements = decide(Claim(ClaimRecord(gpus=1)), fleet, EvidencePolicy())
        assert not isinstance(placements, Deny)
        assert {one.node for one in placements} == {"node-a", "node-b", "node-c", "node-d"}
        chosen.add((placements[0].node, placements[0].slots[0].uuid[-1]))
    assert len(chosen) == 4
