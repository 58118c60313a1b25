"""The required hash of a namespace, and the requirement of a cluster for all pods, on a real API server."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.controlplane.cluster import Cluster
from tests import builders
from tests.e2e.kube import NAMESPACES, PODS, SERVICE_ACCOUNTS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.processes import OPT_IN, Site, site
from tests.running import GPUWARDEN, Running, started

KEY = "gpuwarden.io/required-hash"
TRUSTED, OTHER = "sha256:aa11", "sha256:bb22"


@pytest.fixture
async def here(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    """Two replicas that answer in turn, and two nodes with different hashes."""
    proven = json.dumps({"bond-0": TRUSTED, "bond-1": OTHER})
    flags = ("--node-hash-map", proven)
    async with site(cluster, kube, tmp_path, nodes=2, gpus=4, name="bond", replicas=2, flags=flags) as there:
        yield there


async def require_hash(kube: Kube, namespace: str, required: str | None) -> None:
    await kube.patch(NAMESPACES, namespace, {"metadata": {"annotations": {KEY: required}}})


def asking(*hashes: str, gpus: int = 1, **spec: Any) -> Raw:
    return pod(gpus=gpus, annotations={KEY: ",".join(hashes)} if hashes else {}, **spec)


async def outcome(kube: Kube, namespace: str, content: Raw) -> str:
    """The node whose GPUs a dry run assigns, or the message of the denial."""
    try:
        made = await kube.create(PODS, content, namespace, dryRun="All")
    except ApiError as exc:
        return exc.message
    return str(made["metadata"]["annotations"]["gpuwarden.io/node"])


async def wait_until_replicas_agree(here: Site, text: str) -> None:
    """Waits until all replicas answer the same for a pod without a hash."""
    for one in here.replicas:
        await here.balancer.only(one)
        await wait_until(lambda: outcome(here.kube, here.namespace, asking()), lambda said: text in said)
    await here.balancer.only(*here.replicas)


async def test_namespace_hash_applies_to_its_pods_and_a_pod_can_only_narrow_it(here: Site, kube: Kube) -> None:
    await require_hash(kube, here.namespace, OTHER)
    await wait_until_replicas_agree(here, "bond-1")
    made = await kube.create(PODS, asking(), here.namespace)
    assert made["metadata"]["annotations"]["gpuwarden.io/node"] == "bond-1"
    assert json.loads(made["metadata"]["annotations"]["gpuwarden.io/claim"])["hashes"] == [OTHER]
    name = made["metadata"]["name"]
    await wait_until(
        lambda: kube.get(PODS, name, here.namespace), lambda seen: seen["spec"].get("nodeName") == "bond-1"
    )
    with pytest.raises(ApiError) as refused:
        await kube.create(PODS, asking(TRUSTED), here.namespace)
    assert (refused.value.status, refused.value.reason) == (403, "InvalidPod")
    assert f"namespace {here.namespace} allows only {OTHER}" in refused.value.message

    await require_hash(kube, here.namespace, f"{TRUSTED},{OTHER}")
    await wait_until(lambda: outcome(kube, here.namespace, asking(TRUSTED)), lambda said: said == "bond-0")
    await require_hash(kube, here.namespace, f"{TRUSTED},")
    await wait_until_replicas_agree(here, "has an empty hash")
    await require_hash(kube, here.namespace, None)
    await wait_until_replicas_agree(here, "bond-")


async def test_namespace_hash_applies_to_pods_created_right_after_the_namespace(here: Site, kube: Kube) -> None:
    """The watch has not reported the namespace yet, so it is read."""
    for _ in range(10):
        meta = {"generateName": "e2e-", "labels": dict(OPT_IN), "annotations": {KEY: "sha256:nobody-has-this"}}
        namespace = str((await kube.create(NAMESPACES, {"metadata": meta}))["metadata"]["name"])
        said = await outcome(kube, namespace, asking(serviceAccountName="", automountServiceAccountToken=False))
        if "serviceaccount" in said:
            await wait_until(lambda namespace=namespace: kube.find(SERVICE_ACCOUNTS, "default", namespace))  # type: ignore[misc]  # bound now, not later
            said = await outcome(kube, namespace, asking())
        await kube.delete(NAMESPACES, namespace)
        assert "attested as sha256:nobody-has-this" in said


async def answer_of(running: Running, raw: Raw) -> Mapping[str, Any]:
    async with httpx.AsyncClient(base_url=running.urls["https"], verify=running.trust, trust_env=False) as client:
        answer = await client.post("/mutate", json=builders.mutating_create(raw))
    response: Mapping[str, Any] = answer.raise_for_status().json()["response"]
    return response


async def test_cluster_requires_evidence_for_every_claim_by_default(
    cluster: Cluster, here: Site, tmp_path: Path
) -> None:
    directory = tmp_path / "by-default"
    directory.mkdir()
    ports = ["--port", "0", "--ui-port", "0", "--extender-port", "0"]
    with started([GPUWARDEN, "serve", *ports, "--kubeconfig", str(cluster.kubeconfig)], directory) as running:
        refused = await answer_of(running, builders.raw_pod(builders.raw_container(gpus=1)))
    assert not refused["allowed"]
    assert (refused["status"]["code"], refused["status"]["reason"]) == (403, "NoProvenNode")
    assert "no evidence" in refused["status"]["message"]
    assert "have the nodes attested; or, with --require-evidence asked" in refused["status"]["message"]
