"""Real stores: Postgres and an S3 server. Tests read them by their own means."""

import asyncio
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from attrs import evolve
from obstore.store import S3Store
from structlog.testing import capture_logs

from scripts.controlplane.build import BuildError
from scripts.controlplane.cluster import ROOT
from scripts.objectstore import ObjectStore, versitygw
from scripts.postgres import Postgres, PostgresMissingError, binaries
from tests.e2e.conftest import TOOL_MISSING
from tests.e2e.export_child import GPUS, numbered
from tests.export.killed import HELD, gpu_node
from tests.export.killed import Cluster as KnownCluster
from tests.export.records import NOW, batch, later, reading, use
from tests.running import GPUWARDEN
from webhook.export import Exporter, ExportError
from webhook.export.delivery import Delivery, check
from webhook.export.history import PastUse, UseQuery, find_uses
from webhook.export.outbox import opener
from webhook.export.postgres import MIGRATION_LOCK, PostgresExporter
from webhook.export.records import Batch
from webhook.export.s3 import ObjectExporter
from webhook.export.tables import Tables
from webhook.export.targets import ObjectTarget, PostgresTarget
from webhook.export.uses import OpenUses, UseRecorder
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import utc_now

# A space, a quote and a backslash: each breaks a naively concatenated connection string.
PASSWORD = "a b'c\\"
QUICK = Backoff(timedelta(milliseconds=10), timedelta(milliseconds=200))
PATIENCE = timedelta(seconds=120)

# A table that the older exporter created.
OLDER_TABLE = """
CREATE TABLE {name} (
    id BIGSERIAL PRIMARY KEY,
    cluster VARCHAR(255) NOT NULL, node VARCHAR(255) NOT NULL, machine VARCHAR(255) NOT NULL,
    source VARCHAR(255) NOT NULL, chassis VARCHAR(255) NOT NULL, gpu VARCHAR(255) NOT NULL,
    read_time TIMESTAMP WITH TIME ZONE NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT NOW(),
    UNIQUE (cluster, node, machine, source, chassis, gpu, read_time)
);"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """Not in pytest's directory: Postgres runs as another user without access to it."""
    try:
        binaries()
    except PostgresMissingError as exc:
        pytest.skip(str(exc))
    directory = Path(tempfile.mkdtemp(prefix="gpuwarden-postgres."))
    server = Postgres(directory, PASSWORD)
    server.create()
    server.start()
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.fixture
def table(request: pytest.FixtureRequest) -> str:
    """A table per test, with a name that needs quoting."""
    return f"T {abs(hash(request.node.nodeid)):x}"


def target_of(postgres: Postgres, table: str, **changes: Any) -> PostgresTarget:
    target = PostgresTarget(
        host=postgres.host,
        port=postgres.port,
        db=postgres.database,
        user=postgres.user,
        password=postgres.password,
        sslmode="disable",
        table=table,
        auto_migrate=True,
    )
    return evolve(target, **changes)


@asynccontextmanager
async def exporting(target: PostgresTarget) -> AsyncIterator[PostgresExporter]:
    exporter = PostgresExporter(target)
    yield exporter
    await exporter.close()


def rows(postgres: Postgres, table: str, what: str = "count(*)", suffix: str = "") -> str:
    name = Tables.named(table)
    found = {"": name.readings, "_use": name.uses, "_history": name.view}[suffix]
    return postgres.run_sql(f"SELECT {what} FROM {found.as_string()}")  # noqa: S608 - a name of the test's own


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE.total_seconds()):
        while not await asyncio.to_thread(is_so):  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.02)


