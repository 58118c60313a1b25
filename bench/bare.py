"""The cost of Starlette without gpuwarden: one route that reads the body and answers a constant.

`python -m bench.bare hypercorn PORT DIRECTORY` serves it on plain Hypercorn, `listener` on gpuwarden's listener.
"""

import asyncio
import signal
import ssl
import sys
from pathlib import Path

import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from webhook.core.review import answer
from webhook.core.verdict import Admit
from webhook.runtime.http.listener import Listener

PATCH = [{"op": "add", "path": "/metadata/annotations/bench.example~1seen", "value": "true"}]
ANSWER = answer("00000000-0000-4000-8000-000000000000", Admit(PATCH))


async def constant(request: Request) -> Response:
    await request.body()
    return Response(ANSWER, media_type="application/json")


APP = Starlette(routes=[Route("/mutate", constant, methods=["POST"])])


async def on_hypercorn(port: int, directory: Path, stop: asyncio.Event) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.certfile, config.keyfile = str(directory / "tls.crt"), str(directory / "tls.key")
    config.alpn_protocols = ["h2", "http/1.1"]
    config.keep_alive_max_requests = sys.maxsize  # the default drops requests, and dropped ones are fast
    await serve(APP, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]  # Starlette's words for the same thing


async def on_listener(port: int, directory: Path, stop: asyncio.Event) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    context.set_alpn_protocols(["h2", "http/1.1"])
    listener = Listener(APP, host="127.0.0.1", port=port, ssl_context=context)
    await listener.start()
    await stop.wait()
    await listener.stop(5)


async def main(server: str, port: int, directory: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await (on_hypercorn if server == "hypercorn" else on_listener)(port, directory, stop)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
