"""The injections of nodes in force: which one the GPUNode of each node should say.

Where kube-scheduler allocates the GPUs of a node, nothing is reserved. Reservations begin there when no claim can be
allocated any more: all proof devices have been closed for some time, and the GPUs of claims are marked in the GPUNode.
"""

from collections.abc import Callable, Collection
from datetime import datetime

from attrs import define, field

from webhook.core.fleet import Fleet
from webhook.core.injection import NATIVE, injection_of_node, known_injection
from webhook.core.proof_devices import KEPT_AFTER_END
from webhook.dra.written_slices import WrittenSlices
from webhook.runtime.clock import Clock


@define(eq=False, repr=False)
class NodeInjections:
    """`is_current` is about the watches of claims, proof devices and nodes. Without proof devices nothing is waited
    for."""

    _fleet: Fleet
    _clock: Clock
    _written: WrittenSlices | None = None
    _is_current: Callable[[], bool] = lambda: True
    _changed: set[str] = field(init=False)
    # Since when this leader has seen all proof devices of a node closed, and how often they had been open before.
    _closed_since: dict[str, tuple[datetime, int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._changed = self._fleet.collect_changes()

    def begin(self) -> None:
        """This process was elected: another leader may have opened devices since."""
        self._closed_since.clear()
        self._changed.update(self._fleet.indexed_nodes)

    def to_write(self, node: str, stored: str | None) -> str | None:
        """The injection of the node that its GPUNode should say; None if it says none and the Node is not known."""
        indexed = self._fleet.indexed_nodes.get(node)
        if indexed is None:
            return stored
        wanted = injection_of_node(indexed.labels, self._fleet.injection)
        value = NATIVE if wanted is None else wanted.value
        if wanted is None or stored is None or known_injection(stored) is not None:
            self._closed_since.pop(node, None)
            return value
        return value if self._is_closed(node) else stored

    def take_changes(self) -> Collection[str]:
        """The nodes with GPUs whose GPUNode should say something else since the last call."""
        todo = self._changed | self._closed_since.keys()
        self._changed.clear()
        return [node for node in sorted(todo) if self._is_due(node)]

    def _is_due(self, node: str) -> bool:
        indexed = self._fleet.indexed_nodes.get(node)
        if indexed is None:
            self._closed_since.pop(node, None)
            return False
        stored = indexed.node.injection
        return bool(indexed.node.devices) and self.to_write(node, stored) != stored

    def _is_closed(self, node: str) -> bool:
        """Whether no scheduler allocates a proof device of the node any more: each is closed, and one that has not seen
        it yet would have allocated by now."""
        if self._written is None:
            return True
        now, openings = self._clock(), self._written.openings(node)
        since, before = self._closed_since.get(node, (now, openings))
        are_closed = all(one.is_closed for one in self._written.devices(node).values())
        if not (self._is_current() and are_closed and openings == before):
            since = now
        self._closed_since[node] = since, openings
        return now >= since + KEPT_AFTER_END
