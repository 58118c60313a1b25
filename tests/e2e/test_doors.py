"""Which requests the API server brings before us, by the configurations that we ship; and what it does without us."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.hooks import is_reviewed
from tests.e2e.kube import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    MUTATING,
    NAMESPACES,
    PODS,
    VALIDATING,
    ApiError,
    Kube,
    Raw,
    forced_away,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.test_policies import resource_of
from tests.ledger.fake_store import gpu_node
from tests.running import Running, serving
from webhook.policies import Installation, policies, webhooks

PROVEN = "sha256:aa11"
HASH = {"gpuwarden.io/required-hash": PROVEN}
INVENTORY = {
    "nodes": [{"name": "node-1", "evidence": {"hash": PROVEN}, "devices": [{"uuid": f"GPU-{n}"} for n in range(64)]}]
}
# Nobody reads the log while a test runs, and a pipe holds 64 KiB.
QUIET = ("--log-level", "error")
# The discard port, where nobody listens.
NOBODY = "https://127.0.0.1:9"

CANONICAL, ALIAS = {"gpuwarden.io/enabled": "true"}, {"scheduler.radix.ai/enabled": "true"}
VISIBLE = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]

# The fixtures of this module live as long as it does, and so does the loop that their connections belong to.
pytestmark = pytest.mark.asyncio(loop_scope="module")


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
class Doors:
    """A server, and an API server that asks it."""

    server: Running
    kube: Kube
    own_namespace: str

    async def calls(self) -> dict[str, int]:
        """How often each route was asked since the server started."""
        async with httpx.AsyncClient(base_url=self.server.urls["http"], trust_env=False) as client:
            text = (await client.get("/metrics")).raise_for_status().text
        found = {"/mutate": 0, "/validate": 0}
        for route, count in re.findall(r'gpuwarden_http_requests_total\{route="(/\w+)",status="\d+"\} ([\d.]+)', text):
            if route in found:
                found[route] += int(float(count))
        return found


class Counting:
    """The calls of a block."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self.mutate = self.validate = -1

    async def __aenter__(self) -> "Counting":
        self._before = await self._doors.calls()
        return self

    async def __aexit__(self, *_: object) -> None:
        after = await self._doors.calls()
        self.mutate = after["/mutate"] - self._before["/mutate"]
        self.validate = after["/validate"] - self._before["/validate"]

    @property
    def both(self) -> tuple[int, int]:
        return self.mutate, self.validate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), INVENTORY, QUIET) as running:
        yield running


def trusting(server: Running) -> bytes:
    return (server.directory / "certs/dev/ca.crt").read_bytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(cluster: Cluster, server: Running) -> AsyncIterator[Doors]:
    async with Kube(cluster.kubeconfig) as kube, new_namespace(kube, CANONICAL) as own, new_namespace(kube) as probes:
        # Bindings have tests of their own: they are of every pod of an opted-in namespace, and would be counted here.
        installation = Installation(
            namespace=own,
            url=server.urls["https"],
            ca_bundle=trusting(server),
            reviews_deletes=True,
            reviews_bindings=False,
        )
        async with registered(kube, installation):
            await kube.patch(NAMESPACES, probes, {"metadata": {"labels": CANONICAL}})
            await wait_until(lambda: is_reviewed(kube, probes))
            yield Doors(server, kube, own)


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(doors: Doors) -> AsyncIterator[str]:
    async with new_namespace(doors.kube, CANONICAL) as name:
        yield name
        # Deletes are reviewed too: the last of them is in before the next test counts.
        await doors.kube.call("DELETE", PODS.path(name), query={"gracePeriodSeconds": "0"})
        await wait_until(lambda: doors.kube.list(PODS, name), lambda left: left == [])


def with_labels(one: Raw, labels: dict[str, str]) -> Raw:
    return {**one, "metadata": {**one["metadata"], "labels": labels}}


def container(name: str = "main", **members: Any) -> Raw:
    return {"name": name, "image": "example.test/main:1", **members}


