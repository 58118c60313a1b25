"""What users of the GPU Device Assigner send, and what they get here. The data are our own copies of its forms."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.house import House, patched

FIXTURES = Path(__file__).resolve().parents[3] / "shared" / "contracts" / "fixtures"
UUIDS = [f"GPU-00000000-0000-4000-8000-00000000000{number}" for number in (1, 2, 3)]
BOTH = ["fudo.org/gpu.compute", "fudo.org/gpu.memory-80g"]
ONE = ["fudo.org/gpu.compute"]
INVENTORY = {
    "nodes": [
        {
            "name": "gpu-a",
            "devices": [{"uuid": uuid, "labels": labels} for uuid, labels in zip(UUIDS, (BOTH, ONE, ONE), strict=True)],
        }
    ]
}
REQUEST = "00000000-0000-4000-8000-00000000040"


@pytest.fixture
async def s4(build: Build) -> House:
    return await build(INVENTORY)


def labelled(gpus: int | None = 1, **labels: str) -> Raw:
    keys = {f"fudo.org/gpu.{name.replace('_', '-')}": value for name, value in labels.items()}
    return raw_pod(
        raw_container("app", gpus=gpus),
        name=None,
        generate_name="infer-",
        labels={"app": "infer", **keys},
        annotations={"team": "vision"},
    )


@pytest.mark.defect("S4-9")
@pytest.mark.defect("S4-13")
async def test_a_labelled_pod_gets_a_device_that_fits_and_keeps_what_it_had(s4: House) -> None:
    dressed = await s4.dress(labelled(assign="true", memory_80g="true"), f"{REQUEST}1")
    annotations = dressed["metadata"]["annotations"]
    assert annotations["team"] == "vision"
    assert annotations["fudo.org/gpu.uuid"] == UUIDS[0]
    assert annotations["fudo.org/gpu.node"] == "gpu-a"
    assert annotations["fudo.org/gpu.reservation-id"] == f"{REQUEST}1"
    assert "nodeName" not in dressed["spec"]


async def test_two_gpus_are_those_that_nobody_needs_for_their_memory(s4: House) -> None:
    dressed = await s4.dress(labelled(2, compute="true"), f"{REQUEST}2")
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] == f"{UUIDS[1]},{UUIDS[2]}"


async def test_a_bare_request_is_a_claim(s4: House) -> None:
    assert (await s4.mutate(labelled()))["allowed"]


async def test_assign_alone_asks_for_one(s4: House) -> None:
    dressed = await s4.dress(labelled(None, assign="whatever"))
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] in UUIDS


@pytest.mark.defect("S4-12")
async def test_false_asks_for_nothing(s4: House) -> None:
    dressed = await s4.dress(labelled(None, memory_80g="false", assign="false"))
    assert not [key for key in dressed["metadata"].get("annotations") or {} if key.startswith("fudo.org/")]
    assert s4.held == []


async def test_none_left_is_429(s4: House) -> None:
    await s4.dress(labelled(2, compute="true"), "r1")
    response = await s4.mutate(labelled(2, compute="true"), "r2")
    assert (response["status"]["code"], response["status"]["reason"]) == (429, "NoFreeDevice")


@pytest.mark.defect("S4-7")
async def test_a_terminating_pod_still_holds_its_gpu(s4: House) -> None:
    final = await s4.create(labelled())
    dying = {**final, "metadata": {**final["metadata"], "deletionTimestamp": "2026-03-02T12:10:00Z"}}
    assert (await s4.validate(builders.update(dying, final)))["allowed"]
    assert len(s4.held) == 1


async def test_devices_are_shown_in_its_form(s4: House) -> None:
    """The members that S4's readers know, as they know them; ours stand beside them."""
    await s4.create(labelled(memory_80g="true"), f"{REQUEST}1", "uid-41")
    await s4.dress(labelled(compute="true"), f"{REQUEST}2")
    devices = await s4.devices()
    known = {
        uuid: {member: device[member] for member in ("node", "labels", "assignment") if member in device}
        for uuid, device in devices.items()
    }
    assert known == {
        UUIDS[0]: {
            "node": "gpu-a",
            "labels": BOTH,
            "assignment": {
                "exists?": True,
                "namespace": "ml",
                "uid": "uid-41",
                "name": "infer-x7k2p",
                "reservation-id": f"{REQUEST}1",
                "state": "active",
            },
        },
        UUIDS[1]: {
            "node": "gpu-a",
            "labels": ONE,
            "assignment": {
                "exists?": False,
                "namespace": "ml",
                "uid": None,
                "reservation-id": f"{REQUEST}2",
                "state": "proposal",
            },
        },
        UUIDS[2]: {"node": "gpu-a", "labels": ONE},
    }


# The same on the contract's own files, where they are.

there = pytest.mark.skipif(not FIXTURES.is_dir(), reason="the contract's own files are not beside this checkout")


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text())


@there
@pytest.mark.parametrize(
    ("name", "uuids"),
    [
        ("s4-admission-create-pod.json", [UUIDS[0]]),
        ("s4-admission-create-pod-2gpu.json", UUIDS[1:]),
        ("s4-admission-create-pod-unlabelled.json", [UUIDS[1]]),
    ],
)
async def test_its_reviews_are_served(s4: House, name: str, uuids: list[str]) -> None:
    review = fixture(name)
    dressed = patched(review["request"]["object"], await s4.ask("/mutate", review))
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] == ",".join(uuids)
    assert s4.held == uuids


@there
async def test_its_dry_run_reserves_nothing(s4: House) -> None:
    review = fixture("s4-admission-create-pod-dryrun.json")
    response = await s4.ask("/mutate", review)
    assert patched(review["request"]["object"], response)["metadata"]["annotations"]["fudo.org/gpu.uuid"] == UUIDS[1]
    assert s4.held == []


@there
async def test_its_finalize_is_believed(s4: House) -> None:
    await s4.ask("/mutate", fixture("s4-admission-create-pod.json"))
    answers = fixture("s4-finalize-answers.json")
    for name, expected in (("s4-finalize-ok.json", "ok"), ("s4-finalize-missing.json", "missing")):
        reply = await s4.tls.post("/finalize", json=fixture(name))
        assert {"http": reply.status_code, "body": reply.json()} == answers[expected]


@there
async def test_its_devices_are_shown(s4: House) -> None:
    await s4.ask("/mutate", fixture("s4-admission-create-pod.json"))
    await s4.tls.post("/finalize", json=fixture("s4-finalize-ok.json"))
    await s4.dress(labelled(compute="true"), f"{REQUEST}2")
    devices = await s4.devices()
    for uuid, expected in fixture("s4-devices.json").items():
        assert {member: devices[uuid].get(member) for member in expected} == expected
        assert ("assignment" in devices[uuid]) == ("assignment" in expected)
