"""What a watch has told of objects without a namespace, by name, and which of them are news."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import structlog

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.watch import WatchListener

log = structlog.get_logger(__name__)

Kept = TypeVar("Kept")


class ObjectView(Generic[Kept]):
    """What matters of each object. What is written is learnt from the answer: the watch only says it again later.

    One object that cannot be read stays as it was known.
    """

    def __init__(self, matters: Callable[[Raw], Kept]) -> None:
        self._matters = matters
        self._kept: dict[str, Kept] = {}
        self._versions: dict[str, int] = {}
        self._news: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def get(self, name: str) -> Kept | None:
        return self._kept.get(name)

    def names(self) -> set[str]:
        return set(self._kept)

    def take_changes(self) -> list[str]:
        """The names of what has come, gone or changed in what matters since this was last asked."""
        news, self._news = self._news, {}
        return list(news)

    # What the watch tells, and what a write is answered with.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._versions.clear()  # a list is right even where the store was put back to an earlier day
        names = set()
        for raw in objects.values():
            names.add(raw["metadata"]["name"])
            self.changed(raw)
        for name in self._kept.keys() - names:
            self.forget(name)

    def changed(self, raw: Raw) -> None:
        name, version = raw["metadata"]["name"], version_of(raw)
        if self._versions.get(name, -1) > version:
            return
        try:
            kept = self._matters(raw)
        except GpuwardenError as exc:
            log.warning("object left as it was known", kind=raw.get("kind"), name=name, problem=str(exc))
            return
        if name not in self._kept or self._kept[name] != kept:
            self._news[name] = None
        self._kept[name], self._versions[name] = kept, version

    def deleted(self, raw: Raw) -> None:
        if self._versions.get(raw["metadata"]["name"], -1) <= version_of(raw):
            self.forget(raw["metadata"]["name"])

    def forget(self, name: str) -> None:
        """There is no such object any more."""
        self._versions.pop(name, None)
        if name in self._kept:
            del self._kept[name]
            self._news[name] = None


def version_of(raw: Raw) -> int:
    return int(raw["metadata"].get("resourceVersion") or 0)


class ListenerGroup:
    """One watch for all who want to hear the same."""

    def __init__(self, *listeners: WatchListener) -> None:
        self._listeners = listeners

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for one in self._listeners:
            one.replaced(objects)

    def changed(self, raw: Raw) -> None:
        for one in self._listeners:
            one.changed(raw)

    def deleted(self, raw: Raw) -> None:
        for one in self._listeners:
            one.deleted(raw)
