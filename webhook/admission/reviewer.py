"""Answers reviews: chooses the webhook, enforces the time limit and turns failures into denials."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import structlog
from attrs import evolve
from jsonpatch import apply_patch

from webhook.admission.ending import PodEnding
from webhook.admission.mutating import PodMutator
from webhook.admission.namespaces import NamespacesUnavailableError
from webhook.admission.parts import Parts
from webhook.admission.reserving import Reserver
from webhook.admission.rules import Rules
from webhook.admission.validating import PodValidator
from webhook.core.errors import (
    InvalidPodError,
    LedgerError,
)
from webhook.core.reasons import Reason
from webhook.core.reservation import ReservationId
from webhook.core.review import Operation, Review
from webhook.core.verdict import Admit, Deny, DryRunResult, Verdict
from webhook.ledger.pods import PodSource, PodsUnavailableError
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics
from webhook.scoring.hints import HintService

log = structlog.get_logger(__name__)

# The API server's default timeout for a webhook.
DEFAULT_TIMEOUT = timedelta(seconds=10)

# Reserved for the answer to reach the API server before it closes the connection.
MARGIN = timedelta(milliseconds=800)

# A denial names at most this many mistakes, so that it stays readable for a long placement map.
MOST_MISTAKES = 64

ReviewHandler = Callable[[Review, datetime], Awaitable[Verdict]]


class Reviewer:
    """Answers reviews with verdicts."""

    @classmethod
    def of(cls, parts: Parts) -> "Reviewer":
        return cls(parts.reserver, parts.pods, parts.rules, parts.clock, parts.metrics, parts.hinting)

    def __init__(
        self,
        reserver: Reserver,
        pods: PodSource,
        rules: Rules,
        clock: Clock,
        metrics: Metrics,
        hinting: HintService | None = None,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        ending = PodEnding(reserver.ledger, pods, hinting)
        validator = PodValidator(reserver, pods, rules, clock, hinting, ending)
        self.mutated: ReviewHandler = PodMutator(reserver, pods, rules, hinting, ending).mutated
        self.validated: ReviewHandler = validator.validated
        self.binding_mutated: ReviewHandler = validator.binding_mutated

    async def dry_run_create(self, raw: dict[str, Any], namespace: str) -> DryRunResult:
        """The answers of both webhooks to a dry run of the creation of `raw`. The validating webhook sees the patched
        pod."""
        answer_by = self._clock() + DEFAULT_TIMEOUT - MARGIN
        review = dry_run(raw, namespace)
        mutated = await self.answer(review, self.mutated, answer_by)
        if isinstance(mutated, Deny):
            return DryRunResult(mutated, raw)
        final: dict[str, Any] = apply_patch(raw, mutated.patch) if mutated.patch else raw
        validated = await self.answer(evolve(review, raw=final), self.validated, answer_by)
        if isinstance(validated, Deny):
            return DryRunResult(validated, raw, warnings=mutated.warnings)
        return DryRunResult(mutated, final, tuple(mutated.patch), mutated.warnings)

    async def answer(self, review: Review, handler: ReviewHandler, answer_by: datetime) -> Verdict:
        """The handler's verdict. Any failure becomes a denial with its own reason."""
        left = (answer_by - self._clock()).total_seconds()
        try:
            async with asyncio.timeout(left) as patience:
                return await handler(review, answer_by)
        except TimeoutError:
            if not patience.expired():
                raise
            return Deny(Reason.DEADLINE_PASSED, "the deadline of the review has passed", hint="try again")
        except InvalidPodError as exc:
            found = exc.mistakes[:MOST_MISTAKES]
            return Deny(Reason.INVALID_POD, "; ".join(found), causes=found)
        except (LedgerError, PodsUnavailableError) as exc:
            log.warning("reservations cannot be read or written", uid=review.uid, exc_info=exc)
            return Deny(Reason.LEDGER_AWAY, "reservations cannot be looked up at this moment", hint="try again")
        except NamespacesUnavailableError as exc:
            log.warning("namespace cannot be read", uid=review.uid, namespace=review.namespace, exc_info=exc)
            return Deny(
                Reason.LEDGER_AWAY,
                f"the requirements of namespace {review.namespace} cannot be looked up at this moment",
                hint="try again",
            )

    def record(self, review: Review, verdict: Verdict, took: float) -> None:
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


def dry_run(raw: dict[str, Any], namespace: str) -> Review:
    """A dry-run review of the creation of the pod."""
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
