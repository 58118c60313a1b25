"""What is news of the nodes' evidence: told by the reconciler as Events, by a process that asks providers itself in its
log."""

from collections.abc import Callable

from attrs import field, frozen

from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode


@frozen
class EvidenceStatus:
    """What is known of a node's evidence, in the part whose change somebody wants to hear of."""

    state: EvidenceState
    hash: str = ""
    said: Evidence | None = field(default=None, eq=False)

    @classmethod
    def on(cls, indexed: IndexedNode) -> "EvidenceStatus":
        said = indexed.evidence
        return cls(indexed.state, said.hash if said and indexed.state is EvidenceState.FRESH else "", said)

    def is_of(self, indexed: IndexedNode) -> bool:
        """Whether there is no need to read it again."""
        return self.said is indexed.evidence and self.state is indexed.state

    @property
    def source(self) -> str:
        return describe_sources(self.said) if self.said else ""

    def __str__(self) -> str:
        return f"{self.state} as {self.hash}" if self.hash else str(self.state)


@frozen
class Change:
    """Of one node."""

    node: str
    before: EvidenceStatus
    after: EvidenceStatus

    @property
    def is_worse(self) -> bool:
        return self.after.state is not EvidenceState.FRESH or self.before.state is EvidenceState.FRESH

    @property
    def source(self) -> str:
        return self.after.source or self.before.source or "nobody"


class Changes:
    """Looks at a fleet that somebody else has told of the time."""

    def __init__(self, fleet: Fleet, count: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._count = count
        self._words: dict[str, EvidenceStatus] | None = None

    @property
    def has_begun(self) -> bool:
        return self._words is not None

    def since_last(self, is_owed: Callable[[str], bool] = lambda _: False) -> list[Change]:
        """Each counted. What was so at the first look is no change, and neither is what a new node comes with. News of
        a node that is still owed is left for a later look."""
        before, self._words = self._words or {}, {}
        found = []
        for name, indexed in self._fleet.indexed_nodes.items():
            last = before.get(name) or EvidenceStatus.on(indexed)
            if not last.is_of(indexed):
                word = EvidenceStatus.on(indexed)
                if word == last:
                    last = word
                elif not is_owed(name):
                    self._count(word.state)
                    found.append(Change(name, last, word))
                    last = word
            self._words[name] = last
        return found


def describe_sources(said: Evidence) -> str:
    """Whose word it is, and who says nothing though asked."""
    return said.source + "".join(f", and nothing by {one}" for one in sorted(said.missing_sources))
