"""Checks whether a pod may be bound to a node. Used by the reviews of Bindings and by our own binding."""

from datetime import timedelta

from webhook.admission.namespaces import ClaimReader
from webhook.admission.reserving import Reserver
from webhook.core import check, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, claim_of, recorded_claim, strictest_claim
from webhook.core.errors import ReservationConflictError, ReservationExpiredError, UnknownReservationError
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, PodProof, Reservation, ReservationId
from webhook.core.verdict import Deny
from webhook.ledger import Ledger
from webhook.ledger.at_binding import is_accepted, reservation_id_on
from webhook.ledger.pods import PodSource
from webhook.runtime.clock import Clock


class BindingCheck:
    """The last check before a pod is bound. Raises InvalidPodError, LedgerError, PodsUnavailableError and
    NamespacesUnavailableError."""

    def __init__(
        self, reserver: Reserver, pods: PodSource, claims: ClaimReader, bind_deadline: timedelta, clock: Clock
    ) -> None:
        self._reserver = reserver
        self._ledger = reserver.ledger
        self._pods = pods
        self._claims = claims
        self._bind_deadline = bind_deadline
        self._clock = clock

    async def refusal(self, binding: Binding, *, is_dry_run: bool = False) -> Deny | None:
        """Why the Binding is refused; None if it is allowed. A Binding without a uid refers to the current pod of that
        name."""
        uid = binding.pod.uid
        if not self._pods.trusts_reviews:
            living = await self._pods.find(binding.pod.namespace, binding.pod.name)
            refused = await self.refusal_of(living, binding, is_dry_run=is_dry_run)
            if refused is None and living is not None and not is_dry_run:
                refused = await self._check_annotations(binding, living)
            return refused
        uid = uid or await self._pods.uid_of(binding.pod.namespace, binding.pod.name)
        return check.binds_as_reserved(binding, self._ledger.of_pod(uid) if uid else None)

    async def refusal_of(self, living: Pod | None, binding: Binding, *, is_dry_run: bool = False) -> Deny | None:
        """The same for a pod that was just read; None stands for a pod that does not exist."""
        if living is None or binding.pod.uid not in ("", living.meta.uid):
            return no_such_pod(binding)
        claim = recorded_claim(living)
        if claim is not None and is_reserved_at_binding(claim, living):
            held = await self._reservation_on(binding.node, living, is_fresh=True)
            self._reserver.fleet.advance(self._clock())
            fleet, policy = self._reserver.fleet, self._reserver.policy
            return check.serves_on(claim, binding.node, fleet, policy, has_reservation=held is not None)
        if claim is not None and claim.count and not claim.is_left_to_scheduler:
            return await self._check_reserved(binding, living, claim, is_dry_run=is_dry_run)
        known = self._ledger.of_pod(living.meta.uid) if living.meta.uid else None
        refused = check.binds_as_reserved(binding, known)
        if refused is not None or claim is None:
            return refused or await self._check_unreviewed(binding, living)
        return await self._check_without_gpus(binding, living, claim)

    async def _reservation_on(self, node: str, living: Pod, *, is_fresh: bool) -> Reservation | None:
        """The reservation that a review of the pod's Binding to this node has made."""
        reservation_id = reservation_id_on(node, check.identity_of(living))
        held = await self._ledger.find(reservation_id, node=node, is_fresh=is_fresh)
        return held if held is not None and held.phase is not Phase.RELEASING else None

    async def _check_annotations(self, binding: Binding, living: Pod) -> Deny | None:
        """Checks that the Binding carries the reservation that the mutating webhook has made for it. The GPUNode was
        read just before."""
        claim = recorded_claim(living)
        if claim is None or not is_reserved_at_binding(claim, living):
            return None
        held = await self._reservation_on(binding.node, living, is_fresh=False)
        if held is None or held.claim_digest != claim.digest or not is_accepted(held, self._clock()):
            return Deny(
                Reason.NOT_RESERVED,
                f"no GPUs of node {binding.node} are reserved for pod {binding.pod.namespace}/{binding.pod.name}",
                hint="the mutating webhook must review the Binding first",
            )
        return check.carries_reservation(binding, held)

    async def _check_reserved(self, binding: Binding, living: Pod, claim: Claim, *, is_dry_run: bool) -> Deny | None:
        """Checks that the reservation and the evidence of a pod with GPUs still hold."""
        held = await recorded_reservation(self._ledger, living, is_fresh=True)
        fleet, policy = self._reserver.fleet, self._reserver.policy
        fleet.advance(self._clock())
        refused = (
            check.still_reserved(claim, held, living)
            or check.before_bind_deadline(living, held, self._clock(), self._bind_deadline)
            or check.binds_as_reserved(binding, held, living)
            or check.still_proven(claim, binding.node, fleet, policy)
            or check.kubelet_counts_gpus(claim, binding.node, fleet)
            or await self._check_pods_beside(claim, binding.node, living)
        )
        # The pod may run from now on. A pending reservation would count as proof that it never ran.
        if refused is None and held is not None and held.phase is Phase.PENDING and not is_dry_run:
            refused = await bind_to_pod(self._ledger, PodProof.CONFIRMED, held, check.identity_of(living))
        return refused

    async def _check_pods_beside(self, claim: Claim, node: str, living: Pod) -> Deny | None:
        """Checks that the pods exist whose GPUs the kubelet has chosen. It takes those of a pod that is gone for free,
        and `reconcile` may not have marked them yet. The GPUNode was read just before."""
        if claim.delivery is None:
            return None
        counted = [one for one in self._ledger.on(node) if one.delivery is not None and one.phase is Phase.FINALIZED]
        for one in counted:
            is_other = one.uid != living.meta.uid and one.pod_name
            if is_other and await self._pods.uid_of(one.namespace, one.pod_name or "") != one.uid:
                return check.has_uncounted_gpu(claim, node)
        return None

    async def _check_without_gpus(self, binding: Binding, living: Pod, recorded: Claim) -> Deny | None:
        """Checks a pod without a reservation for evidence, by its record and by its own request."""
        claims = await self._claims.within(binding.pod.namespace)
        claim = strictest_claim(recorded, claim_of(living, claims, recorded.record.asked))
        if claim is None:
            return Deny(
                Reason.FORGED,
                f"metadata.annotations[{keys.CLAIM.name}]: contains none of the hashes that the pod requires",
                hint="create the pod again",
            )
        self._reserver.fleet.advance(self._clock())
        return check.still_proven(claim, binding.node, self._reserver.fleet, self._reserver.policy)

    async def _check_unreviewed(self, binding: Binding, living: Pod) -> Deny | None:
        """Checks a pod without a record, if it needs evidence nevertheless."""
        claim = claim_of(living, await self._claims.within(binding.pod.namespace))
        policy = self._reserver.policy
        if claim is None or not (claim.hashes or policy.is_always_required):
            return None
        self._reserver.fleet.advance(self._clock())
        return check.still_proven(claim, binding.node, self._reserver.fleet, policy)


