"""The Dockerfile as BuildKit reads it: its parser, its linter, and what its client would send of this directory."""

import shutil
from pathlib import Path

import pytest

from scripts.buildkit import said_of
from scripts.controlplane.cluster import ROOT

BASE = "python:3.12-slim@sha256:" + 64 * "a"
NEGLECTED = {"__pycache__", ".mypy_cache"}
TEXT = (ROOT / "Dockerfile").read_text()
# The only warning that is switched off: a default of the base would be one without a digest, or with an old one.
OFF = "# check=skip=InvalidDefaultArgInFrom\n"


def test_buildkit_has_nothing_against_the_dockerfile() -> None:
    said = said_of(ROOT, PYTHON_IMAGE=BASE)
    assert (said["warnings"], said["problem"]) == ([], "")


def test_and_one_warning_alone_is_switched_off(tmp_path: Path) -> None:
    assert TEXT.startswith(OFF)
    (tmp_path / "Dockerfile").write_text(TEXT.removeprefix(OFF))
    said = said_of(tmp_path, PYTHON_IMAGE=BASE)
    assert {one["rule"] for one in said["warnings"]} == {"InvalidDefaultArgInFrom"}
    assert said["problem"] == ""


def test_without_a_base_nothing_is_built() -> None:
    assert "should not be blank" in said_of(ROOT)["problem"]


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ('CMD ["serve"]', "CMD serve", "JSONArgsRecommended"),
        ("ENV HOME=/", "ENV API_TOKEN=abc HOME=/", "SecretsUsedInArgOrEnv"),
        ("WORKDIR /build", "WORKDIR build", "WorkdirRelativePath"),
        ("\nUSER 65532:65532", "\nuser 65532:65532", "ConsistentInstructionCasing"),
        ('ENTRYPOINT ["gpuwarden"]', 'ENTRYPOINT ["sh"]\nENTRYPOINT ["gpuwarden"]', "MultipleInstructionsDisallowed"),
        ("AS build", "as build", "FromAsCasing"),
    ],
    ids=["shell", "secret", "directory", "letters", "twice", "as"],
)
def test_it_would_have_warned(tmp_path: Path, good: str, bad: str, rule: str) -> None:
    assert good in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(good, bad))
    assert {one["rule"] for one in said_of(tmp_path, PYTHON_IMAGE=BASE)["warnings"]} == {rule}


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("COPY --from=build", "COPY --form=build", "unknown flag: --form"),
        ("EXPOSE 8443", "EXPOSED 8443", "unknown instruction: EXPOSED"),
        ("USER 65532:65532", "USER", "USER requires exactly one argument"),
    ],
    ids=["flag", "instruction", "argument"],
)
def test_what_no_builder_takes_is_a_problem(tmp_path: Path, good: str, bad: str, problem: str) -> None:
    assert good in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(good, bad))
    assert problem in said_of(tmp_path, PYTHON_IMAGE=BASE)["problem"]


def test_a_builder_is_sent_what_is_copied_and_nothing_else(tmp_path: Path) -> None:
    """Of a directory in which somebody has worked: keys, caches and a virtual environment are not among it."""
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for name in ("requirements", "webhook"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns(*NEGLECTED))
    for name in (".env", ".git/config", ".venv/bin/python", "certs/dev/tls.key", "webhook/core/__pycache__/keys.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not to be sent")
    wanted = {"requirements/run.lock", "pyproject.toml", "LICENSE", "README.md"}
    ours = (file.relative_to(ROOT) for file in (ROOT / "webhook").rglob("*") if file.is_file())
    wanted |= {one.as_posix() for one in ours if not NEGLECTED & set(one.parts)}
    assert set(said_of(tmp_path)["sent"]) == wanted
