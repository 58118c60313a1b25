"""Why pods wait whose GPUs kube-scheduler chooses."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.builders import HASH, NOW, OTHER_HASH, Raw, claim, created, device, evidence, node, raw_container, raw_pod
from tests.recorded_events import RecordedEvents
from webhook.core.claim import ClaimRules
from webhook.core.decide import EvidencePolicy
from webhook.core.dress import DressRules, left_to_scheduler
from webhook.core.fleet import Fleet
from webhook.core.injection import Injection
from webhook.core.reasons import Reason
from webhook.core.reserve import Reserve
from webhook.dra.unplaced_pods import AGAIN_AFTER, FIRST_AFTER, UnplacedPods

RULES = ClaimRules(default_injection=Injection.DRA, default_reserve=Reserve.BIND)


class Scene:
    def __init__(self) -> None:
        self.now, self.heard = NOW, RecordedEvents()
        self.fleet = Fleet(injection=None)
        self.fleet.put(node("node-a", device("GPU-1")), NOW)
        self.fleet.set_evidence("node-a", evidence("node-a", HASH), NOW)
        self.pods = UnplacedPods(self.fleet, EvidencePolicy(), self.heard, lambda: self.now)

    async def after(self, passed: timedelta) -> list[tuple[str, Reason]]:
        self.now += passed
        self.heard.recorded.clear()
        await self.pods.step()
        return list(self.heard.recorded)


def waiting(hash: str = HASH, rules: ClaimRules = RULES, **spec: object) -> Raw:
    wish = raw_pod(raw_container("main", gpus=1), annotations={"gpuwarden.io/required-hash": hash})
    raw = created(left_to_scheduler(wish, claim(wish, rules), DressRules(), "gpuwarden-x"))
    raw["spec"] |= spec
    return raw


async def test_pod_is_told_what_no_node_has_and_not_at_once() -> None:
    scene = Scene()
    raw = waiting(OTHER_HASH)
    scene.pods.changed(raw)
    assert await scene.after(FIRST_AFTER - timedelta(seconds=1)) == []
    assert await scene.after(timedelta(seconds=1)) == [(raw["metadata"]["name"], Reason.NO_PROVEN_NODE)]
    assert "1 has a different hash" in scene.heard.messages[0]
    scene.pods.changed(raw)
    assert await scene.after(AGAIN_AFTER - timedelta(seconds=1)) == []
    assert len(await scene.after(timedelta(seconds=1))) == 1


@pytest.mark.parametrize(
    "raw",
    [
        waiting(),
        waiting(OTHER_HASH, ClaimRules(default_injection=Injection.DRA)),
        waiting(OTHER_HASH, nodeName="node-a"),
        waiting(OTHER_HASH, schedulingGates=[{"name": "example.test/hold"}]),
    ],
    ids=["a node fits", "reserved", "on a node", "held by a gate"],
)
async def test_other_pods_are_not_told(raw: Raw) -> None:
    scene = Scene()
    scene.pods.changed(raw)
    assert await scene.after(FIRST_AFTER) == []


async def test_pod_that_is_placed_or_gone_is_forgotten() -> None:
    scene, placed = Scene(), waiting(OTHER_HASH, nodeName="node-a")
    ends: list[Callable[[], None]] = [
        lambda: scene.pods.changed(placed),
        lambda: scene.pods.deleted(placed),
        lambda: scene.pods.replaced({}),
    ]
    for end in ends:
        scene.pods.replaced({"ml/x": waiting(OTHER_HASH)})
        end()
        assert await scene.after(FIRST_AFTER) == []
