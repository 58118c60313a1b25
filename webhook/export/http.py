"""Posts records to an HTTP endpoint, with the body and headers of gpuid's HTTP exporter."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx
import msgspec
import structlog

from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.records import Batch, raw_reading, raw_seconds, raw_use
from webhook.export.targets import HttpTarget, current_secret, is_plain_to_others
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock, utc_now

log = structlog.get_logger(__name__)

USER_AGENT: Final = "gpuid-http-exporter/1.0"
TRIES: Final = 3
BACKOFF = Backoff(timedelta(milliseconds=500), timedelta(seconds=10), jitter=(0.8, 1.2))
# Text of an answer in error messages; bytes read of an answer.
MAX_ERROR_TEXT, MAX_ANSWER = 300, 64 * 1024

# A retry of the same content would get the same answer.
PERMANENT: Final = frozenset({400, 413, 415, 422})
# Worth a retry.
TRANSIENT: Final = frozenset({408, 425, 429})

Sleep = Callable[[float], Awaitable[object]]


class TryAgainError(ExportError):
    """The request failed and may succeed later. `after` is the server's Retry-After."""

    def __init__(self, reason: str, after: timedelta | None = None) -> None:
        super().__init__(reason)
        self.after = after


def is_header_value(token: str) -> bool:
    return token.isascii() and token.isprintable()


class HttpExporter:
    """One request for a batch's readings and one for its uses. A batch is stored once a whole 2xx answer has
    arrived."""

    name = "http"

    def __init__(self, target: HttpTarget, clock: Clock = utc_now, sleep: Sleep = asyncio.sleep) -> None:
        """Raises GpuwardenError if the token cannot be sent in a header."""
        if target.auth_token is not None and not is_header_value(target.auth_token):
            raise GpuwardenError("the token of the http exporter is not one line of printable ASCII")
        if target.auth_token is not None and is_plain_to_others(target.endpoint):
            log.warning("token is sent unencrypted", endpoint=target.endpoint, hint="use https")
        self._target = target
        self._clock = clock
        self._sleep = sleep
        self._client = httpx.AsyncClient(
            timeout=target.timeout.total_seconds(), trust_env=target.proxied, follow_redirects=False
        )

    async def export(self, batch: Batch) -> None:
        if batch.readings:
            await self._send([raw_reading(one) for one in batch.readings], "reading", batch.id)
        if batch.uses:
            # Its own key: a server that deduplicates by key would otherwise drop the second body.
            await self._send([raw_use(one) for one in batch.uses], "use", f"{batch.id}/use")

    async def check(self) -> None:
        """Sends HEAD. Only 401 and 500, 502, 503 and 504 count as failures."""
        try:
            reply = await self._exchange(
                self._client.build_request("HEAD", self._target.endpoint, headers=self._token())
            )
        except TryAgainError as exc:
            raise ExportError(str(exc)) from exc
        if reply.status_code == 401 or reply.status_code in {500, 502, 503, 504}:
            raise ExportError(f"the endpoint answered {reply.status_code}")

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, records: Sequence[dict[str, Any]], kind: str, key: str) -> None:
        content = msgspec.json.encode(records)
        for failures in range(1, TRIES + 1):
            try:
                await self._post(content, kind, key, len(records))
            except TryAgainError as exc:
                if failures == TRIES:
                    raise
                pause = BACKOFF.pause(failures)
                await self._sleep(BACKOFF.jittered(max(pause, min(exc.after or pause, BACKOFF.longest))))
            else:
                return

    async def _post(self, content: bytes, kind: str, key: str, count: int) -> None:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": USER_AGENT,
            "X-Records-Count": str(count),
            "X-Timestamp": raw_seconds(self._clock()),
            **self._token(),
            "Idempotency-Key": key,
            "X-Record-Kind": kind,
        }
        request = self._client.build_request("POST", self._target.endpoint, headers=headers, content=content)
        reply = await self._exchange(request)
        if reply.is_success:
            return
        message = f"the endpoint answered {reply.status_code}: {reply.text[:MAX_ERROR_TEXT]}"
        if reply.is_server_error or reply.status_code in TRANSIENT:
            raise TryAgainError(message, retry_after(reply, self._clock))
        raise ExportError(message, is_permanent=reply.status_code in PERMANENT)

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        """The complete answer. Raises TryAgainError."""
        try:
            async with asyncio.timeout(self._target.timeout.total_seconds()):
                reply = await self._client.send(request, stream=True)
                try:
                    return await read_bounded(reply)
                finally:
                    await reply.aclose()
        except TimeoutError as exc:
            raise TryAgainError(f"no answer within {self._target.timeout.total_seconds():g} s") from exc
        except httpx.HTTPError as exc:
            raise TryAgainError(f"no complete answer: {str(exc) or type(exc).__name__}") from exc

    def _token(self) -> dict[str, str]:
        known = self._target.auth_token
        if known is None:
            return {}
        found = current_secret(known, self._target.auth_token_file)
        return {"Authorization": f"Bearer {found if is_header_value(found) else known}"}


async def read_bounded(reply: httpx.Response) -> httpx.Response:
    """The reply with at most MAX_ANSWER bytes of its body; the rest is read and dropped."""
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk[: MAX_ANSWER - len(content)]
    headers = {name: value for name, value in reply.headers.items() if name == "retry-after"}
    return httpx.Response(reply.status_code, headers=headers, content=bytes(content))


def retry_after(reply: httpx.Response, clock: Clock) -> timedelta | None:
    message = reply.headers.get("retry-after", "")
    if message.isdecimal() and len(message) < 6:
        return timedelta(seconds=int(message))
    try:
        return max(parsedate_to_datetime(message) - clock(), timedelta())
    except (TypeError, ValueError):
        return None
