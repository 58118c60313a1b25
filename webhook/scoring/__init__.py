"""Scorers: who is asked which GPUs suit a pod. What they say is a hint, and without it the pod goes on."""

from typing import Protocol

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.hints import Advice, Features


@frozen
class ScoreRequest:
    """What a scorer is asked about one pod."""

    features: Features
    candidates: tuple[str, ...]
    colocated: tuple[str, ...] = ()


class ScorerUnavailableError(GpuwardenError):
    """No advice this time; `outcome` is the metric's word for why."""

    def __init__(self, outcome: str, sentence: str) -> None:
        self.outcome = outcome
        super().__init__(sentence)


class Scorer(Protocol):
    """Gives advice on pods."""

    async def advise(self, question: ScoreRequest, *, patience: float) -> Advice:
        """Within so many seconds, or ScorerUnavailableError."""

    async def close(self) -> None:
        """Nobody is asked any more."""
