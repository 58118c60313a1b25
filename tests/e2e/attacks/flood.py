"""Attackers in a process that the test kills: large bodies over many TLS connections on loopback. Arguments: the port,
the CA file, the attack, and the number of attackers."""

import asyncio
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from tests import builders

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
DEEP = b"[" * 400 + b"]" * 400


def review(uid: str, ballast: int = 0) -> bytes:
    pod = builders.raw_pod(builders.raw_container(gpus=1), annotations={"ballast": "x" * ballast})
    return builders.body(builders.mutating_create(pod, uid=uid))


def head(size: int) -> bytes:
    return f"POST /mutate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n".encode()


async def stall(streams: Streams) -> None:
    """Sends most of a large body and then stalls."""
    reader, writer = streams
    writer.write(head(3 * 2**20) + b" " * 3_040_000)
    await reader.read()


async def stall_small(streams: Streams) -> None:
    reader, writer = streams
    writer.write(head(65_000) + b" " * 64_000)
    await reader.read()


async def stall_at_once(streams: Streams) -> None:
    """Sends one byte of a body: too little for a limit in bytes."""
    reader, writer = streams
    writer.write(head(100) + b"{")
    await reader.read()


async def grant_nothing(streams: Streams) -> None:
    """Sends a whole HTTP/2 request and grants no window for the answer."""
    reader, writer = streams
    connection = H2Connection(H2Configuration(client_side=True))
    connection.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0})
    connection.initiate_connection()
    words = {":method": "GET", ":path": "/healthz", ":scheme": "https", ":authority": "localhost"}
    connection.send_headers(1, list(words.items()), end_stream=True)
    writer.write(connection.data_to_send())
    while await reader.read(4096):
        pass


def repeat(body: bytes) -> Callable[[Streams], Awaitable[None]]:
    async def repeated(streams: Streams) -> None:
        """Sends the same large body as fast as the server accepts it."""
        reader, writer = streams
        while True:
            writer.write(head(len(body)) + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))

    return repeated


ATTACKS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    "unfinished": stall,
    "unfinished-small": stall_small,
    "silent": stall_at_once,
    "windowless": grant_nothing,
    "large": repeat(review("large", 1_600_000)),
    "deep": repeat(b'{"request": {"object": {"x": [' + b",".join([DEEP] * 2000) + b"]}}}"),
}


async def attack_repeatedly(port: int, trust: ssl.SSLContext, attack: Callable[[Streams], Awaitable[None]]) -> None:
    while True:
        with suppress(OSError, EOFError, ValueError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="localhost")
            try:
                await attack((reader, writer))
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.05)


async def main(port: str, ca: str, attack: str, number: str) -> None:
    trust = ssl.create_default_context(cafile=ca)
    if attack == "windowless":
        trust.set_alpn_protocols(["h2"])
    await asyncio.gather(*(attack_repeatedly(int(port), trust, ATTACKS[attack]) for _ in range(int(number))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
