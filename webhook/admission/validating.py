"""The validating webhook: checks the final pod against its reservation, changes of pods, and Bindings."""

from datetime import datetime

import structlog
from attrs import define, evolve, field

from webhook.admission.binding_check import (
    BindingCheck,
    bind_to_pod,
    is_reserved_at_binding,
    no_reservation,
    no_such_pod,
    recorded_reservation,
)
from webhook.admission.binding_reserver import BindingReserver
from webhook.admission.ending import PodEnding
from webhook.admission.reserving import Reserver
from webhook.admission.review_objects import NOT_ASKED, not_reviewed, required_object
from webhook.admission.rules import Rules
from webhook.core import check, gpu_order, keys
from webhook.core.binding import Binding, marked, with_reservation
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim
from webhook.core.difference import difference
from webhook.core.dress import (
    RawPod,
)
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, PodProof, ReservationId
from webhook.core.review import Operation, Review
from webhook.core.verdict import Admit, Deny, Verdict
from webhook.ledger import Ledger
from webhook.ledger.end_of_use import longest_grace_in
from webhook.ledger.pods import PodSource
from webhook.runtime.clock import Clock
from webhook.scoring.hints import HintService

log = structlog.get_logger(__name__)


@define(eq=False, repr=False)
class PodValidator:
    """Answers the validating webhook for pods, and both webhooks for Bindings."""

    _reserver: Reserver
    _pods: PodSource
    _rules: Rules
    _clock: Clock
    _hinting: HintService | None
    _ending: PodEnding
    _ledger: Ledger = field(init=False)
    _binding_check: BindingCheck = field(init=False)
    _binding_reserver: BindingReserver = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._ledger = self._reserver.ledger
        claims, deadline = self._rules.claims, self._rules.bind_deadline
        self._binding_check = BindingCheck(self._reserver, self._pods, claims, deadline, self._clock)
        self._binding_reserver = BindingReserver(self._reserver, self._rules, self._clock)

    async def validated(self, review: Review, answer_by: datetime) -> Verdict:
        if review.is_of_bindings:
            return await self._validate_binding(review)
        refused = not_reviewed(review)
        if refused is not None:
            return refused
        match review.operation:
            case Operation.CREATE if not review.subresource:
                return self._record_running_job(review, await self._validate_create(review, answer_by))
            case Operation.UPDATE:
                return await self._validate_update(review)
            case Operation.DELETE:
                return await self._ending.release_gpus(review)
            case _:
                return NOT_ASKED

    async def binding_mutated(self, review: Review, answer_by: datetime) -> Verdict:
        """Reserves the pod's GPUs if that is left to the Binding, and marks an admitted Binding, for the policy that
        judges Bindings while no replica answers."""
        if not review.is_of_bindings:
            return Deny(Reason.NOT_REVIEWED, f"this webhook reviews Bindings, not {review.subject}")
        raw = required_object(review)
        made = await self._bound(raw, Binding.parse(raw, review.namespace, review.name), review, answer_by)
        return made if isinstance(made, Deny) else evolve(NOT_ASKED, patch=list(difference(raw, marked(made))))

    async def _bound(self, raw: RawPod, binding: Binding, review: Review, answer_by: datetime) -> RawPod | Deny:
        """The Binding, with the annotations of a reservation that was made for it."""
        if self._pods.trusts_reviews:
            return await self._binding_check.refusal(binding) or raw
        living = await self._pods.read(binding.pod.namespace, binding.pod.name)
        pod = None if living is None else Pod.parse(living)
        claim = None if pod is None else recorded_claim(pod)
        if living is None or pod is None or claim is None or not is_reserved_at_binding(claim, pod):
            return await self._binding_check.refusal_of(pod, binding, is_dry_run=review.is_dry_run) or raw
        if binding.pod.uid not in ("", pod.meta.uid):
            return no_such_pod(binding)
        annotations = await self._binding_reserver.annotations(
            binding, living, claim, answer_by, is_dry_run=review.is_dry_run
        )
        return annotations if isinstance(annotations, Deny) else with_reservation(raw, pod.meta.uid or "", annotations)

    def _record_running_job(self, review: Review, verdict: Verdict) -> Verdict:
        """In embedded mode, tells the scorer which jobs run: there is no watch of pods."""
        is_pod = isinstance(verdict, Admit) and not review.is_dry_run and self._pods.trusts_reviews
        if self._hinting is not None and is_pod:
            self._hinting.jobs.add_running(review.raw or {})
        return verdict

    async def _validate_create(self, review: Review, answer_by: datetime) -> Verdict:
        raw = required_object(review)
        pod = Pod.parse(raw)
        claim = recorded_claim(pod)
        rules = self._rules.dress if claim is None else self._rules.dress.of(claim)
        unblinded = check.no_exposed_containers(pod, rules)
        if unblinded is not None:
            return unblinded
        if claim is not None and pod.is_gated:
            return await self._validate_queued(raw, pod, claim, review)
        if claim is None:
            return self._validate_without_record(pod, await self._rules.claims.within(review.namespace))
        if not claim.count:
            return self._validate_without_gpus(raw, pod, claim, await self._rules.claims.within(review.namespace))
        refused = check.grace_within_limit(pod, rules) or check.gets_other_gpus(pod, claim, rules)
        if refused is not None:
            return refused
        if is_reserved_at_binding(claim, pod):
            return await self._validate_unreserved(raw, pod, claim, review)
        if claim.is_left_to_scheduler:
            claims = await self._rules.claims.within(review.namespace)
            return (
                check.has_modes_of_namespace(claim, claims)
                or check.matches_claim(raw, pod, claim, self._rules.dress, claims)
                or Admit(audit={"reason": Reason.ADMITTED.value})
            )
        if review.is_dry_run:
            return Admit()  # a dry run has no reservation
        return await self._validate_reserved(raw, pod, claim, review, answer_by)

    def _validate_without_record(self, pod: Pod, claims: ClaimRules) -> Verdict:
        if claim_of(pod, claims) is not None:
            return Deny(
                Reason.NOT_RESERVED,
                f"metadata.annotations[{keys.CLAIM.name}]: the pod has a claim but no reservation",
                hint="the mutating webhook must review it first",
            )
        forged = sorted(keys.OUTPUT_NAMES & pod.annotations.keys())
        if forged:
            return Deny(Reason.FORGED, f"metadata.annotations[{forged[0]}]: written by gpuwarden only")
        return check.no_stray_gate(pod) or check.no_gpu_fields(pod, self._rules.dress) or NOT_ASKED

    async def _validate_queued(self, raw: RawPod, pod: Pod, claim: Claim, review: Review) -> Verdict:
        claims = await self._rules.claims.within(review.namespace)
        return (
            check.has_modes_of_namespace(claim, claims)
            or check.matches_queued_pod(raw, pod, claim, self._rules.dress, claims)
            or Admit(audit={"reason": Reason.QUEUED.value}, reason=Reason.QUEUED)
        )

    async def _validate_unreserved(self, raw: RawPod, pod: Pod, claim: Claim, review: Review) -> Verdict:
        claims = await self._rules.claims.within(review.namespace)
        return (
            check.has_modes_of_namespace(claim, claims)
            or check.no_node_name(pod)
            or check.matches_unreserved_pod(raw, pod, claim, self._rules.dress, claims)
            or Admit(audit={"reason": Reason.ADMITTED.value})
        )

    def _validate_without_gpus(self, raw: RawPod, pod: Pod, claim: Claim, claims: ClaimRules) -> Verdict:
        fleet, policy = self._reserver.fleet, self._reserver.policy
        fleet.advance(self._clock())
        return (
            check.is_dressed_without_gpus(pod, self._rules.dress)
            or check.matches_claim_without_gpus(raw, pod, claim, fleet, policy, claims)
            or Admit()
        )

    async def _validate_reserved(
        self, raw: RawPod, pod: Pod, claim: Claim, review: Review, answer_by: datetime
    ) -> Verdict:
        """Checks the final pod against its reservation and binds the reservation to the pod's uid. Renews a reservation
        that has expired in the meantime."""
        recorded_id = ReservationId(pod.annotations.get(keys.RESERVATION_ID.name) or "")
        known = await recorded_reservation(self._ledger, pod)
        is_late = known is None or (known.uid is None and known.is_past_deadline(self._clock()))
        known = known or self._ledger.lapsed(recorded_id)
        if known is None:
            return no_reservation(recorded_id)
        identity = PodIdentity(review.namespace, pod.meta.name or review.name, pod.meta.uid or "")
        fleet, policy = self._reserver.fleet, self._reserver.policy
        fleet.advance(self._clock())
        refused = (
            check.matches_reservation(raw, claim, known, identity, self._rules.dress)
            or check.preset_node(pod, (known.node,))
            or check.still_allows_node(claim, known.node, fleet)
            or check.still_proven(claim, known.node, fleet, policy)
        )
        if refused is None and is_late:
            refused = await self._reserver.reserve_again(known, answer_by=answer_by)
        if refused is not None:
            return refused
        if identity.uid:
            proof = PodProof.REPORTED if self._pods.trusts_reviews else PodProof.NAMED
            refused = await bind_to_pod(self._ledger, proof, known, identity, longest_grace_in(raw))
            if refused is None:
                self._pods.created(identity)
        return refused or Admit(audit={"reason": Reason.ADMITTED.value, "reservation": known.id, "node": known.node})

    async def _validate_update(self, review: Review) -> Verdict:
        new = Pod.parse(required_object(review))
        old = Pod.parse(review.raw_old or {})
        own: tuple[str, ...] = ()
        if old.is_gated and not new.is_gated and not review.subresource:
            return await self._validate_gate_removal(required_object(review), new, old)
        if review.subresource == "ephemeralcontainers":
            own = await self._allowed_values(old)
        return check.gpu_access_unchanged(new, old, own, self._rules.dress) or NOT_ASKED

    async def _validate_gate_removal(self, raw: RawPod, new: Pod, old: Pod) -> Verdict:
        """Our gate was removed: the pod must have its GPUs, no matter who removed it."""
        claim = recorded_claim(new)
        if claim is None or new.annotations.get(keys.CLAIM.name) != old.annotations.get(keys.CLAIM.name):
            return Deny(Reason.IMMUTABLE, f"metadata.annotations[{keys.CLAIM.name}]: changed by gpuwarden only")
        fleet, policy = self._reserver.fleet, self._reserver.policy
        fleet.advance(self._clock())
        if not claim.count:
            return (
                check.is_dressed_without_gpus(new, self._rules.dress)
                or check.allows_only_proven_nodes(raw, claim, fleet, policy)
                or Admit()
            )
        known = await recorded_reservation(self._ledger, new)
        if known is None or known.uid != new.meta.uid:
            known = await recorded_reservation(self._ledger, new, is_fresh=True)
        if known is None or known.uid != new.meta.uid:
            return Deny(
                Reason.NOT_RESERVED,
                f"spec.schedulingGates[{keys.QUEUE_GATE}]: nothing is reserved for the pod yet",
                hint="gpuwarden opens the gate when it has reserved GPUs",
            )
        rules = self._rules.dress
        return (
            check.matches_reservation(raw, claim, known, check.identity_of(new), rules, has_waited=True)
            or check.no_bypass_fields(new, rules.of(claim))
            or check.still_proven(claim, known.node, fleet, policy)
            or Admit(audit={"reason": Reason.ADMITTED.value, "reservation": known.id, "node": known.node})
        )

    async def _validate_binding(self, review: Review) -> Verdict:
        """Reviews a Binding from any client. A Binding without a uid refers to the current pod of that name."""
        binding = Binding.parse(required_object(review), review.namespace, review.name)
        return await self._binding_check.refusal(binding, is_dry_run=review.is_dry_run) or NOT_ASKED

    async def _allowed_values(self, pod: Pod) -> tuple[str, ...]:
        """The values that a debug container may set: the GPUs that the pod already has."""
        known = await recorded_reservation(self._ledger, pod)
        if known is None or known.phase is Phase.RELEASING or known.uid != pod.meta.uid or known.is_awaited:
            return ()
        return (",".join(gpu_order.in_annotated_order(pod.annotations, known.uuids)),)
