"""Reviews of pods whose GPUs kube-scheduler chooses: nothing is reserved, and a changed pod is refused."""

import json
from typing import Any

import pytest

from tests import builders
from tests.admission.test_namespaces import Api
from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness, patched
from tests.web.replica import Shared, binding, sharing
from tests.web.test_admission import pinned_nodes, refusal
from tests.web.test_namespaces import with_namespaces
from webhook.admission.namespaces import WatchedNamespaces
from webhook.core.pod_claims import CLAIM_NAME, own_claim_of, own_template_of

BIND = {"injection": "dra", "reserve": "bind"}
RECORD = "gpuwarden.io/claim"


def asking(gpus: int = 1, hashes: str = HASH, labels: Raw | None = None, **members: Any) -> Raw:
    asked = {"gpuwarden.io/required-hash": hashes}
    return raw_pod(
        raw_container("main", gpus=gpus), raw_container("side"), annotations=asked, labels=labels or {}, **members
    )


@pytest.fixture
async def harness(build: Build) -> Harness:
    return await build(**BIND)


async def validated(harness: Harness, final: Raw) -> Raw:
    return await harness.validate(builders.review("CREATE", new=final, uid="validate"))


async def test_pod_gets_a_claim_and_neither_a_node_nor_a_reservation(harness: Harness) -> None:
    final = await harness.create(asking(2))
    assert own_template_of(final["spec"]) == f"gpuwarden-2-{HASH.removeprefix('sha256:')}"
    assert "affinity" not in final["spec"]
    assert final["metadata"]["annotations"].keys() == {RECORD, "gpuwarden.io/required-hash"}
    assert json.loads(final["metadata"]["annotations"][RECORD])["reserve"] == "bind"
    main, side = final["spec"]["containers"]
    assert main["resources"]["claims"] == [{"name": "gpuwarden"}]
    assert "nvidia.com/gpu" not in str(main["resources"])
    assert "claims" not in side.get("resources", {})
    assert [one["env"] for one in (main, side)] == [[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]] * 2
    assert not harness.parts.fleet.held_devices


async def test_other_demands_and_copies_name_a_new_claim_each_time(harness: Harness) -> None:
    first = await harness.create(asking(hashes=f"{HASH},{OTHER_HASH}"))
    again = await harness.create(first, uid="another", pod_uid="another")
    names = [own_claim_of(one["spec"]) for one in (first, again)]
    assert all(CLAIM_NAME.fullmatch(one) for one in names)
    assert names[0] != names[1]
    assert first["metadata"]["annotations"] == again["metadata"]["annotations"]


async def test_copy_asks_for_what_its_record_says(harness: Harness) -> None:
    first = await harness.create(asking(2))
    assert await harness.create(first, uid="another", pod_uid="another") == {
        **first,
        "metadata": {**first["metadata"], "uid": "another"},
    }


async def test_node_of_a_placement_map_is_required(harness: Harness) -> None:
    one = INVENTORY["nodes"][1]
    (uuid, *_) = [device["uuid"] for device in one["devices"]]
    wish = asking(labels={"apps.kubernetes.io/pod-index": "0"})
    wish["metadata"]["annotations"] |= {"gpuwarden.io/gpu-map": f"0={one['name']}:{uuid}\n"}
    response = await harness.mutate(wish)
    assert response["allowed"], response
    terms = patched(wish, response)["spec"]["affinity"]["nodeAffinity"]
    assert one["name"] in json.dumps(terms)
    wish["metadata"]["labels"]["apps.kubernetes.io/pod-index"] = "1"
    assert refusal(await harness.mutate(wish)) == (403, "NotInMap")


