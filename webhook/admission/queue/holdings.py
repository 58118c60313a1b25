"""Reservations of pods that wait behind our gate: finds them again, adopts them, or releases those that the pod cannot
use."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta

import structlog
from attrs import define, field

from webhook.admission.queue.gates import GateClient, GateError
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core import check
from webhook.core.claim import Claim
from webhook.core.decide import ClaimSearch, EvidencePolicy
from webhook.core.errors import LedgerError
from webhook.core.fleet import Fleet
from webhook.core.queue_order import OWN_IDS, QueuedPod
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.ledger import Ledger
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# After this time a reservation for a pod without a name belongs to no pod: the API server limits a request to 60 s.
LONGEST_CREATION = timedelta(seconds=60)


@define(eq=False, repr=False)
class QueueReservations:
    """Works on the ledger's state at the last call of `by_pod`."""

    _pods: WaitingPods
    _ledger: Ledger
    _fleet: Fleet
    _policy: EvidencePolicy
    _gates: GateClient
    _clock: Clock
    _left_over: dict[tuple[str, str], list[Reservation]] = field(factory=dict, init=False)
    """Reservations without a pod, by namespace and claim digest."""

    def by_pod(self) -> Mapping[str, list[Reservation]]:
        """The reservations of each waiting pod by uid; the one to keep comes first."""
        held_by = defaultdict[str, list[Reservation]](list)
        left_over = defaultdict[tuple[str, str], list[Reservation]](list)
        moment = self._clock()
        for one in self._ledger.reservations():
            uid = one.uid or (one.id.removeprefix(OWN_IDS) if one.id.startswith(OWN_IDS) else None)
            if one.phase is Phase.RELEASING or one.is_past_deadline(moment):
                continue
            if uid is None and one.phase is Phase.PENDING:
                left_over[one.namespace, one.claim_digest].append(one)
            elif uid in self._pods.raws:
                held_by[uid].append(one)
        self._left_over = dict(left_over)
        for held in held_by.values():
            held.sort(key=lambda one: (one.phase is not Phase.FINALIZED, one.since, one.node))
        return held_by

    def objection(self, waiter: QueuedPod, held: Reservation) -> str:
        """Why the pod cannot use the reservation; empty if it can."""
        claim, pod = waiter.claim, waiter.pod
        if held.claim_digest != claim.digest or not held.may_belong_to(pod):
            return "it was made for another claim"
        return self._node_objection(claim, held.node)

    def _node_objection(self, claim: Claim, node: str) -> str:
        unproven = check.still_proven(claim, node, self._fleet, self._policy)
        if unproven is not None:
            return unproven.message
        indexed = self._fleet.indexed_nodes[node]
        if not claim.nodes.matches(node, indexed.labels):
            return f"the pod no longer selects node {node}"
        other = ClaimSearch(claim, self._fleet, self._policy).injection_objection(indexed)
        return "" if other is None else f"node {node} has {other}"

    async def release(self, pod: PodIdentity, held: Reservation, why: str) -> bool:
        """Releases the reservation; returns whether it is free. Does nothing if the gate is open already: an answer may
        have been lost."""
        owner = pod if held.uid == pod.uid else PodIdentity(held.namespace, "", "")
        try:
            if not await self._gates.is_closed(pod):
                self._pods.forget(pod.uid)
                return False
            is_free = await self._ledger.release(held.id, owner, node=held.node, since=held.since)
        except (GateError, LedgerError) as exc:
            log.warning("reservation not released", reservation=held.id, problem=str(exc))
            return False
        log.info(
            "reservation of a waiting pod released", reservation=held.id, pod=f"{pod.namespace}/{pod.name}", why=why
        )
        return is_free

    def adopt(self, waiter: QueuedPod) -> Reservation | None:
        """A reservation that only this pod can use. No other pod can be created under its name while it exists, and no
        creation outlasts the API server's limit."""
        left = self._left_over.get((waiter.pod.namespace, waiter.claim.digest), [])
        moment = self._clock()
        for one in left:
            is_abandoned = one.pod_name is None and one.since + LONGEST_CREATION <= moment
            is_its_own = one.pod_name == waiter.pod.name or is_abandoned
            if is_its_own and not self._node_objection(waiter.claim, one.node):
                left.remove(one)
                log.info("reservation adopted", reservation=one.id, pod=f"{one.namespace}/{waiter.pod.name}")
                return one
        return None
