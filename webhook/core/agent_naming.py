"""Where an agent's row says which node it is of, or which hash: in a selector, or in the agent's SPIFFE ID."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

from attrs import frozen

ID_SCHEME: Final = "spiffe://"
PLACE: Final = re.compile(r"\{([a-z_]*)\}")
SELECTOR: Final = re.compile(r"([A-Za-z0-9_.-]+):([!-~]+)")
# Whoever may write to Nodes or Pods writes these labels: they prove nothing.
WRITABLE: Final = ("k8s_psat:agent_node_label", "k8s_psat:agent_pod_label")


class Selector(Protocol):
    """One selector of an agent."""

    @property
    def type(self) -> str: ...

    @property
    def value(self) -> str: ...


class Agent(Protocol):
    """What SPIRE Server says of one of its agents."""

    @property
    def trust_domain(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def selectors(self) -> Sequence[Selector]: ...


class Naming(Protocol):
    def values(self, agent: Agent) -> frozenset[str]:
        """All that it says. What says two things says nothing, but that is for others to judge."""


@frozen
class BySelector:
    """`x509pop:san:node-name` is what stands behind `san:node-name:` in selectors of the type `x509pop`."""

    type: str
    prefix: str

    def values(self, agent: Agent) -> frozenset[str]:
        return frozenset(
            one.value.removeprefix(self.prefix)
            for one in agent.selectors
            if one.type == self.type and one.value.startswith(self.prefix)
        )


@frozen
class ById:
    """A template such as `spiffe://{trust_domain}/spire/agent/x509pop/{node}/{hash}`, of which one place is meant.

    A path cannot hold a colon: a hash has a dot where its colon was.
    """

    form: "re.Pattern[str]"
    place: str

    def values(self, agent: Agent) -> frozenset[str]:
        found = self.form.fullmatch(f"{ID_SCHEME}{agent.trust_domain}{agent.path}")
        if found is None:
            return frozenset()
        return frozenset({found[self.place].replace(".", ":") if self.place == "hash" else found[self.place]})


def naming_of(text: str, place: str) -> Naming:
    """What a setting says; `place` is `node` or `hash`. Raises ValueError with what is wrong."""
    if text.startswith(ID_SCHEME):
        return by_id(text, place)
    parts = SELECTOR.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is neither TYPE:PREFIX nor a SPIFFE ID with {{{place}}}")
    if text.startswith(WRITABLE):
        raise ValueError(f"{text!r} is what somebody wrote on an object of the cluster; it proves nothing")
    return BySelector(parts[1], parts[2].rstrip(":") + ":")


def by_id(text: str, place: str) -> ById:
    segments = text.removeprefix(ID_SCHEME).split("/")
    places = PLACE.findall(text)
    if places.count(place) != 1 or len(set(places)) < len(places) or set(places) - {"trust_domain", "node", "hash"}:
        raise ValueError(f"{text!r} does not name {{{place}}} once, beside {{trust_domain}} and one other at most")
    if any(PLACE.search(one) and not PLACE.fullmatch(one) for one in segments):
        raise ValueError(f"in {text!r} a place shares its segment")
    if segments[1:3] != ["spire", "agent"]:
        raise ValueError(f"{text!r} is not the ID of an agent: spiffe://{{trust_domain}}/spire/agent/...")
    pattern = re.escape(text)
    for one in places:
        pattern = pattern.replace(re.escape(f"{{{one}}}"), f"(?P<{one}>[A-Za-z0-9._-]+)")
    return ById(re.compile(pattern), place)
