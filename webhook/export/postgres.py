"""Rows in Postgres. A batch is copied into a staging table; new rows are inserted from there in one transaction.

A unique key finds rows that are already stored, so storing a batch again changes nothing.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg
import structlog
from attrs import evolve, frozen
from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from webhook.export import ExportError
from webhook.export.records import OWN_COLUMNS, UNKNOWN, USE_COLUMNS, Batch, Use
from webhook.export.tables import (
    GPUID_COLUMNS,
    MAX_INDEXED,
    Tables,
    clipped,
    merged_uses,
    reading_row,
    upsert,
    use_row,
    width,
)
from webhook.export.targets import PostgresTarget, current_secret, is_local

log = structlog.get_logger(__name__)

COLUMN_TYPES: Final[LiteralString] = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod) FROM pg_attribute a
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped"""

MAY_INSERT: Final[LiteralString] = "SELECT has_table_privilege(to_regclass(%s), 'INSERT')"
# The advisory lock of all processes that migrate this database: "gpuw" as a number.
MIGRATION_LOCK: Final = 0x67707577
# A dead peer is noticed after this time; TCP alone takes about 15 minutes.
TCP_TIMEOUT: Final = timedelta(seconds=30)
# While a migration waits for a table lock, writers queue behind it.
LOCK_TIMEOUT: Final = timedelta(seconds=5)

Row = Mapping[str, Any]


@frozen
class Destination:
    """A table as it was found: its name, and which of our columns it has, with their types."""

    table: sql.Identifier
    columns: Mapping[str, str]
    on_conflict: sql.Composable

    @property
    def staging(self) -> sql.Identifier:
        """Named after the table's shape: behind a pooler, the session may have a staging table of another shape."""
        form = f"{self.table.as_string()} {self.columns}"
        return sql.Identifier("pg_temp", f"new_{hashlib.sha256(form.encode()).hexdigest()[:16]}")

    @property
    def definition(self) -> sql.Composed:
        """The staging table's columns. CREATE TABLE ... LIKE would need SELECT on the table."""
        kinds = (sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in self.columns.items())
        return sql.SQL(", ").join(kinds)


@frozen
class Session:
    """A connection and the tables found through it."""

    connection: AsyncConnection[tuple[Any, ...]]
    readings: Destination
    uses: Destination | None


