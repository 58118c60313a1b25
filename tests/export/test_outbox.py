"""The outbox of batches waiting to be stored."""

import json
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.export.doubles import SlowBatchStore, UnreadableBatchStore, WatchedDisk
from tests.export.killed import COUNT
from tests.export.records import NOW, batch, later, use
from webhook.export import ExportError
from webhook.export.outbox import (
    MAX_BYTES_IN_MEMORY,
    MAX_REFUSED,
    Backlog,
    BatchStore,
    DirectoryBatchStore,
    MemoryBatchStore,
    Outbox,
    opener,
)
from webhook.export.records import Batch

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BatchStore:
    return MemoryBatchStore() if request.param == "memory" else DirectoryBatchStore(tmp_path / "outbox")


def reopened(outbox: Outbox, directory: Path) -> Outbox:
    outbox.close()
    return Outbox(DirectoryBatchStore(directory))


def batches(outbox: Outbox, records: int = 1000) -> list[Batch]:
    return [found for _, found in outbox.first(records)]


class TestAnyStore:
    def test_batches_come_out_complete_and_in_order(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        given = [batch("second"), batch("first", uses=(use(until=later(5)),))]
        assert [outbox.put(one, NOW) for one in given] == [True, True]
        assert batches(outbox) == given

    def test_same_batch_is_kept_once(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        assert outbox.put(batch(), NOW)
        assert not outbox.put(batch(), later(9))
        assert outbox.waiting == Backlog(1, outbox.waiting.size, NOW)

    def test_done_removes_a_batch_and_the_next_is_the_oldest(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        for number in range(3):
            outbox.put(batch(f"{number}"), later(number))
        outbox.done(entry for entry, _ in outbox.first(0))
        assert [one.id for one in batches(outbox)] == ["1", "2"]
        assert outbox.waiting.oldest == later(1)

    def test_first_returns_batches_up_to_the_record_limit_and_at_least_one(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        for number in range(4):
            outbox.put(batch(f"{number}", gpus=4), NOW)
        assert [len(batches(outbox, room)) for room in (0, 4, 11, 12, 100)] == [1, 1, 2, 3, 4]

    def test_put_fails_when_full_and_works_after_a_batch_is_done(self, store: BatchStore) -> None:
        size = Outbox(MemoryBatchStore())
        size.put(batch("0"), NOW)
        outbox = Outbox(store, max_bytes=2 * size.waiting.size)
        outbox.put(batch("0"), NOW)
        outbox.put(batch("1"), NOW)
        with pytest.raises(ExportError, match="the outbox is full"):
            outbox.put(batch("2"), NOW)
        outbox.done(entry for entry, _ in outbox.first(0))
        assert outbox.put(batch("2"), NOW)

    def test_refused_batch_is_not_returned_again(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        outbox.put(batch("bad"), NOW)
        outbox.put(batch("good"), NOW)
        outbox.refuse(outbox.first(0)[0][0])
        assert [one.id for one in batches(outbox)] == ["good"]

    def test_concurrent_puts_lose_nothing(self, store: BatchStore) -> None:
        outbox = Outbox(store)
        names = [f"{number}" for number in range(40)]
        threads = [
            threading.Thread(target=lambda mine=names[one::4]: [outbox.put(batch(name), NOW) for name in mine])
            for one in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(one.id for one in batches(outbox)) == sorted(names)


class TestDuringWrite:
    def test_second_put_of_a_batch_being_written_fails(self) -> None:
        store = SlowBatchStore()
        outbox = Outbox(store)
        writing = threading.Thread(target=outbox.put, args=(batch(), NOW))
        writing.start()
        assert store.is_asked.wait(30)
        assert batches(outbox) == []
        with pytest.raises(ExportError, match="is already being written"):
            outbox.put(batch(), NOW)
        store.may_go_on.set()
        writing.join()
        assert not outbox.put(batch(), NOW)

    def test_batch_being_written_counts_towards_the_limit(self) -> None:
        one = Outbox(MemoryBatchStore())
        one.put(batch("0"), NOW)
        store = SlowBatchStore()
        outbox = Outbox(store, max_bytes=one.waiting.size)
        writing = threading.Thread(target=outbox.put, args=(batch("0"), NOW))
        writing.start()
        assert store.is_asked.wait(30)
        with pytest.raises(ExportError, match="the outbox is full"):
            outbox.put(batch("1"), NOW)
        store.may_go_on.set()
        writing.join()
        assert [found.id for found in batches(outbox)] == ["0"]


def test_memory_outboxes_fit_the_pods_memory_limit() -> None:
    """The Pod's memory limit of some hundred MiB fits the outboxes of all exporters; a disk holds more."""
    assert MAX_BYTES_IN_MEMORY == 16 * 1024 * 1024
    outbox = opener(None)("dead")
    big = batch(gpus=1, node="n" * (MAX_BYTES_IN_MEMORY - 4096))
    assert outbox.put(big, NOW)
    with pytest.raises(ExportError, match=f"of {MAX_BYTES_IN_MEMORY} bytes used"):
        outbox.put(batch("next", gpus=100), NOW)


@pytest.mark.defect("gpuid-8")
def test_kill_before_any_file_operation_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    """Kills real processes before each open, rename or removal of a file."""
    command = [sys.executable, "-m", "tests.export.killed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    readings = sorted(f"node-{node}/GPU-{gpu}" for node in range(COUNT) for gpu in range(2))
    uses = [[f"r-1/GPU-{gpu}", later(1).isoformat()] for gpu in (1, 2)]
    assert [one for one in lives if (one["code"], one["readings"], one["uses"]) != (0, readings, uses)] == []
    assert {one["said"] for one in lives} == set(range(COUNT + 1))
    assert len(lives) > 20


def test_temporary_read_error_loses_nothing() -> None:
    store = UnreadableBatchStore()
    outbox = Outbox(store)
    given = [batch(f"{number}") for number in range(3)]
    for one in given:
        outbox.put(one, NOW)
    store.refusals = 1
    with pytest.raises(ExportError, match=r"^the outbox cannot be read: .*: Too many open files$"):
        outbox.first(1000)
    assert outbox.waiting.batches == 3
    assert batches(outbox) == given


class TestOnDisk:
    def test_put_flushes_content_before_rename_and_directory_before_return(self, tmp_path: Path) -> None:
        disk = WatchedDisk(tmp_path)
        outbox = Outbox(DirectoryBatchStore(tmp_path, disk.flush))
        outbox.put(batch(), NOW)
        (file,) = tmp_path.glob("*.batch")
        size = outbox.waiting.size
        assert disk.flushes == [(f"{file.name}.new", {f"{file.name}.new": size}), ("", {file.name: size})]

    def test_files_with_other_names_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "notes.batch").write_text("a person's")
        outbox = Outbox(DirectoryBatchStore(tmp_path))
        assert outbox.put(batch(), NOW)
        assert batches(outbox) == [batch()]
        assert (tmp_path / "notes.batch").read_text() == "a person's"

    def test_full_disk_fails_put_and_leaves_no_file(self, tmp_path: Path) -> None:
        """Uses /dev/full under the name of the next batch."""
        outbox = Outbox(DirectoryBatchStore(tmp_path / "outbox"))
        assert outbox.put(batch("probe"), NOW)
        (probe,) = (tmp_path / "outbox").glob("*.batch")
        outbox.done(entry for entry, _ in outbox.first(0))
        again = reopened(outbox, tmp_path / "outbox")
        (tmp_path / "outbox" / f"{probe.name}.new").symlink_to("/dev/full")
        with pytest.raises(ExportError, match=r"^the outbox cannot be written: No space left on device$"):
            again.put(batch("probe"), NOW)
        assert again.waiting == Backlog()
        assert [path.name for path in (tmp_path / "outbox").iterdir()] == ["lock"]
        assert again.put(batch("probe"), NOW)

    def test_next_process_finds_batches_in_order_with_their_age(self, tmp_path: Path) -> None:
        outbox = Outbox(DirectoryBatchStore(tmp_path))
        given = [batch(f"{number}") for number in range(12)]
        for number, one in enumerate(given):
            outbox.put(one, later(number))
        outbox.done(entry for entry, _ in outbox.first(0))
        found = reopened(outbox, tmp_path)
        assert batches(found) == given[1:]
        assert found.waiting == Backlog(11, outbox.waiting.size, later(1))

    def test_batches_put_after_a_restart_follow_older_ones(self, tmp_path: Path) -> None:
        outbox = Outbox(DirectoryBatchStore(tmp_path))
        outbox.put(batch("old"), NOW)
        outbox = reopened(outbox, tmp_path)
        outbox.put(batch("new"), NOW)
        assert [one.id for one in batches(reopened(outbox, tmp_path))] == ["old", "new"]

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda content: content[:-5], id="cut off"),
            pytest.param(lambda content: b"", id="empty"),
            pytest.param(lambda content: content.replace(b"GPU-0", b"GPU-9"), id="changed-byte"),
        ],
    )
    def test_corrupt_file_is_set_aside_and_logged_and_others_stay(self, tmp_path: Path, damage: object) -> None:
        outbox = Outbox(DirectoryBatchStore(tmp_path))
        outbox.put(batch("torn"), NOW)
        outbox.put(batch("whole"), NOW)
        file = min(tmp_path.glob("*.batch"))
        assert callable(damage)
        file.write_bytes(damage(file.read_bytes()))
        with capture_logs() as logs:
            found = reopened(outbox, tmp_path)
        assert [one.id for one in batches(found)] == ["whole"]
        assert [(line["event"], line["file"]) for line in logs] == [("outbox file is corrupt", file.name)]
        assert file.with_suffix(".torn").exists()

    def test_unreadable_file_at_start_is_an_error_and_stays(self, tmp_path: Path) -> None:
        outbox = opener(tmp_path)("store")
        outbox.put(batch(), NOW)
        outbox.close()
        (file,) = (tmp_path / "store").glob("*.batch")
        content = file.read_bytes()
        file.unlink()
        file.mkdir()
        with pytest.raises(ExportError, match=f"^the outbox cannot be read: {file.name}: Is a directory$"):
            opener(tmp_path)("store")
        file.rmdir()
        file.write_bytes(content)
        assert batches(opener(tmp_path)("store")) == [batch()]

    def test_missing_file_is_skipped(self, tmp_path: Path) -> None:
        outbox = Outbox(DirectoryBatchStore(tmp_path))
        outbox.put(batch("gone"), NOW)
        outbox.put(batch("next"), NOW)
        min(tmp_path.glob("*.batch")).unlink()
        with capture_logs() as logs:
            assert [one.id for one in batches(outbox)] == ["next"]
        assert [line["event"] for line in logs] == ["outbox file is missing"]
        assert outbox.waiting.batches == 1

    def test_temporary_file_of_a_crash_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / "000000000001-abc.batch.new").write_bytes(b"half")
        assert batches(Outbox(DirectoryBatchStore(tmp_path))) == []
        assert list(tmp_path.glob("*.new")) == []

    def test_refused_files_are_kept_up_to_a_limit(self, tmp_path: Path) -> None:
        outbox = Outbox(DirectoryBatchStore(tmp_path, lambda _: None))
        for number in range(MAX_REFUSED + 1):
            outbox.put(batch(f"{number}"), NOW)
            outbox.refuse(outbox.first(0)[0][0])
        assert len(list(tmp_path.glob("*.refused"))) == MAX_REFUSED
        assert batches(reopened(outbox, tmp_path)) == []

    def test_two_processes_do_not_share_an_outbox(self, tmp_path: Path) -> None:
        first = DirectoryBatchStore(tmp_path)
        with pytest.raises(ExportError, match="another process works with the outbox"):
            DirectoryBatchStore(tmp_path)
        first.close()
        DirectoryBatchStore(tmp_path).close()

    def test_unusable_directory_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ExportError, match=r"the outbox cannot be kept in .*: it is not a directory"):
            opener(tmp_path / "file")("stdout")

    def test_each_exporter_has_its_own_outbox(self, tmp_path: Path) -> None:
        opened = opener(tmp_path)
        first, second = opened("stdout"), opened("http")
        first.put(batch(), NOW)
        assert batches(second) == []

    def test_write_error_loses_only_that_batch(self) -> None:
        class FullBatchStore(MemoryBatchStore):
            is_full = False

            def put(self, name: str, content: bytes) -> None:
                if self.is_full:
                    raise OSError(28, "No space left on device")
                super().put(name, content)

        store = FullBatchStore()
        outbox = Outbox(store)
        outbox.put(batch("before"), NOW)
        store.is_full = True
        with pytest.raises(ExportError, match="the outbox cannot be written: No space left on device"):
            outbox.put(batch("full"), NOW)
        store.is_full = False
        assert outbox.put(batch("full"), NOW + timedelta(minutes=1))
        assert [one.id for one in batches(outbox)] == ["before", "full"]
