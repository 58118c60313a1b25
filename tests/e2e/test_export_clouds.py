"""Fakes of the object stores of Google and Azure. The target is a URL; everything else comes from each store's
environment variables."""

import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
from aiohttp import ClientSession, web
from obstore.store import AzureStore

from scripts.cloudstores import azurite, fake_gcs_server, running
from scripts.controlplane.build import BuildError
from scripts.controlplane.components import free_ports
from tests.export.records import batch, use
from webhook.export import ExportError
from webhook.export.s3 import ObjectExporter
from webhook.export.targets import ObjectTarget
from webhook.runtime.clock import utc_now

BUCKET = "gpuids"
# The publicly known development account.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
WANTED = {
    "Content-Type": "text/csv",
    "source": "gpuid",
    "record_count": "2",
    "timestamp": "2026-01-01T00:00:00Z",
    "format": "csv",
    "columns": "cluster,node,machine,source,chassis,gpu,time",
}
DIRECTORY = "year=2026/month=01/day=01/hour=00/20260101-000000.123-"

pytestmark = pytest.mark.long


def exporter(url: str) -> ObjectExporter:
    return ObjectExporter(ObjectTarget(url, "serial-numbers", timeout=timedelta(seconds=20)))


@pytest.fixture
async def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of the fake, with a container."""
    try:
        command = azurite()
    except BuildError as exc:
        pytest.skip(str(exc))
    (port,) = free_ports(1)
    flags = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    with running([*command, *flags, "--skipApiVersionCheck"], port, tmp_path / "azurite.log"):
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        async with httpx.AsyncClient(trust_env=False) as client:
            made = await client.put(f"{url}/{BUCKET}?restype=container", headers=signed(BUCKET))
        assert made.status_code == httpx.codes.CREATED, made.text
        for name, text in (("ACCOUNT_NAME", ACCOUNT), ("ACCOUNT_KEY", KEY), ("ENDPOINT", url)):
            monkeypatch.setenv(f"AZURE_STORAGE_{name}", text)
        yield url


def signed(container: str) -> dict[str, str]:
    """A signed request that creates a container, which obstore cannot do."""
    own = {"x-ms-date": format_datetime(utc_now(), usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{own[name]}\n" for name in sorted(own))
    text = "PUT" + "\n" * 12 + named + f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    return {**own, "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}", "Content-Length": "0"}


async def test_azure_stores_objects_once(azure: str) -> None:
    store = exporter(f"az://{BUCKET}")
    await store.check()
    for _ in range(2):
        await store.export(batch(uses=(use(),)))
        await store.export(batch("other"))
    client = AzureStore(
        BUCKET, account_name=ACCOUNT, account_key=KEY, endpoint=azure, client_options={"allow_http": True}
    )
    found = {one["path"]: obstore.get(client, one["path"]) for page in obstore.list(client) for one in page}
    readings = [path for path in sorted(found) if path.startswith(f"serial-numbers/{DIRECTORY}")]
    assert len(readings) == 2
    assert len([path for path in found if path.startswith(f"serial-numbers-use/{DIRECTORY}")]) == 1
    assert len(found) == 3
    for path in readings:
        assert dict(found[path].attributes) == WANTED
        lines = bytes(found[path].bytes()).decode().splitlines()
        assert [line.split(",")[5] for line in lines] == ["1760000000011", "1760000000012"]


async def test_azure_errors_name_what_is_missing(azure: str) -> None:
    store = exporter("az://nowhere")
    for tried in (store.check(), store.export(batch())):
        with pytest.raises(ExportError, match=r"^ContainerNotFound"):
            await tried


class Front:
    """Google authorizes a PUT by token; the fake only by signed URL, so this proxy signs each request."""

    def __init__(self, behind: str) -> None:
        self._behind = behind

    async def forward(self, request: web.Request) -> web.Response:
        more = {"X-Goog-Algorithm": "of-no-matter"} if request.method == "PUT" else {}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                self._behind + request.raw_path.partition("?")[0],
                params={**request.query, **more},
                headers={**request.headers, "Host": self._behind.removeprefix("http://")},
                data=await request.read(),
            ) as answer,
        ):
            # Google's answers have this header, and the exporter's client requires it.
            headers = {"ETag": '"1"', "Content-Type": answer.headers.get("Content-Type", "")}
            return web.Response(status=answer.status, body=await answer.read(), headers=headers)


@pytest.fixture
async def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of the JSON API of the fake, with a bucket."""
    try:
        program = fake_gcs_server()
    except BuildError as exc:
        pytest.skip(str(exc))
    (port,) = free_ports(1)
    behind = f"127.0.0.1:{port}"
    flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-public-host", behind]
    with running([str(program), *flags], port, tmp_path / "google.log"):
        async with httpx.AsyncClient(trust_env=False) as client:
            made = await client.post(f"http://{behind}/storage/v1/b?project=p", json={"name": BUCKET})
        assert made.is_success, made.text
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", Front(f"http://{behind}").forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        front = "http://{}:{}".format(*runner.addresses[0])
        account: dict[str, Any] = {"gcs_base_url": front, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
        try:
            yield f"http://{behind}/storage/v1/b/{BUCKET}/o"
        finally:
            await runner.cleanup()


async def test_google_stores_objects_once(google: str) -> None:
    store = exporter(f"gs://{BUCKET}")
    await store.check()
    for _ in range(2):
        await store.export(batch(uses=(use(),)))
        await store.export(batch("other"))
    async with httpx.AsyncClient(trust_env=False) as client:
        found = {one["name"]: one for one in (await client.get(google)).json()["items"]}
        readings = [name for name in sorted(found) if name.startswith(f"serial-numbers/{DIRECTORY}")]
        content = [(await client.get(found[name]["mediaLink"])).text for name in readings]
    assert len(readings) == 2
    assert len([name for name in found if name.startswith(f"serial-numbers-use/{DIRECTORY}")]) == 1
    assert len(found) == 3
    for name, text in zip(readings, content, strict=True):
        assert {"Content-Type": found[name]["contentType"], **found[name]["metadata"]} == WANTED
        assert [line.split(",")[5] for line in text.splitlines()] == ["1760000000011", "1760000000012"]


async def test_google_errors_name_what_is_missing(google: str) -> None:
    with pytest.raises(ExportError, match=r"404|not found"):
        await exporter("gs://nowhere").export(batch())
