"""The liveness and readiness of the server."""

from enum import StrEnum
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

# The service's name in the answers of the older scheduler.
SCHEDULER: Final = "gpu-scheduler"


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


class AtWork(Protocol):
    """Watches whether a kube-scheduler works."""

    async def run(self) -> None: ...

    def problem(self) -> str:
        """Why no pod is scheduled; empty if a scheduler works."""


class SchedulerHealth:
    """Whether a kube-scheduler works, in the form of the older scheduler's answers."""

    def __init__(self, scheduler: AtWork) -> None:
        self._scheduler = scheduler

    async def live(self, request: Request) -> Response:
        return self._answer("healthy")

    async def ready(self, request: Request) -> Response:
        return self._answer("ready")

    def _answer(self, status: str) -> Response:
        if problem := self._scheduler.problem():
            return JSONResponse({"status": problem, "service": SCHEDULER}, 503, headers={"Retry-After": "1"})
        return JSONResponse({"status": status, "service": SCHEDULER})
