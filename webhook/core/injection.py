"""The injection: what gives containers their GPUs. Each node and each pod with GPUs has one.

A node has the one in its label, a pod the one in its namespace's annotation when it was created; without these, both
have the installation's. A pod with GPUs goes to nodes of its own injection only. The one of a node is in force when
`reconcile` has written it into the GPUNode.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from webhook.core.device import Node
from webhook.core.errors import InvalidPodError
from webhook.core.keys import INJECTION
from webhook.core.reserve import Reserve


class Injection(StrEnum):
    """What makes a GPU visible in a container: NVIDIA's runtime, CUDA alone, or the kubelet by a device plugin or a
    ResourceClaim."""

    NVIDIA = "nvidia"
    CUDA = "cuda"
    PLUGIN = "plugin"
    DRA = "dra"


ALLOWED: Final = ", ".join(Injection)
# Of nodes on which nothing is reserved.
NATIVE: Final = "native"
# Versions that do not record the default do not know these.
ALWAYS_RECORDED: Final = frozenset({Injection.PLUGIN, Injection.DRA})


def default_of_nodes(injection: Injection, reserve: Reserve) -> Injection | None:
    """The injection of nodes without the label. None if kube-scheduler allocates their GPUs: nothing is reserved
    there."""
    return None if injection is Injection.DRA and reserve is Reserve.BIND else injection


def may_choose_late(injection: Injection, default: Injection) -> bool:
    """Whether the GPUs of a pod may be chosen after its creation. A device plugin gives GPUs to pods whose number is
    reserved at creation. kube-scheduler chooses GPUs only where unlabelled nodes are for it."""
    return injection is not Injection.PLUGIN and (injection is not Injection.DRA or default is Injection.DRA)


def recorded_injection(own: Injection | None, default: Injection) -> str | None:
    """For the record of a claim. The default is not recorded, unless older versions do not know it."""
    injection = default if own is None else own
    return None if injection is default and injection not in ALWAYS_RECORDED else injection.value


def injection_asked(recorded: str | None, default: Injection | None) -> str:
    """The injection of a pod by the record of its claim. A newer version may have recorded one that is not known."""
    if recorded is None:
        return Injection.NVIDIA if default is None or default in ALWAYS_RECORDED else default
    return recorded


def injection_of(recorded: str | None, default: Injection) -> Injection:
    """The same. Raises InvalidPodError if it is not known."""
    asked = injection_asked(recorded, default)
    found = known_injection(asked)
    if found is None:
        raise InvalidPodError(f"the injection {asked[:40]!r} is not known; allowed are {ALLOWED}")
    return found


def injection_of_node(labels: Mapping[str, str], default: Injection | None) -> Injection | None:
    """By the label. None if it has another value, such as `native`: nothing is to be reserved on the node."""
    value = labels.get(INJECTION)
    return default if value is None else known_injection(value)


def injection_in_force(node: Node, default: Injection | None) -> Injection | None:
    """None if nothing is reserved on the node."""
    return injection_of_node(node.labels, default) if node.injection is None else known_injection(node.injection)


def takes_native(node: Node, default: Injection | None) -> bool:
    """Whether kube-scheduler may allocate GPUs of the node that no reservation has. Where it has all GPUs of the node,
    this ends with the label: reservations begin later. Beside reservations, only if they are the default."""
    injection = injection_in_force(node, default)
    if injection is None:
        return injection_of_node(node.labels, default) is None
    return injection in (Injection.NVIDIA, Injection.CUDA) and default is not None


def known_injection(value: str) -> Injection | None:
    return Injection(value) if value in tuple(Injection) else None
