"""The output that documents show is the output of the commands: a Pod before and after, `gpuwarden explain`, `make
demo`."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.chart.rendering import rendered

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONSOLE = re.compile(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = {"make demo": ["scripts.demo"], ".venv/bin/gpuwarden": ["webhook.cli"], "gpuwarden": ["webhook.cli"]}


def shown() -> Iterator[tuple[str, list[str], str]]:
    """Page, command and output of each block that needs neither a cluster nor a running server."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        for command, output in CONSOLE.findall(page.read_text()):
            words = re.fullmatch(r"(make demo|(?:\.venv/bin/)?gpuwarden)(?: (explain examples/.*))?", command)
            if words and (words[2] or words[1] == "make demo"):
                yield page.name, [*MODULES[words[1]], *shlex.split(words[2] or "")], output


SHOWN = list(shown())


def output_of(arguments: list[str]) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


def test_readme_and_tutorial_show_commands_that_can_be_tested() -> None:
    assert {page for page, _, _ in SHOWN} >= {"README.md", "first-pod.md"}


@pytest.mark.parametrize(("page", "arguments", "output"), SHOWN, ids=lambda value: str(value)[:40])
def test_command_prints_the_output_that_its_page_shows(page: str, arguments: list[str], output: str) -> None:
    assert output_of(arguments) == output


def test_readme_shows_the_pod_as_explain_prints_it() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    assert yaml.safe_load(before) == yaml.safe_load((ROOT / "examples/pods/train.yaml").read_text())
    printed = output_of(["webhook.cli", "explain", "examples/pods/train.yaml", "--show", "pod"])
    printed = printed.partition("apiVersion:")[2]
    assert without_ids(f"apiVersion:{printed}".splitlines()) == without_ids(after.splitlines())


def without_ids(lines: list[str]) -> list[str]:
    """Replaces the reservation ID, which differs in every run."""
    return [re.sub(r"(reservation-id:) [0-9a-f-]{36}$", r"\1 ID", line) for line in lines]


def test_chart_renders_with_the_values_of_the_readme() -> None:
    sets = dict(pair.split("=") for pair in re.findall(r"--set ([\w.]+=[\w/]+)", README))
    accepted = "webhooks.acceptUnverifiedCallers"
    assert sets.keys() == {"image.repository", "settings.requireEvidence", accepted}
    assert rendered({**sets, accepted: sets[accepted] == "true"}, is_new=True)
