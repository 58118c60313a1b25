"""Whether the server is alive, and whether it may be asked."""

from enum import StrEnum

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response


class Stage(StrEnum):
    """A server's life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Health:
    """The server's stage, as the probes are told."""

    def __init__(self) -> None:
        self.stage = Stage.STARTING

    @property
    def is_serving(self) -> bool:
        return self.stage is Stage.SERVING

    async def live(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        if self.is_serving:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": self.stage}, status_code=503, headers={"Retry-After": "1"})
