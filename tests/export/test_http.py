"""Posts to a real server that fails, hangs or truncates on request."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.export.endpoint import BREAK_OFF, HANG, TRUNCATE, Endpoint, Order, listening
from tests.export.records import NOW, batch, later, use
from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.http import TRIES, HttpExporter
from webhook.export.records import Batch
from webhook.export.targets import HttpTarget


class Slept:
    """Does not wait, and records how long it would have waited."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def clock() -> datetime:
    return NOW


@asynccontextmanager
async def posting(
    endpoint: Endpoint, slept: Slept | None = None, seconds: float = 20, token: str | None = None
) -> AsyncIterator[HttpExporter]:
    target = HttpTarget(f"{endpoint.url}/data", timedelta(seconds=seconds), token, proxied=False)
    exporter = HttpExporter(target, clock, slept or Slept())
    yield exporter
    await exporter.close()


async def test_batch_is_one_request_with_the_headers_and_body_of_gpuid() -> None:
    async with listening() as endpoint, posting(endpoint, token="example-token") as exporter:
        await exporter.export(batch())
    (request,) = endpoint.requests
    assert (request.method, request.path) == ("POST", "/data")
    wanted = {
        "content-type": "application/json",
        "user-agent": "gpuid-http-exporter/1.0",
        "x-records-count": "2",
        "x-timestamp": "2026-01-01T00:00:00Z",
        "authorization": "Bearer example-token",
        "idempotency-key": "batch-0",
        "x-record-kind": "reading",
    }
    assert {name: request.headers.get(name) for name in wanted} == wanted
    first, second = json.loads(request.body)
    assert list(first)[:7] == ["cluster", "node", "machine", "source", "chassis", "gpu", "time"]
    assert [first["gpu"], second["gpu"]] == ["1760000000011", "1760000000012"]


async def test_changed_token_file_is_used_for_the_next_request(tmp_path: Path) -> None:
    """An unreadable file, or a token invalid in a header, changes nothing."""
    file = tmp_path / "token"
    async with listening() as endpoint:
        target = HttpTarget(f"{endpoint.url}/data", timedelta(seconds=20), "first", file, proxied=False)
        exporter = HttpExporter(target, clock, Slept())
        for content in (b"first\n", b"second\n", None, b"\xff", b"two\nlines", "größer".encode()):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
            await exporter.export(batch())
        await exporter.close()
    said = [request.headers["authorization"].removeprefix("Bearer ") for request in endpoint.requests]
    assert said == ["first", "second", "first", "first", "first", "first"]


async def test_without_a_token_none_is_sent() -> None:
    async with listening() as endpoint, posting(endpoint) as exporter:
        await exporter.export(batch())
    assert "authorization" not in endpoint.requests[0].headers


async def test_uses_are_sent_in_a_separate_request_with_its_own_key() -> None:
    async with listening() as endpoint, posting(endpoint) as exporter:
        await exporter.export(batch(uses=(use(until=later(60)),)))
    kinds = [(request.headers["x-record-kind"], request.headers["idempotency-key"]) for request in endpoint.requests]
    assert kinds == [("reading", "batch-0"), ("use", "batch-0/use")]
    assert json.loads(endpoint.requests[1].body)[0]["reservation"] == "reservation-0"


async def test_kinds_without_records_are_not_sent() -> None:
    async with listening() as endpoint, posting(endpoint) as exporter:
        await exporter.export(Batch("empty"))
    assert endpoint.requests == []


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(500, id="fails"),
        pytest.param(503, id="503"),
        pytest.param(429, id="429"),
        pytest.param(TRUNCATE, id="truncated-answer"),
        pytest.param(BREAK_OFF, id="closed-connection"),
    ],
)
async def test_retry_sends_the_same_batch_with_the_same_key(order: Order) -> None:
    slept = Slept()
    async with listening(order, 200) as endpoint, posting(endpoint, slept) as exporter:
        await exporter.export(batch())
    assert [request.headers["idempotency-key"] for request in endpoint.requests] == ["batch-0", "batch-0"]
    assert endpoint.requests[0].body == endpoint.requests[1].body
    assert len(slept.seconds) == 1


