"""Figures and their limits."""

import math
from collections.abc import Sequence
from statistics import median

from attrs import frozen


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def typical(rounds: Sequence[float]) -> float:
    """The median round: other load disturbs single rounds, not most of them."""
    return median(rounds)


@frozen
class Target:
    """One figure and its limit. `at_most`: larger is worse; otherwise smaller is."""

    name: str
    value: float
    limit: float
    unit: str = ""
    at_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def sentence(self) -> str:
        sign = "≤" if self.at_most else "≥"
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.value:.3g}{self.unit} (target {sign} {self.limit:g}{self.unit}) {verdict}"
