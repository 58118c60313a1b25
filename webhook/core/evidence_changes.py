"""Changes of the nodes' evidence. The reconciler records them as Events; a process that polls providers itself logs
them."""

from collections.abc import Callable

from attrs import field, frozen

from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode


@frozen
class EvidenceStatus:
    """The part of a node's evidence whose change is reported."""

    state: EvidenceState
    hash: str = ""
    evidence: Evidence | None = field(default=None, eq=False)

    @classmethod
    def of(cls, indexed: IndexedNode) -> "EvidenceStatus":
        evidence = indexed.evidence
        is_fresh = indexed.state is EvidenceState.FRESH
        return cls(indexed.state, evidence.hash if evidence and is_fresh else "", evidence)

    def is_current(self, indexed: IndexedNode) -> bool:
        """Whether the node has the same evidence in the same state."""
        return self.evidence is indexed.evidence and self.state is indexed.state

    @property
    def source(self) -> str:
        return describe_sources(self.evidence) if self.evidence else ""

    def __str__(self) -> str:
        return f"{self.state} as {self.hash}" if self.hash else str(self.state)


@frozen
class Change:
    """A change of one node's evidence."""

    node: str
    before: EvidenceStatus
    after: EvidenceStatus

    @property
    def is_worse(self) -> bool:
        return self.after.state is not EvidenceState.FRESH or self.before.state is EvidenceState.FRESH

    @property
    def source(self) -> str:
        return self.after.source or self.before.source or "no provider"


class Changes:
    """Finds and counts the changes of a fleet's evidence. The caller advances the fleet to now."""

    def __init__(self, fleet: Fleet, count: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._count = count
        self._known: dict[str, EvidenceStatus] | None = None

    @property
    def has_begun(self) -> bool:
        return self._known is not None

    def since_last(self, is_pending: Callable[[str], bool] = lambda _: False) -> list[Change]:
        """The changes since the last call. The first call finds none, and the first status of a new node is none.
        Changes of nodes whose last change is still to be reported (`is_pending`) are left for a later call."""
        before, self._known = self._known or {}, {}
        found = []
        for name, indexed in self._fleet.indexed_nodes.items():
            last = before.get(name) or EvidenceStatus.of(indexed)
            if not last.is_current(indexed):
                status = EvidenceStatus.of(indexed)
                if status == last:
                    last = status
                elif not is_pending(name):
                    self._count(status.state)
                    found.append(Change(name, last, status))
                    last = status
            self._known[name] = last
        return found


def describe_sources(evidence: Evidence) -> str:
    """The providers of the evidence, and the required providers without any."""
    return evidence.source + "".join(f", and nothing by {one}" for one in sorted(evidence.missing_sources))
