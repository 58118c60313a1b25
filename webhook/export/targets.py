"""Where an exporter stores: what it has to know of its store."""

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
    # HTTPS_PROXY and its like count, as they did for S2.
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
    # A file; libpq looks for one in the home directory if there is none.
    sslrootcert: str | None = None
    table: str = "gpu"
    auto_migrate: bool = False
    # To be connected, and for each statement.
    connect_timeout: timedelta = timedelta(seconds=10)
    statement_timeout: timedelta = timedelta(seconds=60)


@frozen
class ObjectTarget:
    """`bucket` is a name, or a URL of any store that keeps objects."""

    bucket: str
    prefix: str = ""
    region: str = "us-east-1"
    partition_pattern: str = "year=%Y/month=%m/day=%d/hour=%H"
    form: str = "csv"
    header: bool = False
    # Whether uuid and the rest of what S2 does not know follow its seven columns.
    own_columns: bool = False
    # As obstore names them: endpoint, access_key_id ... What is not here it takes from the environment.
    options: Mapping[str, str] = field(factory=dict, repr=False)
    timeout: timedelta = timedelta(seconds=30)

    @property
    def url(self) -> str:
        return self.bucket if "://" in self.bucket else f"s3://{self.bucket}"


def read_secret(file: Path) -> str:
    """Raises OSError, UnicodeDecodeError."""
    return file.read_text().strip("\r\n")


def current_secret(known: str, file: Path | None) -> str:
    """A secret as its file has it at this moment; while that cannot be read, as it was when the process began."""
    if file is None:
        return known
    try:
        return read_secret(file)
    except (OSError, UnicodeDecodeError):
        return known


def sends_token_in_plain(target: HttpTarget) -> bool:
    """Whether its token is, by whoever is there."""
    endpoint = urlsplit(target.endpoint)
    return target.token is not None and endpoint.scheme == "http" and not is_local(endpoint.hostname or "")


def is_local(host: str) -> bool:
    """Whether what goes there stays on this machine: to the directory of a socket, or by loopback."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
