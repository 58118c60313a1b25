"""What a proof measured, on the terminal, whatever pytest captures."""

from collections.abc import Sequence

import pytest


def tell(request: pytest.FixtureRequest, **figures: object) -> None:
    plugins = request.config.pluginmanager
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    if reporter is None or capture is None:
        return
    words = ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in figures.items())
    with capture.global_and_fixture_disabled():
        reporter.ensure_newline()
        reporter.write_line(f"  {request.node.name}: {words}")


def shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not pass; 0 where there are none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
