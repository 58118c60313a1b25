"""A tenant with its own token requests another tenant's data. Real API server, tokens of service accounts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from attrs import define

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.forger import trust
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    NAMESPACES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    Kube,
    Raw,
    access_granted,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.processes import OPT_IN, Site, site
from tests.e2e.test_access import bearer
from webhook.core.device_state import DeviceState

TOKEN_REQUESTS = "serviceaccounts/default/token"
DEMANDED = "sha256:" + "5e" * 32


@define
class Harness:
    """The running GPU pod of a victim, and two tenants."""

    here: Site
    cluster: Cluster
    thief: str
    victim: Raw

    @property
    def url(self) -> dict[str, str]:
        return self.here.replicas[0].urls

    @asynccontextmanager
    async def client(self, headers: dict[str, str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(
            base_url=self.url["https"], verify=trust(self.here), trust_env=False, headers=headers, timeout=30
        ) as client:
            yield client

    @property
    def stolen(self) -> dict[str, str]:
        return bearer(self.cluster, self.thief)

    @property
    def own(self) -> dict[str, str]:
        return bearer(self.cluster, self.here.namespace)

    @property
    def finalize_body(self) -> dict[str, str]:
        """The `/finalize` request for the victim's pod."""
        meta = self.victim["metadata"]
        notes = meta["annotations"]
        return {
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
            "gpu-uuid": notes["gpuwarden.io/gpu-uuid"],
            "reservation-id": notes["gpuwarden.io/reservation-id"],
        }

    def secrets(self) -> set[str]:
        told = self.finalize_body
        return {told["namespace"], told["name"], told["uid"], told["reservation-id"]}


@pytest_asyncio.fixture
async def harness(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Harness]:
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=4, replicas=1, name="tenants") as here,
        new_namespace(kube, OPT_IN) as thief,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        await kube.create(PODS, pod("victims-pod", gpus=1), here.namespace)
        victim = await pod_in_phase(kube, here.namespace, "victims-pod", "Running")
        for namespace in (here.namespace, thief):
            await reader_of_pods(kube, namespace)
        yield Harness(here, cluster, thief, victim)


async def reader_of_pods(kube: Kube, namespace: str) -> None:
    """Lets the default account of the namespace list its pods, as a tenant may."""
    await allowed(kube, namespace, {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}, "reads-pods")


async def allowed(kube: Kube, namespace: str, rule: Raw, name: str, account: str | None = None) -> None:
    await kube.create(ROLES, {"metadata": {"name": name}, "rules": [rule]}, namespace)
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": account or namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    await kube.create(ROLE_BINDINGS, {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}, namespace)
    await access_granted(kube, subject, [rule], namespace)


