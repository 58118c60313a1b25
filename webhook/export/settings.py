"""The settings of `gpuwarden export` and `history`: gpuwarden's variables, and those of gpuid.

gpuid's names are plain words (NAMESPACE, TIMEOUT), so only these commands read them. A value that stops gpuid is a
mistake here too; a value of an exporter that gpuid ignores silently is ignored with a note.
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
    """The settings in effect. They contain the secrets of variables, so they are never printed."""

    config: Path | None = field(
        default=None, metadata=declared(FILE, BOTH, "YAML file with the settings of this table", in_file=False)
    )
    exporter_type: tuple[str, ...] = field(
        default=("stdout",),
        metadata=declared(
            EXPORTER_LIST,
            EXPORT,
            "stores that records are exported to",
            older_variable="EXPORTER_TYPE",
            older_may_be_empty=True,
        ),
    )
    cluster_name: str | None = field(
        default=None,
        metadata=declared(
            WORDS,
            EXPORT,
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
            "namespace of the device plugin's pods",
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
            "selector of the device plugin's pods",
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
        metadata=declared(WORKERS, EXPORT, "number of pods that are read concurrently", older_variable="WORKERS"),
    )
    timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(
            PATIENCE, EXPORT, "how long one pod may take, including the labels of its node", older_variable="TIMEOUT"
        ),
    )
    resync: timedelta = field(
        default=timedelta(0),
        metadata=declared(
            GO_DURATION,
            EXPORT,
            "how often pods are read again; 0: only when something changes",
            older_variable="RESYNC",
        ),
    )
    qps: float = field(
        default=50.0, metadata=declared(RATE, EXPORT, "requests per second to the API server", older_variable="QPS")
    )
    burst: int = field(
        default=100,
        metadata=declared(BURST, EXPORT, "number of requests that may be sent at once", older_variable="BURST"),
    )
    kubeconfig: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            EXPORT,
            "kubeconfig of the cluster; not set: the cluster of this Pod; the older exporter's variable "
            "counts outside of Pods only",
            older_variable="KUBECONFIG",
            older_is_lenient=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=declared(LENIENT_LOG_LEVEL, EXPORT, "minimum log level", short="l", older_variable="LOG_LEVEL"),
    )
    host: str = field(
        default="0.0.0.0",  # noqa: S104 - for probes and Prometheus; the listener serves nothing else
        metadata=declared(HOST, EXPORT, "address of the listener for health and metrics"),
    )
    server_port: int = field(
        default=8080,
        metadata=declared(
            SERVER_PORT, EXPORT, "port of the listener for health and metrics", older_variable="SERVER_PORT"
        ),
    )
    leader_election: bool = field(
        default=False,
        metadata=declared(GO_TRUTH, EXPORT, "elect one of several replicas", older_variable="LEADER_ELECTION"),
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
            GO_INTERVAL, EXPORT, "how long no other replica may take the Lease", older_variable="LEASE_DURATION"
        ),
    )
    lease_renew_deadline: timedelta = field(
        default=timedelta(seconds=10),
        metadata=declared(
            GO_INTERVAL,
            EXPORT,
            "how long the leader continues without renewing the Lease",
            older_variable="LEASE_RENEW_DEADLINE",
        ),
    )
    lease_retry_period: timedelta = field(
        default=timedelta(seconds=2),
        metadata=declared(GO_INTERVAL, EXPORT, "how often the Lease is checked", older_variable="LEASE_RETRY_PERIOD"),
    )
    pod_name: str = field(
        default="",
        metadata=declared(TEXT, EXPORT, "name of this Pod; required for leader election", older_variable="POD_NAME"),
    )
    pod_namespace: str = field(
        default="", metadata=declared(TEXT, EXPORT, "namespace of this Pod; not used", older_variable="POD_NAMESPACE")
    )
    labels: bool = field(default=True, metadata=declared(BOOLEAN, EXPORT, "label nodes with the values that were read"))
    history: bool = field(
        default=True,
        metadata=declared(BOOLEAN, EXPORT, "also export the beginning and the end of reservations"),
    )
    outbox: Path | None = field(
        default=None,
        metadata=declared(
            DIRECTORY,
            EXPORT,
            "directory of records that are not stored yet; not set: they are lost when the process ends",
        ),
    )

    http_endpoint: str | None = field(
        default=None,
        metadata=declared(ENDPOINT, EXPORT, "URL to which http posts records", older_variable="HTTP_ENDPOINT"),
    )
    http_timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(
            GO_INTERVAL, EXPORT, "how long a POST may take", older_variable="HTTP_TIMEOUT", older_is_lenient=True
        ),
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
        metadata=declared(
            BOOLEAN,
            EXPORT,
            "allow the token in plain http to other machines: everyone on the way can read it",
        ),
    )
    postgres_host: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "database server", older_variable="POSTGRES_HOST")
    )
    postgres_port: int = field(
        default=5432,
        metadata=declared(
            STORE_PORT, BOTH, "port of the database server", older_variable="POSTGRES_PORT", older_is_lenient=True
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
            TEXT, BOTH, "password of the role", older_variable="POSTGRES_PASSWORD", in_file=False, is_secret=True
        ),
    )
    postgres_password_file: Path | None = field(default=None, metadata=declared(FILE, BOTH, "file with the password"))
    postgres_sslmode: str = field(
        default="require",
        metadata=declared(SSL_MODE, BOTH, "TLS mode of the connection (libpq)", older_variable="POSTGRES_SSLMODE"),
    )
    postgres_sslrootcert: str | None = field(
        default=None,
        metadata=declared(
            ROOT_CERTIFICATES, BOTH, "CAs of the database server's certificate", older_variable="POSTGRES_SSLROOTCERT"
        ),
    )
    postgres_table: str = field(
        default="gpu", metadata=declared(TEXT, BOTH, "table of readings", older_variable="POSTGRES_TABLE")
    )
    postgres_auto_migrate: bool = field(
        default=False,
        metadata=declared(MIGRATE, BOTH, "create missing tables", older_variable="POSTGRES_AUTO_MIGRATE"),
    )
    s3_bucket: str | None = field(
        default=None,
        metadata=declared(
            TEXT, EXPORT, "bucket, or URL (s3://, gs://, az://) of another store", older_variable="S3_BUCKET"
        ),
    )
    s3_prefix: str = field(
        default="", metadata=declared(TEXT, EXPORT, "prefix of the keys", older_variable="S3_PREFIX")
    )
    s3_region: str = field(
        default="us-east-1", metadata=declared(TEXT, EXPORT, "region of the bucket", older_variable="S3_REGION")
    )
    s3_partition_pattern: str = field(
        default="year=%Y/month=%m/day=%d/hour=%H",
        metadata=declared(
            PARTITION_PATTERN, EXPORT, "part of the key between prefix and name", older_variable="S3_PARTITION_PATTERN"
        ),
    )
    s3_format: str = field(default="csv", metadata=declared(OBJECT_FORMAT, EXPORT, "format of the objects"))
    s3_header: bool = field(default=False, metadata=declared(BOOLEAN, EXPORT, "begin each CSV object with a header"))
    s3_own_columns: bool = field(
        default=False,
        metadata=declared(
            BOOLEAN, EXPORT, "add UUID, minor number and the rest after the seven columns of the older exporter"
        ),
    )

    # By setting: "flag --timeout", "variable TIMEOUT", "key timeout in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Warnings about values that are ignored.
    notes: tuple[str, ...] = ()
    # The API server's URL from the variables that Kubernetes sets in every Pod.
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
        """The cluster, as settings of the other commands."""
        is_ours = self.sources.get("kubeconfig") != "variable KUBECONFIG"
        is_pod = self.api_server_of_pod is not None and (mounted / "token").is_file()
        if self.kubeconfig is not None and (is_ours or not is_pod):
            return Settings(kubeconfig=self.kubeconfig)
        if is_pod:
            return Settings(in_cluster=True, api_server_of_pod=self.api_server_of_pod)
        raise SettingsError(["this process is not in a Pod, and no other cluster is named; name one by --kubeconfig"])


def secret(text: str | None, file: Path | None) -> str | None:
    return text if file is None else read_secret(file)


TABLE: Final = settings_of(ExportSettings, EXPORT_PREFIX)

# The settings that each exporter requires.
NEEDED: Final = {
    "stdout": (),
    "http": ("http_endpoint",),
    "postgres": ("postgres_host", "postgres_db", "postgres_user", "postgres_password"),
    "s3": ("s3_bucket",),
}


@frozen
class Part:
    """The settings of a command that does not export: those that it requires, and those that it reads besides.

    The others are not checked: other programs may set gpuid's variables, which are plain words.
    """

    needs: tuple[str, ...]
    looks_at: tuple[str, ...] = ()


ONE_READING: Final = Part(needs=("cluster_name",))
HISTORY: Final = Part(NEEDED["postgres"], tuple(one.name for one in TABLE if Command.HISTORY in one.commands))


class ExportReader(TableReader):
    """Reads the table and applies the rules between its settings."""

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
            asked = {"config", *self._part.needs, *self._part.looks_at}
            self.given = {name: one for name, one in self.given.items() if name in asked}
        yield from super()._values()

    def check_together(self, values: Mapping[str, Any]) -> None:
        self.mistakes.extend(f"{one} not set; allowed: {rule}" for one, rule in self._missing(values))
        if values.get("server_port") == 0 and self.where(["server_port"]) == "variable SERVER_PORT":
            self.mistakes.append("variable SERVER_PORT: '0' is below 1000; allowed: 1000 to 65535")
        if self._value(values, "burst") < self._value(values, "qps"):
            self.mistakes.append(f"{self.where(['burst', 'qps'])}: --burst must not be less than --qps")
        times = ["lease_duration", "lease_renew_deadline", "lease_retry_period"]
        found = [self._value(values, name) for name in times]
        if not found[0] > found[1] > found[2]:
            self.mistakes.append(f"{self.where(times)}: each must be shorter than the one before")
        for name in ("http_auth_token", "postgres_password"):
            if name in self.given and f"{name}_file" in self.given:
                self.mistakes.append(f"{self.where([name, f'{name}_file'])}: both are set; set one")
        if self._shows_token(values):
            problem = (
                "everyone on the way could read the token; allowed: https, or http to this machine,"
                " or to any machine with --http-token-in-plain true"
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
                yield " or ".join(names), f"{by} requires it" if by else "it is required"
            elif values.get(name) == "":
                yield self.where([name]), "it must not be empty"

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
    """The settings. Raises SettingsError with every mistake. `part` is for a command that does not export."""
    return ExportReader(flags, process_environment() if environ is None else environ, also, part).read()


REFERENCE: Final = """\
# Settings of `gpuwarden export` and `gpuwarden history`

Written by `gpuwarden config reference export`; change `webhook/export/settings.py` instead.

A flag wins over a variable, a variable of gpuwarden over one of gpuid, a variable over the YAML file that `--config` or
`GPUWARDEN_EXPORT_CONFIG` names, the file over the default. The commands of a setting are those that read it; only they
have its flag. A secret has no flag, because every user of the machine could read it. gpuwarden reports all mistakes at
once, with exit code 2.

| flag | variable | YAML key | default | allowed | meaning | commands |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The table as Markdown."""
    return REFERENCE + "".join(map(row, TABLE))
