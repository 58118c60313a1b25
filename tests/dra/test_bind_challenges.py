"""Claims with a fresh challenge: which answer they get, when, and what nodes are asked."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence
from webhook.core.device import Node
from webhook.core.fleet import Fleet
from webhook.core.proof_devices import hash_attribute
from webhook.dra.bind_challenges import AVOIDED, PATIENCE, BindChallenges
from webhook.kube.requests import ApiUnavailableError
from webhook.kube.resource_slices import CHALLENGE_FAILED, CHALLENGED, stamp

A, OURS = "node-a", "attested.gpuwarden.io"
HOUR = timedelta(hours=1)


def claim(name: str = "train", at: datetime = NOW, **members: Any) -> Raw:
    """A claim whose devices are allocated, with a binding condition."""
    ours = {"driver": OURS, "pool": A, "device": "p-bind", "request": "proof0", "bindingConditions": [CHALLENGED]}
    theirs = {"driver": "gpu.nvidia.com", "pool": A, "device": "gpu-0", "request": "gpu0"}
    opaque = {"driver": OURS, "parameters": {"hash": hash_attribute(HASH)}}
    config = [{"source": "FromClaim", "requests": ["proof0"], "opaque": opaque}]
    allocation = {"devices": {"results": [{**ours, **members}, theirs], "config": config}}
    status = {"allocation": {**allocation, "allocationTimestamp": stamp(at)}}
    meta = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "resourceVersion": "7"}
    return {"metadata": meta, "status": status}


class Scene:
    """An elected process, and a node that is proven by challenges."""

    def __init__(self) -> None:
        self.now, self.is_current, self.is_away = NOW, True, False
        self.written: list[tuple[str, list[Raw]]] = []
        self.fleet = Fleet()
        self.fleet.put(Node(A), NOW)
        self.answers(NOW - HOUR)
        self.challenges = BindChallenges(self, self.fleet, lambda: self.now, lambda: self.is_current)

    async def patch_devices(self, raw: Raw, devices: list[Raw]) -> None:
        if self.is_away:
            raise ApiUnavailableError("away")
        self.written.append((raw["metadata"]["name"], devices))

    def answers(self, challenged: datetime, hash: str = HASH) -> None:
        """The node's proof answers a challenge of this time."""
        proof = evidence(A, hash, since=challenged, until=NOW + 2 * HOUR)
        self.fleet.set_evidence(A, evolve(proof, source="jwt-svid", challenged=challenged), self.now)

    async def step(self, after: timedelta = timedelta()) -> list[tuple[str, str]]:
        """The reasons of new answers, by claim."""
        self.now += after
        self.written.clear()
        await self.challenges.step()
        return [(name, devices[-1]["conditions"][0]["reason"]) for name, devices in self.written]


async def test_claim_is_answered_when_its_node_has_answered_a_newer_challenge() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    assert await scene.step() == []
    scene.answers(NOW)
    assert await scene.step() == []
    scene.answers(NOW + SECOND)
    assert await scene.step(SECOND) == [("train", "ChallengeAnswered")]
    ((_, (device,)),) = scene.written
    assert {name: device[name] for name in ("driver", "pool", "device")} == {
        "driver": OURS,
        "pool": A,
        "device": "p-bind",
    }
    assert [(one["type"], one["status"]) for one in device["conditions"]] == [(CHALLENGED, "True")]
    assert await scene.step() == []


async def test_claim_is_refused_and_its_node_avoided_when_no_answer_comes() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    assert await scene.step(PATIENCE - SECOND) == []
    assert not scene.challenges.is_silent(A)
    assert await scene.step(SECOND) == [("train", "NoAnswer")]
    assert scene.written[0][1][0]["conditions"][0]["type"] == CHALLENGE_FAILED
    assert scene.challenges.is_silent(A)
    assert A in scene.challenges.take_changes()
    scene.now += AVOIDED - SECOND
    assert scene.challenges.is_silent(A)
    scene.now += SECOND
    assert not scene.challenges.is_silent(A)


async def test_node_that_answers_again_is_no_longer_avoided() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    await scene.step(PATIENCE)
    scene.answers(scene.now)
    assert scene.challenges.is_silent(A)
    scene.now += SECOND
    scene.answers(scene.now)
    assert not scene.challenges.is_silent(A)


