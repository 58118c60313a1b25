"""gpuwarden behind a real API server: its patches take effect, and its messages reach the client."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.e2e.conftest import emptied_namespace
from tests.e2e.kube import (
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PODS,
    SERVICES,
    ApiError,
    Kube,
    Raw,
    deployment,
    gone,
    job,
    pod,
    pod_in_phase,
    pods_in_phase,
    wait_until,
)
from tests.e2e.webhook_configurations import ENABLED, another_webhook, at_service, at_url, reviewed, show_all_gpus
from tests.running import Running, serving

PROVEN = "sha256:aa11"
HASH = {"gpuwarden.io/required-hash": PROVEN}
# Only node-1 is proven; it is neither the scheduler's first nor its only choice.
INVENTORY = {
    "nodes": [
        {"name": "node-0", "devices": [{"uuid": f"GPU-0-{n}"} for n in range(8)]},
        {"name": "node-1", "evidence": {"hash": PROVEN}, "devices": [{"uuid": f"GPU-1-{n}"} for n in range(3)]},
        {"name": "node-2", "evidence": {"hash": "sha256:bb22"}, "devices": [{"uuid": f"GPU-2-{n}"} for n in range(8)]},
    ]
}
# The log is a pipe of 64 KiB that is not read while a test runs.
QUIET = ("--log-level", "warn")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path, INVENTORY, QUIET) as running:
        yield running


@pytest.fixture
async def enabled(kube: Kube) -> AsyncIterator[str]:
    """An opted-in namespace."""
    async with emptied_namespace(kube, ENABLED) as name:
        yield name


@pytest.fixture
async def reviewed_namespace(kube: Kube, enabled: str, server: Running) -> AsyncIterator[str]:
    """The namespace, reviewed by the server."""
    ca = server.directory / "certs/dev/ca.crt"
    async with reviewed(kube, enabled, at_url(server.urls["https"]), ca):
        yield enabled


async def devices(server: Running) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.urls["http"]) as client:
        return dict((await client.get("/devices")).raise_for_status().json())


async def held(server: Running) -> set[str]:
    return {uuid for uuid, one in (await devices(server)).items() if one["state"] != "available"}


def gpus_of(one: Raw) -> list[str]:
    return list(one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(","))


def seen_by_container(one: Raw) -> dict[str, str]:
    return {env["name"]: env["value"] for env in one["spec"]["containers"][0].get("env", [])}


@pytest.mark.parametrize("name", ["named", None], ids=["by name", "by generateName"])
async def test_gpu_pod_runs_on_the_node_of_its_gpus(
    kube: Kube, server: Running, reviewed_namespace: str, name: str | None
) -> None:
    made = await kube.create(PODS, pod(name, gpus=2, annotations=HASH), reviewed_namespace)
    gpus = gpus_of(made)
    assert len(gpus) == 2
    assert seen_by_container(made) == {
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    assert "nvidia.com/gpu" not in made["spec"]["containers"][0]["resources"].get("limits", {})
    running = await pod_in_phase(kube, reviewed_namespace, made["metadata"]["name"], "Running")
    assert running["spec"]["nodeName"] == made["metadata"]["annotations"]["gpuwarden.io/node"] == "node-1"
    assert await held(server) == set(gpus)


async def test_pods_of_a_deployment_share_no_gpu(kube: Kube, server: Running, reviewed_namespace: str) -> None:
    await kube.create(DEPLOYMENTS, deployment("infer", 3, gpus=1, annotations=HASH), reviewed_namespace)
    running = await pods_in_phase(kube, reviewed_namespace, 3, "Running")
    assert {one["spec"]["nodeName"] for one in running} == {"node-1"}
    assert sorted(uuid for one in running for uuid in gpus_of(one)) == ["GPU-1-0", "GPU-1-1", "GPU-1-2"]
    await kube.delete(DEPLOYMENTS, "infer", reviewed_namespace)
    await pods_in_phase(kube, reviewed_namespace, 0, "")
    assert await held(server) == set()


async def test_a_job_runs_to_its_end(kube: Kube, reviewed_namespace: str) -> None:
    await kube.create(JOBS, job("train", pods=3, gpus=1, annotations=HASH), reviewed_namespace)
    await wait_until(
        lambda: kube.get(JOBS, "train", reviewed_namespace), lambda one: one["status"].get("succeeded") == 3
    )


async def test_denial_message_reaches_the_client_unchanged(
    kube: Kube, server: Running, reviewed_namespace: str
) -> None:
    await kube.create(PODS, pod("first", gpus=3, annotations=HASH), reviewed_namespace)
    with pytest.raises(ApiError) as refused:
        await kube.create(PODS, pod("second", gpus=1, annotations=HASH), reviewed_namespace)
    assert (refused.value.status, refused.value.reason) == (429, "NoFreeDevice")
    assert refused.value.message.startswith('admission webhook "mutate.gpuwarden.io" denied the request: ')
    assert refused.value.said.get("details", {}).get("retryAfterSeconds", 0) == 0

    unavailable = {"gpuwarden.io/required-hash": "sha256:cc33"}
    with pytest.raises(ApiError) as refused:
        await kube.create(PODS, pod("third", gpus=1, annotations=unavailable), reviewed_namespace)
    assert (refused.value.status, refused.value.reason) == (403, "NoProvenNode")
    assert "sha256:cc33" in refused.value.message
    assert len(await held(server)) == 3


async def test_denied_pod_of_a_controller_is_reported_in_an_event(kube: Kube, reviewed_namespace: str) -> None:
    unavailable = {"gpuwarden.io/required-hash": "sha256:cc33"}
    await kube.create(DEPLOYMENTS, deployment("infer", 1, gpus=1, annotations=unavailable), reviewed_namespace)
    events = await wait_until(lambda: kube.list(EVENTS, reviewed_namespace, fieldSelector="reason=FailedCreate"))
    assert "denied the request" in events[0]["message"]
    assert await kube.list(PODS, reviewed_namespace) == []


async def test_gpu_of_a_deleted_pod_goes_to_the_next_pod(kube: Kube, server: Running, reviewed_namespace: str) -> None:
    first = await kube.create(PODS, pod("first", gpus=3, annotations=HASH), reviewed_namespace)
    await pod_in_phase(kube, reviewed_namespace, "first", "Running")
    await kube.delete(PODS, "first", reviewed_namespace)
    await gone(kube, PODS, "first", reviewed_namespace)
    assert await held(server) == set()
    second = await kube.create(PODS, pod("second", gpus=3, annotations=HASH), reviewed_namespace)
    assert gpus_of(second) == gpus_of(first)
    await pod_in_phase(kube, reviewed_namespace, "second", "Running")


async def test_dry_run_shows_the_patch_and_reserves_nothing(
    kube: Kube, server: Running, reviewed_namespace: str
) -> None:
    shown = await kube.create(PODS, pod("a", gpus=2, annotations=HASH), reviewed_namespace, dryRun="All")
    assert len(gpus_of(shown)) == 2
    assert await held(server) == set()


async def test_pod_without_a_claim_is_blinded_and_otherwise_unchanged(
    kube: Kube, server: Running, reviewed_namespace: str
) -> None:
    made = await kube.create(PODS, pod("a"), reviewed_namespace)
    assert made["metadata"].get("annotations", {}) == {}
    assert seen_by_container(made) == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert await held(server) == set()


async def test_pods_are_refused_without_a_server_only_in_opted_in_namespaces(
    kube: Kube, server: Running, reviewed_namespace: str, namespace: str
) -> None:
    server.stop()
    with pytest.raises(ApiError, match=r'500 InternalError: .*failed calling webhook "mutate\.gpuwarden\.io"'):
        await kube.create(PODS, pod("a", gpus=1), reviewed_namespace)
    await kube.create(PODS, pod("a", gpus=1), namespace)
    await pod_in_phase(kube, namespace, "a", "Running")


async def test_webhook_is_reached_through_a_service(kube: Kube, enabled: str, tmp_path: Path) -> None:
    """As in a cluster, except that the Service's name leads to this machine."""
    name = f"gpuwarden.{enabled}.svc"
    ca = trustme.CA()
    leaf = ca.issue_cert(name)
    leaf.private_key_pem.write_to_path(tmp_path / "tls.key")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    flags = (*QUIET, "--tls-cert", "tls.crt", "--tls-key", "tls.key")
    with serving(tmp_path, INVENTORY, flags) as running:
        spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": running.port}]}
        await kube.create(SERVICES, {"metadata": {"name": "gpuwarden"}, "spec": spec}, enabled)
        client = at_service(enabled, "gpuwarden", running.port)
        async with reviewed(kube, enabled, client, tmp_path / "ca.crt"):
            await kube.create(PODS, pod("a", gpus=3, annotations=HASH), enabled)
            started = await pod_in_phase(kube, enabled, "a", "Running")
            assert started["spec"]["nodeName"] == "node-1"
            assert len(await held(running)) == 3


