"""With `--reserve bind` the GPUs of a pod are reserved in the review of its Binding."""

import asyncio
import json
from typing import Any

import pytest

from tests import builders
from tests.builders import HASH, OTHER_HASH, POD_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import Harness, patched
from tests.web.replica import Shared, binding, sharing
from tests.web.test_admission import pinned_nodes, refusal

UUID, ID, NODE = "gpuwarden.io/gpu-uuid", "gpuwarden.io/reservation-id", "gpuwarden.io/node"
REFERENCE = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{UUID}']"}}
# One GPU on each of two nodes.
TWINS = {
    "nodes": [
        {"name": f"node-{k}", "evidence": {"hash": HASH}, "devices": [{"uuid": f"GPU-{k}0", "index": 0}]} for k in "xy"
    ]
}


def asking(gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container(gpus=gpus), **members)


@pytest.fixture
def shared() -> Shared:
    return Shared(TWINS)


@pytest.fixture
async def first(build: Build, shared: Shared) -> Harness:
    return await build(TWINS, assemble=sharing(shared), reserve="bind")


@pytest.fixture
async def second(build: Build, shared: Shared) -> Harness:
    """Another replica, which has seen nothing of what the first did."""
    return await build(TWINS, assemble=sharing(shared), reserve="bind")


async def created(harness: Harness, shared: Shared, raw: Raw | None = None, uid: str = POD_UID) -> Raw:
    final = await harness.create(asking() if raw is None else raw, pod_uid=uid)
    shared.has(final)
    return final


async def reviewed(harness: Harness, asked: Raw) -> Raw:
    """The Binding after the mutating webhook."""
    return patched(asked["request"]["object"], await harness.ask("/mutate-binding", asked))


def sent(content: Raw) -> Raw:
    """The review of a Binding with this content."""
    meta = content["metadata"]
    return binding(content["target"]["name"], uid=meta.get("uid"), annotations=meta.get("annotations"))


async def bound(harness: Harness, shared: Shared, node: str = "node-x") -> Raw:
    """The pod after both reviews of its Binding, as the API server stores it."""
    final = await reviewed(harness, binding(node))
    assert (await harness.validate(sent(final)))["allowed"]
    raw = shared.pods["ml", "train-0"]
    raw["metadata"]["annotations"] |= final["metadata"]["annotations"]
    raw["spec"]["nodeName"] = node
    return raw


def held_by(shared: Shared) -> dict[str, str]:
    return {slot: entry["uid"] for slot, entry in shared.held.items()}


async def test_creation_reserves_nothing_and_variables_refer_to_the_annotation(first: Harness, shared: Shared) -> None:
    final = await created(first, shared)
    assert shared.held == {}
    assert json.loads(final["metadata"]["annotations"]["gpuwarden.io/claim"])["reserve"] == "bind"
    assert not {UUID, ID, NODE} & final["metadata"]["annotations"].keys()
    assert "schedulingGates" not in final["spec"]
    (container,) = final["spec"]["containers"]
    assert [(one["name"], one["valueFrom"]) for one in container["env"]] == [
        ("NVIDIA_VISIBLE_DEVICES", REFERENCE),
        ("CUDA_VISIBLE_DEVICES", REFERENCE),
    ]
    assert container["resources"] == {"limits": {}, "requests": {}}


async def test_binding_reserves_and_writes_the_reservation_into_the_pod(first: Harness, shared: Shared) -> None:
    await created(first, shared)
    raw = await bound(first, shared)
    assert held_by(shared) == {"GPU-x0/0": POD_UID}
    assert raw["metadata"]["annotations"][UUID] == raw["metadata"]["annotations"]["fudo.org/gpu.uuid"] == "GPU-x0"
    assert raw["metadata"]["annotations"][NODE] == "node-x"
    (entry,) = shared.held.values()
    assert raw["metadata"]["annotations"][ID] == entry["reservation"]
    assert entry["phase"] == "finalized"


async def test_binding_without_a_uid_gets_the_uid_of_the_pod(first: Harness, shared: Shared) -> None:
    """A later pod of that name must not get the annotations."""
    await created(first, shared)
    assert (await reviewed(first, binding("node-x", uid=None)))["metadata"]["uid"] == POD_UID


async def test_repeated_binding_finds_its_reservation(first: Harness, second: Harness, shared: Shared) -> None:
    await created(first, shared)
    made = [await reviewed(one, binding("node-x")) for one in (first, first, second)]
    assert made[0] == made[1] == made[2]
    assert held_by(shared) == {"GPU-x0/0": POD_UID}