@pytest.mark.parametrize("hash", [None, OTHER_HASH], ids=["no evidence", "another hash"])
async def test_claim_is_refused_at_once_when_its_node_is_not_proven_for_its_hash(hash: str | None) -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    if hash is None:
        scene.fleet.set_evidence(A, None, NOW)
    else:
        scene.answers(NOW + SECOND, hash)
    assert await scene.step() == [("train", "NotProven")]
    assert not scene.challenges.is_silent(A)


def test_node_is_asked_for_the_newest_allocation_that_waits() -> None:
    scene = Scene()
    assert scene.challenges.asked_after(A) is None
    scene.challenges.changed(claim("first"))
    scene.challenges.changed(claim("second", NOW + SECOND))
    assert scene.challenges.asked_after(A) == NOW + SECOND
    assert scene.challenges.asked_after("node-b") is None
    assert scene.challenges.take_changes() == {A}
    assert scene.challenges.take_changes() == set()
    scene.challenges.deleted(claim("second"))
    assert scene.challenges.asked_after(A) == NOW
    scene.challenges.replaced({})
    assert scene.challenges.asked_after(A) is None


def without(raw: Raw, member: str) -> Raw:
    del raw["status"]["allocation"][member]
    return raw


def with_status(raw: Raw, *types: str, device: str = "p-bind") -> Raw:
    entry = {"driver": OURS, "pool": A, "device": device, "conditions": [{"type": one} for one in types]}
    raw["status"]["devices"] = [entry]
    return raw


@pytest.mark.parametrize(
    ("raw", "waits"),
    [
        (claim(), True),
        (with_status(claim()), True),
        (with_status(claim(), "Ready"), True),
        (with_status(claim(), CHALLENGED, device="p-other"), True),
        (with_status(claim(), CHALLENGED), False),
        (with_status(claim(), "Ready", CHALLENGE_FAILED), False),
        (claim(bindingConditions=["example.com/attached"]), False),
        (claim(driver="example.com"), False),
        (without(claim(), "devices"), False),
        (without(claim(), "allocationTimestamp"), False),
        ({**claim(), "status": {}}, False),
        ({**claim(), "status": {"allocation": {"devices": 1}}}, False),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_claim_waits_until_it_has_an_answer(raw: Raw, *, waits: bool) -> None:
    scene = Scene()
    scene.challenges.changed(raw)
    assert (scene.challenges.asked_after(A) == NOW) is waits


async def test_claim_without_a_hash_is_refused() -> None:
    scene = Scene()
    raw = claim()
    raw["status"]["allocation"]["devices"]["config"] = None
    scene.challenges.changed(raw)
    assert await scene.step() == [("train", "NotProven")]


async def test_status_of_other_drivers_stays() -> None:
    scene = Scene()
    raw = claim()
    others = {"driver": "gpu.nvidia.com", "pool": A, "device": "gpu-0", "conditions": [{"type": "Ready"}]}
    raw["status"]["devices"] = [others]
    scene.challenges.changed(raw)
    scene.answers(NOW + SECOND)
    await scene.step(SECOND)
    assert scene.written[0][1][0] == others
    assert len(scene.written[0][1]) == 2


async def test_failed_write_is_tried_again_and_nothing_is_written_on_old_evidence() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    scene.answers(NOW + SECOND)
    scene.is_current = False
    assert await scene.step(SECOND) == []
    scene.is_current, scene.is_away = True, True
    assert await scene.step() == []
    scene.is_away = False
    assert await scene.step() == [("train", "ChallengeAnswered")]


async def test_new_leader_waits_for_the_answers_itself() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    scene.now += PATIENCE
    scene.challenges.begin()
    assert await scene.step() == []
    assert await scene.step(PATIENCE) == [("train", "NoAnswer")]


async def test_patience_begins_again_with_another_allocation_only() -> None:
    scene = Scene()
    scene.challenges.changed(claim())
    scene.now += PATIENCE - SECOND
    scene.challenges.changed({**claim(), "metadata": {**claim()["metadata"], "resourceVersion": "8"}})
    assert await scene.step(SECOND) == [("train", "NoAnswer")]
    scene.challenges.changed(claim(at=scene.now))
    assert await scene.step(PATIENCE - SECOND) == []
