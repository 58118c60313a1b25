"""Verdicts, and their texts in responses."""

import pytest

from webhook.core.reasons import EVENTS_ONLY, STATUS_CODES, Reason
from webhook.core.verdict import Admit, Deny, plain


def test_every_reason_to_deny_has_a_status_code() -> None:
    assert set(Reason) - set(STATUS_CODES) == {Reason.ADMITTED, Reason.NOT_ASKED, Reason.QUEUED} | EVENTS_ONLY


@pytest.mark.parametrize(
    ("reason", "word", "code"),
    [
        pytest.param(Reason.INVALID_POD, "InvalidPod", 403, id="invalid-pod"),
        pytest.param(Reason.NOT_REVIEWED, "NotReviewed", 403, id="not-reviewed"),
        pytest.param(Reason.INJECTION_CONFLICT, "InjectionConflict", 403, id="injection-conflict"),
        pytest.param(Reason.NO_SUITABLE_NODE, "NoSuitableNode", 403, id="no-suitable-node"),
        pytest.param(Reason.NO_PROVEN_NODE, "NoProvenNode", 403, id="no-proven-node"),
        pytest.param(Reason.NODE_NOT_READY, "NodeNotReady", 429, id="node-not-ready"),
        pytest.param(Reason.NO_MATCHING_DEVICE, "NoMatchingDevice", 429, id="no-matching-device"),
        pytest.param(Reason.NO_FREE_DEVICE, "NoFreeDevice", 429, id="no-free-device"),
        pytest.param(Reason.NAMESPACE_FULL, "NamespaceFull", 429, id="namespace-full"),
        pytest.param(Reason.NOT_RESERVED, "NotReserved", 403, id="not-reserved"),
        pytest.param(Reason.FORGED, "Forged", 403, id="forged"),
        pytest.param(Reason.GPU_WITHOUT_CLAIM, "GpuWithoutClaim", 403, id="gpu-without-claim"),
        pytest.param(Reason.IMMUTABLE, "Immutable", 403, id="immutable"),
        pytest.param(Reason.RESERVATION_CONFLICT, "ReservationConflict", 409, id="reservation-conflict"),
        pytest.param(Reason.RESERVATION_EXPIRED, "ReservationExpired", 409, id="reservation-expired"),
        pytest.param(Reason.DEADLINE_PASSED, "DeadlinePassed", 503, id="deadline-passed"),
        pytest.param(Reason.LEDGER_AWAY, "LedgerAway", 503, id="ledger-away"),
    ],
)
def test_reason_names_and_codes_do_not_change(reason: Reason, word: str, code: int) -> None:
    assert reason.value == word
    assert STATUS_CODES[reason] == code


def test_admitting_reason_names_do_not_change() -> None:
    assert [Reason.ADMITTED.value, Reason.NOT_ASKED.value] == ["Admitted", "NotAsked"]


def test_admission_has_no_patch_by_default() -> None:
    assert Admit() == Admit(patch=[], warnings=(), audit={}, reason=Reason.ADMITTED)


def test_two_admissions_never_share_a_patch() -> None:
    assert Admit().patch is not Admit().patch


@pytest.mark.parametrize(
    ("denial", "sentence"),
    [
        pytest.param(Deny(Reason.FORGED, "not yours", hint="take it off"), "not yours; take it off", id="with-a-hint"),
        pytest.param(Deny(Reason.FORGED, "not yours"), "not yours", id="without"),
    ],
)
def test_denial_sentence_has_message_and_hint(denial: Deny, sentence: str) -> None:
    assert denial.sentence == sentence


@pytest.mark.parametrize(
    ("text", "length", "shown"),
    [
        pytest.param("as it is", 250, "as it is", id="short"),
        pytest.param("abcdef", 6, "abcdef", id="just-fits"),
        pytest.param("abcdefg", 6, "abcde…", id="one-too-long"),
        pytest.param("two\nlines\tand\x00nul", 250, "two lines and nul", id="control-characters"),
        pytest.param("right\u202eleft", 250, "right left", id="direction-override"),
        pytest.param("half \ud800", 250, "half  ", id="half-a-surrogate-pair"),
        pytest.param("", 250, "", id="empty"),
    ],
)
def test_text_is_cleaned_for_a_header_line(text: str, length: int, shown: str) -> None:
    assert plain(text, length) == shown
