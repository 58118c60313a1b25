"""The configuration of each exporter's destination."""

from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from attrs import field, frozen


@frozen
class HttpTarget:
    endpoint: str
    timeout: timedelta
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    # As in gpuid, HTTPS_PROXY and similar variables apply.
    proxied: bool = True


@frozen
class PostgresTarget:
    host: str
    db: str
    user: str
    password: str = field(repr=False)
    password_file: Path | None = None
    port: int = 5432
    sslmode: str = "require"
    # A file. Without one, libpq looks in the home directory.
    sslrootcert: str | None = None
    table: str = "gpu"
    auto_migrate: bool = False
    # Limits for connecting and for each statement.
    connect_timeout: timedelta = timedelta(seconds=10)
    statement_timeout: timedelta = timedelta(seconds=60)


@frozen
class ObjectTarget:
    """`bucket` is a bucket's name or the URL of any supported object store."""

    bucket: str
    prefix: str = ""
    region: str = "us-east-1"
    partition_pattern: str = "year=%Y/month=%m/day=%d/hour=%H"
    form: str = "csv"
    header: bool = False
    # Whether our columns, such as uuid, follow gpuid's seven.
    own_columns: bool = False
    # Options of obstore, such as endpoint and access_key_id. obstore takes others from the environment.
    options: Mapping[str, str] = field(factory=dict, repr=False)
    timeout: timedelta = timedelta(seconds=30)

    @property
    def url(self) -> str:
        return self.bucket if "://" in self.bucket else f"s3://{self.bucket}"


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


def sends_token_in_plain(target: HttpTarget) -> bool:
    """Whether the token is sent unencrypted to another machine."""
    endpoint = urlsplit(target.endpoint)
    return target.token is not None and endpoint.scheme == "http" and not is_local(endpoint.hostname or "")


def is_local(host: str) -> bool:
    """Whether the host is this machine: a socket's directory or a loopback address."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
