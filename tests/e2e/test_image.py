"""The image, as far as it can be built without a container runtime: the steps of the Dockerfile in a clean directory,
run by a user without rights."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.controlplane.cluster import ROOT
from tests.project.test_dockerfile import instructions
from tests.running import started

UNPRIVILEGED_UID = 65532
INVENTORY = "nodes: [{name: node-0, devices: [{uuid: GPU-0}]}]\n"


def interpreter() -> str:
    """A Python for all users, as the base image has, not one in a user's home."""
    for candidate in ("/usr/local/bin/python3", "/usr/bin/python3"):
        asked = [candidate, "-c", "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"]
        if Path(candidate).exists() and subprocess.run(asked, check=False, capture_output=True).returncode == 0:
            return candidate
    pytest.skip("there is no Python here that every user may run")


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """The result of the build stage, with /opt and /build elsewhere."""
    base = Path(tempfile.mkdtemp(prefix="image-"))
    base.chmod(0o755)
    (base / "build").mkdir()
    (base / "bin").mkdir()
    (base / "bin" / "python").symlink_to(interpreter())
    try:
        build(base)
        yield base
    finally:
        shutil.rmtree(base)


def build(base: Path) -> None:
    """Runs COPY and RUN of the first stage."""
    for word, rest in instructions()[: [word for word, _ in instructions()].index("FROM", 2)]:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copied(ROOT / source, base / "build" / target / ("" if len(sources) == 1 else source))
        elif word == "RUN":
            command = rest.replace("/opt/gpuwarden", str(base / "gpuwarden"))
            path = f"PATH={base / 'bin'}:/usr/bin:/bin"
            done = subprocess.run(
                ["/usr/bin/env", path, "/bin/sh", "-euc", command],
                cwd=base / "build",
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            assert done.returncode == 0, done.stderr[-3000:]


def copied(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
    else:
        shutil.copyfile(source, target)


def as_unprivileged_user(root: Path, *arguments: str) -> list[str]:
    """The command prefix of a user without files and home, if the tests run as root."""
    other = (
        ["setpriv", f"--reuid={UNPRIVILEGED_UID}", f"--regid={UNPRIVILEGED_UID}", "--clear-groups"]
        if os.getuid() == 0
        else []
    )
    (environment,) = (rest for word, rest in instructions() if word == "ENV")
    own = environment.replace("/opt/gpuwarden", str(root / "gpuwarden")).split()
    return [*other, "/usr/bin/env", "-i", *own, "gpuwarden", *arguments]


def test_image_contains_the_locked_packages_and_no_build_tools(root: Path) -> None:
    python = root / "gpuwarden" / "bin" / "python"
    listing = "from importlib.metadata import distributions as d; print(*sorted({x.name.lower() for x in d()}))"
    found = subprocess.run([python, "-c", listing], capture_output=True, text=True, check=True).stdout.split()
    assert "gpuwarden" in found
    assert not {"pip", "hatchling", "editables", "pytest"} & set(found)
    locked = re.findall(
        r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==", (ROOT / "requirements" / "run.lock").read_text(), re.MULTILINE
    )
    same = {re.sub(r"[-_.]+", "-", name).lower() for name in locked}
    assert {re.sub(r"[-_.]+", "-", name) for name in found} - {"gpuwarden", "setuptools"} <= same


def test_image_runs_as_an_unprivileged_user_without_a_writable_directory(root: Path, tmp_path: Path) -> None:
    said = subprocess.run(
        as_unprivileged_user(root, "--version"), cwd="/", capture_output=True, text=True, check=True
    ).stdout
    assert re.fullmatch(r"gpuwarden \d+\.\d+\.\d+\S*\n", said)
    files = root / "files"
    subprocess.run([root / "gpuwarden/bin/gpuwarden", "certs", "dev", "--dir", files], check=True, capture_output=True)
    for one in (files, *files.iterdir()):
        one.chmod(0o755 if one.is_dir() else 0o644)
    (root / "inventory.yaml").write_text(INVENTORY)
    empty = root / "empty"
    empty.mkdir(mode=0o555)
    flags = ["--tls-cert", str(files / "tls.crt"), "--tls-key", str(files / "tls.key")]
    ports = ["--port", "0", "--ui-port", "0", "--extender-port", "0", "--inventory", str(root / "inventory.yaml")]
    command = as_unprivileged_user(root, "serve", *flags, *ports)
    with started(command, empty) as running:
        assert httpx.get(running.urls["http"] + "/readyz", trust_env=False).status_code == 200
        if os.getuid() == 0:
            assert Path(f"/proc/{running.process.pid}").stat().st_uid == UNPRIVILEGED_UID
        code, _, log = running.stop()
    assert code == 0, log
    assert list(empty.iterdir()) == []
