"""Queued pods of a namespace with another injection: their claims, their nodes, and their place in the queue."""

from datetime import timedelta

import pytest

from tests import builders
from tests.admission.queue.test_queue import RULES, Scene
from tests.builders import NOW, device, node, raw_container
from webhook.core.claim import ClaimRules
from webhook.core.dress import waiting
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.pod_claims import own_claim_of

LABEL = "gpuwarden.io/injection"
NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"
IN_DRA = ClaimRules(hash_policy=HashPolicy("ml", injection=Injection.DRA))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def come(scene: Scene, name: str = "claims", gpus: int = 1) -> None:
    """Creates a waiting pod whose namespace had the injection `dra`."""
    raw = builders.raw_pod(raw_container(gpus=gpus), name=name, uid=f"uid-{name}")
    gated = waiting(raw, builders.claim(raw, IN_DRA), RULES, "because", claim_name=NAME)
    meta = {**gated["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"}
    scene.show({**gated, "metadata": meta})


def label(scene: Scene, injection: str | None) -> None:
    labels = {} if injection is None else {LABEL: injection}
    scene.fleet.put(node("node-a", device("GPU-0", index=0), device("GPU-1", index=1), labels=labels), NOW)


async def test_pod_waits_for_a_node_of_its_injection_and_keeps_its_claim(scene: Scene) -> None:
    """The namespace may have changed since: the pod keeps the injection of its creation."""
    come(scene)
    assert scene.pods.rejected == {}
    await scene.queue.step()
    assert scene.opened() == {}
    assert "1 has another injection" in scene.gates.reasons["claims"]
    label(scene, "dra")
    await scene.queue.step()
    assert scene.opened() == {"claims": "GPU-0"}
    assert own_claim_of(scene.gates.pods["claims"]["spec"]) == NAME


async def test_pods_of_other_injections_do_not_wait_for_each_other(scene: Scene) -> None:
    come(scene, gpus=2)
    scene.come("variables", seconds=1)
    await scene.queue.step()
    assert scene.opened().keys() == {"variables"}


async def test_reservation_moves_when_its_node_has_changed(scene: Scene) -> None:
    """The gate was not opened: the pod has not seen its GPUs."""
    label(scene, "dra")
    come(scene)
    scene.gates.fails = {"claims"}
    await scene.queue.step()
    assert scene.held() == {"uid-claims": ["GPU-0"]}
    label(scene, "nvidia")
    scene.fleet.put(node("node-b", device("GPU-b"), labels={LABEL: "dra"}), NOW)
    scene.gates.fails = set()
    scene.now += timedelta(seconds=30)
    await scene.queue.step()
    await scene.queue.step()
    assert scene.opened() == {"claims": "GPU-b"}
    assert scene.held() == {"uid-claims": ["GPU-b"]}
