"""NodeEvidence objects in the API server: the elected reconciler writes what it asks for, all replicas hear of all."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
import structlog
from attrs import evolve

from webhook.core.evidence import Evidence, combined, predates_node
from webhook.core.raw import Raw
from webhook.evidence import EvidenceProvider
from webhook.evidence.node_evidence import (
    ENDLESS,
    NodeEvidence,
    entry_in,
    has_entry,
    is_due,
    is_ours,
    new_node_evidence,
    only,
    raw_entries,
    with_entries,
)
from webhook.evidence.providers import ProviderPoll
from webhook.kube.api_objects import NodeExistence, ObjectClient
from webhook.kube.node import creation_time_of
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

POLL_EVERY = timedelta(seconds=5)
AT_A_TIME = 200
TRIES = 3
# In a row: an API server that does not answer is not asked two hundred times a pass.
MAX_FAILURES = 3


class EvidenceWriter:
    """Hears of NodeEvidence from a watch; asks the providers and writes what they say in `step`, each under its name.

    A provider that is away changes nothing, nor does one before its first answer. `awaited` are sources that nodes
    push to: `patience` is what a node has for its first word after this process began.
    """

    def __init__(
        self,
        objects: ObjectClient,
        providers: Sequence[EvidenceProvider],
        clock: Clock,
        is_current: Callable[[], bool],
        nodes: NodeExistence,
        are_nodes_current: Callable[[], bool],
        poll_every: timedelta = POLL_EVERY,
        retired: Iterable[str] = (),
        awaited: Iterable[str] = (),
        patience: timedelta = timedelta(),
        keep: timedelta = timedelta(),
        count_error: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keep`: how long after a proof another answer to its challenge, or to one before, could still be taken."""
        self._objects = objects
        self._round = ProviderPoll(providers, count_error)
        self._awaited = tuple(awaited)
        self._patience = patience
        self._began: datetime | None = None
        self._met: set[tuple[str, str]] = set()
        self._clock = clock
        self._is_current = is_current
        self._nodes = nodes
        self._are_nodes_current = are_nodes_current
        self._keep = keep
        self._poll_every = poll_every
        self._poll_at: datetime | None = None
        # What a source that is no longer asked has said would stand for ever, and static evidence has no end.
        self._retired = tuple(retired)
        self._said: dict[str, Mapping[str, Evidence]] = {name: {} for name in self._retired}
        self._todo: dict[str, None] = {}
        self._refused: dict[str, str] = {}
        self.view: ObjectView[Raw] = ObjectView(lambda raw: raw)
        self.births: ObjectView[datetime | None] = ObjectView(birth_of)

    def begin(self) -> None:
        """Elected: what was said before may be older than what another leader has written since, a ban included."""
        self._said = {name: {} for name in self._retired}
        self._round.begin()
        self._poll_at = None

    async def step(self) -> None:
        """One pass. What cannot be written now is left for the next one."""
        if not self._is_current():
            return
        now = self._clock()
        self._began = self._began or now
        self._todo.update(dict.fromkeys(self._news()))
        if self._poll_at is None or now >= self._poll_at:
            self._poll_at = now + self._poll_every
            await self._poll()
        failures = 0
        for name in list(self._todo)[:AT_A_TIME]:
            del self._todo[name]
            failures = 0 if await self._attempt(name, now) else failures + 1
            if failures >= MAX_FAILURES:
                return

    def is_owed(self, name: str) -> bool:
        """Whether something newer is known of the node than its object says, or soon may be: nobody has lost what a
        source that was added a moment ago has never said."""
        raw = self.view.get(name) or new_node_evidence(name)
        return bool(self._due(raw, name, self._clock())) or self._is_unheard(raw, name)

    def _is_unheard(self, raw: Raw, name: str) -> bool:
        is_early = self._began is None or self._clock() - self._began < self._patience
        pushing = [one for one in self._awaited if is_early and (one, name) not in self._met]
        return any(not has_entry(raw, one) for one in (*pushing, *self._round.unanswered))

    def _news(self) -> list[str]:
        news = [*self.view.take_changes(), *self.births.take_changes()]
        for name in news:
            raw = self.view.get(name)
            self._met.update((one, name) for one in self._awaited if raw is not None and has_entry(raw, one))
        return news

    async def _poll(self) -> None:
        self._said.update(await self._round.answers())
        names = self.view.names().union(*self._said.values())
        self._todo.update(dict.fromkeys(sorted(names)))

    async def _attempt(self, name: str, now: datetime) -> bool:
        """Whether the API server has answered."""
        try:
            await self._settle(name, now)
        except RefusedError as exc:
            if self._refused.get(name) != str(exc):
                log.warning("evidence refused by the API server", node=name, problem=str(exc))
            self._refused[name] = str(exc)
        except (StaleError, StoreUnavailableError) as exc:
            log.warning("evidence left for the next pass", node=name, error=type(exc).__name__)
            self._todo[name] = None
            return isinstance(exc, StaleError)
        else:
            self._refused.pop(name, None)
        return True

    async def _settle(self, name: str, now: datetime) -> None:
        for _ in range(TRIES - 1):
            try:
                return await self._write(name, now)
            except StaleError:
                before = self._written(name)
                await self._read_anew(name)
                if self._written(name) != before:
                    self.begin()  # another leader has asked since, or a hand has written: what was heard may be older
                    raise
        return await self._write(name, now)

    async def _read_anew(self, name: str) -> None:
        raw = await self._objects.get(name)
        if raw is None:
            self.view.forget(name)
        else:
            self.view.changed(raw)

    def _written(self, name: str) -> Raw:
        """What is known to be written of the node by nobody but whoever leads."""
        return {source: one for source, one in raw_entries(self.view.get(name) or {}).items() if source in self._said}

    async def _write(self, name: str, now: datetime) -> None:
        raw = self.view.get(name)
        if raw is not None and self._is_over(raw, name, now) and await self._nodes.is_gone(name):
            await self._delete(raw, name)
            return
        entries = self._due(raw or new_node_evidence(name), name, now)
        if not entries:
            return
        if raw is None:
            raw = await self._objects.create(new_node_evidence(name))
            self.view.changed(raw)
        self.view.changed(await self._objects.replace_status(with_entries(raw, entries)))
        log.info("evidence written", node=name, sources=sorted(entries))

    def _is_over(self, raw: Raw, name: str, now: datetime) -> bool:
        """There is no Node, nobody speaks of one, and what was said cannot be said again. What is not ours, or cannot
        be read, stays; and nothing follows from the silence of a watch or of who has not answered yet."""
        if not self._are_nodes_current() or name in self.births or self._round.unanswered:
            return False
        if not is_ours(raw) or any(name in said for said in self._said.values()):
            return False
        left = [entry_in(raw, source) for source in raw_entries(raw) if source not in self._said]
        return all(one is not None and self._is_forgettable(one, now) for one in left)

    def _is_forgettable(self, one: Evidence, now: datetime) -> bool:
        """A challenge could be answered twice if nobody knew any more when the last one was answered."""
        proven = max((moment for moment in (one.since, one.challenged) if moment is not None), default=None)
        return one.until is not None and proven is not None and max(one.until, proven + self._keep) <= now

    async def _delete(self, raw: Raw, name: str) -> None:
        """Under its version: a proof that comes meanwhile keeps it."""
        await self._objects.delete(raw)
        self.view.forget(name)
        self._met = {(source, other) for source, other in self._met if other != name}
        log.info("evidence deleted with its Node", node=name)

    def _due(self, raw: Raw, name: str, now: datetime) -> dict[str, Evidence | None]:
        """The entries to be written, by source; None for one to be taken away."""
        found: dict[str, Evidence | None] = {}
        for source, said in self._said.items():
            have, want = entry_in(raw, source), said.get(name)
            want = want and evolve(want, source=source)
            is_unreadable = have is None and has_entry(raw, source)
            if is_unreadable or self._is_of_another(have, want, name) or is_due(have, want, now=now):
                found[source] = want
        return found

    def _is_of_another(self, have: Evidence | None, want: Evidence | None, name: str) -> bool:
        """What is written is of the node that had this name before, and what is known is not."""
        born = self.births.get(name)
        return have is not None and want is not None and predates_node(have, born) and not predates_node(want, born)


