"""What the documents say is there, is there."""

import re
from pathlib import Path

import pytest

from webhook.core.reasons import EVENTS_ONLY, STATUS_CODES, Reason

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
TEST = re.compile(r"(tests/[\w./-]*\w)?(?:::(test_\w+|Test\w+))?")
ALL_TESTS = "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))


def test_every_reason_has_its_heading() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/reference/reasons.md").read_text(), re.MULTILINE)
    assert headings == [reason.value for reason in Reason if reason in STATUS_CODES or reason in EVENTS_ONLY]


@each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(document.read_text()):
        page = document.parent / target if target else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_every_test_that_is_named_exists(document: Path) -> None:
    """In the file that stands before it, if one does."""
    for path, name in TEST.findall(document.read_text()):
        assert not path or (ROOT / path).exists(), path
        sources = (ROOT / path).read_text() if path.endswith(".py") else ALL_TESTS
        assert not name or re.search(rf"(def|class) {name}\b|^{name} =", sources, re.MULTILINE), f"{path}::{name}"


def test_every_attack_is_in_the_threat_model() -> None:
    page = (ROOT / "docs/explanation/threat-model.md").read_text()
    for path in ROOT.glob("tests/e2e/attacks/test_*.py"):
        assert f"`tests/e2e/attacks/{path.name}" in page, path.name


def test_every_package_is_on_the_map() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for path in ROOT.glob("webhook/*/__init__.py"):
        assert f"{path.parent.name}/`" in page, path
