"""The settings of `gpuwarden export`: gpuid's variables as gpuid reads them, and all mistakes at once."""

from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.running import refusing
from webhook.export import settings
from webhook.export.settings import HISTORY, ONE_READING, TABLE, ExportSettings
from webhook.export.targets import HTTP, POSTGRES, S3
from webhook.runtime.setting_table import SettingsError
from webhook.runtime.settings import load as load_others

ROOT = Path(__file__).parents[2]
NEEDED = {"CLUSTER_NAME": "prod"}
# gpuid's variables with their defaults, and a text for each with its value.
GPUID_VARIABLES: dict[str, tuple[str, Any, str, Any]] = {
    "EXPORTER_TYPE": ("exporter_type", ("stdout",), "stdout", ("stdout",)),
    "NAMESPACE": ("namespace", "gpu-operator", "gpus", "gpus"),
    "LABEL_SELECTOR": ("label_selector", "app=nvidia-device-plugin-daemonset", "a in (b, c),!d", "a in (b, c),!d"),
    "CONTAINER": ("container", "nvidia-device-plugin", "", ""),
    "WORKERS": ("workers", 16, "100", 100),
    "TIMEOUT": ("timeout", timedelta(seconds=30), "1m30s", timedelta(seconds=90)),
    "RESYNC": ("resync", timedelta(0), "1h", timedelta(hours=1)),
    "QPS": ("qps", 50.0, "12.5", 12.5),
    "BURST": ("burst", 100, "60", 60),
    "LOG_LEVEL": ("log_level", "info", "loud", "info"),
    "SERVER_PORT": ("server_port", 8080, "1000", 1000),
    "LEADER_ELECTION": ("leader_election", False, "F", False),
    "LEASE_NAMESPACE": ("lease_namespace", "gpuid", "here", "here"),
    "LEASE_NAME": ("lease_name", "gpuid-leader", "one", "one"),
    "LEASE_DURATION": ("lease_duration", timedelta(seconds=15), "20s", timedelta(seconds=20)),
    "LEASE_RENEW_DEADLINE": ("lease_renew_deadline", timedelta(seconds=10), "9s", timedelta(seconds=9)),
    "LEASE_RETRY_PERIOD": ("lease_retry_period", timedelta(seconds=2), "500ms", timedelta(milliseconds=500)),
    "POD_NAME": ("pod_name", "", "p-0", "p-0"),
    "POD_NAMESPACE": ("pod_namespace", "", "n", "n"),
    "HTTP_ENDPOINT": ("http_endpoint", None, "https://store:8443/data", "https://store:8443/data"),
    "HTTP_TIMEOUT": ("http_timeout", timedelta(seconds=30), "5s", timedelta(seconds=5)),
    "HTTP_AUTH_TOKEN": ("http_auth_token", None, "t", "t"),
    "POSTGRES_HOST": ("postgres_host", None, "db", "db"),
    "POSTGRES_PORT": ("postgres_port", 5432, "6000", 6000),
    "POSTGRES_DB": ("postgres_db", None, "gpus", "gpus"),
    "POSTGRES_USER": ("postgres_user", None, "u", "u"),
    "POSTGRES_PASSWORD": ("postgres_password", None, "a b'c\\", "a b'c\\"),
    "POSTGRES_SSLMODE": ("postgres_sslmode", "require", "disable", "disable"),
    "POSTGRES_TABLE": ("postgres_table", "gpu", "Serials", "Serials"),
    "POSTGRES_AUTO_MIGRATE": ("postgres_auto_migrate", False, "TRUE", True),
    "S3_BUCKET": ("s3_bucket", None, "gpuids", "gpuids"),
    "S3_PREFIX": ("s3_prefix", "", "serial-numbers", "serial-numbers"),
    "S3_REGION": ("s3_region", "us-east-1", "eu-1", "eu-1"),
    "S3_PARTITION_PATTERN": ("s3_partition_pattern", "year=%Y/month=%m/day=%d/hour=%H", "%Y/%H", "%Y/%H"),
}


def load(environ: dict[str, str] | None = None, **flags: str) -> ExportSettings:
    return settings.load(flags, environ or {})


