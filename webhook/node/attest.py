"""`gpuwarden attest`, on every node: answers the server's challenges, and comes back when half of a proof is over.

With the sockets of kubelet and container runtime it also tells the server which of the node's orphans have ended.
"""

import asyncio
import random
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Annotated, Final, TypeVar

import httpx
import msgspec
import structlog
from attrs import asdict, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId
from webhook.evidence.jwt.end_reports import MOST, mark_of
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.jwt.nonce import is_ours
from webhook.inventory.local_gpus import local_gpus
from webhook.node.node_pods import NodePods
from webhook.node.pod_ends import PodEnds
from webhook.runtime.backoff import Backoff
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.runtime.tls.certificate_source import trusting

log = structlog.get_logger(__name__)

TIMEOUT: Final = httpx.Timeout(10.0)
# Somewhat less than the pause: many nodes that started together come back one by one.
BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(seconds=60), jitter=(0.8, 1.0))
# An answer of ours has some hundred bytes.
MAX_ANSWER: Final = 64 * 1024
MAX_SAID: Final = 300
# Of two looks at the node's pods. A sandbox that is ready only for a short time has to be seen.
LOOKS_APART: Final = timedelta(seconds=2)
# Of two questions to the server about orphans.
ASKS_APART: Final = timedelta(seconds=5)

T = TypeVar("T", bound=msgspec.Struct)
Sleep = Callable[[float], Awaitable[object]]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class NotAttestedError(GpuwardenError):
    """The node could not be proven this time."""


class Challenge(msgspec.Struct, frozen=True):
    """What the server asks."""

    nonce: str
    # Marks of the node's orphans. A server that knows nothing of them asks about none.
    orphans: list[str] = []


class Proven(msgspec.Struct, frozen=True):
    """What the server then knows."""

    hash: str
    since: Moment
    until: Moment

    @property
    def half_life(self) -> timedelta:
        return max((self.until - self.since) / 2, BACKOFF.first)


@frozen
class Attester:
    """One node's side."""

    server: str
    node: str
    workload_api: JwtWorkloadApi
    evidence_id: EvidenceId
    # Asked each time: the CA in its file may be a new one.
    trust: Callable[[], ssl.SSLContext]

    async def attest(self) -> Proven:
        """Prove the node once. Raises NotAttestedError, or what the Workload API raises."""
        async with self._client() as client:
            return await self._answer(await self._challenge(client), client)

    async def report(self, ended: Collection[str], look_again: Callable[[], Awaitable[Collection[str]]]) -> list[str]:
        """Tell the server which of the pods that it asks about have ended. The answer is newer than the question, so it
        takes another look. The uids that were told. Raises what `attest` and `look_again` raise."""
        async with self._client() as client:
            challenge = await self._challenge(client)
            asked = set(challenge.orphans)
            if not any(mark_of(uid) in asked for uid in ended):
                return []
            told = [uid for uid in await look_again() if mark_of(uid) in asked][:MOST]
            if told:
                await self._answer(challenge, client, ended=told)
            return told

    async def _answer(self, challenge: Challenge, client: httpx.AsyncClient, **more: object) -> Proven:
        content = {"token": await self._token(challenge.nonce), **more}
        return decoded(await self._asked(client.build_request("POST", self._url(""), json=content), client), Proven)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(verify=self.trust(), timeout=TIMEOUT, trust_env=False) as client:
            yield client

    async def _challenge(self, client: httpx.AsyncClient) -> Challenge:
        request = client.build_request("GET", self._url("/challenge"), params={"node": self.node})
        challenge = decoded(await self._asked(request, client), Challenge)
        if not is_ours(challenge.nonce):
            raise NotAttestedError("the server asked for a token that would be good elsewhere")
        return challenge

    async def _token(self, nonce: str) -> str:
        """Of the one identity that names this node: an agent may know us under others too."""
        svids = await self.workload_api.jwt_svids(nonce)
        own = {one.spiffe_id: one.token for one in svids if self._names_us(one.spiffe_id)}
        if len(own) != 1:
            found = ", ".join(sorted(own)) or ", ".join(sorted(one.spiffe_id for one in svids)) or "none"
            raise NotAttestedError(f"there has to be one identity of {self.node}, and there is: {found}")
        return own.popitem()[1]

    def _names_us(self, spiffe_id: str) -> bool:
        says = self.evidence_id.read(spiffe_id)
        return says is not None and says.node == self.node

    async def _asked(self, request: httpx.Request, client: httpx.AsyncClient) -> bytes:
        try:
            reply = await client.send(request, stream=True)
            try:
                content = await bounded(reply)
            finally:
                await reply.aclose()
        except httpx.HTTPError as exc:
            raise NotAttestedError(f"the server did not answer: {str(exc) or type(exc).__name__}") from exc
        if reply.status_code != 200:
            said = content[:MAX_SAID].decode(errors="replace")
            raise NotAttestedError(f"the server answered {reply.status_code}: {said}")
        return content

    def _url(self, path: str) -> str:
        return f"{self.server.rstrip('/')}/evidence{path}"

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """For ever: at half of each proof's life, sooner and sooner again less often where it fails."""
        failures = 0
        while True:
            try:
                proven = await self.attest()
            except GpuwardenError as exc:
                failures += 1
                pause = BACKOFF.pause(failures)
                log.warning("node not proven", node=self.node, problem=str(exc), again_in=pause.total_seconds())
                await sleep(BACKOFF.jittered(pause))
            else:
                log.info("node proven", node=self.node, hash=proven.hash, until=proven.until)
                failures = 0
                await sleep(BACKOFF.jittered(proven.half_life))


