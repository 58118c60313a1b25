"""One peer of a listener: Hypercorn's protocol code, with our deadlines, bodies and drain.

`docs/decisions/0002-own-listener-on-hypercorn.md` says what is Hypercorn's here and what is ours.
"""

import asyncio
import logging
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import h11
import structlog
from attrs import frozen
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import ASGIHTTPState, HTTPStream
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendEvent,
    ConnectionState,
    HTTPResponseStartEvent,
    Scope,
)
from hyperframe.frame import GoAwayFrame

from webhook.core.errors import GpuwardenError
from webhook.runtime.tls.certificate_source import CLIENT_CERTIFICATE

log = structlog.get_logger(__name__)

READ_SIZE = 2**16
WRITE_BEHIND = 2**16  # bytes a peer may leave unread before we wait for it; asyncio's own high-water mark
OVERLOADED = 503
BODY_BEHIND = 2**17  # bytes of one body that may wait for the app; more would only cost memory
BODY_LEFT = 2**26  # bytes of a body nobody wants that are read for the answer's sake: above any honest upload
FREE_PIECES = 4096  # pieces of one body that may be of any size: a body that is typed by hand has fewer
SMALLEST_PIECES = 64  # bytes on average from then on; each piece costs as much work as a kilobyte
ANY_STREAM = 2**31 - 1  # as last stream of a GOAWAY: open no more, all you have opened are answered (RFC 9113, 6.8)


@frozen
class Deadlines:
    """How long a peer may take, in seconds."""

    handshake: float = 10
    headers: float = 10  # from a request's first byte; HTTP/1.1 only, an HTTP/2 peer that drips is idle
    body: float = 30  # from the request's headers; the API server never waits longer than this for an answer
    write: float = 30  # to take more of an answer
    # The API server keeps idle connections for 90 s and does not repeat a POST on one that we close first. Hence
    # also no deadline for a first byte: Go's client dials connections that it uses only later.
    keep_alive: float = 120
    # HTTP/1.1: for the rest of a body that nobody reads, while it keeps coming (without a pause of `rest_pause`). Then
    # the answer goes out all the same, and the connection is closed.
    rest: float = 2
    rest_pause: float = 0.25
    close: float = 1  # to answer a TLS close_notify; asyncio's own limit is 30 s
    linger: float = 0.1  # in a drain, for a request that is on its way on an idle connection
    # HTTP/1.1 has no GOAWAY, and the API server's POST is lost if it crosses our closing. A connection in use sees a
    # request within this, whose answer asks the peer to close; one that sees none is not in use.
    linger_http1: float = 3


DEADLINES = Deadlines()


class HypercornSettings(Config):
    """Hypercorn's configuration as we want it."""

    is_draining = False

    def __init__(self) -> None:
        self.errorlog = logging.getLogger("hypercorn.error")  # no handler of its own: where logs go is not its choice
        self.include_server_header = False
        self.h2_max_concurrent_streams = 256  # Go's own server default is 250
        self.h11_max_incomplete_size = self.h2_max_header_list_size = 2**16  # tokens are long, and nothing else is
        self.keep_alive_max_requests = sys.maxsize  # the default of 1,000 ends in a GOAWAY that loses requests

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        headers = super().response_headers(protocol)
        if self.is_draining and protocol == "h11":
            headers.append((b"connection", b"close"))
        return headers


class TinyPiecesError(GpuwardenError):
    """A peer sends its body in pieces so small that reading them keeps others waiting. It loses its connection."""


