"""Whether a node has room for a pod at this moment: what pods use, what nodes have, and what speaks against a node.

By the scheduler's own rules. No I/O, no clock, no await.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
from attrs import define, field, frozen

from webhook.core.device import Node, Taint
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import WireStruct
from webhook.core.quantity import thousandths

Amounts = dict[str, str | int | float | None]

PODS = "pods"
ONE_POD = 1000
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - a port on every address of the node, as pods say it
# By these, nodes are compared: the one that is least full gets the next pod.
COMPARED = ("cpu", "memory", PODS)
# What a pod that is made for cordoned nodes tolerates.
CORDON = Taint("node.kubernetes.io/unschedulable")

NOT_SELECTED = "not selected by the pod"
NOT_READY = "not ready"
CORDONED = "cordoned"
TAINTED = "with a taint that the pod does not tolerate"
PORT_TAKEN = "with a host port of the pod in use"


class PortWire(WireStruct, frozen=True):
    host_port: int | None = None
    host_ip: str | None = msgspec.field(default=None, name="hostIP")
    protocol: str | None = None


class ResourcesWire(WireStruct, frozen=True):
    requests: Amounts | None = None
    limits: Amounts | None = None


class ContainerWire(WireStruct, frozen=True):
    resources: ResourcesWire | None = None
    restart_policy: str | None = None
    ports: list[PortWire] | None = None

    def asked(self) -> dict[str, int]:
        """What is not requested and limited is requested in that amount: the API server writes both, others may not."""
        both = self.resources or ResourcesWire()
        return in_thousandths({**(both.limits or {}), **(both.requests or {})})


class SpecWire(WireStruct, frozen=True):
    """The members of a pod's spec that say what it uses."""

    containers: list[ContainerWire] | None = None
    init_containers: list[ContainerWire] | None = None
    overhead: Amounts | None = None
    resources: ResourcesWire | None = None
    host_network: bool | None = None


Port = tuple[str, int, str]


@frozen
class Needs:
    """What one pod uses of its node, in thousandths."""

    amounts: tuple[tuple[str, int], ...] = ((PODS, ONE_POD),)
    ports: frozenset[Port] = frozenset()

    @classmethod
    def of(cls, spec: SpecWire) -> "Needs":
        """Raises InvalidPodError."""
        amounts = together(spec)
        if spec.resources is not None:  # said of the pod as a whole: that counts
            amounts |= in_thousandths(spec.resources.requests or {})
        for name, number in in_thousandths(spec.overhead or {}).items():
            amounts[name] = amounts.get(name, 0) + number
        amounts[PODS] = ONE_POD
        return cls(tuple(sorted(one for one in amounts.items() if one[1] > 0)), frozenset(host_ports(spec)))


def in_thousandths(amounts: Amounts) -> dict[str, int]:
    return {name: thousandths(amount) for name, amount in amounts.items()}


def together(spec: SpecWire) -> dict[str, int]:
    """By Kubernetes' rule: all containers and sidecars at once, or an init container beside the sidecars that start
    before it, whichever is more; for each resource by itself."""
    running, sidecars, most = Counter[str](), Counter[str](), Counter[str]()
    for container in spec.init_containers or ():
        own = container.asked()
        if container.restart_policy == "Always":
            sidecars.update(own)
            most |= sidecars
        else:
            most |= sidecars + Counter(own)
    for container in spec.containers or ():
        running.update(container.asked())
    return dict((running + sidecars) | most)


def host_ports(spec: SpecWire) -> Iterator[Port]:
    sidecars = (one for one in spec.init_containers or () if one.restart_policy == "Always")
    for container in (*(spec.containers or ()), *sidecars):
        for port in container.ports or ():
            if port.host_port:
                yield port.protocol or "TCP", port.host_port, port.host_ip or ANY_ADDRESS


def collide(one: Port, other: Port) -> bool:
    return one[:2] == other[:2] and (ANY_ADDRESS in (one[2], other[2]) or one[2] == other[2])


@define(eq=False)
class Room:
    """One node, what it has for pods, and what those on it use."""

    node: Node
    allocatable: Mapping[str, int]
    used: dict[str, int] = field(factory=dict)
    ports: Counter[Port] = field(factory=Counter)

    def take(self, needs: Needs) -> None:
        for name, number in needs.amounts:
            self.used[name] = self.used.get(name, 0) + number
        if needs.ports:
            self.ports.update(needs.ports)

    def give_back(self, needs: Needs) -> None:
        for name, number in needs.amounts:
            self.used[name] -= number
        for port in needs.ports:
            self.ports[port] -= 1
            if not self.ports[port]:
                del self.ports[port]

    def has_room(self, needs: Needs) -> bool:
        used, allocatable = self.used, self.allocatable
        return all(used.get(name, 0) + number <= allocatable.get(name, 0) for name, number in needs.amounts) and (
            not needs.ports or not self._is_port_taken(needs)
        )

    def shortages(self, needs: Needs) -> list[str]:
        """What there is too little of; empty if the pod has room."""
        short = [
            f"with too little {name}"
            for name, number in needs.amounts
            if self.used.get(name, 0) + number > self.allocatable.get(name, 0)
        ]
        return [*short, PORT_TAKEN] if self._is_port_taken(needs) else short

    def _is_port_taken(self, needs: Needs) -> bool:
        return any(collide(one, other) for one in needs.ports for other in self.ports)

    def fullness(self) -> float:
        """How full it is, from 0 to 1, where it is fullest."""
        used, allocatable = self.used, self.allocatable
        return max(used.get(name, 0) / (allocatable.get(name) or 1) for name in COMPARED)

    def objection(self, asked: NodesAsked) -> str | None:
        """What speaks against putting such a pod there, however much room there is."""
        node = self.node
        if not asked.matches(node.name, node.labels):
            return NOT_SELECTED
        if not node.is_ready:
            return NOT_READY
        if node.is_cordoned and not asked.tolerates(CORDON):
            return CORDONED
        repelling = (taint for taint in node.taints if taint != CORDON)
        return None if all(map(asked.tolerates, repelling)) else TAINTED


def sentence(counts: Mapping[str, int], nodes: int) -> str:
    """Why no node will do, as `kubectl describe` shows it: the most frequent first."""
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    said = ", ".join(f"{number} {text}" for text, number in ranked)
    return f"0/{nodes} nodes will do" + (f": {said}" if said else "")
