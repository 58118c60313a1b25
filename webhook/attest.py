"""`gpuwarden attest`, on every node: answers the server's challenges, and comes back when half of a proof is over."""

import asyncio
import random
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, Final, TypeVar

import httpx
import msgspec
import structlog
from attrs import asdict, frozen

from webhook.core.errors import GpuwardenError
from webhook.evidence.evidence_id import EvidenceId
from webhook.evidence.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.nonce import is_ours
from webhook.inventory.local_gpus import local_gpus
from webhook.settings import Settings
from webhook.telemetry import configure_logging
from webhook.tls import trusting

log = structlog.get_logger(__name__)

TIMEOUT: Final = httpx.Timeout(10.0)
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=1), timedelta(seconds=60)
# An answer of ours has some hundred bytes.
MAX_ANSWER: Final = 64 * 1024
MAX_SAID: Final = 300

T = TypeVar("T", bound=msgspec.Struct)
Sleep = Callable[[float], Awaitable[object]]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class NotAttestedError(GpuwardenError):
    """The node could not be proven this time."""


class Challenge(msgspec.Struct, frozen=True):
    """What the server asks."""

    nonce: str


class Proven(msgspec.Struct, frozen=True):
    """What the server then knows."""

    hash: str
    since: Moment
    until: Moment

    @property
    def half_life(self) -> timedelta:
        return max((self.until - self.since) / 2, FIRST_PAUSE)


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
        async with httpx.AsyncClient(verify=self.trust(), timeout=TIMEOUT, trust_env=False) as client:
            nonce = await self._challenge(client)
            token = await self._token(nonce)
            answer = await self._asked(client.build_request("POST", self._url(""), json={"token": token}), client)
        return decoded(answer, Proven)

    async def _challenge(self, client: httpx.AsyncClient) -> str:
        request = client.build_request("GET", self._url("/challenge"), params={"node": self.node})
        nonce = decoded(await self._asked(request, client), Challenge).nonce
        if not is_ours(nonce):
            raise NotAttestedError("the server asked for a token that would be good elsewhere")
        return nonce

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
        pause = FIRST_PAUSE
        while True:
            try:
                proven = await self.attest()
            except GpuwardenError as exc:
                log.warning("node not proven", node=self.node, problem=str(exc), again_in=pause.total_seconds())
                await sleep(jittered(pause))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                log.info("node proven", node=self.node, hash=proven.hash, until=proven.until)
                pause = FIRST_PAUSE
                await sleep(jittered(proven.half_life))


def jittered(pause: timedelta) -> float:
    """Somewhat less: many nodes that started together come back one by one."""
    return pause.total_seconds() * random.uniform(0.8, 1.0)  # noqa: S311 - to keep out of step


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
    needed = ("server", "node", "spire_trust_domain", "spire_workload_api")
    given = {name: getattr(settings, name) for name in needed}
    if missing := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]:
        raise GpuwardenError(f"set {', '.join(missing)} as well")
    trusting(settings.server_ca)  # what is wrong with it is said before the first attempt
    return Attester(
        server=given["server"],
        node=given["node"],
        workload_api=JwtWorkloadApi(given["spire_workload_api"]),
        evidence_id=EvidenceId(settings.evidence_id, given["spire_trust_domain"]),
        trust=lambda: trusting(settings.server_ca),
    )


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
    if once:
        proven = await one.attest()
        log.info("node proven", node=one.node, hash=proven.hash, until=proven.until)
        return
    running = asyncio.ensure_future(one.run())
    telling = asyncio.ensure_future(tell_gpus(one.node))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await asyncio.wait([running])
    telling.cancel()
    if not running.cancelled():
        running.result()
