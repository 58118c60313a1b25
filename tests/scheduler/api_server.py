"""An API server with a few objects, by path."""

import json

from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from tests.builders import Raw


@define
class ApiServer:
    """Serves these objects, or a status; answers 404 for anything else."""

    has: dict[str, Raw | int] = field(factory=dict)
    asked: list[str] = field(factory=list)
    sent: list[tuple[str, Raw]] = field(factory=list)
    """Path and body of the writes."""
    port: int = 0

    async def answer(self, request: Request) -> Response:
        path = request.scope["raw_path"].decode()
        self.asked.append(path)
        if request.method != "GET":
            self.sent.append((path, json.loads(await request.body())))
        found = self.has.get(path, 404)
        if isinstance(found, int):
            return Response(b'{"kind": "Status", "message": "no"}', found, media_type="application/json")
        return Response(json.dumps(found), media_type="application/json")
