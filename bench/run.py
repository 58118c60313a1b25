"""`make bench` runs all benchmarks and writes `bench/results/`. `make bench-check` is the short form with limits.

The limits of the short form are wider than the targets, so that it notices regressions on any machine.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from bench import decision, extender, idle, machine, memory, proofs, smi, spire, throughput
from bench.figures import Target
from bench.servers import BenchError
from webhook.runtime.clock import utc_now

Raw = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
# How much a figure of the short form may miss its target.
SLACK = 2.0


@frozen
class Part:
    """One benchmark: how to run it, its targets, and how to render it."""

    name: str
    title: str
    run: Callable[[bool], Raw]
    targets: Callable[[Raw, float], list[Target]]
    lines: Callable[[Raw], list[str]]
    # Whether it is part of the short form. Benchmarks that need Go and minutes are not.
    is_checked: bool = True


PARTS = (
    Part(
        "decision",
        "The decision",
        lambda is_short: decision.run(decision.SHORT if is_short else decision.Plan()),
        decision.targets,
        decision.lines,
    ),
    Part(
        "extender",
        "The extender",
        lambda is_short: extender.run(extender.SHORT if is_short else extender.Plan()),
        extender.targets,
        extender.lines,
    ),
    Part(
        "idle",
        "Idle",
        lambda is_short: idle.run(idle.SHORT if is_short else idle.Plan()),
        idle.targets,
        idle.lines,
    ),
    Part(
        "memory",
        "Memory and start",
        lambda is_short: memory.run(memory.SHORT if is_short else memory.Plan()),
        memory.targets,
        memory.lines,
    ),
    Part(
        "proofs",
        "Proofs of nodes",
        lambda is_short: proofs.run(proofs.SHORT if is_short else proofs.Plan()),
        proofs.targets,
        proofs.lines,
    ),
    Part(
        "smi",
        "nvidia-smi",
        lambda is_short: smi.run(smi.SHORT if is_short else smi.Plan()),
        smi.targets,
        smi.lines,
    ),
    Part(
        "spire",
        "SPIRE's agents",
        lambda is_short: spire.run(spire.SHORT if is_short else spire.Plan()),
        spire.targets,
        spire.lines,
    ),
    Part(
        "throughput",
        "Throughput",
        lambda is_short: throughput.run(throughput.SHORT if is_short else throughput.Plan()),
        throughput.targets,
        throughput.lines,
    ),
)


def main() -> int:
    parser = ArgumentParser(prog="python -m bench.run", description="Measures gpuwarden's speed and memory.")
    parser.add_argument("--check", action="store_true", help="the short form; exit code 1 if a limit is broken")
    parser.add_argument(
        "--only",
        choices=[part.name for part in PARTS],
        action="append",
        default=[],
        help="run only this part (repeatable); results are written only with --page",
    )
    parser.add_argument("--page", help="write results/PAGE.md instead of the README, which has all parts")
    asked = parser.parse_args()
    parts = [one for one in PARTS if (one.name in asked.only if asked.only else one.is_checked or not asked.check)]
    described = machine.description()
    slack = SLACK if asked.check else 1.0
    try:
        found = {part.name: measured(part, is_short=asked.check, slack=slack) for part in parts}
    except BenchError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    if asked.check:
        return int(not all(one.is_met for part in parts for one in part.targets(found[part.name], slack)))
    if asked.page or not asked.only:
        write(described, found, asked.page)
    return 0


def measured(part: Part, *, is_short: bool, slack: float) -> Raw:
    print(f"\n{part.title}\n", flush=True)
    found = part.run(is_short)
    verdicts = [one.sentence for one in part.targets(found, slack)]
    print("\n".join([*part.lines(found), "", *verdicts]), flush=True)
    return found


def write(described: Raw, found: Raw, page: str | None) -> None:
    """Writes the figures as JSON and Markdown."""
    RESULTS.mkdir(exist_ok=True)
    day = utc_now().date().isoformat()
    chosen = "".join(f" --only {name}" for name in found)
    command = "make bench" if page is None else f"python -m bench.run{chosen} --page {page}"
    kept = {"date": day, "command": command, "machine": described, **found}
    name = day if page is None else f"{page}-{day}"
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    (RESULTS / f"{page or 'README'}.md").write_text("\n".join(report(day, name, command, described, found)) + "\n")
    print(f"\nwritten to {RESULTS.relative_to(Path.cwd())}/")


def report(day: str, name: str, command: str, described: Raw, found: Raw) -> list[str]:
    text = [
        "# Measured",
        "",
        f"By `{command}` on {day}, which wrote this page and [{name}.json]({name}.json).",
        "What is measured, and how, stands at the top of each module in `bench/`. Compare figures within one run:",
        "those of two machines, or of two days on a shared one, differ by more than most changes do.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {key.replace('_', ' ')} | {value} |" for key, value in described.items()),
    ]
    for part in (one for one in PARTS if one.name in found):
        targets = part.targets(found[part.name], 1.0)
        text += ["", f"## {part.title}", "", *part.lines(found[part.name]), "", *(f"- {t.sentence}" for t in targets)]
    return text


if __name__ == "__main__":
    sys.exit(main())
