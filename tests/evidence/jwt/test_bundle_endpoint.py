"""The HTTPS bundle endpoint: a real one with real TLS, and responses that a correct one would not send."""

import asyncio
import gzip
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import respx
import trustme

from tests.evidence.certificates import Authority, Issued, server_context
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble, endpoint
from tests.evidence.jwt.tokens import SigningKey, document
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.bundle_endpoint import BundleEndpoint, FileRoots, SpiffeTrust, WebTrust, WorkloadRoots
from webhook.evidence.jwt.jwt_bundle import BadBundleError
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.runtime.tls.certificate_source import BadRootsError

KEY = SigningKey.make()
SERVER_ID = "spiffe://example.org/spire/server"
URL = "https://spire.example/bundle"


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def web_context(ca: trustme.CA, name: str = "localhost") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(name).configure_cert(context)
    return context


def pem(directory: Path, *roots: bytes) -> Path:
    path = directory / "roots.pem"
    path.write_text("".join(map(ssl.DER_cert_to_PEM_cert, roots)))
    return path


def with_roots(*roots: bytes, sequence: int = 1) -> bytes:
    extra = tuple({"use": "x509-svid", "kty": "EC", "x5c": [b64encode(der).decode()]} for der in roots)
    return document(KEY, extra=extra, sequence=sequence)


# https_web.


async def test_https_web_endpoint_is_verified_by_its_name(ca: trustme.CA, tmp_path: Path) -> None:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with endpoint(web_context(ca), document(KEY, sequence=3)) as double:
        bundle = await BundleEndpoint(double.url, WebTrust(tmp_path / "ca.pem")).fetch()
    assert (set(bundle.keys), bundle.sequence) == ({"key-1"}, 3)
    assert double.requests[0].startswith(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("case", ["another CA", "another name", "the system's CAs"])
async def test_wrong_endpoint_gets_no_request(ca: trustme.CA, tmp_path: Path, case: str) -> None:
    (trustme.CA() if case == "another CA" else ca).cert_pem.write_to_path(tmp_path / "ca.pem")
    name = "elsewhere.example" if case == "another name" else "localhost"
    trust = WebTrust(None if case == "the system's CAs" else tmp_path / "ca.pem")
    async with endpoint(web_context(ca, name), document(KEY)) as double:
        with pytest.raises(EvidenceUnavailableError, match="certificate verify failed"):
            await BundleEndpoint(double.url, trust).fetch()
    assert double.requests == []


async def test_missing_endpoint_is_unavailable(tmp_path: Path, ca: trustme.CA) -> None:
    async with endpoint(web_context(ca), b"") as double:
        pass
    with pytest.raises(EvidenceUnavailableError):
        await BundleEndpoint(double.url, WebTrust(None)).fetch()


@pytest.mark.respx
@pytest.mark.parametrize("status", [301, 302, 404, 405, 500, 503])
async def test_other_status_is_no_bundle(status: int, respx_mock: respx.MockRouter) -> None:
    elsewhere = {"Location": "https://attacker.example/"}
    respx_mock.get(URL).respond(status, content=document(KEY), headers=elsewhere)
    with pytest.raises(EvidenceUnavailableError, match=str(status)):
        await BundleEndpoint(URL, WebTrust(None)).fetch()


@pytest.mark.respx
@pytest.mark.parametrize("fault", [httpx.ConnectError, httpx.ReadTimeout, httpx.RemoteProtocolError, httpx.ReadError])
async def test_failing_endpoint_is_unavailable(fault: type[httpx.TransportError], respx_mock: respx.MockRouter) -> None:
    respx_mock.get(URL).mock(side_effect=fault)
    with pytest.raises(EvidenceUnavailableError, match="did not answer"):
        await BundleEndpoint(URL, WebTrust(None)).fetch()


@pytest.mark.respx
@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"keys": [1]}', b" " * (2**20 + 1)])
async def test_invalid_bundle_document_is_rejected(content: bytes, respx_mock: respx.MockRouter) -> None:
    respx_mock.get(URL).respond(200, content=content)
    with pytest.raises(BadBundleError):
        await BundleEndpoint(URL, WebTrust(None)).fetch()


