"""Evidence from agents, and all reasons to ignore an agent."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.builders import NOW, SECOND
from tests.evidence.doubles import agent
from webhook.core.agent_naming import naming_of
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.evidence.spire.attested import (
    AgentHistory,
    AgentRow,
    AgentRules,
    DistrustedAgents,
    by_node,
    combined_evidence,
    row_of,
)
from webhook.evidence.spire.spire_messages import AgentMessage

TTL = timedelta(hours=1)
MAX_AGE = timedelta(minutes=40)
SKEW = timedelta(seconds=5)
RULES = AgentRules(
    trust_domain="example.org",
    attestors=frozenset({"x509pop", "tpm"}),
    node=naming_of("x509pop:san:node-name", "node"),
    hash=naming_of("x509pop:san:attestation-hash", "hash"),
    agent_ttl=TTL,
    max_age=MAX_AGE,
    skew=SKEW,
)


def attested(ago: timedelta = timedelta(0), *args: Any, **members: Any) -> Any:
    """An agent that was attested that long ago."""
    return agent(*args, expires_at=NOW - ago + TTL, **members)


def rows_of(raws: Sequence[Any], rules: AgentRules = RULES) -> list[AgentRow]:
    read = (row_of(AgentMessage.parse(raw.SerializeToString()), rules) for raw in raws)
    return [row for row in read if row is not None]


def evidence_from(raws: Sequence[Any], now: datetime = NOW, rules: AgentRules = RULES) -> dict[str, Evidence | None]:
    rows = rows_of(raws, rules)
    doubts = AgentHistory(rules).distrusted(rows, now)
    return {node: combined_evidence(node, of_node, rules, doubts, now) for node, of_node in by_node(rows).items()}


def state(raws: Sequence[Any], now: datetime = NOW, rules: AgentRules = RULES) -> EvidenceState:
    return state_of(evidence_from(raws, now, rules).get("node-a"), now)


def test_evidence_is_dated_to_the_earliest_possible_attestation() -> None:
    """It ends at the time of attestation plus the maximum age; it begins early enough for slow clocks."""
    attested_at = NOW - timedelta(minutes=10)
    assert evidence_from([attested(timedelta(minutes=10))]) == {
        "node-a": Evidence("node-a", "aa11", "spire-server", attested_at - SKEW, attested_at + MAX_AGE)
    }


@pytest.mark.parametrize(
    ("ago", "state_then"),
    [
        pytest.param(timedelta(0), "fresh", id="attested-this-moment"),
        pytest.param(MAX_AGE - SECOND, "fresh", id="a-second-left"),
        pytest.param(MAX_AGE, "stale", id="as-old-as-it-may-be"),
        pytest.param(TTL - SECOND, "stale", id="svid-still-good"),
        pytest.param(TTL, "stale", id="svid-ended"),
        pytest.param(TTL + 99 * TTL, "stale", id="gone-for-days-and-never-pruned"),
    ],
)
def test_evidence_ends_by_age_before_the_svid_expires(ago: timedelta, state_then: str) -> None:
    assert state([attested(ago)]) is EvidenceState(state_then)


def test_evidence_does_not_outlive_its_svid() -> None:
    patient = evolve(RULES, max_age=2 * TTL)
    assert state([attested(TTL - SECOND)], rules=patient) is EvidenceState.FRESH
    assert state([attested(TTL)], rules=patient) is EvidenceState.STALE


@pytest.mark.parametrize(
    ("ahead", "state_then"),
    [
        pytest.param(SKEW, "fresh", id="within-the-skew"),
        pytest.param(SKEW + SECOND, "absent", id="past-the-skew"),
        pytest.param(23 * TTL, "absent", id="an-agent-ttl-of-a-day"),
    ],
)
def test_overlong_svid_proves_nothing(ahead: timedelta, state_then: str) -> None:
    assert state([attested(-ahead)]) is EvidenceState(state_then)


def test_overlong_svid_proves_nothing_later_either() -> None:
    """Within the last `agent_ttl` of its life it looks as if it had just been issued."""
    row = rows_of([attested(-23 * TTL)])
    watchfulness = AgentHistory(RULES)
    watchfulness.distrusted(row, NOW)
    later = NOW + 23 * TTL + SECOND
    assert combined_evidence("node-a", row, RULES, watchfulness.distrusted(row, later), later) is None
    renewed = rows_of([attested(-23 * TTL - SECOND)])
    assert combined_evidence("node-a", renewed, RULES, watchfulness.distrusted(renewed, later), later) is not None


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(attested(trust_domain="evil.org"), id="foreign-trust-domain"),
        pytest.param(attested(trust_domain="example.org.evil"), id="trust-domain-that-begins-alike"),
        pytest.param(attested(trust_domain="EXAMPLE.ORG"), id="trust-domain-in-other-case"),
        pytest.param(attested(trust_domain=""), id="no-trust-domain"),
        pytest.param(attested(attestor="join_token"), id="attestor-that-is-not-listed"),
        pytest.param(attested(attestor="k8s_psat"), id="another-attestor-that-is-not-listed"),
        pytest.param(attested(attestor=""), id="no-attestor"),
        pytest.param(attested(id="/spire/agent/join_token/x"), id="path-of-another-attestor"),
        pytest.param(attested(id="/workload"), id="path-of-no-agent"),
        pytest.param(attested(can_reattest=False), id="cannot-attest-again"),
        pytest.param(attested(serial=""), id="no-serial-number"),
        pytest.param(agent(expires_at=0), id="no-end"),
        pytest.param(agent(expires_at=-1), id="end-before-time"),
        pytest.param(agent(expires_at=2**62), id="end-after-time"),
        pytest.param(attested(selectors=[]), id="no-selectors"),
        pytest.param(attested(timedelta(0), "node-a", None), id="no-hash"),
        pytest.param(attested(timedelta(0), None, "aa11", id="/spire/agent/x509pop/x"), id="no-node"),
        pytest.param(attested(timedelta(0), "Node-A"), id="node-in-other-case"),
        pytest.param(attested(timedelta(0), "node-a "), id="node-with-a-blank"),
        pytest.param(attested(timedelta(0), ""), id="empty-node"),
        pytest.param(
            attested(selectors=[("tpm", "san:node-name:node-a"), ("tpm", "san:attestation-hash:aa11")]),
            id="right-selectors-of-another-type",
        ),
        pytest.param(
            attested(selectors=[("x509pop", "san:node-name-x:node-a"), ("x509pop", "san:attestation-hash:aa11")]),
            id="longer-key",
        ),
        pytest.param(attested(timedelta(0), "node-a", ""), id="empty-hash"),
        pytest.param(attested(timedelta(0), "node-a", "aa11 "), id="hash-with-a-blank"),
        pytest.param(attested(timedelta(0), "node-a", "aa11,bb22"), id="hash-with-a-comma"),
        pytest.param(attested(timedelta(0), "node-a", "aa11\n"), id="hash-with-a-line-end"),
    ],
)
def test_ignored_agents_prove_nothing(raw: Any) -> None:
    assert state([raw]) is EvidenceState.ABSENT


@pytest.mark.parametrize("hash", ["AA11", "Aa11", "sha256:aa11", "aa1"])
def test_hash_is_reported_unchanged(hash: str) -> None:
    """A pod that asks for `aa11` does not get a node with a similar hash."""
    (word,) = evidence_from([attested(timedelta(0), "node-a", hash)]).values()
    assert word is not None
    assert word.hash == hash


def test_agent_of_another_attestor_causes_no_conflict() -> None:
    foreign = attested(timedelta(0), "node-a", "bb22", attestor="k8s_psat", id="/spire/agent/k8s_psat/x")
    banned = attested(timedelta(0), "node-a", attestor="join_token", banned=True)
    assert state([attested(), foreign, banned]) is EvidenceState.FRESH


def other(*args: Any, **members: Any) -> Any:
    return attested(*args, id="/spire/agent/x509pop/other", **members)


NOTHING = timedelta(0)


@pytest.mark.parametrize(
    ("second", "state_then"),
    [
        pytest.param(other(NOTHING, "node-a", "aa11"), "fresh", id="they-agree"),
        pytest.param(other(NOTHING, "node-a", "bb22"), "conflict", id="another-hash"),
        pytest.param(other(NOTHING, "node-a", "AA11"), "conflict", id="same-hash-in-other-case"),
        pytest.param(other(NOTHING, "node-a", None), "conflict", id="no-hash"),
        pytest.param(other(TTL - SECOND, "node-a", "bb22"), "conflict", id="old-and-still-good"),
        pytest.param(other(TTL, "node-a", "bb22"), "fresh", id="over"),
        pytest.param(other(NOTHING, "node-a", "bb22", can_reattest=False), "conflict", id="cannot-attest-again"),
        pytest.param(other(-9 * TTL, "node-a", "bb22"), "conflict", id="lives-too-long"),
        pytest.param(other(NOTHING, "node-a", "aa11", banned=True), "banned", id="banned"),
        pytest.param(other(9 * TTL, "node-a", "bb22", banned=True), "banned", id="banned-long-ago"),
        pytest.param(
            other(
                selectors=[
                    ("x509pop", "san:node-name:node-b"),
                    ("x509pop", "san:node-name:node-a"),
                    ("x509pop", "san:attestation-hash:aa11"),
                ]
            ),
            "conflict",
            id="says-it-is-two-nodes",
        ),
    ],
)
def test_two_agents_on_one_node_must_agree(second: Any, state_then: str) -> None:
    for raws in ([attested(), second], [second, attested()]):
        assert state(raws) is EvidenceState(state_then)


def test_agent_with_two_hashes_is_a_conflict() -> None:
    selectors = [("san:node-name", "node-a"), ("san:attestation-hash", "aa11"), ("san:attestation-hash", "bb22")]
    assert state([attested(selectors=[("x509pop", ":".join(one)) for one in selectors])]) is EvidenceState.CONFLICT


def test_hash_and_node_come_from_the_same_agent() -> None:
    """Nothing cryptographic links two agents of one machine."""
    node_only = attested(NOTHING, "node-a", None)
    hash_only = other(NOTHING, None, "aa11")
    assert state([node_only, hash_only]) is EvidenceState.ABSENT


def test_newest_of_agreeing_agents_counts() -> None:
    (word,) = evidence_from([attested(timedelta(minutes=39)), other(timedelta(minutes=1))]).values()
    assert word is not None
    assert word.until == NOW - timedelta(minutes=1) + MAX_AGE


@pytest.mark.parametrize("expires_at", [0, -1, 2**62])
def test_ban_counts_without_a_valid_expiry(expires_at: int) -> None:
    rows = [agent(expires_at=expires_at, banned=True, id="/spire/agent/x509pop/banned"), attested()]
    assert state(rows) is EvidenceState.BANNED


def test_ban_affects_only_its_node() -> None:
    words = evidence_from([attested(banned=True), attested(NOTHING, "node-b", "bb22")])
    assert {node: state_of(word, NOW).value for node, word in words.items()} == {"node-a": "banned", "node-b": "fresh"}


def states_after(serials: Sequence[str], apart: timedelta) -> list[EvidenceState]:
    """The evidence of a node whose agent has these serial numbers one after the other."""
    watchfulness, found = AgentHistory(RULES), []
    for number, serial in enumerate(serials):
        now = NOW + number * apart
        rows = rows_of([agent(serial=serial, expires_at=now + TTL)])
        found.append(state_of(combined_evidence("node-a", rows, RULES, watchfulness.distrusted(rows, now), now), now))
    return found


def test_two_machines_with_one_key_are_detected_by_serial_numbers() -> None:
    """Each machine re-attests as soon as it sees the other's certificate in place of its own."""
    assert [one.value for one in states_after(["1", "2", "3", "4"], 5 * SECOND)] == [
        "fresh",
        "fresh",
        "fresh",
        "conflict",
    ]


@pytest.mark.parametrize(
    ("serials", "apart"),
    [
        pytest.param(["1", "1", "1", "1"], 5 * SECOND, id="no-change"),
        pytest.param(["1", "2", "3", "3"], 5 * SECOND, id="evicted-just-after-its-turn"),
        pytest.param(["1", "2", "3", "4"], TTL / 2, id="attested-when-it-is-time"),
    ],
)
def test_one_machine_is_not_detected_as_two(serials: Sequence[str], apart: timedelta) -> None:
    assert set(states_after(serials, apart)) == {EvidenceState.FRESH}


def test_shared_key_detection_ends_when_the_serials_settle() -> None:
    serials = ["1", "2", "3", "4", "4", "4", "4", "4"]
    found = states_after(serials, TTL / 16)
    assert found[3] is EvidenceState.CONFLICT
    assert found[-1] is EvidenceState.FRESH


def test_distrusted_agents_do_not_affect_other_nodes() -> None:
    rows = rows_of([attested()])
    doubts = DistrustedAgents(frozenset({"/spire/agent/x509pop/other"}))
    assert state_of(combined_evidence("node-a", rows, RULES, doubts, NOW), NOW) is EvidenceState.FRESH
