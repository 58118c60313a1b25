"""The liveness and readiness of the server."""

from enum import StrEnum

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response


class Stage(StrEnum):
    """The stages of a server's life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Health:
    """The server's stage, and the endpoints of the probes."""

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
