"""Which requests the API server sends to gpuwarden with the shipped configurations, and what it does without a
server."""

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import emptied_namespace, new_namespace
from tests.e2e.kube import (
    NAMESPACES,
    PODS,
    ApiError,
    Kube,
    Raw,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.webhook_calls import (
    ALIAS,
    CANONICAL,
    COPIED,
    HASH,
    INVENTORY,
    PROVEN,
    QUIET,
    VISIBLE,
    CallCounter,
    WebhookHarness,
    annotated_pod,
    ca_of,
    container,
    pod_with_containers,
    registered,
    unreachable_webhook,
    webhook_harness,
    with_labels,
)
from tests.running import Running, serving
from webhook.kube.install.policies import Installation

# The fixtures of this module and the event loop of their connections live as long as the module.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), INVENTORY, QUIET) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(cluster: Cluster, server: Running) -> AsyncIterator[WebhookHarness]:
    async with webhook_harness(cluster, server) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(harness: WebhookHarness) -> AsyncIterator[str]:
    async with emptied_namespace(harness.kube, CANONICAL) as name:
        yield name


def labelled(key: str, value: str) -> Raw:
    return with_labels(pod("a"), {key: value})


def asking(part: str, resource: str) -> Raw:
    amounts = {"limits": {resource: "1"}, "requests": {resource: "1"}}
    return pod_with_containers(container(resources={part: amounts[part], "limits": {resource: "1"}}))


# Pods without a request.

NOTHING = {
    "plain pod": pod("a"),
    "no annotations at all": pod_with_containers(container()),
    "unrelated keys": with_labels(pod("a", annotations={"example.test/gpu": "1"}), {"app": "x", "gpu": "yes"}),
    "only the sharing annotation": annotated_pod("gpuwarden.io/shared", "true"),
    "older labels with false": with_labels(pod("a"), {"fudo.org/gpu.assign": "False", "fudo.org/gpu.h100": "false"}),
    "labels with similar names": with_labels(pod("a"), {"fudo.org/gpus": "x", "gpuwarden.io/gpu-model": "x"}),
    "other env and resources": pod_with_containers(
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
async def test_pod_without_a_request_causes_no_webhook_call(harness: WebhookHarness, enabled: str, one: Raw) -> None:
    async with CallCounter(harness) as calls:
        await harness.kube.create(PODS, one, enabled)
        await harness.kube.patch(PODS, "a", {"metadata": {"labels": {"b": "c"}, "annotations": {"b": "c"}}}, enabled)
        ready = {"status": {"conditions": [{"type": "Mine", "status": "True"}]}}
        await harness.kube.patch(PODS, "a", ready, enabled, "status")
        debug = {"spec": {"ephemeralContainers": [container("debug", env=[{"name": "A", "value": "b"}])]}}
        await harness.kube.patch(PODS, "a", debug, enabled, "ephemeralcontainers")
        await harness.kube.delete(PODS, "a", enabled)
        await gone(harness.kube, PODS, "a", enabled)
    assert calls.both == (0, 0)


async def test_large_pod_is_within_the_cost_limit_of_match_conditions(harness: WebhookHarness, enabled: str) -> None:
    """Beyond a cost limit the API server refuses the pod: 200 containers with 100 variables each are within it."""
    env = [{"name": f"VARIABLE_{n}", "value": "x"} for n in range(100)]
    async with CallCounter(harness) as calls:
        await harness.kube.create(
            PODS, pod_with_containers(*(container(f"c{n}", env=env) for n in range(200))), enabled
        )
        await harness.kube.patch(PODS, "a", {"metadata": {"labels": {"b": "c"}}}, enabled)
        await harness.kube.delete(PODS, "a", enabled, grace=0)
    assert calls.both == (0, 0)


async def test_invalid_pod_gets_the_error_of_the_api_server(harness: WebhookHarness, enabled: str) -> None:
    specs: list[Raw] = [{}, {"containers": None}, {"containers": []}]
    for spec in specs:
        with pytest.raises(ApiError) as refused:
            await harness.kube.create(PODS, {"metadata": {"name": "a"}, "spec": spec}, enabled)
        assert refused.value.status == 422, refused.value.message


# Pods with a request, and pods that would see a GPU.

ASKING = {
    "hash": annotated_pod("gpuwarden.io/required-hash", PROVEN),
    "older hash": annotated_pod("attestation-hash.my-company.com/required-hash", PROVEN),
    "count": annotated_pod("gpuwarden.io/gpu-count", "1"),
    "count as label": labelled("gpuwarden.io/gpu-count", "1"),
    "requirement": labelled("gpuwarden.io/gpu.model", "false"),
    "older requirement": labelled("fudo.org/gpu.h100", "true"),
    "older requirement without a value": labelled("fudo.org/gpu", ""),
    "older opt-in": labelled("fudo.org/gpu.assign", "true"),
    "map": annotated_pod("gpuwarden.io/gpu-map", "0=node-1:GPU-0"),
    "older map": annotated_pod("gpu-scheduling-map", "0=node-1:GPU-0"),
    "limit": asking("limits", "nvidia.com/gpu"),
    "request": asking("requests", "nvidia.com/gpu"),
    "slice of a GPU": asking("limits", "nvidia.com/mig-1g.5gb"),
    "device class": asking("limits", "deviceclass.resource.kubernetes.io/gpu.nvidia.com"),
    "limit of an init container": pod_with_containers(
        container(), initContainers=[container("init", resources={"limits": {"nvidia.com/gpu": "1"}})]
    ),
    "resource claim": pod_with_containers(container(), resourceClaims=[{"name": "x", "resourceClaimName": "x"}]),
    "env": pod_with_containers(container(env=VISIBLE)),
    "env of the second container": pod_with_containers(container(), container("b", env=[{"name": "A"}, *VISIBLE])),
    "env of an init container": pod_with_containers(
        container(), initContainers=[container("init", env=[{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}])]
    ),
    "cdi": annotated_pod("cdi.k8s.io/x", "nvidia.com/gpu=all"),
    "cdi of a vendor": annotated_pod("nvidia.cdi.k8s.io/x", "nvidia.com/gpu=all"),
}


@pytest.mark.parametrize("one", (ASKING | COPIED).values(), ids=ASKING | COPIED)
async def test_pod_that_requests_or_would_see_a_gpu_is_reviewed(
    harness: WebhookHarness, enabled: str, one: Raw
) -> None:
    said = ""
    async with CallCounter(harness) as calls:
        try:
            await harness.kube.create(PODS, one, enabled, dryRun="All")
        except ApiError as exc:
            said = exc.message
    assert calls.mutate == 1
    assert "failed calling webhook" not in said
    # The second webhook is not called for what the first denied, nor for a pod that no longer has a request.
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
async def test_namespace_opts_in_by_either_label_with_one_call_per_webhook(
    harness: WebhookHarness, labels: dict[str, str], expected: tuple[int, int]
) -> None:
    async with new_namespace(harness.kube, labels) as namespace, CallCounter(harness) as calls:
        await harness.kube.create(PODS, pod("a", gpus=1, annotations=HASH), namespace, dryRun="All")
    assert calls.both == expected


async def test_pods_of_system_namespaces_and_the_own_namespace_are_not_reviewed(harness: WebhookHarness) -> None:
    await harness.kube.patch(NAMESPACES, "kube-system", {"metadata": {"labels": CANONICAL | ALIAS}})
    try:
        async with CallCounter(harness) as calls:
            for namespace in ("kube-system", harness.own_namespace):
                await harness.kube.create(PODS, pod("a", gpus=1, annotations=HASH), namespace, dryRun="All")
    finally:
        taken = dict.fromkeys(CANONICAL | ALIAS)
        await harness.kube.patch(NAMESPACES, "kube-system", {"metadata": {"labels": taken}})
    assert calls.both == (0, 0)


# Existing pods.


async def test_pod_is_reviewed_only_at_creation_and_deletion(harness: WebhookHarness, enabled: str) -> None:
    async with CallCounter(harness) as born:
        await harness.kube.create(PODS, pod("a", gpus=1, annotations=HASH), enabled)
    assert born.both == (1, 1)
    async with CallCounter(harness) as lived:
        await pod_in_phase(harness.kube, enabled, "a", "Running")
        change = {"metadata": {"labels": {"b": "c"}, "annotations": {"b": "c"}, "finalizers": ["example.test/hold"]}}
        await harness.kube.patch(PODS, "a", change, enabled)
        image = [{"op": "replace", "path": "/spec/containers/0/image", "value": "example.test/main:2"}]
        await harness.kube.patch(PODS, "a", image, enabled)
    assert lived.both == (0, 0)
    async with CallCounter(harness) as ended:
        await harness.kube.delete(PODS, "a", enabled, grace=0)
    # The kubelet sends a delete, too.
    assert (ended.mutate, ended.validate >= 1) == (0, True)
    async with CallCounter(harness) as afterwards:
        await harness.kube.patch(PODS, "a", {"metadata": {"finalizers": None}}, enabled)
        await gone(harness.kube, PODS, "a", enabled)
    assert afterwards.mutate == 0


async def test_resize_is_reviewed_for_pods_with_device_plugin_gpus(harness: WebhookHarness, enabled: str) -> None:
    """Dressed pods no longer have such a request: their CPU belongs to their owner."""
    cpu = {"requests": {"cpu": "1"}, "limits": {"cpu": "8"}}
    one = pod_with_containers(container(resources=cpu), schedulerName="nobody")
    one["metadata"]["annotations"] = HASH | {"gpuwarden.io/gpu-count": "1"}
    await harness.kube.create(PODS, one, enabled)
    more = [{"op": "replace", "path": "/spec/containers/0/resources/requests/cpu", "value": "2"}]
    async with CallCounter(harness) as calls:
        await harness.kube.patch(PODS, "a", more, enabled, "resize")
    assert calls.both == (0, 0)


async def test_bindings_are_reviewed_on_both_paths(harness: WebhookHarness) -> None:
    label = {"example.test/bound": "true"}
    installation = Installation(
        opt_in="example.test/bound",
        url=harness.server.urls["https"],
        ca_bundle=ca_of(harness.server),
        reviews_bindings=True,
    )
    to_node: Raw = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a"},
        "target": {"kind": "Node", "name": "node-1"},
    }
    async with new_namespace(harness.kube, label) as namespace, registered(harness.kube, installation, "bound"):
        await harness.kube.create(PODS, pod("a", schedulerName="nobody"), namespace)

        async def calls_of(path: str) -> tuple[int, int]:
            async with CallCounter(harness) as calls:
                # The server's answer is checked by another test.
                with suppress(ApiError):
                    await harness.kube.call("POST", path, to_node, {"dryRun": "All"})
            return calls.both

        for path in (PODS.path(namespace, "a", "binding"), f"/api/v1/namespaces/{namespace}/bindings"):
            await wait_until(lambda path=path: calls_of(path), lambda seen: seen == (0, 1))  # type: ignore[misc]  # bound now


# No server answers.


@pytest_asyncio.fixture(loop_scope="module")
async def namespace_without_webhook(kube: Kube) -> AsyncIterator[str]:
    async with unreachable_webhook(kube) as namespace:
        yield namespace


async def test_every_pod_can_be_deleted(kube: Kube, namespace_without_webhook: str) -> None:
    for name in ("plain", "served", "a", "asking"):
        await kube.delete(PODS, name, namespace_without_webhook, grace=0)
        await gone(kube, PODS, name, namespace_without_webhook)


async def test_all_pods_can_be_deleted_at_once(kube: Kube, namespace_without_webhook: str) -> None:
    await kube.call("DELETE", PODS.path(namespace_without_webhook), query={"gracePeriodSeconds": "0"})
    await wait_until(lambda: kube.list(PODS, namespace_without_webhook), lambda left: left == [])


async def test_pod_with_gpus_continues_while_no_webhook_answers(kube: Kube, namespace_without_webhook: str) -> None:
    """It is scheduled, started and ended without a review."""
    await kube.patch(PODS, "served", [{"op": "remove", "path": "/spec/schedulingGates/0"}], namespace_without_webhook)
    await pod_in_phase(kube, namespace_without_webhook, "served", "Running")
    ended = {"status": {"phase": "Succeeded"}}
    await kube.patch(PODS, "served", ended, namespace_without_webhook, "status")
    assert (await kube.get(PODS, "served", namespace_without_webhook))["status"]["phase"] == "Succeeded"


@pytest_asyncio.fixture(loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig) as client:
        yield client
