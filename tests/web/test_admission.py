"""Pods through the webhooks: whole replies, as the API server sees them."""

import asyncio
from typing import Any

import pytest

from tests import builders
from tests.builders import HASH, OTHER_HASH, POD_UID, REVIEW_UID, Raw, raw_container, raw_env, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness, patched
from tests.web.replica import binding
from webhook.core.errors import DeadlinePassedError, LedgerError, LedgerUnavailableError, SlotsTakenError
from webhook.core.reservation import Phase

CLAIM = "gpuwarden.io/claim"
GPU_UUID = "gpuwarden.io/gpu-uuid"
RESERVATION_ID = "gpuwarden.io/reservation-id"
NODE = "gpuwarden.io/node"
VOID, ALL = ({"name": "NVIDIA_VISIBLE_DEVICES", "value": value} for value in ("void", "all"))


def gpu_pod(gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container(gpus=gpus), **members)


def hashed(*hashes: str) -> dict[str, str]:
    return {"gpuwarden.io/required-hash": ",".join(hashes)}


def env_of(container: Raw) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in container.get("env", [])}


def pinned_nodes(raw: Raw) -> list[str]:
    required = raw["spec"]["affinity"]["nodeAffinity"][builders.REQUIRED]
    return [field["values"][0] for one in required["nodeSelectorTerms"] for field in one["matchFields"]]


def refusal(response: Raw) -> tuple[int, str]:
    assert not response["allowed"]
    assert response["status"]["message"]
    return response["status"]["code"], response["status"]["reason"]


# The mutating webhook.


async def test_a_pod_with_a_claim_is_reserved_and_dressed(harness: Harness) -> None:
    raw = gpu_pod(annotations={"team": "vision", **hashed(HASH)}, labels={"gpuwarden.io/gpu.model": "h100"})
    response = await harness.mutate(raw)
    assert response["auditAnnotations"] == {
        "reason": "Admitted",
        "node": "node-a",
        "reservation": REVIEW_UID,
        "gpus": "GPU-a0",
    }
    assert patched(raw, response) == {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": "train-0",
            "namespace": "ml",
            "labels": {"gpuwarden.io/gpu.model": "h100"},
            "annotations": {
                "team": "vision",
                "gpuwarden.io/required-hash": HASH,
                CLAIM: '{"asked":{"main":1},"gpus":1,"hashes":["sha256:aa11"],"requirements":["model=h100"]}',
                RESERVATION_ID: REVIEW_UID,
                GPU_UUID: "GPU-a0",
                NODE: "node-a",
                "fudo.org/gpu.reservation-id": REVIEW_UID,
                "fudo.org/gpu.uuid": "GPU-a0",
                "fudo.org/gpu.node": "node-a",
            },
        },
        "spec": {
            "schedulerName": "default-scheduler",
            "affinity": builders.required_affinity(builders.on_node("node-a")),
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example/train:1",
                    "resources": {"limits": {}, "requests": {}},
                    "env": raw_env(NVIDIA_VISIBLE_DEVICES="GPU-a0", CUDA_VISIBLE_DEVICES="GPU-a0"),
                }
            ],
        },
        "status": {},
    }
    assert await harness.states() == {
        "GPU-a0": "pending",
        "GPU-a1": "available",
        "GPU-b0": "available",
        "GPU-c0": "available",
    }


@pytest.mark.defect("assigner-11")
async def test_pod_without_a_claim_is_only_blinded(harness: Harness) -> None:
    raw = raw_pod()
    made = patched(raw, await harness.mutate(raw))
    assert made["spec"]["containers"] == [{**raw["spec"]["containers"][0], "env": [VOID]}]
    assert {**made, "spec": {**made["spec"], "containers": raw["spec"]["containers"]}} == raw
    assert await harness.mutate(made) == {"uid": REVIEW_UID, "allowed": True}
    assert harness.held == []


CUDA = {"name": "CUDA_VERSION", "value": "12.4"}
ALL_FROM_ELSEWHERE = {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}


@pytest.mark.parametrize(
    "container",
    [
        raw_container("a", env=[CUDA]),
        raw_container("a", envFrom=[{"configMapRef": {"name": "all"}}]),
        raw_container("a", env=[ALL_FROM_ELSEWHERE, VOID]),
        raw_container("a", resources={"limits": {"nvidia.com/gpu": "0"}}),
    ],
    ids=["CUDA_VERSION", "envFrom", "twice", "no GPU"],
)
@pytest.mark.parametrize("place", ["containers", "initContainers"])
async def test_container_without_a_claim_sees_no_gpu(harness: Harness, container: Raw, place: str) -> None:
    raw = raw_pod(raw_container("main"))
    raw["spec"][place] = [*raw["spec"].get(place, ()), container]
    made = patched(raw, await harness.mutate(raw))
    assert shown(made["spec"][place][-1]) == [VOID]
    assert (await harness.validate(builders.validating_create(made)))["allowed"]


