"""Reserves the GPUs of a pod in the review of its Binding, on the node that the scheduler chose."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from webhook.admission.reserving import Reserver
from webhook.admission.rules import Rules
from webhook.core import check, gpu_order
from webhook.core.binding import Binding
from webhook.core.claim import Claim
from webhook.core.dress import RawPod, annotations_of
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, Reservation, ReservationRequest
from webhook.core.verdict import Deny
from webhook.ledger.at_binding import MAX_NODES, reservation_id_on
from webhook.ledger.end_of_use import longest_grace_in
from webhook.runtime.clock import Clock


class BindingReserver:
    """Reserves GPUs for pods that were read from the API server. Raises InvalidPodError, LedgerError and
    NamespacesUnavailableError."""

    def __init__(self, reserver: Reserver, rules: Rules, clock: Clock) -> None:
        self._reserver = reserver
        self._rules = rules
        self._clock = clock
        # The nodes on which reservations are being made, by the uid of the pod.
        self._nodes_in_work: defaultdict[str, list[str]] = defaultdict(list)

    async def annotations(
        self, binding: Binding, raw: RawPod, claim: Claim, answer_by: datetime, *, is_dry_run: bool
    ) -> Mapping[str, str] | Deny:
        """The annotations for the Binding, once the GPUs are reserved. A dry run reserves nothing and adds none."""
        pod = check.identity_of(Pod.parse(raw))
        refused = await self._refusal(binding, raw, claim, pod)
        if refused is not None or is_dry_run:
            return refused or {}
        ask = ReservationRequest(
            reservation_id_on(binding.node, pod),
            pod.namespace,
            claim.digest,
            pod.name,
            claim.is_shared,
            uid=pod.uid,
            grace=longest_grace_in(raw),
        )
        with self._in_work(pod.uid, binding.node):
            held = await self._reserver.reserve_for_pod(ask, claim, binding.node, answer_by=answer_by)
        if isinstance(held, Deny):
            return self._objection(claim, binding.node) or held
        return annotations_of(held.id, ",".join(self._ordered(claim, held)), held.node, self._rules.dress)

    async def _refusal(self, binding: Binding, raw: RawPod, claim: Claim, pod: PodIdentity) -> Deny | None:
        fleet = self._reserver.fleet
        fleet.advance(self._clock())
        known = self._reserver.ledger.all_of_pod(pod.uid)
        claims = await self._rules.claims.within(pod.namespace)
        return (
            check.can_be_bound(raw)
            or check.matches_unreserved_pod(raw, Pod.parse(raw), claim, self._rules.dress, claims)
            or check.grace_within_limit(Pod.parse(raw), self._rules.dress)
            or self._objection(claim, binding.node, has_reservation=any(one.node == binding.node for one in known))
            or too_many_nodes(binding, {*(one.node for one in known), *self._nodes_in_work.get(pod.uid, ())})
            or self._reserver.too_many_orphans(pod.namespace, claim.count)
        )

    @contextmanager
    def _in_work(self, uid: str, node: str) -> Iterator[None]:
        """Reviews of several Bindings of the pod at the same time count each other's nodes."""
        self._nodes_in_work[uid].append(node)
        try:
            yield
        finally:
            self._nodes_in_work[uid].remove(node)
            if not self._nodes_in_work[uid]:
                del self._nodes_in_work[uid]

    def _objection(self, claim: Claim, node: str, *, has_reservation: bool = False) -> Deny | None:
        fleet, policy = self._reserver.fleet, self._reserver.policy
        return check.serves_on(claim, node, fleet, policy, has_reservation=has_reservation)

    def _ordered(self, claim: Claim, held: Reservation) -> tuple[str, ...]:
        indexed = self._reserver.fleet.indexed_nodes.get(held.node)
        return gpu_order.in_map_order(claim, held.uuids, () if indexed is None else indexed.node.devices)


def too_many_nodes(binding: Binding, nodes: set[str]) -> Deny | None:
    """The API server may still carry out the earlier Bindings, so their GPUs are not free."""
    if binding.node in nodes or len(nodes) < MAX_NODES:
        return None
    return Deny(
        Reason.RESERVATION_CONFLICT,
        f"pod {binding.pod.namespace}/{binding.pod.name} has reservations on {' and '.join(sorted(nodes))}, and its "
        "Bindings to these nodes were not carried out",
        hint="the reservations end about a minute after the Bindings",
    )