def of_containers(*containers: Raw, **spec: Any) -> Raw:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a"},
        "spec": {"containers": list(containers), **spec},
    }


def noted(key: str, value: str) -> Raw:
    return pod("a", annotations={key: value})


def left_alone() -> Raw:
    """A pod that nobody else writes: the API server asks again about a change if another came between."""
    return pod("a", gpus=1, annotations=HASH, schedulerName="nobody")


def labelled(key: str, value: str) -> Raw:
    return with_labels(pod("a"), {key: value})


def asking(part: str, resource: str) -> Raw:
    amounts = {"limits": {resource: "1"}, "requests": {resource: "1"}}
    return of_containers(container(resources={part: amounts[part], "limits": {resource: "1"}}))


# Who asks for nothing.

NOTHING = {
    "nothing said": pod("a"),
    "no annotations at all": of_containers(container()),
    "others' keys": with_labels(pod("a", annotations={"example.test/gpu": "1"}), {"app": "x", "gpu": "yes"}),
    "only whether to share": noted("gpuwarden.io/shared", "true"),
    "older labels that say no": with_labels(pod("a"), {"fudo.org/gpu.assign": "False", "fudo.org/gpu.h100": "false"}),
    "labels that look alike": with_labels(pod("a"), {"fudo.org/gpus": "x", "gpuwarden.io/gpu-model": "x"}),
    "other env and resources": of_containers(
        container(
            env=[
                {"name": "A", "value": "b"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
            resources={"limits": {"cpu": "1", "example.test/gpu": "1"}},
        ),
        initContainers=[container("init", env=[{"name": "A"}])],
    ),
}


@pytest.mark.parametrize("one", NOTHING.values(), ids=NOTHING)
async def test_a_pod_that_asks_for_nothing_never_calls(doors: Doors, enabled: str, one: Raw) -> None:
    async with Counting(doors) as calls:
        await doors.kube.create(PODS, one, enabled)
        await doors.kube.patch(PODS, "a", {"metadata": {"labels": {"b": "c"}, "annotations": {"b": "c"}}}, enabled)
        ready = {"status": {"conditions": [{"type": "Mine", "status": "True"}]}}
        await doors.kube.patch(PODS, "a", ready, enabled, "status")
        debug = {"spec": {"ephemeralContainers": [container("debug", env=[{"name": "A", "value": "b"}])]}}
        await doors.kube.patch(PODS, "a", debug, enabled, "ephemeralcontainers")
        await doors.kube.delete(PODS, "a", enabled)
        await gone(doors.kube, PODS, "a", enabled)
    assert calls.both == (0, 0)


async def test_a_large_pod_that_asks_for_nothing_is_not_too_dear_to_look_at(doors: Doors, enabled: str) -> None:
    """Beyond a budget the API server stops looking and refuses: 200 containers with 100 variables each are within."""
    env = [{"name": f"VARIABLE_{n}", "value": "x"} for n in range(100)]
    async with Counting(doors) as calls:
        await doors.kube.create(PODS, of_containers(*(container(f"c{n}", env=env) for n in range(200))), enabled)
        await doors.kube.patch(PODS, "a", {"metadata": {"labels": {"b": "c"}}}, enabled)
        await doors.kube.delete(PODS, "a", enabled, grace=0)
    assert calls.both == (0, 0)


async def test_an_invalid_pod_is_told_so_by_the_api_server(doors: Doors, enabled: str) -> None:
    specs: list[Raw] = [{}, {"containers": None}, {"containers": []}]
    for spec in specs:
        with pytest.raises(ApiError) as refused:
            await doors.kube.create(PODS, {"metadata": {"name": "a"}, "spec": spec}, enabled)
        assert refused.value.status == 422, refused.value.message


# Who asks, and what would show a GPU.

ASKING = {
    "hash": noted("gpuwarden.io/required-hash", PROVEN),
    "older hash": noted("attestation-hash.my-company.com/required-hash", PROVEN),
    "count": noted("gpuwarden.io/gpu-count", "1"),
    "count as label": labelled("gpuwarden.io/gpu-count", "1"),
    "requirement": labelled("gpuwarden.io/gpu.model", "false"),
    "older requirement": labelled("fudo.org/gpu.h100", "true"),
    "older requirement without a value": labelled("fudo.org/gpu", ""),
    "older opt-in": labelled("fudo.org/gpu.assign", "true"),
    "map": noted("gpuwarden.io/gpu-map", "0=node-1:GPU-0"),
    "older map": noted("gpu-scheduling-map", "0=node-1:GPU-0"),
    "limit": asking("limits", "nvidia.com/gpu"),
    "request": asking("requests", "nvidia.com/gpu"),
    "slice of a GPU": asking("limits", "nvidia.com/mig-1g.5gb"),
    "device class": asking("limits", "deviceclass.resource.kubernetes.io/gpu.nvidia.com"),
    "limit of an init container": of_containers(
        container(), initContainers=[container("init", resources={"limits": {"nvidia.com/gpu": "1"}})]
    ),
    "resource claim": of_containers(container(), resourceClaims=[{"name": "x", "resourceClaimName": "x"}]),
    "env": of_containers(container(env=VISIBLE)),
    "env of the second container": of_containers(container(), container("b", env=[{"name": "A"}, *VISIBLE])),
    "env of an init container": of_containers(
        container(), initContainers=[container("init", env=[{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}])]
    ),
    "cdi": noted("cdi.k8s.io/x", "nvidia.com/gpu=all"),
    "cdi of a vendor": noted("nvidia.cdi.k8s.io/x", "nvidia.com/gpu=all"),
}
COPIED = {
    f"copied {key}": noted(key, "x")
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


@pytest.mark.parametrize("one", (ASKING | COPIED).values(), ids=ASKING | COPIED)
async def test_whoever_asks_or_would_see_a_gpu_calls(doors: Doors, enabled: str, one: Raw) -> None:
    said = ""
    async with Counting(doors) as calls:
        try:
            await doors.kube.create(PODS, one, enabled, dryRun="All")
        except ApiError as exc:
            said = exc.message
    assert calls.mutate == 1
    assert "failed calling webhook" not in said
    # The second one is not asked about what the first one denied, nor about what asks for nothing any more.
    is_denied = 'webhook "mutate.gpuwarden.io" denied' in said
    assert calls.validate == (0 if is_denied or one in COPIED.values() else 1), said


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (CANONICAL, (1, 1)),
        (ALIAS, (1, 1)),
        (CANONICAL | ALIAS, (1, 1)),
        ({"gpuwarden.io/enabled": "false"} | ALIAS, (1, 1)),
        ({"gpuwarden.io/enabled": "yes"}, (0, 0)),
        ({}, (0, 0)),
    ],
    ids=["canonical", "older", "both", "canonical off", "another value", "none"],
)
async def test_a_namespace_asks_by_either_label_and_is_heard_once(
    doors: Doors, labels: dict[str, str], expected: tuple[int, int]
) -> None:
    async with new_namespace(doors.kube, labels) as namespace, Counting(doors) as calls:
        await doors.kube.create(PODS, pod("a", gpus=1, annotations=HASH), namespace, dryRun="All")
    assert calls.both == expected


async def test_our_own_namespace_and_the_systems_are_never_asked_about(doors: Doors) -> None:
    await doors.kube.patch(NAMESPACES, "kube-system", {"metadata": {"labels": CANONICAL | ALIAS}})
    try:
        async with Counting(doors) as calls:
            for namespace in ("kube-system", doors.own_namespace):
                await doors.kube.create(PODS, pod("a", gpus=1, annotations=HASH), namespace, dryRun="All")
    finally:
        taken = dict.fromkeys(CANONICAL | ALIAS)
        await doors.kube.patch(NAMESPACES, "kube-system", {"metadata": {"labels": taken}})
    assert calls.both == (0, 0)


# A pod that exists.


async def test_a_pods_life_calls_at_its_ends_only(doors: Doors, enabled: str) -> None:
    async with Counting(doors) as born:
        await doors.kube.create(PODS, pod("a", gpus=1, annotations=HASH), enabled)
    assert born.both == (1, 1)
    async with Counting(doors) as lived:
        await pod_in_phase(doors.kube, enabled, "a", "Running")
        change = {"metadata": {"labels": {"b": "c"}, "annotations": {"b": "c"}, "finalizers": ["example.test/hold"]}}
        await doors.kube.patch(PODS, "a", change, enabled)
        image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "example.test/main:2"}]
        await doors.kube.patch(PODS, "a", image, enabled)
    assert lived.both == (0, 0)
    async with Counting(doors) as ended:
        await doors.kube.delete(PODS, "a", enabled, grace=0)
    # The kubelet, seeing it, deletes it as well.
    assert (ended.mutate, ended.validate >= 1) == (0, True)
    async with Counting(doors) as afterwards:
        await doors.kube.patch(PODS, "a", {"metadata": {"finalizers": None}}, enabled)
        await gone(doors.kube, PODS, "a", enabled)
    assert afterwards.mutate == 0