async def test_reinvoked_review_accepts_its_own_annotations(first: Harness, shared: Shared) -> None:
    await created(first, shared)
    final = await reviewed(first, binding("node-x"))
    again = sent(final)
    again["request"]["object"]["metadata"]["finalizers"] = final["metadata"]["finalizers"]
    assert "patch" not in await first.ask("/mutate-binding", again)


async def test_binding_to_another_node_takes_a_second_reservation_and_a_third_is_refused(
    build: Build,
) -> None:
    """The API server may still carry out the first Binding."""
    nodes = [{**TWINS["nodes"][0], "name": f"node-{k}", "devices": [{"uuid": f"GPU-{k}0"}]} for k in "xyz"]
    shared = Shared({"nodes": nodes})
    harness = await build({"nodes": nodes}, assemble=sharing(shared), reserve="bind")
    await created(harness, shared)
    await reviewed(harness, binding("node-x"))
    await reviewed(harness, binding("node-y"))
    assert held_by(shared) == {"GPU-x0/0": POD_UID, "GPU-y0/0": POD_UID}
    refused = await harness.ask("/mutate-binding", binding("node-z"))
    assert refusal(refused) == (409, "ReservationConflict")
    assert "reservations on node-x and node-y" in refused["status"]["message"]


async def test_bindings_to_many_nodes_at_once_take_reservations_on_two(build: Build) -> None:
    """Forged reviews in the name of one pod could hold the GPUs of all nodes."""
    nodes = [{**TWINS["nodes"][0], "name": f"node-{k}", "devices": [{"uuid": f"GPU-{k}0"}]} for k in range(6)]
    shared = Shared({"nodes": nodes})
    harness = await build({"nodes": nodes}, assemble=sharing(shared), reserve="bind")
    await created(harness, shared)
    asked = (harness.ask("/mutate-binding", binding(f"node-{k}")) for k in range(6))
    answers = await asyncio.gather(*asked)
    assert len(held_by(shared)) == sum(one["allowed"] for one in answers) == 2
    assert {refusal(one) for one in answers if not one["allowed"]} == {(409, "ReservationConflict")}


async def test_full_node_is_refused_and_names_the_reason(first: Harness, second: Harness, shared: Shared) -> None:
    await created(first, shared, uid="uid-of-another")
    shared.pods["ml", "other"] = shared.pods.pop(("ml", "train-0"))
    shared.pods["ml", "other"]["metadata"]["name"] = "other"
    other = binding("node-x", uid="uid-of-another")
    other["request"]["object"]["metadata"]["name"] = "other"
    await reviewed(first, other)
    await created(second, shared)
    refused = await second.ask("/mutate-binding", binding("node-x"))
    assert refusal(refused) == (429, "NoFreeDevice")
    assert refused["status"]["message"].startswith("1 GPU: node node-x: no free GPU")
    await reviewed(second, binding("node-y"))
    assert held_by(shared) == {"GPU-x0/0": "uid-of-another", "GPU-y0/0": POD_UID}


async def test_dry_run_of_a_binding_holds_nothing(first: Harness, shared: Shared) -> None:
    await created(first, shared)
    final = await reviewed(first, binding("node-x", dry_run=True))
    assert ID not in (final["metadata"]["annotations"] or {})
    assert (await first.validate(binding("node-x", dry_run=True)))["allowed"]
    assert shared.held == {}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({UUID: "GPU-y0"}, f"metadata.annotations[{UUID}]"),
        ({ID: "another"}, f"metadata.annotations[{ID}]"),
        ({NODE: "node-y"}, f"metadata.annotations[{NODE}]"),
        ({"fudo.org/gpu.uuid": "GPU-y0"}, "metadata.annotations[fudo.org/gpu.uuid]"),
        ({"gpuwarden.io/claim": "{}"}, "metadata.annotations[gpuwarden.io/claim]"),
        ({"cdi.k8s.io/x": "nvidia.com/gpu=all"}, "metadata.annotations[cdi.k8s.io/x]"),
    ],
)
async def test_binding_that_another_webhook_changed_is_denied(
    first: Harness, second: Harness, shared: Shared, changed: dict[str, str], why: str
) -> None:
    await created(first, shared)
    final = await reviewed(first, binding("node-x"))
    final["metadata"]["annotations"] |= changed
    refused = await second.validate(sent(final))
    assert refusal(refused) == (403, "Forged")
    assert refused["status"]["message"].startswith(why)


