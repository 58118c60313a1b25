"""Answers kube-scheduler's extender calls for one pod: filter, prioritize, preempt and bind."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import structlog
from attrs import frozen

from webhook.admission.binding_check import BindingCheck, is_reserved_at_binding, recorded_reservation
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.admission.parts import Parts
from webhook.core import check, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, claim_of, recorded_claim, strictest_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import GpuwardenError, InvalidPodError, LedgerError
from webhook.core.extender_wire import BindArgs, ExtenderArgs, FilterResult, PreemptArgs, Refusal, Victims
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import plain
from webhook.ledger.pods import PodsUnavailableError
from webhook.runtime.clock import Clock
from webhook.scheduler import filter as node_filter
from webhook.scheduler.filter import NodeQuery

log = structlog.get_logger(__name__)

LEDGER_AWAY = "reservations cannot be looked up at this moment"
NAMESPACE_AWAY = "the requirements of the pod's namespace cannot be looked up at this moment"
NO_CLUSTER = "gpuwarden runs without a cluster and binds no pods: remove bindVerb from the scheduler's configuration"
MAX_MESSAGE = 1000


class BindingRefusedError(GpuwardenError):
    """The API server refused the Binding; the text is the API server's."""


class BindingLostError(GpuwardenError):
    """No answer came: the pod may be on the node."""


class Bindings(Protocol):
    """Binds pods to nodes."""

    async def bind(self, pod: PodIdentity, node: str) -> None:
        """Binds the pod of this uid. Raises BindingRefusedError or BindingLostError."""


@frozen
class Refused:
    """Every node is refused."""

    refusal: Refusal


class Extender:
    """Answers from memory. `bind` repeats the check that every Binding passes."""

    def __init__(self, parts: Parts, bindings: Bindings | None) -> None:
        self._fleet: Fleet = parts.fleet
        self._policy: EvidencePolicy = parts.reserver.policy
        self._ledger = parts.ledger
        self._pods = parts.pods
        self._claims: ClaimReader = parts.rules.claims
        self._bind_deadline = parts.rules.bind_deadline
        self._clock: Clock = parts.clock
        self._bindings = bindings
        self._binding_check = BindingCheck(parts.reserver, parts.pods, self._claims, self._bind_deadline, parts.clock)

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Raises LedgerError if reservations cannot be looked up, and NamespacesUnavailableError for namespaces. The
        other methods raise the same."""
        query = await self._query(args.pod)
        if isinstance(query, Refused):
            return node_filter.reject_all(args.offer.names, query.refusal)
        self._fleet.advance(self._clock())
        return node_filter.filter_nodes(query, args.offer.names, self._fleet, self._policy)

    async def scores(self, args: ExtenderArgs) -> list[tuple[str, int]]:
        query = await self._query(args.pod)
        if isinstance(query, Refused):
            return [(name, 0) for name in args.offer.names]
        self._fleet.advance(self._clock())
        return node_filter.scores(query, args.offer.names, self._fleet, self._policy)

    async def filter_victims(self, args: PreemptArgs) -> dict[str, Victims]:
        """The nodes that the pod fits on after preemption."""
        query = await self._query(args.pod)
        if isinstance(query, Refused):
            return {}
        self._fleet.advance(self._clock())
        never = node_filter.filter_nodes(query, args.victims, self._fleet, self._policy).unresolvable
        return {name: one for name, one in args.victims.items() if name not in never}

    async def _query(self, pod: Pod) -> NodeQuery | Refused | None:
        """What the pod requires of nodes; None if it has no claim."""
        try:
            recorded = recorded_claim(pod)
            is_reserved = recorded is not None and recorded.count and not recorded.is_left_to_scheduler
            asked = None if is_reserved else await self._asked(pod, recorded)
        except InvalidPodError as exc:
            log.info("claim refused", pod=f"{pod.meta.namespace}/{pod.display_name}", mistakes=exc.mistakes[:20])
            return Refused(node_filter.unreadable(exc.mistakes))
        if recorded is None:
            return None if asked is None else NodeQuery(asked)
        if not is_reserved:
            return evidence_query(recorded.without_gpus(), asked)
        if is_reserved_at_binding(recorded, pod):
            return NodeQuery(recorded)
        return await self._reserved_query(pod, recorded)

    async def _asked(self, pod: Pod, recorded: Claim | None) -> Claim | None:
        """The claim by the pod's own request, also if a review has removed it, and its namespace's rules."""
        removed = None if recorded is None else recorded.record.asked
        return claim_of(pod, await self._claims.within(pod.meta.namespace or ""), removed)

    async def _reserved_query(self, pod: Pod, claim: Claim) -> NodeQuery | Refused:
        held = await recorded_reservation(self._ledger, pod)
        if held is None or check.still_reserved(claim, held, pod) is not None:
            return Refused(node_filter.NOT_RESERVED)
        if check.before_bind_deadline(pod, held, self._clock(), self._bind_deadline) is not None:
            return Refused(node_filter.TOO_LATE)
        return NodeQuery(claim, held.node, is_recorded=True)

    # Binding.

    async def bind(self, args: BindArgs) -> str:
        """Why the pod was not bound; empty if it is on the node."""
        if self._bindings is None or self._pods.trusts_reviews:
            return NO_CLUSTER
        try:
            message = await self._check_and_bind(args, self._bindings)
        except InvalidPodError as exc:
            return "; ".join(exc.mistakes[:20])
        except (LedgerError, PodsUnavailableError, NamespacesUnavailableError) as exc:
            log.warning("binding could not be checked", exc_info=exc)
            return "the pod and its reservation cannot be looked up at this moment"
        return plain(message, MAX_MESSAGE)

    async def _check_and_bind(self, args: BindArgs, bindings: Bindings) -> str:
        current = await self._pods.find(args.pod.namespace, args.pod.name)
        bound_to = node_of(current, args.pod)
        if bound_to is not None:
            return "" if bound_to == args.node else f"the pod is on {bound_to} already"
        refused = await self._binding_check.refusal_of(current, Binding(args.pod, args.node, {}))
        if refused is not None:
            log.info("binding refused", pod=args.pod.name, node=args.node, reason=refused.reason)
            return refused.sentence
        identity = check.identity_of(current) if current is not None else args.pod
        try:
            await bindings.bind(identity, args.node)
        except (BindingRefusedError, BindingLostError) as exc:
            return await self._outcome(identity, args.node, str(exc))
        log.info("pod bound", namespace=identity.namespace, name=identity.name, node=args.node)
        return ""

    async def _outcome(self, pod: PodIdentity, node: str, problem: str) -> str:
        """Reads the pod after a refusal or a lost answer: it may be on the node nevertheless."""
        current = await self._pods.find(pod.namespace, pod.name)
        return "" if node_of(current, pod) == node else problem


def evidence_query(recorded: Claim, asked: Claim | None) -> NodeQuery | Refused:
    """The query for a pod without a reservation."""
    claim = strictest_claim(recorded, asked)
    if claim is None:
        return Refused(
            node_filter.unreadable([f"annotation {keys.CLAIM.name} contains none of the hashes that the pod asks for"])
        )
    return NodeQuery(claim, is_recorded=True)


def node_of(current: Pod | None, pod: PodIdentity) -> str | None:
    """The node of the pod with this uid; None if it has none."""
    if current is None or pod.uid not in ("", current.meta.uid):
        return None
    return current.body.node_name or None


def count_rejections(result: FilterResult) -> Mapping[str, int]:
    """The number of refused nodes by text, without details of the pod."""
    return Counter(refusal.text for refusal in (*result.failed.values(), *result.unresolvable.values()))