async def test_a_resize_is_asked_about_where_gpus_are_asked_of_a_device_plugin(doors: Doors, enabled: str) -> None:
    """Our own pods have no such request any more: their CPU is their owner's."""
    cpu = {"requests": {"cpu": "1"}, "limits": {"cpu": "8"}}
    one = of_containers(container(resources=cpu), schedulerName="nobody")
    one["metadata"]["annotations"] = HASH | {"gpuwarden.io/gpu-count": "1"}
    await doors.kube.create(PODS, one, enabled)
    more = [{"op": "replace", "path": "/spec/containers/0/resources/requests/cpu", "value": "2"}]
    async with Counting(doors) as calls:
        await doors.kube.patch(PODS, "a", more, enabled, "resize")
    assert calls.both == (0, 0)


@pytest.mark.parametrize("subresource", ["", "status"], ids=["pod", "status"])
@pytest.mark.parametrize(
    "change",
    [
        {"gpuwarden.io/gpu-uuid": "GPU-7"},
        {"fudo.org/gpu.uuid": "GPU-7"},
        {"gpuwarden.io/claim": None},
        {"cdi.k8s.io/x": "nvidia.com/gpu=all"},
        {"nvidia.cdi.k8s.io/x": "nvidia.com/gpu=all"},
    ],
    ids=["changed", "older name", "taken away", "made up", "made up by vendor"],
)
async def test_a_promise_is_changed_through_no_door(
    doors: Doors, enabled: str, change: dict[str, str | None], subresource: str
) -> None:
    """By an administrator neither, whom the policies let pass."""
    await doors.kube.create(PODS, left_alone(), enabled)
    async with Counting(doors) as calls:
        with pytest.raises(ApiError) as refused:
            await doors.kube.patch(PODS, "a", {"metadata": {"annotations": change}}, enabled, subresource)
    assert (refused.value.status, refused.value.reason) == (403, "Immutable")
    assert calls.both == (0, 1)


