"""Writes `status.offer` of GPUNodes: whether the node's free devices can be given to a pod, for `kubectl get
gpunodes`."""

import structlog

from webhook.core.fleet import Fleet
from webhook.core.offer import free_state_on_node
from webhook.core.raw import Raw
from webhook.kube.api_objects import ObjectClient
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Nodes per pass, so that other tasks get to run in between.
BATCH_SIZE = 20


class Offers:
    """Writes the values that have changed, each once: an API server with an older CRD drops the field."""

    def __init__(self, objects: ObjectClient, fleet: Fleet, clock: Clock, *, needs_evidence: bool) -> None:
        self.view: ObjectView[str | None] = ObjectView(offer_in)
        self._objects = objects
        self._fleet = fleet
        self._clock = clock
        self._needs_evidence = needs_evidence
        self._written: dict[str, str] = {}
        self._seen_changes = -1
        self._due: dict[str, str] = {}

    def begin(self) -> None:
        """This process was elected: another leader may have written since."""
        self._written.clear()
        self._seen_changes = -1

    async def step(self) -> None:
        self._fleet.advance(self._clock())
        if self.view.take_changes() or self._fleet.changes != self._seen_changes:
            self._seen_changes = self._fleet.changes
            self._written = {name: value for name, value in self._written.items() if name in self.view}
            self._due = {name: value for name in self.view.names() if (value := self._wanted(name))}
        for name in list(self._due)[:BATCH_SIZE]:
            value = self._due.pop(name)
            self._written[name] = value
            await self._write(name, value)

    def _wanted(self, name: str) -> str:
        """Empty if the value is current or was written before, or if there is no Node or no status."""
        indexed, shown = self._fleet.indexed_nodes.get(name), self.view.get(name)
        if indexed is None or shown is None:
            return ""
        value = free_state_on_node(self._fleet, indexed, needs_evidence=self._needs_evidence).value
        return "" if value in (shown, self._written.get(name)) else value

    async def _write(self, name: str, value: str) -> None:
        """Writes under the version that was read, so that it overwrites no write of the ledger."""
        try:
            raw = await self._objects.get(name)
            if raw is None or not isinstance(raw.get("status"), dict):
                del self._written[name]
                return
            await self._objects.replace_status({**raw, "status": {**raw["status"], "offer": value}})
        except RefusedError as exc:
            log.warning("offer rejected by the API server", node=name, problem=str(exc))
        except (StaleError, StoreUnavailableError):
            del self._written[name]
            self._seen_changes = -1


def offer_in(raw: Raw) -> str | None:
    """None if there is no status yet: the ledger creates it."""
    status = raw.get("status")
    return str(status.get("offer") or "") if isinstance(status, dict) else None
