"""Queries Postgres for who used which GPU and when, and renders the result."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
import psycopg
from attrs import asdict, fields, frozen
from psycopg import sql
from psycopg.rows import kwargs_row

from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.postgres import connect, error_message, set_statement_timeout
from webhook.export.records import raw_time
from webhook.export.tables import Tables
from webhook.export.targets import PostgresTarget

# The whole history is in the database view.
MAX_ROWS: Final = 10_000

Form = Literal["text", "json"]


@frozen
class UseQuery:
    """Conditions; a use has to match all of them."""

    serial: str | None = None
    uuid: str | None = None
    namespace: str | None = None
    pod: str | None = None
    hash: str | None = None

    @classmethod
    def from_flags(
        cls, *, serial: str | None = None, uuid: str | None = None, pod: str | None = None, hash: str | None = None
    ) -> "UseQuery":
        """Raises GpuwardenError."""
        if not any((serial, uuid, pod, hash)):
            raise GpuwardenError("set at least one of --serial, --pod, --hash and --uuid")
        namespace, _, name = (pod or "").partition("/")
        if pod and not (namespace and name):
            raise GpuwardenError(f"flag --pod: {pod!r} is not a pod; allowed: NAMESPACE/NAME")
        return cls(serial=serial, uuid=uuid, namespace=namespace or None, pod=name or None, hash=hash)


@frozen
class PastUse:
    """One use and its GPU. The fields have the names of the view's columns, in display order."""

    since: datetime
    until: datetime | None
    cluster: str
    node: str
    serial: str | None
    chassis: str | None
    gpu_uuid: str
    index: int | None
    minor: int | None
    model: str | None
    machine: str | None
    namespace: str | None
    pod: str | None
    pod_uid: str | None
    owner: str | None
    evidence_hash: str | None
    reservation: str


COLUMNS: Final = tuple(field.name for field in fields(PastUse))
# What fits a terminal. The JSON form has all columns.
TEXT_COLUMNS: Final = ("since", "until", "cluster", "node", "serial", "gpu_uuid", "pod", "owner", "evidence_hash")


async def find_uses(target: PostgresTarget, query: UseQuery) -> Sequence[PastUse]:
    """Uses, newest first. Raises ExportError."""
    tables = Tables.named(target.table)
    try:
        async with await connect(target) as connection, connection.transaction():
            await set_statement_timeout(connection, target.statement_timeout)
            async with connection.cursor(row_factory=kwargs_row(PastUse)) as cursor:
                await cursor.execute(use_query(tables, query), {**asdict(query), "most": MAX_ROWS})
                return await cursor.fetchall()
    except psycopg.errors.UndefinedTable as exc:
        problem = (
            f"there is no history in {target.table}_history:"
            " run an exporter with POSTGRES_AUTO_MIGRATE=true to create it"
        )
        raise ExportError(problem) from exc
    except psycopg.Error as exc:
        raise ExportError(error_message(exc)) from exc


def use_query(tables: Tables, query: UseQuery) -> sql.Composed:
    """A serial is first resolved to GPU UUIDs: filtering the view by serial would scan every use."""
    names = {"table": beside_parameters(tables.readings), "uses": beside_parameters(tables.uses)}
    asked = [name for name, value in asdict(query).items() if value is not None]
    return sql.SQL(
        "SELECT {columns} FROM {view} WHERE {conditions} ORDER BY since DESC, cluster, node, gpu_uuid LIMIT %(most)s"
    ).format(
        columns=sql.SQL(", ").join(map(sql.Identifier, COLUMNS)),
        view=beside_parameters(tables.view),
        conditions=sql.SQL(" AND ").join(sql.SQL(CONDITIONS[name]).format(**names) for name in asked),
    )


def beside_parameters(name: sql.Identifier) -> sql.SQL:
    """Doubles percent signs, which psycopg would read as parameters."""
    return sql.SQL(name.as_string().replace("%", "%%"))


CONDITIONS: Final[Mapping[str, Any]] = {
    "serial": (
        "gpu_uuid IN (SELECT uuid FROM {table} WHERE gpu = %(serial)s"
        " UNION SELECT gpu_uuid FROM {uses} WHERE serial = %(serial)s) AND serial = %(serial)s"
    ),
    "uuid": "gpu_uuid = %(uuid)s",
    "namespace": "namespace = %(namespace)s",
    "pod": "pod = %(pod)s",
    "hash": "evidence_hash = %(hash)s",
}


def rendered(uses: Sequence[PastUse], form: Form) -> str:
    if form == "json":
        return msgspec.json.format(msgspec.json.encode([raw(use) for use in uses]), indent=2).decode()
    if not uses:
        return "No uses found."
    rows = [[name.upper() for name in TEXT_COLUMNS], *([cell_text(use, name) for name in TEXT_COLUMNS] for use in uses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TEXT_COLUMNS))]
    lines = ["  ".join(text.ljust(size) for text, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(uses) == MAX_ROWS:
        lines.append(f"Showing the newest {MAX_ROWS}; there may be more.")
    return "\n".join(lines)


def raw(use: PastUse) -> Mapping[str, Any]:
    times = {"since": raw_time(use.since), "until": None if use.until is None else raw_time(use.until)}
    return asdict(use) | times


def cell_text(use: PastUse, name: str) -> str:
    match name:
        case "since":
            return raw_time(use.since)
        case "until":
            return "still" if use.until is None else raw_time(use.until)
        case "pod":
            return printable(f"{use.namespace}/{use.pod}") if use.pod else "-"
        case _:
            return printable(getattr(use, name) or "-")


def printable(text: str) -> str:
    """Escapes control characters: rows may come from any writer of the table, and a terminal would act on them."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
