"""Tests with real sockets, real TLS and both event loops. Every test also checks that the loop reported no error."""

import asyncio
import gc
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cache, partial
from typing import Any

import httpx
import pytest
import trustme
import uvloop
from attrs import define, field
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, RstStreamFrame
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from tests.h2_client import Answer, H2Client, LostError
from webhook.runtime.http.budgets import Budgets, RequestLimits
from webhook.runtime.http.connection import Deadlines
from webhook.runtime.http.listener import Listener

CA = trustme.CA()
HOST = "127.0.0.1"
LONG = 30.0  # a test that takes this long hangs

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def on_both_loops(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[LoopFactory], None]:
    @pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def test(loop_factory: LoopFactory) -> None:
        complaints: list[dict[str, Any]] = []

        async def run() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
            with capture_logs():
                await asyncio.wait_for(scenario(), LONG)
            gc.collect()  # reports unclosed resources

        with asyncio.Runner(debug=False, loop_factory=loop_factory) as runner:
            runner.run(run())
        assert complaints == []

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@define
class App:
    """An app whose slow answers wait for `gate`."""

    gate: asyncio.Event = field(factory=asyncio.Event)
    started: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(0))
    outcomes: list[str] = field(factory=list)

    @property
    def asgi(self) -> Starlette:
        routes = [
            Route("/echo", self.echo, methods=["POST"]),
            Route("/slow", self.slow, methods=["GET", "POST"]),
            Route("/refuse", self.refuse, methods=["POST"]),
            Route("/patient", self.patient, methods=["POST"]),
            Route("/big/{size:int}", self.big),
            Route("/breaks", self.breaks),
        ]
        return Starlette(routes=routes)

    async def echo(self, request: Request) -> Response:
        return Response(await request.body())

    async def slow(self, request: Request) -> Response:
        self.started.release()
        await self.gate.wait()
        self.outcomes.append("answered")
        return PlainTextResponse("at last")

    async def refuse(self, request: Request) -> Response:
        """Answers without reading the body."""
        return JSONResponse({"error": "too big"}, status_code=413)

    async def patient(self, request: Request) -> Response:
        self.started.release()
        try:
            await request.body()
        except Exception as error:
            self.outcomes.append(type(error).__name__)
            raise
        return PlainTextResponse("thanks")

    async def big(self, request: Request) -> Response:
        return Response(b"x" * request.path_params["size"])

    async def breaks(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            raise ValueError("broken")

        return StreamingResponse(parts())


@cache
def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2", "http/1.1"])
    CA.issue_cert(HOST).configure_cert(context)
    return context


@cache
def client_context(protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    CA.configure_trust(context)
    context.set_alpn_protocols([protocol])
    return context


H1, H2 = partial(client_context, "http/1.1"), partial(client_context, "h2")


@asynccontextmanager
async def listening(
    app: App,
    *,
    tls: bool = True,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    budgets: Budgets | None = None,
    is_for_probes: bool = False,
) -> AsyncIterator[Listener]:
    listener = Listener(
        app.asgi,
        host=HOST,
        port=0,
        ssl_context=server_context() if tls else None,
        deadlines=deadlines,
        budgets=budgets,
        is_for_probes=is_for_probes,
    )
    await listener.start()
    try:
        yield listener
    finally:
        await listener.stop(1)


@asynccontextmanager
async def connected(listener: Listener, context: ssl.SSLContext | None = None) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(HOST, listener.port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def request(path: str, body: bytes = b"", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def ask(streams: Streams, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    streams[1].write(sent)
    return await answer(streams[0])


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the connection is closed without any data before the end."""
    try:
        return await reader.read() == b""
    except OSError:
        return True


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.005)


def silent_peer(port: int) -> ssl.SSLSocket:
    """A TLS peer that sends nothing. Its handshake is not done yet."""
    return H1().wrap_socket(socket.create_connection((HOST, port)), server_hostname=HOST, do_handshake_on_connect=False)


class RawH2:
    """An HTTP/2 client that can violate the protocol, at the level of frames."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        self._h2.increment_flow_control_window(2**30)
        self.hello = self._h2.data_to_send()
        self._unsent = self.hello

    def request(self, method: str, path: str | None = None, *, ends_stream: bool = True) -> bytes:
        headers = [(":method", method), (":authority", HOST)]
        headers += [] if path is None else [(":scheme", "https"), (":path", path)]
        self._h2.send_headers(self._h2.get_next_available_stream_id(), headers, end_stream=ends_stream)
        sent, self._unsent = self._unsent + self._h2.data_to_send(), b""
        return sent

    def data(self, stream: int, data: bytes, *, is_last: bool = False) -> bytes:
        self._h2.send_data(stream, data, end_stream=is_last)
        return self._h2.data_to_send()

    async def frames_until(self, reader: asyncio.StreamReader, last: type[Frame]) -> dict[type[Frame], list[int]]:
        """The streams of the HEADERS and RST_STREAM frames up to and with one of type `last`."""
        seen: dict[type[Frame], list[int]] = {}
        while last not in seen:
            frame = await read_frame(reader)
            if isinstance(frame, HeadersFrame | RstStreamFrame):
                seen.setdefault(type(frame), []).append(frame.stream_id)
        return seen


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    frame, length = Frame.parse_frame_header(memoryview(await reader.readexactly(9)))
    frame.parse_body(memoryview(await reader.readexactly(length)))
    return frame


async def all_frames(reader: asyncio.StreamReader) -> list[Frame]:
    frames = []
    with suppress(asyncio.IncompleteReadError):
        while True:
            frames.append(await read_frame(reader))
    return frames


async def wait_closed(reader: asyncio.StreamReader) -> None:
    """Read until the end; other data, such as a TLS alert, may come before."""
    with suppress(OSError):
        await reader.read()


async def seconds(awaitable: Awaitable[object]) -> float:
    started = asyncio.get_running_loop().time()
    await awaitable
    return asyncio.get_running_loop().time() - started


@on_both_loops
async def test_port_0_picks_a_free_port_and_the_url_has_it() -> None:
    async with listening(App()) as tls, listening(App(), tls=False) as plain:
        assert (tls.url, plain.url) == (f"https://127.0.0.1:{tls.port}", f"http://127.0.0.1:{plain.port}")
        async with httpx.AsyncClient(verify=H1()) as client:
            answers = [await client.post(f"{one.url}/echo", content=b"hello") for one in (tls, plain)]
        assert [one.content for one in answers] == [b"hello", b"hello"]
        assert "server" not in answers[0].headers


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080"),  # noqa: S104 - that is the case
        ("::", "http://[::1]:8080"),
        ("::1", "http://[::1]:8080"),
        ("", "http://localhost:8080"),
        ("gpuwarden.example", "http://gpuwarden.example:8080"),
    ],
)
def test_url_reaches_the_listener_from_this_machine(host: str, url: str) -> None:
    assert Listener(PlainTextResponse(), host=host, port=8080).url == url


@on_both_loops
async def test_start_on_a_used_port_raises() -> None:
    async with listening(App(), tls=False) as first:
        second = Listener(PlainTextResponse(), host=HOST, port=first.port)
        with pytest.raises(OSError, match="address already in use"):
            await second.start()


# Many requests.


@on_both_loops
async def test_one_http1_connection_carries_any_number_of_requests() -> None:
    async with listening(App()) as listener, connected(listener, H1()) as streams:
        for number in range(1_600):
            sent = b"%d" % number
            status, headers, body = await ask(streams, request("/echo", sent))
            assert (status, body, headers.get("connection")) == (200, sent, None)


@on_both_loops
async def test_one_http2_connection_carries_any_number_of_requests() -> None:
    async with listening(App()) as listener, H2Client(HOST, listener.port, H2()) as client:
        numbers = iter(range(3_000))

        async def work() -> int:
            done = 0
            for number in numbers:
                sent = b"%d" % number
                status, _, body = await client.post("/echo", sent)
                assert (status, body) == (200, sent)
                done += 1
            return done

        done = await asyncio.gather(*(work() for _ in range(64)))
        assert (sum(done), client.goaways) == (3_000, 0)


@on_both_loops
async def test_250_streams_may_be_open_at_once() -> None:
    app = App()
    async with listening(app) as listener, H2Client(HOST, listener.port, H2()) as client:
        requests = [asyncio.create_task(client.get("/slow")) for _ in range(250)]
        for _ in requests:
            await app.started.acquire()
        app.gate.set()
        assert {one.status for one in await asyncio.gather(*requests)} == {200}


@on_both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening(App(), tls=False) as listener, connected(listener) as streams:
        assert (await ask(streams, request("/echo", b"one") + request("/echo", b"two")))[2] == b"one"
        assert (await answer(streams[0]))[2] == b"two"


# Bodies.


@pytest.mark.parametrize("path", ["/echo", "/refuse", "/nowhere"])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_large_body_is_answered_and_the_connection_stays_open(path: str, loop_factory: LoopFactory) -> None:
    """Also if the app does not read the body. On HTTP/2 other requests continue meanwhile."""
    expected = {"/echo": 200, "/refuse": 413, "/nowhere": 404}[path]
    big = b"x" * 8_000_000

    async def scenario() -> None:
        app = App()
        async with listening(app) as listener:
            async with connected(listener, H1()) as streams:
                assert (await ask(streams, request(path, big)))[0] == expected
                assert (await ask(streams, request("/echo", b"next")))[2] == b"next"
            async with H2Client(HOST, listener.port, H2()) as client:
                slow = asyncio.create_task(client.get("/slow"))
                statuses = [one.status for one in await asyncio.gather(*(client.post(path, big) for _ in range(3)))]
                app.gate.set()
                assert (statuses, (await slow).body, client.goaways) == ([expected] * 3, b"at last", 0)

    on_both_loops(scenario)(loop_factory)


@on_both_loops
async def test_connection_with_an_incomplete_body_is_evicted_before_one_that_waits_for_its_answer() -> None:
    app = App()
    async with (
        listening(app, budgets=Budgets(RequestLimits(connections=3))) as listener,
        connected(listener, H1()) as waiting,
        connected(listener, H1()) as incomplete,
        connected(listener, H2()) as incomplete_http2,
        AsyncExitStack() as later,
    ):
        waiting[1].write(request("/slow", b"whole"))
        await app.started.acquire()
        incomplete[1].write(request("/patient", b"x" * 100)[:-50])
        await app.started.acquire()
        incomplete_http2[1].write(RawH2().request("POST", "/patient", ends_stream=False))
        await app.started.acquire()
        for stalled in (incomplete, incomplete_http2):
            new = await later.enter_async_context(connected(listener, H1()))
            assert (await ask(new, request("/echo", b"here")))[2] == b"here"
            await wait_closed(stalled[0])
        app.gate.set()
        assert (await answer(waiting[0]))[0] == 200
        assert app.outcomes == ["ClientDisconnect", "ClientDisconnect", "answered"]


@on_both_loops
async def test_connection_with_an_incomplete_request_is_evicted_before_an_idle_one() -> None:
    app = App()
    async with (
        listening(app, budgets=Budgets(RequestLimits(connections=3))) as listener,
        connected(listener, H1()) as kept,
        AsyncExitStack() as stalled,
    ):
        assert (await ask(kept, request("/echo", b"once")))[2] == b"once"
        peers = []
        for _ in range(6):
            reader, writer = await stalled.enter_async_context(connected(listener, H1()))
            writer.write(request("/patient", b"x" * 100)[:-50])
            await app.started.acquire()
            peers.append(reader)
        for reader in peers[:4]:
            await wait_closed(reader)
        assert (await ask(kept, request("/echo", b"again")))[2] == b"again"


@on_both_loops
async def test_probes_are_answered_when_the_connection_limit_is_reached() -> None:
    app, budgets = App(), Budgets(RequestLimits(connections=4))
    async with (
        listening(app, budgets=budgets) as listener,
        listening(app, budgets=budgets, tls=False, is_for_probes=True) as probed,
        connected(listener, H2()) as one,
        connected(listener, H2()) as two,
        connected(listener, H2()) as three,
    ):
        for _, writer in (one, two, three):
            writer.write(RawH2().request("GET", "/slow"))
            await app.started.acquire()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with connected(listener, H1()) as refused:
                await ask(refused, request("/echo"))
        async with connected(probed) as new:
            assert (await ask(new, request("/echo", b"well")))[2] == b"well"
        app.gate.set()


@on_both_loops
async def test_http2_answer_starts_after_the_request_body_has_ended() -> None:
    """curl and Go stop sending when they see the status, which Hypercorn treats as a broken connection."""
    async with listening(App()) as listener, connected(listener, H2()) as (reader, writer):
        peer = RawH2()
        writer.write(peer.request("POST", "/refuse", ends_stream=False) + peer.request("POST", "/refuse"))
        assert (await peer.frames_until(reader, HeadersFrame))[HeadersFrame] == [3]
        writer.write(peer.data(1, b"the rest", is_last=True))
        assert (await peer.frames_until(reader, HeadersFrame))[HeadersFrame] == [1]


@on_both_loops
async def test_incomplete_body_is_answered_500_after_the_deadline() -> None:
    app = App()
    deadlines = Deadlines(body=0.2)
    async with listening(app, deadlines=deadlines) as listener, connected(listener, H1()) as (reader, writer):
        writer.write(request("/patient", b"x" * 100)[:-50])
        assert (await answer(reader))[0] == 500
        assert await is_closed(reader)
        assert app.outcomes == ["ClientDisconnect"]


@on_both_loops
async def test_incomplete_http2_body_resets_only_its_stream_after_the_deadline() -> None:
    app = App()
    deadlines = Deadlines(body=0.2)
    async with listening(app, deadlines=deadlines) as listener, connected(listener, H2()) as (reader, writer):
        peer = RawH2()
        writer.write(peer.request("POST", "/patient", ends_stream=False))
        assert await peer.frames_until(reader, RstStreamFrame) == {HeadersFrame: [1], RstStreamFrame: [1]}
        writer.write(peer.data(1, b"too late") + peer.request("GET", "/nowhere"))
        assert (await peer.frames_until(reader, HeadersFrame))[HeadersFrame] == [3]
        assert app.outcomes == ["ClientDisconnect"]


@on_both_loops
async def test_failed_answer_resets_only_its_stream() -> None:
    async with (
        listening(App()) as listener,
        connected(listener, H1()) as streams,
        H2Client(HOST, listener.port, H2()) as client,
    ):
        streams[1].write(request("/breaks", method="GET"))
        assert (await streams[0].read()).endswith(b"half\r\n")  # without the empty chunk that ends a complete answer
        with pytest.raises(LostError, match="INTERNAL_ERROR"):
            await client.get("/breaks")
        assert (await client.post("/echo", b"hello")).body == b"hello"


@on_both_loops
async def test_app_error_is_answered_500_and_logged_once() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise ValueError("broken")

    listener = Listener(broken, host=HOST, port=0)
    await listener.start()
    with capture_logs() as logs:
        async with connected(listener) as streams:
            assert (await ask(streams, request("/mutate", b"{}")))[0] == 500
    assert [(line["event"], line["path"], line["log_level"]) for line in logs] == [("app failed", "/mutate", "error")]
    await listener.stop(1)


# Slow and wrong peers.


def test_default_deadlines_outlast_the_api_server_and_cut_off_slow_peers() -> None:
    deadlines = Deadlines()
    assert deadlines.keep_alive > 90  # the API server keeps an idle connection for as long
    assert max(deadlines.handshake, deadlines.headers, deadlines.body, deadlines.write) <= 30


@on_both_loops
async def test_slow_headers_close_the_connection_and_do_not_delay_others() -> None:
    async with (
        listening(App(), deadlines=Deadlines(headers=0.3)) as listener,
        connected(listener, H1()) as (reader, writer),
        connected(listener, H1()) as other,
    ):
        sending = asyncio.create_task(send_slowly(writer))
        took = asyncio.create_task(seconds(is_closed(reader)))
        await ask(other, request("/echo", b"hello"))
        assert not took.done()
        assert 0.2 < await took < 2
        sending.cancel()


async def send_slowly(writer: asyncio.StreamWriter) -> None:
    for byte in request("/echo", b"never"):
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


@on_both_loops
async def test_slow_headers_of_a_later_request_close_the_connection() -> None:
    async with listening(App(), deadlines=Deadlines(headers=0.3)) as listener, connected(listener, H1()) as streams:
        await ask(streams, request("/echo", b"hello"))
        streams[1].write(b"POST /echo HT")
        assert 0.2 < await seconds(is_closed(streams[0])) < 2


@on_both_loops
async def test_connection_without_a_request_outlives_the_deadline_for_headers() -> None:
    """Go's client opens more connections than it uses at first."""
    deadlines = Deadlines(headers=0.1)
    async with (
        listening(App(), deadlines=deadlines) as listener,
        connected(listener, H1()) as unused,
        connected(listener, H1()) as used,
    ):
        await ask(used, request("/echo", b"hello"))
        await asyncio.sleep(0.3)
        assert [(await ask(streams, request("/echo", b"late")))[2] for streams in (unused, used)] == [b"late", b"late"]


@on_both_loops
async def test_idle_connection_is_closed_after_keep_alive() -> None:
    async with (
        listening(App(), deadlines=Deadlines(keep_alive=0.2)) as listener,
        connected(listener, H1()) as (reader, _),
        H2Client(HOST, listener.port, H2()) as client,
    ):
        await client.post("/echo", b"hello")
        assert await is_closed(reader)
        await client.wait_closed()
        assert client.goaways == 1


@on_both_loops
async def test_request_that_takes_longer_than_keep_alive_is_answered() -> None:
    app = App()
    async with (
        listening(app, deadlines=Deadlines(keep_alive=0.1, headers=0.1)) as listener,
        connected(listener, H1()) as streams,
        H2Client(HOST, listener.port, H2()) as client,
    ):
        requests = [asyncio.create_task(ask(streams, request("/slow"))), asyncio.create_task(client.get("/slow"))]
        await asyncio.sleep(0.3)
        app.gate.set()
        assert [one[0] for one in await asyncio.gather(*requests)] == [200, 200]


@pytest.mark.parametrize(
    "sent",
    [b"", request("/echo", b"hello"), b"\x16\x03\x01" + b"\xff" * 400, b"\x00" * 3],
    ids=["silence", "plain-http", "broken-hello", "garbage"],
)
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_failed_handshake_is_closed_and_delays_no_other_connection(
    sent: bytes, loop_factory: LoopFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with listening(App(), deadlines=Deadlines(handshake=0.5)) as listener, connected(listener) as wrong:
            wrong[1].write(sent)
            closed = asyncio.create_task(wait_closed(wrong[0]))
            async with connected(listener, H1()) as streams:
                await ask(streams, request("/echo", b"hello"))
            assert sent or not closed.done()  # only a silent peer is waited for
            await asyncio.wait_for(closed, 2)

    on_both_loops(scenario)(loop_factory)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x00\xff nonsense\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 70_000, 431),
        (b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n", 400),
    ],
    ids=["garbage", "huge-header", "bad-length"],
)
async def test_malformed_http1_is_refused(sent: bytes, status: int) -> None:
    async with listening(App(), tls=False) as listener, connected(listener) as streams:
        assert (await ask(streams, sent))[0] == status
        assert await is_closed(streams[0])


@on_both_loops
async def test_malformed_http2_closes_only_its_connection() -> None:
    async with listening(App()) as listener, H2Client(HOST, listener.port, H2()) as client:
        for sent in (
            b"nonsense where the preface should be",
            RawH2().hello + b"\0\0\1\0\0\0\0\0\0x",  # DATA on stream 0
            RawH2().request("CONNECT"),  # without a path Hypercorn itself fails
        ):
            async with connected(listener, H2()) as (reader, writer):
                writer.write(sent)
                await reader.read()
        assert (await client.post("/echo", b"hello")).body == b"hello"


@on_both_loops
async def test_peer_that_does_not_read_its_answer_is_aborted() -> None:
    async with listening(App(), tls=False, deadlines=Deadlines(write=0.2)) as listener:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(peer, (HOST, listener.port))
            await loop.sock_sendall(peer, request("/big/2000000", method="GET") * 8)
            await wait_until(lambda: listener.connections == 0)


@on_both_loops
async def test_connection_reset_leaves_no_connection_and_the_request_completes() -> None:
    app = App()
    async with listening(app, tls=False) as listener:
        async with connected(listener) as (_, writer):
            writer.write(request("/slow"))
            await app.started.acquire()
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        app.gate.set()
        await wait_until(lambda: listener.connections == 0)
        assert app.outcomes == ["answered"]  # what a request writes may matter to others


# The drain.


@on_both_loops
async def test_stop_answers_running_requests_and_refuses_connections() -> None:
    app = App()
    async with (
        listening(app) as listener,
        connected(listener, H1()) as streams,
        H2Client(HOST, listener.port, H2()) as client,
    ):
        h1 = asyncio.create_task(ask(streams, request("/slow")))
        h2 = [asyncio.create_task(client.get("/slow")) for _ in range(20)]
        for _ in range(21):
            await app.started.acquire()
        stopping = asyncio.create_task(listener.stop(10))
        await asyncio.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, listener.port)
        app.gate.set()
        status, headers, body = await h1
        assert (status, headers["connection"], body) == (200, "close", b"at last")
        assert {(one.status, one.body) for one in await asyncio.gather(*h2)} == {(200, b"at last")}
        assert await stopping == 0
        await client.wait_closed()
        assert client.goaways == 1


@on_both_loops
async def test_stop_completes_a_large_answer() -> None:
    async with listening(App()) as listener, H2Client(HOST, listener.port, H2()) as client:
        big = asyncio.create_task(client.get("/big/2000000"))
        await client.post("/echo", b"")
        stopping = asyncio.create_task(listener.stop(10))
        assert len((await big).body) == 2_000_000
        assert await stopping == 0


@on_both_loops
async def test_stop_waits_for_a_peer_that_reads_slowly() -> None:
    """The app has sent the whole answer, but Hypercorn has not sent the last frame yet."""
    async with listening(App()) as listener, connected(listener, H2()) as (reader, writer):
        writer.write(RawH2().request("GET", "/big/16000000"))
        await reader.readexactly(9)
        stopping = asyncio.create_task(listener.stop(20))
        await asyncio.sleep(0.3)
        seen = await reader.read()
        assert b"\0\0\0\0\1\0\0\0\1" in seen[-200:]  # an empty DATA frame with END_STREAM on stream 1
        assert len(seen) > 16_000_000
        assert await stopping == 0


@on_both_loops
async def test_request_sent_when_the_drain_begins_is_answered() -> None:
    async with listening(App()) as listener, connected(listener, H1()) as streams:
        await ask(streams, request("/echo", b"hello"))
        stopping = asyncio.create_task(listener.stop(10))
        await asyncio.sleep(0)
        status, headers, body = await ask(streams, request("/echo", b"late"))
        assert (status, headers["connection"], body) == (200, "close", b"late")
        assert await stopping == 0


@on_both_loops
async def test_request_during_the_drain_on_an_idle_connection_is_answered() -> None:
    """Only an answer tells the API server to close. It does not retry a POST on a closed connection."""
    async with listening(App()) as listener, connected(listener, H1()) as streams:
        await ask(streams, request("/echo", b"hello"))
        stopping = asyncio.create_task(listener.stop(10))
        await asyncio.sleep(0.7)
        status, headers, body = await ask(streams, request("/echo", b"late"))
        assert (status, headers["connection"], body) == (200, "close", b"late")
        assert await stopping == 0


@on_both_loops
async def test_http2_peer_that_sends_requests_during_the_drain_gets_goaway_and_answers() -> None:
    app = App()
    async with listening(app) as listener, connected(listener, H2()) as (reader, writer):
        peer = RawH2()
        writer.write(peer.request("GET", "/slow"))
        await app.started.acquire()
        stopping = asyncio.create_task(listener.stop(10))
        await asyncio.sleep(0.2)
        writer.write(peer.request("GET", "/slow") + peer.request("GET", "/slow"))
        for _ in range(2):
            await app.started.acquire()
        app.gate.set()
        frames = await all_frames(reader)
        assert [frame.last_stream_id for frame in frames if isinstance(frame, GoAwayFrame)] == [2**31 - 1, 5]
        assert {frame.stream_id for frame in frames if isinstance(frame, HeadersFrame)} == {1, 3, 5}
        assert {frame.stream_id for frame in frames if "END_STREAM" in frame.flags} == {1, 3, 5}
        assert await stopping == 0


@on_both_loops
async def test_idle_connections_do_not_delay_the_drain() -> None:
    """One of them reads nothing and does not answer close_notify."""
    async with (
        listening(App()) as listener,
        connected(listener, H1()) as h1,
        connected(listener, H1()),
        H2Client(HOST, listener.port, H2()) as client,
    ):
        await ask(h1, request("/echo", b""))
        await client.post("/echo", b"")
        with silent_peer(listener.port) as peer:
            await asyncio.to_thread(peer.do_handshake)
            await wait_until(lambda: listener.connections == 4)
            assert await seconds(listener.stop(20)) < 6


@on_both_loops
async def test_connection_is_idle_after_the_client_reset_its_last_stream() -> None:
    app = App()
    async with listening(app) as listener, H2Client(HOST, listener.port, H2()) as client:
        requests = asyncio.create_task(client.get("/slow"))
        await app.started.acquire()
        await client.give_up()
        with pytest.raises(LostError):
            await requests
        app.gate.set()
        assert await seconds(listener.stop(20)) < 2


@on_both_loops
async def test_peer_that_disconnects_before_its_answer_leaves_no_connection() -> None:
    app = App()
    budgets = Budgets()
    async with listening(app, budgets=budgets) as listener:
        for protocol, content in ((H1(), request("/slow")), (H2(), request_without_body())):
            async with connected(listener, protocol) as (_, writer):
                writer.write(content)
                await app.started.acquire()
                writer.transport.abort()
        app.gate.set()
        await wait_until(lambda: not budgets.connections and not listener.connections)


@on_both_loops
async def test_http2_peer_that_grants_no_window_is_evicted() -> None:
    windowless = H2Connection(H2Configuration(client_side=True))
    windowless.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0})
    windowless.initiate_connection()
    headers = {":method": "GET", ":path": "/big/10", ":scheme": "https", ":authority": HOST}
    windowless.send_headers(1, list(headers.items()), end_stream=True)
    budgets = Budgets(RequestLimits(connections=1))
    async with listening(App(), budgets=budgets) as listener, connected(listener, H2()) as (reader, writer):
        writer.write(windowless.data_to_send())
        await wait_until(lambda: any(one.waiting_since is not None and not one.is_idle for one in budgets.connections))
        async with connected(listener, H1()) as streams:
            assert (await ask(streams, request("/echo", b"here")))[2] == b"here"
        await wait_closed(reader)


