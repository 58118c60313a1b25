"""The stores that `gpuwarden export` knows: the settings of each, and what the chart needs to know of it."""

from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from attrs import NOTHING, field, frozen

from webhook.export.kinds import (
    ENDPOINT,
    GO_INTERVAL,
    MIGRATE,
    OBJECT_FORMAT,
    PARTITION_PATTERN,
    ROOT_CERTIFICATES,
    SSL_MODE,
    STORE_PORT,
    TEXT,
)
from webhook.runtime.setting_kinds import BOOLEAN, FILE
from webhook.runtime.setting_table import EXPORT_PREFIX, Command, Setting, setting, settings_of

EXPORT: Final = frozenset({Command.EXPORT})
BOTH: Final = EXPORT | {Command.HISTORY}

T = TypeVar("T")


@frozen(kw_only=True)
class StoreSecret:
    """The Secret of a store in the chart."""

    about: str
    # Its name in deploy/exporter/NAME.
    example: str
    # The key of each setting that the Secret contains. Without keys, each key becomes an environment variable.
    keys: Mapping[str, str] = field(factory=dict)
    # The settings that need no key if the chart's values have them.
    optional: frozenset[str] = frozenset()


@frozen(kw_only=True)
class ExportStore(Generic[T]):
    """A store, and its settings: the fields of `target` that declare one. A field without a default is required.

    `http` and its field `timeout` make the setting `http_timeout`.
    """

    name: str
    # The name of a class, not the class: the client library of a store is imported only if the store is used.
    exporter: str
    target: type[T] | None = None
    secret: StoreSecret | None = None
    # The setting with the URL of the store.
    address: str = ""
    # The setting that allows secrets in plain HTTP to other machines.
    allows_plain: str = ""
    # The port of the store without a URL, and the setting that changes it.
    port: int = 0
    port_setting: str = ""
    # The values of the chart that deploy/exporter/NAME sets.
    example: Mapping[str, str] = field(factory=dict)

    @property
    def prefix(self) -> str:
        return f"{self.name}_"

    @property
    def settings(self) -> tuple[Setting, ...]:
        return () if self.target is None else settings_of(self.target, EXPORT_PREFIX, self.prefix)

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.settings if one.is_required)


@frozen
class HttpTarget:
    endpoint: str = setting(
        NOTHING, ENDPOINT, EXPORT, "URL to which http posts records", older_variable="HTTP_ENDPOINT"
    )
    timeout: timedelta = setting(
        timedelta(seconds=30),
        GO_INTERVAL,
        EXPORT,
        "how long a POST may take",
        older_variable="HTTP_TIMEOUT",
        older_is_lenient=True,
    )
    auth_token: str | None = setting(
        None, TEXT, EXPORT, "bearer token of http", older_variable="HTTP_AUTH_TOKEN", in_file=False, is_secret=True
    )
    auth_token_file: Path | None = setting(None, FILE, EXPORT, "file with the bearer token")
    token_in_plain: bool = setting(
        False, BOOLEAN, EXPORT, "allow the token in plain http to other machines: everyone on the way can read it"
    )
    # As in gpuid, HTTPS_PROXY and similar variables apply.
    proxied: bool = True


@frozen(kw_only=True)
class PostgresTarget:
    host: str = setting(NOTHING, TEXT, BOTH, "database server", older_variable="POSTGRES_HOST")
    port: int = setting(
        5432, STORE_PORT, BOTH, "port of the database server", older_variable="POSTGRES_PORT", older_is_lenient=True
    )
    db: str = setting(NOTHING, TEXT, BOTH, "name of the database", older_variable="POSTGRES_DB")
    user: str = setting(NOTHING, TEXT, BOTH, "role of the database", older_variable="POSTGRES_USER")
    password: str = setting(
        NOTHING, TEXT, BOTH, "password of the role", older_variable="POSTGRES_PASSWORD", in_file=False, is_secret=True
    )
    password_file: Path | None = setting(None, FILE, BOTH, "file with the password")
    sslmode: str = setting(
        "require", SSL_MODE, BOTH, "TLS mode of the connection (libpq)", older_variable="POSTGRES_SSLMODE"
    )
    # Without one, libpq looks in the home directory.
    sslrootcert: str | None = setting(
        None, ROOT_CERTIFICATES, BOTH, "CAs of the database server's certificate", older_variable="POSTGRES_SSLROOTCERT"
    )
    table: str = setting("gpu", TEXT, BOTH, "table of readings", older_variable="POSTGRES_TABLE")
    auto_migrate: bool = setting(False, MIGRATE, BOTH, "create missing tables", older_variable="POSTGRES_AUTO_MIGRATE")
    # Limits for connecting and for each statement.
    connect_timeout: timedelta = timedelta(seconds=10)
    statement_timeout: timedelta = timedelta(seconds=60)


