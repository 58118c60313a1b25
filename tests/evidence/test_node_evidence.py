"""NodeEvidence objects: what is written is parsed unchanged, and a missing field proves nothing."""

from datetime import timedelta
from typing import Any

import pytest

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.evidence.node_evidence import (
    NodeEvidence,
    UnreadableEvidenceError,
    entry_in,
    is_due,
    new_node_evidence,
    with_entries,
)

HOUR = timedelta(hours=1)
PROOF = Evidence("node-a", HASH, "jwt-svid", NOW, NOW + HOUR, nonce_digest="n1", challenged=NOW - SECOND)
SAID = "2026-03-02T12:00:00Z"


def raw(**sources: Any) -> Raw:
    return {"metadata": {"name": "node-a"}, "status": {"sources": {k.replace("_", "-"): v for k, v in sources.items()}}}


def entry(**members: Any) -> Raw:
    return {"hash": HASH, "banned": False, "conflict": False, **members}


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(PROOF, id="proof"),
        pytest.param(Evidence("node-a", HASH, "static"), id="without-ends"),
        pytest.param(Evidence("node-a", "", "spire-server", is_banned=True), id="banned"),
        pytest.param(Evidence("node-a", HASH, "static", is_conflict=True), id="conflict"),
        pytest.param(Evidence("node-a", HASH, "spire-server", NOW, NOW + timedelta(microseconds=7)), id="microseconds"),
    ],
)
def test_written_evidence_is_parsed_unchanged(one: Evidence) -> None:
    written = with_entries(new_node_evidence("node-a"), {one.source: one})
    assert NodeEvidence.parse(written) == NodeEvidence("node-a", {one.source: one})
    assert NodeEvidence.parse(written).combined_evidence == one


def test_written_object_has_the_documented_form() -> None:
    assert with_entries(new_node_evidence("node-a"), {"jwt-svid": PROOF}) == {
        "apiVersion": "gpuwarden.io/v1alpha1",
        "kind": "NodeEvidence",
        "metadata": {"name": "node-a", "labels": {"app.kubernetes.io/managed-by": "gpuwarden"}},
        "status": {
            "source": "jwt-svid",
            "hash": HASH,
            "since": SAID,
            "until": "2026-03-02T13:00:00Z",
            "banned": False,
            "conflict": False,
            "sources": {
                "jwt-svid": {
                    "hash": HASH,
                    "since": SAID,
                    "until": "2026-03-02T13:00:00Z",
                    "nonceDigest": "n1",
                    "challenged": "2026-03-02T11:59:59Z",
                    "banned": False,
                    "conflict": False,
                }
            },
        },
    }


def test_each_source_has_its_own_entry() -> None:
    both = with_entries(
        raw(jwt_svid=entry(since=SAID, until=SAID)), {"static": Evidence("node-a", OTHER_HASH, "static")}
    )
    assert set(both["status"]["sources"]) == {"jwt-svid", "static"}
    assert (both["status"]["source"], both["status"]["conflict"]) == ("jwt-svid+static", True)
    alone = with_entries(both, {"static": None})
    assert alone["status"]["sources"] == raw(jwt_svid=entry(since=SAID, until=SAID))["status"]["sources"]
    assert (alone["status"]["source"], alone["status"]["conflict"]) == ("jwt-svid", False)


def test_entry_replaces_the_old_one_completely() -> None:
    banned = raw(static=entry(banned=True, since=SAID, until=SAID))
    written = with_entries(banned, {"static": Evidence("node-a", HASH, "static")})
    assert written["status"]["sources"] == {"static": entry()}


def test_object_without_entries_has_no_evidence() -> None:
    empty = with_entries(raw(static=entry()), {"static": None})
    assert empty["status"] == {"sources": {}}
    assert NodeEvidence.parse(empty).combined_evidence is None
    assert NodeEvidence.parse({"metadata": {"name": "node-a"}}).combined_evidence is None


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"static": {}}, id="nothing"),
        pytest.param({"static": {"hash": HASH, "conflict": False}}, id="no banned field"),
        pytest.param({"static": {"hash": HASH, "banned": False}}, id="no conflict field"),
        pytest.param({"static": entry(hash=None)}, id="no hash"),
        pytest.param({"static": entry(hash="")}, id="empty hash"),
        pytest.param({"static": entry(banned="no")}, id="a string for a boolean"),
        pytest.param({"jwt_svid": entry(since=SAID)}, id="no until"),
        pytest.param({"jwt_svid": entry(until=SAID)}, id="no since"),
        pytest.param({"jwt_svid": entry(since=SAID, until="2026-03-02T12:00:00")}, id="until without a time zone"),
        pytest.param({"jwt_svid": entry(since=SAID, until=5)}, id="a number for until"),
        pytest.param({"static": None}, id="null"),
        pytest.param({"static": entry(), "jwt_svid": {}}, id="one of two"),
    ],
)
def test_missing_fields_prove_nothing(entries: Raw) -> None:
    with pytest.raises(UnreadableEvidenceError):
        NodeEvidence.parse(raw(**entries))


