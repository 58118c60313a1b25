"""NodeEvidence objects in the API server: the elected reconciler writes them, all replicas watch them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
import structlog
from attrs import define, evolve, field

from webhook.core.evidence import Evidence, combined, predates_node
from webhook.core.raw import Raw, is_ours
from webhook.evidence import EvidenceProvider
from webhook.evidence.node_evidence import (
    SOURCES_WITHOUT_END,
    NodeEvidence,
    entry_in,
    has_entry,
    is_due,
    new_node_evidence,
    raw_entries,
    with_entries,
    with_sources,
)
from webhook.evidence.providers import ProviderPoll
from webhook.kube.api_objects import NodeExistence, ObjectClient
from webhook.kube.node import creation_time_of
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

POLL_EVERY = timedelta(seconds=5)
BATCH_SIZE = 200
MAX_ATTEMPTS = 3
# Consecutive failures after which a pass stops, so that an unavailable API server does not get 200 requests a pass.
MAX_FAILURES = 3


@define(eq=False, repr=False)
class EvidenceWriter:
    """Watches NodeEvidence; in `step` it asks the providers and writes their answers, each under the provider's name.

    A provider that is unavailable or has not answered yet changes nothing. `pushed` are sources that nodes push to:
    nodes have `first_report_timeout` for their first report after this process started.
    """

    _objects: ObjectClient
    _providers: Sequence[EvidenceProvider]
    _clock: Clock
    _is_current: Callable[[], bool]
    _nodes: NodeExistence
    _are_nodes_current: Callable[[], bool]
    _poll_every: timedelta = POLL_EVERY
    # Entries of a source that is no longer polled would stay forever, because static evidence does not expire.
    _retired: Collection[str] = ()
    _pushed: Collection[str] = ()
    _first_report_timeout: timedelta = timedelta()
    # How long after a proof another answer to its challenge, or to an earlier one, could still be accepted.
    _replay_window: timedelta = timedelta()
    _count_error: Callable[[str], None] = lambda _: None
    _started_at: datetime | None = field(default=None, init=False)
    _reported: set[tuple[str, str]] = field(factory=set, init=False)
    _poll_at: datetime | None = field(default=None, init=False)
    _todo: dict[str, None] = field(factory=dict, init=False)
    _refused: dict[str, str] = field(factory=dict, init=False)
    view: ObjectView[Raw] = field(factory=lambda: ObjectView(lambda raw: raw), init=False)
    creation_times: ObjectView[datetime | None] = field(factory=lambda: ObjectView(creation_time_in), init=False)
    _poll_round: ProviderPoll = field(init=False)
    _answers: dict[str, Mapping[str, Evidence]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._poll_round = ProviderPoll(self._providers, self._count_error)
        self._answers = {name: {} for name in self._retired}

    def begin(self) -> None:
        """This process was elected: its answers may be older than what another leader has written, including a ban."""
        self._answers = {name: {} for name in self._retired}
        self._poll_round.begin()
        self._poll_at = None

    async def step(self) -> None:
        """One pass. What fails is left for the next one."""
        if not self._is_current():
            return
        now = self._clock()
        self._started_at = self._started_at or now
        self._todo.update(dict.fromkeys(self._changed_names()))
        if self._poll_at is None or now >= self._poll_at:
            self._poll_at = now + self._poll_every
            await self._poll()
        failures = 0
        for name in list(self._todo)[:BATCH_SIZE]:
            del self._todo[name]
            failures = 0 if await self._attempt(name, now) else failures + 1
            if failures >= MAX_FAILURES:
                return

    def is_update_pending(self, name: str) -> bool:
        """Whether the node's object is about to be updated: newer evidence is known, or a source may still report for
        the first time. A source that was just added has not withdrawn anything."""
        raw = self.view.get(name) or new_node_evidence(name)
        return bool(self._changed_entries(raw, name, self._clock())) or bool(self._awaited(raw, name))

    def awaits(self, name: str, sources: Collection[str]) -> bool:
        """Whether each of these sources may still report on the node for the first time."""
        return self._awaited(self.view.get(name) or new_node_evidence(name), name).issuperset(sources)

    def _awaited(self, raw: Raw, name: str) -> set[str]:
        is_early = self._started_at is None or self._clock() - self._started_at < self._first_report_timeout
        pushing = [one for one in self._pushed if is_early and (one, name) not in self._reported]
        return {one for one in (*pushing, *self._poll_round.unanswered) if not has_entry(raw, one)}

    def _changed_names(self) -> list[str]:
        news = [*self.view.take_changes(), *self.creation_times.take_changes()]
        for name in news:
            raw = self.view.get(name)
            self._reported.update((one, name) for one in self._pushed if raw is not None and has_entry(raw, one))
        return news

    async def _poll(self) -> None:
        self._answers.update(await self._poll_round.answers())
        names = self.view.names().union(*self._answers.values())
        self._todo.update(dict.fromkeys(sorted(names)))

    async def _attempt(self, name: str, now: datetime) -> bool:
        """Whether the API server has responded."""
        try:
            await self._reconcile(name, now)
        except RefusedError as exc:
            if self._refused.get(name) != str(exc):
                log.warning("evidence rejected by the API server", node=name, problem=str(exc))
            self._refused[name] = str(exc)
        except (StaleError, StoreUnavailableError) as exc:
            log.warning("evidence left for the next pass", node=name, error=type(exc).__name__)
            self._todo[name] = None
            return isinstance(exc, StaleError)
        else:
            self._refused.pop(name, None)
        return True

    async def _reconcile(self, name: str, now: datetime) -> None:
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self._write(name, now)
            except StaleError:
                before = self._owned_entries(name)
                await self._reread(name)
                if self._owned_entries(name) != before:
                    self.begin()  # another leader or a user has written since: the answers may be older
                    raise
        return await self._write(name, now)

    async def _reread(self, name: str) -> None:
        raw = await self._objects.get(name)
        if raw is None:
            self.view.forget(name)
        else:
            self.view.changed(raw)

    def _owned_entries(self, name: str) -> Raw:
        """The entries that only the leader writes."""
        return {
            source: one for source, one in raw_entries(self.view.get(name) or {}).items() if source in self._answers
        }

    async def _write(self, name: str, now: datetime) -> None:
        raw = self.view.get(name)
        if raw is not None and self._can_be_deleted(raw, name, now) and await self._nodes.is_gone(name):
            await self._delete(raw, name)
            return
        entries = self._changed_entries(raw or new_node_evidence(name), name, now)
        if not entries:
            return
        if raw is None:
            raw = await self._objects.create(new_node_evidence(name))
            self.view.changed(raw)
        self.view.changed(await self._objects.replace_status(with_entries(raw, entries)))
        log.info("evidence written", node=name, sources=sorted(entries))

    def _can_be_deleted(self, raw: Raw, name: str, now: datetime) -> bool:
        """There is no Node, no source reports one, and what was written cannot be replayed. Objects that we did not
        create, or cannot parse, stay. An interrupted watch or a provider without an answer proves nothing."""
        if not self._are_nodes_current() or name in self.creation_times or self._poll_round.unanswered:
            return False
        if not is_ours(raw) or any(name in entries for entries in self._answers.values()):
            return False
        left = [entry_in(raw, source) for source in raw_entries(raw) if source not in self._answers]
        return all(one is not None and self._has_expired(one, now) for one in left)

    def _has_expired(self, one: Evidence, now: datetime) -> bool:
        """If the last answered challenge were forgotten too early, it could be answered a second time."""
        proven = max((moment for moment in (one.since, one.challenged) if moment is not None), default=None)
        return one.until is not None and proven is not None and max(one.until, proven + self._replay_window) <= now

    async def _delete(self, raw: Raw, name: str) -> None:
        """Deletes the version that was read: a proof that is written in the meantime keeps the object."""
        await self._objects.delete(raw)
        self.view.forget(name)
        self._reported = {(source, other) for source, other in self._reported if other != name}
        log.info("evidence deleted with its Node", node=name)

    def _changed_entries(self, raw: Raw, name: str, now: datetime) -> dict[str, Evidence | None]:
        """The entries to write, by source; None for an entry to remove."""
        found: dict[str, Evidence | None] = {}
        for source, entries in self._answers.items():
            current, desired = entry_in(raw, source), entries.get(name)
            desired = desired and evolve(desired, source=source)
            is_unreadable = current is None and has_entry(raw, source)
            if is_unreadable or self._is_of_older_node(current, desired, name) or is_due(current, desired, now=now):
                found[source] = desired
        return found

    def _is_of_older_node(self, current: Evidence | None, desired: Evidence | None, name: str) -> bool:
        """The written entry is about an earlier node of this name, and the known one is not."""
        born = self.creation_times.get(name)
        return (
            current is not None
            and desired is not None
            and predates_node(current, born)
            and not predates_node(desired, born)
        )


def creation_time_in(raw: Raw) -> datetime | None:
    try:
        return creation_time_of(raw)
    except msgspec.ValidationError:
        return None


@define(eq=False, repr=False)
class EvidenceView:
    """The known evidence of every node: from NodeEvidence objects, and from this process's own providers.

    It also covers nodes that have not been observed yet. An object that cannot be parsed leaves the known evidence. All
    sources in `required` must vouch for a node; other sources are ignored. A proof is dated by the clock of its signer,
    so it may have been made a `skew` earlier. Evidence older than `max_age` is ignored, whatever expiry was written
    with it.
    """

    _own: Mapping[str, Evidence]
    _required: Collection[str]
    _skew: timedelta = timedelta()
    _max_age: timedelta | None = None
    _listeners: list[Callable[[str], None]] = field(factory=list, init=False)
    _view: ObjectView[tuple[Evidence, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._view = ObjectView(self._evidence_in)

    def notify(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each node whose evidence changes."""
        self._listeners.append(listener)

    def combined_evidence(self, name: str) -> Evidence | None:
        own = [self._own[name]] if name in self._own else []
        return combined([*own, *(self._view.get(name) or ())], self._required)

    def _evidence_in(self, raw: Raw) -> tuple[Evidence, ...]:
        entries = NodeEvidence.parse(with_sources(raw, self._required)).sources.values()
        return tuple(self._with_skew(self._with_max_age(one)) for one in entries)

    def _with_max_age(self, one: Evidence) -> Evidence:
        """Limit the age. An agent's evidence begins one skew early, so every source is allowed one skew more."""
        if self._max_age is None or one.since is None or one.until is None or one.source in SOURCES_WITHOUT_END:
            return one
        return evolve(one, until=min(one.until, one.since + self._max_age + self._skew))

    def _with_skew(self, one: Evidence) -> Evidence:
        return one if one.nonce_digest is None or one.since is None else evolve(one, since=one.since - self._skew)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._view.replaced(objects)
        self._notify_listeners()

    def changed(self, raw: Raw) -> None:
        self._view.changed(raw)
        self._notify_listeners()

    def deleted(self, raw: Raw) -> None:
        self._view.deleted(raw)
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for name in self._view.take_changes():
            for one in self._listeners:
                one(name)
