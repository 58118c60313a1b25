"""Reading a request's body: bounded in size and in time."""

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from webhook.core.errors import GpuwardenError

# The API server's own limit for an object is 1.5 MiB; a review of an update carries two.
MAX_BODY = 3 * 2**20
# A sender that has still to hear "too large" is read on up to this much, so that the answer reaches it.
MAX_DISCARDED = 64 * 2**20
# Less than the API server's shortest useful timeout; a slow sender must not hold a connection for long.
READ_TIMEOUT = 10.0


class RefusedBodyError(GpuwardenError):
    """The body cannot be taken; `code` is the HTTP status that says so."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


async def read_body(request: Request) -> bytes:
    """The whole body, or `RefusedBodyError`."""
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            return await bounded(request)
    except TimeoutError as exc:
        raise RefusedBodyError(408, f"the body did not come within {READ_TIMEOUT:.0f} s") from exc
    except ClientDisconnect as exc:
        raise RefusedBodyError(400, "the body ended early") from exc


async def bounded(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_DISCARDED:
            break
        if size > MAX_BODY:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > MAX_BODY:
        raise RefusedBodyError(413, f"the body is larger than {MAX_BODY} bytes")
    return b"".join(chunks)


def error(code: int, text: str) -> Response:
    """A refusal in the one form that every route has."""
    headers = {"Retry-After": "1"} if code == 503 else {"Connection": "close"} if code in (408, 413) else None
    return JSONResponse({"error": text}, status_code=code, headers=headers)
