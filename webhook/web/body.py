"""Reading a request's body, bounded in size; the listener bounds the time, and reads on what nobody wants."""

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from webhook.core.errors import GpuwardenError

# The API server's own limit for an object is 1.5 MiB; a review of an update carries two.
MAX_BODY = 3 * 2**20


class RefusedBodyError(GpuwardenError):
    """The body cannot be taken; `code` is the HTTP status that says so."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


async def read_body(request: Request, most: int = MAX_BODY) -> bytes:
    """The whole body, or `RefusedBodyError`."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise RefusedBodyError(413, f"the body is larger than {most} bytes")
            chunks.append(chunk)
    except ClientDisconnect as exc:
        raise RefusedBodyError(408, "the body ended early, or did not come in time") from exc
    return b"".join(chunks)


def error(code: int, text: str) -> Response:
    """A refusal in the one form that every route has."""
    headers = {"Retry-After": "1"} if code == 503 else None
    return JSONResponse({"error": text}, status_code=code, headers=headers)
