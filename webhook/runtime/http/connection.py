"""One connection of a listener: Hypercorn's protocol code with our own deadlines, request bodies and drain.

`docs/decisions/0002-own-listener-on-hypercorn.md` explains which parts are Hypercorn's.
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
# Bytes that the peer has not read yet; above this a write waits. This is asyncio's own high-water mark.
MAX_WRITE_BUFFER = 2**16
OVERLOADED = 503
# Bytes of one body that are buffered for the app; more would only use memory.
MAX_BUFFERED_BODY = 2**17
# Bytes that are read and dropped so that the peer receives its answer: above any legitimate upload.
MAX_DISCARDED_BODY = 2**26
# Chunks of one body that may have any size: a body that is typed by hand has fewer. If there are more, they must have
# this average size in bytes: each chunk costs as much CPU as a kilobyte.
MAX_SMALL_CHUNKS = 4096
MIN_CHUNK_SIZE = 64
# The last stream in a GOAWAY: no new streams, but all open ones are answered (RFC 9113, 6.8).
ALL_STREAMS = 2**31 - 1


@frozen
class Deadlines:
    """How long a peer may take, in seconds per step."""

    handshake: float = 10
    headers: float = 10  # from the first byte of a request; HTTP/1.1 only: over HTTP/2 incomplete headers count as idle
    body: float = 30  # from the end of the headers; the API server never waits longer than this for an answer
    write: float = 30  # to read more of an answer
    # The API server keeps idle connections for 90 s and does not retry a POST on a connection that the server closes
    # first. There is no deadline for the first byte either: Go's client opens connections that it uses only later.
    keep_alive: float = 120
    # HTTP/1.1: how long the unread rest of a body is discarded while it arrives without a pause of `discard_pause`.
    # Then the answer is sent and the connection is closed.
    discard: float = 2
    discard_pause: float = 0.25
    close: float = 1  # to answer a TLS close_notify; asyncio's own limit is 30 s
    linger: float = 0.1  # in a drain: how long an idle connection waits for a request that is on its way
    # HTTP/1.1 has no GOAWAY, and the API server's POST is lost if the connection is closed at the same time. A
    # connection in use gets a request within this time, and the answer asks the peer to close. Without a request the
    # connection is not in use.
    linger_http1: float = 3


DEADLINES = Deadlines()


class HypercornSettings(Config):
    """The configuration of Hypercorn."""

    is_draining = False

    def __init__(self) -> None:
        self.errorlog = logging.getLogger("hypercorn.error")  # without Hypercorn's own handler
        self.include_server_header = False
        self.h2_max_concurrent_streams = 256  # Go's own server default is 250
        self.h11_max_incomplete_size = self.h2_max_header_list_size = 2**16  # tokens are long
        self.keep_alive_max_requests = sys.maxsize  # the default of 1,000 ends in a GOAWAY that loses requests

    def response_headers(self, protocol: str) -> list[tuple[bytes, bytes]]:
        headers = super().response_headers(protocol)
        if self.is_draining and protocol == "h11":
            headers.append((b"connection", b"close"))
        return headers


class TinyChunksError(GpuwardenError):
    """A body arrives in chunks so small that reading them delays other requests. The connection is closed."""


class _Body:
    """The part of one request body that the app has not read yet.

    The buffer is bounded, so a slow app slows its peer. It does not block after the app has ended: Hypercorn's own
    queue would then block the whole connection.
    """

    def __init__(self, *, deadline: float, is_complete: bool) -> None:
        self._chunks = self._size = 0
        self._messages: asyncio.Queue[ASGIReceiveEvent] = asyncio.Queue()
        self._buffered = 0
        self._room = asyncio.Event()
        self._deadline = deadline
        self.is_complete = is_complete  # no more will arrive; also if the peer has gone or was too slow
        self.is_fully_received = self.is_disconnected = False
        self.is_abandoned = False  # the app reads no more; the peer may still send

    async def put(self, message: ASGIReceiveEvent) -> None:
        self._messages.put_nowait(message)
        if message["type"] == "http.request":
            self._count(len(message["body"]))
            self._buffered += len(message["body"])
            self.is_fully_received = self.is_fully_received or not message["more_body"]
            self.is_complete = self.is_complete or self.is_fully_received
        elif message["type"] == "http.disconnect":
            self.is_complete = self.is_disconnected = True
        while self._buffered > MAX_BUFFERED_BODY and not self.is_complete:
            self._room.clear()
            await self._room.wait()

    def _count(self, size: int) -> None:
        self._chunks += 1
        self._size += size
        if self._chunks > MAX_SMALL_CHUNKS and self._size < self._chunks * MIN_CHUNK_SIZE:
            raise TinyChunksError(f"a body of {self._size} bytes in {self._chunks} chunks")

    async def get(self) -> ASGIReceiveEvent:
        """The next message. After the deadline an incomplete body counts as a disconnect."""
        if self.is_complete or not self._messages.empty():
            message = await self._messages.get()
        else:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._messages.get()
            except TimeoutError:
                self.is_complete = self.is_disconnected = self.is_abandoned = True
                message = {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self._buffered -= len(message["body"])
        self._room.set()
        return message

    async def discard_briefly(self, deadlines: Deadlines) -> None:
        """Discard the rest of the body while it keeps arriving, for a short time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadlines.discard):
                while not (self.is_complete and self._messages.empty()):
                    async with asyncio.timeout(deadlines.discard_pause):
                        await self.get()

    async def discard(self) -> None:
        """Discard the rest of the body. Most clients read the answer only after they have sent their body. If the
        server closed earlier, they would lose the answer, and an HTTP/2 peer its other requests."""
        remaining = MAX_DISCARDED_BODY
        while remaining > 0 and not (self.is_complete and self._messages.empty()):
            message = await self.get()
            remaining -= len(message["body"]) if message["type"] == "http.request" else 0

    def close(self) -> None:
        """The app reads no more. Unblocks `put`."""
        self.is_abandoned = self.is_abandoned or not self.is_complete
        self.is_complete = True
        self._room.set()


