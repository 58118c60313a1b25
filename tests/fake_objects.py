"""Objects with the API server's manners: versions, finalizers, a status apart, a watch that tells when it is let."""

import copy
from typing import Any

from tests.builders import Raw
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.kube.watch import WatchListener


class FakeObjects:
    """What was done is in `done`, in words. `listener` hears of it when the test calls `tell`."""

    def __init__(self, listener: WatchListener | None = None) -> None:
        self.objects: dict[str, Raw] = {}
        self.listener = listener
        self.done: list[str] = []
        self.is_away = False
        self.refused: set[str] = set()
        self.overtaken = 0  # how many writes somebody else will be faster than
        self.pruned: set[str] = set()  # members of a spec that the definition does not have
        self._events: list[tuple[str, Raw]] = []
        self._version = 0

    def put(self, raw: Raw) -> None:
        """Somebody else's hand."""
        self._keep(raw)

    def remove(self, name: str) -> None:
        self._version += 1
        gone = self.objects.pop(name)
        self._events.append(
            ("DELETED", {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}})
        )

    def status(self, name: str, **members: Any) -> None:
        raw = self.objects[name]
        self._keep({**raw, "status": {**raw.get("status", {}), **members}})

    def tell(self) -> None:
        """The watch catches up."""
        assert self.listener is not None
        events, self._events = self._events, []
        for kind, raw in events:
            (self.listener.deleted if kind == "DELETED" else self.listener.changed)(raw)

    async def get(self, name: str) -> Raw | None:
        self._answer(name)
        return copy.deepcopy(self.objects.get(name))

    async def create(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        self._answer(name)
        if name in self.objects:
            raise StaleError("it exists")
        self.done.append(f"create {name}")
        return self._keep({key: raw[key] for key in raw if key != "status"})

    async def replace(self, raw: Raw) -> Raw:
        return self._replaced(
            raw, "replace", {**raw, "status": self.objects.get(raw["metadata"]["name"], {}).get("status")}
        )

    async def replace_status(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        return self._replaced(raw, "status", {**self.objects.get(name, {}), "status": raw["status"]})

    async def delete(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        self._answer(name)
        current = self._current(raw)
        assert current["metadata"]["uid"] == raw["metadata"]["uid"]
        self.done.append(f"delete {name}")
        if current["metadata"].get("finalizers"):
            self._keep({**current, "metadata": {**current["metadata"], "deletionTimestamp": "2026-03-02T12:00:00Z"}})
        else:
            self.remove(name)

    def _replaced(self, raw: Raw, what: str, written: Raw) -> Raw:
        name = raw["metadata"]["name"]
        self._answer(name)
        if self.overtaken:
            self.overtaken -= 1
            self._keep(self.objects[name])
        self._current(raw)
        self.done.append(f"{what} {name}")
        return self._keep({key: part for key, part in written.items() if part is not None})

    def _answer(self, name: str) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        if name in self.refused:
            raise RefusedError("spec.devices: too many")

    def _current(self, raw: Raw) -> Raw:
        current = self.objects.get(raw["metadata"]["name"])
        if current is None or current["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            raise StaleError(raw["metadata"]["name"])
        return current

    def _keep(self, raw: Raw) -> Raw:
        self._version += 1
        kept = copy.deepcopy(raw)
        for member in self.pruned:
            kept.get("spec", {}).pop(member, None)
        kept["metadata"].setdefault("uid", f"uid-{self._version}")
        kept["metadata"]["resourceVersion"] = str(self._version)
        self.objects[kept["metadata"]["name"]] = kept
        self._events.append(("MODIFIED", copy.deepcopy(kept)))
        return copy.deepcopy(kept)