class TestPostgres:
    @pytest.mark.defect("gpuid-11")
    async def test_password_can_be_any_text(self, postgres: Postgres, table: str) -> None:
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(batch())
        async with exporting(target_of(postgres, table, password="wrong")) as exporter:
            with pytest.raises(ExportError, match="password authentication failed") as caught:
                await exporter.export(batch())
        assert not caught.value.is_permanent

    async def test_changed_password_file_is_read_again(self, postgres: Postgres, table: str, tmp_path: Path) -> None:
        file = tmp_path / "password"
        file.write_text("wrong\n")
        async with exporting(target_of(postgres, table, password="wrong", password_file=file)) as exporter:
            with pytest.raises(ExportError, match="password authentication failed"):
                await exporter.export(batch())
            file.write_text(f"{postgres.password}\n")
            await exporter.export(batch())
        assert rows(postgres, table) == "2"

    @pytest.mark.defect("gpuid-10")
    @pytest.mark.parametrize(
        "name",
        [
            "Serials",
            "other.Serials",
            'with "quotes" and spaces',
            "x" * 55,
            "a%b",
            "50%",
            "x%(most)s",
            "we$do$ird",
            "{braces} and 'quotes'",
            "back\\slash",
            "ünï",
        ],
    )
    async def test_table_can_have_any_name(self, postgres: Postgres, name: str) -> None:
        postgres.run_sql("CREATE SCHEMA IF NOT EXISTS other")
        for _ in range(2):
            async with exporting(target_of(postgres, name)) as exporter:
                await exporter.check()
                await exporter.export(batch(uses=(use(),)))
        assert rows(postgres, name) == "2"
        assert rows(postgres, name, suffix="_history") == "1"
        found = await find_uses(target_of(postgres, name), UseQuery.from_flags(serial="1760000000011"))
        assert [one.reservation for one in found] == ["reservation-0"]

    async def test_new_table_has_the_older_systems_columns_and_new_ones(self, postgres: Postgres) -> None:
        async with exporting(target_of(postgres, "fresh")) as exporter:
            await exporter.export(batch())
        columns = postgres.run_sql(
            "SELECT string_agg(column_name, ',' ORDER BY ordinal_position) FROM information_schema.columns"
            " WHERE table_name = 'fresh'"
        )
        assert columns == (
            "id,cluster,node,machine,source,chassis,gpu,read_time,created_at,"
            "uuid,index,minor,pci_bus_id,model,memory,driver,boot_id"
        )
        indexes = postgres.run_sql("SELECT indexname FROM pg_indexes WHERE tablename = 'fresh' ORDER BY 1").split()
        assert {f"idx_fresh_{name}" for name in ("cluster", "node", "read_time", "created_at")} <= set(indexes)

    @pytest.mark.defect("gpuid-8")
    async def test_repeated_batch_changes_nothing(self, postgres: Postgres, table: str) -> None:
        whole = batch(uses=(use(), use(1, until=later(60))))
        for _ in range(3):
            async with exporting(target_of(postgres, table)) as exporter:
                await exporter.export(whole)
                await exporter.export(whole)
        assert (rows(postgres, table), rows(postgres, table, suffix="_use")) == ("2", "2")

    @pytest.mark.defect("gpuid-18")
    async def test_two_dies_with_one_serial_stay_two_devices(self, postgres: Postgres, table: str) -> None:
        dies = tuple(reading(number, gpu="1760000000011") for number in range(2))
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(Batch("dies", dies))
        assert rows(postgres, table, "string_agg(uuid || ' ' || minor, ',' ORDER BY uuid)") == "GPU-0 0,GPU-1 1"

    @pytest.mark.defect("gpuid-9")
    async def test_invalid_or_existing_row_does_not_block_other_rows(self, postgres: Postgres, table: str) -> None:
        bad = (reading(1, index=2**40), reading(2, gpu=None), reading(3, node="nul\0"))
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(batch(gpus=1))
            with capture_logs() as logs:
                await exporter.export(Batch("mixed", (reading(0), *bad, *map(reading, range(4, 9)))))
        assert (
            rows(postgres, table, "string_agg(uuid, ',' ORDER BY uuid)") == "GPU-0,GPU-3,GPU-4,GPU-5,GPU-6,GPU-7,GPU-8"
        )
        refused = [line["row"]["uuid"] for line in logs if line["event"] == "row refused by the database"]
        assert sorted(refused) == ["GPU-1", "GPU-2"]

    @pytest.mark.defect("gpuid-9")
    async def test_namespace_and_pod_of_maximum_length_are_stored_completely(
        self, postgres: Postgres, table: str
    ) -> None:
        source = f"{'n' * 63}/{'p' * 253}"
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(batch(source=source))
        assert rows(postgres, table, "DISTINCT source") == source

    async def test_text_too_long_for_an_index_is_truncated(self, postgres: Postgres, table: str) -> None:
        """The text is random, so that the database cannot compress it."""
        long = "".join(chr(0x4E00 + byte) for byte in os.urandom(9000))
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(batch(cluster=long, node=long, machine=long, source=long, chassis=long))
        assert rows(postgres, table) == "2"

    async def test_statement_that_waits_too_long_is_cancelled_and_retried(self, postgres: Postgres, table: str) -> None:
        quick = target_of(postgres, table, statement_timeout=timedelta(milliseconds=200))
        async with exporting(quick) as exporter:
            await exporter.export(batch("first"))
            with locked_table(postgres, table), pytest.raises(ExportError, match="statement timeout"):
                await exporter.export(batch("second", time=later(1)))
            await exporter.export(batch("second", time=later(1)))
        assert rows(postgres, table) == "4"

    async def test_concurrent_migrations_succeed(self, postgres: Postgres, table: str) -> None:
        exporters = [PostgresExporter(target_of(postgres, table)) for _ in range(4)]
        await asyncio.gather(*(one.export(batch()) for one in exporters))
        for one in exporters:
            await one.close()
        assert rows(postgres, table) == "2"

    async def test_missing_table_is_reported_before_anything_is_read(self, postgres: Postgres, table: str) -> None:
        async with exporting(target_of(postgres, table, auto_migrate=False)) as exporter:
            for tried in (exporter.check(), exporter.export(batch())):
                with pytest.raises(
                    ExportError, match=r"there is no table T .*: create it, or set POSTGRES_AUTO_MIGRATE=true"
                ):
                    await tried

    async def test_open_uses_are_returned_per_cluster_and_empty_without_a_table(
        self, postgres: Postgres, table: str
    ) -> None:
        uses = (
            use(0),
            use(1, until=later(60)),
            use(2, cluster="another"),
            use(3, serial="S", chassis="C", pod=None, since=later(5)),
        )
        async with exporting(target_of(postgres, table)) as exporter:
            assert [one async for one in exporter.open_uses("prod")] == []
            await exporter.export(Batch("uses", uses=uses))
            found = [one async for one in exporter.open_uses("prod")]
        assert sorted(found, key=lambda one: one.reservation) == [uses[0], uses[3]]


