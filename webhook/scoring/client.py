"""Calls a scorer by `POST /v1/score`. Equal questions share one call, and a failing scorer is not called for a
while."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
import structlog
from attrs import define, field

from webhook.core.hints import Advice
from webhook.core.pod import Toleration
from webhook.runtime.telemetry import Metrics
from webhook.runtime.tls.certificate_source import client_context
from webhook.scoring import ScoreRequest, ScorerUnavailableError

log = structlog.get_logger(__name__)

# An answer has some hundred bytes.
MAX_ANSWER: Final = 64 * 1024
MAX_LISTED: Final = 64
# Equal questions come in bursts, from the pods of one Job. Free GPUs change, so an answer is kept for a short time
# only.
FRESH_SECONDS: Final = 2.0
MAX_CACHED: Final = 1024
# After this many failures in a row the scorer is not called for PAUSE_SECONDS. Then one review probes it.
FAILURES: Final = 5
PAUSE_SECONDS: Final = 10.0

# Below the idle timeout of common servers (5 s), so that we close idle connections first.
IDLE_SECONDS: Final = 3.0
# No compression: a few bytes could expand to any size.
HEADERS: Final = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}

Score = Annotated[float, msgspec.Meta(ge=0, le=100)]
Listed = Annotated[list[str], msgspec.Meta(max_length=MAX_LISTED)]


class HintSelectorWire(msgspec.Struct, frozen=True, rename="camel"):
    node_selector: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_LISTED)] = {}
    tolerations: Annotated[list[Toleration], msgspec.Meta(max_length=MAX_LISTED)] = []


class AnswerWire(msgspec.Struct, frozen=True):
    """The members of an answer that are used. Others are ignored."""

    priority_score: Score = 50
    gpu_selector: HintSelectorWire = msgspec.field(default_factory=HintSelectorWire)
    avoid_co_locate_with: Listed = []
    terms: dict[str, Any] = {}

    def advice(self) -> Advice:
        chosen = self.terms.get("chosen_gpu")
        return Advice(
            score=self.priority_score,
            selector=tuple(self.gpu_selector.node_selector.items()),
            tolerations=tuple(self.gpu_selector.tolerations),
            avoid=tuple(self.avoid_co_locate_with),
            chosen=chosen[:253] if isinstance(chosen, str) and chosen.isprintable() else None,
        )


DECODER = msgspec.json.Decoder(AnswerWire)
ENCODER = msgspec.json.Encoder(order="sorted")


def body_of(question: ScoreRequest) -> bytes:
    features = question.features
    known = {
        "job_type": features.job_type,
        "tenant": features.tenant,
        "gpu_mem_gb": features.gpu_mem_gb,
        "batch_size": features.batch_size,
    }
    return ENCODER.encode(
        {
            "job_type": features.job_type,
            "features": {name: value for name, value in known.items() if value is not None},
            "candidate_gpu_types": question.candidates,
            "colocated_job_types": question.colocated,
        }
    )


class ScorerClient:
    """A scorer at a URL."""

    def __init__(
        self,
        url: str,
        timeout: float,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        roots: Path | None = None,
    ) -> None:
        """`roots` are the CAs of an https scorer, if not the system's. Raises BadRootsError."""
        self._url = url.rstrip("/") + "/v1/score"
        self._timeout = timeout
        self._metrics = metrics
        self._monotonic = monotonic
        self._breaker = Breaker(monotonic)
        self._cache: dict[bytes, tuple[float, Advice]] = {}
        self._pending: dict[bytes, asyncio.Task[Advice]] = {}
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS)
        # We enforce the deadline. httpx's timeouts apply to each step, so a trickle of bytes could outlast them all.
        self._http = httpx.AsyncClient(verify=client_context(roots), timeout=None, limits=limits, trust_env=False)  # noqa: S113

    async def close(self) -> None:
        for task in list(self._pending.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, ScorerUnavailableError):
                await task
        await self._http.aclose()

    async def advise(self, question: ScoreRequest, *, patience: float) -> Advice:
        body = body_of(question)
        cached = self._cache.get(body)
        if cached is not None and self._monotonic() < cached[0]:
            self._metrics.count_scoring("cached")
            return cached[1]
        task = self._pending.get(body)
        is_shared = task is not None
        if task is None:
            if not self._breaker.allows_request():
                self._metrics.count_scoring("resting")
                raise ScorerUnavailableError("resting", "the scorer has failed repeatedly and is not called for now")
            task = self._pending[body] = asyncio.create_task(self._ask(body))
            task.add_done_callback(lambda done: self._forget(body, done))
        advice = await self._wait_for(task, patience)
        if is_shared:
            self._metrics.count_scoring("shared")
        return advice

    def _forget(self, body: bytes, done: asyncio.Task[Advice]) -> None:
        del self._pending[body]
        if not done.cancelled():
            done.exception()  # marks the exception as retrieved if no review waits any more

    async def _wait_for(self, task: asyncio.Task[Advice], patience: float) -> Advice:
        """A review that has little time left does not wait for the answer. The call continues for the other reviews."""
        done, _ = await asyncio.wait([task], timeout=patience)
        if not done:
            if patience < self._timeout:
                self._metrics.count_scoring("late")
            raise ScorerUnavailableError("timeout", f"the scorer has not answered within {patience:.1f} s")
        return task.result()

    async def _ask(self, body: bytes) -> Advice:
        started = self._monotonic()
        try:
            advice = await self._request_in_time(body)
        except ScorerUnavailableError as exc:
            if exc.outcome == "refused":  # the scorer works, but rejects this question
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            self._count(exc.outcome, started)
            raise
        self._breaker.succeeded()
        self._count("answered", started)
        self._store(body, advice)
        return advice

    async def _request_in_time(self, body: bytes) -> Advice:
        """Enforces the timeout and translates every failure into ScorerUnavailableError."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._request_with_retry(body)
        except TimeoutError as exc:
            sentence = f"the scorer has not answered within {self._timeout:.1f} s"
            raise ScorerUnavailableError("timeout", sentence) from exc
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
            raise ScorerUnavailableError("unreachable", "the scorer cannot be reached") from exc

    def _count(self, outcome: str, started: float) -> None:
        self._metrics.count_scoring(outcome)
        self._metrics.observe_scoring(outcome, self._monotonic() - started)

    async def _request_with_retry(self, body: bytes) -> Advice:
        """Retries once if the connection breaks: an idle connection may have been closed, and the call changes
        nothing."""
        try:
            return await self._request(body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return await self._request(body)

    async def _request(self, body: bytes) -> Advice:
        async with self._http.stream("POST", self._url, content=body, headers=HEADERS) as reply:
            if reply.status_code != 200:
                outcome = "refused" if 400 <= reply.status_code < 500 else "broken"
                raise ScorerUnavailableError(outcome, f"the scorer answered {reply.status_code}")
            content = bytearray()
            async for chunk in reply.aiter_raw():
                content += chunk
                if len(content) > MAX_ANSWER:
                    raise ScorerUnavailableError("malformed", "the scorer's answer is too long")
        try:
            return DECODER.decode(bytes(content)).advice()
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise ScorerUnavailableError("malformed", "the scorer's answer is malformed") from exc

    def _store(self, body: bytes, advice: Advice) -> None:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[body] = (self._monotonic() + FRESH_SECONDS, advice)


@define
class Breaker:
    """Stops calls to a scorer after FAILURES failures in a row, then lets one call at a time probe it."""

    monotonic: Callable[[], float]
    failures: int = field(default=0, init=False)
    paused_until: float = field(default=0.0, init=False)

    def allows_request(self) -> bool:
        if self.failures < FAILURES:
            return True
        now = self.monotonic()
        if now < self.paused_until:
            return False
        self.paused_until = now + PAUSE_SECONDS  # this call is the probe; others wait for its outcome
        return True

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self) -> None:
        self.failures += 1
        if self.failures >= FAILURES:
            self.paused_until = self.monotonic() + PAUSE_SECONDS