async def test_binding_whose_uid_was_removed_is_denied(first: Harness, shared: Shared) -> None:
    await created(first, shared)
    final = await reviewed(first, binding("node-x"))
    del final["metadata"]["uid"]
    assert refusal(await first.validate(sent(final))) == (403, "Forged")


async def test_binding_that_no_mutating_review_saw_is_denied(first: Harness, shared: Shared) -> None:
    """Its containers would see no GPU, or one of the author's choice."""
    await created(first, shared)
    assert refusal(await first.validate(binding("node-x"))) == (403, "NotReserved")
    forged = {UUID: "GPU-x0", ID: "mine", NODE: "node-x"}
    assert refusal(await first.validate(binding("node-x", annotations=forged))) == (403, "NotReserved")
    final = await reviewed(first, binding("node-x", annotations=forged))
    assert final["metadata"]["annotations"][ID] == next(iter(shared.held.values()))["reservation"]


async def test_reservation_is_accepted_for_a_while_and_renewed_by_the_next_binding(
    first: Harness, shared: Shared
) -> None:
    await created(first, shared)
    final = await reviewed(first, binding("node-x"))
    first.wait(14)
    assert (await first.validate(sent(final)))["allowed"]
    first.wait(1)
    assert refusal(await first.validate(sent(final))) == (403, "NotReserved")
    final = await reviewed(first, binding("node-x"))
    assert (await first.validate(sent(final)))["allowed"]


@pytest.mark.parametrize(
    ("node", "reason"), [("node-b", "NoProvenNode"), ("node-q", "NoSuitableNode")], ids=["other hash", "unknown"]
)
async def test_binding_to_a_node_that_cannot_serve_the_claim_is_denied(build: Build, node: str, reason: str) -> None:
    shared = Shared()
    harness = await build(assemble=sharing(shared), reserve="bind")
    await created(harness, shared, asking(annotations={"gpuwarden.io/required-hash": HASH}))
    raw = shared.pods["ml", "train-0"]
    raw["spec"]["affinity"] = {}  # a scheduler that ignores it
    refused = await harness.ask("/mutate-binding", binding(node))
    assert refusal(refused)[1] == reason
    assert shared.held == {}


async def test_evidence_that_ended_since_the_creation_is_no_evidence(build: Build) -> None:
    shared = Shared(TWINS)
    harness = await build(TWINS, assemble=sharing(shared), reserve="bind")
    await created(harness, shared, asking(annotations={"gpuwarden.io/required-hash": HASH}))
    lost = {"nodes": [{**one, "evidence": {"hash": OTHER_HASH}} for one in TWINS["nodes"]]}
    harness.file.write_text(json.dumps(lost))
    await harness.fleet_source.refresh()
    assert refusal(await harness.ask("/mutate-binding", binding("node-x"))) == (403, "NoProvenNode")
    assert shared.held == {}


async def test_pod_is_limited_to_nodes_that_have_the_gpus_free_or_held(build: Build) -> None:
    nodes = [{"name": f"node-{k}", "devices": [{"uuid": f"GPU-{k}0"}], "evidence": {"hash": HASH}} for k in "xyz"]
    nodes += [{"name": "node-other", "devices": [{"uuid": "GPU-o0"}], "evidence": {"hash": OTHER_HASH}}]
    nodes += [{"name": "node-none", "devices": [], "evidence": {"hash": HASH}}]
    shared = Shared({"nodes": nodes})
    harness = await build({"nodes": nodes}, assemble=sharing(shared), reserve="bind")
    wanted = asking(annotations={"gpuwarden.io/required-hash": HASH})
    assert sorted(pinned_nodes(await created(harness, shared, wanted))) == ["node-x", "node-y", "node-z"]
    await bound(harness, shared, "node-x")
    assert sorted(pinned_nodes(await harness.create(wanted, uid="second"))) == ["node-x", "node-y", "node-z"]


async def test_affinity_names_at_most_64_nodes_and_the_pod_is_bound(build: Build) -> None:
    nodes = [{"name": f"node-{k}", "devices": [{"uuid": f"GPU-{k}"}], "evidence": {"hash": HASH}} for k in range(70)]
    shared = Shared({"nodes": nodes})
    harness = await build({"nodes": nodes}, assemble=sharing(shared), reserve="bind")
    final = await created(harness, shared, asking(nodeSelector={}))
    assert len(pinned_nodes(final)) == 64
    await bound(harness, shared, pinned_nodes(final)[0])


