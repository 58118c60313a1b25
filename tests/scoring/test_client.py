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

from tests.scoring.doubles import BAD, Double, good, scoring
from webhook.core.hints import Advice, Features
from webhook.runtime.telemetry import Metrics
from webhook.runtime.tls.certificate_source import BadRootsError
from webhook.scoring import ScoreRequest, ScorerUnavailableError
from webhook.scoring.client import FAILURES, FRESH_SECONDS, PAUSE_SECONDS, ScorerClient

QUESTION = ScoreRequest(Features("train-bert", "team-a", 40.0, 16), ("A100-40GB", "A100-80GB"), ("train-llama",))


class Hand:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asker:
    def __init__(self, url: str, timeout: float = 30.0, roots: Path | None = None) -> None:
        self.metrics, self.hand = Metrics(), Hand()
        self.client = ScorerClient(url, timeout, self.metrics, self.hand, roots=roots)

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
async def asking(double: Double, timeout: float = 30.0, roots: Path | None = None) -> AsyncIterator[Asker]:
    asker = Asker(double.url, timeout, roots)
    try:
        yield asker
    finally:
        await asker.client.close()


async def test_request_has_the_scorers_format() -> None:
    async with scoring() as double, asking(double) as asker:
        advice = await asker.client.advise(QUESTION, patience=30.0)
    assert double.asked == [
        {
            "job_type": "train-bert",
            "features": {"job_type": "train-bert", "tenant": "team-a", "gpu_mem_gb": 40.0, "batch_size": 16},
            "candidate_gpu_types": ["A100-40GB", "A100-80GB"],
            "colocated_job_types": ["train-llama"],
        }
    ]
    assert (advice.score_text, advice.chosen_gpu, advice.avoid) == ("85", "A100-80GB", ("train-llama",))


async def test_unknown_features_are_omitted() -> None:
    async with scoring() as double, asking(double) as asker:
        await asker.ask()
    assert double.asked[0]["features"] == {"job_type": "train-bert", "tenant": "default"}


async def test_missing_members_get_defaults_and_unknown_ones_are_ignored() -> None:
    async with scoring(body=b'{"more": {"a": [NULL]}}'.replace(b"NULL", b"null")) as double, asking(double) as asker:
        assert await asker.ask() == Advice(50)


async def test_explicit_chosen_gpu_takes_precedence_over_the_selector() -> None:
    async with scoring(body=good(terms={"chosen_gpu": "H100-80GB"})) as double, asking(double) as asker:
        assert (await asker.ask()).chosen_gpu == "H100-80GB"


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_malformed_answer_is_rejected(body: bytes) -> None:
    async with scoring(body=body) as double, asking(double) as asker:
        assert await asker.outcome() == "malformed"
        assert asker.count("malformed") == 1


@pytest.mark.parametrize(("status", "outcome"), [(201, "broken"), (302, "broken"), (400, "refused"), (503, "broken")])
async def test_status_other_than_200_is_a_failure(status: int, outcome: str) -> None:
    async with scoring(status=status) as double, asking(double) as asker:
        assert await asker.outcome() == outcome


async def test_unreachable_scorer_and_closed_connection_are_failures() -> None:
    async with scoring(hangs_up=True) as double, asking(double) as asker:
        assert await asker.outcome() == "unreachable"
    async with asking(double) as asker:
        assert await asker.outcome() == "unreachable"


async def test_closed_idle_connection_is_retried() -> None:
    async with scoring() as double, asking(double) as asker:
        await asker.ask("first")
        double.hangs_up_once = True
        assert await asker.outcome("second") == "answered"
        assert double.connections == 2


async def test_compressed_answer_is_not_decompressed() -> None:
    packed = scoring(body=gzip.compress(good()), more_headers="content-encoding: gzip\r\n")
    async with packed as double, asking(double) as asker:
        assert await asker.outcome() == "malformed"


@pytest.mark.defect("S3-15")
async def test_advice_is_abandoned_when_the_reviews_time_is_over() -> None:
    async with scoring(delay=60) as double, asking(double, timeout=0.2) as asker:
        started = time.monotonic()
        assert await asker.outcome() == "timeout"
        assert await asker.outcome("other", patience=0.05) == "timeout"
        assert time.monotonic() - started < 20
        assert asker.count("late") == 1


async def test_short_deadline_of_one_review_does_not_cancel_the_call_for_others() -> None:
    async with scoring(delay=0.5) as double, asking(double) as asker:
        patient = asyncio.create_task(asker.ask())
        assert await asker.outcome(patience=0.01) == "timeout"
        assert (await patient).score == 85
    assert len(double.asked) == 1


async def test_equal_questions_share_one_call_and_its_cached_answer() -> None:
    async with scoring(delay=0.1) as double, asking(double) as asker:
        await asyncio.gather(*(asker.ask() for _ in range(20)))
        await asker.ask()
        assert (len(double.asked), asker.count("shared"), asker.count("cached")) == (1, 19, 1)
        asker.hand.now += FRESH_SECONDS
        await asker.ask()
        assert len(double.asked) == 2


async def test_connections_are_reused() -> None:
    async with scoring() as double, asking(double) as asker:
        for number in range(5):
            await asker.ask(f"job-{number}")
        assert (len(double.asked), double.connections) == (5, 1)


async def test_breaker_opens_after_repeated_failures_and_probes_with_one_call() -> None:
    async with scoring(status=500) as double, asking(double) as asker:
        for number in range(FAILURES):
            assert await asker.outcome(f"job-{number}") == "broken"
        assert await asker.outcome("next") == "resting"
        asker.hand.now += PAUSE_SECONDS
        assert sorted(await asyncio.gather(asker.outcome("a"), asker.outcome("b"))) == ["broken", "resting"]
        assert len(double.asked) == FAILURES + 1
        double.status = 200
        asker.hand.now += PAUSE_SECONDS
        assert [await asker.outcome(name) for name in "cde"] == ["answered"] * 3


async def test_refused_question_does_not_open_the_breaker() -> None:
    async with scoring(status=422) as double, asking(double) as asker:
        for number in range(2 * FAILURES):
            assert await asker.outcome(f"job-{number}") == "refused"
    assert len(double.asked) == 2 * FAILURES


@pytest.mark.parametrize(("by", "outcome"), [("its-own-ca", "answered"), ("the-system", "unreachable")])
async def test_https_scorer_is_verified_by_the_configured_cas(tmp_path: Path, by: str, outcome: str) -> None:
    ca, roots = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(roots)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with scoring(tls) as double, asking(double, roots=roots if by == "its-own-ca" else None) as asker:
        assert await asker.outcome() == outcome


def test_file_without_a_ca_is_an_error_that_names_it(tmp_path: Path) -> None:
    roots = tmp_path / "ca.pem"
    roots.write_text("nothing")
    with pytest.raises(BadRootsError, match="holds no CA certificate in PEM"):
        ScorerClient("https://scorer", 1.0, Metrics(), roots=roots)
