"""Scorers advise which GPUs suit a pod. Advice is a hint: without it the pod is handled as usual."""

from typing import Protocol

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.hints import Advice, Features


@frozen
class ScoreRequest:
    """The scorer's input for one pod."""

    features: Features
    candidates: tuple[str, ...]
    colocated: tuple[str, ...] = ()


class ScorerUnavailableError(GpuwardenError):
    """The scorer gave no advice; `outcome` is the label value of the metric."""

    def __init__(self, outcome: str, sentence: str) -> None:
        self.outcome = outcome
        super().__init__(sentence)


class Scorer(Protocol):
    """Gives advice on pods."""

    async def advise(self, question: ScoreRequest, *, patience: float) -> Advice:
        """Answers within `patience` seconds or raises ScorerUnavailableError."""

    async def close(self) -> None:
        """Ends open requests and connections."""
