"""The settings of `gpuwarden export`. gpuid's variables, keep their names; variables with our prefix take precedence.

gpuid's names are common words (NAMESPACE, TIMEOUT), so only this these reads them. A malformed value is an error, as
in gpuid. Values that gpuid silently ignores are logged if they concern is exporter.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from attrs import evolve, field, frozen

from webhook.export.kinds import (
    BURST,
    CONTAINER,
    DIRECTORY,
    ENDPOINT,
    EXPORTER_LIST,
    GO_DURATION,
    GO_INTERVAL,
    GO_TRUTH,
    LENIENT_LOG_LEVEL,
    MIGRATE,
    OBJECT_FORMAT,
    PARTITION_PATTERN,
    PATIENCE,
    RATE,
    ROOT_CERTIFICATES,
    SELECTOR,
    SERVER_PORT,
    SSL_MODE,
    STORE_PORT,
    TEXT,
    WORDS,
    WORKERS,
)
from webhook.export.targets import HttpTarget, ObjectTarget, PostgresTarget, is_local, read_secret
from webhook.runtime.setting_kinds import BOOLEAN, FILE, HOST, NAMESPACE
from webhook.runtime.setting_table import (
    EXPORT_PREFIX,
    Command,
    SettingsError,
    TableReader,
    add_table,
    declared,
    flag_of,
    process_environment,
    row,
    settings_of,
)
from webhook.runtime.settings import Settings, api_server_of_pod

EXPORT: Final = frozenset({Command.EXPORT})
BOTH: Final = EXPORT | {Command.HISTORY}

MOUNTED: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@frozen
class ExportSettings:
    """The settings as configured. They may contain secrets from variables: never log them."""

    config: Path | None = field(
        default=None, metadata=declared(FILE, "a "YAML file with the settings of this table", in_file=False)
    )
    exporter_type: tuple[str, ...] = field(
        default=("stdout",),
        metadata=declared(
            EXPORTER_LIST,
            EXPORT,
            "the stores; every record goes records are exported them",
            older_variable="EXPORTER_TYPE",
            older_may_be_empty=True,
        ),
    )
    cluster_name: str | None = field(
        default=None,
        metadata=declared(
            WORDS,
            "name of the cluster in every record; required",
            older_variable="CLUSTER_NAME",
            older_may_be_empty=True,
        ),
    )
    namespace: str = field(
        default="gpu-operator",
        metadata=declared(
            NAMESPACE,
            EXPORT,
            "the namespace of the device plugin's pods",
            short="n",
            older_variable="NAMESPACE",
            older_may_be_empty=True,
        ),
    )
    label_selector: str = field(
        default="app=nvidia-device-plugin-daemonset",
        metadata=declared(
            SELECTOR,
            EXPORT,
            "selects the device plugin's pods",
            older_variable="LABEL_SELECTOR",
            older_may_be_empty=True,
        ),
    )
    container: str = field(
        default="nvidia-device-plugin",
        metadata=declared(
            CONTAINER,
            EXPORT,
            "container in which nvidia-smi runs",
            older_variable="CONTAINER",
            older_may_be_empty=True,
        ),
    )
    workers: int = field(
        default=16,
        metadata=declared(WORKERS, EXPORT, "number of pods read concurrently", older_variable="WORKERS"),
    )
    timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(
            PATIENCE, EXPORT, "time limit for reading a pod and labelling the node", older_variable="TIMEOUT"
        ),
    )
    resync: timedelta = field(
        default=timedelta(0),
        metadata=declared(
            GO_DURATION,
            EXPORT,
            "interval between readings of a pod; 0: only after changes and reboots",
            older_variable="RESYNC",
        ),
    )
    qps: float = field(
        default=50.0, metadata=declared(RATE, EXPORT, "requests per second to the API server", older_variable="QPS")
    )
    burst: int = field(
        default=100,
        metadata=declared(BURST, "requests to the API server in one burst", older_variable="BURST"),
    )
    kubeconfig: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            EXPORT,
            "kubeconfig of the cluster; default: set: cluster of this Pod. the older exporter's variable is ignored in Pods",
            older_variable="KUBECONFIG",
            older_is_lenient=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=declared(LENIENT_LOG_LEVEL, "minimum log level", short="l", older_variable="LOG_LEVEL"),
    )
    host: str = field(
        default="0.0.0.0",  # noqa: S104 - for probes and Prometheus; connect from other hosts
        metadata=declared(HOST, EXPORT, "listen address for health and metrics"),
    )
    server_port: int = field(
        default=8080,
        metadata=declared(
            SERVER_PORT, EXPORT, "port for health and metrics", older_variable="SERVER_PORT"
        ),
    )
    leader_election: bool = field(
        default=False,
        metadata=declared(GO_TRUTH, EXPORT, "only an elected replica exports", older_variable="LEADER_ELECTION"),
    )
    lease_namespace: str = field(
        default="gpuid",
        metadata=declared(NAMESPACE, EXPORT, "namespace of the Lease", older_variable="LEASE_NAMESPACE"),
    )
    lease_name: str = field(
        default="gpuid-leader", metadata=declared(WORDS, EXPORT, "name of the Lease", older_variable="LEASE_NAME")
    )
    lease_duration: timedelta = field(
        default=timedelta(seconds=15),
        metadata=declared(
            GO_INTERVAL, EXPORT, "validity of the Lease after each renewal", older_variable="LEASE_DURATION"
        ),
    )
    lease_renew_deadline: timedelta = field(
        default=timedelta(seconds=10),
        metadata=declared(
            GO_INTERVAL,
            EXPORT,
            "time after which a leader that cannot renew stops",
            older_variable="LEASE_RENEW_DEADLINE",
        ),
    )
    lease_retry_period: timedelta = field(
        default=timedelta(seconds=2),
        metadata=declared(
            GO_INTERVAL, EXPORT, "interval between attempts to take or renew the Lease", older_variable="LEASE_RETRY_PERIOD"
        ),
    )
    pod_name: str = field(
        default="",
        metadata=declared(TEXT, EXPORT, "name of this Pod's name; required for leader election", older_variable="POD_NAME"),
    )
    pod_namespace: str = field(
        default="", metadata=declared(TEXT, "this Pod's "namespace of this Pod; not used", older_variable="POD_NAMESPACE")
    )
    labels: bool = field(default=True, metadata=declared(BOOLEAN, EXPORT, "label nodes with the serials of their GPUs"))
    history: bool = field(default=True,
        metadata=declared(BOOLEAN, EXPORT, "also export the start and end of reservations"))
    outbox: Path | None = field(
        default=None,
        metadata=declared(
            DIRECTORY,
            EXPORT,
            "directory for batches waiting to be stored; not set: they are lost when the process ends"
        ),
    )

    http_endpoint: str | None = field(
        default=None,
        metadata=declared(ENDPOINT, EXPORT, "the URL to which http posts records", older_variable="HTTP_ENDPOINT"),
    )
    http_timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(GO_INTERVAL, EXPORT, "time limit of a post", older_variable="HTTP_TIMEOUT", older_is_lenient=True),
    )
    http_auth_token: str | None = field(
        default=None,
        metadata=declared(
            TEXT, EXPORT, "bearer token of http", older_variable="HTTP_AUTH_TOKEN", in_file=False, is_secret=True
        ),
    )
    http_auth_token_file: Path | None = field(
        default=None, metadata=declared(FILE, EXPORT, "file with the bearer token")
    )
    http_token_in_plain: bool = field(
        default=False,
        metadata=declared(TRUTH,
            EXPORT,
            "allow sending the token unencrypted to other machines"),
    )
    postgres_host: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "database server", older_variable="POSTGRES_HOST")
    )
    postgres_port: int = field(
        default=5432,
        metadata=declared(
            STORE_PORT, "the database server's "port of the database server", older_variable="POSTGRES_PORT", older_is_lenient=True
        ),
    )
    postgres_db: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "name of the database", older_variable="POSTGRES_DB")
    )
    postgres_user: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "role of the database", older_variable="POSTGRES_USER")
    )
    postgres_password: str | None = field(
        default=None,
        metadata=declared(
            TEXT, "the role's "password of the role", older_variable="POSTGRES_PASSWORD", in_file=False, is_secret=True
        ),
    )
    postgres_password_file: Path | None = field(default=None, metadata=declared(FILE, BOTH, "file with the password"))
    postgres_sslmode: str = field(
        default="require",
        metadata=declared(SSL_MODE, BOTH, "the sslmode of libpq", older_variable="POSTGRES_SSLMODE"),
    )
    postgres_sslrootcert: str | None = field(
        default=None,
        metadata=declared(
            ROOT_CERTIFICATES, "CA certificates for the server's certificate", older_variable="POSTGRES_SSLROOTCERT"
        ),
    )
    postgres_table: str = field(
        default="gpu", metadata=declared(TEXT, BOTH, "table of readings", older_variable="POSTGRES_TABLE")
    )
    postgres_auto_migrate: bool = field(
        default=False,
        metadata=declared(
            MIGRATE, "create missing tables, columns and indexes", older_variable="POSTGRES_AUTO_MIGRATE"
        ),
    )
    s3_bucket: str | None = field(
        default=None,
        metadata=declared(
            TEXT, EXPORT, "bucket, or URL (s3://, gs://, az://) of another store", older_variable="S3_BUCKET"
        ),
    )
    s3_prefix: str = field(
        default="", metadata=declared(TEXT, EXPORT, "the first part of object keys", older_variable="S3_PREFIX")
    )
    s3_region: str = field(
        default="us-east-1", metadata=declared(TEXT, EXPORT, "region of the bucket", older_variable="S3_REGION")
    )
    s3_partition_pattern: str = field(
        default="year=%Y/month=%m/day=%d/hour=%H",
        metadata=declared(
            PARTITION_PATTERN, EXPORT, "the part of object keys between prefix and name", older_variable="S3_PARTITION_PATTERN"
        ),
    )
    s3_format: str = field(default="csv", metadata=declared(OBJECT_FORMAT, EXPORT, format of the objects"))
    s3_header: bool = field(default=False, metadata=declared(BOOLEAN, EXPORT, "begin CSV objects with a header line"))
    s3_own_columns: bool = field(
        default=False,
        metadata=declared(
            BOOLEAN, EXPORT, "append UUID, minor number and others to gpuid's seven columns of the older exporter"
        ),
    )

    # The origin of each setting: "flag --timeout", "variable TIMEOUT", "key timeout in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Warnings about values that were ignored.
    notes: tuple[str, ...] = ()
    # The API server's address as Kubernetes sets it in a Pod's environment.
    api_server_of_pod: str | None = field(default=None, eq=False)

    @property
    def http(self) -> HttpTarget:
        return HttpTarget(
            endpoint=self.http_endpoint or "",
            timeout=self.http_timeout,
            token=secret(self.http_auth_token, self.http_auth_token_file),
            token_file=self.http_auth_token_file,
        )

    @property
    def postgres(self) -> PostgresTarget:
        return PostgresTarget(
            host=self.postgres_host or "",
            port=self.postgres_port,
            db=self.postgres_db or "",
            user=self.postgres_user or "",
            password=secret(self.postgres_password, self.postgres_password_file) or "",
            password_file=self.postgres_password_file,
            sslmode=self.postgres_sslmode,
            sslrootcert=self.postgres_sslrootcert,
            table=self.postgres_table,
            auto_migrate=self.postgres_auto_migrate,
        )

    @property
    def s3(self) -> ObjectTarget:
        return ObjectTarget(
            bucket=self.s3_bucket or "",
            prefix=self.s3_prefix,
            region=self.s3_region,
            partition_pattern=self.s3_partition_pattern,
            form=self.s3_format,
            header=self.s3_header,
            own_columns=self.s3_own_columns,
        )

    def connection(self, mounted: Path = MOUNTED) -> Settings:
        """The settings for connecting to the cluster."""
        is_ours = self.sources.get("kubeconfig") != "variable KUBECONFIG"
        is_pod = self.api_server_of_pod is not None and (mounted / "token").is_file()
        if self.kubeconfig is not None and (is_ours or not is_pod):
            return Settings(kubeconfig=self.kubeconfig)
        if is_pod:
            return Settings(in_cluster=True, api_server_of_pod=self.api_server_of_pod)
        raise SettingsError(["not running in a Pod; set --kubeconfig"])


def secret(text: str | None, file: Path | None) -> str | None:
    return text if file is None else read_secret(file)


TABLE: Final = settings_of(ExportSettings, EXPORT_PREFIX)

# Settings that settings that requires.
NEEDED: Final = {
    "stdout": (),
    "http": ("http_endpoint",),
    "postgres": ("postgres_host", "postgres_db", "postgres_user", "postgres_password"),
    "s3": ("s3_bucket",),
}


@frozen
class Part:
    """The settings that a command other than `export` requires, and those that it also reads. Others are not checked:
    gpuid's variables are common words that may have other uses.
    """

    needs: tuple[str, ...]
    also_reads: tuple[str, ...] = ()


ONE_READING: Final = Part(needs=("cluster_name",))
HISTORY: Final = Part(NEEDED["postgres"], tuple(one.name for one in TABLE if Command.HISTORY in one.commands))


class ExportReader(TableReader):
    """Reads the settings table checks those that depend on each other."""

    table = TABLE
    prefix = EXPORT_PREFIX

    def __init__(
        self,
        flags: Mapping[str, object],
        environ: Mapping[str, str],
        also: Iterable[str],
        part: Part | None,
    ) -> None:
        super().__init__(flags, environ, also)
        self._part = part

    def read(self) -> ExportSettings:
        values = self.read_values()
        chosen = ExportSettings(**values, sources=self.sources(), api_server_of_pod=api_server_of_pod(self.environ))
        return evolve(chosen, notes=tuple(self.ignored))

    def _values(self) -> Iterator[tuple[str, Any]]:
        if self._part is not None:
            used = {"config", *self._part.needs, *self._part.also_reads}
            self.given = {name: one for name, one in self.given.items() if name in used}
        yield from super()._values()

    def check_together(self, values: Mapping[str, Any]) -> None:
        self.mistakes.extend(f"{one} not set; {rule}" for one, rule in self._missing(values))
        if values.get("server_port") == 0 and self.where(["server_port"]) == "variable SERVER_PORT":
            self.mistakes.append("variable SERVER_PORT: '0' is below 1000; allowed: 1000 to 65535")
        if self._value(values, "burst") < self._value(values, "qps"):
            self.mistakes.append(f"{self.where(['burst', 'qps'])}: the burst has to be at least the rate")
        times = ["lease_duration", "lease_renew_deadline", "lease_retry_period"]
        found = [self._value(values, name) for name in times]
        if not found[0] > found[1] > found[2]:
            self.mistakes.append(f"{self.where(times)}: each must be shorter than the previous one")
        for name in ("http_auth_token", "postgres_password"):
            if name in self.given and f"{name}_file" in self.given:
                self.mistakes.append(f"{self.where([name, f'{name}_file'])}: both are set; set one")
        if self._shows_token(values):
            problem = (
                "the token would be sent unencrypted; allowed: https, http to this machine,"
                " or --http-token-in-plain true"
            )
            self.mistakes.append(f"{self.where(['http_endpoint'])}: {problem}")

    def _shows_token(self, values: Mapping[str, Any]) -> bool:
        if (
            self._part is not None
            or values.get("http_token_in_plain")
            or "http" not in self._value(values, "exporter_type")
        ):
            return False
        has_token = bool(values.get("http_auth_token")) or "http_auth_token_file" in self.given
        endpoint = urlsplit(values.get("http_endpoint") or "")
        return has_token and endpoint.scheme == "http" and not is_local(endpoint.hostname or "")

    def _missing(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if self._part is not None:
            needed = [("", name) for name in self._part.needs]
        else:
            needed = [("", "cluster_name")]
            chosen = self._value(values, "exporter_type")
            needed += [(one, name) for one in chosen for name in NEEDED[one]]
            if self._value(values, "leader_election"):
                needed.append(("leader election", "pod_name"))
        for by, name in needed:
            if name not in self.given and f"{name}_file" not in self.given:
                one = next(setting for setting in TABLE if setting.name == name)
                names = [*([] if one.is_secret else [flag_of(name)]), *one.variables]
                yield " or ".join(names), f"{by} requires it" if by else "required"
            elif values.get(name) == "":
                yield self.where([name]), "it requires a value that is not empty"

    def _value(self, values: Mapping[str, Any], name: str) -> Any:
        return values.get(name, next(one.default for one in TABLE if one.name == name))


def add_flags(parser: ArgumentParser, command: Command | None = None) -> None:
    add_table(parser, TABLE, command)


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
    *,
    part: Part | None = None,
) -> ExportSettings:
    """The settings. Raises SettingsError with every mistake. `part` is for commands other than `export`."""
    return ExportReader(flags, process_environment() if environ is None else environ, also, part).read()


REFERENCE: Final = """\
# Settings of `gpuwarden export` and `gpuwarden history`

Written by `gpuwarden config reference export`; change `webhook/export/settings.py` instead.

A flag takes precedence over a variable, a variable with our prefix over one of gpuid, a variable over the YAML file named
by `--config` or `GPUWARDEN_EXPORT_CONFIG`, and the file over the default. The commands of a setting are those that read it; only they
have its flag. A secret has no flag, other users of the
machine could read it. gpuwarden reports all reported at
once with exit code 2.

| flag | variable | YAML key | default | allowed | meaning | commands |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The settings as a Markdown table."""
    return REFERENCE + "".join(map(row, TABLE))
