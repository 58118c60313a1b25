"""`gpuwarden attest` as the kubelet's plugin for proof devices.

The kubelet finds the registration socket in its directory of plugins, and calls the other socket before it starts a
pod with a proof device, and after such a pod has ended. Without the plugin it starts no such pod.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from attrs import field, frozen
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream

from webhook.core.errors import GpuwardenError
from webhook.core.proof_devices import DRIVER
from webhook.evidence.rpc import RawCodec
from webhook.kube.client import connect
from webhook.kube.requests import RateLimit, RateLimitedClient
from webhook.kube.resource_claims import ResourceClaims
from webhook.kube.watch import Watch
from webhook.node.asked_challenges import AskedChallenges
from webhook.node.claim_check import ClaimCheck
from webhook.node.device_closer import DeviceCloser, NodeSlices
from webhook.node.dra_messages import (
    GET_INFO,
    NOTIFY_STATUS,
    SERVICES,
    WATCH_HEALTH,
    claims_in,
    plugin_info,
    prepared,
    registration_problem,
    unprepared,
)
from webhook.node.evidence_records import EvidenceRecords
from webhook.node.node_identity import NodeIdentity
from webhook.runtime.clock import utc_now
from webhook.runtime.process import cancel_and_wait
from webhook.runtime.settings import Settings

log = structlog.get_logger(__name__)

REGISTRATION: Final = Path("plugins_registry", f"{DRIVER}-reg.sock")
SERVICE: Final = Path("plugins", DRIVER, "dra.sock")
RECORDS: Final = Path("plugins", DRIVER, "records")
# A request has some hundred bytes.
MAX_REQUEST: Final = 256 * 1024
# The kubelet waits for 45 s, and calls again a minute later.
DEADLINE: Final = 20.0
# The kubelet makes one call at a time for each pod of its node. Most calls wait here for the API server or the
# Workload API, and the work of those that do not is limited by `MAX_READS`.
MAX_CALLS: Final = 256
# The API server responds in milliseconds.
READ_TIMEOUT: Final = 5.0
READS_PER_SECOND: Final = 20.0
READS_AT_ONCE: Final = 16
# How long calls in progress may delay the end of the process.
CLOSE_TIMEOUT: Final = 1.0

Call = Callable[[bytes], Awaitable[bytes]]


class NotListeningError(GpuwardenError):
    """A socket of the plugin cannot be created."""


@frozen(eq=False)
class BoundedCalls:
    """Calls of one socket by name, limited in number, size and time."""

    calls: Mapping[str, Call]
    slots: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(MAX_CALLS))

    def __mapping__(self) -> dict[str, Handler]:
        return {
            name: Handler(self._handler(call), Cardinality.UNARY_UNARY, bytes, bytes)
            for name, call in self.calls.items()
        }

    def _handler(self, call: Call) -> Callable[["Stream[bytes, bytes]"], Awaitable[None]]:
        async def handle(stream: "Stream[bytes, bytes]") -> None:
            try:
                async with asyncio.timeout(DEADLINE), self.slots:
                    answer = await call(await bounded_request(stream))
            except TimeoutError as exc:
                raise GRPCError(Status.DEADLINE_EXCEEDED, f"no answer within {DEADLINE:g} s") from exc
            except GpuwardenError as exc:
                raise GRPCError(Status.INVALID_ARGUMENT, str(exc)) from exc
            await stream.send_message(answer)

        return handle


async def bounded_request(stream: "Stream[bytes, bytes]") -> bytes:
    """The message of a call. grpclib reads messages of any length, so this reads the frame itself."""
    frame = stream._stream
    prefix = await frame.recv_data(5)
    size = int.from_bytes(prefix[1:])
    if len(prefix) != 5 or prefix[0] != 0 or size > MAX_REQUEST:
        raise GRPCError(Status.INVALID_ARGUMENT, f"the request is not a plain message of at most {MAX_REQUEST} bytes")
    return await frame.recv_data(size)


@frozen
class SilentHealth:
    """The stream with the health of devices, which proof devices do not have. Without it, the kubelet logs an error
    every five seconds."""

    def __mapping__(self) -> dict[str, Handler]:
        return {WATCH_HEALTH: Handler(self._watch, Cardinality.UNARY_STREAM, bytes, bytes)}

    async def _watch(self, stream: "Stream[bytes, bytes]") -> None:
        await bounded_request(stream)
        await asyncio.Event().wait()


@frozen(eq=False)
class ProofPlugin:
    """The calls of the kubelet."""

    directory: Path
    check: ClaimCheck

    @property
    def registration(self) -> BoundedCalls:
        return BoundedCalls({GET_INFO: self._info, NOTIFY_STATUS: self._registered})

    @property
    def service(self) -> BoundedCalls:
        calls = {"NodePrepareResources": self._prepare, "NodeUnprepareResources": self._unprepare}
        return BoundedCalls({f"{service}/{name}": call for service in SERVICES for name, call in calls.items()})

    async def _info(self, _: bytes) -> bytes:
        return plugin_info(DRIVER, str(self.directory / SERVICE))

    async def _registered(self, request: bytes) -> bytes:
        problem = registration_problem(request)
        if problem is None:
            log.info("registered with the kubelet", driver=DRIVER)
        else:
            log.warning("not registered with the kubelet", driver=DRIVER, problem=problem)
        return b""

    async def _prepare(self, request: bytes) -> bytes:
        return prepared(await self.check.prepare(claims_in(request)))

    async def _unprepare(self, request: bytes) -> bytes:
        uids = [one.uid for one in claims_in(request)]
        if self.check.records is not None:
            for uid in uids:
                self.check.records.remove(uid)
        return unprepared(uids)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """The kubelet calls the plugin as long as the registration socket exists. Raises NotListeningError."""
        async with (
            serving(self.directory / SERVICE, self.service, SilentHealth()),
            serving(self.directory / REGISTRATION, self.registration),
        ):
            yield


@asynccontextmanager
async def serving(path: Path, *services: BoundedCalls | SilentHealth) -> AsyncIterator[None]:
    """Answers calls at the socket, which replaces the one of an earlier process. At the end it is removed, unless a
    later process has replaced it. Raises NotListeningError."""
    server = Server(services, codec=RawCodec())
    try:
        listener, inode = bound_socket(path)
        await server.start(sock=listener)
        hidden(path).replace(path)
    except OSError as exc:
        raise NotListeningError(f"{path}: {exc.strerror or exc}") from exc
    try:
        yield
    finally:
        remove_socket(path, inode)
        server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await server.wait_closed()


def hidden(path: Path) -> Path:
    """The kubelet ignores names that begin with a dot. A socket gets its name when it answers."""
    return path.with_name(f".{path.name}")


def bound_socket(path: Path) -> tuple[socket.socket, int]:
    """A socket for root only, under its hidden name, and its inode."""
    path.parent.mkdir(mode=0o750, exist_ok=True)
    hidden(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(hidden(path)))
        hidden(path).chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener, hidden(path).stat().st_ino


def remove_socket(path: Path, inode: int) -> None:
    with suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


@frozen(eq=False)
class NodeParts:
    """What works beside the plugin. `watch` tells `challenges` when the node has to answer one."""

    closer: DeviceCloser
    challenges: AskedChallenges
    watch: Watch


def evidence_records(
    settings: Settings, directory: Path, slices: NodeSlices, identity: NodeIdentity
) -> EvidenceRecords | None:
    """None if containers get no records."""
    if settings.cdi_directory is None:
        return None
    svid_of = identity.workload_api.x509_svid
    return EvidenceRecords(directory / RECORDS, settings.cdi_directory, slices, svid_of, utc_now)


@asynccontextmanager
async def kubelet_plugin(settings: Settings, directory: Path, identity: NodeIdentity) -> AsyncIterator[NodeParts]:
    """The plugin in the kubelet's directory, and what works beside it. Raises GpuwardenError."""
    async with await connect(settings) as api:
        limit = RateLimit(READS_PER_SECOND, READS_AT_ONCE, time.monotonic)
        claims = ResourceClaims(RateLimitedClient(api, limit, READ_TIMEOUT))
        slices = NodeSlices(identity.node, RateLimitedClient(api, RateLimit(READS_PER_SECOND, 1, time.monotonic)))
        records = evidence_records(settings, directory, slices, identity)
        check = ClaimCheck(identity, claims, utc_now, settings.clock_skew, records)
        async with ProofPlugin(directory, check).listening():
            log.info("waiting for the kubelet", driver=DRIVER, directory=str(directory))
            cleaning = asyncio.create_task(check.remove_stale_records())
            asked = AskedChallenges()
            try:
                yield NodeParts(DeviceCloser(slices, utc_now), asked, asked.watch(api, identity.node))
            finally:
                await cancel_and_wait([cleaning])
