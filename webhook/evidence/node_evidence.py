"""Reads and writes NodeEvidence objects: the evidence of each source about a node. A missing field proves nothing."""

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
# Only evidence that a user wrote may be without an expiry.
SOURCES_WITHOUT_END = frozenset({"static"})

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class UnreadableEvidenceError(GpuwardenError):
    """No version of gpuwarden has written this NodeEvidence."""


class EvidenceEntryWire(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    banned: bool
    conflict: bool
    hash: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    nonce_digest: str | None = None
    # Missing in objects that were written by older versions.
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
    """The evidence about one node, by source."""

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
    def combined_evidence(self) -> Evidence | None:
        return combined(list(self.sources.values()))


def evidence_of(node: str, source: str, entry: EvidenceEntryWire) -> Evidence:
    if not (entry.hash or entry.banned or entry.conflict):
        raise UnreadableEvidenceError(f"{source} has an empty entry for {node}")
    if (
        source not in SOURCES_WITHOUT_END
        and not (entry.banned or entry.conflict)
        and None in (entry.since, entry.until)
    ):
        raise UnreadableEvidenceError(f"{source} has an entry for {node} without since and until")
    moments = [one for one in (entry.since, entry.challenged) if one is not None]
    is_out_of_range = source not in SOURCES_WITHOUT_END and not all(map(is_plausible, moments))
    if is_out_of_range and not (entry.banned or entry.conflict):
        raise UnreadableEvidenceError(f"{source} has an entry for {node} with a time out of range")
    return Evidence(
        node=node,
        hash=entry.hash or "",
        source=source,
        since=None if is_out_of_range else entry.since,
        until=entry.until,
        nonce_digest=entry.nonce_digest,
        challenged=None if is_out_of_range else entry.challenged,
        is_banned=entry.banned,
        is_conflict=entry.conflict,
    )


def entry_in(raw: Raw, source: str) -> Evidence | None:
    """The evidence of one source; None if there is none that can be parsed."""
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


def with_sources(raw: Raw, sources: Collection[str]) -> Raw:
    """The object without the entries of other sources, which need not even be readable."""
    return {**raw, "status": {"sources": {name: one for name, one in raw_entries(raw).items() if name in sources}}}


def new_node_evidence(name: str) -> Raw:
    return {
        "apiVersion": API_VERSION,
        "kind": "NodeEvidence",
        "metadata": {"name": name, "labels": {keys.MANAGED_BY: keys.OURS}},
    }


def with_entries(raw: Raw, entries: Mapping[str, Evidence | None]) -> Raw:
    """The object with the entries of these sources replaced, and the fields that `kubectl get` shows."""
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
    """The combined evidence of all sources for `kubectl get`; empty if one of them cannot be parsed."""
    try:
        combined_evidence = NodeEvidence.parse(raw).combined_evidence
    except UnreadableEvidenceError:
        return {}
    return (
        {}
        if combined_evidence is None
        else {
            "source": combined_evidence.source,
            **raw_entry(evolve(combined_evidence, nonce_digest=None, challenged=None)),
        }
    )


def is_due(current: Evidence | None, desired: Evidence | None, *, now: datetime) -> bool:
    """Whether to replace `current` with `desired`: it differs, or half of the lifetime that it would add is over. So
    evidence that is valid for an hour and polled every five seconds is written twice an hour."""
    if current is None or desired is None:
        return current is not desired
    if (current.hash, current.is_banned, current.is_conflict, current.nonce_digest) != (
        desired.hash,
        desired.is_banned,
        desired.is_conflict,
        desired.nonce_digest,
    ):
        return True
    if current.until is None or desired.until is None or desired.until <= current.until:
        return (current.since, current.until) != (desired.since, desired.until)
    return current.until - now <= (desired.until - now) / 2
