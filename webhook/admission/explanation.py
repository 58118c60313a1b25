"""Explains what would become of a pod: the answers of both webhooks to a dry run, the verdict on each node, and hints.

The verdict comes from the code that answers reviews, so the two cannot differ.
"""

from typing import Protocol

from webhook.admission.manifest_pods import mapping, namespace_of
from webhook.admission.namespaces import NamespacesUnavailableError
from webhook.admission.parts import Parts
from webhook.core import keys
from webhook.core.check import precheck
from webhook.core.claim import Claim, ClaimRules
from webhook.core.decide import NodeFit, Objection, explain
from webhook.core.dress import undressed_with_claim
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.near_misses import near_misses
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reasons import STATUS_CODES, Reason
from webhook.core.reservation import Phase, Reservation
from webhook.core.verdict import Admit, Deny, DryRunResult, Verdict

DEFAULT_NAMESPACE = "default"
# The status code of denials that are our fault, not the pod's.
UNAVAILABLE = 503


class CannotExplainError(GpuwardenError):
    """Something that the verdict depends on cannot be looked up now. A later try may succeed."""


class DryRunner(Protocol):
    """Answers dry runs as the API server would send them."""

    async def dry_run_create(self, raw: Raw, namespace: str) -> DryRunResult:
        """Reserves nothing and counts nothing in the metrics."""


class Explainer:
    """Explains pods, with the objects of one process."""

    def __init__(self, parts: Parts, dry_runner: DryRunner) -> None:
        self._parts = parts
        self._dry_runner = dry_runner

    async def explain(self, raw: Raw) -> Raw:
        """For a pod that has its GPUs, which ones; for any other, what would become of its creation.

        Raises CannotExplainError.
        """
        namespace = namespace_of(raw) or DEFAULT_NAMESPACE
        held = self._held(raw, namespace)
        if held is not None:
            return result(Admit(), sentence_of(held))
        done = await self._dry_runner.dry_run_create(raw, namespace)
        if isinstance(done.verdict, Deny) and STATUS_CODES[done.verdict.reason] == UNAVAILABLE:
            raise CannotExplainError(done.verdict.message)
        pod, claim = await self._read(raw, namespace)
        hints = () if pod is None else tuple(near_misses(pod, claim, self._parts.fleet))
        explanation = result(done.verdict, message(done, claim), done.warnings, hints, done.patch)
        if pod is not None and claim is not None and precheck(pod, claim, self._parts.rules.dress) is None:
            explanation["nodes"] = self._nodes(claim)
        return explanation

    def _held(self, raw: Raw, namespace: str) -> Reservation | None:
        uid = mapping(raw, "metadata").get("uid")
        found = self._parts.ledger.of_pod(uid) if isinstance(uid, str) and uid else None
        if found is None or found.namespace != namespace or found.phase is Phase.RELEASING:
            return None
        return found

    async def _read(self, raw: Raw, namespace: str) -> tuple[Pod | None, Claim | None]:
        """The pod and its claim, as far as they can be read. The verdict names the mistakes already."""
        pod: Pod | None = None
        try:
            pod = Pod.parse(raw)
            return pod, undressed_with_claim(raw, pod, await self._claims(namespace))[1]
        except (InvalidPodError, NamespacesUnavailableError):
            return pod, None

    async def _claims(self, namespace: str) -> ClaimRules:
        return await self._parts.rules.claims.within(namespace)

    def _nodes(self, claim: Claim) -> list[Raw]:
        fleet, policy = self._parts.fleet, self._parts.reserver.policy
        return [self._node(fit, claim) for fit in explain(claim, fleet, policy)]

    def _node(self, fit: NodeFit, claim: Claim) -> Raw:
        explanation: Raw = {
            "name": fit.name,
            "fits": fit.fits,
            "reasons": [] if fit.objection is None else [fit.objection.text_for(claim)],
            "devices": [slot.uuid for slot in fit.slots],
        }
        if fit.objection is Objection.OTHER_HASH:
            evidence = self._parts.fleet.indexed_nodes[fit.name].evidence
            explanation["hash"] = evidence.hash if evidence else ""
        return explanation


def sentence_of(held: Reservation) -> str:
    number = f"{len(held.slots)} GPU{'' if len(held.slots) == 1 else 's'}, which the kubelet chooses,"
    gpus = number if held.is_awaited else ", ".join(held.uuids)
    return f"the pod has {gpus} on node {held.node} ({held.phase.value})"


def result(
    verdict: Verdict,
    message: str,
    warnings: tuple[str, ...] = (),
    hints: tuple[str, ...] = (),
    patch: tuple[Raw, ...] = (),
) -> Raw:
    return {
        "verdict": "deny" if isinstance(verdict, Deny) else "admit",
        "reason": verdict.reason,
        "message": message,
        "warnings": list(warnings),
        "hints": list(hints),
        "nodes": [],
        "patch": list(patch),
    }


def message(done: DryRunResult, claim: Claim | None) -> str:
    if isinstance(done.verdict, Deny):
        return done.verdict.sentence
    if done.verdict.reason is Reason.NOT_ASKED or claim is None:
        return "the pod requests nothing from gpuwarden"
    if done.verdict.reason is Reason.QUEUED:
        return next(iter(done.warnings), "the pod waits")
    if claim.is_reserved_at_binding:
        return f"{claim.sentence}: GPUs are reserved when a scheduler binds the pod"
    if claim.is_left_to_scheduler:
        return f"{claim.sentence}: kube-scheduler chooses the node and the GPUs"
    node = done.verdict.audit.get("node", "").partition(",")[0]
    gpus = str(mapping(done.pod, "metadata", "annotations").get(keys.GPU_UUID.name) or "").replace(",", ", ")
    return f"{claim.sentence}: {gpus + ' on ' if gpus else ''}node {node}"