async def test_a_debug_container_is_asked_about_when_it_would_see_gpus(doors: Doors, enabled: str) -> None:
    made = await doors.kube.create(PODS, left_alone(), enabled)
    own = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]

    def debug(name: str, value: str) -> Raw:
        env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]
        return {"spec": {"ephemeralContainers": [container(name, env=env)]}}

    async with Counting(doors) as calls:
        with pytest.raises(ApiError) as refused:
            await doors.kube.patch(PODS, "a", debug("greedy", "all"), enabled, "ephemeralcontainers")
        await doors.kube.patch(PODS, "a", debug("modest", own), enabled, "ephemeralcontainers")
    assert (refused.value.status, refused.value.reason) == (403, "Immutable")
    assert calls.both == (0, 2)


async def test_a_debug_container_of_a_pod_without_a_claim_is_asked_about_too(doors: Doors, enabled: str) -> None:
    await doors.kube.create(PODS, pod("a"), enabled)
    debug = {"spec": {"ephemeralContainers": [container("debug", env=VISIBLE)]}}
    with pytest.raises(ApiError, match=r'webhook "validate-update\.gpuwarden\.io" denied the request'):
        await doors.kube.patch(PODS, "a", debug, enabled, "ephemeralcontainers")


async def test_our_own_account_writes_its_annotations_without_asking_us(
    doors: Doors, cluster: Cluster, enabled: str
) -> None:
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]}
    manage = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}
    path, own = PODS.path(enabled, "a"), doors.own_namespace
    change = {"metadata": {"annotations": {"gpuwarden.io/node": "node-2"}}}
    await doors.kube.create(PODS, pod("a", gpus=1, annotations=HASH), enabled)
    async with (
        granted(doors.kube, "doors-writer", [pods, manage], [(own, "gpuwarden"), ("default", "stranger")]),
        granted(doors.kube, "doors-pods", [pods], [(own, "another")]),
        Kube(cluster.service_account_kubeconfig(own, "gpuwarden")) as gpuwarden,
        Kube(cluster.service_account_kubeconfig("default", "stranger")) as stranger,
        Kube(cluster.service_account_kubeconfig(own, "another")) as another,
    ):
        for client in (stranger, another):
            with pytest.raises(ApiError) as refused:
                await client.call("PATCH", path, change, {"dryRun": "All"})
            assert refused.value.reason == "Immutable"
        async with Counting(doors) as calls:
            await gpuwarden.call("PATCH", path, change, {"dryRun": "All"})
        assert calls.both == (0, 0)


