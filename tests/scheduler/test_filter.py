"""Which nodes fit a pod, and their scores."""

from typing import Any

import pytest

from tests import builders
from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, device, node, raw_container, raw_pod, reservation, slot
from webhook.core.claim import Claim
from webhook.core.decide import ClaimSearch, EvidencePolicy, Objection
from webhook.core.device import Taint
from webhook.core.extender_wire import FilterResult, is_from_us
from webhook.core.fleet import Fleet
from webhook.scheduler import filter as node_filter
from webhook.scheduler.extender import count_rejections
from webhook.scheduler.filter import REFUSALS, NodeQuery, filter_nodes, scores

ASKED, ALL = EvidencePolicy(), EvidencePolicy(is_always_required=True)
NAMES = ("node-a", "node-b", "node-c", "node-nowhere")
DIFFERS, ABSENT, FEWER_FREE, FEWER_MATCHING = (
    REFUSALS[one] for one in (Objection.OTHER_HASH, Objection.ABSENT, Objection.FEWER_FREE, Objection.FEWER_MATCHING)
)


def three_nodes() -> Fleet:
    """`node-a` has 4 GPUs and the right hash, `node-b` 1 GPU and another hash, `node-c` no GPU and no evidence."""
    return builders.fleet(
        node("node-a", *(device(f"GPU-a{k}", "model=h100") for k in range(4))),
        node("node-b", device("GPU-b0", "model=l4")),
        node("node-c"),
        proven={"node-a": HASH, "node-b": OTHER_HASH},
    )


def claim(*hashes: str, gpus: int = 0, **members: Any) -> Claim:
    annotations = {"gpuwarden.io/required-hash": ",".join(hashes)} if hashes else {}
    return builders.claim(raw_pod(raw_container(gpus=gpus or None), annotations=annotations, **members))


def filtered(query: NodeQuery | None, fleet: Fleet | None = None, policy: EvidencePolicy = ASKED) -> FilterResult:
    found = filter_nodes(query, NAMES, fleet or three_nodes(), policy)
    lists = [*found.passed, *found.failed, *found.unresolvable]
    assert sorted(lists) == sorted(NAMES)  # each node is in exactly one
    return found


@pytest.mark.defect("extender-4")
@pytest.mark.parametrize("policy", [ASKED, ALL])
def test_a_pod_without_a_claim_passes_everywhere(policy: EvidencePolicy) -> None:
    assert filtered(None, policy=policy).passed == frozenset(NAMES)


@pytest.mark.defect("extender-5")
def test_missing_evidence_is_not_resolvable_by_preemption() -> None:
    """Preemption cannot help, so the scheduler must not try it."""
    found = filtered(NodeQuery(claim(HASH)))
    assert found.passed == {"node-a"}
    assert found.failed == {}
    assert found.unresolvable == {"node-b": DIFFERS, "node-c": ABSENT, "node-nowhere": ABSENT}


@pytest.mark.parametrize("other", ["SHA256:AA11", "sha256:aa1", "sha256:aa11x"])
def test_a_hash_is_compared_byte_for_byte(other: str) -> None:
    assert filtered(NodeQuery(claim(other))).passed == frozenset()


def test_one_of_several_hashes_is_enough() -> None:
    assert filtered(NodeQuery(claim(HASH, OTHER_HASH))).passed == {"node-a", "node-b"}


@pytest.mark.defect("extender-2")
@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"until": NOW}, Objection.STALE),
        ({"since": NOW + SECOND, "until": NOW + 60 * SECOND}, Objection.ABSENT),
        ({"is_banned": True}, Objection.BANNED),
        ({"is_conflict": True}, Objection.CONFLICT),
    ],
    ids=["older than its limit", "of the future", "banned", "in conflict"],
)
def test_invalid_evidence_counts_as_none(members: Raw, said: Objection) -> None:
    fleet = three_nodes()
    fleet.set_evidence("node-a", builders.evidence("node-a", HASH, **members), NOW)
    found = filtered(NodeQuery(claim(HASH)), fleet)
    assert found.passed == frozenset()
    assert found.unresolvable["node-a"] == REFUSALS[said]


def test_too_few_free_gpus_is_resolvable_by_preemption() -> None:
    fleet = three_nodes()
    fleet.hold(reservation(*(slot(f"GPU-a{k}") for k in range(3))))
    found = filtered(NodeQuery(claim(HASH, gpus=2)), fleet)
    assert found.failed == {"node-a": FEWER_FREE}
    found = filtered(NodeQuery(claim(HASH, gpus=5)), fleet)
    assert found.failed == {}
    assert found.unresolvable["node-a"] == FEWER_MATCHING


def test_gpus_of_nodes_without_known_devices_are_left_to_the_scheduler() -> None:
    fleet = three_nodes()
    fleet.set_evidence("node-c", builders.evidence("node-c", HASH), NOW)
    assert filtered(NodeQuery(claim(HASH, gpus=1)), fleet).passed == {"node-a", "node-c"}
    labelled = claim(HASH, gpus=1, labels={"gpuwarden.io/gpu.model": "h100"})
    found = filtered(NodeQuery(labelled), fleet)
    assert found.passed == {"node-a"}
    assert found.unresolvable["node-c"] == FEWER_MATCHING


