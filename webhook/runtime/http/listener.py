"""A listener: one port, with a certificate that can change, and a drain.

Several of them live in one process and one life cycle; the ASGI lifespan is the server's business, not theirs.
"""

import asyncio
import gc
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import cast

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.typing import ASGIFramework

from webhook.runtime.http.budgets import Budgets
from webhook.runtime.http.connection import DEADLINES, Connection, Deadlines, HypercornSettings

# Bytes that the kernel takes ahead of us on a connection (it doubles the number), and that a reader takes ahead of the
# protocol. TLS copies what is there twice: with the kernel's own sizes 300 peers that send on and on take 300 MiB.
RECEIVE_BUFFER = 2**15
READ_AHEAD = 2**14
# The parts of a connection refer to each other, so only the garbage collector frees them. It counts objects, not the
# 256 KiB that TLS has for each: left to itself it lets a flood of connections take 500 MiB in half a minute.
COLLECT_EVERY = 100


class Listener:
    """One port: `start`, then `stop`. TLS if it is given a context, which the caller may change while it runs."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None = None,
        deadlines: Deadlines = DEADLINES,
        budgets: Budgets | None = None,
        is_for_probes: bool = False,
    ) -> None:
        self._app = ASGIWrapper(cast(ASGIFramework, app))  # any ASGI application
        self._host = host
        self._ssl_context = ssl_context
        self._deadlines = deadlines
        self._settings = HypercornSettings()
        self._budgets = budgets or Budgets()
        self._is_for_probes = is_for_probes
        self._server: asyncio.Server
        self.port = port  # once it listens, the one it listens on
        self._open: dict[asyncio.Task[None], Connection] = {}
        self._is_stopped = False
        self._closed = 0

    @property
    def connections(self) -> int:
        """How many peers are connected, handshake done."""
        return len(self._open)

    @property
    def url(self) -> str:
        """A URL that reaches it from this machine, also when it listens on every address."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{_reachable(self._host)}:{self.port}"

    async def start(self) -> None:
        """Listen; an OSError says why not."""
        listen = partial(asyncio.start_server, self._accept, self._host, self.port, backlog=1024, limit=READ_AHEAD)
        if self._ssl_context is None:
            self._server = await listen()
        else:
            self._server = await listen(
                ssl=self._ssl_context,
                ssl_handshake_timeout=self._deadlines.handshake,
                ssl_shutdown_timeout=self._deadlines.close,
            )
        for one in self._server.sockets:
            with socket.socket(fileno=os.dup(one.fileno())) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, grace: float) -> int:
        """Stop listening, answer what has been asked, and close; after `grace` seconds cut what is left.

        Says how many connections had to be cut.
        """
        self._settings.is_draining = True
        self._server.close()
        for connection in self._open.values():
            connection.drain()
        await self._wait_for_end(grace)
        self._is_stopped = True
        cut = list(self._open)
        for task in cut:
            task.cancel()
        await self._wait_for_end(self._deadlines.close)
        return len(cut)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Its handshake took longer than the drain, or there are as many as there may be.
        now = asyncio.get_running_loop().time()
        if self._is_stopped or not self._budgets.make_room_for_connection(now, is_probe=self._is_for_probes):
            writer.transport.abort()
            self._count_closed()
            return
        connection = Connection(self._app, self._settings, self._deadlines, reader, writer)
        task = asyncio.get_running_loop().create_task(connection.run())
        self._open[task] = connection
        self._budgets.connections[connection] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._budgets.connections.pop(self._open.pop(task), None)
        self._count_closed()

    def _count_closed(self) -> None:
        self._closed += 1
        if self._closed % COLLECT_EVERY == 0:
            gc.collect()

    async def _wait_for_end(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._open:
                    await asyncio.wait(self._open)


def _reachable(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host or "localhost"
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"
