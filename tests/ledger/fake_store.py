"""A fake store of GPUNodes that behaves like the API server: versions, validation, lagging watches, lost responses."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from tests.builders import Raw
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError

Held = Mapping[str, Mapping[str, Any]]


class Fault(Enum):
    """What happens to one write."""

    STALE = "somebody else was faster"
    NOT_WRITTEN = "no answer, and nothing written"
    ANSWER_LOST = "written, and no answer"


class FakeStore:
    """Objects by name. All versions are kept in order, so that watches can lag."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.history: list[Raw] = []
        self.faults: list[Fault] = []
        self.is_away = False
        self.refusals = 0  # how many of the next writes are refused
        self.writes = 0

    def apply(self, raw: Raw) -> None:
        """Write a spec as another client; the status stays. A new object has no status."""
        name = raw["metadata"]["name"]
        old = self.objects.get(name, {})
        self._keep({**raw, "status": raw.get("status", old.get("status", {}))})

    def delete(self, name: str) -> None:
        """Deletes the object at once, unless it has a finalizer."""
        raw = self.objects[name]
        if raw["metadata"].get("finalizers"):
            self._keep({**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
        else:
            del self.objects[name]

    async def put(self, raw: Raw) -> Raw:
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailableError("away")
        name = raw["metadata"]["name"]
        current = self._current(raw)
        kept = self._keep({**raw, "status": current["status"]})
        if "deletionTimestamp" in raw["metadata"] and not raw["metadata"].get("finalizers"):
            del self.objects[name]
        return copy.deepcopy(kept)

    async def get(self, name: str) -> Raw | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailableError("away")
        return copy.deepcopy(self.objects.get(name))

    async def put_status(self, raw: Raw) -> Raw:
        await asyncio.sleep(0)
        fault = self.faults.pop(0) if self.faults else None
        if self.is_away or fault is Fault.NOT_WRITTEN:
            raise StoreUnavailableError("away")
        if self.refusals:
            self.refusals -= 1
            raise RefusedError("not this one")
        name = raw["metadata"]["name"]
        current = self._current(raw)
        if fault is Fault.STALE:
            raise StaleError(name)
        check_rules(current["status"].get("held", {}), raw["status"]["held"])
        self.writes += 1
        kept = self._keep({**current, "status": raw["status"]})
        if fault is Fault.ANSWER_LOST:
            raise StoreUnavailableError("the answer was lost")
        return copy.deepcopy(kept)

    def _current(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        current = self.objects.get(name)
        if current is None or current["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            raise StaleError(name)
        return current

    def _keep(self, raw: Raw) -> Raw:
        kept = copy.deepcopy(raw)
        kept["metadata"]["resourceVersion"] = str(len(self.history) + 1)
        self.objects[kept["metadata"]["name"]] = kept
        self.history.append(kept)
        return kept

    @contextmanager
    def away(self) -> Iterator[None]:
        self.is_away = True
        yield
        self.is_away = False


def check_rules(old: Held, new: Held) -> None:
    """The validation rules of the CRD. The e2e tests show that the real ones refuse the same."""
    for slot, before in old.items():
        after = new.get(slot)
        is_going, is_awaited = before["phase"] == "releasing", before.get("delivery") == "awaited"
        if after is None or after["reservation"] != before["reservation"]:
            if not (is_going or is_awaited):
                raise RefusedError(f"{slot} is held")
            continue
        keeps = after["namespace"] == before["namespace"] and after["digest"] == before["digest"]
        keeps_pod = "uid" not in before or after.get("uid") == before["uid"]
        goes_on = not is_going or after["phase"] == "releasing"
        stays_final = before["phase"] != "finalized" or after["phase"] != "pending"
        stays_chosen = is_awaited or after.get("delivery") != "awaited"
        if not (keeps and keeps_pod and goes_on and stays_final and stays_chosen):
            raise RefusedError(f"{slot} changes what may not change")


class Watch:
    """One replica's watch, which lags as far as the test wants."""

    def __init__(self, store: FakeStore, learn: Callable[[Raw], None]) -> None:
        self._store = store
        self._learn = learn
        self._seen = 0

    def catch_up(self, events: int | None = None) -> None:
        until = len(self._store.history) if events is None else min(self._seen + events, len(self._store.history))
        for raw in self._store.history[self._seen : until]:
            self._learn(copy.deepcopy(raw))
        self._seen = until

    def relist(self) -> None:
        """After a restart or a 410: a list of the current objects."""
        for raw in self._store.objects.values():
            self._learn(copy.deepcopy(raw))
        self._seen = len(self._store.history)


def gpu_node(name: str, *uuids: str, shares: Mapping[str, int] | None = None) -> Raw:
    devices = [{"uuid": uuid, "shares": (shares or {}).get(uuid, 1)} for uuid in uuids]
    return {
        "apiVersion": "gpuwarden.io/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": name},
        "spec": {"devices": devices},
    }
