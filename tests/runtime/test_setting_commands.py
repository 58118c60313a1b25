"""Each command has the flags of the settings that it reads, and no others."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.runtime.setting_reads import Definition, reached_from, settings_read_from
from webhook import cli
from webhook.export import settings as export_settings
from webhook.export import targets
from webhook.export.settings import TABLE
from webhook.export.targets import STORES, ExportStore
from webhook.runtime import settings
from webhook.runtime.setting_table import Command
from webhook.runtime.settings import SETTINGS, SettingsError

# The settings are loaded by these; the older exporter's POD_NAMESPACE is accepted and has no effect.
READ_BY_THE_LOADER = {"config"}
READ_BY_THE_EXPORT_LOADER = {"config", "pod_namespace"}
EXPORTING = (Command.EXPORT, Command.HISTORY)
OTHERS = [command for command in Command if command not in EXPORTING]
# A few of each command, so that an analysis that finds nothing shows.
KNOWN = {
    Command.SERVE: {"port", "tls_cert", "nonce_key", "kubeconfig"},
    Command.RECONCILE: {"orphan_margin", "lease_namespace", "spire_server"},
    Command.ATTEST: {"server", "node", "runtime_socket", "evidence_id", "kubelet_plugins", "kubeconfig"},
    Command.SCORE: {"tenant_priorities", "ui_port", "reload_interval"},
    Command.EXPLAIN: {"server", "scorer", "inventory"},
    Command.AUDIT: {"host_paths", "kubeconfig"},
    Command.RELEASE: {"kubeconfig", "clock_skew"},
    Command.CERTS_KEEP: {"certs_leaf_life", "certs_look_interval", "ui_port"},
}


def read_by(command: Command, of: str) -> set[str]:
    function = command.value.replace(" ", "_")
    return {read.name for read in settings_read_from("webhook.cli", function) if read.of == of}


def stores_of(command: Command) -> list[ExportStore[object]]:
    """The stores that a command uses: all, or those that its code names."""
    reached = reached_from("webhook.cli", command.value)
    if Definition("webhook.commands.export", "exporters_of") in reached:
        return [*STORES.values()]
    named = {one.name for one in reached if one.module == targets.__name__}
    return [one for name, one in vars(targets).items() if name in named and isinstance(one, ExportStore)]


def flags_of(command: str) -> set[str]:
    (parser,) = (one for one in cli.make_parser().commands if one.command == command)
    return {name for name in parser.flags if name.startswith("--")}


@pytest.mark.parametrize("command", OTHERS)
def test_declared_commands_of_settings_are_those_that_read_them(command: Command) -> None:
    found = read_by(command, "Settings") & {one.name for one in SETTINGS}
    assert {one.name for one in SETTINGS if command in one.commands} == found | READ_BY_THE_LOADER
    assert found >= KNOWN.get(command, set())


@pytest.mark.parametrize("command", EXPORTING)
def test_declared_commands_of_export_settings_are_those_that_read_them(command: Command) -> None:
    found = read_by(command, "ExportSettings") & {one.name for one in TABLE}
    found |= {setting.name for store in stores_of(command) for setting in store.settings}
    also = READ_BY_THE_EXPORT_LOADER if command is Command.EXPORT else READ_BY_THE_LOADER
    assert {one.name for one in TABLE if command in one.commands} == found | also


def test_every_setting_is_read_by_a_command() -> None:
    assert [one.name for one in (*SETTINGS, *TABLE) if not one.commands] == []


@pytest.mark.parametrize("command", Command)
def test_a_command_has_the_flags_of_the_settings_that_it_reads(command: Command) -> None:
    table = TABLE if command in EXPORTING else SETTINGS
    own = {one.flag for one in table if command in one.commands and not one.is_secret}
    others = {one.flag for one in table} - own
    assert own <= flags_of(command)
    # `export --node` and the like are flags of the command itself.
    assert not others & flags_of(command)


@pytest.mark.parametrize("command", ["config show", "config check"])
def test_config_commands_take_every_flag_of_every_command(command: str) -> None:
    assert {one.flag for one in SETTINGS} <= flags_of(command)


def test_file_and_variables_take_the_settings_of_all_commands(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("certsLeafLife: 48h\norphanMargin: 3m\n")
    environ = {"GPUWARDEN_CONFIG": str(config), "GPUWARDEN_PENDING_SHARE": "7", "GPUWARDEN_CERTS_RENEW_BEFORE": "1h"}
    chosen = settings.load({}, environ, command=Command.ATTEST)
    assert (chosen.pending_share, chosen.orphan_margin.total_seconds()) == (7, 180)
    config.write_text("orphanMargin: soon\n")
    with pytest.raises(SettingsError, match="key orphanMargin"):
        settings.load({}, environ, command=Command.ATTEST)


PROVEN = {"evidence": "jwt-svid", "spire_trust_domain": "example.org", "kubernetes_url": "https://api"}


def test_a_rule_asks_for_no_flag_that_the_command_does_not_have(tmp_path: Path) -> None:
    """`serve` challenges nodes, and needs keys for that; `reconcile` reads what it has written."""
    (tmp_path / "file").write_text("")
    cluster = {"access_token": str(tmp_path / "file"), "ca_certificate": str(tmp_path / "file")}
    for command in (Command.SERVE, None):
        with pytest.raises(SettingsError, match=r"--bundle-endpoint or .*; .* by --nonce-key"):
            settings.load({**PROVEN, **cluster}, {}, command=command)
    assert settings.load({**PROVEN, **cluster}, {}, command=Command.RECONCILE).evidence == ("jwt-svid",)


def test_only_the_ports_of_the_command_have_to_differ() -> None:
    assert settings.load({"ui_port": "8443"}, {}, command=Command.RECONCILE).ui_port == 8443
    for command in (Command.SERVE, None):
        with pytest.raises(SettingsError, match="more than one listener at port 8443"):
            settings.load({"ui_port": "8443"}, {}, command=command)


@pytest.mark.parametrize("table", [settings, export_settings], ids=["settings", "settings-export"])
def test_the_reference_names_the_commands_of_each_setting(table: object) -> None:
    text = settings.reference() if table is settings else export_settings.reference()
    for one in SETTINGS if table is settings else TABLE:
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{one.flag}`"))
        assert line.split(" | ")[-1].removesuffix(" |").split(", ") == [c for c in Command if c in one.commands]


def test_only_serve_accepts_the_retired_flags_of_the_older_webhook() -> None:
    for command, is_accepted in ((Command.SERVE, True), (None, True), (Command.RECONCILE, False)):
        parser = ArgumentParser()
        settings.add_flags(parser, command)
        assert (parser.parse_known_args(["-C", "x"])[1] == []) is is_accepted
