"""A fake SPIRE Server and a fake Workload API with real connections and messages encoded by Google's protobuf library.

The server's messages are built from the field numbers and types of its definitions; the Workload API's are py-spiffe's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from typing import Any

from attrs import define, field
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream
from spiffe._proto import workload_pb2

from tests.evidence.certificates import Authority, Issued, server_context

TRUST_DOMAIN = "example.org"
SERVER_ID = f"spiffe://{TRUST_DOMAIN}/spire/server"
VERIFIER = f"spiffe://{TRUST_DOMAIN}/gpuwarden"

Table = dict[str, tuple[tuple[int, str, str], ...]]
# Number, name, type; a capital letter means a message, `*` means repeated.
TABLE: Table = {
    "SPIFFEID": ((1, "trust_domain", "string"), (2, "path", "string")),
    "Selector": ((1, "type", "string"), (2, "value", "string")),
    "Agent": (
        (1, "id", "SPIFFEID"),
        (2, "attestation_type", "string"),
        (3, "x509svid_serial_number", "string"),
        (4, "x509svid_expires_at", "int64"),
        (5, "selectors", "*Selector"),
        (6, "banned", "bool"),
        (7, "can_reattest", "bool"),
        (8, "agent_version", "string"),
    ),
    "AgentMask": (
        (2, "attestation_type", "bool"),
        (3, "x509svid_serial_number", "bool"),
        (4, "x509svid_expires_at", "bool"),
        (5, "selectors", "bool"),
        (6, "banned", "bool"),
        (7, "can_reattest", "bool"),
        (8, "agent_version", "bool"),
    ),
    "ListAgentsRequest": (
        (2, "output_mask", "AgentMask"),
        (3, "page_size", "int32"),
        (4, "page_token", "string"),
    ),
    "ListAgentsResponse": ((1, "agents", "*Agent"), (2, "next_page_token", "string")),
}


def built(table: Table) -> dict[str, Any]:
    """Classes of Google's protobuf library for all messages in the table."""
    descriptors: Any = import_module("google.protobuf.descriptor_pb2")
    pools: Any = import_module("google.protobuf.descriptor_pool")
    factory: Any = import_module("google.protobuf.message_factory")
    form = descriptors.FieldDescriptorProto
    scalars = {"string": form.TYPE_STRING, "int64": form.TYPE_INT64, "int32": form.TYPE_INT32, "bool": form.TYPE_BOOL}
    file = descriptors.FileDescriptorProto(name="spire.proto", package="double", syntax="proto3")
    for message, fields in table.items():
        made = file.message_type.add(name=message)
        for number, name, kind in fields:
            one = made.field.add(name=name, number=number)
            one.label = form.LABEL_REPEATED if kind.startswith("*") else form.LABEL_OPTIONAL
            bare = kind.removeprefix("*")
            one.type = scalars.get(bare, form.TYPE_MESSAGE)
            if bare not in scalars:
                one.type_name = f".double.{bare}"
    pool = pools.DescriptorPool()
    pool.Add(file)
    return {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"double.{name}")) for name in table}


MESSAGES = built(TABLE)
MASKED = [name for _, name, _ in TABLE["AgentMask"]]


def agent(
    node: str | None = "node-a",
    hash: str | None = "aa11",
    *,
    expires_at: datetime | int,
    id: str | None = None,
    attestor: str = "x509pop",
    trust_domain: str = TRUST_DOMAIN,
    serial: str = "1",
    banned: bool = False,
    can_reattest: bool = True,
    selectors: list[tuple[str, str]] | None = None,
) -> Any:
    """An agent as SPIRE Server returns it: attested by a certificate that names node and hash."""
    if selectors is None:
        selectors = [("x509pop", "subject:cn:somebody")]
        selectors += [("x509pop", f"san:node-name:{node}")] if node is not None else []
        selectors += [("x509pop", f"san:attestation-hash:{hash}")] if hash is not None else []
    return MESSAGES["Agent"](
        id=MESSAGES["SPIFFEID"](trust_domain=trust_domain, path=id or f"/spire/agent/{attestor}/{node}"),
        attestation_type=attestor,
        x509svid_serial_number="" if banned else serial,
        x509svid_expires_at=expires_at if isinstance(expires_at, int) else int(expires_at.timestamp()),
        selectors=[MESSAGES["Selector"](type=type, value=value) for type, value in selectors],
        banned=banned,
        can_reattest=can_reattest,
        agent_version="1.16.0",
    )


@contextmanager
def hanging_up(stream: "Stream[Any, Any]") -> Iterator[None]:
    """The connections of a process end with it."""
    try:
        yield
    except asyncio.CancelledError:
        inner: Any = stream
        inner._stream._transport.close()
        raise