async def assignments(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found = (await client.get("/devices")).raise_for_status().json()
    return [one["assignment"] for one in found.values() if "assignment" in one]


async def test_other_tenants_see_devices_and_no_names(harness: Harness) -> None:
    uuid = harness.finalize_body["gpu-uuid"]
    async with harness.client(harness.stolen) as client:
        for path, accept in (("/devices", "application/json"), ("/", "text/html"), ("/devices", "text/html")):
            text = (await client.get(path, headers={"Accept": accept})).raise_for_status().text
            assert uuid in text
            assert [secret for secret in harness.secrets() if secret in text] == []
        for secret in harness.secrets():  # nor with a search
            found = (await client.get("/", params={"text": secret})).raise_for_status().text
            assert "No device matches the filter" in found
        assert await assignments(client) == [{"exists?": True, "state": "active"}]


async def test_caller_that_may_list_pods_sees_their_names(harness: Harness, kube: Kube) -> None:
    told = harness.finalize_body
    whole = {"exists?": True, "state": "active", **{name: told[name] for name in ("namespace", "name", "uid")}}
    async with harness.client(harness.own) as client:
        assert await assignments(client) == [{**whole, "reservation-id": told["reservation-id"]}]
        assert "victims-pod" in (await client.get("/", params={"text": told["uid"]})).text
    admin = {"Authorization": f"Bearer {harness.cluster.admin_token}"}
    async with harness.client(admin) as client:
        assert (await assignments(client))[0]["name"] == "victims-pod"


async def test_token_is_accepted_as_a_basic_auth_password(harness: Harness) -> None:
    token = harness.own["Authorization"].removeprefix("Bearer ")
    async with harness.client() as client:
        refused = await client.get("/")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="gpuwarden", Bearer')
        assert "victims-pod" in (await client.get("/", auth=("token", token))).raise_for_status().text


async def test_other_tenants_cannot_finalize(harness: Harness) -> None:
    async with harness.client(harness.stolen) as client:
        assert (await client.post("/finalize", json=harness.finalize_body)).status_code == 403
        own = {**harness.finalize_body, "namespace": harness.thief}
        assert (await client.post("/finalize", json=own)).status_code == 403


async def test_pod_itself_and_authorized_callers_can_finalize(harness: Harness, kube: Kube, cluster: Cluster) -> None:
    meta = harness.victim["metadata"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
    with cluster.api() as api:
        path = f"/api/v1/namespaces/{meta['namespace']}/{TOKEN_REQUESTS}"
        reply = api.post(path, json={"spec": {"boundObjectRef": bound}}).raise_for_status()
    token = reply.json()["status"]["token"]
    async with harness.client({"Authorization": f"Bearer {token}"}) as client:
        got = await client.post("/finalize", json=harness.finalize_body)
        assert (got.status_code, got.json()) == (200, {"status": "ok"})
        assert (await client.post("/finalize", json={**harness.finalize_body, "uid": "another"})).status_code == 403
    async with harness.client(harness.own) as client:
        assert (await client.post("/finalize", json=harness.finalize_body)).status_code == 403
        rule = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["finalize"]}
        await allowed(kube, harness.here.namespace, rule, "finalizes")

        async def status() -> int:
            return (await client.post("/finalize", json=harness.finalize_body)).status_code

        await wait_until(status, lambda code: code == 200, 30)  # a refusal is cached for some seconds


async def test_required_hashes_of_another_namespace_are_not_shown(harness: Harness, kube: Kube) -> None:
    demand = {"metadata": {"annotations": {"gpuwarden.io/required-hash": DEMANDED}}}
    await kube.patch(NAMESPACES, harness.here.namespace, demand)
    asked = pod("mine", gpus=1)
    asked["metadata"]["namespace"] = harness.here.namespace
    question = {"Pod": asked, "Nodes": None, "NodeNames": list(harness.here.nodes)}
    extender = harness.url["extender"]
    async with harness.client(harness.stolen) as client:
        told = await client.post("/explain", json=asked)
        assert (told.status_code, DEMANDED in told.text) == (403, False)
        for verb in ("filter", "prioritize", "preempt"):
            got = await client.post(f"{extender}/{verb}", json=question)
            assert (got.status_code, "the user of the token must be allowed" in got.text) == (403, True), got.text
    async with harness.client(harness.own) as client:
        assert (await client.post("/explain", json=asked)).status_code == 200


async def test_tokens_are_not_accepted_over_plain_http(harness: Harness) -> None:
    async with httpx.AsyncClient(base_url=harness.url["http"], trust_env=False, headers=harness.own) as client:
        assert (await client.post("/finalize", json=harness.finalize_body)).status_code == 404
        summary = await client.get("/devices")
        numbers = summary.json()
        assert (set(numbers), set(numbers["devices"])) == ({"nodes", "devices"}, set(DeviceState))
        assert numbers["devices"]["assigned"] == 1
        page = await client.get("/")
        for text in (summary.text, page.text):
            assert [
                secret for secret in (*harness.secrets(), harness.finalize_body["gpu-uuid"]) if secret in text
            ] == []
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200
