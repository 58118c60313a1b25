"""Keeps the fleet up to date from the inventory file and the evidence providers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from attrs import define, field, frozen

from webhook.core.device import Inventory, Node
from webhook.core.evidence import Evidence, combined
from webhook.core.evidence_changes import Changes
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceProvider
from webhook.evidence.providers import PUSHED, ProviderPoll
from webhook.evidence.static import StaticEvidence
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics

log = structlog.get_logger(__name__)

# Nodes that are processed before reviews get their turn.
NODES_AT_A_TIME = 200
# Seconds between two polls for a first answer, and polls between two warnings about it.
FIRST_PAUSE = 0.5
LOOKS_PER_WARNING = 60


@frozen
class Staleness:
    """Why the fleet may be out of date, as a sentence. `is_blind`: changes are missed while this lasts. Otherwise the
    cause is known, and decisions use the last good state."""

    why: str
    is_blind: bool


@define(eq=False, repr=False)
class FleetUpdater:
    """Polls the inventory and the providers and updates the fleet. A provider that fails changes nothing."""

    _fleet: Fleet
    _inventory: InventoryFile
    _providers: Sequence[EvidenceProvider]
    _clock: Clock
    _metrics: Metrics
    _answers: dict[str, Mapping[str, Evidence]] = field(factory=dict, init=False)
    _listed: frozenset[str] = field(factory=frozenset, init=False)
    # Whether the fleet has all answers.
    _is_applied: bool = field(default=False, init=False)
    # Sources that reported something newer while the providers were polled.
    _newer_sources: set[str] = field(factory=set, init=False)
    outdated: Staleness | None = field(default=None, init=False)
    _round: ProviderPoll = field(init=False)
    _changes: Changes = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._round = ProviderPoll(self._providers, self._metrics.count_provider_error)
        self._changes = Changes(self._fleet, self._metrics.count_evidence_change)

    async def load(self) -> None:
        """Reads everything once. Raises if the inventory cannot be read."""
        await self._apply_inventory(await self._inventory.poll() or {})
        await self._poll_evidence()

    async def wait_for_first_answers(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Returns when every provider has answered once. Before that, pods would be denied for nothing."""
        looks = 0
        while self._round.unanswered:
            if looks % LOOKS_PER_WARNING == 0:
                log.warning(
                    "not ready: waiting for the first answer of a provider", providers=sorted(self._round.unanswered)
                )
            looks += 1
            await sleep(FIRST_PAUSE)
            await self._poll_evidence()
        self._changes.since_last()  # changes are reported from here on

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self.refresh()

    async def refresh(self) -> None:
        """One poll of the inventory and the providers."""
        inventory = await self._new_inventory()
        if inventory is not None:
            await self._apply_inventory(inventory)
            self._metrics.count_file_reload("inventory", "reloaded")
            log.info("inventory reloaded", nodes=len(inventory), file=str(self._inventory.path))
        await self._poll_evidence()
        self._report_changes()

    def _report_changes(self) -> None:
        """Logs changes of evidence, including those by the passage of time. In a cluster the reconciler reports them,
        with an Event on the Node."""
        self._fleet.advance(self._clock())
        for one in self._changes.since_last():
            tell = log.warning if one.is_worse else log.info
            tell("evidence changed", node=one.node, was=str(one.before), now=str(one.after), by=one.source)

    async def _new_inventory(self) -> Inventory | None:
        """None if the file is unchanged or cannot be used. Evidence is polled in both cases."""
        try:
            inventory = await self._inventory.poll()
        except InventoryUnavailableError as exc:
            mistakes = "; ".join(exc.mistakes)
            self.outdated = Staleness(
                f"{self._inventory.path} cannot be used, its last valid content is in force: {mistakes}", False
            )
            self._metrics.count_file_reload("inventory", "refused")
            log.warning(
                "inventory file rejected, the previous content stays",
                mistakes=exc.mistakes,
                file=str(self._inventory.path),
            )
            return None
        if inventory is not None:
            self.outdated = None
        return inventory

    async def _apply_inventory(self, inventory: Inventory) -> None:
        inventory = {name: Node(name) for name in self._nodes_in_hash_map()} | dict(inventory)
        self._listed = frozenset(inventory)
        inventory = {name: Node(name) for name in self._nodes_named_by_providers()} | inventory
        for name in [name for name in self._fleet.indexed_nodes if name not in inventory]:
            self._fleet.remove(name)
        for number, node in enumerate(inventory.values()):
            self._fleet.put(node, self._clock())
            await yield_to_reviews(number)
        for provider in self._providers:
            if isinstance(provider, StaticEvidence):
                provider.read_from_file(self._inventory.evidence)
        self._is_applied = False

    def _nodes_in_hash_map(self) -> set[str]:
        """Nodes that only a map of hashes names."""
        return {name for one in self._providers if isinstance(one, StaticEvidence) for name in one.mapped}

    def _nodes_named_by_providers(self) -> set[str]:
        """Nodes named by a polled provider. Pushed evidence does not count: nodes send it themselves, and would stay in
        the fleet for ever."""
        asked = [by_node for source, by_node in self._answers.items() if source not in {StaticEvidence.name, *PUSHED}]
        return {name for by_node in asked for name in by_node}

    def _update_named_nodes(self) -> None:
        """Adds nodes that providers name. Removes nodes that no provider names any more, one poll late: first the fleet
        learns that they have no evidence."""
        named, now = self._nodes_named_by_providers(), self._clock()
        known = self._listed | named
        for name in [
            name for name, one in self._fleet.indexed_nodes.items() if name not in known and one.evidence is None
        ]:
            self._fleet.remove(name)
        for name in named - self._fleet.indexed_nodes.keys():
            self._fleet.put(Node(name), now)

    async def _poll_evidence(self) -> None:
        self._newer_sources.clear()
        answers = await self._round.answers()
        for source, by_node in answers.items():
            if source in self._newer_sources:
                continue
            self._is_applied = self._is_applied and by_node is self._answers.get(source)
            self._answers[source] = by_node
        if not self._is_applied:
            await self._apply_evidence()
            self._is_applied = True

    async def _apply_evidence(self) -> None:
        self._update_named_nodes()
        for number, name in enumerate(list(self._fleet.indexed_nodes)):
            self._update_evidence(name)
            await yield_to_reviews(number)

    def prove(self, source: str, name: str, by_node: Mapping[str, Evidence]) -> None:
        """Applies news of one node from `source`, without waiting for the next poll."""
        self._answers[source] = by_node
        self._newer_sources.add(source)
        self._update_evidence(name)

    def _update_evidence(self, name: str) -> None:
        evidence = combined([one[name] for one in self._answers.values() if name in one], self._round.names)
        self._fleet.set_evidence(name, evidence, self._clock())


async def yield_to_reviews(number: int) -> None:
    """Lets reviews run now and then."""
    if number % NODES_AT_A_TIME == NODES_AT_A_TIME - 1:
        await asyncio.sleep(0)
