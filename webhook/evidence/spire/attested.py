"""What the rows of SPIRE's registry of agents say of nodes, at a given moment. No I/O and no clock.

SPIRE does not say when an agent was attested. Where the SVID is replaced by a full attestation alone, that was no
earlier than its end less `agent_ttl`; everywhere else it says nothing, and such a row proves nothing.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from attrs import frozen

from webhook.core.agent_naming import Naming
from webhook.core.evidence import Evidence
from webhook.core.names import is_object_name
from webhook.evidence.spire.spire_messages import AgentMessage

SOURCE: Final = "spire-server"

# A pod that asks for one of several separates them by commas; blanks are nobody's. Case is not ours to change.
HASH: Final = re.compile(r"[!-+\--~]{1,256}")
# Later is not a date that arithmetic can be done with.
MAX_EXPIRY: Final = 2**36
# Within a quarter of `agent_ttl`. One is usual, and an eviction makes a second.
TOO_MANY_CHANGES: Final = 3


@frozen
class AgentRules:
    """What of a row is believed."""

    trust_domain: str
    attestors: frozenset[str]
    node: Naming
    hash: Naming
    agent_ttl: timedelta
    max_age: timedelta
    skew: timedelta


@frozen
class AgentRow:
    """One agent that says it is on a node, by an attestor that counts."""

    id: str
    # More than one node, or more than one hash: it contradicts itself.
    nodes: frozenset[str]
    hashes: frozenset[str]
    serial: str
    attested_at: datetime
    expires_at: datetime
    is_banned: bool
    # Its end says something about its age.
    is_dated: bool

    @property
    def contradicts_itself(self) -> bool:
        return len(self.nodes) > 1 or len(self.hashes) > 1

    def is_live(self, now: datetime) -> bool:
        return now < self.expires_at


def row_of(agent: AgentMessage, rules: AgentRules) -> AgentRow | None:
    """None for what counts for nothing, a ban included."""
    is_ours = agent.trust_domain == rules.trust_domain and agent.attestation_type in rules.attestors
    if not is_ours or not agent.path.startswith(f"/spire/agent/{agent.attestation_type}/"):
        return None
    nodes, is_dateable = rules.node.values(agent), 0 < agent.expires_at < MAX_EXPIRY
    if not any(map(is_object_name, nodes)) or not (is_dateable or agent.is_banned):
        return None
    expires_at = datetime.fromtimestamp(agent.expires_at if is_dateable else 1, UTC)
    return AgentRow(
        id=agent.path,
        nodes=nodes,
        hashes=rules.hash.values(agent),
        serial=agent.serial,
        attested_at=expires_at - rules.agent_ttl,
        expires_at=expires_at,
        is_banned=agent.is_banned,
        is_dated=agent.can_reattest and bool(agent.serial),
    )


@frozen
class Doubts:
    """What rows are not believed in, though each looks right by itself."""

    # Agents whose key is used by two machines.
    shared: frozenset[str] = frozenset()
    # Their end says nothing about their age.
    overlong: frozenset[AgentRow] = frozenset()


def by_node(rows: Iterable[AgentRow]) -> Mapping[str, list[AgentRow]]:
    found: dict[str, list[AgentRow]] = defaultdict(list)
    for row in rows:
        for node in filter(is_object_name, row.nodes):
            found[node].append(row)
    return found


def combined_evidence(
    node: str, rows: Collection[AgentRow], rules: AgentRules, doubts: Doubts, now: datetime
) -> Evidence | None:
    """What all rows of one node say together. A ban stays until the agent is evicted, whoever else says what."""
    if any(row.is_banned for row in rows):
        return Evidence(node, "", SOURCE, is_banned=True)
    live = [row for row in rows if row.is_live(now)]
    if not agree(live) or any(row.id in doubts.shared for row in live):
        return Evidence(node, "", SOURCE, is_conflict=True)
    proofs = [row for row in live or rows if proves(row) and row not in doubts.overlong]
    newest = max(proofs, key=lambda row: row.attested_at, default=None)
    return None if newest is None else evidence_of(node, newest, rules)


def agree(live: Collection[AgentRow]) -> bool:
    """Nobody has a way to tell which of two agents is the node: all that are live have to say the same."""
    return not any(row.contradicts_itself for row in live) and len({row.hashes for row in live}) <= 1


def proves(row: AgentRow) -> bool:
    return row.is_dated and len(row.hashes) == 1 and all(map(HASH.fullmatch, row.hashes))


def evidence_of(node: str, row: AgentRow, rules: AgentRules) -> Evidence:
    """It begins a clock skew early: there must be no gap where somebody's clock is behind."""
    until = min(row.attested_at + rules.max_age, row.expires_at)
    return Evidence(node, min(row.hashes), SOURCE, since=row.attested_at - rules.skew, until=until)


class AgentHistory:
    """What shows only over time: agents that share a key, and SVIDs that live longer than they are said to."""

    def __init__(self, rules: AgentRules) -> None:
        self._rules = rules
        self._serials: dict[str, tuple[str, tuple[datetime, ...]]] = {}
        self._overlong: frozenset[AgentRow] = frozenset()

    def doubts(self, rows: Collection[AgentRow], now: datetime) -> Doubts:
        """What is doubted of these, which are all there are now."""
        # Remembered: as its end comes nearer such a row would look right, and freshly attested.
        self._overlong = frozenset(
            row for row in rows if row in self._overlong or row.attested_at > now + self._rules.skew
        )
        self._serials = {row.id: self._changes(row, now) for row in rows}
        shared = (id for id, (_, changes) in self._serials.items() if len(changes) >= TOO_MANY_CHANGES)
        return Doubts(frozenset(shared), self._overlong)

    def _changes(self, row: AgentRow, now: datetime) -> tuple[str, tuple[datetime, ...]]:
        """The serial number, and when it has changed of late. One machine attests anew at half the life of its SVID."""
        serial, changes = self._serials.get(row.id, (row.serial, ()))
        recent = tuple(one for one in changes if now - one < self._rules.agent_ttl / 4)
        if serial == row.serial:
            return row.serial, recent
        return row.serial, (*recent[1 - TOO_MANY_CHANGES :], now)
