"""SPIRE Server as a source of evidence: all its agents, read over mTLS and told of by node."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from grpclib.client import Channel

from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceUnavailableError, StillAwayError
from webhook.evidence.rpc import CallFailedError, RawCodec, ask, faults_of
from webhook.evidence.spire.attested import (
    SOURCE,
    AgentHistory,
    AgentRow,
    AgentRules,
    Doubts,
    by_node,
    combined_evidence,
    row_of,
)
from webhook.evidence.spire.spiffe_tls import client_context
from webhook.evidence.spire.spire_messages import LIST_AGENTS, AgentMessage, AgentPage, list_agents_request
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# So few that others get their turn while they are read.
PAGE_SIZE = 250
# For all pages together: 5,000 agents take a quarter of a second.
DEADLINE = timedelta(seconds=10)
# How long one poll waits for that.
PATIENCE = timedelta(seconds=1)
# Agents that come back while pages are turned stand on two of them.
WALKS = 3
NODES_AT_A_TIME = 500
# Polls come up to this much early, so that many pollers do not stay in step.
JITTER = 0.2


class UnsettledError(CallFailedError):
    """The list of agents changes faster than it can be read."""


class SpireConnection(Protocol):
    """A way to SPIRE Server."""

    def connected(self) -> AbstractAsyncContextManager[Channel]:
        """A new connection: it is made under the newest SVID and roots."""


class TcpServer:
    """Over the network: both sides show their SVIDs, and the server's has to be the server's."""

    def __init__(self, host: str, port: int, trust_domain: str, identity: OwnIdentity) -> None:
        self._host = host
        self._port = port
        self._spiffe_id = f"spiffe://{trust_domain}/spire/server"
        self._identity = identity

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Channel]:
        context = client_context(await self._identity.current(), self._spiffe_id)
        async with Channel(self._host, self._port, ssl=context, codec=RawCodec()) as channel:
            yield channel


class SocketServer:
    """The server's own socket. Whoever can open it is an administrator of SPIRE: for tests."""

    def __init__(self, path: str) -> None:
        self._path = path

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Channel]:
        async with Channel(path=self._path, codec=RawCodec()) as channel:
            yield channel


class SpireServer:
    """Asked as often as anybody likes, it asks SPIRE once in `every`, and answers with the same until then."""

    name = SOURCE
    is_for_development = False

    def __init__(
        self,
        server: SpireConnection,
        rules: AgentRules,
        clock: Clock,
        every: timedelta,
        *,
        page_size: int = PAGE_SIZE,
        deadline: timedelta = DEADLINE,
        patience: timedelta = PATIENCE,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._server = server
        self._rules = rules
        self._clock = clock
        self._every = every
        self._page_size = page_size
        self._deadline = deadline
        self._patience = patience
        self._chance = chance
        self._watchfulness = AgentHistory(rules)
        self._told = Doubts()
        self._problem = ""
        self._read: Mapping[bytes, AgentRow | None] = {}
        self._due: datetime | None = None
        self._asking: asyncio.Task[None] | None = None
        self._said: Mapping[str, Evidence] | None = None
        self._has_answered = False  # ever: `_said` is None again at an election

    def begin(self) -> None:
        """Only the answer to a question that is yet to be asked is new enough."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        self._asking, self._due, self._said = None, None, None

    async def poll(self) -> Mapping[str, Evidence]:
        """The newest answer. One that takes longer than `patience` is returned by a later poll, and the last answer
        since `begin` is returned until then.

        Between a failed question and the next answer every poll raises: the last answer is no sign that SPIRE is back.
        """
        now = self._clock()
        if self._asking is None and (self._due is None or now >= self._due):
            self._due = now + self._every * (1 - JITTER * self._chance())
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=self._patience.total_seconds() if self._has_answered else None)
            if self._asking.done():
                asked, self._asking = self._asking, None
                asked.result()
                return self._newest()
        if self._problem:
            raise StillAwayError(self._problem)
        return self._newest()

    def _newest(self) -> Mapping[str, Evidence]:
        if self._said is None:
            raise EvidenceUnavailableError("SPIRE has not answered yet")
        return self._said

    async def _ask(self) -> None:
        try:
            with faults_of("SPIRE"):
                async with asyncio.timeout(self._deadline.total_seconds()), self._server.connected() as channel:
                    rows = await self._all_rows(channel)
        except CallFailedError as exc:
            self._problem = str(exc)
            raise EvidenceUnavailableError(self._problem) from exc
        self._problem = ""
        await self._take_in(rows)

    async def _all_rows(self, channel: Channel) -> list[AgentRow]:
        """Of one walk in which nobody was met twice: pages are no snapshot."""
        for _ in range(WALKS):
            read = await self._walk(channel)
            rows = [row for row in read.values() if row is not None]
            if len({row.id for row in rows}) == len(rows):
                self._read = read
                return rows
        raise UnsettledError("SPIRE: agents change faster than they can be read")

    async def _walk(self, channel: Channel) -> dict[bytes, AgentRow | None]:
        """Every agent, as it stood on the wire. What was read before is not read again."""
        read: dict[bytes, AgentRow | None] = {}
        token, tokens = "", set[str]()
        while token not in tokens:
            tokens.add(token)
            page = AgentPage.parse(await ask(channel, LIST_AGENTS, list_agents_request(self._page_size, token)))
            for raw in page.agents:
                read[raw] = self._read[raw] if raw in self._read else row_of(AgentMessage.parse(raw), self._rules)
            token = page.next_token
            if not token:
                return read
        raise UnsettledError("SPIRE: the pages of agents go round in a circle")

    async def _take_in(self, rows: list[AgentRow]) -> None:
        now = self._clock()
        doubts = self._watchfulness.doubts(rows, now)
        before, said = self._said or {}, dict[str, Evidence]()
        for number, (node, of_node) in enumerate(by_node(rows).items()):
            word = combined_evidence(node, of_node, self._rules, doubts, now)
            if word is not None:
                said[node] = before[node] if before.get(node) == word else word
            if number % NODES_AT_A_TIME == NODES_AT_A_TIME - 1:
                await asyncio.sleep(0)
        self._tell(doubts)
        self._has_answered = True
        if self._said is None or said != before:
            self._said = said

    def _tell(self, doubts: Doubts) -> None:
        """What is wrong is told when it is news."""
        if doubts.overlong - self._told.overlong:
            log.warning(
                "SVIDs of agents live longer than --spire-agent-ttl: they prove nothing until that is right",
                agents=len(doubts.overlong),
            )
        if new := doubts.shared - self._told.shared:
            log.error("two machines attest with one key", agents=sorted(new))
        self._told = doubts
