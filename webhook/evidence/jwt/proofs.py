"""Stores accepted proofs, each only once: in memory here, and in the cluster in `cluster_proofs`."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Protocol

from attrs import define, evolve, field

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.evidence.jwt.jwt_svid import SOURCE
from webhook.runtime.clock import Clock


class ReplayedProofError(GpuwardenError):
    """Issued or challenged no later than the last accepted proof: it may be that proof again, or an older one."""


class UnknownNodeError(GpuwardenError):
    """There is no such node, or the proof is from an earlier node of that name."""


class ProofStore(Protocol):
    """Stores the last proof of each node."""

    async def accept(self, proof: Evidence) -> None:
        """Store the proof, by compare-and-swap on the last accepted one.

        Raises ReplayedProofError, UnknownNodeError or EvidenceUnavailableError. Nothing was stored then, except
        possibly with EvidenceUnavailableError.
        """


def check_newer(proof: Evidence, last: Evidence | None) -> None:
    """A re-signed token is not a new answer: the challenge must be newer too, or challenges before the last one could
    be answered again. If two proofs are issued at the same time, or by a slow clock, one is rejected.

    Raises ReplayedProofError.
    """
    if last is None or last.since is None or proof.since is None or last.nonce_digest is None:
        return
    if proof.since <= last.since or proof.nonce_digest == last.nonce_digest:
        raise ReplayedProofError("a proof that was issued at the same time or later has already been accepted")
    if last.challenged is not None and (proof.challenged is None or proof.challenged <= last.challenged):
        raise ReplayedProofError("a challenge that was issued at the same time or later has already been answered")


def check_created_before(proof: Evidence, born: datetime | None, skew: timedelta) -> None:
    """A recreated Node has to prove itself again. Raises UnknownNodeError."""
    if born is not None and (proof.since is None or proof.since <= born + skew):
        raise UnknownNodeError("the proof was issued before the Node was created")


@define(eq=False, repr=False)
class MemoryProofs:
    """Proofs that end with the process, and the provider that reports them."""

    name = SOURCE

    _present: Callable[[], Collection[str]]
    _clock: Clock
    _skew: timedelta
    _listeners: list[Callable[[str, Mapping[str, Evidence]], None]] = field(factory=list, init=False)
    _last: dict[str, Evidence] = field(factory=dict, init=False)
    _evidence: Mapping[str, Evidence] = field(factory=dict, init=False)
    _known_nodes: frozenset[str] | None = field(default=None, init=False)
    _created_at: dict[str, datetime] = field(factory=dict, init=False)

    def notify(self, listener: Callable[[str, Mapping[str, Evidence]], None]) -> None:
        """Calls `listener` with the node of each accepted proof, and with what `poll` would return."""
        self._listeners.append(listener)

    def begin(self) -> None:
        """Does nothing: only this process has these proofs."""

    async def accept(self, proof: Evidence) -> None:
        self._track_nodes()
        if proof.node not in self._present():
            raise UnknownNodeError("there is no such node")
        check_created_before(proof, self._created_at.get(proof.node), self._skew)
        check_newer(proof, self._last.get(proof.node))
        self._last[proof.node] = proof
        # It is dated by the clock of its signer, and must not appear to be issued in the future.
        counted = proof if proof.since is None else evolve(proof, since=proof.since - self._skew)
        self._evidence = {**self._evidence, proof.node: counted}
        for listener in self._listeners:
            listener(proof.node, self._evidence)

    async def poll(self) -> Mapping[str, Evidence]:
        self._track_nodes()
        return self._evidence

    def _track_nodes(self) -> None:
        """A node that was gone and is back is a new one. Nodes of the first call existed before this process."""
        present = frozenset(self._present())
        if self._known_nodes is not None and (gone := self._known_nodes - present):
            self._evidence = {name: one for name, one in self._evidence.items() if name not in gone}
        if self._known_nodes is not None:
            self._created_at.update(dict.fromkeys(present - self._known_nodes, self._clock()))
        self._known_nodes = present
