"""Nodes on which the kubelet chooses the GPUs, by a device plugin: when a claim may go there."""

import pytest
from attrs import evolve

from tests.builders import NOW, SECOND, claim, device, fleet, node, raw_container, raw_pod, reservation, slot
from webhook.core.check import kubelet_counts_gpus
from webhook.core.claim import Claim, ClaimRules
from webhook.core.decide import EvidencePolicy, decide, explain
from webhook.core.device import CLAIMED, Node
from webhook.core.fleet import Fleet
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.reasons import Reason
from webhook.core.reservation import GpuDelivery, Orphan, Phase, Reservation
from webhook.core.verdict import Deny

LAX = EvidencePolicy()
LABEL = "gpuwarden.io/injection"
GPUS = tuple(device(f"GPU-{number}") for number in (1, 2, 3))
OWN = reservation(slot("GPU-1"), phase=Phase.FINALIZED, delivery=GpuDelivery.RECORDED)


def plugin_node(gpus: int | None = 3) -> Node:
    return node("node-a", *GPUS, labels={LABEL: "plugin"}, plugin_gpus=gpus)


def asked(gpus: int = 1, injection: Injection = Injection.PLUGIN) -> Claim:
    return claim(raw_pod(raw_container(gpus=gpus)), ClaimRules(hash_policy=HashPolicy("ml", injection=injection)))


def verdict(found: Fleet, wish: Claim | None = None) -> tuple[Reason, str] | str:
    """The node, or the denial."""
    places = decide(wish or asked(), found, LAX)
    return (places.reason, places.message.partition("fit: ")[2]) if isinstance(places, Deny) else places[0].node


def with_held(*held: Reservation, on: Node | None = None) -> Fleet:
    found = fleet(on or plugin_node())
    for one in held:
        found.hold(one)
    return found


def test_claim_gets_as_many_gpus_as_are_free() -> None:
    assert verdict(with_held(OWN), asked(2)) == "node-a"
    assert verdict(with_held(OWN), asked(3)) == (Reason.NO_FREE_DEVICE, "1 has fewer than 3 free GPUs")


@pytest.mark.parametrize(("offered", "fits"), [(0, 0), (1, 0), (2, 1), (3, 2), (9, 2), (None, 2)])
def test_no_more_is_reserved_than_the_plugin_offers(offered: int | None, fits: int) -> None:
    """One of the three GPUs is in use."""
    found = with_held(OWN, on=plugin_node(offered))
    assert [isinstance(decide(asked(gpus), found, LAX), tuple) for gpus in (1, 2, 3)] == [
        gpus <= fits for gpus in (1, 2, 3)
    ]


def test_gpus_of_pods_without_a_reservation_count_too() -> None:
    """The plugin gave one to a stranger; the reservation that stood for it will get another one."""
    marked = evolve(plugin_node(), devices=(evolve(GPUS[0], mismatch="in use"), *GPUS[1:]))
    found = with_held(evolve(OWN, delivery=GpuDelivery.AWAITED), on=marked)
    assert verdict(found) == "node-a"
    assert verdict(found, asked(2)) == (Reason.NO_FREE_DEVICE, "1 has fewer than 2 free GPUs")


def test_node_without_its_plugin_is_named() -> None:
    assert verdict(with_held(on=plugin_node(0))) == (Reason.NODE_NOT_READY, "1 has no device plugin for its GPUs")
    (fit,) = explain(asked(), with_held(on=plugin_node(0)), LAX)
    assert fit.objection is not None
    assert fit.objection.text_for(asked()) == "no device plugin for its GPUs"


UNCOUNTED: dict[str, Reservation] = {
    "another injection": evolve(OWN, delivery=None),
    "orphan": evolve(OWN, orphan=Orphan(NOW, SECOND)),
    "orphan before its delivery": evolve(OWN, delivery=GpuDelivery.AWAITED, orphan=Orphan(NOW, SECOND)),
}
IN_USE = (Reason.NO_FREE_DEVICE, "1 has a GPU in use that its device plugin considers free")


@pytest.mark.parametrize("held", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_node_with_a_gpu_that_its_plugin_takes_for_free_gets_no_pods(held: Reservation) -> None:
    """The kubelet could give this GPU to the pod."""
    found = with_held(held)
    assert verdict(found) == IN_USE
    denied = kubelet_counts_gpus(asked(), "node-a", found)
    assert denied is not None
    assert denied.reason is Reason.NO_FREE_DEVICE
    found.free(held)
    assert verdict(found) == "node-a"
    assert kubelet_counts_gpus(asked(), "node-a", found) is None


def test_gpu_of_a_resource_claim_is_in_use_too() -> None:
    claimed = evolve(plugin_node(), devices=(evolve(GPUS[0], mismatch=CLAIMED), *GPUS[1:]))
    assert verdict(with_held(on=claimed)) == IN_USE


def test_orphan_that_is_alive_again_blocks_the_node_no_more() -> None:
    found = with_held(evolve(OWN, orphan=Orphan(NOW, SECOND)))
    found.hold(OWN)
    assert verdict(found) == "node-a"


def test_pods_of_other_injections_wait_until_the_kubelet_has_chosen() -> None:
    """The node had the injection `plugin` a moment ago: its kubelet may choose any GPU."""
    wish = asked(injection=Injection.NVIDIA)
    before = evolve(OWN, delivery=GpuDelivery.AWAITED)
    found = with_held(before, on=node("node-a", *GPUS))
    assert verdict(found, wish) == (Reason.NO_FREE_DEVICE, "1 has a GPU that its kubelet has not chosen yet")
    found.hold(OWN)
    assert verdict(found, wish) == "node-a"
    found.hold(before)
    found.free(before)
    assert verdict(found, wish) == "node-a"


def test_claims_without_gpus_go_there_anyway() -> None:
    wish = claim(raw_pod(annotations={"gpuwarden.io/required-hash": "sha256:aa11"}))
    found = with_held(evolve(OWN, delivery=None))
    found.set_evidence("node-a", None, NOW)
    assert verdict(found, wish) == (Reason.NO_PROVEN_NODE, "1 has no evidence")
    assert kubelet_counts_gpus(wish, "node-a", found) is None
