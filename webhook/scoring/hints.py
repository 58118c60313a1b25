"""Gets hints for a pod under review. On any failure the pod is handled without hints."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Protocol

import structlog
from attrs import evolve, field, frozen

from webhook.core import keys
from webhook.core.claim import MAX_EXPRESSIONS, Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy, preferred
from webhook.core.fleet import Fleet
from webhook.core.hints import (
    DEFAULT_BUCKETS,
    Bucket,
    HintContext,
    Hints,
    features_of,
    hints_of,
    should_score,
    was_hinted,
)
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod
from webhook.core.review import Review
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics
from webhook.scoring import Scorer, ScoreRequest, ScorerUnavailableError
from webhook.scoring.candidates import EveryPriorityClass, PriorityClasses, RunningJobs, candidates

log = structlog.get_logger(__name__)

# The share of a review's remaining time that a scorer may take. The reservation comes after it.
SHARE = 0.5

NO_CANDIDATES = (
    f"no node has a label {' or '.join(keys.GPU_TYPE_LABELS)} with its GPU type, so the scorer was not asked: "
    "the pod is admitted without hints"
)


@frozen
class HintResult:
    """The hints; without hints the warnings say why."""

    hints: Hints | None = None
    warnings: tuple[str, ...] = ()
    # Identifies the pod in the log.
    subject: Mapping[str, str] = field(factory=dict)

    def for_queued_pod(self) -> "HintResult":
        """The result for a pod that gets its node later."""
        return self if self.hints is None else evolve(self, hints=self.hints.for_queued_pod())

    def log_written(self, written: Hints) -> None:
        """Logs the hints that are written into the pod."""
        log.info(
            "Mutated pod",
            **self.subject,
            score=written.score,
            priority_class=written.priority_class,
            chosen_gpu=written.chosen_gpu,
        )


NOT_SCORED = HintResult()


class Watching(Protocol):
    """A watch of one kind of object."""

    ready: asyncio.Event

    async def run(self) -> None:
        """Runs until cancelled."""


@frozen
class HintService:
    """Asks a scorer about pods with a job type."""

    scorer: Scorer
    fleet: Fleet
    clock: Clock
    metrics: Metrics
    timeout: float = 2.0
    buckets: tuple[Bucket, ...] = DEFAULT_BUCKETS
    jobs: RunningJobs = field(factory=RunningJobs)
    classes: PriorityClasses = field(factory=EveryPriorityClass)
    watches: Sequence[Watching] = ()

    async def run(self) -> None:
        """Runs the watches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self.watches:
                tasks.create_task(watch.run())
            tasks.create_task(asyncio.Event().wait())

    async def wait_until_ready(self, patience: float) -> None:
        """Returns when all watches have their first list, or after `patience` seconds: nothing waits longer for
        hints."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                for watch in self.watches:
                    await watch.ready.wait()

    async def close(self) -> None:
        await self.scorer.close()

    async def hints(self, pod: Pod, claim: Claim | None, review: Review, answer_by: datetime) -> HintResult:
        features = features_of(pod)
        if features is None or not should_score(pod, claim) or was_hinted(pod, self.clock()):
            return NOT_SCORED
        question = ScoreRequest(features, candidates(self.fleet), self.jobs.colocated())
        if not question.candidates:
            self.metrics.count_scoring("no-candidates")
            return HintResult(warnings=(*features.warnings, NO_CANDIDATES))
        patience = min(self.timeout, SHARE * (answer_by - self.clock()).total_seconds())
        try:
            advice = await self.scorer.advise(question, patience=max(0.0, patience))
        except ScorerUnavailableError as exc:
            log.warning("Scheduler unavailable", uid=review.uid, outcome=exc.outcome, problem=str(exc))
            return HintResult(warnings=(*features.warnings, f"{exc}: the pod is admitted without hints"))
        around = HintContext(self.fleet.gpu_types, self.buckets, self.classes.names, self.classes.default)
        hints = hints_of(advice, features, pod, around, self.clock())
        hints = hints if claim is not None else self._possible(hints, pod)
        subject = {"uid": review.uid, "namespace": review.namespace, "name": pod.display_name}
        return HintResult(hints, subject={**subject, "job_type": features.job_type})

    def _possible(self, hints: Hints, pod: Pod) -> Hints:
        """For a pod without a claim: drops the node selector if it leaves no node for the pod."""
        nodes = NodesAsked.of(pod)
        if not hints.selector:
            return hints
        if nodes.expressions <= MAX_EXPRESSIONS:
            wished = hints.applied_to(Claim(ClaimRecord(), nodes))
            if preferred(wished, self.fleet, EvidencePolicy(), most=1):
                return hints
        return hints.fitted_to_nodes({})
