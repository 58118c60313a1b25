"""The way of a pod: parse, gather, decide, reserve, dress, respond. The one module that awaits in that order."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import structlog
from attrs import evolve, frozen
from jsonpatch import apply_patch
from starlette.requests import Request
from starlette.responses import Response

from webhook.admission.binding_door import BindingDoor, named, no_reservation, recorded_reservation
from webhook.admission.holding import Holder
from webhook.admission.namespaces import ClaimReading, NamespacesUnavailableError
from webhook.core import check, keys, order
from webhook.core.binding import Binding, marked
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim, recorded_or_none
from webhook.core.device import DeviceUuid
from webhook.core.difference import difference
from webhook.core.dress import (
    DressRules,
    Outfit,
    RawPod,
    asked_anew,
    blind,
    blind_debugging,
    changes,
    dressed,
    in_runtime_class,
    other_runtime,
    replaced_env,
    undressed,
    unpinned,
    waiting,
)
from webhook.core.errors import (
    InvalidPodError,
    LedgerError,
    MalformedReviewError,
)
from webhook.core.hints import handed_down
from webhook.core.hints import hinted as with_hints
from webhook.core.lines import OWN_IDS
from webhook.core.names import is_object_name
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod
from webhook.core.reasons import HEALED_BY_WAITING, HEALED_OF_MAPPED, Reason
from webhook.core.reservation import LONGEST_PREFIX, Ask, Phase, Placement, PodIdentity, Reservation, ReservationId
from webhook.core.review import Operation, Review, answer
from webhook.core.verdict import Admit, Deny, Rehearsal, Verdict, plain
from webhook.ledger import Ledger
from webhook.ledger.end_of_use import grace_in
from webhook.ledger.pods import PodSource, PodsUnavailableError
from webhook.runtime.clock import Clock
from webhook.runtime.http.budgets import Budgets, weight
from webhook.runtime.telemetry import Metrics
from webhook.scoring.hints import NOT_SCORED, Hinted, Hinting
from webhook.web.body import HELD, RefusedBodyError, error, read_body
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# What the API server assumes where a webhook configuration says nothing, and the most it allows.
DEFAULT_TIMEOUT = timedelta(seconds=10)
MAX_TIMEOUT = timedelta(seconds=30)
# Our answer has to travel back before the API server hangs up.
MARGIN = timedelta(milliseconds=800)
TIMEOUT = re.compile(rb"(?:^|&)timeout=(?:(\d{1,4})m)?(?:(\d{1,6}(?:\.\d{1,9})?)s)?(?:(\d{1,6})ms)?(?=&|$)")

# A review of a pod takes about half of it once it is parsed.
LIGHT = 128 * 1024
# A pod that may wait behind the gate does not wait long for room.
BEFORE_IT_IS_QUEUED = timedelta(seconds=1)

# Every bad line of a placement map is named, as far as a person would read on.
MOST_MISTAKES = 64

NOT_ASKED = Admit(reason=Reason.NOT_ASKED)
# Places that reviews of pods never take.
RESERVED_FOR_BINDINGS = 64
# A Binding is denied, not answered by 503: a webhook with `failurePolicy: Ignore` lets pass what is no verdict.
OVERLOADED = Deny(Reason.OVERLOADED, "as many reviews are judged as may be at once", hint="try again")
Door = Callable[[Review, datetime], Awaitable[Verdict]]


@frozen
class Rules:
    """How this installation reads and dresses pods."""

    claims: ClaimReading
    dress: DressRules
    # Past this age a pod is put on no node any more: its GPUs may have been given up.
    bind_deadline: timedelta = timedelta(minutes=5)
    # Whether a pod that nothing can be had for now is created, and waits behind our gate; a mapped one in any case
    # where there is somebody to open it.
    queues: bool = False
    queues_mapped: bool = False

    def waits(self, claim: Claim) -> bool:
        return self.queues or (self.queues_mapped and claim.is_mapped)


class Admission:
    """The reviews' routes."""

    def __init__(
        self,
        holder: Holder,
        pods: PodSource,
        rules: Rules,
        clock: Clock,
        metrics: Metrics,
        health: Health,
        hinting: Hinting | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        self._budgets = budgets or Budgets()
        self._holder = holder
        self._hinting = hinting
        self._ledger: Ledger = holder.ledger
        self._pods = pods
        self._rules = rules
        self._clock = clock
        self._metrics = metrics
        self._health = health
        self._door = BindingDoor(holder, pods, rules.claims, rules.bind_deadline, clock)

    async def mutate(self, request: Request) -> Response:
        return await self._answered(request, self._mutated)

    async def mutate_binding(self, request: Request) -> Response:
        return await self._answered(request, self._binding_mutated)

    async def validate(self, request: Request) -> Response:
        return await self._answered(request, self._validated)

    async def rehearsed(self, raw: dict[str, Any], namespace: str) -> Rehearsal:
        """Both webhooks' answers to a dry run of the creation of `raw`, the second one of the pod as patched."""
        answer_by = self._clock() + DEFAULT_TIMEOUT - MARGIN
        review = dry_run(raw, namespace)
        mutated = await self._judged(review, self._mutated, answer_by)
        if isinstance(mutated, Deny):
            return Rehearsal(mutated, raw)
        final: dict[str, Any] = apply_patch(raw, mutated.patch) if mutated.patch else raw
        validated = await self._judged(evolve(review, raw=final), self._validated, answer_by)
        if isinstance(validated, Deny):
            return Rehearsal(validated, raw, warnings=mutated.warnings)
        return Rehearsal(mutated, final, tuple(mutated.patch), mutated.warnings)

    async def _answered(self, request: Request, door: Door) -> Response:
        started = time.perf_counter()
        answer_by = self._clock() + time_to_answer(request.scope["query_string"])
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            body = await read_body(request)
            review = evolve(Review.parse(body), is_light=weight(body) <= LIGHT)
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except MalformedReviewError as exc:
            return error(400, str(exc))
        del body
        if review.is_light:  # it may wait for long: the number of reviews at once bounds what these take
            request.scope[HELD].end()
        with self._budgets.review(RESERVED_FOR_BINDINGS if review.is_of_bindings else 0) as has_place:
            if not has_place and not review.is_of_bindings:
                return error(503, "as many reviews are judged as may be at once")
            verdict = await self._judged(review, door, answer_by) if has_place else OVERLOADED
        self._record(review, verdict, time.perf_counter() - started)
        return Response(answer(review.uid, verdict), media_type="application/json")

    async def _judged(self, review: Review, door: Door, answer_by: datetime) -> Verdict:
        """The door's verdict; whatever goes wrong behind it is a denial with its own reason."""
        left = (answer_by - self._clock()).total_seconds()
        try:
            async with asyncio.timeout(left) as patience:
                return await door(review, answer_by)
        except TimeoutError:
            if not patience.expired():
                raise
            return Deny(Reason.DEADLINE_PASSED, "the review's time is over", hint="try again")
        except InvalidPodError as exc:
            found = exc.mistakes[:MOST_MISTAKES]
            return Deny(Reason.INVALID_POD, "; ".join(found), causes=found)
        except (LedgerError, PodsUnavailableError) as exc:
            log.warning("ledger away", uid=review.uid, exc_info=exc)
            return Deny(Reason.LEDGER_AWAY, "reservations cannot be looked up at this moment", hint="try again")
        except NamespacesUnavailableError as exc:
            log.warning("namespace away", uid=review.uid, namespace=review.namespace, exc_info=exc)
            return Deny(
                Reason.LEDGER_AWAY,
                f"what namespace {review.namespace} demands of its pods cannot be looked up at this moment",
                hint="try again",
            )

    def _record(self, review: Review, verdict: Verdict, took: float) -> None:
        is_allowed = isinstance(verdict, Admit)
        self._metrics.observe_verdict(review.operation, "admit" if is_allowed else "deny", verdict.reason, took)
        if is_allowed and verdict.reason is Reason.NOT_ASKED:
            return
        log.info(
            "admission decided",
            uid=review.uid,
            namespace=review.namespace,
            name=review.name,
            operation=review.operation,
            verdict="admit" if is_allowed else "deny",
            reason=verdict.reason,
            took_ms=round(took * 1000, 3),
        )

    # The doors of Bindings.

    async def _binding_mutated(self, review: Review, answer_by: datetime) -> Verdict:
        """One that a scheduler sends is marked, for the policy that stands in for us while nobody answers."""
        if not review.is_of_bindings:
            return Deny(Reason.NOT_REVIEWED, f"Bindings are reviewed here; this is {review.subject}")
        verdict = await self._put_on_a_node(review)
        if isinstance(verdict, Deny):
            return verdict
        raw = required_object(review)
        return evolve(verdict, patch=list(difference(raw, marked(raw))))

    # The mutating door.

    async def _mutated(self, review: Review, answer_by: datetime) -> Verdict:
        if review.is_of_jobs:
            return self._handed_down(review)
        refused = not_reviewed(review)
        if refused is not None:
            return refused
        if review.operation == Operation.DELETE:
            return await self._ended(review)
        if review.operation == Operation.UPDATE and review.subresource == "ephemeralcontainers":
            return self._debugged(review)
        if review.operation != Operation.CREATE or review.subresource:
            return NOT_ASKED  # a pod that exists is validated, and nothing else of it patched
        if review.uid.startswith(OWN_IDS):
            return NOT_A_REVIEWS_UID
        raw = required_object(review)
        pod = Pod.parse(raw)
        again = await self._reserved_before(raw, pod, review, answer_by)
        return await self._reserved_now(raw, pod, review, answer_by) if again is None else again

    def _debugged(self, review: Review) -> Verdict:
        """Debug containers see no GPU of the node, where no policy in the API server sees to it."""
        raw, old = required_object(review), review.raw_old or {}
        Pod.parse(raw), Pod.parse(old)
        patch = list(difference(raw, blind_debugging(raw, old, self._rules.dress)))
        return Admit(patch) if patch else NOT_ASKED

    def _handed_down(self, review: Review) -> Verdict:
        """A Job is never scored: what it says of its work goes to its pods, and those are."""
        if self._hinting is None or review.operation != Operation.CREATE or review.subresource:
            return NOT_ASKED
        raw = required_object(review)
        patch = list(difference(raw, handed_down(raw)))
        return Admit(patch) if patch else NOT_ASKED

    async def _hinted(self, pod: Pod, claim: Claim | None, review: Review, answer_by: datetime) -> Hinted:
        """What a scorer advises: asked for once it is known that neither map nor evidence stands in the way."""
        if self._hinting is None or keys.JOB_TYPE not in pod.annotations:
            return NOT_SCORED
        if claim is not None and not self._rules.waits(claim) and no_hint_helps(self._holder.places(claim, most=1)):
            return NOT_SCORED
        return await self._hinting.hints(pod, claim, review, answer_by)

    def _with_hints(self, raw: RawPod, hinted: Hinted, nodes: tuple[str, ...]) -> tuple[RawPod, tuple[str, ...]]:
        """The pod as it is answered: with what of the hints suits the nodes that were found for it. And what there is
        to say of them."""
        if hinted.hints is None:
            return raw, hinted.warnings
        berths = self._holder.fleet.berths
        hints = hinted.hints.on_nodes_with(*(berths[name].labels for name in nodes if name in berths))
        hinted.tell(hints)
        return with_hints(raw, hints, writes_aliases=self._rules.dress.writes_aliases), hints.warnings

    async def _reserved_before(self, raw: RawPod, pod: Pod, review: Review, answer_by: datetime) -> Verdict | None:
        """A pod keeps what an earlier round of this same creation gave it: another webhook's change brings it back
        to us under a new review uid, with our own annotations in it."""
        claim = recorded_or_none(pod)
        known = await recorded_reservation(self._ledger, pod) if claim is not None else None
        if claim is None or known is None or not is_this_creation(known, claim, pod, review):
            return None
        more = check.asks_for_more(pod, claim, self._rules.dress)
        if more is not None:
            return more
        if check.still_selects(claim, known.node, self._holder.fleet) is not None:
            return await self._moved(raw, pod, claim, known, review, answer_by)
        uuids = order.as_said(pod.annotations, self._as_mapped(claim, known))
        return self._dressed(raw, pod, Outfit(claim, (known.node,), known.id, uuids))

    async def _moved(
        self, raw: RawPod, pod: Pod, claim: Claim, known: Reservation, review: Review, answer_by: datetime
    ) -> Verdict:
        """Where it was to be the pod cannot be any more, so it gets GPUs elsewhere, by the claim as first read. What is
        reserved there ends at its deadline: to free it on the word of a review would be to believe any review."""
        free = raw if claim.record.named else unpinned(raw, known.node)
        claim = evolve(claim, nodes=NodesAsked.of(Pod.parse(free)))
        outfit = await self._outfit(claim, pod, review, answer_by)
        if isinstance(outfit, Deny):
            may_wait = self._may_wait(pod, claim, outfit)
            return self._queued(raw, undressed(free), claim, outfit) if may_wait else outfit
        moved = f"the pod is kept from {known.node} by now: it gets its GPUs on another node"
        return evolve(self._dressed(raw, pod, outfit, free), warnings=(moved,))

    def _as_mapped(self, claim: Claim, held: Reservation | Placement) -> tuple[DeviceUuid, ...]:
        berth = self._holder.fleet.berths.get(held.node)
        uuids = [slot.uuid for slot in sorted(held.slots)]
        return order.as_mapped(claim, uuids, () if berth is None else berth.node.devices)

    async def _reserved_now(self, raw: RawPod, pod: Pod, review: Review, answer_by: datetime) -> Verdict:
        clean, claim = asked_anew(raw, pod, await self._rules.claims.within(review.namespace))
        if claim is None:
            copied = () if clean is raw else (COPIED,)
            clean, said = self._with_hints(clean, await self._hinted(pod, None, review, answer_by), ())
            clean = blind(clean, self._rules.dress)
            if clean is raw and not said:
                return NOT_ASKED
            return Admit(changes(raw, clean), warnings=(*copied, *said), reason=Reason.NOT_ASKED)
        refused = self._more_than_it_waits_for(pod) or check.refused_at_once(pod, claim, self._rules.dress)
        if refused is None and self._rules.waits(claim):
            refused = self._holder.never(claim)
        if refused is not None:
            return refused
        hinted = await self._hinted(pod, claim, review, answer_by)
        claim = claim if hinted.hints is None else hinted.hints.wished(claim)
        outfit = await self._outfit(claim, pod, review, answer_by)
        if isinstance(outfit, Deny):
            if not self._may_wait(pod, claim, outfit):
                return outfit
            clean, said = self._with_hints(clean, hinted.while_waiting(), ())
            queued = self._queued(raw, clean, claim, outfit)
            return evolve(queued, warnings=(*queued.warnings, *said))
        clean, said = self._with_hints(clean, hinted, outfit.nodes)
        copied = (COPIED,) if is_copied(pod, claim, review) else ()
        return self._dressed(raw, pod, outfit, clean, (*copied, *said))

    def _more_than_it_waits_for(self, pod: Pod) -> Deny | None:
        """Its own request has been taken off: another's would stand in its place."""
        recorded = recorded_or_none(pod) if pod.is_gated else None
        if recorded is None or not recorded.record.asked:
            return None
        return check.asks_for_more(pod, recorded, self._rules.dress)

    async def _outfit(self, claim: Claim, pod: Pod, review: Review, answer_by: datetime) -> Outfit | Deny:
        """Decide, and reserve what has to be; a dry run sees all of it and holds nothing."""
        if self._rules.waits(claim):
            others = self._holder.others_first(claim)
            if others is not None:
                return others
        if claim.count and not review.is_dry_run:
            name = pod.meta.name or review.name or None
            ask = Ask(review.uid, review.namespace, claim.digest, name, claim.is_shared, prefix_of(pod))
            patience = BEFORE_IT_IS_QUEUED if self._rules.waits(claim) else None
            patience = patience if review.is_light else timedelta(0)
            held = await self._holder.hold(ask, claim, answer_by=answer_by, patience=patience)
            if isinstance(held, Deny):
                return held
            return Outfit(claim, (held.node,), held.id, self._as_mapped(claim, held))
        places = self._holder.places(claim, most=1)
        if isinstance(places, Deny):
            return places
        refused = self._holder.too_many_orphans(review.namespace, claim.count)
        if refused is not None:
            return refused
        if not claim.count:
            return Outfit(claim, tuple(sorted(place.node for place in places)))
        first = places[0]
        return Outfit(claim, (first.node,), review.uid, self._as_mapped(claim, first))

    def _may_wait(self, pod: Pod, claim: Claim, refused: Deny) -> bool:
        """What waiting cannot heal is said at once. Where a pod without GPUs may go is written into each of its own
        terms, and their number is fixed once it exists."""
        is_healed = refused.reason in (HEALED_OF_MAPPED if claim.is_mapped else HEALED_BY_WAITING)
        if not (self._rules.waits(claim) and is_healed) or pod.body.node_name:
            return False
        return bool(claim.count) or claim.nodes.terms is None

    def _queued(self, raw: RawPod, clean: RawPod, claim: Claim, refused: Deny) -> Admit:
        rules = self._rules.dress
        made: RawPod = waiting(clean, claim, rules, plain(refused.sentence, length=900))
        made, other = (in_runtime_class(made, rules), other_runtime(raw, rules)) if claim.count else (made, ())
        return Admit(
            changes(raw, made),
            warnings=(f"the pod waits: {refused.sentence}", *claim.warnings, *other),
            audit={"reason": Reason.QUEUED.value, "waits-for": refused.reason.value},
            reason=Reason.QUEUED,
        )

    def _dressed(
        self, raw: RawPod, pod: Pod, outfit: Outfit, clean: RawPod | None = None, warnings: tuple[str, ...] = ()
    ) -> Admit:
        rules = self._rules.dress
        made: RawPod = dressed(raw if clean is None else clean, outfit, rules)
        said: tuple[str, ...] = ()
        if outfit.uuids:
            made, said = in_runtime_class(made, rules), (*replaced_env(pod, outfit, rules), *other_runtime(raw, rules))
        audit = {"reason": Reason.ADMITTED.value, "node": ",".join(outfit.nodes[:8])}
        if outfit.reservation_id is not None:
            audit |= {"reservation": outfit.reservation_id, "gpus": outfit.visible}
        return Admit(
            changes(raw, made),
            warnings=(*warnings, *outfit.claim.warnings, *said),
            audit=audit,
        )

    # The validating door.

    async def _validated(self, review: Review, answer_by: datetime) -> Verdict:
        if review.is_of_bindings:
            return await self._put_on_a_node(review)
        refused = not_reviewed(review)
        if refused is not None:
            return refused
        match review.operation:
            case Operation.CREATE if not review.subresource:
                return self._seen(review, await self._created(review, answer_by))
            case Operation.UPDATE:
                return await self._updated(review)
            case Operation.DELETE:
                return await self._ended(review)
            case _:
                return NOT_ASKED

    def _seen(self, review: Review, verdict: Verdict) -> Verdict:
        """Embedded, reviews are all that is heard of what runs."""
        is_pod = isinstance(verdict, Admit) and not review.is_dry_run and self._pods.believes_reviews
        if self._hinting is not None and is_pod:
            self._hinting.jobs.runs(review.raw or {})
        return verdict

    async def _created(self, review: Review, answer_by: datetime) -> Verdict:
        raw = required_object(review)
        pod = Pod.parse(raw)
        unblinded = check.all_blinded(pod, self._rules.dress)
        if unblinded is not None:
            return unblinded
        claim = recorded_claim(pod)
        if claim is not None and pod.is_gated:
            return await self._created_waiting(raw, pod, claim, review)
        if claim is None:
            return self._created_without_record(pod, await self._rules.claims.within(review.namespace))
        if not claim.count:
            return self._created_without_gpus(raw, pod, claim, await self._rules.claims.within(review.namespace))
        refused = check.takes_too_long(pod, self._rules.dress) or check.no_other_ways(pod, self._rules.dress)
        if refused is not None:
            return refused
        if review.is_dry_run:
            return Admit()  # nothing was reserved for it
        return await self._bound(raw, pod, claim, review, answer_by)

    def _created_without_record(self, pod: Pod, claims: ClaimRules) -> Verdict:
        if claim_of(pod, claims) is not None:
            return Deny(
                Reason.NOT_RESERVED,
                f"metadata.annotations[{keys.CLAIM.name}]: the pod has a claim and no reservation",
                hint="the mutating webhook has to see it first",
            )
        forged = sorted(keys.OUTPUT_NAMES & pod.annotations.keys())
        if forged:
            return Deny(Reason.FORGED, f"metadata.annotations[{forged[0]}]: written by gpuwarden only")
        return check.gate_alone(pod) or check.no_markers(pod, self._rules.dress) or NOT_ASKED

    async def _created_waiting(self, raw: RawPod, pod: Pod, claim: Claim, review: Review) -> Verdict:
        claims = await self._rules.claims.within(review.namespace)
        return check.waits_as_dressed(raw, pod, claim, self._rules.dress, claims) or Admit(
            audit={"reason": Reason.QUEUED.value}, reason=Reason.QUEUED
        )

    def _created_without_gpus(self, raw: RawPod, pod: Pod, claim: Claim, claims: ClaimRules) -> Verdict:
        fleet, policy = self._holder.fleet, self._holder.policy
        fleet.advance(self._clock())
        return (
            check.without_gpus(pod, self._rules.dress)
            or check.proven_only(raw, pod, claim, fleet, policy, claims)
            or Admit()
        )

    async def _bound(self, raw: RawPod, pod: Pod, claim: Claim, review: Review, answer_by: datetime) -> Verdict:
        """The final pod against its reservation; from here on the reservation is this uid's. One that has expired
        meanwhile is made again, as it was."""
        recorded_id = ReservationId(pod.annotations.get(keys.RESERVATION_ID.name) or "")
        known = await recorded_reservation(self._ledger, pod)
        is_late = known is None or (known.uid is None and known.is_past_deadline(self._clock()))
        known = known or self._ledger.lapsed(recorded_id)
        if known is None:
            return no_reservation(recorded_id)
        identity = PodIdentity(review.namespace, pod.meta.name or review.name, pod.meta.uid or "")
        fleet, policy = self._holder.fleet, self._holder.policy
        fleet.advance(self._clock())
        refused = (
            check.matches_reservation(raw, claim, known, identity, self._rules.dress)
            or check.preset_node(pod, (known.node,))
            or check.still_selects(claim, known.node, fleet)
            or check.still_proven(claim, known.node, fleet, policy)
        )
        if refused is None and is_late:
            refused = await self._holder.hold_again(known, answer_by=answer_by)
        if refused is not None:
            return refused
        if identity.uid:
            name = self._ledger.finalize if self._pods.believes_reviews else self._ledger.bind
            refused = await named(name, known, identity, grace_in(raw))
            if refused is None:
                self._pods.created(identity)
        return refused or Admit(audit={"reason": Reason.ADMITTED.value, "reservation": known.id, "node": known.node})

    async def _updated(self, review: Review) -> Verdict:
        new = Pod.parse(required_object(review))
        old = Pod.parse(review.raw_old or {})
        own: tuple[str, ...] = ()
        if old.is_gated and not new.is_gated and not review.subresource:
            return await self._opened(required_object(review), new, old)
        if review.subresource == "ephemeralcontainers":
            own = await self._own_values(old)
        return check.unchanged(new, old, own, self._rules.dress) or NOT_ASKED

    async def _opened(self, raw: RawPod, new: Pod, old: Pod) -> Verdict:
        """Our gate is gone: by then the pod has its GPUs, whoever opened it."""
        claim = recorded_claim(new)
        if claim is None or new.annotations.get(keys.CLAIM.name) != old.annotations.get(keys.CLAIM.name):
            return Deny(Reason.IMMUTABLE, f"metadata.annotations[{keys.CLAIM.name}]: changed by gpuwarden only")
        fleet, policy = self._holder.fleet, self._holder.policy
        fleet.advance(self._clock())
        if not claim.count:
            return (
                check.without_gpus(new, self._rules.dress) or check.proven_nodes(raw, claim, fleet, policy) or Admit()
            )
        known = await recorded_reservation(self._ledger, new)
        if known is None or known.uid != new.meta.uid:
            known = await recorded_reservation(self._ledger, new, is_fresh=True)
        if known is None or known.uid != new.meta.uid:
            return Deny(
                Reason.NOT_RESERVED,
                f"spec.schedulingGates[{keys.QUEUE_GATE}]: nothing is reserved for the pod yet",
                hint="gpuwarden opens the gate when there is a GPU",
            )
        rules = self._rules.dress
        return (
            check.matches_reservation(raw, claim, known, check.identity_of(new), rules, has_waited=True)
            or check.no_other_ways(new, rules)
            or check.still_proven(claim, known.node, fleet, policy)
            or Admit(audit={"reason": Reason.ADMITTED.value, "reservation": known.id, "node": known.node})
        )

    async def _put_on_a_node(self, review: Review) -> Verdict:
        """A Binding, by whichever route and whoever sends it; one that names no uid is of the living pod."""
        binding = Binding.parse(required_object(review), review.namespace, review.name)
        return await self._door.refusal(binding, is_dry_run=review.is_dry_run) or NOT_ASKED

    async def _own_values(self, pod: Pod) -> tuple[str, ...]:
        """What a debug container may set: the GPUs that the pod holds already."""
        known = await recorded_reservation(self._ledger, pod)
        if known is None or known.phase is Phase.RELEASING or known.uid != pod.meta.uid:
            return ()
        return (",".join(order.as_said(pod.annotations, known.uuids)),)

    async def _ended(self, review: Review) -> Verdict:
        """Embedded, a DELETE review is all we shall hear of a pod's end; in a cluster only the watch ends pods."""
        if review.is_dry_run or review.subresource or not self._pods.believes_reviews:
            return NOT_ASKED
        old = Pod.parse(review.raw_old or {})
        if self._hinting is not None:
            self._hinting.jobs.deleted(review.raw_old or {})
        name = old.meta.name or review.name
        uid = old.meta.uid or await self._pods.uid_of(review.namespace, name)
        pod = PodIdentity(review.namespace, name, uid)
        carried = ReservationId(old.annotations.get(keys.RESERVATION_ID.name) or "")
        for reservation_id in await self._freed(pod, carried):
            self._pods.ended(pod)
            log.info("pod ended", reservation=reservation_id, namespace=pod.namespace, name=pod.name)
        return NOT_ASKED

    async def _freed(self, pod: PodIdentity, carried: ReservationId) -> list[ReservationId]:
        """All that is held under the pod's uid; if nothing is, what it carries: its uid may never have been told."""
        freed = []
        while (held := self._ledger.of_pod(pod.uid) if pod.uid else None) is not None:
            if not await self._ledger.release(held.id, pod, node=held.node):
                break
            freed.append(held.id)
        if not freed and carried and await self._ledger.release(carried, pod):
            freed.append(carried)
        return freed


# It would be the id of a reservation that another pod waits for.
NOT_A_REVIEWS_UID = Deny(
    Reason.NOT_REVIEWED,
    f"request.uid: no API server's review has a uid that begins with {OWN_IDS!r}",
    hint="send reviews with uids of their own",
)
# What a scorer could add to the pod heals none of these.
HARDER_THAN_HINTS = frozenset(
    {Reason.NO_PROVEN_NODE, Reason.NO_SUITABLE_NODE, Reason.NOT_IN_MAP, Reason.AMBIGUOUS_NODE}
)
COPIED = "annotations of another pod's reservation were taken off: gpuwarden writes them"


def dry_run(raw: dict[str, Any], namespace: str) -> Review:
    """The review of a creation that shall not happen."""
    return Review(
        uid=ReservationId(str(uuid.uuid4())),
        kind="Pod",
        subresource="",
        operation=Operation.CREATE,
        namespace=namespace,
        name="",
        raw=raw,
        raw_old=None,
        is_dry_run=True,
    )


def not_reviewed(review: Review) -> Deny | None:
    if review.is_of_pods and review.operation in set(Operation):
        return None
    return Deny(
        Reason.NOT_REVIEWED,
        f"gpuwarden reviews pods; this is {review.subject}",
        hint="take it out of the webhook configuration's rules",
    )


def required_object(review: Review) -> RawPod:
    if review.raw is None:
        raise InvalidPodError("the review has no object")
    mistakes = [f"{field}: {name[:80]!r} is no name of an object" for field, name in names_in(review).items()]
    if mistakes:
        raise InvalidPodError(*mistakes)
    return review.raw


def names_in(review: Review) -> dict[str, str]:
    """Those that no object can have. Nobody could ever say for certain that a pod of such a name is gone."""
    meta = (review.raw or {}).get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    prefix = meta.get("generateName") if isinstance(meta, dict) and not name else None
    told = {
        "request.namespace": review.namespace,
        "request.name": review.name,
        "metadata.name": name,
        "metadata.generateName": f"{prefix}x" if prefix else None,
    }
    return {field: str(one) for field, one in told.items() if one and not is_object_name(str(one))}


def is_this_creation(known: Reservation, claim: Claim, pod: Pod, review: Review) -> bool:
    return (
        known.phase is Phase.PENDING
        and known.uid is None
        and known.namespace == review.namespace
        and known.claim_digest == claim.digest
        and known.pod_name in (None, pod.meta.name)
        and known.name_prefix in (None, prefix_of(pod))
    )


def prefix_of(pod: Pod) -> str | None:
    """What the name of a pod will begin with that has none yet."""
    return None if pod.meta.name else (pod.meta.generate_name or "")[:LONGEST_PREFIX] or None


def is_copied(pod: Pod, claim: Claim, review: Review) -> bool:
    """Whether its annotations are of another pod's reservation. A dry run that comes again has its own, which nobody
    holds."""
    recorded = recorded_or_none(pod)
    is_again = review.is_dry_run and recorded is not None and recorded.record == claim.record
    return keys.RESERVATION_ID.name in pod.annotations and not is_again


def no_hint_helps(places: object) -> bool:
    return isinstance(places, Deny) and places.reason in HARDER_THAN_HINTS


def time_to_answer(query: bytes) -> timedelta:
    """How long the API server will wait, from its own `?timeout=`, less what the way back takes."""
    read = TIMEOUT.search(query)
    if read is None or not any(read.groups()):
        return DEFAULT_TIMEOUT - MARGIN
    minutes, seconds, milliseconds = read.groups()
    asked = timedelta(minutes=int(minutes or 0), seconds=float(seconds or 0), milliseconds=int(milliseconds or 0))
    return min(asked, MAX_TIMEOUT) - MARGIN
