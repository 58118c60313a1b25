"""Raw connections: whole requests over HTTP/2, and HTTP/1.1 and HTTP/2 with damaged bytes."""

import asyncio
import ssl
import time
from contextlib import suppress
from random import Random
from typing import Final

from attrs import frozen
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from scripts.fuzz.mutations import damaged
from scripts.fuzz.targets import Target

DEADLINE: Final = 10.0
# Damaged bytes may be half a request; then the server correctly waits.
LOOKED_AT: Final = 0.2
PREFACE: Final = 24
# Bytes sent before the peer extends the flow-control window.
WINDOW: Final = 60_000
FRAME: Final = 16_000


@frozen
class Wire:
    """A TLS listener."""

    listener: str
    url: str
    trust: ssl.SSLContext

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("https://").rpartition(":")
        return host, int(port)


@frozen
class Said:
    """The outcome of one connection."""

    how: str
    status: int | None = None
    problem: str = ""


async def spoken(wire: Wire, target: Target, body: bytes, random: Random) -> Said:
    protocol, is_damaged = random.choice((("h2", False), ("h2", True), ("http/1.1", True)))
    how = f"{protocol}{', damaged,' if is_damaged else ''}"
    wire.trust.set_alpn_protocols([protocol])
    try:
        reader, writer = await asyncio.open_connection(*wire.address, ssl=wire.trust)
    except OSError as exc:
        return Said(how, problem=f"no connection: {exc!r}")
    try:
        if not is_damaged:
            return await whole(how, reader, writer, target, body[:WINDOW])
        text = frames(target, body[:WINDOW]) if protocol == "h2" else request(target, body, random)
        kept = PREFACE if protocol == "h2" and random.random() < 0.8 else 0
        await broken(reader, writer, text[:kept] + damaged(text[kept:], random), random)
        return Said(how)
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, content: bytes, random: Random) -> None:
    """Sends the bytes in pieces. The answer does not matter: process, log and memory are checked at the end."""
    with suppress(OSError, TimeoutError):
        while content:
            size = random.choice((1, 9, 100, 10_000, len(content)))
            writer.write(content[:size])
            await writer.drain()
            content = content[size:] if random.random() < 0.9 else b""
        async with asyncio.timeout(LOOKED_AT):
            await reader.read()


def request(target: Target, body: bytes, random: Random) -> bytes:
    method = "POST" if target.group else "GET"
    head = f"{method} {target.path} HTTP/1.1\r\nhost: localhost\r\n"
    if random.random() < 0.5:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    return f"{head}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


def opened(target: Target, body: bytes) -> H2Connection:
    connection = H2Connection(H2Configuration(client_side=True))
    connection.initiate_connection()
    method = "POST" if target.group else "GET"
    words = {":method": method, ":path": target.path, ":scheme": "https", ":authority": "localhost"}
    connection.send_headers(1, [*words.items(), ("content-type", "application/json")], end_stream=not target.group)
    if target.group:
        for start in range(0, len(body), FRAME):
            connection.send_data(1, body[start : start + FRAME])
        connection.end_stream(1)
    return connection


def frames(target: Target, body: bytes) -> bytes:
    return opened(target, body).data_to_send()


async def whole(
    how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target, body: bytes
) -> Said:
    """The answer to a complete request."""
    began, status = time.monotonic(), None
    try:
        connection = opened(target, body)
        async with asyncio.timeout(DEADLINE):
            while True:
                writer.write(connection.data_to_send())
                data = await reader.read(65536)
                if not data:
                    return Said(how, problem="the connection ended before the answer")
                for event in connection.receive_data(data):
                    if isinstance(event, ResponseReceived):
                        status = int(dict(event.headers)[b":status"])
                    elif isinstance(event, DataReceived):
                        connection.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, StreamReset):
                        return Said(how, status, f"reset with {event.error_code}" if status is None else "")
                    elif isinstance(event, StreamEnded):
                        is_wrong = status is not None and status >= 500 and status != 503
                        return Said(how, status, f"answered {status}" if is_wrong else "")
    except (OSError, ProtocolError, TimeoutError) as exc:
        return Said(how, problem=f"after {time.monotonic() - began:.1f} s: {exc!r}")
