"""Objects in a store: S3 and what speaks like it, Google's, Azure's. A batch is one object under a key of its own."""

import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import obstore
import structlog
from attrs import evolve
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from webhook.core.errors import GpuwardenError
from webhook.export import ExportError
from webhook.export.records import Batch, raw_reading, raw_seconds, raw_use
from webhook.export.targets import ObjectTarget

log = structlog.get_logger(__name__)

S2_COLUMNS: Final = ("cluster", "node", "machine", "source", "chassis", "gpu", "time")
OWN_COLUMNS: Final = ("uuid", "index", "minor", "pci_bus_id", "model", "memory", "driver", "boot_id")
# Each in its directory, so that a table over the one does not find the other.
USE_COLUMNS: Final = (
    *("cluster", "node", "reservation", "gpu_uuid", "serial", "chassis", "namespace", "pod", "pod_uid", "owner"),
    *("evidence_hash", "since", "until"),
)
PLACEHOLDERS: Final = ("%Y", "%m", "%d", "%H")

# Beyond that the delivery tries again, and says so.
RETRIES: Final = 2
MAX_ERROR_TEXT: Final = 300
CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
# As S3 and Google say it, and as Azure does.
LIST_DENIED: Final = ("AccessDenied", "AuthorizationPermissionMismatch")


class ObjectExporter:
    """Keys come from a batch's time and id, so the same batch again is the same object again."""

    name = "s3"

    def __init__(self, target: ObjectTarget) -> None:
        """Raises GpuwardenError where the URL, the options or what keys begin with make no sense, or Parquet is asked
        for and not there."""
        if "://" in target.bucket:
            path_parts("the bucket's URL", urlsplit(target.bucket).path)
        self._target = evolve(
            target,
            prefix=clean_path("the prefix", target.prefix),
            partition_pattern=clean_path("the pattern", target.partition_pattern),
        )
        self._render = RENDERERS[target.form]
        self._columns = S2_COLUMNS + OWN_COLUMNS if target.own_columns else S2_COLUMNS
        if target.form == "parquet":
            check_parquet()
        try:
            self._store = store_of(target)
        except (BaseError, ValueError, TypeError) as exc:
            raise GpuwardenError(f"{target.url} cannot be used as an object store: {error_message(exc)}") from exc

    async def export(self, batch: Batch) -> None:
        if batch.readings:
            rows = [raw_reading(one) | {"time": raw_seconds(one.time)} for one in batch.readings]
            await self._put("", batch.id, min(one.time for one in batch.readings), self._columns, rows)
        if batch.uses:
            uses = [raw_use(one) for one in batch.uses]
            await self._put("use", batch.id, min(one.until or one.since for one in batch.uses), USE_COLUMNS, uses)

    async def check(self) -> None:
        """Asks for a list of nothing. Who may only write is refused that, and can still write."""
        try:
            async for _ in self._store.list(prefix=self._directory("") + ".nothing"):
                pass
        except (BaseError, OSError) as exc:
            if error_code(exc) not in LIST_DENIED:
                raise ExportError(error_message(exc)) from exc

    async def close(self) -> None:
        """The store keeps no connection of ours that would have to be ended."""

    async def _put(
        self, kind: str, batch: str, time: datetime, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        content, content_type = self._render(columns, rows, self._target.header)
        attributes = {
            "Content-Type": content_type,
            "source": "gpuid",
            "record_count": str(len(rows)),
            "timestamp": raw_seconds(time),
            "format": self._target.form,
            "columns": ",".join(columns),
        }
        key = self._directory(kind) + partition(self._target.partition_pattern, time) + object_name(time, batch)
        try:
            await obstore.put_async(
                self._store,
                f"{key}.{self._target.form}",
                content,
                attributes=attributes,
                use_multipart=False,
            )
        except (BaseError, OSError) as exc:
            raise ExportError(error_message(exc)) from exc

    def _directory(self, kind: str) -> str:
        """Uses are beside the readings' prefix, not under it: whoever reads all that is there reads one kind."""
        whole = "-".join(filter(None, (self._target.prefix, kind)))
        return f"{whole}/" if whole else ""


def clean_path(what: str, text: str) -> str:
    """Without empty parts, which no key of ours can have."""
    found = "/".join(path_parts(what, text))
    if found != text.strip("/"):
        log.warning("keys have no empty parts", of=what, error_message=text, written=found)
    return found


def path_parts(what: str, text: str) -> Sequence[str]:
    """Raises GpuwardenError: with some, a key would be refused, or be in another place than the one that is named."""
    parts = [part for part in text.split("/") if part]
    for part in parts:
        if part in (".", "..") or not part.isprintable():
            raise GpuwardenError(f"{what} {text!r} cannot stand in a key: {part!r} is no part of one")
    return parts


def store_of(target: ObjectTarget) -> ObjectStore:
    options = dict(target.options)
    if target.url.startswith(("s3:", "s3a:")):
        options.setdefault("region", target.region)
    return from_url(  # type: ignore[call-overload,no-any-return]  # its options are typed by the kind of store
        target.url,
        config=options,
        # Whoever names an endpoint with http means it.
        client_options={"timeout": target.timeout, "connect_timeout": target.timeout, "allow_http": True},
        retry_config={"max_retries": RETRIES, "retry_timeout": target.timeout},
    )


def partition(pattern: str, time: datetime) -> str:
    """Only these placeholders; what else follows a percent sign stays as it is."""
    text = pattern.strip("/")
    for placeholder in PLACEHOLDERS:
        text = text.replace(placeholder, time.astimezone(UTC).strftime(placeholder))
    return f"{text}/" if text else ""


def object_name(time: datetime, batch: str) -> str:
    """S2's name, and what tells two of one millisecond apart."""
    moment = time.astimezone(UTC)
    digest = hashlib.sha256(batch.encode()).hexdigest()[:16]
    return f"{moment:%Y%m%d-%H%M%S}.{moment.microsecond // 1000:03d}-{digest}"


Rows = Sequence[Mapping[str, Any]]


def to_csv(columns: Sequence[str], rows: Rows, has_header: bool) -> tuple[bytes, str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if has_header:
        writer.writerow(columns)
    writer.writerows([row[name] for name in columns] for row in rows)
    return text.getvalue().encode(), "text/csv"


def to_parquet(columns: Sequence[str], rows: Rows, _has_header: bool) -> tuple[bytes, str]:
    """Text, but for the numbers: index and minor."""
    from arro3.core import Array, DataType, Table
    from arro3.io import write_parquet

    kinds = {"index": DataType.int32(), "minor": DataType.int32()}
    arrays: dict[str, Any] = {
        name: Array([row[name] for row in rows], type=kinds.get(name, DataType.utf8())) for name in columns
    }
    content = io.BytesIO()
    write_parquet(Table.from_pydict(arrays), content, compression="snappy")
    return content.getvalue(), "application/vnd.apache.parquet"


def check_parquet() -> None:
    try:
        import arro3.io  # noqa: F401
    except ImportError as exc:
        raise GpuwardenError("Parquet needs more than is installed: pip install 'gpuwarden[parquet]'") from exc


RENDERERS: Final = {"csv": to_csv, "parquet": to_parquet}


def error_message(exc: Exception) -> str:
    """What the store calls it, and the first line of the rest: below are the same words over and over."""
    code = error_code(exc)
    first = str(exc).strip().split("\n", 1)[0][:MAX_ERROR_TEXT]
    return f"{code}: {first}" if code else first


def error_code(exc: Exception) -> str | None:
    found = CODE.search(str(exc))
    return found[1] if found else None
