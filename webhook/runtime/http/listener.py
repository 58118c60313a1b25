"""A listener: one port with a TLS certificate that can be renewed, and a drain.

A process has several listeners. They do not handle the ASGI lifespan: the server does.
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

# Bytes of a connection that the kernel buffers (it doubles the number) and that a reader buffers. TLS copies them
# twice: with the kernel's default sizes 300 peers that send without end use 300 MiB.
RECEIVE_BUFFER = 2**15
READ_AHEAD = 2**14
# The objects of a connection form cycles, so only the garbage collector frees them. It counts objects, not the 256 KiB
# that TLS needs for each connection: on its own it lets a flood of connections use 500 MiB in half a minute.
COLLECT_EVERY = 100


class Listener:
    """One port: `start`, then `stop`. With a context it uses TLS; the caller may change the context while it runs."""

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
        self.port = port  # after `start` the port that it listens on
        self._open: dict[asyncio.Task[None], Connection] = {}
        self._is_stopped = False
        self._closed = 0

    @property
    def connections(self) -> int:
        """The number of connections with a completed handshake."""
        return len(self._open)

    @property
    def url(self) -> str:
        """A URL that reaches the listener from this machine, also when it listens on all addresses."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{_reachable(self._host)}:{self.port}"

    async def start(self) -> None:
        """Start listening. Raises OSError."""
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
        """Stop listening, answer all requests and close the connections; after `grace` seconds abort the rest.

        Returns the number of aborted connections.
        """
        self._settings.is_draining = True
        self._server.close()
        for connection in self._open.values():
            connection.drain()
        await self._wait_for_end(grace)
        self._is_stopped = True
        aborted = list(self._open)
        for task in aborted:
            task.cancel()
        await self._wait_for_end(self._deadlines.close)
        return len(aborted)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The handshake took longer than the drain, or the connection limit is reached.
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
