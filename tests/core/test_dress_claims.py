"""Pods whose GPUs come from a ResourceClaim: how they are dressed, and which forgeries are found."""

import copy
from collections.abc import Callable
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import HASH, claim, created, identity, raw_container, raw_env, raw_pod, reservation, slot
from webhook.core.check import (
    has_modes_of_namespace,
    matches_queued_pod,
    matches_reservation,
    no_bypass_fields,
    no_gpu_fields,
    precheck,
)
from webhook.core.claim import ClaimRules, recorded_claim
from webhook.core.dress import (
    Allocation,
    DressRules,
    MapVisible,
    changes,
    dressed,
    undressed,
    waiting,
    with_runtime_class,
)
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.pod import Pod
from webhook.core.pod_claims import own_claim_of
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny

Raw = dict[str, Any]

NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"
OTHER_NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000b"
ENTRY = {"name": "gpuwarden", "resourceClaimName": NAME}
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
CUDA = {"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-1"}
RULES = DressRules()
IN_DRA = ClaimRules(hash_policy=HashPolicy("ml", injection=Injection.DRA))
WISH = raw_pod(
    raw_container("main", gpus=1, env=raw_env(A="b")),
    raw_container("helper", resources={"limits": {"cpu": "1"}}),
    init=[raw_container("prepare", gpus=1)],
)
CLAIM = claim(WISH, IN_DRA)
HELD = reservation(slot("GPU-1"), id="r-1", node="node-a", digest=CLAIM.digest)


def outfit(name: str = NAME, **members: Any) -> Allocation:
    return Allocation(CLAIM, ("node-a",), "r-1", ("GPU-1",), claim_name=name, **members)


def worn(raw: Raw = WISH, fit: Allocation | None = None, rules: DressRules = RULES) -> Raw:
    """The pod after the patch. Dressing it again changes nothing."""
    fit = fit or outfit()
    clothed = dressed(raw, fit, rules)
    patched: Raw = jsonpatch.JsonPatch(changes(raw, clothed)).apply(raw)
    assert patched == clothed
    assert changes(patched, dressed(patched, fit, rules)) == []
    return patched


def containers(raw: Raw) -> dict[str, Raw]:
    spec = raw["spec"]
    return {one["name"]: one for one in (*spec.get("initContainers", ()), *spec["containers"])}


