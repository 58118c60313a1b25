"""Objects and their keys, with a server that records requests. `tests/e2e` uses a real S3 server."""

import asyncio
import csv
import io
import re
from datetime import timedelta

import pytest

from tests.export.endpoint import HANG, Endpoint, Order, listening, received
from tests.export.records import NOW, batch, later, use
from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.records import Batch
from webhook.export.s3 import ObjectExporter, partition
from webhook.export.targets import ObjectTarget

KEY = re.compile(r"/gpuids/serial-numbers/year=2026/month=01/day=01/hour=00/20260101-000000\.123-[0-9a-f]{16}\.csv")


def exporter(endpoint: Endpoint, bucket: str = "gpuids", seconds: float = 20, **changes: object) -> ObjectExporter:
    options = {"endpoint": endpoint.url, "access_key_id": "key", "secret_access_key": "hush"}
    target = ObjectTarget(
        bucket,
        prefix="serial-numbers",
        options=options,
        timeout=timedelta(seconds=seconds),
        **changes,  # type: ignore[arg-type]  # as the test names them
    )
    return ObjectExporter(target)


def keys(endpoint: Endpoint) -> list[str]:
    return [request.path.replace("%3D", "=") for request in endpoint.requests]


async def test_object_has_key_content_and_metadata_of_gpuid() -> None:
    async with listening() as endpoint:
        await exporter(endpoint).export(batch())
    (request,) = endpoint.requests
    assert request.method == "PUT"
    assert KEY.fullmatch(keys(endpoint)[0])
    assert request.body.decode() == (
        "prod,gpu-a,i-0aaaabbbbccccdddd,gpu-operator/nvidia-device-plugin-daemonset-abcde,"
        "1820000000042,1760000000011,2026-01-01T00:00:00Z\n"
        "prod,gpu-a,i-0aaaabbbbccccdddd,gpu-operator/nvidia-device-plugin-daemonset-abcde,"
        "1820000000042,1760000000012,2026-01-01T00:00:00Z\n"
    )
    wanted = {
        "content-type": "text/csv",
        "x-amz-meta-source": "gpuid",
        "x-amz-meta-record_count": "2",
        "x-amz-meta-timestamp": "2026-01-01T00:00:00Z",
        "x-amz-meta-format": "csv",
        "x-amz-meta-columns": "cluster,node,machine,source,chassis,gpu,time",
    }
    assert {name: request.headers.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("prefix", "pattern", "begins"),
    [
        pytest.param("raw//gpus", "%Y", "/gpuids/raw/gpus/2026/", id="empty-part-in-prefix"),
        pytest.param("/raw/", "/a//%Y//", "/gpuids/raw/a/2026/", id="empty-part-in-pattern"),
        pytest.param("//", "//", "/gpuids/2026", id="only-slashes"),
        pytest.param("raw", "%Y-%q 50%", "/gpuids/raw/2026-%25q%2050%25/", id="other-percent-signs"),
    ],
)
async def test_empty_parts_are_removed_from_keys(prefix: str, pattern: str, begins: str) -> None:
    async with listening() as endpoint:
        options = {"endpoint": endpoint.url, "access_key_id": "key", "secret_access_key": "hush"}
        store = ObjectExporter(ObjectTarget("gpuids", prefix=prefix, partition_pattern=pattern, options=options))
        await store.export(batch())
    assert keys(endpoint)[0].startswith(begins)


@pytest.mark.parametrize(
    "target",
    [
        ObjectTarget("gpuids", prefix="raw/../gpus"),
        ObjectTarget("gpuids", prefix="."),
        ObjectTarget("gpuids", prefix="a\tb"),
        ObjectTarget("gpuids", partition_pattern="%Y/../%m"),
        ObjectTarget("s3://gpuids/../raw"),
        ObjectTarget("s3://gpuids/raw//gpus"),
    ],
)
def test_invalid_key_parts_are_refused_at_start(target: ObjectTarget) -> None:
    with pytest.raises(GpuwardenError, match=r"cannot be part of an object key|cannot be used as an object store"):
        ObjectExporter(target)


