"""Uses of GPUs derived from GPUNodes, with crashes at any step."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field
from structlog.testing import capture_logs

from tests.export.doubles import WatchedDisk
from webhook.core.errors import GpuwardenError
from webhook.export import ExportError, uses
from webhook.export.records import Batch, Use
from webhook.export.uses import GpuNames, HeldDevices, NotedUse, OpenUses, UsePodFacts, UseRecorder, trim_gpu_node
from webhook.kube.gpu_node import GpuNode

Raw = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SINCE = datetime(2026, 1, 1, tzinfo=UTC)


def entry(reservation: str = "r-1", uid: str | None = "u-1") -> Raw:
    return {
        "reservation": reservation,
        "phase": "finalized" if uid else "pending",
        "namespace": "ml",
        "digest": "d",
        "pod": "train-0",
        "uid": uid,
        "since": "2026-01-01T00:00:00Z",
    }


class CrashError(BaseException):
    """Simulates a kill."""


@define
class House:
    """A cluster set up by the test, and a store with a key, like Postgres."""

    directory: Path | None
    rows: dict[tuple[str, str], Use] = field(factory=dict)
    exported: list[Use] = field(factory=list)
    ids: list[str] = field(factory=list)
    asked: int = 0
    now: datetime = NOW
    version: int = 0
    is_current: bool = True
    pods: dict[str, UsePodFacts] = field(factory=dict)
    called: GpuNames = field(factory=lambda: GpuNames("S1", "C1"))
    crash: str = ""
    refuses: bool = False
    # A node whose uses the outbox does not accept.
    refuses_of: str = ""
    # Whether the store answers queries for open uses.
    answers: bool = True
    may_answer: asyncio.Event = field(factory=asyncio.Event)
    uses: UseRecorder = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.may_answer.set()
        self.start()

    def start(self) -> None:
        """As after a restart: only saved uses are known."""
        self.uses = UseRecorder(
            "prod", self, OpenUses(self.directory), self._take, lambda: self.now, lambda: self.is_current, self._open
        )

    async def _open(self) -> AsyncIterator[Use]:
        if not self.answers:
            raise ExportError("the store is away")
        await self.may_answer.wait()
        for one in list(self.rows.values()):
            if one.until is None:
                yield one

    async def _take(self, batch: Batch) -> None:
        if self.refuses:
            raise ExportError("full")
        if self.refuses_of in {one.node for one in batch.uses}:
            raise ExportError("too full for these")
        if self.crash == "before":
            raise CrashError
        self.ids.append(batch.id)
        for one in batch.uses:
            self.exported.append(one)
            before = self.rows.get((one.reservation, one.gpu_uuid))
            if before is None or before.until is None:
                self.rows[one.reservation, one.gpu_uuid] = one
        if self.crash == "after":
            raise CrashError

    async def pod(self, namespace: str, name: str, uid: str) -> UsePodFacts:
        self.asked += 1
        found = self.pods.get(uid, UsePodFacts("StatefulSet/train"))
        if found.owner == "nobody can be asked":
            raise GpuwardenError("away")
        if found.owner == "a bug":
            raise ZeroDivisionError
        return found

    def gpu(self, node: str, uuid: str) -> GpuNames:
        return self.called

    def evidence(self, node: str) -> str | None:
        return "sha256:aa"

    def holds(self, held: Mapping[str, Raw] | None, node: str = "node-a") -> None:
        """Sends the GPUNode as an event of the watch."""
        self.version += 1
        self.uses.gpu_nodes.changed(raw_node(held, self.version, node))

    def relist(self, nodes: Iterable[Raw]) -> None:
        self.uses.gpu_nodes.replaced({one["metadata"]["name"]: one for one in nodes})


def raw_node(held: Mapping[str, Raw] | None, version: int = 1, name: str = "node-a") -> Raw:
    meta = {"name": name, "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"devices": []}, "status": {} if held is None else {"held": dict(held)}}


EXPECTED = Use(
    cluster="prod",
    node="node-a",
    reservation="r-1",
    gpu_uuid="GPU-1",
    since=SINCE,
    serial="S1",
    chassis="C1",
    namespace="ml",
    pod="train-0",
    pod_uid="u-1",
    owner="StatefulSet/train",
    evidence_hash="sha256:aa",
)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "uses")


@pytest.mark.defect("S2-19")
async def test_use_is_exported_at_its_start_and_end(house: House) -> None:
    house.holds({"GPU-1/0": entry(), "GPU-2/0": entry()})
    await house.uses.step()
    assert sorted(house.exported, key=lambda one: one.gpu_uuid) == [EXPECTED, evolve(EXPECTED, gpu_uuid="GPU-2")]
    await house.uses.step()
    assert len(house.exported) == 2
    house.now += timedelta(hours=1)
    house.holds({})
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=NOW + timedelta(hours=1))
    assert len(house.exported) == 4


async def test_start_is_exported_once_while_other_uses_of_the_node_change(house: House) -> None:
    """A store without keys would store repeated records twice."""
    lasting = {"GPU-1/0": entry()}
    house.holds(lasting)
    await house.uses.step()
    for number in range(5):
        other = entry(f"o-{number}", f"u-o-{number}")
        house.holds({**lasting, "GPU-2/0": other})
        await house.uses.step()
        house.holds(lasting)
        await house.uses.step()
    assert house.exported.count(EXPECTED) == 1
    assert len(house.exported) == 1 + 2 * 5
    restarted(house, lasting)
    await house.uses.step()
    assert len(house.exported) == 11


async def test_same_start_is_the_same_batch_in_any_process(house: House) -> None:
    house.holds({"GPU-1/0": entry(), "GPU-2/0": entry()})
    await house.uses.step()
    heir = House(None)
    heir.holds({"GPU-3/0": entry("r-2", "u-2"), "GPU-2/0": entry(), "GPU-1/0": entry()})
    await heir.uses.step()
    assert house.ids[0] in heir.ids
    assert len(heir.ids) == 2


async def test_full_outbox_for_one_node_does_not_delay_others(house: House) -> None:
    house.refuses_of = "node-a"
    house.holds({"GPU-1/0": entry()}, "node-a")
    house.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with pytest.raises(ExportError, match="too full"):
        await house.uses.step()
    house.holds({"GPU-3/0": entry("r-3", "u-3")}, "node-c")
    with pytest.raises(ExportError, match="too full"):
        await house.uses.step()
    assert [one.reservation for one in house.exported] == ["r-2", "r-3"]
    house.refuses_of = ""
    await house.uses.step()
    assert [one.reservation for one in house.exported] == ["r-2", "r-3", "r-1"]


async def test_end_keeps_its_time_while_the_outbox_is_full(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.refuses = True
    house.holds({})
    for _ in range(2):
        with pytest.raises(ExportError):
            await house.uses.step()
        house.now += timedelta(hours=1)
    house.refuses = False
    await house.uses.step()
    assert house.exported == [EXPECTED, evolve(EXPECTED, until=NOW)]


async def test_number_of_unexported_uses_is_bounded(house: House) -> None:
    house.refuses = True
    with capture_logs() as logs:
        for number in range(uses.MAX_ENDED_PER_NODE + 5):
            house.now += timedelta(seconds=1)
            house.holds({"GPU-1/0": entry(f"r-{number}", f"u-{number}")})
            with pytest.raises(ExportError):
                await house.uses.step()
    house.refuses = False
    house.holds({})
    await house.uses.step()
    assert len(house.exported) == uses.MAX_ENDED_PER_NODE
    assert house.exported[-1].reservation == f"r-{uses.MAX_ENDED_PER_NODE + 4}"
    assert {line["event"] for line in logs} == {"ended uses dropped: the outboxes are full"}


async def test_bug_with_one_node_does_not_stop_others(house: House) -> None:
    house.pods["u-1"] = UsePodFacts("a bug")
    house.holds({"GPU-1/0": entry()})
    house.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with capture_logs() as logs:
        await house.uses.step()
    assert [line["event"] for line in logs] == ["recording uses failed"]
    assert [one.reservation for one in house.exported] == ["r-2"]


async def test_missing_right_to_read_pods_is_reported(house: House) -> None:
    house.pods["u-1"] = UsePodFacts("nobody can be asked")
    house.holds({"GPU-1/0": entry()})
    house.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with pytest.raises(GpuwardenError, match="away"):
        await house.uses.step()
    assert [one.reservation for one in house.exported] == ["r-2"]
    del house.pods["u-1"]
    await house.uses.step()
    assert [one.reservation for one in house.exported] == ["r-2", "r-1"]


async def test_pods_are_checked_at_an_interval_while_the_gpunode_is_missing(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.relist([])
    await house.uses.step()
    asked = house.asked
    for _ in range(50):
        await house.uses.step()
    assert house.asked == asked
    house.now += uses.POD_CHECK_INTERVAL
    await house.uses.step()
    assert house.asked == asked + 1


async def test_reservation_without_a_pod_is_not_a_use(house: House) -> None:
    house.holds({"GPU-1/0": entry(uid=None)})
    await house.uses.step()
    assert house.exported == []
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    assert house.exported == [EXPECTED]


async def test_serial_learnt_later_is_in_the_end_record(house: House) -> None:
    house.called = GpuNames()
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.called = GpuNames("S1", "C1")
    house.holds({})
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=NOW)


@pytest.mark.parametrize("start", ["", "before", "after"])
@pytest.mark.parametrize("end", ["", "before", "after"])
async def test_kill_at_any_step_leaves_one_row_with_one_end(house: House, start: str, end: str) -> None:
    house.crash = start
    house.holds({"GPU-1/0": entry()})
    await stepped(house)
    restarted(house, {"GPU-1/0": entry()})
    await stepped(house)
    assert house.rows == {("r-1", "GPU-1"): EXPECTED}
    house.crash, house.now = end, NOW + timedelta(minutes=1)
    house.holds({})
    await stepped(house)
    house.now = NOW + timedelta(minutes=2)
    restarted(house, {})
    await stepped(house)
    assert house.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW + timedelta(minutes=1))}
    count = len(house.exported)
    restarted(house, {})
    await stepped(house)
    assert len(house.exported) == count


async def stepped(house: House) -> None:
    try:
        await house.uses.step()
    except CrashError:
        house.crash = ""


def restarted(house: House, held: Mapping[str, Raw]) -> None:
    house.crash = ""
    house.start()
    house.version += 1
    house.relist([raw_node(held, house.version)])


async def test_missed_end_is_recorded_when_noticed(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.now = NOW + timedelta(days=1)
    restarted(house, {"GPU-1/0": entry("r-2", "u-2")})
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until == NOW + timedelta(days=1)
    assert house.rows["r-2", "GPU-1"].until is None


class TestNextLeader:
    """The next leader has its own, empty disk."""

    @pytest.fixture
    async def heir(self, house: House, tmp_path: Path) -> House:
        house.holds({"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await house.uses.step()
        house.directory = tmp_path / "another"
        house.now = NOW + timedelta(minutes=1)
        return house

    async def test_uses_that_ended_meanwhile_are_closed_and_others_stay_open(self, heir: House) -> None:
        restarted(heir, {"GPU-1/0": entry("r-3", "u-3"), "GPU-2/0": entry("r-2", "u-2")})
        await heir.uses.step()
        assert {key: one.until for key, one in heir.rows.items()} == {
            ("r-1", "GPU-1"): heir.now,
            ("r-2", "GPU-2"): None,
            ("r-3", "GPU-1"): None,
        }
        assert heir.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=heir.now)
        count = len(heir.exported)
        await heir.uses.step()
        assert len(heir.exported) == count

    async def test_use_that_ends_later_is_closed_then(self, heir: House) -> None:
        restarted(heir, {"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await heir.uses.step()
        assert {one.until for one in heir.rows.values()} == {None}
        heir.now += timedelta(hours=1)
        heir.holds({})
        await heir.uses.step()
        assert {one.until for one in heir.rows.values()} == {heir.now}

    async def test_unavailable_store_is_queried_again_and_delays_nothing(self, heir: House) -> None:
        heir.answers = False
        restarted(heir, {"GPU-1/0": entry("r-3", "u-3")})
        with pytest.raises(ExportError, match="the store is away"):
            await heir.uses.step()
        assert {key: one.until for key, one in heir.rows.items()} == {
            ("r-1", "GPU-1"): None,
            ("r-2", "GPU-2"): None,
            ("r-3", "GPU-1"): None,
        }
        heir.answers = True
        await heir.uses.step()
        assert {key for key, one in heir.rows.items() if one.until is None} == {("r-3", "GPU-1")}

    async def test_store_that_hangs_during_the_query_delays_nothing(
        self, heir: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(uses, "LOAD_TIMEOUT", timedelta(milliseconds=10))
        heir.may_answer.clear()
        restarted(heir, {"GPU-1/0": entry("r-3", "u-3")})
        with pytest.raises(ExportError, match="could not be read in time"):
            await heir.uses.step()
        assert heir.rows["r-3", "GPU-1"].until is None
        monkeypatch.setattr(uses, "LOAD_TIMEOUT", timedelta(minutes=1))
        heir.may_answer.set()
        await heir.uses.step()
        assert {key for key, one in heir.rows.items() if one.until is None} == {("r-3", "GPU-1")}

    async def test_use_of_a_deleted_node_ends_when_its_pod_is_gone(self, heir: House) -> None:
        heir.pods["u-1"] = UsePodFacts(exists=False)
        heir.crash = ""
        heir.start()
        heir.relist([])
        await heir.uses.step()
        assert {key: one.until for key, one in heir.rows.items()} == {
            ("r-1", "GPU-1"): heir.now,
            ("r-2", "GPU-2"): None,
        }

    async def test_row_with_an_invalid_node_name_creates_no_file(self, heir: House, tmp_path: Path) -> None:
        heir.rows["r-9", "GPU-9"] = evolve(EXPECTED, node="../elsewhere", reservation="r-9", gpu_uuid="GPU-9")
        restarted(heir, {"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await heir.uses.step()
        assert not (tmp_path / "elsewhere.json").exists()
        assert heir.rows["r-9", "GPU-9"].until is None

    async def test_end_saved_on_disk_is_exported_unchanged(self, house: House) -> None:
        house.holds({"GPU-1/0": entry()})
        await house.uses.step()
        house.refuses = True
        house.holds({})
        with pytest.raises(ExportError):
            await house.uses.step()
        house.refuses, house.now = False, NOW + timedelta(days=1)
        restarted(house, {})
        await house.uses.step()
        assert house.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW)}


async def test_files_are_read_again_after_a_temporary_error(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    assert house.directory is not None
    file = house.directory / "node-a.json"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    house.rows.clear()
    restarted(house, {})
    with pytest.raises(ExportError, match="open uses cannot be read"):
        await house.uses.step()
    file.rmdir()
    file.write_bytes(content)
    await house.uses.step()
    assert house.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW)}


async def test_use_is_exported_once_the_outbox_accepts_it(house: House) -> None:
    house.refuses = True
    house.holds({"GPU-1/0": entry()})
    with pytest.raises(ExportError):
        await house.uses.step()
    house.refuses = False
    await house.uses.step()
    assert house.exported == [EXPECTED]


async def test_nothing_ends_while_a_watch_is_interrupted(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.is_current = False
    house.relist([])
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until is None


async def test_recreated_empty_gpunode_ends_no_use(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.relist([])
    await house.uses.step()
    house.holds(None)
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until is None
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    assert len(house.exported) == 1


async def test_use_of_a_deleted_gpunode_ends_when_its_pod_is_gone(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.relist([])
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until is None
    house.pods["u-1"] = UsePodFacts("nobody can be asked")
    house.now += uses.POD_CHECK_INTERVAL
    with pytest.raises(GpuwardenError):
        await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until is None
    house.pods["u-1"] = UsePodFacts(exists=False)
    house.now += uses.POD_CHECK_INTERVAL
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until == house.now


def test_reservations_are_read_from_the_gpunode() -> None:
    raw = raw_node({"GPU-1/0": entry(), "GPU-2/1": entry(), "GPU-3/0": entry("r-2", None)})
    held = HeldDevices.parse(raw)
    assert held.reservations == [one for one in GpuNode.parse(raw).reservations.values() if one.uid is not None]
    assert [(one.id, one.uuids, one.since) for one in held.reservations] == [("r-1", ("GPU-1", "GPU-2"), SINCE)]


def test_serials_of_a_gpunode_are_found_by_uuid() -> None:
    devices = [{"uuid": "GPU-1", "index": 0, "serial": "S1"}, {"uuid": "GPU-2", "index": 1}]
    held = HeldDevices.parse({**raw_node({}), "spec": {"devices": devices}})
    assert [held.serial_of(uuid) for uuid in ("GPU-1", "GPU-2", "GPU-3")] == ["S1", None, None]


@pytest.mark.parametrize("spec", [None, {}, {"devices": None}, {"devices": [{"uuid": "GPU-1", "labels": ["a"]}]}])
@pytest.mark.parametrize("held", [None, {"GPU-1/0": entry()}])
def test_trimmed_gpunode_parses_like_the_whole_one(spec: Raw | None, held: Raw | None) -> None:
    raw = {**raw_node(held), "spec": spec}
    assert HeldDevices.parse(trim_gpu_node(raw)) == HeldDevices.parse(raw)
    assert "labels" not in str(trim_gpu_node(raw))


def test_save_flushes_content_before_rename_and_directory_before_return(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    OpenUses(tmp_path, disk.flush).save("node-a", {("r-1", "GPU-1"): NotedUse(EXPECTED)})
    size = (tmp_path / "node-a.json").stat().st_size
    assert size > 100
    assert disk.flushes == [("node-a.json.new", {"node-a.json.new": size}), ("", {"node-a.json": size})]


async def test_truncated_file_is_set_aside_and_others_are_loaded(house: House) -> None:
    house.holds({"GPU-1/0": entry()})
    house.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    await house.uses.step()
    assert house.directory is not None
    file = house.directory / "node-a.json"
    assert json.loads(file.read_text())[0]["use"]["reservation"] == "r-1"
    file.write_bytes(file.read_bytes()[:-5])
    again = OpenUses(house.directory)
    again.read()
    assert again.nodes() == {"node-b"}
    assert (house.directory / "node-a.torn").exists()


async def test_uses_without_a_directory_are_lost_at_the_end_of_the_process() -> None:
    house = House(None)
    house.holds({"GPU-1/0": entry()})
    await house.uses.step()
    house.holds({})
    await house.uses.step()
    assert house.rows["r-1", "GPU-1"].until == NOW


async def test_full_disk_loses_no_use(house: House, tmp_path: Path) -> None:
    assert house.directory is not None
    await house.uses.step()
    house.directory.rmdir()
    house.directory.write_text("no directory")
    house.holds({"GPU-1/0": entry()})
    with pytest.raises(ExportError, match="cannot be written"):
        await house.uses.step()
    assert house.exported == []
    house.directory.unlink()
    house.directory.mkdir()
    await house.uses.step()
    assert house.exported == [EXPECTED]
