"""Keeps the last known state of cluster-scoped objects from a watch, and which of them changed."""

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import structlog

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.watch import WatchListener

log = structlog.get_logger(__name__)

State = TypeVar("State")


class ObjectView(Generic[State]):
    """The extracted state of each object. Callers add the answers of their own writes, which the watch repeats later.

    An object that cannot be parsed keeps its last state.
    """

    def __init__(self, extract: Callable[[Raw], State]) -> None:
        self._extract = extract
        self._states: dict[str, State] = {}
        self._versions: dict[str, int] = {}
        self._changes: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def get(self, name: str) -> State | None:
        return self._states.get(name)

    def names(self) -> set[str]:
        return set(self._states)

    def take_changes(self) -> list[str]:
        """The names of objects created, deleted or changed in their extracted state since the last call."""
        changes, self._changes = self._changes, {}
        return list(changes)

    # Called by the watch and with the answers of writes.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._versions.clear()  # after a restore of etcd, versions may be lower
        names = set()
        for raw in objects.values():
            names.add(raw["metadata"]["name"])
            self.changed(raw)
        for name in self._states.keys() - names:
            self.forget(name)

    def changed(self, raw: Raw) -> None:
        name, version = raw["metadata"]["name"], version_of(raw)
        if self._versions.get(name, -1) > version:
            return
        try:
            state = self._extract(raw)
        except GpuwardenError as exc:
            log.warning("unreadable object keeps its last state", kind=raw.get("kind"), name=name, problem=str(exc))
            return
        if name not in self._states or self._states[name] != state:
            self._changes[name] = None
        self._states[name], self._versions[name] = state, version

    def deleted(self, raw: Raw) -> None:
        if self._versions.get(raw["metadata"]["name"], -1) <= version_of(raw):
            self.forget(raw["metadata"]["name"])

    def forget(self, name: str) -> None:
        """Removes an object that no longer exists."""
        self._versions.pop(name, None)
        if name in self._states:
            del self._states[name]
            self._changes[name] = None


def version_of(raw: Raw) -> int:
    return int(raw["metadata"].get("resourceVersion") or 0)


class OnNode(Protocol):
    """The state of an object that is about one node."""

    @property
    def node(self) -> str:
        """Empty if it is about no single node."""


NodeState = TypeVar("NodeState", bound=OnNode)


class NodeView(ObjectView[NodeState]):
    """The objects of each node."""

    def __init__(self, extract: Callable[[Raw], NodeState]) -> None:
        super().__init__(extract)
        self._of_node: dict[str, dict[str, NodeState]] = {}
        self._node_of: dict[str, str] = {}
        self._changed_nodes: dict[str, None] = {}

    def nodes(self) -> set[str]:
        self._enter()
        return set(self._of_node)

    def of(self, node: str) -> list[NodeState]:
        self._enter()
        return list(self._of_node.get(node, {}).values())

    def take_changed_nodes(self) -> list[str]:
        """The nodes whose objects have changed since the last call."""
        self._enter()
        changed, self._changed_nodes = self._changed_nodes, {}
        return list(changed)

    def _enter(self) -> None:
        """Enters changed objects at their nodes."""
        for name in self.take_changes():
            last, current = self._node_of.pop(name, None), self.get(name)
            if last is not None:
                del self._of_node[last][name]
                if not self._of_node[last]:
                    del self._of_node[last]
                self._changed_nodes[last] = None
            if current is not None and current.node:
                self._node_of[name] = current.node
                self._of_node.setdefault(current.node, {})[name] = current
                self._changed_nodes[current.node] = None


class ListenerGroup:
    """Forwards one watch to several listeners."""

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
