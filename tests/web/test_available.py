"""`available` is what a pod could be given now, in numbers and one by one; and what is not known is not told."""

import json
import re
from collections import Counter
from datetime import timedelta
from random import Random

import pytest

from tests.builders import HASH, NOW, SECOND, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.house import House
from tests.web.test_devices import everything
from webhook.admission.fleet_updater import Staleness
from webhook.core.device import Device, DeviceUuid, Node, Slot
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.offer import count_devices
from webhook.core.reservation import Phase, Reservation, ReservationId
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.web.devices import Devices, sightings, take_snapshot
from webhook.web.health import Stage

BROWSER = {"accept": "text/html"}
KEEPER = MapOwner("2026-01-01", SetId("set", "ml"))
BARE: Raw = {"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-a0"}]}]}


def node_in(house: House, *, is_ready: bool = True, is_cordoned: bool = False) -> None:
    devices = (Device(DeviceUuid("GPU-a0")),)
    house.parts.fleet.put(Node("node-a", {}, devices, is_ready, is_cordoned), house.now)


def proven(house: House, *, is_banned: bool = False, is_conflict: bool = False) -> None:
    until = house.now + 60 * SECOND
    said = Evidence("node-a", HASH, "static", until=until, is_banned=is_banned, is_conflict=is_conflict)
    house.parts.fleet.set_evidence("node-a", said, house.now)


def metric(house: House, name: str, **labels: str) -> float:
    house.parts.metrics.render()
    return house.parts.metrics.registry.get_sample_value(name, labels) or 0


async def told(house: House) -> tuple[str, Raw]:
    """The one device, which page, JSON and metrics tell the same of."""
    device = (await house.devices())["GPU-a0"]
    state = device["state"]
    assert metric(house, "gpuwarden_devices", state=state) == 1
    page = (await house.plain.get("/", headers=BROWSER)).text
    assert f'<span class="status {state}"><svg' in page.partition("<tbody")[2]
    return state, device


@pytest.mark.parametrize(
    ("required", "states"),
    [("all", ["unproven", "available", "stale", "unproven", "unproven"]), ("asked", ["available"] * 5)],
)
async def test_a_device_is_available_where_the_evidence_is_good_enough(
    build: Build, required: str, states: list[str]
) -> None:
    house = await build(BARE, sources={"require_evidence": "flag"}, require_evidence=required)
    found = [await told(house)]
    proven(house)
    found.append(await told(house))
    house.wait(60)
    found.append(await told(house))
    proven(house, is_banned=True)
    found.append(await told(house))
    proven(house, is_conflict=True)
    found.append(await told(house))
    assert [state for state, _ in found] == states
    evidence = ["absent", "fresh", "stale", "banned", "conflict"]
    assert [device["evidence"] for _, device in found] == evidence
    available = [metric(house, "gpuwarden_devices_available", evidence=one) for one in evidence]
    assert available == ([0, 0, 0, 0, 1] if required == "asked" else [0] * 5)


async def test_a_device_of_a_node_that_is_not_ready_or_cordoned_is_not_available(build: Build) -> None:
    house = await build(BARE)
    node_in(house, is_ready=False, is_cordoned=True)
    state, device = await told(house)
    assert (state, device["node-ready"], device["cordoned"]) == ("not-ready", False, True)
    node_in(house, is_cordoned=True)
    state, device = await told(house)
    assert (state, "node-ready" in device, device["cordoned"]) == ("cordoned", False, True)
    node_in(house)
    state, device = await told(house)
    assert (state, "node-ready" in device, "cordoned" in device) == ("available", False, False)


async def test_a_device_that_a_map_keeps_is_not_available(build: Build) -> None:
    house = await build(BARE)
    house.parts.fleet.set_aside({"node-a": {"GPU-a0": KEEPER}}, {"node-a"})
    assert (await told(house))[0] == "kept"
    assert metric(house, "gpuwarden_devices", state="available") == 0
    assert metric(house, "gpuwarden_devices_available", evidence="absent") == 0
    node_in(house, is_cordoned=True)
    assert (await told(house))[0] == "cordoned"
    node_in(house)
    house.parts.fleet.set_aside({}, {"node-a"})
    assert (await told(house))[0] == "available"


async def test_a_device_that_is_held_stays_held_whatever_becomes_of_its_node(build: Build) -> None:
    house = await build(BARE)
    await house.create(raw_pod(raw_container(gpus=1)))
    node_in(house, is_ready=False)
    state, device = await told(house)
    assert (state, device["node-ready"], device["assignment"]["state"]) == ("assigned", False, "active")