class PostgresExporter:
    """Uses one connection, opened on demand and again after each failure."""

    name = "postgres"
    # More than one node's records: a transaction with eight rows costs as much as one with thousands.
    records_at_once = 4000

    def __init__(self, target: PostgresTarget) -> None:
        """Raises GpuwardenError if the table name is invalid."""
        self._target = target
        self._tables = Tables.named(target.table)
        if target.sslmode != "verify-full" and not is_local(target.host):
            log.warning(
                "the database's host name is not verified",
                sslmode=target.sslmode,
                hint="set POSTGRES_SSLMODE=verify-full and POSTGRES_SSLROOTCERT",
            )
        self._session: Session | None = None
        self._is_migrated = False
        self._lock = asyncio.Lock()
        self._clipped: set[str] = set()

    async def prepare(self) -> None:
        """Connects and migrates, without a time limit: the indexes of a large table may take hours."""
        async with self._lock, self._translated_errors():
            self._session = self._session or await self._open()

    async def export(self, batch: Batch) -> None:
        async with self._lock, self._translated_errors():
            session = self._session = self._session or await self._open()
            await self._store(session, session.readings, [reading_row(one) for one in batch.readings])
            if session.uses is not None:
                await self._store(session, session.uses, [use_row(one) for one in merged_uses(batch.uses)])

    async def check(self) -> None:
        """Uses its own connection, so it does not wait for an export in progress."""
        try:
            connection = await connect(self._target)
            async with connection:
                found = await connection.execute(MAY_INSERT, [self._tables.readings.as_string()])
                row = await found.fetchone()
        except psycopg.Error as exc:
            raise ExportError(error_message(exc)) from exc
        may_insert = None if row is None else row[0]
        if may_insert is None and not self._target.auto_migrate:
            raise ExportError(self._no_table())
        if may_insert is False:
            raise ExportError(f"{self._target.user} may not insert into {self._target.table}")

    async def open_uses(self, cluster: str) -> AsyncIterator[Use]:
        """Uses its own connection and reads row by row: there may be as many rows as GPUs."""
        try:
            connection = await connect(self._target)
            async with connection, connection.transaction():
                await set_statement_timeout(connection, self._target.statement_timeout)
                columns = await column_types(connection, self._tables.uses, USE_COLUMNS)
                if len(columns) < len(USE_COLUMNS):
                    return
                query = sql.SQL("SELECT {columns} FROM {uses} WHERE cluster = {cluster} AND until IS NULL").format(
                    columns=sql.SQL(", ").join(map(sql.Identifier, USE_COLUMNS)),
                    uses=self._tables.uses,
                    cluster=sql.Literal(self._fit("cluster", cluster, columns["cluster"])),
                )
                async with connection.cursor(row_factory=class_row(Use)) as cursor:
                    async for use in cursor.stream(query):
                        yield evolve(use, chassis=None) if use.chassis == UNKNOWN else use
        except psycopg.Error as exc:
            raise ExportError(error_message(exc)) from exc

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect()

    @asynccontextmanager
    async def _translated_errors(self) -> AsyncIterator[None]:
        """Closes the connection after any failure or cancellation: its state is then unknown."""
        try:
            yield
        except psycopg.Error as exc:
            await self._disconnect()
            raise ExportError(error_message(exc)) from exc
        except TimeoutError as exc:
            await self._disconnect()
            raise ExportError("the database does not answer") from exc
        except BaseException:
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.connection.close()

    async def _open(self) -> Session:
        connection = await connect(self._target)
        try:
            if self._target.auto_migrate and not self._is_migrated:
                await migrate(connection, self._tables)
                self._is_migrated = True
            async with asyncio.timeout(self._target.statement_timeout.total_seconds()):
                return await self._inspect(connection)
        except BaseException:
            await connection.close()
            raise

    async def _inspect(self, connection: AsyncConnection[tuple[Any, ...]]) -> Session:
        columns = await column_types(connection, self._tables.readings, GPUID_COLUMNS + OWN_COLUMNS)
        if not columns:
            self._is_migrated = False
            raise ExportError(self._no_table())
        if missing := [name for name in GPUID_COLUMNS if name not in columns]:
            raise ExportError(f"table {self._target.table} has no column {', '.join(missing)}")
        readings = Destination(self._tables.readings, columns, sql.SQL("ON CONFLICT DO NOTHING"))
        columns = await column_types(connection, self._tables.uses, USE_COLUMNS)
        if not columns:
            self._is_migrated = False
            log.warning("uses are not stored: the table is missing", table=f"{self._target.table}_use")
            return Session(connection, readings, None)
        return Session(connection, readings, Destination(self._tables.uses, columns, upsert(list(columns))))

    def _no_table(self) -> str:
        return f"there is no table {self._target.table}: create it, or set POSTGRES_AUTO_MIGRATE=true"

    async def _store(self, session: Session, to: Destination, rows: Sequence[Row]) -> None:
        """Stores all rows except those that the table rejects. Halves are retried until the rejected rows are found."""
        if not rows:
            return
        try:
            await self._insert(session.connection, to, rows)
        except (psycopg.DataError, psycopg.IntegrityError) as exc:
            if len(rows) == 1:
                log.warning(
                    "row refused by the database",
                    table=to.table.as_string(),
                    row=dict(rows[0]),
                    problem=error_message(exc),
                )
                return
            half = len(rows) // 2
            await self._store(session, to, rows[:half])
            await self._store(session, to, rows[half:])

    async def _insert(self, connection: AsyncConnection[tuple[Any, ...]], to: Destination, rows: Sequence[Row]) -> None:
        names: dict[str, sql.Composable] = {
            "table": to.table,
            "staging": to.staging,
            "definition": to.definition,
            "columns": sql.SQL(", ").join(map(sql.Identifier, to.columns)),
            "on_conflict": to.on_conflict,
        }
        async with connection.transaction():
            await set_statement_timeout(connection, self._target.statement_timeout)
            create = "CREATE TEMP TABLE IF NOT EXISTS {staging} ({definition}) ON COMMIT DELETE ROWS"
            await connection.execute(sql.SQL(create).format(**names))
            async with (
                connection.cursor() as cursor,
                cursor.copy(sql.SQL("COPY {staging} ({columns}) FROM STDIN").format(**names)) as copy,
            ):
                for row in rows:
                    await copy.write_row([self._fit(name, row[name], kind) for name, kind in to.columns.items()])
            await connection.execute(
                sql.SQL("INSERT INTO {table} AS old ({columns}) SELECT {columns} FROM {staging} {on_conflict}").format(
                    **names
                )
            )

    def _fit(self, column: str, value: Any, kind: str) -> Any:
        """Shortens a text to what the column and an index on it can hold."""
        if not isinstance(value, str):
            return value
        text = clipped(value.replace("\0", ""), min(width(kind) or MAX_INDEXED, MAX_INDEXED))
        if text != value and column not in self._clipped:
            self._clipped.add(column)
            log.warning("text shortened to fit its column", column=column, length=len(value), stored=text)
        return text


