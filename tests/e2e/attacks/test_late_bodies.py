"""Requests with bodies that are late, incomplete or in tiny pieces. Only the sender waits. Needs no control plane:
`serve` is a process, the attacker is on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.running import Running, serving

INVENTORY = {"nodes": [{"name": "node-0", "devices": [{"uuid": f"GPU-{n}"} for n in range(8)]}]}
SIZE = 1_200_000
AT_ONCE = 2.0  # seconds on a machine with other work; the unfixed server took 6 to 30
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("late"), INVENTORY, ["--log-level", "error"]) as process:
        yield process


@asynccontextmanager
async def connected(running: Running, listener: str) -> AsyncIterator[Streams]:
    port = int(running.urls[listener].rpartition(":")[2])
    tls = {"ssl": running.trust, "server_hostname": "localhost"} if listener == "https" else {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **tls)  # type: ignore[arg-type]  # both or none
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Reads until the server closes or resets the connection."""
    found = bytearray()
    try:
        while piece := await reader.read(2**16):
            found += piece
    except OSError:
        pass
    return bytes(found)


async def slowest_probe(running: Running, until: asyncio.Task[bytes]) -> float:
    """The longest response time of another caller while `until` runs."""
    slowest = 0.0
    async with running.client() as client:
        while not until.done():
            started = time.monotonic()
            assert (await client.get("/healthz")).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            await asyncio.sleep(0.02)
    return slowest


@pytest.mark.parametrize("listener", ["https", "http"])
@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
@pytest.mark.parametrize("path", ["/devices", "/", "/nowhere"])
async def test_response_that_needs_no_body_does_not_wait_for_it(
    running: Running, listener: str, framing: str, path: str
) -> None:
    async with connected(running, listener) as (reader, writer):
        started = time.monotonic()
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{framing}\r\n\r\n".encode())
        answer = await read_until_closed(reader)
        took = time.monotonic() - started
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert answer.startswith(b"HTTP/1.1 ")
    assert b"connection: close" in head
    assert b"transfer-encoding: chunked" not in head or answer.endswith(b"0\r\n\r\n")
    assert took < AT_ONCE


@pytest.mark.parametrize("listener", ["https", "http"])
async def test_body_in_tiny_pieces_does_not_delay_other_requests(running: Running, listener: str) -> None:
    pieces = b"1\r\n[\r\n" * SIZE + b"0\r\n\r\n"
    async with connected(running, listener) as (reader, writer):
        started = time.monotonic()
        writer.write(b"POST /finalize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" + pieces)
        ended = asyncio.create_task(read_until_closed(reader))
        slowest = await slowest_probe(running, ended)
        took = time.monotonic() - started
    assert (took < AT_ONCE, slowest < AT_ONCE) == (True, True), (took, slowest)


async def test_deeply_nested_json_is_refused_immediately(running: Running) -> None:
    deep = b"[" * (SIZE // 2) + b"]" * (SIZE // 2)
    started = time.monotonic()
    async with running.client() as client:
        reply = await client.post("/finalize", content=deep)
    assert (reply.status_code, time.monotonic() - started < AT_ONCE) == (413, True)


async def test_finalize_does_not_echo_its_input(running: Running) -> None:
    body = {"namespace": "a", "name": "b", "uid": "c", "reservation-id": "d", "gpu-uuid": "x" * 16_385}
    async with running.client() as client:
        reply = await client.post("/finalize", json=body)
    assert (reply.status_code, len(reply.content) < 1000) == (400, True)


async def test_review_waits_for_an_unfinished_body_until_the_deadline(running: Running, tmp_path: Path) -> None:
    """A slow review is no attack: only the deadline of the body ends it."""
    body = b'{"namespace": "a"}'
    async with connected(running, "https") as (reader, writer):
        writer.write(f"POST /finalize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        await asyncio.sleep(1)
        writer.write(body)
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 400")
