"""The chart on a real API server, installed by the real helm. The module has its own cluster with an audit log."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts.chart_deploy import DEPLOY
from scripts.chart_values import CHART
from scripts.controlplane.build import binaries
from scripts.controlplane.cluster import ROOT, Cluster, gpu_node
from tests.chart.matrix import MATRIX
from tests.chart.rendering import rendered
from tests.e2e.chart_release import Process, Release
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.gpus import GPU_DRIVER, RESOURCE_CLAIMS, pairs
from tests.e2e.kube import MUTATING, PODS, VALIDATING, ApiError, Kube, Raw, Resource, gone, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.test_access import AUDITED, requests
from tests.e2e.webhook_configurations import ENABLED
from webhook.core.proof_claims import CLAIM_LABELS
from webhook.core.proof_devices import DRIVER
from webhook.runtime.clock import utc_now
from webhook.runtime.tls.issuing import BACKDATED, KeyPair, new_ca, new_leaf

OURS = "gpuwarden"
NODE_NAMES, GPUS = ("node-0", "node-1"), 2
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)
CRDS = Resource("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
NAMESPACES = Resource("api/v1", "namespaces", is_namespaced=False)
SECRETS = Resource("api/v1", "secrets")
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
PART_OF = "app.kubernetes.io/part-of=gpuwarden"
# The promise: one minute from `helm install`.
FIRST_POD_WITHIN = 60.0
# Memory and CPU of an idle `serve`.
IDLE_MIB, IDLE_SHARE = 120.0, 0.02
IDLE_FOR = 10.0


def note(*uuids: str) -> Raw:
    """The node annotation that lists GPUs."""
    return {"fudo.org/gpu.device.labels": base64.b64encode(json.dumps({uuid: [] for uuid in uuids}).encode()).decode()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chart")


@pytest.fixture(scope="module")
def cluster(directory: Path) -> Iterator[Cluster]:
    (directory / "audited.json").write_text(json.dumps(AUDITED))
    audit = [f"--audit-policy-file={directory / 'audited.json'}", f"--audit-log-path={directory / 'audit.log'}"]
    with Cluster(directory / "cluster", flags={"kube-apiserver": audit}) as running:
        nodes = []
        for name in NODE_NAMES:
            node = gpu_node(name, GPUS)
            node["metadata"]["annotations"] = note(*(f"GPU-{name}-{k}" for k in range(GPUS)))
            nodes.append(node)
        running.add_nodes(nodes)
        yield running


@pytest.fixture
async def release(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Release]:
    one = Release(cluster, kube, tmp_path)
    try:
        yield one
    finally:
        await one.end()
        one.helm("uninstall", one.name, "--ignore-not-found", "--wait")
        await delete_everything(cluster, kube)


async def delete_everything(cluster: Cluster, kube: Kube) -> None:
    """Deletes what docs/how-to/install.md names after `helm uninstall`."""
    for each in await found(kube, GPU_NODES):
        await kube.patch(GPU_NODES, each["metadata"]["name"], {"metadata": {"finalizers": None}})
    for each in await found(kube, CRDS):
        if each["spec"]["group"] == "gpuwarden.io":
            await kube.delete(CRDS, each["metadata"]["name"])
            await gone(kube, CRDS, each["metadata"]["name"])
    if await kube.find(NAMESPACES, OURS):
        await kube.delete(NAMESPACES, OURS)
        await gone(kube, NAMESPACES, OURS)


async def found(kube: Kube, of: Resource) -> list[Raw]:
    try:
        return await kube.list(of)
    except ApiError:
        return []


# What the API server and kubeconform report about the rendered chart.

# Third-party kinds: their definitions are just enough for helm to find them. Their controllers validate the content.
OTHERS = {
    "cert-manager.io": {"Certificate": "certificates", "Issuer": "issuers"},
    "monitoring.coreos.com": {"ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"},
}


def definition(group: str, kind: str, plural: str) -> Raw:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


@pytest.fixture
async def others(kube: Kube) -> AsyncIterator[None]:
    wanted = [definition(group, *each) for group, kinds in OTHERS.items() for each in kinds.items()]
    async with AsyncExitStack() as stack:
        for one in wanted:
            await stack.enter_async_context(defined(kube, one))
        yield


@asynccontextmanager
async def defined(kube: Kube, one: Raw) -> AsyncIterator[None]:
    """Deleted at the end, completely: otherwise the next definition fails because it is being deleted."""
    await kube.create(CRDS, one)
    try:
        yield
    finally:
        await kube.delete(CRDS, one["metadata"]["name"])
        await gone(kube, CRDS, one["metadata"]["name"])


@pytest.fixture(scope="module")
def manifests() -> list[Raw]:
    """Every rendered object of every value set, without duplicates."""
    assert len(MATRIX) >= 20
    plain = [*DEPLOY.rglob("manifests/*.yaml")]
    sets = [rendered(values) for values in MATRIX.values()]
    sets += [[*yaml.safe_load_all(file.read_text())] for file in plain if "namespace" not in file.name]
    return list({json.dumps(one, sort_keys=True): one for rendering in sets for one in rendering}.values())


async def plurals(kube: Kube) -> dict[tuple[str, str], Resource]:
    """The API paths by apiVersion and kind."""
    versions = ["v1"]
    for group in (await kube.call("GET", "/apis"))["groups"]:
        versions += [each["groupVersion"] for each in group["versions"]]
    known = {}
    for version in versions:
        root = "api/v1" if version == "v1" else f"apis/{version}"
        for each in (await kube.call("GET", f"/{root}"))["resources"]:
            if "/" not in each["name"]:
                known[version, each["kind"]] = Resource(root, each["name"], is_namespaced=each["namespaced"])
    return known


async def test_rendered_chart_is_accepted_by_the_api_server(kube: Kube, others: None, manifests: list[Raw]) -> None:
    """A dry run with strict fields; policies' expressions are compiled."""
    kinds = {(one["apiVersion"], one["kind"]) for one in manifests}
    known = await wait_until(lambda: plurals(kube), lambda seen: kinds <= seen.keys())
    one_by_one = asyncio.Semaphore(8)

    async def problem(one: Raw) -> str:
        of, meta = known[one["apiVersion"], one["kind"]], one["metadata"]
        assert of.is_namespaced is ("namespace" in meta), meta
        async with one_by_one:
            try:
                await kube.create(of, one, meta.get("namespace"), dryRun="All", fieldValidation="Strict")
            except ApiError as exc:
                return f"{one['kind']} {meta['name']}: {exc.message}"
        return ""

    async with AsyncExitStack() as stack:
        for name in ("gpuwarden", "gpu-operator", "gpuid", "blind-gpu-scheduler"):
            await stack.enter_async_context(named_namespace(kube, name))
        problems = await asyncio.gather(*map(problem, manifests))
    assert [text for text in problems if text] == []


