"""Rows in Postgres: a batch by COPY into a table of its own, from there what is new, in one transaction.

What has been stored before is met by the unique key, so a batch that comes again changes nothing.
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
from webhook.export.records import UNKNOWN, Batch, Use
from webhook.export.tables import (
    MAX_INDEXED,
    OWN_COLUMNS,
    S2_COLUMNS,
    USE_COLUMNS,
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
# Of all processes that migrate this database: "gpuwarden", as a number.
MIGRATION_LOCK: Final = 0x67707577
# A peer that is gone is noticed by this time, not when TCP gives up, a quarter of an hour later.
TCP_TIMEOUT: Final = timedelta(seconds=30)
# Whoever wants to write waits behind us while we wait for a lock that a migration needs.
LOCK_TIMEOUT: Final = timedelta(seconds=5)

Row = Mapping[str, Any]


@frozen
class Destination:
    """A table as it was found: what it is called, which of our columns it has and of what type they are."""

    table: sql.Identifier
    columns: Mapping[str, str]
    on_conflict: sql.Composable

    @property
    def staging(self) -> sql.Identifier:
        """One for each form of a table: behind a pooler the session may have had another before."""
        form = f"{self.table.as_string()} {self.columns}"
        return sql.Identifier("pg_temp", f"new_{hashlib.sha256(form.encode()).hexdigest()[:16]}")

    @property
    def definition(self) -> sql.Composed:
        """The columns of the staging table. Those of the table could be copied only by who may read it."""
        kinds = (sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in self.columns.items())
        return sql.SQL(", ").join(kinds)


@frozen
class Session:
    """A connection and what was found by it."""

    connection: AsyncConnection[tuple[Any, ...]]
    readings: Destination
    uses: Destination | None


class PostgresExporter:
    """One connection, made when it is needed and made anew after each failure."""

    name = "postgres"
    # More than one node's: a transaction costs as much with eight rows as with thousands.
    records_at_once = 4000

    def __init__(self, target: PostgresTarget) -> None:
        """Raises GpuwardenError where the table cannot be called so."""
        self._target = target
        self._tables = Tables.named(target.table)
        if target.sslmode != "verify-full" and not is_local(target.host):
            log.warning(
                "the database's certificate is not checked against its name",
                sslmode=target.sslmode,
                hint="set POSTGRES_SSLMODE=verify-full and POSTGRES_SSLROOTCERT",
            )
        self._session: Session | None = None
        self._is_migrated = False
        self._lock = asyncio.Lock()
        self._clipped: set[str] = set()

    async def prepare(self) -> None:
        """A connection, and all the tables: the indexes of a large one may take hours."""
        async with self._lock, self._translated_errors():
            self._session = self._session or await self._open()

    async def export(self, batch: Batch) -> None:
        async with self._lock, self._translated_errors():
            session = self._session = self._session or await self._open()
            await self._store(session, session.readings, [reading_row(one) for one in batch.readings])
            if session.uses is not None:
                await self._store(session, session.uses, [use_row(one) for one in merged_uses(batch.uses)])

    async def check(self) -> None:
        """By a connection of its own, which does not wait for a batch that is on its way."""
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
        """By a connection of its own, and row by row: there may be as many as there are GPUs."""
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
                    cluster=sql.Literal(self._clip_to_column("cluster", cluster, columns["cluster"])),
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
        """After a failure, and where the wait was given up, nobody knows what the connection is in the middle of."""
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
        columns = await column_types(connection, self._tables.readings, S2_COLUMNS + OWN_COLUMNS)
        if not columns:
            self._is_migrated = False
            raise ExportError(self._no_table())
        if missing := [name for name in S2_COLUMNS if name not in columns]:
            raise ExportError(f"table {self._target.table} has no column {', '.join(missing)}")
        readings = Destination(self._tables.readings, columns, sql.SQL("ON CONFLICT DO NOTHING"))
        columns = await column_types(connection, self._tables.uses, USE_COLUMNS)
        if not columns:
            self._is_migrated = False
            log.warning("uses of GPUs are not stored: their table is missing", table=f"{self._target.table}_use")
            return Session(connection, readings, None)
        return Session(connection, readings, Destination(self._tables.uses, columns, upsert(list(columns))))

    def _no_table(self) -> str:
        return f"there is no table {self._target.table}: make it, or let it be made (POSTGRES_AUTO_MIGRATE=true)"

    async def _store(self, session: Session, to: Destination, rows: Sequence[Row]) -> None:
        """All of them, but for those that the table cannot take: halves are tried until those stand alone."""
        if not rows:
            return
        try:
            await self._insert(session.connection, to, rows)
        except (psycopg.DataError, psycopg.IntegrityError) as exc:
            if len(rows) == 1:
                log.warning("row refused", table=to.table.as_string(), row=dict(rows[0]), problem=error_message(exc))
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
                    await copy.write_row(
                        [self._clip_to_column(name, row[name], kind) for name, kind in to.columns.items()]
                    )
            await connection.execute(
                sql.SQL("INSERT INTO {table} AS old ({columns}) SELECT {columns} FROM {staging} {on_conflict}").format(
                    **names
                )
            )

    def _clip_to_column(self, column: str, value: Any, kind: str) -> Any:
        """A text that the column takes, and an index on it."""
        if not isinstance(value, str):
            return value
        text = clipped(value.replace("\0", ""), min(width(kind) or MAX_INDEXED, MAX_INDEXED))
        if text != value and column not in self._clipped:
            self._clipped.add(column)
            log.warning(
                "texts are clipped to what a column takes", column=column, length=len(value), error_message=text
            )
        return text


async def connect(target: PostgresTarget) -> AsyncConnection[tuple[Any, ...]]:
    """Everything by its own parameter, so that a password may be any text. Raises psycopg.Error."""
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
        # While nothing is sent, as where an index is made, only these notice it.
        keepalives_idle=round(TCP_TIMEOUT.total_seconds()),
        keepalives_interval=round(TCP_TIMEOUT.total_seconds() / 3),
        keepalives_count=3,
        application_name="gpuwarden",
        autocommit=True,
        prepare_threshold=None,  # a pooler between us and the server knows nothing of them
    )


async def migrate(connection: AsyncConnection[tuple[Any, ...]], tables: Tables) -> None:
    """Makes what is missing; one process at a time. What is made stays, also where the next is not: each has its own
    transaction, so that no lock is held longer than for the one thing that needs it."""
    for statement in tables.statements():
        async with connection.transaction():
            await set_statement_timeout(connection, timedelta(0))
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
            patience = str(round(LOCK_TIMEOUT.total_seconds() * 1000))
            await connection.execute("SELECT set_config('lock_timeout', %s, true)", [patience])
            await connection.execute(statement)


async def set_statement_timeout(connection: AsyncConnection[tuple[Any, ...]], longest: timedelta) -> None:
    """Of each statement in this transaction; 0 is no limit."""
    await connection.execute(
        "SELECT set_config('statement_timeout', %s, true), set_config('client_min_messages', 'warning', true)",
        [str(round(longest.total_seconds() * 1000))],
    )


async def column_types(
    connection: AsyncConnection[tuple[Any, ...]], table: sql.Identifier, wanted: Sequence[str]
) -> Mapping[str, str]:
    """Those of a table that are wanted, and of what type they are; none if there is no such table."""
    found = await connection.execute(COLUMN_TYPES, [table.as_string()])
    kinds = dict(await found.fetchall())
    return {name: kinds[name] for name in wanted if name in kinds}


def error_message(exc: psycopg.Error) -> str:
    """In one line; it names no password, but may name whose it is."""
    return " ".join(str(exc).split()) or type(exc).__name__
