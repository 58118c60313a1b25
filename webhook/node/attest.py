"""`gpuwarden attest`, run on every node: answers the server's challenges, again when half of a proof's life is over.

With access to the sockets of the kubelet and the container runtime it also reports which orphaned pods have ended, and
which pods have other GPUs than those reserved for them. With the kubelet's directory of plugins it also is the
kubelet's plugin for proof devices, whether or not the server answers. Evidence that nodes do not push, such as that of
a SPIRE Server, needs only the plugin, and no server.
"""

import asyncio
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from itertools import islice
from typing import Annotated, Final, TypeVar

import httpx
import msgspec
import structlog
from attrs import asdict, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.jwt.node_reports import MAX_GIVEN, MAX_PODS, uid_digest
from webhook.evidence.jwt.nonce import is_ours
from webhook.inventory.local_gpus import local_gpus
from webhook.node.given_gpus import DifferenceDetector, Gpus
from webhook.node.node_identity import NodeIdentity
from webhook.node.node_pods import NodePods
from webhook.node.pod_ends import PodEndDetector
from webhook.runtime.backoff import Backoff
from webhook.runtime.process import cancel_and_wait, run_until, stop_signal
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import configure_logging
from webhook.runtime.tls.certificate_source import client_context

log = structlog.get_logger(__name__)

TIMEOUT: Final = httpx.Timeout(10.0)
# Jitter only shortens a pause, so that nodes that started together do not all come back at once.
BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(seconds=60), jitter=(0.8, 1.0))
# A response has some hundred bytes.
MAX_ANSWER: Final = 64 * 1024
MAX_ERROR_TEXT: Final = 300
# Between two reads of the node's pods. It must be short enough to see a sandbox that is ready only briefly.
POLL_INTERVAL: Final = timedelta(seconds=2)
# Between two requests for the server's list of orphans.
MIN_CHALLENGE_INTERVAL: Final = timedelta(seconds=5)

T = TypeVar("T", bound=msgspec.Struct)
Sleep = Callable[[float], Awaitable[object]]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class NotAttestedError(GpuwardenError):
    """The node could not be attested this time."""


class Challenge(msgspec.Struct, frozen=True):
    """The server's challenge."""

    nonce: str
    # Digests of the uids of the node's orphans. Servers without this feature send none.
    orphans: list[str] = []


class Proven(msgspec.Struct, frozen=True):
    """The evidence that the server has accepted."""

    hash: str
    since: Moment
    until: Moment

    @property
    def half_life(self) -> timedelta:
        return max((self.until - self.since) / 2, BACKOFF.first)