def is_reserved_at_binding(claim: Claim, pod: Pod) -> bool:
    """Whether the pod's GPUs are reserved in the review of its Binding. A pod from the queue has a reservation before
    it."""
    return claim.is_reserved_at_binding and not pod.annotations.get(keys.RESERVATION_ID.name)


async def recorded_reservation(ledger: Ledger, pod: Pod, *, is_fresh: bool = False) -> Reservation | None:
    """The reservation that the pod's annotations name. It may belong to another pod."""
    reservation_id = ReservationId(pod.annotations.get(keys.RESERVATION_ID.name) or "")
    node = pod.annotations.get(keys.NODE.name) or None
    return await ledger.find(reservation_id, node=node, is_fresh=is_fresh) if reservation_id else None


async def bind_to_pod(
    ledger: Ledger, proof: PodProof, held: Reservation, pod: PodIdentity, grace: timedelta | None = None
) -> Deny | None:
    """Binds the reservation to the pod. `grace` is the pod's grace period, if the pod is on no node yet."""
    reservation_id = held.id
    try:
        await ledger.bind_to_pod(proof, reservation_id, pod, node=held.node, grace=grace)
    except UnknownReservationError:
        return no_reservation(reservation_id)
    except ReservationExpiredError:
        return Deny(Reason.RESERVATION_EXPIRED, f"reservation {reservation_id} has expired: create the pod again")
    except ReservationConflictError:
        return Deny(Reason.RESERVATION_CONFLICT, f"reservation {reservation_id} belongs to another pod")
    return None


def no_reservation(reservation_id: str) -> Deny:
    return Deny(
        Reason.NOT_RESERVED,
        f"metadata.annotations[{keys.RESERVATION_ID.name}]: there is no reservation {reservation_id!r}",
        hint="remove the gpuwarden.io/ annotations from a copied manifest, or create the pod again",
    )


def no_such_pod(binding: Binding) -> Deny:
    with_uid = f" with uid {binding.pod.uid}" if binding.pod.uid else ""
    return Deny(
        Reason.RESERVATION_CONFLICT,
        f"pod {binding.pod.namespace}/{binding.pod.name}{with_uid} does not exist",
    )
