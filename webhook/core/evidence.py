"""What a provider says of a node, and what that is worth at a given moment."""

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from attrs import evolve, frozen


class EvidenceState(StrEnum):
    """What is known of a node's evidence; only `fresh` proves anything."""

    FRESH = "fresh"
    STALE = "stale"
    ABSENT = "absent"
    BANNED = "banned"
    CONFLICT = "conflict"


@frozen
class Evidence:
    """One provider's word on one node. Good from `since` until just before `until`; no `until` is for development.

    A proof was made for a challenge: `nonce_digest` is which one, `challenged` when it was issued, by our own clock.
    Of several providers together: `oldest` is where the first of their words begins, `silent` are those that were
    asked as well and say nothing of the node.
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
    """What `evidence` is worth at `now`. What is said of the future proves nothing yet, and no hash proves nothing."""
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
    """When time alone will next change the state, if it ever will."""
    if evidence is None:
        return None
    moments = [m for m in (evidence.since, evidence.until) if m is not None and m > now]
    return min(moments, default=None)


def combined(pieces: list[Evidence], asked: Collection[str] = ()) -> Evidence | None:
    """One word from several providers: all that are asked must vouch for one hash, and the strictest end counts."""
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
        is_banned=any(p.is_banned for p in pieces),
        is_conflict=any(p.is_conflict for p in pieces) or len({p.hash for p in pieces}) > 1,
        oldest=min((p.oldest or p.since for p in pieces if p.since), default=None),
        missing_sources=missing_sources,
    )


def predates_node(word: Evidence, born: datetime | None) -> bool:
    """Whether it speaks of the node that had this name before: one that was made anew has to prove itself anew."""
    begin = word.oldest or word.since
    if word.is_banned or word.is_conflict or begin is None or born is None:
        return False
    return begin <= born
