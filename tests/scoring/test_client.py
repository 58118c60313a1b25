"""Equal questions share one call, only well-formed answers count, and a failing scorer is not called for a while."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tests.scoring.doubles import BAD, FakeScorer, good, scoring
from webhook.core.hints import Advice, Features
from webhook.runtime.telemetry import Metrics
from webhook.runtime.tls.certificate_source import BadRootsError
from webhook.scoring import ScoreRequest, ScorerUnavailableError
from webhook.scoring.client import FAILURES, FRESH_SECONDS, PAUSE_SECONDS, ScorerClient

QUESTION = ScoreRequest(Features("train-bert", "team-a", 40.0, 16), ("A100-40GB", "A100-80GB"), ("train-llama",))


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Caller:
    def __init__(self, url: str, timeout: float = 30.0, roots: Path | None = None) -> None:
        self.metrics, self.clock = Metrics(), FakeClock()
        self.client = ScorerClient(url, timeout, self.metrics, self.clock, roots=roots)

    async def ask(self, job_type: str = "train-bert", patience: float = 30.0) -> Advice:
        question = ScoreRequest(Features(job_type), QUESTION.candidates)
        return await self.client.advise(question, patience=patience)

    async def outcome(self, job_type: str = "train-bert", patience: float = 30.0) -> str:
        try:
            await self.ask(job_type, patience)
        except ScorerUnavailableError as exc:
            return exc.outcome
        return "answered"

    def count(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("gpuwarden_scoring_total", {"outcome": outcome}) or 0.0


@asynccontextmanager
async def calling(scorer: FakeScorer, timeout: float = 30.0, roots: Path | None = None) -> AsyncIterator[Caller]:
    caller = Caller(scorer.url, timeout, roots)
    try:
        yield caller
    finally:
        await caller.client.close()


async def test_request_has_the_scorers_format() -> None:
    async with scoring() as scorer, calling(scorer) as caller:
        advice = await caller.client.advise(QUESTION, patience=30.0)
    assert scorer.asked == [
        {
            "job_type": "train-bert",
            "features": {"job_type": "train-bert", "tenant": "team-a", "gpu_mem_gb": 40.0, "batch_size": 16},
            "candidate_gpu_types": ["A100-40GB", "A100-80GB"],
            "colocated_job_types": ["train-llama"],
        }
    ]
    assert (advice.score_text, advice.chosen_gpu, advice.avoid) == ("85", "A100-80GB", ("train-llama",))


async def test_unknown_features_are_omitted() -> None:
    async with scoring() as scorer, calling(scorer) as caller:
        await caller.ask()
    assert scorer.asked[0]["features"] == {"job_type": "train-bert", "tenant": "default"}


async def test_missing_members_get_defaults_and_unknown_ones_are_ignored() -> None:
    async with scoring(body=b'{"more": {"a": [NULL]}}'.replace(b"NULL", b"null")) as scorer, calling(scorer) as caller:
        assert await caller.ask() == Advice(50)


async def test_explicit_chosen_gpu_takes_precedence_over_the_selector() -> None:
    async with scoring(body=good(terms={"chosen_gpu": "H100-80GB"})) as scorer, calling(scorer) as caller:
        assert (await caller.ask()).chosen_gpu == "H100-80GB"


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_malformed_answer_is_rejected(body: bytes) -> None:
    async with scoring(body=body) as scorer, calling(scorer) as caller:
        assert await caller.outcome() == "malformed"
        assert caller.count("malformed") == 1


@pytest.mark.parametrize(("status", "outcome"), [(201, "broken"), (302, "broken"), (400, "refused"), (503, "broken")])
async def test_status_other_than_200_is_a_failure(status: int, outcome: str) -> None:
    async with scoring(status=status) as scorer, calling(scorer) as caller:
        assert await caller.outcome() == outcome


async def test_unreachable_scorer_and_closed_connection_are_failures() -> None:
    async with scoring(hangs_up=True) as scorer, calling(scorer) as caller:
        assert await caller.outcome() == "unreachable"
    async with calling(scorer) as caller:
        assert await caller.outcome() == "unreachable"


async def test_closed_idle_connection_is_retried() -> None:
    async with scoring() as scorer, calling(scorer) as caller:
        await caller.ask("first")
        scorer.hangs_up_once = True
        assert await caller.outcome("second") == "answered"
        assert scorer.connections == 2


async def test_compressed_answer_is_not_decompressed() -> None:
    packed = scoring(body=gzip.compress(good()), more_headers="content-encoding: gzip\r\n")
    async with packed as scorer, calling(scorer) as caller:
        assert await caller.outcome() == "malformed"


@pytest.mark.defect("scoring-15")
async def test_advice_is_abandoned_when_the_reviews_time_is_over() -> None:
    async with scoring(delay=60) as scorer, calling(scorer, timeout=0.2) as caller:
        started = time.monotonic()
        assert await caller.outcome() == "timeout"
        assert await caller.outcome("other", patience=0.05) == "timeout"
        assert time.monotonic() - started < 20
        assert caller.count("late") == 1


async def test_short_deadline_of_one_review_does_not_cancel_the_call_for_others() -> None:
    async with scoring(crowd=2) as scorer, calling(scorer) as caller:
        patient = asyncio.create_task(caller.ask())
        assert await caller.outcome(patience=0.01) == "timeout"
        scorer.crowded.set()
        assert (await patient).score == 85
    assert len(scorer.asked) == 1


async def test_equal_questions_share_one_call_and_its_cached_answer() -> None:
    async with scoring(crowd=2) as scorer, calling(scorer) as caller:
        asking = asyncio.gather(*(caller.ask() for _ in range(20)))
        await asyncio.sleep(0)  # all have begun
        scorer.crowded.set()
        await asking
        await caller.ask()
        assert (len(scorer.asked), caller.count("shared"), caller.count("cached")) == (1, 19, 1)
        caller.clock.now += FRESH_SECONDS
        await caller.ask()
        assert len(scorer.asked) == 2


async def test_connections_are_reused() -> None:
    async with scoring() as scorer, calling(scorer) as caller:
        for number in range(5):
            await caller.ask(f"job-{number}")
        assert (len(scorer.asked), scorer.connections) == (5, 1)


async def test_breaker_opens_after_repeated_failures_and_probes_with_one_call() -> None:
    async with scoring(status=500) as scorer, calling(scorer) as caller:
        for number in range(FAILURES):
            assert await caller.outcome(f"job-{number}") == "broken"
        assert await caller.outcome("next") == "resting"
        caller.clock.now += PAUSE_SECONDS
        assert sorted(await asyncio.gather(caller.outcome("a"), caller.outcome("b"))) == ["broken", "resting"]
        assert len(scorer.asked) == FAILURES + 1
        scorer.status = 200
        caller.clock.now += PAUSE_SECONDS
        assert [await caller.outcome(name) for name in "cde"] == ["answered"] * 3


async def test_refused_question_does_not_open_the_breaker() -> None:
    async with scoring(status=422) as scorer, calling(scorer) as caller:
        for number in range(2 * FAILURES):
            assert await caller.outcome(f"job-{number}") == "refused"
    assert len(scorer.asked) == 2 * FAILURES


@pytest.mark.parametrize(("by", "outcome"), [("its-own-ca", "answered"), ("the-system", "unreachable")])
async def test_https_scorer_is_verified_by_the_configured_cas(tmp_path: Path, by: str, outcome: str) -> None:
    ca, roots = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(roots)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with scoring(tls) as scorer, calling(scorer, roots=roots if by == "its-own-ca" else None) as caller:
        assert await caller.outcome() == outcome


def test_file_without_a_ca_is_an_error_that_names_it(tmp_path: Path) -> None:
    roots = tmp_path / "ca.pem"
    roots.write_text("nothing")
    with pytest.raises(BadRootsError, match="holds no CA certificate in PEM"):
        ScorerClient("https://scorer", 1.0, Metrics(), roots=roots)
