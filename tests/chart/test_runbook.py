"""The runbook has a line for every alert and every reason, and its links have targets."""

import re
from pathlib import Path

import pytest
import yaml

from tests.chart.rendering import helm_template
from tests.project.test_alerts import RULES
from webhook.core.reasons import Reason

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
OPERATE = DOCS / "how-to" / "operate.md"
THREAT_MODEL = DOCS / "explanation" / "threat-model.md"
PAGES = [DOCS / "how-to" / "install.md", OPERATE, DOCS / "reference" / "configure.md", THREAT_MODEL]
DRA = DOCS / "how-to" / "dra.md"
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def rows(heading: str) -> set[str]:
    """The words in the first column of a section's table."""
    section = OPERATE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {word.strip() for cell in cells for word in cell.split(",")}


def test_every_alert_has_a_line() -> None:
    assert rows("Alerts") - {"alert"} == {rule["alert"] for rule in RULES}


def test_every_reason_has_a_line() -> None:
    assert rows("Reasons") - {"reason"} == {reason.value for reason in Reason}


@pytest.mark.parametrize("page", [*PAGES, *(DOCS / "moving").glob("*.md")], ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_files_named_by_the_threat_model_exist() -> None:
    named = re.findall(r"`(tests/[\w/.-]+)`", THREAT_MODEL.read_text())
    assert named
    assert [name for name in named if not (DOCS.parent / name).exists()] == []


def test_values_for_native_pods_and_for_webhooks_beside_a_dra_driver_render() -> None:
    blocks = [yaml.safe_load(block) for block in BLOCK.findall(DRA.read_text())]
    native, reviewed = (block for block in blocks if "native" in block)
    for values in (native, reviewed):
        done = helm_template(values, is_new=True)
        assert done.returncode == 0, done.stderr
