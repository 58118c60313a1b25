"""Where accepted proofs are kept, each only once: in this process here, in the cluster in `node_proofs`."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Protocol

from attrs import evolve

from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.evidence.jwt.jwt_svid import SOURCE
from webhook.runtime.clock import Clock


class ReplayedProofError(GpuwardenError):
    """Issued, or challenged, no later than the last that was accepted: so it may be that one again, or an older one."""


class UnknownNodeError(GpuwardenError):
    """There is no such node, or it is not the one that the proof was made on."""


class ProofStore(Protocol):
    """Keeps the last proof of each node."""

    async def accept(self, proof: Evidence) -> None:
        """By compare-and-swap on what was accepted before.

        Raises ReplayedProofError, UnknownNodeError or EvidenceUnavailableError; then nothing was kept, but for the
        last, where it may have been.
        """


def check_newer(proof: Evidence, last: Evidence | None) -> None:
    """A token that is signed anew is no new answer: the challenge has to be a later one too, or those before the last
    could be answered again. Of two that were issued at once, or by a clock that is behind, one is answered in vain.

    Raises ReplayedProofError.
    """
    if last is None or last.since is None or proof.since is None or last.nonce_digest is None:
        return
    if proof.since <= last.since or proof.nonce_digest == last.nonce_digest:
        raise ReplayedProofError("a proof that was issued as late, or later, has been accepted before")
    if last.challenged is not None and (proof.challenged is None or proof.challenged <= last.challenged):
        raise ReplayedProofError("a challenge that was issued as late, or later, has been answered before")


def check_birth(proof: Evidence, born: datetime | None, skew: timedelta) -> None:
    """A node that was made anew under an old name has to prove itself anew. Raises UnknownNodeError."""
    if born is not None and (proof.since is None or proof.since <= born + skew):
        raise UnknownNodeError("the proof was issued before this node of that name came to be")


class MemoryProofs:
    """Proofs that end with the process, and the provider that tells of them."""

    name = SOURCE
    is_for_development = False

    def __init__(
        self,
        present: Callable[[], Collection[str]],
        clock: Clock,
        skew: timedelta,
        accepted: Callable[[str, Mapping[str, Evidence]], None] = lambda node, said: None,
    ) -> None:
        """`accepted` is called with the node of each accepted proof, and with what `poll` would return."""
        self._accepted = accepted
        self._present = present
        self._clock = clock
        self._skew = skew
        self._last: dict[str, Evidence] = {}
        self._said: Mapping[str, Evidence] = {}
        self._seen: frozenset[str] | None = None
        self._born: dict[str, datetime] = {}

    def begin(self) -> None:
        """Nothing: nobody else is told of these proofs."""

    async def accept(self, proof: Evidence) -> None:
        self._notice_births()
        if proof.node not in self._present():
            raise UnknownNodeError("there is no such node")
        check_birth(proof, self._born.get(proof.node), self._skew)
        check_newer(proof, self._last.get(proof.node))
        self._last[proof.node] = proof
        # The moment is by the clock of whoever signed it: it must not be of our future.
        told = proof if proof.since is None else evolve(proof, since=proof.since - self._skew)
        self._said = {**self._said, proof.node: told}
        self._accepted(proof.node, self._said)

    async def poll(self) -> Mapping[str, Evidence]:
        self._notice_births()
        return self._said

    def _notice_births(self) -> None:
        """A node that was gone and is there again is another one; those of the first look were there before us."""
        present = frozenset(self._present())
        if self._seen is not None and (gone := self._seen - present):
            self._said = {name: one for name, one in self._said.items() if name not in gone}
        if self._seen is not None:
            self._born.update(dict.fromkeys(present - self._seen, self._clock()))
        self._seen = present
