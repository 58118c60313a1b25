"""Allocations of claims whose pods were not bound: when they are taken back, and when they are left alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence
from tests.recorded_events import RecordedEvents
from webhook.core.device import Node
from webhook.core.fleet import Fleet
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.proof_claims import CLAIM_LABELS
from webhook.core.proof_devices import DRIVER, device_name, hash_attribute
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.dra.unused_allocations import UnusedAllocations
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError

A = "node-a"
POD: Raw = {"metadata": {"name": "train", "namespace": "ml", "uid": "p1"}, "spec": {}}
OWNER: Raw = {"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "p1", "controller": True}
PROOF: Raw = {"driver": DRIVER, "pool": A, "device": device_name("GPU-1", hash_attribute(HASH)), "request": "proof0"}
GPU: Raw = {"driver": "gpu.nvidia.com", "pool": A, "device": "gpu-0", "request": "gpu0"}
CONSUMER: Raw = {"resource": "pods", "name": "train", "uid": "p1"}


def claim(*results: Raw, version: str = "7", metadata: Raw | None = None, **status: Any) -> Raw:
    """A claim of one pair, without a consumer."""
    meta: Raw = {"name": "gpus", "namespace": "ml", "uid": "c1", "resourceVersion": version}
    meta |= {"labels": CLAIM_LABELS, "ownerReferences": [OWNER], **(metadata or {})}
    return {"metadata": meta, "status": {"allocation": {"devices": {"results": results or (PROOF, GPU)}}, **status}}


class Scene:
    """An elected process, a node that is proven for HASH, and a pod without a node."""

    def __init__(self) -> None:
        self.now, self.is_current = NOW, True
        self.fleet, self.heard = Fleet(), RecordedEvents()
        self.fleet.put(Node(A), NOW)
        self.proves(HASH)
        self.pods: dict[str, Raw] = {"p1": POD}
        self.policy: HashPolicy | None = NO_HASH_POLICY
        self.error: Exception | None = None
        self.cleared: list[str] = []
        self.allocations = UnusedAllocations(
            self, self.fleet, self.heard, lambda: self.now, lambda: self.is_current, lambda _: self.policy
        )

    def proves(self, digest: str | None) -> None:
        self.fleet.set_evidence(A, None if digest is None else evidence(A, digest), NOW)

    async def pod_of(self, pod: PodIdentity) -> Raw | None:
        return self.pods.get(pod.uid)

    async def clear_allocation(self, raw: Raw) -> None:
        if self.error is not None:
            raise self.error
        self.cleared.append(raw["metadata"]["resourceVersion"])

    async def step(self, after: timedelta = timedelta()) -> list[str]:
        """The versions of the claims whose allocations are taken back."""
        self.now += after
        self.cleared.clear()
        await self.allocations.step()
        return list(self.cleared)


def loses_evidence(scene: Scene) -> None:
    scene.proves(None)


def proves_another_hash(scene: Scene) -> None:
    scene.proves(OTHER_HASH)


def narrows_the_namespace(scene: Scene) -> None:
    scene.policy = HashPolicy("ml", (OTHER_HASH,))


CHANGES = pytest.mark.parametrize("change", [loses_evidence, proves_another_hash, narrows_the_namespace])


@CHANGES
async def test_allocation_is_taken_back_when_no_retry_can_succeed(change: Callable[[Scene], None]) -> None:
    scene = Scene()
    scene.allocations.changed(claim())
    assert await scene.step() == []
    change(scene)
    assert await scene.step() == ["7"]
    assert scene.heard.recorded == [("train", Reason.ALLOCATION_CLEARED)]
    assert A in scene.heard.messages[0]
    assert await scene.step(SECOND) == []


@pytest.mark.parametrize("policy", [None, HashPolicy("ml", (HASH, OTHER_HASH)), HashPolicy("ml", (), ("mistake",))])
async def test_allocation_stays_while_its_node_is_proven_and_allowed(policy: HashPolicy | None) -> None:
    scene = Scene()
    scene.policy = policy
    scene.allocations.changed(claim())
    assert await scene.step() == []


@pytest.mark.parametrize(
    "raw",
    [
        claim(reservedFor=[CONSUMER]),
        claim(reservedFor=[{"resource": "podgroups", "name": "gang", "uid": "g1"}]),
        claim(GPU),
        claim(metadata={"labels": {}}),
        claim(metadata={"ownerReferences": []}),
        claim(metadata={"ownerReferences": [{**OWNER, "controller": False}]}),
        claim(metadata={"ownerReferences": [{**OWNER, "kind": "Job"}]}),
        {**claim(), "status": {}},
        {**claim(), "status": {"allocation": 7}},
    ],
    ids=[
        *("a consumer", "a group of consumers", "no proof", "no label", "no owner", "not the controller", "no pod"),
        *("not allocated", "unreadable"),
    ],
)
async def test_other_claims_are_left_alone(raw: Raw) -> None:
    scene = Scene()
    scene.proves(None)
    scene.allocations.changed(claim())
    scene.allocations.changed(raw)
    assert await scene.step() == []


@pytest.mark.parametrize("pods", [{}, {"p1": {**POD, "spec": {"nodeName": A}}}], ids=["gone", "on a node"])
async def test_claim_of_a_pod_that_is_gone_or_on_a_node_is_left_alone(pods: dict[str, Raw]) -> None:
    scene = Scene()
    scene.proves(None)
    scene.pods = pods
    scene.allocations.changed(claim())
    assert await scene.step() == []
    assert scene.heard.recorded == []


async def test_nothing_is_written_on_old_data() -> None:
    scene = Scene()
    scene.proves(None)
    scene.allocations.changed(claim())
    scene.is_current = False
    assert await scene.step() == []


@pytest.mark.parametrize("error", [ApiUnavailableError("away"), ApiRefusesError(409, "changed")])
async def test_failed_write_is_repeated_after_a_pause_at_the_newest_version(error: Exception) -> None:
    scene = Scene()
    scene.proves(None)
    scene.allocations.changed(claim())
    scene.error = error
    assert await scene.step() == []
    assert scene.heard.recorded == []
    scene.error = None
    assert await scene.step() == []
    scene.allocations.changed(claim(version="8"))
    assert await scene.step(SECOND) == ["8"]


@pytest.mark.parametrize("is_listed", [False, True])
async def test_deleted_claim_is_forgotten(is_listed: bool) -> None:
    scene = Scene()
    scene.proves(None)
    scene.allocations.replaced({"ml/gpus": claim()})
    if is_listed:
        scene.allocations.replaced({})
    else:
        scene.allocations.deleted(claim())
    assert await scene.step() == []
