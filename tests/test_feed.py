"""What providers say reaches the next decision; what they cannot say changes nothing."""

import json

import pytest

from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.house import INVENTORY, House

POD = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH})


async def rewrite(house: House, inventory: Raw | str) -> None:
    house.file.write_text(inventory if isinstance(inventory, str) else json.dumps(inventory))
    await house.feed.refresh()


async def verdict(house: House, uid: str) -> str:
    response = await house.mutate(POD, uid)
    return "Admitted" if response["allowed"] else str(response["status"]["reason"])


@pytest.mark.defect("S0-1")
async def test_evidence_swapped_at_run_time_changes_the_verdict(house: House) -> None:
    assert await verdict(house, "r1") == "Admitted"
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": OTHER_HASH}}
    await rewrite(house, {"nodes": [node]})
    assert await verdict(house, "r2") == "NoProvenNode"


async def test_evidence_ends_at_the_second_without_a_new_reading(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": HASH, "until": "2026-03-02T12:00:30Z"}}
    house = await build({"nodes": [node]})
    house.wait(29.999)
    assert await verdict(house, "r1") == "Admitted"
    house.wait(0.001)
    assert await verdict(house, "r2") == "NoProvenNode"


@pytest.mark.defect("S0-2")
async def test_evidence_of_the_future_proves_nothing_yet(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": HASH, "since": "2026-03-02T12:00:30Z"}}
    house = await build({"nodes": [node]})
    assert await verdict(house, "r1") == "NoProvenNode"
    house.wait(30)
    assert await verdict(house, "r2") == "Admitted"


@pytest.mark.defect("S4-14")
async def test_a_bad_file_changes_nothing_of_what_is_known(house: House) -> None:
    await rewrite(house, "nodes: [")
    assert await verdict(house, "r1") == "Admitted"
    assert "refused" in house.parts.metrics.render()[0].decode()


async def test_a_device_that_vanishes_under_a_pod_is_quarantined(house: House) -> None:
    await house.create(POD)
    await rewrite(house, {"nodes": [{**INVENTORY["nodes"][0], "devices": []}]})
    assert await house.states() == {"GPU-a0": "quarantined"}


async def test_a_device_that_comes_back_is_still_held(house: House) -> None:
    await house.create(POD)
    await rewrite(house, {"nodes": []})
    await rewrite(house, INVENTORY)
    assert (await house.states())["GPU-a0"] == "assigned"
    assert await verdict(house, "r2") == "Admitted"
    assert house.held == ["GPU-a0", "GPU-a1"]


async def test_the_same_uuid_on_two_nodes_is_given_to_nobody_until_one_is_gone(house: House) -> None:
    first = INVENTORY["nodes"][0]
    double = {"name": "node-z", "evidence": {"hash": HASH}, "devices": first["devices"]}
    await rewrite(house, {"nodes": [first, double]})
    assert await house.states() == {"GPU-a0": "quarantined", "GPU-a1": "quarantined"}
    assert await verdict(house, "r1") == "NoFreeDevice"
    await rewrite(house, {"nodes": [double]})
    assert await verdict(house, "r2") == "Admitted"


async def test_a_gpu_that_moved_to_another_node_stays_its_holders(house: House) -> None:
    await house.create(POD)
    moved = {"name": "node-z", "evidence": {"hash": HASH}, "devices": [{"uuid": "GPU-a0"}]}
    await rewrite(house, {"nodes": [moved]})
    assert await verdict(house, "r2") == "NoFreeDevice"


async def test_metrics_count_every_device_once(house: House) -> None:
    await house.create(POD)
    await house.dress(POD, "r2")
    text = house.parts.metrics.render()[0].decode()
    for line in (
        'gpuwarden_devices{state="available"} 2.0',
        'gpuwarden_devices{state="assigned"} 1.0',
        'gpuwarden_devices{state="pending"} 1.0',
        'gpuwarden_devices{state="quarantined"} 0.0',
        'gpuwarden_reservations{phase="finalized"} 1.0',
        'gpuwarden_evidence_nodes{state="fresh"} 2.0',
        'gpuwarden_evidence_nodes{state="absent"} 1.0',
    ):
        assert line in text