Send = Callable[[ASGISendEvent | None], Awaitable[None]]
Put = Callable[[ASGIReceiveEvent], Awaitable[None]]


class _Requests(TaskGroup):
    """The requests of one connection. An error of the app affects neither the connection nor other requests."""

    def __init__(self, connection: "Connection", deadlines: Deadlines) -> None:
        super().__init__(asyncio.get_running_loop())
        self._connection = connection
        self._deadlines = deadlines

    async def spawn_app(self, app: AppWrapper, config: Config, scope: Scope, send: Send) -> Put:
        body = _Body(deadline=self._loop.time() + self._deadlines.body, is_complete=scope["type"] != "http")
        self._connection.begin_request(body)
        if self._connection.has_certificate:
            scope[CLIENT_CERTIFICATE] = True  # type: ignore[literal-required]  # our own key, read by the caller gate
        self.spawn(self._answer, app, scope, body, send)

        async def put(message: ASGIReceiveEvent) -> None:
            await body.put(message)
            if body.is_complete:
                self._connection.end_body(body)

        return put

    async def _answer(self, app: AppWrapper, scope: Scope, body: _Body, send: Send) -> None:
        try:
            await self._run(app, scope, body, send)
            if not body.is_abandoned:
                await body.discard()
            await send(None)  # Hypercorn answers 500 if the app has not answered
            body.close()
            self._connection.end_answer(body)
            await self._connection.end_stream(send, is_abandoned=body.is_abandoned)
        finally:
            body.close()
            self._connection.end_request(body)

    async def _run(self, app: AppWrapper, scope: Scope, body: _Body, send: Send) -> None:
        is_http1 = scope["type"] == "http" and scope["http_version"] != "2"
        start: list[HTTPResponseStartEvent] = []

        async def send_after_body(message: ASGISendEvent) -> None:
            """Send the answer after the request body has been read: curl and Go stop sending when they see a status of
            300 or more, and Hypercorn's HTTP/2 treats that as a broken connection. The start of the answer waits until
            the next message shows whether the answer is complete. On HTTP/1.1 the answer does not wait for a slow body:
            the connection is closed after the answer."""
            if message["type"] == "http.response.start":
                start.append(message)
                return
            if start and start[0]["status"] == OVERLOADED and not body.is_complete:
                body.close()  # do not read the rest: the server is overloaded
                self._connection.stop_reading()
                start[0]["headers"] = [*start[0]["headers"], *([(b"connection", b"close")] if is_http1 else [])]
            elif is_http1 and start:
                await body.discard_briefly(self._deadlines)
                if not body.is_complete:
                    start[0]["headers"] = [*start[0]["headers"], (b"connection", b"close")]
                    body.close()
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                await body.discard()
            while start:
                await send(start.pop())
            with self._connection.sending(body):
                await send(message)

        try:
            await app(scope, body.get, send_after_body, _no_threads, _no_threads)
        except Exception as error:  # noqa: BLE001 - catches what the app's own handler does not
            report = log.info if body.is_disconnected else log.error
            report("app failed", path=scope.get("path"), exc_info=error)


def _no_threads(*_: object) -> None:
    """Hypercorn's hook for WSGI apps, which are not supported."""
    raise NotImplementedError


