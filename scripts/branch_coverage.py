"""Prints the branch coverage of some packages in the last `make test`, and fails below the limit."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from coverage import Coverage

LEAST = 95.0
PACKAGES = ("core", "admission", "ledger")


def main() -> int:
    measured = Coverage()
    measured.combine()
    with TemporaryDirectory() as directory:
        report = Path(directory) / "coverage.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    is_enough = True
    for package in PACKAGES:
        found = [one["summary"] for path, one in files.items() if path.startswith(f"webhook/{package}/")]
        percent = 100 * sum(one["covered_branches"] for one in found) / sum(one["num_branches"] for one in found)
        is_enough &= percent >= LEAST
        print(f"branch coverage of webhook/{package}: {percent:.1f} % (at least {LEAST:.0f} %)")
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())