# Another webhook that is called after gpuwarden's.


def adds_a_sidecar(one: Raw) -> list[Raw]:
    if len(one["spec"]["containers"]) > 1:
        return []
    mesh = {"name": "mesh", "image": "example.test/mesh:1"}
    return [{"op": "add", "path": "/spec/containers/-", "value": mesh}]


@pytest.mark.parametrize("change", [show_all_gpus, adds_a_sidecar])
async def test_change_by_a_later_webhook_is_corrected_by_reinvocation(
    kube: Kube, server: Running, reviewed_namespace: str, tmp_path: Path, change: Callable[[Raw], list[Raw]]
) -> None:
    async with another_webhook(kube, reviewed_namespace, tmp_path, change, "Never") as asked:
        made = await kube.create(PODS, pod("train", gpus=2, annotations=HASH), reviewed_namespace)
        assert len(asked) == 1
    containers = [container.get("env", ()) for container in made["spec"]["containers"]]
    seen = [env["value"].split(",") for one in containers for env in one if env["name"] == "NVIDIA_VISIBLE_DEVICES"]
    assert seen == [gpus_of(made), *[["void"]] * (len(containers) - 1)]  # a sidecar sees no GPU
    assert await held(server) == set(gpus_of(made))  # the second call found the reservation of the first
    await pod_in_phase(kube, reviewed_namespace, "train", "Running")


async def test_pod_with_a_node_name_runs_without_a_scheduler(
    kube: Kube, server: Running, reviewed_namespace: str
) -> None:
    made = await kube.create(PODS, pod("train", gpus=1, schedulerName="nobody", nodeName="node-2"), reviewed_namespace)
    assert reserved_node(made) == "node-2"
    await pod_in_phase(kube, reviewed_namespace, "train", "Running")


def reserved_node(made: Raw) -> str:
    return str(made["metadata"]["annotations"]["gpuwarden.io/node"])
