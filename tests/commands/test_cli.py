import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from webhook import __version__, cli
from webhook.core import claim_keys
from webhook.core.errors import GpuwardenError
from webhook.runtime import settings

# What no command may import before it is known to need it: each costs ten milliseconds or more.
HEAVY = (
    *("asyncio", "cryptography", "httpx", "hypercorn", "jinja2", "kubernetes", "msgspec", "starlette", "structlog"),
    "uvloop",
)
COMMANDS = {
    "nothing": [],
    "unknown": ["dance"],
    "certs-alone": ["certs"],
    "explain-without-a-file": ["explain"],
    "explain-no-pod": ["explain", "pod", "train-0"],
    "explain-in-a-form-nobody-knows": ["explain", "pod.yaml", "-o", "xml"],
    "a-value-is-missing": ["serve", "--port"],
    "an-abbreviation": ["config", "check", "--po", "1"],
    "an-option-nobody-knows": ["config", "check", "--frob"],
    "a-word-too-many": ["certs", "dev", "again"],
    "settings-of-another-command": ["config", "reference", "--port", "1"],
    "serve-with-a-bad-setting": ["serve", "-p", "x"],
}


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in settings.process_environment() if name.startswith(("GPUWARDEN_", "BGS_"))]:
        monkeypatch.delenv(name)


def run(*words: str) -> int:
    """The exit code, however the command ends."""
    try:
        return cli.main(words)
    except SystemExit as exc:
        return int(exc.code or 0)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
