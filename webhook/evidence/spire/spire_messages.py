"""The messages of SPIRE Server's Agent API that are needed to list agents. Field numbers are those of the protobuf
definitions."""

from attrs import frozen

from webhook.evidence.protobuf import (
    as_bool,
    as_bytes,
    as_int64,
    as_text,
    fields_of,
    int_field,
    message_field,
    text_field,
)

LIST_AGENTS = "/spire.api.server.agent.v1.Agent/ListAgents"

# The fields that are read, requested explicitly: a server omits what a mask omits, and then "not banned" and "banned,
# but omitted" look the same. The mask has the same field numbers as the agent.
TYPE, SERIAL, EXPIRES_AT, SELECTORS, BANNED, CAN_REATTEST = range(2, 8)
MASK = b"".join(int_field(number, 1) for number in (TYPE, SERIAL, EXPIRES_AT, SELECTORS, BANNED, CAN_REATTEST))


def list_agents_request(page_size: int, page_token: str) -> bytes:
    return message_field(2, MASK) + int_field(3, page_size) + text_field(4, page_token)


@frozen
class AgentPage:
    """One page of agents, each as its encoded message, and the token of the next page. The last page has no token."""

    agents: tuple[bytes, ...]
    next_token: str

    @classmethod
    def parse(cls, message: bytes) -> "AgentPage":
        agents, token = [], ""
        for number, value in fields_of(message):
            if number == 1:
                agents.append(as_bytes(value))
            elif number == 2:
                token = as_text(value)
        return cls(tuple(agents), token)


@frozen
class AgentSelector:
    """One selector that an attestor found for an agent."""

    type: str
    value: str

    @classmethod
    def parse(cls, message: bytes) -> "AgentSelector":
        found = {number: value for number, value in fields_of(message) if number in (1, 2)}
        return cls(as_text(found.get(1, b"")), as_text(found.get(2, b"")))


@frozen
class AgentMessage:
    """One agent in the server's list."""

    trust_domain: str
    path: str
    attestation_type: str
    serial: str
    # Seconds since 1970.
    expires_at: int
    selectors: tuple[AgentSelector, ...]
    is_banned: bool
    can_reattest: bool

    @classmethod
    def parse(cls, message: bytes) -> "AgentMessage":
        found, selectors = {}, []
        for number, value in fields_of(message):
            if number == SELECTORS:
                selectors.append(AgentSelector.parse(as_bytes(value)))
            else:
                found[number] = value
        name = dict(fields_of(as_bytes(found.get(1, b""))))
        return cls(
            trust_domain=as_text(name.get(1, b"")),
            path=as_text(name.get(2, b"")),
            attestation_type=as_text(found.get(TYPE, b"")),
            serial=as_text(found.get(SERIAL, b"")),
            expires_at=as_int64(found.get(EXPIRES_AT, 0)),
            selectors=tuple(selectors),
            is_banned=as_bool(found.get(BANNED, 0)),
            can_reattest=as_bool(found.get(CAN_REATTEST, 0)),
        )
