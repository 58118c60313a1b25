"""A claim key costs the files that CONTRIBUTING lists. A test fails if one of them is forgotten."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = "tests/core/test_claim_keys.py"
COPIED = ("webhook", "tests/__init__.py", "tests/builders.py", "tests/core/__init__.py", CHECK, "pyproject.toml")
MAX_FILES = 5

# A key for the model of the GPUs: for each file, lines that it has, and the lines that replace them.
EXAMPLE = {
    "webhook/core/claim_keys.py": {
        "\nCLAIM_KEYS: Final = (": """
MODEL: Final = ClaimKey(f"{DOMAIN}/model", field=ClaimField("model", str, lambda value: f"of model {value}"))

CLAIM_KEYS: Final = (MODEL, """,
        "    shared: bool = False\n": "    shared: bool = False\n    model: str = ''\n",
    },
    "webhook/core/decide.py": {
        "fleet.kinds_serving(claim.requirements,": """fleet.kinds_serving(
            claim.requirements | ({f"model={claim.record.model}"} if claim.record.model else set()),""",
    },
    "docs/reference/pods.md": {
        "| `gpuwarden.io/shared": "| `gpuwarden.io/model` | The model of each GPU. |\n| `gpuwarden.io/shared",
    },
    "tests/claim_samples.py": {
        "\nSAMPLES = (": """
SAMPLES = (
    Sample(("gpuwarden.io/model",), "h100", {"model": "h100"}, "1 GPU of model h100", ("GPU-1/0",)),""",
    },
    "CHANGELOG.md": {
        "\nThe first version.\n": "\nThe first version. `gpuwarden.io/model` selects the model of GPUs.\n",
    },
}
# No test reads the changelog.
CHECKED = [name for name in EXAMPLE if name != "CHANGELOG.md"]


def test_a_claim_key_costs_the_files_that_the_guide_lists() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n### A claim key\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", section, flags=re.M) == list(EXAMPLE)
    assert len(EXAMPLE) <= MAX_FILES


@pytest.mark.parametrize("forgotten", [None, *CHECKED])
def test_a_key_works_in_all_files_and_fails_a_test_without_one_of_them(tmp_path: Path, forgotten: str | None) -> None:
    for name in (*COPIED, *(one for one in EXAMPLE if not one.startswith(COPIED))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    for name, changes in EXAMPLE.items():
        if name != forgotten:
            change(tmp_path / name, changes)
    check = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CHECK]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    # pytest answers 1 if tests ran and some failed.
    assert done.returncode == (0 if forgotten is None else 1), done.stdout + done.stderr
    assert "gpuwarden.io/model" in done.stdout or forgotten is None


def change(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} in {path.name}"
        text = text.replace(old, new)
    path.write_text(text)
