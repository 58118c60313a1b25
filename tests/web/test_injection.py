"""Injections in all reviews: which pods get a ResourceClaim, which nodes they get, and that a pod keeps its own."""

import json
from typing import Any

import pytest

from tests import builders
from tests.admission.test_namespaces import Api
from tests.builders import HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness
from tests.web.test_admission import pinned_nodes, refusal
from tests.web.test_namespaces import with_namespaces
from webhook.admission.namespaces import WatchedNamespaces
from webhook.core.pod_claims import CLAIM_NAME, own_claim_of

LABEL = "gpuwarden.io/injection"
GPU_UUID = "gpuwarden.io/gpu-uuid"
FORGED = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"


@pytest.fixture
def namespaces() -> WatchedNamespaces:
    return WatchedNamespaces(Api())


def annotate(namespaces: WatchedNamespaces, value: str | None, version: int = 1) -> None:
    annotations = {} if value is None else {LABEL: value}
    meta = {"name": "ml", "annotations": annotations, "resourceVersion": str(version)}
    namespaces.view.changed({"metadata": meta})


def labelled(**injections: str) -> Raw:
    """The inventory with these labels of nodes; `node_a` is node-a."""
    nodes = []
    for one in INVENTORY["nodes"]:
        value = injections.get(one["name"].replace("-", "_"))
        nodes.append({**one, "labels": {**one["labels"], **({} if value is None else {LABEL: value})}})
    return {"nodes": nodes}


def asking(gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container("main", gpus=gpus), raw_container("side"), **members)


def claim_of(raw: Raw) -> str:
    return own_claim_of(raw["spec"])


@pytest.fixture
async def harness(build: Build, namespaces: WatchedNamespaces) -> Harness:
    """Only node-a has claims. The namespace has too."""
    annotate(namespaces, "dra")
    return await build(labelled(node_a="dra"), assemble=with_namespaces(namespaces))


async def test_pod_gets_a_claim_of_its_own_and_a_node_of_its_injection(harness: Harness) -> None:
    final = await harness.create(asking())
    assert CLAIM_NAME.fullmatch(claim_of(final))
    assert pinned_nodes(final) == ["node-a"]
    assert json.loads(final["metadata"]["annotations"]["gpuwarden.io/claim"])["injection"] == "dra"
    main, side = final["spec"]["containers"]
    assert main["resources"]["claims"] == [{"name": "gpuwarden"}]
    assert "claims" not in side.get("resources", {})
    shown = {one["name"]: one["value"] for one in main["env"]}
    assert shown == {
        "CUDA_VISIBLE_DEVICES": final["metadata"]["annotations"][GPU_UUID],
        "NVIDIA_VISIBLE_DEVICES": "void",
    }


async def test_denial_and_explanation_name_the_nodes_of_another_injection(harness: Harness) -> None:
    await harness.create(asking(2))
    response = await harness.mutate(asking(), "another")
    assert refusal(response) == (429, "NoFreeDevice")
    assert "2 have another injection" in response["status"]["message"]
    answer = (await harness.tls.post("/explain", json=asking())).json()
    reasons = {one["name"]: one["reasons"] for one in answer["nodes"]}
    assert reasons == {
        "node-a": ["no free GPU"],
        "node-b": ["another injection"],
        "node-c": ["another injection"],
    }


async def test_repeated_review_keeps_the_name_of_the_claim(harness: Harness) -> None:
    first = await harness.dress(asking())
    first["metadata"]["labels"] = {"mesh": "on"}
    assert claim_of(await harness.dress(first, "again")) == claim_of(first)
    assert harness.held == first["metadata"]["annotations"][GPU_UUID].split(",")


async def test_copied_manifest_gets_another_claim(harness: Harness) -> None:
    first = await harness.create(asking())
    copied = {**first, "metadata": {**first["metadata"], "name": "copy", "uid": None}}
    second = await harness.create(copied, "copy", "uid-copy")
    assert CLAIM_NAME.fullmatch(claim_of(second))
    assert claim_of(second) != claim_of(first)
    assert second["metadata"]["annotations"][GPU_UUID] != first["metadata"]["annotations"][GPU_UUID]


