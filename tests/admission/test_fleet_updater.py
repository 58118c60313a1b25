"""Answers of providers reach the next decision. A provider that fails changes nothing."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness
from webhook.admission.fleet_updater import FleetUpdater
from webhook.core.evidence import Evidence, EvidenceState
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceProvider, EvidenceUnavailableError
from webhook.evidence.jwt.proofs import MemoryProofs
from webhook.evidence.static import StaticEvidence
from webhook.inventory.file import InventoryFile
from webhook.runtime.telemetry import Metrics

POD = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": HASH})


async def rewrite(harness: Harness, inventory: Raw | str) -> None:
    harness.file.write_text(inventory if isinstance(inventory, str) else json.dumps(inventory))
    await harness.fleet_source.refresh()


async def verdict(harness: Harness, uid: str) -> str:
    response = await harness.mutate(POD, uid)
    return "Admitted" if response["allowed"] else str(response["status"]["reason"])


@pytest.mark.defect("extender-1")
async def test_changed_evidence_file_changes_the_verdict(harness: Harness) -> None:
    assert await verdict(harness, "r1") == "Admitted"
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": OTHER_HASH}}
    await rewrite(harness, {"nodes": [node]})
    assert await verdict(harness, "r2") == "NoProvenNode"


async def test_evidence_ends_at_the_second_without_a_new_reading(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": HASH, "until": "2026-03-02T12:00:30Z"}}
    harness = await build({"nodes": [node]})
    harness.wait(29.999)
    assert await verdict(harness, "r1") == "Admitted"
    harness.wait(0.001)
    assert await verdict(harness, "r2") == "NoProvenNode"


@pytest.mark.defect("extender-2")
async def test_evidence_from_the_future_is_not_valid_yet(build: Build) -> None:
    node = {**INVENTORY["nodes"][0], "evidence": {"hash": HASH, "since": "2026-03-02T12:00:30Z"}}
    harness = await build({"nodes": [node]})
    assert await verdict(harness, "r1") == "NoProvenNode"
    harness.wait(30)
    assert await verdict(harness, "r2") == "Admitted"


@pytest.mark.defect("assigner-14")
async def test_invalid_file_keeps_the_last_state(harness: Harness) -> None:
    await rewrite(harness, "nodes: [")
    assert await verdict(harness, "r1") == "Admitted"
    assert "refused" in harness.parts.metrics.render()[0].decode()


async def test_device_that_vanishes_while_held_is_quarantined(harness: Harness) -> None:
    await harness.create(POD)
    await rewrite(harness, {"nodes": [{**INVENTORY["nodes"][0], "devices": []}]})
    assert await harness.states() == {"GPU-a0": "quarantined"}


async def test_a_device_that_comes_back_is_still_held(harness: Harness) -> None:
    await harness.create(POD)
    await rewrite(harness, {"nodes": []})
    await rewrite(harness, INVENTORY)
    assert (await harness.states())["GPU-a0"] == "assigned"
    assert await verdict(harness, "r2") == "Admitted"
    assert harness.held == ["GPU-a0", "GPU-a1"]


async def test_uuid_on_two_nodes_is_not_offered_until_one_is_gone(harness: Harness) -> None:
    first = INVENTORY["nodes"][0]
    double = {"name": "node-z", "evidence": {"hash": HASH}, "devices": first["devices"]}
    await rewrite(harness, {"nodes": [first, double]})
    assert await harness.states() == {"GPU-a0": "quarantined", "GPU-a1": "quarantined"}
    assert await verdict(harness, "r1") == "NoFreeDevice"
    await rewrite(harness, {"nodes": [double]})
    assert await verdict(harness, "r2") == "Admitted"


async def test_gpu_that_moves_to_another_node_stays_with_its_holder(harness: Harness) -> None:
    await harness.create(POD)
    moved = {"name": "node-z", "evidence": {"hash": HASH}, "devices": [{"uuid": "GPU-a0"}]}
    await rewrite(harness, {"nodes": [moved]})
    assert await verdict(harness, "r2") == "NoFreeDevice"


async def test_metrics_count_every_device_once(harness: Harness) -> None:
    await harness.create(POD)
    await harness.dress(POD, "r2")
    text = harness.parts.metrics.render()[0].decode()
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


class FakeProvider:
    """A provider that answers what the test sets, once it may answer."""

    name = "spire-server"

    def __init__(self, said: Mapping[str, Evidence] | None) -> None:
        self.said = said
        self.polls = 0

    def begin(self) -> None:
        raise AssertionError("no replica is elected")

    async def poll(self) -> Mapping[str, Evidence]:
        self.polls += 1
        if self.said is None:
            raise EvidenceUnavailableError(self.name)
        return self.said


def evidence_of(node: str, digest: str = HASH) -> Evidence:
    return Evidence(node, digest, FakeProvider.name, NOW, NOW + SECOND)


def updater_of(tmp_path: Path, *also: FakeProvider) -> tuple[Fleet, FleetUpdater]:
    (tmp_path / "inventory.json").write_text(json.dumps(INVENTORY))
    fleet, file = Fleet(), InventoryFile(tmp_path / "inventory.json")
    return fleet, FleetUpdater(fleet, file, [StaticEvidence({}), *also], lambda: NOW, Metrics())


async def states(fleet_source: FleetUpdater, fleet: Fleet) -> dict[str, EvidenceState]:
    await fleet_source.refresh()
    return {name: indexed.state for name, indexed in fleet.indexed_nodes.items()}


async def test_node_needs_evidence_of_all_configured_providers(tmp_path: Path) -> None:
    spire = FakeProvider(None)
    fleet, fleet_source = updater_of(tmp_path, spire)
    await fleet_source.load()
    absent = dict.fromkeys(("node-a", "node-b", "node-c"), EvidenceState.ABSENT)
    assert await states(fleet_source, fleet) == absent  # not polled yet
    word = evidence_of("node-a")
    spire.said = {"node-a": word}
    assert await states(fleet_source, fleet) == {
        **absent,
        "node-a": EvidenceState.FRESH,
    }  # node-b is in one list only
    spire.said = {"node-a": evidence_of("node-a", OTHER_HASH)}
    assert await states(fleet_source, fleet) == {**absent, "node-a": EvidenceState.CONFLICT}
    spire.said = {"node-a": Evidence("node-a", "", "spire-server", is_banned=True)}
    assert await states(fleet_source, fleet) == {**absent, "node-a": EvidenceState.BANNED}
    spire.said = {}  # evicted
    assert await states(fleet_source, fleet) == absent


async def test_start_waits_for_the_first_answer_of_every_provider(tmp_path: Path) -> None:
    spire = FakeProvider(None)
    fleet, fleet_source = updater_of(tmp_path, spire)
    await fleet_source.load()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert fleet.indexed_nodes["node-a"].state is EvidenceState.ABSENT
        if len(pauses) == 100:
            spire.said = {"node-a": evidence_of("node-a")}

    with capture_logs() as lines:
        await fleet_source.wait_for_first_answers(sleep)
    assert fleet.indexed_nodes["node-a"].state is EvidenceState.FRESH
    assert (len(pauses), spire.polls) == (100, 101)
    waits = [line for line in lines if line["event"] == "not ready: waiting for the first answer of a provider"]
    assert [line["providers"] for line in waits] == [["spire-server"]] * len(waits)
    assert 1 <= len(waits) <= 8
    assert len(lines) < 20


async def test_provider_that_has_answered_once_is_not_waited_for(tmp_path: Path) -> None:
    spire = FakeProvider({})
    _, fleet_source = updater_of(tmp_path, spire)
    await fleet_source.load()
    spire.said = None
    await fleet_source.refresh()
    await asyncio.wait_for(fleet_source.wait_for_first_answers(), 5)


# Embedded mode, without a reconciler that reports changes.


class LoggedUpdater:
    """A fleet updater with a clock, and the changes that it logged."""

    def __init__(self, directory: Path, *providers: EvidenceProvider) -> None:
        (directory / "inventory.json").write_text(json.dumps(INVENTORY))
        self.now, self.metrics, self.fleet = NOW, Metrics(), Fleet()
        file = InventoryFile(directory / "inventory.json")
        self.fleet_source = FleetUpdater(self.fleet, file, [*providers], lambda: self.now, self.metrics)

    async def begin(self) -> "LoggedUpdater":
        await self.fleet_source.load()
        await self.fleet_source.wait_for_first_answers()
        return self

    async def changes(self) -> list[tuple[str, str, str, str]]:
        with capture_logs() as lines:
            await self.fleet_source.refresh()
        found = [one for one in lines if one["event"] == "evidence changed"]
        return [(one["log_level"], one["node"], one["was"], one["now"]) for one in found]

    def counted(self, state: str) -> float:
        return self.metrics.registry.get_sample_value("gpuwarden_evidence_changes_total", {"state": state}) or 0


async def test_change_and_end_of_evidence_are_logged_and_counted(tmp_path: Path) -> None:
    spire = FakeProvider({"node-a": evidence_of("node-a")})
    told = await LoggedUpdater(tmp_path, spire).begin()
    assert await told.changes() == []
    spire.said = {"node-a": evidence_of("node-a", OTHER_HASH)}
    fresh, other = f"fresh as {HASH}", f"fresh as {OTHER_HASH}"
    assert await told.changes() == [("warning", "node-a", fresh, other)]
    told.now += SECOND  # no provider has anything new
    assert await told.changes() == [("warning", "node-a", other, "stale")]
    assert await told.changes() == []
    told.now -= SECOND
    spire.said = {"node-a": evidence_of("node-a")}
    assert await told.changes() == [("info", "node-a", "stale", fresh)]
    spire.said = {}
    assert await told.changes() == [("warning", "node-a", fresh, "absent")]
    assert [told.counted(state) for state in ("fresh", "stale", "absent")] == [2, 1, 1]


async def test_first_answers_are_not_reported_as_changes(tmp_path: Path) -> None:
    spire = FakeProvider(None)
    told = LoggedUpdater(tmp_path, spire)
    await told.fleet_source.load()

    async def sleep(seconds: float) -> None:
        spire.said = {"node-a": evidence_of("node-a")}

    await told.fleet_source.wait_for_first_answers(sleep)
    assert await told.changes() == []


async def test_node_named_only_by_a_provider_is_in_the_fleet(tmp_path: Path) -> None:
    """Its GPUs are not known here; the scheduler counts them."""
    spire = FakeProvider({"node-x": evidence_of("node-x"), "node-a": evidence_of("node-a")})
    told = await LoggedUpdater(tmp_path, spire).begin()
    known = {"node-a", "node-b", "node-c"}
    assert told.fleet.indexed_nodes.keys() == known | {"node-x"}
    assert told.fleet.indexed_nodes["node-x"].state is EvidenceState.FRESH
    assert told.fleet.device_count == 4
    (tmp_path / "inventory.json").write_text('{"nodes": []}')
    await told.fleet_source.refresh()
    assert told.fleet.indexed_nodes.keys() == {"node-x", "node-a"}
    assert told.fleet.device_count == 0
    spire.said = {"node-a": evidence_of("node-a")}
    assert await told.changes() == [("warning", "node-x", f"fresh as {HASH}", "absent")]
    spire.said = {"node-a": evidence_of("node-a", OTHER_HASH)}
    await told.fleet_source.refresh()
    assert told.fleet.indexed_nodes.keys() == {"node-a"}


async def test_proof_sent_by_a_node_does_not_keep_it_in_the_fleet(tmp_path: Path) -> None:
    told = LoggedUpdater(tmp_path)
    proofs = MemoryProofs(lambda: told.fleet.indexed_nodes.keys(), lambda: told.now, SECOND)
    told.fleet_source = FleetUpdater(
        told.fleet, InventoryFile(tmp_path / "inventory.json"), [proofs], lambda: told.now, told.metrics
    )
    await told.begin()
    told.now += 3 * SECOND
    await proofs.accept(Evidence("node-a", HASH, "jwt-svid", told.now, told.now + SECOND, "n"))
    await told.fleet_source.refresh()
    assert told.fleet.indexed_nodes["node-a"].state is EvidenceState.FRESH
    (tmp_path / "inventory.json").write_text('{"nodes": []}')
    await told.fleet_source.refresh()
    assert not told.fleet.indexed_nodes


async def test_proof_received_during_a_poll_is_kept(tmp_path: Path) -> None:
    told = LoggedUpdater(tmp_path)
    proof = Evidence("node-a", HASH, "jwt-svid", NOW, NOW + 60 * SECOND, "n")

    class Slow(FakeProvider):
        """A node sends a proof while SPIRE Server is polled."""

        async def poll(self) -> Mapping[str, Evidence]:
            await proofs.accept(proof)
            return {"node-a": Evidence("node-a", HASH, self.name, NOW, NOW + 60 * SECOND)}

    proofs = MemoryProofs(
        lambda: told.fleet.indexed_nodes.keys(),
        lambda: told.now,
        SECOND,
    )
    proofs.notify(lambda node, evidence: told.fleet_source.prove(MemoryProofs.name, node, evidence))
    providers: list[EvidenceProvider] = [proofs, Slow({})]
    told.fleet_source = FleetUpdater(
        told.fleet, InventoryFile(tmp_path / "inventory.json"), providers, lambda: told.now, told.metrics
    )
    await told.fleet_source.load()
    assert told.fleet.indexed_nodes["node-a"].state is EvidenceState.FRESH
