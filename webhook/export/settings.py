"""The settings of `gpuwarden export`: S2's variables by their own names, and ours, which win.

S2's names are plain words (NAMESPACE, TIMEOUT), so nobody but this command looks at them. What S2 would end with, a
value of a wrong form, is a mistake here too; what it passes over in silence, in what concerns an exporter, is told.
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
from webhook.export.targets import HttpTarget, ObjectTarget, PostgresTarget, is_here, secret_in
from webhook.runtime.setting_kinds import FILE, HOST, NAMESPACE, TRUTH
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
    """What somebody has set, or the default. Secrets that stood in a variable are in it: it is never shown."""

    config: Path | None = field(
        default=None, metadata=declared(FILE, BOTH, "the YAML file with settings of this table", in_file=False)
    )
    exporter_type: tuple[str, ...] = field(
        default=("stdout",),
        metadata=declared(
            EXPORTER_LIST,
            EXPORT,
            "where records go, to all of these",
            older_variable="EXPORTER_TYPE",
            older_may_be_empty=True,
        ),
    )
    cluster_name: str | None = field(
        default=None,
        metadata=declared(
            WORDS,
            EXPORT,
            "the cluster's name in every record; needed",
            older_variable="CLUSTER_NAME",
            older_may_be_empty=True,
        ),
    )
    namespace: str = field(
        default="gpu-operator",
        metadata=declared(
            NAMESPACE,
            EXPORT,
            "where the device plugin's pods are",
            short="n",
            older_variable="NAMESPACE",
            older_may_be_empty=True,
        ),
    )
    label_selector: str = field(
        default="app=nvidia-device-plugin-daemonset",
        metadata=declared(
            SELECTOR, EXPORT, "which pods there are asked", older_variable="LABEL_SELECTOR", older_may_be_empty=True
        ),
    )
    container: str = field(
        default="nvidia-device-plugin",
        metadata=declared(
            CONTAINER,
            EXPORT,
            "the container that nvidia-smi is run in",
            older_variable="CONTAINER",
            older_may_be_empty=True,
        ),
    )
    workers: int = field(
        default=16, metadata=declared(WORKERS, EXPORT, "how many pods are read at once", older_variable="WORKERS")
    )
    timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(PATIENCE, EXPORT, "how long one pod may take, with its labels", older_variable="TIMEOUT"),
    )
    resync: timedelta = field(
        default=timedelta(0),
        metadata=declared(
            GO_DURATION,
            EXPORT,
            "how often pods that were read are read again; 0: when something happens",
            older_variable="RESYNC",
        ),
    )
    qps: float = field(
        default=50.0, metadata=declared(RATE, EXPORT, "requests a second to the API server", older_variable="QPS")
    )
    burst: int = field(
        default=100, metadata=declared(BURST, EXPORT, "how many of these may come at once", older_variable="BURST")
    )
    kubeconfig: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            EXPORT,
            "the cluster, if not the one whose Pod this is; gpuid's variable counts outside of Pods only",
            older_variable="KUBECONFIG",
            older_is_lenient=True,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=declared(
            LENIENT_LOG_LEVEL, EXPORT, "what is logged: this and what is graver", short="l", older_variable="LOG_LEVEL"
        ),
    )
    host: str = field(
        default="0.0.0.0",  # noqa: S104 - probes and Prometheus come from elsewhere, and find nothing else there
        metadata=declared(HOST, EXPORT, "where health and metrics are"),
    )
    server_port: int = field(
        default=8080, metadata=declared(SERVER_PORT, EXPORT, "at which port", older_variable="SERVER_PORT")
    )
    leader_election: bool = field(
        default=False,
        metadata=declared(
            GO_TRUTH, EXPORT, "whether one of several is elected to work", older_variable="LEADER_ELECTION"
        ),
    )
    lease_namespace: str = field(
        default="gpuid", metadata=declared(NAMESPACE, EXPORT, "where its Lease is", older_variable="LEASE_NAMESPACE")
    )
    lease_name: str = field(
        default="gpuid-leader", metadata=declared(WORDS, EXPORT, "and its name", older_variable="LEASE_NAME")
    )
    lease_duration: timedelta = field(
        default=timedelta(seconds=15),
        metadata=declared(
            GO_INTERVAL, EXPORT, "how long nobody else may take the Lease", older_variable="LEASE_DURATION"
        ),
    )
    lease_renew_deadline: timedelta = field(
        default=timedelta(seconds=10),
        metadata=declared(
            GO_INTERVAL,
            EXPORT,
            "how long its holder goes on without renewing it",
            older_variable="LEASE_RENEW_DEADLINE",
        ),
    )
    lease_retry_period: timedelta = field(
        default=timedelta(seconds=2),
        metadata=declared(GO_INTERVAL, EXPORT, "how often it is looked at", older_variable="LEASE_RETRY_PERIOD"),
    )
    pod_name: str = field(
        default="", metadata=declared(TEXT, EXPORT, "this Pod; needed for an election", older_variable="POD_NAME")
    )
    pod_namespace: str = field(
        default="", metadata=declared(TEXT, EXPORT, "its namespace", older_variable="POD_NAMESPACE")
    )
    labels: bool = field(
        default=True, metadata=declared(TRUTH, EXPORT, "whether nodes are labelled with what was read")
    )
    history: bool = field(
        default=True,
        metadata=declared(TRUTH, EXPORT, "whether the beginning and the end of reservations are exported too"),
    )
    outbox: Path | None = field(
        default=None,
        metadata=declared(
            DIRECTORY, EXPORT, "directory of what is not stored yet; not set: it is lost when the process ends"
        ),
    )

    http_endpoint: str | None = field(
        default=None, metadata=declared(ENDPOINT, EXPORT, "where http posts records", older_variable="HTTP_ENDPOINT")
    )
    http_timeout: timedelta = field(
        default=timedelta(seconds=30),
        metadata=declared(
            GO_INTERVAL, EXPORT, "how long a post may take", older_variable="HTTP_TIMEOUT", older_is_lenient=True
        ),
    )
    http_auth_token: str | None = field(
        default=None,
        metadata=declared(
            TEXT, EXPORT, "its bearer token", older_variable="HTTP_AUTH_TOKEN", in_file=False, is_secret=True
        ),
    )
    http_auth_token_file: Path | None = field(default=None, metadata=declared(FILE, EXPORT, "a file with it"))
    http_token_in_plain: bool = field(
        default=False,
        metadata=declared(
            TRUTH, EXPORT, "whether the token may go by plain http to other machines: everybody on the way can read it"
        ),
    )
    postgres_host: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "the database server", older_variable="POSTGRES_HOST")
    )
    postgres_port: int = field(
        default=5432,
        metadata=declared(STORE_PORT, BOTH, "its port", older_variable="POSTGRES_PORT", older_is_lenient=True),
    )
    postgres_db: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "the database", older_variable="POSTGRES_DB")
    )
    postgres_user: str | None = field(
        default=None, metadata=declared(TEXT, BOTH, "the role", older_variable="POSTGRES_USER")
    )
    postgres_password: str | None = field(
        default=None,
        metadata=declared(
            TEXT, BOTH, "its password", older_variable="POSTGRES_PASSWORD", in_file=False, is_secret=True
        ),
    )
    postgres_password_file: Path | None = field(default=None, metadata=declared(FILE, BOTH, "a file with it"))
    postgres_sslmode: str = field(
        default="require", metadata=declared(SSL_MODE, BOTH, "how it is reached", older_variable="POSTGRES_SSLMODE")
    )
    postgres_sslrootcert: str | None = field(
        default=None,
        metadata=declared(
            ROOT_CERTIFICATES, BOTH, "whom its certificate has to be from", older_variable="POSTGRES_SSLROOTCERT"
        ),
    )
    postgres_table: str = field(
        default="gpu", metadata=declared(TEXT, BOTH, "the table of readings", older_variable="POSTGRES_TABLE")
    )
    postgres_auto_migrate: bool = field(
        default=False,
        metadata=declared(
            MIGRATE, BOTH, "whether tables are made that are missing", older_variable="POSTGRES_AUTO_MIGRATE"
        ),
    )
    s3_bucket: str | None = field(
        default=None,
        metadata=declared(
            TEXT, EXPORT, "the bucket, or a URL (s3://, gs://, az://) of another store", older_variable="S3_BUCKET"
        ),
    )
    s3_prefix: str = field(
        default="", metadata=declared(TEXT, EXPORT, "what keys begin with", older_variable="S3_PREFIX")
    )
    s3_region: str = field(
        default="us-east-1", metadata=declared(TEXT, EXPORT, "the bucket's region", older_variable="S3_REGION")
    )
    s3_partition_pattern: str = field(
        default="year=%Y/month=%m/day=%d/hour=%H",
        metadata=declared(
            PARTITION_PATTERN, EXPORT, "what stands between prefix and name", older_variable="S3_PARTITION_PATTERN"
        ),
    )
    s3_format: str = field(default="csv", metadata=declared(OBJECT_FORMAT, EXPORT, "the form of objects"))
    s3_header: bool = field(
        default=False, metadata=declared(TRUTH, EXPORT, "whether a CSV object begins with its columns")
    )
    s3_own_columns: bool = field(
        default=False,
        metadata=declared(TRUTH, EXPORT, "whether uuid, minor number and the rest follow the seven columns"),
    )

    # By setting: "flag --timeout", "variable TIMEOUT", "key timeout in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Sentences about what was passed over.
    notes: tuple[str, ...] = ()
    # Where a Pod finds the API server: what Kubernetes tells every one.
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
        """The cluster to talk to, in the words of the other commands."""
        is_ours = self.sources.get("kubeconfig") != "variable KUBECONFIG"
        is_pod = self.api_server_of_pod is not None and (mounted / "token").is_file()
        if self.kubeconfig is not None and (is_ours or not is_pod):
            return Settings(kubeconfig=self.kubeconfig)
        if is_pod:
            return Settings(in_cluster=True, api_server_of_pod=self.api_server_of_pod)
        raise SettingsError(["this is no Pod, and no other cluster is named; name one by --kubeconfig"])


def secret(text: str | None, file: Path | None) -> str | None:
    return text if file is None else secret_in(file)


TABLE: Final = settings_of(ExportSettings, EXPORT_PREFIX)

# What each exporter cannot do without.
NEEDED: Final = {
    "stdout": (),
    "http": ("http_endpoint",),
    "postgres": ("postgres_host", "postgres_db", "postgres_user", "postgres_password"),
    "s3": ("s3_bucket",),
}


@frozen
class Part:
    """What a command needs and what else it looks at that does not export. The rest may be as it likes: S2's variables
    are plain words, which others set too."""

    needs: tuple[str, ...]
    looks_at: tuple[str, ...] = ()


ONE_READING: Final = Part(needs=("cluster_name",))
HISTORY: Final = Part(NEEDED["postgres"], tuple(one.name for one in TABLE if Command.HISTORY in one.commands))


class ExportReader(TableReader):
    """Reads them, and looks at what does not go together."""

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
        return evolve(chosen, notes=tuple(self.passed_over))

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
            self.mistakes.append(f"{self.where(['burst', 'qps'])}: fewer at once than a second allows")
        times = ["lease_duration", "lease_renew_deadline", "lease_retry_period"]
        found = [self._value(values, name) for name in times]
        if not found[0] > found[1] > found[2]:
            self.mistakes.append(f"{self.where(times)}: each has to be shorter than the one before")
        for name in ("http_auth_token", "postgres_password"):
            if name in self.given and f"{name}_file" in self.given:
                self.mistakes.append(f"{self.where([name, f'{name}_file'])}: said twice; choose one")
        if self._shows_token(values):
            problem = (
                "everybody on the way could read the token; allowed: https, or http to this machine,"
                " or to anybody with --http-token-in-plain true"
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
        return has_token and endpoint.scheme == "http" and not is_here(endpoint.hostname or "")

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
                yield " or ".join(names), f"{by} needs it" if by else "it is needed"
            elif values.get(name) == "":
                yield self.where([name]), f"{by} needs more than nothing"

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
    """The settings, or `SettingsError` with every mistake. `part`: for a command that does not export."""
    return ExportReader(flags, process_environment() if environ is None else environ, also, part).read()


REFERENCE: Final = """\
# Settings of `gpuwarden export` and `gpuwarden history`

Written by `gpuwarden config reference export`; change `webhook/export/settings.py` instead.

A flag wins over a variable, ours over gpuid's, a variable over the YAML file that `--config` or
`GPUWARDEN_EXPORT_CONFIG` names, the file over the default. Secrets have no flag: everybody on the machine could read
it. All mistakes are named at once, and the exit code is 2.

| flag | variable | YAML key | default | allowed | meaning | commands |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The table of these settings as Markdown."""
    return REFERENCE + "".join(map(row, TABLE))
