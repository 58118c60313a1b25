"""Single requests to the API server, rate-limited, with its errors translated."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
import msgspec
from attrs import frozen
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.kube.json_objects import object_in, status_message

REQUEST_TIMEOUT: Final = 10.0
MAX_MESSAGE: Final = 400
JSON: Final = "application/json"
# The client library writes JSON with spaces. The API server stores parameters of drivers as they are sent, and compares
# them with its own compact form at each patch: it would refuse all patches of the object. Compact JSON is sent as YAML,
# which the library passes on unchanged.
COMPACT: Final = "application/yaml"
MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
POD_PATH: Final = "/api/v1/namespaces/{namespace}/pods/{name}"
NODE_PATH: Final = "/api/v1/nodes/{name}"
# What the client library raises if there is no usable answer.
REQUEST_ERRORS: Final = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class ApiUnavailableError(GpuwardenError):
    """The API server did not answer, or failed temporarily."""


class ApiRefusesError(GpuwardenError):
    """The API server rejected the request; a retry would be rejected too."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"the API server answered {status}" + (f": {text}" if text else ""))


@frozen
class ApiReply:
    """An answer of the API server, with its `Warning` headers."""

    status: int
    content: bytes
    warnings: tuple[str, ...] = ()


class RateLimit:
    """A token bucket: `rate` requests per second, and up to `burst` at once."""

    def __init__(self, rate: float, burst: int, now: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = now
        # When the bucket will be full again.
        self._full_at = now()

    async def acquire(self) -> None:
        now = self._now()
        self._full_at = max(self._full_at, now) + 1 / self._rate
        late = self._full_at - now - self._burst / self._rate
        if late > 0:
            await asyncio.sleep(late)


async def request_json(
    api: client.ApiClient,
    method: str,
    path: str,
    names: Mapping[str, str],
    body: object = None,
    *,
    seconds: float,
    kind: str = JSON,
) -> tuple[int, bytes]:
    """The answer's status and content. Raises one of REQUEST_ERRORS. An invalid object name gives 404 without a
    request: names may come from the caller of a webhook.

    Requests use paths, because the client's methods for pods and nodes load a module for every kind, 24 MiB in total.
    """
    reply = await send_request(api, method, path, names, body, seconds=seconds, kind=kind)
    return reply.status, reply.content


async def send_request(
    api: client.ApiClient,
    method: str,
    path: str,
    names: Mapping[str, str],
    body: object = None,
    *,
    seconds: float,
    kind: str = JSON,
    query: Mapping[str, str] | None = None,
) -> ApiReply:
    """Like `request_json`, with query parameters and the answer's warnings."""
    if not all(map(is_object_name, names.values())):
        return ApiReply(404, b"")
    if kind == COMPACT:
        body = msgspec.json.encode(body).decode()
    request = await api.param_serialize(  # reads the token file
        method=method,
        resource_path=path,
        path_params=dict(names),
        query_params=list((query or {}).items()),
        header_params={"Accept": JSON, **({"Content-Type": kind} if body is not None else {})},
        body=body,
        auth_settings=["BearerToken"],
    )
    answer = await api.call_api(*request, _request_timeout=seconds)
    async with answer.response as response:
        return ApiReply(response.status, await response.read(), tuple(response.headers.getall("Warning", ())))


class RateLimitedClient:
    """Rate-limited requests with the credentials of `api`."""

    def __init__(self, api: client.ApiClient, limit: RateLimit, longest: float = REQUEST_TIMEOUT) -> None:
        self._api = api
        self._limit = limit
        self._longest = longest

    async def call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None = None) -> Raw | None:
        """The object, or None for 404. Raises ApiUnavailableError, ApiRefusesError."""
        return await self._call(method, path, names, body, MERGE_PATCH if method == "PATCH" else JSON)

    async def create_compact(self, path: str, names: Mapping[str, str], body: Raw) -> Raw | None:
        """Creates an object with parameters of drivers. Like `call`."""
        return await self._call("POST", path, names, body, COMPACT)

    async def _call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None, kind: str) -> Raw | None:
        await self._limit.acquire()
        try:
            status, content = await request_json(self._api, method, path, names, body, seconds=self._longest, kind=kind)
        except ApiException as exc:
            status, content = exc.status or 0, b""
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise ApiUnavailableError(f"the API server did not answer: {type(exc).__name__}") from exc
        if status == 404:
            return None
        if status in (400, 401, 403, 409, 422):
            raise ApiRefusesError(status, status_message(content, MAX_MESSAGE))
        if not 200 <= status < 300:
            raise ApiUnavailableError(f"the API server answered {status}")
        try:
            return object_in(content)
        except msgspec.DecodeError as exc:
            raise ApiUnavailableError("the API server's answer is not valid JSON") from exc