@frozen
class ObjectTarget:
    bucket: str = setting(
        NOTHING, TEXT, EXPORT, "bucket, or URL (s3://, gs://, az://) of another store", older_variable="S3_BUCKET"
    )
    prefix: str = setting("", TEXT, EXPORT, "prefix of the keys", older_variable="S3_PREFIX")
    region: str = setting("us-east-1", TEXT, EXPORT, "region of the bucket", older_variable="S3_REGION")
    partition_pattern: str = setting(
        "year=%Y/month=%m/day=%d/hour=%H",
        PARTITION_PATTERN,
        EXPORT,
        "part of the key between prefix and name",
        older_variable="S3_PARTITION_PATTERN",
    )
    format: str = setting("csv", OBJECT_FORMAT, EXPORT, "format of the objects")
    header: bool = setting(False, BOOLEAN, EXPORT, "begin each CSV object with a header")
    own_columns: bool = setting(
        False, BOOLEAN, EXPORT, "add UUID, minor number and the rest after the seven columns of the older exporter"
    )
    # Options of obstore, such as endpoint and access_key_id. obstore takes others from the environment.
    options: Mapping[str, str] = field(factory=dict, repr=False)
    timeout: timedelta = timedelta(seconds=30)

    @property
    def url(self) -> str:
        return self.bucket if "://" in self.bucket else f"s3://{self.bucket}"


STDOUT: Final[ExportStore[object]] = ExportStore(
    name="stdout", exporter="webhook.export.stdout:StdoutExporter", example={"clusterName": "prod"}
)
HTTP: Final = ExportStore(
    name="http",
    exporter="webhook.export.http:HttpExporter",
    target=HttpTarget,
    secret=StoreSecret(
        about="Secret with the `token` for the store, for exporterType http.",
        example="http-credentials",
        keys={"auth_token": "token"},
    ),
    address="endpoint",
    allows_plain="token_in_plain",
    example={"httpEndpoint": "https://example.org/gpus"},
)
POSTGRES: Final = ExportStore(
    name="postgres",
    exporter="webhook.export.postgres:PostgresExporter",
    target=PostgresTarget,
    secret=StoreSecret(
        about="Secret with `username` and `password` of the database, and `host` unless postgresHost is set.",
        example="db-credentials",
        keys={"host": "host", "user": "username", "password": "password"},
        optional=frozenset({"host"}),
    ),
    port=5432,
    port_setting="port",
    example={"postgresDb": "gpuid", "postgresTable": "serials"},
)
S3: Final = ExportStore(
    name="s3",
    exporter="webhook.export.s3:ObjectExporter",
    target=ObjectTarget,
    secret=StoreSecret(
        about="Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID, for exporterType s3.",
        example="s3-credentials",
    ),
    port=443,
    example={"s3Bucket": "gpuid"},
)
STORES: Final[Mapping[str, ExportStore[Any]]] = {one.name: one for one in (STDOUT, HTTP, POSTGRES, S3)}


def read_secret(file: Path) -> str:
    """Raises OSError, UnicodeDecodeError."""
    return file.read_text().strip("\r\n")


def current_secret(known: str, file: Path | None) -> str:
    """The secret in the file, or `known` while the file cannot be read."""
    if file is None:
        return known
    try:
        return read_secret(file)
    except (OSError, UnicodeDecodeError):
        return known


def is_plain_to_others(url: str) -> bool:
    """Whether requests to the URL reach another machine unencrypted."""
    found = urlsplit(url)
    return found.scheme == "http" and not is_local(found.hostname or "")


def is_local(host: str) -> bool:
    """Whether the host is this machine: a socket's directory or a loopback address."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
