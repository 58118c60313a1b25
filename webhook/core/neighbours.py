"""Beside which other pods a pod may stand: required affinity and anti-affinity between pods, both ways.

By kube-scheduler's own rules. Every term is counted by itself, so that a node is asked in no more steps than there are
terms that concern the pod, however many pods stand there. No I/O, no clock, no await.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
from attrs import field, frozen

from webhook.core.nodes_asked import Expression, Labels, expression
from webhook.core.pod import Requirement, WireStruct

JOINS_NOBODY = "ruled out by the pod's own affinity to pods"
AVOIDS = "ruled out by the pod's own anti-affinity"
KEPT_AWAY = "ruled out by the anti-affinity of a pod that is there"
# How many terms that waiting pods have asked by are counted; beyond, counting begins anew.
MOST_KEPT = 2_000


class SelectorWire(WireStruct, frozen=True):
    match_labels: dict[str, str | None] | None = None
    match_expressions: list[Requirement] | None = None


class PodTermWire(WireStruct, frozen=True):
    """`matchLabelKeys` and `mismatchLabelKeys` are not read: the API server has written them into the selector."""

    label_selector: SelectorWire | None = None
    namespaces: list[str] | None = None
    namespace_selector: SelectorWire | None = None
    topology_key: str = ""


class TermsWire(WireStruct, frozen=True):
    required: list[PodTermWire] | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class AffinityWire(WireStruct, frozen=True):
    pod_affinity: TermsWire | None = None
    pod_anti_affinity: TermsWire | None = None


@frozen
class Selector:
    """One that asks for nothing matches everything."""

    expressions: tuple[Expression, ...] = ()

    def matches(self, labels: Labels) -> bool:
        return all(one.matches(labels.get(one.key)) for one in self.expressions)


@frozen(cache_hash=True)
class PodTerm:
    """Pods, and the label of nodes by which it is told who is beside them."""

    topology: str
    pods: Selector | None
    """None matches nothing."""
    namespaces: frozenset[str]
    selected: Selector | None = None
    """Which other namespaces, by their labels."""

    def matches(self, company: "Company", namespaces: Mapping[str, Labels]) -> bool:
        """Whether it means that pod; `namespaces` are the labels of namespaces."""
        name = company.namespace
        is_selected = self.selected is not None and self.selected.matches(namespaces.get(name, {}))
        if name not in self.namespaces and not is_selected:
            return False
        return self.pods is not None and self.pods.matches(company.labels)


@frozen
class Company:
    """What of a pod decides beside whom it may stand."""

    namespace: str = ""
    labels: Labels = field(factory=dict)
    joins: tuple[PodTerm, ...] = ()
    avoids: tuple[PodTerm, ...] = ()

    @classmethod
    def of(cls, namespace: str, labels: Mapping[str, str | None] | None, affinity: AffinityWire | None) -> "Company":
        named = {key: value or "" for key, value in (labels or {}).items()}
        if affinity is None:
            return cls(namespace, named)
        joins, avoids = (pod_terms(one, namespace) for one in (affinity.pod_affinity, affinity.pod_anti_affinity))
        return cls(namespace, named, joins, avoids)


def pod_terms(wire: TermsWire | None, namespace: str) -> tuple[PodTerm, ...]:
    return tuple(pod_term(one, namespace) for one in (wire and wire.required) or ())


def pod_term(wire: PodTermWire, namespace: str) -> PodTerm:
    """Of a pod in that namespace, which is meant where no other is named."""
    is_elsewhere = wire.namespaces or wire.namespace_selector is not None
    named = frozenset(wire.namespaces or ()) if is_elsewhere else frozenset({namespace})
    return PodTerm(wire.topology_key, selector(wire.label_selector), named, selector(wire.namespace_selector))


def selector(wire: SelectorWire | None) -> Selector | None:
    if wire is None:
        return None
    equal = (Expression(key, "In", frozenset({value or ""})) for key, value in (wire.match_labels or {}).items())
    return Selector((*equal, *map(expression, wire.match_expressions or ())))


@frozen(cache_hash=True)
class Bounds:
    """What other pods have to do with where a pod may go. Pods with the same bounds may go to the same nodes."""

    joins: tuple[PodTerm, ...] = ()
    avoids: tuple[PodTerm, ...] = ()
    kept_away: frozenset[PodTerm] = frozenset()
    """Anti-affinity of pods that stand somewhere, which means this one."""
    is_of_those_it_joins: bool = False


BOUNDLESS = Bounds()


class Tally:
    """How many pods there are in each place for some terms: that all of them mean, or that carry them."""

    def __init__(self, terms: tuple[PodTerm, ...]) -> None:
        self.terms = terms
        self.places: Counter[tuple[str, str]] = Counter()
        """By a label of nodes and its value; none is zero."""
        self.is_sought = False
        """Whether somebody waits for such pods to come."""

    def means(self, company: Company, namespaces: Mapping[str, Labels]) -> bool:
        return all(term.matches(company, namespaces) for term in self.terms)

    def count(self, node: Labels, number: int) -> None:
        for place in self.nodes_with_device(node):
            self.places[place] += number
            if not self.places[place]:
                del self.places[place]

    def nodes_with_device(self, node: Labels) -> Iterator[tuple[str, str]]:
        for term in self.terms:
            value = node.get(term.topology)
            if value is not None:
                yield term.topology, value

    def is_at(self, node: Labels) -> bool:
        return any(place in self.places for place in self.nodes_with_device(node))

    def is_all_round(self, node: Labels) -> bool:
        """In the place that each term means."""
        return sum(place in self.places for place in self.nodes_with_device(node)) == len(self.terms)


class Neighbours:
    """Nodes, the pods that stand there, and what they mean for pods to come. Pods that are being deleted count until
    they are gone."""

    def __init__(self) -> None:
        self._nodes: dict[str, Labels] = {}
        self._standing: dict[str, dict[str, Company]] = {}
        self._namespaces: dict[str, Labels] = {}
        # Anti-affinity of pods that stand, by the namespaces that it means.
        self._carried: dict[PodTerm, Tally] = {}
        self._reserved_pods: Counter[PodTerm] = Counter()
        self._carried_for: dict[str | None, set[PodTerm]] = {}
        # What pods that wait have asked by.
        self._asked: dict[tuple[PodTerm, ...], Tally] = {}

    # What there is.

    def know_node(self, name: str, labels: Labels) -> None:
        known = self._nodes.get(name)
        if known != labels:
            self.forget_node(name)
            self._nodes[name] = labels
            self._count_all(name, 1)

    def forget_node(self, name: str) -> None:
        if name in self._nodes:
            self._count_all(name, -1)
            del self._nodes[name]

    def know_namespace(self, name: str, labels: Labels | None) -> bool:
        """Whether that may matter to somebody; without labels there is none of that name any more."""
        if self._namespaces.get(name) == labels:
            return False
        if labels is None:
            del self._namespaces[name]
        else:
            self._namespaces[name] = labels
        selecting = [terms for terms in self._asked if any(term.selected is not None for term in terms)]
        for terms in selecting:
            del self._asked[terms]
        return bool(selecting or self._carried_for.get(None))

    def join(self, uid: str, node: str, company: Company) -> bool:
        """A pod stands on that node. Whether somebody may be put beside it now who could not before."""
        self._standing.setdefault(node, {})[uid] = company
        for term in company.avoids:
            self._carry(term, 1)
        return node in self._nodes and self._count(self._nodes[node], company, 1)

    def leave(self, uid: str, node: str) -> None:
        company = self._standing[node].pop(uid)
        if not self._standing[node]:
            del self._standing[node]
        if node in self._nodes:
            self._count(self._nodes[node], company, -1)
        for term in company.avoids:
            self._carry(term, -1)

    def _carry(self, term: PodTerm, number: int) -> None:
        meant = (*term.namespaces, *(() if term.selected is None else (None,)))
        if term not in self._reserved_pods:
            self._carried[term] = Tally((term,))
            for name in meant:
                self._carried_for.setdefault(name, set()).add(term)
        self._reserved_pods[term] += number
        if not self._reserved_pods[term]:
            del self._reserved_pods[term], self._carried[term]
            for name in meant:
                self._carried_for[name].discard(term)
                if not self._carried_for[name]:
                    del self._carried_for[name]

    def _count_all(self, node: str, number: int) -> None:
        for company in self._standing.get(node, {}).values():
            self._count(self._nodes[node], company, number)

    def _count(self, node: Labels, company: Company, number: int) -> bool:
        for term in company.avoids:
            self._carried[term].count(node, number)
        is_news = False
        for tally in self._asked.values():
            if tally.means(company, self._namespaces):
                before = len(tally.places)
                tally.count(node, number)
                is_news |= tally.is_sought and len(tally.places) > before
        return is_news

    # What it means for a pod to come.

    def bounds(self, company: Company) -> Bounds:
        kept_away = frozenset(self._meaning(company))
        if not (kept_away or company.joins or company.avoids):
            return BOUNDLESS
        is_one = bool(company.joins) and all(term.matches(company, self._namespaces) for term in company.joins)
        return Bounds(company.joins, company.avoids, kept_away, is_one)

    def _meaning(self, company: Company) -> Iterator[PodTerm]:
        for name in (company.namespace, None):
            for term in self._carried_for.get(name, ()):
                if term.matches(company, self._namespaces):
                    yield term

    def objection(self, bounds: Bounds, node: str) -> str | None:
        """What other pods have against one with such bounds on that node."""
        if bounds is BOUNDLESS:
            return None
        labels = self._nodes.get(node, {})
        if bounds.joins and not self._is_joined(bounds, labels):
            return JOINS_NOBODY
        if any(self._tally((term,)).is_at(labels) for term in bounds.avoids):
            return AVOIDS
        carried = (self._carried.get(term) for term in bounds.kept_away)
        return KEPT_AWAY if any(tally is not None and tally.is_at(labels) for tally in carried) else None

    def _is_joined(self, bounds: Bounds, node: Labels) -> bool:
        """Where nobody is yet whom it could join, one of their own kind may be the first."""
        tally = self._tally(bounds.joins)
        tally.is_sought = True
        if not tally.places and bounds.is_of_those_it_joins:
            return all(term.topology in node for term in bounds.joins)
        return tally.is_all_round(node)

    def stage(self, bounds: Bounds) -> int:
        """Changes as soon as there are more places than before where such a pod can join somebody."""
        return len(self._tally(bounds.joins).places) if bounds.joins else 0

    def _tally(self, terms: tuple[PodTerm, ...]) -> Tally:
        known = self._asked.get(terms)
        if known is not None:
            return known
        if len(self._asked) >= MOST_KEPT:
            self._asked.clear()
        tally = self._asked[terms] = Tally(terms)
        for name, node in self._nodes.items():
            for company in self._standing.get(name, {}).values():
                if tally.means(company, self._namespaces):
                    tally.count(node, 1)
        return tally