@asynccontextmanager
async def granted(kube: Kube, name: str, rules: list[Raw], accounts: list[tuple[str, str]]) -> AsyncIterator[None]:
    await kube.create(CLUSTER_ROLES, {"metadata": {"name": name}, "rules": rules})
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subjects = [{"kind": "ServiceAccount", "namespace": ns, "name": account} for ns, account in accounts]
    await kube.create(CLUSTER_ROLE_BINDINGS, {"metadata": {"name": name}, "roleRef": ref, "subjects": subjects})
    try:
        yield
    finally:
        await kube.delete(CLUSTER_ROLE_BINDINGS, name)
        await kube.delete(CLUSTER_ROLES, name)


async def test_both_paths_of_a_binding_lead_to_us(doors: Doors) -> None:
    label = {"example.test/bound": "true"}
    installation = Installation(
        opt_in="example.test/bound",
        url=doors.server.urls["https"],
        ca_bundle=trusting(doors.server),
        reviews_bindings=True,
    )
    to_node: Raw = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a"},
        "target": {"kind": "Node", "name": "node-1"},
    }
    async with new_namespace(doors.kube, label) as namespace, registered(doors.kube, installation, "bound"):
        await doors.kube.create(PODS, pod("a", schedulerName="nobody"), namespace)

        async def calls_of(path: str) -> tuple[int, int]:
            async with Counting(doors) as calls:
                # What the server says to it is another test's matter.
                with suppress(ApiError):
                    await doors.kube.call("POST", path, to_node, {"dryRun": "All"})
            return calls.both

        for path in (PODS.path(namespace, "a", "binding"), f"/api/v1/namespaces/{namespace}/bindings"):
            await wait_until(lambda path=path: calls_of(path), lambda seen: seen == (0, 1))  # type: ignore[misc]  # bound now


async def is_said(kube: Kube, path: str, content: Raw, words: re.Pattern[str]) -> bool:
    try:
        await kube.call("POST", path, content, {"dryRun": "All"})
    except ApiError as exc:
        return words.search(exc.message) is not None
    return False


# A Binding, where reservations are kept in the cluster.