class _Body:
    """What has come of one request and the app has not taken yet.

    Bounded, so that an app that is slow to read slows its peer, but never in the way of an app that has ended:
    Hypercorn's own queue blocks the whole connection then.
    """

    def __init__(self, *, until: float, is_complete: bool) -> None:
        self._pieces = self._size = 0
        self._messages: asyncio.Queue[ASGIReceiveEvent] = asyncio.Queue()
        self._behind = 0
        self._room = asyncio.Event()
        self._until = until
        self.is_complete = is_complete  # or will never be: the peer has gone, or was too slow
        self.is_whole = self.is_lost = False
        self.is_given_up = False  # by us: the peer may still send

    async def put(self, message: ASGIReceiveEvent) -> None:
        self._messages.put_nowait(message)
        if message["type"] == "http.request":
            self._count(len(message["body"]))
            self._behind += len(message["body"])
            self.is_whole = self.is_whole or not message["more_body"]
            self.is_complete = self.is_complete or self.is_whole
        elif message["type"] == "http.disconnect":
            self.is_complete = self.is_lost = True
        while self._behind > BODY_BEHIND and not self.is_complete:
            self._room.clear()
            await self._room.wait()

    def _count(self, size: int) -> None:
        self._pieces += 1
        self._size += size
        if self._pieces > FREE_PIECES and self._size < self._pieces * SMALLEST_PIECES:
            raise TinyPiecesError(f"a body in {self._pieces} pieces of {self._size} bytes together")

    async def get(self) -> ASGIReceiveEvent:
        """The next message. A body that is not all there in time counts as a peer that has gone."""
        if self.is_complete or not self._messages.empty():
            message = await self._messages.get()
        else:
            try:
                async with asyncio.timeout_at(self._until):
                    message = await self._messages.get()
            except TimeoutError:
                self.is_complete = self.is_lost = self.is_given_up = True
                message = {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self._behind -= len(message["body"])
        self._room.set()
        return message

    async def discard_promptly(self, deadlines: Deadlines) -> None:
        """Read what is left as long as it keeps coming, for a short time in all."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadlines.rest):
                while not (self.is_complete and self._messages.empty()):
                    async with asyncio.timeout(deadlines.rest_pause):
                        await self.get()

    async def discard(self) -> None:
        """Read what is left. Most clients look at the answer only when they have sent their body; to cut them short
        would cost them the answer, and a peer on HTTP/2 its other requests."""
        left = BODY_LEFT
        while left > 0 and not (self.is_complete and self._messages.empty()):
            message = await self.get()
            left -= len(message["body"]) if message["type"] == "http.request" else 0

    def close(self) -> None:
        """Nobody will read any more: nobody shall wait for that."""
        self.is_given_up = self.is_given_up or not self.is_complete
        self.is_complete = True
        self._room.set()


Send = Callable[[ASGISendEvent | None], Awaitable[None]]
Put = Callable[[ASGIReceiveEvent], Awaitable[None]]


class _Requests(TaskGroup):
    """The requests of one connection. The app cannot hurt the connection, nor one request another."""

    def __init__(self, connection: "Connection", deadlines: Deadlines) -> None:
        super().__init__(asyncio.get_running_loop())
        self._connection = connection
        self._deadlines = deadlines

    async def spawn_app(self, app: AppWrapper, config: Config, scope: Scope, send: Send) -> Put:
        body = _Body(until=self._loop.time() + self._deadlines.body, is_complete=scope["type"] != "http")
        self._connection.begin_request(body)
        if self._connection.has_certificate:
            scope[CLIENT_CERTIFICATE] = True  # type: ignore[literal-required]  # ours, for the gate
        self.spawn(self._answer, app, scope, body, send)

        async def put(message: ASGIReceiveEvent) -> None:
            await body.put(message)
            if body.is_complete:
                self._connection.end_body(body)

        return put

    async def _answer(self, app: AppWrapper, scope: Scope, body: _Body, send: Send) -> None:
        try:
            await self._run(app, scope, body, send)
            if not body.is_given_up:
                await body.discard()
            await send(None)  # Hypercorn answers 500 if the app has not answered
            body.close()
            self._connection.end_answer(body)
            await self._connection.end_stream(send, is_given_up=body.is_given_up)
        finally:
            body.close()
            self._connection.end_request(body)

    async def _run(self, app: AppWrapper, scope: Scope, body: _Body, send: Send) -> None:
        is_http1 = scope["type"] == "http" and scope["http_version"] != "2"
        held: list[HTTPResponseStartEvent] = []

        async def send_after_body(message: ASGISendEvent) -> None:
            """Hold the beginning of an answer until more of it shows whether that is all: curl and Go stop sending
            when they see a status from 300 on, in a way that Hypercorn's HTTP/2 takes for a broken connection. On
            HTTP/1.1 the answer is not held for a body that is late: the connection is closed behind it."""
            if message["type"] == "http.response.start":
                held.append(message)
                return
            if held and held[0]["status"] == OVERLOADED and not body.is_complete:
                body.close()  # what has come of it is too much already
                self._connection.read_no_more()
                held[0]["headers"] = [*held[0]["headers"], *([(b"connection", b"close")] if is_http1 else [])]
            elif is_http1 and held:
                await body.discard_promptly(self._deadlines)
                if not body.is_complete:
                    held[0]["headers"] = [*held[0]["headers"], (b"connection", b"close")]
                    body.close()
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                await body.discard()
            while held:
                await send(held.pop())
            with self._connection.sending(body):
                await send(message)

        try:
            await app(scope, body.get, send_after_body, _no_threads, _no_threads)
        except Exception as error:  # noqa: BLE001 - the fence behind the app's own
            tell = log.info if body.is_lost else log.error
            tell("app failed", path=scope.get("path"), exc_info=error)


def _no_threads(*_: object) -> None:
    """What Hypercorn offers to WSGI apps; ours is none."""
    raise NotImplementedError


class Connection:
    """One peer: bytes in, bytes out, and the one timer that says when it has been quiet or slow for too long.

    It counts its own requests: Hypercorn's word for idle is not given when a client has reset its last stream.
    """

    def __init__(
        self,
        app: AppWrapper,
        settings: HypercornSettings,
        deadlines: Deadlines,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._app, self._settings, self._deadlines = app, settings, deadlines
        self._reader, self._writer = reader, writer
        self._tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        self._loop = asyncio.get_running_loop()
        self._protocol: ProtocolWrapper
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = bytearray()
        # Of the client CA: another would have ended the handshake.
        self.has_certificate = self._tls is not None and self._tls.getpeercert(binary_form=True) is not None
        self._running = 0
        self._owed: dict[_Body, float] = {}  # since when, in the order of their beginning
        self._untaken: dict[_Body, float] = {}  # answers that the peer has not taken yet
        self._has_completed_request = self._reads_no_more = False
        self.began = self._idle_since = self._loop.time()
        self._is_reading_headers = False
        self._is_closing = False
        self._is_parting = False
        self._is_closed_to_new_streams = False

    async def run(self) -> None:
        try:
            async with _Requests(self, self._deadlines) as requests:
                self._protocol = self._speak(requests)
                self._has_begun = True
                await self._protocol.initiate()
                self._wait(self._linger if self._settings.is_draining else self._deadlines.keep_alive)
                await self._read()
        except Exception as error:  # noqa: BLE001 - the fence: some malformed HTTP/2 trips Hypercorn itself
            log.warning("connection failed", peer=self._address("peername"), error=repr(error))
        except asyncio.CancelledError:
            self._writer.transport.abort()
            raise
        finally:
            await self._finish()

    def drain(self) -> None:
        """Close when all requests are answered; a quiet peer gets a moment for one that is on its way."""
        if self._timer is not None and not self._is_closing:
            self._wait(self._linger)

    @property
    def is_idle(self) -> bool:
        return not (self._running or self._is_closing or self._is_parting)

    @property
    def has_completed_request(self) -> bool:
        return self._has_completed_request

    @property
    def waiting_since(self) -> float | None:
        if not self._has_begun or self._is_closing or self._is_parting:
            return None
        since = min((next(iter(one.values())) for one in (self._owed, self._untaken) if one), default=None)
        if self._running and since is None:
            return None
        if not self._has_completed_request:  # what it sends bit by bit makes it no younger
            return self.began
        return since if self._running else self._idle_since

    def evict(self) -> None:
        if self._running:
            self._writer.transport.abort()
        else:
            self._hang_up()

    def read_no_more(self) -> None:
        """HTTP/1.1: what is left of the body stays with the peer, until the connection is closed."""
        self._reads_no_more = True

    @property
    def _linger(self) -> float:
        is_reviewer = self._tls is not None and self._tls.selected_alpn_protocol() != "h2"
        return self._deadlines.linger_http1 if is_reviewer else self._deadlines.linger

    def begin_request(self, body: _Body) -> None:
        self._running += 1
        if not body.is_complete:
            self._owed[body] = self._loop.time()
        self._is_reading_headers = False
        self._stop_timer()
        if self._settings.is_draining:
            self._close_to_new_streams()

    def end_body(self, body: _Body) -> None:
        self._owed.pop(body, None)

    @contextmanager
    def sending(self, body: _Body) -> Iterator[None]:
        """Over HTTP/2 a part of an answer is sent when the peer has granted a window for it."""
        self._untaken[body] = self._loop.time()
        try:
            yield
        finally:
            del self._untaken[body]

    def end_answer(self, body: _Body) -> None:
        """The peer has sent a whole request and taken its answer."""
        self._has_completed_request = self._has_completed_request or body.is_whole

    def end_request(self, body: _Body) -> None:
        self._running -= 1
        self._owed.pop(body, None)
        self._idle_since = self._loop.time()
        if self._running or self._is_closing or self._is_parting:
            return
        if self._settings.is_draining:
            self._hang_up()
        else:
            self._wait(self._deadlines.keep_alive)

    async def end_stream(self, send: Send, *, is_given_up: bool) -> None:
        """Reset an HTTP/2 stream that ends before its time: its peer would wait for the rest of an answer for ever,
        or send the rest of a body, which Hypercorn cannot place and takes the whole connection down for."""
        stream, protocol = getattr(send, "__self__", None), self._protocol.protocol
        if not (isinstance(stream, HTTPStream) and isinstance(protocol, H2Protocol)):
            return  # on HTTP/1.1 it closes the connection by itself
        is_answered = stream.state is ASGIHTTPState.CLOSED
        if is_answered and not is_given_up:
            return
        with suppress(ProtocolError):  # the peer has reset it itself
            code = ErrorCodes.NO_ERROR if is_answered else ErrorCodes.INTERNAL_ERROR
            protocol.connection.reset_stream(stream.stream_id, code)
            self._write(protocol.connection.data_to_send())
        if stream.stream_id in protocol.stream_buffers:
            protocol.priority.unblock(stream.stream_id)
            await protocol.has_data.set()  # the sending task finds it closed and forgets it

    def _speak(self, requests: TaskGroup) -> ProtocolWrapper:
        return ProtocolWrapper(
            self._app,
            self._settings,
            WorkerContext(max_requests=None),  # we never tell it that we drain: it would refuse requests
            requests,
            ConnectionState({}),
            self._tls is not None,
            self._address("peername"),
            self._address("sockname"),
            self._send,
            "http/1.1" if self._tls is None else self._tls.selected_alpn_protocol(),
        )

    def _address(self, which: str) -> tuple[str, int] | None:
        address = self._writer.get_extra_info(which)
        return (address[0], address[1]) if address else None

    async def _read(self) -> None:
        with suppress(OSError):  # the peer has gone; its requests run on, they may have written something
            while not self._reader.at_eof():
                data = await self._reader.read(READ_SIZE)
                if not (self._is_closing or self._is_parting):
                    await self._protocol.handle(RawData(data))
                    self._watch_headers()
        await self._protocol.handle(Closed())
        if isinstance(self._protocol.protocol, H2Protocol):
            # An answer that comes from now on would wait for ever for Hypercorn's sending task, which has ended.
            for buffer in self._protocol.protocol.stream_buffers.values():
                await buffer.close()

    def _watch_headers(self) -> None:
        if self._running or self._is_reading_headers or self._is_closing or self._settings.is_draining:
            return
        protocol = self._protocol.protocol
        if isinstance(protocol, H11Protocol) and protocol.connection.trailing_data[0]:
            self._is_reading_headers = True
            self._wait(self._deadlines.headers)

    async def _send(self, event: Event) -> None:
        """What the protocol wants done. It also says when it is idle; we know better."""
        if isinstance(event, Closed):
            self._part()
        elif isinstance(event, RawData) and self._write(event.data) > WRITE_BEHIND:
            await self._catch_up()

    def _write(self, data: bytes) -> int:
        """How much is on its way out. An answer comes in three or four pieces, on HTTP/2 many answers at once:
        what one turn of the loop brings together goes out together, as one TLS record if it is small."""
        if self._writer.is_closing():
            return 0  # the peer has gone, or is to go
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox += data
        behind: int = self._writer.transport.get_write_buffer_size()
        return len(self._outbox) + behind

    def _flush(self) -> None:
        if self._outbox and not self._writer.is_closing():
            self._writer.write(self._outbox)
        self._outbox = bytearray()  # a new one: the transport may keep the old

    async def _catch_up(self) -> None:
        self._flush()
        try:
            async with asyncio.timeout(self._deadlines.write):
                await self._writer.drain()
        except OSError:  # a TimeoutError too
            self._writer.transport.abort()

    def _wait(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._hang_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self, patience: int = 50) -> None:
        """Close a connection without requests. An HTTP/2 peer learns which was the last one that we have seen."""
        protocol = self._protocol.protocol
        if isinstance(protocol, H2Protocol):
            if protocol.stream_buffers and patience:
                # The end of an answer is still with Hypercorn's sending task, which would find the connection closed.
                # It waits for a slow peer; we look ever more rarely, 13 s in all.
                self._stop_timer()
                self._timer = self._loop.call_later((51 - patience) / 100, self._hang_up, patience - 1)
                return
            protocol.connection.close_connection()
            self._write(protocol.connection.data_to_send())
        self._close()

    def _close_to_new_streams(self) -> None:
        """In a drain, tell an HTTP/2 peer that goes on to take its next requests elsewhere; all it sent are answered.

        Not before it goes on: clients built on Python's h2 drop what they wait for when they hear this.
        """
        if isinstance(self._protocol.protocol, H2Protocol) and not self._is_closed_to_new_streams:
            self._is_closed_to_new_streams = True
            self._write(GoAwayFrame(0, last_stream_id=ANY_STREAM).serialize())

    def _part(self) -> None:
        """Close; but read on for a moment where a peer still sends a body: a reset would cost it the answer."""
        protocol = self._protocol.protocol
        if not (isinstance(protocol, H11Protocol) and protocol.connection.their_state is h11.SEND_BODY):
            self._close()
        elif not self._is_parting:
            self._is_parting = True
            self._flush()
            if self._reads_no_more:
                self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can
            if self._tls is None:
                self._writer.write_eof()  # in TLS the peer knows by `connection: close`
            self._stop_timer()
            end = self._writer.transport.abort if self._reads_no_more else self._close
            self._timer = self._loop.call_later(self._deadlines.close, end)

    def _close(self) -> None:
        """Close without waiting for it; a peer that neither reads nor answers is cut off in the end."""
        if self._is_closing:
            return
        self._is_closing = True
        self._stop_timer()
        self._flush()
        self._writer.close()
        patience = self._deadlines.write if self._tls is None else self._deadlines.close
        self._timer = self._loop.call_later(patience, self._writer.transport.abort)

    async def _finish(self) -> None:
        self._close()
        with suppress(OSError):
            await self._writer.wait_closed()
        self._stop_timer()
