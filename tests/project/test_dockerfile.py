"""The content of the Dockerfile; tests/e2e/test_image.py runs its steps."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """The instructions, one per line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def test_every_stage_uses_the_given_base() -> None:
    """Each builder passes the base with its digest: no other image is pulled."""
    assert instructions()[0] == ("ARG", "PYTHON_IMAGE")
    stages = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert stages == ["${PYTHON_IMAGE}"] * 2
    for builder in ("Makefile", ".github/workflows/release.yaml"):
        assert "imagetools inspect" in (ROOT / builder).read_text()


FAKE_DOCKER = """#!/bin/sh
if [ "$1" = buildx ]; then echo "sha256:aa11"; else echo "docker $*"; fi
"""


@pytest.mark.parametrize(
    ("base", "used"),
    [
        ("", "python:3.12-slim@sha256:aa11"),
        ("BASE_IMAGE=mirror.test/python@sha256:bb22", "mirror.test/python@sha256:bb22"),
    ],
    ids=["default", "given"],
)
def test_make_builds_on_a_base_with_a_digest(tmp_path: Path, base: str, used: str) -> None:
    docker = tmp_path / "docker"
    docker.write_text(FAKE_DOCKER)
    docker.chmod(0o755)
    path = f"PATH={tmp_path}:/usr/bin:/bin"
    command = ["/usr/bin/env", "-u", "MAKEFLAGS", path, "make", "-C", str(ROOT), "docker-build", "IMG=a/b:c"]
    done = subprocess.run([*command, *filter(None, [base])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"docker build --build-arg PYTHON_IMAGE={used} --tag a/b:c ." in done.stdout.splitlines()


def test_make_requires_an_image_name() -> None:
    done = subprocess.run(
        ["/usr/bin/env", "make", "-C", str(ROOT), "docker-build"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "set the image: make docker-build IMG=name:tag" in done.stderr


def test_last_stage_runs_no_command_and_no_process_is_root() -> None:
    last = instructions()[[i for i, (word, _) in enumerate(instructions()) if word == "FROM"][-1] :]
    words = [word for word, _ in last]
    assert "RUN" not in words
    assert ("USER", "65532:65532") in last
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert ("ENTRYPOINT", '["gpuwarden"]') in last


def test_dependencies_are_locked_wheels_with_hashes() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert "--require-hashes -r requirements/run.lock" in installs[0]
    assert "--only-binary=:all:" in installs[0]
    assert "--no-index" in installs[1]
    assert "--no-deps" in installs[1]


def test_dockerignore_admits_only_copied_files() -> None:
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied
