"""The tables in Postgres: gpuid's table with additional columns, the uses, and a view that joins both."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, LiteralString

from attrs import asdict, evolve, frozen
from psycopg import sql

from webhook.core.errors import GpuwardenError
from webhook.export.records import UNKNOWN, USE_COLUMNS, Reading, Use

# Postgres silently truncates longer names, and two of them could become equal.
MAX_NAME: Final = 63
# An index entry may have 2704 bytes, and the key of a reading has eight texts.
MAX_INDEXED: Final = 320

GPUID_COLUMNS: Final = ("cluster", "node", "machine", "source", "chassis", "gpu", "read_time")
KEY: Final = (*GPUID_COLUMNS, "uuid", "pci_bus_id")
USE_KEY: Final = ("cluster", "reservation", "gpu_uuid")

# `text` columns are shortened by `PostgresExporter`.
OWN_TYPES: Final = {
    # Two dies share a serial, and a dead GPU has no UUID: the key needs both columns, without NULL.
    "uuid": "text NOT NULL DEFAULT ''",
    "index": "integer",
    "minor": "integer",
    "pci_bus_id": "text NOT NULL DEFAULT ''",
    "model": "text",
    "memory": "text",
    "driver": "text",
    "boot_id": "text",
}

CREATE_READINGS: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    id bigserial PRIMARY KEY,
    cluster text NOT NULL, node text NOT NULL, machine text NOT NULL,
    source text NOT NULL, chassis text NOT NULL, gpu text NOT NULL,
    read_time timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL DEFAULT now()
)"""

CREATE_USES: Final = """
CREATE TABLE IF NOT EXISTS {uses} (
    cluster text NOT NULL, node text NOT NULL, reservation text NOT NULL, gpu_uuid text NOT NULL,
    serial text, chassis text, namespace text, pod text, pod_uid text, owner text, evidence_hash text,
    since timestamp with time zone NOT NULL, until timestamp with time zone,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    PRIMARY KEY (cluster, reservation, gpu_uuid)
)"""

# Joins the last reading of the GPU before the use ended, else the first one after. Any reading gives the serial.
CREATE_VIEW: Final = """
CREATE OR REPLACE VIEW {view} AS
SELECT u.cluster, u.node, r.machine, u.gpu_uuid,
       COALESCE(u.serial, NULLIF(r.gpu, 'unknown'), (
           SELECT g.gpu FROM {table} g WHERE g.uuid = u.gpu_uuid AND g.gpu <> 'unknown'
           ORDER BY g.read_time DESC LIMIT 1
       )) AS serial,
       COALESCE(NULLIF(u.chassis, 'unknown'), r.chassis, 'unknown') AS chassis,
       r.index, r.minor, r.pci_bus_id, r.model,
       u.namespace, u.pod, u.pod_uid, u.owner, u.evidence_hash, u.reservation, u.since, u.until
FROM {uses} u
LEFT JOIN LATERAL (
    (SELECT 1 AS choice, g.* FROM {table} g
     WHERE g.uuid = u.gpu_uuid AND g.cluster = u.cluster AND g.node = u.node
       AND g.read_time <= COALESCE(u.until, 'infinity')
     ORDER BY g.read_time DESC LIMIT 1)
    UNION ALL
    (SELECT 2 AS choice, g.* FROM {table} g
     WHERE g.uuid = u.gpu_uuid AND g.cluster = u.cluster AND g.node = u.node
       AND g.read_time > COALESCE(u.until, 'infinity')
     ORDER BY g.read_time LIMIT 1)
    ORDER BY choice LIMIT 1
) r ON true"""

# gpuid's unique key treats two dies with one serial as one; ours includes the UUID. The body of a DO statement.
DROP_GPUID_KEY: Final = """
DECLARE old record;
BEGIN
    FOR old IN
        SELECT i.indexrelid::regclass AS name, c.conname
        FROM pg_index i LEFT JOIN pg_constraint c ON c.conindid = i.indexrelid AND c.contype = 'u'
        WHERE i.indrelid = {table}::regclass AND i.indisunique AND (
            SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_attribute a
            WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
        ) = {columns}
    LOOP
        IF old.conname IS NULL THEN
            EXECUTE format('DROP INDEX %s', old.name);
        ELSE
            EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', {table}::regclass, old.conname);
        END IF;
    END LOOP;
END"""