class Endless(httpx.AsyncByteStream):
    """A body that never ends."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.read = chunk, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            self.read += self.chunk
            yield b" " * self.chunk


@pytest.mark.respx
@pytest.mark.parametrize("chunk", [1000, 2**16, 2**21])
async def test_endless_body_is_rejected_while_it_arrives(chunk: int, respx_mock: respx.MockRouter) -> None:
    body = Endless(chunk)
    respx_mock.get(URL).mock(return_value=httpx.Response(200, stream=body))
    with pytest.raises(BadBundleError, match="larger than 1048576 bytes"):
        await BundleEndpoint(URL, WebTrust(None), deadline=5).fetch()
    assert body.read <= 2**20 + chunk


async def test_endless_fast_response_is_aborted(ca: trustme.CA, tmp_path: Path) -> None:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    left = asyncio.Event()
    poured = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal poured
        with suppress(OSError):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not reader.at_eof() and not writer.is_closing():
                writer.write(b" " * 2**16)
                await writer.drain()
                poured += 2**16
        writer.close()
        left.set()

    server = await asyncio.start_server(pour, "127.0.0.1", 0, ssl=web_context(ca))
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
    with pytest.raises(BadBundleError, match="larger than"):
        await BundleEndpoint(url, WebTrust(tmp_path / "ca.pem"), deadline=30).fetch()
    await asyncio.wait_for(left.wait(), 30)
    server.close()
    assert poured < 2**25  # what was read, and what was in buffers


async def test_slow_response_times_out(ca: trustme.CA, tmp_path: Path) -> None:
    """Each byte arrives in time, and the last one much too late: callers that need a new key wait for this fetch."""
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    left = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not reader.at_eof() and not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        left.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0, ssl=web_context(ca))
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
    with pytest.raises(EvidenceUnavailableError, match="did not answer: no complete response in time"):
        await BundleEndpoint(url, WebTrust(tmp_path / "ca.pem"), deadline=0.5).fetch()
    await asyncio.wait_for(left.wait(), 30)
    server.close()


@pytest.mark.respx
async def test_compressed_response_is_not_decompressed(respx_mock: respx.MockRouter) -> None:
    """A small compressed response may expand to gigabytes."""
    packed = gzip.compress(document(KEY))
    route = respx_mock.get(URL).respond(200, content=packed, headers={"Content-Encoding": "gzip"})
    with pytest.raises(BadBundleError):
        await BundleEndpoint(URL, WebTrust(None)).fetch()
    assert route.calls.last.request.headers["accept-encoding"] == "identity"


async def test_changed_ca_file_is_reloaded(ca: trustme.CA, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    trust = WebTrust(tmp_path / "ca.pem")
    async with endpoint(web_context(ca), document(KEY)) as double:
        with pytest.raises(EvidenceUnavailableError):
            await BundleEndpoint(double.url, trust).fetch()
        ca.cert_pem.write_to_path(tmp_path / "ca.pem")
        assert (await BundleEndpoint(double.url, trust).fetch()).keys
        (tmp_path / "ca.pem").write_text("nothing")
        assert (await BundleEndpoint(double.url, trust).fetch()).keys


# https_spiffe.


async def fetched(trust: SpiffeTrust, shown: Issued, authority: Authority, content: bytes) -> int:
    """The number of requests to the endpoint."""
    async with endpoint(server_context(shown, authority), content) as double:
        found = BundleEndpoint(double.url, trust)
        try:
            found.accepted(await found.fetch())
        finally:
            seen = len(double.requests)
    return seen


async def test_spire_server_is_verified_by_its_spiffe_id(tmp_path: Path) -> None:
    authority = Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, authority.root)), SERVER_ID)
    assert await fetched(trust, authority.issue(SERVER_ID), authority, document(KEY)) == 1


@pytest.mark.parametrize(
    "uris",
    [
        ("spiffe://example.org/web",),
        ("spiffe://example.org/spire/server2",),
        ("spiffe://other.org/spire/server",),
        (SERVER_ID, "spiffe://example.org/web"),
        ("spiffe://example.org/web", SERVER_ID),
        (),
    ],
    ids=["workload", "longer", "other domain", "both", "both, other order", "none"],
)
async def test_other_workload_of_the_trust_domain_gets_no_request(tmp_path: Path, uris: tuple[str, ...]) -> None:
    authority = Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, authority.root)), SERVER_ID)
    async with endpoint(server_context(authority.issue(*uris), authority), document(KEY)) as double:
        with pytest.raises(EvidenceUnavailableError, match="did not answer"):
            await BundleEndpoint(double.url, trust).fetch()
    assert double.requests == []


async def test_ca_with_the_same_name_is_not_trusted(tmp_path: Path) -> None:
    authority, impostor = Authority(), Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, authority.root)), SERVER_ID)
    with pytest.raises(EvidenceUnavailableError):
        await fetched(trust, impostor.issue(SERVER_ID), impostor, document(KEY))


async def test_bundle_provides_the_next_roots(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, old.root)), SERVER_ID)
    assert await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root, new.root)) == 1
    assert await fetched(trust, new.issue(SERVER_ID), new, with_roots(new.root)) == 1
    with pytest.raises(EvidenceUnavailableError):
        await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root))


async def test_changed_roots_file_replaces_the_roots_of_bundles(tmp_path: Path) -> None:
    """A rebuilt server's roots can come only from the file. A file that has not changed has no effect."""
    old, rebuilt = Authority(), Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, old.root)), SERVER_ID)
    assert await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root)) == 1
    for content in (None, "nothing"):
        if content is not None:
            (tmp_path / "roots.pem").write_text(content)
        with pytest.raises(EvidenceUnavailableError):
            await fetched(trust, rebuilt.issue(SERVER_ID), rebuilt, with_roots(rebuilt.root))
        assert await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root)) == 1
    pem(tmp_path, rebuilt.root)
    assert await fetched(trust, rebuilt.issue(SERVER_ID), rebuilt, with_roots(rebuilt.root)) == 1
    with pytest.raises(EvidenceUnavailableError):
        await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root))


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[JwtWorkloadApiDouble]:
    double = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), KEY)
    await double.start()
    yield double
    await double.stop()


