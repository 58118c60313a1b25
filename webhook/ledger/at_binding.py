"""Reservations that are made when a scheduler binds a pod. The pod exists, and the Binding writes its annotations.

The API server may carry out a Binding for a while after its review, so a reservation is not released before that time
unless the pod is on a node. Each pod has at most one such reservation on a node.
"""

import hashlib
from datetime import datetime, timedelta

from webhook.core.queue_order import OWN_IDS
from webhook.core.reservation import PodIdentity, Reservation, ReservationId

# How long after its review the API server may still carry out a Binding.
MAX_BINDING_DURATION = timedelta(seconds=60)
# How long after it was made or renewed a reservation is accepted by the last review of its Binding.
ACCEPTED_FOR = timedelta(seconds=15)
# A pod whose scheduler tries one node after the other holds GPUs on this many at once.
MAX_NODES = 2
IDS = f"{OWN_IDS}on-"


def reservation_id_on(node: str, pod: PodIdentity) -> ReservationId:
    """Derived from the pod and the node, so that a repeated Binding finds the reservation of the first one."""
    return ReservationId(f"{IDS}{hashlib.sha256(node.encode()).hexdigest()[:12]}-{pod.uid}")


def is_made_at_binding(held: Reservation) -> bool:
    return held.id.startswith(IDS)


def is_accepted(held: Reservation, now: datetime) -> bool:
    return now < held.since + ACCEPTED_FOR


def binding_ends_after(clock_skew: timedelta) -> timedelta:
    """How long after it was made or renewed a reservation may be needed by a Binding."""
    return ACCEPTED_FOR + MAX_BINDING_DURATION + 2 * clock_skew