@pytest.mark.parametrize("order", [500, TRUNCATE, BREAK_OFF])
async def test_export_fails_after_three_attempts(order: Order) -> None:
    slept = Slept()
    async with listening(order) as endpoint, posting(endpoint, slept) as exporter:
        with pytest.raises(ExportError) as caught:
            await exporter.export(batch())
    assert not caught.value.is_permanent
    assert len(endpoint.requests) == TRIES
    assert 0.4 <= slept.seconds[0] <= 0.6
    assert 0.8 <= slept.seconds[1] <= 1.2


async def test_hanging_endpoint_is_given_up_at_the_timeout() -> None:
    async with listening(HANG) as endpoint, posting(endpoint, seconds=0.1) as exporter:
        with pytest.raises(ExportError, match=r"no answer within 0\.1 s|ReadTimeout"):
            await exporter.export(batch())


async def test_refused_connection_is_an_export_error() -> None:
    async with listening() as endpoint:
        pass
    async with posting(endpoint) as exporter:
        with pytest.raises(ExportError, match="no complete answer"):
            await exporter.export(batch())


@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_rejected_body_is_not_retried(status: int) -> None:
    async with listening(status) as endpoint, posting(endpoint) as exporter:
        with pytest.raises(ExportError, match=f"the endpoint answered {status}") as caught:
            await exporter.export(batch())
    assert caught.value.is_permanent
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [302, 401, 403, 404])
async def test_other_client_errors_are_not_permanent(status: int) -> None:
    async with listening(status, headers={"Location": "/elsewhere"}) as endpoint, posting(endpoint) as exporter:
        with pytest.raises(ExportError, match=f"the endpoint answered {status}") as caught:
            await exporter.export(batch())
    assert not caught.value.is_permanent
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("said", "least", "most"),
    [
        ("3", 2.4, 3.6),
        ("86400", 8.0, 12.0),
        ("Thu, 01 Jan 2026 00:00:05 GMT", 3.9, 5.9),
        ("soon", 0.4, 0.6),
    ],
)
async def test_retry_after_is_honoured_within_bounds(said: str, least: float, most: float) -> None:
    slept = Slept()
    async with listening(429, 200, headers={"Retry-After": said}) as endpoint, posting(endpoint, slept) as exporter:
        await exporter.export(batch())
    assert least <= slept.seconds[0] <= most


async def test_token_is_never_in_errors_or_repr() -> None:
    async with listening(403) as endpoint, posting(endpoint, token="hush") as exporter:
        with pytest.raises(ExportError) as caught:
            await exporter.export(batch())
    assert "hush" not in f"{caught.value!r} {HttpTarget('http://x', timedelta(1), 'hush')!r}"


@pytest.mark.defect("gpuid-15")
class TestReadiness:
    @pytest.mark.parametrize("status", [200, 204, 404, 405, 501])
    async def test_check_passes_with_other_status_codes(self, status: int) -> None:
        async with listening(status) as endpoint, posting(endpoint) as exporter:
            await exporter.check()
        assert endpoint.requests[0].method == "HEAD"

    @pytest.mark.parametrize("order", [401, 500, 503, BREAK_OFF])
    async def test_check_fails_if_the_endpoint_cannot_store(self, order: Order) -> None:
        async with listening(order) as endpoint, posting(endpoint) as exporter:
            with pytest.raises(ExportError):
                await exporter.check()


@pytest.mark.parametrize(
    ("endpoint", "token", "is_said"),
    [
        ("http://store.example.org/data", "t", True),
        ("http://store.example.org/data", None, False),
        ("https://store.example.org/data", "t", False),
        ("http://127.0.0.1:8080/data", "t", False),
    ],
)
def test_unencrypted_token_is_logged_at_start(endpoint: str, token: str | None, is_said: bool) -> None:
    with capture_logs() as logs:
        HttpExporter(HttpTarget(endpoint, timedelta(seconds=1), token), clock)
    assert [line["event"] for line in logs] == ["token is sent unencrypted"] * is_said


@pytest.mark.parametrize("token", ["tök", "a\nb"], ids=["letter", "line"])
def test_token_invalid_in_a_header_is_refused_at_start_and_not_shown(token: str) -> None:
    with pytest.raises(GpuwardenError, match="not one line of printable ASCII") as caught:
        HttpExporter(HttpTarget("https://store.example.org", timedelta(seconds=1), token), clock)
    assert token not in str(caught.value)