async def connect(target: PostgresTarget) -> AsyncConnection[tuple[Any, ...]]:
    """Every value is a parameter of its own, so a password may contain any character. Raises psycopg.Error."""
    return await AsyncConnection.connect(
        host=target.host,
        port=target.port,
        dbname=target.db,
        user=target.user,
        password=current_secret(target.password, target.password_file),
        sslmode=target.sslmode,
        sslrootcert=target.sslrootcert,
        connect_timeout=max(2, round(target.connect_timeout.total_seconds())),
        tcp_user_timeout=round(TCP_TIMEOUT.total_seconds() * 1000),
        # While no data is sent, as during CREATE INDEX, only keepalives notice a dead peer.
        keepalives_idle=round(TCP_TIMEOUT.total_seconds()),
        keepalives_interval=round(TCP_TIMEOUT.total_seconds() / 3),
        keepalives_count=3,
        application_name="gpuwarden",
        autocommit=True,
        prepare_threshold=None,  # poolers do not support prepared statements
    )


async def migrate(connection: AsyncConnection[tuple[Any, ...]], tables: Tables) -> None:
    """Creates what is missing, one process at a time. Each statement is a transaction of its own: finished ones stay if
    a later one fails, and no lock is held longer than its statement."""
    for statement in tables.statements():
        async with connection.transaction():
            await set_statement_timeout(connection, timedelta(0))
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
            patience = str(round(LOCK_TIMEOUT.total_seconds() * 1000))
            await connection.execute("SELECT set_config('lock_timeout', %s, true)", [patience])
            await connection.execute(statement)


async def set_statement_timeout(connection: AsyncConnection[tuple[Any, ...]], longest: timedelta) -> None:
    """For the statements of this transaction; 0 means no limit."""
    await connection.execute(
        "SELECT set_config('statement_timeout', %s, true), set_config('client_min_messages', 'warning', true)",
        [str(round(longest.total_seconds() * 1000))],
    )


async def column_types(
    connection: AsyncConnection[tuple[Any, ...]], table: sql.Identifier, wanted: Sequence[str]
) -> Mapping[str, str]:
    """The types of the wanted columns that exist; empty if the table does not exist."""
    found = await connection.execute(COLUMN_TYPES, [table.as_string()])
    kinds = dict(await found.fetchall())
    return {name: kinds[name] for name in wanted if name in kinds}


def error_message(exc: psycopg.Error) -> str:
    """On one line. It never contains the password, but may contain the user name."""
    return " ".join(str(exc).split()) or type(exc).__name__
