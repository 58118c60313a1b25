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
class Harness:
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
    max_ended: int = uses.MAX_ENDED_PER_NODE
    uses: UseRecorder = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.may_answer.set()
        self.start()

    def start(self) -> None:
        """As after a restart: only saved uses are known."""
        self.uses = UseRecorder(
            "prod",
            self,
            OpenUses(self.directory),
            self._take,
            lambda: self.now,
            lambda: self.is_current,
            self._open,
            self.max_ended,
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
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "uses")


@pytest.mark.defect("gpuid-19")
async def test_use_is_exported_at_its_start_and_end(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry(), "GPU-2/0": entry()})
    await harness.uses.step()
    assert sorted(harness.exported, key=lambda one: one.gpu_uuid) == [EXPECTED, evolve(EXPECTED, gpu_uuid="GPU-2")]
    await harness.uses.step()
    assert len(harness.exported) == 2
    harness.now += timedelta(hours=1)
    harness.holds({})
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=NOW + timedelta(hours=1))
    assert len(harness.exported) == 4


async def test_start_is_exported_once_while_other_uses_of_the_node_change(harness: Harness) -> None:
    """A store without keys would store repeated records twice."""
    lasting = {"GPU-1/0": entry()}
    harness.holds(lasting)
    await harness.uses.step()
    for number in range(5):
        other = entry(f"o-{number}", f"u-o-{number}")
        harness.holds({**lasting, "GPU-2/0": other})
        await harness.uses.step()
        harness.holds(lasting)
        await harness.uses.step()
    assert harness.exported.count(EXPECTED) == 1
    assert len(harness.exported) == 1 + 2 * 5
    restarted(harness, lasting)
    await harness.uses.step()
    assert len(harness.exported) == 11


async def test_same_start_is_the_same_batch_in_any_process(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry(), "GPU-2/0": entry()})
    await harness.uses.step()
    next_leader = Harness(None)
    next_leader.holds({"GPU-3/0": entry("r-2", "u-2"), "GPU-2/0": entry(), "GPU-1/0": entry()})
    await next_leader.uses.step()
    assert harness.ids[0] in next_leader.ids
    assert len(next_leader.ids) == 2


async def test_full_outbox_for_one_node_does_not_delay_others(harness: Harness) -> None:
    harness.refuses_of = "node-a"
    harness.holds({"GPU-1/0": entry()}, "node-a")
    harness.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with pytest.raises(ExportError, match="too full"):
        await harness.uses.step()
    harness.holds({"GPU-3/0": entry("r-3", "u-3")}, "node-c")
    with pytest.raises(ExportError, match="too full"):
        await harness.uses.step()
    assert [one.reservation for one in harness.exported] == ["r-2", "r-3"]
    harness.refuses_of = ""
    await harness.uses.step()
    assert [one.reservation for one in harness.exported] == ["r-2", "r-3", "r-1"]


async def test_end_keeps_its_time_while_the_outbox_is_full(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.refuses = True
    harness.holds({})
    for _ in range(2):
        with pytest.raises(ExportError):
            await harness.uses.step()
        harness.now += timedelta(hours=1)
    harness.refuses = False
    await harness.uses.step()
    assert harness.exported == [EXPECTED, evolve(EXPECTED, until=NOW)]


async def test_number_of_unexported_uses_is_bounded(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "uses", max_ended=20)
    harness.refuses = True
    with capture_logs() as logs:
        for number in range(25):
            harness.now += timedelta(seconds=1)
            harness.holds({"GPU-1/0": entry(f"r-{number}", f"u-{number}")})
            with pytest.raises(ExportError):
                await harness.uses.step()
    harness.refuses = False
    harness.holds({})
    await harness.uses.step()
    assert [one.reservation for one in harness.exported] == [f"r-{number}" for number in range(5, 25)]
    assert {line["event"] for line in logs} == {"ended uses dropped: the outboxes are full"}


async def test_bug_with_one_node_does_not_stop_others(harness: Harness) -> None:
    harness.pods["u-1"] = UsePodFacts("a bug")
    harness.holds({"GPU-1/0": entry()})
    harness.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with capture_logs() as logs:
        await harness.uses.step()
    assert [line["event"] for line in logs] == ["recording uses failed"]
    assert [one.reservation for one in harness.exported] == ["r-2"]


async def test_missing_right_to_read_pods_is_reported(harness: Harness) -> None:
    harness.pods["u-1"] = UsePodFacts("nobody can be asked")
    harness.holds({"GPU-1/0": entry()})
    harness.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    with pytest.raises(GpuwardenError, match="away"):
        await harness.uses.step()
    assert [one.reservation for one in harness.exported] == ["r-2"]
    del harness.pods["u-1"]
    await harness.uses.step()
    assert [one.reservation for one in harness.exported] == ["r-2", "r-1"]


async def test_pods_are_checked_at_an_interval_while_the_gpunode_is_missing(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.relist([])
    await harness.uses.step()
    asked = harness.asked
    for _ in range(50):
        await harness.uses.step()
    assert harness.asked == asked
    harness.now += uses.POD_CHECK_INTERVAL
    await harness.uses.step()
    assert harness.asked == asked + 1


async def test_reservation_without_a_pod_is_not_a_use(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry(uid=None)})
    await harness.uses.step()
    assert harness.exported == []
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    assert harness.exported == [EXPECTED]


async def test_use_begins_when_the_kubelet_has_chosen_the_gpu(harness: Harness) -> None:
    harness.holds({"GPU-2/0": {**entry(), "delivery": "awaited"}})
    await harness.uses.step()
    assert harness.exported == []
    harness.holds({"GPU-1/0": {**entry(), "delivery": "recorded"}})
    await harness.uses.step()
    assert harness.exported == [EXPECTED]


async def test_serial_learnt_later_is_in_the_end_record(harness: Harness) -> None:
    harness.called = GpuNames()
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.called = GpuNames("S1", "C1")
    harness.holds({})
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=NOW)


