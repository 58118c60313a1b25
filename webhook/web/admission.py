"""The routes of the webhooks. They answer an AdmissionReview with a verdict."""

import re
import time
from datetime import timedelta

from attrs import evolve
from starlette.requests import Request
from starlette.responses import Response

from webhook.admission.reviewer import DEFAULT_TIMEOUT, MARGIN, Reviewer, ReviewHandler
from webhook.core.errors import (
    MalformedReviewError,
)
from webhook.core.reasons import Reason
from webhook.core.review import Review, answer
from webhook.core.verdict import Deny
from webhook.runtime.clock import Clock
from webhook.runtime.http.budgets import Budgets, parsed_size
from webhook.web.body import BODY_USAGE, RefusedBodyError, error, read_body
from webhook.web.health import Health

MAX_TIMEOUT = timedelta(seconds=30)

TIMEOUT = re.compile(rb"(?:^|&)timeout=(?:(\d{1,4})m)?(?:(\d{1,6}(?:\.\d{1,9})?)s)?(?:(\d{1,6})ms)?(?=&|$)")

# The parsed size of a light review. A typical review of a pod needs about half of it.
LIGHT = 128 * 1024

# Places for concurrent reviews that are reserved for reviews of Bindings.
RESERVED_FOR_BINDINGS = 64

TOO_MANY_REVIEWS = "the limit of concurrent reviews is reached"

# A Binding is denied, not answered with 503: with `failurePolicy: Ignore` the API server would then admit it.
OVERLOADED = Deny(Reason.OVERLOADED, TOO_MANY_REVIEWS, hint="try again")


class Admission:
    """The routes of reviews."""

    def __init__(self, reviewer: Reviewer, clock: Clock, health: Health, budgets: Budgets | None = None) -> None:
        self._reviewer = reviewer
        self._clock = clock
        self._health = health
        self._budgets = budgets or Budgets()

    async def mutate(self, request: Request) -> Response:
        return await self._handle(request, self._reviewer.mutated)

    async def mutate_binding(self, request: Request) -> Response:
        return await self._handle(request, self._reviewer.binding_mutated)

    async def validate(self, request: Request) -> Response:
        return await self._handle(request, self._reviewer.validated)

    async def _handle(self, request: Request, handler: ReviewHandler) -> Response:
        started = time.perf_counter()
        answer_by = self._clock() + time_to_answer(request.scope["query_string"])
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            body = await read_body(request)
            review = evolve(Review.parse(body), is_light=parsed_size(body) <= LIGHT)
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except MalformedReviewError as exc:
            return error(400, str(exc))
        del body
        if review.is_light:  # it may wait for a long time; the limit of concurrent reviews bounds the memory of these
            request.scope[BODY_USAGE].end()
        with self._budgets.review(RESERVED_FOR_BINDINGS if review.is_of_bindings else 0) as is_available:
            if not is_available and not review.is_of_bindings:
                return error(503, TOO_MANY_REVIEWS)
            verdict = await self._reviewer.answer(review, handler, answer_by) if is_available else OVERLOADED
        self._reviewer.record(review, verdict, time.perf_counter() - started)
        return Response(answer(review.uid, verdict), media_type="application/json")


def time_to_answer(query: bytes) -> timedelta:
    """How long the API server waits, from the parameter `timeout` of the query, minus a margin for the answer."""
    found = TIMEOUT.search(query)
    if found is None or not any(found.groups()):
        return DEFAULT_TIMEOUT - MARGIN
    minutes, seconds, milliseconds = found.groups()
    timeout = timedelta(minutes=int(minutes or 0), seconds=float(seconds or 0), milliseconds=int(milliseconds or 0))
    return min(timeout, MAX_TIMEOUT) - MARGIN
