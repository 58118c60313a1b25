"""A small HTTP/2 client: many requests at once over ONE connection, and no mercy for a GOAWAY."""

import asyncio
import ssl
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple, Self

from attrs import define, field
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

Headers = dict[str, str]


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


class LostError(Exception):
    """A request got no answer."""


@define(eq=False)
class _Exchange:
    done: asyncio.Future[Answer]
    status: int = 0
    headers: Headers = field(factory=dict)
    body: bytearray = field(factory=bytearray)

    def finish(self) -> None:
        if not self.done.done():  # nobody waits any more for one that was cancelled
            self.done.set_result(Answer(self.status, self.headers, bytes(self.body)))

    def fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(LostError(why))


class H2Client:
    """`async with H2Client(host, port, context) as client: status, headers, body = await client.post(path, body)`.

    Any number of tasks may ask at the same time; what the server's settings do not allow yet waits its turn.
    """

    def __init__(
        self, host: str, port: int, ssl_context: ssl.SSLContext, *, server_hostname: str | None = None
    ) -> None:
        self._address = (host, port)
        self._authority = f"{server_hostname or host}:{port}"
        self._ssl_context = ssl_context
        self._server_hostname = server_hostname
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._exchanges: dict[int, _Exchange] = {}
        self._changed = asyncio.Condition()  # a stream ended, a window opened, the settings changed, or all is over
        self._end = ""
        self.goaways = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            *self._address, ssl=self._ssl_context, server_hostname=self._server_hostname
        )
        tls = self._writer.get_extra_info("ssl_object")
        if tls.selected_alpn_protocol() != "h2":
            self._writer.close()
            raise LostError("the server does not speak HTTP/2")
        self._h2.initiate_connection()
        await self._flush()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def get(self, path: str, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        return await self.request("GET", path, b"", headers)

    async def post(self, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        return await self.request("POST", path, body, [("content-length", str(len(body))), *headers])

    async def request(self, method: str, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> Answer:
        async with self._changed:
            await self._changed.wait_for(lambda: self._end or self._may_open())
            if self._end:
                raise LostError(self._end)
            stream = self._h2.get_next_available_stream_id()
            exchange = self._exchanges[stream] = _Exchange(asyncio.get_running_loop().create_future())
            pseudo = [(":method", method), (":scheme", "https"), (":authority", self._authority), (":path", path)]
            self._h2.send_headers(stream, [*pseudo, *headers], end_stream=not body)
        await self._flush()
        await self._upload(stream, exchange, body)
        return await exchange.done

    async def give_up(self) -> None:
        """Reset every request that is waiting, as a client does whose time is up."""
        for stream, exchange in self._exchanges.items():
            self._h2.reset_stream(stream, ErrorCodes.CANCEL)
            exchange.fail("given up")
        self._exchanges.clear()
        await self._flush()

    async def wait_closed(self) -> None:
        """Until the server has closed the connection."""
        await asyncio.gather(self._reading, return_exceptions=True)

    def _may_open(self) -> bool:
        return self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams

    async def _upload(self, stream: int, exchange: _Exchange, body: bytes) -> None:
        """Send the body as its windows open; an answer that comes before its end ends it."""
        left = memoryview(body)
        while left and not exchange.done.done():
            async with self._changed:
                await self._changed.wait_for(lambda: exchange.done.done() or self._room(stream) > 0)
            if not exchange.done.done():
                size = min(self._room(stream), len(left))
                self._h2.send_data(stream, bytes(left[:size]), end_stream=size == len(left))
                left = left[size:]
                await self._flush()

    def _room(self, stream: int) -> int:
        return min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _read(self) -> None:
        why = "the server has closed the connection"
        try:
            while data := await self._reader.read(2**16):
                for event in self._h2.receive_data(data):
                    self._take(event)
                await self._flush()
                await self._wake()
        except OSError as error:
            why = repr(error)
        finally:
            self._fail_all(why)
            await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _take(self, event: Event) -> None:
        match event:
            case ResponseReceived(stream_id=stream, headers=headers):
                exchange = self._exchanges[stream]
                exchange.headers = {str(name): str(value) for name, value in headers}
                exchange.status = int(exchange.headers.pop(":status"))
            case DataReceived(stream_id=stream, data=data, flow_controlled_length=length):
                self._exchanges[stream].body += data
                self._h2.acknowledge_received_data(length, stream)
            case StreamEnded(stream_id=stream):
                exchange = self._exchanges.pop(stream)
                exchange.finish()
            case StreamReset(stream_id=stream, error_code=code):
                self._exchanges.pop(stream).fail(f"stream reset: {code!r}")
            case ConnectionTerminated(error_code=code):
                self.goaways += 1
                self._fail_all(f"GOAWAY: {code!r}")
            case _:
                pass  # whoever waits for a window or a setting is woken after this

    def _fail_all(self, why: str) -> None:
        self._end = self._end or why
        for exchange in self._exchanges.values():
            exchange.fail(why)
        self._exchanges.clear()