def test_containers_that_asked_use_the_claim_and_no_request_is_left() -> None:
    raw = worn()
    assert raw["spec"]["resourceClaims"] == [ENTRY]
    found = containers(raw)
    assert found["main"]["resources"] == {"limits": {}, "requests": {}, "claims": [{"name": "gpuwarden"}]}
    assert found["prepare"]["resources"]["claims"] == [{"name": "gpuwarden"}]
    assert found["helper"]["resources"] == {"limits": {"cpu": "1"}}
    assert found["main"]["env"] == [*raw_env(A="b"), CUDA, VOID]
    assert found["prepare"]["env"] == [CUDA, VOID]
    assert found["helper"]["env"] == [VOID]
    assert raw["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-1"


def test_without_a_request_every_container_uses_the_claim() -> None:
    wish = raw_pod(raw_container("a"), raw_container("b"), annotations={"gpuwarden.io/gpu-count": "1"})
    asked = claim(wish, IN_DRA)
    raw = worn(wish, Allocation(asked, ("node-a",), "r-1", ("GPU-1",), claim_name=NAME))
    assert [one["resources"] for one in raw["spec"]["containers"]] == [{"claims": [{"name": "gpuwarden"}]}] * 2


def test_users_own_variables_expose_no_other_gpu() -> None:
    wish = copy.deepcopy(WISH)
    wish["spec"]["containers"][0]["env"] = raw_env(NVIDIA_VISIBLE_DEVICES="all", CUDA_VISIBLE_DEVICES="7")
    assert containers(worn(wish))["main"]["env"] == [CUDA, VOID]


def test_queued_pod_gets_its_claim_before_its_gpus() -> None:
    raw = waiting(WISH, CLAIM, RULES, "because", claim_name=NAME)
    assert raw["spec"]["resourceClaims"] == [ENTRY]
    main = containers(raw)["main"]
    assert main["resources"]["claims"] == [{"name": "gpuwarden"}]
    assert [one["name"] for one in main["env"]] == ["A", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"]
    assert "valueFrom" in main["env"][1]
    assert main["env"][2] == VOID
    opened = worn(raw, outfit(has_waited=True))
    assert opened["spec"]["containers"] == raw["spec"]["containers"]
    assert opened["spec"]["resourceClaims"] == [ENTRY]


def test_undressed_pod_has_no_claim_of_another_pod() -> None:
    bare = undressed(worn())
    assert "resourceClaims" not in bare["spec"]
    assert all("claims" not in one.get("resources", {}) for one in containers(bare).values())
    assert own_claim_of(worn(bare, outfit(OTHER_NAME))["spec"]) == OTHER_NAME


def test_undressing_leaves_claims_of_other_forms() -> None:
    raw = raw_pod(raw_container("main", resources={"claims": [{"name": "gpuwarden"}]}))
    raw["spec"]["resourceClaims"] = [{"name": "gpuwarden", "resourceClaimTemplateName": "another-1-aa11"}]
    assert undressed(raw)["spec"] == raw["spec"]


def test_default_dra_needs_no_runtime_class_and_shows_uuids() -> None:
    default = DressRules(Injection.DRA, runtime_class="nvidia", map_visible=MapVisible.INDEX)
    rules = default.of(CLAIM)
    assert with_runtime_class(WISH, rules) is WISH
    assert rules.map_visible is MapVisible.UUID
    assert default.hides_gpus
    assert default.removes_request


@pytest.mark.parametrize("default", Injection)
@pytest.mark.parametrize("own", [Injection.NVIDIA, Injection.CUDA, Injection.DRA])
def test_pod_is_dressed_by_its_own_injection(own: Injection, default: Injection) -> None:
    rules = ClaimRules(hash_policy=HashPolicy("ml", injection=own), default_injection=default)
    wish = raw_pod(raw_container("main"), annotations={"gpuwarden.io/gpu-count": "1"})
    fit = Allocation(claim(wish, rules), ("node-a",), "r-1", ("GPU-1",), claim_name=NAME)
    raw = worn(wish, fit, DressRules(default))
    shown = {one["name"]: one["value"] for one in raw["spec"]["containers"][0]["env"]}
    assert shown["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    expected = {Injection.NVIDIA: "GPU-1", Injection.CUDA: None, Injection.DRA: "void"}[own]
    assert shown.get("NVIDIA_VISIBLE_DEVICES") == expected
    assert ("resourceClaims" in raw["spec"]) is (own is Injection.DRA)


# Forgeries.


def judged(raw: Raw) -> Deny | None:
    pod = Pod.parse(raw)
    asked = recorded_claim(pod)
    assert asked is not None
    return matches_reservation(raw, asked, HELD, identity(), RULES) or no_bypass_fields(pod, RULES.of(asked))


def without_entry(raw: Raw) -> None:
    del raw["spec"]["resourceClaims"]


def with_another_form(raw: Raw) -> None:
    raw["spec"]["resourceClaims"] = [{"name": "gpuwarden", "resourceClaimName": "shared-gpus"}]


def with_a_template(raw: Raw) -> None:
    raw["spec"]["resourceClaims"] = [{"name": "gpuwarden", "resourceClaimTemplateName": "gpuwarden-1-aa11"}]


def with_another_claim(raw: Raw) -> None:
    raw["spec"]["resourceClaims"].append({"name": "more", "resourceClaimName": OTHER_NAME})


def with_the_claim_twice(raw: Raw) -> None:
    raw["spec"]["resourceClaims"].append({"name": "gpuwarden", "resourceClaimName": OTHER_NAME})


def with_a_container_more(raw: Raw) -> None:
    containers(raw)["helper"]["resources"]["claims"] = [{"name": "gpuwarden"}]


def with_one_request_of_the_claim(raw: Raw) -> None:
    containers(raw)["main"]["resources"]["claims"] = [{"name": "gpuwarden", "request": "gpu0"}]


def without_its_use(raw: Raw) -> None:
    del containers(raw)["main"]["resources"]["claims"]


def with_the_runtimes_variable(raw: Raw) -> None:
    containers(raw)["main"]["env"][-1]["value"] = "all"


def with_another_injection(raw: Raw) -> None:
    record = raw["metadata"]["annotations"]["gpuwarden.io/claim"].replace('"injection":"dra"', '"injection":"cuda"')
    raw["metadata"]["annotations"]["gpuwarden.io/claim"] = record


FORGERIES: list[Callable[[Raw], None]] = [
    without_entry,
    with_another_form,
    with_a_template,
    with_another_claim,
    with_the_claim_twice,
    with_a_container_more,
    with_one_request_of_the_claim,
    without_its_use,
    with_the_runtimes_variable,
    with_another_injection,
]


def test_pod_with_its_claim_is_admitted() -> None:
    assert judged(created(worn())) is None


@pytest.mark.parametrize("forge", FORGERIES)
def test_forged_pod_is_denied(forge: Callable[[Raw], None]) -> None:
    raw = copy.deepcopy(created(worn()))
    forge(raw)
    assert judged(raw) is not None


@pytest.mark.parametrize("forge", [one for one in FORGERIES if one is not with_another_injection])
def test_forged_queued_pod_is_denied(forge: Callable[[Raw], None]) -> None:
    raw = copy.deepcopy(created(waiting(WISH, CLAIM, RULES, "because", claim_name=NAME)))
    assert matches_queued_pod(raw, Pod.parse(raw), CLAIM, RULES, IN_DRA) is None
    forge(raw)
    assert matches_queued_pod(raw, Pod.parse(raw), CLAIM, RULES, IN_DRA) is not None


def test_new_queued_pod_has_the_injection_of_its_namespace_and_keeps_it() -> None:
    raw = created(waiting(WISH, CLAIM, RULES, "because", claim_name=NAME))
    assert has_modes_of_namespace(CLAIM, IN_DRA) is None
    refused = has_modes_of_namespace(CLAIM, ClaimRules())
    assert refused is not None
    assert refused.reason is Reason.FORGED
    assert matches_queued_pod(raw, Pod.parse(raw), CLAIM, RULES, ClaimRules()) is None
    assert has_modes_of_namespace(claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH})), IN_DRA) is None


