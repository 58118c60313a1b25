"""Everything that the documents name exists."""

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
def test_every_link_target_exists(document: Path) -> None:
    for target, anchor in LINK.findall(document.read_text()):
        page = document.parent / target if target else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_every_named_test_exists(document: Path) -> None:
    """A `::test` without a file belongs to the file named before it on the same line."""
    for line in document.read_text().splitlines():
        file = None
        for path, name in TEST.findall(line):
            file = path or file
            assert not path or (ROOT / path).exists(), path
            sources = (ROOT / file).read_text() if file and file.endswith(".py") else ALL_TESTS
            assert not name or re.search(rf"(def|class) {name}\b|^{name} =", sources, re.MULTILINE), f"{file}::{name}"


def test_every_promise_names_its_tests() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / "docs/explanation/promises.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    for promise, tests in rows:
        named = re.findall(r"`([^`]*)`", tests)
        assert promise == "promise" or named, promise
        assert all(re.match(r"(tests/[\w/]+\.py)?(::\w+)?$|make [a-z-]+$", one) for one in named), promise


def test_every_module_that_the_architecture_names_exists() -> None:
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "ARCHITECTURE.md").read_text()):
        assert (ROOT / "webhook" / path).exists() or (ROOT / path).exists(), path


def test_every_attack_is_in_the_threat_model() -> None:
    page = (ROOT / "docs/explanation/threat-model.md").read_text()
    for path in ROOT.glob("tests/e2e/attacks/test_*.py"):
        assert f"`tests/e2e/attacks/{path.name}" in page, path.name


def test_every_package_is_in_architecture() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for path in ROOT.glob("webhook/*/__init__.py"):
        assert f"{path.parent.name}/`" in page, path
