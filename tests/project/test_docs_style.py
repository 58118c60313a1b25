"""Pages have lines of at most 120 characters and no words of a list that makes sentences hard to read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for pattern in ("*.md", "docs/**/*.md", "*/README.md") for path in ROOT.glob(pattern)
)
LONGEST = 120
RIDDLES = re.compile(
    r"\b(who(?:so)?ever|whomever|nobody|somebody|anybody|everybody|anew|glimpse|of which|that of|of ours|in vain"
    r"|has to be had|what is (?:told|held|said|asked|meant|promised)|(?:is|are|was|were) told|go(?:es)? by"
    r"|(?:by|on) the word of)\b",
    re.IGNORECASE,
)
# It quotes the texts of before.
QUOTES = "docs/decisions/0031-plain-messages.md"


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines outside fenced blocks of commands' output, with their numbers."""
    is_output = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_output = line.strip() == "```console" or (is_output and line.strip() != "```")
        elif not is_output:
            yield number, line


def faults(page: str) -> list[str]:
    found = []
    for number, line in prose(page):
        if len(line) > LONGEST and not line.startswith("|"):
            found.append(f"{page}:{number}: {len(line)} characters")
        words = page != QUOTES and RIDDLES.search(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))
        if words:
            found.append(f"{page}:{number}: {words[0]!r}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_page_has_short_lines_and_plain_words(page: str) -> None:
    assert faults(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_of_a_page_are_fenced(page: str) -> None:
    """Re-wrapping a page joins the lines of an indented code block."""
    lines = (ROOT / page).read_text().split("\n")
    indented = []
    is_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.startswith("    ") and not lines[number - 2].strip():
            indented.append(f"{page}:{number}: {line}")
    assert indented == []
