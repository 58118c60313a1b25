"""`gpuwarden reconcile` leads where parts of the API are missing."""

import asyncio
from contextlib import suppress

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.api_client import answering, client_of
from webhook.assembly.reconciler import reconciler_parts
from webhook.commands.reconcile import work
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics
from webhook.web.probes import Probes


@pytest.mark.parametrize("status", [403, 404, 503])
async def test_cluster_that_does_not_serve_resource_claims_gets_a_leader(status: int) -> None:
    asked, has_leader = set[str](), asyncio.Event()

    async def answer(request: Request) -> Response:
        path = request.url.path
        asked.add(path)
        if "/leases" in path:
            has_leader.set()
        if "/leases" in path or "resource.k8s.io" in path or "watch" in request.query_params:
            return Response(status_code=status)
        return JSONResponse({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []})

    settings = Settings(proof_devices=True, native_templates=True, lease_namespace="gpuwarden")
    async with (
        answering(answer, "GET", "POST", "PUT") as port,
        client_of(port) as api,
        Probes(Settings(ui_port=0)).listening() as probes,
    ):
        working = asyncio.create_task(work(settings, api, probes))
        try:
            await asyncio.wait_for(has_leader.wait(), 10)
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
    assert "/apis/resource.k8s.io/v1/resourceslices" in asked


async def test_lists_of_large_objects_are_compressed() -> None:
    """A template takes 19 kB in memory, and a cluster may have 80,000. The process has 512 MiB."""
    async with client_of(1) as api:
        parts = reconciler_parts(Settings(proof_devices=True, native_templates=True), api, Metrics())
    large = {one.path.rpartition("/")[2] for one in parts.optional_watches if one._trimmed is not None}
    assert large == {"resourceclaims", "resourceclaimtemplates", "resourceslices"}