def mistakes(environ: dict[str, str], **flags: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(environ, **flags)
    return caught.value.mistakes


def value_of(found: ExportSettings, name: str) -> object:
    (setting,) = (one for one in TABLE if one.name == name)
    return getattr(found, name) if hasattr(found, name) else found.stores.get(name, setting.default)


@pytest.mark.parametrize("variable", GPUID_VARIABLES)
def test_variable_of_gpuid_has_its_default_and_is_read(variable: str) -> None:
    name, default, text, value = GPUID_VARIABLES[variable]
    assert load(NEEDED).cluster_name == "prod"
    assert value_of(load(NEEDED), name) == default
    assert value_of(load({**NEEDED, variable: text}), name) == value


@pytest.mark.parametrize("variable", GPUID_VARIABLES)
def test_prefixed_variable_takes_precedence_over_gpuids(variable: str) -> None:
    name, _, text, value = GPUID_VARIABLES[variable]
    own = f"GPUWARDEN_EXPORT_{name.upper()}"
    found = load({**NEEDED, variable: "nonsense \0 of no form", own: text} if text else {**NEEDED, variable: text})
    assert value_of(found, name) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CLUSTER_NAME", " "),
        ("CLUSTER_NAME", ""),
        ("EXPORTER_TYPE", "stdoutt"),
        ("EXPORTER_TYPE", "postgress"),
        ("EXPORTER_TYPE", ""),
        ("NAMESPACE", ""),
        ("LABEL_SELECTOR", "a=b=c"),
        ("LABEL_SELECTOR", "a in b"),
        ("LABEL_SELECTOR", "a,"),
        ("WORKERS", "0"),
        ("WORKERS", "101"),
        ("WORKERS", "x"),
        ("TIMEOUT", "30"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "11m"),
        ("TIMEOUT", "-1s"),
        ("RESYNC", "-1s"),
        ("RESYNC", "5"),
        ("QPS", "0"),
        ("BURST", "10"),
        ("SERVER_PORT", "80"),
        ("SERVER_PORT", "0"),
        ("SERVER_PORT", "65536"),
        ("LEADER_ELECTION", "yes"),
        ("LEASE_DURATION", "10s"),
        ("LEASE_RENEW_DEADLINE", "1s"),
        ("LEASE_RETRY_PERIOD", "10s"),
    ],
)
def test_malformed_value_is_a_mistake(variable: str, text: str) -> None:
    assert any(variable in mistake for mistake in mistakes({**NEEDED, variable: text}))


def test_all_mistakes_are_reported_at_once() -> None:
    found = mistakes({"WORKERS": "x", "TIMEOUT": "30", "EXPORTER_TYPE": "http,postgres"})
    assert len(found) == 2 + 1 + 1 + 4
    assert all("allowed" in mistake for mistake in found)


def test_values_that_gpuid_ignores_are_ignored_and_noted() -> None:
    found = load({**NEEDED, "HTTP_TIMEOUT": "30", "POSTGRES_PORT": "x", "HTTP_ENDPOINT": ""})
    names = ("http_timeout", "postgres_port", "http_endpoint")
    assert [value_of(found, name) for name in names] == [timedelta(seconds=30), 5432, None]
    assert [note.split(":")[1].strip() for note in found.notes] == ["variable HTTP_TIMEOUT", "variable POSTGRES_PORT"]
    assert mistakes(NEEDED, postgres_port="x")


IN_POD = {**NEEDED, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}


class TestWhichCluster:
    """gpuid's KUBECONFIG applies only outside a Pod; our setting always applies."""

    @pytest.fixture
    def kubeconfig(self, tmp_path: Path) -> str:
        file = tmp_path / "kubeconfig"
        file.write_text("{}")
        return str(file)

    @pytest.fixture
    def mounted(self, tmp_path: Path) -> Path:
        directory = tmp_path / "serviceaccount"
        directory.mkdir()
        (directory / "token").write_text("t")
        return directory

    def test_pod_uses_its_own_cluster(self, kubeconfig: str, mounted: Path) -> None:
        for environ in (IN_POD, {**IN_POD, "KUBECONFIG": kubeconfig}):
            found = load(environ).connection(mounted)
            assert (found.in_cluster, found.kubeconfig) == (True, None)
            assert found.api_server_of_pod == "https://10.0.0.1:443"

    def test_kubeconfig_variable_applies_outside_a_pod(self, kubeconfig: str, mounted: Path, tmp_path: Path) -> None:
        found = load({**NEEDED, "KUBECONFIG": kubeconfig}).connection(mounted)
        assert (found.in_cluster, str(found.kubeconfig)) == (False, kubeconfig)
        found = load({**IN_POD, "KUBECONFIG": kubeconfig}).connection(tmp_path / "nothing-mounted")
        assert str(found.kubeconfig) == kubeconfig

    def test_our_kubeconfig_setting_applies_in_a_pod(self, kubeconfig: str, mounted: Path) -> None:
        for found in (
            load(IN_POD, kubeconfig=kubeconfig),
            load({**IN_POD, "GPUWARDEN_EXPORT_KUBECONFIG": kubeconfig}),
        ):
            assert str(found.connection(mounted).kubeconfig) == kubeconfig

    def test_kubeconfig_variable_without_file_is_ignored_and_noted_in_a_pod(self, mounted: Path) -> None:
        found = load({**IN_POD, "KUBECONFIG": "/nowhere/config"})
        assert found.connection(mounted).in_cluster
        assert [note.split(":")[1].strip() for note in found.notes] == ["variable KUBECONFIG"]
        assert mistakes(IN_POD, kubeconfig="/nowhere/config")

    @pytest.mark.parametrize("empty", [{}, {"KUBECONFIG": ""}, {"KUBECONFIG": "/nowhere/config"}])
    def test_no_cluster_is_a_mistake(self, empty: dict[str, str], mounted: Path) -> None:
        with pytest.raises(SettingsError, match="this process is not in a Pod"):
            load({**NEEDED, **empty}).connection(mounted)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        pytest.param("HTTP_ENDPOINT", "https://store:8443/data?api-version=1&key=a%20b", id="query"),
        pytest.param("S3_PARTITION_PATTERN", "dt=%Y-%m-%d/%q/100%", id="other-percent-sign"),
    ],
)
def test_values_accepted_by_gpuid_are_accepted(variable: str, text: str) -> None:
    assert value_of(load({**NEEDED, variable: text}), variable.lower()) == text


