"""The requests of users of the GPU Device Assigner, and the answers."""

import pytest

from tests import builders
from tests.builders import Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import Harness, patched

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
async def assigner(build: Build) -> Harness:
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


@pytest.mark.defect("assigner-9")
@pytest.mark.defect("assigner-13")
async def test_labelled_pod_gets_a_matching_device_and_keeps_its_fields(assigner: Harness) -> None:
    dressed = await assigner.dress(labelled(assign="true", memory_80g="true"), f"{REQUEST}1")
    annotations = dressed["metadata"]["annotations"]
    assert annotations["team"] == "vision"
    assert annotations["fudo.org/gpu.uuid"] == UUIDS[0]
    assert annotations["fudo.org/gpu.node"] == "gpu-a"
    assert annotations["fudo.org/gpu.reservation-id"] == f"{REQUEST}1"
    assert "nodeName" not in dressed["spec"]


async def test_two_gpus_are_taken_from_devices_without_the_memory_label(assigner: Harness) -> None:
    dressed = await assigner.dress(labelled(2, compute="true"), f"{REQUEST}2")
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] == f"{UUIDS[1]},{UUIDS[2]}"


async def test_request_without_labels_is_a_claim(assigner: Harness) -> None:
    assert (await assigner.mutate(labelled()))["allowed"]


async def test_assign_label_requests_one_gpu(assigner: Harness) -> None:
    dressed = await assigner.dress(labelled(None, assign="whatever"))
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] in UUIDS


@pytest.mark.defect("assigner-12")
async def test_assign_false_requests_no_gpu(assigner: Harness) -> None:
    dressed = await assigner.dress(labelled(None, memory_80g="false", assign="false"))
    assert not [key for key in dressed["metadata"].get("annotations") or {} if key.startswith("fudo.org/")]
    assert assigner.held == []


async def test_denial_without_free_gpus_has_code_429(assigner: Harness) -> None:
    await assigner.dress(labelled(2, compute="true"), "r1")
    response = await assigner.mutate(labelled(2, compute="true"), "r2")
    assert (response["status"]["code"], response["status"]["reason"]) == (429, "NoFreeDevice")


@pytest.mark.defect("assigner-7")
async def test_terminating_pod_holds_its_gpu(assigner: Harness) -> None:
    final = await assigner.create(labelled())
    dying = {**final, "metadata": {**final["metadata"], "deletionTimestamp": "2026-03-02T12:10:00Z"}}
    assert (await assigner.validate(builders.update(dying, final)))["allowed"]
    assert len(assigner.held) == 1


async def test_devices_json_has_the_form_of_the_assigner(assigner: Harness) -> None:
    """The known members have their known form; our own members are added."""
    await assigner.create(labelled(memory_80g="true"), f"{REQUEST}1", "uid-41")
    await assigner.dress(labelled(compute="true"), f"{REQUEST}2")
    devices = await assigner.devices()
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


async def test_pod_without_labels_gets_a_device_without_a_scarce_label(assigner: Harness) -> None:
    dressed = await assigner.dress(labelled())
    assert dressed["metadata"]["annotations"]["fudo.org/gpu.uuid"] == UUIDS[1]


async def test_dry_run_names_a_device_and_reserves_none(assigner: Harness) -> None:
    pod = labelled(compute="true")
    response = await assigner.mutate(pod, dry_run=True)
    assert patched(pod, response)["metadata"]["annotations"]["fudo.org/gpu.uuid"] == UUIDS[1]
    assert assigner.held == []


async def test_finalize_accepts_its_body_and_names_absent_fields(assigner: Harness) -> None:
    await assigner.create(labelled(memory_80g="true"), f"{REQUEST}1", "uid-41")
    body = {"namespace": "ml", "name": "infer-x7k2p", "uid": "uid-41", "reservation-id": f"{REQUEST}1"}
    reply = await assigner.tls.post("/finalize", json={**body, "gpu-uuid": UUIDS[0]})
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
    reply = await assigner.tls.post(
        "/finalize", json={key: body[key] for key in body if key != "name"} | {"gpu-uuid": "  "}
    )
    assert (reply.status_code, reply.json()) == (400, {"error": "fields required but absent: name, gpu-uuid"})
