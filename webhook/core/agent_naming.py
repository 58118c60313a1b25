"""How to read the node name or the hash of a SPIRE agent from its selectors or its SPIFFE ID."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

from attrs import frozen

ID_SCHEME: Final = "spiffe://"
PLACEHOLDER: Final = re.compile(r"\{([a-z_]*)\}")
SELECTOR: Final = re.compile(r"([A-Za-z0-9_.-]+):([!-~]+)")
# Any account with write access to Nodes or Pods sets these labels, so they prove nothing.
WRITABLE: Final = ("k8s_psat:agent_node_label", "k8s_psat:agent_pod_label")


class Selector(Protocol):
    """One selector of an agent."""

    @property
    def type(self) -> str: ...

    @property
    def value(self) -> str: ...


class Agent(Protocol):
    """One agent as SPIRE Server lists it."""

    @property
    def trust_domain(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def selectors(self) -> Sequence[Selector]: ...


class Naming(Protocol):
    def values(self, agent: Agent) -> frozenset[str]:
        """All values that match. The caller rejects an agent with several."""


@frozen
class BySelector:
    """`x509pop:san:node-name` reads the part after `san:node-name:` in selectors of type `x509pop`."""

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
    """Reads one placeholder of a template such as `spiffe://{trust_domain}/spire/agent/x509pop/{node}/{hash}`.

    A path cannot contain a colon, so a hash has a dot instead.
    """

    form: "re.Pattern[str]"
    placeholder: str

    def values(self, agent: Agent) -> frozenset[str]:
        found = self.form.fullmatch(f"{ID_SCHEME}{agent.trust_domain}{agent.path}")
        if found is None:
            return frozenset()
        value = found[self.placeholder]
        return frozenset({value.replace(".", ":") if self.placeholder == "hash" else value})


def naming_of(text: str, placeholder: str) -> Naming:
    """Parse a setting; `placeholder` is `node` or `hash`. Raises ValueError."""
    if text.startswith(ID_SCHEME):
        return by_id(text, placeholder)
    parts = SELECTOR.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is neither TYPE:PREFIX nor a SPIFFE ID with {{{placeholder}}}")
    if text.startswith(WRITABLE):
        raise ValueError(f"{text!r} is a label of an object in the cluster; labels prove nothing")
    return BySelector(parts[1], parts[2].rstrip(":") + ":")


def by_id(text: str, placeholder: str) -> ById:
    segments = text.removeprefix(ID_SCHEME).split("/")
    found = PLACEHOLDER.findall(text)
    if found.count(placeholder) != 1 or len(set(found)) < len(found) or set(found) - {"trust_domain", "node", "hash"}:
        raise ValueError(
            f"{text!r} must contain {{{placeholder}}} once; {{trust_domain}} and one other placeholder are optional"
        )
    if any(PLACEHOLDER.search(one) and not PLACEHOLDER.fullmatch(one) for one in segments):
        raise ValueError(f"in {text!r} a placeholder must be a whole path segment")
    if segments[1:3] != ["spire", "agent"]:
        raise ValueError(f"{text!r} is not the ID of an agent: spiffe://{{trust_domain}}/spire/agent/...")
    pattern = re.escape(text)
    for one in found:
        pattern = pattern.replace(re.escape(f"{{{one}}}"), f"(?P<{one}>[A-Za-z0-9._-]+)")
    return ById(re.compile(pattern), placeholder)