@pytest.mark.parametrize(
    "text", ["https://u:p@store/x?a", "https://store/x#y", "ftp://store/?a", "https:///?a", "https://s/?a b"]
)
def test_an_endpoint_is_a_url(text: str) -> None:
    assert mistakes({**NEEDED, "HTTP_ENDPOINT": text})


DATABASE = {"POSTGRES_HOST": "db", "POSTGRES_DB": "d", "POSTGRES_USER": "u", "POSTGRES_PASSWORD": "p"}
OTHERS_WORDS = {"TIMEOUT": "30", "WORKERS": "0", "BURST": "1", "SERVER_PORT": "0", "KUBECONFIG": "/nowhere", "QPS": "x"}


def test_other_commands_check_only_the_settings_they_use() -> None:
    found = settings.load({}, {**NEEDED, **OTHERS_WORDS}, part=ONE_READING)
    assert (found.cluster_name, found.workers) == ("prod", 16)
    assert settings.load({}, {**DATABASE, **OTHERS_WORDS}, part=HISTORY).target(POSTGRES).host == "db"
    with pytest.raises(SettingsError, match="POSTGRES_SSLMODE"):
        settings.load({}, {**DATABASE, **OTHERS_WORDS, "POSTGRES_SSLMODE": "x"}, part=HISTORY)
    with pytest.raises(SettingsError, match="unknown setting"):
        settings.load({}, {**NEEDED, "GPUWARDEN_EXPORT_WORKER": "3"}, part=ONE_READING)


def test_leader_election_requires_pod_name() -> None:
    assert "POD_NAME" in mistakes({**NEEDED, "LEADER_ELECTION": "T"})[0]
    assert load({**NEEDED, "LEADER_ELECTION": "T", "POD_NAME": "p"}).leader_election


def test_each_store_gets_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("a b'c\\\n")
    given = {"POSTGRES_HOST": "db", "POSTGRES_DB": "d", "POSTGRES_USER": "u", "EXPORTER_TYPE": "postgres, s3,http"}
    more = {"S3_BUCKET": "b", "HTTP_ENDPOINT": "https://h/x", "HTTP_AUTH_TOKEN": "t"}
    found = load({**NEEDED, **given, **more}, postgres_password_file=str(tmp_path / "password"))
    assert found.exporter_type == ("postgres", "s3", "http")
    assert found.target(POSTGRES).password == "a b'c\\"
    assert found.target(HTTP).auth_token == "t"
    assert found.target(S3).bucket == "b"
    assert "a b" not in repr(found.target(POSTGRES))