def birth_of(raw: Raw) -> datetime | None:
    try:
        return creation_time_of(raw)
    except msgspec.ValidationError:
        return None


class EvidenceView:
    """What is known of every node's evidence: what NodeEvidence objects say, and what this process was told itself.

    It is known of nodes that have not been heard of too. An object that cannot be read leaves what was known. The
    sources that are `asked` all have to vouch for a node; what others have said counts for nothing. A proof's moment is
    by the clock of whoever signed it, so it may have been made a `skew` earlier. Nothing counts when it is older than
    `max_age`, whatever end was written down with it.
    """

    def __init__(
        self,
        own: Mapping[str, Evidence],
        asked: Collection[str],
        skew: timedelta = timedelta(),
        max_age: timedelta | None = None,
    ) -> None:
        self._skew = skew
        self._max_age = max_age
        self._own = own
        self._listeners: list[Callable[[str], None]] = []
        self._asked = frozenset(asked)
        self._view: ObjectView[tuple[Evidence, ...]] = ObjectView(self._said_in)

    def notify(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each node whose evidence changes."""
        self._listeners.append(listener)

    def combined_evidence(self, name: str) -> Evidence | None:
        own = [self._own[name]] if name in self._own else []
        return combined([*own, *(self._view.get(name) or ())], self._asked)

    def _said_in(self, raw: Raw) -> tuple[Evidence, ...]:
        said = NodeEvidence.parse(only(raw, self._asked)).sources.values()
        return tuple(self._at_the_earliest(self._no_longer(one)) for one in said)

    def _no_longer(self, one: Evidence) -> Evidence:
        """An agent's word begins a skew early, so that is what any of them may have more."""
        if self._max_age is None or one.since is None or one.until is None or one.source in ENDLESS:
            return one
        return evolve(one, until=min(one.until, one.since + self._max_age + self._skew))

    def _at_the_earliest(self, one: Evidence) -> Evidence:
        return one if one.nonce_digest is None or one.since is None else evolve(one, since=one.since - self._skew)

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
        for name in self._view.take_changes():
            for one in self._listeners:
                one(name)
