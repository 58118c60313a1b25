"""Figures that the tests measured, printed below the results."""

from collections.abc import Sequence
from typing import Final

import pytest

FIGURES: Final = "figures"


def report_figures(request: pytest.FixtureRequest, **figures: object) -> None:
    words = ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in figures.items())
    request.node.user_properties.append((FIGURES, words))  # also carried over from other worker processes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [one for several in terminalreporter.stats.values() for one in several]
    found = [
        (one.location[2], words)
        for one in reports
        if isinstance(one, pytest.TestReport) and one.when == "call"
        for name, words in one.user_properties
        if name == FIGURES
    ]
    if found:
        terminalreporter.section("figures")
    for test, words in found:
        terminalreporter.write_line(f"{test}: {words}")


def shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile of the values, or 0 if there are none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