async def test_node_that_a_placement_map_names_by_its_label_is_required(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "labels": {"gpu-node-name": "rack-7"}}
    harness = await build({"nodes": [node]}, **BIND)
    wish = asking(labels={"apps.kubernetes.io/pod-index": "0"})
    wish["metadata"]["annotations"] |= {"gpuwarden.io/gpu-map": f"0=rack-7:{node['devices'][0]['uuid']}"}
    final = await harness.create(wish)
    assert pinned_nodes(final) == [node["name"]]
    assert await harness.create(final, uid="another", pod_uid="another")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"gpuwarden.io/shared": "true"}, "a ResourceClaim takes whole GPUs"),
        ({"gpuwarden.io/gpu.memory": "80"}, "memory=80: the ResourceSlices of GPUs do not show it"),
    ],
)
async def test_what_a_claim_cannot_say_is_refused(harness: Harness, labels: Raw, words: str) -> None:
    response = await harness.mutate(asking(labels=labels))
    assert refusal(response) == (403, "InjectionConflict")
    assert words in response["status"]["message"]


@pytest.mark.parametrize("hashes", [HASH, f"{HASH},{OTHER_HASH}"], ids=["template", "claim"])
async def test_pod_without_a_grace_period_is_refused(harness: Harness, hashes: str) -> None:
    response = await harness.mutate(asking(hashes=hashes, terminationGracePeriodSeconds=0))
    assert refusal(response) == (403, "InvalidPod")
    assert "terminationGracePeriodSeconds: 0" in response["status"]["message"]
    final = await harness.create(asking(hashes=hashes, terminationGracePeriodSeconds=1))
    final["spec"]["terminationGracePeriodSeconds"] = 0
    assert refusal(await validated(harness, final)) == (403, "InvalidPod")


@pytest.mark.parametrize("settings", [{}, {"when_unavailable": "queue"}], ids=["deny", "queue"])
async def test_pod_that_nothing_can_serve_now_is_created_without_a_gate(build: Build, settings: Raw) -> None:
    harness = await build(**BIND, **settings)
    final = await harness.create(asking(hashes="sha256:unknown0"))
    assert "schedulingGates" not in final["spec"]


async def test_dry_run_gives_the_same_pod(harness: Harness) -> None:
    wish = asking()
    assert patched(wish, await harness.mutate(wish, dry_run=True)) == patched(wish, await harness.mutate(wish))


def with_template(raw: Raw, name: str) -> None:
    raw["spec"]["resourceClaims"] = [{"name": "gpuwarden", "resourceClaimTemplateName": name}]


def with_record(raw: Raw, **members: Any) -> None:
    record = {**json.loads(raw["metadata"]["annotations"][RECORD]), **members}
    raw["metadata"]["annotations"][RECORD] = json.dumps(record, sort_keys=True, separators=(",", ":"))


