"""Flags, commands, chart values and metrics that a document names exist."""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from scripts.chart_values import MOVED, values
from webhook import cli
from webhook.export import settings as export_settings
from webhook.runtime import settings

ROOT = Path(__file__).resolve().parents[2]
# The changelog also names names removed.
DOCUMENTS = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *ROOT.glob("docs/**/*.md"),
    *(ROOT / name / "README.md" for name in ("chart", "certs")),
]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

COMMANDS = [
    *(
        "serve",
        "reconcile",
        "attest",
        "export",
        "history",
        "score",
        "explain",
        "audit",
        "release",
        "manifests",
        "crds",
    ),
    *("certs dev", "certs ensure", "certs keep", "config show", "config check", "config reference"),
    "record verify",
]
# Flags of kube-apiserver, kube-controller-manager, kubectl, etcdutl, helm, cosign, gh, pytest, make and the benchmarks.
OTHERS = {
    *("--admission-control-config-file", "--audience", "--field-selector", "--patch", "--type", "--dry-run"),
    *("--bump-revision", "--mark-compacted", "--concurrent-device-taint-eviction-syncs", "--kube-api-qps"),
    *("--api-versions", "--create-namespace", "--kube-version", "--reuse-values", "--set", "--take-ownership"),
    *("--certificate-identity-regexp", "--certificate-oidc-issuer", "--new-bundle-format", "--repo"),
    *(
        "--signer-workflow",
        "--values",
        "--check",
        "--rounds",
        "--cacert",
        "--data",
        "--connect-to",
        "--force",
        "--grace-period",
        "--ignore-not-found",
        "--clusterrole",
        "--serviceaccount",
        "--selector",
        "--all-namespaces",
        "--overwrite",
        "--wait",
    ),
}


def flags_of(command: str) -> Iterator[str]:
    with redirect_stdout(StringIO()) as output, pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    yield from re.findall(r"--[a-z][a-z0-9-]+", output.getvalue())


@pytest.fixture(scope="module")
def flags() -> set[str]:
    known = {flag for command in COMMANDS for flag in flags_of(command)}
    tables = {one.flag for one in (*settings.SETTINGS, *export_settings.TABLE)}
    return known | tables | {one.flag for one in settings.RETIRED} | OTHERS


@each_document
def test_every_flag_is_known(document: Path, flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b(?!-)", document.read_text()))
    assert named - flags == set()


@each_document
def test_every_flag_of_a_command_line_is_taken_by_its_command(document: Path) -> None:
    taken = {one.command: set(one.flags) for one in cli.make_parser().commands}
    text = document.read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"gpuwarden ((?:certs |config |record )?[a-z]+)((?: [^\n`|;&)]*)?)", text):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", rest.partition(" gpuwarden ")[0]))
        assert named <= taken.get(command, named), command


@each_document
def test_every_command_is_known(document: Path) -> None:
    named = re.findall(
        r"`(?:\.venv/bin/)?gpuwarden ([a-z]+)(?: (dev|ensure|keep|show|check|reference|verify))?\b",
        document.read_text(),
    )
    whole = {" ".join(filter(None, words)) for words in named}
    assert whole - {*COMMANDS, "certs", "config"} == set()


VALUES = {one.path for one in values()} | {one.path for one in MOVED}
PARTS = {".".join(path.split(".")[:length]) for path in VALUES for length in range(1, path.count(".") + 2)}
# Keys of Secrets, which look like chart values.
FILES = {"tls.crt", "tls.key"}


@each_document
def test_every_value_of_the_chart_is_known(document: Path) -> None:
    named = re.findall(r"`([a-zA-Z]\w*(?:\.[\w-]+)+)(?:[:=][^`]*)?`", document.read_text())
    roots = {path.split(".")[0] for path in PARTS}
    assert [one for one in named if one.split(".")[0] in roots and one not in PARTS | FILES] == []


SOURCES = "\n".join(path.read_text() for path in (ROOT / "webhook").rglob("*.py"))


@each_document
def test_every_metric_is_known(document: Path) -> None:
    for name in re.findall(r"\b(?:gpuwarden|gpuid)_[a-z_]+", document.read_text()):
        assert f'"{name}"' in SOURCES or f'"{name.removesuffix("_total")}"' in SOURCES, name
