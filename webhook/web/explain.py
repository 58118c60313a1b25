"""`POST /explain`: the verdict for a pod and each node, without a reservation."""

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
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, caller_of, forbidden, list_pods
from webhook.web.health import Health

# The size of a manifest. No hand-written pod is larger, and each pod of a StatefulSet costs the same again.
MAX_MANIFEST = 2**18


class Explain:
    """The route."""

    def __init__(self, explainer: Explainer, health: Health, gate: CallerGate) -> None:
        self._gate = gate
        self._explainer = explainer
        self._health = health
        # One request at a time, with reviews between two pods.
        self._lock = asyncio.Lock()

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
            return error(400, "the body is neither a pod nor an object that creates pods")
        try:
            for namespace in {namespace_of(pod) or DEFAULT_NAMESPACE for pod in pods}:
                if not await self._gate.may(caller_of(request), list_pods(namespace)):
                    return forbidden(f"the caller must be allowed to list pods in namespace {plain(namespace)}")
            explanation = await self._first_denied(pods)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        except CannotExplainError as exc:
            return error(503, str(exc))
        text = msgspec.json.format(msgspec.json.encode(explanation), indent=2) + b"\n"
        return Response(text, media_type="application/json")

    async def _first_denied(self, pods: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The explanation of the first denied pod, or of the first pod if none is denied."""
        first: dict[str, Any] = {}
        async with self._lock:
            for pod in pods:
                explanation = await self._explainer.explain(pod)
                if explanation["verdict"] == "deny":
                    return explanation
                first = first or explanation
                await asyncio.sleep(0)
        return first
