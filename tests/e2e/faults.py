"""A proxy between gpuwarden's processes and the API server that injects faults of a network or a server. Credentials
pass through, so each client keeps its identity."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from attrs import define, field, frozen
from yarl import URL

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import trust_of

# Hop-by-hop headers: they are not forwarded.
HOP = frozenset({"connection", "transfer-encoding", "content-length", "content-encoding", "host", "accept-encoding"})
REASONS = {
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


@frozen
class Answer:
    """An answer of the API server that the proxy has not forwarded yet."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=dict(self.headers), body=self.body)


@frozen(eq=False)
class Exchange:
    """One request, and the possible reactions to it."""

    proxy: "Proxy"
    request: web.Request
    body: bytes

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def path(self) -> str:
        return self.request.path

    @property
    def is_watch(self) -> bool:
        return self.request.query.get("watch") == "true"

    @property
    def phases(self) -> list[tuple[str, bool]]:
        """For a write of reservations: the phase of each, and whether it names a pod UID."""
        held = (json.loads(self.body).get("status") or {}).get("held") or {}
        return [(entry["phase"], "uid" in entry) for entry in held.values()]

    async def forward(self) -> Answer:
        return await self.proxy.forward(self)

    def cut(self) -> web.Response:
        """Closes the connection without an answer."""
        if self.request.transport is not None:
            self.request.transport.abort()
        return web.Response()

    def refuse(self, status: int) -> web.Response:
        """An error answer in the API server's form."""
        said = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": REASONS[status],
            "message": "as the test wants it",
            "code": status,
        }
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return web.json_response(said, status=status, headers=headers)


Fault = Callable[[Exchange], Awaitable[web.StreamResponse]]
Match = Callable[[Exchange], bool]


def is_reservation_write(one: Exchange) -> bool:
    return one.method == "PUT" and "/gpunodes/" in one.path and one.path.endswith("/status")


def is_ledger_call(one: Exchange) -> bool:
    """Writes of reservations, and the reads that precede them."""
    return "/gpunodes/" in one.path


def is_watch(one: Exchange) -> bool:
    return one.is_watch


def is_list(one: Exchange) -> bool:
    """A list of a kind: the path ends with its plural."""
    return one.method == "GET" and not one.is_watch and one.path.endswith("s")


async def forward_unchanged(one: Exchange) -> web.StreamResponse:
    """Forwards the request unchanged; it is counted."""
    return (await one.forward()).response()


def answering(status: int) -> Fault:
    """Refuses with that status and does not forward."""

    async def fault(one: Exchange) -> web.StreamResponse:
        return one.refuse(status)

    return fault


async def drop_response(one: Exchange) -> web.StreamResponse:
    """Forwards the request and drops the answer."""
    await one.forward()
    return one.cut()


async def cut(one: Exchange) -> web.StreamResponse:
    """Closes the connection and does not forward."""
    return one.cut()


async def never_answer(one: Exchange) -> web.StreamResponse:
    """Forwards the request and never answers: the client runs into its timeout."""
    await one.forward()
    await asyncio.sleep(60)
    return one.cut()


def delayed(seconds: float) -> Fault:
    async def fault(one: Exchange) -> web.StreamResponse:
        answer = await one.forward()
        await asyncio.sleep(seconds)
        return answer.response()

    return fault


async def watch_expired(one: Exchange) -> web.StreamResponse:
    """Refuses a watch with 410."""
    return one.refuse(410)


async def watch_expired_in_stream(one: Exchange) -> web.StreamResponse:
    """Sends 410 as the first event of a watch, as the API server mostly does."""
    said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
    return web.Response(
        body=json.dumps({"type": "ERROR", "object": said}).encode() + b"\n", content_type="application/json"
    )


@define(eq=False)
class Breakpoint:
    """Holds one request at an exact step: before the API server gets it, or, if `carried_out`, after."""

    carried_out: bool
    reached: asyncio.Event = field(factory=asyncio.Event)
    _may_go: asyncio.Event = field(factory=asyncio.Event)

    async def __call__(self, one: Exchange) -> web.StreamResponse:
        answer = await one.forward() if self.carried_out else None
        self.reached.set()
        await self._may_go.wait()
        return answer.response() if answer is not None else one.cut()

    def resume(self) -> None:
        self._may_go.set()


@define(eq=False)
class Rule:
    """A fault for a share of the matching requests; with `most`, for at most so many."""

    name: str
    match: Match
    fault: Fault
    share: float = 1.0
    most: int | None = None


class Proxy:
    """A proxy in front of one API server. Rules may change at any time; the first rule that applies is used."""

    def __init__(self, cluster: Cluster, seed: int = 1) -> None:
        self._kubeconfig: dict[str, Any] = json.loads(cluster.kubeconfig.read_text())
        self._upstream = cluster.url
        self._random = random.Random(seed)  # noqa: S311 - a plan, not a secret
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.rules: list[Rule] = []
        self.applied: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        trust = trust_of(self._kubeconfig["clusters"][0]["cluster"], {})
        self._session = ClientSession(
            connector=TCPConnector(ssl=trust, limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
        )
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.thaw()
        await self._runner.cleanup()
        await self._session.close()

    def kubeconfig(self, directory: Path) -> Path:
        """The administrator's kubeconfig, through this proxy."""
        content = json.loads(json.dumps(self._kubeconfig))
        content["clusters"][0]["cluster"] = {"server": self.url}
        file = directory / f"through-{self.url.rpartition(':')[2]}.kubeconfig"
        file.write_text(json.dumps(content))
        return file

    def on(self, name: str, match: Match, fault: Fault, share: float = 1.0, most: int | None = None) -> None:
        self.rules.append(Rule(name, match, fault, share, most))

    def freeze(self) -> None:
        """Stops all traffic in both directions and keeps the connections open."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        one = Exchange(self, request, await request.read())
        await self._flowing.wait()
        fault = self._fault_for(one)
        try:
            if fault is not None:
                return await fault(one)
            self.passed["watch" if one.is_watch else one.method] += 1
            if one.is_watch:
                return await self._streamed(one)
            answer = await self.forward(one)
        except (ClientError, OSError):
            return one.cut()  # the API server is down
        await self._flowing.wait()
        return answer.response()

    def _fault_for(self, one: Exchange) -> Fault | None:
        for rule in self.rules:
            if rule.most != 0 and rule.match(one) and self._random.random() < rule.share:
                rule.most = None if rule.most is None else rule.most - 1
                self.applied[rule.name] += 1
                return rule.fault
        return None

    async def forward(self, one: Exchange) -> Answer:
        async with self._session.request(**self._call(one)) as got:
            headers = {name: value for name, value in got.headers.items() if name.lower() not in HOP}
            return Answer(got.status, headers, await got.read())

    async def _streamed(self, one: Exchange) -> web.StreamResponse:
        async with self._session.request(**self._call(one)) as got:
            response = web.StreamResponse(status=got.status, headers={"Content-Type": "application/json"})
            await response.prepare(one.request)
            async for chunk in got.content.iter_any():
                await self._flowing.wait()
                await response.write(chunk)
        return response

    def _call(self, one: Exchange) -> dict[str, Any]:
        headers = {name: value for name, value in one.request.headers.items() if name.lower() not in HOP}
        headers["Accept-Encoding"] = "identity"  # otherwise long lists would be compressed
        url = URL(self._upstream + one.request.path_qs, encoded=True)
        return {"method": one.method, "url": url, "data": one.body or None, "headers": headers}
