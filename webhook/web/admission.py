"""The routes of the webhooks: an AdmissionReview in, a verdict out."""

import re
import time
from datetime import timedelta

from attrs import evolve
from starlette.requests import Request
from starlette.responses import Response

from webhook.admission.reviewer import DEFAULT_TIMEOUT, MARGIN, Door, Reviewer
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

# A review of a pod takes about half of it once it is parsed.
LIGHT = 128 * 1024

# Places that reviews of pods never take.
RESERVED_FOR_BINDINGS = 64

# A Binding is denied, not answered by 503: a webhook with `failurePolicy: Ignore` lets pass what is no verdict.
OVERLOADED = Deny(Reason.OVERLOADED, "as many reviews are judged as may be at once", hint="try again")


class Admission:
    """The reviews' routes."""

    def __init__(self, reviewer: Reviewer, clock: Clock, health: Health, budgets: Budgets | None = None) -> None:
        self._reviewer = reviewer
        self._clock = clock
        self._health = health
        self._budgets = budgets or Budgets()

    async def mutate(self, request: Request) -> Response:
        return await self._answered(request, self._reviewer.mutated)

    async def mutate_binding(self, request: Request) -> Response:
        return await self._answered(request, self._reviewer.binding_mutated)

    async def validate(self, request: Request) -> Response:
        return await self._answered(request, self._reviewer.validated)

    async def _answered(self, request: Request, door: Door) -> Response:
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
        if review.is_light:  # it may wait for long: the number of reviews at once bounds what these take
            request.scope[BODY_USAGE].end()
        with self._budgets.review(RESERVED_FOR_BINDINGS if review.is_of_bindings else 0) as has_place:
            if not has_place and not review.is_of_bindings:
                return error(503, "as many reviews are judged as may be at once")
            verdict = await self._reviewer.judged(review, door, answer_by) if has_place else OVERLOADED
        self._reviewer.record(review, verdict, time.perf_counter() - started)
        return Response(answer(review.uid, verdict), media_type="application/json")


def time_to_answer(query: bytes) -> timedelta:
    """How long the API server will wait, from its own `?timeout=`, less what the way back takes."""
    read = TIMEOUT.search(query)
    if read is None or not any(read.groups()):
        return DEFAULT_TIMEOUT - MARGIN
    minutes, seconds, milliseconds = read.groups()
    asked = timedelta(minutes=int(minutes or 0), seconds=float(seconds or 0), milliseconds=int(milliseconds or 0))
    return min(asked, MAX_TIMEOUT) - MARGIN
