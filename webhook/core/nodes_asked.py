"""The nodes that a pod allows: nodeName, nodeSelector, required affinity, tolerations."""

import itertools
import re
from collections.abc import Callable, Mapping

from attrs import evolve, field, frozen

from webhook.core.device import Taint
from webhook.core.pod import Pod, Requirement, Term, Toleration

Labels = Mapping[str, str]
NAME_FIELD = "metadata.name"
NUMBER = re.compile(r"[+-]?[0-9]{1,20}")


@frozen
class Expression:
    """One match expression for a label, or for the node's name."""

    key: str
    operator: str
    values: frozenset[str]

    def matches(self, value: str | None) -> bool:
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt":
                return compares(value, self.values, lambda a, b: a > b)
            case "Lt":
                return compares(value, self.values, lambda a, b: a < b)
            case _:
                return False


def compares(value: str | None, bounds: frozenset[str], ordered: Callable[[int, int], bool]) -> bool:
    if value is None or len(bounds) != 1:
        return False
    left, right = counted(value), counted(next(iter(bounds)))
    return left is not None and right is not None and ordered(left, right)


def counted(text: str) -> int | None:
    """The number as the scheduler parses it: 64 bits, digits and an optional sign."""
    number = int(text) if NUMBER.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


@frozen
class NodeTerm:
    """Expressions that must all match. As in Kubernetes, a term without expressions matches no node."""

    labels: tuple[Expression, ...]
    fields: tuple[Expression, ...]

    @property
    def is_empty(self) -> bool:
        return not self.labels and not self.fields

    def matches(self, name: str, labels: Labels) -> bool:
        if self.is_empty:
            return False
        if not all(f.key == NAME_FIELD and f.matches(name) for f in self.fields):
            return False
        return all(e.matches(labels.get(e.key)) for e in self.labels)

    @property
    def is_one_node(self) -> bool:
        """Whether the term allows one node by name, as the pins that dressing adds."""
        return any(is_pin(f) for f in self.fields)

    @property
    def without_pins(self) -> "NodeTerm":
        return evolve(self, fields=tuple(f for f in self.fields if not is_pin(f)))

    def names(self) -> frozenset[str] | None:
        """The node names that the term allows; None if it allows any."""
        for f in self.fields:
            if f.key == NAME_FIELD and f.operator == "In":
                return f.values
        return None


def is_pin(one: Expression) -> bool:
    return one.key == NAME_FIELD and one.operator == "In" and len(one.values) == 1


@frozen
class NodesAsked:
    """A pod's own constraints on nodes."""

    node_name: str | None = None
    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeTerm, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()
    keys: frozenset[str] = field(init=False, eq=False, repr=False)
    """The node labels that the constraints use."""

    @keys.default
    def _keys(self) -> frozenset[str]:
        in_terms = (e.key for term in self.terms or () for e in term.labels)
        return frozenset(itertools.chain((key for key, _ in self.selector), in_terms))

    @classmethod
    def of(cls, pod: Pod) -> "NodesAsked":
        spec = pod.body
        node_affinity = spec.affinity.node_affinity if spec.affinity else None
        required = node_affinity.required if node_affinity else None
        return cls(
            node_name=spec.node_name or None,
            selector=tuple((k, v or "") for k, v in (spec.node_selector or {}).items()),
            terms=None if required is None else tuple(map(node_term, required.node_selector_terms or ())),
            tolerations=tuple(spec.tolerations or ()),
        )

    def within(self, terms: tuple[NodeTerm, ...]) -> "NodesAsked":
        """The same constraints, and one of these terms must match too."""
        if self.terms is None:
            return evolve(self, terms=terms)
        pairs = itertools.product(self.terms, terms)
        both = (NodeTerm(a.labels + b.labels, a.fields + b.fields) for a, b in pairs if not (a.is_empty or b.is_empty))
        return evolve(self, terms=tuple(both))

    @property
    def without_pins(self) -> "NodesAsked":
        """The constraints as they were before dressing made a term for each of several nodes from each term."""
        if self.terms is None:
            return self
        pinned = dict.fromkeys(term.without_pins for term in self.terms if term.is_one_node)
        return evolve(self, terms=(*(term for term in self.terms if not term.is_one_node), *pinned))

    @property
    def expressions(self) -> int:
        """The number of expressions that are evaluated for one node at most."""
        return len(self.selector) + sum(len(term.labels) + len(term.fields) for term in self.terms or ())

    def matches(self, name: str, labels: Labels) -> bool:
        if self.node_name is not None and self.node_name != name:
            return False
        if not all(labels.get(key) == value for key, value in self.selector):
            return False
        return self.terms is None or any(term.matches(name, labels) for term in self.terms)

    def tolerates(self, taint: Taint) -> bool:
        return not taint.repels or any(tolerated(taint, t) for t in self.tolerations)

    def names(self) -> frozenset[str] | None:
        """The node names that the constraints allow; None if they allow any."""
        if self.node_name is not None:
            return frozenset({self.node_name})
        if self.terms is None:
            return None
        limits = [term.names() for term in self.terms if not term.is_empty]
        if None in limits:
            return None
        return frozenset[str]().union(*(names for names in limits if names))

    def values_of(self, key: str) -> frozenset[str] | None:
        """The values of a label that the constraints allow; None if they allow others, or no label."""
        for wanted, value in self.selector:
            if wanted == key:
                return frozenset({value})
        if self.terms is None:
            return None
        found: set[str] = set()
        for term in self.terms:
            limits = [e.values for e in term.labels if e.key == key and e.operator == "In"]
            if not limits and not term.is_empty:
                return None
            found.update(*limits[:1])
        return frozenset(found)


def node_term(term: Term) -> NodeTerm:
    return NodeTerm(
        tuple(map(expression, term.match_expressions or ())), tuple(map(expression, term.match_fields or ()))
    )


def expression(asked: Requirement) -> Expression:
    return Expression(asked.key, asked.operator, frozenset(asked.values or ()))


def tolerated(taint: Taint, toleration: Toleration) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    is_equal = toleration.operator in (None, "", "Equal") and (toleration.value or "") == taint.value
    return bool(toleration.key) and is_equal
