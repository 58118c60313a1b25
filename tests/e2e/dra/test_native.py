"""Native pods: policies and the reconciler alone give them proven GPUs. No webhook is installed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import define

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.cluster_users import grant, resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    bound,
    claim_of_pod,
    claiming_pod,
    device_classes,
    gpus_of,
    proof_devices,
    published_gpus,
    refused_by_scheduler,
    remove_slices,
)
from tests.e2e.kube import (
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    ApiError,
    Kube,
    Raw,
    deployment,
    gone,
    job,
    pod,
    wait_until,
)
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.processes import OPT_IN, remove_nodes
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.running import Running, reconciling
from webhook.core.proof_devices import DRIVER, hash_attribute
from webhook.kube.install.policies import Installation, dra, policies

PROVEN, UNPROVEN, OTHER = "native-0", "native-1", "native-2"
GPUS = 8
HASH, OTHER_HASH, UNKNOWN = "sha256:" + "ab" * 32, "other1", "unknown1"
REQUIRED = "gpuwarden.io/required-hash"
NATIVE = "gpuwarden.io/native"
WRITES_PODS = [{"apiGroups": [""], "resources": ["pods", "pods/status", "pods/ephemeralcontainers"], "verbs": ["*"]}]

# The fixtures of this module and the event loop of their connections live as long as the module.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@define(eq=False)
class Native:
    """A cluster with native pods, and an opted-in namespace."""

    admin: Kube
    user: Kube  # without `manage`
    namespace: str
    uuids: Mapping[str, Sequence[str]]
    flags: Sequence[str]
    running: Running

    async def create(self, content: Raw, **options: str) -> Raw:
        return await self.user.create(PODS, content, self.namespace, **options)

    async def gpus(self, name: str) -> list[str]:
        """The GPUs of the pod once it is bound. Asserts that they are proven for the hash."""
        await bound(self.admin, self.namespace, name)
        return await gpus_of(self.admin, self.namespace, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Native]:
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Kube(cluster.kubeconfig))
        user = await stack.enter_async_context(Kube(cluster.as_user("nat")))
        await grant(admin, stack, "native-pods", WRITES_PODS, {"kind": "User", "name": "nat"})
        await installed(admin)
        await stack.enter_async_context(device_classes(admin, GPU_DRIVER, DRIVER))
        uuids = await gpus_of_nodes(cluster, admin, stack)
        own = await stack.enter_async_context(new_namespace(admin))
        namespace = await stack.enter_async_context(new_namespace(admin, OPT_IN))
        directory = tmp_path_factory.mktemp("native")
        hashes = json.dumps({PROVEN: HASH, OTHER: OTHER_HASH})
        flags = [
            *("--kubeconfig", str(cluster.kubeconfig), "--lease-namespace", own, "--node-hash-map", hashes),
            *("--proof-devices", "true", "--native-templates", "true", "--on-evidence-lost", "evict"),
        ]
        running = stack.enter_context(reconciling(directory, flags))
        here = Native(admin, user, namespace, uuids, flags, running)
        await with_policies(here, stack)
        for node in (PROVEN, OTHER):
            await wait_until(lambda node=node: proof_devices(admin, node), lambda found: len(found) == GPUS)  # type: ignore[misc]  # bound now, not later
        await wait_until(lambda: admin.find(RESOURCE_CLAIM_TEMPLATES, template_name(8, HASH), namespace))
        yield here
        await emptied(admin, namespace)


async def gpus_of_nodes(cluster: Cluster, admin: Kube, stack: AsyncExitStack) -> dict[str, list[str]]:
    names = (PROVEN, UNPROVEN, OTHER)
    await asyncio.to_thread(cluster.add_nodes, [gpu_node(name, 0) for name in names])
    found = {name: await published_gpus(admin, name, GPUS) for name in names}
    stack.push_async_callback(removed, admin, names)
    return found


async def removed(admin: Kube, names: Sequence[str]) -> None:
    await remove_slices(admin, *names)
    await remove_nodes(admin, names, (GPU_NODES, NODE_EVIDENCES, NODES))


async def with_policies(here: Native, stack: AsyncExitStack) -> None:
    """Installs the policies of an installation with native pods, and waits until they act."""
    installation = Installation(native=True)
    guards = [one for one in dra(installation) if one["kind"] != "DeviceClass"]
    for manifest in (*policies(installation), *guards):
        await here.admin.create(resource_of(manifest), manifest)
        stack.push_async_callback(here.admin.delete, resource_of(manifest), manifest["metadata"]["name"])
    await wait_until(lambda: policies_act(here))


async def policies_act(here: Native) -> bool:
    with suppress(ApiError):
        made = await here.create(asking("probe"), dryRun="All")
        return has_claim(made) and not await is_admitted(here, asking("probe", hash=None))
    return False


async def is_admitted(here: Native, content: Raw) -> bool:
    try:
        await here.create(content, dryRun="All")
    except ApiError as exc:
        if exc.status != 403:
            raise
        return False
    return True


async def emptied(admin: Kube, namespace: str) -> None:
    for kind in (DEPLOYMENTS, JOBS):
        await admin.call("DELETE", kind.path(namespace), {"propagationPolicy": "Background"})
    await admin.call("DELETE", PODS.path(namespace), query={"gracePeriodSeconds": "0"})
    await wait_until(lambda: admin.list(PODS, namespace), lambda left: left == [])


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def no_pods_left(native: Native) -> AsyncIterator[None]:
    yield
    await emptied(native.admin, native.namespace)


# Pods.


def template_name(count: int, hash: str) -> str:
    return f"gpuwarden-{count}-{hash_attribute(hash)}"


def container(name: str, gpus: int | str | None = None, **more: Any) -> Raw:
    resources = {} if gpus is None else {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"name": name, "image": "example.test/main:1", **resources, **more}


def asking(name: str, gpus: int | str | None = 1, *, hash: str | None = HASH, **spec: Any) -> Raw:
    """A pod that asks for GPUs and a hash."""
    notes = {} if hash is None else {REQUIRED: hash}
    body = {"containers": [container("main", gpus)], "terminationGracePeriodSeconds": 1, **spec}
    return {"metadata": {"name": name, "annotations": notes}, "spec": body}


def has_claim(made: Raw) -> bool:
    return any(one["name"] == "gpuwarden" for one in made["spec"].get("resourceClaims", ()))


def template_of(made: Raw) -> str:
    (one,) = (one for one in made["spec"]["resourceClaims"] if one["name"] == "gpuwarden")
    return str(one["resourceClaimTemplateName"])


def requests(made: Raw) -> dict[str, Raw]:
    """The resources of each container."""
    spec = made["spec"]
    return {one["name"]: one.get("resources", {}) for one in (*spec.get("initContainers", ()), *spec["containers"])}


def variables(made: Raw) -> list[str | None]:
    """NVIDIA_VISIBLE_DEVICES of each container."""
    spec = made["spec"]
    return [
        next((env.get("value") for env in one.get("env", ()) if env["name"] == "NVIDIA_VISIBLE_DEVICES"), None)
        for one in (*spec.get("initContainers", ()), *spec["containers"])
    ]


SIDECAR = {"restartPolicy": "Always"}
CLAIMED = {"claims": [{"name": "gpuwarden"}]}
SHAPES: dict[str, tuple[Raw, int, dict[str, Raw]]] = {
    "one-container": (asking("a", 2), 2, {"main": CLAIMED}),
    "two-containers": (
        asking("a", containers=[container("x", 1), container("y", 1), container("z")]),
        2,
        {"x": CLAIMED, "y": CLAIMED, "z": {}},
    ),
    "init-container-needs-more": (
        asking("a", initContainers=[container("i", 3)]),
        3,
        {"i": CLAIMED, "main": CLAIMED},
    ),
    "init-container-needs-less": (
        asking("a", 2, initContainers=[container("i", 1)]),
        2,
        {"i": CLAIMED, "main": CLAIMED},
    ),
    "sidecar": (asking("a", initContainers=[container("s", 1, **SIDECAR)]), 2, {"s": CLAIMED, "main": CLAIMED}),
    "sidecar-before-an-init-container": (
        asking("a", initContainers=[container("s", 2, **SIDECAR), container("i", 3)]),
        5,
        {"s": CLAIMED, "i": CLAIMED, "main": CLAIMED},
    ),
    "sidecar-after-an-init-container": (
        asking("a", initContainers=[container("i", 3), container("s", 1, **SIDECAR)]),
        3,
        {"i": CLAIMED, "s": CLAIMED, "main": CLAIMED},
    ),
    "requests-and-other-resources": (
        asking(
            "a",
            containers=[
                {
                    "name": "main",
                    "image": "example.test/main:1",
                    "resources": {
                        "limits": {"nvidia.com/gpu": "1", "cpu": "2"},
                        "requests": {"nvidia.com/gpu": "1", "cpu": "1"},
                    },
                }
            ],
        ),
        1,
        {"main": {**CLAIMED, "limits": {"cpu": "2"}, "requests": {"cpu": "1"}}},
    ),
    "older-annotation": (
        {
            **asking("a"),
            "metadata": {"name": "a", "annotations": {"attestation-hash.my-company.com/required-hash": HASH}},
        },
        1,
        {"main": CLAIMED},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_request_becomes_a_claim_for_proven_gpus(native: Native, shape: str) -> None:
    content, count, resources = SHAPES[shape]
    made = await native.create(content)
    assert template_of(made) == template_name(count, HASH)
    assert requests(made) == resources
    assert made["metadata"]["annotations"][NATIVE] == "true"
    assert set(variables(made)) == {"void"}
    gpus = await native.gpus("a")
    assert len(gpus) == count
    assert set(gpus) <= set(native.uuids[PROVEN])


async def test_template_and_claim_can_be_patched(native: Native) -> None:
    """The API server would refuse all patches of an object that was sent with spaces in the parameters of a driver."""
    made = await native.create(asking("a"))
    await native.gpus("a")
    claim = (await native.admin.list(RESOURCE_CLAIMS, native.namespace))[0]["metadata"]["name"]
    for kind, name in ((RESOURCE_CLAIM_TEMPLATES, template_of(made)), (RESOURCE_CLAIMS, claim)):
        changes: list[Raw] = [{"op": "add", "path": "/metadata/labels/seen", "value": "yes"}]
        patched = await native.admin.patch(kind, name, changes, native.namespace)
        assert patched["metadata"]["labels"]["seen"] == "yes"


async def test_each_hash_gets_its_own_nodes_and_an_unknown_one_waits(native: Native) -> None:
    for name, hash in (("a", HASH), ("b", OTHER_HASH), ("c", UNKNOWN)):
        await native.create(asking(name, hash=hash))
    assert (await native.gpus("a"))[0] in native.uuids[PROVEN]
    assert (await native.gpus("b"))[0] in native.uuids[OTHER]
    # The template of an unknown hash is made for the pod, so it waits for a GPU only.
    await refused_by_scheduler(native.admin, native.namespace, "c")


async def test_template_of_a_new_hash_is_made_for_its_first_pod(native: Native, request: pytest.FixtureRequest) -> None:
    """Kubernetes retries with growing pauses, but makes the claim at once when the template appears."""
    seconds = []
    for number in range(5):
        began = time.perf_counter()
        await native.create(asking(f"new-{number}", hash=f"first{number}"))
        await claim_of_pod(native.admin, native.namespace, f"new-{number}")
        seconds.append(time.perf_counter() - began)
    report_figures(request, median=percentile(seconds, 0.5), longest=max(seconds))
    assert max(seconds) < 5


async def test_deployments_and_jobs_get_proven_gpus(native: Native) -> None:
    notes = {REQUIRED: HASH}
    await native.admin.create(DEPLOYMENTS, deployment("web", 2, gpus=2, annotations=notes), native.namespace)
    # A claim is deleted when its pod has ended.
    lasting = {**notes, "kubelet.test/runs-for": "1h"}
    await native.admin.create(JOBS, job("train", 2, gpus=2, annotations=lasting), native.namespace)

    async def bound_pods() -> list[str]:
        found = await native.admin.list(PODS, native.namespace)
        return [one["metadata"]["name"] for one in found if one["spec"].get("nodeName")]

    names = await wait_until(bound_pods, lambda found: len(found) == 4)
    held = [uuid for name in names for uuid in await native.gpus(name)]
    assert sorted(held) == sorted(native.uuids[PROVEN])


async def test_namespace_names_the_hash(native: Native) -> None:
    async with new_namespace(native.admin, OPT_IN) as namespace:
        await native.admin.patch(NAMESPACES, namespace, {"metadata": {"annotations": {REQUIRED: f"{HASH},b2"}}})
        made = await eventually(native, asking("own"), namespace)
        assert template_of(made) == template_name(1, HASH)
        with pytest.raises(ApiError, match=f"accepts any of {HASH} or b2, and a native pod requires one"):
            await native.user.create(PODS, asking("any", hash=None), namespace)
        with pytest.raises(ApiError, match=f"asks for {OTHER_HASH}, but namespace {namespace} allows only {HASH},b2"):
            await native.user.create(PODS, asking("foreign", hash=OTHER_HASH), namespace)
        await native.admin.patch(NAMESPACES, namespace, {"metadata": {"annotations": {REQUIRED: HASH}}})

        async def is_changed() -> bool:
            with suppress(ApiError):
                return has_claim(await native.user.create(PODS, asking("b", hash=None), namespace, dryRun="All"))
            return False

        await wait_until(is_changed)
        await native.user.create(PODS, asking("bound", hash=None), namespace)
        await bound(native.admin, namespace, "bound")
        assert (await gpus_of(native.admin, namespace, "bound"))[0] in native.uuids[PROVEN]
        made = await native.user.create(PODS, pod("none"), namespace)
        assert not has_claim(made)
        await emptied(native.admin, namespace)


async def eventually(native: Native, content: Raw, namespace: str) -> Raw:
    """Creates the pod once the policies know the new namespace."""

    async def attempt() -> Raw | None:
        try:
            return await native.user.create(PODS, content, namespace)
        except ApiError as exc:
            if exc.status != 403:
                raise
            return None

    return await wait_until(attempt) or {}


async def test_template_named_directly_counts_as_native(native: Native) -> None:
    made = await native.create(claiming_pod("a", resourceClaimTemplateName=template_name(2, HASH)))
    assert made["metadata"]["annotations"] == {NATIVE: "true"}
    assert variables(made) == ["void"]
    assert len(await native.gpus("a")) == 2


async def test_claims_of_others_stay(native: Native) -> None:
    foreign = {"name": "nic", "resourceClaimTemplateName": "nics"}
    main = {**container("main", 1), "resources": {"limits": {"nvidia.com/gpu": "1"}, "claims": [{"name": "nic"}]}}
    made = await native.create(asking("a", containers=[main], resourceClaims=[foreign]), dryRun="All")
    assert made["spec"]["resourceClaims"] == [
        foreign,
        {"name": "gpuwarden", "resourceClaimTemplateName": template_name(1, HASH)},
    ]
    assert requests(made) == {"main": {"claims": [{"name": "nic"}, {"name": "gpuwarden"}]}}


async def test_pod_without_gpus_keeps_its_grace_period(native: Native) -> None:
    made = await native.create(asking("a", None, hash=None, terminationGracePeriodSeconds=100_000), dryRun="All")
    assert made["spec"]["terminationGracePeriodSeconds"] == 100_000


async def test_pods_without_gpus_and_other_namespaces_are_not_changed(native: Native) -> None:
    made = await native.create(pod("plain"))
    assert "resourceClaims" not in made["spec"]
    assert NATIVE not in made["metadata"].get("annotations", {})
    async with new_namespace(native.admin) as namespace:
        made = await native.user.create(PODS, asking("a"), namespace)
        assert "resourceClaims" not in made["spec"]
        assert requests(made)["main"]["limits"] == {"nvidia.com/gpu": "1"}
        forged = {**asking("b"), "metadata": {"name": "b", "annotations": {NATIVE: "true"}}}
        assert NATIVE not in (await native.user.create(PODS, forged, namespace))["metadata"].get("annotations", {})
        await emptied(native.admin, namespace)


async def test_dry_run_shows_the_claim(native: Native) -> None:
    assert template_of(await native.create(asking("a", 3), dryRun="All")) == template_name(3, HASH)
    assert await native.admin.list(PODS, native.namespace) == []


# Refusals.


def annotated(name: str, value: str, **more: Any) -> Raw:
    content = asking("a", **more)
    content["metadata"]["annotations"][name] = value
    return content


def labelled(name: str, value: str, gpus: int | None = 1) -> Raw:
    content = asking("a", gpus)
    content["metadata"]["labels"] = {name: value}
    return content


def with_claim(claim: Raw, **more: Any) -> Raw:
    return asking("a", more.pop("gpus", None), resourceClaims=[claim], **more)


NAMED = {"name": "gpuwarden", "resourceClaimTemplateName": template_name(1, HASH)}
REFUSED: dict[str, tuple[Raw, str]] = {
    "no-hash": (asking("a", hash=None), "neither the pod nor its namespace requires a hash"),
    "any-of": (asking("a", hash=f"{HASH},b2"), "accepts any of"),
    "two-names": (
        annotated("attestation-hash.my-company.com/required-hash", "b2"),
        "the annotations gpuwarden.io/required-hash and attestation-hash.my-company.com/required-hash have different",
    ),
    "upper-case": (asking("a", hash="sha256:ABC"), "lower-case letters and digits, with or without sha256:, not sha"),
    "long": (asking("a", hash="a" * 65), "up to 64 lower-case letters"),
    "empty": (asking("a", hash=""), "up to 64 lower-case letters"),
    "path": (asking("a", hash="../x"), "up to 64 lower-case letters"),
    "prefix-inside": (asking("a", hash="absha256:c"), "up to 64 lower-case letters"),
    "nine": (asking("a", 9), "container main requests nvidia.com/gpu: 9, and a native pod has 1 to 8 GPUs"),
    "nine-together": (
        asking("a", containers=[container("x", 5), container("y", 4)]),
        "container x requests nvidia.com/gpu, and the pod needs more than 8 GPUs",
    ),
    "zero": (asking("a", 0), "container main requests nvidia.com/gpu: 0, and"),
    "zero-in-one-of-two": (asking("a", 0, initContainers=[container("i", "0")]), "nvidia.com/gpu: 0"),
    "huge": (asking("a", "1E30"), "and a native pod has 1 to 8 GPUs"),
    "map": (annotated("gpuwarden.io/gpu-map", "0=native-0:0"), "gpuwarden.io/gpu-map: a native pod asks for GPUs by"),
    "older-map": (annotated("gpu-scheduling-map", "0=native-0:0", gpus=None), "gpu-scheduling-map: a native pod"),
    "count": (annotated("gpuwarden.io/gpu-count", "1", gpus=None), "gpuwarden.io/gpu-count: a native pod"),
    "count-label": (labelled("gpuwarden.io/gpu-count", "1", None), "gpuwarden.io/gpu-count: a native pod"),
    "shared": (annotated("gpuwarden.io/shared", "true"), "gpuwarden.io/shared: a native pod"),
    "shared-label": (labelled("gpuwarden.io/shared", "true"), "gpuwarden.io/shared: a native pod"),
    "requirement": (labelled("gpuwarden.io/gpu.model", "h100"), "gpuwarden.io/gpu.model: a native pod"),
    "older-requirement": (labelled("fudo.org/gpu.h100", "true"), "fudo.org/gpu.h100: a native pod"),
    "hash-without-gpus": (asking("a", None), "the pod requests no nvidia.com/gpu"),
    "copied": (annotated("gpuwarden.io/claim", "{}", gpus=None, hash=None), "copied from a pod"),
    "mig": (
        asking("a", containers=[{**container("m"), "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}]),
        "nvidia.com/mig-1g.10gb: native pods ask for GPUs by nvidia.com/gpu only",
    ),
    "extended-resource-of-a-class": (
        asking(
            "a",
            containers=[
                {**container("m"), "resources": {"limits": {"deviceclass.resource.kubernetes.io/gpu.nvidia.com": "1"}}}
            ],
        ),
        "native pods ask for GPUs by nvidia.com/gpu only",
    ),
    "devices-by-a-runtime": (
        annotated("cdi.k8s.io/gpus", "nvidia.com/gpu=all", gpus=None, hash=None),
        "cdi.k8s.io/gpus: a runtime may inject devices",
    ),
    "devices-of-a-vendor": (annotated("nvidia.cdi.k8s.io/gpus", "all"), "nvidia.cdi.k8s.io/gpus: a runtime may"),
    "long-grace": (
        asking("a", terminationGracePeriodSeconds=3601),
        "the grace period is 3601 s, and a native pod has at most 3600 s",
    ),
    "long-grace-of-a-probe": (
        asking(
            "a",
            containers=[
                container("main", 1, livenessProbe={"tcpSocket": {"port": 1}, "terminationGracePeriodSeconds": 7200})
            ],
        ),
        "the grace period is 7200 s",
    ),
    "forged-annotation": (annotated(NATIVE, "true", gpus=None, hash=None), "the API server writes this annotation"),
    "forged-value": (
        {
            **claiming_pod("a", resourceClaimTemplateName=template_name(1, HASH)),
            "metadata": {"name": "a", "annotations": {REQUIRED: OTHER_HASH}},
        },
        f"the claim gpuwarden is made from {template_name(1, HASH)}, and the pod has to have {OTHER_HASH}",
    ),
    "claim-and-request": (
        with_claim(NAMED, gpus=2),
        "container main requests nvidia.com/gpu, but the GPUs of the pod are already a claim",
    ),
    "claim-by-name": (
        with_claim({"name": "gpuwarden", "resourceClaimName": "somebody"}),
        "the claim gpuwarden is made from a template gpuwarden-<1 to 8>-<hash>",
    ),
    "another-template": (
        with_claim({"name": "gpuwarden", "resourceClaimTemplateName": "mine"}),
        "the claim gpuwarden is made from a template gpuwarden-<1 to 8>-<hash>",
    ),
    "template-of-nine": (
        with_claim({"name": "gpuwarden", "resourceClaimTemplateName": "gpuwarden-9-" + "ab" * 32}),
        "the claim gpuwarden is made from a template gpuwarden-<1 to 8>-<hash>",
    ),
    "template-under-another-name": (
        with_claim({"name": "mine", "resourceClaimTemplateName": template_name(1, HASH)}),
        "a native pod has one claim of gpuwarden, and its name is gpuwarden",
    ),
    "two-claims": (
        asking("a", None, resourceClaims=[NAMED, {**NAMED, "name": "more"}]),
        "a native pod has one claim of gpuwarden",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_request_that_no_claim_can_serve_is_refused(native: Native, case: str) -> None:
    content, words = REFUSED[case]
    with pytest.raises(ApiError) as caught:
        await native.create(content, dryRun="All")
    assert (caught.value.status, caught.value.reason) == (403, "Forbidden"), caught.value
    assert words in caught.value.message or "gpuwarden-claiming-pods" in caught.value.message


@pytest.mark.parametrize("amount", ["500m", "-1"])
async def test_amount_that_is_no_number_of_gpus_is_refused_by_kubernetes(native: Native, amount: str) -> None:
    with pytest.raises(ApiError) as caught:
        await native.create(asking("a", amount), dryRun="All")
    assert caught.value.status == 422, caught.value


async def test_gpus_of_the_whole_pod_are_refused(native: Native) -> None:
    """Kubernetes itself accepts only its own resources there."""
    content = asking("a", None, hash=None, resources={"limits": {"nvidia.com/gpu": "1"}})
    with pytest.raises(ApiError, match=r"spec\.resources"):
        await native.create(content, dryRun="All")


@pytest.mark.parametrize("value", ["all", "0", "void"])
async def test_pod_cannot_name_gpus_by_a_variable(native: Native, value: str) -> None:
    """Also a pod with a claim: its devices come from the kubelet."""
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]
    for content in (
        asking("a", containers=[container("main", 1, env=env)]),
        asking("a", None, hash=None, containers=[container("main", env=env)]),
    ):
        assert variables(await native.create(content, dryRun="All")) == ["void"]


async def test_annotations_of_a_native_pod_do_not_change(native: Native) -> None:
    await native.create(asking("a"))
    for subresource in ("", "status"):
        for key, value in ((NATIVE, None), (NATIVE, "false"), (REQUIRED, OTHER_HASH), (REQUIRED, None)):
            change: Raw = {"metadata": {"annotations": {key: value}}}
            with pytest.raises(ApiError, match=r"of a native pod is not changed by nat\b"):
                await native.user.patch(PODS, "a", change, native.namespace, subresource)
    await native.user.patch(PODS, "a", {"metadata": {"annotations": {"example.test/note": "x"}}}, native.namespace)
    await native.create(pod("plain"))
    with pytest.raises(ApiError, match=r"of a native pod is not changed by nat\b"):
        await native.user.patch(PODS, "plain", {"metadata": {"annotations": {NATIVE: "true"}}}, native.namespace)


async def test_native_pod_is_not_deleted_with_a_longer_grace_period_than_its_own(native: Native) -> None:
    """While it is being deleted, nothing evicts it when the evidence of its node ends."""
    await native.create(asking("a"))
    await native.gpus("a")
    with pytest.raises(ApiError, match="the maximum for this pod with GPUs is its own grace period, 1 s"):
        await native.user.delete(PODS, "a", native.namespace, grace=3600)
    eviction = {"metadata": {"name": "a"}, "deleteOptions": {"gracePeriodSeconds": 3601}}
    place = PODS.path(native.namespace, "a", "eviction")
    with pytest.raises(ApiError, match=r"the maximum for evictions in namespace .* is 3600 s"):
        await native.admin.call("POST", place, eviction)
    await native.admin.call("POST", place, {**eviction, "deleteOptions": {"gracePeriodSeconds": 1}})


async def test_native_pod_is_not_deleted_by_force(native: Native) -> None:
    """The scheduler would allocate its GPUs to another pod while its containers run."""
    await native.create(asking("a"))
    await native.gpus("a")
    with pytest.raises(ApiError, match="A forced deletion would free the GPUs of pod a while its containers run"):
        await native.user.delete(PODS, "a", native.namespace, grace=0)
    place = PODS.path(native.namespace, "a", "eviction")
    options: Raw = {"gracePeriodSeconds": 0, "dryRun": ["All"]}
    eviction: Raw = {"metadata": {"name": "a"}, "deleteOptions": options}
    async with AsyncExitStack() as stack:
        rules: list[Raw] = [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]
        await grant(native.admin, stack, "may-evict", rules, {"kind": "User", "name": "nat"})
        with pytest.raises(ApiError, match="gracePeriodSeconds: 0 in an eviction would free the GPUs of pods"):
            await native.user.call("POST", place, eviction)
        await native.admin.call("POST", place, eviction)  # has all permissions
        await native.user.call("POST", place, {**eviction, "deleteOptions": {"dryRun": ["All"]}})
    await native.user.call("DELETE", PODS.path(native.namespace, "a"), {**options, "gracePeriodSeconds": 1})
    # The kubelet deletes the pod once its containers have ended.
    await native.user.delete(PODS, "a", native.namespace)
    await gone(native.admin, PODS, "a", native.namespace)


async def test_devices_of_a_runtime_are_not_added_later(native: Native) -> None:
    await native.create(pod("plain"))
    change: Raw = {"metadata": {"annotations": {"cdi.k8s.io/gpus": "nvidia.com/gpu=all"}}}
    for subresource in ("", "status"):
        with pytest.raises(ApiError, match=r"metadata.annotations\[cdi.k8s.io/gpus\]: a runtime may inject devices"):
            await native.user.patch(PODS, "plain", change, native.namespace, subresource)
    async with new_namespace(native.admin) as namespace:
        await native.user.create(PODS, pod("plain"), namespace)
        await native.user.patch(PODS, "plain", change, namespace)
        await emptied(native.admin, namespace)


async def test_debug_container_of_a_native_pod_sees_no_gpu(native: Native) -> None:
    await native.create(asking("a"))
    await native.gpus("a")
    debugger = {"name": "debug", "image": "x", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    change: Raw = {"spec": {"ephemeralContainers": [debugger]}}
    made = await native.user.patch(PODS, "a", change, native.namespace, "ephemeralcontainers")
    assert made["spec"]["ephemeralContainers"][0]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


# Containers that others add.

INJECTOR = "inject-gpus.example.test"
RESOURCES = "{'limits': {'nvidia.com/gpu': '1'}}"
ADDED = f"{{'name': dyn('added'), 'image': dyn('example.test/added:1'), 'resources': dyn({RESOURCES})}}"
INJECTING: list[Raw] = [
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": INJECTOR},
        "spec": {
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
                "objectSelector": {"matchLabels": {"inject": "gpus"}},
            },
            "mutations": [
                {
                    "patchType": "JSONPatch",
                    "jsonPatch": {
                        "expression": f"[JSONPatch{{op: 'add', path: '/spec/containers/-', value: dyn({ADDED})}}]"
                    },
                }
            ],
        },
    },
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": INJECTOR},
        "spec": {"policyName": INJECTOR},
    },
]


async def test_container_that_another_policy_adds_gets_no_gpu_without_proof(native: Native) -> None:
    """The order of policies is random: the request of the added container is part of the claim, or is refused."""

    async def added(gpus: int | None) -> Raw | None:
        content = asking("a", gpus, hash=HASH if gpus else None)
        content["metadata"] |= {"labels": {"inject": "gpus"}, "annotations": {REQUIRED: HASH} if gpus else {}}
        try:
            return await native.create(content, dryRun="All")
        except ApiError as exc:
            assert "nvidia.com/gpu" in exc.message or "requires a hash" in exc.message  # noqa: PT017
            return None

    async with AsyncExitStack() as stack:
        for one in INJECTING:
            await native.admin.create(resource_of(one), one)
            stack.push_async_callback(native.admin.delete, resource_of(one), INJECTOR)

        async def is_injecting() -> bool:
            made = await added(1)
            return made is None or "added" in requests(made)

        await wait_until(is_injecting)
        found = [await added(1) for _ in range(20)]
        assert all(one is None or template_of(one) == template_name(2, HASH) for one in found)
        assert all(one is None or requests(one) == {"main": CLAIMED, "added": CLAIMED} for one in found)
        assert [await added(None) for _ in range(10)] == [None] * 10, "the pod names no hash"


# Templates.


async def test_template_that_was_deleted_or_replaced_comes_back(native: Native) -> None:
    name = template_name(3, HASH)
    whole = await native.admin.get(RESOURCE_CLAIM_TEMPLATES, name, native.namespace)
    await native.admin.delete(RESOURCE_CLAIM_TEMPLATES, name, native.namespace)
    weak = {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [gpu_alone()]}}}}
    with suppress(ApiError):  # the reconciler was faster
        await native.admin.create(RESOURCE_CLAIM_TEMPLATES, weak, native.namespace)

    async def spec() -> Raw:
        found = await native.admin.find(RESOURCE_CLAIM_TEMPLATES, name, native.namespace)
        return {} if found is None else dict(found["spec"])

    await wait_until(spec, lambda found: found == whole["spec"])


def gpu_alone() -> Raw:
    return {"name": "gpu0", "exactly": {"deviceClassName": GPU_DRIVER}}


async def test_templates_are_written_once(native: Native) -> None:
    before = {one["metadata"]["uid"] for one in await native.admin.list(RESOURCE_CLAIM_TEMPLATES, native.namespace)}
    await asyncio.sleep(2)
    after = {one["metadata"]["uid"] for one in await native.admin.list(RESOURCE_CLAIM_TEMPLATES, native.namespace)}
    assert before <= after


# Cost.


async def test_policies_of_native_pods_cost_little(native: Native, request: pytest.FixtureRequest) -> None:
    """The rate of creations with all policies, against the rate without those of native pods, in turns."""
    bindings = [one for one in policies(Installation(native=True)) if is_binding_of_native(one)]
    rates: dict[bool, list[float]] = {True: [], False: []}
    with_gpus = []
    for is_on in (True, False, True, False):
        for one in bindings:
            if is_on and await native.admin.find(resource_of(one), one["metadata"]["name"]) is None:
                await native.admin.create(resource_of(one), one)
            elif not is_on:
                await native.admin.delete(resource_of(one), one["metadata"]["name"])
        await wait_until(lambda is_on=is_on: is_native(native, is_on))  # type: ignore[misc]  # bound now, not later
        rates[is_on].append(await creations_per_second(native, pod("plain")))
        if is_on:
            with_gpus.append(await creations_per_second(native, asking("a")))
    for one in bindings:
        await native.admin.create(resource_of(one), one)
    await wait_until(lambda: policies_act(native))
    plain = max(rates[True]) / max(rates[False])
    report_figures(request, plain_pods=plain, native_pods=max(with_gpus) / max(rates[False]))
    assert plain > 0.2


def is_binding_of_native(manifest: Raw) -> bool:
    return str(manifest["kind"]).endswith("Binding") and str(manifest["metadata"]["name"]).startswith(
        "gpuwarden-native"
    )


async def is_native(native: Native, is_on: bool) -> bool:
    with suppress(ApiError):
        made = await native.create(asking("a"), dryRun="All")
        is_refused = not await is_admitted(native, asking("a", hash=None))
        return has_claim(made) is is_on and is_refused is is_on
    return False


async def creations_per_second(native: Native, content: Raw, writers: int = 4, count: int = 40) -> float:
    async def write() -> None:
        for _ in range(count):
            await native.create(content, dryRun="All")

    began = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(writers)))
    return writers * count / (time.perf_counter() - began)


# Last: it kills the reconciler.


async def test_known_hashes_are_served_while_the_reconciler_is_down(native: Native, tmp_path: Path) -> None:
    native.running.process.kill()
    native.running.process.wait()
    await native.create(asking("known"))
    assert (await native.gpus("known"))[0] in native.uuids[PROVEN]
    await native.create(asking("new", hash="new1"))
    with pytest.raises(ApiError, match="lower-case letters"):
        await native.create(asking("bad", hash="NEW"))
    await asyncio.sleep(3)
    waiting = await native.admin.get(PODS, "new", native.namespace)
    assert "resourceClaimStatuses" not in waiting["status"], "there is a template"
    with reconciling(tmp_path, native.flags):
        began = time.perf_counter()
        await refused_by_scheduler(native.admin, native.namespace, "new")
        # The old Lease has to end first. Then Kubernetes makes the claim at once.
        assert time.perf_counter() - began < 30
