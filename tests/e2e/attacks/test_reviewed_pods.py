"""A user who may write pods, even an administrator, changes what a review has written, through any subresource, or runs
a webhook after gpuwarden's."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import emptied_namespace
from tests.e2e.kube import (
    PODS,
    ApiError,
    Kube,
    Raw,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.webhook_calls import (
    CANONICAL,
    FORGED,
    HASH,
    INVENTORY,
    QUIET,
    VISIBLE,
    CallCounter,
    WebhookHarness,
    container,
    granted,
    pod_with_containers,
    unreachable_webhook,
    unscheduled_pod,
    webhook_harness,
)
from tests.e2e.webhook_configurations import another_webhook, show_all_gpus
from tests.running import Running, serving
from webhook.kube.install.policies import Installation, policies

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
    ids=["changed", "older name", "removed", "forged CDI", "forged vendor CDI"],
)
async def test_reservation_annotations_cannot_be_changed_through_any_subresource(
    harness: WebhookHarness, enabled: str, change: dict[str, str | None], subresource: str
) -> None:
    """Not even by an administrator, whom the policies allow."""
    await harness.kube.create(PODS, unscheduled_pod(), enabled)
    async with CallCounter(harness) as calls:
        with pytest.raises(ApiError) as refused:
            await harness.kube.patch(PODS, "a", {"metadata": {"annotations": change}}, enabled, subresource)
    assert (refused.value.status, refused.value.reason) == (403, "Immutable")
    assert calls.both == (0, 1)


async def test_debug_container_is_reviewed_if_it_would_see_gpus(harness: WebhookHarness, enabled: str) -> None:
    made = await harness.kube.create(PODS, unscheduled_pod(), enabled)
    own = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]

    def debug(name: str, value: str) -> Raw:
        env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]
        return {"spec": {"ephemeralContainers": [container(name, env=env)]}}

    async with CallCounter(harness) as calls:
        with pytest.raises(ApiError) as refused:
            await harness.kube.patch(PODS, "a", debug("greedy", "all"), enabled, "ephemeralcontainers")
        await harness.kube.patch(PODS, "a", debug("modest", own), enabled, "ephemeralcontainers")
    assert (refused.value.status, refused.value.reason) == (403, "Immutable")
    assert calls.both == (0, 2)


async def test_debug_container_of_a_pod_without_a_claim_is_reviewed(harness: WebhookHarness, enabled: str) -> None:
    await harness.kube.create(PODS, pod("a"), enabled)
    debug = {"spec": {"ephemeralContainers": [container("debug", env=VISIBLE)]}}
    with pytest.raises(ApiError, match=r'webhook "validate-update\.gpuwarden\.io" denied the request'):
        await harness.kube.patch(PODS, "a", debug, enabled, "ephemeralcontainers")


async def test_own_account_writes_annotations_without_a_review(
    harness: WebhookHarness, cluster: Cluster, enabled: str
) -> None:
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]}
    manage = {"apiGroups": ["gpuwarden.io"], "resources": ["reservations"], "verbs": ["manage"]}
    path, own = PODS.path(enabled, "a"), harness.own_namespace
    change = {"metadata": {"annotations": {"gpuwarden.io/node": "node-2"}}}
    await harness.kube.create(PODS, pod("a", gpus=1, annotations=HASH), enabled)
    async with (
        granted(harness.kube, "annotations-writer", [pods, manage], [(own, "gpuwarden"), ("default", "stranger")]),
        granted(harness.kube, "pods-writer", [pods], [(own, "another")]),
        Kube(cluster.service_account_kubeconfig(own, "gpuwarden")) as gpuwarden,
        Kube(cluster.service_account_kubeconfig("default", "stranger")) as stranger,
        Kube(cluster.service_account_kubeconfig(own, "another")) as another,
    ):
        for client in (stranger, another):
            with pytest.raises(ApiError) as refused:
                await client.call("PATCH", path, change, {"dryRun": "All"})
            assert refused.value.reason == "Immutable"
        async with CallCounter(harness) as calls:
            await gpuwarden.call("PATCH", path, change, {"dryRun": "All"})
        assert calls.both == (0, 0)


@pytest_asyncio.fixture(loop_scope="module")
async def with_policies(harness: WebhookHarness, enabled: str) -> AsyncIterator[str]:
    """Yields the namespace with policies installed, too."""
    strippable = {key: value for key, value in FORGED.items() if key != "gpuwarden.io/claim"}

    async def calls_of_a_forgery() -> tuple[int, int]:
        is_made = False
        async with CallCounter(harness) as calls:
            # The policy that refuses unblinded containers can act before the one that blinds.
            with suppress(ApiError):
                is_made = bool(await harness.kube.create(PODS, pod("a", annotations=strippable), enabled, dryRun="All"))
        return calls.both if is_made else (-1, -1)

    async with AsyncExitStack() as stack:
        for manifest in policies(Installation()):
            await harness.kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(harness.kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        # Annotations that a policy removes cause no webhook call.
        await wait_until(calls_of_a_forgery, lambda seen: seen == (0, 0))
        yield enabled


async def test_forged_annotations_are_removed_and_written_annotations_stay(
    harness: WebhookHarness, with_policies: str
) -> None:
    asking = pod("a", gpus=1, annotations=FORGED | HASH)
    async with CallCounter(harness) as calls:
        made = (await harness.kube.create(PODS, asking, with_policies))["metadata"]["annotations"]
    assert calls.both == (1, 1)
    assert made["gpuwarden.io/node"] == made["fudo.org/gpu.node"] == "node-1"
    assert made["gpuwarden.io/gpu-uuid"].startswith("GPU-")
    assert "forged" not in made.values()


async def test_copied_manifest_gets_its_gpus_with_policies_installed(
    harness: WebhookHarness, with_policies: str
) -> None:
    """Its request is only in the claim annotation: it was removed from the containers when the first pod was
    dressed."""
    first = await harness.kube.create(PODS, pod("a", gpus=1), with_policies)
    meta = {"name": "b", "annotations": first["metadata"]["annotations"]}
    spec = {key: value for key, value in first["spec"].items() if key != "nodeName"}
    second = await harness.kube.create(PODS, {"metadata": meta, "spec": spec}, with_policies)
    uuids = {one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] for one in (first, second)}
    assert len(uuids) == 2


def presets_a_node(one: Raw) -> list[Raw]:
    return [{"op": "add", "path": "/spec/nodeName", "value": "node-2"}]


@pytest.mark.parametrize(
    ("change", "field"), [(show_all_gpus, "spec.containers[0].env"), (presets_a_node, "spec.nodeName")]
)
async def test_change_by_a_later_mutating_webhook_is_denied_by_validate(
    harness: WebhookHarness, enabled: str, tmp_path: Path, change: Callable[[Raw], list[Raw]], field: str
) -> None:
    async with another_webhook(harness.kube, enabled, tmp_path, change, "IfNeeded"):
        with pytest.raises(ApiError) as refused:
            await harness.kube.create(PODS, pod("train", gpus=1, annotations=HASH), enabled)
    assert refused.value.status == 403
    assert field in refused.value.message
    assert await harness.kube.find(PODS, "train", enabled) is None


@pytest_asyncio.fixture(loop_scope="module")
async def namespace_without_webhook(kube: Kube) -> AsyncIterator[str]:
    async with unreachable_webhook(kube) as namespace:
        yield namespace


async def test_claims_and_annotation_changes_are_refused_while_no_webhook_answers(
    kube: Kube, namespace_without_webhook: str
) -> None:
    stolen = {"metadata": {"annotations": {"gpuwarden.io/gpu-uuid": "GPU-7"}}}
    for subresource in ("", "status"):
        with pytest.raises(ApiError, match="failed calling webhook"):
            await kube.patch(PODS, "served", stolen, namespace_without_webhook, subresource)
    for one in (pod("b", gpus=1), pod_with_containers(container("b", env=VISIBLE))):
        with pytest.raises(ApiError, match="failed calling webhook"):
            await kube.create(PODS, one, namespace_without_webhook)
    await kube.create(PODS, pod("c"), namespace_without_webhook)
    await pod_in_phase(kube, namespace_without_webhook, "c", "Running")


@pytest_asyncio.fixture(loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig) as client:
        yield client
