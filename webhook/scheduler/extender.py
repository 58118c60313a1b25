"""What a kube-scheduler asks of us about one pod: which nodes will do, how well, and to put it on one."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import structlog
from attrs import frozen

from webhook.admission.binding_check import BindingCheck, recorded_reservation
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.admission.parts import Parts
from webhook.core import check, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, claim_of, recorded_claim, strictest_claim
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import GpuwardenError, InvalidPodError, LedgerError
from webhook.core.extender_wire import BindArgs, ExtenderArgs, FilterResult, PreemptArgs, Victims
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import plain
from webhook.ledger.pods import PodsUnavailableError
from webhook.runtime.clock import Clock
from webhook.scheduler import filter as sieve
from webhook.scheduler.filter import NodeQuery

log = structlog.get_logger(__name__)

LEDGER_AWAY = "reservations cannot be looked up at this moment"
NAMESPACE_AWAY = "what the pod's namespace demands cannot be looked up at this moment"
NO_CLUSTER = "there is no cluster here to bind pods in: take bindVerb out of the scheduler's configuration"
MAX_TOLD = 1000


class BindingRefusedError(GpuwardenError):
    """The pod was not put on the node; the text is the API server's, and so is the status."""

    def __init__(self, said: str, status: int = 0) -> None:
        super().__init__(said)
        self.status = status

    @property
    def is_race(self) -> bool:
        """Whether the pod is another by now: gone, changed, or on a node already."""
        return self.status in (404, 409)


class BindingLostError(GpuwardenError):
    """No answer came: the pod may be on the node."""


class Bindings(Protocol):
    """Can put a pod on a node."""

    async def bind(self, pod: PodIdentity, node: str) -> None:
        """This very pod, by its uid. Raises BindingRefusedError or BindingLostError."""


@frozen
class Refused:
    """No node will do, whichever it is."""

    text: str


class Extender:
    """Reads a pod, judges nodes in memory; a binding is judged once more, by the door that every Binding passes."""

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

    async def sift(self, args: ExtenderArgs) -> FilterResult:
        """Raises LedgerError where reservations cannot be looked up, NamespacesUnavailableError where namespaces can't;
        so do the others."""
        wish = await self._wish(args.pod)
        if isinstance(wish, Refused):
            return sieve.refusing(args.offer.names, wish.text)
        self._fleet.advance(self._clock())
        return sieve.sifted(wish, args.offer.names, self._fleet, self._policy)

    async def scores(self, args: ExtenderArgs) -> list[tuple[str, int]]:
        wish = await self._wish(args.pod)
        if isinstance(wish, Refused):
            return [(name, 0) for name in args.offer.names]
        self._fleet.advance(self._clock())
        return sieve.scores(wish, args.offer.names, self._fleet, self._policy)

    async def worth_an_eviction(self, args: PreemptArgs) -> dict[str, Victims]:
        """The nodes that would do once there is room."""
        wish = await self._wish(args.pod)
        if isinstance(wish, Refused):
            return {}
        self._fleet.advance(self._clock())
        never = sieve.sifted(wish, args.victims, self._fleet, self._policy).unresolvable
        return {name: one for name, one in args.victims.items() if name not in never}

    async def _wish(self, pod: Pod) -> NodeQuery | Refused | None:
        """What the pod wants of nodes; None if it wants nothing of ours."""
        try:
            recorded = recorded_claim(pod)
            asked = await self._asked(pod) if recorded is None or not recorded.count else None
        except InvalidPodError as exc:
            log.info("claim refused", pod=f"{pod.meta.namespace}/{pod.display_name}", mistakes=exc.mistakes[:20])
            return Refused(sieve.unreadable(exc.mistakes))
        if recorded is None:
            return None if asked is None else NodeQuery(asked)
        if not recorded.count:
            return proven_wish(recorded, asked)
        return await self._reserved_wish(pod, recorded)

    async def _asked(self, pod: Pod) -> Claim | None:
        """What the pod asks for itself, within its namespace."""
        return claim_of(pod, await self._claims.within(pod.meta.namespace or ""))

    async def _reserved_wish(self, pod: Pod, claim: Claim) -> NodeQuery | Refused:
        held = await recorded_reservation(self._ledger, pod)
        if held is None or check.still_reserved(claim, held, pod) is not None:
            return Refused(sieve.NOT_RESERVED)
        if check.before_bind_deadline(pod, held, self._clock(), self._bind_deadline) is not None:
            return Refused(sieve.TOO_LATE)
        return NodeQuery(claim, held.node, is_recorded=True)

    # Binding.

    async def bind(self, args: BindArgs) -> str:
        """Why the pod is not on the node; empty if it is."""
        if self._bindings is None or self._pods.believes_reviews:
            return NO_CLUSTER
        try:
            said = await self._bound(args, self._bindings)
        except InvalidPodError as exc:
            return "; ".join(exc.mistakes[:20])
        except (LedgerError, PodsUnavailableError, NamespacesUnavailableError) as exc:
            log.warning("binding could not be checked", exc_info=exc)
            return "the pod and its reservation cannot be looked up at this moment"
        return plain(said, MAX_TOLD)

    async def _bound(self, args: BindArgs, bindings: Bindings) -> str:
        living = await self._pods.find(args.pod.namespace, args.pod.name)
        there = where(living, args.pod)
        if there is not None:
            return "" if there == args.node else f"the pod is on {there} already"
        refused = await self._binding_check.refusal_of(living, Binding(args.pod, args.node, {}))
        if refused is not None:
            log.info("binding refused", pod=args.pod.name, node=args.node, reason=refused.reason)
            return refused.sentence
        identity = check.identity_of(living) if living is not None else args.pod
        try:
            await bindings.bind(identity, args.node)
        except (BindingRefusedError, BindingLostError) as exc:
            return await self._outcome(identity, args.node, str(exc))
        log.info("pod bound", namespace=identity.namespace, name=identity.name, node=args.node)
        return ""

    async def _outcome(self, pod: PodIdentity, node: str, problem: str) -> str:
        """After a refusal, or no answer: the pod itself says whether it is there."""
        living = await self._pods.find(pod.namespace, pod.name)
        return "" if where(living, pod) == node else problem


def proven_wish(recorded: Claim, asked: Claim | None) -> NodeQuery | Refused:
    """Of a record without GPUs."""
    claim = strictest_claim(recorded, asked)
    if claim is None:
        return Refused(
            sieve.unreadable([f"annotation {keys.CLAIM.name} names none of the hashes that the pod asks for"])
        )
    return NodeQuery(claim, is_recorded=True)


def where(living: Pod | None, pod: PodIdentity) -> str | None:
    """The node that this very pod is on."""
    if living is None or pod.uid not in ("", living.meta.uid):
        return None
    return living.body.node_name or None


def refused_by(sifted: FilterResult) -> Mapping[str, int]:
    """How many nodes each text speaks against. Texts that quote a pod count as one."""
    texts = (*sifted.failed.values(), *sifted.unresolvable.values())
    return Counter(text if text in sieve.TEXTS else sieve.UNREADABLE for text in texts)
