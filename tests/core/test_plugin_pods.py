"""Pods whose GPUs the kubelet chooses, by a device plugin: how they are dressed, and which are denied."""

import copy
from collections.abc import Callable

import jsonpatch
import pytest

from tests.builders import (
    HASH,
    Raw,
    claim,
    created,
    identity,
    raw_container,
    raw_env,
    raw_pod,
    raw_sidecar,
    reservation,
    slot,
)
from webhook.core.binding import Binding
from webhook.core.check import (
    binds_as_reserved,
    gets_other_gpus,
    matches_queued_pod,
    matches_reservation,
    precheck,
)
from webhook.core.claim import ClaimRules, recorded_claim
from webhook.core.dress import Allocation, DressRules, changes, dressed, waiting, with_runtime_class
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import GpuDelivery
from webhook.core.verdict import Deny

RULES = DressRules()
PLUGIN = ClaimRules(hash_policy=HashPolicy("ml", injection=Injection.PLUGIN))
WISH = raw_pod(
    raw_container("main", gpus=2, env=raw_env(A="b")),
    raw_container("other", gpus=1),
    raw_container("helper"),
    init=[raw_container("prepare"), raw_sidecar("proxy")],
    annotations={"gpuwarden.io/required-hash": HASH},
)
CLAIM = claim(WISH, PLUGIN)
HELD = reservation(
    *(slot(f"GPU-{number}") for number in (1, 2, 3)), id="r-1", digest=CLAIM.digest, delivery=GpuDelivery.AWAITED
)
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}


def worn(raw: Raw = WISH) -> Raw:
    """The pod after the patch. Dressing it again changes nothing."""
    fit = Allocation(claim(raw, PLUGIN), ("node-a",), "r-1", HELD.uuids)
    clothed = dressed(raw, fit, RULES)
    patched: Raw = jsonpatch.JsonPatch(changes(raw, clothed)).apply(raw)
    assert patched == clothed
    assert changes(patched, dressed(patched, fit, RULES)) == []
    return copy.deepcopy(patched)


def judged(raw: Raw) -> Deny | None:
    pod = Pod.parse(raw)
    asked = recorded_claim(pod)
    assert asked is not None
    return matches_reservation(raw, asked, HELD, identity(), RULES) or gets_other_gpus(pod, asked, RULES.of(asked))


def test_request_stays_and_no_gpu_is_named() -> None:
    raw = worn()
    assert raw["spec"]["containers"][:2] == WISH["spec"]["containers"][:2]
    others = (raw["spec"]["containers"][2], *raw["spec"]["initContainers"])
    assert [one["env"] for one in others] == [[VOID]] * 3
    assert sorted(raw["metadata"]["annotations"]) == [
        *("fudo.org/gpu.node", "fudo.org/gpu.reservation-id"),
        *("gpuwarden.io/claim", "gpuwarden.io/node", "gpuwarden.io/required-hash", "gpuwarden.io/reservation-id"),
    ]
    assert "GPU-" not in str(raw)
    assert "node-a" in str(raw["spec"]["affinity"])
    assert CLAIM.record.injection == "plugin"
    assert CLAIM.delivery is GpuDelivery.AWAITED


def test_final_pod_is_admitted() -> None:
    assert judged(created(worn())) is None


def test_plugin_needs_the_runtime_class() -> None:
    rules = DressRules(runtime_class="nvidia").of(CLAIM)
    assert with_runtime_class(WISH, rules)["spec"]["runtimeClassName"] == "nvidia"