def shown(container: Raw) -> list[Raw]:
    return [one for one in container["env"] if one["name"] == "NVIDIA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("hash_", [None, HASH], ids=["no claim", "a hash"])
@pytest.mark.parametrize("env", [[VOID, ALL], [ALL_FROM_ELSEWHERE]], ids=["the last one", "from elsewhere"])
async def test_variable_that_exposes_gpus_is_denied_without_a_claim(
    harness: Harness, env: list[Raw], hash_: str | None
) -> None:
    raw = raw_pod(raw_container("main", env=env), annotations=hashed(hash_) if hash_ else None)
    response = await harness.mutate(raw)
    if response["allowed"]:
        response = await harness.validate(builders.validating_create(patched(raw, response)))
    assert refusal(response) == (403, "GpuWithoutClaim")


async def test_pod_that_was_not_blinded_is_denied(harness: Harness) -> None:
    """Another webhook or an older replica can leave a pod like this."""
    refused = await harness.validate(builders.validating_create(raw_pod(raw_container("main", env=[CUDA]))))
    assert refusal(refused) == (403, "GpuWithoutClaim")
    assert "spec.containers[0].env[CUDA_VERSION]" in refused["status"]["message"]


async def test_cuda_mode_leaves_cuda_version_alone(build: Build) -> None:
    harness = await build(injection="cuda")
    raw = raw_pod(raw_container("main", env=[CUDA]))
    assert await harness.mutate(raw) == {"uid": REVIEW_UID, "allowed": True}
    assert (await harness.validate(builders.validating_create(raw)))["allowed"]


async def test_other_containers_of_a_gpu_pod_see_no_gpu(harness: Harness) -> None:
    raw = raw_pod(
        raw_container("main", gpus=1), raw_container("side", env=[CUDA]), init=[raw_container("init", env=[CUDA])]
    )
    dressed = await harness.dress(raw)
    assert [shown(one) for one in (dressed["spec"]["containers"][1], *dressed["spec"]["initContainers"])] == [
        [VOID]
    ] * 2
    assert (await harness.validate(builders.validating_create(dressed)))["allowed"]


async def test_pod_dressed_by_an_older_replica_is_admitted(harness: Harness) -> None:
    """Older versions did not blind containers without `envFrom`; their answers may be under way during an upgrade."""
    raw = raw_pod(raw_container("main", gpus=1), raw_container("side"), init=[raw_container("init")])
    dressed = await harness.dress(raw)
    for one in (dressed["spec"]["containers"][1], dressed["spec"]["initContainers"][0]):
        one.pop("env")
    assert (await harness.validate(builders.validating_create(dressed)))["allowed"]


async def test_pod_dressed_by_an_older_replica_is_denied_if_it_sees_all_gpus(harness: Harness) -> None:
    for more in ({"env": [CUDA]}, {"envFrom": [{"configMapRef": {"name": "all"}}]}):
        dressed = await harness.dress(raw_pod(raw_container("main", gpus=1), raw_container("side")), str(more))
        dressed["spec"]["containers"][1] = raw_container("side", **more)
        assert refusal(await harness.validate(builders.validating_create(dressed)))[0] == 403


async def test_debug_container_is_blinded_by_the_webhook(harness: Harness) -> None:
    old = builders.created(raw_pod(raw_container("main")))
    old["spec"]["ephemeralContainers"] = [raw_container("first", env=[CUDA])]
    new = {
        **old,
        "spec": {**old["spec"], "ephemeralContainers": [*old["spec"]["ephemeralContainers"], raw_container("d")]},
    }
    response = await harness.ask("/mutate", builders.update(new, old, subresource="ephemeralcontainers"))
    made = patched(new, response)["spec"]["ephemeralContainers"]
    assert made == [raw_container("first", env=[CUDA]), raw_container("d", env=[VOID])]


@pytest.mark.parametrize(
    ("debug", "is_let_in"),
    [
        (raw_container("d", env=[CUDA]), False),
        (raw_container("d", env=[CUDA, VOID]), True),
        (raw_container("d", env=[ALL, VOID]), True),
        (raw_container("d", env=[VOID, ALL]), False),
    ],
    ids=["CUDA_VERSION", "beside void", "void is last", "all is last"],
)
async def test_debug_container_may_see_only_its_pods_gpus(harness: Harness, debug: Raw, is_let_in: bool) -> None:
    old = builders.created(raw_pod(raw_container("main")))
    new = {**old, "spec": {**old["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, old, subresource="ephemeralcontainers"))
    assert response["allowed"] is is_let_in


async def test_debug_container_with_env_from_is_denied_in_a_pod_with_a_claim(harness: Harness) -> None:
    old = await harness.dress(raw_pod(annotations=hashed(HASH)))
    debug = raw_container("d", envFrom=[{"configMapRef": {"name": "all"}}])
    new = {**old, "spec": {**old["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, old, subresource="ephemeralcontainers"))
    assert "spec.ephemeralContainers[0].envFrom" in response["status"]["message"]


@pytest.mark.defect("X-3")
async def test_a_pod_without_a_name_or_uid_is_served(harness: Harness) -> None:
    dressed = await harness.dress(raw_pod(raw_container(gpus=1), name=None, generate_name="train-"))
    assert dressed["metadata"]["annotations"][RESERVATION_ID] == REVIEW_UID


@pytest.mark.defect("X-4")
@pytest.mark.defect("assigner-20")
async def test_repeated_review_gets_the_same_answer(harness: Harness) -> None:
    first = await harness.mutate(gpu_pod())
    assert await harness.mutate(gpu_pod()) == first
    assert len(harness.held) == 1


async def test_reinvocation_keeps_the_reservation(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    changed = {**dressed, "metadata": {**dressed["metadata"], "labels": {"added-by": "another-webhook"}}}
    assert patched(changed, await harness.mutate(changed, "another-review")) == changed
    assert len(harness.held) == 1


async def test_reinvocation_restores_what_another_webhook_overwrote(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    container = {**dressed["spec"]["containers"][0], "env": raw_env(NVIDIA_VISIBLE_DEVICES="all")}
    mangled = {**dressed, "spec": {**dressed["spec"], "containers": [container]}}
    restored = patched(mangled, await harness.mutate(mangled, "another-review"))
    assert env_of(restored["spec"]["containers"][0]) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-b0",
        "CUDA_VISIBLE_DEVICES": "GPU-b0",
    }
    assert len(harness.held) == 1


def with_spec(raw: Raw, **members: Any) -> Raw:
    return {**raw, "spec": {**raw["spec"], **members}}


@pytest.mark.parametrize(
    ("selector", "node"), [({"zone": "a"}, "node-a"), ({"zone": "nowhere"}, None)], ids=["moves", "is refused"]
)
async def test_reinvocation_with_a_new_node_selector_moves_the_pod_or_denies_it(
    harness: Harness, selector: dict[str, str], node: str | None
) -> None:
    """Another webhook ran after ours: the pod cannot use the reservation on node-b."""
    changed = with_spec(await harness.dress(gpu_pod()), nodeSelector=selector)
    response = await harness.mutate(changed, "another-review")
    if node is None:
        assert refusal(response) == (403, "NoSuitableNode")
        return
    moved = patched(changed, response)
    assert response["warnings"] == ["the pod can no longer run on node-b: it gets its GPUs on another node"]
    assert (moved["metadata"]["annotations"][NODE], pinned_nodes(moved)) == (node, [node])
    assert env_of(moved["spec"]["containers"][0])["NVIDIA_VISIBLE_DEVICES"] == "GPU-a0"
    assert await harness.mutate(changed, "another-review") == response
    assert patched(moved, await harness.mutate(moved, "a-third-review")) == moved
    assert (await harness.validate(builders.validating_create(moved)))["allowed"]
    harness.wait(96)
    await harness.parts.ledger.collect(harness.now)
    assert harness.held == ["GPU-a0"]


async def test_moved_pod_keeps_its_own_node_affinity(harness: Harness) -> None:
    in_zone_b = builders.term(builders.expression("zone", "In", "b"))
    dressed = await harness.dress(gpu_pod(affinity=builders.required_affinity(in_zone_b)))
    assert pinned_nodes(dressed) == ["node-b"]
    response = await harness.mutate(with_spec(dressed, nodeSelector={"zone": "a"}), "another-review")
    assert refusal(response) == (403, "NoSuitableNode")


async def test_pod_that_names_its_node_is_not_moved(harness: Harness) -> None:
    own = builders.required_affinity(builders.on_node("node-b"))
    changed = with_spec(await harness.dress(gpu_pod(affinity=own)), nodeSelector={"zone": "a"})
    assert refusal(await harness.mutate(changed, "another-review")) == (403, "NoSuitableNode")


async def test_node_preset_by_another_webhook_does_not_move_the_pod(harness: Harness) -> None:
    """Such a pod bypasses the scheduler: the validating webhook denies it by its field."""
    changed = with_spec(await harness.dress(gpu_pod()), nodeName="node-a")
    assert patched(changed, await harness.mutate(changed, "another-review")) == changed
    response = await harness.validate(builders.validating_create(changed))
    assert refusal(response) == (403, "Forged")
    assert response["status"]["message"].startswith("spec.nodeName: ")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nodeSelector": {"zone": "b", "disk": "ssd"}}, "spec.nodeSelector[disk]"),
        (
            {
                "affinity": builders.required_affinity(
                    builders.term(
                        builders.expression("zone", "In", "nowhere"),
                        fields=[builders.expression("metadata.name", "In", "node-b")],
                    )
                )
            },
            "spec.affinity.nodeAffinity",
        ),
    ],
    ids=["a selector", "an affinity"],
)
async def test_pod_that_another_webhook_keeps_from_its_node_is_denied(
    harness: Harness, change: Raw, field: str
) -> None:
    final = with_spec(await harness.dress(gpu_pod()), **change)
    response = await harness.validate(builders.validating_create(final))
    assert refusal(response) == (403, "NoSuitableNode")
    said = f"{field}: excludes node-b, where the pod's GPUs are reserved"
    assert response["status"]["message"].startswith(said)


@pytest.mark.parametrize("gpus", [1, 2])
async def test_request_added_by_another_webhook_is_denied_not_dropped(harness: Harness, gpus: int) -> None:
    dressed = await harness.dress(gpu_pod())
    injected = raw_container("helper", gpus=gpus)
    changed = with_spec(dressed, containers=[*dressed["spec"]["containers"], injected])
    response = await harness.mutate(changed, "another-review")
    assert refusal(response) == (403, "InvalidPod")
    assert response["status"]["message"].startswith(
        "spec.containers[1].resources[nvidia.com/gpu]: "
        "the GPU request of container helper was added after gpuwarden chose the pod's GPUs"
    )


async def test_request_restored_by_another_webhook_is_removed_again(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    restored = {**dressed["spec"]["containers"][0], "resources": raw_container(gpus=1)["resources"]}
    changed = with_spec(dressed, containers=[restored])
    assert patched(changed, await harness.mutate(changed, "another-review")) == dressed


async def test_request_changed_between_reinvocations_has_no_effect(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod(annotations=hashed(HASH)))
    annotations = {**dressed["metadata"]["annotations"], **hashed(OTHER_HASH)}
    edited = {**dressed, "metadata": {**dressed["metadata"], "annotations": annotations}}
    again = patched(edited, await harness.mutate(edited, "another-review"))
    assert again["metadata"]["annotations"][NODE] == "node-a"
    assert len(harness.held) == 1


async def test_a_copied_manifest_gets_a_reservation_of_its_own(harness: Harness) -> None:
    original = await harness.create(gpu_pod(2, annotations=hashed(HASH)))
    await harness.validate(builders.delete(original))
    copy = {**original, "metadata": {**original["metadata"], "name": "copy"}}
    del copy["metadata"]["uid"]
    response = await harness.mutate(copy, "review-of-the-copy")
    assert patched(copy, response)["metadata"]["annotations"][RESERVATION_ID] == "review-of-the-copy"
    assert "annotations of another pod's reservation were removed: only gpuwarden writes them" in response["warnings"]
    assert harness.held == ["GPU-a0", "GPU-a1"]


async def test_pending_reservation_is_not_given_to_a_copy_in_another_namespace(harness: Harness) -> None:
    """Both have no name yet and the same claim."""
    first = await harness.dress(gpu_pod(name=None, generate_name="train-"))
    copied = gpu_pod(name=None, generate_name="train-", namespace="other", annotations=first["metadata"]["annotations"])
    second = await harness.dress(copied, uid="other")
    ids = [raw["metadata"]["annotations"][RESERVATION_ID] for raw in (first, second)]
    assert ids == [REVIEW_UID, "other"]
    assert len(harness.held) == 2


async def test_copy_of_a_running_pod_does_not_share_its_gpu(harness: Harness) -> None:
    original = await harness.create(gpu_pod(annotations=hashed(HASH)))
    copy = {**original, "metadata": {**original["metadata"], "name": "copy"}}
    other = await harness.dress(copy, "review-of-the-copy")
    assert other["metadata"]["annotations"][GPU_UUID] != original["metadata"]["annotations"][GPU_UUID]


async def test_forged_annotations_without_a_claim_are_removed(harness: Harness) -> None:
    forged = raw_pod(annotations={RESERVATION_ID: "r1", GPU_UUID: "GPU-a0", "fudo.org/gpu.node": "node-a", "team": "x"})
    assert (await harness.dress(forged))["metadata"]["annotations"] == {"team": "x"}
    assert harness.held == []


@pytest.mark.defect("X-4")
async def test_dry_run_answers_fully_and_reserves_nothing(harness: Harness) -> None:
    raw = gpu_pod()
    response = await harness.mutate(raw, dry_run=True)
    assert patched(raw, response)["metadata"]["annotations"][GPU_UUID] == "GPU-b0"
    assert harness.held == []
    final = builders.created(patched(raw, response))
    assert (await harness.validate(builders.review("CREATE", new=final, dry_run=True)))["allowed"]
    assert harness.held == []


async def test_repeated_dry_run_is_not_treated_as_a_copy(harness: Harness) -> None:
    dressed = patched(gpu_pod(), await harness.mutate(gpu_pod(), dry_run=True))
    again = await harness.mutate(dressed, "another-review", dry_run=True)
    assert again["allowed"]
    assert "warnings" not in again


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(gpu_pod(annotations=hashed("sha256:0000")), (403, "NoProvenNode"), id="no node has the hash"),
        pytest.param(gpu_pod(annotations=hashed(HASH.upper())), (403, "NoProvenNode"), id="the hash in other case"),
        pytest.param(gpu_pod(3), (429, "NoMatchingDevice"), id="more than any node has"),
        pytest.param(
            gpu_pod(nodeSelector={"zone": "nowhere"}), (403, "NoSuitableNode"), id="a selector that nothing matches"
        ),
        pytest.param(gpu_pod(nodeName="not-a-node"), (403, "NoSuitableNode"), id="a node that is not there"),
        pytest.param(gpu_pod(annotations=hashed("")), (403, "InvalidPod"), id="an empty hash"),
        pytest.param(gpu_pod(annotations=hashed(f" {HASH}")), (403, "InvalidPod"), id="a hash with white space"),
        pytest.param(raw_pod(raw_container(gpus="half")), (403, "InvalidPod"), id="half a GPU"),
        pytest.param(
            gpu_pod(resourceClaims=[{"name": "gpu"}]), (403, "GpuWithoutClaim"), id="a resource claim beside the claim"
        ),
        pytest.param(
            gpu_pod(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=all"}),
            (403, "GpuWithoutClaim"),
            id="a CDI device beside the claim",
        ),
    ],
)
async def test_denial_has_code_and_reason_and_reserves_nothing(
    harness: Harness, raw: Raw, expected: tuple[int, str]
) -> None:
    assert refusal(await harness.mutate(raw)) == expected
    assert harness.held == []


async def test_denial_contains_numbers_and_a_hint(harness: Harness) -> None:
    response = await harness.mutate(gpu_pod(annotations=hashed("sha256:0000")))
    assert response["status"]["message"] == (
        "1 GPU on a node attested as sha256:0000: 0 of 3 nodes fit: 1 has no evidence, 2 have a different hash; "
        "ask for a hash that a node has proven, or have the node attested"
    )


async def test_denial_names_all_mistakes_at_once(harness: Harness) -> None:
    response = await harness.mutate(
        raw_pod(annotations={"gpuwarden.io/gpu-count": "many", "gpuwarden.io/shared": "perhaps", **hashed("")})
    )
    assert response["status"]["message"] == (
        "annotation gpuwarden.io/required-hash has an empty hash: add a value or remove it; "
        "gpuwarden.io/gpu-count: 'many' is not a whole number of GPUs; "
        "gpuwarden.io/shared is 'perhaps'; allowed are true and false"
    )


@pytest.mark.parametrize("name", ["a%b", "..", "A", "a/b"])
@pytest.mark.parametrize("field", ["request.name", "request.namespace", "metadata.name"])
async def test_invalid_pod_name_is_denied_by_both_webhooks(harness: Harness, name: str, field: str) -> None:
    """The end of such a pod could never be confirmed."""
    final = builders.created(await harness.dress(gpu_pod()))
    for path, raw in (("/mutate", gpu_pod()), ("/validate", final)):
        review = builders.review("CREATE", new=raw, uid=f"other-{path}")
        part, _, member = field.partition(".")
        where = review["request"] if part == "request" else review["request"]["object"]["metadata"]
        where[member] = name
        response = await harness.ask(path, review)
        assert refusal(response) == (403, "InvalidPod")
        assert field in response["status"]["message"]
    assert [one.uid for one in harness.parts.ledger.reservations()] == [None]


async def test_proven_node_without_free_gpus_is_denied_with_429(harness: Harness) -> None:
    await harness.create(gpu_pod(2, annotations=hashed(HASH)))
    assert refusal(await harness.mutate(gpu_pod(annotations=hashed(HASH)), "another")) == (429, "NoFreeDevice")


@pytest.mark.defect("assigner-10")
@pytest.mark.parametrize(
    "condition",
    [{"ready": False}, {"unschedulable": True}, {"taints": [{"key": "dead", "effect": "NoExecute"}]}],
    ids=["not ready", "cordoned", "tainted"],
)
async def test_unusable_node_is_never_chosen(build: Build, condition: Raw) -> None:
    node = {**INVENTORY["nodes"][0], **condition}
    harness = await build({"nodes": [node]})
    assert refusal(await harness.mutate(gpu_pod())) == (429, "NodeNotReady")


async def test_a_named_node_and_a_selector_narrow_the_candidates(harness: Harness) -> None:
    assert pinned_nodes(await harness.dress(gpu_pod(nodeName="node-b"), "r1")) == ["node-b"]
    assert pinned_nodes(await harness.dress(gpu_pod(nodeSelector={"zone": "a"}), "r2")) == ["node-a"]


async def test_node_is_added_to_every_affinity_term(harness: Harness) -> None:
    terms = [builders.term(builders.expression("zone", "In", one)) for one in ("a", "z")]
    dressed = await harness.dress(gpu_pod(affinity=builders.required_affinity(*terms)))
    assert pinned_nodes(dressed) == ["node-a", "node-a"]


@pytest.mark.parametrize(("terms", "expressions"), [(33, 1), (1, 129)], ids=["terms", "expressions"])
async def test_oversized_affinity_is_denied_before_the_search(harness: Harness, terms: int, expressions: int) -> None:
    one = builders.term(*(builders.expression("zone", "NotIn", str(n)) for n in range(expressions)))
    raw = gpu_pod(affinity=builders.required_affinity(*[one] * terms))
    assert refusal(await harness.mutate(raw)) == (403, "InvalidPod")


async def test_vendor_cdi_annotation_counts_as_access_to_a_gpu(harness: Harness) -> None:
    raw = raw_pod(annotations={"nvidia.cdi.k8s.io/x": "nvidia.com/gpu=all"})
    assert refusal(await harness.validate(builders.validating_create(raw))) == (403, "GpuWithoutClaim")


async def test_default_alias_still_works_if_another_is_configured(build: Build) -> None:
    harness = await build(required_hash_alias="acme.io/hash")
    for key in ("acme.io/hash", "attestation-hash.my-company.com/required-hash", "gpuwarden.io/required-hash"):
        assert pinned_nodes(await harness.dress(raw_pod(annotations={key: HASH}), key)) == ["node-a"]


async def test_hash_alone_pins_the_pod_to_proven_nodes_and_reserves_nothing(harness: Harness) -> None:
    raw = raw_pod(annotations=hashed(HASH, OTHER_HASH))
    dressed = await harness.dress(raw)
    assert pinned_nodes(dressed) == ["node-a", "node-b"]
    assert dressed["spec"]["containers"] == [{**raw["spec"]["containers"][0], "env": [VOID]}]
    assert harness.held == []
    assert (await harness.validate(builders.validating_create(dressed)))["allowed"]
    # An older version left these containers as they were.
    older = {**dressed, "spec": {**dressed["spec"], "containers": raw["spec"]["containers"]}}
    assert (await harness.validate(builders.validating_create(older)))["allowed"]


async def test_reinvocation_of_a_pod_pinned_to_proven_nodes_changes_nothing(harness: Harness) -> None:
    dressed = await harness.dress(raw_pod(annotations=hashed(HASH)))
    again = await harness.mutate(dressed, "another-review")
    assert patched(dressed, again) == dressed
    assert "warnings" not in again


async def test_unproven_gpu_is_not_given_if_evidence_is_always_required(build: Build) -> None:
    harness = await build(require_evidence="all")
    sharing = {"gpuwarden.io/gpu-count": "1", "gpuwarden.io/shared": "true"}
    assert refusal(await harness.mutate(raw_pod(annotations=sharing, nodeName="node-c"))) == (403, "NoProvenNode")


async def test_shared_gpus_are_given_only_to_claims_that_share(harness: Harness) -> None:
    sharing = raw_pod(annotations={"gpuwarden.io/gpu-count": "1", "gpuwarden.io/shared": "true"})
    pods = [await harness.dress(sharing, f"r{number}") for number in range(2)]
    assert [pod["metadata"]["annotations"][GPU_UUID] for pod in pods] == ["GPU-c0", "GPU-c0"]
    assert refusal(await harness.mutate(sharing, "r2")) == (429, "NoFreeDevice")
    alone = gpu_pod(nodeName="node-c")
    assert refusal(await harness.mutate(alone, "r3")) == (429, "NoMatchingDevice")


async def test_users_gpu_variable_is_replaced_with_a_warning(harness: Harness) -> None:
    raw = raw_pod(raw_container(gpus=1, env=[*raw_env(A="1"), *raw_env(NVIDIA_VISIBLE_DEVICES="all"), *raw_env(B="2")]))
    response = await harness.mutate(raw)
    assert patched(raw, response)["spec"]["containers"][0]["env"] == raw_env(
        A="1", NVIDIA_VISIBLE_DEVICES="GPU-b0", B="2", CUDA_VISIBLE_DEVICES="GPU-b0"
    )
    assert response["warnings"] == [
        "spec.containers[0]: gpuwarden replaces the value of NVIDIA_VISIBLE_DEVICES in container main"
    ]


async def test_misspelt_request_causes_a_warning(harness: Harness) -> None:
    response = await harness.mutate(gpu_pod(annotations={"gpuwarden.io/requird-hash": HASH}))
    assert response["warnings"] == ["gpuwarden does not know the key gpuwarden.io/requird-hash: is it misspelt?"]


async def test_cuda_mode_sets_one_variable_and_removes_nothing(build: Build) -> None:
    harness = await build(injection="cuda")
    container = (await harness.dress(raw_pod(annotations={"gpuwarden.io/gpu-count": "1"})))["spec"]["containers"][0]
    assert env_of(container) == {"CUDA_VISIBLE_DEVICES": "GPU-b0"}
    assert refusal(await harness.mutate(gpu_pod(), "another")) == (403, "InjectionConflict")


async def test_gpu_pod_without_a_runtime_class_gets_the_configured_one(build: Build) -> None:
    harness = await build(runtime_class="nvidia")
    assert (await harness.create(gpu_pod()))["spec"]["runtimeClassName"] == "nvidia"
    response = await harness.mutate(gpu_pod(name="other", runtimeClassName="kata"), "another")
    assert patched(gpu_pod(runtimeClassName="kata"), response)["spec"]["runtimeClassName"] == "kata"
    assert response["warnings"] == ["spec.runtimeClassName: kata is kept, but nvidia is the runtime class for GPUs"]


async def test_only_pods_that_are_given_gpus_get_a_runtime_class(build: Build) -> None:
    harness = await build(runtime_class="nvidia")
    matches_claim_without_gpus = await harness.create(
        raw_pod(raw_container(), annotations={"gpuwarden.io/required-hash": HASH})
    )
    assert "affinity" in matches_claim_without_gpus["spec"]
    assert "runtimeClassName" not in matches_claim_without_gpus["spec"]
    assert "runtimeClassName" not in (await (await build()).create(gpu_pod()))["spec"]


async def test_pod_dressed_before_the_runtime_class_was_configured_is_admitted(build: Build) -> None:
    """During a rolling update one replica mutates and another validates."""
    before, after = await build(), await build(runtime_class="nvidia")
    outfit = await after.dress(gpu_pod())
    outfit["spec"].pop("runtimeClassName")
    review = builders.review("CREATE", new=builders.created(outfit, uid=builders.POD_UID), uid="validate")
    assert (await after.validate(review))["allowed"]
    outfit = await before.dress(gpu_pod())
    outfit["spec"]["runtimeClassName"] = "nvidia"
    review = builders.review("CREATE", new=builders.created(outfit, uid=builders.POD_UID), uid="validate")
    assert (await before.validate(review))["allowed"]


async def test_without_aliases_only_our_own_keys_are_written(build: Build) -> None:
    harness = await build(write_aliases=False)
    dressed = await harness.dress(gpu_pod())
    assert set(dressed["metadata"]["annotations"]) == {CLAIM, RESERVATION_ID, GPU_UUID, NODE}


@pytest.mark.parametrize("timeout", ["0s", "1ms", "300ms"])
async def test_nothing_is_reserved_after_the_reviews_deadline(harness: Harness, timeout: str) -> None:
    response = await harness.ask("/mutate", builders.mutating_create(gpu_pod()), timeout)
    assert refusal(response) == (503, "DeadlinePassed")
    assert harness.held == []


@pytest.mark.parametrize("timeout", ["1s", "30s", "1m0s", "nonsense", ""])
async def test_review_within_its_deadline_is_served(harness: Harness, timeout: str) -> None:
    assert (await harness.ask("/mutate", builders.mutating_create(gpu_pod()), timeout))["allowed"]


async def test_an_update_is_never_patched(harness: Harness) -> None:
    raw = gpu_pod()
    assert await harness.ask("/mutate", builders.update(raw, raw)) == {"uid": REVIEW_UID, "allowed": True}
    assert harness.held == []


@pytest.mark.defect("assigner-17")
async def test_several_gpus_are_found_beside_held_ones(build: Build) -> None:
    devices = [{"uuid": f"GPU-{number}"} for number in range(8)]
    harness = await build({"nodes": [{"name": "node-a", "devices": devices}]})
    await harness.dress(gpu_pod(1), "r1")
    dressed = await harness.dress(gpu_pod(4), "r2")
    assert dressed["metadata"]["annotations"][GPU_UUID] == "GPU-1,GPU-2,GPU-3,GPU-4"


@pytest.mark.defect("assigner-4")
async def test_concurrent_pods_never_share_a_gpu(build: Build) -> None:
    devices = [{"uuid": f"GPU-{number}"} for number in range(8)]
    harness = await build({"nodes": [{"name": "node-a", "devices": devices}]})
    responses = await asyncio.gather(
        *(harness.mutate(gpu_pod(name=f"p{number}"), f"r{number}") for number in range(200))
    )
    admitted = [one for one in responses if one["allowed"]]
    assert sorted(one["auditAnnotations"]["gpus"] for one in admitted) == [f"GPU-{number}" for number in range(8)]
    assert {refusal(one) for one in responses if not one["allowed"]} == {(429, "NoFreeDevice")}


# The validating webhook: CREATE.


async def test_validation_binds_the_reservation_to_the_pods_uid(harness: Harness) -> None:
    await harness.create(gpu_pod())
    held = harness.parts.ledger.of_pod(POD_UID)
    assert held is not None
    assert (held.phase, held.uid, held.pod_name, held.deadline) == (Phase.FINALIZED, POD_UID, "train-0", None)


async def test_repeated_validation_gives_the_same_answer(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    assert (await harness.validate(builders.review("CREATE", new=final)))["allowed"]


async def test_second_pod_with_the_same_reservation_is_denied(harness: Harness) -> None:
    final = await harness.create(raw_pod(raw_container(gpus=1), name=None, generate_name="train-"))
    twin = builders.created(final, uid="uid-of-a-twin", name="train-twin")
    assert refusal(await harness.validate(builders.review("CREATE", new=twin))) == (409, "ReservationConflict")


async def test_pod_that_the_mutating_webhook_did_not_see_is_denied(harness: Harness) -> None:
    assert refusal(await harness.validate(builders.validating_create(gpu_pod()))) == (403, "NotReserved")


async def test_invented_reservation_is_denied(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    harness.wait(100)
    await harness.parts.ledger.collect(harness.now)
    assert refusal(await harness.validate(builders.validating_create(dressed))) == (403, "NotReserved")


async def test_expired_reservation_is_not_relied_on(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    harness.wait(86)
    assert refusal(await harness.validate(builders.validating_create(dressed))) == (409, "ReservationExpired")


async def test_pod_of_another_namespace_cannot_use_the_reservation(harness: Harness) -> None:
    dressed = await harness.dress(gpu_pod())
    elsewhere = {**dressed, "metadata": {**dressed["metadata"], "namespace": "other"}}
    assert refusal(await harness.validate(builders.validating_create(elsewhere))) == (409, "ReservationConflict")


async def test_evidence_that_ends_between_the_webhooks_denies_the_pod(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": HASH, "until": "2026-03-02T12:00:30Z"}}
    harness = await build({"nodes": [node]})
    dressed = await harness.dress(gpu_pod(annotations=hashed(HASH)))
    harness.wait(30)
    response = await harness.validate(builders.validating_create(dressed))
    assert refusal(response) == (403, "NoProvenNode")
    assert "stale evidence" in response["status"]["message"]


FORGERIES: dict[str, tuple[Any, str]] = {
    "another GPU in the annotation": (
        lambda pod: pod["metadata"]["annotations"].update({GPU_UUID: "GPU-b0"}),
        "metadata.annotations[gpuwarden.io/gpu-uuid]",
    ),
    "another GPU in the alias": (
        lambda pod: pod["metadata"]["annotations"].update({"fudo.org/gpu.uuid": "GPU-b0"}),
        "metadata.annotations[fudo.org/gpu.uuid]",
    ),
    "another node": (
        lambda pod: pod["metadata"]["annotations"].update({NODE: "node-b"}),
        "metadata.annotations[gpuwarden.io/node]",
    ),
    "all GPUs in the variable": (
        lambda pod: pod["spec"]["containers"][0]["env"][0].update(value="all"),
        "spec.containers[0].env[0].value",
    ),
    "the variable from elsewhere": (
        lambda pod: pod["spec"]["containers"][0]["env"].append(
            {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['x']"}}}
        ),
        "spec.containers[0].env",
    ),
    "a variable in a sidecar": (
        lambda pod: pod["spec"].update(
            initContainers=[builders.raw_sidecar(env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))]
        ),
        "spec.initContainers[0].env",
    ),
    "the request put back": (
        lambda pod: pod["spec"]["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
        "spec.containers[0].resources.limits[nvidia.com/gpu]",
    ),
    "the affinity taken off": (lambda pod: pod["spec"].pop("affinity"), "spec.affinity"),
    "another term in the affinity": (
        lambda pod: pod["spec"]["affinity"]["nodeAffinity"][builders.REQUIRED]["nodeSelectorTerms"].append(
            builders.term(builders.expression("zone", "In", "b"))
        ),
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[1].matchFields",
    ),
    "a preset node": (lambda pod: pod["spec"].update(nodeName="node-c"), "spec.nodeName"),
    "an edited record": (
        lambda pod: pod["metadata"]["annotations"].update({CLAIM: '{"asked":{"main":1},"gpus":1}'}),
        "metadata.annotations[gpuwarden.io/claim]",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_changes_after_mutation_are_denied_with_their_field(harness: Harness, forgery: str) -> None:
    forge, field = FORGERIES[forgery]
    final = builders.created(await harness.dress(gpu_pod(annotations=hashed(HASH))))
    forge(final)
    response = await harness.validate(builders.review("CREATE", new=final))
    assert refusal(response) == (403, "Forged")
    assert field in response["status"]["message"]
    assert [one.phase for one in harness.parts.ledger.reservations()] == [Phase.PENDING]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))), id="NVIDIA_VISIBLE_DEVICES"),
        pytest.param(raw_pod(raw_container(env=raw_env(CUDA_VISIBLE_DEVICES="0"))), id="CUDA_VISIBLE_DEVICES"),
        pytest.param(raw_pod(init=[raw_container(env=raw_env(CUDA_VISIBLE_DEVICES="0"))]), id="in an init container"),
        pytest.param(raw_pod(annotations={"cdi.k8s.io/a": "nvidia.com/gpu=0"}), id="a CDI annotation"),
        pytest.param(
            raw_pod(raw_container(resources={"limits": {"nvidia.com/mig-1g.5gb": "1"}})), id="another NVIDIA resource"
        ),
        pytest.param(raw_pod(resourceClaims=[{"name": "gpu"}]), id="a resource claim"),
    ],
)
async def test_access_to_a_gpu_without_the_reservation_is_denied(harness: Harness, raw: Raw) -> None:
    assert refusal(await harness.validate(builders.validating_create(raw))) == (403, "GpuWithoutClaim")


@pytest.mark.parametrize("value", ["void", "none", ""])
async def test_variable_that_hides_all_gpus_is_allowed(harness: Harness, value: str) -> None:
    raw = raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES=value)))
    assert (await harness.validate(builders.validating_create(raw)))["allowed"]


async def test_forged_annotations_without_a_claim_are_refused(harness: Harness) -> None:
    forged = raw_pod(annotations={GPU_UUID: "GPU-a0"})
    assert refusal(await harness.validate(builders.validating_create(forged))) == (403, "Forged")


async def test_pinning_to_proven_nodes_cannot_be_removed(harness: Harness) -> None:
    dressed = await harness.dress(raw_pod(annotations=hashed(HASH)))
    del dressed["spec"]["affinity"]
    assert refusal(await harness.validate(builders.validating_create(dressed))) == (403, "NotReserved")


async def test_pinning_to_proven_nodes_cannot_be_changed(harness: Harness) -> None:
    dressed = await harness.dress(raw_pod(annotations=hashed(HASH)))
    dressed["spec"]["affinity"] = builders.required_affinity(builders.on_node("node-b"))
    assert refusal(await harness.validate(builders.validating_create(dressed))) == (403, "NoProvenNode")


# The validating webhook: UPDATE and others.


@pytest.mark.parametrize("subresource", [None, "status", "ephemeralcontainers", "resize"])
@pytest.mark.parametrize("key", [CLAIM, RESERVATION_ID, GPU_UUID, NODE, "fudo.org/gpu.uuid", "cdi.k8s.io/gpu"])
async def test_reservation_annotations_cannot_change(harness: Harness, key: str, subresource: str | None) -> None:
    final = await harness.create(gpu_pod())
    annotations = {**final["metadata"]["annotations"], key: "something else"}
    edited = {**final, "metadata": {**final["metadata"], "annotations": annotations}}
    response = await harness.validate(builders.update(edited, final, subresource=subresource))
    assert refusal(response) == (403, "Immutable")
    assert f"metadata.annotations[{key}]" in response["status"]["message"]


async def test_reservation_annotations_cannot_be_removed(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    bare = {**final, "metadata": {**final["metadata"], "annotations": {}}}
    assert refusal(await harness.validate(builders.update(bare, final))) == (403, "Immutable")


async def test_ordinary_updates_pass(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    labelled = {**final, "metadata": {**final["metadata"], "labels": {"team": "x"}, "finalizers": None}}
    assert await harness.validate(builders.update(labelled, final)) == {"uid": REVIEW_UID, "allowed": True}


async def test_an_old_pod_with_a_gpu_variable_can_still_be_updated(harness: Harness) -> None:
    """It is older than gpuwarden. Denying its updates would keep its finalizers for ever."""
    old = builders.created(raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))))
    new = {**old, "metadata": {**old["metadata"], "labels": {"a": "b"}}}
    assert (await harness.validate(builders.update(new, old)))["allowed"]


@pytest.mark.parametrize(
    ("value", "is_allowed"),
    [("all", False), ("GPU-b0", True), ("GPU-a0", False), ("void", True)],
    ids=["all", "its own", "another's", "none"],
)
async def test_debug_container_sees_at_most_its_pods_gpus(harness: Harness, value: str, is_allowed: bool) -> None:
    final = await harness.create(gpu_pod())
    debug = raw_container("debugger", env=raw_env(NVIDIA_VISIBLE_DEVICES=value))
    new = {**final, "spec": {**final["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, final, subresource="ephemeralcontainers"))
    assert response["allowed"] is is_allowed
    if not is_allowed:
        assert "spec.ephemeralContainers[0].env[NVIDIA_VISIBLE_DEVICES]" in response["status"]["message"]


async def test_a_debug_container_of_a_pod_without_gpus_sees_none(harness: Harness) -> None:
    final = builders.created(raw_pod())
    debug = raw_container("debugger", env=raw_env(NVIDIA_VISIBLE_DEVICES="GPU-a0"))
    new = {**final, "spec": {**final["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, final, subresource="ephemeralcontainers"))
    assert refusal(response) == (403, "Immutable")


async def test_a_debug_container_is_not_shown_the_gpus_of_another_pod(harness: Harness) -> None:
    """The pod carries the annotations of a reservation that is bound to another uid."""
    final = await harness.create(gpu_pod())
    other = {**final, "metadata": {**final["metadata"], "uid": "another-uid"}}
    debug = raw_container("debugger", env=raw_env(NVIDIA_VISIBLE_DEVICES="GPU-b0"))
    assert final["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-b0"
    new = {**other, "spec": {**other["spec"], "ephemeralContainers": [debug]}}
    response = await harness.validate(builders.update(new, other, subresource="ephemeralcontainers"))
    assert refusal(response) == (403, "Immutable")


# Bindings.


@pytest.mark.parametrize("uid", [POD_UID, None], ids=["with-a-uid", "without"])
async def test_binding_to_another_node_than_reserved_is_denied(harness: Harness, uid: str | None) -> None:
    await harness.create(gpu_pod())
    assert (await harness.validate(binding("node-b", uid=uid)))["allowed"]
    refused = await harness.validate(binding("node-a", uid=uid))
    assert refusal(refused) == (403, "NotReserved")
    assert "reserved on node-b, not on node-a" in refused["status"]["message"]


@pytest.mark.parametrize(
    ("key", "value", "is_allowed"),
    [
        (GPU_UUID, "GPU-b0", True),
        (GPU_UUID, "GPU-a0", False),
        ("fudo.org/gpu.uuid", "GPU-a0", False),
        (CLAIM, "{}", False),
        ("cdi.k8s.io/gpu", "nvidia.com/gpu=all", False),
        ("team", "x", True),
    ],
)
async def test_a_binding_plants_nothing_that_only_we_may_write(
    harness: Harness, key: str, value: str, is_allowed: bool
) -> None:
    await harness.create(gpu_pod())
    response = await harness.validate(binding("node-b", annotations={key: value}))
    assert response["allowed"] is is_allowed
    assert is_allowed or refusal(response) == (403, "Forged")


async def test_binding_of_a_pod_without_a_reservation_is_allowed_without_our_annotations(harness: Harness) -> None:
    assert (await harness.validate(binding("node-c")))["allowed"]
    assert refusal(await harness.validate(binding("node-c", annotations={GPU_UUID: "GPU-c0"}))) == (403, "Forged")


# The end of a pod.


async def test_delete_review_releases_the_pods_gpus(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    assert (await harness.validate(builders.delete(final)))["allowed"]
    assert harness.held == []


async def test_delete_review_releases_all_reservations_of_the_uid(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    other = await harness.dress(gpu_pod(name=None, generate_name="train-"), "r2")
    assert (await harness.validate(builders.validating_create(other, name="train-0")))["allowed"]
    assert harness.held == ["GPU-a0", "GPU-b0"]
    await harness.validate(builders.delete(final))
    assert harness.held == []


@pytest.mark.parametrize("old", [None, {"metadata": {"namespace": "ml", "name": "train-0"}}], ids=["null", "no uid"])
async def test_delete_review_without_a_uid_refers_to_the_pod_of_that_name(harness: Harness, old: Raw | None) -> None:
    await harness.create(gpu_pod())
    assert (await harness.validate(builders.review("DELETE", old=old, name="train-0")))["allowed"]
    assert harness.held == []


async def test_dry_run_delete_releases_nothing(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    assert (await harness.validate(builders.delete(final, dry_run=True)))["allowed"]
    assert harness.held == ["GPU-b0"]


async def test_deleting_another_pod_of_the_name_releases_nothing(harness: Harness) -> None:
    final = await harness.create(gpu_pod())
    other = {**final, "metadata": {**final["metadata"], "uid": "uid-of-another"}}
    assert (await harness.validate(builders.delete(other)))["allowed"]
    assert harness.held == ["GPU-b0"]


@pytest.mark.defect("X-4")
async def test_reservation_without_a_pod_ends_at_its_deadline(harness: Harness) -> None:
    await harness.dress(gpu_pod(annotations=hashed(OTHER_HASH)), "r1")
    harness.wait(90)
    assert (await harness.states())["GPU-b0"] == "expired"
    assert refusal(await harness.mutate(gpu_pod(annotations=hashed(OTHER_HASH)), "r2")) == (429, "NoFreeDevice")
    harness.wait(5)
    assert (await harness.mutate(gpu_pod(annotations=hashed(OTHER_HASH)), "r3"))["allowed"]


# A ledger that fails.


@pytest.mark.parametrize("error", [LedgerUnavailableError, DeadlinePassedError, SlotsTakenError])
async def test_failing_ledger_causes_a_denial_not_an_error(harness: Harness, error: type[LedgerError]) -> None:
    final = builders.created(await harness.dress(gpu_pod()))

    async def fail(*_: Any, **__: Any) -> None:
        raise error

    harness.parts.ledger.find = fail  # type: ignore[method-assign]  # a ledger that cannot be asked
    assert refusal(await harness.mutate(gpu_pod(), "another")) == (503, "LedgerAway")
    assert refusal(await harness.validate(builders.review("CREATE", new=final))) == (503, "LedgerAway")


# Reviews of other kinds.


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("CREATE", {"group": "apps", "version": "v1", "kind": "Deployment"}),
        ("CREATE", None),
        ("FROBNICATE", {"group": "", "version": "v1", "kind": "Pod"}),
        (None, {"group": "", "version": "v1", "kind": "Pod"}),
    ],
    ids=["a Deployment", "no kind", "an unknown operation", "no operation"],
)
async def test_review_of_another_kind_is_denied_with_a_reason(
    harness: Harness, path: str, operation: str | None, kind: Raw | None
) -> None:
    raw_review = builders.mutating_create(gpu_pod())
    raw_review["request"].update(operation=operation, kind=kind)
    assert refusal(await harness.ask(path, raw_review)) == (403, "NotReviewed")
    assert harness.held == []
