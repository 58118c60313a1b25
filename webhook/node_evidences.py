"""NodeEvidence objects in the API server: the elected reconciler writes them, every replica hears of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import structlog
from attrs import evolve

from webhook.api_objects import Objects
from webhook.clock import Clock
from webhook.core.evidence import Evidence, combined
from webhook.evidence import EvidenceProvider, EvidenceUnavailableError
from webhook.evidence.node_evidence import (
    NodeEvidence,
    entry_in,
    has_entry,
    is_due,
    new_node_evidence,
    with_entries,
)
from webhook.ledger.store import RefusedError, StaleError, StoreAwayError
from webhook.view import View

log = structlog.get_logger(__name__)

Raw = dict[str, Any]
POLL_EVERY = timedelta(seconds=5)
AT_A_TIME = 200
TRIES = 3


class EvidenceWriter:
    """Hears of NodeEvidence from a watch; asks the providers and writes what they say in `step`, each under its name.

    A provider that is away changes nothing, nor does one before its first answer.
    """

    def __init__(
        self,
        objects: Objects,
        providers: Sequence[EvidenceProvider],
        clock: Clock,
        is_current: Callable[[], bool],
        poll_every: timedelta = POLL_EVERY,
        retired: Iterable[str] = (),
        count_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._objects = objects
        self._providers = providers
        self._clock = clock
        self._is_current = is_current
        self._poll_every = poll_every
        self._count_error = count_error
        self._poll_at: datetime | None = None
        # What a source that is no longer asked has said would stand for ever, and static evidence has no end.
        self._said: dict[str, Mapping[str, Evidence]] = {name: {} for name in retired}
        self._todo: dict[str, None] = {}
        self._refused: dict[str, str] = {}
        self.view: View[Raw] = View(lambda raw: raw)

    async def step(self) -> None:
        """One pass. What cannot be written now is left for the next one."""
        if not self._is_current():
            return
        now = self._clock()
        self._todo.update(dict.fromkeys(self.view.take_news()))
        if self._poll_at is None or now >= self._poll_at:
            self._poll_at = now + self._poll_every
            await self._poll()
        for name in list(self._todo)[:AT_A_TIME]:
            del self._todo[name]
            await self._attempt(name, now)

    def is_owed(self, name: str) -> bool:
        """Whether something newer is known of the node than its object says."""
        return bool(self._due(self.view.get(name) or new_node_evidence(name), name, self._clock()))

    async def _poll(self) -> None:
        for provider in self._providers:
            try:
                self._said[provider.name] = await provider.poll()
            except EvidenceUnavailableError as exc:
                self._count_error(provider.name)
                log.warning("evidence provider away, what it said stays until its own end", provider=provider.name)
                log.debug("evidence provider away", provider=provider.name, exc_info=exc)
        names = self.view.names().union(*self._said.values())
        self._todo.update(dict.fromkeys(sorted(names)))

    async def _attempt(self, name: str, now: datetime) -> None:
        try:
            await self._settle(name, now)
        except RefusedError as exc:
            if self._refused.get(name) != str(exc):
                log.warning("evidence refused by the API server", node=name, problem=str(exc))
            self._refused[name] = str(exc)
        except (StaleError, StoreAwayError) as exc:
            log.warning("evidence left for the next pass", node=name, error=type(exc).__name__)
            self._todo[name] = None
        else:
            self._refused.pop(name, None)

    async def _settle(self, name: str, now: datetime) -> None:
        for _ in range(TRIES - 1):
            try:
                return await self._write(name, now)
            except StaleError:
                raw = await self._objects.get(name)
                if raw is None:
                    self.view.forget(name)
                else:
                    self.view.changed(raw)
        return await self._write(name, now)

    async def _write(self, name: str, now: datetime) -> None:
        raw = self.view.get(name)
        entries = self._due(raw or new_node_evidence(name), name, now)
        if not entries:
            return
        if raw is None:
            raw = await self._objects.create(new_node_evidence(name))
            self.view.changed(raw)
        self.view.changed(await self._objects.replace_status(with_entries(raw, entries)))
        log.info("evidence written", node=name, sources=sorted(entries))

    def _due(self, raw: Raw, name: str, now: datetime) -> dict[str, Evidence | None]:
        """The entries to be written, by source; None for one to be taken away."""
        found: dict[str, Evidence | None] = {}
        for source, said in self._said.items():
            have, want = entry_in(raw, source), said.get(name)
            want = want and evolve(want, source=source)
            is_unreadable = have is None and has_entry(raw, source)
            if is_unreadable or is_due(have, want, now=now):
                found[source] = want
        return found


class EvidenceView:
    """What is known of every node's evidence: what NodeEvidence objects say, and what this process was told itself.

    It is known of nodes that have not been heard of too. An object that cannot be read leaves what was known.
    """

    def __init__(self, own: Mapping[str, Evidence], show: Callable[[str], None]) -> None:
        self._own = own
        self._show = show
        self._view: View[tuple[Evidence, ...]] = View(lambda raw: tuple(NodeEvidence.parse(raw).sources.values()))

    def word_on(self, name: str) -> Evidence | None:
        own = [self._own[name]] if name in self._own else []
        return combined([*own, *(self._view.get(name) or ())])

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._view.replaced(objects)
        self._show_news()

    def changed(self, raw: Raw) -> None:
        self._view.changed(raw)
        self._show_news()

    def deleted(self, raw: Raw) -> None:
        self._view.deleted(raw)
        self._show_news()

    def _show_news(self) -> None:
        for name in self._view.take_news():
            self._show(name)
