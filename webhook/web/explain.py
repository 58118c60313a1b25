"""`POST /explain`: the decision on a pod, node by node, with nothing reserved."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from webhook.explain import as_json, explained, namespace_of, pods_in
from webhook.namespaces import NamespacesUnavailableError
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.health import Health
from webhook.wiring import Parts


class Explain:
    """The route."""

    def __init__(self, parts: Parts, health: Health) -> None:
        self._parts = parts
        self._health = health

    async def explain(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            raw = msgspec.json.decode(await read_body(request))
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return error(400, "the body is not JSON")
        pods = pods_in(raw) if isinstance(raw, dict) else []
        if not pods:
            return error(400, "the body is no pod, and nothing that makes pods")
        try:
            claims = await self._parts.rules.claims.within(namespace_of(raw))
        except NamespacesUnavailableError:
            return error(503, "what the pod's namespace demands cannot be looked up at this moment")
        results = [explained(pod, self._parts, claims) for pod in pods]
        denied = next((one for one in results if one["verdict"] == "deny"), results[0])
        return Response(as_json(denied), media_type="application/json")
