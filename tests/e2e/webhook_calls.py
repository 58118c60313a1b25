"""An API server that calls a gpuwarden server through the shipped webhook configurations."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import grant
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    MUTATING,
    NAMESPACES,
    PODS,
    VALIDATING,
    ApiError,
    Kube,
    Raw,
    pod,
    wait_until,
)
from tests.e2e.webhook_configurations import is_reviewed
from tests.running import Running
from webhook.kube.install.policies import Installation, webhooks

PROVEN = "sha256:aa11"
HASH = {"gpuwarden.io/required-hash": PROVEN}
INVENTORY = {
    "nodes": [{"name": "node-1", "evidence": {"hash": PROVEN}, "devices": [{"uuid": f"GPU-{n}"} for n in range(64)]}]
}
# The log is a pipe of 64 KiB that is not read while a test runs.
QUIET = ("--log-level", "error")
# The discard port: no process listens there.
UNREACHABLE_URL = "https://127.0.0.1:9"

CANONICAL, ALIAS = {"gpuwarden.io/enabled": "true"}, {"scheduler.radix.ai/enabled": "true"}
VISIBLE = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]


@asynccontextmanager
async def registered(kube: Kube, installation: Installation, name: str = "gpuwarden") -> AsyncIterator[None]:
    kinds = {"MutatingWebhookConfiguration": MUTATING, "ValidatingWebhookConfiguration": VALIDATING}
    for manifest in webhooks(installation):
        await kube.create(kinds[manifest["kind"]], {**manifest, "metadata": {"name": name}})
    try:
        yield
    finally:
        for of in kinds.values():
            await kube.delete(of, name)


@frozen
class WebhookHarness:
    """A server, and an API server that calls it."""

    server: Running
    kube: Kube
    own_namespace: str

    async def calls(self) -> dict[str, int]:
        """The number of requests per route since the server started."""
        async with httpx.AsyncClient(base_url=self.server.urls["http"], trust_env=False) as client:
            text = (await client.get("/metrics")).raise_for_status().text
        found = {"/mutate": 0, "/validate": 0}
        for route, count in re.findall(r'gpuwarden_http_requests_total\{route="(/\w+)",status="\d+"\} ([\d.]+)', text):
            if route in found:
                found[route] += int(float(count))
        return found


class CallCounter:
    """Counts the webhook calls within a `with` block."""

    def __init__(self, harness: WebhookHarness) -> None:
        self._doors = harness
        self.mutate = self.validate = -1

    async def __aenter__(self) -> "CallCounter":
        self._before = await self._doors.calls()
        return self

    async def __aexit__(self, *_: object) -> None:
        after = await self._doors.calls()
        self.mutate = after["/mutate"] - self._before["/mutate"]
        self.validate = after["/validate"] - self._before["/validate"]

    @property
    def both(self) -> tuple[int, int]:
        return self.mutate, self.validate


def ca_of(server: Running) -> bytes:
    return (server.directory / "certs/dev/ca.crt").read_bytes()


@asynccontextmanager
async def webhook_harness(cluster: Cluster, server: Running) -> AsyncIterator[WebhookHarness]:
    async with Kube(cluster.kubeconfig) as kube, new_namespace(kube, CANONICAL) as own, new_namespace(kube) as probes:
        # Bindings have tests of their own. They are reviewed for every pod of an opted-in namespace and would be
        # counted here.
        installation = Installation(
            namespace=own,
            url=server.urls["https"],
            ca_bundle=ca_of(server),
            reviews_deletes=True,
            reviews_bindings=False,
        )
        async with registered(kube, installation):
            await kube.patch(NAMESPACES, probes, {"metadata": {"labels": CANONICAL}})
            await wait_until(lambda: is_reviewed(kube, probes))
            yield WebhookHarness(server, kube, own)


def with_labels(one: Raw, labels: dict[str, str]) -> Raw:
    return {**one, "metadata": {**one["metadata"], "labels": labels}}


def container(name: str = "main", **members: Any) -> Raw:
    return {"name": name, "image": "example.test/main:1", **members}


def pod_with_containers(*containers: Raw, **spec: Any) -> Raw:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a"},
        "spec": {"containers": list(containers), **spec},
    }


def annotated_pod(key: str, value: str) -> Raw:
    return pod("a", annotations={key: value})


def unscheduled_pod() -> Raw:
    """A pod that no other client writes. The API server repeats a review if another write came between."""
    return pod("a", gpus=1, annotations=HASH, schedulerName="nobody")


@asynccontextmanager
async def granted(kube: Kube, name: str, rules: list[Raw], accounts: list[tuple[str, str]]) -> AsyncIterator[None]:
    subjects = [{"kind": "ServiceAccount", "namespace": ns, "name": account} for ns, account in accounts]
    async with AsyncExitStack() as stack:
        await grant(kube, stack, name, rules, *subjects)
        yield


async def is_refused_with(kube: Kube, path: str, content: Raw, words: re.Pattern[str]) -> bool:
    try:
        await kube.call("POST", path, content, {"dryRun": "All"})
    except ApiError as exc:
        return words.search(exc.message) is not None
    return False


COPIED = {
    f"copied {key}": annotated_pod(key, "x")
    for key in (
        "gpuwarden.io/claim",
        "gpuwarden.io/gpu-uuid",
        "gpuwarden.io/reservation-id",
        "gpuwarden.io/node",
        "fudo.org/gpu.uuid",
        "fudo.org/gpu.reservation-id",
        "fudo.org/gpu.node",
    )
}


FORGED = {key: "forged" for one in COPIED.values() for key in one["metadata"]["annotations"]}


@asynccontextmanager
async def unreachable_webhook(kube: Kube) -> AsyncIterator[str]:
    """A namespace with one pod of each kind, created earlier; now every webhook call fails."""
    label = {"example.test/down": "true"}
    async with new_namespace(kube, label) as namespace:
        outputs = {"gpuwarden.io/claim": "{}", "gpuwarden.io/reservation-id": "r1", "gpuwarden.io/gpu-uuid": "GPU-0"}
        gate = [{"name": "example.test/wait"}]
        await kube.create(PODS, pod("plain"), namespace)
        await kube.create(PODS, pod("served", annotations=HASH | outputs, schedulingGates=gate), namespace)
        await kube.create(PODS, pod_with_containers(container(env=VISIBLE)), namespace)
        await kube.create(PODS, pod("asking", gpus=1), namespace)
        installation = Installation(
            opt_in="example.test/down", url=UNREACHABLE_URL, reviews_deletes=True, reviews_bindings=False
        )
        async with registered(kube, installation, "down"):
            refused = re.compile(r'failed calling webhook "mutate\.gpuwarden\.io"')
            await wait_until(lambda: is_refused_with(kube, PODS.path(namespace), pod("probe", gpus=1), refused))
            yield namespace
