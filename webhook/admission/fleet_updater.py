"""Keeps the fleet up to date with what the inventory and the evidence providers say."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from attrs import frozen

from webhook.core.device import Inventory, Node
from webhook.core.evidence import Evidence, combined
from webhook.core.evidence_changes import Changes
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceProvider
from webhook.evidence.jwt.jwt_svid import SOURCE as JWT_SVID
from webhook.evidence.providers import ProviderPoll
from webhook.evidence.static import StaticEvidence
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics

log = structlog.get_logger(__name__)

# How many nodes are taken in before reviews get their turn again.
NODES_AT_A_TIME = 200
# Between two looks for a first answer, and how many of them pass between two words about it.
FIRST_PAUSE = 0.5
LOOKS_A_WORD = 60


@frozen
class Staleness:
    """Why what is known may not be what there is, as a sentence. `is_blind`: changes are missed while this lasts; else
    it is known what is wrong, and decisions go by what was known before."""

    why: str
    is_blind: bool


class FleetUpdater:
    """Polls, and tells the fleet what is new. A provider that fails changes nothing."""

    def __init__(
        self,
        fleet: Fleet,
        inventory: InventoryFile,
        providers: Sequence[EvidenceProvider],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._fleet = fleet
        self._inventory = inventory
        self._providers = providers
        self._clock = clock
        self._metrics = metrics
        self._round = ProviderPoll(providers, metrics.count_provider_error)
        self._changes = Changes(fleet, metrics.count_evidence_change)
        self._said: dict[str, Mapping[str, Evidence]] = {}
        self._listed: frozenset[str] = frozenset()
        # Whether the fleet knows all that was said.
        self._is_told = False
        # Sources that have said something newer while the providers were asked.
        self._newer: set[str] = set()
        self.outdated: Staleness | None = None

    async def load(self) -> None:
        """The first reading; what cannot be read stops the start."""
        await self._take_in(await self._inventory.poll() or {})
        await self._poll_evidence()

    async def first_answers(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Until every provider has answered once: who has not been asked yet would have pods refused for nothing."""
        looks = 0
        while self._round.unanswered:
            if looks % LOOKS_A_WORD == 0:
                log.warning(
                    "not ready: the first answer of a provider is waited for", providers=sorted(self._round.unanswered)
                )
            looks += 1
            await sleep(FIRST_PAUSE)
            await self._poll_evidence()
        self._changes.since_last()  # from here on

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self.refresh()

    async def refresh(self) -> None:
        """One look at everything."""
        inventory = await self._new_inventory()
        if inventory is not None:
            await self._take_in(inventory)
            self._metrics.count_file_reload("inventory", "reloaded")
            log.info("inventory reloaded", nodes=len(inventory), file=str(self._inventory.path))
        await self._poll_evidence()
        self._tell_changes()

    def _tell_changes(self) -> None:
        """Those that time alone has made too. In a cluster the reconciler tells of them, with an Event on the Node."""
        self._fleet.advance(self._clock())
        for one in self._changes.since_last():
            tell = log.warning if one.is_worse else log.info
            tell("evidence changed", node=one.node, was=str(one.before), now=str(one.after), by=one.source)

    async def _new_inventory(self) -> Inventory | None:
        """None if nothing is new, or what is new cannot be used: evidence is asked for all the same."""
        try:
            inventory = await self._inventory.poll()
        except InventoryUnavailableError as exc:
            mistakes = "; ".join(exc.mistakes)
            self.outdated = Staleness(
                f"{self._inventory.path} cannot be used, its last good content counts: {mistakes}", False
            )
            self._metrics.count_file_reload("inventory", "refused")
            log.warning("inventory refused, the old one stays", mistakes=exc.mistakes, file=str(self._inventory.path))
            return None
        if inventory is not None:
            self.outdated = None
        return inventory

    async def _take_in(self, inventory: Inventory) -> None:
        inventory = {name: Node(name) for name in self._mapped()} | dict(inventory)
        self._listed = frozenset(inventory)
        inventory = {name: Node(name) for name in self._named()} | inventory
        for name in [name for name in self._fleet.indexed_nodes if name not in inventory]:
            self._fleet.remove(name)
        for number, node in enumerate(inventory.values()):
            self._fleet.put(node, self._clock())
            await breathe(number)
        for provider in self._providers:
            if isinstance(provider, StaticEvidence):
                provider.read_from_file(self._inventory.evidence)
        self._is_told = False

    def _mapped(self) -> set[str]:
        """Nodes that are known by a map of hashes alone."""
        return {name for one in self._providers if isinstance(one, StaticEvidence) for name in one.mapped}

    def _named(self) -> set[str]:
        """Nodes that a provider names which we ask. A proof was sent by the node itself, and would keep it for ever."""
        asked = [said for source, said in self._said.items() if source not in (StaticEvidence.name, JWT_SVID)]
        return {name for said in asked for name in said}

    def _know_named(self) -> None:
        """Who is named no more goes with the next news: before, it is told that there is no evidence of it."""
        named, now = self._named(), self._clock()
        known = self._listed | named
        for name in [
            name for name, one in self._fleet.indexed_nodes.items() if name not in known and one.evidence is None
        ]:
            self._fleet.remove(name)
        for name in named - self._fleet.indexed_nodes.keys():
            self._fleet.put(Node(name), now)

    async def _poll_evidence(self) -> None:
        self._newer.clear()
        answers = await self._round.answers()
        for name, said in answers.items():
            if name in self._newer:
                continue
            self._is_told = self._is_told and said is self._said.get(name)
            self._said[name] = said
        if not self._is_told:
            await self._take_evidence_in()
            self._is_told = True

    async def _take_evidence_in(self) -> None:
        self._know_named()
        for number, name in enumerate(list(self._fleet.indexed_nodes)):
            self._prove(name)
            await breathe(number)

    def prove(self, source: str, name: str, said: Mapping[str, Evidence]) -> None:
        """`source` has news of one node: the next decision uses it, without waiting for the next poll."""
        self._said[source] = said
        self._newer.add(source)
        self._prove(name)

    def _prove(self, name: str) -> None:
        word = combined([said[name] for said in self._said.values() if name in said], self._round.asked)
        self._fleet.set_evidence(name, word, self._clock())


async def breathe(number: int) -> None:
    """Let reviews have their turn now and then."""
    if number % NODES_AT_A_TIME == NODES_AT_A_TIME - 1:
        await asyncio.sleep(0)
