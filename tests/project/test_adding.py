"""What it costs to add an exporter, an evidence provider or a page, counted for an existing one of each.

CONTRIBUTING lists the files of each example, and what does not count.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from attrs import frozen

from scripts import chart_manifests, chart_values, routes
from webhook.export.targets import STORES
from webhook.runtime.settings import EVIDENCE_PROVIDERS

ROOT = Path(__file__).resolve().parents[2]
# What a change of the product can touch, without tests and their equipment. `make chart` runs these scripts.
CODE = ("webhook", "chart", "pyproject.toml", "Dockerfile", "Makefile", "scripts/chart*.py", "scripts/routes.py")
DOCS = ("README.md", "ARCHITECTURE.md", "docs")
RECORDS = ("docs/decisions/", "docs/moving/")
GENERATED = {str(path.relative_to(ROOT)) for part in (chart_values, chart_manifests, routes) for path in part.written()}


@frozen
class Example:
    """An existing one: how files name it, and the names that are in a list of all."""

    heading: str
    named: re.Pattern[str]
    all_names: Collection[str]
    limit: int
    # Directories that count as one file.
    own: tuple[str, ...] = ()


EXAMPLES = [
    Example(
        "An exporter",
        re.compile(r"(?<![a-z0-9])s3(?![0-9])|obstore|ObjectTarget|ObjectExporter", re.IGNORECASE),
        STORES,
        limit=5,
    ),
    Example(
        "An evidence provider",
        re.compile(r"spire[-_]?server(?!\.)", re.IGNORECASE),
        EVIDENCE_PROVIDERS,
        limit=4,
        own=("webhook/evidence/spire/", "tests/evidence/spire/"),
    ),
    Example(
        "A page",
        re.compile(r"\bExplain\b|\"/explain|web[./]explain"),
        ("/healthz", "/devices", "/explain", "/finalize", "/mutate", "/validate"),
        limit=3,
    ),
]
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.heading)


def hand_written(*places: str) -> Iterator[str]:
    """The files in these places; a place is a file, a directory or a pattern."""
    for place in places:
        for path in [*ROOT.glob(place), *ROOT.glob(f"{place}/**/*")]:
            name = str(path.relative_to(ROOT))
            if path.is_file() and "__pycache__" not in name and name not in GENERATED and not name.startswith(RECORDS):
                yield name


def text_of(path: str) -> str:
    return (ROOT / path).read_text(errors="replace")


def lists_all(text: str, names: Collection[str]) -> bool:
    return all(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) for name in names)


def files_naming(example: Example) -> set[str]:
    found = {path for path in hand_written(*CODE) if example.named.search(text_of(path))}
    found |= {path for path in hand_written(*DOCS) if lists_all(text_of(path), example.all_names)}
    return {next((place for place in example.own if path.startswith(place)), path) for path in found}


def listed_files(example: Example) -> list[str]:
    """The first column of the example's table in CONTRIBUTING."""
    section = re.split(r"^#+ ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    (text,) = (one for one in section if one.startswith(f"{example.heading}\n"))
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@each_example
def test_contributing_lists_every_file_that_names_the_example(example: Example) -> None:
    assert files_naming(example) - {*listed_files(example)} == set()


@each_example
def test_listed_files_name_the_example_and_are_few(example: Example) -> None:
    listed = listed_files(example)
    assert 0 < len(listed) <= example.limit
    assert any(path.startswith("tests/") for path in listed)
    for place in listed:
        assert any(example.named.search(text_of(path)) for path in hand_written(place)), place


@each_example
def test_search_finds_code_of_the_example(example: Example) -> None:
    assert len(files_naming(example) & {*listed_files(example)}) >= 2


def test_a_page_that_lists_all_exporters_counts() -> None:
    names = ("stdout", "http", "s3")
    assert lists_all("`stdout`, `http` or `s3`", names)
    assert not lists_all("`stdout` or `http` in s3-credentials", names)