@frozen
class Attester:
    """Attests one node to the server."""

    server: str
    identity: NodeIdentity
    # Called for each connection, because the CA file may have changed.
    trust: Callable[[], ssl.SSLContext]

    @property
    def node(self) -> str:
        return self.identity.node

    async def attest(self) -> Proven:
        """Attest the node once. Raises NotAttestedError, or the errors of the node's identity."""
        async with self._client() as client:
            return await self._answer(await self._challenge(client), client)

    async def report(self, ended: Collection[str], look_again: Callable[[], Awaitable[Collection[str]]]) -> list[str]:
        """Report which of the pods that the server asks about have ended; returns their uids.

        `look_again` is called after the challenge, because only an observation that is newer than it counts. Raises the
        errors of `attest` and `look_again`.
        """
        async with self._client() as client:
            challenge = await self._challenge(client)
            asked = set(challenge.orphans)
            if not any(uid_digest(uid) in asked for uid in ended):
                return []
            reported = [uid for uid in await look_again() if uid_digest(uid) in asked][:MAX_PODS]
            if reported:
                await self._answer(challenge, client, ended=reported)
            return reported

    async def report_given(self, given: Mapping[str, Sequence[str]]) -> None:
        """Report the GPUs of pods, by their uids. Raises the errors of `attest`."""
        async with self._client() as client:
            await self._answer(await self._challenge(client), client, given=given)

    async def _answer(self, challenge: Challenge, client: httpx.AsyncClient, **more: object) -> Proven:
        svid, _ = await self.identity.svid(challenge.nonce)
        content = {"token": svid.token, **more}
        return decoded(await self._send(client.build_request("POST", self._url(""), json=content), client), Proven)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(verify=self.trust(), timeout=TIMEOUT, trust_env=False) as client:
            yield client

    async def _challenge(self, client: httpx.AsyncClient) -> Challenge:
        request = client.build_request("GET", self._url("/challenge"), params={"node": self.node})
        challenge = decoded(await self._send(request, client), Challenge)
        if not is_ours(challenge.nonce):
            raise NotAttestedError("the server asked for a token with another audience than its own challenge")
        return challenge

    async def _send(self, request: httpx.Request, client: httpx.AsyncClient) -> bytes:
        try:
            reply = await client.send(request, stream=True)
            try:
                content = await bounded(reply)
            finally:
                await reply.aclose()
        except httpx.HTTPError as exc:
            raise NotAttestedError(f"the server did not answer: {str(exc) or type(exc).__name__}") from exc
        if reply.status_code != 200:
            text = content[:MAX_ERROR_TEXT].decode(errors="replace")
            raise NotAttestedError(f"the server answered {reply.status_code}: {text}")
        return content

    def _url(self, path: str) -> str:
        return f"{self.server.rstrip('/')}/evidence{path}"

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Runs forever: attests at half of each proof's life, and after failures with increasing pauses."""
        failures = 0
        while True:
            try:
                proven = await self.attest()
            except GpuwardenError as exc:
                failures += 1
                pause = BACKOFF.pause(failures)
                log.warning("node not attested", node=self.node, problem=str(exc), again_in=pause.total_seconds())
                await sleep(BACKOFF.jittered(pause))
            else:
                log.info("node attested", node=self.node, hash=proven.hash, until=proven.until)
                failures = 0
                await sleep(BACKOFF.jittered(proven.half_life))


class PodReporter:
    """Polls the node's pods, and reports orphans that have ended and pods with other GPUs to the server."""

    def __init__(self, attester: Attester, pods: NodePods, clock: Callable[[], float] = time.monotonic) -> None:
        self._attester = attester
        self._pods = pods
        self._ends, self._differences = PodEndDetector(), DifferenceDetector()
        self._given: Mapping[str, Gpus] = {}
        self._clock = clock
        self._challenged_at: float | None = None

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Runs forever. Logs a problem when it starts and when it changes."""
        known = ""
        while True:
            try:
                is_complete = await self.step()
            except GpuwardenError as exc:
                if str(exc) != known:
                    log.warning("pods not reported", node=self._attester.node, problem=str(exc))
                known = str(exc)
            else:
                if known and is_complete:
                    log.info("pods reported again", node=self._attester.node)
                known = "" if is_complete else known
            await sleep(POLL_INTERVAL.total_seconds() * random.uniform(1.0, 1.2))  # noqa: S311 - jitter

    async def step(self) -> bool:
        """One round; returns whether it is complete. The server is asked only if there is something to report, and at
        most once per MIN_CHALLENGE_INTERVAL: until then the round is incomplete."""
        ended = await self._read_ended()
        if not (ended or self._given):
            return True
        now = self._clock()
        if self._challenged_at is not None and now - self._challenged_at < MIN_CHALLENGE_INTERVAL.total_seconds():
            return False
        self._challenged_at = now
        if self._given:
            await self._report_given(self._given)
            return not ended
        if reported := await self._attester.report(ended, self._read_ended):
            log.info("orphaned pods reported as ended", node=self._attester.node, pods=reported)
        return True

    async def _report_given(self, given: Mapping[str, Gpus]) -> None:
        some = {uid: gpus[:MAX_GIVEN] for uid, gpus in islice(given.items(), MAX_GIVEN)}
        log.warning("pods have other GPUs than those reserved for them", node=self._attester.node, pods=some)
        await self._attester.report_given(some)
        for uid in some:
            self._differences.reported(uid, self._clock())

    async def _read_ended(self) -> Collection[str]:
        began = self._clock()
        snapshot = await self._pods.snapshot()
        self._given = self._differences.observe(snapshot, self._clock())
        return self._ends.observe(snapshot, began, self._clock())


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
        raise NotAttestedError("the server's answer cannot be parsed") from exc


def node_identity(settings: Settings, *, needs_server: bool) -> NodeIdentity:
    """Raises GpuwardenError that names every missing setting, --server too if it is needed."""
    server, node = settings.server, settings.node
    trust_domain, workload_api = settings.spire_trust_domain, settings.spire_workload_api
    if node is None or trust_domain is None or workload_api is None or (needs_server and server is None):
        needed = {
            **({"--server": server} if needs_server else {}),
            "--node": node,
            "--spire-trust-domain": trust_domain,
            "--spire-workload-api": workload_api,
        }
        missing = [flag for flag, value in needed.items() if value is None]
        raise GpuwardenError(f"set {', '.join(missing)} as well")
    return NodeIdentity(node, JwtWorkloadApi(workload_api), EvidenceId(settings.evidence_id, trust_domain))


def attester(settings: Settings, identity: NodeIdentity) -> Attester | None:
    """None without a server. Raises GpuwardenError."""
    if settings.server is None:
        return None
    client_context(settings.server_ca)  # fails at startup if the CA file is unusable
    return Attester(settings.server, identity, trust=lambda: client_context(settings.server_ca))


def pod_reporter(settings: Settings, attester: Attester | None) -> PodReporter | None:
    """None without a runtime socket. Raises GpuwardenError."""
    if settings.runtime_socket is None:
        return None
    if attester is None:
        raise GpuwardenError("set --server as well: with --runtime-socket the ends of pods are reported to it")
    if settings.pod_uid is None:
        raise GpuwardenError("set --pod-uid as well: --runtime-socket must belong to the node of that pod")
    return PodReporter(attester, NodePods(settings.runtime_socket, settings.pod_resources_socket, settings.pod_uid))


def print_gpus() -> None:
    """Print the GPUs of this machine. Raises GpuwardenError."""
    for one in local_gpus().gpus:
        sys.stdout.write(msgspec.json.encode(asdict(one)).decode() + "\n")


async def log_gpus(node: str) -> None:
    """Log this node's GPUs beside its proofs; the server does not store them."""
    try:
        found = await asyncio.to_thread(local_gpus)
    except GpuwardenError as exc:
        log.info("GPUs of this node cannot be read", node=node, problem=str(exc))
        return
    gpus = [{"index": one.index, "uuid": one.uuid, "serial": one.serial} for one in found.gpus]
    log.info("GPUs of this node", node=node, driver=found.driver, gpus=gpus)


