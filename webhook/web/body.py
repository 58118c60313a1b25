"""Reading of request bodies with a size limit. The listener limits the time and discards unread bodies."""

from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from webhook.runtime.http.budgets import BodyUsage, OverloadedError, RefusedBodyError, parsed_size

__all__ = ["BODY_USAGE", "MAX_BODY", "RefusedBodyError", "error", "read_body"]

# The API server's limit for an object is 1.5 MiB; a review of an update contains two.
MAX_BODY = 3 * 2**20


# Key in the scope of a request for its `BodyUsage`, which the middleware sets.
BODY_USAGE = "gpuwarden.body"


async def read_body(
    request: Request, max_size: int = MAX_BODY, *, needs: Callable[[bytes], int] = parsed_size
) -> bytes:
    """The whole body. Raises RefusedBodyError. The memory that the parsed body `needs` stays reserved until the request
    is answered."""
    usage: BodyUsage = request.scope[BODY_USAGE]
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size = 0
    try:
        async with usage.reading():
            usage.expect(min(int(declared), max_size) if declared.isdecimal() else 0)
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_size:
                    raise RefusedBodyError(413, f"the body is larger than {max_size} bytes")
                usage.add(len(chunk))
                chunks.append(chunk)
    except ClientDisconnect as exc:
        raise RefusedBodyError(408, "the body is incomplete, or did not arrive in time") from exc
    except TimeoutError as exc:
        raise OverloadedError from exc
    body = b"".join(chunks)
    chunks.clear()
    await usage.wait_to_parse(body, needs(body))
    return body


def error(code: int, text: str) -> Response:
    """A refusal in JSON, in the form that all routes use."""
    headers = {"Retry-After": "1"} if code == 503 else None
    return JSONResponse({"error": text}, status_code=code, headers=headers)
