"""The parts that one process works with."""

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
        """None while it is."""

    async def load(self) -> None:
        """The first readings; what cannot be read stops the start."""

    async def wait_for_first_answers(self) -> None:
        """Until everybody who is asked about evidence has answered once."""

    async def run(self, interval: float) -> None:
        """For ever."""


@frozen
class Parts:
    """What one process works with."""

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