async def attest(settings: Settings, *, once: bool = False) -> None:
    """Run until SIGTERM or SIGINT, or attest once."""
    configure_logging(settings.log_level)
    identity = node_identity(settings, needs_server=once or settings.kubelet_plugins is None)
    one = attester(settings, identity)
    reporter = pod_reporter(settings, one)
    if one is not None and once:
        proven = await one.attest()
        log.info("node attested", node=one.node, hash=proven.hash, until=proven.until)
        return
    # Before there are sockets to remove.
    stop = stop_signal()
    await run_until(stop, work(settings, identity, one, reporter))


async def work(
    settings: Settings, identity: NodeIdentity, attester: Attester | None, reporter: PodReporter | None
) -> None:
    """Runs until an exception of the attester or the plugin."""
    async with AsyncExitStack() as stack:
        endless, beside = list[Awaitable[None]](), [log_gpus(identity.node)]
        sleep: Sleep = asyncio.sleep
        if reporter is not None:
            beside.append(reporter.run())
        if settings.kubelet_plugins is not None:
            # The client of the API server takes memory that other nodes need not spend.
            from webhook.node.dra_plugin import kubelet_plugin

            plugin = kubelet_plugin(settings, settings.kubelet_plugins, identity)
            parts = await stack.enter_async_context(plugin)
            endless.append(parts.closer.run())
            if settings.challenge_at_bind:
                beside.append(parts.watch.run())
                sleep = parts.challenges.sleep
        if attester is not None:
            endless.append(attester.run(sleep))
        await run_beside(endless, beside)


async def run_beside(endless: Iterable[Awaitable[None]], others: Iterable[Awaitable[None]]) -> None:
    """Runs all until an exception of the endless ones."""
    beside = [asyncio.ensure_future(one) for one in others]
    try:
        await asyncio.gather(*endless)
    finally:
        await cancel_and_wait(beside)
