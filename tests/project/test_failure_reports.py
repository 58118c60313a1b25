"""pytest reports a failed test even if garbage is collected meanwhile."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Parses during every collection of garbage, as a finalizer does that logs the exception of a task.
TEST = """
import ast
import gc


def parse(*_):
    ast.parse("a + b * (c + d)")


def test_it():
    gc.callbacks.append(parse)
    gc.set_threshold(100, 1, 1)
    assert False, "the expected failure"
"""


def test_failure_is_reported_while_finalizers_parse(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST + "number = 1 + 2\n" * 1000)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "INTERNALERROR" not in found.stdout
    assert "1 failed" in found.stdout
