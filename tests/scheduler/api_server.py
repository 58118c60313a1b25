"""An API server that has a few objects, by path."""

import json

from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from tests.builders import Raw


@define
class ApiServer:
    """Has these objects, or says a status; of anything else it says that it is not there."""

    has: dict[str, Raw | int] = field(factory=dict)
    asked: list[str] = field(factory=list)
    sent: list[tuple[str, Raw]] = field(factory=list)
    """What was to be written, and where."""
    host: str = ""

    async def answer(self, request: Request) -> Response:
        path = request.scope["raw_path"].decode()
        self.asked.append(path)
        if request.method != "GET":
            self.sent.append((path, json.loads(await request.body())))
        found = self.has.get(path, 404)
        if isinstance(found, int):
            return Response(b'{"kind": "Status", "message": "no"}', found, media_type="application/json")
        return Response(json.dumps(found), media_type="application/json")