async def test_named_claim_is_replaced_or_denied(harness: Harness) -> None:
    entry = [{"name": "gpuwarden", "resourceClaimName": FORGED}]
    final = await harness.create(asking(resourceClaims=entry))
    assert claim_of(final) not in ("", FORGED)
    without = raw_pod(raw_container("main"), resourceClaims=entry)
    plain = await harness.validate(builders.validating_create(await harness.dress(without, "without")))
    assert refusal(plain) == (403, "GpuWithoutClaim")
    others = asking(resourceClaims=[{"name": "nic", "resourceClaimName": "nic"}])
    assert refusal(await harness.mutate(others, "others")) == (403, "GpuWithoutClaim")


async def test_forged_final_pod_is_denied(harness: Harness) -> None:
    final = builders.created(await harness.dress(asking()))
    final["spec"]["containers"][1]["resources"] = {"claims": [{"name": "gpuwarden"}]}
    assert refusal(await harness.validate(builders.review("CREATE", new=final, uid="validate"))) == (403, "Forged")


async def test_copy_from_a_namespace_with_claims_gets_variables(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    first = await harness.create(asking())
    annotate(namespaces, None, 2)
    copied = {**first, "metadata": {**first["metadata"], "name": "copy"}}
    copied["spec"] = {**copied["spec"], "affinity": {}}
    second = await harness.create(copied, "copy", "uid-copy")
    assert "resourceClaims" not in second["spec"]
    assert all("claims" not in one.get("resources", {}) for one in second["spec"]["containers"])
    uuids = second["metadata"]["annotations"][GPU_UUID]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": uuids} in second["spec"]["containers"][0]["env"]


async def test_pod_keeps_the_injection_with_which_it_was_dressed(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    dressed = builders.created(await harness.dress(asking()))
    annotate(namespaces, "nvidia", 2)
    assert (await harness.validate(builders.review("CREATE", new=dressed, uid="validate")))["allowed"]


async def test_queued_pod_has_a_claim_and_the_injection_of_its_namespace(
    build: Build, namespaces: WatchedNamespaces
) -> None:
    annotate(namespaces, "dra")
    harness = await build(labelled(node_a="dra"), assemble=with_namespaces(namespaces), when_unavailable="queue")
    await harness.create(asking(2))
    made = builders.created(await harness.dress(asking(), "late"))
    assert [one["name"] for one in made["spec"]["schedulingGates"]] == ["gpuwarden.io/queue"]
    assert CLAIM_NAME.fullmatch(claim_of(made))
    review = builders.review("CREATE", new=made, uid="validate")
    assert (await harness.validate(review))["allowed"]
    # A copy of a pod that waits gets a claim of its own.
    copied = {**made, "metadata": {**made["metadata"], "name": "copy"}}
    assert claim_of(await harness.dress(copied, "copy")) not in ("", claim_of(made))
    annotate(namespaces, "nvidia", 2)
    assert refusal(await harness.validate(review)) == (403, "Forged")


async def test_no_claim_of_a_namespace_with_an_unknown_injection_is_served(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    annotate(namespaces, "native", 2)
    response = await harness.mutate(asking())
    assert refusal(response) == (403, "InvalidPod")
    assert f"its annotation {LABEL} is 'native'; allowed are nvidia, cuda, plugin, dra" in response["status"]["message"]
    assert (await harness.mutate(raw_pod(raw_container("main")), "plain"))["allowed"]


async def test_claim_without_gpus_goes_anywhere(harness: Harness, namespaces: WatchedNamespaces) -> None:
    annotate(namespaces, "cuda", 2)
    final = await harness.create(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    assert pinned_nodes(final) == ["node-a"]


async def test_cuda_in_one_namespace_shows_gpus_by_one_variable(build: Build, namespaces: WatchedNamespaces) -> None:
    """Containers of a namespace with `cuda` see all GPUs of their node."""
    annotate(namespaces, "cuda")
    harness = await build(labelled(node_a="cuda"), assemble=with_namespaces(namespaces))
    env = [{"name": "CUDA_VERSION", "value": "13"}]
    raw = raw_pod(raw_container("main", env=env), annotations={"gpuwarden.io/gpu-count": "1"})
    final = await harness.create(raw)
    assert [one["name"] for one in final["spec"]["containers"][0]["env"]] == ["CUDA_VERSION", "CUDA_VISIBLE_DEVICES"]
    assert refusal(await harness.mutate(asking(), "another")) == (403, "InjectionConflict")


async def test_installation_with_claims_needs_no_annotation(build: Build) -> None:
    harness = await build(labelled(node_a="nvidia"), injection="dra")
    final = await harness.create(asking())
    assert pinned_nodes(final) == ["node-b"]
    assert CLAIM_NAME.fullmatch(claim_of(final))


async def test_device_page_and_explanation_show_a_pod_with_a_claim_until_it_is_deleted(harness: Harness) -> None:
    final = await harness.create(asking(2))
    states = await harness.states()
    assert {states[uuid] for uuid in ("GPU-a0", "GPU-a1")} == {"assigned"}
    answer = (await harness.tls.post("/explain", json=final)).json()
    assert answer["message"].startswith("the pod has GPU-a")
    response = await harness.mutate(asking(), "another")
    assert refusal(response) == (429, "NoFreeDevice")
    await harness.ask("/validate", builders.delete(final))
    assert harness.held == []
    assert len((await harness.create(asking(2), "next", "uid-next"))["metadata"]["annotations"][GPU_UUID]) > 0


# GPUs that the kubelet chooses.


@pytest.fixture
async def plugged(build: Build, namespaces: WatchedNamespaces) -> Harness:
    annotate(namespaces, "plugin")
    return await build(labelled(node_a="plugin"), assemble=with_namespaces(namespaces), when_unavailable="queue")


def plugin_pod(gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container("main", gpus=gpus), raw_container("side"), **members)


async def test_pod_keeps_its_request_and_gets_a_node(plugged: Harness) -> None:
    final = await plugged.create(plugin_pod())
    main, side = final["spec"]["containers"]
    assert (main["resources"]["limits"], "env" in main) == ({"nvidia.com/gpu": "1"}, False)
    assert side["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert pinned_nodes(final) == ["node-a"]
    assert GPU_UUID not in final["metadata"]["annotations"]
    assert len(plugged.held) == 1
    answer = (await plugged.tls.post("/explain", json=final)).json()
    assert answer["message"] == "the pod has 1 GPU, which the kubelet chooses, on node node-a (finalized)"
    again = await plugged.dress(copy_of(final), "copy")
    assert again["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    waits = builders.created(await plugged.dress(plugin_pod(2), "late"))
    assert [one["name"] for one in waits["spec"]["schedulingGates"]] == ["gpuwarden.io/queue"]
    assert (await plugged.validate(builders.review("CREATE", new=waits, uid="validate")))["allowed"]


def copy_of(raw: Raw) -> Raw:
    return {**raw, "metadata": {**raw["metadata"], "name": "copy"}}


async def test_pod_that_asks_in_another_way_is_refused(plugged: Harness) -> None:
    for raw in (
        raw_pod(annotations={"gpuwarden.io/gpu-count": "1"}),
        plugin_pod(labels={"gpuwarden.io/gpu.model": "h100"}),
        raw_pod(raw_container("main", gpus=1, env=builders.raw_env(NVIDIA_VISIBLE_DEVICES="all"))),
    ):
        assert refusal(await plugged.mutate(raw)) == (403, "InjectionConflict")


async def test_request_that_another_webhook_adds_is_refused(plugged: Harness) -> None:
    for number, gpus in ((0, "2"), (1, "1")):
        final = builders.created(await plugged.dress(plugin_pod(), f"review-{number}"), uid=f"uid-{number}")
        final["spec"]["containers"][number]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        review = builders.review("CREATE", new=final, uid=f"validate-{number}")
        assert refusal(await plugged.validate(review)) == (403, "InjectionConflict")


async def test_debug_container_gets_no_gpu_that_only_stands_for_the_pods(plugged: Harness) -> None:
    """The kubelet may have given it to another pod."""
    final = await plugged.create(plugin_pod())
    for value, is_allowed in ((plugged.held[0], False), ("void", True)):
        debug = raw_container("debug", env=builders.raw_env(NVIDIA_VISIBLE_DEVICES=value))
        new = {**final, "spec": {**final["spec"], "ephemeralContainers": [debug]}}
        response = await plugged.validate(builders.update(new, final, subresource="ephemeralcontainers"))
        assert response["allowed"] is is_allowed
