"""Builds the evidence providers that the settings name, and polls them together."""

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Final

import structlog

from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceProvider, EvidenceUnavailableError, StillUnavailableError
from webhook.runtime.clock import Clock
from webhook.runtime.settings import EVIDENCE_PROVIDERS, Settings

log = structlog.get_logger(__name__)

ProviderBuilder = Callable[[Settings, Clock], EvidenceProvider]

PUSHED: Final = frozenset(name for name, one in EVIDENCE_PROVIDERS.items() if one.is_pushed)


class ProviderPoll:
    """Polls all providers, one after the other. Logs once when one becomes unavailable, and once when it answers
    again."""

    def __init__(self, providers: Sequence[EvidenceProvider], count_error: Callable[[str], None]) -> None:
        self._providers = providers
        self._count_error = count_error
        self._unavailable: set[str] = set()
        self._answered: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self._providers)

    @property
    def unanswered(self) -> frozenset[str]:
        """The providers that have not answered since `begin`."""
        return self.names - self._answered

    def begin(self) -> None:
        """Forget earlier answers: they are not new enough."""
        self._answered.clear()
        for one in self._providers:
            one.begin()

    async def answers(self) -> dict[str, Mapping[str, Evidence]]:
        """The answers of the providers that are available at this moment."""
        found = {}
        for one in self._providers:
            try:
                found[one.name] = await one.poll()
            except EvidenceUnavailableError as exc:
                self._record_failure(one.name, exc)
            else:
                self._record_answer(one.name)
        return found

    def _record_failure(self, name: str, exc: EvidenceUnavailableError) -> None:
        if not isinstance(exc, StillUnavailableError):
            self._count_error(name)
        if name not in self._unavailable:
            text = "evidence provider unavailable, its last answer stays until it expires"
            log.warning(text, provider=name, problem=str(exc))
        self._unavailable.add(name)

    def _record_answer(self, name: str) -> None:
        self._answered.add(name)
        if name in self._unavailable:
            log.info("evidence provider answers again", provider=name)
        self._unavailable.discard(name)


def providers_of(settings: Settings, clock: Clock, *own: EvidenceProvider) -> list[EvidenceProvider]:
    """In the order of `--evidence`. `own` are providers that other parts of the process use too."""
    known = {one.name: one for one in own}
    for name in settings.evidence:
        if name not in known and (builder := EVIDENCE_PROVIDERS[name].built_by):
            build: ProviderBuilder = resolve_name(builder)
            known[name] = build(settings, clock)
    return [known[name] for name in settings.evidence if name in known]


def retired_of(settings: Settings) -> set[str]:
    """The sources that this process could poll and does not. Sources that nodes push to are not among them."""
    return {*EVIDENCE_PROVIDERS} - PUSHED - {*settings.evidence}


def pushed_of(settings: Settings) -> set[str]:
    """The sources that nodes push to, which are not polled."""
    return {*settings.evidence} & PUSHED
