"""A tenant with the role `edit` in an opted-in namespace tries to see GPUs with variables that NVIDIA's runtime
reads."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import emptied_namespace, new_namespace
from tests.e2e.kube import PODS, ROLE_BINDINGS, ApiError, Kube, Raw, access_granted, pod, wait_until
from tests.e2e.webhook_calls import QUIET, UNREACHABLE_URL, ca_of, registered
from tests.e2e.webhook_configurations import another_webhook
from tests.running import Running, serving
from webhook.kube.install.policies import Blinds, Installation, policies

# One label for the policies, one for each webhook configuration: the labels of a namespace select what acts there.
GUARDED, OLDER = {"gpuwarden.io/enabled": "true"}, {"scheduler.radix.ai/enabled": "true"}
ALONE, SERVED, SENT = ({f"example.test/{name}": "true"} for name in ("alone", "served", "sent"))
MAKES_PODS: Raw = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
NVD = "NVIDIA_VISIBLE_DEVICES"
CUDA = {"name": "CUDA_VERSION", "value": "12.4"}
INVENTORY = {"nodes": [{"name": "node-1", "devices": [{"uuid": f"GPU-{n}"} for n in range(64)]}]}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def shows(value: str) -> Raw:
    return {"name": NVD, "value": value}


def env_from_other_sources(**more: Any) -> Raw:
    return {"name": NVD, "valueFrom": {"configMapKeyRef": {"name": "all", "key": "gpus", **more}}}


HOSTILE: dict[str, Raw] = {
    "nothing but its image": {},
    "CUDA_VERSION": {"env": [CUDA]},
    "envFrom": {"envFrom": [{"configMapRef": {"name": "all"}}]},
    "all": {"env": [shows("all")]},
    "an index": {"env": [shows("0")]},
    "a device of the node's management": {"env": [shows("management.nvidia.com/gpu=all")]},
    "void, then all": {"env": [shows("void"), shows("all")]},
    "from a ConfigMap": {"env": [env_from_other_sources()]},
    "from a key that is missing": {"env": [CUDA, env_from_other_sources(optional=True)]},
    "by another variable": {"env": [{"name": "X", "value": "all"}, shows("$(X)")]},
}


def container(name: str, **members: Any) -> Raw:
    return {"name": name, "image": "example.test/cuda:1", **members}


def hostile_pod(members: Raw, **meta: Any) -> Raw:
    """The variables, in a container, a sidecar and an init container."""
    spec = {
        "containers": [container("a", **members), container("b", **members)],
        "initContainers": [container("init", **members), container("side", restartPolicy="Always", **members)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **meta}, "spec": spec}


def containers_of(made: Raw) -> Iterator[Raw]:
    for group in ("initContainers", "containers", "ephemeralContainers"):
        yield from made["spec"].get(group, ())


def read_by_runtime(one: Raw) -> str:
    """The values that decide which GPUs the container sees: of duplicate names the last one counts."""
    own = [env for env in one.get("env", ()) if env["name"] == NVD]
    if not own:
        return "whatever image and envFrom say"
    return "whatever the reference yields" if "valueFrom" in own[-1] else str(own[-1].get("value", ""))


def seen(made: Raw) -> dict[str, str]:
    return {one["name"]: read_by_runtime(one) for one in containers_of(made)}


@asynccontextmanager
async def tenant_of(cluster: Cluster, kube: Kube, labels: dict[str, str]) -> AsyncIterator[tuple[Kube, str]]:
    async with emptied_namespace(kube, labels) as namespace:
        user = f"tenant-{namespace}"
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
        subject = {"kind": "User", "name": user}
        await kube.create(
            ROLE_BINDINGS, {"metadata": {"name": "edit"}, "roleRef": ref, "subjects": [subject]}, namespace
        )
        await access_granted(kube, subject, [MAKES_PODS], namespace)
        async with Kube(cluster.as_user(user)) as tenant:
            yield tenant, namespace


@frozen
class Harness:
    """A tenant in an opted-in namespace."""

    kube: Kube
    tenant: Kube
    namespace: str

    async def made(self, content: Raw, **options: str) -> Raw:
        return await self.tenant.create(PODS, content, self.namespace, **options)

    async def debugged(self, name: str, *debuggers: Raw) -> Raw:
        change = {"spec": {"ephemeralContainers": list(debuggers)}}
        return await self.kube.patch(PODS, name, change, self.namespace, "ephemeralcontainers")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), INVENTORY, QUIET) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kube(cluster: Cluster, server: Running) -> AsyncIterator[Kube]:
    """The API server with the shipped policies and webhooks; each label has another server or none."""
    url, bundle = server.urls["https"], ca_of(server)
    hooks = (
        Installation(opt_in="example.test/alone", url=UNREACHABLE_URL, reviews_bindings=False),
        Installation(opt_in="example.test/served", url=url, ca_bundle=bundle, reviews_bindings=False),
        Installation(
            opt_in="example.test/sent", url=url, ca_bundle=bundle, reviews_bindings=False, blinds=Blinds.WEBHOOK
        ),
    )
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(Kube(cluster.kubeconfig))
        for manifest in policies(Installation()):
            await kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        for one in hooks:
            name = one.opt_in.rpartition("/")[2]
            await stack.enter_async_context(registered(kube, one, f"gpuwarden-{name}"))
        async with new_namespace(kube, GUARDED | SERVED) as probes:
            # A policy starts to act about a second after it is written.
            await wait_until(lambda: acts(kube, probes), seconds=20)
        yield kube


async def acts(kube: Kube, namespace: str) -> bool:
    try:
        plain = await kube.create(PODS, pod("probe"), namespace, dryRun="All")
        dressed = await kube.create(PODS, pod("probe", gpus=1), namespace, dryRun="All")
    except ApiError:
        return False
    return seen(plain)["main"] == "void" and seen(dressed)["main"].startswith("GPU-")


@asynccontextmanager
async def new_harness(cluster: Cluster, kube: Kube, labels: dict[str, str]) -> AsyncIterator[Harness]:
    async with tenant_of(cluster, kube, labels) as (tenant, namespace):
        yield Harness(kube, tenant, namespace)


@pytest_asyncio.fixture(loop_scope="module")
async def without_server(cluster: Cluster, kube: Kube) -> AsyncIterator[Harness]:
    """Policies act; the server of the webhooks does not exist."""
    async with new_harness(cluster, kube, GUARDED | ALONE) as harness:
        yield harness


@pytest_asyncio.fixture(loop_scope="module")
async def served(cluster: Cluster, kube: Kube) -> AsyncIterator[Harness]:
    """Policies act, and the server answers."""
    async with new_harness(cluster, kube, GUARDED | SERVED) as harness:
        yield harness


@pytest_asyncio.fixture(loop_scope="module")
async def without_policies(cluster: Cluster, kube: Kube) -> AsyncIterator[Harness]:
    """The server answers, and no policy acts: before 1.36 Kubernetes has no MutatingAdmissionPolicy."""
    async with new_harness(cluster, kube, SERVED) as harness:
        yield harness


# No server runs.


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
async def test_pod_without_a_claim_sees_no_gpu_while_no_server_runs(without_server: Harness, members: Raw) -> None:
    made = await without_server.made(hostile_pod(members))
    assert seen(made) == dict.fromkeys(("init", "side", "a", "b"), "void")
    # Nothing else is changed.
    for one in containers_of(made):
        others = [env for env in one["env"] if env["name"] != NVD]
        assert others == [env for env in members.get("env", ()) if env["name"] != NVD]
        assert one.get("envFrom") == members.get("envFrom")


@pytest.mark.parametrize("labels", [OLDER, GUARDED | OLDER], ids=["older label", "both labels"])
async def test_namespace_opts_in_by_either_label(cluster: Cluster, kube: Kube, labels: dict[str, str]) -> None:
    async with tenant_of(cluster, kube, labels) as (tenant, namespace):
        made = await tenant.create(PODS, hostile_pod(HOSTILE["envFrom"]), namespace)
        assert set(seen(made).values()) == {"void"}


async def test_other_namespaces_are_not_affected(cluster: Cluster, kube: Kube) -> None:
    async with tenant_of(cluster, kube, {}) as (tenant, namespace):
        made = await tenant.create(PODS, hostile_pod(HOSTILE["all"]), namespace)
        assert set(seen(made).values()) == {"all"}


async def test_forged_annotation_does_not_keep_a_pod_from_being_blinded(without_server: Harness) -> None:
    """Policies run in no fixed order, so the policy that removes the annotation may run second."""
    forged = dict.fromkeys(("gpuwarden.io/reservation-id", "gpuwarden.io/gpu-uuid", "gpuwarden.io/node"), "x")
    for number in range(20):
        content = hostile_pod(HOSTILE["all"])
        content["metadata"] = {"name": f"forged-{number}", "annotations": forged}
        made = await without_server.made(content)
        assert set(seen(made).values()) == {"void"}
        assert not made["metadata"].get("annotations")


@pytest.mark.parametrize(
    "key", ["gpuwarden.io/claim", "gpuwarden.io/gpu-count", "gpuwarden.io/required-hash", "gpu-scheduling-map"]
)
async def test_pod_with_a_claim_is_not_created_without_review(without_server: Harness, key: str) -> None:
    """A pod that the policy leaves to the webhook is refused while no server answers."""
    with pytest.raises(ApiError) as refused:
        await without_server.made(hostile_pod(HOSTILE["envFrom"], annotations={key: "0"}))
    assert "failed calling webhook" in refused.value.message


async def test_container_with_a_device_plugin_gpu_is_not_created_without_review(without_server: Harness) -> None:
    with pytest.raises(ApiError) as refused:
        await without_server.made(pod("a", gpus=1))
    assert "failed calling webhook" in refused.value.message


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
async def test_debug_container_sees_no_gpu_while_no_server_runs(without_server: Harness, members: Raw) -> None:
    await without_server.made(pod("a", schedulerName="nobody"))
    made = await without_server.debugged("a", container("first", **members))
    assert seen(made) == {"main": "void", "first": "void"}
    made = await without_server.debugged("a", *made["spec"]["ephemeralContainers"], container("second", **members))
    assert seen(made) == {"main": "void", "first": "void", "second": "void"}


async def test_large_pod_is_blinded_within_the_cost_limit(without_server: Harness) -> None:
    env = [{"name": f"VARIABLE_{n}", "value": "x"} for n in range(100)]
    content = hostile_pod({})
    content["spec"] = {"containers": [container(f"c{n}", env=env) for n in range(200)]}
    made = await without_server.made(content)
    assert set(seen(made).values()) == {"void"}


async def test_invalid_pod_gets_the_api_servers_own_error(without_server: Harness) -> None:
    specs: list[Raw] = [{}, {"containers": None}, {"containers": []}, {"containers": None, "initContainers": None}]
    for spec in specs:
        with pytest.raises(ApiError) as refused:
            await without_server.kube.create(PODS, {"metadata": {"name": "a"}, "spec": spec}, without_server.namespace)
        assert refused.value.status == 422, refused.value.message


# Another webhook of the cluster adds containers without variables.


def injecting(one: Raw) -> list[Raw]:
    """Adds a sidecar once."""
    return [] if has(one, "first") else [added("first")]


def injecting_again(one: Raw) -> list[Raw]:
    """Adds another sidecar at reinvocation, when no policy runs any more."""
    return [added("second" if has(one, "first") else "first")]


def has(one: Raw, name: str) -> bool:
    return any(found["name"] == name for found in one["spec"]["containers"])


def added(name: str) -> Raw:
    return {"op": "add", "path": "/spec/containers/-", "value": container(name)}


@pytest.mark.parametrize("policy", ["Never", "IfNeeded"])
async def test_container_added_by_another_webhook_is_blinded(
    without_server: Harness, tmp_path: Path, policy: str
) -> None:
    async with another_webhook(without_server.kube, without_server.namespace, tmp_path, injecting, policy):
        made = await without_server.made(hostile_pod(HOSTILE["envFrom"]))
    assert seen(made) == dict.fromkeys(("init", "side", "a", "b", "first"), "void")


async def test_container_added_after_all_policies_is_refused(without_server: Harness, tmp_path: Path) -> None:
    async with another_webhook(
        without_server.kube, without_server.namespace, tmp_path, injecting_again, "IfNeeded"
    ) as asked:
        with pytest.raises(ApiError) as refused:
            await without_server.made(hostile_pod(HOSTILE["envFrom"]))
        assert len(asked) == 2
    assert "gpuwarden-blinded" in refused.value.message
    assert "second" in refused.value.message


# A server runs.


@pytest.mark.parametrize("change", [injecting, injecting_again], ids=["once", "at reinvocation"])
@pytest.mark.parametrize(
    "content",
    [pod("a", gpus=1, schedulerName="nobody"), pod("a", annotations={"gpuwarden.io/gpu-count": "0"})],
    ids=["claim", "count 0"],
)
async def test_container_added_by_another_webhook_to_a_pod_with_a_claim_sees_no_gpu(
    served: Harness, tmp_path: Path, content: Raw, change: Callable[[Raw], list[Raw]]
) -> None:
    async with another_webhook(served.kube, served.namespace, tmp_path, change, "IfNeeded"):
        try:
            made = await served.made(content)
        except ApiError as exc:
            refusal: str | None = exc.reason
        else:
            refusal = None
            added = {name: shown for name, shown in seen(made).items() if name != "main"}
            assert set(added.values()) == {"void"}
    assert refusal == ("Forbidden" if change is injecting_again else None)


def beside_a_gpu(members: Raw) -> Raw:
    content = hostile_pod(members)
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    content["spec"]["containers"] = [container("main", resources=limits), container("b", **members)]
    content["spec"]["schedulerName"] = "nobody"
    return content


UNSAID = {name: HOSTILE[name] for name in ("nothing but its image", "CUDA_VERSION", "envFrom")}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
async def test_second_container_beside_a_claim_sees_no_more_than_the_claim(served: Harness, members: Raw) -> None:
    made = await served.made(beside_a_gpu(members))
    own = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
    others = "void" if members in UNSAID.values() else own
    assert seen(made) == {"main": own, "init": others, "side": others, "b": others}


@pytest.mark.parametrize("members", UNSAID.values(), ids=UNSAID)
async def test_second_container_beside_a_claim_is_blinded_without_policies(
    without_policies: Harness, members: Raw
) -> None:
    made = await without_policies.made(beside_a_gpu(members))
    assert {name: value for name, value in seen(made).items() if name != "main"} == dict.fromkeys(
        ("init", "side", "b"), "void"
    )


async def test_pod_with_cuda_version_is_blinded_without_policies(without_policies: Harness) -> None:
    made = await without_policies.made(hostile_pod(HOSTILE["CUDA_VERSION"]))
    assert set(seen(made).values()) == {"void"}


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in UNSAID])
async def test_pod_without_a_claim_that_names_gpus_is_refused_without_policies(
    without_policies: Harness, name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await without_policies.made(hostile_pod(HOSTILE[name]))
    assert (refused.value.status, refused.value.reason) == (403, "GpuWithoutClaim")


@pytest.mark.parametrize(
    ("annotations", "resources"),
    [
        ({"gpuwarden.io/gpu-count": "0"}, {}),
        ({"gpuwarden.io/claim": "{}"}, {}),
        ({}, {"limits": {"nvidia.com/gpu": "0"}}),
    ],
    ids=["count 0", "empty claim", "limit 0"],
)
async def test_pod_that_requests_no_gpu_is_blinded_by_the_webhook(
    served: Harness, annotations: dict[str, str], resources: Raw
) -> None:
    content = hostile_pod({**HOSTILE["envFrom"], "resources": resources}, annotations=annotations)
    assert set(seen(await served.made(content)).values()) == {"void"}


OPEN_DEBUGGERS: dict[str, Raw] = {
    "CUDA_VERSION": {"env": [CUDA]},
    "envFrom": {"envFrom": [{"configMapRef": {"name": "all"}}]},
}
DEBUGGERS: dict[str, Raw] = {
    **OPEN_DEBUGGERS,
    "all": {"env": [shows("all")]},
    "void, then all": {"env": [shows("void"), shows("all")]},
    "from a ConfigMap": {"env": [env_from_other_sources()]},
}


@pytest.mark.parametrize("members", DEBUGGERS.values(), ids=DEBUGGERS)
async def test_debug_container_beside_a_claim_sees_no_more_than_the_claim(served: Harness, members: Raw) -> None:
    made = await served.made(pod("a", gpus=1, schedulerName="nobody"))
    own = seen(made)["main"]
    if members in OPEN_DEBUGGERS.values():
        debugged = await served.debugged("a", container("debug", **members))
        assert seen(debugged) == {"main": own, "debug": "void"}
        return
    with pytest.raises(ApiError) as refused:
        await served.debugged("a", container("debug", **members))
    assert refused.value.reason == "Immutable"


@pytest.mark.parametrize("members", DEBUGGERS.values(), ids=DEBUGGERS)
async def test_debug_container_beside_a_claim_is_refused_without_policies(
    without_policies: Harness, members: Raw
) -> None:
    await without_policies.made(pod("a", gpus=1, schedulerName="nobody"))
    with pytest.raises(ApiError) as refused:
        await without_policies.debugged("a", container("debug", **members))
    assert refused.value.reason == "Immutable"


async def test_debug_container_may_see_the_gpus_of_its_pod(served: Harness) -> None:
    made = await served.made(pod("a", gpus=2, schedulerName="nobody"))
    own = seen(made)["main"]
    debugged = await served.debugged("a", container("debug", env=[shows(own)]))
    assert seen(debugged) == {"main": own, "debug": own}


# The webhook reviews every pod.


async def test_webhook_blinds_every_pod_if_configured(cluster: Cluster, kube: Kube) -> None:
    async with new_harness(cluster, kube, SENT) as harness:
        for number, members in enumerate(UNSAID.values()):
            content = hostile_pod(members)
            content["metadata"]["name"] = f"plain-{number}"
            assert set(seen(await harness.made(content)).values()) == {"void"}
            debugged = await harness.debugged(f"plain-{number}", container("debug", **members))
            assert seen(debugged)["debug"] == "void"
