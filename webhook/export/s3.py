"""Objects in S3, S3-compatible stores, Google Cloud Storage and Azure. Each batch is one object."""

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
from webhook.export.records import OWN_COLUMNS, USE_COLUMNS, Batch, raw_reading, raw_seconds, raw_use
from webhook.export.targets import ObjectTarget

log = structlog.get_logger(__name__)

GPUID_COLUMNS: Final = ("cluster", "node", "machine", "source", "chassis", "gpu", "time")
PLACEHOLDERS: Final = ("%Y", "%m", "%d", "%H")

# After these the delivery retries, and logs it.
RETRIES: Final = 2
MAX_ERROR_TEXT: Final = 300
CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
# The error codes of S3 and Google, and of Azure.
LIST_DENIED: Final = ("AccessDenied", "AuthorizationPermissionMismatch")


class ObjectExporter:
    """An object's key comes from the batch's time and id, so storing a batch again overwrites the same object."""

    name = "s3"

    def __init__(self, target: ObjectTarget) -> None:
        """Raises GpuwardenError if the URL, the options, the prefix or the pattern are invalid, or if Parquet is
        configured but not installed."""
        if "://" in target.bucket:
            path_parts("the bucket's URL", urlsplit(target.bucket).path)
        self._target = evolve(
            target,
            prefix=clean_path("the prefix", target.prefix),
            partition_pattern=clean_path("the pattern", target.partition_pattern),
        )
        self._render = RENDERERS[target.format]
        self._columns = GPUID_COLUMNS + OWN_COLUMNS if target.own_columns else GPUID_COLUMNS
        if target.format == "parquet":
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
        """Lists an empty prefix. Credentials that may write but not list pass."""
        try:
            async for _ in self._store.list(prefix=self._directory("") + ".nothing"):
                pass
        except (BaseError, OSError) as exc:
            if error_code(exc) not in LIST_DENIED:
                raise ExportError(error_message(exc)) from exc

    async def close(self) -> None:
        """There is no connection to close."""

    async def _put(
        self, kind: str, batch: str, time: datetime, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        content, content_type = self._render(columns, rows, self._target.header)
        attributes = {
            "Content-Type": content_type,
            "source": "gpuid",
            "record_count": str(len(rows)),
            "timestamp": raw_seconds(time),
            "format": self._target.format,
            "columns": ",".join(columns),
        }
        key = self._directory(kind) + partition(self._target.partition_pattern, time) + object_name(time, batch)
        try:
            await obstore.put_async(
                self._store,
                f"{key}.{self._target.format}",
                content,
                attributes=attributes,
                use_multipart=False,
            )
        except (BaseError, OSError) as exc:
            raise ExportError(error_message(exc)) from exc

    def _directory(self, kind: str) -> str:
        """Uses get their own directory beside the readings' prefix, so that reading the prefix returns only
        readings."""
        whole = "-".join(filter(None, (self._target.prefix, kind)))
        return f"{whole}/" if whole else ""


def clean_path(what: str, text: str) -> str:
    """The path without empty parts."""
    found = "/".join(path_parts(what, text))
    if found != text.strip("/"):
        log.warning("empty parts removed from object keys", setting=what, configured=text, used=found)
    return found


def path_parts(what: str, text: str) -> Sequence[str]:
    """Raises GpuwardenError for `.`, `..` and control characters: stores refuse such keys or change them."""
    parts = [part for part in text.split("/") if part]
    for part in parts:
        if part in (".", "..") or not part.isprintable():
            raise GpuwardenError(f"{what} {text!r} cannot be part of an object key: {part!r} is not allowed")
    return parts


def store_of(target: ObjectTarget) -> ObjectStore:
    options = dict(target.options)
    if target.url.startswith(("s3:", "s3a:")):
        options.setdefault("region", target.region)
    return from_url(  # type: ignore[call-overload,no-any-return]  # its options are typed by the kind of store
        target.url,
        config=options,
        # An http endpoint is explicitly configured.
        client_options={"timeout": target.timeout, "connect_timeout": target.timeout, "allow_http": True},
        retry_config={"max_retries": RETRIES, "retry_timeout": target.timeout},
    )


def partition(pattern: str, time: datetime) -> str:
    """Replaces only these placeholders; other percent signs stay."""
    text = pattern.strip("/")
    for placeholder in PLACEHOLDERS:
        text = text.replace(placeholder, time.astimezone(UTC).strftime(placeholder))
    return f"{text}/" if text else ""


def object_name(time: datetime, batch: str) -> str:
    """gpuid's name, with a digest that distinguishes batches of the same millisecond."""
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
    """All columns are text except index and minor."""
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
        raise GpuwardenError("Parquet support is not installed; run: pip install 'gpuwarden[parquet]'") from exc


RENDERERS: Final = {"csv": to_csv, "parquet": to_parquet}


def error_message(exc: Exception) -> str:
    """The store's error code and the first line of its text; further lines repeat it."""
    code = error_code(exc)
    first = str(exc).strip().split("\n", 1)[0][:MAX_ERROR_TEXT]
    return f"{code}: {first}" if code else first


def error_code(exc: Exception) -> str | None:
    """The store's error code. The client has no attribute for it: the answer's XML is part of its text."""
    found = CODE.search(str(exc))
    return found[1] if found else None