CONTAINERS: dict[str, tuple[Raw, str]] = {
    "variable": (
        raw_pod(raw_container(gpus=1, env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "void": (
        raw_pod(raw_container(gpus=1, env=raw_env(NVIDIA_VISIBLE_DEVICES="void"))),
        "spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "cuda": (
        raw_pod(raw_container(gpus=1, env=raw_env(CUDA_VISIBLE_DEVICES="0"))),
        "spec.containers[0].env[CUDA_VISIBLE_DEVICES]",
    ),
    "envFrom": (
        raw_pod(raw_container(gpus=1, envFrom=[{"secretRef": {"name": "x"}}])),
        "spec.containers[0].envFrom",
    ),
    "variable of another container": (
        raw_pod(raw_container(gpus=1), raw_container("b", env=raw_env(NVIDIA_VISIBLE_DEVICES="all"))),
        "spec.containers[1].env[NVIDIA_VISIBLE_DEVICES]",
    ),
    "init container": (
        raw_pod(raw_container(gpus=1), init=[raw_container("i", gpus=1)]),
        "spec.initContainers[0].resources[nvidia.com/gpu]",
    ),
    "sidecar": (
        raw_pod(raw_container(gpus=1), init=[raw_sidecar("i", gpus=1)]),
        "spec.initContainers[0].resources[nvidia.com/gpu]",
    ),
}


@pytest.mark.parametrize(("raw", "field"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_container_that_the_plugin_cannot_serve_is_denied(raw: Raw, field: str) -> None:
    denied = precheck(Pod.parse(raw), claim(raw, PLUGIN), RULES)
    assert denied is not None
    assert (denied.reason, denied.causes) == (Reason.INJECTION_CONFLICT, (field,))
    assert precheck(Pod.parse(raw), claim(raw, ClaimRules()), RULES) is None


NAMED: dict[str, Raw] = {
    "label": raw_pod(raw_container(gpus=1), labels={"gpuwarden.io/gpu.model": "h100"}),
    "shared": raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/shared": "true"}),
    "map": raw_pod(
        raw_container(gpus=1),
        annotations={"gpuwarden.io/gpu-map": "0=node-a:0"},
        labels={"apps.kubernetes.io/pod-index": "0"},
    ),
    "map without a line": raw_pod(
        raw_container(gpus=1),
        annotations={"gpuwarden.io/gpu-map": "0=node-a:0"},
        labels={"apps.kubernetes.io/pod-index": "1"},
    ),
    "no request": raw_pod(annotations={"gpuwarden.io/gpu-count": "1"}),
}


@pytest.mark.parametrize("raw", NAMED.values(), ids=NAMED.keys())
def test_claim_for_particular_gpus_or_without_a_request_is_denied(raw: Raw) -> None:
    denied = precheck(Pod.parse(raw), claim(raw, PLUGIN), RULES)
    assert denied is not None
    assert denied.reason is Reason.INJECTION_CONFLICT
    assert denied.hint


def request(raw: Raw, position: int, amount: str | None) -> None:
    part = {} if amount is None else {"nvidia.com/gpu": amount}
    raw["spec"]["containers"][position]["resources"] = {"limits": part, "requests": part}


FORGERIES: dict[str, Callable[[Raw], None]] = {
    "more": lambda raw: request(raw, 0, "3"),
    "fewer": lambda raw: request(raw, 0, "1"),
    "none": lambda raw: request(raw, 1, None),
    "another container": lambda raw: request(raw, 2, "1"),
    "init container": lambda raw: raw["spec"]["initContainers"][0].update(
        resources={"limits": {"nvidia.com/gpu": "1"}}
    ),
    "envFrom": lambda raw: raw["spec"]["containers"][0].update(envFrom=[{"secretRef": {"name": "x"}}]),
    "variable": lambda raw: raw["spec"]["containers"][0]["env"].extend(raw_env(NVIDIA_VISIBLE_DEVICES="all")),
    "not hidden": lambda raw: raw["spec"]["containers"][2].update(env=raw_env(NVIDIA_VISIBLE_DEVICES="all")),
    "GPUs": lambda raw: raw["metadata"]["annotations"].update({"gpuwarden.io/gpu-uuid": "GPU-1,GPU-2,GPU-3"}),
    "another resource": lambda raw: raw["spec"]["containers"][0]["resources"]["limits"].update(
        {"nvidia.com/mig-1g.5gb": "1"}
    ),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
def test_change_by_another_webhook_is_denied(forge: Callable[[Raw], None]) -> None:
    raw = created(worn())
    forge(raw)
    assert judged(raw) is not None


def test_queued_pod_is_judged_like_any_other() -> None:
    def verdict(raw: Raw) -> Deny | None:
        pod = Pod.parse(raw)
        asked = recorded_claim(pod)
        assert asked is not None
        return matches_queued_pod(raw, pod, asked, RULES, PLUGIN)

    queued = waiting(WISH, CLAIM, RULES, "no GPU")
    assert queued["spec"]["containers"][:2] == WISH["spec"]["containers"][:2]
    assert verdict(queued) is None
    forged = copy.deepcopy(queued)
    request(forged, 0, "3")
    assert verdict(forged) is not None


def test_binding_cannot_name_the_gpus_that_stand_for_others() -> None:
    living = Pod.parse(worn())
    found = Binding(identity(), "node-a", {"gpuwarden.io/node": "node-a"})
    assert binds_as_reserved(found, HELD, living) is None
    forged = Binding(identity(), "node-a", {"gpuwarden.io/gpu-uuid": "GPU-1,GPU-2,GPU-3"})
    assert binds_as_reserved(forged, HELD, living) is not None
