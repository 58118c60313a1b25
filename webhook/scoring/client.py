"""Asks a scorer by `POST /v1/score`: one pool of connections, one call for equal questions, none while it is down."""

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
# Equal questions come in bursts: the pods of one Job. What is free changes, so an answer is soon old.
FRESH_SECONDS: Final = 2.0
MAX_KEPT: Final = 1024
# So many failures one after the other, and for so long nobody is asked; then one review is the probe.
FAILURES: Final = 5
REST_SECONDS: Final = 10.0

# Servers end what is idle after 5 s and more; whoever ends it first is not surprised.
IDLE_SECONDS: Final = 3.0
# Not packed: a few bytes could unpack to anything.
HEADERS: Final = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}

Score = Annotated[float, msgspec.Meta(ge=0, le=100)]
Listed = Annotated[list[str], msgspec.Meta(max_length=MAX_LISTED)]


class HintSelectorWire(msgspec.Struct, frozen=True, rename="camel"):
    node_selector: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_LISTED)] = {}
    tolerations: Annotated[list[Toleration], msgspec.Meta(max_length=MAX_LISTED)] = []


class AnswerWire(msgspec.Struct, frozen=True):
    """What is read of an answer, each member of its own type; others may be there."""

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
        self._kept: dict[bytes, tuple[float, Advice]] = {}
        self._asking: dict[bytes, asyncio.Task[Advice]] = {}
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS)
        # The deadline is ours to keep: httpx's own are per step, and a trickle of bytes would outlast them all.
        self._http = httpx.AsyncClient(verify=client_context(roots), timeout=None, limits=limits, trust_env=False)  # noqa: S113

    async def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, ScorerUnavailableError):
                await task
        await self._http.aclose()

    async def advise(self, question: ScoreRequest, *, patience: float) -> Advice:
        body = body_of(question)
        kept = self._kept.get(body)
        if kept is not None and self._monotonic() < kept[0]:
            self._metrics.count_scoring("cached")
            return kept[1]
        task = self._asking.get(body)
        is_shared = task is not None
        if task is None:
            if not self._breaker.lets_ask():
                self._metrics.count_scoring("resting")
                raise ScorerUnavailableError("resting", "the scorer has failed again and again and is left alone")
            task = self._asking[body] = asyncio.create_task(self._asked(body))
            task.add_done_callback(lambda done: self._forget(body, done))
        advice = await self._awaited(task, patience)
        if is_shared:
            self._metrics.count_scoring("shared")
        return advice

    def _forget(self, body: bytes, done: asyncio.Task[Advice]) -> None:
        del self._asking[body]
        if not done.cancelled():
            done.exception()  # it may be that nobody waits for it any more

    async def _awaited(self, task: asyncio.Task[Advice], patience: float) -> Advice:
        """Who has less time goes on without; the call goes on for the others."""
        done, _ = await asyncio.wait([task], timeout=patience)
        if not done:
            if patience < self._timeout:
                self._metrics.count_scoring("late")
            raise ScorerUnavailableError("timeout", f"the scorer has not answered within {patience:.1f} s")
        return task.result()

    async def _asked(self, body: bytes) -> Advice:
        started = self._monotonic()
        try:
            advice = await self._understood(body)
        except ScorerUnavailableError as exc:
            if exc.outcome == "refused":  # it is there, and does not like this question
                self._breaker.succeeded()
            else:
                self._breaker.failed()
            self._count(exc.outcome, started)
            raise
        self._breaker.succeeded()
        self._count("answered", started)
        self._keep(body, advice)
        return advice

    async def _understood(self, body: bytes) -> Advice:
        """Within the time that there is; whatever goes wrong in the words of this wall."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._answered(body)
        except TimeoutError as exc:
            sentence = f"the scorer has not answered within {self._timeout:.1f} s"
            raise ScorerUnavailableError("timeout", sentence) from exc
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
            raise ScorerUnavailableError("unreachable", "the scorer cannot be reached") from exc

    def _count(self, outcome: str, started: float) -> None:
        self._metrics.count_scoring(outcome)
        self._metrics.observe_scoring(outcome, self._monotonic() - started)

    async def _answered(self, body: bytes) -> Advice:
        """A question changes nothing, so it may be put again: a connection that was kept may have ended meanwhile."""
        try:
            return await self._answer(body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return await self._answer(body)

    async def _answer(self, body: bytes) -> Advice:
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
            raise ScorerUnavailableError("malformed", "the scorer's answer makes no sense") from exc

    def _keep(self, body: bytes, advice: Advice) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[body] = (self._monotonic() + FRESH_SECONDS, advice)


@define
class Breaker:
    """Leaves a scorer alone that has failed again and again, and then tries it with one question at a time."""

    monotonic: Callable[[], float]
    failures: int = field(default=0, init=False)
    rests_until: float = field(default=0.0, init=False)

    def lets_ask(self) -> bool:
        if self.failures < FAILURES:
            return True
        now = self.monotonic()
        if now < self.rests_until:
            return False
        self.rests_until = now + REST_SECONDS  # this question is the probe; the others wait for what becomes of it
        return True

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self) -> None:
        self.failures += 1
        if self.failures >= FAILURES:
            self.rests_until = self.monotonic() + REST_SECONDS
