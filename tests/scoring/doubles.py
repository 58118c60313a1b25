"""A scorer on a real socket that answers as the test sets, well or badly."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from attrs import define, field

from tests.builders import Raw

GOOD: Raw = {
    "priority_score": 85.0,
    "gpu_selector": {
        "nodeSelector": {"gpu.nvidia.com/class": "A100-80GB"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "avoid_co_locate_with": ["train-llama"],
    "terms": {"mu": 10.0, "sigma": 5.0, "ig": 2.5, "penalty": 0.2, "cost": 9.8},
}
HTML = b"<!DOCTYPE html><html><body>It works!</body></html>"


def good(**members: Any) -> bytes:
    return json.dumps({**GOOD, **members}).encode()


# Answers that must not yield hints. JSON has no NaN, but some encoders write it.
BAD: dict[str, bytes] = {
    "empty": b"",
    "html": HTML,
    "not-json": b"{",
    "not-utf8": b'{"priority_score": "\xff"}',
    "list": b"[]",
    "null": b"null",
    "nan": b'{"priority_score": NaN}',
    "infinity": b'{"priority_score": Infinity}',
    "too-large-a-number": b'{"priority_score": 1e400}',
    "null-score": good(priority_score=None),
    "text-score": good(priority_score="85"),
    "true-score": good(priority_score=True),
    "negative-score": good(priority_score=-1),
    "score-over-100": good(priority_score=100.5),
    "selector-is-text": good(gpu_selector="A100"),
    "selector-is-null": good(gpu_selector=None),
    "selector-value-is-a-number": good(gpu_selector={"nodeSelector": {"a": 1}}),
    "tolerations-are-a-map": good(gpu_selector={"tolerations": {}}),
    "a-toleration-is-text": good(gpu_selector={"tolerations": ["all"]}),
    "avoid-is-text": good(avoid_co_locate_with="train-llama"),
    "avoid-has-a-null": good(avoid_co_locate_with=[None]),
    "avoid-has-too-many": good(avoid_co_locate_with=["a"] * 65),
    "terms-are-a-list": good(terms=[]),
    "deep": b"[" * 100_000,
    "long": good(more="x" * 70_000),
}


@define
class FakeScorer:
    """A scorer's answer, and the requests that it received."""

    url: str = ""
    status: int = 200
    body: bytes = field(factory=good)
    delay: float = 0.0
    hangs_up: bool = False
    hangs_up_once: bool = False
    more_headers: str = ""
    asked: list[Raw] = field(factory=list)
    # Answers are held back until this many requests are open.
    crowd: int = 0
    asking_now: int = 0
    crowded: asyncio.Event = field(factory=asyncio.Event)
    connections: int = 0

    async def _take_time(self) -> None:
        self.asking_now += 1
        if self.asking_now >= self.crowd:
            self.crowded.set()
        await self.crowded.wait()
        await asyncio.sleep(self.delay)
        self.asking_now -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                )
                assert head.startswith(b"POST /v1/score HTTP/1.1\r\n"), head
                self.asked.append(json.loads(await reader.readexactly(length)))
                if self.hangs_up or self.hangs_up_once:
                    self.hangs_up_once = False
                    return
                await self._take_time()
                headers = f"{self.more_headers}content-length: {len(self.body)}\r\n\r\n"
                writer.write(f"HTTP/1.1 {self.status} X\r\n{headers}".encode())
                writer.write(self.body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def scoring(tls: ssl.SSLContext | None = None, **members: Any) -> AsyncIterator[FakeScorer]:
    scorer = FakeScorer(**members)
    tasks: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(scorer._serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    scorer.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scorer
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
