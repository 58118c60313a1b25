"""Pods whose claims cannot be served yet: they are created behind a gate if waiting can help, and denied otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw, raw_container, raw_env, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness, patched
from tests.web.replica import Shared, binding, sharing
from webhook.core.claim import recorded_claim
from webhook.core.dress import Allocation, dressed
from webhook.core.pod import Pod

GATE = {"name": "gpuwarden.io/queue"}
GPU_UUID = "gpuwarden.io/gpu-uuid"
FROM_ANNOTATION = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['gpuwarden.io/gpu-uuid']"}}
A100 = {"gpuwarden.io/gpu.model": "a100"}


@pytest.fixture
async def harness(build: Build) -> Harness:
    """The only A100 is taken."""
    made = await build(when_unavailable="queue")
    await made.create(raw_pod(raw_container(gpus=1), name="first", labels=A100), "first", "uid-first")
    return made


def late(**members: Any) -> Raw:
    return raw_pod(raw_container(gpus=1), labels=A100, **members)


async def test_queued_pod_gets_its_runtime_class_at_creation(build: Build) -> None:
    """An existing pod cannot get one, so none is required of pods from before the setting."""
    harness = await build(when_unavailable="queue", runtime_class="nvidia")
    await harness.create(raw_pod(raw_container(gpus=1), name="first", labels=A100), "first", "uid-first")
    made = patched(late(), await harness.mutate(late()))
    assert (made["spec"]["schedulingGates"], made["spec"]["runtimeClassName"]) == ([GATE], "nvidia")
    assert (await validated(harness, made))["allowed"]
    made["spec"].pop("runtimeClassName")
    assert (await validated(harness, made))["allowed"]


async def validated(harness: Harness, raw: Raw) -> Raw:
    return await harness.validate(builders.review("CREATE", new=builders.created(raw), uid="validate"))


async def test_pod_without_a_free_gpu_is_created_and_queued(harness: Harness) -> None:
    raw = raw_pod(
        raw_container(gpus=1, env=raw_env(CUDA_VISIBLE_DEVICES="3", OTHER="x")),
        raw_container("helper"),
        labels=A100,
        schedulingGates=[{"name": "example.org/quota"}],
    )
    response = await harness.mutate(raw)
    made = patched(raw, response)
    assert made["metadata"]["annotations"] == {
        "gpuwarden.io/claim": '{"asked":{"main":1},"gpus":1,"requirements":["model=a100"]}',
        "gpuwarden.io/waiting": response["warnings"][0].removeprefix("the pod waits: "),
    }
    assert made["metadata"]["labels"] == {**A100, "gpuwarden.io/queued": "true"}
    assert made["spec"]["schedulingGates"] == [{"name": "example.org/quota"}, GATE]
    assert "affinity" not in made["spec"]
    main, helper = made["spec"]["containers"]
    assert main["env"] == [
        {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": FROM_ANNOTATION},
        {"name": "OTHER", "value": "x"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": FROM_ANNOTATION},
    ]
    assert main["resources"] == {"limits": {}, "requests": {}}
    assert helper["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert response["auditAnnotations"] == {"reason": "Queued", "waits-for": "NoFreeDevice"}
    assert harness.held == ["GPU-b0"]
    assert (await validated(harness, made))["allowed"]
    assert (await harness.mutate(made, "again")).get("patch") is None


async def test_reinvocation_of_a_queued_creation_gets_a_freed_gpu(harness: Harness) -> None:
    """Another webhook changes the gated pod, and the API server sends it again."""
    raw = late()
    gated = await harness.dress(raw)
    first = next(iter(harness.parts.ledger.reservations()))
    await harness.parts.ledger.release(first.id, builders.identity("first", "uid-first"))
    made = await harness.dress(gated, "again")
    assert made == await harness.dress(raw, "again")
    assert made["metadata"]["annotations"][GPU_UUID] == "GPU-b0"
    assert "schedulingGates" not in made["spec"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param({"annotations": {"gpuwarden.io/required-hash": "sha256:none"}}, "NoProvenNode", id="no-proof-yet"),
        pytest.param({"labels": {"gpuwarden.io/gpu.model": "b200"}}, "NoMatchingDevice", id="no-such-device-yet"),
    ],
)
async def test_denials_that_may_pass_queue_the_pod(harness: Harness, members: Any, reason: str) -> None:
    response = await harness.mutate(raw_pod(raw_container(gpus=1), **members))
    assert response["auditAnnotations"]["waits-for"] == reason


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(raw_pod(raw_container(gpus="1.5")), "InvalidPod", id="half-a-gpu"),
        pytest.param(raw_pod(raw_container(gpus=4000)), "InvalidPod", id="more-than-any-node-has"),
        pytest.param(late(nodeName="node-b"), "NoFreeDevice", id="a-preset-node"),
        pytest.param(late(nodeSelector={"zone": "nowhere"}), "NoSuitableNode", id="no-node-selected"),
        pytest.param(late(annotations={"gpuwarden.io/gpu-map": "x\n0=node-a"}), "InvalidPod", id="bad-lines-of-a-map"),
    ],
)
async def test_denials_that_cannot_pass_deny_the_pod_at_once(harness: Harness, raw: Raw, reason: str) -> None:
    response = await harness.mutate(raw)
    assert (response["allowed"], response["status"]["reason"]) == (False, reason)


async def test_claim_without_gpus_is_queued_only_if_its_nodes_can_be_added_later(harness: Harness) -> None:
    asked = {"gpuwarden.io/required-hash": "sha256:none"}
    assert (await harness.mutate(raw_pod(annotations=asked)))["auditAnnotations"]["reason"] == "Queued"
    own = builders.required_affinity(builders.term(builders.expression("zone", "Exists")))
    assert not (await harness.mutate(raw_pod(annotations=asked, affinity=own)))["allowed"]


async def test_request_added_to_a_queued_pod_does_not_replace_its_record(harness: Harness) -> None:
    waiting = await harness.dress(late())
    containers = [*waiting["spec"]["containers"], raw_container("helper", gpus=1)]
    changed = {**waiting, "spec": {**waiting["spec"], "containers": containers}}
    response = await harness.mutate(changed, "another-review")
    assert (response["allowed"], response["status"]["reason"]) == (False, "InvalidPod")


def without_gate(raw: Raw) -> Raw:
    return {**raw, "spec": {name: value for name, value in raw["spec"].items() if name != "schedulingGates"}}


def annotated(raw: Raw, **annotations: str) -> Raw:
    merged = {**raw["metadata"]["annotations"], **annotations}
    return {**raw, "metadata": {**raw["metadata"], "annotations": merged}}


def with_env(raw: Raw, env: list[Raw]) -> Raw:
    first, *others = raw["spec"]["containers"]
    return {**raw, "spec": {**raw["spec"], "containers": [{**first, "env": env}, *others]}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(without_gate, "there is no reservation", id="the-gate-taken-off"),
        pytest.param(lambda raw: annotated(raw, **{GPU_UUID: "GPU-b0"}), GPU_UUID, id="a-gpu-of-ones-own"),
        pytest.param(
            lambda raw: annotated(raw, **{"gpuwarden.io/claim": '{"asked":{"main":2},"gpus":2}'}),
            "not what the pod asks for",
            id="another-claim",
        ),
        pytest.param(
            lambda raw: with_env(raw, raw_env(NVIDIA_VISIBLE_DEVICES="all")), "containers[0].env", id="another-env"
        ),
        pytest.param(
            lambda raw: {**raw, "spec": {**raw["spec"], "nodeName": "node-b"}}, "spec.nodeName", id="a-preset-node"
        ),
    ],
)
async def test_changed_queued_pod_is_denied(harness: Harness, change: Any, words: str) -> None:
    raw = change(await harness.dress(late()))
    response = await validated(harness, raw)
    assert not response["allowed"]
    assert words in response["status"]["message"]


UNPROVEN = {"gpuwarden.io/required-hash": "sha256:none"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda raw: with_env(raw, raw_env(NVIDIA_VISIBLE_DEVICES="all")), "GpuWithoutClaim", id="env"),
        pytest.param(lambda raw: annotated(raw, **{"cdi.k8s.io/x": "nvidia.com/gpu=all"}), "GpuWithoutClaim", id="cdi"),
        pytest.param(lambda raw: annotated(raw, **{GPU_UUID: "GPU-c0"}), "Forged", id="a-gpu-of-ones-own"),
    ],
)
async def test_queued_pod_without_gpus_is_blinded(harness: Harness, change: Any, reason: str) -> None:
    gated = await harness.dress(raw_pod(annotations=UNPROVEN))
    assert (await validated(harness, gated))["allowed"]
    assert (await validated(harness, change(gated)))["status"]["reason"] == reason


@pytest.mark.parametrize("uid", ["pod-uid-first", "pod-"])
async def test_review_uid_of_a_queued_pods_reservation_is_denied(harness: Harness, uid: str) -> None:
    response = await harness.mutate(raw_pod(raw_container(gpus=1)), uid)
    assert (response["allowed"], response["status"]["reason"]) == (False, "NotReviewed")
    assert harness.held == ["GPU-b0"]


async def test_claim_larger_than_any_node_is_denied_at_once(harness: Harness) -> None:
    response = await harness.mutate(raw_pod(raw_container(gpus=3)))
    assert response["status"]["reason"] == "NoMatchingDevice"
    assert "no node has more than 2 GPUs" in response["status"]["message"]
    assert (await harness.mutate(raw_pod(raw_container(gpus=2), labels=A100)))["auditAnnotations"]["reason"] == "Queued"


async def test_claim_is_queued_while_the_fleet_has_no_gpus(build: Build) -> None:
    harness = await build({"nodes": []}, when_unavailable="queue")
    assert (await harness.mutate(raw_pod(raw_container(gpus=3))))["auditAnnotations"]["reason"] == "Queued"


async def test_our_gate_without_a_claim_is_denied_and_removed(harness: Harness) -> None:
    raw = raw_pod(schedulingGates=[GATE])
    assert (await validated(harness, raw))["status"]["reason"] == "Forged"
    assert "schedulingGates" not in (await harness.dress(raw))["spec"]


async def test_dry_run_shows_that_the_pod_would_be_queued(harness: Harness) -> None:
    raw = late()
    made = patched(raw, await harness.mutate(raw, dry_run=True))
    assert made["spec"]["schedulingGates"] == [GATE]
    review = builders.review("CREATE", new=builders.created(made), uid="validate", dry_run=True)
    assert (await harness.validate(review))["allowed"]


# The gate is removed.


async def test_gate_may_be_removed_only_together_with_the_reservation(harness: Harness) -> None:
    old = builders.created(await harness.dress(late()))
    response = await harness.validate(builders.review("UPDATE", new=without_gate(old), old=old, uid="open"))
    assert response["status"]["reason"] == "NotReserved"
    made_up = annotated(
        without_gate(old),
        **{GPU_UUID: "GPU-b0", "gpuwarden.io/node": "node-b", "gpuwarden.io/reservation-id": "first"},
    )
    response = await harness.validate(builders.review("UPDATE", new=made_up, old=old, uid="open"))
    assert response["status"]["reason"] == "NotReserved"


CDI = {"cdi.k8s.io/x": "nvidia.com/gpu=all"}
MADE_UP = {GPU_UUID: "GPU-c0", "gpuwarden.io/node": "node-c", "gpuwarden.io/reservation-id": "made-up"}


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param(CDI, "GpuWithoutClaim", id="cdi"),
        pytest.param(MADE_UP, "Forged", id="a-reservation"),
        pytest.param({"fudo.org/gpu.uuid": "GPU-c0"}, "Forged", id="a-gpu-by-its-alias"),
    ],
)
async def test_opening_the_gate_of_a_pod_without_gpus_allows_no_other_change(
    harness: Harness, planted: dict[str, str], reason: str | None
) -> None:
    old = builders.created(await harness.dress(raw_pod(annotations=UNPROVEN)))
    harness.parts.fleet.set_evidence("node-c", builders.evidence("node-c", "sha256:none"), harness.now)
    claim = recorded_claim(Pod.parse(old))
    assert claim is not None
    opened = dressed(old, Allocation(claim, ("node-c",), has_waited=True), harness.parts.rules.dress)
    response = await harness.validate(builders.review("UPDATE", new=annotated(opened, **planted), old=old, uid="open"))
    assert response["allowed"] is (reason is None)
    assert (response.get("status") or {}).get("reason") == reason


# Placement maps.


def mapped(ordinal: int, text: str, *containers: Raw, **members: Any) -> Raw:
    owners = [builders.stateful_set("web")]
    annotations = {"gpu-scheduling-map": text}
    return raw_pod(*containers, name=f"web-{ordinal}", annotations=annotations, owners=owners, **members)


@pytest.fixture
async def replica(tmp_path: Path) -> Harness:
    return await Harness(tmp_path, INVENTORY, None, sharing(Shared()), ledger="cluster").start()


@pytest.mark.defect("binder-3")
async def test_mapped_pod_is_queued_in_a_cluster_regardless_of_the_queue_setting(replica: Harness) -> None:
    await replica.create(mapped(0, "0=node-a:1"), "first", "uid-first")
    gated = await replica.mutate(mapped(1, "1=node-a:1"), "second")
    many = ",".join(f"GPU-{k}" for k in range(9))
    assert (await replica.mutate(mapped(2, f"2=node-a:{many}"), "many"))["auditAnnotations"]["reason"] == "Queued"
    assert gated["auditAnnotations"] == {"reason": "Queued", "waits-for": "NoFreeDevice"}
    assert not (await replica.mutate(raw_pod(raw_container(gpus=9)), "third"))["allowed"]


@pytest.mark.defect("binder-2")
async def test_pod_whose_ordinal_is_not_in_the_map_is_queued_in_a_cluster(replica: Harness) -> None:
    raw = mapped(7, "0=node-a:1")
    response = await replica.mutate(raw)
    assert "no line for ordinal 7" in response["warnings"][0]
    assert (await validated(replica, patched(raw, response)))["allowed"]


@pytest.mark.defect("binder-6")
@pytest.mark.parametrize(
    ("text", "members", "words"),
    [
        ("0=rack-9:1", {}, "none has the label gpu-node-name=rack-9 or that name"),
        ("0=node-a:1", {"nodeSelector": {"zone": "later"}}, "not selected by the pod"),
    ],
    ids=["no-such-node", "not-selected"],
)
async def test_mapped_pod_is_queued_until_its_node_is_labelled(
    replica: Harness, text: str, members: Raw, words: str
) -> None:
    raw = mapped(0, text, **members)
    response = await replica.mutate(raw)
    assert response["auditAnnotations"] == {"reason": "Queued", "waits-for": "NoSuitableNode"}
    assert words in response["warnings"][0]
    assert (await validated(replica, patched(raw, response)))["allowed"]


@pytest.mark.defect("binder-2")
async def test_pod_whose_ordinal_is_not_in_the_map_is_denied_without_a_cluster(build: Build) -> None:
    response = await (await build()).mutate(mapped(7, "0=node-a:1"))
    assert response["status"]["reason"] == "NotInMap"
    assert "no line for ordinal 7" in response["status"]["message"]


@pytest.mark.defect("binder-2")
async def test_denial_names_every_invalid_line_of_the_map(build: Build) -> None:
    lines = "\n".join(f"{n}=node-a:0" if n % 2 else f"{n}=node-a" for n in range(80))
    response = await (await build()).mutate(mapped(1, lines))
    assert response["status"]["reason"] == "InvalidPod"
    for number in range(1, 80, 2):
        assert f"line {number}: " in response["status"]["message"]


@pytest.mark.defect("binder-3")
async def test_gpu_of_two_ordinals_requires_shared_claims(build: Build) -> None:
    harness = await build()
    text = "3=node-a:0\n4=node-a:0"
    await harness.create(mapped(3, text), "first", "uid-first")
    assert (await harness.mutate(mapped(4, text), "second"))["status"]["reason"] == "NoFreeDevice"
    shared = {"gpuwarden.io/shared": "true"}
    for ordinal in (3, 4):
        raw = mapped(ordinal, "3=node-c:0\n4=node-c:0")
        raw["metadata"]["annotations"] |= shared
        await harness.create(raw, f"shared-{ordinal}", f"uid-shared-{ordinal}")
    assert harness.held == ["GPU-a0", "GPU-c0", "GPU-c0"]


@pytest.mark.defect("binder-4")
async def test_pod_name_that_ends_in_digits_is_not_an_ordinal(build: Build) -> None:
    replica_set = {**builders.stateful_set("app-7c9d"), "kind": "ReplicaSet"}
    raw = raw_pod(name="app-7c9d-12345", annotations={"gpu-scheduling-map": "12345=node-a:0"}, owners=[replica_set])
    response = await (await build()).mutate(raw)
    assert (response["allowed"], response["status"]["reason"]) == (False, "InvalidPod")


@pytest.mark.defect("binder-5")
async def test_mapped_pod_with_a_generated_name_is_denied(build: Build) -> None:
    raw = raw_pod(name=None, generate_name="train-", annotations={"gpu-scheduling-map": "0=node-a:0"})
    response = await (await build()).mutate(raw)
    assert "has no ordinal" in response["status"]["message"]


@pytest.mark.defect("binder-12")
async def test_map_refers_to_a_node_by_label_or_name_and_never_to_two(build: Build) -> None:
    nodes = [{**one, "labels": {"gpu-node-name": "rack-1"}} for one in INVENTORY["nodes"][1:]]
    harness = await build({"nodes": [INVENTORY["nodes"][0], *nodes]})
    assert (await harness.dress(mapped(0, "0=node-a:1")))["metadata"]["annotations"][GPU_UUID] == "GPU-a1"
    response = await harness.mutate(mapped(1, "1=rack-1:0"), "second")
    assert response["status"]["reason"] == "AmbiguousNode"
    assert "2 have the label gpu-node-name=rack-1" in response["status"]["message"]


@pytest.mark.defect("binder-13")
@pytest.mark.defect("binder-14")
async def test_variable_is_written_once_in_every_container(build: Build) -> None:
    old = {"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    raw = mapped(
        0,
        "0=node-a:1, 0",
        raw_container("a", env=[old, *raw_env(CUDA_VISIBLE_DEVICES="7")]),
        raw_container("b"),
        init=[raw_container("before")],
    )
    spec = (await (await build()).dress(raw))["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        found = [one for one in container["env"] if one["name"] == "CUDA_VISIBLE_DEVICES"]
        assert found == [{"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-a1,GPU-a0"}]


# CUDA numbers devices in the order in which they are listed.


ORDERED = {
    "nodes": [
        {
            "name": "node-a",
            "devices": [
                {"uuid": "GPU-zz", "index": 0},
                {"uuid": "GPU-aa", "index": 1},
                {"uuid": "GPU-mm", "index": 2, "serial": "1650321"},
            ],
        }
    ]
}


def shown_in(raw: Raw) -> set[str]:
    """The GPUs in the annotation and in every variable."""
    env = [one for container in raw["spec"]["containers"] for one in container["env"]]
    return {raw["metadata"]["annotations"][GPU_UUID], *(one["value"] for one in env if "value" in one)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("0=node-a:0,1", "GPU-zz,GPU-aa", id="indices"),
        pytest.param("0=node-a:GPU-zz,GPU-aa", "GPU-zz,GPU-aa", id="uuids"),
        pytest.param("0=node-a:1,1650321,GPU-zz", "GPU-aa,GPU-mm,GPU-zz", id="index-serial-uuid"),
        pytest.param("0=node-a:1650321,0,GPU-aa", "GPU-mm,GPU-zz,GPU-aa", id="serial-index-uuid"),
    ],
)
async def test_gpus_are_listed_in_the_order_of_the_map(build: Build, text: str, shown: str) -> None:
    harness = await build(ORDERED)
    assert shown_in(patched(mapped(0, text), await harness.mutate(mapped(0, text), dry_run=True))) == {shown}
    first = await harness.dress(mapped(0, text))
    assert shown_in(first) == {shown}
    assert shown_in(await harness.dress(first, "reinvoked")) == {shown}
    assert shown_in(await harness.create(mapped(0, text))) == {shown}


async def test_gpu_order_is_kept_when_indices_change(build: Build) -> None:
    harness = await build(ORDERED)
    made = await harness.dress(mapped(0, "0=node-a:0,1"))
    harness.parts.fleet.put(
        builders.node("node-a", *(builders.device(f"GPU-{x}", index=k) for k, x in enumerate(("aa", "zz", "mm")))),
        harness.now,
    )
    assert shown_in(await harness.dress(made, "reinvoked")) == {"GPU-zz,GPU-aa"}
    assert (await validated(harness, made))["allowed"]


@pytest.mark.parametrize(("said", "is_allowed"), [("GPU-zz,GPU-aa", True), ("GPU-zz", False), ("GPU-zz,GPU-zz", False)])
async def test_pod_may_name_each_of_its_gpus_once(build: Build, said: str, is_allowed: bool) -> None:
    harness = await build(ORDERED)
    made = await harness.dress(mapped(0, "0=node-a:0,1"))
    forged = json.loads(json.dumps(made).replace("GPU-zz,GPU-aa", said))
    response = await validated(harness, forged)
    assert response["allowed"] is is_allowed
    assert is_allowed or response["status"]["reason"] == "Forged"


@pytest.mark.parametrize(("value", "is_allowed"), [("GPU-zz,GPU-aa", True), ("GPU-zz,GPU-mm", False)])
async def test_a_debug_container_sees_gpus_in_the_pods_order(build: Build, value: str, is_allowed: bool) -> None:
    harness = await build(ORDERED)
    final = await harness.create(mapped(0, "0=node-a:0,1"))
    debug = raw_container("debugger", env=raw_env(CUDA_VISIBLE_DEVICES=value))
    new = {**final, "spec": {**final["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, final, subresource="ephemeralcontainers"))
    assert response["allowed"] is is_allowed


@pytest.mark.parametrize(("said", "is_allowed"), [("GPU-zz,GPU-aa", True), ("GPU-zz,GPU-mm", False)])
async def test_a_binding_may_repeat_what_the_pod_says(build: Build, said: str, is_allowed: bool) -> None:
    harness = await build(ORDERED)
    await harness.create(mapped(0, "0=node-a:0,1"))
    response = await harness.validate(binding("node-a", annotations={GPU_UUID: said}))
    assert response["allowed"] is is_allowed


@pytest.mark.parametrize(("text", "shown"), [("0=node-a: 1 , 0", "1,0"), ("0=node-a:GPU-a1", "GPU-a1")])
async def test_setting_shows_containers_the_names_of_the_map(build: Build, text: str, shown: str) -> None:
    harness = await build(injection="cuda", map_visible="index")
    made = await harness.create(mapped(0, text))
    assert made["spec"]["containers"][0]["env"] == raw_env(CUDA_VISIBLE_DEVICES=shown)


async def test_serial_number_cannot_be_used_as_an_index(build: Build) -> None:
    harness = await build(injection="cuda", map_visible="index")
    response = await harness.mutate(mapped(0, "0=node-a:1650321"))
    assert "not a list of indices" in response["status"]["message"]