@contextmanager
def locked_table(postgres: Postgres, table: str) -> Iterator[None]:
    """Locks the table while the block runs."""
    name = Tables.named(table).readings.as_string()
    with holding(postgres, f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"):
        yield


@contextmanager
def holding(postgres: Postgres, statement: str) -> Iterator[None]:
    """Holds the locks of the statement while the block runs."""
    text = f"BEGIN; {statement}; SELECT 'locked'; "
    with postgres.session() as session:
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(text + "\n")
        session.stdin.flush()
        assert "locked" in map(str.strip, session.stdout)
        yield


class TestTableOfTheOlderExporter:
    @pytest.fixture
    def name(self, postgres: Postgres, request: pytest.FixtureRequest) -> str:
        name = f"s2_{abs(hash(request.node.nodeid)):x}"
        postgres.run_sql(OLDER_TABLE.format(name=name))
        return name

    @pytest.mark.defect("gpuid-9")
    async def test_insert_permission_is_enough_without_migration(self, postgres: Postgres, name: str) -> None:
        postgres.run_sql(
            f"CREATE ROLE w_{name} LOGIN PASSWORD 'w'; GRANT INSERT ON {name} TO w_{name};"
            f"GRANT USAGE ON SEQUENCE {name}_id_seq TO w_{name}"
        )
        target = target_of(postgres, name, user=f"w_{name}", password="w", auto_migrate=False)
        long = f"{'n' * 63}/{'p' * 253}"
        with capture_logs() as logs:
            async with exporting(target) as exporter:
                await exporter.check()
                await exporter.export(batch(uses=(use(),)))
                await exporter.export(batch())
                await exporter.export(batch("long", gpus=1, source=long))
        assert rows(postgres, name) == "3"
        assert rows(postgres, name, "max(length(source))") == "255"
        assert [line["event"] for line in logs] == [
            "uses are not stored: the table is missing",
            "text shortened to fit its column",
        ]

    async def test_exporter_without_insert_permission_is_not_ready(self, postgres: Postgres, name: str) -> None:
        postgres.run_sql(f"CREATE ROLE r_{name} LOGIN PASSWORD 'r'")
        target = target_of(postgres, name, user=f"r_{name}", password="r", auto_migrate=False)
        async with exporting(target) as exporter:
            with pytest.raises(ExportError, match="may not insert into"):
                await exporter.check()

    async def test_migration_adds_columns_and_keeps_rows(self, postgres: Postgres, name: str) -> None:
        async with exporting(target_of(postgres, name, auto_migrate=False)) as exporter:
            await exporter.export(batch())
        dies = tuple(reading(number, gpu="1760000000011", time=later(1)) for number in range(2))
        async with exporting(target_of(postgres, name)) as exporter:
            await exporter.export(Batch("dies", dies, (use(),)))
            await exporter.export(Batch("dies", dies, (use(),)))
        assert rows(postgres, name, "string_agg(uuid, ',' ORDER BY id)") == ",,GPU-0,GPU-1"
        assert rows(postgres, name, suffix="_use") == "1"

    async def test_migration_may_take_longer_than_a_write_timeout(
        self, postgres: Postgres, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("webhook.export.delivery.EXPORT_TIMEOUT", timedelta(seconds=2))
        exporter = PostgresExporter(target_of(postgres, name))
        delivery = Delivery([exporter], opener(None), utc_now, backoff=QUICK)
        running = asyncio.create_task(delivery.run())
        with holding(postgres, f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"):
            await delivery.take(batch())
            await until(lambda: waiting_for_locks(postgres) > 0)
            await asyncio.sleep(4)
            assert delivery.states["postgres"].error is None
        assert await delivery.drain(PATIENCE) == 0
        await running
        assert rows(postgres, name) == "2"

    async def test_blocked_migration_gives_up_and_keeps_finished_steps(
        self, postgres: Postgres, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another client locks the table for long: further writers wait only as long as the exporter does."""
        monkeypatch.setattr("webhook.export.postgres.LOCK_TIMEOUT", timedelta(milliseconds=200))
        async with exporting(target_of(postgres, name)) as exporter:
            with (
                holding(postgres, f"LOCK TABLE {name} IN ACCESS SHARE MODE"),
                pytest.raises(ExportError, match="lock timeout"),
            ):
                await exporter.export(batch())
            await exporter.export(batch())
        index = f"idx_{name}_gpu"
        postgres.run_sql(f"DROP INDEX {index}")
        async with exporting(target_of(postgres, name)) as exporter:
            with (
                holding(postgres, f"LOCK TABLE {name}_use IN ROW EXCLUSIVE MODE"),
                pytest.raises(ExportError, match="lock timeout"),
            ):
                await exporter.export(batch())
            assert postgres.run_sql(f"SELECT count(*) FROM pg_indexes WHERE indexname = '{index}'") == "1"  # noqa: S608
            await exporter.export(batch())
        assert rows(postgres, name) == "2"


@pytest.mark.defect("gpuid-19")
class TestHistory:
    async def asked(self, postgres: Postgres, table: str, **question: str) -> list[PastUse]:
        return list(await find_uses(target_of(postgres, table), UseQuery.from_flags(**question)))

    @pytest.fixture
    async def past(self, postgres: Postgres, table: str) -> str:
        """GPU-0 was used twice and moved in between; GPU-1 is in use."""
        moved = batch("moved", 2, node="gpu-b", time=later(7200), index=5)
        uses = (
            use(0),
            use(0, until=later(3600)),
            use(1, gpu_uuid="GPU-0", node="gpu-b", since=later(7300), until=later(7400), evidence_hash="sha256:new"),
            use(2, gpu_uuid="GPU-1", since=later(10)),
        )
        async with exporting(target_of(postgres, table)) as exporter:
            for number in range(4):
                await exporter.export(batch(f"{number}", 2, time=later(60 * number)))
            await exporter.export(moved)
            for one in uses:
                await exporter.export(Batch(f"use {one.reservation} {one.until}", uses=(one,)))
        return table

    async def test_history_of_a_serial_lists_all_uses_newest_first(self, postgres: Postgres, past: str) -> None:
        found = await self.asked(postgres, past, serial="1760000000011")
        assert [(one.node, one.pod, one.since, one.until, one.index) for one in found] == [
            ("gpu-b", "job-1", later(7300), later(7400), 5),
            ("gpu-a", "job-0", NOW, later(3600), 0),
        ]
        assert {one.chassis for one in found} == {"1820000000042"}

    async def test_history_of_a_pod_lists_its_gpu_serials(self, postgres: Postgres, past: str) -> None:
        (one,) = await self.asked(postgres, past, pod="train/job-2")
        assert (one.serial, one.gpu_uuid, one.until) == ("1760000000012", "GPU-1", None)

    async def test_history_of_a_hash_lists_the_pods_that_ran_on_it(self, postgres: Postgres, past: str) -> None:
        assert [one.pod for one in await self.asked(postgres, past, hash="sha256:new")] == ["job-1"]
        assert len(await self.asked(postgres, past, hash="sha256:abc")) == 2
        assert [one.pod for one in await self.asked(postgres, past, hash="sha256:abc", uuid="GPU-1")] == ["job-2"]

    async def test_use_is_listed_before_its_gpu_was_read(self, postgres: Postgres, past: str) -> None:
        async with exporting(target_of(postgres, past)) as exporter:
            await exporter.export(Batch("early", uses=(use(9, gpu_uuid="GPU-9", serial="99"),)))
        (one,) = await self.asked(postgres, past, serial="99")
        assert (one.gpu_uuid, one.machine) == ("GPU-9", None)

    async def stored(self, postgres: Postgres, table: str, *batches: Batch) -> None:
        async with exporting(target_of(postgres, table)) as exporter:
            for one in batches:
                await exporter.export(one)

    async def test_concurrent_uses_of_one_gpu_are_listed_with_their_own_times(
        self, postgres: Postgres, table: str
    ) -> None:
        uses = (
            use(0, gpu_uuid="GPU-0", since=NOW, until=later(100)),
            use(1, gpu_uuid="GPU-0", since=later(50), until=later(150)),
            use(2, gpu_uuid="GPU-0", since=later(60)),
        )
        await self.stored(postgres, table, batch(gpus=1), *(Batch(one.reservation, uses=(one,)) for one in uses))
        found = await self.asked(postgres, table, serial="1760000000011")
        assert [(one.pod, one.since, one.until) for one in found] == [
            ("job-2", later(60), None),
            ("job-1", later(50), later(150)),
            ("job-0", NOW, later(100)),
        ]
        at = {second: query_of_docs(postgres, table, later(second), later(second + 1)) for second in (10, 70, 120)}
        assert at == {10: {"job-0"}, 70: {"job-0", "job-1", "job-2"}, 120: {"job-1", "job-2"}}

    async def test_two_dies_with_one_serial_have_their_own_uses(self, postgres: Postgres, table: str) -> None:
        dies = tuple(reading(number, gpu="1760000000011") for number in range(2))
        await self.stored(postgres, table, Batch("dies", dies, (use(0), use(1))))
        found = await self.asked(postgres, table, serial="1760000000011")
        assert [(one.gpu_uuid, one.index, one.pod) for one in found] == [("GPU-0", 0, "job-0"), ("GPU-1", 1, "job-1")]

    @pytest.mark.defect("gpuid-2")
    async def test_use_shows_the_gpu_index_and_node_of_its_time(self, postgres: Postgres, table: str) -> None:
        """The GPU moves to another node and chassis and is read only there; another cluster has a node of the same
        name."""
        await self.stored(
            postgres,
            table,
            batch("there", 1, node="gpu-b", machine="i-b", chassis="C-b", index=3, time=later(100)),
            batch("beside", 1, cluster="other", machine="i-o", chassis="C-o", index=5, time=later(10)),
            Batch("uses", uses=(use(0, until=later(50)), use(1, gpu_uuid="GPU-0", node="gpu-b", since=later(90)))),
        )
        found = await self.asked(postgres, table, serial="1760000000011")
        assert [(one.node, one.machine, one.chassis, one.index) for one in found] == [
            ("gpu-b", "i-b", "C-b", 3),
            ("gpu-a", None, "unknown", None),
        ]
        assert {one.serial for one in found} == {"1760000000011"}

    @pytest.mark.defect("gpuid-2")
    async def test_chassis_that_is_known_later_is_stored(self, postgres: Postgres, table: str) -> None:
        for one in (use(), use(chassis="C-1"), use(until=later(9))):
            await self.stored(postgres, table, Batch(f"{one}", uses=(one,)))
        assert rows(postgres, table, "string_agg(chassis, ',')", suffix="_use") == "C-1"
        await self.stored(postgres, table, Batch("other", uses=(use(1),)))
        assert rows(postgres, table, "string_agg(chassis, ',' ORDER BY pod)", suffix="_use") == "C-1,unknown"

    async def test_history_command_reads_the_database(self, postgres: Postgres, past: str) -> None:
        done = history(postgres, past, "--serial", "1760000000012", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert [one["pod"] for one in json.loads(done.stdout)] == ["job-2"]
        done = history(postgres, past, "--pod", "train/job-0")
        header, line = done.stdout.splitlines()
        assert header.split()[:3] == ["SINCE", "UNTIL", "CLUSTER"]
        assert line.split()[-3:] == ["train/job-0", "Job/train", "sha256:abc"]

    async def test_history_of_an_unknown_serial_is_empty(self, postgres: Postgres, table: str) -> None:
        async with exporting(target_of(postgres, table)) as exporter:
            await exporter.export(batch(gpus=1, gpu="unknown", uses=(use(serial=None),)))
            assert [one.serial for one in await self.asked(postgres, table, uuid="GPU-0")] == [None]
            await exporter.export(batch(gpus=1, gpu="1", node="another", time=later(-60)))
        assert [one.serial for one in await self.asked(postgres, table, uuid="GPU-0")] == ["1"]

    async def test_history_command_reports_errors(self, postgres: Postgres, table: str) -> None:
        done = history(postgres, table, "--serial", "1")
        assert done.returncode == 1
        assert "there is no history in" in done.stderr
        done = history(postgres, table)
        assert done.returncode == 2
        assert "set at least one of --serial, --pod, --hash and --uuid" in done.stderr


def query_of_docs(postgres: Postgres, table: str, after: datetime, before: datetime) -> set[str]:
    """The pods of a period, by the query in docs/how-to/history.md."""
    page = ROOT / "docs" / "how-to" / "history.md"
    (question,) = re.findall(r"^SELECT .*?;$", page.read_text(), re.DOTALL | re.MULTILINE)
    for old, new in (
        ("gpu_history", Tables.named(table).view.as_string()),
        ("SELECT node, pod, owner, evidence_hash, since, until", "SELECT pod"),
        ("'1760000000011'", "'1760000000011'"),
        ("'2026-06-02'", f"'{before.isoformat()}'"),
        ("'2026-06-01'", f"'{after.isoformat()}'"),
    ):
        assert old in question
        question = question.replace(old, new)
    return set(postgres.run_sql(question).split())


def history(postgres: Postgres, table: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "POSTGRES_HOST": postgres.host,
        "POSTGRES_PORT": str(postgres.port),
        "POSTGRES_DB": postgres.database,
        "POSTGRES_USER": postgres.user,
        "POSTGRES_PASSWORD": postgres.password,
        "POSTGRES_SSLMODE": "disable",
        "POSTGRES_TABLE": table,
    }
    command = [GPUWARDEN, "history", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


class TestDatabaseOutage:
    async def away(self, postgres: Postgres, table: str, outbox: Path | None, seconds: float) -> None:
        """Delivers batches while the database crashes, stays down and returns."""
        exporter = PostgresExporter(target_of(postgres, table))
        delivery = Delivery([exporter], opener(outbox), utc_now, backoff=QUICK)
        running = asyncio.create_task(delivery.run())
        for number in range(100):
            await delivery.take(numbered(number))
            if number == 30:
                await until(lambda: rows_if_there(postgres, table) not in ("", "0"))
                await asyncio.to_thread(postgres.kill)
        try:
            await until(lambda: delivery.states["postgres"].error is not None)
            with pytest.raises(ExportError, match=r"^postgres: connection failed"):
                await check([exporter], delivery.states)
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(postgres.start)
        await until(lambda: delivery.states["postgres"].waiting.batches == 0)
        await check([exporter], delivery.states)
        assert await delivery.drain(PATIENCE) == 0
        await running
        assert (rows(postgres, table), rows(postgres, table, suffix="_use")) == (str(100 * GPUS), "100")

    @pytest.mark.defect("gpuid-15")
    async def test_every_batch_is_stored_once_after_a_database_outage(
        self, postgres: Postgres, table: str, tmp_path: Path
    ) -> None:
        await self.away(postgres, table, tmp_path, 0)

    @pytest.mark.long
    async def test_every_batch_is_stored_once_after_a_ten_minute_outage(
        self, postgres: Postgres, table: str, tmp_path: Path
    ) -> None:
        await self.away(postgres, table, tmp_path, 600)


@pytest.mark.defect("gpuid-16")
async def test_no_write_in_flight_completes_after_drain(postgres: Postgres, table: str, tmp_path: Path) -> None:
    """A process that releases its Lease after `drain` has finished its writes; the next process writes the rest."""
    async with exporting(target_of(postgres, table)) as exporter:
        await exporter.export(numbered(0))
    delivery = Delivery([PostgresExporter(target_of(postgres, table))], opener(tmp_path), utc_now, backoff=QUICK)
    running = asyncio.create_task(delivery.run())
    with locked_table(postgres, table):
        await delivery.take(numbered(1))
        await until(lambda: waiting_for_locks(postgres) > 0)
        assert await delivery.drain(timedelta(milliseconds=50)) == 2
        await running
    await until(lambda: waiting_for_locks(postgres) == 0)
    assert rows(postgres, table) == str(GPUS)
    heir = Delivery([PostgresExporter(target_of(postgres, table))], opener(tmp_path), utc_now, backoff=QUICK)
    assert await heir.drain(PATIENCE) == 0
    assert rows(postgres, table) == str(2 * GPUS)


@pytest.mark.defect("gpuid-19")
async def test_use_that_ended_without_a_leader_is_closed_by_the_next_leader(
    postgres: Postgres, table: str, tmp_path: Path
) -> None:
    """Each process has its own disk."""
    other = {"GPU-1/0": {**HELD, "reservation": "r-2", "uid": "u-2"}}
    for number, held in enumerate(({"GPU-1/0": HELD}, other)):
        exporter = PostgresExporter(target_of(postgres, table))
        delivery = Delivery([exporter], opener(tmp_path / f"{number}"), utc_now, backoff=QUICK)
        uses = UseRecorder(
            "prod",
            KnownCluster(),
            OpenUses(tmp_path / f"{number}" / "uses"),
            delivery.take,
            lambda number=number: later(number),  # type: ignore[misc]
            lambda: True,
            lambda delivery=delivery: delivery.open_uses("prod"),  # type: ignore[misc]
        )
        uses.gpu_nodes.changed(gpu_node(held, number))
        await uses.step()
        assert await delivery.drain(PATIENCE) == 0
    assert rows(postgres, table, "string_agg(reservation, ',' ORDER BY reservation)", "_use") == "r-1,r-2"
    assert rows(postgres, table, "string_agg(reservation, ',') FILTER (WHERE until IS NULL)", "_use") == "r-2"


def waiting_for_locks(postgres: Postgres) -> int:
    """The number of the exporter's statements that wait for locks, or none."""
    return int(
        postgres.run_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'gpuwarden' AND wait_event_type = 'Lock'"
        )
    )


@pytest.mark.defect("gpuid-8")
def test_process_killed_at_any_point_stores_every_batch_once(postgres: Postgres, table: str, tmp_path: Path) -> None:
    """A batch that one process has taken is not given to another: the next process finds it in the outbox or in the
    database."""
    count, first = 200, 0
    for stop_after in (1, 20, 60, 61, 110, 170):
        with child(postgres, table, tmp_path, first, count) as process:
            assert process.stdout is not None
            for line in process.stdout:
                first = int(line) + 1
                if first >= stop_after:
                    break
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            # The batches that it reported before the signal.
            first = max([first, *(int(line) + 1 for line in process.stdout)])
    with child(postgres, table, tmp_path, first, count) as process:
        said, errors = process.communicate(timeout=PATIENCE.total_seconds())
    assert process.returncode == 0, errors
    assert said.split() == [str(number) for number in range(first, count)]
    assert rows(postgres, table) == str(count * GPUS)
    assert rows(postgres, table, "count(DISTINCT (node, read_time, uuid))") == str(count * GPUS)
    assert rows(postgres, table, suffix="_use") == str(count)
    ended = sum(1 for number in range(count) for one in numbered(number).uses if one.until is not None)
    assert rows(postgres, table, "count(until)", suffix="_use") == str(ended)


@contextmanager
def child(postgres: Postgres, table: str, outbox: Path, first: int, count: int) -> Iterator[subprocess.Popen[str]]:
    target = {
        name: getattr(target_of(postgres, table), name)
        for name in ("host", "port", "db", "user", "password", "sslmode", "table", "auto_migrate")
    }
    arguments = {"target": target, "outbox": str(outbox), "first": first, "count": count}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.export_child"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments))
        process.stdin.close()
        process.stdin = None
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk that is full is a small tmpfs, and only root may mount one")
    yield disk
    subprocess.run(["/usr/bin/env", "umount", str(disk)], check=True)


async def test_full_disk_is_reported_and_earlier_batches_are_stored(
    postgres: Postgres, table: str, small_disk: Path
) -> None:
    exporter = PostgresExporter(target_of(postgres, table))
    delivery = Delivery([exporter], opener(small_disk), utc_now, backoff=QUICK)
    taken = 0
    with pytest.raises(ExportError, match=r"^postgres: the outbox cannot be written: No space left on device$"):  # noqa: PT012
        for number in range(100):
            await delivery.take(numbered(number))
            taken += 1
    assert taken > 0
    running = asyncio.create_task(delivery.run())
    await until(lambda: rows_if_there(postgres, table) == str(taken * GPUS))
    await until(lambda: delivery.states["postgres"].waiting.batches == 0)
    await delivery.take(numbered(taken))
    assert await delivery.drain(PATIENCE) == 0
    await running
    assert rows(postgres, table) == str((taken + 1) * GPUS)


def rows_if_there(postgres: Postgres, table: str) -> str:
    try:
        return rows(postgres, table)
    except RuntimeError:
        return ""


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    try:
        versitygw()
    except BuildError as exc:
        pytest.exit(str(exc), returncode=TOOL_MISSING)
    server = ObjectStore(tmp_path_factory.mktemp("objects"))
    server.start()
    yield server
    server.stop()


class TestObjectStore:
    @pytest.fixture
    def bucket(self, object_store: ObjectStore, request: pytest.FixtureRequest) -> str:
        name = f"b{abs(hash(request.node.nodeid)):x}"
        object_store.make_bucket(name)
        return name

    def target(self, store: ObjectStore, bucket: str, **changes: Any) -> ObjectTarget:
        options = {
            "endpoint": store.url,
            "access_key_id": store.access_key,
            "secret_access_key": store.secret_key,
        }
        return evolve(ObjectTarget(bucket, "serial-numbers", options=options, timeout=timedelta(seconds=10)), **changes)

    def objects(self, store: ObjectStore, bucket: str) -> dict[str, Any]:
        client = S3Store(
            bucket,
            endpoint=store.url,
            region="us-east-1",
            access_key_id=store.access_key,
            secret_access_key=store.secret_key,
            client_options={"allow_http": True},
        )
        return {one["path"]: obstore.get(client, one["path"]) for page in obstore.list(client) for one in page}

    async def test_object_is_stored_with_its_content_and_metadata(self, object_store: ObjectStore, bucket: str) -> None:
        exporter: Exporter = ObjectExporter(self.target(object_store, bucket))
        await exporter.check()
        await exporter.export(batch(uses=(use(),)))
        found = self.objects(object_store, bucket)
        readings, uses = sorted(found)[::-1] if sorted(found)[0].startswith("serial-numbers-use") else sorted(found)
        assert readings.startswith("serial-numbers/year=2026/month=01/day=01/hour=00/20260101-000000.123-")
        assert uses.startswith("serial-numbers-use/year=2026/month=01/day=01/hour=00/20260101-000000.123-")
        assert dict(found[readings].attributes) == {
            "Content-Type": "text/csv",
            "source": "gpuid",
            "record_count": "2",
            "timestamp": "2026-01-01T00:00:00Z",
            "format": "csv",
            "columns": "cluster,node,machine,source,chassis,gpu,time",
        }
        lines = list(csv.reader(io.StringIO(bytes(found[readings].bytes()).decode())))
        assert [line[5] for line in lines] == ["1760000000011", "1760000000012"]

    @pytest.mark.defect("gpuid-7")
    async def test_batches_of_the_same_time_get_their_own_objects_and_a_repeat_overwrites(
        self, object_store: ObjectStore, bucket: str
    ) -> None:
        exporter = ObjectExporter(self.target(object_store, bucket))
        await asyncio.gather(*(exporter.export(batch(f"{number}")) for number in range(10)))
        await asyncio.gather(*(exporter.export(batch(f"{number}")) for number in range(10)))
        assert len(self.objects(object_store, bucket)) == 10

    async def test_missing_bucket_and_wrong_key_are_reported(self, object_store: ObjectStore, bucket: str) -> None:
        for target, reason in (
            (self.target(object_store, "nowhere"), "NoSuchBucket"),
            (
                self.target(
                    object_store,
                    bucket,
                    options={**self.target(object_store, bucket).options, "secret_access_key": "wrong"},
                ),
                "SignatureDoesNotMatch",
            ),
        ):
            exporter = ObjectExporter(target)
            for tried in (exporter.check(), exporter.export(batch())):
                with pytest.raises(ExportError, match=f"^{reason}"):
                    await tried

    @pytest.mark.defect("gpuid-15")
    async def test_every_object_is_stored_once_after_a_server_outage(
        self, object_store: ObjectStore, bucket: str
    ) -> None:
        exporter = ObjectExporter(self.target(object_store, bucket))
        delivery = Delivery([exporter], opener(None), utc_now, backoff=QUICK)
        running = asyncio.create_task(delivery.run())
        await delivery.take(batch("before"))
        await until(lambda: delivery.states["s3"].waiting.batches == 0)
        await asyncio.to_thread(object_store.stop)
        try:
            for number in range(5):
                await delivery.take(batch(f"{number}"))
            await until(lambda: delivery.states["s3"].error is not None)
            with pytest.raises(ExportError, match=r"^s3: "):
                await check([exporter], delivery.states)
        finally:
            await asyncio.to_thread(object_store.start)
        assert await delivery.drain(PATIENCE) == 0
        await running
        assert len(self.objects(object_store, bucket)) == 6


async def test_database_outage_does_not_delay_the_object_store(object_store: ObjectStore, tmp_path: Path) -> None:
    object_store.make_bucket("alone")
    options = {
        "endpoint": object_store.url,
        "access_key_id": object_store.access_key,
        "secret_access_key": object_store.secret_key,
    }
    nowhere = PostgresTarget(host="127.0.0.1", port=1, db="x", user="x", password="x")
    exporters: list[Exporter] = [
        ObjectExporter(ObjectTarget("alone", options=options)),
        PostgresExporter(nowhere),
    ]
    delivery = Delivery(exporters, opener(tmp_path), utc_now, backoff=QUICK)
    running = asyncio.create_task(delivery.run())
    for number in range(5):
        await delivery.take(batch(f"{number}"))
    await until(lambda: delivery.states["s3"].waiting.batches == 0)
    assert delivery.states["postgres"].waiting.batches == 5
    assert await delivery.drain(timedelta(milliseconds=100)) == 5
    await running