@frozen
class Tables:
    """The names derived from one table of readings."""

    schema: str | None
    name: str

    @classmethod
    def named(cls, text: str) -> "Tables":
        """Parses `name` or `schema.name`, case-sensitive. Raises GpuwardenError."""
        schema, _, name = text.rpartition(".")
        for part in (schema, name) if "." in text else (name,):
            if not part or "\0" in part or "." in part or len(part.encode()) > MAX_NAME - len("_history"):
                longest = MAX_NAME - len("_history")
                raise GpuwardenError(
                    f"{text!r} is not a table name; allowed: NAME or SCHEMA.NAME, at most {longest} bytes each"
                )
        return cls(schema or None, name)

    @property
    def readings(self) -> sql.Identifier:
        return self._identifier(self.name)

    @property
    def uses(self) -> sql.Identifier:
        return self._identifier(f"{self.name}_use")

    @property
    def view(self) -> sql.Identifier:
        return self._identifier(f"{self.name}_history")

    def _identifier(self, name: str) -> sql.Identifier:
        return sql.Identifier(name) if self.schema is None else sql.Identifier(self.schema, name)

    def statements(self) -> Sequence[sql.Composed]:
        """Statements that create what is missing. Existing objects stay as they are, except gpuid's unique key."""
        names: dict[str, sql.Composable] = {"table": self.readings, "uses": self.uses, "view": self.view}
        as_text = sql.Literal(self.readings.as_string())
        drop_gpuid_key = sql.SQL(DROP_GPUID_KEY).format(table=as_text, columns=sql.Literal(sorted(GPUID_COLUMNS)))
        added = [
            sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} {}").format(
                self.readings,
                sql.Identifier(name),
                sql.SQL(kind),
            )
            for name, kind in OWN_TYPES.items()
        ]
        return [
            sql.SQL(CREATE_READINGS).format(**names),
            *added,
            # Creates our unique key before gpuid's is dropped, so one always exists.
            self._index("reading", self.readings, KEY, is_unique=True),
            sql.SQL("DO {}").format(sql.Literal(drop_gpuid_key.as_string())),
            *(self._index(name, self.readings, [name]) for name in ("cluster", "node", "read_time", "created_at")),
            self._index("gpu", self.readings, ["gpu"]),
            self._index("uuid_read_time", self.readings, ["uuid", "read_time"]),
            sql.SQL(CREATE_USES).format(**names),
            self._index("use_gpu_uuid", self.uses, ["gpu_uuid"]),
            self._index("use_serial", self.uses, ["serial"]),
            self._index("use_pod", self.uses, ["namespace", "pod"]),
            self._index("use_evidence_hash", self.uses, ["evidence_hash"]),
            self._index("use_open", self.uses, ["cluster"], where="until IS NULL"),
            sql.SQL(CREATE_VIEW).format(**names),
        ]

    def _index(
        self,
        name: str,
        table: sql.Identifier,
        columns: Iterable[str],
        *,
        is_unique: bool = False,
        where: LiteralString | None = None,
    ) -> sql.Composed:
        return sql.SQL("CREATE {} INDEX IF NOT EXISTS {} ON {} ({}) {}").format(
            sql.SQL("UNIQUE" if is_unique else ""),
            sql.Identifier(clipped(f"idx_{self.name}_{name}", MAX_NAME)),
            table,
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL("" if where is None else "WHERE " + where),
        )


def clipped(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8. Different texts stay different: a shortened one ends in a digest."""
    raw = text.encode(errors="replace")
    if len(raw) <= size:
        return text
    mark = "~" + hashlib.sha256(raw).hexdigest()[:12]
    return raw[: size - len(mark)].decode(errors="ignore") + mark


def reading_row(reading: Reading) -> Mapping[str, Any]:
    row = asdict(reading, recurse=False)
    return {"read_time": row.pop("time"), **row, "uuid": reading.uuid or "", "pci_bus_id": reading.pci_bus_id or ""}


def use_row(use: Use) -> Mapping[str, Any]:
    return {name: getattr(use, name) for name in USE_COLUMNS} | {"chassis": use.chassis or UNKNOWN}


def merged_uses(uses: Iterable[Use]) -> Sequence[Use]:
    """Merges the records of each use. An end, once recorded, stays."""
    found: dict[tuple[str, str, str], Use] = {}
    for use in uses:
        key = (use.cluster, use.reservation, use.gpu_uuid)
        found[key] = use if key not in found else merged_use(found[key], use)
    return list(found.values())


def merged_use(old: Use, new: Use) -> Use:
    known = {name: getattr(old, name) for name in USE_COLUMNS if getattr(new, name) is None}
    return (
        evolve(new, **known, since=min(old.since, new.since))
        if old.until is None
        else evolve(new, **{**known, "until": old.until}, since=min(old.since, new.since))
    )


def upsert(columns: Sequence[str]) -> sql.Composed:
    """The ON CONFLICT clause for uses. It merges as `merged_use` does."""
    kept = {
        "since": "LEAST({old}, {new})",
        "until": "COALESCE({old}, {new})",
        "chassis": "COALESCE(NULLIF({new}, 'unknown'), {old}, {new})",
    }
    changes = [
        sql.SQL("{} = " + kept.get(name, "COALESCE({new}, {old})")).format(
            sql.Identifier(name), old=sql.Identifier("old", name), new=sql.Identifier("excluded", name)
        )
        for name in columns
        if name not in USE_KEY
    ]
    key = sql.SQL(", ").join(map(sql.Identifier, USE_KEY))
    return sql.SQL("ON CONFLICT ({}) DO UPDATE SET {}").format(key, sql.SQL(", ").join(changes))


VARCHAR: Final = re.compile(r"character varying\((\d+)\)")


def width(kind: str) -> int | None:
    """The maximum number of characters of this type; None if unlimited."""
    found = VARCHAR.fullmatch(kind)
    return int(found[1]) if found else None
