"""An attacker learns the ID of a pending reservation and names its own pod for it, so that the victim is denied."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from attrs import define, field

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.forger import Forger, forging, trust
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import MUTATING, PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, Worker, site
from tests.e2e.test_access import bearer
from tests.e2e.webhook_configurations import MUTATED, hook, reviewer


@asynccontextmanager
async def slow_webhook(here: Site, directory: Path, seconds: float) -> AsyncIterator[None]:
    """A slow mutating webhook after gpuwarden's: reservations are pending for this long at each creation."""

    async def answer(review: Raw) -> Raw:
        if not review.get("dryRun"):
            await asyncio.sleep(seconds)
        return {}

    async with reviewer(directory, answer) as (client, ca):
        selector = {"kubernetes.io/metadata.name": here.namespace}
        one = hook("slow.example.test", client, "/review", ca, selector, MUTATED)
        await here.kube.create(MUTATING, {"metadata": {"name": "zz-slow"}, "webhooks": [one]})
        try:
            yield
        finally:
            await here.kube.delete(MUTATING, "zz-slow")


@define(eq=False)
class Thief:
    """Has a token of another namespace and validates every pending reservation that it learns."""

    forger: Forger
    worker: Worker
    headers: dict[str, str]
    shape: Raw
    learnt: set[str] = field(factory=set)

    async def steal(self) -> None:
        """Runs until cancelled."""
        url, context = self.worker.urls["https"], trust(self.forger.here)
        async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=30) as client:
            while True:
                got = await client.get("/devices", headers=self.headers)
                devices = got.json() if got.status_code == httpx.codes.OK else {}
                for gpu, one in devices.items():
                    held = one.get("assignment") or {}
                    is_had = held.get("exists?") or (held.get("uid") and held.get("state") != "proposal")
                    if not is_had and "reservation-id" in held:
                        await self.validate(held["reservation-id"], gpu, one["node"])
                await asyncio.sleep(0.02)

    async def validate(self, reservation: str, gpu: str, node: str, name: str | None = None) -> Raw | None:
        if reservation in self.learnt:
            return None
        self.learnt.add(reservation)
        notes = self.shape["metadata"]["annotations"]
        text = msgspec.json.encode(self.shape).decode()
        for mine, theirs in (
            (notes["gpuwarden.io/reservation-id"], reservation),
            (notes["gpuwarden.io/gpu-uuid"], gpu),
            (notes["gpuwarden.io/node"], node),
        ):
            text = text.replace(mine, theirs)
        return await self.forger.validate(msgspec.json.decode(text), name or "train-stolen", str(uuid.uuid4()))


@asynccontextmanager
async def thieving(cluster: Cluster, kube: Kube, here: Site) -> AsyncIterator[Thief]:
    async with forging(here) as forger, new_namespace(kube) as own:
        shape = await forger.dressed(here.namespace)
        yield Thief(forger, here.replicas[0], bearer(cluster, own), shape)


async def victims(here: Site, count: int) -> Counter[str]:
    answers: Counter[str] = Counter()
    for _ in range(count):
        try:
            made = await here.kube.create(PODS, pod(None, gpus=1), here.namespace)
        except ApiError as exc:
            answers[exc.reason] += 1
        else:
            answers["created"] += 1
            await here.kube.delete(PODS, made["metadata"]["name"], here.namespace)
    return answers


async def test_devices_page_shows_no_ids_of_pending_reservations(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with site(cluster, kube, tmp_path, nodes=2, gpus=8, replicas=1, name="thief") as here:
        await here.reconciler()
        await here.wait_until_offered()
        async with thieving(cluster, kube, here) as thief, slow_webhook(here, tmp_path, 0.2):
            stealing = asyncio.create_task(thief.steal())
            answers = await victims(here, 40)
            stealing.cancel()
            await asyncio.gather(stealing, return_exceptions=True)
            report_figures(request, victims=dict(answers), learnt=len(thief.learnt), thief=dict(thief.forger.answers))
            assert answers == {"created": 40}
            assert not thief.learnt


async def test_known_reservation_id_is_useless_for_a_pod_of_another_name(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Like a user who may read GPUNodes."""
    async with site(cluster, kube, tmp_path, nodes=1, gpus=8, replicas=1, name="thief") as here:
        await here.reconciler()
        await here.wait_until_offered()
        async with thieving(cluster, kube, here) as thief, slow_webhook(here, tmp_path, 2):
            creating = asyncio.create_task(victims(here, 1))
            held = await wait_until(here.held, bool)
            (slot, entry) = next(iter(held.items()))
            said = await thief.validate(entry["reservation"], slot.partition("/")[0], here.nodes[0], "stolen")
            answers = await creating
            report_figures(request, victims=dict(answers), thief=said)
            assert answers == {"created": 1}
            assert said is not None
            assert not said["allowed"]