async def test_header_and_own_columns_are_optional() -> None:
    async with listening() as endpoint:
        await exporter(endpoint, header=True, own_columns=True).export(batch())
    header, first, _ = csv.reader(io.StringIO(endpoint.requests[0].body.decode()))
    assert header[:8] == ["cluster", "node", "machine", "source", "chassis", "gpu", "time", "uuid"]
    assert dict(zip(header, first, strict=True))["uuid"] == "GPU-0"


async def test_a_text_with_commas_quotes_and_line_breaks_stays_one_field() -> None:
    async with listening() as endpoint:
        await exporter(endpoint).export(batch(gpus=1, node='a,"b"\nc'))
    (row,) = csv.reader(io.StringIO(endpoint.requests[0].body.decode()))
    assert row[1] == 'a,"b"\nc'


@pytest.mark.defect("gpuid-7")
async def test_two_batches_of_one_clock_value_are_two_objects() -> None:
    async with listening() as endpoint:
        store = exporter(endpoint)
        await store.export(batch("one"))
        await store.export(batch("two"))
    assert len(set(keys(endpoint))) == 2


@pytest.mark.defect("gpuid-8")
async def test_the_same_batch_again_is_the_same_object_again() -> None:
    async with listening() as endpoint:
        for _ in range(2):
            await exporter(endpoint).export(batch(uses=(use(),)))
    first, second = endpoint.requests[:2], endpoint.requests[2:]
    assert [(one.path, one.body) for one in first] == [(one.path, one.body) for one in second]


@pytest.mark.defect("gpuid-2")
async def test_uses_are_not_among_the_readings() -> None:
    async with listening() as endpoint:
        await exporter(endpoint).export(Batch("uses", uses=(use(until=later(3600)),)))
    (key,) = keys(endpoint)
    assert key.startswith("/gpuids/serial-numbers-use/year=2026/month=01/day=01/hour=01/")
    assert endpoint.requests[0].body.decode() == (
        "prod,gpu-a,reservation-0,GPU-0,,unknown,train,job-0,uid-0,Job/train,sha256:abc,"
        "2026-01-01T00:00:00.123456Z,2026-01-01T01:00:00.123456Z\n"
    )


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("year=%Y/month=%m/day=%d/hour=%H", "year=2026/month=01/day=01/hour=00/"),
        ("/%Y%m%d/", "20260101/"),
        ("", ""),
        ("%M-%S-%%", "%M-%S-%%/"),
    ],
    ids=["the default", "slashes around it", "none", "no other placeholder"],
)
def test_pattern_has_four_placeholders(pattern: str, found: str) -> None:
    assert partition(pattern, NOW) == found


async def test_parquet_holds_the_same_rows() -> None:
    arro3_io = pytest.importorskip("arro3.io")
    async with listening() as endpoint:
        await exporter(endpoint, format="parquet", own_columns=True).export(batch())
    (request,) = endpoint.requests
    assert request.path.endswith(".parquet")
    assert request.headers["content-type"] == "application/vnd.apache.parquet"
    table = arro3_io.read_parquet(io.BytesIO(request.body)).read_all()
    assert table.column_names[:7] == ["cluster", "node", "machine", "source", "chassis", "gpu", "time"]
    assert table.column("gpu").to_pylist() == ["1760000000011", "1760000000012"]
    assert table.column("index").to_pylist() == [0, 1]