FORGERIES: dict[str, Any] = {
    "a larger template": lambda raw: with_template(raw, "gpuwarden-8-aa11"),
    "a claim of another pod": lambda raw: raw["spec"]["resourceClaims"].append(
        {"name": "more", "resourceClaimName": "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"}
    ),
    "no claim": lambda raw: raw["spec"].pop("resourceClaims"),
    "a larger record": lambda raw: with_record(raw, gpus=8, asked={"main": 8}),
    "another hash": lambda raw: with_record(raw, hashes=[OTHER_HASH]),
    "no time": lambda raw: with_record(raw, reserve=None),
    "another injection": lambda raw: with_record(raw, injection="cuda"),
    "a node": lambda raw: raw["spec"].update(nodeName="node-a"),
    "GPUs of another pod": lambda raw: raw["metadata"]["annotations"].update({"gpuwarden.io/gpu-uuid": "GPU-a"}),
    "all GPUs": lambda raw: raw["spec"]["containers"][1].update(
        env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    ),
    "the claim for all": lambda raw: raw["spec"]["containers"][1].update(resources={"claims": [{"name": "gpuwarden"}]}),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
async def test_changed_pod_is_refused(harness: Harness, forge: Any) -> None:
    final = builders.created(await harness.dress(asking()))
    assert (await validated(harness, final))["allowed"]
    forge(final)
    assert not (await validated(harness, final))["allowed"]
    assert not harness.parts.fleet.held_devices


@pytest.mark.parametrize("members", [{"hashes": ["sha256:cc33"]}, {"requirements": ["model=B200"]}], ids=str)
async def test_changed_record_of_a_claim_that_reconcile_makes_is_refused(harness: Harness, members: Raw) -> None:
    """Nothing else in the pod shows what the claim will be."""
    final = builders.created(await harness.dress(asking(hashes=f"{HASH},{OTHER_HASH}")))
    assert (await validated(harness, final))["allowed"]
    with_record(final, **members)
    assert refusal(await validated(harness, final)) == (403, "Forged")


async def test_record_of_another_installation_is_refused(build: Build, harness: Harness) -> None:
    final = builders.created(await harness.dress(asking()))
    reserving = await build(injection="dra")
    assert refusal(await validated(reserving, final)) == (403, "Forged")


async def test_binding_is_allowed_on_proven_nodes_only(build: Build) -> None:
    shared = Shared()
    harness = await build(assemble=sharing(shared), **BIND)
    shared.has(await harness.create(asking()))
    answers = {name: await harness.validate(binding(name)) for name in ("node-a", "node-b", "node-c")}
    assert {name for name, one in answers.items() if one["allowed"]} == {"node-a"}
    assert {one["status"]["reason"] for one in answers.values() if not one["allowed"]} == {"NoProvenNode"}


async def test_binding_needs_what_the_namespace_requires_by_now(build: Build) -> None:
    namespaces = WatchedNamespaces(Api())

    def requires(hash: str, version: str) -> None:
        meta = {"name": "ml", "annotations": {"gpuwarden.io/required-hash": hash}, "resourceVersion": version}
        namespaces.view.changed({"metadata": meta})

    requires(HASH, "1")
    shared = Shared()
    harness = await build(assemble=sharing(shared, namespaces), **BIND)
    shared.has(await harness.create(raw_pod(raw_container(gpus=1))))
    assert (await harness.validate(binding("node-a")))["allowed"]
    requires(OTHER_HASH, "2")
    assert refusal(await harness.validate(binding("node-a"))) == (403, "Forged")


async def test_explanation_names_the_nodes_that_kube_scheduler_may_choose(harness: Harness) -> None:
    answer = (await harness.tls.post("/explain", json=asking())).json()
    assert answer["message"].endswith("kube-scheduler chooses the node and the GPUs")
    assert any(one["fits"] for one in answer["nodes"])


async def test_copy_in_an_installation_with_another_injection_has_no_claim(build: Build, harness: Harness) -> None:
    copy = await harness.create(asking(2))
    copied = await (await build()).create(copy, uid="another", pod_uid="another")
    assert "resourceClaims" not in copied["spec"]
    assert "gpuwarden.io/gpu-uuid" in copied["metadata"]["annotations"]


async def test_namespace_with_another_injection_reserves_on_labelled_nodes(build: Build) -> None:
    namespaces = WatchedNamespaces(Api())
    meta = {"name": "ml", "annotations": {"gpuwarden.io/injection": "nvidia"}, "resourceVersion": "1"}
    namespaces.view.changed({"metadata": meta})
    nodes = [{**one, "labels": dict(one["labels"])} for one in INVENTORY["nodes"]]
    harness = await build({"nodes": nodes}, assemble=with_namespaces(namespaces), **BIND)
    assert refusal(await harness.mutate(asking()))[1] == "NoSuitableNode"
    nodes = [{**one, "labels": {**one["labels"], "gpuwarden.io/injection": "nvidia"}} for one in nodes]
    harness = await build({"nodes": nodes}, assemble=with_namespaces(namespaces), **BIND)
    made = await harness.create(asking())
    assert "resourceClaims" not in made["spec"], "its GPUs are reserved at the Binding"
