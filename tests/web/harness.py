"""A whole server without sockets: real parts, a clock that the test sets, and requests as the API server sends them."""

import base64
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import jsonpatch
from attrs import evolve

from tests import builders
from tests.builders import NOW, Raw
from webhook.admission.fleet_updater import FleetUpdater
from webhook.admission.parts import Parts
from webhook.assembly.parts import embedded
from webhook.ledger.pods import PodFacts
from webhook.runtime.clock import Clock
from webhook.runtime.http.budgets import Budgets
from webhook.runtime.settings import Settings
from webhook.web.app import Endpoints, plain_app, tls_app
from webhook.web.callers import CallerGate
from webhook.web.devices import Devices
from webhook.web.health import Health, Stage

H100 = ["model=h100", "fudo.org/gpu.memory-80g"]
INVENTORY: Raw = {
    "nodes": [
        {
            "name": "node-a",
            "labels": {"zone": "a"},
            "evidence": {"hash": builders.HASH},
            "devices": [{"uuid": "GPU-a0", "index": 0, "labels": H100}, {"uuid": "GPU-a1", "index": 1, "labels": H100}],
        },
        {
            "name": "node-b",
            "labels": {"zone": "b"},
            "evidence": {"hash": builders.OTHER_HASH},
            "devices": [{"uuid": "GPU-b0", "index": 0, "labels": ["model=a100"]}],
        },
        {
            "name": "node-c",
            "labels": {"zone": "b"},
            "devices": [{"uuid": "GPU-c0", "index": 0, "labels": ["model=l4"], "shares": 2}],
        },
    ]
}


Assemble = Callable[[Settings, Clock], Parts]


class Harness:
    """One server, in embedded mode by default."""

    def __init__(
        self,
        directory: Path,
        inventory: Raw,
        facts: PodFacts | None,
        assemble: Assemble = embedded,
        **settings: Any,
    ) -> None:
        self.now = NOW
        self.file = directory / "inventory.json"
        self.file.write_text(json.dumps(inventory))
        self.parts = assemble(Settings(inventory=self.file, **settings), lambda: self.now)
        self.health = Health()
        self.budgets = Budgets()
        parts = self.parts
        self.endpoints = Endpoints.of(
            parts,
            self.health,
            CallerGate(parts.clock),
            facts=facts or parts.pods,
            budgets=self.budgets,
            shows_pending_ids=True,
        )
        tls, plain = tls_app(self.endpoints), plain_app(self.endpoints)
        self.tls = httpx.AsyncClient(transport=httpx.ASGITransport(app=tls), base_url="https://harness")
        self.plain = httpx.AsyncClient(transport=httpx.ASGITransport(app=plain), base_url="http://harness")

    @property
    def fleet_source(self) -> FleetUpdater:
        """The embedded fleet updater, so that a test can call `refresh`."""
        assert isinstance(self.parts.fleet_source, FleetUpdater)
        return self.parts.fleet_source

    async def start(self) -> "Harness":
        await self.parts.fleet_source.load()
        self.health.stage = Stage.SERVING
        return self

    async def close(self) -> None:
        await self.tls.aclose()
        await self.plain.aclose()
        if self.parts.hinting is not None:
            await self.parts.hinting.close()

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    async def ask(self, path: str, raw_review: Raw, timeout: str | None = None) -> Raw:
        """The `response` of a well-formed answer."""
        reply = await self.tls.post(path, json=raw_review, params={} if timeout is None else {"timeout": timeout})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Raw = answer["response"]
        assert response["uid"] == raw_review["request"]["uid"]
        return response

    async def mutate(self, raw: Raw, uid: str = builders.REVIEW_UID, *, dry_run: bool = False) -> Raw:
        return await self.ask("/mutate", builders.mutating_create(raw, uid=uid, dry_run=dry_run))

    async def validate(self, raw_review: Raw) -> Raw:
        return await self.ask("/validate", raw_review)

    async def dress(self, raw: Raw, uid: str = builders.REVIEW_UID) -> Raw:
        """The pod as patched by the mutating webhook."""
        return patched(raw, await self.mutate(raw, uid))

    async def create(self, raw: Raw, uid: str = builders.REVIEW_UID, pod_uid: str = builders.POD_UID) -> Raw:
        """The pod after both webhooks."""
        final = builders.created(await self.dress(raw, uid), uid=pod_uid)
        response = await self.validate(builders.review("CREATE", new=final, uid=f"{uid}-validate"))
        assert response["allowed"], response
        return final

    async def through(self, view: Devices, path: str, **headers: str) -> httpx.Response:
        """The answer of another view of the devices."""
        app = plain_app(evolve(self.endpoints, devices=view))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://harness") as client:
            return await client.get(path, headers=headers)

    async def devices(self) -> Mapping[str, Raw]:
        devices: Mapping[str, Raw] = (await self.tls.get("/devices")).json()
        return devices

    async def states(self) -> dict[str, str]:
        return {uuid: device["state"] for uuid, device in (await self.devices()).items()}

    @property
    def held(self) -> list[str]:
        """The UUIDs of all held GPUs."""
        return sorted(uuid for one in self.parts.ledger.reservations() for uuid in one.uuids)


def patched(raw: Raw, response: Raw) -> Raw:
    assert response["allowed"], response
    if "patch" not in response:
        return raw
    assert response["patchType"] == "JSONPatch"
    result: Raw = jsonpatch.apply_patch(raw, json.loads(base64.b64decode(response["patch"])))
    return result