class EndReporter:
    """Looks at the node's pods again and again, and tells the server of orphans that have ended."""

    def __init__(self, attester: Attester, pods: NodePods, clock: Callable[[], float] = time.monotonic) -> None:
        self._attester = attester
        self._pods = pods
        self._ends = PodEnds()
        self._clock = clock
        self._asked_at: float | None = None

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """For ever. A problem is logged when it comes, and when it changes."""
        known = ""
        while True:
            try:
                is_whole = await self.step()
            except GpuwardenError as exc:
                if str(exc) != known:
                    log.warning("ends of pods not reported", node=self._attester.node, problem=str(exc))
                known = str(exc)
            else:
                if known and is_whole:
                    log.info("ends of pods reported again", node=self._attester.node)
                known = "" if is_whole else known
            await sleep(LOOKS_APART.total_seconds() * random.uniform(1.0, 1.2))  # noqa: S311 - to keep out of step

    async def step(self) -> bool:
        """One round: whether it is whole. The server is asked only where something has ended, and less often than the
        node: until then the round is not whole."""
        ended = await self._look()
        if not ended:
            return True
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < ASKS_APART.total_seconds():
            return False
        self._asked_at = now
        if told := await self._attester.report(ended, self._look):
            log.info("orphaned pods reported as ended", node=self._attester.node, pods=told)
        return True

    async def _look(self) -> Collection[str]:
        began = self._clock()
        return self._ends.see(await self._pods.look(), began, self._clock())


async def bounded(reply: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > MAX_ANSWER:
            raise NotAttestedError("the server's answer is too long")
    return bytes(content)


def decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise NotAttestedError("the server's answer makes no sense") from exc


def attester(settings: Settings) -> Attester:
    """Raises GpuwardenError that names every setting that is missing."""
    server, node = settings.server, settings.node
    trust_domain, workload_api = settings.spire_trust_domain, settings.spire_workload_api
    if server is None or node is None or trust_domain is None or workload_api is None:
        needed = {
            "--server": server,
            "--node": node,
            "--spire-trust-domain": trust_domain,
            "--spire-workload-api": workload_api,
        }
        missing = [flag for flag, value in needed.items() if value is None]
        raise GpuwardenError(f"set {', '.join(missing)} as well")
    trusting(settings.server_ca)  # an unreadable CA fails the start, not the first attempt
    return Attester(
        server=server,
        node=node,
        workload_api=JwtWorkloadApi(workload_api),
        evidence_id=EvidenceId(settings.evidence_id, trust_domain),
        trust=lambda: trusting(settings.server_ca),
    )


def end_reporter(settings: Settings, attester: Attester) -> EndReporter | None:
    """None where the container runtime is not to be asked. Raises GpuwardenError."""
    if settings.runtime_socket is None:
        return None
    if settings.pod_uid is None:
        raise GpuwardenError("set --pod-uid as well: --runtime-socket has to be that of the node that this runs on")
    return EndReporter(attester, NodePods(settings.runtime_socket, settings.pod_resources_socket, settings.pod_uid))


def print_gpus() -> None:
    """The GPUs of this machine on stdout. Raises GpuwardenError."""
    for one in local_gpus().gpus:
        sys.stdout.write(msgspec.json.encode(asdict(one)).decode() + "\n")


async def tell_gpus(node: str) -> None:
    """What this node has, in the log beside its proofs: the server has no place for it."""
    try:
        found = await asyncio.to_thread(local_gpus)
    except GpuwardenError as exc:
        log.info("no GPUs read here", node=node, problem=str(exc))
        return
    gpus = [{"index": one.index, "uuid": one.uuid, "serial": one.serial} for one in found.gpus]
    log.info("GPUs of this node", node=node, driver=found.driver, gpus=gpus)


async def attest(settings: Settings, *, once: bool = False) -> None:
    """Until SIGTERM or SIGINT, or once."""
    configure_logging(settings.log_level)
    one = attester(settings)
    reporter = end_reporter(settings, one)
    if once:
        proven = await one.attest()
        log.info("node proven", node=one.node, hash=proven.hash, until=proven.until)
        return
    running = asyncio.ensure_future(one.run())
    beside = [asyncio.ensure_future(tell_gpus(one.node))]
    if reporter is not None:
        beside.append(asyncio.ensure_future(reporter.run()))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await asyncio.wait([running])
    for task in beside:
        task.cancel()
    if not running.cancelled():
        running.result()
