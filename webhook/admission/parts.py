"""The objects that one process is assembled from."""

from typing import Protocol

from attrs import field, frozen

from webhook.admission.fleet_updater import Staleness
from webhook.admission.reserving import Reserver
from webhook.admission.rules import Rules
from webhook.core.fleet import Fleet
from webhook.evidence.jwt.attestation import Attestation
from webhook.ledger import Ledger
from webhook.ledger.lapses import Lapses
from webhook.ledger.pods import PodSource
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics
from webhook.scoring.hints import HintService


class FleetSource(Protocol):
    """Keeps the fleet up to date."""

    @property
    def outdated(self) -> Staleness | None:
        """Why the fleet may be out of date; None if it is current."""

    async def load(self) -> None:
        """Reads everything once. Raises if something cannot be read."""

    async def wait_for_first_answers(self) -> None:
        """Returns when every evidence provider has answered once."""

    async def run(self, interval: float) -> None:
        """Runs until cancelled."""


@frozen
class Parts:
    """The objects that one process is assembled from."""

    fleet: Fleet
    ledger: Ledger
    reserver: Reserver
    fleet_source: FleetSource
    pods: PodSource
    rules: Rules
    clock: Clock
    metrics: Metrics
    notes: tuple[str, ...]
    attestation: Attestation | None = None
    hinting: HintService | None = None
    lapses: Lapses = field(factory=Lapses)
