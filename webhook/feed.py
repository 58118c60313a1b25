"""Keeps the fleet up to date with what the inventory and the evidence providers say."""

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from webhook.clock import Clock
from webhook.core.device import Inventory
from webhook.core.evidence import Evidence, combined
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceProvider, EvidenceUnavailableError
from webhook.evidence.static import StaticEvidence
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile
from webhook.telemetry import Metrics

log = structlog.get_logger(__name__)

# How many nodes are taken in before reviews get their turn again.
NODES_AT_A_TIME = 200


class Feed:
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
        self._said: dict[str, Mapping[str, Evidence]] = {}

    async def load(self) -> None:
        """The first reading; what cannot be read stops the start."""
        await self._take_in(await self._inventory.poll() or {})
        await self._poll_evidence()

    async def run(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            await self.refresh()

    async def refresh(self) -> None:
        """One look at everything."""
        try:
            inventory = await self._inventory.poll()
        except InventoryUnavailableError as exc:
            self._metrics.count_file_reload("inventory", "refused")
            log.warning("inventory refused, the old one stays", mistakes=exc.mistakes, file=str(self._inventory.path))
            return
        if inventory is not None:
            await self._take_in(inventory)
            self._metrics.count_file_reload("inventory", "reloaded")
            log.info("inventory reloaded", nodes=len(inventory), file=str(self._inventory.path))
        await self._poll_evidence()

    async def _take_in(self, inventory: Inventory) -> None:
        for name in [name for name in self._fleet.berths if name not in inventory]:
            self._fleet.remove(name)
        for number, node in enumerate(inventory.values()):
            self._fleet.put(node, self._clock())
            await breathe(number)
        for provider in self._providers:
            if isinstance(provider, StaticEvidence):
                provider.read_from_file(self._inventory.evidence)
        self._said.clear()

    async def _poll_evidence(self) -> None:
        is_new = False
        for provider in self._providers:
            try:
                said = await provider.poll()
            except EvidenceUnavailableError as exc:
                log.warning("evidence provider away, what it said stays until its own end", provider=provider.name)
                log.debug("evidence provider away", provider=provider.name, exc_info=exc)
                continue
            is_new = is_new or said is not self._said.get(provider.name)
            self._said[provider.name] = said
        if is_new:
            await self._take_evidence_in()

    async def _take_evidence_in(self) -> None:
        for number, name in enumerate(list(self._fleet.berths)):
            word = combined([said[name] for said in self._said.values() if name in said])
            self._fleet.prove(name, word, self._clock())
            await breathe(number)


async def breathe(number: int) -> None:
    """Let reviews have their turn now and then."""
    if number % NODES_AT_A_TIME == NODES_AT_A_TIME - 1:
        await asyncio.sleep(0)
