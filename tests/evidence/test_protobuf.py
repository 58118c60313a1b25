"""The codec against messages recorded from a real SPIRE Server, and against Google's codec."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evidence.doubles import MESSAGES, agent
from webhook.evidence.protobuf import MalformedMessageError, as_int64, as_text, fields_of, int_field, text_field, varint
from webhook.evidence.spire.spire_messages import AgentMessage, AgentPage, AgentSelector, list_agents_request

RECORDED = Path(__file__).parent / "spire" / "recorded"


def expected(row: Any) -> AgentMessage:
    """An agent as the SPIRE CLI shows it."""
    return AgentMessage(
        trust_domain=row["id"]["trust_domain"],
        path=row["id"]["path"],
        attestation_type=row["attestation_type"],
        serial=row["x509svid_serial_number"],
        expires_at=int(row["x509svid_expires_at"]),
        selectors=tuple(AgentSelector(one["type"], one["value"]) for one in row["selectors"]),
        is_banned=row["banned"],
        can_reattest=row["can_reattest"],
    )


def test_recorded_list_matches_the_output_of_the_spire_cli() -> None:
    page = AgentPage.parse((RECORDED / "list-agents.response.bin").read_bytes())
    shown = json.loads((RECORDED / "list-agents.decoded.json").read_text())
    assert [AgentMessage.parse(one) for one in page.agents] == [expected(row) for row in shown["agents"]]
    assert page.next_token == ""


def test_recorded_ban_removes_only_the_serial_number() -> None:
    first, second = AgentPage.parse((RECORDED / "list-agents-banned.response.bin").read_bytes()).agents
    before = json.loads((RECORDED / "list-agents.decoded.json").read_text())["agents"]
    assert AgentMessage.parse(first) == expected(before[0])
    assert AgentMessage.parse(second) == expected({**before[1], "banned": True, "x509svid_serial_number": ""})


def test_recorded_agent_is_the_same_alone_and_in_the_list() -> None:
    alone = (RECORDED / "get-agent.response.bin").read_bytes()
    assert AgentMessage.parse(alone) == AgentMessage.parse(
        AgentPage.parse((RECORDED / "list-agents.response.bin").read_bytes()).agents[0]
    )


@pytest.mark.parametrize("token", ["", "250"])
def test_request_mask_contains_all_fields_that_are_read(token: str) -> None:
    asked = MESSAGES["ListAgentsRequest"].FromString(list_agents_request(250, token))
    mask = {field.name: value for field, value in asked.output_mask.ListFields()}
    assert mask == dict.fromkeys(
        ["attestation_type", "x509svid_serial_number", "x509svid_expires_at", "selectors", "banned", "can_reattest"],
        True,
    )
    assert (asked.page_size, asked.page_token) == (250, token)


@given(number=st.integers(-(2**63), 2**63 - 1), text=st.text())
def test_encoded_fields_are_decoded_unchanged(number: int, text: str) -> None:
    found = dict(fields_of(int_field(4, number) + text_field(2, text)))
    assert (as_int64(found.get(4, 0)), as_text(found.get(2, b""))) == (number, text)


@given(
    node=st.text(),
    hash=st.text(),
    expires_at=st.integers(-(2**63), 2**63 - 1),
    banned=st.booleans(),
    can_reattest=st.booleans(),
)
def test_messages_of_the_google_codec_are_decoded(
    node: str, hash: str, expires_at: int, banned: bool, can_reattest: bool
) -> None:
    wire = agent(node, hash, expires_at=expires_at, banned=banned, can_reattest=can_reattest).SerializeToString()
    found = AgentMessage.parse(wire)
    assert (found.expires_at, found.is_banned, found.can_reattest) == (expires_at, banned, can_reattest)
    assert AgentSelector("x509pop", f"san:node-name:{node}") in found.selectors


@given(st.binary())
def test_arbitrary_bytes_are_parsed_or_rejected(wire: bytes) -> None:
    try:
        for raw in AgentPage.parse(wire).agents:
            AgentMessage.parse(raw)
    except MalformedMessageError:
        pass


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(b"\x00\x01", id="no-field-number"),
        pytest.param(b"\x0b", id="a-group"),
        pytest.param(b"\x0a\x05abc", id="truncated-string"),
        pytest.param(b"\x08", id="truncated-number"),
        pytest.param(b"\x09abc", id="truncated-fixed"),
        pytest.param(b"\x08" + b"\xff" * 11, id="number-too-long"),
        pytest.param(b"\x32\x01\x01", id="string-for-a-boolean"),
        pytest.param(b"\x18\x01", id="number-for-a-string"),
        pytest.param(b"\x1a\x01\xff", id="not-utf-8"),
    ],
)
def test_invalid_agent_is_rejected(wire: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        AgentMessage.parse(wire)


def test_unknown_fields_are_skipped() -> None:
    known = agent(expires_at=1794993696).SerializeToString()
    unknown = (
        int_field(99, 7) + text_field(100, "x") + varint(101 << 3 | 1) + bytes(8) + varint(102 << 3 | 5) + bytes(4)
    )
    assert AgentMessage.parse(unknown + known) == AgentMessage.parse(known)
