"""The mutating webhook: read the pod, decide, reserve GPUs, and dress the pod."""

import uuid
from datetime import datetime, timedelta

import structlog
from attrs import evolve

from webhook.admission.binding_check import recorded_reservation
from webhook.admission.ending import PodEnding
from webhook.admission.reserving import Reserver
from webhook.admission.review_objects import NOT_ASKED, not_reviewed, prefix_of, required_object
from webhook.admission.rules import Rules
from webhook.core import check, gpu_order, keys
from webhook.core.claim import Claim, recorded_claim_or_none
from webhook.core.device import DeviceUuid
from webhook.core.difference import difference
from webhook.core.dress import (
    Allocation,
    RawPod,
    changes,
    dressed,
    hide_gpus,
    hide_gpus_from_debug_containers,
    left_to_scheduler,
    replaced_env_warnings,
    runtime_class_warnings,
    undressed,
    undressed_with_claim,
    unpinned,
    waiting,
    with_runtime_class,
)
from webhook.core.hints import hinted as with_hints
from webhook.core.hints import with_features_in_template
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod
from webhook.core.pod_claims import claim_name, own_claim_of
from webhook.core.queue_order import OWN_IDS
from webhook.core.reasons import RETRYABLE, RETRYABLE_WITH_MAP, Reason
from webhook.core.reservation import Phase, Placement, Reservation, ReservationRequest
from webhook.core.review import Operation, Review
from webhook.core.verdict import Admit, Deny, Verdict, plain
from webhook.ledger import Ledger
from webhook.ledger.pods import PodSource
from webhook.scoring.hints import NOT_SCORED, HintResult, HintService

log = structlog.get_logger(__name__)

# Limits how long a pod that may be queued waits for room.
BEFORE_IT_IS_QUEUED = timedelta(seconds=1)

# The queue uses such ids for the reservations of pods that wait.
NOT_A_REVIEWS_UID = Deny(
    Reason.NOT_REVIEWED,
    f"request.uid: must not begin with {OWN_IDS!r}",
    hint="send each review with a random uid",
)

# A scorer's hints cannot help against any of these.
NOT_HELPED_BY_HINTS = frozenset(
    {Reason.NO_PROVEN_NODE, Reason.NO_SUITABLE_NODE, Reason.NOT_IN_MAP, Reason.AMBIGUOUS_NODE}
)

COPY_WARNING = "annotations of another pod's reservation were removed: only gpuwarden writes them"