def test_plain_gpu_claim_passes_every_node_unless_evidence_is_always_required() -> None:
    """Pods that have not opted in are kept from no GPU."""
    assert filtered(NodeQuery(claim(gpus=9))).passed == frozenset(NAMES)
    found = filtered(NodeQuery(claim(gpus=1)), policy=ALL)
    assert found.passed == {"node-a", "node-b"}
    assert found.unresolvable == {"node-c": ABSENT, "node-nowhere": ABSENT}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"is_ready": False}, "node is not ready"),
        ({"is_cordoned": True}, "node is cordoned"),
        ({"taints": [Taint("a")]}, "node has a taint that the pod does not tolerate"),
    ],
)
def test_filter_checks_the_conditions_of_a_node(members: Raw, said: str) -> None:
    fleet = builders.fleet(node("node-a", **members), proven={"node-a": HASH})
    assert filtered(NodeQuery(claim(HASH)), fleet).unresolvable["node-a"].text == said


def test_pod_with_a_reservation_fits_only_its_node() -> None:
    found = filtered(NodeQuery(claim(HASH, gpus=1), reserved="node-a", is_recorded=True))
    assert found.passed == {"node-a"}
    assert set(found.unresolvable.values()) == {node_filter.RESERVED_ELSEWHERE}


@pytest.mark.defect("extender-6")
def test_reserved_node_without_evidence_is_refused() -> None:
    fleet = three_nodes()
    fleet.set_evidence("node-a", None, NOW)
    found = filtered(NodeQuery(claim(HASH, gpus=1), reserved="node-a", is_recorded=True), fleet)
    assert found.passed == frozenset()
    assert found.unresolvable["node-a"] == ABSENT


def test_recorded_pod_is_filtered_by_evidence_alone() -> None:
    fleet = builders.fleet(node("node-a", is_cordoned=True), node("node-b"), proven={"node-a": HASH})
    assert filtered(NodeQuery(claim(HASH), is_recorded=True), fleet).passed == {"node-a"}


def test_mapped_pod_fits_its_mapped_node_only() -> None:
    owners = [builders.stateful_set()]
    mapped = {"gpuwarden.io/gpu-map": "0=node-a:GPU-a1"}
    query = NodeQuery(builders.claim(raw_pod(annotations=mapped, owners=owners)))
    fleet = three_nodes()
    assert filtered(query, fleet).passed == {"node-a"}
    fleet.hold(reservation(slot("GPU-a1")))
    assert filtered(query, fleet).failed == {"node-a": FEWER_FREE}


def test_mapped_pod_fits_a_node_without_known_devices() -> None:
    """Without webhooks no GPU is reserved: the map selects the node only."""
    fleet = builders.fleet(node("node-a"), node("node-b", labels={"gpu-node-name": "hall-1"}), node("node-c"))
    for name, meant in (("node-a", "node-a"), ("hall-1", "node-b")):
        mapped = {"gpu-scheduling-map": f"0={name}:0,3"}
        query = NodeQuery(builders.claim(raw_pod(annotations=mapped, owners=[builders.stateful_set()])))
        assert filtered(query, fleet).passed == {meant}
        assert dict(scores(query, NAMES, fleet, ASKED))[meant] == 0


@pytest.mark.parametrize("policy", [ASKED, ALL])
def test_ordinal_without_a_line_fits_no_node(policy: EvidencePolicy) -> None:
    mapped = {"gpu-scheduling-map": "7=node-a:0"}
    query = NodeQuery(builders.claim(raw_pod(annotations=mapped, owners=[builders.stateful_set()])))
    found = filtered(query, policy=policy)
    messages = {name: refusal.message for name, refusal in found.unresolvable.items()}
    assert messages == dict.fromkeys(NAMES, "the placement map has no line for ordinal 0 (gpuwarden: NotInMap)")
    assert count_rejections(found) == {"the placement map has no line for ordinal": len(NAMES)}
    assert dict(scores(query, NAMES, three_nodes(), policy)) == dict.fromkeys(NAMES, 0)


ODD_EVIDENCE: dict[int, Raw] = {1: {"until": NOW}, 2: {"is_banned": True}, 3: {"is_conflict": True}}


def varied() -> Fleet:
    """Nodes of every kind, several of each."""
    fleet = Fleet()
    for number in range(240):
        name = f"node-{number}"
        devices = (device(f"GPU-{number}-{k}", f"model=m{number % 2}") for k in range(number % 4))
        labels = {"zone": f"z{number % 3}", "kubernetes.io/hostname": name}
        taints = [Taint("a")] if number % 7 == 0 else []
        fleet.put(node(name, *devices, labels=labels, is_ready=number % 11 != 0, taints=taints), NOW)
        if number % 5:
            members = ODD_EVIDENCE.get(number % 31, {})
            fleet.set_evidence(name, builders.evidence(name, HASH if number % 2 else OTHER_HASH, **members), NOW)
        if number % 13 == 1:
            fleet.hold(reservation(slot(f"GPU-{number}-0"), id=f"r{number}", node=name))
    return fleet


