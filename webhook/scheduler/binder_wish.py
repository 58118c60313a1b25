"""What a pod wants of nodes, as the binder reads it, and what becomes of tries to put it there."""

from enum import StrEnum

from attrs import frozen

from webhook.core.claim import Claim
from webhook.scheduler.binder_choice import Shape


class Outcome(StrEnum):
    """What became of one try to put a pod on a node."""

    BOUND = "bound"
    NO_NODE = "no_node"
    PROVISIONING = "provisioning"
    NOT_RESERVED = "not_reserved"
    REFUSED = "refused"
    CONFLICT = "conflict"
    LOST = "lost"
    FAILED = "failed"


@frozen
class Reserved:
    """Its GPUs are on that node."""

    claim: Claim
    node: str


@frozen
class Anywhere:
    """Any node of the shape will do."""

    shape: Shape


@frozen
class Hopeless:
    """It can be put nowhere as it is."""

    why: str
    outcome: Outcome


Wish = Reserved | Anywhere | Hopeless