@pytest.mark.defect("assigner-21")
def test_mistake_in_options_is_printed_with_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Of `explain` 1 is a denial.
    assert run(*words) == (2 if words[:1] == ["explain"] else 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: gpuwarden")
    assert err.splitlines()[-1].startswith("gpuwarden")


@pytest.mark.parametrize("words", [["bind"], ["bind", "--in-cluster", "true", "--scheduler-name=a"]], ids=len)
def test_removed_command_names_its_replacement(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 1
    assert capsys.readouterr().err == (
        "gpuwarden bind: `gpuwarden bind` is gone: a profile of kube-scheduler replaces it, which the chart runs with "
        "scheduler.enabled=true (docs/how-to/scheduler.md)\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["serve", "-h"], ["certs", "dev", "--help"]], ids=" ".join)
def test_help_exits_with_0(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 0
    assert capsys.readouterr().out.startswith("usage: gpuwarden")


def test_unknown_options_are_reported_with_the_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--frob", "--port", "x", "-l", "loud", "--ledger", "cluster") == 1
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("gpuwarden serve: ")] == [
        "gpuwarden serve: there is no option --frob",
        "gpuwarden serve: flag --port: 'x' is not a port; allowed: 0 to 65535; 0 selects a free port",
        "gpuwarden serve: flag --log-level: 'loud' is not an allowed value; "
        "allowed: trace, debug, info, warn, error, fatal, report",
        "gpuwarden serve: flag --ledger: no cluster is named; name one by --kubeconfig",
    ]


def test_flag_of_another_command_is_refused_with_the_commands_that_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--certs-leaf-life",
        "1h",
        "--port=3",
        "-p",
        "4",
        "--smi-file",
        "f",
        "--hints",
        "--once",
        "--log-level",
        "x",
    ]
    assert run("attest", *words, "astray") == 1
    assert capsys.readouterr().err.splitlines() == [
        "usage: gpuwarden attest [options]; gpuwarden attest --help lists them",
        "gpuwarden attest: --certs-leaf-life is a flag of certs ensure and certs keep, not of attest",
        "gpuwarden attest: --port is a flag of serve, not of attest",
        "gpuwarden attest: -p is a flag of serve, not of attest",
        "gpuwarden attest: --smi-file is a flag of export, not of attest",
        "gpuwarden attest: there is no option --hints",
        "gpuwarden attest: there is no option astray",
        "gpuwarden attest: flag --log-level: 'x' is not an allowed value; "
        "allowed: trace, debug, info, warn, error, fatal, report",
    ]


@pytest.mark.parametrize("command", [["export"], ["explain"], ["crds"], ["certs", "keep"]], ids=" ".join)
def test_flag_of_another_command_is_refused_by_every_kind_of_command(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, "--once", "--orphan-margin", "1s") == (2 if command[0] in ("export", "explain") else 1)
    err = capsys.readouterr().err
    assert f"--once is a flag of attest, not of {' '.join(command)}\n" in err
    assert f"--orphan-margin is a flag of reconcile, not of {' '.join(command)}\n" in err


@pytest.mark.parametrize(
    ("command", "other"),
    [("attest", "--certs-leaf-life"), ("explain", "--tls-cert"), ("history", "--workers"), ("score", "--nonce-key")],
)
def test_help_lists_no_flag_of_another_command(command: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert other not in capsys.readouterr().out


def test_config_check_names_every_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("uiPort: http\n")
    monkeypatch.setenv("GPUWARDEN_CONFIG", str(config))
    monkeypatch.setenv("GPUWARDEN_CLOCK_SKEW", "soon")
    assert run("config", "check", "--tls-cert", "/nowhere") == 1
    out, err = capsys.readouterr()
    assert out == ""
    for named in (f"key uiPort in {config}", "variable GPUWARDEN_CLOCK_SKEW", "flag --tls-cert", "--tls-key not set"):
        assert named in err


def test_config_check_accepts_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check") == 0
    assert capsys.readouterr() == ("The settings are valid.\n", "")


def test_config_show_prints_the_settings_in_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BGS_NODE_HASH_MAP", '{"kind-worker":"abc123"}')
    assert run("config", "show", "-p", "443", "-C", "gpu-claims") == 0
    out, err = capsys.readouterr()
    assert "port: 443  # flag --port\n" in out
    assert "nodeHashMap:  # variable BGS_NODE_HASH_MAP\n  kind-worker: abc123\n" in out
    assert err == (
        "gpuwarden config show: --claims-namespace has no effect: "
        "reservations are not Leases; --ledger selects where they are stored\n"
    )


def test_config_reference_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "reference") == 0
    assert capsys.readouterr() == (settings.reference(), "")


def test_manifests_are_printed_for_an_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    flags = ["--namespace", "wardens", "--url", "https://127.0.0.1:8443", "--ca-bundle", str(bundle)]
    assert run("manifests", "webhooks", *flags) == 0
    out, err = capsys.readouterr()
    assert err == ""
    first = next(one for one in yaml.safe_load_all(out) if "webhooks" in one)["webhooks"][0]["clientConfig"]
    assert first == {"url": "https://127.0.0.1:8443/mutate", "caBundle": "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="}
    assert run("manifests", "webhooks", "--required-hash-alias", "my.org/h") == 0
    renamed = capsys.readouterr().out
    assert renamed.count("'my.org/h'") == renamed.count(f"'{claim_keys.REQUIRED_HASH.aliases[0]}'") > 0
    assert run("manifests", "policies", "--host-paths", "/data, /mnt/datasets") == 0
    assert "expression: dyn(['/data', '/mnt/datasets'])\n" in capsys.readouterr().out
    guards = ["--dra-device-classes", "nic.example.com, fpga.example.com", "--dra-guard", "all"]
    assert run("manifests", "dra", "--gpu-driver", "gpu.example.com", *guards) == 0
    out = capsys.readouterr().out
    assert "expression: dyn(['', 'nic.example.com', 'fpga.example.com'])\n" in out
    assert "'gpu.example.com'" in out
    assert "matchLabels" not in out
    assert run("manifests", "rbac") == 0
    assert "namespace: gpuwarden\n" in capsys.readouterr().out


def test_manifests_of_native_pods_have_no_webhooks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("manifests", "--native") == 0
    found = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one]
    assert {"MutatingAdmissionPolicy", "DeviceClass"} <= {one["kind"] for one in found}
    assert not [one for one in found if one["kind"].endswith("WebhookConfiguration")]
    assert run("manifests", "webhooks", "--native") == 0
    assert capsys.readouterr().out == ""
    assert run("manifests", "--native", "--blind", "webhook") == 1
    assert "flag --blind: 'webhook' needs webhooks; allowed with --native: policy" in capsys.readouterr().err


def test_manifests_reports_every_mistake_in_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("no certificate")
    flags = ["--namespace", "A.b", "--service", "", "--url", "http://h", "--ca-bundle", str(bundle)]
    flags += ["--required-hash-alias", "'x' || true", "--host-paths", "/data,/var/lib/kubelet/pods,data"]
    flags += ["--gpu-driver", "Nvidia", "--dra-device-classes", "nic.example.com,a b,attested.gpuwarden.io"]
    assert run("manifests", *flags) == 1
    out, err = capsys.readouterr()
    assert out == ""
    for name in (
        "--namespace: 'A.b'",
        "--service: ''",
        "--url: 'http://h'",
        f"{bundle} contains no certificate",
        "--required-hash-alias: ",
        "--host-paths: '/var/lib/kubelet/pods': "
        "/var/lib/kubelet contains devices, sockets, programs or keys of the node",
        "--host-paths: 'data': not an absolute path",
        "--gpu-driver: 'Nvidia' is not a valid name",
        "--dra-device-classes: 'a b' is not a valid name",
        "--dra-device-classes: with 'attested.gpuwarden.io' a claim takes GPUs or their proofs",
    ):
        assert name in err


def test_missing_ca_file_is_reported_with_the_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("manifests", "--ca-bundle", "nope", "--url", "http://h") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--url: 'http://h'" in err
    assert "flag --ca-bundle: nope cannot be read: No such file or directory" in err
    assert "Errno" not in err


@pytest.mark.parametrize("command", [["config", "check"], ["serve"]], ids=" ".join)
def test_long_usage_is_shortened_above_a_mistake(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--port", "x") == 1
    prog = " ".join(["gpuwarden", *command])
    assert capsys.readouterr().err.splitlines() == [
        f"usage: {prog} [options]; {prog} --help lists them",
        f"{prog}: flag --port: 'x' is not a port; allowed: 0 to 65535; 0 selects a free port",
    ]


def test_certs_dev_prints_where_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("certs", "dev", "--dir", str(tmp_path / "new" / "dir")) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{tmp_path}/new/dir/{name}\n" for name in ("ca.crt", "tls.crt", "tls.key"))
    assert all(Path(line).stat().st_size > 100 for line in out.splitlines())
    assert err == ""


def test_certs_dev_reports_an_unwritable_directory_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("certs", "dev", "--dir", str(tmp_path / "file" / "dir")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpuwarden certs dev: [Errno ")
    assert err.count("\n") == 1


def test_help_of_serve_does_not_list_hints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    assert "--hints" not in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"gpuwarden {__version__}\n"


def raising(exc: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise exc

    return command


IN_USE = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        pytest.param(IN_USE, "gpuwarden: [Errno 98] Address already in use\n", id="a-port-in-use"),
        pytest.param(GpuwardenError("no inventory"), "gpuwarden: no inventory\n", id="a-fault-of-ours"),
        pytest.param(
            ExceptionGroup("tasks", [IN_USE, ExceptionGroup("more", [GpuwardenError("no inventory")])]),
            "gpuwarden: [Errno 98] Address already in use\ngpuwarden: no inventory\n",
            id="several-tasks-failed",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the number of the error is Linux's")
@pytest.mark.defect("assigner-21")
def test_a_start_that_fails_is_one_line_and_exit_code_1(
    exc: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.exit_code(cli.make_parser(), raising(exc)) == 1
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    "bug",
    [KeyError("x"), ExceptionGroup("tasks", [IN_USE, KeyError("x")])],
    ids=["alone", "beside-a-foreseen-failure"],
)
def test_exception_of_a_bug_is_raised_unchanged(bug: Exception) -> None:
    with pytest.raises(type(bug)) as caught:
        cli.exit_code(cli.make_parser(), raising(bug))
    assert caught.value is bug


def test_ctrl_c_has_its_own_exit_code() -> None:
    assert cli.exit_code(cli.make_parser(), raising(KeyboardInterrupt())) == 130


def test_nothing_heavy_is_imported_before_a_command_needs_it() -> None:
    code = f"import sys; import webhook.cli; webhook.cli.make_parser(); print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
