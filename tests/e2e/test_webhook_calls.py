"""Which requests the API server brings before us, by the configurations that we ship; and what it does without us."""

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.conftest import new_namespace
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
    Counting,
    Doors,
    container,
    nobody_answers,
    noted,
    of_containers,
    opened,
    registered,
    trusting,
    with_labels,
)
from tests.running import Running, serving
from webhook.kube.install.policies import Installation

# Nobody reads the log while a test runs, and a pipe holds 64 KiB.
# The discard port, where nobody listens.


# The fixtures of this module live as long as it does, and so does the loop that their connections belong to.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), INVENTORY, QUIET) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(cluster: Cluster, server: Running) -> AsyncIterator[Doors]:
    async with opened(cluster, server) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def enabled(doors: Doors) -> AsyncIterator[str]:
    async with new_namespace(doors.kube, CANONICAL) as name:
        yield name
        # Deletes are reviewed too: the last of them is in before the next test counts.
        await doors.kube.call("DELETE", PODS.path(name), query={"gracePeriodSeconds": "0"})
        await wait_until(lambda: doors.kube.list(PODS, name), lambda left: left == [])


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


# When nobody answers.


@pytest_asyncio.fixture(loop_scope="module")
async def without_us(kube: Kube) -> AsyncIterator[str]:
    async with nobody_answers(kube) as namespace:
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


@pytest_asyncio.fixture(loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with Kube(cluster.kubeconfig) as client:
        yield client