@pytest.mark.parametrize("seed", range(12))
async def test_numbers_are_those_of_one_by_one(seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - the same fleets each time
    fleet, needs_evidence = some_fleet(chance), chance.random() < 0.5
    ledger = MemoryLedger(fleet, lambda: NOW, Times(SECOND, SECOND))
    for number in range(chance.randrange(12)):
        uuid = DeviceUuid(f"GPU-{chance.randrange(30)}")
        name = fleet.node_of_device(uuid) or "node-0"
        one = Reservation(
            id=ReservationId(f"r{number}"),
            node=name,
            slots=(Slot(uuid, 0),),
            namespace="ml",
            claim_digest="digest",
            phase=chance.choice((Phase.FINALIZED, Phase.PENDING)),
            since=NOW,
            deadline=NOW + 9 * SECOND,
        )
        if not ledger.of_device(uuid):
            ledger._index.replace(name, {**ledger._index.on(name), one.id: one})
    fleet.advance(NOW)
    snapshot = await take_snapshot(fleet, ledger, NOW, everything, needs_evidence=needs_evidence)
    each = Counter(one.state for one in sightings(snapshot, NOW) if not one.holders and one.state != "quarantined")
    offer = Counter[str]()
    for (state, _), number in count_devices(fleet, needs_evidence=needs_evidence).items():
        offer[state] += number
    assert +offer == each


def some_fleet(chance: Random) -> Fleet:
    """With UUIDs on two nodes."""
    fleet = Fleet()
    for number in range(8):
        name = f"node-{number}"
        numbers = chance.sample(range(30), chance.randrange(5))
        devices = tuple(
            Device(DeviceUuid(f"GPU-{one}"), is_healthy=chance.random() < 0.9, shares=chance.choice((1, 1, 4)))
            for one in numbers
        )
        fleet.put(Node(name, {}, devices, chance.random() < 0.8, chance.random() < 0.2), NOW)
        if chance.random() < 0.7:
            until = NOW + chance.choice((-1, 60)) * SECOND
            fleet.set_evidence(name, Evidence(name, HASH, "static", until=until, is_banned=chance.random() < 0.2), NOW)
    named = {f"GPU-{one}": KEEPER for one in range(30) if chance.random() < 0.3}
    mapped = {f"node-{number}": named for number in range(4)}
    fleet.set_aside(mapped, mapped.keys())
    return fleet


# What is not known.


async def test_while_starting_there_is_no_answer_but_that(house: House) -> None:
    house.health.stage = Stage.STARTING
    for client in (house.plain, house.tls):
        answer = await client.get("/devices")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "starting" in answer.json()["error"]
    page = await house.plain.get("/", headers=BROWSER)
    assert (page.status_code, "the server is starting" in page.text, "No devices are known" in page.text) == (
        503,
        True,
        False,
    )


async def test_while_changes_are_missed_programs_get_no_answer_and_people_a_banner(house: House) -> None:
    said: list[Staleness | None] = [Staleness("no events of /api/v1/nodes for 90 s", is_blind=True)]
    parts = house.parts
    view = Devices(parts.fleet, parts.ledger, parts.clock, outdated=lambda: said[0])
    answer = await house.through(view, "/devices")
    assert (answer.status_code, answer.json()) == (503, {"error": "no events of /api/v1/nodes for 90 s"})
    page = await house.through(view, "/", **BROWSER)
    assert page.status_code == 200
    assert "This may not be what there is: no events of /api/v1/nodes for 90 s." in page.text
    assert "GPU-a0" in page.text
    said[0] = None
    assert (await house.through(view, "/devices")).status_code == 200
    assert "This may not be" not in (await house.through(view, "/", **BROWSER)).text


async def test_an_inventory_that_cannot_be_used_is_told_with_what_counts_instead(house: House) -> None:
    good = house.file.read_text()
    house.file.write_text('nodes: [{name: "x", "gpus": "ö"}]')
    await house.fleet_source.refresh()
    answer = await house.plain.get("/devices")
    assert (answer.status_code, "GPU-a0" in answer.json()) == (200, True)
    assert re.fullmatch(
        r'110 gpuwarden "[ !#-~]+ cannot be used, its last valid content is in force: [ !#-~]+"',
        answer.headers["warning"],
    )
    assert "cannot be used, its last valid content is in force" in (await house.plain.get("/", headers=BROWSER)).text
    house.file.write_text(json.dumps({**json.loads(good), "nodes": json.loads(good)["nodes"][:1]}))
    await house.fleet_source.refresh()
    answer = await house.plain.get("/devices")
    assert "warning" not in answer.headers
    assert "cannot be used" not in (await house.plain.get("/", headers=BROWSER)).text


async def test_what_expired_is_told_with_its_reason_for_ten_minutes(house: House) -> None:
    await house.mutate(raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    house.wait(95)
    await house.parts.ledger.collect(house.now)
    expired = {
        "namespace": "ml",
        "name": "train-0",
        "reservation-id": "00000000-0000-4000-8000-000000000401",
        "at": "2026-03-02T12:01:35Z",
        "reason": "ReservationExpired",
        "message": "no pod was seen for it within 90 s",
    }
    device = (await house.devices())["GPU-a0"]
    assert (device["state"], device["expired"]) == ("available", [expired])
    page = (await house.plain.get("/", headers=BROWSER)).text
    assert "12:01:35 expired: ml/train-0: no pod was seen for it within 90 s" in page
    house.now += timedelta(minutes=10) - SECOND
    assert "expired" in (await house.devices())["GPU-a0"]
    house.now += SECOND
    assert "expired" not in (await house.devices())["GPU-a0"]
