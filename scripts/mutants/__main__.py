"""Applies each mutation to a copy of the tree and runs the tests that have to detect it.

python -m scripts.mutants [TEXT]   only mutations whose name contains TEXT
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from scripts.mutants.bugs import Bug, bugs

ROOT = Path(__file__).resolve().parent.parent.parent
# Time limit for the tests of one mutation; an endless loop counts as detected.
TIMEOUT = 300
WORKERS = 2
FAILED = 1  # pytest's exit status for failed tests; others mean that the tests did not run


def main(wanted: str = "") -> int:
    chosen = [bug for bug in bugs() if wanted in bug.name]
    with ThreadPoolExecutor(WORKERS) as pool:
        killed = list(pool.map(is_killed, chosen))
    print(f"{sum(killed)} of {len(chosen)} mutations were detected")
    return 0 if chosen and all(killed) else 1


def is_killed(bug: Bug) -> bool:
    started = monotonic()
    with planted(bug) as tree:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.tests]
        try:
            ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            status, output = ran.returncode, ran.stdout
        except subprocess.TimeoutExpired:
            status, output = FAILED, "timed out"
    last = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    said = {0: "NOT FOUND", FAILED: "found"}.get(status, f"pytest exit status {status}")
    print(f"{said:9} {monotonic() - started:5.1f} s  {bug.name}  {last}"[:220], flush=True)
    return status == FAILED


@contextmanager
def planted(bug: Bug) -> Iterator[Path]:
    """A copy of the tree with the mutation."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
        for name in tracked.stdout.splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        bug.plant(tree)
        yield tree


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
