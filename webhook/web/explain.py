"""`POST /explain`: what would become of a pod, node by node, with nothing reserved."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from webhook.admission.explanation import DEFAULT_NAMESPACE, CannotExplainError, Explainer
from webhook.admission.manifest_pods import namespace_of, pods_in
from webhook.core.caller import CallersUnavailableError
from webhook.core.verdict import plain
from webhook.runtime.clock import utc_now
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, caller_of, forbidden, list_pods
from webhook.web.health import Health

# A manifest; one that is larger is no pod that anybody has written. Each pod of a StatefulSet costs as much again.
MAX_MANIFEST = 2**18


class Explain:
    """The route."""

    def __init__(self, explainer: Explainer, health: Health, gate: CallerGate | None = None) -> None:
        self._gate = gate or CallerGate(utc_now)
        self._explainer = explainer
        self._health = health
        # Reviews are answered between two pods, whoever asks about many.
        self._turn = asyncio.Lock()

    async def explain(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            raw = msgspec.json.decode(await read_body(request, MAX_MANIFEST))
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return error(400, "the body is not JSON")
        pods = pods_in(raw) if isinstance(raw, dict) else []
        if not pods:
            return error(400, "the body is no pod, and nothing that makes pods")
        try:
            for namespace in {namespace_of(pod) or DEFAULT_NAMESPACE for pod in pods}:
                if not await self._gate.may(caller_of(request), list_pods(namespace)):
                    return forbidden(f"only who may list pods in {plain(namespace)} is told what becomes of its pods")
            told = await self._first_denied(pods)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        except CannotExplainError as exc:
            return error(503, str(exc))
        text = msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"
        return Response(text, media_type="application/json")

    async def _first_denied(self, pods: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Of the first pod, if none is denied."""
        first: dict[str, Any] = {}
        async with self._turn:
            for pod in pods:
                told = await self._explainer.explained(pod)
                if told["verdict"] == "deny":
                    return told
                first = first or told
                await asyncio.sleep(0)
        return first