def test_claim_of_our_form_is_denied_with_another_injection_and_without_a_claim() -> None:
    raw = raw_pod(raw_container("main"))
    raw["spec"]["resourceClaims"] = [ENTRY]
    for rules in (RULES, DressRules(Injection.DRA)):
        assert no_gpu_fields(Pod.parse(raw), rules) is not None
    assert no_bypass_fields(Pod.parse(raw), RULES) is not None
    assert no_bypass_fields(Pod.parse(raw), DressRules(Injection.DRA)) is None


def test_claims_that_no_resource_claim_can_serve_are_denied() -> None:
    sharing = raw_pod(raw_container("main", gpus=1), annotations={"gpuwarden.io/shared": "true"})
    many = raw_pod(raw_container("main", gpus=17))
    for raw, words in ((sharing, "takes whole GPUs"), (many, "17 GPUs; a ResourceClaim has at most 16")):
        refused = precheck(Pod.parse(raw), claim(raw, IN_DRA), RULES)
        assert refused is not None
        assert words in refused.message
        assert precheck(Pod.parse(raw), claim(raw), RULES) is None
    most = raw_pod(raw_container("main", gpus=16))
    assert precheck(Pod.parse(most), claim(most, IN_DRA), RULES) is None


resource_claims = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["gpuwarden", "other"])},
        optional={
            "resourceClaimName": st.sampled_from([NAME, OTHER_NAME, "x", None]),
            "resourceClaimTemplateName": st.sampled_from(["gpuwarden-1-aa11", None]),
        },
    ),
    max_size=3,
)
uses = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["gpuwarden", "other"])}, optional={"request": st.just("gpu0")}),
    max_size=3,
)


@given(
    st.one_of(st.none(), resource_claims), st.lists(st.one_of(st.none(), uses), min_size=3, max_size=3), st.booleans()
)
def test_any_claims_in_a_pod_are_dressed_once(
    entries: list[Raw] | None, used: list[list[Raw] | None], waits: bool
) -> None:
    raw = copy.deepcopy(WISH)
    if entries is not None:
        raw["spec"]["resourceClaims"] = entries
    for container, claims in zip(containers(raw).values(), used, strict=True):
        container["resources"] = {**container.get("resources", {}), "claims": claims}
    Pod.parse(raw)
    worn(raw, outfit(has_waited=waits))
    target = dressed(undressed(dressed(raw, outfit(), RULES)), outfit(OTHER_NAME), RULES)
    found = [one for one in target["spec"]["resourceClaims"] if one["name"] == "gpuwarden"]
    assert all(one == {"name": "gpuwarden", "resourceClaimName": OTHER_NAME} for one in found)
    assert found
