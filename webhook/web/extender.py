"""The routes of the scheduler extender, with the request and response bodies of kube-scheduler."""

import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.requests import Request
from starlette.responses import Response

from webhook.admission.namespaces import NamespacesUnavailableError
from webhook.core.caller import Caller, CallersUnavailableError
from webhook.core.errors import GpuwardenError, LedgerError
from webhook.core.extender_wire import (
    BindArgs,
    ExtenderArgs,
    MalformedArgsError,
    PreemptArgs,
    error_answer,
    filter_error,
    filter_result,
    preempt_result,
    priorities,
)
from webhook.runtime.http.budgets import SMALL_BODY
from webhook.runtime.telemetry import Metrics
from webhook.scheduler.extender import LEDGER_AWAY, NAMESPACE_AWAY, Extender, count_rejections
from webhook.web.body import RefusedBodyError, read_body
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, bind_pods, caller_of
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# Enough for a thousand whole Node objects; with more nodes a scheduler sends names. A caller that may not bind pods in
# all namespaces is limited to SMALL_BODY.
MAX_BODY = 32 * 2**20

Answer = Callable[[Caller, bytes], Awaitable[tuple[bytes, str]]]

NOT_ALLOWED = "the user of the token must be allowed to create pods/binding in the pod's namespace"


class NotAllowedError(GpuwardenError):
    """The caller has no right to bind the pod."""


class ExtenderRoutes:
    """`POST /filter`, `/prioritize`, `/preempt` and `/bind`."""

    def __init__(self, extender: Extender, metrics: Metrics, health: Health, gate: CallerGate) -> None:
        """Callers with tokens get answers only about pods that they may bind themselves."""
        self._extender = extender
        self._metrics = metrics
        self._health = health
        self._gate = gate

    async def filter(self, request: Request) -> Response:
        return await self._handle(request, "filter", self._filter)

    async def prioritize(self, request: Request) -> Response:
        return await self._handle(request, "prioritize", self._prioritize)

    async def preempt(self, request: Request) -> Response:
        return await self._handle(request, "preempt", self._preempt)

    async def bind(self, request: Request) -> Response:
        return await self._handle(request, "bind", self._bind)

    async def _handle(self, request: Request, verb: str, answer: Answer) -> Response:
        started = time.perf_counter()
        if not self._health.is_serving:
            return refusal(503, f"the server is {self._health.stage}")
        try:
            caller = caller_of(request)
            is_scheduler = await self._gate.may(caller, bind_pods(""))
            max_body = MAX_BODY if is_scheduler else SMALL_BODY
            body, outcome = await answer(caller, await read_body(request, max_body, needs=len))
        except RefusedBodyError as exc:
            return refusal(exc.code, str(exc))
        except MalformedArgsError as exc:
            return refusal(400, str(exc))
        except NotAllowedError:
            return refusal(403, NOT_ALLOWED)
        except CallersUnavailableError:
            return refusal(503, CALLERS_UNAVAILABLE)
        except (LedgerError, NamespacesUnavailableError) as exc:
            problem = LEDGER_AWAY if isinstance(exc, LedgerError) else NAMESPACE_AWAY
            log.warning("extender cannot answer", verb=verb, problem=problem, exc_info=exc)
            self._metrics.observe_extender(verb, "error", time.perf_counter() - started)
            return refusal(503, problem) if verb != "filter" else json_response(filter_error(problem))
        self._metrics.observe_extender(verb, outcome, time.perf_counter() - started)
        return json_response(body)

    async def _filter(self, caller: Caller, body: bytes) -> tuple[bytes, str]:
        args = ExtenderArgs.parse(body)
        await self._check_may_bind(caller, args.pod.meta.namespace or "")
        result = await self._extender.filter(args)
        self._metrics.count_extender_nodes(len(result.passed), count_rejections(result))
        outcome = "passed" if result.passed or not args.offer.names else "refused"
        return filter_result(args.offer, result), outcome

    async def _prioritize(self, caller: Caller, body: bytes) -> tuple[bytes, str]:
        args = ExtenderArgs.parse(body)
        await self._check_may_bind(caller, args.pod.meta.namespace or "")
        return priorities(await self._extender.scores(args)), "passed"

    async def _preempt(self, caller: Caller, body: bytes) -> tuple[bytes, str]:
        args = PreemptArgs.parse(body)
        await self._check_may_bind(caller, args.pod.meta.namespace or "")
        victims = await self._extender.filter_victims(args)
        return preempt_result(victims), "passed" if victims or not args.victims else "refused"

    async def _bind(self, caller: Caller, body: bytes) -> tuple[bytes, str]:
        args = BindArgs.parse(body)
        if not await self._gate.may(caller, bind_pods(args.pod.namespace)):
            return error_answer(NOT_ALLOWED), "refused"
        problem = await self._extender.bind(args)
        return error_answer(problem), "refused" if problem else "passed"

    async def _check_may_bind(self, caller: Caller, namespace: str) -> None:
        """A caller must not use the extender's right to bind. Also, answers reveal the requirements of a namespace."""
        if not await self._gate.may(caller, bind_pods(namespace)):
            raise NotAllowedError


def json_response(body: bytes, code: int = 200) -> Response:
    return Response(body, status_code=code, media_type="application/json")


def refusal(code: int, text: str) -> Response:
    """An error in the form of the extender API. For a scheduler each status but 200 fails the attempt."""
    reply = json_response(error_answer(text), code)
    if code == 503:
        reply.headers["Retry-After"] = "1"
    return reply
