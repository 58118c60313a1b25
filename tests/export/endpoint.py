"""A real HTTP server that fails, hangs, truncates or closes connections on request, and records what it receives."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from attrs import frozen

# How to treat a request: answer with this status, or do one of these.
HANG, TRUNCATE, BREAK_OFF = "hang", "truncate", "break off"
Order = int | str


@frozen
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Endpoint:
    """Uses one order per request, in turn; the last one applies to all later requests."""

    def __init__(self, *orders: Order, headers: Mapping[str, str] | None = None, body: bytes = b"{}") -> None:
        self._orders: list[Order] = list(orders) or [200]
        self._headers = headers or {}
        self._body = body
        self.requests: list[Request] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def order(self, *orders: Order) -> None:
        self._orders = list(orders)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self.requests.append(await received(reader))
                order = self._orders.pop(0) if len(self._orders) > 1 else self._orders[0]
                if order == HANG:
                    await asyncio.Event().wait()
                if order == BREAK_OFF:
                    break
                writer.write(self._answer(200 if order == TRUNCATE else int(order)))
                if order == TRUNCATE:
                    break
                writer.write(self._body)
                await writer.drain()
        writer.close()

    def _answer(self, status: int) -> bytes:
        lines: Sequence[str] = [
            f"HTTP/1.1 {status} As ordered",
            "Content-Type: application/json",
            f"Content-Length: {len(self._body)}",
            'ETag: "1"',
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


async def received(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *rest = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@asynccontextmanager
async def listening(
    *orders: Order, headers: Mapping[str, str] | None = None, body: bytes = b"{}"
) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(*orders, headers=headers, body=body)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(endpoint(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
