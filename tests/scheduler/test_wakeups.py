"""Pods that we refused on every node are shown to their scheduler again when something changes."""

from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests import builders
from tests.admission.test_namespaces import Api, namespace
from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, device, node, raw_container, raw_pod, reservation, slot
from webhook.admission.namespaces import ClaimReader, WatchedNamespaces
from webhook.core.claim import ClaimRules
from webhook.core.decide import EvidencePolicy
from webhook.core.fleet import Fleet
from webhook.core.reservation import PodIdentity
from webhook.scheduler.wakeups import MAX_FAILURES, NotWokenError, WakerUnavailableError, Wakeups

OURS = "0/3 nodes are available: 2 any text of another version (gpuwarden: NoProvenNode), 1 Insufficient cpu."
OTHERS = "0/3 nodes are available: 3 Insufficient cpu."


class FakeWaker:
    """Records the woken pods; fails while `is_away`."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.nominated: list[tuple[str, str]] = []
        self.asked = 0
        self.is_away = False
        self.refused: set[str] = set()

    async def wake(self, pod: PodIdentity, at: str) -> None:
        self.asked += 1
        if self.is_away:
            raise WakerUnavailableError("away")
        if pod.uid in self.refused:
            raise NotWokenError("a policy is against it")
        assert datetime.fromisoformat(at) >= NOW
        self.woken.append(pod.uid)

    async def nominate(self, pod: PodIdentity, node: str) -> None:
        self.asked += 1
        if self.is_away:
            raise WakerUnavailableError("away")
        if pod.uid in self.refused:
            raise NotWokenError("a policy is against it")
        self.nominated.append((pod.uid, node))


class Scene:
    """One node with two GPUs, a clock that the test sets, and pods that wait."""

    def __init__(self, fleet: Fleet | None = None, claims: ClaimReader | None = None) -> None:
        self.now = NOW
        self.waker = FakeWaker()
        self.fleet = fleet or builders.fleet(node("node-a", device("GPU-a0"), device("GPU-a1")))
        self.waking = Wakeups(
            self.fleet, EvidencePolicy(), claims or ClaimReader(ClaimRules()), self.waker, lambda: self.now
        )

    def prove(self, hash_: str | None = HASH, name: str = "node-a", **members: Any) -> None:
        word = None if hash_ is None else builders.evidence(name, hash_, **members)
        self.fleet.set_evidence(name, word, self.now)

    async def woken(self, wait: float = 0) -> list[str]:
        """The pods that a pass wakes, this many seconds later."""
        self.now += timedelta(seconds=wait)
        self.waker.woken.clear()
        await self.waking.step()
        return list(self.waker.woken)


def waiting(uid: str = "u1", *, message: str = OURS, gpus: int = 0, hash_: str = HASH, **members: Any) -> Raw:
    """A pod as its scheduler leaves it."""
    raw = raw_pod(
        raw_container(gpus=gpus or None), annotations={"gpuwarden.io/required-hash": hash_}, name=f"pod-{uid}", uid=uid
    )
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {**raw, "status": {"phase": "Pending", "conditions": [condition]}, **members}


async def test_new_evidence_wakes_pods_that_need_it() -> None:
    scene = Scene()
    scene.waking.changed(waiting("u1"))
    scene.waking.changed(waiting("u2", hash_=OTHER_HASH))
    assert await scene.woken() == []
    scene.prove(HASH)
    assert await scene.woken() == ["u1"]
    scene.prove(OTHER_HASH)
    assert await scene.woken() == ["u2"]


async def test_pod_is_woken_by_evidence_that_its_namespace_requires() -> None:
    namespaces = WatchedNamespaces(Api())
    namespaces.view.changed(namespace(builders.NAMESPACE, OTHER_HASH))
    scene = Scene(claims=ClaimReader(ClaimRules(), namespaces))
    scene.waking.changed(waiting(hash_=f"{HASH},{OTHER_HASH}"))
    scene.prove(HASH)
    assert await scene.woken() == []
    scene.prove(OTHER_HASH)
    assert await scene.woken() == ["u1"]


async def test_evidence_with_a_later_start_wakes_at_its_start() -> None:
    scene = Scene()
    scene.waking.changed(waiting())
    scene.prove(since=NOW + 10 * SECOND, until=NOW + 90 * SECOND)
    assert await scene.woken(9) == []
    assert await scene.woken(1) == ["u1"]


async def test_freed_gpu_wakes_pods_that_it_suffices_for() -> None:
    scene = Scene()
    held = reservation(slot("GPU-a0"), slot("GPU-a1"))
    scene.prove()
    scene.fleet.hold(held)
    scene.waking.replaced({"1": waiting("u1", gpus=1), "3": waiting("u3", gpus=3)})
    assert await scene.woken() == []
    scene.fleet.free(held)
    assert await scene.woken() == ["u1"]


async def test_pod_with_a_reservation_is_woken_by_its_own_node_only() -> None:
    scene = Scene(builders.fleet(node("node-a"), node("node-b")))
    raw = waiting(gpus=1)
    record = builders.claim(raw).record.text()
    raw["metadata"]["annotations"] |= {"gpuwarden.io/claim": record, "gpuwarden.io/node": "node-b"}
    scene.waking.changed(raw)
    scene.prove(HASH, "node-a")
    assert await scene.woken() == []
    scene.prove(HASH, "node-b")
    assert await scene.woken() == ["u1"]


async def test_node_without_known_devices_wakes_pods_whose_gpus_the_scheduler_counts() -> None:
    scene = Scene(builders.fleet(node("node-a", device("GPU-a0")), node("node-b")))
    scene.waking.changed(waiting(gpus=2))
    scene.prove(HASH, "node-a")
    assert await scene.woken() == []
    scene.prove(HASH, "node-b")
    assert await scene.woken() == ["u1"]


async def test_repeatedly_refused_pod_is_woken_less_often() -> None:
    scene = Scene()
    scene.waking.changed(waiting())
    scene.prove()
    at = []
    for second in range(300):
        if await scene.woken(1):
            at.append(second)
    pauses = [later - earlier for earlier, later in pairwise(at)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


async def test_new_fitting_node_shortens_the_pause_to_the_minimum() -> None:
    scene = Scene(builders.fleet(*(node(f"node-{n}") for n in range(6))))
    scene.waking.changed(waiting())
    scene.prove(HASH, "node-0")
    for wait in (0, 2, 4, 8):
        assert await scene.woken(wait) == ["u1"]
    scene.prove(HASH, "node-1")
    assert await scene.woken() == []
    assert await scene.woken(2) == ["u1"]
    for number in range(2, 6):
        scene.prove(HASH, f"node-{number}")
        assert await scene.woken(0.4) == []


@pytest.mark.parametrize(
    "raw",
    [
        waiting(message=OTHERS),
        waiting(spec={**raw_pod()["spec"], "nodeName": "node-a"}),
        waiting(status={"phase": "Pending"}),
        waiting(status={"conditions": [{"type": "PodScheduled", "status": "True", "message": OURS}]}),
        waiting(status={"conditions": "none"}),
        {**raw_pod(uid="u1"), "status": waiting()["status"]},
        {**raw_pod(uid="u1", annotations={"gpuwarden.io/claim": "[]"}), "status": waiting()["status"]},
    ],
    ids=["refused by others", "bound", "not looked at yet", "scheduled", "unreadable", "no claim", "a bad claim"],
)
async def test_pod_that_others_refused_is_not_woken(raw: Raw) -> None:
    scene = Scene()
    scene.prove()
    scene.waking.changed(raw)
    assert await scene.woken() == []
    assert len(scene.waking) == 0


async def test_pod_that_no_longer_waits_is_forgotten() -> None:
    leaving = waiting()
    leaving["metadata"]["deletionTimestamp"] = "2026-03-02T12:00:00Z"
    scene = Scene()
    ends: list[Callable[[], None]] = [
        lambda: scene.waking.deleted(waiting()),
        lambda: scene.waking.changed(leaving),
        lambda: scene.waking.changed(waiting(message=OTHERS)),
        lambda: scene.waking.replaced({}),
    ]
    for end in ends:
        scene.waking.changed(waiting())
        assert len(scene.waking) == 1
        end()
        assert len(scene.waking) == 0


async def test_failed_wake_up_is_tried_again() -> None:
    scene = Scene()
    scene.waking.changed(waiting())
    scene.prove()
    scene.waker.is_away = True
    assert await scene.woken() == []
    scene.waker.is_away = False
    assert await scene.woken() == []
    assert await scene.woken(2) == ["u1"]


async def test_pass_ends_when_the_api_server_does_not_answer() -> None:
    """Each request takes seconds, and the reconciler's other work waits for it."""
    scene = Scene()
    scene.waking.replaced({str(n): waiting(f"u{n}") for n in range(100)})
    scene.prove()
    scene.waker.is_away = True
    await scene.woken()
    assert scene.waker.asked == MAX_FAILURES
    scene.waker.is_away = False
    assert len(await scene.woken()) == 100 - MAX_FAILURES
    assert len(await scene.woken(2)) == 100


async def test_failed_wake_ups_do_not_block_others() -> None:
    scene = Scene()
    scene.waking.replaced({str(n): waiting(f"u{n}") for n in range(20)})
    scene.prove()
    scene.waker.refused = {f"u{n}" for n in range(10)}
    assert len(await scene.woken()) == 10


async def test_our_own_annotation_does_not_reset_the_pod() -> None:
    scene = Scene()
    scene.waking.changed(waiting())
    scene.prove()
    assert await scene.woken() == ["u1"]
    changed = waiting()
    changed["metadata"]["annotations"]["gpuwarden.io/woken-at"] = "2026-03-02T12:00:00.000+00:00"
    scene.waking.changed(changed)
    assert await scene.woken() == []


async def test_every_one_of_many_pods_gets_its_turn() -> None:
    scene = Scene()
    scene.waking.replaced({str(n): waiting(f"u{n}") for n in range(2_500)})
    scene.prove()
    seen: set[str] = set()
    for _ in range(20):
        seen.update(await scene.woken())
    assert len(seen) == 2_500