@pytest.mark.parametrize("start", ["", "before", "after"])
@pytest.mark.parametrize("end", ["", "before", "after"])
async def test_kill_at_any_step_leaves_one_row_with_one_end(harness: Harness, start: str, end: str) -> None:
    harness.crash = start
    harness.holds({"GPU-1/0": entry()})
    await stepped(harness)
    restarted(harness, {"GPU-1/0": entry()})
    await stepped(harness)
    assert harness.rows == {("r-1", "GPU-1"): EXPECTED}
    harness.crash, harness.now = end, NOW + timedelta(minutes=1)
    harness.holds({})
    await stepped(harness)
    harness.now = NOW + timedelta(minutes=2)
    restarted(harness, {})
    await stepped(harness)
    assert harness.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW + timedelta(minutes=1))}
    count = len(harness.exported)
    restarted(harness, {})
    await stepped(harness)
    assert len(harness.exported) == count


async def stepped(harness: Harness) -> None:
    try:
        await harness.uses.step()
    except CrashError:
        harness.crash = ""


def restarted(harness: Harness, held: Mapping[str, Raw]) -> None:
    harness.crash = ""
    harness.start()
    harness.version += 1
    harness.relist([raw_node(held, harness.version)])


async def test_missed_end_is_recorded_when_noticed(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.now = NOW + timedelta(days=1)
    restarted(harness, {"GPU-1/0": entry("r-2", "u-2")})
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until == NOW + timedelta(days=1)
    assert harness.rows["r-2", "GPU-1"].until is None


class TestNextLeader:
    """The next leader has its own, empty disk."""

    @pytest.fixture
    async def next_leader(self, harness: Harness, tmp_path: Path) -> Harness:
        harness.holds({"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await harness.uses.step()
        harness.directory = tmp_path / "another"
        harness.now = NOW + timedelta(minutes=1)
        return harness

    async def test_uses_that_ended_meanwhile_are_closed_and_others_stay_open(self, next_leader: Harness) -> None:
        restarted(next_leader, {"GPU-1/0": entry("r-3", "u-3"), "GPU-2/0": entry("r-2", "u-2")})
        await next_leader.uses.step()
        assert {key: one.until for key, one in next_leader.rows.items()} == {
            ("r-1", "GPU-1"): next_leader.now,
            ("r-2", "GPU-2"): None,
            ("r-3", "GPU-1"): None,
        }
        assert next_leader.rows["r-1", "GPU-1"] == evolve(EXPECTED, until=next_leader.now)
        count = len(next_leader.exported)
        await next_leader.uses.step()
        assert len(next_leader.exported) == count

    async def test_use_that_ends_later_is_closed_then(self, next_leader: Harness) -> None:
        restarted(next_leader, {"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await next_leader.uses.step()
        assert {one.until for one in next_leader.rows.values()} == {None}
        next_leader.now += timedelta(hours=1)
        next_leader.holds({})
        await next_leader.uses.step()
        assert {one.until for one in next_leader.rows.values()} == {next_leader.now}

    async def test_unavailable_store_is_queried_again_and_delays_nothing(self, next_leader: Harness) -> None:
        next_leader.answers = False
        restarted(next_leader, {"GPU-1/0": entry("r-3", "u-3")})
        with pytest.raises(ExportError, match="the store is away"):
            await next_leader.uses.step()
        assert {key: one.until for key, one in next_leader.rows.items()} == {
            ("r-1", "GPU-1"): None,
            ("r-2", "GPU-2"): None,
            ("r-3", "GPU-1"): None,
        }
        next_leader.answers = True
        await next_leader.uses.step()
        assert {key for key, one in next_leader.rows.items() if one.until is None} == {("r-3", "GPU-1")}

    @pytest.mark.simulated_time
    async def test_store_that_hangs_during_the_query_delays_nothing(self, next_leader: Harness) -> None:
        next_leader.may_answer.clear()
        restarted(next_leader, {"GPU-1/0": entry("r-3", "u-3")})
        with pytest.raises(ExportError, match="could not be read in time"):
            await next_leader.uses.step()
        assert next_leader.rows["r-3", "GPU-1"].until is None
        next_leader.may_answer.set()
        await next_leader.uses.step()
        assert {key for key, one in next_leader.rows.items() if one.until is None} == {("r-3", "GPU-1")}

    async def test_use_of_a_deleted_node_ends_when_its_pod_is_gone(self, next_leader: Harness) -> None:
        next_leader.pods["u-1"] = UsePodFacts(exists=False)
        next_leader.crash = ""
        next_leader.start()
        next_leader.relist([])
        await next_leader.uses.step()
        assert {key: one.until for key, one in next_leader.rows.items()} == {
            ("r-1", "GPU-1"): next_leader.now,
            ("r-2", "GPU-2"): None,
        }

    async def test_row_with_an_invalid_node_name_creates_no_file(self, next_leader: Harness, tmp_path: Path) -> None:
        next_leader.rows["r-9", "GPU-9"] = evolve(EXPECTED, node="../elsewhere", reservation="r-9", gpu_uuid="GPU-9")
        restarted(next_leader, {"GPU-1/0": entry(), "GPU-2/0": entry("r-2", "u-2")})
        await next_leader.uses.step()
        assert not (tmp_path / "elsewhere.json").exists()
        assert next_leader.rows["r-9", "GPU-9"].until is None

    async def test_end_saved_on_disk_is_exported_unchanged(self, harness: Harness) -> None:
        harness.holds({"GPU-1/0": entry()})
        await harness.uses.step()
        harness.refuses = True
        harness.holds({})
        with pytest.raises(ExportError):
            await harness.uses.step()
        harness.refuses, harness.now = False, NOW + timedelta(days=1)
        restarted(harness, {})
        await harness.uses.step()
        assert harness.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW)}


async def test_files_are_read_again_after_a_temporary_error(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    assert harness.directory is not None
    file = harness.directory / "node-a.json"
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    harness.rows.clear()
    restarted(harness, {})
    with pytest.raises(ExportError, match="open uses cannot be read"):
        await harness.uses.step()
    file.rmdir()
    file.write_bytes(content)
    await harness.uses.step()
    assert harness.rows == {("r-1", "GPU-1"): evolve(EXPECTED, until=NOW)}


async def test_use_is_exported_once_the_outbox_accepts_it(harness: Harness) -> None:
    harness.refuses = True
    harness.holds({"GPU-1/0": entry()})
    with pytest.raises(ExportError):
        await harness.uses.step()
    harness.refuses = False
    await harness.uses.step()
    assert harness.exported == [EXPECTED]


async def test_nothing_ends_while_a_watch_is_interrupted(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.is_current = False
    harness.relist([])
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until is None


async def test_recreated_empty_gpunode_ends_no_use(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.relist([])
    await harness.uses.step()
    harness.holds(None)
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until is None
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    assert len(harness.exported) == 1


async def test_use_of_a_deleted_gpunode_ends_when_its_pod_is_gone(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.relist([])
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until is None
    harness.pods["u-1"] = UsePodFacts("nobody can be asked")
    harness.now += uses.POD_CHECK_INTERVAL
    with pytest.raises(GpuwardenError):
        await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until is None
    harness.pods["u-1"] = UsePodFacts(exists=False)
    harness.now += uses.POD_CHECK_INTERVAL
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until == harness.now


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


async def test_truncated_file_is_set_aside_and_others_are_loaded(harness: Harness) -> None:
    harness.holds({"GPU-1/0": entry()})
    harness.holds({"GPU-2/0": entry("r-2", "u-2")}, "node-b")
    await harness.uses.step()
    assert harness.directory is not None
    file = harness.directory / "node-a.json"
    assert json.loads(file.read_text())[0]["use"]["reservation"] == "r-1"
    file.write_bytes(file.read_bytes()[:-5])
    again = OpenUses(harness.directory)
    again.read()
    assert again.nodes() == {"node-b"}
    assert (harness.directory / "node-a.torn").exists()


async def test_uses_without_a_directory_are_lost_at_the_end_of_the_process() -> None:
    harness = Harness(None)
    harness.holds({"GPU-1/0": entry()})
    await harness.uses.step()
    harness.holds({})
    await harness.uses.step()
    assert harness.rows["r-1", "GPU-1"].until == NOW


async def test_full_disk_loses_no_use(harness: Harness, tmp_path: Path) -> None:
    assert harness.directory is not None
    await harness.uses.step()
    harness.directory.rmdir()
    harness.directory.write_text("no directory")
    harness.holds({"GPU-1/0": entry()})
    with pytest.raises(ExportError, match="cannot be written"):
        await harness.uses.step()
    assert harness.exported == []
    harness.directory.unlink()
    harness.directory.mkdir()
    await harness.uses.step()
    assert harness.exported == [EXPECTED]