async def test_explanation_says_when_the_gpus_are_reserved(first: Harness) -> None:
    found = (await first.tls.post("/explain", json=asking())).json()
    assert found["message"] == "1 GPU: GPUs are reserved when a scheduler binds the pod"


async def test_repeated_review_of_a_creation_changes_nothing(first: Harness) -> None:
    once = await first.dress(asking())
    assert await first.dress(once, "again") == once


async def test_pod_that_no_node_fits_is_refused(first: Harness) -> None:
    assert refusal(await first.mutate(asking(2)))[1] == "NoMatchingDevice"


async def test_pod_with_a_preset_node_is_refused(first: Harness, shared: Shared) -> None:
    """It would never be bound."""
    refused = await first.mutate(asking(nodeName="node-x"))
    assert refusal(refused) == (403, "InvalidPod")
    final = await first.dress(asking())
    final["spec"]["nodeName"] = "node-x"
    assert refusal(await first.validate(builders.validating_create(final)))[1] == "InvalidPod"


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["metadata"]["annotations"].update({UUID: "GPU-x0"}),
        lambda raw: raw["spec"]["containers"][0]["env"].clear(),
        lambda raw: raw["spec"]["containers"][0]["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}),
        lambda raw: raw["spec"]["containers"].append(
            {"name": "more", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-x0"}]}
        ),
        lambda raw: raw["metadata"]["annotations"].update(
            {"gpuwarden.io/claim": raw["metadata"]["annotations"]["gpuwarden.io/claim"].replace('"gpus":1', '"gpus":2')}
        ),
    ],
    ids=["gpu", "variables removed", "variable twice", "container added", "more GPUs"],
)
async def test_pod_that_was_changed_after_its_review_is_neither_created_nor_bound(
    first: Harness, shared: Shared, change: Any
) -> None:
    final = await first.dress(asking())
    change(final)
    assert not (await first.validate(builders.validating_create(final)))["allowed"]
    shared.has(builders.created(final))  # an API server that did not ask
    assert not (await first.ask("/mutate-binding", binding("node-x")))["allowed"]
    assert shared.held == {}


async def test_pod_that_asks_for_another_time_to_reserve_is_refused(build: Build, shared: Shared) -> None:
    late = await build(TWINS, assemble=sharing(shared), reserve="bind")
    early = await build(TWINS, assemble=sharing(shared))
    assert refusal(await early.validate(builders.validating_create(await late.dress(asking())))) == (403, "Forged")


async def test_pod_of_the_other_setting_is_bound(build: Build, shared: Shared) -> None:
    """The setting applies to new pods only."""
    late = await build(TWINS, assemble=sharing(shared), reserve="bind")
    early = await build(TWINS, assemble=sharing(shared))
    await created(late, shared)
    await bound(early, shared)
    assert held_by(shared) == {"GPU-x0/0": POD_UID}


async def test_pod_that_cannot_be_bound_holds_nothing(first: Harness, shared: Shared) -> None:
    raw = await created(first, shared)
    for change in ({"nodeName": "node-y"}, {"schedulingGates": [{"name": "example.test/wait"}]}):
        shared.has({**raw, "spec": {**raw["spec"], **change}})
        assert refusal(await first.ask("/mutate-binding", binding("node-x"))) == (409, "ReservationConflict")
    assert refusal(await first.ask("/mutate-binding", binding("node-x", uid="another"))) == (409, "ReservationConflict")
    assert shared.held == {}


async def test_mapped_pod_is_limited_to_its_node_and_gets_its_gpus_in_order(build: Build) -> None:
    shared = Shared()
    harness = await build(assemble=sharing(shared), reserve="bind")
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "train", "uid": "u", "controller": True}
    final = await created(
        harness, shared, raw_pod(owners=[owner], annotations={"gpuwarden.io/gpu-map": "0=node-a:1,0"})
    )
    assert pinned_nodes(final) == ["node-a"]
    raw = await bound(harness, shared, "node-a")
    assert raw["metadata"]["annotations"][UUID] == "GPU-a1,GPU-a0"


async def test_claim_with_only_a_hash_is_unchanged(build: Build) -> None:
    shared = Shared()
    harness = await build(assemble=sharing(shared), reserve="bind")
    final = await created(harness, shared, raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    assert json.loads(final["metadata"]["annotations"]["gpuwarden.io/claim"]) == {"hashes": [HASH]}
    assert (await harness.validate(binding("node-a")))["allowed"]
