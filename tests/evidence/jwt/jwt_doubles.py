"""A fake Workload API for JWTs on a real socket, with py-spiffe's messages, and a fake HTTPS bundle endpoint."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from attrs import define, field
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream
from spiffe._proto import workload_pb2

from tests.evidence.certificates import Issued
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, document, evidence_id, token
from webhook.runtime.clock import utc_now


@define
class JwtWorkloadApiDouble:
    """An agent that signs tokens for its identities, with any audience."""

    path: str
    key: SigningKey
    identities: list[str] = field(factory=lambda: [evidence_id()])
    bundles: dict[str, bytes] = field(factory=dict)
    # Roots of SVIDs, by trust domain.
    roots: dict[str, bytes] = field(factory=dict)
    # X.509-SVIDs of its identities.
    issued: list[Issued] = field(factory=list)
    audiences: list[str] = field(factory=list)
    # A banned agent does not respond.
    is_banned: bool = False
    forge: Callable[[str, str], str] | None = None
    _server: Server | None = None

    async def start(self) -> None:
        if not self.bundles:
            self.bundles = {f"spiffe://{TRUST_DOMAIN}": document(self.key, sequence=None, hint=None)}
        self._server = Server([self])
        await self._server.start(path=self.path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def __mapping__(self) -> dict[str, Handler]:
        w: Any = workload_pb2
        return {
            "/SpiffeWorkloadAPI/FetchJWTSVID": Handler(
                self._svids, Cardinality.UNARY_UNARY, w.JWTSVIDRequest, w.JWTSVIDResponse
            ),
            "/SpiffeWorkloadAPI/FetchX509SVID": Handler(
                self._x509_svids, Cardinality.UNARY_STREAM, w.X509SVIDRequest, w.X509SVIDResponse
            ),
            "/SpiffeWorkloadAPI/FetchJWTBundles": Handler(
                self._bundles, Cardinality.UNARY_STREAM, w.JWTBundlesRequest, w.JWTBundlesResponse
            ),
            "/SpiffeWorkloadAPI/FetchX509Bundles": Handler(
                self._roots, Cardinality.UNARY_STREAM, w.X509BundlesRequest, w.X509BundlesResponse
            ),
        }

    async def _svids(self, stream: "Stream[Any, Any]") -> None:
        request = await received(stream)
        if self.is_banned:
            await asyncio.Event().wait()
        if not self.identities:
            raise GRPCError(Status.PERMISSION_DENIED, "no identity issued")
        (audience,) = request.audience
        self.audiences.append(audience)
        w: Any = workload_pb2
        svids = [w.JWTSVID(spiffe_id=one, svid=self._signed(one, audience)) for one in self.identities]
        await stream.send_message(w.JWTSVIDResponse(svids=svids))

    async def _x509_svids(self, stream: "Stream[Any, Any]") -> None:
        await received(stream)
        w: Any = workload_pb2
        svids = [
            w.X509SVID(spiffe_id=one.spiffe_id, x509_svid=one.chain, x509_svid_key=one.key, bundle=one.chain)
            for one in self.issued
        ]
        await stream.send_message(w.X509SVIDResponse(svids=svids))
        await asyncio.Event().wait()  # an agent keeps the stream open for updates

    def _signed(self, spiffe_id: str, audience: str) -> str:
        if self.forge is not None:
            return self.forge(spiffe_id, audience)
        return token(self.key, audience, utc_now(), sub=spiffe_id)

    async def _bundles(self, stream: "Stream[Any, Any]") -> None:
        await received(stream)
        w: Any = workload_pb2
        await stream.send_message(w.JWTBundlesResponse(bundles=self.bundles))
        await asyncio.Event().wait()  # an agent keeps the stream open for updates

    async def _roots(self, stream: "Stream[Any, Any]") -> None:
        await received(stream)
        w: Any = workload_pb2
        await stream.send_message(w.X509BundlesResponse(crl=[b"another field"], bundles=self.roots))
        await asyncio.Event().wait()


async def received(stream: "Stream[Any, Any]") -> Any:
    request: Any = await stream.recv_message()
    metadata: Any = stream.metadata
    if metadata.get("workload.spiffe.io") != "true":
        raise GRPCError(Status.INVALID_ARGUMENT, "security header missing from request")
    return request


@define
class EndpointDouble:
    """Answers every request with `reply`; `requests` are the first lines and headers as received."""

    reply: bytes
    requests: list[bytes] = field(factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.reply)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def endpoint(context: ssl.SSLContext, content: bytes, status: str = "200 OK") -> AsyncIterator[EndpointDouble]:
    double = EndpointDouble(http(content, status))
    server = await asyncio.start_server(double.answer, "127.0.0.1", 0, ssl=context)
    double.port = server.sockets[0].getsockname()[1]
    try:
        yield double
    finally:
        server.close()
        await server.wait_closed()


def http(content: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + content
