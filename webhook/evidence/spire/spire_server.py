"""SPIRE Server as a source of evidence: reads all its agents over mTLS and derives evidence by node."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import define, field
from grpclib.client import Channel

from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceUnavailableError, StillUnavailableError
from webhook.evidence.rpc import CallFailedError, RawCodec, ask, faults_of
from webhook.evidence.spire.attested import (
    SOURCE,
    AgentHistory,
    AgentRow,
    AgentRules,
    DistrustedAgents,
    by_node,
    combined_evidence,
    row_of,
)
from webhook.evidence.spire.spiffe_tls import client_context
from webhook.evidence.spire.spire_messages import LIST_AGENTS, AgentMessage, AgentPage, list_agents_request
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Small, so that other tasks get to run while agents are read.
PAGE_SIZE = 250
# For all pages together: 5,000 agents take a quarter of a second.
DEADLINE = timedelta(seconds=10)
# How long one poll waits for a response.
POLL_TIMEOUT = timedelta(seconds=1)
# Attempts to list all agents. Agents that return while pages are read appear on two pages.
MAX_LISTINGS = 3
BATCH_SIZE = 500
# Polls come up to this fraction of the interval early, so that pollers do not stay in step.
JITTER = 0.2


class UnsettledError(CallFailedError):
    """The list of agents changes faster than it can be read."""


class SpireConnection(Protocol):
    """Connects to SPIRE Server."""

    def connected(self) -> AbstractAsyncContextManager[Channel]:
        """A new connection, with the newest SVID and roots."""


class TcpServer:
    """Connects over the network with mTLS. The peer must have the SPIFFE ID of SPIRE Server."""

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
    """Connects to the server's own socket. Access to it is administrator access to SPIRE: for tests."""

    def __init__(self, path: str) -> None:
        self._path = path

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Channel]:
        async with Channel(path=self._path, codec=RawCodec()) as channel:
            yield channel


@define(eq=False, repr=False)
class SpireServer:
    """Requests the agents from SPIRE at most once in `every`, and returns the same answer until then."""

    name = SOURCE

    _server: SpireConnection
    _rules: AgentRules
    _clock: Clock
    _every: timedelta
    _page_size: int = field(default=PAGE_SIZE, kw_only=True)
    _deadline: timedelta = field(default=DEADLINE, kw_only=True)
    _poll_timeout: timedelta = field(default=POLL_TIMEOUT, kw_only=True)
    _random_fraction: Callable[[], float] = field(default=random.random, kw_only=True)
    _logged: DistrustedAgents = field(factory=DistrustedAgents, init=False)
    _problem: str = field(default="", init=False)
    _parsed: Mapping[bytes, AgentRow | None] = field(factory=dict, init=False)
    _due: datetime | None = field(default=None, init=False)
    _request: asyncio.Task[None] | None = field(default=None, init=False)
    _evidence: Mapping[str, Evidence] | None = field(default=None, init=False)
    _has_answered: bool = field(default=False, init=False)  # never reset, while `begin` resets `_evidence`
    _history: AgentHistory = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._history = AgentHistory(self._rules)

    def begin(self) -> None:
        """Only a request that starts after this one is new enough."""
        if self._request is not None:
            self._request.cancel()
            self._request.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        self._request, self._due, self._evidence = None, None, None

    async def poll(self) -> Mapping[str, Evidence]:
        """The newest answer. If it takes longer than `poll_timeout`, a later poll returns it; until then polls return
        the last answer since `begin`.

        Between a failed request and the next answer every poll raises: the last answer does not mean that SPIRE is
        back.
        """
        now = self._clock()
        if self._request is None and (self._due is None or now >= self._due):
            self._due = now + self._every * (1 - JITTER * self._random_fraction())
            self._request = asyncio.create_task(self._ask())
        if self._request is not None:
            await asyncio.wait(
                {self._request}, timeout=self._poll_timeout.total_seconds() if self._has_answered else None
            )
            if self._request.done():
                asked, self._request = self._request, None
                asked.result()
                return self._newest()
        if self._problem:
            raise StillUnavailableError(self._problem)
        return self._newest()

    def _newest(self) -> Mapping[str, Evidence]:
        if self._evidence is None:
            raise EvidenceUnavailableError("SPIRE has not answered yet")
        return self._evidence

    async def _ask(self) -> None:
        try:
            with faults_of("SPIRE"):
                async with asyncio.timeout(self._deadline.total_seconds()), self._server.connected() as channel:
                    rows = await self._all_rows(channel)
        except CallFailedError as exc:
            self._problem = str(exc)
            raise EvidenceUnavailableError(self._problem) from exc
        self._problem = ""
        await self._update(rows)

    async def _all_rows(self, channel: Channel) -> list[AgentRow]:
        """The agents of one listing without duplicates: pages are not a consistent snapshot."""
        for _ in range(MAX_LISTINGS):
            read = await self._list_agents(channel)
            rows = [row for row in read.values() if row is not None]
            if len({row.id for row in rows}) == len(rows):
                self._parsed = read
                return rows
        raise UnsettledError("SPIRE: the list of agents changes faster than it can be read")

    async def _list_agents(self, channel: Channel) -> dict[bytes, AgentRow | None]:
        """All agents by their encoded message. Messages that were parsed before are not parsed again."""
        read: dict[bytes, AgentRow | None] = {}
        token, tokens = "", set[str]()
        while token not in tokens:
            tokens.add(token)
            page = AgentPage.parse(await ask(channel, LIST_AGENTS, list_agents_request(self._page_size, token)))
            for raw in page.agents:
                read[raw] = self._parsed[raw] if raw in self._parsed else row_of(AgentMessage.parse(raw), self._rules)
            token = page.next_token
            if not token:
                return read
        raise UnsettledError("SPIRE: the page tokens of the list of agents repeat")

    async def _update(self, rows: list[AgentRow]) -> None:
        now = self._clock()
        distrusted = self._history.distrusted(rows, now)
        before, evidence = self._evidence or {}, dict[str, Evidence]()
        for number, (node, of_node) in enumerate(by_node(rows).items()):
            found = combined_evidence(node, of_node, self._rules, distrusted, now)
            if found is not None:
                evidence[node] = before[node] if before.get(node) == found else found
            if number % BATCH_SIZE == BATCH_SIZE - 1:
                await asyncio.sleep(0)
        self._log_distrusted(distrusted)
        self._has_answered = True
        if self._evidence is None or evidence != before:
            self._evidence = evidence

    def _log_distrusted(self, distrusted: DistrustedAgents) -> None:
        """Log untrusted agents when they are new."""
        if distrusted.overlong - self._logged.overlong:
            log.warning(
                "SVIDs of agents live longer than --spire-agent-ttl: they prove nothing until the setting is corrected",
                agents=len(distrusted.overlong),
            )
        if new := distrusted.shared - self._logged.shared:
            log.error("two machines attest with the same key", agents=sorted(new))
        self._logged = distrusted
