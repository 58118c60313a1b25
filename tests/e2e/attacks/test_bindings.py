"""A user who may create Bindings places pods without the scheduler: on other nodes, without GPUs or evidence, or in
another pod's place."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    PODS,
    ApiError,
    Kube,
    Raw,
    delete_without_finalizers,
    pod,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_calls import HASH, PROVEN, QUIET, UNREACHABLE_URL, ca_of, is_refused_with, registered
from tests.e2e.webhook_configurations import is_reviewed
from tests.ledger.fake_store import gpu_node
from tests.running import serving
from webhook.kube.install.policies import Installation

pytestmark = pytest.mark.asyncio(loop_scope="module")


# With reservations in the cluster ledger.


@frozen
class Bound:
    """A namespace whose Bindings are reviewed. No scheduler binds its pods; the tests do."""

    kube: Kube
    namespace: str

    async def create(self, gpus: int = 0, annotations: dict[str, str] | None = None) -> Raw:
        return await self.kube.create(PODS, pod(None, gpus, annotations, schedulerName="nobody"), self.namespace)

    async def bind(
        self, name: str, node: str, uid: str | None = None, route: str = "binding", **options: str
    ) -> ApiError | None:
        """Why the binding was denied."""
        path = PODS.path(self.namespace, name, "binding")
        if route == "bindings":
            path = f"/api/v1/namespaces/{self.namespace}/bindings"
        content: Raw = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, **({"uid": uid} if uid else {})},
            "target": {"kind": "Node", "name": node},
        }
        try:
            await self.kube.call("POST", path, content, options)
        except ApiError as exc:
            return exc
        return None

    async def node_of(self, name: str) -> str | None:
        node: str | None = (await self.kube.get(PODS, name, self.namespace))["spec"].get("nodeName")
        return node

    async def is_refused(self, name: str, node: str, reason: str) -> bool:
        refused = await self.bind(name, node, dryRun="All")
        return refused is not None and refused.reason == reason


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bound(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bound]:
    label, directory = {"example.test/clustered": "true"}, tmp_path_factory.mktemp("clustered")
    flags = ("--ledger", "cluster", "--kubeconfig", str(cluster.kubeconfig), *QUIET)
    proven = ("--node-hash-map", json.dumps({"node-1": PROVEN}))
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(Kube(cluster.kubeconfig))
        await installed(kube)
        for name in ("node-1", "node-2"):
            await kube.create(GPU_NODES, gpu_node(name, *(f"GPU-{name}-{k}" for k in range(8))))
            stack.push_async_callback(delete_without_finalizers, kube, GPU_NODES, name)
        namespace = await stack.enter_async_context(new_namespace(kube, label))
        running = stack.enter_context(serving(directory, None, (*flags, *proven)))
        installation = Installation(
            opt_in="example.test/clustered",
            url=running.urls["https"],
            ca_bundle=ca_of(running),
            reviews_bindings=True,
        )
        await stack.enter_async_context(registered(kube, installation, "clustered"))
        there = Bound(kube, namespace)
        await wait_until(lambda: is_reviewed(kube, namespace))
        await wait_until(lambda: there.is_refused("nobody", "node-1", "ReservationConflict"))
        yield there


def reserved_node(made: Raw) -> str:
    return str(made["metadata"]["annotations"]["gpuwarden.io/node"])


OTHER = {"node-1": "node-2", "node-2": "node-1"}


@pytest.mark.parametrize("route", ["binding", "bindings"])
@pytest.mark.parametrize("names_uid", [True, False], ids=["with a uid", "without"])
async def test_manual_binding_is_allowed_only_to_the_node_of_the_pods_gpus(
    bound: Bound, route: str, names_uid: bool
) -> None:
    made = await bound.create(gpus=1)
    name, uid = made["metadata"]["name"], made["metadata"]["uid"] if names_uid else None
    own = reserved_node(made)
    for options in ({"dryRun": "All"}, {}):
        refused = await bound.bind(name, OTHER[own], uid, route, **options)
        assert refused is not None
        assert (refused.status, refused.reason) == (403, "NotReserved")
        assert f"reserved on {own}, not on {OTHER[own]}" in refused.message
    assert await bound.node_of(name) is None
    assert await bound.bind(name, own, uid, route, dryRun="All") is None
    assert await bound.bind(name, own, uid, route) is None
    assert await bound.node_of(name) == own


async def test_binding_for_a_deleted_pod_of_the_same_name_is_denied(bound: Bound) -> None:
    made = await bound.create(gpus=1)
    refused = await bound.bind(made["metadata"]["name"], reserved_node(made), "00000000-0000-4000-8000-000000000000")
    assert refused is not None
    assert (refused.status, refused.reason) == (409, "ReservationConflict")


async def test_pod_without_its_reservation_cannot_be_bound(bound: Bound) -> None:
    """Its environment names a GPU that the next pod may get."""
    made = await bound.create(gpus=1)
    name, own = made["metadata"]["name"], reserved_node(made)
    slot = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] + "/0"
    assert await bound.bind(name, own, dryRun="All") is None
    for entry in ({"phase": "releasing"}, None):
        await bound.kube.patch(GPU_NODES, own, {"status": {"held": {slot: entry}}}, subresource="status")
        await wait_until(lambda: bound.is_refused(name, own, "NotReserved"))
    refused = await bound.bind(name, own, made["metadata"]["uid"])
    assert refused is not None
    assert refused.reason == "NotReserved"
    assert await bound.node_of(name) is None


async def test_pod_that_requires_evidence_is_bound_only_to_proven_nodes(bound: Bound) -> None:
    name = (await bound.create(annotations=HASH))["metadata"]["name"]
    for node, reason in (("node-2", "NoProvenNode"), ("node-nowhere", "NoSuitableNode")):
        refused = await bound.bind(name, node)
        assert refused is not None
        assert (refused.status, refused.reason) == (403, reason)
    assert await bound.bind(name, "node-1") is None
    assert await bound.node_of(name) == "node-1"


async def test_pod_without_a_claim_is_bound_anywhere(bound: Bound) -> None:
    name = (await bound.create())["metadata"]["name"]
    assert await bound.bind(name, "node-2") is None


async def test_only_schedulers_bind_pods_while_no_replica_answers(kube: Kube) -> None:
    """A Binding does not contain its pod's claim. For schedulers see tests/e2e/attacks/test_bound_while_down.py."""
    label = {"example.test/unbound": "true"}
    async with new_namespace(kube, label) as namespace:
        await kube.create(PODS, pod("plain", schedulerName="nobody"), namespace)
        target = {"metadata": {"name": "plain"}, "target": {"kind": "Node", "name": "node-0"}}
        installation = Installation(opt_in="example.test/unbound", url=UNREACHABLE_URL)
        async with registered(kube, installation, "unbound"):
            refused = re.compile(r'failed calling webhook "validate-binding\.gpuwarden\.io"')
            await wait_until(lambda: is_refused_with(kube, f"{PODS.path(namespace, 'plain')}/binding", target, refused))
        assert "nodeName" not in (await kube.get(PODS, "plain", namespace))["spec"]


@pytest_asyncio.fixture(loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig) as client:
        yield client