async def test_503_is_retried_and_the_object_stored() -> None:
    async with listening(503, 200) as endpoint:
        await exporter(endpoint).export(batch())
    assert len(set(keys(endpoint))) == 1
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("order", "reason"),
    [(503, "503"), (403, "403|privileges"), (404, "not found"), (HANG, "timed out|timeout|sending")],
)
async def test_store_error_has_a_reason_and_no_secret(order: Order, reason: str) -> None:
    async with listening(order) as endpoint:
        with pytest.raises(ExportError, match=reason) as caught:
            await exporter(endpoint, seconds=0.5).export(batch())
    assert not caught.value.is_permanent
    assert "hush" not in str(caught.value)


async def test_check_passes_without_the_right_to_list() -> None:
    async with listening(403, body=b"<Error><Code>AccessDenied</Code></Error>") as endpoint:
        await exporter(endpoint).check()
    async with listening(403, body=b"<Error><Code>InvalidAccessKeyId</Code></Error>") as endpoint:
        with pytest.raises(ExportError, match=r"^InvalidAccessKeyId"):
            await exporter(endpoint).check()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_credentials_and_endpoint_come_from_aws_own_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as endpoint:
        for variable, text in (
            (name, endpoint.url),
            ("AWS_ACCESS_KEY_ID", "its-key"),
            ("AWS_SECRET_ACCESS_KEY", "hush"),
            ("AWS_SESSION_TOKEN", "of-this-session"),
            ("AWS_REGION", "another-1"),
        ):
            monkeypatch.setenv(variable, text)
        await ObjectExporter(ObjectTarget("gpuids", region="eu-central-1")).export(batch())
    (request,) = endpoint.requests
    assert request.path.startswith("/gpuids/year%3D2026/")
    assert re.search(r"Credential=its-key/\d{8}/eu-central-1/s3/", request.headers["authorization"])
    assert request.headers["x-amz-security-token"] == "of-this-session"


async def test_path_of_a_bucket_url_is_the_key_prefix() -> None:
    async with listening() as endpoint:
        await exporter(endpoint, "s3://gpuids/of/ours").export(batch())
    assert keys(endpoint)[0].startswith("/gpuids/of/ours/serial-numbers/year=2026/")


@pytest.mark.defect("gpuid-16")
async def test_upload_in_progress_at_the_end_is_aborted() -> None:
    """The store does not receive the rest, neither then nor later."""
    is_asked, is_over = asyncio.Event(), asyncio.Event()

    async def unhurried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await received(reader)
        is_asked.set()
        await reader.read()
        is_over.set()
        writer.close()

    server = await asyncio.start_server(unhurried, "127.0.0.1", 0)
    endpoint = Endpoint()
    endpoint.port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(20):
        exporting = asyncio.create_task(exporter(endpoint).export(batch()))
        await is_asked.wait()
        exporting.cancel()
        await asyncio.wait([exporting])
        await is_over.wait()


async def test_uses_with_missing_values_can_be_parquet() -> None:
    arro3_io = pytest.importorskip("arro3.io")
    async with listening() as endpoint:
        await exporter(endpoint, format="parquet").export(Batch("uses", uses=(use(pod=None, owner=None),)))
    table = arro3_io.read_parquet(io.BytesIO(endpoint.requests[0].body)).read_all()
    assert table.column("pod").to_pylist() == [None]
    assert table.column("until").to_pylist() == [None]


@pytest.mark.defect("gpuid-15")
@pytest.mark.parametrize("order", [503, 404])
async def test_check_fails_if_the_store_refuses(order: int) -> None:
    async with listening(order) as endpoint:
        with pytest.raises(ExportError):
            await exporter(endpoint, seconds=0.5).check()


@pytest.mark.parametrize("bucket", ["ftp://somewhere", "s3://"])
def test_unsupported_store_url_is_refused(bucket: str) -> None:
    with pytest.raises(GpuwardenError, match="cannot be used as an object store"):
        ObjectExporter(ObjectTarget(bucket))


@pytest.mark.parametrize("bucket", ["gs://bucket", "https://account.blob.core.windows.net/container"])
def test_other_stores_are_selected_by_url(bucket: str) -> None:
    ObjectExporter(ObjectTarget(bucket))