class PodMutator:
    """Answers the mutating webhook for pods, their debug containers and Jobs."""

    def __init__(
        self, reserver: Reserver, pods: PodSource, rules: Rules, hinting: HintService | None, ending: PodEnding
    ) -> None:
        self._reserver = reserver
        self._hinting = hinting
        self._ledger: Ledger = reserver.ledger
        self._pods = pods
        self._rules = rules
        self._ending = ending

    async def mutated(self, review: Review, answer_by: datetime) -> Verdict:
        if review.is_of_jobs:
            return self._mutate_job(review)
        refused = not_reviewed(review)
        if refused is not None:
            return refused
        if review.operation == Operation.DELETE:
            return await self._ending.release_gpus(review)
        if review.operation == Operation.UPDATE and review.subresource == "ephemeralcontainers":
            return self._mutate_debug_container(review)
        if review.operation != Operation.CREATE or review.subresource:
            return NOT_ASKED  # an existing pod is validated only
        if review.uid.startswith(OWN_IDS):
            return NOT_A_REVIEWS_UID
        raw = required_object(review)
        pod = Pod.parse(raw)
        reused = await self._reuse_reservation(raw, pod, review, answer_by)
        return await self._reserve_and_dress(raw, pod, review, answer_by) if reused is None else reused

    def _mutate_debug_container(self, review: Review) -> Verdict:
        """Hides the node's GPUs from debug containers. Needed where the API server has no policy that does it."""
        raw, old = required_object(review), review.raw_old or {}
        Pod.parse(raw), Pod.parse(old)
        patch = list(difference(raw, hide_gpus_from_debug_containers(raw, old, self._rules.dress)))
        return Admit(patch) if patch else NOT_ASKED

    def _mutate_job(self, review: Review) -> Verdict:
        """Copies a Job's annotations about its work to its pod template: pods are scored, Jobs are not."""
        if self._hinting is None or review.operation != Operation.CREATE or review.subresource:
            return NOT_ASKED
        raw = required_object(review)
        patch = list(difference(raw, with_features_in_template(raw)))
        return Admit(patch) if patch else NOT_ASKED

    async def _get_hints(self, pod: Pod, claim: Claim | None, review: Review, answer_by: datetime) -> HintResult:
        """The scorer's advice. The scorer is asked only if neither the placement map nor evidence rules the pod out."""
        if self._hinting is None or keys.JOB_TYPE not in pod.annotations:
            return NOT_SCORED
        if (
            claim is not None
            and not self._rules.waits(claim)
            and hints_cannot_help(self._reserver.placements(claim, most=1))
        ):
            return NOT_SCORED
        return await self._hinting.hints(pod, claim, review, answer_by)

    def _apply_hints(self, raw: RawPod, hinted: HintResult, nodes: tuple[str, ...]) -> tuple[RawPod, tuple[str, ...]]:
        """The pod with the hints that suit its nodes, and warnings about them."""
        if hinted.hints is None:
            return raw, hinted.warnings
        indexed_nodes = self._reserver.fleet.indexed_nodes
        hints = hinted.hints.fitted_to_nodes(*(indexed_nodes[name].labels for name in nodes if name in indexed_nodes))
        hinted.log_written(hints)
        return with_hints(raw, hints, writes_aliases=self._rules.dress.writes_aliases), hints.warnings

    async def _reuse_reservation(self, raw: RawPod, pod: Pod, review: Review, answer_by: datetime) -> Verdict | None:
        """Answers a repeated review of the same creation with the reservation that it already has. When another webhook
        changes the pod, the API server sends it to us again under a new review uid, with our annotations in it."""
        claim = recorded_claim_or_none(pod)
        known = await recorded_reservation(self._ledger, pod) if claim is not None else None
        if claim is None or known is None or not is_this_creation(known, claim, pod, review):
            return None
        more = check.no_added_request(pod, claim, self._rules.dress)
        if more is not None:
            return more
        if check.still_allows_node(claim, known.node, self._reserver.fleet) is not None:
            return await self._move(raw, pod, claim, known, review, answer_by)
        uuids = gpu_order.in_annotated_order(pod.annotations, self._as_mapped(claim, known))
        name = own_claim_of(raw.get("spec") or {}) or new_claim_name()
        return self._dress(raw, pod, Allocation(claim, (known.node,), known.id, uuids, claim_name=name))

    async def _move(
        self, raw: RawPod, pod: Pod, claim: Claim, known: Reservation, review: Review, answer_by: datetime
    ) -> Verdict:
        """Reserves GPUs on another node, by the original claim, because the pod can no longer run on the reserved one.
        The old reservation is left to its deadline: a review alone is no proof that it may be released."""
        free = raw if claim.record.named else unpinned(raw, known.node)
        claim = evolve(claim, nodes=NodesAsked.of(Pod.parse(free)))
        outfit = await self._allocate(claim, pod, review, answer_by)
        if isinstance(outfit, Deny):
            may_wait = self._may_wait(pod, claim, outfit)
            return self._queue(raw, undressed(free), claim, outfit) if may_wait else outfit
        moved = f"the pod can no longer run on {known.node}: it gets its GPUs on another node"
        return evolve(self._dress(raw, pod, outfit, free), warnings=(moved,))

    def _as_mapped(self, claim: Claim, held: Reservation | Placement) -> tuple[DeviceUuid, ...]:
        indexed = self._reserver.fleet.indexed_nodes.get(held.node)
        uuids = [slot.uuid for slot in sorted(held.slots)]
        return gpu_order.in_map_order(claim, uuids, () if indexed is None else indexed.node.devices)

    async def _reserve_and_dress(self, raw: RawPod, pod: Pod, review: Review, answer_by: datetime) -> Verdict:
        clean, claim = undressed_with_claim(raw, pod, await self._rules.claims.within(review.namespace))
        if claim is None:
            copied = () if clean is raw else (COPY_WARNING,)
            clean, notes = self._apply_hints(clean, await self._get_hints(pod, None, review, answer_by), ())
            clean = hide_gpus(clean, self._rules.dress)
            if clean is raw and not notes:
                return NOT_ASKED
            return Admit(changes(raw, clean), warnings=(*copied, *notes), reason=Reason.NOT_ASKED)
        own = pod if clean is raw else Pod.parse(clean)
        refused = self._asks_for_more_than_recorded(pod) or check.precheck(own, claim, self._rules.dress)
        if refused is None and (self._rules.waits(claim) or claim.is_left_to_scheduler):
            refused = self._reserver.exceeds_every_node(claim)
        if refused is not None:
            return refused
        hinted = await self._get_hints(pod, claim, review, answer_by)
        if claim.is_left_to_scheduler:
            clean, notes = self._apply_hints(clean, hinted.for_queued_pod(), ())
            return self._leave_to_scheduler(raw, clean, claim, notes)
        claim = claim if hinted.hints is None else hinted.hints.applied_to(claim)
        outfit = await self._allocate(claim, pod, review, answer_by)
        if isinstance(outfit, Deny):
            if not self._may_wait(pod, claim, outfit):
                return outfit
            clean, notes = self._apply_hints(clean, hinted.for_queued_pod(), ())
            queued = self._queue(raw, clean, claim, outfit)
            return evolve(queued, warnings=(*queued.warnings, *notes))
        clean, notes = self._apply_hints(clean, hinted if outfit.nodes else hinted.for_queued_pod(), outfit.nodes)
        copied = (COPY_WARNING,) if is_copied(pod, claim, review) else ()
        return self._dress(raw, pod, outfit, clean, (*copied, *notes))

    def _asks_for_more_than_recorded(self, pod: Pod) -> Deny | None:
        """Refuses a gated pod that asks for more than its record: the new request would replace the recorded one."""
        recorded = recorded_claim_or_none(pod) if pod.is_gated else None
        if recorded is None or not recorded.record.asked:
            return None
        return check.no_added_request(pod, recorded, self._rules.dress)

    async def _allocate(self, claim: Claim, pod: Pod, review: Review, answer_by: datetime) -> Allocation | Deny:
        """Decides and reserves. A dry run decides in the same way and reserves nothing. The ResourceClaim of a copied
        manifest is another pod's, so the pod gets a new one."""
        if self._rules.waits(claim):
            others = self._reserver.queued_ahead(claim)
            if others is not None:
                return others
        if claim.is_reserved_at_binding:
            return self._leave_to_binding(claim, review)
        if claim.count and not review.is_dry_run:
            name = pod.meta.name or review.name or None
            ask = ReservationRequest(
                review.uid, review.namespace, claim.digest, name, claim.is_shared, prefix_of(pod), claim.delivery
            )
            patience = BEFORE_IT_IS_QUEUED if self._rules.waits(claim) else None
            patience = patience if review.is_light else timedelta(0)
            held = await self._reserver.reserve(ask, claim, answer_by=answer_by, patience=patience)
            if isinstance(held, Deny):
                return held
            uuids = self._as_mapped(claim, held)
            return Allocation(claim, (held.node,), held.id, uuids, claim_name=new_claim_name())
        places = self._reserver.placements(claim, most=1)
        if isinstance(places, Deny):
            return places
        refused = self._reserver.too_many_orphans(review.namespace, claim.count)
        if refused is not None:
            return refused
        if not claim.count:
            return Allocation(claim, tuple(sorted(place.node for place in places)))
        first = places[0]
        uuids = self._as_mapped(claim, first)
        return Allocation(claim, (first.node,), review.uid, uuids, claim_name=new_claim_name())

    def _leave_to_binding(self, claim: Claim, review: Review) -> Allocation | Deny:
        """Reserves nothing. Restricts the pod to nodes that have the GPUs, unless it names its nodes itself."""
        nodes = self._reserver.nodes_to_try(claim)
        if isinstance(nodes, Deny):
            return nodes
        refused = self._reserver.too_many_orphans(review.namespace, claim.count)
        if refused is not None:
            return refused
        return Allocation(claim, nodes if claim.nodes.names() is None else (), has_waited=True)

    def _may_wait(self, pod: Pod, claim: Claim, refused: Deny) -> bool:
        """A pod waits only if waiting can help. A pod without GPUs gets its nodes added to each of its node selector
        terms when its gate opens, and the number of terms is fixed at creation."""
        is_healed = refused.reason in (RETRYABLE_WITH_MAP if claim.is_mapped else RETRYABLE)
        if not (self._rules.waits(claim) and is_healed) or pod.body.node_name:
            return False
        return bool(claim.count) or claim.nodes.terms is None

    def _queue(self, raw: RawPod, clean: RawPod, claim: Claim, refused: Deny) -> Admit:
        rules = self._rules.dress.of(claim)
        why = plain(refused.sentence, length=900)
        made: RawPod = waiting(clean, claim, rules, why, claim_name=new_claim_name())
        made, other = (
            (with_runtime_class(made, rules), runtime_class_warnings(raw, rules)) if claim.count else (made, ())
        )
        return Admit(
            changes(raw, made),
            warnings=(f"the pod waits: {refused.sentence}", *claim.warnings, *other),
            audit={"reason": Reason.QUEUED.value, "waits-for": refused.reason.value},
            reason=Reason.QUEUED,
        )

    def _leave_to_scheduler(self, raw: RawPod, clean: RawPod, claim: Claim, notes: tuple[str, ...]) -> Admit:
        """Reserves nothing. A ResourceClaim of an earlier review or a copied manifest may be another pod's."""
        entry = claim.map_entry
        nodes = () if entry is None else self._reserver.fleet.nodes_for_map_name(entry.node) or (entry.node,)
        made = left_to_scheduler(clean, claim, self._rules.dress, new_claim_name(), tuple(nodes))
        return Admit(changes(raw, made), warnings=(*claim.warnings, *notes), audit={"reason": Reason.ADMITTED.value})

    def _dress(
        self, raw: RawPod, pod: Pod, outfit: Allocation, clean: RawPod | None = None, warnings: tuple[str, ...] = ()
    ) -> Admit:
        rules = self._rules.dress.of(outfit.claim)
        made: RawPod = dressed(raw if clean is None else clean, outfit, rules)
        notes: tuple[str, ...] = ()
        if outfit.claim.count:
            made, notes = (
                with_runtime_class(made, rules),
                (*replaced_env_warnings(pod, outfit, rules), *runtime_class_warnings(raw, rules)),
            )
        audit = {"reason": Reason.ADMITTED.value, "node": ",".join(outfit.nodes[:8])}
        if outfit.reservation_id is not None:
            gpus = {"gpus": outfit.visible} if outfit.visible else {}
            audit |= {"reservation": outfit.reservation_id, **gpus}
        return Admit(
            changes(raw, made),
            warnings=(*warnings, *outfit.claim.warnings, *notes),
            audit=audit,
        )


def new_claim_name() -> str:
    return claim_name(str(uuid.uuid4()))


def is_this_creation(known: Reservation, claim: Claim, pod: Pod, review: Review) -> bool:
    return (
        known.phase is Phase.PENDING
        and known.uid is None
        and known.namespace == review.namespace
        and known.claim_digest == claim.digest
        and known.pod_name in (None, pod.meta.name)
        and known.name_prefix in (None, prefix_of(pod))
    )


def is_copied(pod: Pod, claim: Claim, review: Review) -> bool:
    """Whether the pod carries the annotations of another pod's reservation. A repeated dry run carries annotations of
    its own, without a reservation."""
    recorded = recorded_claim_or_none(pod)
    is_again = review.is_dry_run and recorded is not None and recorded.record == claim.record
    return keys.RESERVATION_ID.name in pod.annotations and not is_again


def hints_cannot_help(places: object) -> bool:
    return isinstance(places, Deny) and places.reason in NOT_HELPED_BY_HINTS
