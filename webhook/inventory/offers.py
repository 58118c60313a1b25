"""What `kubectl get gpunodes` shows of free devices: whether a pod could be given them, in `status.offer`."""

import structlog

from webhook.core.fleet import Fleet
from webhook.core.offer import free_state_on_node
from webhook.core.raw import Raw
from webhook.kube.api_objects import ObjectClient
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.view import ObjectView
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# In one pass: where many nodes change at once, other work has its turn in between.
AT_A_TIME = 20


class Offers:
    """Writes the word where it has changed. An API server whose CRD is older drops it, so each word is written once."""

    def __init__(self, objects: ObjectClient, fleet: Fleet, clock: Clock, *, needs_evidence: bool) -> None:
        self.view: ObjectView[str | None] = ObjectView(offer_in)
        self._objects = objects
        self._fleet = fleet
        self._clock = clock
        self._needs_evidence = needs_evidence
        self._written: dict[str, str] = {}
        self._looked_at = -1
        self._due: dict[str, str] = {}

    def begin(self) -> None:
        """Elected: another leader may have written since."""
        self._written.clear()
        self._looked_at = -1

    async def step(self) -> None:
        self._fleet.advance(self._clock())
        if self.view.take_changes() or self._fleet.changes != self._looked_at:
            self._looked_at = self._fleet.changes
            self._written = {name: word for name, word in self._written.items() if name in self.view}
            self._due = {name: word for name in self.view.names() if (word := self._wanted(name))}
        for name in list(self._due)[:AT_A_TIME]:
            word = self._due.pop(name)
            self._written[name] = word
            await self._write(name, word)

    def _wanted(self, name: str) -> str:
        """Empty if it is written, or was, or there is no Node or no status."""
        indexed, shown = self._fleet.indexed_nodes.get(name), self.view.get(name)
        if indexed is None or shown is None:
            return ""
        word = free_state_on_node(self._fleet, indexed, needs_evidence=self._needs_evidence).value
        return "" if word in (shown, self._written.get(name)) else word

    async def _write(self, name: str, word: str) -> None:
        """Under the version that was read: the ledger's writes are not undone."""
        try:
            raw = await self._objects.get(name)
            if raw is None or not isinstance(raw.get("status"), dict):
                del self._written[name]
                return
            await self._objects.replace_status({**raw, "status": {**raw["status"], "offer": word}})
        except RefusedError as exc:
            log.warning("offer refused by the API server", node=name, problem=str(exc))
        except (StaleError, StoreUnavailableError):
            del self._written[name]
            self._looked_at = -1


def offer_in(raw: Raw) -> str | None:
    """None if there is no status yet: the ledger begins it."""
    status = raw.get("status")
    return str(status.get("offer") or "") if isinstance(status, dict) else None
