"""Derives evidence about nodes from the agents that SPIRE Server lists, at a given moment. No I/O and no clock.

SPIRE does not report when an agent was attested. If only a full attestation replaces the SVID, that was no earlier than
the SVID's expiry minus `agent_ttl`. Otherwise the expiry says nothing about the age, and such an agent proves nothing.
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

# Pods list several hashes separated by commas, so hashes contain neither commas nor blanks. Case is preserved.
HASH: Final = re.compile(r"[!-+\--~]{1,256}")
# A later expiry is beyond the range of datetime.
MAX_EXPIRY: Final = 2**36
# Serial number changes within a quarter of `agent_ttl`. One is usual, and an eviction causes a second.
TOO_MANY_CHANGES: Final = 3


@frozen
class AgentRules:
    """Which agents are trusted, and how their fields are read."""

    trust_domain: str
    attestors: frozenset[str]
    node: Naming
    hash: Naming
    agent_ttl: timedelta
    max_age: timedelta
    skew: timedelta


@frozen
class AgentRow:
    """One agent on a node, attested by a trusted attestor."""

    id: str
    # With more than one node or more than one hash the agent contradicts itself.
    nodes: frozenset[str]
    hashes: frozenset[str]
    serial: str
    attested_at: datetime
    expires_at: datetime
    is_banned: bool
    # Whether its expiry determines when it was attested.
    is_dated: bool

    @property
    def contradicts_itself(self) -> bool:
        return len(self.nodes) > 1 or len(self.hashes) > 1

    def is_live(self, now: datetime) -> bool:
        return now < self.expires_at


def row_of(agent: AgentMessage, rules: AgentRules) -> AgentRow | None:
    """None if the agent is ignored, even if it is banned."""
    is_ours = agent.trust_domain == rules.trust_domain and agent.attestation_type in rules.attestors
    if not is_ours or not agent.path.startswith(f"/spire/agent/{agent.attestation_type}/"):
        return None
    nodes, has_valid_expiry = rules.node.values(agent), 0 < agent.expires_at < MAX_EXPIRY
    if not any(map(is_object_name, nodes)) or not (has_valid_expiry or agent.is_banned):
        return None
    expires_at = datetime.fromtimestamp(agent.expires_at if has_valid_expiry else 1, UTC)
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
class DistrustedAgents:
    """Agents that are not trusted although each looks valid by itself."""

    # Ids of agents whose key is used by two machines.
    shared: frozenset[str] = frozenset()
    # Agents whose SVID lives longer than `agent_ttl`, so that the expiry says nothing about the age.
    overlong: frozenset[AgentRow] = frozenset()


def by_node(rows: Iterable[AgentRow]) -> Mapping[str, list[AgentRow]]:
    found: dict[str, list[AgentRow]] = defaultdict(list)
    for row in rows:
        for node in filter(is_object_name, row.nodes):
            found[node].append(row)
    return found


def combined_evidence(
    node: str, rows: Collection[AgentRow], rules: AgentRules, distrusted: DistrustedAgents, now: datetime
) -> Evidence | None:
    """The combined evidence of all agents of a node. A ban stays until the agent is evicted, whatever other agents
    say."""
    if any(row.is_banned for row in rows):
        return Evidence(node, "", SOURCE, is_banned=True)
    live = [row for row in rows if row.is_live(now)]
    if not have_same_hashes(live) or any(row.id in distrusted.shared for row in live):
        return Evidence(node, "", SOURCE, is_conflict=True)
    proofs = [row for row in live or rows if proves(row) and row not in distrusted.overlong]
    newest = max(proofs, key=lambda row: row.attested_at, default=None)
    return None if newest is None else evidence_of(node, newest, rules)


def have_same_hashes(live: Collection[AgentRow]) -> bool:
    """Nothing shows which of two live agents is the node, so all of them must have the same hashes."""
    return not any(row.contradicts_itself for row in live) and len({row.hashes for row in live}) <= 1


def proves(row: AgentRow) -> bool:
    return row.is_dated and len(row.hashes) == 1 and all(map(HASH.fullmatch, row.hashes))


def evidence_of(node: str, row: AgentRow, rules: AgentRules) -> Evidence:
    """The evidence begins one clock skew early, so that there is no gap on replicas with a slow clock."""
    until = min(row.attested_at + rules.max_age, row.expires_at)
    return Evidence(node, min(row.hashes), SOURCE, since=row.attested_at - rules.skew, until=until)


class AgentHistory:
    """Detects what only shows over time: agents that share a key, and SVIDs that live longer than configured."""

    def __init__(self, rules: AgentRules) -> None:
        self._rules = rules
        self._serials: dict[str, tuple[str, tuple[datetime, ...]]] = {}
        self._overlong: frozenset[AgentRow] = frozenset()

    def distrusted(self, rows: Collection[AgentRow], now: datetime) -> DistrustedAgents:
        """The untrusted agents among `rows`, which are all current agents."""
        # Remembered, because closer to its expiry such a row would look valid and freshly attested.
        self._overlong = frozenset(
            row for row in rows if row in self._overlong or row.attested_at > now + self._rules.skew
        )
        self._serials = {row.id: self._changes(row, now) for row in rows}
        shared = (id for id, (_, changes) in self._serials.items() if len(changes) >= TOO_MANY_CHANGES)
        return DistrustedAgents(frozenset(shared), self._overlong)

    def _changes(self, row: AgentRow, now: datetime) -> tuple[str, tuple[datetime, ...]]:
        """The serial number, and when it changed recently. One machine re-attests at half the lifetime of its SVID."""
        serial, changes = self._serials.get(row.id, (row.serial, ()))
        recent = tuple(one for one in changes if now - one < self._rules.agent_ttl / 4)
        if serial == row.serial:
            return row.serial, recent
        return row.serial, (*recent[1 - TOO_MANY_CHANGES :], now)