def request_without_body() -> bytes:
    """Headers that declare a body, which is never sent."""
    connection = H2Connection(H2Configuration(client_side=True))
    connection.initiate_connection()
    headers = {":method": "POST", ":path": "/patient", ":scheme": "https", ":authority": HOST, "content-length": "10"}
    connection.send_headers(1, list(headers.items()))
    return connection.data_to_send()


@on_both_loops
async def test_accepted_connection_without_a_request_is_evicted() -> None:
    """All connections of one loop iteration are accepted before any is read."""
    limits = RequestLimits(connections=4)
    async with listening(App(), tls=False, budgets=Budgets(limits)) as listener, AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(connected(listener)) for _ in range(12)))
        streams = await stack.enter_async_context(connected(listener))
        assert (await ask(streams, request("/echo", b"still here")))[0] == 200


@on_both_loops
async def test_running_requests_are_aborted_after_the_grace_period() -> None:
    app = App()
    async with (
        listening(app) as listener,
        connected(listener, H1()) as streams,
        H2Client(HOST, listener.port, H2()) as client,
    ):
        requests = [asyncio.create_task(ask(streams, request("/slow"))), asyncio.create_task(client.get("/slow"))]
        for _ in requests:
            await app.started.acquire()
        assert await listener.stop(0.2) == 2
        assert [type(one) for one in await asyncio.gather(*requests, return_exceptions=True)] != [tuple, Answer]
        assert app.outcomes == []


@on_both_loops
async def test_handshake_that_completes_after_the_drain_is_closed() -> None:
    async with listening(App()) as listener:
        with silent_peer(listener.port) as peer:
            async with connected(listener, H1()) as streams:  # accepted after it
                await ask(streams, request("/echo", b""))
            assert await seconds(listener.stop(20)) < 2
            with suppress(OSError):
                await asyncio.to_thread(peer.do_handshake)
                assert await asyncio.to_thread(peer.recv, 1) == b""
            assert listener.connections == 0
