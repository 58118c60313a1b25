"""Evidence is valid from its start until just before its end."""

from datetime import datetime, timedelta

import pytest

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, evidence
from webhook.core.evidence import Evidence, EvidenceState, combined, next_change, state_of

MICROSECOND = timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("known", "state"),
    [
        pytest.param(None, "absent", id="nothing-known"),
        pytest.param(evidence("a"), "fresh", id="without-an-end"),
        pytest.param(evidence("a", until=NOW + SECOND), "fresh", id="one-second-left"),
        pytest.param(evidence("a", until=NOW + MICROSECOND), "fresh", id="one-microsecond-left"),
        pytest.param(evidence("a", until=NOW), "stale", id="expires-on-the-second"),
        pytest.param(evidence("a", until=NOW - SECOND), "stale", id="long-gone"),
        pytest.param(evidence("a", since=NOW), "fresh", id="begins-this-moment"),
        pytest.param(evidence("a", since=NOW + MICROSECOND), "absent", id="of-the-future"),
        pytest.param(evidence("a", since=NOW + SECOND, until=NOW), "absent", id="ends-before-it-begins"),
        pytest.param(Evidence("a", "", "static"), "absent", id="without-a-hash"),
        pytest.param(Evidence("a", "", "static", is_banned=True), "banned", id="banned-without-a-hash"),
        pytest.param(evidence("a", is_banned=True), "banned", id="banned"),
        pytest.param(evidence("a", is_banned=True, until=NOW), "banned", id="banned-and-over"),
        pytest.param(evidence("a", is_conflict=True), "conflict", id="in-conflict"),
        pytest.param(evidence("a", is_conflict=True, is_banned=True), "banned", id="banned-and-in-conflict"),
        pytest.param(evidence("a", is_conflict=True, until=NOW - SECOND), "conflict", id="in-conflict-and-over"),
    ],
)
@pytest.mark.defect("extender-2")
def test_evidence_is_stale_at_its_end(known: Evidence | None, state: str) -> None:
    assert state_of(known, NOW) is EvidenceState(state)


def test_state_values_do_not_change() -> None:
    assert [state.value for state in EvidenceState] == ["fresh", "stale", "absent", "banned", "conflict"]


@pytest.mark.parametrize(
    ("known", "moment"),
    [
        pytest.param(None, None, id="nothing-known"),
        pytest.param(evidence("a"), None, id="without-ends"),
        pytest.param(evidence("a", until=NOW + SECOND), NOW + SECOND, id="its-end"),
        pytest.param(evidence("a", since=NOW + SECOND, until=NOW + 2 * SECOND), NOW + SECOND, id="its-beginning"),
        pytest.param(evidence("a", since=NOW, until=NOW + 2 * SECOND), NOW + 2 * SECOND, id="it-has-begun"),
        pytest.param(evidence("a", until=NOW), None, id="it-has-ended"),
    ],
)
def test_next_change_is_the_next_start_or_end(known: Evidence | None, moment: datetime | None) -> None:
    assert next_change(known, NOW) == moment


def test_no_provider_gives_no_evidence() -> None:
    assert combined([]) is None


def test_evidence_of_one_provider_is_used_as_it_is() -> None:
    word = Evidence("a", HASH, "jwt-svid", NOW, NOW + SECOND, nonce_digest="n")
    assert combined([word]) is word


def test_combined_evidence_has_the_latest_start_and_the_earliest_end() -> None:
    early = Evidence("a", HASH, "static", since=NOW - 2 * SECOND, until=NOW + 5 * SECOND)
    late = Evidence("a", HASH, "jwt-svid", since=NOW - SECOND, until=NOW + 9 * SECOND, challenged=NOW - SECOND)
    assert combined([early, late]) == Evidence(
        "a",
        HASH,
        "jwt-svid+static",
        NOW - SECOND,
        NOW + 5 * SECOND,
        challenged=NOW - SECOND,
        oldest=NOW - 2 * SECOND,
    )


def test_open_end_does_not_extend_combined_evidence() -> None:
    open_end = Evidence("a", HASH, "static")
    ending = Evidence("a", HASH, "jwt-svid", since=NOW, until=NOW + SECOND)
    both = combined([open_end, ending])
    assert both is not None
    assert (both.since, both.until) == (NOW, NOW + SECOND)


def test_providers_that_disagree_prove_nothing() -> None:
    both = combined([evidence("a", HASH), evidence("a", OTHER_HASH)])
    assert state_of(both, NOW) is EvidenceState.CONFLICT


def test_one_ban_is_enough() -> None:
    both = combined([evidence("a", HASH), evidence("a", OTHER_HASH, is_banned=True)])
    assert state_of(both, NOW) is EvidenceState.BANNED


def test_two_providers_without_a_hash_prove_nothing() -> None:
    both = combined([Evidence("a", "", "jwt-svid"), Evidence("a", "", "static")])
    assert state_of(both, NOW) is EvidenceState.ABSENT


def test_hash_of_one_provider_and_none_of_another_conflict() -> None:
    both = combined([evidence("a", HASH), Evidence("a", "", "jwt-svid")])
    assert state_of(both, NOW) is EvidenceState.CONFLICT


def test_a_ban_without_a_hash_bans() -> None:
    both = combined([evidence("a", HASH), Evidence("a", "", "spire-server", is_banned=True)])
    assert state_of(both, NOW) is EvidenceState.BANNED


def test_combined_evidence_is_stale_if_one_part_is() -> None:
    both = combined([evidence("a", HASH), evidence("a", HASH, until=NOW)])
    assert state_of(both, NOW) is EvidenceState.STALE


def test_missing_required_provider_leaves_the_node_unproven() -> None:
    word = evidence("a", HASH, since=NOW, until=NOW + SECOND)
    assert state_of(combined([word], {"static"}), NOW) is EvidenceState.FRESH
    half = combined([word], {"static", "spire-server"})
    assert half is not None
    assert half.missing_sources == {"spire-server"}
    assert state_of(half, NOW) is EvidenceState.ABSENT
    assert combined([], {"static", "spire-server"}) is None


@pytest.mark.parametrize(
    ("word", "state"),
    [
        (evidence("a", HASH, is_banned=True), EvidenceState.BANNED),
        (evidence("a", HASH, is_conflict=True), EvidenceState.CONFLICT),
    ],
)
def test_ban_or_conflict_of_one_provider_counts_if_another_is_missing(word: Evidence, state: EvidenceState) -> None:
    assert state_of(combined([word], {"static", "jwt-svid"}), NOW) is state
