"""The mutations in bugs.toml applies to the code. `make mutants` applies them."""

import shutil
from pathlib import Path

import pytest

from scripts.mutants.bugs import Bug, bugs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_each_planted_bug_applies_and_names_existing_tests(bug: Bug, tmp_path: Path) -> None:
    (tmp_path / bug.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.file, tmp_path / bug.file)
    bug.plant(tmp_path)
    assert (tmp_path / bug.file).read_text() != (ROOT / bug.file).read_text()
    assert bug.tests
    assert all((ROOT / one).exists() for one in bug.tests)


def test_there_are_at_least_thirty_planted_bugs_with_different_names() -> None:
    names = {bug.name for bug in bugs()}
    assert len(names) == len(bugs()) >= 30
