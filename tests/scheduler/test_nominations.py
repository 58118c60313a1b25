"""Which pods get a nominated node after their Binding was refused."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import NOW, Raw, device, node
from tests.scheduler.test_wakeups import FakeWaker
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.device import DeviceUuid, Slot
from webhook.core.reservation import Phase, Reservation, ReservationId
from webhook.scheduler.nominations import PAUSE, Nominations

REFUSED = {"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": "no free GPU"}


class Scene:
    """Two nodes with a GPU each, of which the first is taken."""

    def __init__(self) -> None:
        self.now: datetime = NOW
        self.waker = FakeWaker()
        self.passes = 0
        self.fleet = builders.fleet(node("node-a", device("GPU-a0")), node("node-b", device("GPU-b0")))
        self.fleet.hold(held("node-a", "GPU-a0"))
        self.nominations = Nominations(self.fleet, EvidencePolicy(), self.waker, lambda: self.now, self.wake)

    def wake(self) -> None:
        self.passes += 1


def held(node_: str, uuid: str) -> Reservation:
    slots = (Slot(DeviceUuid(uuid), 0),)
    return Reservation(ReservationId(f"r-{uuid}"), "ml", "d", node_, slots, NOW, None, phase=Phase.FINALIZED)


def waiting(
    condition: Raw | None = None, nominated: str | None = None, reserve: str | None = "bind", **spec: Any
) -> Raw:
    annotations = {"gpuwarden.io/claim": ClaimRecord(gpus=1, reserve=reserve).text()}
    raw = builders.raw_pod(name="late", uid="uid-1", annotations=annotations, **spec)
    return {**raw, "status": {"conditions": [condition or REFUSED], "nominatedNodeName": nominated}}


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_refused_pod_gets_a_node_with_a_free_gpu(scene: Scene) -> None:
    scene.nominations.changed(waiting())
    assert scene.passes == 1
    await scene.nominations.step()
    assert scene.waker.nominated == [("uid-1", "node-b")]


@pytest.mark.parametrize(
    "raw",
    [
        waiting({**REFUSED, "reason": "Unschedulable"}),
        waiting({**REFUSED, "status": "True"}),
        waiting(nominated="node-b"),
        waiting(reserve=None),
        waiting(nodeName="node-a"),
        {**waiting(), "metadata": {"name": "late", "uid": "uid-1", "annotations": {"gpuwarden.io/claim": "["}}},
        {**waiting(), "status": {"conditions": "none"}},
    ],
    ids=["unschedulable", "scheduled", "has one that fits", "reserved", "on a node", "no claim", "unreadable"],
)
async def test_other_pods_get_none(scene: Scene, raw: Raw) -> None:
    scene.nominations.changed(raw)
    await scene.nominations.step()
    assert scene.waker.nominated == []


async def test_full_nominated_node_is_replaced(scene: Scene) -> None:
    scene.nominations.replaced({"ml/late": waiting(nominated="node-a")})
    await scene.nominations.step()
    assert scene.waker.nominated == [("uid-1", "node-b")]


async def test_pod_that_no_node_fits_waits_for_one(scene: Scene) -> None:
    scene.fleet.hold(held("node-b", "GPU-b0"))
    scene.nominations.changed(waiting())
    await scene.nominations.step()
    assert scene.waker.nominated == []
    scene.fleet.free(held("node-b", "GPU-b0"))
    await scene.nominations.step()
    assert scene.waker.nominated == [("uid-1", "node-b")]


async def test_pod_that_is_refused_again_is_nominated_again_after_a_pause(scene: Scene) -> None:
    scene.nominations.changed(waiting())
    await scene.nominations.step()
    scene.nominations.changed(waiting({**REFUSED, "message": "again"}))
    await scene.nominations.step()
    assert len(scene.waker.nominated) == 1
    scene.now += PAUSE
    await scene.nominations.step()
    assert len(scene.waker.nominated) == 2


async def test_bound_or_deleted_pod_is_forgotten(scene: Scene) -> None:
    scene.nominations.changed(waiting())
    scene.nominations.changed(waiting(nodeName="node-b"))
    scene.nominations.changed(waiting())
    scene.nominations.deleted(waiting())
    await scene.nominations.step()
    assert scene.waker.nominated == []


async def test_pass_ends_while_the_api_server_is_away_and_is_repeated(scene: Scene) -> None:
    scene.nominations.changed(waiting())
    scene.waker.is_away = True
    await scene.nominations.step()
    scene.waker.is_away = False
    scene.now += timedelta(seconds=1)
    await scene.nominations.step()
    assert scene.waker.nominated == [("uid-1", "node-b")]
