"""Reading a request's body, bounded in size; the listener bounds the time, and reads on what nobody wants."""

from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from webhook.runtime.http.budgets import BodyUsage, OverloadedError, RefusedBodyError, parsed_size

__all__ = ["BODY_USAGE", "MAX_BODY", "RefusedBodyError", "error", "read_body"]

# The API server's own limit for an object is 1.5 MiB; a review of an update carries two.
MAX_BODY = 3 * 2**20


# Where the middleware leaves what the request's body takes of the budgets.
BODY_USAGE = "gpuwarden.body"


async def read_body(request: Request, most: int = MAX_BODY, *, needs: Callable[[bytes], int] = parsed_size) -> bytes:
    """The whole body, or `RefusedBodyError`. Its memory is counted until the request has been answered:
    what it `needs` once it is parsed."""
    held: BodyUsage = request.scope[BODY_USAGE]
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    try:
        async with held.reading():
            held.expect(min(int(declared), most) if declared.isdecimal() else 0)
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise RefusedBodyError(413, f"the body is larger than {most} bytes")
                held.add(len(chunk))
                chunks.append(chunk)
    except ClientDisconnect as exc:
        raise RefusedBodyError(408, "the body ended early, or did not come in time") from exc
    except TimeoutError as exc:
        raise OverloadedError from exc
    body = b"".join(chunks)
    chunks.clear()
    await held.wait_to_parse(body, needs(body))
    return body


def error(code: int, text: str) -> Response:
    """A refusal in the one form that every route has."""
    headers = {"Retry-After": "1"} if code == 503 else None
    return JSONResponse({"error": text}, status_code=code, headers=headers)
