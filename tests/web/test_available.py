"""The state `available` in metrics, JSON and page, and answers while the fleet is not known."""

import json
import re
from collections import Counter
from datetime import timedelta
from random import Random

import pytest

from tests.builders import HASH, NOW, SECOND, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import Harness
from tests.web.test_devices import all_namespaces
from webhook.admission.fleet_updater import Staleness
from webhook.core.device import Device, DeviceUuid, Node, Slot
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.core.offer import count_devices
from webhook.core.reservation import Phase, Reservation, ReservationId
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.web.callers import CallerGate
from webhook.web.devices import Devices, device_views, take_snapshot
from webhook.web.health import Stage

BROWSER = {"accept": "text/html"}
OWNER = MapOwner("2026-01-01", SetId("set", "ml"))
BARE: Raw = {"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-a0"}]}]}


def put_node(harness: Harness, *, is_ready: bool = True, is_cordoned: bool = False) -> None:
    devices = (Device(DeviceUuid("GPU-a0")),)
    harness.parts.fleet.put(Node("node-a", {}, devices, is_ready, is_cordoned), harness.now)


def set_evidence(harness: Harness, *, is_banned: bool = False, is_conflict: bool = False) -> None:
    until = harness.now + 60 * SECOND
    staleness = Evidence("node-a", HASH, "static", until=until, is_banned=is_banned, is_conflict=is_conflict)
    harness.parts.fleet.set_evidence("node-a", staleness, harness.now)


def metric(harness: Harness, name: str, **labels: str) -> float:
    harness.parts.metrics.render()
    return harness.parts.metrics.registry.get_sample_value(name, labels) or 0


async def shown_device(harness: Harness) -> tuple[str, Raw]:
    """The only device. Checks that page, JSON and metrics show the same state."""
    device = (await harness.devices())["GPU-a0"]
    state = device["state"]
    assert metric(harness, "gpuwarden_devices", state=state) == 1
    page = (await harness.plain.get("/", headers=BROWSER)).text
    assert f'<span class="status {state}"><svg' in page.partition("<tbody")[2]
    return state, device


@pytest.mark.parametrize(
    ("required", "states"),
    [("all", ["unproven", "available", "stale", "unproven", "unproven"]), ("asked", ["available"] * 5)],
)
async def test_free_device_is_available_if_evidence_satisfies_the_policy(
    build: Build, required: str, states: list[str]
) -> None:
    harness = await build(BARE, sources={"require_evidence": "flag"}, require_evidence=required)
    found = [await shown_device(harness)]
    set_evidence(harness)
    found.append(await shown_device(harness))
    harness.wait(60)
    found.append(await shown_device(harness))
    set_evidence(harness, is_banned=True)
    found.append(await shown_device(harness))
    set_evidence(harness, is_conflict=True)
    found.append(await shown_device(harness))
    assert [state for state, _ in found] == states
    evidence = ["absent", "fresh", "stale", "banned", "conflict"]
    assert [device["evidence"] for _, device in found] == evidence
    available = [metric(harness, "gpuwarden_devices_available", evidence=one) for one in evidence]
    assert available == ([0, 0, 0, 0, 1] if required == "asked" else [0] * 5)


async def test_device_is_not_available_on_a_not_ready_or_cordoned_node(build: Build) -> None:
    harness = await build(BARE)
    put_node(harness, is_ready=False, is_cordoned=True)
    state, device = await shown_device(harness)
    assert (state, device["node-ready"], device["cordoned"]) == ("not-ready", False, True)
    put_node(harness, is_cordoned=True)
    state, device = await shown_device(harness)
    assert (state, "node-ready" in device, device["cordoned"]) == ("cordoned", False, True)
    put_node(harness)
    state, device = await shown_device(harness)
    assert (state, "node-ready" in device, "cordoned" in device) == ("available", False, False)


async def test_device_set_aside_by_a_map_is_not_available(build: Build) -> None:
    harness = await build(BARE)
    harness.parts.fleet.set_aside({"node-a": {"GPU-a0": OWNER}}, {"node-a"})
    assert (await shown_device(harness))[0] == "kept"
    assert metric(harness, "gpuwarden_devices", state="available") == 0
    assert metric(harness, "gpuwarden_devices_available", evidence="absent") == 0
    put_node(harness, is_cordoned=True)
    assert (await shown_device(harness))[0] == "cordoned"
    put_node(harness)
    harness.parts.fleet.set_aside({}, {"node-a"})
    assert (await shown_device(harness))[0] == "available"


@pytest.mark.parametrize("is_held", [False, True], ids=["free", "held"])
async def test_device_that_the_kubelet_gave_to_another_pod_is_mismatched(build: Build, *, is_held: bool) -> None:
    harness = await build(BARE)
    if is_held:
        await harness.create(raw_pod(raw_container(gpus=1)))
    device = Device(DeviceUuid("GPU-a0"), mismatch="in use by another pod")
    harness.parts.fleet.put(Node("node-a", {}, (device,)), harness.now)
    assert (await shown_device(harness))[0] == "mismatched"
    counted = [metric(harness, "gpuwarden_devices", state=state) for state in ("available", "assigned", "quarantined")]
    assert counted == [0, 0, 0]


async def test_held_device_stays_assigned_when_its_node_is_not_ready(build: Build) -> None:
    harness = await build(BARE)
    await harness.create(raw_pod(raw_container(gpus=1)))
    put_node(harness, is_ready=False)
    state, device = await shown_device(harness)
    assert (state, device["node-ready"], device["assignment"]["state"]) == ("assigned", False, "active")