@pytest.mark.parametrize(
    ("endpoint", "is_refused"),
    [
        ("http://store.example.org/x", True),
        ("HTTP://10.0.0.1:8080", True),
        ("http://localhost.example.org", True),
        ("https://store.example.org/x", False),
        ("http://localhost:8080/x", False),
        ("http://127.0.0.1:8080", False),
        ("http://[::1]:8080", False),
    ],
)
def test_token_is_sent_by_plain_http_only_to_this_machine(tmp_path: Path, endpoint: str, is_refused: bool) -> None:
    (tmp_path / "token").write_text("example-token\n")
    given = {**NEEDED, "EXPORTER_TYPE": "http", "HTTP_ENDPOINT": endpoint}
    file = {"http_auth_token_file": str(tmp_path / "token")}
    if is_refused:
        wanted = (
            "everyone on the way could read the token; allowed: https, or http to this machine,"
            " or to any machine with --http-token-in-plain true"
        )
        assert mistakes({**given, "HTTP_AUTH_TOKEN": "t"}) == (f"variable HTTP_ENDPOINT: {wanted}",)
        assert mistakes(given, **file) == (f"variable HTTP_ENDPOINT: {wanted}",)
        assert load(given).target(HTTP).auth_token is None
        assert (
            load({**given, "GPUWARDEN_EXPORT_HTTP_TOKEN_IN_PLAIN": "true"}, **file).target(HTTP).auth_token
            == "example-token"
        )
    else:
        assert load({**given, "HTTP_AUTH_TOKEN": "t"}).target(HTTP).auth_token == "t"
        assert load(given, **file).target(HTTP).auth_token == "example-token"


def test_token_of_an_exporter_not_in_use_is_not_checked() -> None:
    assert load({**NEEDED, "HTTP_ENDPOINT": "http://h/x", "HTTP_AUTH_TOKEN": "t"}).exporter_type == ("stdout",)


def test_a_root_certificate_reaches_the_database(tmp_path: Path) -> None:
    given = {"POSTGRES_SSLROOTCERT": "/certs/ca.crt", "POSTGRES_SSLMODE": "verify-full"}
    needed = {**NEEDED, **DATABASE}
    assert load({**needed, **given}).target(POSTGRES).sslrootcert == "/certs/ca.crt"
    assert load(needed).target(POSTGRES).sslrootcert is None
    assert load(needed, postgres_sslrootcert="ca.crt").target(POSTGRES).sslrootcert == "ca.crt"


def test_a_settings_file_names_them_by_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "export.yaml"
    file.write_text("clusterName: prod\nexporterType: [stdout, http]\nhttpEndpoint: http://h\nlabels: false\n")
    found = load({"TIMEOUT": "1s"}, config=str(file))
    assert (found.cluster_name, found.exporter_type, found.labels) == ("prod", ("stdout", "http"), False)
    file.write_text("postgresPassword: secret\nclusterName: prod\n")
    assert "unknown setting" in mistakes({}, config=str(file))[0]


def test_no_other_command_looks_at_them() -> None:
    words = {name: "nonsense" for name in GPUID_VARIABLES}
    found = load_others({}, {**words, "GPUWARDEN_EXPORT_WORKERS": "3"})
    assert found.log_level == "info"
    assert "unknown setting" in mistakes({**NEEDED, "GPUWARDEN_EXPORT_WORKER": "3"})[0]


def test_secrets_have_no_flag() -> None:
    secrets = {one.flag for one in TABLE if one.is_secret}
    assert secrets >= {"--http-auth-token", "--postgres-password"}
    parser = ArgumentParser()
    settings.add_flags(parser)
    flags = {*parser.format_help().replace("[", " ").split()}
    assert "--http-auth-token-file" in flags
    assert not secrets & flags


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "reference" / "settings-export.md").read_text() == settings.reference()


def test_unusable_settings_exit_with_2(tmp_path: Path) -> None:
    done = refusing(tmp_path, "export", "--workers", "0", "--kubeconfig", "nowhere")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "--workers" in line and "1 to 100" in line]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("", True),
        ("a", True),
        ("!a,b!=c", True),
        ("a notin (b,c)", True),
        ("x/y=z", True),
        ("x/y==z,a == b", True),
        ("a===b", False),
        ("a b", False),
        (",", False),
    ],
)
def test_label_selectors(text: str, is_one: bool) -> None:
    if is_one:
        assert load({**NEEDED, "LABEL_SELECTOR": text}).label_selector == text
    else:
        assert mistakes({**NEEDED, "LABEL_SELECTOR": text})


@pytest.mark.parametrize("word", ["trace", "fatal", "report", "verbose"])
def test_unknown_log_level_never_hides_errors(word: str) -> None:
    assert load({**NEEDED, "LOG_LEVEL": word}).log_level == "info"


def test_resync_may_be_a_month() -> None:
    assert load({**NEEDED, "RESYNC": "720h"}).resync == timedelta(days=30)


@pytest.mark.parametrize("words", [("export", "--smi-file"), ("history", "--pod")])
def test_flag_without_value_exits_with_2(tmp_path: Path, words: Sequence[str]) -> None:
    done = refusing(tmp_path, *words)
    assert done.returncode == 2
    assert "expected one argument" in done.stderr
