"""The Dockerfile as BuildKit reads it: its parser, its linter, and the build context."""

import shutil
from pathlib import Path

import pytest

from scripts.buildkit import said_of
from scripts.controlplane.cluster import ROOT

BASE = "python:3.12-slim@sha256:" + 64 * "a"
NEGLECTED = {"__pycache__", ".mypy_cache"}
TEXT = (ROOT / "Dockerfile").read_text()
# The only disabled warning: a default base would have no digest, or an old one.
OFF = "# check=skip=InvalidDefaultArgInFrom\n"


def test_buildkit_reports_no_warning_for_the_dockerfile() -> None:
    said = said_of(ROOT, PYTHON_IMAGE=BASE)
    assert (said["warnings"], said["problem"]) == ([], "")


def test_only_one_linter_warning_is_disabled(tmp_path: Path) -> None:
    assert TEXT.startswith(OFF)
    (tmp_path / "Dockerfile").write_text(TEXT.removeprefix(OFF))
    said = said_of(tmp_path, PYTHON_IMAGE=BASE)
    assert {one["rule"] for one in said["warnings"]} == {"InvalidDefaultArgInFrom"}
    assert said["problem"] == ""


def test_build_without_a_base_image_fails() -> None:
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
def test_linter_reports_planted_problems(tmp_path: Path, good: str, bad: str, rule: str) -> None:
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
def test_invalid_dockerfile_is_reported(tmp_path: Path, good: str, bad: str, problem: str) -> None:
    assert good in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(good, bad))
    assert problem in said_of(tmp_path, PYTHON_IMAGE=BASE)["problem"]


def test_build_context_contains_only_copied_files(tmp_path: Path) -> None:
    """In a used working directory: keys, caches and a virtual environment are not sent."""
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