@pytest.mark.parametrize("is_recorded", [False, True], ids=["new", "recorded"])
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"gpus": 1},
        {"gpus": 2, "nodeSelector": {"zone": "z1"}},
        {"gpus": 1, "labels": {"gpuwarden.io/gpu.model": "m1"}},
        {"tolerations": [{"operator": "Exists"}]},
        {"nodeSelector": {"kubernetes.io/hostname": "node-9"}},
        {"affinity": builders.required_affinity(builders.on_node("node-9"), builders.on_node("node-11"))},
        {"nodeName": "node-9"},
    ],
    ids=str,
)
def test_grouped_answers_equal_answers_for_each_node(members: Raw, *, is_recorded: bool) -> None:
    """Checked against an answer for each node alone."""
    fleet, asked = varied(), claim(HASH, **members)
    question = ClaimSearch(asked, fleet, ASKED)
    expected = {
        name: question.evidence_objection(indexed) if is_recorded else question.fit(indexed).objection
        for name, indexed in fleet.indexed_nodes.items()
    }
    for name, indexed in fleet.indexed_nodes.items():
        if not indexed.node.devices and not asked.requirements and expected[name] is Objection.FEWER_MATCHING:
            expected[name] = None
    found = filter_nodes(NodeQuery(asked, is_recorded=is_recorded), fleet.indexed_nodes, fleet, ASKED)
    assert found.passed == {name for name, objection in expected.items() if objection is None}
    assert found.passed
    refused = {name: REFUSALS[objection] for name, objection in expected.items() if objection is not None}
    assert {**found.failed, **found.unresolvable} == refused


def test_node_offered_twice_gets_the_same_answer() -> None:
    assert filter_nodes(NodeQuery(claim(HASH)), ("node-a", "node-a"), three_nodes(), ASKED).passed == {"node-a"}


@pytest.mark.parametrize("objection", Objection, ids=lambda one: one.name)
def test_each_objection_has_a_message_that_names_no_node_gpu_or_age(objection: Objection) -> None:
    """The messages are the same for all nodes: they contain nothing that differs between nodes."""
    message = REFUSALS[objection].message
    assert "{" not in message
    assert not any(letter.isdigit() for letter in message)
    assert is_from_us(f"0/3 nodes are available: 3 {message}.")


@pytest.mark.parametrize(
    ("objection", "message"),
    [
        (Objection.OTHER_HASH, "attestation hash differs from the required one (gpuwarden: NoProvenNode)"),
        (Objection.FEWER_FREE, "too few free GPUs (gpuwarden: NoFreeDevice)"),
        (Objection.FEWER_MATCHING, "too few matching GPUs (gpuwarden: NoMatchingDevice)"),
        (Objection.CORDONED, "node is cordoned (gpuwarden: NodeNotReady)"),
        (Objection.NOT_SELECTED, "not selected by the pod (gpuwarden: NoSuitableNode)"),
    ],
    ids=["other-hash", "fewer-free", "fewer-matching", "cordoned", "not-selected"],
)
def test_message_of_a_refusal_ends_with_its_reason(objection: Objection, message: str) -> None:
    assert REFUSALS[objection].message == message


def test_tightest_fit_scores_highest() -> None:
    fleet = builders.fleet(
        *(node(f"node-{n}", *(device(f"GPU-{n}-{k}") for k in range(n))) for n in (1, 2, 4, 20)),
        proven={f"node-{n}": HASH for n in (1, 2, 4, 20)},
    )
    names = ("node-20", "node-4", "node-2", "node-1", "node-nowhere")
    assert scores(NodeQuery(claim(HASH, gpus=2)), names, fleet, ASKED) == [
        ("node-20", 0),
        ("node-4", 8),
        ("node-2", 10),
        ("node-1", 0),
        ("node-nowhere", 0),
    ]


def test_scores_for_pods_without_gpus_prefer_proven_nodes() -> None:
    assert scores(NodeQuery(claim(HASH)), NAMES, three_nodes(), ASKED) == [
        ("node-a", 10),
        ("node-b", 0),
        ("node-c", 0),
        ("node-nowhere", 0),
    ]
    assert scores(None, NAMES, three_nodes(), ASKED) == [(name, 0) for name in NAMES]
    assert scores(NodeQuery(claim(gpus=1)), NAMES, three_nodes(), ASKED) == [(name, 0) for name in NAMES]
    held = NodeQuery(claim(HASH, gpus=1), reserved="node-a", is_recorded=True)
    assert dict(scores(held, NAMES, three_nodes(), ASKED)) == {
        "node-a": 10,
        "node-b": 0,
        "node-c": 0,
        "node-nowhere": 0,
    }
