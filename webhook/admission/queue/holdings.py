"""What is held for pods behind shut gates: found again, adopted, or given back where it is of no use to them."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta

import structlog

from webhook.admission.queue.gates import GateClient, GateError
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core import check
from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import LedgerError
from webhook.core.fleet import Fleet
from webhook.core.queue_order import OWN_IDS, QueuedPod
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.ledger import Ledger
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# A reservation for a pod without a name is nobody's when its creation must have come to its end: the API server gives
# a request 60 s.
LONGEST_CREATION = timedelta(seconds=60)


class QueueReservations:
    """By what the ledger had at the last look."""

    def __init__(
        self,
        pods: WaitingPods,
        ledger: Ledger,
        fleet: Fleet,
        policy: EvidencePolicy,
        gates: GateClient,
        clock: Clock,
    ) -> None:
        self._pods = pods
        self._ledger = ledger
        self._fleet = fleet
        self._policy = policy
        self._gates = gates
        self._clock = clock
        self._left_over: dict[tuple[str, str], list[Reservation]] = {}
        """What no pod has come for yet, by namespace and digest of its claim."""

    def look(self) -> Mapping[str, list[Reservation]]:
        """What each pod that waits holds, by its uid; first what it is to keep."""
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
        """Why the reservation is of no use to the pod."""
        claim, pod = waiter.claim, waiter.pod
        if held.claim_digest != claim.digest or not held.may_belong_to(pod):
            return "it was made for another claim"
        return self._node_objection(claim, held.node)

    def _node_objection(self, claim: Claim, node: str) -> str:
        unproven = check.still_proven(claim, node, self._fleet, self._policy)
        if unproven is not None:
            return unproven.message
        is_selected = claim.nodes.matches(node, self._fleet.indexed_nodes[node].labels)
        return "" if is_selected else f"node {node} is not what the pod selects any more"

    async def give_back(self, pod: PodIdentity, held: Reservation, why: str) -> bool:
        """Whether it is free. Of a pod whose gate is open already, by an answer that was lost, nothing is taken."""
        owner = pod if held.uid == pod.uid else PodIdentity(held.namespace, "", "")
        try:
            if not await self._gates.is_shut(pod):
                self._pods.forget(pod.uid)
                return False
            is_free = await self._ledger.release(held.id, owner, node=held.node, since=held.since)
        except (GateError, LedgerError) as exc:
            log.warning("not given back", reservation=held.id, problem=str(exc))
            return False
        log.info("given back behind a gate", reservation=held.id, pod=f"{pod.namespace}/{pod.name}", why=why)
        return is_free

    def adopted(self, waiter: QueuedPod) -> Reservation | None:
        """What nobody else can come for: while this pod exists no other can be created under its name, and no creation
        lasts longer than the API server lets it."""
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