class Connection:
    """One connection: reads and writes bytes, and has one timer that closes an idle or slow connection.

    It counts its requests itself: Hypercorn does not report that a connection is idle when the client has reset its
    last stream.
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
        # The client CA has signed it: otherwise the handshake would have failed.
        self.has_certificate = self._tls is not None and self._tls.getpeercert(binary_form=True) is not None
        self._running = 0
        self._incomplete: dict[_Body, float] = {}  # request bodies and when they began, oldest first
        self._unsent: dict[_Body, float] = {}  # answers that the peer has not read yet, and since when
        self._has_completed_request = self._has_stopped_reading = False
        self.began = self._idle_since = self._loop.time()
        self._is_reading_headers = False
        self._is_closing = False
        self._is_discarding = False
        self._is_closed_to_new_streams = False

    async def run(self) -> None:
        try:
            async with _Requests(self, self._deadlines) as requests:
                self._protocol = self._create_protocol(requests)
                self._has_begun = True
                await self._protocol.initiate()
                self._close_after(self._linger if self._settings.is_draining else self._deadlines.keep_alive)
                await self._read()
        except Exception as error:  # noqa: BLE001 - some malformed HTTP/2 raises errors in Hypercorn itself
            log.warning("connection failed", peer=self._address("peername"), error=repr(error))
        except asyncio.CancelledError:
            self._writer.transport.abort()
            raise
        finally:
            await self._finish()

    def drain(self) -> None:
        """Close when all requests are answered. An idle connection stays open for `linger` seconds, for a request that
        is on its way."""
        if self._timer is not None and not self._is_closing:
            self._close_after(self._linger)

    @property
    def is_idle(self) -> bool:
        return not (self._running or self._is_closing or self._is_discarding)

    @property
    def has_completed_request(self) -> bool:
        return self._has_completed_request

    @property
    def waiting_since(self) -> float | None:
        if not self._has_begun or self._is_closing or self._is_discarding:
            return None
        since = min((next(iter(one.values())) for one in (self._incomplete, self._unsent) if one), default=None)
        if self._running and since is None:
            return None
        if not self._has_completed_request:  # sending slowly does not reset the time
            return self.began
        return since if self._running else self._idle_since

    def evict(self) -> None:
        if self._running:
            self._writer.transport.abort()
        else:
            self._close_idle()

    def stop_reading(self) -> None:
        """HTTP/1.1: do not read the rest of the body before the connection is closed."""
        self._has_stopped_reading = True

    @property
    def _linger(self) -> float:
        is_reviewer = self._tls is not None and self._tls.selected_alpn_protocol() != "h2"
        return self._deadlines.linger_http1 if is_reviewer else self._deadlines.linger

    def begin_request(self, body: _Body) -> None:
        self._running += 1
        if not body.is_complete:
            self._incomplete[body] = self._loop.time()
        self._is_reading_headers = False
        self._stop_timer()
        if self._settings.is_draining:
            self._close_to_new_streams()

    def end_body(self, body: _Body) -> None:
        self._incomplete.pop(body, None)

    @contextmanager
    def sending(self, body: _Body) -> Iterator[None]:
        """Mark the answer as unsent. Over HTTP/2 sending waits until the peer grants a window."""
        self._unsent[body] = self._loop.time()
        try:
            yield
        finally:
            del self._unsent[body]

    def end_answer(self, body: _Body) -> None:
        """The answer is sent. If the whole request was received, the connection has completed a request."""
        self._has_completed_request = self._has_completed_request or body.is_fully_received

    def end_request(self, body: _Body) -> None:
        self._running -= 1
        self._incomplete.pop(body, None)
        self._idle_since = self._loop.time()
        if self._running or self._is_closing or self._is_discarding:
            return
        if self._settings.is_draining:
            self._close_idle()
        else:
            self._close_after(self._deadlines.keep_alive)

    async def end_stream(self, send: Send, *, is_abandoned: bool) -> None:
        """Reset an HTTP/2 stream that ends early. Otherwise the peer would wait forever for the rest of the answer, or
        send the rest of the body, for which Hypercorn would close the whole connection."""
        stream, protocol = getattr(send, "__self__", None), self._protocol.protocol
        if not (isinstance(stream, HTTPStream) and isinstance(protocol, H2Protocol)):
            return  # on HTTP/1.1 Hypercorn closes the connection
        is_answered = stream.state is ASGIHTTPState.CLOSED
        if is_answered and not is_abandoned:
            return
        with suppress(ProtocolError):  # the peer has reset the stream
            code = ErrorCodes.NO_ERROR if is_answered else ErrorCodes.INTERNAL_ERROR
            protocol.connection.reset_stream(stream.stream_id, code)
            self._write(protocol.connection.data_to_send())
        if stream.stream_id in protocol.stream_buffers:
            protocol.priority.unblock(stream.stream_id)
            await protocol.has_data.set()  # so that the sending task removes the closed stream

    def _create_protocol(self, requests: TaskGroup) -> ProtocolWrapper:
        return ProtocolWrapper(
            self._app,
            self._settings,
            WorkerContext(max_requests=None),  # no limit: Hypercorn does not know of the drain
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
        with suppress(OSError):  # the peer has gone; its requests continue, because they may have written something
            while not self._reader.at_eof():
                data = await self._reader.read(READ_SIZE)
                if not (self._is_closing or self._is_discarding):
                    await self._protocol.handle(RawData(data))
                    self._watch_headers()
        await self._protocol.handle(Closed())
        if isinstance(self._protocol.protocol, H2Protocol):
            # Hypercorn's sending task has ended: a later answer would wait for it forever.
            for buffer in self._protocol.protocol.stream_buffers.values():
                await buffer.close()

    def _watch_headers(self) -> None:
        if self._running or self._is_reading_headers or self._is_closing or self._settings.is_draining:
            return
        protocol = self._protocol.protocol
        if isinstance(protocol, H11Protocol) and protocol.connection.trailing_data[0]:
            self._is_reading_headers = True
            self._close_after(self._deadlines.headers)

    async def _send(self, event: Event) -> None:
        """Handle an event of the protocol. Its idle events are ignored: this class counts requests itself."""
        if isinstance(event, Closed):
            self._close_after_body()
        elif isinstance(event, RawData) and self._write(event.data) > MAX_WRITE_BUFFER:
            await self._drain_writes()

    def _write(self, data: bytes) -> int:
        """Queue the data and return the number of bytes that are not sent yet. All data of one iteration of the event
        loop is written together, as one TLS record if it is small: an answer has three or four parts, and HTTP/2 sends
        many answers at once."""
        if self._writer.is_closing():
            return 0  # the peer has gone, or the connection is being closed
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox += data
        buffered: int = self._writer.transport.get_write_buffer_size()
        return len(self._outbox) + buffered

    def _flush(self) -> None:
        if self._outbox and not self._writer.is_closing():
            self._writer.write(self._outbox)
        self._outbox = bytearray()  # a new object: the transport may still use the old one

    async def _drain_writes(self) -> None:
        self._flush()
        try:
            async with asyncio.timeout(self._deadlines.write):
                await self._writer.drain()
        except OSError:  # a TimeoutError too
            self._writer.transport.abort()

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._close_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_idle(self, attempts: int = 50) -> None:
        """Close a connection without running requests. Over HTTP/2 a GOAWAY names the last stream received."""
        protocol = self._protocol.protocol
        if isinstance(protocol, H2Protocol):
            if protocol.stream_buffers and attempts:
                # Hypercorn's sending task still has the end of an answer and waits for a slow peer. Retry with growing
                # pauses, 13 s in total.
                self._stop_timer()
                self._timer = self._loop.call_later((51 - attempts) / 100, self._close_idle, attempts - 1)
                return
            protocol.connection.close_connection()
            self._write(protocol.connection.data_to_send())
        self._close()

    def _close_to_new_streams(self) -> None:
        """In a drain, send GOAWAY to an HTTP/2 peer that sends another request. All its requests are answered.

        GOAWAY is not sent earlier: clients that use Python's h2 then drop the answers that they wait for.
        """
        if isinstance(self._protocol.protocol, H2Protocol) and not self._is_closed_to_new_streams:
            self._is_closed_to_new_streams = True
            self._write(GoAwayFrame(0, last_stream_id=ALL_STREAMS).serialize())

    def _close_after_body(self) -> None:
        """Close. If the peer still sends a body, first discard it for a moment: a reset would lose the answer."""
        protocol = self._protocol.protocol
        if not (isinstance(protocol, H11Protocol) and protocol.connection.their_state is h11.SEND_BODY):
            self._close()
        elif not self._is_discarding:
            self._is_discarding = True
            self._flush()
            if self._has_stopped_reading:
                self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket transport has it
            if self._tls is None:
                self._writer.write_eof()  # over TLS `connection: close` has the same effect
            self._stop_timer()
            end = self._writer.transport.abort if self._has_stopped_reading else self._close
            self._timer = self._loop.call_later(self._deadlines.close, end)

    def _close(self) -> None:
        """Start closing; after a timeout the connection is aborted."""
        if self._is_closing:
            return
        self._is_closing = True
        self._stop_timer()
        self._flush()
        self._writer.close()
        timeout = self._deadlines.write if self._tls is None else self._deadlines.close
        self._timer = self._loop.call_later(timeout, self._writer.transport.abort)

    async def _finish(self) -> None:
        self._close()
        with suppress(OSError):
            await self._writer.wait_closed()
        self._stop_timer()