END_OF_TIME = "9999-12-31T23:59:59Z"


@pytest.mark.parametrize("member", ["since", "challenged"])
@pytest.mark.parametrize("moment", [END_OF_TIME, "0001-01-01T00:00:00Z"])
def test_time_out_of_range_proves_nothing(member: str, moment: str) -> None:
    said = entry(**{"since": SAID, "until": END_OF_TIME, "nonceDigest": "d"} | {member: moment})
    with pytest.raises(UnreadableEvidenceError, match="with a time out of range"):
        NodeEvidence.parse(raw(jwt_svid=said))


def test_ban_with_a_time_out_of_range_is_a_ban() -> None:
    said = raw(jwt_svid=entry(banned=True, since=END_OF_TIME, until=END_OF_TIME))
    (one,) = NodeEvidence.parse(said).sources.values()
    assert (one.is_banned, one.since) == (True, None)


def test_static_evidence_may_have_no_expiry() -> None:
    assert NodeEvidence.parse(raw(static=entry(since="0001-01-01T00:00:00Z", until=END_OF_TIME))).sources


def test_readable_entry_is_found_beside_an_unreadable_one() -> None:
    both = raw(static=entry(), jwt_svid={})
    assert entry_in(both, "static") == Evidence("node-a", HASH, "static")
    assert (entry_in(both, "jwt-svid"), entry_in(both, "spire-server")) == (None, None)
    assert "hash" not in with_entries(both, {"static": Evidence("node-a", HASH, "static")})["status"]


def test_disagreeing_sources_prove_nothing() -> None:
    both = NodeEvidence.parse(raw(static=entry(), jwt_svid=entry(hash=OTHER_HASH, since=SAID, until=SAID)))
    assert state_of(both.combined_evidence, NOW) is EvidenceState.CONFLICT


ENDING = Evidence("node-a", HASH, "spire-server", NOW, NOW + HOUR)


def lasting(minutes: float, since: float = 0) -> Evidence:
    minute = timedelta(minutes=1)
    return Evidence("node-a", HASH, "spire-server", NOW + since * minute, NOW + minutes * minute)


@pytest.mark.parametrize(
    ("have", "want", "after", "due"),
    [
        pytest.param(None, None, 0, False, id="nothing-and-nothing"),
        pytest.param(None, ENDING, 0, True, id="new"),
        pytest.param(ENDING, None, 0, True, id="gone"),
        pytest.param(ENDING, ENDING, 0, False, id="the-same"),
        pytest.param(ENDING, lasting(60, since=1), 0, True, id="another-beginning"),
        pytest.param(ENDING, lasting(59), 0, True, id="an-earlier-end"),
        pytest.param(ENDING, lasting(61, since=1), 1, False, id="a-little-longer"),
        pytest.param(ENDING, lasting(89, since=29), 29, False, id="not-yet-half"),
        pytest.param(ENDING, lasting(90, since=30), 30, True, id="half-is-over"),
        pytest.param(ENDING, lasting(150, since=90), 90, True, id="it-has-ended"),
        pytest.param(ENDING, Evidence("node-a", HASH, "spire-server", NOW), 0, True, id="without-until"),
        pytest.param(ENDING, Evidence("node-a", OTHER_HASH, "spire-server", NOW, NOW + HOUR), 0, True, id="hash"),
        pytest.param(
            ENDING, Evidence("node-a", HASH, "spire-server", NOW, NOW + HOUR, is_banned=True), 0, True, id="ban"
        ),
        pytest.param(PROOF, Evidence("node-a", HASH, "jwt-svid", NOW, NOW + HOUR, "n2"), 0, True, id="another-proof"),
    ],
)
def test_evidence_is_written_on_change_or_at_half_its_life(
    have: Evidence | None, want: Evidence | None, after: float, due: bool
) -> None:
    assert is_due(have, want, now=NOW + after * 60 * SECOND) is due