def at_once() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@define
class SpireDouble:
    """The ListAgents part of the Agent API. `readers` are the callers that the policy lets list agents."""

    agents: list[Any] = field(factory=list)
    readers: set[str] = field(factory=lambda: {VERIFIER})
    # Called with the number of each page before it is sent.
    before_page: Callable[[int], None] = lambda number: None
    # A frozen server does not respond while this is not set.
    answers: asyncio.Event = field(factory=at_once)
    # From page tokens to their requests.
    requests: list[Any] = field(factory=list)
    callers: list[str | None] = field(factory=list)
    port: int = 0
    path: str | None = None
    _server: Server | None = None

    async def start(self, shown: Issued | None, trusted: Authority | None, *, path: str | None = None) -> None:
        self._server = Server([self])
        self.path = path
        if path is not None:
            await self._server.start(path=path)
            return
        assert shown is not None
        assert trusted is not None
        await self._server.start("127.0.0.1", self.port, ssl=server_context(shown, trusted))
        listening: Any = self._server._server
        self.port = listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def __mapping__(self) -> dict[str, Handler]:
        request, response = MESSAGES["ListAgentsRequest"], MESSAGES["ListAgentsResponse"]
        method = "/spire.api.server.agent.v1.Agent/ListAgents"
        return {method: Handler(self._list_agents, Cardinality.UNARY_UNARY, request, response)}

    async def _list_agents(self, stream: "Stream[Any, Any]") -> None:
        request: Any = await stream.recv_message()
        caller = caller_of(stream)
        self.requests.append(request)
        self.callers.append(caller)
        with hanging_up(stream):
            await self.answers.wait()
        if self.path is None and caller not in self.readers:
            raise GRPCError(Status.PERMISSION_DENIED, "authorization denied for method ListAgents")
        self.before_page(len(self.requests))
        await stream.send_message(self._page(request))

    def _page(self, request: Any) -> Any:
        """Every page with agents has a token, even the last one; then follows an empty page without a token."""
        if request.page_token and not request.page_token.isdigit():
            raise GRPCError(Status.INTERNAL, "could not parse token")
        begin = int(request.page_token or 0)
        found = self.agents[begin : begin + request.page_size] if request.page_size else self.agents[begin:]
        shown = [masked(one, request) for one in found]
        token = str(begin + len(found)) if found and request.page_size else ""
        return MESSAGES["ListAgentsResponse"](agents=shown, next_page_token=token)


def masked(one: Any, request: Any) -> Any:
    """Fields that the mask does not request are omitted, and look like false."""
    if not request.HasField("output_mask"):
        return one
    shown = MESSAGES["Agent"]()
    shown.CopyFrom(one)
    for name in MASKED:
        if not getattr(request.output_mask, name):
            shown.ClearField(name)
    return shown


def caller_of(stream: "Stream[Any, Any]") -> str | None:
    """The SPIFFE ID of the client certificate, if one was presented."""
    certificate: Any = stream.peer.cert()
    uris = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
    return uris[0] if uris else None


@define
class WorkloadApiDouble:
    """The X.509 part of the Workload API: sends the current SVIDs at once, and again after every change."""

    path: str
    identities: list[Issued] = field(factory=list)
    roots: list[bytes] = field(factory=list)
    asked: int = 0
    _changed: list[asyncio.Event] = field(factory=list)
    _server: Server | None = None

    async def start(self) -> None:
        self._server = Server([self])
        await self._server.start(path=self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def rotate(self, *identities: Issued, roots: list[bytes]) -> None:
        self.identities, self.roots = list(identities), roots
        for one in self._changed:
            one.set()

    def __mapping__(self) -> dict[str, Handler]:
        request, response = workload_pb2.X509SVIDRequest, workload_pb2.X509SVIDResponse
        method = "/SpiffeWorkloadAPI/FetchX509SVID"
        return {method: Handler(self._fetch, Cardinality.UNARY_STREAM, request, response)}

    async def _fetch(self, stream: "Stream[Any, Any]") -> None:
        await stream.recv_message()
        metadata: Any = stream.metadata
        if metadata.get("workload.spiffe.io") != "true":
            raise GRPCError(Status.INVALID_ARGUMENT, "security header missing from request")
        self.asked += 1
        with self._news() as news, hanging_up(stream):
            while True:
                if not self.identities:
                    raise GRPCError(Status.PERMISSION_DENIED, "no identity issued")
                await stream.send_message(self._answer())
                await news.wait()
                news.clear()

    @contextmanager
    def _news(self) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._changed.append(event)
        try:
            yield event
        finally:
            self._changed.remove(event)

    def _answer(self) -> Any:
        svids = [
            workload_pb2.X509SVID(
                spiffe_id=one.spiffe_id, x509_svid=one.chain, x509_svid_key=one.key, bundle=b"".join(self.roots)
            )
            for one in self.identities
        ]
        return workload_pb2.X509SVIDResponse(svids=svids)


async def until(holds: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Waits long enough for slow machines."""
    async with asyncio.timeout(30):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)
