"""The settings of `gpuwarden export` and `history`: gpuwarden's variables, and those of gpuid.

gpuid's names are plain words (NAMESPACE, TIMEOUT), so only these commands read them. A value that stops gpuid is a
mistake here too; a value of an exporter that gpuid ignores silently is ignored with a note.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, fields, frozen

from webhook.export.kinds import (
    BURST,
    CONTAINER,
    DIRECTORY,
    GO_DURATION,
    GO_INTERVAL,
    GO_TRUTH,
    LENIENT_LOG_LEVEL,
    PATIENCE,
    RATE,
    SELECTOR,
    SERVER_PORT,
    TEXT,
    WORDS,
    WORKERS,
    exporter_list,
)
from webhook.export.targets import BOTH, EXPORT, POSTGRES, STORES, ExportStore, T, is_plain_to_others, read_secret
from webhook.runtime.setting_kinds import BOOLEAN, FILE, HOST, NAMESPACE
from webhook.runtime.setting_table import (
    EXPORT_PREFIX,
    Command,
    SettingsError,
    TableReader,
    add_table,
    flag_of,
    process_environment,
    row,
    setting,
    settings_of,
)
from webhook.runtime.settings import Settings, api_server_of_pod

EXPORTER_LIST: Final = exporter_list(STORES)
MOUNTED: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@frozen
class ExportSettings:
    """The settings in effect. They contain the secrets of variables, so they are never printed."""

    config: Path | None = setting(None, FILE, BOTH, "YAML file with the settings of this table", in_file=False)
    exporter_type: tuple[str, ...] = setting(
        ("stdout",),
        EXPORTER_LIST,
        EXPORT,
        "stores that records are exported to",
        older_variable="EXPORTER_TYPE",
        older_may_be_empty=True,
    )
    cluster_name: str | None = setting(
        None,
        WORDS,
        EXPORT,
        "name of the cluster in every record; required",
        older_variable="CLUSTER_NAME",
        older_may_be_empty=True,
    )
    namespace: str = setting(
        "gpu-operator",
        NAMESPACE,
        EXPORT,
        "namespace of the device plugin's pods",
        short="n",
        older_variable="NAMESPACE",
        older_may_be_empty=True,
    )
    label_selector: str = setting(
        "app=nvidia-device-plugin-daemonset",
        SELECTOR,
        EXPORT,
        "selector of the device plugin's pods",
        older_variable="LABEL_SELECTOR",
        older_may_be_empty=True,
    )
    container: str = setting(
        "nvidia-device-plugin",
        CONTAINER,
        EXPORT,
        "container in which nvidia-smi runs",
        older_variable="CONTAINER",
        older_may_be_empty=True,
    )
    workers: int = setting(16, WORKERS, EXPORT, "number of pods that are read concurrently", older_variable="WORKERS")
    timeout: timedelta = setting(
        timedelta(seconds=30),
        PATIENCE,
        EXPORT,
        "how long one pod may take, including the labels of its node",
        older_variable="TIMEOUT",
    )
    resync: timedelta = setting(
        timedelta(0),
        GO_DURATION,
        EXPORT,
        "how often pods are read again; 0: only when something changes",
        older_variable="RESYNC",
    )
    qps: float = setting(50.0, RATE, EXPORT, "requests per second to the API server", older_variable="QPS")
    burst: int = setting(100, BURST, EXPORT, "number of requests that may be sent at once", older_variable="BURST")
    kubeconfig: Path | None = setting(
        None,
        FILE,
        EXPORT,
        "kubeconfig of the cluster; not set: the cluster of this Pod; the older exporter's variable "
        "counts outside of Pods only",
        older_variable="KUBECONFIG",
        older_is_lenient=True,
    )
    log_level: str = setting(
        "info", LENIENT_LOG_LEVEL, EXPORT, "minimum log level", short="l", older_variable="LOG_LEVEL"
    )
    # For probes and Prometheus; the listener serves nothing else.
    host: str = setting("0.0.0.0", HOST, EXPORT, "address of the listener for health and metrics")  # noqa: S104
    server_port: int = setting(
        8080, SERVER_PORT, EXPORT, "port of the listener for health and metrics", older_variable="SERVER_PORT"
    )
    leader_election: bool = setting(
        False, GO_TRUTH, EXPORT, "elect one of several replicas", older_variable="LEADER_ELECTION"
    )
    lease_namespace: str = setting(
        "gpuid", NAMESPACE, EXPORT, "namespace of the Lease", older_variable="LEASE_NAMESPACE"
    )
    lease_name: str = setting("gpuid-leader", WORDS, EXPORT, "name of the Lease", older_variable="LEASE_NAME")
    lease_duration: timedelta = setting(
        timedelta(seconds=15),
        GO_INTERVAL,
        EXPORT,
        "how long no other replica may take the Lease",
        older_variable="LEASE_DURATION",
    )
    lease_renew_deadline: timedelta = setting(
        timedelta(seconds=10),
        GO_INTERVAL,
        EXPORT,
        "how long the leader continues without renewing the Lease",
        older_variable="LEASE_RENEW_DEADLINE",
    )
    lease_retry_period: timedelta = setting(
        timedelta(seconds=2), GO_INTERVAL, EXPORT, "how often the Lease is checked", older_variable="LEASE_RETRY_PERIOD"
    )
    pod_name: str = setting(
        "", TEXT, EXPORT, "name of this Pod; required for leader election", older_variable="POD_NAME"
    )
    pod_namespace: str = setting("", TEXT, EXPORT, "namespace of this Pod; not used", older_variable="POD_NAMESPACE")
    labels: bool = setting(True, BOOLEAN, EXPORT, "label nodes with the values that were read")
    history: bool = setting(True, BOOLEAN, EXPORT, "also export the beginning and the end of reservations")
    outbox: Path | None = setting(
        None,
        DIRECTORY,
        EXPORT,
        "directory of records that are not stored yet; not set: they are lost when the process ends",
    )

    # The settings of stores that are set, by their whole names.
    stores: Mapping[str, Any] = field(factory=dict, repr=False)
    # By setting: "flag --timeout", "variable TIMEOUT", "key timeout in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Warnings about values that are ignored.
    notes: tuple[str, ...] = ()
    # The API server's URL from the variables that Kubernetes sets in every Pod.
    api_server_of_pod: str | None = field(default=None, eq=False)

    def target(self, store: ExportStore[T]) -> T:
        """The settings of a store that has them. Raises OSError, UnicodeDecodeError if a file cannot be read."""
        if store.target is None:
            raise TypeError(f"{store.name} has no settings")
        found = {}
        for one in store.settings:
            name = one.name.removeprefix(store.prefix)
            if one.is_secret and f"{one.name}_file" in self.stores:
                found[name] = read_secret(self.stores[f"{one.name}_file"])
            elif one.name in self.stores:
                found[name] = self.stores[one.name]
        return store.target(**found)

    def connection(self, mounted: Path = MOUNTED) -> Settings:
        """The cluster, as settings of the other commands."""
        is_ours = self.sources.get("kubeconfig") != "variable KUBECONFIG"
        is_pod = self.api_server_of_pod is not None and (mounted / "token").is_file()
        if self.kubeconfig is not None and (is_ours or not is_pod):
            return Settings(kubeconfig=self.kubeconfig)
        if is_pod:
            return Settings(in_cluster=True, api_server_of_pod=self.api_server_of_pod)
        raise SettingsError(["this process is not in a Pod, and no other cluster is named; name one by --kubeconfig"])


TABLE: Final = (
    *settings_of(ExportSettings, EXPORT_PREFIX),
    *(one for store in STORES.values() for one in store.settings),
)


@frozen
class Part:
    """The settings of a command that does not export: those that it requires, and those that it reads besides.

    The others are not checked: other programs may set gpuid's variables, which are plain words.
    """

    needs: tuple[str, ...]
    looks_at: tuple[str, ...] = ()


ONE_READING: Final = Part(needs=("cluster_name",))
HISTORY: Final = Part(POSTGRES.required, tuple(one.name for one in TABLE if Command.HISTORY in one.commands))


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
        own = {one.name: values[one.name] for one in fields(ExportSettings) if one.name in values}
        stores = {name: value for name, value in values.items() if name not in own}
        in_pod = api_server_of_pod(self.environ)
        chosen = ExportSettings(**own, stores=stores, sources=self.sources(), api_server_of_pod=in_pod)
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
        for name in (one.name for one in TABLE if one.is_secret):
            if name in self.given and f"{name}_file" in self.given:
                self.mistakes.append(f"{self.where([name, f'{name}_file'])}: both are set; set one")
        for store in self._chosen_stores(values):
            if self._sends_secret_in_plain(store, values):
                problem = "everyone on the way could read the token; allowed: https, or http to this machine"
                if store.allows_plain:
                    problem += f", or to any machine with {flag_of(store.prefix + store.allows_plain)} true"
                self.mistakes.append(f"{self.where([store.prefix + store.address])}: {problem}")

    def _chosen_stores(self, values: Mapping[str, Any]) -> list[ExportStore[Any]]:
        return [] if self._part is not None else [STORES[name] for name in self._value(values, "exporter_type")]

    def _sends_secret_in_plain(self, store: ExportStore[Any], values: Mapping[str, Any]) -> bool:
        if not store.address or values.get(store.prefix + store.allows_plain):
            return False
        secrets = [one.name for one in store.settings if one.is_secret]
        has_secret = any(values.get(name) or f"{name}_file" in self.given for name in secrets)
        return has_secret and is_plain_to_others(values.get(store.prefix + store.address) or "")

    def _missing(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if self._part is not None:
            needed = [("", name) for name in self._part.needs]
        else:
            needed = [("", "cluster_name")]
            needed += [(store.name, name) for store in self._chosen_stores(values) for name in store.required]
            if self._value(values, "leader_election"):
                needed.append(("leader election", "pod_name"))
        for by, name in needed:
            if name not in self.given and f"{name}_file" not in self.given:
                declared = next(one for one in TABLE if one.name == name)
                names = [*([] if declared.is_secret else [flag_of(name)]), *declared.variables]
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

`make chart` writes this page from `webhook/export/settings.py` and, for the settings of stores,
`webhook/export/targets.py`.

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
