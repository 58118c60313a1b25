"""What a ResourceClaim can ask kube-scheduler for, and what it cannot."""

from typing import Any

import pytest

from webhook.core.claim_keys import ClaimRecord
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_demand import demand_of, has_claim_of, pod_claim_of, template_of
from webhook.core.proof_claims import GpuDemand, demanded_spec
from webhook.core.proof_devices import hash_attribute

NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"
UUID = "GPU-a0000000-0000-4000-8000-000000000000"


def record(gpus: int = 1, hashes: tuple[str, ...] = ("sha256:aa11",), **members: Any) -> ClaimRecord:
    return ClaimRecord(gpus=gpus, hashes=hashes, **members)


def selectors(demand: GpuDemand) -> dict[str, str | None]:
    spec = demanded_spec(demand, gpu_driver="gpu.nvidia.com", gpu_class="gpus", evicts=True)
    found = {one["name"]: one["exactly"].get("selectors") for one in spec["devices"]["requests"]}
    return {name: None if one is None else one[0]["cel"]["expression"] for name, one in found.items()}


def parameters(demand: GpuDemand) -> Any:
    spec = demanded_spec(demand, gpu_driver="gpu.nvidia.com", gpu_class="gpus", evicts=True)
    (config,) = spec["devices"]["config"]
    return config["opaque"]["parameters"]


@pytest.mark.parametrize(
    ("asked", "template"),
    [
        (record(), "gpuwarden-1-aa11"),
        (record(8), "gpuwarden-8-aa11"),
        (record(9), None),
        (record(hashes=("sha256:aa11", "sha256:bb22")), None),
        (record(hashes=()), None),
        (record(hashes=("SHA256:AA",)), None),
        (record(requirements=("model=H100",)), None),
        (record(node="node-a", devices=(UUID,)), None),
    ],
    ids=["one", "eight", "nine", "two hashes", "no hash", "not digits", "label", "map"],
)
def test_claim_is_made_from_a_template_for_one_readable_hash(asked: ClaimRecord, template: str | None) -> None:
    assert template_of(asked) == template
    entry = pod_claim_of(asked, NAME)
    assert entry == (
        {"name": "gpuwarden", "resourceClaimName": NAME}
        if template is None
        else {"name": "gpuwarden", "resourceClaimTemplateName": template}
    )
    assert has_claim_of([entry], asked)
    assert not has_claim_of([entry, entry], asked)
    assert not has_claim_of([{"name": "gpuwarden", "resourceClaimTemplateName": "gpuwarden-2-aa11"}], asked)
    assert not has_claim_of([{"name": "gpuwarden", "resourceClaimName": ""}], asked)
    assert not has_claim_of(None, asked)


def test_demand_has_all_that_the_claim_wants() -> None:
    hashes = ("sha256:aa11", "aa11", "SHA256:AA")
    found = demand_of(record(2, hashes, requirements=("brand=Nvidia", "model=H100.X-80GB")))
    assert found == GpuDemand(
        2, ("aa11", hash_attribute("SHA256:AA")), (("brand", "Nvidia"), ("productName", "H100.X-80GB"))
    )
    assert demand_of(record(node="node-a", devices=(UUID,))).uuids == (UUID,)


@pytest.mark.parametrize(
    ("asked", "mistake"),
    [
        (record(17), "17 GPUs; a ResourceClaim has at most 16"),
        (record(hashes=tuple(map(str, range(65)))), "accepts 65 hashes"),
        (record(shared=True), "gpuwarden.io/shared: a ResourceClaim takes whole GPUs"),
        (record(node="node-a", devices=(f"MIG-{UUID}/1/0",)), "the map names MIG devices"),
        (record(2, node="node-a", devices=(UUID, UUID)), "the map names a GPU twice"),
        (record(requirements=("memory=80",)), "memory=80: the ResourceSlices of GPUs do not show it"),
        (record(requirements=("fudo.org/gpu.h100",)), "do not show it"),
        (record(requirements=("model=' || true || '",)), "do not show it"),
        (record(requirements=("model=",)), "do not show it"),
        (record(node="node-a", devices=("0",)), "do not show 0; name GPUs by UUID"),
        (record(node="node-a", devices=("GPU-1' || true || '",)), "name GPUs by UUID"),
        (record(2, node="node-a", devices=(UUID,)), "the map lists 1 GPUs, the pod asks for 2"),
    ],
)
def test_what_a_claim_cannot_ask_for_is_a_mistake(asked: ClaimRecord, mistake: str) -> None:
    with pytest.raises(InvalidPodError) as caught:
        demand_of(asked)
    assert mistake in str(caught.value)


def test_selectors_name_hashes_attributes_and_uuids() -> None:
    own, gpu = "device.attributes['attested.gpuwarden.io']", "device.attributes['gpu.nvidia.com']"
    places = f"{own}.index >= 0 && {own}.index <= -1 + {own}.count"
    assert selectors(GpuDemand(1, ("aa11",))) == {
        "proof0": f"{own}.hash == 'aa11' && {own}.mode == 'native' && {places}",
        "gpu0": None,
    }
    assert selectors(GpuDemand(1, ("aa11", "bb22"), (("productName", "H100.X-80GB"),))) == {
        "proof0": f"{own}.hash in ['aa11', 'bb22'] && {own}.mode == 'native' && {places}",
        "gpu0": f"has({gpu}.productName) && {gpu}.productName.matches('^H100[.]X[ -]80GB$')",
    }
    assert selectors(GpuDemand(1, (), (), (UUID,))) == {
        "proof0": f"{own}.mode == 'native' && {gpu}.uuid == '{UUID}'",
        "gpu0": f"{gpu}.uuid == '{UUID}'",
    }


def test_only_claims_of_a_stateful_set_that_name_a_gpu_take_one_that_is_kept_for_it() -> None:
    own, gpu = "device.attributes['attested.gpuwarden.io']", "device.attributes['gpu.nvidia.com']"
    named = selectors(GpuDemand(1, uuids=(UUID,), kept_for="0a1b"))
    assert named["proof0"] == f"{own}.mode in ['native', 'mapped-0a1b'] && {gpu}.uuid == '{UUID}'"
    assert selectors(GpuDemand(1, kept_for="0a1b")) == selectors(GpuDemand(1))


def test_plugin_on_the_node_is_told_the_hashes() -> None:
    assert parameters(GpuDemand(1, ("aa11",))) == {"hash": "aa11"}
    assert parameters(GpuDemand(1, ("aa11", "bb22"))) == {"hashes": ["aa11", "bb22"]}
    assert parameters(GpuDemand(1)) == {"hashes": []}
