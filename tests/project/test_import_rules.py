"""The import rules of pyproject.toml hold, and fail where they are broken."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINT = [
    sys.executable,
    "-c",
    "import sys; from importlinter.cli import lint_imports_command as run; run()",
    "--no-cache",
]

# For each contract, an import that breaks it.
FORBIDDEN = {
    "a package imports those below it only": ("ledger/memory.py", "from webhook.evidence import static"),
    "commands do not import each other": ("commands/serve.py", "from webhook.commands import reconcile"),
    "sibling packages have no cycles": (
        "evidence/spire/naming_cycle.py",
        "from webhook.evidence.jwt import attestation",
    ),
    "core does no I/O, reads no clock, awaits nothing": ("core/decide.py", "import socket"),
    "kubernetes and aiohttp are imported in kube": ("admission/rules.py", "import kubernetes"),
    "grpclib is imported in evidence and node": ("scoring/hints.py", "import grpclib"),
    "client libraries of stores are imported in export": ("ledger/memory.py", "import psycopg"),
    "starlette is imported in web and commands": ("admission/rules.py", "import starlette"),
    "hypercorn is imported in runtime.http": ("web/health.py", "import hypercorn"),
    "the exporter loads no webhook and no provider of evidence": (
        "commands/export.py",
        "from webhook.web import app",
    ),
}


def test_forbidden_import_fails_the_check(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "webhook", tmp_path / "webhook", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in FORBIDDEN.values():
        path = tmp_path / "webhook" / module
        path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    done = subprocess.run(LINT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = {line.removesuffix(" BROKEN") for line in done.stdout.splitlines() if line.endswith(" BROKEN")}
    assert broken == FORBIDDEN.keys()


def test_every_contract_has_an_import_that_breaks_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [one["name"] for one in contracts] == list(FORBIDDEN)
