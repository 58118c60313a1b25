"""This process's X.509-SVID and the roots of its trust domain, from the SPIFFE Workload API on a local socket."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import structlog
from attrs import define, field
from grpclib.client import Channel

from webhook.evidence.protobuf import as_bytes, fields_of
from webhook.evidence.rpc import CallFailedError, RawCodec, faults_of, listen
from webhook.evidence.spire.x509_svid import X509Svid
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

FETCH_X509_SVID = "/SpiffeWorkloadAPI/FetchX509SVID"
# A server must refuse callers without this header: a browser cannot send it.
SECURITY_HEADER = {"workload.spiffe.io": "true"}
FIRST_ANSWER = timedelta(seconds=5)
RETRY = timedelta(seconds=1)


class NoIdentityError(CallFailedError):
    """The Workload API has provided no valid SVID."""


async def x509_svids(path: str) -> AsyncIterator[tuple[X509Svid, ...]]:
    """All SVIDs of this process, at once and after every rotation. Ends or fails when the Workload API does."""
    with faults_of("the Workload API"):
        async with Channel(path=path, codec=RawCodec()) as channel:
            async for message in listen(channel, FETCH_X509_SVID, b"", SECURITY_HEADER):
                entries = [as_bytes(value) for number, value in fields_of(message) if number == 1]
                yield tuple(map(X509Svid.parse, entries))


@define(eq=False, repr=False)
class OwnIdentity:
    """The SVID to present, kept current by a task that the first call starts.

    The last received SVID stays in use while the Workload API is unavailable, until its own expiry.
    """

    _path: str
    _trust_domain: str
    _clock: Clock
    _own_id: str | None = field(default=None, kw_only=True)
    _first_answer: timedelta = field(default=FIRST_ANSWER, kw_only=True)
    _retry: timedelta = field(default=RETRY, kw_only=True)
    _svid: X509Svid | None = field(default=None, init=False)
    _has_answer: asyncio.Event = field(factory=asyncio.Event, init=False)
    _problem: str = field(default="the Workload API: no answer in time", init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def current(self) -> X509Svid:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(self._first_answer.total_seconds()):
                await self._has_answer.wait()
        except TimeoutError as exc:
            raise NoIdentityError(self._problem) from exc
        if self._svid is None:
            raise NoIdentityError(self._problem)
        if self._svid.not_after <= self._clock():
            self._task.cancel()  # it has not delivered the next one
            self._has_answer.clear()
            raise NoIdentityError(f"our own SVID has expired and there is no new one: {self._problem}")
        return self._svid

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                async for svids in x509_svids(self._path):
                    self._update(svids)
                self._record_problem("the Workload API: closed the connection")
            except CallFailedError as exc:
                self._record_problem(str(exc))
            await asyncio.sleep(self._retry.total_seconds())

    def _update(self, svids: tuple[X509Svid, ...]) -> None:
        chosen = next((one for one in svids if self._own_id in (None, one.spiffe_id)), None)
        if chosen is None:
            self._record_problem(f"the Workload API: no SVID {self._own_id or ''} for us")
        elif chosen.trust_domain != self._trust_domain:
            self._record_problem(
                f"the Workload API: {chosen.spiffe_id} is not of the trust domain {self._trust_domain}"
            )
        else:
            log.info("own SVID received", spiffe_id=chosen.spiffe_id, not_after=chosen.not_after.isoformat())
            self._svid, self._problem = chosen, "the Workload API: no new SVID"
        self._has_answer.set()

    def _record_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("no SVID from the Workload API, the last one stays in use", problem=problem)
        self._problem = problem
        self._has_answer.set()