def of_agent(agent: JwtWorkloadApiDouble) -> SpiffeTrust:
    return SpiffeTrust(WorkloadRoots(JwtWorkloadApi(agent.path), "example.org"), SERVER_ID)


async def test_agent_provides_the_initial_roots(agent: JwtWorkloadApiDouble) -> None:
    authority, other, rebuilt = Authority(), Authority(), Authority()
    agent.roots = {"spiffe://example.org": other.root + authority.root, "spiffe://other.org": rebuilt.root}
    trust = of_agent(agent)
    assert await fetched(trust, authority.issue(SERVER_ID), authority, document(KEY)) == 1
    with pytest.raises(EvidenceUnavailableError):
        await fetched(trust, rebuilt.issue(SERVER_ID), rebuilt, document(KEY))
    agent.roots = {"spiffe://example.org": rebuilt.root}
    assert await fetched(trust, rebuilt.issue(SERVER_ID), rebuilt, document(KEY)) == 1


async def test_agent_outage_after_the_start_changes_nothing(agent: JwtWorkloadApiDouble) -> None:
    old, new = Authority(), Authority()
    agent.roots = {"spiffe://example.org": old.root}
    trust = of_agent(agent)
    assert await fetched(trust, old.issue(SERVER_ID), old, with_roots(old.root, new.root)) == 1
    await agent.stop()
    assert await fetched(trust, new.issue(SERVER_ID), new, with_roots(new.root)) == 1


@pytest.mark.parametrize(
    ("roots", "problem"),
    [
        ({}, "no bundle of example.org"),
        ({"spiffe://example.org": b""}, "no roots"),
        ({"spiffe://example.org": b"0"}, "truncated"),
        ({"spiffe://example.org": b"\x30\x00"}, "not a certificate"),
    ],
    ids=["other domains", "none", "half", "no certificate"],
)
async def test_no_request_is_made_without_roots(
    agent: JwtWorkloadApiDouble, roots: dict[str, bytes], problem: str
) -> None:
    authority = Authority()
    agent.roots = roots
    async with endpoint(server_context(authority.issue(SERVER_ID), authority), document(KEY)) as double:
        with pytest.raises(EvidenceUnavailableError, match=problem):
            await BundleEndpoint(double.url, of_agent(agent)).fetch()
        await agent.stop()
        with pytest.raises(EvidenceUnavailableError, match="Workload API"):
            await BundleEndpoint(double.url, of_agent(agent)).fetch()
    assert double.requests == []


async def test_bundle_without_roots_keeps_the_roots(tmp_path: Path) -> None:
    authority = Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, authority.root)), SERVER_ID)
    for content in (document(KEY), with_roots(b"\x30\x00")):
        assert await fetched(trust, authority.issue(SERVER_ID), authority, content) == 1


async def test_roots_file_that_becomes_bad_before_the_first_fetch_is_unavailable(tmp_path: Path) -> None:
    authority = Authority()
    trust = SpiffeTrust(FileRoots(pem(tmp_path, authority.root)), SERVER_ID)
    (tmp_path / "roots.pem").write_text("nothing")
    with pytest.raises(EvidenceUnavailableError, match="no CA certificate"):
        await fetched(trust, authority.issue(SERVER_ID), authority, document(KEY))
    pem(tmp_path, authority.root)
    assert await fetched(trust, authority.issue(SERVER_ID), authority, document(KEY)) == 1


def test_roots_file_without_roots_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "roots.pem"
    path.write_text("nothing")
    for make in (lambda: WebTrust(path), lambda: FileRoots(path)):
        with pytest.raises(BadRootsError):
            make()
