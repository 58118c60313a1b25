"""The probes of `gpuwarden reconcile`."""

import httpx
import pytest

from webhook.runtime.settings import Settings
from webhook.web.probes import Probes


async def test_process_is_ready_after_begin(capsys: pytest.CaptureFixture[str]) -> None:
    async with Probes(Settings(ui_port=0)).listening() as probes:
        assert capsys.readouterr().out == ""
        probes.begin()
        word, http = capsys.readouterr().out.split()
        assert word == "ready"
        async with httpx.AsyncClient(base_url=http.removeprefix("http="), trust_env=False) as client:
            codes = {
                path: (await client.get(path)).status_code for path in ("/healthz", "/health", "/readyz", "/ready")
            }
            assert set(codes.values()) == {200}
            probes.metrics.count_event("NodeGone")
            assert 'gpuwarden_events_total{reason="NodeGone"} 1.0' in (await client.get("/metrics")).text
            assert (await client.get("/devices")).status_code == 404


async def test_process_is_live_but_not_ready_before_begin(unused_tcp_port: int) -> None:
    async with (
        Probes(Settings(ui_port=unused_tcp_port)).listening(),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}", trust_env=False) as client,
    ):
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).json() == {"status": "starting"}