@pytest.mark.parametrize("seed", range(12))
async def test_counts_match_the_states_of_all_devices(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - the same fleets each time
    fleet, needs_evidence = some_fleet(rng), rng.random() < 0.5
    ledger = MemoryLedger(fleet, lambda: NOW, Times(SECOND, SECOND))
    for number in range(rng.randrange(12)):
        uuid = DeviceUuid(f"GPU-{rng.randrange(30)}")
        name = fleet.node_of_device(uuid) or "node-0"
        one = Reservation(
            id=ReservationId(f"r{number}"),
            node=name,
            slots=(Slot(uuid, 0),),
            namespace="ml",
            claim_digest="digest",
            phase=rng.choice((Phase.FINALIZED, Phase.PENDING)),
            since=NOW,
            deadline=NOW + 9 * SECOND,
        )
        if not ledger.of_device(uuid):
            ledger._index.replace(name, {**ledger._index.on(name), one.id: one})
    fleet.advance(NOW)
    snapshot = await take_snapshot(fleet, ledger, NOW, all_namespaces, needs_evidence=needs_evidence)
    each = Counter(one.state for one in device_views(snapshot, NOW) if not one.holders and one.state != "quarantined")
    offer = Counter[str]()
    for (state, _), number in count_devices(fleet, needs_evidence=needs_evidence).items():
        offer[state] += number
    assert +offer == each


def some_fleet(rng: Random) -> Fleet:
    """A random fleet in which some UUIDs are on two nodes."""
    fleet = Fleet()
    for number in range(8):
        name = f"node-{number}"
        numbers = rng.sample(range(30), rng.randrange(5))
        devices = tuple(
            Device(DeviceUuid(f"GPU-{one}"), is_healthy=rng.random() < 0.9, shares=rng.choice((1, 1, 4)))
            for one in numbers
        )
        fleet.put(Node(name, {}, devices, rng.random() < 0.8, rng.random() < 0.2), NOW)
        if rng.random() < 0.7:
            until = NOW + rng.choice((-1, 60)) * SECOND
            fleet.set_evidence(name, Evidence(name, HASH, "static", until=until, is_banned=rng.random() < 0.2), NOW)
    named = {f"GPU-{one}": OWNER for one in range(30) if rng.random() < 0.3}
    mapped = {f"node-{number}": named for number in range(4)}
    fleet.set_aside(mapped, mapped.keys())
    return fleet


# Missing and old data.


async def test_devices_answer_503_while_starting(harness: Harness) -> None:
    harness.health.stage = Stage.STARTING
    for client in (harness.plain, harness.tls):
        answer = await client.get("/devices")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "starting" in answer.json()["error"]
    page = await harness.plain.get("/", headers=BROWSER)
    assert (page.status_code, "the server is starting" in page.text, "There are no devices" in page.text) == (
        503,
        True,
        False,
    )


async def test_stale_view_answers_json_with_503_and_shows_a_banner(harness: Harness) -> None:
    staleness: list[Staleness | None] = [Staleness("no events of /api/v1/nodes for 90 s", is_blind=True)]
    parts = harness.parts
    view = Devices(parts.fleet, parts.ledger, parts.clock, outdated=lambda: staleness[0], gate=CallerGate(parts.clock))
    answer = await harness.through(view, "/devices")
    assert (answer.status_code, answer.json()) == (503, {"error": "no events of /api/v1/nodes for 90 s"})
    page = await harness.through(view, "/", **BROWSER)
    assert page.status_code == 200
    assert "This page may be out of date: no events of /api/v1/nodes for 90 s." in page.text
    assert "GPU-a0" in page.text
    staleness[0] = None
    assert (await harness.through(view, "/devices")).status_code == 200
    assert "This page may be out of date" not in (await harness.through(view, "/", **BROWSER)).text


async def test_invalid_inventory_gives_a_warning_and_the_last_valid_content(harness: Harness) -> None:
    good = harness.file.read_text()
    harness.file.write_text('nodes: [{name: "x", "gpus": "ö"}]')
    await harness.fleet_source.refresh()
    answer = await harness.plain.get("/devices")
    assert (answer.status_code, "GPU-a0" in answer.json()) == (200, True)
    assert re.fullmatch(
        r'110 gpuwarden "[ !#-~]+ cannot be used, its last valid content is in force: [ !#-~]+"',
        answer.headers["warning"],
    )
    assert "cannot be used, its last valid content is in force" in (await harness.plain.get("/", headers=BROWSER)).text
    harness.file.write_text(json.dumps({**json.loads(good), "nodes": json.loads(good)["nodes"][:1]}))
    await harness.fleet_source.refresh()
    answer = await harness.plain.get("/devices")
    assert "warning" not in answer.headers
    assert "cannot be used" not in (await harness.plain.get("/", headers=BROWSER)).text


async def test_expired_reservation_is_shown_for_ten_minutes(harness: Harness) -> None:
    await harness.mutate(raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH}))
    harness.wait(95)
    await harness.parts.ledger.collect(harness.now)
    expired = {
        "namespace": "ml",
        "name": "train-0",
        "reservation-id": "00000000-0000-4000-8000-000000000401",
        "at": "2026-03-02T12:01:35Z",
        "reason": "ReservationExpired",
        "message": "no pod was seen for it within 90 s",
    }
    device = (await harness.devices())["GPU-a0"]
    assert (device["state"], device["expired"]) == ("available", [expired])
    page = (await harness.plain.get("/", headers=BROWSER)).text
    assert "12:01:35 expired: ml/train-0: no pod was seen for it within 90 s" in page
    harness.now += timedelta(minutes=10) - SECOND
    assert "expired" in (await harness.devices())["GPU-a0"]
    harness.now += SECOND
    assert "expired" not in (await harness.devices())["GPU-a0"]
