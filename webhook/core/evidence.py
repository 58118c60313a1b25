"""The evidence of a provider about a node, and its state at a given moment."""

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from attrs import evolve, frozen


class EvidenceState(StrEnum):
    """The state of a node's evidence. Only `fresh` proves the node."""

    FRESH = "fresh"
    STALE = "stale"
    ABSENT = "absent"
    BANNED = "banned"
    CONFLICT = "conflict"


@frozen
class Evidence:
    """The evidence of one provider about one node. Valid from `since` until just before `until`. Evidence without
    `until` is for development.

    A proof answers a challenge: `nonce_digest` identifies it, `challenged` is when it was issued, by our own clock. In
    combined evidence `oldest` is the earliest beginning, and `missing_sources` are the required providers without
    evidence about the node.
    """

    node: str
    hash: str
    source: str
    since: datetime | None = None
    until: datetime | None = None
    nonce_digest: str | None = None
    challenged: datetime | None = None
    is_banned: bool = False
    is_conflict: bool = False
    oldest: datetime | None = None
    missing_sources: frozenset[str] = frozenset()


def state_of(evidence: Evidence | None, now: datetime) -> EvidenceState:
    """The state of `evidence` at `now`. Evidence that begins later, or has no hash, proves nothing."""
    match evidence:
        case None:
            return EvidenceState.ABSENT
        case Evidence(is_banned=True):
            return EvidenceState.BANNED
        case Evidence(is_conflict=True):
            return EvidenceState.CONFLICT
        case Evidence(hash=""):
            return EvidenceState.ABSENT
        case Evidence(missing_sources=missing) if missing:
            return EvidenceState.ABSENT
        case Evidence(since=datetime() as since) if since > now:
            return EvidenceState.ABSENT
        case Evidence(until=datetime() as until) if until <= now:
            return EvidenceState.STALE
    return EvidenceState.FRESH


def next_change(evidence: Evidence | None, now: datetime) -> datetime | None:
    """When the state next changes by time alone; None if it does not."""
    if evidence is None:
        return None
    moments = [m for m in (evidence.since, evidence.until) if m is not None and m > now]
    return min(moments, default=None)


def combined(pieces: list[Evidence], asked: Collection[str] = ()) -> Evidence | None:
    """One evidence from several providers: all required providers must attest the same hash, and the earliest end
    counts."""
    if not pieces:
        return None
    first, *others = pieces
    missing_sources = frozenset(asked) - {p.source for p in pieces}
    if not others:
        return evolve(first, missing_sources=missing_sources) if missing_sources else first
    return Evidence(
        node=first.node,
        hash=first.hash,
        source="+".join(sorted({p.source for p in pieces})),
        since=max((p.since for p in pieces if p.since), default=None),
        until=min((p.until for p in pieces if p.until), default=None),
        challenged=max((p.challenged for p in pieces if p.challenged), default=None),
        is_banned=any(p.is_banned for p in pieces),
        is_conflict=any(p.is_conflict for p in pieces) or len({p.hash for p in pieces}) > 1,
        oldest=min((p.oldest or p.since for p in pieces if p.since), default=None),
        missing_sources=missing_sources,
    )


def predates_node(evidence: Evidence, created: datetime | None) -> bool:
    """Whether the evidence is about an earlier node of the same name. A recreated node must be attested again."""
    begin = evidence.oldest or evidence.since
    if evidence.is_banned or evidence.is_conflict or begin is None or created is None:
        return False
    return begin <= created
