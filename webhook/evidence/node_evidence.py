"""NodeEvidence objects, both ways: what each source says of a node. Nothing is proven by what is left out."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Annotated

import msgspec
from attrs import evolve, frozen

from webhook.core import keys
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence, combined
from webhook.core.raw import Raw
from webhook.runtime.clock import is_plausible

API_VERSION = "gpuwarden.io/v1alpha1"
# Only what somebody wrote down may be without an end.
ENDLESS = frozenset({"static"})

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class UnreadableEvidenceError(GpuwardenError):
    """A NodeEvidence that no version of ours has written."""


class EvidenceEntryWire(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    banned: bool
    conflict: bool
    hash: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    nonce_digest: str | None = None
    # What was written before there was this member has none.
    challenged: Moment | None = None


class NodeEvidenceStatusWire(msgspec.Struct, frozen=True):
    sources: dict[str, EvidenceEntryWire] | None = None


class NodeEvidenceMetadataWire(msgspec.Struct, frozen=True):
    name: str


class NodeEvidenceWire(msgspec.Struct, frozen=True):
    metadata: NodeEvidenceMetadataWire
    status: NodeEvidenceStatusWire | None = None


@frozen
class NodeEvidence:
    """What is said of one node, by source."""

    name: str
    sources: Mapping[str, Evidence]

    @classmethod
    def parse(cls, raw: Raw) -> "NodeEvidence":
        try:
            wire = msgspec.convert(raw, NodeEvidenceWire)
        except msgspec.ValidationError as exc:
            raise UnreadableEvidenceError(f"NodeEvidence cannot be read: {exc}") from exc
        name, entries = wire.metadata.name, (wire.status and wire.status.sources) or {}
        return cls(name, {source: evidence_of(name, source, entry) for source, entry in entries.items()})

    @property
    def word(self) -> Evidence | None:
        return combined(list(self.sources.values()))


def evidence_of(node: str, source: str, entry: EvidenceEntryWire) -> Evidence:
    if not (entry.hash or entry.banned or entry.conflict):
        raise UnreadableEvidenceError(f"{source} says nothing of {node}")
    if source not in ENDLESS and not (entry.banned or entry.conflict) and None in (entry.since, entry.until):
        raise UnreadableEvidenceError(f"{source} does not say since when and until when its word on {node} is good")
    moments = [one for one in (entry.since, entry.challenged) if one is not None]
    is_odd = source not in ENDLESS and not all(map(is_plausible, moments))
    if is_odd and not (entry.banned or entry.conflict):
        raise UnreadableEvidenceError(f"{source} said something of {node} on no day of ours")
    return Evidence(
        node=node,
        hash=entry.hash or "",
        source=source,
        since=None if is_odd else entry.since,
        until=entry.until,
        nonce_digest=entry.nonce_digest,
        challenged=None if is_odd else entry.challenged,
        is_banned=entry.banned,
        is_conflict=entry.conflict,
    )


def entry_in(raw: Raw, source: str) -> Evidence | None:
    """What one source said; None if it said nothing that can be read."""
    entry = raw_entries(raw).get(source)
    alone = {"metadata": raw["metadata"], "status": {"sources": {source: entry}}}
    try:
        return None if entry is None else NodeEvidence.parse(alone).sources[source]
    except UnreadableEvidenceError:
        return None


def has_entry(raw: Raw, source: str) -> bool:
    return source in raw_entries(raw)


def raw_entries(raw: Raw) -> Raw:
    return dict((raw.get("status") or {}).get("sources") or {})


def only(raw: Raw, sources: Collection[str]) -> Raw:
    """The object as if nobody else had said anything: what others wrote need not even be readable."""
    return {**raw, "status": {"sources": {name: one for name, one in raw_entries(raw).items() if name in sources}}}


def new_node_evidence(name: str) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": "NodeEvidence",
        "metadata": {"name": name, "labels": {keys.MANAGED_BY: keys.OURS}},
    }


def is_ours(raw: Raw) -> bool:
    """Whether we have made it, or somebody by hand."""
    return (raw["metadata"].get("labels") or {}).get(keys.MANAGED_BY) == keys.OURS


def with_entries(raw: Raw, entries: Mapping[str, Evidence | None]) -> Raw:
    """The object with these entries in place of those sources' old ones, and the columns that `kubectl get` shows."""
    sources = {**raw_entries(raw), **{source: raw_entry(one) for source, one in entries.items() if one is not None}}
    for source in [source for source, one in entries.items() if one is None]:
        sources.pop(source, None)
    written = {**raw, "status": {"sources": sources}}
    return {**written, "status": {**summary(written), "sources": sources}}


def raw_entry(one: Evidence) -> Raw:
    wire = EvidenceEntryWire(
        banned=one.is_banned,
        conflict=one.is_conflict,
        hash=one.hash or None,
        since=one.since,
        until=one.until,
        nonce_digest=one.nonce_digest,
        challenged=one.challenged,
    )
    raw: Raw = msgspec.to_builtins(wire)
    return raw


def summary(raw: Raw) -> Raw:
    """One word of all sources, for people: none if one of them cannot be read."""
    try:
        word = NodeEvidence.parse(raw).word
    except UnreadableEvidenceError:
        return {}
    return (
        {} if word is None else {"source": word.source, **raw_entry(evolve(word, nonce_digest=None, challenged=None))}
    )


def is_due(have: Evidence | None, want: Evidence | None, *, now: datetime) -> bool:
    """Whether `want` has to be written in place of `have`: it says something else, or half of the life that it gives
    is over. So evidence that is good for an hour and asked for every five seconds is written twice an hour."""
    if have is None or want is None:
        return have is not want
    if (have.hash, have.is_banned, have.is_conflict, have.nonce_digest) != (
        want.hash,
        want.is_banned,
        want.is_conflict,
        want.nonce_digest,
    ):
        return True
    if have.until is None or want.until is None or want.until <= have.until:
        return (have.since, have.until) != (want.since, want.until)
    return have.until - now <= (want.until - now) / 2