@frozen
class Bound:
    """A namespace whose Bindings are reviewed. No scheduler places its pods: the tests do."""

    kube: Kube
    namespace: str

    async def create(self, gpus: int = 0, annotations: dict[str, str] | None = None) -> Raw:
        return await self.kube.create(PODS, pod(None, gpus, annotations, schedulerName="nobody"), self.namespace)

    async def bind(
        self, name: str, node: str, uid: str | None = None, route: str = "binding", **options: str
    ) -> ApiError | None:
        """What was said against it."""
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
            stack.push_async_callback(forced_away, kube, GPU_NODES, name)
        namespace = await stack.enter_async_context(new_namespace(kube, label))
        running = stack.enter_context(serving(directory, None, (*flags, *proven)))
        installation = Installation(
            opt_in="example.test/clustered",
            url=running.urls["https"],
            ca_bundle=trusting(running),
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
async def test_a_pod_is_bound_by_hand_to_the_node_of_its_gpus_alone(bound: Bound, route: str, names_uid: bool) -> None:
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


async def test_a_binding_for_the_pod_before_of_that_name_is_refused(bound: Bound) -> None:
    made = await bound.create(gpus=1)
    refused = await bound.bind(made["metadata"]["name"], reserved_node(made), "00000000-0000-4000-8000-000000000000")
    assert refused is not None
    assert (refused.status, refused.reason) == (409, "ReservationConflict")


async def test_a_pod_whose_reservation_was_taken_away_cannot_be_bound(bound: Bound) -> None:
    """Its environment names a GPU that the next pod may hold."""
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


async def test_a_pod_held_to_proven_nodes_is_bound_to_no_other(bound: Bound) -> None:
    name = (await bound.create(annotations=HASH))["metadata"]["name"]
    for node, reason in (("node-2", "NoProvenNode"), ("node-nowhere", "NoSuitableNode")):
        refused = await bound.bind(name, node)
        assert refused is not None
        assert (refused.status, refused.reason) == (403, reason)
    assert await bound.bind(name, "node-1") is None
    assert await bound.node_of(name) == "node-1"


async def test_a_pod_that_asks_for_nothing_is_bound_anywhere(bound: Bound) -> None:
    name = (await bound.create())["metadata"]["name"]
    assert await bound.bind(name, "node-2") is None


# Together with the policies.


FORGED = {key: "forged" for one in COPIED.values() for key in one["metadata"]["annotations"]}


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(doors: Doors, enabled: str) -> AsyncIterator[str]:
    """The policies act too."""
    strippable = {key: value for key, value in FORGED.items() if key != "gpuwarden.io/claim"}

    async def calls_of_a_forgery() -> tuple[int, int]:
        async with Counting(doors) as calls:
            await doors.kube.create(PODS, pod("a", annotations=strippable), enabled, dryRun="All")
        return calls.both

    async with AsyncExitStack() as stack:
        for manifest in policies(Installation()):
            await doors.kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(doors.kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        # What is taken off before the webhooks leaves nothing that would call.
        await wait_until(calls_of_a_forgery, lambda seen: seen == (0, 0))
        yield enabled


async def test_what_is_forged_is_taken_off_and_what_we_write_stays(doors: Doors, guarded: str) -> None:
    asking = pod("a", gpus=1, annotations=FORGED | HASH)
    async with Counting(doors) as calls:
        made = (await doors.kube.create(PODS, asking, guarded))["metadata"]["annotations"]
    assert calls.both == (1, 1)
    assert made["gpuwarden.io/node"] == made["fudo.org/gpu.node"] == "node-1"
    assert made["gpuwarden.io/gpu-uuid"].startswith("GPU-")
    assert "forged" not in made.values()


async def test_a_copied_manifest_is_served_with_the_policies_too(doors: Doors, guarded: str) -> None:
    """Its request is in the claim alone: it was taken off the containers when the first one was dressed."""
    first = await doors.kube.create(PODS, pod("a", gpus=1), guarded)
    meta = {"name": "b", "annotations": first["metadata"]["annotations"]}
    spec = {key: value for key, value in first["spec"].items() if key != "nodeName"}
    second = await doors.kube.create(PODS, {"metadata": meta, "spec": spec}, guarded)
    uuids = {one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] for one in (first, second)}
    assert len(uuids) == 2


# When nobody answers.


@pytest_asyncio.fixture(loop_scope="module")
async def without_us(kube: Kube) -> AsyncIterator[str]:
    """A namespace with one pod of each kind, made before; now every call leads nowhere."""
    label = {"example.test/down": "true"}
    async with new_namespace(kube, label) as namespace:
        notes = dict.fromkeys(ASKING["hash"]["metadata"]["annotations"], PROVEN)
        outputs = {"gpuwarden.io/claim": "{}", "gpuwarden.io/reservation-id": "r1", "gpuwarden.io/gpu-uuid": "GPU-0"}
        gate = [{"name": "example.test/wait"}]
        await kube.create(PODS, pod("plain"), namespace)
        await kube.create(PODS, pod("served", annotations=notes | outputs, schedulingGates=gate), namespace)
        await kube.create(PODS, of_containers(container(env=VISIBLE)), namespace)
        await kube.create(PODS, pod("asking", gpus=1), namespace)
        installation = Installation(
            opt_in="example.test/down", url=NOBODY, reviews_deletes=True, reviews_bindings=False
        )
        async with registered(kube, installation, "down"):
            refused = re.compile(r'failed calling webhook "mutate\.gpuwarden\.io"')
            await wait_until(lambda: is_said(kube, PODS.path(namespace), pod("probe", gpus=1), refused))
            yield namespace


async def test_every_pod_can_be_deleted(kube: Kube, without_us: str) -> None:
    for name in ("plain", "served", "a", "asking"):
        await kube.delete(PODS, name, without_us, grace=0)
        await gone(kube, PODS, name, without_us)


async def test_all_pods_can_be_deleted_at_once(kube: Kube, without_us: str) -> None:
    await kube.call("DELETE", PODS.path(without_us), query={"gracePeriodSeconds": "0"})
    await wait_until(lambda: kube.list(PODS, without_us), lambda left: left == [])


async def test_a_pod_that_was_served_runs_on(kube: Kube, without_us: str) -> None:
    """It is scheduled, started and ended: none of that asks us."""
    await kube.patch(PODS, "served", [{"op": "remove", "path": "/spec/schedulingGates/0"}], without_us)
    await pod_in_phase(kube, without_us, "served", "Running")
    ended = {"status": {"phase": "Succeeded"}}
    await kube.patch(PODS, "served", ended, without_us, "status")
    assert (await kube.get(PODS, "served", without_us))["status"]["phase"] == "Succeeded"


async def test_where_bindings_are_reviewed_nobody_but_a_scheduler_puts_pods_on_nodes_meanwhile(kube: Kube) -> None:
    """A Binding does not say what its pod asks for. Schedulers: tests/e2e/attacks/test_bound_while_down.py."""
    label = {"example.test/unbound": "true"}
    async with new_namespace(kube, label) as namespace:
        await kube.create(PODS, pod("plain", schedulerName="nobody"), namespace)
        target = {"metadata": {"name": "plain"}, "target": {"kind": "Node", "name": "node-0"}}
        installation = Installation(opt_in="example.test/unbound", url=NOBODY)
        async with registered(kube, installation, "unbound"):
            refused = re.compile(r'failed calling webhook "validate-binding\.gpuwarden\.io"')
            await wait_until(lambda: is_said(kube, f"{PODS.path(namespace, 'plain')}/binding", target, refused))
        assert "nodeName" not in (await kube.get(PODS, "plain", namespace))["spec"]


async def test_its_promise_stays_and_no_other_is_made(kube: Kube, without_us: str) -> None:
    stolen = {"metadata": {"annotations": {"gpuwarden.io/gpu-uuid": "GPU-7"}}}
    for subresource in ("", "status"):
        with pytest.raises(ApiError, match="failed calling webhook"):
            await kube.patch(PODS, "served", stolen, without_us, subresource)
    for one in (pod("b", gpus=1), of_containers(container("b", env=VISIBLE))):
        with pytest.raises(ApiError, match="failed calling webhook"):
            await kube.create(PODS, one, without_us)
    await kube.create(PODS, pod("c"), without_us)
    await pod_in_phase(kube, without_us, "c", "Running")


@pytest_asyncio.fixture(loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig) as client:
        yield client