@asynccontextmanager
async def named_namespace(kube: Kube, name: str) -> AsyncIterator[None]:
    await kube.create(NAMESPACES, {"metadata": {"name": name}})
    try:
        yield
    finally:
        await kube.delete(NAMESPACES, name)
        await gone(kube, NAMESPACES, name)


def strict(tree: Any) -> Any:
    """Makes a schema strict: no unknown fields, and either a number or a text where both are allowed."""
    if isinstance(tree, list):
        return [strict(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("format") == "int-or-string" or tree.get("x-kubernetes-int-or-string") is True:
        return {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    is_closed = tree.get("type") == "object" and "properties" in tree and "additionalProperties" not in tree
    return {key: strict(value) for key, value in tree.items()} | ({"additionalProperties": False} if is_closed else {})


QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
REFERENCE = re.compile(r'"#/definitions/([^"]+)"')


def needed(name: str, definitions: Raw, texts: dict[str, str]) -> Raw:
    """A definition with everything that it references."""
    known, coming = {name}, [name]
    while coming:
        more = set(REFERENCE.findall(texts[coming.pop()])) - known
        known |= more
        coming += more
    return {each: definitions[each] for each in known}


async def schemas(kube: Kube, target: Path, kinds: set[tuple[str, str]]) -> None:
    """Writes the API server's schemas of these kinds to files, named as kubeconform expects."""
    whole = await kube.call("GET", "/openapi/v2")
    definitions = strict(whole["definitions"]) | {QUANTITY: {"oneOf": [{"type": "string"}, {"type": "number"}]}}
    texts = {name: json.dumps(one) for name, one in definitions.items()}
    for name, one in definitions.items():
        for kind in one.get("x-kubernetes-group-version-kind", ()):
            version = "/".join(part for part in (kind["group"], kind["version"]) if part)
            if (version, kind["kind"]) in kinds:
                content = {"$ref": f"#/definitions/{name}", "definitions": needed(name, definitions, texts)}
                group = kind["group"] or kind["version"]
                (target / f"{kind['kind'].lower()}-{group}-{kind['version']}.json").write_text(json.dumps(content))


async def kubeconform_report(kube: Kube, place: Path, manifests: list[Raw]) -> tuple[int, Raw]:
    """kubeconform's report on these objects."""
    tool = await asyncio.to_thread(binaries, ROOT / "scripts/kubeconform")
    await schemas(kube, place, {(one["apiVersion"], one["kind"]) for one in manifests})
    (place / "rendered.yaml").write_text(yaml.safe_dump_all(manifests))
    location = f"{place}/{{{{.ResourceKind}}}}-{{{{.Group}}}}-{{{{.ResourceAPIVersion}}}}.json"
    skipped = ",".join(kind for kinds in OTHERS.values() for kind in kinds)
    flags = ["-strict", "-summary", "-output", "json", "-skip", skipped, "-schema-location", location]
    done = await asyncio.to_thread(
        subprocess.run,
        [str(tool / "kubeconform"), *flags, str(place / "rendered.yaml")],
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout)


async def test_rendered_chart_is_accepted_by_kubeconform(kube: Kube, tmp_path: Path, manifests: list[Raw]) -> None:
    code, said = await kubeconform_report(kube, tmp_path, manifests)
    assert code == 0, sorted({f"{one['kind']}: {one['msg']}" for one in said["resources"]})[:9]
    assert said["summary"]["valid"] > 100
    assert (said["summary"]["invalid"], said["summary"]["errors"]) == (0, 0)


async def test_kubeconform_rejects_an_unknown_field(kube: Kube, tmp_path: Path) -> None:
    """Proves that kubeconform's result means something: an unknown field is rejected."""
    (deployment,) = [one for one in rendered({}) if one["kind"] == "Deployment" and one["metadata"]["name"] == OURS]
    wrong = json.loads(json.dumps(deployment))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    code, said = await kubeconform_report(kube, tmp_path, [wrong])
    assert code != 0
    assert "imagePolicy" in json.dumps(said["resources"])


# The life of a release.

BASE = {
    "settings.requireEvidence": "asked",
    "settings.logLevel": "warn",
    "scheduler.enabled": True,
    "score.enabled": True,
    "export.enabled": True,
    "export.settings.clusterName": "rig",
}
EXPECTED = {"certs": 1, "serve": 2, "reconcile": 2, "score": 2, "export": 2}


async def is_dressed(kube: Kube, namespace: str) -> bool:
    try:
        made = await kube.create(PODS, pod("probe", gpus=1), namespace, dryRun="All")
    except ApiError:
        return False
    return "gpuwarden.io/gpu-uuid" in made["metadata"].get("annotations", {})


async def own_pods(kube: Kube) -> dict[str, int]:
    """The number of running Pods of each component."""
    counted: dict[str, int] = {}
    for one in await kube.list(PODS, OURS):
        if one["status"].get("phase") == "Running" and "deletionTimestamp" not in one["metadata"]:
            component = one["metadata"]["labels"]["app.kubernetes.io/component"]
            counted[component] = counted.get(component, 0) + 1
    return counted


def denied(log: Path) -> list[object]:
    return [one for one in requests(log) if one[2] in (401, 403)]


@pytest.mark.defect("binder-16")
@pytest.mark.defect("scoring-13")
async def test_from_install_to_uninstall(
    cluster: Cluster, kube: Kube, release: Release, directory: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # The namespace of the exporter's exec permission; a GPU operator creates it.
    async with named_namespace(kube, "gpu-operator"):
        await life_of_release(cluster, kube, release, directory, tmp_path, request)


async def life_of_release(
    cluster: Cluster, kube: Kube, release: Release, directory: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    begun = time.monotonic()
    notes = await release.install({**BASE, "networkPolicy.enabled": True})
    installed = time.monotonic() - begun
    assert "kubectl label namespace" in notes
    # Like kubelets: all at once; `serve` waits for its certificate.
    _, serve, _ = await asyncio.gather(*map(release.start, ("certs", "serve", "reconcile")))
    async with new_namespace(kube, ENABLED) as namespace:
        await wait_until(lambda: is_dressed(kube, namespace), seconds=FIRST_POD_WITHIN)
        made = await kube.create(PODS, pod("first", gpus=1), namespace)
        first = time.monotonic() - begun
        assert made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].startswith("GPU-node-")
        memory = {name: f"{one.memory_mib():.0f}" for name, one in release.running.items()}
        report_figures(request, helm_install_s=installed, to_first_admitted_pod_s=first, MiB=memory)
        assert first < FIRST_POD_WITHIN
        await measure_idle_serve(serve, request)
        await wait_until(lambda: own_pods(kube), lambda seen: seen == EXPECTED)
        await asyncio.gather(*(release.start(component) for component in ("score", "export")))
        await scheduler_of_the_chart_binds(kube, release, serve, namespace)
        await wait_until(lambda: kube.find(LEASES, "gpuid-leader", OURS))

        await all_replicas_deleted_come_back(kube, release, namespace)
        await values_change_and_the_bundle_stays(kube, release, namespace)
        await a_version_is_added_and_taken_back(kube, release, namespace, tmp_path)
        assert denied(directory / "audit.log") == []
        await kube.delete(PODS, "first", namespace)
        await gone(kube, PODS, "first", namespace)
    await nothing_is_left(cluster, kube, release)


async def scheduler_of_the_chart_binds(kube: Kube, release: Release, serve: Process, namespace: str) -> None:
    """With the account and token that the chart made for it. Before, `serve` answers that it has no scheduler."""

    async def health() -> tuple[int, object]:
        async with httpx.AsyncClient(base_url=serve.urls["http"], trust_env=False) as client:
            reply = await client.get("/health")
            return reply.status_code, reply.json()["service"]

    assert await health() == (503, "gpu-scheduler")
    await release.schedule(serve)
    await wait_until(health, lambda seen: seen == (200, "gpu-scheduler"))
    made = await kube.create(PODS, pod("named", gpus=1, schedulerName="gpu-scheduler"), namespace)
    node = made["metadata"]["annotations"]["gpuwarden.io/node"]
    await wait_until(lambda: kube.get(PODS, "named", namespace), lambda seen: seen["spec"].get("nodeName") == node)
    await kube.delete(PODS, "named", namespace)
    await gone(kube, PODS, "named", namespace)


async def measure_idle_serve(serve: Process, request: pytest.FixtureRequest) -> None:
    """Measures `serve` under probes and scrapes only. Its memory does not depend on the machine."""
    async with httpx.AsyncClient(base_url=serve.urls["http"], trust_env=False) as client:
        begun, before = time.monotonic(), serve.cpu_seconds()
        while time.monotonic() < begun + IDLE_FOR:
            for path in ("/readyz", "/healthz", "/metrics"):
                (await client.get(path)).raise_for_status()
            await asyncio.sleep(IDLE_FOR / 2)
        share = (serve.cpu_seconds() - before) / (time.monotonic() - begun)
    memory = serve.memory_mib()
    report_figures(request, idle_MiB=memory, idle_core_percent=100 * share)
    assert memory < IDLE_MIB
    assert share < IDLE_SHARE


async def all_replicas_deleted_come_back(kube: Kube, release: Release, namespace: str) -> None:
    """Meanwhile a pod that asks for GPUs is refused, and other pods are created."""
    for name, one in release.running.items():
        if name.startswith("serve"):
            await one.kill()
    before = {each["metadata"]["uid"] for each in await kube.list(PODS, OURS)}
    for each in await kube.list(PODS, OURS):
        await kube.delete(PODS, each["metadata"]["name"], OURS, grace=0)

    async def fresh() -> dict[str, int]:
        now = {each["metadata"]["uid"] for each in await kube.list(PODS, OURS)}
        return {} if before & now else await own_pods(kube)

    await wait_until(fresh, lambda seen: seen == EXPECTED)
    with pytest.raises(ApiError, match="failed calling webhook"):
        await kube.create(PODS, pod("refused", gpus=1), namespace)
    await kube.create(PODS, pod("no-gpus"), namespace)
    await release.start("serve")
    await wait_until(lambda: is_dressed(kube, namespace))


async def bundles(kube: Kube) -> set[str]:
    """The CA bundles of all webhooks; none if there are no webhooks."""
    configurations = [await kube.find(of, OURS) for of in (MUTATING, VALIDATING)]
    return {
        hook["clientConfig"].get("caBundle", "")
        for one in configurations
        if one is not None
        for hook in one["webhooks"]
    }


async def values_change_and_the_bundle_stays(kube: Kube, release: Release, namespace: str) -> None:
    """Webhooks are removed, added again, and changed."""
    (before,) = await bundles(kube)
    await release.upgrade({**BASE, "webhooks.timeoutSeconds": 7, "serve.replicas": 3})
    assert (await kube.get(MUTATING, OURS))["webhooks"][0]["timeoutSeconds"] == 7
    assert await bundles(kube) == {before}
    assert await is_dressed(kube, namespace)
    await release.upgrade({**BASE, "webhooks.enabled": False})
    assert await bundles(kube) == set()
    await release.upgrade(BASE)
    await wait_until(lambda: bundles(kube), lambda seen: seen == {before})
    await wait_until(lambda: is_dressed(kube, namespace))
    done = await asyncio.to_thread(release.helm, "rollback", release.name, "2")
    assert done.returncode == 0, done.stderr
    assert (await kube.get(MUTATING, OURS))["webhooks"][0]["timeoutSeconds"] == 7


def newer(directory: Path) -> Path:
    """A chart with one more version in the CRD of GPUNodes."""
    chart = directory / "newer"
    shutil.copytree(CHART, chart)
    file = chart / "templates/generated/crds.yaml"
    text = file.read_text()
    start = text.index("  - name: v1alpha1", text.index("name: gpunodes.gpuwarden.io"))
    end = text.index("\n---\n", start)
    version = text[start:end].replace("v1alpha1", "v1beta1").replace("storage: true", "storage: false")
    file.write_text(f"{text[:end]}\n{version}{text[end:]}")
    return chart


async def served(kube: Kube) -> list[str]:
    """The versions in gpuwarden's CRDs."""
    definition = await kube.get(CRDS, "gpunodes.gpuwarden.io")
    return [each["name"] for each in definition["spec"]["versions"] if each["served"]]


async def a_version_is_added_and_taken_back(kube: Kube, release: Release, namespace: str, tmp_path: Path) -> None:
    """Adds a version to the CRD and removes it again, as a rollback does."""
    await release.upgrade(BASE, newer(tmp_path))
    assert await served(kube) == ["v1alpha1", "v1beta1"]

    async def held_in_both() -> bool:
        spots = [
            Resource(f"apis/gpuwarden.io/{version}", "gpunodes", is_namespaced=False) for version in await served(kube)
        ]
        seen = [await found(kube, spot) for spot in spots]
        return all(
            sum(one["status"]["taken"] for one in each if "taken" in one.get("status", {})) == 1 for each in seen
        )

    await wait_until(held_in_both)
    await release.upgrade(BASE)
    assert await served(kube) == ["v1alpha1"]
    await wait_until(lambda: is_dressed(kube, namespace))


async def nothing_is_left(cluster: Cluster, kube: Kube, release: Release) -> None:
    """`helm uninstall` removes everything except the CRDs; docs/how-to/install.md says what else to delete."""
    done = await asyncio.to_thread(release.helm, "uninstall", release.name, "--wait")
    assert done.returncode == 0, done.stderr
    await release.end()
    await wait_until(
        lambda: asyncio.to_thread(ours, cluster),
        lambda names: all(name.startswith("customresourcedefinition.") for name in names),
    )
    assert await names_of(kube, SECRETS) == set()  # the key of gpuwarden's CA is deleted
    # The processes create these; docs/how-to/install.md names them.
    assert await names_of(kube, LEASES) == {"gpuwarden-reconcile", "gpuwarden-scheduler", "gpuid-leader"}
    # No webhook of gpuwarden blocks anything any more.
    async with new_namespace(kube, ENABLED) as namespace:
        await wait_until(lambda: is_taken(kube, namespace))
    await delete_everything(cluster, kube)
    assert ours(cluster) == []
    assert not [one for one in await found(kube, CRDS) if one["spec"]["group"] == "gpuwarden.io"]


async def names_of(kube: Kube, of: Resource) -> set[str]:
    """The names of all objects of a kind in the release's namespace."""
    return {one["metadata"]["name"] for one in await kube.list(of, OURS)}


async def is_taken(kube: Kube, namespace: str) -> bool:
    """A deleted webhook configuration stays active for a moment."""
    try:
        await kube.create(PODS, pod("plain", gpus=1), namespace, dryRun="All")
    except ApiError:
        return False
    return True


def ours(cluster: Cluster) -> list[str]:
    """All objects labelled as part of gpuwarden, of every kind that can be listed."""
    kinds = subprocess.run(
        [*cluster.kubectl, "api-resources", "--verbs=list", "-o", "name"], capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = ",".join(kind for kind in kinds if not kind.startswith(("events", "componentstatuses")))
    done = subprocess.run(
        [*cluster.kubectl, "get", wanted, "-A", "-l", PART_OF, "-o", "name", "--ignore-not-found"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


async def test_missing_cluster_features_are_reported_before_anything_is_created(
    cluster: Cluster, kube: Kube, release: Release
) -> None:
    for values, sentence in (
        ({"tls.mode": "certManager"}, "this cluster has no cert-manager.io/v1"),
        ({"serviceMonitor.enabled": True}, "this cluster has no ServiceMonitor"),
        ({"prometheusRule.enabled": True}, "this cluster has no PrometheusRule"),
        (
            {"export.enabled": True, "export.settings.clusterName": "rig"},
            "there is no namespace gpu-operator: set export.settings.namespace",
        ),
    ):
        done = await asyncio.to_thread(
            release.helm, "install", release.name, str(CHART), "--create-namespace", values=values
        )
        assert done.returncode != 0
        assert sentence in done.stderr
    assert await asyncio.to_thread(ours, cluster) == []


async def test_cluster_features_are_detected(kube: Kube, others: None, release: Release) -> None:
    """helm finds the features of the API server without values."""
    features = {"tls.mode": "certManager", "serviceMonitor.enabled": True, "prometheusRule.enabled": True}
    values = {**features, "webhooks.acceptUnverifiedCallers": True}

    def tried() -> str:
        done = release.helm("install", release.name, str(CHART), "--dry-run=server", values=values)
        return done.stderr if done.returncode else ""

    await wait_until(lambda: asyncio.to_thread(tried), lambda said: said == "")


async def test_webhooks_do_not_replace_native_pods_that_have_gpus(kube: Kube, namespace: str, release: Release) -> None:
    """`serve` would reserve the GPUs of these pods for others: it does not know ResourceClaims."""

    def tried(**values: Any) -> str:
        values |= {"webhooks.acceptUnverifiedCallers": True}
        done = release.helm("install", release.name, str(CHART), "--dry-run=server", values=values)
        return done.stderr if done.returncode else ""

    assert await asyncio.to_thread(tried) == ""
    annotations = {"resource.kubernetes.io/pod-claim-name": "gpuwarden"}
    meta = {"name": "train-gpuwarden-1", "labels": CLAIM_LABELS, "annotations": annotations}
    made = await kube.create(RESOURCE_CLAIMS, {"metadata": meta, "spec": pairs(1, "aa11")}, namespace)
    assert await asyncio.to_thread(tried) == "", "it has no GPU yet"
    devices = [(DRIVER, "proof0", "gpu-1-aa11"), (GPU_DRIVER, "gpu0", "gpu-0")]
    results = [{"driver": one, "request": name, "pool": "node-0", "device": which} for one, name, which in devices]
    made["status"] = {"allocation": {"devices": {"results": results}}}
    await kube.replace(RESOURCE_CLAIMS, made, namespace, "status")
    assert f"the pod of ResourceClaim {namespace}/train-gpuwarden-1" in await asyncio.to_thread(tried)
    assert "ResourceClaim" not in await asyncio.to_thread(tried, native=True)
    await kube.delete(RESOURCE_CLAIMS, "train-gpuwarden-1", namespace)


# Change from cert-manager's certificate to gpuwarden's.


def cert_manager_secret(ca: KeyPair) -> Raw:
    """The Secret that cert-manager would have created."""
    now = utc_now()
    names = tuple(f"{OURS}{rest}" for rest in ("", f".{OURS}", f".{OURS}.svc"))
    leaf = new_leaf(ca, OURS, names, (now - BACKDATED, now + timedelta(days=90)))
    data = {"tls.crt": leaf.cert_pem, "tls.key": leaf.key_pem, "ca.crt": ca.cert_pem}
    encoded = {name: base64.b64encode(text).decode() for name, text in data.items()}
    return {"metadata": {"name": "gpuwarden-tls"}, "type": "kubernetes.io/tls", "data": encoded}


async def test_change_from_cert_manager_trusts_both_cas_before_the_own_ca_signs(
    kube: Kube, others: None, release: Release
) -> None:
    """Each mode has its own Secret. An upgrade leaves its content, and uninstalling deletes gpuwarden's."""
    base = {"settings.requireEvidence": "asked", "settings.certsSettle": "2s", "settings.certsLookInterval": "200ms"}
    await release.install({**base, "tls.mode": "certManager"})
    ca = new_ca("theirs", (utc_now() - BACKDATED, utc_now() + timedelta(days=3650)))
    theirs = cert_manager_secret(ca)
    await kube.create(SECRETS, theirs, OURS)
    for of in (MUTATING, VALIDATING):
        found = await kube.get(of, OURS)
        for hook in found["webhooks"]:
            hook["clientConfig"]["caBundle"] = theirs["data"]["ca.crt"]
        await kube.replace(of, found)
    old, _ = await asyncio.gather(release.start("serve"), release.start("reconcile"))
    async with new_namespace(kube, ENABLED) as namespace:
        await wait_until(lambda: is_dressed(kube, namespace))
        await release.upgrade(base)
        assert await bundles(kube) == {theirs["data"]["ca.crt"]}
        await release.start("certs")

        async def ours() -> Raw:
            return dict((await kube.get(SECRETS, "gpuwarden-certs", OURS)).get("data", {}))

        # Until gpuwarden's CA signs, the bundle has two CAs, and the old certificate is served.
        await wait_until(ours, lambda data: "tls.crt" in data)
        (bundle,) = await bundles(kube)
        assert base64.b64decode(bundle).count(b"BEGIN CERTIFICATE") == 2
        assert ca.cert_pem in base64.b64decode(bundle)
        assert await is_dressed(kube, namespace)
        await old.kill()
        await release.start("serve")
        await wait_until(lambda: is_dressed(kube, namespace))
        before = await ours()
        await release.upgrade({**base, "webhooks.timeoutSeconds": 7})
        assert await ours() == before
    assert (await kube.get(SECRETS, "gpuwarden-tls", OURS))["data"] == theirs["data"]
    done = await asyncio.to_thread(release.helm, "uninstall", release.name, "--wait")
    assert done.returncode == 0, done.stderr
    assert await names_of(kube, SECRETS) == {"gpuwarden-tls"}


# Without helm.


def test_every_directory_is_a_kustomization(cluster: Cluster) -> None:
    places = [path.parent for path in DEPLOY.rglob("kustomization.yaml")]
    assert len(places) == 6
    for place in places:
        command = [*cluster.kubectl, "kustomize", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "kind: Deployment" in done.stdout


async def test_filter_works_after_kubectl_apply_of_the_extender_directory(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Applies the files in directory order, runs the processes with their accounts, and sends a scheduler's request."""
    place = "blind-gpu-scheduler"
    release = Release(cluster, kube, tmp_path, namespace=place)
    command = [*cluster.kubectl, "apply", "-f", str(DEPLOY / "extender/manifests")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    try:
        await asyncio.gather(release.start("certs"), release.start("serve"))
        question = {
            "Pod": {"metadata": {"annotations": {"gpuwarden.io/required-hash": "abc123"}}, "spec": {"containers": []}}
        }
        names = {**question, "Nodes": None, "NodeNames": ["kind-worker", "kind-worker2", "another"]}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{release.http_port}", trust_env=False) as client:
            said = (await client.post("/filter", json=names)).raise_for_status().json()
        assert said["NodeNames"] == ["kind-worker"]
        assert said["FailedAndUnresolvableNodes"].keys() == {"kind-worker2", "another"}
    finally:
        await release.end()
        command = [*cluster.kubectl, "delete", "--ignore-not-found", "-f", str(DEPLOY / "extender/manifests")]
        await asyncio.to_thread(subprocess.run, command, capture_output=True)
        await gone(kube, NAMESPACES, place)
